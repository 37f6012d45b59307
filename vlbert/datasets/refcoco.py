"""The files of RefCOCO, RefCOCO+ and RefCOCOg, and the scoring of predicted boxes.

Error messages name the file and entry, and say what to do.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from storage.pickles import UnsafePickle, read_pickle
from vlbert.datasets.files import check_unique, open_task_file, parse_entries, read_json

# Files of expressions: RefCOCO and RefCOCO+ (UNC's splits), RefCOCOg (UMD's), RefCOCO and RefCOCOg (Google's).
REFS = ("refs(unc).p", "refs(umd).p", "refs(google).p")
INSTANCES = "instances.json"
_READ = "fetch the refs of RefCOCO, RefCOCO+ or RefCOCOg, or set task.folder or task.refs"
Box = tuple[float, float, float, float]  # x1 y1 x2 y2 in pixels of the image as the data set ships it
Convention = Literal["mattnet", "published", "vilbert", "plain"]

# The overlap measures of MAttNet's evaluation, of VL-BERT's and ViLBERT's published code and of plain geometry. They
# differ at the threshold: if one box is half of the other, `published` gives a little more than 0.50, and `plain`
# counts a miss.
CONVENTIONS = get_args(Convention)


@dataclass(frozen=True, slots=True)
class Expression:
    """A sentence that refers to one object. It is invalid if the object's box has no area inside the image."""

    sentence_id: int
    ref_id: int
    text: str
    box: Box | None = None  # box of the object; None if unknown
    image_size: tuple[int, int] | None = None  # width, height of the shipped image; None: those of the stored image
    objects: tuple[Box, ...] = ()  # all annotated objects with an area inside the image, crowds included
    object: int | None = None  # index of the object in `objects`
    invalid_reason: str = ""


Expressions = dict[str, dict[str, list[Expression]]]  # split -> image file -> expressions


def overlap(convention: Convention, boxes: np.ndarray, box: np.ndarray | Sequence[float]) -> np.ndarray:
    """Return the IoU of `box` with each of `boxes` [n, 4], float64 [n]. Boxes are x1 y1 x2 y2 in pixels.

    plain: the width is x2 - x1. published, vilbert: a box includes the pixels at x2 and y2: the width is x2 - x1 + 1.
    mattnet: as plain, but the IoU is 0 unless the intersection is more than one pixel wide and high.
    """
    boxes, box = np.asarray(boxes, np.float64).reshape(-1, 4), np.asarray(box, np.float64)
    low, high = np.maximum(boxes[:, :2], box[:2]), np.minimum(boxes[:, 2:], box[2:])
    if convention in ("published", "vilbert"):
        common, sizes, size = high - low + 1, boxes[:, 2:] - boxes[:, :2] + 1, box[2:] - box[:2] + 1
    else:
        common, sizes, size = high - low, _sizes(boxes), _sizes(box)
    if convention == "mattnet":
        last = np.minimum(boxes[:, 2:] - 1, box[2:] - 1)
        common = np.where((low < last).all(axis=1, keepdims=True), last - low + 1, 0)
    intersection = common.clip(0).prod(axis=1)
    union = sizes.prod(axis=1) + size.prod() - intersection
    return np.divide(intersection, union, out=np.zeros(len(boxes)), where=union > 0)


def is_hit(convention: Convention, overlap: np.ndarray | float) -> np.ndarray | bool:
    """Return whether an overlap counts as a hit: at least 0.5 or, with "plain" and "vilbert", more than 0.5."""
    return overlap > 0.5 if convention in ("plain", "vilbert") else overlap >= 0.5


def _sizes(boxes: np.ndarray) -> np.ndarray:
    # (x + w) - x differs from w in the last bit, which matters at the threshold. Rounding restores w.
    return np.round(boxes[..., 2:] - boxes[..., :2], 9)


def region_name(index: int | None) -> str:
    """Return the name that predictions use for row `index` of boxes: "the whole image" for 0, "no region" for None."""
    return "no region" if index is None else f"region {index}" if index else "the whole image"


