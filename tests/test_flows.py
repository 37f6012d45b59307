"""The stages on a tiny drawn world, most of them without Prefect, and the whole road as a flow, twice."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import demo.__main__ as demo
from demo.serve import WorldServer, free_port
from demo.world import World, WorldSettings, draw_world
from flows.collect import Part, check_committed, collect, collect_group, network_failed, plan
from flows.detect import detect
from flows.finetune import finetune
from flows.settings import Dataset, DetectorSettings, FinetuneSettings, Processes
from flows.supervisor import ChildFailed
from flows.training import Trained, paced
from storage.catalog import Catalog
from storage.download import DownloadSettings
from storage.objects import StorageUnreachable, open_objects

IMAGES = "images"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """24 captioned scenes and 8 broken rows, 8 held out, 16 RefCOCO+ pictures; served while the tests run."""
    settings = WorldSettings(
        train_scenes=24, held_out_scenes=8, broken_rows=8, text_lines=60, refcoco_train=7, refcoco_held_out=3
    )
    drawn = draw_world(tmp_path_factory.mktemp("world"), settings, free_port(0))
    with WorldServer(drawn.root):
        yield drawn


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
    collect(str(root), captions(world), lambda line: None)
    return root


@pytest.fixture
def root(collected: Path, tmp_path: Path) -> str:
    """A root of the test's own with the captioned scenes collected."""
    return str(shutil.copytree(collected, tmp_path / "root"))


def of(root: str, dataset: str = "captions") -> Catalog:
    return Catalog(open_objects(root), dataset)


# --- collect ----------------------------------------------------------------------------------------------------------


def test_shards_are_ranges_of_rows_and_every_row_is_in_one(world: World, root: str):
    assert [(part.shard, part.start, part.stop) for part in plan(captions(world), {})] == [
        ("00000", 0, 10),
        ("00001", 10, 20),
        ("00002", 20, 30),
        ("00003", 30, 32),
    ]
    tables = [of(root).manifest(IMAGES, shard).table for shard in of(root).shards(IMAGES)]
    rows = [table["row"].to_pylist() for table in tables]
    assert rows == [list(range(10)), list(range(10, 20)), list(range(20, 30)), [30, 31]]
    urls = [url for table in tables for url in table["url"].to_pylist()]
    assert urls == [line.split("\t")[1] for line in world.train_tsv.read_text().splitlines()]
    assert of(root).counts(IMAGES)["ok"] >= 24


def test_what_is_committed_is_not_downloaded_again_and_the_stage_says_so(world: World, root: str):
    said, groups = [], []
    again = collect(root, captions(world), said.append, lambda *arguments: groups.append(arguments))
    assert said == ["captions: nothing to download: 4 of 4 shards are committed"]
    assert groups == []
    assert (again.shards, again.new_shards) == (4, 0)
    assert again.counts == of(root).counts(IMAGES)


def test_only_the_missing_shards_are_collected_in_groups(world: World, root: str):
    before = {shard: of(root).manifest(IMAGES, shard).sha256 for shard in of(root).shards(IMAGES)}
    for shard in ("00000", "00002", "00003"):
        of(root).objects.delete(f"captions/images/{shard}.parquet")
    said, groups = [], []

    def group(at: str, dataset: Dataset, parts: list[Part]) -> dict[str, int]:
        groups.append([part.shard for part in parts])
        return collect_group(at, dataset, parts)

    result = collect(root, captions(world), said.append, group)
    assert groups == [["00000", "00002"], ["00003"]]
    assert result.new_shards == 3
    assert said[0] == f"captions: 3 of 4 shards to collect, 32 rows in {world.train_tsv}"
    assert said[1].startswith("captions: 2 of 3 shards collected: ")
    assert {shard: of(root).manifest(IMAGES, shard).sha256 for shard in of(root).shards(IMAGES)} == before


def test_a_group_that_is_tried_again_leaves_committed_shards_alone(world: World, root: str):
    of(root).objects.delete("captions/images/00003.parquet")
    counts = collect_group(root, captions(world), plan(captions(world), {}))
    assert sum(counts.values()) == 2  # rows 30 and 31 alone
    assert collect_group(root, captions(world), plan(captions(world), {})) == {}


def test_a_list_that_changed_under_committed_shards_is_an_error(world: World, root: str, tmp_path: Path):
    lines = world.train_tsv.read_text().splitlines(keepends=True)
    changed = tmp_path / "changed.tsv"
    for new, what in (
        ([*lines[:15], "another " + lines[15], *lines[16:]], "shard 00001 holds rows 10 to 20"),
        (lines[1:], "shard 00000 holds rows 0 to 10"),
        (lines[:30], "shard 00003 holds rows 30 to 32 of .*, now it would be only 3 shards"),
        (lines[:31], "shard 00003 holds rows 30 to 32 of .*, now it would be rows 30 to 31"),
    ):
        changed.write_text("".join(new))
        with pytest.raises(ValueError, match=f"captions: the list changed under committed shards: {what}"):
            collect(root, captions(world, changed))
    with pytest.raises(ValueError, match="shard 00000 was collected with other image settings: max_side 1024, now 512"):
        collect(root, captions(world, download=DownloadSettings(max_side=512)))
    changed.write_text("".join(lines))  # under another name it is the same list
    assert collect(root, captions(world, changed), lambda line: None).new_shards == 0


