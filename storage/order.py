"""The order in which a run sees its samples: a pure function of (seed, epoch), whatever the ranks and workers."""

import functools

import numpy as np


@functools.lru_cache  # a batch asks for the same few as the batch before
def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained): ours, so that no library's random stream decides an order."""
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
    """uint64 []: faster beside an array of a few hundred than a scalar, which numpy makes an array of at every call."""
    return np.array(value, np.uint64)


_STEP, _FIRST, _SECOND = map(_number, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31 = map(_number, (30, 27, 31))


def _splitmix(x: np.ndarray) -> np.ndarray:
    """One step of splitmix64 at every element of a uint64 array; it wraps round on purpose."""
    x = x + _STEP
    x ^= x >> _30
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


def shuffled(
    places: np.ndarray, seed: int, stream: int, epoch: int, n: int, chunk: int = 1, begins: int = 0
) -> np.ndarray:
    """Which of n questions stand at `places` of epoch `epoch`: int64, a permutation of 0..n-1 over all n places.

    Computed place by place (a Feistel network, walked until it falls below n), so that an epoch of any length needs
    neither memory nor time before its first batch.

    chunk      so many neighbours stand together, and whole chunks are shuffled; each epoch cuts elsewhere
    begins     samples that all epochs before took: chunks begin where the number of all samples taken so far is a
               multiple of `chunk`, so that batches of such a size cut none; what is left over stands at both ends
    """
    if chunk == 1:
        return _permuted(places, seed, stream, epoch, n)
    places = places.astype(np.int64)
    head = min(n, -begins % chunk)
    chunks = (n - head) // chunk
    number, within = np.divmod(places - head, chunk)
    whole = (number >= 0) & (number < chunks)
    # Places in a line of all questions, whole chunks first; those before and behind the chunks take what follows.
    line = np.where(places < head, places + chunks * chunk, places)
    line[whole] = _permuted(number[whole], seed, stream, epoch, chunks) * chunk + within[whole]
    return (line + mix(seed, stream, epoch, chunk) % n) % n


def _permuted(places: np.ndarray, seed: int, stream: int, epoch: int, n: int) -> np.ndarray:
    """A number below n for each place below n, no two the same."""
    half = max(1, -(-(n - 1).bit_length() // 2))  # bits in each half of a number
    bits, low = _number(half), _number(2**half - 1)
    keys = [_number(mix(seed, stream, epoch, number)) for number in range(4)]
    result = places.astype(np.uint64)
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
    """(epoch, question) of the `count` samples after the first `consumed` ones; an epoch may end in between."""
    taken = []
    for epoch in range(consumed // n, -(-(consumed + count) // n)):
        places = np.arange(max(0, consumed - epoch * n), min(n, consumed + count - epoch * n))
        taken += [(epoch, number) for number in shuffled(places, seed, stream, epoch, n).tolist()]
    return taken
