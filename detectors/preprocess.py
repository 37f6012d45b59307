"""An image's way to the network: decoded to BGR, resized, and less the mean of each channel.

Shape letters: N images, H W pixels of the network's input.
"""

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from detectors.faster_rcnn import FasterRCNNConfig
from storage.collect.normalise import STORED_FORMATS

# Pixels that the stem needs each way: its convolution and an unpadded pool leave nothing of fewer.
NARROWEST_INPUT = 3
# What Pillow raises for a file that is no complete image.
BAD_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
PIXEL_MEAN_BGR = (102.9801, 115.9465, 122.7717)


def decode_bgr(data: bytes) -> np.ndarray:
    """uint8 [height, width, 3], BGR, of a stored image: JPEG or PNG, RGB or grey, 8 bits.

    ValueError for other pixels; OSError, or what else Pillow raises, where the image is not complete.
    """
    with Image.open(io.BytesIO(data), formats=STORED_FORMATS) as image:
        if image.mode not in ("RGB", "L"):
            raise ValueError(f"its pixels are {image.mode}, those of a shard are RGB or L: collect it again")
        return np.asarray(image.convert("RGB"))[:, :, ::-1]


def resize_scale(height: int, width: int, config: FasterRCNNConfig) -> float:
    """The factor from the image's sides to the input's: short_side, with the cap long_side."""
    scale = config.short_side / min(height, width)
    long_side = max(height, width) * scale
    if config.resize == "caffe":
        long_side = round(long_side)  # Caffe's long side may pass the cap by less than half a pixel
    return config.long_side / max(height, width) if long_side > config.long_side else scale


def resized_size(height: int, width: int, config: FasterRCNNConfig) -> tuple[int, int]:
    """Height and width of the network's input. Half a pixel is rounded up; for `caffe` to even, as cv2 does."""
    if config.resize == "caffe":
        scale = resize_scale(height, width, config)
        return max(1, round(height * scale)), max(1, round(width * scale))
    # As in detectron2: first the short side, then the cap, each a factor in floating point. For an image of 1280x720
    # the product of both gives a height of 562.4999... in place of 562.5, which changes the rounding.
    scale = config.short_side / min(height, width)
    sides = (config.short_side, width * scale) if height < width else (height * scale, config.short_side)
    if max(sides) > config.long_side:
        cap = config.long_side / max(sides)
        sides = sides[0] * cap, sides[1] * cap
    return max(1, int(sides[0] + 0.5)), max(1, int(sides[1] + 0.5))


def resize(image_bgr: np.ndarray, config: FasterRCNNConfig) -> np.ndarray:
    """uint8 BGR pixels of any size -> [H, W, 3], uint8 or, with `caffe`, float32 of 0..255."""
    sides = image_bgr.shape[:2]
    height, width = resized_size(*sides, config)
    if config.resize == "pil":
        return np.asarray(Image.fromarray(image_bgr).resize((width, height), Image.Resampling.BILINEAR))
    scale = resize_scale(*sides, config)
    rows = _interpolated(image_bgr.astype(np.float32), height, scale)
    return _interpolated(rows.transpose(1, 0, 2), width, scale).transpose(1, 0, 2)


def _interpolated(pixels: np.ndarray, length: int, scale: float) -> np.ndarray:
    """The first axis of float32 [n, ...] resized to `length` by linear interpolation between pixel centres."""
    positions = np.clip((np.arange(length) + 0.5) / scale - 0.5, 0, len(pixels) - 1)
    before = positions.astype(np.int64)
    after = np.minimum(before + 1, len(pixels) - 1)
    share = (positions - before).astype(np.float32).reshape(-1, *[1] * (pixels.ndim - 1))
    return pixels[before] * (1 - share) + pixels[after] * share


def to_input(resized_bgr: np.ndarray | Tensor, device: torch.device | str | None = None) -> Tensor:
    """BGR [H, W, 3] or [N, H, W, 3] -> float32 [N, 3, H, W], minus the mean of each channel; 0..255, not divided."""
    if isinstance(resized_bgr, np.ndarray):
        resized_bgr = torch.from_numpy(np.array(resized_bgr, order="C"))
    pixels = resized_bgr.to(device)
    pixels = pixels.reshape(-1, *pixels.shape[-3:]).permute(0, 3, 1, 2).float()
    return pixels - torch.tensor(PIXEL_MEAN_BGR, device=pixels.device)[None, :, None, None]
