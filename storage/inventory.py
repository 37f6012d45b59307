"""One listing of a root: its shards, snapshots, tars and checkpoints, and the tables of `storage.catalog status`."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from storage.catalog import MANIFEST_FILE, SHARD_NAME, STAGE_NAME, Catalog
from storage.claims import CLAIM, Claims
from storage.collect.spool import PARTIAL
from storage.manifests import Header
from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore
from storage.runs import STATE, read_state
from storage.snapshots import Snapshot, read_snapshot

_STAGE = rf"([^/]+)/({STAGE_NAME.pattern})"
MANIFEST = re.compile(rf"{_STAGE}/{MANIFEST_FILE.pattern}")
TAR = re.compile(rf"{_STAGE}/({SHARD_NAME.pattern})-[0-9a-f]{{12}}\.tar")
_MOVED = re.compile(rf"{_STAGE}/moved/({SHARD_NAME.pattern}-[0-9a-f]{{12}})\.json")
_SNAPSHOT = re.compile(rf"{_STAGE}/snapshots/([0-9a-f]{{16}})\.parquet")
_STATE = re.compile(r"runs/(.+)/step-(\d+)/state\.json")
_BEST = re.compile(r"runs/(.+)/best\.json")
_PAUSE = 3600.0  # seconds without a commit that end an entry of the history
_METRICS = re.compile(r"runs/(.+)/metrics\.jsonl")


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
        self.moved: set[str] = set()  # tars that were written again without samples that were forgotten
        self.partials: list[ObjectInfo] = []
        self.claims: dict[str, list[ObjectInfo]] = defaultdict(list)  # by path of the stage
        self.states: dict[str, dict[int, str]] = defaultdict(dict)  # run -> step -> path
        self.bests: dict[str, str] = {}  # run -> path
        self.metrics: dict[str, str] = {}
        for info in store.list():
            if found := _STATE.fullmatch(info.path):
                self.states[found[1]][int(found[2])] = info.path
            elif found := _BEST.fullmatch(info.path):
                self.bests[found[1]] = info.path
            elif found := _METRICS.fullmatch(info.path):
                self.metrics[found[1]] = info.path
            elif dataset is not None and not info.path.startswith(f"{dataset}/"):
                continue
            elif found := MANIFEST.fullmatch(info.path):
                revisions[found[1], found[2], found[3]][int(found[4] or 1)] = info
            elif found := _SNAPSHOT.fullmatch(info.path):
                self.snapshots[found[1], found[2]][found[3]] = info
            elif TAR.fullmatch(info.path):
                self.tars[info.path] = info
            elif found := _MOVED.fullmatch(info.path):
                self.moved.add(f"{found[1]}/{found[2]}/{found[3]}.tar")
            elif PARTIAL.fullmatch(info.path):
                self.partials.append(info)
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
        pins = []
        for run in sorted(self.states):
            pins += self._pins_of_run(run, newest_only)
        return pins

    def _pins_of_run(self, run: str, newest_only: bool) -> list[Pin]:
        steps = self.states[run]
        try:
            wanted = sorted(steps)[-1:] if newest_only else sorted(steps)
            return [pin for step in wanted for pin in self._pins_of(run, step, steps[step])]
        except ObjectMissing:
            # A running training has removed it since the listing, after it wrote a newer one.
            paths = (info.path for info in self.store.list(f"runs/{run}/"))
            found = (match for path in paths if (match := _STATE.fullmatch(path)) and match[1] == run)
            self.states[run] = {int(match[2]): match[0] for match in found}
            return self._pins_of_run(run, newest_only)

    def _pins_of(self, run: str, step: int, path: str) -> list[Pin]:
        state = read_state(self.store, path.removesuffix(f"/{STATE}"))
        try:
            pins = []
            # A detector's training reads no shards: its `data` is the hash of its annotations.
            datasets = [] if isinstance(state.get("data"), str) else state.get("data") or []
            for data in datasets:
                for entry in data["snapshots"]:
                    names = data["dataset"], data["stage"], entry["snapshot"]
                    pins.append(Pin(run, step, *names, f"epoch {entry['epoch']} on"))
            for held in state.get("held_out") or []:
                pins.append(Pin(run, step, held["dataset"], held["stage"], held["snapshot"], "validation"))
            before = state.get("init_from")
            while before:  # so that the way back to what it started from stays
                for data in before.get("data", []):
                    for entry in data["snapshots"]:
                        names = data["dataset"], data["stage"], entry["snapshot"]
                        pins.append(Pin(run, step, *names, f"whence, by {before['run']}"))
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
        (*stage.split("/", 1), claim.shard, claim.worker, date_of(claim.since), f"{(now - claim.since) / 60:.0f}")
        for stage in sorted(inventory.claims)
        for _, claim in sorted(Claims(store, stage).found().items())
        if claim.is_live(now)
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
            snapshots.append(
                (dataset, stage, snapshot.id, *_counts(snapshot), megabytes(info.size), date_of(info.modified))
            )
    pins = [
        (pin.run, f"{pin.step:,}", pin.dataset, pin.stage, pin.snapshot, pin.use)
        for pin in inventory.pins(newest_only=True)
    ]
    lines = aligned(("dataset", "stage", "shards", "rows", "MB", "rows by status"), stages)
    for names, rows in (
        (("dataset", "stage", "shard", "worker", "at work since (UTC)", "minutes"), working),
        (("dataset", "stage", "snapshot", "shards", "samples", "MB", "written (UTC)"), snapshots),
        (("run", "step", "dataset", "stage", "snapshot", "for"), pins),
    ):
        if rows:
            lines += ["", *aligned(names, rows)]
    return lines


def history(store: ObjectStore, dataset: str | None = None) -> list[str]:
    """What was committed and which snapshots were written, oldest first; an hour without a commit ends an entry."""
    inventory = Inventory(store, dataset)
    entries = []
    for (name, stage), found in inventory.manifests.items():
        headers = Catalog(store, name).headers(stage, sorted(found))
        by_config = defaultdict(list)
        for shard, header in headers.items():
            by_config[header.meta.get("config_hash", "")].append((found[shard], header))
        for config, commits in by_config.items():
            for group in _without_pauses(sorted(commits, key=lambda commit: commit[0].modified)):
                entries.append(_committed(name, stage, config, group))
    for (name, stage), found in inventory.snapshots.items():
        for info in found.values():
            snapshot, _ = read_snapshot(store, info.path)
            what = name, stage, *_counts(snapshot), f"{snapshot.ok_rows:,}", f"snapshot {snapshot.id}"
            entries.append((info.modified, (_time(info), "", *what)))
    names = "from (UTC)", "to", "dataset", "stage", "shards", "rows", "ok", "by"
    return aligned(names, [row for _, row in sorted(entries)])


def _without_pauses(commits: list[tuple[ObjectInfo, Header]]) -> Iterator[list[tuple[ObjectInfo, Header]]]:
    group = []
    for commit in commits:
        if group and commit[0].modified - group[-1][0].modified > _PAUSE:
            yield group
            group = []
        group.append(commit)
    yield group


def _committed(dataset: str, stage: str, config: str, group: list[tuple[ObjectInfo, Header]]) -> tuple[float, tuple]:
    rows = sum(sum(header.statuses.values()) for _, header in group)
    ok = sum(header.ok_rows for _, header in group)
    by = f"{'detector' if stage != 'images' else 'config'} {config}" if config else ""
    first, last = group[0][0], group[-1][0]
    counts = f"{len(group):,}", f"{rows:,}", f"{ok:,}"
    return first.modified, (_time(first), _time(last), dataset, stage, *counts, by)


def _counts(snapshot: Snapshot) -> tuple[str, str]:
    return f"{len(snapshot.shards):,}", f"{snapshot.ok_rows:,}"


def aligned(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines: numbers aligned right, all else left; [] if there is no row."""
    if not rows:
        return []
    lines = []
    columns = list(zip(*rows, strict=True))
    right = [all(re.fullmatch(r"[\d,.]+", value) for value in column) for column in columns]
    widths = [max(map(len, (name, *column))) for name, column in zip(names, columns, strict=True)]
    for row in (names, *rows):
        cells = zip(row, widths, right, strict=True)
        lines.append("  ".join(f"{cell:>{width}}" if number else f"{cell:<{width}}" for cell, width, number in cells))
    return [line.rstrip() for line in lines]


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def date_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _time(info: ObjectInfo) -> str:
    return date_of(info.modified)
