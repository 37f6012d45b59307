"""Detector ids: those of committed stages stay, and an id follows everything that changes the regions."""

import dataclasses

import pytest

from demo.deployments import SHIPPED_DETECTOR
from detectors.config import DetectionConfig, DetectorSettings
from detectors.detect import describe_detector
from detectors.faster_rcnn import DEMO, VG_RESNET50
from detectors.run import identify
from detectors.select import SelectionSettings
from detectors.weights.files import describe_weights, read_config
from storage.settings import parse

SELECTION = "--selection.minimum=5 --selection.maximum=36 --selection.threshold=0.2 --selection.no_strict"
SELECTION += " --selection.nms_threshold=0.4 --selection.plus_one"
RANDOM = {"random_init": True, "seed": 3}
WEIGHTS = describe_weights(SHIPPED_DETECTOR, read_config(SHIPPED_DETECTOR))
CAFFE = dataclasses.replace(DEMO, resize="caffe", box_arithmetic="plus_one", minimum_side=16.0, roi_op="align1")
OTHERS = {"random_init": False, "weights_sha256": "ab" * 32, "attribute_head": False, "anchors": "generated"}


def detector_id(network=DEMO, weights=RANDOM, backend="faster_rcnn", **settings) -> str:
    return describe_detector(network, weights, DetectorSettings(**settings), backend)[0]


@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        ("7f65ee1663a7", "--preset=demo --random_init"),
        ("7b987339ed8f", f"--preset=vg_resnet101 --random_init {SELECTION}"),
        ("39bda8c3330e", "--backend=detectron2 --preset=vg_resnet101 --random_init"),
        ("fb693b9a235a", "--weights=SHIPPED --device=cuda"),
        ("71056b704e23", "--weights=SHIPPED --selection.minimum=3 --network.post_nms=30 --batch=8"),
        ("26a016ac89e2", "--weights=SHIPPED --boxes=regressed --keep_features --precision=bf16-res5 --device=cpu"),
        ("23e9ef518e4e", "--backend=detectron2 --weights=SHIPPED --selection.maximum=50"),
    ],
)
def test_a_config_names_the_detector_of_committed_stages(expected: str, fields: str):
    """Another id would make every shard that a detector has done look undone."""
    fields = fields.replace("SHIPPED", str(SHIPPED_DETECTOR))
    assert identify(parse(DetectionConfig, fields.split())) == expected


def test_ids_of_other_networks_and_weights_stay_and_follow_everything_that_changes_the_regions():
    assert detector_id(VG_RESNET50) == "73a55a8acd4c"
    assert detector_id(CAFFE, OTHERS, precision="bf16-res5", device="cuda:1") == "6ae21006d830"
    ids = [detector_id(), detector_id(dataclasses.replace(DEMO, post_nms=50)), detector_id(backend="detectron2")]
    ids += [detector_id(weights=one) for one in (RANDOM | {"seed": 4}, WEIGHTS, WEIGHTS | {"weights_sha256": ""})]
    ids += [detector_id(selection=SelectionSettings(threshold=0.2)), detector_id(boxes="regressed")]
    # The roundings of bfloat16 are a device's own.
    ids += [detector_id(precision="bf16-res5", device=device) for device in ("cpu", "cuda")]
    ids += [detector_id(keep_features=True)]
    assert len(set(ids)) == len(ids)
    # And nothing else does.
    weights = WEIGHTS | {"weights_file": "renamed", "classes": ["x"], "attribute_names": ["y"], "release": "z"}
    assert detector_id(weights=WEIGHTS) == detector_id(weights=weights, device="cuda:1", batch=8)
