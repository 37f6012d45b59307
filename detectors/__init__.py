"""Images -> Regions: detectors that share one interface, and the program that runs one over a dataset's shards."""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from storage.sample import Regions, Sample


class Detector(Protocol):
    """Finds regions in images; two detectors with the same id find the same regions in the same image."""

    id: str
    """12 hex digits: a hash of everything that decides the output (weights, settings, version of the rules)."""
    metadata: dict
    """JSON-able description, written to every shard's manifest: `backend`, `random_init`, settings, files' hashes."""

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        """Per sample its regions, or `status: detail` saying why there are none."""


def detector_id(decisive: dict) -> str:
    """12 hex digits of the hash of a JSON-able description of everything that decides a detector's output."""
    canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
