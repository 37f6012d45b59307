"""WebDataset tars of others, img2dataset's among them: KEY.jpg (or another image) beside KEY.txt, KEY.json or both.

The webdataset library groups the members into samples, their contents not read: of a text MAX_MEMBER bytes are read, of
an image only where it lies.
"""

import contextlib
import io
import itertools
import math
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from storage.collect.imports import too_big
from storage.collect.lists import CAPTIONS, IMAGE_SUFFIXES, URLS, Reading, license_column, names_of, scalar
from storage.collect.rows import CaptionRow, Place
from storage.collect.statuses import Refused, Status
from storage.object_store import Ranges, open_store
from storage.programs import require
from storage.safe_json import parse_json, printable, shown

MAX_MEMBER = 2**20  # bytes of a .txt or .json in a tar
_END = 1024  # bytes of zeros at the end of a tar, at least
_SAMPLED = 100  # samples from which the members of a tar are recognised
_MOST_MEMBERS = 10_000  # of a sample; where a name has dots, all members of a tar may have one key
_READ_AHEAD = 4 * 2**20  # bytes of a tar that are requested of a bucket at a time
_META = re.compile(r"__[^/]*__($|/)")  # members that webdataset skips
_LIKE_AN_IMAGE = re.compile(r"(^|\.)(jpe?g|png|gif|webp|bmp|tiff?|avif|hei[cf]|jxl|svg)$")
_Members = dict[str, tarfile.TarInfo]  # of a sample, by extension in small letters


class TarSet:
    """The tars below a folder or `s3://bucket/prefix`."""

    def __init__(self, root: str):
        require("webdataset", "importing tars")
        if "://" not in root and not Path(root).is_dir():
            raise ValueError(f"{root} is not a folder; name one that holds tars, or s3://bucket/prefix")
        self._root, self._store = root, open_store(root, write=False)
        self._files = {info.path: info for info in self._store.list() if info.path.endswith(".tar")}
        self._tars = [*self._files]
        if not self._tars:
            raise ValueError(f"{root} holds no .tar")

    @property
    def identity(self) -> list:
        """What tells whether these are the same tars: their names, sizes and dates."""
        return [[info.path, info.size, info.modified] for info in self._files.values()]

    def find_reading(self, columns: Sequence[str] = ()) -> Reading:
        """Which members and which fields of .json hold URL, caption and what is kept, by the first samples.

        `columns`: of URL, caption and so on, as names of fields, `txt` for the .txt. ValueError if none is a caption.
        """
        where, fields = self._store.where(self._tars[0]), []
        with self._opened(self._tars[0]) as stream:
            for _, members in itertools.islice(samples_of(stream, where), _SAMPLED):
                fields.append(_texts_of(members, stream, where)[0])
        names, kept = names_of(fields)
        listed = printable(", ".join(names))[:500] or "no .txt and no .json"
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"{where}: no sample has a field {shown(missing[0])}; there are {listed}")
        captions = ["txt"] if "txt" in names else [name for name in names if name.lower() in CAPTIONS]
        urls = [name for name in names if name.lower() in URLS]
        if not columns and (len(captions) != 1 or len(urls) > 1):
            raise ValueError(
                f"{where}: its first samples have {listed}; name the fields of URL and caption: --columns URL CAPTION"
            )
        return Reading("webdataset", tuple(columns) or (*(urls or [""]), *captions, *license_column(kept)))

    def rows(self, reading: Reading) -> Iterator[CaptionRow]:
        """A row for each image, and for each sample without one; ValueError names a tar that is torn or damaged."""
        numbers = itertools.count()
        for tar in self._tars:
            where = self._store.where(tar)
            with self._opened(tar) as stream:
                for key, members in samples_of(stream, where):
                    for fields in _fields_of(tar, key, members, reading, *_texts_of(members, stream, where)):
                        yield CaptionRow(next(numbers), *fields)

    def read(self, places: Iterable[Place], limit: int) -> Iterator[tuple[Place, bytes | Refused]]:
        """The bytes of these images, in their order."""
        for tar, images in itertools.groupby(places, key=lambda place: place.file):
            with self._opened(tar) as stream:
                for place in images:
                    if place.size > limit:
                        yield place, too_big(place.size, limit)
                        continue
                    stream.seek(place.offset)
                    data = stream.read(place.size)
                    if len(data) < place.size:
                        raise ValueError(f"{self._store.where(tar)} is torn: it ends early; copy or write it again")
                    yield place, data

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[BinaryIO]:
        """A file that is read from here or there."""
        local = self._store.local_path(path)
        with local.open("rb") if local else io.BufferedReader(Ranges(self._store, path), _READ_AHEAD) as stream:
            yield stream


