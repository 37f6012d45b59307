"""The loop that trains any model of ours: recipe from the command line, one optimizer step after the other.

The subclasses of Run, in vlbert/train.py and detectors/train.py, define what a step computes, validates and saves.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from storage.object_store import ObjectMissing, StorageUnreachable
from storage.settings import add_fields, override
from training import distributed
from training.distributed import World
from training.log import RunLog, Unreadable
from training.metrics import Losses, Since, Step, Totals, timed
from training.optimizer import set_learning_rate
from training.skipping import LiveNorms, Skipping
from training.stopping import Stop, Stopped, obey_the_loader_alone, pass_over_requests
from training.writer import WAIT_AT_END, WAIT_WHEN_STOPPED, Writer

# What is wrong with data, settings or storage: these end a program with one line, and need no traceback.
EXPECTED = (ValueError, FloatingPointError, ObjectMissing, StorageUnreachable)
STOPPED = os.EX_TEMPFAIL  # 75, the exit status of a run that was told to stop and has saved: start it again
_BEFORE_ANOTHERS_FAILURE = 2.0  # seconds that a rank waits before it ends because another one did


@dataclass(eq=False, kw_only=True)
class Run(ABC):
    """A training as the loop runs it: subclasses define a step, a validation and a checkpoint.

    recipe      of its fields, run_name, steps, log_every, validate_every, save_every, spike, most_skipped and optimizer
                count
    model       what learns; the loop wraps it for several processes
    step        optimizer steps that are done already
    loop_state  the state of the loop in the checkpoint that goes on; None where that has none
    log         on the first process, from the first step on
    metadata    what the heartbeat says of the run beside its progress
    unreadable  what this process met since the last line of the log
    """

    recipe: Any
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    writer: Writer
    step: int = 0
    loop_state: Mapping[str, Any] | None = None
    log: RunLog | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    unreadable: list[Unreadable] = field(default_factory=list)

    # By name, where a loss counts by another weight than 1.
    loss_weights: ClassVar[Mapping[str, float]] = {}

    @property
    @abstractmethod
    def samples_per_step(self) -> int:
        """Over all processes."""

    @abstractmethod
    def batches(self) -> Iterable[Sequence[Any]]:
        """For each step that is left this process's parts, whose gradients are added."""

    def open_log(self) -> RunLog | None:
        """The log, on the first process; None: nothing is logged or saved."""
        recipe, per_step, processes = self.recipe, self.samples_per_step, self.world.size
        return RunLog(self.writer, recipe.run_name, self.step, recipe.steps, per_step, processes, self.metadata)

    def prepare(self, step: int) -> None:
        """What comes before a step."""
        set_learning_rate(self.optimizer, step, self.recipe.steps, self.recipe.optimizer)

    @abstractmethod
    def losses(self, model: nn.Module, part: Any) -> Losses:
        """The forward pass of `model`, which is self.model, maybe wrapped; adds to `unreadable`."""

    @abstractmethod
    def keys(self, part: Any) -> Sequence[str]:
        """Names of the samples in a part."""

    @property
    def validate(self) -> Callable[[], tuple[dict[str, float], list[dict]]] | None:
        """Returns (metrics, predictions), the same on every process; None where there is nothing to validate on."""
        return None

    @abstractmethod
    def save(self, done: int, validation: Mapping[str, float], loop_state: Mapping[str, Any]) -> None:
        """On the first process: begin the checkpoint after `done` steps (training/writer.py). `validation` is what was
        measured after the same step, {} where nothing was."""

    @property
    def most_unreadable(self) -> float:
        """So many unreadable samples, and no more, are passed over."""
        return math.inf

    def note_unreadable(self, unreadable: list[Unreadable]) -> dict[str, int]:
        """Write down, and forget, what could not be read on any process; how many that were.

        ValueError, on every process, where the run has met more than `most_unreadable`.
        """
        found = [*distributed.gather_rows(unreadable, self.world)]
        unreadable.clear()
        if not found:
            return {}
        in_all = distributed.from_first(self.log and self.log.unreadable(asdict(one) for one in found), self.world)
        if in_all > self.most_unreadable:
            raise ValueError(
                f"{in_all} samples cannot be read, the last because {found[-1].reason}. Fetch them again, or allow a "
                "larger share: data.unreadable"
            )
        return {"unreadable": len(found)}


