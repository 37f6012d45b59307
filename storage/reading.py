"""The samples of a snapshot by number, read singly through the byte-offset index: what training reads through.

From a folder, or from the tars that a cache holds, with one pread each. From a bucket with range requests, neighbours
joined and several under way at a time, so that training needs no disk.
"""

import functools
import io
import itertools
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from storage.cache import ShardCache
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable
from storage.sample import Sample
from storage.shards import read_span
from storage.snapshots import ShardIndex

_REQUESTS = 8  # under way at a time
_JOINED = 8 << 20  # bytes of one request at most, where neighbours are read together
_GAP = 64 << 10  # bytes between two samples that are rather read than asked for in a second request
_PATIENCE = 300.0  # seconds: longer than a server takes to start again
_LONGEST_PAUSE = 30.0  # seconds between two tries


class Samples(Protocol):
    """Samples by number: the shards of a snapshot, or anything like them."""

    urls: Sequence[str]

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample: ...

    def samples(self, numbers: Sequence[int]) -> list[Sample | ValueError]:
        """One per number, in their order, or why it cannot be read. Only what is wrong with a sample is such an error:
        a tar that is gone or a server out of reach is raised, and stops the run."""

    def past_cache(self, number: int) -> Sample | None:
        """The sample once more, as it was committed; None where that is what was read."""


