"""VQA's files over a few samples."""

import dataclasses
import json
from pathlib import Path

from tiny import TINY_MODEL

from storage.sample import sample_key
from vlbert.data.vocabulary import SPECIALS, Vocabulary

ANNOTATORS = {  # the ten answers to each question
    10: ["left"] * 4 + ["right"] * 3 + ["on the left"] * 2 + ["yes"],
    11: ["no"] * 9 + ["<unk>"],
    20: ["yes"] * 10,
    30: ["nobody knows"] * 10,
}
WORDS = Vocabulary([*SPECIALS, "is", "it", "on", "the", "left", "right", "?", "yes", "no", "of", "##s"])
ROOM = TINY_MODEL.max_positions - 6  # for a question
ANSWERS = ["<unk>", "yes", "no", "left", "right", "on the left"]


def write_vqa(folder: Path, split: str, given: dict[int, list[str]], texts: dict[int, str] | None = None) -> None:
    """Questions and annotations of a split in the official format; question 10 * i + k is about image i."""
    texts = {i: f"Is it on the left, {i}?" for i in given} | (texts or {})
    questions = [{"image_id": i // 10, "question_id": i, "question": texts[i]} for i in given]
    annotations = [
        {
            "image_id": i // 10,
            "question_id": i,
            "question_type": "is it",
            "answer_type": "yes/no" if set(answers) & {"yes", "no"} else "other",
            "multiple_choice_answer": max(answers, key=answers.count),
            "answers": [{"answer": a, "answer_confidence": "yes", "answer_id": 1 + k} for k, a in enumerate(answers)],
        }
        for i, answers in reversed(given.items())  # the files need not be in one order
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"v2_OpenEnded_mscoco_{split}_questions.json").write_text(
        json.dumps({"data_subtype": split, "questions": questions})
    )
    (folder / f"v2_mscoco_{split}_annotations.json").write_text(json.dumps({"annotations": annotations}))


def coco(samples: list, split: str) -> list:
    """The samples, named as COCO's images: sample i is image i."""
    urls = [f"http://images.example.org/{split}/COCO_{split}_{i:012d}.jpg" for i in range(len(samples))]
    return [
        dataclasses.replace(sample, url=url, key=sample_key(url, sample.caption))
        for sample, url in zip(samples, urls, strict=True)
    ]
