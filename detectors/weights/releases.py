"""Conversion of published Visual Genome weight files to our tensor names, with one short table per release.

The names of a file's tensors identify its release. A file is converted completely or not at all. The command is
`vlbert convert-detector`.
Shape letters: A anchors per cell, C classes without the background, D channels of res5.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.preprocess import PIXEL_MEAN_BGR
from detectors.resnet import RESNET101
from detectors.weights.files import ANCHORS, ATTRIBUTE_HEAD, COUNTER, RESNET
from detectors.weights.tensor_files import is_safetensors, read_safetensors, read_tensors, unwrap_names
from storage.digests import sha256_of
from training.checkpoint import check_tensors

# Tensors that a file may have besides weights, and the values that they must have: this network's, in BGR order.
_PIXEL_STATISTICS = {"pixel_mean": PIXEL_MEAN_BGR, "pixel_std": (1.0, 1.0, 1.0)}
_HEAD, _RPN = "roi_heads.box_predictor.", "proposal_generator.rpn_head."

# --- conversion of a tensor -------------------------------------------------------------------------------------------


def _move_first_to_end(rows: Tensor) -> Tensor:
    """Move the first row (background or "no attribute") to the end."""
    return rows.roll(-1, dims=0)


def _convert_deltas(rows: Tensor) -> Tensor:
    """Drop the background's rows from box deltas [4 (C + 1), ...], and multiply the other rows by the box weights."""
    foreground = rows[4:]
    # Multiplied, because our network divides by the box weights.
    weights = torch.tensor(FasterRCNNConfig.box_weights).repeat(len(rows) // 4)[: len(foreground)]
    return foreground * weights.view(-1, *[1] * (rows.dim() - 1))


def _merge_objectness(channels: Tensor) -> Tensor:
    """Convert softmax logits of background and foreground [2 A, ...] to sigmoid logits of foreground [A, ...]."""
    count = len(channels) // 2
    return channels[count : 2 * count] - channels[:count]


# --- the releases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """A published release: the names of its tensors, and the settings that its weights require."""

    name: str
    names: tuple[tuple[str, str], ...] = ()
    """Pairs of prefixes (theirs, ours), with {} for a number. The first match counts. Other names stay the same."""
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Functions that convert their tensor to ours, by the prefix of our name."""
    detection: Mapping[str, Any] = field(default_factory=dict)
    """Fields of FasterRCNNConfig that the weights require, if these are not its defaults."""


# airsplay/py-bottom-up-attention (.pkl), also unc-nlp/frcnn-vg-finetuned (pytorch_model.bin).
AIRSPLAY = Release(name="airsplay")
# MILVLG/bottom-up-attention.pytorch, bua-caffe-frcn-r101-k36 or -k10-100 (.pth), from Caffe.
MILVLG = Release(
    name="milvlg",
    names=(
        (f"{_HEAD}cls_embed.", f"{_HEAD}cls_embedding."),
        (f"{_HEAD}attr_linear1.", f"{_HEAD}fc_attr."),
        (f"{_HEAD}attr_linear2.", f"{_HEAD}attr_score."),
    ),
    changes={
        f"{_HEAD}cls_score.": _move_first_to_end,
        f"{_HEAD}cls_embedding.": _move_first_to_end,
        f"{_HEAD}attr_score.": _move_first_to_end,
        f"{_HEAD}bbox_pred.": _convert_deltas,
        f"{_RPN}objectness_logits.": _merge_objectness,
    },
    detection={"resize": "caffe", "minimum_side": 16.0, "box_arithmetic": "plus_one"},
)
# VL-BERT's resnet101-pt-vgbua-0000.model: a ResNet without a detector, by torchvision's names.
VLBERT = Release(
    name="vl-bert",
    names=(
        ("bn1.", "backbone.stem.conv1.norm."),
        ("conv1.", "backbone.stem.conv1."),
        *(
            (f"{theirs}.{{}}.{their_part}", f"{ours}.{{}}.{part}")
            for theirs, ours in (
                ("layer1", "backbone.res2"),
                ("layer2", "backbone.res3"),
                ("layer3", "backbone.res4"),
                ("layer4", "roi_heads.res5"),
            )
            for their_part, part in (
                ("bn{}.", "conv{}.norm."),
                ("conv{}.", "conv{}."),
                ("downsample.1.", "shortcut.norm."),
                ("downsample.0.", "shortcut."),
            )
        ),
    ),
)


def find_release(shapes: Mapping[str, torch.Size], file: Path) -> Release:
    """Return the release of a file, given its tensors' shapes by name. Raises ValueError if the release is unknown."""
    logits, deltas = (shapes.get(f"{_RPN}{part}.bias") for part in ("objectness_logits", "anchor_deltas"))
    if logits and deltas:
        return MILVLG if 2 * logits[0] == deltas[0] else AIRSPLAY  # two channels per anchor, or one
    if "layer1.0.conv1.weight" in shapes:
        return VLBERT
    releases = ", ".join(release.name for release in (AIRSPLAY, MILVLG, VLBERT))
    names = ", ".join(sorted(shapes)[:3])
    raise ValueError(f"{file} is none of the releases {releases}; it has tensors such as {names}")


def caffe_cell_anchors() -> Tensor:
    """Return Caffe's anchors of one cell, float32 [12, 4] xyxy, ordered by ratio and then by size."""
    boxes = []
    for ratio in (0.5, 1.0, 2.0):
        width = round(math.sqrt(16 * 16 / ratio))
        height = round(width * ratio)
        for scale in (4, 8, 16, 32):
            x, y = (width * scale - 1) / 2, (height * scale - 1) / 2  # the width of a box is x2 - x1 + 1
            boxes.append((7.5 - x, 7.5 - y, 7.5 + x, 7.5 + y))
    return torch.tensor(boxes)


def network_from_shapes(shapes: Mapping[str, torch.Size]) -> FasterRCNNConfig:
    """Return the configuration of a published network, given the shapes of its tensors under our names."""
    standard = FasterRCNNConfig()

    def side(name: str, default: int, axis: int = 0) -> int:
        shape = shapes.get(f"{name}.weight", ())
        return shape[axis] if axis < len(shape) and shape[axis] > 0 else default

    return dataclasses.replace(
        standard,
        resnet=dataclasses.replace(RESNET101, width=side("backbone.stem.conv1", RESNET101.width)),
        num_classes=max(1, side(f"{_HEAD}cls_score", standard.num_classes + 1) - 1),
        num_attributes=max(1, side(f"{_HEAD}attr_score", standard.num_attributes + 1) - 1),
        rpn_channels=side(f"{_RPN}conv", standard.rpn_channels),
        attribute_embedding=side(f"{_HEAD}cls_embedding", standard.attribute_embedding, axis=1),
        attribute_hidden=side(f"{_HEAD}fc_attr", standard.attribute_hidden),
    )


# --- conversion -------------------------------------------------------------------------------------------------------


def convert(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert a published weight file to the tensors (float32) and metadata for write_weights.

    The metadata has no names of classes and attributes. A ValueError lists missing, unexpected or unusable tensors.
    """
    theirs = unwrap_names(read_tensors(file), file)
    if is_safetensors(file) and "network" in read_safetensors(file, tensors=False)[1]:
        raise ValueError(f"{file} is already a weight file of this project; use it without conversion")
    release = find_release({name: tensor.shape for name, tensor in theirs.items()}, file)
    tensors = {
        to_our_name(name, release): tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in theirs.items()
        if _is_weight(name, theirs, release, file)
    }
    config = network_from_shapes({name: tensor.shape for name, tensor in tensors.items()})
    config = dataclasses.replace(config, **release.detection)
    if not any(name.startswith(ATTRIBUTE_HEAD) for name in tensors):
        config = dataclasses.replace(config, num_attributes=0)
    for start, change in release.changes.items():
        for name in [name for name in tensors if name.startswith(start)]:
            if tensors[name].dim() and tensors[name].is_floating_point():
                tensors[name] = change(tensors[name])
    with torch.device("meta"):
        expected = FasterRCNN(config).state_dict()
    if release is VLBERT:
        expected = {name: tensor for name, tensor in expected.items() if name.startswith(RESNET)}
    if ANCHORS in tensors:
        expected[ANCHORS] = torch.empty(config.num_anchors, 4)
    check_tensors(tensors, expected, f"{file} cannot be converted as release {release.name}")
    metadata = {"release": release.name, "network": dataclasses.asdict(config)}
    metadata["source"] = {"file": file.name, "sha256": sha256_of(file)}
    if release is not VLBERT:
        metadata["anchors"] = "file" if ANCHORS in tensors else "generated"
    if release is MILVLG and ANCHORS not in tensors:
        tensors[ANCHORS] = caffe_cell_anchors()  # ours have other sides and another order
    return tensors, metadata


def to_our_name(theirs: str, release: Release) -> str:
    """Return our name for a tensor, such as `backbone.res3.0.conv1.norm.weight` for `layer2.0.bn1.weight`."""
    for old, new in release.names:
        match = re.match(re.escape(old).replace(r"\{\}", r"(\d+)"), theirs)
        if match:
            return new.format(*match.groups()) + theirs[match.end() :]
    return theirs


def _is_weight(name: str, tensors: Mapping[str, Tensor], release: Release, file: Path) -> bool:
    """Return False for a batch norm's `num_batches_tracked`, a pixel mean or a pixel standard deviation, else True.

    Raises ValueError if the file's pixel mean or standard deviation is not the one that our detector uses.
    """
    if name in _PIXEL_STATISTICS and release is not VLBERT:
        ours, theirs = torch.tensor(_PIXEL_STATISTICS[name]).double(), tensors[name].flatten().double()
        if theirs.shape != ours.shape or not torch.allclose(theirs, ours, atol=1e-3):
            raise ValueError(
                f"{file}: {name} is {theirs.tolist()}, but this network is for {list(_PIXEL_STATISTICS[name])} (BGR)"
            )
        return False
    norm = COUNTER.sub("", name)
    return norm == name or f"{norm}.running_var" not in tensors
