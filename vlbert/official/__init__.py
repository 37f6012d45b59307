"""The data sets' own files and the official scorers' rules, one module each: vqa, vcr, refcoco, retrieval.

Nothing here needs an image, a model or torch: annotations can be read, and predictions scored, on any machine.
"""

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

if TYPE_CHECKING:
    from vlbert.data import Samples


def read_json(file: Path, settings: str) -> Any:
    """What a JSON file holds; ValueError names it, and the `settings` that it was found by, where it cannot be read."""
    if not file.is_file():
        raise ValueError(f"there is no {file}; fetch it, or set {settings}")
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON, or is torn: {error}; fetch it again") from error


def check_ids(found: Iterable[Hashable], expected: Iterable[Hashable], found_in: str, expected_in: str) -> None:
    """ValueError names the first ids that stand twice in either, or in one alone, and how many those are."""
    counts = {name: Counter(ids) for name, ids in ((found_in, found), (expected_in, expected))}
    for name, ids in counts.items():
        _complain([one for one, count in ids.items() if count > 1], f"of {name} stand there more than once")
    _complain(
        [one for one in counts[expected_in] if one not in counts[found_in]], f"of {expected_in} miss in {found_in}"
    )
    _complain(
        [one for one in counts[found_in] if one not in counts[expected_in]], f"of {found_in} are not in {expected_in}"
    )


def _complain(ids: Sequence[Hashable], what: str) -> None:
    if ids:
        raise ValueError(f"{len(ids)} ids {what}, such as {', '.join(map(str, ids[:3]))}; they must match exactly")


def find_samples(samples: "Samples", images: Sequence[str], whose: str) -> np.ndarray:
    """int64: the number of the sample of each image, by the file name at the end of its URL."""
    number = {Path(unquote(urlsplit(url).path)).name: i for i, url in enumerate(samples.urls)}
    missing = sorted(set(images) - number.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(set(images))} images of {whose} are in no region shard, such as {missing[0]}; "
            "collect and detect them first"
        )
    return np.array([number[image] for image in images], np.int64)
