"""Which rows of a file of features are those of an image."""

import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

_EXTENSION = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|json|npz)$", re.IGNORECASE)


def stem_of(name: str) -> str:
    """Return the last component of a path without the extension of an image, of JSON or of .npz."""
    return _EXTENSION.sub("", name.rsplit("/", 1)[-1])


def number_of(name: str) -> int | None:
    """Return the number at the end of a stem: 391895 of COCO_val2014_000000391895.jpg; None where there is none."""
    digits = re.search(r"(?<![0-9])[0-9]{1,100}$", stem_of(name))
    return int(digits[0]) if digits else None


def file_name_of(url: str) -> str:
    """Return the last component of a URL's path, without escapes and query."""
    return unquote(urlsplit(url).path).rsplit("/", 1)[-1]


class RowIndex:
    """The rows of an image, by `match` of ImportedFeatures. It is kept in memory: 200 bytes a row."""

    def __init__(self, names: Sequence[str], match: str):
        self._match = match
        self._first: dict[str | int, int] = {}
        self._second: dict[str | int, int] = {}
        of_name = {"file_name": stem_of, "number": number_of}.get(match, str)
        for row, name in enumerate(names):
            value = of_name(name)
            if value not in ("", None) and self._first.setdefault(value, row) != row:
                self._second.setdefault(value, row)

    def find(self, url: str, key: str) -> list[int]:
        """Return the rows of the image of this URL and key, two at most."""
        name = file_name_of(url)
        values = {"file_name": stem_of(name), "number": number_of(name), "url": url, "key": key}
        value = values[self._match]
        return [rows[value] for rows in (self._first, self._second) if value in rows]
