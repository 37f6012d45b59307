"""Images that others have stored, as if their rows were collected here: img2dataset's folders and WebDataset tars.

img2dataset leaves for each shard NNNNN.parquet (a row for each URL: url, caption, key, status, error_message, ...),
NNNNN_stats.json, written last, and the images as KEY.jpg (.png, .webp) in NNNNN.tar (its format `webdataset`), in a
folder NNNNN/ (`files`) or in a column jpg of the table (`parquet`). A killed writer leaves files with the final names,
so each shard is checked first. Plain tars have KEY.jpg beside KEY.txt, KEY.json or both, and nothing says how many.
All of it is untrusted: at most MAX_ROWS rows and MAX_TEXT bytes of a table are read, at most MAX_MEMBER bytes of a text
in a tar, and no image outside the folder.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.download import STATUSES, Download, Outcome, read_file, spooled
from storage.fetch import DownloadSettings
from storage.lists import SHAPES, CaptionRow, Extra, Reading, scalar
from storage.normalise import Refused
from storage.object_store import Ranges, open_store
from storage.safe_json import parse_json, printable, shown
from storage.spool import Spool

_IMAGES = (".jpg", ".jpeg", ".png", ".webp")
_BLOCK = 512  # of a tar
MAX_ROWS = 100_000  # of one shard; img2dataset's default is 10,000
MAX_TEXT = 64 * 2**20  # bytes of captions, URLs, keys and errors in one shard
MAX_MEMBER = 2**20  # bytes of a .txt or .json in a tar
_MAX_PAGES = 256 * 2**20  # bytes of these columns in a row group, by its footer
_MAX_STATS = 2**20  # bytes of NNNNN_stats.json
_BATCH = 1000  # rows of a table that are decoded at a time
_IMAGE_BATCH = 16  # the same with images
_READ_AHEAD = 4 * 2**20  # bytes of a tar that are requested of a bucket at a time
_SAMPLED = 100  # samples from which the members of a tar are recognised
_TABLE = ("key", "status", "error_message")  # columns beside URL and caption
_KEY = re.compile(r"[^/\\\0]{0,60}")  # a file's name without its extension, never a path
_MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")  # WebDataset ends the key at the first dot of the name
_SUCCESS = "success"
_Key = TypeVar("_Key")

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


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row of NNNNN.parquet, with img2dataset's key and status (`success`, `failed_to_download`, ...), or of a tar.

    A sample of a tar has the status `success` or one of STATUSES. offset: of the first member of the sample in the tar,
    or the number of the row in the shard. size: of an image in a tar, in bytes.
    """

    shard: str
    key: str
    caption: str
    url: str
    status: str
    error: str
    extra: Extra | None = None
    offset: int = 0
    size: int | None = None

    def line(self) -> bytes:
        """The identity of the row, for the digest of the shard's rows."""
        more = [one for one in (self.extra, self.size) if one is not None]
        return json.dumps([self.shard, self.key, self.caption, self.url, self.status, self.error, *more]).encode()


# --- img2dataset ------------------------------------------------------------------------------------------------------


def img2dataset_reading(columns: Sequence[str] = ()) -> Reading:
    """The columns of its tables that hold URL, caption and what is kept."""
    return Reading("img2dataset", tuple(columns) or ("url", "caption"), (), 0)


