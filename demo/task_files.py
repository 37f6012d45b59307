"""Make annotation files for drawn images in the official formats of RefCOCO+, VQA 2.0, VCR and Karpathy's captions.

The public functions return file contents as a dict: file name -> bytes.
"""

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from demo import questions
from demo.scenes import HEIGHT, RING_HOLE, SHAPE_SCALE, WIDTH, Scene, SceneObject, outline
from demo.sentences import make_caption
from vlbert.datasets.refcoco import INSTANCES, REFS
from vlbert.datasets.retrieval import CAPTIONS
from vlbert.datasets.vqa import frequent_answers, question_files

SPLITS = ("train", "val", "testA")  # of the images, named as in RefCOCO+
# Split -> VQA's split, which is in the names of images. VQA's own test splits have no answers.
PARTS = {"train": "train2014", "val": "val2014", "testA": "eval2014"}
ANSWERS = "answers_vqa.txt"
OTHER_SPLITS = {"train": "train", "val": "val", "testA": "test"}  # names in VCR and retrieval
RETRIEVAL_IMAGES = 200  # at most in a split for evaluation, because all captions are paired with all images
VCR_MOVIE = "drawn_world"  # folder in vcr1images
VCR_OBJECT = "kite"  # class of every object: VCR's objects have COCO's classes, and kites come in all shapes
ITEMS = 2  # VCR items per image, each about a different object
RETRIEVAL_FILE = "dataset_demo.json"
REFCOCO_NAMES = (REFS[0], INSTANCES)


@dataclass(frozen=True)
class TaskImage:
    """An image that all tasks use, with its RefCOCO+ annotations."""

    number: int
    split: str
    scene: Scene
    annotations: list[dict]  # from the COCO file, in the order of the scene's objects
    expressions: dict[int, str]  # RefCOCO+ expressions, by the object's index

    @property
    def file_name(self) -> str:
        return task_image_name(self.number, self.split)


def task_image_name(number: int, split: str) -> str:
    return f"COCO_{PARTS[split]}_{number:012d}.jpg"


# --- RefCOCO+ ---------------------------------------------------------------------------------------------------------


def refcoco_files(coco: dict, images: Sequence[TaskImage], labels: int | None = None) -> dict[str, bytes]:
    """Make refs(unc).p, in Python 2's pickle protocol 0 as published, and instances.json.

    If `labels` is given, only so many expressions are there to train on.
    """
    refs = []
    references = [(image, *reference) for image in images for reference in image.expressions.items()]
    for ref_id, (image, target, words) in enumerate(references):
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
    trained_on = _sample([ref for ref in refs if ref["split"] == "train"], labels)
    refs = trained_on + [ref for ref in refs if ref["split"] != "train"]
    return dict(zip(REFCOCO_NAMES, (pickle.dumps(refs, protocol=0), _json(coco)), strict=True))


def _sample(entries: list[dict], labels: int | None) -> list[dict]:
    """Return `labels` of the entries, in order, or all if it is None. More labels contain those of fewer."""
    chosen = np.random.default_rng(0).permutation(len(entries))[:labels]
    return [entries[number] for number in sorted(chosen.tolist())]


# --- VQA 2.0 ----------------------------------------------------------------------------------------------------------


def vqa_files(images: Sequence[TaskImage], seed: Sequence[int], labels: int | None = None) -> dict[str, bytes]:
    """Make the questions of all splits, ten answers to each question, and the answer list.

    If `labels` is given, only so many questions are there to train on. The answer list is that of all questions.
    """
    unanswered = {part: [] for part in PARTS.values()}
    answered = {part: [] for part in PARTS.values()}
    for image in images:
        rng = np.random.default_rng([*seed, image.number])
        appearances, part = [obj.appearance for obj in image.scene.objects], PARTS[image.split]
        for number, question in enumerate(questions.make_questions(rng, appearances)):
            ids = {"image_id": image.number, "question_id": image.number * 1000 + number}
            answers = questions.sample_answers(rng, question)
            unanswered[part].append(ids | {"question": question.text})
            answered[part].append(
                ids
                | {
                    "question_type": question.question_type,
                    "answer_type": question.answer_type,
                    "multiple_choice_answer": question.answer,
                    "answers": [
                        {"answer": answer, "answer_confidence": "yes", "answer_id": i}
                        for i, answer in enumerate(answers, 1)
                    ],
                }
            )
    candidates = frequent_answers([*answered["train2014"], *answered["val2014"]])
    for entries in (unanswered, answered):
        entries["train2014"] = _sample(entries["train2014"], labels)
    files = {}
    for part in unanswered:
        metadata = {
            "info": {"description": "Questions about drawn scenes", "version": "2.0"},
            "license": {},
            "data_type": "mscoco",
            "data_subtype": part,
        }
        contents = ({"task_type": "Open-Ended", "questions": unanswered[part]}, {"annotations": answered[part]})
        files |= {name: _json(metadata | content) for name, content in zip(question_files(part), contents, strict=True)}
    return files | {ANSWERS: "".join(f"{answer}\n" for answer in candidates).encode()}


