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

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.resnet import ResNetConfig

CLASSES, ATTRIBUTES = 1600, 400
WIDTH, RPN, EMBEDDING, HIDDEN = 4, 8, 6, 10
DEPTH = 32 * WIDTH
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
# Last words of a name -> centre and spread: of a network in which signals neither die nor explode.
_FILL = {
    "running_var": (1.0, 0.0),
    "running_mean": (0.0, 0.1),
    "conv3.norm.weight": (0.4, 0.05),
    "norm.weight": (1.0, 0.1),
    "norm.bias": (0.0, 0.1),
    "bias": (0.0, 0.3),
}
_GAINS = {"stem.conv1": 0.02, "anchor_deltas": 0.3, "cls_score": 4.0, "bbox_pred": 2.0, "attr": 2.0}


def fill(name: str, *shape: int) -> np.ndarray:
    draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    centre, spread = next((found for words, found in _FILL.items() if name.endswith(words)), (0.0, None))
    if spread is None:
        spread = next((gain for part, gain in _GAINS.items() if part in name), 1.4) / np.sqrt(np.prod(shape[1:]))
    return (centre + spread * draw).astype(np.float32)


def resnet(norm: str = "frozen") -> Tensors:
    """By detectron2's names, which are ours; batch: live norms, which count batches."""
    with torch.device("meta"):
        state = FasterRCNN(FasterRCNNConfig(resnet=ResNetConfig(width=WIDTH, norm=norm))).state_dict()
    ours = {name: tensor.shape for name, tensor in state.items() if name.startswith(("backbone.", "roi_heads.res5."))}
    return {name: fill(name, *shape) if shape else np.array(7) for name, shape in ours.items()}


def _heads(objectness: int, boxes: int, attributes: tuple[str, ...]) -> Tensors:
    """The RPN's and the box predictor's; attributes: the names of the layers that find these."""
    rpn, head, found = "proposal_generator.rpn_head", "roi_heads.box_predictor", {}
    shapes = {
        f"{rpn}.conv": (RPN, 16 * WIDTH, 3, 3),
        f"{rpn}.objectness_logits": (objectness, RPN, 1, 1),
        f"{rpn}.anchor_deltas": (48, RPN, 1, 1),
        f"{head}.cls_score": (1 + CLASSES, DEPTH),
        f"{head}.bbox_pred": (4 * boxes, DEPTH),
    }
    of_attributes = ((1 + CLASSES, EMBEDDING), (HIDDEN, DEPTH + EMBEDDING), (1 + ATTRIBUTES, HIDDEN))
    shapes |= {f"{head}.{name}": shape for name, shape in zip(attributes, of_attributes, strict=False)}
    for name, shape in shapes.items():
        found[f"{name}.weight"] = fill(f"{name}.weight", *shape)
        if "cls_embed" not in name:
            found[f"{name}.bias"] = fill(f"{name}.bias", shape[0])
    return found


def airsplay(attributes: bool = True) -> Tensors:
    """Also Hugging Face's, which adds ANCHORS."""
    return resnet() | _heads(12, CLASSES, ("cls_embedding", "fc_attr", "attr_score") if attributes else ())


def milvlg() -> Tensors:
    tensors = resnet("batch") | _heads(24, 1 + CLASSES, ("cls_embed", "attr_linear1", "attr_linear2"))
    for part in ("weight", "bias"):
        tensors[f"roi_heads.box_predictor.bbox_pred.{part}"] *= np.float32(0.1)  # not divided by (10, 10, 5, 5)
    return tensors | {ANCHORS: CAFFE_ANCHORS.copy()}


def vl_bert() -> Tensors:
    """The ResNet alone, by torchvision's names."""
    tensors = {}
    for name, value in resnet("batch").items():
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
