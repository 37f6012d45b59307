"""The loop that trains any model of ours: one optimizer step after the other.

The subclasses of Run, in vlbert/train.py and detectors/train.py, define what a step computes, validates and saves.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from storage.object_store import StorageUnreachable
from storage.settings import to_json
from training import distributed
from training.checkpoint import WAIT_AT_END, WAIT_WHEN_STOPPED, Writer
from training.distributed import World
from training.log import RunLog, Unreadable
from training.metrics import Losses, RunningAverages, Step, mean_loss, peak_memory, sum_losses, timed
from training.optimizer import clip_gradients, set_learning_rate
from training.program import find_trackers
from training.skipping import LiveNorms, Skipping
from training.stopping import Stop, Stopped


@dataclass(eq=False, kw_only=True)
class Run(ABC):
    """A training as the loop runs it: subclasses define a step, a validation and a checkpoint.

    recipe      RunSettings with an `optimizer`
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
        recipe, trackers = self.recipe, find_trackers(self.recipe.trackers)
        of_run = recipe.run, self.step, recipe.steps, self.samples_per_step, self.world.size
        return RunLog(self.writer, *of_run, self.metadata, trackers, to_json(recipe))

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
        """On the first process: begin the checkpoint after `done` steps (training/checkpoint.py). `validation`: the
        metrics after the same step, {} if there was none."""

    @property
    def max_unreadable(self) -> float:
        """So many unreadable samples, and no more, are passed over."""
        return math.inf

    def note_unreadable(self, unreadable: list[Unreadable]) -> dict[str, int]:
        """Write down, and forget, what could not be read on any process; how many that were.

        ValueError, on every process, where the run has met more than `max_unreadable`.
        """
        found = [*distributed.gather_rows(unreadable, self.world)]
        unreadable.clear()
        if not found:
            return {}
        in_all = distributed.broadcast(self.log and self.log.unreadable(asdict(one) for one in found), self.world)
        if in_all > self.max_unreadable:
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
    skipping, averages = Skipping(recipe.spike, resumed.get("skipping")), RunningAverages(resumed.get("since"))
    norms = LiveNorms(run.model)
    with Stop() as stop, run.log.running() if run.log else contextlib.nullcontext():
        for step, (parts, waited) in zip(range(run.step, recipe.steps), timed(run.batches()), strict=True):
            run.prepare(step)
            norms.keep()
            totals = add_gradients(run, parallel, parts, stop, waited)
            norm = clip_gradients(run.model, recipe.optimizer)
            found, done = Step.of(*totals, norm, run.loss_weights, world), step + 1
            why = skipping.why(found)
            if why is None:
                optimizer.step()
            else:
                norms.restore()
                log_skipped(run, done, why, found, parts)
            optimizer.zero_grad(set_to_none=True)
            averages.add(found, taken=why is None)
            if run.log:
                run.log.step(done)
            if skipping.in_a_row >= recipe.most_skipped:
                raise too_many_skipped(run, skipping.in_a_row, done, why)
            validated = between_steps(run, done, found.stop_requested, stop, skipping, averages)
            metrics = metrics if validated is None else validated
        distributed.barrier(world)
    return metrics


def between_steps(
    run: Run, done: int, stop_requested: bool, stop: Stop, skipping: Skipping, averages: RunningAverages
) -> dict[str, float] | None:
    """A line of the log, a validation, a checkpoint, where they are due after so many steps; the metrics, where that
    was a validation.

    stop_requested: on any rank. Then Stopped, when all is saved.
    """
    recipe, world, log, metrics = run.recipe, run.world, run.log, None
    last = done == recipe.steps
    saves, validates = last or done % recipe.save_every == 0, last or done % recipe.validate_every == 0
    if saves or done % recipe.log_every == 0:
        averages.counts.update(run.note_unreadable(run.unreadable))
        if log:
            log.training(done, averages, run.optimizer.param_groups[0]["lr"], peak_memory(world.device))
        averages.reset()
    if validates and run.validate:
        with averages.paused(), log.during("validating") if log else contextlib.nullcontext():
            # Live norms have statistics of their own on each rank; those of rank 0 are validated and saved.
            distributed.broadcast_buffers(run.model, world)
            metrics, rows = run.validate()
        if log:
            log.validation(done, metrics, rows)
        stop_requested = any(distributed.gather_rows([stop_requested or stop.requested], world))
    stops = stop_requested and not last
    if stops:
        averages.counts.update(run.note_unreadable(run.unreadable))  # they wait for the next line in the state
    if log and (saves or stops):
        with averages.paused(), log.during("saving"):
            run.save(done, metrics or {}, {"skipping": skipping.state, "since": averages.state})
            if last or stops:
                run.writer.finish(WAIT_WHEN_STOPPED if stops else WAIT_AT_END)
    if stops:
        checkpoint = distributed.broadcast(log and log.checkpoint, world)
        raise Stopped(f"after step {done} of {recipe.steps}; the next start goes on from {checkpoint}")
    return metrics


def add_gradients(
    run: Run, parallel: nn.Module, parts: Sequence[Any], stop: Stop, waited: float
) -> tuple[Losses, list[Tensor]]:
    """The forward and backward passes of a step; the losses of its last part and the sums of each over all ranks, with
    the last whether a stop was requested on any."""
    losses, totals, world = {}, [], run.world
    for number, part in enumerate(parts):
        syncs = world.size == 1 or number == len(parts) - 1  # gradients meet after the last part
        with contextlib.nullcontext() if syncs else parallel.no_sync():
            losses = run.losses(parallel, part)
            totals.append(sum_losses(losses, world, stop.requested, waited))
            loss = mean_loss(losses, totals[-1], run.loss_weights) / len(parts)
            (loss * world.size).backward()  # DDP averages gradients over ranks; ours are to be summed
    return losses, totals


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
    names, checkpoint = distributed.broadcast(log and (log.uri("skipped.jsonl"), log.checkpoint), run.world)
    return FloatingPointError(
        f"{number} steps in a row were left out, the last of them, {done}, because {why}. {names} names their samples; "
        + (f"the last good checkpoint is {checkpoint}. " if checkpoint else "no checkpoint was saved. ")
        + "If it is the samples, take them out of the data; if the loss was about to diverge, start another run "
        "(--run_name=NAME, --init_from=CHECKPOINT) with a lower optimizer.learning_rate; if such losses are to be "
        "learned from, allow them: --spike=FACTOR, or --spike=None"
    )
