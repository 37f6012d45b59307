"""The network that a folder of the detector's figures describes: its meta.json, configuration and weights."""

import math
import re

import numpy as np
import torch
from torch import Tensor

from benchmarks.parity.cases import standard_normal
from detectors.faster_rcnn import STRIDE, FasterRCNN, FasterRCNNConfig, cell_anchors
from detectors.preprocess import PIXEL_MEAN_BGR
from detectors.resnet import BATCH_NORM_EPS, ResNetConfig, without_values

BOXES_AT_ONCE = 16  # in res5: bounds the memory


# What it may say that changes no number, but for what has a reader of its own (`rules`, `shapes`, ...).
_REMARKS = {
    "author",
    "comment",
    "created",
    "date",
    "description",
    "licence",
    "license",
    "name",
    "note",
    "notes",
    "source",
}
_REMARKS |= {"seed_rule", "title", "versions"}
_READ_ELSEWHERE = {"attr_none_index", "background_index", "checks", "depth", "images", "rules", "salt", "shapes"}
# Of these our network has one value only.
_ONLY = {
    "pixel_mean_bgr": PIXEL_MEAN_BGR,
    "pixel_std": (1, 1, 1),
    "bn_eps": BATCH_NORM_EPS,
    "rpn.stride": STRIDE,
    "rpn.offset": 0,
}
# The others, as fields of FasterRCNNConfig (or `resnet.`, of its ResNetConfig).
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


def read_config(metadata: dict) -> tuple[FasterRCNNConfig, list[str]]:
    """The network that a meta.json describes, and what it does not state: that is as in the Visual Genome network.

    ValueError for what it says beyond that, and for values that our network does not have.
    """
    for name, kind in {"shapes": dict, "rules": list, "rpn": dict}.items():
        if not isinstance(metadata.get(name), kind):
            raise ValueError(f"meta.json: {name} is {metadata.get(name)!r}, must be a {kind.__name__}")
    stated = {key: value for key, value in metadata.items() if key != "rpn"}
    stated |= {f"rpn.{key}": value for key, value in metadata["rpn"].items()}
    known = {*_REMARKS, *_READ_ELSEWHERE, *_ONLY, *_FIELDS, *_DESCRIPTIONS}
    unknown = sorted(stated.keys() - known)
    if unknown:
        raise ValueError(
            f"meta.json: {', '.join(unknown)} unknown here; what may change the network is not passed over: teach "
            f"read_config what it means, or put what changes nothing under `notes`"
        )
    for key, only in _ONLY.items():
        if key in stated and not np.array_equal(np.float64(stated[key]), np.float64(only)):
            raise ValueError(f"meta.json: {key} is {stated[key]}, our network has {only} only")
    changes = _from_shapes(metadata["shapes"])
    for key, name in _FIELDS.items():
        if key in stated:
            changes[name] = tuple(np.ravel(stated[key]).tolist()) if isinstance(stated[key], list) else stated[key]
    changes["num_attributes"] = changes["num_attributes"] or 0
    for key, understand in _DESCRIPTIONS.items():
        if key in stated:
            changes |= understand(key, stated[key])
    resnet = {name.removeprefix("resnet."): v for name, v in changes.items() if name.startswith("resnet.")}
    others = {name: v for name, v in changes.items() if not name.startswith("resnet.")}
    try:
        config = FasterRCNNConfig(resnet=ResNetConfig(**resnet), **others)
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta.json: {error}") from error
    depth = 3 * sum(config.resnet.blocks) + 2
    for key, ours in {
        "depth": depth,
        "background_index": config.num_classes,
        "attr_none_index": config.num_attributes or None,
    }.items():
        if stated.get(key) is not None and ours is not None and stated[key] != ours:
            raise ValueError(f"meta.json: {key} is {stated[key]}, but {ours} with the shapes and numbers that it gives")
    unstated = [key for key in (*_ONLY, *_DESCRIPTIONS) if key not in stated]
    unstated += [key for key, name in _FIELDS.items() if key not in stated and name not in changes]
    return config, sorted(unstated)


def _from_shapes(shapes: dict[str, list[int]]) -> dict:
    """What the shapes of the tensors say about the configuration."""

    def rows(name: str) -> int:
        if name not in shapes:
            raise ValueError(f"meta.json: shapes has no {name}")
        return shapes[name][0]

    blocks = []
    for stage in ("backbone.res2", "backbone.res3", "backbone.res4", "roi_heads.res5"):
        found = [re.match(rf"{re.escape(stage)}\.(\d+)\.", name) for name in shapes]
        blocks.append(1 + max((int(match[1]) for match in found if match), default=-1))
    predictor = "roi_heads.box_predictor"
    changes = {
        "resnet.blocks": tuple(blocks),
        "resnet.width": rows("backbone.stem.conv1.weight"),
        "rpn_channels": rows("proposal_generator.rpn_head.conv.weight"),
        "num_classes": rows(f"{predictor}.cls_score.weight") - 1,
        "num_attributes": 0,
    }
    if f"{predictor}.attr_score.weight" in shapes:
        changes["num_attributes"] = rows(f"{predictor}.attr_score.weight") - 1
        changes["attribute_hidden"] = rows(f"{predictor}.fc_attr.weight")
        rows(f"{predictor}.cls_embedding.weight")
        changes["attribute_embedding"] = shapes[f"{predictor}.cls_embedding.weight"][-1]
    return changes


