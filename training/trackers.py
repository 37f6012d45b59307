"""Trackers: functions that receive the lines of metrics.jsonl while a training writes them (docs/trackers.md)."""

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it takes seconds to import
    from torch.utils.tensorboard import SummaryWriter

# Seconds that a training waits for its trackers: until they ask for their first row, so that what they import is there
# before loading processes are forked; at each save; and at the end, when it is done, and when it was stopped or failed.
WAIT_AT_START, WAIT_AT_SAVE, WAIT_AT_END, WAIT_WHEN_STOPPED = 30.0, 1.0, 60.0, 5.0
_PATIENCE = 300.0  # seconds that a tracker may take for one row

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class TrackedRun:
    """What a tracker knows of its run.

    name      of the run; a run that is resumed keeps it
    step      the step that the run is resumed from, 0 in a new one. Rows of later steps, which a process before this
              one may have written, come again
    steps     how many the run takes in all
    folder    of the run's files, on this machine; those of a bucket are put there with each checkpoint
    settings  the recipe as nested dicts of plain values
    log       prints a line
    """

    name: str
    step: int
    steps: int
    folder: Path
    settings: Mapping[str, Any]
    log: Callable[[str], None]


# Called once a run, on the first process. The iterator gives each line of metrics.jsonl, waits for the next one, and
# stops when the run ends.
Tracker = Callable[[TrackedRun, Iterator[Row]], object]


class Trackers:
    """The trackers of a run, each in a thread of its own. They hold up the training for the seconds above, at most.

    One that raises, returns too early, or takes longer than five minutes for a row is reported once and left out.
    """

    def __init__(self, trackers: Mapping[str, Tracker], run: TrackedRun):
        self._threads = [_Thread(name, tracker, run) for name, tracker in trackers.items()]
        self.wait(WAIT_AT_START)

    def add(self, row: Row) -> None:
        for thread in self._threads:
            thread.add(row)

    def wait(self, seconds: float = WAIT_AT_SAVE) -> None:
        """Until the rows so far are dealt with, or these seconds are over."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.wait(end)

    def close(self, seconds: float) -> None:
        """There are no more rows; what does not return within these seconds is left out."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(end, f"it did not return within {seconds:.0f} s after the last row")


class _Thread:
    """One tracker at work. Its thread is a daemon, so that a process ends though it hangs."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun):
        self.name, self.tracker, self.run = name, tracker, run
        self._changed = threading.Condition()  # guards all that follows
        self._rows: deque[Row] = deque()
        self._ended = False  # no row follows
        self._gone = False  # it has returned, or was left out
        self._busy_since: float | None = time.monotonic()  # None: it waits for a row
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def add(self, row: Row) -> None:
        with self._changed:
            if self._busy_since is not None and time.monotonic() - self._busy_since > _PATIENCE:
                self._leave_out(f"it has taken more than {_PATIENCE:.0f} s for one row")
            if not self._gone:
                self._rows.append(dict(row))
                self._changed.notify_all()

    def wait(self, end: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._gone or (self._busy_since is None and not self._rows), max(0.0, end - time.monotonic())
            )

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def join(self, end: float, why: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._gone, max(0.0, end - time.monotonic())):
                self._leave_out(why)

    def _leave_out(self, why: str) -> None:
        if self._gone:
            return
        self._gone = True
        self._rows.clear()
        self._changed.notify_all()
        self.run.log(f"the tracker {self.name} is left out, the training goes on: {why}. metrics.jsonl has all rows")

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        error = None
        try:
            self.tracker(self.run, self._taken())
        except BaseException as caught:  # noqa: BLE001  others' code may raise anything, SystemExit too
            error = caught
        with self._changed:
            if error is None and self._ended:
                self._gone = True
                self._changed.notify_all()
            else:
                self._leave_out(_described(error) if error else "it returned before the last row")

    def _taken(self) -> Iterator[Row]:
        while True:
            with self._changed:
                self._busy_since = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._rows or self._ended or self._gone)
                self._busy_since = time.monotonic()
                if not self._rows:
                    return
                row = self._rows.popleft()
            yield row


def _described(error: BaseException) -> str:
    """The error, and the line of the tracker where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without our own
    where = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def tensorboard(run: TrackedRun, rows: Iterator[Row]) -> None:
    """Curves of the numbers of trainings and validations, in the run's folder `tensorboard`."""
    board = Board(run.folder / "tensorboard", run.step, run.log)
    for row in rows:
        if row["kind"] in ("training", "validation"):
            numbers = {f"{row['kind']}/{name}": row[name] for name in row if name not in ("kind", "step")}
            board.add(numbers, row["step"])
            board.write()
    board.close()


class Board:
    """TensorBoard's file. It may lack points that the disk did not take; metrics.jsonl has all."""

    def __init__(self, folder: Path, step: int, log: Callable[[str], None]):
        self.folder, self.step, self.log = folder, step, log
        self._writer: SummaryWriter | None = None
        self._failed = False
        self.write()  # what a stopped run showed after its last checkpoint goes at once

    def add(self, values: Mapping[str, float], step: int) -> None:
        with self._monitored():
            if self._writer:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)

    def write(self) -> None:
        """Have all of it in the file."""
        from torch.utils.tensorboard import SummaryWriter

        with self._monitored():
            if self._writer is None:
                # After the failure of another one nothing is purged but what the run before it left.
                self._writer = SummaryWriter(str(self.folder), purge_step=self.step + 1 if self.step else 0)
            self._writer.flush()
            self._failed = False

    def close(self) -> None:
        if self._writer:
            with contextlib.suppress(OSError):  # it was logged
                self._writer.close()

    @contextlib.contextmanager
    def _monitored(self) -> Iterator[None]:
        """After an error the file is begun anew, with the next write."""
        try:
            yield
        except OSError as error:
            self._writer = None
            if not self._failed:
                self.log(f"cannot write {self.folder}, the training goes on and this is tried again: {error}")
            self._failed = True


TRACKERS: dict[str, Tracker] = {"tensorboard": tensorboard}
