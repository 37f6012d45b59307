"""Reader of the annotated images on which a detector is trained and validated.

Annotations are in COCO's detection format (detectors/coco.py) or Visual Genome's (detectors/visual_genome.py). Images
and boxes that cannot be used are skipped and counted.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from detectors.coco import read_coco
from detectors.names import Names, read_lines
from detectors.preprocess import BAD_IMAGE
from detectors.recipes import DataConfig
from detectors.visual_genome import AnnotatedImage, AnnotatedObject, attribute_indices, read_visual_genome
from storage.collect.normalise import FILE_FORMATS


@dataclass(frozen=True, eq=False)
class LabelledImage:
    """An image file and its annotated objects. Sizes and boxes are in pixels of the original image."""

    id: str
    file: Path
    height: int
    width: int
    boxes: np.ndarray
    """float32 [G, 4] xyxy, inside the image."""
    labels: np.ndarray
    """int64 [G], classes 0..C-1."""
    attributes: tuple[tuple[int, ...], ...]
    """Attribute indices of each of the G objects."""


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The images of a training run, and the names of classes and attributes."""

    train: list[LabelledImage]
    held_out: list[LabelledImage]
    classes: tuple[str, ...]
    attribute_names: tuple[str, ...]
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of skipped boxes, names or images, by reason."""

    @property
    def hash(self) -> str:
        """Hash (16 hex digits) of image ids and sizes, objects and names. Folders and pixels do not change it."""
        digest = hashlib.sha256(json.dumps([self.classes, self.attribute_names]).encode())
        for split in (self.train, self.held_out):
            digest.update(f"{len(split)} images".encode())
            for image in split:
                digest.update(f"{image.id} {image.height} {image.width} {image.attributes}".encode())
                for array in (image.boxes, image.labels):
                    digest.update(array.tobytes())
        return digest.hexdigest()[:16]


def read_ground_truth(config: DataConfig) -> GroundTruth:
    """Read the images that `config` selects. Raises ValueError if a file is invalid or too few images are usable."""
    counts: Counter[str] = Counter()
    attribute_names = Names.read(Path(config.attribute_names)) if config.attribute_names else Names((), {})
    classes = Names.read(Path(config.classes)) if config.classes else None
    if config.annotations:
        annotated, classes = _read_coco(Path(config.annotations), classes, attribute_names, counts)
    else:
        assert config.objects is not None  # checked by check_complete in train.py, as are the classes
        assert classes is not None
        annotated = read_visual_genome(Path(config.objects), classes, attribute_names, counts)
    train_ids, held_out_ids = _split(annotated, config, counts)
    annotated = [entry for entry in annotated if entry.id in train_ids or entry.id in held_out_ids]
    files = _find_files(config.images, annotated)
    images, absent = [], []
    for entry in annotated:
        file = files.get(entry.file_name)
        image = _label_image(entry, file, counts) if file else None
        if image is None:
            absent.append(str(file or entry.file_name))
        else:
            images.append(image)
    if len(absent) > config.unreadable * len(annotated):
        raise ValueError(
            f"{len(absent)} of {len(annotated)} images are absent from {', '.join(config.images)}, or unreadable: "
            f"{', '.join(absent[:3])}{' ...' if len(absent) > 3 else ''}. Add their folders to data.images, or allow a "
            "larger share with data.unreadable"
        )
    train = [image for image in images if image.id in train_ids and len(image.labels)]
    counts["images absent or unreadable"] = len(absent)
    counts["training images without objects"] = sum(image.id in train_ids for image in images) - len(train)
    if not train:
        raise ValueError(
            f"{config.annotations or config.objects} leaves no image to train on: {dict(+counts)}. Check data.images, "
            "the image lists and the class names"
        )
    held_out = [image for image in images if image.id in held_out_ids]
    return GroundTruth(train, held_out, classes.first, attribute_names.first, dict(+counts))


def _read_coco(
    file: Path, classes: Names | None, attributes: Names, counts: Counter[str]
) -> tuple[list[AnnotatedImage], Names]:
    """Return the images, sorted by id, and the classes: `classes` or, if None, the file's categories, sorted by id."""
    data, _ = read_coco(file)
    names = {category["id"]: category["name"] for category in data["categories"]}
    classes = classes or Names.from_lines([[name] for name in names.values()], f"{file}, categories by id")
    labels = {category: classes.find([name]) for category, name in names.items()}
    objects: dict[int, list[AnnotatedObject]] = {image["id"]: [] for image in data["images"]}
    for annotation in data["annotations"]:
        if annotation.get("iscrowd", 0):
            counts["boxes around many objects (iscrowd)"] += 1
            continue
        numbers = attribute_indices(annotation.get("attributes", []), attributes, counts)
        label = labels[annotation["category_id"]]
        objects[annotation["image_id"]].append(AnnotatedObject(annotation["bbox"], label, numbers))
    images = []
    for image in sorted(data["images"], key=lambda image: image["id"]):
        size = int(image["height"]), int(image["width"])
        images.append(AnnotatedImage(str(image["id"]), image["file_name"], *size, objects[image["id"]]))
    return images, classes


