"""Print the packages of an image, one a line: `server` has those of pyproject.toml without PyTorch, `trainer` all."""

import re
import sys
import tomllib
from pathlib import Path

TRAINER = {"tensorboard", "torch", "torchvision", "transformers"}  # and what they need: 5 GB

packages = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
for package in packages:
    if sys.argv[1] == "trainer" or re.match(r"[\w-]+", package)[0] not in TRAINER:
        print(package)
