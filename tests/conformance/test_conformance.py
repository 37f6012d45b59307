"""Our loaders and scorers say what official code says, and `python -m tests.conformance` fails if a value differs.

tests/data/conformance holds the smaller part of ../shared/conformance: synthetic inputs, and what official code made
of them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from places import DATA, SHARED

from tests.conformance.__main__ import check_folder, main


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "conformance", tmp_path / "cases")
    for name in ("rois", "conceptual_captions"):
        shutil.copytree(DATA / name, tmp_path / "cases" / name)
    return tmp_path / "cases"


def test_our_copies_agree(cases: Path, capsys: pytest.CaptureFixture):
    assert check_folder(cases), capsys.readouterr().out
    assert "1876 of 1876 values agree" in capsys.readouterr().out


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")
def test_the_shared_data_agree_in_every_value(capsys: pytest.CaptureFixture):
    assert check_folder(SHARED / "conformance"), capsys.readouterr().out
    assert "2953 of 2953 values agree" in capsys.readouterr().out


VQA = "vqa/v2_OpenEnded_mscoco_synthetic"
EDITED = [  # file, change, what is printed
    ("vqa/expected_official_eval.json", lambda e: e["perQuestion"].update({"1004000": 30.01}), "ours '30.00', expect"),
    (f"{VQA}_results.json", lambda rows: rows.pop(), "NOT COMPARED: KeyError"),
    ("rois/expected.json", lambda e: e["cases"][0]["expected"]["0.2"]["keep_indices"].reverse(), "case_01.npz at 0.2"),
    ("geometry/expected_4x512.npy", lambda array: array[1, 2, 3:].__iadd__(1e-3), "1: ours 0.00"),
]


@pytest.mark.parametrize(("name", "change", "printed"), EDITED, ids=[f"{name} {named}" for name, _, named in EDITED])
def test_a_value_that_differs_is_named_and_fails(
    name: str, change: Callable, printed: str, cases: Path, capsys: pytest.CaptureFixture
):
    file = cases / name
    value = np.load(file) if file.suffix == ".npy" else json.loads(file.read_bytes())
    change(value)
    np.save(file, value) if file.suffix == ".npy" else file.write_text(json.dumps(value))
    with pytest.raises(SystemExit) as ended:
        main([str(cases)])
    assert ended.value.code == 1
    assert printed in capsys.readouterr().out
