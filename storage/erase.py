"""Samples that were forgotten leave the tars: garbage collection writes these again without them.

For each tar that holds such a sample: the new tar, then the record of what moved (storage/moved.py), then, if the
shard's newest manifest names the old tar, its next revision, and last the old tar is deleted. A collection that was
killed finishes at the next run. Two at a time agree on the first record.
"""

import dataclasses
import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.catalog import Catalog
from storage.forgotten import FORGOTTEN, forgotten_urls, is_among
from storage.inventory import Inventory
from storage.manifests import MANIFEST_VERSION, OK, SCHEMA, Manifest, table_bytes
from storage.moved import Moved, put_moved, read_moved, shifted, successors
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.safe_json import parse_json
from storage.shards import SHARD_VERSION, each_span, shard_without
from storage.snapshots import read_columns, read_snapshot


@dataclass(frozen=True)
class Erasable:
    """A tar with samples that were forgotten, or a file of images in progress; size: bytes that go.

    spans: (offset, length) of those that manifests and snapshots name. catalog: None of a file of images in progress.
    """

    info: ObjectInfo
    size: int
    spans: frozenset[tuple[int, int]] = frozenset()
    catalog: Catalog | None = None
    stage: str = ""
    shard: str = ""


def find_erasable(inventory: Inventory) -> list[Erasable]:
    """Every tar that a manifest or a snapshot says to hold a forgotten sample, and images in progress that do."""
    urls, store = forgotten_urls(inventory.store), inventory.store
    if not urls:
        return []
    spans: dict[str, set[tuple[int, int]]] = defaultdict(set)  # by tar: offset and length
    places = {}  # tar -> catalog, stage and shard

    def add(tar: str | None, held: Collection[tuple[int, int]], catalog: Catalog, stage: str, shard: str) -> None:
        if held and tar not in inventory.tars and tar in inventory.moved:
            tar, held = _moved(store, tar, held)
        if held and tar in inventory.tars:
            spans[tar].update(held)
            places[tar] = catalog, stage, shard

    for (name, stage), shards in inventory.manifests.items():
        catalog, replaced = Catalog(store, name), {one[2] for one in inventory.replaced if one[:2] == (name, stage)}
        for manifest in _manifests(catalog, stage, sorted(shards), replaced):
            ok = manifest.table.filter(pc.equal(manifest.table["status"], OK))
            add(manifest.tar, _spans_of(ok, urls), catalog, stage, manifest.shard)
    for (name, stage), snapshots in inventory.snapshots.items():
        for info in snapshots.values():
            _, shards = read_snapshot(store, info.path)
            tars = {int(one["shard"]): f"{name}/{stage}/{one['tar']}" for one in shards if one["tar"]}
            for table in read_columns(store, info.path, ["shard", "url", "offset", "length"]):
                table = table.filter(is_among(table["url"], urls))
                for number in pc.unique(table["shard"]).to_pylist():
                    held = _spans_of(table.filter(pc.equal(table["shard"], number)), urls)
                    add(tars[number], held, Catalog(store, name), stage, f"{number:05d}")
    found = [
        Erasable(inventory.tars[tar], sum(length for _, length in spans[tar]), frozenset(spans[tar]), *places[tar])
        for tar in sorted(spans)
    ]
    return found + [Erasable(info, info.size) for info in inventory.partials if _holds(store, info.path, urls)]


def _manifests(catalog: Catalog, stage: str, shards: list[str], replaced: Collection[str]) -> Iterator[Manifest]:
    """The newest manifest of each of these shards, and all revisions of those that have several."""
    for manifest in catalog.each_manifest(stage, shards):
        yield manifest
        if manifest.shard in replaced:
            yield from (catalog.manifest_of(one) for one in catalog.revisions(stage, manifest.shard)[:-1])


def _spans_of(table: pa.Table, urls: Collection[str]) -> set[tuple[int, int]]:
    """(offset, length) of the rows that have one of these URLs."""
    hits = table.filter(is_among(table["url"], urls))
    return set(zip(hits["offset"].to_pylist(), hits["length"].to_pylist(), strict=True))


def _moved(store: ObjectStore, tar: str, spans: Collection[tuple[int, int]]) -> tuple[str | None, set[tuple[int, int]]]:
    """The tar that has the samples of this one now, and where those at `spans` are in it, if they are."""
    held = np.array(sorted(spans), np.int64).reshape(-1, 2)
    for moved in successors(store, tar):
        held = held[~np.isin(held[:, 0], [start for start, _ in moved.removed])]
        held[:, 0] = shifted(held[:, 0], moved)
        tar = moved.tar
    return tar, set(map(tuple, held.tolist()))


