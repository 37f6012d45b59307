"""Summarise a comparison from the files of its runs: means, intervals, and differences between variants."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage.manifests import parse_parquet
from storage.object_store import ObjectStore
from storage.safe_json import parse_json
from training.log import last_metrics
from vlbert.comparison.cells import Cell
from vlbert.comparison.intervals import LEVEL, correct, detectable, interval
from vlbert.comparison.plans import ComparedTask, Plan
from vlbert.evaluation.results import METRICS, PREDICTIONS, warnings


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The evaluation of a cell: metrics, warnings, and the score of each example. `examples` are (key, question)."""

    cell: Cell
    examples: list[tuple[str, str]]
    scores: np.ndarray
    metrics: Mapping[str, float | None]
    warnings: Sequence[str]


def summarise(plan: Plan, store: ObjectStore, cells: Sequence[Cell], failed: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a comparison's numbers.json.

    `failed` maps the name of each failed run to the reason. These runs are not in the means. If a task's evaluations
    are invalid or on different examples, the task has no numbers, and its `problem` gives the reason.
    """
    complete = [cell for cell in cells if cell.run not in failed]
    pretrainings = [cell for cell in complete if cell.task is None]
    tasks = {name: _summarise_task(plan, store, name, complete) for name in plan.tasks}
    pairs = [pair for task in tasks.values() for pair in task["pairs"] if pair["p"] is not None]
    for pair, p in zip(pairs, correct([pair["p"] for pair in pairs]), strict=True):
        seen = detectable(pair["error"], pair["freedom"], len(pairs))
        pair |= {"p": p, "differs": p < LEVEL, "detectable": seen}
    return {
        "plan": plan.name,
        "title": plan.title,
        "paper": plan.paper,
        "seeds": sorted({cell.seed for cell in cells}),
        "variants": {
            name: {
                "title": variant.title,
                "pretrained": variant.pretraining is not None,
                "tasks": [*variant.finetunings],
            }
            for name, variant in plan.variants.items()
        },
        "tasks": tasks,
        "pretraining": {name: _summarise_metric(store, name, pretrainings) for name in plan.pretraining_metrics},
        "failed": [
            {"run": c.run, "variant": c.variant, "task": c.task, "seed": c.seed, "reason": failed[c.run]}
            for c in cells
            if c.run in failed
        ],
    }


def _summarise_task(plan: Plan, store: ObjectStore, name: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the mean and interval of each variant on a task, and the differences between all pairs of variants."""
    task, problem = plan.tasks[name], None
    try:
        evaluations = [read_scores(store, cell, task) for cell in cells if cell.task == name]
        _check_same_examples(evaluations)
    except ValueError as error:
        evaluations, problem = [], str(error)
    by_variant = {
        variant: {each.cell.seed: each.scores for each in evaluations if each.cell.variant == variant}
        for variant in plan.variants
    }
    chances = [value for each in evaluations if task.chance and (value := each.metrics[task.chance]) is not None]
    scores = {variant: np.stack([*by_seed.values()]) for variant, by_seed in by_variant.items() if by_seed}
    seeds = {name: {str(seed): float(each.mean()) for seed, each in by_variant[name].items()} for name in scores}
    return {
        "title": task.title,
        "split": task.split,
        "metric": task.metric,
        "examples": len(evaluations[0].scores) if evaluations else 0,
        "chance": float(np.mean(chances)) if chances else None,
        "means": {variant: interval(scores[variant]) | {"seeds": seeds[variant]} for variant in scores},
        "paper": {other: variant.paper[name] for other, variant in plan.variants.items() if name in variant.paper},
        "warnings": list(dict.fromkeys(line for each in evaluations for line in each.warnings)),
        "pairs": [  # first minus second
            {"first": first, "second": second, **interval(scores[first], scores[second]), "differs": None}
            for first, second in itertools.combinations(scores, 2)
        ],
        "problem": problem,
    }


def _check_same_examples(evaluations: list[Evaluation]) -> None:
    """Raise ValueError unless all evaluations have the same examples in the same order."""
    for other in evaluations[1:]:
        first = evaluations[0]
        if other.examples != first.examples:
            raise ValueError(
                f"{first.cell.run} was evaluated on {len(first.examples)} examples and {other.cell.run} on "
                f"{len(other.examples)}, but not the same ones. See their problems.jsonl, repair unreadable samples, "
                "and evaluate both on the same data"
            )


def read_scores(store: ObjectStore, cell: Cell, task: ComparedTask) -> Evaluation:
    """Read the scores of a cell's evaluation. Raises ValueError if the task's metric is not the mean of the scores."""
    folder = cell.evaluation(store)
    uri = store.uri(f"{folder}/{METRICS}")
    evaluation = parse_json(store.get(f"{folder}/{METRICS}"), uri)
    metrics = evaluation["metrics"]
    table = parse_parquet(store.get(f"{folder}/{PREDICTIONS}"))
    for name, names in ((task.metric, metrics), (task.column, table.column_names), (task.chance, metrics)):
        if name is not None and name not in names:
            available = ", ".join(other for other in names if "/" not in other)
            raise ValueError(f"{uri}: the evaluation has no {name}, only {available}; name another in the plan")
    rows = zip(*(table[name].to_pylist() for name in ("key", "question", task.column)), strict=True)
    known = [row for row in rows if row[2] is not None]
    most = task.within  # if given, an example's score is the share of its ranks up to this one
    scores = np.array([value if most is None else np.mean(np.atleast_1d(value) <= most) for *_, value in known], float)
    mean = scores.mean() if known else None
    if mean is None or metrics[task.metric] is None or abs(mean - metrics[task.metric]) > 1e-6:
        value = "undefined" if mean is None else f"{mean:.6f}"
        raise ValueError(
            f"{uri}: {task.metric} is {metrics[task.metric]}, but the mean of column {task.column} is {value}. "
            "Intervals need a metric that is the mean of a column; name another one in the plan"
        )
    examples = [(key, question) for key, question, _ in known]
    return Evaluation(cell, examples, scores, metrics, warnings(evaluation))


def _summarise_metric(store: ObjectStore, metric: str, pretrainings: Sequence[Cell]) -> dict[str, Any]:
    """Return each variant's mean and per-seed values of a metric at the end of pre-training."""
    by_variant: dict[str, dict[str, float]] = {}
    for cell in pretrainings:
        value = last_metrics(store, cell.run).get(metric)
        if value is not None:
            by_variant.setdefault(cell.variant, {})[str(cell.seed)] = value
    return {name: {"mean": float(np.mean([*seeds.values()])), "seeds": seeds} for name, seeds in by_variant.items()}
