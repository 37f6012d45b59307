"""Child processes that never outlive the flow that started them, however it ends.

Between the flow and its child stands this file as a program of its own (standard library only), in a session of its
own. It adopts every descendant of the child (PR_SET_CHILD_SUBREAPER), even those that left the child's session, as the
ranks of torchrun do. When the flow's end of the socket on its standard input closes, which also `kill -9` of the flow
does, it ends them all: SIGTERM, a grace period, SIGKILL. The child's output goes through a pipe of its own: a child
that held the flow's stdout would keep whoever reads that waiting. Linux only (prctl, /proc).
"""

import contextlib
import ctypes
import math
import os
import re
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
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 50  # of the child's output that an error carries
GRACE = 2.5  # seconds between SIGTERM and SIGKILL: with the rest, nothing is left 5 s after the flow's end
_LONGEST_LINE = 2**16  # bytes; what is longer is cut into several, so that no output can fill the memory
_POLL = 0.5  # seconds between looks at a silent child
_KILL_SECONDS = 10.0  # that SIGKILL may take before the flow gives up waiting for the kernel

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Finished:
    """A child that ended well: how long it took, and the most memory that one process of its tree had."""

    seconds: float
    peak_bytes: int


class ChildFailed(RuntimeError):
    """A child ended badly: command, its return code (-9: by signal 9), the reason and its last lines of output."""

    def __init__(self, command: Sequence[str], returncode: int, tail: Sequence[str], reason: str):
        super().__init__(command, returncode, tail, reason)  # all of them, so that it can be pickled
        self.command, self.returncode, self.tail, self.reason = list(command), returncode, list(tail), reason

    def __str__(self) -> str:
        lines = "\n".join(f"  | {line}" for line in self.tail) or "  (it printed nothing)"
        return f"{shlex.join(self.command)}\n{self.reason}; its last lines:\n{lines}"


class ChildTimedOut(ChildFailed):
    """A child was ended because it took too long or was silent for too long."""


