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
_LONGEST_PAUSE = 60.0  # seconds between two attempts; the first is 1 s, and each is twice the one before
_SILENCE = 90.0  # a request to S3 is given 60 s, and up to 7 such tries: an attempt may fail after 8 minutes only
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

    What storage does not take (unreachable, full, forbidden: StorageUnreachable) is tried again, with growing pauses in
    which the others have their turn, and said once; the training goes on. So a checkpoint comes after what was given
    before it, but does not wait for what fails: it is worth more than a line of the log. Meanwhile what is newer
    replaces what is older under the same path, and a newer checkpoint an older one. Any other error drops what it was
    about, and comes out of the next call. At the end of `with` all is written, or StorageUnreachable names what is not.

    log      gets lines for people
    silence  seconds without a byte taken, and without an error, after which storage counts as away too
    saved    where the checkpoint is that became whole last; None before the first
    waited   seconds for which `checkpoint` held up the caller, all in all
    """

    def __init__(self, store: ObjectStore, log: Callable[[str], None] = _print, silence: float = _SILENCE):
        self.store, self.log, self.silence = store, log, silence
        self.saved: str | None = None
        self.waited = 0.0
        self._changed = threading.Condition()  # guards all that follows but _copies
        self._waiting: OrderedDict[str, _Job] = OrderedDict()  # with the one that is done now
        self._running: _Job | None = None
        self._failing: dict[str, _Failure] = {}
        self._finished = self._moved = time.monotonic()  # when a file was written last, or a part of one
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._raised = False  # whether the error has come out of a call
        self._copies: dict[tuple[str, str], Tensor] = {}  # (file, name of the tensor) -> where it is copied to

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return self.finish()
        try:
            self.finish(WAIT_WHEN_STOPPED)
        except Exception as lost:  # noqa: BLE001  the other error is the one that ends the run
            if lost is not error:
                self.log(str(lost))

    def put(self, path: str, data: bytes) -> None:
        """Write an object, some time soon."""
        self.do(path, functools.partial(self.store.put, path, data))

    def do(self, path: str, work: Callable[[], object]) -> None:
        """Have this done in the thread, which writes the object `path` or makes it last."""
        with self._changed:
            if not self._raised:
                self._raise()
            self._add(_Job(path, self.store.where(path), deque([work])))

    def checkpoint(
        self, folder: str, files: Mapping[str, bytes | Mapping[str, Tensor] | FromHashes], then: Callable[[], None]
    ) -> None:
        """Write the files of a folder in this order, tensors as safetensors, and do `then`, in the thread too.

        A function is given the hashes of the files before it (storage.runs.file_hash), by name, and makes the content.
        Returns when all tensors are copied, so that they may change. There is one set of copies: while the checkpoint
        before is being written this waits, and it is given up where storage is away.
        """
        began = time.monotonic()
        self._make_room()
        steps: deque[Callable[[], object]] = deque()
        hashes: dict[str, dict[str, Any]] = {}
        for name, content in files.items():
            if isinstance(content, Mapping):
                content = _Watched(safetensors(self._copy(name, content)), self._part_is_written)
            steps.append(functools.partial(self._put_hashed, folder, name, content, hashes))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies run beside this thread
        where = self.store.where(folder)

        def whole() -> None:
            self.saved = where
            then()

        with self._changed:
            self._add(_Job(_CHECKPOINT, where, steps, whole))
        self.waited += time.monotonic() - began

    def finish(self, wait: float = WAIT_AT_END) -> None:
        """Wait until all is written, but not longer than storage is away: StorageUnreachable names what is given up.

        Away is storage that refuses for `wait` seconds from now on and in which nothing becomes finished, or that
        takes no byte for `silence` seconds (`wait`, if that is longer).
        """
        began = time.monotonic()
        with self._changed:
            for failure in self._failing.values():
                failure.due, failure.pause = began, 1.0
            self._changed.notify_all()
            while self._waiting:
                if self._running is None or self._running.key in self._failing:
                    end = max(began, self._finished) + wait
                else:
                    end = max(began, self._moved) + max(wait, self.silence)
                if end <= time.monotonic():
                    raise self._give_up()
                self._changed.wait(end - time.monotonic())
            self._raise()

    def _give_up(self) -> StorageUnreachable:
        """Nothing waits any more; an attempt that hangs is left to itself. The error that tells of it."""
        names = [job.what if job.steps else f"what follows {job.what}" for job in self._waiting.values()]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        errors = [self._failing[key].error for key in self._waiting if key in self._failing]
        why = errors[0] if errors else f"storage took nothing for {time.monotonic() - self._moved:.0f} s"
        self._waiting.clear()
        self._failing.clear()
        self._copies = {}  # an attempt that hangs may still read from them
        self._changed.notify_all()
        return StorageUnreachable(f"not saved: {', '.join(names[:3])}{more}: {why}", getattr(why, "http_status", None))

    def _make_room(self) -> None:
        """Wait for the last checkpoint, or give it up."""
        began, logged = time.monotonic(), False
        with self._changed:
            while job := self._waiting.get(_CHECKPOINT):
                silent = time.monotonic() - self._moved >= self.silence
                if job is not self._running and (_CHECKPOINT in self._failing or self._error or silent):
                    break
                if silent and not logged:
                    logged = True
                    self.log(f"the training waits for {job.what}: storage is asked to take it, and has not answered")
                self._changed.wait(None if logged else max(0.0, self._moved + self.silence - time.monotonic()))
            self._raise()
            old = self._waiting.pop(_CHECKPOINT, None)
        if old and old.steps:
            self.log(f"{old.what} is given up for a newer one: storage is away")
        elif time.monotonic() - began > 1:
            self.log(f"waited {time.monotonic() - began:.1f} s for the checkpoint before to be written")

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

    def _add(self, job: "_Job") -> None:
        self._waiting[job.key] = job
        self._changed.notify_all()
        if not self._thread:
            self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
            self._thread.start()

    def _raise(self) -> None:
        if self._error:
            self._raised = True
            raise self._error

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while job := self._next():
            self._do(job)

    def _next(self) -> "_Job | None":
        """The first of those that wait and are due; None, and the thread is over, where none waits."""
        with self._changed:
            while self._waiting:
                now = time.monotonic()
                due = {key: self._failing[key].due if key in self._failing else now for key in self._waiting}
                for key, at in due.items():
                    if at <= now:
                        self._running, self._moved = self._waiting[key], now
                        return self._running
                self._changed.wait(min(due.values()) - now)
            self._thread = None
            return None

    def _put_hashed(
        self, folder: str, name: str, content: bytes | Sequence[memoryview] | FromHashes, hashes: dict[str, dict]
    ) -> None:
        if callable(content):
            content = content(hashes)
        elif name not in hashes:  # else storage has refused it before
            hashes[name] = file_hash([content] if isinstance(content, bytes) else content)
        self.store.put(f"{folder}/{name}", content)

    def _part_is_written(self) -> None:
        self._moved = time.monotonic()

    def _do(self, job: "_Job") -> None:
        error = None
        try:
            while job.steps:
                job.steps[0]()
                job.steps.popleft()  # at once: what is written is not written again when the next one fails
                self._finished = time.monotonic()
                self._part_is_written()
            job.then()
        except Exception as caught:  # noqa: BLE001  it is logged, and tried again or comes out of the next call
            error = caught
        with self._changed:
            if isinstance(error, StorageUnreachable):
                self._note_failure(job.key, error)
            else:
                self._error = self._error or error
                self._note_success(job)
            if self._running is job:
                self._running = None
            self._changed.notify_all()

    def _note_failure(self, key: str, error: StorageUnreachable) -> None:
        """Whatever waits under this name by now is tried again later."""
        if key not in self._waiting:
            return  # given up
        now = time.monotonic()
        if key not in self._failing:
            if not self._failing or self._finished > max(failure.since for failure in self._failing.values()):
                self.log(f"cannot save for now, the training goes on and this is tried again: {error}")
            self._failing[key] = _Failure(error, now, now, 1.0)
        failure = self._failing[key]
        failure.error, failure.due, failure.pause = error, now + failure.pause, min(2 * failure.pause, _LONGEST_PAUSE)

    def _note_success(self, job: "_Job") -> None:
        self._finished = time.monotonic()
        if self._waiting.get(job.key) is job:
            del self._waiting[job.key]
        failure = self._failing.pop(job.key, None)
        if failure and not self._failing and not self._error:
            self.log(f"storage is back after {self._finished - failure.since:.0f} s: {job.what} is written")


class _Job:
    """Puts that are done in order, each once; a newer job replaces one of the same key; `what` names it in messages."""

    def __init__(
        self, key: str, what: str, steps: deque[Callable[[], object]], then: Callable[[], None] = lambda: None
    ):
        self.key, self.what, self.steps, self.then = key, what, steps, then


@dataclass
class _Failure:
    """Of what is tried again: the last error, since when, when it is due, and how long the pause after that will be."""

    error: StorageUnreachable
    since: float
    due: float
    pause: float


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
