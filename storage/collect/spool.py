"""Images of shards in progress: in a temporary file instead of in memory."""

import os
import tempfile
import threading
from dataclasses import dataclass

from storage.collect.normalise import NormalisedImage


@dataclass(frozen=True)
class SpooledImage:
    """A NormalisedImage whose bytes are in a Spool; `jpeg` reads them while the spool is open."""

    spool: "Spool"
    offset: int
    length: int
    width: int
    height: int
    sha256: str
    flags: tuple[str, ...]

    @property
    def jpeg(self) -> bytes:
        """The bytes of the JPEG."""
        return self.spool.read(self.offset, self.length)


class Spool:
    """A temporary file without a name, which ends with the process at the latest; a context manager.

    It is in TMPDIR and as large as the images of the shards in progress. Threads may share it.
    """

    def __init__(self) -> None:
        self._end = 0
        # Also held while the file is closed: a thread that is still decoding must not write into another file that gets
        # the same descriptor.
        self._lock = threading.Lock()

    def __enter__(self) -> "Spool":
        self._file = tempfile.TemporaryFile(prefix="images-", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._file.close()

    def write(self, image: NormalisedImage) -> SpooledImage:
        """Write the image's bytes; OSError names the folder if it is full."""
        left = memoryview(image.jpeg)
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
                    f"{error.strerror}: images are in {tempfile.gettempdir()} until their shard is committed; if it "
                    "is full, set TMPDIR to a folder with more space, or lower rows_per_shard",
                ) from error
        size = image.width, image.height
        return SpooledImage(self, offset, len(image.jpeg), *size, image.sha256, image.flags)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of one image; ValueError if the spool is closed."""
        with self._lock:
            data = os.pread(self._file.fileno(), length, offset)
        assert len(data) == length, f"{len(data)} of {length} bytes at {offset} of the spool"
        return data
