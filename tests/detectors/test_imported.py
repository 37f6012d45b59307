"""Regions from other projects' files of features: what is stored is what was written."""

import dataclasses
import functools
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import msgpack
import numpy as np
import pytest
from imported_features import (
    ATTRIBUTES,
    CLASSES,
    LXMERT,
    TENSORPACK,
    ImageFeatures,
    as_base64,
    hostile_pickle,
    image_features,
    write_h5,
    write_json,
    write_lmdb,
    write_tensorpack,
    write_tsv,
)
from tiny import tiny_sample
from tiny_detector import commit_images

from detectors.config import DetectionConfig
from detectors.imported import ImportedDetector
from detectors.run import finished, identify, main, make_detector, stage_of
from detectors.select import SelectionSettings, select_regions
from storage.catalog import Catalog
from storage.sample import Regions, Sample
from storage.settings import from_assignments

Writer = Callable[..., Path]
VOLTA = ["imported.background=last"]
BOTTOM_UP_MORE = "image_id,image_w,image_h,num_boxes,boxes,features,cls_prob"
# Name of the file, its writer, what else the detector must be told.
FORMATS: dict[str, tuple[str, Writer, list[str]]] = {
    "bottom-up attention": ("f.tsv", write_tsv, []),
    "LXMERT": ("f.tsv", functools.partial(write_tsv, columns=LXMERT), []),
    "LXMERT, class by class": (
        "f.tsv",
        functools.partial(write_tsv, columns=LXMERT),
        [f"imported.num_classes={CLASSES}"],
    ),
    "TSV with a first line": ("f.tsv", functools.partial(write_tsv, columns=LXMERT, header=True), []),
    "TSV with probabilities": (
        "f.tsv",
        functools.partial(write_tsv, columns=BOTTOM_UP_MORE.split(",")),
        [f"imported.columns={BOTTOM_UP_MORE}"],
    ),
    "VL-BERT, zip": ("f.zip", write_json, []),
    "VL-BERT, packed": ("f.zip", functools.partial(write_json, packed=zipfile.ZIP_DEFLATED), []),
    "VL-BERT, folder": ("f", write_json, []),
    "12-in-1": ("f.lmdb", write_lmdb, []),
    "12-in-1, protocol 2": ("f.lmdb", functools.partial(write_lmdb, protocol=2), []),
    "LMDB with base64": ("f.lmdb", functools.partial(write_lmdb, arrays=False), []),
    "tensorpack": ("f.lmdb", write_tensorpack, [f"imported.columns={TENSORPACK}"]),
    "tensorpack, msgpack": (
        "f.lmdb",
        functools.partial(write_tensorpack, as_msgpack=True),
        [f"imported.columns={TENSORPACK}"],
    ),
    "volta": ("f.h5", write_h5, VOLTA),
}


def a_sample(number: int) -> Sample:
    """96x64 pixels; the files name 192x128."""
    return dataclasses.replace(tiny_sample(number), regions=None)


def features_of(number: int, **changes: Any) -> ImageFeatures:
    return image_features(f"{number:06d}", number, **changes)


def config(file: Path, *more: str, keep: bool = True) -> DetectionConfig:
    fields = ["backend=imported", f"imported.files={file}", f"keep_features={str(keep).lower()}", *more]
    return from_assignments(DetectionConfig, fields)


def detector_of(file: Path, *more: str, keep: bool = True) -> ImportedDetector:
    return make_detector(config(file, *more, keep=keep))


