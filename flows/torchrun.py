"""Training as a flow does it: torchrun in a child process, and the run's heartbeat and metrics shown in the flow UI."""

import contextvars
import os
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from flows.artifacts import (
    Live,
    name_run,
    publish,
    reporting,
    show_progress,
    table_of_evaluation,
    table_of_metrics,
    table_of_progress,
)
from flows.settings import FinetuneSettings, PretrainSettings, Processes
from flows.supervisor import ChildFailed, ChildTimedOut, Finished, run_child
from storage.object_store import ObjectStore, open_store
from storage.runs import checkpoints, open_folder
from storage.safe_json import parse_json
from storage.settings import as_arguments, named_fields, override_values
from training.curves import curves
from training.log import PROGRESS_LINES, last_metrics, progress_line, progress_of, read_heartbeat

_BETWEEN_READS = 5.0  # seconds between two reads of a heartbeat
_LAST_READ = 10.0  # seconds that a read may still take after the training has ended
_STOPPED = (os.EX_TEMPFAIL, 128 + signal.SIGTERM, 128 + signal.SIGINT)  # exit statuses of a training told to stop
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where training.launch writes the error of the rank that failed first
OnHeartbeat = Callable[[Mapping[str, Any]], None]


class TrainingStopped(RuntimeError):
    """A training got SIGTERM or SIGINT, not from its flow. It has saved; run again, it goes on."""


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of one split; `folder` holds its files, `submission` names those for a leaderboard."""

    split: str
    folder: str
    metrics: dict[str, float | None]
    paper: dict[str, str]  # by metric, what the paper reports on that split, in %
    submission: tuple[str, ...]


@dataclass(frozen=True)
class Trained:
    """A training that is complete: its last checkpoint, the metrics of its last validation and of each evaluation.

    detector and snapshot say which regions it read; peak_bytes is the memory of its largest process.
    """

    run: str
    recipe: str
    detector: str
    snapshot: str
    checkpoint: str
    metrics: dict[str, float]
    seconds: float
    peak_bytes: int
    evaluated: tuple[Evaluated, ...] = ()


def train(
    root: str,
    settings: PretrainSettings | FinetuneSettings,
    fields: dict[str, object],
    log: Callable[[str], None],
    monitor: OnHeartbeat = lambda beat: None,
) -> Trained:
    """Train, or go on with, the run of these settings, with fields of the recipe set. No process is started for a run
    that is complete. log, monitor: as in `torchrun`.
    """
    started = time.monotonic()
    from vlbert.resume import find_complete  # here, because it brings torch: other stages need none

    run, processes, peak_bytes = settings.made.run, settings.processes, 0
    fields = {"data.root": root, "run_name": run} | fields
    complete = find_complete(override_values(settings.made, fields), processes.world)
    if complete:
        log(complete)
    else:
        peak_bytes = torchrun(
            "vlbert.train", command_of(settings, fields), root, run, processes, log, monitor
        ).peak_bytes
    store = open_store(root, write=False)
    saved, metrics = checkpoints(store, run), last_metrics(store, run)
    if not saved:
        raise RuntimeError(f"{run} ended well and left no checkpoint under {store.where(f'runs/{run}')}")
    data = open_folder(store, saved[-1]).state["data"]
    return Trained(
        run=run,
        recipe=settings.made.name,
        detector=data[0]["stage"].removeprefix("regions/"),
        snapshot=" + ".join(dataset["snapshots"][-1]["snapshot"] for dataset in data),
        checkpoint=store.where(saved[-1]),
        metrics=metrics,
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes,
    )


def evaluate(
    root: str, settings: FinetuneSettings, trained: Trained, fields: dict[str, object], log: Callable[[str], None]
) -> Trained:
    """Evaluate the run's last checkpoint on each split with `vlbert evaluate`, except where the same settings
    have evaluated it before."""
    from vlbert.evaluation.evaluate import find_evaluation  # here, as above

    store = open_store(root, write=False)
    run, step = trained.checkpoint.rsplit("/", 2)[1:]
    evaluated, started, peak_bytes = [], time.monotonic(), trained.peak_bytes
    fields = {"data.root": root} | fields
    name, *arguments = command_of(settings, fields)
    changes = named_fields(settings.made, arguments) | fields
    for split in settings.evaluate:
        folder = f"runs/{run}/evaluations/{split}-{step}"
        found = find_evaluation(settings.made, trained.checkpoint, split, changes)
        if found:
            log(f"{run}: evaluated already, by the same settings: {store.where(folder)}")
        else:
            given = [name, trained.checkpoint, split, *arguments]
            finished = torchrun("vlbert.evaluation.evaluate", given, root, run, settings.processes, log)
            peak_bytes = max(peak_bytes, finished.peak_bytes)
            found = parse_json(store.get(f"{folder}/metrics.json"), store.where(f"{folder}/metrics.json"))
        submission = tuple(found["submission"])
        evaluated.append(Evaluated(split, store.where(folder), found["metrics"], found["paper"], submission))
    seconds = trained.seconds + time.monotonic() - started
    return replace(trained, evaluated=tuple(evaluated), seconds=seconds, peak_bytes=peak_bytes)


def given_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are not None; the others are left to the recipe."""
    return {name: value for name, value in fields.items() if value is not None}


