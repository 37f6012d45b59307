"""The files, metrics and submission file of VCR. Error messages name the file and line, and say what to do."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
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
OBJECTS = _OBJECTS.split()  # COCO's classes, spelled as in VCR and in the order of COCO's ids; the first is class 1
CLASSES = 1 + len(OBJECTS)  # class 0 is the whole image

Text = Sequence[str | Sequence[int]]  # words, and mentions: lists of object numbers, from 0

_LABELS = ("answer_label", "rationale_label")
_GROUPS = ["answer_{}", *(f"rationale_conditioned_on_a{answer}_{{}}" for answer in range(CHOICES))]
# The columns of the leaderboard's file.
COLUMNS = ["annot_id", *(group.format(choice) for group in _GROUPS for choice in range(CHOICES))]


@dataclass(frozen=True, slots=True)
class Item:
    """A checked line of a jsonl file: a question about an image, with four answers and four rationales."""

    line: str  # not parsed, because parsed lines take gigabytes in each loading process
    file: Path
    number: int  # line number, from 1
    annot_id: str
    image: str  # file name
    metadata: Path | None  # None for a user's question, which is about the regions of a sample
    labels: tuple[int, int] | None  # the right answer and the right rationale; None if the file does not have them
    wordless: str | None  # name of a field without words, such as "answer_choices[2]", or None

    @property
    def location(self) -> str:
        return f"{self.file} line {self.number}"


@dataclass(frozen=True, eq=False)
class Scene:
    """The annotated objects of an image. Texts mention an object by its index in these lists."""

    size: tuple[int, int]  # width, height of the image in the pixels of `boxes`
    names: list[str]  # class of each object
    classes: list[int]  # number of that class, from 1
    boxes: np.ndarray  # float [r, 4] x1 y1 x2 y2 in pixels, inside the image
    polygons: list[list[np.ndarray]] | None  # polygons [corners, 2] of each object; None: objects fill their boxes

    def masks(self, side: int) -> np.ndarray:
        """Return the instance masks of all objects, float32 [r, side, side] (see `instance_mask`)."""
        if self.polygons is None:
            return np.ones((len(self.boxes), side, side), np.float32)
        masks = [instance_mask(*pair, side) for pair in zip(self.polygons, self.boxes, strict=True)]
        return np.array(masks, np.float32).reshape(-1, side, side)


def instance_mask(polygons: Sequence[np.ndarray], box: np.ndarray, side: int) -> np.ndarray:
    """Return a mask of the grid cells of a box that the object's polygons cover: float32 [side, side], 0 or 1.

    Polygons are [corners, 2]. The mask is the same as in the published code, which used `polygon` of scikit-image 0.16.
    An object without polygons covers no cell. The box includes the pixels at x2 and y2. A cell is covered if its upper
    left corner is covered, and polygon corners outside the grid are moved to its edge. The last row and column are not
    covered: a polygon over the whole box covers 169 of 14 x 14 cells (196 in version 0.26).
    """
    row, column = np.indices((side, side)).reshape(2, -1, 1)
    inside = np.zeros(side * side, bool)
    for polygon in polygons:  # a point is inside if a ray to its right meets an odd number of edges
        corners = np.clip((polygon - box[:2]) * side / (box[2:] - box[:2] + 1), 0, side - 1)
        (ax, ay), (bx, by) = corners.T, np.roll(corners, -1, axis=0).T
        meets = (ay > row) != (by > row)  # (cells, edges)
        rise = np.where(by == ay, 1, by - ay)  # horizontal edges meet no ray
        inside |= (meets & (column < ax + (row - ay) * (bx - ax) / rise)).sum(axis=1) % 2 == 1
    return inside.reshape(side, side).astype(np.float32)


def read_scene(file: Path) -> Scene:
    """Read an image's metadata file. Raises ValueError if it is truncated or inconsistent."""
    metadata = read_json(file, "task.folder")
    with check_format("VCR", file, "its objects"):
        names, size = metadata["names"], (metadata["width"], metadata["height"])
        unknown = set(names) - set(OBJECTS)
        if unknown:
            raise ValueError(f"it has an object of the unknown class {min(unknown)}")
        if not all(1 <= side < math.inf for side in size):
            raise ValueError(f"its image is {size[0]} x {size[1]} pixels")
        classes = [1 + OBJECTS.index(name) for name in names]
        boxes = np.array([box[:4] for box in metadata["boxes"]], np.float64).reshape(-1, 4)
        polygons = [[_parse_polygon(polygon) for polygon in parts if len(polygon)] for parts in metadata["segms"]]
        if not len(names) == len(boxes) == len(polygons):
            raise ValueError(f"it has {len(names)} names, {len(boxes)} boxes and {len(polygons)} segms")
        boxes = _clip_boxes(boxes, size)
    return Scene(size, names, classes, boxes, polygons)


def _parse_polygon(polygon: Sequence) -> np.ndarray:
    corners = np.array(polygon, np.float64)
    if corners.ndim != 2 or corners.shape[1] != 2 or not np.isfinite(corners).all():
        raise ValueError(f"a polygon is not a list of finite x, y: {str(polygon)[:60]}")
    return corners


