"""The Faster R-CNN: facts about its parts, and parity with what detectron2 computed, stage by stage."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from places import SHARED
from safetensors.torch import save_file

from detectors.detect import DetectorSettings, FasterRCNNDetector, running, to_stored_pixels
from detectors.faster_rcnn import (
    DEMO,
    VG_RESNET101,
    FasterRCNN,
    FasterRCNNConfig,
    HeadOutputs,
    apply_deltas,
    cell_anchors,
    clip_boxes,
    grid_anchors,
)
from detectors.losses import encode_deltas
from detectors.preprocess import decode_bgr, resize, resize_scale, resized_size, to_input
from detectors.resnet import RESNET101, FrozenNorm, NormedConv, Res5, ResNetC4, ResNetConfig
from detectors.weights.files import load_resnet, load_weights, weights_hash
from storage.sample import Sample

PARITY = SHARED / "parity" / "detector"
TINY = ResNetConfig(blocks=(1, 1, 1, 1), width=4)
SMALL = dataclasses.replace(DEMO, resnet=TINY, num_classes=5, num_attributes=3, rpn_channels=8)


def jpeg(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "jpeg", quality=95)
    return stream.getvalue()


def a_sample(height: int, width: int, seed: int = 0) -> Sample:
    """A picture of coloured rectangles."""
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), 128, np.uint8)
    for _ in range(12):
        y, x = rng.integers(0, height - 20), rng.integers(0, width - 20)
        pixels[y : y + rng.integers(15, height // 2), x : x + rng.integers(15, width // 2)] = rng.integers(0, 256, 3)
    return Sample(f"key{seed}", jpeg(pixels), "caption", "http://host/x.jpg", width, height, "")


def small_network(**changes) -> FasterRCNN:
    return FasterRCNN.random_init(dataclasses.replace(SMALL, **changes), seed=0)


def random_init(config: FasterRCNNConfig = SMALL, seed: int = 0, **settings) -> FasterRCNNDetector:
    network = FasterRCNN.random_init(config, seed)
    return FasterRCNNDetector(network, {"random_init": True, "seed": seed}, DetectorSettings(**settings))


# --- ResNet -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "cells"), [((600, 800), (38, 50)), ((600, 1000), (38, 63)), ((168, 224), (11, 14))])
def test_the_c4_map_has_a_cell_for_every_16_pixels_or_part_of_them(size: tuple[int, int], cells: tuple[int, int]):
    with torch.inference_mode():
        assert ResNetC4(TINY)(torch.zeros(1, 3, *size)).shape == (1, 64, *cells)


@pytest.mark.parametrize(("stem_pool", "cells"), [("caffe", 16), ("torch", 17)])
def test_the_stems_pool_rounds_as_the_config_says(stem_pool: str, cells: int):
    stem = ResNetC4(dataclasses.replace(TINY, stem_pool=stem_pool)).stem
    assert stem(torch.zeros(1, 3, 66, 66)).shape[-1] == cells


def test_a_dilated_res5_keeps_its_map_and_another_halves_it():
    pooled = torch.zeros(2, 64, 14, 14)
    assert Res5(TINY)(pooled).shape == (2, 128, 14, 14)
    assert Res5(dataclasses.replace(TINY, res5_dilated=False))(pooled).shape == (2, 128, 7, 7)
    deep = Res5(dataclasses.replace(TINY, blocks=(1, 1, 1, 3)))
    assert {(b.conv2.dilation, b.conv2.padding, b.conv2.stride) for b in deep.children()} == {((2, 2), (2, 2), (1, 1))}


def test_the_stride_is_in_the_convolution_that_the_config_names():
    caffe, torch_like = ResNetC4(TINY), ResNetC4(dataclasses.replace(TINY, stride_in_1x1=False))
    assert (caffe.res3[0].conv1.stride, caffe.res3[0].conv2.stride) == ((2, 2), (1, 1))
    assert (torch_like.res3[0].conv1.stride, torch_like.res3[0].conv2.stride) == ((1, 1), (2, 2))


def test_our_resnet_computes_what_torchvisions_does():
    torch.manual_seed(0)
    reference = torchvision.models.resnet50().eval()
    config = ResNetConfig(blocks=(3, 4, 6, 3), stride_in_1x1=False, stem_pool="torch", res5_dilated=False)
    renamed = {}
    for name, tensor in reference.state_dict().items():
        if name.startswith("fc") or name.endswith("num_batches_tracked"):
            continue
        name = re.sub(r"^layer(\d)", lambda m: f"res{int(m[1]) + 1}", name)
        name = re.sub(r"downsample\.0", "shortcut", re.sub(r"downsample\.1", "shortcut.norm", name))
        name = re.sub(r"bn(\d)", r"conv\1.norm", name)
        renamed[f"stem.{name}" if name.startswith("conv1") else name] = tensor + 0.01 * torch.rand_like(tensor)
    c4, res5 = ResNetC4(config), Res5(config)
    c4.load_state_dict({k: v for k, v in renamed.items() if not k.startswith("res5")})
    res5.load_state_dict({k.removeprefix("res5."): v for k, v in renamed.items() if k.startswith("res5")})
    back = {k: v for k, v in reference.state_dict().items()}
    originals = [k for k in back if not k.startswith("fc") and not k.endswith("num_batches_tracked")]
    back.update(zip(originals, renamed.values(), strict=True))
    reference.load_state_dict(back)
    x = torch.randn(1, 3, 64, 96)
    with torch.inference_mode():
        theirs = reference.layer3(
            reference.layer2(reference.layer1(reference.maxpool(reference.relu(reference.bn1(reference.conv1(x))))))
        )
        # A norm that is folded into a convolution rounds elsewhere: compared with the largest value.
        for found, expected in ((c4(x), theirs), (res5(theirs), reference.layer4(theirs))):
            torch.testing.assert_close(found / expected.max(), expected / expected.max(), rtol=1e-5, atol=1e-6)


def test_a_frozen_norm_is_a_batch_norm_in_eval_mode_also_while_training():
    live = torch.nn.BatchNorm2d(6)
    for tensor in (live.weight.data, live.bias.data, live.running_mean, live.running_var):
        tensor.uniform_(0.5, 2)
    conv = NormedConv(4, 6, kernel=3, stride=1, dilation=1, norm="frozen").train()
    conv.norm = FrozenNorm.of(live)
    x = torch.randn(2, 4, 3, 3)
    before = {name: tensor.clone() for name, tensor in conv.state_dict().items()}
    torch.testing.assert_close(conv(x), live.eval()(torch.nn.functional.conv2d(x, conv.weight, padding=1)))
    assert all(torch.equal(before[name], tensor) for name, tensor in conv.state_dict().items())
    assert not list(conv.norm.parameters())


def test_freezing_stops_learning_in_the_first_stages_only():
    network = ResNetC4(dataclasses.replace(TINY, norm="batch")).freeze(2).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network(torch.randn(2, 3, 64, 64)).mean().backward()
    learning = {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None}
    assert learning == {"res3", "res4"}
    changed = {
        name.split(".")[0] for name, tensor in network.state_dict().items() if not torch.equal(before[name], tensor)
    }
    assert changed == {"res3", "res4"}
    with pytest.raises(ValueError, match="cannot freeze 5 stages"):
        network.freeze(5)


def test_a_network_from_scratch_neither_explodes_nor_vanishes():
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        c4 = ResNetC4(dataclasses.replace(RESNET101, width=16))(60 * torch.randn(1, 3, 64, 64))
    assert 0.5 < c4.std() < 500


# --- pixels -----------------------------------------------------------------------------------------------------------


def test_the_network_sees_blue_green_red_minus_the_mean_of_each():
    red = jpeg(np.full((32, 48, 3), (250, 30, 10), np.uint8))
    channels = to_input(decode_bgr(red))[0].mean(dim=(1, 2))
    expected = torch.tensor([10 - 102.9801, 30 - 115.9465, 250 - 122.7717])
    torch.testing.assert_close(channels, expected, atol=3, rtol=0)


def test_a_grey_image_has_three_equal_channels():
    image = decode_bgr(jpeg(np.arange(64, dtype=np.uint8).reshape(8, 8)))
    assert image.shape == (8, 8, 3)
    assert np.array_equal(image[:, :, 0], image[:, :, 2])


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((480, 640), (600, 800)),
        ((640, 480), (800, 600)),
        ((300, 700), (429, 1000)),
        ((600, 1200), (500, 1000)),
        ((1, 5000), (1, 1000)),
        # Exactly 562.5 lines: detectron2's two factors, one after the other, leave less of some, and half of others.
        ((720, 1280), (562, 1000)),
        ((1920, 1080), (1000, 562)),
        ((450, 800), (563, 1000)),
    ],
)
def test_the_short_side_is_600_unless_the_long_one_would_exceed_1000(size: tuple[int, int], resized: tuple[int, int]):
    assert resized_size(*size, VG_RESNET101) == resized


def test_swapping_red_and_blue_changes_what_is_found():
    sample = a_sample(168, 224)
    swapped = dataclasses.replace(sample, image=jpeg(decode_bgr(sample.image)))
    detector = random_init()
    ours, theirs = detector.detect([sample, swapped])
    assert not np.array_equal(ours.class_probs[:5], theirs.class_probs[:5])


# --- boxes ------------------------------------------------------------------------------------------------------------


def test_anchors_are_size_by_size_around_the_corner_of_their_cell():
    cell = cell_anchors(VG_RESNET101)
    assert cell.shape == (12, 4)
    torch.testing.assert_close(cell[1], torch.tensor([-32.0, -32, 32, 32]))
    torch.testing.assert_close(cell[10], torch.tensor([-256.0, -256, 256, 256]))
    width, height = cell[0, 2:] - cell[0, :2]
    torch.testing.assert_close((height / width, height * width), (torch.tensor(0.5), torch.tensor(64.0**2)))
    grid = grid_anchors(cell, 2, 3)
    assert len(grid) == 2 * 3 * 12
    torch.testing.assert_close(grid[12 * (1 * 3 + 2)], cell[0] + torch.tensor([32.0, 16, 32, 16]))


BOX = st.tuples(st.floats(-50, 300), st.floats(-50, 300), st.floats(1, 200), st.floats(1, 200))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    pairs=st.lists(st.tuples(BOX, BOX), min_size=1, max_size=8),
    weights=st.sampled_from([(1, 1, 1, 1), (10, 10, 5, 5), (3, 7, 2, 9)]),
)
def test_applying_the_deltas_between_two_boxes_moves_one_onto_the_other(pairs, weights):
    corners = torch.tensor(pairs, dtype=torch.float64)
    first, second = torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], dim=-1).unbind(1)
    moved = apply_deltas(encode_deltas(first, second, weights), first, weights)
    usable = (second[:, 2:] - second[:, :2] < 1000 / 16 * (first[:, 2:] - first[:, :2])).all(dim=1)
    torch.testing.assert_close(moved[usable], second[usable])
    own = apply_deltas(torch.tensor([[1.0, 2.0, math.log(2), 0.0]]), torch.tensor([[0.0, 0.0, 10.0, 20.0]]))
    torch.testing.assert_close(own, torch.tensor([[5.0, 40.0, 25.0, 60.0]]))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(box=BOX, height=st.integers(1, 200), width=st.integers(1, 200))
def test_boxes_are_clipped_to_width_and_height(box, height, width):
    x, y, w, h = box
    clipped = clip_boxes(torch.tensor([[x, y, x + w, y + h]]), height, width)[0].tolist()
    expected = [min(max(x, 0), width), min(max(y, 0), height), min(max(x + w, 0), width), min(max(y + h, 0), height)]
    assert clipped == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_caffes_resize_interpolates_between_centres_and_rounds_neither_colours_nor_scale():
    config = dataclasses.replace(SMALL, resize="caffe", short_side=3, long_side=100)
    image = np.zeros((2, 4, 3), np.uint8)
    image[0, :, 2] = [0, 10, 20, 30]
    image[1, :, 2] = [100, 110, 120, 130]
    resized = resize(image, config)
    assert resized.dtype == np.float32
    assert resized.shape == (3, 6, 3)
    # Centres of 6 pixels over 4: (x + 0.5) / 1.5 - 0.5, not beyond the first and the last.
    across = np.clip((np.arange(6) + 0.5) / 1.5 - 0.5, 0, 3) * 10
    assert np.allclose(resized[:, :, 2], across + np.array([[0], [50], [100]]))
    assert resized[:, :, :2].max() == 0
    # cv2 rounds a side to the even number; the long side may pass its cap by less than half a pixel.
    assert resized_size(2, 3, dataclasses.replace(config, short_side=3)) == (3, 4)
    assert resized_size(2, 3, dataclasses.replace(config, short_side=3, resize="pil")) == (3, 5)
    narrow = {"short_side": 3, "long_side": 4}
    assert resized_size(30, 44, dataclasses.replace(config, **narrow)) == (3, 4)
    assert resize_scale(30, 44, dataclasses.replace(config, **narrow)) == 0.1
    assert resize_scale(30, 44, dataclasses.replace(config, **narrow, resize="pil")) == pytest.approx(4 / 44)


def test_boxes_go_back_to_stored_pixels_by_each_sides_own_scale():
    boxes = torch.tensor([[10.0, 10, 100, 50], [0, 0, 101, 51]])
    assert to_stored_pixels(boxes, scales=(50 / 75, 0.5), stored=(75, 200)).tolist() == [
        [20, 15, 200, 75],
        [0, 0, 200, 75],
    ]


@pytest.mark.parametrize(("minimum_side", "kept"), [(0, 3), (2, 2), (3, 1)])
def test_boxes_that_count_both_end_pixels_are_one_wider_in_every_step(minimum_side: float, kept: int):
    network = small_network(box_arithmetic="plus_one", minimum_side=minimum_side)
    network.proposal_generator.cell_anchors.copy_(torch.tensor([-7.0, -3, 8, 12]))  # 16 x 16
    logits, deltas = torch.full((6, 3, 3), float("nan")), torch.zeros(24, 3, 3)
    logits[0, 1, 1], deltas[:4, 1, 1] = 5, torch.tensor([0.25, 0.5, 0, np.log(2)])  # 16 x 32 around (21, 29)
    logits[1, 0, 0], deltas[4:8, 0, 0] = 4, torch.tensor([-0.5, 0, 0, 0])  # 16 x 16 around (-7, 5)
    logits[2, 2, 2], deltas[8:12, 2, 2] = 3, torch.tensor([9.0, 9, 0, 0])  # far outside
    boxes, _ = network.proposals(logits, deltas, height=48, width=40)
    assert boxes.tolist() == [[13, 13, 29, 45], [0, 0, 1, 13], [39, 47, 39, 47]][:kept]


@pytest.mark.parametrize(("arithmetic", "kept"), [("continuous", 1), ("plus_one", 2)])
def test_caffe_drops_small_boxes_before_the_best_are_taken_and_detectron2_among_them(arithmetic: str, kept: int):
    network = small_network(box_arithmetic=arithmetic, minimum_side=20, pre_nms=2)
    network.proposal_generator.cell_anchors.copy_(torch.tensor([0.0, 0, 15, 40]))
    network.proposal_generator.cell_anchors[:2, 2] = 40
    logits = torch.full((6, 1, 1), float("nan"))
    logits[:3, 0, 0] = torch.tensor([3.0, 1, 2])  # the second best is narrow
    deltas = torch.zeros(24, 1, 1)
    deltas[4] = 1  # so that the third does not lie on the best
    assert len(network.proposals(logits, deltas, height=200, width=200)[0]) == kept


def test_suppression_counts_both_end_pixels_where_the_boxes_do():
    touching = torch.zeros(24, 1, 1)
    touching[4] = 3 / 16  # anchor 1 is anchor 0, 3 pixels to the right: IoU 13 / 19 in 16 x 16, 12 / 18 in 15 x 15
    found = {}
    for arithmetic in ("continuous", "plus_one"):
        network = small_network(box_arithmetic=arithmetic, rpn_nms_threshold=0.675)
        network.proposal_generator.cell_anchors.copy_(torch.tensor([0.0, 0, 15, 15]))
        logits = torch.full((6, 1, 1), float("nan"))
        logits[:2] = 1
        if arithmetic == "continuous":
            touching[4] = 3 / 15
        found[arithmetic] = len(network.proposals(logits, touching, height=100, width=100)[0])
        touching[4] = 3 / 16
    assert found == {"continuous": 2, "plus_one": 1}


def test_proposals_lie_in_the_image_best_first_and_do_not_overlap():
    network = FasterRCNN.random_init(SMALL, seed=0)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 11, 14, generator=generator)
    deltas = torch.randn(24, 11, 14, generator=generator)
    logits[0, 5, 7], deltas[:4, 5, 7], deltas[4, 1, 1] = float("nan"), 0, float("inf")
    boxes, scores = network.proposals(logits, deltas, height=168, width=224)
    assert 50 < len(boxes) <= SMALL.post_nms
    assert torch.isfinite(boxes).all()
    assert torch.isfinite(scores).all()
    assert boxes.min() >= 0
    assert boxes[:, 0::2].max() == 224
    assert boxes[:, 1::2].max() == 168
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert (scores.diff() <= 0).all()
    iou = torchvision.ops.box_iou(boxes, boxes).fill_diagonal_(0)
    assert iou.max() <= SMALL.rpn_nms_threshold
    large, _ = small_network(minimum_side=40).proposals(logits, deltas, 168, 224)
    assert 40 < (large[:, 2:] - large[:, :2]).min() < 60
    larger, _ = small_network(minimum_side=40).proposals(logits, deltas, 168, 224, scale=1.5)
    assert (larger[:, 2:] - larger[:, :2]).min() > 60


def test_suppression_goes_beyond_the_best_few_where_these_all_overlap():
    network = small_network(post_nms=4, rpn_nms_threshold=0.1)
    away = torch.stack(torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")).sum(dim=0)
    anchors = network.config.num_anchors
    boxes, scores = network.proposals(-away.expand(anchors, 10, 10), torch.zeros(4 * anchors, 10, 10), 160, 160)
    assert len(boxes) == 4
    assert (torchvision.ops.box_iou(boxes, boxes).fill_diagonal_(0) <= 0.1).all()
    assert scores.min() < -1, "beyond the 16 best anchors, which are those of the first cells"


def test_logits_and_deltas_of_an_anchor_stay_together():
    network = FasterRCNN.random_init(SMALL, seed=0)
    logits, deltas = torch.zeros(6, 4, 5), torch.zeros(24, 4, 5)
    logits[4, 2, 3] = 9  # anchor 4: size 48, ratio 1
    deltas[4 * 4, 2, 3] = 0.25  # its dx
    boxes, scores = network.proposals(logits, deltas, height=200, width=200)
    assert scores[0] == 9
    assert boxes[0].tolist() == [48 - 24 + 12, 32 - 24, 48 + 24 + 12, 32 + 24]


def test_both_ways_of_pooling_read_the_box_where_it_is():
    c4 = torch.zeros(1, 64, 11, 14)
    c4[0, 7, 4:7, 8:11] = 1  # pixels x 128..176, y 64..112; RoIPool takes both of a box's end cells
    inside, outside = torch.tensor([[0, 128.0, 64, 160, 96]]), torch.tensor([[0, 64.0, 128, 96, 160]])
    for roi_op in ("pool", "align1"):
        network = small_network(roi_op=roi_op)
        assert network.pool(c4, inside).shape == (1, 64, 7, 7)
        assert network.pool(c4, inside)[0, 7].mean() > 0.8
        assert network.pool(c4, outside).abs().max() == 0


@pytest.mark.parametrize("roi_op", ["pool", "align1"])
def test_in_half_precision_boxes_are_pooled_where_they_lie_in_float32(roi_op):
    network = small_network(roi_op=roi_op)
    c4 = torch.arange(64.0).expand(1, 64, 40, 64).contiguous().bfloat16()  # every cell holds its column
    rois = torch.tensor([[0, 517.0, 100, 933, 600], [0, 641, 33, 1001, 500]])
    with torch.autocast("cpu", torch.bfloat16):
        found = network.pool(c4, rois)
    torch.testing.assert_close(found, network.pool(c4.float(), rois), rtol=0, atol=0)


def test_align1_does_not_shift_boxes_by_half_a_cell():
    c4 = torch.arange(14.0).expand(1, 64, 11, 14)  # every cell holds its column
    pooled = small_network(roi_op="align1").pool(c4, torch.tensor([[0, 32.0, 32, 64, 64]]))
    assert pooled.mean().item() == pytest.approx(3)


# --- the detector -----------------------------------------------------------------------------------------------------


TURNED = a_sample(340, 450)  # resized to 168x222: scales 2.0238 and 2.0270
TO_STORED = np.array([450 / 222, 340 / 168] * 2, np.float32)


@torch.inference_mode()
def stages(network: FasterRCNN) -> tuple[torch.Tensor, torch.Tensor, HeadOutputs]:
    """Proposals of TURNED in input pixels, their features, and what the heads say about them."""
    pixels = to_input(resize(decode_bgr(TURNED.image), SMALL))
    assert pixels.shape == (1, 3, 168, 222)
    c4 = network.backbone(pixels)
    logits, deltas = network.rpn(c4)
    proposals, _ = network.proposals(logits[0], deltas[0], 168, 222)
    features = network.roi_features(c4, [proposals])
    return proposals, features, network.heads(features)


def proposal_of_each(boxes: np.ndarray, proposals: torch.Tensor) -> np.ndarray:
    """Which proposal each box of TURNED's regions is."""
    distance = np.abs(boxes[:, None] - (proposals.numpy() * TO_STORED)[None]).max(axis=2)
    assert distance.min(axis=1).max() < 1e-3
    return distance.argmin(axis=1)


