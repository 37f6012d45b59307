"""Plan of a collection: the settings of a dataset, its rows, and the division of the rows into shards.

The origin of the rows is a caption list, a folder or tars. Before the first download, the origin is read and stored as
rows (storage/collect/rows.py), unless an earlier run has stored the rows. `plan` divides the rows into shards, and
compares the result with the committed shards.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.catalog import Catalog
from storage.collect.download import image_config
from storage.collect.fetch import DownloadSettings
from storage.collect.lists import IMAGE_SUFFIXES, find_reading, read_rows
from storage.collect.rows import CaptionRow, Reading, Rows, write_rows
from storage.collect.statuses import Status, parse_statuses
from storage.collect.tars import TarSet
from storage.digests import sha256_of
from storage.manifests import Header
from storage.object_store import ObjectMissing, ObjectStore
from storage.programs import Dataset
from storage.settings import FORM, check, check_choices, check_positive
from storage.withdrawn import read_withdrawn

IMAGES = "images"  # the stage that is collected
MAX_SHARDS = 100_000  # of a dataset, because shard names have five digits


@dataclass(frozen=True)
class CollectSettings:
    """Settings for collecting one dataset."""

    __pydantic_config__ = FORM

    name: Dataset
    """name of the dataset, and of its folder in the root"""
    captions: str | None = None
    """caption list to download: TSV, CSV, JSON lines or JSON (optionally .gz), or Parquet; with `images`, the captions
    of that folder; set this, `images` or `webdataset`"""
    columns: tuple[str, ...] = ()
    """columns of the list with the URL, the caption and further values to keep with each sample, by name or by number
    (from 1); if empty, the columns of the URL and the caption are detected"""
    images: str | None = None
    """local folder of image files to import"""
    webdataset: str | None = None
    """WebDataset tars to import, such as img2dataset's: a local folder, or s3://bucket/prefix"""
    download: DownloadSettings = DownloadSettings()
    """settings of the download and of the stored images"""
    rows_per_shard: int = 1000
    """rows of the list, or image files, per shard"""
    shards_per_task: int = 10
    """shards that are collected, and retried, together; in a flow, by one Prefect task"""
    commit_unreachable: bool = False
    """commit a shard even if none of its hosts could be reached; set it only if these hosts are gone for good"""
    keep_empty_captions: bool = False
    """collect rows of a list or of tars whose caption is empty, too; they get no status `empty_caption` then"""
    retry_statuses: tuple[str, ...] = ()
    """statuses (`timeout`, `dns`, `http_5xx`, ...) whose rows in committed shards are requested again in this run"""

    def __post_init__(self):
        if (self.captions is None and self.images is None) == (self.webdataset is None):
            raise ValueError(
                f"Dataset {self.name}: set captions (a list to download), images (a local folder, with captions for "
                "its files) or webdataset (tars)"
            )
        check_choices(self)
        check_positive(self, "rows_per_shard", "shards_per_task")
        can_retry = self.is_download or not self.retry_statuses
        check(self, can_retry, "retry_statuses", "empty, because an import requests nothing")
        are_valid = len(self.columns) == len(set(self.columns)) and len(self.columns) != 1
        check(self, are_valid, "columns", "the columns of URL, caption and further values to keep, each once")
        check(self, not self.columns or self.origin != self.images, "columns", "empty, because there is no list")
        self.retried_statuses  # noqa: B018  raises ValueError for an unknown status

    @property
    def retried_statuses(self) -> frozenset[Status]:
        """Statuses named in `retry_statuses`. Raises ValueError for an unknown name."""
        return parse_statuses(self.retry_statuses)

    @property
    def is_download(self) -> bool:
        """True if images are requested from servers."""
        return self.captions is not None and self.images is None

    @property
    def origin(self) -> str:
        """Path of the caption list, of the folder of images, or of the folder or bucket of tars."""
        return self.captions or self.images or self.webdataset or ""


# --- rows -------------------------------------------------------------------------------------------------------------


def find_columns(settings: CollectSettings) -> Reading:
    """Return the format and the columns of the origin. If `settings` names none, a list's columns are detected.

    Raises ValueError if a file cannot be read, a column does not exist, or the columns cannot be detected.
    """
    if settings.captions:
        return find_reading(Path(settings.captions), settings.columns, of_folder=settings.images is not None)
    if settings.webdataset:
        TarSet(settings.webdataset)  # raises ValueError for a folder without tars
    return Reading("webdataset" if settings.webdataset else "images", settings.columns)


def prepare_rows(store: ObjectStore, settings: CollectSettings) -> Rows:
    """Return the rows of the origin. The origin is read only if no earlier run has stored its rows.

    Raises ValueError if there are no rows.
    """
    reading = find_columns(settings)
    names = _folder_files(store, settings) if reading.form == "images" else []
    id = identify(settings, reading, names)
    try:
        rows = Rows(store, settings.name, id)
    except ObjectMissing:
        if settings.captions:
            origin = read_rows(Path(settings.captions), reading)
        elif settings.webdataset:
            origin = TarSet(settings.webdataset).rows(reading)
        else:
            origin = (CaptionRow(row, "", name) for row, name in enumerate(names))
        if not settings.keep_empty_captions and settings.origin != settings.images:
            origin = (_check_caption(row, reading, Path(settings.origin).name) for row in origin)
        rows = write_rows(store, settings.name, id, reading, origin)
    if not rows.count:
        raise ValueError(f"{settings.origin} has no rows to collect for {settings.name}")
    return rows


