"""Measure what catalogs of millions of rows cost: seconds, requests and memory.

    python -m benchmarks.scale [--rows 3300000 12000000 100000000] [--root s3://bucket/prefix] [--json FILE]

The manifests and snapshots of one stage are real and lie in a folder, or below --root (an S3 as AWS_ENDPOINT_URL names
it). The tars that they name are a few zeros, which nothing here reads. Each line is measured in a process of its own,
so that nothing is known before.

    requests  as S3 counts them: a list of more than 1,000 objects takes several
    peak MB   the most memory that the process had, less what it had before
"""

import hashlib
import multiprocessing
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import machine, parser, shown, timed, write_json
from storage.catalog import Catalog
from storage.inventory import status
from storage.manifests import MANIFEST_VERSION, SCHEMA, table_bytes
from storage.object_store import ObjectInfo, ObjectStore, open_store
from storage.reading import ShardSamples
from storage.shards import SHARD_VERSION

DATASET, STAGE = "made-up", "regions/00000000beef"
NEW = 100  # one shard in so many is committed after the first snapshot
PARALLEL = 2  # processes that make manifests
_LISTED = 1000  # objects in one answer of a list


def put_manifest(root: str, shard: int, start: int, count: int) -> None:
    """Commit a shard of `count` rows. Keys and URLs are about as hard to compress as real ones."""
    rng, hash_of_tar = np.random.default_rng(shard), hashlib.sha256(b"%d" % shard).hexdigest()
    random, lengths = rng.bytes(18 * count).hex(), rng.integers(1, 4, count)
    digits = [random[at : at + 36] for at in range(0, len(random), 36)]
    columns = {
        "row": np.arange(start, start + count),
        "key": [each[:20] for each in digits],
        "status": ["ok"] * count,
        "detail": [""] * count,
        "url": [f"https://images{n % 977}.example.org/photos/{each[20:]}.jpg" for n, each in enumerate(digits)],
        "offset": np.cumsum(lengths) - lengths,
        "length": lengths.astype(np.int32),
        "width": np.full(count, 500, np.int32),
        "height": np.full(count, 375, np.int32),
        "num_regions": np.full(count, 36, np.int32),
        "sha256": [(3 * each)[:64] for each in digits],
        "license": pa.nulls(count, pa.string()),
    }
    header = {
        "stage": STAGE,
        "shard": f"{shard:05d}",
        "tar": f"{shard:05d}-{hash_of_tar[:12]}.tar",
        "tar_sha256": hash_of_tar,
        "tar_bytes": int(lengths.sum()),
        "content": hash_of_tar,
        "meta": {"random_init": False, "config": {f"field_{number}": number for number in range(30)}},
        "version": MANIFEST_VERSION,
        "shard_version": SHARD_VERSION,
        "statuses": {"ok": count},
    }
    store, folder = open_store(root), f"{DATASET}/{STAGE}"
    manifest = table_bytes(pa.table(columns, schema=SCHEMA), header)
    for name, content in ((header["tar"], bytes(header["tar_bytes"])), (f"{shard:05d}.parquet", manifest)):
        if (file := store.local_path(f"{folder}/{name}")) is None:
            store.put(f"{folder}/{name}", content)
        else:  # without waiting for the disk, which is not measured
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


class CountingStore:
    """A store that counts its requests."""

    def __init__(self, store: ObjectStore):
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("put", "get", "get_range", "exists", "delete"):
            return found

        def counted(*arguments: Any, **more: Any) -> Any:
            self.requests += 1
            return found(*arguments, **more)

        return counted

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(self._store.list(prefix)):
            self.requests += number % _LISTED == 0
            yield info


# --- what is measured: work(store, snapshot) --------------------------------------------------------------------------


def pin(store: Any, snapshot: str) -> str:
    return Catalog(store, DATASET).pin(STAGE).id


def show_status(store: Any, snapshot: str) -> None:
    assert any(line.startswith(DATASET) and STAGE in line for line in status(store))


def open_index(store: Any, snapshot: str) -> int:
    return len(ShardSamples(store, Catalog(store, DATASET).pinned(STAGE, snapshot)))


Work = Callable[[Any, str], Any]
MEASURED: tuple[tuple[str, Work], ...] = (
    ("pin a snapshot", pin),
    ("status", show_status),
    ("open an index", open_index),
    ("new shards: pin a snapshot", pin),
    ("new shards: open an index", open_index),
)


def measure(work: Work, root: str, snapshot: str) -> tuple[dict[str, float], Any]:
    """Return what the work costs in this process, and what it gives."""
    store = CountingStore(open_store(root))
    next(store.list("nothing"), None)  # a client of S3
    before, requests = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, store.requests
    spent = timed(lambda: work(store, snapshot))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    cost = {"seconds": spent.wall, "cpu_seconds": spent.cpu, "requests": store.requests - requests, "peak_mb": peak}
    return cost, spent.result


def measure_all(rows: int, per_shard: int, root: str) -> dict[str, dict[str, float]]:
    """Each line of a catalog that is made below `root`."""
    context = multiprocessing.get_context("spawn")
    shards = [(number, start, min(per_shard, rows - start)) for number, start in enumerate(range(0, rows, per_shard))]
    first_new, snapshot, costs = len(shards) - max(1, len(shards) // NEW), "", {}
    with (
        ProcessPoolExecutor(PARALLEL, context) as makers,
        ProcessPoolExecutor(1, context, max_tasks_per_child=1) as alone,
    ):

        def make(some: Sequence[tuple[int, int, int]]) -> None:
            list(makers.map(put_manifest, [root] * len(some), *zip(*some, strict=True)))

        make(shards[:first_new])
        print(f"{rows:,} rows in {len(shards):,} shards", flush=True)
        for what, work in MEASURED:
            if what == "new shards: pin a snapshot":
                make(shards[first_new:])
            costs[what], given = alone.submit(measure, work, root, snapshot).result()
            if work is pin:
                snapshot = given
            elif work is open_index:
                assert given == (rows if what.startswith("new shards") else shards[first_new][1]), given
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser("scale", __doc__)
    command.add_argument("--rows", type=int, nargs="+", default=[3_300_000, 12_000_000, 100_000_000])
    command.add_argument("--per-shard", type=int, default=1000, help="rows a shard (%(default)s)")
    command.add_argument("--root", help="s3://bucket/prefix, whose objects are removed at the end; else a folder")
    command.add_argument("--folder", type=Path, help="where files are meanwhile; else the temporary folder")
    options = command.parse_args(arguments)
    found: dict[int, dict[str, dict[str, float]]] = {}
    for rows in options.rows:
        with tempfile.TemporaryDirectory(prefix="scale-", dir=options.folder) as folder:
            root = f"{options.root.rstrip('/')}/{Path(folder).name}" if options.root else f"{folder}/root"
            try:
                found[rows] = measure_all(rows, options.per_shard, root)
            finally:
                store = open_store(root)
                for info in list(store.list()) if options.root else ():
                    store.delete(info.path)
        table = [["", "seconds", "CPU-s", "requests", "peak MB"]]
        for what, cost in found[rows].items():
            numbers = (f"{cost[name]:,.2f}" for name in ("seconds", "cpu_seconds"))
            table.append([what, *numbers, f"{cost['requests']:,}", f"{cost['peak_mb']:,.0f}"])
        print(shown(table), flush=True)
    write_json(options.json, {"machine": machine(), "per_shard": options.per_shard, "rows": found})


if __name__ == "__main__":
    main()