def test_regions_are_proposals_in_pixels_of_the_stored_image():
    detector = random_init(seed=1)
    (regions,) = detector.detect([TURNED])
    proposals, _, outputs = stages(detector.network)
    probs, attribute_probs = outputs.class_logits.softmax(1), outputs.attribute_logits.softmax(1)[:, :3]
    nearest = proposal_of_each(regions.boxes, proposals)
    assert np.allclose(regions.class_probs, probs.numpy()[nearest], atol=1e-3)
    assert np.allclose(regions.scores, probs.numpy()[nearest, regions.labels])
    assert np.allclose(regions.attribute_scores, attribute_probs.numpy()[nearest].max(axis=1))
    assert np.array_equal(regions.attributes, attribute_probs.numpy()[nearest].argmax(axis=1))
    assert regions.boxes[:, 2].max() > 222
    assert regions.boxes[:, 3].max() > 168


ARRAYS = ("scores", "labels", "class_probs", "attributes", "attribute_scores")


def test_kept_features_are_those_of_each_regions_own_proposal_and_change_nothing_else():
    (plain,) = random_init(seed=1).detect([TURNED])
    detector = random_init(seed=1, keep_features=True)
    (regions,) = detector.detect([TURNED])
    assert plain.features is None
    assert all(np.array_equal(getattr(plain, name), getattr(regions, name)) for name in ("boxes", *ARRAYS))
    proposals, features, _ = stages(detector.network)
    own = proposal_of_each(regions.boxes, proposals)
    assert regions.features.dtype == np.float16
    assert regions.features.shape == (len(regions), TINY.res5_channels)
    assert np.allclose(regions.features, features[own], rtol=1e-3, atol=1e-3)
    # The regions' order is not the proposals', and two regions can be told apart by their features.
    assert not np.array_equal(own, np.arange(len(own)))
    assert np.abs(features[own].diff(dim=0)).amax(dim=1).median() > 0.1


