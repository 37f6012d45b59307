"""Converts published weight files of the Visual Genome network to our names: one short table per release.

A file's release is recognised by the names of its tensors. It is converted completely or not at all. The command is
`vlbert convert-detector`.
Shape letters: A anchors a cell, C classes without background, D channels of res5.
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
from detectors.weights.files import ANCHORS, ATTRIBUTE_HEAD, COUNTER, RESNET, check_tensors
from detectors.weights.tensor_files import is_safetensors, read_safetensors, read_tensors, unwrapped_names
from storage.digests import sha256_of

_BOX_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
# What a file may hold beside weights, and what it must be: this network's, in BGR order.
_PIXEL_STATISTICS = {"pixel_mean": PIXEL_MEAN_BGR, "pixel_std": (1.0, 1.0, 1.0)}
_HEAD, _RPN = "roi_heads.box_predictor.", "proposal_generator.rpn_head."

# --- what is done to a tensor -----------------------------------------------------------------------------------------


def _first_to_end(rows: Tensor) -> Tensor:
    """The first row, the background or "no attribute", goes to the end."""
    return rows.roll(-1, dims=0)


def _scaled_without_background(rows: Tensor) -> Tensor:
    """[4 (C + 1), ...] -> [4 C, ...]: this network divides its deltas by weights, and has none for the background."""
    foreground = rows[4:]
    weights = torch.tensor(_BOX_WEIGHTS).repeat(len(rows) // 4)[: len(foreground)]
    return foreground * weights.view(-1, *[1] * (rows.dim() - 1))


def _foreground_over_background(channels: Tensor) -> Tensor:
    """[2 A, ...], all backgrounds first -> [A, ...]: the logit of the softmax over both."""
    count = len(channels) // 2
    return channels[count : 2 * count] - channels[:count]


# --- the releases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """The names of a release's tensors, and the settings that belong to its weights."""

    name: str
    names: tuple[tuple[str, str], ...] = ()
    """(beginning of their name, of ours), {} a number; all other names are the same. The first match counts."""
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """From their tensor to ours, by the beginning of our name."""
    resnet_alone: bool = False
    """Backbone and res5, and nothing of a detector."""
    detection: Mapping[str, Any] = field(default_factory=dict)
    """The detection settings that belong to the weights, by fields of FasterRCNNConfig."""


# airsplay/py-bottom-up-attention (.pkl), also unc-nlp/frcnn-vg-finetuned (pytorch_model.bin).
AIRSPLAY = Release(name="airsplay", detection={"minimum_side": 0.0, "box_arithmetic": "continuous"})
# MILVLG/bottom-up-attention.pytorch, bua-caffe-frcn-r101-k36 or -k10-100 (.pth), from Caffe.
MILVLG = Release(
    name="milvlg",
    names=(
        (f"{_HEAD}cls_embed.", f"{_HEAD}cls_embedding."),
        (f"{_HEAD}attr_linear1.", f"{_HEAD}fc_attr."),
        (f"{_HEAD}attr_linear2.", f"{_HEAD}attr_score."),
    ),
    changes={
        f"{_HEAD}cls_score.": _first_to_end,
        f"{_HEAD}cls_embedding.": _first_to_end,
        f"{_HEAD}attr_score.": _first_to_end,
        f"{_HEAD}bbox_pred.": _scaled_without_background,
        f"{_RPN}objectness_logits.": _foreground_over_background,
    },
    detection={
        "short_side": 600,
        "long_side": 1000,
        "resize": "caffe",
        "minimum_side": 16.0,
        "box_arithmetic": "plus_one",
    },
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
    resnet_alone=True,
)


def release_of(shapes: Mapping[str, torch.Size], file: Path) -> Release:
    """Return the release of a file with these tensors; ValueError for an unknown one."""
    logits, deltas = (shapes.get(f"{_RPN}{part}.bias") for part in ("objectness_logits", "anchor_deltas"))
    if logits and deltas:
        return MILVLG if 2 * logits[0] == deltas[0] else AIRSPLAY  # two channels an anchor, or one
    if "layer1.0.conv1.weight" in shapes:
        return VLBERT
    releases = ", ".join(release.name for release in (AIRSPLAY, MILVLG, VLBERT))
    some = ", ".join(sorted(shapes)[:3])
    raise ValueError(f"{file} is none of the releases {releases}: its tensors are such as {some}")


