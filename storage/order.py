"""The order in which a run reads its samples: a pure function of (seed, epoch), independent of ranks and workers."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np


@functools.lru_cache  # all batches need the same few hashes
def mix(*numbers: int) -> int:
    """Return a 64-bit hash of integers (chained splitmix64). The hash does not depend on library versions."""
    state = 0
    for number in numbers:
        state = _splitmix64(state ^ _splitmix64(number % 2**64))
    return state


_64_BITS = 2**64 - 1


def _splitmix64(x: Any) -> Any:
    """Apply one step of splitmix64 to an int or to each element of a uint64 array."""
    x = (x + 0x9E3779B97F4A7C15) & _64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return x ^ (x >> 31)


def shuffled(
    positions: np.ndarray, seed: int, stream: int, epoch: int, n: int, chunk: int = 1, begins: int = 0
) -> np.ndarray:
    """Return the indices of the examples at the given positions of a shuffled epoch, int64 [P].

    For all n positions together, the result is a permutation of 0..n-1. Each position is computed independently, by a
    Feistel network that is repeated until the index is below n. So even a long epoch needs no memory and no setup time.

    Args:
        positions: positions in the epoch, int [P]
        stream: number that distinguishes independent orders with the same seed
        n: number of examples in an epoch
        chunk: number of neighbouring examples that stay together. The examples are divided into chunks at different
            places in each epoch, and the order of the chunks is shuffled.
        begins: number of examples in all earlier epochs. Chunks start at multiples of `chunk` in the sequence of all
            epochs, so that a batch of `chunk` examples is one chunk. An epoch may start and end with a shorter chunk.
    """
    if chunk == 1:
        return _permute(positions, seed, stream, epoch, n)
    positions = positions.astype(np.int64)
    head = min(n, -begins % chunk)
    chunks = (n - head) // chunk
    number, within = np.divmod(positions - head, chunk)
    whole = (number >= 0) & (number < chunks)
    # Positions in a list of all examples: first the whole chunks, then the examples before and after them.
    line = np.where(positions < head, positions + chunks * chunk, positions)
    line[whole] = _permute(number[whole], seed, stream, epoch, chunks) * chunk + within[whole]
    return (line + mix(seed, stream, epoch, chunk) % n) % n


@functools.lru_cache(8)  # all batches of an epoch need the same tables
def _feistel_tables(seed: int, stream: int, epoch: int, half: int) -> tuple[np.ndarray, ...]:
    """Return a table for each round of the Feistel network: int64 [2**half], with values below 2**half."""
    inputs = np.arange(2**half, dtype=np.uint64)
    tables = tuple(_splitmix64(inputs ^ np.uint64(mix(seed, stream, epoch, number))) for number in range(4))
    return tuple((table & np.uint64(2**half - 1)).astype(np.int64) for table in tables)


def _permute(positions: np.ndarray, seed: int, stream: int, epoch: int, n: int) -> np.ndarray:
    """Return the values at `positions` of a pseudo-random permutation of 0..n-1, as int64."""
    half = max(1, -(-(n - 1).bit_length() // 2))  # bits in each half of a number
    tables, low = _feistel_tables(seed, stream, epoch, half), 2**half - 1
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
    """Return (epoch, example index) of the `count` samples after the first `consumed`, with `n` samples per epoch."""
    samples = []
    for epoch in range(consumed // n, -(-(consumed + count) // n)):
        positions = np.arange(max(0, consumed - epoch * n), min(n, consumed + count - epoch * n))
        samples += [(epoch, number) for number in shuffled(positions, seed, stream, epoch, n).tolist()]
    return samples


def interleaved(consumed: int, count: int, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Interleave draws from several sequences, in proportion to the weights of the sequences.

    Only the `count` draws after the first `consumed` draws are computed and returned.

    If a sequence has the share s of the total weight, its draw k is due at time (k + 1/2) / s. Draws are sorted by
    these times (Sainte-Laguë's method), and for equal times by the index of the sequence. So after any number of draws,
    each sequence has received its share, to within about half the number of sequences. If the weights are the lengths
    of the sequences, their epochs end together.

    Returns:
        Two int64 arrays [count]: the index of each draw's sequence, and the index of the draw within that sequence.
    """
    shares = np.array(weights, np.float64) / sum(weights)
    # Up to time t, at most t * s + 1/2 draws of a sequence are due, in total t plus half a draw per sequence. So the
    # draws due by this time are among the first `consumed` ones. Start one draw earlier in each sequence, in case a
    # time was rounded up.
    time = max(0.0, consumed - len(shares) / 2)
    before = np.maximum(0, np.floor(time * shares + 0.5).astype(np.int64) - 1)
    first = consumed - int(before.sum())  # position of the first returned draw among the sorted draws
    draws = before[:, None] + np.arange(first + count)
    order = np.argsort((draws + 0.5) / shares[:, None], axis=None, kind="stable")[first : first + count]
    return order // draws.shape[1], draws.ravel()[order]
