"""VCR's official files, metrics and submission file. A ValueError names the file, the line and the remedy."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from storage.safe_json import parse_json
from vlbert.datasets.files import check_format, check_ids, check_unique, open_task_file, read_json

CHOICES = 4
_OBJECTS = (
    "person bicycle car motorcycle airplane bus train truck boat trafficlight firehydrant stopsign parkingmeter bench "
    "bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee skis "
    "snowboard sportsball kite baseballbat baseballglove skateboard surfboard tennisracket bottle wineglass cup fork "
    "knife spoon bowl banana apple sandwich orange broccoli carrot hotdog pizza donut cake chair couch pottedplant bed "
    "diningtable toilet tv laptop mouse remote keyboard cellphone microwave oven toaster sink refrigerator book clock "
    "vase scissors teddybear hairdrier toothbrush"
)
OBJECTS = _OBJECTS.split()  # COCO's classes as VCR spells them, in the order of COCO's ids: class 1 is the first
CLASSES = 1 + len(OBJECTS)  # class 0 is the whole image's

Text = Sequence[str | Sequence[int]]  # words, and lists of mentioned objects, by their numbers from 0

# Table 1 of the paper, %: split -> metric -> text.
REPORTED = {
    "val": {
        "answer_accuracy": "73.8 base, 75.5 large",
        "rationale_accuracy": "74.4 base, 77.9 large",
        "joint_accuracy": "55.2 base, 58.9 large",
    },
    "test": {"answer_accuracy": "75.8 large", "rationale_accuracy": "78.4 large", "joint_accuracy": "59.7 large"},
}

_LABELS = ("answer_label", "rationale_label")
_GROUPS = ["answer_{}", *(f"rationale_conditioned_on_a{answer}_{{}}" for answer in range(CHOICES))]
COLUMNS = ["annot_id", *(group.format(choice) for group in _GROUPS for choice in range(CHOICES))]  # the leaderboard's


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the jsonl files, checked. It stays text: parsed, train takes gigabytes in every loading process."""

    line: str
    file: Path
    number: int  # of the line in it, from 1
    annot_id: str
    image: str  # file name
    metadata: Path | None  # None: a user's own question, about the regions of a sample
    labels: tuple[int, int] | None  # the right answer and the right rationale; None: the file does not have them
    wordless: str | None  # a text of it without a word, such as "answer_choices[2]"

    @property
    def location(self) -> str:
        return f"{self.file} line {self.number}"


@dataclass(frozen=True, eq=False)
class Scene:
    """The objects of an image, in the order in which texts number them."""

    size: tuple[int, int]  # width, height of the image that the boxes are measured in
    names: list[str]  # the class of each object
    classes: list[int]  # the same as numbers, from 1
    boxes: np.ndarray  # float [r, 4] x1 y1 x2 y2 in pixels, inside the image
    polygons: list[list[np.ndarray]]  # of each object, [corners, 2] each

    def masks(self, side: int) -> np.ndarray:
        """float32 [r, side, side]: each object's `instance_mask`."""
        masks = [instance_mask(*both, side) for both in zip(self.polygons, self.boxes, strict=True)]
        return np.array(masks, np.float32).reshape(-1, side, side)


def instance_mask(polygons: Sequence[np.ndarray], box: np.ndarray, side: int) -> np.ndarray:
    """float32 [side, side]: 1 in the cells of a box that one of the object's polygons [corners, 2] covers.

    As in the published code, which used scikit-image's polygon: x2 and y2 belong to the box, a cell is covered where
    its upper left corner is, and points beyond the last cells' corners are moved onto them. Edges follow scikit-image
    0.16, which leaves out the last row and column: a polygon over the whole box covers 169 of 14 x 14 cells (196 with
    0.26). An object without a polygon fills its box.
    """
    if not polygons:
        return np.ones((side, side), np.float32)
    row, column = np.indices((side, side)).reshape(2, -1, 1)
    inside = np.zeros(side * side, bool)
    for polygon in polygons:  # a point is inside where a ray to its right meets an odd number of edges
        corners = np.clip((polygon - box[:2]) * side / (box[2:] - box[:2] + 1), 0, side - 1)
        (ax, ay), (bx, by) = corners.T, np.roll(corners, -1, axis=0).T
        meets = (ay > row) != (by > row)  # (cells, edges)
        rise = np.where(by == ay, 1, by - ay)  # level edges meet no ray
        inside |= (meets & (column < ax + (row - ay) * (bx - ax) / rise)).sum(axis=1) % 2 == 1
    return inside.reshape(side, side).astype(np.float32)


