"""The network that a folder of the detector's figures describes: its meta.json, configuration and weights."""

import math
import re

import numpy as np
import torch
from torch import Tensor

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig, cell_anchors
from detectors.resnet import ResNetConfig
from tests.parity.cases import standard_normal

BOXES_AT_ONCE = 16  # in res5: bounds the memory

# What it says in words of a network like ours; of these there is one value only.
_WORDS = {
    "pooler": "RoIPool 14x14 scale 1/16",
    "res5": "stride 1, conv2 dilation 2 padding 2",
    "stem_pool": "3x3 stride 2 pad 0 ceil_mode",
}


def read_config(metadata: dict) -> FasterRCNNConfig:
    """Return the network that a meta.json describes. Raises ValueError if it describes one of another kind."""
    for key, ours in _WORDS.items():
        if metadata.get(key, ours) != ours:
            raise ValueError(f"meta.json: {key} is {metadata[key]!r}, our network's is {ours!r}")
    shapes, rpn = metadata["shapes"], metadata["rpn"]
    stages = ("backbone.res2", "backbone.res3", "backbone.res4", "roi_heads.res5")
    found = [[re.match(rf"{re.escape(stage)}\.(\d+)\.", name) for name in shapes] for stage in stages]
    blocks = tuple(1 + max(int(match[1]) for match in matches if match) for matches in found)
    head = "roi_heads.box_predictor"
    return FasterRCNNConfig(
        resnet=ResNetConfig(blocks, width=shapes["backbone.stem.conv1.weight"][0]),
        num_classes=metadata["num_classes"],
        num_attributes=metadata["num_attrs"],
        anchor_sizes=tuple(rpn["sizes"]),
        anchor_ratios=tuple(rpn["ratios"]),
        rpn_channels=rpn["hidden"],
        short_side=metadata["min_size"],
        long_side=metadata["max_size"],
        pre_nms=rpn["pre_nms"],
        rpn_nms_threshold=rpn["nms"],
        post_nms=rpn["post_nms"],
        box_weights=tuple(metadata["box_reg_weights"]),
        attribute_embedding=shapes[f"{head}.cls_embedding.weight"][1],
        attribute_hidden=shapes[f"{head}.fc_attr.weight"][0],
    )


def regenerated(metadata: dict) -> dict[str, Tensor]:
    """Draw the weights that a meta.json describes by rules. Raises ValueError if a checksum differs."""
    tensors = {name: _drawn(metadata, name, tuple(shape)) for name, shape in metadata["shapes"].items()}
    for name, total in metadata.get("checks", {}).items():
        ours = float(tensors[name].double().sum())
        if not math.isclose(ours, total, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(f"meta.json: {name} should sum up to {total}, by the rules it does to {ours}")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}


def _drawn(metadata: dict, name: str, shape: tuple[int, ...]) -> Tensor:
    draw = standard_normal(metadata.get("salt", "") + name, 0, shape)
    kind, offset, gain = next(rule for pattern, *rule in metadata["rules"] if re.search(pattern, name))
    scale = 1 / math.sqrt(math.prod(shape[1:])) if kind == "fan" else 1.0
    draw = np.abs(draw) if kind == "abs" else draw
    return torch.from_numpy(np.asarray(offset + gain * scale * draw, np.float32))


def build(config: FasterRCNNConfig, tensors: dict[str, Tensor]) -> FasterRCNN:
    """Build the network with these weights. Raises an error naming tensors that do not fit it."""
    with torch.device("meta"):
        network = FasterRCNN(config)
    network.load_state_dict(tensors, strict=True, assign=True)
    network.proposal_generator.cell_anchors = cell_anchors(config)
    return network.eval()


def prepared(network: FasterRCNN, plain: bool) -> FasterRCNN:
    """Return it in the form in which it detects; plain: the one in which it learns."""
    if not plain:
        return network.for_inference("fp32", BOXES_AT_ONCE)
    network.rois_at_a_time = BOXES_AT_ONCE
    return network
