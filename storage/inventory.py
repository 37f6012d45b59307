"""The commands of `python -m storage.catalog`: what a root holds, since when, whether it is whole, what may go.

status ROOT                                   stages, rows by status, snapshots, what each training run pinned
history ROOT [DATASET]                        what was committed when
verify ROOT [DATASET]                         every file held against its digest; exit status 1 on a fault
gc ROOT [--grace HOURS] [--delete]            what nothing names any more; deletes it only with --delete
"""

import argparse
import contextlib
import math
import mmap
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from storage.catalog import MANIFEST_FILE, SHARD_NAME, STAGE_NAME, Catalog, sha256_of, temporary_folder
from storage.digests import is_whole
from storage.manifests import OK, Header, Manifest
from storage.object_store import Leftover, ObjectInfo, ObjectMissing, ObjectStore, StorageUnreachable, open_store
from storage.runs import STATE, differing, file_hash, named_best, read_state, way_out
from storage.safe_json import parse_json
from storage.shards import index_shard
from storage.snapshots import SNAPSHOT_SCHEMA, Snapshot, read_columns, read_snapshot
from storage.spool import PARTIAL

_STAGE = rf"([^/]+)/({STAGE_NAME.pattern})"
_MANIFEST = re.compile(rf"{_STAGE}/{MANIFEST_FILE.pattern}")
_TAR = re.compile(rf"{_STAGE}/({SHARD_NAME.pattern})-[0-9a-f]{{12}}\.tar")
_SNAPSHOT = re.compile(rf"{_STAGE}/snapshots/([0-9a-f]{{16}})\.parquet")
_STATE = re.compile(r"runs/(.+)/step-(\d+)/state\.json")
_BEST = re.compile(r"runs/(.+)/best\.json")
_METRICS = re.compile(r"runs/(.+)/metrics\.jsonl")
_PAUSE = 3600.0  # seconds without a commit that end an entry of the history
_READERS = 4  # tars hashed at a time
_PIECE = 2**24  # bytes of a tar that are fetched at a time


@dataclass(frozen=True)
class Pin:
    """A snapshot that a checkpoint names: `use` says for what, such as `epoch 3 on`."""

    run: str
    step: int
    dataset: str
    stage: str
    snapshot: str
    use: str


@dataclass(frozen=True)
class Garbage:
    """Something that nothing names any more; modified in seconds since 1970, by the storage's clock.

    remove() looks once more; False: it stays, for it was written again or is named by now.
    """

    what: str
    where: str
    size: int
    modified: float
    remove: Callable[[], bool]


class Inventory:
    """One listing of a root, sorted out."""

    def __init__(self, store: ObjectStore, dataset: str | None = None):
        self.store, self.dataset = store, dataset
        self.manifests: dict[tuple[str, str], dict[str, ObjectInfo]] = defaultdict(dict)  # the newest of each shard
        self.replaced: list[tuple[str, str, str]] = []  # dataset, stage and shard of those with earlier revisions
        revisions: dict[tuple[str, str, str], dict[int, ObjectInfo]] = defaultdict(dict)
        self.snapshots: dict[tuple[str, str], dict[str, ObjectInfo]] = defaultdict(dict)
        self.tars: dict[str, ObjectInfo] = {}
        self.partials: list[ObjectInfo] = []
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
            elif found := _MANIFEST.fullmatch(info.path):
                revisions[found[1], found[2], found[3]][int(found[4] or 1)] = info
            elif found := _SNAPSHOT.fullmatch(info.path):
                self.snapshots[found[1], found[2]][found[3]] = info
            elif _TAR.fullmatch(info.path):
                self.tars[info.path] = info
            elif PARTIAL.fullmatch(info.path):
                self.partials.append(info)
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
            # A training at work has removed it since the listing, and before that has written a newer one.
            paths = (info.path for info in self.store.list(f"runs/{run}/"))
            found = (match for path in paths if (match := _STATE.fullmatch(path)) and match[1] == run)
            self.states[run] = {int(match[2]): match[0] for match in found}
            return self._pins_of_run(run, newest_only)

    def _pins_of(self, run: str, step: int, path: str) -> list[Pin]:
        state = read_state(self.store, path.removesuffix(f"/{STATE}"))
        try:
            pins = []
            # A detector's training reads no shards: there, `data` is the hash of its annotations.
            if isinstance(data := state.get("data"), dict):
                for entry in data["snapshots"]:
                    place = data["dataset"], data["stage"], entry["snapshot"]
                    pins.append(Pin(run, step, *place, f"epoch {entry['epoch']} on"))
            if (held := state.get("held_out")) is not None:
                pins.append(Pin(run, step, held["dataset"], held["stage"], held["snapshot"], "validation"))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.store.where(path)} is no checkpoint's state that this code can read ({error!r}); remove the "
                "checkpoint's folder if it is not needed"
            ) from error
        return pins


