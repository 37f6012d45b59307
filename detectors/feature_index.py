"""Where each image's row lies in a file of features, kept beside the file: FILE.index, an SQLite database.

It is made once, in one pass that also computes the file's sha256, and again when the file's size or time has changed.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_VERSION = "1"
_EXTENSION = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|json)$", re.IGNORECASE)
_LONGEST_NUMBER = 18  # digits; SQLite's numbers have 64 bits
_AT_A_TIME = 10_000  # rows that are written together


class Place(NamedTuple):
    """Where a row lies; what member, offset, length and crc32 mean is the format's own."""

    name: str
    """The image, as the file calls it."""
    member: bytes = b""
    offset: int = 0
    length: int = 0
    crc32: int = 0


def stem_of(name: str) -> str:
    """The last component of a path without the extension of an image or of JSON."""
    return _EXTENSION.sub("", name.rsplit("/", 1)[-1])


def number_of(name: str) -> int | None:
    """The number at the end of a stem: 391895 of COCO_val2014_000000391895.jpg; None where there is none."""
    digits = re.search(r"[0-9]+$", stem_of(name))
    return int(digits[0]) if digits and len(digits[0].lstrip("0")) <= _LONGEST_NUMBER else None


def file_name_of(url: str) -> str:
    """The last component of a URL's path, without escapes and query."""
    return unquote(urlsplit(url).path).rsplit("/", 1)[-1]


class FeatureIndex:
    """The rows of one file of features, in the file's order."""

    def __init__(self, database: sqlite3.Connection):
        self._database = database
        self.about = dict(database.execute("SELECT field, value FROM about"))
        self.sha256 = self.about["sha256"]

    def rows(self) -> Iterator[Place]:
        """All rows."""
        return self._select("ORDER BY rowid")

    def find(self, column: str, value: str | int) -> list[Place]:
        """The rows of this name, stem or number: two at most."""
        return list(self._select(f"WHERE {column} = ? ORDER BY rowid LIMIT 2", value))

    def _select(self, clause: str, *values: str | int) -> Iterator[Place]:
        columns = ", ".join(Place._fields)
        return map(Place._make, self._database.execute(f"SELECT {columns} FROM rows {clause}", values))


Scan = Callable[["hashlib._Hash"], Iterator[Place]]


def open_index(path: Path, made_of: str, columns: str, scan: Scan) -> FeatureIndex:
    """The index beside `path`, made if it is missing or of another file.

    made_of: changes when the file does; columns: what the rows were read as; scan: yields the rows while it feeds the
    hash with the file's content. Where the folder cannot be written to, the index is this process's own, and that is
    printed.
    """
    file = path.with_name(f"{path.name}.index")
    wanted = {"version": _VERSION, "made_of": made_of, "columns": columns}
    with _alone(path):
        if found := _opened(file, wanted):
            return found
        print(f"indexing {path}, once", file=sys.stderr, flush=True)
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.partial")
        try:
            _make(sqlite3.connect(temporary), wanted, scan).close()
            temporary.replace(file)
            return FeatureIndex(_reading(file))
        except sqlite3.OperationalError as error:
            print(f"{file} cannot be written ({error}): the next process indexes {path} again", file=sys.stderr)
            return FeatureIndex(_make(sqlite3.connect(""), wanted, scan))  # a file without a name, gone with us
        finally:
            with contextlib.suppress(OSError):  # it was replaced, or never written
                temporary.unlink()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While one process makes the index, the others of the machine wait for it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: each makes its own
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _reading(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)


def _opened(file: Path, wanted: dict[str, str]) -> FeatureIndex | None:
    """The index of the file, if it is whole and says what is wanted."""
    if not file.is_file():
        return None
    try:
        found = FeatureIndex(_reading(file))
    except (sqlite3.DatabaseError, KeyError):
        return None
    return found if wanted.items() <= found.about.items() else None


def _make(database: sqlite3.Connection, about: dict[str, str], scan: Scan) -> sqlite3.Connection:
    digest = hashlib.sha256()
    database.executescript(
        "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
        "CREATE TABLE about (field TEXT PRIMARY KEY, value TEXT);"
        "CREATE TABLE rows (name TEXT, stem TEXT, number INT, member BLOB, offset INT, length INT, crc32 INT);"
    )
    waiting: list[tuple] = []
    insert = "INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)"
    for name, *place in scan(digest):
        waiting.append((name, stem_of(name), number_of(name), *place))
        if len(waiting) == _AT_A_TIME:
            database.executemany(insert, waiting)
            waiting.clear()
    database.executemany(insert, waiting)
    for column in ("name", "stem", "number"):
        database.execute(f"CREATE INDEX by_{column} ON rows ({column})")
    # The last that is written: a database without it is not whole.
    database.executemany("INSERT INTO about VALUES (?, ?)", [*about.items(), ("sha256", digest.hexdigest())])
    database.commit()
    return database
