"""The Faster R-CNN: pixels, boxes, proposals, and the regions that a detector makes of them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_detector import image_sample, rectangles

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import (
    DEMO,
    VG_RESNET101,
    FasterRCNN,
    FasterRCNNConfig,
    HeadOutputs,
    apply_deltas,
    cell_anchors,
    grid_anchors,
    regress_boxes,
)
from detectors.losses import encode_deltas
from detectors.preprocess import decode_bgr, resize, resize_scale, resized_size, to_input
from detectors.resnet import ResNetConfig
from detectors.select import SelectionSettings
from storage.sample import Sample

TINY = ResNetConfig(blocks=(1, 1, 1, 1), width=4)
SMALL = dataclasses.replace(DEMO, resnet=TINY, num_classes=5, num_attributes=3, rpn_channels=8)


def a_sample(height: int, width: int, seed: int = 0) -> Sample:
    return image_sample(seed, rectangles(height, width, seed))


def small_network(**changes) -> FasterRCNN:
    return FasterRCNN.random_init(dataclasses.replace(SMALL, **changes), seed=0)


def random_init(config: FasterRCNNConfig = SMALL, seed: int = 0, **settings) -> FasterRCNNDetector:
    network = FasterRCNN.random_init(config, seed)
    return FasterRCNNDetector(network, {"random_init": True, "seed": seed}, DetectorSettings(**settings))


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((640, 480), (800, 600)),
        ((300, 700), (429, 1000)),
        ((1, 5000), (1, 1000)),
        # Exactly 562.5 lines: detectron2's two factors, one after the other, leave less of some, and half of others.
        ((720, 1280), (562, 1000)),
        ((1920, 1080), (1000, 562)),
        ((450, 800), (563, 1000)),
    ],
)
def test_the_short_side_is_600_unless_the_long_one_would_exceed_1000(size: tuple[int, int], resized: tuple[int, int]):
    assert resized_size(*size, VG_RESNET101) == resized


def test_anchors_are_size_by_size_around_the_corner_of_their_cell():
    cell = cell_anchors(VG_RESNET101)
    across, down = 32 * 2**0.5, 32 / 2**0.5  # half as high as wide, 64 x 64 in all
    torch.testing.assert_close(cell[0], torch.tensor([-across, -down, across, down]))
    torch.testing.assert_close(cell[[1, 10], 2:], torch.tensor([[32.0, 32], [256, 256]]))
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


def test_caffes_resize_interpolates_between_centres_and_rounds_neither_colours_nor_scale():
    config = dataclasses.replace(SMALL, resize="caffe", short_side=3, long_side=100)
    image = np.zeros((2, 4, 3), np.uint8)
    image[..., 2] = [[0, 10, 20, 30], [100, 110, 120, 130]]
    resized = resize(image, config)
    assert (resized.dtype, resized.shape) == (np.float32, (3, 6, 3))
    # Centres of 6 pixels over 4: (x + 0.5) / 1.5 - 0.5, not beyond the first and the last.
    across = np.clip((np.arange(6) + 0.5) / 1.5 - 0.5, 0, 3) * 10
    assert np.allclose(resized[:, :, 2], across + np.array([[0], [50], [100]]))
    assert resized[:, :, :2].max() == 0
    # cv2 rounds a side to the even number; the long side may pass its cap by less than half a pixel.
    assert resized_size(2, 3, config) == (3, 4)
    assert resized_size(2, 3, dataclasses.replace(config, resize="pil")) == (3, 5)
    narrow = dataclasses.replace(config, long_side=4)
    assert resized_size(30, 44, narrow) == (3, 4)
    assert resize_scale(30, 44, narrow) == 0.1
    assert resize_scale(30, 44, dataclasses.replace(narrow, resize="pil")) == pytest.approx(4 / 44)


@pytest.mark.parametrize(("minimum_side", "kept"), [(0, 3), (2, 2), (3, 1)])
def test_boxes_that_count_both_end_pixels_are_one_wider_in_every_step(minimum_side: float, kept: int):
    network = small_network(box_arithmetic="plus_one", minimum_side=minimum_side)
    network.proposal_generator.cell_anchors.copy_(torch.tensor([-7.0, -3, 8, 12]))  # 16 x 16
    logits, deltas = torch.full((6, 3, 3), float("nan")), torch.zeros(24, 3, 3)
    logits[0, 1, 1], deltas[:4, 1, 1] = 5, torch.tensor([0.25, 0.5, 0, np.log(2)])  # 16 x 32 around (21, 29)
    logits[1, 0, 0], deltas[4:8, 0, 0] = 4, torch.tensor([-0.5, 0, 0, 0])  # 16 x 16 around (-7, 5)
    logits[2, 2, 2], deltas[8:12, 2, 2] = 3, torch.tensor([9.0, 9, 0, 0])  # far outside
    (boxes,), _ = network.proposals(logits[None], deltas[None], height=48, width=40)
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
    (boxes,), _ = network.proposals(logits[None], deltas[None], height=200, width=200)
    assert len(boxes) == kept


def random_outputs(images: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(images, channels, 11, 14, generator=generator) for channels in (6, 24))


def test_proposals_lie_in_the_image_best_first_and_do_not_overlap():
    network = small_network()
    logits, deltas = random_outputs(1, seed=1)
    logits[0, 0, 5, 7], deltas[0, :4, 5, 7], deltas[0, 4, 1, 1] = float("nan"), 0, float("inf")
    (boxes,), (scores,) = network.proposals(logits, deltas, height=168, width=224)
    assert 50 < len(boxes) <= SMALL.post_nms
    assert torch.isfinite(scores).all()
    assert (boxes.min(), boxes[:, 0::2].max(), boxes[:, 1::2].max()) == (0, 224, 168)
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert (scores.diff() <= 0).all()
    iou = torchvision.ops.box_iou(boxes, boxes).fill_diagonal_(0)
    assert iou.max() <= SMALL.rpn_nms_threshold
    twice = (outputs.expand(2, -1, -1, -1) for outputs in (logits, deltas))
    found, _ = small_network(minimum_side=40).proposals(*twice, 168, 224, scales=[1.0, 1.5])
    least, larger = ((boxes[:, 2:] - boxes[:, :2]).min() for boxes in found)
    assert 40 < least < 60 < larger


def test_suppression_goes_beyond_the_best_few_where_these_all_overlap():
    network = small_network(post_nms=4, rpn_nms_threshold=0.1)
    away = torch.stack(torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")).sum(dim=0)
    anchors = network.config.num_anchors
    logits, deltas = -away.expand(1, anchors, 10, 10), torch.zeros(1, 4 * anchors, 10, 10)
    (boxes,), (scores,) = network.proposals(logits, deltas, 160, 160)
    assert len(boxes) == 4
    assert (torchvision.ops.box_iou(boxes, boxes).fill_diagonal_(0) <= 0.1).all()
    assert scores.min() < -1, "beyond the 16 best anchors, which are those of the first cells"


@pytest.mark.parametrize("arithmetic", ["continuous", "plus_one"])
def test_images_of_a_batch_get_the_proposals_that_each_gets_alone(arithmetic: str):
    network = small_network(box_arithmetic=arithmetic, minimum_side=3, pre_nms=500, post_nms=20)
    logits, deltas = random_outputs(6, seed=0)
    logits[1] = logits[1].round()  # ties
    logits[2] = 0
    deltas[3].view(6, 4, 11, 14)[:, 2:] = -5  # tiny boxes: dw and dh
    deltas[3, :4, 5] = 0  # but for a few
    logits[4, 3:], deltas[4, :4] = float("nan"), float("inf")
    logits[5] = float("-inf")
    scales = [1.0, 2.0, 1.5, 3.0, 1.0, 1.0]
    together = network.proposals(logits, deltas, 168, 222, scales)
    for image, found in enumerate(zip(*together, strict=True)):
        own = slice(image, image + 1)
        alone = network.proposals(logits[own], deltas[own], 168, 222, scales[own])
        assert all(torch.equal(one, other) for one, (other,) in zip(found, alone, strict=True))
    counts = [len(boxes) for boxes in together[0]]
    assert counts[:3] == [20, 20, 20]
    assert 0 < counts[3] < counts[4] <= 20
    assert counts[5] == 0


@pytest.mark.parametrize("roi_op", ["pool", "align1"])
def test_in_half_precision_boxes_are_pooled_where_they_lie_in_float32(roi_op: str):
    network = small_network(roi_op=roi_op)
    c4 = torch.arange(64.0).expand(1, 64, 40, 64).contiguous().bfloat16()  # every cell holds its column
    rois = torch.tensor([[0, 517.0, 100, 933, 600], [0, 641, 33, 1001, 500]])
    with torch.autocast("cpu", torch.bfloat16):
        found = network.pool(c4, rois)
    torch.testing.assert_close(found, network.pool(c4.float(), rois), rtol=0, atol=0)


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
    (proposals,), _ = network.proposals(logits, deltas, 168, 222)
    features = network.roi_features(c4, [proposals])
    return proposals, features, network.roi_heads.box_predictor(features)


def proposal_of_each(boxes: np.ndarray, proposals: torch.Tensor) -> np.ndarray:
    distance = np.abs(boxes[:, None] - (proposals.numpy() * TO_STORED)[None]).max(axis=2)
    assert distance.min(axis=1).max() < 1e-3
    return distance.argmin(axis=1)


@torch.inference_mode()
def test_features_are_res5_of_roi_pool_at_stride_16_for_any_number_of_boxes_at_a_time():
    network, rng = FasterRCNN.random_init(SMALL, seed=1), torch.Generator().manual_seed(0)
    c4 = torch.randn(2, SMALL.resnet.c4_channels, 11, 14, generator=rng)
    boxes = (torch.rand(2, 9, 2, 2, generator=rng) * torch.tensor([224, 168])).sort(dim=2).values.flatten(2)
    pooled = torchvision.ops.roi_pool(c4, list(boxes), SMALL.pool_size, spatial_scale=1 / 16)
    expected = network.roi_heads.res5(pooled).mean(dim=(2, 3))
    for network.rois_at_a_time in (None, 4):
        assert torch.allclose(network.roi_features(c4, list(boxes)), expected, atol=1e-5)


def test_regions_are_proposals_in_pixels_of_the_stored_image():
    detector = random_init(seed=1, keep_features=True)
    (regions,) = detector.detect([TURNED])
    proposals, features, outputs = stages(detector.network)
    probs, attribute_probs = outputs.class_logits.softmax(1), outputs.attribute_logits.softmax(1)[:, :3]
    nearest = proposal_of_each(regions.boxes, proposals)
    assert np.allclose(regions.class_probs, probs.numpy()[nearest], atol=1e-3)
    assert np.allclose(regions.scores, probs.numpy()[nearest, regions.labels])
    assert np.allclose(regions.attribute_scores, attribute_probs.numpy()[nearest].max(axis=1))
    assert np.array_equal(regions.attributes, attribute_probs.numpy()[nearest].argmax(axis=1))
    assert regions.features.dtype == np.float16
    assert np.allclose(regions.features, features[nearest], rtol=1e-3, atol=1e-3)
    # The regions' order is not the proposals', and two regions differ in their features.
    assert not np.array_equal(nearest, np.arange(len(nearest)))
    assert np.abs(features[nearest].diff(dim=0)).amax(dim=1).median() > 0.1
    assert 222 < regions.boxes[:, 2].max() <= 450
    assert 168 < regions.boxes[:, 3].max() <= 340
    assert 10 <= len(regions) <= 100
    assert (np.diff(regions.scores) <= 0).all()
    assert regions.background == 5


def test_a_proposal_without_area_in_the_stored_image_is_dropped_with_all_that_is_its_own():
    # 149 pixels become 223.5, rounded to 224: the last half of a pixel is in the input, and not in the image.
    config = dataclasses.replace(SMALL, resize="caffe", post_nms=300)
    everything = SelectionSettings(minimum=300, maximum=300, nms_threshold=1)
    detector = random_init(config, batch=2, keep_features=True, selection=everything)
    head = detector.network.proposal_generator.rpn_head
    with torch.no_grad():
        head.anchor_deltas.weight.zero_()
        head.anchor_deltas.bias[4 * 4] = (223.75 - 208 + 24) / 48  # anchor 4, 48 x 48: in the last column beyond 223.75
        head.objectness_logits.bias[4] = 9
    sample = a_sample(112, 149)
    regions, _ = detector.detect([sample, a_sample(112, 149, seed=1)])
    with torch.inference_mode():
        c4 = detector.network.backbone(to_input(resize(decode_bgr(sample.image), config)))
        (proposals,), _ = detector.network.proposals(*detector.network.rpn(c4), 168, 224)
        features = detector.network.roi_features(c4, [torch.from_numpy(regions.boxes) * 1.5])
    assert 0 < (proposals[:, 0] < 149 * 1.5).sum() == len(regions) < len(proposals)
    assert np.allclose(regions.features, features, rtol=1e-2, atol=1e-2)
    assert features.diff(dim=0).abs().amax(dim=1).median() > 1, "or it does not show whose features they are"


@pytest.mark.parametrize(
    ("settings", "layer", "beside", "reason"),
    [
        ({}, "proposal_generator.rpn_head.objectness_logits", math.nan, "the network's activations"),
        ({}, "roi_heads.box_predictor.cls_score", math.nan, "the network's class probabilities"),
        ({}, "roi_heads.box_predictor.attr_score", math.nan, "the network's attribute probabilities"),
        ({"boxes": "regressed"}, "roi_heads.box_predictor.bbox_pred", math.nan, "the network's boxes"),
        ({}, "roi_heads.box_predictor.bbox_pred", math.nan, None),
        ({"keep_features": True}, "roi_heads.res5", 7e4, "a feature is 7"),  # beyond float16
    ],
)
def test_numbers_that_overflow_give_the_image_a_status_where_the_regions_need_them(
    settings: dict, layer: str, beside: float, reason: str | None
):
    detector = random_init(**settings)
    detector.network.get_submodule(layer).register_forward_hook(lambda _, inputs, output: output + beside)
    (found,) = detector.detect([TURNED])
    assert found.startswith(f"not_finite: {reason}") if reason else len(found) >= 10


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
    for name in ("features", "scores", "labels", "class_probs", "attributes", "attribute_scores"):
        assert np.array_equal(getattr(plain, name), getattr(regions, name))
    proposals, _, outputs = stages(detector.network)
    own, labels = proposal_of_each(plain.boxes, proposals), torch.from_numpy(regions.labels).long()
    moved = regress_boxes(detector.network.config, proposals[own], outputs.box_deltas[own], labels, 168, 222)
    assert np.allclose(regions.boxes, moved.numpy() * TO_STORED, atol=0.01)
    assert np.median(np.abs(regions.boxes - plain.boxes).max(axis=1)) > 10
    # Those of class 2, moved out of the image, keep their proposals' boxes.
    (away,) = moving(shift=1e4, boxes="regressed").detect([TURNED])
    gone = plain.labels == 2
    assert 0 < gone.sum() < len(gone)
    assert np.array_equal(away.boxes[gone], plain.boxes[gone])
    assert np.array_equal(away.boxes[~gone], regions.boxes[~gone])


def test_the_precision_of_gpus_is_exact_for_the_detector_and_put_back():
    def precisions(*_) -> tuple[str, str]:
        return torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision

    before, meanwhile, detector = precisions(), [], random_init()
    detector.network.backbone.register_forward_hook(lambda *_: meanwhile.append(precisions()))
    detector.detect([TURNED])
    assert meanwhile == [("ieee", "ieee")]
    assert precisions() == before != ("ieee", "ieee")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="torch finds no GPU; set device to auto or cpu"):
        random_init(device="cuda")
