"""Initial weights for training a detector: an ImageNet ResNet of torchvision, or a weight file of ours."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from detectors.faster_rcnn import FasterRCNN
from detectors.preprocess import PIXEL_MEAN_BGR
from detectors.weights.files import (
    ANCHORS,
    COUNTER,
    RESNET,
    check_wiring,
    read_metadata,
    tensor_fault,
    tensor_faults,
)
from detectors.weights.releases import VLBERT, our_name
from detectors.weights.tensor_files import read_tensors

# torchvision's ResNets get red, green, blue of 0..1, less this mean, over this deviation.
_THEIR_MEAN, _THEIR_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def init_from(network: FasterRCNN, file: Path, classes: Sequence[str] = (), attribute_names: Sequence[str] = ()) -> str:
    """Copy the file's weights into the network; returns a line that says which. ValueError names what does not fit.

    The ResNet must fit completely. Other layers are copied where all their tensors have our shapes and mean the same;
    new ones stay for: a head of other classes or attributes than these, an RPN of other anchors, a box head whose
    deltas are divided by other weights.
    """
    if not file.is_file():
        raise ValueError(f"--init_from={file} is no file; give a ResNet's or a detector's weights")
    found, other_meaning = read_tensors(file), []
    tensors = found.plain()
    if found.container == "safetensors file" and "layer1.0.conv1.weight" not in tensors:
        other_meaning = _layers_of_other_meaning(network, tensors, file, classes, attribute_names)
    else:
        tensors = _from_torchvision(tensors, network, file)
    tensors = {name: tensor.float() for name, tensor in tensors.items() if not COUNTER.search(name)}
    ours = {name: tensor for name, tensor in network.state_dict().items() if not COUNTER.search(name)}
    faults = tensor_faults(_resnet(tensors), _resnet(ours))
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(f"{file} does not fit the ResNet of network.resnet: {'; '.join(faults[:5])}{more}")
    tensors_of: dict[str, list[str]] = {}
    for name in ours.keys() - _resnet(ours).keys():
        tensors_of.setdefault(name.rpartition(".")[0], []).append(name)
    fitting = {
        layer
        for layer, names in tensors_of.items()
        if not layer.startswith(tuple(other_meaning))
        and all(name in tensors and tensor_fault(tensors[name], ours[name].shape) is None for name in names)
    }
    taken = _resnet(tensors) | {name: tensors[name] for layer in fitting for name in tensors_of[layer]}
    network.load_state_dict(taken, strict=False)
    new = sorted(tensors_of.keys() - fitting)
    return (
        f"started from {file}: its ResNet{', ' if fitting else ''}{', '.join(sorted(fitting))}; new: {', '.join(new)}"
    )


def _resnet(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(RESNET)}


def _layers_of_other_meaning(
    network: FasterRCNN, tensors: dict[str, Tensor], file: Path, classes: Sequence[str], attribute_names: Sequence[str]
) -> list[str]:
    """Prefixes of the layers of a file of ours whose outputs mean something else here; removes the anchors.

    ValueError where the file's ResNet is wired otherwise.
    """
    config = network.config
    check_wiring(config.resnet, file, ("stride_in_1x1", "res5_dilated", "stem_pool"), "network.resnet")
    metadata = read_metadata(file)
    theirs = metadata.get("network") or {}

    def differ(name: str) -> bool:
        return name in theirs and theirs[name] != list(getattr(config, name))

    anchors, own = tensors.pop(ANCHORS, None), network.proposal_generator.cell_anchors
    if anchors is None:
        other_anchors = differ("anchor_sizes") or differ("anchor_ratios")
    else:
        other_anchors = anchors.shape != own.shape or not torch.allclose(anchors.float(), own, atol=1e-3)
    layers = ["proposal_generator."] if other_anchors else []
    if differ("box_weights"):
        layers.append("roi_heads.box_predictor.bbox_pred")
    heads = {
        "classes": (classes, ("cls_score", "bbox_pred", "cls_embedding")),
        "attributes": (attribute_names, ["attr_score"]),
    }
    for kind, (names, own_layers) in heads.items():
        if metadata.get(kind) is not None and names and list(metadata[kind]) != list(names):
            layers += [f"roi_heads.box_predictor.{layer}" for layer in own_layers]
    return layers


def _from_torchvision(tensors: dict[str, Tensor], network: FasterRCNN, file: Path) -> dict[str, Tensor]:
    """Under our names, for blue, green, red of 0..255 less our mean: the same activations inside an image."""
    if "layer1.0.conv1.weight" not in tensors or "fc.weight" not in tensors:
        raise ValueError(
            f"{file} is no ResNet of torchvision's (layer1..4 and fc); make a safetensors file of published weights "
            f"first: vlbert convert-detector {file} OUT.safetensors"
        )
    resnet = network.config.resnet
    if resnet.stride_in_1x1 or resnet.stem_pool != "torch":
        raise ValueError(
            f"{file} is torchvision's ResNet, which halves its maps in 3x3 convolutions and pads in its first pool; "
            "set --network.resnet.no_stride_in_1x1 --network.resnet.stem_pool=torch"
        )
    renamed = {our_name(name, VLBERT): tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
    # Scaled channel by channel, then red and blue swapped.
    deviation = 255 * torch.tensor(_THEIR_DEVIATION)
    kernel = (renamed["backbone.stem.conv1.weight"] / deviation[None, :, None, None]).flip(1)
    renamed["backbone.stem.conv1.weight"] = kernel
    excess = torch.tensor(PIXEL_MEAN_BGR) - 255 * torch.tensor(_THEIR_MEAN[::-1])
    renamed["backbone.stem.conv1.norm.running_mean"] -= (kernel.sum(dim=(2, 3)) * excess).sum(dim=1)
    return renamed
