"""vlbert.hf: each class computes what ours computes, bit for bit; saving, loading, the hub, the Auto classes."""

import dataclasses
import functools
import json
import logging
import re
import shutil
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from family import END_TO_END, TASKS, examples_of, new_model, retrieval
from hub import Hub, serve_hub
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from places import PROJECT
from predicted import WEIGHTS, WORDS, save_as
from tiny import TINY_MODEL, UNICODER_VL, VILBERT, tiny_recipe, tiny_sample
from transformers.utils.generic import find_labels

from vlbert import hf
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.data.boxes import box_location
from vlbert.hf.cards import model_card
from vlbert.hf.inputs import from_batch, to_batch
from vlbert.predict import Predictor, Ranker
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vqa import VQASettings

JOINT = dataclasses.replace(TINY_MODEL, dropout=0.0)  # VL-BERT, from pixels
MODELS = {"vl-bert": JOINT, "unicoder-vl": UNICODER_VL, "vilbert": VILBERT, "vilbert from pixels": END_TO_END}
HEADS = {
    "pre-training": hf.VLBertForPreTraining,
    "vqa": hf.VLBertForQuestionAnswering,
    "vcr": hf.VLBertForVisualCommonsenseReasoning,
    "refcoco+": hf.VLBertForReferringExpression,
    "retrieval": hf.VLBertForImageTextRetrieval,
}


# --- equal to our own classes -----------------------------------------------------------------------------------------


def labels_of(name: str, batch: Batch) -> dict[str, torch.Tensor]:
    """The labels of a batch as arguments of `forward`."""

    def filled(values: torch.Tensor, where: str, others: float) -> torch.Tensor:
        shape = (batch.tokens if where in ("word_label_mask", "choice") else batch.region_mask).shape
        padded = values.new_full((shape.numel(), *values.shape[1:]), others)
        return padded.index_copy(0, batch.labelled[where], values).view(*shape, *values.shape[1:])

    labels = batch.labels
    if name == "pre-training":
        words, regions = filled(labels["words"], "word_label_mask", -100), labels["region_classes"]
        regions = filled(regions, "region_label_mask", 0)
        return {"labels": words, "region_labels": regions, "sentence_image_labels": labels["related"]}
    if name == "vcr":
        index = batch.labelled["region_label_mask"]
        regions = filled(batch.region_classes.flatten()[index], "region_label_mask", -100)
        return {"labels": labels["right"].view(-1, 4).int().argmax(1), "region_labels": regions[::4]}
    if name == "retrieval":
        return {"labels": torch.stack([labels["anchor"], labels["role"]], dim=1)}
    return {"labels": labels["scores"] if name == "vqa" else filled(labels["target"], "candidate", 0)}


def task_batch(name: str, folder: Path, config: ModelConfig) -> tuple[TaskModel, Batch]:
    """A model of ours with new weights, and examples of its task to learn from."""
    task, samples = {**TASKS, "retrieval": retrieval}[name](folder)
    model, examples = new_model(task, config).eval(), examples_of(task, samples, config)
    if name == "retrieval":  # each row beside an image of its own
        rows = task.collate_group(examples[:4], [])
        examples = [Example(one.key, text, one.image) for one in rows for text in one.texts]
    return model, collate(examples)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", HEADS)
def test_outputs_and_losses_are_those_of_our_own_classes(tmp_path: Path, name: str, config: ModelConfig):
    (tmp_path / "files").mkdir()
    model, batch = task_batch(name, tmp_path / "files", config)
    ours = save_as(tmp_path, "ours", tiny_recipe(tmp_path, task=model.task.settings, model=config), model)
    theirs = HEADS[name].from_pretrained(ours)
    theirs.save_pretrained(tmp_path / "theirs")
    again = HEADS[name].from_pretrained(tmp_path / "theirs").state_dict()
    assert all(torch.equal(one, again.pop(key)) for key, one in theirs.state_dict().items())
    assert not again
    inputs, labels = from_batch(batch), labels_of(name, batch)
    with torch.no_grad():
        encoded, watched = model.vlbert(batch), model.vlbert(batch, attentions=True)
        losses = {kind: loss / max(1, n) for kind, (loss, n) in model(batch).items() if not kind.endswith("accuracy")}
        found, without_head = theirs(**inputs, **labels), hf.VLBertModel.from_pretrained(ours)
        alone = without_head(**inputs, output_attentions=True, output_hidden_states=True)
        text, regions = without_head(**inputs, return_dict=False)
    assert torch.equal(text, encoded.text)
    assert torch.equal(regions, encoded.regions)
    assert all(torch.equal(one.weights, two) for one, two in zip(watched.attentions, alone.attentions, strict=True))
    for states, last, expected in (
        (alone.hidden_states, alone.last_hidden_state, watched.text),
        (alone.visual_hidden_states, alone.visual_last_hidden_state, watched.regions),
    ):
        assert torch.equal(states[-1], last)
        assert torch.equal(last, expected)
        assert (len(states), torch.equal(states[0], states[-1])) == (1 + len(config.layers), False)
    assert torch.equal(found.loss, sum(losses.values()))
    assert find_labels(HEADS[name]) == ["labels"], "Trainer evaluates a loss where they are given"
    head, task = model.head, model.task
    if name == "pre-training":
        words, regions = head(model.vlbert, encoded, batch)
        assert torch.equal(found.prediction_logits, head.words(model.vlbert, encoded.text))
        assert torch.equal(found.region_logits, head.regions(encoded.regions))
        assert torch.allclose(found.prediction_logits[labels["labels"] >= 0], words, atol=1e-6)
        assert torch.equal(found.relationship_logits, head.related(encoded, torch.arange(len(batch))))
    elif name == "refcoco+":
        own = task.by_region(task.scores(head, encoded, batch), batch, -torch.inf)
        assert torch.equal(found.logits, own)
        assert not torch.isfinite(found.logits[~batch.region_mask]).any()
    else:
        assert torch.equal(found.logits, head(encoded) if name == "retrieval" else task.logits(head, encoded, batch))


