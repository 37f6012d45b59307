"""How fast the data path is: reading, decoding and masking, order, index, text; beside webdataset's own reader.

    python -m benchmarks.loader [--samples 4000 --rounds 5] [--json FILE]

Shards are drawn and committed as the stages commit them: JPEGs of 500 x 375 pixels and about 50 kB, 36 regions with the
distribution over 1,600 classes that a detector leaves. Contenders read them in turns, from the page cache, on one
thread. All speeds are per CPU-second, so that other work on the machine counts little. The exit status is 1 where a bar
of the table is not met.
"""

import argparse
import io
import itertools
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import webdataset
from PIL import Image

from storage.catalog import Catalog
from storage.manifests import Header, Row
from storage.object_store import ObjectStore, open_store
from storage.order import shuffled, take
from storage.reading import ShardSamples
from storage.sample import Regions, Sample, from_members, sample_key
from storage.shards import span_members
from storage.snapshots import ShardIndex, write_snapshot
from training.distributed import World
from vlbert.config import DataConfig, RegionConfig
from vlbert.data.corpus import TextCorpus, encode_corpus
from vlbert.data.images import prepare_image
from vlbert.data.loading import CAPTIONS, TEXT, SnapshotSpan, TrainingData, drawn, generator
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

DETECTOR, STAGE = "00000000beef", "regions/00000000beef"
CAPTION = "a man in red shirt rides the brown horse over green field while two dogs run beside him on sunny day"
WORDS = CAPTION.split()


@dataclass(frozen=True)
class Line:
    """One line of the table; bar: at least so much (at_least) or at most. None: only reported."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = True

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        met = self.value >= self.bar if self.at_least else self.value <= self.bar
        return f"{'pass' if met else 'FAIL'}, {'at least' if self.at_least else 'at most'} {self.bar:g}"


def drawn_jpeg(number: int) -> bytes:
    """A photograph of nothing: soft patches of colour and grain, 500 x 375 pixels, about 50 kB."""
    rng = np.random.default_rng(number)
    patches = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((500, 375), Image.BICUBIC)
    pixels = np.asarray(patches, np.float32) + rng.normal(0, 11, (375, 500, 3))
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "jpeg", quality=80)
    return stream.getvalue()


def commit_drawn(store: ObjectStore, samples: int, per_shard: int) -> int:
    """Commit so many samples; bytes of a JPEG, on average."""
    jpegs = [drawn_jpeg(number) for number in range(min(samples, 64))]

    def drawn(number: int) -> Sample:
        rng = np.random.default_rng(number)
        corners = np.sort(rng.uniform(0, 1, (36, 2, 2)), axis=1) * (490, 365) + [[0, 0], [9, 9]]
        probs = rng.random((36, 1601), np.float32)
        url, caption = f"http://example.org/{number}.jpg", " ".join(rng.choice(WORDS, 12))
        regions = Regions(
            boxes=corners.reshape(36, 4).astype(np.float32),
            scores=np.sort(rng.random(36, np.float32))[::-1],
            labels=probs[:, 1:].argmax(axis=1).astype(np.int32) + 1,
            detector=DETECTOR,
            class_probs=(probs / probs.sum(axis=1, keepdims=True)).astype(np.float16),
        )
        return Sample(
            key=sample_key(url, caption),
            image=jpegs[number % len(jpegs)],
            caption=caption,
            url=url,
            width=500,
            height=375,
            sha256="0" * 64,
            regions=regions,
        )

    for shard, start in enumerate(range(0, samples, per_shard)):
        part = [drawn(number) for number in range(start, min(start + per_shard, samples))]
        rows = [Row(start + place, sample.key, "ok", url=sample.url) for place, sample in enumerate(part)]
        Catalog(store, "captions").commit(STAGE, f"{shard:05d}", part, rows, {"random_init": False})
    return sum(map(len, jpegs)) // len(jpegs)


def opened(store: ObjectStore) -> ShardSamples:
    """All that commit_drawn committed."""
    catalog = Catalog(store, "captions")
    return ShardSamples(store, catalog.pinned(STAGE, catalog.pin(STAGE).id))


def rates(contenders: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Name -> how many of what it returns each does in a CPU-second: the median of rounds in turns."""
    found = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            start = time.process_time()
            count = work()
            found[name].append(count / (time.process_time() - start))
    return {name: statistics.median(values) for name, values in found.items()}


