"""Attention of words to regions: the numbers and the figure."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import CLASSES, TINY_MODEL, VILBERT, tiny_sample

from vlbert.config import ModelConfig
from vlbert.data.batch import collate
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.predict.attention import Map, draw_attention, make_maps
from vlbert.predict.prediction import Prediction
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

WORDS = Vocabulary([*SPECIALS, "a", "red", "square", "$"])
CROSS = dataclasses.replace(VILBERT, regions=TINY_MODEL.regions)


def predicted(text: str, regions: int = 2, other: str | None = None, model: ModelConfig = TINY_MODEL) -> Prediction:
    """A random model's prediction; `other`: a second text of the same batch, about another image."""
    task = Pretraining(PretrainingSettings(max_elements=None), WORDS, len(CLASSES))
    torch.manual_seed(0)
    model = VLBert(model, len(WORDS)).eval()
    sample, second = tiny_sample(1, 2), tiny_sample(2, 3)
    sample = dataclasses.replace(sample, regions=sample.regions.take(np.arange(regions) % 2))
    examples = []
    for of, words in ((sample, text), (second, other)):
        if words:
            image, rng = prepare_image(of, TINY_MODEL.regions, flip=False), np.random.default_rng(0)
            examples.append(task.example(of, image, task.annotation_for(words), rng))
    batch = collate(examples)
    with torch.no_grad():
        encoded = model(batch, attentions=True)
    tokens = [[WORDS.tokens[i] for i in row[mask]] for row, mask in zip(batch.tokens, batch.text_mask, strict=True)]
    names = [f"{n} thing" for n in range(1, regions + 1)]
    return Prediction(sample, names, {"probabilities": [0.6, 0.4]}, batch, tokens, encoded)


@pytest.mark.parametrize(
    ("model", "shapes"), [(TINY_MODEL, {0: (4, 5, 3), 1: (4, 5, 3)}), (CROSS, {1: (2, 5, 3), 4: (2, 5, 3)})]
)
def test_the_maps_are_the_models_without_padding(model, shapes):
    plain = predicted("a [MASK] square", model=model)
    alone, padded = (make_maps(one) for one in (plain, predicted("a [MASK] square", 2, "a " * 9 + "[MASK]", model)))
    assert {one.layer: one.weights.shape for one in alone} == shapes
    models = [one for one in plain.encoded.attentions if one.queries != "regions" and one.keys != "text"]
    for one, other, theirs in zip(alone, padded, models, strict=True):
        np.testing.assert_allclose(other.weights, one.weights, atol=1e-3)  # a larger batch pads the images, too
        expected = theirs.weights[0, :, :5, 5:8] if theirs.queries == "both" else theirs.weights[0]
        np.testing.assert_array_equal(one.weights, expected.numpy())


def test_of_several_choices_the_maps_are_those_of_the_chosen_one():
    both = predicted("a [MASK] square", other="red [MASK]")
    second = dataclasses.replace(both, row={"probabilities": [0.4, 0.6]})
    assert [make_maps(one)[0].weights.shape[1:] for one in (both, second)] == [(5, 3), (4, 4)]
    blind = dataclasses.replace(both, encoded=dataclasses.replace(both.encoded, attentions=None))
    with pytest.raises(ValueError, match="attentions=True"):
        make_maps(blind)


def test_the_head_is_shown_that_attends_most_to_regions_rescaled_over_all_heads():
    weights = np.full((3, 4, 3), 0.1)
    weights[1, :, 0] = 0.8  # the whole image, which counts for nothing
    weights[2, 1, 2] = 0.5
    shown = Map(0, weights)
    assert shown.busiest == 2
    assert shown.strength == pytest.approx((weights[2] - 0.1) / 0.7)
    assert not Map(0, np.full((1, 2, 2), 0.25)).strength.any()


def test_the_figure_shows_what_there_is_room_for():
    many = predicted("a $ red [MASK] $" + " square" * 50, regions=30, model=CROSS)
    with Image.open(io.BytesIO(draw_attention(many))) as figure:
        assert figure.size[0] > 500
        assert figure.size[1] < 2000
