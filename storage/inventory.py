"""Inventory of a root, from one listing of its objects, and the tables that `vlbert catalog status` prints."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime

from storage.catalog import MANIFEST_FILE, SHARD_NAME, STAGE_NAME, Catalog
from storage.manifests import Header
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.runs import STATE, read_state
from storage.snapshots import read_snapshot
from storage.tables import aligned

_STAGE = rf"([^/]+)/({STAGE_NAME.pattern})"
_MANIFEST = re.compile(rf"{_STAGE}/{MANIFEST_FILE.pattern}")
TAR = re.compile(rf"{_STAGE}/({SHARD_NAME.pattern})-[0-9a-f]{{12}}\.tar")
_SNAPSHOT = re.compile(rf"{_STAGE}/snapshots/([0-9a-f]{{16}})\.parquet")
_STATE = re.compile(r"runs/.+/step-\d+/state\.json")


class Inventory:
    """The manifests, snapshots, tars and checkpoints of a root.

    If `dataset` is given, only its files are listed (no checkpoints). Raises ValueError if it has no committed shard.
    """

    def __init__(self, store: ObjectStore, dataset: str | None = None):
        self.store = store
        # (dataset, stage) -> shard -> revision number -> manifest; manifest_names() sorts the revisions
        self.manifests: dict[tuple[str, str], dict[str, dict[int, ObjectInfo]]] = defaultdict(lambda: defaultdict(dict))
        self.snapshots: dict[tuple[str, str], dict[str, ObjectInfo]] = defaultdict(dict)
        self.tars: dict[str, ObjectInfo] = {}
        for info in store.list("" if dataset is None else f"{dataset}/"):
            if match := _MANIFEST.fullmatch(info.path):
                self.manifests[match[1], match[2]][match[3]][int(match[4] or 1)] = info
            elif match := _SNAPSHOT.fullmatch(info.path):
                self.snapshots[match[1], match[2]][match[3]] = info
            elif TAR.fullmatch(info.path):
                self.tars[info.path] = info
        self.states = _list_states(store) if dataset is None else []
        if dataset is not None and not self.manifests:
            raise ValueError(f"{store.uri(dataset)} has no committed shard; `vlbert catalog status` lists the datasets")

    def headers(self, dataset: str, stage: str) -> Iterator[Header]:
        """Return an iterator over the headers of a stage's shards, read from their newest manifests."""
        shards = self.manifests[dataset, stage]
        names = [manifest_names(shards[shard])[-1] for shard in sorted(shards)]
        return Catalog(self.store, dataset).manifests(stage, names)

    def pins(self) -> set[tuple[str, str, str]]:
        """Return (dataset, stage, snapshot id) of each snapshot that a checkpoint pins."""
        while True:
            try:
                return {pin for path in self.states for pin in self._pins_of(path)}
            except ObjectMissing:  # a training run has replaced a checkpoint since the listing
                self.states = _list_states(self.store)

    def _pins_of(self, path: str) -> Iterator[tuple[str, str, str]]:
        state: dict | None = read_state(self.store, path.removesuffix(f"/{STATE}"))
        try:
            while state:  # follow init_from, so that the data of earlier training runs is kept as well
                for used in (state.get("data"), state.get("held_out")):
                    # Detector training reads no shards: its `data` is a hash of the annotations.
                    for data in used if isinstance(used, list) else []:
                        for entry in data.get("snapshots", [data]):
                            yield data["dataset"], data["stage"], entry["snapshot"]
                state = state.get("init_from")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.store.uri(path)} is not a valid checkpoint state ({error!r}); remove the checkpoint's folder "
                "if it is not needed"
            ) from error


def _list_states(store: ObjectStore) -> list[str]:
    """Return the sorted paths of the state.json files of all checkpoints."""
    return sorted(info.path for info in store.list("runs/") if _STATE.fullmatch(info.path))


def manifest_names(revisions: dict[int, ObjectInfo]) -> list[str]:
    """Return the names of a shard's manifests (`Header.name`), oldest first."""
    return [revisions[number].path.rpartition("/")[2].removesuffix(".parquet") for number in sorted(revisions)]


def status(store: ObjectStore) -> list[str]:
    """Return two tables, as lines: the stages with their row counts by status, and the snapshots."""
    inventory = Inventory(store)
    stages, snapshots, pinned = [], [], inventory.pins()
    for dataset, stage in sorted(inventory.manifests):
        size, statuses, shards = 0, Counter(), inventory.manifests[dataset, stage]
        for header in inventory.headers(dataset, stage):
            size += header.tar_bytes
            statuses.update(header.statuses)
        by_status = ", ".join(f"{name} {count:,}" for name, count in sorted(statuses.items()))
        stages.append((dataset, stage, f"{len(shards):,}", f"{statuses.total():,}", megabytes(size), by_status))
    for (dataset, stage), infos in sorted(inventory.snapshots.items()):
        for info in sorted(infos.values(), key=lambda info: (info.modified, info.path)):
            snapshot, _ = read_snapshot(store, info.path)
            counts = f"{len(snapshot.shards):,}", f"{snapshot.ok_rows:,}"
            used = "yes" if (dataset, stage, snapshot.id) in pinned else "no"
            snapshots.append((dataset, stage, snapshot.id, *counts, megabytes(info.size), date_of(info.modified), used))
    lines = aligned(("dataset", "stage", "shards", "rows", "MB", "rows by status"), stages)
    names = "dataset", "stage", "snapshot", "shards", "samples", "MB", "last used (UTC)", "pinned"
    return [*lines, "", *aligned(names, snapshots)] if snapshots else lines


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f}"


def date_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
