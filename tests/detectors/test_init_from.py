"""Initial weights of a detector's training: which layers of a file are taken, and which start new."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from released_detectors import milvlg, save_torch, vl_bert
from safetensors.torch import load_file, save_file
from tiny import CLASSES
from tiny_detector import TINY
from torch import nn

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.resnet import ResNetConfig
from detectors.weights.files import ANCHORS, write_weights
from detectors.weights.init_from import init_from

NAMES = ("red", "round", "old")


def ours(folder: Path, config: FasterRCNNConfig = TINY, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A weight file as a training leaves it, of a network with other numbers than those that start from it."""
    metadata = {"network": dataclasses.asdict(config), "classes": CLASSES, "attributes": NAMES}
    file = folder / "ours.safetensors"
    write_weights(file, FasterRCNN.random_init(config, 7).state_dict() | (tensors or {}), metadata)
    return file


def taken(file: Path, config: FasterRCNNConfig = TINY, classes: Any = CLASSES, names: Any = NAMES) -> tuple[set, str]:
    """Which layers have the file's numbers afterwards, without the ResNet's; and the message."""
    network = FasterRCNN.random_init(config, 1)
    printed = init_from(network, file, classes, names)
    theirs, state = load_file(file), network.state_dict()
    assert torch.equal(state["backbone.res3.0.conv2.weight"], theirs["backbone.res3.0.conv2.weight"])
    layers = {name.removesuffix(".weight") for name in state if "backbone" not in name and "res5" not in name}
    return {
        layer.rpartition(".")[2]
        for layer in layers
        if f"{layer}.weight" in state and torch.equal(state[f"{layer}.weight"], theirs[f"{layer}.weight"])
    }, printed


RPN = {"conv", "objectness_logits", "anchor_deltas"}
CLASS_HEADS = {"cls_score", "bbox_pred", "cls_embedding"}
EVERYTHING = RPN | CLASS_HEADS | {"fc_attr", "attr_score"}
OWN_ANCHORS = FasterRCNN(TINY).proposal_generator.cell_anchors


@pytest.mark.parametrize(
    ("new", "anchors", "changes"),
    [
        (set(), None, {}),
        (set(), OWN_ANCHORS, {}),
        (RPN, OWN_ANCHORS + 0.5, {}),
        (CLASS_HEADS, None, {"classes": CLASSES[::-1]}),
        (CLASS_HEADS, None, {"config": dataclasses.replace(TINY, num_classes=5), "classes": ()}),
        ({"attr_score"}, None, {"names": NAMES[::-1]}),
        (RPN, None, {"config": dataclasses.replace(TINY, anchor_sizes=(24, 48))}),
        (RPN, None, {"config": dataclasses.replace(TINY, anchor_ratios=(0.4, 1.0, 2.0))}),
        ({"bbox_pred"}, None, {"config": dataclasses.replace(TINY, box_weights=(1, 1, 1, 1))}),
    ],
)
def test_layers_that_mean_something_else_start_new(tmp_path, new, anchors, changes):
    tensors = {} if anchors is None else {ANCHORS: anchors.clone()}
    layers, message = taken(ours(tmp_path, tensors=tensors), **changes)
    assert layers == EVERYTHING - new
    named = {name.rpartition(".")[2] for name in message.partition("new: ")[2].split(", ")}
    assert named - {""} == new


@pytest.mark.parametrize(
    ("name", "theirs", "word"),
    [("stride_in_1x1", True, "true"), ("stem_pool", "caffe", "caffe"), ("res5_dilated", True, "true")],
)
def test_a_resnet_that_is_wired_otherwise_is_refused_by_its_setting(tmp_path, name, theirs, word):
    resnet = dataclasses.replace(TINY.resnet, **{name: theirs})
    file = ours(tmp_path, dataclasses.replace(TINY, resnet=resnet))
    with pytest.raises(
        ValueError, match=rf"ours.safetensors was .* resnet.{name} = .* set network.resnet.{name}={word}"
    ):
        init_from(FasterRCNN(TINY), file)


@pytest.mark.parametrize("release", [vl_bert, milvlg])
def test_published_weights_are_to_be_converted_first(tmp_path, release):
    file = save_torch(tmp_path / "published.pth", release(), flat=release is vl_bert)
    with pytest.raises(ValueError, match=r"no ResNet of torchvision's .*: vlbert convert-detector .*published.pth"):
        init_from(FasterRCNN(TINY), file)


def test_torchvisions_resnet_gives_the_same_activations_from_our_pixels(tmp_path):
    torch.manual_seed(0)
    theirs = torchvision.models.resnet.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1]).eval()
    for norm in theirs.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2)
            norm.weight.data.uniform_(0.5, 1.5)
    save_file(theirs.state_dict(), tmp_path / "resnet.safetensors")
    torch.save(theirs.state_dict(), tmp_path / "resnet.pth")
    resnet = ResNetConfig(blocks=(1, 1, 1, 1), stride_in_1x1=False, stem_pool="torch")
    network = FasterRCNN.random_init(dataclasses.replace(TINY, resnet=resnet), 0)
    printed = init_from(network, tmp_path / "resnet.safetensors")
    assert "its ResNet; new: proposal_generator.rpn_head.anchor_deltas" in printed

    image = torch.randint(0, 256, (1, 3, 256, 256)).float()  # R, G, B
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    ours = image.flip(1) - torch.tensor((102.9801, 115.9465, 122.7717)).view(1, 3, 1, 1)
    with torch.inference_mode():
        first = theirs.bn1(theirs.conv1((image / 255 - mean) / deviation))
        inside = (..., slice(2, -2), slice(2, -2))  # outside an image theirs sees its mean, ours ours
        torch.testing.assert_close(network.backbone.stem.conv1(ours)[inside], first[inside], rtol=1e-4, atol=1e-4)
        x = theirs.maxpool(torch.relu(first))
        x = theirs.layer3(theirs.layer2(theirs.layer1(x)))
        middle = (..., slice(5, 11), slice(5, 11))
        torch.testing.assert_close(network.backbone(ours)[middle], x[middle], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(network.roi_heads.res5(x).shape[:2], theirs.layer4(x).shape[:2])
    plain = FasterRCNN.random_init(dataclasses.replace(TINY, resnet=dataclasses.replace(resnet, res5_dilated=False)), 0)
    init_from(plain, tmp_path / "resnet.pth")
    with torch.inference_mode():
        torch.testing.assert_close(plain.roi_heads.res5(x), theirs.layer4(x), rtol=1e-4, atol=1e-4)

    for change, message in (
        ({"stride_in_1x1": True}, "set network.resnet.stride_in_1x1=false"),
        ({"blocks": (1, 1, 2, 1)}, r"does not fit the ResNet of network.resnet: missing backbone.res4.1.conv1"),
    ):
        other = dataclasses.replace(TINY, resnet=dataclasses.replace(resnet, **change))
        with pytest.raises(ValueError, match=message):
            init_from(FasterRCNN.random_init(other, 0), tmp_path / "resnet.pth")
