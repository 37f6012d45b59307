"""What catalogs of millions of rows cost: seconds, requests and memory of each stage's look at them.

    python -m benchmarks.scale [--rows 3300000 12000000 100000000] [--root s3://bucket/prefix] [--json FILE]

The manifests and snapshots of one stage are real and lie in a folder, or below --root (an S3 as AWS_ENDPOINT_URL names
it). The tars that they name are made up: a listing shows them, and a read gets drawn samples at the offsets that the
manifests have. Each line is measured in a process of its own, so that nothing is known before.

    requests  as S3 counts them: a list of more than 1,000 objects takes several
    peak MB   memory of the process's own, at most, above what it had before; pages of files are not counted
    kept MB   the same at the end, with what the work returned

The last table has the growth of each cost from the smallest catalog to the largest, over the growth of the rows: 1 is
in proportion.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.measure import machine, parser, shown, timed, write_json
from benchmarks.synthetic import CLASSES, DETECTOR, drawn_sample, made_up_vocabulary
from storage.catalog import Catalog
from storage.garbage import collect_garbage
from storage.inventory import Inventory, status
from storage.manifests import MANIFEST_VERSION, SCHEMA, table_bytes
from storage.object_store import Content, ObjectInfo, ObjectStore, open_store
from storage.reading import ShardSamples
from storage.runs import CHECKPOINT_VERSION, CONFIG, STATE, as_json, checkpoints, file_hash, folder_of, sealed_json
from storage.settings import to_json
from storage.shards import SHARD_VERSION, index_shard, write_shard
from storage.snapshots import read_columns
from training.checkpoint import MODEL
from training.distributed import World
from vlbert.checkpoint import read_checkpoint
from vlbert.config import DataConfig, RegionConfig
from vlbert.data.loading import TrainingData, TrainingDataset
from vlbert.data.order import SnapshotSpan
from vlbert.data.samples import newer_snapshot
from vlbert.evaluation.whence import lineage, record_of, tell
from vlbert.evaluation.withdraw import sightings, withdraw_urls
from vlbert.recipes import RECIPES
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

DATASET, STAGE = "made-up", f"regions/{DETECTOR}"
SEED, EPOCH = 0, 2  # a run resumes in the middle of this epoch
DRAWN = 16  # samples that all made-up tars consist of
NEW = 100  # one shard in so many is new: committed after the training began
PARALLEL = 2  # processes that make manifests
_PAGE = 1000  # objects in one answer of a list
_PART = 8 << 20  # bytes in one request of a large put


@functools.cache
def drawn_spans() -> list[bytes]:
    """Samples as they lie in a tar."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "00000.tar")
        write_shard((drawn_sample(number, None, (64, 48)) for number in range(DRAWN)), file)
        data = file.read_bytes()
        return [data[span.offset : span.offset + span.length] for span in index_shard(file)]


