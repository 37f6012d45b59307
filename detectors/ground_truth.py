"""Images with their objects, from files in COCO's detection format or in Visual Genome's own.

Visual Genome: objects.json is a list with one entry an image, `image_id` and `objects`; an object has x, y, w, h and
`names`. attributes.json is the same with the objects under `attributes`, each of which may have `attributes`, a list of
words. An image's file is <image_id>.jpg in one of the folders. What cannot be used is left out, counted and said.
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from detectors.annotated import check_entries, read_coco
from detectors.recipes import DataConfig
from storage.normalise import FILE_FORMATS
from storage.safe_json import parse_json


@dataclass(frozen=True, eq=False)
class LabelledImage:
    """One image and its objects, in pixels of its file."""

    id: str
    file: Path
    height: int
    width: int
    boxes: np.ndarray
    """float32 [G, 4] xyxy, inside the image."""
    labels: np.ndarray
    """int64 [G], classes 0..C-1."""
    crowd: np.ndarray
    """bool [G]: boxes around many objects, which are not learnt."""
    attributes: tuple[tuple[int, ...], ...]
    """Of each object."""


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """What a run trains and validates on."""

    train: list[LabelledImage]
    held_out: list[LabelledImage]
    classes: tuple[str, ...]
    attribute_names: tuple[str, ...]
    left_out: dict[str, int] = field(default_factory=dict)
    """Why, and how many boxes, names or images."""

    @property
    def hash(self) -> str:
        """16 hex digits: the same for the same images, objects and names, wherever they lie."""
        found = hashlib.sha256(json.dumps([self.classes, self.attribute_names]).encode())
        for split in (self.train, self.held_out):
            found.update(f"{len(split)} images".encode())
            for image in split:
                found.update(f"{image.id} {image.height} {image.width} {image.attributes}".encode())
                for array in (image.boxes, image.labels, image.crowd):
                    found.update(array.tobytes())
        return found.hexdigest()[:16]


class _Object(NamedTuple):
    """As a file has it: a box x, y, width, height, the class that it is of (None: none of ours) and its attributes."""

    box: Sequence[float]
    label: int | None
    crowd: bool
    attributes: tuple[int, ...]


@dataclass(frozen=True)
class _Annotated:
    """An image as a file has it; a size of 0 is not told there."""

    id: str
    file_name: str
    height: int
    width: int
    objects: list[_Object]


def read_ground_truth(config: DataConfig) -> GroundTruth:
    """The images that the configuration names; ValueError names file and entry where one is unusable."""
    counts: Counter[str] = Counter()
    attribute_names = _Names.read(Path(config.attribute_names)) if config.attribute_names else _Names((), {})
    if config.annotations:
        annotated, classes = _read_coco(config, attribute_names, counts)
    else:
        classes = _Names.read(Path(config.classes))
        annotated = _read_visual_genome(config, classes, attribute_names, counts)
    train_ids, held_out_ids = _split(annotated, config, counts)
    annotated = [entry for entry in annotated if entry.id in train_ids or entry.id in held_out_ids]
    files = _find_files(config.images, annotated)
    images, absent = [], []
    for entry in annotated:
        file = files.get(entry.file_name)
        image = _labelled(entry, file, counts) if file else None
        if image is None:
            absent.append(str(file or entry.file_name))
        else:
            images.append(image)
    _check_absent(absent, len(annotated), config)
    if absent:
        counts["images absent or unreadable"] = len(absent)
    train = [image for image in images if image.id in train_ids]
    held_out = [image for image in images if image.id in held_out_ids]
    empty = sum(not (~image.crowd).any() for image in train)
    if empty:
        counts["images to train on without any object"] = empty
    train = [image for image in train if (~image.crowd).any()]
    if not train:
        raise ValueError(
            f"{config.annotations or config.objects} leaves no image to train on: {dict(counts)}. Check data.images, "
            "the lists and the names of the classes"
        )
    return GroundTruth(train, held_out, classes.first, attribute_names.first, dict(+counts))


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """Names of classes or attributes: the first of each line, and which number each synonym has."""

    first: tuple[str, ...]
    number: dict[str, int]

    @classmethod
    def read(cls, file: Path) -> "_Names":
        """One a line, synonyms between commas."""
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is no list of names: {error}") from error
        return cls.of([line.split(",") for line in lines], str(file))

    @classmethod
    def of(cls, synonyms: Sequence[Sequence[str]], where: str) -> "_Names":
        number: dict[str, int] = {}
        for place, names in enumerate(synonyms):
            if not names or not names[0].strip():
                raise ValueError(f"{where} has no name in line {place + 1}; remove the line")
            for name in filter(None, map(_plain, names)):
                if number.setdefault(name, place) != place:
                    raise ValueError(f"{where}: {name!r} stands in lines {number[name] + 1} and {place + 1}; keep one")
        return cls(tuple(names[0].strip() for names in synonyms), number)

    def find(self, names: Iterable[str]) -> int | None:
        """The number of the first of an object's names that we know."""
        return next((self.number[name] for name in map(_plain, names) if name in self.number), None)


