"""What a run trains on, in which order: every batch is a pure function of (seed, step), whatever the ranks and workers.

The whole state of the data in a checkpoint is {snapshots, seed, samples consumed}: samples are numbered through all
epochs, step s takes samples s*batch .. (s+1)*batch - 1, and spans say over which snapshot each epoch runs. A sample
that cannot be read leaves its slot empty, with weight zero; no other sample replaces it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from storage.reading import Samples
from storage.sample import Sample
from storage.shuffle import shuffled, take
from training.distributed import World
from training.log import Unreadable
from vlbert.config import DataConfig, RegionConfig
from vlbert.data.batch import Batch, Example, collate, placeholder
from vlbert.data.corpus import TextCorpus
from vlbert.data.images import prepare_image
from vlbert.data.samples import MOST_UNREADABLE, spread
from vlbert.tasks.base import Examples, Task

CAPTIONS, TEXT, VALIDATION = 0, 1, 2  # streams of randomness that never meet; ANYWHERE is the fourth


@dataclass(frozen=True)
class SnapshotSpan:
    """Epochs over one snapshot.

    epoch      the first of them
    consumed   samples of the run before it
    examples   examples of each of these epochs
    snapshot   id
    """

    epoch: int
    consumed: int
    examples: int
    snapshot: str

    def boundary(self, step: int, batch: int, every: int | None) -> int | None:
        """The first sample of the epoch at which new shards may enter, if it lies in this step; else None.

        Such boundaries lie at least `every` steps apart, in whole epochs.
        """
        if every is None:
            return None
        period = self.examples * -(-every * batch // self.examples)
        first = self.consumed + max(1, -(-(step * batch - self.consumed) // period)) * period
        return first if first < (step + 1) * batch else None

    def followed_by(self, examples: int, snapshot: str, boundary: int) -> "SnapshotSpan":
        """The span over another snapshot that begins at `boundary`, the first sample of an epoch of this one."""
        epochs, rest = divmod(boundary - self.consumed, self.examples)
        assert rest == 0, f"sample {boundary} is no boundary of an epoch of {self}"
        return SnapshotSpan(self.epoch + epochs, boundary, examples, snapshot)


Slot = tuple[int, int, int]  # index in a list of spans, epoch, question


def drawn(spans: Sequence[SnapshotSpan], consumed: int, count: int, seed: int, chunk: int = 1) -> list[Slot]:
    """The `count` slots after the first `consumed` ones; chunk as in storage.shuffle.shuffled."""
    ends = [span.consumed for span in spans[1:]] + [consumed + count]
    found = []
    for index, (span, end) in enumerate(zip(spans, ends, strict=True)):
        n, samples = span.examples, np.arange(max(consumed, span.consumed), min(consumed + count, end))
        epochs, positions = np.divmod(samples - span.consumed, n)
        for epoch in np.unique(epochs).tolist():
            begins = span.consumed + epoch * n
            numbers = shuffled(positions[epochs == epoch], seed, CAPTIONS, span.epoch + epoch, n, chunk, begins)
            found += [(index, span.epoch + epoch, number) for number in numbers.tolist()]
    assert len(found) == count, f"samples {consumed} to {consumed + count} lie before {spans[0]}"
    return found


def generator(seed: int, stream: int, epoch: int, key: str, question: int = 0) -> np.random.Generator:
    """The randomness of one sample in one epoch: the same on every rank and worker."""
    return np.random.default_rng([seed, stream, epoch, int.from_bytes(key.encode()), question])


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
        numbers = [int(self.examples.samples[number]) for _, number in slots]
        found = []
        for sample, number, slot in zip(self.samples.samples(numbers), numbers, slots, strict=True):
            example = self._example(sample, *slot, step)
            if isinstance(example, Unreadable) and isinstance(sample, Sample):
                example = self._without_cache(number, slot, step) or example
            found.append(example)
        return found

    def first_readable(self, slots: Iterable[tuple[int, int]]) -> Example:
        """The first of these that can be read; ValueError after MOST_UNREADABLE that cannot."""
        for tried, slot in enumerate(slots, 1):
            (found,) = self.read([slot], step=0)
            if isinstance(found, Example):
                return found
            if tried == MOST_UNREADABLE:
                break
        raise ValueError(f"{tried} examples in a row cannot be read, the last because {found.reason}")

    def _without_cache(self, number: int, slot: tuple[int, int], step: int) -> Example | Unreadable | None:
        """The Example of a sample that was read and does not decode, read again past the cache; None: no cache."""
        try:
            sample = self.samples.past_cache(number)
        except ValueError as error:
            sample = error
        return None if sample is None else self._example(sample, *slot, step)

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


class TrainingData(Dataset):
    """data[step] is what this rank computes in that step: one Batch per part of the accumulation."""

    def __init__(
        self,
        samples: Samples,
        examples: Examples,
        task: Task,
        config: DataConfig,
        regions: RegionConfig,
        world: World,
        corpus: TextCorpus | None = None,
        spans: Sequence[SnapshotSpan] = (),
    ):
        """spans: those of a run so far, the last of them over `samples`; none: its first, nothing consumed."""
        check_shares(config, world.size)
        self.corpus, self.config, self.rank, self.world_size = corpus, config, world.rank, world.size
        self.spans = [*spans] or [SnapshotSpan(0, 0, len(examples), "")]
        self.source = ExampleSource(samples, examples, task, config, regions, CAPTIONS)  # of the last span
        self._sources = {len(self.spans) - 1: self.source}  # by index in `spans`

    def boundary(self, step: int) -> int | None:
        """The sample of this step at which new shards may enter, if any: see SnapshotSpan.boundary."""
        return self.spans[-1].boundary(step, self.config.batch, self.config.new_shards_every)

    def enter(self, samples: Samples, examples: Examples, snapshot: str, boundary: int) -> None:
        """From sample `boundary` on, the first of an epoch, read another snapshot."""
        before, self.source = self.source, dataclasses.replace(self.source, samples=samples, examples=examples)
        self.spans.append(self.spans[-1].followed_by(len(examples), snapshot, boundary))
        last = len(self.spans) - 1
        self._sources = {last - 1: before, last: self.source}  # one step may need both

    def __getitem__(self, step: int) -> list[Batch]:
        count = self.config.batch
        pairs = self._shares(drawn(self.spans, step * count, count, self.config.seed, self.config.chunk))
        count, lines = self.config.text_batch, len(self.corpus) if self.corpus else 1
        texts = self._shares(take(step * count, count, self.config.seed, TEXT, lines))
        return [self._batch(step, pair, text) for pair, text in zip(pairs, texts, strict=True)]

    def _shares(self, everyone: list[Any]) -> list[list[Any]]:
        """What this rank takes of the slots of a step, one list per part."""
        size = len(everyone) // (self.world_size * self.config.gradient_accumulation)
        starts = [(part * self.world_size + self.rank) * size for part in range(self.config.gradient_accumulation)]
        return [everyone[start : start + size] for start in starts]

    def _batch(self, step: int, pairs: list[Slot], texts: list[tuple[int, int]]) -> Batch:
        found = []
        for span, slots in itertools.groupby(pairs, key=lambda slot: slot[0]):
            found += self._sources[span].read([(epoch, number) for _, epoch, number in slots], step + 1)
        examples, unreadable = _parted(found)
        if not examples:  # a batch without any image would not train the image network: see `placeholder`
            span, epoch, number = pairs[-1]
            others = spread(len(self._sources[span].examples), self.config.seed, epoch, number)
            examples.append(placeholder(self._sources[span].first_readable((epoch, other) for other in others)))
        return collate([*examples, *self._texts(texts)], unreadable)

    def _texts(self, slots: list[tuple[int, int]]) -> Iterator[Example]:
        if slots:
            settings, lines = self.source.task.settings, np.array([line for _, line in slots])
            for (epoch, line), tokens in zip(slots, self.corpus.passages(lines, settings.text_length), strict=True):
                key = f"text-{line}"
                yield self.source.task.text_example(key, tokens, generator(self.config.seed, TEXT, epoch, key))


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
        if not self.source.task.shuffles:
            return [collate(examples)], numbers, unreadable
        count = len(self.numbers)
        following = ((0, int(self.numbers[index % count])) for index in range(stop, stop + count))
        after = self.source.first_readable(following)
        images = [example.image for example in [*examples[1:], after]]
        others = [dataclasses.replace(e, image=image) for e, image in zip(examples, images, strict=True)]
        return [collate(examples), collate(others)], numbers, unreadable


def _parted(found: Sequence[Example | Unreadable]) -> tuple[list[Example], list[Unreadable]]:
    examples = [one for one in found if isinstance(one, Example)]
    return examples, [one for one in found if isinstance(one, Unreadable)]
