"""Which example each slot of a run is: a pure function of (seed, weights, snapshots), whatever the ranks and workers.

The slots of a run are numbered through all epochs. storage.order.interleaved says which dataset a slot
belongs to, and which draw of that dataset it is; the dataset's spans say over which snapshot, and in which epoch.
"""

from collections.abc import Sequence
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


def drawn(
    spans: Sequence[SnapshotSpan], consumed: int, count: int, seed: int, chunk: int = 1
) -> list[tuple[int, int, int]]:
    """Of one dataset the `count` samples after the first `consumed` ones, as (index in `spans`, epoch, question); chunk
    as in storage.order.shuffled."""
    ends = [span.consumed for span in spans[1:]] + [consumed + count]
    found = []
    for index, (span, end) in enumerate(zip(spans, ends, strict=True)):
        n, samples = span.examples, np.arange(max(consumed, span.consumed), min(consumed + count, end))
        epochs, positions = np.divmod(samples - span.consumed, n)
        for epoch in np.unique(epochs).tolist():
            begins = span.consumed + epoch * n
            numbers = shuffled(positions[epochs == epoch], seed, CAPTIONS, span.epoch + epoch, n, chunk, begins)
            found += [(index, span.epoch + epoch, number) for number in numbers.tolist()]
    assert len(found) == count, f"samples {consumed} to {consumed + count} lie before {spans[0]}"
    return found


def seed_of(seed: int, number: int) -> int:
    """The seed of dataset `number` of a run with this seed. Each has its own: two of one size would else be shuffled
    alike, and example i of the one always stand beside example i of the other."""
    return mix(seed, number) if number else seed