def statuses(catalog: Catalog, stage: str) -> list[tuple[int, str]]:
    return [(row["row"], row["status"]) for row in catalog.manifest(stage, "00000").table.to_pylist()]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_stored_is_what_was_written(form: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    name, write, more = FORMATS[form]
    images = [features_of(number, boxes=3 + number) for number in range(4)]
    file = write(tmp_path / name, images)
    catalog = commit_images(tmp_path / "root", [[a_sample(number) for number in (0, 1, 2, 7)], [a_sample(3)]])
    fields = ["backend=imported", f"imported.files={file}", "keep_features=true", *more]
    main([str(tmp_path / "root"), "captions", *fields])
    settings = from_assignments(DetectionConfig, fields)
    stage = f"regions/{identify(settings)}"
    assert statuses(catalog, stage) == [(0, "ok"), (1, "ok"), (2, "ok"), (3, "no_features")]
    assert finished(catalog, settings)["images"] == 4
    assert capsys.readouterr().err == f"indexing {file}, once\n"

    stored = [sample.regions for shard in ("00000", "00001") for sample in catalog.read(stage, shard)]
    assert len(stored) == 4
    for image, regions in zip(images, stored, strict=True):
        assert f"regions/{regions.detector}" == stage
        known = form in ("LXMERT", "TSV with a first line")  # classes without their probabilities
        probs = not known and form != "bottom-up attention"
        foreground = image.class_probs[:, 1:]
        order = np.argsort(-foreground.max(axis=1), kind="stable") if known or probs else np.arange(len(image.boxes))
        assert np.array_equal(regions.boxes, (image.boxes[order] / 2).astype(np.float32))
        assert np.array_equal(regions.features, image.features[order].astype(np.float16))
        labels, scores = foreground[order].argmax(axis=1), foreground[order].max(axis=1)
        assert np.array_equal(regions.scores, scores if known or probs else np.ones(len(order)))
        if probs:
            expected = image.class_probs[order].astype(np.float16)
            if form == "LXMERT, class by class":
                expected = np.eye(1 + CLASSES, dtype=np.float16)[labels + 1]
            assert np.array_equal(regions.class_probs_background_first(), expected.astype(np.float32))
            assert np.array_equal(regions.labels_background_first(), labels + 1)
            assert regions.background == (CLASSES if form == "volta" else 0)
        else:
            assert regions.class_probs is None
            assert np.array_equal(regions.labels, labels + 1 if known else np.ones(len(order)))
        if known or form.startswith(("VL-BERT", "LXMERT")) or form == "volta":
            attributes = image.attribute_probs[order, 1:]
            assert np.array_equal(regions.attributes, attributes.argmax(axis=1))
            assert np.array_equal(regions.attribute_scores, attributes.max(axis=1))
            assert regions.attributes.max() < ATTRIBUTES
        else:
            assert regions.attributes is None


@pytest.mark.parametrize(
    ("match", "name", "url", "found"),
    [
        ("file_name", "a b", "http://host/x/a%20b.png?size=big#top", True),
        ("file_name", "train/000001.jpg", "http://host/000001.webp", True),
        ("file_name", "1", "http://host/000001.jpg", False),
        ("file_name", "", "http://host/", False),
        ("number", "391895", "http://host/COCO_val2014_000000391895.jpg", True),
        ("number", "COCO_val2014_000000391895", "http://host/391895.jpg", True),
        ("number", "7", "http://host/8.jpg", False),
        ("number", "x", "http://host/x.jpg", False),
        ("number", "9" * 30, f"http://host/{'9' * 30}.jpg", False),
        ("url", "http://host/1.jpg", "http://host/1.jpg", True),
        ("url", "http://host/1.jpg", "http://host/1.jpg?", False),
        ("key", "0123456789abcdef0123", "http://host/1.jpg", True),
        ("key", "1", "http://host/1.jpg", False),
    ],
)
def test_an_image_finds_its_row_as_the_setting_says(match: str, name: str, url: str, found: bool, tmp_path: Path):
    file = write_tsv(tmp_path / "f.tsv", [features_of(0), dataclasses.replace(features_of(1), name=name)])
    sample = dataclasses.replace(a_sample(1), url=url, key="0123456789abcdef0123")
    (regions,) = detector_of(file, f"imported.match={match}").detect([sample])
    assert isinstance(regions, Regions) == found
    assert found or regions.startswith(f"no_features: no row has the {match} of ")


def test_several_files_are_one_detector(tmp_path: Path):
    files = [write_tsv(tmp_path / f"{n}.tsv", [features_of(n), features_of(9, boxes=2 + n)]) for n in range(2)]
    detector = detector_of(",".join(map(str, files)))
    first, second, both = detector.detect([a_sample(0), a_sample(1), a_sample(9)])
    assert (len(first), len(second)) == (5, 5)
    assert both == "ambiguous_features: 0.tsv line 2 and 1.tsv line 2 have the same file_name"
    assert len({detector.id, detector_of(files[0]).id, detector_of(files[1]).id}) == 3


def test_the_10_100_rule_is_applied_where_it_is_asked_for(tmp_path: Path):
    image = features_of(1, boxes=60)
    file = write_json(tmp_path / "f.zip", [image])
    fields = ["imported.select=true", "selection.minimum=4", "selection.threshold=0.4", "selection.nms_threshold=0.5"]
    all_boxes, selected = (detector_of(file, *more).detect([a_sample(1)])[0] for more in ([], fields))
    rule = SelectionSettings(minimum=4, threshold=0.4, nms_threshold=0.5)
    kept = select_regions(image.boxes, image.class_probs[:, 1:], rule).indices
    kept = kept[np.argsort(-image.class_probs[kept, 1:].max(axis=1), kind="stable")]
    assert len(all_boxes) == 60 > len(kept) > 4
    assert np.array_equal(selected.features, image.features[kept].astype(np.float16))


def test_the_id_follows_content_and_settings_but_not_names(tmp_path: Path):
    file = write_json(tmp_path / "f.zip", [features_of(1)])
    others = [["imported.match=number"], ["imported.background=last"], ["imported.select=true"], []]
    ids = [identify(config(file, *more)) for more in others] + [identify(config(file, keep=False))]
    assert len(set(ids)) == 5
    assert detector_of(file).id == ids[3]
    assert stage_of(detector_of(file.rename(tmp_path / "g.zip"))) == f"regions/{ids[3]}"
    assert identify(config(write_json(tmp_path / "g.zip", [features_of(2)]))) not in ids


def test_a_file_is_indexed_once_and_again_when_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture):
    file, index = write_tsv(tmp_path / "f.tsv", [features_of(1)]), tmp_path / "f.tsv.index"
    first = detector_of(file)
    assert "indexing" in capsys.readouterr().err
    assert identify(config(file)) == first.id
    assert capsys.readouterr().err == ""
    index.write_bytes(index.read_bytes()[:1000])
    assert identify(config(file)) == first.id
    assert "indexing" in capsys.readouterr().err
    same = file.stat()
    file.write_bytes(file.read_bytes().replace(as_base64(features_of(1).boxes).encode(), b"A" * 108))
    os.utime(file, ns=(same.st_atime_ns, same.st_mtime_ns))
    with pytest.raises(ValueError, match=r"f\.tsv line 1, has changed since it was indexed"):
        detector_of(file)
    write_tsv(file, [features_of(1), features_of(2)])
    assert identify(config(file)) != first.id


