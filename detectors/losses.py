"""The detector's five training losses, and the matching and sampling of anchors and regions that they need.

Shape letters: A anchors of an image, P proposals, R regions of interest of an image, G objects, K boxes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detectors.faster_rcnn import FasterRCNN, grid_anchors
from detectors.preprocess import to_input
from detectors.recipes import SamplingConfig
from training.operators import box_iou

# Labels of anchors and regions.
IGNORED, BACKGROUND, FOREGROUND = -1, 0, 1


@dataclass(frozen=True, eq=False)
class Example:
    """A training image and its objects, in the form that Losses takes."""

    image: str
    """Id of the image."""
    pixels: Tensor
    """BGR [H, W, 3], resized: uint8, or float32 of 0..255."""
    boxes: Tensor
    """float32 [G, 4], xyxy in pixels of the resized image; at least one."""
    labels: Tensor
    """int64 [G], classes 0..C-1."""
    attributes: Tensor
    """float32 [G, number of attributes + 1]: 1 for the attributes of an object; the last column is "no attribute"."""
    seed: int
    """Seed for sampling anchors and regions. The CPU draws them, so they do not depend on the device."""

    def to(self, device: torch.device) -> "Example":
        moved = {name: getattr(self, name).to(device) for name in ("pixels", "boxes", "labels", "attributes")}
        return replace(self, **moved)


def encode_deltas(boxes: Tensor, targets: Tensor, weights: Sequence[float] = (1, 1, 1, 1)) -> Tensor:
    """Return the deltas [K, 4] with which apply_deltas, with the same weights, turns `boxes` [K, 4] into `targets`."""
    size, target_size = boxes[:, 2:] - boxes[:, :2], targets[:, 2:] - targets[:, :2]
    centre, target_centre = boxes[:, :2] + 0.5 * size, targets[:, :2] + 0.5 * target_size
    deltas = torch.cat([(target_centre - centre) / size, torch.log(target_size / size)], dim=1)
    return deltas * torch.tensor(tuple(weights), device=boxes.device, dtype=boxes.dtype)


def match_anchors(
    anchors: Tensor, objects: Tensor, height: int, width: int, sampling: SamplingConfig
) -> tuple[Tensor, Tensor]:
    """Return each anchor's label, such as FOREGROUND, and the index of its highest-IoU object, both int64 [A]."""
    iou = box_iou(objects, anchors)  # [G, A]
    if sampling.anchors_inside:
        inside = (anchors[:, :2] >= 0).all(dim=1) & (anchors[:, 2] <= width) & (anchors[:, 3] <= height)
        iou = iou.masked_fill(~inside, -1)
    best, matched = iou.max(dim=0)
    labels = torch.full_like(matched, IGNORED)
    labels[best < sampling.anchor_negative] = BACKGROUND
    best_of_object = iou.amax(dim=1, keepdim=True)
    # Without these, an object of unusual shape, with IoUs below anchor_positive, would never be proposed.
    closest = ((iou == best_of_object) & (best_of_object > 0)).any(dim=0)
    labels[closest | (best >= sampling.anchor_positive)] = FOREGROUND
    if sampling.anchors_inside:
        labels[~inside] = IGNORED
    return labels, matched


