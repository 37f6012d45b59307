"""What is collected: the settings of a dataset, and the shards that its list or folder makes.

Before the first download, `plan` checks every line of the list and cuts the list into parts, and `check_committed`
compares these with the shards that are committed.
"""

import dataclasses
import hashlib
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage.collect.download import STATUSES
from storage.collect.fetch import DownloadSettings
from storage.collect.img2dataset import Img2dataset
from storage.collect.imports import StoredRow
from storage.collect.lists import IMAGE_SUFFIXES, PLAIN, CaptionRow, ListFile, Reading, find_reading, parse_rows, where
from storage.collect.normalise import ImageSettings
from storage.collect.tars import TarSet
from storage.manifests import OK
from storage.sample import sample_key
from storage.settings import FORM, check, check_choices
from storage.withdrawn import WITHDRAWN

_LIKE_A_URL = re.compile(r"\s*https?://", re.IGNORECASE)
_FAILED = [status for status in STATUSES if status not in (OK, "duplicate", WITHDRAWN)]
_CLASSES = ("http_4xx", "http_5xx")


@dataclass(frozen=True)
class CollectSettings:
    """One dataset's images: where they come from, and how many make a shard."""

    __pydantic_config__ = FORM

    name: str
    """The dataset: the folder of the root that holds the shards."""
    captions: str | None = None
    """A caption list to download: TSV, CSV, JSON lines, Parquet, JSON, or .gz of one. With `images`, the captions of
    that folder. Give this, `images`, `img2dataset` or `webdataset`."""
    columns: tuple[str, ...] = ()
    """Which columns of the list hold the URL, the caption and, if more are named, what is kept with each sample: names,
    or places from 1 on. None: URL and caption are recognised."""
    images: str | None = None
    """A local folder of image files to import."""
    img2dataset: str | None = None
    """What img2dataset wrote, in its format webdataset, files, tfrecord or parquet: a folder, or s3://bucket/prefix."""
    webdataset: str | None = None
    """WebDataset tars of others to import: a local folder, or s3://bucket/prefix."""
    download: DownloadSettings = DownloadSettings()
    """How images are fetched, and which are stored in which form."""
    rows_per_shard: int = 1000
    """Rows of the list, or image files, that make one shard."""
    shards_per_task: int = 10
    """Shards that are collected, and tried again, together: in a flow, by one Prefect task."""
    commit_unreachable: bool = False
    """Commit a shard even if none of its hosts could be reached; set it only if these hosts are gone for good."""
    save_every: float = 20.0
    """Seconds between two saves of the images of shards in progress; a kill loses those since the last save."""
    retry_statuses: tuple[str, ...] = ()
    """Statuses (`timeout`, `dns`, `http_5xx`, ...) whose rows in committed shards are requested again, for one run."""

    def __post_init__(self):
        origins = (self.captions or self.images, self.img2dataset, self.webdataset)
        if sum(origin is not None for origin in origins) != 1:
            raise ValueError(
                f"Dataset {self.name}: set captions (a list to download) or images (a local folder; captions are then "
                "those of its files), or img2dataset (a folder that it wrote), or webdataset (tars)"
            )
        check_choices(self)
        for name in ("rows_per_shard", "shards_per_task"):
            check(self, getattr(self, name) >= 1, name, "at least 1")
        check(self, self.save_every > 0, "save_every", "over 0")
        check(
            self,
            self.is_download or not self.retry_statuses,
            "retry_statuses",
            "empty: nothing is requested of a server",
        )
        named = len(self.columns) == len(set(self.columns)) and len(self.columns) != 1
        check(self, named, "columns", "URL, caption and what is kept beside them, each once")
        check(self, not self.columns or self.origin != self.images, "columns", "empty where there is no list")
        self.retried_statuses  # noqa: B018  refuses an unknown status

    @property
    def retried_statuses(self) -> frozenset[str]:
        """The statuses that `retry_statuses` names; ValueError for an unknown one."""
        found = set()
        for name in self.retry_statuses:
            matching = {one for one in _FAILED if one == name or (name in _CLASSES and one.startswith(name[:6]))}
            if not matching:
                known = [one for one in _FAILED if not one[5:].isdecimal()] + [*_CLASSES, "http_404, ..."]
                raise ValueError(f"Dataset {self.name}: retry_statuses names {name!r}, must be of {', '.join(known)}")
            found |= matching
        return frozenset(found)

    @property
    def is_download(self) -> bool:
        """Whether images are requested from servers."""
        return self.captions is not None and self.images is None

    @property
    def origin(self) -> str:
        """The list, the folder or the bucket."""
        return self.captions or self.images or self.img2dataset or self.webdataset

    @property
    def list_file(self) -> Path:
        """The list; only where there is one."""
        assert self.captions is not None, self
        return Path(self.captions)