def _check_caption(row: CaptionRow, reading: Reading, origin: str) -> CaptionRow:
    """Return the row, with the status EMPTY_CAPTION if its caption has no visible character and it has no status."""
    if row.status or any(letter.isprintable() for letter in row.caption.replace(" ", "")):
        return row
    detail = f"{reading.location(origin, row.row)} has no caption; --keep_empty_captions collects it"
    return dataclasses.replace(row, status=Status.EMPTY_CAPTION, detail=detail)


def identify(settings: CollectSettings, reading: Reading, names: Sequence[str] = ()) -> str:
    """Return a hash of the origin's content and of `reading`, as 16 hex digits.

    The hash covers the bytes of a list, the `names` of the files in a folder, or the names, sizes and dates of tars.
    """
    if settings.captions:
        facts = sha256_of(Path(settings.captions))
    else:
        facts = TarSet(settings.webdataset).identity if settings.webdataset else names
    text = json.dumps([dataclasses.asdict(reading), facts, settings.keep_empty_captions])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def image_files(folder: str) -> list[str]:
    """Return the sorted names of the image files in a folder, without hidden files. Raises ValueError if it is none."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder; name a folder of image files")
    files = (file for file in Path(folder).iterdir() if not file.name.startswith("."))
    names = sorted(file.name for file in files if file.suffix.lower() in IMAGE_SUFFIXES)
    return [os.fsencode(name).decode(errors="backslashreplace") for name in names]  # some may not be UTF-8


def _folder_files(store: ObjectStore, settings: CollectSettings) -> list[str]:
    """Return the names of a folder's image files: those of committed shards in their rows, the others sorted.

    So new files make new shards. Raises ValueError, naming files, if some of committed shards are missing or changed.
    """
    folder, catalog = settings.images or "", Catalog(store, settings.name)
    withdrawn, committed, changed = read_withdrawn(store).urls, {}, []
    dates = {info.path: info.modified for info in store.list(catalog.path(IMAGES, ""))}
    names = [*catalog.newest(IMAGES).values()]
    for manifest in catalog.manifests(IMAGES, names, ["row", "url", "status", "sha256"]):
        since = dates.get(catalog.manifest_path(IMAGES, manifest.shard), 0.0) - 60  # clocks may differ
        for line in manifest.table.to_pylist() if manifest.meta["source"]["reading"]["form"] == "images" else ():
            name, file = line["url"], Path(folder, line["url"])
            committed[line["row"]] = name
            if line["status"] != Status.OK or name in withdrawn:
                continue
            if not file.is_file():
                changed.append(f"{name} is missing")
            elif file.stat().st_ctime > since and sha256_of(file) != line["sha256"]:
                changed.append(f"{name} has changed")
    if changed:
        raise ValueError(
            f"{settings.name}: {len(changed)} files of committed shards differ in {folder}: "
            f"{', '.join(changed[:5])}. Put them back, collect the folder as another dataset, or remove them from this "
            "one with `vlbert withdraw ROOT NAME`"
        )
    new = iter(sorted({*image_files(folder)} - {*committed.values()}))
    return [committed.get(row) or next(new, "") for row in range(max(committed, default=-1) + 1)] + [*new]


# --- shards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A shard to collect, and the range [start, stop) of its rows among all rows of the dataset."""

    shard: str
    start: int
    stop: int
    replaces: str = ""  # sha256 of the committed manifest if rows of it are requested again; "" for a new shard


def plan(settings: CollectSettings, rows: Rows, done: Mapping[str, Header]) -> list[Part]:
    """Divide all rows into shards. Committed shards (`done`, by name) keep their rows.

    Raises ValueError if there are more than MAX_SHARDS, or if a committed shard has different rows or image settings.
    """
    parts, start = [], 0
    while start < rows.count:
        shard = f"{len(parts):05}"
        stop = done[shard].meta["source"]["rows"][1] if shard in done else start + settings.rows_per_shard
        parts.append(Part(shard, start, min(max(stop, start + 1), rows.count)))
        start = parts[-1].stop
        if len(parts) > MAX_SHARDS:
            raise ValueError(f"{settings.name} would make more than {MAX_SHARDS} shards: raise rows_per_shard")
    by_shard = {part.shard: part for part in parts}
    for shard, header in done.items():
        _check_committed(settings, rows, header, by_shard.get(shard))
    return parts


def source_of(settings: CollectSettings, rows: Rows, part: Part) -> dict:
    """Return meta["source"] for a shard's manifest: where its rows came from and how they were read."""
    source = {"list": f"{Path(settings.origin).name} sha256:{rows.digest(part.start, part.stop)}", "id": rows.id}
    return source | {"rows": [part.start, part.stop], "reading": dataclasses.asdict(rows.reading)}


def _check_committed(settings: CollectSettings, rows: Rows, header: Header, part: Part | None) -> None:
    before, shard = header.meta["source"], header.shard
    same = part is not None and [part.start, part.stop] == before["rows"]
    if same and before["id"] != rows.id:  # most likely, the list grew
        same = source_of(settings, rows, part)["list"].rpartition(":")[2] == before["list"].rpartition(":")[2]
    if not same:
        now = f"rows {part.start} to {part.stop} of {settings.origin}" if part else f"only {rows.count} rows"
        raise ValueError(
            f"{settings.name}: the list changed under committed shards: shard {shard} has rows {before['rows'][0]} to "
            f"{before['rows'][1]} of {before['list']}, but now it would have {now}, read as {rows.reading}. Collect "
            "the new list as another dataset, or restore the old list, columns and rows_per_shard"
        )
    config, current = header.meta["config"], image_config(settings.download)[0]
    differing = [f"{name} {config[name]}, now {value}" for name, value in current.items() if config[name] != value]
    if differing:
        raise ValueError(
            f"{settings.name}: shard {shard} was collected with other image settings: {'; '.join(differing)}. "
            "Restore them, or collect another dataset"
        )
