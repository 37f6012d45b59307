"""The model's input: an Example, and the Batch that `collate` makes of several.

Letters in shapes, used in all files of vlbert/:

    N  rows of a batch (one caption, choice or expression each)     t  tokens of one row
    P  images of a batch (a row may have none)                      T  tokens of a padded row
    H, W  height and width of a group's padded images, in pixels    r  regions of one image, without the whole image
    C  channels of the model (hidden size)                          R  regions of a padded row, with the whole image
    M  labels of all rows                                           K  regions of all images, with the whole images
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from training.log import Unreadable


@dataclass(frozen=True, eq=False)
class TextInput:
    """The text of an example as arrays.

    Attributes:
        tokens: int64 [t], WordPiece ids including special tokens.
        segments: int64 [t], 0 for the first sentence (A), 1 for the second (B). Regions have segment 2 (C).
        token_region: int64 [t], index in ImageInput.boxes of the region whose visual feature embedding a token gets.
        label_masks: for each name, bool [t], True at tokens that have a label. A label of the whole text is attached to
            one token, usually the first.
        labels: for each name, an array [m, ...], usually the labels of the m tokens that one of the masks marks.
    """

    tokens: np.ndarray
    segments: np.ndarray
    token_region: np.ndarray
    label_masks: dict[str, np.ndarray] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_one_sentence(cls, tokens: Sequence[int] | np.ndarray, **labels: dict[str, np.ndarray]) -> "TextInput":
        """Return the TextInput of one sentence. The keyword arguments are `label_masks` and `labels`."""
        zeros = np.zeros(len(tokens), np.int64)
        return cls(np.array(tokens, np.int64), segments=zeros, token_region=zeros, **labels)


@dataclass(frozen=True, eq=False)
class ImageInput:
    """The image of an example as arrays: its regions, and its pixels or precomputed features.

    Attributes:
        boxes: float32 [1 + r, 4], x1 y1 x2 y2 in pixels of the resized image; row 0 is the whole image.
        masked: bool [1 + r], True for regions that the model must not see; always False in row 0.
        size: (width, height) of the resized image.
        pixels: uint8 [3, h, w], RGB, resized; None with precomputed features.
        covered: float32 [q, 4], boxes of q regions that are not in `boxes`, but whose pixels are masked; may be None.
        features: float [1 + r, D], precomputed features; None if the model computes them from pixels.
        cells: float32 [1 + r, S, S], fraction of each cell of the res5 features that the object covers; may be None.
        classes: int64 [1 + r], class of each region's object; None means 0. A model may have one [IMG] token per class.
        averaged_over: divisor for the mean of the region vectors, in models that represent the whole image by this
            mean; None means r.
        label_masks, labels: as in TextInput, for regions instead of tokens.
    """

    boxes: np.ndarray
    masked: np.ndarray
    size: tuple[int, int]
    pixels: Tensor | None = None
    covered: np.ndarray | None = None
    features: np.ndarray | None = None
    cells: np.ndarray | None = None
    classes: np.ndarray | None = None
    averaged_over: int | None = None
    label_masks: dict[str, np.ndarray] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)


Part = TypeVar("Part", TextInput, ImageInput)


@dataclass(frozen=True, eq=False)
class Example:
    """A text, usually with an image. `more` has further texts about the image, such as a question's other choices.

    Each text becomes a row of the batch. `metadata`, such as ids for predictions, is passed on unchanged. `counted` is
    False for a placeholder (see `make_placeholder`).
    """

    key: str
    text: TextInput
    image: ImageInput | None = None
    metadata: dict = field(default_factory=dict)
    more: tuple[TextInput, ...] = ()
    counted: bool = True

    @property
    def texts(self) -> tuple[TextInput, ...]:
        return (self.text, *self.more)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch as Python numbers, which can be read without waiting for the GPU.

    Attributes:
        tokens, regions: number of tokens and of regions in each row.
        labelled: number of labels in each row, for each label mask by name.
        images: (width, height) of each image without padding.
        examples: index of each row's example, as in `Batch.keys`.
    """

    tokens: tuple[int, ...]
    regions: tuple[int, ...]
    labelled: dict[str, tuple[int, ...]]
    images: tuple[tuple[int, int], ...]
    examples: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """The N texts and P images of several examples as padded tensors.

    Only the masks distinguish real elements from padding. Models select elements of padded tensors with the index
    tensors of the batch, because selection by a mask would make the CPU wait for the GPU. "Image order" is the order of
    the groups in `pixels` and, within a group, of the rows.

    Attributes:
        keys, metadata: `key` and `metadata` of each example.
        tokens, segments, token_region: int64 [N, T], as in TextInput.
        text_mask: bool [N, T], False in the padding.
        boxes: float32 [N, R, 4], as in ImageInput.
        region_mask: bool [N, R], False in the padding and in rows without an image.
        region_masked, region_classes: bool and int64 [N, R], `masked` and `classes` of ImageInput.
        pixels: for each group of images of similar shape, uint8 [p, 3, H, W]; () with precomputed features.
        image_sizes: int64 [P, 2], (width, height) of each image without padding.
        averaged_over: int64 [P], as in ImageInput, at least 1.
        covered, covered_mask: float32 [P, Q, 4], as in ImageInput; bool [P, Q], False in the padding.
        image_of: int64 [N], index of each row's image, -1 if it has none. All rows of an image have the same regions.
        image_rows: int64 [P], first row of each image.
        real_regions: int64 [K], index in [P * R] of each region that is not padding, in image order.
        features: float [K, D], precomputed features of the real regions, in image order; [0, 0] if there are none.
        cells: float32 [K, S, S], ImageInput.cells of the real regions; [0, 0, 0] if no image has them.
        counted: int64 [n], rows of examples that are not placeholders. Placeholders have no labels.
        labelled: for each label mask by name, int64 [M], index in [N * T] or [N * R] of each label, in row order.
        labels: for each name, [M, ...], labels in row order.
        sizes: the numbers of elements, readable without waiting for the GPU.
        unreadable: examples that are missing from the batch because they could not be read.
    """

    keys: list[str]
    metadata: list[dict]
    tokens: Tensor
    text_mask: Tensor
    segments: Tensor
    token_region: Tensor
    boxes: Tensor
    region_mask: Tensor
    region_masked: Tensor
    region_classes: Tensor
    pixels: tuple[Tensor, ...]
    image_sizes: Tensor
    averaged_over: Tensor
    covered: Tensor
    covered_mask: Tensor
    image_of: Tensor
    image_rows: Tensor
    real_regions: Tensor
    features: Tensor
    cells: Tensor
    counted: Tensor
    labelled: dict[str, Tensor]
    labels: dict[str, Tensor]
    sizes: Sizes
    unreadable: tuple[Unreadable, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def image(self, number: int) -> Tensor:
        """Return the pixels of image `number` without padding, uint8 [3, h, w]."""
        width, height = self.sizes.images[number]
        return [image for group in self.pixels for image in group][number][:, :height, :width]

    def of_real_regions(self, values: Tensor) -> Tensor:
        """Return the values [K, ...] of the real regions, given padded values [N, R, ...].

        All rows of an image have the same regions. The values are those of the image's first row.
        """
        return select(values.index_select(0, self.image_rows), self.real_regions)

    def image_and_number(self) -> tuple[Tensor, Tensor]:
        """Return the image index and the region index (0: whole image) of each real region, both int64 [K]."""
        return self.real_regions // self.region_mask.shape[1], self.real_regions % self.region_mask.shape[1]

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its tensors on `device`. Pixels are transferred as uint8."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, for asynchronous copies to a GPU. DataLoader calls it."""
        return self._map_tensors(Tensor.pin_memory)

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        def convert(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: convert(v) for name, v in value.items()}
            if isinstance(value, tuple):
                return tuple(convert(v) for v in value)
            return change(value) if isinstance(value, Tensor) else value

        return Batch(**{f.name: convert(getattr(self, f.name)) for f in dataclasses.fields(self)})


def select(padded: Tensor, index: Tensor) -> Tensor:
    """Return elements of `padded` [N, S, ...] by flat index, as [M, ...].

    `index` is int64 [M]. Element s of row n has the index n * S + s.
    """
    return padded.flatten(0, 1).index_select(0, index)


def make_placeholder(example: Example) -> Example:
    """Return an unlabelled copy of an example, to fill a batch that would otherwise be empty.

    Every batch needs an image, because DDP expects a gradient of the image network from every rank.
    """
    return dataclasses.replace(
        example,
        text=remove_labels(example.text),
        image=None if example.image is None else remove_labels(example.image),
        more=tuple(remove_labels(text) for text in example.more),
        counted=False,
    )


def remove_labels(part: Part) -> Part:
    masks = {name: np.zeros_like(mask) for name, mask in part.label_masks.items()}
    return dataclasses.replace(part, label_masks=masks, labels={k: v[:0] for k, v in part.labels.items()})


def collate(
    examples: Sequence[Example], unreadable: Sequence[Unreadable] = (), least: tuple[int, int] = (0, 0)
) -> Batch:
    """Collate examples into a padded Batch.

    Raises ValueError if the examples' labels have different names, or if only some have pixels, features or cells.

    Args:
        least: minimum T and R of the padded rows.
    """
    owners = [i for i, e in enumerate(examples) for _ in e.texts]
    texts = [text for e in examples for text in e.texts]
    image_of = {i: e.image for i, e in enumerate(examples) if e.image is not None}
    groups = [list(image_of)]
    if all(image.pixels is not None for image in image_of.values()):  # without pixels, groups save nothing
        groups = group_by_shape({i: image.size for i, image in image_of.items()})
    index_of = {i: p for p, i in enumerate(i for group in groups for i in group)}
    images = [image_of[i] for i in index_of]
    rows = [row for row, i in enumerate(owners) if i in index_of]  # those with an image
    row_images = [image_of[owners[row]] for row in rows]
    n, t, r = len(texts), max(len(w.tokens) for w in texts), max((len(p.boxes) for p in images), default=0)
    t, r = max(t, least[0]), max(r, least[1])
    every_row, none = range(n), np.zeros(0, bool)
    labelled = _label_indices(texts, every_row, t) | _label_indices(row_images, rows, r)
    labels = _concatenate_labels(texts) | _concatenate_labels(row_images)
    regions = np.zeros(n, np.int64)
    regions[rows] = [len(p.boxes) for p in row_images]
    sizes = Sizes(
        tokens=tuple(len(w.tokens) for w in texts),
        regions=tuple(regions.tolist()),
        labelled={
            name: tuple(np.bincount(index // width, minlength=n).tolist()) for name, (index, width) in labelled.items()
        },
        images=tuple(p.size for p in images),
        examples=tuple(owners),
    )
    covered = [np.zeros((0, 4), np.float32) if p.covered is None else p.covered for p in images]
    h = max((len(boxes) for boxes in covered), default=0)
    classes = [np.zeros(len(p.boxes), np.int64) if p.classes is None else p.classes for p in row_images]
    return Batch(
        keys=[e.key for e in examples],
        metadata=[e.metadata for e in examples],
        tokens=_pad([w.tokens for w in texts], every_row, n, t),
        text_mask=_pad([np.ones(len(w.tokens), bool) for w in texts], every_row, n, t),
        segments=_pad([w.segments for w in texts], every_row, n, t),
        token_region=_pad([w.token_region for w in texts], every_row, n, t),
        boxes=_pad([p.boxes for p in row_images], rows, n, r, like=np.zeros((0, 4), np.float32)),
        region_mask=_pad([np.ones(len(p.boxes), bool) for p in row_images], rows, n, r, like=none),
        region_masked=_pad([p.masked for p in row_images], rows, n, r, like=none),
        region_classes=_pad(classes, rows, n, r, like=np.zeros(0, np.int64)),
        pixels=_pad_pixels([[image_of[i] for i in group] for group in groups]),
        image_sizes=torch.tensor(sizes.images, dtype=torch.int64).reshape(-1, 2),
        averaged_over=torch.tensor(
            [max(1, len(p.boxes) - 1 if p.averaged_over is None else p.averaged_over) for p in images],
            dtype=torch.int64,
        ),
        covered=_pad(covered, range(len(images)), len(images), h, like=np.zeros((0, 4), np.float32)),
        covered_mask=_pad([np.ones(len(c), bool) for c in covered], range(len(images)), len(images), h, like=none),
        image_of=torch.tensor([index_of.get(i, -1) for i in owners], dtype=torch.int64),
        image_rows=torch.tensor([owners.index(i) for i in index_of], dtype=torch.int64),
        real_regions=torch.from_numpy(_flat_indices([np.arange(len(p.boxes)) for p in images], range(len(images)), r)),
        features=_concatenate_images(images, "features", axes=2),
        cells=_concatenate_images(images, "cells", axes=3),
        counted=torch.tensor([row for row, i in enumerate(owners) if examples[i].counted], dtype=torch.int64),
        labelled={name: torch.from_numpy(index) for name, (index, _) in labelled.items()},
        labels=labels,
        sizes=sizes,
        unreadable=tuple(unreadable),
    )


def with_texts(batch: Batch, texts: Sequence[np.ndarray]) -> Batch:
    """Return a batch that pairs each image of `batch` with each text, in image order.

    It has P * len(texts) rows, the `keys` and `metadata` of `batch`, and no labels. All rows of `batch` must have an
    image. Each text is the token ids of one sentence, int64 [t], including special tokens.
    """
    device, images = batch.tokens.device, len(batch.image_rows)
    tokens = _pad(texts, range(len(texts)), len(texts), max(len(text) for text in texts)).to(device)
    mask = _pad([np.ones(len(text), bool) for text in texts], range(len(texts)), len(texts), tokens.shape[1])
    zeros = torch.zeros_like(tokens).repeat(images, 1)
    rows = batch.image_rows.repeat_interleave(len(texts))
    numbers = torch.arange(images, device=device)
    first_rows = [row for row in batch.image_rows.tolist() for _ in texts]
    regions, examples = ([values[row] for row in first_rows] for values in (batch.sizes.regions, batch.sizes.examples))
    lengths = tuple(len(text) for text in texts) * images
    sizes = Sizes(lengths, tuple(regions), {}, batch.sizes.images, tuple(examples))
    return dataclasses.replace(
        batch,
        tokens=tokens.repeat(images, 1),
        text_mask=mask.to(device).repeat(images, 1),
        segments=zeros,
        token_region=zeros,
        boxes=batch.boxes[rows],
        region_mask=batch.region_mask[rows],
        region_masked=batch.region_masked[rows],
        region_classes=batch.region_classes[rows],
        image_of=numbers.repeat_interleave(len(texts)),
        image_rows=numbers * len(texts),
        counted=torch.arange(len(rows), device=device),
        labelled={},
        labels={},
        sizes=sizes,
    )


def group_by_shape(images: Mapping[int, tuple[int, int]]) -> list[list[int]]:
    """Split images into one or two groups to be padded separately, and return the keys of each group.

    `images` has the (width, height) of each image by key. Two groups are made only if they save at least 10 % of the
    pixels: wide and tall images in one tensor would be padded to squares.
    """
    # For 32 web photos, padding multiplies the pixels by 1.8 in one group, by 1.16 in two and by 1.10 in three.
    in_order = list(images)
    by_shape = sorted(images, key=lambda key: images[key][0] - images[key][1])  # tall ones first
    sizes = [images[key] for key in by_shape]
    areas = [tall + wide for tall, wide in zip(_padded_areas(sizes), _padded_areas(sizes[::-1])[::-1], strict=True)]
    if not sizes or min(areas) > 0.9 * areas[0]:
        return [in_order]
    tall = set(by_shape[: areas.index(min(areas))])
    return [[key for key in in_order if key in tall], [key for key in in_order if key not in tall]]


def _padded_areas(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of pixels of the first 0, 1, ..., n images after padding them to a common size."""
    areas, widest, highest = [0], 0, 0
    for count, (width, height) in enumerate(sizes, 1):
        widest, highest = max(widest, width), max(highest, height)
        areas.append(count * widest * highest)
    return areas


def _pad_pixels(groups: Sequence[Sequence[ImageInput]]) -> tuple[Tensor, ...]:
    """Pad the pixels of each group into one tensor, uint8 [p, 3, H, W]. Return () if no image has pixels."""
    padded = []
    for group in filter(None, (_present(group, "pixels") for group in groups)):
        height, width = (max(pixels.shape[axis] for pixels in group) for axis in (1, 2))
        padded.append(group[0].new_zeros(len(group), 3, height, width))
        for row, pixels in zip(padded[-1], group, strict=True):
            row[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    return tuple(padded)


def _concatenate_images(images: Sequence[ImageInput], name: str, axes: int) -> Tensor:
    """Concatenate the field `name` of all images. If no image has the field, return an empty tensor of `axes` axes."""
    arrays = _present(images, name)
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.zeros((0,) * axes)


def _present(images: Sequence[ImageInput], name: str) -> list[Any]:
    """Return the field `name` of all images, or [] if all are None. Raises ValueError if only some are None."""
    values = [value for value in (getattr(p, name) for p in images) if value is not None]
    if values and len(values) < len(images):
        raise ValueError(f"{len(images) - len(values)} of {len(images)} images of one batch have no {name}")
    return values


def _pad(
    arrays: Sequence[np.ndarray], rows: Sequence[int], n: int, length: int, like: np.ndarray | None = None
) -> Tensor:
    """Return a tensor [n, length, ...] with arrays[i] at the start of row rows[i], and zeros elsewhere."""
    like = arrays[0] if len(arrays) or like is None else like
    padded = np.zeros((n, length, *like.shape[1:]), like.dtype)
    for row, array in zip(rows, arrays, strict=True):
        padded[row, : len(array)] = array
    return torch.from_numpy(padded)


def _flat_indices(numbers: Sequence[np.ndarray], rows: Sequence[int], length: int) -> np.ndarray:
    """Return the flat indices, int64 [M], of the elements numbers[i] in row rows[i] of an array [n, length]."""
    flat = [row * length + index for row, index in zip(rows, numbers, strict=True)]
    return np.concatenate(flat) if flat else np.zeros(0, np.int64)


def _label_indices(
    parts: Sequence[TextInput | ImageInput], rows: Sequence[int], length: int
) -> dict[str, tuple[np.ndarray, int]]:
    """Return a dict from label mask name to (flat indices of the marked elements, `length`). See `_flat_indices`."""
    return {
        name: (_flat_indices([np.flatnonzero(part.label_masks[name]) for part in parts], rows, length), length)
        for name in _common_names(parts, "label_masks")
    }


def _concatenate_labels(parts: Sequence[TextInput | ImageInput]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.concatenate([part.labels[name] for part in parts]))
        for name in _common_names(parts, "labels")
    }


def _common_names(parts: Sequence[TextInput | ImageInput], field_name: str) -> list[str]:
    names = {tuple(getattr(part, field_name)) for part in parts}
    if len(names) > 1:
        raise ValueError(f"examples of one batch have different {field_name}: {sorted(names)}")
    return list(names.pop()) if names else []
