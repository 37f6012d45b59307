"""The data sets' own files and the official scorers' rules, one module each: vqa, vcr, refcoco, retrieval.

Nothing here needs an image, a model or torch: annotations can be read, and predictions scored, on any machine.
"""

import json
from collections.abc import Sequence
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
