"""Example, Batch and collate: the seam between CPU and GPU.

Legend of shape letters, used in every file of vlbert/:

    N  rows of a batch (one caption, choice or expression each)        t, T  word pieces of a row; of the longest row
    P  pictures of a batch (rows without a picture have none)          r, R  regions of a row; of the row with most
    H, W  height and width of a group's padded pictures, pixels        K     regions that are there, over all pictures
    C  channels of the model (hidden size)                             M     things asked for, over all rows
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
    """The text half of an example.

    tokens    int64 [t]  WordPiece ids, special tokens included
    segments  int64 [t]  0 for the first sentence (A), 1 for the second (B); regions are C, which is 2
    token_region  int64 [t]  the region whose look the token carries (row of ImageInput.boxes; 0 is the whole image)
    targets   name -> [t, ...]  what is asked at each piece; padded with zeros (False) in a batch
    asked     name -> [m, ...]  what is asked at chosen pieces only; concatenated in a batch, in row order
    """

    tokens: np.ndarray
    segments: np.ndarray
    token_region: np.ndarray
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    asked: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ImageInput:
    """The picture half of an example.

    boxes     float32 [r, 4]     x1 y1 x2 y2 in pixels of the resized picture; row 0 is the whole image
    hidden    bool [r]           regions that the model must not see (masked regions); never row 0
    size      (width, height)    of the resized picture
    pixels    uint8 [3, h, w]    RGB, already resized; None where features are precomputed
    covered   float32 [h, 4]     further boxes whose pixels are hidden, though they are no regions of the row, or None
    features  float [r, D]       precomputed ones, row 0 included; None end to end
    cells     float32 [r, S, S]  share of each of the cells of a region, as res5 gives them, that its object covers;
                                 None: all of it
    classes   int64 [r]          the object's class, for models with one [IMG] a class; None elsewhere
    targets, asked               as in TextInput, by region
    """

    boxes: np.ndarray
    masked: np.ndarray
    size: tuple[int, int]
    pixels: Tensor | None = None
    covered: np.ndarray | None = None
    features: np.ndarray | None = None
    cells: np.ndarray | None = None
    classes: np.ndarray | None = None
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    asked: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Example:
    """A text and its picture, if it has one; with `more`, further texts about the same picture (the choices of an
    answer). Each text is a row of the batch. `about` travels beside it untouched (ids for predictions). One that is not
    `counted` holds a place alone: see `void`."""

    key: str
    words: TextInput
    picture: ImageInput | None = None
    about: dict = field(default_factory=dict)
    more: tuple[TextInput, ...] = ()
    counted: bool = True

    @property
    def texts(self) -> tuple[TextInput, ...]:
        return (self.words, *self.more)


@dataclass(frozen=True, eq=False)
class Batch:
    """The N texts of some examples, padded. Masks say what is real; no value in the data stands for "nothing".

    keys           list of sample keys             about           list of dicts, both one an example
    tokens         int64 [N, T]                    boxes           float32 [N, R, 4]  pixels, row 0 the whole image
    text_mask      bool [N, T]                     region_mask     bool [N, R]  all False in a row without a picture
    segments       int64 [N, T]                    region_masked   bool [N, R]
    token_region       int64 [N, T]                    region_classes  int64 [N, R]  see ImageInput.classes
    pixels         uint8 [p, 3, H, W] of each group of pictures of similar shape; () where features are precomputed.
                   Pictures are numbered group by group, in each in the order of the rows: this is picture order
    picture_sizes  int64 [P, 2]        (width, height) of each picture without its padding
    covered        float32 [P, h, 4]   see ImageInput.covered; covered_mask, bool [P, h], says which are there
    picture_of     int64 [N]           the picture of each row; -1: none. Rows of one picture have the same regions
    picture_rows   int64 [P]           the first row of each picture
    features       float [K, D]        of the real regions of all pictures, in picture order; [0, 0] end to end
    cells          float32 [K, S, S]   likewise, see ImageInput.cells; [0, 0, 0] where objects cover their regions
    counted        bool [N]            False in the rows of a place-holder: nothing is asked there
    unreadable     the questions that are missing from the batch
    targets        name -> [N, T, ...] or [N, R, ...]              asked    name -> [M, ...], in row order
    """

    keys: list[str]
    about: list[dict]
    tokens: Tensor
    text_mask: Tensor
    segments: Tensor
    token_region: Tensor
    boxes: Tensor
    region_mask: Tensor
    region_masked: Tensor
    region_classes: Tensor
    pixels: tuple[Tensor, ...]
    picture_sizes: Tensor
    covered: Tensor
    covered_mask: Tensor
    picture_of: Tensor
    picture_rows: Tensor
    features: Tensor
    cells: Tensor
    counted: Tensor
    targets: dict[str, Tensor]
    asked: dict[str, Tensor]
    unreadable: tuple[Unreadable, ...] = ()

    def __len__(self) -> int:
        """N, the number of rows."""
        return len(self.tokens)

    def picture(self, number: int) -> Tensor:
        """uint8 [3, h, w]: the pixels of a picture without its padding."""
        width, height = self.picture_sizes[number].tolist()
        return [picture for group in self.pixels for picture in group][number][:, :height, :width]

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


def placeholder(example: Example) -> Example:
    """A place-holder with the shapes of `example`, of which nothing is asked.

    A batch without a picture would leave the image network without a gradient, which DDP refuses on a single rank.
    """

    def silent(half: TextInput | ImageInput) -> TextInput | ImageInput:
        targets = {name: np.zeros_like(target) for name, target in half.targets.items()}
        return dataclasses.replace(half, targets=targets, asked={name: asked[:0] for name, asked in half.asked.items()})

    return dataclasses.replace(
        example,
        words=silent(example.words),
        picture=None if example.picture is None else silent(example.picture),
        more=tuple(silent(words) for words in example.more),
        counted=False,
    )


def collate(examples: Sequence[Example], unreadable: Sequence[Unreadable] = ()) -> Batch:
    """Pad the texts of some examples to one Batch. ValueError where they carry different targets or features."""
    owners = [i for i, e in enumerate(examples) for _ in e.texts]
    words = [text for e in examples for text in e.texts]
    groups = _groups_of_shape({i: e.picture for i, e in enumerate(examples) if e.picture is not None})
    number = {i: p for p, i in enumerate(i for group in groups for i in group)}
    pictures = [examples[i].picture for i in number]
    rows = [row for row, i in enumerate(owners) if i in number]  # those with a picture
    shown = [examples[owners[row]].picture for row in rows]
    n, t, r = len(words), max(len(w.tokens) for w in words), max((len(p.boxes) for p in pictures), default=0)
    every_row, none = range(n), np.zeros(0, bool)
    targets = _pad_all(words, every_row, n, t) | _pad_all(shown, rows, n, r)
    asked = _concatenate_all(words) | _concatenate_all(shown)
    covered = [np.zeros((0, 4), np.float32) if p.covered is None else p.covered for p in pictures]
    h = max((len(boxes) for boxes in covered), default=0)
    classes = [np.zeros(len(p.boxes), np.int64) if p.classes is None else p.classes for p in shown]
    return Batch(
        keys=[e.key for e in examples],
        about=[e.about for e in examples],
        tokens=_pad([w.tokens for w in words], every_row, n, t),
        text_mask=_pad([np.ones(len(w.tokens), bool) for w in words], every_row, n, t),
        segments=_pad([w.segments for w in words], every_row, n, t),
        token_region=_pad([w.token_region for w in words], every_row, n, t),
        boxes=_pad([p.boxes for p in shown], rows, n, r, like=np.zeros((0, 4), np.float32)),
        region_mask=_pad([np.ones(len(p.boxes), bool) for p in shown], rows, n, r, like=none),
        region_masked=_pad([p.masked for p in shown], rows, n, r, like=none),
        region_classes=_pad(classes, rows, n, r, like=np.zeros(0, np.int64)),
        pixels=_pad_pixels([[examples[i].picture for i in group] for group in groups]),
        picture_sizes=torch.tensor([p.size for p in pictures], dtype=torch.int64).reshape(-1, 2),
        covered=_pad(covered, range(len(pictures)), len(pictures), h, like=np.zeros((0, 4), np.float32)),
        covered_mask=_pad([np.ones(len(c), bool) for c in covered], range(len(pictures)), len(pictures), h, like=none),
        picture_of=torch.tensor([number.get(i, -1) for i in owners], dtype=torch.int64),
        picture_rows=torch.tensor([owners.index(i) for i in number], dtype=torch.int64),
        features=_of_all_pictures(pictures, "features", axes=2),
        cells=_of_all_pictures(pictures, "cells", axes=3),
        counted=torch.tensor([examples[i].counted for i in owners], dtype=torch.bool),
        targets=targets,
        asked=asked,
        unreadable=tuple(unreadable),
    )


def _groups_of_shape(pictures: Mapping[int, ImageInput]) -> list[list[int]]:
    """The keys of some pictures in one group or, where this saves a tenth of the padded pixels, two.

    Wide and tall pictures in one tensor would be padded to squares: a batch of 32 web photos has 1.8 times as many
    pixels as the photos in one group, 1.16 times in two, 1.10 times in three. Without pixels there is nothing to save.
    """
    in_order = list(pictures)
    if any(picture.pixels is None for picture in pictures.values()):
        return [in_order]
    by_shape = sorted(pictures, key=lambda key: pictures[key].size[0] - pictures[key].size[1])  # tall ones first
    sizes = [pictures[key].size for key in by_shape]
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
    """Of each group uint8 [p, 3, H, W] with each picture in its upper left corner, zeros elsewhere; () without any."""
    pictures = [picture for group in groups for picture in group]
    missing = sum(picture.pixels is None for picture in pictures)
    if missing == len(pictures):
        return ()
    if missing:
        raise ValueError(f"{missing} of {len(pictures)} pictures of one batch have no pixels")
    padded = []
    for group in groups:
        height, width = (max(picture.pixels.shape[axis] for picture in group) for axis in (1, 2))
        pixels = group[0].pixels.new_zeros(len(group), 3, height, width)
        for place, picture in zip(pixels, group, strict=True):
            place[:, : picture.pixels.shape[1], : picture.pixels.shape[2]] = picture.pixels
        padded.append(pixels)
    return tuple(padded)


def _of_all_pictures(pictures: Sequence[ImageInput], name: str, axes: int) -> Tensor:
    """The arrays `name` of all pictures, one after the other; empty where none has one."""
    arrays = [array for array in (getattr(p, name) for p in pictures) if array is not None]
    if not arrays:
        return torch.zeros((0,) * axes)
    if len(arrays) < len(pictures):
        raise ValueError(f"{len(pictures) - len(arrays)} of {len(pictures)} pictures of one batch have no {name}")
    return torch.from_numpy(np.concatenate(arrays))


def _pad(
    arrays: Sequence[np.ndarray], rows: Sequence[int], n: int, length: int, like: np.ndarray | None = None
) -> Tensor:
    """[n, length, ...] with arrays[i] at the front of row rows[i], zeros elsewhere."""
    like = arrays[0] if len(arrays) else like
    padded = np.zeros((n, length, *like.shape[1:]), like.dtype)
    for row, array in zip(rows, arrays, strict=True):
        padded[row, : len(array)] = array
    return torch.from_numpy(padded)


def _pad_all(halves: Sequence[TextInput | ImageInput], rows: Sequence[int], n: int, length: int) -> dict[str, Tensor]:
    return {name: _pad([h.targets[name] for h in halves], rows, n, length) for name in _names(halves, "targets")}


def _concatenate_all(halves: Sequence[TextInput | ImageInput]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.concatenate([h.asked[name] for h in halves])) for name in _names(halves, "asked")}


def _names(halves: Sequence[TextInput | ImageInput], what: str) -> list[str]:
    names = {tuple(getattr(half, what)) for half in halves}
    if len(names) > 1:
        raise ValueError(f"examples of one batch carry different {what}: {sorted(names)}")
    return list(names.pop()) if names else []
