"""Compute a task's metrics over held-out examples and, for some tasks, over the same texts with shuffled images."""

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
    """Predictions of one rank for some or all of its examples."""

    numbers: list[int] = field(default_factory=list)  # index of each predicted example
    rows: list[dict] = field(default_factory=list)  # prediction for each of them
    shuffled: list[dict] = field(default_factory=list)  # the same with other examples' images, if the task shuffles
    unreadable: dict[int, Unreadable] = field(default_factory=dict)  # by index of the example

    def add(self, other: "Predicted") -> None:
        """Append the predictions of `other`."""
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
    """Return the model's predictions for this rank's batches, or only for the batches at `indexes`.

    `after` is called after each batch with the batch's index and predictions.
    """
    was_training = model.training
    model.eval()
    total, indexes = Predicted(), range(len(data)) if indexes is None else indexes
    # Eager even if training is compiled: compiling graphs without gradients would take minutes more.
    with recipe_precision(recipe), torch.compiler.set_stance("force_eager"):
        loaded = batches(data, indexes, recipe.data.workers, world.device)
        for index, (parts, numbers, unreadable) in zip(indexes, loaded, strict=True):
            predicted = Predicted(numbers, unreadable=unreadable)
            outputs = predicted.rows, predicted.shuffled
            for rows, batch in zip(outputs, parts, strict=False):  # one batch if the task does not shuffle
                with autocast(recipe, world):
                    rows += model.predict(batch)
            total.add(predicted)
            after(index, predicted)
    model.train(was_training)
    return total


def validate(
    model: TaskModel,
    recipe: Recipe,
    held_out: Mapping[str, tuple[Samples, Examples]],
    world: World,
    unreadable: list[Unreadable] | None = None,
) -> tuple[dict[str, float], list[dict]]:
    """Return metrics and predictions for the examples of all held-out datasets. They are identical on all ranks.

    With several datasets, there are also metrics `<dataset>/<metric>`, and each prediction names its `dataset`.
    Unreadable examples are skipped. Those of this rank are appended to `unreadable`. If any rank has some, the metric
    "unreadable" is their total number. Raises ValueError if no example of a dataset can be read.
    """
    parts = {}
    for name, (samples, examples) in held_out.items():
        data = ValidationData(
            samples, examples, model.task, recipe.data, recipe.model, world, recipe.validation_samples
        )
        predicted = predict_all(model, data, recipe, world)
        skipped = list(predicted.unreadable.values())
        rows = model.task.assemble(gather_rows(predicted.rows, world))
        shuffled = gather_rows(predicted.shuffled, world)
        if not rows:
            raise ValueError(
                f"none of the {len(examples)} held-out examples of {name} can be read{last_reason(skipped)}"
            )
        parts[name] = rows, shuffled, sum(gather_rows([len(skipped)], world))
        if unreadable is not None:
            unreadable += skipped
    predictions = [row for rows, _, _ in parts.values() for row in rows]
    all_shuffled = [row for _, shuffled, _ in parts.values() for row in shuffled]
    missing = sum(missing for *_, missing in parts.values())
    metrics = metrics_of(model.task, predictions, all_shuffled, missing)
    if len(parts) > 1:
        for name, part in parts.items():
            metrics |= {f"{name}/{metric}": value for metric, value in metrics_of(model.task, *part).items()}
        predictions = [row | {"dataset": name} for name, (rows, _, _) in parts.items() for row in rows]
    return metrics, predictions


def metrics_of(task: Task, rows: Sequence[dict], shuffled: Sequence[dict], missing: int = 0) -> dict[str, float]:
    """Return a task's metrics and, if `shuffled` predictions are given, two more values for each metric.

    `<name>_shuffled` is the metric when each text has the image of another example. `<name>_grounding_gap` is the
    difference: the part that is due to the right image, not to biases in texts or images. Metrics named `chance*` do
    not depend on the image, so they get neither value. `missing`, if not 0, is added as the metric "unreadable".
    """
    metrics = task.metrics(rows)
    if shuffled:
        baseline = {name: value for name, value in task.metrics(shuffled).items() if not name.startswith("chance")}
        metrics |= {f"{name}_shuffled": value for name, value in baseline.items()}
        metrics |= {f"{name}_grounding_gap": metrics[name] - value for name, value in baseline.items()}
    return metrics | ({"unreadable": missing} if missing else {})


def last_reason(unreadable: Sequence[Unreadable]) -> str:
    """Return "; the last because REASON", to be put at the end of an error message, or "" if there are no samples."""
    return f"; the last because {unreadable[-1].reason}" if unreadable else ""
