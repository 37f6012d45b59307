"""WebDataset tars of others: KEY.jpg (or another of IMAGE_SUFFIXES) beside KEY.txt, KEY.json or both.

Nothing says how many there are. The members of a sample are neighbours; an extension that repeats begins another one;
of two images the first is taken. All of it is untrusted: at most MAX_MEMBER bytes of a text are read.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

from storage.collect.download import Download, Outcome
from storage.collect.fetch import DownloadSettings
from storage.collect.imports import (
    SUCCESS,
    StoredRow,
    check_faults,
    decoded,
    downloads_of,
    open_stored,
    opened,
    too_big,
)
from storage.collect.lists import IMAGE_SUFFIXES, SHAPES, Reading, kept_names, license_column, scalar
from storage.collect.normalise import Refused
from storage.collect.spool import Spool
from storage.safe_json import parse_json, printable, shown

MAX_MEMBER = 2**20  # bytes of a .txt or .json in a tar
_BLOCK = 512
_SAMPLED = 100  # samples from which the members of a tar are recognised
_MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")  # WebDataset ends the key at the first dot of the name
_OTHER_IMAGE = re.compile(r"(^|\.)(jpe?g|png|gif|webp|bmp|tiff?|avif|hei[cf]|jxl|svg)$")


def end_fault(name: str, size: int, read: Callable[[int, int], bytes]) -> str:
    """Why a tar is not whole, by its last two blocks, which are zeros; "" if it is. read: from an offset, a length."""
    whole = size >= 2 * _BLOCK and size % _BLOCK == 0 and not any(read(size - 2 * _BLOCK, 2 * _BLOCK))
    packed = not whole and size > 1 and read(0, 2) == b"\x1f\x8b"
    return "" if whole else f"{name} is packed: unpack it" if packed else f"{name} ends early"


def members_of(stream: BinaryIO, where: str) -> Iterator[tarfile.TarInfo]:
    """The files of a tar, from where the stream is; ValueError names a tar that is torn or damaged."""
    try:
        with tarfile.open(fileobj=stream, mode="r:") as members:
            while (member := members.next()) is not None:
                members.members.clear()  # which would grow with the tar
                if member.isreg() and not member.issparse():
                    yield member
            end = members.offset
    except tarfile.TarError as error:
        raise ValueError(f"{where} is torn: {error}; copy or write it again") from error
    stream.seek(end)
    if any(any(block) for block in iter(lambda: stream.read(1 << 20), b"")):
        # tarfile takes a damaged header for the end
        raise ValueError(f"{where} is damaged at byte {end}; copy or write it again")


def content(stream: BinaryIO, member: tarfile.TarInfo, limit: int, where: str) -> bytes | Refused:
    """The bytes of a member; Refused if they are more than `limit`."""
    if member.size > limit:
        return too_big(member.size, limit)
    stream.seek(member.offset_data)
    data = stream.read(member.size)
    if len(data) < member.size:
        raise ValueError(f"{where} is torn: {member.name} ends early; copy or write it again")
    return data


class TarSet:
    """The tars below a folder or `s3://bucket/prefix` whose samples are an image beside .txt, .json or both."""

    def __init__(self, root: str):
        self._root, self._store = root, open_stored(root, "tars")

    def names(self) -> list[str]:
        """The tars, in order; ValueError if there is none, or lists those that end early."""
        found = {info.path: info.size for info in self._store.list()}
        tars = {path: size for path, size in found.items() if path.endswith(".tar")}
        if not tars:
            packed = next((f"; {path} is packed: unpack it" for path in found if ".tar." in path), "")
            raise ValueError(f"{self._root} holds no .tar{packed}")

        def fault(path: str, size: int) -> str:
            return end_fault(path, size, functools.partial(self._store.get_range, path))

        faults = {path: fault(path, size) for path, size in tars.items()}
        check_faults(self._root, faults, "copy them again, or move them")
        return list(tars)

    def find_reading(self, columns: Sequence[str] = ()) -> Reading:
        """Which members and which fields of .json hold URL, caption and what is kept, by the first samples.

        `columns`: of URL, caption and so on, as names of fields, `txt` for the .txt. ValueError if none is a caption.
        """
        tar = self.names()[0]
        fields, has_text = [], False
        with opened(self._store, tar) as stream:
            groups = itertools.groupby(members_of(stream, self._store.where(tar)), key=_numbered())
            for _, members in itertools.islice(groups, _SAMPLED):
                for member in members:
                    extension = _split(member)[1]
                    has_text |= extension == "txt"
                    if extension == "json" and member.size <= MAX_MEMBER:
                        with contextlib.suppress(ValueError):  # the row of a broken one gets a status
                            fields.append(parse_json(content(stream, member, MAX_MEMBER, tar), tar))
        names = dict.fromkeys(name for one in fields for name in one)
        if columns:
            missing = next((one for one in columns if one not in names and not (one == "txt" and has_text)), None)
            if missing is not None:
                listed = printable(", ".join([*names, *["txt"] * has_text]))[:500]
                raise ValueError(f"{self._store.where(tar)}: no .json has a field {shown(missing)}; there are {listed}")
            return Reading("webdataset", tuple(columns), (), 0)
        captions = ["txt"] if has_text else _known(names, {shape.caption for shape in SHAPES})
        urls = _known(names, {shape.url for shape in SHAPES})
        if len(captions) != 1 or len(urls) > 1:
            listed = printable(", ".join(names))[:500] or "no .json"
            raise ValueError(
                f"{self._store.where(tar)}: its first samples have no .txt, and {listed}; name the fields of URL and "
                "caption: columns=URL,CAPTION"
            )
        return Reading("webdataset", (*(urls or [""]), *captions, *license_column(kept_names(fields))), (), 0)

    def rows(self, reading: Reading) -> Iterator[tuple[str, Iterator[StoredRow]]]:
        """Each tar and its samples; their images are skipped."""
        for tar in self.names():
            yield tar, (row for row, _ in self._samples(tar, reading, 0, None))

    def import_rows(
        self,
        tar: str,
        offset: int,
        count: int,
        reading: Reading,
        first: int,
        duplicates: Mapping[int, int],
        settings: DownloadSettings,
        spool: Spool,
    ) -> tuple[list[StoredRow], list[Download]]:
        """The samples from byte `offset` of a tar on, the first of them row `first`, and a Download of each.

        duplicates: row -> the first row with the same URL and caption. ValueError if the tar is torn or damaged.
        """
        rows = []

        def images() -> Iterator[tuple[int, bytes | Refused]]:
            samples = self._samples(tar, reading, offset, settings.max_bytes)
            for number, (row, image) in enumerate(itertools.islice(samples, count), first):
                rows.append(row)
                if image is not None and number not in duplicates:
                    yield number, image

        outcomes = decoded(images(), settings, spool)

        def outcome(number: int, row: StoredRow) -> Outcome:
            return outcomes[number] if row.status == SUCCESS else Refused(row.status, row.error)

        return rows, downloads_of(rows, first, duplicates, outcome)

    def _samples(
        self, tar: str, reading: Reading, offset: int, limit: int | None
    ) -> Iterator[tuple[StoredRow, bytes | Refused | None]]:
        """Each sample from a byte of the tar on, with its image of at most `limit` bytes; None: images are skipped."""
        where = self._store.where(tar)
        with opened(self._store, tar) as stream:
            stream.seek(offset)
            for (_, key), group in itertools.groupby(members_of(stream, where), key=_numbered()):
                texts, image, data, begin, other = {}, None, None, -1, ""
                for member in group:
                    begin = member.offset if begin < 0 else begin
                    extension = _split(member)[1]
                    if extension in ("txt", "json"):
                        texts[extension] = content(stream, member, MAX_MEMBER, where)
                    elif f".{extension}" in IMAGE_SUFFIXES and image is None:
                        image = member
                        data = None if limit is None else content(stream, member, limit, where)
                    elif _OTHER_IMAGE.search(extension):
                        other = extension
                if key and (image or texts or other):
                    row = _row(tar, key, image, texts, reading, where, other)
                    yield dataclasses.replace(row, offset=begin), data if row.status == SUCCESS else None


def _known(names: Iterable[str], known: set[str]) -> list[str]:
    return [name for name in names if name.lower() in known]


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    """The key of a member's sample and the member's extension in small letters; two empty ones for other files."""
    match = _MEMBER.fullmatch(member.name)
    return (match[1], match[2].lower()) if match else ("", "")


def _numbered() -> Callable[[tarfile.TarInfo], tuple[int, str]]:
    """Number and key of a member's sample, for each member in turn: an extension that repeats begins another one."""
    number, last, extensions = 0, "", set()

    def sample(member: tarfile.TarInfo) -> tuple[int, str]:
        nonlocal number, last
        key, extension = _split(member)
        if key != last or extension in extensions:
            number += 1
            extensions.clear()
        extensions.add(extension)
        last = key
        return number, key

    return sample


