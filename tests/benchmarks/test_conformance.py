"""`python -m benchmarks.conformance` against inputs whose official figures are known, made cases of other names and
counts, and every kind of fault.

tests/data/conformance holds the smaller part of ../shared/conformance: synthetic inputs, and what official code said.
"""

import csv
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import DATA, SHARED

from benchmarks.conformance import check_folder, main

OWN = DATA
SHARED = SHARED / "conformance"


def edit_json(file: Path, change: Callable[[Any], Any]) -> None:
    """Write back what `change` made of it, in place or by returning another."""
    value = json.loads(file.read_bytes())
    changed = change(value)
    file.write_text(json.dumps(value if changed is None else changed))


def edit_array(file: Path, place: tuple[int, ...], by: float) -> None:
    array = np.load(file)
    array[place] += by
    np.save(file, array)


def made_vcr(folder: Path) -> None:
    """Three items of other names than VCR's; the hits follow from where the largest number stands."""
    folder.mkdir(parents=True)
    labels, largest = [(0, 3), (2, 1), (3, 0)], [(0, 3), (2, 0), (1, 0)]  # answer, rationale: right, and chosen
    items, table = [], []
    for number, (right, chosen) in enumerate(zip(labels, largest, strict=True)):
        items.append(
            {
                "annot_id": f"made-{number}",
                "img_fn": f"film/{number}.jpg",
                "metadata_fn": f"film/{number}.json",
                "objects": ["person"],
                "question": ["Who", [0], "?"],
                "answer_choices": [["a", str(i)] for i in range(4)],
                "rationale_choices": [["b", str(i)] for i in range(4)],
                "answer_label": right[0],
                "rationale_label": right[1],
            }
        )
        groups = [[0.7 if i == chosen[0] else 0.1 for i in range(4)]]
        groups += [[0.7 if i == chosen[1] else 0.1 for i in range(4)]] * 4
        table.append([f"made-{number}", *(number for group in groups for number in group)])
    (folder / "dev.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    columns = ["annot_id", *(f"answer_{i}" for i in range(4))]
    columns += [f"rationale_conditioned_on_a{a}_{i}" for a in range(4) for i in range(4)]
    with open(folder / "made.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, *table])
    hits = [(True, True, True), (True, False, False), (False, True, False)]
    names = ("answer_hit", "rationale_hit", "joint_hit")
    rows = [{"annot_id": f"made-{i}"} | dict(zip(names, hit, strict=True)) for i, hit in enumerate(hits)]
    said = {"n": 3, "per_example": rows, "Q_A": 2 / 3, "QA_R": 2 / 3, "Q_AR": 1 / 3}
    (folder / "expected_hits.json").write_text(json.dumps(said))


def made_vqa(folder: Path) -> None:
    """240 questions, of one of which one of ten annotators said what was predicted: 30 % of 240 are 0.125 %, a half
    that the official code's Python 2 rounds upwards."""
    folder.mkdir(parents=True)
    annotators = [["x"] * (i == 3) + ["y"] * (10 - (i == 3)) for i in range(240)]
    rows = [
        {
            "question_id": i,
            "image_id": i,
            "question_type": "all",
            "answer_type": "other",
            "multiple_choice_answer": "y",
            "answers": [{"answer": answer, "answer_id": k} for k, answer in enumerate(answers)],
        }
        for i, answers in enumerate(annotators)
    ]
    questions = [{"question_id": i, "image_id": i, "question": "what?"} for i in range(240)]
    for name, value in (
        ("made_annotations", {"annotations": rows}),
        ("made_questions", {"data_subtype": "made", "questions": questions}),
        ("made_results", [{"question_id": i, "answer": "x"} for i in range(240)]),
        (
            "expected",
            {
                "perQuestion": {str(i): 30.0 * (i == 3) for i in range(240)},
                "overall": 0.13,
                "perAnswerType": {"other": 0.13},
                "perQuestionType": {"all": 0.13},
            },
        ),
    ):
        (folder / f"{name}.json").write_text(json.dumps(value))


def made_refcoco(folder: Path) -> None:
    """Two pictures; the second box of a prediction covers half of its object, where the conventions part."""
    data = folder / "here"
    data.mkdir(parents=True)
    images = [{"id": i, "file_name": f"COCO_{i}.jpg", "width": 200, "height": 100} for i in (71, 72)]
    objects = [
        {"id": 5, "image_id": 71, "bbox": [10.0, 10.0, 40.0, 20.0], "category_id": 1},
        {"id": 6, "image_id": 72, "bbox": [0.0, 0.0, 100.0, 50.0], "category_id": 1},
    ]
    categories = [{"id": 1, "name": "thing"}]
    (data / "instances.json").write_text(
        json.dumps({"images": images, "annotations": objects, "categories": categories})
    )
    refs = [
        {
            "ref_id": 900 + i,
            "ann_id": one["id"],
            "image_id": one["image_id"],
            "category_id": 1,
            "split": ("val", "testA")[i],
            "file_name": "",
            "sent_ids": [30 + i],
            "sentences": [{"sent_id": 30 + i, "sent": "that one", "raw": "that one", "tokens": ["that", "one"]}],
        }
        for i, one in enumerate(objects)
    ]
    (data / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=0))
    boxes = [[10.0, 10.0, 40.0, 20.0], [0.0, 0.0, 50.0, 50.0]]
    (folder / "my_predictions.json").write_text(
        json.dumps([{"sent_id": 30 + i, "box_xywh": box} for i, box in enumerate(boxes)])
    )
    half = 51 * 51 / (51 * 101)  # pixels of 0..50 of those of 0..100
    overlaps = [(1.0, 1.0, 1.0), (0.5, half, 0.5)]
    rows = [
        {
            "sent_id": 30 + i,
            "ref_id": 900 + i,
            "split": ref["split"],
            "gt_box_xywh": one["bbox"],
            "mattnet_iou": overlap[0],
            "vlbert_iou": overlap[1],
            "plain_iou": overlap[2],
            "mattnet_hit": True,
            "vlbert_hit": True,
            "plain_hit_strict_gt_0.5": i == 0,
        }
        for i, (ref, one, overlap) in enumerate(zip(refs, objects, overlaps, strict=True))
    ]
    splits = {"val": {"ref_ids": [900]}, "test": {"ref_ids": [901]}}
    (folder / "expected.json").write_text(json.dumps({"per_expression": rows, "splits": splits}))


@pytest.fixture
def cases(tmp_path) -> Path:
    """Our copies, and the made cases beside them."""
    shutil.copytree(OWN / "conformance", tmp_path / "cases")
    for name in ("rois", "conceptual_captions"):
        shutil.copytree(OWN / name, tmp_path / "cases" / name)
    made_vcr(tmp_path / "cases" / "made" / "of vcr")
    made_refcoco(tmp_path / "cases" / "made" / "of refcoco")
    made_vqa(tmp_path / "cases" / "made" / "of vqa")
    return tmp_path / "cases"


def test_what_official_code_said_of_our_copies_and_of_made_cases_agrees(cases, capsys):
    assert check_folder(cases)
    printed = capsys.readouterr().out
    assert printed.endswith("values agree\n")
    totals = {line.split("  ")[0].strip(): line.split()[-2:] for line in printed.splitlines() if "  all  " in line}
    assert totals["vqa"] == ["575", "575"]
    assert totals["made/of vcr"] == ["13", "13"]
    assert totals["made/of refcoco"] == ["20", "20"]
    assert set(totals) == {
        "conceptual_captions",
        "geometry",
        "made/of refcoco",
        "made/of vcr",
        "made/of vqa",
        "retrieval",
        "rois",
        "vqa",
        "",
    }


def test_all_of_the_shared_conformance_data_agrees(capsys):
    if not SHARED.is_dir():
        pytest.skip(f"the conformance data {SHARED} is not here")
    assert check_folder(SHARED), capsys.readouterr().out


def vqa_answer(number: int, answer: str) -> Callable[[list], None]:
    return lambda rows: rows[number].update(answer=answer)


VQA_FILES = "vqa/v2_OpenEnded_mscoco_synthetic"
JSON_FAULTS = {  # file, what is wrong with it, what is printed
    "accuracy": (
        "vqa/expected_official_eval.json",
        lambda e: e["perQuestion"].update({"1004000": 30.01}),
        "ours 30.0, expected 30.01",
    ),
    "no id": ("vqa/expected_official_eval.json", lambda e: e["perQuestion"].update({"77": 30.0}), "77: ours 'missing'"),
    "overall": ("vqa/expected_official_eval.json", lambda e: e.update(overall=50.0), "accuracy overall overall: ours"),
    "types": (
        "vqa/expected_official_eval.json",
        lambda e: e.update(perAnswerType={"other": 1.0}),
        "an answer type other",
    ),
    "answer": (f"{VQA_FILES}_results.json", vqa_answer(0, "no"), "1001000: ours 0.0, expected 100.0"),
    "result lost": (
        f"{VQA_FILES}_results.json",
        lambda rows: rows.pop() and None,
        "NOT COMPARED: ValueError: 1 ids of the annotations miss",
    ),
    "result twice": (
        f"{VQA_FILES}_results.json",
        lambda rows: rows.append(rows[3]),
        "1 ids of the results stand there more than once, such as 1004000",
    ),
    "result of none": (
        f"{VQA_FILES}_results.json",
        lambda rows: rows.append({"question_id": 9, "answer": ""}),
        "1 ids of the results are not in the annotations, such as 9",
    ),
    "no text": (f"{VQA_FILES}_results.json", vqa_answer(0, None), "row 0"),
    "question lost": (f"{VQA_FILES}_questions.json", lambda f: f["questions"].pop() and None, "NOT COMPARED"),
    "annotator": (
        "vqa/v2_mscoco_synthetic_annotations.json",
        lambda f: f["annotations"][3]["answers"].pop() and None,
        "1004000",
    ),
    "punctuation": (
        "vqa/expected_normalise.json",
        lambda rows: rows[50].update(after_punctuation="!"),
        "after punctuation",
    ),
    "articles": (
        "vqa/expected_normalise.json",
        lambda rows: rows[50].update(after_digit_article="the"),
        "after digit article",
    ),
    "string lost": ("vqa/normalise_inputs.json", lambda rows: rows.pop() and None, "string to normalise"),
    "soft target": (
        "vqa/expected_vlbert_soft_targets.json",
        lambda e: e["cases"][2]["target"].update(no=0.7),
        "cases[2]: ours",
    ),
    "rank": ("retrieval/expected.json", lambda e: e["full"]["t2i_rank0"].reverse(), "rank, all images fold 0 t2i 0"),
    "fold": ("retrieval/expected.json", lambda e: e["five_folds"].reverse(), "rank, 5 folds"),
    "mean": (
        "retrieval/expected.json",
        lambda e: e["five_fold_mean"]["i2t"].update(medr=1.5),
        "i2t medr: ours 1.4, expected 1.5",
    ),
    "captions": ("retrieval/expected.json", lambda e: e.update(n_captions=501), "n_captions: ours 500"),
    "region": (
        "rois/expected.json",
        lambda e: e["cases"][0]["expected"]["0.2"]["keep_indices"].reverse(),
        "case_01.npz at 0.2",
    ),
    "case": (
        "rois/expected.json",
        lambda e: e["cases"][0].update(case="case_99.npz"),
        "NOT COMPARED: FileNotFoundError",
    ),
    "caption": ("conceptual_captions/expected_rows.json", lambda e: e["rows"][12].update(caption="quote"), "12: ours"),
    "hit": (
        "made/of vcr/expected_hits.json",
        lambda e: e["per_example"][1].update(rationale_hit=True),
        "rationale hit made-1",
    ),
    "joint": (
        "made/of vcr/expected_hits.json",
        lambda e: e["per_example"][1].update(joint_hit=True),
        "joint hit made-1",
    ),
    "share": ("made/of vcr/expected_hits.json", lambda e: e.update(QA_R=0.6), "QA_R: ours 0.66"),
    "items": ("made/of vcr/expected_hits.json", lambda e: e["per_example"].pop() and None, "made-2"),
    "IoU": (
        "made/of refcoco/expected.json",
        lambda e: e["per_expression"][1].update(vlbert_iou=0.5),
        "published IoU 31",
    ),
    "border": (
        "made/of refcoco/expected.json",
        lambda e: e["per_expression"][1].update({"plain_hit_strict_gt_0.5": True}),
        "plain hit 31",
    ),
    "split": (
        "made/of refcoco/expected.json",
        lambda e: e["splits"]["test"].update(ref_ids=[900, 901]),
        "reference of test 900",
    ),
    "box": (
        "made/of refcoco/my_predictions.json",
        lambda rows: rows[0].update(box_xywh=[10, 10, 41, 20]),
        "mattnet IoU 30",
    ),
    "object": (
        "made/of refcoco/here/instances.json",
        lambda f: f["annotations"][0].update(bbox=[10.0, 10.0, 50.0, 30.0]),
        "referred box 30",
    ),
    "unknown": ("made/of refcoco/expected.json", lambda e: {"something": "else"}, "of no kind that is known"),
}


@pytest.mark.parametrize("fault", JSON_FAULTS)
def test_a_fault_in_an_expected_file_or_an_input_is_told_and_fails(fault, cases, capsys):
    name, change, told = JSON_FAULTS[fault]
    edit_json(cases / name, change)
    for other in [one for one in cases.iterdir() if one.name != name.split("/")[0]]:
        shutil.rmtree(other)  # what is not at fault need not be compared again
    assert not check_folder(cases)
    printed = capsys.readouterr().out
    assert told in printed, printed
    assert "could not be compared" in printed.splitlines()[-1] or "nothing was compared" in printed.splitlines()[-1]


def without(name: str) -> Callable[[dict], None]:
    """Every value of a name that begins so is lost, at any depth."""

    def strip(value: Any) -> None:
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            strip(one)
        for key in [key for key in value if key.startswith(name)] if isinstance(value, dict) else ():
            del value[key]

    return strip


OTHER_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "geometry": (lambda c: edit_array(c / "geometry" / "expected_4x512.npy", (1, 2, 3), 1e-3), "off by 1: ours 0.000"),
    "box": (lambda c: edit_array(c / "geometry" / "boxes_x1y1x2y2WH.npy", (2, 0), 1.0), "embedding of a box, off by 2"),
    "size": (lambda c: np.save(c / "geometry" / "boxes_x1y1x2y2WH.npy", np.ones((2, 6), np.float32)), "does not fit"),
    "embedding": (lambda c: edit_array(c / "retrieval" / "caption_embeddings.npy", (0,), 1), "rank, all images"),
    "torn json": (lambda c: (c / "vqa" / "expected_normalise.json").write_text('[{"input": '), "JSONDecodeError"),
    "torn npy": (lambda c: (c / "geometry" / "expected_4x512.npy").write_bytes(b"\x93NUMPY\x01"), "NOT COMPARED"),
    "torn results": (lambda c: (c / f"{VQA_FILES}_results.json").write_text("[{"), "is not JSON, or is torn"),
    "no results": (lambda c: (c / f"{VQA_FILES}_results.json").unlink(), "no *results.json lies beside"),
    "two results": (lambda c: (c / "vqa" / "other_results.json").write_text("[]"), "2 files *results.json"),
    "no list": (lambda c: (c / "conceptual_captions" / "Train_GCC-synthetic.tsv").unlink(), "no *.tsv lies beside"),
    "unknown": (lambda c: (c / "vqa" / "expected_else.json").write_text("{}"), "of no kind that is known"),
    "cut item": (
        lambda c: (c / "made/of vcr/dev.jsonl").write_text((c / "made/of vcr/dev.jsonl").read_text()[:-40]),
        "dev.jsonl line 3",
    ),
    "no questions": (
        lambda c: (c / f"{VQA_FILES}_questions.json").unlink(),
        "NOT COMPARED: the questions: no *questions",
    ),
    "no strings": (lambda c: (c / "vqa" / "normalise_inputs.json").unlink(), "NOT COMPARED: the list of strings: no *"),
    "no chosen answer": (
        lambda c: edit_json(c / "vqa/v2_mscoco_synthetic_annotations.json", without("multiple_choice_answer")),
        "NOT COMPARED: the questions with their answers: there is no multiple_choice_answer",
    ),
    "no subtype": (
        lambda c: edit_json(c / f"{VQA_FILES}_questions.json", without("data_subtype")),
        "NOT COMPARED: the questions with their answers: there is no data_subtype",
    ),
    "nothing expected": (
        lambda c: (c / "made/of vcr/expected_hits.json").rename(c / "made/of vcr/other_hits.json"),
        "made.csv: NOT COMPARED: nothing is expected of it",
    ),
    "torn refs": (
        lambda c: (c / "made/of refcoco/here/refs(unc).p").write_bytes(
            (c / "made/of refcoco/here/refs(unc).p").read_bytes()[:-40]
        ),
        "refs(unc).p",
    ),
}


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_a_damaged_or_missing_file_is_told_and_fails(fault, cases, capsys):
    damage, told = OTHER_FAULTS[fault]
    damage(cases)
    assert not check_folder(cases)
    printed = capsys.readouterr().out
    assert told in printed, printed
    assert "rois" in printed, "the others are compared all the same"


