"""Supervised child processes: their output, how they end, and that nothing of them is left."""

import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from operated import running, wait_until
from places import PROJECT

from flows import supervisor
from flows.supervisor import GRACE, TAIL_LINES, ChildFailed, ChildTimedOut, run_child, run_in_background


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", program, *arguments]


def alive(mark: str) -> list[int]:
    """The processes with `mark` on their command line that have not ended."""
    return [pid for pid, command, _ in running() if mark in command]


@pytest.fixture
def mark() -> Iterator[str]:
    """A word for command lines; what carries it after the test is ended, and the test has failed."""
    word = f"mark-{uuid.uuid4().hex}"
    yield word
    left = alive(word)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "of a child nothing stays"


# A child whose own child is in a session of its own, as torchrun's ranks are, and will not hear SIGTERM.
STUBBORN = """
import signal, subprocess, sys, time
if sys.argv[1] == "child":
    subprocess.Popen([sys.executable, "-S", "-c", sys.argv[3], "grandchild", sys.argv[2], ""], start_new_session=True)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(sys.argv[1], flush=True)
time.sleep(600)
"""


def stubborn(mark: str) -> list[str]:
    return python(STUBBORN, "child", mark, STUBBORN)


def test_every_line_of_stdout_and_stderr_comes_in_order_as_it_is_printed():
    program = """
import sys, time
print("one", flush=True); time.sleep(0.5); print("two", file=sys.stderr, flush=True); print(); print("  three é")
sys.stdout.write("10%\\r20%\\rdone")
"""
    heard = []
    run_child(python(program), lambda line: heard.append((line, time.monotonic())))
    assert [line for line, _ in heard] == ["one", "two", "  three é", "10%", "20%", "done"]
    assert heard[1][1] - heard[0][1] > 0.2  # not all at the end


def test_huge_output_passes_whole_while_whoever_watches_takes_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flows.supervisor.WATCH_SECONDS", 0.0)
    lines, watched = [], []

    def watch() -> None:
        time.sleep(0.3)
        watched.append(len(lines))

    run_child(python("for i in range(100_000): print(i)"), lines.append, watch)
    assert lines == [str(i) for i in range(100_000)]
    assert watched[0] < watched[-1] == 100_000, "while it runs, and at its end"


def test_the_memory_is_that_of_the_child():
    assert run_child(python("pass"), print) < 60e6
    assert 200e6 < run_child(python("x = bytearray(200_000_000)"), print) < 260e6


@pytest.mark.parametrize(
    ("command", "returncode", "words"),
    [
        (python("import sys\nfor i in range(80): print('line', i)\nsys.exit(3)"), 3, "exit status 3;.*(?s:.*)line 79$"),
        (python("import os; os.kill(os.getpid(), 9)"), -9, "by signal 9"),
        (["no-such-program", "x"], 127, "cannot start no-such-program: No such file"),
    ],
)
def test_a_failed_child_raises_its_exit_status_and_its_last_lines(command: list[str], returncode: int, words: str):
    with pytest.raises(ChildFailed, match=words) as failed:
        run_child(command, print)
    error = pickle.loads(pickle.dumps(failed.value))  # as Prefect may keep it
    assert (error.returncode, error.command) == (returncode, command)
    assert returncode != 3 or error.tail == [f"line {i}" for i in range(80 - TAIL_LINES, 80)]


