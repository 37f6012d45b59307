"""The network that a folder of the detector's figures describes: its meta.json, configuration and weights."""

import math
import re

import numpy as np
import torch
from torch import Tensor

from detectors.faster_rcnn import STRIDE, FasterRCNN, FasterRCNNConfig, cell_anchors
from detectors.preprocess import PIXEL_MEAN_BGR
from detectors.resnet import BATCH_NORM_EPS, ResNetConfig, without_values
from tests.parity.cases import standard_normal

BOXES_AT_ONCE = 16  # in res5: bounds the memory

# What it may say that changes no number, or that is read elsewhere.
_NOT_OF_THE_NETWORK = {"checks", "images", "note", "notes", "rules", "salt", "seed_rule", "shapes", "source"}
# Of these our network has one value only.
_ONLY = {
    "pixel_mean_bgr": PIXEL_MEAN_BGR,
    "pixel_std": (1, 1, 1),
    "bn_eps": BATCH_NORM_EPS,
    "rpn.stride": STRIDE,
    "rpn.offset": 0,
}
# The others, as fields of FasterRCNNConfig (or `resnet.`, of its ResNetConfig). One that is not stated is as in the
# Visual Genome network.
_FIELDS = {
    "num_classes": "num_classes",
    "num_attrs": "num_attributes",
    "min_size": "short_side",
    "max_size": "long_side",
    "resize": "resize",
    "box_arithmetic": "box_arithmetic",
    "stride_in_1x1": "resnet.stride_in_1x1",
    "box_reg_weights": "box_weights",
    "rpn.pre_nms": "pre_nms",
    "rpn.post_nms": "post_nms",
    "rpn.nms": "rpn_nms_threshold",
    "rpn.sizes": "anchor_sizes",
    "rpn.ratios": "anchor_ratios",
    "rpn.hidden": "rpn_channels",
    "rpn.min_box": "minimum_side",
}
# What it says in words -> the fields.
_WORDS = {
    "pooler": {
        "RoIPool 14x14 scale 1/16": {"roi_op": "pool", "pool_size": 14},
        "RoIAlign 14x14 scale 1/16 sampling_ratio 1 aligned False": {"roi_op": "align1", "pool_size": 14},
    },
    "res5": {
        "stride 1, conv2 dilation 2 padding 2": {"resnet.res5_dilated": True},
        "stride 2, conv2 dilation 1 padding 1": {"resnet.res5_dilated": False},
    },
    "stem_pool": {
        "3x3 stride 2 pad 0 ceil_mode": {"resnet.stem_pool": "caffe"},
        "3x3 stride 2 pad 1": {"resnet.stem_pool": "torch"},
    },
}
# What follows from the others: `depth` counts layers as ResNets are named.
_DERIVED = {
    "depth": lambda config: 3 * sum(config.resnet.blocks) + 2,
    "background_index": lambda config: config.num_classes,
    "attr_none_index": lambda config: config.num_attributes,
}


def read_config(metadata: dict) -> FasterRCNNConfig:
    """Return the network that a meta.json describes.

    Raises ValueError naming what it says beyond what is known here, and values that our network does not have.
    """
    stated = {key: value for key, value in metadata.items() if key != "rpn"}
    stated |= {f"rpn.{key}": value for key, value in metadata["rpn"].items()}
    unknown = sorted(stated.keys() - {*_NOT_OF_THE_NETWORK, *_ONLY, *_FIELDS, *_WORDS, *_DERIVED})
    if unknown:
        raise ValueError(
            f"meta.json: {', '.join(unknown)} unknown here; what may change the network is not passed over: teach "
            f"read_config what it means, or put what changes nothing under `notes`"
        )
    for key, only in _ONLY.items():
        if not np.array_equal(np.float64(stated.get(key, only)), np.float64(only)):
            raise ValueError(f"meta.json: {key} is {stated[key]}, our network has {only} only")
    fields = _from_shapes(metadata["shapes"])
    for key, name in _FIELDS.items():
        if key in stated:
            fields[name] = tuple(stated[key]) if isinstance(stated[key], list) else stated[key]
    for key, known in _WORDS.items():
        if key in stated and stated[key] not in known:
            raise ValueError(f"meta.json: {key} is {stated[key]!r}, must be one of {', '.join(map(repr, known))}")
        fields |= known[stated[key]] if key in stated else {}
    resnet = {name.removeprefix("resnet."): value for name, value in fields.items() if name.startswith("resnet.")}
    others = {name: value for name, value in fields.items() if not name.startswith("resnet.")}
    try:
        config = FasterRCNNConfig(resnet=ResNetConfig(**resnet), **others)
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta.json: {error}") from error
    for key, derive in _DERIVED.items():
        if stated.get(key, derive(config)) not in (derive(config), None):
            raise ValueError(f"meta.json: {key} is {stated[key]}, but {derive(config)} with what else it says")
    return config


def _from_shapes(shapes: dict[str, list[int]]) -> dict:
    """Derive fields from the shapes of the tensors. Raises ValueError naming one that is missing."""
    blocks = []
    for stage in ("backbone.res2", "backbone.res3", "backbone.res4", "roi_heads.res5"):
        found = [re.match(rf"{re.escape(stage)}\.(\d+)\.", name) for name in shapes]
        blocks.append(1 + max((int(match[1]) for match in found if match), default=-1))
    predictor = "roi_heads.box_predictor"
    try:
        fields = {
            "resnet.blocks": tuple(blocks),
            "resnet.width": shapes["backbone.stem.conv1.weight"][0],
            "rpn_channels": shapes["proposal_generator.rpn_head.conv.weight"][0],
            "num_classes": shapes[f"{predictor}.cls_score.weight"][0] - 1,
            "num_attributes": 0,
        }
        if f"{predictor}.attr_score.weight" in shapes:
            fields["num_attributes"] = shapes[f"{predictor}.attr_score.weight"][0] - 1
            fields["attribute_hidden"] = shapes[f"{predictor}.fc_attr.weight"][0]
            fields["attribute_embedding"] = shapes[f"{predictor}.cls_embedding.weight"][-1]
    except KeyError as error:
        raise ValueError(f"meta.json: shapes has no {error.args[0]}") from None
    return fields


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
    kind, offset, gain = next((rule for pattern, *rule in metadata["rules"] if re.search(pattern, name)), (None, 0, 0))
    if kind not in ("fan", "lin", "abs"):
        raise ValueError(f"meta.json: the rule for {name} is of kind {kind}, must be one of fan, lin, abs")
    scale = 1 / math.sqrt(math.prod(shape[1:])) if kind == "fan" else 1.0
    draw = np.abs(draw) if kind == "abs" else draw
    return torch.from_numpy(np.asarray(offset + gain * scale * draw, np.float32))


def build(config: FasterRCNNConfig, tensors: dict[str, Tensor]) -> FasterRCNN:
    """Build the network with these weights. Raises an error naming tensors that do not fit it."""
    with without_values():
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
