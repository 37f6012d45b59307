"""The network of bottom-up attention: a ResNet-C4 Faster R-CNN with object classes and attributes.

Backbone, RPN, proposals, RoI features and heads can be called separately. preprocess.py makes the input, detect.py
wraps the network in the Detector interface, and train.py trains it.
Shape letters: N images, H W input pixels, h w cells of the C4 map (stride 16), A anchors per cell, P proposals,
K boxes, D channels of res5, C classes without the background. The last class is the background, and the last attribute
"no attribute".
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detectors.resnet import RESNET50, RESNET101, Res5, ResNetC4, ResNetConfig, fold_norms
from detectors.roi_align import roi_align
from detectors.roi_pool import roi_pool_chunks
from storage.settings import check, check_choices
from training.operators import clip_boxes, nms, roi_pool

STRIDE = 16
# Limit for the logarithm of a box's growth, so that exp() of any delta stays finite.
_LARGEST_LOG_SCALE = math.log(1000 / 16)


@dataclass(frozen=True)
class FasterRCNNConfig:
    """Architecture and proposal settings of the network. The defaults are those of the Visual Genome network."""

    resnet: ResNetConfig = RESNET101
    """Backbone (stem to res4) and res5."""
    num_classes: int = 1600
    """Number of classes C, without the background."""
    num_attributes: int = 400
    """Number of attributes, without "no attribute"; 0: no attribute head."""
    anchor_sizes: tuple[float, ...] = (64, 128, 256, 512)
    """Square roots of the anchors' areas, in pixels of the resized image."""
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Ratios of height to width of the anchors."""
    rpn_channels: int = 512
    """Output channels of the RPN's 3x3 convolution."""
    short_side: int = 600
    """Length to which an image's shorter side is resized, in pixels; less if the longer side would exceed long_side."""
    long_side: int = 1000
    """Maximum length of a resized image's longer side, in pixels."""
    resize: Literal["pil", "caffe"] = "pil"
    """Interpolation: `pil`, antialiased bilinear, rounded to 8 bits; `caffe`, bilinear between the four nearest pixels,
    as in cv2, not rounded."""
    pre_nms: int = 6000
    """Number of boxes, those with the highest objectness, that enter the RPN's NMS."""
    rpn_nms_threshold: float = 0.7
    """IoU above which the RPN's NMS suppresses a box."""
    post_nms: int = 300
    """Maximum number of proposals per image, after NMS."""
    minimum_side: float = 0.0
    """Length in pixels of the stored image that a proposal's sides must exceed or, with `plus_one`, at least equal."""
    box_arithmetic: Literal["continuous", "plus_one"] = "continuous"
    """`continuous`: boxes are x2 - x1 wide and clipped to width, and boxes that are too small are dropped after the
    `pre_nms` best are chosen, as in detectron2. `plus_one`: boxes are x2 - x1 + 1 wide and clipped to width - 1, and
    boxes that are too small are dropped before the choice, as in Caffe."""
    roi_op: Literal["pool", "align1"] = "pool"
    """`pool`: RoIPool, with bins of whole cells; `align1`: RoIAlign, one sample per bin and no half-pixel shift."""
    pool_size: int = 14
    """Cells per side of a pooled box."""
    box_weights: tuple[float, float, float, float] = (10, 10, 5, 5)
    """Divisors of the box head's dx, dy, dw, dh."""
    attribute_embedding: int = 256
    """Width of the class embedding that is an input of the attribute head."""
    attribute_hidden: int = 512
    """Hidden width of the attribute head."""

    def __post_init__(self):
        check_choices(self)
        at_least_one = ("num_classes", "rpn_channels", "short_side", "pre_nms", "post_nms", "pool_size")
        for name in (*at_least_one, "attribute_embedding", "attribute_hidden"):
            check(self, getattr(self, name) >= 1, name, "at least 1")
        check(self, self.long_side >= self.short_side, "long_side", f"at least short_side, {self.short_side}")
        for name in ("anchor_sizes", "anchor_ratios", "box_weights"):
            check(self, min(getattr(self, name), default=0) > 0, name, "positive numbers")
        check(self, len(self.box_weights) == 4, "box_weights", "four numbers")
        check(self, 0 <= self.rpn_nms_threshold <= 1, "rpn_nms_threshold", "from 0 to 1")
        check(self, self.minimum_side >= 0, "minimum_side", "0 or more")
        check(self, self.num_attributes >= 0, "num_attributes", "0 or more")

    @property
    def num_anchors(self) -> int:
        """Number of anchors per cell, A."""
        return len(self.anchor_sizes) * len(self.anchor_ratios)


