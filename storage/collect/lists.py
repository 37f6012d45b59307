"""Caption lists: which columns hold the URLs and the captions, and the rows, without reading the file as a whole.

A list is TSV, CSV or JSON lines, each of them also as .gz, or Parquet, or JSON. A list of a folder of images has the
names of its files in the place of the URLs.
"""

import bisect
import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from storage.redact import redacted
from storage.safe_json import parse_json, printable, shown

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp")
_SAMPLED = 100  # rows from which columns are recognised
_BATCH = 1000  # rows of a Parquet file that are decoded at a time
_LIKE_A_URL = re.compile(r"\s*https?://", re.IGNORECASE)
_NAMES = {"tsv": "TSV", "csv": "CSV", "jsonl": "JSON lines", "json": "JSON", "parquet": "Parquet"}
_NAMES |= {"img2dataset": "img2dataset", "webdataset": "WebDataset"}
_SUFFIXES = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}


@dataclass(frozen=True)
class Shape:
    """The names of the columns of a published list, in small letters; `beside`: a further one that tells it."""

    name: str
    url: str
    caption: str
    beside: str = ""


# The shapes of lists whose columns have names. Without names there are two: Conceptual Captions has the caption first
# (Train_GCC-training.tsv), CC12M the URL (cc12m.tsv); the place of the URLs tells which.
SHAPES = (
    # SAMPLE_ID URL TEXT HEIGHT WIDTH LICENSE NSFW similarity: LAION-400M, https://laion.ai/blog/laion-400-open-dataset/;
    # URL TEXT WIDTH HEIGHT similarity hash punsafe pwatermark: LAION-5B, https://laion.ai/blog/laion-5b/
    Shape("LAION", "url", "text", "similarity"),
    # id url text width height image_phash ...: https://huggingface.co/datasets/kakaobrain/coyo-700m
    Shape("COYO-700M", "url", "text", "image_phash"),
    # {"image_urls": [...], "captions": [...], "user_ids": [...]} of sbu-captions-all.json:
    # https://www.cs.rice.edu/~vo9/sbucaptions/
    Shape("SBU", "image_urls", "captions"),
    # image_url user_id caption: https://huggingface.co/datasets/vicenteor/sbu_captions
    Shape("SBU", "image_url", "caption", "user_id"),
    # image_url caption: google-research-datasets/conceptual_captions and .../conceptual_12m of https://huggingface.co
    Shape("Conceptual Captions or CC12M", "image_url", "caption"),
    # What img2dataset's examples name them: https://github.com/rom1504/img2dataset/tree/main/dataset_examples
    Shape("img2dataset", "url", "caption"),
    Shape("img2dataset", "url", "text"),
)
# Of lists of a folder of images, in which `url` is the file's name.
FOLDER_SHAPES = (
    # metadata.csv, metadata.jsonl: https://huggingface.co/docs/datasets/image_dataset
    Shape("Hugging Face imagefolder", "file_name", "text"),
    Shape("Hugging Face imagefolder", "file_name", "caption"),
    Shape("image and caption", "image", "caption"),
    Shape("image and caption", "image", "text"),
    Shape("image and caption", "filename", "caption"),
)

_LICENSES = ("license", "licence", "license_name", "license_url")  # columns of the licence, the best first

Scalar = str | int | float | bool | None
Extra = dict[str, Scalar]  # further columns of a row, by name


@dataclass(frozen=True, slots=True)
class CaptionRow:
    """One row of a caption list: `row` is its number there, from 0 and without the header.

    caption and url stand as the file has them; `extra` has the further columns that were asked for, None for none.
    """

    row: int
    caption: str
    url: str
    extra: Extra | None = None


@dataclass(frozen=True)
class Reading:
    """How a list is read.

    form     a key of _NAMES
    columns  of the URL, the caption, and of those that are kept beside them: names, or places from 1 on
    places   the same as places from 0 on
    width    how many columns the list has
    header   whether the first line has their names (TSV and CSV)
    shape    the published list that looks so; "" if the columns were given
    """

    form: str
    columns: tuple[str, ...]
    places: tuple[int, ...]
    width: int
    header: bool = False
    shape: str = ""

    @property
    def as_meta(self) -> dict[str, Any]:
        """For a manifest: all that decides what is read."""
        return {"form": self.form, "columns": list(self.columns), "header": self.header}

    def __str__(self) -> str:
        url, caption, *kept = self.columns
        url = f"URL in column {url}" if url else "files' names as URLs"
        header = {True: " with a header", False: " without a header"}[self.header] if self.form in _SPLIT else ""
        more = f", {', '.join(kept)} kept" if kept else ""
        shape = f" (as {self.shape})" if self.shape else ""
        return f"{_NAMES[self.form]}{header}, {url}, caption in column {caption}{more}{shape}"


