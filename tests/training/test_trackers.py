"""Trackers: they get each line of metrics.jsonl, and cannot end or hold up a training. docs/trackers.md is run here."""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from places import PROJECT
from small_run import run_small
from writing import wait_for

import training.trackers
from storage.object_store import LocalStore, ObjectStore, open_store
from training.distributed import World
from training.log import RunLog, read_heartbeat
from training.metrics import Line
from training.program import find_trackers
from training.trackers import TRACKERS, Board, TrackedRun, Tracker
from training.writer import Writer

PAGE = (PROJECT / "docs" / "trackers.md").read_text()


class Remote(LocalStore):
    """A folder that is like a bucket: no file of this machine."""

    def local_path(self, path: str) -> Path | None:
        return None


def line() -> Line:
    return Line({"all": 1.5}, {}, {}, {}, steps=1, seconds=1.0, data_wait=0.0, memory=0)


def lines_of(store: ObjectStore) -> list[dict]:
    return [json.loads(row) for row in store.get("runs/run/metrics.jsonl").splitlines()]


def named(monkeypatch: pytest.MonkeyPatch, tracker: Tracker) -> str:
    """The tracker as a setting names it: a function of a module that can be imported."""
    module = ModuleType("my_trackers")
    module.mine = tracker
    monkeypatch.setitem(sys.modules, "my_trackers", module)
    return "my_trackers:mine"


# --- in a training ----------------------------------------------------------------------------------------------------


def test_a_tracker_gets_each_line_of_metrics_jsonl_and_what_it_needs_of_the_run(tmp_path, monkeypatch):
    told, rows, store = [], [], open_store(str(tmp_path))

    def mine(run: TrackedRun, given: Iterator[dict]) -> None:
        told.append(run)
        rows.extend(given)

    def validate() -> tuple[dict[str, float], list[dict]]:
        return {"accuracy": 0.5}, []

    trackers = (named(monkeypatch, mine), "tensorboard")
    run_small(store, range(4), validate=validate, validate_every=2, trackers=trackers)
    assert rows == lines_of(store)
    assert [(row["kind"], row["step"]) for row in rows] == [(k, s) for s in (2, 4) for k in ("training", "validation")]
    (run,) = told
    assert (run.name, run.step, run.steps, run.folder) == ("run", 0, 4, tmp_path / "runs" / "run")
    assert run.settings["validate_every"] == 2
    (events,) = (tmp_path / "runs" / "run" / "tensorboard").iterdir()
    assert b"validation/accuracy" in events.read_bytes()


def test_a_resumed_run_tells_its_step_and_gives_later_rows_again(tmp_path):
    told, rows = [], []

    def mine(run: TrackedRun, given: Iterator[dict]) -> None:
        told.append((run.name, run.step))
        rows.extend(row["step"] for row in given)

    for step, ends in ((0, 3), (2, 4)):  # killed after step 3, with a checkpoint of step 2
        record = RunLog(Writer(open_store(str(tmp_path))), "run", step, 4, 1, trackers={"mine": mine})
        for done in range(step, ends):
            record.training(done + 1, line(), 0.1)
        record.close()
    assert told == [("run", 0), ("run", 2)]
    assert rows == [1, 2, 3, 3, 4]


def test_only_the_first_process_calls_a_tracker(tmp_path, monkeypatch):
    called = []
    name = named(monkeypatch, lambda run, rows: called.append(run.name))
    run_small(open_store(str(tmp_path)), range(2), world=World(1, 1, torch.device("cpu")), trackers=(name, "gone:gone"))
    assert called == []


def test_a_name_that_no_tracker_has_is_refused():
    assert find_trackers(("tensorboard",)) == {"tensorboard": TRACKERS["tensorboard"]}
    assert find_trackers(()) == {}
    with pytest.raises(ValueError, match="no such tracker, only tensorboard; name your own as MODULE:FUNCTION"):
        find_trackers(("tensorbord",))
    with pytest.raises(ValueError, match="no_such_module cannot be imported"):
        find_trackers(("no_such_module:tracker",))


# --- faults -----------------------------------------------------------------------------------------------------------


def raises_at_once(run: TrackedRun, rows: Iterator[dict]) -> None:
    raise RuntimeError("no key for this service")


def raises_later(run: TrackedRun, rows: Iterator[dict]) -> None:
    for row in rows:
        sys.exit(f"the service refused {row['kind']}")


def returns(run: TrackedRun, rows: Iterator[dict]) -> None:
    next(rows)


def takes_one_row(row: dict) -> None:
    pass


def raises_at_the_end(run: TrackedRun, rows: Iterator[dict]) -> None:
    list(rows)
    raise OSError("the service is away")


FAULTS = [
    (raises_at_once, r"RuntimeError: no key for this service \(.*test_trackers.py:\d+\)"),
    (raises_later, r"SystemExit: the service refused training \(.*test_trackers.py:\d+\)"),
    (returns, "it returned before the last row"),
    (takes_one_row, "TypeError: takes_one_row"),
    (raises_at_the_end, "OSError: the service is away"),
]