def _holds(store: ObjectStore, partial: str, urls: Collection[str]) -> bool:
    try:
        column = pq.read_table(io.BytesIO(store.get(partial)), columns=["url"])["url"]
    except (ObjectMissing, pa.ArrowException, OSError, KeyError):
        return False  # its shard was committed since, or it is damaged, and nobody reads it
    return bool(pc.any(is_among(column, urls)).as_py())


def erase(store: ObjectStore, erasable: Erasable) -> bool:
    """Take the forgotten samples out of a tar; False if it must stay, because another writer still names it.

    ValueError if the tar is damaged.
    """
    catalog, stage, tar = erasable.catalog, erasable.stage, erasable.info.path
    if catalog is None:
        store.delete(tar)
        return True
    try:
        data = store.get(tar)
    except ObjectMissing:
        return True  # another collection of garbage was first
    where = store.where(tar)
    if hashlib.sha256(data).hexdigest()[:12] != tar.removesuffix(".tar")[-12:]:
        raise ValueError(
            f"{where} holds forgotten samples and is damaged, so it cannot be written again without them; delete "
            f"{catalog.where(stage, erasable.shard)} and the tar, and run the stage again"
        )
    try:
        moved = read_moved(store, tar)
    except ObjectMissing:
        removed = _forgotten_spans(data, where, forgotten_urls(store), erasable.spans)
        if not removed:
            return False
        ours = _put_rest(store, tar, data, removed)
        moved = put_moved(store, tar, ours)
        if ours.tar != moved.tar and ours.tar is not None:  # another collection of garbage was first, and knew others
            store.delete(ours.tar)
    revisions = catalog.revisions(stage, erasable.shard)
    if revisions and revisions[-1].tar == tar:
        _revise(catalog, catalog.manifest_of(revisions[-1]), moved)
        if catalog.manifest(stage, erasable.shard).tar == tar:
            return False
    if moved.tar is not None and not store.exists(
        moved.tar
    ):  # `gc --grace 0` beside this one saw nothing that names it
        _put_rest(store, tar, data, moved.removed)
    store.delete(tar)
    return True


def _forgotten_spans(
    data: bytes, where: str, urls: Collection[str], known: Collection[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """(offset, length) of the samples of a tar that are `known`, or whose own .json member has one of these URLs."""

    def url_of(members: dict[str, bytes]) -> object:
        try:
            return parse_json(members["json"], where).get("url")
        except (KeyError, ValueError):  # nobody can read this sample, and its row in the manifest tells its URL
            return None

    spans = (((span.offset, span.length), members) for span, members in each_span(data, where))
    return tuple(span for span, members in spans if span in known or url_of(members) in urls)


def _put_rest(store: ObjectStore, tar: str, data: bytes, removed: Collection[tuple[int, int]]) -> Moved:
    """Write the tar of the other samples, if there are any."""
    rest = shard_without(data, removed)
    if rest is None:
        return Moved(None, "", 0, tuple(removed))
    sha256 = hashlib.sha256(rest).hexdigest()
    path = f"{tar.rpartition('-')[0]}-{sha256[:12]}.tar"
    store.put(path, rest)
    return Moved(path, sha256, len(rest), tuple(removed))


def _revise(catalog: Catalog, newest: Manifest, moved: Moved) -> None:
    """The next revision of a shard, with the rows of the removed samples marked; another writer may be first."""
    table = newest.table
    offset = table["offset"].fill_null(-1).to_numpy()
    removed = np.isin(offset, [start for start, _ in moved.removed])
    gone = pa.array(removed)
    columns = {name: table[name] for name in SCHEMA.names}
    columns["status"] = pc.if_else(gone, FORGOTTEN, table["status"])
    columns["offset"] = pa.array(shifted(offset, moved), mask=removed | (offset < 0))
    for name in ("length", "width", "height", "num_regions"):
        columns[name] = pc.if_else(gone, pa.scalar(None, SCHEMA.field(name).type), table[name])
    statuses = Counter(columns["status"].to_pylist())
    header = {
        "stage": newest.stage,
        "shard": newest.shard,
        "tar": moved.tar and moved.tar.rpartition("/")[2],
        "tar_sha256": moved.tar_sha256,
        "tar_bytes": moved.tar_bytes,
        "meta": newest.meta | {"replaces": newest.sha256, "forgets": True},
        "version": MANIFEST_VERSION,
        "shard_version": SHARD_VERSION,
        "statuses": dict(sorted(statuses.items())),
    }
    name = dataclasses.replace(newest, revision=newest.revision + 1).name
    data = table_bytes(pa.table(columns, schema=SCHEMA), header)
    catalog.store.put(catalog.manifest_path(newest.stage, name), data, if_absent=True)
