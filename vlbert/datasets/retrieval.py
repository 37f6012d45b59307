"""Image-text retrieval: Recall@K as VSE++ counts it, up to ties, and Karpathy's split files.

Ranks are from 0: how many others stand before the right one. A ValueError names the file.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlbert.datasets.files import read_json

CAPTIONS = 5  # of an image, as in all reported numbers; a few images of COCO and Flickr30k have more
RECALLS = (1, 5, 10)


@dataclass(frozen=True, eq=False)
class Ranks:
    """int64: the rank of each image's best caption among all captions, and of each caption's image among all images."""

    captions_of_image: np.ndarray
    image_of_caption: np.ndarray


def ranks(scores: np.ndarray, image_of: Sequence[int]) -> Ranks:
    """scores [images, captions], the higher the better; image_of [captions]: the image that a caption belongs to."""
    image_of = np.asarray(image_of)
    if scores.shape[1:] != image_of.shape or set(image_of.tolist()) != set(range(len(scores))):
        raise ValueError(f"scores {scores.shape} do not fit {len(image_of)} captions of {len(set(image_of))} images")
    if not np.isfinite(scores).all():
        raise ValueError(f"{int((~np.isfinite(scores)).sum())} of {scores.size} scores are no finite numbers")
    best = np.full(len(scores), scores.shape[1])
    for caption, image in enumerate(image_of):
        best[image] = min(best[image], _rank(scores[image], caption))
    by_caption = np.ascontiguousarray(scores.T)
    return Ranks(best, np.array([_rank(row, image) for row, image in zip(by_caption, image_of, strict=True)]))


def _rank(scores: np.ndarray, index: int) -> int:
    """How many stand before this one; of equal scores the last stands first.

    VSE++ reverses numpy's ascending order, which gives this where the sort is stable. numpy promises no order among
    equal scores, so ranks of ties may differ from VSE++'s.
    """
    return int((scores > scores[index]).sum() + (scores[index + 1 :] == scores[index]).sum())


def recalls(ranks: np.ndarray) -> dict[str, float]:
    """r1, r5, r10: % of ranks among the first 1, 5, 10; medr, meanr: median and mean rank, counted from 1."""
    found = {f"r{k}": 100.0 * int((ranks < k).sum()) / len(ranks) for k in RECALLS}
    return found | {"medr": float(np.floor(np.median(ranks)) + 1), "meanr": float(ranks.mean() + 1)}


def folds(scores: np.ndarray, image_of: Sequence[int], count: int) -> list[Ranks]:
    """The ranks within each of `count` equal parts of the images, in order; COCO's 1K numbers are means of five."""
    image_of, size = np.asarray(image_of), len(scores) // count
    if not size:
        raise ValueError(f"{len(scores)} images are too few for {count} folds")
    found = []
    for start in range(0, count * size, size):
        captions = (image_of >= start) & (image_of < start + size)
        found.append(ranks(scores[start : start + size][:, captions], image_of[captions] - start))
    return found


def read_splits(file: Path, captions: int = CAPTIONS) -> dict[str, dict[str, list[str]]]:
    """split -> image file -> its first captions, of Karpathy's dataset_*.json. COCO's `restval` is a split of its
    own."""
    found = defaultdict(dict)
    images = read_json(file, "the split file").get("images")
    for number, image in enumerate(images if isinstance(images, list) else [None]):
        try:
            texts = [sentence["raw"] for sentence in image["sentences"]][:captions]
            name, split = image["filename"], image["split"]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is no split file of Karpathy, images[{number}]: {error!r}; fetch it again"
            ) from error
        if len(texts) < captions:
            raise ValueError(f"{file}: {name} has {len(texts)} captions, {captions} are needed")
        if name in found[split]:
            raise ValueError(f"{file}: {name} stands there twice")
        found[split][name] = texts
    return dict(found)
