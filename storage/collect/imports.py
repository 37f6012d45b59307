"""What img2dataset.py and tars.py share: rows that others have stored, and how their images become ours."""

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from storage.collect.download import Download, Outcome, spooled
from storage.collect.fetch import DownloadSettings
from storage.collect.lists import CaptionRow, Extra
from storage.collect.normalise import Refused
from storage.collect.spool import Spool
from storage.object_store import ObjectStore, Ranges, open_store

SUCCESS = "success"
_READ_AHEAD = 4 * 2**20  # bytes of a file that are requested of a bucket at a time
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row of img2dataset's NNNNN.parquet, with its key and status (`success`, `failed_to_resize`, ...), or of a tar.

    A sample of a tar has the status `success` or one of STATUSES. offset: of the first member of the sample in the tar,
    or the number of the row in the shard. size: of an image in a tar, in bytes.
    """

    shard: str
    key: str
    caption: str
    url: str
    status: str
    error: str
    extra: Extra | None = None
    offset: int = 0
    size: int | None = None

    def line(self) -> bytes:
        """The identity of the row, for the digest of the shard's rows."""
        more = [one for one in (self.extra, self.size) if one is not None]
        return json.dumps([self.shard, self.key, self.caption, self.url, self.status, self.error, *more]).encode()


def open_stored(root: str, what: str) -> ObjectStore:
    """The folder or bucket that others have written; ValueError if it is neither."""
    if "://" not in root and not Path(root).is_dir():
        raise ValueError(f"{root} is not a folder; name one that holds {what}, or s3://bucket/prefix")
    return open_store(root, write=False)


@contextlib.contextmanager
def opened(store: ObjectStore, path: str) -> Iterator[BinaryIO]:
    """An object as a file that is read from here or there."""
    local = store.local_path(path)
    with local.open("rb") if local else io.BufferedReader(Ranges(store, path), _READ_AHEAD) as stream:
        yield stream


def check_faults(where: str, faults: Mapping[str, str], way_out: str) -> None:
    torn = [f"{name}: {fault}" for name, fault in faults.items() if fault]
    if torn:
        more = f"; and {len(torn) - 10} more" if len(torn) > 10 else ""
        raise ValueError(
            f"{where}: {len(torn)} of {len(faults)} shards cannot be imported ({'; '.join(torn[:10])}{more}). To go "
            f"on, {way_out} away and import the rest"
        )


def downloads_of(
    rows: Sequence[StoredRow],
    first: int,
    duplicates: Mapping[int, int],
    outcome: Callable[[int, StoredRow], Outcome],
) -> list[Download]:
    downloads = []
    for number, row in enumerate(rows, first):
        repeated = number in duplicates
        found = Refused("duplicate", f"of row {duplicates[number]}") if repeated else outcome(number, row)
        downloads.append(Download.of(CaptionRow(number, row.caption, row.url, row.extra), found))
    return downloads


def decoded(
    images: Iterable[tuple[_Key, bytes | Refused]], settings: DownloadSettings, spool: Spool
) -> dict[_Key, Outcome]:
    """Each image in its stored form, by its key."""

    def result(image: Outcome | Future[Outcome]) -> Outcome:
        return image.result() if isinstance(image, Future) else image

    found = {}
    with ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode") as pool:
        for number, (key, data) in enumerate(images, 1):
            found[key] = data if isinstance(data, Refused) else pool.submit(spooled, data, settings, spool)
            if number % 64 == 0:  # so that the images that wait for a thread stay few in memory
                found = {key: result(image) for key, image in found.items()}
    return {key: result(image) for key, image in found.items()}


def too_big(size: int, limit: int) -> Refused:
    return Refused("too_big", f"{size} bytes, more than {limit}")
