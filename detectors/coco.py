"""Reads annotation files in COCO's detection format: images, annotations (boxes) and categories."""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

from storage.safe_json import parse_json, shown

_SINGULAR = {"images": "image", "annotations": "annotation", "categories": "category"}
_WANTED = "needed is an object with the lists images, annotations and categories"


def read_coco(file: Path) -> tuple[dict, str]:
    """The parsed file, its categories sorted by id, and the sha256 of its bytes.

    ValueError names the file and the first entry that lacks a field we need, has one of a wrong type, another's id, or
    refers to an image or category that is not in the file.
    """
    if not file.is_file():
        raise ValueError(f"there is no annotation file {file}; name one in COCO's detection format")
    raw = file.read_bytes()
    # Entries are checked one by one below; those messages name the entry whose number is not finite.
    data = parse_json(raw, str(file), fix=f"write or fetch it again in COCO's detection format: {_WANTED}")
    for wrong, kinds in (
        ("missing", [kind for kind in _SINGULAR if kind not in data]),
        ("is no list", [kind for kind in _SINGULAR if not isinstance(data.get(kind, []), list)]),
    ):
        if kinds:
            raise ValueError(f"{file} is not in COCO's detection format: {', '.join(kinds)} {wrong}; {_WANTED}")
    for kind in ("images", "categories", "annotations"):
        for index, entry in enumerate(data[kind]):
            _check_entry(entry, kind, _where(file, kind, index, entry))
    images, categories = (_unique_ids(data[kind], kind, file) for kind in ("images", "categories"))
    for index, entry in enumerate(data["annotations"]):
        if entry["image_id"] not in images or entry["category_id"] not in categories:
            raise ValueError(
                f"{_where(file, 'annotations', index, entry)} refers to image {entry['image_id']} and category "
                f"{entry['category_id']}, which are not both in the file; add the one that is missing, or remove the "
                "annotation"
            )
    data["categories"].sort(key=lambda category: category["id"])
    return data, hashlib.sha256(raw).hexdigest()


def _where(file: Path, kind: str, index: int, entry: object) -> str:
    """The name of an entry in messages: by its id or, without one, by its index."""
    if isinstance(entry, dict) and _is_integer(entry.get("id")):
        return f"{file}: {_SINGULAR[kind]} {entry['id']}"
    return f"{file}: {kind}[{index}]"


def _unique_ids(entries: list[dict], kind: str, file: Path) -> set[int]:
    ids = set()
    for index, entry in enumerate(entries):
        if entry["id"] in ids:
            called = _SINGULAR[kind]
            where = f"{file}: {called} {entry['id']}: {kind}[{index}]"
            raise ValueError(f"{where} has the id of another {called}; give it one of its own")
        ids.add(entry["id"])
    return ids


def _check_entry(entry: object, kind: str, where: str) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {shown(entry)}, not an object; remove it")
    # An annotation's own id is only for messages.
    if kind != "annotations" or "id" in entry:
        _check_field(entry, "id", _is_integer, "a whole number", where)
    if kind == "images":
        for name in ("width", "height"):
            if not (_is_finite(entry.get(name)) and entry[name] > 0):
                raise ValueError(f"{where} has no positive {name}; give it the size that its boxes refer to")
        _check_field(entry, "sample_key" if "sample_key" in entry else "file_name", _is_text, "a text", where)
    elif kind == "categories":
        _check_field(entry, "name", _is_text, "a text", where)
    else:
        _check_field(entry, "image_id", _is_integer, "an image's id", where)
        _check_field(entry, "category_id", _is_integer, "a category's id", where)
        _check_field(entry, "bbox", _is_box, "four finite numbers [x, y, width, height]", where)


def _check_field(entry: dict, name: str, fits: Callable[[object], bool], wanted: str, where: str) -> None:
    if name not in entry:
        raise ValueError(f"{where} has no {name}; add it ({wanted}), or remove the entry")
    if not fits(entry[name]):
        raise ValueError(f"{where} has the {name} {shown(entry[name])}, not {wanted}; correct or remove the entry")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_box(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_finite, value))
