"""VCR's own files: read line by line, scored and written as the leaderboard has it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from places import PROJECT, SHARED
from tiny import SIZE, tiny_sample
from vcr_files import BOXES, ITEM, write_vcr

from detectors.annotated import AnnotatedDetector
from vlbert.datasets.vcr import (
    COLUMNS,
    OBJECTS,
    hits,
    instance_mask,
    read_items,
    read_scene,
    read_submission,
    submission,
)

CONFORMANCE = SHARED / "conformance" / "vcr"
TASKS_PAGE = PROJECT / "docs" / "tasks.md"
official = pytest.mark.skipif(
    not CONFORMANCE.is_dir(), reason="the official formats' samples lie in ../shared, which is not here"
)
IDS = ["b", "a", "c"]  # in no order
LABELS = [(0, 3), (2, 2), (1, 0)]  # answer, rationale
EVEN = [0.25] * 4


def sure(choice: int) -> list[float]:
    return [0.7 if i == choice else 0.1 for i in range(4)]


def lines_of(*changes: dict) -> str:
    items = [
        ITEM | {"annot_id": one, "answer_label": answer, "rationale_label": rationale}
        for one, (answer, rationale) in zip(IDS, LABELS, strict=True)
    ]
    picture = {"img_fn": "movie/x.jpg", "metadata_fn": "movie/x.json"}
    more = [*changes, *[{}] * (3 - len(changes))]
    return "".join(json.dumps(item | picture | change) + "\n" for item, change in zip(items, more, strict=True))


def rows_of(table: dict[str, list[list[float]]]) -> list[dict]:
    """Predictions, the last item first."""
    return [
        {"annot_id": one, "split": "val", "conditioned_on": i - 1, "probabilities": numbers}
        for one, rows in reversed(table.items())
        for i, numbers in enumerate(rows)
    ]


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    """A jsonl file with labels, and predictions of which the answers to b and a are right."""
    items, given = tmp_path / "val.jsonl", tmp_path / "given.csv"
    items.write_text(lines_of())
    behind = [sure(0), sure(1), sure(2), sure(3)]
    given.write_bytes(
        submission(
            tmp_path,
            rows_of({"b": [sure(0), *behind], "a": [sure(2), *behind], "c": [sure(3), EVEN, EVEN, EVEN, sure(0)]}),
        )
    )
    return items, given


@official
def test_every_item_of_the_official_scorer_is_hit_or_missed_as_it_says():
    expected = json.loads((CONFORMANCE / "expected.json").read_text())
    found = hits(CONFORMANCE / "val.jsonl", CONFORMANCE / "leaderboard_submission.csv")
    assert found == expected["per_example"]
    for name, mean in (("answer_hit", "Q_A"), ("rationale_hit", "QA_R"), ("joint_hit", "Q_AR")):
        assert np.mean([row[name] for row in found]) == expected[mean]


@official
def test_the_official_files_are_read_whole():
    ontology = json.loads((CONFORMANCE / "cocoontology.json").read_text())
    assert [row["name"] for _, row in sorted(ontology.items(), key=lambda pair: int(pair[0]))] == OBJECTS
    items = read_items(CONFORMANCE / "val.jsonl")
    assert len(items) == 30
    assert all(item.labels for item in items)
    assert not any(item.labels for item in read_items(CONFORMANCE / "test_like.jsonl"))
    for item in items:
        scene = read_scene(item.metadata)
        assert json.loads(item.line)["objects"] == scene.names
        assert not scene.without_area
        for polygons, box in zip(scene.polygons, scene.boxes, strict=True):
            assert instance_mask(polygons, box, 14).any()


@official
def test_the_leaderboards_csv_is_read_and_written_byte_for_byte():
    file = CONFORMANCE / "leaderboard_submission.csv"
    table = read_submission(file)
    rows = [
        {"annot_id": one, "split": "val", "conditioned_on": i - 1, "probabilities": numbers}
        for one, probabilities in table.items()
        for i, numbers in enumerate(probabilities.tolist())
    ]
    assert submission(CONFORMANCE, rows[::-1]) == file.read_bytes()


def test_the_rationale_behind_the_right_answer_counts_and_of_equals_the_first_wins(files):
    found = [tuple(row.values()) for row in hits(*files)]
    # b: its rationale 3 is given behind answer 3, and answer 0 is right. a: behind answer 2 stands 2. c: behind the
    # right answer 1 all are equal, the first wins and is right; its answer is not.
    assert found == [("b", True, False, False), ("a", True, True, True), ("c", False, True, False)]


def test_the_csv_is_in_the_order_of_the_items_whatever_that_of_the_rows_and_numbers_come_back(files, tmp_path):
    third = [1 / 3, 1 / 3, 1 / 3 - 1e-17, 1e-17]
    table = {"b": [third, EVEN, sure(0), EVEN, EVEN], "a": [EVEN] * 5, "c": [[1.0, 0, 0, 0]] * 5}
    text = submission(tmp_path, rows_of(table))
    header, *lines = text.decode().split("\n")
    assert header.split(",") == COLUMNS
    assert header.startswith("annot_id,answer_0,answer_1,answer_2,answer_3,rationale_conditioned_on_a0_0,")
    assert header.endswith(",rationale_conditioned_on_a3_3")
    assert len(COLUMNS) == 21
    assert [line.split(",")[0] for line in lines] == [*IDS, ""]
    (tmp_path / "again.csv").write_bytes(text)
    again = read_submission(tmp_path / "again.csv")
    assert {one: numbers.tolist() for one, numbers in again.items()} == table
    assert list(again["b"][2]) == sure(0), "behind answer 1"


def test_columns_are_found_by_their_names(files, tmp_path):
    lines = [line.split(",") for line in files[1].read_text().splitlines()]
    turned = tmp_path / "turned.csv"
    turned.write_text("\n".join(",".join(line[::-1]) for line in lines))
    assert hits(files[0], turned) == hits(*files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("answer_3", "answer_4", 1), "does not have the 21 columns of the leaderboard: ans"),
        (lambda text: text[:-30], "line 4 is cut off, or holds what is no number"),
        (lambda text: text.replace("0.7", "much", 1), "line 2 is cut off, or holds what is no number.*much"),
        (lambda text: text.replace("0.7", "nan", 1), "line 2, b: answer_0 to answer_3 are not finite"),
        (lambda text: text + text.splitlines()[1] + "\n", "line 5 has b a second time"),
        (lambda text: text.replace("\na,", "\nd,"), "1 ids of .*val.jsonl miss in .*csv, such as a;"),
        (lambda text: "".join(text.splitlines(True)[:3]), "1 ids of .*val.jsonl miss in .*csv, such as c;"),
        (lambda text: text + "d" + text.splitlines()[1][1:], "1 ids of .*csv are not in .*val.jsonl, such as d;"),
        (lambda text: text.replace("\na,", "\n\xe9,").encode("latin1"), "given.csv is no text in UTF-8"),
        (lambda text: text.rstrip() + ",0.5\n", "line 4 has more than 21 values"),
        (lambda text: "", "does not have the 21 columns"),
    ],
)
def test_a_bad_csv_is_named(files, change, message):
    changed = change(files[1].read_text())
    files[1].write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises(ValueError, match=message):
        hits(*files)


def test_a_csv_may_begin_with_the_mark_of_its_encoding_and_ids_may_be_numbers(files):
    expected = hits(*files)
    files[1].write_bytes(b"\xef\xbb\xbf" + files[1].read_bytes().replace(b"\na,", b"\n7,"))
    files[0].write_text(files[0].read_text().replace('"annot_id": "a"', '"annot_id": 7'))
    assert hits(*files) == [row | {"annot_id": row["annot_id"].replace("a", "7")} for row in expected]


def test_what_is_no_distribution_is_warned_of_and_its_largest_number_counts(files):
    expected = hits(*files)
    files[1].write_text(files[1].read_text().replace("0.7", "1.7"))
    with pytest.warns(
        UserWarning, match="3 lines, the first: .* line 2, b: answer_0 to answer_3 are no probabilities: their sum is 2"
    ):
        assert hits(*files) == expected


def test_what_the_leaderboard_would_not_take_is_not_written(tmp_path):
    (tmp_path / "val.jsonl").write_text("".join(lines_of().splitlines(keepends=True)[:2]))
    whole = rows_of({"b": [EVEN] * 5, "a": [EVEN] * 5})
    with pytest.raises(ValueError, match="1 ids of val miss in the predictions, such as b;"):
        submission(tmp_path, [row for row in whole if row["annot_id"] == "a"])
    with pytest.raises(ValueError, match="1 ids of the predictions are not in val, such as c;"):
        submission(tmp_path, whole + rows_of({"c": [EVEN] * 5}))
    with pytest.raises(ValueError, match="1 of 2 items, such as b, lack probabilities of answers; .*every_answer=true"):
        submission(tmp_path, [row for row in whole if (row["annot_id"], row["conditioned_on"]) != ("b", -1)])
    with pytest.raises(ValueError, match="2 of 2 items, such as b, lack probabilities of rationales; "):
        submission(tmp_path, [row for row in whole if row["conditioned_on"] < 0])
    with pytest.raises(ValueError, match="10 predictions stand there twice, such as of a; name each run once"):
        submission(tmp_path, whole + whole)
    with pytest.raises(ValueError, match="b: rationale_conditioned_on_a1_0 to .* their sum is 2, the least 0.5"):
        submission(
            tmp_path, [row | {"probabilities": [0.5] * 4} if row["conditioned_on"] == 1 else row for row in whole]
        )
    with pytest.raises(ValueError, match="b: answer_0 to answer_3 are not finite"):
        submission(tmp_path, [row | {"probabilities": [np.nan] * 4} for row in whole])


def test_a_file_without_labels_is_read_and_cannot_be_scored(files):
    bare = [{k: v for k, v in json.loads(line).items() if "label" not in k} for line in lines_of().splitlines()]
    files[0].write_text("".join(json.dumps(item) + "\n" for item in bare))
    assert [(item.annot_id, item.labels) for item in read_items(files[0])] == [(one, None) for one in IDS]
    with pytest.raises(ValueError, match="val.jsonl line 1 has no labels: only the leaderboard can score it"):
        hits(*files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annot_id": "b"}, "line 2 has the annot_id of line 1, b"),
        ({"question": "Why is this?"}, "line 2 is no item of VCR: .*question is no list of words and objects"),
        ({"rationale_label": None}, "answer_label is 2 and rationale_label None"),
        ({"answer_label": 1.0}, "answer_label is 1.0 and"),
        ({"answer_label": -1}, "answer_label is -1 and"),
        ({"annot_id": None}, "its annot_id is None"),
        ({"metadata_fn": "../other/x.json"}, "its metadata_fn, ../other/x.json, is not below vcr1images"),
        ({"metadata_fn": "/x.json"}, "its metadata_fn, /x.json, is not below vcr1images"),
        ({"answer_choices": [["no"], [[0.5]], ["the"], ["no"]]}, r"its answer_choices\[1\] mentions object 0.5 of 4"),
    ],
)
def test_an_item_that_cannot_be_is_named(files, change, message):
    files[0].write_text(lines_of({}, change))
    with pytest.raises(ValueError, match=message):
        read_items(files[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines_of()[:-40].encode(), "line 3 is no item of VCR: .*; fetch the file again"),
        (lines_of().encode() + b"\n", "line 4 is no item of VCR"),
        (
            lines_of().replace("Why", "\u00e9").encode("latin-1"),
            "line 1 is no item of VCR: UnicodeDecodeError: .utf-8. codec can",
        ),
        (b"", "val.jsonl is empty; fetch it again"),
    ],
)
def test_a_torn_file_is_named(files, text, message):
    files[0].write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_items(files[0])


def test_boxes_end_with_the_picture_and_one_without_area_is_a_pixel_and_named(tmp_path):
    samples = [tiny_sample(i) for i in range(2)]
    write_vcr(tmp_path, samples)
    file = tmp_path / "vcr1images" / "movie" / "000000.json"
    good = json.loads(file.read_text())
    width, height = SIZE

    def boxes_of(*boxes: list) -> tuple[list, tuple]:
        file.write_text(json.dumps(good | {"boxes": [*boxes, *good["boxes"][len(boxes) :]]}))
        scene = read_scene(file)
        assert scene.boxes[len(boxes) :].tolist() == BOXES[len(boxes) :]
        return scene.boxes[: len(boxes)].tolist(), scene.without_area

    assert boxes_of([-5, -5, 300, 300, 0.9]) == ([[0, 0, width, height]], ())
    assert boxes_of([3, 4, 3, 9, 0.9]) == ([[3, 4, 4, 5]], (0,))
    assert boxes_of([1, 2, 3, 4], [9, 9, 2, 12]) == ([[1, 2, 3, 4], [9, 9, 10, 10]], (1,))
    outside = [[width - 1, 5, width, 6], [0, 0, 1, 1]]
    assert boxes_of([width + 8, 5, width + 20, 6], [-9, -9, -3, -3]) == (outside, (0, 1))
    for change, message in (
        ({"boxes": [[0, 0, float("nan"), 9], *good["boxes"][1:]]}, "a box is not of finite numbers"),
        ({"boxes": good["boxes"][1:]}, "4 names, 3 boxes and 4 segms"),
        ({"segms": [[[[1, 2], [3]]], *good["segms"][1:]]}, "000000.json is not in the format of VCR's metadata"),
        ({"segms": [[[1, 2, 3, 4]], *good["segms"][1:]]}, "a polygon is no list of finite x, y: .1, 2, 3, 4"),
        ({"segms": [[[[1, 2], [None, 3]]], *good["segms"][1:]]}, "a polygon is no list of finite x, y"),
        ({"width": 0}, "its image is 0 x 64 pixels"),
        ({"width": float("nan")}, "its image is nan x 64 pixels"),
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=message):
            read_scene(file)
    file.write_text(json.dumps(good | {"segms": [[[]], [], *good["segms"][2:]]}))
    assert [len(of) for of in read_scene(file).polygons] == [0, 0, 1, 1], "an empty polygon is none"


def test_the_program_of_the_manual_writes_a_file_for_the_annotated_detector(tmp_path, monkeypatch):
    write_vcr(tmp_path / "vcr", samples := [tiny_sample(i) for i in range(3)])
    (program,) = [block for block in re.findall(r"```python\n(.*?)```", TASKS_PAGE.read_text(), re.S) if "vcr" in block]
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    for sample, regions in zip(samples, AnnotatedDetector(tmp_path / "vcr-whole.json").detect(samples), strict=True):
        assert regions.boxes.tolist() == [[0, 0, sample.width, sample.height]]


def test_a_file_whose_bytes_nobody_may_read_is_named(tmp_path):
    (tmp_path / "val.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=r"^cannot read .*val\.jsonl: Input/output error"):
        read_items(tmp_path / "val.jsonl")
