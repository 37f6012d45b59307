"""mAP@0.5 as Visual Genome's detectors report it: VOC's average precision, the area under the interpolated curve.

A detection is a true positive if it has the class of the object that it overlaps most, by at least the threshold, and
no detection of that class with a higher score has matched that object. Detections of crowds are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torchvision

FALSE_POSITIVE, TRUE_POSITIVE, NOT_COUNTED = 0, 1, 2


@dataclass(frozen=True, eq=False)
class AnnotatedBoxes:
    """The objects of an image."""

    boxes: np.ndarray
    """float32 [G, 4] xyxy."""
    labels: np.ndarray
    """int64 [G]."""
    crowd: np.ndarray
    """bool [G]: boxes around many objects."""


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections in an image."""

    boxes: np.ndarray
    """float32 [K, 4] xyxy."""
    scores: np.ndarray
    """float32 [K]."""
    labels: np.ndarray
    """int64 [K]."""


def match_detections(detections: Detections, objects: AnnotatedBoxes, iou_threshold: float) -> np.ndarray:
    """int8 [K]: TRUE_POSITIVE, FALSE_POSITIVE or NOT_COUNTED; among equal scores the first detection matches first."""
    matches = np.full(len(detections.scores), FALSE_POSITIVE, np.int8)
    matched = np.zeros(len(objects.labels), bool)
    iou = torchvision.ops.box_iou(torch.from_numpy(detections.boxes), torch.from_numpy(objects.boxes)).numpy()
    inside = _share_inside(detections.boxes, objects.boxes)
    for index in np.argsort(-detections.scores, kind="stable"):
        same = objects.labels == detections.labels[index]
        candidates = np.flatnonzero(same & ~objects.crowd)
        best = candidates[iou[index, candidates].argmax()] if len(candidates) else None
        if best is not None and iou[index, best] >= iou_threshold:
            if not matched[best]:
                matches[index], matched[best] = TRUE_POSITIVE, True
        elif (inside[index, same & objects.crowd] >= iou_threshold).any():
            matches[index] = NOT_COUNTED
    return matches


def _share_inside(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[K, G]: the share of each box [K, 4] that lies in each of the others [G, 4]. For crowds, whose IoU is small."""
    corners = np.maximum(boxes[:, None, :2], others[None, :, :2]), np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return (corners[1] - corners[0]).clip(min=0).prod(axis=2) / np.maximum(area, 1e-12)[:, None]


def average_precision(scores: np.ndarray, true_positive: np.ndarray, objects: int) -> float:
    """The area under the interpolated precision-recall curve of one class over all images.

    scores [K], true_positive bool [K] of its detections; equal scores keep their order. objects: how many there are.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(true_positive[order])
    precision = hits / np.arange(1, len(hits) + 1)
    highest_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(highest_from_here[true_positive[order].astype(bool)].sum() / objects)


@dataclass(frozen=True)
class ClassResult:
    """The result of one class that the held-out images show."""

    label: int
    objects: int
    detections: int
    average_precision: float


def class_results(
    labels: np.ndarray, scores: np.ndarray, matches: np.ndarray, objects: np.ndarray
) -> list[ClassResult]:
    """The results of the classes that have objects.

    labels, scores, matches [K]: of all detections in a fixed order; objects int64 [C]: how many of each class.
    """
    results = []
    for label in np.flatnonzero(objects):
        own = (labels == label) & (matches != NOT_COUNTED)
        precision = average_precision(scores[own], matches[own] == TRUE_POSITIVE, int(objects[label]))
        results.append(ClassResult(int(label), int(objects[label]), int(own.sum()), precision))
    return results


def mean_average_precision(results: Sequence[ClassResult]) -> dict[str, float]:
    """`map50`: the mean over the classes that have objects; `map50_weighted`: weighted by how many."""
    if not results:
        return {}
    precisions = np.array([result.average_precision for result in results])
    weights = np.array([result.objects for result in results])
    return {"map50": float(precisions.mean()), "map50_weighted": float((precisions * weights).sum() / weights.sum())}
