"""One listing of a root: its shards, snapshots, tars and checkpoints, and the tables of `vlbert catalog status`."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime

from storage.catalog import MANIFEST_FILE, SHARD_NAME, STAGE_NAME, Catalog
from storage.claims import CLAIM, Claims
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.runs import STATE, checkpoints, read_state
from storage.snapshots import read_snapshot
from storage.tables import aligned

_STAGE = rf"([^/]+)/({STAGE_NAME.pattern})"
MANIFEST = re.compile(rf"{_STAGE}/{MANIFEST_FILE.pattern}")
TAR = re.compile(rf"{_STAGE}/({SHARD_NAME.pattern})-[0-9a-f]{{12}}\.tar")
_SNAPSHOT = re.compile(rf"{_STAGE}/snapshots/([0-9a-f]{{16}})\.parquet")
_STATE = re.compile(r"runs/(.+)/step-(\d+)/state\.json")
_BEST = re.compile(r"runs/(.+)/best\.json")


@dataclass(frozen=True)
class Pin:
    """A snapshot that a checkpoint names; `use`: what for, such as `epoch 3 on`."""

    run: str
    step: int
    dataset: str
    stage: str
    snapshot: str
    use: str


class Inventory:
    """One listing of a root, by kind of object."""

    def __init__(self, store: ObjectStore, dataset: str | None = None):
        self.store, self.dataset = store, dataset
        self.manifests: dict[tuple[str, str], dict[str, ObjectInfo]] = defaultdict(dict)  # the newest of each shard
        self.replaced: list[tuple[str, str, str]] = []  # dataset, stage and shard of those with earlier revisions
        revisions: dict[tuple[str, str, str], dict[int, ObjectInfo]] = defaultdict(dict)
        self.snapshots: dict[tuple[str, str], dict[str, ObjectInfo]] = defaultdict(dict)
        self.tars: dict[str, ObjectInfo] = {}
        self.claims: dict[str, list[ObjectInfo]] = defaultdict(list)  # by path of the stage
        self.states: dict[str, dict[int, str]] = defaultdict(dict)  # run -> step -> path
        self.bests: dict[str, str] = {}  # run -> path
        for info in store.list():
            if found := _STATE.fullmatch(info.path):
                self.states[found[1]][int(found[2])] = info.path
            elif found := _BEST.fullmatch(info.path):
                self.bests[found[1]] = info.path
            elif dataset is not None and not info.path.startswith(f"{dataset}/"):
                continue
            elif found := MANIFEST.fullmatch(info.path):
                revisions[found[1], found[2], found[3]][int(found[4] or 1)] = info
            elif found := _SNAPSHOT.fullmatch(info.path):
                self.snapshots[found[1], found[2]][found[3]] = info
            elif TAR.fullmatch(info.path):
                self.tars[info.path] = info
            elif found := CLAIM.fullmatch(info.path):
                self.claims[found[1]].append(info)
        for (name, stage, shard), infos in revisions.items():
            self.manifests[name, stage][shard] = infos[max(infos)]
            if len(infos) > 1:
                self.replaced.append((name, stage, shard))
        if dataset is not None and not self.manifests:
            raise ValueError(f"{store.where(dataset)} holds no committed shard; `status` lists the datasets")

    def newest(self, dataset: str, stage: str) -> str | None:
        """The snapshot of a stage that was written last."""
        found = self.snapshots.get((dataset, stage), {})
        return max(found, key=lambda name: (found[name].modified, name), default=None)

    def pins(self, newest_only: bool = False) -> list[Pin]:
        """What the checkpoints of all runs pin: of every checkpoint, or of the newest of each run."""
        return [pin for run in sorted(self.states) for pin in self._pins_of_run(run, newest_only)]

    def _pins_of_run(self, run: str, newest_only: bool) -> list[Pin]:
        steps = self.states[run]
        try:
            wanted = sorted(steps)[-1:] if newest_only else sorted(steps)
            return [pin for step in wanted for pin in self._pins_of(run, step, steps[step])]
        except ObjectMissing:
            # A running training has removed it since the listing, after it wrote a newer one.
            self.states[run] = {int(path[-7:]): f"{path}/{STATE}" for path in checkpoints(self.store, run)}
            return self._pins_of_run(run, newest_only)

    def _pins_of(self, run: str, step: int, path: str) -> list[Pin]:
        state, pins = read_state(self.store, path.removesuffix(f"/{STATE}")), []

        def add(datasets: object, use: str) -> None:
            # A detector's training reads no shards: its `data` is the hash of its annotations.
            for data in [] if isinstance(datasets, str) else datasets or []:
                for entry in data.get("snapshots", [data]):
                    names = data["dataset"], data["stage"], entry["snapshot"]
                    pins.append(Pin(run, step, *names, use or f"epoch {entry['epoch']} on"))

        try:
            add(state.get("data"), "")
            add(state.get("held_out"), "validation")
            before = state.get("init_from")
            while before:  # so that the way back to what it started from stays
                add(before.get("data"), f"whence, by {before.get('run')}")
                before = before.get("init_from")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.store.where(path)} is not a state that this code can read ({error!r}); remove the "
                "checkpoint's folder if it is not needed"
            ) from error
        return pins


def status(store: ObjectStore) -> list[str]:
    """Stages, who is at work on them, snapshots and what the newest checkpoint of each training run pins, as tables."""
    inventory, now = Inventory(store), store.now()
    stages, snapshots = [], []
    working = [
        (*stage.split("/", 1), shard, worker)
        for stage in sorted(inventory.claims)
        for shard, worker in sorted(Claims(store, stage).workers(now).items())
    ]
    for (dataset, stage), found in sorted(inventory.manifests.items()):
        size, statuses = sum(info.size for info in found.values()), Counter()
        for _, header in Catalog(store, dataset).each_header(stage, sorted(found)):
            size += header.tar_bytes
            statuses.update(header.statuses)
        by_status = ", ".join(f"{name} {count:,}" for name, count in sorted(statuses.items()))
        stages.append((dataset, stage, f"{len(found):,}", f"{statuses.total():,}", megabytes(size), by_status))
    for (dataset, stage), found in sorted(inventory.snapshots.items()):
        for info in sorted(found.values(), key=lambda info: (info.modified, info.path)):
            snapshot, _ = read_snapshot(store, info.path)
            counts = f"{len(snapshot.shards):,}", f"{snapshot.ok_rows:,}"
            snapshots.append((dataset, stage, snapshot.id, *counts, megabytes(info.size), date_of(info.modified)))
    pins = [
        (pin.run, f"{pin.step:,}", pin.dataset, pin.stage, pin.snapshot, pin.use)
        for pin in inventory.pins(newest_only=True)
    ]
    lines = aligned(("dataset", "stage", "shards", "rows", "MB", "rows by status"), stages)
    for names, rows in (
        (("dataset", "stage", "shard", "worker"), working),
        (("dataset", "stage", "snapshot", "shards", "samples", "MB", "written (UTC)"), snapshots),
        (("run", "step", "dataset", "stage", "snapshot", "for"), pins),
    ):
        if rows:
            lines += ["", *aligned(names, rows)]
    return lines


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def date_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
