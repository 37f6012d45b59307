"""Aggregates losses across ranks and averages them between log lines."""

import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from training import distributed
from training.distributed import World

Item = TypeVar("Item")

# Name -> (sum over this process's part of a batch, by how many to divide it): so that any number of processes adds up
# to the same. What no gradient flows through, such as how many answers were right, is measured and not learned from.
Losses = dict[str, tuple[Tensor, int]]

LOSS = "loss_"  # before the names of losses in the log: no measure has one


def sum_losses(losses: Losses, world: World, stop_requested: bool, waited: float) -> Tensor:
    """Return the sums of one part of a step over all ranks, in float64 on the device: of each loss, by how many to
    divide each, on how many ranks a stop was requested, and the seconds that they waited for data.

    Each rank must call this, with losses of the same names. Nothing waits for the device.
    """
    sums = torch.stack([value.detach().double() for value, _ in losses.values()])
    others = [*(float(count) for _, count in losses.values()), float(stop_requested), waited]
    known = torch.tensor(others, dtype=torch.float64)
    known = known.pin_memory() if sums.is_cuda else known  # a copy of other memory waits
    numbers = torch.cat([sums, known.to(sums.device, non_blocking=True)])
    distributed.sum_over_ranks(numbers, world)
    return numbers


def mean_loss(losses: Losses, numbers: Tensor, weights: Mapping[str, float]) -> Tensor:
    """Return this rank's share of the weighted losses, each divided by its labels over all ranks. numbers: of add_up.

    A loss without labels in this step is 0, not NaN.
    """
    asked = numbers[len(losses) :].clamp(min=1).float()
    total = 0.0
    for (name, (value, _)), count in zip(losses.items(), asked, strict=False):
        if value.requires_grad:
            total = total + weights.get(name, 1.0) * value / count
    return total


@dataclass(frozen=True)
class Step:
    """What the forward and backward passes of one step came to, over all ranks."""

    sums: dict[str, tuple[float, float]]
    """By name the sum and by how many to divide it: of a loss `loss_<name>`, of a measure its own name."""
    loss: float
    """What is learned from: the weighted mean losses, added."""
    norm: float
    """Of the gradient, before it is clipped."""
    waited: float
    """Seconds that a rank waited for the step's data, in the mean."""
    stop_requested: bool
    """Whether a rank was asked to stop."""

    @classmethod
    def of(
        cls, losses: Losses, parts: Sequence[Tensor], norm: Tensor, weights: Mapping[str, float], world: World
    ) -> "Step":
        """Read what `sum_losses` made of each part; `losses`: of the last. Waits for the device, once a step."""
        names = [(LOSS if value.requires_grad else "") + name for name, (value, _) in losses.items()]
        *numbers, norm = torch.cat([*parts, norm.detach().double().reshape(1)]).tolist()
        rows = np.reshape(numbers, (len(parts), -1))
        sums, counts = rows[:, : len(names)], rows[:, len(names) : -2]
        means = dict(zip(names, (sums / np.maximum(counts, 1)).mean(0).tolist(), strict=True))
        of_losses = {name.removeprefix(LOSS): mean for name, mean in means.items() if name.startswith(LOSS)}
        loss = sum(weights.get(name, 1.0) * mean for name, mean in of_losses.items())
        totals = zip(sums.sum(0).tolist(), counts.sum(0).tolist(), strict=True)
        stop_requested, waited = rows[-1, -2:].tolist()
        return cls(dict(zip(names, totals, strict=True)), loss, norm, waited / world.size, stop_requested > 0)

    @property
    def losses(self) -> dict[str, float]:
        """The mean of each loss, by name."""
        return {
            name.removeprefix(LOSS): total / max(1.0, count)
            for name, (total, count) in self.sums.items()
            if name.startswith(LOSS)
        }


class RunningAverages:
    """Averages the steps since the last line of the log; `reset` begins the next line.

    counts  what was left out: `skipped` steps, and what the caller counts
    steps   how many there were

    The state is without times: trainings that compute the same have the same.
    """

    def __init__(self, state: Mapping[str, Any] | None = None):
        self.reset()
        if state:
            self._sums, self._norms = dict(state["sums"]), list(state["norms"])
            self.counts.update(state["counts"])

    def reset(self) -> None:
        self._sums: dict[str, Sequence[float]] = {}
        self._norms: list[float] = []
        self.counts: Counter[str] = Counter()
        self.steps, self._began, self._paused, self._waited = 0, time.monotonic(), 0.0, 0.0

    @property
    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"sums": dict(self._sums), "norms": list(self._norms), "counts": dict(self.counts)}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time of the block as no training."""
        began = time.monotonic()
        yield
        self._paused += time.monotonic() - began

    def add(self, step: Step, taken: bool) -> None:
        """Add a step; of one that is left out its time alone."""
        self.steps += 1
        self._waited += step.waited
        if not taken:
            self.counts["skipped"] += 1
            return
        self._norms.append(step.norm)
        for name, (total, count) in step.sums.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = [before[0] + total, before[1] + count]

    def means(self) -> dict[str, float]:
        """Return the means of losses, as `loss_<name>`, and of measures, over their labels and without weights; and
        `gradient_norm`, the mean, and `gradient_norm_max`, before clipping, if any step was taken."""
        means = {name: total / count for name, (total, count) in sorted(self._sums.items()) if count}
        if norms := self._norms:
            means |= {"gradient_norm": sum(norms) / len(norms), "gradient_norm_max": max(norms)}
        return means

    def seconds(self) -> tuple[float, float]:
        """Return how long these steps have trained, and for how much of it the loop waited for the next batch."""
        return max(1e-9, time.monotonic() - self._began - self._paused), self._waited


def timed(items: Iterable[Item]) -> Iterator[tuple[Item, float]]:
    """Yield the items, each with the seconds that it took to come."""
    began = time.monotonic()
    for item in items:
        yield item, time.monotonic() - began
        began = time.monotonic()


def peak_memory(device: torch.device) -> int:
    """Return the bytes that this process held at most so far: on its GPU or, without one, in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in kibibytes
