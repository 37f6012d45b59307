"""Every command of benchmarks/ runs, at sizes that measure nothing, so that none breaks unseen."""

import importlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import PROJECT

from benchmarks import killed_writer
from benchmarks.measure import in_turns

MODEL = [
    "model.layers=JJ",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.intermediate_size=64",
    "model.geometry_channels=32",
]

LOADER_BARS = {
    "  ratio": 3,
    "read, decode, resize to 600/1000, mask": 200,
    "order of 5,000 samples": 1,
    "seek to a batch of 256": 5,
    "index of 5,000 samples, growth of its reader": 64,
    "text corpus, order and batches of 256 x 64": 50,
}


def run(program: str, *arguments: str) -> int | str:
    """`python -m benchmarks.PROGRAM ARGUMENTS` in this process; its exit status, or the error that it ends with."""
    try:
        importlib.import_module(f"benchmarks.{program}").main([*arguments])
    except SystemExit as ended:
        return ended.code or 0
    return 0


def detected(report: dict[str, Any], printed: str) -> None:
    assert report["contenders"].keys() >= {"faster_rcnn fp32", "faster_rcnn bf16-res5"}
    assert all(report["flops"].values())
    assert report["flops"].keys() == {"backbone", "rpn", "pool and res5", "heads"}
    assert report["differences"]["cosine of features, least"] > 0.99


def saved(report: dict[str, Any], printed: str) -> None:
    lines = [(line["root"], line["way"]) for line in report["lines"]]
    assert lines == [("temporary", "in the step"), ("temporary", "beside it")]
    assert all(line["until_whole"] >= line["waited"] > 0 for line in report["lines"])


def downloaded(report: dict[str, Any], printed: str) -> None:
    assert "CPU-ms an image" in printed
    assert report["good"][0]["statuses"] == {"ok": 50}


def loaded(report: dict[str, Any], printed: str) -> None:
    lines = report["lines"]
    assert {line["what"]: line["bar"] for line in lines if line["bar"] is not None} == LOADER_BARS
    assert all(line["what"] in printed for line in lines)


def compared_steps(report: dict[str, Any], printed: str) -> None:
    assert report["seconds a step"].keys() == {"fp32", "plain fp32"}


def killed(report: None, printed: str) -> None:
    assert re.search(r"killed_writer +2 +0 .*passed", printed)


# Program -> arguments, and what must hold of its JSON and of what it prints.
PROGRAMS: dict[str, tuple[list[str], Callable[[Any, str], None]]] = {
    "detect": (["--preset", "demo", "--count", "1", "--rounds", "1"], detected),
    "checkpoint": (["temporary", "--recipe", "pretrain_vlbert_demo", "--saves", "1"], saved),
    "download": (["--images", "50", "--rounds", "1", "--rows", "0"], downloaded),
    "train_step": (
        ["--recipe", "pretrain_vlbert_base_precomputed", "--precision", "fp32", "--pairs", "2", "--batches", "1"]
        + ["--rounds", "1", *MODEL],
        compared_steps,
    ),
    "loader": (
        ["--samples", "64", "--per-shard", "32", "--images", "8", "--index", "5000", "--tokens", "100000"]
        + ["--rounds", "1"],
        loaded,
    ),
    "kill": (["--kills", "2", "--training-kills", "0"], killed),
}
# A bar that a busy machine, or so small a run, does not meet ends these with status 1.
WITH_BARS = {"download", "loader"}
FAST = {"detect", "checkpoint"}  # the others take some seconds each, in processes of their own
# Programs whose small runs stand in a file of tests with more about them.
ELSEWHERE = {
    "conformance": "benchmarks/test_conformance.py",
    "orchestration": "flows/test_orchestration.py",
    "parity": "benchmarks/test_parity.py",
}


@pytest.mark.parametrize(
    "program", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_the_command_runs_in_small(program: str, tmp_path: Path, capfd: pytest.CaptureFixture):
    arguments, check = PROGRAMS[program]
    file = tmp_path / "report.json"
    with_json = [] if program == "kill" else ["--json", str(file)]
    status = run(program, *arguments, *with_json)
    printed, errors = capfd.readouterr()
    assert status in ({0, 1} if program in WITH_BARS else {0}), errors
    check(json.loads(file.read_text()) if with_json else None, printed)
    assert list(tmp_path.iterdir()) == ([file] if with_json else [])


def test_what_work_took_is_told_apart_and_contenders_take_turns():
    order = []
    found = in_turns({"a": lambda: order.append("a") or 1, "b": lambda: order.append("b") or time.sleep(0.05)}, 2)
    assert order == ["a", "b", "a", "b"]
    assert [spent.result for spent in found["a"]] == [1, 1]
    assert all(spent.wall >= 0.05 > spent.cpu for spent in found["b"])


def test_kill_fails_where_a_part_finds_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(killed_writer, "check", lambda folder, seed, kills, say: ["a row is lost"])
    assert run("kill", "--kills", "3", "--training-kills", "0") == 1
    assert "killed_writer: a row is lost" in capsys.readouterr().out


def test_every_command_has_such_a_test():
    folder = PROJECT / "benchmarks"
    programs = {file.stem for file in folder.glob("*.py") if '"__main__"' in file.read_text()}
    programs |= {file.parent.name for file in folder.glob("*/__main__.py")}
    assert programs == PROGRAMS.keys() | ELSEWHERE.keys()
    for program, file in ELSEWHERE.items():
        assert re.search(rf"benchmarks\.{program}\b", (PROJECT / "tests" / file).read_text()), program
