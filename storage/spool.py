"""Images that wait for their shard to be committed: in a temporary file instead of in memory, and safe from a kill."""

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

from storage.normalise import Picture
from storage.object_store import ObjectMissing, ObjectStore

PARTIAL = re.compile(r"([^/]+)/images/partial/(\d{5})-[0-9a-f]{12}-[0-9a-f]{16}\.parquet")
_SCHEMA = pa.schema(
    {
        "url": pa.string(),
        "image": pa.binary(),
        "width": pa.int32(),
        "height": pa.int32(),
        "sha256": pa.string(),
        "flags": pa.list_(pa.string()),
    }
)
_PORTION = 4 * 2**20  # bytes of images in one object


@dataclass(frozen=True)
class SpooledImage:
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

    def keep(self, picture: Picture) -> SpooledImage:
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
        return SpooledImage(self, offset, len(picture.image), *size, picture.sha256, picture.flags)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of one picture; ValueError where the spool is closed."""
        with self._lock:
            data = os.pread(self._file.fileno(), length, offset)
        assert len(data) == length, f"{len(data)} of {length} bytes at {offset} of the spool"
        return data


class PartialShard:
    """The images of a shard in progress, written down in the root now and then: what a rerun need not download.

    Each `save` makes objects `<dataset>/images/partial/<shard>-<settings>-<digest>.parquet` of what is new, so two
    collectors of one shard are not in each other's way. `settings` is the hash of the image settings, 12 hex digits.
    """

    def __init__(self, store: ObjectStore, dataset: str, shard: str, settings: str):
        self._store = store
        self._shard = f"{dataset}/images/partial/{shard}-"
        self._prefix = f"{self._shard}{settings}-"
        self._new: list[tuple[str, SpooledImage]] = []
        self._closed = False
        self._lock = threading.Lock()  # one thread saves while another closes

    def add(self, url: str, picture: SpooledImage) -> None:
        """An image that came, for the next `save`."""
        self._new.append((url, picture))

    def save(self) -> None:
        """Write down what came since the last time."""
        while self._new and not self._closed:
            with self._lock:
                if not self._closed:
                    self._save_portion()

    def _save_portion(self) -> None:
        count = size = 0
        while count < len(self._new) and size < _PORTION:
            size += self._new[count][1].length
            count += 1
        rows = [
            {name: url if name == "url" else getattr(picture, name) for name in _SCHEMA.names}
            for url, picture in self._new[:count]
        ]
        out = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), out, compression="none", use_dictionary=False)
        data = out.getvalue()
        self._store.put(f"{self._prefix}{hashlib.sha256(data).hexdigest()[:16]}.parquet", data)
        del self._new[:count]  # only now: where the storage was away, the next time tries it again

    def load(self, spool: Spool) -> dict[str, SpooledImage]:
        """What earlier runs wrote down, by URL; what is damaged is passed over, and downloaded again."""
        found = {}
        for info in list(self._store.list(self._prefix)):
            try:
                data = self._store.get(info.path)
            except ObjectMissing:
                continue  # somebody else has committed the shard
            if not info.path.endswith(f"-{hashlib.sha256(data).hexdigest()[:16]}.parquet"):
                continue
            for row in pq.read_table(io.BytesIO(data)).to_pylist():
                url, flags = row.pop("url"), tuple(row.pop("flags"))
                found[url] = spool.keep(Picture(**row, flags=flags))
        return found

    def close(self) -> None:
        """The shard is committed, by whomever: nothing of this is needed any more."""
        self._closed = True
        with self._lock:  # a portion on its way arrives before the list is made
            for info in list(self._store.list(self._shard)):
                self._store.delete(info.path)


def remove_partial(store: ObjectStore, dataset: str, committed: Container[str]) -> None:
    """Remove what is left of partial shards that are committed by now."""
    for info in list(store.list(f"{dataset}/images/partial/")):
        if (found := PARTIAL.fullmatch(info.path)) and found[2] in committed:
            store.delete(info.path)
