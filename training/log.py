"""The log of a run: metrics.jsonl, heartbeat.json, trackers, progress lines, skipped steps, unreadable samples."""

import contextlib
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.object_store import ObjectStore, StorageUnreachable
from storage.progress import clock
from storage.safe_json import parse_json
from training.log_files import Lines
from training.stopping import Stopped
from training.trackers import WAIT_AT_END, WAIT_WHEN_STOPPED, TrackedRun, Tracker, Trackers

if TYPE_CHECKING:  # flows read the heartbeat and the metrics, and need no torch for it
    from training.metrics import Line, Step
    from training.writer import Writer

# An environment variable: "0" prints an empty line in place of each progress line. Flows set it, because they log the
# heartbeat instead. The empty line is a sign of life that needs no storage.
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


class RunLog:
    """Rank 0's log of one run, under ROOT/runs/<run>/: metrics.jsonl (an object a line, by step), unreadable.jsonl (one
    a sample that could not be read, by the step that first met it), skipped.jsonl (one a step that was left out),
    heartbeat.json and what trackers write, such as tensorboard/.

    step, steps  how many optimizer steps are done already, of how many
    processes    how many train together
    metadata     what the heartbeat says of the run beside its progress
    trackers     by name; they get each line of metrics.jsonl
    settings     the recipe as plain values, for trackers

    On a bucket all files are kept in a temporary folder, and `publish` puts them; the heartbeat is put by itself.
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
        trackers: Mapping[str, Tracker] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        store = writer.store
        self.writer, self.store, self.run = writer, store, run
        self.steps, self.samples_per_step = steps, samples_per_step
        folder = store.local_path(f"runs/{self.run}")
        self._temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if folder is None else None
        self.folder = Path(self._temporary.name) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {name: self._keep_until(step, name) for name in ("metrics.jsonl", "skipped.jsonl", "unreadable.jsonl")}
        self._known = {line["reason"]: line["step"] for line in kept["unreadable.jsonl"]}
        self._lines = {name: Lines(self.folder / name, writer.log) for name in kept}
        tracked = TrackedRun(run, step, steps, self.folder, settings or {}, writer.log)
        self._trackers = Trackers(trackers or {}, tracked)
        self._began = self._line_began = time.monotonic()
        self._save_waited = 0.0
        self._resumed_from = self.where(f"step-{step:07d}") if step else None
        self._beat: dict[str, Any] = {
            "step": step,
            "steps": steps,
            "state": "starting",
            "reason": None,
            "resumed_from": self._resumed_from,
            **dict.fromkeys(("samples_per_second", "losses", "counts", "data_wait", "save_wait", "seconds_left")),
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

    def where(self, name: str) -> str:
        """One of the run's files in full."""
        return self.store.where(f"runs/{self.run}/{name}")

    def _keep_until(self, step: int, name: str) -> list[dict[str, Any]]:
        """The lines of a file. What a stopped run wrote after its last checkpoint will be done again, so it goes."""
        path = f"runs/{self.run}/{name}"
        if not self.store.exists(path):
            return []
        data = self.store.get(path)
        found = _parsed(data, self.store.where(path))
        kept = b"".join(line for line, record in found if record["step"] <= step)
        if self._temporary is not None:
            (self.folder / name).write_bytes(kept)
        elif kept != data:
            self.store.put(path, kept)  # at once: a kill must not cost the lines that stay
        return [record for _, record in found if record["step"] <= step]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the block trains: the heartbeat says how it ended, and why, and the log is closed."""
        self._enter("starting")
        try:
            yield
        except BaseException as error:
            self._beat["reason"] = str(error) or type(error).__name__
            with contextlib.suppress(Exception):  # what ends the run is the other error
                self.close("stopped" if isinstance(error, Stopped) else "failed")
            raise
        self.close("done")

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """While the block does something else: the heartbeat says what."""
        self._enter(state)
        yield
        self._enter("training")

    def step(self, step: int) -> None:
        """Note how many steps are done."""
        self._beat["step"] = step
        if self._beat["state"] == "starting":  # the first may have taken minutes: it compiles
            self._enter("training")
        elif time.monotonic() - self._beaten >= _BETWEEN_BEATS:
            self._put_beat()

    def _enter(self, state: str) -> None:
        self._beat["state"] = state
        self._put_beat()

    def _put_beat(self) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        seconds = time.monotonic() - self._began
        beat = {"time": now} | self._beat | {"seconds": seconds, "checkpoint": self.checkpoint}
        self.writer.put(f"runs/{self.run}/{_HEARTBEAT}", json.dumps(beat, indent=1).encode())
        self._beaten = time.monotonic()

    def training(self, step: int, line: "Line", learning_rate: float) -> None:
        """Log the means of the steps since the last line, after `step` of them; prints the progress line."""
        rate = line.steps / line.seconds
        samples_per_second, left = rate * self.samples_per_step, (self.steps - step) / rate
        numbers = {f"loss_{name}": value for name, value in line.losses.items()}
        numbers |= line.measures | {"learning_rate": learning_rate, "samples_per_second": samples_per_second}
        waits = {"data_wait": line.data_wait, "save_wait": self._share_of_saving()}
        numbers |= line.norms | waits | {"memory_gb": line.memory / 1e9} | line.counts
        self.event("training", step, numbers)
        self._beat |= {"samples_per_second": samples_per_second, "losses": line.losses, "counts": line.counts}
        self._beat |= waits | {"seconds_left": left}
        beat = self._beat | {"step": step, "seconds": time.monotonic() - self._began}
        print("" if os.environ.get(PROGRESS_LINES) == "0" else progress_line(beat), flush=True)

    def _share_of_saving(self) -> float:
        """Of all the time since the last line, in how much saves held up the training."""
        now, waited = time.monotonic(), self.writer.waited
        share = (waited - self._save_waited) / max(1e-9, now - self._line_began)
        self._line_began, self._save_waited = now, waited
        return share

    def skipped(self, step: int, why: str, found: "Step", keys: Iterable[str]) -> None:
        """A step that was left out, and the samples of all ranks in it."""
        line = {"step": step, "why": why, "loss": _number(found.loss), "gradient_norm": _number(found.norm)}
        line |= {"losses": {name: _number(value) for name, value in found.losses.items()}, "keys": list(keys)}
        self._lines["skipped.jsonl"].add([line])
        print(f"step {step}/{self.steps}  left out: {why}", flush=True)

    def validation(self, step: int, metrics: dict[str, float], predictions: list[dict[str, Any]]) -> None:
        """The numbers of a validation, and its predictions as predictions.jsonl, one object a line."""
        whole = {name: value for name, value in metrics.items() if "/" not in name}  # of parts of a split: many
        for what, values in {"": whole, **by_dataset(metrics)}.items():
            numbers = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            print(f"step {step}/{self.steps}  validation  {f'{what}:  ' if what else ''}{numbers}", flush=True)
        self.event("validation", step, metrics)
        data = "".join(json.dumps(row) + "\n" for row in predictions).encode()
        self.writer.put(f"runs/{self.run}/predictions.jsonl", data)

    def unreadable(self, lines: Iterable[dict[str, Any]]) -> int:
        """Samples that could not be read, each with at least `step` and `reason`; says which are new, and returns how
        many the run's steps have met in all."""
        new = {}
        for line in lines:
            if line["reason"] not in self._known:
                new.setdefault(line["reason"], line)
        if new:
            self._known |= {reason: line["step"] for reason, line in new.items()}
            self._lines["unreadable.jsonl"].add(new.values())
            more = f"; and {len(new) - 3} more, see unreadable.jsonl" if len(new) > 3 else ""
            print(
                f"{len(new)} samples cannot be read, and count for nothing: {'; '.join(list(new)[:3])}{more}",
                flush=True,
            )
        return sum(step > 0 for step in self._known.values())  # 0: of a validation

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        row = {"kind": kind, "step": step} | dict(fields)
        self._lines["metrics.jsonl"].add([row])
        self._trackers.add(row)

    def publish(self) -> None:
        """Have a bucket brought up to date, or a folder's disk: before a checkpoint, which rests on metrics.jsonl."""
        for lines in self._lines.values():
            lines.write()
        self._trackers.wait()
        if self._temporary is None:
            metrics = self._lines["metrics.jsonl"]
            self.writer.do(f"runs/{self.run}/metrics.jsonl", metrics.sync)
            return
        for file in sorted(Path(folder, name) for folder, _, names in os.walk(self.folder) for name in names):
            # Read now: it grows while the writer writes. Trackers may remove files of theirs at any time.
            with contextlib.suppress(FileNotFoundError):
                data = file.read_bytes() if file.is_file() else None
            if data is not None:
                self.writer.put(f"runs/{self.run}/{file.relative_to(self.folder)}", data)

    def close(self, state: str = "done") -> None:
        """The end, in this state; StorageUnreachable, and the state "failed", where lines are still not written."""
        try:
            # At their end they may write files, which are published.
            self._trackers.close(WAIT_AT_END if state == "done" else WAIT_WHEN_STOPPED)
            self.publish()
            lost = [str(lines.lost) for lines in self._lines.values() if lines.lost]
            if lost:
                raise StorageUnreachable("; ".join(lost))
        except BaseException as error:
            if state == "done":
                state, self._beat["reason"] = "failed", str(error)
            raise
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()
            self._enter(state)