def caffe_cell_anchors() -> Tensor:
    """float32 [12, 4]: Caffe's anchors, ratio by ratio and size by size, in pixels that count both ends."""
    boxes = []
    for ratio in (0.5, 1.0, 2.0):
        width = round(math.sqrt(16 * 16 / ratio))
        height = round(width * ratio)
        for scale in (4, 8, 16, 32):
            x, y = (width * scale - 1) / 2, (height * scale - 1) / 2
            boxes.append((7.5 - x, 7.5 - y, 7.5 + x, 7.5 + y))
    return torch.tensor(boxes)


def network_of(shapes: Mapping[str, torch.Size]) -> FasterRCNNConfig:
    """The Visual Genome network in the size of these tensors, by our names; settings that no shape shows are as
    published."""
    standard = FasterRCNNConfig()

    def side(name: str, otherwise: int, axis: int = 0) -> int:
        shape = shapes.get(f"{name}.weight", ())
        return shape[axis] if axis < len(shape) and shape[axis] > 0 else otherwise

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


@dataclass(frozen=True)
class Converted:
    """A release under our names."""

    release: Release
    network: FasterRCNNConfig
    """Its size, and otherwise the published network."""
    tensors: dict[str, Tensor]
    """float32, by our names."""
    metadata: dict[str, Any]
    """Metadata of our file, without names of classes and attributes; every value can be written as JSON."""


def convert(file: Path) -> Converted:
    """Convert a published file. ValueError names every tensor that is missing, unexpected or unfit, by our names."""
    theirs = unwrapped_names(read_tensors(file), file)
    if is_safetensors(file) and "network" in read_safetensors(file, tensors=False)[1]:
        raise ValueError(f"{file} is a weight file of this project already; load it as it is")
    release = release_of({name: tensor.shape for name, tensor in theirs.items()}, file)
    tensors = {
        our_name(name, release): tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in theirs.items()
        if not _is_no_weight(name, theirs, release, file)
    }
    config = network_of({name: tensor.shape for name, tensor in tensors.items()})
    config = dataclasses.replace(config, **release.detection)
    if not any(name.startswith(ATTRIBUTE_HEAD) for name in tensors):
        config = dataclasses.replace(config, num_attributes=0)
    for start, change in release.changes.items():
        for name in [name for name in tensors if name.startswith(start)]:
            if tensors[name].dim() and tensors[name].is_floating_point():
                tensors[name] = change(tensors[name])
    with torch.device("meta"):
        expected = FasterRCNN(config).state_dict()
    if release.resnet_alone:
        expected = {name: tensor for name, tensor in expected.items() if name.startswith(RESNET)}
    if ANCHORS in tensors:
        expected[ANCHORS] = torch.empty(config.num_anchors, 4)
    check_tensors(tensors, expected, f"{file} is not converted: as release {release.name}")
    metadata = {"release": release.name, "network": dataclasses.asdict(config)}
    metadata["source"] = {"file": file.name, "sha256": sha256_of(file)}
    if not release.resnet_alone:
        metadata["anchors"] = "file" if ANCHORS in tensors else "generated"
    if release is MILVLG and ANCHORS not in tensors:
        tensors[ANCHORS] = caffe_cell_anchors()  # ours are others, and stand in another order
    return Converted(release, config, tensors, metadata)


def our_name(theirs: str, release: Release) -> str:
    """`layer2.0.bn1.weight` -> `backbone.res3.0.conv1.norm.weight`."""
    for old, new in release.names:
        found = re.match(re.escape(old).replace(r"\{\}", r"(\d+)"), theirs)
        if found:
            return new.format(*found.groups()) + theirs[found.end() :]
    return theirs


def _is_no_weight(name: str, tensors: Mapping[str, Tensor], release: Release, file: Path) -> bool:
    """Whether a tensor counts batches, which frozen norms do not need, or is a pixel statistic, which must be ours."""
    if name in _PIXEL_STATISTICS and not release.resnet_alone:
        ours, found = torch.tensor(_PIXEL_STATISTICS[name]).double(), tensors[name].flatten().double()
        if found.shape != ours.shape or not torch.allclose(found, ours, atol=1e-3):
            raise ValueError(
                f"{file}: {name} is {found.tolist()}, this network is for {list(_PIXEL_STATISTICS[name])} (BGR)"
            )
        return True
    norm = COUNTER.sub("", name)
    return norm != name and f"{norm}.running_var" in tensors
