"""The files of RefCOCO+, VQA 2.0, VCR and of Karpathy's captions about drawn images, as each data set ships its own:
name -> bytes.
"""

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from demo import questions
from demo.scenes import HEIGHT, RING_HOLE, SHAPE_SCALE, WIDTH, Scene, SceneObject, outline
from demo.sentences import caption
from vlbert.datasets.refcoco import FILES as REFCOCO_NAMES
from vlbert.datasets.retrieval import CAPTIONS
from vlbert.datasets.vqa import frequent_answers, question_files

SPLITS = ("train", "val", "testA", "testB")  # RefCOCO+'s, of the images; the two others call the last two `test`
# The part of COCO that an image of each split would be of; VQA's splits have these names.
PARTS = {"train": "train2014", "val": "val2014", "testA": "test2015", "testB": "test2015"}
ANSWERS = "answers_vqa.txt"
SPLITS_OF_OTHERS = {"train": "train", "val": "val", "testA": "test", "testB": "test"}  # VCR's and retrieval's
VCR_MOVIE = "drawn_world"  # the folder in vcr1images
VCR_OBJECT = "kite"  # what every shape is to VCR, whose objects have COCO's classes: kites come in all shapes
ITEMS = 2  # of VCR about an image, each about another object
RETRIEVAL_FILE = "dataset_demo.json"


@dataclass(frozen=True)
class TaskImage:
    """An image that tasks ask about.

    annotations  of the COCO file, in the order of the scene's objects
    expressions  of RefCOCO+: number of an object -> the words that mean it
    """

    number: int
    split: str
    scene: Scene
    annotations: list[dict]
    expressions: dict[int, str]

    @property
    def file_name(self) -> str:
        return task_image_name(self.number, self.split)


def task_image_name(number: int, split: str) -> str:
    return f"COCO_{PARTS[split]}_{number:012d}.jpg"


# --- RefCOCO+ ---------------------------------------------------------------------------------------------------------


def refcoco_files(coco: dict, images: Sequence[TaskImage]) -> dict[str, bytes]:
    """refs(unc).p is Python 2's pickle protocol 0, as published."""
    refs = []
    meant = [(image, *reference) for image in images for reference in image.expressions.items()]
    for ref_id, (image, target, words) in enumerate(meant):
        annotation = image.annotations[target]
        refs.append(
            {
                "sent_ids": [ref_id],
                "file_name": f"{image.file_name.removesuffix('.jpg')}_{ref_id}.jpg",
                "ann_id": annotation["id"],
                "ref_id": ref_id,
                "image_id": image.number,
                "split": image.split,
                "sentences": [{"tokens": words.split(), "raw": words, "sent_id": ref_id, "sent": words}],
                "category_id": annotation["category_id"],
            }
        )
    return dict(zip(REFCOCO_NAMES, (pickle.dumps(refs, protocol=0), _json(coco)), strict=True))


# --- VQA 2.0 ----------------------------------------------------------------------------------------------------------


def vqa_files(images: Sequence[TaskImage], seed: Sequence[int]) -> dict[str, bytes]:
    """Questions of all splits, ten answers to each where it is not of a test, and the list of answers to choose from.

    seed: of the random choices.
    """
    unanswered = {part: [] for part in PARTS.values()}
    answered = {part: [] for part in PARTS.values()}
    for image in images:
        rng = np.random.default_rng([*seed, image.number])
        appearances, part = [thing.appearance for thing in image.scene.objects], PARTS[image.split]
        for number, question in enumerate(questions.questions(rng, appearances)):
            ids = {"image_id": image.number, "question_id": image.number * 1000 + number}
            given = questions.annotated(rng, question)
            unanswered[part].append(ids | {"question": question.text})
            answered[part].append(
                ids
                | {
                    "question_type": question.question_type,
                    "answer_type": question.answer_type,
                    "multiple_choice_answer": question.answer,
                    "answers": [
                        {"answer": answer, "answer_confidence": "yes", "answer_id": i}
                        for i, answer in enumerate(given, 1)
                    ],
                }
            )
    files = {}
    for part in unanswered:
        metadata = {
            "info": {"description": "Questions about drawn scenes", "version": "2.0"},
            "license": {},
            "data_type": "mscoco",
            "data_subtype": part,
        }
        contents = ({"task_type": "Open-Ended", "questions": unanswered[part]}, {"annotations": answered[part]})
        files |= {name: _json(metadata | what) for name, what in zip(question_files(part), contents, strict=False)}
    answers = frequent_answers([*answered["train2014"], *answered["val2014"]])
    return files | {ANSWERS: "".join(f"{answer}\n" for answer in answers).encode()}


