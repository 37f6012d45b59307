"""The stages on a tiny demo data, and the whole pipeline as a flow, twice."""

import dataclasses
import json
import logging
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock
from uuid import uuid4

import pytest
from captioned import captioned_scenes
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

from demo.data import DemoData
from detectors.config import DetectionConfig
from detectors.run import STORAGE_UNREACHABLE
from flows.artifacts import key_of
from flows.collect import COMMITTED, collect_flow, network_failed, open_bucket, storage_failed
from flows.detect import detect, detect_dataset, detect_flow, repeats
from flows.finetune import finetune, finetune_flow
from flows.pipeline import each_in_turn, pretrain_vlbert
from flows.pretrain import pretrain
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.supervisor import ChildFailed
from storage.catalog import Catalog
from storage.collect.run import NothingStored
from storage.object_store import StorageUnreachable, open_store
from training.log import last_metrics


def captions(demo_data: DemoData, file: Path | None = None, **changes: object) -> Dataset:
    """The captioned scenes and the detector of their annotated objects."""
    detector = DetectionConfig("annotated", annotations=str(demo_data.annotations))
    return captioned_scenes(demo_data, file, Dataset, **({"detector": detector} | changes))


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
    (run,) = client.read_flow_runs(flow_filter=named, flow_run_filter=called, sort=FlowRunSort.START_TIME_DESC, limit=1)
    return run


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


