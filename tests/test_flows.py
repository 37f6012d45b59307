"""The stages on a tiny drawn world, most of them without Prefect, and the whole road as a flow, twice."""

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from s3 import s3_server

import demo.__main__ as demo
from demo.world import World
from detectors.run import STORAGE_UNREACHABLE
from flows.artifacts import key_of, table_of_counts
from flows.collect import collect_settings, network_failed
from flows.detect import NoReport, detect, detect_dataset
from flows.finetune import finetune
from flows.pretrain import copy_vocabulary
from flows.settings import Dataset, DetectorSettings, FinetuneSettings
from flows.supervisor import ChildFailed
from flows.training import Trained, paced
from storage.catalog import Catalog, Row
from storage.collect import collect
from storage.download import DownloadSettings
from storage.objects import StorageUnreachable, open_objects

IMAGES = "images"


def captions(world: World, file: Path | None = None, **changes: object) -> Dataset:
    """The captioned scenes as a dataset in shards of 10 rows, two a task."""
    settings = {
        "detector": DetectorSettings("annotated", annotations=str(world.annotations)),
        "captions": str(file or world.train_tsv),
        "download": DownloadSettings(deadline=1.5, allowed_hosts=(f"127.0.0.1:{world.port}",)),
        "rows_per_shard": 10,
        "shards_per_task": 2,
    }
    return Dataset("captions", **(settings | changes))


def refcoco(world: World) -> Dataset:
    detector = DetectorSettings("annotated", annotations=str(world.refcoco_instances))
    return Dataset("refcoco+", detector, images=str(world.refcoco_images), rows_per_shard=6)


