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
from dataclasses import dataclass, replace
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

Values = Sequence[Any] | ValueError  # URL, caption and what is kept of a row; or why it cannot be read


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
    places: tuple[int, ...] = ()
    width: int = 0
    header: bool = False
    shape: str = ""

    @property
    def as_meta(self) -> dict[str, Any]:
        """For a manifest: all that decides what is read."""
        return {"form": self.form, "columns": list(self.columns), "header": self.header}

    def __str__(self) -> str:
        url, caption, *kept = self.columns
        url = f"URL in column {url}" if url else "files' names as URLs"
        header = {True: " with a header", False: " without a header"}[self.header] if self.form in _TEXT else ""
        more = f", {', '.join(kept)} kept" if kept else ""
        shape = f" (as {self.shape})" if self.shape else ""
        return f"{_NAMES[self.form]}{header}, {url}, caption in column {caption}{more}{shape}"


# --- which columns ----------------------------------------------------------------------------------------------------


def find_reading(file: Path, columns: Sequence[str] = (), of_folder: bool = False) -> Reading:
    """How to read a list: by `columns` (of URL, caption, and what is kept; names, or places from 1 on), or recognised.

    of_folder: the list names files of a folder. ValueError names a column that is not there, or says what to give.
    """
    form, shapes = _form(file), FOLDER_SHAPES if of_folder else SHAPES
    if form in _TEXT:
        return _of_text(file, form, columns, shapes, _like_an_image if of_folder else LIKE_A_URL.match)
    if form == "parquet":
        with _opened_parquet(file) as table:
            names = table.schema_arrow.names
            kept = [field.name for field in table.schema_arrow if not pa.types.is_nested(field.type)]
    else:
        names, kept = names_of(itertools.islice(_json_rows(file, form), _SAMPLED))
        if not names and form == "jsonl":
            return Reading(form, tuple(columns) or ("url", "caption"))
    reading = _named(file, form, names, kept, columns, shapes)
    return replace(reading, columns=tuple(names[place] for place in reading.places)) if "json" in form else reading


def _named(
    file: Path, form: str, names: Sequence[str], kept: Sequence[str], columns: Sequence[str], shapes: Sequence[Shape]
) -> Reading:
    """How a list with these names of its columns is read; `kept`: those that hold what a sample can keep."""
    shape = ""
    if not columns:
        columns, shape = recognise(names, str(file), shapes)
        columns += license_column(kept)
    places = tuple(_place(file, column, names) for column in columns)
    return Reading(form, tuple(columns), places, len(names), form in _TEXT, shape)


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
            f"--columns {' '.join(pairs[0]) if pairs else 'URL CAPTION'}"
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


def _of_text(file: Path, form: str, columns: Sequence[str], shapes: Sequence[Shape], is_reference: Any) -> Reading:
    """The reading of a TSV or CSV; `is_reference`: whether a cell is a URL, or the name of an image."""
    rows = [cells for cells in itertools.islice(_cells(file, form), _SAMPLED) if not isinstance(cells, ValueError)]
    if not rows:
        return Reading(form, ("2", "1"), (1, 0), 2, shape="Conceptual Captions")
    head = [cell.strip() for cell in rows[0]]
    lower = {cell.lower() for cell in head}
    known = any({one.url, one.caption} <= lower for one in shapes) and not any(map(is_reference, head))
    if known or not all(column.isdecimal() for column in columns):
        return _named(file, form, head, head, columns, shapes)
    width = Counter(map(len, rows)).most_common(1)[0][0]
    if columns:
        places = tuple(_place(file, column, [str(n + 1) for n in range(width)]) for column in columns)
        return Reading(form, tuple(columns), places, width)
    if width > 2 or (width < 2 and form == "csv"):
        raise ValueError(
            f"{file} has {width} columns and no header that is known; give the places of URL and caption, from 1 on: "
            "--columns 2 1"
        )
    first = sum(len(row) > 1 and bool(is_reference(row[0])) and not is_reference(row[1]) for row in rows)
    second = sum(len(row) > 1 and bool(is_reference(row[1])) and not is_reference(row[0]) for row in rows)
    places, shape = ((0, 1), "CC12M") if first > second else ((1, 0), "Conceptual Captions")
    shape = "" if shapes is FOLDER_SHAPES else shape
    return Reading(form, tuple(str(place + 1) for place in places), places, 2, shape=shape)


def _like_an_image(cell: str) -> bool:
    return cell.strip().lower().endswith(IMAGE_SUFFIXES)


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
        known = any({one.url, one.caption} <= cells for one in (*SHAPES, *FOLDER_SHAPES))
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
