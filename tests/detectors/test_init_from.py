"""Initial weights of a detector's training: which layers of a file are taken, and which start new."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torchvision
from released_detectors import milvlg, save_torch, vl_bert
from safetensors.torch import load_file, save_file
from tiny import CLASSES
from tiny_detector import TINY, lively_norms

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.resnet import ResNetConfig
from detectors.weights.files import ANCHORS, write_weights
from detectors.weights.init_from import init_from

NAMES = ("red", "round", "old")


def ours(folder: Path, config: FasterRCNNConfig = TINY, **tensors: torch.Tensor) -> Path:
    """A weight file as a training leaves it, of a network with other numbers than those that start from it."""
    metadata = {"network": dataclasses.asdict(config), "classes": CLASSES, "attributes": NAMES}
    file = folder / "ours.safetensors"
    write_weights(file, FasterRCNN.random_init(config, 7).state_dict() | tensors, metadata)
    return file


PARTS = ("proposal_generator.", "roi_heads.box_predictor.")
OWN_ANCHORS = FasterRCNN(TINY).proposal_generator.cell_anchors


@pytest.mark.parametrize(
    ("new", "anchors", "changes", "classes", "attributes"),
    [
        ((), {}, {}, CLASSES, NAMES),
        (PARTS[:1], {ANCHORS: OWN_ANCHORS + 0.5}, {}, CLASSES, NAMES),
        (PARTS[:1], {}, {"anchor_sizes": (24, 48)}, CLASSES, NAMES),
        (PARTS[1:], {}, {}, CLASSES[::-1], NAMES),
        (PARTS[1:], {}, {}, CLASSES, NAMES[::-1]),
        (PARTS[1:], {}, {"box_weights": (1, 1, 1, 1)}, CLASSES, NAMES),
        (PARTS, {}, {"rpn_channels": 8, "num_classes": 5}, (), NAMES),
    ],
)
def test_parts_that_mean_something_else_start_new(tmp_path, new, anchors, changes, classes, attributes):
    file = ours(tmp_path, **anchors)
    network = FasterRCNN.random_init(dataclasses.replace(TINY, **changes), 1)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    printed = init_from(network, file, classes, attributes)
    assert printed.partition("new: ")[2] == (", ".join(new) or "nothing")
    theirs = load_file(file)
    for name, tensor in network.state_dict().items():
        expected = before if name.startswith(new) else theirs
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("argument", ["stride_in_1x1", "stem_pool=caffe", "res5_dilated"])
def test_a_resnet_that_is_wired_otherwise_is_refused_by_its_setting(tmp_path, argument: str):
    name, _, theirs = argument.partition("=")
    resnet = dataclasses.replace(TINY.resnet, **{name: theirs or True})
    file = ours(tmp_path, dataclasses.replace(TINY, resnet=resnet))
    with pytest.raises(ValueError, match=rf"ours.safetensors was .* resnet.{name} = .*--network.resnet.{argument}$"):
        init_from(FasterRCNN(TINY), file)


@pytest.mark.parametrize("release", [vl_bert, milvlg])
def test_published_weights_are_to_be_converted_first(tmp_path, release):
    file = save_torch(tmp_path / "published.pth", release(), flat=release is vl_bert)
    with pytest.raises(ValueError, match=r"not a torchvision ResNet .* vlbert convert-detector .*published.pth"):
        init_from(FasterRCNN(TINY), file)


def test_torchvisions_resnet_gives_the_same_activations_from_our_pixels(tmp_path):
    torch.manual_seed(0)
    theirs = lively_norms(torchvision.models.resnet.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1]).eval())
    save_file(theirs.state_dict(), tmp_path / "resnet.safetensors")
    torch.save(theirs.state_dict(), tmp_path / "resnet.pth")
    resnet = ResNetConfig(blocks=(1, 1, 1, 1), stride_in_1x1=False, stem_pool="torch", res5_dilated=False)
    network = FasterRCNN.random_init(dataclasses.replace(TINY, resnet=resnet), 0)
    printed = init_from(network, tmp_path / "resnet.safetensors")
    assert printed.endswith("new: proposal_generator., roi_heads.box_predictor.")

    image = torch.randint(0, 256, (1, 3, 256, 256)).float()  # R, G, B
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    ours = image.flip(1) - torch.tensor((102.9801, 115.9465, 122.7717)).view(1, 3, 1, 1)
    with torch.inference_mode():
        x = theirs.maxpool(torch.relu(theirs.bn1(theirs.conv1((image / 255 - mean) / deviation))))
        x = theirs.layer3(theirs.layer2(theirs.layer1(x)))
        middle = (..., slice(5, 11), slice(5, 11))  # outside an image theirs sees its mean, ours ours
        torch.testing.assert_close(network.backbone(ours)[middle], x[middle], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(network.roi_heads.res5(x), theirs.layer4(x), rtol=1e-4, atol=1e-4)
    for change, message in (
        ({"stride_in_1x1": True}, "set --network.resnet.no_stride_in_1x1"),
        ({"blocks": (1, 1, 2, 1)}, r"does not fit the ResNet of network.resnet: missing backbone.res4.1.conv1"),
    ):
        other = dataclasses.replace(TINY, resnet=dataclasses.replace(resnet, **change))
        with pytest.raises(ValueError, match=message):
            init_from(FasterRCNN.random_init(other, 0), tmp_path / "resnet.pth")
