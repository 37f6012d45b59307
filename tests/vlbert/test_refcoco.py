"""RefCOCO+: the official files, the three ways to count an overlap, and the task."""

import dataclasses
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from places import SHARED
from refcoco_files import WORDS, change, change_refs, urls, write_refcoco
from tiny import TINY_MODEL, tiny_sample

from storage.sample import Regions, Sample
from vlbert.data.batch import Example, collate
from vlbert.data.images import prepare_image, swap_sides
from vlbert.datasets.refcoco import (
    CONVENTIONS,
    Expression,
    is_hit,
    metrics,
    of_split,
    overlap,
    read_detections,
    read_expressions,
    read_plain_pickle,
)
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.refcoco import Query, RefCOCO, RefCOCOSettings


@pytest.fixture
def samples() -> list:
    return [tiny_sample(i, regions=2 + i % 2) for i in range(4)]


CONFORMANCE = SHARED / "conformance" / "refcoco_plus"
needs_conformance = pytest.mark.skipif(
    not CONFORMANCE.is_dir(), reason="the official formats' samples lie in ../shared, which is not here"
)


def xyxy(box: list[float]) -> np.ndarray:
    x, y, width, height = box
    return np.array([x, y, x + width, y + height])


# --- what an overlap is worth -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("convention", "expected"),
    [
        ("plain", [1, 50 / 100, 0, 1 / 100]),
        ("mattnet", [1, 50 / 100, 0, 0]),  # a side of one pixel is none
        ("published", [1, 66 / 121, 0, 4 / 121]),
    ],
)
def test_overlaps_of_known_boxes(convention, expected):
    box = np.array([10.0, 10, 20, 20])
    others = np.array([[10.0, 10, 20, 20], [10, 10, 15, 20], [30, 30, 40, 40], [19, 19, 20, 20]])
    np.testing.assert_allclose(overlap(convention, others, box), expected, rtol=1e-15)
    for one, value in zip(others, expected, strict=True):
        assert overlap(convention, box[None], one)[0] == pytest.approx(value), "whichever comes first"


def test_at_one_half_mattnet_and_the_authors_hit_and_the_plain_overlap_does_not():
    border = np.array([0.5 - 1e-12, 0.5, 0.5 + 1e-12])
    assert [is_hit(convention, border).tolist() for convention in CONVENTIONS] == [
        [False, True, True],
        [False, True, True],
        [False, False, True],
    ]


def test_a_width_comes_back_as_the_file_has_it():
    """x + w - x is another number than w; where a box is half of another, one bit decides."""
    x, y, w, h = 165.34, 175.5, 319.95, 220.11
    assert (x + w) - x != w
    common = ((x + w / 2 - 1) - x + 1) * ((y + h - 1) - y + 1)
    expected = common / (w / 2 * h + w * h - common)
    assert expected < 0.5
    assert overlap("mattnet", xyxy([x, y, w / 2, h]), xyxy([x, y, w, h]))[0] == expected


def test_boxes_without_any_area_overlap_by_nothing():
    point = np.array([5.0, 5, 5, 5])
    assert overlap("plain", point, point).tolist() == overlap("mattnet", point, point).tolist() == [0]


@needs_conformance
def test_every_overlap_and_hit_is_the_official_one():
    expected = json.loads((CONFORMANCE / "expected.json").read_text())["per_expression"]
    predictions = json.loads((CONFORMANCE / "predictions.json").read_text())
    expressions = {
        one.sentence_id: one
        for by_file in read_expressions(CONFORMANCE / "data" / "refcoco+").values()
        for ones in by_file.values()
        for one in ones
    }
    columns = {
        "mattnet": ("mattnet_iou", "mattnet_hit"),
        "published": ("vlbert_iou", "vlbert_hit"),
        "plain": ("plain_iou", "plain_hit_strict_gt_0.5"),
    }
    assert [row["sent_id"] for row in expected] == [row["sent_id"] for row in predictions]
    for convention, (iou, hit) in columns.items():
        for row, predicted in zip(expected, predictions, strict=True):
            found = overlap(convention, xyxy(predicted["box_xywh"]), expressions[row["sent_id"]].box)[0]
            assert found == pytest.approx(row[iou], abs=1e-9), (convention, row["sent_id"])
            assert bool(is_hit(convention, found)) == row[hit], (convention, row["sent_id"])


# --- the official files -----------------------------------------------------------------------------------------------


@needs_conformance
def test_the_official_files_give_the_official_splits():
    expected = json.loads((CONFORMANCE / "expected.json").read_text())
    folder = CONFORMANCE / "data" / "refcoco+"
    found = read_expressions(folder)
    for split, refs in expected["splits"].items():
        assert sorted({one.ref_id for _, one in of_split(found, split, folder)}) == sorted(refs["ref_ids"])
    boxes = {e.sentence_id: e.box for split in found.values() for of_image in split.values() for e in of_image}
    for row in expected["per_expression"]:
        x, y, w, h = row["gt_box_xywh"]
        assert boxes[row["sent_id"]] == (x, y, x + w, y + h)


