"""RefCOCO+: the official files, the three conventions of an overlap, and the task."""

import dataclasses
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from family import changed
from refcoco_files import WORDS, change, change_refs, write_refcoco
from tiny import SEPARATE, TINY_MODEL, tiny_sample, urls

from storage.sample import Sample
from vlbert.data.batch import Example, ImageInput, collate
from vlbert.data.images import prepare_image, swap_sides
from vlbert.datasets import refcoco
from vlbert.datasets.refcoco import CONVENTIONS, is_hit, metrics, overlap, read_detections, read_expressions
from vlbert.model.vlbert import Encoded
from vlbert.tasks.base import user_annotation
from vlbert.tasks.refcoco import Query, RefCOCO, RefCOCOSettings


@pytest.fixture
def samples() -> list:
    return [tiny_sample(i, regions=2 + i % 2) for i in range(4)]


@pytest.mark.parametrize(
    ("convention", "expected", "hits"),
    [
        ("plain", [1, 50 / 100, 0, 1 / 100], [False, False, True]),
        ("mattnet", [1, 50 / 100, 0, 0], [False, True, True]),  # a side of one pixel is none
        ("published", [1, 66 / 121, 0, 4 / 121], [False, True, True]),
        ("vilbert", [1, 66 / 121, 0, 4 / 121], [False, False, True]),
    ],
)
def test_overlaps_of_known_boxes_and_whether_one_half_is_a_hit(convention, expected, hits):
    box = np.array([10.0, 10, 20, 20])
    others = np.array([[10.0, 10, 20, 20], [10, 10, 15, 20], [30, 30, 40, 40], [19, 19, 20, 20]])
    np.testing.assert_allclose(overlap(convention, others, box), expected, rtol=1e-15)
    for one, value in zip(others, expected, strict=True):
        assert overlap(convention, box[None], one)[0] == pytest.approx(value), "whichever comes first"
    assert is_hit(convention, np.array([0.5 - 1e-12, 0.5, 0.5 + 1e-12])).tolist() == hits


@pytest.mark.parametrize(
    ("written", "value"),
    [  # {'a': 'b', u'\xe9': 3L} of Python 2.7 in protocols 0 and 2, and UTF-8 in a plain string
        (b"(lp0\n(dp1\nS'a'\np2\nS'b'\np3\nsV\\u00e9\np4\nL3L\nsa.", {"a": "b", "\xe9": 3}),
        (b"\x80\x02]}(U\x01aU\x01bX\x02\x00\x00\x00\xc3\xa9\x8a\x01\x03ua.", {"a": "b", "\xe9": 3}),
        (b"(lp0\nS'caf\\xc3\\xa9'\np1\na.", "caf\u00e9"),
    ],
)
def test_a_refs_file_may_be_of_python_2(tmp_path, written, value):
    (tmp_path / "refs").write_bytes(written)
    assert refcoco.read_plain_pickle(tmp_path / "refs") == [value]


