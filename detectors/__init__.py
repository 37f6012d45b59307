"""The interface of detectors, its implementations, and `vlbert detect`, which runs a detector over a dataset."""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from storage.sample import Regions, Sample


class Detector(Protocol):
    """The interface of a detector, which finds regions in images. Detectors with the same id find the same regions."""

    id: str
    """12 hex digits: a hash of everything that changes the output (weights, settings, the code's rules version)."""
    metadata: dict
    """JSON values for the manifest of every shard: `backend`, `random_init`, settings, file hashes."""

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        """Return the regions of each sample or, if it has none, the reason as `status: detail`."""


def detector_id(hashed: dict) -> str:
    """Return a detector's id: 12 hex digits of the hash of `hashed`, the JSON values that determine its output."""
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
