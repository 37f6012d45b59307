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


def positions_of(
    numbers: np.ndarray, seed: int, stream: int, epoch: int, n: int, chunk: int = 1, begins: int = 0
) -> np.ndarray:
    """At which positions of epoch `epoch` these of its n examples are, int64: the inverse of `shuffled`."""
    if chunk == 1:
        return _unpermuted(numbers, seed, stream, epoch, n)
    head = min(n, -begins % chunk)
    chunks = (n - head) // chunk
    line = (numbers.astype(np.int64) - mix(seed, stream, epoch, chunk) % n) % n
    positions = np.where(line < chunks * chunk + head, line - chunks * chunk, line)  # of what is before or after chunks
    whole = line < chunks * chunk
    number, within = np.divmod(line[whole], chunk)
    positions[whole] = head + _unpermuted(number, seed, stream, epoch, chunks) * chunk + within
    return positions


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


def _unpermuted(numbers: np.ndarray, seed: int, stream: int, epoch: int, n: int) -> np.ndarray:
    """The inverse of _permuted: each round of the network undone, the last one first."""
    half = max(1, -(-(n - 1).bit_length() // 2))
    bits, low = _number(half), _number(2**half - 1)
    keys = [_number(mix(seed, stream, epoch, number)) for number in reversed(range(4))]
    result = numbers.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        left, right = result[outside] >> bits, result[outside] & low
        for key in keys:
            mixed = _splitmix(left ^ key)
            mixed &= low
            mixed ^= right
            left, right = mixed, left
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


def slots_of(draws: np.ndarray, number: int, weights: Sequence[float]) -> np.ndarray:
    """Which slots these draws of sequence `number` take, int64, counted from 0: the inverse of `interleaved`."""
    shares = np.array(weights, np.float64) / sum(weights)
    times, slots = (draws + 0.5) / shares[number], draws.astype(np.int64)
    for other, share in enumerate(shares):
        if other == number:
            continue
        # How many draws of the other sequence come before: about this many, so the next few are compared.
        count = np.maximum(0, np.floor(times * share + 0.5).astype(np.int64) - 2)
        theirs = (count[:, None] + np.arange(5) + 0.5) / share
        before = theirs < times[:, None] if other > number else theirs <= times[:, None]
        slots = slots + count + before.sum(axis=1)
    return slots


def draws_in(slots: int, weights: Sequence[float]) -> list[int]:
    """How many draws of each sequence are among the first `slots` slots."""
    found = []
    for number, weight in enumerate(weights):
        near = max(0, int(slots * (weight / sum(weights))) - len(weights) - 2)
        draws = np.arange(near, near + 2 * len(weights) + 5)
        found.append(near + int((slots_of(draws, number, weights) < slots).sum()))
    return found
