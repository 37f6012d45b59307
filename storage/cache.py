"""Copies of a bucket's tars in a folder of this machine, fetched in the background and shared by its trainings.

A file under a tar's own name is complete: its sha256 was checked before it got that name. A reader uses the file if it
exists, else the bucket.

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
from collections.abc import Collection
from pathlib import Path

from storage.catalog import SHARD_NAME
from storage.digests import sha256_of
from storage.object_store import ObjectStore, open_object
from storage.snapshots import ShardIndex

_PAUSE = 30.0  # seconds between two looks for missing tars
_UNUSED = 86400.0  # seconds
# A copy, or the beginning of one. No other file is counted or removed.
_OURS = re.compile(rf"{SHARD_NAME.pattern}-[0-9a-f]{{12}}\.tar(\.[0-9a-f]{{8}}\.part)?")


class ShardCache:
    """The folder; limit: bytes of all tars in it. ValueError if it is the store's root, in it or above it."""

    def __init__(self, store: ObjectStore, folder: str | Path, limit: int):
        self.folder, self.limit = Path(folder).expanduser().absolute(), limit
        self._store = store
        self._copies = self.folder / hashlib.sha256(store.uri().encode()).hexdigest()[:12]  # of this root
        self._wanted: dict[str, tuple[str, int]] = {}  # path of a tar -> its sha256 and size
        local = store.local_path("any")
        if local is not None:
            root, own = local.parent.resolve(), self.folder.resolve()
            if own.is_relative_to(root) or root.is_relative_to(own):
                raise ValueError(f"--data.cache={self.folder} is in the root {root} or above it; name another folder")

    def want(self, index: ShardIndex, stored: Collection[str]) -> None:
        """Fill the folder with the tars of this snapshot from now on, beside those of other datasets; no more with
        those of an earlier snapshot of this one. Copies of tars that are not `stored` any more are removed."""
        for file in (self._copies / index.folder).glob("*.tar"):
            if f"{index.folder}/{file.name}" not in stored:
                with contextlib.suppress(OSError):
                    file.unlink()
        others = {tar: one for tar, one in self._wanted.items() if tar.rpartition("/")[0] != index.folder}
        tars = zip(index.tars, index.tar_sha256, index.tar_bytes, strict=True)
        self._wanted = others | {tar: (sha256, size) for tar, sha256, size in tars if size}

    def open(self, tar: str) -> io.FileIO | None:
        """The copy of a tar, None if there is none."""
        try:
            return open(self._copies / tar, "rb", buffering=0)
        except OSError:
            return None  # no copy yet, or an unreadable one: the bucket has the tar

    def fill_in_background(self, pause: float = _PAUSE) -> None:
        """Fill the folder in a daemon thread, and again each `pause` seconds; after an error training goes on."""

        def keep_filling() -> None:
            logged = None
            while True:
                try:
                    self.fill()
                except Exception as error:  # noqa: BLE001  whatever it is, training goes on without the copies
                    what = getattr(error, "strerror", None) or str(error)  # without the random name of a temporary file
                    if what != logged:
                        line = f"the shard cache {self.folder} is not filled, and reads go to the bucket: {error}"
                        print(line, file=sys.stderr, flush=True)
                        logged = what
                time.sleep(pause)

        threading.Thread(target=keep_filling, name="shard cache", daemon=True).start()

    def fill(self) -> None:
        """Fetch the missing tars that fit. ValueError names one that is damaged in the bucket, and is given up."""
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = self._wanted
        missing = []
        for tar in wanted:
            try:
                os.utime(self._copies / tar)
            except FileNotFoundError:
                missing.append(tar)
        random.shuffle(missing)  # two trainings that fill the folder at a time do not fetch the same
        for tar in missing:
            if wanted is not self._wanted:
                break  # the next call fetches the tars of the new snapshot
            if not (self._copies / tar).exists() and self._make_room(wanted[tar][1]):
                self._fetch(tar, wanted[tar][0])

    def _make_room(self, size: int) -> bool:
        """Remove unused copies, the oldest first, until so many bytes fit; whether they do."""
        found = []
        for file in self.folder.rglob("*"):
            if _OURS.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found.append((file.stat().st_mtime, file.stat().st_size, file))
        room = min(self.limit - sum(size for _, size, _ in found), shutil.disk_usage(self.folder).free)
        for modified, its_size, file in sorted(found):
            if room < size and time.time() - modified > _UNUSED:
                file.unlink(missing_ok=True)
                room += its_size
        return room >= size  # if not, a smaller tar may fit

    def _fetch(self, tar: str, sha256: str) -> None:
        file = self._copies / tar
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
        try:
            with open_object(self._store, tar) as stream, temporary.open("xb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
            if (found := sha256_of(temporary)) != sha256:
                self._wanted.pop(tar, None)
                raise ValueError(
                    f"{self._store.uri(tar)} is damaged: its sha256 is {found[:12]}...; delete its manifest and run "
                    "its stage again"
                )
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
