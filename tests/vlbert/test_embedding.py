"""What each field of ModelConfig does to the embedding and to the features of regions."""

import dataclasses

import numpy as np
import pytest
import torch
from tiny import TINY_MODEL
from torch import Tensor

from vlbert.config import RegionConfig
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.model.heads import Classifier
from vlbert.model.vlbert import VLBert
from vlbert.tasks.vcr import VCRHead, VCRSettings

VOCABULARY = 40
REGIONS = RegionConfig(features="precomputed", resnet=TINY_MODEL.regions.resnet)
PRECOMPUTED = dataclasses.replace(TINY_MODEL, regions=REGIONS)
CHANNELS = REGIONS.channels

# The rows of `batch`: three words, the whole image, three regions, [END].
WORDS, WHOLE, FIRST, MASKED, LAST, END = [0, 1, 2], 3, 4, 5, 6, 7


def words(*tokens: int, token_region: tuple[int, ...] = ()) -> TextInput:
    zeros = np.zeros(len(tokens), np.int64)
    return TextInput(np.array(tokens), zeros, np.array(token_region) if token_region else zeros)


def image(seed: int = 0, **more: np.ndarray) -> ImageInput:
    """The whole image and three regions, the second of them masked; precomputed."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 30, (4, 2))
    boxes = np.concatenate([low, low + rng.uniform(5, 30, (4, 2))], axis=1).astype(np.float32)
    features = rng.standard_normal((4, CHANNELS)).astype(np.float32)
    masked = np.array([False, False, True, False])
    return ImageInput(boxes, masked, (96, 64), features=features, classes=np.array([0, 2, 1, 2]), **more)


def batch(shown: ImageInput | None = None) -> Batch:
    return collate([Example("one", words(7, 8, 9), shown or image())])


def make(**changes: object) -> VLBert:
    torch.manual_seed(0)
    return VLBert(dataclasses.replace(PRECOMPUTED, **changes), VOCABULARY).eval()


@torch.no_grad()
def embedded(model: VLBert, batch: Batch) -> Tensor:
    """[T + R + 1, C] of the only row."""
    return model.embedding(batch, model.appearance(batch)).joined()[0][0]


OWN_BY_CLASS = {"region_classes": 3}
AS_WORDS = {"special_tokens": "vocabulary", "masked_region_token": False}


@pytest.mark.parametrize(
    ("rules", "parameter", "index", "read_at"),
    [
        ({}, "region_token", 0, [WHOLE, FIRST, LAST]),
        ({}, "masked_region_token", 0, [MASKED]),
        ({"masked_region_token": False}, "region_token", 0, [WHOLE, FIRST, MASKED, LAST]),
        ({}, "end_token", 0, [END]),
        (AS_WORDS, "words", VOCABULARY, [WHOLE, FIRST, MASKED, LAST]),
        (AS_WORDS, "words", VOCABULARY + 1, [END]),
        (AS_WORDS, "words", 8, [1]),
        (OWN_BY_CLASS, "region_token", 0, [WHOLE]),
        (OWN_BY_CLASS, "region_token", 1, []),  # that of the masked region, which has its own token
        (OWN_BY_CLASS, "region_token", 2, [FIRST, LAST]),
        (OWN_BY_CLASS | {"masked_region_token": False}, "region_token", 1, [MASKED]),
        ({}, "masked_appearance", 0, [MASKED]),
        ({}, "text_visual.norm", None, WORDS),
        ({"end_visual_embedding": True}, "text_visual.norm", None, [*WORDS, END]),
        ({}, "region_visual.norm", None, [WHOLE, FIRST, MASKED, LAST]),
        ({}, "visual", None, [*WORDS, WHOLE, FIRST, MASKED, LAST]),
        ({"end_visual_embedding": True}, "visual", None, [*WORDS, WHOLE, FIRST, MASKED, LAST, END]),
        ({}, "no_image_embedding", 0, []),
        ({}, "segments", 0, WORDS),
        ({}, "segments", 1, []),
        ({}, "segments", 2, [WHOLE, FIRST, MASKED, LAST, END]),
    ],
)
def test_each_weight_is_read_only_where_its_rule_says(rules, parameter, index, read_at):
    model = make(**rules)
    before = embedded(model, batch())
    changed = model.embedding.get_submodule(parameter).weight.data
    (changed if index is None else changed[index]).add_(torch.randn(changed.shape[-1]))
    differs = (embedded(model, batch()) - before).abs().amax(1) > 1e-4
    assert differs.nonzero().flatten().tolist() == read_at


@pytest.mark.parametrize(
    "rules",
    [
        {},
        AS_WORDS | {"end_visual_embedding": True},
        OWN_BY_CLASS | {"masked_region_token": False, "visual_gain_words": 0.5},
        {"visual_embedding_size": 12, "visual_norm": "none", "visual_activation": "none"},
        {"regions": dataclasses.replace(TINY_MODEL.regions, masking="features")},
    ],
)
def test_every_weight_gets_a_gradient(rules):
    """DistributedDataParallel refuses a model with others."""
    model = make(**rules)
    shown = dataclasses.replace(image(), pixels=torch.zeros(3, 64, 96, dtype=torch.uint8))
    encoded = model(batch(shown))
    (encoded.text.sum() + encoded.regions.sum()).backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_masked_features_become_a_learned_vector_that_starts_at_zero():
    model = make()
    assert not model.embedding.masked_appearance.weight.any()
    other = image()
    other.features[2] = 9  # the masked region
    assert torch.equal(embedded(model, batch(other)), embedded(model, batch()))
    other.features[3] = 9
    differs = (embedded(model, batch(other)) - embedded(model, batch())).abs().amax(1) > 1e-4
    assert differs.nonzero().flatten().tolist() == [LAST]


def test_wrong_features_are_refused():
    for features, found in ((None, "0, 0"), (np.zeros((4, 7), np.float32), "4, 7")):
        wrong = batch(dataclasses.replace(image(), features=features))
        with pytest.raises(ValueError, match=rf"sample one has features \({found}\), .* \(4, {CHANNELS}\)"):
            make()(wrong)


@pytest.mark.parametrize(("rule", "spread"), [("xavier", (2 / (32 + 900)) ** 0.5), ("normal", 0.25)])
def test_head_initialisation(rule, spread):
    config = dataclasses.replace(PRECOMPUTED, head_initialisation=rule, initializer_range=0.25)
    torch.manual_seed(0)
    output = Classifier(config, 900, "words", dropout=0.1).output
    assert float(output.weight.detach().std()) == pytest.approx(spread, rel=0.05)
    assert not output.bias.any()
    uniform = float(output.weight.detach().abs().max()) < 1.8 * spread
    assert uniform == (rule == "xavier")
    pooled = VCRHead(config, VCRSettings()).pooler.dense.weight.detach()
    assert float(pooled.std()) == pytest.approx(32**-0.5 if rule == "xavier" else 0.25, rel=0.1)
