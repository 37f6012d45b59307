"""Reading of caption lists: detects the URL and caption columns, and yields the rows.

A list is a TSV, CSV, JSON Lines or JSON file, optionally .gz, or a Parquet file. A list for a folder of images has file
names instead of URLs. A row of the file with several captions gives several rows. A row that cannot be read gets a
status. If the file cannot be read, ValueError is raised.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
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
from storage.signatures import START_BYTES, check_start

# Suffixes of images. The first are preferred if an image is in several formats; some of the last are not read.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif")
IMAGE_SUFFIXES += (".jp2", ".jxl", ".svg")
_SAMPLED = 100  # rows from which columns are detected
_BATCH = 100  # rows of a Parquet file that are decoded at a time; some hold images
_MAX_LINE = 2**20  # bytes; a longer line is read as several lines
_FORMS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}  # else TSV
_DELIMITERS = {"tsv": "\t", "csv": ",", "csv with ;": ";", "tsv with |": "|"}  # only the cells of a CSV are quoted

# Lower-case names of the columns of published lists: LAION and COYO-700M have url and text, img2dataset's examples url
# and caption, SBU image_urls and captions, Conceptual Captions and CC12M on the Hub image_url and caption. Lists
# without names: Conceptual Captions has the caption first (Train_GCC-training.tsv), CC12M the URL (cc12m.tsv).
URLS = ("url", "image_url", "image_urls")
CAPTIONS = ("caption", "text", "captions", "comment", "sentences")
# Columns in lists for a folder of images: https://huggingface.co/docs/datasets/image_dataset has file_name.
_FILES = ("file_name", "image", "filename", "image_name")
_RARE = {"comment", "sentences", "image_name"}  # of Kaggle's Flickr30k and Karpathy's splits; others come before them

_LICENSES = ("license", "licence", "license_name", "license_url")  # columns of the licence, the best first
# Flickr's results.token has NAME.jpg#0 to NAME.jpg#4 for the captions of an image.
_NUMBERED = re.compile(rf"(?!\s*https?:)(.+(?:{'|'.join(map(re.escape, IMAGE_SUFFIXES))}))#\d+", re.IGNORECASE)
_LIKE_A_LIST = re.compile(r"""\s*\[\s*(['"]).*['"]\s*,?\s*\]\s*""", re.DOTALL)  # captions in one cell

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
    form, known, header, head = _detect_form(file), (_FILES if of_folder else URLS, CAPTIONS), False, []
    if form in _DELIMITERS:
        form = _detect_delimiter(file, form, known)
        head = next(_cells(file, form), [])
        header = _is_header(head, known) or not all(column.isdecimal() for column in columns)
    rows = list(itertools.islice(_records(file, form, header), _SAMPLED))
    good = [row for row in rows if not isinstance(row, ValueError)]
    names = list(dict.fromkeys(name for row in good for name in row))
    matches = [[name for name in names if name.lower() in names_known] for names_known in known]
    matches = [[name for name in same if name.lower() not in _RARE] or same for same in matches]
    if not names:
        raise ValueError(f"{file} has no readable row{f': {rows[0]}' if rows else ''}")
    listed = printable(", ".join(names))[:500]
    if columns:
        missing = [column for column in columns if column not in names]
        if missing:
            raise ValueError(f"{file} has no column {short_repr(missing[0])}; it has {listed}")
    elif names == ["1", "2"]:
        columns = _guess(good)
    elif [len(same) for same in matches] == [1, 1]:
        scalars = [name for name in names if all(isinstance(row.get(name), Scalar) for row in good)]
        columns = (matches[0][0], matches[1][0], *license_column(scalars))
    else:
        problem = "more than one" if all(matches) else "none"
        first = redacted(f", or to names in its first line: {short_repr(head)}") if head and not header else ""
        raise ValueError(
            f"{file} has the columns {listed}, {problem} with a known name for URL or caption; set columns to the "
            f"names of the two{first}. docs/images.md lists the formats, and has code to unpack images from Parquet"
        )
    captions = (row.get(columns[1]) for row in good)
    several = any(isinstance(cell, list) or _LIKE_A_LIST.fullmatch(str(cell)) for cell in captions)
    return Reading(form, tuple(columns), header, several)


def _detect_delimiter(file: Path, form: str, known: Sequence[Sequence[str]]) -> str:
    """Return the form (of _DELIMITERS) of a text file: `form`, or another that separates more names or references."""

    def rank(other: str) -> tuple[bool, int, int]:
        rows = [row for row in itertools.islice(_cells(file, other), _SAMPLED) if isinstance(row, list) and row[1:]]
        references = sum(any(map(_is_reference, row)) for row in rows)
        return any(_is_header(row, known) for row in rows[:1]), references, len(rows)

    return max(dict.fromkeys((form, *_DELIMITERS)), key=rank)


def _is_header(cells: list[str] | ValueError, known: Sequence[Sequence[str]]) -> bool:
    lower = set() if isinstance(cells, ValueError) else {cell.strip().lower() for cell in cells}
    return all(not lower.isdisjoint(names) for names in known)


def _guess(rows: Sequence[dict[str, str]]) -> tuple[str, str]:
    """Return the columns "1" and "2" in the order (URL column, caption column), guessed from the values in `rows`."""
    first, second = (sum(_is_reference(row[name]) for row in rows) for name in ("1", "2"))
    return ("1", "2") if first > second else ("2", "1")


def _is_reference(cell: str) -> bool:
    """Return True if a cell looks like a URL or the name of an image file."""
    url = re.fullmatch(r'\s*https?://[^\s"]+\s*', cell, re.IGNORECASE)
    return url is not None or _NUMBERED.sub(r"\1", cell.strip()).lower().endswith(IMAGE_SUFFIXES)


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
    numbers = itertools.count()
    for record in _records(file, reading.form, reading.header, reading.columns):
        try:
            if isinstance(record, ValueError):
                raise record
            address = _text(record.get(url), url)
            if numbered := _NUMBERED.fullmatch(address):
                address = numbered[1]
            texts = split_captions(record.get(caption), caption)
            if len(texts) > 1 and not reading.several:  # else the numbers of rows would not be those of lines
                raise ValueError(f"{short_repr(caption)} has several captions, other rows one; write a row for each")
            extra = {name: scalar(record.get(name), name) for name in kept} if kept else None
        except ValueError as error:
            row = next(numbers)
            detail = f"{reading.location(file.name, row)}: {redacted(str(error))}"
            yield CaptionRow(row, "", "", status=Status.BAD_ROW, detail=detail)
        else:
            for text in texts:
                yield CaptionRow(next(numbers), text, address, extra)


def read_captions(file: Path) -> Iterator[CaptionRow]:
    """Detect the columns of a caption list, and yield its rows. Raises ValueError if a row cannot be read."""
    for row in read_rows(file, find_reading(file)):
        if row.status:
            raise ValueError(f"{file.parent}/{row.detail}")
        yield row


def split_captions(value: Any, name: str) -> list[str]:
    """Return the captions of a cell: a string, a list, or a string with a list in JSON. A missing caption is "".

    Of an object, `raw` is the caption (as in Karpathy's splits). Raises ValueError, with the column's `name`, for other
    values.
    """
    if isinstance(value, str) and _LIKE_A_LIST.fullmatch(value):
        value = parse_json(value, f"the list in {short_repr(name)}", list, "write it as JSON")
    values = value if isinstance(value, list) else [value]
    return [_text(text.get("raw") if isinstance(text, dict) else text, name) for text in values] or [""]


def _text(value: Any, name: str) -> str:
    """Return a string, or "" for None and NaN (a missing value). Raises ValueError for other values."""
    if value is None or value != value:
        return ""
    if not isinstance(value, str):
        has_image = isinstance(value, bytes) or (isinstance(value, dict) and "bytes" in value)
        fix = "docs/images.md has code to unpack images" if has_image else "set columns to another name"
        raise ValueError(f"{short_repr(name)} is {short_repr(value)}, not a string; {fix}")
    return value


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
        start = stream.read(START_BYTES)
    check_start(file, start, ("gzip",))
    name = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return "parquet" if start.startswith(b"PAR1") else _FORMS.get(name.suffix.lower(), "tsv")


def _records(file: Path, form: str, header: bool, columns: Sequence[str] = ()) -> Iterator[_Record]:
    """Yield each row of a list as a dict, or as a ValueError if the row cannot be read.

    If `columns` are given, other columns may be missing from the dicts.
    """
    if form == "parquet":
        return _parquet_records(file, columns)
    return _json_records(file, form) if "json" in form else _text_records(file, form, header, columns)


def _text_records(file: Path, form: str, header: bool, columns: Sequence[str]) -> Iterator[_Record]:
    """Yield the rows of a TSV or CSV file. If a TSV has two columns, further tabs belong to the caption."""
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
        if form == "tsv" and len(names) == 2 < len(cells):
            # The URL or file name is the first cell that looks like one if its column is the first, else the last.
            found = [i for i, cell in enumerate(cells) if _is_reference(cell)]
            i = (found or [0, len(cells) - 1])[0 if [*columns[:1]] == names[:1] else -1]
            caption = "\t".join(cells[:i] + cells[i + 1 :])
            cells = [caption, cells[i]] if i else [cells[i], caption]
        if len(cells) == len(names):
            yield dict(zip(names, cells, strict=True))
        else:
            problem = f"{len(cells)} columns, but {len(names)} are expected: {short_repr(cells)}"
            yield ValueError(f"{problem}; correct the row, or remove it")


def _cells(file: Path, form: str) -> Iterator[list[str] | ValueError]:
    """Yield the cells of each row of a TSV or CSV file, or a ValueError for a row that cannot be read."""
    lines = (line.decode(errors="surrogateescape") for line in _lines(file))
    lines = itertools.chain((line.removeprefix("\ufeff") for line in itertools.islice(lines, 1)), lines)
    delimiter = _DELIMITERS[form]
    if form.startswith("csv"):
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
    else:  # not csv.reader, for which a lone carriage return ends a line
        rows = (line.removesuffix("\n").removesuffix("\r").split(delimiter) for line in lines)
        if delimiter == "|":
            rows = ([cell.strip() for cell in cells] for cells in rows)
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
    """Yield the lines of a plain or gzip file, in UTF-8 also if it is UTF-16, without blank lines at its end.

    U+2028, form feeds and lone carriage returns do not end a line. Raises ValueError if the file cannot be read.
    """
    with open(file, "rb") as stream:
        is_gzip = stream.read(2) == b"\x1f\x8b"
    with gzip.open(file) if is_gzip else open(file, "rb") as stream, _read_errors(file):
        start = stream.peek(START_BYTES)
        check_start(file, start)
        lines = iter(lambda: stream.readline(_MAX_LINE), b"")
        if not (encoding := json.detect_encoding(start)).startswith("utf-8"):
            text = io.TextIOWrapper(stream, encoding, newline="\n")
            lines = (line.encode() for line in iter(lambda: text.readline(_MAX_LINE), ""))
        held = []
        for line in lines:
            held.append(line)
            if line.strip():
                yield from held
                held.clear()


@contextlib.contextmanager
def _read_errors(file: Path | str) -> Iterator[None]:
    """Context manager that turns read errors into a ValueError that names the file."""
    try:
        yield
    except (EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {printable(error)[:300]}; fetch it again") from error


def _json_records(file: Path, form: str) -> Iterator[_Record]:
    """Yield the rows of a JSON Lines or JSON file. A JSON file holds a list of objects, or an object."""
    if form == "jsonl":
        for line in _lines(file):
            try:
                yield parse_json(line, "the line", fix="write one object per line, or remove it")
            except ValueError as error:
                yield error
        return
    fix = "write or fetch it again, or rename it to .jsonl if each line is an object"
    rows = parse_json(b"".join(_lines(file)), str(file), (dict, list), fix)
    for row in _object_rows(file, rows) if isinstance(rows, dict) else rows:
        problem = f"{short_repr(row)} is not an object; write each row as an object"
        yield row if isinstance(row, dict | ValueError) else ValueError(problem)


def _object_rows(file: Path, value: dict[str, Any]) -> Iterable[Any]:
    """Return the rows of an object: COCO's file, one list of objects, a list for each column, or captions by image.

    Raises ValueError, with a way to convert the file, for other objects.
    """
    lists = {name: values for name, values in value.items() if isinstance(values, list)}
    tables = {name: values for name, values in lists.items() if values and isinstance(values[0], dict)}
    if {"images", "annotations"} <= tables.keys():
        return _coco_rows(tables)
    if len(tables) == 1:  # RedCaps, Karpathy's splits
        return next(iter(tables.values()))
    is_column = not {*map(str.lower, value)}.isdisjoint((*URLS, *CAPTIONS))
    url = next(("url" if "://" in name else "image" for name in value if _is_reference(name)), None)
    if url and not is_column:
        return ({url: name, "caption": captions} for name, captions in value.items())
    if len({len(values) for values in lists.values()}) == 1 and not all(map(str.isdecimal, value)):  # SBU
        return (dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
    code = f"import json; d = json.load(open({printable(file)!r}))"
    code += "; json.dump({k + '.jpg': d[k] for k in d}, open('list.json', 'w'))"
    raise ValueError(
        f"{file} is an object with the fields {printable(', '.join(value))[:100]}, but no table; write a list of "
        f'objects (docs/images.md). If it maps ID to the caption of ID.jpg, run: python -c "{code}"'
    )


def _coco_rows(tables: dict[str, list]) -> Iterator[Any]:
    """Yield the captions of a file in COCO's format, each with the fields, URL and licence of its image."""
    images, licenses = (
        {str(row.get("id")): row for row in tables.get(name, ()) if isinstance(row, dict)}
        for name in ("images", "licenses")
    )
    for row in tables["annotations"]:
        image = images.get(str(row.get("image_id"))) if isinstance(row, dict) else None
        if image is None:
            yield ValueError(f"{short_repr(row)} has no image_id of an image in the file")
        else:
            license_url = licenses.get(str(image.get("license")), {}).get("url")
            yield {"url": image.get("coco_url"), **row, **image, "license": license_url}


def _parquet_records(file: Path, columns: Sequence[str]) -> Iterator[_Record]:
    with _read_errors(file), pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as table:  # page by page
        for batch in table.iter_batches(_BATCH, columns=[*columns] or None, use_threads=False):
            yield from batch.to_pylist()
