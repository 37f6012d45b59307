"""Seeded samples, inputs and models of a training step, as ragged as Conceptual Captions and a text corpus are; never
zeros, and without files.

Numbers that decide how much there is to compute, and where they are from:
  captions   10.3 words on average, 4.5 their deviation (Conceptual Captions' own statistics), 1.1 word pieces a word;
             some words are frequent and most are rare, as in any text (Zipf's law)
  regions    10 to 100 of an image, each number as likely; a row is then cut at 64 elements, as published
  images     the shapes of photographs on the web, most of them 4:3 and 3:2, resized by the recipe's rule
  text       rows of 64 word pieces, as published: a line goes on until it is full
Masks, decoding and collating are those of training itself.
"""

import dataclasses
import functools
import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import open_store
from storage.sample import Regions, Sample, sample_key
from vlbert.config import Recipe, RegionConfig
from vlbert.data.batch import Batch, Example, collate
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.initial_weights import make_model
from vlbert.model.execution import execute_as
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

PIECES = 30_522  # as many as BERT's vocabulary has
CLASSES = 1600  # of the detector, without the background
DETECTOR = "00000000beef"
# (width, height) of stored images, and how many of a hundred have it.
SHAPES = {
    (640, 480): 30,
    (960, 640): 25,
    (1024, 576): 10,
    (640, 960): 12,
    (480, 640): 8,
    (700, 700): 10,
    (1200, 500): 5,
}
_JPEGS_OF_A_SHAPE = 6


