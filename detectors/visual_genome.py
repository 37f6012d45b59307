"""Reads Visual Genome's annotation files: scene_graphs.json, or objects.json.

Either is a list with one entry an image, `image_id` and `objects`; an object has x, y, w, h, `names` and, in the scene
graphs, perhaps `attributes`, a list of words. An image's file is <image_id>.jpg, which alone tells the image's size.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from detectors.names import Names, plain
from storage.safe_json import parse_json, short_repr

_CORRECT = "correct or remove the entry"


class AnnotatedObject(NamedTuple):
    """An object as a file has it."""

    box: Sequence[float]
    """x, y, width, height, in pixels of the image."""
    label: int | None
    """Its class, from 0; None: a class that the network does not learn."""
    attributes: tuple[int, ...]


@dataclass(frozen=True)
class AnnotatedImage:
    """An image as a file of annotations has it; its sides are 0 where that does not say them."""

    id: str
    file_name: str
    height: int
    width: int
    objects: list[AnnotatedObject]


def attribute_numbers(words: Any, names: Names, counts: Counter[str]) -> tuple[int, ...]:
    """Return the known attributes among an object's words, each once, ascending; others are counted."""
    if not names.first:
        return ()
    words = [plain(word) for word in words if isinstance(word, str)] if isinstance(words, list) else []
    known = {names.number[word] for word in words if word in names.number}
    unknown = sum(word not in names.number for word in words)
    if unknown:
        counts["attributes of no name in data.attribute_names"] += unknown
    return tuple(sorted(known))


def read_visual_genome(file: Path, classes: Names, attributes: Names, counts: Counter[str]) -> list[AnnotatedImage]:
    """Return the images of a file, by id; ValueError names file and entry where one is unusable."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    fix = "fetch it again; a file in COCO's format is given as data.annotations"
    objects_of: dict[int, list[AnnotatedObject]] = {}
    for index, entry in enumerate(parse_json(data, str(file), list, fix)):
        where = f"{file}: [{index}]"
        image = entry.get("image_id") if isinstance(entry, dict) else None
        if type(image) is not int:
            raise ValueError(f"{where} has image_id {short_repr(image)}, no whole number; {_CORRECT}")
        objects = entry.get("objects")
        if not isinstance(objects, list):
            raise ValueError(f"{where} has no list `objects`: is it Visual Genome's?")
        own = objects_of.setdefault(image, [])
        own += [
            _read_object(one, f"{file}: image {image}, [{number}]", classes, attributes, counts)
            for number, one in enumerate(objects)
        ]
    return [AnnotatedImage(str(image), f"{image}.jpg", 0, 0, objects_of[image]) for image in sorted(objects_of)]


def _read_object(entry: Any, where: str, classes: Names, attributes: Names, counts: Counter[str]) -> AnnotatedObject:
    names = entry.get("names") if isinstance(entry, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where} has the names {short_repr(names)}, no list of texts; {_CORRECT}")
    box = [entry.get(side) for side in ("x", "y", "w", "h")]
    if not all(isinstance(side, int | float) and abs(side) < 1e9 for side in box):  # which NaN is not
        raise ValueError(f"{where} has x, y, w, h {short_repr(box)}, not four numbers; {_CORRECT}")
    words = entry.get("attributes") or []
    if not isinstance(words, list):
        raise ValueError(f"{where} has the attributes {short_repr(words)}, no list; {_CORRECT}")
    return AnnotatedObject(box, classes.find(names), attribute_numbers(words, attributes, counts))
