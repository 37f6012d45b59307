"""Which example each slot of a run is: a pure function of (seed, weights, snapshots), whatever the ranks and workers.

The slots of a run are numbered through all epochs. storage.order.interleaved says which dataset a slot
belongs to, and which draw of that dataset it is; the dataset's spans say over which snapshot, and in which epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from storage.order import mix, shuffled

CAPTIONS, TEXT, VALIDATION = 0, 1, 2  # streams of randomness that never meet; samples.ANYWHERE is the fourth


@dataclass(frozen=True)
class SnapshotSpan:
    """Epochs of a dataset over one snapshot.

    epoch      the first of them
    consumed   samples of the dataset before it
    examples   examples of each of these epochs
    snapshot   id
    """

    epoch: int
    consumed: int
    examples: int
    snapshot: str

    def boundary(self, start: int, stop: int, apart: int) -> int | None:
        """The first sample of an epoch at which new shards may enter, if it is one from `start` to `stop`; else None.

        Such boundaries lie at least `apart` samples apart, in whole epochs.
        """
        period = self.examples * -(-apart // self.examples)
        first = self.consumed + max(1, -(-(start - self.consumed) // period)) * period
        return first if first < stop else None

    def followed_by(self, examples: int, snapshot: str, boundary: int) -> "SnapshotSpan":
        """The span over another snapshot that begins at `boundary`, the first sample of an epoch of this one."""
        epochs, rest = divmod(boundary - self.consumed, self.examples)
        assert rest == 0, f"sample {boundary} is no boundary of an epoch of {self}"
        return SnapshotSpan(self.epoch + epochs, boundary, examples, snapshot)


def draw_samples(
    spans: Sequence[SnapshotSpan], consumed: int, count: int, seed: int, chunk: int = 1
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the `count` samples of one dataset after the first `consumed` ones, in their order and by epoch: (index in
    `spans`, epoch, int64 [questions]); chunk as in storage.order.shuffled."""
    assert consumed >= spans[0].consumed, f"sample {consumed} lies before {spans[0]}"
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
    """The seed of dataset `number` of a run with this seed. Each has its own: two of one size would else be shuffled
    alike, and example i of the one always stand beside example i of the other."""
    return mix(seed, number) if number else seed