@needs_conformance
def test_mattnets_file_gives_boxes_in_corners_by_image():
    file = CONFORMANCE / "detections" / "res101_coco_minus_refer_notime_dets.json"
    instances = CONFORMANCE / "data" / "refcoco+" / "instances.json"
    found = read_detections(file, instances)
    assert (found.of_other_images, found.without_area) == (0, 0)
    rows = json.loads(file.read_text())
    names = {image["id"]: image["file_name"] for image in json.loads(instances.read_text())["images"]}
    assert sum(map(len, found.boxes.values())) == len(rows)
    first = rows[0]
    np.testing.assert_allclose(found.boxes[names[first["image_id"]]][0], xyxy(first["box"]))


def test_test_is_test_a_and_test_b_and_any_other_name_must_be_there(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    change_refs(
        tmp_path,
        lambda refs: [ref.update(split=s) for ref, s in zip(refs, ("testA", "val", "testB", "train"), strict=True)],
    )
    found = read_expressions(tmp_path)
    assert {one.ref_id for _, one in of_split(found, "test", tmp_path)} == {0, 2}
    assert {one.ref_id for _, one in of_split(found, "testB", tmp_path)} == {2}
    with pytest.raises(ValueError, match=r"refs\(unc\).p has no split testC, only testA, testB, train, val"):
        of_split(found, "testC", tmp_path)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    for refs, names in (([Attack()], "getattr"), ([{"ref_id": np.int64(3)}], "scalar"), ([b"bytes"], "encode")):
        (tmp_path / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=2))
        with pytest.raises(ValueError, match=rf"refs\(unc\).p wants to load .*{names}; a refs file holds plain values"):
            read_plain_pickle(tmp_path / "refs(unc).p")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_refs_file_may_be_of_any_protocol(tmp_path, samples, protocol):
    write_refcoco(tmp_path, samples)
    file = tmp_path / "refs(unc).p"
    expected = read_expressions(tmp_path)
    file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol))
    assert read_expressions(tmp_path) == expected


def test_python_2s_plain_strings_unicode_and_long_numbers_are_read(tmp_path):
    """As Python 2.7 writes [{'a': 'b', u'\\xe9': 3L}], protocols 0 and 2."""
    file = tmp_path / "refs"
    for written in (
        b"(lp0\n(dp1\nS'a'\np2\nS'b'\np3\nsV\\u00e9\np4\nL3L\nsa.",
        b"\x80\x02]q\x00}q\x01(U\x01aq\x02U\x01bq\x03X\x02\x00\x00\x00\xc3\xa9q\x04\x8a\x01\x03ua.",
    ):
        file.write_bytes(written)
        assert read_plain_pickle(file) == [{"a": "b", "\xe9": 3}]


def test_python_2s_plain_strings_are_utf_8(tmp_path):
    (tmp_path / "refs").write_bytes(b"(lp0\nS'caf\\xc3\\xa9'\np1\na.")
    assert read_plain_pickle(tmp_path / "refs") == ["caf\u00e9"]


def test_a_torn_refs_file_is_one_clear_error_wherever_it_is_torn(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    file = tmp_path / "refs(unc).p"
    for protocol in (0, 2):
        whole = pickle.dumps(pickle.loads(file.read_bytes()), protocol)
        for end in range(0, len(whole), 7):
            (tmp_path / "torn").write_bytes(whole[:end])
            with pytest.raises(ValueError, match="torn is no pickle, or is cut off: .*fetch it again"):
                read_plain_pickle(tmp_path / "torn")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda refs: refs[1].pop("ann_id"), "reference 1: its ann_id is None, and not of type int"),
        (lambda refs: refs[1].update(split=3), "reference 1: its split is 3, and not of type str"),
        (lambda refs: refs[2].update(sentences="left"), "reference 2: its sentences is 'left', and not of type list"),
        (lambda refs: refs[2]["sentences"].append("left"), "reference 2: its sent_id is None"),
        (lambda refs: refs[0]["sentences"][0].pop("sent"), "reference 0: its sent is None, and not of type str"),
        (lambda refs: refs.append([]), "reference 4: its ref_id is None"),
        (lambda refs: refs[2].update(image_id=99), "ref 2 names image 99, annotation 6, which instances.json does not"),
        (lambda refs: refs[2].update(ann_id=99), "ref 2 names image 2, annotation 99, which instances.json does not"),
        (lambda refs: refs[2].update(ann_id=0), "ref 2 names image 2, annotation 0, which instances.json does not"),
        (lambda refs: refs.append(refs[0]), "reference 4: its ref_id 0 stands there twice"),
        (
            lambda refs: refs.append(refs[0] | {"ref_id": 9, "split": "testA"}),
            "reference 4: its sent_id 0 stands there tw",
        ),
        (lambda refs: refs[3]["sentences"][1].update(sent_id=30), "reference 3: its sent_id 30 stands there twice"),
    ],
)
def test_a_reference_that_is_wrong_is_named(tmp_path, samples, change, says):
    write_refcoco(tmp_path, samples)
    change_refs(tmp_path, change)
    with pytest.raises(ValueError, match=rf"refs\(unc\).p: {says}"):
        read_expressions(tmp_path)


