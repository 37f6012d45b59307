"""Older snapshots after a withdrawal: the remaining samples are read from the newest revisions of their shards.

A revision that withdraws samples keeps the bytes of the others, but at new offsets. So a run that is pinned to an
older snapshot continues with the same samples, except that the withdrawn samples can no longer be read.
"""

import dataclasses
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.catalog import Catalog
from storage.snapshots import ShardIndex, read_columns, shard_of
from storage.withdrawn import read_withdrawn


def apply_revisions(index: ShardIndex, tars_missing: bool) -> ShardIndex:
    """Return a copy of the index that reads shards with withdrawn samples from the tars of their newest revisions.

    If no image is withdrawn, return `index` unchanged. With `tars_missing`, look for newer revisions in any case: the
    tars may have been removed after a withdrawal that has been undone since.
    """
    store = index.store
    if not tars_missing and not read_withdrawn(store):
        return index
    dataset, _, stage = index.folder.partition("/")
    catalog = Catalog(store, dataset)
    newest = catalog.newest(stage)
    names = {number: newest.get(shard_of(name), name) for number, name in enumerate(index.manifests)}
    revised = {number: name for number, name in names.items() if name != index.manifests[number]}
    shards = pa.array([int(shard_of(name)) for name in revised.values()], pa.int32())
    keys = (
        key
        for table in read_columns(store, index.path, ["shard", "key"])
        for key in table.filter(pc.is_in(table["shard"], value_set=shards))["key"].to_pylist()
    )
    first = np.searchsorted(index.shard, np.arange(len(index.tars) + 1, dtype=np.uint32)).tolist()
    tars, sha256, sizes = list(index.tars), list(index.tar_sha256), list(index.tar_bytes)
    offset, length, withdrawn = index.offset.copy(), index.length.copy(), {}
    manifests = catalog.manifests(stage, list(revised.values()), ["key", "status", "offset", "length"])
    for number, manifest in zip(revised, manifests, strict=True):
        rows = {row["key"]: row for row in manifest.ok().to_pylist()}
        shard_keys = dict(enumerate(islice(keys, first[number + 1] - first[number]), first[number]))
        lost = {i: key for i, key in shard_keys.items() if key not in rows}
        if not lost:
            continue
        withdrawn |= lost
        for i in shard_keys.keys() - lost.keys():
            offset[i], length[i] = rows[shard_keys[i]]["offset"], rows[shard_keys[i]]["length"]
        tars[number] = manifest.tar or tars[number]  # without a new tar, all samples of the old one are withdrawn
        sha256[number], sizes[number] = manifest.tar_sha256, manifest.tar_bytes
    return dataclasses.replace(
        index,
        tars=tuple(tars),
        tar_sha256=tuple(sha256),
        tar_bytes=tuple(sizes),
        offset=offset,
        length=length,
        withdrawn=withdrawn,
    )
