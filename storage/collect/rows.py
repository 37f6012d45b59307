"""Rows to collect, stored as Parquet parts in the dataset's folder of the root.

    ROOT/<dataset>/images/rows/<id>.parquet           index: the parts, and the rows that repeat an earlier one
    ROOT/<dataset>/images/rows/part-<hash>.parquet    a part: up to PART_ROWS rows

The list, folder or tars are read once and written as parts named by a hash of their content. The index is written
last, and only if it does not exist yet. As long as the list does not change, all runs on all machines read only these
files. If rows are added at the end of the list, its first parts are reused. docs/formats.md specifies the layout.
"""

import dataclasses
import functools
import hashlib
import io
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.digests import BLANK, OWN_SHA256, check_version, has_valid_digest, write_digest
from storage.manifests import parse_parquet
from storage.object_store import ObjectMissing, ObjectStore
from storage.sample import sample_key

if TYPE_CHECKING:  # caption lists are read without importing the image decoders
    from storage.collect.spool import SpooledImage

ROWS_VERSION = 3
PART_ROWS = 10_000
_KEY_BYTES = 10  # bytes of a sample's key
_KEPT_PARTS = 4  # parts in memory; the shards that are collected together lie in one or two
_PART = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("url", pa.string(), nullable=False),
        pa.field("caption", pa.string(), nullable=False),
        pa.field("extra", pa.string()),  # JSON
        pa.field("status", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("tar", pa.string()),
        pa.field("offset", pa.int64()),
        pa.field("size", pa.int64()),
    ]
)
_IDENTITY = ("url", "caption", "extra")  # columns that a row's digest covers
_INDEX = pa.schema([pa.field("row", pa.int64(), nullable=False), pa.field("first", pa.int64(), nullable=False)])

Scalar = str | int | float | bool | None
Extra = dict[str, Scalar]  # further columns of a row, by name


@dataclass(frozen=True)
class Reading:
    """The format and columns of an origin (a caption list, a folder of images, or tars)."""

    form: str  # tsv, csv, csv with ;, tsv with |, jsonl, json, parquet, webdataset or images
    columns: tuple[str, ...] = ()  # URL, caption, and further ones to keep; for tars, as in the settings
    header: bool = False  # whether the first line has the column names (TSV and CSV)
    several: bool = False  # whether a row of the file may have several captions, each of which is a row here

    def __str__(self) -> str:
        header, several = " with a header" * self.header, ", several captions a row" * self.several
        return f"{self.form}{header}, columns {', '.join(self.columns)}{several}" if self.columns else self.form

    def location(self, origin: str, row: int) -> str:
        """Return the position of a row, for messages: FILE:LINE if each row is one line, else "FILE, row N".

        The names of the columns count as a row, as in an editor. If a row may have several captions, these are counted.
        """
        if self.several:
            return f"{origin}, caption {row + 1}"
        number = row + 1 + self.header
        return f"{origin}:{number}" if self.form.startswith(("tsv", "jsonl")) else f"{origin}, row {number}"


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an image in a tar. Offset and size are in bytes."""

    tar: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class CaptionRow:
    """One row of a caption list, folder or tar: a caption, its image's location and, later, the collected image."""

    row: int  # its number in the origin, from 0, not counting a header
    caption: str  # as in the file
    url: str  # as in the file
    extra: Extra | None = None  # further columns; None if there are none
    key: str = ""  # computed from URL and caption if empty
    status: str = ""  # a Status; "" before the row is collected
    detail: str = ""  # explains the status
    place: Place | None = None  # of an image in a tar
    image: "SpooledImage | None" = None  # if the status is ok

    def __post_init__(self):
        if not self.key:
            object.__setattr__(self, "key", sample_key(self.url, self.caption))