def test_a_refs_file_of_another_kind_is_named(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    (tmp_path / "refs(unc).p").write_bytes(pickle.dumps({"refs": []}))
    with pytest.raises(ValueError, match=r"refs\(unc\).p holds a dict; a refs file is a list of references"):
        read_expressions(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("annotations", {"bbox": [1, 2, 3]}, r"annotations\[0\] is not in COCO's format: .*expected 4"),
        (
            "annotations",
            {"bbox": [1, 2, 3, float("nan")]},
            r"annotations\[0\] is not in COCO's format: .*is not finite",
        ),
        ("annotations", {"bbox": [1, 2, 3, "4"]}, r"annotations\[0\] is not in COCO's format"),
        ("annotations", {"image_id": 77}, r"annotations\[0\] is not in COCO's format: .*there is no image 77"),
        ("annotations", {"id": 1}, r"annotations\[1\] .*id 1 stands there twice"),
        ("annotations", {"id": [1]}, r"annotations\[0\] .*unhashable"),
        ("images", {"id": 1}, r"images\[1\] .*id 1 stands there twice"),
        ("images", {"file_name": "000001.jpg"}, r"images\[1\] .*file_name 000001.jpg stands there twice"),
        ("images", {"width": 0}, r"images\[0\] is not in COCO's format: .*an image of 0 x 64 pixels"),
        ("images", {"file_name": None}, r"images\[0\] is not in COCO's format: .*its file_name is None"),
    ],
)
def test_an_entry_of_instances_json_that_is_wrong_is_named(tmp_path, samples, name, fields, says):
    write_refcoco(tmp_path, samples)
    change(tmp_path, name, 0, **fields)
    with pytest.raises(ValueError, match=f"instances.json: {says}"):
        read_expressions(tmp_path)


def test_a_missing_torn_or_foreign_file_is_named(tmp_path, samples):
    with pytest.raises(ValueError, match=r"there is no .*refs\(unc\).p; set task.folder"):
        read_expressions(tmp_path)
    write_refcoco(tmp_path, samples)
    for name in ("instances.json", "refs(unc).p"):
        (tmp_path / name).rename(tmp_path / "kept")
        (tmp_path / name).symlink_to("/proc/self/mem")  # a file that opens, and whose bytes nobody may read
        with pytest.raises(ValueError, match=f"^cannot read .*{re.escape(name)}: Input/output error"):
            read_expressions(tmp_path)
        (tmp_path / "kept").replace(tmp_path / name)
    file = tmp_path / "instances.json"
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="instances.json is not JSON, or is torn"):
        read_expressions(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="instances.json holds a list, not an object"):
        read_expressions(tmp_path)


