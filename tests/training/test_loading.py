"""Loading processes that hang."""

import subprocess
import sys

import pytest
from places import PROJECT

HANGING = """
import ctypes, sys, time
import torch
from training import loading
from training.program import run_in_world

class Numbers(torch.utils.data.Dataset):
    def __getitem__(self, index):
        if index == 5:
            getattr(ctypes, sys.argv[1])(None).sleep(600)
        return index

def work(world):
    for item in loading.batches(Numbers(), range(2, int(sys.argv[2])), 2, world.device):
        time.sleep(1.2)  # a slow training is no hanging worker
        print(item, flush=True)

loading.MAX_SECONDS = 2.0
run_in_world("numbers", work)
"""


def load(library: str, end: int) -> subprocess.CompletedProcess:
    program = [sys.executable, "-c", HANGING, library, str(end)]
    return subprocess.run(program, cwd=PROJECT, capture_output=True, text=True, timeout=60)


# With PyDLL the worker holds the GIL, as in a page fault of a mapped file whose server is gone: no signal is handled.
@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])
def test_a_worker_that_hangs_shows_its_stack_and_ends_the_run(library):
    ended = load(library, 9)
    assert ended.returncode == 1
    assert ended.stdout.startswith("2\n") or library == "PyDLL", "its queue's thread needs the GIL"
    assert "line 10 in __getitem__" in ended.stderr, "where it hangs"
    assert "numbers: a loading process ended; if it hung, its stack is above" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_worker_that_waits_for_a_slow_training_does_not_hang():
    ended = load("CDLL", 5)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n3\n4\n", "")
