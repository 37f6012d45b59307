"""Turn a stored sample into image input: decode, resize and mirror its JPEG, and transform its boxes to match."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from storage.sample import Sample
from training.operators import decode_jpeg
from vlbert.config import RegionConfig
from vlbert.data.batch import ImageInput
from vlbert.data.boxes import box_iou_with_borders, flip_horizontally


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """The image of a sample, resized for the model, and its boxes.

    Attributes:
        size: (width, height) of the resized image.
        boxes: float32 [1 + r, 4], xyxy in resized pixels. Row 0 is the whole image, rows 1 to r are its regions.
        scale: resized pixels per stored pixel, horizontally and vertically.
        flipped: whether the image is mirrored.
        pixels: uint8 [3, h, w], RGB; None with precomputed features.
        features: float32 [r, D], precomputed features of the regions; None if the model computes them from pixels.
        exact: whether boxes are as stored, except for scale: not clipped, and mirrored without a pixel's width.
    """

    size: tuple[int, int]
    boxes: np.ndarray
    scale: tuple[float, float]
    flipped: bool
    pixels: Tensor | None = None
    features: np.ndarray | None = None
    exact: bool = False

    def place(self, boxes: np.ndarray) -> np.ndarray:
        """Convert boxes [n, 4] from stored to resized pixels, as those of the image. Return float32 [n, 4]."""
        return _place(boxes, self.scale, self.flipped, *self.size, self.exact)

    def with_boxes(self, boxes: np.ndarray) -> "PreparedImage":
        """Return a copy with `boxes` added, [n, 4] in stored pixels. Raises ValueError with precomputed features."""
        if self.features is not None:
            raise ValueError("boxes cannot join precomputed features; set model.regions.features=end_to_end")
        return dataclasses.replace(self, boxes=np.concatenate([self.boxes, self.place(boxes)]))

    def with_matched_features(self, boxes: np.ndarray, keep_unmatched: bool) -> "PreparedImage":
        """Return a copy whose regions are these boxes, [n, 4] in stored pixels.

        Each box gets the precomputed features of the region that overlaps it most (Unicoder-VL, 4.2), or of the first
        region if none overlaps. If `keep_unmatched`, regions that match no box are appended until the copy has as many
        regions as the original. Raises ValueError if the image has no regions.
        """
        assert self.features is not None
        if len(self.boxes) == 1:
            raise ValueError("it has no region whose features an object could take; detect with selection.minimum=10")
        placed, regions = self.place(boxes), self.boxes[1:]
        overlap = box_iou_with_borders(torch.from_numpy(placed), torch.from_numpy(regions)).numpy()
        matched = overlap.argmax(axis=1)
        rest = np.setdiff1d(np.arange(len(regions)), matched[overlap.max(axis=1) > 0])
        rest = rest[: max(0, len(regions) - len(placed))] if keep_unmatched else rest[:0]
        return dataclasses.replace(
            self,
            boxes=np.concatenate([self.boxes[:1], placed, regions[rest]]),
            features=np.concatenate([self.features[matched], self.features[rest]]),
        )

    def to_input(self, masked: np.ndarray | None = None, count: int | None = None, **more: Any) -> ImageInput:
        """Return the ImageInput of the whole image and its first `count` regions (None: all).

        `masked` is bool [1 + r], True for regions to mask. As in the published code, this also affects regions after
        the first `count`: their pixels are masked, too. The precomputed features of the whole image are the mean over
        all regions that are not masked. `more` sets other fields of the ImageInput.
        """
        count = len(self.boxes) - 1 if count is None else count
        masked = np.zeros(len(self.boxes), bool) if masked is None else masked
        features = None
        if self.features is not None:
            visible = self.features.sum(axis=0, keepdims=True)
            whole_image = visible / max(1, len(self.features))
            if masked.any():
                visible = visible - self.features[masked[1:]].sum(axis=0)
                whole_image = visible / (len(self.features) - masked.sum() + 1e-5)
            features = np.concatenate([whole_image, self.features[:count]]).astype(np.float32)
        return ImageInput(
            boxes=self.boxes[: 1 + count],
            masked=masked[: 1 + count],
            covered=self.boxes[1 + count :][masked[1 + count :]],
            size=self.size,
            pixels=self.pixels,
            features=features,
            **more,
        )


def prepare_image(sample: Sample, config: RegionConfig, flip: bool) -> PreparedImage:
    """Decode a sample's image, resize it (see `resized_size`), and mirror it if `flip` is True.

    With precomputed features, only the boxes are transformed and no image is decoded; if they are exact
    (ExactRegionConfig), the image keeps its size. Raises ValueError, naming the
    sample, if it has no regions, if its features are missing or of another size, or if its JPEG cannot be decoded.
    """
    regions = sample.require_regions()
    stored = (sample.width, sample.height)
    pixels, features = None, None
    if config.features == "precomputed":
        features = _read_features(sample.key, regions.features, config)
    else:
        pixels = _decode(sample)
        stored = (pixels.shape[2], pixels.shape[1])
    height, width = resized_size(*stored[::-1], config.short_side, config.long_side)
    if config.exact_boxes and pixels is None:
        width, height = stored
    if pixels is not None and (width, height) != stored:
        # Resizing uint8 is several times faster on a channels-last view.
        pixels = pixels[None].contiguous(memory_format=torch.channels_last)
        pixels = interpolate(pixels, (height, width), mode="bilinear", antialias=True)[0].contiguous()
    if pixels is not None and flip:
        pixels = pixels.flip(2)
    scale = (width / stored[0], height / stored[1])
    # As in the authors' code, the whole image is a box in stored pixels and transformed like the others.
    edge = 0 if config.exact_boxes else 1
    whole_image = np.array([[0, 0, stored[0] - edge, stored[1] - edge]], np.float32)
    boxes = _place(np.concatenate([whole_image, regions.boxes]), scale, flip, width, height, config.exact_boxes)
    return PreparedImage((width, height), boxes, scale, flip, pixels, features, config.exact_boxes)


def _read_features(key: str, features: np.ndarray | None, config: RegionConfig) -> np.ndarray:
    if features is None or features.shape[1] != config.channels:
        present = "no features" if features is None else f"features of {features.shape[1]} channels"
        raise ValueError(
            f"the regions of sample {key} have {present}, but the model takes {config.channels} channels; "
            "detect with --keep_features, or train from pixels: --model.regions.features=end_to_end"
        )
    return features.astype(np.float32)


def _decode(sample: Sample) -> Tensor:
    try:
        return decode_jpeg(sample.image)
    except RuntimeError as error:
        raise ValueError(f"sample {sample.key}: its JPEG cannot be decoded: {error}") from error


def swap_sides(text: str) -> str:
    """Swap the words "left" and "right" in a text, for use with a mirrored image. The swapped words are lower-case."""
    sides = {"left": "right", "right": "left"}
    return re.sub(r"\b(left|right)\b", lambda word: sides[word[0].lower()], text, flags=re.IGNORECASE)


def resized_size(height: int, width: int, short_side: int, long_side: int) -> tuple[int, int]:
    """Return (height, width) after resizing the shorter side to `short_side`, or less to keep within `long_side`.

    Sides are rounded down, and are at least 1.
    """
    # In integers, because a floating-point quotient may lose a pixel.
    short, long = min(height, width), max(height, width)
    if short_side * long > long_side * short:
        short_side = max(1, long_side * short // long)
    other = min(short_side * long // short, long_side)
    return (short_side, other) if height <= width else (other, short_side)


def _place(
    boxes: np.ndarray, scale: tuple[float, float], flip: bool, width: int, height: int, exact: bool
) -> np.ndarray:
    placed = boxes * np.array([*scale, *scale], np.float32)
    if flip:
        placed = flip_horizontally(placed, width + exact)
    if exact:
        return placed.astype(np.float32)
    return np.clip(placed, 0, [width - 1, height - 1, width - 1, height - 1]).astype(np.float32)
