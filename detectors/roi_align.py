"""RoIAlign with one sample a cell, as torchvision.ops.roi_align(sampling_ratio=1, aligned=False) computes it.

A sample is then a weighted sum of the four cells of a map around it, which is what an embedding bag computes: of maps
that are channels last, in a tenth of the time on a CPU, mostly because the gradient needs no other layout.
Shape letters: K boxes, N maps, C channels, h w cells of a map, S samples a side.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST = 2**31 - 1  # numbers that one embedding bag may put out: on GPUs its gradient counts them in 32 bits


def roi_align(groups: Sequence[Tensor], rois: Tensor, size: int, scale: float) -> Tensor:
    """[K, C, S, S], channels last, from maps of one or more sizes, each group [n, C, h, w].

    In float32 even under autocast: half precision would move the sampling points. float64 stays what it is.
    rois [K, 5]: number of the map, 0..N-1 over all groups; xyxy in input pixels. They get no gradient.
    scale: cells an input pixel.
    """
    kind = torch.promote_types(groups[0].dtype, torch.float32)
    with torch.autocast(rois.device.type, enabled=False):
        flat = [maps.to(kind).permute(0, 2, 3, 1).flatten(0, 2) for maps in groups]
        flat = flat[0] if len(flat) == 1 else torch.cat(flat)  # (all cells, C)
        layout, at_a_time = _layout(groups), max(1, _MOST // (size * size * flat.shape[1]))
        samples = [_samples(flat, layout, some, size, scale) for some in rois.detach().to(kind).split(at_a_time)]
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
    sizes = torch.tensor([size for maps in groups for size in [maps.shape[2:]] * len(maps)], device=groups[0].device)
    areas = sizes.prod(dim=1, keepdim=True)
    return torch.cat([areas.cumsum(dim=0) - areas, sizes], dim=1)


def _neighbours(first: Tensor, last: Tensor, size: int, cells: Tensor) -> tuple[Tensor, Tensor]:
    """The shares and numbers, float and int64 [K, S, 2], of the two cells beside each of S samples of [K] stretches.

    A stretch is at least one cell long. Beyond -1 and `cells`, int64 [K, 1], there is nothing; between there and the
    outermost cells there is what these hold.
    """
    each = (last - first).clamp(min=1) / size
    numbers = torch.arange(size, dtype=first.dtype, device=first.device)
    places = first[:, None] + numbers * each[:, None] + 0.5 * each[:, None]  # rounded as torchvision does
    there = (places >= -1) & (places <= cells)
    end = cells - 1
    places = torch.minimum(places.clamp(min=0), end.to(places.dtype))
    before = torch.minimum(places.long().clamp(min=0), end)  # also of a place that is no number
    share = places - before
    shares = torch.stack([1 - share, share], dim=-1) * there[:, :, None]
    return shares, torch.stack([before, torch.minimum(before + 1, end)], dim=-1)
