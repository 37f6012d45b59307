"""Garbage collection: old files that nothing refers to any more, and tars with withdrawn images.

`vlbert catalog gc` lists or deletes them.
"""

import contextlib
from pathlib import Path

from storage.catalog import Catalog
from storage.inventory import TAR, Inventory, date_of, manifest_names, megabytes
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.snapshots import read_snapshot
from storage.tables import aligned
from storage.withdrawn import read_withdrawn

_INTERRUPTED = "interrupted put"  # kind of local temporary files; all other kinds are objects of the store


def find_garbage(store: ObjectStore, grace: float) -> list[tuple[str, ObjectInfo]]:
    """Return the files that may be deleted, each with a description of its kind.

    Files older than `grace` seconds by the storage's clock may be deleted if they are
    - tars that are named neither by a shard's newest manifest nor by a kept snapshot,
    - snapshots that no checkpoint pins, except the newest snapshot of each stage, or
    - temporary files of interrupted writes.

    Tars of earlier revisions that contain withdrawn images may be deleted at any age.
    """
    now = store.now()
    garbage = [(_INTERRUPTED, info) for info in store.leftovers()]
    inventory = Inventory(store)
    pinned = inventory.pins()
    named, withdrawn = _tars_of_manifests(inventory, now - grace)
    for (dataset, stage), snapshots in inventory.snapshots.items():
        newest = max(snapshots, key=lambda name: (snapshots[name].modified, name))
        for name, info in snapshots.items():
            used = (dataset, stage, name) in pinned or name == newest
            if used or now - info.modified <= grace:
                _, shards = read_snapshot(store, info.path)
                named |= {f"{dataset}/{stage}/{shard['tar']}" for shard in shards if shard["tar"]}
            else:
                garbage.append(("unpinned snapshot", info))
    garbage += [("orphan tar", info) for path, info in inventory.tars.items() if path not in named | withdrawn]
    images = [("withdrawn images", inventory.tars[tar]) for tar in sorted(withdrawn & inventory.tars.keys())]
    return images + [(kind, info) for kind, info in garbage if now - info.modified > grace]


def _tars_of_manifests(inventory: Inventory, since: float) -> tuple[set[str | None], set[str]]:
    """Return the set of tars that must be kept, and the set that can be deleted because of withdrawn images.

    The first set has the tar of each shard's newest revision. For a shard revised after `since` (by the storage's
    clock), it also has the tars of earlier revisions: a training run that has read an earlier manifest may still write
    a snapshot that names its tar.

    The second set has the tars of earlier revisions that contain withdrawn images. A snapshot may still name such a
    tar. After the tar is deleted, the snapshot's samples are read from the newest revision (storage/revised.py).
    """
    store, named, with_images = inventory.store, set(), set()
    withdrawn = read_withdrawn(store)
    for (dataset, stage), shards in inventory.manifests.items():
        catalog = Catalog(store, dataset)
        named |= {header.tar for header in inventory.headers(dataset, stage)}
        for revisions in shards.values():
            young = revisions[max(revisions)].modified >= since
            if len(revisions) == 1 or not (young or withdrawn):
                continue
            *earlier, newest = catalog.manifests(stage, manifest_names(revisions), ["url", "sha256", "status"])
            if young:
                named |= {manifest.tar for manifest in earlier}
            if withdrawn and not any(withdrawn.contains(newest.ok()).to_pylist()):
                having = [manifest for manifest in earlier if any(withdrawn.contains(manifest.ok()).to_pylist())]
                with_images |= {manifest.tar for manifest in having} - {newest.tar}
    return named, with_images


def _remove(store: ObjectStore, kind: str, info: ObjectInfo) -> bool:
    """Delete a file from `find_garbage` if it is still unused. Return False if it was rewritten or is in use now."""
    if kind == _INTERRUPTED:
        Path(info.path).unlink(missing_ok=True)
        return True
    if info not in store.list(info.path):  # deleted, or with a new date: a writer uses it now
        return False
    if tar := TAR.fullmatch(info.path):
        dataset, stage, shard = tar.groups()
        with contextlib.suppress(ObjectMissing):  # the shard is not committed
            if Catalog(store, dataset).headers(stage, [shard])[shard].tar == info.path:
                return False  # committed by a writer that paused for the whole grace time
    store.delete(info.path)
    return True


def collect_garbage(store: ObjectStore, grace: float, delete: bool) -> list[str]:
    """Find garbage (see `find_garbage`) and, with `delete`, delete it. Return the lines of a table of the files."""
    garbage = [(kind, info) for kind, info in find_garbage(store, grace) if not delete or _remove(store, kind, info)]
    if not garbage:
        return ["nothing to delete"]
    rows = []
    for kind, info in garbage:
        where = info.path if kind == _INTERRUPTED else store.uri(info.path)
        rows.append((kind, megabytes(info.size), date_of(info.modified), where))
    files = "1 file" if len(rows) == 1 else f"{len(rows):,} files"
    done = "deleted" if delete else "to delete: run again with --delete"
    size = megabytes(sum(info.size for _, info in garbage))
    return [*aligned(("what", "MB", "written (UTC)", "where"), rows), f"{files}, {size} MB {done}"]
