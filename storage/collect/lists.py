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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.collect.rows import CaptionRow, Extra, Scalar
from storage.collect.statuses import Status
from storage.redact import redacted
from storage.safe_json import parse_json, printable, shown

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp")
LIKE_A_URL = re.compile(r"\s*https?://", re.IGNORECASE)
_SAMPLED = 100  # rows from which columns are recognised
_BATCH = 1000  # rows of a Parquet file that are decoded at a time
_LONGEST_LINE = 2**20  # bytes; what is longer is read as several lines
_NAMES = {"tsv": "TSV", "csv": "CSV", "jsonl": "JSON lines", "json": "JSON", "parquet": "Parquet"}
_NAMES |= {"webdataset": "WebDataset"}
_SUFFIXES = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
_TEXT = ("tsv", "csv")  # forms whose columns may have no names


# The names, in small letters, of the columns of published lists: LAION and COYO-700M have url and text, img2dataset's
# examples url and caption, SBU image_urls and captions, Conceptual Captions and CC12M on the hub image_url and caption.
# Without names, Conceptual Captions has the caption first (Train_GCC-training.tsv), CC12M the URL (cc12m.tsv).
URLS, CAPTIONS = ("url", "image_url", "image_urls"), ("caption", "text", "captions")
# Of lists of a folder of images: https://huggingface.co/docs/datasets/image_dataset has file_name.
_FILES = ("file_name", "image", "filename")

_LICENSES = ("license", "licence", "license_name", "license_url")  # columns of the licence, the best first

Values = Sequence[Any] | ValueError  # URL, caption and what is kept of a row; or why it cannot be read


@dataclass(frozen=True)
class Reading:
    """How a list is read.

    form     a key of _NAMES
    columns  of the URL, the caption, and of those that are kept beside them: names, or places from 1 on
    places   the same as places from 0 on
    width    how many columns the list has
    header   whether the first line has their names (TSV and CSV)
    """

    form: str
    columns: tuple[str, ...]
    places: tuple[int, ...] = ()
    width: int = 0
    header: bool = False

    @property
    def as_meta(self) -> dict[str, Any]:
        """For a manifest: all that decides what is read."""
        return {"form": self.form, "columns": list(self.columns), "header": self.header}

    def __str__(self) -> str:
        url, caption, *kept = self.columns
        url = f"URL in column {url}" if url else "files' names as URLs"
        header = {True: " with a header", False: " without a header"}[self.header] if self.form in _TEXT else ""
        more = f", {', '.join(kept)} kept" if kept else ""
        return f"{_NAMES[self.form]}{header}, {url}, caption in column {caption}{more}"


# --- which columns ----------------------------------------------------------------------------------------------------


def find_reading(file: Path, columns: Sequence[str] = (), of_folder: bool = False) -> Reading:
    """How to read a list: by `columns` (of URL, caption, and what is kept; names, or places from 1 on), or recognised.

    of_folder: the list names files of a folder. ValueError names a column that is not there, or says what to give.
    """
    form, urls, header = _form(file), _FILES if of_folder else URLS, False
    if form in _TEXT:
        names, header, columns = _text_columns(file, form, columns, of_folder)
        kept = names
    elif form == "parquet":
        with _opened_parquet(file) as table:
            names = table.schema_arrow.names
            kept = [field.name for field in table.schema_arrow if not pa.types.is_nested(field.type)]
    else:
        names, kept = names_of(itertools.islice(_json_rows(file, form), _SAMPLED))
        if not names and form == "jsonl":
            return Reading(form, tuple(columns) or ("url", "caption"))
    columns = columns or (*_recognise(file, names, urls), *license_column(kept))
    places = tuple(_place(file, column, names) for column in columns)
    if "json" in form:
        columns = [names[place] for place in places]
    return Reading(form, tuple(columns), places, len(names), header)


def _recognise(file: Path, names: Sequence[str], urls: Sequence[str]) -> tuple[str, str]:
    """The columns of URL and caption, by their names; ValueError if there is none, or several."""
    found = [[name for name in names if name.lower() in known] for known in (urls, CAPTIONS)]
    if [len(same) for same in found] == [1, 1]:
        return found[0][0], found[1][0]
    which = "several that may be" if all(found) else "none that is known to be"
    listed = f"the columns {_listed(names)}" if names else "no columns"
    example = " ".join(same[0] for same in found) if all(found) else "URL CAPTION"
    raise ValueError(f"{file} has {listed}, {which} those of URL and caption; name them: --columns {example}")


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