def subsample(labels: Tensor, count: int, foreground_share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample up to `count` indices of `labels`. Return those labelled FOREGROUND and those labelled BACKGROUND.

    At most `count * foreground_share` of them are foreground.
    """
    foreground = (labels == FOREGROUND).nonzero().flatten()
    background = (labels == BACKGROUND).nonzero().flatten()
    foreground = _sample(foreground, round(count * foreground_share), generator)
    return foreground, _sample(background, count - len(foreground), generator)


def _sample(indices: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return a random sample of `count` of the indices, or all if there are fewer, in ascending order."""
    order = torch.randperm(len(indices), generator=generator)[:count]
    return indices[order.sort().values.to(indices.device)]


class Losses(nn.Module):
    """A module that computes the network's losses in its forward pass, as DistributedDataParallel requires.

    Each loss is a pair (sum, number of terms), so that the mean does not depend on the number of processes.
    """

    def __init__(self, network: FasterRCNN, sampling: SamplingConfig):
        super().__init__()
        self.network, self.sampling = network, sampling
        self.proposal_config = replace(network.config, pre_nms=sampling.pre_nms, post_nms=sampling.post_nms)

    def forward(self, examples: Sequence[Example]) -> dict[str, tuple[Tensor, int]]:
        parts: dict[str, list[tuple[Tensor, int]]] = {}
        # Images of the same size form a batch; padding to a common size would change features near the border.
        for _, group in groupby(sorted(examples, key=_size), key=_size):
            for name, loss in self._group_losses(list(group)).items():
                parts.setdefault(name, []).append(loss)
        return {
            name: (sum((s for s, _ in losses), losses[0][0].new_zeros(())), sum(c for _, c in losses))
            for name, losses in parts.items()
        }

    def _group_losses(self, examples: list[Example]) -> dict[str, tuple[Tensor, int]]:
        network, size = self.network, _size(examples[0])
        generators = [torch.Generator().manual_seed(example.seed) for example in examples]
        c4 = network.backbone(torch.cat([to_input(example.pixels) for example in examples]))
        logits, deltas = network.rpn(c4)
        losses = self._anchor_losses(logits, deltas, examples, generators)
        with torch.no_grad():
            proposals, _ = network.proposals(logits.float(), deltas.float(), *size, config=self.proposal_config)
        regions = [self._sample_regions(*each) for each in zip(proposals, examples, generators, strict=True)]
        features = network.roi_features(c4, [boxes for boxes, _, _ in regions])
        return losses | self._region_losses(features, regions, examples)

    def _anchor_losses(
        self, logits: Tensor, deltas: Tensor, examples: list[Example], generators: list[torch.Generator]
    ) -> dict[str, tuple[Tensor, int]]:
        sampling = self.sampling
        anchors = grid_anchors(self.network.proposal_generator.cell_anchors, *logits.shape[2:])
        logits = logits.float().permute(0, 2, 3, 1).flatten(1)  # [N, A]
        deltas = deltas.float().unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)  # [N, A, 4]
        objectness, boxes, count = logits.sum() * 0, deltas.sum() * 0, 0
        for own_logits, own_deltas, example, generator in zip(logits, deltas, examples, generators, strict=True):
            labels, matched = match_anchors(anchors, example.boxes, *_size(example), sampling)
            foreground, background = subsample(labels, sampling.anchors, sampling.anchor_foreground, generator)
            sampled = torch.cat([foreground, background])
            truth = (labels[sampled] == FOREGROUND).float()
            objectness = objectness + F.binary_cross_entropy_with_logits(own_logits[sampled], truth, reduction="sum")
            target = encode_deltas(anchors[foreground], example.boxes[matched[foreground]])
            boxes = boxes + F.smooth_l1_loss(own_deltas[foreground], target, reduction="sum", beta=sampling.anchor_beta)
            count += len(sampled)
        return {"objectness": (objectness, count), "anchors": (boxes, count)}

    def _sample_regions(
        self, proposals: Tensor, example: Example, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, int]:
        """Return sampled regions [R, 4] (foreground first), their objects' indices [R], and the foreground count."""
        sampling = self.sampling
        boxes = torch.cat([proposals, example.boxes])
        best, matched = box_iou(boxes, example.boxes).max(dim=1)
        labels = torch.where(best >= sampling.roi_positive, FOREGROUND, BACKGROUND)
        foreground, background = subsample(labels, sampling.rois, sampling.roi_foreground, generator)
        sampled = torch.cat([foreground, background])
        return boxes[sampled], matched[sampled], len(foreground)

    def _region_losses(
        self, features: Tensor, regions: list[tuple[Tensor, Tensor, int]], examples: list[Example]
    ) -> dict[str, tuple[Tensor, int]]:
        config, sampling, predictor = self.network.config, self.sampling, self.network.roi_heads.box_predictor
        labels, is_foreground, targets, attributes = [], [], [], []
        for (boxes, matched, foreground), example in zip(regions, examples, strict=True):
            label = example.labels[matched].clone()
            label[foreground:] = config.num_classes
            labels.append(label)
            is_foreground.append(torch.arange(len(boxes), device=boxes.device) < foreground)
            objects = matched[:foreground]
            targets.append(encode_deltas(boxes[:foreground], example.boxes[objects], config.box_weights))
            attributes.append(example.attributes[objects])
        labels, is_foreground, targets, attributes = map(torch.cat, (labels, is_foreground, targets, attributes))
        classes = F.cross_entropy(predictor.cls_score(features).float(), labels, reduction="sum")
        features, true_classes = features[is_foreground], labels[is_foreground]
        deltas = predictor.bbox_pred(features).float().unflatten(1, (-1, 4))
        own = deltas[torch.arange(len(deltas), device=deltas.device), true_classes]
        boxes = F.smooth_l1_loss(own, targets, reduction="sum", beta=sampling.roi_beta)
        losses = {"classes": (classes, len(labels)), "boxes": (boxes, len(labels))}
        # The head gets the true class, because the most probable one is usually wrong early in training.
        logits = predictor.attribute_logits(features, true_classes)
        if logits is not None:
            logs = logits.float().log_softmax(dim=1)
            losses["attributes"] = (-(logs * attributes).sum(), int(attributes.sum()))
        return losses


def _size(example: Example) -> tuple[int, int]:
    return example.pixels.shape[0], example.pixels.shape[1]
