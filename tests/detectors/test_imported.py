"""Regions from other projects' feature files: what is stored is what was written."""

import dataclasses
import gzip
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import h5py
import msgpack
import numpy as np
import pytest
from imported_features import (
    BOTTOM_UP,
    CLASSES,
    LXMERT,
    ImageFeatures,
    image_features,
    packed,
    write_h5,
    write_json,
    write_lmdb,
    write_mmf,
    write_npz,
    write_tsv,
    write_uniter,
)
from places import PROJECT
from tiny import tiny_sample
from tiny_detector import commit_images

from detectors import feature_reader
from detectors.config import DetectionConfig
from detectors.imported import ImportedDetector
from detectors.run import identify, main, make_detector
from storage.sample import Regions, Sample
from storage.settings import parse

Writer = Callable[..., Path]
LAST, NONE = ["--imported.background=last"], ["--imported.background=none"]


def without_background(file: Path, images: list[ImageFeatures]) -> Path:
    """mmf's, of the foreground alone."""
    cut = [dataclasses.replace(image, class_probs=image.class_probs[:, 1:]) for image in images]
    return write_tsv(file, cut, [*BOTTOM_UP, "cls_prob"], header=True)


def one_file(file: Path, images: list[ImageFeatures]) -> Path:
    """An LMDB that is one file, with numbers as text and arrays as base64."""
    return (write_lmdb(file.with_suffix(".folder"), images, arrays=False) / "data.mdb").rename(file)


# Name of the file, its writer with settings, what else the detector must be told, and what it says of classes:
# probabilities, each region's class (`one`, with the probability 1), its class and score (`label`), its class alone
# (`class`), or nothing.
LXMERTS = {"columns": LXMERT, "literal": True}
FORMATS: dict[str, tuple[str, Writer, dict[str, Any], list[str], str]] = {
    "bottom-up attention": ("f.tsv", write_tsv, {}, [], "nothing"),
    "LXMERT": ("f.tsv", write_tsv, LXMERTS, [], "label"),
    "LXMERT, class by class": ("f.tsv", write_tsv, LXMERTS, [f"--imported.num_classes={CLASSES}"], "one"),
    "TSV with a first line": ("f.tsv", write_tsv, {"columns": [*BOTTOM_UP, "classes"], "header": True}, [], "probs"),
    "VL-BERT, zip": ("f.zip", write_json, {}, [], "probs"),
    "VL-BERT, str(bytes)": ("f", write_json, {"literals": True}, [], "probs"),
    "bottom-up-attention.pytorch": ("f", write_npz, {}, [], "nothing"),
    "OpenVQA": ("f", write_npz, {"transposed": True}, [], "nothing"),
    "12-in-1": ("f.lmdb", write_lmdb, {}, [], "probs"),
    "one file of base64": ("f.lmdb", one_file, {}, [], "probs"),
    "mmf, without a background": ("f.tsv", without_background, {}, NONE, "probs"),
    "mmf, None as probabilities": ("f.lmdb", write_mmf, {}, [], "class"),
    "mmf, more rows than boxes": ("f.lmdb", write_mmf, {"background": False, "spare": 3}, NONE, "probs"),
    "volta": ("f.h5", write_h5, {}, LAST, "probs"),
}


def a_sample(number: int) -> Sample:
    """96x64 pixels; the files name 192x128."""
    return dataclasses.replace(tiny_sample(number), regions=None)


def features_of(number: int, **changes: Any) -> ImageFeatures:
    return image_features(f"{number:06d}", number, **changes)


def fields_of(files: Path | list[Path], *more: str, keep: bool = True) -> list[str]:
    files = files if isinstance(files, list) else [files]
    kept = "--keep_features" if keep else "--no_keep_features"
    return ["--backend=imported", "--imported.files", *map(str, files), kept, *more]


def identified(file: Path, *more: str, keep: bool = True) -> str:
    return identify(parse(DetectionConfig, fields_of(file, *more, keep=keep)))


