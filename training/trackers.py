"""Pass the lines of metrics.jsonl to trackers while a run writes them (docs/trackers.md)."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class TrackedRun:
    """The run that a tracker records."""

    name: str  # a resumed run keeps its name
    step: int  # the run resumes from this step and repeats rows of later steps; 0 in a new run
    steps: int  # total number of steps
    folder: Path  # folder of the run's files on this machine; it may not exist yet
    settings: Mapping[str, Any]  # the recipe as nested dicts of plain values


# Makes the tracker of a run, on rank 0. A tracker has `log(row)`, called with each line of metrics.jsonl, and
# `finish()`, called at the end of the run, even after an error.
MakeTracker = Callable[[TrackedRun], Any]


class Trackers:
    """The trackers of a run. If a tracker raises an error, the error is reported and the tracker is removed."""

    def __init__(self, makers: Mapping[str, MakeTracker], run: TrackedRun, log: Callable[[str], None]):
        self._log, self._trackers = log, {}
        for name, make in makers.items():
            self._guard(name, lambda name=name, make=make: self._trackers.update({name: make(run)}))

    def log(self, row: Mapping[str, Any]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guard(name, lambda tracker=tracker: tracker.log(dict(row)))

    def finish(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guard(name, tracker.finish)

    def _guard(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
            self._trackers.pop(name, None)
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._log(
                f"tracker {name} failed and gets no more rows; training continues: {type(error).__name__}: {error} "
                f"({frame.filename}:{frame.lineno}). metrics.jsonl has all rows"
            )


class TensorBoard:
    """A tracker that writes training and validation metrics to the `tensorboard` folder of the run."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter  # here, because the import takes seconds

        # Hide points that a stopped run wrote after its last checkpoint.
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
