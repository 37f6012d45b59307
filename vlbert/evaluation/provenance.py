"""Which samples a checkpoint has seen, and at which steps: computed from what the checkpoint says of its data.

Order is a pure function of (seed, weights, snapshots), so no log is needed (vlbert/data/order.py). A run that started
from a checkpoint records what that says of itself, so the way leads back through fine-tuning to pre-training, even if
the first checkpoint is gone.
"""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.forgotten import forgotten_urls, is_among
from storage.object_store import ObjectStore, open_store
from storage.order import draws_in, positions_of, slots_of
from storage.settings import from_json
from storage.snapshots import read_columns, read_rows
from training.checkpoint import MODEL
from vlbert.checkpoint import Checkpoint, open_checkpoint, restore_saved
from vlbert.data.order import CAPTIONS, SnapshotSpan, seed_of
from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks import make_task, settings_named
from vlbert.tasks.base import TaskSettings
from vlbert.tasks.pretraining import PretrainingSettings

_EVERY = 2**16  # draws that are computed at a time


def record_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a run that starts from this checkpoint records of it: docs/formats.md, `init_from`."""
    state, recipe = checkpoint.state, checkpoint.config.get("recipe")
    found: dict[str, Any] = {"checkpoint": checkpoint.where}
    if not state or not recipe or not isinstance(state.get("data"), list):  # a model that somebody converted or copied
        return found | {"model": checkpoint.folder.hashes.get(MODEL, {}).get("sha256")}
    before = state.get("init_from")
    if before is None and recipe["init_from"]:  # of a run that is older than this record
        before = _of_path(recipe["init_from"])
    return found | {
        "run": recipe["run"] or recipe["name"],
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
        "init_from": before,
    }


def _of_path(path: str) -> dict[str, Any]:
    """The record of a checkpoint that a recipe names; its path alone, where that may mean another one by now."""
    if "/step-" not in path.rpartition("/runs/")[2]:
        return {"checkpoint": path, "model": None}
    try:
        return record_of(open_checkpoint(path, tensors=False))
    except ValueError:
        return {"checkpoint": path, "model": None}


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
    """

    record: Mapping[str, Any]
    roots: tuple[ObjectStore, ...]
    checkpoint: Checkpoint
    folders: tuple[str, ...] = ()  # where its task's files may lie, before that of the record
    weights: Sequence[float] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "weights", [one["weight"] for one in self.record["data"]])

    @property
    def run(self) -> str:
        return self.record["run"]

    @property
    def uses(self) -> list[DataUse]:
        """Its datasets."""
        return [
            DataUse(n, one["dataset"], one["stage"], [SnapshotSpan(**span) for span in one["snapshots"]])
            for n, one in enumerate(self.record["data"])
        ]

    def store_of(self, dataset: str, stage: str, snapshot: str) -> tuple[ObjectStore, str]:
        """The root that has a snapshot, and its path there; ValueError where none has it."""
        path = f"{dataset}/{stage}/snapshots/{snapshot}.parquet"
        for store in self.roots:
            if store.exists(path):
                return store, path
        places = " or ".join(dict.fromkeys(store.where(path) for store in self.roots))
        raise ValueError(f"{places} is gone; put it back, or name the root that has it: root=...")

    def epochs(self, use: DataUse) -> Iterator[tuple[SnapshotSpan, int, int, int]]:
        """Each epoch of a dataset: its span, its number, how many draws of the dataset were before it, and how many of
        it the run took."""
        taken = draws_in(self.record["step"] * self.record["batch"], self.weights)[use.number]
        for span, end in zip(use.spans, [span.consumed for span in use.spans[1:]] + [taken], strict=True):
            for epoch, begins in enumerate(range(span.consumed, min(end, taken), span.examples), span.epoch):
                yield span, epoch, begins, min(span.examples, min(end, taken) - begins)

    def steps(
        self, use: DataUse, span: SnapshotSpan, epoch: int, begins: int, taken: int, examples: np.ndarray
    ) -> np.ndarray:
        """int64, of each of these examples: at which step, from 1, this epoch had it; 0: not by the end of the run."""
        seed, chunk = seed_of(self.record["seed"], use.number), self.record["chunk"]
        places = positions_of(examples, seed, CAPTIONS, epoch, span.examples, chunk, begins)
        found, seen = np.zeros(len(examples), np.int64), np.flatnonzero(places < taken)
        for start in range(0, len(seen), _EVERY):
            part = seen[start : start + _EVERY]
            slots = slots_of(begins + places[part], use.number, self.weights)
            found[part] = slots // self.record["batch"] + 1
        return found

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
            examples = task.examples(_Urls(urls, forgotten_urls(store)), None)
        except ValueError as error:
            raise ValueError(
                f"which images {self.run} has seen, the files of its task tell, and {error}; here: task_folder=FOLDER"
            ) from error
        if len(examples) != span.examples:
            raise ValueError(
                f"{self.run} was trained on {span.examples} examples of {use.dataset}, now there are {len(examples)}: "
                "the files of the task have changed; name those that it had: task_folder=FOLDER"
            )
        return np.asarray(examples.samples, np.int64)

    def _settings(self, kind: type[TaskSettings]) -> TaskSettings:
        """Those of its task, with the first folder that has its files; ValueError where those are others now."""
        own = from_json(kind, self.record["settings"], self.run).to_train()
        places = [own if folder is None else replace(own, folder=folder) for folder in (*self.folders, None)]
        whole = [one for one in places if all(Path(one.folder, name).is_file() for name in one.files)]
        for number, one in enumerate(whole):
            try:
                one.check_same(self.record.get("task_files"), self.record["checkpoint"], "name the folder that has it")
                return one
            except ValueError:
                if number == len(whole) - 1:
                    raise
        return places[0]  # whose reader says what is missing

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        if self.checkpoint.vocabulary is None:
            raise ValueError(f"{self.checkpoint.where} came without a vocabulary, which the files of a task need")
        return self.checkpoint.vocabulary