def test_the_numbers_of_refs_may_be_numpys(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    expected = read_expressions(tmp_path)

    def to_numpy(refs: list[dict]) -> None:
        for ref in refs:
            ref |= {name: np.int64(value) for name, value in ref.items() if type(value) is int}
            ref["sentences"] = [entry | {"sent_id": np.int32(entry["sent_id"])} for entry in ref["sentences"]]

    change_refs(tmp_path, to_numpy)
    assert read_expressions(tmp_path) == expected


REFS = "refs(unc).p"
WRONG_FILES = [  # the file, or what is in it; its new bytes, or the change; what is named
    ("refs", lambda refs: refs[1].pop("ann_id"), r"refs\(unc\).p .*references\[1\]: KeyError: 'ann_id'"),
    ("refs", lambda refs: refs[2]["sentences"][0].update(sent=7), r"\(unc\).p .*references\[2\]: .*not a string"),
    ("refs", lambda refs: refs[2].update(image_id=99), r"\(unc\).p: ref 2 names image 99 and annotation 6, which .*"),
    ("refs", lambda refs: refs[3]["sentences"][1].update(sent_id=30), r"1 ids .*\(unc\).p are repeated, such as 30"),
    (REFS, b"(lp0\n(dp1\nS'a'\n", r"refs\(unc\).p is not a pickle or is truncated: .*fetch it again"),
    (REFS, pickle.dumps([print]), r"refs\(unc\).p wants to load builtins.print"),
    ("annotations", {"bbox": [1, 2, 3, float("nan")]}, r"instances.json .*annotations\[0\]: .*is not finite"),
    ("annotations", {"id": 1}, "1 ids of annotations of .*instances.json are repeated, such as 1"),
    ("images", {"width": 0}, r"instances.json .*images\[0\]: .*an image of 0 x 64 pixels"),
    ("instances.json", b'{"images": [', "instances.json is truncated or not JSON"),
    (REFS, b'[{"ref_id": 0, "ann_id": [0]}]', r"refs\(unc\).p is JSON, as gRefCOCO has it.*fetch the refs of RefCOCO"),
    ("refs", lambda refs: refs[0].update(ann_id=[2, 3]), r"references\[0\]: TypeError: .*as in gRefCOCO"),
    (REFS, None, r"there is no .*refs\(unc\).p; .*set task.folder"),
    ("dets.json", b'[{"box": [1, 2, 3, 4]}]', r"dets.json .*detections\[0\]: KeyError: 'image_id'"),
    ("dets.json", None, "there is no .*dets.json; fetch it, or set task.detections"),
]


@pytest.mark.parametrize(("where", "damage", "named"), WRONG_FILES)
def test_a_wrong_file_is_named(tmp_path, samples, where, damage, named):
    write_refcoco(tmp_path, samples)
    if callable(damage):
        change_refs(tmp_path, damage)
    elif isinstance(damage, dict):
        change(tmp_path, where, 0, **damage)
    else:
        (tmp_path / where).write_bytes(damage) if damage else (tmp_path / where).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=named):
        read_expressions(tmp_path) and read_detections(tmp_path / "dets.json", tmp_path / "instances.json")


@pytest.mark.parametrize("name", ["refs(unc).p", "refs(umd).p", "refs(google).p"])
def test_the_refs_of_refcoco_and_refcocog_are_read_and_scored_too(tmp_path, samples, name):
    write_refcoco(tmp_path, samples)
    instances = json.loads((tmp_path / "instances.json").read_text())
    (tmp_path / "refs(unc).p").rename(tmp_path / name)
    change(tmp_path, "images", 0, file_name="COCO_train2014_000000000000_16.JPG")  # with the annotation behind it
    assert {split: sum(map(len, files.values())) for split, files in read_expressions(tmp_path).items()} == {
        "val": 4,
        "train": 4,
    }
    change(tmp_path, "images", 0, **instances["images"][0])
    task = RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8)
    assert task.settings.files == (name, "instances.json")
    assert task.settings.hashes().keys() == {name, "instances.json"}
    query = queries(task, samples, "val")[2]
    (row,) = predict(task, [example(task, samples[2], query)], [[0.0, -1, 2]])
    assert task.metrics([row]) == {"accuracy_published": 1, "exact": 1, "chance": 0.5}
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has no split testA; it has train, val"):
        queries(task, samples, "testA")


