"""WebDataset tars of others, img2dataset's among them: KEY.jpg (or another image) beside KEY.txt, KEY.json or both.

The webdataset library groups the members into samples, their contents not read: of a text MAX_MEMBER bytes are read, of
an image only where it lies. A tar of img2dataset has a table beside it with the rows that it did not store.
"""

import contextlib
import io
import itertools
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from storage.collect.imports import too_big
from storage.collect.lists import IMAGE_SUFFIXES, SHAPES, Reading, license_column, named_errors, names_of, scalar
from storage.collect.rows import CaptionRow, Place
from storage.collect.statuses import Refused, Status
from storage.object_store import Ranges, open_store
from storage.programs import require
from storage.safe_json import parse_json, printable, shown

MAX_MEMBER = 2**20  # bytes of a .txt or .json in a tar
_BLOCK = 512
_SAMPLED = 100  # samples from which the members of a tar are recognised
_MOST_MEMBERS = 10_000  # of a sample; where a name has dots, all members of a tar may have one key
_READ_AHEAD = 4 * 2**20  # bytes of a tar that are requested of a bucket at a time
_BATCH = 1000  # rows of a table that are decoded at a time
_META = re.compile(r"__[^/]*__($|/)")  # members that webdataset skips
_LIKE_AN_IMAGE = re.compile(r"(^|\.)(jpe?g|png|gif|webp|bmp|tiff?|avif|hei[cf]|jxl|svg)$")
_TABLE = ("url", "key", "status", "error_message")  # columns of img2dataset's table
# Its error messages come from urllib, from sockets and from itself. The first pattern that matches decides.
_MEANINGS = (
    (r"infinite loop|redirect error", Status.TOO_MANY_REDIRECTS),
    (r"X-Robots-Tag", Status.X_ROBOTS_TAG),
    (r"timed out|timeout", Status.TIMEOUT),
    (r"name or service not known|nodename nor servname|getaddrinfo|no address assoc|name resolution", Status.DNS),
    (r"\bssl\b|certificate|tlsv1", Status.TLS),
    (r"incompleteread", Status.SHORT_BODY),
    (r"refused|reset by peer|aborted|no route|unreachable|remote end closed|broken pipe", Status.CONNECT),
    (r"unknown url type|no host given|control characters|invalid url|nonnumeric port", Status.BAD_URL),
    (r"too small|aspect ratio", Status.BAD_GEOMETRY),
    (r"decod|cannot identify|not an image", Status.NOT_IMAGE),
)
_Members = dict[str, tarfile.TarInfo]  # of a sample, by extension in small letters


