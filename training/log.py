"""The log of a run: metrics.jsonl, heartbeat.json, trackers, progress lines, skipped steps, unreadable samples."""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.object_store import ObjectStore
from storage.progress import clock
from storage.safe_json import parse_json
from training.stopping import Stopped
from training.trackers import MakeTracker, TrackedRun, Trackers

if TYPE_CHECKING:  # flows read the heartbeat and the metrics, and need no torch for it
    from training.checkpoint import Writer
    from training.metrics import RunningAverages, Step

# An environment variable: "0" prints no progress lines. Flows set it, because they log the heartbeat instead.
PROGRESS_LINES = "TRAINING_PROGRESS_LINES"
_HEARTBEAT = "heartbeat.json"
_BETWEEN_BEATS = 10.0  # seconds, at least, where the state is the same


@dataclass(frozen=True)
class Unreadable:
    """A sample that could not be read or decoded, whose slot in a batch counts for nothing.

    step    from 1: the optimizer step that it belonged to; 0 in a validation
    key     of the sample; None where not even that could be read
    reason  names the key, or else the file and the offset in it
    """

    step: int
    key: str | None
    reason: str


class Lines:
    """A file of JSON objects, one a line. Each time that some are added, the writer's thread puts the whole file.

    Lines of a file that is there, of steps after `step`, are removed: a resumed run does those steps again.
    """

    def __init__(self, writer: "Writer", path: str, step: int):
        self.writer, self.path = writer, path
        found = read_lines(writer.store, path)
        self.kept = [record for record in found if record["step"] <= step]
        self._data = lines_of(self.kept)
        if len(self.kept) < len(found):
            self._put()  # at once: a kill must not cost the lines that stay

    def add(self, *records: Mapping[str, Any]) -> None:
        self._data += lines_of(records)
        self.writer.submit(self.path, self._put)

    def _put(self) -> None:
        self.writer.store.put(self.path, self._data)


