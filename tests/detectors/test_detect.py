"""Image shards -> region shards, through a real catalog."""

import dataclasses
import io
import json
import os
import re
import socket
import subprocess
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

import boto3
import numpy as np
import pytest
import torch
from PIL import Image
from places import PROJECT
from safetensors.torch import save_file
from seeded import another_writer
from tiny_detector import coco_annotations, commit_images

from demo.__main__ import SHIPPED_DETECTOR
from detectors.annotated import AnnotatedDetector
from detectors.config import DetectionConfig, NetworkOverrides
from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import DEMO, FasterRCNN, FasterRCNNConfig
from detectors.run import detect_pending, detect_shard, finished, main, stage_of, stage_size
from detectors.weights.files import load_resnet, load_weights, read_config
from detectors.weights.init_from import init_from
from detectors.weights.releases import RELEASES
from storage.catalog import Row
from storage.progress import progress_line
from storage.sample import Regions, Sample
from storage.settings import from_assignments


def a_sample(number: int, broken: bool = False) -> Sample:
    rng = np.random.default_rng(number)
    pixels = np.full((84, 112, 3), rng.integers(0, 256, 3), np.uint8)
    for _ in range(6):
        y, x = rng.integers(0, 60), rng.integers(0, 80)
        pixels[y : y + 24, x : x + 30] = rng.integers(0, 256, 3)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "jpeg")
    image = stream.getvalue()[: 300 if broken else None]
    return Sample(f"{number:020x}", image, f"caption {number}", f"http://host/{number:06}.jpg", 112, 84, "ab")


def annotations(file: Path, numbers: Sequence[int]) -> Path:
    """One box an image, as many pixels wide as the image's number, on images annotated at twice the stored size."""
    return coco_annotations(file, {n: [(0, 0, 2 * n + 2, 10)] for n in numbers})


class CountingDetector(AnnotatedDetector):
    """Counts the samples it is shown."""

    samples = 0

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        self.samples += len(samples)
        return super().detect(samples)


def random_demo(**settings) -> FasterRCNNDetector:
    config = dataclasses.replace(DEMO, short_side=84, long_side=112, post_nms=30)
    network = FasterRCNN.random_init(config, 0)
    return FasterRCNNDetector(network, {"random_init": True, "seed": 0}, DetectorSettings(**settings))


def test_every_ok_row_becomes_a_row_with_regions_or_a_reason(tmp_path: Path):
    first = [a_sample(0), "timeout", a_sample(2), a_sample(3)]
    catalog = commit_images(tmp_path / "root", [first])
    detector = AnnotatedDetector(annotations(tmp_path / "a.json", [0, 3]))
    assert detect_shard(catalog, "00000", detector)
    manifest = catalog.manifest(stage_of(detector), "00000")
    assert [(r["row"], r["status"], r["num_regions"]) for r in manifest.table.to_pylist()] == [
        (0, "ok", 1),
        (2, "no_annotation", None),
        (3, "ok", 1),
    ]
    assert manifest.table["detail"][1].as_py().startswith("no image has the sample_key")
    assert manifest.table["url"][1].as_py() == "http://host/000002.jpg"
    found = list(catalog.read(stage_of(detector), "00000"))
    assert [sample.key for sample in found] == [first[0].key, first[3].key]
    assert [sample.regions.boxes.tolist() for sample in found] == [[[0, 0, 1, 5]], [[0, 0, 4, 5]]]
    assert [dataclasses.replace(sample, regions=None) for sample in found] == [first[0], first[3]]
    assert not detect_shard(catalog, "00000", detector)


def test_the_manifest_says_which_detector_looked_at_which_shard(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(0)]])
    for detector, random_init in (
        (AnnotatedDetector(annotations(tmp_path / "a.json", [0])), False),
        (random_demo(), True),
    ):
        assert detect_shard(catalog, "00000", detector)
        meta = catalog.manifest(stage_of(detector), "00000").meta
        assert meta["source"] == catalog.manifest("images", "00000").as_source()
        assert meta["config"] == json.loads(json.dumps(detector.metadata))
        assert meta["config_hash"] == detector.id
        assert meta["random_init"] is random_init