def test_crowds_are_objects_as_all_others(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    before = read_expressions(tmp_path)
    change(tmp_path, "annotations", 0, iscrowd=1, category_id=3)
    assert read_expressions(tmp_path) == before


# --- which questions are asked ----------------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path, samples) -> RefCOCO:
    write_refcoco(tmp_path / "refcoco+", samples)
    return RefCOCO(RefCOCOSettings(str(tmp_path / "refcoco+")), WORDS, 8)


def write_detections(folder: Path, boxes: dict[int, list[list[float]]], name: str = "dets.json") -> None:
    """MAttNet's file: of each image these boxes, x y width height."""
    rows = [
        {"det_id": 0, "h5_id": 0, "box": box, "image_id": image, "category_id": 1, "category_name": "x", "score": 0.9}
        for image, of_image in boxes.items()
        for box in of_image
    ]
    (folder / name).write_text(json.dumps(rows))


def tuned(task: RefCOCO, **settings: object) -> RefCOCO:
    return RefCOCO(dataclasses.replace(task.settings, **settings), WORDS, 8)


def example(task: RefCOCO, sample: Sample, question: Query, flip: bool = False) -> Example:
    return task.example(sample, prepare_image(sample, TINY_MODEL.regions, flip), question, np.random.default_rng(0))


def predict(task: RefCOCO, examples: list[Example], scores: list[list[float]]) -> list[dict]:
    """The rows of examples whose regions, the whole image first, get these scores."""

    class Score(torch.nn.Module):
        def forward(self, regions):
            return regions[..., :1]

    encoded = Encoded(torch.zeros(1), torch.tensor(scores)[..., None], appearance=torch.zeros(0))
    return task.predictions(None, Score(), encoded, collate(examples))


def test_every_expression_of_the_split_is_asked_about_its_own_image(task, samples):
    questions = task.examples(urls(samples), None)
    assert questions.samples.tolist() == [1, 1, 3, 3]
    assert [ask.expression.sentence_id for ask in questions.annotations] == [10, 11, 30, 31]
    assert questions.skipped == ()
    held_out = task.examples(urls(samples[::-1]), "val")
    assert held_out.samples.tolist() == [3, 3, 1, 1]
    assert [ask.expression.sentence_id for ask in held_out.annotations] == [0, 1, 20, 21]
    both = tuned(task, train_on=("train", "val")).examples(urls(samples), None)
    assert [ask.expression.sentence_id for ask in both.annotations] == [10, 11, 30, 31, 0, 1, 20, 21]
    with pytest.raises(ValueError, match=r"refs\(unc\).p has no split testA, only train, val"):
        task.examples(urls(samples), "testA")
    with pytest.raises(ValueError, match=r"1 of 2 images of train of .* in no region shard, such as 000003"):
        task.examples(urls(samples[:3]), None)


@pytest.mark.parametrize(
    ("sentence", "box", "says"),
    [
        (" ", None, "it has no words"),
        ("\u200b", None, "it has no words"),
        ("one " * 600, None, "it has 600 tokens, more than task.expression_length = 60"),
        ("one", [5, 5, 0, 9], r"its box \[5, 5, 5, 14\] has no area"),
        ("one", [5, 5, -3, 9], r"its box \[5, 5, 2, 14\] has no area"),
        ("one", [500, 5, 9, 9], r"its box \[500, 5, 509, 14\] lies outside its image of 96 x 64 pixels"),
    ],
)
def test_what_cannot_be_asked_is_not_learned_from_and_is_wrong_where_it_is_held_out(
    tmp_path, samples, sentence, box, says
):
    write_refcoco(tmp_path, samples)
    if box:
        last = 4 if len(samples[0].regions) == 2 else 5
        change(tmp_path, "annotations", last, bbox=box)  # the object of ref 1, of train
        change(tmp_path, "annotations", 6, bbox=box)  # the object of ref 2, of val
    change_refs(tmp_path, lambda refs: [refs[i]["sentences"][0].update(sent=sentence) for i in (1, 2)])
    task = RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8)
    ids = [10, 11] if box else [10]
    learned = task.examples(urls(samples), None)
    assert [ask.expression.sentence_id for ask in learned.annotations] == [i for i in (10, 11, 30, 31) if i not in ids]
    held_out = task.examples(urls(samples), "val")
    assert [ask.expression.sentence_id for ask in held_out.annotations] == [0, 1, 20, 21], "all keep their place"
    assert (learned.invalid, held_out.skipped) == ((), ())
    for told, split, first in ((learned.skipped, "train", 10), (held_out.invalid, "val", 20)):
        assert len(told) == len(ids)
        assert re.search(f"sentence {first} of {split}: {says}", told[0])
    count = len(held_out.annotations[2].regions)
    (row,) = predict(task, [example(task, samples[2], held_out.annotations[2])], [[3.0] * (1 + count)])
    assert (row["answer"], row["hit"], row["score"], row["exact"], row["candidates"]) == (
        "no region",
        False,
        0,
        False,
        0,
    )
    assert (row["region"], row["box_xywh"], row["ranking"], row["probability"]) == (-1, [0, 0, 0, 0], [], 0)
    assert row["ground_truth"].startswith("the box" if box else "region")


def test_a_split_of_which_nothing_can_be_asked_is_an_error(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    change_refs(tmp_path, lambda refs: [s.update(sent="") for ref in refs for s in ref["sentences"]])
    with pytest.raises(ValueError, match="all 4 expressions of train .* sentence 10 of train: it has no words"):
        RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8).examples(urls(samples), None)


# --- what is to be seen, and what is right ----------------------------------------------------------------------------


def test_the_right_region_is_the_objects_and_the_whole_image_does_not_compete(task, samples):
    question = task.examples(urls(samples), None).annotations[0]
    found = example(task, samples[1], question)
    assert found.image.label_masks["right"].tolist() == [False, False, False, True], "the last box of sample 1"
    assert found.image.label_masks["candidate"].tolist() == [False, True, True, True]
    assert not found.image.masked.any()
    assert example(tuned(task, whole_image_competes=True), samples[1], question).image.label_masks["candidate"].all()


