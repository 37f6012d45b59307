"""Which regions each word looks at: the numbers and the figure."""

import dataclasses
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import CLASSES, TINY_MODEL, tiny_sample

from detectors.drawing import colour_of
from vlbert.attention_figure import (
    MOST_REGIONS,
    Attention,
    attention_of,
    chosen_heads,
    draw_figure,
    numbered_boxes,
    strengths,
    thumbnails,
    write_attention,
)
from vlbert.data.batch import collate
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.prediction import Prediction
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "square", "<", "/", "script", ">", "$"])


def asked(text: str, regions: int = 2, beside: str | None = None) -> Prediction:
    """What a random model sees; `beside`: a longer text in the same batch, behind it."""
    task = Pretraining(PretrainingSettings(max_elements=None), WORDS, len(CLASSES))
    torch.manual_seed(0)
    model = VLBert(TINY_MODEL, len(WORDS)).eval()
    sample, other = tiny_sample(1, regions), tiny_sample(2, 3)
    examples = [
        task.example(
            of, prepare_image(of, TINY_MODEL.regions, flip=False), task.annotation_for(words), np.random.default_rng(0)
        )
        for of, words in ((sample, text), (other, beside))
        if words
    ]
    batch = collate(examples)
    with torch.no_grad():
        encoded = model(batch, attentions=True)
    pieces = [
        [WORDS.tokens[i] for i in tokens[mask]] for tokens, mask in zip(batch.tokens, batch.text_mask, strict=True)
    ]
    return Prediction(
        sample, [f"{n} thing" for n in range(1, regions + 1)], {"probabilities": [0.6, 0.4]}, batch, pieces, encoded
    )


def planted(to_regions: np.ndarray) -> Attention:
    """Maps [L, A, T, R] of words to regions; what is left goes to [END]."""
    layers, heads, t, r = to_regions.shape
    maps = np.zeros((layers, heads, t + r + 1, t + r + 1), np.float32)
    maps[:, :, :t, t : t + r] = to_regions
    maps[..., -1] = 1 - maps.sum(-1)
    return Attention([f"w{i}" for i in range(t)], ["whole image", *map(str, range(1, r))], torch.from_numpy(maps))


def test_the_maps_are_the_models_without_padding():
    alone, padded = (
        attention_of(asked("a [MASK] square")),
        attention_of(asked("a [MASK] square", beside="a " * 9 + "[MASK]")),
    )
    assert alone.words == ["[CLS]", "a", "[MASK]", "square", "[SEP]"]
    assert alone.regions == ["whole image", "1 thing", "2 thing"]
    assert alone.maps.shape == (2, 4, 9, 9)
    torch.testing.assert_close(alone.maps.sum(3), torch.ones(2, 4, 9))
    torch.testing.assert_close(padded.maps, alone.maps, atol=1e-3, rtol=0)  # a larger batch pads the pictures, too
    torch.testing.assert_close(torch.from_numpy(alone.to_regions()), alone.maps[:, :, :5, 5:8])


def test_of_several_choices_the_maps_are_those_of_the_chosen_one():
    both = asked("a [MASK] square", beside="red [MASK]")
    second = dataclasses.replace(both, row={"probabilities": [0.4, 0.6]})
    assert attention_of(both).words == ["[CLS]", "a", "[MASK]", "square", "[SEP]"]
    assert attention_of(second).words == ["[CLS]", "red", "[MASK]", "[SEP]"]


def test_by_default_each_layer_shows_the_head_that_looks_most_at_regions():
    looks = np.full((2, 3, 4, 3), 0.1, np.float32)
    looks[0, 2, 1, 2] = 0.5
    looks[1, 1, :, 0] = 0.8  # the whole image, which counts for nothing
    looks[1, 0, 3, 1] = 0.3
    assert chosen_heads(planted(looks), None) == [(0, 2), (1, 0)]
    assert chosen_heads(planted(looks), "1.2, 0.0") == [(1, 2), (0, 0)]


