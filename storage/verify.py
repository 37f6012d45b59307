"""Verify: every committed file checked against its digest, and manifests, snapshots and sources against each other."""

import contextlib
import functools
import io
import mmap
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from storage.catalog import Catalog, sha256_of, temporary_folder
from storage.digests import is_whole
from storage.inventory import Inventory
from storage.manifests import Manifest
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore, Ranges, StorageUnreachable
from storage.runs import STATE, differing, file_hash, named_best, read_state, way_out
from storage.shards import Span, index_shard
from storage.snapshots import read_snapshot, shard_of
from storage.withdrawn import Withdrawn, read_withdrawn

_READERS = 4  # tars hashed at a time
_PIECE = 2**24  # bytes of a tar that are fetched at a time


def verify(inventory: Inventory) -> Iterator[str]:
    """Every fault of tars, manifests, sources and snapshots. Reads everything; all checkpoints, too, if the inventory
    is not that of one dataset."""
    store = inventory.store
    if inventory.dataset is None:
        yield from _faults_of_runs(inventory)
    withdrawn, tars = Withdrawn(), {}  # path of a manifest -> the tar that it names
    try:
        withdrawn = read_withdrawn(store)
    except ValueError as error:
        yield str(error)
    for (name, stage), found in sorted(inventory.manifests.items()):
        catalog = Catalog(store, name)

        def check(shard: str, catalog: Catalog = catalog, stage: str = stage) -> list[str]:
            faults = []
            try:
                catalog.revisions(stage, shard)  # an earlier one is checked, too
                manifest = catalog.manifest(stage, shard)
                tars[catalog.manifest_path(stage, manifest.name)] = manifest.tar
                faults.extend(_faults_of_shard(inventory, catalog, manifest, withdrawn))
            except (ValueError, ObjectMissing) as error:
                faults.append(str(error))
            return faults

        with ThreadPoolExecutor(_READERS) as pool:
            for faults in pool.map(check, sorted(found)):
                yield from faults
    for (name, stage), found in sorted(inventory.snapshots.items()):
        for info in found.values():
            try:
                yield from _faults_of_snapshot(Catalog(store, name), stage, info, tars)
            except (ValueError, ObjectMissing, FileNotFoundError) as error:
                yield str(error)


def _faults_of_shard(inventory: Inventory, catalog: Catalog, manifest: Manifest, withdrawn: Withdrawn) -> Iterator[str]:
    store, where = catalog.store, catalog.where(manifest.stage, manifest.name)
    table = manifest.table
    counted = dict(sorted(Counter(table["status"].to_pylist()).items()))
    if counted != manifest.statuses:
        yield f"{where} has rows {counted}, but its header counts {manifest.statuses}"
    ok = manifest.ok()
    if any(withdrawn.among(ok).to_pylist()):
        yield f"{where} has images that were withdrawn; type `vlbert withdraw` again, with the same URLs"
    source = manifest.meta.get("source", {})
    if "manifest_sha256" in source:
        with contextlib.suppress(ValueError):  # it is damaged, which is reported for its own shard
            revisions = catalog.revisions(source["stage"], source["shard"])  # an earlier one is pending, not a fault
            if source["manifest_sha256"] not in [one.sha256 for one in revisions]:
                yield (f"{where} was made from another {catalog.where(source['stage'], source['shard'])} than is there")
    if manifest.tar is None:
        if len(ok):
            yield f"{where} names no tar for {len(ok)} rows that are ok"
        return
    fault, spans = _check_tar(store, manifest.tar, manifest.tar_sha256)
    if fault:
        yield f"{store.where(manifest.tar)} {fault}, and {where} names it"
        return
    spans = [(span.key, span.offset, span.length) for span in spans]
    recorded = list(zip(*(ok[name].to_pylist() for name in ("key", "offset", "length")), strict=True))
    if recorded != spans:
        rows = ok["row"].to_pylist()
        wrong = [row for row, here, span in zip(rows, recorded, spans, strict=False) if here != span]
        yield (
            f"{where}: {len(recorded)} rows are ok, its tar has {len(spans)} samples; "
            f"{f'row {wrong[0]} is the first of {len(wrong)} that differ' if wrong else 'the others are equal'}"
        )