# --- status -----------------------------------------------------------------------------------------------------------


def status(store: ObjectStore) -> list[str]:
    """Stages, snapshots and what the newest checkpoint of each training run pins, as tables."""
    inventory = Inventory(store)
    stages, snapshots = [], []
    for (dataset, stage), found in sorted(inventory.manifests.items()):
        size, statuses = sum(info.size for info in found.values()), Counter()
        for header in Catalog(store, dataset).headers(stage, sorted(found)).values():
            size += header.tar_bytes
            statuses.update(header.statuses)
        by_status = ", ".join(f"{name} {count:,}" for name, count in sorted(statuses.items()))
        stages.append((dataset, stage, f"{len(found):,}", f"{statuses.total():,}", _megabytes(size), by_status))
    for (dataset, stage), found in sorted(inventory.snapshots.items()):
        for info in sorted(found.values(), key=lambda info: (info.modified, info.path)):
            snapshot, _ = read_snapshot(store, info.path)
            snapshots.append((dataset, stage, snapshot.id, *_counts(snapshot), _megabytes(info.size), _time(info)))
    pins = [
        (pin.run, f"{pin.step:,}", pin.dataset, pin.stage, pin.snapshot, pin.use)
        for pin in inventory.pins(newest_only=True)
    ]
    lines = _aligned(("dataset", "stage", "shards", "rows", "MB", "rows by status"), stages)
    for names, rows in (
        (("dataset", "stage", "snapshot", "shards", "samples", "MB", "written (UTC)"), snapshots),
        (("run", "step", "dataset", "stage", "snapshot", "for"), pins),
    ):
        if rows:
            lines += ["", *_aligned(names, rows)]
    return lines


def _counts(snapshot: Snapshot) -> tuple[str, str]:
    return f"{len(snapshot.shards):,}", f"{snapshot.ok_rows:,}"


# --- history ----------------------------------------------------------------------------------------------------------


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
    return _aligned(names, [row for _, row in sorted(entries)])


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


# --- verify -----------------------------------------------------------------------------------------------------------


def verify(inventory: Inventory) -> Iterator[str]:
    """Every fault: tars against manifests, byte by byte, places against tars, sources, snapshots; and, where the
    inventory is not that of one dataset, every file of every checkpoint. Reads all of it."""
    store = inventory.store
    if inventory.dataset is None:
        yield from _faults_of_runs(inventory)
    for (name, stage), found in sorted(inventory.manifests.items()):
        catalog = Catalog(store, name)

        def look(shard: str, catalog: Catalog = catalog, stage: str = stage) -> list[str]:
            faults = []
            try:
                catalog.revisions(stage, shard)  # an earlier one is held against its digest, too
                faults.extend(_faults_of_shard(inventory, catalog, catalog.manifest(stage, shard)))
            except (ValueError, ObjectMissing) as error:
                faults.append(str(error))
            return faults

        with ThreadPoolExecutor(_READERS) as pool:
            for faults in pool.map(look, sorted(found)):
                yield from faults
    for (name, stage), found in sorted(inventory.snapshots.items()):
        for info in found.values():
            try:
                yield from _faults_of_snapshot(Catalog(store, name), stage, info)
            except (ValueError, ObjectMissing, FileNotFoundError) as error:
                yield str(error)


