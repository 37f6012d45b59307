"""Trackers receive the lines of metrics.jsonl while a training writes them (docs/trackers.md)."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class TrackedRun:
    """What a tracker knows of its run.

    name      of the run; a run that is resumed keeps it
    step      the step that the run is resumed from, 0 in a new one. Rows of later steps, which a process before this
              one may have written, come again
    steps     how many the run takes in all
    folder    of the run's files, on this machine; it may not exist yet
    settings  the recipe as nested dicts of plain values
    """

    name: str
    step: int
    steps: int
    folder: Path
    settings: Mapping[str, Any]


# Makes the tracker of a run, on the first process. It has `log(row)`, which receives each line of metrics.jsonl, and
# `finish()`, which is called at the run's end, however it ended.
MakeTracker = Callable[[TrackedRun], Any]


class Trackers:
    """The trackers of a run. One that raises is reported once and left out."""

    def __init__(self, makers: Mapping[str, MakeTracker], run: TrackedRun, log: Callable[[str], None]):
        self._log, self._trackers = log, {}
        for name, make in makers.items():
            self._guarded(name, lambda name=name, make=make: self._trackers.update({name: make(run)}))

    def log(self, row: Mapping[str, Any]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, lambda tracker=tracker: tracker.log(dict(row)))

    def finish(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, tracker.finish)

    def _guarded(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except (Exception, SystemExit) as error:  # noqa: BLE001  others' code may raise anything
            self._trackers.pop(name, None)
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._log(
                f"the tracker {name} is left out, the training goes on: {type(error).__name__}: {error} "
                f"({place.filename}:{place.lineno}). metrics.jsonl has all rows"
            )


class TensorBoard:
    """Curves of the numbers of trainings and validations, in the run's folder `tensorboard`."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter  # here, because it takes seconds to import

        # What a stopped run showed after its last checkpoint is hidden.
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1 if run.step else 0)

    def log(self, row: Mapping[str, Any]) -> None:
        if row["kind"] in ("training", "validation"):
            for name, value in row.items():
                if name not in ("kind", "step"):
                    self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
            self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


TRACKERS: dict[str, MakeTracker] = {"tensorboard": TensorBoard}