def _clip_boxes(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Clip boxes [r, 4] to an image of `size` (width, height). A box with no area in the image becomes one pixel."""
    if not np.isfinite(boxes).all():
        raise ValueError("a box has numbers that are not finite")
    boxes = np.clip(boxes, 0, [*size, *size])
    flat = (boxes[:, 2:] <= boxes[:, :2]).any(axis=1)
    boxes[flat, :2] = np.minimum(boxes[flat, :2], np.array(size) - 1)
    boxes[flat, 2:] = boxes[flat, :2] + 1
    return boxes


def read_items(file: Path) -> list[Item]:
    """Read the items of a jsonl file, which must be in the same folder as vcr1images/.

    Raises ValueError if a line is truncated, lacks a field or mentions a missing object, or if an annot_id is repeated.
    """
    items = []
    with open_task_file(file, "task.folder") as lines:
        for number, line in enumerate(lines, 1):
            with check_format("VCR", file, f"line {number}"):
                items.append(_parse_item(line.decode(), file, number))
    check_unique((item.annot_id for item in items), str(file))
    return items


def _parse_item(line: str, file: Path, number: int) -> Item:
    """Parse and check a line of a jsonl file. Raises ValueError, KeyError or TypeError if it is not valid."""
    item = parse_json(line, "the line")
    counts = len(item["answer_choices"]), len(item["rationale_choices"])
    if set(counts) != {CHOICES}:
        raise ValueError(f"it has {counts} choices")
    labels = tuple(item[name] for name in _LABELS if name in item)
    if labels and (len(labels) < 2 or not all(type(i) is int and 0 <= i < CHOICES for i in labels)):
        raise ValueError(f"answer_label is {item.get('answer_label')}, rationale_label {item.get('rationale_label')}")
    wordless = None
    texts = {"question": item["question"]}
    for name in ("answer_choices", "rationale_choices"):
        texts |= {f"{name}[{i}]": text for i, text in enumerate(item[name])}
    for name, text in texts.items():
        if not isinstance(text, list):
            raise ValueError(f"{name} is not a list of words and objects")
        mentioned = [i for token in text if not isinstance(token, str) for i in token]
        beyond = [i for i in mentioned if type(i) is not int or not 0 <= i < len(item["objects"])]
        if beyond:
            raise ValueError(f"its {name} mentions object {beyond[0]} of {len(item['objects'])}")
        if not any(_has_words(token) if isinstance(token, str) else token for token in text):
            wordless = name
    metadata = Path(item["metadata_fn"])
    if metadata.is_absolute() or ".." in metadata.parts:
        raise ValueError(f"its metadata_fn, {metadata}, is not inside vcr1images")
    if not isinstance(item["annot_id"], str | int):
        raise ValueError(f"its annot_id is {item['annot_id']!r}")
    image, metadata = Path(item["img_fn"]).name, file.parent / "vcr1images" / metadata
    return Item(line, file, number, str(item["annot_id"]), image, metadata, labels or None, wordless)


def _has_words(text: str) -> bool:
    return any(letter.isprintable() and not letter.isspace() for letter in text)


def submission(folder: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the leaderboard's CSV file, with one line of unrounded probabilities per item.

    Items are in the order of the jsonl file. A row has `split`, `annot_id`, `conditioned_on` and `probabilities`. If
    `conditioned_on` is -1, the probabilities are those of the answers. Otherwise, they are those of the rationales
    for the answer with this index. Raises ValueError unless each item of the splits has five rows, for -1 to 3.
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
            f"of {' and '.join(sorted(lack))}; the leaderboard needs answers, and rationales for each answer of a "
            "split without labels: evaluate both runs at once, CHECKPOINT,CHECKPOINT"
        )
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for item in items:
        probabilities = np.array([given[item, answer] for answer in range(-1, CHOICES)], np.float64)
        if (probabilities < 0).any() or not np.allclose(probabilities.sum(axis=1), 1, rtol=0, atol=1e-3):
            raise ValueError(f"{item}: its numbers are not probabilities, which add up to 1: {probabilities.tolist()}")
        table.writerow([item, *map(repr, probabilities.ravel().tolist())])
    return text.getvalue().encode()


def ranked(probabilities: Sequence[float]) -> list[int]:
    """Return the indices of the choices, most probable first. Ties keep their order, as in the official score."""
    return sorted(range(CHOICES), key=lambda choice: -probabilities[choice])


def metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the accuracies of Q->A, QA->R and Q->AR, and those of random guesses.

    A row has an item's `annot_id`, a `subtask` ("answer" or "rationale") and a `score` of 0 or 1. The score is None if
    the item has no labels, or if the rationales are for a wrong answer. Rows without a score are not counted. Q->AR is
    over items with scores for both subtasks.
    """
    scores = {"answer": {}, "rationale": {}}
    for row in rows:
        if row["score"] is not None:
            scores[row["subtask"]][row["annot_id"]] = row["score"]
    metrics = {f"{kind}_accuracy": float(np.mean([*known.values()])) for kind, known in scores.items() if known}
    if metrics:
        metrics["chance"] = 1 / CHOICES
    answers, rationales = scores.values()
    both = [item for item in answers if item in rationales]
    if both:
        metrics["joint_accuracy"] = float(np.mean([answers[item] * rationales[item] for item in both]))
        metrics["joint_chance"] = CHOICES**-2
    return metrics