def test_ground_truth_regions_are_the_annotated_objects_whatever_was_detected(task, samples):
    question = task.examples(urls(samples), None).annotations[0]
    before = example(task, samples[1], question)
    regions = samples[1].regions
    other = Regions(regions.boxes[:1] / 2, regions.scores[:1], regions.labels[:1], "another", class_probs=None)
    after = example(task, dataclasses.replace(samples[1], regions=other), question)
    np.testing.assert_array_equal(before.image.boxes, after.image.boxes)
    np.testing.assert_array_equal(before.metadata["boxes"][1:], question.expression.objects)
    assert after.image.boxes[0].tolist() == [0, 0, 95, 63], "in front of them the whole image"


def test_detected_regions_are_the_shards_own_or_those_of_mattnets_file(tmp_path, task, samples):
    (tmp_path / "refcoco+" / "detections").mkdir()
    write_detections(tmp_path / "refcoco+", {1: [[10, 20, 30, 40]], 3: [[0, 0, 9, 9]]}, "detections/mattnet.json")
    for settings, boxes in (
        ({}, samples[1].regions.boxes),
        ({"detections": "detections/mattnet.json"}, np.array([[10, 20, 40, 60]])),
    ):
        detected = tuned(task, regions="detected", **settings)
        found = example(detected, samples[1], detected.examples(urls(samples), None).annotations[0])
        np.testing.assert_array_equal(found.metadata["boxes"][1:], boxes)
        np.testing.assert_allclose(found.image.boxes[1:], np.minimum(boxes, [95, 63, 95, 63]), atol=1e-5)


def test_an_image_without_detections_is_not_learned_from_and_wrong_where_it_is_held_out(tmp_path, task, samples):
    write_detections(tmp_path / "refcoco+", {2: [[1, 1, 9, 9]], 3: [[0, 0, 9, 9]]})
    detected = tuned(task, regions="detected", detections="dets.json", adds_ground_truth=True)
    learned = detected.examples(urls(samples), None)
    assert [ask.expression.sentence_id for ask in learned.annotations] == [30, 31]
    assert learned.skipped[0].endswith("dets.json has no box of 000001.jpg")
    held_out = detected.examples(urls(samples), "val")
    assert len(held_out.annotations) == 4
    assert len(held_out.invalid) == 2
    (row,) = predict(detected, [example(detected, samples[0], held_out.annotations[0])], [[1.0]])
    assert (row["answer"], row["hit"], row["iou"]) == ("no region", False, 0)
    write_detections(tmp_path / "refcoco+", {77: [[1, 1, 9, 9]]})
    with pytest.raises(ValueError, match="all 4 expressions of val .* dets.json has no box of 000000.jpg"):
        tuned(task, regions="detected", detections="dets.json").examples(urls(samples), "val")


