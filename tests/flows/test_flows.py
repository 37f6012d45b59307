"""The stages on a tiny demo data, most of them without Prefect, and the whole pipeline as a flow, twice."""

import base64
import dataclasses
import json
import logging
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from operated import Operated, tiny_pipeline
from places import PROJECT
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Failed
from pydantic import TypeAdapter
from s3 import s3_server
from s3_faults import faulty

from demo.data import DemoData
from detectors.config import DetectionConfig
from detectors.run import STORAGE_UNREACHABLE
from detectors.select import SelectionSettings
from flows.artifacts import key_of
from flows.collect import COMMITTED, collect_flow, network_failed, open_bucket, storage_failed
from flows.detect import NoReport, detect, detect_dataset, detect_flow, repeats
from flows.finetune import finetune, finetune_flow
from flows.pipeline import PipelineResult, each_in_turn, pretrain_vlbert
from flows.pretrain import pretrain
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.supervisor import ChildFailed
from storage.catalog import Catalog
from storage.collect import NothingStored, collect
from storage.download import DownloadSettings
from storage.object_store import StorageUnreachable, open_store
from training.log import last_metrics

IMAGES = "images"


def captions(demo_data: DemoData, file: Path | None = None, **changes: object) -> Dataset:
    """The captioned scenes as a dataset in shards of 10 rows, two a task."""
    settings = {
        "detector": DetectionConfig("annotated", annotations=str(demo_data.annotations)),
        "captions": str(file or demo_data.train_tsv),
        "download": DownloadSettings(
            deadline=1.5, retries=0, second_pass=0, allowed_hosts=(f"127.0.0.1:{demo_data.port}",)
        ),
        "rows_per_shard": 10,
        "shards_per_task": 2,
    }
    return Dataset("captions", **(settings | changes))


def refcoco(demo_data: DemoData) -> Dataset:
    detector = DetectionConfig("annotated", annotations=str(demo_data.refcoco_instances))
    return Dataset("refcoco+", detector=detector, images=str(demo_data.task_images), rows_per_shard=6)


@pytest.fixture(scope="module")
def collected(demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the captioned scenes; to be copied, not changed."""
    root = tmp_path_factory.mktemp("collected")
    collect(str(root), captions(demo_data), lambda line: None)
    return root


@pytest.fixture
def root(collected: Path, tmp_path: Path) -> str:
    """A root of the test's own with the captioned scenes collected."""
    return str(shutil.copytree(collected, tmp_path / "root"))


def of(root: str, dataset: str = "captions") -> Catalog:
    return Catalog(open_store(root), dataset)


def newest(client: SyncPrefectClient, flow: str) -> FlowRun:
    """The last run of this flow that a test has called: those that the clock plans are of a deployment."""
    named = FlowFilter(name=FlowFilterName(any_=[flow]))
    called = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(is_null_=True))
    return client.read_flow_runs(flow_filter=named, flow_run_filter=called, sort=FlowRunSort.START_TIME_DESC, limit=1)[
        0
    ]


def below(client: SyncPrefectClient, run: FlowRun) -> list[FlowRun]:
    """The flow runs that this one has started, in their order."""
    parent = FlowRunFilterParentFlowRunId(any_=[run.id])
    children = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent), limit=100)
    return sorted(children, key=lambda child: child.start_time)


def tasks_of(client: SyncPrefectClient, *runs: FlowRun) -> list[str]:
    """The names of the tasks of these flow runs: Prefect keeps a task run for each subflow, too."""
    flow_runs = FlowRunFilter(id=FlowRunFilterId(any_=[run.id for run in runs]))
    tasks = client.read_task_runs(flow_run_filter=flow_runs, limit=100)
    return sorted(task.name for task in tasks if not task.state.state_details.child_flow_run_id)


def artifacts_of(client: SyncPrefectClient, *runs: FlowRun) -> dict[str, str]:
    """Key -> content of what these flow runs show; a result, which Prefect keeps as an artifact too, has no key."""
    ours = {run.id for run in runs}
    shown = [one for one in client.read_artifacts(limit=200) if one.key and one.flow_run_id in ours]
    assert len({one.key for one in shown}) == len(shown), "one artifact a key and run"
    return {one.key: one.data for one in shown}