# --- collect and detect -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "error", "again"),
    [
        (network_failed, StorageUnreachable("no bucket"), True),
        (network_failed, TimeoutError(), True),
        (network_failed, ValueError("list.tsv:3: no tab"), False),
        (network_failed, FileNotFoundError("list.tsv"), False),
        (storage_failed, StorageUnreachable("no answer"), True),
        (storage_failed, StorageUnreachable("slow down", 429), True),
        (storage_failed, StorageUnreachable("slow down", 503), True),
        (storage_failed, StorageUnreachable("internal error", 500), True),
        (storage_failed, StorageUnreachable("forbidden", 403), False),
        (storage_failed, StorageUnreachable("no bucket", 404), False),
        (storage_failed, ConnectionError("of something else"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(condition, error: Exception, again: bool):
    assert condition(None, None, Failed(data=error)) is again


def test_detecting_finds_what_is_missing_until_the_detector_is_another_one(
    demo_data: DemoData, root: str, tmp_path: Path
):
    annotated = json.loads(demo_data.annotations.read_text())
    annotated["images"] = [image for image in annotated["images"] if image["id"] != 3]
    annotated["annotations"] = [one for one in annotated["annotations"] if one["image_id"] != 3]
    file, lines = tmp_path / "but-one.json", []
    file.write_text(json.dumps(annotated))
    detector = DetectionConfig("annotated", annotations=str(file))
    found = detect(root, "captions", detector, lines.append)
    assert of(root).counts(found.stage)["no_annotation"] == 1
    assert (found.shards, found.new_shards, found.random_init) == (4, 4, False)
    assert found.images == of(root).counts(found.stage)["ok"]
    assert found.regions == sum(
        len(sample.regions) for shard in of(root).shards(found.stage) for sample in of(root).read(found.stage, shard)
    )
    assert lines[3].startswith("captions: 4 of 4 shards: ")

    of(root).store.delete(f"captions/{found.stage}/00001.parquet")
    assert detect(root, "captions", detector, lines.append).new_shards == 1
    again = detect(root, "captions", detector, lines.append)
    assert lines[-1] == f"captions: nothing to detect: 4 of 4 shards have {found.stage}"
    assert (again.images, again.regions, again.new_shards) == (found.images, found.regions, 0)

    other = detect(root, "captions", captions(demo_data).detector, lines.append)
    assert (other.new_shards, other.shards) == (4, 4)
    assert other.stage != found.stage
    assert of(root).counts(found.stage)["no_annotation"] == 1, "what the first one found stays"


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """From here on, `vlbert detect` is this program."""
    (folder / "detectors").mkdir(exist_ok=True)
    (folder / "detectors" / "__init__.py").touch()
    (folder / "detectors" / "run.py").write_text(program)
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("program", "error", "named", "again"),
    [
        (f"print('no bucket'); raise SystemExit({STORAGE_UNREACHABLE})", StorageUnreachable, "no bucket", True),
        ("print('no weights'); raise SystemExit(1)", ChildFailed, "no weights", False),
    ],
)
def test_a_detector_that_fails_is_run_again_only_where_the_storage_was_away(
    demo_data: DemoData, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program, error, named, again
):
    stand_in(tmp_path, monkeypatch, program)
    with pytest.raises(error, match=named) as failed:
        detect(root, "captions", captions(demo_data).detector, lambda line: None)
    assert detect_dataset.retry_condition_fn(None, None, Failed(data=failed.value)) is again


def real_detector() -> str:
    """A program that goes on as the real `vlbert detect`."""
    return (
        f"import os, sys; os.chdir({str(PROJECT)!r}); "
        "os.execv(sys.executable, [sys.executable, '-m', 'vlbert', *sys.argv[1:]])"
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
def test_a_bucket_that_is_away_when_a_flow_begins_is_asked_again(
    demo_data: DemoData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    quick = open_bucket.with_options(retry_delay_seconds=0.1, retry_jitter_factor=None)
    monkeypatch.setattr("flows.collect.open_bucket", quick)
    bucket = Mock(side_effect=[StorageUnreachable("no answer"), DEFAULT], return_value=open_store(str(tmp_path)))
    monkeypatch.setattr("flows.collect.open_store", bucket)
    assert detect_flow("s3://late/root", captions(demo_data).detector) == {}
    assert bucket.call_count == 2
    assert "nothing to detect: no dataset" in caplog.text


@pytest.mark.usefixtures("prefect_server")
def test_a_dataset_that_fails_keeps_no_other_waiting(
    demo_data: DemoData, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(Path(root) / "captions", Path(root) / "broken")
    (Path(root) / "runs" / "images").mkdir(parents=True)  # no dataset: no shard is in it
    program = "import sys\nif sys.argv[3] == 'broken':\n    print('no memory'); sys.exit(3)\n"
    stand_in(tmp_path, monkeypatch, program + real_detector())
    with pytest.raises(ChildFailed, match=r"vlbert detect .* broken .*\nit failed with exit status 3; its last lines:"):
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
    assert "ChildFailed" in run.state.message
    assert set(artifacts) == {"detecting-broken", "detecting-captions", "regions-captions"}
    assert any(line.startswith("broken: ") and "  | no memory" in line for line in logs)


@pytest.mark.usefixtures("prefect_server")
def test_a_stage_that_fails_fails_its_flow_with_the_reason(demo_data: DemoData, tmp_path: Path):
    broken = tmp_path / "broken.tsv"
    root = str(tmp_path / "root")
    for line, error, named in (
        ("a caption without an address\n", NothingStored, "broken.tsv:1: one column"),
        ("a caption\tno address\n", NothingStored, "nothing was committed"),
    ):
        broken.write_text(line)
        with pytest.raises(error, match=named):
            collect_flow(root, captions(demo_data, broken, rows_per_shard=1))
        with get_client(sync_client=True) as client:
            run = newest(client, "collect-captions")
        assert (run.name, run.state_type.value) == ("collect captions from broken.tsv", "FAILED")
        assert named in run.state.message
    assert not of(root).shards("images")


def test_of_the_clocks_waiting_runs_one_is_left_for_each_set_of_parameters():
    def run(root: str, clock: bool) -> FlowRun:
        return FlowRun(flow_id=uuid4(), parameters={"root": root}, auto_scheduled=clock)

    ours = run("a", clock=False)
    waiting = [run(root, clock) for root, clock in [("a", 1), ("b", 1), ("a", 0), ("b", 0), ("b", 1), ("c", 1)]]
    assert repeats(ours, waiting) == [waiting[0], waiting[4]]


# --- the pipeline -----------------------------------------------------------------------------------------------------


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


def test_the_pipeline_passes_on_how_long_a_detector_may_be_silent(monkeypatch: pytest.MonkeyPatch):
    class Enough(Exception):
        pass

    def detected(root: str, detector: DetectionConfig, datasets: tuple[str, ...], silence: float | None) -> None:
        raise Enough(datasets, silence)

    monkeypatch.setattr("flows.check.check", lambda *settings: None)
    monkeypatch.setattr("flows.pipeline.Stages", lambda *names: SimpleNamespace(run=lambda stage, work, words: work()))
    monkeypatch.setattr("flows.pipeline.collect_flow", lambda root, dataset: None)
    monkeypatch.setattr("flows.pipeline.detect_flow", detected)
    datasets = [Dataset("held-out", images="folder", detector=DetectionConfig(preset="demo", random_init=True))]
    with pytest.raises(Enough) as given:
        pretrain_vlbert.fn("root", "work", datasets, PretrainSettings(), [], detection_silence=60.0)
    assert given.value.args == (("held-out",), 60.0)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_pipeline_leads_to_a_fine_tuned_model_and_a_second_run_does_nothing_twice(
    served: Operated, pipeline_run: subprocess.CompletedProcess, pipeline_rerun: dict[str, list[str]]
):
    root = served.deployments.parent / "root"
    with get_client(sync_client=True) as client:
        named = FlowFilter(name=FlowFilterName(any_=["pretrain-vlbert"]))
        second, first = client.read_flow_runs(flow_filter=named, sort=FlowRunSort.START_TIME_DESC, limit=2)
        stages, stages_again = below(client, first), below(client, second)
        tasks, tasks_again = tasks_of(client, *stages), tasks_of(client, *stages_again)
        artifacts = artifacts_of(client, first, *stages)
    pipeline, again = first.state.result(), second.state.result()
    shards = {"captions": 4, "held-out": 1, "coco": 2}
    assert {done.dataset: done.new_shards for done in pipeline.collected} == shards
    assert {name: found.new_shards for name, found in pipeline.detected.items()} == shards
    assert pipeline.pretrained.checkpoint == str(root / "runs/pretrain/step-0000004")
    assert 0 <= pipeline.pretrained.metrics["monitored_accuracy"] <= 1
    assert [trained.run for trained in pipeline.finetuned] == ["refcoco-with"]
    assert 0 < pipeline.finetuned[0].metrics["chance"] < 1
    start = f": VL-BERT from {pipeline.pretrained.checkpoint}, of its head region_transform"
    assert any(start in line for line in served.logs(str(first.id)))
    for trained, dataset in ((pipeline.pretrained, "captions"), (pipeline.finetuned[0], "coco")):
        assert trained.detector == pipeline.detected[dataset].detector
        state = json.loads((Path(trained.checkpoint) / "state.json").read_text())
        assert trained.snapshot == state["data"][0]["snapshots"][-1]["snapshot"]
    assert all(one.peak_bytes > 0 for one in (pipeline.pretrained, *pipeline.finetuned, *pipeline.detected.values()))

    lines = pipeline_rerun["pretrain-vlbert/default"]
    assert "captions: nothing to download: all 4 shards are committed" in lines
    assert sum("nothing to detect" in line for line in lines) == 3
    assert (again.pretrained.checkpoint, again.pretrained.metrics) == (
        pipeline.pretrained.checkpoint,
        pipeline.pretrained.metrics,
    )
    assert {one.peak_bytes for one in (again.pretrained, *again.detected.values())} == {0}, "no process was started"
    assert (second.name, second.tags) == (first.name, first.tags)
    assert {run.state_type.value for run in [first, second, *stages, *stages_again]} == {"COMPLETED"}

    # One task run for each group of shards, and one artifact for each table: never one for each image.
    collecting = ["captions from 00000", "captions from 00002", "coco from 00000", "held-out from 00000"]
    assert tasks == sorted([*shards, *collecting])
    assert tasks_again == sorted(shards)
    assert set(artifacts) == {
        *(key_of(table, name) for table in ("collecting", "images", "detecting", "regions") for name in shards),
        *(f"pretrain{table}-pretrain" for table in ("", "-progress", "-curves")),
        *(f"finetune{table}-refcoco-with" for table in ("", "-progress", "-curves")),
        "pipeline-pretrain",
    }
    assert all(f"/runs/flow-run/{stage.id})" in artifacts["pipeline-pretrain"] for stage in stages)


class Started(Exception):
    """A stage has started this command."""


@pytest.mark.slow
@pytest.mark.usefixtures("pipeline_run")
def test_a_stage_that_is_done_starts_no_process_and_one_with_other_settings_does(
    served: Operated, demo_data: DemoData, monkeypatch: pytest.MonkeyPatch
):
    def start(command: list[object], *_: object, **__: object) -> None:
        raise Started(" ".join(map(str, command)))

    for module in ("detect", "torchrun"):  # the corpus is looked at by its own program
        monkeypatch.setattr(f"flows.{module}.run_child", start)
    root = served.deployments.parent / "root"
    parameters, work, lines = tiny_pipeline(demo_data, root), str(root / "work"), []
    pretraining = TypeAdapter(PretrainSettings).validate_python(parameters["pretraining"])
    tuning = TypeAdapter(FinetuneSettings).validate_python(parameters["finetunings"][0] | {"pretraining": "pretrain"})
    detector = DetectionConfig("annotated", annotations=str(demo_data.annotations))

    found = detect(str(root), "captions", detector, lines.append)
    assert (found.shards, found.new_shards, found.peak_bytes) == (4, 0, 0)
    first, tuned = (
        pretrain(str(root), work, pretraining, found.detector, lines.append),
        finetune(str(root), work, tuning, lines.append),
    )
    for trained, run in ((first, "pretrain"), (tuned, "refcoco-with")):
        assert (trained.checkpoint, trained.peak_bytes) == (str(root / f"runs/{run}/step-0000004"), 0)
        assert trained.metrics == last_metrics(open_store(str(root)), run)
        assert f"{run} is complete: {trained.checkpoint} has step 4 of 4" in lines
    assert any("tokens, as it was: made of the same files" in line for line in lines)

    def with_overrides(settings: PretrainSettings | FinetuneSettings, *more: str, processes: int = 1) -> object:
        return dataclasses.replace(
            settings,
            overrides=(*settings.overrides, *more),
            processes=dataclasses.replace(settings.processes, count=processes),
        )

    for program, again in (
        (
            "vlbert detect",
            lambda: detect(
                str(root), "captions", DetectionConfig("annotated", annotations=str(demo_data.refcoco_instances))
            ),
        ),
        ("vlbert.train", lambda: pretrain(str(root), work, with_overrides(pretraining, "--steps=5"))),
        (
            "vlbert.train",
            lambda: pretrain(str(root), work, with_overrides(pretraining, "--optimizer.learning_rate=0.5")),
        ),
        ("vlbert.train", lambda: pretrain(str(root), work, with_overrides(pretraining, processes=3))),
        ("vlbert.train", lambda: finetune(str(root), work, dataclasses.replace(tuning, run="other"))),
        ("vlbert.train", lambda: finetune(str(root), work, with_overrides(tuning, "--task.train_on=val"))),
        (
            "vlbert.evaluation.evaluate",
            lambda: finetune(str(root), work, dataclasses.replace(tuning, evaluate=("testB",))),
        ),
    ):
        with pytest.raises(Started, match=rf"-m {program} "):
            again()
    with pytest.raises(ValueError, match=r"--data\.text_batch.*nonsense"):
        pretrain(str(root), work, with_overrides(pretraining, "--data.text_batch=nonsense"))


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "pipeline_run")
def test_a_fine_tuning_is_evaluated_once_on_each_split_that_is_named(
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
    folders = [Path(one.folder) for one in trained.evaluated]
    assert folders[0] == root / "runs/refcoco-with/evaluations/val-step-0000004"
    assert trained.evaluated[0].metrics == json.loads((folders[0] / "metrics.json").read_text())["metrics"]
    assert (folders[1] / trained.evaluated[1].submission[0]).is_file()
    with get_client(sync_client=True) as client:
        artifacts = artifacts_of(client, newest(client, "finetune"))
    table = artifacts["finetune-evaluation-refcoco-with-val"]
    assert folders[0].as_uri() + "/index.html" in table
    assert re.search(r"\| accuracy\\_published \| \d\.\d+ \| .*base", table)

    before = {file: file.stat().st_mtime_ns for place in folders for file in place.iterdir()}
    monkeypatch.delattr("flows.torchrun.run_child")
    again = finetune(str(root), str(root / "work"), settings)
    assert again.evaluated == trained.evaluated
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "pipeline_run")
def test_an_event_names_new_shards_that_no_pipeline_collected(served: Operated, demo_data: DemoData):
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
