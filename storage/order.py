"""The order in which a run sees its samples: a pure function of (seed, epoch), whatever the ranks and workers."""

import numpy as np


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained): ours, so that no library's random stream decides an order."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = _splitmix(state ^ _splitmix(np.array([number % 2**64], np.uint64)))
    return int(state[0])


def _splitmix(x: np.ndarray) -> np.ndarray:
    """One step of splitmix64 at every element of a uint64 array; it wraps round on purpose."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(places: np.ndarray, seed: int, stream: int, epoch: int, n: int) -> np.ndarray:
    """Which of n questions stand at `places` of epoch `epoch`: int64, a permutation of 0..n-1 over all n places.

    Computed place by place (a Feistel network, walked until it falls below n), so that an epoch of any length needs
    neither memory nor time before its first batch.
    """
    half = max(1, -(-(n - 1).bit_length() // 2))  # bits in each half of a number
    low = np.uint64(2**half - 1)
    keys = [np.uint64(mix(seed, stream, epoch, number)) for number in range(4)]
    result = places.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half), result[outside] & low
        for key in keys:
            left, right = right, left ^ (_splitmix(right ^ key) & low)
        result[outside] = (left << np.uint64(half)) | right
        outside = result >= n
    return result.astype(np.int64)


def take(consumed: int, count: int, seed: int, stream: int, n: int) -> list[tuple[int, int]]:
    """(epoch, question) of the `count` samples after the first `consumed` ones; an epoch may end in between."""
    epochs, places = np.divmod(np.arange(consumed, consumed + count), n)
    numbers = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        numbers[epochs == epoch] = shuffled(places[epochs == epoch], seed, stream, int(epoch), n)
    return list(zip(epochs.tolist(), numbers.tolist(), strict=True))
