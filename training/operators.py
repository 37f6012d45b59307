"""torchvision's compiled operators, and its functions on boxes that detection and training use.

Importing torchvision itself also imports PyTorch's compiler, which takes 2 CPU-seconds and 160 MB in each process.
"""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

_SPEC = importlib.util.find_spec("torchvision")  # imports nothing
assert _SPEC is not None, "torchvision is not installed"
for _library in ("_C*.so", "image*.so"):
    torch.ops.load_library(next(Path(str(_SPEC.origin)).parent.glob(_library)))

nms = torch.ops.torchvision.nms
_RGB = 3  # torchvision.io.ImageReadMode.RGB


def decode_jpeg(data: bytes) -> Tensor:
    """Decode a JPEG to uint8 [3, h, w], RGB. Raises RuntimeError if it is damaged."""
    return torch.ops.image.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), _RGB, False)


def roi_pool(maps: Tensor, rois: Tensor, size: int, scale: float) -> Tensor:
    """Pool the `rois` [K, 5] of `maps` [N, C, H, W], float32 or float64, to [K, C, size, size] (Fast R-CNN, 2.1)."""
    return torch.ops.torchvision.roi_pool(maps, rois, scale, size, size)[0]


def clip_boxes(boxes: Tensor, height: float, width: float) -> Tensor:
    """Clip boxes [..., 4], xyxy, to an image of this size."""
    x, y = boxes[..., 0::2].clamp(0, width), boxes[..., 1::2].clamp(0, height)
    return torch.stack([x, y], dim=-1).flatten(-2)


def box_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the IoU [N, M] of boxes [N, 4] and [M, 4], xyxy. It is NaN for two boxes without area."""
    corner = torch.maximum(boxes[:, None, :2], others[:, :2])
    sides = (torch.minimum(boxes[:, None, 2:], others[:, 2:]) - corner).clamp(min=0)
    overlap = sides[..., 0] * sides[..., 1]
    area, other = ((own[:, 2] - own[:, 0]) * (own[:, 3] - own[:, 1]) for own in (boxes, others))
    return overlap / (area[:, None] + other - overlap)