@pytest.mark.parametrize(("faulty", "reason"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_tracker_that_fails_is_reported_once_and_ends_nothing(tmp_path, monkeypatch, capsys, faulty, reason):
    store = open_store(str(tmp_path))
    run_small(store, range(6), trackers=(named(monkeypatch, faulty), "tensorboard"))
    reports = [text for text in capsys.readouterr().out.splitlines() if "my_trackers:mine" in text]
    assert len(reports) == 1
    assert re.search(f"tracker my_trackers:mine is left out, the training goes on: {reason}", reports[0])
    assert [row["step"] for row in lines_of(store)] == [2, 4, 6]
    assert read_heartbeat(store, "run")["state"] == "done"
    (events,) = (tmp_path / "runs" / "run" / "tensorboard").iterdir()
    assert events.read_bytes().count(b"training/loss_size") == 3, "others go on"


def at_start(run: TrackedRun, rows: Iterator[dict], wait: Callable[[], Any]) -> None:
    wait()
    list(rows)


def at_a_row(run: TrackedRun, rows: Iterator[dict], wait: Callable[[], Any]) -> None:
    for _ in rows:
        wait()


def at_the_end(run: TrackedRun, rows: Iterator[dict], wait: Callable[[], Any]) -> None:
    list(rows)
    wait()


@pytest.mark.parametrize(
    ("hangs", "reason"),
    [
        (at_start, "it has taken more than 0 s for one row"),
        (at_a_row, "it has taken more than 0 s for one row"),
        (at_the_end, "it did not return within 0 s after the last row"),
    ],
)
def test_a_tracker_that_hangs_is_reported_once_and_left_out(tmp_path, monkeypatch, capsys, hangs, reason):
    for name, seconds in {"WAIT_AT_START": 0.1, "_PATIENCE": 0.2}.items():
        monkeypatch.setattr(training.trackers, name, seconds)
    monkeypatch.setattr(training.log, "WAIT_AT_END", 0.3)
    let_go, taken = threading.Event(), []

    def mine(run: TrackedRun, rows: Iterator[dict]) -> None:
        hangs(run, (taken.append(row) or row for row in rows), lambda: let_go.wait(30))

    record = RunLog(Writer(open_store(str(tmp_path))), "run", 0, 9, 1, trackers={"mine": mine})
    began = time.monotonic()
    with record.writer, record.running():
        for step in (1, 2, 3, 4):
            record.training(step, line(), 0.1)
            time.sleep(0.1)
    assert time.monotonic() - began < 5
    reports = [text for text in capsys.readouterr().out.splitlines() if "tracker mine" in text]
    assert len(reports) == 1
    assert reason in reports[0]
    assert [row["step"] for row in lines_of(record.store)] == [1, 2, 3, 4]
    assert read_heartbeat(record.store, "run")["state"] == "done"
    let_go.set()  # it comes back, and gets no row any more
    wait_for(lambda: not [one for one in threading.enumerate() if one.name == "tracker mine"])
    assert len(taken) == {at_start: 0, at_a_row: 1, at_the_end: 4}[hangs]
    assert "tracker mine" not in capsys.readouterr().out


def test_a_slow_tracker_gets_all_rows_and_holds_up_no_step(tmp_path):
    taken = []

    def slow(run: TrackedRun, rows: Iterator[dict]) -> None:
        for row in rows:
            time.sleep(0.02)
            taken.append(row["step"])

    record = RunLog(Writer(open_store(str(tmp_path))), "run", 0, 30, 1, trackers={"slow": slow})
    began = time.monotonic()
    for step in range(20):
        record.event("training", step, {})
    gone = time.monotonic() - began
    record.close()
    assert gone < 0.2
    assert taken == list(range(20))


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_is_begun_anew_after_a_failure(tmp_path):
    logged = []
    board = Board(tmp_path, 0, logged.append)
    board.add({f"first {number}": 1.0 for number in range(300)}, 1)
    board.write()
    board._writer.file_writer.event_writer.close()  # a closed writer refuses as one whose disk is full
    for step, name in enumerate(("second", "third"), start=2):
        board.add({name: 1.0}, step)
        board.write()
    written = b"".join(file.read_bytes() for file in sorted(tmp_path.iterdir()))
    assert b"first 299" in written
    assert b"third" in written
    assert [text.split()[:2] for text in logged] == [["cannot", "write"]]


def test_on_a_bucket_what_trackers_wrote_is_put_at_each_save_and_at_the_end(tmp_path):
    def mine(run: TrackedRun, rows: Iterator[dict]) -> None:
        list(rows)
        (run.folder / "mine").mkdir()
        (run.folder / "mine" / "summary").write_text("all")

    trackers = {"mine": mine, "tensorboard": TRACKERS["tensorboard"]}
    with Writer(Remote(str(tmp_path))) as writer:
        record = RunLog(writer, "run", 0, 10, 1, trackers=trackers)
        record.training(1, line(), 0.1)
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

    def __enter__(self) -> "Calls":
        return self

    def __exit__(self, *error: object) -> None:
        self._noted.append((f"{self._name}.exit", (), {}))

    def __len__(self) -> int:  # of a list that nothing was found for
        return 0


def code_of_the_page() -> dict[str, str]:
    """The functions on the page, by their names."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return {re.search(r"def (\w+)\(run, rows\)", block).group(1): block for block in blocks}


def test_the_page_has_a_tracker_for_each_service():
    assert {"wandb_tracker", "mlflow_tracker", "trackio_tracker"} <= code_of_the_page().keys()
    assert all(len(block.strip().splitlines()) <= 12 for block in code_of_the_page().values())


@pytest.mark.parametrize("function", code_of_the_page())
def test_the_code_of_the_page_tracks_a_run(tmp_path, monkeypatch, capsys, function):
    noted = []
    for package in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, package, Calls(noted))
    module = ModuleType("trackers_of_the_page")
    exec(code_of_the_page()[function], module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    run_small(open_store(str(tmp_path)), range(4), trackers=(f"{module.__name__}:{function}",))
    out = capsys.readouterr().out
    assert "is left out" not in out
    logged = [args for name, args, _ in noted if name.endswith(("log", "log_metrics"))]
    if function.startswith(("wandb", "mlflow", "trackio")):
        assert len(logged) == 2
        assert all(type(args[0]["loss_size"]) is float for args in logged)
        assert any("run" in [*args, *kwargs.values()] for _, args, kwargs in noted), "the run's name"
