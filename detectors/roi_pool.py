"""RoIPool on a CPU, channels last: bit-identical to torchvision.ops.roi_pool, in a third of its time.

A bin is a rectangle of cells. The maxima of all windows whose height and width are powers of two are computed once per
image. The maximum of a bin is then the maximum of four such windows, one in each of its corners. They may overlap.
Shape letters: K boxes, C channels, h w cells of the map, S bins per side of a box, L M window heights and widths.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def roi_pool_chunks(
    c4: Tensor, boxes: Tensor, size: int, scale: float, chunk_size: int, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Pool boxes from one map, and yield `chunk_size` boxes at a time: [k, C, S, S] of `dtype`, channels last.

    `c4` is [C, h, w], `boxes` is [K, 4] in input pixels, and `scale` is cells per input pixel. The map is rounded to
    `dtype` before pooling. Rounding the maxima would give the same result.
    """
    channels, height, width = c4.shape
    down = _compute_bins(boxes[:, 1], boxes[:, 3], size, scale, height)
    across = _compute_bins(boxes[:, 0], boxes[:, 2], size, scale, width)
    rows, columns = _log2(down), _log2(across)
    # [L, M, h, w, C]: maxima of windows of 2^l by 2^m cells that begin at each cell.
    levels = _window_maxima(c4.permute(1, 2, 0).to(dtype), 0, int(rows.max()))
    windows = torch.stack([torch.stack(_window_maxima(level, 1, int(columns.max()))) for level in levels])
    wide = windows.shape[1]
    windows = windows.view(-1, channels)
    tops = (down[0].clamp(max=height - 1), (down[1] - 2**rows).clamp(min=0))
    lefts = (across[0].clamp(max=width - 1), (across[1] - 2**columns).clamp(min=0))
    level = (rows[:, :, None] * wide + columns[:, None, :]) * height
    empty = (down[1] <= down[0])[:, :, None] | (across[1] <= across[0])[:, None, :]
    for start in range(0, len(boxes), chunk_size):
        chunk = slice(start, start + chunk_size)
        maxima = (
            windows.index_select(0, ((level[chunk] + top[chunk, :, None]) * width + left[chunk, None, :]).flatten())
            for top in tops
            for left in lefts
        )
        pooled = next(maxima)
        for others in maxima:
            torch.maximum(pooled, others, out=pooled)
        pooled[empty[chunk].flatten()] = 0
        yield pooled.view(-1, size, size, channels).permute(0, 3, 1, 2)


def _compute_bins(first: Tensor, last: Tensor, size: int, scale: float, cells: int) -> tuple[Tensor, Tensor]:
    """Split intervals (input pixels) into `size` bins. Return the bins' start and exclusive end cells, int64 [K, S]."""
    first, last = (first * scale + 0.5).floor(), (last * scale + 0.5).floor()  # rounded as in Caffe
    each = ((last - first + 1).clamp(min=1) / size)[:, None]
    numbers = torch.arange(size, dtype=each.dtype)  # float32, as in Caffe
    starts, ends = (numbers * each).floor() + first[:, None], ((numbers + 1) * each).ceil() + first[:, None]
    return starts.clamp(0, cells).long(), ends.clamp(0, cells).long()


def _log2(bins: tuple[Tensor, Tensor]) -> Tensor:
    """Return log2 of the length of each bin (from _compute_bins), rounded down, int64 [K, S]."""
    return (bins[1] - bins[0]).clamp(min=1).double().log2().floor().long()


def _window_maxima(cells: Tensor, axis: int, levels: int) -> list[Tensor]:
    """Return the maxima of windows of 1, 2, 4, ..., 2^levels cells along an axis. Windows at the end are shorter."""
    windows = [cells]
    for level in range(levels):
        before, step = windows[-1], 2**level
        rest = cells.shape[axis] - step
        window = before.clone()
        if rest > 0:
            torch.maximum(
                before.narrow(axis, 0, rest), before.narrow(axis, step, rest), out=window.narrow(axis, 0, rest)
            )
        windows.append(window)
    return windows
