"""Random access for training: read the samples of a snapshot by index, using their byte ranges.

Local and cached tars are read with pread. A bucket is read with parallel range requests, so training needs no
local disk. One request may cover several neighbouring samples.
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

_REQUESTS = 8  # parallel requests
_MAX_REQUEST = 8 << 20  # maximum bytes of a request for several neighbours
_MAX_GAP = 64 << 10  # maximum bytes between two samples that one request reads
_PATIENCE = 300.0  # seconds; longer than a server takes to restart
_MAX_PAUSE = 30.0  # seconds between two attempts


class Samples(Protocol):
    """Protocol for a sequence of samples, such as ShardSamples. A sample's number is its index in the sequence."""

    @property
    def urls(self) -> Sequence[str]: ...

    @property
    def withdrawn(self) -> Collection[str]: ...  # withdrawn URLs; new snapshots do not contain their samples

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample: ...

    def samples(self, numbers: Sequence[int]) -> list[Sample | ValueError]:
        """Return the samples with these indices, in order, with a ValueError in place of each invalid sample.

        Other errors, such as a missing tar or an unreachable server, are raised.
        """


class ShardSamples:
    """The samples of a snapshot, read by byte range from local tars or from a bucket.

    Samples withdrawn after the snapshot are invalid. The other samples of their shards are read from the newest
    revisions. While the storage does not answer, a read is repeated for up to `patience` seconds.
    """

    def __init__(
        self, store: ObjectStore, index: ShardIndex, cache: ShardCache | None = None, patience: float = _PATIENCE
    ):
        self.store, self.cache, self.patience = store, cache, patience
        sizes = {info.path: info.size for info in store.list(f"{index.folder}/")}
        tars_missing = not all(self._exists(tar, sizes) for tar in index.tars)
        self.index = index = apply_revisions(index, tars_missing)
        # A missing or truncated tar is better found at the start than after hours.
        for tar, size in zip(index.tars, index.tar_bytes, strict=True):
            if size and (sizes.get(tar, size) != size or not self._exists(tar, sizes)):
                raise ValueError(
                    f"{store.uri(tar)} has {sizes.get(tar, 0)} bytes, but its manifest needs {size}: it is truncated "
                    f"or missing; delete the manifest {tar.rpartition('-')[0]}.parquet and run its stage again"
                )
        self._uris = [store.uri(tar) for tar in index.tars]
        self._max_files = min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        # Kept open, and shared with forked workers, because pread does not move the file position.
        self._files: dict[int, io.FileIO] = {}
        self._files_lock = threading.Lock()  # held while `_files` changes
        if cache is not None:
            cache.set_snapshot(index, sizes)

    def _exists(self, tar: str, sizes: dict[str, int]) -> bool:
        # Network file systems may not list the newest files yet.
        return tar in sizes or self.store.exists(tar)

    @functools.cached_property
    def urls(self) -> list[str]:
        """URL of every sample. The list is long, so it is read on first use."""
        return self.index.urls()

    @property
    def withdrawn(self) -> frozenset[str]:
        """Withdrawn URLs of all datasets."""
        return read_withdrawn(self.store).urls

    def __len__(self) -> int:
        return len(self.index)

    def sample(self, number: int) -> Sample:
        """Return the sample with this index. If it is invalid, raises ValueError, naming its tar and byte offset."""
        (sample,) = self.samples([number])
        if isinstance(sample, ValueError):
            raise sample
        return sample

    def samples(self, numbers: Sequence[int]) -> list[Sample | ValueError]:
        """Return the samples with these indices, in order, with a ValueError in place of each invalid sample.

        Neighbouring samples in a tar are read together, and a bucket is read with parallel requests. Raises
        StorageUnreachable if the bucket does not answer, and ObjectMissing if a tar is missing.
        """
        groups = self._group_neighbours(numbers)
        if len(groups) < 2 or self.store.local_path("any") is not None:
            blocks = [self._read_group(group) for group in groups]
        else:
            with ThreadPoolExecutor(min(_REQUESTS, len(groups))) as pool:
                blocks = [*pool.map(self._read_group, groups)]
        samples = {number: sample for block in blocks for number, sample in block.items()}
        for number in numbers:
            if key := self.index.withdrawn.get(number):
                samples[number] = BadSample(f"sample {key} was withdrawn since: docs/provenance.md", key)
        return [samples[number] for number in numbers]

    def _group_neighbours(self, numbers: Sequence[int]) -> list[list[int]]:
        """Group the indices of samples that can be read together, with one request. Withdrawn samples are left out."""
        spans = sorted((*self._span(number), number) for number in {*numbers} - self.index.withdrawn.keys())
        groups, first, end = [], None, 0
        for tar, offset, length, number in spans:
            near = first is not None and tar == first[0] and offset - end <= _MAX_GAP
            if not near or offset + length - first[1] > _MAX_REQUEST:
                groups.append([])
                first = tar, offset
            groups[-1].append(number)
            end = offset + length
        return groups

    def _read_group(self, numbers: Sequence[int]) -> dict[int, Sample | ValueError]:
        """Read neighbouring samples of one tar together. Return a sample or an error for each index."""
        spans = {number: self._span(number) for number in numbers}
        (tar, start, _), (_, last, length) = spans[numbers[0]], spans[numbers[-1]]
        samples = {}
        try:
            block = self.read(tar, start, last + length - start)
        except ValueError as error:
            if len(numbers) == 1:
                return {numbers[0]: error}
            for number in numbers:
                samples |= self._read_group([number])
            return samples
        for number, (_, offset, length) in spans.items():
            try:
                data = block[offset - start : offset - start + length]
                samples[number] = read_span(data, f"{self._uris[tar]} at byte {offset}")
            except ValueError as error:
                samples[number] = error
        return samples

    def _span(self, number: int) -> tuple[int, int, int]:
        """Return the index of a sample's tar, and the sample's byte offset and length in that tar."""
        index = self.index
        return int(index.shard[number]), int(index.offset[number]), int(index.length[number])

    def read(self, tar: int, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset` of tar number `tar`, from a local file if possible, else from the store."""
        file = self._files.get(tar) or self._open(tar)
        if file is not None:
            with contextlib.suppress(OSError):  # from a failing disk, or for a file that was replaced on NFS
                data = os.pread(file.fileno(), length, offset)
                if len(data) == length:
                    return data
            with self._files_lock:
                self._files.pop(tar, None)
        return self._read_store(tar, offset, length)

    def _read_store(self, tar: int, offset: int, length: int) -> bytes:
        """Read bytes of a tar from the store. Retry for `patience` seconds while the store does not answer."""
        end, pause = time.monotonic() + self.patience, 1.0
        while True:
            try:
                return self.store.get_range(self.index.tars[tar], offset, length)
            except ObjectMissing as error:
                raise ObjectMissing(
                    f"{error} any more; a withdrawal and `vlbert catalog gc --delete` may have removed it. Start the "
                    "run again to read the newest revisions"
                ) from error
            except StorageUnreachable as error:
                left = end - time.monotonic()
                if left <= 0 or error.lasts:
                    raise
                if pause == 1:
                    waits = f"waiting for the storage, for at most {self.patience:g} s"
                    print(f"{waits}: {error}", file=sys.stderr, flush=True)
                time.sleep(min(left, pause * random.uniform(0.5, 1)))
                pause = min(2 * pause, _MAX_PAUSE)

    def _open(self, tar: int) -> io.FileIO | None:
        """Open the cached copy or the local file of a tar. Return None if there is neither."""
        file = None if self.cache is None else self.cache.open(self.index.tars[tar])
        path = self.store.local_path(self.index.tars[tar]) if file is None else None
        if path is not None:
            try:
                file = open(path, "rb", buffering=0)  # noqa: SIM115  closed when `_files` drops it
            except OSError:
                return None  # the store's own error is clearer
        if file is not None:
            with self._files_lock:
                if len(self._files) >= self._max_files and tar not in self._files:
                    self._files.pop(next(iter(self._files)))  # closed when its last reader is done
                self._files[tar] = file
        return file
