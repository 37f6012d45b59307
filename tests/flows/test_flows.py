"""The stages on a tiny demo data, and the whole pipeline as a flow, twice."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from operated import Operated, tiny_pipeline
from places import PROJECT
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Failed
from pydantic import TypeAdapter
from tiny_detector import coco_annotations, commit_images, image_sample, rectangles

from demo.data import DemoData
from detectors.annotated import AnnotatedDetector
from detectors.config import DetectionConfig
from detectors.run import STORAGE_UNREACHABLE, detect_pending
from flows.collect import is_transient
from flows.detect import detect, detect_dataset, detect_flow
from flows.finetune import finetune, finetune_flow
from flows.pipeline import run_finetunings
from flows.pretrain import pretrain
from flows.settings import FinetuneSettings, PretrainSettings
from flows.supervisor import ChildFailed
from storage.object_store import StorageUnreachable


def newest(served: Operated, flow: str) -> dict:
    return served.ask("POST", "/flow_runs/filter", flows={"name": {"any_": [flow]}}, sort="START_TIME_DESC", limit=1)[0]


def tasks_of(served: Operated, *runs: dict) -> list[str]:
    """The names of the tasks of these flow runs: Prefect keeps a task run for each subflow, too."""
    tasks = served.ask("POST", "/task_runs/filter", flow_runs={"id": {"any_": [run["id"] for run in runs]}})
    return sorted(task["name"] for task in tasks if not task["state"]["state_details"]["child_flow_run_id"])


def artifacts_of(served: Operated, *runs: dict) -> dict[str, str]:
    """Key -> content of what these flow runs show; a result, which Prefect keeps as an artifact too, has no key."""
    ours = {"flow_run_id": {"any_": [run["id"] for run in runs]}}
    shown = [one for one in served.ask("POST", "/artifacts/filter", artifacts=ours) if one["key"]]
    assert len({one["key"] for one in shown}) == len(shown), "one artifact a key and run"
    return {one["key"]: one["data"] for one in shown}


def test_only_what_may_pass_is_tried_again():
    passing = [StorageUnreachable("no answer"), *(StorageUnreachable("busy", status) for status in (429, 500))]
    lasting = [StorageUnreachable("forbidden", 403), ValueError("list.tsv:3: no tab"), FileNotFoundError("list.tsv")]
    for error in (*passing, TimeoutError(), *lasting):
        assert is_transient(None, None, Failed(data=error)) is (error not in lasting)


# In place of `vlbert detect`: one dataset fails, storage is away once, and then it goes on as the real one.
DETECT = """
import os, pathlib, sys
if sys.argv[3] == "broken":
    print("no memory")
    sys.exit(3)
tried = pathlib.Path("tried")
if not tried.exists():
    tried.touch()
    sys.exit({unreachable})
