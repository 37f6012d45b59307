"""RoIAlign of ours against torchvision's."""

import pytest
import torch
from torch import Tensor
from torchvision.ops import roi_align as their_roi_align

from detectors.roi_align import roi_align

SCALE = 1 / 16


def hostile_rois(maps: int, height: int, width: int, size: int) -> Tensor:
    """Boxes anywhere: around the map, of no or less than no size, with samples exactly on its borders."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([16.0 * width, 16.0 * height])
    low = (torch.rand(300, 2, generator=generator) * 2 - 0.5) * ends
    sides = torch.rand(300, 2, generator=generator) * torch.rand(300, 1, generator=generator) ** 3 * ends
    sides[:20] = 0
    sides[20:40] = -30
    boxes = [torch.cat([low, low + sides], dim=1)]
    around = [(x, y) for x in range(-3, width + 3) for y in range(-3, height + 3)]
    boxes.append(torch.tensor([[16 * x, 16 * y, 16 * (x + size), 16 * (y + size)] for x, y in around]).float())
    boxes.append(boxes[1] - 8)  # the first sample on a whole cell, -1 and the map's size among them
    boxes.append(torch.tensor([[-1e5, -1e5, 1e5, 1e5], [1e9, 1e9, 1e9, 1e9], [0, 0, *ends.tolist()]]))
    boxes = torch.cat(boxes)
    numbers = torch.randint(0, maps, (len(boxes), 1), generator=generator)
    return torch.cat([numbers.float(), boxes], dim=1)


@pytest.mark.parametrize(("size", "height", "width"), [(14, 9, 12), (7, 11, 5), (3, 1, 6), (14, 1, 1)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_values_and_gradients_are_those_of_torchvision(size: int, height: int, width: int, layout):
    rois = hostile_rois(3, height, width, size)
    maps = torch.randn(3, 4, height, width, generator=torch.Generator().manual_seed(1))
    ours, theirs = (maps.clone(memory_format=layout).requires_grad_() for _ in range(2))
    found = roi_align([ours], rois, size, SCALE)
    expected = their_roi_align(theirs, rois, size, SCALE, sampling_ratio=1, aligned=False)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    empty = (expected == 0).all(dim=1)
    assert 0 < empty.float().mean() < 1
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    found.backward(gradient)
    expected.backward(gradient)
    scale = theirs.grad.abs().max()
    torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, rtol=0, atol=1e-6)


def test_maps_of_two_sizes_are_numbered_one_after_the_other():
    generator = torch.Generator().manual_seed(0)
    groups = [torch.randn(2, 4, 5, 9, generator=generator), torch.randn(3, 4, 8, 6, generator=generator)]
    maps = [one[None] for group in groups for one in group]
    for group in groups:
        group.requires_grad_()
    boxes = hostile_rois(1, 8, 9, 7)[:, 1:]
    numbers = torch.arange(len(boxes)) % 5
    found = roi_align(groups, torch.cat([numbers[:, None].float(), boxes], dim=1), 7, SCALE)
    for number, one in enumerate(maps):
        own = numbers == number
        rois = torch.cat([torch.zeros(int(own.sum()), 1), boxes[own]], dim=1)
        torch.testing.assert_close(found[own], their_roi_align(one, rois, 7, SCALE, sampling_ratio=1, aligned=False))
    found[numbers == 3].sum().backward()
    touched = [bool(one.any()) for group in groups for one in group.grad]
    assert touched == [False, False, False, True, False]


def test_many_regions_are_pooled_some_at_a_time_to_the_same(monkeypatch):
    rois, maps = hostile_rois(3, 9, 12, 3), torch.randn(3, 4, 9, 12, generator=torch.Generator().manual_seed(1))
    expected = roi_align([maps], rois, 3, SCALE)
    monkeypatch.setattr("detectors.roi_align._MAX_OUTPUTS", 100 * 3 * 3 * 4)
    torch.testing.assert_close(roi_align([maps], rois, 3, SCALE), expected, rtol=0, atol=0)


def test_maps_in_half_precision_are_sampled_where_those_in_float32_are():
    rois, maps = (
        hostile_rois(3, 9, 12, 7),
        torch.randn(3, 4, 9, 12, generator=torch.Generator().manual_seed(1)).bfloat16(),
    )
    found = roi_align([maps], rois, 7, SCALE)
    torch.testing.assert_close(found, roi_align([maps.float()], rois, 7, SCALE), rtol=0, atol=0)
