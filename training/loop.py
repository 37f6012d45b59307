"""The loop that trains any model of ours: recipe from the command line, one optimizer step after the other.

What a step computes, validates and saves is the caller's: vlbert/train.py and detectors/train.py.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from storage.objects import ObjectMissing, StorageUnreachable
from training import distributed
from training.config import override
from training.distributed import World
from training.log import Record
from training.metrics import Losses, Since, Step, Totals, timed
from training.skipping import LiveNorms, Skipping
from training.stopping import Stop, Stopped, obey_the_loader_alone, pass_over_requests
from training.writer import PATIENCE, STOPPED_PATIENCE

# What is wrong with data, settings or storage: these end a program with one line, and need no traceback.
EXPECTED = (ValueError, FloatingPointError, ObjectMissing, StorageUnreachable)
STOPPED = os.EX_TEMPFAIL  # 75, the exit status of a run that was told to stop and has saved: start it again
_BEFORE_ANOTHERS_FAILURE = 2.0  # seconds that a rank waits before it ends because another one did


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
    keys_of: Callable[[Any], Sequence[str]],
    validate: Callable[[], tuple[dict[str, float], list[dict]]] | None,
    save: Callable[[int, dict[str, Any]], None],
    finish: Callable[[float], None] = lambda patience: None,
    on_log: Callable[[], Mapping[str, int] | None] = lambda: None,
    weights: Mapping[str, float] | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Take these steps of a run; the metrics of the last validation.

    recipe: of its fields, steps, log_every, validate_every, save_every, spike, most_skipped and optimizer.clip count.
    batches: for each step this process's parts, whose gradients are added. prepare(step) comes before a step,
    losses_of(model, part) is its forward pass, keys_of(part) names its samples; on_log comes before each line of the
    log, which tells the counts that it returns. On the first process alone, save(steps done, state of this loop)
    begins a checkpoint, and finish(patience) returns when it is whole (training/writer.py). weights: of losses by
    name, where not 1. resumed: the state in the checkpoint that goes on; None where that has none.

    FloatingPointError where recipe.most_skipped steps in a row were left out. Stopped, on all ranks, after SIGTERM or
    SIGINT.
    """
    # Gradients as views of what is sent: no second copy of them, in memory or in time.
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True) if world.size > 1 else model
    resumed, weights, metrics = resumed or {}, weights or {}, {}
    skipping, since = Skipping(recipe.spike, resumed.get("skipping")), Since(resumed.get("since"))
    norms = LiveNorms(model)
    with Stop() as stop, record.running() if record else contextlib.nullcontext():
        between = _Between(recipe, world, record, stop, skipping, since, on_log, validate, save, finish)
        for step, (parts, waited) in zip(steps, timed(batches), strict=True):
            prepare(step)
            norms.keep()
            totals = add_gradients(parallel, parts, losses_of, weights, world, stop, waited)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip or math.inf)
            found, done = Step.of(totals, norm, weights, world), step + 1
            why = skipping.why(found)
            if why is None:
                optimizer.step()
            else:
                norms.put_back()
                tell_skipped(done, why, found, [key for part in parts for key in keys_of(part)], world, record)
            optimizer.zero_grad(set_to_none=True)
            since.add(found, taken=why is None)
            if record:
                record.step(done)
            if skipping.in_a_row >= recipe.most_skipped:
                raise too_many_skipped(skipping.in_a_row, done, why, world, record, finish)
            validated = between.steps(done, found.told, optimizer.param_groups[0]["lr"])
            metrics = metrics if validated is None else validated
        distributed.wait_for_all(world)
    return metrics


@dataclass(frozen=True, eq=False)
class _Between:
    """What comes between two steps: a line of the log, a validation, a checkpoint, or the end of a run that was told to
    stop. The fields are arguments and state of `train_steps`."""

    recipe: Any
    world: World
    record: Record | None
    stop: Stop
    skipping: Skipping
    since: Since
    on_log: Callable[[], Mapping[str, int] | None]
    validate: Callable[[], tuple[dict[str, float], list[dict]]] | None
    save: Callable[[int, dict[str, Any]], None]
    finish: Callable[[float], None]

    def steps(self, done: int, told: bool, learning_rate: float) -> dict[str, float] | None:
        """Do what is due after so many steps; the metrics, where that was a validation.

        told: whether any rank was told to stop. Then Stopped, when all is saved.
        """
        recipe, record, since, metrics = self.recipe, self.record, self.since, None
        last = done == recipe.steps
        saves, validates = last or done % recipe.save_every == 0, last or done % recipe.validate_every == 0
        if saves or done % recipe.log_every == 0:
            since.counts.update(self.on_log() or {})
            line = since.line(self.world.device)
            if record:
                record.training(done, line, learning_rate)
        if validates and self.validate:
            with since.paused(), record.during("validating") if record else contextlib.nullcontext():
                metrics, rows = self.validate()
            if record:
                record.validation(done, metrics, rows)
            told = any(distributed.gather_rows([told or self.stop.told], self.world))
        stops = told and not last
        if stops:
            since.counts.update(self.on_log() or {})  # they wait for the next line in the state
        if record and (saves or stops):
            with since.paused(), record.during("saving"):
                record.publish()  # before the checkpoint: what is too new is cut off when the run goes on
                self.save(done, {"skipping": self.skipping.state, "since": since.state})
                if last or stops:
                    self.finish(STOPPED_PATIENCE if stops else PATIENCE)
        if stops:
            checkpoint = distributed.from_first(record and record.checkpoint, self.world)
            raise Stopped(f"after step {done} of {recipe.steps}; the next start goes on from {checkpoint}")
        return metrics


