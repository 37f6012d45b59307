"""The order of a run's examples: a pure function of (seed, weights, snapshots), for any number of ranks and workers.

The slots of a run, one per example, are numbered across all epochs. storage.order.interleaved maps a slot to a dataset
and a sample number in it. The dataset's spans map the sample number to a snapshot and an epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from storage.order import mix, shuffled

CAPTIONS, TEXT, VALIDATION = 0, 1, 2  # independent streams of random numbers; the fourth is samples.SAMPLING


@dataclass(frozen=True)
class SnapshotSpan:
    """Successive epochs of a dataset that read the same snapshot.

    Attributes:
        epoch: number of the first epoch.
        consumed: number of the dataset's samples that the run used before that epoch.
        examples: number of examples per epoch.
        snapshot: id of the snapshot.
    """

    epoch: int
    consumed: int
    examples: int
    snapshot: str

    def boundary(self, start: int, stop: int, distance: int) -> int | None:
        """Return the first of the samples `start` to `stop` - 1 at which another snapshot may begin, or None.

        Such samples begin an epoch and are at least `distance` samples apart, counted from the span's first sample.
        """
        period = self.examples * -(-distance // self.examples)
        first = self.consumed + max(1, -(-(start - self.consumed) // period)) * period
        return first if first < stop else None

    def followed_by(self, examples: int, snapshot: str, boundary: int) -> "SnapshotSpan":
        """Return the next span, which reads `snapshot` from sample `boundary` on. An epoch must begin there."""
        epochs, rest = divmod(boundary - self.consumed, self.examples)
        assert rest == 0, f"sample {boundary} is not the first of an epoch of {self}"
        return SnapshotSpan(self.epoch + epochs, boundary, examples, snapshot)


def draw_samples(
    spans: Sequence[SnapshotSpan], consumed: int, count: int, seed: int, chunk: int = 1
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (index in `spans`, epoch, indices of examples, int64 [n]) per epoch, in the order of training.

    These are the `count` samples of a dataset after the first `consumed` ones. `chunk`: see storage.order.shuffled.
    """
    assert consumed >= spans[0].consumed, f"sample {consumed} is before {spans[0]}"
    stop = consumed + count
    for index, (span, end) in enumerate(zip(spans, [span.consumed for span in spans[1:]] + [stop], strict=True)):
        first, n = max(consumed, span.consumed), span.examples
        for epoch in range((first - span.consumed) // n, -(-(min(stop, end) - span.consumed) // n)):
            begins = span.consumed + epoch * n
            positions = np.arange(max(0, first - begins), min(n, min(stop, end) - begins))
            number = span.epoch + epoch
            yield index, number, shuffled(positions, seed, CAPTIONS, number, n, chunk, begins)


def seed_of(seed: int, number: int) -> int:
    """Return a different seed for each dataset. With the same seed, datasets of equal size would be shuffled alike."""
    return mix(seed, number) if number else seed