class RunLog:
    """Rank 0's log of one run, under ROOT/runs/<run>/ (docs/formats.md, Logs of a run).

    step, steps  how many optimizer steps are done already, of how many
    processes    how many train together
    metadata     what the heartbeat says of the run beside its progress
    trackers     by name; they get each line of metrics.jsonl
    settings     the recipe as plain values, for trackers

    The writer's thread puts all of them.
    """

    def __init__(
        self,
        writer: "Writer",
        run: str,
        step: int,
        steps: int,
        samples_per_step: int,
        processes: int = 1,
        metadata: Mapping[str, Any] | None = None,
        trackers: Mapping[str, MakeTracker] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.writer, self.store, self.run = writer, writer.store, run
        self.steps, self.samples_per_step = steps, samples_per_step
        names = "metrics.jsonl", "skipped.jsonl", "unreadable.jsonl"
        self._metrics, self._skipped, self._unreadable = (Lines(writer, f"runs/{run}/{name}", step) for name in names)
        self._known = {line["reason"]: line["step"] for line in self._unreadable.kept}
        folder = self.store.local_path(f"runs/{run}") or Path("runs", run)
        self._trackers = Trackers(trackers or {}, TrackedRun(run, step, steps, folder, settings or {}), writer.log)
        self._began = time.monotonic()
        self._resumed_from = self.uri(f"step-{step:07d}") if step else None
        self._beat: dict[str, Any] = {
            "step": step,
            "steps": steps,
            "state": "starting",
            "reason": None,
            "resumed_from": self._resumed_from,
            **dict.fromkeys(("samples_per_second", "losses", "counts", "data_wait", "seconds_left")),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": processes,
            **(metadata or {}),
        }
        self._beaten = -math.inf

    @property
    def checkpoint(self) -> str | None:
        """Where the newest whole checkpoint is; None before the first."""
        return self.writer.saved or self._resumed_from

    def uri(self, name: str) -> str:
        """The full name of one of the run's files."""
        return self.store.uri(f"runs/{self.run}/{name}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the block trains: the heartbeat says how it ended, and why, and the trackers end."""
        self.set_state("starting")
        try:
            yield
        except BaseException as error:
            self._beat["reason"] = str(error) or type(error).__name__
            self._trackers.finish()
            with contextlib.suppress(Exception):  # what ends the run is the other error
                self.set_state("stopped" if isinstance(error, Stopped) else "failed")
            raise
        self._trackers.finish()
        self.set_state("done")

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """While the block does something else: the heartbeat says what."""
        self.set_state(state)
        yield
        self.set_state("training")

    def step(self, step: int) -> None:
        """Note how many steps are done."""
        self._beat["step"] = step
        # The first step may have taken minutes.
        if self._beat["state"] == "starting" or time.monotonic() - self._beaten >= _BETWEEN_BEATS:
            self.set_state("training")

    def set_state(self, state: str) -> None:
        """Put the heartbeat, with this state."""
        self._beat["state"] = state
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        seconds = time.monotonic() - self._began
        beat = {"time": now} | self._beat | {"seconds": seconds, "checkpoint": self.checkpoint}
        self.writer.put(f"runs/{self.run}/{_HEARTBEAT}", json.dumps(beat, indent=1).encode())
        self._beaten = time.monotonic()

    def training(self, step: int, averages: "RunningAverages", learning_rate: float, memory: int) -> None:
        """Log the averages after `step` steps, and print the progress line. memory: bytes, at most so far."""
        seconds, waited = averages.seconds()
        rates = {
            "samples_per_second": averages.steps / seconds * self.samples_per_step,
            "data_wait": waited / seconds,
        }
        means, counts = averages.means(), dict(averages.counts)
        numbers = means | rates | {"learning_rate": learning_rate, "memory_gb": memory / 1e9} | counts
        self.event("training", step, numbers)
        losses = {name.removeprefix("loss_"): mean for name, mean in means.items() if name.startswith("loss_")}
        left = (self.steps - step) * seconds / averages.steps
        self._beat |= rates | {"losses": losses, "counts": counts, "seconds_left": left}
        beat = self._beat | {"step": step, "seconds": time.monotonic() - self._began}
        if os.environ.get(PROGRESS_LINES) != "0":
            print(progress_line(beat), flush=True)

    def skipped(self, step: int, why: str, found: "Step", keys: Iterable[str]) -> None:
        """Log a step that was left out, and the samples of all ranks in it."""
        line = {"step": step, "why": why, "loss": _number(found.loss), "gradient_norm": _number(found.norm)}
        line |= {"losses": {name: _number(value) for name, value in found.losses.items()}, "keys": list(keys)}
        self._skipped.add(line)
        print(f"step {step}/{self.steps}  left out: {why}", flush=True)

    def validation(self, step: int, metrics: dict[str, float], predictions: list[dict[str, Any]]) -> None:
        """Log the metrics of a validation, and put its predictions as predictions.jsonl, one object a line."""
        whole = {name: value for name, value in metrics.items() if "/" not in name}  # of parts of a split: many
        for what, values in {"": whole, **by_dataset(metrics)}.items():
            numbers = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            print(f"step {step}/{self.steps}  validation  {f'{what}:  ' if what else ''}{numbers}", flush=True)
        self.event("validation", step, metrics)
        self.writer.put(f"runs/{self.run}/predictions.jsonl", lines_of(predictions))

    def unreadable(self, lines: Iterable[dict[str, Any]]) -> int:
        """Log samples that could not be read, each with at least `step` and `reason`, and print the first new one.
        Returns how many the run's steps have met in all."""
        new = {}
        for line in lines:
            if line["reason"] not in self._known:
                new.setdefault(line["reason"], line)
        if new:
            self._known |= {reason: line["step"] for reason, line in new.items()}
            self._unreadable.add(*new.values())
            first = next(iter(new))
            print(f"{len(new)} samples cannot be read, and count for nothing: {first} (unreadable.jsonl)", flush=True)
        return sum(step > 0 for step in self._known.values())  # 0: of a validation

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl, and give it to the trackers."""
        row = {"kind": kind, "step": step} | dict(fields)
        self._metrics.add(row)
        self._trackers.log(row)


def read_heartbeat(store: ObjectStore, run: str) -> dict[str, Any] | None:
    """Return the progress of a run as it last wrote it (docs/formats.md); None before it began to train.

    A process that was killed writes nothing: compare `time` with the clock.
    """
    path = f"runs/{run}/{_HEARTBEAT}"
    return parse_json(store.get(path), store.uri(path)) if store.exists(path) else None


def progress_line(beat: Mapping[str, Any]) -> str:
    """Return a heartbeat, of a run that has logged a line, on one line for people."""
    losses = [f"{name} {value:.3f}" for name, value in beat["losses"].items()]
    words = {
        "step": f"{beat['step']}/{beat['steps']}",
        "loss": "  ".join(losses + [f"{name} {count}" for name, count in beat["counts"].items()]),
        "samples/s": f"{beat['samples_per_second']:.1f}",
        "data wait": f"{100 * beat['data_wait']:.0f} %",
        "time gone": clock(beat["seconds"]),
        "time left": clock(beat["seconds_left"]),
    }
    return "  ".join(f"{name} {value}" for name, value in words.items())


def read_metrics(store: ObjectStore, run: str, kind: str) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl of one kind ("training", "validation"), in order; none before the first."""
    return [line for line in read_lines(store, f"runs/{run}/metrics.jsonl") if line.get("kind") == kind]


def lines_of(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the objects as JSON, one a line."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read_lines(store: ObjectStore, path: str) -> list[dict[str, Any]]:
    """Return the objects of a file; none if there is no file. Raises ValueError if a line cannot be read."""
    found = []
    for number, line in enumerate(store.get(path).splitlines() if store.exists(path) else [], start=1):
        where, hint = f"line {number} of {store.uri(path)}", "remove that line, when no training runs"
        record = parse_json(line, where, fix=hint)
        if type(record.get("step")) is not int:
            raise ValueError(f"{where} has no `step`; {hint}")
        found.append(record)
    return found


def by_dataset(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each dataset of a validation on several, which are named `<dataset>/<metric>`. Other names
    with a slash are of parts of a split, such as accuracy/yes/no."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in metrics.items():
        dataset, _, metric = name.partition("/")
        if metric in metrics:
            found.setdefault(dataset, {})[metric] = value
    return found


def last_metrics(store: ObjectStore, run: str) -> dict[str, float]:
    """Return the metrics of the run's last validation; none where it had none."""
    validations = read_metrics(store, run, "validation")
    return {k: v for k, v in validations[-1].items() if k not in ("kind", "step")} if validations else {}


def _number(value: float) -> float | None:
    """As JSON has it, which knows no infinity; the reason says what it was."""
    return value if math.isfinite(value) else None
