"""From a checkpoint to every image URL that it has seen, and at which steps.

    vlbert whence CHECKPOINT                     the runs that led to it, and on what they were trained
    vlbert whence CHECKPOINT URL                 each time that it saw this image: dataset, shard, epoch, step
    vlbert whence CHECKPOINT KEY                 the same of a sample, by its key
    vlbert whence CHECKPOINT --out seen.parquet  all of them, with the steps of each run

CHECKPOINT is ROOT/runs/RUN/step-*, ROOT/runs/RUN (the newest of the run) or ROOT/runs/RUN/best. Steps count from 1, as
in metrics.jsonl. docs/provenance.md says what can be known of samples that were not readable.

No log is needed: the order of a run is a pure function of (seed, weights, snapshots), which its checkpoint has, and is
walked through once (vlbert/data/order.py). A run that started from a checkpoint records what that says of itself, so
the way leads back through fine-tuning to pre-training, even if the first checkpoint is gone.
"""

import contextlib
import functools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro

from storage.inventory import aligned
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable, open_store
from storage.order import interleaved
from storage.programs import Checkpoint as CheckpointName
from storage.programs import Command, Flat, Positional
from storage.redact import shown_url
from storage.safe_json import parse_json, printable
from storage.settings import from_json
from storage.snapshots import read_columns, read_rows
from storage.withdrawn import is_among, read_withdrawn
from training.checkpoint import MODEL
from vlbert.checkpoint import Checkpoint, open_checkpoint, restore_saved
from vlbert.data.order import SnapshotSpan, drawn_by_epoch, seed_of
from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks import make_task, settings_named
from vlbert.tasks.base import TaskSettings
from vlbert.tasks.pretraining import PretrainingSettings

_AT_ONCE = 2**16  # slots of a run that are looked at together
_KEY = re.compile(r"[0-9a-f]{20}")
TABLE = pa.schema(
    [
        pa.field("url", pa.string()),
        pa.field("key", pa.string()),
        pa.field("dataset", pa.string()),
        pa.field("shard", pa.string()),
        pa.field("run", pa.string()),
        pa.field("license", pa.string()),
        pa.field("times", pa.int64()),
        pa.field("first_step", pa.int64()),
        pa.field("last_step", pa.int64()),
        pa.field("steps", pa.list_(pa.int64())),
    ]
)


@dataclass(frozen=True)
class WhenceSettings:
    """Where to look, and what to write."""

    # Parquet file for all samples: url, key, dataset, shard, run, license, times, first_step, last_step, steps
    out: str | None = None
    root: str | None = None  # folder or s3://bucket/prefix that holds the snapshots, if the checkpoint was moved
    task_folder: tuple[str, ...] = ()  # folders with the files of fine-tunings' tasks, if they are not where they were


# --- the runs that led to a checkpoint --------------------------------------------------------------------------------