def samples_of(stream: BinaryIO, where: str) -> Iterator[tuple[str, _Members]]:
    """Key and members of each sample, as webdataset groups them, their contents not read.

    An extension that repeats begins another sample, at which webdataset itself ends.
    """
    require("webdataset", "importing tars")
    from webdataset.tariterators import base_plus_ext, group_by_keys

    def entries() -> Iterator[dict]:
        last, extensions = None, set()
        for member in _members(stream, where):
            key, extension = base_plus_ext(member.name)
            if key != last:
                extensions.clear()
            elif key and (extension.lower() in extensions or len(extensions) == _MOST_MEMBERS):
                extensions.clear()
                yield {}  # to webdataset, the end of a sample
            if key:
                last = key
                extensions.add(extension.lower())
                yield {"fname": member.name, "data": member, "__url__": where}

    for sample in group_by_keys(entries()):
        yield sample["__key__"], {name: one for name, one in sample.items() if isinstance(one, tarfile.TarInfo)}


def _members(stream: BinaryIO, where: str) -> Iterator[tarfile.TarInfo]:
    """The files of a tar; ValueError names one that is packed, torn or damaged."""
    if stream.read(2) == b"\x1f\x8b":
        raise ValueError(f"{where} is packed: unpack it")
    stream.seek(0)
    try:
        with tarfile.open(fileobj=stream, mode="r:") as members:
            while (member := members.next()) is not None:
                members.members.clear()  # which would grow with the tar
                if member.isreg() and not member.issparse() and not _META.match(member.name):
                    yield member
            end = members.offset
    except tarfile.TarError as error:
        raise ValueError(f"{where} is torn: {error}; copy or write it again") from error
    stream.seek(end)
    blocks = iter(lambda: stream.read(1 << 20), b"")
    zeros = sum(len(block) if not any(block) else -math.inf for block in blocks)
    if zeros < _END:  # tarfile takes a damaged header, and the end of the file, for the end of the tar
        raise ValueError(f"{where} is damaged at byte {end} or ends early; copy or write it again")


def _texts_of(members: _Members, stream: BinaryIO, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What KEY.json says, and KEY.txt as `txt`; and why one of the two is not read, by its extension."""
    values, faults = {}, {}
    for extension in ("json", "txt"):
        member = members.get(extension)
        if member is None:
            continue
        stream.seek(member.offset_data)
        data = stream.read(min(member.size, MAX_MEMBER))
        if len(data) < min(member.size, MAX_MEMBER):
            raise ValueError(f"{where} is torn: {member.name} ends early; copy or write it again")
        try:
            if member.size > MAX_MEMBER:
                raise ValueError(too_big(member.size, MAX_MEMBER).detail)
            if extension == "txt":
                values["txt"] = data.decode("utf-8-sig").rstrip("\r\n")
            else:
                values |= parse_json(data, "its text")
        except ValueError as error:
            faults[extension] = f"{_utf8(member.name)}: {printable(error)}"
    return values, faults


def _fields_of(
    tar: str, key: str, members: _Members, reading: Reading, values: dict[str, Any], faults: dict[str, str]
) -> Iterator[tuple]:
    """The fields of a sample's rows, as CaptionRow has them: of its first image, else of each image that is not read.

    The URL is the image's name in the tar if none is stored.
    """
    url, caption, *kept = reading.columns
    extra, text, status, detail = None, values.get(caption), "", ""
    try:
        extra = {name: scalar(values.get(name), name) for name in kept} if kept else None
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{shown(caption)} is {shown(text)}, not a text")
    except ValueError as error:
        status, detail = Status.BAD_CAPTION, f"{_utf8(key)}.json: {error}"
    if text is None:
        wanted = [fault for extension, fault in faults.items() if extension == "json" or caption == "txt"]
        status, detail = Status.BAD_CAPTION, "; ".join(wanted) or f"{tar} has no caption for {_utf8(key)}"
    text = text if isinstance(text, str) else ""

    def fields(name: str, status: str, detail: str, place: Place | None = None) -> tuple:
        address = values.get(url) if isinstance(values.get(url), str) else f"{tar}/{_utf8(name)}"
        return text, address, extra, "", status, detail, place

    image = next((one for extension, one in members.items() if f".{extension}" in IMAGE_SUFFIXES), None)
    unread = [one for extension, one in members.items() if _LIKE_AN_IMAGE.search(extension)]
    missing = f"{tar} has no image {_utf8(key)}"
    if image is not None:
        yield fields(image.name, status, detail, None if status else Place(tar, image.offset_data, image.size))
    elif unread:
        for one in unread:
            name = _utf8(one.name).removeprefix(_utf8(key))
            yield fields(one.name, Status.MISSING_FILE, f"{missing}; {name} is none that is read")
    elif values or faults:
        yield fields(key, Status.MISSING_FILE, missing)


def _utf8(name: str) -> str:
    """Of a member's name, which need not be UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