SAVES = """
import signal, sys, time
def stop(*_): print("saved"); sys.exit(0)
signal.signal(signal.SIGTERM, stop); print("ready"); time.sleep(600)
"""
# For the kernel such a process is a zombie, which nobody can wait for before its other threads end.
WITHOUT_ITS_FIRST_THREAD = """
import ctypes, signal, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=lambda: (print("ready", flush=True), time.sleep(600))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize(
    ("program", "grace", "returncode", "printed"),
    [
        (STUBBORN, 0.3, -signal.SIGTERM, {"child", "grandchild"}),
        (SAVES, GRACE, 0, {"ready", "saved"}),
        (WITHOUT_ITS_FIRST_THREAD, 0.3, -signal.SIGKILL, {"ready"}),
    ],
)
def test_a_child_may_take_no_longer_than_its_timeout(
    mark: str, program: str, grace: float, returncode: int, printed: set[str]
):
    started = time.monotonic()
    with pytest.raises(ChildTimedOut, match="longer than 1 s") as failed:
        run_child(python(program, "child", mark, program), print, timeout=1, grace=grace)
    assert 1 <= time.monotonic() - started < 10
    assert (failed.value.returncode, set(failed.value.tail)) == (returncode, printed)


def test_what_a_child_leaves_behind_is_ended(mark: str):
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', "
    run_child(python(program + "sys.argv[1]], start_new_session=True)", mark), print)


def test_a_signal_to_the_flow_ends_the_child_before_the_flow_goes_on(mark: str):
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_child(stubborn(mark), lambda line: os.kill(os.getpid(), signal.SIGUSR1), grace=0.2)
    finally:
        signal.signal(signal.SIGUSR1, before)


# A flow; where it is asked to fork, its copy keeps its end of the socket open while the flow is killed.
FLOW = """
import os, signal, sys, time
from flows.supervisor import run_child
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest itself runs in the background
def listen(line):
    print(line, flush=True)
    if sys.argv[2] == "fork" and "grandchild" in line:
        if os.fork() == 0:
            time.sleep(1.5)
            os._exit(0)
        os.kill(os.getpid(), 9)
run_child(sys.argv[3:], listen, grace=float(sys.argv[1]))
"""


def a_flow(grace: float, fork: str, mark: str) -> subprocess.Popen:
    command = [sys.executable, "-c", FLOW, str(grace), fork, *stubborn(mark)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT)


@pytest.mark.parametrize(("number", "grace"), [(signal.SIGKILL, GRACE), (signal.SIGTERM, 0.5), (signal.SIGINT, 0.5)])
def test_nothing_is_left_5_seconds_after_the_flow_was_killed(mark: str, number: int, grace: float):
    flow = a_flow(grace, "", mark)
    heard = {flow.stdout.readline(), flow.stdout.readline()}
    assert heard == {b"child\n", b"grandchild\n"}
    assert len(alive(mark)) == 4  # flow, supervisor, child, grandchild
    flow.send_signal(number)
    wait_until(lambda: not alive(mark), 5)
    flow.communicate()
    assert flow.returncode == -number


def test_nothing_is_left_of_a_child_whose_flow_forked_and_died(mark: str):
    """The parent-death signal comes, though the socket is open."""
    a_flow(0.3, "fork", mark).wait()
    wait_until(lambda: len(alive(mark)) <= 1, 2.5)  # the forked copy of the flow, while it sleeps
    wait_until(lambda: not alive(mark), 10)


def test_a_supervisor_whose_flow_has_ended_before_it_listens_starts_no_child(tmp_path: Path):
    program = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getppid()), "1"]
    subprocess.run([*program, "touch", tmp_path / "started"], stdin=subprocess.DEVNULL, check=True)
    assert not [*tmp_path.iterdir()]


def test_a_child_of_the_main_thread_has_a_session_of_its_own_no_input_and_the_variables_it_was_given():
    program = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()), os.environ['GREETING'])"
    heard = []
    run_child(python(program), heard.append, environment={"GREETING": "hello"})
    assert heard == ["True '' hello"]
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="main thread"):
        pool.submit(run_child, python("pass"), print).result()


def test_a_child_in_the_background_runs_as_long_as_the_block(mark: str, tmp_path: Path):
    log = tmp_path / "log"
    with run_in_background(stubborn(mark), log, grace=0.2) as runs:
        wait_until(lambda: "grandchild" in log.read_text(), 20)
        assert runs()
    assert not alive(mark)
    with run_in_background(python("print('over')"), log) as runs:
        wait_until(lambda: not runs(), 20)
    assert log.read_text().endswith("over\n")
