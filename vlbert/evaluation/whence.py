"""List every image URL that a checkpoint has seen, and at which steps.

    vlbert whence CHECKPOINT                     the runs that led to it, and each image with the steps that saw it
    vlbert whence CHECKPOINT URL                 each time that it saw this image: dataset, shard, step
    vlbert whence CHECKPOINT KEY                 the same for a sample, by its key
    vlbert whence CHECKPOINT --out seen.parquet  all samples, with the steps of each run

CHECKPOINT is ROOT/runs/RUN/step-*, ROOT/runs/RUN (its newest checkpoint) or ROOT/runs/RUN/best. Steps count from 1, as
in metrics.jsonl. docs/provenance.md says what is known about unreadable samples.

No log is needed. A checkpoint records the seed, the dataset weights and the snapshots of its run. From this record, the
order of the samples is computed again (vlbert/data/order.py). A run that starts from a checkpoint copies its record, so
fine-tuning can be traced back to pre-training even if the pre-training checkpoint has been deleted.
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
from storage.snapshots import read_columns, read_snapshot
from storage.withdrawn import is_in, read_withdrawn
from training.checkpoint import MODEL
from vlbert.checkpoint import Checkpoint, open_checkpoint, restore_saved
from vlbert.data.order import SnapshotSpan, draw_samples, seed_of
from vlbert.tasks import make_task, settings_named
from vlbert.tasks.base import Examples, least_trained_key, split_by_key
from vlbert.tasks.pretraining import PretrainingSettings

_CHUNK = 2**16  # samples of a run whose steps are computed at once
_KEY = re.compile(r"[0-9a-f]{20}")
TABLE = pa.schema(
    [(name, pa.string()) for name in ("url", "key", "dataset", "shard", "run", "license")]
    + [(name, pa.int64()) for name in ("times", "first_step", "last_step")]
    + [("steps", pa.list_(pa.int64()))]
)


# --- the runs that led to a checkpoint --------------------------------------------------------------------------------


def record_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a run's record of the checkpoint that it starts from (`init_from` in docs/formats.md)."""
    state, recipe = checkpoint.state, checkpoint.config.get("recipe")
    source = {"checkpoint": checkpoint.uri, "model": checkpoint.folder.hashes.get(MODEL, {}).get("sha256")}
    if not state or not recipe or not isinstance(state.get("data"), list):  # a converted or copied model
        return source
    return source | {
        "run": recipe["run_name"] or recipe["name"],
        "root": checkpoint.folder.store.uri(),
        "step": state["step"],
        "seed": state["seed"],
        "batch": recipe["data"]["batch"],
        "chunk": recipe["data"]["chunk"],
        "held_out_share": recipe["data"]["held_out_share"],
        "task": checkpoint.config["task"],
        "settings": recipe["task"],
        "task_files": state.get("task_files"),
        "bert": recipe["bert"],
        "data": state["data"],
        "held_out": state["held_out"],
        "init_from": state.get("init_from"),
    }


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """One of the training runs that led to a checkpoint, up to the last step that contributed to it."""

    record: Mapping[str, Any]  # as returned by record_of
    roots: tuple[ObjectStore, ...]  # roots that may have its snapshots, the most likely first
    checkpoint: Checkpoint  # the one that the runs led to

    @property
    def run(self) -> str:
        return self.record["run"]

    def store_of(self, data: Mapping[str, Any], snapshot: str) -> tuple[ObjectStore, str]:
        """Return the root that has a snapshot of an entry of the record's `data` or `held_out`, and the path in it.

        Raises ValueError if no root has it.
        """
        path = f"{data['dataset']}/{data['stage']}/snapshots/{snapshot}.parquet"
        for store in self.roots:
            if store.exists(path):
                return store, path
        places = " or ".join(dict.fromkeys(store.uri(path) for store in self.roots))
        raise ValueError(f"{places} is missing; put it back, or name the checkpoint in its root: ROOT/runs/RUN")

    def steps_of(self, number: int) -> np.ndarray:
        """Return the step, counted from 1, of each draw from the dataset at index `number`: int32 [draws]."""
        slots, weights = self.record["step"] * self.record["batch"], [data["weight"] for data in self.record["data"]]
        parts = []
        for start in range(0, slots, _CHUNK):
            datasets, _ = interleaved(start, min(_CHUNK, slots - start), weights)
            steps = (start + np.flatnonzero(datasets == number)) // self.record["batch"] + 1
            parts.append(steps.astype(np.int32))
        return np.concatenate(parts)

    def samples_of(self, data: Mapping[str, Any], span: SnapshotSpan) -> np.ndarray:
        """Return the sample index of each example in a span of an entry of the record's `data`: int64 [examples].

        Raises ValueError if task files are missing or have changed.
        """
        share, snapshot = self.record["held_out_share"], self.store_of(data, span.snapshot)
        if self.record["task"] == PretrainingSettings.__name__:
            if not share:
                return np.arange(span.examples)
            every = Examples(np.arange(read_snapshot(*snapshot)[0].ok_rows))
            return np.asarray(split_by_key(every, *snapshot, share, held_out=False).samples)
        kind = settings_named(self.record["task"])
        if kind is None:
            unknown = f"no task has settings {self.record['task']}, as {self.run} has"
            raise ValueError(f"{unknown}; name the file of the task: --task_file FILE")
        urls = [url for table in read_columns(*snapshot, ["url"]) for url in table["url"].to_pylist()]
        try:
            if self.checkpoint.vocabulary is None:
                raise ValueError(f"{self.checkpoint.uri} has no vocabulary, which the task needs")
            settings = from_json(kind, self.record["settings"], self.run).to_train()
            settings.check_same(self.record["task_files"], self.record["checkpoint"], "put it back")
            task = make_task(settings, self.checkpoint.vocabulary, self.checkpoint.num_classes)
            restore_saved(task, self.checkpoint)
            samples = _Urls(urls, read_withdrawn(snapshot[0]).urls)
            examples = task.examples(samples, None)  # ty: ignore[invalid-argument-type] reads no sample
            examples = split_by_key(examples, *snapshot, share, held_out=False)
        except ValueError as error:
            raise ValueError(f"the images of {self.run} are unknown without its task's files: {error}") from error
        check_count(examples, span, data["dataset"], self.run)
        return np.asarray(examples.samples, np.int64)


