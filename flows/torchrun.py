"""Train in a flow: run torchrun in a child process, and show the run's heartbeat and curves in Prefect's UI."""

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from flows.artifacts import Artifact, escape, make_metrics_table
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
    """Raised if SIGTERM or SIGINT from outside the flow stopped a training run after it saved a checkpoint."""


@dataclass(frozen=True)
class Evaluated:
    """Result of evaluating one split."""

    split: str
    folder: str  # URI of the folder with its files
    metrics: dict[str, float | None]
    submission: tuple[str, ...]  # names of the files for a leaderboard


@dataclass(frozen=True)
class Trained:
    """Result of a complete training run."""

    run: str
    recipe: str
    detector: str  # id of the detector whose regions it read; empty if it trained a detector
    snapshot: str  # snapshots that it read, joined by " + "; empty if it trained a detector
    checkpoint: str  # URI of the last checkpoint, or of a detector's weight file
    metrics: dict[str, float]  # of the last validation
    seconds: float
    peak_bytes: int  # peak memory of the largest process
    evaluated: tuple[Evaluated, ...] = ()


def train(
    root: str,
    settings: PretrainSettings | FinetuneSettings,
    fields: dict[str, object],
    log: Log,
    watch: Watch = lambda: None,
) -> Trained:
    """Train or resume a run, unless it is complete. `fields` are recipe fields to set, by name."""
    started = time.monotonic()
    from vlbert.resume import finish_if_complete  # here, because it imports torch, which other stages do not need

    run, processes, peak_bytes = settings.resolved_recipe.run, settings.processes, 0
    fields = {"data.root": root, "run_name": run} | fields
    complete = finish_if_complete(override_values(settings.resolved_recipe, fields), processes.count * processes.nodes)
    if complete:
        log(complete)
    else:
        peak_bytes = torchrun("vlbert.train", make_arguments(settings, fields), processes, log, watch)
    store = open_store(root, write=False)
    saved = checkpoints(store, run)
    if not saved:
        raise RuntimeError(f"{run} succeeded, but there is no checkpoint under {store.uri(f'runs/{run}')}")
    data = open_folder(store, saved[-1]).state["data"]
    return Trained(
        run=run,
        recipe=settings.resolved_recipe.name,
        detector=data[0]["stage"].removeprefix("regions/"),
        snapshot=" + ".join(dataset["snapshots"][-1]["snapshot"] for dataset in data),
        checkpoint=store.uri(saved[-1]),
        metrics=last_metrics(store, run),
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes,
    )


def evaluate(root: str, settings: FinetuneSettings, trained: Trained, fields: dict[str, object], log: Log) -> Trained:
    """Evaluate each split of `settings` that has no results yet. Return `trained` with the results of all splits."""
    from vlbert.evaluation.evaluate import find_evaluation  # here, as above

    store = open_store(root, write=False)
    run, step = trained.checkpoint.rsplit("/", 2)[1:]
    evaluated, started, peak_bytes = [], time.monotonic(), trained.peak_bytes
    fields = {"data.root": root} | fields
    name, *arguments = make_arguments(settings, fields)
    changes = named_fields(settings.resolved_recipe, arguments) | fields
    for split in settings.evaluate:
        folder = f"runs/{run}/evaluations/{split}-{step}"
        result = find_evaluation(settings.resolved_recipe, trained.checkpoint, split, changes)
        if result:
            log(f"{run}: already evaluated with the same settings: {store.uri(folder)}")
        else:
            command = [name, trained.checkpoint, split, *arguments]
            peak_bytes = max(peak_bytes, torchrun("vlbert.evaluation.evaluate", command, settings.processes, log))
            result = parse_json(store.get(f"{folder}/metrics.json"), store.uri(f"{folder}/metrics.json"))
        submission = tuple(result["submission"])
        evaluated.append(Evaluated(split, store.uri(folder), result["metrics"], submission))
    seconds = trained.seconds + time.monotonic() - started
    return replace(trained, evaluated=tuple(evaluated), seconds=seconds, peak_bytes=peak_bytes)


def drop_none(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def make_arguments(settings: PretrainSettings | FinetuneSettings, fields: Mapping[str, object]) -> list[str]:
    """Return the arguments of `vlbert train`: the recipe, `fields` and the overrides. Overrides take precedence."""
    recipe = settings.recipe if isinstance(settings, PretrainSettings) else settings.recipe_name
    return [*shlex.split(recipe), *as_arguments(fields), *settings.overrides]


def check_overrides(overrides: Sequence[str], settings: Mapping[str, str]) -> None:
    """Raise ValueError if an override sets a field that a stage setting controls. `settings` maps field to setting."""
    for argument in overrides:
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        field = name.removeprefix("no_")
        if argument.startswith("--") and field in settings:
            raise ValueError(f"override {argument}: {field} is set by the stage; change {settings[field]} instead")


def torchrun(
    program: str, arguments: Sequence[str], processes: Processes, log: Log, watch: Watch = lambda: None
) -> int:
    """Run `training.launch -m PROGRAM ARGUMENTS...` on all nodes, and return the peak memory in bytes.

    `log` and `watch` are passed to `run_child`. Progress lines are turned off.

    Raises:
        ChildFailed: The training run failed. `tail` contains the error of the failed rank.
        TrainingStopped: The training run was stopped by a signal. The message names the saved checkpoint.
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
        # The status STOPPED of training.program; after a time limit, this process has stopped the training.
        if isinstance(error, ChildTimedOut) or error.returncode != os.EX_TEMPFAIL:
            raise
        stopped = [line for line in error.tail if " stopped: " in line]
        message = f"the training did not fail; it was stopped by SIGTERM or SIGINT: {' '.join(stopped)}"
        raise TrainingStopped(message) from error


def show_training(stage: str, root: str, run: str, log: Log, training: Callable[[Watch], Trained]) -> Trained:
    """Run `training` and return its result. Show progress and curves in Prefect's UI, and metrics at the end.

    `training` is called with a function that updates the progress in the UI.
    """
    artifact, started = Artifact(stage, run), datetime.now(UTC)

    def progress_page(report: Log = log) -> str:
        store = open_store(root, write=False)
        beat = read_heartbeat(store, run)
        # Until the training starts, the heartbeat is that of the process which it resumes.
        if beat is not None and beat["state"] != "done" and datetime.fromisoformat(beat["time"]) < started:
            beat = None
        progress = "starting" if beat is None else beat["state"]
        if beat is not None and beat["losses"] is not None:
            progress += f": {progress_line(beat)}"
            report(f"{run}: {progress}")
        image = draw_curves(store, run)
        return escape(progress) + (f"\n\n![curves]({image})" if image else "")

    def result_page() -> str:
        parts = [f"{escape(trained.checkpoint)}\n\n{make_metrics_table(trained.metrics)}", progress_page(str)]
        for split in trained.evaluated:
            files = ", ".join(["index.html", *split.submission])
            parts.append(f"{escape(f'{split.folder}: {files}')}\n\n{make_metrics_table(split.metrics)}")
        return "\n\n".join(parts)

    trained = training(lambda: artifact.show(progress_page))
    artifact.show(result_page, now=True)
    return trained
