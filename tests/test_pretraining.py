import dataclasses

import numpy as np
import pytest
import torch
from tiny import CLASSES, TINY_MODEL, tiny_sample

from vlbert.batch import Example, collate
from vlbert.masking import RegionMasking, WordMasking
from vlbert.model import TaskModel, VLBert
from vlbert.pictures import view
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.text import SPECIALS, Vocabulary

WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "blue", "white", "square", "circle"])
ALL = PretrainingSettings(WordMasking(1.0, masked=1.0, random=0.0), RegionMasking(1.0, hidden=1.0), max_elements=None)


def task(settings: PretrainingSettings = ALL) -> Pretraining:
    return Pretraining(settings, WORDS, len(CLASSES))


def example(task: Pretraining, number: int = 1, regions: int = 2) -> Example:
    sample = tiny_sample(number, regions)
    return task.example(sample, view(sample, TINY_MODEL.regions, False), None, np.random.default_rng(number))


def test_what_is_asked_for_is_what_was_hidden():
    sample, asked = tiny_sample(1), example(task())
    inner = slice(1, -1)
    assert asked.words.tokens[[0, -1]].tolist() == [WORDS.cls, WORDS.sep]
    assert (asked.words.tokens[inner] == WORDS.mask).all()
    assert WORDS.decode(asked.words.asked["words"]) == sample.caption
    assert asked.words.targets["word_asked"].tolist() == [False, *[True] * len(asked.words.asked["words"]), False]
    assert asked.picture.hidden.tolist() == [False, True, True]
    np.testing.assert_array_equal(asked.picture.asked["region_classes"].argmax(1), sample.regions.labels)


def test_targets_are_background_first_whatever_the_detectors_order():
    sample = tiny_sample(1)
    probs = sample.regions.class_probs
    last = dataclasses.replace(
        sample.regions,
        class_probs=np.concatenate([probs[:, 1:], probs[:, :1]], axis=1),
        background=len(CLASSES),
        labels=sample.regions.labels - 1,
    )
    rng = np.random.default_rng(0)
    seen = view(sample, TINY_MODEL.regions, False)
    theirs = task().example(dataclasses.replace(sample, regions=last), seen, None, rng)
    np.testing.assert_array_equal(
        theirs.picture.asked["region_classes"], example(task()).picture.asked["region_classes"]
    )


def test_text_only_rows_have_neither_special_tokens_nor_a_picture():
    tokens = WORDS.encode("a red square and a blue circle")
    row = task().text_example("text-3", tokens, np.random.default_rng(0))
    assert row.picture is None
    assert (row.words.tokens == WORDS.mask).all()
    assert row.words.asked["words"].tolist() == tokens.tolist()


def test_long_rows_lose_the_end_of_the_longer_half():
    cut = example(task(dataclasses.replace(ALL, max_elements=8)), regions=2)
    # 7 words and 2 + 1 regions: words go until both fit into 8 with [CLS] and [SEP].
    assert len(cut.words.tokens) + len(cut.picture.boxes) == 8
    assert cut.words.tokens[-1] == WORDS.sep
    whole = example(task(), regions=2)
    assert cut.words.asked["words"].tolist() == whole.words.asked["words"][: len(cut.words.tokens) - 2].tolist()


def test_words_of_captions_and_of_text_alone_are_counted_apart():
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task()).eval()
    text = task().text_example("text", WORDS.encode("a red square"), np.random.default_rng(0))
    batch = collate([example(task(), 1), text, example(task(), 2)])
    losses = model(batch)
    captions = len(tiny_sample(1).caption.split()) + len(tiny_sample(2).caption.split())
    assert {name: count for name, (_, count) in losses.items()} == {"words": captions, "text_words": 3, "regions": 4}
    # A model that knows nothing is wrong by about ln(size).
    assert float(losses["words"][0].detach()) / captions == pytest.approx(np.log(len(WORDS)), rel=0.3)


class Oracle(torch.nn.Module):
    """A head that says what a function of the batch says."""

    def __init__(self, words, regions):
        super().__init__()
        self.say = words, regions

    def forward(self, vlbert, encoded, batch):
        return self.say[0](batch), self.say[1](batch)


def one_hot(ids: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(ids, size).float()


def test_accuracy_counts_words_watched_words_and_hidden_regions():
    settings = dataclasses.replace(ALL, regions=RegionMasking(1.0, hidden=0.5), watched_words=("red", "square"))
    counting = task(settings)
    batch = collate([example(counting, number, 3) for number in range(30)])
    truth = batch.asked["words"]
    right_but_squares = torch.where(truth == WORDS.ids["square"], WORDS.ids["circle"], truth)
    classes = batch.asked["region_classes"].argmax(1)
    hidden = batch.region_hidden[batch.targets["region_asked"]]
    wrong_where_hidden = torch.where(hidden, (classes + 1) % 9, classes)
    head = Oracle(lambda batch: one_hot(right_but_squares, len(WORDS)), lambda batch: one_hot(wrong_where_hidden, 9))
    metrics = counting.metrics(counting.predictions(None, head, None, batch))
    squares, reds = (truth == WORDS.ids["square"]).sum().item(), (truth == WORDS.ids["red"]).sum().item()
    assert metrics["words_accuracy"] == pytest.approx(1 - squares / len(truth))
    assert metrics["watched_accuracy"] == pytest.approx(reds / (reds + squares))
    assert metrics["regions_accuracy"] == 0, "a region left in sight is no question of language"
    assert 0 < int(hidden.sum()) < len(hidden)


def test_a_watched_word_that_the_vocabulary_lacks_is_named():
    with pytest.raises(ValueError, match="watched_words: purple are no whole pieces"):
        task(dataclasses.replace(ALL, watched_words=("red", "purple")))