class TarSet:
    """The tars below a folder or `s3://bucket/prefix`."""

    def __init__(self, root: str):
        require("webdataset", "importing tars")
        if "://" not in root and not Path(root).is_dir():
            raise ValueError(f"{root} is not a folder; name one that holds tars, or s3://bucket/prefix")
        self._root, self._store = root, open_store(root, write=False)
        self._files = {info.path: info for info in self._store.list() if info.path.endswith((".tar", ".parquet"))}
        self._tars = [path for path in self._files if path.endswith(".tar")]
        if not self._tars:
            packed = next(
                (f"; {one.path} is packed: unpack it" for one in self._store.list() if ".tar." in one.path), ""
            )
            raise ValueError(f"{root} holds no .tar{packed}")

    @property
    def identity(self) -> list:
        """What tells whether these are the same tars: their names, sizes and dates."""
        return [[info.path, info.size, info.modified] for info in self._files.values()]

    def find_reading(self, columns: Sequence[str] = ()) -> Reading:
        """Which members and which fields of .json hold URL, caption and what is kept, by the first samples.

        `columns`: of URL, caption and so on, as names of fields, `txt` for the .txt. ValueError if none is a caption.
        """
        tar, fields, has_text = self._tars[0], [], False
        self._check_ends()
        with self._opened(tar) as stream:
            for _, members in itertools.islice(samples_of(stream, self._store.where(tar)), _SAMPLED):
                has_text |= "txt" in members
                fields.append(_texts_of(members, stream, self._store.where(tar))[0])
        names, kept = names_of(fields)
        names = [name for name in names if name != "txt"]
        if columns:
            missing = next((one for one in columns if one not in names and not (one == "txt" and has_text)), None)
            if missing is not None:
                listed = printable(", ".join([*names, *["txt"] * has_text]))[:500]
                raise ValueError(f"{self._store.where(tar)}: no .json has a field {shown(missing)}; there are {listed}")
            return Reading("webdataset", tuple(columns))
        captions = ["txt"] if has_text else _known(names, {shape.caption for shape in SHAPES})
        urls = _known(names, {shape.url for shape in SHAPES})
        if len(captions) != 1 or len(urls) > 1:
            listed = printable(", ".join(names))[:500] or "no .json"
            raise ValueError(
                f"{self._store.where(tar)}: its first samples have no .txt, and {listed}; name the fields of URL and "
                "caption: --columns URL CAPTION"
            )
        return Reading("webdataset", (*(urls or [""]), *captions, *license_column(kept)))

    def rows(self, reading: Reading) -> Iterator[CaptionRow]:
        """A row for each image, for each sample without one, and for what img2dataset did not store.

        ValueError names a tar that is torn or damaged.
        """
        self._check_ends()
        for number, fields in enumerate(self._fields(reading)):
            yield CaptionRow(number, *fields)

    def _fields(self, reading: Reading) -> Iterator[tuple]:
        for tar in self._tars:
            keys, where = set(), self._store.where(tar)
            with self._opened(tar) as stream:
                for key, members in samples_of(stream, where):
                    keys.add(key)
                    yield from _fields_of(tar, key, members, reading, *_texts_of(members, stream, where))
            table = f"{tar.removesuffix('.tar')}.parquet"
            if table in self._files:
                with self._opened(table) as stream:
                    yield from _not_stored(stream, self._store.where(table), tar, keys, reading)

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

    def _check_ends(self) -> None:
        """ValueError lists the tars that are not whole, by their last two blocks, which are zeros."""
        faults = []
        for tar in self._tars:
            size = self._files[tar].size
            if size < 2 * _BLOCK or size % _BLOCK or any(self._store.get_range(tar, size - 2 * _BLOCK, 2 * _BLOCK)):
                packed = size > 1 and self._store.get_range(tar, 0, 2) == b"\x1f\x8b"
                faults.append(f"{tar} is packed: unpack it" if packed else f"{tar} ends early")
        if faults:
            more = f"; and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ValueError(
                f"{self._root}: {len(faults)} of {len(self._tars)} tars cannot be imported ({'; '.join(faults[:10])}"
                f"{more}). Write or copy them again, or move them away"
            )


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
    """The files of a tar; ValueError names a tar that is torn or damaged."""
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
    if any(any(block) for block in iter(lambda: stream.read(1 << 20), b"")):
        # tarfile takes a damaged header for the end
        raise ValueError(f"{where} is damaged at byte {end}; copy or write it again")


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


def _not_stored(stream: BinaryIO, where: str, tar: str, keys: set[str], reading: Reading) -> Iterator[tuple]:
    """The fields of the rows of img2dataset's table that its tar has no sample of; none of another table."""
    with named_errors(where), pq.ParquetFile(stream) as table:
        names = [name for name in (*_TABLE, "caption", *reading.columns[2:]) if name in table.schema_arrow.names]
        if not set(_TABLE) <= {*names}:
            return
        for batch in table.iter_batches(_BATCH, columns=list(dict.fromkeys(names)), use_threads=False):
            for line in batch.to_pylist():
                status, error = str(line["status"]), str(line["error_message"] or "")
                if line["key"] in keys:
                    continue
                ours = Status.MISSING_FILE if status == "success" else status_of(status, error)
                extra = {name: scalar(line.get(name), name) for name in reading.columns[2:]} or None
                detail = (
                    f"img2dataset: {status}: {error}" if error else f"img2dataset: {status}, but {tar} has no such key"
                )
                yield line.get("caption") or "", line["url"] or "", extra, "", ours, detail, None


def status_of(status: str, error: str) -> Status:
    """Our status of a row that img2dataset did not store."""
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, error, re.IGNORECASE):
            return meaning
    if code := re.search(r"HTTP Error (\d{3})", error):
        return Status.of_http(int(code[1]))
    return Status.NOT_IMAGE if status == "failed_to_resize" else Status.NOT_STORED


def _known(names: Iterable[str], known: set[str]) -> list[str]:
    return [name for name in names if name.lower() in known]


def _utf8(name: str) -> str:
    """Of a member's name, which need not be UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
