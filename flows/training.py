"""One run of `torchrun -m vlbert.train`, for the stages that train."""

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flows.settings import Processes
from flows.supervisor import run_child
from storage.objects import open_objects
from vlbert.record import last_metrics

_PROGRESS_SECONDS = 5.0  # between progress lines that are passed on; all others are
_PROGRESS = re.compile(r"step \d+/\d+ .* left$")


@dataclass(frozen=True)
class Trained:
    """A run and what it came to: its last checkpoint and the numbers of its last validation.

    vocabulary is, after pre-training, a vocab.txt on this machine with the words of the run. peak_bytes is the memory
    of its largest process.
    """

    run: str
    checkpoint: str
    metrics: dict[str, float]
    vocabulary: str | None
    seconds: float
    peak_bytes: int


def train(
    root: str,
    recipe: str,
    run: str,
    fields: dict[str, object],
    overrides: Sequence[str],
    processes: Processes,
    say: Callable[[str], None],
) -> Trained:
    """Train, or go on with, `run`; fields that are None are left to the recipe, `overrides` win over all."""
    started = time.monotonic()
    run = run or recipe
    given = {"data.root": root, "run": run} | {name: value for name, value in fields.items() if value is not None}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes.count}"]
    command += ["-m", "vlbert.train", recipe, *(f"{name}={value}" for name, value in given.items()), *overrides]
    finished = run_child(
        command,
        # Some lines begin with the run's name as it is.
        paced(lambda line: say(line if line.startswith(run) else f"{run}: {line}"), _PROGRESS_SECONDS),
        timeout=processes.timeout,
        silence=processes.silence,
        environment=processes.environment,
    )
    from vlbert.checkpoint import checkpoints  # here, because it brings torch, which stages without it need not load

    objects = open_objects(root)
    saved, metrics = checkpoints(objects, run), last_metrics(objects, run)
    if not saved:
        raise RuntimeError(f"{run} ended well and left no checkpoint under {objects.where(f'runs/{run}')}")
    return Trained(run, objects.where(saved[-1]), metrics, None, time.monotonic() - started, finished.peak_bytes)


def check_overrides(overrides: Sequence[str], settings: Mapping[str, str]) -> None:
    """ValueError where an override names a field that the stage sets; `settings` says from which of its settings."""
    for assignment in overrides:
        field = assignment.partition("=")[0]
        if field in settings:
            raise ValueError(f"override {assignment}: the stage sets {field} itself; use {settings[field]} instead")


def paced(say: Callable[[str], None], seconds: float) -> Callable[[str], None]:
    """`say`, but of progress lines at most one in `seconds`: a flow's log is kept in a database."""
    last = time.monotonic() - seconds

    def on_line(line: str) -> None:
        nonlocal last
        now = time.monotonic()
        if _PROGRESS.match(line):
            if now - last < seconds:
                return
            last = now
        say(line)

    return on_line