VG_RESNET101 = FasterRCNNConfig()
VG_RESNET50 = FasterRCNNConfig(resnet=RESNET50)
# Small enough to train in minutes on a CPU, for the 224x168 scenes and 36 classes of the demo data.
DEMO = FasterRCNNConfig(
    resnet=ResNetConfig(blocks=(1, 1, 2, 2), width=8, stride_in_1x1=False, stem_pool="torch", res5_dilated=False),
    num_classes=36,
    num_attributes=0,
    anchor_sizes=(24, 48),
    rpn_channels=64,
    short_side=168,
    long_side=224,
    pre_nms=1000,
    post_nms=100,
    pool_size=7,
)
PRESETS = {"vg_resnet101": VG_RESNET101, "vg_resnet50": VG_RESNET50, "demo": DEMO}


# --- boxes ------------------------------------------------------------------------------------------------------------


def cell_anchors(config: FasterRCNNConfig) -> Tensor:
    """Return the anchors of one cell of the C4 map, centred on the cell's top left corner at (0, 0).

    The anchors are float32 [A, 4], xyxy in input pixels, ordered by size and then by ratio.
    """
    sides = [
        (math.sqrt(s * s / r), math.sqrt(s * s / r) * r) for s in config.anchor_sizes for r in config.anchor_ratios
    ]
    return torch.tensor([(-w / 2, -h / 2, w / 2, h / 2) for w, h in sides], dtype=torch.float32)


def grid_anchors(cell: Tensor, height: int, width: int) -> Tensor:
    """Return the anchors of all cells of a C4 map, row by row: [height * width * A, 4], xyxy in input pixels.

    `cell` has the anchors [A, 4] of one cell. `height` and `width` count the cells of the map.
    """
    ys = torch.arange(height, device=cell.device, dtype=cell.dtype) * STRIDE
    xs = torch.arange(width, device=cell.device, dtype=cell.dtype) * STRIDE
    y, x = torch.meshgrid(ys, xs, indexing="ij")
    shifts = torch.stack([x, y, x, y], dim=-1)
    return (shifts[:, :, None] + cell).reshape(-1, 4)


def apply_deltas(
    deltas: Tensor, boxes: Tensor, weights: Sequence[float] = (1, 1, 1, 1), plus_one: bool = False
) -> Tensor:
    """Move and scale boxes [K, 4] by deltas [K, ..., 4]. The deltas are first divided by `weights`.

    With `plus_one`, the width of a box is x2 - x1 + 1, as in Caffe.
    """
    x1, y1, x2, y2 = boxes.reshape(len(boxes), *[1] * (deltas.dim() - 2), 4).unbind(-1)
    width, height = x2 - x1 + plus_one, y2 - y1 + plus_one
    dx, dy, dw, dh = (d / w for d, w in zip(deltas.unbind(-1), weights, strict=True))
    x = dx * width + (x1 + 0.5 * width)
    y = dy * height + (y1 + 0.5 * height)
    half_width = 0.5 * torch.exp(dw.clamp(max=_LARGEST_LOG_SCALE)) * width
    half_height = 0.5 * torch.exp(dh.clamp(max=_LARGEST_LOG_SCALE)) * height
    return torch.stack([x - half_width, y - half_height, x + half_width, y + half_height], dim=-1)


