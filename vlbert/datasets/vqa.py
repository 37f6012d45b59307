"""The files, official accuracy and answer list of VQA 2.0. Error messages name the file and entry, and say what to do.

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
UNKNOWN = "<unk>"  # entry of some answer lists for all other answers; it is never right
MIN_QUESTIONS = 9  # minimum number of questions with an answer for it to be in the answer list
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = dict(none="0", zero="0", one="1", two="2", three="3", four="4", five="5", six="6", seven="7", eight="8")
_NUMBERS |= dict(nine="9", ten="10")
_ARTICLES = {"a", "an", "the"}
# The official table maps words that lack one apostrophe to the correct words. Entries with a capital I are left out:
# they never match, because words are in lower case when they are looked up.
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
} | {"somebody'd": "somebodyd"}  # the official table has it reversed


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the file name of its image and, except in test splits, the annotators' answers."""

    question_id: int
    split: str
    text: str
    image: str
    answers: tuple[str, ...] = ()
    ground_truth: str | None = None  # the data set's choice among them
    answer_type: str | None = None
    question_type: str | None = None

    def columns(self) -> dict[str, Any]:
        same = ("question_id", "split", "ground_truth", "answer_type", "question_type")
        answers = list(self.answers)
        return {"question": self.text, "annotator_answers": answers} | {name: getattr(self, name) for name in same}


def remove_punctuation(text: str) -> str:
    """Remove punctuation as the official evaluation does.

    Periods are kept only before digits. Other marks become spaces, with two exceptions. A mark that is next to a space
    anywhere in the text is removed everywhere. If the text has a comma between two digits, all marks are removed.
    """
    cleaned = text
    for mark in _PUNCTUATION:
        removed = f"{mark} " in text or f" {mark}" in text or re.search("[0-9],[0-9]", text)
        cleaned = cleaned.replace(mark, "" if removed else " ")
    return re.sub(r"\.(?![0-9])", "", cleaned, count=32)  # the official code passes a flag, 32, as the count


