"""The detectron2 backend: it computes what our own network does, from the same weights, and says so where it cannot.

What needs detectron2 runs where it is installed (docs/detector.md); nothing here is compared with what was stored.
"""

import dataclasses
import importlib
import importlib.util
import sys
import zlib
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from detectors.detectron2 import Detectron2FasterRCNN
from detectors.faster_rcnn import DEMO, FasterRCNN, FasterRCNNConfig, regress_boxes
from detectors.resnet import ResNetConfig
from detectors.weights.files import ANCHORS, ATTRIBUTE_HEAD, load_weights

TINY = ResNetConfig(blocks=(1, 2, 1, 2), width=4)
SMALL = dataclasses.replace(DEMO, resnet=TINY, num_classes=5, num_attributes=3)
HALVED = {"res5_dilated": False, "stride_in_1x1": False}
BOXES = {"anchor_sizes": (32,), "anchor_ratios": (0.4, 1.5), "rpn_nms_threshold": 0.5, "box_weights": (8, 9, 4, 6)}
# Name -> changes of TINY, and of SMALL.
CONFIGS: dict[str, tuple[dict, dict]] = {
    "visual genome's": ({}, {}),
    "vl-bert's pools": ({"stem_pool": "torch"}, {"roi_op": "align1", "pool_size": 14}),
    "halving, stride in 3x3": (HALVED, {"num_attributes": 0}),
    "live norms": ({"norm": "batch"}, {}),
    "other boxes": ({}, BOXES),
    "cut before suppression": ({}, {"pre_nms": 80}),
}
HEIGHT, WIDTH = 168, 222


def needs_detectron2(test):
    absent = importlib.util.find_spec("detectron2") is None
    skip = pytest.mark.skipif(absent, reason="detectron2 is not installed; docs/detector.md tells how")
    return pytest.mark.detectron2(skip(test))


def weights_of(config: FasterRCNNConfig) -> dict[str, torch.Tensor]:
    """Weights with which nothing is neutral: norms that shift and scale, deltas that move, classes that are sure."""
    gains = {"objectness_logits": 0.2, "anchor_deltas": 0.02, "cls_score": 0.5, "bbox_pred": 0.15}
    tensors = {}
    for name, tensor in FasterRCNN.random_init(config, seed=0).state_dict().items():
        # By its name, so that a tensor's values do not depend on which others there are.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("num_batches_tracked"):
            tensors[name] = tensor
        elif name.endswith("running_var"):
            tensors[name] = 1 + 0.2 * noise.abs()
        elif ".norm." in name or name.endswith("bias"):
            tensors[name] = tensor + 0.1 * noise
        else:
            fan = 1 if name.endswith("cls_embedding.weight") else tensor[0].numel()
            tensors[name] = gains.get(name.split(".")[-2], 1.0) * noise / fan**0.5
    return tensors


def pixels(count: int = 1) -> torch.Tensor:
    """Coarse images in the network's input, [N, 3, HEIGHT, WIDTH]."""
    coarse = torch.randn(count, 3, 12, 16, generator=torch.Generator().manual_seed(3))
    return 80 * torch.nn.functional.interpolate(coarse, (HEIGHT, WIDTH))