def command_of(settings: PretrainSettings | FinetuneSettings, fields: Mapping[str, object]) -> list[str]:
    """Return the recipe and its arguments as `vlbert train` takes them; overrides come last, and win."""
    recipe = settings.recipe if isinstance(settings, PretrainSettings) else settings.recipe_name
    return [*shlex.split(recipe), *as_arguments(fields), *settings.overrides]


def torchrun(
    program: str,
    arguments: Sequence[str],
    root: str,
    run: str,
    processes: Processes,
    log: Callable[[str], None],
    monitor: OnHeartbeat = lambda beat: None,
) -> Finished:
    """Run `training.launch -m PROGRAM ARGUMENTS...` to its end, on all its nodes.

    log      gets each line of output and, now and then, the progress of the run, all beginning with the run's name
    monitor  gets each new heartbeat of the run, in a thread

    ChildFailed has the error of the rank that failed first, or the last lines of output. TrainingStopped says what was
    saved.
    """

    def log_named(line: str) -> None:
        log(line if line.startswith((f"{run}:", f"{run} ")) else f"{run}: {line}")

    log_progress = paced(lambda beat: log_named(progress_line(beat)))

    logged = None

    def on_beat(beat: Mapping[str, Any]) -> None:
        nonlocal logged
        if beat["losses"] not in (None, logged):  # between two lines of its log a run has nothing new to say
            logged = beat["losses"]
            log_progress(beat)
        monitor(beat)

    with tempfile.TemporaryDirectory() as folder, Heartbeat(root, run, on_beat, log_named) as heartbeat:
        error_file = Path(folder) / "error"
        try:
            return run_child(
                processes.command(program, arguments),
                log_named,
                timeout=processes.timeout,
                silence=processes.silence,
                heard_elsewhere=lambda: heartbeat.heard,
                grace=processes.grace,
                environment=processes.environment | {_ERROR_FILE: str(error_file), PROGRESS_LINES: "0"},
            )
        except ChildTimedOut:  # it stopped because of us
            raise
        except ChildFailed as error:
            heartbeat.read()
            if error.returncode in _STOPPED and heartbeat.state == "stopped":
                reason = heartbeat.beat["reason"]
                raise TrainingStopped(
                    f"{run} did not fail, it was told to stop (SIGTERM or SIGINT): {reason}"
                ) from error
            if not error_file.exists():
                raise
            raise ChildFailed(error.command, error.returncode, [error_file.read_text()], error.reason) from None


class Heartbeat:
    """The heartbeat of a run while the block runs its training: `on_beat` gets each new one.

    It is read in a thread: storage may be out of reach for minutes, and a training whose output is not read waits. What
    an earlier training left is passed over: what was there before or, if that could not be read, what is older by this
    machine's clock; those of other nodes must agree with it.

    beat   the last one of this training; None before the first
    heard  when it came, by time.monotonic()
    """

    def __init__(self, root: str, run: str, on_beat: OnHeartbeat, log: Callable[[str], None]):
        self.root, self.run, self.on_beat, self.log = root, run, on_beat, log
        self.beat: Mapping[str, Any] | None = None
        self.heard = time.monotonic()
        self._store: ObjectStore | None = None
        self._unreadable = False
        self._before: Mapping[str, Any] | None = None  # of an earlier training
        self._since: datetime | None = None  # set if that could not be read
        try:
            self._before = self._read()
        except Exception:  # noqa: BLE001  the training may be the one that makes the root, or says what is wrong
            self._since = datetime.now(UTC).replace(microsecond=0)
        self._over = threading.Event()
        context = contextvars.copy_context()  # the flow run that artifacts belong to
        self._thread = threading.Thread(target=context.run, args=(self._follow,), daemon=True)

    @property
    def state(self) -> str | None:
        """See docs/formats.md; None before the first heartbeat."""
        return self.beat and self.beat["state"]

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if error is None:
            self._thread.join(_LAST_READ)
            self.read()

    def _follow(self) -> None:
        while not self._over.wait(_BETWEEN_READS):
            self.read()

    def _read(self) -> Mapping[str, Any] | None:
        self._store = self._store or open_store(self.root, write=False)
        return read_heartbeat(self._store, self.run)

    def _is_old(self, beat: Mapping[str, Any]) -> bool:
        return self._since is not None and datetime.fromisoformat(beat["time"]) < self._since

    def read(self) -> None:
        """Read it now; the first of several failures is logged."""
        try:
            beat = self._read()
        except Exception as error:  # noqa: BLE001  a training does not end because its heartbeat cannot be read
            if not self._unreadable:
                self.log(f"the heartbeat cannot be read, this is tried again: {error}")
            self._unreadable = True
            return
        self._unreadable = False
        if beat not in (None, self._before, self.beat) and not self._is_old(beat):
            self.beat, self.heard = beat, time.monotonic()
            with reporting():
                self.on_beat(beat)