@functools.cache
def made_up_vocabulary() -> Vocabulary:
    """Words of three or four letters and, for every fifth of them, a piece that goes on with a word."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIALS, *letters, *(f"##{letter}" for letter in letters)]
    for count, word in enumerate("".join(word) for word in itertools.product(letters, "aeiou", letters, letters)):
        pieces.append(word)
        if count % 4 == 0:
            pieces.append(f"##{word}")
        if len(pieces) >= PIECES:
            break
    return Vocabulary(pieces[:PIECES])


@functools.cache
def _whole_words() -> list[str]:
    return [piece for piece in made_up_vocabulary().tokens[len(SPECIALS) + 52 :] if not piece.startswith("##")]


def caption(rng: np.random.Generator, words: int | None = None) -> str:
    """Made-up words, the n-th of them n times as rare as the first, and one in ten of two pieces; as many as `words`,
    of one piece each, where that is given."""
    known = _whole_words()
    count = 3 + round(rng.gamma(2.6, 2.8)) if words is None else words
    chosen = [known[int(len(known) ** share) - 1] for share in rng.random(count)]
    if words is None:
        chosen = [word + "s" if longer else word for word, longer in zip(chosen, rng.random(count) < 0.1, strict=True)]
    return " ".join(chosen)


@functools.cache
def drawn_jpeg(width: int, height: int, number: int) -> bytes:
    """A photograph of nothing: soft patches of colour, and grain; 500 x 375 pixels take about 60 kB."""
    rng = np.random.default_rng((width, height, number))
    patches = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    pixels = np.asarray(patches, np.float32) + rng.normal(0, 9, (height, width, 3))
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def drawn_sample(
    number: int, channels: int | None, shape: tuple[int, int] | None = None, regions: int | None = None
) -> Sample:
    """A pair as the detection stage leaves it, with `channels` features a region if that is given.

    shape and regions are drawn where they are not given.
    """
    rng = np.random.default_rng((1, number))
    shares = np.array([*SHAPES.values()]) / sum(SHAPES.values())
    width, height = shape or list(SHAPES)[rng.choice(len(SHAPES), p=shares)]
    text = caption(rng)
    count = regions or int(rng.integers(10, 101))
    centre = rng.uniform(0.05, 0.95, (count, 2))
    half = rng.beta(1.3, 3, (count, 2)) / 2 + 0.02
    boxes = np.concatenate([centre - half, centre + half], axis=1).clip(0, 1) * [width, height, width, height]
    # A few classes are likely, and rather the first ones.
    probs = rng.random((count, 1 + CLASSES), np.float32) ** 8 / np.sqrt(np.arange(1, 2 + CLASSES, dtype=np.float32))
    probs /= probs.sum(axis=1, keepdims=True)
    url = f"http://example.org/{number}.jpg"
    return Sample(
        key=sample_key(url, text),
        image=drawn_jpeg(width, height, number % _JPEGS_OF_A_SHAPE),
        caption=text,
        url=url,
        width=width,
        height=height,
        sha256="0" * 64,
        regions=Regions(
            boxes=boxes.astype(np.float32),
            scores=np.sort(rng.random(count, np.float32))[::-1],
            labels=probs[:, 1:].argmax(axis=1).astype(np.int32) + 1,
            detector=DETECTOR,
            class_probs=probs.astype(np.float16),
            features=None if channels is None else np.abs(rng.normal(0, 1, (count, channels))).astype(np.float16),
        ),
    )


def commit_samples(root: str, dataset: str, samples: Sequence[Sample], first_row: int = 0, shard: int = 0) -> None:
    """A region shard of these samples, as the detection stage commits it."""
    rows = [Row(first_row + place, sample.key, "ok", url=sample.url) for place, sample in enumerate(samples)]
    catalog = Catalog(open_store(root), dataset)
    commit_shard(
        catalog, f"regions/{samples[0].regions.detector}", f"{shard:05d}", samples, rows, {"random_init": False}
    )


def drawn_samples(config: RegionConfig, numbers: Sequence[int], shape: tuple[int, int] | None = None) -> list[Sample]:
    """Pairs that fit the model; of one shape, where it is given."""
    channels = config.channels if config.features == "precomputed" else None
    return [drawn_sample(number, channels, shape) for number in numbers]


def masked_pairs(task: Pretraining, config: RegionConfig, samples: Sequence[Sample], seed: int = 0) -> list[Example]:
    """The samples as training makes examples of them: decoded, resized, masked."""
    return [
        task.example(sample, prepare_image(sample, config, False), None, np.random.default_rng((2, seed, number)))
        for number, sample in enumerate(samples)
    ]


def drawn_texts(task: Pretraining, numbers: Sequence[int]) -> list[Example]:
    """Rows of the text-only corpus."""
    examples = []
    for number in numbers:
        rng = np.random.default_rng((3, number))
        tokens = task.vocabulary.encode(caption(rng, task.settings.text_length))[: task.settings.text_length]
        examples.append(task.text_example(f"text {number}", tokens, rng))
    return examples


def without_files(recipe: Recipe) -> Recipe:
    """The recipe from random weights, with the image in sight from the first step; ValueError unless it is one of
    pre-training."""
    if not isinstance(recipe.task, PretrainingSettings):
        raise ValueError(f"recipe {recipe.name} is no pre-training; vlbert recipes lists all")
    regions = dataclasses.replace(recipe.model.regions, random_init=True, weights=None, pixel_std=60.0)
    model = dataclasses.replace(recipe.model, regions=regions, visual_gain_words=1.0, visual_gain_regions=1.0)
    return dataclasses.replace(recipe, model=model, bert=None)


def task_of(recipe: Recipe) -> Any:
    return make_task(recipe.task, made_up_vocabulary(), CLASSES)


def new_model(recipe: Recipe, device: torch.device) -> TaskModel:
    """Of random weights, the same at every call; ready to train."""
    model = make_model(recipe, task_of(recipe), made_up_vocabulary(), None, None, lambda line: None)
    execute_as(recipe, model.vlbert)
    return model.to(device).train()


def made_up_batch(recipe: Recipe, pairs: int, texts: int) -> Batch:
    task, regions = task_of(recipe), recipe.model.regions
    examples = masked_pairs(task, regions, drawn_samples(regions, range(pairs)))
    return collate(examples + drawn_texts(task, range(texts)))
