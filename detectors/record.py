"""What a run says while it trains: progress lines, metrics.jsonl, TensorBoard, a heartbeat, and what it left out."""

import contextlib
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detectors.stopping import Stopped
from storage.objects import Objects

if TYPE_CHECKING:  # flows read what a run says, and need no torch for it
    from detectors.measures import Line, Step
    from detectors.writer import Writer

_HEARTBEAT = "heartbeat.json"
_BETWEEN_BEATS = 10.0  # seconds, at least, where the state is the same


class Record:
    """Rank 0's log of one run, under ROOT/runs/<run>/: metrics.jsonl (an object a line, by step), unreadable.jsonl (one
    a sample that could not be read, by the step that first met it), skipped.jsonl (one a step that was left out),
    heartbeat.json and tensorboard/.

    `step` of `steps` are done already, by `processes` together. On a bucket all are kept in a temporary folder, and put
    there with every `publish`; the heartbeat is put by itself.
    """

    def __init__(self, writer: "Writer", run: str, step: int, steps: int, samples_per_step: int, processes: int = 1):
        from torch.utils.tensorboard import SummaryWriter

        objects = writer.objects
        self.writer, self.objects, self.run = writer, objects, run
        self.steps, self.samples_per_step = steps, samples_per_step
        folder = objects.local_path(f"runs/{self.run}")
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = Path(self._temporary.name) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep_until(step, "metrics.jsonl")
        self._keep_until(step, "skipped.jsonl")
        self._known = {line["reason"] for line in self._keep_until(step, "unreadable.jsonl")}
        self._metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115  closed in close()
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1 if step else 0)
        self._began = time.monotonic()
        self._resumed = self.where(f"step-{step:07d}") if step else None
        self._beat: dict[str, Any] = {
            "step": step,
            "steps": steps,
            "state": "starting",
            **dict.fromkeys(("samples_per_second", "losses", "data_wait", "seconds_left")),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": processes,
        }
        self._beaten = -math.inf

    @property
    def checkpoint(self) -> str | None:
        """Where the newest whole checkpoint is; None before the first."""
        return self.writer.saved or self._resumed

    def where(self, name: str) -> str:
        """One of the run's files in full."""
        return self.objects.where(f"runs/{self.run}/{name}")

    def _keep_until(self, step: int, name: str) -> list[dict[str, Any]]:
        """The lines of a file. What a stopped run wrote after its last checkpoint will be done again, so it goes."""
        path = f"runs/{self.run}/{name}"
        if not self.objects.exists(path):
            return []
        lines = self.objects.get(path).decode().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if self._temporary is not None:
            (self.folder / name).write_text("".join(kept), encoding="utf-8")
        elif kept != lines:
            self.objects.put(path, "".join(kept).encode())  # at once: a kill must not cost the lines that stay
        return [json.loads(line) for line in kept]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the block trains; tells in the heartbeat how it ended, and closes."""
        self._enter("training")
        try:
            yield
        except BaseException as error:
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
        """So many steps are done."""
        self._beat["step"] = step
        if time.monotonic() - self._beaten >= _BETWEEN_BEATS:
            self._put_beat()

    def _enter(self, state: str) -> None:
        self._beat["state"] = state
        self._put_beat()

    def _put_beat(self) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        beat = {"time": now} | self._beat | {"checkpoint": self.checkpoint}
        self.writer.put(f"runs/{self.run}/{_HEARTBEAT}", json.dumps(beat, indent=1).encode())
        self._beaten = time.monotonic()

    def training(self, step: int, line: "Line", learning_rate: float) -> None:
        """What the steps since the last line came to, after `step` of them; prints the progress line."""
        rate = line.steps / line.seconds
        samples_per_second, left = rate * self.samples_per_step, (self.steps - step) / rate
        numbers = {f"loss_{name}": value for name, value in line.losses.items()}
        numbers |= line.measures | {"learning_rate": learning_rate, "samples_per_second": samples_per_second}
        numbers |= line.norms | {"data_wait": line.data_wait, "memory_gb": line.memory / 1e9} | line.counts
        said = [f"{k} {v:.3f}" for k, v in line.losses.items()] + [f"{k} {v}" for k, v in line.counts.items()]
        said += [f"{samples_per_second:.1f} samples/s", f"data wait {line.data_wait:.0%}".replace("%", " %")]
        said += [f"{_clock(time.monotonic() - self._began)} gone", f"{_clock(left)} left"]
        print("  ".join([f"step {step}/{self.steps}", *said]), flush=True)
        self._write("training", step, numbers)
        self._beat |= {"samples_per_second": samples_per_second, "losses": line.losses}
        self._beat |= {"data_wait": line.data_wait, "seconds_left": left}

    def skipped(self, step: int, why: str, found: "Step", keys: Iterable[str]) -> None:
        """A step that was left out, and the samples of all ranks in it."""
        line = {"step": step, "why": why, "loss": _number(found.loss), "gradient_norm": _number(found.norm)}
        line |= {"losses": {name: _number(value) for name, value in found.losses.items()}, "keys": list(keys)}
        with open(self.folder / "skipped.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"step {step}/{self.steps}  left out: {why}", flush=True)

    def validation(self, step: int, metrics: dict[str, float], predictions: list[dict[str, Any]]) -> None:
        """The numbers of a validation, and its predictions as predictions.jsonl, one object a line."""
        print(
            f"step {step}/{self.steps}  validation  "
            + "  ".join(f"{k} {v:.3f}" for k, v in metrics.items() if "/" not in k),  # of parts of a split: many
            flush=True,
        )
        self._write("validation", step, metrics)
        data = "".join(json.dumps(row) + "\n" for row in predictions).encode()
        self.writer.put(f"runs/{self.run}/predictions.jsonl", data)

    def unreadable(self, lines: Iterable[dict[str, Any]]) -> None:
        """Samples that could not be read, each with at least `step` and `reason`; says which are new."""
        new = {}
        for line in lines:
            if line["reason"] not in self._known:
                new.setdefault(line["reason"], line)
        if new:
            self._known |= new.keys()
            with open(self.folder / "unreadable.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in new.values())
            more = f"; and {len(new) - 3} more, see unreadable.jsonl" if len(new) > 3 else ""
            print(
                f"{len(new)} samples cannot be read, and count for nothing: {'; '.join(list(new)[:3])}{more}",
                flush=True,
            )

    def event(self, kind: str, step: int, about: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl that is no measurement."""
        self._metrics.write(json.dumps({"kind": kind, "step": step} | dict(about)) + "\n")
        self._metrics.flush()

    def _write(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self.event(kind, step, numbers)
        for name, value in numbers.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def publish(self) -> None:
        """Have a bucket brought up to date; on a folder everything is there already."""
        if self._temporary is not None:
            for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                # Read now: it grows while the writer writes.
                self.writer.put(f"runs/{self.run}/{file.relative_to(self.folder)}", file.read_bytes())

    def close(self, state: str = "done") -> None:
        """The end, in this state."""
        self._metrics.close()
        self._board.close()
        self.publish()
        if self._temporary is not None:
            self._temporary.cleanup()
        self._enter(state)


def read_heartbeat(objects: Objects, run: str) -> dict[str, Any] | None:
    """How far a run is, as it last said itself (docs/formats.md); None before it began to train.

    A process that was killed says nothing: who watches compares `time` with the clock.
    """
    path = f"runs/{run}/{_HEARTBEAT}"
    return json.loads(objects.get(path)) if objects.exists(path) else None


def read_metrics(objects: Objects, run: str, kind: str) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of one kind ("training" or "validation"), in order; none before the run wrote any."""
    path = f"runs/{run}/metrics.jsonl"
    if not objects.exists(path):
        return []
    text = objects.get(path).decode()
    whole = text[: text.rfind("\n") + 1]  # a run that writes just now, or was killed, may leave half a line
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if line["kind"] == kind]


def last_metrics(objects: Objects, run: str) -> dict[str, float]:
    """The numbers of the run's last validation; none where it had none."""
    validations = read_metrics(objects, run, "validation")
    return {k: v for k, v in validations[-1].items() if k not in ("kind", "step")} if validations else {}


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _number(value: float) -> float | None:
    """As JSON has it, which knows no infinity; what it was, the reason tells."""
    return value if math.isfinite(value) else None