def regress_boxes(
    config: FasterRCNNConfig, proposals: Tensor, deltas: Tensor, labels: Tensor, height: int, width: int
) -> Tensor:
    """Return each proposal moved by the deltas of its class and clipped to the image.

    `proposals` and the result are [K, 4], xyxy in input pixels. `deltas` is [K, C, 4], and `labels` [K] has the class
    of each proposal. A clipped box may have no area.
    """
    extra = config.box_arithmetic == "plus_one"
    own = deltas[torch.arange(len(labels), device=labels.device), labels]
    moved = apply_deltas(own, proposals, config.box_weights, plus_one=extra)
    return clip_boxes(moved, height - extra, width - extra)


def _take_best(count: int, scores: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return each image's `count` highest `scores` [N, K], best first, and the matching rows of `others` [N, K, 4]."""
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    order = order[:, :count, None].expand(-1, -1, 4)
    return scores[:, :count], *(other.gather(1, order) for other in others)


def _nms(boxes: Tensor, scores: Tensor, config: FasterRCNNConfig) -> Tensor:
    """Return the indices [P] of the boxes [K, 4] that survive NMS, best first. The boxes must be sorted by score."""
    limit, threshold = config.post_nms, config.rpn_nms_threshold
    # Only better boxes suppress a box. NMS of only the best boxes is therefore exact, and usually leaves enough.
    best = 4 * limit
    kept = nms(boxes[:best], scores[:best], threshold)
    if len(kept) < limit and best < len(boxes):
        kept = nms(boxes, scores, threshold)
    return kept[:limit]


# --- the network ------------------------------------------------------------------------------------------------------


class RPNHead(nn.Module):
    """The RPN's layers. They compute objectness logits [N, A, h, w] and box deltas [N, 4A, h, w] from C4 maps.

    Channels 4a to 4a + 3 of the deltas belong to anchor a.
    """

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        self.conv = nn.Conv2d(config.resnet.c4_channels, config.rpn_channels, 3, padding=1)
        self.objectness_logits = nn.Conv2d(config.rpn_channels, config.num_anchors, 1)
        self.anchor_deltas = nn.Conv2d(config.rpn_channels, 4 * config.num_anchors, 1)
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=0.01)
            else:
                nn.init.zeros_(parameter)

    def forward(self, c4: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.conv(c4))
        return self.objectness_logits(hidden), self.anchor_deltas(hidden)


class ProposalGenerator(nn.Module):
    """The RPN's layers, and the anchors of one cell of the C4 map (float32 [A, 4])."""

    cell_anchors: Tensor

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        self.rpn_head = RPNHead(config)
        # Not in the state dict: load_weights handles the anchors of published files.
        self.register_buffer("cell_anchors", cell_anchors(config), persistent=False)


@dataclass(frozen=True, eq=False)
class HeadOutputs:
    """Outputs of the class, box and attribute heads for K boxes."""

    class_logits: Tensor
    """[K, C + 1]."""
    box_deltas: Tensor
    """[K, C, 4], before division by box_weights."""
    attribute_logits: Tensor | None
    """[K, number of attributes + 1], or None if there is no attribute head."""


