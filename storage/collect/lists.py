"""Reading of caption lists: detects the URL and caption columns, and yields the rows.

A list is a TSV, CSV, JSON Lines or JSON file, optionally .gz, or a Parquet file. A list for a folder of images has file
names instead of URLs. A row that cannot be read gets a status. If the file cannot be read, ValueError is raised.
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
_SAMPLED = 100  # rows from which columns are detected
_BATCH = 1000  # rows of a Parquet file that are decoded at a time
_MAX_LINE = 2**20  # bytes; a longer line is read as several lines
_FORMS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}  # else TSV

# Lower-case names of the columns of published lists: LAION and COYO-700M have url and text, img2dataset's examples url
# and caption, SBU image_urls and captions, Conceptual Captions and CC12M on the Hub image_url and caption. Lists
# without names: Conceptual Captions has the caption first (Train_GCC-training.tsv), CC12M the URL (cc12m.tsv).
URLS, CAPTIONS = ("url", "image_url", "image_urls"), ("caption", "text", "captions")
# Columns in lists for a folder of images: https://huggingface.co/docs/datasets/image_dataset has file_name.
_FILES = ("file_name", "image", "filename")

_LICENSES = ("license", "licence", "license_name", "license_url")  # columns of the licence, the best first

_Record = dict[str, Any] | ValueError  # column -> value of a row, or the reason why it cannot be read


# --- columns ----------------------------------------------------------------------------------------------------------


def find_reading(file: Path, columns: Sequence[str] = (), of_folder: bool = False) -> Reading:
    """Return the format and the columns of a caption list. The columns are detected unless they are given.

    Raises ValueError if a given column does not exist or no columns can be detected.

    Args:
        columns: names of the URL column, the caption column and further columns to keep; a column without a unique
            name is given by its number, starting at 1
        of_folder: whether the list has the names of files in a folder instead of URLs
    """
    form, urls, header, head = _detect_form(file), _FILES if of_folder else URLS, False, []
    if form in ("tsv", "csv"):
        head = next(_cells(file, form), [])
        lower = set() if isinstance(head, ValueError) else {cell.strip().lower() for cell in head}
        known = not lower.isdisjoint(urls) and not lower.isdisjoint(CAPTIONS)
        header = known or not all(column.isdecimal() for column in columns)
    rows = list(itertools.islice(_records(file, form, header), _SAMPLED))
    good = [row for row in rows if not isinstance(row, ValueError)]
    names = list(dict.fromkeys(name for row in good for name in row))
    if not names:
        raise ValueError(f"{file} has no readable row{f': {rows[0]}' if rows else ''}")
    matches = [[name for name in names if name.lower() in known] for known in (urls, CAPTIONS)]
    listed = printable(", ".join(names))[:500]
    if columns:
        missing = [column for column in columns if column not in names]
        if missing:
            raise ValueError(f"{file} has no column {short_repr(missing[0])}; it has {listed}")
    elif names == ["1", "2"]:
        columns = _guess(good, of_folder)
    elif [len(same) for same in matches] == [1, 1]:
        scalars = [name for name in names if all(isinstance(row.get(name), Scalar) for row in good)]
        columns = (matches[0][0], matches[1][0], *license_column(scalars))
    else:
        problem = "more than one" if all(matches) else "none"
        first = redacted(f", or to names in its first line: {short_repr(head)}") if head and not header else ""
        raise ValueError(
            f"{file} has the columns {listed}, {problem} with a known name for URL or caption; set columns to the "
            f"names of the two{first}"
        )
    return Reading(form, tuple(columns), header)


def _guess(rows: Sequence[dict[str, str]], of_folder: bool) -> tuple[str, str]:
    """Return the columns "1" and "2" in the order (URL column, caption column), guessed from the values in `rows`."""

    def is_reference(cell: str) -> bool:
        return cell.strip().lower().endswith(IMAGE_SUFFIXES) if of_folder else LIKE_A_URL.match(cell) is not None

    first, second = (sum(is_reference(row[name]) for row in rows) for name in ("1", "2"))
    return ("1", "2") if first > second else ("2", "1")


def license_column(names: Iterable[str]) -> tuple[str, ...]:
    """Find the licence column among the column `names`. Return a tuple with its name, or () if there is none."""
    by_lower = {name.lower(): name for name in names}
    return tuple(by_lower[name] for name in _LICENSES if name in by_lower)[:1]


def license_of(extra: Extra | None) -> str | None:
    """Return the licence from a row's further columns, or None if there is none."""
    extra = extra or {}
    value = next((extra[name] for name in license_column(extra)), None)
    return None if value in (None, "") else str(value)


# --- rows -------------------------------------------------------------------------------------------------------------


def read_rows(file: Path, reading: Reading) -> Iterator[CaptionRow]:
    """Yield every row of a list, with its URL and caption or with the status BAD_ROW.

    Raises ValueError if the file is damaged.
    """
    url, caption, *kept = reading.columns
    for row, record in enumerate(_records(file, reading.form, reading.header, reading.columns)):
        try:
            if isinstance(record, ValueError):
                raise record
            for name in (url, caption):
                if not isinstance(record.get(name), str | None):
                    raise ValueError(
                        f"{short_repr(name)} is {short_repr(record[name])}, not a string; set columns to another name"
                    )
            extra = {name: scalar(record.get(name), name) for name in kept} if kept else None
            yield CaptionRow(row, record.get(caption) or "", record.get(url) or "", extra)
        except ValueError as error:
            detail = f"{reading.location(file.name, row)}: {redacted(str(error))}"
            yield CaptionRow(row, "", "", status=Status.BAD_ROW, detail=detail)


