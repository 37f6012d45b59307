"""What a run trains on, in which order: every batch is a pure function of (seed, step), whatever the ranks and workers.

The whole state of the data in a checkpoint is {datasets with their weights and snapshots, seed, samples consumed}.
Slots are numbered through all epochs, step s takes slots s*batch .. (s+1)*batch - 1, and vlbert/data/order.py says
which example each of them is. A sample that cannot be read leaves its slot empty, with weight zero; no other sample
replaces it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from storage.order import interleaved, samples_after, shuffled
from storage.reading import Samples
from storage.sample import Sample
from training.distributed import World
from training.log import Unreadable
from vlbert.config import DataConfig, RegionConfig
from vlbert.data.batch import Batch, Example, collate, placeholder
from vlbert.data.corpus import TextCorpus
from vlbert.data.images import prepare_image
from vlbert.data.order import CAPTIONS, TEXT, VALIDATION, SnapshotSpan, draw_samples, seed_of
from vlbert.data.samples import MOST_UNREADABLE, sample_indices
from vlbert.tasks.base import Examples, Task

Slot = tuple[int, int, int, int]  # number of the dataset, index in its spans, epoch, question


def generator(seed: int, stream: int, epoch: int, key: str, question: int = 0) -> np.random.Generator:
    """The randomness of one sample in one epoch: the same on every rank and worker."""
    return np.random.default_rng([seed, stream, epoch, int.from_bytes(key.encode()), question])


def parts_of_step(step: int, batch: int, weights: Sequence[float]) -> list[tuple[int, int, int, np.ndarray]]:
    """By dataset that is in this step: its number, its samples from `start` to `stop`, and their places."""
    numbers, draws = interleaved(step * batch, batch, weights)
    places = {number: np.flatnonzero(numbers == number) for number in range(len(weights))}
    return [(n, int(draws[at[0]]), int(draws[at[-1]]) + 1, at) for n, at in places.items() if len(at)]


def check_shares(config: DataConfig, world_size: int) -> None:
    """ValueError where the batch cannot be dealt out evenly over processes and parts."""
    parts = world_size * config.gradient_accumulation
    for name in ("batch", "text_batch"):
        if getattr(config, name) % parts:
            raise ValueError(
                f"data.{name} = {getattr(config, name)} cannot be shared by {world_size} processes x "
                f"data.gradient_accumulation = {config.gradient_accumulation}; choose a multiple of {parts}"
            )


@dataclass(frozen=True, eq=False)
class ExampleSource:
    """Makes the Examples of one snapshot: its samples, the task's examples, and how they are read."""

    samples: Samples
    examples: Examples
    task: Task
    config: DataConfig
    regions: RegionConfig
    stream: int

    def read(self, slots: Sequence[tuple[int, int]], step: int) -> list[Example | Unreadable]:
        """The Example of each (epoch, question), in order, or why there is none."""
        samples = self.samples.samples([int(self.examples.samples[number]) for _, number in slots])
        return [self._example(sample, *slot, step) for sample, slot in zip(samples, slots, strict=True)]

    def first_readable(self, slots: Iterable[tuple[int, int]]) -> Example:
        """The first of these that can be read; ValueError after MOST_UNREADABLE that cannot."""
        for tried, slot in enumerate(slots, 1):
            (found,) = self.read([slot], step=0)
            if isinstance(found, Example):
                return found
            if tried == MOST_UNREADABLE:
                break
        raise ValueError(f"{tried} examples in a row cannot be read, the last because {found.reason}")

    def _example(self, sample: Sample | ValueError, epoch: int, number: int, step: int) -> Example | Unreadable:
        if isinstance(sample, ValueError):
            return Unreadable(step, getattr(sample, "key", None), str(sample))
        try:
            annotation = None if self.examples.annotations is None else self.examples.annotations[number]
            rng = generator(self.config.seed, self.stream, epoch, sample.key, 0 if annotation is None else number)
            flip = self.stream != VALIDATION and bool(rng.random() < self.config.flip)
            return self.task.example(sample, prepare_image(sample, self.regions, flip), annotation, rng)
        except ValueError as error:
            reason = str(error) if sample.key in str(error) else f"sample {sample.key}: {error}"
            return Unreadable(step, sample.key, reason)


@dataclass(eq=False)
class TrainingDataset:
    """One dataset of a run: what is read of it now, and over which snapshots its epochs have run so far.

    spans   the last of them is over `samples`; none given: the first epoch, nothing consumed
    weight  its share of the run's slots, relative to those of the other datasets
    pinned  what a checkpoint records of it beside these: `dataset`, `stage` and `random_init`
    """

    samples: Samples
    examples: Examples
    spans: list[SnapshotSpan] = field(default_factory=list)
    weight: float = 1.0
    pinned: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.spans = self.spans or [SnapshotSpan(0, 0, len(self.examples), "")]


