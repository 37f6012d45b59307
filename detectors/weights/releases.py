"""Converts published weight files of the Visual Genome network to our names: one short table per release.

A file's release is recognised by the names of its tensors. It is converted completely or not at all. The command is
`vlbert convert-detector`.
Shape letters: A anchors a cell, C classes without background, D channels of res5.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.preprocess import PIXEL_MEAN_BGR
from detectors.resnet import RESNET50, RESNET101, without_values
from detectors.weights.files import (
    ANCHORS,
    ATTRIBUTE_HEAD,
    COUNTER,
    RESNET,
    read_safetensors,
    tensor_fault,
    weights_hash,
)
from detectors.weights.tensor_files import read_tensors

_BOX_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
# What a file may hold beside weights, and what it must be: this network's, in BGR order.
_PIXEL_STATISTICS = {"pixel_mean": PIXEL_MEAN_BGR, "pixel_std": (1.0, 1.0, 1.0)}

# --- what is done to a tensor -----------------------------------------------------------------------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """A change from their tensor to ours."""

    their_shape: Callable[[Shape], Shape]
    """Of ours."""
    apply: Callable[[Tensor], Tensor]


def _scaled_without_background(rows: Tensor) -> Tensor:
    """[4 (C + 1), ...] -> [4 C, ...]."""
    foreground = rows[4:]
    weights = torch.tensor(_BOX_WEIGHTS).repeat(len(foreground) // 4)
    return foreground * weights.view(-1, *[1] * (rows.dim() - 1))


def _foreground_over_background(channels: Tensor) -> Tensor:
    """[2 A, ...], all backgrounds first -> [A, ...]: the logit of the softmax over both."""
    background, foreground = channels.chunk(2)
    return foreground - background


# The first row, the background or "no attribute", goes to the end.
_FIRST_TO_END = Change(lambda shape: shape, lambda rows: rows.roll(-1, dims=0))
# This network divides its deltas by the weights of boxes, and has none for the background.
_BOXES = Change(lambda shape: (shape[0] + 4, *shape[1:]), _scaled_without_background)
# One logit an anchor, of the same probability.
_OBJECTNESS = Change(lambda shape: (2 * shape[0], *shape[1:]), _foreground_over_background)

# --- the releases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """The names of a release's tensors, and the settings that belong to its weights."""

    name: str
    description: str
    marks: tuple[str, ...]
    """Patterns: a file is of this release if one of them finds a tensor's name."""
    names: tuple[tuple[str, str], ...] = ()
    """(beginning of their name, of ours), {} a number; all other names are the same. The first match counts."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By the beginning of our name."""
    resnet_alone: bool = False
    """Backbone and res5, and nothing of a detector."""
    detection: Mapping[str, Any] = field(default_factory=dict)
    """The detection settings that belong to the weights, by fields of FasterRCNNConfig."""


