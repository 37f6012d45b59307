"""Reader of annotation files in COCO's detection format: images, annotations (boxes) and categories."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.safe_json import parse_json, short_repr

_WANTED = "an object with the lists images, annotations and categories is needed"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # False for NaN, too


def _is_box(value: Any) -> bool:
    return type(value) is list and len(value) == 4 and all(map(_is_number, value))


_POSITIVE = (lambda value: _is_number(value) and value > 0, "a positive number, in pixels")
_ID = (lambda value: type(value) is int, "a whole number")
_STRING = (lambda value: type(value) is str and value != "", "a non-empty string")
# For each list: the fields that its entries must have, each with its check and its description for messages.
_FIELDS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "images": {"id": _ID, "width": _POSITIVE, "height": _POSITIVE, "file_name": _STRING},
    "categories": {"id": _ID, "name": _STRING},
    "annotations": {
        "image_id": _ID,
        "category_id": _ID,
        "bbox": (_is_box, "four finite numbers [x, y, width, height]"),
    },
}


def read_coco(file: Path) -> tuple[dict, str]:
    """Return the parsed file, with its categories sorted by id, and the sha256 of its bytes.

    Raises:
        ValueError: The file is missing or not in this format; or an entry lacks a field, has a wrong type or a
            duplicate id, or refers to an image or category that is not in the file. The message names the entry.
    """
    if not file.is_file():
        raise ValueError(f"annotation file {file} does not exist; give a file in COCO's detection format")
    raw = file.read_bytes()
    data = parse_json(raw, str(file), fix=f"write or download it again in COCO's detection format: {_WANTED}")
    wrong = [kind for kind in _FIELDS if not isinstance(data.get(kind), list)]
    if wrong:
        raise ValueError(f"{file} is not in COCO's detection format: it has no list {', '.join(wrong)}; {_WANTED}")
    ids: dict[str, set[int]] = {"images": set(), "categories": set()}
    for kind, fields in _FIELDS.items():
        for index, entry in enumerate(data[kind]):
            location = f"{file}: {kind}[{index}]"
            if not isinstance(entry, dict):
                raise ValueError(f"{location} is {short_repr(entry)}, not an object; remove it")
            for name, (fits, wanted) in fields.items():
                if not fits(entry.get(name)):
                    actual = f"the {name} {short_repr(entry[name])}, not" if name in entry else f"no {name}:"
                    raise ValueError(f"{location} has {actual} {wanted}; correct or remove the entry")
            if kind in ids:
                if entry["id"] in ids[kind]:
                    raise ValueError(f"{location} has the same id as another entry, {entry['id']}; make the ids unique")
                ids[kind].add(entry["id"])
            elif entry["image_id"] not in ids["images"] or entry["category_id"] not in ids["categories"]:
                raise ValueError(
                    f"{location} refers to image {entry['image_id']} and category {entry['category_id']}, but the file "
                    "does not have both; add the missing one, or remove the annotation"
                )
    data["categories"].sort(key=lambda category: category["id"])
    return data, hashlib.sha256(raw).hexdigest()