class ShardSamples:
    """The samples of committed shards, read singly through the byte-offset index (pread, or a range request on S3).

    patience: seconds for which a read is repeated where the storage does not answer.
    """

    def __init__(
        self, store: ObjectStore, index: ShardIndex, cache: ShardCache | None = None, patience: float = _PATIENCE
    ):
        self.store, self.index, self.cache, self.patience = store, index, cache, patience
        self._where = [store.where(tar) for tar in index.tars]
        # Kept open, and shared with forked workers: pread moves no position.
        self._files: dict[int, io.FileIO] = {}
        self._most_files = min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._opening = threading.Lock()  # held while `_files` changes
        self._waits = False  # the storage does not answer, and that was said
        self._connected = 0  # the process that asked last
        self._check_sizes()
        if cache is not None:
            cache.want(index)

    @functools.cached_property
    def urls(self) -> list[str]:
        """The URL of every sample; long at full size, so only tasks that need it ask."""
        return self.index.urls()

    def __len__(self) -> int:
        return len(self.index)

    def sample(self, number: int) -> Sample:
        """ValueError names the tar and the byte where a sample cannot be read."""
        tar, offset, length = self._place(number)
        data = self.read(tar, offset, length)
        try:
            return read_span(data, self._name(tar, offset))
        except ValueError:
            if self.cache is None:
                raise
            return self._past_cache(tar, offset, length, data)

    def past_cache(self, number: int) -> Sample | None:
        """A sample as it was committed, and its copy gone if that holds something else; None where there is no cache.

        For a sample that was read but does not decode. ValueError as `sample`.
        """
        if self.cache is None:
            return None
        place = self._place(number)
        return self._past_cache(*place, self.read(*place))

    def _past_cache(self, tar: int, offset: int, length: int, data: bytes) -> Sample:
        committed = self._ask(tar, offset, length)
        if committed != data:
            self._forget(tar)  # the copy is damaged
        return read_span(committed, self._name(tar, offset))

    def _name(self, tar: int, offset: int) -> str:
        return f"{self._where[tar]} at byte {offset}"

    def samples(self, numbers: Sequence[int]) -> list[Sample | ValueError]:
        """A sample per number, in their order, or the ValueError that names why it cannot be read.

        Neighbours in a tar are read together; from a bucket several requests are under way at a time. Where the bucket
        does not answer, that is no sample's fault, and StorageUnreachable comes out.
        """
        groups = self._neighbours(numbers)
        asked = [[numbers[place] for place in places] for places in groups]
        # The first request of a process makes its client, which costs more than a request: many would make one each.
        local = self.store.local_path("any") is not None
        alone = len(asked) if local else 0 if self._connected == os.getpid() else 1
        answers = [self._together(group) for group in asked[:alone]]
        self._connected = os.getpid()
        if asked[alone:]:
            with ThreadPoolExecutor(min(_REQUESTS, len(asked))) as pool:
                answers += pool.map(self._together, asked[alone:])
        found = dict(
            pair for places, samples in zip(groups, answers, strict=True) for pair in zip(places, samples, strict=True)
        )
        return [found[place] for place in range(len(numbers))]

    def read(self, tar: int, offset: int, length: int) -> bytes:
        """Exactly these bytes of tar number `tar`: from its file if it has one here, else from the bucket."""
        file = self._files.get(tar) or self._open(tar)
        if file is not None:
            try:
                data = os.pread(file.fileno(), length, offset)
            except OSError:
                data = b""  # a disk that fails, a file that was exchanged on NFS
            if len(data) == length:
                return data
            self._forget(tar)
        return self._ask(tar, offset, length)

    def _ask(self, tar: int, offset: int, length: int) -> bytes:
        """These bytes from the objects; where they do not answer, again and again while the patience lasts."""
        end = time.monotonic() + self.patience
        for attempt in itertools.count():
            try:
                data = self.store.get_range(self.index.tars[tar], offset, length)
            except StorageUnreachable as error:
                left = end - time.monotonic()
                if left <= 0 or (error.http_status is not None and error.http_status < 500):
                    raise
                self._say_what_it_waits_for(error)
                time.sleep(min(left, min(_LONGEST_PAUSE, 2**attempt) * random.uniform(0.5, 1)))
            else:
                self._waits = False
                return data
        raise AssertionError("unreachable: the last try returns or raises")

    def _say_what_it_waits_for(self, error: StorageUnreachable) -> None:
        with self._opening:
            said, self._waits = self._waits, True
        if not said:
            print(f"reading waits for the storage, at most {self.patience:g} s: {error}", file=sys.stderr, flush=True)

    def _place(self, number: int) -> tuple[int, int, int]:
        """Which tar, and where in it: offset and length in bytes."""
        index = self.index
        return int(index.shard[number]), int(index.offset[number]), int(index.length[number])

    def _neighbours(self, numbers: Sequence[int]) -> list[list[int]]:
        """Places in `numbers`, those together that one request reads."""
        spans = sorted((*self._place(number), place) for place, number in enumerate(numbers))
        groups, first, end = [], None, None
        for tar, offset, length, place in spans:
            near = first is not None and tar == first[0] and offset - end <= _GAP
            if near and max(end, offset + length) - first[1] <= _JOINED:
                groups[-1].append(place)
                end = max(end, offset + length)
            else:
                groups.append([place])
                first, end = (tar, offset), offset + length
        return groups

    def _together(self, numbers: Sequence[int]) -> list[Sample | ValueError]:
        """The samples of these numbers, sorted by their offsets in one tar, from one read."""
        if len(numbers) == 1:
            return [self._alone(numbers[0])]
        places = [self._place(number) for number in numbers]
        tar, start = places[0][:2]
        try:
            block = self.read(tar, start, max(offset + length for _, offset, length in places) - start)
        except ValueError:
            return [self._alone(number) for number in numbers]
        found = []
        for number, (_, offset, length) in zip(numbers, places, strict=True):
            try:
                data = block[offset - start : offset - start + length]
                found.append(read_span(data, self._name(tar, offset)))
            except ValueError:
                found.append(self._alone(number))
        return found

    def _alone(self, number: int) -> Sample | ValueError:
        try:
            return self.sample(number)
        except ValueError as error:
            return error

    def _open(self, tar: int) -> io.FileIO | None:
        """The tar as a file of this machine, None where it is none yet."""
        file = None if self.cache is None else self.cache.open(self.index.tars[tar], self.index.tar_bytes[tar])
        path = self.store.local_path(self.index.tars[tar]) if file is None else None
        if path is not None:
            try:
                file = open(path, "rb", buffering=0)  # noqa: SIM115  closed when it is forgotten
            except OSError:
                return None  # the objects say what is wrong with it
        if file is not None:
            with self._opening:
                if len(self._files) >= self._most_files and tar not in self._files:
                    self._files.pop(next(iter(self._files)))  # closed once nobody reads from it
                self._files[tar] = file
        return file

    def _forget(self, tar: int) -> None:
        """Read a tar no longer from its file, which cannot be read, is too short or holds what is no sample."""
        with self._opening:
            self._files.pop(tar, None)
        if self.cache is not None:
            self.cache.remove(self.index.tars[tar])

    def _check_sizes(self) -> None:
        """One listing tells now, not at hour 9, that a tar is gone or torn."""
        ends = np.zeros(len(self.index.tars), np.int64)
        np.maximum.at(ends, self.index.shard, self.index.offset + self.index.length)
        folders = {tar.rpartition("/")[0] for tar in self.index.tars}
        sizes = {info.path: info.size for folder in sorted(folders) for info in self.store.list(f"{folder}/")}
        for tar, end in zip(self.index.tars, ends.tolist(), strict=True):
            if sizes.get(tar, 0) < end and (tar in sizes or not self._reaches(tar, end)):
                raise ValueError(
                    f"{self.store.where(tar)} has {sizes.get(tar, 0)} bytes, its manifest needs {end}: it is torn or "
                    f"gone; delete the manifest {tar.rpartition('-')[0]}.parquet and run its stage again"
                )

    def _reaches(self, tar: str, end: int) -> bool:
        """Whether a tar that the listing lacks, as it may on network file systems for a while, is there and whole."""
        try:
            return len(self.store.get_range(tar, end - 1, 1)) == 1
        except (ValueError, ObjectMissing):
            return False
