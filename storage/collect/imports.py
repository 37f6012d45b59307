"""Images that lie here already become stored ones: files of a folder, and members of tars (storage/collect/tars.py)."""

import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from storage.collect.download import Download, Outcome, spooled
from storage.collect.fetch import DownloadSettings
from storage.collect.normalise import run_out
from storage.collect.rows import CaptionRow, Place
from storage.collect.spool import Spool
from storage.collect.statuses import Refused, Status

_WAITING = 64  # images that wait for a thread that decodes


def place_of(folder: Path, name: str) -> Place:
    """A file of a folder as it is now; ValueError if its name leads out of the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name[:200]!r} is not the name of a file in {folder}")
    try:
        status = (folder / path).stat()
    except OSError:
        return Place(name, 0, -1)
    return Place(name, 0, status.st_size if stat.S_ISREG(status.st_mode) else -1)


def read_folder(folder: Path, places: Iterable[Place], limit: int) -> Iterator[tuple[Place, bytes | Refused]]:
    """The bytes of these files; ValueError names one that has another size than when the rows were read.

    Refused: `too_big` over `limit` bytes, `missing_file` for all that cannot be read, also for a FIFO or a device.
    OSError if this machine has run out of files or memory.
    """
    for place in places:
        file = folder / place.file
        if place.size < 0:
            yield place, Refused(Status.MISSING_FILE, f"{file} is not there, or is not a regular file")
        elif place.size > limit:
            yield place, too_big(place.size, limit)
        else:
            try:
                with open(file, "rb") as opened:
                    data = opened.read(limit + 1)  # the file may have grown
            except OSError as error:
                if run_out(error):
                    raise
                yield place, Refused(Status.MISSING_FILE, f"{file}: {error.strerror}")
                continue
            if len(data) != place.size:
                raise ValueError(f"{file} has {len(data)} bytes, and had {place.size}")
            yield place, data


def too_big(size: int, limit: int) -> Refused:
    return Refused(Status.TOO_BIG, f"{size} bytes, more than {limit}")


def import_images(
    rows: Sequence[CaptionRow],
    images: Iterable[tuple[Place, bytes | Refused]],
    settings: DownloadSettings,
    spool: Spool,
) -> list[Download]:
    """The images of these rows as if they had been downloaded; one that several rows name is decoded once."""

    def outcome(found: Outcome | Future[Outcome]) -> Outcome:
        return found.result() if isinstance(found, Future) else found.bare() if isinstance(found, Refused) else found

    outcomes = {}
    with ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode") as pool:
        for number, (place, data) in enumerate(images, 1):
            is_read = not isinstance(data, Refused)
            outcomes[place] = pool.submit(spooled, data, settings, spool) if is_read else data
            if number % _WAITING == 0:
                outcomes = {place: outcome(found) for place, found in outcomes.items()}
    return [Download.of(row, outcome(outcomes[row.place])) for row in rows]
