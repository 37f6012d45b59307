"""The order in which a run sees its samples: a pure function of (seed, epoch), whatever the ranks and workers."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np


@functools.lru_cache  # each batch needs the same few
def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained). No library's random stream decides an order."""
    state = 0
    for number in numbers:
        state = _mixed(state ^ _mixed(number % 2**64))
    return state


_64_BITS = 2**64 - 1


def _mixed(x: Any) -> Any:
    """One step of splitmix64, of an int or of each element of a uint64 array."""
    x = (x + 0x9E3779B97F4A7C15) & _64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return x ^ (x >> 31)


def shuffled(
    positions: np.ndarray, seed: int, stream: int, epoch: int, n: int, chunk: int = 1, begins: int = 0
) -> np.ndarray:
    """Which of n examples are at `positions` of epoch `epoch`: int64, a permutation of 0..n-1 over all n positions.

    Each position is computed alone (a Feistel network, repeated until the number is below n), so that an epoch of any
    length needs neither memory nor time before its first batch.

    chunk      neighbours that stay together: whole chunks are shuffled, and each epoch cuts them elsewhere
    begins     samples of all earlier epochs. Chunks begin at multiples of `chunk` of all samples so far, so that
               batches of that size hold whole chunks. The rest is at both ends of the epoch.
    """
    if chunk == 1:
        return _permuted(positions, seed, stream, epoch, n)
    positions = positions.astype(np.int64)
    head = min(n, -begins % chunk)
    chunks = (n - head) // chunk
    number, within = np.divmod(positions - head, chunk)
    whole = (number >= 0) & (number < chunks)
    # Positions in a line of all examples: whole chunks first, then what is before and after them.
    line = np.where(positions < head, positions + chunks * chunk, positions)
    line[whole] = _permuted(number[whole], seed, stream, epoch, chunks) * chunk + within[whole]
    return (line + mix(seed, stream, epoch, chunk) % n) % n


@functools.lru_cache(8)  # an epoch's batches need the same tables
def _tables(seed: int, stream: int, epoch: int, half: int) -> tuple[np.ndarray, ...]:
    """The round functions of the Feistel network: for each round an int64 [2**half], numbers below 2**half."""
    inputs = np.arange(2**half, dtype=np.uint64)
    tables = tuple(_mixed(inputs ^ np.uint64(mix(seed, stream, epoch, number))) for number in range(4))
    return tuple((table & np.uint64(2**half - 1)).astype(np.int64) for table in tables)


def _permuted(positions: np.ndarray, seed: int, stream: int, epoch: int, n: int) -> np.ndarray:
    """A number below n for each position below n, no two the same."""
    half = max(1, -(-(n - 1).bit_length() // 2))  # bits in each half of a number
    tables, low = _tables(seed, stream, epoch, half), 2**half - 1
    result = positions.astype(np.int64)
    outside = np.arange(len(result))
    while len(outside):
        numbers = result[outside]
        left, right = numbers >> half, numbers & low
        for table in tables:
            left, right = right, left ^ table[right]
        left <<= half
        left |= right
        result[outside] = left
        outside = outside[left >= n]
    return result


def samples_after(consumed: int, count: int, seed: int, stream: int, n: int) -> list[tuple[int, int]]:
    """(epoch, example) of the `count` samples after the first `consumed` ones; they may be of several epochs."""
    taken = []
    for epoch in range(consumed // n, -(-(consumed + count) // n)):
        positions = np.arange(max(0, consumed - epoch * n), min(n, consumed + count - epoch * n))
        taken += [(epoch, number) for number in shuffled(positions, seed, stream, epoch, n).tolist()]
    return taken


def interleaved(consumed: int, count: int, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Several sequences as one: for each of the `count` slots after the first `consumed` ones, the number of the
    sequence that it takes, and which draw of that sequence it is. Two int64 [count].

    Draw k of a sequence with the share s of all weights is due at time (k + 1/2) / s, and slots are in the order of
    these times, as Sainte-Laguë's rule deals out seats. Of equal times the earlier sequence comes first. So after any
    number of slots each sequence has had its share of them, to about half the number of sequences. Where the weights
    are the sequences' lengths, their epochs end together.

    Any window is computed alone. weights: positive.
    """
    if len(weights) == 1:
        return np.zeros(count, np.int64), np.arange(consumed, consumed + count)
    shares = np.array(weights, np.float64) / sum(weights)
    # Up to time t at most t * s + 1/2 draws of a sequence are due, together t and half a slot a sequence. So those due
    # by this time are among the first `consumed` slots. Start one draw
    # earlier in each sequence, in case a time was rounded up.
    time = max(0.0, consumed - len(shares) / 2)
    before = np.maximum(0, np.floor(time * shares + 0.5).astype(np.int64) - 1)
    first = consumed - int(before.sum())  # of the window's slots, among the draws that are compared
    draws = before[:, None] + np.arange(first + count)
    order = np.argsort((draws + 0.5) / shares[:, None], axis=None, kind="stable")[first : first + count]
    return order // draws.shape[1], draws.ravel()[order]
