"""A root with a few drawn samples and a recipe that trains on it in seconds."""

import dataclasses
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType, SimpleNamespace

import numpy as np
from PIL import Image, ImageDraw

from detectors.resnet import ResNetConfig
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import open_store
from storage.sample import Regions, Sample, sample_key
from storage.settings import as_arguments, changed_fields
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.corpus import make_corpus
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.tasks.pretraining import PretrainingSettings

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 80, 220), "white": (240, 240, 240)}
SHAPES = ("square", "circle")
CLASSES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
DETECTOR = "00000000beef"
SIZE = (96, 64)  # width, height
LETTERS = Vocabulary([*SPECIALS, *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)])


def tiny_sample(number: int, regions: int = 2) -> Sample:
    """One or more coloured shapes on grey, with a caption that names them."""
    rng = np.random.default_rng(number)
    picture = Image.new("RGB", SIZE, (120, 120, 120))
    draw = ImageDraw.Draw(picture)
    boxes, labels, words = [], [], []
    for place in range(regions):
        side = int(rng.integers(18, 28))
        x = place * SIZE[0] // regions + int(rng.integers(0, SIZE[0] // regions - side))
        y = int(rng.integers(0, SIZE[1] - side))
        label = int(rng.integers(len(CLASSES)))
        colour, shape = CLASSES[label].split()
        (draw.rectangle if shape == "square" else draw.ellipse)([x, y, x + side - 1, y + side - 1], COLOURS[colour])
        boxes.append([x, y, x + side, y + side])
        labels.append(1 + label)
        words.append(f"a {colour} {shape}")
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=95)
    caption, url = " and ".join(words), f"http://example.org/{number:06d}.jpg"
    class_probs = np.zeros((regions, 1 + len(CLASSES)), np.float16)
    class_probs[np.arange(regions), labels] = 1
    return Sample(
        key=sample_key(url, caption),
        image=data.getvalue(),
        caption=caption,
        url=url,
        width=SIZE[0],
        height=SIZE[1],
        sha256=hashlib.sha256(data.getvalue()).hexdigest(),
        regions=Regions(
            boxes=np.array(boxes, np.float32),
            scores=np.ones(regions, np.float32),
            labels=np.array(labels, np.int32),
            detector=DETECTOR,
            class_probs=class_probs,
        ),
    )


def with_bytes(sample: Sample, more: bytes) -> Sample:
    """The sample with so many bytes behind the end of its JPEG, where decoders pass over them."""
    return dataclasses.replace(sample, image=sample.image + more)


def commit_samples(root: Path, dataset: str, samples: list[Sample], per_shard: int = 8) -> None:
    """Region shards of `samples` under root/dataset."""
    for start in range(0, len(samples), per_shard):
        part = dict(enumerate(samples[start : start + per_shard], start))
        assert _commit(root, dataset, start // per_shard, part)


def commit_more(root: Path, shard: str, numbers: Sequence[int]) -> bool:
    """Another region shard, of samples that a root does not hold yet; False where it is there already."""
    return _commit(root, "captions", int(shard), {i: tiny_sample(i, regions=1 + i % 3) for i in numbers})


def _commit(root: Path, dataset: str, shard: int, samples: dict[int, Sample]) -> bool:
    rows = [Row(i, one.key, "ok", "", one.url, None if i % 3 else "CC BY 4.0") for i, one in samples.items()]
    catalog, meta = Catalog(open_store(str(root)), dataset), {"random_init": False}
    return commit_shard(catalog, f"regions/{DETECTOR}", f"{shard:05d}", [*samples.values()], rows, meta)


def tiny_root(folder: Path, samples: int = 24, held_out: int = 8) -> Path:
    """A root with the datasets `captions` and `held-out`, and a text corpus with its vocabulary in root/text."""
    root, lines = folder / "root", folder / "lines.txt"
    commit_samples(root, "captions", [tiny_sample(i, regions=1 + i % 3) for i in range(samples)])
    commit_samples(root, "held-out", [tiny_sample(1000 + i, regions=1 + i % 3) for i in range(held_out)])
    lines.write_text("".join(f"{tiny_sample(i).caption} and {tiny_sample(i + 1).caption}\n" for i in range(20)))
    make_corpus(root / "text", [lines], vocabulary=None, size=120, captions=[])
    return root


TINY_MODEL = ModelConfig(
    layers="JJ",
    hidden_size=32,
    num_heads=4,
    intermediate_size=64,
    max_positions=64,
    dropout=0.1,
    initializer_range=0.1,
    visual_gain_words=0.5,
    visual_gain_regions=1.0,
    geometry_channels=32,
    regions=RegionConfig(
        resnet=ResNetConfig(blocks=(1, 1, 1, 1), width=4, stem_pool="torch", res5_dilated=False),
        short_side=64,
        long_side=96,
        roi_size=4,
        frozen_stages=0,
        random_init=True,
        pixel_std=60.0,
    ),
)


# ViLBERT and Unicoder-VL, on precomputed features.
CHANNELS = TINY_MODEL.regions.channels
SEPARATE = dataclasses.replace(
    TINY_MODEL,
    embedding="separate",
    dropout=0.0,
    regions=dataclasses.replace(TINY_MODEL.regions, features="precomputed", random_init=False),
)
VILBERT = dataclasses.replace(
    SEPARATE,
    layers="TXTVX",
    region_hidden_size=48,
    region_num_heads=3,
    region_intermediate_size=40,
    coattention_size=24,
    coattention_num_heads=2,
    whole_image="mean",
    pooler="product",
)
UNICODER_VL = dataclasses.replace(SEPARATE, layers="JJ", whole_image="none", region_segment=True)
# Arguments that make the model of any recipe as small.
_SMALL = {"layers": "JJ", "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "geometry_channels": 32}
_SMALL |= {"regions.resnet.blocks": (1, 1, 1, 1), "regions.resnet.width": 8, "regions.roi_size": 4}
_SMALL |= {"regions.short_side": 48, "regions.long_side": 80}
SMALL_MODEL = as_arguments({f"model.{name}": value for name, value in _SMALL.items()})


def tiny_recipe(root: Path, data: Mapping | DataConfig = MappingProxyType({}), **changes: object) -> Recipe:
    """Pre-training in seconds: dropout on, all norms frozen, so that one process and two compute the same."""
    recipe = Recipe(
        name="tiny",
        task=PretrainingSettings(
            words=WordMasking(probability=0.3), regions=RegionMasking(probability=0.4, masked=0.5), text_length=12
        ),
        model=TINY_MODEL,
        data=DataConfig(
            root=str(root),
            held_out=("held-out",),
            batch=8,
            text_batch=4,
            text_corpus=str(root / "text"),
            workers=0,
            unreadable=1.0,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=2),
        steps=6,
        precision="fp32",
        vocabulary=str(root / "text" / "vocab.txt"),
        log_every=1,
        validate_every=100,
        validation_samples=8,
        save_every=3,
    )
    data = data if isinstance(data, DataConfig) else dataclasses.replace(recipe.data, **data)
    return dataclasses.replace(recipe, data=data, **changes)


def as_overrides(recipe: Recipe, of: Recipe) -> list[str]:
    """The command line's overrides that turn the recipe `of` into `recipe` (its name aside)."""
    return as_arguments(changed_fields(dataclasses.replace(recipe, name=of.name), of))


def urls(samples: list, withdrawn: tuple[str, ...] = ()) -> SimpleNamespace:
    """What a task reads of samples."""
    return SimpleNamespace(urls=[sample.url for sample in samples], withdrawn=withdrawn)
