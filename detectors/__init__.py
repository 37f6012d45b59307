"""Detectors, which turn images into Regions behind one interface, and the program that runs one over a dataset."""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from storage.sample import Regions, Sample


class Detector(Protocol):
    """A detector of regions in images. Detectors with the same id find the same regions."""

    id: str
    """12 hex digits: a hash of everything that changes the output (weights, settings, version of the code's rules)."""
    metadata: dict
    """JSON values for the manifest of every shard: `backend`, `random_init`, settings, hashes of files."""

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        """Return the regions of each sample, or `status: detail` if it has none."""


def detector_id(hashed: dict) -> str:
    """Return a detector's id: 12 hex digits of the sha256 of everything that changes its output (JSON types only)."""
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
