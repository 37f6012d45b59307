"""Regions from a COCO-format annotation file."""

import json
from pathlib import Path

import numpy as np
import pytest

from detectors.annotated import AnnotatedDetector
from storage.sample import Regions, Sample


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


def detector_of(folder: Path, content: dict, name: str = "annotations.json", **settings) -> AnnotatedDetector:
    file = folder / name
    file.write_text(json.dumps(content))
    return AnnotatedDetector(file, **settings)


def test_boxes_become_xyxy_clipped_to_the_image(tmp_path: Path):
    (regions,) = detector_of(tmp_path, coco()).detect([a_sample()])
    assert regions.boxes.tolist() == [[10, 20, 40, 60], [0, 90, 200, 100]]
    assert regions.scores.tolist() == [1, 1]


def test_boxes_are_scaled_to_the_stored_image(tmp_path: Path):
    (regions,) = detector_of(tmp_path, coco()).detect([a_sample(size=(100, 300))])
    assert regions.boxes.tolist() == [[5, 60, 20, 180], [0, 270, 100, 300]]


def test_classes_are_columns_after_the_background_in_order_of_category_id(tmp_path: Path):
    detector = detector_of(tmp_path, coco())
    (regions,) = detector.detect([a_sample()])
    assert regions.background == 0
    assert regions.labels.tolist() == [3, 1]
    assert regions.class_probs.dtype == np.float16
    assert regions.class_probs.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert detector.metadata["classes"] == ["blue disc", "ring", "red star"]


def test_an_image_with_a_sample_key_belongs_to_that_sample_alone(tmp_path: Path):
    content = coco()
    content["images"][0]["sample_key"] = "k2"
    found = detector_of(tmp_path, content).detect([a_sample(key="k1"), a_sample(key="k2", url="http://host/other.png")])
    assert found[0].startswith("no_annotation: ")
    assert isinstance(found[1], Regions)


def test_the_query_and_escapes_of_a_url_do_not_hide_its_file_name(tmp_path: Path):
    content = coco()
    content["images"][0]["file_name"] = "train/a b.jpg"
    (found,) = detector_of(tmp_path, content).detect([a_sample(url="http://host/x/a%20b.jpg?size=big#top")])
    assert len(found) == 2


def test_a_sample_without_annotation_or_boxes_gets_a_status(tmp_path: Path):
    detector = detector_of(tmp_path, coco())
    unknown, empty, known = detector.detect(
        [a_sample("http://host/9.jpg"), a_sample("http://host/000002.jpg", size=(50, 50)), a_sample()]
    )
    assert unknown == "no_annotation: no image has the sample_key k1 or the file_name 9.jpg"
    assert empty == "no_regions: image 8 has no boxes"
    assert len(known) == 2


def test_an_image_turned_since_it_was_annotated_gets_a_status(tmp_path: Path):
    (found,) = detector_of(tmp_path, coco()).detect([a_sample(size=(100, 200), flags=("exif_rotated",))])
    assert found.startswith("size_mismatch: image 7 was annotated at 200x100")


def test_crowds_are_skipped_or_kept_as_the_setting_says(tmp_path: Path):
    content = coco()
    content["annotations"][0]["iscrowd"] = 1
    skipping, keeping = detector_of(tmp_path, content), detector_of(tmp_path, content, crowd="keep")
    assert (len(skipping.detect([a_sample()])[0]), len(keeping.detect([a_sample()])[0])) == (1, 2)
    assert skipping.metadata["crowd_boxes"] == keeping.metadata["crowd_boxes"] == 1
    assert skipping.id != keeping.id
    with pytest.raises(ValueError, match="crowd is 'drop'"):
        detector_of(tmp_path, content, crowd="drop")


@pytest.mark.parametrize(
    "bbox",
    [
        [10, 20, 0, 40],
        [10, 20, 30, -1],
        [200, 20, 30, 40],
        [10, -50, 30, 50],
        [10, 20, float("nan"), 40],
        [1, 2, 3],
        [1, 2, "3", 4],
        None,
    ],
)
def test_a_box_without_area_in_its_image_is_an_error_that_names_the_annotation(tmp_path: Path, bbox: list[float]):
    content = coco()
    content["annotations"][1]["bbox"] = bbox
    with pytest.raises(ValueError, match=r"annotations\.json: annotation 2 has the bbox"):
        detector_of(tmp_path, content)