def test_features_beyond_float16_matter_only_to_a_detector_that_keeps_them():
    plain, keeping = random_init(), random_init(keep_features=True)
    for detector in (plain, keeping):
        detector.network.roi_heads.res5.register_forward_hook(lambda _, inputs, output: output + 7e4)
    (regions,) = plain.detect([TURNED])
    assert len(regions) >= 10
    (refused,) = keeping.detect([TURNED])
    assert re.fullmatch(r"not_finite: a feature is 7\d{4}(\.\d)?, and float16 holds 65504 at most", refused)


def moving(shift: float = 0.0, **settings) -> FasterRCNNDetector:
    """A detector whose box head moves boxes far, another way for each class; class 2 by `shift` widths in addition."""
    detector = random_init(seed=2, **settings)
    predictor = detector.network.roi_heads.box_predictor
    with torch.no_grad():
        predictor.bbox_pred.weight *= 25
        predictor.bbox_pred.bias[4 * 2] = shift * 10
        predictor.cls_score.weight *= 30
    return detector


def test_regressed_boxes_are_where_the_deltas_of_a_regions_own_class_move_its_proposal():
    (plain,) = moving(keep_features=True).detect([TURNED])
    detector = moving(boxes="regressed", keep_features=True)
    (regions,) = detector.detect([TURNED])
    assert all(np.array_equal(getattr(plain, name), getattr(regions, name)) for name in ("features", *ARRAYS))
    proposals, _, outputs = stages(detector.network)
    own = proposal_of_each(plain.boxes, proposals)
    expected, clipped = [], 0
    for box, label in zip(own, regions.labels, strict=True):
        x1, y1, x2, y2 = proposals[box].tolist()
        dx, dy, dw, dh = outputs.box_deltas[box, label].tolist()
        x, y = (x1 + x2) / 2 + dx / 10 * (x2 - x1), (y1 + y2) / 2 + dy / 10 * (y2 - y1)
        width, height = (x2 - x1) * np.exp(min(dw / 5, np.log(62.5))), (y2 - y1) * np.exp(min(dh / 5, np.log(62.5)))
        moved = np.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
        inside = moved.clip(0, [222, 168, 222, 168])
        clipped += not np.array_equal(moved, inside)
        expected.append(inside * TO_STORED)
    assert np.allclose(regions.boxes, expected, atol=0.01)
    # What the test would not see otherwise: boxes that stay, that need no clipping or are all of one class.
    assert 0 < clipped < len(regions)
    assert np.median(np.abs(regions.boxes - plain.boxes).max(axis=1)) > 10
    assert len(set(regions.labels)) > 1


