"""What is collected: the settings of a dataset, its rows, and the shards that these make.

Before the first download the origin is read into rows (storage/collect/rows.py), unless they are there already. `plan`
cuts them into parts, and compares these with the shards that are committed.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.collect.download import image_config
from storage.collect.fetch import DownloadSettings
from storage.collect.lists import IMAGE_SUFFIXES, find_reading, read_rows
from storage.collect.rows import CaptionRow, Reading, Rows, write_rows
from storage.collect.statuses import Status, parse_statuses
from storage.collect.tars import TarSet
from storage.manifests import Header
from storage.object_store import ObjectMissing, ObjectStore
from storage.programs import Dataset
from storage.settings import FORM, check, check_choices

MOST_SHARDS = 100_000  # of a catalog: their names have five digits


@dataclass(frozen=True)
class CollectSettings:
    """One dataset's images: where they come from, and how many make a shard."""

    __pydantic_config__ = FORM

    name: Dataset
    """The dataset: the folder of the root that holds the shards."""
    captions: str | None = None
    """A caption list to download: TSV, CSV, JSON lines, Parquet, JSON, or .gz of one. With `images`, the captions of
    that folder. Give this, `images` or `webdataset`."""
    columns: tuple[str, ...] = ()
    """Which columns of the list hold the URL, the caption and, if more are named, what is kept with each sample: names,
    or places from 1 on. None: URL and caption are recognised."""
    images: str | None = None
    """A local folder of image files to import."""
    webdataset: str | None = None
    """WebDataset tars of others to import, such as img2dataset's: a local folder, or s3://bucket/prefix."""
    download: DownloadSettings = DownloadSettings()
    """How images are fetched, and which are stored in which form."""
    rows_per_shard: int = 1000
    """Rows of the list, or image files, that make one shard."""
    shards_per_task: int = 10
    """Shards that are collected, and tried again, together: in a flow, by one Prefect task."""
    commit_unreachable: bool = False
    """Commit a shard even if none of its hosts could be reached; set it only if these hosts are gone for good."""
    retry_statuses: tuple[str, ...] = ()
    """Statuses (`timeout`, `dns`, `http_5xx`, ...) whose rows in committed shards are requested again, for one run."""

    def __post_init__(self):
        if (self.captions is None and self.images is None) == (self.webdataset is None):
            raise ValueError(
                f"Dataset {self.name}: set captions (a list to download) or images (a local folder; captions are then "
                "those of its files), or webdataset (tars)"
            )
        check_choices(self)
        for name in ("rows_per_shard", "shards_per_task"):
            check(self, getattr(self, name) >= 1, name, "at least 1")
        asks = self.is_download or not self.retry_statuses
        check(self, asks, "retry_statuses", "empty: nothing is requested of a server")
        named = len(self.columns) == len(set(self.columns)) and len(self.columns) != 1
        check(self, named, "columns", "URL, caption and what is kept beside them, each once")
        check(self, not self.columns or self.origin != self.images, "columns", "empty where there is no list")
        self.retried_statuses  # noqa: B018  refuses an unknown status

    @property
    def retried_statuses(self) -> frozenset[Status]:
        """The statuses that `retry_statuses` names; ValueError for an unknown one."""
        return parse_statuses(self.retry_statuses)

    @property
    def is_download(self) -> bool:
        """Whether images are requested from servers."""
        return self.captions is not None and self.images is None

    @property
    def origin(self) -> str:
        """The list, the folder or the bucket."""
        return self.captions or self.images or self.webdataset or ""


# --- rows -------------------------------------------------------------------------------------------------------------


def find_columns(settings: CollectSettings) -> Reading:
    """How the origin is read: a list as `columns` says, or recognised.

    ValueError names a file that cannot be read, a column that is not there, or says that columns are to be given.
    """
    if settings.captions:
        return find_reading(Path(settings.captions), settings.columns, of_folder=settings.images is not None)
    if settings.webdataset:
        TarSet(settings.webdataset)  # refuses a folder without tars
    return Reading("webdataset" if settings.webdataset else "images", settings.columns)