@pytest.mark.parametrize("heads", ["1", "1.3.2", "-1.0", "x.y", "2.0", "0.3"])
def test_heads_that_are_none_are_refused(heads):
    with pytest.raises(ValueError, match=re.escape(f"--heads {heads}: ")):
        chosen_heads(planted(np.full((2, 3, 4, 3), 0.1, np.float32)), heads)


def test_strength_is_rescaled_over_all_heads_of_a_layer():
    looks = np.linspace(0.1, 0.2, 2 * 2 * 3 * 2).reshape(2, 2, 3, 2).astype(np.float32)
    shown = strengths(planted(looks), [(0, 0), (0, 1), (1, 1)])
    assert shown.shape == (3, 3, 2)
    assert (shown[0].min(), shown[1].max(), shown[2].max()) == pytest.approx((0, 1, 1))
    assert shown[0].max() < 0.5 < shown[1].min()
    assert not strengths(planted(np.full((1, 1, 2, 2), 0.25, np.float32)), [(0, 0)]).any(), "all alike: no line"


def test_a_region_is_drawn_in_its_own_box_and_by_its_own_number():
    prediction = asked("a [MASK]", regions=2)
    boxes = prediction.sample.regions.boxes
    (first, *_), (second, colour, name) = numbered_boxes(prediction, [0, 2, 1])
    np.testing.assert_array_equal(np.stack([first, second]), boxes)
    assert (colour, name) == (colour_of(2), "2"), "the first of them on top"
    assert [name for _, _, name in numbered_boxes(prediction)] == ["2", "1"]


def test_the_thumbnail_of_a_region_is_what_is_in_its_box():
    pixels = np.full((64, 64, 3), 128, np.uint8)
    pixels[8:24, 8:24], pixels[36:60, 36:60] = (255, 0, 0), (0, 0, 255)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG", quality=100, subsampling=0)
    prediction = asked("a [MASK]", regions=2)
    regions = dataclasses.replace(
        prediction.sample.regions, boxes=np.array([[8, 8, 24, 24], [36, 36, 60, 60]], np.float32)
    )
    sample = dataclasses.replace(prediction.sample, image=data.getvalue(), width=64, height=64, regions=regions)
    whole, red, blue = thumbnails(dataclasses.replace(prediction, sample=sample), [0, 1, 2])
    assert whole.shape == (64, 64, 3)
    assert [of[len(of) // 2, len(of) // 2].argmax() for of in (red, blue)] == [0, 2]


def test_many_words_and_regions_are_drawn_as_far_as_there_is_room(tmp_path):
    prediction = asked("a $ red [MASK] $" + " square" * 50)
    attention = attention_of(prediction)
    sample = prediction.sample
    many = dataclasses.replace(sample, regions=sample.regions.take(np.arange(30) % 2))
    looks = np.random.default_rng(0).random((1, 1, len(attention.words), 31)).astype(np.float32) / 40
    wide = dataclasses.replace(prediction, sample=many, names=[str(n) for n in range(1, 31)])
    attention = dataclasses.replace(planted(looks), words=attention.words)
    draw_figure(wide, attention, [(0, 0)], tmp_path / "figure.png")
    assert MOST_REGIONS < 31
    with Image.open(tmp_path / "figure.png") as figure:
        assert figure.size[0] > 500
        assert figure.size[1] < 2000


def test_the_figure_lies_beside_the_drawing(tmp_path):
    assert write_attention(asked("a [MASK]"), tmp_path / "photo.png") == tmp_path / "photo-attention.png"
    with Image.open(tmp_path / "photo-attention.png") as figure:
        figure.load()


def test_a_prediction_without_maps_is_refused():
    prediction = asked("a [MASK]")
    blind = dataclasses.replace(prediction, encoded=dataclasses.replace(prediction.encoded, attentions=None))
    with pytest.raises(ValueError, match="attentions=True"):
        attention_of(blind)