def test_a_regressed_box_without_area_in_the_image_keeps_its_proposals():
    (plain,) = moving().detect([TURNED])
    (moved,) = moving(boxes="regressed").detect([TURNED])
    (regions,) = moving(shift=1e4, boxes="regressed").detect([TURNED])
    gone = plain.labels == 2
    assert 0 < gone.sum() < len(gone)
    assert np.array_equal(regions.boxes[gone], plain.boxes[gone])
    assert np.array_equal(regions.boxes[~gone], moved.boxes[~gone])
    assert not np.array_equal(moved.boxes[gone], plain.boxes[gone])
    flat = moving(boxes="regressed")
    with torch.no_grad():
        flat.network.roi_heads.box_predictor.bbox_pred.bias.view(5, 4)[:, 3] = -1e5  # heights times exp(-20,000)
    (regions,) = flat.detect([TURNED])
    assert np.array_equal(regions.boxes, plain.boxes)


def test_box_weights_that_make_no_sense_matter_only_to_a_detector_that_uses_them():
    plain, regressing = random_init(), random_init(boxes="regressed")
    for detector in (plain, regressing):
        torch.nn.init.constant_(detector.network.roi_heads.box_predictor.bbox_pred.bias, float("nan"))
    (regions,) = plain.detect([TURNED])
    assert len(regions) >= 10
    assert regressing.detect([TURNED]) == ["not_finite: the network's boxes are not all finite numbers"]


