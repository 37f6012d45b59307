import numpy as np
import pytest
import torch

from vlbert.data.boxes import flip_horizontally, geometry_embedding, masked_pixels


def test_hidden_pixels_are_exactly_those_that_a_hidden_box_touches():
    boxes = torch.tensor([[[0.0, 0.0, 7.0, 5.0], [1.2, 2.0, 3.9, 4.5], [5.0, 0.0, 6.0, 1.0]]])
    masked = torch.tensor([[False, True, False]])
    expected = torch.zeros(6, 8, dtype=torch.bool)
    expected[2:5, 1:4] = True
    assert torch.equal(masked_pixels(boxes, masked, 6, 8)[0], expected)
    both = masked_pixels(boxes, torch.tensor([[False, True, True]]), 6, 8)[0]
    expected[0:2, 5:7] = True
    assert torch.equal(both, expected)


def test_hidden_pixels_belong_to_their_own_picture():
    boxes = torch.tensor([[[0.0, 0.0, 1.0, 1.0]], [[2.0, 2.0, 3.0, 3.0]]])
    found = masked_pixels(boxes, torch.tensor([[False], [True]]), 4, 4)
    assert found[0].sum() == 0
    assert found[1].sum() == 4


def test_mirroring_twice_changes_nothing_and_once_swaps_the_sides():
    boxes = np.array([[0, 1, 3, 4], [5, 0, 9, 2]], np.float32)
    assert flip_horizontally(boxes, 10).tolist() == [[6, 1, 9, 4], [0, 0, 4, 2]]
    np.testing.assert_array_equal(flip_horizontally(flip_horizontally(boxes, 10), 10), boxes)


def test_a_mirrored_box_hides_the_mirrored_pixels():
    box, masked = np.array([[1.2, 2.0, 3.9, 4.0]], np.float32), torch.tensor([[True]])
    columns = np.floor(box)  # the pixels that it touches
    straight, mirrored = (
        masked_pixels(torch.from_numpy(b)[None], masked, 6, 8)[0] for b in (columns, flip_horizontally(columns, 8))
    )
    assert straight.sum() == 9
    assert torch.equal(mirrored, straight.flip(1))


def test_the_papers_geometry_is_of_the_corners():
    box, size = torch.tensor([[20.0, 30.0, 60.0, 90.0]]), torch.tensor([[100, 200]])
    embedded = geometry_embedding(box, size, channels=8, corners=True)[0]  # one sine and one cosine a number
    numbers = 100 * np.array([0.2, 0.15, 0.6, 0.45])
    np.testing.assert_allclose(embedded, np.stack([np.sin(numbers), np.cos(numbers)], 1).ravel(), atol=1e-5)
    with pytest.raises(ValueError, match="multiple of 8 channels, not 20"):
        geometry_embedding(box, size, channels=20, corners=True)
