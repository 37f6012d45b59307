"""Caption lists: which columns hold the URLs and the captions, and the rows, read once and in little memory.

A list is TSV, CSV or JSON lines, each of them also as .gz, or Parquet, or JSON. A list of a folder of images has the
names of its files in the place of the URLs. A row that cannot be read is one with a status; what is wrong with the file
as a whole is a ValueError.
"""

import contextlib
import csv
import gzip
import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.collect.rows import CaptionRow, Extra, Reading, Scalar
from storage.collect.statuses import Status
from storage.redact import redacted
from storage.safe_json import parse_json, printable, short_repr

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp")
LIKE_A_URL = re.compile(r"\s*https?://", re.IGNORECASE)
_SAMPLED = 100  # rows from which columns are recognised
_BATCH = 1000  # rows of a Parquet file that are decoded at a time
_LONGEST_LINE = 2**20  # bytes; what is longer is read as several lines
_FORMS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}  # else TSV

# The names, in small letters, of the columns of published lists: LAION and COYO-700M have url and text, img2dataset's
# examples url and caption, SBU image_urls and captions, Conceptual Captions and CC12M on the hub image_url and caption.
# Without names, Conceptual Captions has the caption first (Train_GCC-training.tsv), CC12M the URL (cc12m.tsv).
URLS, CAPTIONS = ("url", "image_url", "image_urls"), ("caption", "text", "captions")
# Of lists of a folder of images: https://huggingface.co/docs/datasets/image_dataset has file_name.
_FILES = ("file_name", "image", "filename")

_LICENSES = ("license", "licence", "license_name", "license_url")  # columns of the licence, the best first

_Record = dict[str, Any] | ValueError  # a row by the names of its columns; or why it cannot be read


# --- which columns ----------------------------------------------------------------------------------------------------


def find_reading(file: Path, columns: Sequence[str] = (), of_folder: bool = False) -> Reading:
    """How to read a list: by `columns` (of URL, caption, and what is kept beside them), or recognised.

    Columns without a name of their own are called 1, 2, ... of_folder: the list names files of a folder. ValueError
    names a column that is not there, or says what to give.
    """
    form, urls, header, head = _form(file), _FILES if of_folder else URLS, False, []
    if form in ("tsv", "csv"):
        head = next(_cells(file, form), [])
        lower = set() if isinstance(head, ValueError) else {cell.strip().lower() for cell in head}
        known = not lower.isdisjoint(urls) and not lower.isdisjoint(CAPTIONS)
        header = known or not all(column.isdecimal() for column in columns)
    rows = list(itertools.islice(_records(file, form, header), _SAMPLED))
    good = [row for row in rows if not isinstance(row, ValueError)]
    names = list(dict.fromkeys(name for row in good for name in row))
    if not names:
        raise ValueError(f"{file} holds no row that can be read{f': {rows[0]}' if rows else ''}")
    found = [[name for name in names if name.lower() in known] for known in (urls, CAPTIONS)]
    listed = printable(", ".join(names))[:500]
    if columns:
        missing = [column for column in columns if column not in names]
        if missing:
            raise ValueError(f"{file} has no column {short_repr(missing[0])}; it has {listed}")
    elif names == ["1", "2"]:
        columns = _guess(good, of_folder)
    elif [len(same) for same in found] == [1, 1]:
        fits = [name for name in names if all(isinstance(row.get(name), Scalar) for row in good)]
        columns = (found[0][0], found[1][0], *license_column(fits))
    else:
        which = "several that may be" if all(found) else "none that is known to be"
        first = redacted(f", or as the first line has them: {short_repr(head)}") if head and not header else ""
        raise ValueError(
            f"{file} has the columns {listed}, {which} those of URL and caption; name them under columns{first}"
        )
    return Reading(form, tuple(columns), header)


def _guess(rows: Sequence[dict[str, str]], of_folder: bool) -> tuple[str, str]:
    """URL and caption of two columns without names: the URL is the one with more URLs, or names of images."""

    def is_reference(cell: str) -> bool:
        return cell.strip().lower().endswith(IMAGE_SUFFIXES) if of_folder else LIKE_A_URL.match(cell) is not None

    first, second = (sum(is_reference(row[name]) for row in rows) for name in ("1", "2"))
    return ("1", "2") if first > second else ("2", "1")


def license_column(names: Iterable[str]) -> tuple[str, ...]:
    """The column that has each row's licence, which is kept without being asked for; () if there is none."""
    by_lower = {name.lower(): name for name in names}
    return tuple(by_lower[one] for one in _LICENSES if one in by_lower)[:1]


def license_of(extra: Extra | None) -> str | None:
    """The licence of a row, by the columns that are kept of it; None where it has none."""
    extra = extra or {}
    value = next((extra[name] for name in license_column(extra)), None)
    return None if value in (None, "") else str(value)


# --- rows -------------------------------------------------------------------------------------------------------------


def read_rows(file: Path, reading: Reading) -> Iterator[CaptionRow]:
    """Every row of a list, one at a time, each with its URL and caption or with the status BAD_ROW.

    ValueError names a file that is damaged, and what to do.
    """
    url, caption, *kept = reading.columns
    for row, record in enumerate(_records(file, reading.form, reading.header, reading.columns)):
        try:
            if isinstance(record, ValueError):
                raise record
            for name in (url, caption):
                if not isinstance(record.get(name), str | None):
                    raise ValueError(
                        f"{short_repr(name)} is {short_repr(record[name])}, not a text; name another under columns"
                    )
            extra = {name: scalar(record.get(name), name) for name in kept} if kept else None
            yield CaptionRow(row, record.get(caption) or "", record.get(url) or "", extra)
        except ValueError as error:
            detail = f"{reading.location(file.name, row)}: {redacted(str(error))}"
            yield CaptionRow(row, "", "", status=Status.BAD_ROW, detail=detail)