def record_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a run that starts from this checkpoint records of it: docs/formats.md, `init_from`."""
    state, recipe = checkpoint.state, checkpoint.config.get("recipe")
    found: dict[str, Any] = {"checkpoint": checkpoint.where}
    if not state or not recipe or not isinstance(state.get("data"), list):  # a model that somebody converted or copied
        return found | {"model": checkpoint.folder.hashes.get(MODEL, {}).get("sha256")}
    return found | {
        "run": recipe["run_name"] or recipe["name"],
        "root": checkpoint.folder.store.where(),
        "step": state["step"],
        "seed": state["seed"],
        "batch": recipe["data"]["batch"],
        "chunk": recipe["data"]["chunk"],
        "task": checkpoint.config["task"],
        "settings": recipe["task"],
        "task_files": state.get("task_files"),
        "bert": recipe["bert"],
        "data": state["data"],
        "held_out": state["held_out"],
        "init_from": state.get("init_from"),
    }


@dataclass(frozen=True, eq=False)
class DataUse:
    """One dataset of a training: number among its datasets, and the spans of its epochs; stage: path in the root."""

    number: int
    dataset: str
    stage: str
    spans: Sequence[SnapshotSpan]


@dataclass(frozen=True, eq=False)
class Trained:
    """One run on the way to a checkpoint, up to the step from which the next one started.

    record  as record_of
    roots   where its snapshots may lie, the likeliest first
    folders where its task's files may lie, before that of the record
    """

    record: Mapping[str, Any]
    roots: tuple[ObjectStore, ...]
    checkpoint: Checkpoint
    folders: tuple[str, ...] = ()
    weights: Sequence[float] = field(init=False)
    uses: Sequence[DataUse] = field(init=False)

    def __post_init__(self):
        data = self.record["data"]
        spans = [[SnapshotSpan(**span) for span in one["snapshots"]] for one in data]
        uses = [DataUse(n, one["dataset"], one["stage"], spans[n]) for n, one in enumerate(data)]
        object.__setattr__(self, "weights", [one["weight"] for one in data])
        object.__setattr__(self, "uses", uses)

    @property
    def run(self) -> str:
        return self.record["run"]

    def store_of(self, dataset: str, stage: str, snapshot: str) -> tuple[ObjectStore, str]:
        """The root that has a snapshot, and its path there; ValueError where none has it."""
        path = f"{dataset}/{stage}/snapshots/{snapshot}.parquet"
        for store in self.roots:
            if store.exists(path):
                return store, path
        places = " or ".join(dict.fromkeys(store.where(path) for store in self.roots))
        raise ValueError(f"{places} is gone; put it back, or name the root that has it: --root=...")

    def draws(self) -> Iterator[tuple[DataUse, SnapshotSpan, int, np.ndarray, np.ndarray]]:
        """All that the run took, in its order: dataset, span, epoch, examples (int64 [n]), and the step of each."""
        batch, seed, chunk = (self.record[name] for name in ("batch", "seed", "chunk"))
        slots = self.record["step"] * batch
        for start in range(0, slots, _AT_ONCE):
            numbers, draws = interleaved(start, min(_AT_ONCE, slots - start), self.weights)
            for use in self.uses:
                ours = np.flatnonzero(numbers == use.number)
                if not len(ours):
                    continue
                steps = (start + ours) // batch + 1
                own = seed_of(seed, use.number)
                for index, epoch, examples in drawn_by_epoch(use.spans, int(draws[ours[0]]), len(ours), own, chunk):
                    yield use, use.spans[index], epoch, examples, steps[: len(examples)]
                    steps = steps[len(examples) :]

    def samples_of(self, use: DataUse, span: SnapshotSpan) -> np.ndarray | None:
        """int64 [examples]: the sample of each example; None where each sample is one example.

        ValueError where the task's files are missing, or changed.
        """
        if self.record["task"] == PretrainingSettings.__name__:
            return None
        kind = settings_named(self.record["task"])
        if kind is None:
            raise ValueError(f"{self.record['task']} of {self.run} is the settings of no task: import it into TASKS")
        store, path = self.store_of(use.dataset, use.stage, span.snapshot)
        urls = [url for table in read_columns(store, path, ["url"]) for url in table["url"].to_pylist()]
        try:
            task = make_task(self._settings(kind), self._vocabulary, self.checkpoint.num_classes)
            restore_saved(task, self.checkpoint)
            examples = task.examples(_Urls(urls, read_withdrawn(store).urls), None)
        except ValueError as error:
            raise ValueError(
                f"which images {self.run} has seen, the files of its task tell, and {error}; here: --task_folder=FOLDER"
            ) from error
        if len(examples) != span.examples:
            raise ValueError(
                f"{self.run} was trained on {span.examples} examples of {use.dataset}, now there are {len(examples)}: "
                "the files of the task have changed; name those that it had: --task_folder=FOLDER"
            )
        return np.asarray(examples.samples, np.int64)

    def _settings(self, kind: type[TaskSettings]) -> TaskSettings:
        """Those of its task, with the first folder that has its files; ValueError where those are others now."""
        own, changed = from_json(kind, self.record["settings"], self.run).to_train(), None
        for one in (*(replace(own, folder=folder) for folder in self.folders), own):
            if all(Path(one.folder, name).is_file() for name in one.files):
                try:
                    one.check_same(self.record["task_files"], self.record["checkpoint"], "name the folder that has it")
                    return one
                except ValueError as error:
                    changed = error
        if changed:
            raise changed
        return own  # whose reader says what is missing

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        if self.checkpoint.vocabulary is None:
            raise ValueError(f"{self.checkpoint.where} came without a vocabulary, which the files of a task need")
        return self.checkpoint.vocabulary


@dataclass(frozen=True)
class _Urls:
    """What a task reads of samples to find its examples: their URLs, and those that were withdrawn."""

    urls: list[str]
    withdrawn: Collection[str]

    def __len__(self) -> int:
        return len(self.urls)


def lineage(
    checkpoint: Checkpoint, root: str | None = None, folders: tuple[str, ...] = ()
) -> tuple[list[Trained], dict]:
    """The runs that led to a checkpoint, itself first, and the record of what the first of them started from.

    root: where snapshots are looked for, too. folders: where files of the runs' tasks are looked for first. The
    record is {} if it started from random weights. ValueError where the checkpoint does not say what it was trained on.
    """
    record = record_of(checkpoint)
    if "run" not in record:
        raise ValueError(
            f"{checkpoint.where} does not say what it was trained on: only a checkpoint of vlbert.train does, "
            "ROOT/runs/RUN/step-*"
        )
    found = []
    first = [open_store(root, write=False)] if root else []
    roots = [checkpoint.config["recipe"]["data"]["root"]]  # of a folder that was copied from there
    while record and "run" in record:
        stores = [*first, checkpoint.folder.store]
        for named in (record["root"], *roots):
            if named not in [store.where() for store in stores] and (other := _opened(named)):
                stores.append(other)
        found.append(Trained(record, tuple(stores), checkpoint, folders))
        record = record["init_from"]
    return found, record or {}


@functools.lru_cache(64)  # many checkpoints name the same; one that does not answer is tried once
def _opened(root: str) -> ObjectStore | None:
    """A root that a record names; None where it was another machine's."""
    with contextlib.suppress(ValueError, OSError):
        return open_store(root, write=False)
    return None