def test_a_broken_image_leaves_the_rest_of_its_shard_detected(tmp_path: Path):
    catalog = commit_images(tmp_path, [[a_sample(0), a_sample(1, broken=True), a_sample(2)]])
    detector = random_demo()
    assert detect_shard(catalog, "00000", detector)
    assert catalog.counts(stage_of(detector)) == {"bad_image": 1, "ok": 2}
    found = list(catalog.read(stage_of(detector), "00000"))
    alone = detector.detect([a_sample(0), a_sample(2)])
    for sample, regions in zip(found, alone, strict=True):
        assert np.array_equal(sample.regions.boxes, regions.boxes)
        assert sample.regions.class_probs.shape == (len(regions), 37)
        assert sample.regions.boxes[:, 2].max() <= 112
        assert sample.regions.boxes[:, 3].max() <= 84


def test_a_sample_that_is_none_costs_its_row_and_is_named(tmp_path: Path):
    samples = [a_sample(n) for n in range(3)]
    with another_writer(
        lambda key, members: members | {"json": b"[]"} if key == samples[1].key else members,
    ):
        catalog = commit_images(tmp_path, [samples])
    detector = random_demo()
    assert detect_shard(catalog, "00000", detector)
    table = catalog.manifest(stage_of(detector), "00000").table
    assert table["status"].to_pylist() == ["ok", "bad_sample", "ok"]
    assert f"sample {samples[1].key}: the .json member" in table["detail"][1].as_py()
    assert [sample.key for sample in catalog.read(stage_of(detector), "00000")] == [samples[0].key, samples[2].key]
    with pytest.raises(ValueError, match=samples[1].key):
        list(catalog.read("images", "00000"))


class Careless(AnnotatedDetector):
    """Boxes that begin left of the image, in some images."""

    def __init__(self, file: Path, wrong: Sequence[int]):
        super().__init__(file)
        self.wrong = [f"{number:020x}" for number in wrong]

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        found = super().detect(samples)
        for sample, regions in zip(samples, found, strict=True):
            if sample.key in self.wrong:
                regions.boxes[0, 0] = -1
        return found


def test_regions_that_no_reader_takes_are_not_written(tmp_path: Path):
    catalog = commit_images(tmp_path, [[a_sample(n) for n in range(1, 4)]])
    file = annotations(tmp_path / "a.json", [1, 2, 3])
    with pytest.raises(ValueError, match=r"shard 00000: .* regions\.boxes\[0\] is .*all of the 3 images"):
        detect_shard(catalog, "00000", Careless(file, [1, 2, 3]))
    detector = Careless(file, [2])
    assert detect_shard(catalog, "00000", detector)
    table = catalog.manifest(stage_of(detector), "00000").table
    assert table["status"].to_pylist() == ["ok", "bad_regions", "ok"]
    assert f"{2:020x}: regions.boxes[0] is [-1.0, " in table["detail"][1].as_py()


def test_the_same_input_gives_the_same_bytes_whatever_the_threads_around_it(tmp_path: Path):
    contents = []
    threads = torch.get_num_threads()
    try:
        for attempt, number in enumerate((1, 1, 2, 3)):
            torch.set_num_threads(number)
            root = tmp_path / str(attempt)
            catalog, detector = commit_images(root, [[a_sample(n) for n in range(4)]]), random_demo()
            detect_shard(catalog, "00000", detector)
            folder = root / "captions" / "regions" / detector.id
            contents.append({file.name: file.read_bytes() for file in folder.iterdir()})
    finally:
        torch.set_num_threads(threads)
    assert len(contents[0]) == 2
    assert all(content == contents[0] for content in contents)
    assert torch.get_num_threads() == threads