def test_a_batch_and_its_arguments_are_the_same():
    """Texts with wide images, tall images and no image, in this order, with masks, classes and cells."""
    rng, examples = np.random.default_rng(0), []
    for number, size in enumerate([(96, 40), (40, 96), (90, 44), (44, 90), None]):
        tokens = np.array([2, *range(7, 8 + number), 3])
        text = TextInput(tokens, (tokens > 8).astype(np.int64), np.minimum(1, tokens % 2))
        image = None
        if size:
            boxes = np.array([[0, 0, size[0] - 1, size[1] - 1], [5, 5, 20, 30], [9, 3, 30, 20]][: 2 + number % 2])
            pixels, numbers = rng.integers(0, 256, (3, *size[::-1]), dtype=np.uint8), np.arange(len(boxes))
            cells = rng.integers(0, 2, (len(boxes), 2, 2)).astype(np.float32)
            more = {"cells": cells, "classes": numbers, "averaged_over": None if number else 5}
            image = ImageInput(boxes.astype(np.float32), numbers == 1, size, torch.from_numpy(pixels), **more)
        examples.append(Example(str(number), text, image))
    batch = collate(examples)
    again = to_batch(**from_batch(batch))
    assert len(batch.pixels) == 2, "tall and wide images are padded apart"
    for field in dataclasses.fields(Batch):
        before, after = getattr(batch, field.name), getattr(again, field.name)
        if field.name == "pixels":
            assert all(torch.equal(*both) for both in zip(before, after, strict=True))
        elif isinstance(before, torch.Tensor):
            mask = batch.region_mask if field.name == "boxes" else ...
            assert torch.equal(before[mask], after[mask]), field.name
            assert before.dtype == after.dtype, field.name
        elif field.name not in ("keys", "metadata"):
            assert before == after, field.name


def test_inputs_have_defaults():
    model = hf.VLBertModel(hf.VLBertConfig(JOINT, vocab_size=20)).eval()
    pixels = torch.randint(0, 256, (2, 3, 40, 60), dtype=torch.uint8)
    tokens = torch.tensor([[2, 7, 3], [2, 8, 3]])
    whole = torch.tensor([[[0.0, 0, 59, 39]]] * 2)
    given = {"boxes": whole, "visual_attention_mask": torch.ones(2, 1)}
    with torch.no_grad():
        found = model(tokens, pixel_values=pixels)
        assert torch.equal(found[0], model(tokens, torch.ones(2, 3), pixel_values=pixels, labels=None, **given)[0])
        assert found.visual_last_hidden_state.shape == (2, 1, 32)
        assert model(tokens).visual_last_hidden_state.shape == (2, 0, 32)
        wide, mask = torch.nn.functional.pad(tokens, (0, 4)), torch.tensor([[1, 1, 1, 0, 0, 0, 0]] * 2)
        more = {"boxes": whole.repeat(1, 3, 1), "visual_attention_mask": torch.tensor([[1, 0, 0]] * 2)}
        padded = model(wide, mask, pixel_values=pixels, **more)
        assert padded.last_hidden_state.shape == (2, 7, 32), "as wide as the inputs, though no text is"
        assert padded.visual_last_hidden_state.shape == (2, 3, 32)
        assert torch.allclose(padded[0][:, :3], found[0], atol=1e-6)
    with pytest.raises(TypeError, match="pixel_value"):
        model(tokens, pixel_value=pixels)


SIZE = {"image_sizes": torch.tensor([[40, 60]])}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "attention_mask has padding before the end"),
        ({"pixel_values": torch.zeros(1, 3, 40, 60)}, r"pixel_values is float32 \[1, 3, 40, 60\]; it must be uint8"),
        ({"pixel_values": torch.zeros(2, 3, 40, 60).byte()}, "1 texts, but pixel_values has 2"),
        ({"boxes": torch.zeros(1, 1, 4)}, "boxes need pixel_values or visual_embeds"),
        ({"visual_embeds": torch.zeros(1, 2, 64)}, "visual_embeds need boxes"),
        ({"visual_embeds": torch.zeros(1, 2, 64), "boxes": torch.zeros(1, 3, 4), **SIZE}, r"have \[2, 3\] regions"),
        (
            {"visual_embeds": torch.zeros(1, 1, 64), "boxes": torch.tensor([[[0, 0, 1.0, 1.0]]]), **SIZE},
            "boxes are fractions of the image",
        ),
        ({"input_ids": torch.tensor([2, 7, 3])}, r"input_ids is \[3\]; it must be \[texts, tokens\]"),
        ({"visual_embeds": torch.zeros(1, 1, 64), "boxes": torch.zeros(1, 1, 4).half(), **SIZE}, "are torch.float16"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: dict, named: str):
    model = hf.VLBertModel(hf.VLBertConfig(JOINT, vocab_size=20)).eval()
    with pytest.raises(ValueError, match=named):
        model(**{"input_ids": torch.tensor([[2, 7, 3]])} | changes)