def describe(runs: Sequence[Trained], start: Mapping[str, Any]) -> list[str]:
    """A line for each run, and one for what the first of them started from."""
    lines = []
    for trained in runs:
        record, shares = trained.record, []
        for use in trained.uses:
            weight = trained.weights[use.number] / sum(trained.weights)
            examples, count = use.spans[-1].examples, len(use.spans)
            share = f", {weight:.1%} of each step" if weight < 1 else ""
            shares.append(f"{use.dataset} ({examples:,} examples, {count} snapshot{'s' * (count > 1)}{share})")
        lines.append(f"{record['checkpoint']}: {record['step']:,} steps of {record['batch']} of {', '.join(shares)}")
        if record["bert"]:
            lines.append(
                f"{record['run']} took the weights of a BERT, {record['bert']}: what that has read is not known"
            )
    if start:
        sha256 = f" (sha256 {start['model'][:12]}...)" if start["model"] else ""
        lines.append(
            f"it started from {start['checkpoint']}{sha256}, which does not say what it was trained on: what that has "
            "seen is not known"
        )
    return lines


# --- one image --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """That a run took a sample: in which epoch of its dataset, and at which step, from 1."""

    dataset: str
    shard: str
    key: str
    url: str
    license: str | None
    epoch: int
    step: int


@functools.lru_cache(64)  # many checkpoints pin the same
def find(store: ObjectStore, path: str, column: str, values: frozenset[str]) -> Mapping[int, dict]:
    """The samples of a snapshot whose `key` or `url` is one of these: number there -> row, as read_rows has it."""
    found, start = [], 0
    for table in read_columns(store, path, [column]):
        found += (start + np.flatnonzero(is_among(table[column], values).to_numpy())).tolist()
        start += len(table)
    return dict(zip(found, read_rows(store, path, found) if found else (), strict=True))


