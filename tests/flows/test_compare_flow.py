"""The flow of comparisons: its child process, and its tables."""

from pathlib import Path

import pytest
from places import PROJECT
from tiny import tiny_root

from flows.compare import compare, table_of_comparison
from flows.settings import CompareSettings
from flows.supervisor import ChildFailed


@pytest.fixture(autouse=True)
def plans_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"{PROJECT}:{PROJECT / 'tests'}")


@pytest.mark.slow
def test_a_comparison_runs_in_a_child_and_what_failed_is_named(tmp_path: Path):
    """The root has no regions of the task, so that every fine-tuning fails."""
    root, lines = tiny_root(tmp_path), []
    settings = CompareSettings("compared:plan", fields=("pretraining:steps=1",), seeds=(0,), jobs=2)
    found = compare(str(root), settings, lines.append)
    reasons = {one["run"]: one["reason"] for one in found["failed"]}
    assert reasons.keys() == {f"compare-tiny-{variant}-refcoco-seed0" for variant in ("without", "words")}
    assert all("refcoco+" in reason for reason in reasons.values())
    assert found["tasks"]["refcoco"]["means"] == {}
    assert (root / "comparisons/tiny/index.html").is_file()
    assert any("compare-tiny-words-pretraining-seed0: done" in line for line in lines)


def test_the_numbers_stay_where_the_child_refuses_its_arguments(tmp_path: Path):
    numbers = tmp_path / "comparisons" / "tiny" / "numbers.json"
    numbers.parent.mkdir(parents=True)
    numbers.write_text("{}")
    with pytest.raises(ChildFailed, match="no.such"):
        compare(str(tmp_path), CompareSettings("compared:plan", fields=("no.such=1",)), lambda line: None)
    assert numbers.read_text() == "{}"


def test_a_plan_that_is_not_there_is_refused_before_a_child_is_started(tmp_path: Path):
    (tmp_path / "root").mkdir()
    with pytest.raises(ValueError, match="no plan none_such, only .*table4"):
        compare(str(tmp_path / "root"), CompareSettings("none_such"))


def test_the_table_of_a_comparison_has_means_with_intervals_and_the_pairs_that_differ():
    pairs = [{"first": "a", "second": "b", "differs": True}, {"first": "a", "second": "c", "differs": False}]
    means = {name: {"mean": 0.5, "low": 0.25, "high": 0.75} for name in "ab"}
    task = {"title": "VQA", "means": means, "chance": 0.1, "pairs": pairs}
    variants = {name: {"title": f"model {name}", "tasks": ["vqa"]} for name in "abc"}
    shown = table_of_comparison({"tasks": {"vqa": task}, "variants": variants}, "page")
    assert "| model a | 50.0 (25.0 to 75.0) |" in shown
    assert "| model c | failed |" in shown
    assert "- VQA differs: model a and model b" in shown
