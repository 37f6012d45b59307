"""New image shards are detected without a command: by the clock, and because they were committed."""

import re
import shutil
from pathlib import Path

import pytest
from operated import ENDED, Operated, tiny_pipeline, wait_until
from pydantic import TypeAdapter

from demo.data import DemoData
from storage.collect.plan import CollectSettings
from storage.collect.run import collect


def scheduled(served: Operated) -> list[str]:
    """The runs of detect-regions/scheduled that the clock has not planned."""
    deployment = served.ask("GET", "/deployments/name/detect-regions/scheduled")["id"]
    found = served.ask("POST", "/flow_runs/filter", deployments={"id": {"any_": [deployment]}})
    return [run["id"] for run in found if not run["auto_scheduled"]]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_new_shards_of_a_flow_or_of_another_program_are_detected_once(
    served: Operated, demo_data: DemoData, tmp_path: Path
):
    root = tmp_path / "another root"
    source = tiny_pipeline(demo_data, root)["datasets"][0] | {"name": "photos", "rows_per_shard": 4}
    del source["detector"]
    half = tmp_path / "train.tsv"
    half.write_text("".join(demo_data.train_tsv.read_text().splitlines(keepends=True)[:12]))

    # Collected: the flow emits an event, which starts the scheduled run.
    known = scheduled(served)
    served.complete("collect-captions/default", root=str(root), dataset=source | {"captions": str(half)})
    wait_until(lambda: set(scheduled(served)) - set(known), 30)
    (run,) = set(scheduled(served)) - set(known)
    served.wait_for(run, lambda: served.state(run) in ENDED, 90)
    assert served.state(run) == "COMPLETED", served.account(run)
    parameters = served.ask("GET", f"/flow_runs/{run}")["parameters"]
    assert (parameters["root"], parameters["datasets"]) == (str(root), ["photos"])
    before = {file: file.stat().st_mtime_ns for file in root.glob("photos/regions/*/*.parquet")}
    assert sorted(file.stem for file in before) == ["00000", "00001", "00002"]

    # Copied: what another machine has collected from the whole list.
    other = str(tmp_path / "other")
    settings = TypeAdapter(CollectSettings).validate_python(source)
    collect(other, settings, lambda line: None)
    for file in sorted(Path(other, "photos/images").glob("0*"), key=lambda file: file.suffix == ".parquet"):
        if file.name[:5] > "00002":
            shutil.copy(file, root / "photos/images")  # manifests, which make shards visible, last
    printed = served.listen()
    parameters = {"root": str(root), "datasets": ["photos"]}
    runs = [served.start("detect-regions/scheduled", **parameters) for _ in range(2)]
    served.wait_for(runs[0], lambda: all(served.state(run) in ENDED for run in runs), 150)
    # One at a time: the second comes while the first is at work, and is not needed.
    assert sorted(served.state(run) for run in runs) == ["CANCELLED", "COMPLETED"]
    done = [found[1] for line in printed() if (found := re.search(r"photos: (\d+ of \d+) shards: ", line))]
    assert done == [f"{number} of 5" for number in range(1, 6)], "each once, and no other"
    assert {file: file.stat().st_mtime_ns for file in before} == before, "what was detected before stays as it was"
    after = {file.stem for file in root.glob("photos/regions/*/*.parquet")}
    assert after == {f"{number:05}" for number in range(8)}