_SPLIT = {"tsv": "\t", "csv": ","}
PLAIN = Reading("tsv", ("2", "1"), (1, 0), 2, shape="Conceptual Captions")


# --- which columns ----------------------------------------------------------------------------------------------------


def find_reading(file: Path, columns: Sequence[str] = (), of_folder: bool = False) -> Reading:
    """How to read a list: by `columns` (of URL, caption, and what is kept; names, or places from 1 on), or recognised.

    of_folder: the list names files of a folder. ValueError names a column that is not there, or says what to give.
    """
    form = _form(file)
    if form in _SPLIT:
        return _of_text(file, form, columns, of_folder)
    if form == "parquet":
        schema = _opened_parquet(file).schema_arrow
        names, kept = schema.names, [field.name for field in schema if keepable(field.type)]
    elif form == "json":
        table = _json_columns(file)
        names, kept = list(table), [name for name in table if all(isinstance(value, Scalar) for value in table[name])]
    else:
        with _opened(file) as stream:
            heads = itertools.islice(_errors(_lines(stream), file), _SAMPLED)
            found = [parse_json(line, f"{file}:{n}") for n, line in enumerate(heads, 1)]
        names = list(dict.fromkeys(name for one in found for name in one))
        if not names:
            return Reading(form, columns or ("url", "caption"), (), 0)
        kept = kept_names(found)
    return _named(file, form, names, kept, columns, of_folder)


def _named(
    file: Path, form: str, names: Sequence[str], kept: Sequence[str], columns: Sequence[str], of_folder: bool
) -> Reading:
    """How a list with these names of its columns is read; `kept`: those that hold what a sample can keep."""
    shape = ""
    if not columns:
        columns, shape = recognise(names, str(file), FOLDER_SHAPES if of_folder else SHAPES)
        columns += license_column(kept)
    places = [_place(file, column, names) for column in columns]
    return Reading(form, tuple(columns), tuple(places), len(names), form in _SPLIT, shape)


def recognise(names: Sequence[str], where: str, shapes: Sequence[Shape] = SHAPES) -> tuple[tuple[str, str], str]:
    """The columns of URL and caption, by their names, and the shape that has them; ValueError if none has, or two."""
    by_lower = {name.lower(): name for name in names}
    fitting = [one for one in shapes if {one.url, one.caption, one.beside or one.url} <= by_lower.keys()]
    pairs = list(dict.fromkeys((by_lower[one.url], by_lower[one.caption]) for one in fitting))
    lower = [name.lower() for name in set(names)]
    if len(pairs) != 1 or any(lower.count(name.lower()) > 1 for name in pairs[0]):
        which = "several that may be" if pairs else "none that is known to be"
        listed = f"the columns {_listed(names)}" if names else "no columns"
        raise ValueError(
            f"{where} has {listed}, {which} those of URL and caption; name them: "
            f"columns={','.join(pairs[0]) if pairs else 'URL,CAPTION'}"
        )
    return pairs[0], fitting[0].name


def license_column(names: Iterable[str]) -> tuple[str, ...]:
    """The column that has each row's licence, which is kept without being asked for; () if there is none."""
    by_lower = {name.lower(): name for name in names}
    return tuple(by_lower[one] for one in _LICENSES if one in by_lower)[:1]


def license_of(extra: Extra | None) -> str | None:
    """The licence of a row, by the columns that are kept of it; None where it has none."""
    extra = extra or {}
    value = next((extra[name] for name in license_column(extra)), None)
    return None if value in (None, "") else str(value)


def _place(file: Path, column: str, names: Sequence[str]) -> int:
    count = list(names).count(column)
    if count > 1:
        raise ValueError(f"{file} has {count} columns {shown(column)}; give the place of the one that is meant, from 1")
    if count:
        return list(names).index(column)
    if column.isdecimal() and 1 <= int(column) <= len(names):
        return int(column) - 1
    raise ValueError(f"{file} has no column {shown(column)}; it has {_listed(names)} (or places from 1 on)")


