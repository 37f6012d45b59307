"""Mean average precision (mAP@0.5), as reported for detectors of Visual Genome.

Average precision is computed as in VOC: the area under the interpolated precision-recall curve.

Each detection is compared with the object of its class that it overlaps most. It is a true positive if their IoU is at
least the threshold, and no detection with a higher score has matched that object.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.operators import box_iou


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections of one image."""

    boxes: np.ndarray
    """float32 [K, 4] xyxy."""
    scores: np.ndarray
    """float32 [K]."""
    labels: np.ndarray
    """int64 [K]."""


def match_detections(detections: Detections, boxes: np.ndarray, labels: np.ndarray, iou_threshold: float) -> np.ndarray:
    """Return which detections are true positives, bool [K]. Detections with equal scores are matched in input order.

    Args:
        boxes: Boxes of the annotated objects, float32 [G, 4] xyxy.
        labels: Classes of these objects, int64 [G].
    """
    true_positive = np.zeros(len(detections.scores), bool)
    matched = np.zeros(len(labels), bool)
    iou = box_iou(torch.from_numpy(detections.boxes), torch.from_numpy(boxes)).numpy()
    for index in np.argsort(-detections.scores, kind="stable"):
        candidates = np.flatnonzero(labels == detections.labels[index])
        best = candidates[iou[index, candidates].argmax()] if len(candidates) else None
        if best is not None and iou[index, best] >= iou_threshold and not matched[best]:
            true_positive[index] = matched[best] = True
    return true_positive


def average_precision(scores: np.ndarray, true_positive: np.ndarray, objects: int) -> float:
    """Return the area under the interpolated precision-recall curve of one class over all images.

    `scores` and `true_positive`, both [K], describe the class's detections. Detections with equal scores are ranked in
    input order. `objects` is the number of annotated objects of the class.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(true_positive[order])
    precision = hits / np.arange(1, len(hits) + 1)
    highest_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(highest_from_here[true_positive[order].astype(bool)].sum() / objects)


def class_results(labels: np.ndarray, scores: np.ndarray, true_positive: np.ndarray, objects: np.ndarray) -> list[dict]:
    """Return a row for each class with objects: the class, its average precision, object count and detection count.

    `labels`, `scores` and `true_positive`, all [K], describe the detections of all classes. `objects`, int64 [C], is
    the number of annotated objects of each class.
    """
    rows = []
    for label in np.flatnonzero(objects).tolist():
        own, count = labels == label, int(objects[label])
        precision = average_precision(scores[own], true_positive[own], count)
        rows.append({"class": label, "average_precision": precision, "objects": count, "detections": int(own.sum())})
    return rows


def mean_average_precision(rows: Sequence[dict]) -> dict[str, float]:
    """Return the mean average precision of the classes in `rows`, the result of class_results.

    `map50` is the plain mean. `map50_weighted` weights each class by its number of objects.
    """
    if not rows:
        return {}
    precisions = np.array([row["average_precision"] for row in rows])
    weights = np.array([row["objects"] for row in rows])
    return {"map50": float(precisions.mean()), "map50_weighted": float((precisions * weights).sum() / weights.sum())}
