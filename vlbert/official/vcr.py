"""VCR's official files, read as the data set ships them. A ValueError names the file, the place in it and the way
out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlbert.official import read_json

CHOICES = 4
_OBJECTS = (
    "person bicycle car motorcycle airplane bus train truck boat trafficlight firehydrant stopsign parkingmeter bench "
    "bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee skis "
    "snowboard sportsball kite baseballbat baseballglove skateboard surfboard tennisracket bottle wineglass cup fork "
    "knife spoon bowl banana apple sandwich orange broccoli carrot hotdog pizza donut cake chair couch pottedplant bed "
    "diningtable toilet tv laptop mouse remote keyboard cellphone microwave oven toaster sink refrigerator book clock "
    "vase scissors teddybear hairdrier toothbrush"
)
OBJECTS = _OBJECTS.split()  # COCO's classes as VCR writes them, in the order of COCO's ids: class 1 and on
CLASSES = 1 + len(OBJECTS)  # class 0 is none of them: that of the whole image


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the jsonl files, checked, as text: parsed, all of train takes gigabytes in every loading process."""

    line: str
    where: str
    image: str  # file name
    metadata: Path
    held_out: bool


@dataclass(frozen=True, eq=False)
class Scene:
    """The metadata of a picture: its annotated objects, in the order in which texts number them."""

    size: tuple[int, int]  # width, height of the picture that the data set ships
    names: list[str]  # the class of each object
    classes: list[int]  # the same, 1 and on
    boxes: np.ndarray  # float [r, 4] x1 y1 x2 y2 in its pixels
    polygons: list[list[np.ndarray]]  # of each object, [corners, 2] each


def instance_mask(polygons: Sequence[np.ndarray], box: np.ndarray, side: int) -> np.ndarray:
    """float32 [side, side]: 1 in the cells of a box that one of its object's polygons [corners, 2] covers.

    As the authors' figures have it: x2 and y2 belong to the box, a cell is covered where its upper left corner is, and
    what lies beyond the corners of the last cells moves onto them. An object without a polygon fills its box.
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
    """The metadata of one picture; ValueError names the file where it is torn or does not fit together."""
    found = read_json(file, "task.folder")
    try:
        names, size = found["names"], (found["width"], found["height"])
        unknown = set(names) - set(OBJECTS)
        if unknown:
            raise ValueError(f"it has an object of class {min(unknown)}")
        classes = [1 + OBJECTS.index(name) for name in names]
        boxes = np.array(found["boxes"], np.float64).reshape(len(names), -1)[:, :4]
        polygons = [[np.array(polygon, np.float64).reshape(-1, 2) for polygon in of] for of in found["segms"]]
        if len(polygons) != len(names):
            raise ValueError(f"it has {len(names)} names and {len(polygons)} segms")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not in the format of VCR's metadata: {error!r}; fetch vcr1images again") from error
    return Scene(size, names, classes, boxes, polygons)


def read_items(folder: Path, split: str, held_out: bool) -> list[Item]:
    """The items of <split>.jsonl; ValueError names the line that is torn, lacks a field or mentions what is not."""
    file = folder / f"{split}.jsonl"
    if not file.is_file():
        raise ValueError(f"there is no {file}; set task.folder to the VCR folder that holds it")
    items = []
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file} line {number}"
            try:
                image, metadata = _checked(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{where} is no item of VCR: {error!r}; fetch the file again") from error
            items.append(Item(line, where, Path(image).name, folder / "vcr1images" / metadata, held_out))
    return items


def _checked(item: dict) -> tuple[str, str]:
    """The names of the files of the picture and its metadata; an error where the item cannot be asked."""
    texts = [item["question"], *item["answer_choices"], *item["rationale_choices"]]
    counts = len(item["answer_choices"]), len(item["rationale_choices"])
    if set(counts) != {CHOICES} or not {item["answer_label"], item["rationale_label"]} <= set(range(CHOICES)):
        raise ValueError(f"{counts} choices, of which {item['answer_label']} and {item['rationale_label']} are right")
    beyond = [i for text in texts for token in text if not isinstance(token, str) for i in token]
    if beyond and not 0 <= min(beyond) <= max(beyond) < len(item["objects"]):
        raise ValueError(f"it mentions object {max(beyond)} of {len(item['objects'])}")
    item["annot_id"]
    return item["img_fn"], item["metadata_fn"]