def seen(trained: Trained, column: str, values: frozenset[str]) -> Iterator[Seen]:
    """Each time that a run took a sample whose `key` or `url` is one of these, by step.

    ValueError where a snapshot is gone, or the task's files are.
    """
    wanted, masks = {}, {}  # by dataset and span: the sample of each example that is one of these, and which are
    for use in trained.uses:
        for span in use.spans:
            rows = find(*trained.store_of(use.dataset, use.stage, span.snapshot), column, values)
            samples = trained.samples_of(use, span) if rows else None
            if samples is not None:
                examples = np.flatnonzero(np.isin(samples, [*rows])).tolist()
                rows = {number: rows[int(samples[number])] for number in examples}
            place = use.number, span
            wanted[place], masks[place] = rows, np.zeros(span.examples, bool)
            masks[place][[*rows]] = True
    if not any(wanted.values()):
        return
    for use, span, epoch, examples, steps in trained.draws():
        for hit in np.flatnonzero(masks[use.number, span][examples]).tolist():
            row = wanted[use.number, span][int(examples[hit])]
            shard = f"{row['shard']:05d}"
            yield Seen(use.dataset, shard, row["key"], row["url"], row["license"], epoch, int(steps[hit]))


def tell(runs: Sequence[Trained], what: str) -> tuple[list[str], bool]:
    """Each time that these runs saw an image, as a table; and whether any did. what: its URL, or its key."""
    column, rows, lines, urls, licenses = "key" if _KEY.fullmatch(what) else "url", [], [], {}, set()
    for trained in runs:
        log = RunNotes(trained)
        for one in seen(trained, column, frozenset([what])):
            urls[one.url] = one.key
            licenses.add(one.license)
            note = log.note(one.key, one.step)
            rows.append((trained.run, one.dataset, one.shard, one.key, f"{one.epoch}", f"{one.step:,}", note))
        for held in trained.record["held_out"] or ():
            place = trained.store_of(held["dataset"], held["stage"], held["snapshot"])
            for row in find(*place, column, frozenset([what])).values():
                name = f"{held['dataset']}, {row['key']}"
                lines.append(f"{trained.run} validated on it ({name}), and learned nothing from it")
    withdrawn = read_withdrawn(runs[0].checkpoint.folder.store).urls
    if column == "key":
        lines = [f"the URL of {key} is {url}" for url, key in urls.items()] + lines
    lines += [f"its licence, as its list says: {printable(one)}" for one in sorted(licenses - {None})]
    lines += [f"{shown_url(url)} was withdrawn since" for url in urls if url in withdrawn]
    names = "run", "dataset", "shard", "key", "epoch", "step", "note"
    return [*aligned(names, rows), *lines], bool(rows or lines)


class RunNotes:
    """What the logs of a run say about its samples, where they still are: docs/formats.md, Logs of a run."""

    def __init__(self, trained: Trained):
        paths = [f"runs/{trained.run}/{name}.jsonl" for name in ("skipped", "unreadable")]
        skipped, unreadable = ([line for one in trained.roots for line in _lines(one, path)] for path in paths)
        self._skipped = {line["step"]: line["why"] for line in skipped}
        self._unreadable = {
            line["key"]: line for line in reversed(unreadable)
        }  # the first of each, which alone is logged

    def note(self, key: str, step: int) -> str:
        """What is known about this sample at this step beside that it was its turn; "" if it was read."""
        if step in self._skipped:
            return f"the step was skipped: {printable(self._skipped[step])}"
        line = self._unreadable.get(key)
        if line and line["step"] <= step:
            return f"not read in step {line['step']:,}: {printable(line['reason'])}"
        return ""


def _lines(store: ObjectStore, path: str) -> Iterator[dict]:
    for line in store.get(path).splitlines() if store.exists(path) else ():
        with contextlib.suppress(ValueError):  # torn
            yield parse_json(line, path)


# --- all of them ------------------------------------------------------------------------------------------------------