@functools.cache
def _plain(name: str) -> str:
    return " ".join(name.lower().split())


# --- COCO's detection format ------------------------------------------------------------------------------------------


def _read_coco(config: DataConfig, attributes: _Names, counts: Counter[str]) -> tuple[list[_Annotated], _Names]:
    file = Path(config.annotations)
    data, _ = read_coco(file)
    for kind in ("images", "annotations", "categories"):
        check_entries(data[kind], kind, file)
    categories = sorted(data["categories"], key=lambda category: category["id"])
    if config.classes:
        classes = _Names.read(Path(config.classes))
    else:
        classes = _Names.of([[category["name"]] for category in categories], f"{file}, categories by id")
    labels = {category["id"]: classes.find([category["name"]]) for category in categories}
    objects: dict[int, list[_Object]] = {image["id"]: [] for image in data["images"]}
    for place, annotation in enumerate(data["annotations"]):
        if annotation["image_id"] not in objects or annotation["category_id"] not in labels:
            raise ValueError(
                f"{file}: annotations[{place}] refers to image {annotation['image_id']} and category "
                f"{annotation['category_id']}, which are not both in the file; add the one that is missing"
            )
        label = labels[annotation["category_id"]]
        words = annotation.get("attributes", [])
        crowd = bool(annotation.get("iscrowd", 0))
        objects[annotation["image_id"]].append(
            _Object(annotation["bbox"], label, crowd, _numbers(words, attributes, counts))
        )
    images = sorted(data["images"], key=lambda image: image["id"])
    for image in images:
        if not isinstance(image.get("file_name"), str) or not image["file_name"]:
            raise ValueError(f"{file}: image {image['id']} has no file_name; training reads images by their files")
    return [
        _Annotated(str(i["id"]), i["file_name"], int(i["height"]), int(i["width"]), objects[i["id"]]) for i in images
    ], classes


# --- Visual Genome ----------------------------------------------------------------------------------------------------


