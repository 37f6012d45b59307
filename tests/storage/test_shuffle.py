"""Chunked order: neighbours stay together, and an epoch is still a permutation. (The rest is in test_data.py.)"""

import itertools
from collections import Counter

import numpy as np
import pytest

from storage.shuffle import shuffled
from vlbert.data.loading import CAPTIONS, SnapshotSpan, drawn

SEED, STREAM = 5, CAPTIONS


def epoch_of(epoch: int, n: int, chunk: int, begins: int = 0, seed: int = SEED, stream: int = STREAM) -> list[int]:
    return shuffled(np.arange(n), seed, stream, epoch, n, chunk, begins).tolist()


def taken_of(n: int, consumed: int, count: int) -> list[tuple[int, int]]:
    """(epoch, sample) as a training over n samples takes them, in chunks of 8."""
    return [(epoch, number) for _, epoch, number in drawn([SnapshotSpan(0, 0, n, "")], consumed, count, SEED, chunk=8)]


def cuts(order: list[int], n: int) -> list[int]:
    """Places at which the next sample is not the neighbour (the first one follows the last)."""
    return [place for place in range(1, len(order)) if order[place] != (order[place - 1] + 1) % n]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 1025])
@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 64, 2000])
def test_an_epoch_in_chunks_is_a_permutation_wherever_it_begins(n, chunk):
    for epoch, begins in ((0, 0), (1, n), (2, 2 * n), (3, 12_345)):
        assert sorted(epoch_of(epoch, n, chunk, begins)) == list(range(n))


@pytest.mark.parametrize("n", [64, 65, 71, 1000])
def test_chunks_begin_at_multiples_of_their_size_through_all_epochs(n):
    for epoch in range(10):
        order = epoch_of(epoch, n, 8, begins=epoch * n)
        assert all((epoch * n + place) % 8 == 0 for place in cuts(order, n))


def test_batches_of_whole_chunks_cut_none_but_at_the_border_of_an_epoch():
    n, requests = 1001, []
    for step in range(100):
        taken = taken_of(n, step * 32, 32)
        runs = 1 + sum(after != (before[0], (before[1] + 1) % n) for before, after in itertools.pairwise(taken))
        requests.append(runs)
    borders = {epoch * n // 32 for epoch in range(1, 4)}
    assert all(runs <= 4 for step, runs in enumerate(requests) if step not in borders)
    assert all(runs <= 6 for runs in requests)


def test_samples_over_several_epochs_are_taken_once_an_epoch_by_steps_of_any_size():
    n = 101
    for step in (1, 7, 8, 101, 250):
        taken = [pair for start in range(0, 1010, step) for pair in taken_of(n, start, step)][:1010]
        assert taken == taken_of(n, 0, 1010)
        assert Counter(taken) == Counter((epoch, number) for epoch in range(10) for number in range(n))


def test_an_epoch_that_begins_within_a_chunk_cuts_at_the_next_multiple():
    for begins in range(8):
        order = epoch_of(0, 1000, 8, begins)
        assert {(begins + place) % 8 for place in cuts(order, 1000)} == {0}


def test_whole_chunks_are_shuffled_and_every_epoch_cuts_elsewhere():
    n, chunk = 4096, 8
    firsts, orders = [], []
    for epoch in range(20):
        order = epoch_of(epoch, n, chunk, begins=epoch * n)
        orders.append(tuple(order))
        firsts.append(order[0] % chunk)
        chunks = np.array(order[::chunk])
        assert abs(np.corrcoef(chunks[1:], chunks[:-1])[0, 1]) < 0.2
        assert abs(np.corrcoef(chunks, np.arange(len(chunks)))[0, 1]) < 0.2
    assert len(set(orders)) == 20
    assert len(set(firsts)) >= 6, "chunks are cut at the same samples in every epoch"
    assert epoch_of(0, n, chunk) != epoch_of(0, n, chunk, seed=6)
    assert epoch_of(0, n, chunk) != epoch_of(0, n, chunk, stream=1)


def test_every_sample_is_left_over_in_some_epoch_and_none_in_most():
    """25 samples in chunks of 8: one stands alone, and over the epochs it is another one."""
    alone = Counter(epoch_of(epoch, 25, 8)[-1] for epoch in range(2000))
    assert set(alone) == set(range(25))
    assert max(alone.values()) < 2 * 2000 / 25


def test_chunks_of_one_are_the_full_shuffle():
    assert epoch_of(3, 1000, 1, begins=77) == shuffled(np.arange(1000), SEED, STREAM, 3, 1000).tolist()


def test_chunked_order_stays_what_it_is():
    # Part of the contract with old checkpoints: the same on every machine, for ever.
    assert epoch_of(1, 22, 4, begins=22) == GOLDEN


GOLDEN = [11, 12, 17, 18, 19, 20, 13, 14, 15, 16, 3, 4, 5, 6, 21, 0, 1, 2, 7, 8, 9, 10]
