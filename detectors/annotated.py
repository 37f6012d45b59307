"""Regions from an annotation file in COCO's detection format: ground truth instead of a network.

An image of the file belongs to the samples whose key is its `sample_key`; without that field, to those whose URL's last
path component is its `file_name`.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from detectors import detector_id
from storage.safe_json import parse_json, shown
from storage.sample import Regions, Sample

# Goes into the detector's id: raise it when the code below makes other regions of the same file than before.
_RULES_VERSION = 1
_CROWD = ("skip", "keep")
# What the file must hold, and how one of each is called.
_KINDS = {"images": "image", "annotations": "annotation", "categories": "category"}


def annotated_id(file: Path, crowd: str = "skip") -> str:
    """The id of the AnnotatedDetector of these arguments, for which nothing of the file is looked at but its hash."""
    with open(file, "rb") as stream:
        return _id(hashlib.file_digest(stream, "sha256").hexdigest(), crowd)


def _id(digest: str, crowd: str) -> str:
    # The file's hash says everything that its name and its contents could.
    metadata = {"backend": "annotated", "rules_version": _RULES_VERSION, "annotations_sha256": digest, "crowd": crowd}
    return detector_id(metadata)


class AnnotatedDetector:
    """Looks regions up in an annotation file; ValueError names the file and the entry where one is unusable.

    Classes are the file's categories sorted by id: column 0 of class_probs is the background, category i column i + 1.
    crowd says what becomes of `iscrowd` boxes, which cover many objects: `skip` leaves them out, `keep` treats them as
    any other.
    """

    def __init__(self, file: Path, crowd: str = "skip"):
        if crowd not in _CROWD:
            raise ValueError(f"crowd is {crowd!r}, must be one of {_CROWD}")
        data, digest = read_coco(Path(file))
        for kind in _KINDS:
            check_entries(data[kind], kind, file)
        categories = sorted(data["categories"], key=lambda category: category["id"])
        self._column = {category["id"]: 1 + i for i, category in enumerate(categories)}
        self._images = _index_images(data["images"], file)
        self._boxes, crowd_boxes = _boxes_by_image(data, self._column, crowd, file)
        self.metadata = {
            "backend": "annotated",
            "random_init": False,
            "rules_version": _RULES_VERSION,
            "annotations_sha256": digest,
            "crowd": crowd,
            "crowd_boxes": crowd_boxes,
            "annotations_file": Path(file).name,
            "classes": [category["name"] for category in categories],
        }
        self.id = _id(digest, crowd)

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        return [self._detect_one(sample) for sample in samples]

    def _detect_one(self, sample: Sample) -> Regions | str:
        file_name = _last_component(sample.url)
        record = self._images.get(("sample_key", sample.key)) or self._images.get(("file_name", file_name))
        if record is None:
            return f"no_annotation: no image has the sample_key {sample.key} or the file_name {file_name}"
        found = self._boxes[record["id"]]
        if not found:
            return f"no_regions: image {record['id']} has no boxes"
        if _turned(record, sample):
            return (
                f"size_mismatch: image {record['id']} was annotated at {record['width']}x{record['height']}, before "
                f"its EXIF rotation; it is stored at {sample.width}x{sample.height}"
            )
        columns = np.array([column for column, _ in found], np.int32)
        scale = np.array([sample.width / record["width"], sample.height / record["height"]] * 2)
        limits = np.array([sample.width, sample.height] * 2)
        boxes = np.clip(np.array([box for _, box in found]) * scale, 0, limits)
        class_probs = np.zeros((len(found), 1 + len(self._column)), np.float16)
        class_probs[np.arange(len(found)), columns] = 1
        return Regions(
            boxes=boxes.astype(np.float32),
            scores=np.ones(len(found), np.float32),
            labels=columns,
            detector=self.id,
            background=0,
            class_probs=class_probs,
        )


def read_coco(file: Path) -> tuple[dict, str]:
    """The parsed file and the sha256 of its bytes."""
    if not file.is_file():
        raise ValueError(f"there is no annotation file {file}; name one in COCO's detection format")
    raw = file.read_bytes()
    wanted = "needed is an object with the lists images, annotations and categories"
    # Entries are checked one by one, and name those whose numbers are not finite.
    data = parse_json(raw, str(file), fix=f"write or fetch it again in COCO's detection format: {wanted}", nan=True)
    missing = [kind for kind in _KINDS if kind not in data]
    if missing:
        raise ValueError(f"{file} is not in COCO's detection format: {', '.join(missing)} missing; {wanted}")
    unlisted = [kind for kind in _KINDS if not isinstance(data[kind], list)]
    if unlisted:
        raise ValueError(f"{file} is not in COCO's detection format: {', '.join(unlisted)} is no list; {wanted}")
    return data, hashlib.sha256(raw).hexdigest()


def check_entries(entries: Sequence[object], kind: str, file: Path) -> None:
    """ValueError for the first entry of a list that lacks a field we need, has one of a wrong type or another's id."""
    called, ids = _KINDS[kind], set()
    for place, entry in enumerate(entries):
        # Without an id to name it by, an entry is named by its place.
        where = f"{file}: {kind}[{place}]"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is {shown(entry)}, not an object; remove it")
        if _whole_number(entry.get("id")):
            where = f"{file}: {called} {entry['id']}"
        # An annotation's own id is only for messages.
        if kind != "annotations" or "id" in entry:
            _check_field(entry, "id", _whole_number, "a whole number", where)
        if kind == "images":
            for name in ("width", "height"):
                if not (_finite(entry.get(name)) and entry[name] > 0):
                    raise ValueError(f"{where} has no positive {name}; give it the size that its boxes refer to")
            _check_field(entry, "sample_key" if "sample_key" in entry else "file_name", _text, "a text", where)
        elif kind == "categories":
            _check_field(entry, "name", _text, "a text", where)
        else:
            _check_field(entry, "image_id", _whole_number, "an image's id", where)
            _check_field(entry, "category_id", _whole_number, "a category's id", where)
            _check_field(entry, "bbox", _four_numbers, "four finite numbers [x, y, width, height]", where)
        if kind != "annotations":
            if entry["id"] in ids:
                raise ValueError(f"{where}: {kind}[{place}] has the id of another {called}; give it one of its own")
            ids.add(entry["id"])


