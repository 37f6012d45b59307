"""Images that wait for their shard to be committed, in a temporary file instead of in memory."""

import os
import tempfile
import threading
from dataclasses import dataclass

from storage.normalise import Picture


@dataclass(frozen=True)
class SpooledPicture:
    """A Picture whose bytes lie in a Spool; `image` reads them, as long as the spool is open."""

    spool: "Spool"
    offset: int
    length: int
    width: int
    height: int
    sha256: str
    flags: tuple[str, ...]

    @property
    def image(self) -> bytes:
        """The JPEG."""
        return self.spool.read(self.offset, self.length)


class Spool:
    """A temporary file without a name, which ends with the process at the latest; a context manager.

    It lies where TMPDIR says, and takes as much room as the images of the shards in progress. Threads may share it.
    """

    def __init__(self) -> None:
        self._end = 0
        # Also between a use of the file's number and its closing: a thread that is still decoding when the spool is
        # given up must not write into the next file that gets the number.
        self._lock = threading.Lock()

    def __enter__(self) -> "Spool":
        self._file = tempfile.TemporaryFile(prefix="images-", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._file.close()

    def keep(self, picture: Picture) -> SpooledPicture:
        """Write the picture's bytes down; OSError names the folder where there is no room for them."""
        left = memoryview(picture.image)
        with self._lock:
            offset = self._end
            try:
                while left:
                    written = os.pwrite(self._file.fileno(), left, self._end)
                    left = left[written:]
                    self._end += written
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror}: images wait in {tempfile.gettempdir()} until their shard is committed; where "
                    "it is full, set TMPDIR to a folder with more room, or lower rows_per_shard",
                ) from error
        size = picture.width, picture.height
        return SpooledPicture(self, offset, len(picture.image), *size, picture.sha256, picture.flags)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of one picture; ValueError where the spool is closed."""
        with self._lock:
            data = os.pread(self._file.fileno(), length, offset)
        assert len(data) == length, f"{len(data)} of {length} bytes at {offset} of the spool"
        return data
