"""The samples of a snapshot by number, read through the byte-offset index: the reader of training.

From a folder, or from the tars in a cache, with one pread each. From a bucket with range requests: neighbours in one
request and several requests at a time, so that training needs no disk.
"""

import functools
import io
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np

from storage.cache import ShardCache
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable
from storage.revised import follow_revisions
from storage.sample import BadSample, Sample
from storage.shards import read_span
from storage.snapshots import ShardIndex
from storage.withdrawn import read_withdrawn

_REQUESTS = 8  # at a time
_JOINED = 8 << 20  # bytes, at most, of a request for several neighbours
_GAP = 64 << 10  # bytes, at most, between two samples that one request reads
_PATIENCE = 300.0  # seconds: longer than a server takes to start again
_LONGEST_PAUSE = 30.0  # seconds between two tries
_Read = TypeVar("_Read")


class Samples(Protocol):
    """Samples by number: the shards of a snapshot, or anything like them."""

    urls: Sequence[str]
    withdrawn: Collection[str]  # URLs whose samples may be in no snapshot any more

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample: ...

    def samples(self, numbers: Sequence[int]) -> list[Sample | ValueError]:
        """A sample per number, in their order, or why it is invalid. Other errors are raised, and stop the run: a
        missing tar, or a server that cannot be reached."""


