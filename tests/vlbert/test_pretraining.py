"""Pre-training: masked inputs and their labels, losses, accuracies."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import CLASSES, TINY_MODEL, tiny_sample

from vlbert.data.batch import Example, collate
from vlbert.data.images import prepare_image
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "blue", "white", "square", "circle"])
ALL = PretrainingSettings(WordMasking(1.0, masked=1.0, random=0.0), RegionMasking(1.0, masked=1.0), max_elements=None)


def task(settings: PretrainingSettings = ALL) -> Pretraining:
    return Pretraining(settings, WORDS, len(CLASSES))


def example(task: Pretraining, number: int = 1, regions: int = 2) -> Example:
    sample = tiny_sample(number, regions)
    return task.example(sample, prepare_image(sample, TINY_MODEL.regions, False), None, np.random.default_rng(number))


def test_labels_are_the_masked_words_and_the_classes_of_the_masked_regions():
    sample, found = tiny_sample(1), example(task())
    inner = slice(1, -1)
    assert found.text.tokens[[0, -1]].tolist() == [WORDS.cls, WORDS.sep]
    assert (found.text.tokens[inner] == WORDS.mask).all()
    assert WORDS.decode(found.text.labels["words"]) == sample.caption
    assert found.text.label_masks["word_label_mask"].tolist() == [
        False,
        *[True] * len(found.text.labels["words"]),
        False,
    ]
    assert found.image.masked.tolist() == [False, True, True]
    np.testing.assert_array_equal(found.image.labels["region_classes"].argmax(1), sample.regions.labels)


def test_region_labels_are_background_first_in_any_order_of_the_detector():
    sample = tiny_sample(1)
    probs = sample.regions.class_probs
    last = dataclasses.replace(
        sample.regions,
        class_probs=np.concatenate([probs[:, 1:], probs[:, :1]], axis=1),
        background=len(CLASSES),
        labels=sample.regions.labels - 1,
    )
    rng = np.random.default_rng(0)
    image = prepare_image(sample, TINY_MODEL.regions, False)
    theirs = task().example(dataclasses.replace(sample, regions=last), image, None, rng)
    np.testing.assert_array_equal(theirs.image.labels["region_classes"], example(task()).image.labels["region_classes"])


def test_text_only_rows_may_have_special_tokens():
    tokens = WORDS.encode("a red square and a blue circle")
    tagged = task(dataclasses.replace(ALL, text_specials=True, text_length=7))
    row = tagged.text_example("text-3", tokens, np.random.default_rng(0)).text
    assert row.tokens.tolist() == [WORDS.cls, *[WORDS.mask] * 5, WORDS.sep]
    assert row.label_masks["word_label_mask"].tolist() == [False, *[True] * 5, False]
    assert row.labels["words"].tolist() == tokens[:5].tolist()
    with pytest.raises(ValueError, match="text_length is 2; it must be at least 1, and 3 with text_specials"):
        PretrainingSettings(text_specials=True, text_length=2)


def test_the_label_of_a_region_is_the_detectors_distribution_or_its_best_class():
    sample = tiny_sample(1)
    probs = np.full_like(sample.regions.class_probs, 0.05)
    probs[:, 0] = 0.5  # the background, likelier than any class
    probs[[0, 1], sample.regions.labels] = 0.2
    doubtful = dataclasses.replace(sample, regions=dataclasses.replace(sample.regions, class_probs=probs))
    image = prepare_image(sample, TINY_MODEL.regions, False)
    found = {
        target: task(dataclasses.replace(ALL, region_target=target))
        .example(doubtful, image, None, np.random.default_rng(0))
        .image.labels["region_classes"]
        for target in ("distribution", "class")
    }
    np.testing.assert_array_equal(found["distribution"], probs.astype(np.float32))
    np.testing.assert_array_equal(found["class"], np.eye(9, dtype=np.float32)[sample.regions.labels])


def test_a_long_row_loses_the_end_of_its_longer_part():
    cut = example(task(dataclasses.replace(ALL, max_elements=8)), regions=2)
    # 7 words and 2 + 1 regions: words go until both fit into 8 with [CLS] and [SEP].
    assert len(cut.text.tokens) + len(cut.image.boxes) == 8
    assert cut.text.tokens[-1] == WORDS.sep
    whole = example(task(), regions=2)
    assert cut.text.labels["words"].tolist() == whole.text.labels["words"][: len(cut.text.tokens) - 2].tolist()


@pytest.mark.parametrize("losses_over", ["labels", "rows"])
@pytest.mark.parametrize("images", [True, False], ids=["captions and text", "text alone"])
@pytest.mark.parametrize("words", [1.0, 0.0], ids=["words", "no words"])
@pytest.mark.parametrize("regions", [1.0, 0.0], ids=["regions", "no regions"])
def test_what_has_no_label_has_a_loss_of_zero(losses_over, images, words, regions):
    masking = task(
        PretrainingSettings(WordMasking(words), RegionMasking(regions), losses_over=losses_over, max_elements=None)
    )
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), masking)
    rows = [masking.text_example("text", WORDS.encode("a red square"), np.random.default_rng(0))]
    losses = model(collate([*([example(masking, 1, 3)] if images else []), *rows, *rows]))
    losses = {name: loss for name, loss in losses.items() if loss[0].requires_grad}
    expected = {"words": images and words, "text_words": words, "regions": images and regions}
    for name, (loss, count) in losses.items():
        assert (count > 0) == (float(loss.detach()) > 0) == bool(expected.pop(name)), name
    assert not expected
    sum(loss / max(1, count) for loss, count in losses.values()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_loss_is_the_mean_of_labels_or_of_rows_with_a_label():
    settings = dataclasses.replace(ALL, losses_over="rows")
    text = task().text_example("text", WORDS.encode("a red"), np.random.default_rng(0))
    unmasked = task(dataclasses.replace(ALL, words=WordMasking(0.0), regions=RegionMasking(0.0)))
    batch = collate([example(task(), 1, 1), text, example(task(), 2, 3), example(unmasked, 3), text])
    words, regions = (torch.randn(len(batch.labels[name]), n) for name, n in (("words", 13), ("region_classes", 9)))
    words[torch.arange(18), batch.labels["words"]] = torch.tensor([9.0, -9.0]).repeat(9)  # every second one is right
    head = Oracle(lambda _: words, lambda _: regions)
    each = F.cross_entropy(words, batch.labels["words"], reduction="none")
    each_region = F.cross_entropy(regions, batch.labels["region_classes"], reduction="none")
    # Words: 3 of row 0, 2 of row 1 (text), 11 of row 2, none of row 3, 2 of row 4 (text). Regions: 1, then 3.
    captions, texts = torch.cat([each[:3], each[5:16]]), torch.cat([each[3:5], each[16:]])
    losses = {name: task(s).losses(None, head, None, batch) for name, s in (("labels", ALL), ("rows", settings))}
    for name, all_of_it in (("words", captions), ("text_words", texts), ("regions", each_region)):
        total, count = losses["labels"][name]
        torch.testing.assert_close((total, count), (all_of_it.sum(), len(all_of_it)))
    counted = [losses["labels"][f"{name}_accuracy"] for name in ("words", "text_words")]
    assert [(int(right), found) for right, found in counted] == [(2 + 5, 14), (1 + 1, 4)]
    by_row = {
        "words": [each[:3], each[5:16]],
        "text_words": [each[3:5], each[16:]],
        "regions": [each_region[:1], each_region[1:]],
    }
    for name, rows in by_row.items():
        # The authors add 1e-4 to both counts.
        mean = sum(row.sum() / (len(row) + 1e-4) for row in rows) / (len(rows) + 1e-4)
        total, count = losses["rows"][name]
        assert count == len(rows)
        torch.testing.assert_close(total / count, mean)


def test_the_relationship_loss_is_over_rows_with_an_image():
    masking = task(dataclasses.replace(ALL, relationship=True))
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), masking).eval()
    text = masking.text_example("text", WORDS.encode("a red"), np.random.default_rng(0))
    batch = collate([example(masking, 1), text, example(masking, 2)])
    batch.labels["related"] = torch.tensor([1, 0])
    at_cls = model.vlbert(batch).text[[0, 2], 0]
    logits = model.head.relationship(model.head.pooler.dense(at_cls).tanh())
    loss, count = model(batch)["relationship"]
    assert count == 2
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.tensor([1, 0]), reduction="sum"))


class Oracle(torch.nn.Module):
    """A head whose logits are functions of the batch."""

    def __init__(self, words, regions):
        super().__init__()
        self.logits = words, regions

    def forward(self, vlbert, encoded, batch):
        return self.logits[0](batch), self.logits[1](batch)


def one_hot(ids: torch.Tensor, size: int) -> torch.Tensor:
    return F.one_hot(ids, size).float()


def test_accuracies_are_of_words_monitored_words_and_masked_regions():
    settings = dataclasses.replace(ALL, regions=RegionMasking(1.0, masked=0.5), monitored_words=("red", "square"))
    counting = task(settings)
    batch = collate([example(counting, number, 3) for number in range(30)])
    truth = batch.labels["words"]
    right_but_squares = torch.where(truth == WORDS.ids["square"], WORDS.ids["circle"], truth)
    classes = batch.labels["region_classes"].argmax(1)
    masked = batch.region_masked.flatten()[batch.labelled["region_label_mask"]]
    wrong_where_masked = torch.where(masked, (classes + 1) % 9, classes)
    head = Oracle(lambda batch: one_hot(right_but_squares, len(WORDS)), lambda batch: one_hot(wrong_where_masked, 9))
    metrics = counting.metrics(counting.predictions(None, head, None, batch))
    squares, reds = (truth == WORDS.ids["square"]).sum().item(), (truth == WORDS.ids["red"]).sum().item()
    assert metrics["words_accuracy"] == pytest.approx(1 - squares / len(truth))
    assert metrics["monitored_accuracy"] == pytest.approx(reds / (reds + squares))
    assert metrics["regions_accuracy"] == 0, "unmasked regions do not count"
    assert 0 < int(masked.sum()) < len(masked)
    losses = counting.losses(None, head, None, batch)
    right, found = losses["words_accuracy"]
    assert (int(right), found) == (len(truth) - squares, len(truth))
    right, found = losses["regions_accuracy"]
    assert (int(right), found) == (int((~masked).sum()), len(masked)), "training counts all that have a label"


def test_a_monitored_word_that_the_vocabulary_lacks_is_named():
    with pytest.raises(ValueError, match="monitored_words: purple are not single tokens"):
        task(dataclasses.replace(ALL, monitored_words=("red", "purple")))