def test_unusable_files_are_refused_in_words(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no annotation file"):
        AnnotatedDetector(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="categories missing"):
        detector_of(tmp_path, {"images": [], "annotations": []})
    (tmp_path / "torn.json").write_text('{"images": [')
    with pytest.raises(ValueError, match=r"torn\.json is not JSON"):
        AnnotatedDetector(tmp_path / "torn.json")
    twice = coco()
    twice["images"][1]["file_name"] = "other/000001.jpg"
    with pytest.raises(ValueError, match="images 7 and 8 both have the file_name 000001.jpg"):
        detector_of(tmp_path, twice)
    stray = coco()
    stray["annotations"][0]["category_id"] = 6
    with pytest.raises(ValueError, match="annotation 1 refers to image 7 and category 6"):
        detector_of(tmp_path, stray)
    sizeless = coco()
    del sizeless["images"][1]["width"]
    with pytest.raises(ValueError, match="image 8 has no positive width"):
        detector_of(tmp_path, sizeless)
    (tmp_path / "binary.json").write_bytes(b"\x80\x02}q")
    with pytest.raises(ValueError, match=r"binary\.json is not JSON, or is torn: .* fetch it again"):
        AnnotatedDetector(tmp_path / "binary.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json holds a list, not an object; .* detection format: needed is"):
        AnnotatedDetector(tmp_path / "list.json")
    with pytest.raises(ValueError, match="images is no list; needed is"):
        detector_of(tmp_path, coco(images={}))


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("categories", "id", ..., r"categories\[1\] has no id; add it"),
        ("categories", "id", "5", r"categories\[1\] has the id '5', not a whole number; correct"),
        ("categories", "id", 30, r"category 30: categories\[1\] has the id of another category; give it"),
        ("categories", "name", ..., r"category 5 has no name; add it"),
        ("categories", "name", None, r"category 5 has the name None, not a text; correct or remove"),
        ("images", "id", ..., r"images\[1\] has no id; add it"),
        ("images", "id", 7, r"image 7: images\[1\] has the id of another image; give it"),
        ("images", "file_name", ..., r"image 8 has no file_name; add it"),
        ("images", "file_name", 3, r"image 8 has the file_name 3, not a text; correct"),
        ("images", "sample_key", None, r"image 8 has the sample_key None, not a text; correct"),
        ("images", "height", None, r"image 8 has no positive height; give it the size"),
        ("annotations", "bbox", ..., r"annotation 2 has no bbox; add it"),
        ("annotations", "bbox", None, r"annotation 2 has the bbox None, not four finite numbers"),
        ("annotations", "image_id", [7], r"annotation 2 has the image_id \[7\], not an image's id; correct"),
        ("annotations", "category_id", ..., r"annotation 2 has no category_id; add it"),
    ],
)
def test_an_entry_that_lacks_what_we_need_is_named_with_the_way_out(
    tmp_path: Path, kind: str, field: str, value: object, message: str
):
    content = coco()
    if value is ...:
        del content[kind][1][field]
    else:
        content[kind][1][field] = value
    with pytest.raises(ValueError, match=rf"annotations\.json: {message}"):
        detector_of(tmp_path, content)


@pytest.mark.parametrize("kind", ["images", "annotations", "categories"])
def test_an_entry_that_is_no_object_is_named(tmp_path: Path, kind: str):
    content = coco()
    content[kind].append(None)
    with pytest.raises(ValueError, match=rf"annotations\.json: {kind}\[\d\] is None, not an object; remove it"):
        detector_of(tmp_path, content)


def test_an_annotation_needs_no_id_of_its_own_and_is_then_named_by_its_place(tmp_path: Path):
    content = coco()
    del content["annotations"][1]["id"]
    assert len(detector_of(tmp_path, content).detect([a_sample()])[0]) == 2
    content["annotations"][1]["bbox"] = [10, 20, 0, 40]
    with pytest.raises(ValueError, match=r"annotations\.json: annotations\[1\] has the bbox"):
        detector_of(tmp_path, content)


def test_the_id_follows_the_content_of_the_file_and_not_its_name(tmp_path: Path):
    first = detector_of(tmp_path, coco())
    renamed = detector_of(tmp_path, coco(), name="renamed.json")
    changed = detector_of(tmp_path, coco(annotations=coco()["annotations"][:1]), name="changed.json")
    assert first.id == renamed.id != changed.id
    assert len(first.id) == 12
    assert first.metadata["annotations_file"] == "annotations.json"
    assert len(first.metadata["annotations_sha256"]) == 64
    assert first.metadata["random_init"] is False