def detector_of(files: Path | list[Path], *more: str) -> ImportedDetector:
    return make_detector(parse(DetectionConfig, fields_of(files, *more)))


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_stored_is_what_was_written(form: str, tmp_path: Path):
    name, write, settings, more, says = FORMATS[form]
    images = [features_of(number, boxes=3 + number) for number in range(4)]
    file = write(tmp_path / name, images, **settings)
    catalog = commit_images(tmp_path / "root", [[a_sample(number) for number in (0, 1, 2, 7)], [a_sample(3)]])
    main([str(tmp_path / "root"), "captions", *fields_of(file, *more)])
    detector = identified(file, *more)
    table = catalog.manifest(f"regions/{detector}", "00000").table
    assert table["status"].to_pylist() == ["ok", "ok", "ok", "no_features"]

    stored = [sample.regions for shard in ("00000", "00001") for sample in catalog.read(f"regions/{detector}", shard)]
    for image, regions in zip(images, stored, strict=True):
        assert regions.detector == detector
        assert regions.attributes is None
        foreground = image.class_probs[:, 1:]
        scores = np.ones(len(image.boxes)) if says in ("nothing", "class") else foreground.max(axis=1)
        order = np.argsort(-scores, kind="stable")
        labels = foreground[order].argmax(axis=1)
        assert np.array_equal(regions.boxes, (image.boxes[order] / 2).astype(np.float32))
        assert np.array_equal(regions.features, image.features[order].astype(np.float16))
        assert np.array_equal(regions.scores, scores[order])
        if says in ("nothing", "label", "class"):
            assert regions.class_probs is None
            assert np.array_equal(regions.labels, np.ones(len(order)) if says == "nothing" else labels + 1)
            continue
        expected = np.eye(1 + CLASSES)[labels + 1] if says == "one" else image.class_probs[order]
        np.testing.assert_allclose(regions.class_probs_background_first(), expected, rtol=1e-3, atol=1e-6)
        assert np.array_equal(regions.labels_background_first(), labels + 1)
        assert regions.background == (CLASSES if more == LAST else 0)


@pytest.mark.parametrize("compressed", [False, True])
def test_uniters_boxes_in_fractions_become_those_of_the_stored_image(compressed: bool, tmp_path: Path):
    images = [features_of(number, boxes=3 + number) for number in range(3)]
    bad = images[2].boxes / 100
    file = write_uniter(tmp_path / "f", images, compressed, norm_bb=bad)
    *good, wrong = detector_of(file).detect([a_sample(number) for number in range(3)])
    for image, regions in zip(images[:2], good, strict=True):
        order = np.argsort(-image.class_probs[:, 1:].astype(np.float16).max(axis=1), kind="stable")
        np.testing.assert_allclose(regions.boxes, image.boxes[order] / 2, atol=0.05)
        assert np.array_equal(regions.features, image.features[order].astype(np.float16))
        assert np.array_equal(regions.class_probs, image.class_probs[order].astype(np.float16))
        assert np.array_equal(regions.labels, image.class_probs[order, 1:].argmax(axis=1) + 1)
    assert wrong.startswith("bad_features: f: 000002.npz has a bad box 0 for its image, in fractions")


@pytest.mark.parametrize(
    ("match", "name", "url", "found"),
    [
        ("file_name", "a b", "http://host/x/a%20b.png?size=big#top", True),
        ("file_name", "train/000001.jpg", "http://host/000001.webp", True),
        ("number", "391895", "http://host/COCO_val2014_000000391895.jpg", True),
        ("number", "COCO_val2014_000000391895", "http://host/391895.jpg", True),
        ("url", "http://host/1.jpg", "http://host/1.jpg?", False),
        ("key", "0123456789abcdef0123", "http://host/1.jpg", True),
    ],
)
def test_an_image_finds_its_row_as_the_setting_says(match: str, name: str, url: str, found: bool, tmp_path: Path):
    file = write_tsv(tmp_path / "f.tsv", [features_of(7), dataclasses.replace(features_of(1), name=name)])
    sample = dataclasses.replace(a_sample(1), url=url, key="0123456789abcdef0123")
    (regions,) = detector_of(file, f"--imported.match={match}").detect([sample])
    assert isinstance(regions, Regions) == found
    assert found or regions.startswith(f"no_features: no row has the {match} of ")