def _listed(names: Sequence[str]) -> str:
    return printable(", ".join(names[:20]))[:500] + (", ..." if len(names) > 20 else "")


def _of_text(file: Path, form: str, columns: Sequence[str], of_folder: bool) -> Reading:
    rows = []
    # A row with a fault ends the sample: who reads it says which it is, without the header.
    with _opened(file) as stream, contextlib.suppress(ValueError):
        for record in itertools.islice(_errors(_text_records(stream, form, file), file), _SAMPLED):
            rows.append(_split(record.decode(errors="replace").removeprefix("\ufeff"), form))
    if not rows:
        return dataclasses.replace(PLAIN, form=form)
    refers = _like_an_image if of_folder else _LIKE_A_URL.match
    head, shapes = rows[0], FOLDER_SHAPES if of_folder else SHAPES
    lower = {cell.strip().lower() for cell in head}
    known = any({one.url, one.caption} <= lower for one in shapes) and not any(map(refers, head))
    if known or not all(column.isdecimal() for column in columns):
        names = [cell.strip() for cell in head]
        return _named(file, form, names, names, columns, of_folder)
    width = Counter(map(len, rows)).most_common(1)[0][0]
    if columns:
        places = tuple(_place(file, column, [str(n + 1) for n in range(width)]) for column in columns)
        return Reading(form, tuple(columns), places, width)
    if width > 2 or (width < 2 and form == "csv"):
        raise ValueError(
            f"{file} has {width} columns and no header that is known; give the places of URL and caption, from 1 on: "
            "columns=2,1"
        )
    first = sum(len(row) > 1 and bool(refers(row[0])) and not refers(row[1]) for row in rows)
    second = sum(len(row) > 1 and bool(refers(row[1])) and not refers(row[0]) for row in rows)
    if first > second:
        return Reading(form, ("1", "2"), (0, 1), 2, shape="" if of_folder else "CC12M")
    return dataclasses.replace(PLAIN, form=form, shape="" if of_folder else PLAIN.shape)


def _like_an_image(cell: str) -> bool:
    return cell.strip().lower().endswith(IMAGE_SUFFIXES)


