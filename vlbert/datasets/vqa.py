"""VQA 2.0's official files and accuracy. A ValueError names the file, the place in it and the way out.

python -m vlbert.datasets.vqa FOLDER OUT --splits train2014 val2014      writes the list of answers to choose from
"""

import argparse
import functools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from storage.safe_json import shown
from vlbert.datasets.files import check_ids, read_json, read_text

UNKNOWN = "<unk>"  # a line of some answer lists: stands for all other answers, and is never right
LEAST = 9  # questions that an answer must be the answer of, to be one to choose from
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = dict(none="0", zero="0", one="1", two="2", three="3", four="4", five="5", six="6", seven="7", eight="8")
_NUMBERS |= dict(nine="9", ten="10")
_ARTICLES = {"a", "an", "the"}
# The official table names a word without one of its apostrophes, and is asked in lower case: what it has of I is out
# of its reach.
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
    word[:place] + word[place + 1 :]: word
    for word in _APOSTROPHES.split()
    for place, letter in enumerate(word)
    if letter == "'"
} | {"somebody'd": "somebodyd"}  # the table has it the wrong way round


# Table 2 of the paper, % by the official accuracy: split -> VL-BERT's. It reports nothing on val2014.
REPORTED = {"test-dev2015": "71.16 base, 71.79 large", "test2015": "72.22 large (test-std)"}


@dataclass(frozen=True, slots=True)
class Question:
    """One question, the file name of its picture and, but in test splits, what the annotators said."""

    question_id: int
    split: str
    text: str
    image: str
    answers: tuple[str, ...] = ()
    truth: str | None = None  # the answer that the data set chose among them
    answer_type: str | None = None
    question_type: str | None = None

    def columns(self) -> dict[str, Any]:
        """What a prediction says of it."""
        columns = {
            name: getattr(self, name) for name in ("question_id", "split", "truth", "answer_type", "question_type")
        }
        return {"asked": self.text, "answers": list(self.answers)} | columns


@dataclass(frozen=True)
class Scores:
    """Accuracies in percent, of two decimals."""

    per_question: dict[int, float]
    overall: float
    per_answer_type: dict[str, float]
    per_question_type: dict[str, float]


def without_punctuation(text: str) -> str:
    """As the official evaluation has it: a mark goes where one like it stands beside a blank, or where any comma parts
    two digits; else it becomes a blank. Periods stay before digits alone."""
    found = text
    for mark in _PUNCTUATION:
        goes = f"{mark} " in text or f" {mark}" in text or re.search("[0-9],[0-9]", text)
        found = found.replace(mark, "" if goes else " ")
    return re.sub(r"\.(?![0-9])", "", found, count=32)  # the official code passes a flag, 32, as the count


