"""Lists of the names of classes or attributes: one a line, synonyms between commas."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


def read_lines(file: Path, what: str) -> list[str]:
    """The lines of a text file; ValueError says that it is no list of `what`."""
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no list of {what}: {error}") from error


def read_names(file: Path) -> list[list[str]]:
    """Return the names of each line, synonyms after the first; ValueError for a line without a first name."""
    found = [[name.strip() for name in line.split(",")] for line in read_lines(file, "names")]
    for index, synonyms in enumerate(found):
        if not synonyms[0]:
            raise ValueError(f"{file} has no name in line {index + 1}; remove the line")
    return found


@dataclass(frozen=True)
class Names:
    """The names of classes or attributes that a network learns."""

    first: tuple[str, ...]
    """The first name of each line."""
    number: dict[str, int]
    """The line, from 0, of each name and synonym, in small letters."""

    @classmethod
    def of(cls, names: Sequence[Sequence[str]], where: str) -> "Names":
        """ValueError where a name stands in two lines."""
        number: dict[str, int] = {}
        for index, synonyms in enumerate(names):
            for name in filter(None, map(plain, synonyms)):
                if number.setdefault(name, index) != index:
                    raise ValueError(f"{where}: {name!r} stands in lines {number[name] + 1} and {index + 1}; keep one")
        return cls(tuple(synonyms[0].strip() for synonyms in names), number)

    @classmethod
    def read(cls, file: Path) -> "Names":
        return cls.of(read_names(file), str(file))

    def find(self, names: Iterable[str]) -> int | None:
        """The line of the first of an object's names that is known."""
        return next((self.number[name] for name in map(plain, names) if name in self.number), None)


@functools.cache
def plain(name: str) -> str:
    """In small letters, words separated by one space."""
    return " ".join(name.lower().split())