# --- images and texts -------------------------------------------------------------------------------------------------

FOUR = ("a red square", "a green square", "a blue circle", "a white circle")
BOX = [[0, 0, 9, 9]]
FRACTIONS = [[0.1, 0.1, 0.5, 0.5], [0.2, 0.2, 0.9, 1.0004]]


@pytest.mark.parametrize(
    ("run", "auto", "text", "more"),
    [
        ("pretraining", transformers.AutoModelForPreTraining, "a [MASK] square", {"mask_regions": [2]}),
        ("vqa-pixels", transformers.AutoModelForVisualQuestionAnswering, "is a square red", {}),
        ("vcr-answers", transformers.AutoModelForMultipleChoice, "why is [2] red", {"choices": FOUR}),
    ],
)
def test_a_checkpoint_answers_through_auto_classes_as_vlbert_predict_does(models, run, auto, text, more):
    step = str(models / "runs" / run / "step-0000001")
    processor, model = transformers.AutoProcessor.from_pretrained(step), auto.from_pretrained(step)
    assert isinstance(processor, hf.VLBertProcessor)
    photo = Image.open(models / "photo.jpg")
    found, inputs = Predictor(step)(photo, text, **more), processor(images=photo, text=text, **more)
    with torch.no_grad():
        outputs = model(**inputs)
    if run == "pretraining":
        (guesses,) = (mask["guesses"] for mask in found.row["masks"])
        assert float(outputs.prediction_logits[0, 2].softmax(0).max()) == pytest.approx(guesses[0]["probability"])
        (masked,) = found.row["masked_regions"]
        assert int(outputs.region_logits[0, 2].argmax()) == masked["guesses"][0]["class"]
    elif run == "vqa-pixels":
        assert model.config.id2label[int(outputs.logits.argmax())] == found.answer
        assert float(outputs.logits.sigmoid().max()) == pytest.approx(found.row["probability"])
    else:
        assert outputs.logits[0].double().softmax(0).tolist() == pytest.approx(found.row["probabilities"])
        assert inputs["token_region"][0, 0].tolist()[:5] == [0, 0, 0, 2, 0]


def test_boxes_are_pixels_of_the_image_as_it_was_given(models):
    processor = hf.VLBertProcessor.from_pretrained(models / "runs/pretraining")
    large = Image.open(models / "photo.jpg").resize((2400, 1600))  # stored with a longer side of 1024
    inputs = processor(images=[large, large], text=["a [MASK]", "red"], boxes=[[[600, 400, 1200, 800]], []])
    regions = processor.config.model_config.regions
    scale = np.array(inputs["image_sizes"][0].tolist()[::-1] * 2) / np.array([2400, 1600] * 2)
    np.testing.assert_allclose(inputs["boxes"][0, 1].numpy(), scale * [600, 400, 1200, 800], atol=0.1)
    same = processor(images=large, text="a [MASK]", boxes=[[0.25, 0.25, 0.5, 0.5]], normalized=True)["boxes"]
    np.testing.assert_allclose(same.numpy(), inputs["boxes"][:1].numpy(), atol=1e-4)
    assert inputs["visual_attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert max(inputs["image_sizes"][0].tolist()) <= regions.long_side
    assert torch.equal(processor(images=large, text="red", boxes=[])["pixel_values"], inputs["pixel_values"][1:])
    turned = Image.new("RGB", (60, 40))
    turned.getexif()[0x0112] = 6  # stored lying, shown upright
    upright = processor(images=turned, text="red", boxes=[[0, 0, 39, 59]])
    height, width = upright["image_sizes"][0].tolist()
    assert upright["boxes"][0, 1].tolist() == pytest.approx([0, 0, 39 / 40 * width, 59 / 60 * height], abs=0.1)
    assert height > width
    ids = transformers.AutoTokenizer.from_pretrained(str(models / "runs/pretraining/step-0000001"))("a [MASK]")
    assert inputs["input_ids"][0].tolist() == ids["input_ids"] == processor.tokenizer("a [MASK]")["input_ids"]
    words = processor.tokenizer("red", return_tensors="pt")
    alone = hf.VLBertModel.from_pretrained(models / "runs/pretraining")(**words)
    assert alone.visual_last_hidden_state.shape[1] == 0


def test_features_of_your_own_are_taken_as_a_detectors_are(tmp_path):
    config = hf.VLBertConfig(VILBERT, vocab_size=len(WORDS), num_classes=8)
    processor = hf.VLBertProcessor(transformers.BertTokenizerFast(vocab=WORDS.ids), config)
    features = np.random.default_rng(0).normal(size=(2, VILBERT.regions.channels)).astype(np.float16)
    boxes = [[0, 0, 30, 30], [10, 10, 50, 40]]
    inputs = processor(text="a square", boxes=boxes, visual_embeds=features, image_sizes=(64, 96))
    np.testing.assert_array_equal(inputs["visual_embeds"][0, 1:].numpy(), features)
    np.testing.assert_allclose(inputs["visual_embeds"][0, 0].numpy(), features.astype(np.float32).mean(0), atol=1e-6)
    assert inputs["image_sizes"].tolist() == [[64, 96]]
    large = {"image_sizes": (640, 960), "boxes": [[0, 0, 960, 640], [96, 160, 480, 320]]}  # 0.4 by 0.25
    batch = to_batch(**processor(text="a square", visual_embeds=features, **large))
    locations = box_location(batch.boxes[0], batch.image_sizes)
    assert torch.equal(locations, torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0.1, 0.25, 0.5, 0.5, 0.1]]))
    assert hf.VLBertModel(config)(**inputs).visual_last_hidden_state.shape == (1, 3, 48)
    processor.save_pretrained(tmp_path)  # without a detector
    again = hf.VLBertProcessor.from_pretrained(tmp_path)
    assert again.to_dict() == processor.to_dict()
    assert again.detector_file is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"images": "photo.jpg"}, "text is missing"),
        ({"text": ["a", "b"], "images": ["photo.jpg"]}, "2 texts and 1 images"),
        ({"text": "a"}, "images are missing"),
        ({"text": "a", "images": "none.jpg"}, "none.jpg cannot be read"),
        ({"text": "a", "images": "photo.jpg", "boxes": BOX, "visual_embeds": np.zeros((1, 4))}, "pixels, not visual"),
        ({"text": "a", "images": "photo.jpg", "boxes": BOX, "choices": FOUR}, "takes no choices"),
        ({"text": "a", "images": "photo.jpg", "boxes": [[1, 2, 3, 4, 0.9]]}, r"boxes of an image are \[1, 5\]"),
        ({"text": "a", "images": "photo.jpg", "boxes": [*BOX, [9, 9, 3, 12]]}, "box 1 is .*x1 <= x2"),
        ({"text": "a", "images": "photo.jpg", "boxes": [[0, 0, 9, np.nan]]}, "box 0 is .*nan"),
        (
            {"text": "a", "images": "photo.jpg", "boxes": FRACTIONS},
            "fractions of the image; .*normalized=True",
        ),
        (
            {"text": "a", "images": "photo.jpg", "boxes": BOX, "normalized": True},
            "normalized is True, .* reach 9",
        ),
        ({"text": "a", "return_tensors": "np"}, "return_tensors='pt'"),
    ],
)
def test_the_processor_refuses_by_name(models, monkeypatch, arguments: dict, named: str):
    monkeypatch.chdir(models)
    with pytest.raises(ValueError, match=named):
        hf.VLBertProcessor.from_pretrained(models / "runs/pretraining")(**arguments)


