"""Our data resumes exactly in histories that hypothesis invents, like the loaders that the benchmark compares."""

import pytest

from benchmarks.resume.machine import run_histories
from benchmarks.resume.ours import Loader


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_whatever_is_killed_and_restored_our_samples_are_those_of_a_run_that_nobody_stopped(count):
    found = run_histories(Loader, "all", count, strict=True)
    assert sum(start["restored"] for history in found for start in history["starts"]) > count