def read_captions(file: Path) -> Iterator[CaptionRow]:
    """The rows of a list whose columns are recognised; ValueError names file and row of one that cannot be read."""
    for row in read_rows(file, find_reading(file)):
        if row.status:
            raise ValueError(f"{file.parent}/{row.detail}")
        yield row


def scalar(value: Any, name: str) -> Scalar:
    """A value that a sample can keep, None in place of NaN (a missing number to pandas); ValueError for any other."""
    if not isinstance(value, Scalar):
        raise ValueError(
            f"{short_repr(name)} is {short_repr(value)}; keep texts, numbers and truth values alone under columns"
        )
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _form(file: Path) -> str:
    """The format: Parquet by its first bytes, any other by the suffix of the name."""
    with open(file, "rb") as stream:
        if stream.read(4) == b"PAR1":
            return "parquet"
    name = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return _FORMS.get(name.suffix.lower(), "tsv")


def _records(file: Path, form: str, header: bool, columns: Sequence[str] = ()) -> Iterator[_Record]:
    """The rows with these columns at least, by default with all."""
    if form == "parquet":
        return _parquet_records(file, columns)
    return _json_records(file, form) if "json" in form else _text_records(file, form, header)


def _text_records(file: Path, form: str, header: bool) -> Iterator[_Record]:
    """The rows of TSV and CSV. Of two columns of a TSV the first tab splits, as Conceptual Captions has them."""
    rows = _cells(file, form)
    sampled = list(itertools.islice(rows, _SAMPLED))
    if header and sampled and not isinstance(sampled[0], ValueError):
        names = [cell.strip() for cell in sampled[0]]
    else:
        widths = Counter(len(cells) for cells in sampled if not isinstance(cells, ValueError))
        names = [""] * (widths.most_common(1)[0][0] if widths else 0)
    names = [name if name and names.count(name) == 1 else str(place) for place, name in enumerate(names, 1)]
    for cells in itertools.chain(sampled[header:], rows):
        if isinstance(cells, ValueError):
            yield cells
            continue
        if form == "tsv" and len(names) == 2 < len(cells):
            cells = [cells[0], "\t".join(cells[1:])]
        if len(cells) == len(names):
            yield dict(zip(names, cells, strict=True))
        else:
            found = f"{len(cells)} columns, and {len(names)} are expected: {short_repr(cells)}"
            yield ValueError(f"{found}; write the row so, or remove it")


def _cells(file: Path, form: str) -> Iterator[list[str] | ValueError]:
    """The cells of each row, or why there are none."""
    lines = (line.decode(errors="surrogateescape") for line in _lines(file))
    lines = itertools.chain((line.removeprefix("\ufeff") for line in itertools.islice(lines, 1)), lines)
    if form == "csv":
        rows = csv.reader(lines, strict=True)
    else:  # to csv.reader, a lone carriage return ends a line
        rows = (line.removesuffix("\n").removesuffix("\r").split("\t") for line in lines)
    while True:
        try:
            cells = next(rows)
            "\t".join(cells).encode()
            yield cells
        except StopIteration:
            return
        except csv.Error as error:
            yield ValueError(f"{error}; write quotes and ends of lines (\\n or \\r\\n) as CSV has them")
        except UnicodeEncodeError:
            yield ValueError("not UTF-8; convert the list to UTF-8")


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of an unpacked or packed file. Only \\n ends one: U+2028, form feeds and a lone \\r are text."""
    with open(file, "rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    with gzip.open(file) if packed else open(file, "rb") as stream, named_errors(file):
        yield from iter(lambda: stream.readline(_LONGEST_LINE), b"")


@contextlib.contextmanager
def named_errors(file: Path | str) -> Iterator[None]:
    """What is wrong with the file becomes a ValueError that names it."""
    try:
        yield
    except (EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {printable(error)[:300]}; fetch it again") from error


def _json_records(file: Path, form: str) -> Iterator[_Record]:
    """The rows of JSON lines or, read as a whole, of a list of objects or of an object of columns, as SBU has it."""
    if form == "jsonl":
        for line in _lines(file):
            try:
                yield parse_json(line, "the line", fix="write it as one object a line, or remove it")
            except ValueError as error:
                yield error
        return
    found = parse_json(b"".join(_lines(file)), str(file), (dict, list))
    if isinstance(found, dict):
        lists = {name: value for name, value in found.items() if isinstance(value, list)}
        if len({len(values) for values in lists.values()}) != 1:
            raise ValueError(f"{file} holds no columns of one length; write it as a list (docs/images.md has code)")
        found = (dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
    for row in found:
        wrong = f"{short_repr(row)} is not an object; write each row as one"
        yield row if isinstance(row, dict) else ValueError(wrong)


def _parquet_records(file: Path, columns: Sequence[str]) -> Iterator[_Record]:
    with named_errors(file), pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as table:  # page by page
        for batch in table.iter_batches(_BATCH, columns=[*columns] or None, use_threads=False):
            yield from batch.to_pylist()