def test_lengths_left_at_their_default_follow_the_model_and_others_are_refused():
    given = hf.VLBertConfig(TINY_MODEL, settings=VQASettings(answers=2))
    assert given.task_settings.question_length == 58
    assert hf.VLBertForQuestionAnswering(given).task.settings.question_length == 58
    assert hf.VLBertConfig(TINY_MODEL, task="RetrievalSettings", settings={}).task_settings.caption_length == 60
    wrong = hf.VLBertConfig(TINY_MODEL, task="VQASettings", settings={"question_length": 59})
    with pytest.raises(ValueError, match=r"^task.question_length is 59, the model has positions for 58"):
        hf.VLBertForQuestionAnswering(wrong)


def test_class_numbers_are_labels(tmp_path):
    tokens = torch.tensor([[2, 7, 3, 4, 3], [2, 8, 3, 4, 3]])
    config = hf.VLBertConfig(JOINT, vocab_size=20, settings=VQASettings(answers=3, answers_from_words=False))
    model, soft = hf.VLBertForQuestionAnswering(config).eval(), torch.eye(3)
    for numbers, rows in (([2, 0], [0, 1]), ([-100, 0], [1])):
        found = model(tokens, labels=torch.tensor(numbers)).loss
        expected = model(tokens[rows], labels=soft[[numbers[row] for row in rows]]).loss
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5), numbers
    for wrong in (torch.tensor([3, 0]), torch.tensor([0.0, 1.0])):
        with pytest.raises(ValueError, match=r"labels of shape \[2\] must be class numbers from 0 to 2, or -100"):
            model(tokens, labels=wrong)
    pixels = torch.randint(0, 256, (2, 3, 40, 60), dtype=torch.uint8)
    whole = torch.tensor([[[0.0, 0, 59, 39], [5, 5, 20, 30], [9, 3, 30, 20]]] * 2)
    inputs = {"input_ids": tokens, "pixel_values": pixels, "boxes": whole}
    grounded = hf.VLBertForReferringExpression(hf.VLBertConfig(JOINT, vocab_size=20, settings=RefCOCOSettings())).eval()
    by_number = grounded(**inputs, labels=torch.tensor([2, 1])).loss
    assert torch.equal(by_number, grounded(**inputs, labels=torch.eye(3)[[2, 1]]).loss)
    masked = hf.VLBertForPreTraining(
        hf.VLBertConfig(JOINT, vocab_size=20, num_classes=8, settings=PretrainingSettings())
    )
    classes, probabilities = torch.tensor([[-100, 3, 8], [-100, -100, 1]]), torch.zeros(2, 3, 9)
    probabilities[[0, 0, 1], [1, 2, 2], [3, 8, 1]] = 1
    losses = [masked.eval()(**inputs, region_labels=labels).loss for labels in (classes, probabilities)]
    assert torch.equal(*losses)
    ranked = hf.VLBertForImageTextRetrieval(
        hf.VLBertConfig(JOINT, vocab_size=20, settings=retrieval(tmp_path)[0].settings)
    )
    with pytest.raises(ValueError, match=r"labels is \[2\]; it must be \[pairs, 2\]"):
        ranked(**inputs, labels=torch.tensor([1, 0]))


