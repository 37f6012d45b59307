"""Measure the speed of data loading: reading, decoding, masking, ordering, index and text; and of webdataset.

    python -m benchmarks.loader [--samples 4000 --rounds 5] [--json FILE]

Generated samples are committed in shards, as in the pipeline: JPEGs of 500 x 375 pixels, with 36 regions that have a
distribution over 1,600 classes. The readers take turns, from the page cache, on one thread. Speeds are per CPU-second,
so that other load on the machine has little effect. The exit status is 1 if a bar is not met.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import webdataset

from benchmarks.measure import describe_machine, format_table, make_parser, measure_call, run_in_turns, write_json
from benchmarks.synthetic import DETECTOR, commit_samples, make_sample, make_vocabulary
from storage.catalog import Catalog
from storage.manifests import Header
from storage.object_store import ObjectStore, open_store
from storage.order import samples_after, shuffled
from storage.reading import ShardSamples
from storage.shards import span_members
from storage.snapshots import write_snapshot
from vlbert.config import RegionConfig
from vlbert.data.corpus import TextCorpus, encode_corpus
from vlbert.data.images import prepare_image
from vlbert.data.loading import generator
from vlbert.data.order import CAPTIONS, TEXT, SnapshotSpan, draw_samples
from vlbert.data.vocabulary import SPECIALS
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

STAGE = f"regions/{DETECTOR}"


@dataclass(frozen=True)
class Line:
    """A line of the results table: a measured value, and the bar that it must meet."""

    what: str
    value: float
    unit: str
    bar: float | None = None  # None: only reported
    at_least: bool = True  # True: the bar is a minimum; False: a maximum

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        met = self.value >= self.bar if self.at_least else self.value <= self.bar
        return f"{'pass' if met else 'FAIL'}, {'at least' if self.at_least else 'at most'} {self.bar:g}"


def commit_shards(root: str, samples: int, per_shard: int) -> ShardSamples:
    """Commit generated samples in shards of `per_shard` samples, and open them for reading."""
    for shard, start in enumerate(range(0, samples, per_shard)):
        numbers = range(start, min(start + per_shard, samples))
        part = [make_sample(number, None, (500, 375), 36) for number in numbers]
        commit_samples(root, "captions", part, start, shard)
    catalog = Catalog(open_store(root), "captions")
    return ShardSamples(open_store(root), catalog.pinned(STAGE, catalog.pin(STAGE).id))


def measure_rates(contenders: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Return each contender's median rate: the count that it returns, divided by its CPU-seconds."""
    timings = run_in_turns(contenders, rounds)
    return {name: statistics.median(timing.result / timing.cpu for timing in turns) for name, turns in timings.items()}


def measure_reads(samples: ShardSamples, rounds: int) -> list[Line]:
    """Compare the speed of random reads through the index with sequential reads by webdataset."""
    tars = [str(samples.store.local_path(tar)) for tar in samples.index.tars]
    index, epochs = samples.index, itertools.count()

    def order() -> list[int]:
        return shuffled(np.arange(len(samples)), 0, CAPTIONS, next(epochs), len(samples)).tolist()

    def ours() -> int:
        for number in order():
            location = int(index.shard[number]), int(index.offset[number]), int(index.length[number])
            data = samples.read(*location)
            assert len([data[start:end] for start, end in span_members(data)[1].values()]) == 3
        return len(samples)

    def theirs() -> int:
        return sum(len(members) == 3 + 3 for members in webdataset.WebDataset(tars, shardshuffle=False))

    rates = measure_rates({"ours": ours, "theirs": theirs}, rounds)
    return [
        Line("members, indexed random reads", rates["ours"], "samples/CPU-s"),
        Line("members, webdataset in sequence", rates["theirs"], "samples/CPU-s"),
        Line("  ratio", rates["ours"] / rates["theirs"], "x", 3),
    ]


def measure_examples(samples: ShardSamples, count: int, rounds: int) -> list[Line]:
    """Measure how fast training examples are read, decoded, resized and masked."""
    torch.set_num_threads(1)  # as in a loading worker
    task = Pretraining(PretrainingSettings(), make_vocabulary(), samples.sample(0).require_regions().num_classes)
    regions, starts = RegionConfig(), itertools.count(0, count)

    def examples() -> int:
        order = shuffled(np.arange(count) + next(starts), 0, CAPTIONS, 0, 2**30) % len(samples)
        for number in order.tolist():
            sample = samples.sample(number)
            rng = generator(0, CAPTIONS, 0, sample.key)
            task.example(sample, prepare_image(sample, regions, flip=False), None, rng)
        return count

    rates = measure_rates({"examples": examples}, rounds)
    return [Line("read, decode, resize to 600/1000, mask", rates["examples"], "images/s/core", 200)]


def measure_order(n: int, rounds: int) -> list[Line]:
    """Measure the wall time to order an epoch of `n` samples, and to seek to a batch at a random position."""
    whole = run_in_turns({"order": lambda: shuffled(np.arange(n), 0, CAPTIONS, 3, n)}, rounds)["order"]
    starts = np.random.default_rng(0).integers(0, 40 * n, 200).tolist()
    seeks = [measure_call(lambda: [*draw_samples([SnapshotSpan(0, 0, n, "")], start, 256, 0, 1)]) for start in starts]  # noqa: B023
    seconds, seek = (statistics.median(timing.wall for timing in timings) for timings in (whole, seeks))
    return [
        Line(f"order of {n:,} samples", seconds, "s", 1, False),
        Line("seek to a batch of 256", 1000 * seek, "ms", 5, False),
    ]


