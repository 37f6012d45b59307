"""The samples of a snapshot by number, read singly through the byte-offset index: what training reads through."""

import functools

import numpy as np

from storage.catalog import ShardIndex
from storage.objects import Objects
from storage.sample import Sample
from storage.shards import read_span


class ShardSamples:
    """The samples of committed shards, read singly through the byte-offset index (pread, or a range request on S3)."""

    def __init__(self, objects: Objects, index: ShardIndex):
        self.objects, self.index = objects, index
        self._check_sizes()

    @functools.cached_property
    def urls(self) -> list[str]:
        """The URL of every sample; long at full size, so only tasks that need it ask."""
        return self.index.urls()

    def __len__(self) -> int:
        return len(self.index)

    def sample(self, number: int) -> Sample:
        index = self.index
        tar, offset, length = index.tars[index.shard[number]], int(index.offset[number]), int(index.length[number])
        data = self.objects.get_range(tar, offset, length)
        return read_span(data, name=f"{self.objects.where(tar)} at byte {offset}")

    def _check_sizes(self) -> None:
        """One listing tells now, not at hour 9, that a tar is gone or torn."""
        ends = np.zeros(len(self.index.tars), np.int64)
        np.maximum.at(ends, self.index.shard, self.index.offset + self.index.length)
        folders = {tar.rpartition("/")[0] for tar in self.index.tars}
        sizes = {info.path: info.size for folder in sorted(folders) for info in self.objects.list(f"{folder}/")}
        for tar, end in zip(self.index.tars, ends.tolist(), strict=True):
            if sizes.get(tar, 0) < end:
                raise ValueError(
                    f"{self.objects.where(tar)} has {sizes.get(tar, 0)} bytes, its manifest needs {end}: it is torn or "
                    f"gone; delete the manifest {tar.rpartition('-')[0]}.parquet and run its stage again"
                )
