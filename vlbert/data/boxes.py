"""Functions on boxes: float32 x1 y1 x2 y2 in pixels. Unless a docstring says otherwise, the width is x2 - x1."""

import numpy as np
import torch
from torch import Tensor

from training.operators import box_iou


def geometry_embedding(boxes: Tensor, sizes: Tensor, channels: int, corners: bool) -> Tensor:
    """Return the geometry embedding [K, channels] of boxes [K, 4] (paper 3.2, after Hu et al. 2018).

    If `corners`, four numbers describe a box as in the paper (x1/W, y1/H, x2/W, y2/H), otherwise as in the authors'
    code (xc/W, yc/H, w/W, h/H). Each number x becomes the sines, then the cosines, of 100 x / 1000^(i/n) for
    i = 0, ..., n - 1, where n = channels / 8. `sizes` [K, 2] is the (width, height) of each box's image.
    """
    if channels % 8:
        raise ValueError(f"the geometry embedding has {channels} channels; it needs a multiple of 8")
    n = channels // 8
    scale = sizes.to(boxes.dtype).repeat(1, 2)
    if not corners:
        low, high = boxes[:, :2], boxes[:, 2:]
        boxes = torch.cat([(low + high) / 2, high - low], dim=1)
    position = boxes / scale * 100
    wavelength = 1000 ** (torch.arange(n, device=boxes.device, dtype=boxes.dtype) / n)
    angle = position[:, :, None] / wavelength  # (K, 4, n)
    return torch.cat([angle.sin(), angle.cos()], dim=2).flatten(1)


def box_location(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Return the relative corners and area of boxes [K, 4], as in ViLBERT and Unicoder-VL.

    The result is [K, 5]: x1/W, y1/H, x2/W, y2/H, and the box's fraction of the image's area.
    """
    corners = boxes / sizes.to(boxes.dtype).repeat(1, 2)
    x1, y1, x2, y2 = boxes.unbind(dim=1)
    area = (x2 - x1) * (y2 - y1) / sizes.to(boxes.dtype).prod(dim=1)
    return torch.cat([corners, area[:, None]], dim=1)


def box_iou_with_borders(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the IoU [n, m] of boxes [n, 4] and others [m, 4]. A box includes the pixels at x2 and y2."""
    boxes, others = (torch.cat([b[:, :2], b[:, 2:] + 1], dim=1) for b in (boxes, others))
    return box_iou(boxes, others)


def masked_pixels(boxes: Tensor, masked: Tensor, height: int, width: int) -> Tensor:
    """Return a mask of the pixels in masked boxes, bool [P, height, width].

    `boxes` is [P, R, 4], and `masked` is bool [P, R]. A box includes every pixel that it touches: rows int(y1) to
    int(y2) and columns int(x1) to int(x2), both inclusive.
    """
    x1, y1, x2, y2 = boxes.to(torch.int64).unbind(dim=2)
    x, y = torch.arange(width, device=boxes.device), torch.arange(height, device=boxes.device)
    columns = (x >= x1[..., None]) & (x <= x2[..., None]) & masked[..., None]  # (P, R, W)
    rows = (y >= y1[..., None]) & (y <= y2[..., None])  # (P, R, H)
    # A pixel is masked if a region has its row and its column. A small matrix product finds all such pixels.
    return torch.bmm(rows.float().transpose(1, 2), columns.float()) > 0


def flip_horizontally(boxes: np.ndarray, width: float) -> np.ndarray:
    """Mirror boxes [r, 4] left to right in an image of `width` pixels.

    Column i becomes column width - 1 - i. A box includes the columns at x1 and x2.
    """
    x1, y1, x2, y2 = boxes.T
    return np.stack([width - 1 - x2, y1, width - 1 - x1, y2], axis=1)
