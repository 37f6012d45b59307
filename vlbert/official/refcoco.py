"""RefCOCO+'s official files, read as the data set ships them. A ValueError names the file, the place in it and the way
out."""

import io
import json
import pickle
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = ("refs(unc).p", "instances.json")


@dataclass(frozen=True)
class Expression:
    """One sentence that refers to one object."""

    sentence_id: int
    ref_id: int
    text: str
    box: tuple[float, float, float, float]  # of the object: x1 y1 x2 y2 in pixels of the image that the data set ships
    image_size: tuple[int, int]  # width, height of that image
    objects: tuple[tuple[float, float, float, float], ...]  # boxes of all annotated objects of the image
    held_out: bool


def read_expressions(folder: Path) -> dict[str, dict[str, list[Expression]]]:
    """split -> image file -> its expressions, from refs(unc).p and instances.json."""
    for name in FILES:
        if not (folder / name).is_file():
            raise ValueError(f"there is no {folder / name}; set task.folder to the RefCOCO+ folder that holds it")
    with open(folder / "instances.json") as file:
        instances = json.load(file)
    images = {image["id"]: image for image in instances["images"]}
    boxes, objects = {}, defaultdict(list)
    for annotation in instances["annotations"]:
        x, y, w, h = annotation["bbox"]
        boxes[annotation["id"]] = (x, y, x + w, y + h)
        objects[annotation["image_id"]].append(boxes[annotation["id"]])
    expressions: dict[str, dict[str, list[Expression]]] = defaultdict(lambda: defaultdict(list))
    for ref in read_plain_pickle(folder / "refs(unc).p"):
        if ref["image_id"] not in images or ref["ann_id"] not in boxes:
            raise ValueError(
                f"{folder}/refs(unc).p: ref {ref['ref_id']} names image {ref['image_id']}, annotation {ref['ann_id']}, "
                f"which instances.json does not hold; both files must be of the same data set"
            )
        image = images[ref["image_id"]]
        for sentence in ref["sentences"]:
            expressions[ref["split"]][image["file_name"]].append(
                Expression(
                    sentence["sent_id"],
                    ref["ref_id"],
                    sentence["sent"],
                    boxes[ref["ann_id"]],
                    (image["width"], image["height"]),
                    tuple(objects[ref["image_id"]]),
                    held_out=False,
                )
            )
    return {split: dict(by_file) for split, by_file in expressions.items()}


def read_plain_pickle(file: Path) -> Any:
    """A pickle of plain lists, dicts, strings and numbers (Python 2's too); anything that would run code is refused."""

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise ValueError(
                f"{file} wants to load {module}.{name}; a refs file holds plain values only, do not trust it"
            )

    return Plain(io.BytesIO(file.read_bytes()), encoding="utf-8").load()