def test_of_several_refs_one_is_chosen_and_other_forms_are_named(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    refs = pickle.loads((tmp_path / "refs(unc).p").read_bytes())
    (tmp_path / "refs(google).p").write_bytes(pickle.dumps(refs[:1]))
    assert [len(read_expressions(tmp_path, refs)) for refs in (None, "refs(unc).p", "refs(google).p")] == [2, 2, 1]
    chosen = RefCOCO(RefCOCOSettings(str(tmp_path), refs="refs(google).p"), WORDS, 8)
    assert (chosen.settings.files[0], [*chosen.expressions]) == ("refs(google).p", ["val"])
    for file in tmp_path.glob("refs*"):
        file.unlink()
    (tmp_path / "grefs(unc).json").write_text("[]")
    with pytest.raises(ValueError, match=r"\(google\).p, but grefs\(unc\).json; fetch the refs of RefCOCO"):
        read_expressions(tmp_path)
    with pytest.raises(ValueError, match=r"grefs\(unc\).json is JSON, as gRefCOCO has it"):
        read_expressions(tmp_path, "grefs(unc).json")


@pytest.fixture
def task(tmp_path, samples) -> RefCOCO:
    write_refcoco(tmp_path / "refcoco+", samples)
    return RefCOCO(RefCOCOSettings(str(tmp_path / "refcoco+")), WORDS, 8)


def write_detections(folder: Path, boxes: dict[int, list[list[float]]], name: str = "dets.json") -> None:
    """MAttNet's file: of each image these boxes, x y width height."""
    rows = [{"box": box, "image_id": image, "score": 0.9} for image, of_image in boxes.items() for box in of_image]
    (folder / name).write_text(json.dumps(rows))


def queries(task: RefCOCO, samples: list, split: str | None) -> list[Query]:
    return task.examples(urls(samples), split).annotations


def ids(queries: list[Query]) -> list[int]:
    return [query.expression.sentence_id for query in queries]


def example(task: RefCOCO, sample: Sample, query: Query, flip: bool = False) -> Example:
    return task.example(sample, prepare_image(sample, TINY_MODEL.regions, flip), query, np.random.default_rng(0))


def predict(task: RefCOCO, examples: list[Example], scores: list[list[float]]) -> list[dict]:
    """The rows of examples whose regions, the whole image first, get these scores."""
    encoded = Encoded(torch.zeros(1), torch.tensor(scores)[..., None], appearance=torch.zeros(0))
    return task.predictions(None, lambda regions: regions[..., :1], encoded, collate(examples))


def test_each_expression_of_a_split_is_an_example_of_its_own_image(task, samples):
    training = task.examples(urls(samples), None)
    assert (training.samples.tolist(), ids(training.annotations)) == ([1, 1, 3, 3], [10, 11, 30, 31])
    held_out = task.examples(urls(samples[::-1]), "val")
    assert (held_out.samples.tolist(), ids(held_out.annotations)) == ([3, 3, 1, 1], [0, 1, 20, 21])
    both = changed(task, train_on=("train", "val"))
    assert ids(queries(both, samples, None)) == [10, 11, 30, 31, 0, 1, 20, 21]
    with pytest.raises(ValueError, match=r"refs\(unc\).p has no split testA; it has train, val"):
        task.examples(urls(samples), "testA")
    with pytest.raises(ValueError, match=r"1 of 2 images of train of .* in no region shard, such as 000003"):
        task.examples(urls(samples[:3]), None)


def test_expressions_of_an_image_that_was_withdrawn_are_left_out_by_name(task, samples):
    withdrawn = (samples[3].url, samples[2].url, samples[0].url)  # the last is in a snapshot that is older
    training = task.examples(urls(samples[:2], withdrawn), None)
    assert (training.samples.tolist(), ids(training.annotations)) == ([1, 1], [10, 11])
    held_out = task.examples(urls(samples[:2], withdrawn), "val")
    assert (held_out.samples.tolist(), ids(held_out.annotations)) == ([0, 0], [0, 1])
    assert [line.split()[1] for line in training.skipped + held_out.skipped] == ["30", "31", "20", "21"]
    assert all(line.endswith("its image was withdrawn") for line in training.skipped + held_out.skipped)
    with pytest.raises(ValueError, match="none of the 4 examples of train .* its image was withdrawn"):
        task.examples(urls(samples[:1], tuple(sample.url for sample in samples)), None)


INVALID = [  # sentence, box, reason
    (" ", None, "it has no words"),
    ("one " * 600, None, "it has 600 tokens, more than task.expression_length = 60"),
    ("one", [5, 5, 0, 9], r"its box \[5, 5, 5, 14\] has no area"),
    ("one", [500, 5, 9, 9], r"its box \[500, 5, 509, 14\] is outside its image of 96 x 64 pixels"),
]


@pytest.mark.parametrize(("sentence", "box", "reason"), INVALID)
def test_training_skips_invalid_expressions_and_evaluation_scores_them_0(tmp_path, samples, sentence, box, reason):
    write_refcoco(tmp_path, samples)
    if box:
        change(tmp_path, "annotations", 4, bbox=box)  # the object of ref 1, of train
        change(tmp_path, "annotations", 6, bbox=box)  # the object of ref 2, of val
    change_refs(tmp_path, lambda refs: [refs[i]["sentences"][0].update(sent=sentence) for i in (1, 2)])
    task = RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8)
    training, held_out = task.examples(urls(samples), None), task.examples(urls(samples), "val")
    assert ids(training.annotations) == ([30, 31] if box else [11, 30, 31])
    assert ids(held_out.annotations) == [0, 1, 20, 21], "all keep their place"
    assert (training.invalid, held_out.skipped) == ((), ())
    for lines, named in ((training.skipped, "sentence 10 of train: "), (held_out.invalid, "sentence 20 of val: ")):
        assert re.search(named + reason, lines[0])
    count = len(held_out.annotations[2].regions)
    (row,) = predict(task, [example(task, samples[2], held_out.annotations[2])], [[3.0] * (1 + count)])
    wrong = {"answer": "no region", "hit": False, "score": 0, "exact": False, "candidates": 0, "region": -1}
    wrong |= {"box_xywh": [0, 0, 0, 0], "ranking": [], "probability": 0}
    assert {name: row[name] for name in wrong} == wrong
    assert row["ground_truth"].startswith("the box" if box else "region")


