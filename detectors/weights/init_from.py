"""Initial weights for training a detector: an ImageNet ResNet of torchvision, or a weight file of ours."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from detectors.faster_rcnn import FasterRCNN, cell_anchors
from detectors.preprocess import PIXEL_MEAN_BGR
from detectors.weights.files import (
    ANCHORS,
    COUNTER,
    RESNET,
    check_tensors,
    check_wiring,
    read_metadata,
    tensor_faults,
)
from detectors.weights.releases import VLBERT, our_name
from detectors.weights.tensor_files import is_safetensors, read_tensors, unwrapped_names

RPN, HEADS = "proposal_generator.", "roi_heads.box_predictor."
# torchvision's ResNets get red, green, blue of 0..1, less this mean, over this deviation.
_THEIR_MEAN, _THEIR_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def init_from(network: FasterRCNN, file: Path, classes: Sequence[str] = (), attribute_names: Sequence[str] = ()) -> str:
    """Copy the file's weights into the network; returns a line that says which. ValueError names what does not fit.

    The ResNet must fit completely. Of a detector, the RPN is copied if it has our shapes and anchors, the heads if they
    have our shapes, classes, attributes and weights of boxes.
    """
    tensors, new = unwrapped_names(read_tensors(file), file), set()
    if is_safetensors(file) and "layer1.0.conv1.weight" not in tensors:
        new = _parts_of_other_meaning(network, tensors, file, classes, attribute_names)
    else:
        tensors = _from_torchvision(tensors, network, file)
    tensors = {name: tensor.float() for name, tensor in tensors.items() if not COUNTER.search(name)}
    ours = {name: tensor for name, tensor in network.state_dict().items() if not COUNTER.search(name)}
    message = f"{file} does not fit the ResNet of network.resnet"
    check_tensors(_starting(tensors, RESNET), _starting(ours, RESNET), message)
    new |= {part for part in (RPN, HEADS) if tensor_faults(_starting(tensors, part), _starting(ours, part))}
    taken = RESNET + tuple(part for part in (RPN, HEADS) if part not in new)
    network.load_state_dict(_starting(tensors, taken), strict=False)
    return f"started from {file}: {', '.join(taken)}; new: {', '.join(sorted(new)) or 'nothing'}"


def _starting(tensors: dict[str, Tensor], prefix: str | tuple[str, ...]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _parts_of_other_meaning(
    network: FasterRCNN, tensors: dict[str, Tensor], file: Path, classes: Sequence[str], attribute_names: Sequence[str]
) -> set[str]:
    """Return the parts of a file of ours whose outputs mean something else here; removes the anchors.

    ValueError where the file's ResNet is wired otherwise.
    """
    config = network.config
    check_wiring(config.resnet, file, ("stride_in_1x1", "res5_dilated", "stem_pool"), "network.resnet")
    metadata, own = read_metadata(file), network.proposal_generator.cell_anchors
    theirs = metadata["network"] or config
    anchors = tensors.pop(ANCHORS, None)
    if anchors is None:
        anchors = cell_anchors(theirs)
    new = set()
    if anchors.shape != own.shape or not torch.allclose(anchors.float(), own, atol=1e-3):
        new.add(RPN)
    names = ((metadata["classes"], classes), (metadata["attributes"], attribute_names))
    renamed = any(known is not None and wanted and known != list(wanted) for known, wanted in names)
    if renamed or theirs.box_weights != config.box_weights:
        new.add(HEADS)
    return new


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
