"""Image shards -> region shards, through a real catalog."""

import dataclasses
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_detector import coco_annotations, commit_images, image_sample, rectangles

from demo.deployments import SHIPPED_DETECTOR
from detectors.annotated import AnnotatedDetector
from detectors.config import DetectionConfig
from detectors.detect import DetectorSettings, FasterRCNNDetector, choose_device
from detectors.faster_rcnn import DEMO, FasterRCNN
from detectors.run import IMAGES, detect_pending, detect_shard, identify, main, make_detector, stage_of
from storage.catalog.commit import commit_shard, withdraw_samples
from storage.manifests import Row
from storage.sample import Regions, Sample
from storage.settings import parse
from storage.withdrawn import withdraw


def a_sample(number: int) -> Sample:
    return image_sample(number, rectangles(84, 112, number))


def annotations(file: Path, numbers: Sequence[int]) -> Path:
    """One box an image, as many pixels wide as the image's number, on images annotated at twice the stored size."""
    return coco_annotations(file, {n: [(0, 0, 2 * n + 2, 10)] for n in numbers})


class CountingDetector(AnnotatedDetector):
    """Counts the samples it is shown; in some images, `wrong`, its boxes begin left of the image."""

    samples, wrong = 0, ()

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        self.samples += len(samples)
        found = super().detect(samples)
        for sample, regions in zip(samples, found, strict=True):
            if int(sample.key, 16) in self.wrong:
                regions.boxes[0, 0] = -1
        return found


def test_every_ok_row_becomes_a_row_with_regions_or_a_reason(tmp_path: Path):
    first = [a_sample(0), "timeout", a_sample(2), a_sample(3)]
    catalog = commit_images(tmp_path / "root", [first])
    detector = AnnotatedDetector(annotations(tmp_path / "a.json", [0, 3]))
    assert detect_shard(catalog, "00000", detector)
    manifest = catalog.manifest(stage_of(detector), "00000")
    about = {"config": json.loads(json.dumps(detector.metadata)), "config_hash": detector.id, "random_init": False}
    about |= {"source": catalog.manifest("images", "00000").as_source()}
    assert about.items() <= manifest.meta.items()
    assert [(r["row"], r["status"], r["num_regions"], r["license"]) for r in manifest.table.to_pylist()] == [
        (0, "ok", 1, "CC 0"),
        (2, "no_annotation", None, "CC 2"),
        (3, "ok", 1, "CC 3"),
    ]
    missing = manifest.table.to_pylist()[1]
    assert missing["detail"] == f"no image has the file_name {missing['url'].removeprefix('http://host/')}"
    found = list(catalog.read(stage_of(detector), "00000"))
    assert [sample.key for sample in found] == [first[0].key, first[3].key]
    assert [sample.regions.boxes.tolist() for sample in found] == [[[0, 0, 1, 5]], [[0, 0, 4, 5]]]
    assert [dataclasses.replace(sample, regions=None) for sample in found] == [first[0], first[3]]
    assert not detect_shard(catalog, "00000", detector)


def test_regions_that_no_reader_takes_are_not_written(tmp_path: Path):
    catalog = commit_images(tmp_path, [[a_sample(n) for n in range(1, 4)]])
    detector = CountingDetector(annotations(tmp_path / "a.json", [1, 2, 3]))
    detector.wrong = (1, 2, 3)
    with pytest.raises(ValueError, match=r"shard 00000: .* regions\.boxes\[0\] is .*all 3 images"):
        detect_shard(catalog, "00000", detector)
    detector.wrong = (2,)
    assert detect_shard(catalog, "00000", detector)
    table = catalog.manifest(stage_of(detector), "00000").table
    assert table["status"].to_pylist() == ["ok", "bad_regions", "ok"]
    assert f"{2:020x}: regions.boxes[0] is [-1.0, " in table["detail"][1].as_py()


