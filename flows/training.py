"""One run of torchrun, for the stages that train, and what the flow UI shows of it meanwhile."""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flows.artifacts import (
    Live,
    name_run,
    publish,
    reporting,
    table_of_evaluation,
    table_of_metrics,
    table_of_progress,
    tell,
)
from flows.curves import curves
from flows.settings import Processes
from flows.supervisor import ChildFailed, ChildTimedOut, Finished, run_child
from storage.object_store import open_store
from storage.runs import checkpoints, open_folder
from storage.safe_json import parse_json
from training.log import last_metrics

# What training.log and vlbert.train print: a progress line, and which samples the run reads.
_PROGRESS = re.compile(
    r"step (?P<step>\d+)/(?P<steps>\d+)  (?P<losses>.*)  (?P<rate>\S+) samples/s  data wait (?P<wait>\d+ %)"
    r"  (?P<gone>\S+) gone  (?P<left>\S+) left$"
)
_READING = re.compile(r" samples of [^/]+/regions/(?P<detector>\S+) \(snapshot (?P<snapshot>\w+)\)")
# What training.loop prints of a run that was told to stop: PROGRAM RECIPE: stopped: ...
_STOPPED = re.compile(r"(torchrun|python) -m \S+ \S+: stopped: (?P<saved>.*)$")
# What a rank ends with that knows why, and what is printed where torchrun started it again and it goes on.
_FAILED = re.compile(r"(torchrun|python) -m \S+ \S+: (?!stopped: |interrupted$|.*another rank is gone or hangs)")
_GOES_ON = re.compile(r" goes on from |^step \d+/\d+")
# What follows where torchrun started it again: it goes on, or ends with another status than that of a stop.
_LIVES_AGAIN = re.compile(rf" goes on from |^step \d+/\d+ | failed \(exitcode: (?!{os.EX_TEMPFAIL}\))")


class TrainingStopped(RuntimeError):
    """A training was told to stop (SIGTERM or SIGINT), not by its flow, and has saved: run again, it goes on."""


@dataclass(frozen=True)
class Evaluated:
    """What a split that was evaluated came to; `place` holds the files, `submission` names those for a leaderboard."""

    split: str
    place: str
    metrics: dict[str, float | None]
    paper: dict[str, str]  # by metric, what the paper reports on that split, in %
    submission: tuple[str, ...]


