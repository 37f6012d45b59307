"""Save the predictions of an unfinished evaluation in blocks, so that a crash loses at most a minute of work.

FOLDER/blocks-<id>/<first example>.mp    the predictions of some batches: msgpack, arrays as lists

The id is a hash of everything that affects the predictions. Batches do not depend on the world size, so an evaluation
can resume with a different number of processes. The files are deleted after metrics.json is written.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from storage.object_store import ObjectStore
from training.log import Unreadable
from vlbert.validate import Predicted

_SECONDS = 60.0  # minimum time between two files of a process


class Blocks:
    """The saved predictions of one evaluation, in files under `folder`. `inputs` identifies the evaluation."""

    def __init__(self, store: ObjectStore, folder: str, inputs: Mapping[str, Any]):
        name = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
        self.store, self.prefix = store, f"{folder}blocks-{name}/"
        self._unwritten: dict[int, Predicted] = {}
        self._written = time.monotonic()

    def read(self) -> dict[int, Predicted]:
        """Return the saved predictions of each batch, by the index of the batch's first example.

        Raises ValueError if a file is damaged.
        """
        saved = {}
        for info in self.store.list(self.prefix):
            try:
                batches = msgpack.unpackb(self.store.get(info.path), strict_map_key=False)
                saved |= {first: _from_plain(plain) for first, plain in batches.items()}
            except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
                raise ValueError(f"{self.store.uri(info.path)} is damaged ({error}); delete it") from error
        return saved

    def add(self, first: int, predicted: Predicted) -> bool:
        """Queue a batch's predictions. Once a minute, save the queue. Return True if it was saved.

        `first` is the index of the batch's first example.
        """
        self._unwritten[first] = predicted
        if time.monotonic() - self._written <= _SECONDS:
            return False
        batches = msgpack.packb(self._unwritten, default=_to_plain)
        self.store.put(f"{self.prefix}{min(self._unwritten):09d}.mp", batches)
        self._unwritten, self._written = {}, time.monotonic()
        return True


def delete_blocks(store: ObjectStore, folder: str) -> None:
    """Delete the saved predictions of all evaluations in the folder."""
    for info in list(store.list(f"{folder}blocks-")):
        store.delete(info.path)


def _from_plain(plain: list) -> Predicted:
    numbers, rows, shuffled, unreadable = plain
    return Predicted(numbers, rows, shuffled, {number: Unreadable(*entry) for number, entry in unreadable.items()})


def _to_plain(value: Any) -> Any:
    if isinstance(value, Predicted | Unreadable):
        return list(vars(value).values())  # in the order of the fields
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a prediction contains a {type(value).__name__}; it must be a plain value or an array")
