"""Verify: every committed file checked against its digest, and manifests, snapshots and sources against each other."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from storage.catalog import Catalog
from storage.digests import has_valid_digest, sha256_of
from storage.inventory import Inventory, manifest_names
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore, StorageUnreachable, open_object
from storage.runs import STATE, hint, read_state
from storage.snapshots import read_snapshot, shard_of
from storage.withdrawn import Withdrawn, read_withdrawn

_READERS = 4  # files hashed at a time
_Item = TypeVar("_Item")


def verify(inventory: Inventory) -> Iterator[str]:
    """Every fault of tars, manifests, sources and snapshots. Reads everything; all checkpoints, too, if the inventory
    is not that of one dataset."""
    store = inventory.store
    if inventory.dataset is None:
        folders = [path.removesuffix(f"/{STATE}") for steps in inventory.states.values() for path in steps.values()]
        yield from _each(lambda folder: _faults_of_checkpoint(store, folder), sorted(folders))
    withdrawn = Withdrawn()
    try:
        withdrawn = read_withdrawn(store)
    except ValueError as error:
        yield str(error)
    checked = _Checked(inventory, withdrawn)
    for (dataset, stage), shards in sorted(inventory.manifests.items()):
        yield from _each(lambda shard: checked.shard(dataset, stage, shard), sorted(shards))  # noqa: B023
    for (dataset, stage), found in sorted(inventory.snapshots.items()):
        yield from _each(lambda info: checked.snapshot(dataset, stage, info), found.values(), 1)  # noqa: B023


def _each(
    faults_of: Callable[[_Item], Iterable[str]], items: Iterable[_Item], readers: int = _READERS
) -> Iterator[str]:
    """The faults of each item, in order, several at a time. A file that is gone or invalid is one."""

    def check(item: _Item) -> list[str]:
        found = []
        try:
            for fault in faults_of(item):
                found.append(fault)
        except (ValueError, ObjectMissing, FileNotFoundError) as error:
            found.append(str(error))
        return found

    with ThreadPoolExecutor(readers) as pool:
        for faults in pool.map(check, items):
            yield from faults


class _Checked:
    """Checks shards and snapshots, and keeps of them what the checks of others need."""

    def __init__(self, inventory: Inventory, withdrawn: Withdrawn):
        self.inventory, self.store, self.withdrawn = inventory, inventory.store, withdrawn
        self._tars: set[str | None] = {None}
        # By dataset, stage and shard: the sha256 of its revisions; None where one is damaged.
        self._manifests: dict[tuple[str, str, str], list[str] | None] = {}

    def shard(self, dataset: str, stage: str, shard: str) -> Iterator[str]:
        catalog, place = Catalog(self.store, dataset), (dataset, stage, shard)
        names = manifest_names(self.inventory.manifests[dataset, stage][shard])
        self._manifests[place] = None
        revisions = list(catalog.each(stage, names, ["url", "sha256", "status"]))
        self._manifests[place] = [one.sha256 for one in revisions]
        newest, where = revisions[-1], catalog.uri(stage, names[-1])
        if any(self.withdrawn.contains(newest.ok()).to_pylist()):
            yield f"{where} has images that were withdrawn; type `vlbert withdraw` again, with the same URLs"
        source = newest.meta.get("source", {})
        if "manifest_sha256" in source:
            theirs = self._manifests.get((dataset, source["stage"], source["shard"]), [])
            if theirs is not None and source["manifest_sha256"] not in theirs:  # an earlier one is pending, not a fault
                yield f"{where} was made from another {catalog.uri(source['stage'], source['shard'])} than is there"
        if newest.tar:
            self._tars.add(newest.tar)
            if fault := _fault_of(self.store, newest.tar, newest.tar_sha256):
                yield f"{self.store.uri(newest.tar)} {fault}, and {where} names it"

    def snapshot(self, dataset: str, stage: str, info: ObjectInfo) -> Iterator[str]:
        store, catalog, where = self.store, Catalog(self.store, dataset), self.store.uri(info.path)
        _, shards = read_snapshot(store, info.path)
        if not has_valid_digest(store.get(info.path)):
            yield f"{where} is damaged: its bytes differ from those that were written; put it back, or remove it"
            return
        for one in shards:
            name, revisions = one["manifest"], self.inventory.manifests[dataset, stage].get(shard_of(one["manifest"]))
            if not revisions:
                yield f"{catalog.uri(stage, name)} is gone, and {where} names it; put it back, or run the stage"
            path = one["tar"] and catalog.path(stage, one["tar"])
            if path in self._tars:
                continue
            fault = _fault_of(store, path, one["tar_sha256"])
            # If it is gone, the samples are read from the newest revision: storage/revised.py.
            if fault and (store.exists(path) or not revisions or manifest_names(revisions)[-1] == name):
                yield f"{store.uri(path)} {fault}, and {where} names it"


def _fault_of(store: ObjectStore, path: str, sha256: str) -> str | None:
    """What is wrong with a file of this digest."""
    try:
        with open_object(store, path) as stream:
            found = sha256_of(stream)
    except (ObjectMissing, FileNotFoundError):
        return "is gone"
    except StorageUnreachable:
        raise
    except OSError as error:
        return f"cannot be read ({error})"
    return None if found == sha256 else f"is damaged: its sha256 is {found[:12]}..., not {sha256[:12]}..."


def _faults_of_checkpoint(store: ObjectStore, path: str) -> Iterator[str]:
    """Faults of the files of a checkpoint; none if a training has removed it since the listing."""
    try:
        files = read_state(store, path)["files"]
    except ObjectMissing:
        return
    for name, wanted in sorted(files.items()):
        fault = _fault_of(store, f"{path}/{name}", wanted["sha256"])
        if fault and store.exists(f"{path}/{STATE}"):
            yield f"{store.uri(f'{path}/{name}')} {fault}; {hint(store, path)}"