def run_child(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    timeout: float | None = None,
    silence: float | None = None,
    heard_elsewhere: Callable[[], float] = lambda: -math.inf,
    grace: float = GRACE,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run `command` to its end; `on_line` gets every line of its output (stdout and stderr) that is not blank.

    timeout          seconds it may take
    silence          seconds without any output, or other sign of life
    heard_elsewhere  returns when the last other sign of life came, by time.monotonic()
    grace            seconds between SIGTERM and SIGKILL
    environment      variables set for it beside ours

    ChildFailed where it fails, ChildTimedOut where it takes too long. No process of it is left when this returns or
    raises. Call it from the main thread, which signals interrupt.
    """
    command = [str(part) for part in command]
    started = heard = time.monotonic()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    lines = _Lines()
    process, lifeline = _start(command, subprocess.PIPE, grace, environment)
    output, reason = process.stdout.fileno(), None
    try:
        while reason is None:
            now, heard = time.monotonic(), max(heard, heard_elsewhere())
            if timeout is not None and now - started >= timeout:
                reason = f"it took longer than {timeout:g} s"
            elif silence is not None and now - heard >= silence:
                reason = f"it was silent for {silence:g} s"
            elif _readable(output, _until(now, started, timeout, heard, silence)):
                data = os.read(output, 2**16)
                for line in lines.feed(data) if data else lines.rest():
                    tail.append(line)
                    on_line(line)
                heard = time.monotonic()  # after on_line, whose time is not the child's silence
                if not data:
                    break
            elif process.poll() is not None:  # killed from outside, and somebody else still holds the pipe
                break
    finally:
        peak_bytes = _stop(process, lifeline, grace, lambda data: tail.extend(lines.feed(data)))
    if reason is not None:
        raise ChildTimedOut(command, process.returncode, [*tail, *lines.rest()], reason)
    if process.returncode:
        raise ChildFailed(command, process.returncode, [*tail, *lines.rest()], _how(process.returncode))
    return Finished(time.monotonic() - started, peak_bytes)


@contextmanager
def background(
    command: Sequence[str], log: Path, *, grace: float = GRACE, environment: Mapping[str, str] | None = None
) -> Iterator[Callable[[], bool]]:
    """Run `command` beside the `with` block, its output in the file `log`; yields a function: does it still run?"""
    command = [str(part) for part in command]
    with open(log, "ab") as file:
        process, lifeline = _start(command, file, grace, environment)
    try:
        yield lambda: process.poll() is None
    finally:
        _stop(process, lifeline, grace, lambda data: None)


def _start(
    command: list[str], output: int | BinaryIO, grace: float, environment: Mapping[str, str] | None
) -> tuple[subprocess.Popen, socket.socket]:
    """The process between us and the child, and our end of the socket: it closes, and all is ended."""
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
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
    return process, ours


def _until(now: float, started: float, timeout: float | None, heard: float, silence: float | None) -> float:
    """Seconds until the next deadline, at most _POLL."""
    ends = [now + _POLL]
    if timeout is not None:
        ends.append(started + timeout)
    if silence is not None:
        ends.append(heard + silence)
    return max(0.0, min(ends) - now)


def _readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _stop(process: subprocess.Popen, lifeline: socket.socket, grace: float, on_output: Callable[[bytes], None]) -> int:
    """Have the tree ended if it has not yet, and reap the process; the peak memory in bytes, 0 if it was killed."""
    with lifeline:
        lifeline.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + grace + _KILL_SECONDS
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            elif process.stdout is None or not _readable(process.stdout.fileno(), 0.02):
                time.sleep(0.02)
            else:
                on_output(os.read(process.stdout.fileno(), 2**16))
        report = lifeline.recv(64)
    if process.stdout is not None:
        with process.stdout:
            while _readable(process.stdout.fileno(), 0) and (data := os.read(process.stdout.fileno(), 2**16)):
                on_output(data)
    return int(report or b"0")


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"it was killed by signal {-returncode} ({signal.strsignal(-returncode)})"
    return f"it failed with exit status {returncode}"


class _Lines:
    """Bytes in, whole lines out; a carriage return, as progress bars print it, ends a line too."""

    def __init__(self):
        self.unfinished = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, self.unfinished = re.split(rb"[\r\n]", self.unfinished + data)
        while len(self.unfinished) >= _LONGEST_LINE:
            whole.append(self.unfinished[:_LONGEST_LINE])
            self.unfinished = self.unfinished[_LONGEST_LINE:]
        return [line.decode(errors="replace") for line in whole if line.strip()]

    def rest(self) -> list[str]:
        return self.feed(b"\n") if self.unfinished else []


# --- the program between the flow and its child -----------------------------------------------------------------------

_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def _supervise(command: list[str], grace: float) -> int:
    """Run `command` until it ends, the flow is gone or a signal comes; end all that is left; its wait status."""
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
    with contextlib.suppress(OSError):  # nobody may be there to read it
        os.write(sys.stdin.fileno(), str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024).encode())
    return statuses[child]


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
    signalled: set[int] = set()
    deadline = time.monotonic() + grace
    while True:
        _reap(statuses)
        alive = _descendants(os.getpid())
        if not alive:
            _reap(statuses)  # whoever ended since the line before the last
            return
        late = time.monotonic() > deadline
        for pid in alive if late else alive - signalled:
            # It may have ended meanwhile: that is what was wanted.
            _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
        signalled |= alive
        time.sleep(0.02)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap(statuses: dict[int, int]) -> None:
    """Note the wait status of every child, adopted ones too, that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        statuses[pid] = status


def _descendants(ancestor: int) -> set[int]:
    """The processes below `ancestor` that have not ended, from /proc."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
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
        for pid, ended in children.get(todo.pop(), []):
            todo.append(pid)
            if not ended:
                found.add(pid)
    return found


def _end_as(status: int) -> None:
    """End this process as the child ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _end_as(_supervise(sys.argv[2:], float(sys.argv[1])))
