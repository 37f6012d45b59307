"""Image-text retrieval: ranks, Recall@K and folds, and Karpathy's split files of Flickr30k and COCO.

Ranks are from 0: how many others stand before the right one. A ValueError names the file.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlbert.datasets.files import parse_entries, read_json

CAPTIONS = 5  # of an image, as in all reported numbers; a few images of COCO have more
RECALLS = (1, 5, 10)


@dataclass(frozen=True, eq=False)
class Ranks:
    """int64: the rank of each image's best caption among all captions, and of each caption's image among all images."""

    captions_of_image: np.ndarray
    image_of_caption: np.ndarray


def ranks(scores: np.ndarray, image_of: Sequence[int]) -> Ranks:
    """scores [images, captions], the higher the better; image_of [captions]: the image that a caption belongs to."""
    image_of = np.asarray(image_of)
    if not np.isfinite(scores).all():
        raise ValueError(f"{int((~np.isfinite(scores)).sum())} of {scores.size} scores are no finite numbers")
    best = np.full(len(scores), scores.shape[1])
    for caption, image in enumerate(image_of):
        best[image] = min(best[image], _rank(scores[image], caption))
    by_caption = np.ascontiguousarray(scores.T)
    return Ranks(best, np.array([_rank(row, image) for row, image in zip(by_caption, image_of, strict=True)]))


def _rank(scores: np.ndarray, index: int) -> int:
    """How many stand before this one: all that are better and half of its equals, rounded up.

    So a model that gives one score to everything finds nothing, and the order of the files changes no rank. VSE++ and
    ViLBERT sort instead, where the order of equals is that of numpy's sort.
    """
    better, equal = int((scores > scores[index]).sum()), int((scores == scores[index]).sum()) - 1
    return better + -(-equal // 2)


def recalls(ranks: np.ndarray) -> dict[str, float]:
    """r1, r5, r10: % of ranks among the first 1, 5, 10; medr, meanr: median and mean rank, counted from 1."""
    found = {f"r{k}": 100.0 * int((ranks < k).sum()) / len(ranks) for k in RECALLS}
    return found | {"medr": float(np.floor(np.median(ranks)) + 1), "meanr": float(ranks.mean() + 1)}


def folds(scores: np.ndarray, image_of: Sequence[int], count: int) -> list[Ranks]:
    """The ranks within each of `count` equal parts of the images, in order; COCO's 1K numbers are means of five."""
    image_of, size = np.asarray(image_of), len(scores) // count
    found = []
    for start in range(0, count * size, size):
        captions = (image_of >= start) & (image_of < start + size)
        found.append(ranks(scores[start : start + size][:, captions], image_of[captions] - start))
    return found


def read_splits(file: Path, captions: int | None = None) -> dict[str, dict[str, list[str]]]:
    """split -> image file -> its captions, of Karpathy's dataset_*.json; COCO's `restval` is a split of its own.

    captions: the first so many of an image; None: all. An image may have fewer, or none.
    """
    found = defaultdict(dict)

    def image(entry: dict) -> tuple[str, str, list[str]]:
        texts = [sentence["raw"] for sentence in entry["sentences"]][:captions]
        if not all(isinstance(text, str) for text in (entry["split"], entry["filename"], *texts)):
            raise TypeError("a filename, split or caption is no text")
        return entry["split"], entry["filename"], texts

    images = read_json(file, "task.folder and task.file").get("images")
    for split, name, texts in parse_entries(images, "images", "Karpathy", file, image):
        if name in found[split]:
            raise ValueError(f"{file}: {name} stands there twice")
        found[split][name] = texts
    return dict(found)


# R@1 on the test split, %, from table 1 of Unicoder-VL and table 1 of ViLBERT: data set -> metric -> text. "caption" is
# image -> caption, "image" caption -> image, "_fold" a mean of five folds.
_REPORTED = {
    "flickr30k": {
        "caption_r1": "86.2 Unicoder-VL, 64.3 Unicoder-VL zero-shot",
        "image_r1": "71.5 Unicoder-VL, 48.4 Unicoder-VL zero-shot, 58.20 ViLBERT, 31.86 ViLBERT zero-shot",
    },
    "coco": {
        "caption_r1": "62.3 Unicoder-VL",
        "image_r1": "46.7 Unicoder-VL",
        "caption_r1_fold": "84.3 Unicoder-VL, 54.4 Unicoder-VL zero-shot",
        "image_r1_fold": "69.7 Unicoder-VL, 43.4 Unicoder-VL zero-shot",
    },
}


def reported(file: str, split: str) -> dict[str, str]:
    """What the papers report on a split of a split file, in %: metric of the task -> text."""
    return next((table for name, table in _REPORTED.items() if name in file and split == "test"), {})
