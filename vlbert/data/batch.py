"""Example, Batch and collate: the seam between CPU and GPU.

Legend of shape letters, used in every file of vlbert/:

    N  rows of a batch (one caption, choice or expression each)        t, T  tokens of a row; of the longest row
    P  images of a batch (rows without an image have none)             r, R  regions of a row; of the row with most
    H, W  height and width of a group's padded images, pixels          K     real regions, over all images
    C  channels of the model (hidden size)                             M     labels, over all rows
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.log import Unreadable


@dataclass(frozen=True, eq=False)
class TextInput:
    """The text of an example.

    tokens        int64 [t]  WordPiece ids, special tokens included
    segments      int64 [t]  0 for the first sentence (A), 1 for the second (B); regions are C, which is 2
    token_region  int64 [t]  the region whose visual feature embedding the token carries (row of ImageInput.boxes; 0 is
                             the whole image)
    label_masks   name -> bool [t]  which tokens have a label; a label of the whole text is one of its first token
    labels        name -> [m, ...]  labels of the masked tokens alone; concatenated in a batch, in row order
    """

    tokens: np.ndarray
    segments: np.ndarray
    token_region: np.ndarray
    label_masks: dict[str, np.ndarray] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_one_sentence(cls, tokens: Sequence[int], **labels: dict[str, np.ndarray]) -> "TextInput":
        """Return the text of one sentence that names no region; `labels`: label_masks and labels."""
        zeros = np.zeros(len(tokens), np.int64)
        return cls(np.array(tokens, np.int64), segments=zeros, token_region=zeros, **labels)


@dataclass(frozen=True, eq=False)
class ImageInput:
    """The image of an example.

    boxes     float32 [r, 4]     x1 y1 x2 y2 in pixels of the resized image; row 0 is the whole image
    masked    bool [r]           masked regions, which the model must not see; never row 0
    size      (width, height)    of the resized image
    pixels    uint8 [3, h, w]    RGB, already resized; None where features are precomputed
    covered   float32 [h, 4]     boxes that are no regions of the row but whose pixels are masked too, or None
    features  float [r, D]       precomputed ones, row 0 included; None end to end
    cells     float32 [r, S, S]  share of each of the cells of a region, as res5 gives them, that its object covers;
                                 None: all of it
    classes   int64 [r]          the object's class, for models with one [IMG] a class; None elsewhere
    averaged_over                by what a model divides the sum of the regions' vectors, where its vector of the whole
                                 image is their mean; None: by their number
    label_masks, labels          as in TextInput, by region
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


