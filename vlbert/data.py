"""What a run trains on, in which order: every batch is a pure function of (seed, step), whatever the ranks and workers.

The whole state of the data in a checkpoint is {snapshot, seed, samples consumed}: samples are numbered through all
epochs, sample c is question order(seed, epoch)[c mod n] of epoch c div n, and step s takes s*batch .. (s+1)*batch - 1.
"""

import functools
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from storage.catalog import Catalog, ShardIndex
from storage.objects import Objects
from storage.sample import Sample
from storage.shards import read_span
from vlbert.batch import Batch, Example, collate
from vlbert.config import DataConfig, RegionConfig
from vlbert.distributed import World
from vlbert.pictures import view
from vlbert.tasks import Questions, Task
from vlbert.text import TextCorpus

CAPTIONS, TEXT, VALIDATION = 0, 1, 2  # streams of randomness that never meet


class Samples(Protocol):
    """Samples by number: the shards of a snapshot, or anything like them."""

    urls: Sequence[str]

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample: ...


class ShardSamples:
    """The samples of committed shards, read singly through the byte-offset index (pread, or a range request on S3)."""

    def __init__(self, objects: Objects, index: ShardIndex):
        self.objects, self.index = objects, index
        self._files: dict[str, int] = {}  # open file descriptors; pread has no position, so forked workers share them

    @functools.cached_property
    def urls(self) -> list[str]:
        return self.index.urls()

    def __len__(self) -> int:
        return len(self.index)

    def sample(self, number: int) -> Sample:
        index = self.index
        tar, offset, length = index.tars[index.shard[number]], int(index.offset[number]), int(index.length[number])
        local = self.objects.local_path(tar)
        if local is None:
            return read_span(self.objects.get_range(tar, offset, length))
        if tar not in self._files:
            self._files[tar] = os.open(local, os.O_RDONLY)
        return read_span(os.pread(self._files[tar], length, offset))


def region_stage(objects: Objects, dataset: str, detector: str | None) -> str:
    """The stage with the regions of `detector`, or of the only detector there is. ValueError lists what there is."""
    prefix = f"{dataset}/regions/"
    where = objects.where(f"{dataset}/regions")
    found = {info.path.removeprefix(prefix).split("/")[0] for info in objects.list(prefix) if "/" in info.path}
    if detector is None and len(found) == 1:
        return f"regions/{found.pop()}"
    if detector in found:
        return f"regions/{detector}"
    if not found:
        raise ValueError(f"{where} holds no region shards; run the detection stage first")
    wanted = "several detectors, set data.detector to one of" if detector is None else f"no detector {detector}, only"
    raise ValueError(f"{where} holds {wanted} {', '.join(sorted(found))}")


def open_samples(
    objects: Objects, dataset: str, detector: str | None, pinned: dict | None = None
) -> tuple[ShardSamples, dict]:
    """(samples, what a checkpoint pins): all shards that are committed now or, resuming, exactly those of `pinned`."""
    stage = region_stage(objects, dataset, detector) if pinned is None else pinned["stage"]
    index = Catalog(objects, dataset).index(stage, None if pinned is None else pinned["shards"])
    if pinned is not None and index.snapshot.id != pinned["snapshot"]:
        raise ValueError(
            f"{objects.where(dataset)}/{stage}: the shards that the checkpoint was trained on have changed (snapshot "
            f"{index.snapshot.id}, not {pinned['snapshot']}); put them back, or start another run with run=NAME"
        )
    if not len(index):
        raise ValueError(f"{objects.where(dataset)}/{stage} holds no sample; see its manifests for what failed and why")
    return ShardSamples(objects, index), {
        "dataset": dataset,
        "stage": stage,
        "snapshot": index.snapshot.id,
        "shards": list(index.snapshot.shards),
    }


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained): ours, so that no library's random stream decides an order."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = _splitmix(state ^ _splitmix(np.array([number % 2**64], np.uint64)))
    return int(state[0])


