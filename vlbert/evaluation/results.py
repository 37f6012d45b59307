"""Read and write the files of an evaluation: predictions, metrics, problems, and submission files."""

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
    """A checkpoint's predictions for a split, in the order of the examples. Only rank 0 has them."""

    checkpoint: Checkpoint
    recipe: Recipe
    task: Task
    samples: ShardSamples
    pinned: dict  # dataset, stage and snapshot of the regions that were read
    examples: Examples
    numbers: list[int]  # index of the example of each row
    rows: list[dict]
    shuffled: list[dict]  # predictions for the same texts with other examples' images, if the task shuffles
    missing: list[tuple[int, Unreadable]]  # index of each example without a prediction, and the reason

    @property
    def trained_on(self) -> list[str]:
        """Splits that the checkpoint was trained on, or its datasets if the task has no splits."""
        if self.recipe.task.validate_on is not None:
            is_own = self.checkpoint.config["task"] == type(self.recipe.task).__name__  # not only pre-trained
            return list(self.recipe.task.train_on) if is_own else []
        return sorted(self.checkpoint.config.get("recipe", {}).get("data", {}).get("datasets", ()))


def name_of(uri: str) -> str:
    """Return RUN/step-* for the URI of a checkpoint, or the URI itself if it does not belong to a run."""
    return uri.rpartition("/runs/")[2]


def inputs_of(recipe: Recipe, checkpoints: Sequence[str], split: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that identify an evaluation. An evaluation with the same values is not repeated."""
    return {
        "recipe": recipe.name,
        "checkpoints": [name_of(checkpoint) for checkpoint in checkpoints],
        "split": split,
        "overrides": as_arguments({name: value for name, value in changes.items() if name != "data.root"}),
    }


def output_folder(out: str | None, checkpoints: Sequence[str], split: str, inputs: dict) -> tuple[ObjectStore, str]:
    """Return the store and path prefix for an evaluation's files. Raises ValueError if another evaluation is there."""
    if out is None:
        root, separator, name = checkpoints[0].rpartition("/runs/")
        if not separator:
            raise ValueError(
                f"{checkpoints[0]} belongs to no run, so there is no folder to write to; give --out FOLDER"
            )
        run, _, step = name.partition("/")
        others = "".join(f"-with-{name_of(checkpoint).replace('/', '-')}" for checkpoint in checkpoints[1:])
        store, folder = open_store(root), f"runs/{run}/evaluations/{split}-{step}{others}/"
    else:
        store, folder = open_store(out), ""
    before = read_summary(store, folder)
    recorded = inputs if before is None else before.get("inputs", {})
    for name, now in inputs.items():
        old = recorded.get(name)
        if old != now:
            raise ValueError(
                f"{store.uri(folder + METRICS)} is from an evaluation with {name}={old}, but this one has {now}; write "
                "elsewhere with --out FOLDER, or delete that evaluation"
            )
    return store, folder


def read_summary(store: ObjectStore, folder: str) -> dict[str, Any] | None:
    """Return the content of an evaluation's metrics.json, or None if it does not exist."""
    path = folder + METRICS
    return parse_json(store.get(path), store.uri(path)) if store.exists(path) else None


def summarise(
    predicted: Sequence[SplitPredictions], rows: Sequence[dict], split: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the content of metrics.json, and a dict of the other files except the page. `rows` are all predictions."""
    first, task = predicted[0], predicted[0].task
    files = {PREDICTIONS: _encode_parquet(rows, type(task).__name__)}
    metrics = metrics_of(task, rows, [row for each in predicted for row in each.shuffled])
    counts = {
        "all": sum(len(each.examples) for each in predicted),
        "predicted": len(rows),
        "unreadable": sum(len(each.missing) for each in predicted),
        "skipped": sum(len(each.examples.skipped) for each in predicted),
        "invalid": sum(len(each.examples.invalid) for each in predicted),
    }
    if problems := [line for each in predicted for line in problems_of(each)]:
        files[PROBLEMS] = "".join(json.dumps(line) + "\n" for line in problems).encode()
    refused = None
    try:
        submission = task.submission(rows)
    except ValueError as error:  # the metrics are valid without it
        submission, refused = {}, str(error)
    summary = {
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        "examples": counts,
        "trained_on": [", ".join(each.trained_on) or None for each in predicted],
        "trained_on_this_split": any(split in each.trained_on for each in predicted),
        "random_init_detector": any(each.pinned["random_init"] for each in predicted),
        "data": {name: first.pinned[name] for name in ("dataset", "stage", "snapshot")},
        "settings": [to_json(each.recipe.task) for each in predicted],
        "submission": list(submission),
        "submission_refused": refused,
    }
    return summary, files | submission


def problems_of(predicted: SplitPredictions) -> list[dict[str, str | bool | None]]:
    """Return the lines of problems.jsonl, one per unreadable, skipped or invalid example."""
    name = name_of(predicted.checkpoint.uri)
    problems = [(False, missing.key, missing.reason) for _, missing in predicted.missing]
    problems += [(False, None, line) for line in predicted.examples.skipped]
    problems += [(True, None, line) for line in predicted.examples.invalid]
    return [{"checkpoint": name, "predicted": yes, "key": key, "reason": line} for yes, key, line in problems]


def _encode_parquet(rows: Sequence[dict], task: str) -> bytes:
    """Return the predictions as a Parquet file. Raises ValueError if a column is missing or mixes types."""
    columns = {}
    for name in dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)]):
        try:
            values = [row[name] if name in _COLUMNS else row.get(name) for row in rows]
            columns[name] = pa.array(values, _COLUMNS.get(name))
        except (KeyError, pa.ArrowException) as error:
            raise ValueError(
                f"column {name} of the predictions of {task} is missing or mixes types ({error}); see Task.predictions "
                "in vlbert/tasks/base.py"
            ) from error
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, compression="zstd")
    return file.getvalue()


def write(store: ObjectStore, folder: str, files: dict[str, bytes], summary: dict[str, Any]) -> None:
    """Write the files of an evaluation. metrics.json is written last, so if it exists, the evaluation is complete."""
    for name, data in files.items():
        store.put(folder + name, data)
    store.put(folder + METRICS, (json.dumps(summary, indent=1) + "\n").encode())


def print_summary(summary: dict[str, Any], uri: str) -> None:
    """Print an evaluation's warnings and metrics."""
    for warning in warnings(summary):
        print(warning, flush=True)
    for name, value in summary["metrics"].items():
        if "/" not in name:  # the many metrics of question types are only in metrics.json
            print(f"{name} {'-' if value is None else format(value, '.4f')}", flush=True)
    print(f"evaluated {summary['inputs']['split']}: {uri}", flush=True)


def warnings(summary: dict[str, Any]) -> list[str]:
    """Return an evaluation's warnings about its metrics, one sentence each."""
    counts, lines = summary["examples"], []
    if summary["trained_on_this_split"]:
        lines.append(f"WARNING: the model was trained on this split ({', '.join(map(str, summary['trained_on']))})")
    if summary["random_init_detector"]:
        lines.append("WARNING: the regions come from an UNTRAINED detector (random weights)")
    for kind, text in (
        ("unreadable", f"of {counts['all']} examples could not be read: the metrics are over the others"),
        ("skipped", "examples in the task's files were skipped"),
        ("invalid", f"of {counts['all']} examples are invalid, but included in the metrics"),
    ):
        lines += [f"{counts[kind]} {text}, see {PROBLEMS}"] * bool(counts[kind])
    if summary["submission_refused"]:
        lines.append(f"no submission file: {summary['submission_refused']}")
    return lines