def _read_visual_genome(
    config: DataConfig, classes: _Names, attributes: _Names, counts: Counter[str]
) -> list[_Annotated]:
    objects = _by_image(Path(config.objects))
    with_attributes = _by_image(Path(config.attributes)) if config.attributes else {}
    sizes = {}
    if config.image_data:
        for place, entry in enumerate(_list_of(Path(config.image_data))):
            where = f"{config.image_data}: [{place}]"
            size = (_whole(entry, "height", where), _whole(entry, "width", where))
            if min(size) < 1:
                raise ValueError(f"{where} is {size[1]}x{size[0]} pixels; correct or remove the entry")
            sizes[_whole(entry, "image_id", where)] = size
    images, without = [], 0
    for image, entries in sorted(objects.items()):
        words: dict[int, list[Any]] = {}
        for place, entry in enumerate(with_attributes.get(image, [])):
            where = f"{config.attributes}: image {image}, [{place}]"
            words.setdefault(_whole(entry, "object_id", where), []).extend(_inner_list(entry, "attributes", where))
        found = []
        for place, entry in enumerate(entries):
            where = f"{config.objects}: image {image}, [{place}]"
            names = entry.get("names") if isinstance(entry, dict) else None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{where} has the names {names!r}, no list of texts; correct or remove the entry")
            box = [entry.get(side) for side in ("x", "y", "w", "h")]
            if not all(isinstance(side, int | float) and abs(side) < 1e9 for side in box):
                raise ValueError(f"{where} has x, y, w, h {box}, not four numbers; correct or remove the entry")
            told = list(_inner_list(entry, "attributes", where))
            if config.attributes:
                # attributes.json names some objects by what they were before they were merged.
                own = [entry.get("object_id"), *_inner_list(entry, "merged_object_ids", where)]
                partners = [name for name in own if isinstance(name, int) and name in words]
                told += [word for partner in partners for word in words[partner]]
                without += not partners
            found.append(_Object(box, classes.find(names), False, _numbers(told, attributes, counts)))
        images.append(_Annotated(str(image), f"{image}.jpg", *sizes.get(image, (0, 0)), found))
    everything = sum(len(image.objects) for image in images)
    if without and without == everything:
        raise ValueError(f"{config.attributes} has none of the objects of {config.objects}: take both of one version")
    if without:
        counts["objects that data.attributes does not have"] = without
    return images


def _by_image(file: Path) -> dict[int, list[Any]]:
    """Image id -> its objects, of objects.json or attributes.json."""
    found: dict[int, list[Any]] = {}
    for place, entry in enumerate(_list_of(file)):
        where = f"{file}: [{place}]"
        objects = entry.get("objects", entry.get("attributes")) if isinstance(entry, dict) else None
        if not isinstance(objects, list):
            raise ValueError(f"{where} has no list `objects` (or `attributes`): is it Visual Genome's objects.json?")
        found.setdefault(_whole(entry, "image_id", where), []).extend(objects)
    return found


def _list_of(file: Path) -> list[Any]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    fix = "fetch it again; a file in COCO's format is given as data.annotations"
    return parse_json(data, str(file), list, fix, nan=True)  # what is read of it is checked entry by entry


def _whole(entry: Any, name: str, where: str) -> int:
    value = entry.get(name, entry.get("id") if name == "image_id" else None) if isinstance(entry, dict) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where} has {name} {value!r}, no whole number; correct or remove the entry")
    return value


def _inner_list(entry: dict[str, Any], name: str, where: str) -> list[Any]:
    """Empty where it is absent or null."""
    value = entry.get(name)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where} has the {name} {value!r}, no list; correct or remove the entry")
    return value or []


# --- images -----------------------------------------------------------------------------------------------------------


def _numbers(words: Any, names: _Names, counts: Counter[str]) -> tuple[int, ...]:
    """The attributes that we know among an object's words, each once."""
    if not names.first:
        return ()
    words = [_plain(word) for word in words if isinstance(word, str)] if isinstance(words, list) else []
    known = {names.number[word] for word in words if word in names.number}
    unknown = sum(word not in names.number for word in words)
    if unknown:
        counts["attributes of no name in data.attribute_names"] += unknown
    return tuple(sorted(known))


def _find_files(folders: Sequence[str], annotated: Sequence[_Annotated]) -> dict[str, Path]:
    """Where each file name is, below the first folder that has it."""
    found: dict[str, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"data.images names {folder}, which is no folder")
        names = {entry.name for entry in folder.iterdir()}
        for entry in annotated:
            # A name with folders in it is looked up as it is, and by its last part.
            for name in (entry.file_name, Path(entry.file_name).name):
                if entry.file_name not in found and (name in names or ("/" in name and (folder / name).is_file())):
                    found[entry.file_name] = folder / name
    owners: dict[Path, str] = {}
    for entry in annotated:
        file = found.get(entry.file_name)
        if file and owners.setdefault(file, entry.id) != entry.id:
            raise ValueError(
                f"images {owners[file]} and {entry.id} would both be {file}; keep the folders that their names have, "
                "or remove one"
            )
    return found


