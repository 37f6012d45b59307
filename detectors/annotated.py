"""A detector whose regions are ground truth, from an annotation file in COCO's detection format.

A sample and an annotated image match if the last path components of the sample's URL and of `file_name` are equal.
"""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from detectors import detector_id
from detectors.coco import read_coco
from storage.sample import Regions, Sample

# Part of the detector's id: raise it when a change below gives other regions for the same file.
_RULES_VERSION = 1


class AnnotatedDetector:
    """A detector that looks up regions in an annotation file.

    Classes are the file's categories, sorted by id. Column 0 of class_probs is the background, and column i + 1 is
    category i. Boxes around many objects (`iscrowd`) are skipped. Raises ValueError if an entry is unusable.
    """

    def __init__(self, file: Path):
        data, sha256 = read_coco(Path(file))
        self._column = {category["id"]: 1 + i for i, category in enumerate(data["categories"])}
        self._images = _index_images(data["images"], file)
        self._boxes = _boxes_by_image(data, self._column, file)
        hashed = {"backend": "annotated", "rules_version": _RULES_VERSION, "annotations_sha256": sha256}
        self.id = detector_id(hashed)
        self.metadata = hashed | {
            "random_init": False,
            "annotations_file": Path(file).name,
            "classes": [category["name"] for category in data["categories"]],
        }

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        return [self._detect_one(sample) for sample in samples]

    def _detect_one(self, sample: Sample) -> Regions | str:
        file_name = file_name_of(sample.url)
        image = self._images.get(file_name)
        if image is None:
            return f"no_annotation: no image has the file_name {file_name}"
        annotated = self._boxes[image["id"]]
        if not annotated:
            return f"no_regions: image {image['id']} has no boxes"
        if _was_rotated(image, sample):
            return (
                f"size_mismatch: image {image['id']} was annotated at {image['width']}x{image['height']}, before "
                f"its EXIF rotation; it is stored at {sample.width}x{sample.height}"
            )
        columns = np.array([column for column, _ in annotated], np.int32)
        scale = np.array([sample.width / image["width"], sample.height / image["height"]] * 2)
        boxes = np.clip(np.array([box for _, box in annotated]) * scale, 0, [sample.width, sample.height] * 2)
        class_probs = np.zeros((len(annotated), 1 + len(self._column)), np.float16)
        class_probs[np.arange(len(annotated)), columns] = 1
        return Regions(
            boxes=boxes.astype(np.float32),
            scores=np.ones(len(annotated), np.float32),
            labels=columns,
            detector=self.id,
            background=0,
            class_probs=class_probs,
        )


def file_name_of(url: str) -> str:
    """Return the last component of a URL's path, unescaped and without the query."""
    return unquote(urlsplit(url).path).rsplit("/", 1)[-1]


def _index_images(images: Sequence[dict], file: Path) -> dict[str, dict]:
    """Return the images by file name (last path component). Raises ValueError if two have the same name."""
    index = {}
    for image in images:
        name = image["file_name"].rsplit("/", 1)[-1]
        if name in index:
            raise ValueError(f"{file}: images {index[name]['id']} and {image['id']} both have the file_name {name}")
        index[name] = image
    return index


def _boxes_by_image(data: dict, column: dict[int, int], file: Path) -> dict[int, list[tuple[int, list[float]]]]:
    """Return a dict from image id to pairs (column of class_probs, box). Boxes are xyxy, clipped to the image."""
    sizes = {image["id"]: (image["width"], image["height"]) for image in data["images"]}
    boxes = {image: [] for image in sizes}
    for index, annotation in enumerate(data["annotations"]):
        if annotation.get("iscrowd", 0):
            continue
        box = _clip_bbox(annotation["bbox"], *sizes[annotation["image_id"]], f"{file}: annotations[{index}]")
        boxes[annotation["image_id"]].append((column[annotation["category_id"]], box))
    return boxes


def _clip_bbox(bbox: Sequence[float], width: float, height: float, location: str) -> list[float]:
    """Convert COCO's x, y, width, height to xyxy, clipped to the image. Raises ValueError if no area is left."""
    x, y, w, h = bbox
    box = [max(0.0, x), max(0.0, y), min(float(width), x + w), min(float(height), y + h)]
    # Compared in float32, as boxes are stored: a very thin box must not become empty when it is rounded.
    x1, y1, x2, y2 = (np.float32(number) for number in box)
    if x2 <= x1 or y2 <= y1:
        raise ValueError(f"{location} has the bbox {bbox} without area inside its {width}x{height} image; remove it")
    return box


def _was_rotated(image: dict, sample: Sample) -> bool:
    """Return True if the boxes do not fit, because the image was annotated before its EXIF rotation was applied."""
    annotated, stored = image["width"] - image["height"], sample.width - sample.height
    return "exif_rotated" in sample.flags and annotated * stored < 0