def _faults_of_shard(inventory: Inventory, catalog: Catalog, manifest: Manifest) -> Iterator[str]:
    store, where = catalog.store, catalog.where(manifest.stage, manifest.name)
    table = manifest.table
    counted = dict(sorted(Counter(table["status"].to_pylist()).items()))
    if counted != manifest.statuses:
        yield f"{where} has rows {counted} and says {manifest.statuses}"
    ok = table.filter(pc.equal(table["status"], OK))
    source = manifest.meta.get("source", {})
    if "manifest_sha256" in source:
        with contextlib.suppress(ValueError):  # it is damaged, which is said where its own shard is looked at
            revisions = catalog.revisions(source["stage"], source["shard"])  # an earlier one: it is pending, no fault
            if source["manifest_sha256"] not in [one.sha256 for one in revisions]:
                yield (
                    f"{where} was made from another {catalog.where(source['stage'], source['shard'])} than stands there"
                )
    if manifest.tar is None:
        if len(ok):
            yield f"{where} names no tar for {len(ok)} rows that are ok"
        return
    # Not in the listing: of a shard that was made again since.
    tar = inventory.tars.get(manifest.tar) or next(store.list(manifest.tar), None)
    try:
        if tar is None:
            raise ObjectMissing(manifest.tar)
        with _as_file(store, tar) as file:
            sha256 = sha256_of(file)
            if (sha256, tar.size) != (manifest.tar_sha256, manifest.tar_bytes):
                yield (
                    f"{store.where(manifest.tar)} is damaged: {tar.size} bytes of sha256 {sha256[:12]}..., {where} "
                    f"says {manifest.tar_bytes} of {manifest.tar_sha256[:12]}..."
                )
                return
            spans = [(span.key, span.offset, span.length) for span in index_shard(file)]
    except (ObjectMissing, FileNotFoundError):
        yield f"{store.where(manifest.tar)} is gone, and {where} names it"
        return
    except StorageUnreachable:
        raise
    except OSError as error:
        yield f"{store.where(manifest.tar)} cannot be read ({error}), and {where} names it"
        return
    places = list(zip(*(ok[name].to_pylist() for name in ("key", "offset", "length")), strict=True))
    if places != spans:
        rows = ok["row"].to_pylist()
        wrong = [row for row, place, span in zip(rows, places, spans, strict=False) if place != span]
        yield (
            f"{where}: {len(places)} rows are ok, its tar has {len(spans)} samples; "
            f"{f'row {wrong[0]} is the first of {len(wrong)} that lie elsewhere' if wrong else 'the common ones agree'}"
        )


def _faults_of_runs(inventory: Inventory) -> Iterator[str]:
    store = inventory.store
    folders = [path.removesuffix(f"/{STATE}") for steps in inventory.states.values() for path in steps.values()]
    with ThreadPoolExecutor(_READERS) as pool:
        for faults in pool.map(lambda path: list(_faults_of_checkpoint(store, path)), sorted(folders)):
            yield from faults
    for run, path in sorted(inventory.bests.items()):
        try:
            best = named_best(store, run)
            if best and not store.exists(f"{best.checkpoint}/{STATE}"):
                yield (
                    f"{store.where(path)} names {store.where(best.checkpoint)}, which is no whole checkpoint; put "
                    f"that back, or delete {store.where(path)}"
                )
        except ValueError as error:
            yield str(error)


def _faults_of_checkpoint(store: ObjectStore, path: str) -> Iterator[str]:
    """What is wrong with the files of a checkpoint; nothing where a training has removed it since the listing."""
    try:
        state = read_state(store, path)
        found = {info.path.removeprefix(f"{path}/"): info for info in store.list(f"{path}/")}
        for name, wanted in sorted(state["files"].items()):
            if name not in found:
                fault = "is gone"
            elif found[name].size != wanted["bytes"]:
                fault = differing({"bytes": found[name].size}, wanted)
            elif (hashed := file_hash(_pieces(store, found[name]))) != wanted:
                fault = differing(hashed, wanted)
            else:
                continue
            if not store.exists(f"{path}/{STATE}"):
                return
            yield f"{store.where(f'{path}/{name}')} {fault}; {way_out(store, path)}"
    except ObjectMissing:
        return
    except ValueError as error:
        yield str(error)


def remarks(inventory: Inventory) -> Iterator[str]:
    """What is odd and no fault of anything that is kept: lines of a run's log that are torn."""
    store = inventory.store
    for _, path in sorted(inventory.metrics.items() if inventory.dataset is None else ()):
        for number, line in enumerate(store.get(path).splitlines(), 1):
            try:
                parse_json(line, f"{store.where(path)}, line {number},", nan=True, fix="its numbers are lost")
            except ValueError as error:
                yield str(error)


def _pieces(store: ObjectStore, info: ObjectInfo) -> Iterator[bytes]:
    """The bytes of an object, some at a time."""
    for offset in range(0, info.size, _PIECE):
        yield store.get_range(info.path, offset, min(_PIECE, info.size - offset))


@contextlib.contextmanager
def _as_file(store: ObjectStore, info: ObjectInfo) -> Iterator[Path]:
    """The object as a file of this machine: a copy, made piece by piece, where it lies in a bucket."""
    local = store.local_path(info.path)
    if local is not None:
        yield local
        return
    with temporary_folder("verify-") as folder:
        with (folder / "copy").open("xb") as copy:
            for piece in _pieces(store, info):
                copy.write(piece)
        yield folder / "copy"


