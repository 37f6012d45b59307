"""What a training of the detector consists of: frozen settings that check themselves, and one function per recipe.

The numbers of `detector_vg_resnet101` are those of bottom-up attention's own training on Visual Genome
(peteanderson80/bottom-up-attention: solver, configuration and training network of faster_rcnn_end2end_final); the
defaults of a field are those of Faster R-CNN (arXiv:1506.01497 and its released code).
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
    """What is read, in which batches."""

    batch: int = 8  # images a step, over all processes together
    flip: float = 0.5  # probability of mirroring an image
    unreadable: float = 0.01  # share of the images that may be absent or unreadable; more end the run
    workers: int = 2  # loading processes a rank; 0: load in the training process
    seed: int = 0  # of order, mirroring and sampling, and of new weights

    def __post_init__(self):
        super().__post_init__()
        check(self, self.batch > 0, "batch", "at least 1")
        check(self, 0 <= self.flip <= 1, "flip", "a probability")
        check(self, 0 <= self.unreadable <= 1, "unreadable", "a share from 0 to 1")
        check(self, self.workers >= 0, "workers", "0 or more")
        check(self, self.seed >= 0, "seed", "0 or more")


@dataclass(frozen=True)
class SamplingConfig:
    """Which anchors and regions of interest are sampled, and how their losses are added."""

    anchors: int = 256  # an image
    anchor_foreground: float = 0.5  # share of them that may be positive
    anchor_positive: float = 0.7  # IoU with an object from which an anchor is positive; the best of an object always is
    anchor_negative: float = 0.3  # IoU with every object below which it is negative; in between it is ignored
    anchors_inside: bool = True  # anchors that cross the image's border are ignored
    pre_nms: int = 12_000  # in training: boxes that enter the RPN's suppression ...
    post_nms: int = 2_000  # ... and proposals that leave it at most; objects' own boxes are added
    rois: int = 128  # regions of interest an image
    roi_foreground: float = 0.25  # share of them that may show an object
    roi_positive: float = 0.5  # IoU with an object from which a region shows it; all others are background
    anchor_beta: float = 1 / 9  # where smooth L1 becomes linear, for the RPN's deltas: sigma 3
    roi_beta: float = 1.0  # and for the box head's
    attribute_weight: float = 0.5  # of the attributes' loss; all others count 1

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


# As detectron2 trains, and Caffe did: SGD at one rate.
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
    """One run, whole."""

    network: FasterRCNNConfig = VG_RESNET101  # the network
    data: DataConfig = DataConfig()  # what is read, in which batches
    sampling: SamplingConfig = SamplingConfig()  # which anchors and regions the losses are about
    optimizer: OptimizerConfig = SGD  # how weights change, and at which rate
    root: str = ""  # folder or s3://bucket/prefix; the run's folder is ROOT/runs/<run>
    init_from: str | None = None  # weight file to start with: a ResNet (torchvision's, or ours) or a whole detector
    frozen_stages: int = 2  # 2: stem and res2 do not learn; 0: everything does
    precision: Literal["fp32", "bf16"] = "fp32"  # of matrix products and convolutions, on any device
    threads: int | None = None  # of torch on a CPU: another number gives other last bits; None: torch's own choice
    # In validation, within a class: a detection is suppressed by a better one of a higher IoU.
    validation_nms: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        check(self, 0 <= self.frozen_stages <= 4, "frozen_stages", "0 to 4")
        check(self, 0 <= self.validation_nms <= 1, "validation_nms", "from 0 to 1")
        check(self, self.threads is None or self.threads > 0, "threads", "at least 1")
        check(self, not (self.random_init and self.init_from), "random_init", "false with init_from")
        if self.network.box_arithmetic != "continuous":
            raise ValueError(
                f"network.box_arithmetic is {self.network.box_arithmetic}: boxes are learned as x2 - x1 wide; set "
                "--network.box_arithmetic=continuous"
            )


def detector_vg_resnet101() -> DetectorRecipe:
    """1600 classes and 400 attributes of Visual Genome, from an ImageNet ResNet-101; one image on each of 8 GPUs.

    The authors' detector has mAP@0.5 10.2 % (weighted by objects a class 15.1 %) on the 5,000 images of their val.txt,
    after 380,000 steps. Their learning rate is for 8 images a step; on N GPUs set data.batch=N and N/8 of it.
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
    """The data of `make demo`, from nothing, in about three minutes of one thread."""
    # The ResNet and the pooling of VL-BERT's demo, so that its Fast R-CNN can start from this one. RoIAlign keeps
    # positions between cells 16 pixels wide, which RoIPool rounds: with it, shapes are learned in half the steps.
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