def read_heartbeat(store: ObjectStore, run: str) -> dict[str, Any] | None:
    """The progress of a run as it last wrote it (docs/formats.md); None before it began to train.

    A process that was killed writes nothing: compare `time` with the clock.
    """
    path = f"runs/{run}/{_HEARTBEAT}"
    return parse_json(store.get(path), store.where(path)) if store.exists(path) else None


def progress_of(beat: Mapping[str, Any]) -> dict[str, str]:
    """A heartbeat for people, by what each value is about; some are missing before the first line of the log."""
    found = {"step": f"{beat['step']} of {beat['steps']}"}
    if beat["losses"] is not None:
        losses = [f"{name} {value:.3f}" for name, value in beat["losses"].items()]
        found["loss"] = "  ".join(losses + [f"{name} {count}" for name, count in beat["counts"].items()])
        found["samples/s"] = f"{beat['samples_per_second']:.1f}"
        found["data wait"] = f"{100 * beat['data_wait']:.0f} %"
    found["time gone"] = clock(beat["seconds"])
    if beat["seconds_left"] is not None:
        found["time left"] = clock(beat["seconds_left"])
    return found


def progress_line(beat: Mapping[str, Any]) -> str:
    """The same on one line, after the first line of the log."""
    now = progress_of(beat)
    return (
        f"step {beat['step']}/{beat['steps']}  {now['loss']}  {now['samples/s']} samples/s  data wait "
        f"{now['data wait']}  {now['time gone']} gone  {now['time left']} left"
    )


