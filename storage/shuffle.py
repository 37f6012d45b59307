"""The order in which a run sees its samples: a pure function of (seed, epoch), whatever the ranks and workers."""

import functools
from collections.abc import Sequence

import numpy as np


@functools.lru_cache  # each batch needs the same few
def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained). No library's random stream decides an order."""
    state = 0
    for number in numbers:
        state = _mixed(state ^ _mixed(number % 2**64))
    return state


def _mixed(x: int) -> int:
    """_splitmix of a single number, ten times faster than an array of one."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def _number(value: int) -> np.ndarray:
    """uint64 []: with small arrays this is faster than a scalar, which numpy converts at every call."""
    return np.array(value, np.uint64)


_STEP, _FIRST, _SECOND = map(_number, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31 = map(_number, (30, 27, 31))


def _splitmix(x: np.ndarray) -> np.ndarray:
    """One step of splitmix64 at every element of a uint64 array; overflow is intended."""
    x = x + _STEP
    x ^= x >> _30
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


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


def _permuted(positions: np.ndarray, seed: int, stream: int, epoch: int, n: int) -> np.ndarray:
    """A number below n for each position below n, no two the same."""
    half = max(1, -(-(n - 1).bit_length() // 2))  # bits in each half of a number
    bits, low = _number(half), _number(2**half - 1)
    keys = [_number(mix(seed, stream, epoch, number)) for number in range(4)]
    result = positions.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        numbers = result[outside]
        left, right = numbers >> bits, numbers & low
        for key in keys:
            mixed = _splitmix(right ^ key)
            mixed &= low
            mixed ^= left
            left, right = right, mixed
        left <<= bits
        left |= right
        result[outside] = left
        outside = outside[left >= n]
    return result.astype(np.int64)


def take(consumed: int, count: int, seed: int, stream: int, n: int) -> list[tuple[int, int]]:
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
