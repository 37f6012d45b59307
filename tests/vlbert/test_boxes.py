import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlbert.data.boxes import flip_horizontally, geometry_embedding, masked_pixels

HEIGHT, WIDTH = 6, 8
FEW = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def boxes(draw: st.DrawFn) -> list[float]:
    x1, x2 = sorted(draw(st.lists(st.floats(0, WIDTH - 1, width=32), min_size=2, max_size=2)))
    y1, y2 = sorted(draw(st.lists(st.floats(0, HEIGHT - 1, width=32), min_size=2, max_size=2)))
    return [x1, y1, x2, y2]


@FEW
@given(st.lists(st.lists(st.tuples(boxes(), st.booleans()), min_size=3, max_size=3), min_size=1, max_size=2))
def test_masked_pixels_are_those_of_masked_boxes_of_the_same_image(images):
    found = masked_pixels(
        torch.tensor([[box for box, _ in image] for image in images]),
        torch.tensor([[masked for _, masked in image] for image in images]),
        HEIGHT,
        WIDTH,
    )
    expected = torch.zeros_like(found)
    for pixels, image in zip(expected, images, strict=True):
        for (x1, y1, x2, y2), masked in image:
            pixels[int(y1) : int(y2) + 1, int(x1) : int(x2) + 1] |= masked
    assert torch.equal(found, expected)


@FEW
@given(boxes())
def test_flipped_boxes_mask_the_flipped_columns(box):
    columns = np.floor(np.array([box], np.float32))
    mirrored = flip_horizontally(columns, WIDTH)
    np.testing.assert_array_equal(flip_horizontally(mirrored, WIDTH), columns)
    straight, flipped = (
        masked_pixels(torch.from_numpy(b)[None], torch.tensor([[True]]), HEIGHT, WIDTH)[0] for b in (columns, mirrored)
    )
    assert torch.equal(flipped, straight.flip(1))
    assert straight.any()


def test_the_papers_geometry_is_of_the_corners():
    box, size = torch.tensor([[20.0, 30.0, 60.0, 90.0]]), torch.tensor([[100, 200]])
    embedded = geometry_embedding(box, size, channels=8, corners=True)[0]  # one sine and one cosine a number
    numbers = 100 * np.array([0.2, 0.15, 0.6, 0.45])
    np.testing.assert_allclose(embedded, np.stack([np.sin(numbers), np.cos(numbers)], 1).ravel(), atol=1e-5)
    with pytest.raises(ValueError, match="20 channels; it needs a multiple of 8"):
        geometry_embedding(box, size, channels=20, corners=True)