@dataclass(frozen=True)
class Part:
    """One shard to collect: rows [start, stop) of the list.

    source      file and sha256 of those rows
    reading     how the list or `file` is read; None for a folder without captions
    offset      of the first row in the list or the tar, in bytes; 0 for images; for img2dataset the row in `file`
    file        img2dataset's shard, or the tar, that holds the rows
    duplicates  (row, first row with the same URL and caption) for rows that repeat an earlier one of the list
    replaces    sha256 of the committed manifest if some of its rows are requested again; "" if it is not committed yet
    """

    shard: str
    start: int
    stop: int
    source: str
    reading: Reading | None = None
    offset: int = 0
    file: str = ""
    duplicates: tuple[tuple[int, int], ...] = ()
    replaces: str = ""

    @property
    def known_reading(self) -> Reading:
        """`reading`; not of a folder without captions."""
        assert self.reading is not None, self
        return self.reading


def plan(settings: CollectSettings, stops: Mapping[str, int]) -> list[Part]:
    """The shards of the dataset's list, in order; `stops`: where committed shards end, by shard.

    Every row is checked before the first download. ValueError if the list is empty, makes more than 100,000 shards,
    has a line that is not a row (FILE:LINE), or no URL in the column that should have them.
    """
    parts, keys, reading = [], bytearray(), find_columns(settings)
    has_url, swapped = not settings.is_download, None  # swapped: the first row with a URL in the place of its caption
    for start, offset, file, chunk in _chunks(settings, reading, stops):
        lines, rows = chunk, ()
        if settings.captions:
            rows = list(parse_rows(chunk, Path(settings.captions), reading, start))
            lines = _identities(chunk, rows, settings)
        elif file:
            lines, rows = [row.line() for row in chunk], chunk
        for number, row in enumerate(rows, start):
            keys += bytes.fromhex(sample_key(row.url, row.caption))
            if not has_url:
                has_url = _LIKE_A_URL.match(row.url) is not None
                if swapped is None and _LIKE_A_URL.match(row.caption):
                    swapped = number
        source = f"{Path(settings.origin).name} sha256:{_digest(lines)}"
        parts.append(Part(f"{len(parts):05}", start, start + len(chunk), source, reading, offset, file))
    if not parts:
        raise ValueError(f"{settings.origin} holds nothing to collect for {settings.name}")
    if swapped is not None and not has_url:
        raise ValueError(
            f"{where(settings.origin, reading, swapped)}: the URL is in the column of the caption, and no row has one "
            f"in its own ({reading}); swap them under columns"
        )
    if len(parts) > 100_000:
        raise ValueError(f"{settings.name} would make {len(parts)} shards, more than 100000: raise rows_per_shard")
    rows, firsts = _repeated(keys)
    ends = np.searchsorted(rows, [part.stop for part in parts])
    return [
        dataclasses.replace(part, duplicates=tuple(zip(rows[a:b].tolist(), firsts[a:b].tolist(), strict=True)))
        for part, a, b in zip(parts, [0, *ends[:-1]], ends, strict=True)
    ]


