"""Collect: turn a caption list, a folder of images or a folder of img2dataset into shards of the stage `images`.

Shard 00000 holds the first `rows_per_shard` rows of the list, 00001 the next ones, and so on. Committed rows are not
downloaded again. A list may grow: its new rows make new shards. If rows of committed shards changed in the list, that
is an error, because one dataset would mix two lists.

    python -m storage.collect ROOT DATASET captions=LIST [field=value ...]
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from storage.catalog import OK, Catalog
from storage.download import (
    STATUSES,
    CaptionRow,
    Download,
    Downloader,
    DownloadSettings,
    ImageSettings,
    Spool,
    all_of,
    commit_images,
    image_config,
    import_images,
    parse_captions,
)
from storage.img2dataset import StoredRow, import_rows, read_rows, shard_names
from storage.manifests import Manifest
from storage.normalise import NormalisedImage
from storage.object_store import ObjectMissing, StorageUnreachable, open_store
from storage.progress import progress_line
from storage.redact import shown_url
from storage.sample import sample_key
from storage.settings import FORM, add_fields, check_choices, from_assignments
from storage.spool import PartialShard, remove_partial

IMAGES = "images"
SHARDS_AT_ONCE = 5  # of one group: while one shard waits for slow servers, the others go on
UNREACHABLE = {"dns", "connect", "timeout", "host_timeout"}  # also while this machine has no network
_NOT_REQUESTED = {"duplicate", "bad_url", "blocked_address"}  # statuses of rows that need no request
# Fewer rows of fewer hosts may all be gone. If there are more, the fault is probably this machine's network.
_FEW_HOSTS, _FEW_ROWS = 5, 20
_HOST = re.compile(r"https?://(?:[^/?#@]*@)?([^/?#@]+:\d+)", re.IGNORECASE)  # with its port
_LIKE_A_URL = re.compile(r"\s*https?://", re.IGNORECASE)
_FAILED = [status for status in STATUSES if status not in (OK, "duplicate")]
_CLASSES = ("http_4xx", "http_5xx")
_SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp"}


@dataclass(frozen=True)
class CollectSettings:
    """One dataset's images: where they come from, and in which portions."""

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
    """Commit a shard even where no host of it could be reached: only when these hosts are known to be gone."""
    report_every: float = 10.0
    """Seconds between two lines of progress, at least."""
    save_every: float = 20.0
    """Seconds after which the images of the shards in progress are written down: what a kill costs at most."""
    retry_statuses: tuple[str, ...] = ()
    """Statuses (`timeout`, `dns`, `http_5xx`, ...) whose rows of committed shards are asked once more: for a single
    run."""

    def __post_init__(self):
        if sum(origin is not None for origin in (self.captions, self.images, self.img2dataset)) != 1:
            raise ValueError(
                f"Dataset {self.name}: set captions (a list to download) or images (a local folder), or img2dataset (a "
                "folder that it wrote)"
            )
        check_choices(self)
        for name in ("rows_per_shard", "shards_per_task"):
            if getattr(self, name) < 1:
                raise ValueError(f"Dataset {self.name}: {name} is {getattr(self, name)}; it must be at least 1")
        if not self.save_every > 0:
            raise ValueError(f"Dataset {self.name}: save_every is {self.save_every}; it must be over 0")
        if self.retry_statuses and self.captions is None:
            raise ValueError(
                f"Dataset {self.name}: retry_statuses is for a list of captions: rows of a folder are not asked for"
            )
        self.retried_statuses  # noqa: B018  refuses a status that there is not
        if self.report_every < 0:
            raise ValueError(f"Dataset {self.name}: report_every is {self.report_every}; it must not be negative")

    @property
    def retried_statuses(self) -> frozenset[str]:
        """The statuses that `retry_statuses` names; ValueError where one is none."""
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


@dataclass(frozen=True)
class Group:
    """Shards that are collected together.

    before      rows by status of the run's earlier groups
    rows        of the whole run, as `shards` and `started` (by time.monotonic)
    has_images  whether the dataset has an ok row; until then, a shard without one is not committed
    """

    parts: tuple[Part, ...]
    before: dict[str, int]
    rows: int
    shards: int
    has_images: bool = True
    started: float = dataclasses.field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Collected:
    """A dataset's shards and rows by status, and how many shards this run committed.

    asked_again, newly_ok: rows of shards that were there before, by CollectSettings.retry_statuses.
    """

    dataset: str
    shards: int
    new_shards: int
    counts: dict[str, int]
    seconds: float
    asked_again: int = 0
    newly_ok: int = 0


