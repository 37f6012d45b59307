"""From a stored JPEG to the model's input: decode, resize, perhaps mirror, and move the boxes along."""

import dataclasses
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2.functional import InterpolationMode, resize

from storage.sample import Sample
from vlbert.config import RegionConfig
from vlbert.data.batch import ImageInput
from vlbert.data.boxes import box_iou_with_borders, flip_horizontally


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """The image of a sample, resized for the model, and its boxes.

    size      (width, height)     of the resized image
    boxes     float32 [1 + r, 4]  in its pixels; row 0 is the whole image, then the sample's regions in their order
    pixels    uint8 [3, h, w]     RGB; None where features are precomputed
    features  float32 [r, D]      precomputed, of the sample's regions; None end to end
    """

    size: tuple[int, int]
    boxes: np.ndarray
    scale: tuple[float, float]  # resized pixels per stored pixel, across and down
    flipped: bool
    pixels: Tensor | None = None
    features: np.ndarray | None = None

    def place(self, boxes: np.ndarray) -> np.ndarray:
        """Boxes [n, 4] in stored pixels -> float32 [n, 4] in resized pixels, clipped to the image."""
        return _place(boxes, self.scale, self.flipped, *self.size)

    def with_boxes(self, boxes: np.ndarray) -> "PreparedImage":
        """The image with more regions behind its own: boxes [n, 4] in stored pixels. Not precomputed."""
        if self.features is not None:
            raise ValueError("boxes cannot join precomputed features; train from pixels: model.regions.features")
        return dataclasses.replace(self, boxes=np.concatenate([self.boxes, self.place(boxes)]))

    def matched(self, boxes: np.ndarray, others: bool) -> "PreparedImage":
        """The image with other regions, for precomputed features: boxes [n, 4] in stored pixels, each with the features
        of the own region that overlaps it most (Unicoder-VL, 4.2), or of the first where none does. others: behind them
        own regions that no box took, as long as there are no more regions than before. ValueError where the image has
        none.
        """
        if len(self.boxes) == 1:
            raise ValueError("it has no region whose features an object could take; detect with selection.minimum=10")
        placed, own = self.place(boxes), self.boxes[1:]
        overlap = box_iou_with_borders(torch.from_numpy(placed), torch.from_numpy(own)).numpy()
        taken = overlap.argmax(axis=1)
        rest = np.setdiff1d(np.arange(len(own)), taken[overlap.max(axis=1) > 0])
        rest = rest[: max(0, len(own) - len(placed))] if others else rest[:0]
        return dataclasses.replace(
            self,
            boxes=np.concatenate([self.boxes[:1], placed, own[rest]]),
            features=np.concatenate([self.features[taken], self.features[rest]]),
        )

    def to_input(
        self, masked: np.ndarray | None = None, count: int | None = None, **more: np.ndarray | dict | None
    ) -> ImageInput:
        """The ImageInput of the whole image and the first `count` of r regions; `masked`, bool [1 + r], says which are.

        As published, those behind the first `count` matter too: their pixels are masked where they are, and,
        precomputed, the whole image's vector is the mean over all that are not. `more`: further fields of ImageInput.
        """
        count = len(self.boxes) - 1 if count is None else count
        masked = np.zeros(len(self.boxes), bool) if masked is None else masked
        features = None
        if self.features is not None:
            left = self.features.sum(axis=0, keepdims=True)
            whole_image = left / max(1, len(self.features))
            if masked.any():
                left = left - self.features[masked[1:]].sum(axis=0)
                whole_image = left / (len(self.features) - masked.sum() + 1e-5)
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
    """Decode, resize (short side to config.short_side unless the long side would pass its limit), mirror if `flip`.

    With precomputed features nothing is decoded: boxes are placed as if it were, and features stay as they are.
    ValueError names the sample where it has no regions or no features, or its JPEG does not decode.
    """
    if sample.regions is None:
        raise ValueError(f"sample {sample.key} has no regions; run the detection stage on its shard first")
    stored = (sample.width, sample.height)
    pixels, features = None, None
    if config.features == "precomputed":
        features = _features(sample, config)
    else:
        pixels = _decode(sample)
        stored = (pixels.shape[2], pixels.shape[1])
    height, width = resized(*stored[::-1], config.short_side, config.long_side)
    if pixels is not None and (width, height) != stored:
        # Resizing uint8 is several times faster on a channels-last view.
        pixels = pixels[None].contiguous(memory_format=torch.channels_last)
        pixels = resize(pixels, [height, width], InterpolationMode.BILINEAR, antialias=True)[0].contiguous()
    if pixels is not None and flip:
        pixels = pixels.flip(2)
    scale = (width / stored[0], height / stored[1])
    # The whole image is a box of the stored one, resized and mirrored as all are: as the authors' code has it.
    whole_image = np.array([[0, 0, stored[0] - 1, stored[1] - 1]], np.float32)
    boxes = _place(np.concatenate([whole_image, sample.regions.boxes]), scale, flip, width, height)
    return PreparedImage((width, height), boxes, scale, flip, pixels, features)


def _features(sample: Sample, config: RegionConfig) -> np.ndarray:
    features = sample.regions.features
    if features is None or features.shape[1] != config.channels:
        found = "no features" if features is None else f"features of {features.shape[1]} channels"
        raise ValueError(
            f"the regions of sample {sample.key} carry {found}, the model takes {config.channels} channels; detect "
            "with --keep_features, or train from pixels: --model.regions.features=end_to_end"
        )
    return features.astype(np.float32)


def _decode(sample: Sample) -> Tensor:
    """uint8 [3, h, w], RGB."""
    try:
        return decode_jpeg(torch.frombuffer(bytearray(sample.image), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError as error:
        raise ValueError(f"sample {sample.key}: its JPEG does not decode: {error}") from error


def swap_sides(text: str) -> str:
    """The text for the mirrored image: left for right and right for left."""
    sides = {"left": "right", "right": "left"}
    return re.sub(r"\b(left|right)\b", lambda word: sides[word[0].lower()], text, flags=re.IGNORECASE)


def resized(height: int, width: int, short_side: int, long_side: int) -> tuple[int, int]:
    """(height, width) after resizing: short side `short_side`, or less where the long side would pass `long_side`.

    Sides are cut off to integers, from products that are taken before they are divided: a quotient in floating point
    falls one pixel short where the exact one is an integer. No side is less than 1.
    """
    short, long = min(height, width), max(height, width)
    if short_side * long > long_side * short:
        short_side = max(1, long_side * short // long)
    other = min(short_side * long // short, long_side)
    return (short_side, other) if height <= width else (other, short_side)


def _place(boxes: np.ndarray, scale: tuple[float, float], flip: bool, width: int, height: int) -> np.ndarray:
    placed = boxes * np.array([*scale, *scale], np.float32)
    if flip:
        placed = flip_horizontally(placed, width)
    return np.clip(placed, 0, [width - 1, height - 1, width - 1, height - 1]).astype(np.float32)
