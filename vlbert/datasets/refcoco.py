"""RefCOCO+'s official files and how a predicted box is scored. A ValueError names the file, the entry and the
remedy."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from storage.pickles import UnsafePickle, read_pickle
from vlbert.datasets.files import check_ids, check_unique, open_task_file, parse_entries, read_json

FILES = ("refs(unc).p", "instances.json")
Box = tuple[float, float, float, float]  # x1 y1 x2 y2 in pixels of the image that the data set ships
Convention = Literal["mattnet", "published", "plain"]

# How MAttNet's evaluation, VL-BERT's published code and plain geometry measure overlaps. They differ at the threshold:
# where one box is half the other, `published` gives a little more than 0.50, and `plain` counts a miss.
CONVENTIONS = get_args(Convention)
# Table 3 of the paper, % of expressions: track -> split -> text. It does not say which convention it uses.
REPORTED = {
    "ground_truth": {
        "val": "79.88 base, 80.31 large",
        "testA": "82.40 base, 83.62 large",
        "testB": "75.01 base, 75.45 large",
    },
    "detected": {
        "val": "71.60 base, 72.59 large",
        "testA": "77.72 base, 78.57 large",
        "testB": "60.99 base, 62.30 large",
    },
}


@dataclass(frozen=True, slots=True)
class Expression:
    """One sentence that refers to one object. It is invalid where the object has no area inside the image."""

    sentence_id: int
    ref_id: int
    text: str
    box: Box | None = None  # of the object; None: unknown
    image_size: tuple[int, int] | None = None  # width, height of the shipped image; None: those of the stored one
    objects: tuple[Box, ...] = ()  # all annotated objects of the image that have an area inside it, crowds too
    object: int | None = None  # the index of the object among them
    invalid_reason: str = ""


Expressions = dict[str, dict[str, list[Expression]]]  # split -> image file -> its expressions


def overlap(convention: Convention, boxes: np.ndarray, box: np.ndarray | Sequence[float]) -> np.ndarray:
    """float64 [n]: intersection over union of boxes [n, 4] with one, x1 y1 x2 y2 in pixels.

    plain: boxes are continuous. published: x2 and y2 are the last pixels inside, so every width is one more.
    mattnet: widths are plain; the intersection counts the pixels from x1 to x2 - 1 and needs more than one a side.
    """
    boxes, box = np.asarray(boxes, np.float64).reshape(-1, 4), np.asarray(box, np.float64)
    low, high = np.maximum(boxes[:, :2], box[:2]), np.minimum(boxes[:, 2:], box[2:])
    if convention == "published":
        common, sizes, size = high - low + 1, boxes[:, 2:] - boxes[:, :2] + 1, box[2:] - box[:2] + 1
    else:
        common, sizes, size = high - low, _sizes(boxes), _sizes(box)
    if convention == "mattnet":
        last = np.minimum(boxes[:, 2:] - 1, box[2:] - 1)
        common = np.where((low < last).all(axis=1, keepdims=True), last - low + 1, 0)
    intersection = common.clip(0).prod(axis=1)
    union = sizes.prod(axis=1) + size.prod() - intersection
    return np.divide(intersection, union, out=np.zeros(len(boxes)), where=union > 0)


def is_hit(convention: Convention, overlap: np.ndarray) -> np.ndarray:
    """bool: whether a box of that overlap is a hit: at 0.5 or more; by `plain` above 0.5."""
    return overlap > 0.5 if convention == "plain" else overlap >= 0.5


def _sizes(boxes: np.ndarray) -> np.ndarray:
    # (x + w) - x differs from w in the last bit, which decides at the threshold: rounding restores w.
    return np.round(boxes[..., 2:] - boxes[..., :2], 9)


def region_name(index: int | None) -> str:
    """The name of row `index` of the boxes: row 0 is the whole image, then come the regions."""
    return "no region" if index is None else f"region {index}" if index else "the whole image"


def score_choice(
    convention: Convention, one: Expression, boxes: np.ndarray, chosen: int | None, annotated: bool
) -> dict:
    """The columns of a prediction that chooses row `chosen` of the boxes [1 + r, 4], or none, for an expression.

    box_xywh is the chosen box as the data set writes boxes, zeros for none. ground_truth, score, iou, hit and exact are
    None where the object is unknown. `annotated`: the regions are the annotated objects; exact says whether the chosen
    one is the object itself.
    """
    box = np.zeros(4) if chosen is None else boxes[chosen]
    ground_truth = iou = hit = exact = None
    if one.box:
        right = 1 + one.object if annotated and one.object is not None else None
        ground_truth = region_name(right) if right else "the box {:.0f} {:.0f} {:.0f} {:.0f}".format(*one.box)
        iou = 0.0 if chosen is None else float(overlap(convention, box, one.box)[0])
        hit = chosen is not None and bool(is_hit(convention, iou))
        exact = right is not None and chosen == right if annotated else None
    return {
        "question": one.text,
        "answer": region_name(chosen),
        "ground_truth": ground_truth,
        "score": None if hit is None else float(hit),
        "sentence_id": one.sentence_id,
        "ref_id": one.ref_id,
        "region": -1 if chosen is None else chosen - 1,
        "iou": iou,
        "iou_convention": convention,
        "hit": hit,
        "exact": exact,
        "box_xywh": [*box[:2].tolist(), *_sizes(box).tolist()],
    }


def metrics(rows: Sequence[dict]) -> dict[str, float]:
    """Over rows whose object is known. accuracy_<convention>: share of hits. exact, on ground-truth regions: share of
    choices that are the object itself. chance: mean of 1 / candidates."""
    known = [row for row in rows if row["hit"] is not None]
    if not known:
        return {}
    found = {f"accuracy_{known[0]['iou_convention']}": [row["hit"] for row in known]}
    if known[0]["exact"] is not None:
        found["exact"] = [row["exact"] for row in known]
    found["chance"] = [1 / row["candidates"] if row["candidates"] else 0.0 for row in known]
    return {name: float(np.mean(values)) for name, values in found.items()}


def submission(expressions: Expressions, rows: Sequence[dict], folder: Path) -> dict[str, bytes]:
    """A list of {sent_id, ref_id, box_xywh}, for your own scorer: there is no leaderboard. ValueError where an
    expression of the rows' splits has no row."""
    splits = sorted({row["split"] for row in rows})
    wanted = [one.sentence_id for split in splits for _, one in of_split(expressions, split, folder)]
    check_ids((row["sentence_id"] for row in rows), wanted, "the predictions", ", ".join(splits))
    found = [{"sent_id": r["sentence_id"], "ref_id": r["ref_id"], "box_xywh": r["box_xywh"]} for r in rows]
    return {"predictions.json": json.dumps(found).encode()}


