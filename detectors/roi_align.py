"""RoIAlign with one sample a cell, as torchvision.ops.roi_align(sampling_ratio=1, aligned=False) computes it.

A sample is a weighted sum of the four cells around it, which an embedding bag computes. For channels-last maps on a CPU
this takes a tenth of torchvision's time, mostly because the gradient keeps the layout.
Shape letters: K boxes, N maps, C channels, h w cells of a map, S samples a side.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_OUTPUTS = 2**31 - 1  # of one embedding bag: on GPUs its gradient counts them in 32 bits


def roi_align(groups: Sequence[Tensor], rois: Tensor, size: int, scale: float) -> Tensor:
    """[K, C, S, S], channels last, from maps of one or more sizes, each group [n, C, h, w].

    In float32 even under autocast: half precision would move the sampling points. float64 stays what it is.
    rois [K, 5]: number of the map, 0..N-1 over all groups; xyxy in input pixels. They get no gradient.
    scale: cells an input pixel.
    """
    dtype = torch.promote_types(groups[0].dtype, torch.float32)
    with torch.autocast(rois.device.type, enabled=False):
        flat = [maps.to(dtype).permute(0, 2, 3, 1).flatten(0, 2) for maps in groups]
        flat = flat[0] if len(flat) == 1 else torch.cat(flat)  # (all cells, C)
        layout, at_a_time = _layout(groups), max(1, _MAX_OUTPUTS // (size * size * flat.shape[1]))
        samples = [_samples(flat, layout, some, size, scale) for some in rois.detach().to(dtype).split(at_a_time)]
    samples = samples[0] if len(samples) == 1 else torch.cat(samples)
    return samples.view(-1, size, size, flat.shape[1]).permute(0, 3, 1, 2)


def _samples(flat: Tensor, layout: Tensor, rois: Tensor, size: int, scale: float) -> Tensor:
    """[K * S * S, C]."""
    number, x1, y1, x2, y2 = rois.unbind(1)
    first, height, width = layout[number.long()].unbind(1)
    down, rows = _neighbours(y1 * scale, y2 * scale, size, height[:, None])
    across, columns = _neighbours(x1 * scale, x2 * scale, size, width[:, None])
    shares = down[:, :, None, :, None] * across[:, None, :, None, :]  # (K, S, S, 2, 2)
    rows = first[:, None, None] + rows * width[:, None, None]
    cells = rows[:, :, None, :, None] + columns[:, None, :, None, :]  # (K, S, S, 2, 2)
    return F.embedding_bag(cells.view(-1, 4), flat, per_sample_weights=shares.view(-1, 4), mode="sum")


def _layout(groups: Sequence[Tensor]) -> Tensor:
    """int64 [N, 3]: where the cells of each map begin among those of all, its height and its width."""
    layout, first, device = [], 0, groups[0].device
    for maps in groups:
        number, _, height, width = maps.shape
        firsts = torch.arange(number, device=device) * (height * width) + first
        # Of numbers that the host knows: a copy of a list would wait for the device.
        layout.append(torch.stack([firsts, torch.full_like(firsts, height), torch.full_like(firsts, width)], dim=1))
        first += number * height * width
    return torch.cat(layout)


def _neighbours(first: Tensor, last: Tensor, size: int, cells: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and indices, float and int64 [K, S, 2], of the two cells beside each of S samples of an interval.

    first, last [K]: the intervals, in cells; each is made at least one cell long. cells, int64 [K, 1]: how many the map
    has. A sample beyond -1 or `cells` is 0; one between there and the outermost cell has that cell's value.
    """
    each = (last - first).clamp(min=1) / size
    numbers = torch.arange(size, dtype=first.dtype, device=first.device)
    positions = first[:, None] + numbers * each[:, None] + 0.5 * each[:, None]  # rounded as torchvision does
    inside = (positions >= -1) & (positions <= cells)
    end = cells - 1
    positions = torch.minimum(positions.clamp(min=0), end.to(positions.dtype))
    before = torch.minimum(positions.long().clamp(min=0), end)  # also of a position that is not a number
    share = positions - before
    shares = torch.stack([1 - share, share], dim=-1) * inside[:, :, None]
    return shares, torch.stack([before, torch.minimum(before + 1, end)], dim=-1)
