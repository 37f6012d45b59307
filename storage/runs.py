"""Checkpoints of training runs: folders such as ROOT/runs/<run>/step-0000100, complete once they have a state.json.

state.json is written last, and records the size and sha256 of every other file. Checkpoints are read through a
`Folder`, which checks each file against these values. training/checkpoint.py writes checkpoints, and docs/formats.md
specifies them.
"""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.digests import BLANK, OWN_SHA256, check_version, has_valid_digest, write_digest
from storage.object_store import ObjectMissing, ObjectStore
from storage.safe_json import parse_json, short_repr

CHECKPOINT_VERSION = 8  # version of the files of all checkpoints and of a model's config.json
CONFIG, STATE = "config.json", "state.json"
_STEP = re.compile(r"(runs/.+)/step-(\d{7})")


def checkpoints(store: ObjectStore, run: str) -> list[str]:
    """Return the folders of a run's complete checkpoints, oldest first."""
    pattern = re.compile(rf"runs/{re.escape(run)}/step-\d{{7}}/state\.json")
    states = [info.path for info in store.list(f"runs/{run}/") if pattern.fullmatch(info.path)]
    return sorted(path.removesuffix("/state.json") for path in states)


def folder_of(run: str, step: int) -> str:
    return f"runs/{run}/step-{step:07d}"


def file_hash(parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Return the size (`bytes`) and `sha256` of a file, as recorded in state.json. `parts` is its content."""
    sha256, size = hashlib.sha256(), 0
    for part in parts:
        sha256.update(part)
        size += len(part)
    return {"bytes": size, "sha256": sha256.hexdigest()}


@dataclass(frozen=True, eq=False)
class Folder:
    """The folder of a checkpoint or a model. Files with a known hash are checked when they are read."""

    store: ObjectStore
    path: str  # relative to the root of `store`; "" is the root itself
    state: Mapping[str, Any] = field(default_factory=dict)  # content of state.json; empty if there is none
    hashes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # file name -> `bytes` and `sha256`, if known

    @property
    def uri(self) -> str:
        return self.store.uri(self.path).rstrip("/")

    def uri_of(self, name: str) -> str:
        """Return the path or URI of a file in the folder, for messages."""
        return self.store.uri(self._path_of(name))

    def has(self, name: str) -> bool:
        return name in self.hashes or (not self.state and self.store.exists(self._path_of(name)))

    def get(self, name: str) -> bytes:
        """Return the bytes of a file. Raises ValueError if the file is missing or damaged."""
        try:
            data = self.store.get(self._path_of(name))
        except ObjectMissing as error:
            raise ValueError(f"{self.uri_of(name)} is missing; {hint(self.store, self.path)}") from error
        expected = self.hashes.get(name)
        if expected is not None and (actual := file_hash([data])) != expected:
            raise ValueError(
                f"{self.uri_of(name)} is damaged: its sha256 is {actual['sha256'][:12]}..., recorded is "
                f"{short_repr(expected)}; {hint(self.store, self.path)}"
            )
        return data

    def json(self, name: str) -> dict[str, Any]:
        """Return the content of a file that holds a JSON object. Raises the same errors as `get`."""
        return parse_json(self.get(name), self.uri_of(name), fix="copy it again")

    def _path_of(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


def open_folder(store: ObjectStore, path: str) -> Folder:
    """Open a checkpoint. Raises ValueError if its state.json is missing, damaged or has another version."""
    try:
        state = read_state(store, path)
    except ObjectMissing as error:
        raise ValueError(
            f"{store.uri(path)} is not a complete checkpoint: it has no {STATE}; name a step-* folder of a run"
        ) from error
    return Folder(store, path, state, state["files"])


def read_state(store: ObjectStore, path: str) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json.

    Raises ObjectMissing if there is none, and ValueError if it is damaged, belongs to another checkpoint or was written
    by another version of this code.
    """
    name, step = f"{path}/{STATE}" if path else STATE, _STEP.fullmatch(path)
    try:
        state = read_checked_json(store.get(name), store.uri(name))
        if not {"version", "files"} <= state.keys() or (step and state.get("step") != int(step[2])):
            raise ValueError(f"{store.uri(name)} is from another checkpoint or program")
    except ValueError as error:
        raise ValueError(f"{error}; {hint(store, path)}") from error
    check_version(state["version"], CHECKPOINT_VERSION, store.uri(name))
    return state


def hint(store: ObjectStore, path: str) -> str:
    """Return advice for error messages about a damaged file in the folder `path`."""
    uri = store.uri(path)
    if _STEP.fullmatch(path):
        return (
            f"put it back from a copy, or remove {uri}: the run then resumes from the checkpoint before it, or from "
            "the beginning"
        )
    return f"copy {uri} again; if the change was intended, remove its {STATE}, or `files` from its {CONFIG}"


# --- JSON with its own digest -----------------------------------------------------------------------------------------


def as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def json_with_digest(value: Mapping[str, Any]) -> bytes:
    """Encode a value as JSON that contains its own digest (storage/digests.py)."""
    data = bytearray(as_json({**value, OWN_SHA256: BLANK}))
    write_digest(data)
    return bytes(data)


def read_checked_json(data: bytes, location: str) -> dict[str, Any]:
    """Decode JSON written by `json_with_digest`. Raises ValueError if it has been changed since."""
    if not has_valid_digest(data):
        raise ValueError(f"{location} is damaged: its {len(data)} bytes differ from those that were written")
    value = parse_json(data, location)
    del value[OWN_SHA256]
    return value


# --- best checkpoint --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The checkpoint of a run with the highest value of the run's validation metric."""

    step: int
    metric: str
    value: float
    checkpoint: str  # its folder, relative to the root


def best_checkpoint(store: ObjectStore, run: str) -> Best | None:
    """Return the complete checkpoint with the highest validation metric, or None if no checkpoint was validated.

    If several have the same value, return the oldest. Raises ValueError if a state.json is damaged.
    """
    candidates = []
    for folder in checkpoints(store, run):
        with contextlib.suppress(ObjectMissing):  # training has removed it since the listing
            state = read_state(store, folder)
            value = state["validation"].get(state.get("metric"))
            if value is not None and math.isfinite(value):
                candidates.append(Best(state["step"], state["metric"], value, folder))
    return max(candidates, key=lambda best: best.value, default=None)