def check_count(examples: Examples, span: SnapshotSpan, dataset: str, run: str) -> None:
    """Raise ValueError if the number of examples differs from the number that `run` was trained on."""
    if len(examples) != span.examples:
        raise ValueError(
            f"{run} was trained on {span.examples} examples of {dataset}, now there are {len(examples)}: the files of "
            "the task have changed. Restore them"
        )


@dataclass(frozen=True)
class _Urls:
    """A replacement for ShardSamples that has only the URLs. Tasks need nothing else to find their examples."""

    urls: list[str]
    withdrawn: Collection[str]

    def __len__(self) -> int:
        return len(self.urls)


def lineage(checkpoint: Checkpoint) -> tuple[list[TrainedRun], dict]:
    """Return the runs that led to a checkpoint, newest first, and the record of the oldest run's initial checkpoint.

    The record is {} if the oldest run did not start from a checkpoint. Raises ValueError if `checkpoint` has no record
    of its data.
    """
    record = record_of(checkpoint)
    if "run" not in record:
        raise ValueError(
            f"{checkpoint.uri} does not record what it was trained on; give a checkpoint of a run, ROOT/runs/RUN/step-*"
        )
    runs = []
    recipe_root = checkpoint.config["recipe"]["data"]["root"]  # the original root, if the folder is a copy
    while record and "run" in record:
        stores = [checkpoint.folder.store, _open_root(record["root"]), _open_root(recipe_root)]
        runs.append(TrainedRun(record, tuple(store for store in stores if store), checkpoint))
        record = record["init_from"]
    return runs, record or {}


@functools.lru_cache(64)  # many checkpoints name the same root; an unreachable one is tried once
def _open_root(root: str) -> ObjectStore | None:
    """Open a storage root, or return None if it cannot be opened, for example on another machine."""
    with contextlib.suppress(ValueError, OSError):
        return open_store(root, write=False)
    return None


