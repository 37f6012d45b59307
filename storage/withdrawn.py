"""Withdrawn images: URLs and hashes of images that new shards and snapshots must not contain.

    ROOT/withdrawn/<16 hex>.json     URLs, hashes of the bytes downloaded from them, and the time of the withdrawal

A file is written once, never changes, and applies to all datasets of the root. Every commit of a shard leaves out
withdrawn images (storage/catalog/commit.py). To undo a withdrawal, delete its file.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from storage.digests import check_version
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.redact import display_url
from storage.runs import json_with_digest, read_checked_json

WITHDRAWN = "withdrawn"  # status of a row, and folder of a root; not allowed as the name of a dataset
WITHDRAWAL_VERSION = 2


@dataclass(frozen=True)
class Withdrawn:
    """URLs and hashes of withdrawn images. An image is withdrawn if its URL or its hash is listed."""

    urls: frozenset[str] = frozenset()  # as in the caption lists
    sha256: frozenset[str] = frozenset()  # 64 hex digits, of the downloaded bytes

    def __bool__(self) -> bool:
        return bool(self.urls or self.sha256)

    def has(self, url: str, sha256: str) -> bool:
        return url in self.urls or sha256 in self.sha256

    def contains(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return a bool for each row of a table: True if its image is withdrawn, by its `url` or its `sha256`."""
        return pc.or_(is_in(rows["url"], self.urls), is_in(rows["sha256"], self.sha256))


def withdraw(store: ObjectStore, urls: Iterable[str], sha256: Iterable[str] = ()) -> Withdrawn:
    """Withdraw images by URL or hash. Return the new withdrawals. Raises ValueError for an invalid URL."""
    requested, before = {*urls}, read_withdrawn(store)
    for url in requested:
        if not url.strip() or "\n" in url or any("\ud800" <= letter <= "\udfff" for letter in url):
            raise ValueError(f"{display_url(url)!r} is not a URL: write each URL as in the caption list")
    new = Withdrawn(frozenset(requested - before.urls), frozenset(sha256) - before.sha256)
    if new:
        content = {"urls": sorted(new.urls), "sha256": sorted(new.sha256)}
        name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file = json_with_digest({"version": WITHDRAWAL_VERSION, "since": since, **content})
        store.put(f"{WITHDRAWN}/{name}.json", file, if_absent=True)
    return new


def read_withdrawn(store: ObjectStore) -> Withdrawn:
    """Read all withdrawals of a root. A process reads each file once. Raises ValueError if a file is damaged."""
    withdrawn = Withdrawn()
    for info in store.list(f"{WITHDRAWN}/"):
        with contextlib.suppress(ObjectMissing):  # undone since the listing
            new = _read(store, info)
            withdrawn = Withdrawn(withdrawn.urls | new.urls, withdrawn.sha256 | new.sha256)
    return withdrawn


@functools.lru_cache(2**16)
def _read(store: ObjectStore, info: ObjectInfo) -> Withdrawn:
    uri = store.uri(info.path)
    try:
        content = read_checked_json(store.get(info.path), uri)
    except ValueError as error:
        raise ValueError(f"{error}; put it back from a copy, or delete it and withdraw its URLs again") from error
    check_version(content.get("version"), WITHDRAWAL_VERSION, uri)
    return Withdrawn(frozenset(content["urls"]), frozenset(content["sha256"]))


def is_in(column: pa.ChunkedArray | pa.Array, values: Iterable[str]) -> pa.ChunkedArray | pa.Array:
    """Return a bool for each value of a column: True if it is in `values`."""
    return pc.is_in(column, value_set=pa.array(values, pa.string()))
