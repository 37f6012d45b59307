"""Claim a run, write its checkpoints in a background thread, load checkpoints, and remove old ones.

Files are safetensors and JSON, never pickles: see vlbert/checkpoint.py and detectors/train.py. storage/runs.py defines
when a checkpoint is complete and which one is the best. The newest checkpoints, the best one and every n-th are kept.
"""

import contextlib
import copy
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from storage.claims import Claims
from storage.object_store import ObjectStore, StorageUnreachable
from storage.runs import (
    CHECKPOINT_VERSION,
    STATE,
    Best,
    Folder,
    best_checkpoint,
    checkpoints,
    file_hash,
    folder_of,
    hint,
    json_with_digest,
)
from storage.safe_json import printable
from training import distributed
from training.recipe import RunSettings

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
# Seconds to wait for storage at the end of a run, and after a stop or an error: SIGKILL soon follows SIGTERM.
WAIT_AT_END, WAIT_WHEN_STOPPED = 600.0, 20.0
_PAUSE = 5.0  # seconds between a refused write and the next attempt


def _print(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # in one write, because two threads print


@contextlib.contextmanager
def claim_run(store: ObjectStore, run: str, world: distributed.World) -> Iterator[Callable[[], None]]:
    """Context manager that claims a run on rank 0, so that one process at a time writes it.

    Yields the function for `Writer.check`. Raises SharedFault on every rank if another process trains the run.
    """
    with Claims(store, f"runs/{run}") as claims:
        holder = claims.take_or_wait("writer", _print) if world.first else None
        fix = "wait until it ends, stop it, or start another run: --run_name=NAME"
        distributed.raise_on_all_ranks(holder and f"{store.uri(f'runs/{run}')} is trained by {holder}; {fix}", world)
        yield lambda: claims.check("writer")


class Writer(contextlib.AbstractContextManager):
    """Context manager whose background thread writes files to the storage, so that training does not wait for it.

    Files are written in the order in which they were queued. A new version of a file replaces one that is still queued.
    If the storage refuses a write (StorageUnreachable: unreachable, full or forbidden), this is logged once, and the
    write is retried until it succeeds. Any other error is raised by the next method call. On exit, the context
    manager waits until all files are written. If some cannot be written, StorageUnreachable is raised with their names.

    Attributes:
        log: Prints a line.
        saved: URI of the newest complete checkpoint; None before the first.
        check: Called before each write. It raises an error if this process must not write any more.
    """

    def __init__(self, store: ObjectStore, log: Callable[[str], None] = _print):
        self.store, self.log = store, log
        self.saved: str | None = None
        self.check: Callable[[], None] = lambda: None
        self._changed = threading.Condition()  # guards the attributes below
        self._jobs: dict[str, Callable[[], object]] = {}  # by path; the first is running
        self._refusal: StorageUnreachable | None = None  # why the last attempt failed
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return self.finish()
        try:
            self.finish(WAIT_WHEN_STOPPED)
        except Exception as write_error:  # noqa: BLE001  `error` is the one that ends the run
            self.log(str(write_error))

    def put(self, path: str, data: bytes) -> None:
        """Queue `data` to be written to `path`."""
        self.submit(path, functools.partial(self.store.put, path, data))

    def submit(self, path: str, job: Callable[[], object]) -> None:
        """Queue a function that writes the file at `path`. The function is retried until the storage accepts it."""
        with self._changed:
            self._raise()
            self._jobs[path] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
                self._thread.start()

    def wait_for_slot(self, path: str) -> None:
        """Wait until no job is queued for `path`. Returns at once if the storage refuses writes."""
        with self._changed:
            self._changed.wait_for(lambda: path not in self._jobs or self._refusal or self._error)
            self._raise()

    def finish(self, wait: float = WAIT_AT_END) -> None:
        """Wait until all queued files are written.

        Raises StorageUnreachable if the storage still refuses writes after `wait` seconds.
        """
        end = time.monotonic() + wait
        with self._changed:
            while self._jobs:
                if (why := self._refusal) and time.monotonic() >= end:
                    names = ", ".join(self.store.uri(path) for path in self._jobs)
                    self._jobs.clear()
                    self._refusal = None
                    raise StorageUnreachable(f"not saved: {names}: {why}", why.http_status)
                self._changed.wait(min(wait, 1))
            self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error:
            raise error

    def _work(self) -> None:
        """Run the queued jobs in the thread, and return when none is left."""
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                path, job = next(iter(self._jobs.items()))
            refusal = error = None
            try:
                self.check()
                job()
            except StorageUnreachable as caught:
                refusal = caught
            except Exception as caught:  # noqa: BLE001  the next call raises it
                error = caught
            with self._changed:
                if refusal and path in self._jobs:  # else finish() dropped it
                    if not self._refusal:
                        self.log(f"cannot save for now; training continues, and saving is retried: {refusal}")
                    self._jobs[path] = self._jobs.pop(path)  # to the end: storage may refuse only this file
                elif self._jobs.get(path) is job:  # else a newer job replaced it
                    del self._jobs[path]
                self._refusal, self._error = refusal, self._error or error
                self._changed.notify_all()
            if refusal:
                time.sleep(_PAUSE)


def write_checkpoint(
    writer: Writer,
    recipe: RunSettings,
    step: int,
    files: Mapping[str, bytes | Mapping[str, Tensor]],
    state: Mapping[str, Any],
    metric: str | None,
) -> str:
    """Queue a checkpoint to be written, and return its path. Old checkpoints are removed afterwards.

    This function first waits until the previous checkpoint is written. If the storage refuses writes, it does not wait,
    and the new checkpoint replaces the previous one in the queue. The tensors are copied before the function returns.

    Args:
        files: Contents of all files except state.json, by name.
        state: Content of state.json, which is written last, with the hashes of the other files. state["validation"]
            maps metric names to values. It is empty or missing if the run was not validated after this step.
        metric: Name of the metric by which the run's checkpoints are compared.
    """
    path, job = folder_of(recipe.run, step), f"runs/{recipe.run}/step-*"
    writer.wait_for_slot(job)
    copies = {name: data if isinstance(data, bytes) else _copy_to_cpu(data) for name, data in files.items()}
    state = {"validation": {}, **copy.deepcopy(dict(state)), "metric": metric, "version": CHECKPOINT_VERSION}
    uri = writer.store.uri(path)

    def write() -> None:
        if writer.saved != uri:  # else this is a retry, and only the pruning below failed
            hashes = {name: _put(writer.store, f"{path}/{name}", data) for name, data in copies.items()}
            writer.store.put(f"{path}/{STATE}", json_with_digest({**state, "files": hashes}))
            writer.saved = uri
        best = prune_checkpoints(writer.store, recipe, writer.log)
        suffix = f"  best so far: {best.metric} {best.value:.3f} (step {best.step})" if best else ""
        if step == recipe.steps and not state["validation"]:
            suffix = "  WITHOUT VALIDATION: no checkpoint is known to be good or the best"
        writer.log(f"step {step}/{recipe.steps}  saved {uri}{suffix}")

    writer.submit(job, write)
    return path


def _copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies of the tensors in host memory."""
    return {name: torch.empty(x.shape, dtype=x.dtype).copy_(x.detach()) for name, x in tensors.items()}


def _put(store: ObjectStore, path: str, data: bytes | dict[str, Tensor]) -> dict[str, Any]:
    """Write one file of a checkpoint to the store, and return its size and SHA-256 hash, for state.json."""
    if isinstance(data, bytes):
        store.put(path, data)
        return file_hash([data])
    # safetensors would hold the GIL while it serialises to memory, which would block the training steps.
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        file = Path(folder, "tensors")
        try:
            save_file(data, file)
        except (SafetensorError, OSError) as error:
            raise StorageUnreachable(
                f"cannot write {store.uri(path)} to {folder} first: {error}. Free disk space there, or name another "
                "folder with TMPDIR"
            ) from error
        store.put(path, file)
        with open(file, "rb") as stream:
            return file_hash(iter(functools.partial(stream.read, 2**20), b""))


def prune_checkpoints(store: ObjectStore, recipe: RunSettings, log: Callable[[str], None] = print) -> Best | None:
    """Remove all checkpoints of a run but the best one and those that the recipe keeps. Return the best one.

    Incomplete checkpoints older than the newest complete one are removed too. If the best one cannot be determined
    because a file is damaged, this is logged, nothing is removed, and None is returned.
    """
    complete = checkpoints(store, recipe.run)
    try:
        best = best_checkpoint(store, recipe.run)
    except ValueError as error:
        log(f"no old checkpoint is removed, because the best one is unknown: {error}")
        return None
    kept = {*complete[-recipe.keep_checkpoints :], *([best.checkpoint] if best else [])}
    if recipe.keep_every:
        kept |= {*complete} & {folder_of(recipe.run, n) for n in range(0, recipe.steps + 1, recipe.keep_every)}
    for folder in complete:
        if folder not in kept:
            store.delete(f"{folder}/{STATE}")  # first, so that no partly deleted checkpoint looks complete
    for info in list(store.list(f"runs/{recipe.run}/step-")):
        folder = info.path.rpartition("/")[0]
        if folder not in kept and folder < max(complete, default=""):
            store.delete(info.path)
    return best


def load_tensors(folder: Folder, name: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises ValueError if the file is damaged or has another format."""
    data = folder.get(name)
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        uri, fix = folder.uri_of(name), hint(folder.store, folder.path)
        raise ValueError(f"{uri} is truncated or not a safetensors file ({printable(error)}); {fix}") from error


def find_tensor_errors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return a message for each tensor that is missing, unexpected, not finite, or of the wrong shape or dtype."""
    errors = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    errors += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        tensor, shape = tensors[name], list(expected[name].shape)
        if tensor.layout != torch.strided or list(tensor.shape) != shape:
            errors.append(f"{name} has shape {list(tensor.shape)}, but the network has {shape}")
        elif tensor.is_floating_point() != expected[name].is_floating_point():
            errors.append(f"{name} has dtype {tensor.dtype}, but the network has {expected[name].dtype}")
        elif not torch.isfinite(tensor).all():
            errors.append(f"{name} is not finite")
    return errors


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], message: str) -> None:
    """Raise ValueError if `tensors` do not fit `expected`. The error's text is `message` and up to 20 mismatches."""
    if errors := find_tensor_errors(tensors, expected):
        more = f"; and {len(errors) - 20} more" if len(errors) > 20 else ""
        raise ValueError(f"{message}: {'; '.join(errors[:20])}{more}")


def load_optimizer(folder: Folder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's moments and step counts from a checkpoint of this model."""
    parameters = dict(model.named_parameters())
    for entry, tensor in load_tensors(folder, OPTIMIZER).items():
        name, _, quantity = entry.rpartition("/")
        parameter = parameters[name]
        if quantity != "step":
            # Keep the parameter's memory format (channels last): the fused kernel reads both in memory order.
            tensor = torch.empty_like(parameter).copy_(tensor)
        optimizer.state[parameter][quantity] = tensor.to(parameter.device)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state tensors, named `<parameter>/<quantity>`."""
    return {
        f"{name}/{quantity}": value
        for name, parameter in model.named_parameters()
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }
