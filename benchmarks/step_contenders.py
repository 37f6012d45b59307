"""The contenders of benchmarks/train_step.py: the fast path in each precision, and the plain path in fp32."""

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
from benchmarks.plain import PlainBatch, PlainPretraining, make_plain_optimizer
from benchmarks.step_parts import Clock, TrainingStep, run_marked_step, total_loss
from benchmarks.step_tables import PLAIN
from benchmarks.synthetic import make_text_examples, mask_pairs, without_files
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
    """The training step of the fast path (the project's own code), in one precision."""

    def __init__(self, recipe: Recipe, model: TaskModel, world: World, prepared: Sequence[Batch]):
        super().__init__(recipe, model, world)
        self.name, self.prepared = recipe.precision, prepared
        # The loader that training uses, over batches in memory.
        self.ahead = iter(batches(Prepared(prepared), range(sys.maxsize), 0, world.device))

    def run(self, steps: int) -> None:
        """Take the next `steps` steps, cycling through the prepared batches."""
        with recipe_precision(self.recipe):
            for _ in range(steps):
                self.take(next(self.ahead)[0].to(self.world.device))

    def parts(self, step: int, clock: Clock) -> dict[str, float]:
        """Take step number `step` with marks, and return the milliseconds of each part."""
        with recipe_precision(self.recipe):
            run_marked_step(self, self.prepared[step % len(self.prepared)], clock)
        return clock.milliseconds()


class Plain:
    """The training step of the plain path (benchmarks/plain.py), in exact fp32."""

    name = PLAIN

    def __init__(self, recipe: Recipe, plain: PlainPretraining, world: World, prepared: Sequence[PlainBatch]):
        self.recipe, self.plain, self.world = recipe, plain, world
        self.optimizer, self.ahead = make_plain_optimizer(plain, recipe.optimizer), itertools.cycle(prepared)

    def run(self, steps: int) -> None:
        """Take the next `steps` steps, cycling through the prepared batches."""
        with recipe_precision(dataclasses.replace(self.recipe, precision="fp32")):
            for _ in range(steps):
                total_loss(self.plain(next(self.ahead).to(self.world.device))).backward()
                clip = self.recipe.optimizer.max_grad_norm or torch.inf
                torch.nn.utils.clip_grad_norm_(self.plain.parameters(), clip, foreach=False)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)


class Prepared(Dataset):
    """A dataset of finished batches, repeated without end. An item is the batch of a step, as a list of one part."""

    def __init__(self, prepared: Sequence[Batch]):
        self.prepared = prepared

    def __getitem__(self, index: int) -> list[Batch]:
        return [self.prepared[index % len(self.prepared)]]


class Stored(Dataset):
    """A dataset that makes each step's batch from stored samples: it decodes, masks and collates them."""

    def __init__(self, recipe: Recipe, task: Any, samples: Sequence[Sample], pairs: int, texts: int):
        self.recipe, self.task, self.samples, self.pairs, self.texts = recipe, task, samples, pairs, texts

    def __getitem__(self, index: int) -> list[Batch]:
        first = index * self.pairs
        samples = [self.samples[number % len(self.samples)] for number in range(first, first + self.pairs)]
        examples = mask_pairs(self.task, self.recipe.model.regions, samples, seed=index)
        texts = make_text_examples(self.task, range(index * self.texts, (index + 1) * self.texts))
        return [collate(examples + texts)]


def make_benchmark_recipe(options: argparse.Namespace) -> Recipe:
    """Make the recipe of the command line with its changed fields, but with random weights instead of weight files."""
    return without_files(make_recipe(options.recipe, options.fields, RECIPES))


def warm_up(contender: Fast | Plain, steps: int) -> None:
    """Take `steps` unmeasured steps, which select and compile kernels, and allocate the optimizer's state."""
    contender.run(steps)
    print(f"{contender.name}: warm", file=sys.stderr, flush=True)


def measure_memory(contender: Fast | Plain, device: torch.device, steps: int) -> dict[str, float | None]:
    """Return the GB that a step keeps for its backward pass and, on a GPU, its peak above the memory between steps.

    Both are the largest of `steps` steps, whose batches differ in size.
    """
    kept: dict[int, int] = {}
    model = contender.model if isinstance(contender, Fast) else contender.plain
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    most, peak, before = 0, None, 0
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        for _ in range(steps):
            kept.clear()
            contender.run(1)
            most = max(most, sum(kept.values()))
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    return {"kept for backward": most / 1e9, "peak": peak}