# --- VCR --------------------------------------------------------------------------------------------------------------


def _metadata_name(file_name: str) -> str:
    return f"{VCR_MOVIE}/{file_name.removesuffix('.jpg')}.json"


def vcr_files(images: Sequence[TaskImage], seed: Sequence[int]) -> dict[str, bytes]:
    """Items of all splits, those of the test without labels, and the metadata of all images."""
    lines, files = {split: [] for split in SPLITS_OF_OTHERS.values()}, {}
    for image in images:
        things, split = image.scene.objects, SPLITS_OF_OTHERS[image.split]
        files[f"vcr1images/{_metadata_name(image.file_name)}"] = _json(_metadata(image))
        rng = np.random.default_rng([*seed, image.number])
        for number, item in enumerate(questions.items(rng, [thing.appearance for thing in things], ITEMS)):
            line = {
                "movie": VCR_MOVIE,
                "objects": [VCR_OBJECT] * len(things),
                "img_fn": f"{VCR_MOVIE}/{image.file_name}",
                "metadata_fn": _metadata_name(image.file_name),
                "question": item.question,
                "answer_choices": item.answers,
                "rationale_choices": item.rationales,
                "img_id": f"{split}-{image.number}",
                "question_number": number,
                "annot_id": f"{split}-{len(lines[split])}",
            }
            if split != "test":
                line |= {"answer_label": item.answer, "rationale_label": item.rationale}
            lines[split].append(json.dumps(line) + "\n")
    return {f"{split}.jsonl": "".join(lines[split]).encode() for split in lines} | files


def _metadata(image: TaskImage) -> dict:
    """Boxes x1 y1 x2 y2 and how sure one is of them, and the outlines of the objects, whole where one hides another."""
    boxes = []
    for annotation in image.annotations:
        x, y, width, height = annotation["bbox"]
        boxes.append([x, y, x + width, y + height, 1.0])
    return {
        "boxes": boxes,
        "segms": [[_polygon(thing)] for thing in image.scene.objects],
        "names": [VCR_OBJECT] * len(boxes),
        "width": WIDTH,
        "height": HEIGHT,
    }


def _polygon(thing: SceneObject) -> list[list[float]]:
    """Corners in pixels; a ring's go round outside, then round inside."""
    size, (cos, sin) = thing.radius * SHAPE_SCALE[thing.appearance.shape], (math.cos(thing.turn), math.sin(thing.turn))

    def around(scale: float) -> list[list[float]]:
        corners = [(x * cos - y * sin, x * sin + y * cos) for x, y in outline(thing.appearance.shape)]
        corners = [(thing.x + scale * x, thing.y + scale * y) for x, y in [*corners, corners[0]]]
        return [[round(min(max(x, 0), WIDTH), 1), round(min(max(y, 0), HEIGHT), 1)] for x, y in corners]

    return around(size) + (around(RING_HOLE * size) if thing.appearance.shape == "ring" else [])


# --- retrieval --------------------------------------------------------------------------------------------------------


def retrieval_files(images: Sequence[TaskImage], seed: Sequence[int]) -> dict[str, bytes]:
    """Five different captions of each image, each of which names all of its objects."""
    described = []
    for number, image in enumerate(images):
        rng, texts = np.random.default_rng([*seed, image.number]), {}
        while len(texts) < CAPTIONS:
            texts[caption(rng, image.scene)] = None
        ids = range(CAPTIONS * number, CAPTIONS * (number + 1))
        sentences = [
            {"tokens": text.split(), "raw": text, "imgid": number, "sentid": sentence}
            for sentence, text in zip(ids, texts, strict=True)
        ]
        described.append(
            {
                "sentids": list(ids),
                "imgid": number,
                "sentences": sentences,
                "split": SPLITS_OF_OTHERS[image.split],
                "filename": image.file_name,
            }
        )
    return {RETRIEVAL_FILE: _json({"images": described, "dataset": "demo"})}


def _json(value: dict) -> bytes:
    return json.dumps(value).encode()