os.chdir({project!r})
os.execv(sys.executable, [sys.executable, "-m", "vlbert", *sys.argv[1:]])
"""


@pytest.mark.usefixtures("prefect_server")
def test_a_storage_that_comes_back_costs_a_second_attempt_and_a_dataset_that_fails_keeps_no_other_waiting(
    served: Operated, demo_data: DemoData, collected: Path, tmp_path: Path, monkeypatch, caplog
):
    root = shutil.copytree(collected, tmp_path / "root")
    shutil.copytree(root / "captions", root / "broken")
    (root / "runs" / "images").mkdir(parents=True)  # no dataset: no shard is in it
    (tmp_path / "detectors").mkdir()
    (tmp_path / "detectors" / "__init__.py").touch()
    program = DETECT.format(unreachable=STORAGE_UNREACHABLE, project=str(PROJECT))
    (tmp_path / "detectors" / "run.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    quick = detect_dataset.with_options(retry_delay_seconds=0.1, retry_jitter_factor=None)
    monkeypatch.setattr("flows.detect.detect_dataset", quick)
    with pytest.raises(ChildFailed, match=r"vlbert detect .* broken .*\nit failed with exit status 3; its last lines:"):
        detect_flow(str(root), DetectionConfig("annotated", annotations=str(demo_data.annotations)))
    assert sum("Retry 1/3" in record.getMessage() for record in caplog.records) == 1
    detected = [file.parts[-4] for file in root.glob("*/regions/*/*.parquet")]
    assert detected == ["captions"] * 4

    run = newest(served, "detect-regions")
    assert (run["name"], run["state_type"]) == ("detect all", "FAILED")
    assert "ChildFailed" in run["state"]["message"]
    assert set(artifacts_of(served, run)) == {"regions-broken", "regions-captions"}
    assert re.search(r"^.*broken: (?s:.)*  \| no memory", caplog.text, re.MULTILINE)


def test_a_fine_tuning_that_fails_keeps_no_other_from_running_and_a_signal_ends_them_all():
    class Signal(BaseException):
        pass

    started = []

    def start(settings: FinetuneSettings) -> str:
        started.append(settings.run)
        if settings.run == "b":
            raise ValueError("no such file\nand more")
        if settings.run == "stop":
            raise Signal
        return settings.run

    runs = [FinetuneSettings(run=run) for run in "abc"]
    assert run_finetunings([runs[0], runs[2]], start) == ["a", "c"]
    with pytest.raises(RuntimeError, match="1 of 3 fine-tuning runs failed: b: no such file"):
        run_finetunings(runs, start)
    assert started == ["a", "c", "a", "b", "c"]
    with pytest.raises(Signal):
        run_finetunings([FinetuneSettings(run="stop"), *runs], start)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_pipeline_leads_to_a_fine_tuned_model_and_a_second_run_does_nothing_twice(
    served: Operated, pipeline_run: subprocess.CompletedProcess, pipeline_rerun: dict[str, list[str]]
):
    root = served.deployments.parent / "root"
    with get_client(sync_client=True) as client:
        named = FlowFilter(name=FlowFilterName(any_=["pretrain-vlbert"]))
        second, first = client.read_flow_runs(flow_filter=named, sort=FlowRunSort.START_TIME_DESC, limit=2)
    stages, stages_again = served.below(str(first.id)), served.below(str(second.id))
    pipeline, again = first.state.result(), second.state.result()
    shards = {"captions": 4, "held-out": 1, "coco": 2}
    assert {done.dataset: done.new_shards for done in pipeline.collected} == shards
    assert {name: found.new_shards for name, found in pipeline.detected.items()} == shards
    assert pipeline.detected["captions"].images == 24 < pipeline.detected["captions"].regions
    assert pipeline.pretrained.checkpoint == str(root / "runs/pretrain/step-0000004")
    assert 0 <= pipeline.pretrained.metrics["monitored_accuracy"] <= 1
    assert [trained.run for trained in pipeline.finetuned] == ["refcoco-with"]
    assert 0 < pipeline.finetuned[0].metrics["chance"] < 1
    start = f"VL-BERT from {pipeline.pretrained.checkpoint}, parts of its head: region_transform"
    assert any(start in line for line in served.logs(str(first.id)))
    for trained, dataset in ((pipeline.pretrained, "captions"), (pipeline.finetuned[0], "coco")):
        assert trained.detector == pipeline.detected[dataset].detector
        state = json.loads((Path(trained.checkpoint) / "state.json").read_text())
        assert trained.snapshot == state["data"][0]["snapshots"][-1]["snapshot"]
    assert all(one.peak_bytes > 0 for one in (pipeline.pretrained, *pipeline.finetuned, *pipeline.detected.values()))

    lines = pipeline_rerun["pretrain-vlbert/default"]
    assert "captions: nothing to download: all 4 shards are committed" in lines
    assert sum("nothing to detect" in line for line in lines) == 2 * 3  # in the logs of the stage and of the pipeline
    # The deployment of the fine-tuning names no detector, and the checkpoint `latest`.
    assert any(line.startswith("refcoco-with is complete") for line in pipeline_rerun["finetune/default"])
    assert {one.peak_bytes for one in (again.pretrained, *again.detected.values())} == {0}, "no process was started"
    same = {name: getattr(pipeline.pretrained, name) for name in ("seconds", "peak_bytes")}
    assert dataclasses.replace(again.pretrained, **same) == pipeline.pretrained
    assert {run["state_type"] for run in [*stages, *stages_again]} == {"COMPLETED"}

    # One task run for each group of shards, and one artifact for each table: never one for each image.
    collecting = ["captions from 00000", "captions from 00002", "coco from 00000", "held-out from 00000"]
    assert tasks_of(served, *stages) == sorted([*shards, *collecting])
    assert tasks_of(served, *stages_again) == sorted(shards)
    assert set(artifacts_of(served, *stages)) == {
        *(f"{stage}-{name}" for stage in ("images", "regions") for name in shards),
        "pretrain-pretrain",
        "finetune-refcoco-with",
    }


class Started(Exception):
    """A stage has started this command."""


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "pipeline_run")
def test_a_stage_or_an_evaluation_that_is_done_starts_no_process_and_one_with_other_settings_does(
    served: Operated, demo_data: DemoData, monkeypatch: pytest.MonkeyPatch
):
    root = served.deployments.parent / "root"
    parameters, work = tiny_pipeline(demo_data, root), str(root / "work")
    pretraining = TypeAdapter(PretrainSettings).validate_python(parameters["pretraining"])
    given = parameters["finetunings"][0] | {"pretraining": "pretrain", "evaluate": ["val", "testA"]}
    tuning = TypeAdapter(FinetuneSettings).validate_python(given)
    tuned = finetune_flow(str(root), work, tuning)
    assert [one.split for one in tuned.evaluated] == ["val", "testA"]
    folders = [Path(one.folder) for one in tuned.evaluated]
    assert folders[0] == root / "runs/refcoco-with/evaluations/val-step-0000004"
    assert tuned.evaluated[0].metrics == json.loads((folders[0] / "metrics.json").read_text())["metrics"]
    assert (folders[1] / "predictions.parquet").is_file()
    shown = artifacts_of(served, newest(served, "finetune"))["finetune-refcoco-with"]
    assert re.search(r"\| accuracy\\_published \| \d\.\d+ \|\n", shown), "and no paper's number beside it"

    def start(command: list[object], *_: object, **__: object) -> None:
        raise Started(" ".join(map(str, command)))

    for module in ("detect", "torchrun"):  # the corpus is looked at by its own program
        monkeypatch.setattr(f"flows.{module}.run_child", start)
    corpus = root / "work" / "text" / pretraining.resolved_recipe.run
    before = {file: file.stat().st_mtime_ns for folder in (corpus, *folders) for file in folder.iterdir()}
    pretrain(str(root), work, pretraining)
    assert finetune(str(root), work, tuning).evaluated == tuned.evaluated
    assert {file: file.stat().st_mtime_ns for file in before} == before

    again = dataclasses.replace(pretraining, overrides=(*pretraining.overrides, "--steps=5"))
    renamed, other_split = (dataclasses.replace(tuning, **new) for new in ({"run": "other"}, {"evaluate": ("testB",)}))
    with pytest.raises(Started, match="-m vlbert detect "):
        detect(str(root), "captions", DetectionConfig("annotated", annotations=str(demo_data.refcoco_instances)))
    with pytest.raises(Started, match=r"-m vlbert\.train "):
        pretrain(str(root), work, again)
    with pytest.raises(Started, match=r"-m vlbert\.train "):
        finetune(str(root), work, renamed)
    with pytest.raises(Started, match=r"-m vlbert\.evaluation\.evaluate "):
        finetune(str(root), work, other_split)


def test_a_detection_without_regions_for_most_images_fails_also_when_nothing_is_left(tmp_path: Path):
    images = [image_sample(number, rectangles(84, 112, number)) for number in range(3)]
    catalog = commit_images(tmp_path / "root", [images])
    file = coco_annotations(tmp_path / "a.json", {1: [(0, 0, 10, 10)]})
    detect_pending(catalog, AnnotatedDetector(file))
    with pytest.raises(ValueError, match="2 of 3 images have no regions, such as no_annotation: "):
        detect(str(tmp_path / "root"), "captions", DetectionConfig("annotated", annotations=str(file)))
