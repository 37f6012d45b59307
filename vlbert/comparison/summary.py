"""What a comparison found, from the files of its runs: means, intervals, pairs."""

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from storage.object_store import ObjectStore
from storage.safe_json import parse_json
from training.log import last_metrics
from vlbert.comparison.cells import Cell
from vlbert.comparison.intervals import REPLICATES, interval
from vlbert.comparison.plans import ComparedTask, Plan
from vlbert.evaluation.results import METRICS, PREDICTIONS, warnings


@dataclass(frozen=True, eq=False)
class Scored:
    """One evaluation: its examples (key, question), a score each, the metrics and the warnings."""

    cell: Cell
    examples: list[tuple[str, str]]
    scores: np.ndarray
    metrics: Mapping[str, float | None]
    warnings: Sequence[str]


def summarise(plan: Plan, store: ObjectStore, cells: Sequence[Cell], failed: Mapping[str, str]) -> dict[str, Any]:
    """The content of numbers.json.

    failed: run -> reason; such cells have no number. A task whose evaluations do not fit the plan or each other has
    the reason as `problem`, and no numbers.
    """
    whole = [cell for cell in cells if cell.run not in failed]
    pretrainings = [cell for cell in whole if cell.task is None]
    return {
        "plan": plan.name,
        "title": plan.title,
        "paper": plan.paper,
        "seeds": sorted({cell.seed for cell in cells}),
        "replicates": REPLICATES,
        "variants": {
            name: {
                "title": variant.title,
                "pretrained": variant.pretraining is not None,
                "tasks": [*variant.finetunings],
            }
            for name, variant in plan.variants.items()
        },
        "tasks": {task: _task(plan, store, task, [cell for cell in whole if cell.task == task]) for task in plan.tasks},
        "pretraining": {name: _validated(store, name, pretrainings) for name in plan.pretraining_metrics},
        "failed": [
            {"run": c.run, "variant": c.variant, "task": c.task, "seed": c.seed, "reason": failed[c.run]}
            for c in cells
            if c.run in failed
        ],
    }


def _task(plan: Plan, store: ObjectStore, name: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """The means of a task with their intervals, and the differences of all pairs of variants."""
    task, problem = plan.tasks[name], None
    try:
        scored = _comparable([read_scores(store, cell, task) for cell in cells])
    except ValueError as error:
        scored, problem = [], str(error)
    by_variant = {
        variant: {one.cell.seed: one for one in scored if one.cell.variant == variant} for variant in plan.variants
    }
    chances = [one.metrics[task.chance] for one in scored] if task.chance else []
    chances = [chance for chance in chances if chance is not None]
    means = {
        variant: asdict(interval(_stacked(of_seeds, [*of_seeds])))
        | {"seeds": {str(seed): float(one.scores.mean()) for seed, one in of_seeds.items()}}
        for variant, of_seeds in by_variant.items()
        if of_seeds
    }
    return {
        "title": task.title,
        "split": task.split,
        "metric": task.metric,
        "examples": len(scored[0].scores) if scored else 0,
        "chance": float(np.mean(chances)) if chances else None,
        "means": means,
        "paper": {other: variant.paper[name] for other, variant in plan.variants.items() if name in variant.paper},
        "warnings": list(dict.fromkeys(line for one in scored for line in one.warnings)),
        "pairs": [_pair(*pair, by_variant) for pair in itertools.combinations(means, 2)],
        "problem": problem,
    }


def _comparable(scored: list[Scored]) -> list[Scored]:
    """The evaluations of a task; ValueError where two are not of the same examples in the same order."""
    for one in scored[1:]:
        if one.examples != scored[0].examples:
            raise ValueError(
                f"{scored[0].cell.run} was evaluated on {len(scored[0].examples)} examples and {one.cell.run} on "
                f"{len(one.examples)}, and they are not the same: see problems.jsonl beside them, mend what could not "
                "be read, and evaluate both on the same data"
            )
    return scored


def read_scores(store: ObjectStore, cell: Cell, task: ComparedTask) -> Scored:
    """An evaluation's scores; examples whose truth is not known are left out. ValueError where their mean is not the
    metric that the plan names."""
    where = store.uri(f"{cell.evaluation}/{METRICS}")
    evaluation = parse_json(store.get(f"{cell.evaluation}/{METRICS}"), where)
    metrics = evaluation["metrics"]
    table = pq.read_table(io.BytesIO(store.get(f"{cell.evaluation}/{PREDICTIONS}")), use_threads=False)
    for name, names in ((task.metric, metrics), (task.column, table.column_names), (task.chance, metrics)):
        if name is not None and name not in names:
            whole = ", ".join(other for other in names if "/" not in other)
            raise ValueError(f"{where}: its evaluation has no {name}, only {whole}; name another in the plan")
    rows = zip(*(table[name].to_pylist() for name in ("key", "question", task.column)), strict=True)
    known = [row for row in rows if row[2] is not None]
    scores = np.array([score_of(value, task.within) for *_, value in known])
    mean = scores.mean() if known else None
    if mean is None or metrics[task.metric] is None or abs(mean - metrics[task.metric]) > 1e-6:
        found = "of no row" if mean is None else f"{mean:.6f}"
        raise ValueError(
            f"{where}: {task.metric} is {metrics[task.metric]}, the mean of column {task.column} {found}: intervals "
            "need a metric that is the mean of a column; name another in the plan"
        )
    examples = [(key, question) for key, question, _ in known]
    return Scored(cell, examples, scores, metrics, warnings(evaluation))


def score_of(value: float | Sequence[float], within: int | None) -> float:
    """The score of an example; of several ranks, as of the captions of an image, the share of those within."""
    return float(value) if within is None else float(np.mean(np.atleast_1d(value) <= within))


def _pair(first: str, second: str, by_variant: Mapping[str, Mapping[int, Scored]]) -> dict[str, Any]:
    """The difference, first less second, over the seeds that both have; None where they share none."""
    one, other = by_variant[first], by_variant[second]
    seeds = [seed for seed in one if seed in other]
    pair = {"first": first, "second": second, "seeds": seeds}
    if not seeds:
        return pair | {"mean": None, "low": None, "high": None, "differs": None}
    found = interval(_stacked(one, seeds, other))
    return pair | asdict(found) | {"differs": found.excludes_zero}


def _stacked(
    scored: Mapping[int, Scored], seeds: Sequence[int], less: Mapping[int, Scored] | None = None
) -> np.ndarray:
    """[seeds, examples], less the scores of another variant."""
    return np.stack([scored[seed].scores - (less[seed].scores if less else 0.0) for seed in seeds])


def _validated(store: ObjectStore, metric: str, pretrainings: Sequence[Cell]) -> dict[str, Any]:
    """A metric of the last validation of each pre-training: by variant its mean, and the value of each seed."""
    found: dict[str, dict[str, float]] = {}
    for cell in pretrainings:
        value = last_metrics(store, cell.run).get(metric)
        if value is not None:
            found.setdefault(cell.variant, {})[str(cell.seed)] = value
    return {name: {"mean": float(np.mean([*of.values()])), "seeds": of} for name, of in found.items()}