@dataclass(frozen=True, eq=False)
class Example:
    """A text and its image, if it has one; `more` holds further texts about the same image (the choices of an answer).

    Each text is a row of the batch. `metadata` is handed on as it is (ids for predictions). An example that is not
    `counted` is a placeholder: see `placeholder`.
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
    """The sizes of a batch as numbers of the host. Shapes depend on them, and reading a shape from tensors would make
    the host wait until a GPU has computed all before.

    tokens     of each row
    regions    of each row
    labelled   name -> how many labels each row has; names as in label_masks
    images     (width, height) of each image without its padding
    """

    tokens: tuple[int, ...]
    regions: tuple[int, ...]
    labelled: dict[str, tuple[int, ...]]
    images: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """The N texts of some examples, padded. Masks say what is real; no value in the data stands for "nothing".

    What a model picks out of padded tensors it picks by the index lists here, which the loader makes: a mask would have
    to be read first.

    keys           list of sample keys             metadata        list of dicts, both one an example
    tokens         int64 [N, T]                    boxes           float32 [N, R, 4]  pixels, row 0 the whole image
    text_mask      bool [N, T]                     region_mask     bool [N, R]  all False in a row without an image
    segments       int64 [N, T]                    region_masked   bool [N, R]
    token_region   int64 [N, T]                    region_classes  int64 [N, R]  see ImageInput.classes
    pixels         uint8 [p, 3, H, W] of each group of images of similar shape; () where features are precomputed.
                   Images are numbered group by group, inside a group by row: this is image order
    image_sizes    int64 [P, 2]        (width, height) of each image without its padding
    averaged_over  int64 [P]           see ImageInput.averaged_over; at least 1
    covered        float32 [P, h, 4]   see ImageInput.covered; covered_mask, bool [P, h], is False in the padding
    image_of       int64 [N]           the image of each row; -1: none. Rows of one image have the same regions
    image_rows     int64 [P]           the first row of each image
    real_regions   int64 [K]           index in [P * R] of each real region of all images, in image order
    features       float [K, D]        of the real regions of all images, in image order; [0, 0] end to end
    cells          float32 [K, S, S]   likewise, see ImageInput.cells; [0, 0, 0] where objects cover their regions
    counted        int64 [n]           the rows that are not a placeholder's, which have no labels
    labelled       name -> int64 [M]   index in [N * T] or [N * R] of what has a label, in row order; names as in
                   label_masks
    labels         name -> [M, ...]    in row order
    sizes          see Sizes
    unreadable     the examples that are missing from the batch
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
        """N, the number of rows."""
        return len(self.tokens)

    def image(self, number: int) -> Tensor:
        """uint8 [3, h, w]: the pixels of an image without its padding."""
        width, height = self.sizes.images[number]
        return [image for group in self.pixels for image in group][number][:, :height, :width]

    def of_real_regions(self, values: Tensor) -> Tensor:
        """From what belongs to the regions of rows, [N, R, ...], that of the images' real regions: [K, ...], in image
        order."""
        return select(values.index_select(0, self.image_rows), self.real_regions)

    def image_and_number(self) -> tuple[Tensor, Tensor]:
        """Of each of the K real regions the image that it is in and its number there, 0 being the whole image."""
        return self.real_regions // self.region_mask.shape[1], self.real_regions % self.region_mask.shape[1]

    def to(self, device: torch.device) -> "Batch":
        """The same batch with its tensors on `device`; pixels travel as uint8."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory, from which GPUs copy while they compute; DataLoader calls it."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: changed(v) for name, v in value.items()}
            if isinstance(value, tuple):
                return tuple(changed(v) for v in value)
            return change(value) if isinstance(value, Tensor) else value

        return Batch(**{f.name: changed(getattr(self, f.name)) for f in dataclasses.fields(self)})


def select(padded: Tensor, index: Tensor) -> Tensor:
    """Elements of padded rows: [N, S, ...] and int64 [M], indices in [N * S] -> [M, ...]."""
    return padded.flatten(0, 1).index_select(0, index)


def placeholder(example: Example) -> Example:
    """An example with the shapes of `example` and without labels.

    A batch without an image would leave the image network without a gradient, which DDP refuses on a single rank.
    """

    return dataclasses.replace(
        example,
        text=unlabelled(example.text),
        image=None if example.image is None else unlabelled(example.image),
        more=tuple(unlabelled(text) for text in example.more),
        counted=False,
    )


def unlabelled(part: TextInput | ImageInput) -> TextInput | ImageInput:
    """A text or an image that looks the same and has no labels."""
    masks = {name: np.zeros_like(mask) for name, mask in part.label_masks.items()}
    return dataclasses.replace(part, label_masks=masks, labels={name: of[:0] for name, of in part.labels.items()})


def collate(
    examples: Sequence[Example], unreadable: Sequence[Unreadable] = (), least: tuple[int, int] = (0, 0)
) -> Batch:
    """Pad the texts of some examples to one Batch. ValueError where they carry different labels or features.

    least: T and R, where the rows shall have more tokens and regions than the longest.
    """
    owners = [i for i, e in enumerate(examples) for _ in e.texts]
    texts = [text for e in examples for text in e.texts]
    of_examples = {i: e.image for i, e in enumerate(examples) if e.image is not None}
    groups = [list(of_examples)]
    if all(image.pixels is not None for image in of_examples.values()):  # else there is nothing to save
        groups = groups_of_shape({i: image.size for i, image in of_examples.items()})
    number = {i: p for p, i in enumerate(i for group in groups for i in group)}
    images = [of_examples[i] for i in number]
    rows = [row for row, i in enumerate(owners) if i in number]  # those with an image
    shown = [of_examples[owners[row]] for row in rows]
    n, t, r = len(texts), max(len(w.tokens) for w in texts), max((len(p.boxes) for p in images), default=0)
    t, r = max(t, least[0]), max(r, least[1])
    every_row, none = range(n), np.zeros(0, bool)
    labelled = _labelled(texts, every_row, t) | _labelled(shown, rows, r)
    labels = _concatenate_all(texts) | _concatenate_all(shown)
    regions = np.zeros(n, np.int64)
    regions[rows] = [len(p.boxes) for p in shown]
    sizes = Sizes(
        tokens=tuple(len(w.tokens) for w in texts),
        regions=tuple(regions.tolist()),
        labelled={
            name: tuple(np.bincount(index // width, minlength=n).tolist()) for name, (index, width) in labelled.items()
        },
        images=tuple(p.size for p in images),
    )
    covered = [np.zeros((0, 4), np.float32) if p.covered is None else p.covered for p in images]
    h = max((len(boxes) for boxes in covered), default=0)
    classes = [np.zeros(len(p.boxes), np.int64) if p.classes is None else p.classes for p in shown]
    return Batch(
        keys=[e.key for e in examples],
        metadata=[e.metadata for e in examples],
        tokens=_pad([w.tokens for w in texts], every_row, n, t),
        text_mask=_pad([np.ones(len(w.tokens), bool) for w in texts], every_row, n, t),
        segments=_pad([w.segments for w in texts], every_row, n, t),
        token_region=_pad([w.token_region for w in texts], every_row, n, t),
        boxes=_pad([p.boxes for p in shown], rows, n, r, like=np.zeros((0, 4), np.float32)),
        region_mask=_pad([np.ones(len(p.boxes), bool) for p in shown], rows, n, r, like=none),
        region_masked=_pad([p.masked for p in shown], rows, n, r, like=none),
        region_classes=_pad(classes, rows, n, r, like=np.zeros(0, np.int64)),
        pixels=_pad_pixels([[of_examples[i] for i in group] for group in groups]),
        image_sizes=torch.tensor(sizes.images, dtype=torch.int64).reshape(-1, 2),
        averaged_over=torch.tensor(
            [max(1, len(p.boxes) - 1 if p.averaged_over is None else p.averaged_over) for p in images],
            dtype=torch.int64,
        ),
        covered=_pad(covered, range(len(images)), len(images), h, like=np.zeros((0, 4), np.float32)),
        covered_mask=_pad([np.ones(len(c), bool) for c in covered], range(len(images)), len(images), h, like=none),
        image_of=torch.tensor([number.get(i, -1) for i in owners], dtype=torch.int64),
        image_rows=torch.tensor([owners.index(i) for i in number], dtype=torch.int64),
        real_regions=torch.from_numpy(_indices([np.arange(len(p.boxes)) for p in images], range(len(images)), r)),
        features=_of_all_images(images, "features", axes=2),
        cells=_of_all_images(images, "cells", axes=3),
        counted=torch.tensor([row for row, i in enumerate(owners) if examples[i].counted], dtype=torch.int64),
        labelled={name: torch.from_numpy(index) for name, (index, _) in labelled.items()},
        labels=labels,
        sizes=sizes,
        unreadable=tuple(unreadable),
    )


def with_texts(batch: Batch, texts: Sequence[np.ndarray]) -> Batch:
    """Each of the batch's P images with each of some texts, P * len(texts) rows, those of an image together, in image
    order and without labels. texts: int64 [t] each, token ids of one sentence, special tokens included.

    `keys` and `metadata` stay those of the batch's examples. Every row of the batch must have an image.
    """
    device, images = batch.tokens.device, len(batch.image_rows)
    tokens = _pad(texts, range(len(texts)), len(texts), max(len(text) for text in texts)).to(device)
    mask = _pad([np.ones(len(text), bool) for text in texts], range(len(texts)), len(texts), tokens.shape[1])
    zeros = torch.zeros_like(tokens).repeat(images, 1)
    rows = batch.image_rows.repeat_interleave(len(texts))
    numbers = torch.arange(images, device=device)
    regions = [batch.sizes.regions[row] for row in batch.image_rows.tolist() for _ in texts]
    sizes = Sizes(tuple(len(text) for text in texts) * images, tuple(regions), {}, batch.sizes.images)
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


def groups_of_shape(images: Mapping[int, tuple[int, int]]) -> list[list[int]]:
    """The keys of some images, given their (width, height), in one group or, where this saves a tenth of the padded
    pixels, two.

    Wide and tall images in one tensor would be padded to squares: a batch of 32 web photos has 1.8 times as many
    pixels as the photos in one group, 1.16 times in two, 1.10 times in three.
    """
    in_order = list(images)
    by_shape = sorted(images, key=lambda key: images[key][0] - images[key][1])  # tall ones first
    sizes = [images[key] for key in by_shape]
    areas = [tall + wide for tall, wide in zip(_padded_areas(sizes), _padded_areas(sizes[::-1])[::-1], strict=True)]
    if not sizes or min(areas) > 0.9 * areas[0]:
        return [in_order]
    tall = set(by_shape[: areas.index(min(areas))])
    return [[key for key in in_order if key in tall], [key for key in in_order if key not in tall]]


def _padded_areas(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """The pixels of a group of the first 0, 1, ... of some sizes."""
    areas, widest, highest = [0], 0, 0
    for count, (width, height) in enumerate(sizes, 1):
        widest, highest = max(widest, width), max(highest, height)
        areas.append(count * widest * highest)
    return areas


def _pad_pixels(groups: Sequence[Sequence[ImageInput]]) -> tuple[Tensor, ...]:
    """Of each group uint8 [p, 3, H, W] with each image in its upper left corner, zeros elsewhere; () without any."""
    count = sum(map(len, groups))
    there = [[image.pixels for image in group if image.pixels is not None] for group in groups]
    missing = count - sum(map(len, there))
    if missing == count:
        return ()
    if missing:
        raise ValueError(f"{missing} of {count} images of one batch have no pixels")
    padded = []
    for group in there:
        height, width = (max(pixels.shape[axis] for pixels in group) for axis in (1, 2))
        padded.append(group[0].new_zeros(len(group), 3, height, width))
        for row, pixels in zip(padded[-1], group, strict=True):
            row[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    return tuple(padded)


def _of_all_images(images: Sequence[ImageInput], name: str, axes: int) -> Tensor:
    """The arrays `name` of all images, one after the other; empty where none has one."""
    arrays = [array for array in (getattr(p, name) for p in images) if array is not None]
    if not arrays:
        return torch.zeros((0,) * axes)
    if len(arrays) < len(images):
        raise ValueError(f"{len(images) - len(arrays)} of {len(images)} images of one batch have no {name}")
    return torch.from_numpy(np.concatenate(arrays))


def _pad(
    arrays: Sequence[np.ndarray], rows: Sequence[int], n: int, length: int, like: np.ndarray | None = None
) -> Tensor:
    """[n, length, ...] with arrays[i] at the front of row rows[i], zeros elsewhere."""
    like = arrays[0] if len(arrays) or like is None else like
    padded = np.zeros((n, length, *like.shape[1:]), like.dtype)
    for row, array in zip(rows, arrays, strict=True):
        padded[row, : len(array)] = array
    return torch.from_numpy(padded)


def _indices(numbers: Sequence[np.ndarray], rows: Sequence[int], length: int) -> np.ndarray:
    """int64 [M]: where the elements numbers[i] of row rows[i] lie among those of all rows, each of that length."""
    found = [row * length + of_row for row, of_row in zip(rows, numbers, strict=True)]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _labelled(
    parts: Sequence[TextInput | ImageInput], rows: Sequence[int], length: int
) -> dict[str, tuple[np.ndarray, int]]:
    """Name of each label mask -> the indices of what it marks among all rows, and the length of a row."""
    return {
        name: (_indices([np.flatnonzero(part.label_masks[name]) for part in parts], rows, length), length)
        for name in _names(parts, "label_masks")
    }


def _concatenate_all(parts: Sequence[TextInput | ImageInput]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.concatenate([part.labels[name] for part in parts]))
        for name in _names(parts, "labels")
    }


def _names(parts: Sequence[TextInput | ImageInput], what: str) -> list[str]:
    names = {tuple(getattr(part, what)) for part in parts}
    if len(names) > 1:
        raise ValueError(f"examples of one batch carry different {what}: {sorted(names)}")
    return list(names.pop()) if names else []
