"""Writes what a training leaves behind, in a thread beside it: steps wait for no disk and no network."""

import functools
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from storage.object_store import ObjectStore, StorageUnreachable
from storage.runs import file_hash

WAIT_AT_END = 600.0  # seconds that storage may be away when a run has come to its end
WAIT_WHEN_STOPPED = 20.0  # the same when it was told to stop, or failed: who sends SIGTERM sends SIGKILL soon after
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts; each is twice the one before
# Seconds without a byte taken, and without an error, after which storage counts as away: a request to S3 is given 60 s,
# and up to 7 such tries, so an attempt may fail after 8 minutes only.
_SILENCE = 90.0
_CHECKPOINT = "checkpoint"
FromHashes = Callable[[Mapping[str, Mapping[str, Any]]], bytes]
_DTYPES = {  # of a safetensors file, in the order in which it holds them
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _print(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # at once: two threads print


class Writer:
    """Puts objects in the order in which they were given, one at a time, in a thread that lives while there is
    something to put.

    What is newer replaces what waits under the same path, and a newer checkpoint one that waits while storage is away.
    Where storage does not take something (unreachable, full, forbidden: StorageUnreachable), this is logged once and
    the same is tried again, with growing pauses; the training goes on. Any other error drops what it was about, and
    comes out of the next call. At the end of `with` all is written, or StorageUnreachable names what is not.

    log     gets lines for people
    saved   where the checkpoint is that became whole last; None before the first
    waited  seconds for which `checkpoint` held up the caller, all in all
    """

    def __init__(self, store: ObjectStore, log: Callable[[str], None] = _print):
        self.store, self.log = store, log
        self.saved: str | None = None
        self.waited = 0.0
        self._changed = threading.Condition()  # guards all that follows but _copies
        self._queue: OrderedDict[str, _Job] = OrderedDict()  # with the one that is done now
        self._running: _Job | None = None
        self._failure: StorageUnreachable | None = None  # why the first of the queue is tried again
        self._failing_since = self._due = 0.0  # the first is not tried before it is due
        self._pause = _FIRST_PAUSE
        self._progress = time.monotonic()  # when a file was written last or, while none fails, a part of one
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._copies: dict[tuple[str, str], Tensor] = {}  # (file, name of the tensor) -> where it is copied to

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
        """Write an object, some time soon."""
        self.do(path, functools.partial(self.store.put, path, data))

    def do(self, path: str, work: Callable[[], object]) -> None:
        """Have this done in the thread, which writes the object `path` or makes it last."""
        with self._changed:
            self._raise()
            self._add(path, _Job(self.store.where(path), deque([work])))

    def checkpoint(
        self, folder: str, files: Mapping[str, bytes | Mapping[str, Tensor] | FromHashes], then: Callable[[], None]
    ) -> None:
        """Write the files of a folder in this order, tensors as safetensors, and do `then`, in the thread too.

        A function is given the hashes of the files before it (storage.runs.file_hash), by name, and makes the content.
        Returns when all tensors are copied, so that they may change. There is one set of copies: this waits while the
        checkpoint before is being written, and gives it up where storage is away.
        """
        began = time.monotonic()
        self._make_room()
        where = self.store.where(folder)
        job, hashes = _Job(where, deque()), {}
        for name, content in files.items():
            if isinstance(content, Mapping):
                content = _Watched(safetensors(self._copy(name, content)), self._part_is_written)
            job.steps.append(functools.partial(self._put_hashed, folder, name, content, hashes))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies run beside this thread

        def whole() -> None:
            self.saved, job.what = where, f"what follows {where}"
            then()

        job.steps.append(whole)
        with self._changed:
            self._add(_CHECKPOINT, job)
        self.waited += time.monotonic() - began

    def finish(self, wait: float = WAIT_AT_END) -> None:
        """Wait until all is written, but not longer than storage is away: StorageUnreachable names what is given up.

        Away is storage that refuses for `wait` seconds from now on, or that takes no byte for 90 s (`wait`, if longer).
        """
        began = time.monotonic()
        with self._changed:
            self._due, self._pause = 0.0, _FIRST_PAUSE
            self._changed.notify_all()
            while self._queue:
                patience = wait if self._failure else max(wait, _SILENCE)
                left = max(began, self._progress) + patience - time.monotonic()
                if left <= 0:
                    raise self._give_up()
                self._changed.wait(left)
            self._raise()

    def _give_up(self) -> StorageUnreachable:
        """Nothing waits any more; an attempt that hangs is left to itself. The error that tells of it."""
        names = ", ".join(job.what for job in self._queue.values())
        why = self._failure or f"storage took nothing for {time.monotonic() - self._progress:.0f} s"
        self._queue.clear()
        self._failure, self._due = None, 0.0
        self._copies = {}  # an attempt that hangs may still read from them
        self._changed.notify_all()
        return StorageUnreachable(f"not saved: {names}: {why}", getattr(why, "http_status", None))

    def _make_room(self) -> None:
        """Wait for the last checkpoint, or give it up."""
        logged = False
        with self._changed:
            while (job := self._queue.get(_CHECKPOINT)) and not self._error:
                away = self._failure or time.monotonic() - self._progress >= _SILENCE
                if away and job is not self._running:
                    self.log(f"{job.what} is given up for a newer one: storage is away")
                    del self._queue[_CHECKPOINT]
                elif not self._changed.wait(1) and not logged:
                    logged = True
                    self.log(f"the training waits for {job.what} to be written")
            self._raise()

    def _copy(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on this machine, each in memory that is used again; on a GPU's behalf not done yet."""
        copied = {}
        for name, tensor in tensors.items():
            buffer = self._copies.get((file, name))
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                # Pinned, so that a GPU writes to it at full speed.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[file, name] = buffer
            copied[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        return copied

    def _add(self, key: str, job: "_Job") -> None:
        self._queue[key] = job
        self._changed.notify_all()
        if not self._thread:
            self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
            self._thread.start()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error:
            raise error

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while found := self._next():
            key, job = found
            error = None
            try:
                while job.steps:
                    job.steps[0]()
                    job.steps.popleft()  # at once: what is written is not written again when the next one fails
                    self._progress = time.monotonic()
            except Exception as caught:  # noqa: BLE001  it is logged, and tried again or comes out of the next call
                error = caught
            with self._changed:
                self._running = None
                if isinstance(error, StorageUnreachable):
                    self._try_again(key, error)
                else:
                    self._error = self._error or error
                    self._leave(key, job)
                self._changed.notify_all()

    def _next(self) -> "tuple[str, _Job] | None":
        """The first of the queue, when it is due; None, and the thread is over, where none waits."""
        with self._changed:
            while self._queue and (left := self._due - time.monotonic()) > 0:
                self._changed.wait(left)
            if not self._queue:
                self._thread = None
                return None
            key, self._running = next(iter(self._queue.items()))
            self._part_is_written()  # until now nothing was to be taken
            return key, self._running

    def _put_hashed(
        self, folder: str, name: str, content: bytes | Sequence[memoryview] | FromHashes, hashes: dict[str, dict]
    ) -> None:
        if callable(content):
            content = content(hashes)
        elif name not in hashes:  # else storage has refused it before
            hashes[name] = file_hash([content] if isinstance(content, bytes) else content)
        self.store.put(f"{folder}/{name}", content)

    def _part_is_written(self) -> None:
        if not self._failure:  # then only a whole file shows that storage is back
            self._progress = time.monotonic()

    def _try_again(self, key: str, error: StorageUnreachable) -> None:
        """Whatever waits under this key by now."""
        if key not in self._queue:
            return  # given up
        if not self._failure:
            self._failing_since = time.monotonic()
            self.log(f"cannot save for now, the training goes on and this is tried again: {error}")
        self._failure, self._due = error, time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _leave(self, key: str, job: "_Job") -> None:
        if self._queue.get(key) is job:
            del self._queue[key]
        if self._failure and not self._error:
            self.log(f"storage is back after {time.monotonic() - self._failing_since:.0f} s: {job.what} is written")
        self._failure, self._due, self._pause = None, 0.0, _FIRST_PAUSE


@dataclass(eq=False)
class _Job:
    """Steps that are done in order, each once; `what` names it in messages."""

    what: str
    steps: deque[Callable[[], object]]


class _Watched(Sequence[memoryview]):
    """Parts of a file; each time that some of them is taken to be written, `taken` is called."""

    def __init__(self, parts: Sequence[memoryview], taken: Callable[[], None]):
        self._parts, self._taken = parts, taken

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, number: int) -> memoryview:
        part = self._parts[number]
        self._taken()
        return part


def safetensors(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """A safetensors file, equal to the bytes of safetensors.torch.save, as views of contiguous tensors: no copy.

    Format: 8 bytes, little-endian, the header's length; a JSON header, padded by spaces to a multiple of 8; the
    numbers, from those of the largest dtype to those of the smallest, within a dtype by name.
    """
    order = list(_DTYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    views, header, end = [], {}, 0
    for name in names:
        tensor = tensors[name]
        views.append(memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()))
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *views]
