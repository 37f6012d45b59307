"""Images of shards in progress: in a temporary file instead of in memory, and saved so that a kill loses few."""

import hashlib
import io
import os
import re
import tempfile
import threading
from collections.abc import Container
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from storage.collect.normalise import NormalisedImage
from storage.object_store import ObjectMissing, ObjectStore

PARTIAL = re.compile(r"([^/]+)/images/partial/(\d{5})-[0-9a-f]{12}-[0-9a-f]{16}\.parquet")
_SCHEMA = pa.schema(
    {
        "url": pa.string(),
        "jpeg": pa.binary(),
        "width": pa.int32(),
        "height": pa.int32(),
        "sha256": pa.string(),
        "flags": pa.list_(pa.string()),
    }
)
_OBJECT_BYTES = 4 * 2**20  # of images in one object


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


class PartialShard:
    """The images of a shard in progress, saved in the root from time to time: a rerun need not download them again.

    Each `save` writes new images to objects `<dataset>/images/partial/<shard>-<settings>-<digest>.parquet`, so two
    collectors of one shard do not overwrite each other. `settings` is the hash of the image settings, 12 hex digits.
    """

    def __init__(self, store: ObjectStore, dataset: str, shard: str, settings: str):
        self._store = store
        self._prefix = f"{dataset}/images/partial/{shard}-{settings}-"
        self._new: list[tuple[str, SpooledImage]] = []

    def add(self, url: str, image: SpooledImage) -> None:
        """A new image, for the next `save`."""
        self._new.append((url, image))

    def save(self) -> None:
        """Write the images that were added since the last time; in one thread at a time."""
        while self._new:
            count = size = 0
            while count < len(self._new) and size < _OBJECT_BYTES:
                size += self._new[count][1].length
                count += 1
            rows = [
                {name: url if name == "url" else getattr(image, name) for name in _SCHEMA.names}
                for url, image in self._new[:count]
            ]
            out = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), out, compression="none", use_dictionary=False)
            data = out.getvalue()
            self._store.put(f"{self._prefix}{hashlib.sha256(data).hexdigest()[:16]}.parquet", data)
            del self._new[:count]  # only now: if the storage was unreachable, the next save tries again

    def load(self, spool: Spool) -> dict[str, SpooledImage]:
        """The images that earlier runs saved, by URL. Damaged objects are skipped, and downloaded again."""
        found = {}
        for info in list(self._store.list(self._prefix)):
            try:
                data = self._store.get(info.path)
            except ObjectMissing:
                continue  # another collector has committed the shard
            if not info.path.endswith(f"-{hashlib.sha256(data).hexdigest()[:16]}.parquet"):
                continue
            for row in pq.read_table(io.BytesIO(data)).to_pylist():
                url, flags = row.pop("url"), tuple(row.pop("flags"))
                found[url] = spool.write(NormalisedImage(**row, flags=flags))
        return found


def remove_partial(store: ObjectStore, dataset: str, committed: Container[str]) -> None:
    """Remove the partial objects of shards that are committed by now."""
    for info in list(store.list(f"{dataset}/images/partial/")):
        if (found := PARTIAL.fullmatch(info.path)) and found[2] in committed:
            store.delete(info.path)
