"""The files of an evaluation: predictions, metrics, skipped and invalid examples, submission files."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.object_store import ObjectStore, open_store
from storage.reading import ShardSamples
from storage.safe_json import parse_json
from storage.settings import as_arguments, to_json
from training.log import Unreadable
from vlbert.checkpoint import Checkpoint
from vlbert.config import Recipe
from vlbert.tasks.base import Examples, Task
from vlbert.validate import metrics_of

METRICS, PREDICTIONS, PROBLEMS, PAGE = "metrics.json", "predictions.parquet", "problems.jsonl", "index.html"

# The columns that the predictions of every task have (Task.predictions in vlbert/tasks/base.py).
_COLUMNS = {
    "key": pa.string(),
    "question": pa.string(),
    "answer": pa.string(),
    "probability": pa.float64(),
    "ranking": pa.list_(pa.struct([("answer", pa.string()), ("probability", pa.float64())])),
    "ground_truth": pa.string(),
    "score": pa.float64(),
    "boxes": pa.list_(pa.struct([("name", pa.string()), ("box", pa.list_(pa.float64()))])),
}


@dataclass(frozen=True, eq=False)
class SplitPredictions:
    """One checkpoint's predictions for a split: on rank 0 all of them, in the order of the examples, elsewhere none.

    numbers   of the examples that `rows` are about
    shuffled  rows of each text with the image of another, if the task shuffles
    missing   (number, why) of the examples without a prediction
    """

    checkpoint: Checkpoint
    recipe: Recipe
    task: Task
    samples: ShardSamples
    pinned: dict  # which regions were read
    examples: Examples
    numbers: list[int]
    rows: list[dict]
    shuffled: list[dict]
    missing: list[tuple[int, Unreadable]]

    @property
    def trained_on(self) -> list[str]:
        """The splits that it was trained on or, where the task has none, the datasets."""
        if self.recipe.task.validate_on is not None:
            return list(self.checkpoint.task_settings.get("train_on", ()))
        return sorted(self.checkpoint.config.get("recipe", {}).get("data", {}).get("datasets", ()))


def name_of(where: str) -> str:
    """RUN/step-* of a checkpoint, or the folder."""
    return where.rpartition("/runs/")[2]


def inputs_of(recipe: Recipe, checkpoints: Sequence[str], split: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluations with equal inputs are the same."""
    return {
        "recipe": recipe.name,
        "checkpoints": [name_of(checkpoint) for checkpoint in checkpoints],
        "split": split,
        "overrides": as_arguments({name: value for name, value in changes.items() if name != "data.root"}),
    }


def output_folder(out: str | None, checkpoints: Sequence[str], split: str, inputs: dict) -> tuple[ObjectStore, str]:
    """Where the files go: a store and the beginning of their names. ValueError where it holds an evaluation with other
    inputs."""
    if out is None:
        root, separator, name = checkpoints[0].rpartition("/runs/")
        if not separator:
            raise ValueError(
                f"{checkpoints[0]} belongs to no run, so there is no folder to write to: give --out FOLDER"
            )
        run, _, step = name.partition("/")
        others = "".join(f"-with-{name_of(checkpoint).replace('/', '-')}" for checkpoint in checkpoints[1:])
        store, folder = open_store(root), f"runs/{run}/evaluations/{split}-{step}{others}/"
    else:
        store, folder = open_store(out), ""
    before = read_summary(store, folder)
    for name, now in inputs.items() if before is not None else ():
        found = before.get("inputs", {}).get(name)
        if found != now:
            raise ValueError(
                f"{store.uri(folder + METRICS)} is of an evaluation with {name} = {found}, now it is {now}; name "
                "another place with --out FOLDER, or delete that one"
            )
    return store, folder


def read_summary(store: ObjectStore, folder: str) -> dict[str, Any] | None:
    """The contents of metrics.json; None where there is none."""
    path = folder + METRICS
    return parse_json(store.get(path), store.uri(path)) if store.exists(path) else None