class _Urls:
    """What a task reads of samples to find its examples: their URLs, and those that were forgotten."""

    def __init__(self, urls: list[str], withdrawn: Collection[str]):
        self.urls, self.withdrawn = urls, withdrawn

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


@dataclass(frozen=True)
class Found:
    """A sample of a snapshot: its number there, and where it came from."""

    number: int
    shard: str
    row: int
    key: str
    url: str
    license: str | None


@functools.lru_cache(64)  # many checkpoints pin the same
def find(store: ObjectStore, path: str, column: str, values: frozenset[str]) -> tuple[Found, ...]:
    """The samples of a snapshot whose `key` or `url` is one of these."""
    found, start = [], 0
    for table in read_columns(store, path, [column]):
        hits = np.flatnonzero(is_among(table[column], values).to_numpy())
        found += (start + hits).tolist()
        start += len(table)
    rows = read_rows(store, path, found) if found else []
    return tuple(
        Found(number, f"{row['shard']:05d}", row["row"], row["key"], row["url"], row["license"])
        for number, row in zip(found, rows, strict=True)
    )


@dataclass(frozen=True)
class Seen:
    """That a run took a sample: in which epoch of its dataset, and at which step, from 1."""

    use: DataUse
    found: Found
    epoch: int
    step: int


def seen(trained: Trained, column: str, values: frozenset[str]) -> Iterator[Seen]:
    """Each time that a run took a sample whose `key` or `url` is one of these, by dataset and epoch.

    ValueError where a snapshot is gone, or the task's files are.
    """
    for use in trained.uses:
        examples: dict[SnapshotSpan, tuple[list[Found], np.ndarray]] = {}  # each with the sample that it is about
        for span, epoch, begins, taken in trained.epochs(use):
            if span not in examples:
                examples[span] = _examples_of(trained, use, span, column, values)
            samples, numbers = examples[span]
            steps = trained.steps(use, span, epoch, begins, taken, numbers) if samples else np.zeros(0, np.int64)
            for sample, step in sorted(zip(samples, steps.tolist(), strict=True), key=lambda pair: pair[1]):
                if step:
                    yield Seen(use, sample, epoch, step)


def _examples_of(
    trained: Trained, use: DataUse, span: SnapshotSpan, column: str, values: frozenset[str]
) -> tuple[list[Found], np.ndarray]:
    store, path = trained.store_of(use.dataset, use.stage, span.snapshot)
    found = find(store, path, column, values)
    samples = trained.samples_of(use, span) if found else None
    if samples is None:
        return list(found), np.array([one.number for one in found], np.int64)
    by_number = {one.number: one for one in found}
    numbers = np.flatnonzero(np.isin(samples, [*by_number]))
    return [by_number[number] for number in samples[numbers].tolist()], numbers


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


def all_seen(trained: Trained) -> Iterator[pa.Table]:
    """Every sample that a run took, once each (TABLE): how often, and at which steps, ascending, from 1.

    ValueError as of `seen`.
    """
    for use in trained.uses:
        if len(use.spans) == 1:
            yield from _all_of(trained, use, use.spans[0])
        else:
            parts = [TABLE.empty_table(), *(table for span in use.spans for table in _all_of(trained, use, span))]
            yield _joined(pa.concat_tables(parts))


def _all_of(trained: Trained, use: DataUse, span: SnapshotSpan) -> Iterator[pa.Table]:
    """The rows of one snapshot, those of a row group of its file at a time."""
    epochs = [one[1:] for one in trained.epochs(use) if one[0] == span]
    if not epochs:
        return
    store, path = trained.store_of(use.dataset, use.stage, span.snapshot)
    samples, start = trained.samples_of(use, span), 0
    order = None if samples is None else np.argsort(samples, kind="stable")  # the examples by their samples
    for columns in read_columns(store, path, ["url", "key", "shard", "license"]):
        ours = examples = np.arange(start, start + len(columns))
        if order is not None:
            examples = order[slice(*np.searchsorted(samples, [start, start + len(columns)], sorter=order))]
            ours = samples[examples]
        steps = np.concatenate([trained.steps(use, span, *epoch, examples) for epoch in epochs])
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


def _joined(table: pa.Table) -> pa.Table:
    """Rows of several snapshots, in their order: those of one sample as one."""
    names = TABLE.names[:6]
    numbered = table.select(names).append_column("number", pa.array(np.arange(len(table))))
    found = numbered.group_by(names, use_threads=False).aggregate([("number", "list")])
    rows = found["number_list"].combine_chunks()
    steps = table["steps"].combine_chunks().take(rows.flatten())
    bounds = np.array(steps.offsets)[np.array(rows.offsets)].astype(np.int32)
    values = np.array(steps.values)
    columns = np.diff(bounds), values[bounds[:-1]], values[bounds[1:] - 1], pa.ListArray.from_arrays(bounds, values)
    return pa.table([*(found[name] for name in names), *columns], schema=TABLE)
