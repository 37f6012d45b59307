"""Regions from an annotation file in COCO's detection format: ground truth in place of a network's output.

An image of the file belongs to the samples whose URL's last path component is that of its `file_name`.
"""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from detectors import detector_id
from detectors.coco import read_coco
from storage.sample import Regions, Sample

# Part of the detector's id: raise it when the code below makes other regions of the same file than before.
_RULES_VERSION = 1


class AnnotatedDetector:
    """Looks regions up in an annotation file; ValueError names the file and the entry where one is unusable.

    Classes are the file's categories sorted by id: column 0 of class_probs is the background, category i column i + 1.
    Boxes that cover many objects (`iscrowd`) are skipped.
    """

    def __init__(self, file: Path):
        data, sha256 = read_coco(Path(file))
        self._column = {category["id"]: 1 + i for i, category in enumerate(data["categories"])}
        self._images = _index_images(data["images"], file)
        self._boxes = _boxes_by_image(data, self._column, file)
        # The hash covers everything that the file's name and contents could say.
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
        limits = np.array([sample.width, sample.height] * 2)
        boxes = np.clip(np.array([box for _, box in annotated]) * scale, 0, limits)
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
    """Return the last component of a URL's path, without escapes and query."""
    return unquote(urlsplit(url).path).rsplit("/", 1)[-1]


def _index_images(images: Sequence[dict], file: Path) -> dict[str, dict]:
    """The file's images by the last path component of their file names."""
    index = {}
    for image in images:
        name = image["file_name"].rsplit("/", 1)[-1]
        if name in index:
            raise ValueError(f"{file}: images {index[name]['id']} and {image['id']} both have the file_name {name}")
        index[name] = image
    return index


def _boxes_by_image(data: dict, column: dict[int, int], file: Path) -> dict[int, list[tuple[int, list[float]]]]:
    """Image id -> (column, xyxy box clipped to the annotated image), in the file's order."""
    sizes = {image["id"]: (image["width"], image["height"]) for image in data["images"]}
    boxes = {image: [] for image in sizes}
    for index, annotation in enumerate(data["annotations"]):
        if annotation.get("iscrowd", 0):
            continue
        box = _clipped(annotation["bbox"], *sizes[annotation["image_id"]], f"{file}: annotations[{index}]")
        boxes[annotation["image_id"]].append((column[annotation["category_id"]], box))
    return boxes


def _clipped(bbox: Sequence[float], width: float, height: float, where: str) -> list[float]:
    """COCO's x, y, width, height -> x1, y1, x2, y2 inside the image."""
    x, y, w, h = bbox
    box = [max(0.0, x), max(0.0, y), min(float(width), x + w), min(float(height), y + h)]
    # Compared in single precision, in which boxes are stored: a sliver must not become empty there.
    x1, y1, x2, y2 = (np.float32(number) for number in box)
    if x2 <= x1 or y2 <= y1:
        raise ValueError(f"{where} has the bbox {bbox}, with no area inside its {width}x{height} image; remove it")
    return box


def _was_rotated(image: dict, sample: Sample) -> bool:
    """Whether the sample was rotated by its EXIF orientation after it was annotated: its boxes would be wrong."""
    annotated, stored = image["width"] - image["height"], sample.width - sample.height
    return "exif_rotated" in sample.flags and annotated * stored < 0
