"""A store that records what is asked of it."""

from collections.abc import Iterator
from pathlib import Path

from storage.object_store import Content, ObjectInfo, ObjectStore


class Recorded:
    """Real objects. `requests` lists what was asked of them, `ranges` has path, offset and length of their parts.

    remote: without files of this machine, as a bucket is.
    """

    def __init__(self, store: ObjectStore, remote: bool = False):
        self._store, self._remote = store, remote
        self.requests: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def local_path(self, path: str) -> Path | None:
        return None if self._remote else self._store.local_path(path)

    def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
        self.requests.append(f"put {path}")
        return self._store.put(path, data, if_absent=if_absent)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.requests.append(f"list {prefix}")
        return self._store.list(prefix)

    def get(self, path: str) -> bytes:
        self.requests.append(f"get {path}")
        return self._store.get(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        self.requests.append(f"range {path}")
        self.ranges.append((path, offset, length))
        return self._store.get_range(path, offset, length)