def _faults_of_runs(inventory: Inventory) -> Iterator[str]:
    store = inventory.store
    folders = [path.removesuffix(f"/{STATE}") for steps in inventory.states.values() for path in steps.values()]
    with ThreadPoolExecutor(_READERS) as pool:
        for faults in pool.map(lambda path: list(_faults_of_checkpoint(store, path)), sorted(folders)):
            yield from faults
    for run, path in sorted(inventory.bests.items()):
        try:
            best = named_best(store, run)
            if best and not store.exists(f"{best.checkpoint}/{STATE}"):
                yield (
                    f"{store.where(path)} names {store.where(best.checkpoint)}, which is not a complete checkpoint; "
                    f"put it back, or delete {store.where(path)}"
                )
        except ValueError as error:
            yield str(error)


def _faults_of_checkpoint(store: ObjectStore, path: str) -> Iterator[str]:
    """Faults of the files of a checkpoint; none if a training has removed it since the listing."""
    try:
        state = read_state(store, path)
        found = {info.path.removeprefix(f"{path}/"): info for info in store.list(f"{path}/")}
        for name, wanted in sorted(state["files"].items()):
            if name not in found:
                fault = "is gone"
            elif found[name].size != wanted["bytes"]:
                fault = differing({"bytes": found[name].size}, wanted)
            elif (hashed := _hash_of(store, f"{path}/{name}")) != wanted:
                fault = differing(hashed, wanted)
            else:
                continue
            if not store.exists(f"{path}/{STATE}"):
                return
            yield f"{store.where(f'{path}/{name}')} {fault}; {way_out(store, path)}"
    except ObjectMissing:
        return
    except ValueError as error:
        yield str(error)


def _hash_of(store: ObjectStore, path: str) -> dict[str, Any]:
    """Return bytes and sha256 of an object, which is read in pieces."""
    return file_hash(iter(functools.partial(Ranges(store, path).read, _PIECE), b""))


@contextlib.contextmanager
def _as_file(store: ObjectStore, path: str) -> Iterator[Path]:
    """The object as a file of this machine: a temporary copy if it is in a bucket."""
    local = store.local_path(path)
    if local is not None:
        yield local
        return
    with temporary_folder("verify-") as folder:
        with (folder / "copy").open("xb") as copy, io.BufferedReader(Ranges(store, path), _PIECE) as object_:
            shutil.copyfileobj(object_, copy, _PIECE)
        yield folder / "copy"


def _faults_of_snapshot(
    catalog: Catalog, stage: str, info: ObjectInfo, tars: Mapping[str, str | None]
) -> Iterator[str]:
    """tars: path of each manifest that was checked, with its tar -> the tar."""
    store, where = catalog.store, catalog.store.where(info.path)
    _, shards = read_snapshot(store, info.path)
    with (
        _as_file(store, info.path) as file,
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        if not is_whole(data):
            yield f"{where} is damaged: its bytes differ from those that were written; put it back, or remove it"
            return
    newest = catalog.newest(stage)
    for one in shards:
        name, shard = one["manifest"], shard_of(one["manifest"])
        if shard not in newest:
            yield f"{catalog.where(stage, name)} is gone, and {where} names it; put it back, or run the stage"
        path = one["tar"] and catalog.path(stage, one["tar"])
        if path is None or tars.get(catalog.manifest_path(stage, name)) == path:
            continue
        fault, _ = _check_tar(store, path, one["tar_sha256"])
        # If it is gone, the samples are read from the newest revision: storage/revised.py.
        if fault and (store.exists(path) or newest.get(shard, name) == name):
            yield f"{store.where(path)} {fault}, and {where} names it"


def _check_tar(store: ObjectStore, path: str, sha256: str) -> tuple[str | None, list[Span]]:
    """What is wrong with a tar, and its samples if it is the one that was committed."""
    try:
        with _as_file(store, path) as file:
            found = sha256_of(file)
            if found == sha256:
                return None, index_shard(file)
            return f"is damaged: {file.stat().st_size} bytes of sha256 {found[:12]}..., not {sha256[:12]}...", []
    except (ObjectMissing, FileNotFoundError):
        return "is gone", []
    except StorageUnreachable:
        raise
    except OSError as error:
        return f"cannot be read ({error})", []