def _labelled(entry: _Annotated, file: Path, counts: Counter[str]) -> LabelledImage | None:
    """The image with the objects that can be used; None where its file is none."""
    height, width = entry.height, entry.width
    if not height or not width:
        try:
            with Image.open(file, formats=FILE_FORMATS) as image:
                width, height = image.size
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            return None
    corners = np.array([found.box for found in entry.objects], np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    boxes = corners.clip(0, [width, height, width, height]).astype(np.float32)
    known = np.array([found.label is not None for found in entry.objects], bool)
    visible = (boxes[:, 2:] - boxes[:, :2] >= 1).all(axis=1)
    counts["boxes of no class in data.classes"] += int((~known).sum())
    counts["boxes with less than a pixel's width or height inside the image"] += int((known & ~visible).sum())
    usable = np.flatnonzero(known & visible)
    objects = [entry.objects[place] for place in usable]
    return LabelledImage(
        id=entry.id,
        file=file,
        height=height,
        width=width,
        boxes=boxes[usable],
        labels=np.array([found.label for found in objects], np.int64),
        crowd=np.array([found.crowd for found in objects], bool),
        attributes=tuple(found.attributes for found in objects),
    )


def _check_absent(absent: list[str], images: int, config: DataConfig) -> None:
    if len(absent) > config.unreadable * images:
        some = ", ".join(absent[:3])
        raise ValueError(
            f"{len(absent)} of {images} images are absent from {', '.join(config.images)}, or unreadable: {some}"
            f"{' ...' if len(absent) > 3 else ''}. Give their folders as data.images, or allow a larger share: "
            "data.unreadable"
        )


def _split(annotated: Sequence[_Annotated], config: DataConfig, counts: Counter[str]) -> tuple[set[str], set[str]]:
    """The ids of the images to train on, and of those that are held out."""
    held_out: set[str] = set()
    if config.held_out_list:
        held_out = _listed(Path(config.held_out_list), annotated, counts)
    elif config.held_out_last:
        if config.held_out_last >= len(annotated):
            raise ValueError(
                f"data.held_out_last is {config.held_out_last}, and there are {len(annotated)} images; hold out fewer"
            )
        held_out = {entry.id for entry in annotated[-config.held_out_last :]}
    train = {entry.id for entry in annotated}
    if config.train_list:
        train = _listed(Path(config.train_list), annotated, counts)
        both = sorted(train & held_out)
        if both:
            raise ValueError(
                f"{config.train_list} and the held-out images share {len(both)} images, such as {both[0]}; an image "
                "must be one or the other"
            )
    return train - held_out, held_out


def _listed(file: Path, annotated: Sequence[_Annotated], counts: Counter[str]) -> set[str]:
    """The ids of the images that a list names: the first word of each line is an id or, where no image has it, the path
    of an image's file; of the longer one of two paths the end counts."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no list of images: {error}") from error
    ids = {entry.id for entry in annotated}
    by_name: dict[str, list[_Annotated]] = {}
    for entry in annotated:
        by_name.setdefault(Path(entry.file_name).name, []).append(entry)
    found, unknown = set(), 0
    for number, line in enumerate(lines, start=1):
        word = line.split()[0] if line.strip() else None
        if word is None or word in ids:
            found |= {word} - {None}
            continue
        path = Path(word)
        named = [entry for entry in by_name.get(path.name, []) if _ends_alike(path, Path(entry.file_name))]
        if len(named) > 1:
            raise ValueError(f"{file}:{number}: {word} is the name of {len(named)} images; give their paths or ids")
        found |= {entry.id for entry in named}
        unknown += not named
    if not found:
        raise ValueError(
            f"{file} names none of the {len(annotated)} images; its lines are ids, or paths of image files"
        )
    if unknown:
        counts[f"lines of {file.name} that name no image"] += unknown
    return found


def _ends_alike(one: Path, other: Path) -> bool:
    """Whether two relative paths are the same as far as the shorter one goes."""
    parts = min(len(one.parts), len(other.parts))
    return one.parts[-parts:] == other.parts[-parts:]