def test_processor_and_tokenizer_have_one_true_limit(models):
    run = str(models / "runs/vqa-pixels")
    processor = transformers.AutoProcessor.from_pretrained(run)
    assert (
        processor.tokenizer.model_max_length == transformers.AutoTokenizer.from_pretrained(run).model_max_length == 62
    )
    model, long = transformers.AutoModelForVisualQuestionAnswering.from_pretrained(run), "is a square red " * 200
    given = {"images": str(models / "photo.jpg"), "boxes": BOX}
    with pytest.raises(ValueError, match="the text has 800 tokens, but 58 fit; shorten it, or set truncation=True"):
        processor(text=long, **given)
    cut = processor(text=long, truncation=True, **given)
    assert cut["input_ids"].shape == (1, 62)
    assert model(**cut).logits.shape == (1, 3)
    assert processor(text=long, truncation=True, max_length=10, **given)["input_ids"].shape == (1, 10)
    padded = processor(text="red", padding="max_length", max_length=30, **given)
    assert (padded["input_ids"].shape, int(padded["attention_mask"].sum())) == ((1, 30), 5)
    with pytest.raises(ValueError, match="max_length is 63; the model reads 1 to 62 tokens"):
        processor(text="red", max_length=63, **given)
    for name, length in (("pretraining", 46), ("related", 32), ("retrieval", 42), ("refcoco", 62)):
        other = hf.VLBertProcessor.from_pretrained(models / "runs" / name)
        assert other(text=long, truncation=True, **given)["input_ids"].shape == (1, length), name
    plain = hf.VLBertProcessor(processor.tokenizer, hf.VLBertConfig(TINY_MODEL, vocab_size=len(WORDS)))
    alone = processor.tokenizer(long, truncation=True, return_tensors="pt")
    assert alone["input_ids"].shape == plain(text=long, truncation=True, **given)["input_ids"].shape == (1, 62)


