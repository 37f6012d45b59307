"""Our data resumes exactly in histories that hypothesis invents; other loaders are compared by benchmarks.resume."""

import pytest

from benchmarks.resume.machine import run_histories
from benchmarks.resume.ours import Loader


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_what_was_killed_and_restored_goes_on_with_the_samples_of_a_run_that_nobody_stopped(count):
    """On other ranks and workers, with new shards and withdrawn samples; the masks and boxes are the same, too."""
    found = run_histories(Loader, "all", count, strict=True)
    assert sum(start["restored"] for history in found for start in history["starts"]) >= count
