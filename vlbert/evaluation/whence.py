"""From a checkpoint to every image URL that it has seen, and at which steps.

    vlbert whence CHECKPOINT                     the runs that led to it, and on what they were trained
    vlbert whence CHECKPOINT URL                 each time that it saw this image: dataset, shard, step
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro

from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable, open_store
from storage.order import interleaved
from storage.programs import Checkpoint as CheckpointName
from storage.programs import Command, Positional
from storage.redact import display_url
from storage.safe_json import printable
from storage.settings import from_json
from storage.snapshots import read_columns
from storage.tables import aligned
from storage.withdrawn import is_in, read_withdrawn
from training.checkpoint import MODEL
from vlbert.checkpoint import Checkpoint, open_checkpoint, restore_saved
from vlbert.data.order import SnapshotSpan, draw_samples, seed_of
from vlbert.tasks import make_task, settings_named
from vlbert.tasks.pretraining import PretrainingSettings

_AT_ONCE = 2**16  # slots of a run that are looked at together
_KEY = re.compile(r"[0-9a-f]{20}")
TABLE = pa.schema(
    [(name, pa.string()) for name in ("url", "key", "dataset", "shard", "run", "license")]
    + [(name, pa.int64()) for name in ("times", "first_step", "last_step")]
    + [("steps", pa.list_(pa.int64()))]
)


# --- the runs that led to a checkpoint --------------------------------------------------------------------------------


def record_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a run that starts from this checkpoint records of it: docs/formats.md, `init_from`."""
    state, recipe = checkpoint.state, checkpoint.config.get("recipe")
    found = {"checkpoint": checkpoint.uri, "model": checkpoint.folder.hashes.get(MODEL, {}).get("sha256")}
    if not state or not recipe or not isinstance(state.get("data"), list):  # a model that somebody converted or copied
        return found
    return found | {
        "run": recipe["run_name"] or recipe["name"],
        "root": checkpoint.folder.store.uri(),
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
    """Epochs of a training over one snapshot of a dataset. stage: path in the root."""

    dataset: str
    stage: str
    span: SnapshotSpan


@dataclass(frozen=True, eq=False)
class Trained:
    """One run on the way to a checkpoint, up to the step from which the next one started.

    record  as record_of
    roots   where its snapshots may lie, the likeliest first
    """

    record: Mapping[str, Any]
    roots: tuple[ObjectStore, ...]
    checkpoint: Checkpoint

    @property
    def run(self) -> str:
        return self.record["run"]

    @property
    def uses(self) -> list[list[DataUse]]:
        """Of each dataset what was read, in the order of its epochs."""
        return [
            [DataUse(one["dataset"], one["stage"], SnapshotSpan(**span)) for span in one["snapshots"]]
            for one in self.record["data"]
        ]

    def store_of(self, dataset: str, stage: str, snapshot: str) -> tuple[ObjectStore, str]:
        """Return the root that has a snapshot, and its path there; ValueError where none has it."""
        path = f"{dataset}/{stage}/snapshots/{snapshot}.parquet"
        for store in self.roots:
            if store.exists(path):
                return store, path
        places = " or ".join(dict.fromkeys(store.uri(path) for store in self.roots))
        raise ValueError(f"{places} is gone; put it back, or name the checkpoint in its root: ROOT/runs/RUN")

    def steps_of(self, number: int) -> np.ndarray:
        """Return the step, from 1, of each sample that was drawn of dataset `number`, in their order: int32."""
        slots, weights = self.record["step"] * self.record["batch"], [one["weight"] for one in self.record["data"]]
        parts = []
        for start in range(0, slots, _AT_ONCE):
            datasets, _ = interleaved(start, min(_AT_ONCE, slots - start), weights)
            steps = (start + np.flatnonzero(datasets == number)) // self.record["batch"] + 1
            parts.append(steps.astype(np.int32))
        return np.concatenate(parts)

    def samples_of(self, use: DataUse) -> np.ndarray:
        """Return the sample of each example, int64 [examples].

        ValueError where the task's files are missing, or changed.
        """
        if self.record["task"] == PretrainingSettings.__name__:
            return np.arange(use.span.examples)
        kind = settings_named(self.record["task"])
        if kind is None:
            raise ValueError(f"{self.record['task']} of {self.run} is the settings of no task: import it into TASKS")
        store, path = self.store_of(use.dataset, use.stage, use.span.snapshot)
        urls = [url for table in read_columns(store, path, ["url"]) for url in table["url"].to_pylist()]
        try:
            if self.checkpoint.vocabulary is None:
                raise ValueError(f"{self.checkpoint.uri} came without a vocabulary, which they need")
            settings = from_json(kind, self.record["settings"], self.run).to_train()
            settings.check_same(self.record["task_files"], self.record["checkpoint"], "put it back")
            task = make_task(settings, self.checkpoint.vocabulary, self.checkpoint.num_classes)
            restore_saved(task, self.checkpoint)
            examples = task.examples(_Urls(urls, read_withdrawn(store).urls), None)
        except ValueError as error:
            raise ValueError(f"which images {self.run} has seen, the files of its task tell, and {error}") from error
        if len(examples) != use.span.examples:
            raise ValueError(
                f"{self.run} was trained on {use.span.examples} examples of {use.dataset}, now there are "
                f"{len(examples)}: the files of the task have changed; put them back"
            )
        return np.asarray(examples.samples, np.int64)


@dataclass(frozen=True)
class _Urls:
    """What a task reads of samples to find its examples: their URLs, and those that were withdrawn."""

    urls: list[str]
    withdrawn: Collection[str]

    def __len__(self) -> int:
        return len(self.urls)


def lineage(checkpoint: Checkpoint) -> tuple[list[Trained], dict]:
    """Return the runs that led to a checkpoint, itself first, and the record of what the first of them started from.

    The record is {} if it started from random weights. ValueError where the checkpoint does not say what it was trained
    on.
    """
    record = record_of(checkpoint)
    if "run" not in record:
        raise ValueError(
            f"{checkpoint.uri} does not say what it was trained on: only a checkpoint of vlbert.train does, "
            "ROOT/runs/RUN/step-*"
        )
    found = []
    recipe_root = checkpoint.config["recipe"]["data"]["root"]  # of a folder that was copied from there
    while record and "run" in record:
        stores = [checkpoint.folder.store, _open_root(record["root"]), _open_root(recipe_root)]
        found.append(Trained(record, tuple(store for store in stores if store), checkpoint))
        record = record["init_from"]
    return found, record or {}


@functools.lru_cache(64)  # many checkpoints name the same; one that does not answer is tried once
def _open_root(root: str) -> ObjectStore | None:
    """Return a root that a record names; None where it was another machine's."""
    with contextlib.suppress(ValueError, OSError):
        return open_store(root, write=False)
    return None


def describe(runs: Sequence[Trained], start: Mapping[str, Any]) -> list[str]:
    """Return a line for each run, and one for what the first of them started from."""
    lines = []
    for trained in runs:
        record = trained.record
        data = ", ".join(f"{one['dataset']} ({one['snapshots'][-1]['examples']:,} examples)" for one in record["data"])
        lines.append(f"{record['checkpoint']}: {record['step']:,} steps of {record['batch']} of {data}")
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


# --- samples and steps ------------------------------------------------------------------------------------------------


def seen(trained: Trained, column: str | None = None, values: frozenset[str] = frozenset()) -> Iterator[pa.Table]:
    """Yield every sample that a run took (TABLE), or those whose `column`, `key` or `url`, is one of `values`.

    Steps ascend, from 1. A sample that is in several snapshots of its dataset has a row for each.

    ValueError where a snapshot is gone, or the files of the task.
    """
    seed, chunk = trained.record["seed"], trained.record["chunk"]
    for number, uses in enumerate(trained.uses):
        places = [trained.store_of(use.dataset, use.stage, use.span.snapshot) for use in uses]
        rows = [_numbered(*place) if column is None else [find(*place, column, values)] for place in places]
        if column and not any(len(table) for (table,) in rows):
            continue  # before the walk through the order
        all_steps = trained.steps_of(number)
        ends = [min(use.span.consumed, len(all_steps)) for use in uses[1:]] + [len(all_steps)]
        for use, tables, end in zip(uses, rows, ends, strict=True):
            count = end - use.span.consumed
            if count <= 0 or (column and not len(tables[0])):
                continue
            epochs = draw_samples([use.span], use.span.consumed, count, seed_of(seed, number), chunk)
            samples = trained.samples_of(use)[np.concatenate([examples for *_, examples in epochs])]
            steps = all_steps[use.span.consumed : end]
            if column:
                wanted = np.isin(samples, tables[0]["number"].to_numpy())
                samples, steps = samples[wanted], steps[wanted]
            order = np.argsort(samples, kind="stable")  # so that the steps of a sample ascend
            samples, steps = samples[order], steps[order]
            for table in tables:
                yield _with_steps(trained, use, table, samples, steps)


def _with_steps(trained: Trained, use: DataUse, rows: pa.Table, numbers: np.ndarray, steps: np.ndarray) -> pa.Table:
    """Return those of these rows that were taken (TABLE). numbers: the sample at each step, ascending."""
    own = rows["number"].to_numpy()
    bounds = np.searchsorted(numbers, np.append(own, own[-1] + 1))
    first, last = bounds[:-1], bounds[1:] - 1
    taken = last >= first
    values = pa.array(steps[bounds[0] : bounds[-1]], pa.int64())
    lists = pa.ListArray.from_arrays(pa.array(bounds - bounds[0], pa.int32()), values)
    kept = rows.filter(pa.array(taken))
    columns = {
        **{name: kept[name] for name in ("url", "key", "license")},
        "dataset": pa.repeat(use.dataset, len(kept)),
        "shard": pc.utf8_lpad(kept["shard"].cast(pa.string()), 5, "0"),
        "run": pa.repeat(trained.run, len(kept)),
        "times": (last - first + 1)[taken],
        "first_step": steps[first[taken]],
        "last_step": steps[last[taken]],
        "steps": lists.filter(pa.array(taken)),
    }
    return pa.table({name: columns[name] for name in TABLE.names}).cast(TABLE)


def _numbered(store: ObjectStore, path: str) -> Iterator[pa.Table]:
    """Yield the rows of a snapshot, a row group at a time, each with its number."""
    start = 0
    for table in read_columns(store, path, ["url", "key", "shard", "license"]):
        yield table.append_column("number", pa.array(np.arange(start, start + len(table))))
        start += len(table)


@functools.lru_cache(64)  # many checkpoints pin the same
def find(store: ObjectStore, path: str, column: str, values: frozenset[str]) -> pa.Table:
    """Return the rows of a snapshot whose `key` or `url` is one of these."""
    return pa.concat_tables(table.filter(is_in(table[column], values)) for table in _numbered(store, path))


def tell(runs: Sequence[Trained], what: str) -> tuple[list[str], bool]:
    """Return each time that these runs saw an image, as a table; and whether any did. what: its URL, or its key."""
    column, values = "key" if _KEY.fullmatch(what) else "url", frozenset([what])
    rows, lines, urls, licenses = [], [], {}, set()
    for trained in runs:
        found = [row for table in seen(trained, column, values) for row in table.to_pylist()]
        urls |= {row["url"]: row["key"] for row in found}
        licenses |= {row["license"] for row in found} - {None}
        for step, row in sorted(((step, one) for one in found for step in one["steps"]), key=lambda pair: pair[0]):
            rows.append((trained.run, row["dataset"], row["shard"], row["key"], f"{step:,}"))
        for held in trained.record["held_out"] or ():
            place = trained.store_of(held["dataset"], held["stage"], held["snapshot"])
            for key in find(*place, column, values)["key"].to_pylist():
                lines.append(f"{trained.run} validated on it ({held['dataset']}, {key}), and learned nothing from it")
    withdrawn = read_withdrawn(runs[0].checkpoint.folder.store).urls
    if column == "key":
        lines = [f"the URL of {key} is {url}" for url, key in urls.items()] + lines
    lines += [f"its licence, as its list says: {printable(one)}" for one in sorted(licenses)]
    lines += [f"{display_url(url)} was withdrawn since" for url in urls if url in withdrawn]
    return [*aligned(("run", "dataset", "shard", "key", "step"), rows), *lines], bool(rows or lines)


def export(runs: Sequence[Trained], file: str) -> int:
    """Write every sample that these runs have seen; return how many rows. The file appears when it is complete."""
    rows, temporary = 0, Path(f"{file}.{os.getpid()}")
    try:
        with pq.ParquetWriter(temporary, TABLE, compression="zstd") as writer:
            for trained in runs:
                for table in seen(trained):
                    writer.write_table(table)
                    rows += len(table)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


# --- as a program -----------------------------------------------------------------------------------------------------


def tell_whence(
    checkpoint: CheckpointName,
    what: Annotated[str | None, Positional, tyro.conf.arg(metavar="KEY|URL")] = None,
    out: str | None = None,
) -> None:
    """List every image URL that a checkpoint has seen, and at which steps.

    Args:
        what: a sample's key, or a URL as the list has it; without it the runs are listed
        out: Parquet file for all samples: url, key, dataset, shard, run, license, times, first_step, last_step, steps
    """
    runs, start = lineage(open_checkpoint(checkpoint, tensors=False))
    print("\n".join(describe(runs, start)), flush=True)
    if out:
        print(f"{export(runs, out):,} rows in {out}", flush=True)
    if what:
        lines, any_seen = tell(runs, what)
        print("\n".join(lines) or f"{display_url(what)} was in nothing that these runs have seen", flush=True)
        if not any_seen:
            sys.exit(1)


main = Command("vlbert whence", tell_whence, ObjectMissing, StorageUnreachable, pa.ArrowException)