def test_detections_of_no_use_are_counted_and_those_beyond_the_picture_clipped(tmp_path, task):
    folder = tmp_path / "refcoco+"
    write_detections(folder, {0: [[-5, 10, 20, 80], [3, 3, 0, 4], [200, 3, 5, 5]], 77: [[1, 1, 1, 1]]})
    found = read_detections(folder / "dets.json", folder / "instances.json")
    assert {name: boxes.tolist() for name, boxes in found.boxes.items()} == {"000000.jpg": [[0, 10, 15, 64]]}
    assert (found.of_other_images, found.without_area) == (1, 2)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"dets": []}, "dets.json holds an object, not a list"),
        ([{"box": [1, 2, 3, 4]}], r"detection 0 is not in MAttNet's format, .*'image_id'"),
        ([{"box": [1, 2, 3], "image_id": 0}], "detection 0 is not in MAttNet's format"),
        ([{"box": [1, 2, 3, float("inf")], "image_id": 0}], "detection 0 is not in MAttNet's format, .*not finite"),
        (None, "there is no .*dets.json; fetch it, or set task.detections"),
    ],
)
def test_a_file_of_detections_that_is_wrong_is_named(tmp_path, task, rows, says):
    folder = tmp_path / "refcoco+"
    if rows is not None:
        (folder / "dets.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=says):
        read_detections(folder / "dets.json", folder / "instances.json")


def test_the_ground_truth_joins_detected_regions_in_training_alone(tmp_path, task, samples):
    write_detections(tmp_path / "refcoco+", {i: [[0, 0, 9, 9]] for i in range(4)})
    detected = tuned(task, regions="detected", detections="dets.json", adds_ground_truth=True)
    learned, held_out = (detected.examples(urls(samples), split).annotations[0] for split in (None, "val"))
    found = example(detected, samples[1], learned).image
    assert len(found.boxes) == 1 + 1 + 3
    assert found.label_masks["right"].tolist() == [False, False, False, False, True]
    assert len(example(detected, samples[0], held_out).image.boxes) == 1 + 1
    same = detected.examples(urls(samples), "train").annotations[0]
    assert len(example(detected, samples[1], same).image.boxes) == 1 + 1, "train may be measured, too"


def test_settings_that_contradict_each_other_are_refused():
    for settings in ({"detections": "dets.json"}, {"adds_ground_truth": True}):
        with pytest.raises(ValueError, match="detections and adds_ground_truth are for regions=detected"):
            RefCOCOSettings(**settings)
    with pytest.raises(ValueError, match="expression_length is 0"):
        RefCOCOSettings(expression_length=0)
    assert RefCOCOSettings(regions="detected", detections="d.json").files == ("refs(unc).p", "instances.json", "d.json")


def test_precomputed_features_are_for_the_shards_own_regions(task):
    features = dataclasses.replace(TINY_MODEL, regions=dataclasses.replace(TINY_MODEL.regions, features="precomputed"))
    for settings in (
        {},
        {"regions": "detected", "adds_ground_truth": True},
        {"regions": "detected", "detections": "d"},
    ):
        with pytest.raises(ValueError, match="set model.regions.features=end_to_end, or task.regions=detected"):
            tuned(task, **settings).head(features)
    tuned(task, regions="detected").head(features)


def test_mirroring_swaps_the_sides_in_words_and_boxes(task, samples):
    question = task.examples(urls(samples), None).annotations[0]
    straight, mirrored = (example(task, samples[1], question, flip=flip) for flip in (False, True))
    assert WORDS.decode(straight.text.tokens) == "[CLS] the left one [SEP]"
    assert WORDS.decode(mirrored.text.tokens) == "[CLS] the right one [SEP]"
    assert mirrored.image.label_masks["right"].tolist() == [False, False, False, True]
    x1, x2 = straight.image.boxes[3, [0, 2]].tolist()
    assert mirrored.image.boxes[3, [0, 2]].tolist() == pytest.approx([95 - x2, 95 - x1])
    for text, swapped in (
        ("left of the leftmost right", "right of the leftmost left"),
        ("Left, LEFT-most; the right's", "right, right-most; the left's"),
        ("bright copyright", "bright copyright"),
    ):
        assert swap_sides(text) == swapped


@pytest.mark.parametrize(("convention", "right"), [("published", True), ("mattnet", False), ("plain", False)])
def test_a_region_is_right_to_learn_from_above_one_half_of_the_convention(task, samples, convention, right):
    counted = tuned(task, regions="detected", iou=convention)
    regions = dataclasses.replace(samples[0].regions, boxes=np.array([[10, 10, 20, 20], [0, 0, 5, 5]], np.float32))
    expression = Expression(1, 1, "one", (10.0, 10.0, 30.0, 20.0), (96, 64))
    found = example(counted, dataclasses.replace(samples[0], regions=regions), Query(expression, None, False))
    assert found.image.label_masks["right"].tolist() == [False, right, False]


# --- what is predicted ------------------------------------------------------------------------------------------------


def test_padding_and_the_whole_image_never_win(task, samples):
    question = task.examples(urls(samples), "val").annotations[0]
    detected = tuned(task, regions="detected")
    asked = [dataclasses.replace(question, regions=None) for _ in range(2)]
    batch = [example(detected, sample, ask) for sample, ask in zip(samples[:2], asked, strict=True)]
    rows = predict(detected, batch, [[9.0, -5, -6, 9], [9, -7, -5, -6]])
    assert [row["region"] for row in rows] == [0, 1]
    assert [row["answer"] for row in rows] == ["region 1", "region 2"], "people count from 1"
    assert [row["candidates"] for row in rows] == [2, 3]
    assert [[one["answer"] for one in row["ranking"]] for row in rows] == [
        ["region 1", "region 2"],
        ["region 2", "region 3", "region 1"],
    ]
    assert rows[0]["probability"] == pytest.approx(1 / (1 + np.exp(5)))
    competing = tuned(detected, whole_image_competes=True)
    batch = [example(competing, sample, ask) for sample, ask in zip(samples[:2], asked, strict=True)]
    rows = predict(competing, batch, [[9.0, -5, -6, 99], [-8, -7, -5, -6]])
    assert [(row["answer"], row["region"], row["candidates"]) for row in rows] == [
        ("the whole image", -1, 3),
        ("region 2", 1, 4),
    ]
    assert rows[0]["box_xywh"] == [0, 0, 95, 63]


def test_the_loss_is_over_candidates_alone(task, samples):
    questions = task.examples(urls(samples), "val").annotations[0], task.examples(urls(samples), None).annotations[0]
    batch = collate([example(task, sample, ask) for sample, ask in zip(samples[:2], questions, strict=True)])
    scores = torch.tensor([[9.0, -5, -6, 9], [9, -7, -5, -6]])
    encoded = Encoded(torch.zeros(1), scores[..., None], appearance=torch.zeros(0))
    losses = task.losses(None, torch.nn.Identity(), encoded, batch)
    loss, count = losses["regions"]
    right, asked = losses["accuracy"]
    assert (int(right), asked) == (0, 2)
    other = torch.tensor([[9.0, -6, -5, 9], [9, -7, -6, -5]])
    right, asked = task.losses(
        None, torch.nn.Identity(), dataclasses.replace(encoded, regions=other[..., None]), batch
    )["accuracy"]
    assert (int(right), asked) == (2, 2)
    assert count == 5, "neither padding nor the whole image is scored"
    right = torch.tensor([0.0, 1, 0, 0, 1])
    kept = torch.tensor([-5.0, -6, -7, -5, -6])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(kept, right, reduction="sum")
    assert float(loss) == pytest.approx(float(expected))


def test_the_first_of_equal_scores_wins(task, samples):
    question = task.examples(urls(samples), None).annotations[0]
    (row,) = predict(task, [example(task, samples[1], question)], [[0.0, -1, 2, 2]])
    assert row["region"] == 1
    many = dataclasses.replace(question, regions=[(i, 0, i + 9, 9) for i in range(40)])
    (row,) = predict(task, [example(task, samples[1], many)], [[0.0] * 41])
    assert [one["answer"] for one in row["ranking"]] == [f"region {i}" for i in range(1, 6)]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shrunk", [1, 3])
def test_what_is_said_is_scored_in_pixels_of_the_image_that_was_shipped(tmp_path, samples, shrunk, flip):
    write_refcoco(tmp_path, samples, scale=shrunk)
    task = RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8)
    question = task.examples(urls(samples), "val").annotations[2]
    box = samples[2].regions.boxes[1].astype(float) * shrunk
    rights = example(task, samples[2], question, flip).image.label_masks["right"].tolist()
    assert rights == [False, False, True]
    own = dataclasses.replace(question, regions=None)  # the sample's, which lie in the stored picture
    (row,) = predict(tuned(task, regions="detected"), [example(task, samples[2], own, flip)], [[0.0, -1, 2]])
    assert (row["iou"], row["hit"], row["exact"]) == (1, True, None)
    (row,) = predict(task, [example(task, samples[2], question, flip)], [[0.0, -1, 2]])
    assert (row["iou"], row["hit"], row["exact"], row["score"]) == (1, True, True, 1)
    assert row["box_xywh"] == [*box[:2], *(box[2:] - box[:2])]
    assert row["boxes"] == [
        {"name": "region 2", "box": pytest.approx((box / shrunk).tolist())},
        {"name": "ground truth", "box": pytest.approx((box / shrunk).tolist())},
    ]
    assert (row["answer"], row["ground_truth"], row["question"]) == ("region 2", "region 2", "the left one")
    assert (row["sentence_id"], row["ref_id"], row["key"]) == (20, 2, samples[2].key)