def logs_of(client: SyncPrefectClient, run: FlowRun, last: str) -> list[str]:
    """What the run has logged, once the server has `last`."""
    mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
    deadline = time.monotonic() + 20
    while True:
        messages = [line.message for line in client.read_logs(mine, limit=200)]
        if any(message.startswith(last) for message in messages):
            return messages
        assert time.monotonic() < deadline, messages
        time.sleep(0.2)


def committed_events(client: SyncPrefectClient, root: str) -> list[dict]:
    """The events about newly committed shards under this root."""
    answer = client.request("POST", "/events/filter", json={"filter": {"event": {"name": [COMMITTED]}}, "limit": 50})
    return [event for event in answer.json()["events"] if event["resource"]["vlbert.root"] == root]


# --- collect ----------------------------------------------------------------------------------------------------------


def test_only_a_network_that_failed_is_tried_again():
    def failed(error: Exception) -> bool:
        return network_failed(None, None, Failed(data=error))

    assert failed(StorageUnreachable("no bucket"))
    assert failed(TimeoutError())
    assert not failed(ValueError("list.tsv:3: no tab"))
    assert not failed(FileNotFoundError("list.tsv"))


# --- detect -----------------------------------------------------------------------------------------------------------


def test_detecting_reports_each_shard_then_that_nothing_is_left_until_the_detector_is_another_one(
    demo_data: DemoData, root: str, tmp_path: Path
):
    annotated = json.loads(demo_data.annotations.read_text())
    annotated["images"] = [image for image in annotated["images"] if image["id"] != 3]
    annotated["annotations"] = [one for one in annotated["annotations"] if one["image_id"] != 3]
    file, said = tmp_path / "but-one.json", []
    file.write_text(json.dumps(annotated))
    dataset = captions(demo_data, detector=DetectionConfig("annotated", annotations=str(file)))
    found = detect(root, dataset.name, dataset.detector, said.append)
    assert of(root).counts(found.stage)["no_annotation"] == 1
    assert (found.shards, found.new_shards, found.random_init) == (4, 4, False)
    assert found.images == of(root).counts(found.stage)["ok"]
    assert found.regions == sum(
        len(sample.regions) for shard in of(root).shards(found.stage) for sample in of(root).read(found.stage, shard)
    )
    assert [line.partition(":")[0] for line in said] == ["captions"] * 5
    assert said[3].startswith("captions: 4 of 4 shards: ")
    assert f" MB in {found.stage}, " in said[4]

    of(root).store.delete(f"captions/{found.stage}/00001.parquet")
    said.clear()
    assert detect(root, dataset.name, dataset.detector, said.append).new_shards == 1
    assert said[0].startswith("captions: 1 of 1 shards: ")
    said.clear()
    again = detect(root, dataset.name, dataset.detector, said.append)
    assert said[1] == f"captions: nothing to detect: 4 of 4 shards have {found.stage}"
    assert [f" MB in {found.stage}, " in line for line in said] == [True, False]
    assert (again.images, again.regions, again.new_shards) == (found.images, found.regions, 0)

    other = detect(
        root, dataset.name, DetectionConfig("annotated", annotations=str(demo_data.annotations)), said.append
    )
    assert (other.new_shards, other.shards) == (4, 4), "another detector looks at every shard anew"
    assert other.stage != found.stage
    assert of(root).counts(found.stage)["no_annotation"] == 1, "what the first one found stays"


def test_a_detector_that_fails_says_why(demo_data: DemoData, root: str, tmp_path: Path):
    detector = DetectionConfig("annotated", annotations=str(tmp_path / "nothing.json"))
    with pytest.raises(ChildFailed, match="there is no annotation file .*nothing.json"):
        detect(root, "captions", detector, lambda line: None)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """From here on, `python -m detectors.run` is this program."""
    (folder / "detectors").mkdir()
    (folder / "detectors" / "__init__.py").touch()
    (folder / "detectors" / "run.py").write_text(program)
    monkeypatch.chdir(folder)


