"""Images -> Regions: detectors that share one interface, and the program that runs one over a dataset's shards."""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from storage.sample import Regions, Sample


class Detector(Protocol):
    """Finds regions in images; detectors with equal ids find equal regions in an image."""

    id: str
    """12 hex digits: a hash of everything that changes the output (weights, settings, version of the code's rules)."""
    metadata: dict
    """What every shard's manifest records of it, as JSON: `backend`, `random_init`, settings, hashes of files."""

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        """Each sample's regions, or `status: detail` saying why there are none."""


def detector_id(hashed: dict) -> str:
    """12 hex digits of the hash of everything that changes a detector's output; JSON types only."""
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