def test_pending_shards_are_detected_once_with_progress(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(0), a_sample(1)], ["dead"], [a_sample(3)] + [a_sample(4)]])
    detector = AnnotatedDetector(annotations(tmp_path / "a.json", [0, 1, 3]))
    reports = []
    assert detect_pending(catalog, detector, reports.append, only=["00002"]) == 1
    assert detect_pending(catalog, detector, reports.append) == 2
    assert detect_pending(catalog, detector, reports.append) == 0
    assert all(report.pop("images_per_s") >= 0 for report in reports)
    assert [(report.pop("done"), report["of"]) for report in reports] == [(1, 1), (1, 2), (2, 2)]
    assert sorted(reports, key=lambda report: report["shard"]) == [
        {"shard": "00000", "images": 2, "regions": 2, "of": 2, "by": "this"},
        {"shard": "00001", "images": 0, "regions": 0, "of": 2, "by": "this"},
        {"shard": "00002", "images": 2, "regions": 1, "of": 1, "by": "this"},
    ]
    assert catalog.counts(stage_of(detector)) == {"no_annotation": 1, "no_image": 1, "ok": 3}
    with pytest.raises(ValueError, match="no shards 00007"):
        detect_pending(catalog, detector, reports.append, only=["00007"])


def test_a_shard_whose_images_were_asked_again_is_detected_again_alone(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(0)], [a_sample(3)]])
    detector, reports = CountingDetector(annotations(tmp_path / "a.json", range(4))), []
    assert detect_pending(catalog, detector, reports.append) == 2
    samples = [a_sample(0), a_sample(1)]
    rows = [Row(number, sample.key, "ok", url=sample.url) for number, sample in enumerate(samples)]
    assert catalog.commit("images", "00000", samples, rows, {}, catalog.headers("images")["00000"])
    assert catalog.pending("images", stage_of(detector)) == ["00000"]
    detector.samples = 0
    assert detect_pending(catalog, detector, reports.append) == 1
    assert detector.samples == 2
    assert reports[-1]["shard"] == "00000"
    manifest = catalog.manifest(stage_of(detector), "00000")
    assert (manifest.revision, manifest.ok_rows) == (2, 2)
    assert detect_shard(catalog, "00000", detector) is False
    assert catalog.pending("images", stage_of(detector)) == []
    assert catalog.snapshot(stage_of(detector)).ok_rows == 3


def test_a_shard_that_another_does_meanwhile_counts_as_done_and_is_not_detected_again(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(n)] for n in range(4)])
    file = annotations(tmp_path / "a.json", range(4))
    detector, another, reports = CountingDetector(file), AnnotatedDetector(file), []

    def on_shard(report: dict) -> None:
        reports.append(report)
        if len(reports) == 1:
            left = catalog.pending("images", stage_of(detector))
            assert len(left) == 3
            for shard in left[:2]:
                assert detect_shard(catalog, shard, another)

    assert detect_pending(catalog, detector, on_shard) == 2
    assert detector.samples == 2
    assert [report["of"] for report in reports] == [4, 4]
    assert reports[0]["done"] == 1
    assert 2 <= reports[1]["done"] <= 4
    assert catalog.pending("images", stage_of(detector)) == []


def test_a_shard_that_another_commits_while_it_is_detected_is_reported_as_the_others(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(0)]])
    file = annotations(tmp_path / "a.json", [0])
    another, reports = AnnotatedDetector(file), []

    class Overtaken(AnnotatedDetector):
        def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
            assert detect_shard(catalog, "00000", another)
            return super().detect(samples)

    assert detect_pending(catalog, Overtaken(file), reports.append) == 0
    assert [(report["shard"], report["by"], report["done"], report["of"]) for report in reports] == [
        ("00000", "another", 1, 1)
    ]


def test_every_run_takes_the_shards_in_an_order_of_its_own(tmp_path: Path):
    orders = set()
    for attempt in range(3):
        catalog = commit_images(tmp_path / str(attempt), [["dead"]] * 12)
        shards = []
        detect_pending(
            catalog,
            AnnotatedDetector(annotations(tmp_path / "a.json", [0])),
            lambda report, shards=shards: shards.append(report["shard"]),
        )
        assert sorted(shards) == [f"{shard:05}" for shard in range(12)]
        orders.add(tuple(shards))
    assert len(orders) > 1