def _form(file: Path) -> str:
    """The format, by the first bytes where they tell it, else by the name; TSV for any other name."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name one list, or give it as images, img2dataset or webdataset")
    with open(file, "rb") as opened:
        magic = opened.read(4)
    if magic == b"PAR1":
        return "parquet"
    name = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    if name.suffix.lower() == ".parquet":
        raise ValueError(f"{file} is not a Parquet file, or is packed; unpack it, or fetch it again")
    form = _SUFFIXES.get(name.suffix.lower())
    if form is None:
        with _opened(file) as stream:
            line = next(_errors(_lines(stream), file), b"").decode(errors="replace")
        cells = {cell.strip().lower() for cell in line.split(",")}
        known = any({one.url, one.caption} <= cells for one in (*SHAPES, *FOLDER_SHAPES))
        form = "csv" if "\t" not in line and known else "tsv"
    return form


# --- records ----------------------------------------------------------------------------------------------------------


class ListFile:
    """The records of a list, one after the other, from any of them on; a context manager.

    A record is the bytes of a line (with its end) or, in Parquet and JSON, its values as a JSON array: the same bytes
    in every run, of which digests are made. Offsets are those of the unpacked bytes; Parquet and JSON have none.
    """

    def __init__(self, file: Path, reading: Reading):
        self._file, self._reading = file, reading
        self._rows = {"parquet": _parquet_records, "json": _json_records}.get(reading.form)
        self._records, self._next = _errors(iter(()), file), -1  # of Parquet and JSON: where the last call ended
        self.first = 0
        """The offset of the first record, behind the header."""

    def __enter__(self) -> "ListFile":
        self._stream = io.BytesIO() if self._rows else _opened(self._file)
        if self._reading.header:
            next(_errors(_text_records(self._stream, self._reading.form, self._file), self._file), b"")
            self.first = self._stream.tell()
        return self

    def __exit__(self, *_: object) -> None:
        self._records.close()
        self._stream.close()

    def records(self, start: int = 0, offset: int | None = None) -> Iterator[bytes]:
        """Those from row `start` on, whose offset is `offset`, or `first`. Going on where the last call ended is cheap.

        ValueError names the file, and the row where it is one's fault.
        """
        if not self._rows:
            self._stream.seek(self.first if offset is None else offset)
            return _errors(_text_records(self._stream, self._reading.form, self._file, start), self._file)
        if start != self._next:
            self._records = _errors(self._rows(self._file, self._reading, start), self._file)
        self._next = start
        return self._counted()

    def _counted(self) -> Iterator[bytes]:
        for record in self._records:
            self._next += 1
            yield record


def read_captions(
    file: Path, start: int = 0, stop: int | None = None, reading: Reading | None = None
) -> Iterator[CaptionRow]:
    """Rows [start, stop) of a list, one at a time; ValueError names the file and the row that is not one."""
    reading = reading or find_reading(file)
    with ListFile(file, reading) as records:
        yield from parse_rows(itertools.islice(records.records(), start, stop), file, reading, start)


def parse_rows(records: Iterable[bytes], file: Path, reading: Reading, start: int) -> Iterator[CaptionRow]:
    """The rows of these records, the first of which is row `start` of `file`; ValueError as in read_captions."""
    names = reading.columns[2:]
    for row, raw in enumerate(records, start):
        url, caption, *kept = _values(raw, file, reading, row)
        yield CaptionRow(row, caption, url, dict(zip(names, kept, strict=True)) if names else None)


def where(file: Path | str, reading: Reading, row: int) -> str:
    """The place of a row, for messages: FILE:LINE where a line is a row."""
    if reading.form in ("tsv", "jsonl"):
        return f"{file}:{row + 1 + reading.header}"
    return f"{file}, row {row + 1}"


def _values(raw: bytes, file: Path, reading: Reading, row: int) -> list[Any]:
    """URL, caption and what is kept, of one record."""
    if reading.form in ("parquet", "json"):
        return json.loads(raw)
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where(file, reading, row)}: not UTF-8 ({error}); convert the list to UTF-8") from error
    if row == 0 and not reading.header:
        line = line.removeprefix("\ufeff")
    if reading.form == "jsonl":
        place = where(file, reading, row)
        found = parse_json(line, place)
        texts = [_text(found.get(name), name, place) for name in reading.columns[:2]]
        return texts + [scalar(found.get(name), name, place) for name in reading.columns[2:]]
    # Of two columns the first tab splits, and further ones are text, as Conceptual Captions has them.
    cells = _split(line, reading.form, 1 if reading.width == 2 else -1)
    if len(cells) != reading.width:
        names = "caption TAB url" if reading.places[:2] == (1, 0) else "url TAB caption"
        rule = f"every line is `{names}`" if reading.width == 2 and reading.form == "tsv" else "every row has as many"
        what = f"{len(cells)} columns, and {reading.width} are expected"
        if reading.form == "tsv" and len(cells) == 1:
            what = f"no tab in {redacted(cells[0])[:80]!r}" if cells[0] else "an empty line"
        raise ValueError(f"{where(file, reading, row)}: {what}; {rule}: write it so, or remove the line")
    return [cells[number] for number in reading.places]


def _split(line: str, form: str, most: int = -1) -> list[str]:
    if form == "csv":
        return next(csv.reader([line]), [])
    return line.removesuffix("\n").removesuffix("\r").split("\t", most)


def _opened(file: Path) -> BinaryIO:
    """The unpacked bytes of a file."""
    with open(file, "rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return gzip.open(file, "rb") if packed else open(file, "rb")


def _errors(records: Iterator[bytes], file: Path) -> Iterator[bytes]:
    """The same records; what is wrong with the file becomes a ValueError that names it."""
    try:
        yield from records
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} is damaged or ends early ({error}); fetch it again") from error
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {printable(error)[:300]}; fetch it again") from error


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    # In binary mode only \n ends a line: U+2028, form feeds and a lone \r are part of a caption.
    return iter(stream.readline, b"")


def _text_records(stream: BinaryIO, form: str, file: Path, start: int = 0) -> Iterator[bytes]:
    """Lines or, in CSV, as many lines as the quotes of a row span; the stream is then behind what was yielded."""
    if form != "csv":
        yield from _lines(stream)
        return
    taken = []

    def texts() -> Iterator[str]:
        for line in _lines(stream):
            taken.append(line)
            yield line.decode("latin-1")  # only commas, quotes and ends of lines matter here

    rows = csv.reader(texts(), strict=True)
    for row in itertools.count(start + 1):
        try:
            if next(rows, None) is None:
                return
        except csv.Error as error:
            wrong = "a carriage return, which ends no line here" if "new-line" in str(error) else error
            raise ValueError(
                f"{file}, row {row}: {wrong}; write quotes and ends of lines (\\n or \\r\\n) as CSV has them"
            ) from error
        yield b"".join(taken)
        taken.clear()


# --- Parquet and JSON -------------------------------------------------------------------------------------------------


def _opened_parquet(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)  # page by page, not a row group at a time
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read: {printable(error)[:200]}; fetch it again") from error


def _parquet_records(file: Path, reading: Reading, start: int) -> Iterator[bytes]:
    with _opened_parquet(file) as table:
        for place in reading.places:
            _check_type(file, table.schema_arrow.field(place), place in reading.places[:2])
        names = [table.schema_arrow.names[place] for place in reading.places]
        ends = list(itertools.accumulate(table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)))
        group = bisect.bisect_right(ends, start)
        skipped = start - (ends[group - 1] if group else 0)
        groups = range(group, table.num_row_groups)
        for batch in table.iter_batches(_BATCH, row_groups=groups, columns=names, use_threads=False):
            left = batch.slice(skipped)
            skipped = max(0, skipped - len(batch))
            yield from _arrays(*(left[name].to_pylist() for name in names))


def _check_type(file: Path, field: pa.Field, is_text: bool) -> None:
    if not (_is_text(field.type) if is_text else keepable(field.type)):
        wanted = "text" if is_text else "text, numbers or truth values, which can be kept"
        raise ValueError(f"{file}: column {field.name} holds {field.type}, not {wanted}; name another under columns")


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_view = pa.types.is_string_view(kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or is_view or pa.types.is_null(kind)


def keepable(kind: pa.DataType) -> bool:
    """Whether a sample can keep the values of a column of this type."""
    return _is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def kept_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The names whose values in these rows a sample can keep, in order."""
    wrong = {name for row in rows for name, value in row.items() if not isinstance(value, Scalar)}
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in wrong]


