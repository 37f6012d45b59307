"""Functions that read and check the files of data sets.

The data sets' own modules (vqa, vcr, refcoco, retrieval) have the official scorers. They need no images and no torch.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np

from storage.reading import Samples
from storage.safe_json import parse_json
from storage.signatures import START_BYTES, check_start

Parsed = TypeVar("Parsed")


@contextlib.contextmanager
def open_task_file(file: Path, settings: str) -> Iterator[BufferedReader]:
    """Open a binary file for reading. Raises ValueError, naming the file and the `settings` to change, if it fails."""
    try:
        with open(file, "rb") as stream:
            check_start(file, stream.peek(START_BYTES))
            yield stream
    except FileNotFoundError as error:
        raise ValueError(f"there is no {file}; fetch it, or set {settings}") from error
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}; check it, or fetch it again") from error


def read_json(file: Path, settings: str, kind: type = dict) -> Any:
    """Read a JSON value of type `kind`; NaN is allowed. Raises ValueError if that fails (see `open_task_file`)."""
    with open_task_file(file, settings) as stream:
        return parse_json(stream.read(), str(file), kind, "fetch it again")


def read_text(file: Path, settings: str) -> str:
    """Read a UTF-8 file without its byte order mark. Raises ValueError if that fails (see `open_task_file`)."""
    try:
        with open_task_file(file, settings) as stream:
            return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}; save it as UTF-8") from error


def read_lines(file: Path, settings: str) -> list[str]:
    """Return the stripped, non-blank lines of a UTF-8 file. Raises ValueError, naming `settings`, if there are none."""
    lines = [line.strip() for line in read_text(file, settings).split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{settings} {file} is empty; write one entry per line")
    return lines


@contextlib.contextmanager
def check_format(kind: str, file: Path, entry: str) -> Iterator[None]:
    """Turn an error in the `with` block into a ValueError saying that `entry` of `file` is not in `kind`'s format."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file} is not in {kind}'s format, {entry}: {type(error).__name__}: {error}; fetch it again"
        ) from error


def parse_entries(entries: Any, name: str, kind: str, file: Path, parse: Callable[[Any], Parsed]) -> list[Parsed]:
    """Return parse(entry) for each entry of the list `name`. Raises ValueError (see `check_format`) if that fails."""
    if not isinstance(entries, list):
        raise ValueError(f"{file} is not in {kind}'s format, {name}: no such list; fetch it again")
    parsed = []
    for number, entry in enumerate(entries):
        with check_format(kind, file, f"{name}[{number}]"):
            parsed.append(parse(entry))
    return parsed


def check_unique(ids: Iterable[Hashable], source: str) -> set[Hashable]:
    """Return the ids as a set. Raises ValueError, naming some of them, if ids are repeated."""
    counts = Counter(ids)
    _raise_ids([id_ for id_, count in counts.items() if count > 1], f"of {source} are repeated")
    return set(counts)


def check_ids(found: Iterable[Hashable], expected: Sequence[Hashable], found_in: str, expected_in: str) -> None:
    """Raise ValueError, naming some ids, if ids are repeated or if `found` and `expected` differ."""
    found_ids, expected_ids = check_unique(found, found_in), check_unique(expected, expected_in)
    _raise_ids([id_ for id_ in expected if id_ not in found_ids], f"of {expected_in} are missing in {found_in}")
    _raise_ids(list(found_ids - expected_ids), f"of {found_in} are not in {expected_in}")


def _raise_ids(ids: Sequence[Hashable], problem: str) -> None:
    if ids:
        raise ValueError(f"{len(ids)} ids {problem}, such as {', '.join(map(str, ids[:3]))}; they must match exactly")


def image_name(url: str) -> str:
    """Return the file name at the end of a URL, with percent escapes decoded."""
    return Path(unquote(urlsplit(url).path)).name


def withdrawn_images(samples: Samples, images: Iterable[str]) -> set[str]:
    """Return which of these image files are in no sample because their URL was withdrawn."""
    withdrawn = {image_name(url) for url in samples.withdrawn}.intersection(images)
    return withdrawn - {image_name(url) for url in samples.urls} if withdrawn else withdrawn


def find_samples(samples: Samples, images: Sequence[str], source: str) -> np.ndarray:
    """Return the sample index of each image, int64 [n]. Raises ValueError unless each has exactly one sample."""
    needed, numbers = set(images), defaultdict(list)
    for i, url in enumerate(samples.urls):
        numbers[image_name(url)].append(i)
    missing = sorted(needed - numbers.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(set(images))} images of {source} are in no region shard, such as {missing[0]}; "
            "collect them and run the detection stage first"
        )
    repeated = sorted(image for image in needed if len(numbers[image]) > 1)
    if repeated:
        urls = ", ".join(samples.urls[i] for i in numbers[repeated[0]][:3])
        raise ValueError(
            f"{len(repeated)} of {len(needed)} images of {source} are in several samples, such as {repeated[0]}, from "
            f"{urls}; name a dataset that has each image once in data.datasets or data.held_out"
        )
    return np.array([numbers[image][0] for image in images], np.int64)