def train_steps(run: Run) -> dict[str, float]:
    """Take the steps of a run that are left; the metrics of the last validation.

    FloatingPointError where recipe.most_skipped steps in a row were left out. Stopped, on all ranks, after SIGTERM or
    SIGINT.
    """
    recipe, world, optimizer = run.recipe, run.world, run.optimizer
    if world.first:
        run.log = run.open_log()
    # Gradients as views of what is sent: no second copy of them, in memory or in time.
    parallel = DistributedDataParallel(run.model, gradient_as_bucket_view=True) if world.size > 1 else run.model
    resumed, metrics = run.loop_state or {}, {}
    skipping, since = Skipping(recipe.spike, resumed.get("skipping")), Since(resumed.get("since"))
    norms = LiveNorms(run.model)
    with Stop() as stop, run.log.running() if run.log else contextlib.nullcontext():
        for step, (parts, waited) in zip(range(run.step, recipe.steps), timed(run.batches()), strict=True):
            run.prepare(step)
            norms.keep()
            totals = add_gradients(run, parallel, parts, stop, waited)
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.optimizer.max_grad_norm or math.inf)
            found, done = Step.of(totals, norm, run.loss_weights, world), step + 1
            why = skipping.why(found)
            if why is None:
                optimizer.step()
            else:
                norms.put_back()
                log_skipped(run, done, why, found, parts)
            optimizer.zero_grad(set_to_none=True)
            since.add(found, taken=why is None)
            if run.log:
                run.log.step(done)
            if skipping.in_a_row >= recipe.most_skipped:
                raise too_many_skipped(run, skipping.in_a_row, done, why)
            validated = between_steps(run, done, found.stop_requested, stop, skipping, since)
            metrics = metrics if validated is None else validated
        distributed.wait_for_all(world)
    return metrics


def between_steps(
    run: Run, done: int, stop_requested: bool, stop: Stop, skipping: Skipping, since: Since
) -> dict[str, float] | None:
    """A line of the log, a validation, a checkpoint, where they are due after so many steps; the metrics, where that
    was a validation.

    stop_requested: on any rank. Then Stopped, when all is saved.
    """
    recipe, world, log, metrics = run.recipe, run.world, run.log, None
    last = done == recipe.steps
    saves, validates = last or done % recipe.save_every == 0, last or done % recipe.validate_every == 0
    if saves or done % recipe.log_every == 0:
        since.counts.update(run.note_unreadable(run.unreadable))
        line = since.line(world.device)
        if log:
            log.training(done, line, run.optimizer.param_groups[0]["lr"])
    if validates and run.validate:
        with since.paused(), log.during("validating") if log else contextlib.nullcontext():
            metrics, rows = run.validate()
        if log:
            log.validation(done, metrics, rows)
        stop_requested = any(distributed.gather_rows([stop_requested or stop.requested], world))
    stops = stop_requested and not last
    if stops:
        since.counts.update(run.note_unreadable(run.unreadable))  # they wait for the next line in the state
    if log and (saves or stops):
        with since.paused(), log.during("saving"):
            log.publish()  # before the checkpoint: what is too new is cut off when the run goes on
            run.save(done, metrics or {}, {"skipping": skipping.state, "since": since.state})
            if last or stops:
                run.writer.finish(WAIT_WHEN_STOPPED if stops else WAIT_AT_END)
    if stops:
        checkpoint = distributed.from_first(log and log.checkpoint, world)
        raise Stopped(f"after step {done} of {recipe.steps}; the next start goes on from {checkpoint}")
    return metrics


