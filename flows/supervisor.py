"""Child processes that never outlive the flow that started them, however it ends.

Between the flow and its child stands this file as a program of its own (standard library only), in a session of its
own. It adopts every descendant of the child (PR_SET_CHILD_SUBREAPER), even those that left the child's session, as the
ranks of torchrun do. When the flow's end of the socket on its standard input closes, which also `kill -9` of the flow
does, it ends them all: SIGTERM, a grace period, SIGKILL. The child's output goes through a pipe of its own: a child
that held the flow's stdout would keep whoever reads that waiting. Linux only (prctl, /proc).
"""

import contextlib
import ctypes
import os
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

TAIL_LINES = 50  # of the child's output that an error carries
GRACE = 2.5  # seconds between SIGTERM and SIGKILL: with the rest, nothing is left 5 s after the flow's end
WATCH_SECONDS = 5.0  # between two calls of `watch`
_POLL = 0.1  # seconds between looks at a child
_KILL_SECONDS = 10.0  # that SIGKILL may take before the flow gives up waiting for the kernel

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ChildFailed(RuntimeError):
    """A child ended badly: command, its return code (-9: by signal 9), the reason and its last lines of output."""

    def __init__(self, command: Sequence[str], returncode: int, tail: Sequence[str], reason: str):
        super().__init__(command, returncode, tail, reason)  # all of them, so that it can be pickled
        self.command, self.returncode, self.tail, self.reason = list(command), returncode, list(tail), reason

    def __str__(self) -> str:
        lines = "\n".join(f"  | {line}" for line in self.tail) or "  (it printed nothing)"
        return f"{shlex.join(self.command)}\n{self.reason}; its last lines:\n{lines}"


class ChildTimedOut(ChildFailed):
    """A child was ended because it took too long."""