@dataclass(frozen=True)
class Trained:
    """A run and what it came to: its last checkpoint, the numbers of its last validation and of each evaluation.

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

    @property
    def name(self) -> str:
        """As a flow run is called that trained it."""
        return run_name(self.recipe, self.run, self.detector, self.snapshot)

    @property
    def tags(self) -> list[str]:
        """By which the flow UI finds it."""
        return [f"recipe:{self.recipe}", f"detector:{self.detector}", f"snapshot:{self.snapshot}"]


def train(
    root: str,
    recipe: str,
    run: str,
    fields: dict[str, object],
    overrides: Sequence[str],
    processes: Processes,
    say: Callable[[str], None],
    watch: Callable[[str], None] = lambda line: None,
) -> Trained:
    """Train, or go on with, `run`; fields that are None are left to the recipe, `overrides` win over all. No process is
    started for a run that is complete.

    `say` gets what a log keeps, each line with the run's name before it; `watch` gets every line as it is.
    """
    started = time.monotonic()
    from vlbert.train import find_complete  # here, because it brings torch: other stages need none

    run, peak_bytes = run or recipe, 0
    given = assigned({"data.root": root, "run": run} | fields, overrides)
    complete = find_complete(recipe, given, processes.count)
    if complete:
        say(complete)
    else:
        peak_bytes = torchrun("vlbert.train", [recipe, *given], run, processes, say, watch).peak_bytes
    store = open_store(root, write=False)
    saved, metrics = checkpoints(store, run), last_metrics(store, run)
    if not saved:
        raise RuntimeError(f"{run} ended well and left no checkpoint under {store.where(f'runs/{run}')}")
    data = open_folder(store, saved[-1]).state["data"]
    return Trained(
        run=run,
        recipe=recipe,
        detector=data["stage"].removeprefix("regions/"),
        snapshot=data["snapshots"][-1]["snapshot"],
        checkpoint=store.where(saved[-1]),
        metrics=metrics,
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes,
    )


def evaluate(
    root: str,
    recipe: str,
    trained: Trained,
    splits: Sequence[str],
    fields: dict[str, object],
    overrides: Sequence[str],
    processes: Processes,
    say: Callable[[str], None],
) -> Trained:
    """Ask the run's last checkpoint all questions of each split, by `python -m vlbert.evaluate`; what was asked before
    by the same settings is left as it is."""
    from vlbert.evaluate import find_evaluation  # here, as above

    store = open_store(root, write=False)
    run, step = trained.checkpoint.rsplit("/", 2)[1:]
    found, started, peak_bytes = [], time.monotonic(), trained.peak_bytes
    given = assigned({"data.root": root} | fields, overrides)
    for split in splits:
        place = f"runs/{run}/evaluations/{split}-{step}"
        about = find_evaluation(recipe, trained.checkpoint, split, given)
        if about:
            say(f"{run}: evaluated already, by the same settings: {store.where(place)}")
        else:
            named = [recipe, trained.checkpoint, split, *given]
            finished = torchrun("vlbert.evaluate", named, run, processes, say, lambda line: None)
            peak_bytes = max(peak_bytes, finished.peak_bytes)
            about = parse_json(store.get(f"{place}/metrics.json"), store.where(f"{place}/metrics.json"))
        submission = tuple(about["submission"])
        found.append(Evaluated(split, store.where(place), about["metrics"], about["paper"], submission))
    seconds = trained.seconds + time.monotonic() - started
    return replace(trained, evaluated=tuple(found), seconds=seconds, peak_bytes=peak_bytes)


def assigned(fields: Mapping[str, object], overrides: Sequence[str]) -> list[str]:
    """field=value of each; fields that are None are left to the recipe, and `overrides`, which come last, win."""
    return [*(f"{name}={value}" for name, value in fields.items() if value is not None), *overrides]


def torchrun(
    program: str,
    arguments: Sequence[str],
    run: str,
    processes: Processes,
    say: Callable[[str], None],
    watch: Callable[[str], None],
) -> Finished:
    """`torchrun -m PROGRAM RECIPE ... field=value ...` to its end; ChildFailed carries its last words, TrainingStopped
    what a run saved that was told to stop.

    `say` gets what a log keeps, each line with the run's name before it; `watch` gets every line as it is.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes.count}"]
    command.append(f"--max-restarts={processes.restarts}")
    command += ["-m", program, *arguments]
    # Some lines begin with the run's name as it is.
    log = paced(lambda line: say(line if line.startswith((f"{run}:", f"{run} ")) else f"{run}: {line}"))

    saved = cause = None

    def on_line(line: str) -> None:
        nonlocal saved, cause
        log(line)
        watch(line)
        if _FAILED.match(line):
            cause = cause or line
        elif _GOES_ON.search(line):
            cause = None
        if stopped := _STOPPED.match(line):
            saved = stopped["saved"]
        elif _LIVES_AGAIN.search(line):
            saved = None

    try:
        return run_child(
            command,
            on_line,
            timeout=processes.timeout,
            silence=processes.silence,
            grace=processes.grace,
            environment=processes.environment,
        )
    except ChildTimedOut:  # it stopped because of us
        raise
    except ChildFailed as error:
        if saved is None:
            if cause is None:
                raise
            # What torchrun prints behind it tells nothing more.
            raise ChildFailed(error.command, error.returncode, [cause], error.reason) from None
        raise TrainingStopped(f"{run} did not fail, it was told to stop (SIGTERM or SIGINT): {saved}") from error


def run_name(recipe: str, run: str, detector: str, snapshot: str) -> str:
    """What a flow run that trains is called: recipe, its name where that is another, regions and snapshot."""
    return " ".join([recipe, *([run] if run != recipe else []), "on", detector, "snapshot", snapshot])