def test_the_same_input_gives_the_same_bytes_whatever_the_threads_around_it(tmp_path: Path):
    contents, threads = [], torch.get_num_threads()
    config = dataclasses.replace(DEMO, short_side=84, long_side=112, post_nms=30)
    settings = DetectorSettings(batch=2, keep_features=True)
    try:
        for attempt, (number, workers) in enumerate(((1, 1), (1, 1), (2, 3))):
            torch.set_num_threads(number)
            catalog = commit_images(tmp_path / str(attempt), [[a_sample(n) for n in range(4)]])
            network = FasterRCNN.random_init(config, 0)
            detector = FasterRCNNDetector(network, {"random_init": True, "seed": 0}, settings)
            detector.workers = workers
            detect_shard(catalog, "00000", detector)
            assert torch.get_num_threads() == number
            contents.append({f.name: f.read_bytes() for f in (tmp_path / str(attempt)).glob("captions/regions/*/*")})
    finally:
        torch.set_num_threads(threads)
    assert len(contents[0]) == 2
    assert all(content == contents[0] for content in contents)


def test_a_cpu_computes_an_image_on_each_thread_and_begins_none_after_an_error(monkeypatch: pytest.MonkeyPatch):
    both, threads, before = threading.Barrier(2, timeout=30), [], torch.get_num_threads()

    def run(self: FasterRCNNDetector, batch: Sequence) -> list:
        threads.append(torch.get_num_threads())
        if len(threads) > 2:
            time.sleep(0.2)
            return []
        both.wait()
        raise ValueError(f"{len(batch)} image")

    monkeypatch.setattr(FasterRCNNDetector, "_run_network", run)
    torch.set_num_threads(2)
    try:
        detector = FasterRCNNDetector(FasterRCNN.random_init(DEMO, 0), {"random_init": True}, DetectorSettings())
        with pytest.raises(ValueError, match="1 image"):
            detector.detect([a_sample(n) for n in range(20)])
    finally:
        torch.set_num_threads(before)
    assert len(threads) < 10
    assert set(threads) == {1}


def test_pending_shards_are_detected_once_with_progress(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(0), a_sample(1)], ["dead"], [a_sample(3)] + [a_sample(4)]])
    detector = AnnotatedDetector(annotations(tmp_path / "a.json", [0, 1, 3]))
    lines = []
    assert detect_pending(catalog, detector, lines.append) == 3
    assert detect_pending(catalog, detector, lines.append) == 0
    assert [line.partition(" shards: ")[0] for line in lines] == [f"captions: {n} of 3" for n in (1, 2, 3)]
    assert lines[-1].startswith("captions: 3 of 3 shards: 3 ok, 3 regions, 1 no_annotation, 1 no_image; ")
    assert catalog.counts(stage_of(detector)) == {"no_annotation": 1, "no_image": 1, "ok": 3}


def test_a_shard_whose_images_were_asked_again_is_detected_again_alone(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(0)], [a_sample(3)]])
    detector = CountingDetector(annotations(tmp_path / "a.json", range(4)))
    assert detect_pending(catalog, detector) == 2
    samples = [a_sample(0), a_sample(1)]
    rows = [Row(number, sample.key, "ok", url=sample.url) for number, sample in enumerate(samples)]
    assert commit_shard(catalog, "images", "00000", samples, rows, {}, catalog.headers("images")["00000"])
    detector.samples = 0
    assert detect_pending(catalog, detector) == 1
    assert detector.samples == 2
    manifest = catalog.manifest(stage_of(detector), "00000")
    assert (manifest.revision, manifest.ok_rows) == (2, 2)
    assert catalog.pending("images", stage_of(detector)) == []
    assert catalog.pin(stage_of(detector)).ok_rows == 3


def test_withdrawn_images_are_not_detected_and_their_withdrawal_detects_nothing_again(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(0), a_sample(1)], [a_sample(2), a_sample(3)]])
    detector = CountingDetector(annotations(tmp_path / "a.json", range(4)))
    assert detect_shard(catalog, "00000", detector)
    withdraw(catalog.store, [a_sample(0).url, a_sample(2).url])
    for stage, shard in (("images", "00000"), ("images", "00001"), (stage_of(detector), "00000")):
        assert withdraw_samples(catalog, stage, shard)
    detector.samples = 0
    assert detect_pending(catalog, detector) == 1
    assert detector.samples == 1
    assert catalog.manifest(stage_of(detector), "00001").statuses == {"ok": 1}
    assert catalog.manifest("images", "00000").revision == catalog.manifest(stage_of(detector), "00000").revision == 2