def describe(runs: Sequence[TrainedRun], start: Mapping[str, Any]) -> list[str]:
    """Return lines of text about each run's data, and about the checkpoint that the oldest run started from."""
    lines = []
    for trained in runs:
        record = trained.record
        sizes = ((data["dataset"], data["snapshots"][-1]["examples"]) for data in record["data"])
        data = ", ".join(f"{dataset} ({examples:,} examples)" for dataset, examples in sizes)
        lines.append(f"{record['checkpoint']}: {record['step']:,} steps of {record['batch']} examples of {data}")
        if record["bert"]:
            lines.append(f"{record['run']} started from BERT, {record['bert']}: its training data is unknown")
    if start:
        sha256 = f" (sha256 {start['model'][:12]}...)" if start["model"] else ""
        lines.append(f"the first run started from {start['checkpoint']}{sha256}: its training data is unknown")
    return lines


# --- samples and steps ------------------------------------------------------------------------------------------------


def seen_samples(
    trained: TrainedRun, column: str | None = None, values: frozenset[str] = frozenset()
) -> Iterator[pa.Table]:
    """Yield tables (schema TABLE) of the samples that a run has seen, and the steps at which it saw them.

    If `column` (key or url) is given, only samples whose `column` is in `values` are included. The steps of a row count
    from 1 and ascend. A sample that is in several snapshots of its dataset has a row for each. Raises ValueError if a
    snapshot is missing, or if the task's files are missing or have changed.
    """
    seed, chunk = trained.record["seed"], trained.record["chunk"]
    for number, data in enumerate(trained.record["data"]):
        spans = [SnapshotSpan(**span) for span in data["snapshots"]]
        paths = [trained.store_of(data, span.snapshot) for span in spans]
        rows: list[Any] = [
            _read_rows(*path) if column is None else [find_rows(*path, column, values)] for path in paths
        ]
        if column and not any(len(table) for (table,) in rows):
            continue  # saves computing the order
        all_steps = trained.steps_of(number)
        ends = [min(span.consumed, len(all_steps)) for span in spans[1:]] + [len(all_steps)]
        for span, tables, end in zip(spans, rows, ends, strict=True):
            count = end - span.consumed
            if count <= 0 or (column and not len(tables[0])):
                continue
            epochs = draw_samples([span], span.consumed, count, seed_of(seed, number), chunk)
            samples = trained.samples_of(data, span)[np.concatenate([examples for *_, examples in epochs])]
            steps = all_steps[span.consumed : end]
            if column:
                wanted = np.isin(samples, tables[0]["number"].to_numpy())
                samples, steps = samples[wanted], steps[wanted]
            order = np.argsort(samples, kind="stable")  # so that the steps of a sample ascend
            samples, steps = samples[order], steps[order]
            for table in tables:
                yield _add_steps(trained.run, data["dataset"], table, samples, steps)


def _add_steps(run: str, dataset: str, rows: pa.Table, samples: np.ndarray, steps: np.ndarray) -> pa.Table:
    """Return the seen rows with their steps (schema TABLE). `samples` ascend, and samples[i] was seen at steps[i]."""
    own = rows["number"].to_numpy()
    bounds = np.searchsorted(samples, np.append(own, own[-1] + 1))
    first, last = bounds[:-1], bounds[1:] - 1
    seen = last >= first
    values = pa.array(steps[bounds[0] : bounds[-1]], pa.int64())
    lists = pa.ListArray.from_arrays(pa.array(bounds - bounds[0], pa.int32()), values)
    kept = rows.filter(pa.array(seen))
    columns = {
        **{name: kept[name] for name in ("url", "key", "license")},
        "dataset": pa.repeat(dataset, len(kept)),
        "shard": pc.utf8_lpad(kept["shard"].cast(pa.string()), 5, "0"),
        "run": pa.repeat(run, len(kept)),
        "times": (last - first + 1)[seen],
        "first_step": steps[first[seen]],
        "last_step": steps[last[seen]],
        "steps": lists.filter(pa.array(seen)),
    }
    return pa.table({name: columns[name] for name in TABLE.names}).cast(TABLE)