def _row(
    tar: str,
    key: str,
    image: tarfile.TarInfo | None,
    texts: Mapping[str, bytes | Refused],
    reading: Reading,
    where: str,
    other: str,
) -> StoredRow:
    """The row of one sample. The URL is the image's name in the tar if none is stored; other: a member not read."""
    url, caption, *kept = reading.columns
    key, name = (_utf8(text) for text in (key, image.name if image else key))
    place, values, faults = f"{where}: {key}", {}, []
    for extension, text in texts.items():
        try:
            if isinstance(text, Refused):
                raise ValueError(text.detail)
            if extension == "txt":
                values["txt"] = text.decode("utf-8-sig").rstrip("\r\n")
            else:
                found = parse_json(text, "its text")
                values |= {one: found[one] for one in found if one != "txt"}
        except ValueError as error:
            if extension == "json" or caption == "txt":
                faults.append(f"{key}.{extension}: {printable(error)}")
    extra = {one: scalar(values.get(one), one, place) for one in kept} if kept else None
    address = values.get(url) if isinstance(values.get(url), str) else f"{tar}/{name}"
    text, status, fault = values.get(caption), SUCCESS, ""
    if image is None:
        rest = f"; .{_utf8(other)} is none that is read" if other else ""
        status, fault = "missing_file", f"{tar} has no image {key}{rest}"
    elif text is not None and not isinstance(text, str):
        status, fault = "bad_caption", f"{key}.json: {shown(caption)} is {shown(text)}, not a text"
    elif text is None:
        status, fault = "bad_caption", "; ".join(faults) or f"{tar} has no caption for {name}"
    text = text if isinstance(text, str) else ""
    return StoredRow(tar, key, text, address, status, fault, extra, size=image.size if image else None)


def _utf8(name: str) -> str:
    """Of a member's name, which need not be UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
