"""Import of WebDataset tars, such as img2dataset's: KEY.jpg (or another image) with KEY.txt, KEY.json or both.

The webdataset library groups the members into samples without reading their contents. Hidden files and those of macOS
are skipped. A .txt or .json of more than MAX_MEMBER bytes is refused. Only the position of an image is recorded, so
that the image can be read later.
"""

import itertools
import math
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from storage.collect.lists import CAPTIONS, IMAGE_SUFFIXES, URLS, license_column, scalar, split_captions
from storage.collect.rows import CaptionRow, Place, Reading
from storage.collect.statuses import Status
from storage.object_store import open_object, open_store
from storage.programs import require
from storage.safe_json import parse_json, printable
from storage.signatures import START_BYTES, check_start

MAX_MEMBER = 2**20  # maximum bytes of a .txt or .json in a tar
_END = 1024  # minimum bytes of zeros at the end of a tar
# Members that webdataset skips, and hidden files and those that macOS adds.
_META = re.compile(r"__[^/]*__($|/)|(.*/)?(__MACOSX/|\.(?!\.?/)[^/]*($|/))")
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
            packed = next((f", but {info.path}: unpack it" for info in self._store.list() if ".tar." in info.path), "")
            raise ValueError(f"{root} contains no .tar file{packed}")

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

    check_start(uri, stream.read(START_BYTES), ("tar",))
    stream.seek(0)
    files = ({"fname": member.name, "data": member, "__url__": uri} for member in _read_members(stream))
    try:
        for sample in group_by_keys(files):
            members = {name: value for name, value in sample.items() if isinstance(value, tarfile.TarInfo)}
            yield from _split_sample(sample["__key__"], members)
    except ValueError as error:
        raise ValueError(f"{uri} cannot be read: {printable(error.args[0])}; copy or write it again") from error


def _split_sample(key: str, members: _Members) -> Iterator[tuple[str, _Members]]:
    """Yield the samples among members whose names are equal up to the first dot, which ends WebDataset's key.

    Names with more dots (22.01.png, 22.01.txt) are samples of their own if they have an image and a text, or if no
    image has the key alone. So 22.mask.png beside 22.png is none.
    """
    by_key: dict[str, _Members] = {key: {}}
    for name, member in members.items():
        more, _, extension = name.rpartition(".")
        by_key.setdefault(f"{key}.{more}" if more else key, {})[extension] = member
    has_image = {name: any(f".{part}" in IMAGE_SUFFIXES for part in group) for name, group in by_key.items()}
    has_text = {name: not group.keys().isdisjoint(("txt", "json")) for name, group in by_key.items()}
    alone = has_image.pop(key)
    dotted = [name for name, image in has_image.items() if image and (has_text[name] or not alone)]
    for name in dotted if dotted and not alone else (key, *dotted):
        yield name, by_key[name]


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

    If the sample has an image, there is a row for each of its captions. The lines of a .txt are captions, unless the
    whole text is in the .json. If the sample has only text, there is one row without an image. If it has no URL, the
    path of the tar and the image's name (or the sample's key) are used instead.
    """
    url, texts, extra, fault = None, [""], None, ""
    try:
        fields = _read_fields(members, stream)
        names = reading.columns or _recognise(fields)
        url, text = (fields.get(name) for name in names[:2])
        if text is None or text != text:  # NaN is a missing value
            fault = "no caption"
        else:
            texts = split_captions(text, names[1])
        if names[1] == "txt" and text not in [value for name, value in fields.items() if name != "txt"]:
            texts = [line.rstrip("\r") for text in texts for line in text.split("\n") if line.strip()] or [""]
        extra = {name: scalar(fields.get(name), name) for name in names[2:]} or None
    except ValueError as error:
        fault = printable(error)
    image = next((members[suffix[1:]] for suffix in IMAGE_SUFFIXES if suffix[1:] in members), None)
    name, place, status, detail = key, None, Status.MISSING_FILE, f"{tar} has no image {key}"
    if image is not None:
        name, place = _utf8(image.name), Place(tar, image.offset_data, image.size)
        status, detail = (Status.BAD_CAPTION, f"{key} of {tar}: {fault}") if fault else ("", "")
    if image is not None or not members.keys().isdisjoint(("txt", "json")):
        address = url if isinstance(url, str) else f"{tar}/{name}"
        for text in texts if image is not None else texts[:1]:
            yield text, address, extra, "", status, detail, place


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
