"""The order of a run's examples. It does not depend on the number of ranks and workers.

A run is a sequence of slots for one example each, numbered across all epochs. storage.order.interleaved maps each slot
to a draw from a dataset. Draw k is the k-th example that the run takes from the dataset, counted from 0. The dataset's
spans map a draw to a snapshot and an epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from storage.order import mix, shuffled

CAPTIONS, TEXT, VALIDATION = 0, 1, 2  # independent streams of random numbers; the fourth is samples.SAMPLING


@dataclass(frozen=True)
class SnapshotSpan:
    """Consecutive epochs of a dataset that read the same snapshot.

    Attributes:
        epoch: number of the first epoch.
        consumed: number of the dataset's draws before that epoch.
        examples: number of examples per epoch.
        snapshot: id of the snapshot.
    """

    epoch: int
    consumed: int
    examples: int
    snapshot: str

    def boundary(self, start: int, stop: int, distance: int) -> int | None:
        """Return the first draw from `start` to `stop` - 1 at which the next span may begin, or None.

        This span may end after k, 2k, ... epochs. k is the smallest number of epochs with at least `distance` draws.
        """
        period = self.examples * -(-distance // self.examples)
        first = self.consumed + max(1, -(-(start - self.consumed) // period)) * period
        return first if first < stop else None

    def followed_by(self, examples: int, snapshot: str, boundary: int) -> "SnapshotSpan":
        """Return the next span, for `snapshot`. It begins at draw `boundary`, which must be the first of an epoch."""
        epochs, rest = divmod(boundary - self.consumed, self.examples)
        assert rest == 0, f"draw {boundary} is not the first of an epoch of {self}"
        return SnapshotSpan(self.epoch + epochs, boundary, examples, snapshot)


def draw_samples(
    spans: Sequence[SnapshotSpan], consumed: int, count: int, seed: int, chunk: int = 1
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the examples at the draws `consumed` to `consumed + count - 1` of a dataset, in training order.

    There is one tuple per epoch: (index in `spans`, epoch, example indices as int64 [n]). `chunk` is explained in
    storage.order.shuffled.
    """
    assert consumed >= spans[0].consumed, f"draw {consumed} is before {spans[0]}"
    stop = consumed + count
    for index, (span, end) in enumerate(zip(spans, [span.consumed for span in spans[1:]] + [stop], strict=True)):
        first, n = max(consumed, span.consumed), span.examples
        for epoch in range((first - span.consumed) // n, -(-(min(stop, end) - span.consumed) // n)):
            begins = span.consumed + epoch * n
            positions = np.arange(max(0, first - begins), min(n, min(stop, end) - begins))
            number = span.epoch + epoch
            yield index, number, shuffled(positions, seed, CAPTIONS, number, n, chunk, begins)


def seed_of(seed: int, number: int) -> int:
    """Return a separate seed for dataset `number`. Equal seeds would give datasets of equal size the same order."""
    return mix(seed, number) if number else seed