def normalise_words(text: str) -> str:
    """Lower-case a text, replace number words by digits, drop articles and restore missing apostrophes."""
    words = (_NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


@functools.lru_cache(maxsize=1 << 16)  # a data set has few different answers
def normalise(answer: str) -> str:
    """Normalise an answer as the official evaluation does: punctuation, case, numbers, articles and apostrophes."""
    return normalise_words(remove_punctuation(answer))


def accuracy(answer: str, answers: Sequence[str]) -> float:
    """Return the official accuracy of an answer, from 0 to 1, given the annotators' answers.

    The accuracy is the mean over the annotators of min(1, n / 3), where n is the number of other annotators who gave
    the answer. Answers are normalised only if the annotators' answers differ.
    """
    answer, *answers = (text.replace("\n", " ").replace("\t", " ").strip() for text in (answer, *answers))
    if len(set(answers)) > 1:
        answer, *answers = map(normalise, (answer, *answers))
    agree = answers.count(answer)
    # sum() of newer Python versions rounds less than the official code, which adds one number at a time.
    return functools.reduce(operator.add, (min(1.0, (agree - (text == answer)) / 3) for text in answers)) / len(answers)


def soft_score(count: int, annotators: int) -> float:
    """Return the accuracy of an answer given by `count` annotators. For 0 to 4 of ten, it is 0, 0.3, 0.6, 0.9 and 1."""
    given, not_given = min(1.0, (count - 1) / 3), min(1.0, count / 3)
    return (count * given + (annotators - count) * not_given) / annotators


def read_answers(file: Path, count: int) -> list[str]:
    """Read `count` answers, one per line. As in the authors' code, they are lower-cased and lose their punctuation."""
    text = read_text(file, f"task.answer_list; `vlbert vqa-answers {file.parent} {file}` makes one")
    lines = text.replace("\r\n", "\n").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines  # after the last line break
    if len(lines) != count:
        raise ValueError(
            f"{file} has {len(lines)} answers, but task.answers is {count}; change it, or set task.answer_list"
        )
    lines = [line.lower().strip() for line in lines]
    return [line if line == UNKNOWN else remove_punctuation(line) for line in lines]


def frequent_answers(annotations: Iterable[dict], min_questions: int = MIN_QUESTIONS) -> list[str]:
    """Return the answer list: the normalised multiple_choice_answers of at least `min_questions` questions.

    The most frequent answers come first, and ties are in alphabetical order. The published lists have 3,129 answers,
    each with at least nine questions in train2014 and val2014 together. As in the published code, annotators' answers
    are not normalised before they are looked up in the list, so some are not found.
    """
    counts = Counter(normalise(row["multiple_choice_answer"]) for row in annotations)
    return sorted(
        (answer for answer, count in counts.items() if answer and count >= min_questions),
        key=lambda answer: (-counts[answer], answer),
    )


def question_files(split: str) -> tuple[str, ...]:
    """Return the names of a split's question file and, except for test splits, its annotation file."""
    files = f"v2_OpenEnded_mscoco_{split}_questions.json", f"v2_mscoco_{split}_annotations.json"
    return files[:1] if split.startswith("test") else files


def read_annotations(file: Path) -> list[dict]:
    """Read the entries of an annotation file, in order. Raises ValueError if an entry is not valid."""
    return parse_entries(read_json(file, _SETTINGS).get("annotations"), "annotations", _KIND, file, _check_annotation)


def _check_annotation(row: dict) -> dict:
    texts = [row["multiple_choice_answer"], *(entry["answer"] for entry in row["answers"])]
    hash(row["question_id"]), row["answer_type"], row["question_type"]
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError("it has no answers, or one that is not a string")
    return row


def submission(folder: Path, rows: Sequence[dict]) -> dict[str, bytes]:
    """Return the evaluation server's files by name, one per split: JSON lists of {question_id, answer}.

    `rows` have split, question_id and answer. Raises ValueError unless each question of the splits has exactly one row.
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
    """Return the mean accuracies, 0 to 1, over the predictions for questions whose annotators' answers are known.

    accuracy/<type> is the mean for one answer type or question type. chance is the accuracy of always giving the most
    frequent ground truth.
    """
    rows = [row for row in rows if row["annotator_answers"]]
    counts = Counter(row["ground_truth"] for row in rows)
    most_frequent = max(counts, key=lambda answer: (counts[answer], answer), default="")
    values = defaultdict(list)
    for row in rows:
        values["accuracy"].append(row["score"])
        values["chance"].append(accuracy(most_frequent, row["annotator_answers"]))
        for kind in (row["answer_type"], row["question_type"]):
            if kind:
                values[f"accuracy/{kind}"].append(row["score"])
    return {name: sum(scores) / len(scores) for name, scores in values.items()}


def read_questions(folder: Path, split: str) -> list[Question]:
    """Read the questions of a split, in the order of the file. Questions of test splits have no answers."""
    questions, *annotations = (folder / name for name in question_files(split))
    return join_questions(questions, annotations[0] if annotations else None, split)


def join_questions(question_file: Path, annotation_file: Path | None, split: str) -> list[Question]:
    """Read the questions of a file, with their annotations if given. Raises ValueError if the question ids differ."""
    data = read_json(question_file, _SETTINGS)
    annotations = read_annotations(annotation_file) if annotation_file else []
    annotation_of = {row["question_id"]: row for row in annotations}

    def parse_question(row: dict) -> Question:
        # test-dev is a part of test, and its images have the names of test
        image = f"COCO_{data['data_subtype'].replace('test-dev', 'test')}_{row['image_id']:012d}.jpg"
        annotation = annotation_of.get(row["question_id"], {})
        if annotation.get("image_id", row["image_id"]) != row["image_id"]:
            raise ValueError(f"it is about image {row['image_id']}, its annotation about {annotation['image_id']}")
        if not isinstance(row["question"], str):
            raise TypeError(f"the question is not a string: {row['question']!r}")
        return Question(
            row["question_id"], split, row["question"], image, *(_answer_fields(annotation) if annotation else ())
        )

    questions = parse_entries(data.get("questions"), "questions", _KIND, question_file, parse_question)
    ids = [question.question_id for question in questions]
    annotated = [row["question_id"] for row in annotations] if annotation_file else ids
    check_ids(annotated, ids, str(annotation_file or question_file), str(question_file))
    return questions


def _answer_fields(row: dict) -> tuple[tuple[str, ...], str, str, str]:
    """Return the fields `answers` to `question_type` of a Question, given its annotation."""
    # Interning saves memory, because most texts are repeated.
    answers = tuple(sys.intern(entry["answer"]) for entry in row["answers"])
    return answers, *(sys.intern(row[name]) for name in ("multiple_choice_answer", "answer_type", "question_type"))


def write_answers(
    folder: Positional[Path],
    out: Positional[Path],
    splits: tuple[str, ...] = ("train2014", "val2014"),
    min_questions: int = MIN_QUESTIONS,
) -> None:
    """Write the list of answers that a model chooses from.

    Args:
        folder: folder with v2_mscoco_SPLIT_annotations.json
        out: file to write, one answer per line
        splits: splits whose annotations are counted
        min_questions: minimum number of questions that an answer must have to be listed
    """
    files = [folder / name for split in splits for name in question_files(split)[1:]]
    annotations = [row for file in files for row in read_annotations(file)]
    answers = frequent_answers(annotations, min_questions)
    if not answers:
        raise ValueError(f"no answer occurs in {min_questions} of {len(annotations)} questions; lower --min_questions")
    out.write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    print(f"{out}: {len(answers)} answers from {len(annotations)} questions; set --task.answers {len(answers)}")


main = Command("vlbert vqa-answers", write_answers)
