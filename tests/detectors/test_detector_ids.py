"""Detector ids: those of committed stages stay, and an id follows everything that changes the regions."""

import dataclasses

import pytest

from demo.deployments import SHIPPED_DETECTOR
from detectors.config import DetectionConfig, DetectorSettings
from detectors.detect import describe_detector
from detectors.faster_rcnn import DEMO, VG_RESNET50, VG_RESNET101
from detectors.run import identify
from detectors.select import SelectionSettings
from detectors.weights.files import describe_weights, read_config
from storage.settings import parse

DEFAULT = DetectorSettings()
RANDOM = {"random_init": True, "seed": 3}
SHIPPED = read_config(SHIPPED_DETECTOR)
WEIGHTS = describe_weights(SHIPPED_DETECTOR, SHIPPED).metadata
OTHER_SELECTION = SelectionSettings(5, 50, 0.2, strict=False, nms_threshold=0.4, plus_one=True)
HALF = DetectorSettings(precision="bf16-res5", device="cuda:1")
CAFFE = dataclasses.replace(DEMO, resize="caffe", box_arithmetic="plus_one", minimum_side=16.0, roi_op="align1")


def detector_id(network, weights=RANDOM, settings=DEFAULT, given=None, backend="faster_rcnn") -> str:
    return describe_detector(network, weights, settings, given, backend)[0]


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ("73a55a8acd4c", (VG_RESNET50,)),
        ("39bda8c3330e", (VG_RESNET101, RANDOM | {"seed": 0}, DetectorSettings(), None, "detectron2")),
        ("fb693b9a235a", (SHIPPED, WEIGHTS)),
        (
            "18c5fb9f9c20",
            (SHIPPED, WEIGHTS, DetectorSettings(OTHER_SELECTION, "regressed", True, batch=8)),
        ),
        ("272c8b38ea9a", (SHIPPED, WEIGHTS, DetectorSettings(boxes="given"), "0123456789ab")),
        (
            "6ae21006d830",
            (
                CAFFE,
                {
                    "random_init": False,
                    "weights_sha256": "ab" * 32,
                    "attribute_head": False,
                    "anchors": "generated",
                },
                HALF,
            ),
        ),
    ],
)
def test_ids_are_those_of_the_committed_stages(expected: str, arguments: tuple):
    """Another id would make every shard that a detector has done look undone."""
    assert detector_id(*arguments) == expected


@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        ("7f65ee1663a7", "--preset=demo --random_init"),
        (
            "7b987339ed8f",
            "--preset=vg_resnet101 --random_init --selection.minimum=5 --selection.maximum=36 "
            "--selection.threshold=0.2 --selection.no_strict --selection.nms_threshold=0.4 --selection.plus_one",
        ),
        ("fb693b9a235a", "--weights=SHIPPED --device=cuda"),
        (
            "71056b704e23",
            "--weights=SHIPPED --selection.minimum=3 --network.post_nms=30 --batch=8",
        ),
        ("26a016ac89e2", "--weights=SHIPPED --boxes=regressed --keep_features --precision=bf16-res5"),
        ("23e9ef518e4e", "--backend=detectron2 --weights=SHIPPED --selection.maximum=50"),
    ],
)
def test_a_config_names_the_detector_of_committed_stages(expected: str, fields: str):
    fields = fields.replace("SHIPPED", str(SHIPPED_DETECTOR))
    assert identify(parse(DetectionConfig, fields.split())) == expected


def test_everything_that_changes_the_regions_changes_the_id():
    settings = [
        DetectorSettings(selection=SelectionSettings(threshold=0.2)),
        DetectorSettings(boxes="regressed"),
        DetectorSettings(keep_features=True),
        DetectorSettings(precision="bf16-res5"),
        DetectorSettings(precision="bf16-res5", device="cuda"),  # its roundings are a device's own
    ]
    given = DetectorSettings(boxes="given")
    ids = [detector_id(DEMO), detector_id(dataclasses.replace(DEMO, post_nms=50))]
    ids += [detector_id(DEMO, weights) for weights in (RANDOM | {"seed": 4}, WEIGHTS, WEIGHTS | {"weights_sha256": ""})]
    ids += [detector_id(DEMO, RANDOM, each) for each in settings]
    ids += [detector_id(DEMO, RANDOM, given, annotations) for annotations in ("0" * 12, "1" * 12)]
    ids += [detector_id(DEMO, backend="detectron2")]
    assert len(set(ids)) == len(ids)


def test_what_does_not_change_the_regions_does_not_change_the_id():
    weights = WEIGHTS | {"weights_file": "renamed", "classes": ["x"], "attribute_names": ["y"], "release": "z"}
    running = DetectorSettings(device="cuda:1", batch=8)
    assert detector_id(DEMO, WEIGHTS) == detector_id(DEMO, weights, running)
