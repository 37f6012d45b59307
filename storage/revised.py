"""How an older snapshot is read after samples were withdrawn: from the newest revisions of their shards.

Revisions that withdraw samples keep the others byte for byte, so a run that is pinned to the snapshot goes on with the
same samples at other offsets. Those that were withdrawn are unreadable.
"""

import dataclasses
from collections.abc import Collection

import numpy as np

from storage.catalog import Catalog
from storage.manifests import Manifest
from storage.snapshots import ShardIndex, read_columns, read_rows, shard_of
from storage.withdrawn import read_withdrawn


def follow_revisions(index: ShardIndex, gone: Collection[int] = ()) -> ShardIndex:
    """The index of a snapshot as it can be read now.

    Shards that lost a sample since, and those whose tar is `gone` (numbers of tars), are read from their newest
    revision, if there is a newer one.
    """
    store = index.store
    if not gone and not read_withdrawn(store):
        return index
    dataset, _, stage = index.path.rpartition("/snapshots/")[0].partition("/")
    catalog = Catalog(store, dataset)
    newest = catalog.newest(stage)
    names = {number: newest.get(shard_of(name), name) for number, name in enumerate(index.manifests)}
    revised = [number for number, name in enumerate(index.manifests) if names[number] != name]
    starts = np.searchsorted(index.shard, np.arange(len(index.tars) + 1, dtype=index.shard.dtype)).tolist()
    rows = _rows_of(index, [range(starts[number], starts[number + 1]) for number in revised])
    tars, sha256, sizes = list(index.tars), list(index.tar_sha256), list(index.tar_bytes)
    moved, lost = {}, []
    manifests = catalog.each_manifest(stage, [names[number] for number in revised])
    for number, ours, manifest in zip(revised, rows, manifests, strict=True):
        offset, length = _places(manifest, ours)
        if number not in gone and (offset >= 0).all():
            continue
        moved[number] = starts[number], offset, length
        lost += (starts[number] + np.flatnonzero(offset < 0)).tolist()
        tars[number] = manifest.tar or tars[number]  # of which no sample is read
        sha256[number], sizes[number] = manifest.tar_sha256, manifest.tar_bytes
    keys = [row["key"] for row in read_rows(store, index.path, lost)] if lost else []
    return dataclasses.replace(
        index,
        tars=tuple(tars),
        tar_sha256=tuple(sha256),
        tar_bytes=tuple(sizes),
        moved=moved,
        withdrawn=dict(zip(lost, keys, strict=True)),
    )


def _rows_of(index: ShardIndex, samples: list[range]) -> list[np.ndarray]:
    """The numbers of the input rows of these samples of a snapshot, int64; the ranges ascend."""
    if not samples:
        return []
    found = np.concatenate([table["row"].to_numpy() for table in read_columns(index.store, index.path, ["row"])])
    return [found[each.start : each.stop] for each in samples]


def _places(manifest: Manifest, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the samples of these rows are in the tar of a manifest: offsets, -1 if a row has none, and lengths."""
    row, offset, length = (manifest.ok()[name].to_pylist() for name in ("row", "offset", "length"))
    known = dict(zip(row, zip(offset, length, strict=True), strict=True))
    found = np.array([known.get(one, (-1, 0)) for one in rows.tolist()], np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