def test_each_file_that_could_not_be_compared_is_told_and_counts_once(cases, capsys):
    (cases / "vqa" / "normalise_inputs.json").unlink()  # which leaves the file that is about it without a value, too
    (cases / "vqa" / "another.csv").write_text("1\n")  # which that file may be about
    (cases / "alone").mkdir()
    for name in ("a.csv", "b.csv"):
        (cases / "alone" / name).write_text("1\n")
    for other in ("made", "geometry", "retrieval"):
        shutil.rmtree(cases / other)
    assert not check_folder(cases)
    printed = capsys.readouterr().out
    for name in ("a.csv", "b.csv"):
        assert f"alone/{name}: NOT COMPARED: nothing is expected of it" in printed, printed
    assert printed.splitlines()[-1].endswith(", 3 files could not be compared")


def test_what_official_code_may_leave_unsaid_is_named_and_does_not_fail(cases, capsys):
    edit_json(cases / "vqa" / "expected_official_eval.json", lambda e: e["perQuestion"].pop("1001000") and None)
    edit_json(cases / "retrieval" / "expected.json", lambda e: e.pop("five_folds") and e.pop("five_fold_mean") and None)
    (cases / "vocabulary").mkdir()
    assert check_folder(cases)
    printed = capsys.readouterr().out
    for line in ("1 of 40 questions, such as 1001000", "folds: expected.json"):
        assert f"not compared: {line}" in printed
    assert "vocabulary: nothing is expected there" in printed