def summarise(
    predicted: Sequence[SplitPredictions], rows: Sequence[dict], split: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The contents of metrics.json, and the other files except the page."""
    first, task = predicted[0], predicted[0].task
    files = {PREDICTIONS: _parquet(rows, type(task).__name__)}
    metrics = metrics_of(task, rows, [row for one in predicted for row in one.shuffled])
    counts = {
        "all": sum(len(one.examples) for one in predicted),
        "predicted": len(rows),
        "unreadable": sum(len(one.missing) for one in predicted),
        "skipped": sum(len(one.examples.skipped) for one in predicted),
        "invalid": sum(len(one.examples.invalid) for one in predicted),
    }
    if problems := [line for one in predicted for line in problems_of(one)]:
        files[PROBLEMS] = "".join(json.dumps(line) + "\n" for line in problems).encode()
    refused = None
    try:
        submission = task.submission(rows)
    except ValueError as error:  # the metrics stand without it
        submission, refused = {}, str(error)
    summary = {
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        "paper": task.reported(split),
        "examples": counts,
        "trained_on": [", ".join(one.trained_on) or None for one in predicted],
        "trained_on_this_split": any(split in one.trained_on for one in predicted),
        "random_init_detector": any(one.pinned["random_init"] for one in predicted),
        "data": {name: first.pinned[name] for name in ("dataset", "stage", "snapshot")},
        "settings": [to_json(one.recipe.task) for one in predicted],
        "submission": list(submission),
        "submission_refused": refused,
    }
    return summary, files | submission


def problems_of(one: SplitPredictions) -> list[dict[str, str | bool | None]]:
    """The lines of problems.jsonl: the examples that cannot be read, those skipped, and the invalid ones."""
    name = name_of(one.checkpoint.uri)
    found = [(False, reason.key, reason.reason) for _, reason in one.missing]
    found += [(False, None, line) for line in one.examples.skipped]
    found += [(True, None, line) for line in one.examples.invalid]
    return [{"checkpoint": name, "predicted": yes, "key": key, "reason": line} for yes, key, line in found]


def _parquet(rows: Sequence[dict], task: str) -> bytes:
    """The predictions as a Parquet file; ValueError where a column is missing, or of no one type."""
    columns = {}
    for name in dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)]):
        try:
            values = [row[name] if name in _COLUMNS else row.get(name) for row in rows]
            columns[name] = pa.array(values, _COLUMNS.get(name))
        except (KeyError, pa.ArrowException) as error:
            raise ValueError(
                f"column {name} of the predictions of {task} is missing or of no one type ({error}); Task.predictions "
                "says what (vlbert/tasks/base.py)"
            ) from error
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, compression="zstd")
    return file.getvalue()


def write(store: ObjectStore, folder: str, files: dict[str, bytes], summary: dict[str, Any]) -> None:
    """Writes metrics.json last: where it is, all files are there."""
    for name, data in files.items():
        store.put(folder + name, data)
    store.put(folder + METRICS, (json.dumps(summary, indent=1) + "\n").encode())


def print_summary(summary: dict[str, Any], where: str) -> None:
    """Prints the warnings, and the metrics beside the paper's."""
    for warning in warnings(summary):
        print(warning, flush=True)
    for name, value in summary["metrics"].items():
        if "/" not in name:  # those of question types are many, and in metrics.json
            paper = f"  (the paper, %: {summary['paper'][name]})" if name in summary["paper"] else ""
            print(f"{name} {'-' if value is None else format(value, '.4f')}{paper}", flush=True)
    print(f"evaluated {summary['inputs']['split']}: {where}", flush=True)


def warnings(summary: dict[str, Any]) -> list[str]:
    """What a reader of the metrics must know, a sentence each."""
    counts, found = summary["examples"], []
    if summary["trained_on_this_split"]:
        found.append(f"WARNING: it was trained on this split ({', '.join(map(str, summary['trained_on']))})")
    if summary["random_init_detector"]:
        found.append("WARNING: the regions come from an UNTRAINED detector (random weights)")
    for kind, what in (
        ("unreadable", f"of {counts['all']} examples could not be read: the metrics are over the others"),
        ("skipped", "examples of the files are skipped"),
        ("invalid", f"of {counts['all']} examples are invalid and count as they are"),
    ):
        found += [f"{counts[kind]} {what}, see {PROBLEMS}"] * bool(counts[kind])
    if summary["submission_refused"]:
        found.append(f"no submission file: {summary['submission_refused']}")
    return found
