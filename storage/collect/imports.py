"""Import of local images: files in a folder, and members of tars (storage/collect/tars.py)."""

import contextlib
import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage.collect.download import Outcome, spool_image, with_outcome
from storage.collect.fetch import DownloadSettings
from storage.collect.normalise import resource_error_hint
from storage.collect.rows import CaptionRow, Place
from storage.collect.spool import Spool
from storage.collect.statuses import Refused, Status

_BATCH = 64  # images in memory at a time


def read_folder(folder: Path, names: Iterable[str], limit: int) -> Iterator[tuple[str, bytes | Refused]]:
    """Yield each name with at most `limit` + 1 bytes of its file.

    If a name leads out of the folder, or its file is unreadable or not a regular file, yield Refused (`missing_file`)
    instead of the bytes. Raises OSError if this machine has run out of file descriptors or memory.
    """
    for name in names:
        path = Path(name)
        try:
            if path.is_absolute() or ".." in path.parts:
                raise ValueError("it leads out of the folder")
            with open(find_file(folder, name), "rb") as file:
                yield name, file.read(limit + 1)
        except (OSError, ValueError) as error:  # a NUL byte in the name raises ValueError, too
            if resource_error_hint(error):
                raise
            yield name, Refused(Status.MISSING_FILE, f"there is no image {name[:200]!r} in {folder}: {error}")


def find_file(folder: Path, name: str) -> Path:
    """Return the path of a regular file. Its name may be in another Unicode form, as macOS and Linux write accents.

    Raises ValueError if there is no such file, with a hint if there is one without Windows' backslashes.
    """
    for path in (folder / name, *(folder / unicodedata.normalize(form, name) for form in ("NFC", "NFD"))):
        if path.is_file():
            return path
    hint = ""
    if "\\" in name:
        with contextlib.suppress(ValueError):
            file = find_file(folder, name.replace("\\", "/"))
            hint = f"; with / in place of the backslashes of Windows, it is {file}"
    raise ValueError(f"it does not exist, or is not a regular file{hint}")


def import_images(
    rows: Sequence[CaptionRow],
    images: Iterable[tuple[str | Place, bytes | Refused]],
    settings: DownloadSettings,
    spool: Spool,
) -> list[CaptionRow]:
    """Normalise images and write them to the spool. Return the rows with their images and statuses.

    `images` yields (place or file name, bytes or Refused) once for each image. Several rows may have the same image.
    """

    def store_image(image: tuple[str | Place, bytes | Refused]) -> Outcome:
        return image[1].bare() if isinstance(image[1], Refused) else spool_image(image[1], settings, spool)

    images, outcomes = iter(images), {}
    with ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode") as pool:
        while batch := list(itertools.islice(images, _BATCH)):
            outcomes |= zip((place for place, _ in batch), pool.map(store_image, batch), strict=True)
    return [with_outcome(row, outcomes[row.place or row.url]) for row in rows]