def test_regions_lie_in_the_stored_image_best_first_with_their_whole_distribution():
    for size in ((168, 224), (333, 500), (77, 41)):
        (regions,) = random_init().detect([a_sample(*size)])
        assert 10 <= len(regions) <= 100
        assert regions.boxes.min() >= 0
        assert (regions.boxes <= [size[1], size[0]] * 2).all()
        assert (regions.boxes[:, 2:] > regions.boxes[:, :2]).all()
        assert (np.diff(regions.scores) <= 0).all()
        assert regions.background == 5
        assert regions.class_probs.shape == (len(regions), 6)
        assert np.allclose(regions.class_probs.astype(float).sum(axis=1), 1, atol=2e-3)
        assert np.array_equal(regions.class_probs[:, :5].argmax(axis=1), regions.labels) or len(set(regions.scores)) < 2
        assert regions.labels.max() < 5
        assert regions.attributes.max() < 3
        assert regions.attribute_scores.shape == regions.attributes.shape


def test_an_image_is_found_the_same_alone_and_among_others():
    detector = random_init()
    samples = [a_sample(168, 224, 0), a_sample(100, 90, 1), a_sample(168, 224, 2)]
    together = detector.detect(samples)
    for sample, regions in zip(samples, together, strict=True):
        (alone,) = detector.detect([sample])
        assert np.array_equal(alone.boxes, regions.boxes)
        assert np.array_equal(alone.class_probs, regions.class_probs)


