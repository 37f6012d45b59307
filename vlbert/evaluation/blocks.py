"""What an unfinished evaluation has predicted: files below its folder, so that a kill loses a minute of it at most.

FOLDER/blocks-<id>/<first example>.mp    the predictions of some batches: msgpack, arrays as [dtype, shape, bytes]

The id is a hash of all that decides the predictions. Batches are the same in every world, so an evaluation may go on
with another number of processes. The files are deleted when metrics.json is there.
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

_SECONDS = 60.0  # between files of a process
_ARRAY = 1  # msgpack's type of our arrays


class Blocks:
    """The blocks of one evaluation below `folder`, whose predictions are those of `inputs`."""

    def __init__(self, store: ObjectStore, folder: str, inputs: Mapping[str, Any]):
        name = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
        self.store, self.prefix = store, f"{folder}blocks-{name}/"
        self._unwritten: dict[int, Predicted] = {}
        self._written = time.monotonic()

    def read(self) -> dict[int, Predicted]:
        """First example -> predictions of each batch that was written. ValueError where a file is damaged."""
        found = {}
        for one in self.store.list(self.prefix):
            try:
                batches = msgpack.unpackb(self.store.get(one.path), ext_hook=_to_array, strict_map_key=False)
                found |= {first: _from_plain(plain) for first, plain in batches.items()}
            except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
                raise ValueError(f"{self.store.uri(one.path)} is damaged ({error}); delete it") from error
        return found

    def add(self, first: int, predicted: Predicted) -> bool:
        """Keep the predictions of the batch that begins with this example: they are written with those that follow.
        Returns whether they were written."""
        self._unwritten[first] = predicted
        if time.monotonic() - self._written <= _SECONDS:
            return False
        batches = {number: _to_plain(one) for number, one in self._unwritten.items()}
        self.store.put(f"{self.prefix}{min(batches):09d}.mp", msgpack.packb(batches, default=_from_array))
        self._unwritten, self._written = {}, time.monotonic()
        return True


def delete_blocks(store: ObjectStore, folder: str) -> None:
    """Delete the blocks of all evaluations of the folder."""
    for one in list(store.list(f"{folder}blocks-")):
        store.delete(one.path)


def _to_plain(predicted: Predicted) -> list:
    unreadable = {number: [one.step, one.key, one.reason] for number, one in predicted.unreadable.items()}
    return [predicted.numbers, predicted.rows, predicted.shuffled, unreadable]


def _from_plain(plain: list) -> Predicted:
    numbers, rows, shuffled, unreadable = plain
    return Predicted(numbers, rows, shuffled, {number: Unreadable(*one) for number, one in unreadable.items()})


def _from_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a prediction holds {type(value).__name__}, which is no plain value")
    return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, value.shape, value.tobytes()]))


def _to_array(kind: int, data: bytes) -> np.ndarray:
    dtype, shape, raw = msgpack.unpackb(data)
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