class AttributeHead(nn.Module):
    """Base class that adds an attribute head, which predicts attributes from a region's features and object class."""

    def add_attributes(self, config: FasterRCNNConfig) -> None:
        if not config.num_attributes:
            self.drop_attributes()
            return
        self.cls_embedding = nn.Embedding(config.num_classes + 1, config.attribute_embedding)
        channels = config.resnet.res5_channels + config.attribute_embedding
        self.fc_attr = nn.Linear(channels, config.attribute_hidden)
        self.attr_score = nn.Linear(config.attribute_hidden, config.num_attributes + 1)

    def drop_attributes(self) -> None:
        """Remove the attribute head, so that attribute_logits returns None."""
        self.cls_embedding = self.fc_attr = self.attr_score = None

    def attribute_logits(self, features: Tensor, labels: Tensor) -> Tensor | None:
        """Return attribute logits [K, number of attributes + 1], or None if there is no attribute head.

        `features` is [K, D], and `labels` [K] has the class of each box.
        """
        if self.cls_embedding is None or self.fc_attr is None or self.attr_score is None:
            return None
        embedded = self.cls_embedding(labels)
        return self.attr_score(F.relu(self.fc_attr(torch.cat([features, embedded], dim=1))))


class BoxPredictor(AttributeHead):
    """The class, box and attribute heads. The attribute head uses the most probable class."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        channels, classes = config.resnet.res5_channels, config.num_classes
        self.cls_score = nn.Linear(channels, classes + 1)
        self.bbox_pred = nn.Linear(channels, 4 * classes)
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        nn.init.zeros_(self.cls_score.bias)
        nn.init.zeros_(self.bbox_pred.bias)
        self.add_attributes(config)

    def forward(self, features: Tensor) -> HeadOutputs:
        class_logits = self.cls_score(features)
        deltas = self.bbox_pred(features).unflatten(1, (-1, 4))
        return HeadOutputs(class_logits, deltas, self.attribute_logits(features, class_logits.argmax(dim=1)))


class RoIHeads(nn.Module):
    """The layers after RoI pooling: res5, and the heads in `box_predictor`."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        self.res5 = Res5(config.resnet)
        self.box_predictor = BoxPredictor(config)


