"""The checkpoints of a run: written in a thread beside the training, removed when they are old, and loaded.

Files are safetensors and JSON, never pickles: see vlbert/checkpoint.py and detectors/train.py. storage/runs.py says
when a checkpoint is whole, and which is the best. The newest are kept, and that one.
"""

import copy
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

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

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
# Seconds that storage may refuse at the end of a run, and when a run was stopped or failed: who sends SIGTERM sends
# SIGKILL soon after.
WAIT_AT_END, WAIT_WHEN_STOPPED = 600.0, 20.0
_PAUSE = 5.0  # seconds before what storage refused is tried again


def _print(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # at once: two threads print


class Writer:
    """Writes objects in a thread, in the order in which they were given: steps wait for no disk and no network.

    A newer object replaces one that waits under the same path. What storage refuses (StorageUnreachable: away, full,
    forbidden) is logged once, and tried again until storage takes it. Any other error is raised by the next call. At
    the end of `with` all is written, or StorageUnreachable names what is not.

    log    prints a line
    saved  where the newest whole checkpoint is; None before the first
    """

    def __init__(self, store: ObjectStore, log: Callable[[str], None] = _print):
        self.store, self.log = store, log
        self.saved: str | None = None
        self._changed = threading.Condition()  # guards all that follows
        self._jobs: dict[str, Callable[[], object]] = {}  # by path; the first is under way
        self._refusal: StorageUnreachable | None = None  # why the last attempt failed
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return self.finish()
        try:
            self.finish(WAIT_WHEN_STOPPED)
        except Exception as lost:  # noqa: BLE001  the other error is the one that ends the run
            self.log(str(lost))

    def put(self, path: str, data: bytes) -> None:
        """Have an object written."""
        self.submit(path, functools.partial(self.store.put, path, data))

    def submit(self, path: str, job: Callable[[], object]) -> None:
        """Have the thread call `job`, which writes the object `path`, until storage takes it."""
        with self._changed:
            self._raise()
            self._jobs[path] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
                self._thread.start()

    def wait_for_slot(self, path: str) -> None:
        """Wait until nothing waits under this path, unless storage is away."""
        with self._changed:
            self._changed.wait_for(lambda: path not in self._jobs or self._refusal or self._error)
            self._raise()

    def finish(self, wait: float = WAIT_AT_END) -> None:
        """Wait until all is written. Raises StorageUnreachable if storage still refuses after `wait` seconds."""
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
        """The thread: ends when nothing is left to write."""
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                path, job = next(iter(self._jobs.items()))
            refusal = error = None
            try:
                job()
            except StorageUnreachable as caught:
                refusal = caught
            except Exception as caught:  # noqa: BLE001  the next call raises it
                error = caught
            with self._changed:
                if refusal and path in self._jobs:  # else it was given up
                    if not self._refusal:
                        self.log(f"cannot save for now, the training goes on and this is tried again: {refusal}")
                    self._jobs[path] = self._jobs.pop(path)  # after the others: storage may refuse one file alone
                elif self._jobs.get(path) is job:  # else there is a newer one
                    del self._jobs[path]
                self._refusal, self._error = refusal, self._error or error
                self._changed.notify_all()
            if refusal:
                time.sleep(_PAUSE)


def write_checkpoint(
    writer: Writer,
    run: str,
    step: int,
    steps: int,
    files: Mapping[str, bytes | Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
    metric: str | None,
) -> str:
    """Have the checkpoint of step `step` of `steps` written, state.json last, with the hashes of the other files, and
    then old checkpoints removed; returns its path. When this returns, the tensors are copied and may change.

    It waits for the checkpoint before it or, while storage is away, replaces that one. state["validation"]: metrics of
    a validation after the same step, by name. metric: the one by which the run's checkpoints are compared.
    """
    path, job = folder_of(run, step), f"runs/{run}/step-*"
    writer.wait_for_slot(job)
    copies = {name: data if isinstance(data, bytes) else _copied(data) for name, data in files.items()}
    state = {"validation": {}, **copy.deepcopy(dict(state)), "metric": metric, "version": CHECKPOINT_VERSION}
    where = writer.store.uri(path)

    def write() -> None:
        if writer.saved != where:  # else storage refused only what follows
            hashes = {name: _put(writer.store, f"{path}/{name}", data) for name, data in copies.items()}
            writer.store.put(f"{path}/{STATE}", json_with_digest({**state, "files": hashes}))
            writer.saved = where
        best = prune_checkpoints(writer.store, run, keep, writer.log)
        so_far = f"  best so far: {best.metric} {best.value:.3f} (step {best.step})" if best else ""
        writer.log(f"step {step}/{steps}  saved {where}{so_far}")

    writer.submit(job, write)
    return path


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in this machine's memory, contiguous."""
    return {name: torch.empty(one.shape, dtype=one.dtype).copy_(one.detach()) for name, one in tensors.items()}


def _put(store: ObjectStore, path: str, data: bytes | dict[str, Tensor]) -> dict[str, Any]:
    """Put a file of a checkpoint and return its hash. Tensors pass through a file under TMPDIR: safetensors writes
    bytes in memory only under Python's lock, which steps need."""
    if isinstance(data, bytes):
        store.put(path, data)
        return file_hash([data])
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


def prune_checkpoints(store: ObjectStore, run: str, keep: int, log: Callable[[str], None] = print) -> Best | None:
    """Remove all checkpoints but the `keep` newest and the best, which is returned, and unfinished ones before these.

    If a damaged file hides which is the best, this logs it and removes nothing: that must not end a run.
    """
    whole = checkpoints(store, run)
    try:
        best = best_checkpoint(store, run)
    except ValueError as error:
        log(f"no checkpoint is removed, for the best is not known: {error}")
        return None
    kept = {*whole[-keep:], *([best.checkpoint] if best else [])}
    for folder in whole:
        if folder not in kept:
            store.delete(f"{folder}/{STATE}")  # first, so that no half checkpoint looks whole
    for info in list(store.list(f"runs/{run}/step-")):
        folder = info.path.rpartition("/")[0]
        if folder not in kept and folder < max(whole, default=""):
            store.delete(info.path)
    return best


def load_tensors(folder: Folder, name: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises ValueError if it is none, or not what was written."""
    data = folder.get(name)
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        way = hint(folder.store, folder.path)
        raise ValueError(f"{folder.uri_of(name)} is torn or no safetensors file ({printable(error)}); {way}") from error


def load_optimizer(folder: Folder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's moments and step counts, of a checkpoint whose weights the model has."""
    parameters = dict(model.named_parameters())
    for entry, tensor in load_tensors(folder, OPTIMIZER).items():
        name, _, quantity = entry.rpartition("/")
        parameter = parameters[name]
        if quantity != "step":
            # In the parameter's own layout (channels last): the fused kernel walks both in the order of memory.
            tensor = torch.empty_like(parameter).copy_(tensor)
        optimizer.state[parameter][quantity] = tensor.to(parameter.device)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's own tensors by "<parameter>/<quantity>"."""
    return {
        f"{name}/{quantity}": value
        for name, parameter in model.named_parameters()
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }
