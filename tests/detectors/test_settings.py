"""Settings of the detectors that cannot be are refused, and the field is named."""

import dataclasses

import pytest

from detectors.detect import DetectorSettings
from detectors.faster_rcnn import VG_RESNET101
from detectors.recipes import DataConfig, SamplingConfig, ValidationConfig, detector_vg_resnet101
from detectors.resnet import RESNET101
from detectors.select import SelectionSettings


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (VG_RESNET101, "long_side", 100),
        (VG_RESNET101, "anchor_ratios", (1.0, -1.0)),
        (VG_RESNET101, "box_weights", (1.0, 1.0, 1.0)),
        (VG_RESNET101, "rpn_nms_threshold", 1.5),
        (VG_RESNET101, "num_classes", 0),
        (RESNET101, "blocks", (3, 4, 6)),
        (RESNET101, "width", 0),
        (DetectorSettings(), "device", "gpu"),
        (DetectorSettings(), "batch", 0),
        (SelectionSettings(), "minimum", 101),
        (SelectionSettings(), "threshold", 1.5),
        (DataConfig(), "flip", 2.0),
        (SamplingConfig(), "anchor_negative", 0.8),
        (SamplingConfig(), "roi_beta", 0.0),
        (ValidationConfig(), "iou_threshold", 1.1),
        (detector_vg_resnet101(), "spike", 0.5),
        (detector_vg_resnet101(), "frozen_stages", 5),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_its_name(config: object, name: str, value: object):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(config, **{name: value})
