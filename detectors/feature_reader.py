"""Feature files, opened and read in a child process.

The libraries that read LMDB and HDF5 trust the offsets in a file, so a damaged file can crash a process, or make it
loop or allocate without end. Therefore a child with limits reads all formats (detectors/feature_files.py).
"""

import functools
import pickle
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from detectors.feature_files import LONGEST_ROW, FeatureRows, UnusableFile, open_rows
from storage.memory import is_memory_error
from storage.pickles import UnsafePickle
from storage.safe_json import printable

_MEMORY = 2**32  # bytes of the child: several times the longest row
_SECONDS = 60  # CPU time per row
# Signals with which a damaged file ends the child. Others come from outside, such as SIGKILL if memory is short.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGPROF}
_lock = threading.Lock()


class FeatureFile:
    """A feature file or folder with one row per image. When it is opened, all its content is read and hashed.

    Raises ValueError if it is missing, damaged or of an unknown format, and MemoryError if memory is short.
    """

    def __init__(self, path: Path):
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"feature file {path} does not exist, or is not a regular file")
        self.path = path
        try:
            self.names, self.sha256 = self.read(None)
        except (ValueError, MemoryError) as error:
            raise type(error)(f"{path} {error}") from error

    def read(self, row: int | None) -> Any:
        """Return a row's fields by our field names, or the names and the hash of the file if `row` is None.

        Raises ValueError if the row is unusable, and MemoryError if memory is short.
        """
        reply = _ask_child(self.path.absolute(), row)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def location(self, row: int) -> str:
        """Return `FILE: IMAGE`, to identify a row in messages."""
        # Without the folder: messages are stored in manifests, which must not depend on where the file is.
        return printable(f"{self.path.name}: {self.names[row]}")


def _ask_child(path: Path, row: int | None) -> Any:
    """Return the child's reply. Raises ValueError if the file crashes the child, MemoryError if it ends otherwise."""
    with _lock:
        connection, child = _start_child()
        try:
            connection.send((path, row))
            return connection.recv()
        except BaseException as error:  # the child is gone, or its reply is left in the pipe
            _start_child.cache_clear()
            connection.close()
            if not isinstance(error, EOFError | OSError):
                raise
    if -child.wait() in _CRASHES:
        raise ValueError(f"is damaged: reading it ends with {signal.strsignal(-child.returncode)}; download it again")
    raise MemoryError("was not read: its reader did not start, or was killed")


@functools.cache
def _start_child() -> tuple[Connection, subprocess.Popen]:
    ours, theirs = Pipe()
    with theirs:
        command, null = [sys.executable, "-m", __name__, str(theirs.fileno())], subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, pass_fds=[theirs.fileno()])
    return ours, child


# --- the child --------------------------------------------------------------------------------------------------------


def _answer_requests(connection: Connection) -> None:
    """Answer the parent's requests until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY if hard == resource.RLIM_INFINITY else min(hard, _MEMORY), hard))
    opened: dict[Path, FeatureRows] = {}
    while True:
        try:
            path, row = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, 0 if row is None else _SECONDS)
        try:
            # Not protocol 5, whose arrays make unpickling print a SystemError if memory is short.
            reply = pickle.dumps(_read(opened, path, row), protocol=4)
            if row is not None and len(reply) > LONGEST_ROW:
                raise ValueError(f"has {len(reply)} bytes, more than the limit of {LONGEST_ROW}")
        except Exception as error:  # noqa: BLE001  readers of damaged files raise many types
            reply = pickle.dumps((MemoryError if is_memory_error(error) else ValueError)(_describe(error, row)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(reply)


def _read(opened: dict[Path, FeatureRows], path: Path, row: int | None) -> Any:
    if row is None:
        opened.pop(path, None)  # closed first, because LMDB and HDF5 do not open a file twice
    if path not in opened:  # also after a crash
        opened[path] = open_rows(path)
    return (list(opened[path].names), opened[path].sha256()) if row is None else opened[path].read(row)


def _describe(error: Exception, row: int | None) -> str:
    """Return what is wrong with a file or, if `row` is not None, with one of its rows."""
    if isinstance(error, UnsafePickle):
        return f"wants to load {error}, which features do not need. Nothing was run; do not trust the file"
    if isinstance(error, UnusableFile) or (isinstance(error, ValueError) and row is not None):
        return printable(error)
    reason = f"{type(error).__name__}: {printable(error)[:200]}"
    if row is not None:
        return f"cannot be read: {reason}"
    return f"is damaged or not a feature file ({reason}); download it again"


if __name__ == "__main__":
    _answer_requests(Connection(int(sys.argv[1])))