def test_two_processes_share_the_shards(tmp_path: Path):
    """One process alone does each of 12 shards; two that did not look would do each twice."""
    picture = [a_sample(n) for n in range(40)]
    catalog = commit_images(
        tmp_path / "root",
        [[dataclasses.replace(s, key=f"{shard}-{s.key}") for s in picture] for shard in range(12)],
    )
    file = annotations(tmp_path / "a.json", range(60))
    command = [
        sys.executable,
        "-m",
        "detectors.run",
        str(tmp_path / "root"),
        "captions",
        "--json",
        "backend=annotated",
    ]
    command += [f"annotations={file}"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    reports = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    shards = [report for lines in reports for report in lines[:-1]]
    assert sorted(report["shard"] for report in shards if report["by"] == "this") == catalog.shards("images")
    assert len(shards) <= 20
    assert all(lines[-1]["shards"] == 12 for lines in reports)
    for lines in reports:
        done = [report["done"] for report in lines[:-1]]
        assert done == sorted(set(done))
        assert all(1 <= report["done"] <= report["of"] <= 12 for report in lines[:-1])


def test_shards_larger_than_a_group_keep_their_order(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(n) for n in range(40)]])
    detector = AnnotatedDetector(annotations(tmp_path / "a.json", range(40)))
    assert detect_shard(catalog, "00000", detector)
    widths = [s.regions.boxes[0, 2] for s in catalog.read(stage_of(detector), "00000")]
    assert widths == [n + 1 for n in range(40)]


def test_a_detector_that_fails_leaves_nothing_behind(tmp_path: Path):
    catalog = commit_images(tmp_path, [[a_sample(0), a_sample(1)]])

    class Forgetful:
        id = "0123456789ab"
        metadata = {"random_init": False}

        def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
            return ["no_regions: none"] * (len(samples) - 1)

    with pytest.raises(ValueError, match="zip"):
        detect_shard(catalog, "00000", Forgetful())
    assert catalog.shards("regions/0123456789ab") == []
    assert catalog.pending("images", "regions/0123456789ab") == ["00000"]


def test_a_stage_knows_its_size(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(0), a_sample(1)]])
    detector = AnnotatedDetector(annotations(tmp_path / "a.json", [0, 1]))
    assert stage_size(catalog, stage_of(detector))["bytes_per_1000_images"] is None
    detect_shard(catalog, "00000", detector)
    files = list((tmp_path / "root" / "captions" / "regions" / detector.id).iterdir())
    catalog.pin(f"regions/{detector.id}")  # what trainings write there is none of it
    size = stage_size(catalog, stage_of(detector))
    assert size["bytes"] == sum(file.stat().st_size for file in files) > 0
    assert (size["images"], size["bytes_per_1000_images"]) == (2, 500 * size["bytes"])
    assert size["keep_features"] is False


