"""Images that were withdrawn: no snapshot and no collection takes their URLs any more.

    ROOT/forgotten/<16 hex>.json     a tombstone: URLs, and since when

A tombstone is put once and never changed. It holds for all datasets of the root, from the next snapshot on; the bytes
go with `vlbert catalog gc ROOT --delete` (storage/erase.py). To take a tombstone back, delete its file.
"""

import functools
import hashlib
import json
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from storage.digests import check_version
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.redact import shown_url
from storage.runs import read_sealed, sealed_json

TOMBSTONES = "forgotten"  # their folder in a root; no dataset has this name
FORGOTTEN = "forgotten"  # status of a row whose URL was withdrawn
TOMBSTONE_VERSION = 1
_READERS = 16


def forget(store: ObjectStore, urls: Iterable[str]) -> list[str]:
    """Leave a tombstone for those of these URLs that have none yet; returns them, sorted.

    ValueError names a URL that no list can hold.
    """
    wanted = {*urls}
    for url in wanted:
        if not url.strip() or "\n" in url or not _is_text(url):
            raise ValueError(f"{shown_url(url)!r} is not a URL: give each as it stands in the list")
    new = sorted(wanted - forgotten_urls(store))
    if new:
        name = hashlib.sha256(json.dumps(new).encode()).hexdigest()[:16]
        since = datetime.now(UTC).isoformat(timespec="seconds")
        tombstone = {"version": TOMBSTONE_VERSION, "since": since, "urls": new}
        store.put(f"{TOMBSTONES}/{name}.json", sealed_json(tombstone), if_absent=True)
    return new


def forgotten_urls(store: ObjectStore) -> frozenset[str]:
    """The URLs of all tombstones; one listing, and a request for each that this process has not read yet.

    ValueError names one that is damaged.
    """
    found = [info for info in store.list(f"{TOMBSTONES}/") if info.path.endswith(".json")]
    if not found:
        return frozenset()
    with ThreadPoolExecutor(_READERS) as pool:
        return frozenset().union(*pool.map(functools.partial(_urls_of, store), found))


def _urls_of(store: ObjectStore, info: ObjectInfo) -> list[str]:
    try:
        return _read(store, info)
    except ObjectMissing:
        return []  # it was taken back since the listing


@functools.lru_cache(2**16)
def _read(store: ObjectStore, info: ObjectInfo) -> list[str]:
    path, where = info.path, store.where(info.path)
    try:
        tombstone = read_sealed(store.get(path), where)
    except ValueError as error:
        raise ValueError(f"{error}; put it back from a copy, or delete it and forget its URLs again") from error
    check_version(tombstone.get("version"), TOMBSTONE_VERSION, where)
    return tombstone["urls"]


def _is_text(url: str) -> bool:
    try:
        url.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_among(column: pa.ChunkedArray | pa.Array, urls: Collection[str]) -> pa.ChunkedArray | pa.Array:
    """For each URL of a column whether it is one of these."""
    return pc.is_in(column, value_set=pa.array(urls, pa.string()))
