"""Training as a flow does it: torchrun in a child process, and the run's heartbeat and curves shown in the flow UI."""

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flows.artifacts import Artifact, escaped, table_of_metrics
from flows.settings import FinetuneSettings, PretrainSettings, Processes
from flows.supervisor import ChildFailed, ChildTimedOut, run_child
from storage.object_store import open_store
from storage.runs import checkpoints, open_folder
from storage.safe_json import parse_json
from storage.settings import as_arguments, named_fields, override_values
from training.curves import draw_curves
from training.log import PROGRESS_LINES, last_metrics, progress_line, read_heartbeat

Log = Callable[[str], object]
Watch = Callable[[], object]


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

    detector and snapshot say which regions it read; peak_bytes is the memory of its largest process. Of a detector,
    checkpoint is its weight file, and it read no regions.
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
    log: Log,
    watch: Watch = lambda: None,
) -> Trained:
    """Train, or go on with, the run of these settings, with fields of the recipe set. No process is started for a run
    that is complete. log, watch: as in `torchrun`.
    """
    started = time.monotonic()
    from vlbert.resume import find_complete  # here, because it brings torch: other stages need none

    run, processes, peak_bytes = settings.made.run, settings.processes, 0
    fields = {"data.root": root, "run_name": run} | fields
    complete = find_complete(override_values(settings.made, fields), processes.world)
    if complete:
        log(complete)
    else:
        peak_bytes = torchrun("vlbert.train", command_of(settings, fields), processes, log, watch)
    store = open_store(root, write=False)
    saved = checkpoints(store, run)
    if not saved:
        raise RuntimeError(f"{run} ended well and left no checkpoint under {store.uri(f'runs/{run}')}")
    data = open_folder(store, saved[-1]).state["data"]
    return Trained(
        run=run,
        recipe=settings.made.name,
        detector=data[0]["stage"].removeprefix("regions/"),
        snapshot=" + ".join(dataset["snapshots"][-1]["snapshot"] for dataset in data),
        checkpoint=store.uri(saved[-1]),
        metrics=last_metrics(store, run),
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes,
    )


def evaluate(root: str, settings: FinetuneSettings, trained: Trained, fields: dict[str, object], log: Log) -> Trained:
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
            log(f"{run}: evaluated already, by the same settings: {store.uri(folder)}")
        else:
            given = [name, trained.checkpoint, split, *arguments]
            peak_bytes = max(peak_bytes, torchrun("vlbert.evaluation.evaluate", given, settings.processes, log))
            found = parse_json(store.get(f"{folder}/metrics.json"), store.uri(f"{folder}/metrics.json"))
        submission = tuple(found["submission"])
        evaluated.append(Evaluated(split, store.uri(folder), found["metrics"], found["paper"], submission))
    seconds = trained.seconds + time.monotonic() - started
    return replace(trained, evaluated=tuple(evaluated), seconds=seconds, peak_bytes=peak_bytes)


def given_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are not None; the others are left to the recipe."""
    return {name: value for name, value in fields.items() if value is not None}


def command_of(settings: PretrainSettings | FinetuneSettings, fields: Mapping[str, object]) -> list[str]:
    """Return the recipe and its arguments as `vlbert train` takes them; overrides come last, and win."""
    recipe = settings.recipe if isinstance(settings, PretrainSettings) else settings.recipe_name
    return [*shlex.split(recipe), *as_arguments(fields), *settings.overrides]


def check_overrides(overrides: Sequence[str], settings: Mapping[str, str]) -> None:
    """Raises ValueError if an override names a field that the stage sets; `settings`: from which of its settings."""
    for argument in overrides:
        named = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        field = named.removeprefix("no_")
        if argument.startswith("--") and field in settings:
            raise ValueError(f"override {argument}: the stage sets {field} itself; use {settings[field]} instead")


def torchrun(
    program: str, arguments: Sequence[str], processes: Processes, log: Log, watch: Watch = lambda: None
) -> int:
    """Run `training.launch -m PROGRAM ARGUMENTS...` to its end, on all its nodes; returns the peak memory in bytes.

    log, watch: as in `run_child`; progress is not among the lines that are logged.

    Raises:
        ChildFailed: with the last lines of output, which say the error of the rank that failed.
        TrainingStopped: if it was told to stop, with what was saved.
    """
    try:
        return run_child(
            processes.command(program, arguments),
            log,
            watch,
            timeout=processes.timeout,
            grace=processes.grace,
            environment=processes.environment | {PROGRESS_LINES: "0"},
        )
    except ChildFailed as error:
        # After a time limit it stopped because of us. Else training.program ends with this status.
        if isinstance(error, ChildTimedOut) or error.returncode != os.EX_TEMPFAIL:
            raise
        saved = [line for line in error.tail if " stopped: " in line]
        message = f"the training did not fail, it was told to stop (SIGTERM or SIGINT): {' '.join(saved)}"
        raise TrainingStopped(message) from error


def show_training(stage: str, root: str, run: str, log: Log, training: Callable[[Watch], Trained]) -> Trained:
    """Return what `training` returns, and show it in the flow UI: while it runs its progress and curves, then metrics.

    training: gets the function that shows how far it is.
    """
    artifact = Artifact(stage, run)

    def page(say: Log = log) -> str:
        store = open_store(root, write=False)
        beat = read_heartbeat(store, run)
        progress = "starting" if beat is None else beat["state"]
        if beat is not None and beat["losses"] is not None:
            progress += f": {progress_line(beat)}"
            say(f"{run}: {progress}")
        image = draw_curves(store, run)
        return escaped(progress) + (f"\n\n![curves]({image})" if image else "")

    def result() -> str:
        parts = [f"{escaped(trained.checkpoint)}\n\n{table_of_metrics(trained.metrics, {})}", page(str)]
        for one in trained.evaluated:
            files = ", ".join(["index.html", *one.submission])
            parts.append(f"{escaped(f'{one.folder}: {files}')}\n\n{table_of_metrics(one.metrics, one.paper)}")
        return "\n\n".join(parts)

    trained = training(lambda: artifact.show(page))
    artifact.show(result, now=True)
    return trained
