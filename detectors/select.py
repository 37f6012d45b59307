"""Selection of an image's regions from its proposals.

For each foreground class, NMS is applied to all boxes, ranked by their probability of that class. A box's confidence is
its highest probability among the classes in which NMS keeps it. Boxes with a confidence above a threshold are selected.
If these are fewer than 10 or more than 100 (the default limits), the 10 or 100 most confident boxes are selected.
Shape letters: P boxes, C foreground classes.
"""

from dataclasses import dataclass

import numpy as np

from storage.settings import FORM, check

# The factor that lowers the floor if too few boxes survive above it. Below _LOWEST_FLOOR, the floor becomes 0.
_LOWER_BY = 0.25
_LOWEST_FLOOR = 1e-4


@dataclass(frozen=True)
class SelectionSettings:
    """Settings for selecting regions. Defaults are VL-BERT's; bottom-up attention uses threshold=0.2, strict=False."""

    __pydantic_config__ = FORM

    minimum: int = 10
    """Minimum number of regions. If fewer boxes pass the threshold, the most confident ones are taken."""
    maximum: int = 100
    """Maximum number of regions. If more boxes pass the threshold, the most confident ones are taken."""
    threshold: float = 0.5
    """Confidence that a box needs, 0 to 1."""
    strict: bool = True
    """Require a confidence above `threshold`; otherwise, an equal confidence is enough."""
    nms_threshold: float = 0.3
    """IoU above which, within a class, the less probable of two boxes is suppressed."""
    plus_one: bool = False
    """Compute widths as x2 - x1 + 1, as Caffe does, instead of x2 - x1."""

    def __post_init__(self):
        check(self, self.maximum >= 1, "maximum", "at least 1")
        check(self, 0 <= self.minimum <= self.maximum, "minimum", f"from 0 to maximum, {self.maximum}")
        for name in ("threshold", "nms_threshold"):
            check(self, 0 <= getattr(self, name) <= 1, name, "from 0 to 1")


def select_regions(boxes: np.ndarray, foreground_probs: np.ndarray, settings: SelectionSettings) -> np.ndarray:
    """Return the indices of the selected boxes, int64 [K].

    `boxes` is [P, 4], xyxy in stored pixels, and `foreground_probs` is [P, C]. Indices are in ascending order or, if
    the minimum or maximum applies, most confident first.
    """
    if not len(boxes):
        return np.zeros(0, np.int64)
    overlaps = find_overlaps(boxes.astype(np.float32), settings)
    probs = foreground_probs.astype(np.float32)
    wanted = min(settings.minimum, len(boxes))
    # Only probabilities above a floor are considered. The result is still exact: a box is suppressed only by a more
    # probable one of the same class, so probabilities below the floor change nothing above it.
    passes = np.greater if settings.strict else np.greater_equal
    floor = settings.threshold
    confidence = surviving_confidence(overlaps, probs, floor)
    while floor > 0 and np.count_nonzero(passes(confidence, floor)) < wanted:
        floor = floor * _LOWER_BY if floor > _LOWEST_FLOOR else 0.0
        confidence = surviving_confidence(overlaps, probs, floor)

    kept = np.flatnonzero(passes(confidence, settings.threshold))
    if settings.minimum <= len(kept) <= settings.maximum:
        return kept
    count = wanted if len(kept) < settings.minimum else settings.maximum
    return np.argsort(-confidence, kind="stable")[:count]


def surviving_confidence(overlaps: np.ndarray, probs: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """Return each box's highest probability among the classes in which it survives NMS, float32 [P].

    `overlaps` is the result of find_overlaps, and `probs` is [P, C]. Probabilities below `floor` count as 0.
    """
    probs = probs[:, (probs >= floor).any(axis=0)]
    if not probs.size:
        return np.zeros(len(probs), np.float32)
    order = np.argsort(-probs, axis=0, kind="stable")
    candidates = probs >= floor
    alive = np.ones(probs.shape, bool)
    columns = np.arange(probs.shape[1])
    for boxes in order[: candidates.sum(axis=0).max()]:  # step k handles the box of rank k in each class
        alive &= ~(overlaps[:, boxes] & alive[boxes, columns])
    return np.where(alive & candidates, probs, np.float32(0)).max(axis=1)


def find_overlaps(boxes: np.ndarray, settings: SelectionSettings) -> np.ndarray:
    """Return a bool array [P, P]: True for each pair of different boxes whose IoU is above nms_threshold."""
    x1, y1, x2, y2 = boxes.T
    extra = np.float32(settings.plus_one)
    area = (x2 - x1 + extra) * (y2 - y1 + extra)
    width = np.minimum.outer(x2, x2) - np.maximum.outer(x1, x1) + extra
    height = np.minimum.outer(y2, y2) - np.maximum.outer(y1, y1) + extra
    intersection = np.maximum(width, 0) * np.maximum(height, 0)
    union = area[:, None] + area[None, :] - intersection
    iou = np.divide(intersection, union, out=np.zeros_like(union), where=union > 0)
    # float64 as in torchvision, which compares the float32 IoU with a float64 threshold.
    suppressing = iou > np.float64(settings.nms_threshold)
    np.fill_diagonal(suppressing, False)
    return suppressing
