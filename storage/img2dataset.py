"""Folders that img2dataset wrote, as if their rows were collected here: statuses, captions, images, torn shards.

img2dataset leaves for each shard NNNNN.parquet (a row for each URL: url, caption, key, status, error_message, ...),
NNNNN_stats.json, written last, and the images as KEY.jpg (.png, .webp) in NNNNN.tar (its format `webdataset`) or in a
folder NNNNN/ (its format `files`). A killed writer leaves files with the final names, so each shard is checked first.
The folder is untrusted: at most MAX_ROWS rows and MAX_TEXT bytes of a table are read, and no image outside the folder.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.download import STATUSES, CaptionRow, Download, Outcome, read_file, spooled
from storage.fetch import DownloadSettings
from storage.normalise import Refused
from storage.safe_json import parse_json, printable
from storage.spool import Spool

_IMAGES = (".jpg", ".jpeg", ".png", ".webp")
_BLOCK = 512  # of a tar
MAX_ROWS = 100_000  # of one shard; img2dataset's default is 10,000
MAX_TEXT = 64 * 2**20  # bytes of captions, URLs, keys and errors in one shard
_MAX_PAGES = 256 * 2**20  # bytes of these columns in a row group, by its footer
_MAX_STATS = 2**20  # bytes of NNNNN_stats.json
_BATCH = 1000  # rows of a table that are decoded at a time
_COLUMNS = ("key", "caption", "url", "status", "error_message")
_KEY = re.compile(r"[^/\\\0]{0,60}")  # a file's name without its extension, never a path
_SUCCESS = "success"

# Its error messages come from urllib, from sockets and from itself. The first pattern that matches decides.
_MEANINGS: tuple[tuple[str, str], ...] = (
    (r"infinite loop|redirect error", "too_many_redirects"),
    (r"X-Robots-Tag", "refused_by_robots"),
    (r"timed out|timeout", "timeout"),
    (r"name or service not known|nodename nor servname|getaddrinfo|no address assoc|name resolution", "dns"),
    (r"\bssl\b|certificate|tlsv1", "tls"),
    (r"incompleteread", "short_body"),
    (r"refused|reset by peer|aborted|no route|unreachable|remote end closed|broken pipe", "connect"),
    (r"unknown url type|no host given|control characters|invalid url|nonnumeric port", "bad_url"),
    (r"too small|aspect ratio", "bad_geometry"),
    (r"decod|cannot identify|not an image", "not_image"),
)


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row of NNNNN.parquet; `key` is img2dataset's own, status its `success`, `failed_to_download`, ..."""

    shard: str
    key: str
    caption: str
    url: str
    status: str
    error: str

    def line(self) -> bytes:
        """The identity of the row, for the digest of the shard's rows."""
        return json.dumps([self.shard, self.key, self.caption, self.url, self.status, self.error]).encode()