def _json_records(file: Path, reading: Reading, start: int) -> Iterator[bytes]:
    columns = _json_columns(file)
    names = [list(columns)[place] for place in reading.places]
    for row, values in enumerate(zip(*(columns[name][start:] for name in names), strict=True), start + 1):
        place = f"{file}, row {row}"
        texts = [_text(value, name, place) for value, name in zip(values[:2], names, strict=False)]
        kept = [scalar(value, name, place) for value, name in zip(values[2:], names[2:], strict=True)]
        yield from _arrays(*([value] for value in texts + kept))


def _json_columns(file: Path) -> dict[str, list]:
    """An object of columns, as SBU has it, or a list of rows; read as a whole."""
    with _opened(file) as stream:
        data = b"".join(_errors(iter(lambda: stream.read(2**20), b""), file))
    found = parse_json(data, str(file), (dict, list))
    if isinstance(found, list):
        wrong = next((n for n, row in enumerate(found, 1) if not isinstance(row, dict)), None)
        if wrong:
            raise ValueError(f"{file}, row {wrong}: {shown(found[wrong - 1])} is not an object; a row has its columns")
        names = dict.fromkeys(name for row in found for name in row)
        return {name: [row.get(name) for row in found] for name in names}
    lists = {name: value for name, value in found.items() if isinstance(value, list)}
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{shown(name)} {len(values)}" for name, values in lists.items())
        raise ValueError(f"{file}: its columns differ in length ({lengths[:300]}); fetch it again")
    return lists


def _arrays(urls: list, captions: list, *kept: list) -> Iterator[bytes]:
    for url, caption, *more in zip(urls, captions, *kept, strict=True):
        values = [url or "", caption or "", *(_finite(value) for value in more)]
        yield json.dumps(values, ensure_ascii=False).encode()


def _text(value: Any, name: str, place: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place}: {shown(name)} is {shown(value)}, not a text; name another column under columns")
    return value or ""


def scalar(value: Any, name: str, place: str) -> Scalar:
    """A value that a sample can keep; ValueError names the place of one that it cannot."""
    if not isinstance(value, Scalar):
        raise ValueError(
            f"{place}: {shown(name)} is {shown(value)}; keep texts, numbers and truth values alone under columns"
        )
    return _finite(value)


def _finite(value: Any) -> Any:
    """None in place of NaN, which pandas writes for a missing number and JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
