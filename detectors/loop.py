"""The loop that trains any model of ours: recipe from the command line, one optimizer step after the other.

What a step computes, validates and saves is the caller's: vlbert/train.py and detectors/train.py.
"""

import argparse
import contextlib
import importlib
import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from detectors import distributed
from detectors.distributed import World
from detectors.fields import override
from detectors.record import Record
from storage.objects import ObjectMissing, StorageUnreachable

# Name -> (sum over this process's part of a batch, by how many to divide it): so that any number of processes adds up
# to the same.
Losses = dict[str, tuple[Tensor, int]]

# What is wrong with data, settings or storage: these end a program with one line, and need no traceback.
EXPECTED = (ValueError, FloatingPointError, ObjectMissing, StorageUnreachable)


def train_steps(
    recipe: Any,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    batches: Iterable[Sequence[Any]],
    *,
    record: Record | None,
    prepare: Callable[[int], None],
    losses_of: Callable[[nn.Module, Any], Losses],
    validate: Callable[[], tuple[dict[str, float], list[dict]]] | None,
    save: Callable[[int], None],
    on_log: Callable[[], Mapping[str, float] | None] = lambda: None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Take these steps of a run; the metrics of the last validation.

    recipe: of its fields, steps, log_every, validate_every, save_every and optimizer.clip count. batches: for each step
    this process's parts, whose gradients are added. prepare(step) comes before a step, losses_of(model, part) is its
    forward pass, on_log before each line of the log, which tells the counts that it returns, save(steps done) on the
    first process alone. weights: of losses by name, where not 1. FloatingPointError where a gradient is not finite:
    nothing is changed by it.
    """
    parallel = DistributedDataParallel(model) if world.size > 1 else model
    since_log, metrics = Counter(), {}
    for step, parts in zip(steps, batches, strict=True):
        prepare(step)
        for number, part in enumerate(parts):
            syncs = world.size == 1 or number == len(parts) - 1  # gradients meet after the last part
            with contextlib.nullcontext() if syncs else parallel.no_sync():
                loss = mean_losses(losses_of(parallel, part), world, since_log, weights or {}) / len(parts)
                (loss * world.size).backward()  # DDP averages gradients over ranks; ours are to be summed
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip or math.inf)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of step {step + 1} is not finite; nothing was changed by it. The run's last checkpoint "
                "is whole: start another run from it (run=NAME start_from=...), with a lower optimizer.learning_rate"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        done = step + 1
        last = done == recipe.steps
        saves, validates = last or done % recipe.save_every == 0, last or done % recipe.validate_every == 0
        if saves or done % recipe.log_every == 0:
            averages = average_losses(since_log, world)
            since_log.clear()
            counts = on_log() or {}
            if record:
                record.training(done, averages, optimizer.param_groups[0]["lr"], counts)
        if validates and validate:
            metrics, rows = validate()
            if record:
                record.validation(done, metrics, rows)
        if saves:
            if record:
                record.publish()  # before the checkpoint: what is too new is cut off when the run goes on
                save(done)
            distributed.wait_for_all(world)
    if record:
        record.close()
    return metrics


def mean_losses(losses: Losses, world: World, since_log: Counter, weights: Mapping[str, float]) -> Tensor:
    """This rank's share of the weighted losses, each divided by what was asked over all ranks; notes sums and counts.

    A loss that nobody was asked about in this step is 0, not NaN.
    """
    counts = distributed.sum_over_ranks([count for _, count in losses.values()], world)
    total = 0.0
    for (name, (loss, count)), everywhere in zip(losses.items(), counts, strict=True):
        total = total + weights.get(name, 1.0) * loss / max(1, everywhere)
        since_log[name, "sum"] += loss.detach().double()
        since_log[name, "count"] += count
    return total


def average_losses(since_log: Counter, world: World) -> dict[str, float]:
    """Losses since the last log, without weights, each over what was asked, on all ranks."""
    names = sorted({name for name, _ in since_log})
    sums = distributed.sum_over_ranks([float(since_log[name, "sum"]) for name in names], world)
    counts = distributed.sum_over_ranks([float(since_log[name, "count"]) for name in names], world)
    return {name: s / c for name, s, c in zip(names, sums, counts, strict=True) if c}


def batches(data: Dataset, steps: Sequence[int], workers: int, device: torch.device) -> Iterator[Any]:
    """data[step] for every step, in order, made ahead of time by `workers` processes; their errors come out as ours."""
    loader = DataLoader(
        _Caught(data),
        sampler=steps,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        # Forked workers share what the data has read already; to others it would be copied.
        multiprocessing_context="fork" if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_one_thread if workers else None,
    )
    for found in loader:
        if isinstance(found, EXPECTED):
            raise found
        yield found


class _Caught(Dataset):
    """data, with errors as values: what a worker raises comes out of a DataLoader as the text of a traceback."""

    def __init__(self, data: Dataset):
        self.data = data

    def __getitem__(self, step: int) -> Any:
        try:
            return self.data[step]
        except EXPECTED as error:
            return error


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)


def _as_it_is(item: Any) -> Any:
    return item


def run_program(
    program: str,
    about: str,
    recipes: Mapping[str, Callable[[], Any]],
    check_complete: Callable[[Any], None],
    train: Callable[[Any, World], Any],
    arguments: Sequence[str] | None,
) -> None:
    """`PROGRAM RECIPE [field=value ...]`, on one process or under torchrun; what is wrong ends it with one line."""
    parser = argparse.ArgumentParser(
        prog=program, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", metavar="RECIPE", help=f"{', '.join(sorted(recipes))}, or MODULE:FUNCTION")
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_args(arguments)
    name = f"{program} {options.recipe}"
    try:
        recipe = override(find_recipe(options.recipe, recipes)(), options.overrides)
        check_complete(recipe)
    except ValueError as error:
        sys.exit(f"{name}: {error}")
    run_in_world(name, lambda world: train(recipe, world))


def find_recipe(name: str, recipes: Mapping[str, Callable[[], Any]]) -> Callable[[], Any]:
    """The recipe of this name; MODULE:FUNCTION is one of your own, importable from the working directory."""
    if name in recipes:
        return recipes[name]
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError(
            f"there is no such recipe, only {', '.join(sorted(recipes))}; name your own as MODULE:FUNCTION"
        )
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); run this in the folder that holds {module.partition('.')[0]}.py"
        ) from error
    if not callable(getattr(found, function, None)):
        raise ValueError(f"{module} has no function {function!r}")
    return getattr(found, function)


def run_in_world(name: str, work: Callable[[World], Any]) -> None:
    """`work` in the world that torchrun describes, or alone; what is wrong ends the program with one line."""
    try:
        world = distributed.start()
        try:
            work(world)
        except EXPECTED as error:
            sys.exit(f"{name}: {'' if world.first else f'rank {world.rank}: '}{error}")
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    distributed.stop(world)  # not after an error: it would wait for ranks that are still at work