class TrainingData(Dataset):
    """data[step] is what this rank computes in that step: one Batch per part of the accumulation."""

    def __init__(
        self,
        datasets: Sequence[TrainingDataset],
        task: Task,
        config: DataConfig,
        regions: RegionConfig,
        world: World,
        corpus: TextCorpus | None = None,
    ):
        check_shares(config, world.size)
        if config.batch <= task.lookahead:
            raise ValueError(f"data.batch is {config.batch}; the task needs {task.lookahead + 1} examples at least")
        self.datasets, self.task, self.corpus, self.config = datasets, task, corpus, config
        self.rank, self.world_size = world.rank, world.size
        self._weights = [dataset.weight for dataset in datasets]
        self._sources = {}  # by number of the dataset and index in its spans
        for number, dataset in enumerate(datasets):
            ours = replace(config, seed=seed_of(config.seed, number))
            source = ExampleSource(dataset.samples, dataset.examples, task, ours, regions, CAPTIONS)
            self._sources[number, len(dataset.spans) - 1] = source

    def source(self, number: int = 0) -> ExampleSource:
        """Reads the last snapshot of a dataset."""
        return self._sources[number, len(self.datasets[number].spans) - 1]

    def boundaries(self, step: int) -> list[tuple[int, int]]:
        """(number of a dataset, sample of it): where in this step new shards may enter. See SnapshotSpan.boundary."""
        found, config = [], self.config
        if config.new_shards_every is None:
            return found
        for number, start, stop, _ in self._parts_of(step):
            span, share = self.datasets[number].spans[-1], self._weights[number] / sum(self._weights)
            apart = math.ceil(config.new_shards_every * config.batch * share)
            boundary = span.boundary(start, stop, apart)
            # A span that begins in this step lasts beyond it: steps differ by a sample or two of a dataset.
            if boundary is not None and span.consumed < start:
                found.append((number, boundary))
        return found

    def switch_snapshot(self, number: int, samples: Samples, examples: Examples, snapshot: str, boundary: int) -> None:
        """From sample `boundary` of a dataset on, the first of an epoch, read another snapshot of it."""
        dataset, before = self.datasets[number], self.source(number)
        last = len(dataset.spans)
        dataset.samples, dataset.examples = samples, examples
        dataset.spans.append(dataset.spans[-1].followed_by(len(examples), snapshot, boundary))
        kept = {place: source for place, source in self._sources.items() if place[0] != number}
        # One step may need both.
        both = {(number, last - 1): before, (number, last): replace(before, samples=samples, examples=examples)}
        self._sources = kept | both

    def __getitem__(self, step: int) -> list[Batch]:
        return [collate(*part) for part in self.examples(step)]

    def examples(self, step: int) -> list[tuple[list[Example], list[Unreadable]]]:
        """What each part of data[step] is collated from: its examples in order, those of text alone last, and what
        cannot be read."""
        everyone = self.slots(step)
        shares = self._shares(list(enumerate(everyone)))
        pairs = [[slot for _, slot in share] for share in shares]
        behind = [everyone[share[-1][0] + 1 :] + everyone[: share[0][0]] for share in shares]  # of the whole step
        count, lines = self.config.text_batch, len(self.corpus) if self.corpus else 1
        texts = self._shares(samples_after(step * count, count, self.config.seed, TEXT, lines))
        return [self._examples(step, *part) for part in zip(pairs, behind, texts, strict=True)]

    def _parts_of(self, step: int) -> list[tuple[int, int, int, np.ndarray]]:
        return parts_of_step(step, self.config.batch, self._weights)

    def slots(self, step: int) -> list[Slot]:
        """What all ranks take in this step, in order."""
        found: dict[int, Slot] = {}
        for number, start, stop, places in self._parts_of(step):
            seed, spans = self.source(number).config.seed, self.datasets[number].spans
            epochs = draw_samples(spans, start, stop - start, seed, self.config.chunk)
            slots = [(number, index, epoch, one) for index, epoch, questions in epochs for one in questions.tolist()]
            found |= zip(places.tolist(), slots, strict=True)
        return [found[place] for place in range(self.config.batch)]

    def _shares(self, everyone: list[Any]) -> list[list[Any]]:
        """What this rank takes of the slots of a step, one list per part."""
        size = len(everyone) // (self.world_size * self.config.gradient_accumulation)
        starts = [(part * self.world_size + self.rank) * size for part in range(self.config.gradient_accumulation)]
        return [everyone[start : start + size] for start in starts]

    def _read(self, step: int, slots: Sequence[Slot]) -> list[Example | Unreadable]:
        """In their order; those of one snapshot are read together."""
        places = defaultdict(list)
        for place, slot in enumerate(slots):
            places[slot[:2]].append(place)
        found: dict[int, Example | Unreadable] = {}
        for source, ours in places.items():
            examples = self._sources[source].read([slots[place][2:] for place in ours], step + 1)
            found |= dict(zip(ours, examples, strict=True))
        return [found[place] for place in range(len(slots))]

    def _following(self, step: int, slots: Sequence[Slot], count: int) -> list[Example]:
        """The first `count` examples of these slots that can be read."""
        found: list[Example] = []
        for slot in slots:
            if len(found) == count:
                break
            found += _parted(self._read(step, [slot]))[0]
        return found

    def _examples(
        self, step: int, pairs: list[Slot], behind: list[Slot], texts: list[tuple[int, int]]
    ) -> tuple[list[Example], list[Unreadable]]:
        examples, unreadable = _parted(self._read(step, pairs))
        if examples and self.task.lookahead:
            examples = self.task.collate_group(examples, self._following(step, behind, self.task.lookahead))
        if not examples:  # a batch without any image would not train the image network: see `placeholder`
            *snapshot, epoch, number = pairs[-1]
            source = self._sources[*snapshot]
            others = sample_indices(len(source.examples), source.config.seed, epoch, number)
            examples.append(placeholder(source.first_readable((epoch, other) for other in others)))
        return [*examples, *self._texts(texts)], unreadable

    def _texts(self, slots: list[tuple[int, int]]) -> Iterator[Example]:
        if slots:
            settings, lines = self.task.settings, np.array([line for _, line in slots])
            for (epoch, line), tokens in zip(slots, self.corpus.passages(lines, settings.text_length), strict=True):
                key = f"text-{line}"
                yield self.task.text_example(key, tokens, generator(self.config.seed, TEXT, epoch, key))


