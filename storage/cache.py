"""Local copies of a bucket's tars, fetched in the background and shared by all training runs on this machine.

A copy gets the tar's name only after its sha256 has been checked, so every file with such a name is complete. Readers
use the copy if it exists, and the bucket otherwise.

Training reads tars in random order, so no tar is more useful in the cache than another. The folder is filled up to its
limit, and only copies that no run has used for a day are removed.
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

_PAUSE = 30.0  # seconds between two searches for missing tars
_UNUSED = 86400.0  # seconds
# A complete or partial copy. No other file is counted or removed.
_COPY_NAME = re.compile(rf"{SHARD_NAME.pattern}-[0-9a-f]{{12}}\.tar(\.[0-9a-f]{{8}}\.part)?")


class ShardCache:
    """A local folder with copies of tars, at most `limit` bytes in total.

    Raises ValueError if the folder is the store's root, contains it or is inside it.
    """

    def __init__(self, store: ObjectStore, folder: str | Path, limit: int):
        self.folder, self.limit = Path(folder).expanduser().absolute(), limit
        self._store = store
        self._copies = self.folder / hashlib.sha256(store.uri().encode()).hexdigest()[:12]  # of this root
        self._wanted: dict[str, tuple[str, int]] = {}  # path of a tar -> its sha256 and size in bytes
        local = store.local_path("any")
        if local is not None:
            root, own = local.parent.resolve(), self.folder.resolve()
            if own.is_relative_to(root) or root.is_relative_to(own):
                raise ValueError(f"--data.cache={self.folder} is inside or above the root {root}; use another folder")

    def set_snapshot(self, index: ShardIndex, stored: Collection[str]) -> None:
        """Set the snapshot whose tars `fill` copies. It replaces any earlier snapshot of the same dataset and stage.

        `stored` has the paths of the tars that exist in the bucket. Copies of other tars of this dataset and stage are
        deleted. Tars of other datasets and stages stay cached.
        """
        for file in (self._copies / index.folder).glob("*.tar"):
            if f"{index.folder}/{file.name}" not in stored:
                with contextlib.suppress(OSError):
                    file.unlink()
        others = {tar: facts for tar, facts in self._wanted.items() if tar.rpartition("/")[0] != index.folder}
        tars = zip(index.tars, index.tar_sha256, index.tar_bytes, strict=True)
        self._wanted = others | {tar: (sha256, size) for tar, sha256, size in tars if size}

    def open(self, tar: str) -> io.FileIO | None:
        """Open the local copy of a tar. Return None if it is missing or unreadable."""
        try:
            return open(self._copies / tar, "rb", buffering=0)
        except OSError:
            return None  # the caller reads the tar from the bucket

    def fill_in_background(self, pause: float = _PAUSE) -> None:
        """Call `fill` from a daemon thread every `pause` seconds. Errors are logged and do not stop training."""

        def keep_filling() -> None:
            logged = None
            while True:
                try:
                    self.fill()
                except Exception as error:  # noqa: BLE001  training continues without the copies after any error
                    reason = getattr(error, "strerror", None) or str(error)  # without a temporary file's random name
                    if reason != logged:
                        line = f"cannot fill the shard cache {self.folder}, so reads go to the bucket: {error}"
                        print(line, file=sys.stderr, flush=True)
                        logged = reason
                time.sleep(pause)

        threading.Thread(target=keep_filling, name="shard cache", daemon=True).start()

    def fill(self) -> None:
        """Copy each missing tar into the folder if it fits. Raises ValueError if a tar in the bucket is damaged."""
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = self._wanted
        missing = []
        for tar in wanted:
            try:
                os.utime(self._copies / tar)
            except FileNotFoundError:
                missing.append(tar)
        random.shuffle(missing)  # so that two training runs that fill the folder at once fetch different tars
        for tar in missing:
            if wanted is not self._wanted:
                break  # the next call fetches the tars of the new snapshot
            if not (self._copies / tar).exists() and self._make_room(wanted[tar][1]):
                self._fetch(tar, wanted[tar][0])

    def _make_room(self, size: int) -> bool:
        """Remove unused copies, oldest first, until `size` bytes fit. Return True if they fit."""
        copies = []
        for file in self.folder.rglob("*"):
            if _COPY_NAME.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    copies.append((file.stat().st_mtime, file.stat().st_size, file))
        room = min(self.limit - sum(size for _, size, _ in copies), shutil.disk_usage(self.folder).free)
        for modified, copy_size, file in sorted(copies):
            if room < size and time.time() - modified > _UNUSED:
                file.unlink(missing_ok=True)
                room += copy_size
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
            if (actual := sha256_of(temporary)) != sha256:
                self._wanted.pop(tar, None)  # do not try it again
                raise ValueError(
                    f"{self._store.uri(tar)} is damaged: its sha256 is {actual[:12]}...; delete its manifest and run "
                    "its stage again"
                )
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
