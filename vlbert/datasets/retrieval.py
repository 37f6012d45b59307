"""Image-text retrieval: ranks, Recall@K and folds, and Karpathy's split files of Flickr30k and COCO.

A rank is the number of candidates ahead of the right one, so the best rank is 0.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlbert.datasets.files import parse_entries, read_json

CAPTIONS = 5  # captions per image in all reported numbers; a few images of COCO have more
RECALLS = (1, 5, 10)


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks (int64): for each image, the rank of its best caption; for each caption, the rank of its image."""

    captions_of_image: np.ndarray
    image_of_caption: np.ndarray


def ranks(scores: np.ndarray, image_of: Sequence[int] | np.ndarray) -> Ranks:
    """Return the ranks for `scores` [images, captions] (higher is better). Caption i belongs to image image_of[i]."""
    image_of = np.asarray(image_of)
    if not np.isfinite(scores).all():
        raise ValueError(f"{int((~np.isfinite(scores)).sum())} of {scores.size} scores are not finite")
    best = np.full(len(scores), scores.shape[1])
    for caption, image in enumerate(image_of):
        best[image] = min(best[image], _rank(scores[image], caption))
    by_caption = np.ascontiguousarray(scores.T)
    return Ranks(best, np.array([_rank(row, image) for row, image in zip(by_caption, image_of, strict=True)]))


def _rank(scores: np.ndarray, index: int) -> int:
    """Return the rank of scores[index]: the number of higher scores, plus half of the other equal ones, rounded up.

    Ranks therefore do not depend on the order of files, and a model that gives all candidates the same score has a
    recall of 0, given at least 20 candidates. VSE++ and ViLBERT instead rank equal scores in the order of numpy's sort.
    """
    better, equal = int((scores > scores[index]).sum()), int((scores == scores[index]).sum()) - 1
    return better + -(-equal // 2)


def recalls(ranks: np.ndarray) -> dict[str, float]:
    """Return metrics of 0-based ranks.

    r1, r5 and r10 are the percentages of ranks below 1, 5 and 10. medr and meanr are the 1-based median and mean rank.
    """
    metrics = {f"r{k}": 100.0 * int((ranks < k).sum()) / len(ranks) for k in RECALLS}
    return metrics | {"medr": float(np.floor(np.median(ranks)) + 1), "meanr": float(ranks.mean() + 1)}


def folds(scores: np.ndarray, image_of: Sequence[int] | np.ndarray, count: int) -> list[Ranks]:
    """Return the ranks in each of `count` equal folds of the images. COCO's "1K" results are means over five folds."""
    image_of, size = np.asarray(image_of), len(scores) // count
    parts = []
    for start in range(0, count * size, size):
        captions = (image_of >= start) & (image_of < start + size)
        parts.append(ranks(scores[start : start + size][:, captions], image_of[captions] - start))
    return parts


def read_splits(file: Path, captions: int | None = None) -> dict[str, dict[str, list[str]]]:
    """Read Karpathy's dataset_*.json, and return captions by split and image file.

    COCO's `restval` is a separate split. Only the first `captions` captions of an image are kept, by default all.
    """
    splits = defaultdict(dict)

    def image(entry: dict) -> tuple[str, str, list[str]]:
        texts = [sentence["raw"] for sentence in entry["sentences"]][:captions]
        if not all(isinstance(text, str) for text in (entry["split"], entry["filename"], *texts)):
            raise TypeError("a filename, split or caption is not a string")
        return entry["split"], entry["filename"], texts

    images = read_json(file, "task.folder and task.file").get("images")
    for split, name, texts in parse_entries(images, "images", "Karpathy", file, image):
        if name in splits[split]:
            raise ValueError(f"{file}: {name} is repeated")
        splits[split][name] = texts
    return dict(splits)