@pytest.fixture(scope="module")
def collected(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the captioned scenes; to be copied, not changed."""
    root = tmp_path_factory.mktemp("collected")
    collect(str(root), collect_settings(captions(world)), lambda line: None)
    return root


@pytest.fixture
def root(collected: Path, tmp_path: Path) -> str:
    """A root of the test's own with the captioned scenes collected."""
    return str(shutil.copytree(collected, tmp_path / "root"))


def of(root: str, dataset: str = "captions") -> Catalog:
    return Catalog(open_objects(root), dataset)


# --- collect ----------------------------------------------------------------------------------------------------------


def test_only_a_network_that_failed_is_tried_again():
    from prefect.states import Failed

    def failed(error: Exception) -> bool:
        return network_failed(None, None, Failed(data=error))

    assert failed(StorageUnreachable("no bucket"))
    assert failed(TimeoutError())
    assert not failed(ValueError("list.tsv:3: no tab"))
    assert not failed(FileNotFoundError("list.tsv"))


# --- detect -----------------------------------------------------------------------------------------------------------


def test_detecting_reports_each_shard_and_the_second_time_that_there_is_nothing_to_do(
    world: World, root: str, tmp_path: Path
):
    annotated = json.loads(world.annotations.read_text())
    annotated["images"] = [image for image in annotated["images"] if image["id"] != 3]
    annotated["annotations"] = [one for one in annotated["annotations"] if one["image_id"] != 3]
    file, said = tmp_path / "but-one.json", []
    file.write_text(json.dumps(annotated))
    dataset = captions(world, detector=DetectorSettings("annotated", annotations=str(file)))
    found = detect(root, dataset, said.append)
    assert of(root).counts(found.stage)["no_annotation"] == 1
    assert (found.shards, found.new_shards, found.untrained) == (4, 4, False)
    assert found.images == of(root).counts(found.stage)["ok"]
    assert found.regions == sum(
        len(sample.regions) for shard in of(root).shards(found.stage) for sample in of(root).read(found.stage, shard)
    )
    assert [line.partition(":")[0] for line in said] == ["captions"] * 4
    assert ", 4 of 4:" in said[3]

    of(root).objects.delete(f"captions/{found.stage}/00001.parquet")
    said.clear()
    assert detect(root, dataset, said.append).new_shards == 1
    assert "shard 00001, 1 of 1:" in said[0]
    said.clear()
    again = detect(root, dataset, said.append)
    assert said == [f"captions: nothing to detect: 4 of 4 shards have {found.stage}"]
    assert (again.images, again.regions, again.new_shards) == (found.images, found.regions, 0)


def test_a_detector_that_fails_says_why(world: World, root: str, tmp_path: Path):
    detector = DetectorSettings("annotated", annotations=str(tmp_path / "nothing.json"))
    with pytest.raises(ChildFailed, match="there is no annotation file .*nothing.json"):
        detect(root, captions(world, detector=detector), lambda line: None)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """From here on, `python -m detectors.run` is this program."""
    (folder / "detectors").mkdir()
    (folder / "detectors" / "__init__.py").touch()
    (folder / "detectors" / "run.py").write_text(program)
    monkeypatch.chdir(folder)


def test_a_detector_that_ends_well_without_naming_its_stage_is_an_error(
    world: World, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(tmp_path, monkeypatch, "print('{\"images\": 3}')")
    said = []
    with pytest.raises(NoReport, match=r"captions: `.*detectors.run .*` ended well and did not say which stage"):
        detect(root, captions(world), said.append)
    assert said == ['captions: {"images": 3}']  # JSON, but no report of ours


def test_a_detector_that_could_not_reach_the_storage_is_run_again_by_prefect_and_no_other(
    world: World, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from prefect.states import Failed

    assert (detect_dataset.retries, detect_dataset.retry_condition_fn) == (3, network_failed)
    stand_in(tmp_path, monkeypatch, f"import sys; print('no bucket'); sys.exit({STORAGE_UNREACHABLE})")
    with pytest.raises(StorageUnreachable, match="no bucket") as unreachable:
        detect(root, captions(world), lambda line: None)
    assert network_failed(None, None, Failed(data=unreachable.value))
    (tmp_path / "detectors" / "run.py").write_text("import sys; sys.exit(1)")
    with pytest.raises(ChildFailed) as failed:
        detect(root, captions(world), lambda line: None)
    assert not network_failed(None, None, Failed(data=failed.value))


def test_an_untrained_detector_is_named_loudly(world: World, root: str):
    for shard in ("00000", "00001", "00002"):  # one of two rows is enough
        of(root).objects.delete(f"captions/images/{shard}.parquet")
    said = []
    detector = DetectorSettings("faster_rcnn", preset="demo", untrained=True, maximum=12)
    found = detect(root, captions(world, detector=detector), said.append)
    assert found.untrained
    assert "captions: the network has random weights: its regions mean nothing" in said
    assert "WARNING" in said[-1]
    assert 10 * found.images <= found.regions <= 12 * found.images


# --- training ---------------------------------------------------------------------------------------------------------


def test_progress_lines_are_passed_on_now_and_then_and_all_others_always():
    heard = []
    on_line = paced(heard.append, 60)
    progress = [f"step {i}/100  words 1.000  10.0 samples/s  0:10 left" for i in range(5)]
    rest = ["step 4/100  validation  words_accuracy 0.500", "step 4/100  saved runs/x/step-0000004", "x is complete"]
    for line in progress + rest:
        on_line(line)
    assert heard == [progress[0], *rest]


def test_fine_tuning_starts_from_a_checkpoint_exactly_where_it_should(tmp_path: Path):
    with pytest.raises(ValueError, match="name one in start_from, or set pretrained to False"):
        finetune(str(tmp_path), FinetuneSettings())
    with pytest.raises(ValueError, match="leave start_from out, or set pretrained to True"):
        finetune(str(tmp_path), FinetuneSettings(pretrained=False), start_from="root/runs/x/step-0000001")


def test_the_vocabulary_of_a_run_in_a_bucket_becomes_a_file(tmp_path: Path):
    with s3_server("bucket"):
        objects = open_objects("s3://bucket/root")
        objects.put("runs/x/step-0000010/vocab.txt", b"old\n")
        objects.put("runs/x/step-0000020/vocab.txt", b"[PAD]\nred\n")
        trained = Trained("x", objects.where("runs/x/step-0000020"), {}, None, 1.0, 1)
        file = copy_vocabulary("s3://bucket/root", trained, tmp_path / "work")
    assert file.read_bytes() == b"[PAD]\nred\n"
    assert file.is_relative_to(tmp_path / "work")


# --- what the flow UI shows -------------------------------------------------------------------------------------------


def test_a_table_counts_every_status_and_quotes_the_web_as_plain_words(tmp_path: Path):
    catalog = of(str(tmp_path))
    hostile = "[x](javascript:alert(1)) | <b>`\\` http://a.example/_x_\n" + "y" * 300
    rows = [Row(0, "a" * 20, "http_404", hostile), Row(1, "b" * 20, "http_404", "second"), Row(2, "c" * 20, "timeout")]
    catalog.commit(IMAGES, "00000", [], rows, {"source": {}})
    catalog.commit(IMAGES, "00001", [], [Row(3, "d" * 20, "http_404", "third")], {"source": {}})
    first, _, head, _, *lines = table_of_counts(catalog, IMAGES).splitlines()
    assert first.startswith("4 rows in 2 shards: ")
    assert head == "| status | rows | for example |"
    assert lines[1:] == ["| timeout | 1 |  |"]
    assert lines[0].startswith(
        r"| http\_404 | 3 | \[x\]\(javascript\:alert\(1\)\) \| \<b\>\`\\\` http\:\/\/a\.example\/\_x\_ yyy"
    )
    assert lines[0].count("y") == 200 - hostile.index("y")


def test_no_two_datasets_share_an_artifact():
    keys = [key_of("images", name) for name in ("refcoco", "refcoco+", "RefCOCO", "refcoco_", "a-b", "a b", "ü", "ö")]
    assert keys[0] == "images-refcoco"
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch("[a-z0-9-]+", key) for key in keys)


# --- the whole road, as a flow ----------------------------------------------------------------------------------------


def tiny_road(world: World, root: Path) -> dict:
    """What `make demo` tells the flow, with four steps a run and one fine-tuning."""
    parameters = demo.flow_parameters(root, world, seed=0, processes=1)
    steps = ("steps=4", "validate_every=4", "validation_samples=8")
    return parameters | {
        "datasets": [
            dataclasses.replace(
                dataset,
                download=dataclasses.replace(dataset.download, deadline=1.5),
                rows_per_shard=10,
                shards_per_task=2,
            )
            for dataset in parameters["datasets"]
        ],
        "pretraining": dataclasses.replace(
            parameters["pretraining"], overrides=(*steps, "data.batch=4", "data.text_batch=2")
        ),
        "finetunings": [
            dataclasses.replace(settings, overrides=(*steps, "data.batch=4"))
            for settings in parameters["finetunings"][:1]
        ],
    }


@pytest.mark.usefixtures("prefect_server")
def test_the_road_leads_to_a_fine_tuned_model_and_a_second_run_does_nothing_twice(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from prefect.client.orchestration import get_client

    from flows.pipeline import pretrain_vlbert

    root = tmp_path / "root"
    caplog.set_level(logging.INFO)
    road = pretrain_vlbert(**tiny_road(world, root))
    assert [(done.dataset, done.shards, done.new_shards) for done in road.collected] == [
        ("captions", 4, 4),
        ("held-out", 1, 1),
        ("refcoco+", 2, 2),
    ]
    assert road.pretrained.checkpoint == str(root / "runs/pretrain/step-0000004")
    assert 0 <= road.pretrained.metrics["watched_accuracy"] <= 1
    words = (root / "runs/pretrain/step-0000004/vocab.txt").read_bytes()
    assert Path(road.pretrained.vocabulary).read_bytes() == words
    assert Path(road.pretrained.vocabulary).is_relative_to(root / "work")
    assert [trained.run for trained in road.finetuned] == ["finetune-with"]
    assert 0 < road.finetuned[0].metrics["chance"] < 1
    assert f"VL-BERT from {road.pretrained.checkpoint}" in caplog.text

    caplog.clear()
    again = pretrain_vlbert(**tiny_road(world, root) | {"finetunings": []})
    said = [record.getMessage() for record in caplog.records]
    assert "captions: nothing to download: 4 of 4 shards are committed" in said
    assert "refcoco+: nothing to download: 2 of 2 shards are committed" in said
    assert sum("nothing to detect" in line for line in said) == 3
    assert any(line.startswith("pretrain is complete: ") for line in said)
    assert again.pretrained.checkpoint == road.pretrained.checkpoint
    assert again.pretrained.metrics == road.pretrained.metrics

    with get_client(sync_client=True) as client:
        runs, tasks = client.read_flow_runs(limit=100), client.read_task_runs(limit=100)
        flows = {flow.id: flow.name for flow in client.read_flows()}
        artifacts = {artifact.key: artifact.data for artifact in client.read_artifacts(limit=100)}
        names = sorted(task.name for task in tasks if not task.state.state_details.child_flow_run_id)
    assert {run.state_type.value for run in runs} == {"COMPLETED"}
    assert sorted(flows[run.flow_id] for run in runs) == sorted(
        2 * ["pretrain-vlbert", *3 * ["collect-captions"], *3 * ["detect-regions"], "pretrain"] + ["finetune"]
    )
    # Four shards of captions in groups of two, one group held out, one imported: of the first run alone.
    # (Prefect keeps a task run for each subflow, too.)
    assert [name for name in names if " from " in name] == [
        "captions from 00000",
        "captions from 00002",
        "held-out from 00000",
        "refcoco+ from 00000",
    ]
    assert [name for name in names if " from " not in name] == sorted(
        2 * ["captions", "held-out", "refcoco+"]
    )  # detect
    assert set(artifacts) == {
        *("images-captions", "images-held-out", key_of("images", "refcoco+")),
        *("regions-captions", "regions-held-out", key_of("regions", "refcoco+")),
        *("pretrain-pretrain", "finetune-finetune-with"),
    }
    assert r"| http\_404 | 1 | " in artifacts["images-captions"]
    assert "| watched_accuracy |" in artifacts["pretrain-pretrain"]


@pytest.mark.usefixtures("prefect_server")
def test_a_stage_that_fails_fails_its_flow_with_the_reason(world: World, tmp_path: Path):
    from prefect.client.orchestration import get_client

    from flows.collect import collect_flow

    broken = tmp_path / "broken.tsv"
    broken.write_text("a caption without an address\n")
    with pytest.raises(ValueError, match="broken.tsv:1: no tab"):
        collect_flow(str(tmp_path / "root"), captions(world, broken, rows_per_shard=1))
    with get_client(sync_client=True) as client:
        run = max(client.read_flow_runs(limit=100), key=lambda run: run.created)
        tasks = [task for task in client.read_task_runs(limit=100) if task.flow_run_id == run.id]
    assert (run.name, run.state_type.value) == ("captions", "FAILED")
    assert not tasks, "a broken list is found before anything is asked for"