def of_split(expressions: Expressions, split: str, folder: Path) -> list[tuple[str, Expression]]:
    """(image file, expression) of a split."""
    if split not in expressions:
        raise ValueError(f"{folder / FILES[0]} has no split {split}, only {', '.join(sorted(expressions))}")
    return [(file, one) for file, ones in expressions[split].items() for one in ones]


def read_expressions(folder: Path, refs: str = FILES[0]) -> Expressions:
    """split -> image file -> its expressions, from a refs file and instances.json."""
    refs, instances = folder / refs, folder / FILES[1]
    images, annotations = _read_instances(instances)
    objects, index_of = defaultdict(list), {}
    for number, (image, box) in annotations.items():
        if not _invalid_reason(box, images[image]):
            index_of[number] = len(objects[image])
            objects[image].append(box)
    of_image = {image: tuple(boxes) for image, boxes in objects.items()}
    expressions = defaultdict(lambda: defaultdict(list))
    for ref in _read_refs(refs):
        image, annotation = ref["image_id"], ref["ann_id"]
        if image not in images or annotations.get(annotation, (None,))[0] != image:
            raise ValueError(
                f"{refs}: ref {ref['ref_id']} names image {image}, annotation {annotation}, which instances.json does "
                "not hold together; both files must be of the same data set"
            )
        entry, box = images[image], annotations[annotation][1]
        for sentence in ref["sentences"]:
            expressions[ref["split"]][entry["file_name"]].append(
                Expression(
                    sentence["sent_id"],
                    ref["ref_id"],
                    sentence["sent"],
                    box,
                    (entry["width"], entry["height"]),
                    of_image.get(image, ()),
                    index_of.get(annotation),
                    _invalid_reason(box, entry),
                )
            )
    return {split: dict(by_file) for split, by_file in expressions.items()}


