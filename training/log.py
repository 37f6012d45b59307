"""Log a training run: metrics, heartbeat, progress lines, skipped steps and unreadable samples."""

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

if TYPE_CHECKING:  # flows read the heartbeat and the metrics without importing torch
    from training.checkpoint import Writer
    from training.metrics import RunningAverages, Step

# Environment variable: "0" turns progress lines off. Flows set it, because they log the heartbeat instead.
PROGRESS_LINES = "TRAINING_PROGRESS_LINES"
MAX_CUT = 1000  # cut texts that unreadable.jsonl names; metrics.jsonl counts all
_HEARTBEAT = "heartbeat.json"
_HEARTBEAT_SECONDS = 10.0  # minimum time between heartbeats with the same state


@dataclass(frozen=True)
class Unreadable:
    """A sample that could not be read or decoded, or whose text was cut, and the reason."""

    step: int  # optimizer step of the batch, from 1; 0 in a validation
    key: str | None  # None if the key could not be read
    reason: str  # names the sample's key or, if that is unknown, its file and offset; of a cut text, its list and row
    cut: bool = False  # the sample was used, with a shorter text


class JsonLines:
    """A JSON lines file that the writer's thread rewrites after each addition.

    When an existing file is opened, lines of steps after `step` are removed, because a resumed run repeats those steps.
    """

    def __init__(self, writer: "Writer", path: str, step: int):
        self.writer, self.path = writer, path
        records = read_lines(writer.store, path)
        self.kept = [record for record in records if record["step"] <= step]
        self._data = to_json_lines(self.kept)
        if len(self.kept) < len(records):
            self._put()  # at once, so that a kill cannot lose the kept lines

    def add(self, *records: Mapping[str, Any]) -> None:
        self._data += to_json_lines(records)
        self.writer.submit(self.path, self._put)

    def _put(self) -> None:
        self.writer.store.put(self.path, self._data)