def read_metrics(store: ObjectStore, run: str, kind: str) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of one kind ("training" or "validation"), in order; none before the run wrote any."""
    return [line for line in _read_lines(store, run, "metrics.jsonl") if line.get("kind") == kind]


def read_skipped(store: ObjectStore, run: str) -> list[dict[str, Any]]:
    """The lines of skipped.jsonl, in order: the steps that were left out."""
    return _read_lines(store, run, "skipped.jsonl")


def _read_lines(store: ObjectStore, run: str, name: str) -> list[dict[str, Any]]:
    path = f"runs/{run}/{name}"
    return [record for _, record in _parsed(store.get(path), store.where(path))] if store.exists(path) else []


def _parsed(data: bytes, where: str) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of a file, each with its content; ValueError names the one that cannot be read, and what to do.

    The last may be half: a run writes it just now, or was killed. It is left out.
    """
    found = []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = parse_json(line, f"line {number} of {where}")
        except ValueError:
            record = {}
        if type(record.get("step")) is not int:
            raise ValueError(
                f"line {number} of {where} is no JSON object with a `step`: {line[:60]!r}. Remove that line alone; "
                "where the training still runs, stop it first"
            )
        found.append((line, record))
    return found


def by_dataset(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of a validation on several datasets the metrics of each, which are named `<dataset>/<metric>`. Other names with a
    slash are of parts of a split, such as accuracy/yes/no."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in metrics.items():
        dataset, _, metric = name.partition("/")
        if metric in metrics:
            found.setdefault(dataset, {})[metric] = value
    return found


def last_metrics(store: ObjectStore, run: str) -> dict[str, float]:
    """The numbers of the run's last validation; none where it had none."""
    validations = read_metrics(store, run, "validation")
    return {k: v for k, v in validations[-1].items() if k not in ("kind", "step")} if validations else {}


def _number(value: float) -> float | None:
    """As JSON has it, which knows no infinity; what it was, the reason tells."""
    return value if math.isfinite(value) else None
