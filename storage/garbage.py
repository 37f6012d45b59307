"""Garbage collection: what nothing names any more, by age, and tars with images that were withdrawn.

`vlbert catalog gc` lists or deletes it.
"""

from pathlib import Path

from storage.catalog import Catalog
from storage.inventory import TAR, Inventory, date_of, manifest_names, megabytes
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.snapshots import read_snapshot
from storage.tables import aligned
from storage.withdrawn import read_withdrawn

_INTERRUPTED = "interrupted put"  # a file of this machine; all else are objects


def find_garbage(store: ObjectStore, grace: float) -> list[tuple[str, ObjectInfo]]:
    """What may be deleted, each with its kind: nothing names it, and it is older than `grace` seconds by the storage's
    clock; and tars of earlier revisions with images that were withdrawn, however young.

    Tars that no manifest and no kept snapshot names, snapshots that no checkpoint pins and that are not the newest of
    their stage, and what interrupted puts left.
    """
    now = store.now()
    found = [(_INTERRUPTED, info) for info in store.leftovers()]
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
                found.append(("unpinned snapshot", info))
    found += [("orphan tar", info) for path, info in inventory.tars.items() if path not in named | withdrawn]
    images = [("withdrawn images", inventory.tars[tar]) for tar in sorted(withdrawn & inventory.tars.keys())]
    return images + [(what, info) for what, info in found if now - info.modified > grace]


def _tars_of_manifests(inventory: Inventory, since: float) -> tuple[set[str | None], set[str]]:
    """The tars that manifests name, and those of earlier revisions that hold images which were withdrawn.

    Snapshots that name one of the latter are read from the newest revision (storage/revised.py). since: a reader of the
    revision before one that is as young may be about to pin it.
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
            *earlier, newest = catalog.each(stage, manifest_names(revisions), ["url", "sha256", "status"])
            if young:
                named |= {one.tar for one in earlier}
            if withdrawn and not any(withdrawn.contains(newest.ok()).to_pylist()):
                with_images |= {one.tar for one in earlier if any(withdrawn.contains(one.ok()).to_pylist())} - {
                    newest.tar
                }
    return named, with_images


def _remove(store: ObjectStore, what: str, info: ObjectInfo) -> bool:
    """Delete something after another look; False if it stays, because it was written again or is named now."""
    if what == _INTERRUPTED:
        Path(info.path).unlink(missing_ok=True)
        return True
    if info not in store.list(info.path):  # deleted, or with a new date: a writer uses it now
        return False
    if (tar := TAR.fullmatch(info.path)) and _names(store, *tar.groups(), info.path):
        return False  # by a writer that paused for the whole grace time
    store.delete(info.path)
    return True


def _names(store: ObjectStore, dataset: str, stage: str, shard: str, path: str) -> bool:
    """Whether the manifest of the shard names this tar."""
    try:
        return Catalog(store, dataset).headers(stage, [shard])[shard].tar == path
    except ObjectMissing:
        return False


def collect_garbage(store: ObjectStore, grace: float, delete: bool) -> list[str]:
    """A line for each thing that may be deleted; with `delete` it is deleted, unless a last check finds it in use."""
    found = [(what, info) for what, info in find_garbage(store, grace) if not delete or _remove(store, what, info)]
    if not found:
        return ["nothing to delete"]
    rows = [
        (
            what,
            megabytes(info.size),
            date_of(info.modified),
            info.path if what == _INTERRUPTED else store.uri(info.path),
        )
        for what, info in found
    ]
    things = "1 thing" if len(rows) == 1 else f"{len(rows):,} things"
    done = "deleted" if delete else "to delete: run again with --delete"
    size = megabytes(sum(info.size for _, info in found))
    return [*aligned(("what", "MB", "written (UTC)", "where"), rows), f"{things}, {size} MB {done}"]