def read_captions(file: Path) -> Iterator[CaptionRow]:
    """Detect the columns of a caption list, and yield its rows. Raises ValueError if a row cannot be read."""
    for row in read_rows(file, find_reading(file)):
        if row.status:
            raise ValueError(f"{file.parent}/{row.detail}")
        yield row


def scalar(value: Any, name: str) -> Scalar:
    """Return `value`, or None if it is NaN (a missing number in pandas) or infinite.

    Raises ValueError, with the column's `name`, if it is not a string, number, bool or None.
    """
    if not isinstance(value, Scalar):
        raise ValueError(
            f"{short_repr(name)} is {short_repr(value)}; in columns, keep only strings, numbers and booleans"
        )
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _detect_form(file: Path) -> str:
    """Return the format of a list. Parquet is detected by its first bytes, other formats by the file's suffix."""
    with open(file, "rb") as stream:
        if stream.read(4) == b"PAR1":
            return "parquet"
    name = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return _FORMS.get(name.suffix.lower(), "tsv")


def _records(file: Path, form: str, header: bool, columns: Sequence[str] = ()) -> Iterator[_Record]:
    """Yield each row of a list as a dict, or as a ValueError if the row cannot be read.

    If `columns` are given, other columns may be missing from the dicts.
    """
    if form == "parquet":
        return _parquet_records(file, columns)
    return _json_records(file, form) if "json" in form else _text_records(file, form, header)


def _text_records(file: Path, form: str, header: bool) -> Iterator[_Record]:
    """Yield the rows of a TSV or CSV file. If a TSV has two columns, further tabs belong to the second."""
    rows = _cells(file, form)
    sampled = list(itertools.islice(rows, _SAMPLED))
    if header and sampled and not isinstance(sampled[0], ValueError):
        names = [cell.strip() for cell in sampled[0]]
    else:
        widths = Counter(len(cells) for cells in sampled if not isinstance(cells, ValueError))
        names = [""] * (widths.most_common(1)[0][0] if widths else 0)
    names = [name if name and names.count(name) == 1 else str(number) for number, name in enumerate(names, 1)]
    for cells in itertools.chain(sampled[header:], rows):
        if isinstance(cells, ValueError):
            yield cells
            continue
        if form == "tsv" and len(names) == 2 < len(cells):  # as in Conceptual Captions
            cells = [cells[0], "\t".join(cells[1:])]
        if len(cells) == len(names):
            yield dict(zip(names, cells, strict=True))
        else:
            problem = f"{len(cells)} columns, but {len(names)} are expected: {short_repr(cells)}"
            yield ValueError(f"{problem}; correct the row, or remove it")


def _cells(file: Path, form: str) -> Iterator[list[str] | ValueError]:
    """Yield the cells of each row of a TSV or CSV file, or a ValueError for a row that cannot be read."""
    lines = (line.decode(errors="surrogateescape") for line in _lines(file))
    lines = itertools.chain((line.removeprefix("\ufeff") for line in itertools.islice(lines, 1)), lines)
    if form == "csv":
        rows = csv.reader(lines, strict=True)
    else:  # not csv.reader, for which a lone carriage return ends a line
        rows = (line.removesuffix("\n").removesuffix("\r").split("\t") for line in lines)
    while True:
        try:
            cells = next(rows)
            "\t".join(cells).encode()
            yield cells
        except StopIteration:
            return
        except csv.Error as error:
            yield ValueError(f"{error}; correct the row's quotes and line ends (\\n or \\r\\n)")
        except UnicodeEncodeError:
            yield ValueError("not UTF-8; convert the list to UTF-8")


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a plain or gzip file. U+2028, form feeds and lone carriage returns do not end a line."""
    with open(file, "rb") as stream:
        is_gzip = stream.read(2) == b"\x1f\x8b"
    with gzip.open(file) if is_gzip else open(file, "rb") as stream, _read_errors(file):
        yield from iter(lambda: stream.readline(_MAX_LINE), b"")


@contextlib.contextmanager
def _read_errors(file: Path | str) -> Iterator[None]:
    """Context manager that turns read errors into a ValueError that names the file."""
    try:
        yield
    except (EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {printable(error)[:300]}; fetch it again") from error


def _json_records(file: Path, form: str) -> Iterator[_Record]:
    """Yield the rows of a JSON Lines or JSON file.

    A JSON file holds a list of objects, or one object with a list for each column (as in SBU).
    """
    if form == "jsonl":
        for line in _lines(file):
            try:
                yield parse_json(line, "the line", fix="write one object per line, or remove it")
            except ValueError as error:
                yield error
        return
    rows = parse_json(b"".join(_lines(file)), str(file), (dict, list))
    if isinstance(rows, dict):
        lists = {name: value for name, value in rows.items() if isinstance(value, list)}
        if len({len(values) for values in lists.values()}) != 1:
            raise ValueError(f"{file} has no columns of equal length; write it as a list (docs/images.md has code)")
        rows = (dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
    for row in rows:
        problem = f"{short_repr(row)} is not an object; write each row as an object"
        yield row if isinstance(row, dict) else ValueError(problem)


def _parquet_records(file: Path, columns: Sequence[str]) -> Iterator[_Record]:
    with _read_errors(file), pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as table:  # page by page
        for batch in table.iter_batches(_BATCH, columns=[*columns] or None, use_threads=False):
            yield from batch.to_pylist()
