"""Training and validation data. A step's examples do not depend on the number of processes and workers.

A checkpoint holds the whole state of the data: the datasets with weights and snapshots, the seed, and the number of
samples consumed. A run is a sequence of slots for one example each, numbered across all epochs. Step s has the slots
s*batch to (s+1)*batch - 1, and vlbert/data/order.py maps each slot to a draw from a dataset and thus to an example. If
the example's sample cannot be read, the slot stays empty and has weight zero; no other sample replaces it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from storage.order import interleaved, samples_after, shuffled
from storage.reading import Samples, ShardSamples
from storage.sample import Sample
from training.distributed import World
from training.log import Unreadable
from vlbert.config import DataConfig, ModelConfig, RegionConfig
from vlbert.data.batch import Batch, Example, collate, make_placeholder
from vlbert.data.corpus import TextCorpus
from vlbert.data.images import prepare_image
from vlbert.data.order import CAPTIONS, TEXT, VALIDATION, SnapshotSpan, draw_samples, seed_of
from vlbert.data.samples import MAX_UNREADABLE, row_in_list, sample_indices
from vlbert.tasks.base import Examples, Task

# BatchNorm over 2 images costs 11 points of ImageNet accuracy, over 4 images 4 points (arXiv:1803.08494, figure 1).
LEAST_NORMED = 4
Slot = tuple[int, int, int, int]  # index of the dataset, index in its spans, epoch, index of the example


def generator(seed: int, stream: int, epoch: int, key: str, number: int = 0) -> np.random.Generator:
    """Return the random generator for an example in an epoch. It is the same in every process.

    `stream` is a constant of vlbert/data/order.py. `number` distinguishes the examples of the sample with this key.
    """
    return np.random.default_rng([seed, stream, epoch, int.from_bytes(key.encode()), number])


def parts_of_step(step: int, batch: int, weights: Sequence[float]) -> list[tuple[int, int, int, np.ndarray]]:
    """Return (dataset index, start, stop, positions) for each dataset that a step uses.

    The step uses the dataset's draws `start` to `stop` - 1 (see vlbert/data/order.py). `positions` are the positions of
    these draws in the batch, int64 [stop - start].
    """
    numbers, draws = interleaved(step * batch, batch, weights)
    positions = {number: np.flatnonzero(numbers == number) for number in range(len(weights))}
    return [(n, int(draws[slots[0]]), int(draws[slots[-1]]) + 1, slots) for n, slots in positions.items() if len(slots)]


def check_shares(config: DataConfig, world_size: int, regions: RegionConfig) -> None:
    """Raise ValueError if a batch cannot be split evenly into world_size * gradient_accumulation parts.

    Also raises it if BatchNorms would normalise over fewer than LEAST_NORMED images, the number in a part.
    """
    parts = world_size * config.gradient_accumulation
    for name in ("batch", "text_batch"):
        if getattr(config, name) % parts:
            raise ValueError(
                f"data.{name} = {getattr(config, name)} cannot be split over {world_size} processes x "
                f"data.gradient_accumulation = {config.gradient_accumulation}; choose a multiple of {parts}"
            )
    if regions.live_norms and config.batch // parts < LEAST_NORMED:
        raise ValueError(
            f"the ResNet's BatchNorms would normalise over {config.batch // parts} images, but need {LEAST_NORMED}: "
            "lower data.gradient_accumulation, raise data.batch, train on fewer GPUs, or freeze the norms with "
            "--model.regions.resnet.norm=frozen"
        )


@dataclass(frozen=True, eq=False)
class ExampleSource:
    """A reader that turns the samples of one snapshot into examples of the task."""

    samples: Samples
    examples: Examples
    task: Task
    config: DataConfig
    model: ModelConfig
    stream: int  # CAPTIONS or VALIDATION of order.py, selects the random numbers

    def read(self, slots: Sequence[tuple[int, int]], step: int) -> list[Example | Unreadable]:
        """Return an Example for each slot (epoch, example index), or an Unreadable that says why it cannot be read."""
        samples = self.samples.samples([int(self.examples.samples[number]) for _, number in slots])
        return [self._example(sample, *slot, step) for sample, slot in zip(samples, slots, strict=True)]

    def first_readable(self, slots: Iterable[tuple[int, int]]) -> Example:
        """Return the first readable example of these slots. Raises ValueError after MAX_UNREADABLE failures."""
        tried = list(itertools.islice(slots, MAX_UNREADABLE))
        for slot in tried:
            (result,) = self.read([slot], step=0)
            if isinstance(result, Example):
                return result
        raise ValueError(f"{len(tried)} examples in a row cannot be read, the last because {result.reason}")

    def _example(self, sample: Sample | ValueError, epoch: int, number: int, step: int) -> Example | Unreadable:
        if isinstance(sample, ValueError):
            return Unreadable(step, getattr(sample, "key", None), str(sample))
        try:
            annotation = self.examples.annotations[number] if len(self.examples.annotations) else None
            rng = generator(self.config.seed, self.stream, epoch, sample.key, 0 if annotation is None else number)
            flip = self.stream != VALIDATION and bool(rng.random() < self.config.flip)
            example = self.task.example(sample, prepare_image(sample, self.model.regions, flip), annotation, rng)
            longest = max(len(text.tokens) for text in example.texts)
            if longest > self.model.max_tokens:  # of a task that does not limit its texts
                place, most = row_in_list(self.samples, int(self.examples.samples[number])), self.model.max_tokens
                raise ValueError(f"{place}: its text has {longest} tokens, but the model reads at most {most}")
            if cut := example.metadata.get("cut"):
                example.metadata["cut"] = f"{row_in_list(self.samples, int(self.examples.samples[number]))}: {cut}"
            return example
        except ValueError as error:
            reason = str(error) if sample.key in str(error) else f"sample {sample.key}: {error}"
            return Unreadable(step, sample.key, reason)


@dataclass(eq=False)
class TrainingDataset:
    """A dataset of a run, with the snapshots that its epochs have used so far.

    Attributes:
        samples, examples: samples and examples of the newest snapshot.
        spans: the epochs of each snapshot, oldest first. By default, all epochs use `samples`.
        weight: share of the run's slots, relative to the other datasets.
        pinned: other values that a checkpoint records: `dataset`, `stage` and `random_init`.
    """

    samples: ShardSamples
    examples: Examples
    spans: list[SnapshotSpan] = field(default_factory=list)
    weight: float = 1.0
    pinned: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.spans = self.spans or [SnapshotSpan(0, 0, len(self.examples), "")]


class TrainingData(Dataset):
    """The training batches of this rank. data[step] is a list of batches whose gradients are accumulated."""

    def __init__(
        self,
        datasets: Sequence[TrainingDataset],
        task: Task,
        config: DataConfig,
        model: ModelConfig,
        world: World,
        corpus: TextCorpus | None = None,
    ):
        if config.batch <= task.lookahead:
            raise ValueError(f"data.batch is {config.batch}; the task needs at least {task.lookahead + 1} examples")
        self.datasets, self.task, self.corpus, self.config = datasets, task, corpus, config
        self.rank, self.world_size = world.rank, world.size
        self._weights = [dataset.weight for dataset in datasets]
        self._sources = {}  # (index of the dataset, index in its spans) -> ExampleSource
        for number, dataset in enumerate(datasets):
            dataset_config = replace(config, seed=seed_of(config.seed, number))
            source = ExampleSource(dataset.samples, dataset.examples, task, dataset_config, model, CAPTIONS)
            self._sources[number, len(dataset.spans) - 1] = source

    def source(self, number: int = 0) -> ExampleSource:
        return self._sources[number, len(self.datasets[number].spans) - 1]

    def boundaries(self, step: int) -> list[tuple[int, int]]:
        """Return where in a step datasets may switch to a newer snapshot, as a list of (dataset index, draw)."""
        boundaries, config = [], self.config
        if config.new_shards_every is None:
            return boundaries
        for number, start, stop, _ in parts_of_step(step, config.batch, self._weights):
            span, share = self.datasets[number].spans[-1], self._weights[number] / sum(self._weights)
            distance = math.ceil(config.new_shards_every * config.batch * share)
            boundary = span.boundary(start, stop, distance)
            # A span must not end in the step in which it begins, even if a step exceeds `distance` by a sample or two.
            if boundary is not None and span.consumed < start:
                boundaries.append((number, boundary))
        return boundaries

    def switch_snapshot(
        self, number: int, samples: ShardSamples, examples: Examples, snapshot: str, boundary: int
    ) -> None:
        """Switch dataset `number` to another snapshot at draw `boundary`, which must be the first draw of an epoch."""
        dataset, before = self.datasets[number], self.source(number)
        last = len(dataset.spans)
        dataset.samples, dataset.examples = samples, examples
        dataset.spans.append(dataset.spans[-1].followed_by(len(examples), snapshot, boundary))
        kept = {key: source for key, source in self._sources.items() if key[0] != number}
        # A step may need both the old and the new snapshot.
        current = {(number, last - 1): before, (number, last): replace(before, samples=samples, examples=examples)}
        self._sources = kept | current

    def __getitem__(self, index: int) -> list[Batch]:
        return [collate(*part) for part in self.examples(index)]

    def examples(self, step: int) -> list[tuple[list[Example], list[Unreadable]]]:
        """Return (examples, unreadable examples) for each of this rank's batches. Text-only examples come last."""
        slots = self.slots(step)
        shares = self._shares(list(enumerate(slots)))
        pairs = [[slot for _, slot in share] for share in shares]
        following = [slots[share[-1][0] + 1 :] + slots[: share[0][0]] for share in shares]  # of the whole step
        count, lines = self.config.text_batch, len(self.corpus) if self.corpus else 1
        texts = self._shares(samples_after(step * count, count, self.config.seed, TEXT, lines))
        return [self._examples(step, *part) for part in zip(pairs, following, texts, strict=True)]

    def slots(self, step: int) -> list[Slot]:
        """Return the slots of a step on all ranks, in batch order. A slot identifies an example (see `Slot`)."""
        by_position: dict[int, Slot] = {}
        for number, start, stop, positions in parts_of_step(step, self.config.batch, self._weights):
            seed, spans = self.source(number).config.seed, self.datasets[number].spans
            epochs = draw_samples(spans, start, stop - start, seed, self.config.chunk)
            slots = [(number, index, epoch, i) for index, epoch, indices in epochs for i in indices.tolist()]
            by_position |= zip(positions.tolist(), slots, strict=True)
        return [by_position[position] for position in range(self.config.batch)]

    def _shares(self, slots: list[Any]) -> list[list[Any]]:
        """Split a step's slots evenly over the batches of all ranks. Return the slots of each batch of this rank."""
        size = len(slots) // (self.world_size * self.config.gradient_accumulation)
        starts = [(part * self.world_size + self.rank) * size for part in range(self.config.gradient_accumulation)]
        return [slots[start : start + size] for start in starts]

    def _read(self, step: int, slots: Sequence[Slot]) -> list[Example | Unreadable]:
        """Return an Example or Unreadable for each slot, in order. Slots of one snapshot are read together."""
        positions = defaultdict(list)
        for position, slot in enumerate(slots):
            positions[slot[:2]].append(position)
        by_position: dict[int, Example | Unreadable] = {}
        for source, indices in positions.items():
            examples = self._sources[source].read([slots[position][2:] for position in indices], step + 1)
            by_position |= dict(zip(indices, examples, strict=True))
        return [by_position[position] for position in range(len(slots))]

    def _examples(
        self, step: int, pairs: list[Slot], following: list[Slot], texts: list[tuple[int, int]]
    ) -> tuple[list[Example], list[Unreadable]]:
        examples, unreadable = _split_readable(self._read(step, pairs))
        cut = [example for example in examples if example.metadata.get("cut")]
        unreadable += [Unreadable(step + 1, example.key, example.metadata["cut"], cut=True) for example in cut]
        if examples and self.task.lookahead:
            readable = (example for slot in following for example in _split_readable(self._read(step, [slot]))[0])
            examples = self.task.collate_group(examples, list(itertools.islice(readable, self.task.lookahead)))
        if not examples:  # the image network needs an image in each batch, see `make_placeholder`
            *snapshot, epoch, number = pairs[-1]
            source = self._sources[*snapshot]
            others = sample_indices(len(source.examples), source.config.seed, epoch, number)
            examples.append(make_placeholder(source.first_readable((epoch, other) for other in others)))
        return [*examples, *self._texts(texts)], unreadable

    def _texts(self, slots: list[tuple[int, int]]) -> Iterator[Example]:
        if slots and self.corpus is not None:
            settings, lines = self.task.settings, np.array([line for _, line in slots])
            for (epoch, line), tokens in zip(slots, self.corpus.passages(lines, settings.text_length), strict=True):
                key = f"text-{line}"
                yield self.task.text_example(key, tokens, generator(self.config.seed, TEXT, epoch, key))


