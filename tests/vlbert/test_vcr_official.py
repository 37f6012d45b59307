"""VCR's official files: items, metadata, and the leaderboard's csv and score."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from guides import blocks
from tiny import SIZE, tiny_sample
from vcr_files import BOXES, ITEM, write_vcr

from detectors.annotated import AnnotatedDetector
from vlbert.datasets.vcr import instance_mask, read_items, read_scene, submission
from vlbert.tasks.vcr_text import read_questions

IDS = ["b", "a", "c"]  # in no order
EVEN = [0.25] * 4


def lines_of(**of_the_second: object) -> str:
    """The items of a file, some of whose fields are changed in the second."""
    image, changes = {"img_fn": "movie/x.jpg", "metadata_fn": "movie/x.json"}, [{}, of_the_second, {}]
    items = [ITEM | image | {"annot_id": one} | change for one, change in zip(IDS, changes, strict=True)]
    return "".join(json.dumps(item) + "\n" for item in items)


def rows_of(table: dict[str, list[list[float]]]) -> list[dict]:
    """Predictions, the last item first."""
    return [
        {"annot_id": one, "split": "val", "conditioned_on": i - 1, "probabilities": numbers}
        for one, rows in reversed(table.items())
        for i, numbers in enumerate(rows)
    ]


def test_the_csv_has_the_order_of_the_items_and_exact_numbers(tmp_path):
    (tmp_path / "val.jsonl").write_text(lines_of())
    third = [1 / 3, 1 / 3, 1 / 3 - 1e-17, 1e-17]
    table = {"b": [third, EVEN, [0.7, 0.1, 0.1, 0.1], EVEN, EVEN], "a": [EVEN] * 5, "c": [[1.0, 0, 0, 0]] * 5}
    text = submission(tmp_path, rows_of(table))
    header, *lines = text.decode().split("\n")
    assert header.startswith("annot_id,answer_0,answer_1,answer_2,answer_3,rationale_conditioned_on_a0_0,")
    assert (header.count(","), header.endswith(",rationale_conditioned_on_a3_3")) == (20, True)
    assert [line.split(",")[0] for line in lines] == [*IDS, ""]
    again = {one: [float(number) for number in numbers] for one, *numbers in csv.reader(lines[:-1])}
    assert again == {one: sum(rows, []) for one, rows in table.items()}


WHOLE = rows_of({"b": [EVEN] * 5, "a": [EVEN] * 5, "c": [EVEN] * 5})
INCOMPLETE = [
    ([row for row in WHOLE if row["annot_id"] != "b"], "1 ids of val are missing in the predictions, such as b;"),
    (WHOLE + rows_of({"d": [EVEN] * 5}), "1 ids of the predictions are not in val, such as d;"),
    (WHOLE[:-5] + WHOLE[-4:], "1 of 3 items, such as b, lack probabilities of answers; .*CHECKPOINT,CHECKPOINT"),
    ([row for row in WHOLE if row["conditioned_on"] < 0], "3 of 3 items, such as b, lack probabilities of rationales;"),
    (WHOLE + WHOLE, "15 ids of the predictions are repeated, such as .*'c'"),
    (
        [row | {"probabilities": [0.5] * 4} if row["conditioned_on"] == 1 else row for row in WHOLE],
        "b: its numbers are not probabilities",
    ),
    ([row | {"probabilities": [np.nan] * 4} for row in WHOLE], "b: its numbers are not probabilities"),
]


@pytest.mark.parametrize(("rows", "named"), INCOMPLETE, ids=[named for _, named in INCOMPLETE])
def test_predictions_that_the_leaderboard_refuses_are_named(tmp_path, rows, named):
    (tmp_path / "val.jsonl").write_text(lines_of())
    with pytest.raises(ValueError, match=named):
        submission(tmp_path, rows)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (lines_of(annot_id="b"), "1 ids of .*val.jsonl are repeated, such as b"),
        (lines_of(question="Why is this?"), "line 2: .*question is not a list of words and objects"),
        (lines_of(question=["Why", [4]]), "question mentions object 4 of 4"),
        (lines_of(answer_choices=[["no"], [[0.5]], ["the"], ["no"]]), r"answer_choices\[1\] mentions object 0.5 of 4"),
        (lines_of(rationale_label=None), "answer_label is 2, rationale_label None"),
        (lines_of(answer_label=1.0), "answer_label is 1.0,"),
        (lines_of(answer_label=4), "answer_label is 4,"),
        (lines_of().replace('"answer_label"', '"label"', 1), "line 1: .*answer_label is None, rationale"),
        (lines_of(metadata_fn="../other/x.json"), "its metadata_fn, ../other/x.json, is not inside vcr1images"),
        (lines_of()[:-40], "line 3: .*; fetch it again"),
        (lines_of().replace("Why", "\u00e9"), "line 1: UnicodeDecodeError"),
        (None, r"there is no .*val.jsonl; .*set task.folder"),
        (Path("/proc/self/mem"), r"^cannot read .*val\.jsonl: Input/output error"),
    ],
)
def test_a_wrong_item_is_named_by_its_line(tmp_path, content, named):
    items = tmp_path / "val.jsonl"
    if isinstance(content, Path):
        items.symlink_to(content)
    elif content:
        items.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=named):
        read_items(items)


@pytest.fixture
def metadata(tmp_path) -> Path:
    """The metadata of one image."""
    write_vcr(tmp_path, [tiny_sample(i) for i in range(2)])
    return tmp_path / "vcr1images" / "movie" / "000000.json"


def test_boxes_are_clipped_to_the_image_and_one_without_area_becomes_a_pixel(metadata):
    good, (width, height) = json.loads(metadata.read_text()), SIZE
    for given, found in (
        ([[-5, -5, 300, 300, 0.9], [3, 4, 3, 9, 0.9]], [[0, 0, width, height], [3, 4, 4, 5]]),
        ([[1, 2, 3, 4], [9, 9, 2, 12]], [[1, 2, 3, 4], [9, 9, 10, 10]]),
        ([[width + 8, 5, width + 20, 6], [-9, -9, -3, -3]], [[width - 1, 5, width, 6], [0, 0, 1, 1]]),
    ):
        metadata.write_text(json.dumps(good | {"boxes": [*given, *good["boxes"][2:]]}))
        assert read_scene(metadata).boxes.tolist() == [*found, *BOXES[2:]]


def test_an_object_in_two_parts_covers_both_and_one_without_polygons_no_cell(metadata):
    box = np.array([0.0, 0, 13, 13])  # inclusive: 14 x 14 pixels, a cell each
    left, right = (np.array([[x, 0], [x + 3, 0], [x + 3, 13], [x, 13]], float) for x in (0, 7))
    mask = instance_mask([left, right], box, 14)
    assert mask[0].tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    whole = np.array([[0, 0], [14, 0], [14, 14], [0, 14]], float)
    assert instance_mask([whole], box, 14).sum() == 13 * 13, "as scikit-image 0.16; 0.26 has 14 * 14"
    good = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(good | {"segms": [[[]], [], *good["segms"][2:]]}))
    scene = read_scene(metadata)
    assert [len(of) for of in scene.polygons] == [0, 0, 1, 1], "an empty polygon is none"
    assert scene.masks(14).any(axis=(1, 2)).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("field", "change", "named"),
    [
        ("names", lambda names: [*names[:3], "unicorn"], "an object of the unknown class unicorn"),
        ("names", lambda names: [*names[:3], "dog"], "line 1 and .*000000.json list different objects"),
        ("segms", lambda segms: segms[:3], "4 names, 4 boxes and 3 segms"),
        ("segms", lambda segms: [[[[1, 2], [None, 3]]], *segms[1:]], "a polygon is not a list of finite x, y"),
        ("boxes", lambda boxes: [*boxes[:3], [1, 2]], "is not in VCR's format, its objects"),
        ("boxes", lambda boxes: [[0, 0, float("nan"), 9], *boxes[1:]], "a box has numbers that are not finite"),
        ("width", lambda width: 0, "its image is 0 x 64 pixels"),
        (None, None, "is truncated or not JSON"),
    ],
)
def test_wrong_metadata_are_named(metadata, field, change, named):
    (question,) = read_questions(metadata.parents[2], ["train"], True, "answer")
    good = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(good | {field: change(good[field])} if field else good)[: None if field else 50])
    with pytest.raises(ValueError, match=named) as error:
        question.read(None)
    assert "000000.json" in str(error.value)
    metadata.unlink()
    with pytest.raises(ValueError, match=r"1 metadata files are missing, such as .*000000.json; fetch vcr1images"):
        read_questions(metadata.parents[2], ["train"], True, "answer")


def test_the_program_of_the_manual_writes_a_file_for_the_annotated_detector(tmp_path, monkeypatch):
    write_vcr(tmp_path / "vcr", samples := [tiny_sample(i) for i in range(3)])
    (program,) = [block for block in blocks("tasks.md", "python") if "vcr" in block]
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    for sample, regions in zip(samples, AnnotatedDetector(tmp_path / "vcr-whole.json").detect(samples), strict=True):
        assert regions.boxes.tolist() == [[0, 0, sample.width, sample.height]]
