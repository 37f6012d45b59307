"""Karpathy's split file over a few samples, a root with these and a recipe that trains on it in seconds."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tiny import commit_samples, tiny_recipe, tiny_sample

from storage.sample import Sample
from vlbert.config import DataConfig, Recipe
from vlbert.tasks.retrieval import RetrievalSettings

SPLIT_FILE = RetrievalSettings().file


def image(name: str, split: str, captions: Sequence[str]) -> dict:
    return {"filename": name, "split": split, "sentences": [{"raw": caption} for caption in captions]}


def captions_of(sample: Sample) -> list[str]:
    """Two captions: the sample's, and one with its objects in reverse."""
    return [sample.caption, " and ".join(sample.caption.split(" and ")[::-1])]


def write_retrieval(folder: Path, samples: Sequence[Sample], test: int = 6) -> None:
    """dataset_flickr30k.json: the first samples are train, the last `test` are test."""
    folder.mkdir(exist_ok=True)
    splits = ["train"] * (len(samples) - test) + ["test"] * test
    named = zip(samples, splits, strict=True)
    images = [image(sample.url.rpartition("/")[2], split, captions_of(sample)) for sample, split in named]
    (folder / SPLIT_FILE).write_text(json.dumps({"images": images}))


def retrieval_root(folder: Path) -> Path:
    """The folder with `root`, 16 samples of the dataset flickr30k, and `files`: ten of them are train, six test."""
    samples = [tiny_sample(i, regions=1 + i % 3) for i in range(16)]
    commit_samples(folder / "root", "flickr30k", samples)
    write_retrieval(folder / "files", samples)
    return folder


def retrieval_recipe(folder: Path, **changes: object) -> Recipe:
    of_flickr = {"datasets": {"flickr30k": None}, "held_out": ("flickr30k",)}
    values = {
        "run_name": "tuned",
        "task": RetrievalSettings(str(folder / "files"), caption_length=20, validate_on="test"),
        "data": DataConfig(str(folder / "root"), **of_flickr, batch=8, workers=0, unreadable=1.0),
        "vocabulary": None,
        "vocabulary_size": 60,
        "random_init": True,
        "steps": 2,
        "save_every": 2,
    }
    return dataclasses.replace(tiny_recipe(folder / "root"), **values | changes)