def find_columns(settings: CollectSettings) -> Reading | None:
    """How the list, or what others have stored, is read: as `columns` says, or recognised; None for bare images.

    ValueError names a file that cannot be read, a column that is not there, or says that columns are to be given.
    """
    if settings.captions:
        return find_reading(Path(settings.captions), settings.columns, of_folder=settings.images is not None)
    stored = stored_by_others(settings)
    return stored.find_reading(settings.columns) if stored else None


def stored_by_others(settings: CollectSettings) -> Img2dataset | TarSet | None:
    """What is imported; None for a list and for a folder of images."""
    if settings.img2dataset:
        return Img2dataset(settings.img2dataset)
    return TarSet(settings.webdataset) if settings.webdataset else None


def _chunks(
    settings: CollectSettings, reading: Reading | None, stops: Mapping[str, int]
) -> Iterator[tuple[int, int, str, list[bytes] | list[StoredRow]]]:
    """For each shard: its first row, offset and file as in Part, and the identity of each row."""
    if settings.captions:
        with ListFile(Path(settings.captions), reading) as list_file:
            for start, offset, chunk in _chunks_of_lines(list_file.records(), settings.rows_per_shard, stops):
                yield start, list_file.first + offset, "", chunk
    elif settings.images:
        files = map(identity, image_files(settings.images))
        for start, _, chunk in _chunks_of_lines(files, settings.rows_per_shard, stops):
            yield start, 0, "", chunk
    else:
        yield from _stored(stored_by_others(settings).rows(reading), settings.rows_per_shard, stops)


def _stored(
    files: Iterable[tuple[str, Iterable[StoredRow]]], rows_per_shard: int, stops: Mapping[str, int]
) -> Iterator[tuple[int, int, str, list[StoredRow]]]:
    """The rows that others have stored; a shard of ours holds rows of one of their files."""
    start, number = 0, 0
    for file, rows in files:
        rows = iter(rows)
        while chunk := list(itertools.islice(rows, max(1, stops.get(f"{number:05}", start + rows_per_shard) - start))):
            yield start, chunk[0].offset, file, chunk
            start, number = start + len(chunk), number + 1


def _chunks_of_lines(
    lines: Iterator[bytes], rows_per_shard: int, stops: Mapping[str, int]
) -> Iterator[tuple[int, int, list[bytes]]]:
    start = offset = 0
    for number in itertools.count():
        stop = stops.get(f"{number:05}", start + rows_per_shard)
        chunk = list(itertools.islice(lines, max(0, stop - start)))
        if not chunk:
            return
        yield start, offset, [line.removesuffix(b"\n") for line in chunk]  # the last may get one later
        start += len(chunk)
        offset += sum(map(len, chunk))


def identity(file: Path) -> bytes:
    """Name and size of an image file; size -1 if it is not a regular file."""
    try:
        status = file.stat()
        size = status.st_size if stat.S_ISREG(status.st_mode) else -1
    except OSError:
        size = -1
    return os.fsencode(f"{file.name}\t{size}")


def image_of(row: CaptionRow, settings: CollectSettings) -> Path:
    """The file that a row of a folder's captions names; ValueError if its name leads out of the folder."""
    name = Path(row.url)
    if name.is_absolute() or ".." in name.parts or "\0" in row.url:
        raise ValueError(f"{row.url[:200]!r} is not the name of a file in {settings.images}")
    return Path(settings.images) / name


def _identities(chunk: Sequence[bytes], rows: Iterable[CaptionRow], settings: CollectSettings) -> list[bytes]:
    """Of the rows of a list: the lines themselves, and of a folder's captions also its files."""
    if not settings.images:
        return list(chunk)
    files = []
    for row in rows:
        try:
            files.append(identity(image_of(row, settings)))
        except ValueError:
            files.append(b"")
    return [line + b"\0" + file for line, file in zip(chunk, files, strict=True)]