def test_a_run_loads_through_auto_classes_as_its_newest_checkpoint_does(models, tmp_path):
    run = models / "runs/vqa-pixels"
    assert transformers.AutoConfig.from_pretrained(str(run)).task == "VQASettings"
    model = transformers.AutoModelForVisualQuestionAnswering.from_pretrained(str(run))
    step = hf.VLBertForQuestionAnswering.from_pretrained(run / "step-0000001")
    assert all(torch.equal(one, step.state_dict()[name]) for name, one in model.state_dict().items())
    model.save_pretrained(tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert "Without `import vlbert.hf`" in readme
    assert "from vlbert.hf import VLBertForQuestionAnswering" in readme
    (tmp_path / "README.md").write_text("my own words")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own words"


def test_options_of_transformers_loader_do_what_they_say_or_are_named(models):
    run, kind = models / "runs/vqa-pixels", hf.VLBertForQuestionAnswering
    model, info = kind.from_pretrained(run, output_loading_info=True)
    assert info == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    seven, info = kind.from_pretrained(run, num_labels=7, ignore_mismatched_sizes=True, output_loading_info=True)
    assert seven.config.num_labels == seven.task.settings.answers == 7
    assert seven.saved == {}, "the three answers are not its own"
    names = {name for name, _, _ in info["mismatched_keys"]}
    assert names == {name for name, one in seven.state_dict().items() if one.shape != model.state_dict()[name].shape}
    assert len(names) == 2
    same = [name for name in model.state_dict() if name not in names]
    assert all(torch.equal(model.state_dict()[name], seven.state_dict()[name]) for name in same)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    assert not any(one.any() for one in kind.from_pretrained(run, state_dict=zeros).state_dict().values())
    _, info = kind.from_pretrained(models / "runs/pretraining", output_loading_info=True, num_labels=2)
    assert info["missing_keys"]
    assert all(name.startswith("head.") for name in info["missing_keys"] + info["unexpected_keys"])
    with pytest.raises(ValueError, match="quantization_config is not supported"):
        kind.from_pretrained(run, quantization_config={"load_in_8bit": True})


def test_arrays_and_tensors_are_images(models):
    photo = np.asarray(Image.open(models / "photo.jpg"))
    processor = hf.VLBertProcessor.from_pretrained(models / "runs/pretraining")
    expected = processor(images=Image.fromarray(photo), text="red", boxes=BOX)["pixel_values"]
    first = photo.transpose(2, 0, 1)
    alike = photo, first, torch.from_numpy(first.copy()), torch.from_numpy(first.copy()).float() / 255, photo / 255
    for image in alike:
        assert torch.equal(processor(images=image, text="red", boxes=BOX)["pixel_values"], expected)
    stacked = processor(images=np.stack([photo, photo]), text=["red", "red"], boxes=[BOX, BOX])["pixel_values"]
    assert torch.equal(stacked, expected.repeat(2, 1, 1, 1))
    grey = processor(images=photo[:, :, 0], text="red", boxes=BOX)["pixel_values"]
    assert torch.equal(grey, processor(images=photo[:, :, :1], text="red", boxes=BOX)["pixel_values"])
    for wrong, named in (
        (photo.astype(np.float32), "an image has float32 from .*; give integers from 0 to 255, or floats from 0 to 1"),
        (np.zeros((5, 7, 9)), r"an image is \[5, 7, 9\]"),
        (np.full((40, 40, 3), np.nan), "an image has float64 from nan"),
        (object(), "an image is a object; give file paths"),
    ):
        with pytest.raises(ValueError, match=named):
            processor(images=wrong, text="red", boxes=BOX)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_saved_folder_has_no_path_of_this_machine_and_loads_equal(models, tmp_path):
    run, saved = models / "runs/vqa-pixels", tmp_path / "saved"
    model, processor = hf.VLBertForQuestionAnswering.from_pretrained(run), hf.VLBertProcessor.from_pretrained(run)
    model.save_pretrained(saved, max_shard_size="10KB")
    model.save_pretrained(tmp_path / "other-rank", is_main_process=False)
    assert not list((tmp_path / "other-rank").glob("*"))
    with pytest.raises(OSError, match=f"{saved} has no vocab.txt"):
        hf.VLBertProcessor.from_pretrained(saved)
    assert {file.name for file in saved.iterdir()} == {"README.md", "config.json", "model.safetensors", "task.json"}
    processor.save_pretrained(saved)
    names = {file.name for file in saved.iterdir()}
    assert names >= {"processor_config.json", "tokenizer.json", "vocab.txt", "detector.safetensors"}
    for file in saved.iterdir():
        for path in (models, tmp_path, PROJECT, Path.home()):
            assert len(str(path)) < 3 or str(path).encode() not in file.read_bytes(), file.name
    again, of_saved = hf.VLBertForQuestionAnswering.from_pretrained(saved), hf.VLBertProcessor.from_pretrained(saved)
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    assert of_saved.to_dict() == processor.to_dict()
    assert again.config.id2label == {0: "yes", 1: "no", 2: "red"}
    assert again.num_parameters() == sum(one.numel() for one in model.parameters())
    inputs, same = (one(images=str(models / "photo.jpg"), text="is a square red") for one in (processor, of_saved))
    assert inputs.keys() == same.keys()
    with torch.no_grad():
        assert all(torch.equal(inputs[name], same[name]) for name in inputs)
        assert torch.equal(model(**inputs).logits, again(**same).logits)
    of_run = Predictor(str(run), saved / "detector.safetensors")(models / "photo.jpg", "is a square red")
    assert Predictor(str(saved))(models / "photo.jpg", "is a square red").row["ranking"] == of_run.row["ranking"]


def test_config_classes_and_models_are_found_by_config_json(models):
    step = str(models / "runs/pretraining/step-0000001")
    config = transformers.AutoConfig.from_pretrained(step)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 2, 4)
    assert (config.max_position_embeddings, config.vocab_size) == (64, len(WORDS))
    assert config.task_settings == PretrainingSettings(max_elements=48, text_length=62)
    assert config.model_config.regions.weights is None
    tokens, plain = torch.tensor([[2, 7, 3]]), hf.VLBertModel.from_pretrained(step, config=config)
    assert len(transformers.AutoModel.from_pretrained(step, output_attentions=True)(tokens).attentions) == 2
    for kernel in ("eager", "sdpa"):
        model = transformers.AutoModel.from_pretrained(step, attn_implementation=kernel)
        assert torch.equal(model(tokens)[0], plain(tokens)[0])
        assert len(model(tokens, output_attentions=True).attentions) == 2
    new = transformers.AutoModel.from_config(hf.VLBertConfig(layers="J", hidden_size=8, num_heads=2, vocab_size=20))
    assert new.get_input_embeddings().weight.shape == (20, 8)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16; weights are float32"),
        ({"device_map": "gpu"}, "gpu"),
        ({"hiden_size": 3}, "takes no hiden_size|unexpected keyword argument 'hiden_size'"),
        ({"attn_implementation": "flash_attention_2"}, "does not support Flash Attention 2"),
    ],
)
@pytest.mark.parametrize("kind", [hf.VLBertForPreTraining, transformers.AutoModelForPreTraining])
def test_what_a_model_cannot_be_loaded_as_is_refused(models, kind, given: dict, named: str):
    with pytest.raises((ValueError, ImportError, TypeError, RuntimeError), match=named):
        kind.from_pretrained(str(models / "runs/pretraining/step-0000001"), **given)


