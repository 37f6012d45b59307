"""Features of regions from batches whose images form groups by shape."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detectors.resnet import ResNetConfig
from vlbert.config import RegionConfig
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.model.fast_rcnn import FastRCNN

CONFIG = RegionConfig(resnet=ResNetConfig(blocks=(1, 1, 1, 1), width=8), roi_size=3, random_init=True)
SIZES = [(96, 64), (64, 112), (90, 60), (48, 96), (96, 64)]  # width, height


def network(masking: str = "pixels", **changes: object) -> FastRCNN:
    torch.manual_seed(0)
    made = FastRCNN(dataclasses.replace(CONFIG, masking=masking, **changes))
    for name, tensor in made.named_buffers():
        if name.endswith("running_mean"):
            tensor.normal_(generator=torch.Generator().manual_seed(1))
    return made


def examples() -> list[Example]:
    """Images of two shapes among texts; each has regions, some of them masked, and another box whose pixels are."""
    generator = np.random.default_rng(0)
    text = TextInput(*[np.zeros(3, np.int64)] * 3)
    found = [Example("text", text)]
    for number, (width, height) in enumerate(SIZES):
        low = generator.uniform(0, 0.6, (3 + number % 2, 2)) * (width, height)
        sides = generator.uniform(0.2, 0.4, low.shape) * (width, height)
        boxes = np.concatenate([low, low + sides], axis=1).astype(np.float32)
        boxes[0] = 0, 0, width - 1, height - 1
        image = ImageInput(
            boxes=boxes,
            masked=np.arange(len(boxes)) == 2,
            size=(width, height),
            pixels=torch.from_numpy(generator.integers(0, 256, (3, height, width), dtype=np.uint8)),
            covered=boxes[1:2] / 2,
            cells=generator.uniform(0, 1, (len(boxes), 3, 3)).astype(np.float32),
        )
        found.append(Example(str(number), text, image, more=(text,)))
    return found


def of_each_row(seen: Tensor, batch: Batch) -> list[Tensor]:
    """The regions of each row with an image, from those of all images in their order."""
    images = seen.split(batch.region_mask[batch.image_rows].sum(1).tolist())
    return [images[number] for number in batch.image_of.tolist() if number >= 0]


@pytest.mark.parametrize("masking", ["pixels", "features"])
def test_region_features_are_the_same_in_a_group_and_alone(masking):
    fast_rcnn, given = network(masking).eval(), examples()
    batch = collate(given)
    assert [len(group) for group in batch.pixels] == [2, 3]
    with torch.no_grad():
        inputs = fast_rcnn.network_input(batch)
        together = of_each_row(fast_rcnn(batch), batch)
        alone = [of_each_row(fast_rcnn(one), one)[0] for one in (collate([e]) for e in given[1:]) for _ in range(2)]
    images = [image for group in inputs for image in group]
    for example in given[1:]:
        row = batch.keys.index(example.key) * 2 - 1
        own = fast_rcnn.network_input(collate([example]))[0][0]
        seen = images[batch.image_of[row]]
        height, width = own.shape[1:]
        assert torch.equal(seen[:, :height, :width], own), "with the same pixels masked"
        assert not seen[:, height:].any()
        assert not seen[:, :, width:].any()
    same_size = [row for row, (width, height) in enumerate(np.repeat(SIZES, 2, axis=0).tolist()) if width == 96]
    for row, (found, expected) in enumerate(zip(together, alone, strict=True)):
        assert found.shape == expected.shape
        # Cells near the border see where an image ends among larger ones; the others are as they are alone.
        tolerance = 1e-5 if row in same_size else 0.35
        assert (found - expected).norm() <= tolerance * expected.norm(), row


@pytest.mark.parametrize("padding", ["batch", "fixed"])
def test_a_padded_image_is_computed_among_zeros(padding):
    """Of the batch's largest image, or, whatever the batch, of the longest sides, wide or upright."""
    plain, padded = network().eval(), network(padding=padding, short_side=96, long_side=128).eval()
    batch = collate(examples())
    shapes = {tuple(group.shape[2:]) for group in padded.network_input(batch)}
    assert shapes == ({(112, 96)} if padding == "batch" else {(96, 128), (128, 96)})
    with torch.no_grad():
        together = of_each_row(padded(batch), batch)
        for row, example in enumerate(e for e in examples()[1:] for _ in e.texts):
            alone = collate([example])
            (own,) = plain.network_input(alone)
            upright = example.image.size[1] > example.image.size[0]
            height, width = (112, 96) if padding == "batch" else (128, 96) if upright else (96, 128)
            own = F.pad(own, (0, width - own.shape[3], 0, height - own.shape[2]))
            torch.testing.assert_close(together[row], padded.appearance([own], alone), rtol=1e-4, atol=1e-5)


def test_live_norms_take_statistics_of_all_images_at_once():
    resnet = dataclasses.replace(CONFIG.resnet, norm="batch")
    torch.manual_seed(0)
    made = FastRCNN(dataclasses.replace(CONFIG, resnet=resnet, frozen_stages=0)).train()
    batch = collate(examples())
    assert len(batch.pixels) == 2
    norm, conv = made.backbone.stem.conv1.norm, made.backbone.stem.conv1
    (pixels,) = made.network_input(batch)
    expected = 0.1 * torch.nn.functional.conv2d(pixels, conv.weight, stride=2, padding=3).mean(dim=(0, 2, 3))
    made(batch)
    assert int(norm.num_batches_tracked) == 1
    torch.testing.assert_close(norm.running_mean, expected, rtol=1e-4, atol=1e-4)


def test_a_batch_that_does_not_fit_is_refused_by_name():
    given = examples()
    blind = [dataclasses.replace(e, image=dataclasses.replace(e.image, pixels=None)) for e in given[1:]]
    small = network(padding="fixed", short_side=64, long_side=96)
    for fast_rcnn, shown, named in (
        (network(), blind, r"the batch with sample 0 has pixels of 0 of its 5 images, .*end_to_end"),
        (small, given, r"sample text has 64 x 112 pixels, but .*padding=fixed takes at most 64 x 96"),
    ):
        with pytest.raises(ValueError, match=named):
            fast_rcnn(collate(shown))
