"""Validation of the detector on held-out images, by mean average precision as in VOC (all-point interpolation)."""

import numpy as np
import torch
import torchvision
from torch import Tensor

from detectors.average_precision import Detections, class_results, match_detections, mean_average_precision
from detectors.examples import HeldOutImages
from detectors.faster_rcnn import FasterRCNN, regress_boxes
from detectors.ground_truth import LabelledImage
from detectors.preprocess import to_input
from detectors.recipes import DetectorRecipe
from training import distributed
from training.distributed import World
from training.loading import batches
from training.operators import box_iou

SCORE_THRESHOLD = 0.05  # detections must have a higher probability
IOU_THRESHOLD = 0.5  # minimum IoU of a correct detection with an object's box
MOST_DETECTIONS = 100  # per image: the most probable ones


@torch.inference_mode()
def detect(network: FasterRCNN, pixels: Tensor, nms_threshold: float) -> tuple[Detections, np.ndarray]:
    """Return the objects detected in an image [1, 3, H, W], most probable first, and the proposals [P, 4]."""
    height, width = pixels.shape[2:]
    c4 = network.backbone(pixels)
    logits, deltas = network.rpn(c4)
    (proposals,), _ = network.proposals(logits, deltas, height, width)
    outputs = network.roi_heads.box_predictor(network.roi_features(c4, [proposals]))
    probs = outputs.class_logits.softmax(dim=1)[:, :-1]
    indices, labels = (probs > SCORE_THRESHOLD).nonzero(as_tuple=True)
    scores = probs[indices, labels]
    boxes = regress_boxes(network.config, proposals[indices], outputs.box_deltas[indices], labels, height, width)
    # In double precision: batched_nms adds an offset to the boxes of each class, which would round them in float32.
    kept = torchvision.ops.batched_nms(boxes.double(), scores.double(), labels, nms_threshold)[:MOST_DETECTIONS]
    detections = Detections(*(tensor[kept].cpu().numpy() for tensor in (boxes, scores, labels)))
    return detections, proposals.cpu().numpy()


def validate(
    network: FasterRCNN, recipe: DetectorRecipe, images: list[LabelledImage], classes: tuple[str, ...], world: World
) -> tuple[dict[str, float], list[dict]]:
    """Return the metrics over the images of all ranks, and a row of results for each class.

    The metric `proposal_recall` is the share of objects that have an IoU of at least IOU_THRESHOLD with a proposal.
    """
    training = network.training
    network.eval()
    rows, covered, bad = [], 0, 0
    data = HeldOutImages(images, recipe.network, world)
    for index, pixels in batches(data, range(len(data)), recipe.data.workers, world.device):
        if isinstance(pixels, str):
            bad += 1
            print(f"validation skips an unreadable image: {pixels}", flush=True)
            continue
        detections, proposals = detect(network, to_input(pixels, world.device), recipe.validation_nms)
        image, (height, width) = images[index], pixels.shape[:2]
        objects = image.boxes * np.array([width / image.width, height / image.height] * 2, np.float32)
        correct = match_detections(detections, objects, image.labels, IOU_THRESHOLD)
        rows.append((index, detections.labels, detections.scores, correct, image.labels))
        iou = box_iou(torch.from_numpy(objects), torch.from_numpy(proposals))
        covered += int((iou >= IOU_THRESHOLD).any(dim=1).sum())
    network.train(training)
    # Sorted by image, so that the order of equal scores does not depend on the number of ranks.
    rows = sorted(distributed.gather_rows(rows, world), key=lambda row: row[0])
    covered, bad = (sum(by_rank) for by_rank in zip(*distributed.gather_rows([(covered, bad)], world), strict=True))
    labels, scores, correct, truth = (np.concatenate([row[i] for row in rows] or [np.zeros(0)]) for i in range(1, 5))
    counts = np.bincount(truth.astype(np.int64), minlength=recipe.network.num_classes)
    results = class_results(labels, scores, correct.astype(bool), counts)
    metrics = mean_average_precision(results) | {"proposal_recall": covered / max(1, len(truth))}
    if bad:
        metrics["unreadable_images"] = bad
    return metrics, [row | {"class": classes[row["class"]]} for row in results]