def without_articles(text: str) -> str:
    """In lower case, number words as digits, articles gone, apostrophes where the official table puts them."""
    words = (_NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


@functools.lru_cache(maxsize=1 << 16)  # a data set's answers are few
def normalise(answer: str) -> str:
    """An answer as the official evaluation compares it where the annotators differ."""
    return without_articles(without_punctuation(answer))


def accuracy(said: str, answers: Sequence[str], annotators: Sequence[Any] = ()) -> float:
    """The official accuracy, 0 to 1: min(1, n / 3), n of the others giving what was said, averaged over leaving each
    annotator out. Answers are normalised only where the annotators' differ.

    annotators  what else is said of each answer; who cannot be told apart by it and the answer are left out together
    """
    said, *answers = (answer.replace("\n", " ").replace("\t", " ").strip() for answer in (said, *answers))
    if len(set(answers)) > 1:
        said, *answers = map(normalise, (said, *answers))
    agree = [i for i, answer in enumerate(answers) if answer == said]
    left = [len(agree)] * len(answers)
    for i in agree:
        left[i] -= sum(annotators[i] == annotators[j] for j in agree) if annotators else 1
    return _in_turn(min(1.0, count / 3) for count in left) / len(answers)


def soft_score(count: int, annotators: int) -> float:
    """What an answer that `count` of the annotators gave is worth by the same rule, nothing normalised. Of ten: 0, 0.3,
    0.6, 0.9, then 1."""
    given, not_given = min(1.0, (count - 1) / 3), min(1.0, count / 3)
    return (count * given + (annotators - count) * not_given) / annotators


def judge(said: str, answers: Sequence[str], soft: float, best: float) -> dict[str, float | None]:
    """What a prediction's answer is worth, given what the annotators said; None where nobody did.

    soft, best  what training gives the answer, and the best one of the list
    """
    worth = (accuracy(said, answers), soft, best) if answers else (None, None, None)
    return dict(zip(("score", "soft_score", "reachable"), worth, strict=True))


def score(results: Sequence[dict], annotations: Sequence[dict]) -> Scores:
    """The official scores of results, rows of question_id and answer, in the order and the digits of the official code.

    ValueError where the ids do not match those of the annotations exactly, or there are none.
    """
    if not annotations:
        raise ValueError("there are no annotations: nothing can be scored")
    check_ids(
        (row["question_id"] for row in results),
        (row["question_id"] for row in annotations),
        "the results",
        "the annotations",
    )
    said = {row["question_id"]: row["answer"] for row in results}
    per_question, by_answer, by_question = {}, defaultdict(list), defaultdict(list)
    for row in annotations:
        annotators = [{**given, "answer": None} for given in row["answers"]]
        found = accuracy(said[row["question_id"]], [given["answer"] for given in row["answers"]], annotators)
        per_question[row["question_id"]] = found
        by_answer[row["answer_type"]].append(found)
        by_question[row["question_type"]].append(found)
    return Scores(
        per_question={question: _rounded(100 * found) for question, found in per_question.items()},
        overall=_mean(per_question.values()),
        per_answer_type={kind: _mean(found) for kind, found in by_answer.items()},
        per_question_type={kind: _mean(found) for kind, found in by_question.items()},
    )


def _mean(accuracies: Iterable[float]) -> float:
    accuracies = list(accuracies)
    return _rounded(100 * _in_turn(accuracies) / len(accuracies))


def _in_turn(numbers: Iterable[float]) -> float:
    """Their sum, added one after the other: sum() of newer Pythons rounds less, and the official code's sums do not."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def _rounded(percent: float) -> float:
    """To two decimals, halves upwards, as the official code's Python 2 does."""
    return float(Decimal(percent).quantize(Decimal("0.01"), ROUND_HALF_UP))


def read_answers(file: Path, count: int) -> list[str]:
    """The `count` answers of a text file, one a line, or of a JSON list, in lower case and without punctuation as the
    authors take them."""
    if not file.is_file():
        raise ValueError(
            f"there is no answer list {file}; make one with `python -m vlbert.datasets.vqa {file.parent} {file}`, put "
            "yours there, or set task.answer_list"
        )
    if file.suffix == ".json":
        lines = read_json(file, "task.answer_list", list)
        if not all(isinstance(line, str) for line in lines):
            raise ValueError(f"{file} is no list of answers: a JSON list of strings is needed")
    else:
        lines = read_text(file).replace("\r\n", "\n").split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines  # behind the last line's end
    if len(lines) != count:
        raise ValueError(
            f"{file} holds {len(lines)} answers, task.answers is {count}; set it to the former, or name the other "
            "list: task.answer_list"
        )
    lines = [line.lower().strip() for line in lines]
    return [line if line == UNKNOWN else without_punctuation(line) for line in lines]


def frequent_answers(annotations: Iterable[dict], least: int = LEAST) -> list[str]:
    """The answers to choose from: normalised, what at least `least` questions have as their multiple_choice_answer (the
    one that the data set chose of the ten), the most frequent first and else in the order of the alphabet.

    Nine questions of train2014 and val2014 together: so the published lists of 3,129 answers came about. Soft targets,
    as published, look for the annotators' answers as they wrote them: what differs from its normal form is not found.
    """
    counts = Counter(normalise(row["multiple_choice_answer"]) for row in annotations)
    return sorted(
        (answer for answer, count in counts.items() if answer and count >= least), key=lambda one: (-counts[one], one)
    )


def question_files(split: str) -> tuple[str, ...]:
    """Names of the files with the questions of a split and, but for test splits, with what the annotators said."""
    files = f"v2_OpenEnded_mscoco_{split}_questions.json", f"v2_mscoco_{split}_annotations.json"
    return files[:1] if split.startswith("test") else files


def read_annotations(file: Path, chosen: bool = False) -> list[dict]:
    """What the annotators said, in the order of the file, checked; `chosen`: and which answer the data set chose."""
    rows = _rows(read_json(file, "task.folder, or the splits"), "annotations", file)
    for number, row in enumerate(rows):
        try:
            texts = [given["answer"] for given in row["answers"]]
            whole = bool(texts) and all(isinstance(text, str) for text in texts)
            whole &= not chosen or isinstance(row["multiple_choice_answer"], str)
            hash(row["question_id"]), row["answer_type"], row["question_type"]
        except (KeyError, TypeError) as error:
            raise _misshapen(file, f"annotations[{number}]", repr(error)) from error
        if not whole:
            raise _misshapen(file, f"annotations[{number}]", "no answers, or one that is no text")
    return rows


def read_results(file: Path) -> list[dict]:
    """Rows of question_id and answer, as the server takes them."""
    rows = read_json(file, "the results", list)
    for number, row in enumerate(rows):
        if not (
            isinstance(row, dict)
            and isinstance(row.get("question_id"), str | int)
            and isinstance(row.get("answer"), str)
        ):
            raise _misshapen(file, f"row {number}", f"{shown(row)} has no question_id, or no text as its answer")
    return rows


def submission(folder: Path, rows: Sequence[dict]) -> dict[str, bytes]:
    """The files that the server takes, one a split: rows of question_id and answer, for every question of the split.

    rows are predictions: split, question_id, said. ValueError where a question of a split has none or two.
    """
    files = {}
    for split in sorted({row["split"] for row in rows}):
        said = {row["question_id"]: row["said"] for row in rows if row["split"] == split}
        ids = [question.question_id for question in read_questions(folder, split)]
        check_ids((row["question_id"] for row in rows if row["split"] == split), ids, "the predictions", split)
        results = [{"question_id": question, "answer": said[question]} for question in ids]
        files[f"v2_OpenEnded_mscoco_{split}_results.json"] = json.dumps(results).encode()
    return files


def means(rows: Iterable[dict]) -> dict[str, float]:
    """The mean of each score of the predictions, 0 to 1, of those whose answers are known. accuracy/... is that of one
    answer type or question type; chance is the accuracy of saying to all the commonest truth."""
    rows = [row for row in rows if row["answers"]]
    commonest = max(Counter(row["truth"] for row in rows).items(), key=lambda one: (one[1], one[0]), default=("", 0))[0]
    found = defaultdict(list)
    for row in rows:
        found["accuracy"].append(row["score"])
        found["soft_accuracy"].append(row["soft_score"])
        found["reachable"].append(row["reachable"])
        found["chance"].append(accuracy(commonest, row["answers"]))
        for kind in (row["answer_type"], row["question_type"]):
            if kind:
                found[f"accuracy/{kind}"].append(row["score"])
    return {name: sum(scores) / len(scores) for name, scores in found.items()}


def read_questions(folder: Path, split: str) -> list[Question]:
    """The questions of a split, in the order of their file, and, but for test splits, what the annotators said."""
    asked_in, *answered_in = (folder / name for name in question_files(split))
    return join_questions(asked_in, answered_in[0] if answered_in else None, split)


def join_questions(asked_in: Path, answered_in: Path | None, split: str) -> list[Question]:
    """The questions of one file with the annotations of another, whose ids must be the same."""
    asked = read_json(asked_in, "task.folder, or the splits")
    rows = _rows(asked, "questions", asked_in)
    said = read_annotations(answered_in, chosen=True) if answered_in else []
    said_of = {row["question_id"]: row for row in said}
    questions = []
    for number, row in enumerate(rows):
        try:
            # test-dev is a part of test, and its pictures are named so
            image = f"COCO_{asked['data_subtype'].replace('test-dev', 'test')}_{row['image_id']:012d}.jpg"
            answered = said_of.get(row["question_id"], {})
            if answered.get("image_id", row["image_id"]) != row["image_id"]:
                raise ValueError(f"it is about image {row['image_id']}, its annotation about {answered['image_id']}")
            known = _known(answered) if answered else ()
            questions.append(Question(row["question_id"], split, row["question"], image, *known))
            if not isinstance(row["question"], str):
                raise TypeError(f"the question is no text: {row['question']!r}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _misshapen(asked_in, f"questions[{number}]", repr(error)) from error
    ids = [question.question_id for question in questions]
    answered = ids if answered_in is None else [row["question_id"] for row in said]
    check_ids(answered, ids, str(answered_in or asked_in), str(asked_in))
    return questions


def _known(row: dict) -> tuple[tuple[str, ...], str, str, str]:
    """The last fields of a Question: few different texts, which a million questions share."""
    answers = tuple(sys.intern(given["answer"]) for given in row["answers"])
    return answers, *(sys.intern(row[name]) for name in ("multiple_choice_answer", "answer_type", "question_type"))


def _rows(found: dict[str, Any], name: str, file: Path) -> list[dict]:
    rows = found.get(name)
    if not isinstance(rows, list):
        raise _misshapen(file, name, "no such list")
    return rows


def _misshapen(file: Path, place: str, what: str) -> ValueError:
    return ValueError(f"{file} is not in VQA 2.0's format, {place}: {what}; fetch it again")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m vlbert.datasets.vqa", description=frequent_answers.__doc__)
    parser.add_argument("folder", type=Path, help="holds v2_mscoco_SPLIT_annotations.json")
    parser.add_argument("out", type=Path, help="the list: .json, or text with one answer a line")
    parser.add_argument("--splits", nargs="+", default=["train2014", "val2014"])
    parser.add_argument("--least", type=int, default=LEAST, help=f"questions that have it as their answer, {LEAST}")
    given = parser.parse_args(arguments)
    try:
        files = [_annotations(given.folder, split) for split in given.splits]
        annotations = [row for file in files for row in read_annotations(file, chosen=True)]
    except ValueError as error:
        raise SystemExit(str(error)) from error
    answers = frequent_answers(annotations, given.least)
    chosen = set(answers)
    covered = sum(any(said["answer"] in chosen for said in row["answers"]) for row in annotations)
    if not answers:
        raise SystemExit(f"no answer is that of {given.least} of {len(annotations)} questions; give a lower --least")
    text = json.dumps(answers) if given.out.suffix == ".json" else "".join(f"{answer}\n" for answer in answers)
    given.out.write_text(text, encoding="utf-8")
    print(
        f"{given.out}: {len(answers)} answers; in {covered} of {len(annotations)} questions "
        f"({covered / len(annotations):.1%}) an annotator wrote one of them; set task.answers={len(answers)}"
    )


def _annotations(folder: Path, split: str) -> Path:
    files = question_files(split)
    if len(files) == 1:
        raise ValueError(f"{split} has no annotations; name other --splits")
    return folder / files[1]


if __name__ == "__main__":
    main()
