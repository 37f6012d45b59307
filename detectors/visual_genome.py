"""Reads Visual Genome's annotation files.

objects.json is a list with one entry an image, `image_id` and `objects`; an object has x, y, w, h and `names`.
attributes.json is the same with the objects under `attributes`; each of them may have `attributes`, a list of words.
image_data.json has the images' sizes. An image's file is <image_id>.jpg.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from detectors.names import Names, plain
from detectors.recipes import DataConfig
from storage.safe_json import parse_json


class AnnotatedObject(NamedTuple):
    """An object as a file has it."""

    box: Sequence[float]
    """x, y, width, height, in pixels of the image."""
    label: int | None
    """Its class, from 0; None: a class that the network does not learn."""
    crowd: bool
    attributes: tuple[int, ...]


@dataclass(frozen=True)
class AnnotatedImage:
    """An image as a file has it; its sides are 0 where the file does not say them."""

    id: str
    file_name: str
    height: int
    width: int
    objects: list[AnnotatedObject]


def attribute_numbers(words: Any, names: Names, counts: Counter[str]) -> tuple[int, ...]:
    """The known attributes among an object's words, each once, ascending; others are counted."""
    if not names.first:
        return ()
    words = [plain(word) for word in words if isinstance(word, str)] if isinstance(words, list) else []
    known = {names.number[word] for word in words if word in names.number}
    unknown = sum(word not in names.number for word in words)
    if unknown:
        counts["attributes of no name in data.attribute_names"] += unknown
    return tuple(sorted(known))


def read_visual_genome(
    config: DataConfig, classes: Names, attributes: Names, counts: Counter[str]
) -> list[AnnotatedImage]:
    """The images of `config.objects`, by id; ValueError names file and entry where one is unusable."""
    attributes_of = _by_image(Path(config.attributes)) if config.attributes else {}
    sizes = _read_sizes(Path(config.image_data)) if config.image_data else {}
    images, without = [], 0
    for image, entries in sorted(_by_image(Path(config.objects)).items()):
        words: dict[int, list[Any]] = {}
        for index, entry in enumerate(attributes_of.get(image, [])):
            where = f"{config.attributes}: image {image}, [{index}]"
            words.setdefault(_integer(entry, "object_id", where), []).extend(_inner_list(entry, "attributes", where))
        objects = []
        for index, entry in enumerate(entries):
            where = f"{config.objects}: image {image}, [{index}]"
            names = entry.get("names") if isinstance(entry, dict) else None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{where} has the names {names!r}, no list of texts; correct or remove the entry")
            box = [entry.get(side) for side in ("x", "y", "w", "h")]
            if not all(isinstance(side, int | float) and abs(side) < 1e9 for side in box):
                raise ValueError(f"{where} has x, y, w, h {box}, not four numbers; correct or remove the entry")
            own_words = list(_inner_list(entry, "attributes", where))
            if config.attributes:
                # attributes.json has some objects under the ids that they had before they were merged.
                ids = [entry.get("object_id"), *_inner_list(entry, "merged_object_ids", where)]
                ids = [one for one in ids if isinstance(one, int) and one in words]
                own_words += [word for one in ids for word in words[one]]
                without += not ids
            numbers = attribute_numbers(own_words, attributes, counts)
            objects.append(AnnotatedObject(box, classes.find(names), False, numbers))
        images.append(AnnotatedImage(str(image), f"{image}.jpg", *sizes.get(image, (0, 0)), objects))
    if without and without == sum(len(image.objects) for image in images):
        raise ValueError(f"{config.attributes} has none of the objects of {config.objects}: take both of one version")
    if without:
        counts["objects that data.attributes does not have"] = without
    return images


def _read_sizes(file: Path) -> dict[int, tuple[int, int]]:
    """Image id -> height, width, of image_data.json."""
    sizes = {}
    for index, entry in enumerate(_read_list(file)):
        where = f"{file}: [{index}]"
        size = (_integer(entry, "height", where), _integer(entry, "width", where))
        if min(size) < 1:
            raise ValueError(f"{where} is {size[1]}x{size[0]} pixels; correct or remove the entry")
        sizes[_integer(entry, "image_id", where)] = size
    return sizes


def _by_image(file: Path) -> dict[int, list[Any]]:
    """Image id -> its objects, of objects.json or attributes.json."""
    objects_of: dict[int, list[Any]] = {}
    for index, entry in enumerate(_read_list(file)):
        where = f"{file}: [{index}]"
        objects = entry.get("objects", entry.get("attributes")) if isinstance(entry, dict) else None
        if not isinstance(objects, list):
            raise ValueError(f"{where} has no list `objects` (or `attributes`): is it Visual Genome's objects.json?")
        objects_of.setdefault(_integer(entry, "image_id", where), []).extend(objects)
    return objects_of


def _read_list(file: Path) -> list[Any]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    fix = "fetch it again; a file in COCO's format is given as data.annotations"
    return parse_json(data, str(file), list, fix)  # the entries' numbers are checked one by one


def _integer(entry: Any, name: str, where: str) -> int:
    value = entry.get(name, entry.get("id") if name == "image_id" else None) if isinstance(entry, dict) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where} has {name} {value!r}, no whole number; correct or remove the entry")
    return value


def _inner_list(entry: dict[str, Any], name: str, where: str) -> list[Any]:
    """Empty where the field is absent or null."""
    value = entry.get(name)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where} has the {name} {value!r}, no list; correct or remove the entry")
    return value or []