def shard_names(folder: Path) -> list[str]:
    """The shards of a folder, in order.

    ValueError if it holds none, or lists those that are torn or in another format.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder that img2dataset wrote; name one that has NNNNN.parquet files")
    found = (re.fullmatch(r"(\d{5,})(\.parquet|\.tar|_stats\.json|)", file.name) for file in folder.iterdir())
    names = sorted({match[1] for match in found if match}, key=lambda name: (int(name), name))
    if not names:
        raise ValueError(f"{folder} holds no shard of img2dataset (NNNNN.parquet beside NNNNN.tar or a folder NNNNN)")
    faults = {name: _fault(folder, name) for name in names}
    torn = [f"{name}: {fault}" for name, fault in faults.items() if fault]
    if torn:
        more = f"; and {len(torn) - 10} more" if len(torn) > 10 else ""
        raise ValueError(
            f"{folder}: {len(torn)} of {len(names)} shards cannot be imported ({'; '.join(torn[:10])}{more}). "
            "Run img2dataset again with the same settings, which writes them again, or move their files away and "
            "import the rest"
        )
    return names


def _fault(folder: Path, name: str) -> str:
    """Why a shard cannot be imported; "" if it can."""
    stats, table, tar = folder / f"{name}_stats.json", folder / f"{name}.parquet", folder / f"{name}.tar"
    if not stats.is_file():
        return f"no {stats.name}: its writer was stopped"
    if not table.is_file():
        return f"no {table.name}"
    try:
        metadata = pq.read_metadata(table)
        schema, rows = metadata.schema.to_arrow_schema(), metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        return f"{table.name} cannot be read: {str(error)[:100]}"
    try:
        count = parse_json(read_file(stats, _MAX_STATS), stats.name)["count"]
    except Refused as refused:
        return f"{stats.name} cannot be read: {refused.detail}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{stats.name} cannot be read: {printable(error)}"
    missing = [column for column in ("url", "key", "status") if column not in schema.names]
    if missing:
        return f"{table.name} has no column {missing[0]}"
    if count != rows:
        return f"{table.name} has {rows} rows, {stats.name} counts {count}"
    if rows > MAX_ROWS:
        return f"{table.name} has {rows} rows; a shard has {MAX_ROWS} at most"
    for group in range(metadata.num_row_groups):
        columns = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.partition(".")[0] in _COLUMNS)
        if size > _MAX_PAGES:
            return f"{table.name} has {size} bytes of text in row group {group}; {_MAX_PAGES} are read at most"
    if tar.is_file():
        size = tar.stat().st_size
        with tar.open("rb") as file:
            file.seek(max(0, size - 2 * _BLOCK))
            if size < 2 * _BLOCK or size % _BLOCK or any(file.read()):
                return f"{tar.name} ends early"
    elif not (folder / name).is_dir():
        return f"neither {tar.name} nor a folder {name}; its formats webdataset and files can be imported"
    return ""


def read_rows(folder: Path, shard: str) -> list[StoredRow]:
    """The rows of one shard by key, which is the order of the list; a missing caption is empty.

    ValueError names a file that cannot be read, holds more than MAX_ROWS or MAX_TEXT, or has a key with a path.
    """
    file, rows, text = folder / f"{shard}.parquet", [], 0
    try:
        schema = pq.read_schema(file)
        names = [name for name in _COLUMNS if name in schema.names]
        # As a dictionary, a value that many rows share is in memory once.
        shared = [name for name in names if pa.types.is_string(schema.field(name).type)]
        with pq.ParquetFile(file, read_dictionary=shared, buffer_size=2**16) as table:
            for batch in table.iter_batches(_BATCH, columns=names, use_threads=False):
                none = pa.nulls(len(batch), pa.string())
                columns = [batch[name] if name in names else none for name in _COLUMNS]
                text += sum(_bytes_of(column) for column in columns)
                if text > MAX_TEXT or len(rows) + len(batch) > MAX_ROWS:
                    raise ValueError(
                        f"{file} holds more than {MAX_ROWS} rows or {MAX_TEXT} bytes of text; "
                        "write it in smaller shards, or move it away"
                    )
                lines = zip(*(column.cast(pa.string()).to_pylist() for column in columns), strict=True)
                rows += [StoredRow(shard, *(value or "" for value in line)) for line in lines]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} cannot be read: {str(error)[:200]}; run img2dataset again, or move it away"
        ) from error
    wrong = next((row.key for row in rows if not _KEY.fullmatch(row.key)), None)
    if wrong is not None:
        raise ValueError(
            f"{file}: key {wrong[:100]!r} is not a file's name, so img2dataset did not write it; move the shard away"
        )
    return sorted(rows, key=lambda row: row.key)


def _bytes_of(column: pa.Array) -> int:
    """Bytes of the strings of a column, each row counted."""
    if pa.types.is_dictionary(column.type):
        lengths = pc.take(pc.binary_length(column.dictionary.cast(pa.binary())), column.indices)
    else:
        lengths = pc.binary_length(column.cast(pa.string()).cast(pa.binary()))
    return pc.sum(lengths).as_py() or 0


def import_rows(
    folder: Path,
    rows: Sequence[StoredRow],
    first: int,
    duplicates: Mapping[int, int],
    settings: DownloadSettings,
    spool: Spool,
) -> list[Download]:
    """One Download per row of one shard, the first of them row `first`.

    duplicates: row -> the first row with the same URL and caption. ValueError if the tar ends early.
    """
    wanted = {row.key for number, row in enumerate(rows, first) if row.status == _SUCCESS and number not in duplicates}
    images = {}
    with ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode") as pool:
        for key, data in _images(folder, rows[0].shard, wanted, settings.max_bytes):
            images[key] = data if isinstance(data, Refused) else pool.submit(spooled, data, settings, spool)
            if len(images) % 64 == 0:  # so that the images that wait for a thread stay few in memory
                images = {key: _result(image) for key, image in images.items()}
    downloads = []
    for number, stored in enumerate(rows, first):
        row = CaptionRow(number, stored.caption, stored.url)
        if number in duplicates:
            outcome = Refused("duplicate", f"of row {duplicates[number]}")
        elif stored.status != _SUCCESS:
            outcome = Refused(status_of(stored), f"img2dataset: {stored.status}: {stored.error}")
        elif stored.key not in images:
            where = f"{folder.name}/{stored.shard} has no image {stored.key}"
            outcome = Refused("missing_file", f"{where}, though img2dataset says success")
        else:
            outcome = _result(images[stored.key])
        downloads.append(Download.of(row, outcome))
    return downloads


def _result(image: Outcome | Future[Outcome]) -> Outcome:
    return image.result() if isinstance(image, Future) else image


def status_of(row: StoredRow) -> str:
    """Our status of a row that img2dataset did not store."""
    for pattern, status in _MEANINGS:
        if re.search(pattern, row.error, re.IGNORECASE):
            return status
    code = re.search(r"HTTP Error (\d{3})", row.error)
    if code:
        return f"http_{code[1]}" if f"http_{code[1]}" in STATUSES else "http_other"
    return "not_image" if row.status == "failed_to_resize" else "not_stored"


def _images(folder: Path, shard: str, wanted: set[str], limit: int) -> Iterator[tuple[str, bytes | Refused]]:
    """Key and bytes of each wanted image that exists; one over `limit` bytes is refused and not read."""

    def read(size: int, file: BinaryIO) -> bytes | Refused:
        with file:
            return Refused("too_big", f"{size} bytes, more than {limit}") if size > limit else file.read()

    def read_own(file: Path) -> bytes | Refused:
        if not file.resolve().is_relative_to(folder.resolve()):
            return Refused("missing_file", f"{file} is a link to a file outside {folder}")
        try:
            return read_file(file, limit)
        except Refused as refused:
            return refused

    tar = folder / f"{shard}.tar"
    if not tar.is_file():
        for key in sorted(wanted):
            file = next((found for suffix in _IMAGES if (found := folder / shard / f"{key}{suffix}").exists()), None)
            if file is not None:
                yield key, read_own(file)
        return
    with tar.open("rb") as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as members:
                for member in members:
                    key, _, extension = member.name.partition(".")
                    if key in wanted and f".{extension}" in _IMAGES and member.isfile():
                        yield key, read(member.size, members.extractfile(member))
                end = members.offset
        except tarfile.TarError as error:
            raise ValueError(f"{tar} is torn: {error}; copy it again, or run img2dataset again") from error
        stream.seek(end)
        if any(
            any(block) for block in iter(lambda: stream.read(1 << 20), b"")
        ):  # tarfile takes a damaged header for the end
            raise ValueError(f"{tar} is damaged at byte {end}; copy it again, or run img2dataset again")