def add_gradients(
    parallel: nn.Module,
    parts: Sequence[Any],
    losses_of: Callable[[nn.Module, Any], Losses],
    weights: Mapping[str, float],
    world: World,
    stop: Stop,
    waited: float,
) -> list[Totals]:
    """The forward and backward passes of a step; of each part what it came to over all ranks, and with the last
    whether any was told to stop."""
    totals = []
    for number, part in enumerate(parts):
        syncs = world.size == 1 or number == len(parts) - 1  # gradients meet after the last part
        with contextlib.nullcontext() if syncs else parallel.no_sync():
            losses = losses_of(parallel, part)
            totals.append(Totals.of(losses, world, stop.told, waited))
            loss = totals[-1].mean(losses, weights) / len(parts)
            (loss * world.size).backward()  # DDP averages gradients over ranks; ours are to be summed
    return totals


def tell_skipped(done: int, why: str, found: Step, keys: list[str], world: World, record: Record | None) -> None:
    """Write down that a step was left out, and the samples of all ranks in it."""
    keys = distributed.gather_rows(keys, world)
    if record:
        record.skipped(done, why, found, keys)


def too_many_skipped(
    number: int, done: int, why: str, world: World, record: Record | None, finish: Callable[[float], None]
) -> FloatingPointError:
    """The error that ends a run whose steps teach nothing any more, the same on every rank."""
    if record:
        # One that is being written may be the last good checkpoint. What is not saved, the writer says at its end.
        with contextlib.suppress(StorageUnreachable):
            finish(STOPPED_PATIENCE)
    names, checkpoint = distributed.from_first(record and (record.where("skipped.jsonl"), record.checkpoint), world)
    return FloatingPointError(
        f"{number} steps in a row were left out, the last of them, {done}, because {why}. {names} names their samples; "
        + (f"the last good checkpoint is {checkpoint}. " if checkpoint else "no checkpoint was saved. ")
        + "If it is the samples, take them out of the data; if the loss was about to diverge, start another run "
        "(run=NAME, start_from=CHECKPOINT) with a lower optimizer.learning_rate; if such losses are to be learned "
        "from, allow them: spike=FACTOR, or spike=none"
    )


def batches(data: Dataset, steps: Sequence[int], workers: int, device: torch.device) -> Iterator[Any]:
    """data[step] for every step, in order, on the device, made ahead of time by `workers` processes; their errors come
    out as ours."""
    loader = DataLoader(
        _Caught(data),
        sampler=steps,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        # Forked workers share what the data has read already; to others it would be copied. They take no lock that the
        # writer's thread may hold meanwhile: clients of a bucket are made anew, and stdout is flushed before a fork.
        multiprocessing_context="fork" if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_start_worker if workers else None,
    )
    for found in copied_ahead(loader, device) if device.type == "cuda" else loader:
        if isinstance(found, EXPECTED):
            raise found
        yield found


def copied_ahead(items: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The items on the device, each copied there while it computes from the one before."""
    streams = torch.get_device_module(device)
    copying = streams.Stream()

    def copies() -> Iterator[tuple[Any, Any]]:
        for item in items:
            # Memory of older items, which is written over now, may still be read by what was asked for until here.
            copying.wait_stream(streams.current_stream())
            with streams.stream(copying):
                copied = _moved(item, device)
            yield copied, copying.record_event()

    for (item, is_there), _ in itertools.pairwise(itertools.chain(copies(), [None])):
        streams.current_stream().wait_event(is_there)
        yield item


def _moved(item: Any, device: torch.device) -> Any:
    """The item with all that has a method `to`, in lists and tuples too, on the device."""
    if isinstance(item, list | tuple):
        return type(item)(_moved(part, device) for part in item)
    return item.to(device) if hasattr(item, "to") else item


class _Caught(Dataset):
    """data, with errors as values: what a worker raises comes out of a DataLoader as the text of a traceback."""

    def __init__(self, data: Dataset):
        self.data = data

    def __getitem__(self, step: int) -> Any:
        try:
            return self.data[step]
        except EXPECTED as error:
            return error


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    obey_the_loader_alone()


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


def run_in_world(name: str, work: Callable[[World], Any], limit: timedelta = distributed.TIME_LIMIT) -> None:
    """`work` in the world that torchrun describes, or alone; what is wrong ends the program with one line.

    What another rank did wrong is left to that one to say, and a bug keeps its traceback. Where the run was told to
    stop, each rank ends with the status STOPPED.
    """
    world = None
    try:
        world = distributed.start(limit)
        try:
            work(world)
        except Stopped as stopped:
            pass_over_requests()
            if world.first:
                print(f"{name}: stopped: {stopped}", file=sys.stderr, flush=True)
            distributed.wait_for_all(world)  # the first one saves: one that ended before would have torchrun end it
            sys.exit(STOPPED)
    except EXPECTED as error:
        _tell_torchrun(f"{_rank(world)}{error}")
        sys.exit(f"{name}: {_rank(world)}{error}")
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        fault = distributed.fault_of_another(error)
        if fault is None:
            raise
        # Meanwhile torchrun sees which rank ended first, names that one, and ends those of its own machine.
        time.sleep(_BEFORE_ANOTHERS_FAILURE)
        sys.exit(f"{name}: {_rank(world)}another rank is gone or hangs ({fault}); its error stands above, or there")
    distributed.stop(world)  # not after an error: it would wait for ranks that are still at work


def _tell_torchrun(reason: str) -> None:
    """Have torchrun's own report, which comes last, say why this rank ended."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": reason, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as stream:
            json.dump({"message": {"message": reason, "extraInfo": extra}}, stream)


def _rank(world: World | None) -> str:
    return "" if world is None or world.first else f"rank {world.rank}: "