def read_speed(samples: ShardSamples, rounds: int) -> list[Line]:
    """Random reads through the index beside webdataset's reader, which reads from the first sample to the last."""
    tars = [str(samples.store.local_path(tar)) for tar in samples.index.tars]
    index, epochs = samples.index, itertools.count()

    def order() -> list[int]:
        return shuffled(np.arange(len(samples)), 0, CAPTIONS, next(epochs), len(samples)).tolist()

    def indexed_members() -> int:
        for number in order():
            where = int(index.shard[number]), int(index.offset[number]), int(index.length[number])
            assert len(span_members(samples.read(*where))[1]) == 3
        return len(samples)

    def indexed_samples() -> int:
        for number in order():
            assert samples.sample(number).regions is not None
        return len(samples)

    def their_members() -> int:
        return sum(len(members) == 3 + 3 for members in webdataset.WebDataset(tars, shardshuffle=False))

    def their_samples() -> int:
        count = 0
        for members in webdataset.WebDataset(tars, shardshuffle=False):
            contents = {extension: members[extension] for extension in ("jpg", "json", "mp")}
            count += from_members(members["__key__"], contents).regions is not None
        return count

    lines = []
    for what, contenders in {
        "members": {"ours": indexed_members, "theirs": their_members},
        "Samples": {"ours": indexed_samples, "theirs": their_samples},
    }.items():
        found = rates(contenders, rounds)
        lines += [
            Line(f"{what}, indexed random reads", found["ours"], "samples/CPU-s"),
            Line(f"{what}, webdataset in sequence", found["theirs"], "samples/CPU-s"),
            # What unpacks a Sample is the same on both sides.
            Line("  ratio", found["ours"] / found["theirs"], "x", 3 if what == "members" else None),
        ]
    return lines


