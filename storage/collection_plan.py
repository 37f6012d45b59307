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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage.download import STATUSES, CaptionRow, parse_captions
from storage.fetch import DownloadSettings
from storage.forgotten import FORGOTTEN
from storage.img2dataset import StoredRow, read_rows, shard_names
from storage.manifests import OK
from storage.normalise import ImageSettings
from storage.sample import sample_key
from storage.settings import FORM, check, check_choices

_LIKE_A_URL = re.compile(r"\s*https?://", re.IGNORECASE)
_FAILED = [status for status in STATUSES if status not in (OK, "duplicate", FORGOTTEN)]
_CLASSES = ("http_4xx", "http_5xx")
_SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp"}


@dataclass(frozen=True)
class CollectSettings:
    """One dataset's images: where they come from, and how many make a shard."""

    __pydantic_config__ = FORM

    name: str
    """The dataset: the folder of the root that holds the shards."""
    captions: str | None = None
    """A caption list to download, `caption TAB url` a line. Give this, `images` or `img2dataset`."""
    images: str | None = None
    """A local folder of image files to import."""
    img2dataset: str | None = None
    """A local folder that img2dataset wrote, in its format webdataset or files."""
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
        if sum(origin is not None for origin in (self.captions, self.images, self.img2dataset)) != 1:
            raise ValueError(
                f"Dataset {self.name}: set captions (a list to download) or images (a local folder), or img2dataset (a "
                "folder that it wrote)"
            )
        check_choices(self)
        for name in ("rows_per_shard", "shards_per_task"):
            check(self, getattr(self, name) >= 1, name, "at least 1")
        check(self, self.save_every > 0, "save_every", "over 0")
        check(
            self, self.captions or not self.retry_statuses, "retry_statuses", "empty for a folder: nothing is requested"
        )
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
    def origin(self) -> Path:
        """The list or the folder."""
        return Path(self.captions or self.images or self.img2dataset)


@dataclass(frozen=True)
class Part:
    """One shard to collect: rows [start, stop) of the list.

    source      file and sha256 of those rows
    offset      of the first of these lines in the list, in bytes; 0 for images; for img2dataset the row in `file`
    file        img2dataset's shard that holds the rows
    duplicates  (row, first row with the same URL and caption) for rows that repeat an earlier one of the list
    replaces    sha256 of the committed manifest if some of its rows are requested again; "" if it is not committed yet
    """

    shard: str
    start: int
    stop: int
    source: str
    offset: int = 0
    file: str = ""
    duplicates: tuple[tuple[int, int], ...] = ()
    replaces: str = ""


def plan(settings: CollectSettings, stops: Mapping[str, int]) -> list[Part]:
    """The shards of the dataset's list, in order; `stops`: where committed shards end, by shard.

    Every line is checked before the first download. ValueError if the list is empty, makes more than 100,000 shards,
    has a line that is not a row (FILE:LINE), or has its columns swapped.
    """
    parts, keys = [], bytearray()
    has_url, swapped = not settings.captions, None  # swapped: the first line with a URL in the place of its caption
    for start, offset, file, chunk in _chunks(settings, stops):
        lines, rows = chunk, ()
        if settings.captions:
            rows = parse_captions(chunk, settings.origin, start)
        elif settings.img2dataset:
            lines, rows = [row.line() for row in chunk], chunk
        for row in rows:
            keys += bytes.fromhex(sample_key(row.url, row.caption))
            if not has_url:
                has_url = _LIKE_A_URL.match(row.url) is not None
                if swapped is None and _LIKE_A_URL.match(row.caption):
                    swapped = row.row + 1
        source = f"{settings.origin.name} sha256:{_digest(lines)}"
        parts.append(Part(f"{len(parts):05}", start, start + len(chunk), source, offset, file))
    if not parts:
        raise ValueError(f"{settings.origin} holds nothing to collect for {settings.name}")
    if swapped is not None and not has_url:
        raise ValueError(
            f"{settings.origin}:{swapped}: the URL is before the tab, and no line has one after it; each line is "
            "`caption TAB url`: swap the columns"
        )
    if len(parts) > 100_000:
        raise ValueError(f"{settings.name} would make {len(parts)} shards, more than 100000: raise rows_per_shard")
    rows, firsts = _repeated(keys)
    ends = np.searchsorted(rows, [part.stop for part in parts])
    return [
        dataclasses.replace(part, duplicates=tuple(zip(rows[a:b].tolist(), firsts[a:b].tolist(), strict=True)))
        for part, a, b in zip(parts, [0, *ends[:-1]], ends, strict=True)
    ]


def _chunks(
    settings: CollectSettings, stops: Mapping[str, int]
) -> Iterator[tuple[int, int, str, list[bytes] | list[StoredRow]]]:
    """For each shard: its first row, offset and file as in Part, and the identity of each row."""
    if settings.captions:
        with open(settings.captions, "rb") as lines:
            for start, offset, chunk in _chunks_of_lines(lines, settings.rows_per_shard, stops):
                yield start, offset, "", chunk
    elif settings.images:
        files = map(identity, image_files(settings.images))
        for start, _, chunk in _chunks_of_lines(files, settings.rows_per_shard, stops):
            yield start, 0, "", chunk
    else:
        yield from _stored(settings, stops)


def _stored(settings: CollectSettings, stops: Mapping[str, int]) -> Iterator[tuple[int, int, str, list[StoredRow]]]:
    """The rows of img2dataset; a shard of ours holds rows of one of its shards."""
    start, number = 0, 0
    for file in shard_names(settings.origin):
        rows, offset = read_rows(settings.origin, file), 0
        while offset < len(rows):
            stop = stops.get(f"{number:05}", start + settings.rows_per_shard)
            chunk = rows[offset : offset + max(1, stop - start)]
            yield start, offset, file, chunk
            start, offset, number = start + len(chunk), offset + len(chunk), number + 1


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
    return sorted(file for file in Path(folder).iterdir() if file.suffix.lower() in _SUFFIXES)


def check_committed(done: Mapping[str, dict], parts: Sequence[Part], settings: CollectSettings) -> None:
    """ValueError if a committed shard (its meta, by shard) has other rows or other image settings than now."""
    expected = {part.shard: part for part in parts}
    wanted = {field.name: getattr(settings.download, field.name) for field in dataclasses.fields(ImageSettings)}
    for shard, meta in done.items():
        rows, digest = meta["source"]["rows"], meta["source"]["list"].rpartition(" ")[2]
        part = expected.get(shard)
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


def rows_of(part: Part, settings: CollectSettings) -> list[CaptionRow]:
    """The rows of a part, read from its offset; ValueError if they changed since `plan`."""
    with open(settings.captions, "rb") as lines:
        lines.seek(part.offset)
        chunk = [line.removesuffix(b"\n") for line in itertools.islice(lines, part.stop - part.start)]
    check_unchanged(part, chunk, settings)
    return list(parse_captions(chunk, settings.origin, part.start))


def check_unchanged(part: Part, chunk: Sequence[bytes], settings: CollectSettings) -> None:
    if not part.source.endswith(f" sha256:{_digest(chunk)}"):
        raise ValueError(
            f"{settings.name}: {settings.origin} was changed while it was collected: rows {part.start} to {part.stop} "
            f"(shard {part.shard}) changed. Shard {part.shard} was not committed; run again"
        )