def _splitmix(x: np.ndarray) -> np.ndarray:
    """One step of splitmix64 at every element of a uint64 array; it wraps round on purpose."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=4)
def order(seed: int, stream: int, epoch: int, n: int) -> np.ndarray:
    """The permutation of 0..n-1 in which epoch `epoch` takes its n questions: int64 [n]."""
    start = np.uint64(mix(seed, stream, epoch))
    return np.argsort(_splitmix(np.arange(n, dtype=np.uint64) ^ start), kind="stable")


def take(consumed: int, count: int, seed: int, stream: int, n: int) -> list[tuple[int, int]]:
    """(epoch, question) of the `count` samples after the first `consumed` ones; an epoch may end in between."""
    epochs = [divmod(c, n) for c in range(consumed, consumed + count)]
    return [(epoch, int(order(seed, stream, epoch, n)[place])) for epoch, place in epochs]


def generator(seed: int, stream: int, epoch: int, key: str, question: int = 0) -> np.random.Generator:
    """The randomness of one sample in one epoch: the same on every rank and worker."""
    return np.random.default_rng([seed, stream, epoch, int.from_bytes(key.encode()), question])


class TrainingData(Dataset):
    """data[step] is what this rank computes in that step: one Batch per part of the accumulation."""

    def __init__(
        self,
        samples: Samples,
        questions: Questions,
        task: Task,
        config: DataConfig,
        regions: RegionConfig,
        rank: int,
        world_size: int,
        corpus: TextCorpus | None = None,
    ):
        parts = world_size * config.accumulate
        for name in ("batch", "text_batch"):
            if getattr(config, name) % parts:
                raise ValueError(
                    f"data.{name} = {getattr(config, name)} cannot be shared by {world_size} processes x "
                    f"data.accumulate = {config.accumulate}; choose a multiple of {parts}"
                )
        if not len(questions):
            raise ValueError(f"there is nothing to train on: {len(samples)} samples ask no question")
        self.samples, self.questions, self.task, self.corpus = samples, questions, task, corpus
        self.config, self.regions, self.rank, self.world_size = config, regions, rank, world_size

    def __getitem__(self, step: int) -> list[Batch]:
        pairs = self._share(step, self.config.batch, CAPTIONS, len(self.questions))
        texts = self._share(step, self.config.text_batch, TEXT, len(self.corpus) if self.corpus else 1)
        return [
            collate([*(self._pair(*p) for p in pair), *(self._text(*t) for t in text)])
            for pair, text in zip(pairs, texts, strict=True)
        ]

    def _share(self, step: int, count: int, stream: int, n: int) -> list[list[tuple[int, int]]]:
        """This rank's (epoch, number)s of step `step`, one list per part."""
        everyone = take(step * count, count, self.config.seed, stream, n)
        size = count // (self.world_size * self.config.accumulate)
        starts = [(part * self.world_size + self.rank) * size for part in range(self.config.accumulate)]
        return [everyone[start : start + size] for start in starts]

    def _pair(self, epoch: int, number: int) -> Example:
        sample = self.samples.sample(int(self.questions.samples[number]))
        ask = None if self.questions.asks is None else self.questions.asks[number]
        rng = generator(self.config.seed, CAPTIONS, epoch, sample.key, 0 if ask is None else number)
        flip = bool(rng.random() < self.config.flip)
        return self.task.example(sample, view(sample, self.regions, flip), ask, rng)

    def _text(self, epoch: int, line: int) -> Example:
        key = f"text-{line}"
        tokens = self.corpus.passage(line, self.task.settings.text_length)
        return self.task.text_example(key, tokens, generator(self.config.seed, TEXT, epoch, key))


class ValidationData(Dataset):
    """data[i] is batch i of this rank's share of the held-out questions; they are asked the same in every validation.

    shuffled: every text meets the picture of the next question's sample, the pairing that must tell nothing.
    """

    def __init__(
        self,
        samples: Samples,
        questions: Questions,
        task: Task,
        config: DataConfig,
        regions: RegionConfig,
        world: World,
        limit: int,
        shuffled: bool,
    ):
        # The same random subset on every call, else the first scenes of a sorted list would stand for all.
        chosen = np.sort(order(config.seed, VALIDATION, 0, len(questions))[:limit])
        self.numbers, self.partners = chosen[world.rank :: world.size], np.roll(chosen, -1)[world.rank :: world.size]
        self.samples, self.questions, self.task = samples, questions, task
        self.config, self.regions, self.shuffled = config, regions, shuffled
        self.size = max(1, config.batch // world.size // config.accumulate)

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.size)

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        part = slice(index * self.size, (index + 1) * self.size)
        examples = [self._example(n) for n in self.numbers[part]]
        if self.shuffled:
            others = [self._example(n) for n in self.partners[part]]
            examples = [
                Example(e.key, e.words, other.picture, e.about) for e, other in zip(examples, others, strict=True)
            ]
        return collate(examples)

    def _example(self, number: int) -> Example:
        sample = self.samples.sample(int(self.questions.samples[number]))
        ask = None if self.questions.asks is None else self.questions.asks[number]
        rng = generator(self.config.seed, VALIDATION, 0, sample.key, 0 if ask is None else number)
        return self.task.example(sample, view(sample, self.regions, flip=False), ask, rng)


def batches(data: Dataset, steps: Sequence[int], workers: int, device: torch.device) -> DataLoader:
    """data[step] for every step, in order, made ahead of time by `workers` processes."""
    return DataLoader(
        data,
        sampler=steps,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_one_thread if workers else None,
    )


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)