def _text_columns(
    file: Path, form: str, columns: Sequence[str], of_folder: bool
) -> tuple[list[str], bool, Sequence[str]]:
    """The names of the columns of a TSV or CSV, whether a header has them (else they are places), and those to read."""
    rows = [cells for cells in itertools.islice(_cells(file, form), _SAMPLED) if not isinstance(cells, ValueError)]
    head = [cell.strip() for cell in rows[0]] if rows else []

    def is_reference(cell: str) -> bool:
        """Whether it is a URL, or the name of an image."""
        return cell.strip().lower().endswith(IMAGE_SUFFIXES) if of_folder else LIKE_A_URL.match(cell) is not None

    lower = {cell.lower() for cell in head}
    known = not lower.isdisjoint(_FILES if of_folder else URLS) and not lower.isdisjoint(CAPTIONS)
    if (known and not any(map(is_reference, head))) or not all(column.isdecimal() for column in columns):
        return head, True, columns
    width = Counter(map(len, rows)).most_common(1)[0][0] if rows else 2
    if not columns and (width > 2 or (width < 2 and form == "csv")):
        raise ValueError(
            f"{file} has {width} columns and no header that is known; give the places of URL and caption, from 1 on: "
            "--columns 2 1"
        )
    pairs = [[is_reference(cell) for cell in row[:2]] for row in rows]
    order = ("1", "2") if pairs.count([True, False]) > pairs.count([False, True]) else ("2", "1")
    return (
        [str(place + 1) for place in range(max(width, len(order)) if not columns else width)],
        False,
        columns or order,
    )