def export(runs: Sequence[Trained], file: str) -> int:
    """Write every sample that these runs have seen; returns how many rows. The file appears when it is complete."""
    rows, temporary = 0, Path(f"{file}.{os.getpid()}")
    try:
        with pq.ParquetWriter(temporary, TABLE, compression="zstd") as writer:
            for trained in runs:
                for table in all_seen(trained):
                    writer.write_table(table)
                    rows += len(table)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def all_seen(trained: Trained) -> Iterator[pa.Table]:
    """Every sample that a run took (TABLE): how often, and at which steps, ascending, from 1. One that is in several
    snapshots of its dataset has a row for each.

    ValueError as of `seen`. Takes 4 bytes for each example and epoch.
    """
    taken: dict[tuple[int, SnapshotSpan], dict[int, np.ndarray]] = defaultdict(dict)  # by epoch: step of each example
    for use, span, epoch, examples, steps in trained.draws():
        of_epoch = taken[use.number, span].setdefault(epoch, np.zeros(span.examples, np.int32))
        of_epoch[examples] = steps
    for (number, span), epochs in taken.items():
        yield from _rows(trained, trained.uses[number], span, [*epochs.values()])


def _rows(trained: Trained, use: DataUse, span: SnapshotSpan, epochs: Sequence[np.ndarray]) -> Iterator[pa.Table]:
    """The rows of one snapshot, those of a row group of its file at a time; epochs: the step of each example."""
    store, path = trained.store_of(use.dataset, use.stage, span.snapshot)
    samples, start = trained.samples_of(use, span), 0
    order = None if samples is None else np.argsort(samples, kind="stable")  # the examples by their samples
    for columns in read_columns(store, path, ["url", "key", "shard", "license"]):
        ours = examples = np.arange(start, start + len(columns))
        if order is not None:
            examples = order[slice(*np.searchsorted(samples, [start, start + len(columns)], sorter=order))]
            ours = samples[examples]
        steps = np.concatenate([of_epoch[examples] for of_epoch in epochs]).astype(np.int64)
        owners = np.tile(ours, len(epochs))[steps > 0] - start
        values = steps[steps > 0][np.lexsort((steps[steps > 0], owners))]
        times = np.bincount(owners, minlength=len(columns))
        ends = np.cumsum(times)
        taken, lists = times > 0, pa.ListArray.from_arrays(np.append(0, ends).astype(np.int32), values)
        kept = columns.filter(pa.array(taken))
        shard = pc.utf8_lpad(kept["shard"].cast(pa.string()), 5, "0")
        dataset, run = (pa.array([name] * len(kept), pa.string()) for name in (use.dataset, trained.run))
        names = kept["url"], kept["key"], dataset, shard, run, kept["license"]
        bounds = times[taken], values[(ends - times)[taken]], values[ends[taken] - 1], lists.filter(pa.array(taken))
        yield pa.table([*names, *bounds], schema=TABLE)
        start += len(columns)


# --- as a program -----------------------------------------------------------------------------------------------------


def tell_whence(
    checkpoint: CheckpointName,
    what: Annotated[str | None, Positional, tyro.conf.arg(metavar="KEY|URL")] = None,
    settings: Annotated[WhenceSettings, Flat] = WhenceSettings(),
) -> None:
    """List every image URL that a checkpoint has seen, and at which steps.

    Args:
        what: a sample's key, or a URL as the list has it; without it the runs are listed
    """
    runs, start = lineage(open_checkpoint(checkpoint, tensors=False), settings.root, settings.task_folder)
    print("\n".join(describe(runs, start)), flush=True)
    if settings.out:
        print(f"{export(runs, settings.out):,} rows in {settings.out}", flush=True)
    if what:
        lines, any_seen = tell(runs, what)
        print("\n".join(lines) or f"{shown_url(what)} was in nothing that these runs have seen", flush=True)
        if not any_seen:
            sys.exit(1)


main = Command("vlbert whence", tell_whence, ObjectMissing, StorageUnreachable, pa.ArrowException)
