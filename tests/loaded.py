"""Captioned samples as a run loads them."""

from collections.abc import Mapping

import torch
from tiny import CLASSES, DETECTOR, TINY_MODEL, tiny_recipe

from storage.object_store import open_store
from training.distributed import ALONE, World
from vlbert.data.batch import Batch
from vlbert.data.corpus import TextCorpus
from vlbert.data.loading import TrainingData, TrainingDataset
from vlbert.data.order import SnapshotSpan
from vlbert.data.samples import open_samples
from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks import make_task
from vlbert.tasks.base import Task

CPU = torch.device("cpu")


def training_data(
    root,
    rank: int = 0,
    size: int = 1,
    weights: Mapping[str, float] | None = None,
    spans: Mapping[str, list[SnapshotSpan]] | None = None,
    task: Task | None = None,
    **changes,
) -> TrainingData:
    """What a process of such a world makes of the datasets with these weights; spans: of those of a resumed run."""
    recipe = tiny_recipe(root, changes)
    vocabulary = Vocabulary.read(root / "text" / "vocab.txt")
    task, datasets = task or make_task(recipe.task, vocabulary, len(CLASSES)), []
    for name, weight in (weights or {"captions": 1.0}).items():
        of_run = (spans or {}).get(name, [])
        pinned = {"stage": f"regions/{DETECTOR}", "snapshot": of_run[-1].snapshot} if of_run else None
        samples, _ = open_samples(open_store(str(root)), name, None, pinned, ALONE)
        datasets.append(TrainingDataset(samples, task.examples(samples, None), [*of_run], weight))
    corpus = TextCorpus(root / "text", vocabulary) if recipe.data.text_batch else None
    return TrainingData(datasets, task, recipe.data, TINY_MODEL, World(rank, size, CPU), corpus)


def captions(batch: Batch) -> list[str]:
    return [key for key in batch.keys if not key.startswith("text-")]


def rows_in_order(batch: Batch) -> list[tuple[str, tuple]]:
    """The key of each sample, and everything that it became apart from padding."""
    rows, image_of = [], {row: i for i, row in enumerate(batch.image_rows.tolist())}
    labelled = batch.labelled["word_label_mask"] % batch.tokens.shape[1]
    labelled = labelled.split(batch.sizes.labelled["word_label_mask"])
    for i, key in enumerate(batch.keys):
        words, regions = batch.text_mask[i], batch.region_mask[i]
        pixels = batch.image(image_of[i]).sum().item() if i in image_of else 0
        found = batch.tokens[i][words], labelled[i], batch.boxes[i][regions], batch.region_masked[i][regions]
        rows.append((key, (*[tensor.tolist() for tensor in found], pixels)))
    return rows
