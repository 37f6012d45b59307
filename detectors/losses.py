"""What the network is taught: which anchors and regions match an object, which of them are asked about, five losses.

Shape letters: A anchors of an image, P proposals, R regions of interest of an image, G objects, K boxes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from detectors.faster_rcnn import FasterRCNN, grid_anchors
from detectors.recipes import SamplingConfig

# How an anchor or a region is taught: not at all, as background, or as the object that it matches.
IGNORED, BACKGROUND, FOREGROUND = -1, 0, 1


@dataclass(frozen=True, eq=False)
class Target:
    """One image with its objects, as the network gets them."""

    pixels: Tensor
    """float32 [1, 3, H, W], what to_input gives."""
    boxes: Tensor
    """float32 [G, 4], xyxy in pixels of the input; at least one."""
    labels: Tensor
    """int64 [G], classes 0..C-1."""
    attributes: Tensor
    """float32 [G, number of attributes + 1], 1 where an object has one; the last column is "no attribute"."""
    generator: torch.Generator
    """Of the random choices among its anchors and regions; on the CPU, so that devices agree."""


def encode_deltas(boxes: Tensor, targets: Tensor, weights: Sequence[float] = (1, 1, 1, 1)) -> Tensor:
    """dx, dy, dw, dh [K, 4] that move boxes [K, 4] onto targets [K, 4], times `weights`: apply_deltas undoes it."""
    size, target_size = boxes[:, 2:] - boxes[:, :2], targets[:, 2:] - targets[:, :2]
    centre, target_centre = boxes[:, :2] + 0.5 * size, targets[:, :2] + 0.5 * target_size
    deltas = torch.cat([(target_centre - centre) / size, torch.log(target_size / size)], dim=1)
    return deltas * torch.tensor(tuple(weights), device=boxes.device, dtype=boxes.dtype)


def match_anchors(
    anchors: Tensor, objects: Tensor, height: int, width: int, sampling: SamplingConfig
) -> tuple[Tensor, Tensor]:
    """How each anchor is taught, int64 [A], and the object that it overlaps most, int64 [A]."""
    overlaps = torchvision.ops.box_iou(objects, anchors)  # [G, A]
    if sampling.anchors_inside:
        inside = (anchors[:, :2] >= 0).all(dim=1) & (anchors[:, 2] <= width) & (anchors[:, 3] <= height)
        overlaps = overlaps.masked_fill(~inside, -1)
    best, matched = overlaps.max(dim=0)
    taught = torch.full_like(matched, IGNORED)
    taught[best < sampling.anchor_negative] = BACKGROUND
    best_of_object = overlaps.amax(dim=1, keepdim=True)
    # Else an object of unusual shape, which no anchor overlaps by anchor_positive, would never be proposed.
    closest = ((overlaps == best_of_object) & (best_of_object > 0)).any(dim=0)
    taught[closest | (best >= sampling.anchor_positive)] = FOREGROUND
    if sampling.anchors_inside:
        taught[~inside] = IGNORED
    return taught, matched


def choose(taught: Tensor, count: int, foreground_share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of the foreground and of the background that are asked about: `count` together, where there are so many,
    of which the foreground may be its share."""
    foreground = (taught == FOREGROUND).nonzero().flatten()
    background = (taught == BACKGROUND).nonzero().flatten()
    foreground = _some(foreground, round(count * foreground_share), generator)
    return foreground, _some(background, count - len(foreground), generator)