def read_scene(file: Path) -> Scene:
    """The metadata of an image; ValueError where the file is cut off or does not fit together."""
    found = read_json(file, "task.folder")
    with check_format("VCR", file, "its objects"):
        names, size = found["names"], (found["width"], found["height"])
        unknown = set(names) - set(OBJECTS)
        if unknown:
            raise ValueError(f"it has an object of class {min(unknown)}")
        if not all(1 <= side < math.inf for side in size):
            raise ValueError(f"its image is {size[0]} x {size[1]} pixels")
        classes = [1 + OBJECTS.index(name) for name in names]
        boxes = np.array([box[:4] for box in found["boxes"]], np.float64).reshape(-1, 4)
        polygons = [[_corners(polygon) for polygon in of if len(polygon)] for of in found["segms"]]
        if not len(names) == len(boxes) == len(polygons):
            raise ValueError(f"it has {len(names)} names, {len(boxes)} boxes and {len(polygons)} segms")
        boxes = _inside(boxes, size)
    return Scene(size, names, classes, boxes, polygons)


def _corners(polygon: Sequence) -> np.ndarray:
    """float64 [corners, 2]."""
    corners = np.array(polygon, np.float64)
    if corners.ndim != 2 or corners.shape[1] != 2 or not np.isfinite(corners).all():
        raise ValueError(f"a polygon is no list of finite x, y: {str(polygon)[:60]}")
    return corners


