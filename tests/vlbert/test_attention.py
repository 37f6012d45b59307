"""Attention of words and regions to each other: the numbers and the figure."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from tiny import CLASSES, TINY_MODEL, tiny_sample

from vlbert.config import ModelConfig
from vlbert.data.batch import collate
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.predict.attention import (
    MOST_REGIONS,
    Attention,
    Map,
    _draw_panel,
    attention_of,
    chosen_panels,
    shown_regions,
    title,
    write_attention,
)
from vlbert.predict.prediction import Prediction
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "square", "<", "/", "script", ">", "$"])


VILBERT = dataclasses.replace(
    TINY_MODEL,
    layers="TXVX",
    embedding="separate",
    region_hidden_size=48,
    region_num_heads=3,
    coattention_size=24,
    coattention_num_heads=2,
)


def predicted(text: str, regions: int = 2, other: str | None = None, model: ModelConfig = TINY_MODEL) -> Prediction:
    """A random model's prediction; `other`: a second text of the same batch, about another image."""
    task = Pretraining(PretrainingSettings(max_elements=None), WORDS, len(CLASSES))
    torch.manual_seed(0)
    model = VLBert(model, len(WORDS)).eval()
    sample, second = tiny_sample(1, 2), tiny_sample(2, 3)
    sample = dataclasses.replace(sample, regions=sample.regions.take(np.arange(regions) % 2))
    examples = [
        task.example(
            of, prepare_image(of, TINY_MODEL.regions, flip=False), task.annotation_for(words), np.random.default_rng(0)
        )
        for of, words in ((sample, text), (second, other))
        if words
    ]
    batch = collate(examples)
    with torch.no_grad():
        encoded = model(batch, attentions=True)
    rows = zip(batch.tokens, batch.text_mask, strict=True)
    tokens = [[WORDS.tokens[i] for i in row[mask]] for row, mask in rows]
    names = [f"{n} thing" for n in range(1, regions + 1)]
    return Prediction(sample, names, {"probabilities": [0.6, 0.4]}, batch, tokens, encoded)


def planted(*weights: np.ndarray, sides: tuple[str, str] = ("words", "regions")) -> Attention:
    """Maps [A, Q, K] of neighbouring layers; words w0, w1, ..."""
    maps = [Map(layer, *sides, one.astype(np.float32)) for layer, one in enumerate(weights)]
    size = dict(zip(sides, weights[0].shape[1:], strict=True))
    words, regions = size.get("words", 1), size.get("regions", 1)
    return Attention([f"w{i}" for i in range(words)], ["whole image", *map(str, range(1, regions))], maps)


MODELS = {"joint": TINY_MODEL, "co-attention": VILBERT}
SIDES = {  # layer, queries, keys, shape of a text of 5 tokens and an image of 2 regions
    "joint": [(0, "words", "regions", (4, 5, 3)), (1, "words", "regions", (4, 5, 3))],
    "co-attention": [
        (0, "words", "words", (4, 5, 5)),
        (1, "words", "regions", (2, 5, 3)),
        (1, "regions", "words", (2, 3, 5)),
        (2, "regions", "regions", (3, 3, 3)),
        (3, "words", "regions", (2, 5, 3)),
        (3, "regions", "words", (2, 3, 5)),
    ],
}


def panels_of(attention: Attention, heads: str | None = None) -> list[tuple[int, int]]:
    """Number of the map, and head, of each panel."""
    return [(attention.maps.index(one), head) for one, head in chosen_panels(attention, heads)]


@pytest.mark.parametrize("name", MODELS)
def test_the_maps_are_the_models_without_padding(name):
    plain = predicted("a [MASK] square", model=MODELS[name])
    alone = attention_of(plain)
    padded = attention_of(predicted("a [MASK] square", other="a " * 9 + "[MASK]", model=MODELS[name]))
    assert alone.words == ["[CLS]", "a", "[MASK]", "square", "[SEP]"]
    assert alone.regions == ["whole image", "1 thing", "2 thing"]
    found = [(one.layer, one.queries, one.keys, one.weights.shape) for one in alone.maps]
    assert found == SIDES[name]
    for one, other, models in zip(alone.maps, padded.maps, plain.encoded.attentions, strict=True):
        np.testing.assert_allclose(other.weights, one.weights, atol=1e-3)  # a larger batch pads the images, too
        expected = models.weights[0, :, :5, 5:8] if models.queries == "both" else models.weights[0]
        np.testing.assert_array_equal(one.weights, expected.numpy())
        if name == "co-attention":
            np.testing.assert_allclose(one.weights.sum(2), 1, rtol=1e-5)


