"""Example, Batch and collate: the seam between CPU and GPU.

Legend of shape letters, used in every file of vlbert/:

    N  rows of a batch (one caption, question or expression each)      t, T  word pieces of a row; of the longest row
    P  pictures of a batch (rows without a picture have none)          r, R  regions of a row; of the row with most
    H, W  height and width of the padded pictures, pixels              K     regions that are there, over all rows
    C  channels of the model (hidden size)                             M     things asked for, over all rows
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Words:
    """The text half of an example.

    tokens    int64 [t]  WordPiece ids, special tokens included
    segments  int64 [t]  0 for the first sentence (A), 1 for the second (B); regions are C, which is 2
    looks_at  int64 [t]  the region whose look the token carries (row of Picture.boxes; 0 is the whole image)
    targets   name -> [t, ...]  what is asked at each piece; padded with zeros (False) in a batch
    asked     name -> [m, ...]  what is asked at chosen pieces only; concatenated in a batch, in row order
    """

    tokens: np.ndarray
    segments: np.ndarray
    looks_at: np.ndarray
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    asked: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Picture:
    """The picture half of an example.

    pixels   uint8 [3, h, w]   RGB, already resized
    boxes    float32 [r, 4]    x1 y1 x2 y2 in those pixels; row 0 is the whole image
    hidden   bool [r]          regions whose pixels the model must not see (masked regions); never row 0
    targets, asked             as in Words, by region
    """

    pixels: Tensor
    boxes: np.ndarray
    hidden: np.ndarray
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    asked: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Example:
    """One row of a batch before padding. `about` travels beside it untouched (ids for predictions)."""

    key: str
    words: Words
    picture: Picture | None = None
    about: dict = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Batch:
    """N examples, padded. Masks say what is real; no value in the data stands for "nothing".

    keys           list of N sample keys           about           list of N dicts
    tokens         int64 [N, T]                    boxes           float32 [N, R, 4]  pixels, row 0 the whole image
    text_mask      bool [N, T]                     region_mask     bool [N, R]  all False in a row without a picture
    segments       int64 [N, T]                    region_hidden   bool [N, R]
    looks_at       int64 [N, T]
    pixels         uint8 [P, 3, H, W]              picture_rows    int64 [P]     the row that each picture belongs to
    picture_sizes  int64 [P, 2]  (width, height) of each picture without its padding
    targets        name -> [N, T, ...] or [N, R, ...]              asked    name -> [M, ...], in row order
    """

    keys: list[str]
    about: list[dict]
    tokens: Tensor
    text_mask: Tensor
    segments: Tensor
    looks_at: Tensor
    boxes: Tensor
    region_mask: Tensor
    region_hidden: Tensor
    pixels: Tensor
    picture_rows: Tensor
    picture_sizes: Tensor
    targets: dict[str, Tensor]
    asked: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.keys)

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
            return change(value) if isinstance(value, Tensor) else value

        return Batch(**{f.name: changed(getattr(self, f.name)) for f in dataclasses.fields(self)})


def collate(examples: Sequence[Example]) -> Batch:
    """Pad N examples to one Batch. ValueError where examples of one batch carry different targets."""
    words = [e.words for e in examples]
    rows = [i for i, e in enumerate(examples) if e.picture is not None]
    pictures = [examples[i].picture for i in rows]
    t = max(len(w.tokens) for w in words)
    r = max((len(p.boxes) for p in pictures), default=0)

    pixels = torch.zeros(
        len(pictures),
        3,
        max((p.pixels.shape[1] for p in pictures), default=0),
        max((p.pixels.shape[2] for p in pictures), default=0),
        dtype=torch.uint8,
    )
    for i, picture in enumerate(pictures):
        pixels[i, :, : picture.pixels.shape[1], : picture.pixels.shape[2]] = picture.pixels

    every_word = range(len(examples))
    targets = _pad_all(words, every_word, len(examples), t) | _pad_all(pictures, rows, len(examples), r)
    asked = _concatenate_all(words) | _concatenate_all(pictures)
    return Batch(
        keys=[e.key for e in examples],
        about=[e.about for e in examples],
        tokens=_pad([w.tokens for w in words], every_word, len(examples), t),
        text_mask=_pad([np.ones(len(w.tokens), bool) for w in words], every_word, len(examples), t),
        segments=_pad([w.segments for w in words], every_word, len(examples), t),
        looks_at=_pad([w.looks_at for w in words], every_word, len(examples), t),
        boxes=_pad([p.boxes for p in pictures], rows, len(examples), r, like=np.zeros((0, 4), np.float32)),
        region_mask=_pad(
            [np.ones(len(p.boxes), bool) for p in pictures], rows, len(examples), r, like=np.zeros(0, bool)
        ),
        region_hidden=_pad([p.hidden for p in pictures], rows, len(examples), r, like=np.zeros(0, bool)),
        pixels=pixels,
        picture_rows=torch.tensor(rows, dtype=torch.int64),
        picture_sizes=torch.tensor([p.pixels.shape[:0:-1] for p in pictures], dtype=torch.int64).reshape(-1, 2),
        targets=targets,
        asked=asked,
    )


def _pad(
    arrays: Sequence[np.ndarray], rows: Sequence[int], n: int, length: int, like: np.ndarray | None = None
) -> Tensor:
    """[n, length, ...] with arrays[i] at the front of row rows[i], zeros elsewhere."""
    like = arrays[0] if len(arrays) else like
    padded = np.zeros((n, length, *like.shape[1:]), like.dtype)
    for row, array in zip(rows, arrays, strict=True):
        padded[row, : len(array)] = array
    return torch.from_numpy(padded)


def _pad_all(halves: Sequence[Words | Picture], rows: Sequence[int], n: int, length: int) -> dict[str, Tensor]:
    return {name: _pad([h.targets[name] for h in halves], rows, n, length) for name in _names(halves, "targets")}


def _concatenate_all(halves: Sequence[Words | Picture]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.concatenate([h.asked[name] for h in halves])) for name in _names(halves, "asked")}


def _names(halves: Sequence[Words | Picture], what: str) -> list[str]:
    names = {tuple(getattr(half, what)) for half in halves}
    if len(names) > 1:
        raise ValueError(f"examples of one batch carry different {what}: {sorted(names)}")
    return list(names.pop()) if names else []
