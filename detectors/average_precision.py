"""mAP@0.5 as Visual Genome's detectors report it: VOC's average precision, the area under the interpolated curve.

A detection is right where it is of the class of the object that it overlaps most, by at least the threshold, and no
better detection of that class has taken that object before. Crowds count neither as found nor as missed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torchvision

WRONG, RIGHT, UNCOUNTED = 0, 1, 2


@dataclass(frozen=True, eq=False)
class ObjectStore:
    """What there is to be found in an image."""

    boxes: np.ndarray
    """float32 [G, 4] xyxy."""
    labels: np.ndarray
    """int64 [G]."""
    crowd: np.ndarray
    """bool [G]: boxes that may be detected or not."""


@dataclass(frozen=True, eq=False)
class Detections:
    """What was found in an image."""

    boxes: np.ndarray
    """float32 [K, 4] xyxy."""
    scores: np.ndarray
    """float32 [K]."""
    labels: np.ndarray
    """int64 [K]."""


def judge(found: Detections, there: ObjectStore, iou_threshold: float) -> np.ndarray:
    """int8 [K]: RIGHT, WRONG or UNCOUNTED, each detection of an image; of equal scores the first comes first."""
    verdicts = np.full(len(found.scores), WRONG, np.int8)
    taken = np.zeros(len(there.labels), bool)
    overlaps = torchvision.ops.box_iou(torch.from_numpy(found.boxes), torch.from_numpy(there.boxes)).numpy()
    inside = _share_inside(found.boxes, there.boxes)
    for index in np.argsort(-found.scores, kind="stable"):
        same = there.labels == found.labels[index]
        own = np.flatnonzero(same & ~there.crowd)
        best = own[overlaps[index, own].argmax()] if len(own) else None
        if best is not None and overlaps[index, best] >= iou_threshold:
            if not taken[best]:
                verdicts[index], taken[best] = RIGHT, True
        elif (inside[index, same & there.crowd] >= iou_threshold).any():
            verdicts[index] = UNCOUNTED
    return verdicts


def _share_inside(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[K, G]: how much of each box [K, 4] lies in each of the others [G, 4]; a crowd is larger than what it holds."""
    corners = np.maximum(boxes[:, None, :2], others[None, :, :2]), np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return (corners[1] - corners[0]).clip(min=0).prod(axis=2) / np.maximum(area, 1e-12)[:, None]


def average_precision(scores: np.ndarray, right: np.ndarray, objects: int) -> float:
    """Of one class over all images: the area under precision by recall, precision made falling from the right.

    Detections of equal score count in the order in which they are given.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(right[order])
    precision = hits / np.arange(1, len(hits) + 1)
    highest_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(highest_from_here[right[order].astype(bool)].sum() / objects)


@dataclass(frozen=True)
class ClassResult:
    """One class that the held-out images show."""

    label: int
    objects: int
    detections: int
    average_precision: float


def class_results(
    labels: np.ndarray, scores: np.ndarray, verdicts: np.ndarray, objects: np.ndarray
) -> list[ClassResult]:
    """Per class with objects; labels, scores, verdicts of all detections in a fixed order, objects int64 [C] of each
    class."""
    results = []
    for label in np.flatnonzero(objects):
        own = (labels == label) & (verdicts != UNCOUNTED)
        precision = average_precision(scores[own], verdicts[own] == RIGHT, int(objects[label]))
        results.append(ClassResult(int(label), int(objects[label]), int(own.sum()), precision))
    return results


def mean_average_precision(results: Sequence[ClassResult]) -> dict[str, float]:
    """`map50` over the classes that have objects, and `map50_weighted` by how many."""
    if not results:
        return {}
    precisions = np.array([result.average_precision for result in results])
    weights = np.array([result.objects for result in results])
    return {"map50": float(precisions.mean()), "map50_weighted": float((precisions * weights).sum() / weights.sum())}