def test_a_bad_image_gets_a_status_and_the_others_their_regions():
    good = a_sample(168, 224)
    torn = dataclasses.replace(good, image=good.image[: len(good.image) // 2])
    text = dataclasses.replace(good, image=b"<html>not found</html>")
    turned = dataclasses.replace(good, width=good.height, height=good.width)
    found = random_init().detect([torn, text, turned, good])
    assert [f if isinstance(f, str) else len(f) > 0 for f in found[3:]] == [True]
    assert found[0].startswith("bad_image: OSError: ")
    assert found[1].startswith("bad_image: UnidentifiedImageError: ")
    assert found[2] == "bad_image: is 224x168, its record says 168x224"


def test_random_weights_are_the_same_for_the_same_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (FasterRCNN.random_init(SMALL, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["backbone.stem.conv1.weight"], other["backbone.stem.conv1.weight"])


def test_the_precision_of_gpus_is_set_for_the_detector_and_put_back():
    precisions = []

    def look(*_) -> None:
        precisions.append((torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision))

    look()
    detector = random_init()
    detector.network.backbone.register_forward_hook(look)
    detector.detect([a_sample(168, 224)])
    with running(DetectorSettings(device="cuda", tf32=True)):
        look()
    look()
    assert precisions[1:3] == [("ieee", "ieee"), ("tf32", "ieee")]
    assert precisions[3] == precisions[0] != ("ieee", "ieee")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
def test_a_gpu_finds_what_the_cpu_does_though_torchs_own_default_is_tf32():
    samples = [a_sample(168, 224, seed) for seed in range(3)]
    for ours, theirs in zip(random_init(device="cuda").detect(samples), random_init().detect(samples), strict=True):
        assert np.allclose(np.sort(ours.scores), np.sort(theirs.scores), atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="torch finds no GPU here; detect on cpu"):
        random_init(device="cuda")


def test_numbers_that_overflow_give_the_image_a_status():
    detector = random_init()
    torch.nn.init.constant_(detector.network.roi_heads.box_predictor.cls_score.bias, float("nan"))
    probabilities = "not_finite: the network's class probabilities are not all finite numbers"
    assert detector.detect([TURNED, TURNED]) == [probabilities] * 2
    torch.nn.init.constant_(detector.network.proposal_generator.rpn_head.objectness_logits.bias, float("nan"))
    assert detector.detect([TURNED]) == ["not_finite: the network's objectness are not all finite numbers"]


def test_half_precision_in_res5_stays_near_single_precision():
    (single,), (half,) = (random_init(precision=p).detect([a_sample(168, 224)]) for p in ("fp32", "bf16-res5"))
    assert np.allclose(np.sort(single.scores)[-10:], np.sort(half.scores)[-10:], atol=0.02)


# --- weight files -----------------------------------------------------------------------------------------------------


def save(tensors: dict, file: Path, metadata: dict | None = None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)
    return file


def test_saved_weights_come_back_and_are_identified_by_their_hash(tmp_path: Path):
    source = FasterRCNN.random_init(SMALL, seed=3)
    names = json.dumps(["a", "b", "c", "d", "e"])
    file = save(source.state_dict(), tmp_path / "w.safetensors", {"classes": names})
    network = FasterRCNN.random_init(SMALL, seed=0)
    loaded = load_weights(network, file)
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), network.state_dict().values(), strict=True)
    )
    assert loaded.metadata["random_init"] is False
    assert loaded.metadata["weights_sha256"] == weights_hash(file)
    assert loaded.classes == ("a", "b", "c", "d", "e")
    detector = FasterRCNNDetector(network, loaded.metadata, DetectorSettings())
    renamed = save(source.state_dict(), tmp_path / "renamed.safetensors", {"classes": names})
    again = FasterRCNNDetector(network, load_weights(network, renamed).metadata, DetectorSettings())
    assert detector.id == again.id
    other = save(FasterRCNN.random_init(SMALL, seed=4).state_dict(), tmp_path / "o.safetensors")
    assert FasterRCNNDetector(network, load_weights(network, other).metadata, DetectorSettings()).id != detector.id