def test_an_overlap_a_billionth_above_the_border_is_a_hit(tmp_path, task, samples):
    """float32, and boxes of the resized picture, would call it one half."""
    width = 16.0
    for tiny, hit in ((1e-7, True), (-1e-7, False)):
        write_detections(tmp_path / "refcoco+", {0: [[10, 10, width / 2 + tiny, 20]], 2: [[0, 0, 1, 1]]})
        change(tmp_path / "refcoco+", "annotations", 1, bbox=[10, 10, width, 20])
        detected = tuned(task, regions="detected", detections="dets.json", iou="plain")
        question = detected.examples(urls(samples), "val").annotations[0]
        (row,) = predict(detected, [example(detected, samples[0], question)], [[0.0, 1]])
        assert row["iou"] == pytest.approx(0.5 + tiny / width, abs=1e-12)
        assert (row["hit"], row["exact"], row["iou_convention"]) == (hit, None, "plain")


def test_exact_is_the_annotation_and_not_the_best_overlap(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    change(tmp_path, "annotations", 0, bbox=[10, 10, 20, 20])
    change(tmp_path, "annotations", 1, bbox=[10, 10, 20, 20])  # this one is meant
    task = RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8)
    question = task.examples(urls(samples), "val").annotations[0]
    for scores, exact in (([0.0, 5, 1], False), ([0.0, 1, 5], True)):
        (row,) = predict(task, [example(task, samples[0], question)], [scores])
        assert (row["iou"], row["hit"], row["exact"], row["ground_truth"]) == (1, True, exact, "region 2")


def test_objects_without_area_are_no_regions_and_the_others_keep_their_places(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    change(tmp_path, "annotations", 2, bbox=[10, 10, 0, 20])  # the first of image 1, of which the last is meant
    task = RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8)
    question = task.examples(urls(samples), None).annotations[0]
    found = example(task, samples[1], question)
    assert found.image.label_masks["right"].tolist() == [False, False, True]
    (row,) = predict(task, [found], [[0.0, 1, 5]])
    assert (row["region"], row["exact"], row["hit"]) == (1, True, True)


