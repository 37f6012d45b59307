"""From a stored JPEG to what the model sees of it: decoded, resized, perhaps mirrored, its boxes moved along."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2.functional import InterpolationMode, resize

from storage.sample import Sample
from vlbert.boxes import flip_horizontally
from vlbert.config import RegionConfig


@dataclass(frozen=True, eq=False)
class View:
    """One sample's picture as a model sees it.

    pixels  uint8 [3, h, w]     RGB
    boxes   float32 [1 + r, 4]  in those pixels; row 0 is the whole image, then the sample's regions in their order
    """

    pixels: Tensor
    boxes: np.ndarray
    scale: tuple[float, float]  # view pixels per stored pixel, across and down
    flipped: bool

    def place(self, boxes: np.ndarray) -> np.ndarray:
        """Boxes [n, 4] in stored pixels -> float32 [n, 4] in view pixels, clipped to the picture."""
        return _place(boxes, self.scale, self.flipped, self.pixels.shape[2], self.pixels.shape[1])


def view(sample: Sample, config: RegionConfig, flip: bool) -> View:
    """Decode, resize (short side to config.short_side unless the long side would pass its limit), mirror if `flip`.

    ValueError names the sample where it has no regions or its JPEG does not decode.
    """
    if sample.regions is None:
        raise ValueError(f"sample {sample.key} has no regions; run the detection stage on its shard first")
    try:
        pixels = decode_jpeg(torch.frombuffer(bytearray(sample.image), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError as error:
        raise ValueError(f"sample {sample.key} ({sample.url}): its JPEG does not decode: {error}") from error
    stored_height, stored_width = pixels.shape[1:]
    height, width = resized(stored_height, stored_width, config.short_side, config.long_side)
    if (height, width) != (stored_height, stored_width):
        # Resizing uint8 is several times faster on a channels-last view.
        pixels = pixels[None].contiguous(memory_format=torch.channels_last)
        pixels = resize(pixels, [height, width], InterpolationMode.BILINEAR, antialias=True)[0].contiguous()
    if flip:
        pixels = pixels.flip(2)
    scale = (width / stored_width, height / stored_height)
    whole_image = np.array([[0, 0, width - 1, height - 1]], np.float32)
    boxes = np.concatenate([whole_image, _place(sample.regions.boxes, scale, flip, width, height)])
    return View(pixels, boxes, scale, flip)


def resized(height: int, width: int, short_side: int, long_side: int) -> tuple[int, int]:
    """(height, width) after resizing: short side `short_side`, or less where the long side would pass `long_side`."""
    short, long = min(height, width), max(height, width)
    if short_side * long > long_side * short:
        short_side = max(1, long_side * short // long)
    factor = short_side / short
    return tuple(short_side if side == short else int(side * factor) for side in (height, width))


def _place(boxes: np.ndarray, scale: tuple[float, float], flip: bool, width: int, height: int) -> np.ndarray:
    placed = boxes * np.array([*scale, *scale], np.float32)
    if flip:
        placed = flip_horizontally(placed, width)
    return np.clip(placed, 0, [width - 1, height - 1, width - 1, height - 1]).astype(np.float32)
