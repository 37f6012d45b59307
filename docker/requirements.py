"""Print the packages of an image, one a line: both have the extra `pipeline`, and `server` goes without PyTorch."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

TRAINER = {"tensorboard", "torch", "torchvision", "transformers"}  # and what they need: 5 GB

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]


def packages(extra: str) -> Iterator[str]:
    """Those of an extra, which may name others: vlbert[attention]."""
    for package in project["optional-dependencies"][extra]:
        other = re.fullmatch(rf"{project['name']}\[(.+)\]", package)
        yield from packages(other[1]) if other else [package]


for package in [*project["dependencies"], *packages("pipeline")]:
    if sys.argv[1] == "trainer" or re.match(r"[\w-]+", package)[0] not in TRAINER:
        print(package)
