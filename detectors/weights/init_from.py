"""Initial weights for training a detector, from torchvision's ImageNet ResNet or from one of our weight files."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from detectors.faster_rcnn import FasterRCNN, cell_anchors
from detectors.preprocess import PIXEL_MEAN_BGR
from detectors.weights.files import ANCHORS, COUNTER, RESNET, check_resnet, read_metadata
from detectors.weights.releases import VLBERT, to_our_name
from detectors.weights.tensor_files import is_safetensors, read_tensors, unwrap_names
from training.checkpoint import check_tensors, find_tensor_errors

RPN, HEADS = "proposal_generator.", "roi_heads.box_predictor."
# torchvision's ResNets take red, green, blue in 0..1, minus this mean, divided by this standard deviation.
_THEIR_MEAN, _THEIR_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def init_from(network: FasterRCNN, file: Path, classes: Sequence[str] = (), attribute_names: Sequence[str] = ()) -> str:
    """Copy the weights of a file into the network, and return a message that lists the copied parts.

    Raises ValueError if the ResNet does not fit completely. A detector's RPN is copied if it has the network's shapes
    and anchors, and its heads if they have the network's shapes, classes, attributes and box_weights.
    """
    tensors, new = unwrap_names(read_tensors(file), file), set()
    if is_safetensors(file) and "layer1.0.conv1.weight" not in tensors:
        new = _find_incompatible_parts(network, tensors, file, classes, attribute_names)
    else:
        tensors = _from_torchvision(tensors, network, file)
    tensors = {name: tensor.float() for name, tensor in tensors.items() if not COUNTER.search(name)}
    ours = {name: tensor for name, tensor in network.state_dict().items() if not COUNTER.search(name)}
    message = f"{file} does not fit the ResNet of network.resnet"
    check_tensors(_select(tensors, RESNET), _select(ours, RESNET), message)
    new |= {part for part in (RPN, HEADS) if find_tensor_errors(_select(tensors, part), _select(ours, part))}
    copied = RESNET + tuple(part for part in (RPN, HEADS) if part not in new)
    network.load_state_dict(_select(tensors, copied), strict=False)
    return f"initialised from {file}: {', '.join(copied)}; new: {', '.join(sorted(new)) or 'nothing'}"


def _select(tensors: dict[str, Tensor], prefix: str | tuple[str, ...]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _find_incompatible_parts(
    network: FasterRCNN, tensors: dict[str, Tensor], file: Path, classes: Sequence[str], attribute_names: Sequence[str]
) -> set[str]:
    """Return the parts (RPN, HEADS) that do not fit the network's anchors, names or box weights.

    Removes the anchors from `tensors`. Raises ValueError if the file's ResNet has other strides, dilation or pooling.
    """
    config = network.config
    check_resnet(config.resnet, file, ("stride_in_1x1", "res5_dilated", "stem_pool"), "network.resnet")
    metadata, own = read_metadata(file), network.proposal_generator.cell_anchors
    theirs = metadata["network"] or config
    anchors = tensors.pop(ANCHORS, cell_anchors(theirs))
    new = set()
    if anchors.shape != own.shape or not torch.allclose(anchors.float(), own, atol=1e-3):
        new.add(RPN)
    names = ((metadata["classes"], classes), (metadata["attributes"], attribute_names))
    renamed = any(known is not None and wanted and known != list(wanted) for known, wanted in names)
    if renamed or theirs.box_weights != config.box_weights:
        new.add(HEADS)
    return new


def _from_torchvision(tensors: dict[str, Tensor], network: FasterRCNN, file: Path) -> dict[str, Tensor]:
    """Rename tensors to our names, and adapt the stem to our input (BGR from 0 to 255, with our mean subtracted)."""
    if "layer1.0.conv1.weight" not in tensors or "fc.weight" not in tensors:
        raise ValueError(
            f"{file} is not a torchvision ResNet (layer1..4 and fc); published weights must be converted first with "
            f"vlbert convert-detector {file} OUT.safetensors"
        )
    resnet = network.config.resnet
    if resnet.stride_in_1x1 or resnet.stem_pool != "torch":
        raise ValueError(
            f"{file} is a torchvision ResNet, which has its strides in 3x3 convolutions and pads the stem's pooling; "
            "set --network.resnet.no_stride_in_1x1 --network.resnet.stem_pool=torch"
        )
    renamed = {to_our_name(name, VLBERT): tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
    # Scale each channel, then swap red and blue. Border activations change: zero padding now stands for another mean.
    deviation = 255 * torch.tensor(_THEIR_DEVIATION)
    kernel = (renamed["backbone.stem.conv1.weight"] / deviation[None, :, None, None]).flip(1)
    renamed["backbone.stem.conv1.weight"] = kernel
    excess = torch.tensor(PIXEL_MEAN_BGR) - 255 * torch.tensor(_THEIR_MEAN[::-1])
    renamed["backbone.stem.conv1.norm.running_mean"] -= (kernel.sum(dim=(2, 3)) * excess).sum(dim=1)
    return renamed
