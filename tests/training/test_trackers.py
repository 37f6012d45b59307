"""Trackers: they get each line of metrics.jsonl, and cannot end a training."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from small_run import run_small

from storage.object_store import open_store
from training.log import read_heartbeat
from training.trackers import TrackedRun


class Mine:
    """Notes what it gets, and may fail at one of its calls."""

    fails_in, made = "", None

    def __init__(self, run: TrackedRun):
        Mine.made = self
        self.run, self.rows, self.finished = run, [], 0
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


@pytest.mark.parametrize(
    ("fails_in", "rows", "finished"), [("", 6, 1), ("__init__", 0, 0), ("log", 1, 0), ("finish", 6, 1)]
)
def test_a_tracker_gets_each_line_of_metrics_jsonl_and_one_that_fails_is_reported_once_and_left_out(
    tmp_path, monkeypatch, capsys, fails_in, rows, finished
):
    store, folder, measured = open_store(str(tmp_path)), tmp_path / "runs" / "run", ({"accuracy": 0.5}, [])
    monkeypatch.setattr(Mine, "fails_in", fails_in)
    monkeypatch.setitem(sys.modules, "my_trackers", SimpleNamespace(mine=Mine))
    trackers = "my_trackers:mine", "tensorboard"
    run_small(store, range(6), validate=lambda: measured, validate_every=2, trackers=trackers)
    lines = [json.loads(row) for row in (folder / "metrics.jsonl").read_bytes().splitlines()]
    kinds = [(line["kind"], line["step"]) for line in lines]
    assert kinds == [(kind, step) for step in (2, 4, 6) for kind in ("training", "validation")]
    assert (Mine.made.rows, Mine.made.finished) == (lines[:rows], finished)
    run = Mine.made.run
    assert (run.name, run.step, run.steps, run.folder) == ("run", 0, 6, folder)
    assert run.settings["validate_every"] == 2
    report = "".join(text for text in capsys.readouterr().out.splitlines() if "my_trackers:mine" in text)
    reason = r"SystemExit: no key for this service \(.*test_trackers.py:\d+\)\. metrics.jsonl has all rows"
    assert re.fullmatch(f"tracker my_trackers:mine failed .*: {reason}" if fails_in else "", report)
    assert read_heartbeat(store, "run")["state"] == "done"
    (events,) = (folder / "tensorboard").iterdir()
    assert events.read_bytes().count(b"training/loss_size") == 3, "others go on"
    assert b"validation/accuracy" in events.read_bytes()
