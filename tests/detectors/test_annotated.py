"""Regions from a COCO-format annotation file."""

import json
from pathlib import Path

import numpy as np
import pytest

from detectors.annotated import AnnotatedDetector
from storage.sample import Sample


def a_sample(
    url: str = "http://host/images/000001.jpg", key: str = "k1", size: tuple[int, int] = (200, 100), **more
) -> Sample:
    return Sample(key=key, image=b"", caption="c", url=url, width=size[0], height=size[1], sha256="", **more)


def coco(**changes) -> dict:
    """Two images, the second without boxes; categories out of order and with gaps."""
    content = {
        "images": [
            {"id": 7, "file_name": "000001.jpg", "width": 200, "height": 100},
            {"id": 8, "file_name": "000002.jpg", "width": 50, "height": 50},
        ],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 30, "bbox": [10, 20, 30, 40], "iscrowd": 0},
            {"id": 2, "image_id": 7, "category_id": 5, "bbox": [-5, 90, 300, 20], "iscrowd": 0},
        ],
        "categories": [{"id": 30, "name": "red star"}, {"id": 5, "name": "blue disc"}, {"id": 11, "name": "ring"}],
    }
    return content | changes


def detector_of(folder: Path, content: dict) -> AnnotatedDetector:
    file = folder / "annotations.json"
    file.write_text(json.dumps(content))
    return AnnotatedDetector(file)


def test_boxes_are_scaled_and_clipped_and_classes_stand_behind_the_background_in_order_of_their_ids(tmp_path: Path):
    detector = detector_of(tmp_path, coco())
    same, resized = detector.detect([a_sample(), a_sample(size=(100, 300))])
    assert same.boxes.tolist() == [[10, 20, 40, 60], [0, 90, 200, 100]]
    assert resized.boxes.tolist() == [[5, 60, 20, 180], [0, 270, 100, 300]]
    assert (same.background, same.labels.tolist(), same.scores.tolist()) == (0, [3, 1], [1, 1])
    assert same.class_probs.dtype == np.float16
    assert same.class_probs.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert detector.metadata["classes"] == ["blue disc", "ring", "red star"]


TURNED = {"size": (100, 200), "flags": ("exif_rotated",)}


@pytest.mark.parametrize(
    ("kind", "changes", "sample", "status"),
    [
        ("images", {}, {"url": "http://host/9.jpg"}, "no_annotation: no image has the file_name 9.jpg"),
        ("images", {"file_name": "train/a b.jpg"}, {"url": "http://host/x/a%20b.jpg?size=big#top"}, 2),
        ("images", {}, {"url": "http://host/000002.jpg", "size": (50, 50)}, "no_regions: image 8 has no boxes"),
        ("images", {}, TURNED, "size_mismatch: image 7 was annotated at 200x100"),
        ("annotations", {"iscrowd": 1}, {}, 1),
    ],
)
def test_a_sample_gets_the_boxes_of_its_image_or_a_status(
    tmp_path: Path, kind: str, changes: dict, sample: dict, status: str | int
):
    content = coco()
    content[kind][0] |= changes
    (found,) = detector_of(tmp_path, content).detect([a_sample(**sample)])
    assert found.startswith(status) if isinstance(status, str) else len(found) == status


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("categories", None, None, "it has no list categories"),
        ("annotations", None, [None], r"annotations\[0\] is None, not an object"),
        ("categories", "id", "5", r"categories\[1\] has the id '5', not a whole number"),
        ("categories", "id", 30, r"categories\[1\] has the same id as another entry, 30"),
        ("categories", "name", None, r"categories\[1\] has the name None, not a non-empty string"),
        ("images", "file_name", "other/000001.jpg", "images 7 and 8 both have the file_name 000001.jpg"),
        ("images", "height", 0, r"images\[1\] has the height 0, not a positive number"),
        ("annotations", "bbox", [200, 20, 30, 40], r"annotations\[1\] has the bbox"),
        ("annotations", "bbox", [10, 20, float("nan"), 40], r"annotations\[1\] has the bbox"),
        ("annotations", "category_id", 6, r"annotations\[1\] refers to image 7 and category 6"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, kind: str, field: str | None, value: object, message: str):
    content = coco()
    if field is None:
        content[kind] = value
    else:
        content[kind][1][field] = value
    with pytest.raises(ValueError, match=rf"annotations\.json.*{message}"):
        detector_of(tmp_path, content)


def test_a_torn_file_is_refused(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"images": [')
    with pytest.raises(ValueError, match=r"a\.json is truncated or not JSON"):
        AnnotatedDetector(tmp_path / "a.json")