NETWORK = ["backend=faster_rcnn"]
TRAINED = [*NETWORK, f"weights={SHIPPED_DETECTOR}"]
RANDOM_INIT = [*NETWORK, "preset=demo", "random_init=true"]


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        (["backend=annotated", "annotations=FILE"], ["crowd=keep"]),
        (["backend=annotated", "annotations=FILE", "crowd=keep"], ["crowd=skip"]),
        (TRAINED, ["boxes=regressed"]),
        (
            [*TRAINED, "selection.maximum=7", "selection.minimum=3", "network.post_nms=9", "keep_features=true"],
            ["keep_features=false"],
        ),
        ([*TRAINED, "threads=2", "batch=3"], ["selection.maximum=11"]),
        (RANDOM_INIT, ["seed=3"]),
        ([*RANDOM_INIT, "seed=3", "precision=bf16-res5"], ["seed=4"]),
        ([*RANDOM_INIT, "boxes=given", "annotations=FILE"], ["keep_features=true"]),
    ],
)
def test_that_nothing_is_left_is_known_without_a_detector(fields: list[str], other: list[str], tmp_path: Path, capsys):
    root, file = tmp_path / "root", annotations(tmp_path / "a.json", [0, 1])
    fields = [field.replace("=FILE", f"={file}") for field in fields]
    config, others = (from_assignments(DetectionConfig, [*fields, *more]) for more in ([], other))
    catalog = commit_images(root, [[a_sample(0), a_sample(1)], ["http_404"]])
    assert finished(catalog, config) is None
    another = annotations(tmp_path / "b.json", [1])  # a detector that is done
    main([str(root), "captions", "backend=annotated", f"annotations={another}"])
    assert finished(catalog, config) is None
    main([str(root), "captions", *fields, "--shard", "00000"])
    assert finished(catalog, config) is None, "a shard is left"
    main([str(root), "captions", *fields, "--json"])
    assert finished(catalog, config) == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert finished(catalog, others) is None
    file.write_text(file.read_text() + " ")
    assert (finished(catalog, config) is None) == bool(config.annotations), "another file, another detector"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("network", "[" * 100_000),
        ("network", "[1]"),
        ("network", '{"resnet": [1]}'),
        ("network", '{"num_classes": 36}'),
        ("network", '{"resnet": {}, "num_classes": "x"}'),
        ("network", '{"resnet": {}, "resize": ["pil"]}'),
        ("network", "{"),
        ("classes", "5"),
        ("classes", '{"a": 1}'),
        ("classes", "[1]"),
        ("classes", '["\\ud800"]'),
        ("attributes", '"names"'),
        ("detection", "[1]"),
        ("anchors", "{}"),
        ("release", "7"),
    ],
)
def test_metadata_of_another_kind_are_named_by_all_that_read_a_weight_file(key: str, text: str, tmp_path: Path):
    file, root = tmp_path / "theirs.safetensors", tmp_path / "root"
    tensors = {"roi_heads.box_predictor.attr_score.bias": torch.zeros(1)}
    save_file(tensors, file, metadata={"network": json.dumps(dataclasses.asdict(DEMO)), key: text})
    catalog = commit_images(root, [[a_sample(0)]])
    main([str(root), "captions", "backend=annotated", f"annotations={annotations(tmp_path / 'a.json', [0])}"])
    with pytest.raises(SystemExit) as ended:
        main([str(root), "captions", *NETWORK, f"weights={file}"])
    assert re.search(f"^{file}: its (metadata '{key}'|`{key}`) .*convert it again", ended.value.code)
    assert finished(catalog, DetectionConfig(weights=str(file))) is None
    with pytest.raises(ValueError, match=f"^{file}: its (metadata '{key}'|`{key}`) "):
        load_weights(FasterRCNN(DEMO), file) if key != "network" else read_config(file)


@pytest.mark.parametrize("text", ["[1]", '{"resnet": [1]}', "[" * 100_000])
def test_a_resnet_of_a_file_whose_metadata_are_of_another_kind_is_refused(text: str, tmp_path: Path):
    file, network = tmp_path / "theirs.safetensors", FasterRCNN(DEMO)
    save_file({"backbone.a": torch.zeros(1)}, file, metadata={"network": text})
    with pytest.raises(ValueError, match=f"^{file}: its metadata 'network' .*convert it again"):
        load_resnet(network.backbone, network.roi_heads.res5, file)
    with pytest.raises(ValueError, match=f"^{file}: its metadata 'network' .*convert it again"):
        init_from(network, file)


def test_a_file_whose_anchors_are_no_list_starts_another_rpn(tmp_path: Path):
    file = tmp_path / "theirs.safetensors"
    save_file(FasterRCNN(DEMO).state_dict(), file, metadata={"network": '{"anchor_sizes": 5}'})
    assert str(file) in init_from(FasterRCNN(DEMO), file)


def test_what_a_detection_may_set_of_the_network_is_a_field_of_the_network():
    fields, overrides = (typing.get_type_hints(kind) for kind in (FasterRCNNConfig, NetworkOverrides))
    assert overrides == {name: fields[name] | None for name in overrides}


