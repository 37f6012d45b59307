"""What an evaluation came to, as files: predictions, metrics, what could not be asked, submission files."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.object_store import ObjectStore, open_store
from storage.reading import ShardSamples
from storage.safe_json import parse_json
from storage.settings import to_json
from training.log import Unreadable
from vlbert.checkpoint import Checkpoint
from vlbert.config import Recipe
from vlbert.tasks import splits_of, validation_split
from vlbert.tasks.base import Questions, Task
from vlbert.validate import metrics_of

METRICS, PREDICTIONS, FLAWS, PAGE = "metrics.json", "predictions.parquet", "flaws.jsonl", "index.html"

# The columns that the predictions of every task have (vlbert.tasks.Task.predictions).
_COLUMNS = {
    "key": pa.string(),
    "asked": pa.string(),
    "said": pa.string(),
    "probability": pa.float64(),
    "ranking": pa.list_(pa.struct([("said", pa.string()), ("probability", pa.float64())])),
    "truth": pa.string(),
    "score": pa.float64(),
    "boxes": pa.list_(pa.struct([("name", pa.string()), ("box", pa.list_(pa.float64()))])),
}


@dataclass(frozen=True, eq=False)
class Answered:
    """A split that one checkpoint was asked: on rank 0 all of it, in the order of the questions, elsewhere nothing.

    numbers  of the questions that `rows` answer    shuffled  rows of each text with the picture of another, if any
    missing  (number, why) of the others
    """

    checkpoint: Checkpoint
    recipe: Recipe
    task: Task
    samples: ShardSamples
    pinned: dict  # which regions were read
    questions: Questions
    numbers: list[int]
    rows: list[dict]
    shuffled: list[dict]
    missing: list[tuple[int, Unreadable]]

    @property
    def name(self) -> str:
        """RUN/step-*, or the folder."""
        return name_of(self.checkpoint.where)

    @property
    def learned_from(self) -> list[str]:
        """What it was trained on: the splits or, where the task has none, the dataset."""
        if validation_split(self.recipe.task) is not None:
            return list(self.checkpoint.task_settings.get("train_on", ()))
        dataset = self.checkpoint.config.get("recipe", {}).get("data", {}).get("dataset")
        return [dataset] if dataset else []

    def learned(self, split: str) -> bool:
        """Whether it was trained on a part of the split."""
        before = {part for one in self.learned_from for part in splits_of(self.recipe.task, one)}
        return not before.isdisjoint(splits_of(self.recipe.task, split))

    @property
    def scored_of_missing(self) -> float:
        """How many of the missing would have a score: as large a share as of the others, since a picture's questions
        are missing together (VCR asks rationales behind wrong answers, which nobody scores)."""
        scored = sum(row["score"] is not None for row in self.rows)
        return len(self.missing) * (scored / len(self.rows) if self.rows else 1)


def name_of(where: str) -> str:
    """RUN/step-* of a checkpoint, or the folder."""
    return where.rpartition("/runs/")[2]


def inputs_of(recipe: Recipe, checkpoints: Sequence[str], split: str, overrides: Sequence[str]) -> dict[str, Any]:
    """By what an evaluation is known to be the same."""
    return {
        "recipe": recipe.name,
        "checkpoints": [name_of(checkpoint) for checkpoint in checkpoints],
        "split": split,
        "overrides": [one for one in overrides if not one.startswith("data.root=")],
    }


def find_place(out: str | None, checkpoints: Sequence[str], split: str, inputs: dict) -> tuple[ObjectStore, str]:
    """Where the files go, found writable: the objects, and the names' beginning. ValueError where an evaluation with
    other inputs is there."""
    if out is None:
        root, separator, name = checkpoints[0].rpartition("/runs/")
        if not separator:
            raise ValueError(f"{checkpoints[0]} belongs to no run, whose folder would be the place: give --out FOLDER")
        run, _, step = name.partition("/")
        others = "".join(f"-with-{name_of(checkpoint).replace('/', '-')}" for checkpoint in checkpoints[1:])
        store, folder = open_store(root), f"runs/{run}/evaluations/{split}-{step}{others}/"
    else:
        store, folder = open_store(out), ""
    before = written(store, folder)
    for name, now in inputs.items() if before else ():
        if before["inputs"].get(name) != now:
            raise ValueError(
                f"{store.where(folder + METRICS)} is of an evaluation with {name} = {before['inputs'].get(name)}, "
                f"now it is {now}; name another place with --out FOLDER, or delete that one"
            )
    return store, folder


def written(store: ObjectStore, folder: str) -> dict[str, Any] | None:
    """What metrics.json of an evaluation holds that is there already."""
    if not store.exists(folder + METRICS):
        return None
    try:
        about = parse_json(store.get(folder + METRICS), store.where(folder + METRICS))
        return about if about["inputs"].keys() and about["files"] else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        where = store.where(folder + METRICS)
        raise ValueError(f"{where} is not of an evaluation; name another place with --out FOLDER") from error


def results(answered: Sequence[Answered], rows: Sequence[dict], split: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What metrics.json says of them, and the other files but the page."""
    first, task = answered[0], answered[0].task
    files = {PREDICTIONS: _parquet(rows, type(task).__name__)}
    shuffled = [row for one in answered for row in one.shuffled]
    metrics = metrics_of(task, rows, shuffled)
    unreadable = sum(len(one.missing) for one in answered)
    scores = [row["score"] for row in rows if row["score"] is not None]
    counts = {"all": sum(len(one.questions) for one in answered), "asked": len(rows), "unreadable": unreadable}
    counts["left_out"] = sum(len(one.questions.left_out) for one in answered)
    counts["flawed"] = sum(len(one.questions.flawed) for one in answered)
    flaws = [line for one in answered for line in flaws_of(one)]
    if flaws:
        files[FLAWS] = "".join(json.dumps(line) + "\n" for line in flaws).encode()
    lost = sum(one.scored_of_missing for one in answered)
    refused = None
    try:
        submission = task.submission(rows) if hasattr(task, "submission") else {}
    except ValueError as error:  # the numbers stand without it
        submission, refused = {}, str(error)
    about = {
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        "paper": task.reported(split) if hasattr(task, "reported") else {},
        "questions": counts,
        "mean_score": sum(scores) / len(scores) if scores else None,
        "mean_score_unreadable_wrong": sum(scores) / (len(scores) + lost) if scores else None,
        "trained_on": [", ".join(one.learned_from) or None for one in answered],
        "trained_on_this_split": any(one.learned(split) for one in answered),
        "untrained_detector": any(one.pinned["random_init"] for one in answered),
        "data": {name: first.pinned[name] for name in ("dataset", "stage", "snapshot")},
        "settings": [to_json(one.recipe.task) for one in answered],
        "submission": list(submission),
        "submission_refused": refused,
    }
    return about, files | submission


