"""Reads annotation files in COCO's detection format: images, annotations (boxes) and categories."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.safe_json import parse_json, short_repr

_WANTED = "needed is an object with the lists images, annotations and categories"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # which NaN is not


def _is_box(value: Any) -> bool:
    return type(value) is list and len(value) == 4 and all(map(_is_number, value))


_POSITIVE = (lambda value: _is_number(value) and value > 0, "a positive number, in pixels")
_ID = (lambda value: type(value) is int, "a whole number")
_TEXT = (lambda value: type(value) is str and value != "", "a text")
# Of each entry of a list: the fields that it must have, and what they must be.
_FIELDS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "images": {"id": _ID, "width": _POSITIVE, "height": _POSITIVE, "file_name": _TEXT},
    "categories": {"id": _ID, "name": _TEXT},
    "annotations": {
        "image_id": _ID,
        "category_id": _ID,
        "bbox": (_is_box, "four finite numbers [x, y, width, height]"),
    },
}


def read_coco(file: Path) -> tuple[dict, str]:
    """Return the parsed file, its categories sorted by id, and the sha256 of its bytes.

    Raises:
        ValueError: Names the file and the first entry that lacks a field we need, has one of a wrong type, another's
            id, or refers to an image or category that is not in the file.
    """
    if not file.is_file():
        raise ValueError(f"there is no annotation file {file}; name one in COCO's detection format")
    raw = file.read_bytes()
    data = parse_json(raw, str(file), fix=f"write or fetch it again in COCO's detection format: {_WANTED}")
    wrong = [kind for kind in _FIELDS if not isinstance(data.get(kind), list)]
    if wrong:
        raise ValueError(f"{file} is not in COCO's detection format: {', '.join(wrong)} missing or no list; {_WANTED}")
    ids: dict[str, set[int]] = {"images": set(), "categories": set()}
    for kind, fields in _FIELDS.items():
        for index, entry in enumerate(data[kind]):
            where = f"{file}: {kind}[{index}]"
            if not isinstance(entry, dict):
                raise ValueError(f"{where} is {short_repr(entry)}, not an object; remove it")
            for name, (fits, wanted) in fields.items():
                if not fits(entry.get(name)):
                    found = f"the {name} {short_repr(entry[name])}, not" if name in entry else f"no {name}:"
                    raise ValueError(f"{where} has {found} {wanted}; correct or remove the entry")
            if kind in ids:
                if entry["id"] in ids[kind]:
                    raise ValueError(f"{where} has the id of another, {entry['id']}; give it one of its own")
                ids[kind].add(entry["id"])
            elif entry["image_id"] not in ids["images"] or entry["category_id"] not in ids["categories"]:
                raise ValueError(
                    f"{where} refers to image {entry['image_id']} and category {entry['category_id']}, which are not "
                    "both in the file; add the one that is missing, or remove the annotation"
                )
    data["categories"].sort(key=lambda category: category["id"])
    return data, hashlib.sha256(raw).hexdigest()
