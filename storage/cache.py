"""Whole tars of a bucket in a folder of this machine, fetched in the background and shared by all that train on it.

A file under a tar's own name is whole: its size and sha256 were found right before it got that name. Whoever reads
looks whether the file is there, and asks the bucket where it is not. One process of the machine fills the folder.

In a full random order every tar is equally likely to be asked for next, so nothing is won by exchanging one for
another: the folder is filled up to its limit and then kept. Only tars of other snapshots make room.
"""

import fcntl
import hashlib
import io
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from storage.objects import Objects
from storage.snapshots import ShardIndex

_PIECE = 8 << 20  # bytes that are fetched and checked at a time
_PAUSE = 30.0  # seconds
_UNCHECKED, _COMING = ".unchecked-", ".coming-"  # what names of files begin with that are not whole, or may not be


class ShardCache:
    """The folder; limit: bytes that all files in it may take together."""

    def __init__(self, objects: Objects, index: ShardIndex, folder: str | Path, limit: int):
        self.folder, self.limit = Path(folder).expanduser().absolute(), limit
        self._objects, self._index = objects, index
        self._files = [str(self.folder / tar) for tar in index.tars]
        self._lock: io.FileIO | None = None  # open while this process is the one that fills
        self._refused = set()  # tars that the bucket holds otherwise than they were committed

    def open(self, tar: int) -> io.FileIO | None:
        """Tar number `tar` of the index, if it is here; one of a wrong size is removed."""
        try:
            file = open(self._files[tar], "rb", buffering=0)  # noqa: SIM115  its reader keeps it open
        except OSError:
            return None  # not yet here, and whatever else goes wrong with a copy: there is the bucket
        if os.fstat(file.fileno()).st_size == self._index.tar_bytes[tar]:
            return file
        file.close()
        self.remove(tar)
        return None

    def remove(self, tar: int) -> None:
        """Take away a file that was found damaged; the filler fetches it again."""
        Path(self._files[tar]).unlink(missing_ok=True)

    def fill_in_background(self, say: Callable[[str], None] | None = None, pause: float = _PAUSE) -> None:
        """Fill the folder, if no other process does, and keep it filled until this one ends, which waits for nothing.

        What goes wrong is said once and stops nobody. pause: seconds between two looks at what is missing.
        """
        say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        threading.Thread(target=self._keep_filling, args=(say, pause), name="shard cache", daemon=True).start()

    def _keep_filling(self, say: Callable[[str], None], pause: float) -> None:
        told = False
        while True:
            try:
                self.fill()
            except Exception as error:  # noqa: BLE001  whatever it is, training goes on without the copies
                if not told:
                    say(f"the shard cache {self.folder} is not filled, and reads go to the bucket: {error}")
                    told = True
            time.sleep(pause)

    def fill(self) -> bool:
        """Check what is here and fetch what is missing and fits; False: another process fills this folder.

        Whoever fills remains the one who does until its process ends. ValueError names the last tar that the bucket
        holds damaged, after all others.
        """
        if self._lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / ".filler", "ab", buffering=0)  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
            self._hide_what_was_left()
        damaged = None
        for tar in range(len(self._files)):
            self._check(tar)
        for tar, file in enumerate(self._files):
            if not os.path.exists(file) and tar not in self._refused and self._make_room(self._index.tar_bytes[tar]):
                try:
                    self._fetch(tar)
                except ValueError as error:
                    self._refused.add(tar)
                    damaged = error
        if damaged:
            raise damaged
        return True

    def _hide_what_was_left(self) -> None:
        """What earlier processes left is looked at before it is read again: a disk may have lost some of it."""
        for file in list(self._all()):
            if file.name.startswith(_COMING):
                file.unlink(missing_ok=True)
        for tar, file in enumerate(self._files):
            if os.path.exists(file):
                os.utime(file)  # tars of other snapshots go in the order in which they were last of use
                os.replace(file, self._hidden(tar))

    def _check(self, tar: int) -> None:
        hidden = self._hidden(tar)
        if hidden.exists():
            with hidden.open("rb") as stream:
                same = hashlib.file_digest(stream, "sha256").hexdigest() == self._index.tar_sha256[tar]
            if same:
                os.replace(hidden, self._files[tar])
            else:
                hidden.unlink()

    def _fetch(self, tar: int) -> None:
        name, size = self._index.tars[tar], self._index.tar_bytes[tar]
        file, digest = Path(self._files[tar]), hashlib.sha256()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{_COMING}{file.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as out:
                for offset in range(0, size, _PIECE):
                    piece = self._objects.get_range(name, offset, min(_PIECE, size - offset))
                    digest.update(piece)
                    out.write(piece)
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != self._index.tar_sha256[tar]:
                raise ValueError(
                    f"{self._objects.where(name)} is damaged: its sha256 is {digest.hexdigest()[:12]}...; delete its "
                    "manifest and run its stage again"
                )
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        """Whether `size` more bytes fit, if need be after removing tars of other snapshots, the oldest in use first."""
        own = set(self._files)
        files = [(file, file.stat()) for file in self._all()]
        free = min(self.limit - sum(status.st_size for _, status in files), shutil.disk_usage(self.folder).free)
        others = [(file, status) for file, status in files if str(file) not in own and not file.name.startswith(".")]
        if free + sum(status.st_size for _, status in others) < size:
            return False  # nothing would be won by it
        for file, status in sorted(others, key=lambda pair: pair[1].st_mtime):
            if free >= size:
                break
            file.unlink()
            free += status.st_size
        return free >= size

    def _hidden(self, tar: int) -> Path:
        file = Path(self._files[tar])
        return file.with_name(_UNCHECKED + file.name)

    def _all(self) -> Iterator[Path]:
        return (file for file in self.folder.rglob("*") if file.is_file() and file.name != ".filler")