def _read_rows(store: ObjectStore, path: str) -> Iterator[pa.Table]:
    """Yield a snapshot's rows, one row group at a time, with the row index in an added column `number`."""
    start = 0
    for table in read_columns(store, path, ["url", "key", "shard", "license"]):
        yield table.append_column("number", pa.array(np.arange(start, start + len(table))))
        start += len(table)


@functools.lru_cache(64)  # many checkpoints record the same snapshot
def find_rows(store: ObjectStore, path: str, column: str, values: frozenset[str]) -> pa.Table:
    """Return the rows of a snapshot whose `column` (key or url) is in `values`, with the row index as `number`."""
    return pa.concat_tables(table.filter(is_in(table[column], values)) for table in _read_rows(store, path))


def describe_uses(runs: Sequence[TrainedRun], image: str) -> list[str]:
    """Return lines of text about each use of an image (URL or key) by these runs, or [] if there was none."""
    column, values = "key" if _KEY.fullmatch(image) else "url", frozenset([image])
    lines, urls, licenses = [], {}, set()
    for trained in runs:
        for row in (row for table in seen_samples(trained, column, values) for row in table.to_pylist()):
            steps = ", ".join(map(str, row["steps"]))
            lines.append(f"{trained.run}: {row['dataset']}, shard {row['shard']}, {row['key']}, steps {steps}")
            urls[row["url"]] = row["key"]
            licenses |= {row["license"]} - {None}
        share = trained.record["held_out_share"]
        for held in trained.record["held_out"] or ():
            path = trained.store_of(held, held["snapshot"])
            # A task may validate on a part of the dataset.
            used = "used it" if trained.record["task"] == PretrainingSettings.__name__ else "may have used it"
            rows = find_rows(*path, column, values)["key"].to_pylist()
            for key in (key for key in rows if not share or key < least_trained_key(share)):
                lines.append(f"{trained.run} {used} for validation ({held['dataset']}, {key})")
    withdrawn = read_withdrawn(runs[0].checkpoint.folder.store).urls
    if column == "key":
        lines = [f"the URL of {key} is {url}" for url, key in urls.items()] + lines
    lines += [f"licence in its list: {printable(license)}" for license in sorted(licenses)]
    lines += [f"{display_url(url)} has been withdrawn" for url in urls if url in withdrawn]
    return lines


def export(runs: Sequence[TrainedRun], file: str) -> int:
    """Write all samples that these runs have seen to a Parquet file, atomically. Returns the number of rows."""
    rows, temporary = 0, Path(f"{file}.{os.getpid()}")
    try:
        with pq.ParquetWriter(temporary, TABLE, compression="zstd") as writer:
            for trained in runs:
                for table in seen_samples(trained):
                    writer.write_table(table)
                    rows += len(table)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


# --- as a program -----------------------------------------------------------------------------------------------------


def list_seen(
    checkpoint: CheckpointName,
    image: Annotated[str | None, Positional, tyro.conf.arg(metavar="KEY|URL")] = None,
    out: str | None = None,
) -> None:
    """List every image URL that a checkpoint has seen, and at which steps.

    Args:
        image: a sample's key, or a URL as in the caption list; if left out, all images are listed
        out: Parquet file for all samples: url, key, dataset, shard, run, license, times, first_step, last_step, steps
    """
    runs, start = lineage(open_checkpoint(checkpoint, tensors=False))
    print("\n".join(describe(runs, start)), flush=True)
    if out:
        print(f"{export(runs, out):,} rows in {out}", flush=True)
    if not (out or image):
        for trained in runs:
            for row in (row for table in seen_samples(trained) for row in table.to_pylist()):
                print(f"{printable(display_url(row['url']))}: {trained.run}, steps {', '.join(map(str, row['steps']))}")
    if image:
        lines = describe_uses(runs, image)
        print("\n".join(lines) or f"{display_url(image)} was not seen by these runs", flush=True)
        if not lines:
            sys.exit(1)


main = Command("vlbert whence", list_seen, ObjectMissing, StorageUnreachable, pa.ArrowException)
