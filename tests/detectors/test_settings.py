"""Settings of the detectors that cannot be are refused, and the field is named."""

import dataclasses

import pytest

from detectors.detect import DetectorSettings
from detectors.faster_rcnn import VG_RESNET101, FasterRCNNConfig
from detectors.recipes import DataConfig, SamplingConfig, ValidationConfig, detector_vg_resnet101
from detectors.resnet import RESNET101, ResNetConfig
from detectors.select import SelectionSettings

VALID = {
    FasterRCNNConfig: VG_RESNET101,
    ResNetConfig: RESNET101,
    DetectorSettings: DetectorSettings(),
    SelectionSettings: SelectionSettings(),
    DataConfig: DataConfig(),
    SamplingConfig: SamplingConfig(),
    ValidationConfig: ValidationConfig(),
}
REFUSED = [
    (FasterRCNNConfig, "roi_op", "align2"),
    (FasterRCNNConfig, "resize", "cv2"),
    (FasterRCNNConfig, "box_arithmetic", "legacy"),
    (FasterRCNNConfig, "long_side", 100),
    (FasterRCNNConfig, "anchor_sizes", ()),
    (FasterRCNNConfig, "anchor_ratios", (1.0, -1.0)),
    (FasterRCNNConfig, "box_weights", (1.0, 1.0, 1.0)),
    (FasterRCNNConfig, "rpn_nms_threshold", 1.5),
    (FasterRCNNConfig, "minimum_side", -1.0),
    (FasterRCNNConfig, "num_attributes", -1),
    *(
        (FasterRCNNConfig, name, 0)
        for name in ("num_classes", "rpn_channels", "short_side", "pre_nms", "post_nms", "pool_size")
    ),
    *((FasterRCNNConfig, name, 0) for name in ("attribute_embedding", "attribute_hidden")),
    (ResNetConfig, "blocks", (3, 4, 6)),
    (ResNetConfig, "stem_pool", "same"),
    (ResNetConfig, "norm", "group"),
    (ResNetConfig, "width", 0),
    (DetectorSettings, "device", "gpu"),
    (DetectorSettings, "tf32", True),
    (DetectorSettings, "threads", 0),
    (DetectorSettings, "batch", 0),
    (DetectorSettings, "workers", 0),
    (DetectorSettings, "boxes", "detections"),
    (DetectorSettings, "precision", "fp16"),
    (SelectionSettings, "minimum", 101),
    (SelectionSettings, "maximum", 0),
    (SelectionSettings, "threshold", 1.5),
    (SelectionSettings, "nms_threshold", -0.1),
    (DataConfig, "flip", 2.0),
    (DataConfig, "batch", 0),
    (DataConfig, "unreadable", 1.5),
    (SamplingConfig, "anchor_negative", 0.8),
    (SamplingConfig, "rois", 0),
    (SamplingConfig, "roi_beta", 0.0),
    (ValidationConfig, "iou_threshold", 1.1),
    (ValidationConfig, "detections", 0),
]


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_a_field_that_cannot_be_is_refused_by_its_name(kind: type, name: str, value: object):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(VALID[kind], **{name: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 0), ("spike", 0.5), ("frozen_stages", 5), ("threads", 0), ("save_every", 0), ("precision", "fp16")],
)
def test_a_recipes_field_that_cannot_be_is_refused_by_its_name(field: str, value: object):
    with pytest.raises(ValueError, match=f"DetectorRecipe.{field}"):
        dataclasses.replace(detector_vg_resnet101(), **{field: value})