def score_choice(
    convention: Convention, expression: Expression, boxes: np.ndarray, chosen: int | None, annotated: bool
) -> dict:
    """Return the columns of a prediction that chose row `chosen` of `boxes` [1 + r, 4], or no box if it is None.

    box_xywh is the chosen box in the data set's format, or all 0 if no box was chosen. If `annotated` is True, the
    regions are the annotated objects, and exact says whether the target object was chosen. If the target object is
    unknown, ground_truth, score, iou, hit and exact are None.
    """
    box = np.zeros(4) if chosen is None else boxes[chosen]
    ground_truth = iou = hit = exact = None
    if expression.box:
        right = 1 + expression.object if annotated and expression.object is not None else None
        ground_truth = region_name(right) if right else "the box {:.0f} {:.0f} {:.0f} {:.0f}".format(*expression.box)
        iou = 0.0 if chosen is None else float(overlap(convention, box, expression.box)[0])
        hit = chosen is not None and bool(is_hit(convention, iou))
        exact = right is not None and chosen == right if annotated else None
    return {
        "question": expression.text,
        "answer": region_name(chosen),
        "ground_truth": ground_truth,
        "score": None if hit is None else float(hit),
        "sentence_id": expression.sentence_id,
        "ref_id": expression.ref_id,
        "region": -1 if chosen is None else chosen - 1,
        "iou": iou,
        "iou_convention": convention,
        "hit": hit,
        "exact": exact,
        "box_xywh": [*box[:2].tolist(), *_sizes(box).tolist()],
    }


def metrics(rows: Sequence[dict]) -> dict[str, float]:
    """Return metrics over the predictions whose target object is known.

    accuracy_<convention> is the fraction of hits (see `is_hit`), and chance is the mean of 1 / candidates. exact is
    the fraction of predictions that chose the target object. It exists only with ground-truth regions.
    """
    known = [row for row in rows if row["hit"] is not None]
    if not known:
        return {}
    values = {f"accuracy_{known[0]['iou_convention']}": [row["hit"] for row in known]}
    if known[0]["exact"] is not None:
        values["exact"] = [row["exact"] for row in known]
    values["chance"] = [1 / row["candidates"] if row["candidates"] else 0.0 for row in known]
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def find_refs(folder: Path) -> str:
    """Return the name of the first of REFS that is in `folder`, or of the first one if none is."""
    return next((name for name in REFS if (folder / name).exists()), REFS[0])


def list_expressions(expressions: Expressions, split: str, source: Path) -> list[tuple[str, Expression]]:
    """Return (image file, expression) for all expressions of a split. Raises ValueError if there is no such split."""
    if split not in expressions:
        raise ValueError(f"{source} has no split {split}; it has {', '.join(sorted(expressions))}")
    return [(file, expression) for file, listed in expressions[split].items() for expression in listed]


def read_expressions(folder: Path, refs: str | None = None) -> Expressions:
    """Read the expressions in the file `refs` and their boxes. Return the expressions by split and image file.

    `refs` defaults to the first of REFS in `folder`.
    """
    source, instances = folder / (refs or find_refs(folder)), folder / INSTANCES
    if refs is None and not source.exists() and folder.is_dir():
        others = ", ".join(sorted(file.name for file in folder.iterdir() if file.name != INSTANCES)[:3])
        raise ValueError(f"there is no {source}; nor are {REFS[1]} and {REFS[2]}, but {others or 'nothing'}; {_READ}")
    images, annotations = _read_instances(instances)
    objects, index_of = defaultdict(list), {}
    for number, (image, box) in annotations.items():
        if not _box_problem(box, images[image]):
            index_of[number] = len(objects[image])
            objects[image].append(box)
    objects_of = {image: tuple(boxes) for image, boxes in objects.items()}
    expressions = defaultdict(lambda: defaultdict(list))
    refs_read = parse_entries(read_plain_pickle(source), "references", "RefCOCO", source, _check_ref)
    check_unique([ref["ref_id"] for ref in refs_read], f"references of {source}")
    check_unique([sentence["sent_id"] for ref in refs_read for sentence in ref["sentences"]], f"sentences of {source}")
    for ref in refs_read:
        image, annotation = ref["image_id"], ref["ann_id"]
        if image not in images or annotations.get(annotation, (None,))[0] != image:
            raise ValueError(
                f"{source}: ref {ref['ref_id']} names image {image} and annotation {annotation}, which do not belong "
                "together in instances.json; use two files of the same data set"
            )
        entry, box = images[image], annotations[annotation][1]
        size, problem = (entry["width"], entry["height"]), _box_problem(box, entry)
        target = box, size, objects_of.get(image, ()), index_of.get(annotation), problem
        for sentence in ref["sentences"]:
            expression = Expression(sentence["sent_id"], ref["ref_id"], sentence["sent"], *target)
            expressions[ref["split"]][entry["file_name"]].append(expression)
    return {split: dict(by_file) for split, by_file in expressions.items()}


