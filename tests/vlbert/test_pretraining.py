"""Pre-training: masked inputs and their labels, losses, accuracies."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import CLASSES, TINY_MODEL, tiny_sample

from storage.sample import Sample
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


def example(task: Pretraining, of: int | Sample = 1, regions: int = 2) -> Example:
    sample = tiny_sample(of, regions) if isinstance(of, int) else of
    return task.example(sample, prepare_image(sample, TINY_MODEL.regions, False), None, np.random.default_rng(0))


def test_labels_are_the_masked_words_and_the_classes_of_the_masked_regions():
    """A class: the detector's distribution, background first in any order of its, or the best class but background."""
    sample = tiny_sample(1)
    given, labels = sample.regions, sample.regions.labels
    probs = np.full_like(given.class_probs, 0.05)
    probs[:, 0], probs[[0, 1], labels] = 0.5, 0.2  # the background is likelier than any class
    first = dataclasses.replace(given, class_probs=probs)
    last = {"class_probs": np.roll(probs, -1, axis=1), "background": len(CLASSES), "labels": labels - 1}
    for target, expected in (("distribution", probs), ("class", np.eye(9)[labels])):
        for regions in (first, dataclasses.replace(given, **last)):
            doubtful = dataclasses.replace(sample, regions=regions)
            found = example(task(dataclasses.replace(ALL, region_target=target)), doubtful)
            np.testing.assert_array_equal(found.image.labels["region_classes"], expected.astype(np.float32))
    assert found.image.masked.tolist() == [False, True, True]
    words = len(found.text.labels["words"])
    assert found.text.tokens.tolist() == [WORDS.cls, *[WORDS.mask] * words, WORDS.sep]
    assert WORDS.decode(found.text.labels["words"]) == sample.caption
    assert found.text.label_masks["word_label_mask"].tolist() == [False, *[True] * words, False]


def test_text_only_rows_may_have_special_tokens_and_settings_that_do_not_fit_are_refused():
    tokens = WORDS.encode("a red square and a blue circle")
    tagged = task(dataclasses.replace(ALL, text_specials=True, text_length=7))
    row = tagged.text_example("text-3", tokens, np.random.default_rng(0)).text
    assert row.tokens.tolist() == [WORDS.cls, *[WORDS.mask] * 5, WORDS.sep]
    assert row.label_masks["word_label_mask"].tolist() == [False, *[True] * 5, False]
    assert row.labels["words"].tolist() == tokens[:5].tolist()
    with pytest.raises(ValueError, match="text_length is 2; it must be at least 1, and 3 with text_specials"):
        PretrainingSettings(text_specials=True, text_length=2)
    with pytest.raises(ValueError, match="monitored_words: purple are not single tokens"):
        task(dataclasses.replace(ALL, monitored_words=("red", "purple")))


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
    masked = WordMasking(words), RegionMasking(regions)
    masking = task(PretrainingSettings(*masked, losses_over=losses_over, max_elements=None))
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
    each = F.cross_entropy(words, batch.labels["words"], reduction="none")
    each_region = F.cross_entropy(regions, batch.labels["region_classes"], reduction="none")
    # Words: 3 of row 0, 2 of row 1 (text), 11 of row 2, none of row 3, 2 of row 4 (text). Regions: 1, then 3.
    by_label, by_row = (task(s).losses(None, lambda *_: (words, regions), None, batch) for s in (ALL, settings))
    counted = [by_label[f"{name}_accuracy"] for name in ("words", "text_words")]
    assert [(int(right), found) for right, found in counted] == [(2 + 5, 14), (1 + 1, 4)]
    of_rows = {
        "words": [each[:3], each[5:16]],
        "text_words": [each[3:5], each[16:]],
        "regions": [each_region[:1], each_region[1:]],
    }
    for name, rows in of_rows.items():
        torch.testing.assert_close(by_label[name], (torch.cat(rows).sum(), sum(map(len, rows))))
        # The authors add 1e-4 to both counts.
        mean = sum(row.sum() / (len(row) + 1e-4) for row in rows) / (len(rows) + 1e-4)
        total, count = by_row[name]
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


def test_accuracies_are_of_words_monitored_words_and_masked_regions():
    settings = dataclasses.replace(ALL, regions=RegionMasking(1.0, masked=0.5), monitored_words=("red", "square"))
    counting = task(settings)
    batch = collate([example(counting, number, 3) for number in range(30)])
    truth = batch.labels["words"]
    right_but_squares = torch.where(truth == WORDS.ids["square"], WORDS.ids["circle"], truth)
    classes = batch.labels["region_classes"].argmax(1)
    masked = batch.region_masked.flatten()[batch.labelled["region_label_mask"]]
    wrong_where_masked = torch.where(masked, (classes + 1) % 9, classes)
    logits = F.one_hot(right_but_squares, len(WORDS)).float(), F.one_hot(wrong_where_masked, 9).float()
    metrics = counting.metrics(counting.predictions(None, lambda *_: logits, None, batch))
    squares, reds = (truth == WORDS.ids["square"]).sum().item(), (truth == WORDS.ids["red"]).sum().item()
    assert metrics["words_accuracy"] == pytest.approx(1 - squares / len(truth))
    assert metrics["monitored_accuracy"] == pytest.approx(reds / (reds + squares))
    assert metrics["regions_accuracy"] == 0, "unmasked regions do not count"
    assert 0 < int(masked.sum()) < len(masked)
    losses = counting.losses(None, lambda *_: logits, None, batch)
    right, found = losses["words_accuracy"]
    assert (int(right), found) == (len(truth) - squares, len(truth))
    right, found = losses["regions_accuracy"]
    assert (int(right), found) == (int((~masked).sum()), len(masked)), "training counts all that have a label"
