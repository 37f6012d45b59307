import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlbert.data.batch import Example, ImageInput, TextInput, collate, make_placeholder, select


def words(length: int, labelled: list[int]) -> TextInput:
    zeros = np.zeros(length, np.int64)
    mask = np.isin(np.arange(length), labelled)
    return TextInput(
        np.arange(1, length + 1), zeros, zeros, {"word_label_mask": mask}, {"words": np.array(labelled, np.int64)}
    )


def image_input(regions: int, height: int, width: int) -> ImageInput:
    boxes = np.arange(4 * regions, dtype=np.float32).reshape(regions, 4)
    masked = np.arange(regions) == 1
    pixels = torch.full((3, height, width), regions, dtype=torch.uint8)
    return ImageInput(boxes, masked, (width, height), pixels, label_masks={"region_label_mask": masked})


def precomputed(regions: int, channels: int = 2) -> ImageInput:
    """As `image_input`, of the same sizes: region r of an image with n regions has features n + r / 10."""
    features = np.float32(regions + np.arange(regions) / 10)[:, None].repeat(channels, axis=1)
    return dataclasses.replace(image_input(regions, 4, 6), pixels=None, features=features)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=5))
@example([(8, 12), (12, 8), (9, 12), (12, 7), (7, 11)])
@example([(12, 18), (13, 18), (12, 19)])  # two groups would save 7 %
def test_images_form_two_groups_where_that_saves_a_tenth_of_the_pixels(sizes):
    """Sizes are (height, width). The groups are the best that there are, and pixels, sizes and rows stay together."""

    def padded(numbers) -> int:
        return len(numbers) * max(sizes[n][0] for n in numbers) * max(sizes[n][1] for n in numbers) if numbers else 0

    batch = collate([Example(str(n), words(1, []), image_input(n + 1, *size)) for n, size in enumerate(sizes)])
    found = sum(group.shape[0] * group.shape[2] * group.shape[3] for group in batch.pixels)
    one, tall_first = padded(range(len(sizes))), sorted(range(len(sizes)), key=lambda n: sizes[n][1] - sizes[n][0])
    best = min(padded(tall_first[:cut]) + padded(tall_first[cut:]) for cut in range(len(sizes)))
    assert found == (best if best <= 0.9 * one else one)
    assert len(batch.pixels) == (2 if best <= 0.9 * one else 1)
    for row, (height, width) in enumerate(sizes):
        number = batch.image_of[row]
        assert batch.image_rows[number] == row
        assert batch.image_sizes[number].tolist() == [width, height]
        assert torch.equal(batch.image(number), torch.full((3, height, width), row + 1, dtype=torch.uint8))
    assert sum(int(group.sum()) for group in batch.pixels) == 3 * sum((n + 1) * h * w for n, (h, w) in enumerate(sizes))


def test_what_belongs_to_the_regions_of_an_image_stands_there_once_in_image_order():
    cells = np.arange(2 * 3 * 3, dtype=np.float32).reshape(2, 3, 3)
    first = dataclasses.replace(precomputed(2), cells=cells, classes=np.array([0, 7]))
    second = dataclasses.replace(precomputed(3), cells=np.ones((3, 3, 3), np.float32))
    batch = collate([Example("a", words(3, []), first, more=(words(2, []),)), Example("b", words(2, []), second)])
    np.testing.assert_allclose(batch.features[:, 1], [2, 2.1, 3, 3.1, 3.2])
    assert tuple(batch.cells.shape) == (5, 3, 3)
    np.testing.assert_array_equal(batch.cells[:2], cells)
    assert batch.region_classes.tolist() == [[0, 7, 0], [0, 7, 0], [0, 0, 0]]
    assert batch.pixels == ()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 6), st.sets(st.integers(0, 5))), min_size=1, max_size=3),
            st.integers(0, 4),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
@example([([(3, {0, 2})], 2, True, True), ([(6, {5})], 0, True, False), ([(1, set()), (2, {1})], 4, False, False)])
def test_index_lists_and_sizes_say_what_the_masks_say_and_rows_keep_their_content(rows):
    """Of each example: length and labels of its texts, its regions, whether the image is tall, whether it counts."""
    examples = []
    for texts, regions, tall, counted in rows:
        first, *more = (words(length, [i for i in labelled if i < length]) for length, labelled in texts)
        image = image_input(regions, *((30, 5) if tall else (5, 30))) if regions else None
        found = Example("e", first, image, more=tuple(more))
        examples.append(found if counted else make_placeholder(found))
    batch = collate(examples)
    assert list(batch.sizes.tokens) == batch.text_mask.sum(1).tolist()
    assert list(batch.sizes.regions) == batch.region_mask.sum(1).tolist()
    assert [list(size) for size in batch.sizes.images] == batch.image_sizes.tolist()
    images, numbers = batch.region_mask[batch.image_rows].nonzero(as_tuple=True)
    assert [x.tolist() for x in batch.image_and_number()] == [images.tolist(), numbers.tolist()]
    boxes = batch.boxes[batch.image_rows][batch.region_mask[batch.image_rows]]
    torch.testing.assert_close(batch.of_real_regions(batch.boxes), boxes)
    owners = [example for example in examples for _ in example.texts]
    assert batch.keys == ["e"] * len(examples)
    assert [number >= 0 for number in batch.image_of.tolist()] == [example.image is not None for example in owners]
    assert not batch.tokens[~batch.text_mask].any()
    assert batch.counted.tolist() == [row for row, example in enumerate(owners) if example.counted]
    texts, images = [text for example in examples for text in example.texts], [example.image for example in owners]
    for row, (text, image) in enumerate(zip(texts, images, strict=True)):
        assert batch.tokens[row][batch.text_mask[row]].tolist() == text.tokens.tolist()
        assert batch.boxes[row][batch.region_mask[row]].tolist() == (image.boxes.tolist() if image else [])
    for name, parts, width in (
        ("word_label_mask", texts, batch.tokens.shape[1]),
        ("region_label_mask", images, batch.boxes.shape[1]),
    ):
        labels = [part.label_masks[name].nonzero()[0] if part else [] for part in parts]
        places = [row * width + place for row, of_row in enumerate(labels) for place in of_row]
        if any(parts):
            assert batch.labelled[name].tolist() == places
            assert list(batch.sizes.labelled[name]) == [len(of_row) for of_row in labels]
            numbered = torch.arange(len(parts) * width).view(-1, width, 1)
            assert select(numbered, batch.labelled[name])[:, 0].tolist() == places
    found = batch.tokens.flatten()[batch.labelled["word_label_mask"]]
    assert torch.equal(found, 1 + batch.labels["words"]), "each label's token"


def test_examples_that_do_not_fit_together_are_refused():
    whole = dataclasses.replace(image_input(2, 4, 6), features=np.ones((2, 2)), cells=np.ones((2, 3, 3)))
    given = Example("a", words(3, [1]), whole)
    unmasked = dataclasses.replace(given.text, label_masks={})
    for other, named in (
        ({"image": dataclasses.replace(whole, pixels=None)}, "1 of 2 .* have no pixels"),
        ({"image": dataclasses.replace(whole, features=None)}, "1 of 2 .* have no features"),
        ({"image": dataclasses.replace(whole, cells=None)}, "1 of 2 .* have no cells"),
        ({"text": unmasked}, "have different label_masks"),
    ):
        with pytest.raises(ValueError, match=named):
            collate([given, dataclasses.replace(given, **other)])
