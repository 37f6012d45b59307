"""The samples of a snapshot by number, read through the byte-offset index: the reader of training.

From a folder, or from the tars in a cache, with one pread each. From a bucket with range requests: neighbours in one
request and several requests at a time, so that training needs no disk.
"""

import contextlib
import functools
import io
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from storage.cache import ShardCache
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable
from storage.revised import apply_revisions
from storage.sample import BadSample, Sample
from storage.shards import read_span
from storage.snapshots import ShardIndex
from storage.withdrawn import read_withdrawn

_REQUESTS = 8  # at a time
_JOINED = 8 << 20  # bytes, at most, of a request for several neighbours
_GAP = 64 << 10  # bytes, at most, between two samples that one request reads
_PATIENCE = 300.0  # seconds: longer than a server takes to start again
_LONGEST_PAUSE = 30.0  # seconds between two tries


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

    Samples that were withdrawn since are invalid, and the others are read from where they are now. patience: seconds
    for which a read is repeated while the storage does not answer.
    """

    def __init__(
        self, store: ObjectStore, index: ShardIndex, cache: ShardCache | None = None, patience: float = _PATIENCE
    ):
        self.store, self.cache, self.patience = store, cache, patience
        sizes = {info.path: info.size for info in store.list(f"{index.folder}/")}
        gone = not all(self._is_there(tar, sizes) for tar in index.tars)
        self.index = index = apply_revisions(index, gone)
        # ValueError for a tar that is missing or torn: at the start that is better than after hours.
        for tar, size in zip(index.tars, index.tar_bytes, strict=True):
            if size and (sizes.get(tar, size) != size or not self._is_there(tar, sizes)):
                raise ValueError(
                    f"{store.uri(tar)} has {sizes.get(tar, 0)} bytes, but its manifest needs {size}: it is torn "
                    f"or missing; delete the manifest {tar.rpartition('-')[0]}.parquet and run its stage again"
                )
        self._where = [store.uri(tar) for tar in index.tars]
        self._most_files = min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        # Kept open, and shared with forked workers: pread moves no position.
        self._files: dict[int, io.FileIO] = {}
        self._opening = threading.Lock()  # held while `_files` changes
        if cache is not None:
            cache.set_snapshot(index, sizes)

    def _is_there(self, tar: str, sizes: dict[str, int]) -> bool:
        # Network file systems list late what was written last.
        return tar in sizes or self.store.exists(tar)

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
        bucket does not answer, ObjectMissing if a tar is gone.
        """
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
                found[number] = read_span(data, f"{self._where[tar]} at byte {offset}")
            except ValueError as error:
                found[number] = error
        return found

    def _span(self, number: int) -> tuple[int, int, int]:
        """Number of the tar, offset and length in bytes."""
        index = self.index
        return int(index.shard[number]), int(index.offset[number]), int(index.length[number])

    def read(self, tar: int, offset: int, length: int) -> bytes:
        """Exactly these bytes of tar number `tar`: from a local file if there is one, else from the bucket."""
        file = self._files.get(tar) or self._open(tar)
        if file is not None:
            with contextlib.suppress(OSError):  # a failing disk, or a file that was replaced on NFS
                data = os.pread(file.fileno(), length, offset)
                if len(data) == length:
                    return data
            with self._opening:
                self._files.pop(tar, None)
        return self._read_store(tar, offset, length)

    def _read_store(self, tar: int, offset: int, length: int) -> bytes:
        """These bytes from the store; repeated for `patience` seconds while it does not answer."""
        end, pause = time.monotonic() + self.patience, 1.0
        while True:
            try:
                return self.store.get_range(self.index.tars[tar], offset, length)
            except ObjectMissing as error:
                raise ObjectMissing(
                    f"{error} any more, as after a withdrawal and `vlbert catalog gc --delete`: start the run again, "
                    "and it reads the newest revisions"
                ) from error
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
        file = None if self.cache is None else self.cache.open(self.index.tars[tar])
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
