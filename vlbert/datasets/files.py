"""Reading the data sets' files. Each data set has a module beside this one (vqa, vcr, refcoco, retrieval), with its
official scorer. None of them needs images, a model or torch.
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

Parsed = TypeVar("Parsed")


@contextlib.contextmanager
def open_task_file(file: Path, settings: str) -> Iterator[BufferedReader]:
    """Open a file. ValueError names it where it is missing, with the `settings` that name it, or cannot be read."""
    try:
        with open(file, "rb") as stream:
            yield stream
    except FileNotFoundError as error:
        raise ValueError(f"there is no {file}; fetch it, or set {settings}") from error
    except OSError as error:
        raise ValueError(
            f"cannot read {file}: {error.strerror or error}; make it readable, or fetch it again"
        ) from error


def read_json(file: Path, settings: str, wanted: type = dict) -> Any:
    """The value of a JSON file, of type `wanted`; NaN and Infinity are read as Python writes them. Errors as in
    `open_task_file`, and where it is torn."""
    with open_task_file(file, settings) as stream:
        return parse_json(stream.read(), str(file), wanted, "fetch it again")


def read_text(file: Path, settings: str) -> str:
    """The text of a UTF-8 file, without a byte order mark. Errors as in `open_task_file`, and where it is not UTF-8."""
    try:
        with open_task_file(file, settings) as stream:
            return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}; save it as such") from error


def read_lines(file: Path, settings: str) -> list[str]:
    """The lines of a text file that are not blank, without spaces around them. Errors as in `read_text`, and where
    there is none."""
    found = [line.strip() for line in read_text(file, settings).split("\n") if line.strip()]
    if not found:
        raise ValueError(f"{settings} {file} is empty; write one a line")
    return found


@contextlib.contextmanager
def check_format(kind: str, file: Path, entry: str) -> Iterator[None]:
    """Raise ValueError that names the file and the entry if an entry is not as the code inside expects it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file} is not in {kind}'s format, {entry}: {type(error).__name__}: {error}; fetch it again"
        ) from error


def parse_entries(entries: Any, name: str, kind: str, file: Path, parse: Callable[[Any], Parsed]) -> list[Parsed]:
    """What `parse` makes of each entry of a list; errors as in `check_format`, and where it is no list."""
    if not isinstance(entries, list):
        raise ValueError(f"{file} is not in {kind}'s format, {name}: no such list; fetch it again")
    found = []
    for number, entry in enumerate(entries):
        with check_format(kind, file, f"{name}[{number}]"):
            found.append(parse(entry))
    return found


def check_unique(ids: Iterable[Hashable], where: str) -> set[Hashable]:
    """The ids. ValueError names the first that stand there twice, and how many there are."""
    counts = Counter(ids)
    _complain([one for one, count in counts.items() if count > 1], f"of {where} stand there more than once")
    return set(counts)


def check_ids(found: Iterable[Hashable], expected: Sequence[Hashable], found_in: str, expected_in: str) -> None:
    """ValueError names the first ids that stand twice in one or are missing in the other, and how many there are."""
    ours, theirs = check_unique(found, found_in), check_unique(expected, expected_in)
    _complain([one for one in expected if one not in ours], f"of {expected_in} miss in {found_in}")
    _complain(list(ours - theirs), f"of {found_in} are not in {expected_in}")


def _complain(ids: Sequence[Hashable], what: str) -> None:
    if ids:
        raise ValueError(f"{len(ids)} ids {what}, such as {', '.join(map(str, ids[:3]))}; they must match exactly")


def image_name(url: str) -> str:
    """The file name at the end of a URL."""
    return Path(unquote(urlsplit(url).path)).name


def withdrawn_images(samples: Samples, images: Iterable[str]) -> set[str]:
    """Those of these images that are in no sample, because their URL was withdrawn."""
    found = {image_name(url) for url in samples.withdrawn}.intersection(images)
    return found - {image_name(url) for url in samples.urls} if found else found


def find_samples(samples: Samples, images: Sequence[str], source: str) -> np.ndarray:
    """int64: the number of the sample of each image, found by the file name at the end of its URL. ValueError where no
    sample has it, or more than one."""
    wanted, numbers = set(images), defaultdict(list)
    for i, url in enumerate(samples.urls):
        numbers[image_name(url)].append(i)
    missing = sorted(wanted - numbers.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(set(images))} images of {source} are in no region shard, such as {missing[0]}; "
            "collect and detect them first"
        )
    repeated = sorted(image for image in wanted if len(numbers[image]) > 1)
    if repeated:
        urls = ", ".join(samples.urls[i] for i in numbers[repeated[0]][:3])
        raise ValueError(
            f"{len(repeated)} of {len(wanted)} images of {source} are in several samples, such as {repeated[0]}, from "
            f"{urls}; name a dataset that holds each once: data.datasets, data.held_out"
        )
    return np.array([numbers[image][0] for image in images], np.int64)
