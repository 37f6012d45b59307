"""Validation: a task's metrics over held-out examples and, if the task shuffles, over shuffled images beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from storage.reading import Samples
from training.distributed import World, gather_rows, sum_over_ranks
from training.log import Unreadable
from training.loop import batches
from training.precision import autocast, in_precision_of
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


@torch.no_grad()
def predict_all(
    model: TaskModel,
    data: ValidationData,
    recipe: Recipe,
    world: World,
    progress: Callable[[int], None] = lambda count: None,
) -> Predicted:
    """The model's predictions for this rank's examples; calls progress(number of examples so far) after each batch."""
    was_training = model.training
    model.eval()
    found = Predicted()
    # Eagerly, whatever is compiled for training: graphs without gradients would take minutes more to compile.
    with in_precision_of(recipe), torch.compiler.set_stance("force_eager"):
        for parts, numbers, unreadable in batches(data, range(len(data)), recipe.data.workers, world.device):
            found.numbers += numbers
            found.unreadable |= unreadable
            for rows, batch in zip((found.rows, found.shuffled), parts, strict=False):  # without shuffling there is one
                with autocast(recipe, world):
                    rows += model.predict(batch)
            progress(len(found.numbers))
    model.train(was_training)
    return found


def validate(
    model: TaskModel,
    recipe: Recipe,
    samples: Samples,
    examples: Examples,
    world: World,
    unreadable: list[Unreadable] | None = None,
) -> tuple[dict[str, float], list[dict]]:
    """(metrics, predictions) over the held-out examples, the same on every rank.

    Examples whose sample cannot be read are skipped: those of this rank are added to `unreadable`, the metric
    "unreadable" counts them over all ranks, if there are any. ValueError where no example can be read.
    """
    data = ValidationData(
        samples, examples, model.task, recipe.data, recipe.model.regions, world, recipe.validation_samples
    )
    found = predict_all(model, data, recipe, world)
    skipped = list(found.unreadable.values())
    predictions = gather_rows(found.rows, world)
    if not predictions:
        raise ValueError(f"none of the {len(examples)} held-out examples can be read{because_of(skipped)}")
    metrics = metrics_of(model.task, predictions, gather_rows(found.shuffled, world))
    (missing,) = sum_over_ranks([len(skipped)], world)
    if missing:
        metrics["unreadable"] = missing
    if unreadable is not None:
        unreadable += skipped
    return metrics, predictions


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


def because_of(unreadable: Sequence[Unreadable]) -> str:
    """The end of a message: why the last of these could not be read."""
    return f"; the last because {unreadable[-1].reason}" if unreadable else ""