@pytest.fixture
def strange(models: Path, tmp_path: Path) -> Path:
    """A model folder whose config.json names files beside it (weights, answers, a vocabulary) and a kernel."""
    folder = shutil.copytree(models / "runs/vqa-pixels/step-0000001", tmp_path / "model")
    for file in ("state.json", "task.json", "detector.safetensors"):
        (folder / file).unlink()
    shutil.copyfile(WEIGHTS, tmp_path / "weights.safetensors")
    shutil.copyfile(models / "answers.txt", tmp_path / "answers.txt")
    shutil.copyfile(folder / "vocab.txt", tmp_path / "vocab.txt")
    config = json.loads((folder / "config.json").read_text())
    config["model"]["regions"]["weights"] = str(tmp_path / "weights.safetensors")
    config["recipe"]["task"]["folder"] = str(tmp_path)
    config["recipe"]["vocabulary"] = str(tmp_path / "vocab.txt")
    config |= {"attn_implementation": "kernels-community/none", "dtype": "none", "quantization_config": {"load": 4}}
    config["name_or_path"] = "someone/else"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_loading_reads_its_own_folder_and_nothing_else(models, strange, monkeypatch):
    monkeypatch.chdir(strange.parent)  # where answers.txt is, too
    kinds = hf.VLBertConfig, hf.VLBertModel, hf.VLBertForQuestionAnswering, transformers.AutoModel
    for config in (
        loaded if kind is kinds[0] else loaded.config for kind in kinds for loaded in [kind.from_pretrained(strange)]
    ):
        assert (config.num_classes, config._attn_implementation in (None, "sdpa")) == (36, True)
        assert not hasattr(config, "quantization_config")
    processor, predictor = hf.VLBertProcessor.from_pretrained(strange), Predictor(str(strange))
    assert processor.detector_file is None
    for ask in (lambda: processor(images=str(models / "photo.jpg"), text="red"), lambda: predictor.detector):
        with pytest.raises(ValueError, match="it is not in the model's folder; give detector=FILE"):
            ask()
    photo = Predictor(str(strange), WEIGHTS).detect(models / "photo.jpg")
    with pytest.raises(ValueError, match="task.folder is not set; give --task.folder FOLDER"):
        Predictor(str(strange), WEIGHTS)(photo, "is a square red")
    with pytest.raises(ValueError, match="task.folder is not set"):
        hf.VLBertProcessor.from_pretrained(strange, detector=WEIGHTS)(images=photo, text="red", answer="no")
    given = {"task.folder": str(strange.parent)}  # asked for explicitly
    assert Predictor(str(strange), WEIGHTS, given)(photo, "is a square red").answer in ("yes", "no", "red")
    (strange / "vocab.txt").unlink()
    with pytest.raises(ValueError, match="has no vocabulary; give the one it was trained with: --vocabulary=FILE"):
        Predictor(str(strange))
    assert Predictor(str(strange), changes={"vocabulary": str(strange.parent / "vocab.txt")}).recipe


def test_the_run_before_is_not_asked_for(models, strange, monkeypatch):
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(
            target=lambda: [calls.append(server.accept()[0].close()) for _ in range(99)], daemon=True
        ).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "own")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        config = json.loads((strange / "config.json").read_text())
        config["recipe"] |= {"init_from": "s3://bucket/runs/pretrain", "bert": "someone/bert"}
        config["recipe"]["data"]["root"] = "s3://bucket"
        config["model"]["regions"]["weights"] = None
        (strange / "config.json").write_text(json.dumps(config))
        for kind in (hf.VLBertProcessor, hf.VLBertConfig, hf.VLBertModel):
            kind.from_pretrained(strange)
        with pytest.raises(ValueError, match="give detector=FILE"):
            Predictor(str(strange)).detect(models / "photo.jpg")
        model_card(str(strange))
        assert calls == []