def test_the_notes_on_releases_name_settings_that_there_are():
    named = [name for release in RELEASES.values() for name in re.findall(r"network\.\w+|--[\w-]+", release.note)]
    assert {"network.short_side", "network.long_side"} <= {*named}
    assert {*named} <= {f"network.{field.name}" for field in dataclasses.fields(NetworkOverrides)}


def test_features_and_regressed_boxes_come_back_from_shards_that_do_not_mix(tmp_path: Path):
    pictures = [a_sample(n) for n in range(4)]
    catalog, sizes = commit_images(tmp_path, [pictures]), {}
    for boxes, keep in (("proposals", False), ("proposals", True), ("regressed", True)):
        detector = random_demo(boxes=boxes, keep_features=keep)
        detector.network.roi_heads.box_predictor.bbox_pred.weight.data *= 50
        assert detect_shard(catalog, "00000", detector)
        found = [sample.regions for sample in catalog.read(stage_of(detector), "00000")]
        for ours, regions in zip(detector.detect(pictures), found, strict=True):
            assert np.array_equal(ours.boxes, regions.boxes)
            assert (regions.features is not None) == keep
            if keep:
                assert regions.features.shape == (len(regions), DEMO.resnet.res5_channels)
                assert (regions.features.dtype, regions.features.any()) == (np.float16, True)
                assert np.array_equal(ours.features, regions.features)
        sizes[boxes, keep] = stage_size(catalog, stage_of(detector)) | {"regions": found}
    assert [size["keep_features"] for size in sizes.values()] == [False, True, True]
    assert len({size["stage"] for size in sizes.values()}) == 3
    plain, featured, regressed = (size["regions"] for size in sizes.values())
    for one, two, three in zip(plain, featured, regressed, strict=True):
        assert np.array_equal(one.boxes, two.boxes)
        assert np.array_equal(two.features, three.features)
        assert not np.array_equal(two.boxes, three.boxes)
    # Two bytes a number; beside them only the array's header, and padding of members and of the tar.
    numbers = sum(regions.features.size for regions in featured)
    more = sizes["proposals", True]["bytes"] - sizes["proposals", False]["bytes"]
    assert abs(more - 2 * numbers) < 10_240 + len(pictures) * 512 + 1024
    assert 2 * numbers > 20_480


def test_the_command_tells_people_how_far_it_is_in_the_form_of_every_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    commit_images(tmp_path / "root", [[a_sample(0)], [a_sample(1), a_sample(2)]])
    file = annotations(tmp_path / "a.json", [0, 1])
    main([str(tmp_path / "root"), "captions", "backend=annotated", f"annotations={file}"])
    lines = capsys.readouterr().out.splitlines()
    form = r"captions: \d of 2 shards: \d images, \d regions; [\d,]+\.\d shards/s, 0:\d\d gone, 0:\d\d left"
    assert [bool(re.fullmatch(form, line)) for line in lines] == [True, True, False]
    assert lines[1].startswith("captions: 2 of 2 shards: 3 images, 2 regions; ")
    assert re.fullmatch(r"captions: 0.0 MB in regions/\w+, \d+\.\d per 1,000 images, without features", lines[2])


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (2.0, "x: 1,000 of 4,000 rows: 900 ok, 100 http_404; 500.0 rows/s, 0:02 gone, 0:06 left"),
        (3600.0, "x: 1,000 of 4,000 rows: 900 ok, 100 http_404; 0.3 rows/s, 1:00:00 gone, 3:00:00 left"),
        (0.0, "x: 1,000 of 4,000 rows: 900 ok, 100 http_404; 0.0 rows/s, 0:00 gone"),
    ],
)
def test_progress_has_counts_rate_and_what_is_left(seconds: float, line: str):
    assert progress_line("x", 1000, 4000, "rows", {"http_404": 100, "ok": 900}, seconds) == line