class ValidationData(Dataset):
    """The validation batches of this rank, the same in every validation.

    data[i] is a tuple (batches, numbers, unreadable). `batches` is [batch], or [] if no example is readable. `numbers`
    has the indices of the examples in the batch. `unreadable` is a dict from example index to Unreadable.

    The order of the examples is random, but the same for every world size. If the task sets `validate_shuffled`,
    `batches` is [batch, shuffled]. In `shuffled`, each text has the image of the next example.
    """

    def __init__(
        self,
        samples: Samples,
        examples: Examples,
        task: Task,
        config: DataConfig,
        model: ModelConfig,
        world: World,
        limit: int | None,
        batch_size: int | None = None,
    ):
        """Split `limit` random examples (None: all) over all ranks. By default, `batch_size` is as in training."""
        count = len(examples) if limit is None else min(limit, len(examples))
        self.numbers = shuffled(np.arange(count), config.seed, VALIDATION, 0, len(examples))
        self.size = batch_size or max(1, config.batch // world.size // config.gradient_accumulation)
        share = -(-count // world.size)
        if batch_size:  # whole batches
            share = -(-share // batch_size) * batch_size
        self.start, self.stop = min(count, world.rank * share), min(count, (world.rank + 1) * share)
        if count < len(examples):
            examples = task.subset(examples, self.numbers)
        self.source = ExampleSource(samples, examples, task, config, model, VALIDATION)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.size)

    def __getitem__(self, index: int) -> tuple[list[Batch], list[int], dict[int, Unreadable]]:
        if index >= len(self):
            raise IndexError(index)
        start = self.start + index * self.size
        stop = min(start + self.size, self.stop)
        numbers = self.numbers[start:stop].tolist()
        results = self.source.read([(0, number) for number in numbers], step=0)
        examples, _ = _split_readable(results)
        unreadable = {n: result for n, result in zip(numbers, results, strict=True) if isinstance(result, Unreadable)}
        numbers = [number for number in numbers if number not in unreadable]
        batches, task, count = [collate(examples)] if examples else [], self.source.task, len(self.numbers)
        if examples and task.validate_shuffled:
            slots = ((0, int(self.numbers[index % count])) for index in range(stop, stop + count))
            following = [*examples[1:], self.source.first_readable(slots)]
            batches.append(collate([task.with_other_image(*pair) for pair in zip(examples, following, strict=True)]))
        return batches, numbers, unreadable


def _split_readable(results: Sequence[Example | Unreadable]) -> tuple[list[Example], list[Unreadable]]:
    examples = [result for result in results if isinstance(result, Example)]
    return examples, [result for result in results if isinstance(result, Unreadable)]