class ShardSamples:
    """The samples of committed shards, read through the byte-offset index (pread, or range requests on S3).

    Samples that were withdrawn are invalid; if their tars go meanwhile, the others are read from the newest revision.
    patience: seconds for which a read is repeated while the storage does not answer.
    """

    def __init__(
        self, store: ObjectStore, index: ShardIndex, cache: ShardCache | None = None, patience: float = _PATIENCE
    ):
        self.store, self.cache, self.patience = store, cache, patience
        self._most_files = min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._opening = threading.Lock()  # held while `_files` changes
        self._pinned = index
        self._read_from(*self._current())

    def _current(self) -> tuple[ShardIndex, dict[str, int]]:
        """The index as it can be read now, and the sizes of all objects of its stage; one listing."""
        folder = self._pinned.path.rpartition("snapshots/")[0]
        sizes = {info.path: info.size for info in self.store.list(folder)}
        gone = {n for n, tar in enumerate(self._pinned.tars) if not self._is_there(tar, sizes)}
        return follow_revisions(self._pinned, gone), sizes

    def _is_there(self, tar: str, sizes: dict[str, int]) -> bool:
        # Network file systems list late what was written last.
        return tar in sizes or self.store.exists(tar)

    def _read_from(self, index: ShardIndex, sizes: dict[str, int]) -> None:
        """ValueError if a tar is missing or too short: at the start that is better than after hours."""
        # Samples lie in their tar in the order of the index: the last one has its end.
        last = np.searchsorted(index.shard, np.arange(len(index.tars), dtype=index.shard.dtype), "right") - 1
        ends = index.offset[last].astype(np.int64) + index.length[last]
        for number, (_, offset, length) in index.moved.items():
            ends[number] = (offset + length).max(initial=0)
        for tar, end in zip(index.tars, ends.tolist(), strict=True):
            if sizes.get(tar, end) < end or (end and not self._is_there(tar, sizes)):
                raise ValueError(
                    f"{self.store.where(tar)} has {sizes.get(tar, 0)} bytes, but its manifest needs {end}: it is torn "
                    f"or missing; delete the manifest {tar.rpartition('-')[0]}.parquet and run its stage again"
                )
        self.index, self._where = index, [self.store.where(tar) for tar in index.tars]
        # Kept open, and shared with forked workers: pread moves no position.
        self._files: dict[int, io.FileIO] = {}
        if self.cache is not None:
            self.cache.want(index, sizes)

    def _find_moved(self) -> bool:
        """Look for the samples of tars that are gone. Returns True if they are elsewhere. No other thread may read."""
        index, sizes = self._current()
        if index.tars == self.index.tars:
            return False
        self._read_from(index, sizes)
        return True

    @functools.cached_property
    def urls(self) -> list[str]:
        """The URL of every sample; a long list, so only tasks that need it read it."""
        return self.index.urls()

    @property
    def withdrawn(self) -> frozenset[str]:
        """The URLs that were withdrawn, in all datasets."""
        return read_withdrawn(self.store).urls

    def __len__(self) -> int:
        return len(self.index)

    def sample(self, number: int) -> Sample:
        """One sample; ValueError names the tar and the byte if it is invalid."""
        (found,) = self.samples([number])
        if isinstance(found, ValueError):
            raise found
        return found

    def samples(self, numbers: Sequence[int]) -> list[Sample | ValueError]:
        """A sample per number, in their order, or the ValueError that says why it is invalid.

        Neighbours in a tar are read together; from a bucket with several requests at a time. StorageUnreachable if the
        bucket does not answer.
        """
        return self._wherever(lambda: self._samples(numbers))

    def _wherever(self, read: Callable[[], _Read]) -> _Read:
        """What `read` returns; again if a tar is gone and its samples are elsewhere."""
        try:
            return read()
        except ObjectMissing:
            if not self._find_moved():
                raise
        return read()

    def _samples(self, numbers: Sequence[int]) -> list[Sample | ValueError]:
        groups = self._neighbours(numbers)
        if len(groups) < 2 or self.store.local_path("any") is not None:
            answers = [self._together(group) for group in groups]
        else:
            with ThreadPoolExecutor(min(_REQUESTS, len(groups))) as pool:
                answers = [*pool.map(self._together, groups)]
        found = {number: sample for answer in answers for number, sample in answer.items()}
        for number in numbers:
            if key := self.index.withdrawn.get(number):
                found[number] = BadSample(f"sample {key} was withdrawn since: docs/provenance.md", key)
        return [found[number] for number in numbers]

    def _neighbours(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers by the request that reads them, in the order of their tar; without those that were withdrawn."""
        spans = sorted((*self._span(number), number) for number in {*numbers} - self.index.withdrawn.keys())
        groups, first, end = [], None, 0
        for tar, offset, length, number in spans:
            near = first is not None and tar == first[0] and offset - end <= _GAP
            if not near or offset + length - first[1] > _JOINED:
                groups.append([])
                first = tar, offset
            groups[-1].append(number)
            end = offset + length
        return groups

    def _together(self, numbers: Sequence[int]) -> dict[int, Sample | ValueError]:
        """The samples of these numbers, which are neighbours in one tar, from one read."""
        spans = {number: self._span(number) for number in numbers}
        (tar, start, _), (_, last, length) = spans[numbers[0]], spans[numbers[-1]]
        found = {}
        try:
            block = self.read(tar, start, last + length - start)
        except ValueError as error:
            if len(numbers) == 1:
                return {numbers[0]: error}
            for number in numbers:
                found |= self._together([number])
            return found
        for number, (_, offset, length) in spans.items():
            try:
                data = block[offset - start : offset - start + length]
                found[number] = read_span(data, self._name(tar, offset))
            except ValueError as error:
                found[number] = error if self.cache is None else self._from_store(tar, offset, length)
        return found

    def _from_store(self, tar: int, offset: int, length: int) -> Sample | ValueError:
        try:
            return self._past_cache(tar, offset, length)
        except ValueError as error:
            return error

    def _past_cache(self, tar: int, offset: int, length: int) -> Sample:
        committed = self._read_store(tar, offset, length)
        if committed != self.read(tar, offset, length):
            self._forget(tar)  # the copy is damaged
        return read_span(committed, self._name(tar, offset))

    def _span(self, number: int) -> tuple[int, int, int]:
        """Number of the tar, offset and length in bytes."""
        index, tar = self.index, int(self.index.shard[number])
        if tar in index.moved:
            first, offset, length = index.moved[tar]
            return tar, int(offset[number - first]), int(length[number - first])
        return tar, int(index.offset[number]), int(index.length[number])

    def _name(self, tar: int, offset: int) -> str:
        return f"{self._where[tar]} at byte {offset}"

    def read(self, tar: int, offset: int, length: int) -> bytes:
        """Exactly these bytes of tar number `tar`: from a local file if there is one, else from the bucket."""
        file = self._files.get(tar) or self._open(tar)
        if file is not None:
            try:
                data = os.pread(file.fileno(), length, offset)
            except OSError:
                data = b""  # a failing disk, or a file that was replaced on NFS
            if len(data) == length:
                return data
            self._forget(tar)
        return self._read_store(tar, offset, length)

    def _read_store(self, tar: int, offset: int, length: int) -> bytes:
        """These bytes from the store; repeated for `patience` seconds while it does not answer."""
        end, pause = time.monotonic() + self.patience, 1.0
        while True:
            try:
                return self.store.get_range(self.index.tars[tar], offset, length)
            except StorageUnreachable as error:
                left = end - time.monotonic()
                if left <= 0 or (error.http_status is not None and error.http_status < 500):
                    raise
                if pause == 1:
                    waits = f"reading waits for the storage, at most {self.patience:g} s"
                    print(f"{waits}: {error}", file=sys.stderr, flush=True)
                time.sleep(min(left, pause * random.uniform(0.5, 1)))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _open(self, tar: int) -> io.FileIO | None:
        """The tar as a file of this machine, None if there is none."""
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
        """Stop reading a tar from its local file, which is unreadable, too short or holds an invalid sample."""
        with self._opening:
            self._files.pop(tar, None)
        if self.cache is not None:
            self.cache.remove(self.index.tars[tar])
