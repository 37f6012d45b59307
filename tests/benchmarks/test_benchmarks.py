"""Every command of benchmarks/ runs, at sizes that measure nothing."""

import contextlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def detected(report: dict[str, Any], printed: str) -> None:
    assert report["contenders"].keys() >= {"faster_rcnn fp32", "faster_rcnn bf16-res5"}
    assert all(report["flops"].values())
    assert report["flops"].keys() == {"backbone", "rpn", "pool and res5", "heads"}
    assert report["differences"]["cosine of features, least"] > 0.99


def downloaded(report: dict[str, Any], printed: str) -> None:
    assert "CPU-ms per image" in printed
    assert report["good"][0]["statuses"] == {"ok": 50}


def loaded(report: dict[str, Any], printed: str) -> None:
    assert all(line["what"] in printed for line in report["lines"])
    assert sum(line["bar"] is not None for line in report["lines"]) == 6


def scaled(report: dict[str, Any], printed: str) -> None:
    small, large = (report["rows"][rows] for rows in ("2000", "4000"))
    assert large["status"]["requests"] - small["status"]["requests"] == 20  # one a shard; one in a hundred comes later
    assert large["pin a snapshot"]["requests"] - small["pin a snapshot"]["requests"] == 20
    assert large["open an index"]["requests"] == small["open an index"]["requests"]


SMALL_LOADER = "--samples 64 --per-shard 32 --images 8 --index 5000 --tokens 100000 --rounds 1"
# Program -> arguments, and what must hold of its JSON and of what it prints.
PROGRAMS: dict[str, tuple[list[str], Callable[[Any, str], None]]] = {
    "detect": (["--preset", "demo", "--count", "1", "--rounds", "1"], detected),
    "download": (["--images", "50", "--rounds", "1", "--rows", "0"], downloaded),
    "loader": (SMALL_LOADER.split(), loaded),
    "scale": (["--rows", "2000", "4000", "--per-shard", "100"], scaled),
}


@pytest.mark.parametrize(
    "program", [name if name == "detect" else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_the_command_runs_in_small(program: str, tmp_path: Path, capfd: pytest.CaptureFixture):
    arguments, check = PROGRAMS[program]
    file = tmp_path / "report.json"
    with contextlib.suppress(SystemExit):  # for a bar that a busy machine, or so small a run, does not meet
        importlib.import_module(f"benchmarks.{program}").main([*arguments, "--json", str(file)])
    check(json.loads(file.read_text()), capfd.readouterr().out)
    assert list(tmp_path.iterdir()) == [file]
