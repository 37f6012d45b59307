"""How an older snapshot is read after samples were withdrawn: from the newest revisions of their shards.

Revisions that withdraw samples keep the others byte for byte, so a run that is pinned to the snapshot goes on with the
same samples at other offsets. Those that were withdrawn are unreadable.
"""

import dataclasses
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.catalog import Catalog
from storage.snapshots import ShardIndex, read_columns, shard_of
from storage.withdrawn import read_withdrawn


def apply_revisions(index: ShardIndex, gone: bool) -> ShardIndex:
    """The index of a snapshot as it can be read now; its arrays are this process's own then.

    Shards that lost a sample since are read from their newest revision. gone: a tar is, perhaps of a withdrawal that
    was taken back later.
    """
    store = index.store
    if not gone and not read_withdrawn(store):
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
        places = {row["key"]: row for row in manifest.ok().to_pylist()}
        own = dict(enumerate(islice(keys, first[number + 1] - first[number]), first[number]))
        lost = {i: key for i, key in own.items() if key not in places}
        if not lost:
            continue
        withdrawn |= lost
        for i in own.keys() - lost.keys():
            offset[i], length[i] = places[own[i]]["offset"], places[own[i]]["length"]
        tars[number] = manifest.tar or tars[number]  # of which no sample is read
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
