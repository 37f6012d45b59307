"""The official files of VQA 2.0 and VCR, read as the data sets ship them. A ValueError names the file, the place in it
and the way out."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

if TYPE_CHECKING:
    from vlbert.data import Samples

UNKNOWN = "<unk>"  # a line of some answer lists: stands for all other answers, and is never right
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'

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
class Question:
    """One question with what the annotators said, and the file name of its picture."""

    question_id: int
    text: str
    image: str
    answers: tuple[str, ...]


def without_punctuation(text: str) -> str:
    """As the official evaluation has it: a mark goes where one like it stands beside a blank, or where any comma parts
    two digits; else it becomes a blank. Periods stay before digits alone."""
    found = text
    for mark in _PUNCTUATION:
        goes = f"{mark} " in text or f" {mark}" in text or re.search(r"\d,\d", text)
        found = found.replace(mark, "" if goes else " ")
    return re.sub(r"\.(?!\d)", "", found, count=32)  # the official code passes a flag, 32, as the count


def read_answers(file: Path) -> list[str]:
    """The answers of a text file, one a line, in lower case and without punctuation as the authors take them."""
    if not file.is_file():
        raise ValueError(f"there is no answer list {file}; put it there, one answer a line, or set task.answer_list")
    lines = [line.lower().strip() for line in file.read_text(encoding="utf-8").split("\n")]
    lines = lines[:-1] if lines[-1] == "" else lines  # behind the last line's end
    return [line if line == UNKNOWN else without_punctuation(line) for line in lines]


def question_files(split: str) -> tuple[str, str]:
    """Names of the files with the questions of a split, and with what the annotators said."""
    return f"v2_OpenEnded_mscoco_{split}_questions.json", f"v2_mscoco_{split}_annotations.json"


def read_questions(folder: Path, split: str) -> list[Question]:
    """The questions of a split with their annotations, in the order of the questions file."""
    asked_in, answered_in = (folder / name for name in question_files(split))
    asked, answered = (read_json(file, "task.folder, or the splits") for file in (asked_in, answered_in))
    try:
        answers = {
            row["question_id"]: tuple(sys.intern(given["answer"]) for given in row["answers"])
            for row in answered["annotations"]
        }
        picture = f"COCO_{asked['data_subtype']}_{{:012d}}.jpg".format
        questions = [
            Question(row["question_id"], row["question"], picture(row["image_id"]), answers.get(row["question_id"], ()))
            for row in asked["questions"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{asked_in} or {answered_in.name} is not in VQA 2.0's format: {error!r}; fetch them again"
        ) from error
    without = [question.question_id for question in questions if not question.answers]
    without += answers.keys() - {question.question_id for question in questions}
    if without:
        raise ValueError(
            f"{asked_in} and {answered_in.name} do not fit: {len(without)} stand in one alone or have no answer, such "
            f"as question {without[0]}; both must be of the same split"
        )
    return questions


def read_json(file: Path, settings: str) -> Any:
    """What a JSON file holds; ValueError names it, and the `settings` that it was found by, where it cannot be read."""
    if not file.is_file():
        raise ValueError(f"there is no {file}; fetch it, or set {settings}")
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON, or is torn: {error}; fetch it again") from error


def find_samples(samples: "Samples", images: Sequence[str], whose: str) -> np.ndarray:
    """int64: the number of the sample of each image, by the file name at the end of its URL."""
    number = {Path(unquote(urlsplit(url).path)).name: i for i, url in enumerate(samples.urls)}
    missing = sorted(set(images) - number.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(set(images))} images of {whose} are in no region shard, such as {missing[0]}; "
            "collect and detect them first"
        )
    return np.array([number[image] for image in images], np.int64)


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
