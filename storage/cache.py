"""Copies of a bucket's tars in a folder of this machine, fetched in the background and shared by its trainings.

A file under a tar's own name is complete: its size and sha256 were checked before it got that name. A reader uses the
file if it exists, else the bucket. One process of the machine fills the folder.

In a random order every tar is equally likely to be read next, so replacing one by another gains nothing: the folder is
filled up to its limit and then stays. Only tars of other snapshots are removed.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from storage.catalog import SHARD_NAME
from storage.object_store import ObjectStore
from storage.snapshots import ShardIndex

_PIECE = 8 << 20  # bytes that are fetched and checked at a time
_PAUSE = 30.0  # seconds
_UNCHECKED, _COMING = ".unchecked-", ".coming-"  # prefixes of files that are, or may be, incomplete
_TAR = rf"{SHARD_NAME.pattern}-[0-9a-f]{{12}}\.tar"
_OURS = re.compile(rf"({_UNCHECKED})?{_TAR}|{_COMING}{_TAR}\.[0-9a-f]{{8}}")  # no other file is counted or removed
_MARKER = ".filler"  # marks a folder as a cache; locked by the process that fills it


class ShardCache:
    """The folder; limit: bytes of all tars in it.

    ValueError if the folder holds files and no marker, or is the store's root, in it or above it.
    """

    def __init__(self, store: ObjectStore, folder: str | Path, limit: int):
        self.folder, self.limit = Path(folder).expanduser().absolute(), limit
        self._store = store
        self._wanted: dict[str, ShardIndex] = {}  # by folder of the tars; replaced, not changed
        self._news = threading.Event()
        self._checked = set()  # tars whose copy this process has checked
        self._refused = set()  # tars that are damaged in the bucket
        self._lock: io.FileIO | None = None  # open while this process is the one that fills
        self._check_folder()

    def want(self, index: ShardIndex) -> None:
        """Fill the folder with the tars of this snapshot from now on, beside those of other datasets; no more with
        those of an earlier snapshot of this one. Copies of tars with forgotten samples are removed."""
        for tar in index.moved:
            self.remove(tar)
            self.remove(str(_unchecked(Path(tar))))
        self._wanted = self._wanted | {index.tars[0].rpartition("/")[0]: index}
        self._news.set()

    def open(self, tar: str, size: int) -> io.FileIO | None:
        """The copy of a tar, None if there is none; one of another size is removed."""
        try:
            file = open(self.folder / tar, "rb", buffering=0)  # noqa: SIM115  its reader keeps it open
            if os.fstat(file.fileno()).st_size == size:
                return file
        except OSError:
            return None  # no copy yet, or an unreadable one: the bucket has the tar
        file.close()
        self.remove(tar)
        return None

    def remove(self, tar: str) -> None:
        """Remove a copy, if the disk allows it; the filler fetches a wanted one again."""
        with contextlib.suppress(OSError):
            (self.folder / tar).unlink(missing_ok=True)

    def fill_in_background(self, log: Callable[[str], None] | None = None, pause: float = _PAUSE) -> None:
        """Fill the folder in a daemon thread, unless another process does.

        An error is logged once, until another one comes, and training goes on. pause: seconds between two checks for
        missing tars.
        """
        log = log or (lambda line: print(line, file=sys.stderr, flush=True))
        threading.Thread(target=self._keep_filling, args=(log, pause), name="shard cache", daemon=True).start()

    def _keep_filling(self, log: Callable[[str], None], pause: float) -> None:
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

    def fill(self) -> bool:
        """Check the copies, and fetch the missing tars that fit; False if another process fills this folder.

        A process that fills the folder does so until it ends. ValueError names the last tar that is damaged in the
        bucket, after all others were fetched.
        """
        if not self._locked():
            return False
        indices = self._wanted
        wanted = {
            tar: (sha256, size)
            for index in indices.values()
            for tar, sha256, size in zip(index.tars, index.tar_sha256, index.tar_bytes, strict=True)
            if size  # of others nothing is left
        }
        if not wanted:
            return True
        left = [tar for tar in wanted if tar not in self._checked]
        for tar in left:
            self._hide(tar)
        for tar in left:
            self._check(tar, wanted[tar][0])
        damaged, files = None, self._all()
        used = sum(status.st_size for status in files.values())
        others = [file for file in files if self._tar(file) not in wanted]
        others.sort(key=lambda file: files[file].st_mtime, reverse=True)  # the last one was used the longest ago
        for tar, (sha256, size) in wanted.items():
            if (self.folder / tar).exists() or tar in self._refused:
                continue
            missing = size - min(self.limit - used, self._free())
            if missing > sum(files[file].st_size for file in others):
                continue  # removing the others would not be enough; a smaller tar may fit
            while missing > 0:
                file = others.pop()
                file.unlink(missing_ok=True)
                used -= files[file].st_size
                missing -= files[file].st_size
            if self._free() < size:
                break  # a reader still has a removed file open; its space is free after that
            try:
                self._fetch(tar, sha256, size)
                used += size
            except ValueError as error:
                self._refused.add(tar)
                damaged = error
            if indices is not self._wanted:
                break  # the next call fetches the tars of the new snapshot
        if damaged:
            raise damaged
        return True

    def _locked(self) -> bool:
        """Whether this process fills the folder, or can begin to."""
        if self._lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / _MARKER, "ab", buffering=0)  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
            for file in self._all():
                if file.name.startswith(_COMING):  # its filler was killed
                    file.unlink(missing_ok=True)
        return True

    def _hide(self, tar: str) -> None:
        """Rename a copy of an earlier process until it is checked: the disk may have lost some of its bytes."""
        file = self.folder / tar
        if file.exists():
            os.utime(file)  # tars of other snapshots are removed in the order of their last use
            os.replace(file, _unchecked(file))

    def _check(self, tar: str, sha256: str) -> None:
        file = self.folder / tar
        if _unchecked(file).exists():
            with _unchecked(file).open("rb") as stream:
                same = hashlib.file_digest(stream, "sha256").hexdigest() == sha256
            if same:
                os.replace(_unchecked(file), file)
                self._checked.add(tar)
            else:
                _unchecked(file).unlink()

    def _fetch(self, tar: str, sha256: str, size: int) -> None:
        file, digest = self.folder / tar, hashlib.sha256()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{_COMING}{file.name}.{secrets.token_hex(4)}")
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
        self._checked.add(tar)

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _all(self) -> dict[Path, os.stat_result]:
        """The files that a cache made, complete or not."""
        found = {}
        for file in self.folder.rglob("*"):
            if _OURS.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):  # a reader has removed it
                    found[file] = file.stat()
        return found

    def _tar(self, file: Path) -> str:
        return str(file.with_name(file.name.removeprefix(_UNCHECKED)).relative_to(self.folder))

    def _check_folder(self) -> None:
        local = self._store.local_path("any")
        root = None if local is None else local.parent.resolve()
        folder = self.folder.resolve()
        if root is not None and (folder.is_relative_to(root) or root.is_relative_to(folder)):
            raise ValueError(f"data.cache={self.folder} is in the root {root} or above it; name an empty folder")
        try:
            found = {entry.name for entry in os.scandir(folder)}
        except OSError:
            return  # it does not exist yet, or the filler logs the error
        if found and _MARKER not in found:
            raise ValueError(f"data.cache={self.folder} holds other files than a cache's; name an empty folder")


def _unchecked(file: Path) -> Path:
    """The name of a copy that readers do not use yet."""
    return file.with_name(_UNCHECKED + file.name)
