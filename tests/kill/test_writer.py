"""Writers that are killed at any moment leave only whole shards, lose no row and write none twice."""

import multiprocessing
import os
import re
import threading
from pathlib import Path

import pytest

from tests.kill.writer import _CALLS, Fate, check, monitored


def test_system_calls_of_threads_are_borders_too(tmp_path: Path):
    counts = multiprocessing.get_context("fork").Array("i", len(_CALLS), lock=False)
    with monitored(Fate(0, None, 0, after=False), counts):
        thread = threading.Thread(target=os.mkdir, args=(tmp_path / "made",))
        thread.start()
        thread.join()
    assert counts[_CALLS.index("mkdir")] == 1


def test_writers_killed_a_few_times_leave_only_whole_shards(tmp_path: Path):
    said = []
    check(tmp_path, seed=1, kills=6, say=said.append, roots=["local"])
    assert int(re.match(r"local: (\d+) kills", said[0])[1]) >= 6


@pytest.mark.slow
def test_writers_killed_many_times_leave_only_whole_shards(tmp_path: Path):
    said = []
    check(tmp_path, seed=2, kills=40, say=said.append)
    assert len(said) == 2