def _faults_of_snapshot(catalog: Catalog, stage: str, info: ObjectInfo) -> Iterator[str]:
    path = info.path
    store, where = catalog.store, catalog.store.where(path)
    snapshot, shards = read_snapshot(store, path)
    with (
        _as_file(store, info) as file,
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        if not is_whole(data):
            yield f"{where} is damaged: its bytes are not those that were written; put it back, or remove it"
            return
    groups = read_columns(store, path, SNAPSHOT_SCHEMA.names)
    for shard, rows in zip(shards, _dealt(groups, [shard["rows"] for shard in shards]), strict=True):
        try:
            revisions = catalog.revisions(stage, shard["shard"])
            manifest = next((one for one in revisions if one.sha256 == shard["manifest_sha256"]), None)
            manifest = manifest and catalog.manifest_of(manifest)
        except ValueError:
            revisions, manifest = None, None  # named as a fault of its own
        if revisions == []:
            yield f"{catalog.where(stage, shard['shard'])} is gone, and {where} names it; put it back, or run the stage"
        if manifest is not None:
            ok = manifest.table.filter(pc.equal(manifest.table["status"], OK)).drop_columns(["status", "detail"])
            expected = ok.append_column("shard", pa.array([int(shard["shard"])] * len(ok), pa.int32()))
            if not all(rows[name].equals(expected[name]) for name in SNAPSHOT_SCHEMA.names):
                yield f"{where}: its rows of shard {shard['shard']} are not those of the manifest"
        # Where the shard was made again, what the snapshot names must still be there.
        if shard["tar"] is not None and (manifest is None or manifest.sha256 != revisions[-1].sha256):
            tar = f"{catalog.dataset}/{stage}/{shard['tar']}"
            try:
                found = next(store.list(tar), None)
                whole = found is not None and found.size == shard["tar_bytes"]
                if whole:
                    with _as_file(store, found) as file:
                        whole = tar.endswith(f"-{sha256_of(file)[:12]}.tar")
            except (ObjectMissing, FileNotFoundError):
                whole = False
            if not whole:
                yield f"{store.where(tar)} is gone or damaged, and {where} names it"


def _dealt(groups: Iterable[pa.Table], counts: Sequence[int]) -> Iterator[pa.Table]:
    """The rows of all groups again, so many at a time."""
    groups = iter(groups)
    waiting = next(groups, None)
    for count in counts:
        parts = [SNAPSHOT_SCHEMA.empty_table()]
        while count:
            parts.append(waiting.slice(0, count))
            count -= len(parts[-1])
            waiting = waiting.slice(len(parts[-1])) if len(parts[-1]) < len(waiting) else next(groups, None)
        yield pa.concat_tables(parts)


# --- gc ---------------------------------------------------------------------------------------------------------------


def find_garbage(store: ObjectStore, grace: float) -> list[Garbage]:
    """What may go: nothing names it, and it is older than `grace` seconds by the storage's clock.

    Tars that no manifest and no kept snapshot names, snapshots that no checkpoint pins and that are not the newest of
    their stage, images of shards that a collection left in progress, and what puts left that were broken off.
    """
    now = store.now()
    left = list(store.leftovers())
    inventory = Inventory(store)
    pinned = {(pin.dataset, pin.stage, pin.snapshot) for pin in inventory.pins()}
    found = [_broken_off(one) for one in left]
    named = set()
    for (dataset, stage), manifests in inventory.manifests.items():
        catalog = Catalog(store, dataset)
        for shard, header in catalog.headers(stage, sorted(manifests)).items():
            named.add(header.tar)
            if header.revision != int(_MANIFEST.fullmatch(manifests[shard].path)[4] or 1):  # another since the listing
                named |= {earlier.tar for earlier in catalog.revisions(stage, shard)}
    for dataset, stage, shard in inventory.replaced:
        # Who has read the revision before may be about to pin it.
        if now - inventory.manifests[dataset, stage][shard].modified <= grace:
            named |= {header.tar for header in Catalog(store, dataset).revisions(stage, shard)}
    for (dataset, stage), snapshots in inventory.snapshots.items():
        for name, info in snapshots.items():
            used = (dataset, stage, name) in pinned or name == inventory.newest(dataset, stage)
            if used or now - info.modified <= grace:
                _, shards = read_snapshot(store, info.path)
                named |= {f"{dataset}/{stage}/{shard['tar']}" for shard in shards}
            else:
                found.append(_object("unpinned snapshot", store, info))
    found += [_object("orphan tar", store, info) for path, info in inventory.tars.items() if path not in named]
    found += [_object("partial shard", store, info) for info in inventory.partials]
    return [one for one in found if now - one.modified > grace]


def _broken_off(leftover: Leftover) -> Garbage:
    def remove() -> bool:
        leftover.remove()
        return True

    return Garbage("broken-off put", leftover.name, leftover.size, leftover.modified, remove)


def _object(what: str, store: ObjectStore, info: ObjectInfo) -> Garbage:
    def remove() -> bool:
        if info not in store.list(info.path):  # gone, or with a new date: a writer has taken it over meanwhile
            return False
        if _named_by_a_manifest(store, info.path):  # of a writer that stood still for the whole grace time
            return False
        store.delete(info.path)
        return True

    return Garbage(what, store.where(info.path), info.size, info.modified, remove)


def _named_by_a_manifest(store: ObjectStore, path: str) -> bool:
    tar = _TAR.fullmatch(path)
    if tar is None:
        return False
    dataset, stage, shard = tar.groups()
    try:
        return Catalog(store, dataset).headers(stage, [shard])[shard].tar == path
    except ObjectMissing:
        return False


def collect_garbage(store: ObjectStore, grace: float, delete: bool) -> list[str]:
    """A line for each thing that may go; with `delete` it is gone then, unless a last look finds it in use."""
    found = find_garbage(store, grace)
    rows, size = [], 0
    for one in found:
        if delete and not one.remove():
            continue
        rows.append((one.what, f"{_megabytes(one.size)}", _date(one.modified), one.where))
        size += one.size
    if not rows:
        return ["nothing to delete"]
    things = "1 thing" if len(rows) == 1 else f"{len(rows):,} things"
    done = "deleted" if delete else "to delete: run again with --delete"
    return [*_aligned(("what", "MB", "written (UTC)", "where"), rows), f"{things}, {_megabytes(size)} MB {done}"]


# --- command line -----------------------------------------------------------------------------------------------------


def _aligned(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines: numbers to the right, all else to the left; [] where there is no row."""
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


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _time(info: ObjectInfo) -> str:
    return _date(info.modified)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 <= hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hours; give 0 or more")
    return hours


def _print_faults(inventory: Inventory) -> int:
    """The exit status: 1 where there was a fault, or nothing to look at."""
    shards, snapshots = (sum(map(len, found.values())) for found in (inventory.manifests, inventory.snapshots))
    checkpoints = sum(map(len, inventory.states.values())) if inventory.dataset is None else 0
    if not shards + snapshots + checkpoints:
        print(f"nothing is committed under {inventory.store.where()}", file=sys.stderr)
        return 1
    faults = 0
    for fault in verify(inventory):
        print(fault, flush=True)
        faults += 1
    for remark in remarks(inventory):
        print(f"no fault, but: {remark}")
    told = f"{faults:,} faults" if faults else "no fault: all is as it was committed"
    print(f"{told} (checked: shards {shards:,}, snapshots {snapshots:,}, checkpoints {checkpoints:,})")
    return 1 if faults else 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m storage.catalog", description="What is committed under a root.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in [
        ("status", "stages, rows by status, snapshots, and what each training run pinned"),
        ("history", "what was committed when, and which snapshots were taken"),
        ("verify", "hold every tar, manifest, snapshot and checkpoint against its digest; exit status 1 on a fault"),
        ("gc", "list what nothing names any more, or delete it"),
    ]:
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("root", help="a folder or s3://bucket/prefix")
        if name in ("history", "verify"):
            command.add_argument("dataset", nargs="?", help="only this dataset")
        if name == "gc":
            command.add_argument("--grace", type=_hours, default=24, help="hours that things must be old (24)")
            command.add_argument("--delete", action="store_true", help="delete them")
    options = parser.parse_args(arguments)
    try:
        store = open_store(options.root, write=False)  # `gc` deletes, and deleting says what it may not
        if options.command == "verify":
            sys.exit(_print_faults(Inventory(store, options.dataset)))
        lines = {
            "status": lambda: status(store),
            "history": lambda: history(store, options.dataset),
            "gc": lambda: collect_garbage(store, options.grace * 3600, options.delete),
        }[options.command]()
    except (ValueError, ObjectMissing, StorageUnreachable) as error:
        sys.exit(str(error))
    print("\n".join(lines) or f"nothing is committed under {options.root}")