class NothingStored(ValueError):
    """No row of the whole dataset is ok, so nothing was committed; the message says what to do."""


OnCommit = Callable[[str], object]  # called with the name of each shard that this run commits


def collect(
    root: str,
    settings: CollectSettings,
    log: Callable[[str], None] = print,
    run_group: Callable[[str, CollectSettings, Group, OnCommit], dict[str, int]] | None = None,
) -> Collected:
    """Download or import the missing shards of the dataset; `run_group` may wrap `collect_group`, as the flow does.

    NothingStored if no row of the dataset is ok, committed ones included.
    """
    started = time.monotonic()
    run_group = run_group or functools.partial(collect_group, log=log)
    new_shards = set()
    catalog = Catalog(open_store(root), settings.name)
    headers = catalog.headers(IMAGES)
    done = {shard: header.meta for shard, header in headers.items()}
    parts = plan(settings, {shard: meta["source"]["rows"][1] for shard, meta in done.items()})
    check_committed(done, parts, settings)
    missing = [part for part in parts if part.shard not in done]
    if missing:
        where = settings.origin
        log(f"{settings.name}: {len(missing)} of {len(parts)} shards to collect, {parts[-1].stop} rows in {where}")
        if settings.captions and not settings.download.contact and not settings.download.allowed_hosts:
            log(
                f"{settings.name}: warning: no contact is set, so the servers' owners cannot ask what this is; set "
                "download.contact to a URL or a mail address"
            )
    else:
        log(f"{settings.name}: nothing to download: {len(done)} of {len(parts)} shards are committed")
    wanted = settings.retried_statuses
    asked = {
        part.shard: sum(headers[part.shard].statuses.get(one, 0) for one in wanted)
        for part in parts
        if part.shard in done
    }
    again = [dataclasses.replace(part, replaces=headers[part.shard].sha256) for part in parts if asked.get(part.shard)]
    if wanted:
        rows, statuses = sum(asked.values()), ", ".join(settings.retry_statuses)
        log(f"{settings.name}: {rows} rows of {len(again)} shards are requested again: {statuses}")
    missing += again
    remove_partial(catalog.store, settings.name, done.keys() - {part.shard for part in again})
    has_images = any(header.ok_rows for header in headers.values())
    while missing:
        rows, counts, held_back = sum(part.stop - part.start for part in missing), Counter(), []
        for first in range(0, len(missing), settings.shards_per_task):
            parts_of_group = tuple(missing[first : first + settings.shards_per_task])
            group = Group(parts_of_group, dict(counts), rows, len(missing), has_images, started)
            counts.update(run_group(root, settings, group, new_shards.add))
            if not has_images and not counts[OK]:
                held_back += parts_of_group
            has_images = has_images or counts[OK] > 0
            ready = first + len(parts_of_group)
            log(f"{settings.name}: {ready} of {len(missing)} shards collected: {_by_status(counts)}")
        committed = catalog.headers(IMAGES) if held_back else {}
        missing = [part for part in held_back if part.shard not in committed]
        if missing and not has_images and not any(header.ok_rows for header in committed.values()):
            raise NothingStored(_nothing_stored(settings, counts, missing[0]))
        if missing:
            log(f"{settings.name}: {len(missing)} shards without an image are collected again: others have images")
        has_images = True
    names = [part.shard for part in again]
    newly_ok = sum(now.ok_rows - headers[shard].ok_rows for shard, now in catalog.headers(IMAGES, names).items())
    return Collected(
        settings.name,
        len(parts),
        len(new_shards - set(names)),
        catalog.counts(IMAGES),
        time.monotonic() - started,
        sum(asked.values()),
        newly_ok,
    )


def _by_status(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in Counter(counts).most_common())


def _nothing_stored(settings: CollectSettings, counts: Counter[str], part: Part) -> str:
    """The message if no row is ok; `part` is a shard that was not committed."""
    status = counts.most_common(1)[0][0]
    way_out = f"{status}: {STATUSES[status]} (docs/download.md)"
    rows = _rows_of(part, settings) if settings.captions else []
    if rows and status == "blocked_address":
        hosts = Counter(found[1] for row in rows if (found := _HOST.match(row.url)))
        host = hosts.most_common(1)[0][0] if hosts else "HOST:PORT"
        way_out += f". If you trust this server, set download.allowed_hosts={host}"
    elif rows and status == "bad_url":
        way_out += f". Each line is `caption TAB url`; line {part.start + 1} has {shown_url(rows[0].url)!r} as its URL"
    elif rows and status in UNREACHABLE:
        way_out += ". Check this machine's network and whether the servers are up"
    return (
        f"{settings.name}: no row of {settings.origin} gave an image ({_by_status(counts)}); nothing was committed. "
        f"{way_out}. Then run again"
    )


