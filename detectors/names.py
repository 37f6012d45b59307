"""Lists of class or attribute names: one entry per line, synonyms separated by commas."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.signatures import read_file


def read_lines(file: Path, items: str) -> list[str]:
    """Read the lines of a text file. Raises ValueError if it is unreadable. The message calls the lines `items`."""
    try:
        return read_file(file).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a list of {items}: {error}") from error


def read_names(file: Path) -> list[list[str]]:
    """Read the names on each line, the main name first. Raises ValueError if a line does not begin with a name."""
    lines = [[name.strip() for name in line.split(",")] for line in read_lines(file, "names")]
    for index, synonyms in enumerate(lines):
        if not synonyms[0]:
            raise ValueError(f"{file}: line {index + 1} does not begin with a name; correct or remove it")
    return lines


@dataclass(frozen=True)
class Names:
    """The names of the classes or attributes that a network learns."""

    first: tuple[str, ...]
    """The main name of each line."""
    index: dict[str, int]
    """Line, counted from 0, of each name and synonym, in the form of normalize_name."""

    @classmethod
    def from_lines(cls, lines: Sequence[Sequence[str]], source: str) -> "Names":
        """Create Names from the names on each line. Raises ValueError, naming `source`, if a name is on two lines."""
        index: dict[str, int] = {}
        for number, synonyms in enumerate(lines):
            for name in filter(None, map(normalize_name, synonyms)):
                if index.setdefault(name, number) != number:
                    raise ValueError(f"{source}: {name!r} is in lines {index[name] + 1} and {number + 1}; keep one")
        return cls(tuple(synonyms[0].strip() for synonyms in lines), index)

    @classmethod
    def read(cls, file: Path) -> "Names":
        return cls.from_lines(read_names(file), str(file))

    def find(self, names: Iterable[str]) -> int | None:
        """Return the line number, counted from 0, of the first known name in `names`, or None if all are unknown."""
        return next((self.index[name] for name in map(normalize_name, names) if name in self.index), None)


@functools.cache
def normalize_name(name: str) -> str:
    """Return a name in lower case with single spaces between words."""
    return " ".join(name.lower().split())
