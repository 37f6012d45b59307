"""From a checkpoint to every image URL that it has seen, and at which steps.

    vlbert whence CHECKPOINT                     the runs that led to it, and on what they were trained
    vlbert whence CHECKPOINT URL                 each time that it saw this image: dataset, shard, epoch, step
    vlbert whence CHECKPOINT KEY                 the same of a sample, by its key
    vlbert whence CHECKPOINT out=seen.parquet    all of them, with the steps of each run

CHECKPOINT is ROOT/runs/RUN/step-*, ROOT/runs/RUN (the newest of the run) or ROOT/runs/RUN/best. Steps count from 1, as
in metrics.jsonl. docs/provenance.md says what can be known of samples that were not readable.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.forgotten import forgotten_urls
from storage.inventory import aligned
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable
from storage.programs import make_parser
from storage.redact import shown_url
from storage.safe_json import parse_json, printable
from storage.settings import add_fields, from_assignments
from vlbert.checkpoint import open_checkpoint
from vlbert.evaluation.provenance import TABLE, Trained, all_seen, find, lineage, seen

_KEY = re.compile(r"[0-9a-f]{20}")


@dataclass(frozen=True)
class WhenceSettings:
    """Where to look, and what to write."""

    # Parquet file for all samples: url, key, dataset, shard, run, license, times, first_step, last_step, steps
    out: str | None = None
    root: str | None = None  # folder or s3://bucket/prefix that holds the snapshots, if the checkpoint was moved
    task_folder: tuple[str, ...] = ()  # folders with the files of fine-tunings' tasks, if they are not where they were


def column_of(what: str) -> str:
    """Whether a text is the `key` of a sample or a `url`."""
    return "key" if _KEY.fullmatch(what) else "url"


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


def tell(runs: Sequence[Trained], what: str) -> tuple[list[str], bool]:
    """Each time that these runs saw an image, as a table; and whether any did."""
    column, rows, lines, urls, licenses = column_of(what), [], [], {}, set()
    for trained in runs:
        log = RunNotes(trained)
        for one in seen(trained, column, frozenset([what])):
            urls[one.found.url] = one.found.key
            licenses.add(one.found.license)
            names = trained.run, one.use.dataset, one.found.shard, one.found.key
            rows.append((*names, f"{one.epoch}", f"{one.step:,}", log.note(one.found.key, one.step)))
        for held in trained.record["held_out"] or ():
            store, path = trained.store_of(held["dataset"], held["stage"], held["snapshot"])
            for found in find(store, path, column, frozenset([what])):
                name = held["dataset"]
                lines.append(f"{trained.run} validated on it ({name}, {found.key}), and learned nothing from it")
    forgotten = forgotten_urls(runs[0].checkpoint.folder.store)
    if column == "key":
        lines = [f"the URL of {key} is {url}" for url, key in urls.items()] + lines
    lines += [f"its licence, as its list says: {printable(one)}" for one in sorted(licenses - {None})]
    lines += [f"{shown_url(url)} was forgotten since" for url in urls if url in forgotten]
    names = "run", "dataset", "shard", "key", "epoch", "step", "note"
    return [*aligned(names, rows), *lines], bool(rows or lines)


class RunNotes:
    """What the logs of a run say about its samples, where they still are: docs/formats.md, Logs of a run."""

    def __init__(self, trained: Trained):
        run = trained.run
        store = next((one for one in trained.roots if one.exists(f"runs/{run}/metrics.jsonl")), None)
        names = ("metrics.jsonl", "unreadable.jsonl", "skipped.jsonl")
        lines, unreadable, skipped = ([*_lines(store, f"runs/{run}/{name}")] for name in names)
        self._skipped = {line["step"]: line["why"] for line in skipped}
        self._unreadable = {line["key"]: line for line in reversed(unreadable)}  # the first of each
        self._nameless = any(line["key"] is None for line in unreadable)
        self._lines = [(line["step"], line.get("unreadable", 0)) for line in lines if line["kind"] == "training"]

    def note(self, key: str, step: int) -> str:
        """What is known about this sample at this step beside that it was its turn; "" if it was read."""
        if step in self._skipped:
            return f"the step was skipped: {printable(self._skipped[step])}"
        line = self._unreadable.get(key)
        if line and (line["step"] == step or (line["step"] < step and " was forgotten since" in line["reason"])):
            return f"not read: {printable(line['reason'])}"
        if not (line and line["step"] < step) and not self._nameless:
            return ""
        missed = next((count for end, count in self._lines if end >= step), 0)
        return f"perhaps not read: {missed} samples of these steps could not be" if missed else ""


def _lines(store: ObjectStore | None, path: str) -> Iterator[dict]:
    if store is None or not store.exists(path):
        return
    for line in store.get(path).splitlines():
        try:
            yield parse_json(line, path)
        except ValueError:
            continue  # torn


def is_field(argument: str, settings: type) -> bool:
    """Whether an argument is field=value of these settings: a URL may have a `=`, too."""
    return argument.partition("=")[0] in [one.name for one in dataclasses.fields(settings)] and "=" in argument


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("vlbert whence", __doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    add_fields(parser, WhenceSettings)
    parser.usage = "%(prog)s CHECKPOINT [KEY|URL] [field=value ...]"
    options = parser.parse_args(arguments)
    what = [one for one in options.fields if not is_field(one, WhenceSettings)]
    try:
        settings = from_assignments(WhenceSettings, [one for one in options.fields if one not in what])
        if len(what) > 1:
            raise ValueError(f"{what[0]!r} and {what[1]!r} are given; ask about one URL or key, or all: out=FILE")
        runs, start = lineage(open_checkpoint(options.checkpoint, tensors=False), settings.root, settings.task_folder)
        print("\n".join(describe(runs, start)), flush=True)
        if settings.out:
            print(f"{export(runs, settings.out):,} rows in {settings.out}", flush=True)
        if what:
            lines, any_seen = tell(runs, what[0])
            print("\n".join(lines) or f"{shown_url(what[0])} was in nothing that these runs have seen", flush=True)
            if not any_seen:
                sys.exit(1)
    except (ValueError, OSError, ObjectMissing, StorageUnreachable, pa.ArrowException) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