# --- the shards of a list ---------------------------------------------------------------------------------------------


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
        files = map(_identity, image_files(settings.images))
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
        yield start, offset, [line.removesuffix(b"\n") for line in chunk]  # the last one gets its own when a list grows
        start += len(chunk)
        offset += sum(map(len, chunk))


def _identity(file: Path) -> bytes:
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


# --- collecting them --------------------------------------------------------------------------------------------------


def collect_group(
    root: str,
    settings: CollectSettings,
    group: Group,
    on_commit: OnCommit = lambda shard: None,
    log: Callable[[str], None] = print,
) -> dict[str, int]:
    """Collect these shards, a few at a time, and commit each when it is complete; the group's rows by status.

    A shard that another process committed meanwhile is skipped. ConnectionError if no host of a shard could be reached;
    that shard is not committed. A shard without an image is committed only once the dataset or this group has one.
    """
    catalog = Catalog(open_store(root), settings.name)
    parts = {part.shard: part for part in group.parts}
    committed = catalog.headers(IMAGES, [shard for shard in catalog.shards(IMAGES) if shard in parts])
    # By an earlier attempt, or by another process.
    done = {shard: header for shard, header in committed.items() if header.sha256 != parts[shard].replaces}
    progress = _Progress(settings, group, log)
    for shard, header in done.items():
        progress.counts[shard] = header.statuses
    missing = [part for part in group.parts if part.shard not in done]
    commit = _Commit(catalog, settings, group.has_images, on_commit)
    if settings.captions:
        asyncio.run(_download(missing, catalog, settings, progress, commit))
    else:
        files = image_files(settings.images) if settings.images else []
        for part in missing:
            if _is_committed(catalog, part, progress):
                continue
            with Spool() as spool:
                if settings.images:
                    downloads = _import(files, part, settings, progress, spool)
                else:
                    downloads = _import_stored(part, settings, progress, spool)
                commit(part, downloads)
    if progress.of_group().get(OK):
        commit.commit_waiting()
    return progress.of_group()


class _Progress:
    """Rows by status of each shard of a group; logs a line of progress from time to time."""

    def __init__(self, settings: CollectSettings, group: Group, log: Callable[[str], None]):
        self.settings, self.group, self.log = settings, group, log
        self.counts: dict[str, dict[str, int]] = {}
        self.due = time.monotonic() + settings.report_every

    def of_group(self) -> dict[str, int]:
        """Rows by status."""
        return dict(sum(map(Counter, self.counts.values()), Counter()))

    def update(self, part: Part, counts: Mapping[str, int]) -> None:
        """Set a shard's rows by status so far."""
        self.counts[part.shard] = counts
        if time.monotonic() >= self.due:
            counts = Counter(self.group.before) + Counter(self.of_group())
            name, seconds = self.settings.name, time.monotonic() - self.group.started
            self.log(progress_line(name, counts.total(), self.group.rows, "rows", counts, seconds))
            self.due = time.monotonic() + self.settings.report_every


def _is_committed(catalog: Catalog, part: Part, progress: _Progress) -> bool:
    """Whether another process has committed the shard; then its rows are counted."""
    try:
        (header,) = catalog.headers(IMAGES, [part.shard]).values()
    except ObjectMissing:
        return False
    if header.sha256 == part.replaces:
        return False
    progress.update(part, header.statuses)
    return True


class _Commit:
    """Commits shards. One without an image waits for `commit_waiting`, unless the dataset has images."""

    def __init__(self, catalog: Catalog, settings: CollectSettings, has_images: bool, on_commit: OnCommit):
        self._catalog, self._settings, self._on_commit = catalog, settings, on_commit
        self._has_images = has_images
        self._waiting: list[tuple[Part, Sequence[Download]]] = []  # without images, so they are small

    def __call__(self, part: Part, downloads: Sequence[Download], known: "_Known | None" = None) -> None:
        if known is not None and known.manifest is not None:
            before = dict(
                zip(known.manifest.table["row"].to_pylist(), known.manifest.table["status"].to_pylist(), strict=True)
            )
            if any(item.status != before[item.row.row] for item in downloads):
                self._commit(part, downloads, known.manifest)
            return
        statuses = {item.status for item in downloads}
        gone = self._settings.commit_unreachable and statuses & UNREACHABLE
        if self._has_images or gone or OK in statuses:
            self._commit(part, downloads)
        else:
            self._waiting.append((part, downloads))

    def commit_waiting(self) -> None:
        """Commit those that wait, because there is an image now."""
        for part, downloads in self._waiting:
            self._commit(part, downloads)

    def _commit(self, part: Part, downloads: Sequence[Download], replaces: Manifest | None = None) -> None:
        settings = self._settings.download
        if commit_images(self._catalog, part.shard, downloads, settings, source=part.source, replaces=replaces):
            self._on_commit(part.shard)


