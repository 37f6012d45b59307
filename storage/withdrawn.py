"""Withdrawn images: URLs and hashes of images that no collection and no snapshot takes any more.

    ROOT/withdrawn/<16 hex>.json     URLs, sha256 of the bytes that were downloaded from them, and since when

A file is put once and never changed, and holds for all datasets of the root. Every commit of a shard leaves out what is
withdrawn (storage/catalog/commit.py). To take a withdrawal back, delete its file.
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

WITHDRAWN = "withdrawn"  # status of a row, and the folder in a root; no dataset has this name
WITHDRAWAL_VERSION = 2


@dataclass(frozen=True)
class Withdrawn:
    """All that is withdrawn: URLs as the lists have them, and sha256 (64 hex) of images as they were downloaded."""

    urls: frozenset[str] = frozenset()
    sha256: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.urls or self.sha256)

    def has(self, url: str, sha256: str) -> bool:
        return url in self.urls or sha256 in self.sha256

    def contains(self, rows: pa.Table) -> pa.ChunkedArray:
        """Whether each of these rows, with the columns url and sha256, is withdrawn."""
        return pc.or_(is_in(rows["url"], self.urls), is_in(rows["sha256"], self.sha256))


def withdraw(store: ObjectStore, urls: Iterable[str], sha256: Iterable[str] = ()) -> Withdrawn:
    """Withdraw these URLs and hashes; returns those that were not withdrawn before. ValueError names an invalid URL."""
    wanted, before = {*urls}, read_withdrawn(store)
    for url in wanted:
        if not url.strip() or "\n" in url or any("\ud800" <= letter <= "\udfff" for letter in url):
            raise ValueError(f"{display_url(url)!r} is not a URL: give each as it stands in the list")
    new = Withdrawn(frozenset(wanted - before.urls), frozenset(sha256) - before.sha256)
    if new:
        content = {"urls": sorted(new.urls), "sha256": sorted(new.sha256)}
        name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file = json_with_digest({"version": WITHDRAWAL_VERSION, "since": since, **content})
        store.put(f"{WITHDRAWN}/{name}.json", file, if_absent=True)
    return new


def read_withdrawn(store: ObjectStore) -> Withdrawn:
    """All withdrawals of a root; one listing, and a request for each file that this process has not read yet.

    ValueError names a file that is damaged.
    """
    found = Withdrawn()
    for info in store.list(f"{WITHDRAWN}/"):
        with contextlib.suppress(ObjectMissing):  # it was taken back since the listing
            one = _read(store, info)
            found = Withdrawn(found.urls | one.urls, found.sha256 | one.sha256)
    return found


@functools.lru_cache(2**16)
def _read(store: ObjectStore, info: ObjectInfo) -> Withdrawn:
    where = store.uri(info.path)
    try:
        content = read_checked_json(store.get(info.path), where)
    except ValueError as error:
        raise ValueError(f"{error}; put it back from a copy, or delete it and withdraw its URLs again") from error
    check_version(content.get("version"), WITHDRAWAL_VERSION, where)
    return Withdrawn(frozenset(content["urls"]), frozenset(content["sha256"]))


def is_in(column: pa.ChunkedArray | pa.Array, values: Iterable[str]) -> pa.ChunkedArray | pa.Array:
    """Whether each value of a column is one of these."""
    return pc.is_in(column, value_set=pa.array(values, pa.string()))