def test_rows_become_a_table_with_one_kind_of_value_a_column(task, samples):
    questions = task.examples(urls(samples), "val").annotations
    flawed = dataclasses.replace(questions[1], invalid_reason="its text is empty")
    rows = [
        row for ask in (questions[0], flawed) for row in predict(task, [example(task, samples[0], ask)], [[0.0, 1, 5]])
    ]
    table = pyarrow.Table.from_pylist(rows)
    assert pyarrow.Table.from_pylist(rows[::-1]).schema == table.schema
    assert set(table.column_names) == {
        *("key", "question", "answer", "probability", "ranking", "ground_truth", "score", "boxes"),
        *(
            "split",
            "sentence_id",
            "ref_id",
            "region",
            "iou",
            "iou_convention",
            "hit",
            "exact",
            "candidates",
            "box_xywh",
        ),
    }


def test_metrics_stand_beside_chance_and_name_how_overlaps_count(task):
    rows = [
        {"hit": True, "exact": True, "candidates": 2},
        {"hit": True, "exact": False, "candidates": 4},
        {"hit": False, "exact": False, "candidates": 4},
        {"hit": False, "exact": False, "candidates": 0},
    ]
    for convention in CONVENTIONS:
        named = [row | {"iou_convention": convention} for row in rows]
        assert task.metrics(named) == {
            f"accuracy_{convention}": 0.5,
            "exact": 0.25,
            "chance": pytest.approx((1 / 2 + 1 / 4 + 1 / 4 + 0) / 4),
        }
    unknown = {"hit": None, "exact": None, "candidates": 4, "iou_convention": "plain"}
    assert metrics([*named, unknown]) == metrics(named)
    assert metrics([unknown]) == {}
    assert set(metrics([row | {"exact": None} for row in named])) == {"accuracy_plain", "chance"}, "on detected regions"


def test_the_submission_is_a_list_of_boxes_and_scores_as_the_rows_do(task, samples):
    questions = task.examples(urls(samples), "val")
    rows = [
        *(
            row
            for i in (0, 1)
            for row in predict(task, [example(task, samples[0], questions.annotations[i])], [[0.0, 1, 5]])
        ),
        *(
            row
            for i in (2, 3)
            for row in predict(task, [example(task, samples[2], questions.annotations[i])], [[0.0, 1, 5]])
        ),
    ]
    ((name, written),) = task.submission(rows).items()
    assert name == "predictions.json"
    row, *_ = json.loads(written)
    ask = questions.annotations[0]
    with pytest.raises(ValueError, match="1 ids of val miss in the predictions, such as 20;"):
        task.submission([rows[0], rows[1], rows[3]])
    with pytest.raises(ValueError, match="1 ids of the predictions stand there more than once, such as 0;"):
        task.submission([*rows, rows[0]])
    assert (row["sent_id"], row["ref_id"]) == (0, 0)
    for convention in CONVENTIONS:
        assert overlap(convention, xyxy(row["box_xywh"]), ask.expression.box)[0] == 1


def test_a_persons_own_expression_is_about_the_regions_of_the_sample(task, samples):
    question = task.annotation_for("the left one")
    (row,) = predict(task, [example(task, samples[1], question)], [[9.0, 1, 5, 2]])
    assert (row["answer"], row["candidates"]) == ("region 2", 3)
    assert row["boxes"] == [{"name": "region 2", "box": samples[1].regions.boxes[1].tolist()}]
    assert {row[name] for name in ("ground_truth", "score", "iou", "hit", "exact")} == {None}
    assert task.metrics([row]) == {}
    with pytest.raises(ValueError, match="the expression ' ' is invalid: it has no words"):
        task.annotation_for(" ")
    with pytest.raises(ValueError, match="is invalid: it has 600 tokens, more than task.expression_length"):
        task.annotation_for("one " * 600)
    with pytest.raises(ValueError, match="give no choices, answer or regions"):
        task.annotation_for("the left one", choices=("a", "b"))


def test_the_head_learns_to_point(task, samples):
    """Four expressions, trained by hand: what the loss asks for is what the metric counts."""
    torch.manual_seed(0)
    model = TaskModel(VLBert(dataclasses.replace(TINY_MODEL, dropout=0.0), len(WORDS)), task)
    questions = task.examples(urls(samples), None)
    batch = collate(
        [example(task, samples[i], e) for i, e in zip(questions.samples, questions.annotations, strict=True)]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss, count = model(batch)["regions"]
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    found = task.metrics(model.predict(batch))
    assert (found["accuracy_published"], found["exact"]) == (1, 1)