def test_every_tensor_that_does_not_fit_is_named_at_once_and_nothing_is_loaded(tmp_path: Path):
    tensors = FasterRCNN.random_init(SMALL, seed=3).state_dict()
    del tensors["backbone.res2.0.conv1.weight"]
    tensors["backbone.fc.weight"] = torch.zeros(2)
    tensors["roi_heads.box_predictor.cls_score.bias"] = torch.zeros(7)
    tensors["proposal_generator.rpn_head.conv.bias"] = torch.full((8,), float("nan"))
    file = save(tensors, tmp_path / "bad.safetensors")
    network = FasterRCNN.random_init(SMALL, seed=0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match=r"bad\.safetensors does not fit") as error:
        load_weights(network, file)
    for fault in (
        "missing backbone.res2.0.conv1.weight",
        "unexpected backbone.fc.weight",
        "cls_score.bias has shape [7], the network's is [6]",
        "rpn_head.conv.bias is not finite",
    ):
        assert fault in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_a_file_without_attribute_head_gives_regions_without_attributes(tmp_path: Path):
    tensors = FasterRCNN.random_init(SMALL, seed=3).state_dict()
    head = ("cls_embedding", "fc_attr", "attr_score")
    bare = {name: tensor for name, tensor in tensors.items() if not any(layer in name for layer in head)}
    network = FasterRCNN.random_init(SMALL, seed=0)
    loaded = load_weights(network, save(bare, tmp_path / "bare.safetensors"))
    (regions,) = FasterRCNNDetector(network, loaded.metadata, DetectorSettings()).detect([a_sample(168, 224)])
    assert loaded.attributes is False
    assert regions.attributes is None
    assert regions.attribute_scores is None
    half = {name: tensor for name, tensor in tensors.items() if "fc_attr" not in name}
    with pytest.raises(ValueError, match="missing roi_heads.box_predictor.fc_attr.bias"):
        load_weights(FasterRCNN.random_init(SMALL, 0), save(half, tmp_path / "half.safetensors"))


