"""The checkpoints of training runs: folders ROOT/runs/<run>/step-0000100, each whole once its state.json is there.

state.json is written last. It has the size and sha256 of every other file. Checkpoints are read through a `Folder`,
which checks each file against these. training/checkpoint.py writes them; docs/formats.md is the contract.
"""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.digests import BLANK, OWN_SHA256, UnsupportedVersion, check_version, has_valid_digest, write_digest
from storage.object_store import ObjectMissing, ObjectStore
from storage.safe_json import parse_json

CHECKPOINT_VERSION = 8  # of the files of a checkpoint, whatever is trained, and of a model's config.json
CONFIG, STATE = "config.json", "state.json"
_STEP = re.compile(r"(runs/.+)/step-(\d{7})")


def checkpoints(store: ObjectStore, run: str) -> list[str]:
    """The whole checkpoints of a run, oldest first."""
    pattern = re.compile(rf"runs/{re.escape(run)}/step-\d{{7}}/state\.json")
    found = [info.path for info in store.list(f"runs/{run}/") if pattern.fullmatch(info.path)]
    return sorted(path.removesuffix("/state.json") for path in found)


def folder_of(run: str, step: int) -> str:
    return f"runs/{run}/step-{step:07d}"


def file_hash(parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """`bytes` and `sha256` of a file, as state.json has them."""
    sha256, size = hashlib.sha256(), 0
    for part in parts:
        sha256.update(part)
        size += len(part)
    return {"bytes": size, "sha256": sha256.hexdigest()}


@dataclass(frozen=True, eq=False)
class Folder:
    """The files of a checkpoint, or of a model in any folder; each is checked against its hash when it is read.

    path    under the root of `store`; "" is the root itself
    state   the content of state.json; empty in a folder without one
    hashes  file name -> `bytes` and `sha256`, of files whose hash is known
    """

    store: ObjectStore
    path: str
    state: Mapping[str, Any] = field(default_factory=dict)
    hashes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        return self.store.uri(self.path).rstrip("/")

    def uri_of(self, name: str) -> str:
        """The full name of a file, for messages."""
        return self.store.uri(self._path_of(name))

    def has(self, name: str) -> bool:
        return name in self.hashes or (not self.state and self.store.exists(self._path_of(name)))

    def get(self, name: str) -> bytes:
        """The bytes of a file; ValueError names a file that is missing or damaged, and what to do."""
        try:
            data = self.store.get(self._path_of(name))
        except ObjectMissing as error:
            raise ValueError(f"{self.uri_of(name)} is gone; {hint(self.store, self.path)}") from error
        wanted = self.hashes.get(name)
        if wanted is not None and (found := file_hash([data])) != wanted:
            raise ValueError(
                f"{self.uri_of(name)} is damaged: its sha256 is {found['sha256'][:12]}..., not "
                f"{wanted['sha256'][:12]}...; {hint(self.store, self.path)}"
            )
        return data

    def json(self, name: str) -> dict[str, Any]:
        """A file that holds a JSON object; errors as of `get`."""
        return parse_json(self.get(name), self.uri_of(name), fix="copy it again")

    def _path_of(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


def open_folder(store: ObjectStore, path: str) -> Folder:
    """A checkpoint and its state; ValueError if state.json is missing, damaged or of another version."""
    try:
        state = read_state(store, path)
    except ObjectMissing as error:
        raise ValueError(
            f"{store.uri(path)} is not a complete checkpoint: it has no {STATE}; name a step-* folder of a run"
        ) from error
    return Folder(store, path, state, state["files"])


def read_state(store: ObjectStore, path: str) -> dict[str, Any]:
    """The content of state.json; ObjectMissing if there is none, OtherVersion if another version wrote it, any other
    ValueError if it is damaged or of another checkpoint."""
    name, step = f"{path}/{STATE}" if path else STATE, _STEP.fullmatch(path)
    try:
        state = read_checked_json(store.get(name), store.uri(name))
        if not {"version", "files"} <= state.keys() or (step and state.get("step") != int(step[2])):
            raise ValueError(f"{store.uri(name)} is of another checkpoint or program")
        check_version(state["version"], CHECKPOINT_VERSION, store.uri(name))
    except UnsupportedVersion:
        raise
    except ValueError as error:
        raise ValueError(f"{error}; {hint(store, path)}") from error
    return state


def hint(store: ObjectStore, path: str) -> str:
    """What to do about a damaged file of this folder."""
    where = store.uri(path)
    if _STEP.fullmatch(path):
        return (
            f"put it back from a copy, or remove {where}: the run then resumes from the checkpoint before it, or from "
            "the beginning"
        )
    return f"copy {where} again; if the change was intended, remove its {STATE}, or `files` from its {CONFIG}"


# --- JSON with its own digest -----------------------------------------------------------------------------------------


def as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def json_with_digest(value: Mapping[str, Any]) -> bytes:
    """as_json with a digest of the whole text: storage/digests.py."""
    data = bytearray(as_json({**value, OWN_SHA256: BLANK}))
    write_digest(data)
    return bytes(data)


def read_checked_json(data: bytes, where: str) -> dict[str, Any]:
    """What sealed_json wrote, without its digest; ValueError if the bytes are not those that were written."""
    if not has_valid_digest(data):
        raise ValueError(f"{where} is damaged: its {len(data)} bytes are not those that were written")
    value = parse_json(data, where)
    del value[OWN_SHA256]
    return value


# --- the best one -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The checkpoint of a run with the highest value of its metric; `checkpoint`: its folder, relative to the root."""

    step: int
    metric: str
    value: float
    checkpoint: str


def best_checkpoint(store: ObjectStore, run: str) -> Best | None:
    """The best of a run's whole checkpoints by their validations, of equals the oldest; None if none was validated.

    ValueError names a damaged state.json.
    """
    measured = []
    for folder in checkpoints(store, run):
        with contextlib.suppress(ObjectMissing):  # a training has removed it since the listing
            state = read_state(store, folder)
            value = state["validation"].get(state.get("metric"))
            if value is not None and math.isfinite(value):
                measured.append(Best(state["step"], state["metric"], value, folder))
    return max(measured, key=lambda one: one.value, default=None)