def _parts(key: str, value: object, patterns: dict[str, str]) -> dict[str, str]:
    """What the patterns find in a description (their group, or all of it); ValueError where it says more than that."""
    text = " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    found = {}
    for name, pattern in patterns.items():
        match = re.search(pattern, text, re.IGNORECASE)
        while match:
            found[name] = next((group for group in match.groups() if group), match[0]).lower()
            text = f"{text[: match.start()]};{text[match.end() :]}"
            match = re.search(pattern, text, re.IGNORECASE)
    rest = re.findall(r"[\w./]*\w", text)
    if rest:
        raise ValueError(f"meta.json: {key} is {value!r}; what `{' '.join(rest)}` means is unknown here")
    return found


def _pooler(key: str, value: object) -> dict:
    patterns = {
        "not_aligned": r"\b(?:not[ -]|un)aligned\b|\blegacy\b|\b(?:no|without)(?: the)? half-pixel shift\b",
        "aligned": r"\baligned\W*(true|false|0|1)\b",
        "sampling": r"\bsampling(?:[ _]?ratio)?\W*(\d+)\b|\b(1) sample(?: (?:a|per) bin)?\b",
        "scale": r"\b(?:spatial[ _])?scale\W*(?:1/16|0?\.0625)\b",
        "size": r"\b(\d+) ?x ?\1\b|\b(?:resolution|size)\W*(\d+)\b",
        "operation": r"\b(?:RoI[ _-]?)?(pool|align)(?:ing|1)?\b",
        "fillers": r"\b(?:type|output[ _]size)\b",
    }
    found = _parts(key, value, patterns)
    if "operation" not in found:
        raise ValueError(f"meta.json: {key} is {value!r}, neither RoIPool nor RoIAlign")
    operation = {"pool": "pool", "align": "align1"}[found["operation"]]
    if operation == "align1" and (found.get("sampling", "1") != "1" or found.get("aligned") in ("true", "1")):
        raise ValueError(f"meta.json: {key} is {value!r}; our RoIAlign takes one sample a bin and is not `aligned`")
    return {"roi_op": operation} | ({"pool_size": int(found["size"])} if "size" in found else {})


def _res5(key: str, value: object) -> dict:
    patterns = {
        "whole": r"\b(?:no|without|not)[ -]dilat(?:ion|ed)\b|\bundilated\b|\bhalved\b",
        "stride": r"\bstride\W*(\d+)\b",
        "dilation": r"\bdilation\W*(\d+)\b",
        "dilated": r"\bdilated\b",
        "padding": r"\bpad(?:ding)?\W*(\d+)\b",
        "fillers": r"\b(?:conv2|3x3|in|all|three|blocks?|and|the|first)\b",
    }
    found = _parts(key, value, patterns)
    dilation = found.get("dilation", "1" if "whole" in found or found.get("stride") == "2" else "2")
    layout = found.get("stride", "1" if dilation == "2" else "2"), dilation, found.get("padding", dilation)
    if layout not in (("1", "2", "2"), ("2", "1", "1")) or ("whole" in found and "dilated" in found):
        raise ValueError(f"meta.json: {key} is {value!r}; ours has stride 1 and dilation 2, or stride 2 and none")
    return {"resnet.res5_dilated": dilation == "2"}


def _stem_pool(key: str, value: object) -> dict:
    patterns = {
        "floor": r"\b(?:no|not|without)[ _-]ceil(?:_mode)?\b|\bceil(?:_mode)?\W*(?:false|0)\b|\bfloor\b",
        "ceil": r"\bceil(?:_mode)?\b(?:\W*(?:true|1)\b)?",
        "kernel": r"\b3 ?x ?3(?:/2)?\b",
        "stride": r"\bstride\W*2\b",
        "pad": r"\bpad(?:ding)?\W*(\d+)\b",
        "name": r"\b(caffe|torch)\b",
        "fillers": r"\bmax\b|\b(?:max[ -]?)?pool\b",
    }
    found = _parts(key, value, patterns)
    pools = {"caffe": ("0", True), "torch": ("1", False)}
    wanted = found.get("pad"), "ceil" in found and "floor" not in found
    matches = [
        name for name, pool in pools.items() if pool == wanted or ("pad" not in found and name == found.get("name"))
    ]
    if len(matches) != 1:
        raise ValueError(f"meta.json: {key} is {value!r}; ours has pad 0 with ceil_mode, or pad 1 without")
    return {"resnet.stem_pool": matches[0]}


_DESCRIPTIONS = {"pooler": _pooler, "res5": _res5, "stem_pool": _stem_pool}


def regenerated(metadata: dict) -> dict[str, Tensor]:
    """The weights that a meta.json describes by rules on their names; ValueError where a checksum is another."""
    tensors = {name: _drawn(metadata, name, tuple(shape)) for name, shape in metadata["shapes"].items()}
    for name, total in metadata.get("checks", {}).items():
        if name not in tensors:
            raise ValueError(f"meta.json: checks has {name}, shapes has not")
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
    """The network with these weights; ValueError naming tensors that are missing, not ours, or of another shape."""
    with without_values():
        network = FasterRCNN(config)
    ours = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [f"{name} is missing" for name in ours if name not in theirs]
    wrong += [f"{name} is not in our network" for name in theirs if name not in ours]
    wrong += [f"{n} is {theirs[n]}, ours {ours[n]}" for n in ours if n in theirs and ours[n] != theirs[n]]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"meta.json: shapes do not fit its configuration: {'; '.join(wrong[:3])}{more}")
    network.load_state_dict(tensors, strict=True, assign=True)
    network.proposal_generator.cell_anchors = cell_anchors(config)
    return network.eval()


def prepared(network: FasterRCNN, plain: bool) -> FasterRCNN:
    """The form in which it detects; plain: the one in which it learns."""
    if not plain:
        return network.for_inference("fp32", BOXES_AT_ONCE)
    network.rois_at_a_time = BOXES_AT_ONCE
    return network
