"""Preprocessing of images for the network: decode to BGR, resize, subtract the mean of each channel.

Shape letters: N images, H W pixels of the network's input.
"""

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from detectors.faster_rcnn import FasterRCNNConfig
from storage.collect.normalise import STORED_FORMATS

# Smallest height and width of an input: with fewer pixels, the stem's convolution and unpadded pooling give no output.
NARROWEST_INPUT = 3
# Exceptions that Pillow raises for an invalid or incomplete image.
BAD_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
PIXEL_MEAN_BGR = (102.9801, 115.9465, 122.7717)


def decode_bgr(data: bytes) -> np.ndarray:
    """Decode a stored image (JPEG or PNG, RGB or grey, 8 bits) to BGR pixels, uint8 [height, width, 3].

    Raises one of the exceptions in BAD_IMAGE if the image is incomplete or has an unsupported mode.
    """
    with Image.open(io.BytesIO(data), formats=STORED_FORMATS) as image:
        if image.mode not in ("RGB", "L"):
            raise ValueError(f"its mode is {image.mode}, but images of a shard are RGB or L; collect it again")
        return np.asarray(image.convert("RGB"))[:, :, ::-1]


def resize_scale(height: int, width: int, config: FasterRCNNConfig) -> float:
    """Return the scale at which the shorter side is short_side, or less if the longer side would exceed long_side."""
    scale = config.short_side / min(height, width)
    long_side = max(height, width) * scale
    if config.resize == "caffe":
        long_side = round(long_side)  # Caffe's long side may exceed long_side by less than half a pixel
    return config.long_side / max(height, width) if long_side > config.long_side else scale


def resized_size(height: int, width: int, config: FasterRCNNConfig) -> tuple[int, int]:
    """Return the height and width to which an image is resized for the network.

    Sizes are rounded to integers. Halves are rounded up or, with `caffe` resizing, to the even integer, as in cv2.
    """
    if config.resize == "caffe":
        scale = resize_scale(height, width, config)
        return max(1, round(height * scale)), max(1, round(width * scale))
    # As in detectron2, scale to short_side first and to long_side second. For an image of 1280x720, the product of both
    # factors would give a height of 562.4999... instead of 562.5, which changes the rounding.
    scale = config.short_side / min(height, width)
    sides = (config.short_side, width * scale) if height < width else (height * scale, config.short_side)
    if max(sides) > config.long_side:
        cap = config.long_side / max(sides)
        sides = sides[0] * cap, sides[1] * cap
    return max(1, int(sides[0] + 0.5)), max(1, int(sides[1] + 0.5))


def resize(image_bgr: np.ndarray, config: FasterRCNNConfig) -> np.ndarray:
    """Resize BGR pixels, uint8 [height, width, 3], to the network's input size [H, W, 3].

    The result is uint8 or, with `caffe` resizing, float32 from 0 to 255.
    """
    sides = image_bgr.shape[:2]
    height, width = resized_size(*sides, config)
    if config.resize == "pil":
        return np.asarray(Image.fromarray(image_bgr).resize((width, height), Image.Resampling.BILINEAR))
    scale = resize_scale(*sides, config)
    rows = _interpolate(image_bgr.astype(np.float32), height, scale)
    return _interpolate(rows.transpose(1, 0, 2), width, scale).transpose(1, 0, 2)


def _interpolate(pixels: np.ndarray, length: int, scale: float) -> np.ndarray:
    """Resize the first axis of float32 [n, ...] to `length` by linear interpolation between pixel centres."""
    positions = np.clip((np.arange(length) + 0.5) / scale - 0.5, 0, len(pixels) - 1)
    before = positions.astype(np.int64)
    after = np.minimum(before + 1, len(pixels) - 1)
    share = (positions - before).astype(np.float32).reshape(-1, *[1] * (pixels.ndim - 1))
    return pixels[before] * (1 - share) + pixels[after] * share


def to_input(resized_bgr: np.ndarray | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Return the network's input, float32 [N, 3, H, W]: the pixels minus the channel means.

    `resized_bgr` is [H, W, 3] or [N, H, W, 3], from 0 to 255.
    """
    if isinstance(resized_bgr, np.ndarray):
        resized_bgr = torch.from_numpy(np.array(resized_bgr, order="C"))
    pixels = resized_bgr.to(device)
    pixels = pixels.reshape(-1, *pixels.shape[-3:]).permute(0, 3, 1, 2).float()
    return pixels - torch.tensor(PIXEL_MEAN_BGR, device=pixels.device)[None, :, None, None]
