"""`python -m benchmarks.parity`: what it finds in a folder, that no case is left out, and how it ends.

What the formats compare is tested in vlbert/test_parity_vlbert.py and detectors/test_parity_detector.py.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from places import DATA, PROJECT, SHARED

from benchmarks.parity.__main__ import main
from benchmarks.parity.cases import Row, apart, find_cases
from benchmarks.parity.vilbert import report

HERE = DATA / "parity"


def ends(*arguments: object) -> int | str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


def vqa_case(folder: Path, name: str = "vqa_prec") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in (".json", ".npz"):
        shutil.copy(HERE / f"vqa_prec{kind}", folder / f"{name}{kind}")
    return folder / f"{name}.json"


def test_the_command_prints_a_line_a_case_and_fails_where_one_fails(tmp_path: Path):
    vqa_case(tmp_path)
    arrays = dict(np.load(vqa_case(tmp_path / "below", "changed").with_suffix(".npz")))
    arrays["out/label_logits"][1, 7] += 1
    np.savez(tmp_path / "below" / "changed.npz", **arrays)
    (tmp_path / "other.json").write_text("[1]")  # no case
    (tmp_path / "lost.json").write_text("{")  # nor this one: no npz lies beside it
    (tmp_path / "empty").mkdir()
    (tmp_path / "report.json").write_text("{}")
    command = [sys.executable, "-m", "benchmarks.parity", str(tmp_path), str(HERE), "--json", str(tmp_path / "r.json")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    assert ended.returncode == 1, ended.stderr
    lines = ended.stdout.split("\n\n")[0].splitlines()[-4:]
    assert [line.split()[0] for line in lines] == [
        "vqa_prec",
        "below/changed",
        "pretrain_multitask_prec",
        "vqa_prec",
    ]
    assert [" pass" in line for line in lines] == [True, False, True, True]
    assert lines[0].endswith(" pass  zero: 2 self.key.bias")
    assert "\n3 of 4 VL-BERT cases pass in fp32 (a number within 1e-05," in ended.stdout
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["passes"] for row in rows] == [True, False, True, True]
    assert rows[1]["differences"]["logits"] == pytest.approx(1, abs=1e-3)
    assert rows[1]["bounds"]["logits"] == 1e-5


def test_the_command_ends_well_where_all_pass(capsys: pytest.CaptureFixture):
    status = ends(HERE)
    assert type(status) is int  # a shell sees 1 for anything else, even for numpy's False
    assert status == 0
    assert "2 of 2 VL-BERT cases pass" in capsys.readouterr().out


def test_a_folder_without_a_case_is_an_error_beside_one_that_has_some(tmp_path: Path):
    assert f"no case in {tmp_path}" in ends(HERE, tmp_path)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        (".npz", lambda data: b""),
        (".npz", lambda data: b"PK\x03\x04 torn"),
        (".npz", lambda data: b"no archive at all"),
        (".npz", lambda data: data[: len(data) // 2]),
        (".npz", lambda data: data[:300] + bytes(400) + data[700:]),
        (".npz", None),
        (".json", lambda data: b""),
        (".json", lambda data: b"\xff\xfe\x00"),
        (".json", lambda data: b"[" * 100_000),
        (".json", lambda data: data[: len(data) // 2]),
        (".json", lambda data: data.replace(b"param_order_for_grad", b"param_order")),
        (".json", None),
    ],
    ids=["empty npz", "no zip", "no npz", "torn npz", "scratched npz", "gone npz"]
    + ["empty", "binary", "deep", "torn", "unnamed", "gone"],
)
def test_a_damaged_case_is_named_in_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, kind: str, damage: Callable[[bytes], bytes] | None
):
    file = vqa_case(tmp_path).with_suffix(kind)
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    assert ends(tmp_path) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vqa_prec")]
    assert " NOT RUN: " in line


def test_an_unreadable_json_beside_any_arrays_is_a_damaged_case(tmp_path: Path):
    (tmp_path / "case.json").write_text("{")
    np.savez(tmp_path / "case.npz", a=np.zeros(1))
    assert [found.format for found in find_cases(tmp_path)] == ["damaged"]


def test_a_detector_whose_description_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    np.savez(tmp_path / "img0_c4.npz", c4=np.zeros(3, np.float32))
    assert ends(tmp_path) == 1
    assert "meta.json" in capsys.readouterr().out


# --- comparing --------------------------------------------------------------------------------------------------------


def test_a_difference_is_absolute_or_relative_to_the_largest_of_theirs_and_infinite_where_ours_is_not_a_number():
    theirs = torch.tensor([[1.0, -4], [2, 0]])
    ours = theirs + torch.tensor([0, 1])
    assert (apart(ours, theirs), apart(ours, theirs, of_scale=False)) == (0.25, 1)
    for of_scale in (True, False):
        assert apart(theirs * torch.nan, theirs, of_scale) == np.inf
        assert apart(theirs[:0], theirs[:0], of_scale) == 0
        with pytest.raises(ValueError, match=r"ours is \(2, 1\), theirs \(2, 2\)"):
            apart(theirs[:, :1], theirs, of_scale)
    assert (apart(theirs * 0, theirs * 0), apart(theirs, theirs * 0)) == (0, np.inf)


@pytest.mark.parametrize(
    ("difference", "verdict"), [(1.0, "pass"), (1.1, "FAIL"), (np.inf, "FAIL"), (np.nan, "FAIL"), (None, "NOT RUN:")]
)
def test_a_row_passes_where_every_difference_is_within_its_own_bound(difference: float | None, verdict: str):
    differences = {} if difference is None else {"near": 0.0, "far": difference}
    row = Row("case", "", differences, {"near": 5.0, "far": 1.0})
    assert row.passes == (verdict == "pass")
    assert f"  {verdict}" in str(row)


# --- ViLBERT's format -------------------------------------------------------------------------------------------------


@pytest.fixture
def vilbert(tmp_path: Path) -> Callable[..., Path]:
    """A case of ViLBERT's format in little, changed by `change(metadata, arrays)`."""

    def made(change: Callable[[dict, dict], object] = lambda metadata, arrays: None) -> Path:
        arrays = {"in/input_ids": np.zeros((2, 3), np.int64), "out/loss": np.float32(1)}
        arrays |= {f"grad/{name}": np.ones(1) for name in ("l2", "sum", "dot")}
        told = {name: {"dtype": str(array.dtype), "shape": [*array.shape]} for name, array in arrays.items()}
        metadata = {"kind": "vqa", "program": "paper", "layers": "TVX", "inputs": told, "outputs": {}}
        metadata |= {"tensors": [{"name": "a", "shape": [2], "rule": "0.1n"}], "param_order_for_grad": ["a"]}
        change(metadata, arrays)
        (tmp_path / "case.json").write_text(json.dumps(metadata))
        np.savez(tmp_path / "case.npz", **arrays)
        return tmp_path / "case.json"

    return made


