"""Withdraw images by their URLs, and list every checkpoint that has seen them.

    vlbert forget ROOT URL ...                   or, one URL a line: urls=FILE
    vlbert catalog gc ROOT --delete             then: take their bytes out of the tars

From now on no snapshot and no collection under ROOT takes these URLs. URLs are compared as they stand in the lists. The
same command again changes nothing and prints the same list. docs/provenance.md says what is not reached.
"""

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.catalog import Catalog
from storage.forgotten import forget, is_among
from storage.inventory import Inventory, aligned
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable, open_store
from storage.old import add_fields, from_assignments, make_parser
from storage.redact import shown_url
from storage.runs import STATE
from storage.safe_json import printable
from vlbert.checkpoint import read_checkpoint
from vlbert.evaluation.provenance import Found, Trained, find, lineage, seen
from vlbert.evaluation.whence import is_field

_SHOWN = 5  # URLs that are named where there are many
_READERS = 8
SIGHTINGS = pa.schema(
    [
        pa.field("checkpoint", pa.string()),
        pa.field("run", pa.string()),
        pa.field("url", pa.string()),
        pa.field("key", pa.string()),
        pa.field("dataset", pa.string()),
        # Null where only the files of the task could tell: the checkpoint may have seen it.
        pa.field("times", pa.int64()),
        pa.field("first_step", pa.int64()),
        pa.field("last_step", pa.int64()),
    ]
)


@dataclass(frozen=True)
class ForgetSettings:
    """Which URLs beside those of the command line, and what to write."""

    urls: str | None = None  # file with a URL a line
    out: str | None = None  # Parquet file: checkpoint, run, url, key, dataset, times, first_step, last_step


def sightings(store: ObjectStore, urls: Collection[str]) -> tuple[pa.Table, list[str]]:
    """What each checkpoint under a root has seen of these URLs (SIGHTINGS), by its runs; and a line for each checkpoint
    of which that is not known."""
    rows, unknown, wanted = [], [], frozenset(urls)
    for _, steps in sorted(Inventory(store).states.items()):
        for _, path in sorted(steps.items()):
            folder = path.removesuffix(f"/{STATE}")
            try:
                checkpoint = read_checkpoint(store, folder, tensors=False)
                if not isinstance(checkpoint.state.get("data"), list):
                    continue  # a detector: it learned from the files of its annotations
                runs, start = lineage(checkpoint)
            except (ValueError, ObjectMissing) as error:
                unknown.append(f"{store.where(folder)}: {printable(error)}")
                continue
            if start:
                unknown.append(f"{store.where(folder)}: it started from {start['checkpoint']}, which does not say")
            for trained in runs:
                try:
                    found = [(one.use.dataset, one.found, one.step) for one in seen(trained, "url", wanted)]
                except ValueError as error:
                    unknown.append(f"{store.where(folder)}: {printable(error)}")
                    found = _perhaps(trained, wanted)
                rows += _rows(folder, trained.run, found)
    return pa.Table.from_pylist(rows, SIGHTINGS), unknown


def _perhaps(trained: Trained, urls: frozenset[str]) -> list[tuple[str, Found, None]]:
    """Samples of the snapshots that a run has read, if they are there."""
    found = []
    for use in trained.uses:
        for span in use.spans:
            try:
                store, path = trained.store_of(use.dataset, use.stage, span.snapshot)
            except ValueError:
                continue
            found += [(use.dataset, one, None) for one in find(store, path, "url", urls)]
    return found


def _rows(folder: str, run: str, found: Sequence[tuple[str, Found, int | None]]) -> list[dict]:
    steps: dict[tuple, list] = {}
    for dataset, sample, step in found:
        steps.setdefault((dataset, sample.key, sample.url), []).append(step)
    rows = []
    for (dataset, key, url), taken in steps.items():
        known = [step for step in taken if step is not None]
        times = (len(known), min(known), max(known)) if known else (None, None, None)
        values = folder, run, url, key, dataset, *times
        rows.append(dict(zip(SIGHTINGS.names, values, strict=True)))
    return rows