def _check_field(entry: dict, name: str, fits: Callable[[object], bool], wanted: str, where: str) -> None:
    if name not in entry:
        raise ValueError(f"{where} has no {name}; add it ({wanted}), or remove the entry")
    if not fits(entry[name]):
        raise ValueError(f"{where} has the {name} {shown(entry[name])}, not {wanted}; correct or remove the entry")


def _whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _four_numbers(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_finite, value))


def _index_images(images: Sequence[dict], file: Path) -> dict[tuple[str, str], dict]:
    """("sample_key", key) or ("file_name", last path component) -> image record, each image under one of them."""
    index = {}
    for record in images:
        if "sample_key" in record:
            name = ("sample_key", record["sample_key"])
        else:
            name = ("file_name", record["file_name"].rsplit("/", 1)[-1])
        if name in index:
            raise ValueError(
                f"{file}: images {index[name]['id']} and {record['id']} both have the {name[0]} {name[1]}; "
                "give them different `sample_key`s"
            )
        index[name] = record
    return index


def _boxes_by_image(
    data: dict, column: dict[int, int], crowd: str, file: Path
) -> tuple[dict[int, list[tuple[int, list[float]]]], int]:
    """Image id -> (column, xyxy box clipped to the annotated image) in the file's order; and how many were crowds."""
    sizes = {record["id"]: (record["width"], record["height"]) for record in data["images"]}
    found = {image: [] for image in sizes}
    crowds = 0
    for place, annotation in enumerate(data["annotations"]):
        where = f"{file}: annotation {annotation['id']}" if "id" in annotation else f"{file}: annotations[{place}]"
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in sizes or category not in column:
            raise ValueError(
                f"{where} refers to image {image} and category {category}, which are not both in the file; add the one "
                "that is missing, or remove the annotation"
            )
        if annotation.get("iscrowd", 0):
            crowds += 1
            if crowd == "skip":
                continue
        found[image].append((column[category], _clipped(annotation["bbox"], *sizes[image], where)))
    return found, crowds


def _clipped(bbox: Sequence[float], width: float, height: float, where: str) -> list[float]:
    """COCO's x, y, width, height -> x1, y1, x2, y2 inside the image."""
    x, y, w, h = bbox
    box = [max(0.0, x), max(0.0, y), min(float(width), x + w), min(float(height), y + h)]
    # In single precision, which is how boxes are stored: a sliver must not become empty there.
    x1, y1, x2, y2 = (np.float32(number) for number in box)
    if x2 <= x1 or y2 <= y1:
        raise ValueError(f"{where} has the bbox {bbox}, with no area inside its {width}x{height} image; remove it")
    return box


def _last_component(url: str) -> str:
    return unquote(urlsplit(url).path).rsplit("/", 1)[-1]


def _turned(record: dict, sample: Sample) -> bool:
    """Whether the sample was turned by its EXIF orientation since it was annotated: its boxes would be wrong."""
    annotated, stored = record["width"] - record["height"], sample.width - sample.height
    return "exif_rotated" in sample.flags and annotated * stored < 0
