"""Trackers: they get each line of metrics.jsonl, and cannot end a training."""

import json
import re
import sys
from types import ModuleType

import pytest
from small_run import run_small

from storage.object_store import ObjectStore, open_store
from training.log import read_heartbeat
from training.trackers import TrackedRun


def lines_of(store: ObjectStore) -> list[dict]:
    return [json.loads(row) for row in store.get("runs/run/metrics.jsonl").splitlines()]


class Mine:
    """Notes what it gets, and may fail at one of its calls."""

    fails_in = ""

    def __init__(self, run: TrackedRun):
        self.run, self.rows, self.finished = run, [], 0
        made.append(self)
        self._fail("__init__")

    def log(self, row: dict) -> None:
        self.rows.append(dict(row))
        row.clear()  # of its own copy: other trackers get all
        self._fail("log")

    def finish(self) -> None:
        self.finished += 1
        self._fail("finish")

    def _fail(self, name: str) -> None:
        if name == self.fails_in:
            sys.exit("no key for this service")


made: list[Mine] = []


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Mine, as a setting names it: something to call, of a module that can be imported; and TensorBoard."""
    made.clear()
    module = ModuleType("my_trackers")
    module.mine = Mine
    monkeypatch.setitem(sys.modules, "my_trackers", module)
    return "my_trackers:mine", "tensorboard"


def test_a_tracker_gets_each_line_of_metrics_jsonl_and_what_it_needs_of_the_run(tmp_path, trackers):
    store = open_store(str(tmp_path))
    measured = {"accuracy": 0.5}, []
    run_small(store, range(4), validate=lambda: measured, validate_every=2, trackers=trackers)
    (mine,) = made
    assert mine.rows == lines_of(store)
    kinds = [(row["kind"], row["step"]) for row in mine.rows]
    assert kinds == [(kind, step) for step in (2, 4) for kind in ("training", "validation")]
    run = mine.run
    assert (run.name, run.step, run.steps, run.folder) == ("run", 0, 4, tmp_path / "runs" / "run")
    assert run.settings["validate_every"] == 2
    assert mine.finished == 1
    (events,) = (tmp_path / "runs" / "run" / "tensorboard").iterdir()
    assert b"validation/accuracy" in events.read_bytes()


@pytest.mark.parametrize("fails_in", ["__init__", "log", "finish"])
def test_a_tracker_that_fails_is_reported_once_and_left_out(tmp_path, monkeypatch, capsys, trackers, fails_in):
    store = open_store(str(tmp_path))
    monkeypatch.setattr(Mine, "fails_in", fails_in)
    run_small(store, range(6), trackers=trackers)
    (report,) = [text for text in capsys.readouterr().out.splitlines() if "my_trackers:mine" in text]
    reason = r"SystemExit: no key for this service \(.*test_trackers.py:\d+\)"
    assert re.search(f"tracker my_trackers:mine failed .*: {reason}", report)
    assert [row["step"] for row in lines_of(store)] == [2, 4, 6]
    assert read_heartbeat(store, "run")["state"] == "done"
    assert [(len(mine.rows), mine.finished) for mine in made] == [
        {"__init__": (0, 0), "log": (1, 0), "finish": (3, 1)}[fails_in]
    ]
    (events,) = (tmp_path / "runs" / "run" / "tensorboard").iterdir()
    assert events.read_bytes().count(b"training/loss_size") == 3, "others go on"
