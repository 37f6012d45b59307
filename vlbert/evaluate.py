"""Validation: a task's metrics on held-out questions and, if the task asks for it, on shuffled pictures beside them."""

import torch

from detectors.distributed import World, gather_rows, sum_over_ranks
from detectors.loop import batches
from vlbert.batch import Unreadable
from vlbert.config import Recipe
from vlbert.data import Samples, ValidationData
from vlbert.model import TaskModel
from vlbert.tasks import Questions


@torch.no_grad()
def validate(
    model: TaskModel,
    recipe: Recipe,
    samples: Samples,
    questions: Questions,
    world: World,
    unreadable: list[Unreadable] | None = None,
) -> tuple[dict[str, float], list[dict]]:
    """(metrics, predictions) over the held-out questions, the same on every rank.

    A task that shuffles gets every metric a second time, `<name>_shuffled`, each text with the picture of another, and
    `<name>_grounding`, the difference: what the model got from this picture, and not from habits of text or pictures.
    Questions whose sample cannot be read are left out: `unreadable` gets those of this rank, the metric "unreadable"
    tells how many there were on all, if any. ValueError where no question can be asked.
    """
    was_training = model.training
    model.eval()
    data = ValidationData(
        samples, questions, model.task, recipe.data, recipe.model.regions, world, recipe.validation_samples
    )
    right, other, left_out = [], [], []
    for parts, missing in batches(data, range(len(data)), recipe.data.workers, world.device):
        left_out += missing
        for rows, batch in zip((right, other), parts, strict=False):  # without shuffling there is one part
            with autocast(recipe, world):
                rows += model.predict(batch.to(world.device))
    predictions = gather_rows(right, world)
    if not predictions:
        why = f"; the last because {left_out[-1].reason}" if left_out else ""
        raise ValueError(f"none of the {len(questions)} held-out questions can be asked{why}")
    metrics = model.task.metrics(predictions)
    if model.task.shuffles:
        shuffled = model.task.metrics(gather_rows(other, world))
        metrics |= {f"{name}_shuffled": value for name, value in shuffled.items()}
        metrics |= {f"{name}_grounding": metrics[name] - value for name, value in shuffled.items()}
    (missing,) = sum_over_ranks([len(left_out)], world)
    if missing:
        metrics["unreadable"] = missing
    if unreadable is not None:
        unreadable += left_out
    model.train(was_training)
    return metrics, predictions


def autocast(recipe: Recipe, world: World) -> torch.autocast:
    """bf16 on GPUs where the recipe says so; the CPU computes in fp32."""
    return torch.autocast(
        world.device.type, torch.bfloat16, enabled=world.device.type == "cuda" and recipe.precision == "bf16"
    )