_HEAD = "roi_heads.box_predictor."
AIRSPLAY = Release(
    name="airsplay",
    description="airsplay/py-bottom-up-attention (.pkl), also unc-nlp/frcnn-vg-finetuned (pytorch_model.bin)",
    marks=(r"^(backbone|proposal_generator|roi_heads)\.",),
    detection={"minimum_side": 0.0, "box_arithmetic": "continuous"},
)
MILVLG = Release(
    name="milvlg",
    description="MILVLG/bottom-up-attention.pytorch, bua-caffe-frcn-r101-k36 or -k10-100 (.pth), from Caffe",
    marks=(r"^roi_heads\.box_predictor\.(cls_embed|attr_linear\d)\.",),
    names=(
        (f"{_HEAD}cls_embed.", f"{_HEAD}cls_embedding."),
        (f"{_HEAD}attr_linear1.", f"{_HEAD}fc_attr."),
        (f"{_HEAD}attr_linear2.", f"{_HEAD}attr_score."),
    ),
    changes={
        f"{_HEAD}cls_score.": _FIRST_TO_END,
        f"{_HEAD}cls_embedding.": _FIRST_TO_END,
        f"{_HEAD}attr_score.": _FIRST_TO_END,
        f"{_HEAD}bbox_pred.": _BOXES,
        "proposal_generator.rpn_head.objectness_logits.": _OBJECTNESS,
    },
    detection={
        "short_side": 600,
        "long_side": 1000,
        "resize": "caffe",
        "minimum_side": 16.0,
        "box_arithmetic": "plus_one",
    },
)
VLBERT = Release(
    name="vl-bert",
    description="VL-BERT's resnet101-pt-vgbua-0000.model: a ResNet without a detector",
    marks=(r"^layer\d\.\d+\.", r"^(conv1|bn1)\."),
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
RELEASES = {release.name: release for release in (AIRSPLAY, MILVLG, VLBERT)}


def release_of(shapes: Mapping[str, Shape], file: Path) -> Release:
    """Return the release of a file with these tensors; ValueError for an unknown one."""
    objectness = shapes.get("proposal_generator.rpn_head.objectness_logits.bias", (0,))
    deltas = shapes.get("proposal_generator.rpn_head.anchor_deltas.bias", (0,))
    if objectness and deltas and objectness[0] and 2 * objectness[0] == deltas[0]:
        return MILVLG  # two channels an anchor, also where the file has no attribute head to tell it by
    for release in (MILVLG, AIRSPLAY, VLBERT):
        if any(re.search(mark, name) for mark in release.marks for name in shapes):
            return release
    some = ", ".join(sorted(shapes)[:3])
    raise ValueError(f"{file} is none of the releases {', '.join(RELEASES)}: its tensors are such as {some}")


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


def network_of(shapes: Mapping[str, Shape]) -> FasterRCNNConfig:
    """The Visual Genome network in the size of these tensors, by our names; settings that no shape shows are as
    published."""
    standard = FasterRCNNConfig()

    def side(name: str, axis: int, otherwise: int) -> int:
        shape = shapes.get(name, ())
        return shape[axis] if axis < len(shape) and shape[axis] > 0 else otherwise

    blocks = {int(found[1]) for name in shapes if (found := re.match(r"backbone\.res4\.(\d+)\.", name))}
    resnet = RESNET50 if blocks and max(blocks) < RESNET50.blocks[2] else RESNET101
    classes = side(f"{_HEAD}cls_score.weight", 0, standard.num_classes + 1) - 1
    return dataclasses.replace(
        standard,
        resnet=dataclasses.replace(resnet, width=side("backbone.stem.conv1.weight", 0, resnet.width)),
        num_classes=max(1, classes),
        num_attributes=max(1, side(f"{_HEAD}attr_score.weight", 0, standard.num_attributes + 1) - 1),
        rpn_channels=side("proposal_generator.rpn_head.conv.weight", 0, standard.rpn_channels),
        attribute_embedding=side(f"{_HEAD}cls_embedding.weight", 1, standard.attribute_embedding),
        attribute_hidden=side(f"{_HEAD}fc_attr.weight", 0, standard.attribute_hidden),
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
    attributes: bool
    anchors: str | None
    """`file`: from the file; `generated`: by the release's rule; None for a ResNet alone."""
    source: dict
    """`file` (its name), `sha256` and `container` of what was converted."""

    def metadata(self) -> dict:
        """Return what goes into our file beside names of classes and attributes; every value can be written as JSON."""
        metadata = {"release": self.release.name, "source": self.source, "network": dataclasses.asdict(self.network)}
        return metadata | ({"anchors": self.anchors} if self.anchors else {})


def convert(file: Path) -> Converted:
    """Convert a published file. ValueError names every tensor that is missing, unexpected or unfit."""
    found = read_tensors(file)
    if found.container == "safetensors file" and "network" in read_safetensors(file, tensors=False)[1]:
        raise ValueError(f"{file} is a weight file of this project already; load it as it is")
    theirs = found.plain()
    release = release_of({name: tuple(tensor.shape) for name, tensor in theirs.items()}, file)
    theirs = {name: tensor for name, tensor in theirs.items() if not _is_no_weight(name, theirs, release, file)}
    config = network_of({our_name(name, release): tuple(tensor.shape) for name, tensor in theirs.items()})
    config = dataclasses.replace(config, **release.detection)
    wanted = _wanted(config, release)
    head = [name for name in wanted if name.startswith(ATTRIBUTE_HEAD)]
    attributes = any(_their_name(name, release) in theirs for name in head)
    if not attributes:
        wanted = {name: shape for name, shape in wanted.items() if name not in head}
        config = dataclasses.replace(config, num_attributes=0)
    anchors = None if release.resnet_alone else "file" if ANCHORS in theirs else "generated"
    if anchors == "file":
        wanted[ANCHORS] = (config.num_anchors, 4)

    tensors, expected = {}, {_their_name(ours, release): ours for ours in wanted}
    faults = [f"missing {name}" for name in expected if name not in theirs]
    for name, tensor in theirs.items():
        if name not in expected:
            faults.append(f"unexpected {name}")
            continue
        ours = expected[name]
        change = next((change for start, change in release.changes.items() if ours.startswith(start)), None)
        fault = tensor_fault(tensor, change.their_shape(wanted[ours]) if change else wanted[ours])
        if fault:
            faults.append(f"{name} {fault}")
            continue
        tensors[ours] = (change.apply(tensor.float()) if change else tensor.float()).contiguous()
        if not tensors[ours].isfinite().all():
            faults.append(f"{name} is not finite in float32")
    if faults:
        more = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError(f"{file} is not converted: as release {release.name}, {'; '.join(faults[:20])}{more}")
    if release is MILVLG and anchors == "generated":
        tensors[ANCHORS] = caffe_cell_anchors()  # ours are others, and stand in another order
    source = {"file": file.name, "sha256": weights_hash(file), "container": found.container}
    return Converted(release, config, tensors, attributes, anchors, source)


def _wanted(config: FasterRCNNConfig, release: Release) -> dict[str, Shape]:
    """Our name -> shape of what the release's file must give."""
    with without_values():
        state = FasterRCNN(config).state_dict()
    names = [name for name in state if not release.resnet_alone or name.startswith(RESNET)]
    return {name: tuple(state[name].shape) for name in names}


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        found = re.match(re.escape(old).replace(r"\{\}", r"(\d+)"), name)
        if found:
            return new.format(*found.groups()) + name[found.end() :]
    return name


def our_name(theirs: str, release: Release) -> str:
    """`layer2.0.bn1.weight` -> `backbone.res3.0.conv1.norm.weight`."""
    return _renamed(theirs, release.names)


def _their_name(ours: str, release: Release) -> str:
    return _renamed(ours, [(new, old) for old, new in release.names])


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


def describe(converted: Converted) -> str:
    """Return lines for people: what the file is, and which network."""
    network, release = converted.network, converted.release
    resnet = f"ResNet of {' + '.join(map(str, network.resnet.blocks))} blocks"
    parts = f"a {resnet} alone: for model.regions.weights of VL-BERT, not for detection"
    if not release.resnet_alone:
        heads = f"{network.num_classes} classes, {network.num_attributes} attributes"
        parts = f"a {resnet}, {heads}, anchors {converted.anchors}"
    return f"release: {release.name}, {release.description}; a {converted.source['container']}\n{parts}"