def _form(file: Path) -> str:
    """The format, by the first bytes where they tell it, else by the name; TSV for any other name."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name one list, or give it as images or webdataset")
    with open(file, "rb") as opened:
        magic = opened.read(4)
    if magic == b"PAR1":
        return "parquet"
    name = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    if name.suffix.lower() == ".parquet":
        raise ValueError(f"{file} is not a Parquet file, or is packed; unpack it, or fetch it again")
    form = _SUFFIXES.get(name.suffix.lower())
    if form is None:
        line = next(_lines(file), b"").decode(errors="replace")
        cells = {cell.strip().lower() for cell in line.split(",")}
        known = not cells.isdisjoint((*URLS, *_FILES)) and not cells.isdisjoint(CAPTIONS)
        form = "csv" if "\t" not in line and known else "tsv"
    return form


# --- rows -------------------------------------------------------------------------------------------------------------


def read_rows(file: Path, reading: Reading) -> Iterator[CaptionRow]:
    """Every row of a list, one at a time, each with its URL and caption or with the status BAD_ROW.

    ValueError names a file that is damaged, and what to do.
    """
    kept = reading.columns[2:]
    if reading.form in _TEXT:
        rows = _text_rows(file, reading)
    elif reading.form == "parquet":
        rows = _parquet_rows(file, reading)
    else:
        found = _json_rows(file, reading.form)
        rows = (one if isinstance(one, ValueError) else [one.get(name) for name in reading.columns] for one in found)
    for row, values in enumerate(rows):
        try:
            if isinstance(values, ValueError):
                raise values
            for name, text in zip(reading.columns, values[:2], strict=False):
                if text is not None and not isinstance(text, str):
                    raise ValueError(f"{shown(name)} is {shown(text)}, not a text; name another column under columns")
            extra = {name: scalar(value, name) for name, value in zip(kept, values[2:], strict=True)} if kept else None
            yield CaptionRow(row, values[1] or "", values[0] or "", extra)
        except ValueError as error:
            detail = f"{where(file.name, reading, row)}: {redacted(str(error))}"
            yield CaptionRow(row, "", "", status=Status.BAD_ROW, detail=detail)


def read_captions(file: Path) -> Iterator[CaptionRow]:
    """The rows of a list whose columns are recognised; ValueError names file and row of one that cannot be read."""
    for row in read_rows(file, find_reading(file)):
        if row.status:
            raise ValueError(f"{file.parent}/{row.detail}")
        yield row


def where(file: Path | str, reading: Reading, row: int) -> str:
    """The place of a row, for messages: FILE:LINE where a line is a row."""
    if reading.form in ("tsv", "jsonl"):
        return f"{file}:{row + 1 + reading.header}"
    return f"{file}, row {row + 1}"


def _text_rows(file: Path, reading: Reading) -> Iterator[Values]:
    # Of two columns the first tab splits, and further ones are text, as Conceptual Captions has them.
    rows = _cells(file, reading.form, 1 if reading.width == 2 else -1)
    for cells in itertools.islice(rows, int(reading.header), None):
        if isinstance(cells, ValueError) or len(cells) == reading.width:
            yield cells if isinstance(cells, ValueError) else [cells[place] for place in reading.places]
            continue
        names = "caption TAB url" if reading.places[:2] == (1, 0) else "url TAB caption"
        rule = f"every line is `{names}`" if reading.width == 2 and reading.form == "tsv" else "every row has as many"
        what = f"{len(cells)} columns, and {reading.width} are expected"
        if len(cells) < 2:
            what = f"one column: {redacted(cells[0])[:80]!r}" if any(cells) else "an empty line"
        yield ValueError(f"{what}; {rule}: write it so, or remove the line")


def _cells(file: Path, form: str, most: int = -1) -> Iterator[list[str] | ValueError]:
    """The cells of each row, or why there are none; `most`: tabs of a line that split it, -1 for all."""
    lines = (line.decode(errors="surrogateescape") for line in _lines(file))
    lines = itertools.chain((line.removeprefix("\ufeff") for line in itertools.islice(lines, 1)), lines)
    if form == "csv":
        rows = csv.reader(lines, strict=True)
    else:  # to csv.reader, a lone carriage return ends a line
        rows = (line.removesuffix("\n").removesuffix("\r").split("\t", most) for line in lines)
    while True:
        try:
            cells = next(rows)
            "\t".join(cells).encode()
            yield cells
        except StopIteration:
            return
        except csv.Error as error:
            wrong = "a carriage return, which ends no line here" if "new-line" in str(error) else error
            yield ValueError(f"{wrong}; write quotes and ends of lines (\\n or \\r\\n) as CSV has them")
        except UnicodeEncodeError:
            yield ValueError("not UTF-8; convert the list to UTF-8")


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of an unpacked or packed file. Only \\n ends one: U+2028, form feeds and a lone \\r are text."""
    with open(file, "rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    with named_errors(file), gzip.open(file, "rb") if packed else open(file, "rb") as stream:
        yield from iter(lambda: stream.readline(_LONGEST_LINE), b"")


@contextlib.contextmanager
def named_errors(file: Path | str) -> Iterator[None]:
    """What is wrong with the file becomes a ValueError that names it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} is damaged or ends early ({error}); fetch it again") from error
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {printable(error)[:300]}; fetch it again") from error


# --- JSON and Parquet -------------------------------------------------------------------------------------------------


def _json_rows(file: Path, form: str) -> Iterator[dict[str, Any] | ValueError]:
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
        if len({len(values) for values in lists.values()}) > 1:
            lengths = ", ".join(f"{shown(name)} {len(values)}" for name, values in lists.items())
            raise ValueError(f"{file}: its columns differ in length ({lengths[:300]}); fetch it again")
        found = (dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
    for row in found:
        wrong = f"{shown(row)} is not an object; write each row as one"
        yield row if isinstance(row, dict) else ValueError(wrong)


def names_of(rows: Iterable[dict[str, Any] | ValueError]) -> tuple[list[str], list[str]]:
    """The names in these rows, and those whose values a sample can keep, in order."""
    kept: dict[str, bool] = {}
    for row in rows:
        for name, value in ({} if isinstance(row, ValueError) else row).items():
            kept[name] = kept.get(name, True) and isinstance(value, Scalar)
    return list(kept), [name for name, fits in kept.items() if fits]


@contextlib.contextmanager
def _opened_parquet(file: Path) -> Iterator[pq.ParquetFile]:
    with named_errors(file), pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as table:  # page by page
        yield table


def _parquet_rows(file: Path, reading: Reading) -> Iterator[Values]:
    with _opened_parquet(file) as table:
        names = [table.schema_arrow.names[place] for place in reading.places]
        for batch in table.iter_batches(_BATCH, columns=names, use_threads=False):
            yield from zip(*(batch[name].to_pylist() for name in names), strict=True)


def scalar(value: Any, name: str) -> Scalar:
    """A value that a sample can keep, None in place of NaN (a missing number to pandas); ValueError for any other."""
    if not isinstance(value, Scalar):
        raise ValueError(f"{shown(name)} is {shown(value)}; keep texts, numbers and truth values alone under columns")
    return None if isinstance(value, float) and not math.isfinite(value) else value