def test_an_index_that_cannot_be_kept_serves_its_process(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = write_tsv(tmp_path / f"{'f' * 240}.tsv", [features_of(1)])  # no longer name is possible
    (regions,) = detector_of(file).detect([a_sample(1)])
    assert len(regions) == 5
    assert "cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


ONE_BOX = np.array([[10, 10, 50, 50]], np.float32)


@pytest.mark.parametrize(
    ("write", "changes", "status"),
    [
        (write_tsv, {"num_boxes": 4}, "bad_features: f line 2 has 20 numbers in boxes, not 16: num_boxes is 4"),
        (write_tsv, {"num_boxes": ""}, "bad_features: f line 2 has no num_boxes"),
        (write_tsv, {"num_boxes": "x"}, "bad_features: f line 2 has the num_boxes 'x', not a whole number from 0 on"),
        (write_tsv, {"num_boxes": 1001}, "bad_features: f line 2 has 1001 boxes, more than 1000"),
        (write_tsv, {"image_w": ""}, "bad_features: f line 2 has no image_w"),
        (write_tsv, {"image_h": "0"}, "bad_features: f line 2 has the image_h '0'"),
        (write_tsv, {"boxes": "AAAA!"}, "bad_features: f line 2 has boxes that are not base64"),
        (write_tsv, {"boxes": "AAAA"}, "bad_features: f line 2 has boxes of 3 bytes"),
        (write_tsv, {"features": np.zeros((5, 8), np.float32)}, "bad_features: f line 2 has 8 features a region"),
        (write_tsv, {"features": np.zeros(81, np.float32)}, "bad_features: f line 2 has 81 numbers in features"),
        (write_tsv, {"features": np.full((5, 16), np.nan, np.float32)}, "bad_features: f line 2 has features that"),
        (write_tsv, {"features": np.full((5, 16), 7e4, np.float32)}, "not_finite: f line 2 has a feature of 70000"),
        (write_tsv, {"boxes": np.full((5, 4), 0.5, np.float32)}, "bad_features: f line 2 has boxes in fractions"),
        (
            write_tsv,
            {"num_boxes": 1, "boxes": ONE_BOX * 5, "features": np.zeros(16, np.float32)},
            "bad_features: f line 2 has in its 192x128 image the box 0: 50, 50, 250, 250",
        ),
        (
            write_tsv,
            {"num_boxes": 1, "boxes": ONE_BOX[:, ::-1], "features": np.zeros(16, np.float32)},
            "bad_features: f line 2 has in its 192x128 image the box 0: 50, 50, 10, 10",
        ),
        (
            write_tsv,
            {"num_boxes": 1, "boxes": ONE_BOX[:, [0, 1, 0, 3]], "features": np.zeros(16, np.float32)},
            "no_regions: f line 2 has no box with an area",
        ),
        (write_tsv, {"num_boxes": 0, "boxes": "", "features": ""}, "no_regions: f line 2 has no box with an area"),
        (write_tsv, {"image_w": 128, "image_h": 192}, "bad_features: f line 2 has in its 128x192 image the box"),
        (write_tsv, {"image_w": 400, "image_h": 192}, "size_mismatch: f line 2 is of an image of 400x192"),
        (write_json, {"image_w": ...}, "bad_features: f: 000001 has no image_w"),
        (write_json, {"features": ...}, "bad_features: f: 000001 has no features"),
        (write_json, {"features": [1.0]}, "bad_features: f: 000001 has features that are [1.0], neither an array nor"),
        (
            write_json,
            {"classes": np.full((5, 9), 0.5, np.float32)},
            "bad_features: f: 000001 has class probabilities whose sum is 4.5, not 1",
        ),
        (
            write_json,
            {"classes": np.full((5, 9), -1, np.float32)},
            "bad_features: f: 000001 has class probabilities that",
        ),
        (
            write_json,
            {"classes": np.full((5, 5), 0.2, np.float32)},
            "bad_features: f: 000001 has 5 class probabilities a region, the first row of the files 9",
        ),
        (write_lmdb, {"image_h": ...}, "bad_features: f: 000001 has no image_h"),
        (
            write_lmdb,
            {"raw": hostile_pickle()},
            "bad_features: f: 000001 wants to load builtins.eval, which no features",
        ),
        (write_lmdb, {"raw": b"\x80\x04"}, "bad_features: f: 000001 torn at byte 2"),
        (write_lmdb, {"raw": b"N."}, "bad_features: f: 000001 is None, not a dict of fields"),
        (write_lmdb, {"boxes": np.array(["x"])}, "bad_features: f: 000001 wants to load an array of 'U1'"),
        (write_h5, {"features": ...}, "bad_features: f: 000001 has no features"),
        (write_h5, {"img_w": ...}, "bad_features: f: 000001 has no image_w"),
        (write_h5, {"img_w": np.array([3, 4])}, "bad_features: f: 000001 has the image_w array([3, 4])"),
        (write_h5, {"features": h5py.SoftLink("/000000/features")}, "bad_features: f: 000001 features is no dataset"),
        (write_h5, {"features": h5py.ExternalLink("g.h5", "/x")}, "bad_features: f: 000001 features is no dataset"),
        (write_h5, {"obj_id": np.zeros(5)}, "bad_features: f: 000001 has objects_id of float64, which are no int64"),
        (
            write_h5,
            {"cls_prob": features_of(1).class_probs},
            "bad_features: f: 000001 has an objects_id that is not its most probable class: is imported.background to",
        ),
    ],
)
def test_an_unusable_row_costs_its_image_alone(write: Writer, changes: dict, status: str, tmp_path: Path):
    raw = {"raw": changes.pop("raw")} if "raw" in changes else {}
    file = write(tmp_path / "f", [features_of(0), features_of(1)], changes=changes, **raw)
    more = VOLTA if write is write_h5 else []
    good, bad = detector_of(file, *more).detect([a_sample(0), a_sample(1)])
    assert isinstance(good, Regions)
    assert bad.startswith(status)


def cut_tsv(file: Path) -> Path:
    write_tsv(file, [features_of(0), features_of(1)])
    file.write_bytes(file.read_bytes()[:-100])
    return file


def cut_in_the_boxes(file: Path) -> Path:
    write_tsv(file, [features_of(0), features_of(1)])
    first, second = file.read_bytes().split(b"\r\n")[:2]
    file.write_bytes(first + b"\r\n" + second[:40])
    return file


def changed_zip(file: Path) -> Path:
    write_json(file.with_suffix(".zip"), [features_of(0), features_of(1)])
    data = bytearray(file.with_suffix(".zip").read_bytes())
    data[data.rindex(b'"boxes"') + 20] ^= 1
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("make", "detail"),
    [
        (cut_tsv, "f line 2 has features that are not base64"),
        (cut_in_the_boxes, "f line 2 has 5 columns, not 6: it is cut off"),
        (changed_zip, "f: frcnn/000001.json is damaged: its CRC is another"),
    ],
)
def test_a_damaged_row_is_a_status_that_the_manifest_counts(make: Callable[[Path], Path], detail: str, tmp_path: Path):
    file = make(tmp_path / "f")
    catalog = commit_images(tmp_path / "root", [[a_sample(0), a_sample(1)]])
    main([str(tmp_path / "root"), "captions", "backend=imported", f"imported.files={file}", "keep_features=true"])
    rows = catalog.manifest(f"regions/{identify(config(file))}", "00000").table.to_pylist()
    assert [row["status"] for row in rows] == ["ok", "bad_features"]
    assert rows[1]["detail"].startswith(detail)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (pickle.dumps([1, 2]), "has 2 values without names"),
        (msgpack.packb([1, 2]), "has 2 values without names"),
        (msgpack.packb([[1] * 9] * 8)[:-1], "is no msgpack, or is torn"),
        (msgpack.packb([{b"nd": True, b"type": "|O8", b"shape": [1], b"data": bytes(8)}] * 8), "an array of '|O8'"),
        (msgpack.packb([{b"nd": True, b"type": "<f4", b"shape": [3], b"data": bytes(8)}] * 8), "is no msgpack"),
        (msgpack.packb([{b"nd": False, b"type": "<f4"}] * 8), "is no msgpack"),
        (hostile_pickle(), "wants to load builtins.eval"),
    ],
)
def test_a_damaged_row_of_tensorpack_costs_no_other(raw: bytes, reason: str, tmp_path: Path):
    file = write_tensorpack(tmp_path / "f.lmdb", [features_of(0), features_of(1)], raw=raw)
    detector = detector_of(file, f"imported.columns={TENSORPACK}", "imported.match=number")
    found = detector.detect([a_sample(0), a_sample(1)])
    assert isinstance(found[0], Regions)
    assert found[1].startswith("bad_features: f.lmdb: 00000001 ")
    assert reason in found[1]


