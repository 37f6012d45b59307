"""Detects objects in held-out images and measures mean average precision."""

import numpy as np
import torch
import torchvision
from torch import Tensor

from detectors.average_precision import (
    AnnotatedBoxes,
    Detections,
    class_results,
    match_detections,
    mean_average_precision,
)
from detectors.examples import HeldOutImages
from detectors.faster_rcnn import FasterRCNN
from detectors.ground_truth import LabelledImage
from detectors.preprocess import to_input
from detectors.recipes import DetectorRecipe, ValidationConfig
from training import distributed
from training.distributed import World
from training.loading import batches


@torch.inference_mode()
def detect(network: FasterRCNN, pixels: Tensor, config: ValidationConfig) -> tuple[Detections, np.ndarray]:
    """Detections of one image [1, 3, H, W], most probable first, and the proposals [P, 4] that they come from; all in
    pixels of the input."""
    height, width = pixels.shape[2:]
    c4 = network.backbone(pixels)
    logits, deltas = network.rpn(c4)
    (proposals,), _ = network.proposals(logits, deltas, height, width)
    if not len(proposals):
        return _detections(proposals, proposals[:, 0], proposals[:, 0].long()), proposals.cpu().numpy()
    outputs = network.heads(network.roi_features(c4, [proposals]))
    probs = outputs.class_logits.softmax(dim=1)[:, :-1]
    of, labels = (probs > config.score_threshold).nonzero(as_tuple=True)
    scores = probs[of, labels]
    boxes = network.regressed(proposals[of], outputs.box_deltas[of], labels, height, width)
    # In double precision: classes are moved apart by adding to their boxes, which would round them.
    kept = torchvision.ops.batched_nms(boxes.double(), scores.double(), labels, config.nms_threshold)
    kept = kept[: config.detections]
    return _detections(boxes[kept], scores[kept], labels[kept]), proposals.cpu().numpy()


def _detections(boxes: Tensor, scores: Tensor, labels: Tensor) -> Detections:
    return Detections(boxes.cpu().numpy(), scores.cpu().numpy(), labels.cpu().numpy())


def validate(
    network: FasterRCNN, recipe: DetectorRecipe, images: list[LabelledImage], classes: tuple[str, ...], world: World
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and one row a class, over the images of all ranks: mAP, and `proposal_recall`, the share of objects whose
    IoU with a proposal reaches the threshold."""
    config = recipe.validation
    training = network.training
    network.eval()
    rows, covered, bad = [], 0, 0
    data = HeldOutImages(images, recipe.network, world)
    for index, pixels in batches(data, range(len(data)), recipe.data.workers, world.device):
        if isinstance(pixels, str):
            bad += 1
            print(f"cannot validate on {pixels}", flush=True)
            continue
        detections, proposals = detect(network, to_input(pixels, world.device), config)
        objects = _annotated_boxes(images[index], pixels.shape[:2])
        right = match_detections(detections, objects, config.iou_threshold)
        rows.append((index, detections.labels, detections.scores, right, objects.labels))
        covered += _covered(proposals, objects, config.iou_threshold)
    network.train(training)
    # In the order of the images: any number of ranks then orders equal scores alike.
    rows = sorted(distributed.gather_rows(rows, world), key=lambda row: row[0])
    covered, bad = (sum(of_rank) for of_rank in zip(*distributed.gather_rows([(covered, bad)], world), strict=True))
    labels, scores, right, truth = (np.concatenate([row[i] for row in rows] or [np.zeros(0)]) for i in range(1, 5))
    counts = np.bincount(truth.astype(np.int64), minlength=recipe.network.num_classes)
    results = class_results(labels, scores, right.astype(bool), counts)
    metrics = mean_average_precision(results) | {"proposal_recall": covered / max(1, len(truth))}
    if bad:
        metrics["unreadable_images"] = bad
    predictions = [
        {
            "class": classes[result.label],
            "average_precision": result.average_precision,
            "objects": result.objects,
            "detections": result.detections,
        }
        for result in results
    ]
    return metrics, predictions


def _annotated_boxes(image: LabelledImage, size: tuple[int, int]) -> AnnotatedBoxes:
    """The image's objects, in pixels of the resized image of this height and width."""
    scale = np.array([size[1] / image.width, size[0] / image.height] * 2, np.float32)
    return AnnotatedBoxes(image.boxes * scale, image.labels)


def _covered(proposals: np.ndarray, objects: AnnotatedBoxes, threshold: float) -> int:
    """How many objects have a proposal of at least this IoU."""
    boxes = torch.from_numpy(objects.boxes)
    if not len(proposals) or not len(boxes):
        return 0
    return int((torchvision.ops.box_iou(boxes, torch.from_numpy(proposals)).amax(dim=1) >= threshold).sum())