def test_a_case_of_other_names_ids_and_counts_agrees(tmp_path, capsys):
    """Seven annotators, text ids of types and a split that nobody has: the accuracy is worked out by hand."""
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    said = {7: ["Two", "two", "2", "2 ", "three", "a 3", "zebra"], 4: ["X"] * 7}
    rows = [
        {
            "question_id": i,
            "image_id": 3,
            "question_type": f"type {i}",
            "answer_type": "odd",
            "multiple_choice_answer": answers[0],
            "answers": [
                {"answer": answer, "answer_id": k, "answer_confidence": "yes"} for k, answer in enumerate(answers)
            ],
        }
        for i, answers in said.items()
    ]
    questions = [{"question_id": i, "image_id": 3, "question": "how many?"} for i in said]
    (folder / "q_questions.json").write_text(json.dumps({"data_subtype": "x2031", "questions": questions}))
    (folder / "a_annotations.json").write_text(json.dumps({"annotations": rows}))
    answers = [{"question_id": 4, "answer": "x"}, {"question_id": 7, "answer": "three"}]
    (folder / "r_results.json").write_text(json.dumps(answers))
    three = round((2 * 1 / 3 + 5 * 2 / 3) / 7 * 100, 2)  # "three" and "a 3": each of the two sees one other
    expected = {
        "perQuestion": {"7": three, "4": 0.0},
        "overall": 28.57,
        "perQuestionType": {"type 7": three, "type 4": 0.0},
    }
    (folder / "expected.json").write_text(json.dumps(expected))
    agree = check_folder(tmp_path)
    printed = capsys.readouterr().out
    assert agree, printed
    assert "accuracy of a question type" in printed


