"""VCR's questions and choices as text: for people, and as tokens that name regions."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from storage.safe_json import parse_json
from storage.sample import Sample
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets.vcr import CHOICES, Item, Scene, Text, read_items, read_scene

_PEOPLE = "casey riley jessie jackie avery jaime peyton kerry jody kendall frankie pat quinn"
PEOPLE = _PEOPLE.split()  # gender-neutral names

TaggedText = tuple[np.ndarray, np.ndarray]  # tokens int64 [t], the region that each names int64 [t] (0: none)
Subtask = Literal["answer", "rationale"]  # Q->A or QA->R


@dataclass(frozen=True, slots=True)
class Question:
    """Which answer of an item is right or, given an answer, which rationale."""

    item: Item
    conditioned_on: int  # the answer that the rationales are for; -1: the choices are the answers
    held_out: bool

    @property
    def label(self) -> int | None:
        """The right choice; None where it is unknown: without labels, and of rationales for a wrong answer."""
        if self.item.labels is None or self.conditioned_on not in (-1, self.item.labels[0]):
            return None
        return self.item.labels[self.conditioned_on >= 0]

    @property
    def name(self) -> str:
        """File and line."""
        rationales = f", rationales for answer {self.conditioned_on}" if self.conditioned_on >= 0 else ""
        return f"{self.item.location}{rationales}"

    @property
    def invalid_reason(self) -> str:
        """Why training skips it; "": it is valid."""
        if self.item.labels is None and not self.held_out:
            return "it has no labels"
        return f"it has no word in its {self.item.wordless}" if self.item.wordless else ""

    @property
    def from_user(self) -> bool:
        """Whether it is a user's own question."""
        return self.item.metadata is None

    def read(self, sample: Sample) -> tuple[Scene, list[Text], list[Text]]:
        """The objects, the question (for rationales: and its answer) and the choices. ValueError where the files do
        not fit together."""
        item = parse_json(self.item.line, self.item.location)
        if self.conditioned_on < 0:
            context, choices = [item["question"]], item["answer_choices"]
        else:
            context = [item["question"], item["answer_choices"][self.conditioned_on]]
            choices = item["rationale_choices"]
        if self.from_user:  # about the sample's regions; each fills its box
            boxes, size = sample.regions.boxes, (sample.width, sample.height)
            beyond = [i for i in mentioned([*context, *choices]) if i >= len(boxes)]
            if beyond:
                raise ValueError(f"region {beyond[0] + 1} is mentioned; the image has {len(boxes)}, from 1")
            return Scene(size, ["object"] * len(boxes), [0] * len(boxes), boxes, [[]] * len(boxes)), context, choices
        scene = read_scene(self.item.metadata)
        if item["objects"] != scene.names:
            raise ValueError(
                f"{self.item.location} and {self.item.metadata} list different objects; they must be of one release"
            )
        return scene, context, choices

    def columns(self, scene: Scene, context: Sequence[Text], choices: Sequence[Text], boxes: np.ndarray) -> dict:
        """Its columns in a prediction, with `choices` and `label`; boxes [r, 4] of the objects, in the stored image."""
        return {
            "annot_id": self.item.annot_id,
            "split": self.item.file.stem,
            "subtask": "answer" if self.conditioned_on < 0 else "rationale",
            "conditioned_on": self.conditioned_on,
            "question": " ".join(readable(text, scene.names) for text in context),
            "choices": [readable(choice, scene.names) for choice in choices],
            "label": self.label,
            "boxes": [
                {"name": f"{scene.names[i]} {i + 1}", "box": boxes[i].tolist(), "region": i + 1}
                for i in mentioned([*context, *choices])
            ],
        }


def read_questions(folder: Path, splits: Sequence[str], training: bool, subtask: Subtask) -> list[Question]:
    """All questions of the splits; rationales are asked for given the right answer or, where that is unknown, given
    each, as the leaderboard does. ValueError where the metadata of a valid one are missing."""
    items = [item for name in splits for item in read_items(folder / f"{name}.jsonl")]

    def conditions(item: Item) -> Sequence[int]:
        if subtask == "answer":
            return (-1,)
        return range(CHOICES) if item.labels is None else item.labels[:1]

    questions = [Question(item, answer, not training) for item in items for answer in conditions(item)]
    needed = {question.item.metadata for question in questions if not (training and question.invalid_reason)}
    if missing := sorted(file for file in needed if not file.is_file()):
        raise ValueError(f"{len(missing)} metadata files are missing, such as {missing[0]}; fetch vcr1images")
    return questions


