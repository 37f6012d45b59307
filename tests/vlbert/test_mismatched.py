"""Pairs of a caption and the image of another: which rows, what has labels, the same in every world."""

import dataclasses

import numpy as np
import pytest
import torch
from loaded import ALONE, rows_in_order, training_data
from tiny import CLASSES, TINY_MODEL, tiny_recipe, tiny_root, tiny_sample

from storage.object_store import open_store
from vlbert.data.batch import Example
from vlbert.data.images import prepare_image
from vlbert.data.loading import TrainingData, ValidationData
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.data.samples import open_samples
from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

MASKED = PretrainingSettings(
    words=WordMasking(probability=0.5), regions=RegionMasking(probability=0.5), relationship=True, mismatched=0.5
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory):
    return tiny_root(tmp_path_factory.mktemp("mismatched"))


def make_task(root, **changes) -> Pretraining:
    settings = dataclasses.replace(MASKED, **changes)
    return Pretraining(settings, Vocabulary.read(root / "text" / "vocab.txt"), len(CLASSES))


def make_example(task: Pretraining, number: int) -> Example:
    sample = tiny_sample(number)
    return task.example(sample, prepare_image(sample, TINY_MODEL.regions, False), None, np.random.default_rng(number))


def data_of(root, task: Pretraining, **changes) -> TrainingData:
    return training_data(root, task=task, text_batch=0, text_corpus=None, **changes)


def test_half_of_the_pairs_are_mismatched_and_their_label_says_so(root):
    task = make_task(root)
    data = data_of(root, task)
    plain = data_of(root, make_task(root, mismatched=0.0))
    labels = torch.cat([data[step][0].labels["related"] for step in range(12)])
    assert len(labels) == 96
    assert 30 < int((labels == 0).sum()) < 66
    assert not any(plain[step][0].labels["related"].any() for step in range(3))


@pytest.mark.parametrize("labelled", [False, True])
def test_a_mismatched_pair_has_the_next_image_and_is_masked_with_or_without_labels(root, labelled: bool):
    task = make_task(root, mismatched=1.0, mismatched_labels=labelled)
    examples = [make_example(task, number) for number in range(4)]
    for one, other, found in zip(examples, [*examples[1:], examples[0]], task.collate_group(examples, []), strict=True):
        assert np.array_equal(found.text.tokens, one.text.tokens)
        assert found.image.pixels is other.image.pixels
        assert np.array_equal(found.image.masked, other.image.masked)
        assert found.text.labels["related"].tolist() == [1]
        words, regions = (one.text.labels["words"], other.image.labels["region_classes"]) if labelled else ([], [])
        assert found.text.labels["words"].tolist() == list(words)
        assert len(found.image.labels["region_classes"]) == len(regions)
        assert found.image.label_masks["region_label_mask"].any() == bool(len(regions))


def test_an_image_of_the_same_url_is_no_mismatch_and_a_batch_of_one_has_none(root):
    task = make_task(root, mismatched=1.0)
    one, other = make_example(task, 1), make_example(task, 2)
    same = dataclasses.replace(other, metadata=other.metadata | {"url": one.metadata["url"]})
    assert task.collate_group([one], [same]) == [one]
    with pytest.raises(ValueError, match=r"data\.batch is 1"):
        data_of(root, task, batch=1)


def test_pairs_are_the_same_in_every_world(root):
    """The last example of a step is followed by its first, whichever rank reads it. Step 3 begins another epoch."""
    task = make_task(root)

    def rows(step: int, size: int, parts: int = 1) -> list[str]:
        ranks = [data_of(root, task, rank=rank, size=size, gradient_accumulation=parts) for rank in range(size)]
        found = [batch for data in ranks for batch in data[step]]
        labels = [batch.labels["related"].tolist() for batch in found]
        return [str(row) for batch in found for row in rows_in_order(batch)] + [str(sum(labels, []))]

    for step in (0, 2, 3):
        assert rows(step, 1) == rows(step, 2) == rows(step, 4) == rows(step, 1, parts=4)


def test_in_validation_no_pair_is_mismatched_and_with_other_images_all_are_and_keep_their_labels(root):
    task = make_task(root)
    samples, _ = open_samples(open_store(str(root)), "captions", None, None, ALONE)
    config = tiny_recipe(root).data
    data = ValidationData(samples, task.examples(samples, None), task, config, TINY_MODEL, ALONE, None)
    batches = [data[index][0] for index in range(len(data))]
    plain, shuffled = (torch.cat([pair[i].labels["related"] for pair in batches]) for i in (0, 1))
    assert shuffled.all()
    assert not plain.any()
    words = [sum(len(pair[i].labels["words"]) for pair in batches) for i in (0, 1)]
    assert words[0] == words[1] > 0
    assert all(len(pair[1].labels["region_classes"]) for pair in batches)
