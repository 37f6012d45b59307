"""storage.order: the chunked order of an epoch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage.order import interleaved, mix, shuffled
from vlbert.data.order import CAPTIONS

SEED, STREAM = 5, CAPTIONS


def epoch_of(epoch: int, n: int, chunk: int, begins: int = 0, seed: int = SEED, stream: int = STREAM) -> list[int]:
    return shuffled(np.arange(n), seed, stream, epoch, n, chunk, begins).tolist()


def cuts(order: list[int], n: int) -> list[int]:
    """Positions at which the next sample is not the neighbour (the first one follows the last)."""
    return [i for i in range(1, len(order)) if order[i] != (order[i - 1] + 1) % n]


@given(st.integers(1, 1100), st.integers(1, 70), st.integers(0, 5), st.integers(0, 20_000))
def test_every_epoch_is_a_permutation(n, chunk, epoch, begins):
    assert sorted(epoch_of(epoch, n, chunk, begins)) == list(range(n))


@given(st.integers(9, 1000), st.integers(0, 5000))
def test_chunks_begin_at_multiples_of_their_size_over_all_epochs(n, begins):
    assert all((begins + i) % 8 == 0 for i in cuts(epoch_of(1, n, 8, begins), n))


LATE = [75695481, 118507478, 33056066, 121916457, 103605055]
GOLDEN = [11, 12, 17, 18, 19, 20, 13, 14, 15, 16, 3, 4, 5, 6, 21, 0, 1, 2, 7, 8, 9, 10]


def test_the_order_of_an_epoch_never_changes():
    # Checkpoints depend on it: the same on every machine.
    assert epoch_of(1, 22, 4, begins=22) == GOLDEN
    assert epoch_of(3, 22, 1, begins=77) == shuffled(np.arange(22), SEED, STREAM, 3, 22).tolist()
    assert shuffled(np.arange(100_000_000, 100_000_005), SEED, STREAM, 7, 123_456_789).tolist() == LATE
    assert mix(1, 2, 3) == 9812528628958509896


WEIGHTS = st.lists(st.floats(0.01, 100) | st.integers(1, 50), min_size=1, max_size=6)


def slots(consumed: int, count: int, weights: list[float]) -> list[tuple[int, int]]:
    return list(zip(*(array.tolist() for array in interleaved(consumed, count, weights)), strict=True))


@given(WEIGHTS, st.integers(0, 10**12), st.integers(1, 400), st.integers(0, 400))
def test_a_window_of_the_interleaved_order_is_a_slice_of_a_larger_one(weights, consumed, count, skipped):
    whole = slots(consumed, skipped + count, weights)
    assert len(whole) == skipped + count
    assert slots(consumed + skipped, count, weights) == whole[skipped:]


@given(WEIGHTS)
def test_each_sequence_is_drawn_in_order_and_as_often_as_its_share(weights):
    whole = slots(0, 600, weights)
    for number, weight in enumerate(weights):
        draws = [(n, draw) for n, (sequence, draw) in enumerate(whole) if sequence == number]
        assert [draw for _, draw in draws] == list(range(len(draws)))
        share = weight / sum(weights)
        # Before its draw k a sequence has had k of n slots; within the first 600 it is due 600 times its share.
        assert all(abs(n * share - draw) <= len(weights) / 2 + 1 for n, draw in draws)
        assert abs(600 * share - len(draws)) <= len(weights) / 2 + 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 10**6))
def test_weights_that_are_lengths_end_all_epochs_together(lengths, epoch):
    """As slots: an epoch of all has each draw of each sequence's epoch."""
    whole = slots(epoch * sum(lengths), sum(lengths), lengths)
    expected = [(number, epoch * n + draw) for number, n in enumerate(lengths) for draw in range(n)]
    assert sorted(whole) == expected


def test_the_interleaved_order_never_changes():
    # Checkpoints depend on it.
    assert "".join("ab"[sequence] for sequence, _ in slots(0, 19, [3.0, 0.8])) == "aabaaaabaaabaaaabaa"
    assert "".join("abc"[sequence] for sequence, _ in slots(0, 8, [2, 1, 1])) == "abcaabca"
