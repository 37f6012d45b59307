"""Copies of a bucket's tars in a folder of this machine, fetched in the background and shared by its trainings.

A file under a tar's own name is complete: its size and sha256 were checked before it got that name. A reader uses the
file if it exists, else the bucket.

In a random order every tar is equally likely to be read next, so replacing one by another gains nothing: the folder is
filled up to its limit and then stays. Only copies that no training has wanted for a day make room.
"""

import contextlib
import hashlib
import io
import os
import random
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from storage.catalog import SHARD_NAME
from storage.object_store import ObjectStore
from storage.snapshots import ShardIndex

_PIECE = 8 << 20  # bytes that are fetched and checked at a time
_PAUSE = 30.0  # seconds
_UNUSED = 86400.0  # seconds
# A copy, or the beginning of one. No other file is counted or removed.
_OURS = re.compile(rf"{SHARD_NAME.pattern}-[0-9a-f]{{12}}\.tar(\.[0-9a-f]{{8}}\.part)?")


class ShardCache:
    """The folder; limit: bytes of all tars in it. ValueError if it is the store's root, in it or above it."""

    def __init__(self, store: ObjectStore, folder: str | Path, limit: int):
        self.folder, self.limit = Path(folder).expanduser().absolute(), limit
        self._store = store
        self._copies = self.folder / hashlib.sha256(store.where().encode()).hexdigest()[:12]  # of this root
        self._wanted: dict[str, ShardIndex] = {}  # by folder of the tars; replaced, not changed
        self._news = threading.Event()
        self._refused = set()  # tars that are damaged in the bucket
        local = store.local_path("any")
        if local is not None:
            root, own = local.parent.resolve(), self.folder.resolve()
            if own.is_relative_to(root) or root.is_relative_to(own):
                raise ValueError(f"--data.cache={self.folder} is in the root {root} or above it; name another folder")

    def want(self, index: ShardIndex, stored: Mapping[str, int]) -> None:
        """Fill the folder with the tars of this snapshot from now on, beside those of other datasets; no more with
        those of an earlier snapshot of this one. Copies of tars that are not `stored` any more are removed."""
        stage = index.path.rpartition("/snapshots/")[0]
        for file in _ours((self._copies / stage).glob("*")):
            if f"{stage}/{file.name}" not in stored and file.suffix == ".tar":
                self.remove(f"{stage}/{file.name}")
        self._wanted = self._wanted | {stage: index}
        self._news.set()

    def open(self, tar: str, size: int) -> io.FileIO | None:
        """The copy of a tar, None if there is none; one of another size is removed."""
        try:
            file = open(self._copies / tar, "rb", buffering=0)  # noqa: SIM115  its reader keeps it open
            if os.fstat(file.fileno()).st_size == size:
                return file
        except OSError:
            return None  # no copy yet, or an unreadable one: the bucket has the tar
        file.close()
        self.remove(tar)
        return None

    def remove(self, tar: str) -> None:
        """Remove a copy, if the disk allows it; a wanted one is fetched again."""
        with contextlib.suppress(OSError):
            (self._copies / tar).unlink(missing_ok=True)

    def fill_in_background(self, log: Callable[[str], None] | None = None, pause: float = _PAUSE) -> None:
        """Fill the folder in a daemon thread.

        An error is logged once, until another one comes, and training goes on. pause: seconds between two checks for
        missing tars.
        """
        log = log or (lambda line: print(line, file=sys.stderr, flush=True))

        def keep_filling() -> None:
            logged = None
            while True:
                self._news.clear()
                try:
                    self.fill()
                except Exception as error:  # noqa: BLE001  whatever it is, training goes on without the copies
                    what = getattr(error, "strerror", None) or str(error)  # without the random name of a temporary file
                    if what != logged:
                        log(f"the shard cache {self.folder} is not filled, and reads go to the bucket: {error}")
                        logged = what
                self._news.wait(pause)

        threading.Thread(target=keep_filling, name="shard cache", daemon=True).start()

    def fill(self) -> None:
        """Fetch the missing tars that fit. ValueError names the last one that is damaged in the bucket."""
        indices, damaged = self._wanted, None
        columns = [(index.tars, index.tar_sha256, index.tar_bytes) for index in indices.values()]
        wanted = {tar: (sha256, size) for each in columns for tar, sha256, size in zip(*each, strict=True) if size}
        self.folder.mkdir(parents=True, exist_ok=True)
        missing = []
        for tar in wanted:
            try:
                os.utime(self._copies / tar)
            except FileNotFoundError:
                missing.append(tar)
        random.shuffle(missing)  # two trainings that fill the folder at a time do not fetch the same
        for tar in missing:
            if indices is not self._wanted:
                break  # the next call fetches the tars of the new snapshot
            sha256, size = wanted[tar]
            if tar not in self._refused and not (self._copies / tar).exists() and self._make_room(size):
                try:
                    self._fetch(tar, sha256, size)
                except ValueError as error:
                    self._refused.add(tar)
                    damaged = error
        if damaged:
            raise damaged

    def _make_room(self, size: int) -> bool:
        """Whether so many bytes fit, after unused tars were removed: only if that is enough, the oldest first."""
        found = _ours(self.folder.rglob("*"))
        used = sum(status.st_size for status in found.values())
        missing = size - min(self.limit - used, shutil.disk_usage(self.folder).free)
        unused = [file for file, status in found.items() if time.time() - status.st_mtime > _UNUSED]
        unused.sort(key=lambda file: found[file].st_mtime)
        if missing > sum(found[file].st_size for file in unused):
            return False  # a smaller tar may fit
        for file in unused:
            if missing > 0:
                file.unlink(missing_ok=True)
                missing -= found[file].st_size
        return True

    def _fetch(self, tar: str, sha256: str, size: int) -> None:
        file, digest = self._copies / tar, hashlib.sha256()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
        try:
            with temporary.open("xb") as out:
                for offset in range(0, size, _PIECE):
                    piece = self._store.get_range(tar, offset, min(_PIECE, size - offset))
                    digest.update(piece)
                    out.write(piece)
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != sha256:
                raise ValueError(
                    f"{self._store.where(tar)} is damaged: its sha256 is {digest.hexdigest()[:12]}...; delete its "
                    "manifest and run its stage again"
                )
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def _ours(files: Iterable[Path]) -> dict[Path, os.stat_result]:
    """Those of these files that a cache made."""
    found = {}
    for file in files:
        if _OURS.fullmatch(file.name):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found[file] = file.stat()
    return found