def test_the_command_detects_and_reports_in_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture):
    commit_images(tmp_path / "root", [[a_sample(0)], [a_sample(1), a_sample(2)]])
    file = annotations(tmp_path / "a.json", [0, 1])
    main([str(tmp_path / "root"), "captions", "--json", "backend=annotated", f"annotations={file}"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["done"], line["of"]) for line in lines[:2]] == [(1, 2), (2, 2)]
    assert sorted((line["shard"], line["images"]) for line in lines[:2]) == [("00000", 1), ("00001", 2)]
    assert lines[2]["images"] == 2
    assert lines[2]["bytes_per_1000_images"] > 0
    assert lines[2]["keep_features"] is False


def test_the_command_runs_the_network_with_weights_or_untrained(tmp_path: Path, capsys: pytest.CaptureFixture):
    root = tmp_path / "root"
    catalog = commit_images(root, [[a_sample(0)]])
    weights = tmp_path / "w.safetensors"
    save_file(FasterRCNN.random_init(DEMO, 7).state_dict(), weights)
    network = [str(root), "captions", "backend=faster_rcnn", "preset=demo"]
    others = ["selection.strict=false", "selection.maximum=12"]
    for flags in ([f"weights={weights}"], ["random_init=true"], ["random_init=true", *others]):
        main([*network, *flags])
    assert "random weights" in capsys.readouterr().err
    stages = sorted((root / "captions" / "regions").iterdir())
    configs = [catalog.manifest(f"regions/{stage.name}", "00000").meta["config"] for stage in stages]
    assert sorted((c["random_init"], c["selection"]["maximum"], c["selection"]["strict"]) for c in configs) == [
        (False, 100, True),
        (True, 12, False),
        (True, 100, True),
    ]


def test_the_command_says_how_much_a_stage_takes_with_features(tmp_path: Path, capsys: pytest.CaptureFixture):
    root = tmp_path / "root"
    catalog = commit_images(root, [[a_sample(0)]])
    network = [str(root), "captions", "backend=faster_rcnn", "preset=demo", "random_init=true"]
    stages = []
    for flags in ([], ["keep_features=false"], ["keep_features=true"], ["keep_features=true", "boxes=regressed"]):
        main([*network, "--json", *flags])
        stages.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    names = [stage["stage"] for stage in stages]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert [stage["keep_features"] for stage in stages] == [False, False, True, True]
    bytes_of = [stage["bytes_per_1000_images"] for stage in stages]
    assert bytes_of[0] == bytes_of[1] < bytes_of[2]
    configs = [catalog.manifest(name, "00000").meta["config"] for name in names[1:]]
    assert [(config["boxes"], config["keep_features"]) for config in configs] == [
        ("proposals", False),
        ("proposals", True),
        ("regressed", True),
    ]