def flaws_of(one: Answered) -> list[dict[str, str | bool | None]]:
    """The lines of flaws.jsonl: what could not be read, what the task left out, and what it asked all the same."""
    told = [(False, reason.key, reason.reason) for _, reason in one.missing]
    told += [(False, None, line) for line in one.questions.left_out]
    told += [(True, None, line) for line in one.questions.flawed]
    return [{"checkpoint": one.name, "asked": asked, "key": key, "reason": line} for asked, key, line in told]


def _parquet(rows: Sequence[dict], task: str) -> bytes:
    """The predictions as a Parquet file; ValueError where a column is missing, or of no one type."""
    names = list(dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)]))
    lacking = [name for name in _COLUMNS if any(name not in row for row in rows)]
    if lacking:
        raise ValueError(f"the predictions of {task} have no {', '.join(lacking)}; vlbert/tasks/__init__.py says what")
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in rows], _COLUMNS.get(name))
        except pa.ArrowException as error:
            raise ValueError(f"column {name} of the predictions of {task} is of no one type: {error}") from error
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, compression="zstd")
    return file.getvalue()


def write(store: ObjectStore, folder: str, files: dict[str, bytes], about: dict[str, Any]) -> None:
    """metrics.json goes first of what was there, and comes last of what is new: with it, all is whole."""
    before = written(store, folder)
    if before:
        store.delete(folder + METRICS)
        for name in before["files"]:
            store.delete(folder + name)
    for name, data in files.items():
        store.put(folder + name, data)
    store.put(folder + METRICS, (json.dumps(about, indent=1) + "\n").encode())


def say(about: dict[str, Any], where: str) -> None:
    """The numbers, beside the paper's, and what to know about them."""
    for warning in warnings(about):
        print(warning, flush=True)
    for name, value in about["metrics"].items():
        if "/" not in name:  # of types of questions: many, and in metrics.json
            paper = f"  (the paper, %: {about['paper'][name]})" if name in about["paper"] else ""
            print(f"{name} {'-' if value is None else format(value, '.4f')}{paper}", flush=True)
    print(f"evaluated {about['inputs']['split']}: {where}", flush=True)


def warnings(about: dict[str, Any]) -> list[str]:
    """What a reader of the numbers must know, a sentence each."""
    counts, found = about["questions"], []
    if about["trained_on_this_split"]:
        found.append(f"WARNING: it was trained on this split ({', '.join(map(str, about['trained_on']))})")
    if about["untrained_detector"]:
        found.append("WARNING: the regions come from an UNTRAINED detector (random weights)")
    if counts["unreadable"]:
        found.append(
            f"{counts['unreadable']} of {counts['all']} questions could not be read: the metrics are over the others, "
            f"see {FLAWS}"
        )
        if about["mean_score"] is not None:
            wrong = about["mean_score_unreadable_wrong"]
            found[-1] += f"; counted as wrong, they take the mean score from {about['mean_score']:.4f} to {wrong:.4f}"
    if counts["left_out"]:
        found.append(f"{counts['left_out']} questions of the files are not asked, see {FLAWS}")
    if counts.get("flawed"):  # an evaluation that is there already may be older than that count
        found.append(
            f"{counts['flawed']} of {counts['all']} questions are asked although something is wrong with them, see "
            f"{FLAWS}"
        )
    if about["submission_refused"]:
        found.append(f"no submission file: {about['submission_refused']}")
    return found
