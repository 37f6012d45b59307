"""The training loop of all models.

Subclasses of Run, in vlbert/train.py and detectors/train.py, define the forward pass, validation and saving.
"""

import contextlib
import inspect
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from storage.object_store import StorageUnreachable
from storage.settings import to_json
from training import distributed
from training.checkpoint import WAIT_AT_END, WAIT_WHEN_STOPPED, Writer
from training.distributed import World
from training.log import RunLog, Unreadable
from training.metrics import Losses, RunningAverages, Step, mean_loss, peak_memory, sum_losses, with_wait_times
from training.optimizer import clip_gradients, learning_rates, set_learning_rate
from training.program import find_trackers
from training.skipping import Skipping, running_statistics
from training.stopping import Stop, Stopped


@dataclass(eq=False, kw_only=True)
class Run(ABC):
    """A training run. Subclasses define its forward pass, validation and checkpoint."""

    recipe: Any  # RunSettings with an `optimizer`
    world: World
    model: Any  # an nn.Module; with several ranks, the loop wraps it in DistributedDataParallel
    optimizer: torch.optim.Optimizer
    writer: Writer
    step: int = 0  # number of optimizer steps done so far
    loop_state: Mapping[str, Any] | None = None  # from the checkpoint that the run resumes from; None in a new run
    log: RunLog | None = None  # on rank 0, opened before the first step; None on other ranks
    metadata: Mapping[str, Any] = field(default_factory=dict)  # additional fields of the heartbeat
    unreadable: list[Unreadable] = field(default_factory=list)  # samples of this rank since the last log line

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """Weight of each loss, by name. Losses that are not listed have weight 1."""
        return {}

    @property
    @abstractmethod
    def samples_per_step(self) -> int:
        """Number of samples per step, over all ranks."""

    @abstractmethod
    def batches(self) -> Iterable[Sequence[Any]]:
        """Yield this rank's batch for each remaining step, in parts over which gradients are accumulated."""

    def prepare(self, step: int) -> None:
        """Set the learning rate for a step, counted from 0."""
        set_learning_rate(self.optimizer, step, self.recipe.steps, self.recipe.optimizer)

    @abstractmethod
    def losses(self, model: nn.Module, part: Any) -> Losses:
        """Return the losses on a part of a batch, and add the part's unreadable samples to `unreadable`.

        `model` is self.model or its DistributedDataParallel wrapper.
        """

    @abstractmethod
    def keys(self, part: Any) -> Sequence[str]:
        """Return the keys of the samples in a part of a batch."""

    @property
    def validate(self) -> Callable[[], tuple[dict[str, float], list[dict]]] | None:
        """Return a function that runs a validation, or None if there is no validation data.

        The function returns the metrics and the predictions, which are the same on all ranks.
        """
        return None

    @abstractmethod
    def save(self, done: int, validation: Mapping[str, float], loop_state: Mapping[str, Any]) -> None:
        """Queue the checkpoint after `done` steps. Called on rank 0 only.

        `validation` holds the metrics of a validation after the same step, and is empty if there was none.
        """

    @property
    def max_unreadable(self) -> float:
        """Maximum number of unreadable samples in a run. If there are more, the run fails."""
        return math.inf

    def note_unreadable(self, unreadable: list[Unreadable]) -> dict[str, int]:
        """Log the unreadable samples of all ranks, and clear the list. Every rank must call this.

        Returns {"unreadable": number of samples, "cut": number of cut texts}, without zeros. Raises ValueError on every
        rank if the run has had more than `max_unreadable` unreadable samples.
        """
        samples = [*distributed.gather_rows(unreadable, self.world)]
        unreadable.clear()
        if not samples:
            return {}
        total = distributed.broadcast(self.log and self.log.unreadable(asdict(x) for x in samples), self.world)
        counts = {"unreadable": sum(not x.cut for x in samples), "cut": sum(x.cut for x in samples)}
        if counts["unreadable"] and total > self.max_unreadable:
            last = [x.reason for x in samples if not x.cut][-1]
            raise ValueError(
                f"{total} samples cannot be read, the last because {last}. Fetch them again, or allow a "
                "larger share with data.unreadable"
            )
        return {name: count for name, count in counts.items() if count}


def train_steps(run: Run) -> dict[str, float]:
    """Train the remaining steps of a run, and return the metrics of the last validation.

    Raises:
        FloatingPointError: recipe.most_skipped consecutive steps were skipped.
        Stopped: A rank received SIGTERM or SIGINT. Raised on all ranks, after the run is saved.
    """
    recipe, world, optimizer = run.recipe, run.world, run.optimizer
    if world.first:
        progress = recipe.run, run.step, recipe.steps, run.samples_per_step
        metadata = {"processes": world.size, **run.metadata}
        run.log = RunLog(run.writer, *progress, metadata, find_trackers(recipe.trackers), to_json(recipe))
    # Gradients are views of the communication buckets, which saves a copy. Buffers are sent only before a validation.
    known = inspect.signature(DistributedDataParallel).parameters  # of torch 2.11, or newer
    sent = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    ddp = partial(DistributedDataParallel, gradient_as_bucket_view=True, **{sent: False})
    parallel = ddp(run.model) if world.size > 1 else run.model
    resumed, metrics = run.loop_state or {}, {}
    skipping, averages = Skipping(recipe.spike, resumed.get("skipping")), RunningAverages(resumed.get("since"))
    statistics = running_statistics(run.model)
    with Stop() as stop, run.log.running() if run.log else contextlib.nullcontext():
        for step, (parts, waited) in zip(range(run.step, recipe.steps), with_wait_times(run.batches()), strict=True):
            run.prepare(step)
            saved = [buffer.clone() for buffer in statistics]
            with profiled(run, step + 1):
                totals = add_gradients(run, parallel, parts, stop, waited)
                norm = clip_gradients(run.model, recipe.optimizer)
                result, done = Step.of(*totals, norm, run.loss_weights, world), step + 1
                skip_reason = skipping.skip_reason(result)
                if skip_reason is None:
                    optimizer.step()
                else:
                    for buffer, before in zip(statistics, saved, strict=True):
                        buffer.copy_(before)
                    keys = distributed.gather_rows([key for part in parts for key in run.keys(part)], world)
                    if run.log:
                        run.log.skipped(done, skip_reason, result, keys)
                optimizer.zero_grad(set_to_none=True)
            averages.add(result, taken=skip_reason is None)
            if run.log:
                run.log.step(done)
            if skip_reason is not None and skipping.in_a_row >= recipe.most_skipped:
                raise skipped_steps_error(run, skipping.in_a_row, done, skip_reason)
            validated = finish_step(run, done, result.stop_requested, stop, skipping, averages)
            metrics = metrics if validated is None else validated
        distributed.barrier(world)
    return metrics


