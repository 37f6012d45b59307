"""VQA 2.0's official files, accuracy and list of answers. A ValueError names the file, the entry and the remedy.

vlbert vqa-answers FOLDER OUT --splits train2014 val2014      writes the answer list
"""

import functools
import json
import operator
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.programs import Command, Positional
from vlbert.datasets.files import check_ids, parse_entries, read_json, read_text

_KIND, _SETTINGS = "VQA 2.0", "task.folder, or the splits"
UNKNOWN = "<unk>"  # a line of some answer lists: stands for all other answers, and is never right
MIN_QUESTIONS = 9  # with the same answer, for it to be in the answer list
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = dict(none="0", zero="0", one="1", two="2", three="3", four="4", five="5", six="6", seven="7", eight="8")
_NUMBERS |= dict(nine="9", ten="10")
_ARTICLES = {"a", "an", "the"}
# The official table maps a word without one of its apostrophes to the word. Words are in lower case when they are
# looked up, so its entries with a capital I never match.
_APOSTROPHES = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd "
    "he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've "
    "needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've "
    "somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll "
    "that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've "
    "weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll "
    "why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"
)
_CONTRACTIONS = {
    word[:i] + word[i + 1 :]: word for word in _APOSTROPHES.split() for i, letter in enumerate(word) if letter == "'"
} | {"somebody'd": "somebodyd"}  # the table has it the wrong way round


