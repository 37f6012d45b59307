"""`python -m benchmarks.conformance`: inputs whose official values are known agree, and every kind of fault is named.

tests/data/conformance holds the smaller part of ../shared/conformance: synthetic inputs, and what official code made
of them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import DATA, SHARED

from benchmarks.conformance import check_folder, main


@pytest.fixture
def cases(tmp_path) -> Path:
    shutil.copytree(DATA / "conformance", tmp_path / "cases")
    for name in ("rois", "conceptual_captions"):
        shutil.copytree(DATA / name, tmp_path / "cases" / name)
    return tmp_path / "cases"


def test_our_copies_agree(cases, capsys):
    assert check_folder(cases)
    printed = capsys.readouterr().out
    totals = {line.split()[0]: line.split()[-2:] for line in printed.splitlines() if "  all  " in line}
    assert {*totals} == {"conceptual_captions", "geometry", "retrieval", "rois", "vqa", "all"}
    assert totals["vqa"] == ["575", "575"]
    assert printed.endswith("values agree\n")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")
def test_the_shared_data_agree_in_every_value(capsys):
    assert check_folder(SHARED / "conformance"), capsys.readouterr().out
    assert "all 2953 values agree" in capsys.readouterr().out


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    """Write back a JSON file or an array that `change` has changed in place."""
    if file.suffix == ".npy":
        value = np.load(file)
        change(value)
        np.save(file, value)
        return
    value = json.loads(file.read_bytes())
    change(value)
    file.write_text(json.dumps(value))


VQA = "vqa/v2_OpenEnded_mscoco_synthetic"
ANNOTATIONS = "vqa/v2_mscoco_synthetic_annotations.json"
EDITED = [  # file, change, what is printed
    ("vqa/expected_official_eval.json", lambda e: e["perQuestion"].update({"1004000": 30.01}), "ours 30.0, expected 3"),
    ("vqa/expected_official_eval.json", lambda e: e["perQuestion"].update({"77": 30.0}), "77: ours 'missing'"),
    ("vqa/expected_official_eval.json", lambda e: e.update(overall=50.0), "accuracy overall overall: ours"),
    ("vqa/expected_official_eval.json", lambda e: e.update(perAnswerType={"other": 1.0}), "an answer type other"),
    (f"{VQA}_results.json", lambda rows: rows[0].update(answer="no"), "1001000: ours 0.0, expected 100.0"),
    (f"{VQA}_results.json", lambda rows: rows.pop(), "NOT COMPARED: ValueError: 1 ids of the annotations miss"),
    (f"{VQA}_questions.json", lambda file: file["questions"].pop(), "NOT COMPARED"),
    (ANNOTATIONS, lambda file: file["annotations"][3]["answers"].pop(), "1004000"),
    ("vqa/expected_normalise.json", lambda rows: rows[50].update(after_punctuation="!"), "after punctuation"),
    ("vqa/expected_normalise.json", lambda rows: rows[50].update(after_digit_article="the"), "after digit article"),
    ("vqa/normalise_inputs.json", lambda rows: rows.pop(), "string to normalise"),
    ("vqa/expected_vlbert_soft_targets.json", lambda e: e["cases"][2]["target"].update(no=0.7), "cases[2]: ours"),
    ("retrieval/expected.json", lambda e: e["full"]["t2i_rank0"].reverse(), "rank, all images fold 0 t2i 0"),
    ("retrieval/expected.json", lambda e: e["five_folds"].reverse(), "rank, 5 folds"),
    ("retrieval/expected.json", lambda e: e["five_fold_mean"]["i2t"].update(medr=1.5), "i2t medr: ours 1.4, expected"),
    ("retrieval/expected.json", lambda e: e.update(n_captions=501), "n_captions: ours 500"),
    ("retrieval/caption_embeddings.npy", lambda array: array[0].__iadd__(1), "rank, all images"),
    ("rois/expected.json", lambda e: e["cases"][0]["expected"]["0.2"]["keep_indices"].reverse(), "case_01.npz at 0.2"),
    ("rois/expected.json", lambda e: e["cases"][0].update(case="case_99.npz"), "NOT COMPARED: FileNotFoundError"),
    ("conceptual_captions/expected_rows.json", lambda e: e["rows"][12].update(caption="quote"), "12: ours"),
    ("conceptual_captions/expected_rows.json", lambda e: e["rows"].clear(), "of no kind that is known"),
    ("geometry/expected_4x512.npy", lambda array: array[1, 2, 3:].__iadd__(1e-3), "off by 1: ours 0.00"),
    ("geometry/boxes_x1y1x2y2WH.npy", lambda array: array[2, :1].__iadd__(1), "embedding of a box, off by 2"),
]


@pytest.mark.parametrize(("name", "change", "printed"), EDITED, ids=[f"{name} {named}" for name, _, named in EDITED])
def test_a_value_that_differs_is_named_and_fails(name, change, printed, cases, capsys):
    edit(cases / name, change)
    assert not check_folder(cases / name.split("/")[0])
    out = capsys.readouterr().out
    assert printed in out, out
    assert "could not be compared" in out.splitlines()[-1] or "nothing was compared" in out.splitlines()[-1]


DAMAGED = [  # folder, damage, what is printed
    ("vqa", lambda folder: (folder / "expected_normalise.json").write_text('[{"input": '), "JSONDecodeError"),
    ("vqa", lambda folder: (folder / "expected_else.json").write_text("{}"), "of no kind that is known"),
    ("vqa", lambda folder: (folder / "normalise_inputs.json").unlink(), "no *inputs.json lies beside"),
    ("vqa", lambda folder: (folder / "other_results.json").write_text("[]"), "2 files *results.json"),
    ("vqa", lambda folder: (folder / "more.csv").write_text("1"), "more.csv: NOT COMPARED: nothing is expected of it"),
    ("geometry", lambda folder: (folder / "expected_4x512.npy").write_bytes(b"\x93NUMPY\x01"), "NOT COMPARED"),
    ("geometry", lambda folder: np.save(folder / "boxes_x1y1x2y2WH.npy", np.ones((2, 6))), "does not fit"),
    ("conceptual_captions", lambda folder: (folder / "Train_GCC-synthetic.tsv").unlink(), "no *.tsv lies beside"),
    ("conceptual_captions", lambda folder: (folder / "expected_rows.json").unlink(), "nothing was compared"),
]


@pytest.mark.parametrize(("name", "damage", "printed"), DAMAGED, ids=[named for *_, named in DAMAGED])
def test_a_damaged_or_missing_file_is_named_and_fails(name, damage, printed, cases, capsys):
    damage(cases / name)
    assert not check_folder(cases / name)
    out = capsys.readouterr().out
    assert printed in out, out


def test_what_official_code_leaves_out_is_named_and_does_not_fail(cases, capsys):
    edit(cases / "vqa/expected_official_eval.json", lambda e: e["perQuestion"].pop("1001000"))
    edit(cases / "retrieval/expected.json", lambda e: (e.pop("five_folds"), e.pop("five_fold_mean")))
    (cases / "empty").mkdir()
    assert check_folder(cases)
    printed = capsys.readouterr().out
    for line in ("1 of 40 questions, such as 1001000", "folds"):
        assert f"not compared: {line}" in printed


def test_retrieval_may_come_as_scores_and_with_two_captions_an_image(tmp_path, capsys):
    np.save(tmp_path / "scores.npy", np.array([[5.0, 1, 2, 0], [0, 3, 4, 1]]))
    image = {"filename": "a.jpg", "split": "test", "sentences": [{"raw": "x"}] * 2}
    (tmp_path / "dataset_made.json").write_text(json.dumps({"images": [image]}))
    full = {"i2t": {"r1": 100.0, "medr": 1.0}, "t2i": {"r1": 75.0}}
    (tmp_path / "expected.json").write_text(json.dumps({"full": full}))
    assert check_folder(tmp_path)
    assert "all 4 values agree" in capsys.readouterr().out


def test_the_program_fails_where_not_all_agrees(cases):
    main([str(cases / "conceptual_captions")])
    with pytest.raises(SystemExit) as ended:
        main([str(cases / "none")])
    assert ended.value.code == 1
