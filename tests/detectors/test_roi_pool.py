"""RoIPool by tables of maxima: bit for bit what torchvision's operator computes."""

import pytest
import torch
import torchvision

from detectors.faster_rcnn import STRIDE
from detectors.roi_pool import roi_pool_chunks


def some_boxes(height: int, width: int) -> torch.Tensor:
    """float32 [K, 4] in input pixels: any, on cells' borders, the whole map, slivers in its last corner, one pixel."""
    corners = torch.rand(150, 2, 2, generator=torch.Generator().manual_seed(height * 97 + width))
    corners = (corners * torch.tensor([width * STRIDE, height * STRIDE])).sort(dim=1).values
    boxes = corners.flatten(1)
    x, y = width * STRIDE, height * STRIDE
    special = torch.tensor([[0, 0, x, y], [x - 1, y - 1, x, y], [x, y, x, y], [0, 0, 1, 1], [7, 8, 9, 8]])
    return torch.cat([boxes, (boxes / 8).round() * 8, special.float()])


@pytest.mark.parametrize(("height", "width"), [(38, 50), (38, 63), (3, 63), (11, 14), (1, 1), (2, 5)])
@pytest.mark.parametrize("size", [14, 7, 3])
def test_it_is_torchvisions_pooling_to_the_last_bit(height: int, width: int, size: int):
    boxes = some_boxes(height, width)
    c4 = torch.randn(1, 8, height, width, generator=torch.Generator().manual_seed(1))
    expected = torchvision.ops.roi_pool(c4, [boxes], size, spatial_scale=1 / STRIDE)
    for dtype in (torch.float32, torch.bfloat16):
        chunks = list(roi_pool_chunks(c4[0], boxes, size, 1 / STRIDE, 16, dtype))
        assert [len(chunk) for chunk in chunks] == [16] * (len(boxes) // 16) + [len(boxes) % 16]
        assert all(chunk.is_contiguous(memory_format=torch.channels_last) for chunk in chunks)
        assert torch.equal(torch.cat(chunks), expected.to(dtype))