class FasterRCNN(nn.Module):
    """Faster R-CNN. Its state dict uses detectron2's parameter names."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        self.config = config
        self.rois_at_a_time: int | None = None  # boxes in a res5 batch; None: all, which trainable norms need
        self.backbone = ResNetC4(config.resnet)
        self.proposal_generator = ProposalGenerator(config)
        self.roi_heads = RoIHeads(config)

    @classmethod
    def random_init(cls, config: FasterRCNNConfig, seed: int) -> "FasterRCNN":
        """Build the network with random weights that depend only on the seed. Its detections are meaningless."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config).eval()

    def rpn(self, c4: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the RPN's layers (RPNHead) to C4 maps [N, channels, h, w]."""
        return self.proposal_generator.rpn_head(c4)

    def proposals(
        self,
        logits: Tensor,
        deltas: Tensor,
        height: int,
        width: int,
        scales: Sequence[float] | None = None,
        config: FasterRCNNConfig | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return each image's proposals [P, 4] (xyxy, input pixels) and their logits [P], best first.

        Boxes that are not finite or have no area inside the image are dropped.

        Args:
            logits: Objectness logits [N, A, h, w].
            deltas: Box deltas [N, 4A, h, w].
            height, width: Size of the network's input.
            scales: Input pixels per stored pixel, for each image. The default is 1.
            config: Proposal settings to use instead of the network's.
        """
        config = config or self.config
        caffe = config.box_arithmetic == "plus_one"
        anchors = grid_anchors(self.proposal_generator.cell_anchors, *logits.shape[2:])
        boxes = anchors.expand(len(logits), -1, -1)
        scores = logits.permute(0, 2, 3, 1).flatten(1)
        deltas = deltas.unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)
        scores = scores.nan_to_num(-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        # Caffe drops boxes before the best are taken, detectron2 afterwards.
        if not caffe:
            scores, boxes, deltas = _take_best(config.pre_nms, scores, boxes, deltas)
        boxes = apply_deltas(deltas.flatten(0, 1), boxes.flatten(0, 1), plus_one=caffe).unflatten(0, scores.shape)
        finite = torch.isfinite(boxes).all(dim=2) & (scores > -torch.inf)
        boxes = clip_boxes(boxes, height - caffe, width - caffe)
        sides = boxes[..., 2:] - boxes[..., :2] + caffe
        least = torch.tensor([[[config.minimum_side * scale]] for scale in scales or [1.0] * len(logits)])
        least = least.to(boxes.device, non_blocking=True)
        usable = finite & (sides >= least if caffe else sides > least).all(dim=2)
        # Dropped boxes are sorted behind the others, so no shape depends on them and the CPU reads all counts at once.
        scores, boxes = _take_best(config.pre_nms, torch.where(usable, scores, -torch.inf), boxes)
        ends = torch.cat([boxes[..., :2], boxes[..., 2:] + caffe], dim=2)
        counts = usable.cpu().sum(dim=1).tolist()
        kept = [
            _nms(own_ends[:count], own_scores[:count], config)
            for own_ends, own_scores, count in zip(ends, scores, counts, strict=True)
        ]
        boxes, scores = ([own[indices] for own, indices in zip(each, kept, strict=True)] for each in (boxes, scores))
        return boxes, scores

    def pool(self, c4: Tensor, rois: Tensor) -> Tensor:
        """Pool boxes from C4 maps to [K, channels, pool_size, pool_size].

        `rois` is [K, 5]: the index of a map, and xyxy in input pixels.
        """
        size = self.config.pool_size
        if self.config.roi_op == "pool":
            with torch.autocast(c4.device.type, enabled=False):  # half precision would move the bins
                c4 = c4.to(torch.promote_types(c4.dtype, torch.float32))
                return roi_pool(c4, rois.to(c4.dtype), size, 1 / STRIDE)
        return roi_align([c4], rois, size, 1 / STRIDE)

    def roi_features(self, c4: Tensor, boxes: Sequence[Tensor]) -> Tensor:
        """Return the features of all boxes, [total number of boxes, D]. A box's features are the mean of its res5 map.

        `boxes` has one tensor [K, 4], in input pixels, for each C4 map.
        """
        res5 = self.roi_heads.res5
        features = [res5(pooled).mean(dim=(2, 3), dtype=torch.float32) for pooled in self._pool_chunks(c4, boxes)]
        return torch.cat(features) if features else c4.new_zeros(0, self.config.resnet.res5_channels)

    def _pool_chunks(self, c4: Tensor, boxes: Sequence[Tensor]) -> Iterator[Tensor]:
        """Pool all boxes, and yield them in chunks [k, channels, pool_size, pool_size] of res5's dtype."""
        dtype = next(self.roi_heads.res5.parameters()).dtype
        chunk_size = self.rois_at_a_time
        if chunk_size and c4.device.type == "cpu" and self.config.roi_op == "pool":
            for image, own in zip(c4, boxes, strict=True):
                if len(own):
                    yield from roi_pool_chunks(image, own, self.config.pool_size, 1 / STRIDE, chunk_size, dtype)
            return
        rois = torch.cat([F.pad(own, (1, 0), value=image) for image, own in enumerate(boxes)])
        for chunk in rois.split(chunk_size or max(1, len(rois))):
            if len(chunk):
                yield self.pool(c4, chunk).to(dtype, memory_format=torch.channels_last)

    def for_inference(self, precision: str, rois_at_a_time: int) -> "FasterRCNN":
        """Return a faster copy of the network, with the same outputs up to rounding.

        Norms are folded into the convolutions, and tensors are channels last. With precision `bf16-res5`, res5 (nine
        tenths of the computation) runs in bfloat16. The backbone and the RPN stay in float32, because bfloat16 would
        change the proposals. `rois_at_a_time` is the number of boxes that res5 processes at once.
        """
        network = copy.deepcopy(self).eval().requires_grad_(False)
        fold_norms(network)
        network.to(memory_format=torch.channels_last)
        if precision == "bf16-res5":
            network.roi_heads.res5.to(torch.bfloat16)
        network.rois_at_a_time = rois_at_a_time
        return network
