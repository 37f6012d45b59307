"""Our model beside figures that the authors' code produced (../shared/parity/vlbert): same weights, same numbers.

One case here, end to end from pixels with a text-only row; all cases and all gradients come with the parity benchmark.
"""

import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vlbert.batch import Batch
from vlbert.boxes import geometry_embedding
from vlbert.config import ModelConfig, RegionConfig
from vlbert.model import Encoded, VLBert
from vlbert.pictures import resized
from vlbert.tasks.pretraining import Pretraining, PretrainingHead, PretrainingSettings
from vlbert.text import SPECIALS, Vocabulary

PARITY = Path(__file__).parents[2] / "shared" / "parity" / "vlbert"
pytestmark = pytest.mark.skipif(not PARITY.is_dir(), reason="the authors' figures lie in ../shared, which is not here")

TINY = Vocabulary([*SPECIALS, "word"])

# The authors' names -> ours, first match wins.
NAMES = [
    (r"^image_feature_extractor\.backbone\.conv1\.", "vlbert.fast_rcnn.backbone.stem.conv1."),
    (r"^image_feature_extractor\.backbone\.bn1\.", "vlbert.fast_rcnn.backbone.stem.conv1.norm."),
    (r"^image_feature_extractor\.backbone\.layer1\.", "vlbert.fast_rcnn.backbone.res2."),
    (r"^image_feature_extractor\.backbone\.layer2\.", "vlbert.fast_rcnn.backbone.res3."),
    (r"^image_feature_extractor\.backbone\.layer3\.", "vlbert.fast_rcnn.backbone.res4."),
    (r"^image_feature_extractor\.roi_head_feature_extractor\.", "vlbert.fast_rcnn.res5."),
    (r"^image_feature_extractor\.obj_downsample\.1\.", "vlbert.embedding.visual."),
    (r"^object_linguistic_embeddings\.", "vlbert.embedding.region_token."),
    (r"^object_mask_word_embedding\.", "vlbert.embedding.hidden_region_token."),
    (r"^aux_text_visual_embedding\.", "vlbert.embedding.look_without_picture."),
    (r"^vlbert\.word_embeddings\.", "vlbert.embedding.words."),
    (r"^vlbert\.end_embedding\.", "vlbert.embedding.end_token."),
    (r"^vlbert\.position_embeddings\.", "vlbert.embedding.positions."),
    (r"^vlbert\.token_type_embeddings\.", "vlbert.embedding.segments."),
    (r"^vlbert\.embedding_LayerNorm\.", "vlbert.embedding.norm."),
    (r"^vlbert\.visual_ln_text\.", "vlbert.embedding.visual_norm_words."),
    (r"^vlbert\.visual_ln_object\.", "vlbert.embedding.visual_norm_regions."),
    (r"^vlbert\.encoder\.layer\.(\d+)\.attention\.self\.", r"vlbert.encoder.layers.\1."),
    (r"^vlbert\.encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"vlbert.encoder.layers.\1.attention_output."),
    (r"^vlbert\.encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"vlbert.encoder.layers.\1.attention_norm."),
    (r"^vlbert\.encoder\.layer\.(\d+)\.intermediate\.dense\.", r"vlbert.encoder.layers.\1.intermediate."),
    (r"^vlbert\.encoder\.layer\.(\d+)\.output\.dense\.", r"vlbert.encoder.layers.\1.output."),
    (r"^vlbert\.encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"vlbert.encoder.layers.\1.output_norm."),
    (r"^vlbert\.mlm_head\.predictions\.bias$", "head.word_bias"),
    (r"^vlbert\.mlm_head\.predictions\.transform\.dense\.", "head.word_transform.dense."),
    (r"^vlbert\.mlm_head\.predictions\.transform\.LayerNorm\.", "head.word_transform.norm."),
    (r"^vlbert\.mvrc_head\.transform\.dense\.", "head.region_transform.dense."),
    (r"^vlbert\.mvrc_head\.region_cls_pred\.", "head.region_classifier."),
]


def ours(name: str) -> str:
    for pattern, replacement in NAMES:
        new, found = re.subn(pattern, replacement, name)
        if found:
            new = re.sub(r"\.downsample\.0\.", ".shortcut.", new)
            new = re.sub(r"\.downsample\.1\.", ".shortcut.norm.", new)
            return re.sub(r"\.bn(\d)\.", r".conv\1.norm.", new)
    raise AssertionError(f"the authors' {name} has no counterpart")


def fill(name: str, about: dict) -> Tensor:
    """The weights are a rule, not a file: README of the parity folder."""
    if name.endswith("num_batches_tracked"):
        return torch.zeros((), dtype=torch.int64)
    rule = about["rule"]
    scale = float(re.search(r"(0\.\d+)", rule).group(1))
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(about["shape"]) * scale
    if name.endswith("running_var"):
        x = 1 + np.abs(x)
    elif rule.startswith("1+"):
        x = 1 + x
    return torch.from_numpy(x.astype(np.float32))


@pytest.fixture(scope="module")
def case() -> tuple[dict, dict]:
    about = json.loads((PARITY / "pretrain_multitask_e2e.json").read_text())
    return about, dict(np.load(PARITY / "pretrain_multitask_e2e.npz"))


def batch_of(arrays: dict) -> Batch:
    """Their two captioned rows and one text-only row as our Batch; -2 and 0 there are masks here."""
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items() if name.startswith("in/")}
    text, aux = tensors["in/text"], tensors["in/aux_text"]
    width, regions = max(text.shape[1], aux.shape[1]), tensors["in/boxes"].shape[1]
    tokens = torch.zeros(3, width, dtype=torch.int64)
    tokens[:2, : text.shape[1]], tokens[2:, : aux.shape[1]] = text, aux
    boxes = torch.zeros(3, regions, 4)
    mask = torch.zeros(3, regions, dtype=torch.bool)
    mask[:2] = tensors["in/boxes"][..., 0] > -1.5
    boxes[:2] = tensors["in/boxes"].where(mask[:2, :, None], 0)
    hidden = torch.zeros(3, regions, dtype=torch.bool)
    hidden[:2] = tensors["in/mvrc_ops"] == 1
    word_asked, words = torch.zeros(3, width, dtype=torch.bool), torch.full((3, width), -1)
    words[:2, : text.shape[1]], words[2:, : aux.shape[1]] = tensors["in/mlm_labels"], tensors["in/aux_mlm_labels"]
    word_asked = words >= 0
    region_asked = torch.zeros(3, regions, dtype=torch.bool)
    region_asked[:2] = (tensors["in/mvrc_labels"].sum(2) - 1).abs() < 0.1
    return Batch(
        keys=["a", "b", "text"],
        about=[{}, {}, {}],
        tokens=tokens,
        text_mask=tokens > 0,
        segments=torch.zeros_like(tokens),
        looks_at=torch.zeros_like(tokens),
        boxes=boxes,
        region_mask=mask,
        region_hidden=hidden,
        pixels=torch.zeros(2, 3, *tensors["in/image"].shape[2:], dtype=torch.uint8),
        picture_rows=torch.tensor([0, 1]),
        picture_sizes=tensors["in/im_info"][:, :2].long(),
        targets={"word_asked": word_asked, "region_asked": region_asked},
        asked={"words": words[word_asked], "region_classes": tensors["in/mvrc_labels"][region_asked[:2]]},
    )


def test_end_to_end_pretraining_computes_what_the_authors_code_computes(case):
    about, arrays = case
    config = ModelConfig(layers="JJ", hidden=64, heads=4, intermediate=128, max_positions=128, regions=RegionConfig())
    model = torch.nn.ModuleDict({"vlbert": VLBert(config, 400), "head": PretrainingHead(config, 400, 1600)})
    weights = {
        ours(name): fill(name, tensor)
        for name, tensor in tensors_of(about).items()
        if not name.endswith("num_batches_tracked") and "relationsip" not in name
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert not [name for name in missing if not name.endswith("object_mask_visual_embedding.weight")]
    model.eval()
    vlbert, head, batch = model["vlbert"], model["head"], batch_of(arrays)

    appearance = vlbert.fast_rcnn.features(torch.from_numpy(arrays["in/image"]), batch)
    theirs = torch.from_numpy(arrays["inter/frcnn.obj_reps_raw"])
    close(appearance, theirs[batch.region_mask[:2, : theirs.shape[1]]])
    embedded, mask = vlbert.embedding(batch, appearance)
    encoded = vlbert.encoder(embedded, mask)
    # Theirs is packed: text, regions and [END] without gaps.
    for row in range(3):
        close(embedded[row][mask[row]], torch.from_numpy(arrays["inter/encoder.input"][row][: int(mask[row].sum())]))
        close(encoded[row][mask[row]], torch.from_numpy(arrays["inter/encoder.output"][row][: int(mask[row].sum())]))

    t = batch.tokens.shape[1]
    output = Encoded(encoded[:, :t], encoded[:, t : t + batch.region_mask.shape[1]])
    words, regions = head(vlbert, output, batch)
    their_words = torch.cat(
        [
            torch.from_numpy(arrays["out/mlm_logits_wvc"])[batch.targets["word_asked"][:2]],
            torch.from_numpy(arrays["out/mlm_logits_aux"])[batch.targets["word_asked"][2:]],
        ]
    )
    close(words, their_words)
    close(regions, torch.from_numpy(arrays["out/mvrc_logits"])[batch.targets["region_asked"][:2]])
    losses = Pretraining(PretrainingSettings(), TINY, 1600).losses(vlbert, head, output, batch)
    for name, theirs in (("words", "mlm_loss_wvc"), ("text_words", "mlm_loss_aux"), ("regions", "mvrc_loss")):
        total, count = losses[name]
        assert float(total.detach()) / count == pytest.approx(float(arrays[f"out/{theirs}"]), rel=1e-5)


def close(found: Tensor, theirs: Tensor) -> None:
    assert found.shape == theirs.shape
    assert float((found.detach() - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


def tensors_of(about: dict) -> dict:
    return {tensor["name"]: tensor for tensor in about["tensors"]}


@pytest.fixture(scope="module")
def components() -> dict:
    return dict(np.load(PARITY / "components.npz"))


def test_the_geometry_embedding_has_the_published_values(components):
    given = torch.from_numpy(components["coord/in_boxes_wh"]).float()
    ours = geometry_embedding(given[:, :4], given[:, 4:], channels=2048, corners=False)
    np.testing.assert_allclose(ours.view(-1, 4, 512).numpy(), components["coord/out"], atol=2e-5)


def test_pictures_are_resized_to_the_published_sizes(components):
    for long_side in (1000, 1200):
        for (width, height), (new_width, new_height) in zip(
            components["resize/in_wh"].astype(int), components[f"resize/out_600_{long_side}"].astype(int), strict=True
        ):
            assert resized(height, width, 600, long_side) == (new_height, new_width)


def test_long_rows_are_cut_as_published(components):
    task = Pretraining(PretrainingSettings(max_elements=64), TINY, num_classes=3)
    for text, boxes, text_kept, boxes_kept in components["cc_truncate/text_boxes_to_text_boxes"].tolist():
        tokens, regions = task._cut(np.zeros(text - 2, np.int64), boxes - 1)
        assert (len(tokens) + 2, regions + 1) == (text_kept, boxes_kept), (text, boxes)