@contextlib.contextmanager
def profiled(run: Run, number: int) -> Iterator[None]:
    """Context manager: write torch's trace of step recipe.profile on rank 0 and, on a GPU, a snapshot of its memory."""
    if not run.log or number != run.recipe.profile:
        yield
        return
    memory = torch.cuda.memory if run.world.device.type == "cuda" else None
    if memory:
        memory._record_memory_history()
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
            yield
        profile.export_chrome_trace(f"{folder}/trace.json.gz")
        if memory:
            memory._dump_snapshot(f"{folder}/memory.pickle")
            memory._record_memory_history(enabled=None)
        for file in Path(folder).iterdir():
            run.writer.put(f"runs/{run.recipe.run}/profile-{number:07d}/{file.name}", file.read_bytes())


def finish_step(
    run: Run, done: int, stop_requested: bool, stop: Stop, skipping: Skipping, averages: RunningAverages
) -> dict[str, float] | None:
    """Complete a step: log, validate and save if these are due after `done` steps.

    Returns the validation metrics, or None if there was no validation. Raises Stopped, after saving, if a stop was
    requested on any rank.
    """
    recipe, world, log, metrics = run.recipe, run.world, run.log, None
    last = done == recipe.steps
    saves, validates = last or done % recipe.save_every == 0, last or done % recipe.validate_every == 0
    if saves or done % recipe.log_every == 0:
        averages.counts.update(run.note_unreadable(run.unreadable))
        if log:
            log.training(done, averages, learning_rates(run.optimizer), peak_memory(world.device))
        averages.reset()
    if validates and run.validate:
        with averages.paused(), log.during("validating") if log else contextlib.nullcontext():
            # Each rank has its own BatchNorm statistics; those of rank 0 are validated and saved.
            distributed.broadcast_buffers(run.model, world)
            metrics, rows = run.validate()
        if log:
            log.validation(done, metrics, rows)
        stop_requested = any(distributed.gather_rows([stop_requested or stop.requested], world))
    stops = stop_requested and not last
    if stops:
        averages.counts.update(run.note_unreadable(run.unreadable))  # saved in the state, for the next log line
    if log and (saves or stops):
        with averages.paused(), log.during("saving"):
            run.save(done, metrics or {}, {"skipping": skipping.state, "since": averages.state})
            if last or stops:
                run.writer.finish(WAIT_WHEN_STOPPED if stops else WAIT_AT_END)
    if stops:
        checkpoint = distributed.broadcast(log and log.checkpoint, world)
        raise Stopped(f"after step {done} of {recipe.steps}; the next start resumes from {checkpoint}")
    return metrics


def add_gradients(
    run: Run, parallel: nn.Module, parts: Sequence[Any], stop: Stop, waited: float
) -> tuple[Losses, list[Tensor]]:
    """Run the forward and backward passes of a step for all `parts` of its batch.

    Returns the last part's losses, and each part's `sum_losses` result. `waited`: seconds spent waiting for data.
    """
    losses, totals, world = {}, [], run.world
    for number, part in enumerate(parts):
        last = number == len(parts) - 1  # ranks exchange gradients after the last part
        waits = isinstance(parallel, DistributedDataParallel) and not last
        with parallel.no_sync() if waits else contextlib.nullcontext():
            losses = run.losses(parallel, part)
            totals.append(sum_losses(losses, world, stop.requested, waited))
            loss = mean_loss(losses, totals[-1], run.loss_weights) / len(parts)
            (loss * world.size).backward()  # DDP averages gradients over ranks, but the sum is wanted
    return losses, totals


def skipped_steps_error(run: Run, number: int, done: int, reason: str) -> FloatingPointError:
    """Return the error that ends a run after too many skipped steps. It is the same on every rank."""
    log = run.log
    if log:
        # A checkpoint that is still being written may be the last good one. If it cannot be saved, the writer reports
        # that when it is closed.
        with contextlib.suppress(StorageUnreachable):
            run.writer.finish(WAIT_WHEN_STOPPED)
    names, checkpoint = distributed.broadcast(log and (log.uri("skipped.jsonl"), log.checkpoint), run.world)
    return FloatingPointError(
        f"{number} steps in a row were skipped, the last one, step {done}, because {reason}. {names} lists their "
        f"samples; {f'the last good checkpoint is {checkpoint}' if checkpoint else 'no checkpoint was saved'}. If the "
        "samples are wrong, remove them from the data. If the loss was diverging, start a new run (--run_name=NAME, "
        "--init_from=CHECKPOINT) with a lower optimizer.learning_rate. If such gradients are expected, allow them with "
        "--spike=NUMBER or --spike=None"
    )
