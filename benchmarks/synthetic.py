"""Make seeded samples, batches and models for a training step, without files.

Sizes vary as in Conceptual Captions and a text corpus, and values are never all zeros. These sizes determine the
amount of computation:
  captions   10.3 words on average with a standard deviation of 4.5 (as in Conceptual Captions), 1.1 word pieces per
             word; word frequencies follow Zipf's law
  regions    10 to 100 per image, uniform; a row is then cut at 64 elements, as published
  images     typical shapes of photographs on the web, most of them 4:3 and 3:2, resized by the recipe's rule
  text       rows of 64 word pieces, as published: lines are long enough to fill them
The training code does the masking, decoding and collating.
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

PIECES = 30_522  # size of BERT's vocabulary
CLASSES = 1600  # number of detector classes, without the background
DETECTOR = "00000000beef"
# (width, height) of stored images -> percentage.
SHAPES = {
    (640, 480): 30,
    (960, 640): 25,
    (1024, 576): 10,
    (640, 960): 12,
    (480, 640): 8,
    (700, 700): 10,
    (1200, 500): 5,
}
_JPEGS_PER_SHAPE = 6


@functools.cache
def make_vocabulary() -> Vocabulary:
    """Make a vocabulary of four-letter words. Every fourth word also has a continuation piece (##)."""
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
    return [piece for piece in make_vocabulary().tokens[len(SPECIALS) + 52 :] if not piece.startswith("##")]


def make_caption(rng: np.random.Generator, words: int | None = None) -> str:
    """Make a caption of random words, whose frequencies are inversely proportional to their ranks.

    It has `words` words of one piece each. If `words` is None, the length is random, and one word in ten has two.
    """
    known = _whole_words()
    count = 3 + round(rng.gamma(2.6, 2.8)) if words is None else words
    chosen = [known[int(len(known) ** share) - 1] for share in rng.random(count)]
    if words is None:
        chosen = [word + "s" if longer else word for word, longer in zip(chosen, rng.random(count) < 0.1, strict=True)]
    return " ".join(chosen)


@functools.cache
def make_jpeg(width: int, height: int, number: int) -> bytes:
    """Make a JPEG of soft colour patches with grain, which depends on `number`. 500 x 375 pixels take about 60 kB."""
    rng = np.random.default_rng((width, height, number))
    patches = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    patches = patches.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(patches, np.float32) + rng.normal(0, 9, (height, width, 3))
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def make_sample(
    number: int, channels: int | None, shape: tuple[int, int] | None = None, regions: int | None = None
) -> Sample:
    """Make a random image-caption pair with regions, like the output of the detection stage.

    Args:
        channels: Number of features per region; None: no features.
        shape: Width and height of the image; None: random.
        regions: Number of regions; None: random.
    """
    rng = np.random.default_rng((1, number))
    shares = np.array([*SHAPES.values()]) / sum(SHAPES.values())
    width, height = shape or list(SHAPES)[rng.choice(len(SHAPES), p=shares)]
    text = make_caption(rng)
    count = regions or int(rng.integers(10, 101))
    centre = rng.uniform(0.05, 0.95, (count, 2))
    half = rng.beta(1.3, 3, (count, 2)) / 2 + 0.02
    boxes = np.concatenate([centre - half, centre + half], axis=1).clip(0, 1) * [width, height, width, height]
    # Few classes are probable, and the first ones more than the others.
    probs = rng.random((count, 1 + CLASSES), np.float32) ** 8 / np.sqrt(np.arange(1, 2 + CLASSES, dtype=np.float32))
    probs /= probs.sum(axis=1, keepdims=True)
    url = f"http://example.org/{number}.jpg"
    return Sample(
        key=sample_key(url, text),
        image=make_jpeg(width, height, number % _JPEGS_PER_SHAPE),
        caption=text,
        url=url,
        width=width,
        height=height,
        sha256=f"{number:064x}",
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
    """Commit the samples as a region shard, like the detection stage. Their rows are numbered from `first_row`."""
    rows = [Row(first_row + i, sample.key, "ok", url=sample.url) for i, sample in enumerate(samples)]
    catalog, stage = Catalog(open_store(root), dataset), f"regions/{samples[0].require_regions().detector}"
    commit_shard(catalog, stage, f"{shard:05d}", samples, rows, {"random_init": False})


def make_samples(config: RegionConfig, numbers: Sequence[int], shape: tuple[int, int] | None = None) -> list[Sample]:
    """Make image-caption pairs, with features if `config` needs them. `shape`: width and height; None: random."""
    channels = config.channels if config.features == "precomputed" else None
    return [make_sample(number, channels, shape) for number in numbers]


def mask_pairs(task: Pretraining, config: RegionConfig, samples: Sequence[Sample], seed: int = 0) -> list[Example]:
    """Make training examples of the samples: decode, resize and mask them."""
    return [
        task.example(sample, prepare_image(sample, config, False), None, np.random.default_rng((2, seed, number)))
        for number, sample in enumerate(samples)
    ]


def make_text_examples(task: Pretraining, numbers: Sequence[int]) -> list[Example]:
    """Make text-only training examples of random words, one for each number."""
    examples = []
    for number in numbers:
        rng = np.random.default_rng((3, number))
        tokens = task.vocabulary.encode(make_caption(rng, task.settings.text_length))[: task.settings.text_length]
        examples.append(task.text_example(f"text {number}", tokens, rng))
    return examples


def without_files(recipe: Recipe) -> Recipe:
    """Set a recipe to random weights, and to visual gains of 1, so that images have an effect from the first step.

    Raises ValueError if it is not a pre-training recipe.
    """
    if not isinstance(recipe.task, PretrainingSettings):
        raise ValueError(f"recipe {recipe.name} is not a pre-training recipe; see the list of `vlbert recipes`")
    regions = dataclasses.replace(recipe.model.regions, random_init=True, weights=None, pixel_std=60.0)
    model = dataclasses.replace(recipe.model, regions=regions, visual_gain_words=1.0, visual_gain_regions=1.0)
    return dataclasses.replace(recipe, model=model, bert=None)


def make_benchmark_task(recipe: Recipe) -> Any:
    return make_task(recipe.task, make_vocabulary(), CLASSES)


def new_model(recipe: Recipe, device: torch.device) -> TaskModel:
    """Make a recipe's model in training mode on `device`, with random weights that are the same in every call."""
    model = make_model(recipe, make_benchmark_task(recipe), make_vocabulary(), None, None, lambda line: None)
    execute_as(recipe, model.vlbert)
    return model.to(device).train()


def make_batch(recipe: Recipe, pairs: int, texts: int) -> Batch:
    task, regions = make_benchmark_task(recipe), recipe.model.regions
    examples = mask_pairs(task, regions, make_samples(regions, range(pairs)))
    return collate(examples + make_text_examples(task, range(texts)))