def full_speed(samples: ShardSamples, vocabulary: Vocabulary, count: int, rounds: int) -> list[Line]:
    """Read, decode, resize, mask: alone, and made to batches as a training does."""
    torch.set_num_threads(1)  # as in a loading worker
    task = Pretraining(PretrainingSettings(), vocabulary, samples.sample(0).regions.num_classes)
    config, regions = DataConfig(batch=16, workers=0), RegionConfig()
    data = TrainingData(samples, task.questions(samples, None), task, config, regions, World(0, 1, torch.device("cpu")))
    steps = itertools.count()
    places = itertools.count()

    def examples() -> int:
        order = shuffled(np.arange(count) + count * next(places), 0, CAPTIONS, 0, 2**30) % len(samples)
        for number in order.tolist():
            sample = samples.sample(number)
            rng = generator(0, CAPTIONS, 0, sample.key)
            task.example(sample, prepare_image(sample, regions, flip=False), None, rng)
        return count

    def batched() -> int:
        for _ in range(-(-count // config.batch)):
            data[next(steps)]
        return -(-count // config.batch) * config.batch

    found = rates({"examples": examples, "batches": batched}, rounds)
    return [
        Line("read, decode, resize to 600/1000, mask", found["examples"], "images/s/core", 200),
        Line("the same, made to batches of 16", found["batches"], "images/s/core"),
    ]


def order_speed(n: int, rounds: int) -> list[Line]:
    """The order of a whole epoch, and of the batch at a random place of a random epoch, on the wall's clock."""

    def timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    rng = np.random.default_rng(0)
    lines = []
    for chunk in (1, 8):
        whole = [timed(lambda: shuffled(np.arange(n), 0, CAPTIONS, 3, n, chunk)) for _ in range(rounds)]  # noqa: B023
        starts = rng.integers(0, 40 * n, 200).tolist()
        seeks = [timed(lambda: drawn([SnapshotSpan(0, 0, n, "")], start, 256, 0, chunk)) for start in starts]  # noqa: B023
        bars = (1, 5) if chunk == 1 else (None, None)
        lines.append(Line(f"order of {n:,} samples, chunks of {chunk}", statistics.median(whole), "s", bars[0], False))
        median = statistics.median(seeks) * 1000
        lines.append(Line(f"seek to a batch of 256, chunks of {chunk}", median, "ms", bars[1], False))
    return lines


def pin_made_up(store: ObjectStore, n: int, per_shard: int = 2000) -> str:
    """Pin a snapshot of n samples that are not there; its id."""

    def shards() -> Sequence[tuple[Header, pa.Table]]:
        for shard, start in enumerate(range(0, n, per_shard)):
            count = min(per_shard, n - start)
            name, digest = f"{shard:05d}", f"{shard:064x}"
            tar = f"made-up/{STAGE}/{name}-{digest[-12:]}.tar"
            rows = pa.table(
                {
                    "row": np.arange(start, start + count),
                    "offset": np.arange(count, dtype=np.int64) * 166_400,
                    "length": np.full(count, 166_400, np.int32),
                    "width": np.full(count, 500, np.int32),
                    "height": np.full(count, 375, np.int32),
                    "num_regions": np.full(count, 36, np.int32),
                    "key": [f"{number:020x}" for number in range(start, start + count)],
                    "url": [f"http://example.org/{number}.jpg" for number in range(start, start + count)],
                }
            )
            yield Header(name, STAGE, tar, digest, count * 166_400, {"ok": count}, {"random_init": False}, digest), rows

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "snapshot.parquet"
        snapshot = write_snapshot(file, STAGE, shards())
        store.put(f"made-up/{STAGE}/snapshots/{snapshot.id}.parquet", file)
    return snapshot.id


def memory(*fields: str) -> float:
    """MB of this process, of these fields of smaps_rollup together."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in fields) / 1000


def walk_index(index: ShardIndex, answers: multiprocessing.SimpleQueue) -> None:
    """In a forked worker: MB that become its own while it looks up every sample in random order."""
    before = memory("Private_Clean", "Private_Dirty")
    total = 0
    for start in range(0, len(index), 2**16):
        numbers = shuffled(np.arange(start, min(start + 2**16, len(index))), 0, 0, 0, len(index))
        total += int(index.shard[numbers].sum() + index.offset[numbers].sum() + index.length[numbers].sum())
    answers.put((total, memory("Private_Clean", "Private_Dirty") - before))


def index_memory(root: str, snapshot: str, workers: int, answers: multiprocessing.SimpleQueue) -> None:
    """In a process of its own: what an index takes in it, and in workers forked from it."""
    catalog = Catalog(open_store(root), "made-up")
    catalog.shards(STAGE)  # what is imported on the way
    before = memory("Pss")
    index = catalog.pinned(STAGE, snapshot)
    pa.default_memory_pool().release_unused()
    grown = memory("Pss") - before
    arrays = sum(array.nbytes for array in (index.shard, index.offset, index.length)) / 1e6
    context, own = multiprocessing.get_context("fork"), multiprocessing.get_context("fork").SimpleQueue()
    started = [context.Process(target=walk_index, args=(index, own)) for _ in range(workers)]
    for process in started:
        process.start()
    found = [own.get() for _ in started]
    for process in started:
        process.join()
    assert len({total for total, _ in found}) == 1
    answers.put((arrays, grown, max(private for _, private in found)))


def index_size(n: int) -> list[Line]:
    with tempfile.TemporaryDirectory() as root:
        snapshot = pin_made_up(open_store(root), n)
        context = multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        process = context.Process(target=index_memory, args=(root, snapshot, 2, answers))
        process.start()
        arrays, grown, private = answers.get()
        process.join()
    return [
        Line(f"index of {n:,} samples, growth of its reader", grown, "MB", 64, False),
        Line("  its arrays", arrays, "MB"),
        Line("  growth of a forked worker that walks it", private, "MB"),
    ]


def text_speed(folder: Path, vocabulary: Vocabulary, tokens: int, rounds: int) -> list[Line]:
    """Tokenising (of a 50th of the tokens), and batches of 256 passages of 64, found and read as a training does."""
    rng = np.random.default_rng(0)
    texts = [(" ".join(rng.choice(WORDS, 20)), True) for _ in range(max(1, tokens // 1000))]
    start = time.process_time()
    about = encode_corpus(texts, vocabulary, folder)
    tokenised = about["tokens"] / (time.process_time() - start)
    lengths = rng.integers(5, 36, tokens // 20)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rng.integers(len(SPECIALS), len(vocabulary), offsets[-1]).astype("<u2").tofile(folder / "tokens.u16")
    offsets.astype("<i8").tofile(folder / "offsets.i64")
    about |= {"lines": len(lengths), "tokens": int(offsets[-1])}
    (folder / "corpus.json").write_text(json.dumps(about))
    corpus = TextCorpus(folder, vocabulary)

    def lines_of(step: int) -> np.ndarray:
        return np.array([line for _, line in take(256 * step, 256, 0, TEXT, len(corpus))])

    known = [lines_of(step) for step in range(400)]

    def ordered() -> int:
        return sum(corpus.passages(lines_of(step), 64).size for step in range(400))

    def read() -> int:
        return sum(corpus.passages(lines, 64).size for lines in known)

    found = rates({"ordered": ordered, "read": read}, rounds)
    return [
        Line("text corpus, order and batches of 256 x 64", found["ordered"] / 1e6, "M tokens/CPU-s", 50),
        Line("  the batches alone", found["read"] / 1e6, "M tokens/CPU-s"),
        Line("text corpus, tokenising", tokenised / 1e6, "M tokens/CPU-s"),
    ]


class Counted:
    """Objects that count their range requests."""

    def __init__(self, store: ObjectStore):
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        self.requests += 1
        return self._store.get_range(path, offset, length)


def bucket_requests(samples: int) -> list[Line]:
    """Range requests a sample for batches of 64, from moto's S3 server."""
    try:
        import boto3
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        print(f"not measured: S3: {error}")
        return []
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    lines = []
    try:
        host, port = server.get_host_and_port()
        os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
        boto3.session.Session().client("s3").create_bucket(Bucket="loader")
        store = Counted(open_store("s3://loader/root"))
        commit_drawn(store, samples, samples)
        bucket = opened(store)
        for chunk in (1, 8):
            store.requests, start = 0, time.perf_counter()
            for step in range(0, samples - 63, 64):
                numbers = [number for _, _, number in drawn([SnapshotSpan(0, 0, samples, "")], step, 64, 0, chunk)]
                assert all(isinstance(sample, Sample) for sample in bucket.samples(numbers))
            read = samples // 64 * 64
            lines += [
                Line(f"S3, chunks of {chunk}", store.requests / read, "requests/sample"),
                Line("  beside the server, on one machine", read / (time.perf_counter() - start), "samples/s"),
            ]
    finally:
        server.stop()
    return lines


def measured(options: argparse.Namespace) -> list[Line]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = open_store(f"{folder}/root")
        size = commit_drawn(store, options.samples, options.per_shard)
        samples = opened(store)
        print(f"{len(samples):,} samples in {len(samples.index.tars)} shards, JPEGs of {size:,} bytes\n", flush=True)
        letters = sorted({letter for word in WORDS for letter in word})
        vocabulary = Vocabulary(
            [*SPECIALS, *letters, *(f"##{letter}" for letter in letters), *sorted({*WORDS} - {"a"})]
        )
        lines = read_speed(samples, options.rounds)
        lines += full_speed(samples, vocabulary, options.images, options.rounds)
        lines += order_speed(options.index, options.rounds)
        lines += index_size(options.index)
        lines += text_speed(Path(folder) / "text", vocabulary, options.tokens, options.rounds)
        return lines + bucket_requests(options.bucket)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loader", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4000, help="drawn samples (%(default)s)")
    parser.add_argument("--per-shard", type=int, default=2000, help="samples a shard (%(default)s)")
    parser.add_argument("--images", type=int, default=320, help="images of a round of the full path (%(default)s)")
    parser.add_argument("--index", type=int, default=3_300_000, help="samples of order and index (%(default)s)")
    parser.add_argument("--tokens", type=int, default=50_000_000, help="tokens of the text corpus (%(default)s)")
    parser.add_argument("--bucket", type=int, default=512, help="samples in S3 (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where shards are written meanwhile; else the temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="webdataset")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's server would tell of every request
    lines = measured(options)
    for line in lines:
        print(f"{line.what:<46}{line.value:>12,.4g}  {line.unit:<18}{line.verdict}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        figures = [asdict(line) | {"value": float(f"{line.value:.5g}"), "verdict": line.verdict} for line in lines]
        options.json.write_text(json.dumps({"cpus": os.cpu_count(), "lines": figures}, indent=1) + "\n")
    sys.exit(int(any(line.verdict.startswith("FAIL") for line in lines)))


if __name__ == "__main__":
    main()
