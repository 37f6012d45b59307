"""Our data resumes exactly in histories that hypothesis invents; other loaders are compared by benchmarks.resume."""

from collections import Counter

import pytest

from benchmarks.resume.machine import CHANGES, run_histories, uninterrupted
from benchmarks.resume.ours import Loader


def test_with_new_shards_every_sample_comes_once_an_epoch():
    steps = uninterrupted(Loader, 1, 0, ((1, "add", 1),), 6)  # of 12: the second one holds the end of an epoch
    keys = [sample.partition(":")[0] for step in steps for sample in step]
    old, first, second = keys[:13], keys[13:39], keys[39:65]
    assert {*Counter(old).values()} == {*Counter(first).values()} == {*Counter(second).values()} == {1}
    assert {*old} < {*first} == {*second}
    assert first != second


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_what_was_killed_and_restored_goes_on_with_the_samples_of_a_run_that_nobody_stopped(count):
    """On other ranks and workers, with new shards and withdrawn samples; the masked words are the same, too."""
    for history in run_histories(Loader, CHANGES, count):
        assert history["exact"], history