# --- VCR --------------------------------------------------------------------------------------------------------------


def _metadata_name(file_name: str) -> str:
    return f"{VCR_MOVIE}/{file_name.removesuffix('.jpg')}.json"


def vcr_files(images: Sequence[TaskImage], seed: Sequence[int]) -> dict[str, bytes]:
    """Make the VCR items of all splits, all with labels, and the metadata of all images."""
    lines, files = {split: [] for split in OTHER_SPLITS.values()}, {}
    for image in images:
        objects, split = image.scene.objects, OTHER_SPLITS[image.split]
        files[f"vcr1images/{_metadata_name(image.file_name)}"] = _json(_metadata(image))
        rng = np.random.default_rng([*seed, image.number])
        for number, item in enumerate(questions.make_items(rng, [obj.appearance for obj in objects], ITEMS)):
            line = {
                "movie": VCR_MOVIE,
                "objects": [VCR_OBJECT] * len(objects),
                "img_fn": f"{VCR_MOVIE}/{image.file_name}",
                "metadata_fn": _metadata_name(image.file_name),
                "question": item.question,
                "answer_choices": item.answers,
                "rationale_choices": item.rationales,
                "img_id": f"{split}-{image.number}",
                "question_number": number,
                "annot_id": f"{split}-{len(lines[split])}",
                "answer_label": item.answer,
                "rationale_label": item.rationale,
            }
            lines[split].append(json.dumps(line) + "\n")
    return {f"{split}.jsonl": "".join(lines[split]).encode() for split in lines} | files


def _metadata(image: TaskImage) -> dict:
    """Return an image's VCR metadata: its objects' boxes (x1 y1 x2 y2 score) and outlines, including hidden parts."""
    boxes = []
    for annotation in image.annotations:
        x, y, width, height = annotation["bbox"]
        boxes.append([x, y, x + width, y + height, 1.0])
    return {
        "boxes": boxes,
        "segms": [[_polygon(obj)] for obj in image.scene.objects],
        "names": [VCR_OBJECT] * len(boxes),
        "width": WIDTH,
        "height": HEIGHT,
    }


def _polygon(obj: SceneObject) -> list[list[float]]:
    """Return the object's polygons in pixels: its outer edge and, if it is a ring, its hole."""
    size, (cos, sin) = obj.radius * SHAPE_SCALE[obj.appearance.shape], (math.cos(obj.turn), math.sin(obj.turn))

    def around(scale: float) -> list[list[float]]:
        corners = [(x * cos - y * sin, x * sin + y * cos) for x, y in outline(obj.appearance.shape)]
        corners = [(obj.x + scale * x, obj.y + scale * y) for x, y in [*corners, corners[0]]]
        return [[round(min(max(x, 0), WIDTH), 1), round(min(max(y, 0), HEIGHT), 1)] for x, y in corners]

    return around(size) + (around(RING_HOLE * size) if obj.appearance.shape == "ring" else [])


# --- retrieval --------------------------------------------------------------------------------------------------------


def retrieval_files(images: Sequence[TaskImage], seed: Sequence[int]) -> dict[str, bytes]:
    """Make the caption file, with five different captions per image. Each caption names all objects."""
    entries, by_split = [], {split: [image for image in images if image.split == split] for split in SPLITS}
    used = [*by_split["train"], *by_split["val"][:RETRIEVAL_IMAGES], *by_split["testA"][:RETRIEVAL_IMAGES]]
    for number, image in enumerate(used):
        rng, texts = np.random.default_rng([*seed, image.number]), {}
        while len(texts) < CAPTIONS:
            texts[make_caption(rng, image.scene)] = None
        ids = range(CAPTIONS * number, CAPTIONS * (number + 1))
        sentences = [
            {"tokens": text.split(), "raw": text, "imgid": number, "sentid": sentence}
            for sentence, text in zip(ids, texts, strict=True)
        ]
        entries.append(
            {
                "sentids": list(ids),
                "imgid": number,
                "sentences": sentences,
                "split": OTHER_SPLITS[image.split],
                "filename": image.file_name,
            }
        )
    return {RETRIEVAL_FILE: _json({"images": entries, "dataset": "demo"})}


def _json(value: dict) -> bytes:
    return json.dumps(value).encode()
