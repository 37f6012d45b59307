"""Sum losses over ranks, and average them between log lines."""

import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed import World

Item = TypeVar("Item")

# Name -> (sum over this rank's part of a batch, divisor): sums give the same mean for any number of ranks. Entries
# without gradient, such as the number of right answers, are measures: they are logged, but not trained on.
Losses = dict[str, tuple[Tensor, int]]

LOSS = "loss_"  # prefix of losses in the log; measures have no prefix


def sum_losses(losses: Losses, world: World, stop_requested: bool, waited: float) -> Tensor:
    """Sum the losses of one part of a step's batch over all ranks, without waiting for the device.

    Every rank must call this, with the same loss names.

    Returns:
        A tensor on the device (float64 [2 * number of losses + 2]): the sum of each loss, the divisors for their means,
        the number of ranks on which a stop was requested, and the total seconds that the ranks waited for data.
    """
    sums = torch.stack([value.detach().double() for value, _ in losses.values()])
    host_values = [*(float(count) for _, count in losses.values()), float(stop_requested), waited]
    host = torch.tensor(host_values, dtype=torch.float64)
    host = host.pin_memory() if sums.is_cuda else host  # a copy from pageable memory would wait for the device
    numbers = torch.cat([sums, host.to(sums.device, non_blocking=True)])
    if world.size > 1:
        dist.all_reduce(numbers)
    return numbers


def mean_loss(losses: Losses, numbers: Tensor, weights: Mapping[str, float]) -> Tensor:
    """Return this rank's share of the total loss: the weighted sum of the losses, each a mean over all ranks.

    The shares of all ranks sum to the total loss. `numbers` is the result of `sum_losses`. A loss without labels in the
    batch counts as 0, not NaN.
    """
    divisors = numbers[len(losses) :].clamp(min=1).float()
    total = 0.0
    for (name, (value, _)), count in zip(losses.items(), divisors, strict=False):
        if value.requires_grad:
            total = total + weights.get(name, 1.0) * value / count
    return torch.as_tensor(total)


@dataclass(frozen=True)
class Step:
    """Result of the forward and backward passes of one step, over all ranks."""

    sums: dict[str, tuple[float, float]]  # name -> (sum, divisor); losses as `loss_<name>`, measures by their own name
    losses: dict[str, float]  # mean of each loss, by name
    loss: float  # sum of the weighted mean losses, which is minimised
    norm: float  # gradient norm before clipping
    waited: float  # seconds that a rank waited for the step's data, on average
    stop_requested: bool  # True if any rank received SIGTERM or SIGINT

    @classmethod
    def of(
        cls, losses: Losses, parts: Sequence[Tensor], norm: Tensor, weights: Mapping[str, float], world: World
    ) -> "Step":
        """Build a Step from the gradient norm and the `sum_losses` results of a batch's parts. Waits for the device."""
        names = [(LOSS if value.requires_grad else "") + name for name, (value, _) in losses.items()]
        *numbers, norm = torch.cat([*parts, norm.detach().double().reshape(1)]).tolist()
        rows = np.reshape(numbers, (len(parts), -1))
        sums, counts = rows[:, : len(names)], rows[:, len(names) : -2]
        means = dict(zip(names, (sums / np.maximum(counts, 1)).mean(0).tolist(), strict=True))
        loss_means = {name.removeprefix(LOSS): mean for name, mean in means.items() if name.startswith(LOSS)}
        loss = sum(weights.get(name, 1.0) * mean for name, mean in loss_means.items())
        totals = zip(sums.sum(0).tolist(), counts.sum(0).tolist(), strict=True)
        stop_requested, waited = rows[-1, -2:].tolist()
        by_name = dict(zip(names, totals, strict=True))
        return cls(by_name, loss_means, loss, norm, waited / world.size, stop_requested > 0)


class RunningAverages:
    """Averages over the steps since the last log line. Call `reset` after each line.

    Attributes:
        counts: Counts by name: "skipped" for skipped steps, and any that the caller adds, such as "unreadable".
        steps: Number of steps, including skipped ones.
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
        """State to save in a checkpoint. Times are left out, so that identical runs save identical states."""
        return {"sums": dict(self._sums), "norms": list(self._norms), "counts": dict(self.counts)}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: exclude the time spent in the block from the training time."""
        began = time.monotonic()
        yield
        self._paused += time.monotonic() - began

    def add(self, step: Step, taken: bool) -> None:
        """Add a step. The losses and gradient norm of a skipped step (`taken` is False) are left out."""
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
        """Return the mean of each loss, named `loss_<name>`, and of each measure (a logged value without gradient).

        Loss weights are not applied. If any step was taken, the mean and maximum gradient norm before clipping are
        included as `gradient_norm` and `gradient_norm_max`.
        """
        means = {name: total / count for name, (total, count) in sorted(self._sums.items()) if count}
        if norms := self._norms:
            means |= {"gradient_norm": sum(norms) / len(norms), "gradient_norm_max": max(norms)}
        return means

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of training since the last log line, and how many of these were spent waiting for data."""
        return max(1e-9, time.monotonic() - self._began - self._paused), self._waited


def with_wait_times(items: Iterable[Item]) -> Iterator[tuple[Item, float]]:
    """Yield each item with the seconds spent waiting for it."""
    began = time.monotonic()
    for item in items:
        yield item, time.monotonic() - began
        began = time.monotonic()


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: GPU memory or, without a GPU, host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux
