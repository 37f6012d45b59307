"""A temporary file that holds the images of a shard until the shard is committed, to save memory."""

import os
import tempfile
import threading
from dataclasses import dataclass

from storage.collect.normalise import NormalisedImage


@dataclass(frozen=True)
class SpooledImage:
    """A normalised image whose bytes are in a Spool."""

    spool: "Spool"
    offset: int
    length: int
    width: int
    height: int
    sha256: str
    flags: tuple[str, ...]

    @property
    def jpeg(self) -> bytes:
        """Bytes of the JPEG, read from the spool. Raises ValueError if the spool is closed."""
        return self.spool.read(self.offset, self.length)


class Spool:
    """Context manager that keeps normalised images in a temporary file in TMPDIR.

    The file has no name, so it disappears when the spool is closed or the process ends. Threads may share a spool.
    """

    def __init__(self) -> None:
        # Also held while the file is closed, because a thread that is still decoding must not write into another file
        # that gets the same descriptor.
        self._lock = threading.Lock()

    def __enter__(self) -> "Spool":
        self._file = tempfile.TemporaryFile(prefix="images-", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._file.close()

    def write(self, image: NormalisedImage) -> SpooledImage:
        """Write an image to the file. Raises OSError, naming the folder, if the disk is full."""
        left = memoryview(image.jpeg)
        with self._lock:
            offset = self._file.tell()  # the end, because pread does not move it
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror}: images are in {tempfile.gettempdir()} until their shard is committed; if it "
                    "is full, set TMPDIR to a folder with more space, or lower rows_per_shard",
                ) from error
        return SpooledImage(self, offset, len(image.jpeg), image.width, image.height, image.sha256, image.flags)

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes, starting at byte `offset`. Raises ValueError if the spool is closed."""
        with self._lock:
            data = os.pread(self._file.fileno(), length, offset)
        assert len(data) == length, f"{len(data)} of {length} bytes at {offset} of the spool"
        return data