def test_a_whole_image_that_the_model_does_not_read_is_not_shown():
    for whole_image, expected in (("none", [1, 2]), ("mean", [0, 1, 2])):
        model = dataclasses.replace(TINY_MODEL, embedding="separate", whole_image=whole_image)
        attention = attention_of(predicted("a [MASK] square", model=model))
        assert attention.reads_whole_image == (whole_image == "mean")
        assert shown_regions(attention, [(one, 0) for one in attention.maps]) == expected


def test_of_several_choices_the_maps_are_those_of_the_chosen_one():
    both = predicted("a [MASK] square", other="red [MASK]")
    second = dataclasses.replace(both, row={"probabilities": [0.4, 0.6]})
    assert attention_of(both).words == ["[CLS]", "a", "[MASK]", "square", "[SEP]"]
    assert attention_of(second).words == ["[CLS]", "red", "[MASK]", "[SEP]"]


def test_by_default_the_head_is_shown_that_attends_most_to_ordinary_words_or_regions():
    first, second = np.full((2, 3, 4, 3), 0.1)
    first[2, 1, 2] = 0.5
    second[1, :, 0] = 0.8  # the whole image, which counts for nothing
    second[0, 3, 1] = 0.3
    assert panels_of(planted(first, second)) == [(0, 2), (1, 0)]
    assert panels_of(planted(first, second), "1.2, 0.0") == [(1, 2), (0, 0)]
    together = attention_of(predicted("a [MASK] square", model=VILBERT))
    assert [number for number, _ in panels_of(together)] == [1, 2, 4, 5]
    assert panels_of(together, "1.1,2.2") == [(1, 1), (2, 1), (3, 2)], "layer 1 has two maps"


@pytest.mark.parametrize("heads", ["1", "1.3.2", "-1.0", "x.y", "2.0", "0.3"])
def test_heads_that_do_not_exist_are_refused(heads):
    with pytest.raises(ValueError, match=re.escape(f"--heads {heads}: ")):
        chosen_panels(planted(*np.full((2, 3, 4, 3), 0.1)), heads)


def test_strength_is_rescaled_over_all_heads_of_a_layer():
    first, second = planted(*np.linspace(0.1, 0.2, 2 * 2 * 3 * 2).reshape(2, 2, 3, 2)).maps
    shown = [first.strength(0), first.strength(1), second.strength(1)]
    assert [one.shape for one in shown] == [(3, 2)] * 3
    assert (shown[0].min(), shown[1].max(), shown[2].max()) == pytest.approx((0, 1, 1))
    assert shown[0].max() < 0.5 < shown[1].min()
    assert not planted(np.full((1, 2, 2), 0.25)).maps[0].strength(0).any(), "all alike: no line"


def test_the_regions_that_receive_most_are_shown():
    received = np.full((1, 3, MOST_REGIONS + 3), 0.01)
    received[0, 1, 5] = 0.3
    received[:, :, [2, 7]] = 0

    def shown(weights: np.ndarray, *sides: str) -> list[int]:
        attention = planted(weights, sides=sides)
        return shown_regions(attention, [(attention.maps[0], 0)])

    found = shown(received, "words", "regions")
    assert len(found) == MOST_REGIONS
    assert 5 in found
    assert not {2, 7} & {*found}
    assert 5 in shown(received.transpose(0, 2, 1), "regions", "words"), "where regions attend alone, those that do most"
    assert not shown(np.full((1, 3, 3), 0.1), "words", "words")


def test_a_panel_has_a_row_for_each_that_attends_and_a_column_for_each_that_is_attended_to():
    attention, axes = planted(np.arange(20.0).reshape(1, 4, 5)), Figure().add_subplot()
    _draw_panel(axes, attention, (attention.maps[0], 0), {"words": [0, 1, 3], "regions": [0, 4]})
    (drawn,) = axes.images
    assert drawn.get_array().data == pytest.approx(np.array([[0, 4], [5, 9], [15, 19]]) / 19)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["w0", "w1", "w3"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["whole image", "4"]


@pytest.mark.parametrize(("name", "heads"), [("joint", "0.0"), ("co-attention", "0.0,1.1,2.1")])
def test_the_figure_lies_beside_the_drawing_and_shows_what_there_is_room_for(tmp_path, name, heads):
    many = predicted("a $ red [MASK] $" + " square" * 50, regions=30, model=MODELS[name])
    assert title(attention_of(many), range(1, 13)) == "12 of 30 regions; the first 40 of 57 tokens"
    assert write_attention(many, tmp_path / "photo.png", heads) == tmp_path / "photo-attention.png"
    with Image.open(tmp_path / "photo-attention.png") as figure:
        assert figure.size[0] > 500
        assert figure.size[1] < 2000


def test_a_prediction_without_maps_is_refused():
    prediction = predicted("a [MASK]")
    blind = dataclasses.replace(prediction, encoded=dataclasses.replace(prediction.encoded, attentions=None))
    with pytest.raises(ValueError, match="attentions=True"):
        attention_of(blind)