def shard_names(folder: Path) -> list[str]:
    """The shards of a folder, in order.

    ValueError if it holds none, or lists those that are torn or in another format.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder that img2dataset wrote; name one that has NNNNN.parquet files")
    found = (re.fullmatch(r"(\d{5,})(\.parquet|\.tar|_stats\.json|)", file.name) for file in folder.iterdir())
    names = sorted({match[1] for match in found if match}, key=lambda name: (int(name), name))
    if not names:
        tars = "; for tars without tables set webdataset in its place" if any(folder.glob("*.tar")) else ""
        raise ValueError(
            f"{folder} holds no shard of img2dataset (NNNNN.parquet beside NNNNN.tar or a folder NNNNN){tars}"
        )
    faults = {name: _fault(folder, name) for name in names}
    _check_faults(
        str(folder),
        faults,
        "run img2dataset again with the same settings, which writes them again, or move their files",
    )
    return names


def _check_faults(where: str, faults: Mapping[str, str], way_out: str) -> None:
    torn = [f"{name}: {fault}" for name, fault in faults.items() if fault]
    if torn:
        more = f"; and {len(torn) - 10} more" if len(torn) > 10 else ""
        raise ValueError(
            f"{where}: {len(torn)} of {len(faults)} shards cannot be imported ({'; '.join(torn[:10])}{more}). To go "
            f"on, {way_out} away and import the rest"
        )


def _fault(folder: Path, name: str) -> str:
    """Why a shard cannot be imported; "" if it can."""
    stats, table, tar = folder / f"{name}_stats.json", folder / f"{name}.parquet", folder / f"{name}.tar"
    if (folder / f"{name}.tfrecord").exists():
        return "its format tfrecord is not read; run img2dataset with output_format=webdataset"
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
    text = set(schema.names) - set(_image_columns(schema))
    for group in range(metadata.num_row_groups):
        columns = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.partition(".")[0] in text)
        if size > _MAX_PAGES:
            return f"{table.name} has {size} bytes of text in row group {group}; {_MAX_PAGES} are read at most"
    if tar.is_file():
        with tar.open("rb") as file:
            return _end_fault(tar.name, tar.stat().st_size, lambda at, length: (file.seek(at), file.read(length))[1])
    if not (folder / name).is_dir() and not _image_columns(schema):
        return (
            f"neither {tar.name} nor a folder {name}, and no column jpg in {table.name}; its formats webdataset, files "
            "and parquet can be imported"
        )
    return ""


def _end_fault(name: str, size: int, read: Callable[[int, int], bytes]) -> str:
    """Why a tar is not whole, by its last two blocks, which are zeros; "" if it is. read: from an offset, a length."""
    whole = size >= 2 * _BLOCK and size % _BLOCK == 0 and not any(read(size - 2 * _BLOCK, 2 * _BLOCK))
    return "" if whole else f"{name} ends early"


def _image_columns(schema: pa.Schema) -> list[str]:
    """The columns of a table that hold images."""
    names = (suffix[1:] for suffix in _IMAGES)
    return [name for name in names if name in schema.names and pa.types.is_binary(schema.field(name).type)]


def read_rows(folder: Path, shard: str, reading: Reading) -> list[StoredRow]:
    """The rows of one shard by key, which is the order of the list; a missing caption is empty.

    ValueError names a file that cannot be read, lacks a column, holds more than MAX_ROWS or MAX_TEXT, or has a key with
    a path.
    """
    file, rows, text = folder / f"{shard}.parquet", [], 0
    url, caption, *kept = reading.columns
    try:
        schema = pq.read_schema(file)
        given = reading.columns if reading.columns != img2dataset_reading().columns else ()
        missing = next((name for name in given if name not in schema.names), None)
        if missing is not None:
            raise ValueError(
                f"{file} has no column {shown(missing)}; it has {printable(', '.join(schema.names))[:500]}"
            )
        wanted = (*_TABLE, caption, url)
        names = list(dict.fromkeys(name for name in (*wanted, *kept) if name in schema.names))
        # As a dictionary, a value that many rows share is in memory once.
        shared = [name for name in names if pa.types.is_string(schema.field(name).type)]
        with pq.ParquetFile(file, read_dictionary=shared, buffer_size=2**16) as table:
            for batch in table.iter_batches(_BATCH, columns=names, use_threads=False):
                none = pa.nulls(len(batch), pa.string())
                columns = [batch[name] if name in names else none for name in wanted]
                text += sum(_bytes_of(column) for column in columns) + sum(batch[name].nbytes for name in kept)
                if text > MAX_TEXT or len(rows) + len(batch) > MAX_ROWS:
                    raise ValueError(
                        f"{file} holds more than {MAX_ROWS} rows or {MAX_TEXT} bytes of text; "
                        "write it in smaller shards, or move it away"
                    )
                more = [batch[name].to_pylist() for name in kept]
                lines = zip(*(column.cast(pa.string()).to_pylist() for column in columns), strict=True)
                for number, (key, status, error, text_of, address) in enumerate(lines):
                    extra = {
                        name: scalar(values[number], name, str(file)) for name, values in zip(kept, more, strict=True)
                    }
                    texts = (key or "", text_of or "", address or "", status or "", error or "")
                    rows.append(StoredRow(shard, *texts, extra if kept else None))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} cannot be read: {str(error)[:200]}; run img2dataset again, or move it away"
        ) from error
    wrong = next((row.key for row in rows if not _KEY.fullmatch(row.key)), None)
    if wrong is not None:
        raise ValueError(
            f"{file}: key {wrong[:100]!r} is not a file's name, so img2dataset did not write it; move the shard away"
        )
    rows.sort(key=lambda row: row.key)
    return [dataclasses.replace(row, offset=number) for number, row in enumerate(rows)]


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
    images = _decoded(_images(folder, rows[0].shard, wanted, settings.max_bytes), settings, spool)

    def outcome(_number: int, row: StoredRow) -> Outcome:
        if row.status != _SUCCESS:
            return Refused(status_of(row), f"img2dataset: {row.status}: {row.error}")
        if row.key not in images:
            where = f"{folder.name}/{row.shard} has no image {row.key}"
            return Refused("missing_file", f"{where}, though img2dataset says success")
        return images[row.key]

    return _downloads(rows, first, duplicates, outcome)


def _downloads(
    rows: Sequence[StoredRow],
    first: int,
    duplicates: Mapping[int, int],
    outcome: Callable[[int, StoredRow], Outcome],
) -> list[Download]:
    downloads = []
    for number, row in enumerate(rows, first):
        repeated = number in duplicates
        found = Refused("duplicate", f"of row {duplicates[number]}") if repeated else outcome(number, row)
        downloads.append(Download.of(CaptionRow(number, row.caption, row.url, row.extra), found))
    return downloads


def _decoded(
    images: Iterable[tuple[_Key, bytes | Refused]], settings: DownloadSettings, spool: Spool
) -> dict[_Key, Outcome]:
    """Each image in its stored form, by its key."""

    def result(image: Outcome | Future[Outcome]) -> Outcome:
        return image.result() if isinstance(image, Future) else image

    found = {}
    with ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode") as pool:
        for number, (key, data) in enumerate(images, 1):
            found[key] = data if isinstance(data, Refused) else pool.submit(spooled, data, settings, spool)
            if number % 64 == 0:  # so that the images that wait for a thread stay few in memory
                found = {key: result(image) for key, image in found.items()}
    return {key: result(image) for key, image in found.items()}


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

    def read_own(file: Path) -> bytes | Refused:
        if not file.resolve().is_relative_to(folder.resolve()):
            return Refused("missing_file", f"{file} is a link to a file outside {folder}")
        try:
            return read_file(file, limit)
        except Refused as refused:
            return refused

    tar, table = folder / f"{shard}.tar", folder / f"{shard}.parquet"
    if tar.is_file():
        with tar.open("rb") as stream:
            for member in _members(stream, str(tar)):
                key, _, extension = member.name.partition(".")
                if key in wanted and f".{extension}" in _IMAGES:
                    yield key, _content(stream, member, limit, str(tar))
    elif (folder / shard).is_dir():
        for key in sorted(wanted):
            file = next((found for suffix in _IMAGES if (found := folder / shard / f"{key}{suffix}").exists()), None)
            if file is not None:
                yield key, read_own(file)
    else:
        try:
            with pq.ParquetFile(table, pre_buffer=False, buffer_size=2**20) as stored:
                columns = ["key", *_image_columns(stored.schema_arrow)[:1]]
                for batch in stored.iter_batches(_IMAGE_BATCH, columns=columns, use_threads=False):
                    keys = batch["key"].cast(pa.string()).to_pylist()
                    for key, image in zip(keys, batch[columns[1]], strict=True):
                        if key in wanted and image.is_valid:
                            data = image.as_buffer()
                            yield key, _too_big(data.size, limit) if data.size > limit else data.to_pybytes()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{table} is damaged: {str(error)[:200]}; copy it again, or run img2dataset again"
            ) from error


def _too_big(size: int, limit: int) -> Refused:
    return Refused("too_big", f"{size} bytes, more than {limit}")


# --- tars -------------------------------------------------------------------------------------------------------------


def _members(stream: BinaryIO, where: str) -> Iterator[tarfile.TarInfo]:
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


def _content(stream: BinaryIO, member: tarfile.TarInfo, limit: int, where: str) -> bytes | Refused:
    """The bytes of a member; Refused if they are more than `limit`."""
    if member.size > limit:
        return _too_big(member.size, limit)
    stream.seek(member.offset_data)
    data = stream.read(member.size)
    if len(data) < member.size:
        raise ValueError(f"{where} is torn: {member.name} ends early; copy or write it again")
    return data


class TarSet:
    """The tars below a folder or `s3://bucket/prefix` whose samples are an image beside .txt, .json or both."""

    def __init__(self, root: str):
        if "://" not in root and not Path(root).is_dir():
            raise ValueError(f"{root} is not a folder; name one that holds tars, or s3://bucket/prefix")
        self._root, self._store = root, open_store(root, write=False)

    def names(self) -> list[str]:
        """The tars, in order; ValueError if there is none, or lists those that end early."""
        found = {info.path: info.size for info in self._store.list()}
        tars = {path: size for path, size in found.items() if path.endswith(".tar")}
        if not tars:
            packed = next((f"; {path} is packed: unpack it" for path in found if ".tar." in path), "")
            raise ValueError(f"{self._root} holds no .tar{packed}")

        def fault(path: str, size: int) -> str:
            return _end_fault(path, size, functools.partial(self._store.get_range, path))

        faults = {path: fault(path, size) for path, size in tars.items()}
        _check_faults(self._root, faults, "copy them again, or move them")
        return list(tars)

    def find_reading(self, columns: Sequence[str] = ()) -> Reading:
        """Which members and which fields of .json hold URL, caption and what is kept, by the first samples.

        `columns`: of URL, caption and so on, as names of fields, `txt` for the .txt. ValueError if none is a caption.
        """
        tar = self.names()[0]
        names, has_text = {}, False
        with self._opened(tar) as stream:
            groups = itertools.groupby(_members(stream, self._store.where(tar)), key=lambda member: _split(member)[0])
            for _, members in itertools.islice(groups, _SAMPLED):
                for member in members:
                    extension = _split(member)[1]
                    has_text |= extension == "txt"
                    if extension == "json" and member.size <= MAX_MEMBER:
                        with contextlib.suppress(ValueError):  # the row of a broken one gets a status
                            names |= dict.fromkeys(parse_json(_content(stream, member, MAX_MEMBER, tar), tar))
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
        return Reading("webdataset", (*(urls or [""]), *captions), (), 0)

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
        """The samples from byte `offset` of a tar on, the first of them row `first`; errors and duplicates as above."""
        rows = []

        def images() -> Iterator[tuple[int, bytes | Refused]]:
            samples = self._samples(tar, reading, offset, settings.max_bytes)
            for number, (row, image) in enumerate(itertools.islice(samples, count), first):
                rows.append(row)
                if image is not None and number not in duplicates:
                    yield number, image

        outcomes = _decoded(images(), settings, spool)

        def outcome(number: int, row: StoredRow) -> Outcome:
            return outcomes[number] if row.status == _SUCCESS else Refused(row.status, row.error)

        return rows, _downloads(rows, first, duplicates, outcome)

    @contextlib.contextmanager
    def _opened(self, tar: str) -> Iterator[BinaryIO]:
        local = self._store.local_path(tar)
        opened = local.open("rb") if local else io.BufferedReader(Ranges(self._store, tar), _READ_AHEAD)
        with opened as stream:
            yield stream

    def _samples(
        self, tar: str, reading: Reading, offset: int, limit: int | None
    ) -> Iterator[tuple[StoredRow, bytes | Refused | None]]:
        """Each sample from a byte of the tar on, with its image of at most `limit` bytes; None: images are skipped."""
        where = self._store.where(tar)
        with self._opened(tar) as stream:
            stream.seek(offset)
            for key, group in itertools.groupby(_members(stream, where), key=lambda member: _split(member)[0]):
                texts, image, data, begin = {}, None, None, -1
                for member in group:
                    begin = member.offset if begin < 0 else begin
                    extension = _split(member)[1]
                    if extension in ("txt", "json"):
                        texts[extension] = _content(stream, member, MAX_MEMBER, where)
                    elif f".{extension}" in _IMAGES and image is None:
                        image = member
                        data = None if limit is None else _content(stream, member, limit, where)
                if key and (image or texts):
                    row = _row(tar, key, image, texts, reading, where)
                    yield dataclasses.replace(row, offset=begin), data if row.status == _SUCCESS else None


def _known(names: Iterable[str], known: set[str]) -> list[str]:
    return [name for name in names if name.lower() in known]


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    """The key of a member's sample and the member's extension in small letters; two empty ones for other files."""
    match = _MEMBER.fullmatch(member.name)
    return (match[1], match[2].lower()) if match else ("", "")


def _row(
    tar: str,
    key: str,
    image: tarfile.TarInfo | None,
    texts: Mapping[str, bytes | Refused],
    reading: Reading,
    where: str,
) -> StoredRow:
    """The row of one sample. The URL is the image's name in the tar if none is stored."""
    url, caption, *kept = reading.columns
    key, name = (_utf8(text) for text in (key, image.name if image else key))
    place, values, faults = f"{where}: {key}", {}, []
    for extension, text in texts.items():
        try:
            if isinstance(text, Refused):
                raise ValueError(text.detail)
            found = text.decode().rstrip("\r\n") if extension == "txt" else parse_json(text, f"{place}.json")
            values |= {"txt": found} if extension == "txt" else {one: found[one] for one in found if one != "txt"}
        except ValueError as error:
            if extension == "json" or caption == "txt":
                faults.append(f"{key}.{extension}: {printable(error)}")
    extra = {one: scalar(values.get(one), one, place) for one in kept} if kept else None
    address = values.get(url) if isinstance(values.get(url), str) else f"{tar}/{name}"
    text, status, fault = values.get(caption), _SUCCESS, ""
    if image is None:
        status, fault = "missing_file", f"{tar} has no image {key}"
    elif not isinstance(text, str):
        status, fault = "bad_caption", "; ".join(faults) or f"{tar} has no caption for {name}"
    text = text if isinstance(text, str) else ""
    return StoredRow(tar, key, text, address, status, fault, extra, size=image.size if image else None)


def _utf8(name: str) -> str:
    """Of a member's name, which need not be UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
