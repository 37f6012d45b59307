"""What a run trains on, in which order: every batch is a pure function of (seed, step), whatever the ranks and workers.

The whole state of the data in a checkpoint is {snapshot, seed, samples consumed}: samples are numbered through all
epochs, sample c is question shuffled(c mod n) of epoch c div n, and step s takes samples s*batch .. (s+1)*batch - 1.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from detectors.distributed import World, from_first
from storage.catalog import Catalog
from storage.objects import Objects
from storage.order import shuffled, take
from storage.reading import ShardSamples
from storage.sample import Sample
from vlbert.batch import Batch, Example, collate
from vlbert.config import DataConfig, RegionConfig
from vlbert.pictures import view
from vlbert.tasks import Questions, Task
from vlbert.text import TextCorpus

CAPTIONS, TEXT, VALIDATION = 0, 1, 2  # streams of randomness that never meet


class Samples(Protocol):
    """Samples by number: the shards of a snapshot, or anything like them."""

    urls: Sequence[str]

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample: ...


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
    objects: Objects, dataset: str, detector: str | None, pinned: dict | None, world: World
) -> tuple[ShardSamples, dict]:
    """(samples, what a checkpoint pins): all shards that are committed now or, resuming, exactly those of `pinned`.

    Rank 0 looks what is committed, for all: a detector may commit another shard meanwhile.
    """
    catalog = Catalog(objects, dataset)
    if pinned is None:
        found = None
        if world.first:
            stage = region_stage(objects, dataset, detector)
            snapshot = catalog.snapshot(stage)
            if not snapshot.ok_rows:
                where = objects.where(f"{dataset}/{stage}")
                raise ValueError(f"{where} holds no sample; its manifests say what failed and why")
            found = {
                "dataset": dataset,
                "stage": stage,
                "snapshot": snapshot.id,
                "shards": list(snapshot.shards),
                "untrained": catalog.manifest(stage, snapshot.shards[0]).meta["untrained"],
            }
        pinned = from_first(found, world)
    index = catalog.index(pinned["stage"], pinned["shards"])
    if index.snapshot.id != pinned["snapshot"]:
        raise ValueError(
            f"{objects.where(dataset)}/{pinned['stage']}: the shards that the checkpoint was trained on have changed "
            f"(snapshot {index.snapshot.id}, not {pinned['snapshot']}); put them back, or start another run: run=NAME"
        )
    return ShardSamples(objects, index), pinned


def generator(seed: int, stream: int, epoch: int, key: str, question: int = 0) -> np.random.Generator:
    """The randomness of one sample in one epoch: the same on every rank and worker."""
    return np.random.default_rng([seed, stream, epoch, int.from_bytes(key.encode()), question])


def check_shares(config: DataConfig, world_size: int) -> None:
    """ValueError where the batch cannot be dealt out evenly over processes and parts."""
    parts = world_size * config.accumulate
    for name in ("batch", "text_batch"):
        if getattr(config, name) % parts:
            raise ValueError(
                f"data.{name} = {getattr(config, name)} cannot be shared by {world_size} processes x "
                f"data.accumulate = {config.accumulate}; choose a multiple of {parts}"
            )


class TrainingData(Dataset):
    """data[step] is what this rank computes in that step: one Batch per part of the accumulation."""

    def __init__(
        self,
        samples: Samples,
        questions: Questions,
        task: Task,
        config: DataConfig,
        regions: RegionConfig,
        world: World,
        corpus: TextCorpus | None = None,
    ):
        check_shares(config, world.size)
        self.samples, self.questions, self.task, self.corpus = samples, questions, task, corpus
        self.config, self.regions, self.rank, self.world_size = config, regions, world.rank, world.size

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
    """data[i] is this rank's i-th batch of held-out questions; they are asked the same in every validation.

    Each item is [batch] or, where the task shuffles, [batch, the same texts with the pictures of other questions]: the
    text of question i with the picture of question i + 1, in an order that is random and the same in every world.
    """

    def __init__(
        self,
        samples: Samples,
        questions: Questions,
        task: Task,
        config: DataConfig,
        regions: RegionConfig,
        world: World,
        limit: int | None,
    ):
        count = len(questions) if limit is None else min(limit, len(questions))
        self.numbers = shuffled(np.arange(count), config.seed, VALIDATION, 0, len(questions))
        share = -(-count // world.size)
        self.start, self.stop = min(count, world.rank * share), min(count, (world.rank + 1) * share)
        self.samples, self.questions, self.task = samples, questions, task
        self.config, self.regions = config, regions
        self.size = max(1, config.batch // world.size // config.accumulate)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.size)

    def __getitem__(self, index: int) -> list[Batch]:
        if index >= len(self):
            raise IndexError(index)
        start = self.start + index * self.size
        places = range(start, min(start + self.size, self.stop))
        if not self.task.shuffles:
            return [collate([self._example(place) for place in places])]
        *examples, after = [self._example(place % len(self.numbers)) for place in range(start, places.stop + 1)]
        pictures = [e.picture for e in [*examples[1:], after]]
        others = [dataclasses.replace(e, picture=other) for e, other in zip(examples, pictures, strict=True)]
        return [collate(examples), collate(others)]

    def _example(self, place: int) -> Example:
        number = int(self.numbers[place])
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
        # Forked workers share the index and the mapped corpus; to others they would be copied.
        multiprocessing_context="fork" if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_one_thread if workers else None,
    )


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)
