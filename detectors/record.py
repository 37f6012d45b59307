"""What a run says while it trains: progress lines, metrics.jsonl, unreadable.jsonl and TensorBoard."""

import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from storage.objects import Objects


class Record:
    """Rank 0's log of one run, under ROOT/runs/<run>/: metrics.jsonl (an object a line, by step), unreadable.jsonl (one
    a sample that could not be read, by the step that first met it) and tensorboard/.

    `step` of `steps` are done already. On a bucket all are kept in a temporary folder, and put there with every
    `publish`.
    """

    def __init__(self, objects: Objects, run: str, step: int, steps: int, samples_per_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.objects, self.run, self.steps, self.samples_per_step = objects, run, steps, samples_per_step
        folder = objects.local_path(f"runs/{self.run}")
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = Path(self._temporary.name) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep_until(step, "metrics.jsonl")
        self._known = {line["reason"] for line in self._keep_until(step, "unreadable.jsonl")}
        self._metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115  closed in close()
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1 if step else 0)
        self._since, self._since_step = time.monotonic(), step

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

    def training(
        self, step: int, losses: dict[str, float], learning_rate: float, counts: Mapping[str, float] | None = None
    ) -> None:
        """Losses averaged, and counts, since the last call, after `step` steps; prints the progress line."""
        counts = counts or {}
        now = time.monotonic()
        rate = (step - self._since_step) / max(1e-9, now - self._since)  # steps/s
        left = (self.steps - step) / rate
        self._since, self._since_step = now, step
        numbers = {f"loss_{name}": value for name, value in losses.items()}
        numbers |= {"learning_rate": learning_rate, "samples_per_second": rate * self.samples_per_step}
        numbers |= counts
        said = "  ".join([f"{k} {v:.3f}" for k, v in losses.items()] + [f"{k} {v}" for k, v in counts.items()])
        print(
            f"step {step}/{self.steps}  {said}  {rate * self.samples_per_step:.1f} samples/s  {_clock(left)} left",
            flush=True,
        )
        self._write("training", step, numbers)

    def validation(self, step: int, metrics: dict[str, float], predictions: list[dict[str, Any]]) -> None:
        """The numbers of a validation, and its predictions as predictions.jsonl, one object a line."""
        print(
            f"step {step}/{self.steps}  validation  "
            + "  ".join(f"{k} {v:.3f}" for k, v in metrics.items() if "/" not in k),  # of parts of a split: many
            flush=True,
        )
        self._write("validation", step, metrics)
        self._since = time.monotonic()  # validation is no training time
        self._since_step = step
        data = "".join(json.dumps(row) + "\n" for row in predictions).encode()
        self.objects.put(f"runs/{self.run}/predictions.jsonl", data)

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
        """Bring a bucket up to date; on a folder everything is there already."""
        if self._temporary is not None:
            for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                self.objects.put(f"runs/{self.run}/{file.relative_to(self.folder)}", file)

    def close(self) -> None:
        self._metrics.close()
        self._board.close()
        self.publish()
        if self._temporary is not None:
            self._temporary.cleanup()


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
