"""Files that a training adds to, on a disk that may be full for a while: nothing of them is lost, and nothing ends."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from storage.object_store import StorageUnreachable


class Lines:
    """A file of JSON objects, one a line. What the disk does not take is kept, and written, in order, when it does."""

    def __init__(self, file: Path, log: Callable[[str], None]):
        self.file, self.log = file, log
        self._waiting: deque[bytes] = deque()
        self._error: OSError | None = None

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._waiting += [(json.dumps(dict(line)) + "\n").encode() for line in records]
        self.write()

    def write(self) -> None:
        """Try to write what waits."""
        if not self._waiting:
            return
        try:
            while self._waiting:
                _append(self.file, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if self._error is None:
                self.log(f"cannot write {self.file}, the training goes on and this is tried again: {error}")
            self._error = error
            return
        if self._error:
            self.log(f"{self.file} is written again, and lacks nothing")
            self._error = None

    def sync(self) -> None:
        """Have what is written survive a power cut."""
        try:
            with open(self.file, "rb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            pass  # nothing was written yet
        except OSError as error:
            raise StorageUnreachable(f"cannot write {self.file}: {error}. See that its disk is well") from error

    @property
    def lost(self) -> str | None:
        """What is not written, for an error: why, and what to do; None where all is."""
        if not self._waiting:
            return None
        return (
            f"{len(self._waiting)} lines of {self.file} are not written: {self._error}. Make room, or make it writable "
            "for this user; the checkpoints are not touched by this"
        )


def _append(file: Path, line: bytes) -> None:
    """All of it, or OSError and nothing."""
    with open(file, "ab", buffering=0) as out:
        before = out.tell()
        try:
            written = 0
            while written < len(line):  # a disk with little room takes a part, and refuses only the rest
                written += out.write(line[written:])
        except OSError:
            out.truncate(before)
            raise