def pin_synthetic_snapshot(store: ObjectStore, n: int, per_shard: int = 2000) -> str:
    """Write a snapshot of `n` samples that do not exist, and return its id."""

    def shards() -> Iterator[tuple[Header, pa.Table]]:
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
                    "license": pa.nulls(count, pa.string()),
                    "key": [f"{number:020x}" for number in range(start, start + count)],
                    "url": [f"http://example.org/{number}.jpg" for number in range(start, start + count)],
                }
            )
            meta = {"random_init": False}
            yield Header(name, STAGE, tar, digest, count * 166_400, digest, {"ok": count}, meta, digest), rows

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "snapshot.parquet"
        snapshot = write_snapshot(file, STAGE, shards())
        store.put(f"made-up/{STAGE}/snapshots/{snapshot.id}.parquet", file)
    return snapshot.id


def used_memory() -> float:
    """Return the memory of this process in MB, including its proportional share of shared pages (PSS)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def measure_index_growth(root: str, snapshot: str, answers: multiprocessing.SimpleQueue) -> None:
    """Measure the memory that reading the index takes. Runs in a new process, and puts (samples, MB) in `answers`."""
    tempfile.tempdir = root  # for the file of the index
    catalog = Catalog(open_store(root), "made-up")
    catalog.shards(STAGE)  # imports the modules that are needed, before memory is measured
    before = used_memory()
    index = catalog.pinned(STAGE, snapshot)
    pa.default_memory_pool().release_unused()
    answers.put((len(index), used_memory() - before))


def measure_index(n: int) -> list[Line]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as root:
        answers = context.SimpleQueue()
        arguments = root, pin_synthetic_snapshot(open_store(root), n), answers
        process = context.Process(target=measure_index_growth, args=arguments)
        process.start()
        length, grown = answers.get()
        process.join()
    assert length == n
    return [Line(f"index of {n:,} samples, growth of its reader", grown, "MB", 64, False)]


def measure_text(folder: Path, tokens: int, rounds: int) -> list[Line]:
    """Measure how fast the batches of a text corpus are read, as in training: 256 passages of 64 tokens each."""
    rng, vocabulary = np.random.default_rng(0), make_vocabulary()
    metadata = encode_corpus(["a"], vocabulary, folder)
    lengths = rng.integers(5, 36, tokens // 20)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rng.integers(len(SPECIALS), len(vocabulary), offsets[-1]).astype("<u2").tofile(folder / "tokens.u16")
    offsets.astype("<i8").tofile(folder / "offsets.i64")
    metadata |= {"lines": len(lengths), "tokens": int(offsets[-1])}
    (folder / "corpus.json").write_text(json.dumps(metadata))
    corpus = TextCorpus(folder, vocabulary)

    def read() -> int:
        count = 0
        for step in range(400):
            lines = [line for _, line in samples_after(256 * step, 256, 0, TEXT, len(corpus))]
            count += corpus.passages(np.array(lines), 64).size
        return count

    speed = measure_rates({"read": read}, rounds)["read"]
    return [Line("text corpus, order and batches of 256 x 64", speed / 1e6, "M tokens/CPU-s", 50)]


def measure_all(options: argparse.Namespace) -> list[Line]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        samples = commit_shards(f"{folder}/root", options.samples, options.per_shard)
        lines = measure_reads(samples, options.rounds)
        lines += measure_examples(samples, options.images, options.rounds)
        lines += measure_order(options.index, options.rounds)
        lines += measure_index(options.index)
        return lines + measure_text(Path(folder) / "text", options.tokens, options.rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    command = make_parser("loader", __doc__)
    command.add_argument("--samples", type=int, default=4000, help="generated samples (%(default)s)")
    command.add_argument("--per-shard", type=int, default=2000, help="samples per shard (%(default)s)")
    command.add_argument("--images", type=int, default=320, help="images per round of the full path (%(default)s)")
    command.add_argument("--index", type=int, default=3_300_000, help="samples of order and index (%(default)s)")
    command.add_argument("--tokens", type=int, default=50_000_000, help="tokens of the text corpus (%(default)s)")
    command.add_argument("--rounds", type=int, default=5, help="turns of each contender (%(default)s)")
    command.add_argument("--folder", type=Path, help="folder for temporary shards; else the system's temporary folder")
    options = command.parse_args(arguments)
    warnings.filterwarnings("ignore", module="webdataset")
    lines = measure_all(options)
    head = ["what", "measured", "", "wanted"]
    print(format_table([head, *([line.what, f"{line.value:,.4g}", line.unit, line.verdict] for line in lines)]))
    figures = [asdict(line) | {"value": float(f"{line.value:.5g}"), "verdict": line.verdict} for line in lines]
    write_json(options.json, {"machine": describe_machine(), "lines": figures})
    sys.exit(int(any(line.verdict.startswith("FAIL") for line in lines)))


if __name__ == "__main__":
    main()