@dataclass(frozen=True)
class MadeUp:
    """A stage of `rows` rows, `per_shard` in each shard. `lengths`: of the drawn samples, in bytes."""

    rows: int
    per_shard: int
    lengths: tuple[int, ...]

    @property
    def shards(self) -> int:
        return -(-self.rows // self.per_shard)

    @property
    def first_new(self) -> int:
        """The first of the shards that are committed after the training began."""
        return self.shards - max(1, self.shards // NEW)

    def rows_of(self, shard: int) -> int:
        return min(self.per_shard, self.rows - shard * self.per_shard)

    def drawn(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Which drawn sample each row of a shard is, and where it begins; one offset more than rows."""
        numbers = np.random.default_rng((4, shard)).integers(0, DRAWN, self.rows_of(shard))
        return numbers, np.concatenate([[0], np.cumsum(np.array(self.lengths)[numbers])])

    def tar_sha256(self, shard: int) -> str:
        return hashlib.sha256(b"%d" % shard).hexdigest()

    def tar(self, shard: int) -> str:
        return f"{shard:05d}-{self.tar_sha256(shard)[:12]}.tar"

    def tar_bytes(self, shard: int) -> int:
        return int(self.drawn(shard)[1][-1])

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """These bytes of a made-up tar."""
        numbers, offsets = self.drawn(shard)
        first = int(np.searchsorted(offsets, offset, "right")) - 1
        last = int(np.searchsorted(offsets, offset + length))
        start = offset - int(offsets[first])
        return b"".join(drawn_spans()[number] for number in numbers[first:last])[start : start + length]

    def manifest(self, shard: int) -> bytes:
        """Keys and URLs are about as hard to compress as real ones."""
        count, start = self.rows_of(shard), shard * self.per_shard
        numbers, offsets = self.drawn(shard)
        random = np.random.default_rng((5, shard)).bytes(18 * count).hex()
        digits = [random[at : at + 36] for at in range(0, len(random), 36)]
        columns = {
            "row": np.arange(start, start + count),
            "key": [each[:20] for each in digits],
            "status": ["ok"] * count,
            "detail": [""] * count,
            "url": [f"https://images{n % 977}.example.org/photos/{each[20:]}.jpg" for n, each in enumerate(digits)],
            "offset": offsets[:-1],
            "length": np.diff(offsets).astype(np.int32),
            "width": np.full(count, 500, np.int32),
            "height": np.full(count, 375, np.int32),
            "num_regions": np.full(count, 36, np.int32),
            "sha256": [(3 * each)[:64] for each in digits],
            "license": pa.nulls(count, pa.string()),
        }
        header = {
            "stage": STAGE,
            "shard": f"{shard:05d}",
            "tar": self.tar(shard),
            "tar_sha256": self.tar_sha256(shard),
            "tar_bytes": int(offsets[-1]),
            "content": self.tar_sha256(shard),
            "meta": {"random_init": False, "config": {f"field_{number}": number for number in range(30)}},
            "version": MANIFEST_VERSION,
            "shard_version": SHARD_VERSION,
            "statuses": {"ok": count},
        }
        return table_bytes(pa.table(columns, schema=SCHEMA), header)


class MadeUpTars:
    """A store that also shows the tars of the manifests that it holds, and counts requests."""

    def __init__(self, store: ObjectStore, made_up: MadeUp):
        self._store, self._made_up = store, made_up
        self._counting = threading.Lock()
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _count(self, requests: int = 1) -> None:
        with self._counting:
            self.requests += requests

    def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
        size = data.stat().st_size if isinstance(data, Path) else 0
        self._count(1 + size // _PART)
        return self._store.put(path, data, if_absent=if_absent)

    def get(self, path: str) -> bytes:
        self._count()
        return self._store.get(path)

    def exists(self, path: str) -> bool:
        self._count()
        return self._store.exists(path)

    def delete(self, path: str) -> None:
        self._count()
        self._store.delete(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        self._count()
        if path.endswith(".tar"):
            return self._made_up.read(int(path.rpartition("/")[2][:5]), offset, length)
        return self._store.get_range(path, offset, length)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = f"{DATASET}/{STAGE}/"
        for number, info in enumerate(self._store.list(prefix)):
            name = info.path.removeprefix(folder)
            if name.endswith(".parquet") and len(name) == len("00000.parquet"):
                tar = folder + self._made_up.tar(int(name[:5]))
                if tar.startswith(prefix):
                    yield ObjectInfo(tar, self._made_up.tar_bytes(int(name[:5])), info.modified)
            self._count(number % _PAGE == 0)
            yield info


def put_manifests(root: str, made_up: MadeUp, shards: range) -> None:
    """Commit these shards. In a folder without waiting for the disk, which is not measured."""
    store = open_store(root)
    for shard in shards:
        path = f"{DATASET}/{STAGE}/{shard:05d}.parquet"
        if (file := store.local_path(path)) is None:
            store.put(path, made_up.manifest(shard))
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(made_up.manifest(shard))


def processes() -> multiprocessing.context.BaseContext:
    """New processes that have torch imported, and nothing done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.synthetic", "vlbert.data.loading"])
    return context


def make(root: str, made_up: MadeUp, first: int, stop: int) -> None:
    with ProcessPoolExecutor(PARALLEL, processes()) as pool:
        parts = [range(first + part, stop, PARALLEL) for part in range(PARALLEL)]
        list(pool.map(put_manifests, itertools.repeat(root), itertools.repeat(made_up), parts))


# --- what is measured: work(store, made_up, snapshot) does it and returns what is kept --------------------------------


def pin(store: ObjectStore, made_up: MadeUp, snapshot: str) -> str:
    return Catalog(store, DATASET).pin(STAGE).id


def show_status(store: ObjectStore, made_up: MadeUp, snapshot: str) -> str:
    (line,) = [line for line in status(store) if line.startswith(DATASET) and STAGE in line and "ok" in line]
    assert f"{made_up.first_new * made_up.per_shard:,}" in line, line
    return line


def open_index(store: ObjectStore, made_up: MadeUp, snapshot: str) -> ShardSamples:
    return ShardSamples(store, Catalog(store, DATASET).pinned(STAGE, snapshot))


def training(store: ObjectStore, made_up: MadeUp, snapshot: str) -> TrainingData:
    """As a run that goes on in the middle of an epoch."""
    samples = open_index(store, made_up, snapshot)
    task = Pretraining(PretrainingSettings(), made_up_vocabulary(), CLASSES)
    config = DataConfig(root="", datasets={DATASET: None}, text_batch=0, seed=SEED, new_shards_every=1)
    spans = [SnapshotSpan(0, 0, len(samples), snapshot)]
    dataset = TrainingDataset(samples, task.examples(samples, None), spans)
    regions = RegionConfig(short_side=48, long_side=64)  # decoding is not measured here
    return TrainingData([dataset], task, config, regions, World(0, 1, torch.device("cpu")))


def first_batch(store: ObjectStore, made_up: MadeUp, snapshot: str) -> TrainingData:
    data = training(store, made_up, snapshot)
    (batch,) = data[int((EPOCH + 0.5) * len(data.datasets[0].samples)) // data.config.batch]
    assert len(batch.keys) == data.config.batch
    assert not batch.unreadable
    return data


def enter(data: TrainingData) -> TrainingData:
    """New shards enter, as vlbert.train lets them."""
    (dataset,) = data.datasets
    store, index, task = dataset.samples.store, dataset.samples.index, data.task
    found = newer_snapshot(store, DATASET, index.snapshot)
    samples = ShardSamples(store, Catalog(store, DATASET).pinned(STAGE, found))
    data.enter(0, samples, task.examples(samples, None), found, (EPOCH + 1) * len(index))
    return data


def collect(store: ObjectStore, made_up: MadeUp, snapshot: str) -> list[str]:
    """Nothing names the snapshot before the newest, nor the orphans."""
    lines = collect_garbage(store, 0, delete=True)
    assert sum("orphan tar" in line for line in lines) == max(1, made_up.shards // NEW), lines[-1]
    assert sum("unpinned snapshot" in line for line in lines) == 1, lines[-1]
    return lines


def checkpoints_of(store: ObjectStore, made_up: MadeUp, snapshot: str) -> tuple[ObjectStore, list[str]]:
    """Two runs of ten epochs with two checkpoints each, the second one started from the first; and every so many-th URL
    of their snapshot, 1,000 in all."""
    newest = Inventory(store).newest(DATASET, STAGE)
    path = f"{DATASET}/{STAGE}/snapshots/{newest}.parquet"
    urls = [url for table in read_columns(store, path, ["url"]) for url in table["url"].to_pylist()]
    recipe = RECIPES["pretrain_vlbert"]()
    config = {"version": CHECKPOINT_VERSION, "model": to_json(recipe.model), "vocab_size": 1, "num_classes": CLASSES}
    before = None
    for run in ("first", "second"):
        own = dataclasses.replace(recipe, run_name=run)
        config |= {"task": type(recipe.task).__name__, "recipe": to_json(own)}
        spans = [asdict(SnapshotSpan(0, 0, len(urls), newest))]
        data = [{"dataset": DATASET, "stage": STAGE, "random_init": False, "weight": 1.0, "snapshots": spans}]
        for step in (len(urls) // recipe.data.batch, 10 * len(urls) // recipe.data.batch):
            folder, files = folder_of(run, step), {CONFIG: as_json(config), MODEL: b""}
            for name, content in files.items():
                store.put(f"{folder}/{name}", content)
            hashes = {name: file_hash([content]) for name, content in files.items()}
            state = {"version": CHECKPOINT_VERSION, "step": step, "seed": SEED, "data": data, "held_out": []}
            store.put(f"{folder}/{STATE}", sealed_json(state | {"files": hashes, "init_from": before}))
        before = record_of(read_checkpoint(store, folder, tensors=False))
    return store, urls[:: max(1, len(urls) // 1000)][:1000]


def tell_one(prepared: tuple[ObjectStore, list[str]]) -> list[str]:
    """As `vlbert whence CHECKPOINT URL`: every step of twenty epochs."""
    store, urls = prepared
    runs, _ = lineage(read_checkpoint(store, checkpoints(store, "second")[-1], tensors=False))
    lines, _ = tell(runs, urls[len(urls) // 2])
    assert len(lines) == 1 + 20, lines
    return lines


def withdraw_many(prepared: tuple[ObjectStore, list[str]]) -> list[str]:
    """As `vlbert withdraw ROOT --urls FILE`, without writing the tars again."""
    store, urls = prepared
    new, rows, every = withdraw_urls(store, urls)
    assert len(new.urls) == len(urls) == len(rows) == len(every)
    return sightings(store, every)


Work = Callable[[ObjectStore, MadeUp, str], Any]
MEASURED: dict[str, tuple[Work, Work | None]] = {  # name -> what is done before, and what is measured
    "pin a snapshot": (pin, None),
    "status": (show_status, None),
    "open an index, first process": (open_index, None),
    "open an index, second process": (open_index, None),
    "first batch after a resume": (first_batch, None),
    "new shards enter": (training, lambda data: enter(data)),
    "gc --delete": (collect, None),
    "whence of one URL": (checkpoints_of, tell_one),
    "withdraw 1,000 URLs": (checkpoints_of, withdraw_many),
}


# --- how --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Of one line and one catalog."""

    seconds: float
    cpu_seconds: float
    requests: int
    peak_mb: float
    kept_mb: float


def own_mb() -> float:
    """Memory of this process alone: no pages of files, which the machine's processes share and the kernel may drop."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1000


@contextlib.contextmanager
def peak_mb(found: list[float]) -> Iterator[None]:
    """Appends the most memory of this process's own meanwhile, looked at a hundred times a second."""
    done, most = threading.Event(), [own_mb()]

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], own_mb())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()
        found.append(max(most[0], own_mb()))


def _measure(pipe: Connection, what: str, root: str, made_up: MadeUp, snapshot: str, folder: str) -> None:
    tempfile.tempdir = folder  # for the file of the index, too
    drawn_spans()
    torch.set_num_threads(1)
    store = MadeUpTars(open_store(root), made_up)
    next(store.list("nothing"), None)  # a client of S3
    prepare, work = MEASURED[what]
    arguments = store, made_up, snapshot
    if work is not None:
        prepared = prepare(*arguments)
        prepare, arguments = work, (prepared,)
    before, requests, peak = own_mb(), store.requests, []
    with peak_mb(peak):
        spent = timed(lambda: prepare(*arguments))
    cost = Cost(spent.wall, spent.cpu, store.requests - requests, peak[0] - before, own_mb() - before)
    pipe.send((cost, spent.result if isinstance(spent.result, str) else ""))


def measured(what: str, root: str, made_up: MadeUp, snapshot: str, folder: str) -> tuple[Cost, str]:
    """In a process of its own; what it costs, and the text that it returned. folder: for its temporary files."""
    context = processes()
    here, there = context.Pipe()
    process = context.Process(target=_measure, args=(there, what, root, made_up, snapshot, folder))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise RuntimeError(f"{what}: the process ended early; its error stands above") from None
    finally:
        process.join()


def measure_all(root: str, made_up: MadeUp, folder: str) -> dict[str, Cost]:
    """Each line of a catalog that is made below `root`."""
    start = time.perf_counter()
    make(root, made_up, 0, made_up.first_new)
    print(
        f"{made_up.rows:,} rows in {made_up.shards:,} shards, made in {time.perf_counter() - start:.0f} s", flush=True
    )
    costs, snapshot = {}, ""
    for what in MEASURED:
        if what == "new shards enter":
            make(root, made_up, made_up.first_new, made_up.shards)
        if what == "gc --delete":
            store = open_store(root)
            for number in range(max(1, made_up.shards // NEW)):
                store.put(f"{DATASET}/{STAGE}/{number:05d}-000000000000.tar", b"")
        costs[what], text = measured(what, root, made_up, snapshot, folder)
        snapshot = snapshot or text
        cost = costs[what]
        line = f"{cost.seconds:9.2f} s {cost.cpu_seconds:9.2f} CPU-s {cost.requests:9,} requests"
        print(f"  {what:<32}{line} {cost.peak_mb:8.0f} peak MB {cost.kept_mb:8.0f} kept MB", flush=True)
    return costs


def growth(found: dict[int, dict[str, Cost]]) -> list[list[str]]:
    """From the smallest catalog to the largest: the growth of each cost over the growth of the rows."""
    smallest, largest = min(found), max(found)
    rows = [[f"growth over that of rows, {smallest:,} to {largest:,}", "CPU-s", "requests", "peak MB"]]
    for what, after in found[largest].items():
        before, times = found[smallest][what], largest / smallest
        ratios = [
            getattr(after, name) / max(getattr(before, name), 0.01) / times
            for name in ("cpu_seconds", "requests", "peak_mb")
        ]
        rows.append([what, *(f"{ratio:.2f}" for ratio in ratios)])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser("scale", __doc__)
    command.add_argument("--rows", type=int, nargs="+", default=[3_300_000, 12_000_000, 100_000_000])
    command.add_argument("--per-shard", type=int, default=1000, help="rows a shard (%(default)s)")
    command.add_argument("--root", help="s3://bucket/prefix, whose objects are removed at the end; else a folder")
    command.add_argument("--folder", type=Path, help="where files are meanwhile; else the temporary folder")
    options = command.parse_args(arguments)
    lengths, found = tuple(map(len, drawn_spans())), {}
    for rows in options.rows:
        made_up = MadeUp(rows, options.per_shard, lengths)
        with tempfile.TemporaryDirectory(prefix="scale-", dir=options.folder) as folder, _root(options, folder) as root:
            found[rows] = measure_all(root, made_up, folder)
    print("\n" + shown(growth(found)))
    figures = {rows: {what: asdict(cost) for what, cost in costs.items()} for rows, costs in found.items()}
    write_json(options.json, {"machine": machine(), "per_shard": options.per_shard, "rows": figures})


@contextlib.contextmanager
def _root(options: argparse.Namespace, folder: str) -> Iterator[str]:
    """An empty root, in the folder or below the one that is given there; then its objects are removed."""
    if options.root is None:
        yield f"{folder}/root"
        return
    store = open_store(f"{options.root.rstrip('/')}/{Path(folder).name}")
    try:
        yield store.root
    finally:
        for info in list(store.list()):
            store.delete(info.path)


if __name__ == "__main__":
    main()