class RunLog:
    """The log files of one run. Rank 0 writes them to ROOT/runs/<run>/ (docs/formats.md, Logs of a run).

    Args:
        writer: Writer whose thread writes the files of the log.
        step: Number of optimizer steps done so far.
        metadata: Additional heartbeat fields.
        trackers: Functions that make the trackers, by name. Each tracker receives every line of metrics.jsonl.
        settings: The recipe as plain values, for trackers.
    """

    def __init__(
        self,
        writer: "Writer",
        run: str,
        step: int,
        steps: int,
        samples_per_step: int,
        metadata: Mapping[str, Any] | None = None,
        trackers: Mapping[str, MakeTracker] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.writer, self.store, self.run = writer, writer.store, run
        self.steps, self.samples_per_step = steps, samples_per_step
        names = "metrics.jsonl", "skipped.jsonl", "unreadable.jsonl"
        files = (JsonLines(writer, f"runs/{run}/{name}", step) for name in names)
        self._metrics, self._skipped, self._unreadable = files
        self._known = {line["reason"]: line for line in self._unreadable.kept}
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
            **(metadata or {}),
        }
        self._last_beat = -math.inf

    @property
    def checkpoint(self) -> str | None:
        """URI of the newest complete checkpoint, or None before the first."""
        return self.writer.saved or self._resumed_from

    def uri(self, name: str) -> str:
        """Return the URI of the file or checkpoint `name` in the run's folder."""
        return self.store.uri(f"runs/{self.run}/{name}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: at the end of the run, record its final state and any error, and finish the trackers."""
        self.set_state("starting")
        try:
            yield
        except BaseException as error:
            self._beat["reason"] = str(error) or type(error).__name__
            self._trackers.finish()
            with contextlib.suppress(Exception):  # `error` is the one that ends the run
                self.set_state("stopped" if isinstance(error, Stopped) else "failed")
            raise
        self._trackers.finish()
        self.set_state("done")

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Context manager: set the heartbeat's state to `state`, and back to "training" afterwards."""
        self.set_state(state)
        yield
        self.set_state("training")

    def step(self, step: int) -> None:
        """Record that `step` steps are done, and write the heartbeat if it is due."""
        self._beat["step"] = step
        # After the first step at once: it may have taken minutes.
        if self._beat["state"] == "starting" or time.monotonic() - self._last_beat >= _HEARTBEAT_SECONDS:
            self.set_state("training")

    def set_state(self, state: str) -> None:
        """Set the run's state, and write the heartbeat."""
        self._beat["state"] = state
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        seconds = time.monotonic() - self._began
        beat = {"time": now} | self._beat | {"seconds": seconds, "checkpoint": self.checkpoint}
        self.writer.put(f"runs/{self.run}/{_HEARTBEAT}", json.dumps(beat, indent=1).encode())
        self._last_beat = time.monotonic()

    def training(self, step: int, averages: "RunningAverages", learning_rates: dict[str, float], memory: int) -> None:
        """Log the averages since the last log line, and print a progress line. `memory` is in bytes."""
        seconds, waited = averages.seconds()
        rates = {
            "samples_per_second": averages.steps / seconds * self.samples_per_step,
            "data_wait": waited / seconds,
        }
        means, counts = averages.means(), dict(averages.counts)
        numbers = means | rates | learning_rates | {"memory_gb": memory / 1e9} | counts
        self.event("training", step, numbers)
        losses = {name.removeprefix("loss_"): mean for name, mean in means.items() if name.startswith("loss_")}
        seconds_left = (self.steps - step) * seconds / averages.steps
        self._beat |= rates | {"losses": losses, "counts": counts, "seconds_left": seconds_left}
        beat = self._beat | {"step": step, "seconds": time.monotonic() - self._began}
        if os.environ.get(PROGRESS_LINES) != "0":
            print(progress_line(beat), flush=True)

    def skipped(self, step: int, reason: str, result: "Step", keys: Iterable[str]) -> None:
        """Log a skipped step with the keys of the samples of all ranks."""
        losses = {name: _finite(value) for name, value in result.losses.items()}
        line = {"step": step, "why": reason, "loss": _finite(result.loss), "gradient_norm": _finite(result.norm)}
        self._skipped.add(line | {"losses": losses, "keys": list(keys)})
        print(f"step {step}/{self.steps}  skipped: {reason}", flush=True)

    def validation(self, step: int, metrics: dict[str, float], predictions: list[dict[str, Any]]) -> None:
        """Log and print the metrics of a validation, and write its predictions to predictions.jsonl."""
        overall = {name: value for name, value in metrics.items() if "/" not in name}  # parts of a split are too many
        for dataset, values in {"": overall, **by_dataset(metrics)}.items():
            numbers = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            print(f"step {step}/{self.steps}  validation  {f'{dataset}:  ' if dataset else ''}{numbers}", flush=True)
        self.event("validation", step, metrics)
        self.writer.put(f"runs/{self.run}/predictions.jsonl", to_json_lines(predictions))

    def unreadable(self, lines: Iterable[dict[str, Any]]) -> int:
        """Log new unreadable samples and cut texts, and print the first ones. At most MAX_CUT cut texts are logged.

        Returns the number of unreadable samples found in training data so far.
        """
        first = {line["reason"]: line for line in reversed([*lines]) if line["reason"] not in self._known}
        for cut, problem in ((False, "samples cannot be read and are ignored"), (True, "texts are too long and cut")):
            new = [line for line in reversed(first.values()) if line.get("cut", False) == cut]
            if kept := new[: MAX_CUT - sum(line.get("cut", False) for line in self._known.values())] if cut else new:
                self._known |= {line["reason"]: line for line in kept}
                self._unreadable.add(*kept)
                print(f"{len(new)} {problem}: {kept[0]['reason']} (see unreadable.jsonl)", flush=True)
        return sum(line["step"] > 0 and not line.get("cut") for line in self._known.values())  # 0: in a validation

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl, and pass it to the trackers."""
        row = {"kind": kind, "step": step} | dict(fields)
        self._metrics.add(row)
        self._trackers.log(row)


def read_heartbeat(store: ObjectStore, run: str) -> dict[str, Any] | None:
    """Return the last heartbeat of a run (docs/formats.md), or None if the run has not started to train.

    A killed process leaves its last heartbeat behind: to detect this, compare `time` with the clock.
    """
    path = f"runs/{run}/{_HEARTBEAT}"
    return parse_json(store.get(path), store.uri(path)) if store.exists(path) else None


def progress_line(beat: Mapping[str, Any]) -> str:
    """Format a heartbeat as a progress line. The run must already have logged training metrics."""
    losses = [f"{name} {value:.3f}" for name, value in beat["losses"].items()]
    words = {
        "step": f"{beat['step']}/{beat['steps']}",
        "loss": "  ".join(losses + [f"{name} {count}" for name, count in beat["counts"].items()]),
        "samples/s": f"{beat['samples_per_second']:.1f}",
        "data wait": f"{100 * beat['data_wait']:.0f} %",
        "time elapsed": clock(beat["seconds"]),
        "time left": clock(beat["seconds_left"]),
    }
    return "  ".join(f"{name} {value}" for name, value in words.items())


def read_metrics(store: ObjectStore, run: str, kind: str) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl whose `kind` matches, such as "training" or "validation"."""
    return [line for line in read_lines(store, f"runs/{run}/metrics.jsonl") if line.get("kind") == kind]


def to_json_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode the objects as JSON, one per line."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read_lines(store: ObjectStore, path: str) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file, or [] if there is no file. Raises ValueError if a line is damaged."""
    records = []
    for number, line in enumerate(store.get(path).splitlines() if store.exists(path) else [], start=1):
        location, hint = f"line {number} of {store.uri(path)}", "remove that line while no training is running"
        record = parse_json(line, location, fix=hint)
        if type(record.get("step")) is not int:
            raise ValueError(f"{location} has no `step`; {hint}")
        records.append(record)
    return records


def by_dataset(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group the metrics named `<dataset>/<metric>` by dataset, if `metrics` also has the plain `<metric>`.

    Other names with a slash, such as accuracy/yes/no (the accuracy on yes/no questions), are left out.
    """
    datasets: dict[str, dict[str, Any]] = {}
    for name, value in metrics.items():
        dataset, _, metric = name.partition("/")
        if metric in metrics:
            datasets.setdefault(dataset, {})[metric] = value
    return datasets


def last_metrics(store: ObjectStore, run: str) -> dict[str, float]:
    """Return the metrics of the run's last validation, or an empty dict if there was none."""
    validations = read_metrics(store, run, "validation")
    return {k: v for k, v in validations[-1].items() if k not in ("kind", "step")} if validations else {}


def _finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, because JSON has no infinity or NaN."""
    return value if math.isfinite(value) else None