def test_a_backbone_alone_does_not_start_region_features_and_what_it_lacks_is_named(tmp_path: Path):
    tensors = FasterRCNN.random_init(SMALL, seed=3).state_dict()
    bare = {name: tensor for name, tensor in tensors.items() if name.startswith("backbone.")}
    file = save(bare, tmp_path / "backbone.safetensors")
    c4 = ResNetC4(TINY)
    before = {name: tensor.clone() for name, tensor in c4.state_dict().items()}
    with pytest.raises(ValueError, match=r"backbone\.safetensors does not fit") as error:
        load_resnet(c4, Res5(TINY), file)
    assert all(torch.equal(before[name], tensor) for name, tensor in c4.state_dict().items())
    for name in Res5(TINY).state_dict():
        assert f"missing roi_heads.res5.{name}" in str(error.value)


def test_region_features_refuse_weights_that_were_wired_otherwise(tmp_path: Path):
    source = FasterRCNN.random_init(
        dataclasses.replace(SMALL, resnet=dataclasses.replace(TINY, stride_in_1x1=False)), 3
    )
    metadata = {"network": json.dumps(dataclasses.asdict(source.config))}
    file = save(source.state_dict(), tmp_path / "w.safetensors", metadata)
    with pytest.raises(ValueError, match=r"stride_in_1x1 = False.*set model\.regions\.resnet\.stride_in_1x1=false"):
        load_resnet(ResNetC4(TINY), Res5(TINY), file)
    same = dataclasses.replace(TINY, stride_in_1x1=False, stem_pool="torch")
    load_resnet(ResNetC4(same), Res5(same), file)


def test_region_features_with_live_norms_count_anew(tmp_path: Path):
    source, live = FasterRCNN.random_init(SMALL, seed=3), dataclasses.replace(TINY, norm="batch")
    counter = {"backbone.stem.conv1.norm.num_batches_tracked": torch.tensor(9)}
    file = save(source.state_dict() | counter, tmp_path / "w.safetensors")
    for norm in (TINY, live):
        c4, res5 = ResNetC4(norm), Res5(norm)
        c4(torch.zeros(2, 3, 64, 64))  # counts one, where the norms are live
        load_resnet(c4, res5, file)
        for ours, theirs in ((c4, source.backbone), (res5, source.roi_heads.res5)):
            state = ours.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())
            assert {int(tensor) for name, tensor in state.items() if name.endswith("num_batches_tracked")} <= {0}
    assert "stem.conv1.norm.num_batches_tracked" in c4.state_dict()


def test_what_files_carry_beside_weights_is_checked_used_or_dropped(tmp_path: Path):
    tensors = FasterRCNN.random_init(SMALL, seed=3).state_dict()
    anchors = "proposal_generator.anchor_generator.cell_anchors.0"
    extras = {
        "backbone.stem.conv1.norm.num_batches_tracked": torch.tensor(3),
        "pixel_mean": torch.tensor([102.9801, 115.9465, 122.7717]).reshape(3, 1, 1),
        "pixel_std": torch.ones(3, 1, 1),
        anchors: torch.arange(24.0).reshape(6, 4),
    }
    network = FasterRCNN.random_init(SMALL, seed=0)
    loaded = load_weights(network, save(tensors | extras, tmp_path / "w.safetensors"))
    assert loaded.anchors == "file"
    assert torch.equal(network.proposal_generator.cell_anchors, extras[anchors])
    for name, wrong in (("pixel_mean", torch.tensor([123.675, 116.28, 103.53])), (anchors, torch.zeros(12, 4))):
        file = save(tensors | {name: wrong}, tmp_path / "wrong.safetensors")
        with pytest.raises(ValueError, match=rf"wrong\.safetensors: {name}"):
            load_weights(FasterRCNN.random_init(SMALL, seed=0), file)


def test_files_that_are_no_weights_are_refused_in_words(tmp_path: Path):
    network = FasterRCNN.random_init(SMALL, seed=0)
    with pytest.raises(ValueError, match="there is no weight file"):
        load_weights(network, tmp_path / "absent.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ValueError, match=r"torn\.safetensors is not a safetensors file"):
        load_weights(network, tmp_path / "torn.safetensors")
    file = save(network.state_dict(), tmp_path / "w.safetensors", {"classes": '["a"]'})
    with pytest.raises(ValueError, match="names 1 classes, the network has 5"):
        load_weights(network, file)


# --- the presets ------------------------------------------------------------------------------------------------------


def test_the_presets_have_the_parameters_of_the_published_network():
    with torch.device("meta"):
        network = FasterRCNN(VG_RESNET101)
    count = sum(p.numel() for p in network.parameters())
    assert round(count / 1e6, 1) == 65.3
    assert len(network.state_dict()) == 535
    assert isinstance(network.backbone.stem.conv1.norm, FrozenNorm)