def assert_near(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """To 1e-5 of the largest value, which is not nothing."""
    assert theirs.shape == ours.shape
    assert ours.abs().max() > 0
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()


def assert_same_boxes(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """As sets: logits that are nearly equal may change places."""
    assert theirs.shape == ours.shape
    iou = torchvision.ops.box_iou(theirs, ours)
    assert iou.amax(dim=0).min() > 0.999
    assert iou.amax(dim=1).min() > 0.999


def test_without_detectron2_the_module_imports_and_the_network_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "detectron2", None)
    monkeypatch.delitem(sys.modules, "detectors.detectron2")
    module = importlib.import_module("detectors.detectron2")
    message = r"backend detectron2 needs the package detectron2, .* install it as in docs/detector\.md"
    with pytest.raises(ValueError, match=message):
        module.Detectron2FasterRCNN.random_init(DEMO, seed=0)


@pytest.mark.parametrize(("setting", "value"), [("box_arithmetic", "plus_one"), ("minimum_side", 16)])
def test_a_setting_that_detectron2_lacks_is_refused_by_name(setting: str, value: str | int):
    with pytest.raises(ValueError, match=rf"Config\.{setting} is {value!r}.* faster_rcnn"):
        Detectron2FasterRCNN(dataclasses.replace(SMALL, **{setting: value}))


@needs_detectron2
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_every_stage_computes_what_ours_does(name: str):
    resnet, changes = CONFIGS[name]
    config = dataclasses.replace(SMALL, resnet=dataclasses.replace(TINY, **resnet), **changes)
    ours, theirs = FasterRCNN(config).eval(), Detectron2FasterRCNN(config).eval()
    for network in (ours, theirs):
        network.load_state_dict(weights_of(config), strict=True)
    c4 = ours.backbone(pixels(2))
    assert_near(theirs.backbone(pixels(2)), c4)
    logits, deltas = ours.rpn(c4)
    for one, other in zip(theirs.rpn(c4), (logits, deltas), strict=True):
        assert_near(one, other)

    boxes = []
    found, their_found = (network.proposals(logits, deltas, HEIGHT, WIDTH) for network in (ours, theirs))
    for image in range(2):
        proposals, scores = (own[image] for own in found)
        their_proposals, their_scores = (own[image] for own in their_found)
        assert_same_boxes(their_proposals, proposals)
        assert_near(their_scores, scores)
        assert len(proposals) > 30
        boxes.append(proposals[: 30 + image])

    features = ours.roi_features(c4, boxes)
    assert_near(theirs.roi_features(c4, boxes), features)
    outputs, their_outputs = ours.roi_heads.box_predictor(features), theirs.roi_heads.box_predictor(features)
    assert_near(their_outputs.class_logits, outputs.class_logits)
    assert_near(their_outputs.box_deltas, outputs.box_deltas)
    if config.num_attributes:
        assert_near(their_outputs.attribute_logits, outputs.attribute_logits)
    else:
        assert their_outputs.attribute_logits is None

    deltas, labels = outputs.box_deltas[:30], outputs.class_logits[:30, :-1].argmax(dim=1)
    moved = regress_boxes(config, boxes[0], deltas, labels, HEIGHT, WIDTH)
    transform = theirs.roi_heads.box_predictor.box2box_transform
    their_moved = transform.apply_deltas(deltas[torch.arange(30), labels], boxes[0])
    assert_near(torchvision.ops.clip_boxes_to_image(their_moved, (HEIGHT, WIDTH)), moved)
    # Else clipping and weights of the boxes would go unseen.
    assert (moved - boxes[0]).abs().max() > 2
    assert (moved == torch.tensor([0.0, 0, WIDTH, HEIGHT])).any()


@needs_detectron2
def test_a_weight_file_loads_with_its_anchors_and_without_attributes(tmp_path: Path):
    tensors = {name: value for name, value in weights_of(SMALL).items() if not name.startswith(ATTRIBUTE_HEAD)}
    anchors = torch.tensor([[-20.0, -12, 24, 16]]) * torch.arange(1, 7)[:, None] / 2
    save_file(tensors | {ANCHORS: anchors}, tmp_path / "w.safetensors")
    ours, theirs = FasterRCNN.random_init(SMALL, 0), Detectron2FasterRCNN.random_init(SMALL, 0)
    generated = theirs.proposal_generator.cell_anchors.clone()
    loaded = load_weights(theirs, tmp_path / "w.safetensors")
    assert loaded == load_weights(ours, tmp_path / "w.safetensors")
    assert (loaded["attribute_head"], loaded["anchors"]) == (False, "file")
    with torch.inference_mode():
        c4 = theirs.backbone(pixels())
        logits, deltas = theirs.rpn(c4)
        (found,), _ = theirs.proposals(logits, deltas, HEIGHT, WIDTH)
        assert_same_boxes(found, ours.proposals(logits, deltas, HEIGHT, WIDTH)[0][0])
        assert theirs.roi_heads.box_predictor(theirs.roi_features(c4, [found])).attribute_logits is None
        theirs.proposal_generator.cell_anchors.copy_(generated)
        assert not torch.equal(theirs.proposals(logits, deltas, HEIGHT, WIDTH)[0][0][:10], found[:10])
