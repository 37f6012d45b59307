"""The weights that a training of the detector starts from: an ImageNet ResNet of torchvision, or a file of ours."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from detectors.faster_rcnn import PIXEL_MEAN_BGR, FasterRCNN
from detectors.weights.files import ANCHORS, COUNTER, read_metadata, tensor_fault
from detectors.weights.safe_pickle import read_tensors
from storage.safe_json import printable

# torchvision's ResNets get red, green, blue of 0..1, less this mean, over this deviation.
_THEIR_MEAN, _THEIR_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_RESNET = ("backbone.", "roi_heads.res5.")


def init_from(network: FasterRCNN, file: Path, classes: Sequence[str] = (), attribute_names: Sequence[str] = ()) -> str:
    """Put the file's weights into the network, and say what was taken; ValueError names what does not fit.

    A ResNet must fit whole. Of a detector's other layers those are taken whose tensors all have our shapes and mean the
    same: a head for other classes than these begins anew, as an RPN of other anchors does, or a box head whose deltas
    are divided by other weights.
    """
    if not file.is_file():
        raise ValueError(f"init_from={file} is no file; give a ResNet's or a detector's weights")
    foreign: list[str] = []
    ours_too = file.suffix == ".safetensors"
    tensors = _read_safetensors(file) if ours_too else read_tensors(file).tensors
    if ours_too and not any(name.startswith("layer1.") for name in tensors):
        foreign = _check_meaning(network, tensors, file, classes, attribute_names)
    else:
        tensors = _from_torchvision(tensors, network, file)
    tensors = {name: tensor.float() for name, tensor in tensors.items() if not COUNTER.search(name)}
    ours = {name: tensor for name, tensor in network.state_dict().items() if not COUNTER.search(name)}
    resnet = {name for name in ours if name.startswith(_RESNET)}
    faults = [f"missing {name}" for name in sorted(resnet - tensors.keys())]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - ours.keys()) if name.startswith(_RESNET)]
    for name in sorted(resnet & tensors.keys()):
        fault = tensor_fault(tensors[name], ours[name].shape)
        if fault:
            faults.append(f"{name} {fault}")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(f"{file} does not fit the ResNet of network.resnet: {'; '.join(faults[:5])}{more}")
    layers = {name.rpartition(".")[0] for name in ours if name not in resnet}
    fitting = {
        layer
        for layer in layers
        if not layer.startswith(tuple(foreign))
        and all(
            name in tensors and tensor_fault(tensors[name], ours[name].shape) is None
            for name in ours
            if name.rpartition(".")[0] == layer
        )
    }
    taken = {n: t for n, t in tensors.items() if n in resnet or n.rpartition(".")[0] in fitting}
    network.load_state_dict(taken, strict=False)
    new = sorted(layers - fitting)
    return (
        f"started from {file}: its ResNet{', ' if fitting else ''}{', '.join(sorted(fitting))}; new: {', '.join(new)}"
    )


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file, or is damaged ({error}); fetch it again") from error


def _check_meaning(
    network: FasterRCNN, tensors: dict[str, Tensor], file: Path, classes: Sequence[str], attribute_names: Sequence[str]
) -> list[str]:
    """Beginnings of the layers of a file of ours whose outputs mean something else here; ValueError where its ResNet is
    wired otherwise."""
    metadata = read_metadata(file)
    their_network, config = metadata.get("network") or {}, network.config
    theirs = their_network.get("resnet", {})
    for name in ("stride_in_1x1", "res5_dilated", "stem_pool"):
        ours = getattr(config.resnet, name)
        if theirs.get(name, ours) != ours:
            raise ValueError(
                f"{file} was trained with resnet.{name} = {printable(theirs[name])}, and the recipe has {ours}; set "
                f"network.resnet.{name}={printable(theirs[name]).lower()}"
            )

    def differ(name: str) -> bool:
        return name in their_network and their_network[name] != list(getattr(config, name))

    anchors, own = tensors.pop(ANCHORS, None), network.proposal_generator.cell_anchors
    if anchors is None:
        other_anchors = differ("anchor_sizes") or differ("anchor_ratios")
    else:
        other_anchors = anchors.shape != own.shape or not torch.allclose(anchors.float(), own, atol=1e-3)
    foreign = ["proposal_generator."] if other_anchors else []
    if differ("box_weights"):
        foreign.append("roi_heads.box_predictor.bbox_pred")
    heads = {
        "classes": (classes, ("cls_score", "bbox_pred", "cls_embedding")),
        "attributes": (attribute_names, ["attr_score"]),
    }
    for kind, (names, layers) in heads.items():
        if metadata.get(kind) is not None and names and list(metadata[kind]) != list(names):
            foreign += [f"roi_heads.box_predictor.{layer}" for layer in layers]
    return foreign


def _from_torchvision(tensors: dict[str, Tensor], network: FasterRCNN, file: Path) -> dict[str, Tensor]:
    """Under our names, and for blue, green, red of 0..255 less our mean: the same activations inside an image."""
    if "layer1.0.conv1.weight" not in tensors or "fc.weight" not in tensors:
        raise ValueError(
            f"{file} is no ResNet of torchvision's (layer1..4 and fc); make a safetensors file of published weights "
            f"first: python -m detectors.weights {file} OUT.safetensors"
        )
    resnet = network.config.resnet
    if resnet.stride_in_1x1 or resnet.stem_pool != "torch":
        raise ValueError(
            f"{file} is torchvision's ResNet, which halves its maps in 3x3 convolutions and pads in its first pool; "
            "set network.resnet.stride_in_1x1=false network.resnet.stem_pool=torch"
        )
    found = {_our_name(name): tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
    # Scaled channel by channel, then red and blue change places.
    deviation = 255 * torch.tensor(_THEIR_DEVIATION)
    kernel = (found["backbone.stem.conv1.weight"] / deviation[None, :, None, None]).flip(1)
    found["backbone.stem.conv1.weight"] = kernel
    excess = torch.tensor(PIXEL_MEAN_BGR) - 255 * torch.tensor(_THEIR_MEAN[::-1])
    found["backbone.stem.conv1.norm.running_mean"] -= (kernel.sum(dim=(2, 3)) * excess).sum(dim=1)
    return found


def _our_name(theirs: str) -> str:
    """`layer2.0.bn1.weight` -> `backbone.res3.0.conv1.norm.weight`."""
    name = re.sub(r"^(conv1|bn1)\.", r"stem.\1.", theirs)
    name = re.sub(r"^layer(\d)\.", lambda found: f"res{int(found[1]) + 1}.", name)
    name = name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")
    name = re.sub(r"\bbn(\d)\.", r"conv\1.norm.", name)
    return f"roi_heads.{name}" if name.startswith("res5.") else f"backbone.{name}"