def _find_files(folders: Sequence[str], annotated: Sequence[AnnotatedImage]) -> dict[str, Path]:
    """Return a dict from file name to path. Folders are searched in order. Files that are in no folder are left out."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise ValueError(f"data.images: {folder} is not a folder")
    names = [entry.file_name for entry in annotated]
    files = {name: next((f for folder in folders if (f := Path(folder) / name).is_file()), None) for name in names}
    return {name: file for name, file in files.items() if file}


def _label_image(entry: AnnotatedImage, file: Path, counts: Counter[str]) -> LabelledImage | None:
    """Return an image with its usable objects, or None if its size is unreadable. Unusable objects are counted."""
    height, width = entry.height, entry.width
    if not height or not width:
        try:
            with Image.open(file, formats=FILE_FORMATS) as image:
                width, height = image.size
        except BAD_IMAGE:
            return None
    corners = np.array([annotated.box for annotated in entry.objects], np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    boxes = corners.clip(0, [width, height, width, height]).astype(np.float32)
    known = np.array([annotated.label is not None for annotated in entry.objects], bool)
    visible = (boxes[:, 2:] - boxes[:, :2] >= 1).all(axis=1)
    counts["boxes of classes that are not in data.classes"] += int((~known).sum())
    counts["boxes less than a pixel wide or high inside the image"] += int((known & ~visible).sum())
    usable = np.flatnonzero(known & visible)
    objects = [entry.objects[index] for index in usable]
    return LabelledImage(
        id=entry.id,
        file=file,
        height=height,
        width=width,
        boxes=boxes[usable],
        labels=np.array([annotated.label for annotated in objects], np.int64),
        attributes=tuple(annotated.attributes for annotated in objects),
    )


def _split(annotated: Sequence[AnnotatedImage], config: DataConfig, counts: Counter[str]) -> tuple[set[str], set[str]]:
    """Return the ids of the training images and the ids of the held-out images."""
    ids = [entry.id for entry in annotated]
    held_out = set(ids[max(0, len(ids) - config.held_out_last) :])
    if config.held_out_list:
        held_out = _read_list(Path(config.held_out_list), annotated, counts)
    if not config.train_list:
        return set(ids) - held_out, held_out
    train = _read_list(Path(config.train_list), annotated, counts)
    if both := sorted(train & held_out):
        raise ValueError(
            f"{config.train_list} and the held-out images share {len(both)} images, such as {both[0]}; remove them "
            "from one of the two"
        )
    return train, held_out


def _read_list(file: Path, annotated: Sequence[AnnotatedImage], counts: Counter[str]) -> set[str]:
    """Return the ids of the images that a file lists, one path per line. Folders in the paths are ignored."""
    ids: dict[str, list[str]] = {}
    for entry in annotated:
        ids.setdefault(Path(entry.file_name).name, []).append(entry.id)
    listed = set()
    for number, line in enumerate(read_lines(file, "images"), start=1):
        for word in line.split()[:1]:
            matches = ids.get(Path(word).name, [])
            if len(matches) > 1:
                raise ValueError(f"{file}:{number}: {word} matches {len(matches)} images; file names must be unique")
            listed.update(matches)
            counts[f"lines of {file.name} that match no image"] += not matches
    if not listed:
        raise ValueError(f"{file} matches none of the {len(annotated)} images; its lines must be paths of image files")
    return listed
