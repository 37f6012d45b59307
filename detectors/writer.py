"""Writes what a training leaves behind, in a thread beside it: steps wait for no disk and no network."""

import functools
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor

from storage.objects import Objects, StorageUnreachable

PATIENCE = 600.0  # seconds that storage may be away when a run has come to its end
STOPPED_PATIENCE = 20.0  # the same when it was told to stop, or failed: who sends SIGTERM sends SIGKILL soon after
_LONGEST_PAUSE = 60.0  # seconds between two attempts; the first is 1 s, and each is twice the one before
_CHECKPOINT = "checkpoint"
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


def _say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # at once: two threads print


class Writer:
    """Puts objects in the order in which they were given, one at a time, in a thread that lives while there is
    something to put.

    While storage is away (unreachable, full, forbidden: StorageUnreachable) the thread tries again, with growing
    pauses, and says so once; the training goes on. Meanwhile what is newer replaces what is older under the same path,
    and a newer checkpoint an older one. Any other error comes out of the next call. At the end of `with` all is
    written, or StorageUnreachable names what is not.

    say     what tells people of it
    saved   where the checkpoint is that became whole last; None before the first
    waited  seconds for which `checkpoint` held up the caller, all in all
    """

    def __init__(self, objects: Objects, say: Callable[[str], None] = _say):
        self.objects, self.waited = objects, 0.0
        self.saved: str | None = None
        self.say = say
        self._changed = threading.Condition()  # guards all that follows but _copies
        self._waiting: OrderedDict[str, _Job] = OrderedDict()
        self._running: tuple[str, _Job] | None = None  # it is no longer among those that wait
        self._thread: threading.Thread | None = None
        self._away: tuple[float, StorageUnreachable] | None = None  # since when, and what was said last
        self._failed: Exception | None = None
        self._hurried = self._given_up = False
        self._copies: dict[tuple[str, str], Tensor] = {}  # (file, name of the tensor) -> where it is copied to

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return self.finish()
        try:
            self.finish(STOPPED_PATIENCE)
        except Exception as lost:  # noqa: BLE001  the other error is the one that ends the run
            self.say(str(lost))

    def put(self, path: str, data: bytes) -> None:
        """Write an object, some time soon and after all that was given before."""
        self._add(path, _Job(self.objects.where(path), deque([functools.partial(self.objects.put, path, data)])))

    def checkpoint(
        self, folder: str, files: Mapping[str, bytes | Mapping[str, Tensor]], then: Callable[[], None]
    ) -> None:
        """Write the files of a folder in this order, tensors as safetensors, and do `then`, in the thread too.

        Returns when all tensors are copied, so that they may change. There is one set of copies: while the checkpoint
        before is being written this waits, and it is given up where storage is away.
        """
        began = time.monotonic()
        self._make_room()
        steps: deque[Callable[[], object]] = deque()
        for name, content in files.items():
            data = content if isinstance(content, bytes) else safetensors(self._copy(name, content))
            steps.append(functools.partial(self.objects.put, f"{folder}/{name}", data))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies run beside this thread
        where = self.objects.where(folder)

        def whole() -> None:
            self.saved = where
            then()

        self._add(_CHECKPOINT, _Job(where, steps, whole))
        self.waited += time.monotonic() - began

    def finish(self, patience: float = PATIENCE) -> None:
        """Wait until all is written; StorageUnreachable names what is not where storage is away for `patience` seconds
        from now on."""
        began = time.monotonic()
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            while self._thread and not self._failed:
                left = None
                if self._away:
                    left = max(began, self._away[0]) + patience - time.monotonic()
                    if left <= 0:
                        self._given_up = True
                        self._changed.notify_all()
                        raise StorageUnreachable(self._lost(self._away[1]), self._away[1].http_status)
                self._changed.wait(left)
            self._hurried = False
            self._raise()

    def _make_room(self) -> None:
        """Wait for the last checkpoint, or give it up."""
        began = time.monotonic()
        with self._changed:
            while not self._failed and (
                (self._running and self._running[0] == _CHECKPOINT) or (_CHECKPOINT in self._waiting and not self._away)
            ):
                self._changed.wait()
            self._raise()
            old = self._waiting.pop(_CHECKPOINT, None)
        if old and old.steps:
            self.say(f"{old.what} is given up for a newer one: storage is away")
        elif time.monotonic() - began > 1:
            self.say(f"waited {time.monotonic() - began:.1f} s for the checkpoint before to be written")

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
        with self._changed:
            self._raise()
            self._waiting[key] = job
            if not self._thread:
                self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
                self._thread.start()

    def _raise(self) -> None:
        if self._failed:
            raise self._failed

    def _lost(self, error: StorageUnreachable) -> str:
        jobs = [*([self._running[1]] if self._running else []), *self._waiting.values()]
        names = [job.what if job.steps else f"what follows {job.what}" for job in jobs]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"not saved: {', '.join(names[:3])}{more}: {error}"

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause = 1.0
        while True:
            with self._changed:
                if self._given_up or not self._waiting:
                    return self._end()
                self._running = key, job = self._waiting.popitem(last=False)
            try:
                job.do()
            except StorageUnreachable as error:
                with self._changed:
                    self._put_back(key, job, error)
                    if self._changed.wait_for(lambda: self._hurried or self._given_up, pause):
                        self._hurried, pause = False, 1.0
                    else:
                        pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            except Exception as error:  # noqa: BLE001  it comes out of the next call
                with self._changed:
                    self._failed = error
                    return self._end()
            pause = 1.0
            with self._changed:
                self._running = None
                if self._away:
                    self.say(f"storage is back after {time.monotonic() - self._away[0]:.0f} s: {job.what} is written")
                    self._away = None
                self._changed.notify_all()

    def _put_back(self, key: str, job: "_Job", error: StorageUnreachable) -> None:
        """To the front, or what has come in its place since."""
        self._running = None
        self._waiting.setdefault(key, job)
        self._waiting.move_to_end(key, last=False)
        if not self._away:
            self.say(f"cannot save for now, the training goes on and this is tried again: {error}")
        self._away = (self._away[0] if self._away else time.monotonic(), error)
        self._changed.notify_all()

    def _end(self) -> None:
        self._running = self._thread = None
        self._changed.notify_all()


class _Job:
    """Puts that are done in order, each once; `what` names them in messages."""

    def __init__(self, what: str, steps: deque[Callable[[], object]], then: Callable[[], None] = lambda: None):
        self.what, self.steps, self.then = what, steps, then

    def do(self) -> None:
        """All that is left to do; the next call goes on behind what was done when this one fails."""
        while self.steps:
            self.steps[0]()
            self.steps.popleft()
        self.then()


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