def _some(indices: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` of the indices, or all, in ascending order."""
    order = torch.randperm(len(indices), generator=generator)[:count]
    return indices[order.sort().values.to(indices.device)]


@contextmanager
def _proposing(network: FasterRCNN, sampling: SamplingConfig) -> Iterator[None]:
    """The network with training's numbers of proposals."""
    before = network.config
    network.config = replace(before, pre_nms=sampling.pre_nms, post_nms=sampling.post_nms)
    try:
        yield
    finally:
        network.config = before


class Losses(nn.Module):
    """The network and its losses in one forward pass, as DistributedDataParallel wants them.

    Each loss comes as (sum, by how many to divide it), so that any number of processes adds up to the same.
    """

    def __init__(self, network: FasterRCNN, sampling: SamplingConfig):
        super().__init__()
        self.network, self.sampling = network, sampling

    def forward(self, targets: Sequence[Target]) -> dict[str, tuple[Tensor, int]]:
        found: dict[str, list[tuple[Tensor, int]]] = {}
        # Images of one size go through together; padding to one size would change what is seen near the border.
        for _, group in groupby(sorted(targets, key=_size), key=_size):
            for name, loss in self._of_group(list(group)).items():
                found.setdefault(name, []).append(loss)
        return {name: (sum(s for s, _ in losses), sum(c for _, c in losses)) for name, losses in found.items()}

    def _of_group(self, targets: list[Target]) -> dict[str, tuple[Tensor, int]]:
        network = self.network
        c4 = network.backbone(torch.cat([target.pixels for target in targets]))
        logits, deltas = network.rpn(c4)
        losses = self._of_anchors(logits, deltas, targets)
        regions = []
        for number, target in enumerate(targets):
            with torch.no_grad(), _proposing(network, self.sampling):
                size = target.pixels.shape[2:]
                proposals, _ = network.proposals(logits[number].float(), deltas[number].float(), *size)
            regions.append(self._regions(proposals, target))
        return losses | self._of_regions(network.roi_features(c4, [boxes for boxes, _, _ in regions]), regions, targets)

    def _of_anchors(self, logits: Tensor, deltas: Tensor, targets: list[Target]) -> dict[str, tuple[Tensor, int]]:
        sampling = self.sampling
        anchors = grid_anchors(self.network.proposal_generator.cell_anchors, *logits.shape[2:])
        logits = logits.float().permute(0, 2, 3, 1).flatten(1)  # [N, A]
        deltas = deltas.float().unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)  # [N, A, 4]
        objectness, boxes, count = logits.sum() * 0, deltas.sum() * 0, 0
        for of_image, moves, target in zip(logits, deltas, targets, strict=True):
            taught, matched = match_anchors(anchors, target.boxes, *target.pixels.shape[2:], sampling)
            foreground, background = choose(taught, sampling.anchors, sampling.anchor_foreground, target.generator)
            asked = torch.cat([foreground, background])
            truth = torch.zeros(len(asked), device=asked.device)
            truth[: len(foreground)] = 1
            objectness = objectness + F.binary_cross_entropy_with_logits(of_image[asked], truth, reduction="sum")
            wanted = encode_deltas(anchors[foreground], target.boxes[matched[foreground]])
            boxes = boxes + F.smooth_l1_loss(moves[foreground], wanted, reduction="sum", beta=sampling.anchor_beta)
            count += len(asked)
        return {"objectness": (objectness, count), "anchors": (boxes, count)}

    def _regions(self, proposals: Tensor, target: Target) -> tuple[Tensor, Tensor, int]:
        """Regions of interest [R, 4], the object that each overlaps most, int64 [R], and how many, the first ones, show
        it."""
        sampling = self.sampling
        boxes = torch.cat([proposals, target.boxes])
        best, matched = torchvision.ops.box_iou(boxes, target.boxes).max(dim=1)
        taught = torch.where(best >= sampling.roi_positive, FOREGROUND, BACKGROUND)
        foreground, background = choose(taught, sampling.rois, sampling.roi_foreground, target.generator)
        asked = torch.cat([foreground, background])
        return boxes[asked], matched[asked], len(foreground)

    def _of_regions(
        self, features: Tensor, regions: list[tuple[Tensor, Tensor, int]], targets: list[Target]
    ) -> dict[str, tuple[Tensor, int]]:
        config, sampling, predictor = self.network.config, self.sampling, self.network.roi_heads.box_predictor
        labels, shows, wanted, attributes = [], [], [], []
        for (boxes, matched, foreground), target in zip(regions, targets, strict=True):
            label = target.labels[matched].clone()
            label[foreground:] = config.num_classes
            labels.append(label)
            shows.append(torch.arange(len(boxes), device=boxes.device) < foreground)
            objects = matched[:foreground]
            wanted.append(encode_deltas(boxes[:foreground], target.boxes[objects], config.box_weights))
            attributes.append(target.attributes[objects])
        labels, shows, wanted, attributes = map(torch.cat, (labels, shows, wanted, attributes))
        classes = F.cross_entropy(predictor.cls_score(features).float(), labels, reduction="sum")
        moves = predictor.bbox_pred(features[shows]).float().unflatten(1, (-1, 4))
        own = moves[torch.arange(len(moves), device=moves.device), labels[shows]]
        boxes = F.smooth_l1_loss(own, wanted, reduction="sum", beta=sampling.roi_beta)
        losses = {"classes": (classes, len(labels)), "boxes": (boxes, len(labels))}
        if predictor.attr_score is not None:
            # Given the true class, as the most probable one is mostly wrong at first.
            embedded = predictor.cls_embedding(labels[shows])
            hidden = F.relu(predictor.fc_attr(torch.cat([features[shows], embedded], dim=1)))
            logs = predictor.attr_score(hidden).float().log_softmax(dim=1)
            losses["attributes"] = (-(logs * attributes).sum(), int(attributes.sum()))
        return losses


def _size(target: Target) -> tuple[int, int]:
    return tuple(target.pixels.shape[2:])
