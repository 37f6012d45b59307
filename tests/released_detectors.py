"""Weight files as the Visual Genome network's releases are: their keys, shapes and containers, in narrow layers.

All names of the R-101 are there, and 1600 classes and 400 attributes; only channels are few. Every tensor has values of
its own, which follow from its name.
"""

import pickle
import re
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

CLASSES, ATTRIBUTES = 1600, 400
WIDTH, RPN, EMBEDDING, HIDDEN = 4, 8, 6, 10
DEPTH = 32 * WIDTH
BLOCKS = {"res2": 3, "res3": 4, "res4": 23, "res5": 3}
Tensors = dict[str, np.ndarray]
ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
# By ratio, then size, as Caffe's rule makes them; both ends of a side count.
CAFFE_ANCHORS = np.float32(
    [
        *((-38, -16, 53, 31), (-84, -40, 99, 55), (-176, -88, 191, 103), (-360, -184, 375, 199)),
        *((-24, -24, 39, 39), (-56, -56, 71, 71), (-120, -120, 135, 135), (-248, -248, 263, 263)),
        *((-14, -36, 29, 51), (-36, -80, 51, 95), (-80, -168, 95, 183), (-168, -344, 183, 359)),
    ]
)
# (pattern, centre, spread): weights of a network in which signals neither die nor explode.
_FILL = (
    (r"running_var$", 1.0, 0.0),
    (r"running_mean$", 0.0, 0.1),
    (r"(conv3\.norm|bn3)\.weight$", 0.4, 0.05),
    (r"(norm|bn\d|downsample\.1)\.weight$", 1.0, 0.1),
    (r"(norm|bn\d|downsample\.1)\.bias$", 0.0, 0.1),
    (r"\.bias$", 0.0, 0.3),
)
_GAINS = {"stem.conv1": 0.02, "anchor_deltas": 0.3, "cls_score": 4.0, "bbox_pred": 2.0, "attr": 2.0}


def fill(name: str, *shape: int) -> np.ndarray:
    draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    for pattern, centre, spread in _FILL:
        if re.search(pattern, name):
            return (centre + spread * draw).astype(np.float32)
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.4)
    return (gain * draw / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def _norm(name: str, channels: int, counts: bool) -> Tensors:
    found = {f"{name}.{part}": (channels,) for part in ("weight", "bias", "running_mean", "running_var")}
    tensors = {name: fill(name, *shape) for name, shape in found.items()}
    return tensors | ({f"{name}.num_batches_tracked": np.array(7)} if counts else {})


def resnet(counts: bool = False) -> Tensors:
    """By detectron2's names; counts: live norms, which count batches."""
    tensors = {"backbone.stem.conv1.weight": fill("backbone.stem.conv1.weight", WIDTH, 3, 7, 7)}
    tensors |= _norm("backbone.stem.conv1.norm", WIDTH, counts)
    inputs = WIDTH
    for number, (stage, blocks) in enumerate(BLOCKS.items()):
        middle = WIDTH * 2**number
        for block in range(blocks):
            name = f"roi_heads.res5.{block}" if stage == "res5" else f"backbone.{stage}.{block}"
            layers = {
                "conv1": (middle, inputs, 1, 1),
                "conv2": (middle, middle, 3, 3),
                "conv3": (4 * middle, middle, 1, 1),
            }
            if block == 0:
                layers["shortcut"] = (4 * middle, inputs, 1, 1)
            for layer, shape in layers.items():
                tensors[f"{name}.{layer}.weight"] = fill(f"{name}.{layer}.weight", *shape)
                tensors |= _norm(f"{name}.{layer}.norm", shape[0], counts)
            inputs = 4 * middle
    return tensors


def _filled(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    found = {}
    for name, (rows, *rest) in shapes.items():
        found[f"{name}.weight"] = fill(f"{name}.weight", rows, *rest)
        if not name.endswith(("cls_embedding", "cls_embed")):
            found[f"{name}.bias"] = fill(f"{name}.bias", rows)
    return found


def airsplay(attributes: bool = True) -> Tensors:
    """Also Hugging Face's, which adds ANCHORS."""
    rpn, head = "proposal_generator.rpn_head", "roi_heads.box_predictor"
    shapes = {
        f"{rpn}.conv": (RPN, 16 * WIDTH, 3, 3),
        f"{rpn}.objectness_logits": (12, RPN, 1, 1),
        f"{rpn}.anchor_deltas": (48, RPN, 1, 1),
        f"{head}.cls_score": (CLASSES + 1, DEPTH),
        f"{head}.bbox_pred": (4 * CLASSES, DEPTH),
    }
    if attributes:
        shapes[f"{head}.cls_embedding"] = (CLASSES + 1, EMBEDDING)
        shapes[f"{head}.fc_attr"] = (HIDDEN, DEPTH + EMBEDDING)
        shapes[f"{head}.attr_score"] = (ATTRIBUTES + 1, HIDDEN)
    return resnet() | _filled(shapes)


def milvlg() -> Tensors:
    rpn, head = "proposal_generator.rpn_head", "roi_heads.box_predictor"
    shapes = {
        f"{rpn}.conv": (RPN, 16 * WIDTH, 3, 3),
        f"{rpn}.objectness_logits": (24, RPN, 1, 1),
        f"{rpn}.anchor_deltas": (48, RPN, 1, 1),
        f"{head}.cls_score": (1 + CLASSES, DEPTH),
        f"{head}.bbox_pred": (4 * (1 + CLASSES), DEPTH),
        f"{head}.cls_embed": (1 + CLASSES, EMBEDDING),
        f"{head}.attr_linear1": (HIDDEN, DEPTH + EMBEDDING),
        f"{head}.attr_linear2": (1 + ATTRIBUTES, HIDDEN),
    }
    tensors = resnet(counts=True) | _filled(shapes)
    for part in ("weight", "bias"):
        tensors[f"{head}.bbox_pred.{part}"] *= np.float32(0.1)  # its deltas are not divided by (10, 10, 5, 5)
    return tensors | {ANCHORS: CAFFE_ANCHORS.copy()}


def vl_bert() -> Tensors:
    """The ResNet alone, by torchvision's names."""
    tensors = {}
    for name, value in resnet(counts=True).items():
        name = name.removeprefix("backbone.stem.").replace("roi_heads.res5", "layer4")
        for stage in (2, 3, 4):
            name = name.replace(f"backbone.res{stage}", f"layer{stage - 1}")
        name = re.sub(r"conv(\d)\.norm", r"bn\1", name)
        tensors[name.replace("shortcut.norm", "downsample.1").replace("shortcut", "downsample.0")] = value
    return tensors


def save_pickle(file: Path, tensors: Tensors, protocol: int = 2, **beside: object) -> Path:
    """Release (a)'s container; its numpy was older, and kept its parts elsewhere."""
    whole = {"model": tensors, "__author__": "Bottom-Up Attention", **beside}
    data = pickle.dumps(whole, protocol)
    if protocol == 2:
        assert b"cnumpy._core.multiarray\n" in data
        data = data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    file.write_bytes(data)
    return file


def save_torch(file: Path, tensors: Tensors, flat: bool = False, zipped: bool = True) -> Path:
    """Release (b)'s, (c)'s and (d)'s container; before 2020 it was no zip file."""
    state = OrderedDict((name, torch.from_numpy(np.array(value))) for name, value in tensors.items())
    torch.save(state if flat else {"model": state}, file, _use_new_zipfile_serialization=zipped)
    return file