def test_a_shard_without_any_usable_row_is_not_committed(tmp_path: Path):
    file = write_tsv(tmp_path / "f", [features_of(9), features_of(0)], changes={"image_w": ""})
    lines = file.read_bytes().split(b"\r\n")
    file.write_bytes(b"\r\n".join([*lines[:2], lines[1].replace(b"000000", b"000001"), b""]))
    commit_images(tmp_path / "root", [[a_sample(0), a_sample(1)]])
    with pytest.raises(
        SystemExit, match="f line 2 has no image_w, and so in all of the 2 images that have a row: is it"
    ):
        main([str(tmp_path / "root"), "captions", "backend=imported", f"imported.files={file}", "keep_features=true"])


def test_that_no_image_has_a_row_is_said(tmp_path: Path, capsys: pytest.CaptureFixture):
    detector = detector_of(write_tsv(tmp_path / "f", [features_of(7)]), keep=False)
    for _ in range(2):
        detector.detect([a_sample(0), a_sample(1)])
    indexing, kept, warning = capsys.readouterr().err.splitlines()
    assert kept == "the features of the files are not kept; keep_features=true keeps them"
    assert "WARNING: none of 2 images has a row by imported.match=file_name" in warning
    assert "http://example.org/000000.jpg, the files begin with 000007" in warning