# Table 2 of the paper, official accuracy in %: split -> text. It reports nothing on val2014.
REPORTED = {"test-dev2015": "71.16 base, 71.79 large", "test2015": "72.22 large (test-std)"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the file name of its image and, except in test splits, the annotators' answers."""

    question_id: int
    split: str
    text: str
    image: str
    answers: tuple[str, ...] = ()
    ground_truth: str | None = None  # the answer that the data set chose among them
    answer_type: str | None = None
    question_type: str | None = None

    def columns(self) -> dict[str, Any]:
        """Its columns in a prediction."""
        return {
            "question": self.text,
            "annotator_answers": list(self.answers),
            "question_id": self.question_id,
            "split": self.split,
            "ground_truth": self.ground_truth,
            "answer_type": self.answer_type,
            "question_type": self.question_type,
        }


def without_punctuation(text: str) -> str:
    """As in the official evaluation. A mark is removed where the text has it next to a blank, or has a comma between
    two digits; else it becomes a blank. Periods stay only before digits."""
    found = text
    for mark in _PUNCTUATION:
        removed = f"{mark} " in text or f" {mark}" in text or re.search("[0-9],[0-9]", text)
        found = found.replace(mark, "" if removed else " ")
    return re.sub(r"\.(?![0-9])", "", found, count=32)  # the official code passes a flag, 32, as the count


def without_articles(text: str) -> str:
    """In lower case, with digits for number words, without articles, with the official table's apostrophes."""
    words = (_NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


@functools.lru_cache(maxsize=1 << 16)  # a data set's answers are few
def normalise(answer: str) -> str:
    """An answer as the official evaluation compares it where the annotators' answers differ."""
    return without_articles(without_punctuation(answer))


def accuracy(answer: str, answers: Sequence[str]) -> float:
    """Return the official accuracy of an answer, 0 to 1.

    That is the mean over the annotators of min(1, n / 3), where n of the other annotators gave that answer. Answers are
    normalised only where the annotators' answers differ.
    """
    answer, *answers = (text.replace("\n", " ").replace("\t", " ").strip() for text in (answer, *answers))
    if len(set(answers)) > 1:
        answer, *answers = map(normalise, (answer, *answers))
    agree = answers.count(answer)
    # sum() of newer Pythons rounds less than the official code, which adds one number after the other.
    return functools.reduce(operator.add, (min(1.0, (agree - (text == answer)) / 3) for text in answers)) / len(answers)


def soft_score(count: int, annotators: int) -> float:
    """The accuracy of an answer that `count` of the annotators gave, without normalising. Of ten annotators: 0, 0.3,
    0.6, 0.9, then 1."""
    given, not_given = min(1.0, (count - 1) / 3), min(1.0, count / 3)
    return (count * given + (annotators - count) * not_given) / annotators


def read_answers(file: Path, count: int) -> list[str]:
    """The `count` answers of a text file, one a line, in lower case and without punctuation, as the authors read
    them."""
    text = read_text(file, f"task.answer_list; `vlbert vqa-answers {file.parent} {file}` makes one")
    lines = text.replace("\r\n", "\n").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines  # behind the last line's end
    if len(lines) != count:
        raise ValueError(
            f"{file} holds {len(lines)} answers, task.answers is {count}; set it to the former, or name the other "
            "list: task.answer_list"
        )
    lines = [line.lower().strip() for line in lines]
    return [line if line == UNKNOWN else without_punctuation(line) for line in lines]


def frequent_answers(annotations: Iterable[dict], min_questions: int = MIN_QUESTIONS) -> list[str]:
    """The answer list: the normalised multiple_choice_answers of at least `min_questions` questions, the most frequent
    first, ties in alphabetical order.

    The published lists of 3,129 answers are those of nine questions of train2014 and val2014 together. Soft targets, as
    published, look up the annotators' answers as written: an answer that differs from its normal form is not found.
    """
    counts = Counter(normalise(row["multiple_choice_answer"]) for row in annotations)
    return sorted(
        (answer for answer, count in counts.items() if answer and count >= min_questions),
        key=lambda one: (-counts[one], one),
    )


def question_files(split: str) -> tuple[str, ...]:
    """Names of the files with the questions of a split and, except for test splits, with the annotations."""
    files = f"v2_OpenEnded_mscoco_{split}_questions.json", f"v2_mscoco_{split}_annotations.json"
    return files[:1] if split.startswith("test") else files


def read_annotations(file: Path) -> list[dict]:
    """The annotations, in the order of the file, checked."""
    return parse_entries(read_json(file, _SETTINGS).get("annotations"), "annotations", _KIND, file, _checked)


def _checked(row: dict) -> dict:
    texts = [row["multiple_choice_answer"], *(given["answer"] for given in row["answers"])]
    hash(row["question_id"]), row["answer_type"], row["question_type"]
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError("it has no answers, or one that is no text")
    return row


def submission(folder: Path, rows: Sequence[dict]) -> dict[str, bytes]:
    """The files that the server takes, one a split: rows of question_id and answer, for every question of the split.

    rows: predictions with split, question_id, answer. ValueError where a question of a split has none or two.
    """
    files = {}
    for split in sorted({row["split"] for row in rows}):
        answer_to = {row["question_id"]: row["answer"] for row in rows if row["split"] == split}
        ids = [question.question_id for question in read_questions(folder, split)]
        check_ids((row["question_id"] for row in rows if row["split"] == split), ids, "the predictions", split)
        results = [{"question_id": question, "answer": answer_to[question]} for question in ids]
        files[f"v2_OpenEnded_mscoco_{split}_results.json"] = json.dumps(results).encode()
    return files


def metrics(rows: Iterable[dict]) -> dict[str, float]:
    """Means over the predictions whose annotators' answers are known, 0 to 1. accuracy/... is that of one answer type
    or question type; chance is the accuracy of always giving the most frequent ground truth."""
    rows = [row for row in rows if row["annotator_answers"]]
    commonest = max(
        Counter(row["ground_truth"] for row in rows).items(), key=lambda one: (one[1], one[0]), default=("", 0)
    )[0]
    found = defaultdict(list)
    for row in rows:
        found["accuracy"].append(row["score"])
        found["chance"].append(accuracy(commonest, row["annotator_answers"]))
        for kind in (row["answer_type"], row["question_type"]):
            if kind:
                found[f"accuracy/{kind}"].append(row["score"])
    return {name: sum(scores) / len(scores) for name, scores in found.items()}


def read_questions(folder: Path, split: str) -> list[Question]:
    """The questions of a split, in the order of their file, with the annotations if it has them."""
    questions, *annotations = (folder / name for name in question_files(split))
    return join_questions(questions, annotations[0] if annotations else None, split)


def join_questions(question_file: Path, annotation_file: Path | None, split: str) -> list[Question]:
    """The questions of one file with the annotations of another, whose ids must be the same."""
    data = read_json(question_file, _SETTINGS)
    annotations = read_annotations(annotation_file) if annotation_file else []
    annotation_of = {row["question_id"]: row for row in annotations}

    def question(row: dict) -> Question:
        # test-dev is a part of test, and its images are named so
        image = f"COCO_{data['data_subtype'].replace('test-dev', 'test')}_{row['image_id']:012d}.jpg"
        annotation = annotation_of.get(row["question_id"], {})
        if annotation.get("image_id", row["image_id"]) != row["image_id"]:
            raise ValueError(f"it is about image {row['image_id']}, its annotation about {annotation['image_id']}")
        if not isinstance(row["question"], str):
            raise TypeError(f"the question is no text: {row['question']!r}")
        return Question(row["question_id"], split, row["question"], image, *(_known(annotation) if annotation else ()))

    questions = parse_entries(data.get("questions"), "questions", _KIND, question_file, question)
    ids = [question.question_id for question in questions]
    annotated = [row["question_id"] for row in annotations] if annotation_file else ids
    check_ids(annotated, ids, str(annotation_file or question_file), str(question_file))
    return questions


def _known(row: dict) -> tuple[tuple[str, ...], str, str, str]:
    """The last fields of a Question; equal texts share memory, since a million questions have few different ones."""
    answers = tuple(sys.intern(given["answer"]) for given in row["answers"])
    return answers, *(sys.intern(row[name]) for name in ("multiple_choice_answer", "answer_type", "question_type"))


def write_answers(
    folder: Positional[Path],
    out: Positional[Path],
    splits: tuple[str, ...] = ("train2014", "val2014"),
    min_questions: int = MIN_QUESTIONS,
) -> None:
    """Write the list of answers that a model chooses from.

    Args:
        folder: Holds v2_mscoco_SPLIT_annotations.json.
        out: The list, one answer a line.
        splits: Whose annotations are counted.
        min_questions: An answer is listed if it is that of at least so many questions.
    """
    files = [folder / name for split in splits for name in question_files(split)[1:]]
    annotations = [row for file in files for row in read_annotations(file)]
    answers = frequent_answers(annotations, min_questions)
    if not answers:
        raise ValueError(
            f"no answer is that of {min_questions} of {len(annotations)} questions; give a lower --min_questions"
        )
    out.write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    print(f"{out}: {len(answers)} answers of {len(annotations)} questions; set --task.answers {len(answers)}")


main = Command("vlbert vqa-answers", write_answers)
