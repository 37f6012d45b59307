"""Feature files, opened and read in a child process.

The libraries that read LMDB and HDF5 trust the offsets in a file. A damaged file can crash the process that reads it,
or make it loop or allocate memory without end. Therefore a child process with limits reads the files of all formats
(detectors/feature_files.py), and its replies are read as untrusted pickles.
"""

import functools
import itertools
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from detectors.feature_files import UnusableFile, open_rows
from storage.pickles import UnsafePickle, read_pickle
from storage.safe_json import printable

_MEMORY = 2**32  # bytes of the child: several times the longest row
_SECONDS = 60  # CPU time to read a row; to open a file, there is another second per MiB
_MOST_OPEN = 64  # files that the child keeps open
# Signals with which a damaged file ends the child. Others come from outside, such as SIGKILL if memory is short.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGPROF}
_numbers, _lock = itertools.count(), threading.Lock()


class FeatureFile:
    """A feature file or folder with one row per image. When it is opened, all its content is read and hashed.

    Raises ValueError if it is missing, damaged or of an unknown format, and OSError if memory is short.
    """

    def __init__(self, path: Path):
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"feature file {path} does not exist, or is not a regular file")
        self.path, self._number = path, next(_numbers)
        try:
            self.names, self.sha256 = self._ask(None, str(path))
        except ValueError as error:
            raise ValueError(f"{path} {error}") from error

    def read(self, row: int) -> dict[str, Any]:
        """Return a row's fields by our field names. Raises ValueError if the row is unusable."""
        return self._ask(row, self.location(row))

    def location(self, row: int) -> str:
        """Return `FILE: IMAGE`, to identify a row in messages."""
        # Without the folder: messages are stored in manifests, which must not depend on where the file is.
        return printable(f"{self.path.name}: {self.names[row]}")

    def _ask(self, row: int | None, location: str) -> Any:
        try:
            kind, value = read_pickle(_ask(self._number, self.path.absolute(), row))
        except UnsafePickle as error:
            kind, value = "error", _unsafe(error)
        except (EOFError, OSError, MemoryError) as error:
            raise OSError(
                f"{location} cannot be read: its reader did not start or was killed ({type(error).__name__}); check "
                "that this machine has free memory, raise `ulimit -v`, and run again"
            ) from error
        if kind == "value":
            return value
        # A good file may fail like a damaged one if memory is limited.
        if kind == "limit" and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            raise OSError(f"{location} {value}, with memory limited by `ulimit -v`; raise that limit, and run again")
        raise ValueError(value)


def _ask(*request: object) -> bytes:
    """Send a request to the child, which is started if there is none, and return its reply."""
    with _lock:
        connection, _ = _child()
        try:
            connection.send(request)
            return connection.recv_bytes()
        except BaseException:  # the child is gone, or a reply is left in the pipe
            _child.cache_clear()
            connection.close()
            raise


@functools.cache
def _child() -> tuple[Connection, subprocess.Popen]:
    ours, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # a process with threads should not fork
        null = subprocess.DEVNULL
        child = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, env=environment, pass_fds=[theirs.fileno()]
        )
    return ours, child


def _unsafe(error: UnsafePickle) -> str:
    return f"wants to load {error}, which features do not need. Nothing was run; do not trust the file"


# --- the child --------------------------------------------------------------------------------------------------------


def _answer_requests(connection: Connection) -> None:
    """Answer requests until the parent closes the connection."""
    open_file = functools.lru_cache(_MOST_OPEN)(lambda number, path: open_rows(path))
    while True:
        try:
            number, path, row = connection.recv()
        except EOFError:
            return
        try:
            files = [] if row is not None else path.iterdir() if path.is_dir() else [path]
            signal.setitimer(signal.ITIMER_PROF, _SECONDS + sum(file.stat().st_size for file in files) / 2**20)
            file = open_file(number, path)
            value = (list(file.names), file.sha256()) if row is None else file.read(row)
            reply = pickle.dumps(("value", value), protocol=5)
        except Exception as error:  # noqa: BLE001  readers of damaged files raise many types
            reply = pickle.dumps(_problem(error, row))
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(reply)


def _problem(error: Exception, row: int | None) -> tuple[str, str]:
    """Return the kind and the text of a reply: `limit` if too little memory may be the cause, else `error`."""
    text = printable(error)[:200]
    if isinstance(error, UnusableFile):
        text = str(error)
    elif isinstance(error, UnsafePickle):
        text = _unsafe(error)
    elif row is None:
        text = f"is damaged or not a feature file ({type(error).__name__}: {text}); download it again"
    elif not isinstance(error, ValueError):
        text = f"cannot be read: {type(error).__name__}: {text}"
    is_memory = isinstance(error, MemoryError) or re.search("memory|allocat", text, re.IGNORECASE)
    return "limit" if is_memory else "error", text


def _main(connection: Connection) -> None:
    """Answer requests in a child of this process. If a damaged file crashes it, reply so and fork another one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard), hard))
    while worker := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        if -code not in _CRASHES:
            return
        text = f"is damaged: reading it ends with {signal.strsignal(-code)}; download it again"
        connection.send_bytes(pickle.dumps(("limit", text)))
    _answer_requests(connection)


if __name__ == "__main__":
    _main(Connection(int(sys.argv[1])))