def add_gradients(run: Run, parallel: nn.Module, parts: Sequence[Any], stop: Stop, waited: float) -> list[Totals]:
    """The forward and backward passes of a step; of each part what it came to over all ranks, and with the last
    whether a stop was requested on any."""
    totals, world = [], run.world
    for number, part in enumerate(parts):
        syncs = world.size == 1 or number == len(parts) - 1  # gradients meet after the last part
        with contextlib.nullcontext() if syncs else parallel.no_sync():
            losses = run.losses(parallel, part)
            totals.append(Totals.of(losses, world, stop.requested, waited))
            loss = totals[-1].mean(losses, run.loss_weights) / len(parts)
            (loss * world.size).backward()  # DDP averages gradients over ranks; ours are to be summed
    return totals


def log_skipped(run: Run, done: int, why: str, found: Step, parts: Sequence[Any]) -> None:
    """Write down that a step was left out, and the samples of all ranks in it."""
    keys = distributed.gather_rows([key for part in parts for key in run.keys(part)], run.world)
    if run.log:
        run.log.skipped(done, why, found, keys)


def too_many_skipped(run: Run, number: int, done: int, why: str) -> FloatingPointError:
    """The error that ends a run whose steps teach nothing any more, the same on every rank."""
    log = run.log
    if log:
        # One that is being written may be the last good checkpoint. What is not saved, the writer says at its end.
        with contextlib.suppress(StorageUnreachable):
            run.writer.finish(WAIT_WHEN_STOPPED)
    names, checkpoint = distributed.from_first(log and (log.where("skipped.jsonl"), log.checkpoint), run.world)
    return FloatingPointError(
        f"{number} steps in a row were left out, the last of them, {done}, because {why}. {names} names their samples; "
        + (f"the last good checkpoint is {checkpoint}. " if checkpoint else "no checkpoint was saved. ")
        + "If it is the samples, take them out of the data; if the loss was about to diverge, start another run "
        "(run=NAME, init_from=CHECKPOINT) with a lower optimizer.learning_rate; if such losses are to be learned "
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
    description: str,
    recipes: Mapping[str, Callable[[], Any]],
    check_complete: Callable[[Any], None],
    train: Callable[[Any, World], Any],
    arguments: Sequence[str] | None,
) -> None:
    """`PROGRAM RECIPE [field=value ...]`, on one process or under torchrun; what is wrong ends it with one line."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("recipe", metavar="RECIPE", help=f"{', '.join(sorted(recipes))}, or MODULE:FUNCTION")
    add_recipe_fields(parser, recipes, arguments)
    options = parser.parse_args(arguments)
    name = f"{program} {options.recipe}"
    try:
        recipe = override(find_recipe(options.recipe, recipes)(), options.fields)
        check_complete(recipe)
    except ValueError as error:
        sys.exit(f"{name}: {error}" if os.environ.get("LOCAL_RANK", "0") == "0" else 1)  # once, not on each rank
    run_in_world(name, lambda world: train(recipe, world))


def add_recipe_fields(
    parser: argparse.ArgumentParser, recipes: Mapping[str, Callable[[], Any]], arguments: Sequence[str] | None
) -> None:
    """Have the program take field=value behind RECIPE, into `fields`; RECIPE --help lists those of that recipe."""
    arguments, recipe = sys.argv[1:] if arguments is None else arguments, None
    if {"-h", "--help"} & {*arguments}:
        named = [argument for argument in arguments if not argument.startswith("-")]
        with contextlib.suppress(ValueError):
            recipe = find_recipe(named[0], recipes)() if named else None
    add_fields(parser, recipe, "RECIPE --help lists the fields of that recipe, with its values.")


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

    A rank does not report the error of another rank, and a bug keeps its traceback. Where the run was told to
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
    """Write why this rank ended to the file that torchrun, and training.launch, read."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": reason, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as stream:
            json.dump({"message": {"message": reason, "extraInfo": extra}}, stream)


def _rank(world: World | None) -> str:
    return "" if world is None or world.first else f"rank {world.rank}: "