def _inside(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The boxes [r, 4] clipped to the image; one that has no area there becomes one pixel."""
    if not np.isfinite(boxes).all():
        raise ValueError("a box is not of finite numbers")
    boxes = np.clip(boxes, 0, [*size, *size])
    flat = (boxes[:, 2:] <= boxes[:, :2]).any(axis=1)
    boxes[flat, :2] = np.minimum(boxes[flat, :2], np.array(size) - 1)
    boxes[flat, 2:] = boxes[flat, :2] + 1
    return boxes


def read_items(file: Path) -> list[Item]:
    """The items of a jsonl file, which lies beside vcr1images/, in their order.

    ValueError names the line that is cut off, lacks a field, mentions an object that is not there or repeats an id.
    """
    items = []
    with open_task_file(file, "task.folder") as lines:
        for number, line in enumerate(lines, 1):
            with check_format("VCR", file, f"line {number}"):
                items.append(_item(line.decode(), file, number))
    check_unique((item.annot_id for item in items), str(file))
    return items


def _item(line: str, file: Path, number: int) -> Item:
    """The item of a line; ValueError, KeyError or TypeError where it is none."""
    found = parse_json(line, "the line")
    counts = len(found["answer_choices"]), len(found["rationale_choices"])
    if set(counts) != {CHOICES}:
        raise ValueError(f"it has {counts} choices")
    labels = tuple(found[name] for name in _LABELS if name in found)
    if labels and (len(labels) < 2 or not all(type(i) is int and 0 <= i < CHOICES for i in labels)):
        raise ValueError(
            f"answer_label is {found.get('answer_label')} and rationale_label {found.get('rationale_label')}"
        )
    wordless = None
    for name, text in _texts(found):
        if not isinstance(text, list):
            raise ValueError(f"{name} is no list of words and objects")
        mentioned = [i for token in text if not isinstance(token, str) for i in token]
        beyond = [i for i in mentioned if type(i) is not int or not 0 <= i < len(found["objects"])]
        if beyond:
            raise ValueError(f"its {name} mentions object {beyond[0]} of {len(found['objects'])}")
        if not any(_has_words(token) if isinstance(token, str) else token for token in text):
            wordless = name
    metadata = Path(found["metadata_fn"])
    if metadata.is_absolute() or ".." in metadata.parts:
        raise ValueError(f"its metadata_fn, {metadata}, is not below vcr1images")
    if not isinstance(found["annot_id"], str | int):
        raise ValueError(f"its annot_id is {found['annot_id']!r}")
    image, metadata = Path(found["img_fn"]).name, file.parent / "vcr1images" / metadata
    return Item(line, file, number, str(found["annot_id"]), image, metadata, labels or None, wordless)


def _has_words(text: str) -> bool:
    return any(letter.isprintable() and not letter.isspace() for letter in text)


def _texts(item: dict) -> Iterator[tuple[str, Text]]:
    yield "question", item["question"]
    for name in ("answer_choices", "rationale_choices"):
        yield from ((f"{name}[{i}]", text) for i, text in enumerate(item[name]))


def submission(folder: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The leaderboard's csv: a line an item, in the order of the jsonl file; numbers are read back exactly.

    A row has the `split` and `annot_id` of an item, and the `probabilities` of its four answers or, where it is
    `conditioned_on` an answer (else -1), of that answer's rationales. ValueError where an item of the split lacks some.
    """
    given = {(row["annot_id"], row["conditioned_on"]): row["probabilities"] for row in rows}
    check_unique([(row["annot_id"], row["conditioned_on"]) for row in rows], "the predictions")
    splits = sorted({row["split"] for row in rows})
    items = [item.annot_id for split in splits for item in read_items(folder / f"{split}.jsonl")]
    check_ids({item for item, _ in given}, items, "the predictions", ", ".join(splits))
    missing = [(item, answer) for item in items for answer in range(-1, CHOICES) if (item, answer) not in given]
    if missing:
        lack = {"answers" if answer < 0 else "rationales" for _, answer in missing}
        raise ValueError(
            f"{len({item for item, _ in missing})} of {len(items)} items, such as {missing[0][0]}, lack probabilities "
            f"of {' and '.join(sorted(lack))}; the leaderboard wants answers, and rationales behind every answer of a "
            "split without labels: evaluate both runs at once, CHECKPOINT,CHECKPOINT"
        )
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for item in items:
        numbers = np.array([given[item, answer] for answer in range(-1, CHOICES)], np.float64)
        if (numbers < 0).any() or not np.allclose(numbers.sum(axis=1), 1, rtol=0, atol=1e-3):
            raise ValueError(f"{item}: its numbers are no probabilities, whose sum is 1: {numbers.tolist()}")
        table.writerow([item, *map(repr, numbers.ravel().tolist())])
    return text.getvalue().encode()


def ranked(probabilities: Sequence[float]) -> list[int]:
    """Return the choices, the likeliest first. Of equals the first leads, as in the official score."""
    return sorted(range(CHOICES), key=lambda choice: -probabilities[choice])


def metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Q->A, QA->R (for the right answer) and, of the items with both, Q->AR; beside them the accuracy of guessing.

    A row has the `annot_id` of its item, its `subtask`, "answer" or "rationale", and a `score` of 0 or 1; None where
    the right choice is unknown: without labels, and of rationales for wrong answers.
    """
    scores = {"answer": {}, "rationale": {}}
    for row in rows:
        if row["score"] is not None:
            scores[row["subtask"]][row["annot_id"]] = row["score"]
    found = {f"{kind}_accuracy": float(np.mean([*of.values()])) for kind, of in scores.items() if of}
    if found:
        found["chance"] = 1 / CHOICES
    answers, rationales = scores.values()
    both = [one for one in answers if one in rationales]
    if both:
        found["joint_accuracy"] = float(np.mean([answers[one] * rationales[one] for one in both]))
        found["joint_chance"] = CHOICES**-2
    return found
