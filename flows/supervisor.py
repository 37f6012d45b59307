"""Run child processes that never outlive the flow that started them, however the flow ends.

This file is also a program, the supervisor, which runs between the flow and its child. The supervisor has its own
session and uses only the standard library. It adopts every descendant of the child (PR_SET_CHILD_SUBREAPER), even those
that left the child's session, such as torchrun's ranks. When the flow ends, even by `kill -9`, the kernel sends SIGTERM
to the supervisor (PR_SET_PDEATHSIG), which ends all descendants: SIGTERM, a grace period, SIGKILL. The child's output
has a separate pipe, because programs that read the flow's stdout would otherwise wait for the child. Linux only (prctl,
/proc).
"""

import contextlib
import ctypes
import os
import resource
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

TAIL_LINES = 50  # last lines of the child's output that are kept for an error
GRACE = 2.5  # seconds between SIGTERM and SIGKILL, so that all processes exit within 5 s of the flow's end
WATCH_SECONDS = 5.0  # time between two calls of `watch`
_POLL = 0.1  # seconds between two checks of a child
_KILL_SECONDS = 10.0  # time that the flow waits for SIGKILL to take effect

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ChildFailed(RuntimeError):
    """Raised if a child process failed. `tail` has its last lines of output; a `returncode` of -9 means signal 9."""

    def __init__(self, command: Sequence[str], returncode: int, tail: Sequence[str], reason: str):
        super().__init__(command, returncode, tail, reason)  # all arguments, so that the error can be pickled
        self.command, self.returncode, self.tail, self.reason = list(command), returncode, list(tail), reason

    def __str__(self) -> str:
        lines = "\n".join(f"  | {line}" for line in self.tail) or "  (it printed nothing)"
        return f"{shlex.join(self.command)}\n{self.reason}; its last lines:\n{lines}"


class ChildTimedOut(ChildFailed):
    """Raised if a child exceeded its time limit and was ended."""


def run_child(
    command: Sequence[str | Path],
    log: Callable[[str], object],
    watch: Callable[[], object] = lambda: None,
    *,
    timeout: float | None = None,
    grace: float = GRACE,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `command` to its end, and return the peak memory in bytes of the largest process in its process tree.

    All processes of the tree have ended when this function returns or raises. Call it from the main thread, because
    signals interrupt only that thread.

    Args:
        log: Called with each line of output (stdout and stderr) that is not blank.
        watch: Called every 5 s during the run, and once at its end. It may be slow: output is buffered meanwhile.
        timeout: Maximum duration in seconds.
        grace: Seconds between SIGTERM and SIGKILL.
        environment: Environment variables to add to those of this process.

    Raises:
        ChildFailed: The command failed.
        ChildTimedOut: The command exceeded `timeout`.
    """
    command = [str(part) for part in command]
    started = watched = time.monotonic()
    printed, tail = deque(), deque(maxlen=TAIL_LINES)

    def log_printed() -> None:
        while printed:
            if line := printed.popleft().rstrip():
                tail.append(line)
                log(line)

    process, report = _start(command, subprocess.PIPE, grace, environment)
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
        returncode, peak_bytes = _stop(process, report, grace)
    reader.join(1.0)  # with a limit, because another process may still hold the pipe
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
def run_in_background(
    command: Sequence[str | Path], log: Path, *, grace: float = GRACE, environment: Mapping[str, str] | None = None
) -> Iterator[Callable[[], bool]]:
    """Context manager that runs `command`, with its output in the file `log`.

    Yields a function that returns True while the command is running.
    """
    with open(log, "ab") as file:
        process, report = _start([str(part) for part in command], file, grace, environment)
    try:
        yield lambda: process.poll() is None
    finally:
        _stop(process, report, grace)


def _start(
    command: list[str], output: int | IO[bytes], grace: float, environment: Mapping[str, str] | None
) -> tuple[subprocess.Popen, socket.socket]:
    """Start the supervisor. Return its process, and the socket to which it writes a report when it ends."""
    if sys.platform != "linux":
        raise RuntimeError(f"child processes need prctl and /proc of Linux, but this is {sys.platform}")
    if threading.current_thread() is not threading.main_thread():
        # Signals interrupt only the main thread, and the parent-death signal is sent when the starting thread ends.
        raise RuntimeError("a child must be started from the main thread; call the stage directly, not with .submit()")
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            # -I -S: the environment and site-packages cannot interfere, and it starts in 20 ms.
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(grace), *command],
            stdin=theirs.fileno(),
            stdout=output,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
    return process, ours


def _stop(process: subprocess.Popen, report: socket.socket, grace: float) -> tuple[int, int]:
    """End the process tree if it is still running. Return the child's return code and the peak memory in bytes."""
    process.terminate()
    try:
        process.wait(grace + _KILL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    with report:
        numbers = report.recv(64).split()  # empty if the supervisor was killed
    process.wait()
    return (int(numbers[0]), int(numbers[1])) if numbers else (process.returncode, 0)


# --- the program between the flow and its child -----------------------------------------------------------------------

_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_AWAITED = {*_STOP, signal.SIGCHLD}


def _supervise(command: list[str], flow: int, grace: float) -> None:
    """Run `command` until it ends, the process `flow` ends or a signal arrives. Then end all its descendants."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, there are no statuses to wait for
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != flow:  # it has already ended
        return

    def prepare() -> None:  # called in the child before exec
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in _STOP:  # ignored signals stay ignored after exec
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    statuses: dict[int, int] = {}
    while child.pid not in statuses and signal.sigwait(_AWAITED) == signal.SIGCHLD:
        _reap(statuses)
    _end_descendants(grace, statuses)
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    with contextlib.suppress(OSError):  # the flow may have ended
        os.write(sys.stdin.fileno(), f"{os.waitstatus_to_exitcode(statuses[child.pid])} {peak_bytes}".encode())


def _end_descendants(grace: float, statuses: dict[int, int]) -> None:
    """End all descendants: SIGTERM once, and SIGKILL after `grace` seconds. Put their wait statuses into `statuses`."""
    signalled: set[int] = set()
    deadline = time.monotonic() + grace
    while _reap(statuses):
        late = time.monotonic() > deadline
        found = _descendants(os.getpid())
        for pid in found if late else found - signalled:
            with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        signalled |= found
        time.sleep(0.02)


def _reap(statuses: dict[int, int]) -> bool:
    """Record the wait status of every child that has ended, including adopted ones, by process id in `statuses`.

    Returns False if no children are left, and so no descendants.
    """
    try:
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _descendants(ancestor: int) -> set[int]:
    """Return the process ids of the descendants of `ancestor`, from /proc, with those that have just ended."""
    children: dict[int, set[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
            stat = Path("/proc", name, "stat").read_bytes()
            parent = stat.rpartition(b")")[2].split()[1]  # the name before may hold anything
            children.setdefault(int(parent), set()).add(int(name))
    found, pending = set(), [ancestor]
    while pending:
        below = children.get(pending.pop(), set())
        pending += below
        found |= below
    return found


if __name__ == "__main__":
    _supervise(sys.argv[3:], int(sys.argv[1]), float(sys.argv[2]))
