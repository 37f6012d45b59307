"""Garbage collection: what nothing names any more, by age, and tars with images that were withdrawn.

`vlbert catalog gc` lists or deletes it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.catalog import Catalog
from storage.claims import EXPIRY
from storage.inventory import MANIFEST, TAR, Inventory, date_of, megabytes
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.snapshots import read_snapshot
from storage.tables import aligned
from storage.withdrawn import read_withdrawn


@dataclass(frozen=True)
class Garbage:
    """Something that nothing names any more; modified in seconds since 1970, by the storage's clock.

    remove() checks again; False if it stays, because it was written again or is named now.
    """

    what: str
    where: str
    size: int
    modified: float
    remove: Callable[[], bool]


def find_garbage(store: ObjectStore, grace: float) -> list[Garbage]:
    """What may be deleted: nothing names it, and it is older than `grace` seconds by the storage's clock; and tars of
    earlier revisions with images that were withdrawn, however young.

    Tars that no manifest and no kept snapshot names, snapshots that no checkpoint pins and that are not the newest of
    their stage, claims of workers that are gone, and what interrupted puts left.
    """
    now = store.now()
    left = list(store.leftovers())
    inventory = Inventory(store)
    pinned = {(pin.dataset, pin.stage, pin.snapshot) for pin in inventory.pins()}
    found = [
        Garbage("interrupted put", str(file), status.st_size, status.st_mtime, functools.partial(_unlink, file))
        for file, status in left
    ]
    named = set()
    for (dataset, stage), manifests in inventory.manifests.items():
        catalog = Catalog(store, dataset)
        for shard, header in catalog.each_header(stage, sorted(manifests)):
            named.add(header.tar)
            if header.revision != int(MANIFEST.fullmatch(manifests[shard].path)[4] or 1):  # committed since the listing
                named |= {earlier.tar for earlier in catalog.revisions(stage, shard)}
    for dataset, stage, shard in inventory.replaced:
        # A reader of the revision before may be about to pin it.
        if now - inventory.manifests[dataset, stage][shard].modified <= grace:
            named |= {header.tar for header in Catalog(store, dataset).revisions(stage, shard)}
    for (dataset, stage), snapshots in inventory.snapshots.items():
        for name, info in snapshots.items():
            used = (dataset, stage, name) in pinned or name == inventory.newest(dataset, stage)
            if used or now - info.modified <= grace:
                _, shards = read_snapshot(store, info.path)
                named |= {f"{dataset}/{stage}/{shard['tar']}" for shard in shards if shard["tar"]}
            else:
                found.append(_object("unpinned snapshot", store, info))
    withdrawn = _withdrawn_tars(inventory)
    named |= withdrawn  # which are deleted for another reason
    found += [_object("orphan tar", store, info) for path, info in inventory.tars.items() if path not in named]
    claims = [info for infos in inventory.claims.values() for info in infos if now - info.modified > EXPIRY]
    found += [_object("dead claim", store, info) for info in claims]
    images = [_object("withdrawn images", store, inventory.tars[tar]) for tar in sorted(withdrawn)]
    return images + [one for one in found if now - one.modified > grace]


def _withdrawn_tars(inventory: Inventory) -> set[str]:
    """Tars of earlier revisions that hold images which were withdrawn. Snapshots that name one are read from the newest
    revision: storage/revised.py."""
    store = inventory.store
    withdrawn, found = read_withdrawn(store), set()
    for dataset, stage, shard in inventory.replaced if withdrawn else ():
        catalog = Catalog(store, dataset)
        names = [header.name for header in catalog.revisions(stage, shard)]
        *earlier, newest = catalog.each_manifest(stage, names)
        if not any(withdrawn.among(newest.ok()).to_pylist()):
            found |= {one.tar for one in earlier if any(withdrawn.among(one.ok()).to_pylist())} - {newest.tar}
    return found & inventory.tars.keys()


def _unlink(file: Path) -> bool:
    file.unlink(missing_ok=True)
    return True


def _object(what: str, store: ObjectStore, info: ObjectInfo) -> Garbage:
    def remove() -> bool:
        if info not in store.list(info.path):  # deleted, or with a new date: a writer uses it now
            return False
        if _named_by_a_manifest(store, info.path):  # by a writer that paused for the whole grace time
            return False
        store.delete(info.path)
        return True

    return Garbage(what, store.where(info.path), info.size, info.modified, remove)


def _named_by_a_manifest(store: ObjectStore, path: str) -> bool:
    tar = TAR.fullmatch(path)
    if tar is None:
        return False
    dataset, stage, shard = tar.groups()
    try:
        return Catalog(store, dataset).headers(stage, [shard])[shard].tar == path
    except ObjectMissing:
        return False


def collect_garbage(store: ObjectStore, grace: float, delete: bool) -> list[str]:
    """A line for each thing that may be deleted; with `delete` it is deleted, unless a last check finds it in use."""
    found = find_garbage(store, grace)
    rows, size = [], 0
    for one in found:
        if delete and not one.remove():
            continue
        rows.append((one.what, megabytes(one.size), date_of(one.modified), one.where))
        size += one.size
    if not rows:
        return ["nothing to delete"]
    things = "1 thing" if len(rows) == 1 else f"{len(rows):,} things"
    done = "deleted" if delete else "to delete: run again with --delete"
    return [*aligned(("what", "MB", "written (UTC)", "where"), rows), f"{things}, {megabytes(size)} MB {done}"]
