"""Tars that garbage collection wrote again without the samples that were forgotten, and how older snapshots read them.

    ROOT/<dataset>/<stage>/moved/<shard>-<12 hex>.json     named as the old tar: which tar has its other samples

The new tar has the other samples in the same order, byte for byte. So a run that is pinned to an older snapshot goes on
with the same samples at other offsets, and those that were forgotten are unreadable. docs/formats.md is the contract.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow.compute as pc

from storage import index_file
from storage.digests import check_version
from storage.forgotten import forgotten_urls, is_among
from storage.object_store import ObjectMissing, ObjectStore
from storage.runs import read_sealed, sealed_json
from storage.snapshots import ShardIndex, read_columns

MOVED_VERSION = 1
_READERS = 16


@dataclass(frozen=True)
class Moved:
    """Where the other samples of a tar are.

    tar      path of the new tar relative to the root; None if no sample is left
    removed  (offset, length) in the old tar of each sample that is not in the new one, ascending, in bytes
    """

    tar: str | None
    tar_sha256: str
    tar_bytes: int
    removed: tuple[tuple[int, int], ...]


def folder_of(stage: str) -> str:
    """The folder of a stage's records; stage: path of its folder in the store."""
    return f"{stage}/moved/"


def _path_of(tar: str) -> str:
    path = PurePosixPath(tar)
    return f"{folder_of(str(path.parent))}{path.stem}.json"


def put_moved(store: ObjectStore, tar: str, moved: Moved) -> Moved:
    """Record what became of a tar; returns the record that holds, which may be another writer's."""
    content = {"version": MOVED_VERSION, **asdict(moved)}
    if store.put(_path_of(tar), sealed_json(content), if_absent=True):
        return moved
    return read_moved(store, tar)


def read_moved(store: ObjectStore, tar: str) -> Moved:
    """What became of a tar; ObjectMissing if it was never written again, ValueError if the record is damaged."""
    path = _path_of(tar)
    content = read_sealed(store.get(path), store.where(path))
    check_version(content.pop("version", None), MOVED_VERSION, store.where(path))
    return Moved(**content | {"removed": tuple(map(tuple, content["removed"]))})


def moved_tars(store: ObjectStore, stage: str) -> set[str]:
    """The tars of a stage that were written again; one listing. stage: path of its folder in the store."""
    folder = folder_of(stage)
    names = [info.path.removeprefix(folder) for info in store.list(folder)]
    return {f"{stage}/{name.removesuffix('.json')}.tar" for name in names if name.endswith(".json")}


def successors(store: ObjectStore, tar: str) -> list[Moved]:
    """What became of a tar, of the tar that has its samples since, and so on; [] if it was never written again."""
    found = []
    while tar is not None:
        try:
            found.append(read_moved(store, tar))
        except ObjectMissing:
            break
        tar = found[-1].tar
    return found


def readable(index: ShardIndex) -> ShardIndex:
    """The index of a snapshot as it can be read now: samples of tars that were written again are found in the new ones,
    and `forgotten` has those that were withdrawn since. The same object if there are none."""
    store, stage = index.store, index.folder
    moved = moved_tars(store, stage)
    forgotten = dict(index.forgotten) | _forgotten_in(index)
    gone = [number for number, tar in enumerate(index.tars) if tar in moved]
    if not gone and len(forgotten) == len(index.forgotten) and moved <= index.moved:
        return index
    with ThreadPoolExecutor(_READERS) as pool:
        chains = dict(zip(gone, pool.map(lambda number: successors(store, index.tars[number]), gone), strict=True))
    tars, sha256, sizes = list(index.tars), list(index.tar_sha256), list(index.tar_bytes)
    for number, chain in chains.items():
        last = chain[-1]
        # A tar of which nothing is left keeps its name: no sample is read from it.
        tars[number], sha256[number], sizes[number] = last.tar or tars[number], last.tar_sha256, last.tar_bytes
    offset, removed = index.offset, []
    if chains:
        offset = _shared_offsets(index, chains)
        removed = [number for place, chain in chains.items() for number in _removed(index, place, chain)]
    if missing := [number for number in removed if number not in forgotten]:  # its tombstone was taken back
        keys = index.keys()
        forgotten |= {number: keys[number] for number in missing}
    return dataclasses.replace(
        index,
        tars=tuple(tars),
        tar_sha256=tuple(sha256),
        tar_bytes=tuple(sizes),
        offset=offset,
        forgotten=forgotten,
        moved=index.moved | moved,
    )


def _forgotten_in(index: ShardIndex) -> dict[int, str]:
    """Number -> key of the samples whose URL has a tombstone."""
    urls = forgotten_urls(index.store)
    if not urls:
        return {}
    found, start = {}, 0
    for table in read_columns(index.store, index.path, ["url", "key"]):
        hits = np.flatnonzero(is_among(table["url"], urls).to_numpy())
        found |= dict(zip((start + hits).tolist(), pc.take(table["key"], hits).to_pylist(), strict=True))
        start += len(table)
    return found


def _spans(index: ShardIndex, place: int) -> slice:
    """The numbers of the samples in tar number `place`."""
    return slice(*np.searchsorted(index.shard, np.array([place, place + 1], index.shard.dtype)).tolist())


def _removed(index: ShardIndex, place: int, chain: list[Moved]) -> list[int]:
    """The numbers of the samples of a tar that are in its last successor no more."""
    samples = _spans(index, place)
    offset, gone = np.array(index.offset[samples]), np.zeros(samples.stop - samples.start, bool)
    for moved in chain:
        gone |= np.isin(offset, [start for start, _ in moved.removed])
        offset = shifted(offset, moved)
    return (samples.start + np.flatnonzero(gone)).tolist()


def shifted(offset: np.ndarray, moved: Moved) -> np.ndarray:
    """int64 [n]: offsets in the old tar -> in the new one; that of a sample that was removed means nothing."""
    starts, lengths = np.array(moved.removed, np.int64).reshape(-1, 2).T
    return offset - np.concatenate([[0], np.cumsum(lengths)])[np.searchsorted(starts, offset)]


def _shared_offsets(index: ShardIndex, chains: Mapping[int, list[Moved]]) -> np.ndarray:
    """The offsets in the new tars; of a large index one copy for all processes of the machine."""
    ends = {number: chain[-1].tar for number, chain in chains.items()}
    name = hashlib.sha256(repr((index.tars, sorted(ends.items()))).encode()).hexdigest()[:16]

    def make() -> index_file.Arrays:
        offset = np.array(index.offset)
        for place, chain in chains.items():
            samples = _spans(index, place)
            for moved in chain:
                offset[samples] = shifted(offset[samples], moved)
        offset.setflags(write=False)
        return offset, index.length, index.shard

    return index_file.shared(f"{index.snapshot.id}-{name}", len(index), make)[0]