@dataclass(frozen=True)
class _Known:
    """The rows of a shard that are known before any request.

    rows      by row: duplicates, and the rows of a committed shard that are not requested again
    before    by row: the results in the committed shard of rows that are requested again
    manifest  of the committed shard
    """

    rows: dict[int, Download]
    before: dict[int, Download] = dataclasses.field(default_factory=dict)
    manifest: Manifest | None = None

    def with_answers(self, rows: Sequence[CaptionRow], answers: Sequence[Download]) -> list[Download]:
        """All rows in order. A row whose host could not be reached keeps its result from before."""
        answers = iter(answers)
        joined = [self.rows.get(row.row) or next(answers) for row in rows]
        return [self.before.get(item.row.row, item) if item.status in UNREACHABLE else item for item in joined]


def _known(catalog: Catalog, part: Part, rows: Sequence[CaptionRow], settings: CollectSettings, spool: Spool) -> _Known:
    if not part.replaces:
        first = dict(part.duplicates)
        repeated = [row for row in rows if row.row in first]
        return _Known({row.row: Download(row, "duplicate", f"of row {first[row.row]}", None) for row in repeated})
    manifest = catalog.manifest(IMAGES, part.shard)
    known, samples = _Known({}, {}, manifest), catalog.read(IMAGES, part.shard)
    for row, line in zip(rows, manifest.table.to_pylist(), strict=True):
        image = None
        if line["status"] == OK:
            sample = next(samples)
            image = spool.write(NormalisedImage(sample.image, sample.width, sample.height, sample.sha256, sample.flags))
        asked = line["status"] in settings.retried_statuses
        (known.before if asked else known.rows)[row.row] = Download(row, line["status"], line["detail"], image)
    return known


async def _download(
    parts: Sequence[Part], catalog: Catalog, settings: CollectSettings, progress: _Progress, commit: _Commit
) -> None:
    free = asyncio.Semaphore(SHARDS_AT_ONCE)
    loop = asyncio.get_running_loop()
    # Files are read and written in a thread, so that the other shards go on. Saves have their own thread, so that they
    # do not wait for the commit of a large shard.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="files") as files,
        ThreadPoolExecutor(1, thread_name_prefix="saves") as saves,
    ):
        async with Downloader(settings.download) as downloader:
            partials: set[PartialShard] = set()

            async def save() -> None:
                while True:
                    await asyncio.sleep(settings.save_every)
                    for partial in list(partials):
                        try:
                            await loop.run_in_executor(saves, partial.save)
                        except StorageUnreachable as error:
                            progress.log(f"{settings.name}: images in progress could not be saved: {error}")
                        except ValueError:
                            if partial in partials:
                                raise
                            # Its shard has failed meanwhile, so its spool is closed.

            async def one(part: Part) -> None:
                async with free:
                    if await loop.run_in_executor(files, _is_committed, catalog, part, progress):
                        return
                    rows = await loop.run_in_executor(files, _rows_of, part, settings)
                    _, config = image_config(settings.download)
                    partial = PartialShard(catalog.store, settings.name, part.shard, config)
                    with Spool() as spool:
                        known = await loop.run_in_executor(files, _known, catalog, part, rows, settings, spool)
                        counted = Counter(item.status for item in known.rows.values())
                        stored = await loop.run_in_executor(files, partial.load, spool)
                        if stored:
                            images = f"{len(stored)} images from an earlier run"
                            progress.log(f"{settings.name}: shard {part.shard} continues with {images}")
                        partials.add(partial)
                        try:
                            asked = await downloader.download(
                                [row for row in rows if row.row not in known.rows],
                                lambda done, of, counts: progress.update(part, Counter(counts) + counted),
                                spool,
                                partial,
                                stored,
                            )
                        finally:
                            partials.remove(partial)
                        if not settings.commit_unreachable and not part.replaces:
                            check_network(part, asked, settings)
                        downloads = known.with_answers(rows, asked)
                        await loop.run_in_executor(files, commit, part, downloads, known)
                        await loop.run_in_executor(files, partial.close)
                    progress.update(part, Counter(item.status for item in downloads))

            saving = asyncio.ensure_future(save())
            try:
                await all_of(one(part) for part in parts)
            finally:
                saving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await saving


