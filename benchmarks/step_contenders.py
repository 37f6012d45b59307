"""The contenders of benchmarks/train_step.py: the fast path in one precision each, and plain fp32."""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.measure import synchronise
from benchmarks.plain import PlainBatch, PlainPretraining, plain_optimizer
from benchmarks.step_parts import Clock, TrainingStep, marked_step, total
from benchmarks.step_tables import PLAIN
from benchmarks.synthetic import drawn_texts, masked_pairs, without_files
from storage.sample import Sample
from training.distributed import World
from training.loading import batches
from training.precision import recipe_precision
from training.program import make_recipe
from vlbert.config import Recipe
from vlbert.data.batch import Batch, collate
from vlbert.recipes import RECIPES
from vlbert.tasks.base import TaskModel


class Fast(TrainingStep):
    """The model as training runs it, in one precision."""

    def __init__(self, recipe: Recipe, model: TaskModel, world: World, prepared: Sequence[Batch]):
        super().__init__(recipe, model, world)
        self.name, self.prepared = recipe.precision, prepared
        self.ahead = iter(
            batches(Prepared(prepared), range(sys.maxsize), 0, world.device)
        )  # as training is handed them

    def run(self, steps: int) -> None:
        """The next so many steps, over the prepared batches in turn."""
        with recipe_precision(self.recipe):
            for _ in range(steps):
                self.take(next(self.ahead)[0].to(self.world.device))

    def parts(self, step: int, clock: Clock) -> dict[str, float]:
        """Milliseconds of each part of one step."""
        with recipe_precision(self.recipe):
            marked_step(self, self.prepared[step % len(self.prepared)], clock)
        return clock.milliseconds()


class Plain:
    """The plain path, in exact fp32."""

    name = PLAIN

    def __init__(self, recipe: Recipe, plain: PlainPretraining, world: World, prepared: Sequence[PlainBatch]):
        self.recipe, self.plain, self.world = recipe, plain, world
        self.optimizer, self.ahead = plain_optimizer(plain, recipe.optimizer), itertools.cycle(prepared)

    def run(self, steps: int) -> None:
        """As that of Fast."""
        with recipe_precision(dataclasses.replace(self.recipe, precision="fp32")):
            for _ in range(steps):
                total(self.plain(next(self.ahead).to(self.world.device))).backward()
                clip = self.recipe.optimizer.max_grad_norm or torch.inf
                torch.nn.utils.clip_grad_norm_(self.plain.parameters(), clip, foreach=False)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)


class Prepared(Dataset):
    """Batches that are there already; that of a step is its only part."""

    def __init__(self, prepared: Sequence[Batch]):
        self.prepared = prepared

    def __getitem__(self, step: int) -> list[Batch]:
        return [self.prepared[step % len(self.prepared)]]


class Stored(Dataset):
    """Batches made from stored samples on request: decoded, masked, collated."""

    def __init__(self, recipe: Recipe, task: Any, samples: Sequence[Sample], pairs: int, texts: int):
        self.recipe, self.task, self.samples, self.pairs, self.texts = recipe, task, samples, pairs, texts

    def __getitem__(self, step: int) -> list[Batch]:
        first = step * self.pairs
        samples = [self.samples[number % len(self.samples)] for number in range(first, first + self.pairs)]
        examples = masked_pairs(self.task, self.recipe.model.regions, samples, seed=step)
        texts = drawn_texts(self.task, range(step * self.texts, (step + 1) * self.texts))
        return [collate(examples + texts)]


def measured_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe with the fields that are given, without files to start from."""
    return without_files(make_recipe(options.recipe, options.fields, RECIPES))


def warm_up(contender: Fast | Plain, steps: int) -> None:
    """Whatever is done once: kernels chosen and compiled, moments made."""
    contender.run(steps)
    print(f"{contender.name}: warm", file=sys.stderr, flush=True)


def memory(contender: Fast | Plain, device: torch.device) -> dict[str, float | None]:
    """GB that a step keeps for its backward pass; on a GPU also its peak, both beyond what is held between steps."""
    kept: dict[int, int] = {}
    model = contender.model if isinstance(contender, Fast) else contender.plain
    held = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        contender.run(1)
    found: dict[str, float | None] = {"kept for backward": sum(kept.values()) / 1e9, "peak": None}
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.run(1)
        found["peak"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return found