def read_detections(file: Path, instances: Path) -> dict[str, np.ndarray]:
    """Read the boxes that MAttNet detected, and return them by image file: float64 [n, 4].

    Boxes are x1 y1 x2 y2 in pixels of the shipped image. Boxes without an area inside their image and boxes of images
    that are not in the file `instances` are dropped.
    """
    images, _ = _read_instances(instances)
    boxes_of = defaultdict(list)

    def detection(row: dict) -> tuple[dict | None, Box]:
        return images.get(row["image_id"]), _to_corners(row["box"])

    rows = read_json(file, "task.detections", list)
    for image, box in parse_entries(rows, "detections", "MAttNet", file, detection):
        if image and not _box_problem(box, image):
            boxes_of[image["file_name"]].append(np.clip(box, 0, [image["width"], image["height"]] * 2))
    return {name: np.array(boxes) for name, boxes in boxes_of.items()}


def read_plain_pickle(file: Path) -> Any:
    """Read a pickle, possibly from Python 2, without running code. Raises ValueError if the pickle would run code."""
    with open_task_file(file, "task.folder") as stream:
        data = stream.read()
    if data.lstrip()[:1] in (b"[", b"{"):
        raise ValueError(f"{file} is JSON, as gRefCOCO has it: its expressions name several objects or none; {_READ}")
    try:
        return read_pickle(data, encoding="utf-8")
    except UnsafePickle as error:
        raise ValueError(
            f"{file} wants to load {error}, which no refs file needs. Nothing was run; do not trust it"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} {error}; fetch it again") from error


def _read_instances(file: Path) -> tuple[dict[int, dict], dict[int, tuple[int, Box]]]:
    """Read instances.json. Return two dicts: image id -> entry of the image, and annotation id -> (image id, box)."""
    data = read_json(file, "task.folder")

    def parse_image(entry: dict) -> dict:
        if not all(type(side) is int and side >= 1 for side in (entry["width"], entry["height"])):
            raise ValueError(f"an image of {entry['width']} x {entry['height']} pixels")
        return entry | {"file_name": str(entry["file_name"])}

    images = {entry["id"]: entry for entry in _parse_unique(data, "images", file, parse_image, "id", "file_name")}

    def parse_annotation(entry: dict) -> dict:
        if entry["image_id"] not in images:
            raise ValueError(f"there is no image {entry['image_id']}")
        return entry | {"box": _to_corners(entry["bbox"])}

    annotations = _parse_unique(data, "annotations", file, parse_annotation, "id")
    return images, {entry["id"]: (entry["image_id"], entry["box"]) for entry in annotations}


def _parse_unique(data: dict, name: str, file: Path, parse: Callable[[dict], dict], *fields: str) -> list[dict]:
    """Parse the entries of the list `name`. Raises ValueError if two have the same value in one of `fields`."""
    entries = parse_entries(data.get(name), name, "COCO", file, parse)
    for field in fields:
        check_unique([entry[field] for entry in entries], f"{name} of {file}")
    return entries


def _check_ref(ref: dict) -> dict:
    ids = [ref["ref_id"], ref["image_id"], ref["ann_id"], *(value["sent_id"] for value in ref["sentences"])]
    texts = [ref["split"], *(value["sent"] for value in ref["sentences"])]
    if not (all(isinstance(value, int) for value in ids) and all(isinstance(text, str) for text in texts)):
        raise TypeError("an id is not a number (as in gRefCOCO), or its split or a sentence is not a string")
    return ref


def _to_corners(box: Sequence[float]) -> Box:
    x, y, width, height = box
    if not all(abs(side) < 1e9 for side in box):  # False for NaN, too
        raise ValueError(f"box {box} is not finite")
    return x, y, x + width, y + height


def _box_problem(box: Box, image: dict) -> str:
    """Return the reason why a box is not valid (no area, or no area inside the image), or "" if the box is valid."""
    x1, y1, x2, y2 = box
    if x2 <= x1 or y2 <= y1:
        return f"its box {list(box)} has no area"
    if min(x2, image["width"]) <= max(x1, 0) or min(y2, image["height"]) <= max(y1, 0):
        return f"its box {list(box)} is outside its image of {image['width']} x {image['height']} pixels"
    return ""