def _rows_of(part: Part, settings: CollectSettings) -> list[CaptionRow]:
    """The rows of a part, read from its offset; ValueError if they changed since `plan`."""
    with open(settings.captions, "rb") as lines:
        lines.seek(part.offset)
        chunk = [line.removesuffix(b"\n") for line in itertools.islice(lines, part.stop - part.start)]
    _check_unchanged(part, chunk, settings)
    return list(parse_captions(chunk, settings.origin, part.start))


def _check_unchanged(part: Part, chunk: Sequence[bytes], settings: CollectSettings) -> None:
    if not part.source.endswith(f" sha256:{_digest(chunk)}"):
        raise ValueError(
            f"{settings.name}: {settings.origin} was changed while it was collected: rows {part.start} to {part.stop} "
            f"(shard {part.shard}) changed. Shard {part.shard} was not committed; run again"
        )


def check_network(part: Part, downloads: Sequence[Download], settings: CollectSettings) -> None:
    """ConnectionError if every requested row is UNREACHABLE, and these are at least 20 rows or of five hosts."""
    asked = [item for item in downloads if item.status not in _NOT_REQUESTED]
    hosts = {urlsplit(item.row.url).hostname for item in asked}
    few = len(hosts) < _FEW_HOSTS and len(asked) < _FEW_ROWS
    if not few and all(item.status in UNREACHABLE for item in asked):
        raise ConnectionError(
            f"{settings.name}: none of the {len(hosts)} hosts of shard {part.shard} (rows {part.start} to {part.stop} "
            f"of {settings.origin}) could be reached: {_by_status(Counter(item.status for item in asked))}, the first "
            f"{shown_url(asked[0].row.url)}: {asked[0].detail}. It was not committed. Check this machine's "
            "network and whether the server is up, and run again; if these hosts are gone for good, set "
            "commit_unreachable=true"
        )


def _import(
    files: Sequence[Path], part: Part, settings: CollectSettings, progress: _Progress, spool: Spool
) -> list[Download]:
    """Each image as if it had been downloaded; its row is its position among all files."""
    files = files[part.start : part.stop]
    _check_unchanged(part, [_identity(file) for file in files], settings)
    imported = import_images(
        files,
        settings.download,
        lambda done, of, counts: progress.update(part, counts),
        threads=settings.download.decode_threads,
        spool=spool,
    )
    return [
        dataclasses.replace(item, row=dataclasses.replace(item.row, row=part.start + item.row.row)) for item in imported
    ]


def _import_stored(part: Part, settings: CollectSettings, progress: _Progress, spool: Spool) -> list[Download]:
    """The rows of a part as img2dataset stored them, with normalised images."""
    rows = read_rows(settings.origin, part.file)[part.offset : part.offset + part.stop - part.start]
    _check_unchanged(part, [row.line() for row in rows], settings)
    counts = Counter()

    def on_row(status: str) -> None:
        counts[status] += 1
        progress.update(part, counts)

    threads = settings.download.decode_threads
    return import_rows(
        settings.origin, rows, part.start, dict(part.duplicates), settings.download, spool, on_row, threads
    )


# --- as a program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m storage.collect",
        description="Download a caption list, or import images, into shards; goes on where it was stopped.\n\n"
        "    python -m storage.collect ROOT DATASET captions=LIST download.contact=me@example.org",
    )
    parser.add_argument("root", metavar="ROOT", help="a folder or s3://bucket/prefix")
    parser.add_argument("dataset", metavar="DATASET", help="the name under which the images are stored: captions, ...")
    add_fields(parser, CollectSettings, without=["name"])
    options = parser.parse_args(arguments)
    try:
        settings = from_assignments(CollectSettings, options.fields, name=options.dataset)
        collected = collect(options.root, settings, functools.partial(print, flush=True))
    except (ValueError, OSError, ObjectMissing) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("stopped; what is committed stays, and the same command goes on from there", file=sys.stderr)
        sys.exit(130)  # as the shell has it for Ctrl-C
    again = f"{collected.newly_ok} of {collected.asked_again} rows asked again are ok now; "
    print(
        f"{collected.dataset}: {collected.new_shards} new of {collected.shards} shards in {collected.seconds:.1f} s; "
        f"{again if settings.retry_statuses else ''}all rows: {_by_status(collected.counts)}"
    )


if __name__ == "__main__":
    main()
