"""The numbers of the demo's experiment (demo/labels.py): means, baselines, and the lower ends that the gates hold."""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from demo.data import DemoData
from demo.labels import GROUNDING, NAME, TASKS, WITH, WITHOUT, folder_of, parse_column
from storage.manifests import parse_parquet
from storage.object_store import ObjectStore, open_store
from storage.safe_json import parse_json
from training.log import last_metrics
from vlbert.comparison.cells import Cell, cells_of
from vlbert.comparison.intervals import interval
from vlbert.comparison.plans import find_plan
from vlbert.comparison.summary import read_scores
from vlbert.datasets import vqa
from vlbert.evaluation.results import PREDICTIONS


@dataclass(frozen=True)
class Column:
    """The results of a task with a number of labels. All scores are shares from 0 to 1.

    Attributes:
        means: Mean, interval (None with one seed) and seeds of each variant, as in numbers.json.
        pair: The difference between the variants, as in numbers.json.
        baselines: Score of a random guess, by `chance`; for VQA, of the pre-trained models with another scene's image
            and of `blind_scores`, too.
        lead: Lower end of the interval of the pre-trained models' mean, less `blind` or else `chance`.
    """

    task: str
    labels: int
    title: str
    items: int
    means: Mapping[str, Mapping[str, Any]]
    pair: Mapping[str, Any]
    baselines: Mapping[str, float]
    lead: float


@dataclass(frozen=True)
class Results:
    """The results of the experiment: columns, seeds, and the grounding gap after pre-training."""

    columns: Sequence[Column]
    seeds: Sequence[int]
    gap: float  # mean
    least_gap: float  # lower end of the interval of the seed with the lowest one


def read_results(root: Path, data: DemoData, comparison: Mapping[str, Any]) -> Results:
    """Read the results of the flow `compare`, which ran with the parameters `comparison`."""
    settings, store = comparison["settings"], open_store(str(root), write=False)
    file = f"comparisons/{NAME}/numbers.json"
    numbers = parse_json(store.get(file), store.uri(file))
    plan = replace(find_plan(settings["plan"]), seeds=tuple(settings["seeds"]))
    cells = [cell for cell in cells_of(plan, str(root), settings["fields"]) if cell.variant == WITH]
    columns = []
    for column in plan.tasks:
        task, labels = parse_column(column)
        found, ours = numbers["tasks"][column], [cell for cell in cells if cell.task == column]
        if found["problem"]:
            raise RuntimeError(f"{column}: {found['problem']}")
        scored = [read_scores(store, cell, plan.tasks[column]) for cell in ours]
        scores = np.stack([each.scores for each in scored])
        baseline, baselines = np.full(scores.shape[1], found["chance"]), {}
        if task == "vqa":
            baseline = blind_scores(data.root / folder_of(column), read_rows(store, ours[0]))
            other = [float(each.metrics["accuracy_shuffled"] or math.nan) for each in scored]
            baselines = {"another image": sum(other) / len(other), "blind": float(baseline.mean())}
        baselines["chance"] = found["chance"]
        lead, title = lower_end(scores - baseline), TASKS[task].title
        (pair,) = found["pairs"]
        columns.append(Column(task, labels, title, scores.shape[1], found["means"], pair, baselines, lead))
    pretrainings = [cell for cell in cells if cell.task is None]
    gaps = [last_metrics(store, cell.run)[GROUNDING] for cell in pretrainings]
    least = min(gap_lower_end(store, cell) for cell in pretrainings)
    return Results(columns, settings["seeds"], float(np.mean(gaps)), least)


def read_rows(store: ObjectStore, cell: Cell) -> list[dict[str, Any]]:
    """Return the predictions of a cell's evaluation."""
    return parse_parquet(store.get(f"{cell.evaluation(store)}/{PREDICTIONS}")).to_pylist()


def blind_scores(folder: Path, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return the accuracy [rows] of answers that are chosen without an image.

    The answer to a question is the most frequent one among the questions of its type to train on, in `folder`.
    """
    questions = vqa.read_questions(folder, "train2014")
    counts, every = defaultdict(Counter), Counter(str(question.ground_truth) for question in questions)
    for question in questions:
        counts[question.question_type][str(question.ground_truth)] += 1
    answers = [(counts[row["question_type"]] or every).most_common(1)[0][0] for row in rows]
    return np.array([vqa.accuracy(one, row["annotator_answers"]) for one, row in zip(answers, rows, strict=True)])


def lower_end(scores: np.ndarray) -> float:
    """Return the lower end of the 95 % interval of the mean of scores [seeds, items]: with one seed, over items."""
    if (low := interval(scores)["low"]) is not None:
        return low
    return float(scores.mean() - 1.96 * scores.std() / math.sqrt(scores.size))


def gap_lower_end(store: ObjectStore, cell: Cell) -> float:
    """Return the lower end of the 95 % interval of a run's grounding gap, over masked colours and shapes."""
    rows, metrics = store.get(f"runs/{cell.run}/predictions.jsonl").splitlines(), last_metrics(store, cell.run)
    words = sum(json.loads(row)["monitored"] for row in rows)
    shares = metrics["monitored_accuracy"], metrics["monitored_accuracy_shuffled"]
    return metrics[GROUNDING] - 1.96 * math.sqrt(sum(share * (1 - share) for share in shares) / words)


def labels_saved(columns: Sequence[Column]) -> tuple[int, int] | None:
    """Return the numbers of labels a and b with the largest b / a, or None if none are saved. Give the same task's.

    With pre-training, a labels reach at least the mean that b labels reach without: with the lower end of the interval,
    or with the mean if there is one seed.
    """
    pairs = [
        (one.labels, other.labels)
        for one, other in itertools.permutations(columns, 2)
        if other.labels > one.labels
        and (one.means[WITH]["low"] or one.means[WITH]["mean"]) >= other.means[WITHOUT]["mean"]
    ]
    return max(pairs, key=lambda pair: pair[1] / pair[0], default=None)
