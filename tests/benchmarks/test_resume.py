"""Our data resumes exactly in histories that hypothesis invents; other loaders are compared by benchmarks.resume."""

from collections import Counter

import pytest

from benchmarks.resume.machine import run_histories, uninterrupted
from benchmarks.resume.ours import Loader


def test_with_new_shards_every_sample_comes_once_an_epoch():
    steps = uninterrupted(Loader, 1, 0, ((1, "write", (4,)),), 9)  # of 24: the second one holds the end of an epoch
    keys = [key for step in steps for key in (sample.partition(":")[0] for sample in step) if key[:5] != "text-"]
    old, first, second = keys[:40], keys[40:90], keys[90:140]
    assert {*Counter(old).values()} == {*Counter(first).values()} == {1}
    assert {*old} < {*first} == {*second}
    assert first != second


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_what_was_killed_and_restored_goes_on_with_the_samples_of_a_run_that_nobody_stopped(count):
    """On other ranks and workers, with new shards and withdrawn samples; the masks and boxes are the same, too."""
    found = run_histories(Loader, "all", count, strict=True)
    assert sum(start["restored"] for history in found for start in history["starts"]) >= count