class Watch:
    """Shows a training in the flow UI while it runs: a table of how far it is, and its curves."""

    def __init__(self, stage: str, root: str, recipe: str, run: str):
        self.root, self.recipe, self.run = root, recipe, run or recipe
        self.progress = Live(f"{stage}-progress", self.run)
        self.curves = Live(f"{stage}-curves", self.run, seconds=20.0, image=True)
        self.facts: dict[str, str] = {}  # how far the run says that it is: its last progress line
        tell()

    def __call__(self, line: str) -> None:
        """A line that the training printed. Nothing is asked of the storage at each: it may be out of reach, and a
        training whose lines nobody takes waits."""
        reading, progress = _READING.search(line), _PROGRESS.match(line)
        if progress:
            self.facts = {
                "step": f"{progress['step']} of {progress['steps']}",
                "loss": progress["losses"],
                "samples/s": progress["rate"],
                "data wait": progress["wait"],
                "time gone": progress["gone"],
                "time left": progress["left"],
            }
        tell(lambda: self.facts)
        if reading:
            detector, snapshot = reading["detector"], reading["snapshot"]
            name_run(
                run_name(self.recipe, self.run, detector, snapshot),
                *(f"recipe:{self.recipe}", f"detector:{detector}", f"snapshot:{snapshot}"),
            )
        elif progress:
            done = progress["step"] == progress["steps"]
            if self.progress.due or done:
                self.progress.show(table_of_progress(self.facts))
            if self.curves.due or done:
                self.draw()

    def draw(self) -> None:
        """Show the curves as far as they are written."""
        with reporting():
            picture = curves(open_store(self.root, write=False), self.run)
            if picture:
                self.curves.show(picture)
        self.curves.attempted()


def show_result(stage: str, trained: Trained, watch: Watch) -> None:
    """Leave in the flow UI what a training came to: its name, its last curves, its numbers beside the paper's."""
    name_run(trained.name, *trained.tags)
    watch.draw()
    with reporting():
        from vlbert.recipes import RECIPES  # here, as above
        from vlbert.tasks import task_of

        paper = task_of(RECIPES[trained.recipe]().task).paper
        numbers = trained.metrics, trained.checkpoint, paper, reported(trained.checkpoint)
        publish(stage, trained.run, partial(table_of_metrics, *numbers))
    for one in trained.evaluated:
        table = partial(table_of_evaluation, one.metrics, one.paper, one.place, one.submission)
        publish(f"{stage}-evaluation", f"{trained.run}-{one.split}", table)


def reported(checkpoint: str) -> dict[str, str]:
    """By metric, what the paper reports, in %, on the split that the run of ROOT/runs/RUN/STEP validates on."""
    from storage.settings import from_json  # here, as above
    from vlbert.data.vocabulary import Vocabulary
    from vlbert.tasks import make_task, settings_named, validation_split

    root, _, path = checkpoint.rpartition("/runs/")
    store = open_store(root, write=False)
    config = parse_json(store.get(f"runs/{path}/config.json"), f"{checkpoint}/config.json")
    kind = settings_named(config["task"])
    if kind is None:
        raise ValueError(
            f"{checkpoint} was trained for a task with {config['task']}, which none of those known here has"
        )
    settings = from_json(kind, config["recipe"]["task"], f"{checkpoint}/config.json")
    vocabulary = Vocabulary(store.get(f"runs/{path}/vocab.txt").decode().splitlines())
    task = make_task(settings, vocabulary, config["num_classes"])
    return task.reported(validation_split(settings)) if hasattr(task, "reported") else {}


def check_overrides(overrides: Sequence[str], settings: Mapping[str, str]) -> None:
    """ValueError where an override names a field that the stage sets; `settings` says from which of its settings."""
    for assignment in overrides:
        field = assignment.partition("=")[0]
        if field in settings:
            raise ValueError(f"override {assignment}: the stage sets {field} itself; use {settings[field]} instead")


def paced(
    say: Callable[[str], None], seconds: float = 5.0, clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """`say`, but of progress lines only a few: a flow's log is kept in a database.

    At most one in `seconds` and, later, in a hundredth of the time that has passed: about 700 in two days.
    """
    started, last = clock(), None

    def on_line(line: str) -> None:
        nonlocal last
        if _PROGRESS.match(line):
            now = clock()
            if last is not None and now - last < max(seconds, (now - started) / 100):
                return
            last = now
        say(line)

    return on_line