def _digest(chunk: Sequence[bytes]) -> str:
    return hashlib.sha256(b"\n".join(chunk)).hexdigest()


def _repeated(keys: bytearray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose key an earlier row has, ascending, and the first row with that key. `keys`: 10 bytes per row."""
    table = np.frombuffer(keys, dtype="S10")
    order = np.argsort(table, kind="stable")  # equal keys side by side, the earliest row first
    new = np.ones(len(order), dtype=bool)
    new[1:] = table[order[1:]] != table[order[:-1]]
    firsts = order[new][np.cumsum(new) - 1] if len(order) else order
    rows, firsts = order[~new], firsts[~new]
    ascending = np.argsort(rows)
    return rows[ascending], firsts[ascending]


def image_files(folder: str) -> list[Path]:
    """The image files of a folder, by name; ValueError if it is not a folder."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder; name one that holds image files")
    return sorted(file for file in Path(folder).iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)


def check_committed(done: Mapping[str, dict], parts: Sequence[Part], settings: CollectSettings) -> None:
    """ValueError if a committed shard (its meta, by shard) has other rows or other image settings than now."""
    expected = {part.shard: part for part in parts}
    wanted = {field.name: getattr(settings.download, field.name) for field in dataclasses.fields(ImageSettings)}
    for shard, meta in done.items():
        rows, digest = meta["source"]["rows"], meta["source"]["list"].rpartition(" ")[2]
        part = expected.get(shard)
        before = meta["source"].get("reading", PLAIN.as_meta if settings.captions else None)
        if part and part.reading and before and before != part.reading.as_meta:
            raise ValueError(
                f"{settings.name}: {settings.origin} is read otherwise than when shard {shard} was collected: "
                f"{_shown(part.reading.as_meta)}, then {_shown(before)}. Set columns as they were, or collect another "
                "dataset"
            )
        if part is None or [part.start, part.stop] != rows or part.source.rpartition(" ")[2] != digest:
            now = f"rows {part.start} to {part.stop} of {part.source}" if part else f"only {len(parts)} shards"
            raise ValueError(
                f"{settings.name}: the list changed under committed shards: shard {shard} holds rows {rows[0]} to "
                f"{rows[1]} of {meta['source']['list']}, now it would be {now}. Collect the new list as another "
                "dataset, or set the old list and rows_per_shard again"
            )
        if meta["config"] != wanted:
            differing = [
                f"{k} {meta['config'].get(k)}, now {v}" for k, v in wanted.items() if meta["config"].get(k) != v
            ]
            raise ValueError(
                f"{settings.name}: shard {shard} was collected with other image settings: {'; '.join(differing)}. "
                "Set them back, or collect another dataset"
            )


def _shown(reading: Mapping[str, object]) -> str:
    return f"{reading['form']} with columns={','.join(reading['columns'])}" + (" and a header" * reading["header"])


def rows_of(part: Part, settings: CollectSettings, list_file: ListFile) -> list[CaptionRow]:
    """The rows of a part, read from its offset; ValueError if they changed since `plan`."""
    records = itertools.islice(list_file.records(part.start, part.offset), part.stop - part.start)
    chunk = [line.removesuffix(b"\n") for line in records]
    rows = parse_rows(chunk, Path(settings.captions), part.reading, part.start)
    if settings.images:
        rows = list(rows)
    check_unchanged(part, _identities(chunk, rows, settings), settings)  # first: a changed line may be none
    return list(rows)


def check_unchanged(part: Part, chunk: Sequence[bytes], settings: CollectSettings) -> None:
    if not part.source.endswith(f" sha256:{_digest(chunk)}"):
        raise ValueError(
            f"{settings.name}: {settings.origin} was changed while it was collected: rows {part.start} to {part.stop} "
            f"(shard {part.shard}) changed. Shard {part.shard} was not committed; run again"
        )
