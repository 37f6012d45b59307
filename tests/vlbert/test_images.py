import dataclasses
import io
from fractions import Fraction

import numpy as np
import pytest
import torch
from family import with_features
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny import TINY_MODEL, tiny_sample

from storage.sample import Regions
from vlbert.config import RegionConfig
from vlbert.data.images import prepare_image, resized_size

AS_STORED = TINY_MODEL.regions
PRECOMPUTED = dataclasses.replace(AS_STORED, features="precomputed", random_init=False)
LARGER = RegionConfig(short_side=128, long_side=400)


def test_an_image_of_the_right_size_is_only_decoded_and_boxes_grow_with_another():
    sample = tiny_sample(3)
    seen = prepare_image(sample, AS_STORED, flip=False)
    pillow = np.asarray(Image.open(io.BytesIO(sample.image)).convert("RGB")).transpose(2, 0, 1)
    assert seen.pixels.dtype == torch.uint8
    assert np.abs(seen.pixels.numpy().astype(int) - pillow).max() <= 3, "another JPEG decoder may round differently"
    np.testing.assert_array_equal(seen.boxes[1:], sample.regions.boxes)
    assert seen.boxes[0].tolist() == [0, 0, 95, 63]
    seen = prepare_image(sample, LARGER, flip=False)
    assert tuple(seen.pixels.shape) == (3, 128, 192)
    np.testing.assert_allclose(seen.boxes[1:], sample.regions.boxes * 2)
    assert seen.boxes[0].tolist() == [0, 0, 190, 126], "the whole image grows as they do"
    assert prepare_image(sample, LARGER, flip=True).boxes[0].tolist() == [1, 0, 191, 126]
    np.testing.assert_allclose(seen.place(np.array([[1, 2, 3, 4]])), [[2, 4, 6, 8]])
    more = prepare_image(sample, LARGER, flip=True).with_boxes(np.array([[1.0, 2, 3, 4]]))  # those of a task
    np.testing.assert_array_equal(more.to_input().boxes[3], [191 - 6, 4, 191 - 2, 8])
    with pytest.raises(ValueError, match="cannot join precomputed features"):
        prepare_image(with_features(sample), PRECOMPUTED, flip=False).with_boxes(np.zeros((1, 4)))


def test_flipped_boxes_stay_on_their_pixels():
    image = Image.new("RGB", (96, 64), (0, 0, 255))
    image.paste((255, 0, 0), (8, 16, 40, 48))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=95)
    sample = tiny_sample(0, regions=1)
    regions = Regions(np.array([[8, 16, 40, 48]], np.float32), np.ones(1, np.float32), np.ones(1, np.int32), "x", 0)
    sample = dataclasses.replace(sample, image=data.getvalue(), regions=regions)
    for flip, x in ((False, 8), (True, 96 - 1 - 40)):
        seen = prepare_image(sample, AS_STORED, flip)
        assert seen.boxes[1].tolist() == [x, 16, x + 32, 48]
        inside = seen.pixels[:, 20:44, x + 4 : x + 28].float().mean((1, 2))
        assert inside[0] > 230, "RGB: red is the first channel"
        assert inside[2] < 30
        assert (seen.pixels[:, :, :4] if not flip else seen.pixels[:, :, -4:]).float().mean((1, 2))[2] > 230


def test_the_whole_image_is_the_mean_of_unmasked_precomputed_features():
    sample = with_features(tiny_sample(1, regions=3))
    features = sample.regions.features.astype(np.float32)
    seen = prepare_image(dataclasses.replace(sample, image=b"never decoded"), PRECOMPUTED, flip=False)
    everything = seen.to_input()
    assert (everything.pixels, everything.size, everything.features.dtype) == (None, (96, 64), np.float32)
    np.testing.assert_allclose(everything.features, [features.mean(0), *features], rtol=1e-6)
    # Regions 0 and 1 fit into the row, 0 is masked: what did not fit still counts ...
    part = seen.to_input(np.array([False, True, False, False]), count=2)
    np.testing.assert_allclose(part.features, [features[1:].mean(0), *features[:2]], atol=2e-5)
    assert (part.masked.tolist(), len(part.boxes), len(part.covered)) == ([False, True, False], 3, 0)
    # ... and what did not fit and is masked covers its pixels.
    part = seen.to_input(np.array([False, True, False, True]), count=2)
    np.testing.assert_allclose(part.features[0], features[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(part.covered, everything.boxes[3:])
    assert np.isfinite(seen.to_input(np.array([False, True, True, True])).features).all()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 12), st.sampled_from([1000, 1200]))
@example(201, 402, 1, 1000)  # the exact ratio is an integer
@example(600, 1001, 1, 1000)  # by one pixel over the limit
@example(1, 5000, 1, 1000)  # no side is 0
def test_a_resized_image_has_the_integer_part_of_the_exact_ratio(side: int, other: int, ratio: int, long_side: int):
    for short, long in (sorted((side, other)), (side, side * ratio)):
        first = 600 if Fraction(600 * long, short) <= long_side else max(1, int(Fraction(long_side * short, long)))
        second = min(int(Fraction(first * long, short)), long_side)
        assert resized_size(short, long, 600, long_side) == (first, second)
        assert resized_size(long, short, 600, long_side) == (second, first)


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (AS_STORED, {"regions": None}, "has no regions; run the detection stage"),
        (AS_STORED, {"image": b"<html>"}, "its JPEG cannot be decoded"),
        (PRECOMPUTED, {}, "have no features, .* --keep_features, or train from"),
        (PRECOMPUTED, {"features": 7}, "have features of 7 channels, but the model takes 128"),
    ],
)
def test_a_sample_that_cannot_be_prepared_is_named(config: RegionConfig, change: dict, reason: str):
    sample = tiny_sample(1)
    if "features" in change:
        wide = np.zeros((len(sample.regions), change["features"]), np.float16)
        change = {"regions": dataclasses.replace(sample.regions, features=wide)}
    with pytest.raises(ValueError, match=f"sample {sample.key}.* {reason}"):
        prepare_image(dataclasses.replace(sample, **change), config, flip=False)
