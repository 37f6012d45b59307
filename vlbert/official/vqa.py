"""VQA 2.0's official files, read as the data set ships them. A ValueError names the file, the place in it and the way
out."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from vlbert.official import read_json

UNKNOWN = "<unk>"  # a line of some answer lists: stands for all other answers, and is never right
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


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