def test_a_detector_that_ends_well_without_naming_its_stage_is_an_error(
    demo_data: DemoData, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(tmp_path, monkeypatch, "print('{\"images\": 3}')")
    said = []
    with pytest.raises(NoReport, match=r"captions: `.*detectors.run .*` ended well and did not report which stage"):
        detect(root, "captions", captions(demo_data).detector, said.append)
    assert said == ['captions: {"images": 3}']  # JSON, but no report of ours


def test_a_detector_that_could_not_reach_the_storage_is_run_again_by_prefect_and_no_other(
    demo_data: DemoData, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert (detect_dataset.retries, detect_dataset.retry_condition_fn) == (3, network_failed)
    stand_in(tmp_path, monkeypatch, f"import sys; print('no bucket'); sys.exit({STORAGE_UNREACHABLE})")
    with pytest.raises(StorageUnreachable, match="no bucket") as unreachable:
        detect(root, "captions", captions(demo_data).detector, lambda line: None)
    assert network_failed(None, None, Failed(data=unreachable.value))
    (tmp_path / "detectors" / "run.py").write_text("import sys; sys.exit(1)")
    with pytest.raises(ChildFailed) as failed:
        detect(root, "captions", captions(demo_data).detector, lambda line: None)
    assert not network_failed(None, None, Failed(data=failed.value))


def real_detector() -> str:
    """A program that goes on as the real `python -m detectors.run`."""
    return (
        f"import os, sys; os.chdir({str(PROJECT)!r}); "
        "os.execv(sys.executable, [sys.executable, '-m', 'detectors.run', *sys.argv[1:]])"
    )


@pytest.mark.usefixtures("prefect_server")
def test_a_network_that_comes_back_costs_a_second_attempt_and_no_failure(
    demo_data: DemoData, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    first = f"import pathlib, sys; tried = pathlib.Path({str(tmp_path / 'tried')!r})\n"
    first += f"if not tried.exists():\n    tried.touch(); sys.exit({STORAGE_UNREACHABLE})\n"
    stand_in(tmp_path, monkeypatch, first + real_detector())
    quick = detect_dataset.with_options(retry_delay_seconds=0.1, retry_jitter_factor=None)

    @flow(name="retrying")
    def retrying() -> int:
        return quick(root, "captions", captions(demo_data).detector).new_shards

    assert retrying() == 4
    assert sum("Retry 1/3" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.usefixtures("prefect_server")
def test_a_dataset_that_fails_keeps_no_other_waiting_and_the_log_has_the_detectors_last_fifty_lines(
    demo_data: DemoData, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(Path(root) / "captions", Path(root) / "broken")
    (Path(root) / "runs" / "images").mkdir(parents=True)  # no dataset: no shard is in it
    program = "import sys\nif sys.argv[2] == 'broken':\n"
    program += "    [print(f'line {i} of 60') for i in range(1, 61)]; sys.exit(3)\n"
    stand_in(tmp_path, monkeypatch, program + real_detector())
    with pytest.raises(ChildFailed, match=r"detectors.run .* broken .*\nit failed with exit status 3; its last lines:"):
        detect_flow(root, captions(demo_data).detector)
    (stage,) = {path.parent.name for path in Path(root).glob("captions/regions/*/*.parquet")}
    assert len(of(root).shards(f"regions/{stage}")) == 4
    assert not of(root, "broken").shards(f"regions/{stage}")

    with get_client(sync_client=True) as client:
        run = newest(client, "detect-regions")
        logs = logs_of(client, run, "Finished in state Failed")
        artifacts = artifacts_of(client, run)
    assert (run.name, run.state_type.value) == (f"detect broken, captions by {stage}", "FAILED")
    assert run.tags == ["dataset:broken", "dataset:captions", f"detector:{stage}"]
    assert run.state.message.startswith("Flow run encountered an exception: ChildFailed: ")
    assert set(artifacts) == {"detecting-captions", "regions-captions"}
    (told,) = [line for line in logs if line.startswith("broken: ") and "its last lines:" in line]
    assert [line for line in told.splitlines() if " of 60" in line] == [f"  | line {i} of 60" for i in range(11, 61)]


@pytest.mark.usefixtures("prefect_server")
def test_a_bucket_that_is_away_when_a_flow_begins_is_asked_again(
    demo_data: DemoData, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    quick = open_bucket.with_options(retry_delay_seconds=0.1, retry_jitter_factor=None)
    monkeypatch.setattr("flows.collect.open_bucket", quick)
    with s3_server("late") as server, faulty(server, faults={}) as proxy:
        proxy.plan("HEAD", "/late", "503", "503", "503")  # as often as one opening asks
        assert detect_flow("s3://late/root", captions(demo_data).detector) == {}
        assert proxy.happened["503"] == 3
    assert sum("Retry 1/3" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (StorageUnreachable("no answer"), True),
        (StorageUnreachable("slow down", 503), True),
        (StorageUnreachable("forbidden", 403), False),
        (StorageUnreachable("no bucket", 404), False),
        (ConnectionError("of something else"), False),
        (ValueError("no root"), False),
    ],
)
def test_a_bucket_that_refuses_us_is_not_asked_again(error: Exception, again: bool):
    assert storage_failed(None, None, Failed(data=error)) is again


def test_of_the_clocks_waiting_runs_one_is_left_for_each_set_of_parameters():
    def run(root: str, clock: bool) -> FlowRun:
        return FlowRun(flow_id=uuid4(), parameters={"root": root}, auto_scheduled=clock)

    ours = run("a", clock=False)
    waiting = [run(root, clock) for root, clock in [("a", 1), ("b", 1), ("a", 0), ("b", 0), ("b", 1), ("c", 1)]]
    assert repeats(ours, waiting) == [waiting[0], waiting[4]]


@pytest.mark.usefixtures("prefect_server")
def test_with_no_images_anywhere_there_is_nothing_to_detect(
    demo_data: DemoData, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    assert detect_flow(str(tmp_path), captions(demo_data).detector) == {}
    assert f"nothing to detect: no dataset under {tmp_path} has images" in caplog.text


def test_an_untrained_detector_is_named_loudly(demo_data: DemoData, root: str):
    for shard in ("00000", "00001", "00002"):  # one of two rows is enough
        of(root).store.delete(f"captions/images/{shard}.parquet")
    said = []
    detector = DetectionConfig(preset="demo", random_init=True, selection=SelectionSettings(maximum=12))
    found = detect(root, "captions", detector, said.append)
    assert found.random_init
    assert "captions: the network has random weights: its regions mean nothing" in said
    assert any("WARNING" in line for line in said)
    assert 10 * found.images <= found.regions <= 12 * found.images


# --- training ---------------------------------------------------------------------------------------------------------


def test_a_fine_tuning_that_fails_keeps_no_other_from_running_and_a_signal_ends_them_all():
    class Signal(BaseException):
        pass

    def start(settings: FinetuneSettings) -> str:
        if settings.run == "b":
            raise ValueError("no such file\nand more")
        if settings.run == "stop":
            raise Signal
        return settings.run

    runs = [FinetuneSettings(run=run) for run in "abc"]
    finetuned, failed = each_in_turn(runs, start)
    assert finetuned == ["a", "c"]
    assert failed == {"b": "ValueError: no such file"}
    with pytest.raises(Signal):
        each_in_turn([FinetuneSettings(run="stop"), *runs], start)


def test_the_pipeline_is_told_how_long_a_detector_may_be_silent(monkeypatch: pytest.MonkeyPatch):
    class Enough(Exception):
        pass

    def detected(root: str, detector: DetectionConfig, datasets: tuple[str, ...], silence: float | None) -> None:
        raise Enough(datasets, silence)

    monkeypatch.setattr("flows.check.check", lambda *settings: None)
    monkeypatch.setattr("flows.pipeline.Stages", lambda *names: SimpleNamespace(run=lambda stage, work, words: work()))
    monkeypatch.setattr("flows.pipeline.collect_flow", lambda root, dataset: None)
    monkeypatch.setattr("flows.pipeline.detect_flow", detected)
    detector = DetectionConfig(preset="demo", random_init=True)
    datasets = [Dataset("held-out", images="folder", detector=detector)]
    with pytest.raises(Enough) as given:
        pretrain_vlbert.fn("root", "work", datasets, PretrainSettings(), [], detection_silence=60.0)
    assert given.value.args == (("held-out",), 60.0)


# --- the whole pipeline, as a flow ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_pipeline_leads_to_a_fine_tuned_model_and_a_second_run_does_nothing_twice(
    served: Operated, pipeline_run: subprocess.CompletedProcess, pipeline_rerun: dict[str, list[str]]
):
    root = served.deployments.parent / "root"
    with get_client(sync_client=True) as client:
        named = FlowFilter(name=FlowFilterName(any_=["pretrain-vlbert"]))
        second, first = client.read_flow_runs(flow_filter=named, sort=FlowRunSort.START_TIME_DESC, limit=2)
    pipeline, again = first.state.result(), second.state.result()
    assert [(done.dataset, done.shards, done.new_shards) for done in pipeline.collected] == [
        ("captions", 4, 4),
        ("held-out", 1, 1),
        ("coco", 2, 2),
    ]
    assert {name: found.new_shards for name, found in pipeline.detected.items()} == {
        "captions": 4,
        "held-out": 1,
        "coco": 2,
    }
    assert pipeline.pretrained.checkpoint == str(root / "runs/pretrain/step-0000004")
    assert 0 <= pipeline.pretrained.metrics["monitored_accuracy"] <= 1
    assert [trained.run for trained in pipeline.finetuned] == ["refcoco-with"]
    assert 0 < pipeline.finetuned[0].metrics["chance"] < 1
    said = served.logs(str(first.id))
    assert any(f": VL-BERT from {pipeline.pretrained.checkpoint}, of its head region_transform" in x for x in said)
    for trained, dataset, recipe in (
        (pipeline.pretrained, "captions", "pretrain_vlbert_demo"),
        (pipeline.finetuned[0], "coco", "finetune_refcoco_demo"),
    ):
        assert (trained.recipe, trained.detector) == (recipe, pipeline.detected[dataset].detector)
        state = json.loads((Path(trained.checkpoint) / "state.json").read_text())
        assert trained.snapshot == state["data"]["snapshots"][-1]["snapshot"]

    said_again = pipeline_rerun["pretrain-vlbert/default"]
    assert "captions: nothing to download: 4 of 4 shards are committed" in said_again
    assert "coco: nothing to download: 2 of 2 shards are committed" in said_again
    assert sum("nothing to detect" in line for line in said_again) == 3
    assert any(line.startswith("pretrain is complete: ") for line in said_again)
    assert again.pretrained.checkpoint == pipeline.pretrained.checkpoint
    assert again.pretrained.metrics == pipeline.pretrained.metrics
    done = [again.pretrained, *again.detected.values()]
    assert [one.peak_bytes for one in done] == [0] * 4, "no process was started"
    assert all(one.peak_bytes > 0 for one in (pipeline.pretrained, *pipeline.finetuned, *pipeline.detected.values()))

    with get_client(sync_client=True) as client:
        stages = below(client, first)
        looked_at(client, pipeline, first, stages)
        shown(root, pipeline, artifacts_of(client, first, *stages), stages)
        assert "pipeline-pretrain" in artifacts_of(client, first)
        assert {run.state_type.value for run in [first, second, *stages, *below(client, second)]} == {"COMPLETED"}
        assert (second.name, second.tags) == (first.name, first.tags)
        assert [run.name for run in below(client, second)] == [run.name for run in stages[:-1]]
        # Of the whole pipeline, nothing was left to collect: what collecting has as tasks is of the first run alone.
        assert tasks_of(client, *below(client, second)) == ["captions", "coco", "held-out"]
        shown_again = set(artifacts_of(client, second, *below(client, second)))
        assert not {key for key in shown_again if key.startswith(("collecting", "detecting", "pretrain-progress"))}
        assert {"images-captions", "regions-captions", "pretrain-pretrain", "pretrain-curves-pretrain"} <= shown_again


class Started(Exception):
    """A stage has started this command."""


@pytest.mark.slow
@pytest.mark.usefixtures("pipeline_run")
def test_a_stage_that_is_done_starts_no_process_and_one_with_other_settings_does(
    served: Operated, demo_data: DemoData, monkeypatch: pytest.MonkeyPatch
):
    def start(command: list[object], *_: object, **__: object) -> None:
        raise Started(" ".join(map(str, command)))

    for module in ("detect", "pretrain", "torchrun"):
        monkeypatch.setattr(f"flows.{module}.run_child", start)
    root = served.deployments.parent / "root"
    told, work, said = tiny_pipeline(demo_data, root), str(root / "work"), []
    pretraining = TypeAdapter(PretrainSettings).validate_python(told["pretraining"])
    tuning = TypeAdapter(FinetuneSettings).validate_python(told["finetunings"][0] | {"pretraining": "pretrain"})
    detector = DetectionConfig("annotated", annotations=str(demo_data.annotations))

    found = detect(str(root), "captions", detector, said.append)
    assert (found.shards, found.new_shards, found.peak_bytes) == (4, 0, 0)
    first, tuned = (
        pretrain(str(root), work, pretraining, found.detector, said.append),
        finetune(str(root), work, tuning, said.append),
    )
    for trained, run in ((first, "pretrain"), (tuned, "refcoco-with")):
        assert (trained.checkpoint, trained.peak_bytes) == (str(root / f"runs/{run}/step-0000004"), 0)
        assert trained.metrics == last_metrics(open_store(str(root)), run)
        assert f"{run} is complete: {trained.checkpoint} has step 4 of 4" in said
    assert any("tokens, as it was: made of the same files" in line for line in said)

    def with_overrides(settings: PretrainSettings | FinetuneSettings, *more: str, processes: int = 1) -> object:
        return dataclasses.replace(
            settings,
            overrides=(*settings.overrides, *more),
            processes=dataclasses.replace(settings.processes, count=processes),
        )

    for program, again in (
        (
            "detectors.run",
            lambda: detect(
                str(root), "captions", DetectionConfig("annotated", annotations=str(demo_data.refcoco_instances))
            ),
        ),
        (
            "vlbert.data.corpus",
            lambda: pretrain(str(root), work, dataclasses.replace(pretraining, vocabulary_size=400)),
        ),
        ("vlbert.train", lambda: pretrain(str(root), work, with_overrides(pretraining, "steps=5"))),
        ("vlbert.train", lambda: pretrain(str(root), work, with_overrides(pretraining, "optimizer.learning_rate=0.5"))),
        ("vlbert.train", lambda: pretrain(str(root), work, with_overrides(pretraining, "data.text_batch=nonsense"))),
        ("vlbert.train", lambda: pretrain(str(root), work, with_overrides(pretraining, processes=3))),
        ("vlbert.train", lambda: finetune(str(root), work, dataclasses.replace(tuning, run="other"))),
        ("vlbert.train", lambda: finetune(str(root), work, with_overrides(tuning, "task.train_on=val"))),
        ("vlbert.evaluate", lambda: finetune(str(root), work, dataclasses.replace(tuning, evaluate=("testB",)))),
    ):
        with pytest.raises(Started, match=rf"-m {program} "):
            again()


def looked_at(client: SyncPrefectClient, pipeline: PipelineResult, run: FlowRun, stages: list[FlowRun]) -> None:
    """The flow runs by their names and tags: recipe, detector, snapshot."""
    scenes, things = pipeline.detected["captions"].detector, pipeline.detected["coco"].detector
    trained, tuned = pipeline.pretrained, pipeline.finetuned[0]
    assert scenes != things
    assert trained.snapshot != tuned.snapshot
    name = f"pretrain_vlbert_demo pretrain on {scenes} snapshot {trained.snapshot}"
    tags = [f"detector:{scenes}", "recipe:pretrain_vlbert_demo", f"snapshot:{trained.snapshot}"]
    assert (run.name, run.tags) == (name, sorted([*tags, "pipeline"]))
    assert [(stage.name, stage.tags) for stage in stages] == [
        ("collect captions from train.tsv", ["dataset:captions"]),
        ("collect held-out from held_out.tsv", ["dataset:held-out"]),
        ("collect coco from coco", ["dataset:coco"]),
        (f"detect captions by {scenes}", ["dataset:captions", f"detector:{scenes}"]),
        (f"detect held-out by {scenes}", ["dataset:held-out", f"detector:{scenes}"]),
        (f"detect coco by {things}", ["dataset:coco", f"detector:{things}"]),
        (name, tags),
        (
            f"finetune_refcoco_demo refcoco-with on {things} snapshot {tuned.snapshot}",
            [f"detector:{things}", "recipe:finetune_refcoco_demo", f"snapshot:{tuned.snapshot}"],
        ),
    ]
    # Four shards of captions in groups of two, one group held out, one imported.
    assert tasks_of(client, *stages) == [
        *("captions", "captions from 00000", "captions from 00002"),
        *("coco", "coco from 00000", "held-out", "held-out from 00000"),
    ]


def shown(root: Path, pipeline: PipelineResult, artifacts: dict[str, str], runs_of_stages: list[FlowRun]) -> None:
    """What the pipeline leaves in the flow UI."""
    datasets, runs = ("captions", "held-out", "coco"), {"pretrain": "pretrain", "finetune": "refcoco-with"}
    assert set(artifacts) == {
        *(key_of(stage, name) for stage in ("collecting", "images", "detecting", "regions") for name in datasets),
        *(f"{stage}{what}-{run}" for stage, run in runs.items() for what in ("", "-progress", "-curves")),
        "pipeline-pretrain",
    }
    row = r"\| \[(.*?)\]\(/runs/flow-run/(\S+)\) \|  \|  \|  \| [\d,]+ \| (.*) \|$"
    stages = [re.match(row, line).groups() for line in artifacts["pipeline-pretrain"].splitlines()[2:]]
    assert [(re.sub(r"\\(.)", r"\1", name), run) for name, run, _ in stages] == list(
        zip(
            [f"{stage} {name}" for stage in ("collect", "detect") for name in datasets] + ["pretrain", "refcoco-with"],
            [str(run.id) for run in runs_of_stages],
            strict=True,
        )
    )
    assert stages[0][2] == f"{pipeline.collected[0].counts['ok']} images in 4 shards"
    accuracy = f"{pipeline.finetuned[0].metrics['accuracy_published']:.3f}"
    assert rf"accuracy\_published {accuracy}".replace(".", r"\.") in stages[-1][2]
    assert "| shards | 4 of 4 |" in artifacts["collecting-captions"]
    assert "| rows | 32 of 32 |" in artifacts["collecting-captions"]
    assert "| shards | 4 of 4 |" in artifacts["detecting-captions"]
    ok = pipeline.collected[0].counts["ok"]
    assert f"| images | {ok}, ".replace(",", r"\,") in artifacts["collecting-captions"]
    assert f"| images | {ok}, ".replace(",", r"\,") in artifacts["detecting-captions"]

    counts, _, reasons = artifacts["images-captions"].partition("The commonest reasons")
    assert f"| ok | {ok} | " in counts
    assert r"| http\_404 | 1 | " in counts
    rows = [row for row in reasons.splitlines() if row.startswith("- ")]
    assert 0 < len(rows) <= 10
    assert any(row.startswith(r"- **http\_404**, 1 row") for row in rows)
    assert "| ok | 8 | 100.0% |" in artifacts["images-held-out"]
    assert "reasons" not in artifacts["images-held-out"] + artifacts["regions-captions"]
    assert (
        f"({(root / 'captions/regions').as_uri()}/{pipeline.detected['captions'].detector})"
        in artifacts["regions-captions"]
    )

    for stage, run in runs.items():
        assert "| step | 4 of 4 |" in artifacts[f"{stage}-progress-{run}"]
        picture = re.fullmatch(r"!\[.+\]\(data:image/svg\+xml;base64,([^)]+)\)", artifacts[f"{stage}-curves-{run}"])
        svg = ElementTree.fromstring(base64.b64decode(picture[1], validate=True))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
        words = [text.strip() for text in svg.itertext()]
        assert f"{run}: training loss" in words
        assert f"{run}: validation" in words
    assert r"| monitored\_accuracy |" in artifacts["pretrain-pretrain"]
    assert "on the real data:** no number in the paper" in artifacts["pretrain-pretrain"]
    assert rf"| accuracy\_published | {accuracy} | " in artifacts["finetune-refcoco-with"]
    assert "on the real data:** table 3" in artifacts["finetune-refcoco-with"]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "pipeline_run")
def test_a_fine_tuning_is_evaluated_on_the_splits_that_are_named_and_each_once(
    served: Operated, demo_data: DemoData, monkeypatch: pytest.MonkeyPatch
):
    root = served.deployments.parent / "root"
    parameters = tiny_pipeline(demo_data, root)["finetunings"][0] | {
        "pretraining": "pretrain",
        "evaluate": ["val", "testA"],
    }
    settings = TypeAdapter(FinetuneSettings).validate_python(parameters)
    trained = finetune_flow(str(root), str(root / "work"), settings)
    assert [one.split for one in trained.evaluated] == ["val", "testA"]
    places = [Path(one.folder) for one in trained.evaluated]
    assert places[0] == root / "runs/refcoco-with/evaluations/val-step-0000004"
    assert trained.evaluated[0].metrics == json.loads((places[0] / "metrics.json").read_text())["metrics"]
    assert (places[1] / trained.evaluated[1].submission[0]).is_file()
    with get_client(sync_client=True) as client:
        artifacts = artifacts_of(client, newest(client, "finetune"))
    table = artifacts["finetune-evaluation-refcoco-with-val"]
    assert places[0].as_uri() + "/index.html" in table
    assert re.search(r"\| accuracy\\_published \| \d\.\d+ \| .*base", table)

    before = {file: file.stat().st_mtime_ns for place in places for file in place.iterdir()}
    monkeypatch.delattr("flows.torchrun.run_child")
    again = finetune(str(root), str(root / "work"), settings)
    assert again.evaluated == trained.evaluated
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "pipeline_run")
def test_an_event_tells_of_new_shards_that_were_collected_alone(served: Operated, demo_data: DemoData):
    """Inside the pipeline the next stage detects them, and where nothing is new there is nothing to detect."""
    root = str(served.deployments.parent / "root")
    parameters = tiny_pipeline(demo_data, Path(root))["datasets"][1]
    source = {name: value for name, value in parameters.items() if name != "detector"}
    assert collect_flow(root, source).new_shards == 0
    of(root, "held-out").store.delete("held-out/images/00000.parquet")
    assert collect_flow(root, source).new_shards == 1
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + 30
        while not committed_events(client, root):  # they come in order: those of the pipeline would be here by then
            assert time.monotonic() < deadline
            time.sleep(0.2)
        (event,) = committed_events(client, root)
    assert event["resource"]["prefect.resource.id"] == "vlbert.images.held-out"
    assert event["payload"] == {"root": root, "dataset": "held-out", "new_shards": 1}


@pytest.mark.usefixtures("prefect_server")
def test_a_stage_that_fails_fails_its_flow_with_the_reason(demo_data: DemoData, tmp_path: Path):
    broken = tmp_path / "broken.tsv"
    broken.write_text("a caption without an address\n")
    with pytest.raises(ValueError, match="broken.tsv:1: no tab"):
        collect_flow(str(tmp_path / "root"), captions(demo_data, broken, rows_per_shard=1))
    with get_client(sync_client=True) as client:
        run = newest(client, "collect-captions")
        tasks = tasks_of(client, run)
    assert (run.name, run.state_type.value) == ("collect captions from broken.tsv", "FAILED")
    assert "broken.tsv:1: no tab" in run.state.message
    assert not tasks, "a broken list is found before anything is asked for"
    broken.write_text("a caption\tno address\n")
    with pytest.raises(NothingStored, match="nothing was committed"):
        collect_flow(str(tmp_path / "root"), captions(demo_data, broken, rows_per_shard=1))
    with get_client(sync_client=True) as client:
        assert newest(client, "collect-captions").state_type.value == "FAILED"
    assert not of(str(tmp_path / "root")).shards("images")