OTHER_CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {  # a folder, what is other there, what is said
    "no mean rank": (
        "retrieval",
        lambda c: edit_json(c / "retrieval/expected.json", without("meanr")),
        "recall, all images, fold 0 i2t meanr, fold 0 t2i meanr: nobody says",
    ),
    "no convention": (
        "made",
        lambda c: edit_json(c / "made/of refcoco/expected.json", without("mattnet")),
        "not compared: mattnet hit: expected.json has no mattnet_hit",
    ),
    "umd": (
        "made",
        lambda c: (c / "made/of refcoco/here/refs(unc).p").rename(c / "made/of refcoco/here/refs(umd).p"),
        "published hit",
    ),
    "two data sets": (
        "made",
        lambda c: (
            shutil.copytree(c / "made/of refcoco/here", c / "made/of refcoco/other")
            and edit_refs(c / "made/of refcoco/other/refs(unc).p")
        ),
        "published hit",
    ),
    "number as id": (
        "made",
        lambda c: (
            edit_json(c / "made/of vcr/expected_hits.json", lambda e: e["per_example"][0].update(annot_id=7)),
            *(
                (c / "made/of vcr" / name).write_text((c / "made/of vcr" / name).read_text().replace(old, new))
                for name, old, new in (("dev.jsonl", '"made-0"', "7"), ("made.csv", "made-0", "7"))
            ),
        ),
        "answer hit",
    ),
    "of no use": (
        "made",
        lambda c: (c / "made/of refcoco/dets.json").write_text("[]"),
        "of refcoco: nothing expected is about dets.json",
    ),
}


