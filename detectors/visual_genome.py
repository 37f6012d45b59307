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

    Unusable entries are skipped and counted. Raises ValueError if the file or all its entries are unusable.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    fix = "download it again, or give a file in COCO's format as data.annotations"
    objects_of: dict[int, list[AnnotatedObject]] = {}
    unusable: list[str] = []
    for index, entry in enumerate(parse_json(data, str(file), list, fix, pairs=_mark_repeated)):
        try:
            image, objects = _check_image(entry)
        except ValueError as error:
            unusable.append(f"[{index}] {error}")
            continue
        own = objects_of.setdefault(image, [])
        for number, annotated in enumerate(objects):
            try:
                own.append(_read_object(annotated, classes, attributes, counts))
            except ValueError as error:
                unusable.append(f"image {image}, [{number}] {error}")
    if unusable and not any(objects_of.values()):
        raise ValueError(f"{file}: all {len(unusable)} entries are unusable, the first: {unusable[0]}; {fix}")
    if unusable:
        counts[f"unusable entries of {file.name}, the first: {unusable[0]}"] += len(unusable)
    return [AnnotatedImage(str(image), f"{image}.jpg", 0, 0, objects_of[image]) for image in sorted(objects_of)]


def _mark_repeated(pairs: list[tuple[str, Any]]) -> dict[str | None, Any]:
    """Return the pairs as a dict, with a repeated name, if any, as the value of None."""
    entry: dict[str | None, Any] = dict(pairs)
    if len(entry) < len(pairs):
        ((entry[None], _),) = Counter(name for name, _ in pairs).most_common(1)
    return entry


def _check_entry(entry: Any) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"is {short_repr(entry)}, not an object")
    if None in entry:
        raise ValueError(f"has the name {short_repr(entry[None])} twice")


def _check_image(entry: Any) -> tuple[int, list[Any]]:
    """Return the id and the objects of an image's entry. Raises ValueError if the entry is unusable."""
    _check_entry(entry)
    image, objects = entry.get("image_id"), entry.get("objects")
    if type(image) is not int:
        raise ValueError(f"has the image_id {short_repr(image)}, not a whole number")
    if not isinstance(objects, list):
        raise ValueError("has no list `objects`")
    return image, objects


def _read_object(entry: Any, classes: Names, attributes: Names, counts: Counter[str]) -> AnnotatedObject:
    _check_entry(entry)
    names, box = entry.get("names"), [entry.get(side) for side in ("x", "y", "w", "h")]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"has the names {short_repr(names)}, not a list of strings")
    if not all(type(side) in (int, float) and abs(side) < 1e9 for side in box):  # False for NaN, too
        raise ValueError(f"has x, y, w, h {short_repr(box)}, not four numbers")
    words = entry.get("attributes") or []
    if not isinstance(words, list):
        raise ValueError(f"has the attributes {short_repr(words)}, not a list")
    return AnnotatedObject(box, classes.find(names), attribute_indices(words, attributes, counts))
