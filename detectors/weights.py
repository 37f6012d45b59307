"""Weight files (safetensors) of the Faster R-CNN: loaded whole or not at all, and identified by their hash."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from detectors.faster_rcnn import PIXEL_MEAN_BGR, FasterRCNN
from detectors.resnet import Res5, ResNetC4

_ATTRIBUTE_HEAD = tuple(f"roi_heads.box_predictor.{layer}." for layer in ("cls_embedding", "fc_attr", "attr_score"))
_ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
# What files may carry beside weights: a counter that inference ignores, and the pixels' statistics, which must be ours.
_COUNTER = re.compile(r"\.num_batches_tracked$")
_PIXEL_STATISTICS = {"pixel_mean": PIXEL_MEAN_BGR, "pixel_std": (1.0, 1.0, 1.0)}


@dataclass(frozen=True)
class Loaded:
    """What was found in a weight file."""

    file: str
    """The file's name, without its folder."""
    sha256: str
    attributes: bool
    """Whether it has an attribute head."""
    anchors: str
    """`file`: the anchors stood in the file; `generated`: they follow from the configuration."""
    classes: tuple[str, ...] | None
    """Names of the C classes, from the file's metadata `classes` (a JSON list); None where it has none."""

    @property
    def about(self) -> dict:
        """The description that goes into a detector's `about`."""
        return {
            "untrained": False,
            "weights_file": self.file,
            "weights_sha256": self.sha256,
            "attribute_head": self.attributes,
            "anchors": self.anchors,
            "classes": None if self.classes is None else list(self.classes),
        }


def weights_hash(file: Path) -> str:
    """The sha256 of a weight file, 64 hex digits."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load_weights(network: FasterRCNN, file: Path) -> Loaded:
    """Put the file's weights into the network, all or none.

    ValueError names the file and every tensor that is missing, unexpected or of a wrong shape. Only the whole attribute
    head may be absent; the network then goes on without it.
    """
    tensors, metadata = _read(file)
    anchors = _take_extras(tensors, network, file)
    wanted = network.state_dict()
    head = {name for name in wanted if name.startswith(_ATTRIBUTE_HEAD)}
    attributes = bool(head & tensors.keys())
    expected = {name: tensor for name, tensor in wanted.items() if attributes or name not in head}
    _check_tensors(tensors, expected, file)
    classes = _class_names(metadata, network.config.num_classes, file)

    if not attributes:
        network.roi_heads.box_predictor.drop_attributes()
    network.load_state_dict(tensors, strict=True)
    if anchors is not None:
        network.proposal_generator.cell_anchors.copy_(anchors)
    source = "generated" if anchors is None else "file"
    return Loaded(Path(file).name, weights_hash(file), attributes, source, classes)


def load_resnet(backbone: ResNetC4, res5: Res5, file: Path) -> None:
    """Put the ResNet of a detector's weight file, `backbone.*` and `roi_heads.res5.*`, into VL-BERT's region features.

    All or none; the detector's heads are left out. ValueError names the file and every tensor that is missing,
    unexpected or of a wrong shape.
    """
    modules = {"backbone.": backbone, "roi_heads.res5.": res5}
    ours = {prefix + name: tensor for prefix, module in modules.items() for name, tensor in module.state_dict().items()}
    # A detector is kept with frozen norms, which count nothing; a live norm starts counting anew.
    counters = {name: torch.zeros_like(tensor) for name, tensor in ours.items() if _COUNTER.search(name)}
    tensors, _ = _read(file)
    found = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(tuple(modules)) and not _COUNTER.search(name)
    }
    _check_tensors(found, {name: tensor for name, tensor in ours.items() if name not in counters}, file)
    found |= counters
    for prefix, module in modules.items():
        mine = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        module.load_state_dict(mine, strict=True)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the metadata of a safetensors file."""
    if not Path(file).is_file():
        raise ValueError(f"there is no weight file {file}; name a safetensors file")
    try:
        with safe_open(file, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}, stream.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a safetensors file, or is damaged ({error}); fetch or convert it again"
        ) from error


def _take_extras(tensors: dict[str, Tensor], network: FasterRCNN, file: Path) -> Tensor | None:
    """Remove from `tensors` what is no weight, checking it; the anchors, where the file brings them."""
    for name in [name for name in tensors if _COUNTER.search(name)]:
        del tensors[name]
    for name, ours in _PIXEL_STATISTICS.items():
        theirs = tensors.pop(name, None)
        if theirs is not None and not torch.allclose(theirs.flatten().double(), torch.tensor(ours).double(), atol=1e-3):
            raise ValueError(f"{file}: {name} is {theirs.flatten().tolist()}, this network is for {list(ours)} (BGR)")
    anchors = tensors.pop(_ANCHORS, None)
    wanted = network.proposal_generator.cell_anchors.shape
    if anchors is not None and anchors.shape != wanted:
        raise ValueError(f"{file}: {_ANCHORS} has shape {tuple(anchors.shape)}, the network's is {tuple(wanted)}")
    return anchors


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], file: Path) -> None:
    faults = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        if tensors[name].shape != expected[name].shape:
            theirs, ours = list(tensors[name].shape), list(expected[name].shape)
            faults.append(f"{name} has shape {theirs}, the network's is {ours}")
        elif not tensors[name].is_floating_point():
            faults.append(f"{name} holds {tensors[name].dtype}, no floating-point numbers")
        elif not torch.isfinite(tensors[name]).all():
            faults.append(f"{name} is not finite")
    if faults:
        raise ValueError(f"{file} does not fit the network; is it for another preset? {'; '.join(faults)}")


def _class_names(metadata: Mapping[str, str], num_classes: int, file: Path) -> tuple[str, ...] | None:
    if "classes" not in metadata:
        return None
    names = json.loads(metadata["classes"])
    if len(names) != num_classes:
        raise ValueError(f"{file} names {len(names)} classes, the network has {num_classes}")
    return tuple(names)
