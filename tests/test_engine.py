"""The process of a flow run ends with its worker, even where nobody else ends it, and hears of that once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from operated import wait_until

from flows.engine import is_supervisor

# Stands for a worker: starts a run, says its process id, and waits.
WORKER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]]).pid, flush=True)
time.sleep(600)
"""
# Stands for a run: notes each SIGTERM in a file, and ends with the first or with none.
RUN = """
import os, signal, sys, time
from flows.engine import end_with
def ended(*_):
    with open(sys.argv[1], "a") as file:
        file.write("SIGTERM ")
    if "stubborn" not in sys.argv[1]:
        sys.exit(1)
signal.signal(signal.SIGTERM, ended)
end_with(os.getppid())
open(sys.argv[1], "a").close()
while True:
    time.sleep(0.1)
"""


def ended(pid: int) -> bool:
    """Also where nobody has reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(("name", "least", "most"), [("willing", 0.0, 2.0), ("stubborn", 3.0, 5.0)])
def test_a_run_ends_with_its_worker(tmp_path: Path, name: str, least: float, most: float):
    notes = tmp_path / name
    worker = subprocess.Popen([sys.executable, "-c", WORKER, RUN, str(notes)], stdout=subprocess.PIPE, text=True)
    run = int(worker.stdout.readline())
    try:
        wait_until(notes.exists, 20)
        time.sleep(0.5)
        assert not ended(run), "while its worker lives"
    finally:
        worker.kill()
        worker.wait()
    assert least <= wait_until(lambda: ended(run), most + 5) <= most
    assert notes.read_text() == "SIGTERM ", "one, and no second that would interrupt what the first one started"


def test_a_supervisor_is_known_by_its_program():
    program = str(Path(__file__).parents[1] / "flows" / "supervisor.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", program, "1", sys.executable, "-c", "import time; time.sleep(600)"],
        stdin=subprocess.PIPE,
    )
    try:
        wait_until(lambda: is_supervisor(process.pid), 10)  # the kernel shows its command line a moment later
        assert not is_supervisor(os.getpid())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)
    assert not is_supervisor(process.pid)