DEMO_NETWORK = ["preset=demo", "random_init=true"]
GIVEN = [*DEMO_NETWORK, "boxes=given", "annotations=absent.json"]
FILE = ["backend=annotated", "annotations=absent.json"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["backend=annotated"], "annotations is not set: backend annotated needs a file"),
        ([], "weights is None and random_init False: backend faster_rcnn needs weights .* not both"),
        (["backend=yolo"], "backend=yolo: it must be one of annotated, faster_rcnn, detectron2"),
        (["random_init=true"], "preset is not set"),
        (["preset=demo"], "needs weights"),
        ([*DEMO_NETWORK, "weights=x"], "not both"),
        (["preset=vgg", "random_init=true"], "preset=vgg: it must be one of vg_resnet101"),
        (["preset=demo", "weights=x.st"], "there is no weight file x.st"),
        (["preset=demo", "weights=x", "seed=3"], "seed is 3: it is that of random weights"),
        ([*DEMO_NETWORK, "selection.minimum=101"], "minimum 101"),
        ([*DEMO_NETWORK, "selection.most=3"], "SelectionSettings has no field 'most'; it has minimum, maximum"),
        ([*DEMO_NETWORK, "network.long_side=7"], "FasterRCNNConfig.long_side is 7"),
        ([*DEMO_NETWORK, "batch=0"], "DetectionConfig.batch is 0"),
        ([*DEMO_NETWORK, "device=tpu"], "DetectionConfig.device is 'tpu'"),
        ([*DEMO_NETWORK, "tf32=true"], "DetectionConfig.tf32 is True; it must be false with device cpu"),
        ([*DEMO_NETWORK, "boxes=given"], "annotations is not set: boxes given needs a file"),
        ([*DEMO_NETWORK, "annotations=a.json"], "annotations: not for backend faster_rcnn; leave out"),
        ([*DEMO_NETWORK, "boxes=regressed", "crowd=keep"], "crowd: not for backend faster_rcnn"),
        ([*GIVEN, "selection.minimum=3"], "selection.minimum: not for boxes given"),
        (
            [*GIVEN, "selection.strict=false", "selection.threshold=0.2"],
            "selection.threshold, selection.strict: not",
        ),
        (GIVEN, "there is no annotation file absent.json"),
        (FILE, "there is no annotation file absent.json"),
        ([*FILE, "selection.threshold=0.2"], "selection.threshold: not for backend annotated"),
        ([*FILE, "network.post_nms=3", "random_init=true"], "random_init, network.post_nms: not for backend annotated"),
        ([*FILE, "boxes=regressed", "keep_features=true"], "boxes, keep_features: not for backend annotated"),
        ([*FILE, "boxes=given"], "boxes: not for backend annotated"),
        ([*FILE, "device=cuda", "tf32=true"], "device, tf32: not for backend annotated"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_in_words(tmp_path: Path, fields: list[str], message: str):
    with pytest.raises(SystemExit, match=message):
        main([str(tmp_path), "captions", *fields])


def unreachable() -> str:
    """The URL of a port of this machine where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def s3_environment(endpoint: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**os.environ, **keys, "AWS_ENDPOINT_URL": endpoint}


def test_storage_out_of_reach_is_one_line_and_the_status_for_trying_again(tmp_path: Path):
    file = annotations(tmp_path / "a.json", [0])
    endpoint = unreachable()
    command = [sys.executable, "-m", "detectors.run", "s3://bucket/root", "captions", "backend=annotated"]
    run = subprocess.run(
        [*command, f"annotations={file}"],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env=s3_environment(endpoint),
        timeout=60,
    )
    assert (run.returncode, run.stdout) == (75, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"cannot reach bucket 'bucket' at {endpoint} (root s3://bucket/root)")


@pytest.mark.slow  # botocore waits longer after each of five attempts
def test_storage_that_goes_away_under_way_ends_in_the_same_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    for name, value in s3_environment("http://{}:{}".format(*server.get_host_and_port())).items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    commit_images("s3://bucket/root", [[a_sample(n)] for n in range(2)])
    file = annotations(tmp_path / "a.json", range(2))

    class Unplugging(io.StringIO):
        """The program's output; its first line ends the server."""

        def write(self, text: str) -> int:
            if not self.tell():
                server.stop()
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Unplugging())
    with pytest.raises(SystemExit) as ended:
        main(["s3://bucket/root", "captions", "--json", "backend=annotated", f"annotations={file}"])
    assert ended.value.code == 75
    assert json.loads(sys.stdout.getvalue())["done"] == 1


def test_a_dataset_without_images_is_no_finished_stage(tmp_path: Path):
    file = annotations(tmp_path / "a.json", [0])
    with pytest.raises(SystemExit, match=r"no shard is committed in .*typo/images; collect the images first"):
        main([str(tmp_path / "root"), "typo", "backend=annotated", f"annotations={file}"])


def test_the_annotated_backend_does_without_the_network(tmp_path: Path):
    commit_images(tmp_path / "root", [[a_sample(0)]])
    file = annotations(tmp_path / "a.json", [0])
    arguments = [str(tmp_path / "root"), "captions", "backend=annotated", f"annotations={file}"]
    code = f"import sys, detectors.run as r; r.main({arguments!r}); sys.exit('detectors.faster_rcnn' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert (run.returncode, run.stderr) == (0, "")
