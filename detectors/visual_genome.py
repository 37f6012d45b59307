"""Reader of Visual Genome's annotation files scene_graphs.json and objects.json.

Both are lists with one entry per image (`image_id`, `objects`). An object has x, y, w, h, `names` and, in
scene_graphs.json, optional `attributes`, a list of words. The image file is <image_id>.jpg. Entries have no image size.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from detectors.names import Names, normalize_name
from storage.safe_json import parse_json, short_repr

_CORRECT = "correct or remove the entry"


class AnnotatedObject(NamedTuple):
    """An object in an annotation file."""

    box: Sequence[float]
    """x, y, width, height, in pixels of the image."""
    label: int | None
    """Class, counted from 0, or None if the network does not learn the object's class."""
    attributes: tuple[int, ...]


@dataclass(frozen=True)
class AnnotatedImage:
    """An image listed in an annotation file. height and width are 0 if the file does not state them."""

    id: str
    file_name: str
    height: int
    width: int
    objects: list[AnnotatedObject]


def attribute_indices(words: Any, names: Names, counts: Counter[str]) -> tuple[int, ...]:
    """Return the sorted indices in `names` of an object's attribute words. Unknown words are counted in `counts`."""
    if not names.first:
        return ()
    words = [normalize_name(word) for word in words if isinstance(word, str)] if isinstance(words, list) else []
    known = {names.index[word] for word in words if word in names.index}
    unknown = sum(word not in names.index for word in words)
    if unknown:
        counts["attributes that are not in data.attribute_names"] += unknown
    return tuple(sorted(known))


def read_visual_genome(file: Path, classes: Names, attributes: Names, counts: Counter[str]) -> list[AnnotatedImage]:
    """Read the annotated images of a file, sorted by id. Unknown attributes are counted in `counts`.

    Raises ValueError if an entry is unusable.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    fix = "download it again, or give a file in COCO's format as data.annotations"
    objects_of: dict[int, list[AnnotatedObject]] = {}
    for index, entry in enumerate(parse_json(data, str(file), list, fix)):
        location = f"{file}: [{index}]"
        image = entry.get("image_id") if isinstance(entry, dict) else None
        if type(image) is not int:
            raise ValueError(f"{location} has the image_id {short_repr(image)}, not a whole number; {_CORRECT}")
        objects = entry.get("objects")
        if not isinstance(objects, list):
            raise ValueError(f"{location} has no list `objects`; give a Visual Genome file as data.objects")
        own = objects_of.setdefault(image, [])
        own += [
            _read_object(annotated, f"{file}: image {image}, [{number}]", classes, attributes, counts)
            for number, annotated in enumerate(objects)
        ]
    return [AnnotatedImage(str(image), f"{image}.jpg", 0, 0, objects_of[image]) for image in sorted(objects_of)]


def _read_object(entry: Any, location: str, classes: Names, attributes: Names, counts: Counter[str]) -> AnnotatedObject:
    names = entry.get("names") if isinstance(entry, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{location} has the names {short_repr(names)}, not a list of strings; {_CORRECT}")
    box = [entry.get(side) for side in ("x", "y", "w", "h")]
    if not all(isinstance(side, int | float) and abs(side) < 1e9 for side in box):  # False for NaN, too
        raise ValueError(f"{location} has x, y, w, h {short_repr(box)}, not four numbers; {_CORRECT}")
    words = entry.get("attributes") or []
    if not isinstance(words, list):
        raise ValueError(f"{location} has the attributes {short_repr(words)}, not a list; {_CORRECT}")
    return AnnotatedObject(box, classes.find(names), attribute_indices(words, attributes, counts))
