"""Run child processes that never outlive the flow that started them, however the flow ends.

This file is also a program, the supervisor, which runs between the flow and its child. The supervisor has its own
session and uses only the standard library. It adopts every descendant of the child (PR_SET_CHILD_SUBREAPER), even those
that left the child's session, such as torchrun's ranks. Its standard input is a socket to the flow. When the flow's end
of the socket closes, even after `kill -9`, the supervisor ends all descendants: SIGTERM, a grace period, SIGKILL. The
child's output has a separate pipe, because programs that read the flow's stdout would otherwise wait for the child.
Linux only (prctl, /proc).
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
        process, lifeline = _start([str(part) for part in command], file, grace, environment)
    try:
        yield lambda: process.poll() is None
    finally:
        _stop(process, lifeline, grace)


def _start(
    command: list[str], output: int | IO[bytes], grace: float, environment: Mapping[str, str] | None
) -> tuple[subprocess.Popen, socket.socket]:
    """Start the supervisor. Return its process and a socket to it. Closing the socket ends all children."""
    if sys.platform != "linux":
        raise RuntimeError(f"child processes need prctl and /proc of Linux, but this is {sys.platform}")
    if threading.current_thread() is not threading.main_thread():
        # Signals interrupt only the main thread, and the parent-death signal is sent when the starting thread ends.
        raise RuntimeError("a child must be started from the main thread; call the stage directly, not with .submit()")
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            # -I -S: the environment and site-packages cannot interfere, and it starts in 20 ms.
            [sys.executable, "-I", "-S", __file__, str(grace), *command],
            stdin=theirs.fileno(),
            stdout=output,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
    return process, ours


def _stop(process: subprocess.Popen, lifeline: socket.socket, grace: float) -> tuple[int, int]:
    """End the process tree if it is still running. Return the child's return code and the peak memory in bytes."""
    with lifeline:
        lifeline.shutdown(socket.SHUT_WR)
        try:
            process.wait(grace + _KILL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        report = lifeline.recv(64).split()  # empty if the supervisor was killed
    process.wait()
    return (int(report[0]), int(report[1])) if report else (process.returncode, 0)


# --- the program between the flow and its child -----------------------------------------------------------------------

_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def _supervise(command: list[str], grace: float) -> None:
    """Run `command` until it ends, the flow ends or a signal arrives. Then end all its descendants."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # In addition to the socket, because a process forked by the flow without exec would hold its end open.
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    awake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (*_STOP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)

    # Blocked until exec, so that the handlers above do not swallow a signal that is meant for the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    child = os.fork()
    if child == 0:
        _exec_child(command, prctl)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
    statuses: dict[int, int] = {}
    while child not in statuses:
        ready, _, _ = select.select([sys.stdin.fileno(), awake], [], [])
        _reap(statuses)
        if sys.stdin.fileno() in ready or (awake in ready and _STOP & set(os.read(awake, 4096))):
            break
    _end_descendants(grace, statuses)
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    with contextlib.suppress(OSError):  # the flow may have ended
        os.write(sys.stdin.fileno(), f"{os.waitstatus_to_exitcode(statuses[child])} {peak_bytes}".encode())


def _exec_child(command: list[str], prctl: Callable) -> None:
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Python ignores the last two, and ignored signals stay ignored after exec.
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
    """End all descendants: SIGTERM once, and SIGKILL after `grace` seconds. Put their wait statuses into `statuses`."""
    signalled: set[int] = set()
    deadline = time.monotonic() + grace
    while alive := _descendants(os.getpid()):
        late = time.monotonic() > deadline
        for pid in alive if late else alive - signalled:
            with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        signalled |= alive
        time.sleep(0.02)
        _reap(statuses)
    _reap(statuses)  # those that ended just before


def _reap(statuses: dict[int, int]) -> None:
    """Record the wait status of every child that has ended, including adopted ones, by process id in `statuses`."""
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            statuses[ended[0]] = ended[1]


def _descendants(ancestor: int) -> set[int]:
    """Return the process ids of the running descendants of `ancestor`, from /proc."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]  # the name before may hold anything
            # If only the first thread has ended, the process looks like a zombie, but other threads still run.
            ended = state in (b"Z", b"X") and len(os.listdir(f"/proc/{name}/task")) < 2
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended in the meantime
        children.setdefault(int(parent), []).append((int(name), ended))
    running, pending = set(), [ancestor]
    while pending:
        below = children.get(pending.pop(), [])
        pending += [pid for pid, _ in below]
        running |= {pid for pid, ended in below if not ended}
    return running


if __name__ == "__main__":
    _supervise(sys.argv[2:], float(sys.argv[1]))
