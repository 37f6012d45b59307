"""The 10-100 rule: which proposals of an image become its regions.

Every foreground class suppresses among all boxes by its own probabilities; a box's confidence is its highest
probability in a class in which it survived. Boxes above a threshold are kept, but never fewer than a minimum or more
than a maximum.
Shape letters: P boxes, C foreground classes.
"""

from dataclasses import dataclass

import numpy as np

from storage.settings import FORM, check

# The factor by which the floor is lowered when too few boxes survive above it; below _LOWEST_FLOOR it becomes 0.
_LOWER_BY = 0.25
_LOWEST_FLOOR = 1e-4


@dataclass(frozen=True)
class SelectionSettings:
    """The rule's numbers; the defaults are VL-BERT's. Threshold 0.2 and not strict is bottom-up-attention's."""

    __pydantic_config__ = FORM

    minimum: int = 10
    """At least so many boxes, where there are so many: the most confident ones."""
    maximum: int = 100
    """At most so many boxes: the most confident ones."""
    threshold: float = 0.5
    """Confidence that a box needs, 0..1."""
    strict: bool = True
    """A box needs more than `threshold`, not just as much."""
    nms_threshold: float = 0.3
    """Within a class, a box is suppressed by a more probable one of a higher IoU than this."""
    plus_one: bool = False
    """Widths are x2 - x1 + 1, as Caffe counts pixels, instead of x2 - x1."""

    def __post_init__(self):
        check(self, self.maximum >= 1, "maximum", "at least 1")
        check(self, 0 <= self.minimum <= self.maximum, "minimum", f"from 0 to maximum, {self.maximum}")
        for name in ("threshold", "nms_threshold"):
            check(self, 0 <= getattr(self, name) <= 1, name, "from 0 to 1")


def select_regions(boxes: np.ndarray, foreground_probs: np.ndarray, settings: SelectionSettings) -> np.ndarray:
    """Apply the rule to boxes [P, 4] (xyxy, original-image pixels) with probabilities [P, C], background left out.

    Returns the indices of the boxes kept, int64 [K]: ascending, unless minimum or maximum decided, then most confident
    first.
    Exact, although only pairs (box, class) above a floor are considered: a pair is only suppressed by a more probable
    one of the same class, so pairs below the floor change nothing above it.
    """
    if not len(boxes):
        return np.zeros(0, np.int64)
    overlaps = overlapping(boxes.astype(np.float32), settings)
    probs = foreground_probs.astype(np.float32)
    wanted = min(settings.minimum, len(boxes))
    floor = settings.threshold
    confidence = surviving_confidence(overlaps, probs, floor)
    while floor > 0 and np.count_nonzero(_passes(confidence, floor, settings)) < wanted:
        floor = floor * _LOWER_BY if floor > _LOWEST_FLOOR else 0.0
        confidence = surviving_confidence(overlaps, probs, floor)

    kept = np.flatnonzero(_passes(confidence, settings.threshold, settings))
    if settings.minimum <= len(kept) <= settings.maximum:
        return kept
    count = wanted if len(kept) < settings.minimum else settings.maximum
    return np.argsort(-confidence, kind="stable")[:count]


def surviving_confidence(overlaps: np.ndarray, probs: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """float32 [P]: each box's highest probability >= floor in a class in which it is not suppressed, or 0.

    overlaps bool [P, P]: which boxes suppress each other. All classes proceed together: step k decides about the box of
    rank k in each class.
    """
    probs = probs[:, (probs >= floor).any(axis=0)]
    if not probs.size:
        return np.zeros(len(probs), np.float32)
    order = np.argsort(-probs, axis=0, kind="stable")
    candidates = probs >= floor
    alive = np.ones(probs.shape, bool)
    columns = np.arange(probs.shape[1])
    for boxes in order[: candidates.sum(axis=0).max()]:
        alive &= ~(overlaps[:, boxes] & alive[boxes, columns])
    return np.where(alive & candidates, probs, np.float32(0)).max(axis=1)


def _passes(confidence: np.ndarray, threshold: float, settings: SelectionSettings) -> np.ndarray:
    return confidence > threshold if settings.strict else confidence >= threshold


def overlapping(boxes: np.ndarray, settings: SelectionSettings) -> np.ndarray:
    """bool [P, P]: which pairs of different boxes overlap by more than nms_threshold."""
    x1, y1, x2, y2 = boxes.T
    extra = np.float32(settings.plus_one)
    area = (x2 - x1 + extra) * (y2 - y1 + extra)
    width = np.minimum.outer(x2, x2) - np.maximum.outer(x1, x1) + extra
    height = np.minimum.outer(y2, y2) - np.maximum.outer(y1, y1) + extra
    intersection = np.maximum(width, 0) * np.maximum(height, 0)
    union = area[:, None] + area[None, :] - intersection
    iou = np.divide(intersection, union, out=np.zeros_like(union), where=union > 0)
    # A double on the right: torchvision compares the single-precision IoU with the threshold in double precision.
    suppressing = iou > np.float64(settings.nms_threshold)
    np.fill_diagonal(suppressing, False)
    return suppressing