def prepare_rows(store: ObjectStore, settings: CollectSettings) -> Rows:
    """The rows of the origin: those in the dataset's folder if it was read before as it is now, else it is read.

    ValueError if it has no row.
    """
    reading = find_columns(settings)
    id = identify(settings, reading)
    try:
        rows = Rows(store, settings.name, id)
    except ObjectMissing:
        rows = write_rows(store, settings.name, id, reading, _read(settings, reading))
    if not rows.count:
        raise ValueError(f"{settings.origin} holds nothing to collect for {settings.name}")
    return rows


def identify(settings: CollectSettings, reading: Reading) -> str:
    """What tells whether the origin is as it was, in 16 hex digits, without reading its rows.

    Of a list its bytes, of a folder the names of its files, of tars their names, sizes and dates.
    """
    if settings.captions:
        with open(settings.captions, "rb") as stream:
            facts = hashlib.file_digest(stream, "sha256").hexdigest()
    else:
        facts = TarSet(settings.webdataset).identity if settings.webdataset else image_files(settings.images or "")
    text = json.dumps([dataclasses.asdict(reading), facts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(settings: CollectSettings, reading: Reading) -> Iterator[CaptionRow]:
    if settings.captions:
        yield from read_rows(Path(settings.captions), reading)
    elif settings.webdataset:
        yield from TarSet(settings.webdataset).rows(reading)
    else:
        for number, name in enumerate(image_files(settings.images or "")):
            yield CaptionRow(number, "", name)


def image_files(folder: str) -> list[str]:
    """The names of the image files of a folder, in order; ValueError if it is not a folder."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder; name one that holds image files")
    names = sorted(file.name for file in Path(folder).iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
    return [os.fsencode(name).decode(errors="backslashreplace") for name in names]  # not all are UTF-8


# --- shards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One shard to collect: rows [start, stop).

    replaces: sha256 of the committed manifest if some of its rows are requested again; "" if it is not committed yet.
    """

    shard: str
    start: int
    stop: int
    replaces: str = ""


def plan(settings: CollectSettings, rows: Rows, done: Mapping[str, Header]) -> list[Part]:
    """The shards that the rows make, in order, committed ones (`done`, by shard) with the rows that they have.

    ValueError if they are more than MOST_SHARDS, or if a committed shard has other rows or other image settings.
    """
    parts, start = [], 0
    while start < rows.count:
        shard = f"{len(parts):05}"
        stop = done[shard].meta["source"]["rows"][1] if shard in done else start + settings.rows_per_shard
        parts.append(Part(shard, start, min(max(stop, start + 1), rows.count)))
        start = parts[-1].stop
        if len(parts) > MOST_SHARDS:
            raise ValueError(f"{settings.name} would make more than {MOST_SHARDS} shards: raise rows_per_shard")
    by_shard = {part.shard: part for part in parts}
    for shard, header in done.items():
        _check_committed(settings, rows, header, by_shard.get(shard))
    return parts


def source_of(settings: CollectSettings, rows: Rows, part: Part) -> dict:
    """What a manifest says of its rows: which of which list, and how that is read."""
    source = {"list": f"{Path(settings.origin).name} sha256:{rows.digest(part.start, part.stop)}", "id": rows.id}
    return source | {"rows": [part.start, part.stop], "reading": dataclasses.asdict(rows.reading)}


def _check_committed(settings: CollectSettings, rows: Rows, header: Header, part: Part | None) -> None:
    before, shard = header.meta["source"], header.shard
    same = part is not None and [part.start, part.stop] == before["rows"]
    if same and before["id"] != rows.id:  # a list that grew, most likely
        same = source_of(settings, rows, part)["list"].rpartition(":")[2] == before["list"].rpartition(":")[2]
    if not same:
        now = f"rows {part.start} to {part.stop} of {settings.origin}" if part else f"only {rows.count} rows"
        raise ValueError(
            f"{settings.name}: the list changed under committed shards: shard {shard} holds rows "
            f"{before['rows'][0]} to {before['rows'][1]} of {before['list']}, now it would be {now}, read as "
            f"{rows.reading}. Collect the new list as another dataset, or set the old list, columns and rows_per_shard "
            "again"
        )
    config, wanted = header.meta["config"], image_config(settings.download)[0]
    differing = [f"{name} {config[name]}, now {value}" for name, value in wanted.items() if config[name] != value]
    if differing:
        raise ValueError(
            f"{settings.name}: shard {shard} was collected with other image settings: {'; '.join(differing)}. "
            "Set them back, or collect another dataset"
        )