RANDOM_INIT = ["--preset=demo", "--random_init"]


@pytest.mark.parametrize(
    "fields",
    [
        ["--backend=annotated", "--annotations=FILE"],
        [f"--weights={SHIPPED_DETECTOR}", "--selection.maximum=20", "--network.post_nms=9", "--keep_features"],
        [*RANDOM_INIT, "--precision=bf16-res5", "--device=cpu", "--boxes=regressed"],
    ],
)
def test_the_command_does_what_a_config_says_is_left(fields: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    file = annotations(tmp_path / "a.json", [0, 1])
    fields = [field.replace("=FILE", f"={file}") for field in fields]
    catalog = commit_images(tmp_path / "root", [[a_sample(0), a_sample(1)], ["http_404"]])
    detector = make_detector(parse(DetectionConfig, fields))
    assert identify(parse(DetectionConfig, fields)) == detector.id
    detect_shard(catalog, "00000", detector)
    assert catalog.pending(IMAGES, stage_of(detector)) == ["00001"]
    main([str(tmp_path / "root"), "captions", *fields])
    assert catalog.pending(IMAGES, stage_of(detector)) == []
    printed = capsys.readouterr()
    assert ("random weights" in printed.err) == ("--random_init" in fields)
    assert printed.out.splitlines()[-1] == f"captions: regions/{detector.id}, all rows: 1 no_image, 2 ok"


def test_the_first_line_has_the_device_and_its_speed(tmp_path: Path, capsys: pytest.CaptureFixture):
    commit_images(tmp_path, [[a_sample(0), a_sample(1)], [a_sample(2)]])
    for again in (False, True):
        main([str(tmp_path), "captions", *RANDOM_INIT])
        first, *more = capsys.readouterr().out.splitlines()
        if again:
            assert re.fullmatch(r"captions: regions/\w+, all rows: 3 ok", first)
            assert not more
            continue
        threads = torch.get_num_threads()
        assert re.fullmatch(rf"detecting on cpu \({threads} threads\), about [0-9.e+]+ images/s", first)
        assert re.match(r"captions: 1 of 2 shards: \d+ regions, [12] ok; ", more[0])


def test_a_gpu_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    found = {}
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        given = ({}, {"device": "cpu"}, {"device": "cuda:1"}, {"batch": 3})
        chosen = [choose_device(DetectorSettings(**settings)) for settings in given]
        found[there] = [(settings.device, settings.batch) for settings in chosen]
    assert found[False] == [("cpu", 1), ("cpu", 1), ("cuda:1", 8), ("cpu", 3)]
    assert found[True] == [("cuda", 8), ("cpu", 1), ("cuda:1", 8), ("cuda", 3)]


def test_images_without_regions_are_told_with_an_example_and_fail_the_run_if_they_are_the_most(tmp_path, capsys):
    samples = [[a_sample(0), a_sample(1), a_sample(2)], ["dead"] * 9, [a_sample(3)], [a_sample(4)]]
    catalog = commit_images(tmp_path / "root", samples)
    withdraw(catalog.store, [a_sample(4).url])
    assert withdraw_samples(catalog, "images", "00003")
    for known, missing in ((range(4), 0), ([1, 2, 3], 1), ([0, 3], 2), ([3], 3)):
        file = annotations(tmp_path / f"{missing}.json", known)
        command = [str(tmp_path / "root"), "captions", "--backend=annotated", f"--annotations={file}"]
        example = (
            rf"captions: {missing} of 4 images have no regions, such as no_annotation: no image has the file_name "
        )
        if missing > 2:
            for _ in range(2):  # also if nothing is left to detect
                with pytest.raises(SystemExit, match=rf"^vlbert detect: {example}.*; check that"):
                    main(command)
        else:
            main(command)
        *_, counted, last = ["", *capsys.readouterr().out.splitlines()]
        if missing in (1, 2):
            assert f"{missing} no_annotation, " in counted
            assert re.match(example, last)
        else:
            assert ", all rows: " in last


FILE = ["--backend=annotated", "--annotations=absent.json"]
IMPORTED = ["--backend=imported", "--imported.files=absent.tsv"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--backend=annotated"], "annotations is not set: backend annotated needs a file"),
        ([], "weights is None and random_init is False: backend faster_rcnn needs either weights"),
        (["--random_init"], "preset is not set"),
        ([*RANDOM_INIT, "--precision=bf16-res5"], "device is 'auto'; it must be cpu or cuda with bf16-res5"),
        ([*RANDOM_INIT, "--device=gpu"], "device is 'gpu'"),
        ([*RANDOM_INIT, "--network.long_side=7"], "FasterRCNNConfig.long_side is 7"),
        ([*RANDOM_INIT, "--annotations=a.json"], "annotations: backend faster_rcnn does not"),
        ([*FILE, "--network.post_nms=3", "--random_init"], "random_init, network.post_nms: backend annotated does not"),
        (["--backend=imported"], "imported.files is not set: backend imported needs feature files"),
        ([*IMPORTED, "--weights=x", "--selection.minimum=3"], "weights, selection.minimum: backend imported does not"),
        (IMPORTED, "feature file absent.tsv does not exist"),
        (RANDOM_INIT, r"no shard is committed in .*captions/images; collect the images first"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_in_words(tmp_path: Path, fields: list[str], message: str):
    with pytest.raises(SystemExit, match=message):
        main([str(tmp_path), "captions", *fields])


@pytest.mark.parametrize(
    ("root", "endpoint", "status", "named"),
    [
        ("s3://bucket/images", "", 75, "head_bucket of s3://bucket/images/ at http://127.0.0.1:"),
        ("s3://bucket/images", "no-url", 1, "head_bucket of s3://bucket/images/ at no-url failed"),
        ("absent", "", 1, "cannot read the folder .*/absent: "),
        ("file", "", 1, "cannot read the folder .*/file: "),
    ],
)
def test_storage_out_of_reach_is_one_line_and_the_status_for_trying_again_where_that_may_help(
    tmp_path: Path, monkeypatch, capsys, root: str, endpoint: str, status: int, named: str
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with socket.socket() as taken:  # a port of this machine where nobody listens afterwards
        taken.bind(("127.0.0.1", 0))
        endpoint = endpoint or f"http://127.0.0.1:{taken.getsockname()[1]}"
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SystemExit) as ended:
        main([root, "captions", *RANDOM_INIT])
    assert ended.value.code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(named, line)
    assert not Path("absent").exists()


def test_a_detection_that_is_told_to_end_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    catalog, claims = commit_images(tmp_path, [[a_sample(0)]]), []

    def detect(self: AnnotatedDetector, samples: Sequence[Sample]) -> list[Regions | str]:
        claims.extend(info.path for info in catalog.store.list() if "/claims/" in info.path)
        signal.raise_signal(signal.SIGTERM)
        return []

    monkeypatch.setattr(AnnotatedDetector, "detect", detect)
    fields = ["--backend=annotated", f"--annotations={annotations(tmp_path / 'a', [0])}"]
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path), "captions", *fields])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert len(claims) == 1
    assert not any("/claims/" in info.path for info in catalog.store.list())


def test_two_detections_at_once_detect_each_shard_once_and_both_return_when_all_is_there(tmp_path: Path):
    catalog = commit_images(tmp_path / "root", [[a_sample(n)] for n in range(8)])
    file = annotations(tmp_path / "a.json", range(8))
    detectors = [CountingDetector(file), CountingDetector(file)]

    def detect(detector: CountingDetector) -> tuple[int, list[str]]:
        committed = detect_pending(catalog, detector, lambda line: time.sleep(0.05))
        return committed, catalog.pending("images", stage_of(detector))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(detect, detectors))
    assert [left for _, left in found] == [[], []]
    assert sum(committed for committed, _ in found) == sum(detector.samples for detector in detectors) == 8
    assert not any("/claims/" in info.path for info in catalog.store.list())
