"""ViLBERT and Unicoder-VL: text and regions embedded apart, layers T, V and X, the whole image, poolers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CHANNELS, SEPARATE, TINY_MODEL, UNICODER_VL, VILBERT

from vlbert.config import TASK_TOKENS, ModelConfig
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.model.vlbert import Encoded, VLBert

MIXED = dataclasses.replace(SEPARATE, layers="TVJXJ")
VLBERT = dataclasses.replace(TINY_MODEL, regions=VILBERT.regions)
MODELS = {"vlbert": VLBERT, "vilbert": VILBERT, "unicoder-vl": UNICODER_VL, "mixed": MIXED}


def make_model(config: ModelConfig) -> VLBert:
    torch.manual_seed(0)
    return VLBert(config, vocab_size=50).eval()


def text_input(length: int, seed: int = 0) -> TextInput:
    zeros = np.zeros(length, np.int64)
    return TextInput(np.random.default_rng(seed).integers(0, 50, length), zeros, zeros)


def image_input(regions: int, seed: int = 0, **changes: Any) -> ImageInput:
    """The whole image and some regions, with features from the seed."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 40, (regions, 2))
    boxes = np.concatenate([[[0, 0, 95, 63]], np.concatenate([low, low + rng.uniform(5, 20, (regions, 2))], axis=1)])
    features = rng.normal(size=(1 + regions, CHANNELS)).astype(np.float32)
    image = ImageInput(boxes.astype(np.float32), np.zeros(1 + regions, bool), (96, 64), features=features)
    return dataclasses.replace(image, **changes)


def example(tokens: int = 5, regions: int | None = 3, seed: int = 0) -> Example:
    return Example(f"sample {seed}", text_input(tokens, seed), None if regions is None else image_input(regions, seed))


@torch.no_grad()
def encode(model: VLBert, *examples: Example) -> tuple[Batch, Encoded]:
    batch = collate(examples)
    return batch, model(batch, attentions=True)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_padding_changes_nothing_and_gradients_are_finite_where_rows_have_no_image(config: ModelConfig):
    model, rows = make_model(config), [example(4, 5, 1), example(9, 1, 2), example(6, None, 3)]
    batch, together = encode(model, *rows)
    for row, alone in enumerate(rows):
        single, its = encode(model, alone)
        for mine, expected, mask in (
            (together.text[row], its.text[0], single.text_mask[0]),
            (together.regions[row], its.regions[0], single.region_mask[0]),
        ):
            torch.testing.assert_close(mine[: len(mask)][mask], expected[mask], rtol=0, atol=3e-6)
    assert together.regions.shape == (3, 6, config.regions_stream.hidden_size)
    for some in (rows, rows[2:]):
        model.zero_grad()
        encoded = model(collate(some))
        (encoded.text.square().sum() + encoded.regions.square().sum()).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_order_of_regions_changes_nothing_else(config: ModelConfig):
    model, image, order = make_model(config), image_input(4), np.array([0, 3, 1, 4, 2])
    turned = dataclasses.replace(image, boxes=image.boxes[order], features=image.features[order])
    _, plain = encode(model, Example("a", text_input(5), image))
    _, permuted = encode(model, Example("a", text_input(5), turned))
    torch.testing.assert_close(permuted.text, plain.text, rtol=0, atol=3e-6)
    torch.testing.assert_close(permuted.regions[0], plain.regions[0][order], rtol=0, atol=3e-6)


def test_attention_maps_name_their_streams_and_rows_sum_to_one():
    model = make_model(VILBERT)
    batch, encoded = encode(model, example(4, 2, 1), example(6, None, 2), example(3, 5, 3))
    sides = ", ".join(f"{one.layer}{one.letter} {one.queries} {one.keys}" for one in encoded.attentions)
    of_x = "{0}X text regions, {0}X regions text"
    assert sides == f"0T text text, {of_x.format(1)}, 2T text text, 3V regions regions, {of_x.format(4)}"
    masks = {"text": batch.text_mask, "regions": batch.region_mask}
    heads = {"T": 4, "V": 3, "X": 2}
    for one in encoded.attentions:
        queries, keys = masks[one.queries], masks[one.keys]
        assert one.weights.shape == (3, heads[one.letter], queries.shape[1], keys.shape[1])
        assert not one.weights.transpose(2, 3)[~keys[:, None].expand(-1, heads[one.letter], -1)].any()
        expected = keys.any(dim=1)[:, None, None].expand(one.weights.shape[:3]).float()
        torch.testing.assert_close(one.weights.sum(3), expected)


def test_without_a_whole_image_nothing_reads_it():
    model = make_model(UNICODER_VL)
    image = image_input(3)
    other = dataclasses.replace(image, features=image.features.copy())
    other.features[0] += 1
    _, plain = encode(model, Example("a", text_input(5), image))
    _, changed = encode(model, Example("a", text_input(5), other))
    assert torch.equal(plain.text, changed.text)
    assert torch.equal(plain.regions, changed.regions)
    assert not plain.regions[0, 0].any()
    assert plain.attentions[0].weights.shape == (1, 4, 9, 9)
    assert not plain.attentions[0].weights[..., 5].any(), "region 0 stands behind the five words"


def test_a_task_token_stands_behind_cls_and_moves_no_word():
    with_token, without = (make_model(dataclasses.replace(VILBERT, task_token=token)) for token in (3, None))
    assert with_token.embedding.tasks.weight.shape[0] == TASK_TOKENS
    batch = collate([example(5), example(7, seed=1)])
    with torch.no_grad():
        streams = with_token.embedding(batch, with_token.appearance(batch))
        without.load_state_dict(with_token.state_dict(), strict=False)
        plain = without.embedding(batch, without.appearance(batch))
        encoded = with_token(batch)
    assert torch.equal(streams.text[:, [0, *range(2, 8)]], plain.text)
    torch.testing.assert_close(streams.text[0, 1], with_token.embedding.norm(with_token.embedding.tasks.weight[3]))
    assert streams.text_mask.sum(1).tolist() == [6, 8]
    assert encoded.text.shape[1] == 7, "the task's own state is left out"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": "JTW"}, "layers"),
        ({"layers": "TVJ", "region_hidden_size": 48}, "region_hidden_size"),
        ({"embedding": "visual_linguistic", "region_hidden_size": 48, "layers": "TXV"}, "region_hidden_size"),
        ({"layers": "TXV", "coattention_size": 30}, "coattention_num_heads"),
        ({"embedding": "visual_linguistic", "whole_image": "mean"}, "whole_image"),
        ({"task_token": TASK_TOKENS}, "task_token"),
        ({"whole_image": "none", "pooler": "product"}, "pooler"),
        ({"whole_image": "none", "pooler": "sum"}, "pooler"),
    ],
)
def test_sizes_that_do_not_fit_the_layers_name_the_field(changes: dict[str, Any], field: str):
    with pytest.raises(ValueError, match=rf"\b{field}\b"):
        dataclasses.replace(SEPARATE, **changes)