def right(image: ImageInput) -> list[bool]:
    """Of each region whether it is a right one."""
    found = np.zeros(len(image.boxes), bool)
    found[image.label_masks["candidate"]] = image.labels["target"] > 0
    return found.tolist()


def test_detected_regions_are_those_of_the_shards_or_of_mattnets_file(tmp_path, task, samples):
    (tmp_path / "refcoco+" / "detections").mkdir()
    write_detections(tmp_path / "refcoco+", {1: [[10, 20, 30, 40]], 3: [[0, 0, 9, 9]]}, "detections/mattnet.json")
    for settings, boxes in (
        ({}, samples[1].regions.boxes),
        ({"detections": "detections/mattnet.json"}, np.array([[10, 20, 40, 60]])),
    ):
        detected = changed(task, regions="detected", **settings)
        found = example(detected, samples[1], queries(detected, samples, None)[0])
        np.testing.assert_array_equal(found.metadata["boxes"][1:], boxes)
        np.testing.assert_allclose(found.image.boxes[1:], np.minimum(boxes, [95, 63, 95, 63]), atol=1e-5)
    # Those of other images and without area are dropped, the others clipped.
    folder = tmp_path / "refcoco+"
    write_detections(folder, {0: [[-5, 10, 20, 80], [3, 3, 0, 4], [200, 3, 5, 5]], 77: [[1, 1, 1, 1]]})
    found = read_detections(folder / "dets.json", folder / "instances.json")
    assert {name: boxes.tolist() for name, boxes in found.items()} == {"000000.jpg": [[0, 10, 15, 64]]}


def test_the_ground_truth_joins_detected_regions_in_training_alone(tmp_path, task, samples):
    write_detections(tmp_path / "refcoco+", {i: [[0, 0, 9, 9]] for i in range(4)})
    detected = changed(task, regions="detected", detections="dets.json", adds_ground_truth=True)
    training, held_out, same = (queries(detected, samples, split)[0] for split in (None, "val", "train"))
    found = example(detected, samples[1], training).image
    assert len(found.boxes) == 1 + 1 + 3
    assert right(found) == [False, False, False, False, True]
    assert len(example(detected, samples[0], held_out).image.boxes) == 1 + 1
    assert len(example(detected, samples[1], same).image.boxes) == 1 + 1, "an evaluation of train"


