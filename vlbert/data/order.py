"""The example of each slot of a run: a pure function of (seed, weights, snapshots), for any ranks and workers.

The slots of a run are numbered across all epochs. storage.order.interleaved gives the dataset of a slot and its sample
number in that dataset. The dataset's spans give the snapshot and the epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from storage.order import mix, shuffled

CAPTIONS, TEXT, VALIDATION = 0, 1, 2  # independent streams of random numbers; samples.SAMPLING is the fourth


@dataclass(frozen=True)
class SnapshotSpan:
    """A run of epochs of a dataset over one snapshot.

    Attributes:
        epoch: number of the first epoch.
        consumed: number of samples of the dataset before that epoch.
        examples: number of examples per epoch.
        snapshot: id of the snapshot.
    """

    epoch: int
    consumed: int
    examples: int
    snapshot: str

    def boundary(self, start: int, stop: int, distance: int) -> int | None:
        """Return the first sample from `start` to `stop` at which new shards may enter, or None.

        It begins an epoch. Such samples are whole epochs, and at least `distance` samples, apart.
        """
        period = self.examples * -(-distance // self.examples)
        first = self.consumed + max(1, -(-(start - self.consumed) // period)) * period
        return first if first < stop else None

    def followed_by(self, examples: int, snapshot: str, boundary: int) -> "SnapshotSpan":
        """Return the span over another snapshot from `boundary` on, the first sample of an epoch of this span."""
        epochs, rest = divmod(boundary - self.consumed, self.examples)
        assert rest == 0, f"sample {boundary} is not the first of an epoch of {self}"
        return SnapshotSpan(self.epoch + epochs, boundary, examples, snapshot)


def draw_samples(
    spans: Sequence[SnapshotSpan], consumed: int, count: int, seed: int, chunk: int = 1
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the `count` examples of a dataset after `consumed` ones, by epoch: (index in `spans`, epoch, int64 [n]).

    `chunk` is as in storage.order.shuffled.
    """
    assert consumed >= spans[0].consumed, f"sample {consumed} is before {spans[0]}"
    stop = consumed + count
    for index, (span, end) in enumerate(zip(spans, [span.consumed for span in spans[1:]] + [stop], strict=True)):
        first, n = max(consumed, span.consumed), span.examples
        for epoch in range((first - span.consumed) // n, -(-(min(stop, end) - span.consumed) // n)):
            begins = span.consumed + epoch * n
            positions = np.arange(max(0, first - begins), min(n, min(stop, end) - begins))
            yield (
                index,
                span.epoch + epoch,
                shuffled(positions, seed, CAPTIONS, span.epoch + epoch, n, chunk, begins),
            )


def seed_of(seed: int, number: int) -> int:
    """Return the seed of dataset `number`. With one seed, datasets of equal size would be shuffled alike."""
    return mix(seed, number) if number else seed