@pytest.fixture(scope="module")
def damaged(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of a run, whose config.json a test replaces."""
    folder = shutil.copytree(models / "runs/related/step-0000001", tmp_path_factory.mktemp("damaged") / "model")
    for file in ("state.json", "optimizer.safetensors"):
        (folder / file).unlink()
    return folder


def fields_of(values: dict, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each field of nested objects."""
    for name, value in values.items():
        yield (*before, name)
        yield from fields_of(value, (*before, name)) if isinstance(value, dict) else ()


DROPPED = object()
OTHERS = [DROPPED, None, 5, 0.5, "x", "", [], {}, True, [1], {"a": 1}]
LOADERS = {
    "predictor": lambda folder: Predictor(folder).detector,
    "ranker": lambda folder: Ranker(folder).detector,
    "processor": lambda folder: hf.VLBertProcessor.from_pretrained(folder)(images=tiny_sample(3).image, text="a"),
    "config": hf.VLBertConfig.from_pretrained,
    "model": hf.VLBertForPreTraining.from_pretrained,
    "card": model_card,
}


@example(loader="predictor", chosen=("recipe", "name"), value=DROPPED)
@example(loader="predictor", chosen=("recipe", "init_from"), value=5)
@example(loader="predictor", chosen=("recipe", "task"), value=0.5)
@example(loader="predictor", chosen=("detector", "metadata", "selection"), value="x")
@example(loader="predictor", chosen=("detector", "metadata", "seed"), value="x")
@example(loader="ranker", chosen=("recipe", "task", "caption_length"), value="x")
@example(loader="processor", chosen=("recipe",), value=[])
@example(loader="config", chosen=("id2label",), value={"a": 1})
@example(loader="config", chosen=("model", "dropout"), value=5)
@given(st.sampled_from(sorted(LOADERS)), st.integers(0, 10**6), st.sampled_from(OTHERS))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_field_that_is_missing_or_of_another_type_is_named(models, damaged, loader, chosen, value):
    config = json.loads((models / "runs/related/step-0000001/config.json").read_text())
    if isinstance(chosen, int):
        chosen = (paths := list(fields_of(config)))[chosen % len(paths)]
    *parents, name = chosen
    inner = functools.reduce(dict.__getitem__, parents, config)
    assume(type(inner.get(name)) is not type(value))
    inner[name] = value
    if value is DROPPED:
        del inner[name]
    (damaged / "config.json").write_text(json.dumps(config))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LOADERS[loader](str(damaged))
    except (ValueError, OSError) as error:
        told = str(error)
    else:
        return
    assert str(damaged) in told
    assert name in told or re.search(r"does not fit the (model|network)|is not the detector|but the network has", told)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff", b'{"model":' + b"[" * 100_000], ids=["empty", "list", "bytes", "deep"]
)
def test_a_config_that_is_no_json_object_is_named(damaged, content):
    (damaged / "config.json").write_bytes(content)
    for load in LOADERS.values():
        with pytest.raises((ValueError, OSError), match=f"{damaged}/config.json"):
            load(str(damaged))


def test_a_new_head_starts_as_in_a_run_and_says_so(models, caplog, monkeypatch):
    run = models / "runs/related"
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    two = VQASettings(answers=2, question_length=58, answers_from_words=False)
    model = hf.VLBertForQuestionAnswering.from_pretrained(
        run, config=hf.VLBertConfig.from_pretrained(run).with_settings(two), device_map="auto", dtype="float32"
    )
    assert "has no head of VLBertForQuestionAnswering" in caplog.text
    source = hf.VLBertForPreTraining.from_pretrained(run)
    assert torch.equal(model.head.transform.dense.weight, source.head.word_transform.dense.weight)
    assert model.task.settings.answers == 2
    caplog.clear()
    ranker = Ranker(str(run)).model
    zero_shot = hf.VLBertForImageTextRetrieval.from_pretrained(run)
    assert caplog.text == "", "nothing of it is random"
    assert all(torch.equal(one, zero_shot.state_dict()[name]) for name, one in ranker.state_dict().items())
    with pytest.raises(ValueError, match="ForQuestionAnswering needs VQASettings; the config has the head of Pre"):
        hf.VLBertForQuestionAnswering(source.config)


@pytest.mark.parametrize("auto", [False, True])
def test_a_new_head_for_questions_has_the_labels_that_are_given(models, tmp_path, monkeypatch, auto):
    fits = dataclasses.replace(hf.VLBertForQuestionAnswering.new_settings, question_length=58)
    monkeypatch.setattr(hf.VLBertForQuestionAnswering, "new_settings", fits)
    kind = transformers.AutoModelForVisualQuestionAnswering if auto else hf.VLBertForQuestionAnswering
    pretrained, vqa = (str(models / f"runs/{run}/step-0000001") for run in ("pretraining", "vqa-pixels"))
    assert kind.from_pretrained(pretrained).config.num_labels == 3129
    two = kind.from_pretrained(pretrained, num_labels=2)
    assert (two.task.settings.answers, two.config.num_labels, two.saved) == (2, 2, {})
    named = kind.from_pretrained(pretrained, id2label={0: "yes", 1: "no", 2: "maybe"})
    named.save_pretrained(tmp_path)
    again = kind.from_pretrained(str(tmp_path))
    assert again.saved == json.loads((tmp_path / "task.json").read_text()) == {"answers": ["yes", "no", "maybe"]}
    assert (again.config.num_labels, again.config.id2label[2]) == (3, "maybe")
    for folder in (vqa, str(tmp_path)):
        with pytest.raises(ValueError, match="num_labels is 7, but the head has 3 answers"):
            kind.from_pretrained(folder, num_labels=7)
    assert kind.from_pretrained(vqa, id2label={0: "a", 1: "b", 2: "c"}).saved == {"answers": ["a", "b", "c"]}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a local server gives out as the hub does."""
    with serve_hub(tmp_path / "hub", monkeypatch) as root:
        yield root


def test_a_model_is_fetched_from_the_hub(models, hub, tmp_path):
    run, name = models / "runs/vqa-pixels", "someone/vl-bert-vqa"
    model, processor = hf.VLBertForQuestionAnswering.from_pretrained(run), hf.VLBertProcessor.from_pretrained(run)
    for one in (model, processor):
        one.save_pretrained(hub / name)
    cache = {"cache_dir": tmp_path / "cache"}
    fetched = hf.VLBertForQuestionAnswering.from_pretrained(name, **cache)
    files = {one for one in Hub.requested if "/resolve/" in one}  # of one commit, whatever is pushed meanwhile
    assert files >= {f"/{name}/resolve/{Hub.commit}/{file}" for file in ("model.safetensors", "vocab.txt", "task.json")}
    Hub.requested.clear()
    hf.VLBertForQuestionAnswering.from_pretrained(name, **cache, local_files_only=True)
    assert not Hub.requested
    assert all(torch.equal(one, fetched.state_dict()[key]) for key, one in model.state_dict().items())
    assert fetched.config.id2label == model.config.id2label
    shutil.copytree(run / "step-0000001", hub / "someone/checkpoint")  # its config.json does not have the answers
    assert hf.VLBertForQuestionAnswering.from_pretrained("someone/checkpoint", **cache).saved == model.saved
    assert hf.VLBertProcessor.from_pretrained(name, **cache).to_dict() == processor.to_dict()
    (hub / "someone" / "other").mkdir(parents=True)
    for none in ("someone/none", "someone/other", "no name"):
        with pytest.raises(OSError, match=f"{none} is neither a folder nor a model on the Hub .* there is no folder"):
            hf.VLBertModel.from_pretrained(none, **cache)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("models/vqa/best", "there is no folder .*models/vqa/best; name the folder of a model"),
        ("runs/vqa/best", "runs/vqa/best does not exist"),
        ("empty", "empty holds no model: it has no config.json"),
        ("s3://bucket/runs/vqa-pixels", "there is no folder"),
    ],
)
@pytest.mark.parametrize("kind", [hf.VLBertModel, hf.VLBertConfig, hf.VLBertProcessor])
def test_a_missing_folder_is_named_before_the_hub_is_asked(models, hub, monkeypatch, kind, name: str, named: str):
    monkeypatch.chdir(models)
    (models / "empty").mkdir(exist_ok=True)
    with pytest.raises(OSError, match=named):
        kind.from_pretrained(name)
    assert Hub.requested == []
