"""Verification of a root: checks that files match their digests, and that the files they refer to exist."""

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

_READERS = 4  # files hashed in parallel
_Item = TypeVar("_Item")


def verify(inventory: Inventory) -> Iterator[str]:
    """Yield a message for each fault found in the manifests, tars, snapshots and withdrawal files of a root.

    All these files are read. Checkpoints are checked as well, unless the inventory is limited to one dataset.
    """
    store = inventory.store
    folders = [path.removesuffix(f"/{STATE}") for path in inventory.states]
    yield from _check_each(lambda folder: _check_checkpoint(store, folder), folders)
    withdrawn = Withdrawn()
    try:
        withdrawn = read_withdrawn(store)
    except ValueError as error:
        yield str(error)
    checker = _Checker(inventory, withdrawn)
    for (dataset, stage), shards in sorted(inventory.manifests.items()):
        yield from _check_each(lambda shard: checker.check_shard(dataset, stage, shard), sorted(shards))  # noqa: B023
    for (dataset, stage), infos in sorted(inventory.snapshots.items()):
        yield from _check_each(lambda info: checker.check_snapshot(dataset, stage, info), infos.values(), 1)  # noqa: B023


def _check_each(
    check: Callable[[_Item], Iterable[str]], items: Iterable[_Item], readers: int = _READERS
) -> Iterator[str]:
    """Run `check` on the items in parallel, and yield the faults in order. A missing or invalid file is a fault."""

    def find_faults(item: _Item) -> Iterator[str]:
        try:
            yield from check(item)
        except (ValueError, ObjectMissing, FileNotFoundError) as error:
            yield str(error)

    with ThreadPoolExecutor(readers) as pool:
        for faults in pool.map(lambda item: [*find_faults(item)], items):
            yield from faults


class _Checker:
    """Checks shards and snapshots, and remembers the tars and manifests that it has checked."""

    def __init__(self, inventory: Inventory, withdrawn: Withdrawn):
        self.inventory, self.store, self.withdrawn = inventory, inventory.store, withdrawn
        self._tars: set[str | None] = {None}
        # (dataset, stage, shard) -> sha256 of its revisions, or None if one is damaged
        self._manifests: dict[tuple[str, str, str], list[str] | None] = {}

    def check_shard(self, dataset: str, stage: str, shard: str) -> Iterator[str]:
        catalog, key = Catalog(self.store, dataset), (dataset, stage, shard)
        names = manifest_names(self.inventory.manifests[dataset, stage][shard])
        self._manifests[key] = None
        revisions = list(catalog.manifests(stage, names, ["url", "sha256", "status"]))
        self._manifests[key] = [manifest.sha256 for manifest in revisions]
        newest, uri = revisions[-1], catalog.uri(stage, names[-1])
        if any(self.withdrawn.contains(newest.ok()).to_pylist()):
            yield f"{uri} still has withdrawn images; run `vlbert withdraw` again with the same URLs"
        source = newest.meta.get("source", {})
        if "manifest_sha256" in source:
            digests = self._manifests.get((dataset, source["stage"], source["shard"]), [])
            if digests is not None and source["manifest_sha256"] not in digests:  # an earlier version is no fault
                yield f"{uri} was made from another version of {catalog.uri(source['stage'], source['shard'])}"
        if newest.tar:
            self._tars.add(newest.tar)
            if fault := _check_file(self.store, newest.tar, newest.tar_sha256):
                yield f"{self.store.uri(newest.tar)} {fault}; {uri} names it"

    def check_snapshot(self, dataset: str, stage: str, info: ObjectInfo) -> Iterator[str]:
        store, catalog, uri = self.store, Catalog(self.store, dataset), self.store.uri(info.path)
        _, shards = read_snapshot(store, info.path)
        if not has_valid_digest(store.get(info.path)):
            yield f"{uri} is damaged: its bytes have changed since it was written; restore it from a copy, or delete it"
            return
        for shard in shards:
            name = shard["manifest"]
            revisions = self.inventory.manifests[dataset, stage].get(shard_of(name))
            if not revisions:
                yield f"{catalog.uri(stage, name)} is missing; {uri} names it. Restore it, or run the stage"
            path = shard["tar"] and catalog.path(stage, shard["tar"])
            if path in self._tars:
                continue
            fault = _check_file(store, path, shard["tar_sha256"])
            # A missing tar is no fault if there is a newer revision to read the samples from: storage/revised.py.
            if fault and (store.exists(path) or not revisions or manifest_names(revisions)[-1] == name):
                yield f"{store.uri(path)} {fault}; {uri} names it"


def _check_file(store: ObjectStore, path: str, sha256: str) -> str | None:
    """Return what is wrong with a file that should have the given sha256, or None if it is intact."""
    try:
        with open_object(store, path) as stream:
            actual = sha256_of(stream)
    except (ObjectMissing, FileNotFoundError):
        return "is missing"
    except StorageUnreachable:
        raise
    except OSError as error:
        return f"cannot be read ({error})"
    return None if actual == sha256 else f"is damaged: its sha256 is {actual[:12]}..., not {sha256[:12]}..."


def _check_checkpoint(store: ObjectStore, path: str) -> Iterator[str]:
    """Yield the faults of a checkpoint's files. Yields nothing if the checkpoint was removed after it was listed."""
    try:
        files = read_state(store, path)["files"]
    except ObjectMissing:
        return
    for name, entry in sorted(files.items()):
        fault = _check_file(store, f"{path}/{name}", entry["sha256"])
        if fault and store.exists(f"{path}/{STATE}"):
            yield f"{store.uri(f'{path}/{name}')} {fault}; {hint(store, path)}"