def edit_refs(file: Path) -> None:
    """The references of another data set: the same sentences, of other references."""
    refs = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps([ref | {"ref_id": ref["ref_id"] + 1} for ref in refs], protocol=0))


@pytest.mark.parametrize("other", OTHER_CASES)
def test_other_cases_of_the_formats_agree_and_what_is_not_there_is_named(other, cases, capsys):
    name, change, told = OTHER_CASES[other]
    change(cases)
    for beside in [one for one in cases.iterdir() if one.name != name]:
        shutil.rmtree(beside)
    agree = check_folder(cases)
    printed = capsys.readouterr().out
    assert agree, printed
    assert told in printed, printed


def test_images_with_another_number_of_captions_are_compared(tmp_path, capsys):
    scores = np.array([[5.0, 1, 2, 0], [0, 3, 4, 1]])
    np.save(tmp_path / "scores.npy", scores)
    split = {"filename": "a.jpg", "split": "test", "sentences": [{"raw": "x"}] * 2}
    (tmp_path / "dataset_made.json").write_text(json.dumps({"images": [split]}))
    full = {"i2t": {"r1": 100.0, "medr": 1.0}, "t2i": {"r1": 75.0}}
    (tmp_path / "expected.json").write_text(json.dumps({"full": full}))
    agree = check_folder(tmp_path)
    printed = capsys.readouterr().out
    assert agree, printed
    assert "all 4 values agree" in printed
    assert "captions of an image, dataset_made.json" in printed


def test_a_folder_in_which_nothing_is_expected_fails(tmp_path, capsys):
    assert not check_folder(tmp_path)
    assert "nothing was compared" in capsys.readouterr().out
    assert not check_folder(tmp_path / "none")
    assert "there is no folder" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [False, True])
def test_the_program_fails_where_not_all_agrees(fault, tmp_path):
    shutil.copytree(OWN / "conceptual_captions", tmp_path / "c")
    if not fault:
        main([str(tmp_path)])
        return
    edit_json(tmp_path / "c" / "expected_rows.json", lambda e: e["rows"].pop() and None)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 1