def test_settings_that_contradict_each_other_and_users_expressions_that_do_not_fit_are_refused(task):
    for settings, named in (
        ({"detections": "dets.json"}, "detections and adds_ground_truth need regions=detected"),
        ({"expression_length": 0}, "expression_length is 0"),
    ):
        with pytest.raises(ValueError, match=named):
            RefCOCOSettings(**settings)
    assert RefCOCOSettings(regions="detected", detections="d.json").files == ("refs(unc).p", "instances.json", "d.json")
    for call, named in (
        (lambda: task.annotation_for(" "), "the expression ' ' is invalid: it has no words"),
        (lambda: user_annotation(task, "a", choices=("a", "b"), answer=""), "RefCOCO takes no choices; leave it out"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    detected = changed(task, regions="detected")
    for other in (task, changed(detected, adds_ground_truth=True), changed(detected, detections="d")):
        with pytest.raises(ValueError, match="set --model.regions.features=end_to_end, or --task.regions=detected"):
            other.head(SEPARATE)
    detected.head(SEPARATE)


def test_mirroring_swaps_left_and_right_in_words_and_boxes(task, samples):
    query = queries(task, samples, None)[0]
    straight, mirrored = (example(task, samples[1], query, flip=flip) for flip in (False, True))
    assert WORDS.decode(straight.text.tokens) == "[CLS] the left one [SEP]"
    assert WORDS.decode(mirrored.text.tokens) == "[CLS] the right one [SEP]"
    assert right(mirrored.image) == right(straight.image) == [False, False, False, True], "the last box of sample 1"
    assert not straight.image.masked.any()
    x1, x2 = straight.image.boxes[3, [0, 2]].tolist()
    assert mirrored.image.boxes[3, [0, 2]].tolist() == pytest.approx([95 - x2, 95 - x1])
    for text, swapped in (
        ("left of the leftmost right", "right of the leftmost left"),
        ("Left, LEFT-most; the right's", "right, right-most; the left's"),
        ("bright copyright", "bright copyright"),
    ):
        assert swap_sides(text) == swapped


def test_padding_never_wins_and_the_whole_image_only_where_it_competes(task, samples):
    own = dataclasses.replace(queries(task, samples, "val")[0], regions=None)
    detected = changed(task, regions="detected")
    batch = [example(detected, sample, own) for sample in samples[:2]]
    rows = predict(detected, batch, [[9.0, -5, -6, 9], [9, -7, -5, -6]])
    assert [(row["region"], row["candidates"]) for row in rows] == [(0, 2), (1, 3)]
    rankings = [[one["answer"] for one in row["ranking"]] for row in rows]
    assert rankings == [["region 1", "region 2"], ["region 2", "region 3", "region 1"]]
    assert rows[0]["probability"] == pytest.approx(1 / (1 + np.exp(5)))
    competing = changed(detected, whole_image_competes=True)
    batch = [example(competing, sample, own) for sample in samples[:2]]
    rows = predict(competing, batch, [[9.0, -5, -6, 99], [-8, -7, -5, -6]])
    assert [(row["region"], row["candidates"]) for row in rows] == [(-1, 3), (1, 4)]
    assert (rows[0]["answer"], rows[0]["box_xywh"]) == ("the whole image", [0, 0, 95, 63])
    competing = changed(competing, iou="vilbert")
    rows = predict(competing, [example(competing, samples[0], own)], [[0.0, -5, -6, 99]])
    assert (rows[0]["answer"], rows[0]["box_xywh"]) == ("the whole image", [0, 0, 96, 64])


def test_the_loss_is_over_candidates_alone(task, samples):
    both = queries(task, samples, "val")[0], queries(task, samples, None)[0]
    batch = collate([example(task, sample, query) for sample, query in zip(samples[:2], both, strict=True)])

    def losses(scores: list[list[float]]) -> dict:
        encoded = Encoded(torch.zeros(1), torch.tensor(scores)[..., None], appearance=torch.zeros(0))
        return task.losses(None, torch.nn.Identity(), encoded, batch)

    found = losses([[9.0, -5, -6, 9], [9, -7, -5, -6]])
    right = torch.tensor([0.0, 1, 0, 0, 1])
    candidates = torch.tensor([-5.0, -6, -7, -5, -6])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(candidates, right, reduction="sum")
    loss, count = found["regions"]
    assert (float(loss), count) == (pytest.approx(float(expected)), 5), "neither padding nor the whole image"
    assert tuple(map(int, found["accuracy"])) == (0, 2)
    assert tuple(map(int, losses([[9.0, -6, -5, 9], [9, -7, -6, -5]])["accuracy"])) == (2, 2)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("scale", [1, 3])
def test_a_prediction_is_scored_in_pixels_of_the_shipped_image(tmp_path, samples, scale, flip):
    write_refcoco(tmp_path, samples, scale=scale)
    task = RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8)
    query = queries(task, samples, "val")[2]
    box = samples[2].regions.boxes[1].astype(float) * scale
    found = example(task, samples[2], query, flip)
    assert right(found.image) == [False, False, True]
    own = dataclasses.replace(query, regions=None)  # the sample's, in pixels of the stored image
    (row,) = predict(changed(task, regions="detected"), [example(task, samples[2], own, flip)], [[0.0, -1, 2]])
    assert (row["iou"], row["hit"], row["exact"]) == (1, True, None)
    (row,) = predict(task, [example(task, samples[2], query, flip)], [[0.0, -1, 2]])
    assert (row["iou"], row["hit"], row["exact"], row["score"]) == (1, True, True, 1)
    assert row["box_xywh"] == [*box[:2], *(box[2:] - box[:2])]
    stored = pytest.approx((box / scale).tolist())
    assert row["boxes"] == [{"name": "region 2", "box": stored}, {"name": "ground truth", "box": stored}]
    assert (row["answer"], row["ground_truth"], row["question"]) == ("region 2", "region 2", "the left one")
    assert (row["sentence_id"], row["ref_id"], row["key"]) == (20, 2, samples[2].key)


def test_an_overlap_a_billionth_above_one_half_is_a_hit(tmp_path, task, samples):
    """float32, and boxes of the resized image, would give one half."""
    width = 16.0
    for tiny, hit in ((1e-7, True), (-1e-7, False)):
        write_detections(tmp_path / "refcoco+", {0: [[10, 10, width / 2 + tiny, 20]], 2: [[0, 0, 1, 1]]})
        change(tmp_path / "refcoco+", "annotations", 1, bbox=[10, 10, width, 20])
        detected = changed(task, regions="detected", detections="dets.json", iou="plain")
        (row,) = predict(detected, [example(detected, samples[0], queries(detected, samples, "val")[0])], [[0.0, 1]])
        assert row["iou"] == pytest.approx(0.5 + tiny / width, abs=1e-12)
        assert (row["hit"], row["exact"], row["iou_convention"]) == (hit, None, "plain")


def test_exact_is_the_annotation_and_not_the_best_overlap(tmp_path, samples):
    write_refcoco(tmp_path, samples)
    for number in (0, 1):  # the second is meant
        change(tmp_path, "annotations", number, bbox=[10, 10, 20, 20])
    task = RefCOCO(RefCOCOSettings(str(tmp_path)), WORDS, 8)
    query = queries(task, samples, "val")[0]
    for scores, exact in (([0.0, 5, 1], False), ([0.0, 1, 5], True)):
        (row,) = predict(task, [example(task, samples[0], query)], [scores])
        assert (row["iou"], row["hit"], row["exact"], row["ground_truth"]) == (1, True, exact, "region 2")


def test_metrics_are_named_after_the_convention(task):
    found = [(True, True, 2), (True, False, 4), (False, False, 4), (False, False, 0)]
    rows = [{"hit": hit, "exact": exact, "candidates": candidates} for hit, exact, candidates in found]
    for convention in CONVENTIONS:
        named = [row | {"iou_convention": convention} for row in rows]
        chance = pytest.approx((1 / 2 + 1 / 4 + 1 / 4 + 0) / 4)
        assert task.metrics(named) == {f"accuracy_{convention}": 0.5, "exact": 0.25, "chance": chance}
    unknown = {"hit": None, "exact": None, "candidates": 4, "iou_convention": "plain"}
    assert metrics([*named, unknown]) == metrics(named)
    assert metrics([unknown]) == {}
    assert set(metrics([row | {"exact": None} for row in named])) == {"accuracy_plain", "chance"}, "on detected regions"