def user_question(subtask: Subtask, text: str, choices: Sequence[str], answer: str) -> Question:
    """A user's own question. Texts mention regions by their numbers from 1, as in "[1]" or "[1,2]".

    ValueError where there are not four choices, a text has no word or mentions what is no number, or the answer does
    not fit the subtask.
    """
    if bool(answer.strip()) != (subtask == "rationale"):
        needs = "give the answer that they are for" if subtask == "rationale" else "give no answer beside the choices"
        raise ValueError(f"this model chooses {subtask}s; {needs}")
    if len(choices) != CHOICES:
        raise ValueError(f"{len(choices)} choices are given; VCR chooses between {CHOICES}")
    item = {"question": _parse(text), "answer_choices": [_parse(choice) for choice in choices]}
    if not all([item["question"], *item["answer_choices"]]):
        raise ValueError("the question or a choice has no word")
    if subtask == "rationale":
        item |= {"answer_choices": [_parse(answer)], "rationale_choices": item["answer_choices"]}
    own = Item(json.dumps(item), Path("the question"), 1, "", "", None, None, None)
    return Question(own, 0 if subtask == "rationale" else -1, held_out=True)


def _parse(text: str) -> Text:
    """The words of a user's text and the objects that it mentions: numbers from 1, here from 0 as in the files."""
    parts = re.split(r"\[\s*([1-9]\d*(?:\s*,\s*[1-9]\d*)*)\s*\]", text)  # words, numbers, words, ...
    stray = [word for words in parts[::2] for word in re.findall(r"\[[^\]]*\]?|\]", words)]
    if stray:
        raise ValueError(f"{stray[0]!r} in {text[:60]!r} names no region: write numbers, from 1, as in [1] or [1,2]")
    tokens = [[[int(n) - 1 for n in part.split(",")]] if i % 2 else part.split() for i, part in enumerate(parts)]
    return [token for part in tokens for token in part]


def mentioned(texts: Sequence[Text]) -> list[int]:
    """The objects that the texts mention, sorted, each once."""
    return sorted({i for text in texts for token in text if not isinstance(token, str) for i in token})


def readable(text: Text, names: Sequence[str]) -> str:
    """The text with its objects as "person 1": class, and number from 1."""
    words = [token if isinstance(token, str) else " and ".join(f"{names[i]} {i + 1}" for i in token) for token in text]
    return re.sub(r" ([?.,!;:])", r"\1", " ".join(words))


def neutral_names(names: Sequence[str], first: int) -> list[str]:
    """The name of each object: its class or, of a person, the next of PEOPLE, starting with number `first`."""
    people = itertools.islice(itertools.cycle(PEOPLE), first % len(PEOPLE), None)
    return [next(people) if name == "person" else name for name in names]


def tag(text: Text, names: Sequence[str], vocabulary: Vocabulary) -> TaggedText:
    """The tokens of a text, its objects by their names. The tokens of a name are tagged with its region, the object's
    number + 1. Several objects are joined by `and`."""
    words = []
    for token in text:
        if isinstance(token, str):
            words.append((token, 0))
            continue
        for i, number in enumerate(token):
            words += [("and", 0)] * (i > 0) + [(names[number], number + 1)]
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for region, run in itertools.groupby(words, key=lambda word: word[1]):
        tokens = vocabulary.encode(" ".join(word for word, _ in run))
        parts.append((tokens, np.full(len(tokens), region, np.int64)))
    return concatenate(parts)


def concatenate(parts: Sequence[TaggedText]) -> TaggedText:
    """One text behind the other."""
    tokens, regions = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(regions)


def truncate(
    context: Sequence[TaggedText], choices: Sequence[TaggedText], max_tokens: int, shared: bool
) -> list[tuple[TaggedText, TaggedText]]:
    """Each (context, choice) cut to `max_tokens`; the context is the question or, for rationales, question and answer.

    The choice loses its last token while it is longer than the context; else the question does, down to one token, and
    then the answer. shared, as in the published code: the choices have one context, so what a choice cuts off it is cut
    off in all rows. Else each choice cuts a context of its own.
    """
    full = [len(tokens) for tokens, _ in context]
    rows = []
    for tokens, _ in choices:
        sizes, size = full if shared else [*full], len(tokens)
        while sum(sizes) + size > max_tokens:
            if size > sum(sizes):
                size -= 1
            else:
                sizes[0 if sizes[0] > 1 or len(sizes) == 1 else 1] -= 1
        rows.append((sizes, size))
    return [
        (concatenate([_first(*pair) for pair in zip(context, sizes, strict=True)]), _first(choice, size))
        for choice, (sizes, size) in zip(choices, rows, strict=True)
    ]


def _first(text: TaggedText, size: int) -> TaggedText:
    tokens, regions = text
    return tokens[:size], regions[:size]


def check_fits(context: Sequence[TaggedText], choices: Sequence[TaggedText], max_tokens: int) -> None:
    """ValueError where the context and a choice have more than `max_tokens` tokens."""
    before, longest = sum(len(tokens) for tokens, _ in context), max(len(tokens) for tokens, _ in choices)
    if before + longest > max_tokens:
        raise ValueError(
            f"the text is too long: {before} tokens before the choices and {longest} in the longest of them, more than "
            f"task.max_tokens = {max_tokens}; shorten it"
        )
