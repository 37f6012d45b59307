"""The flow of comparisons: its child process."""

from pathlib import Path

import pytest
from places import PROJECT
from tiny import tiny_root

from flows.compare import compare
from flows.settings import CompareSettings
from flows.supervisor import ChildFailed


@pytest.mark.slow
def test_a_comparison_runs_in_a_child_and_what_failed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The root has no regions of the task, so that every fine-tuning fails."""
    monkeypatch.setenv("PYTHONPATH", f"{PROJECT}:{PROJECT / 'tests'}")
    root, lines = tiny_root(tmp_path), []
    settings = CompareSettings("compared:plan", fields=("pretraining:steps=1",), seeds=(0,), jobs=2)
    with pytest.raises(ChildFailed, match="compared:plan: 2 training runs failed") as failed:
        compare(str(root), settings, lines.append)
    for variant in ("without", "words"):
        assert any(f"compare-tiny-{variant}-refcoco-seed0" in line and "refcoco+" in line for line in lines), lines
    assert any("compare-tiny-words-pretraining-seed0: done" in line for line in lines)
    assert failed.value.returncode == 1
    assert (root / "comparisons/tiny/index.html").is_file()


def test_a_plan_that_is_not_there_is_refused_before_a_child_is_started(tmp_path: Path):
    with pytest.raises(ValueError, match="no plan none_such, only .*table4"):
        compare(str(tmp_path / "root"), CompareSettings("none_such"))
