"""What a comparison found, from the files of its runs: means, intervals, pairs, costs, curves."""

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.object_store import ObjectStore
from storage.safe_json import parse_json
from training.curves import Lines
from training.log import last_metrics, read_metrics
from vlbert.comparison.cells import Cell, costs_file, folder_of_evaluation, read_costs
from vlbert.comparison.intervals import REPLICATES, check_same, interval, weighted
from vlbert.comparison.plans import ComparedTask, Plan
from vlbert.evaluation.results import METRICS, PREDICTIONS, warnings

_OF_COST = ("seconds", "cpu_seconds", "flops")


@dataclass(frozen=True, eq=False)
class Scored:
    """One evaluation: its examples (key, question), a score and a weight each, the metrics and the warnings.

    weights: 1, or the number of ranks that an example has, as of the captions of an image.
    """

    cell: Cell
    examples: list[tuple[str, str]]
    scores: np.ndarray
    weights: np.ndarray
    metrics: Mapping[str, float | None]
    warnings: Sequence[str]

    @property
    def mean(self) -> float:
        return float(np.average(self.scores, weights=self.weights))


def summarise(
    plan: Plan, store: ObjectStore, cells: Sequence[Cell], failed: Mapping[str, str]
) -> tuple[dict[str, Any], bytes]:
    """The content of numbers.json, and the scores of all examples as Parquet.

    failed: run -> reason; such cells have no number. A task whose evaluations do not fit the plan or each other has
    the reason as `problem`, and no numbers.
    """
    scored, problems = {}, {}
    for task in plan.tasks:
        try:
            scored[task] = _scored(plan, store, task, cells, failed)
        except ValueError as error:
            scored[task], problems[task] = [], str(error)
    summary = {
        "plan": plan.name,
        "title": plan.title,
        "paper": plan.paper,
        "seeds": sorted({cell.seed for cell in cells}),
        "replicates": REPLICATES,
        "variants": {name: _variant(plan, store, name, cells, failed) for name in plan.variants},
        "tasks": {task: _task(plan, task, scored[task]) | {"problem": problems.get(task)} for task in plan.tasks},
        "pretraining": {name: _validated(store, name, cells, failed) for name in plan.pretraining_metrics},
        "failed": [
            {"run": c.run, "variant": c.variant, "task": c.task, "seed": c.seed, "reason": failed[c.run]}
            for c in cells
            if c.run in failed
        ],
    }
    return summary, _parquet([one for found in scored.values() for one in found])


def _scored(
    plan: Plan, store: ObjectStore, task: str, cells: Sequence[Cell], failed: Mapping[str, str]
) -> list[Scored]:
    """The evaluations of a task; ValueError where one does not fit the plan, or two are not of the same examples."""
    chosen = [cell for cell in cells if cell.task == task and cell.run not in failed]
    found = [read_scores(store, cell, plan.tasks[task]) for cell in chosen]
    for one in found[1:]:
        names = found[0].cell.run, one.cell.run
        check_same(found[0].examples, one.examples, names)
        if not np.array_equal(found[0].weights, one.weights):
            raise ValueError(
                f"the examples of {' and '.join(names)} have not as many ranks each: they cannot be compared; evaluate "
                "both on the same data"
            )
    return found


def read_scores(store: ObjectStore, cell: Cell, task: ComparedTask) -> Scored:
    """An evaluation's scores; examples whose truth is not known are left out. ValueError where their mean is not the
    metric that the plan names."""
    folder = folder_of_evaluation(cell)
    where = store.where(f"{folder}/{METRICS}")
    evaluation = parse_json(store.get(f"{folder}/{METRICS}"), where)
    metrics = evaluation["metrics"]
    table = pq.read_table(io.BytesIO(store.get(f"{folder}/{PREDICTIONS}")))
    if task.metric not in metrics or task.column not in table.column_names:
        raise ValueError(
            f"{where}: there is no metric {task.metric} with a column {task.column}; it has "
            f"{', '.join(name for name in metrics if '/' not in name)}, and the predictions "
            f"{', '.join(table.column_names)}"
        )
    if task.chance and task.chance not in metrics:
        raise ValueError(f"{where}: there is no metric {task.chance}; name another as `chance` in the plan, or None")
    rows = zip(*(table[name].to_pylist() for name in ("key", "question", task.column)), strict=True)
    known = [row for row in rows if row[2] is not None]
    scores = np.array([score_of(value, task.within) for *_, value in known])
    weights = np.array([np.size(value) for *_, value in known], float)
    mean = np.average(scores, weights=weights) if known else None
    if mean is None or metrics[task.metric] is None or abs(mean - metrics[task.metric]) > 1e-6:
        found = "of no row" if mean is None else f"{mean:.6f}"
        raise ValueError(
            f"{where}: {task.metric} is {metrics[task.metric]}, the mean of column {task.column} {found}: intervals "
            "need a metric that is the mean of a column; name another in the plan"
        )
    examples = [(key, question) for key, question, _ in known]
    return Scored(cell, examples, scores, weights, metrics, warnings(evaluation))


