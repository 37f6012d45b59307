"""Trackers: they get each line of metrics.jsonl, and cannot end a training. docs/trackers.md is run here."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import PROJECT
from small_run import run_small

from storage.object_store import LocalStore, ObjectStore, open_store
from training.checkpoint import Writer
from training.log import RunLog, read_heartbeat
from training.trackers import TRACKERS, TrackedRun, Tracker

PAGE = (PROJECT / "docs" / "trackers.md").read_text()


class Remote(LocalStore):
    """A folder that is like a bucket: no file of this machine."""

    def local_path(self, path: str) -> Path | None:
        return None


def lines_of(store: ObjectStore) -> list[dict]:
    return [json.loads(row) for row in store.get("runs/run/metrics.jsonl").splitlines()]


def named(monkeypatch: pytest.MonkeyPatch, make: Callable[[TrackedRun], Tracker]) -> str:
    """The tracker as a setting names it: something to call, of a module that can be imported."""
    module = ModuleType("my_trackers")
    module.mine = make
    monkeypatch.setitem(sys.modules, "my_trackers", module)
    return "my_trackers:mine"


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


@pytest.fixture(autouse=True)
def _none_made():
    made.clear()


def test_a_tracker_gets_each_line_of_metrics_jsonl_and_what_it_needs_of_the_run(tmp_path, monkeypatch):
    store, trackers = open_store(str(tmp_path)), (named(monkeypatch, Mine), "tensorboard")
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
def test_a_tracker_that_fails_is_reported_once_and_left_out(tmp_path, monkeypatch, capsys, fails_in):
    store = open_store(str(tmp_path))
    monkeypatch.setattr(Mine, "fails_in", fails_in)
    run_small(store, range(6), trackers=(named(monkeypatch, Mine), "tensorboard"))
    (report,) = [text for text in capsys.readouterr().out.splitlines() if "my_trackers:mine" in text]
    reason = r"SystemExit: no key for this service \(.*test_trackers.py:\d+\)"
    assert re.search(f"tracker my_trackers:mine is left out, the training goes on: {reason}", report)
    assert [row["step"] for row in lines_of(store)] == [2, 4, 6]
    assert read_heartbeat(store, "run")["state"] == "done"
    assert [(len(mine.rows), mine.finished) for mine in made] == [
        {"__init__": (0, 0), "log": (1, 0), "finish": (3, 1)}[fails_in]
    ]
    (events,) = (tmp_path / "runs" / "run" / "tensorboard").iterdir()
    assert events.read_bytes().count(b"training/loss_size") == 3, "others go on"


def test_on_a_bucket_what_trackers_wrote_is_put_at_each_save_and_at_the_end(tmp_path):
    class Files(Mine):
        def finish(self) -> None:
            (self.run.folder / "mine").mkdir()
            (self.run.folder / "mine" / "summary").write_text("all")

    with Writer(Remote(str(tmp_path))) as writer:
        record = RunLog(writer, "run", 0, 10, 1, trackers={"mine": Files, "tensorboard": TRACKERS["tensorboard"]})
        record.event("training", 1, {"loss_all": 1.5})
        record.publish()
        writer.finish()
        (file,) = (tmp_path / "runs/run/tensorboard").iterdir()
        assert b"loss_all" in file.read_bytes()
        record.close()
    assert (tmp_path / "runs/run/mine/summary").read_text() == "all"


# --- docs/trackers.md -------------------------------------------------------------------------------------------------


class Calls:
    """Stands in for a package: takes any call of any depth, and notes it."""

    def __init__(self, noted: list, name: str = ""):
        self._noted, self._name = noted, name

    def __getattr__(self, name: str) -> "Calls":
        return Calls(self._noted, f"{self._name}.{name}" if self._name else name)

    def __call__(self, *args: Any, **kwargs: Any) -> "Calls":
        self._noted.append((self._name, args, kwargs))
        return Calls(self._noted, self._name)

    def __len__(self) -> int:  # of a list that nothing was found for
        return 0


CODE = {
    re.search(r"class (\w+):", block).group(1): block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}


@pytest.mark.parametrize("name", sorted({"WandbTracker", "MLflowTracker", "TrackioTracker"} | CODE.keys()))
def test_the_code_of_the_page_tracks_a_run(tmp_path, monkeypatch, capsys, name):
    noted = []
    for package in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, package, Calls(noted))
    module = ModuleType("trackers_of_the_page")
    exec(CODE[name], module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run_small(open_store(str(tmp_path)), range(4), trackers=(f"{module.__name__}:{name}",))
    assert "is left out" not in capsys.readouterr().out
    if name != "PrintTracker":
        logged = [args[0] for call, args, _ in noted if call.endswith(("log", "log_metrics"))]
        assert [type(one["loss_size"]) for one in logged] == [float, float]
        assert any("run" in [*args, *kwargs.values()] for _, args, kwargs in noted), "the run's name"
        assert noted[-1][0].endswith(("finish", "end_run"))
