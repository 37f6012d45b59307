"""Validation: a task's metrics over held-out examples and, if the task shuffles, over shuffled images beside them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from storage.reading import Samples
from training.distributed import World, gather_rows
from training.loading import batches
from training.log import Unreadable
from training.precision import autocast, recipe_precision
from vlbert.config import Recipe
from vlbert.data.loading import ValidationData
from vlbert.tasks.base import Examples, Task, TaskModel


@dataclass(eq=False)
class Predicted:
    """The predictions of one rank: number and row of each example and, where the task shuffles, its row with the image
    of another; by number, why others have none."""

    numbers: list[int] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)
    shuffled: list[dict] = field(default_factory=list)
    unreadable: dict[int, Unreadable] = field(default_factory=dict)

    def add(self, other: "Predicted") -> None:
        """Take over the predictions of another."""
        self.numbers += other.numbers
        self.rows += other.rows
        self.shuffled += other.shuffled
        self.unreadable |= other.unreadable


@torch.no_grad()
def predict_all(
    model: TaskModel,
    data: ValidationData,
    recipe: Recipe,
    world: World,
    indexes: Sequence[int] | None = None,
    after: Callable[[int, Predicted], None] = lambda index, predicted: None,
) -> Predicted:
    """The model's predictions for this rank's examples; calls after(index, its predictions) after each batch.

    indexes: of the batches; None: all.
    """
    was_training = model.training
    model.eval()
    found, indexes = Predicted(), range(len(data)) if indexes is None else indexes
    # Eagerly, whatever is compiled for training: graphs without gradients would take minutes more to compile.
    with recipe_precision(recipe), torch.compiler.set_stance("force_eager"):
        loaded = batches(data, indexes, recipe.data.workers, world.device)
        for index, (parts, numbers, unreadable) in zip(indexes, loaded, strict=True):
            one = Predicted(numbers, unreadable=unreadable)
            for rows, batch in zip((one.rows, one.shuffled), parts, strict=False):  # without shuffling there is one
                with autocast(recipe, world):
                    rows += model.predict(batch)
            found.add(one)
            after(index, one)
    model.train(was_training)
    return found


def validate(
    model: TaskModel,
    recipe: Recipe,
    held_out: Mapping[str, tuple[Samples, Examples]],
    world: World,
    unreadable: list[Unreadable] | None = None,
) -> tuple[dict[str, float], list[dict]]:
    """(metrics, predictions) over the examples of all held-out datasets, the same on every rank. Of several datasets
    there are `<dataset>/<metric>`, too, and each prediction names its `dataset`.

    Examples whose sample cannot be read are skipped: those of this rank are added to `unreadable`, the metric
    "unreadable" counts them over all ranks, if there are any. ValueError where no example of a dataset can be read.
    """
    parts = {}
    for name, (samples, examples) in held_out.items():
        data = ValidationData(
            samples, examples, model.task, recipe.data, recipe.model.regions, world, recipe.validation_samples
        )
        found = predict_all(model, data, recipe, world)
        skipped = list(found.unreadable.values())
        rows = model.task.assemble(gather_rows(found.rows, world))
        shuffled = gather_rows(found.shuffled, world)
        if not rows:
            raise ValueError(
                f"none of the {len(examples)} held-out examples of {name} can be read{last_reason(skipped)}"
            )
        parts[name] = rows, shuffled, sum(gather_rows([len(skipped)], world))
        if unreadable is not None:
            unreadable += skipped
    everything = [row for rows, _, _ in parts.values() for row in rows]
    everything_shuffled = [row for _, shuffled, _ in parts.values() for row in shuffled]
    metrics = _with_missing(model.task, everything, everything_shuffled, sum(missing for *_, missing in parts.values()))
    if len(parts) > 1:
        for name, part in parts.items():
            metrics |= {f"{name}/{metric}": value for metric, value in _with_missing(model.task, *part).items()}
        everything = [row | {"dataset": name} for name, (rows, _, _) in parts.items() for row in rows]
    return metrics, everything


def _with_missing(task: Task, rows: Sequence[dict], shuffled: Sequence[dict], missing: int) -> dict[str, float]:
    return metrics_of(task, rows, shuffled) | ({"unreadable": missing} if missing else {})


def metrics_of(task: Task, rows: Sequence[dict], shuffled: Sequence[dict]) -> dict[str, float]:
    """A task's metrics. Where it shuffles, each but `chance*`, which does not depend on the image, has two more:
    `<name>_shuffled`, each text with the image of another, and `<name>_grounding_gap`, the difference, which comes from
    the right image and not from habits of text or images alone."""
    metrics = task.metrics(rows)
    if shuffled:
        others = {name: value for name, value in task.metrics(shuffled).items() if not name.startswith("chance")}
        metrics |= {f"{name}_shuffled": value for name, value in others.items()}
        metrics |= {f"{name}_grounding_gap": metrics[name] - value for name, value in others.items()}
    return metrics


def last_reason(unreadable: Sequence[Unreadable]) -> str:
    """The end of a message: why the last of these could not be read."""
    return f"; the last because {unreadable[-1].reason}" if unreadable else ""