def read_detections(file: Path, instances: Path) -> dict[str, np.ndarray]:
    """Image file -> boxes float64 [n, 4], x1 y1 x2 y2 in pixels of the shipped image, of MAttNet's file, a list of
    {box, image_id, ...}.

    Boxes of images that instances.json does not hold, and boxes without an area inside their image, are dropped.
    """
    images, _ = _read_instances(instances)
    found = defaultdict(list)

    def detection(row: dict) -> tuple[dict | None, Box]:
        return images.get(row["image_id"]), _corners(row["box"])

    rows = read_json(file, "task.detections", list)
    for image, box in parse_entries(rows, "detections", "MAttNet", file, detection):
        if image and not _invalid_reason(box, image):
            found[image["file_name"]].append(np.clip(box, 0, [image["width"], image["height"]] * 2))
    return {name: np.array(boxes) for name, boxes in found.items()}


def read_plain_pickle(file: Path) -> Any:
    """Read a pickle of lists, dicts, strings and numbers (Python 2's too); whatever would run code is refused."""
    with open_task_file(file, "task.folder") as stream:
        data = stream.read()
    try:
        return read_pickle(data, encoding="utf-8")
    except UnsafePickle as error:
        raise ValueError(
            f"{file} wants to load {error}, which no refs file needs. Nothing was run; do not trust it"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} {error}; fetch it again") from error


def _read_instances(file: Path) -> tuple[dict[int, dict], dict[int, tuple[int, Box]]]:
    """(image id -> its entry, with file_name, width and height; annotation id -> the id of its image, its box)."""
    data = read_json(file, "task.folder")

    def image_of(entry: dict) -> dict:
        if not all(type(side) is int and side >= 1 for side in (entry["width"], entry["height"])):
            raise ValueError(f"an image of {entry['width']} x {entry['height']} pixels")
        return entry | {"file_name": str(entry["file_name"])}

    images = {one["id"]: one for one in _unique(data, "images", file, image_of, "id", "file_name")}

    def annotation(entry: dict) -> dict:
        if entry["image_id"] not in images:
            raise ValueError(f"there is no image {entry['image_id']}")
        return entry | {"box": _corners(entry["bbox"])}

    annotations = _unique(data, "annotations", file, annotation, "id")
    return images, {one["id"]: (one["image_id"], one["box"]) for one in annotations}


def _unique(data: dict, name: str, file: Path, parse: Callable[[dict], dict], *fields: str) -> list[dict]:
    """The parsed entries of one of the file's lists. ValueError where two are equal in one of these fields."""
    entries = parse_entries(data.get(name), name, "COCO", file, parse)
    for field in fields:
        check_unique([entry[field] for entry in entries], f"{name} of {file}")
    return entries


def _read_refs(file: Path) -> list[dict]:
    """The references; the fields that are read are checked."""
    refs = parse_entries(read_plain_pickle(file), "references", "RefCOCO+", file, _checked)
    check_unique([ref["ref_id"] for ref in refs], f"references of {file}")
    check_unique([one["sent_id"] for ref in refs for one in ref["sentences"]], f"sentences of {file}")
    return refs


def _checked(ref: dict) -> dict:
    ids = [ref["ref_id"], ref["image_id"], ref["ann_id"], *(one["sent_id"] for one in ref["sentences"])]
    texts = [ref["split"], *(one["sent"] for one in ref["sentences"])]
    if not (all(isinstance(one, int) for one in ids) and all(isinstance(text, str) for text in texts)):
        raise TypeError("an id is no number, or its split or a sentence is no text")
    return ref


def _corners(box: Sequence[float]) -> Box:
    x, y, width, height = box
    if not all(abs(side) < 1e9 for side in box):  # nor NaN
        raise ValueError(f"box {box} is not finite")
    return x, y, x + width, y + height


def _invalid_reason(box: Box, image: dict) -> str:
    """Why a box is no object; "" where it is one."""
    x1, y1, x2, y2 = box
    if x2 <= x1 or y2 <= y1:
        return f"its box {list(box)} has no area"
    if min(x2, image["width"]) <= max(x1, 0) or min(y2, image["height"]) <= max(y1, 0):
        return f"its box {list(box)} lies outside its image of {image['width']} x {image['height']} pixels"
    return ""
