"""Validation: a task's metrics on held-out questions and, if the task asks for it, on shuffled pictures beside them."""

import torch

from vlbert.config import Recipe
from vlbert.data import Samples, ValidationData, batches
from vlbert.distributed import World, gather_rows
from vlbert.model import TaskModel
from vlbert.tasks import Questions


@torch.no_grad()
def validate(
    model: TaskModel, recipe: Recipe, samples: Samples, questions: Questions, world: World
) -> tuple[dict[str, float], list[dict]]:
    """(metrics, predictions) over the held-out questions, the same on every rank.

    A task that shuffles gets every metric a second time, `<name>_shuffled`, each text with the picture of another, and
    `<name>_grounding`, the difference: what the model got from this picture, and not from habits of text or pictures.
    """
    was_training = model.training
    model.eval()
    metrics, predictions = {}, []
    for shuffled in (False, True) if model.task.shuffles else (False,):
        data = ValidationData(
            samples,
            questions,
            model.task,
            recipe.data,
            recipe.model.regions,
            world,
            recipe.validation_samples,
            shuffled,
        )
        rows = []
        for batch in batches(data, range(len(data)), recipe.data.workers, world.device):
            with autocast(recipe, world):
                rows += model.predict(batch.to(world.device))
        rows = gather_rows(rows, world)
        if not shuffled:
            metrics, predictions = model.task.metrics(rows), rows
        else:
            other = model.task.metrics(rows)
            metrics |= {f"{name}_shuffled": value for name, value in other.items()}
            metrics |= {f"{name}_grounding": metrics[name] - value for name, value in other.items()}
    model.train(was_training)
    return metrics, predictions


def autocast(recipe: Recipe, world: World) -> torch.autocast:
    """bf16 on GPUs where the recipe says so; the CPU computes in fp32."""
    return torch.autocast(
        world.device.type, torch.bfloat16, enabled=world.device.type == "cuda" and recipe.precision == "bf16"
    )
