"""Captioned samples as a run loads them."""

import dataclasses

import torch
from tiny import TINY_MODEL, tiny_recipe

from storage.object_store import open_store
from training.distributed import World
from vlbert.data.batch import Batch
from vlbert.data.corpus import TextCorpus
from vlbert.data.loading import TrainingData, TrainingDataset
from vlbert.data.samples import open_samples
from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks import make_task

CPU = torch.device("cpu")


ALONE = World(0, 1, CPU)


def training_data(root, rank: int = 0, size: int = 1, **changes) -> TrainingData:
    recipe = tiny_recipe(root)
    config = dataclasses.replace(recipe.data, **changes)
    samples, _ = open_samples(open_store(str(root)), "captions", None, None, ALONE)
    vocabulary = Vocabulary.read(root / "text" / "vocab.txt")
    task = make_task(recipe.task, vocabulary, samples.sample(0).regions.num_classes)
    corpus = TextCorpus(root / "text", vocabulary)
    questions = task.examples(samples, None)
    datasets, world = [TrainingDataset(samples, questions)], World(rank, size, CPU)
    return TrainingData(datasets, task, config, TINY_MODEL.regions, world, corpus)


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
        row = (
            batch.tokens[i][words].tolist(),
            labelled[i].tolist(),
            batch.boxes[i][regions].tolist(),
            batch.region_masked[i][regions].tolist(),
            pixels,
        )
        rows.append((key, row))
    return rows