def occurrences(store: ObjectStore, urls: Collection[str]) -> dict[str, Counter[str]]:
    """DATASET/STAGE -> of each of these URLs how many rows have it that are committed now."""

    def hits(place: tuple[Catalog, str]) -> Counter[str]:
        found = Counter()
        for table in place[0].columns(place[1], ["url"]):
            found.update(table["url"].filter(is_among(table["url"], urls)).to_pylist())
        return found

    places = [(Catalog(store, name), stage) for name, stage in Inventory(store).manifests]
    with ThreadPoolExecutor(_READERS) as pool:
        counts = pool.map(hits, places)
        return {f"{one.dataset}/{stage}": found for (one, stage), found in zip(places, counts, strict=True)}


def read_urls(file: str) -> list[str]:
    """The URLs of a file, one a line; ValueError if it cannot be read, or holds none."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"urls={file} cannot be read: {error}; name a file with a URL a line") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ValueError(f"urls={file} holds no URL; write one a line")
    return found


def report(store: ObjectStore, table: pa.Table, unknown: Sequence[str], count: int) -> list[str]:
    """The list of checkpoints, for people."""
    rows = []
    for checkpoint in sorted({*table["checkpoint"].to_pylist()}):
        ours = table.filter(pc.equal(table["checkpoint"], checkpoint))
        for run in dict.fromkeys(ours["run"].to_pylist()):
            of_run = ours.filter(pc.equal(ours["run"], run))
            first = pc.min(of_run["first_step"]).as_py()
            number = len({*of_run["url"].to_pylist()})
            rows.append((checkpoint, run, f"{number:,} of {count:,}", "perhaps" if first is None else f"{first:,}"))
    lines = aligned(("checkpoint", "learned in run", "URLs", "first at step"), rows)
    if not rows:
        lines.append(f"no checkpoint under {store.where()} has seen any of them, as far as is known")
    return lines + [f"not known of {line}" for line in unknown]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("vlbert forget", __doc__)
    parser.add_argument("root", metavar="ROOT", help="a folder or s3://bucket/prefix")
    add_fields(parser, ForgetSettings)
    parser.usage = "%(prog)s ROOT URL ... [field=value ...]"
    options = parser.parse_args(arguments)
    urls = [one for one in options.fields if not is_field(one, ForgetSettings)]
    try:
        settings = from_assignments(ForgetSettings, [one for one in options.fields if one not in urls])
        wanted = [*dict.fromkeys(urls + (read_urls(settings.urls) if settings.urls else []))]
        if not wanted:
            raise ValueError("no URL is given: name some, or a file with one a line: urls=FILE")
        found = open_store(options.root, write=False)  # makes no folder
        if next(iter(found.list()), None) is None:
            raise ValueError(f"{found.where()} holds nothing; see how the root's name is written")
        store = open_store(options.root)
        new = forget(store, wanted)
        print(f"{len(new):,} URLs are forgotten now, {len(wanted) - len(new):,} were before", flush=True)
        found = occurrences(store, wanted)
        listed = {url for of_stage in found.values() for url in of_stage}
        missing = [url for url in wanted if url not in listed]
        if missing:
            shown = ", ".join(map(shown_url, missing[:_SHOWN])) + (" ..." if len(missing) > _SHOWN else "")
            print(f"in no list under {store.where()} are {len(missing):,} of them: {shown}", flush=True)
        rows = [f"{count.total():,} of {place}" for place, count in sorted(found.items()) if count]
        if rows:  # a name may be another image's in another dataset
            print(f"rows that have them: {', '.join(rows)}", flush=True)
        table, unknown = sightings(store, wanted)
        print("\n".join(report(store, table, unknown, len(wanted))), flush=True)
        if settings.out:
            pq.write_table(table, settings.out)
        print(f"to take their bytes out of the tars: vlbert catalog gc {options.root} --delete", flush=True)
    except (ValueError, OSError, ObjectMissing, StorageUnreachable) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
