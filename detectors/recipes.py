"""Settings for training the detector: frozen dataclasses that check their values, and one function per recipe.

The values of `detector_vg_resnet101` are those with which bottom-up attention was trained on Visual Genome
(peteanderson80/bottom-up-attention: solver, configuration and training network of faster_rcnn_end2end_final). The
defaults of the fields are those of Faster R-CNN (arXiv:1506.01497 and its released code).
"""

from dataclasses import dataclass, replace
from typing import Literal

from detectors.config import AnnotationConfig
from detectors.faster_rcnn import DEMO, VG_RESNET101, FasterRCNNConfig
from storage.settings import check, check_choices
from training.optimizer import OptimizerConfig
from training.recipe import RunSettings


@dataclass(frozen=True)
class DataConfig(AnnotationConfig):
    """Settings of the training data and its batches."""

    batch: int = 8  # images per step, over all ranks
    flip: float = 0.5  # probability of mirroring an image
    unreadable: float = 0.01  # maximum share of absent or unreadable images; the run stops if it is exceeded
    workers: int = 2  # loading processes per rank; 0: load in the training process
    seed: int = 0  # seed of order, mirroring, sampling and random weights

    def __post_init__(self):
        super().__post_init__()
        check(self, self.batch > 0, "batch", "at least 1")
        check(self, 0 <= self.flip <= 1, "flip", "a probability")
        check(self, 0 <= self.unreadable <= 1, "unreadable", "a share from 0 to 1")
        check(self, self.workers >= 0, "workers", "0 or more")
        check(self, self.seed >= 0, "seed", "0 or more")


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of anchors and regions of interest (RoIs), and the parameters of their losses."""

    anchors: int = 256  # sampled anchors per image
    anchor_foreground: float = 0.5  # maximum share of positive anchors among them
    anchor_positive: float = 0.7  # minimum IoU of a positive anchor with an object; an object's best is always positive
    anchor_negative: float = 0.3  # anchors are negative if all their IoUs are lower, and ignored if the best is between
    anchors_inside: bool = True  # ignore anchors that cross the image's border
    pre_nms: int = 12_000  # number of boxes, those with the highest objectness, that enter the RPN's NMS in training
    post_nms: int = 2_000  # maximum number of proposals per image after this NMS; the objects' own boxes are added
    rois: int = 128  # sampled RoIs per image
    roi_foreground: float = 0.25  # maximum share of foreground RoIs among them
    roi_positive: float = 0.5  # minimum IoU of a foreground RoI with an object; all other RoIs are background
    anchor_beta: float = 1 / 9  # value above which smooth L1 is linear, for the RPN's deltas (sigma 3)
    roi_beta: float = 1.0  # the same for the box head's deltas
    attribute_weight: float = 0.5  # weight of the attribute loss; the other losses have weight 1

    def __post_init__(self):
        check_choices(self)
        for name in ("anchors", "pre_nms", "post_nms", "rois"):
            check(self, getattr(self, name) > 0, name, "at least 1")
        for name in ("anchor_foreground", "anchor_positive", "roi_foreground", "roi_positive"):
            check(self, 0 < getattr(self, name) <= 1, name, "above 0, at most 1")
        check(self, 0 <= self.anchor_negative <= self.anchor_positive, "anchor_negative", "at most anchor_positive")
        check(self, self.anchor_beta > 0, "anchor_beta", "positive")
        check(self, self.roi_beta > 0, "roi_beta", "positive")
        check(self, self.attribute_weight >= 0, "attribute_weight", "0 or more")


# SGD at a constant rate, as in detectron2 and Caffe.
SGD = OptimizerConfig(
    kind="sgd",
    learning_rate=1e-3,
    warmup_steps=0,
    schedule="constant",
    weight_decay=5e-4,
    max_grad_norm=None,
    bert_adam=False,
)


@dataclass(frozen=True)
class DetectorRecipe(RunSettings):
    """All settings of a training run of the detector."""

    network: FasterRCNNConfig = VG_RESNET101  # architecture and proposals of the network
    data: DataConfig = DataConfig()  # training data, and how it is batched
    sampling: SamplingConfig = SamplingConfig()  # sampling of anchors and RoIs, and parameters of their losses
    optimizer: OptimizerConfig = SGD  # optimizer and learning rate schedule
    root: str = ""  # folder or s3://bucket/prefix; the run's folder is ROOT/runs/<run>
    init_from: str | None = None  # weight file to start from: a ResNet (torchvision's or ours) or a whole detector
    frozen_stages: int = 2  # number of frozen stages, of stem, res2, res3, res4; 0: train everything
    precision: Literal["fp32", "bf16"] = "fp32"  # precision of matrix products and convolutions, on any device
    threads: int | None = None  # torch's threads on a CPU, which change the last bits of results; None: torch's default
    validation_nms: float = 0.5  # IoU above which NMS within a class suppresses a detection in validation

    def __post_init__(self):
        super().__post_init__()
        check(self, 0 <= self.frozen_stages <= 4, "frozen_stages", "0 to 4")
        check(self, 0 <= self.validation_nms <= 1, "validation_nms", "from 0 to 1")
        check(self, self.threads is None or self.threads > 0, "threads", "at least 1")
        check(self, not (self.random_init and self.init_from), "random_init", "false with init_from")
        wanted = "continuous in training, where boxes are x2 - x1 wide; set --network.box_arithmetic=continuous"
        check(self.network, self.network.box_arithmetic == "continuous", "box_arithmetic", wanted)


def detector_vg_resnet101() -> DetectorRecipe:
    """Configure training on Visual Genome (1600 classes, 400 attributes), from an ImageNet ResNet-101, on 8 GPUs.

    After 380,000 steps, the authors' detector has an mAP@0.5 of 10.2 % on the 5,000 images of their val.txt (15.1 % if
    classes are weighted by their number of objects). Their learning rate is for 8 images per step, one on each GPU. On
    N GPUs, set data.batch=N and multiply the learning rate by N/8.
    """
    return DetectorRecipe(
        name="detector_vg_resnet101",
        sampling=SamplingConfig(anchors=64, rois=64, roi_foreground=0.5),
        optimizer=replace(SGD, schedule="step", decay_at=(350_000,)),
        validation_nms=0.3,
        steps=380_000,
        validate_every=20_000,
    )


def detector_demo() -> DetectorRecipe:
    """Configure training on the data of `make demo` from random weights. Takes about three minutes with one thread."""
    # ResNet and pooling are those of VL-BERT's demo, so that its Fast R-CNN can start from these weights. RoIAlign
    # keeps positions within cells of 16 pixels, while RoIPool rounds them; shapes are learned in half the steps.
    resnet = replace(DEMO.resnet, stride_in_1x1=False, stem_pool="torch", norm="batch")
    return DetectorRecipe(
        name="detector_demo",
        network=replace(DEMO, resnet=resnet, roi_op="align1"),
        data=DataConfig(batch=4, workers=0, held_out_last=300),
        sampling=SamplingConfig(
            anchors=64, anchors_inside=False, pre_nms=300, post_nms=100, rois=16, roi_foreground=0.5
        ),
        optimizer=OptimizerConfig(
            kind="adamw",
            learning_rate=6e-3,
            warmup_steps=50,
            betas=(0.9, 0.99),
            epsilon=1e-8,
            bert_adam=False,
            weight_decay=1e-2,
            max_grad_norm=10.0,
        ),
        steps=2_000,
        random_init=True,
        frozen_stages=0,
        threads=1,
        validate_every=500,
        save_every=250,
    )


RECIPES = {recipe.__name__: recipe for recipe in (detector_vg_resnet101, detector_demo)}