def test_half_a_file_is_seen_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture):
    commit_images(tmp_path / "root", [[a_sample(number) for number in range(4)]])
    file = write_tsv(tmp_path / "f.tsv", [features_of(number) for number in range(2)])
    main([str(tmp_path / "root"), "captions", *fields_of(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("captions: 1 of 1 shards: 10 regions, 2 no_features, 2 ok; ")
    assert lines[1].endswith(", all rows: 2 no_features, 2 ok")
    assert lines[2].startswith(
        "captions: 2 of 4 images have no regions, such as no_features: no row has the file_name of"
    )


def test_several_files_are_one_detector(tmp_path: Path):
    files = [write_tsv(tmp_path / f"{n}.tsv", [features_of(n), features_of(9, boxes=2 + n)]) for n in range(2)]
    detector = detector_of(files)
    first, second, both = detector.detect([a_sample(0), a_sample(1), a_sample(9)])
    assert (len(first), len(second)) == (5, 5)
    assert both == "ambiguous_features: 0.tsv: 000009 and 1.tsv: 000009 have the same file_name"
    assert len({detector.id, detector_of(files[0]).id, detector_of(files[1]).id}) == 3
    files.append(write_tsv(tmp_path / "2.tsv", [features_of(2, channels=8)]))
    with pytest.raises(ValueError, match="2.tsv: its first row, .*, has 8 features per region, .* of the files has 16"):
        detector_of(files)


def test_the_id_follows_content_and_settings_but_not_names(tmp_path: Path):
    file = write_json(tmp_path / "f.zip", [features_of(1)])
    ids = [identified(file, *more) for more in ([], ["--imported.match=number"], LAST, NONE)]
    ids.append(identified(file, keep=False))
    assert detector_of(file).id == detector_of(file.rename(tmp_path / "g.zip")).id == ids[0]
    ids.append(identified(write_json(tmp_path / "g.zip", [features_of(2)])))
    assert len(set(ids)) == 6


ONE_BOX = np.array([[10, 10, 50, 50]], np.float32)
ONE = {"num_boxes": 1, "features": np.zeros(16, np.float32)}
HOSTILE = pickle.dumps({"features": print})
FORGED = msgpack.packb({"features": packed(ONE_BOX) | {b"type": "|O"}})
BAD = "bad_features: f: 000001 has "


@pytest.mark.parametrize(
    ("write", "changes", "status"),
    [
        (write_tsv, {"num_boxes": 4}, BAD + "boxes of shape (20,), which does not fit 4 boxes"),
        (write_tsv, {"num_boxes": 1001}, BAD + "1001 boxes, more than 1000"),
        (write_tsv, {"boxes": "AAAA!"}, BAD + "boxes that are not base64"),
        (write_tsv, {"features": "A\tB"}, BAD + "7 columns, not 6; it is truncated"),
        (write_tsv, {"features": np.full((5, 16), 7e4, np.float32)}, BAD + "a feature of 70000"),
        (write_tsv, {"boxes": np.full((5, 4), 0.5, np.float32)}, BAD + "boxes in fractions"),
        (write_tsv, ONE | {"boxes": ONE_BOX * 5}, BAD + "a bad box 0 for its 192x128 image: 50, 50, 250, 250"),
        (write_tsv, {"num_boxes": 0, "boxes": "", "features": ""}, "no_regions: f: 000001 has no box with an area"),
        (write_tsv, {"image_w": 400, "image_h": 192}, "size_mismatch: f: 000001 is for an image of 400x192"),
        (write_json, {"image_w": ...}, BAD + "the image_w '', not a whole"),
        (write_json, {"features": [1.0]}, BAD + "features [1.0], which are neither an array nor"),
        (write_json, {"classes": np.full((5, 9), 0.5, np.float32)}, BAD + "class_probs with the sum 4.5, not"),
        (write_npz, {"x": np.array([None])}, "bad_features: f: 000001 Object arrays cannot be loaded"),
        (write_lmdb, {"raw": HOSTILE}, "bad_features: f: 000001 wants to load builtins.print, which features"),
        (write_lmdb, {"raw": b"\x80\x04"}, "bad_features: f: 000001 is not a pickle or is truncated"),
        (write_lmdb, {"raw": FORGED}, "bad_features: f: 000001 cannot create an OBJECT array"),
        (write_lmdb, {"raw": b"N."}, "bad_features: f: 000001 is None, not a dict of fields"),
        (write_h5, {"features": h5py.ExternalLink("g.h5", "/x")}, "bad_features: f: 000001 features is not a dataset"),
        (write_h5, {"obj_id": np.zeros(5)}, BAD + "objects_id of type float64, not int64"),
        (write_h5, {"cls_prob": features_of(1).class_probs}, BAD + "an objects_id that is not its most probable class"),
    ],
)
def test_an_unusable_row_costs_its_image_alone(write: Writer, changes: dict, status: str, tmp_path: Path):
    raw = {"raw": changes.pop("raw")} if "raw" in changes else {}
    file = write(tmp_path / "f", [features_of(0), features_of(1)], changes=changes, **raw)
    good, bad = detector_of(file, *(LAST if write is write_h5 else [])).detect([a_sample(0), a_sample(1)])
    assert isinstance(good, Regions)
    assert bad.startswith(status)


def plain(content: bytes) -> Writer:
    return lambda file: file.write_bytes(content) and file


def lxmerts(file: Path) -> Path:
    return write_tsv(file, [features_of(1)], LXMERT)


def flat_h5(file: Path) -> Path:
    with h5py.File(file, "w") as stream:
        stream["image_features"] = np.zeros((2, 36, 8), np.float32)
    return file


def one_npz(file: Path) -> Path:
    return next(write_npz(file.with_suffix(".folder"), [features_of(1)]).iterdir()).rename(file)


def folder_of(*names: str) -> Writer:
    def make(folder: Path) -> Path:
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"\x93NUMPY")
        return folder

    return make


def cut(write: Writer, part: str = "") -> Writer:
    def make(file: Path) -> Path:
        made = write(file.with_suffix(".zip" if write is write_json else ""), [features_of(n) for n in range(9)])
        data = (made / part).read_bytes()
        (made / part).write_bytes(data[: len(data) // 2])
        return made.rename(file)

    return make


def in_folder(folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir()
    (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (lambda file: file, [], "feature file .*f does not exist"),
        (lambda file: file.mkdir() or file, [], r"f has neither data\.mdb of an LMDB nor \*\.json .*, but nothing"),
        (plain(b"\n"), [], "f has 1 columns in its first line, not 6"),
        (plain(b"boxes\tfeatures\r\n"), [], "f has the columns boxes, features, but none for the image_id"),
        (plain(gzip.compress(b"1\t9")), [], "f is packed with gzip; unpack it with gunzip"),
        (plain(foreign.LFS), [], "f is a Git LFS pointer"),
        (lambda file: in_folder(file, "data.mdb", foreign.LFS), [], "f is a Git LFS pointer"),
        (lambda file: in_folder(file, "a.json", foreign.LFS), [], "f: a, is a Git LFS pointer"),
        (lambda file: in_folder(file, "a.npz", foreign.LFS), [], "f: a, is a Git LFS pointer"),
        (plain(foreign.zip_of("a.tsv")), [], "f has neither .* unpack it, and give"),
        (lxmerts, ["--imported.num_classes=1"], "its first row, f: 000001, has the objects_id [1-7], but .* is 1"),
        (lambda file: without_background(file, [features_of(1)]), [], "with the sum .*--imported.background=none"),
        (cut(write_json), [], "f is damaged or not a feature file"),
        (cut(write_lmdb, "data.mdb"), [], "f is truncated"),
        (cut(write_h5), [], "f is damaged or not a feature file"),
        (one_npz, [], "f has neither .*, but .*x.npy, .*; give the folder of this .npz"),
        (folder_of("a.npy", "a_info.npy"), [], "f has neither .*, but a.npy, .* mmf's lmdb_conversion.py"),
        (folder_of("a.tsv", "._b.json"), [], "f has neither .*, but a.tsv; give the files with the features"),
        (plain(b'1\t{"num_boxes": 1, "features": ""}\n'), [], "f is VinVL's TSV"),
        (plain(pickle.dumps({"a": 1})), [], "f is in none of the formats"),
        (plain(b'{"a": {"boxes": []}}'), [], "f is in none of the formats"),
        (flat_h5, [], "f has image_features but no group for each image"),
        (lambda file: write_lmdb(file, [features_of(1)], raw=HOSTILE), [], "wants to load builtins.print"),
    ],
)
def test_an_unusable_file_is_named_before_anything_is_detected(
    make: Writer, more: list[str], message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        detector_of(make(tmp_path / "f"), *more)


def test_a_row_that_leads_out_of_an_lmdb_costs_its_image_alone(tmp_path: Path):
    """Reading the pages behind the end of a mapped file ends a process with SIGBUS."""
    file = write_lmdb(tmp_path / "f", [features_of(number, channels=300) for number in range(3)])
    samples = [a_sample(number) for number in range(3)]
    detector = detector_of(file)
    data = bytearray((file / "data.mdb").read_bytes())
    for name in re.finditer(b"000001", data):
        length = slice(name.start() - 8, name.start() - 4)  # of the value: two bytes each, the lower first
        if data[name.start() - 2 : name.start()] == b"\x06\0":  # a page's entry, whose key has six bytes
            data[length] = b"\xff\xff\x0f\0"
    (file / "data.mdb").write_bytes(data)
    first, bad, last = detector.detect(samples)
    assert bad.startswith("bad_features: f: 000001 is damaged: reading it ends with "), bad
    assert isinstance(first, Regions)
    assert isinstance(last, Regions)


@pytest.mark.parametrize(
    ("length", "status"), [(2**27, "has [0-9]+ bytes, more"), (5 * 2**28, "cannot be .*MemoryError")]
)
def test_a_row_that_takes_too_much_memory_costs_its_image_alone(length: int, status: str, tmp_path: Path):
    file = write_h5(tmp_path / "f", [features_of(0), features_of(1)])
    with h5py.File(file, "r+") as stream:
        del stream["000001/features"]
        stream.create_dataset("000001/features", (length,), np.float32)  # zeros, which take no space in the file
    good, bad = detector_of(file, *LAST).detect([a_sample(0), a_sample(1)])
    assert isinstance(good, Regions)
    assert re.match(f"bad_features: f: 000001 {status}", bad)


LOOPING = f"""#!{sys.executable}
import sys, time
from multiprocessing.connection import Connection
from detectors import feature_files, feature_reader
read, feature_reader._SECONDS = feature_files.FeatureRows.read, 0.2
def loop(rows, row):
    while row and time.process_time() < 30:
        pass
    return read(rows, row)
feature_files.FeatureRows.read = loop
feature_reader._answer_requests(Connection(int(sys.argv[-1])))
"""


def test_a_row_that_takes_too_long_costs_its_image_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A damaged file can lead its reader in a circle."""
    child = tmp_path / "child"
    child.write_text(LOOPING)
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    feature_reader._start_child.cache_clear()
    file = write_tsv(tmp_path / "f", [features_of(0), features_of(1)])
    good, bad, again = detector_of(file).detect([a_sample(0), a_sample(1), a_sample(0)])
    feature_reader._start_child.cache_clear()
    assert bad.startswith("bad_features: f: 000001 is damaged: reading it ends with Profiling timer expired")
    assert np.array_equal(good.boxes, again.boxes)


LIMITED = """
import resource, sys
from detectors.config import DetectionConfig
from detectors.run import make_detector
from storage.programs import Command
from storage.settings import parse
config = parse(DetectionConfig, sys.argv[1:])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 60 * 2**20,) * 2)
Command("vlbert detect", lambda: make_detector(config))([])
"""


def large_value(file: Path, images: list[ImageFeatures]) -> Path:
    """Only the child needs memory."""
    fields = images[0].by_name() | {"features": np.zeros((900, 1), np.float32), "more": bytes(2**27)}
    return write_lmdb(file, images[:1], raw=pickle.dumps(fields))


@pytest.mark.parametrize("write", [write_lmdb, write_h5, write_tsv, write_json, large_value])
def test_a_lack_of_memory_stops_the_import_with_one_line(write: Writer, tmp_path: Path):
    """The row has 43 MB, and there are 60 MiB left."""
    file = write(tmp_path / "f", [features_of(0, boxes=900, channels=12_000)])
    command = [sys.executable, "-c", LIMITED, *fields_of(file, *(LAST if write is write_h5 else []))]
    program = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert (program.returncode, program.stderr.count("\n")) == (1, 1), program.stderr
    assert program.stderr.startswith(f"vlbert detect: {file}")
    assert "raise `ulimit -v`" in program.stderr


PAGE = 4096  # of an LMDB


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Changed in up to ten bytes, cut, with a run of zeros or of 255, or with two of its pages swapped."""
    # Near these are the lengths and offsets.
    marks = [match.start() for match in re.finditer(rb"00000\d|TREE|SNOD|HEAP|PK", data)]
    places = rng.integers(0, len(data), 10)
    if rng.integers(2) and marks:
        places = (rng.choice(marks, 10) + rng.normal(0, 8, 10).astype(int)).clip(0, len(data) - 1)
    changed, kind, first = bytearray(data), rng.integers(5), int(places[0])
    if kind == 0:
        for place in places[: rng.integers(1, 11)]:
            changed[place] = rng.integers(256)
    elif kind == 1:
        del changed[first:]
    elif kind == 2:
        size = PAGE if len(data) > 4 * PAGE else 256
        one, other = (slice(place // size * size, (place // size + 1) * size) for place in places[:2])
        changed[one], changed[other] = data[other], data[one]
    else:
        length = min(int(rng.choice([1, 8, 512])), len(data) - first)
        changed[first : first + length] = bytes([0 if kind == 3 else 255]) * length
    return bytes(changed)


# Its writer, the file to damage, and what else the detector must be told. An LMDB keeps the larger rows in pages of
# their own.
FUZZED: dict[str, tuple[Writer, str, list[str]]] = {
    "tsv": (write_tsv, "", []),
    "f.zip": (write_json, "", []),
    "npz": (write_npz, "000001.npz", []),
    "lmdb": (write_lmdb, "data.mdb", []),
    "h5": (write_h5, "", LAST),
}
DAMAGED_FILES = int(os.environ.get("DAMAGED_FILES", "200"))


@pytest.mark.parametrize("name", FUZZED)
def test_a_damaged_file_is_named_or_costs_its_images_alone(name: str, tmp_path: Path):
    write, part, more = FUZZED[name]
    samples = [a_sample(number) for number in range(4)]
    file = write(tmp_path / name, [features_of(number, boxes=1 + number % 2 * 4, channels=300) for number in range(4)])
    target, config = file / part, parse(DetectionConfig, fields_of(file, *more))
    data, good = target.read_bytes(), make_detector(config).detect(samples)
    assert all(isinstance(regions, Regions) for regions in good)
    for seed in range(DAMAGED_FILES):
        target.write_bytes(damaged(data, np.random.default_rng(seed)))
        try:
            messages = [f"{file} : {found}" for found in make_detector(config).detect(samples) if type(found) is str]
        except ValueError as error:
            messages = [str(error)]
        assert all(message.startswith(f"{file}") and "\n" not in message for message in messages), (seed, messages)
    target.write_bytes(data)
    again = make_detector(config).detect(samples)
    for before, after in zip(good, again, strict=True):
        assert all(np.array_equal(getattr(before, name), getattr(after, name)) for name in ("boxes", "features"))