def score_of(value: float | Sequence[float], within: int | None) -> float:
    """The score of an example; of several ranks, as of the captions of an image, the share of those within."""
    return float(value) if within is None else float(np.mean(np.atleast_1d(value) <= within))


def _task(plan: Plan, name: str, scored: Sequence[Scored]) -> dict[str, Any]:
    task = plan.tasks[name]
    by_variant = {
        variant: {one.cell.seed: one for one in scored if one.cell.variant == variant} for variant in plan.variants
    }
    chances = [one.metrics[task.chance] for one in scored] if task.chance else []
    chances = [chance for chance in chances if chance is not None]
    means = {}
    for variant, of_seeds in by_variant.items():
        if of_seeds:
            found = asdict(interval(_stacked(of_seeds, [*of_seeds])))
            found["seeds"] = {str(seed): one.mean for seed, one in of_seeds.items()}
            means[variant] = found
    return {
        "title": task.title,
        "split": task.split,
        "metric": task.metric,
        "examples": len(scored[0].scores) if scored else 0,
        "chance": float(np.mean(chances)) if chances else None,
        "means": means,
        "paper": {name_: variant.paper[name] for name_, variant in plan.variants.items() if name in variant.paper},
        "warnings": list(dict.fromkeys(line for one in scored for line in one.warnings)),
        "pairs": [_pair(*pair, by_variant) for pair in itertools.combinations(means, 2)],
    }


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
    """[seeds, examples], less the scores of another variant, with a plain mean that is the weighted one."""
    scores = np.stack([scored[seed].scores - (less[seed].scores if less else 0.0) for seed in seeds])
    return weighted(scores, scored[seeds[0]].weights)


def _variant(
    plan: Plan, store: ObjectStore, name: str, cells: Sequence[Cell], failed: Mapping[str, str]
) -> dict[str, Any]:
    """Its title, its tasks, how many parameters its model has with each head, and what each of its trainings costs:
    means over the seeds."""
    variant, costs = plan.variants[name], {}
    for cell in cells:
        if cell.variant == name and cell.run not in failed:
            found = read_costs(store, costs_file(plan, cell))
            of = costs.setdefault(cell.task or "pretraining", {"steps": cell.steps})
            of |= {key: found[key] for key in ("parameters", "trained") if key in found}
            if "flops" in found:
                of["flops"] = found["flops"] * cell.steps
            for key in ("seconds", "cpu_seconds"):
                of.setdefault(key, []).append(found.get(key))
    for of in costs.values():
        for key in ("seconds", "cpu_seconds"):
            measured = [value for value in of[key] if value is not None]
            of[key] = float(np.mean(measured)) if measured else None
    return {
        "title": variant.title,
        "pretrained": variant.pretraining is not None,
        "tasks": [*variant.finetunings],
        "costs": costs,
    }


def _validated(store: ObjectStore, metric: str, cells: Sequence[Cell], failed: Mapping[str, str]) -> dict[str, Any]:
    """A metric of the last validation of each pre-training: by variant its mean, and the value of each seed."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        if cell.task is None and cell.run not in failed:
            value = last_metrics(store, cell.run).get(metric)
            if value is not None:
                found.setdefault(cell.variant, {})[str(cell.seed)] = value
    return {name: {"mean": float(np.mean([*of.values()])), "seeds": of} for name, of in found.items()}


def _parquet(scored: Sequence[Scored]) -> bytes:
    """task, variant, seed, key, question, score, weight: a row an example of each evaluation."""
    parts = []
    for one in scored:
        n, cell = len(one.scores), one.cell
        same = {
            "task": pa.array([cell.task] * n).dictionary_encode(),
            "variant": pa.array([cell.variant] * n).dictionary_encode(),
            "seed": pa.array([cell.seed] * n, pa.int64()),
        }
        keys, questions = zip(*one.examples, strict=True)
        parts.append(pa.table(same | {"key": keys, "question": questions, "score": one.scores, "weight": one.weights}))
    file = io.BytesIO()
    if parts:
        pq.write_table(pa.concat_tables(parts).unify_dictionaries(), file, compression="zstd")
    return file.getvalue()


def curves_of(plan: Plan, store: ObjectStore, cells: Sequence[Cell], failed: Mapping[str, str]) -> dict[str, Lines]:
    """By loss of pre-training, a line of each variant: the mean over the seeds."""
    panels: dict[str, dict[str, dict[float, list[float]]]] = {}
    for cell in cells:
        if cell.task is None and cell.run not in failed:
            title = plan.variants[cell.variant].title
            for row in read_metrics(store, cell.run, "training"):
                for name, value in row.items():
                    if name.startswith("loss_") and not name.endswith("_accuracy"):
                        points = panels.setdefault(name.removeprefix("loss_"), {}).setdefault(title, {})
                        points.setdefault(row["step"], []).append(value)
    return {
        f"pre-training: loss at {loss}, nats": {
            title: [(step, float(np.mean(values))) for step, values in sorted(points.items())]
            for title, points in lines.items()
        }
        for loss, lines in panels.items()
    }