class ValidationData(Dataset):
    """data[i] is this rank's i-th batch of held-out examples, the same in every validation.

    An item is ([batch], numbers, unreadable). Where the task shuffles it is ([batch, shuffled], ...): the same texts,
    that of question i with the image of question i + 1, in a random order that is the same in every world. `numbers`
    are those of the examples in the batch; `unreadable` has those that cannot be read, by number. Where none can be
    read there is no batch.
    """

    def __init__(
        self,
        samples: Samples,
        examples: Examples,
        task: Task,
        config: DataConfig,
        regions: RegionConfig,
        world: World,
        limit: int | None,
        together: int | None = None,
    ):
        """together: examples of a batch, whatever the world; None: as many as a rank trains on at a time."""
        count = len(examples) if limit is None else min(limit, len(examples))
        self.numbers = shuffled(np.arange(count), config.seed, VALIDATION, 0, len(examples))
        self.size = together or max(1, config.batch // world.size // config.gradient_accumulation)
        share = -(-count // world.size)
        if together:  # whole batches
            share = -(-share // together) * together
        self.start, self.stop = min(count, world.rank * share), min(count, (world.rank + 1) * share)
        if count < len(examples):
            examples = task.subset(examples, self.numbers)
        self.source = ExampleSource(samples, examples, task, config, regions, VALIDATION)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.size)

    def __getitem__(self, index: int) -> tuple[list[Batch], list[int], dict[int, Unreadable]]:
        if index >= len(self):
            raise IndexError(index)
        start = self.start + index * self.size
        stop = min(start + self.size, self.stop)
        numbers = self.numbers[start:stop].tolist()
        found = self.source.read([(0, number) for number in numbers], step=0)
        examples, _ = _parted(found)
        unreadable = {n: one for n, one in zip(numbers, found, strict=True) if isinstance(one, Unreadable)}
        numbers = [number for number in numbers if number not in unreadable]
        if not examples:
            return [], numbers, unreadable
        task = self.source.task
        if not task.validate_shuffled:
            return [collate(examples)], numbers, unreadable
        count = len(self.numbers)
        following = ((0, int(self.numbers[index % count])) for index in range(stop, stop + count))
        after = self.source.first_readable(following)
        following = [*examples[1:], after]
        others = [task.with_other_image(one, other) for one, other in zip(examples, following, strict=True)]
        return [collate(examples), collate(others)], numbers, unreadable


def _parted(found: Sequence[Example | Unreadable]) -> tuple[list[Example], list[Unreadable]]:
    examples = [one for one in found if isinstance(one, Example)]
    return examples, [one for one in found if isinstance(one, Unreadable)]