def test_a_list_may_grow_and_its_new_rows_make_new_shards(world: World, tmp_path: Path):
    lines = world.train_tsv.read_text().splitlines()
    growing, root = tmp_path / "growing.tsv", str(tmp_path / "root")
    for rows, rows_per_shard, new_shards in ((10, 10, 1), (14, 10, 1), (14, 5, 0), (20, 4, 2)):
        growing.write_text("\n".join(lines[:rows]))  # without a newline at the end, which the next round then has
        dataset = captions(world, growing, rows_per_shard=rows_per_shard)
        assert collect(root, dataset, lambda line: None).new_shards == new_shards
    tables = [of(root).manifest(IMAGES, shard).table for shard in of(root).shards(IMAGES)]
    assert [table["row"].to_pylist() for table in tables] == [
        [*range(10)],
        [*range(10, 14)],
        [*range(14, 18)],
        [18, 19],
    ]


def test_an_empty_list_or_folder_is_an_error(world: World, tmp_path: Path):
    (tmp_path / "empty.tsv").touch()
    with pytest.raises(ValueError, match="holds nothing to collect for captions"):
        collect(str(tmp_path / "root"), captions(world, tmp_path / "empty.tsv"))
    with pytest.raises(ValueError, match="is no folder of images"):
        plan(dataclasses.replace(refcoco(world), images=str(tmp_path / "nowhere")), {})


def test_a_folder_of_images_becomes_shards_whose_rows_count_through(world: World, tmp_path: Path):
    root, said = str(tmp_path), []
    assert collect(root, refcoco(world), said.append).counts == {"ok": 16}
    catalog = of(root, "refcoco+")
    tables = [catalog.manifest(IMAGES, shard).table for shard in catalog.shards(IMAGES)]
    assert [table["row"].to_pylist() for table in tables] == [[*range(6)], [*range(6, 12)], [*range(12, 16)]]
    names = sorted(file.name for file in world.refcoco_images.iterdir())
    assert [url for table in tables for url in table["url"].to_pylist()] == names
    assert collect(root, refcoco(world), said.append).new_shards == 0
    done = {shard: catalog.manifest(IMAGES, shard).meta for shard in catalog.shards(IMAGES)}
    with pytest.raises(ValueError, match="the list changed"):
        check_committed(done, plan(refcoco(world), {})[1:], refcoco(world))


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
    assert "shard 00003, 4 of 4:" in said[3]

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


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="Dataset x: set captions .* or images"):
        Dataset("x", DetectorSettings(), captions="a.tsv", images="folder")
    with pytest.raises(ValueError, match="Dataset x: set captions .* or images"):
        Dataset("x", DetectorSettings())
    with pytest.raises(ValueError, match="rows_per_shard is 0"):
        Dataset("x", DetectorSettings(), captions="a.tsv", rows_per_shard=0)
    with pytest.raises(ValueError, match="annotated needs annotations"):
        DetectorSettings("annotated")
    with pytest.raises(ValueError, match="count is 0"):
        Processes(0)


# --- the whole road, as a flow ----------------------------------------------------------------------------------------


def tiny_road(world: World, root: Path) -> dict:
    """What `make demo` tells the flow, with four steps a run and one fine-tuning."""
    parameters = demo.flow_parameters(root, world, seed=0, processes=1)
    steps = ("steps=4", "validate_every=4", "validation_samples=8")
    return parameters | {
        "datasets": [
            dataclasses.replace(dataset, rows_per_shard=10, shards_per_task=2) for dataset in parameters["datasets"]
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
    assert {run.state_type.value for run in runs} == {"COMPLETED"}
    assert sorted(flows[run.flow_id] for run in runs) == sorted(
        2 * ["pretrain-vlbert", *3 * ["collect-captions"], *3 * ["detect-regions"], "pretrain"] + ["finetune"]
    )
    # Four shards of captions in groups of two, one group held out, one imported: of the first run alone.
    # (Prefect keeps a task run for each subflow, too.)
    assert sorted(task.name for task in tasks if not task.state.state_details.child_flow_run_id) == [
        "captions from 00000",
        "captions from 00002",
        "held-out from 00000",
        "refcoco+ from 00000",
    ]
    assert set(artifacts) == {
        *("images-captions", "images-held-out", "images-refcoco"),
        *("regions-captions", "regions-held-out", "regions-refcoco", "pretrain-pretrain", "finetune-finetune-with"),
    }
    assert "| http_404: " in artifacts["images-captions"]
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


# --- the driver of make demo ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grounding", "with_it", "without", "failed"),
    [
        (0.12, 0.5, 0.4, []),
        (0.11, 0.5, 0.4, ["grounding is 0.110"]),
        (0.3, 0.25, 0.2, ["not over chance"]),
        (0.3, 0.4, 0.4, ["not over 0.400 without it"]),
        (0.0, 0.1, 0.4, ["grounding is 0.000", "not over chance", "not over 0.400 without it"]),
    ],
)
def test_the_gates_name_what_was_not_learned(grounding: float, with_it: float, without: float, failed: list[str]):
    from flows.pipeline import Road

    def trained(run: str, metrics: dict[str, float]) -> Trained:
        return Trained(run, "", metrics, None, 1.0, 1)

    finetuned = [
        trained(demo.RUNS["with"], {"accuracy": with_it, "chance": 0.25}),
        trained(demo.RUNS["without"], {"accuracy": without, "chance": 0.25}),
    ]
    road = Road([], {}, trained("pretrain", {"watched_accuracy_grounding": grounding}), finetuned)
    messages = demo.gates(road)
    assert len(messages) == len(failed)
    for message, part in zip(messages, failed, strict=True):
        assert message.startswith("GATE FAILED: ")
        assert part in message


def test_a_server_that_does_not_come_up_is_an_error_with_its_last_words(tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text("Port 4200 is already in use.\n")
    with pytest.raises(RuntimeError, match=r"(?s)did not answer.*Port 4200 is already in use"):
        demo.wait_for("http://127.0.0.1:9/health", lambda: False, log)
