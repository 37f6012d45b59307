"""The network of faster_rcnn.py built from detectron2's modules: a second backend of the same detector.

`FasterRCNNDetector` accepts a `Detectron2FasterRCNN` in place of a `FasterRCNN`. Both have the same methods and state
dict names, so they load the same weight files. This module adds bottom-up attention's changes to detectron2's C4
network: Caffe's pooling in the stem, a res5 that keeps the size of its map, and the attribute head.
detectron2 is imported only when the network is built; docs/detector.md explains how to install it.
Shape letters are those of faster_rcnn.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detectors.faster_rcnn import STRIDE, AttributeHead, FasterRCNN, FasterRCNNConfig, HeadOutputs
from detectors.resnet import ResNetConfig

_NORMS = {"frozen": "FrozenBN", "batch": "BN"}
# RoIPool has no sampling ratio. detectron2's `ROIAlign` has no half-pixel shift (`ROIAlignV2` has it).
_POOLERS = {"pool": ("ROIPool", 0), "align1": ("ROIAlign", 1)}
# Arguments of RPN and RoI heads that are required but matter only in training.
_TRAINING = {"batch_size_per_image": 1, "positive_fraction": 0.5}


class Detectron2FasterRCNN(nn.Module):
    """FasterRCNN built with detectron2. Raises ValueError if detectron2 is missing or does not support a setting."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        # detectron2 drops small boxes after it has chosen the pre_nms best, Caffe before: their proposals differ.
        for name, supported in {"box_arithmetic": "continuous", "minimum_side": 0}.items():
            if (value := getattr(config, name)) != supported:
                raise ValueError(
                    f"FasterRCNNConfig.{name} is {value!r}; detectron2 supports only {supported}: use backend "
                    "faster_rcnn"
                )
        try:
            import detectron2.modeling  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"backend detectron2 needs the package detectron2, which cannot be imported ({error}); install it as "
                "in docs/detector.md, or use backend faster_rcnn, which computes the same"
            ) from error
        self.config = config
        self.backbone = _make_backbone(config.resnet)
        self.proposal_generator = _make_proposal_generator(config)
        self.roi_heads = _make_roi_heads(config)

    @classmethod
    def random_init(cls, config: FasterRCNNConfig, seed: int) -> "Detectron2FasterRCNN":
        """Build the network with the random weights that FasterRCNN.random_init gives for this seed."""
        with torch.random.fork_rng(devices=[]):
            network = cls(config).eval()
        network.load_state_dict(FasterRCNN.random_init(config, seed).state_dict())
        return network

    def for_inference(self, precision: str, rois_at_a_time: int) -> "Detectron2FasterRCNN":
        """Return this network in eval mode. Raises ValueError for a precision other than `fp32`.

        rois_at_a_time has no effect: detectron2 pools all boxes of a batch at once.
        """
        if precision != "fp32":
            raise ValueError(f"precision is {precision!r}, but detectron2 supports only fp32; use backend faster_rcnn")
        return self.eval()

    def rpn(self, c4: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the RPN's layers to C4 maps, as FasterRCNN.rpn does."""
        (logits,), (deltas,) = self.proposal_generator.rpn_head([c4])
        return logits, deltas

    def proposals(
        self, logits: Tensor, deltas: Tensor, height: int, width: int, scales: Sequence[float] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return each image's proposals [P, 4] (xyxy, input pixels) and their logits [P], best first.

        The arguments are those of FasterRCNN.proposals, but `scales` is ignored, because this backend does not support
        minimum_side. Boxes that are not finite or have no area inside the image are dropped after the `pre_nms` best
        boxes are chosen.
        """
        generator = self.proposal_generator
        scores = logits.permute(0, 2, 3, 1).flatten(1)
        deltas = deltas.unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)
        anchors = generator.anchor_generator([logits])
        instances = generator.predict_proposals(anchors, [scores], [deltas], [(height, width)] * len(logits))
        return [each.proposal_boxes.tensor for each in instances], [each.objectness_logits for each in instances]

    def roi_features(self, c4: Tensor, boxes: Sequence[Tensor]) -> Tensor:
        """Return the features of all boxes, [total number of boxes, D], as FasterRCNN.roi_features does."""
        from detectron2.structures import Boxes

        pooled = self.roi_heads.pooler([c4], [Boxes(each) for each in boxes])
        return self.roi_heads.res5(pooled).mean(dim=(2, 3))


AnyFasterRCNN = FasterRCNN | Detectron2FasterRCNN  # both have the same methods


def _make_stage(config: ResNetConfig, number: int, stride: int, dilation: int = 1) -> list[nn.Module]:
    """Build the blocks of ResNet stage `number` (2 to 5)."""
    from detectron2.modeling.backbone.resnet import BottleneckBlock, ResNet

    blocks, bottleneck = config.blocks[number - 2], config.width * 2 ** (number - 2)
    return ResNet.make_stage(
        BottleneckBlock,
        blocks,
        in_channels=config.width if number == 2 else 2 * bottleneck,
        bottleneck_channels=bottleneck,
        out_channels=4 * bottleneck,
        stride_per_block=[stride] + [1] * (blocks - 1),
        dilation=dilation,
        stride_in_1x1=config.stride_in_1x1,
        norm=_NORMS[config.norm],
    )


def _make_backbone(config: ResNetConfig) -> Any:
    """Build the backbone (stem to res4). It maps images [N, 3, H, W] to C4 maps [N, channels, h, w]."""
    from detectron2.modeling.backbone.resnet import BasicStem, ResNet

    class CaffeStem(BasicStem):
        """A stem with Caffe's max-pooling: no padding, sizes rounded up. BasicStem pads by 1 and rounds down."""

        def forward(self, images: Tensor) -> Tensor:
            return F.max_pool2d(F.relu_(self.conv1(images)), kernel_size=3, stride=2, padding=0, ceil_mode=True)

    class C4(ResNet):
        """A ResNet that returns the map of res4 instead of a dict of maps."""

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)["res4"]

    stem = CaffeStem if config.stem_pool == "caffe" else BasicStem
    stages = [_make_stage(config, 2, stride=1), _make_stage(config, 3, stride=2), _make_stage(config, 4, stride=2)]
    return C4(stem(3, config.width, norm=_NORMS[config.norm]), stages, out_features=["res4"])


def _make_proposal_generator(config: FasterRCNNConfig) -> Any:
    from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
    from detectron2.modeling.box_regression import Box2BoxTransform
    from detectron2.modeling.proposal_generator.rpn import RPN, StandardRPNHead

    class ProposalGenerator(RPN):
        """An RPN with the attribute `cell_anchors`, so that load_weights can set its anchors."""

        @property
        def cell_anchors(self) -> Tensor:
            """The anchor generator's buffer (not a copy) with the anchors of one cell, float32 [A, 4] xyxy."""
            return next(iter(self.anchor_generator.cell_anchors))

    return ProposalGenerator(
        in_features=["res4"],
        head=StandardRPNHead(
            in_channels=config.resnet.c4_channels, num_anchors=config.num_anchors, conv_dims=[config.rpn_channels]
        ),
        # Bottom-up attention centres anchors on the corners of cells; detectron2 usually shifts them by half a cell.
        anchor_generator=DefaultAnchorGenerator(
            sizes=[list(config.anchor_sizes)], aspect_ratios=[list(config.anchor_ratios)], strides=[STRIDE], offset=0.0
        ),
        anchor_matcher=None,
        box2box_transform=Box2BoxTransform(weights=(1.0, 1.0, 1.0, 1.0)),
        pre_nms_topk=(config.pre_nms, config.pre_nms),
        post_nms_topk=(config.post_nms, config.post_nms),
        nms_thresh=config.rpn_nms_threshold,
        **_TRAINING,
    )


def _make_roi_heads(config: FasterRCNNConfig) -> Any:
    from detectron2.modeling.poolers import ROIPooler
    from detectron2.modeling.roi_heads.roi_heads import Res5ROIHeads

    pooler, sampling_ratio = _POOLERS[config.roi_op]
    stride, dilation = (1, 2) if config.resnet.res5_dilated else (2, 1)
    return Res5ROIHeads(
        in_features=["res4"],
        pooler=ROIPooler(config.pool_size, [1 / STRIDE], sampling_ratio, pooler),
        res5=_make_stage(config.resnet, 5, stride, dilation),
        box_predictor=_make_box_predictor(config),
        num_classes=config.num_classes,
        proposal_matcher=None,
        **_TRAINING,
    )


def _make_box_predictor(config: FasterRCNNConfig) -> nn.Module:
    """Build detectron2's class and box heads, with bottom-up attention's attribute head."""
    from detectron2.layers import ShapeSpec
    from detectron2.modeling.box_regression import Box2BoxTransform
    from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers

    class BoxPredictor(AttributeHead, FastRCNNOutputLayers):
        def forward(self, features: Tensor) -> HeadOutputs:
            class_logits, deltas = super().forward(features)
            attribute_logits = self.attribute_logits(features, class_logits.argmax(dim=1))
            return HeadOutputs(class_logits, deltas.unflatten(1, (-1, 4)), attribute_logits)

    predictor = BoxPredictor(
        ShapeSpec(channels=config.resnet.res5_channels),
        box2box_transform=Box2BoxTransform(weights=tuple(float(weight) for weight in config.box_weights)),
        num_classes=config.num_classes,
    )
    predictor.add_attributes(config)
    return predictor