def run_child(
    command: Sequence[str],
    log: Callable[[str], object],
    watch: Callable[[], object] = lambda: None,
    *,
    timeout: float | None = None,
    grace: float = GRACE,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `command` to its end, and return the most memory in bytes that one process of its tree had.

    No process of it is left when this returns or raises. Call it from the main thread, which signals interrupt.

    Args:
        log: gets every line of its output (stdout and stderr) that is not blank.
        watch: is called every 5 s while it runs, and once after its end. It may take long: the output waits in memory.
        timeout: seconds it may take.
        grace: seconds between SIGTERM and SIGKILL.
        environment: variables set for it beside ours.

    Raises:
        ChildFailed: if it fails.
        ChildTimedOut: if it takes too long.
    """
    command = [str(part) for part in command]
    started = watched = time.monotonic()
    printed, tail = deque(), deque(maxlen=TAIL_LINES)

    def log_printed() -> None:
        while printed:
            if line := printed.popleft().rstrip():
                tail.append(line)
                log(line)

    process, lifeline = _start(command, subprocess.PIPE, grace, environment)
    reader = threading.Thread(target=printed.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        while process.poll() is None and (timeout is None or time.monotonic() - started < timeout):
            log_printed()
            if time.monotonic() - watched >= WATCH_SECONDS:
                watch()
                watched = time.monotonic()
            time.sleep(_POLL)
        late = process.returncode is None
    finally:
        returncode, peak_bytes = _stop(process, lifeline, grace)
    reader.join(1.0)  # not for ever: somebody else may still hold the pipe
    log_printed()
    watch()
    if late:
        raise ChildTimedOut(command, returncode, tail, f"it took longer than {timeout:g} s")
    if returncode < 0:
        reason = f"it was killed by signal {-returncode} ({signal.strsignal(-returncode)})"
        raise ChildFailed(command, returncode, tail, reason)
    if returncode:
        raise ChildFailed(command, returncode, tail, f"it failed with exit status {returncode}")
    return peak_bytes


@contextmanager
def background(
    command: Sequence[str], log: Path, *, grace: float = GRACE, environment: Mapping[str, str] | None = None
) -> Iterator[Callable[[], bool]]:
    """Run `command` beside the `with` block, its output in the file `log`; yields a function: does it still run?"""
    with open(log, "ab") as file:
        process, lifeline = _start([str(part) for part in command], file, grace, environment)
    try:
        yield lambda: process.poll() is None
    finally:
        _stop(process, lifeline, grace)


def _start(
    command: list[str], output: int | IO[bytes], grace: float, environment: Mapping[str, str] | None
) -> tuple[subprocess.Popen, socket.socket]:
    """Start the process between us and the child; returns it and our end of the socket: it closes, and all is ended."""
    if sys.platform != "linux":
        raise RuntimeError(f"child processes are supervised with prctl and /proc, which {sys.platform} has not")
    if threading.current_thread() is not threading.main_thread():
        # A signal interrupts the main thread alone, and the parent-death signal comes when the starting thread ends.
        raise RuntimeError("a child must be started from the main thread: call the stage directly, not by .submit()")
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            # -I -S: nothing of the environment or of site-packages can hinder it, and it starts in 20 ms.
            [sys.executable, "-I", "-S", __file__, str(grace), *command],
            stdin=theirs,
            stdout=output,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
    return process, ours


def _stop(process: subprocess.Popen, lifeline: socket.socket, grace: float) -> tuple[int, int]:
    """Have the tree ended if it has not yet; returns the child's return code and the peak memory in bytes."""
    with lifeline:
        lifeline.shutdown(socket.SHUT_WR)
        try:
            process.wait(grace + _KILL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        report = lifeline.recv(64).split()  # nothing if it was killed
    process.wait()
    return (int(report[0]), int(report[1])) if report else (process.returncode, 0)


# --- the program between the flow and its child -----------------------------------------------------------------------

_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def _supervise(command: list[str], grace: float) -> None:
    """Run `command` until it ends, the flow is gone or a signal comes; end all that is left, and tell the flow."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Beside the socket: a process that the flow forked, without exec, would hold its end open.
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    awake, waker = os.pipe()
    for end in (awake, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (*_STOP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)

    # Else the handlers above would, before exec, swallow a signal that is meant for the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    child = os.fork()
    if child == 0:
        _become(command, prctl)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
    statuses: dict[int, int] = {}
    while child not in statuses:
        ready, _, _ = select.select([sys.stdin.fileno(), awake], [], [])
        _reap(statuses)
        if sys.stdin.fileno() in ready or (awake in ready and _STOP & set(os.read(awake, 4096))):
            break
    _end_descendants(grace, statuses)
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    with contextlib.suppress(OSError):  # nobody may be there to read it
        os.write(sys.stdin.fileno(), f"{os.waitstatus_to_exitcode(statuses[child])} {peak_bytes}".encode())


def _become(command: list[str], prctl: Callable) -> None:
    """In the forked child: be `command`."""
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The latter two Python ignores, and an ignored signal outlives exec.
        for number in (*_STOP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _end_descendants(grace: float, statuses: dict[int, int]) -> None:
    """Send all of them SIGTERM once and, after the grace period, SIGKILL, until none is left."""
    signalled: set[int] = set()
    deadline = time.monotonic() + grace
    while alive := _descendants(os.getpid()):
        late = time.monotonic() > deadline
        for pid in alive if late else alive - signalled:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        signalled |= alive
        time.sleep(0.02)
        _reap(statuses)
    _reap(statuses)  # whoever ended just before


def _reap(statuses: dict[int, int]) -> None:
    """Note the wait status of every child, adopted ones too, that has ended."""
    with contextlib.suppress(ChildProcessError):  # there is none
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            statuses[ended[0]] = ended[1]


def _descendants(ancestor: int) -> set[int]:
    """The processes below `ancestor` that have not ended, from /proc."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]  # the name before may hold anything
            # Where only the first thread has ended, the process looks dead, and others of it still work.
            ended = state in (b"Z", b"X") and len(os.listdir(f"/proc/{name}/task")) < 2
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        children.setdefault(int(parent), []).append((int(name), ended))
    found, todo = set(), [ancestor]
    while todo:
        below = children.get(todo.pop(), [])
        todo += [pid for pid, _ in below]
        found |= {pid for pid, ended in below if not ended}
    return found


if __name__ == "__main__":
    _supervise(sys.argv[2:], float(sys.argv[1]))