def name_training(recipe: str, run: str, detector: str, snapshot: str) -> None:
    """Name this flow run after what it trains, with tags by which the flow UI finds it."""
    names = dict.fromkeys([recipe, run])
    tags = f"recipe:{recipe}", f"detector:{detector}", f"snapshot:{snapshot}"
    name_run(f"{' '.join(names)} on {detector} snapshot {snapshot}", *tags)


class TrainingMonitor:
    """Shows a training in the flow UI: a table of its progress, and its curves. It is called with each heartbeat."""

    def __init__(self, stage: str, root: str, recipe: str, run: str):
        self.root, self.recipe, self.run = root, recipe, run or recipe
        self.progress = Live(f"{stage}-progress", self.run)
        self.curves = Live(f"{stage}-curves", self.run, share=0.05)  # an image is large: about 140 in two days
        self.named = False
        show_progress()

    def __call__(self, beat: Mapping[str, Any]) -> None:
        facts = progress_of(beat) | {"state": beat["state"]}
        show_progress(lambda: facts)
        if not self.named and "detector" in beat:
            self.named = True
            name_training(self.recipe, self.run, beat["detector"], beat["snapshot"])
        done = beat["state"] == "done"
        if self.progress.due or done:
            self.progress.show(table_of_progress(facts))
        if beat["losses"] is not None and (self.curves.due or done):
            self.draw()

    def draw(self) -> None:
        """Show the curves as far as they are written."""
        with reporting():
            image = curves(open_store(self.root, write=False), self.run)
            if image:  # in markdown: of Prefect's own image artifacts the pages print the URL, too
                self.curves.show(f"![{self.curves.key}]({image})")
        self.curves.attempted()


def show_result(
    stage: str, settings: PretrainSettings | FinetuneSettings, trained: Trained, monitor: TrainingMonitor
) -> None:
    """Show a complete training in the flow UI: its name, its last curves, its metrics and what the paper reports."""
    name_training(trained.recipe, trained.run, trained.detector, trained.snapshot)
    monitor.draw()
    with reporting():
        from vlbert.tasks import task_of  # here, as above

        paper = task_of(settings.made.task).paper
        publish(stage, trained.run, partial(table_of_metrics, trained.metrics, trained.checkpoint, paper))
    for one in trained.evaluated:
        table = partial(table_of_evaluation, one.metrics, one.paper, one.folder, one.submission)
        publish(f"{stage}-evaluation", f"{trained.run}-{one.split}", table)


def check_overrides(overrides: Sequence[str], settings: Mapping[str, str]) -> None:
    """ValueError where an override names a field that the stage sets; `settings` says from which of its settings."""
    for argument in overrides:
        named = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        field = named.removeprefix("no_")
        if argument.startswith("--") and field in settings:
            raise ValueError(f"override {argument}: the stage sets {field} itself; use {settings[field]} instead")


def paced(
    log: Callable[[Any], None], seconds: float = 5.0, clock: Callable[[], float] = time.monotonic
) -> Callable[[Any], None]:
    """`log`, but called less often: at most once in `seconds` and, later, in a hundredth of the time that has passed.
    That is about 700 times in two days; a flow's log is kept in a database."""
    started, last = clock(), None

    def log_paced(item: Any) -> None:
        nonlocal last
        now = clock()
        if last is None or now - last >= max(seconds, (now - started) / 100):
            last = now
            log(item)

    return log_paced
