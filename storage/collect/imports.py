"""Images that lie here already become stored ones: files of a folder, and members of tars (storage/collect/tars.py)."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage.collect.download import Outcome, spooled, with_outcome
from storage.collect.fetch import DownloadSettings
from storage.collect.normalise import resource_error_hint
from storage.collect.rows import CaptionRow, Place
from storage.collect.spool import Spool
from storage.collect.statuses import Refused, Status

_WAITING = 64  # images that are in memory at a time


def read_folder(folder: Path, names: Iterable[str], limit: int) -> Iterator[tuple[str, bytes | Refused]]:
    """The bytes of these files, at most `limit` + 1 of each.

    Refused `missing_file` for a name that leads out of the folder, for a FIFO or a device, and for all that cannot be
    read. OSError if this machine has run out of files or memory.
    """
    for name in names:
        path = Path(name)
        try:
            if path.is_absolute() or ".." in path.parts:
                raise ValueError("it leads out of the folder")
            if not (folder / path).is_file():
                raise ValueError("it is not there, or is not a regular file")
            with open(folder / path, "rb") as file:
                yield name, file.read(limit + 1)
        except (OSError, ValueError) as error:  # ValueError also for a NUL byte
            if resource_error_hint(error):
                raise
            yield name, Refused(Status.MISSING_FILE, f"there is no image {name[:200]!r} in {folder}: {error}")


def import_images(
    rows: Sequence[CaptionRow],
    images: Iterable[tuple[str | Place, bytes | Refused]],
    settings: DownloadSettings,
    spool: Spool,
) -> list[CaptionRow]:
    """These rows with their images, found by place or name, as if downloaded; one that several name is decoded once."""

    def stored(image: tuple[str | Place, bytes | Refused]) -> Outcome:
        return image[1].bare() if isinstance(image[1], Refused) else spooled(image[1], settings, spool)

    images, outcomes = iter(images), {}
    with ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode") as pool:
        while batch := list(itertools.islice(images, _WAITING)):
            outcomes |= zip((place for place, _ in batch), pool.map(stored, batch), strict=True)
    return [with_outcome(row, outcomes[row.place or row.url]) for row in rows]
