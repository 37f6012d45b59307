"""What img2dataset has downloaded: a folder, or a prefix of a bucket.

img2dataset leaves for each shard NNNNN.parquet (a row for each URL: url, caption, key, status, error_message, ...),
NNNNN_stats.json, written last, and the images as KEY.jpg (.png, .webp) in NNNNN.tar (its format `webdataset`), in a
folder NNNNN/ (`files`), in NNNNN.tfrecord (`tfrecord`) or in a column jpg of the table (`parquet`). Its format `dummy`
leaves NNNNN_stats.json alone. A killed writer leaves files with the final names, so each shard is checked first. All of
it is untrusted: at most MAX_ROWS rows and MAX_TEXT bytes of a table are read, and no image outside the folder.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.collect.download import STATUSES, Download, Outcome, read_file
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
from storage.collect.lists import IMAGE_SUFFIXES, Reading, keepable, license_column, scalar
from storage.collect.normalise import Refused
from storage.collect.spool import Spool
from storage.collect.tars import content, end_fault, members_of
from storage.collect.tfrecord import read_examples
from storage.object_store import StorageUnreachable
from storage.safe_json import parse_json, printable, shown

MAX_ROWS = 100_000  # of one shard; img2dataset's default is 10,000
MAX_TEXT = 64 * 2**20  # bytes of captions, URLs, keys and errors in one shard
_MAX_PAGES = 256 * 2**20  # bytes of these columns in a row group, by its footer
_MAX_STATS = 2**20  # bytes of NNNNN_stats.json
_BATCH = 1000  # rows of a table that are decoded at a time
_IMAGE_BATCH = 16  # the same with images
_REQUESTS = 16  # images of the format `files` that are requested of a bucket at a time
_COPIED = 4 * 2**20  # bytes of a file that are copied at a time
_TABLE = ("key", "status", "error_message")  # columns beside URL and caption
_FILE = re.compile(r"(\d+)(\.parquet|\.tar|\.tfrecord|_stats\.json|)")
_KEY = re.compile(r"[^/\\\0]{0,60}")  # a file's name without its extension, never a path

# Its error messages come from urllib, from sockets and from itself. The first pattern that matches decides.
_MEANINGS: tuple[tuple[str, str], ...] = (
    (r"infinite loop|redirect error", "too_many_redirects"),
    (r"X-Robots-Tag", "x_robots_tag"),
    (r"timed out|timeout", "timeout"),
    (r"name or service not known|nodename nor servname|getaddrinfo|no address assoc|name resolution", "dns"),
    (r"\bssl\b|certificate|tlsv1", "tls"),
    (r"incompleteread", "short_body"),
    (r"refused|reset by peer|aborted|no route|unreachable|remote end closed|broken pipe", "connect"),
    (r"unknown url type|no host given|control characters|invalid url|nonnumeric port", "bad_url"),
    (r"too small|aspect ratio", "bad_geometry"),
    (r"decod|cannot identify|not an image", "not_image"),
)


class Img2dataset:
    """The shards below a folder or `s3://bucket/prefix` that img2dataset wrote."""

    def __init__(self, root: str):
        self._root, self._store = root, open_stored(root, "NNNNN.parquet files of img2dataset")
        self._folder = Path(self._store.where()) if "://" not in root else None
        self._copy: tuple[str, BinaryIO] | None = None

    @functools.cached_property
    def shards(self) -> list[str]:
        """Their names, in order; ValueError if there is none, or lists those that are torn."""
        files = self._files()
        names = sorted({match[1] for match in map(_FILE.fullmatch, files) if match}, key=lambda name: (int(name), name))
        if not names:
            tars = (
                "; for tars without tables set webdataset in its place" if any(".tar" in name for name in files) else ""
            )
            raise ValueError(
                f"{self._root} holds no shard of img2dataset (NNNNN.parquet beside NNNNN.tar or a folder NNNNN){tars}"
            )
        faults = {name: self._fault(name, files) for name in names}
        check_faults(
            self._root,
            faults,
            "remove their _stats.json and run img2dataset again with the same settings, which writes them again, or "
            "move their files",
        )
        return names

    def _files(self, start: str = "") -> dict[str, int]:
        """The size of each file whose name begins so, -1 of a folder; not of what lies in folders."""
        if self._folder is None:
            sizes = {}
            for info in self._store.list(start):
                name, _, inside = info.path.partition("/")
                sizes[name] = -1 if inside else info.size
            return sizes
        entries = [entry for entry in os.scandir(self._folder) if entry.name.startswith(start)]
        return {
            one.name: one.stat().st_size if one.is_file() else -1 for one in entries if one.is_file() or one.is_dir()
        }

    def _fault(self, name: str, files: Mapping[str, int]) -> str:
        """Why a shard cannot be imported; "" if it can."""
        stats, table, tar = f"{name}_stats.json", f"{name}.parquet", f"{name}.tar"
        if files.get(stats, -1) < 0:
            return f"no {stats}: its writer was stopped"
        if files.get(table, -1) < 0:
            return f"no {table}; its format dummy stores nothing"
        try:
            with self._table(name) as stored:
                metadata, schema = stored.metadata, stored.schema_arrow
        except StorageUnreachable:
            raise
        except (pa.ArrowException, OSError) as error:
            return f"{table} cannot be read: {printable(error)[:100]}"
        if files[stats] > _MAX_STATS:
            return f"{stats} cannot be read: it has {files[stats]} bytes, more than {_MAX_STATS}"
        try:
            count = self._count(name)
        except ValueError as error:
            return f"{stats} cannot be read: {printable(error)}"
        rows = metadata.num_rows
        missing = [column for column in ("url", "key", "status") if column not in schema.names]
        if missing:
            return f"{table} has no column {missing[0]}"
        if count < rows:
            return f"{table} has {rows} rows, {stats} counts {count}"
        if count > MAX_ROWS:
            return f"{stats} counts {count} rows; a shard has {MAX_ROWS} at most"
        text = set(schema.names) - set(_image_columns(schema))
        for group in range(metadata.num_row_groups):
            columns = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
            size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.partition(".")[0] in text)
            if size > _MAX_PAGES:
                return f"{table} has {size} bytes of text in row group {group}; {_MAX_PAGES} are read at most"
        if files.get(tar, -1) >= 0:
            return end_fault(tar, files[tar], functools.partial(self._store.get_range, tar))
        if name not in files and f"{name}.tfrecord" not in files and not _image_columns(schema):
            return f"neither {tar} nor {name}.tfrecord nor a folder {name}, and no column jpg in {table}"
        return ""

    def _count(self, shard: str) -> int:
        """How many rows img2dataset was given for a shard; ValueError if its statistics do not say."""
        stats = f"{shard}_stats.json"
        count = parse_json(self._store.get(stats), stats).get("count")
        if type(count) is not int:
            raise ValueError(f"its count is {shown(count)}")
        return count

    @contextlib.contextmanager
    def _table(self, shard: str, **options: Any) -> Iterator[pq.ParquetFile]:
        with opened(self._store, f"{shard}.parquet") as stream, pq.ParquetFile(stream, **options) as table:
            yield table

    def find_reading(self, columns: Sequence[str] = ()) -> Reading:
        """The columns of its tables that hold URL, caption and what is kept; ValueError names one that is missing."""
        with self._table(self.shards[0]) as table:
            schema = table.schema_arrow
        if not columns:
            kept = [field.name for field in schema if keepable(field.type)]
            return Reading("img2dataset", ("url", "caption", *license_column(kept)), (), 0)
        self._check_columns(self.shards[0], columns, schema.names)
        return Reading("img2dataset", tuple(columns), (), 0)

    def _check_columns(self, shard: str, columns: Sequence[str], names: Sequence[str]) -> None:
        # Without captions in its list, img2dataset has no column for them.
        needed = [name for place, name in enumerate(columns) if (place, name) != (1, "caption")]
        missing = next((name for name in needed if name not in names), None)
        if missing is not None:
            where = self._store.where(f"{shard}.parquet")
            raise ValueError(f"{where} has no column {shown(missing)}; it has {printable(', '.join(names))[:500]}")

    def rows(self, reading: Reading) -> Iterator[tuple[str, list[StoredRow]]]:
        """Each shard and its rows."""
        for shard in self.shards:
            yield shard, self.read_rows(shard, reading)

    def read_rows(self, shard: str, reading: Reading) -> list[StoredRow]:
        """The rows of one shard by key, which is the order of the list; a missing caption is empty.

        ValueError names a file that cannot be read, lacks a column, holds more than MAX_ROWS or MAX_TEXT, or has a key
        with a path.
        """
        where, rows, text = self._store.where(f"{shard}.parquet"), [], 0
        url, caption, *kept = reading.columns
        wanted = (*_TABLE, caption, url)
        try:
            with self._table(shard) as table:
                schema = table.schema_arrow
            self._check_columns(shard, reading.columns, schema.names)
            names = list(dict.fromkeys(name for name in (*wanted, *kept) if name in schema.names))
            # As a dictionary, a value that many rows share is in memory once.
            shared = [name for name in names if pa.types.is_string(schema.field(name).type)]
            with self._table(shard, read_dictionary=shared, buffer_size=2**16) as table:
                for batch in table.iter_batches(_BATCH, columns=names, use_threads=False):
                    none = pa.nulls(len(batch), pa.string())
                    columns = [batch[name] if name in names else none for name in wanted]
                    text += sum(_bytes_of(column) for column in columns) + sum(batch[name].nbytes for name in kept)
                    if text > MAX_TEXT or len(rows) + len(batch) > MAX_ROWS:
                        raise ValueError(
                            f"{where} holds more than {MAX_ROWS} rows or {MAX_TEXT} bytes of text; write it in smaller "
                            "shards, or move it away"
                        )
                    more = [batch[name].to_pylist() for name in kept]
                    lines = zip(*(column.cast(pa.string()).to_pylist() for column in columns), strict=True)
                    for number, (key, status, error, text_of, address) in enumerate(lines):
                        extra = {
                            name: scalar(values[number], name, where) for name, values in zip(kept, more, strict=True)
                        }
                        texts = (key or "", text_of or "", address or "", status or "", error or "")
                        rows.append(StoredRow(shard, *texts, extra if kept else None))
        except StorageUnreachable:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where} cannot be read: {printable(error)[:200]}; run img2dataset again, or move it away"
            ) from error
        wrong = next((row.key for row in rows if not _KEY.fullmatch(row.key)), None)
        if wrong is not None:
            raise ValueError(
                f"{where}: key {wrong[:100]!r} is not a file's name, so img2dataset did not write it; move the shard "
                "away"
            )
        rows.sort(key=lambda row: row.key)
        # If writing a row fails, img2dataset prints why and goes on.
        for number in range(self._count(shard) - len(rows)):
            rows.append(StoredRow(shard, "", "", f"{shard}.parquet without row {number}", "lost", "it wrote no row"))
        return [dataclasses.replace(row, offset=number) for number, row in enumerate(rows)]

    def import_rows(
        self,
        shard: str,
        offset: int,
        count: int,
        reading: Reading,
        first: int,
        duplicates: Mapping[int, int],
        settings: DownloadSettings,
        spool: Spool,
    ) -> tuple[list[StoredRow], list[Download]]:
        """Rows [offset, offset + count) of one shard and a Download of each, the first of them row `first`.

        duplicates: row -> the first row with the same URL and caption. ValueError if the images' file is damaged.
        """
        rows = self.read_rows(shard, reading)[offset : offset + count]
        wanted = {
            row.key for number, row in enumerate(rows, first) if row.status == SUCCESS and number not in duplicates
        }
        images = decoded(self._images(shard, wanted, settings.max_bytes), settings, spool)

        def outcome(_number: int, row: StoredRow) -> Outcome:
            if row.status != SUCCESS:
                return Refused(status_of(row), f"img2dataset: {row.status}: {row.error}")
            if row.key not in images:
                where = f"{Path(self._root).name}/{row.shard} has no image {row.key}"
                return Refused("missing_file", f"{where}, though img2dataset says success")
            return images[row.key]

        return rows, downloads_of(rows, first, duplicates, outcome)

    def _images(self, shard: str, wanted: set[str], limit: int) -> Iterator[tuple[str, bytes | Refused]]:
        """Key and bytes of each wanted image that exists; one over `limit` bytes is refused and not read."""
        tar, records, table = f"{shard}.tar", f"{shard}.tfrecord", self._store.where(f"{shard}.parquet")
        files = self._files(shard)
        if tar in files:
            with self._copied(tar) as stream:
                for member in members_of(stream, self._store.where(tar)):
                    key, _, extension = member.name.partition(".")
                    if key in wanted and f".{extension}" in IMAGE_SUFFIXES:
                        yield key, content(stream, member, limit, self._store.where(tar))
        elif records in files:

            def is_wanted(example: Mapping[str, memoryview]) -> bool:
                return str(example.get("key", b""), errors="replace") in wanted

            with self._copied(records) as stream:
                for example in read_examples(stream, self._store.where(records), is_wanted):
                    image = next((example[suffix[1:]] for suffix in IMAGE_SUFFIXES if suffix[1:] in example), None)
                    if image is not None:
                        yield (
                            str(example["key"], "utf-8"),
                            too_big(len(image), limit) if len(image) > limit else bytes(image),
                        )
        elif shard in files:
            yield from self._images_of_folder(shard, wanted, limit)
        else:
            try:
                with self._table(shard, pre_buffer=False, buffer_size=2**20) as stored:
                    columns = ["key", *_image_columns(stored.schema_arrow)[:1]]
                    for batch in stored.iter_batches(_IMAGE_BATCH, columns=columns, use_threads=False):
                        keys = batch["key"].cast(pa.string()).to_pylist()
                        for key, image in zip(keys, batch[columns[1]], strict=True):
                            if key in wanted and image.is_valid:
                                data = image.as_buffer()
                                yield key, too_big(data.size, limit) if data.size > limit else data.to_pybytes()
            except StorageUnreachable:
                raise
            except (pa.ArrowException, OSError) as error:
                raise ValueError(
                    f"{table} is damaged: {printable(error)[:200]}; copy it again, or run img2dataset again"
                ) from error

    def _images_of_folder(self, shard: str, wanted: set[str], limit: int) -> Iterator[tuple[str, bytes | Refused]]:
        sizes = {} if self._folder else {info.path: info.size for info in self._store.list(f"{shard}/")}

        def read(key: str) -> bytes | Refused | None:
            names = [f"{shard}/{key}{suffix}" for suffix in IMAGE_SUFFIXES]
            if not self._folder:
                name = next((one for one in names if one in sizes), None)
                if name and sizes[name] > limit:
                    return too_big(sizes[name], limit)
                return name and self._store.get(name)
            file = next((found for one in names if (found := self._folder / one).exists()), None)
            if file is None:
                return None
            if not file.resolve().is_relative_to(self._folder.resolve()):
                return Refused("missing_file", f"{file} is a link to a file outside {self._folder}")
            try:
                return read_file(file, limit)
            except Refused as refused:
                return refused

        with ThreadPoolExecutor(1 if self._folder else _REQUESTS, thread_name_prefix="images") as pool:
            keys = iter(sorted(wanted))
            while some := list(itertools.islice(keys, _REQUESTS)):
                yield from (
                    (key, image) for key, image in zip(some, pool.map(read, some), strict=True) if image is not None
                )

    @contextlib.contextmanager
    def _copied(self, path: str) -> Iterator[BinaryIO]:
        """A file of images. That of a bucket is copied first, once for all parts: their rows lie all over it."""
        if self._folder is not None:
            with (self._folder / path).open("rb") as stream:
                yield stream
            return
        if self._copy is None or self._copy[0] != path:
            copy = tempfile.TemporaryFile()  # noqa: SIM115  as long as this object lives
            weakref.finalize(self, copy.close)
            with opened(self._store, path) as stream:
                shutil.copyfileobj(stream, copy, _COPIED)
            if self._copy:
                self._copy[1].close()
            self._copy = path, copy
        self._copy[1].seek(0)
        yield self._copy[1]


def _image_columns(schema: pa.Schema) -> list[str]:
    """The columns of a table that hold images."""
    names = (suffix[1:] for suffix in IMAGE_SUFFIXES)
    return [name for name in names if name in schema.names and pa.types.is_binary(schema.field(name).type)]


def _bytes_of(column: pa.Array) -> int:
    """Bytes of the strings of a column, each row counted."""
    if pa.types.is_dictionary(column.type):
        lengths = pc.take(pc.binary_length(column.dictionary.cast(pa.binary())), column.indices)
    else:
        lengths = pc.binary_length(column.cast(pa.string()).cast(pa.binary()))
    return pc.sum(lengths).as_py() or 0


def status_of(row: StoredRow) -> str:
    """Our status of a row that img2dataset did not store."""
    for pattern, status in _MEANINGS:
        if re.search(pattern, row.error, re.IGNORECASE):
            return status
    code = re.search(r"HTTP Error (\d{3})", row.error)
    if code:
        return f"http_{code[1]}" if f"http_{code[1]}" in STATUSES else "http_other"
    return "not_image" if row.status == "failed_to_resize" else "not_stored"