def absent(file: Path) -> Path:
    return file


def plain(content: bytes) -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        file.write_bytes(content)
        return file

    return make


def empty_folder(file: Path) -> Path:
    file.mkdir()
    return file


def flat_h5(file: Path) -> Path:
    with h5py.File(file, "w") as stream:
        stream["image_features"] = np.zeros((2, 36, 8), np.float32)
        stream["image_bb"] = np.zeros((2, 36, 4), np.float32)
    return file


def cut(write: Writer, part: str = "", kept: float = 0.5) -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        write(file.with_suffix(".zip") if write is write_json else file, [features_of(n) for n in range(9)])
        if write is write_json:
            file.with_suffix(".zip").rename(file)
        data = (file / part).read_bytes()
        (file / part).write_bytes(data[: int(len(data) * kept)])
        return file

    return make


def broken_first(write: Writer, **changes: Any) -> Callable[[Path], Path]:
    return lambda file: write(file, [features_of(1)], changes=changes)


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (absent, [], "there is no file of features .*f$"),
        (empty_folder, [], r"f holds neither data\.mdb, as an LMDB does, nor \*\.json"),
        (plain(b""), [], "f has 1 columns in its first line, not 6 as bottom-up attention's or 10"),
        (plain(b"a\tb\tc\r\n"), [], "f has 3 columns in its first line"),
        (plain(b"a\tb\tc\r\n"), ["imported.columns=boxes,features,x"], "f: none of its columns .* is the image_id"),
        (plain(b"1\t9\t9\t1\tAAAA\tAAAA\r\n"), [], "f: its first row, f line 1, has boxes of 3 bytes"),
        (plain(b"1\t9\t9\t0\t\t\r\n"), [], "f holds no row with boxes"),
        (
            lambda file: write_tsv(file, [features_of(1)]),
            ["imported.select=true"],
            "f: .*leave out imported.select",
        ),
        (
            lambda file: write_tsv(file, [features_of(1)], LXMERT),
            ["imported.num_classes=1"],
            "f: its first row, f line 1, has the objects_id [1-7], and imported.num_classes is 1",
        ),
        (
            lambda file: write_tsv(file, [features_of(1)]),
            ["imported.num_classes=8"],
            "has no objects_id: leave out imported.num_classes",
        ),
        (cut(write_json), [], "f is torn or no zip file"),
        (cut(write_lmdb, "data.mdb"), [], "f is cut off: it is smaller than it says"),
        (cut(write_lmdb, "data.mdb", 0.001), [], "f is damaged, or no LMDB"),
        (cut(write_h5), [], "f is torn or no HDF5 file"),
        (lambda file: write_tensorpack(file, [features_of(1)]), [], r"has 8 values without names.*imported\.columns"),
        (flat_h5, [], "f has image_bb, image_features and no group for each image"),
        (broken_first(write_h5, boxes=...), VOLTA, "f: its first row, f: 000001, has no boxes"),
        (lambda file: write_lmdb(file, [features_of(1)], raw=hostile_pickle()), [], "wants to load builtins.eval"),
    ],
)
def test_an_unusable_file_is_named_before_anything_is_detected(
    make: Callable[[Path], Path], more: list[str], message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        detector_of(make(tmp_path / "f"), *more)


def test_two_files_must_be_equally_wide(tmp_path: Path):
    files = [write_tsv(tmp_path / f"{n}", [features_of(n, channels=8 * n)]) for n in (1, 2)]
    with pytest.raises(ValueError, match="2: its first row, 2 line 1, has 16 features a region, .* of the files 8"):
        detector_of(",".join(map(str, files)))