class Rows:
    """The stored rows of a caption list, of a folder of images, or of tars, numbered from 0.

    Attributes:
        reading: format and columns from which the rows were read
        unreadable: numbers of the rows that cannot be collected; their statuses say why
        repeated: numbers of the rows that repeat the URL and caption of an earlier row, ascending
        firsts: for each of `repeated`, the number of the first row with the same URL and caption
    """

    def __init__(self, store: ObjectStore, dataset: str, id: str):
        """Read the index of the rows. Raises ObjectMissing if it does not exist, and ValueError if it is damaged."""
        self._store, self._folder = store, _folder(dataset)
        path = f"{self._folder}/{id}.parquet"
        data, self._uri = store.get(path), store.uri(path)
        if not has_valid_digest(data):
            raise self._damaged(self._uri)
        table = parse_parquet(data)
        header = json.loads(table.schema.metadata[b"rows"])
        check_version(header["version"], ROWS_VERSION, self._uri)
        self.id, self.count, self._parts = id, header["count"], header["parts"]
        self.unreadable: list[int] = header["unreadable"]
        self.reading = Reading(**header["reading"] | {"columns": tuple(header["reading"]["columns"])})
        self.repeated, self.firsts = (table[name].to_numpy() for name in _INDEX.names)
        self._part = functools.lru_cache(_KEPT_PARTS)(self._read_part)

    def read(self, start: int, stop: int) -> list[CaptionRow]:
        """Return the rows with the numbers [start, stop)."""
        return list(itertools.starmap(_make_row, enumerate(self._table(start, stop).to_pylist(), start)))

    def duplicates(self, start: int, stop: int) -> dict[int, int]:
        """Map each row in [start, stop) that repeats an earlier row to the first row with the same URL and caption."""
        part = slice(*np.searchsorted(self.repeated, [start, stop]))
        return dict(zip(self.repeated[part].tolist(), self.firsts[part].tolist(), strict=True))

    def digest(self, start: int, stop: int) -> str:
        """Return the sha256 (hex digits) of the URLs, captions and further columns of the rows [start, stop)."""
        columns = self._table(start, stop).select(_IDENTITY).to_pydict()
        return hashlib.sha256(json.dumps(columns).encode()).hexdigest()

    def _table(self, start: int, stop: int) -> pa.Table:
        parts = range(start // PART_ROWS, -(-stop // PART_ROWS))
        table = pa.concat_tables(map(self._part, parts)) if parts else _PART.empty_table()
        return table.slice(start - parts.start * PART_ROWS, stop - start)

    def _read_part(self, number: int) -> pa.Table:
        path = f"{self._folder}/part-{self._parts[number]}.parquet"
        try:
            data = self._store.get(path)
        except ObjectMissing as error:
            raise self._damaged(self._store.uri(path)) from error
        if _hash(data) != self._parts[number]:
            raise self._damaged(self._store.uri(path))
        return parse_parquet(data).replace_schema_metadata(None)

    def _damaged(self, uri: str) -> ValueError:
        return ValueError(f"{uri} is damaged or missing; delete {self._uri}, and run again")


def write_rows(store: ObjectStore, dataset: str, id: str, reading: Reading, rows: Iterable[CaptionRow]) -> Rows:
    """Store rows as parts, and their index under `id`. Return the stored rows. Existing files are kept."""
    rows, keys, names, unreadable = iter(rows), bytearray(), [], []
    while part := list(itertools.islice(rows, PART_ROWS)):
        unreadable += [row.row for row in part if row.status]
        keys += bytes.fromhex("".join(row.key for row in part))
        lines = [
            {name: getattr(row, name) for name in ("key", "url", "caption", "status", "detail")}
            | {"extra": row.extra and json.dumps(row.extra), **(dataclasses.asdict(row.place) if row.place else {})}
            for row in part
        ]
        data = _to_parquet(pa.Table.from_pylist(lines, schema=_PART))
        names.append(_hash(data))
        store.put(f"{_folder(dataset)}/part-{names[-1]}.parquet", data, if_absent=True)
    repeated, firsts = _find_repeated(keys, unreadable)
    header = {"version": ROWS_VERSION, "count": len(keys) // _KEY_BYTES, "unreadable": unreadable, "parts": names}
    header["reading"] = dataclasses.asdict(reading)
    schema = _INDEX.with_metadata({"rows": json.dumps(header), OWN_SHA256: BLANK})
    index = bytearray(_to_parquet(pa.Table.from_arrays([pa.array(repeated), pa.array(firsts)], schema=schema)))
    write_digest(index)
    store.put(f"{_folder(dataset)}/{id}.parquet", bytes(index), if_absent=True)
    return Rows(store, dataset, id)


def _folder(dataset: str) -> str:
    return f"{dataset}/images/rows"


def _make_row(number: int, line: dict) -> CaptionRow:
    place = None if line["tar"] is None else Place(line["tar"], line["offset"], line["size"])
    extra = None if line["extra"] is None else json.loads(line["extra"])
    return CaptionRow(number, line["caption"], line["url"], extra, line["key"], line["status"], line["detail"], place)


def _to_parquet(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd", use_dictionary=["status", "detail", "tar"], version="2.6")
    return out.getvalue()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _find_repeated(keys: bytearray, unreadable: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: the readable rows that repeat an earlier key, and for each, the first row with that key."""
    table = np.frombuffer(keys, dtype=f"S{_KEY_BYTES}")
    rows = np.delete(np.arange(len(table)), unreadable)
    _, firsts, inverse = np.unique(table[rows], return_index=True, return_inverse=True)
    firsts = rows[firsts[inverse]]
    return rows[rows != firsts], firsts[rows != firsts]