def test_a_vilbert_case_is_recognised_read_and_no_pass(vilbert: Callable, capsys: pytest.CaptureFixture):
    file = vilbert()
    assert ends(file.parent) == 1
    printed = capsys.readouterr().out
    assert "NOT RUN:  needs layers T, V, X: not in this version" in printed
    assert "0 of 1 ViLBERT cases pass" in printed
    assert "single_stream" in report(vilbert(lambda m, a: m.update(kind="single_stream", layers="JJ")), "case").remark


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda metadata, arrays: metadata.update(kind="nlvr"), "kind nlvr"),
        (lambda metadata, arrays: metadata.update(program="other"), "program other"),
        (lambda metadata, arrays: metadata.update(layers="TVJ"), "layers are 'TVJ'"),
        (lambda metadata, arrays: metadata.pop("layers"), "layers"),
        (lambda metadata, arrays: arrays.pop("out/loss"), "out/loss"),
        (lambda metadata, arrays: arrays.update(more=np.zeros(1)), "more"),
        (lambda metadata, arrays: arrays.update({"out/loss": np.float64(1)}), "out/loss is float64"),
        (lambda metadata, arrays: arrays.update({"in/input_ids": np.zeros((2, 4), np.int64)}), "in/input_ids"),
        (lambda metadata, arrays: arrays.update({"out/loss": np.float32("nan")}), "out/loss holds"),
        (lambda metadata, arrays: metadata["param_order_for_grad"].append("b"), "b"),
        (lambda metadata, arrays: metadata["param_order_for_grad"].append("a"), "grad/l2 has 1 numbers for 2"),
        (lambda metadata, arrays: metadata["tensors"][0].update(rule="banana"), "'banana'"),
    ],
    ids=range(12),
)
def test_a_damaged_vilbert_case_is_named(vilbert: Callable, change: Callable, named: str):
    row = report(vilbert(change), "case")
    assert not row.passes
    assert named in row.remark
    assert "not in this version" not in row.remark


@pytest.mark.skipif(not (SHARED / "parity" / "vilbert").is_dir(), reason="ViLBERT's figures lie in ../shared")
def test_every_published_vilbert_case_is_whole():
    found = find_cases(SHARED / "parity" / "vilbert")
    assert [case.format for case in found] == ["vilbert"] * 8
    assert all(report(case.path, case.name).remark.endswith("not in this version") for case in found)
