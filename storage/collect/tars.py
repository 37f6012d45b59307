"""Import of WebDataset tars, such as img2dataset's: KEY.jpg (or another image) with KEY.txt, KEY.json or both.

The webdataset library groups the members into samples without reading their contents. A .txt or .json of more than
MAX_MEMBER bytes is refused. Only the position of an image is recorded, so that the image can be read later.
"""

import itertools
import math
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from storage.collect.lists import CAPTIONS, IMAGE_SUFFIXES, URLS, license_column, scalar
from storage.collect.rows import CaptionRow, Place, Reading
from storage.collect.statuses import Status
from storage.object_store import open_object, open_store
from storage.programs import require
from storage.safe_json import parse_json, printable, short_repr

MAX_MEMBER = 2**20  # maximum bytes of a .txt or .json in a tar
_END = 1024  # minimum bytes of zeros at the end of a tar
_ALL_IMAGES = (*IMAGE_SUFFIXES, ".tif", ".tiff", ".avif", ".heic", ".jxl", ".svg")  # also unsupported formats
_META = re.compile(r"__[^/]*__($|/)")  # members that webdataset skips
_Members = dict[str, tarfile.TarInfo]  # lower-case extension -> member of a sample


class TarSet:
    """All tars in a folder and its subfolders, or under `s3://bucket/prefix`."""

    def __init__(self, root: str):
        require("webdataset", "importing tars")
        if "://" not in root and not Path(root).is_dir():
            raise ValueError(f"{root} is not a folder; name a folder of tars, or s3://bucket/prefix")
        self._store = open_store(root, write=False)
        self._tars = [info for info in self._store.list() if info.path.endswith(".tar")]
        if not self._tars:
            raise ValueError(f"{root} contains no .tar file")

    @property
    def identity(self) -> list:
        """Name, size and date of each tar, used to detect changed tars."""
        return [[info.path, info.size, info.modified] for info in self._tars]

    def rows(self, reading: Reading) -> Iterator[CaptionRow]:
        """Yield the rows of all samples in all tars. Raises ValueError if a tar is damaged."""
        numbers = itertools.count()
        for tar in self._tars:
            with open_object(self._store, tar.path) as stream:
                for key, members in group_samples(stream, self._store.uri(tar.path)):
                    for fields in _make_rows(tar.path, _utf8(key), members, reading, stream):
                        yield CaptionRow(next(numbers), *fields)

    def read(self, places: Iterable[Place], limit: int) -> Iterator[tuple[Place, bytes]]:
        """Yield each place with the bytes of its image, in order. At most `limit` + 1 bytes of an image are read."""
        for tar, images in itertools.groupby(places, key=lambda place: place.tar):
            with open_object(self._store, tar) as stream:
                for place in images:
                    stream.seek(place.offset)
                    yield place, stream.read(min(place.size, limit + 1))


def group_samples(stream: BinaryIO, uri: str) -> Iterator[tuple[str, _Members]]:
    """Yield the key and the members of each sample in a tar, without reading the members' contents.

    Raises ValueError if the tar is compressed, truncated or damaged.
    """
    from webdataset.tariterators import group_by_keys

    files = ({"fname": member.name, "data": member, "__url__": uri} for member in _read_members(stream))
    try:
        for sample in group_by_keys(files):
            members = {name: value for name, value in sample.items() if isinstance(value, tarfile.TarInfo)}
            yield sample["__key__"], members
    except ValueError as error:
        raise ValueError(f"{uri} cannot be read: {printable(error.args[0])}; copy or write it again") from error


def _read_members(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=stream, mode="r:") as members:
            while (member := members.next()) is not None:
                members.members.clear()  # ty: ignore[missing-attribute] not in typeshed; it would grow with the tar
                if member.isreg() and not member.issparse() and not _META.match(member.name):
                    yield member
            end = members.offset
    except tarfile.TarError as error:
        raise ValueError(f"it is truncated, compressed or not a tar: {error}") from error
    stream.seek(end)
    blocks = iter(lambda: stream.read(1 << 20), b"")
    zeros = sum(len(block) if not any(block) else -math.inf for block in blocks)
    if zeros < _END:  # tarfile mistakes a damaged header, and the end of the file, for the end of the tar
        raise ValueError(f"it is damaged at byte {end} or ends early")


def _make_rows(tar: str, key: str, members: _Members, reading: Reading, stream: BinaryIO) -> Iterator[tuple]:
    """Yield the rows of one sample, each as a tuple of CaptionRow's fields after `row`.

    If the sample has an image in a supported format, there is one row, for the first such image. Otherwise there is a
    row for each image in another format or, if the sample has only text, one row without an image. If the sample has no
    URL, the path of the tar and the image's name (or the sample's key) are used instead.
    """
    url, text, extra, fault = None, "", None, ""
    try:
        fields = _read_fields(members, stream)
        names = reading.columns or _recognise(fields)
        url, text = (fields.get(name) for name in names[:2])
        if not isinstance(text, str):
            fault = "no caption" if text is None else f"{short_repr(names[1])} is {short_repr(text)}, not a string"
        extra = {name: scalar(fields.get(name), name) for name in names[2:]} or None
    except ValueError as error:
        fault = printable(error)
    image = next((member for extension, member in members.items() if f".{extension}" in IMAGE_SUFFIXES), None)
    unread = [_utf8(member.name) for member in members.values() if member.name.lower().endswith(_ALL_IMAGES)]

    def row(name: str, status: str, detail: str, place: Place | None = None) -> tuple:
        address = url if isinstance(url, str) else f"{tar}/{name}"
        return text if isinstance(text, str) else "", address, extra, "", status, detail, place

    if image is not None:
        status, detail = (Status.BAD_CAPTION, f"{key} of {tar}: {fault}") if fault else ("", "")
        yield row(_utf8(image.name), status, detail, Place(tar, image.offset_data, image.size))
    elif unread:
        for name in unread:
            yield row(name, Status.MISSING_FILE, f"{tar} has no image {key}; {name} is not read as an image")
    elif not members.keys().isdisjoint(("txt", "json")):
        yield row(key, Status.MISSING_FILE, f"{tar} has no image {key}")


def _read_fields(members: _Members, stream: BinaryIO) -> dict[str, Any]:
    """Return the fields of a sample's .json member, and its .txt member as `txt`. Raises ValueError for bad data."""
    fields = {}
    for extension in ("json", "txt"):
        if (member := members.get(extension)) is None:
            continue
        if member.size > MAX_MEMBER:
            raise ValueError(f".{extension} has {member.size} bytes, more than {MAX_MEMBER}")
        stream.seek(member.offset_data)
        data = stream.read(member.size)
        if extension == "json":
            fields |= parse_json(data, ".json")
        else:
            fields["txt"] = data.decode("utf-8-sig").rstrip("\r\n")
    return fields


def _recognise(fields: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the fields with the URL, the caption and the licence.

    The name of a missing URL or caption field is "". A missing licence field is left out.
    """
    by_lower = {name.lower(): name for name in fields}
    url, caption = (
        next((by_lower[name] for name in known if name in by_lower), "") for known in (URLS, ("txt", *CAPTIONS))
    )
    return url, caption, *license_column(fields)


def _utf8(name: str) -> str:
    """Escape the bytes in a member's name that are not valid UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
