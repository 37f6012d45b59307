"""Measure the cost of catalogs with millions of rows: seconds, requests and memory.

    python -m benchmarks.scale [--rows 3300000 12000000 100000000] [--root s3://bucket/prefix] [--json FILE]

The manifests and snapshots of one stage are real, and are stored in a folder or below --root (an S3 service at
AWS_ENDPOINT_URL). Their tar files contain only a few zeros and are never read. Each line is measured in a new process,
so that nothing is cached in memory.

    requests  as counted by S3: listing more than 1,000 objects takes several
    peak MB   peak memory of the process, minus its memory before the measurement
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

from benchmarks.measure import describe_machine, format_table, make_parser, measure_call, write_json
from storage.catalog import Catalog
from storage.inventory import status
from storage.manifests import MANIFEST_VERSION, SCHEMA, table_bytes
from storage.object_store import ObjectInfo, ObjectStore, open_store
from storage.reading import ShardSamples
from storage.shards import SHARD_VERSION

DATASET, STAGE = "made-up", "regions/00000000beef"
NEW = 100  # one in this many shards is committed after the first snapshot
PARALLEL = 2  # processes that write manifests
_LISTED = 1000  # objects per response to a list request


def put_manifest(root: str, shard: int, start: int, count: int) -> None:
    """Commit a shard of `count` rows, numbered from `start`. Keys and URLs compress about as well as real ones."""
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
        else:  # without fsync: writing is not measured
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


class CountingStore:
    """A wrapper of a store that counts its requests."""

    def __init__(self, store: ObjectStore):
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if name not in ("put", "get", "get_range", "exists", "delete"):
            return attribute

        def count(*arguments: Any, **options: Any) -> Any:
            self.requests += 1
            return attribute(*arguments, **options)

        return count

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(self._store.list(prefix)):
            self.requests += number % _LISTED == 0
            yield info


# --- measured functions: function(store, snapshot) --------------------------------------------------------------------


def pin(store: Any, snapshot: str) -> str:
    return Catalog(store, DATASET).pin(STAGE).id


def show_status(store: Any, snapshot: str) -> None:
    assert any(line.startswith(DATASET) and STAGE in line for line in status(store))


def open_index(store: Any, snapshot: str) -> int:
    return len(ShardSamples(store, Catalog(store, DATASET).pinned(STAGE, snapshot)))


Measured = Callable[[Any, str], Any]
MEASURED: tuple[tuple[str, Measured], ...] = (
    ("pin a snapshot", pin),
    ("status", show_status),
    ("open an index", open_index),
    ("new shards: pin a snapshot", pin),
    ("new shards: open an index", open_index),
)


def measure(function: Measured, root: str, snapshot: str) -> tuple[dict[str, float], Any]:
    """Call function(store, snapshot) in this process. Return its cost (seconds, requests, memory) and its result."""
    store = CountingStore(open_store(root))
    next(store.list("nothing"), None)  # creates the S3 client before the measurement
    before, requests = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, store.requests
    timing = measure_call(lambda: function(store, snapshot))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    cost = {"seconds": timing.wall, "cpu_seconds": timing.cpu, "requests": store.requests - requests, "peak_mb": peak}
    return cost, timing.result


def measure_all(rows: int, per_shard: int, root: str) -> dict[str, dict[str, float]]:
    """Create a catalog of `rows` rows below `root`, and return the costs of the functions in MEASURED, by name."""
    context = multiprocessing.get_context("spawn")
    shards = [(number, start, min(per_shard, rows - start)) for number, start in enumerate(range(0, rows, per_shard))]
    first_new, snapshot, costs = len(shards) - max(1, len(shards) // NEW), "", {}
    with (
        ProcessPoolExecutor(PARALLEL, context) as writers,
        ProcessPoolExecutor(1, context, max_tasks_per_child=1) as measurer,
    ):

        def put_manifests(part: Sequence[tuple[int, int, int]]) -> None:
            list(writers.map(put_manifest, [root] * len(part), *zip(*part, strict=True)))

        put_manifests(shards[:first_new])
        print(f"{rows:,} rows in {len(shards):,} shards", flush=True)
        for name, function in MEASURED:
            if name == "new shards: pin a snapshot":
                put_manifests(shards[first_new:])
            costs[name], result = measurer.submit(measure, function, root, snapshot).result()
            if function is pin:
                snapshot = result
            elif function is open_index:
                assert result == (rows if name.startswith("new shards") else shards[first_new][1]), result
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    command = make_parser("scale", __doc__)
    command.add_argument("--rows", type=int, nargs="+", default=[3_300_000, 12_000_000, 100_000_000])
    command.add_argument("--per-shard", type=int, default=1000, help="rows per shard (%(default)s)")
    command.add_argument("--root", help="s3://bucket/prefix, whose objects are removed at the end; else a folder")
    command.add_argument("--folder", type=Path, help="folder for temporary files; else the system's temporary folder")
    options = command.parse_args(arguments)
    costs: dict[int, dict[str, dict[str, float]]] = {}
    for rows in options.rows:
        with tempfile.TemporaryDirectory(prefix="scale-", dir=options.folder) as folder:
            root = f"{options.root.rstrip('/')}/{Path(folder).name}" if options.root else f"{folder}/root"
            try:
                costs[rows] = measure_all(rows, options.per_shard, root)
            finally:
                store = open_store(root)
                for info in list(store.list()) if options.root else ():
                    store.delete(info.path)
        table = [["", "seconds", "CPU-s", "requests", "peak MB"]]
        for name, cost in costs[rows].items():
            seconds = (f"{cost[key]:,.2f}" for key in ("seconds", "cpu_seconds"))
            table.append([name, *seconds, f"{cost['requests']:,}", f"{cost['peak_mb']:,.0f}"])
        print(format_table(table), flush=True)
    write_json(options.json, {"machine": describe_machine(), "per_shard": options.per_shard, "rows": costs})


if __name__ == "__main__":
    main()
