"""Validation: a task's metrics on held-out questions and, if the task asks for it, on shuffled pictures beside them."""

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
from vlbert.tasks.base import Questions, Task, TaskModel


@dataclass(eq=False)
class Answers:
    """What this rank's questions came to: the number and the row of each and, where the task shuffles, its row with the
    picture of another; by number, why others could not be asked."""

    numbers: list[int] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)
    shuffled: list[dict] = field(default_factory=list)
    unreadable: dict[int, Unreadable] = field(default_factory=dict)


@torch.no_grad()
def ask(
    model: TaskModel, data: ValidationData, recipe: Recipe, world: World, tell: Callable[[int], None] = lambda n: None
) -> Answers:
    """The model's answers to this rank's questions; tell(how many so far) after every batch."""
    was_training = model.training
    model.eval()
    found = Answers()
    # Eagerly, whatever is compiled for training: graphs without gradients would take minutes more to make.
    with in_precision_of(recipe), torch.compiler.set_stance("force_eager"):
        for parts, numbers, unreadable in batches(data, range(len(data)), recipe.data.workers, world.device):
            found.numbers += numbers
            found.unreadable |= unreadable
            for rows, batch in zip((found.rows, found.shuffled), parts, strict=False):  # without shuffling there is one
                with autocast(recipe, world):
                    rows += model.predict(batch)
            tell(len(found.numbers))
    model.train(was_training)
    return found


def validate(
    model: TaskModel,
    recipe: Recipe,
    samples: Samples,
    questions: Questions,
    world: World,
    unreadable: list[Unreadable] | None = None,
) -> tuple[dict[str, float], list[dict]]:
    """(metrics, predictions) over the held-out questions, the same on every rank.

    Questions whose sample cannot be read are left out: `unreadable` gets those of this rank, the metric "unreadable"
    tells how many there were on all, if any. ValueError where no question can be asked.
    """
    data = ValidationData(
        samples, questions, model.task, recipe.data, recipe.model.regions, world, recipe.validation_samples
    )
    found = ask(model, data, recipe, world)
    left_out = list(found.unreadable.values())
    predictions = gather_rows(found.rows, world)
    if not predictions:
        raise ValueError(f"none of the {len(questions)} held-out questions can be asked{because_of(left_out)}")
    metrics = metrics_of(model.task, predictions, gather_rows(found.shuffled, world))
    (missing,) = sum_over_ranks([len(left_out)], world)
    if missing:
        metrics["unreadable"] = missing
    if unreadable is not None:
        unreadable += left_out
    return metrics, predictions


def metrics_of(task: Task, rows: Sequence[dict], shuffled: Sequence[dict]) -> dict[str, float]:
    """A task's metrics. One that shuffles gets each but `chance*`, which no picture changes, a second time:
    `<name>_shuffled`, each text with the picture of another, and `<name>_grounding`, the difference: what the model got
    from this picture, and not from habits of text or pictures."""
    metrics = task.metrics(rows)
    if shuffled:
        others = {name: value for name, value in task.metrics(shuffled).items() if not name.startswith("chance")}
        metrics |= {f"{name}_shuffled": value for name, value in others.items()}
        metrics |= {f"{name}_grounding": metrics[name] - value for name, value in others.items()}
    return metrics


def because_of(left_out: Sequence[Unreadable]) -> str:
    """The end of a message: why the last of these could not be asked."""
    return f"; the last because {left_out[-1].reason}" if left_out else ""
