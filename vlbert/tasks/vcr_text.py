"""Questions and choices of VCR, as text for people and as tokens with the regions that they mention."""

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

TaggedText = np.ndarray  # int64 [2, t]: tokens, and the region that each one names, or 0
Subtask = Literal["answer", "rationale"]  # Q->A or QA->R


@dataclass(frozen=True, slots=True)
class Question:
    """A question about an image, with four choices: either its answers, or the rationales for one of its answers."""

    item: Item
    conditioned_on: int  # index of the answer that the rationales are for; -1 if the choices are answers
    held_out: bool

    @property
    def label(self) -> int | None:
        """Index of the right choice, or None if the item has no labels or the rationales are for a wrong answer."""
        if self.item.labels is None or self.conditioned_on not in (-1, self.item.labels[0]):
            return None
        return self.item.labels[self.conditioned_on >= 0]

    @property
    def name(self) -> str:
        rationales = f", rationales for answer {self.conditioned_on}" if self.conditioned_on >= 0 else ""
        return f"{self.item.location}{rationales}"

    @property
    def invalid_reason(self) -> str:
        """The reason why training skips this question, or "" if the question is valid."""
        if self.item.labels is None and not self.held_out:
            return "it has no labels"
        return f"it has no word in its {self.item.wordless}" if self.item.wordless else ""

    @property
    def from_user(self) -> bool:
        return self.item.metadata is None

    def read(self, sample: Sample) -> tuple[Scene, list[Text], list[Text]]:
        """Return the image's objects, the context (the question and, for rationales, the answer) and the choices.

        Raises ValueError if the files are inconsistent, or if a user's text mentions a region that does not exist.
        """
        item = parse_json(self.item.line, self.item.location)
        if self.conditioned_on < 0:
            context, choices = [item["question"]], item["answer_choices"]
        else:
            context = [item["question"], item["answer_choices"][self.conditioned_on]]
            choices = item["rationale_choices"]
        if self.from_user:  # its objects are the sample's regions, each of which fills its box
            boxes, size = sample.require_regions().boxes, (sample.width, sample.height)
            unknown = [i for i in mentioned([*context, *choices]) if i >= len(boxes)]
            if unknown:
                raise ValueError(f"the text mentions region {unknown[0] + 1}; the image has {len(boxes)}, from 1")
            return Scene(size, ["object"] * len(boxes), [0] * len(boxes), boxes, None), context, choices
        assert self.item.metadata is not None  # not from_user
        scene = read_scene(self.item.metadata)
        if item["objects"] != scene.names:
            raise ValueError(f"{self.item.location} and {self.item.metadata} list different objects; use one release")
        return scene, context, choices

    def columns(self, scene: Scene, context: Sequence[Text], choices: Sequence[Text], boxes: np.ndarray) -> dict:
        """Return the columns of a prediction that describe the question, including `choices` and `label`.

        `boxes` [r, 4] are the boxes of the scene's objects, in pixels of the stored image.
        """
        return {
            "annot_id": self.item.annot_id,
            "split": self.item.file.stem,
            "subtask": "answer" if self.conditioned_on < 0 else "rationale",
            "conditioned_on": self.conditioned_on,
            "question": " ".join(format_text(text, scene.names) for text in context),
            "choices": [format_text(choice, scene.names) for choice in choices],
            "label": self.label,
            "boxes": [
                {"name": f"{scene.names[i]} {i + 1}", "box": boxes[i].tolist(), "region": i + 1}
                for i in mentioned([*context, *choices])
            ],
        }


def read_questions(folder: Path, splits: Sequence[str], training: bool, subtask: Subtask) -> list[Question]:
    """Read all questions of the splits.

    For the subtask "rationale", there is a question for an item's right answer or, if it is unknown, for each answer.
    Raises ValueError if the metadata file of a question is missing, except for invalid questions in training.
    """
    items = [item for name in splits for item in read_items(folder / f"{name}.jsonl")]

    def given_answers(item: Item) -> Sequence[int]:
        if subtask == "answer":
            return (-1,)
        return range(CHOICES) if item.labels is None else item.labels[:1]

    questions = [Question(item, answer, not training) for item in items for answer in given_answers(item)]
    needed = {question.item.metadata for question in questions if not (training and question.invalid_reason)}
    if missing := sorted(file for file in needed if file and not file.is_file()):
        raise ValueError(f"{len(missing)} metadata files are missing, such as {missing[0]}; fetch vcr1images")
    return questions


def user_question(subtask: Subtask, text: str, choices: Sequence[str], answer: str) -> Question:
    """Make a Question from a user's texts. The texts mention regions by number (from 1), as in "[1]" or "[1,2]".

    Raises ValueError if there are not four choices, if a text has no word or an invalid mention, if `answer` is empty
    for the subtask "rationale", or if `answer` is not empty for the subtask "answer".
    """
    if bool(answer.strip()) != (subtask == "rationale"):
        needs = "give the answer that they are for" if subtask == "rationale" else "give no answer"
        raise ValueError(f"this model chooses {subtask}s; {needs}")
    if len(choices) != CHOICES:
        raise ValueError(f"{len(choices)} choices are given; give {CHOICES}")
    item = {"question": _parse_text(text), "answer_choices": [_parse_text(choice) for choice in choices]}
    if not all([item["question"], *item["answer_choices"]]):
        raise ValueError("the question or a choice has no word")
    if subtask == "rationale":
        item |= {"answer_choices": [_parse_text(answer)], "rationale_choices": item["answer_choices"]}
    user_item = Item(json.dumps(item), Path("the question"), 1, "", "", None, None, None)
    return Question(user_item, 0 if subtask == "rationale" else -1, held_out=True)


def _parse_text(text: str) -> Text:
    """Split a user's text into words and mentions. A mention becomes zero-based indices: [0, 1] for "[1,2]"."""
    parts = re.split(r"\[\s*([1-9]\d*(?:\s*,\s*[1-9]\d*)*)\s*\]", text)  # words, numbers, words, ...
    stray = [word for words in parts[::2] for word in re.findall(r"\[[^\]]*\]?|\]", words)]
    if stray:
        raise ValueError(f"{stray[0]!r} in {text[:60]!r} names no region; write numbers, from 1, as in [1] or [1,2]")
    tokens = [[[int(n) - 1 for n in part.split(",")]] if i % 2 else part.split() for i, part in enumerate(parts)]
    return [token for part in tokens for token in part]


def mentioned(texts: Sequence[Text]) -> list[int]:
    """Return the sorted indices (from 0) of all objects that the texts mention."""
    return sorted({i for text in texts for token in text if not isinstance(token, str) for i in token})


def format_text(text: Text, names: Sequence[str]) -> str:
    """Return a text as a string. A mention becomes the object's class and its number (from 1), such as "person 1"."""
    words = [token if isinstance(token, str) else " and ".join(f"{names[i]} {i + 1}" for i in token) for token in text]
    return re.sub(r" ([?.,!;:])", r"\1", " ".join(words))


def neutral_names(names: Sequence[str], first: int) -> list[str]:
    """Replace each "person" in a list of class names with a name from PEOPLE, in order, starting at index `first`."""
    people = itertools.islice(itertools.cycle(PEOPLE), first % len(PEOPLE), None)
    return [next(people) if name == "person" else name for name in names]


def tag(text: Text, names: Sequence[str], vocabulary: Vocabulary) -> TaggedText:
    """Tokenise a text, and return its tokens and the region that each token names (0: none).

    A mention becomes the `names` of its objects, joined by "and". The region is the object's index + 1.
    """
    words = []
    for token in text:
        if isinstance(token, str):
            words.append((token, 0))
            continue
        for i, number in enumerate(token):
            words += [("and", 0)] * (i > 0) + [(names[number], number + 1)]
    parts = [np.zeros((2, 0), np.int64)]
    for region, run in itertools.groupby(words, key=lambda word: word[1]):
        tokens = vocabulary.encode(" ".join(word for word, _ in run))
        parts.append(np.stack([tokens, np.full_like(tokens, region)]))
    return np.concatenate(parts, axis=1)


def truncate(
    context: Sequence[TaggedText], choices: Sequence[TaggedText], max_tokens: int, shared: bool
) -> list[tuple[TaggedText, TaggedText]]:
    """Return a row (context, choice) for each choice, cut to at most `max_tokens` tokens in total.

    The context is the question and, for rationales, the answer. While a row is too long, one token is removed. If the
    choice is longer than the context, it loses its last token. Otherwise the question loses its last token or, if only
    one is left, the answer does. If `shared`, a cut of the context applies to all choices, as in the published code.
    """
    shared_sizes = [text.shape[1] for text in context]
    rows = []
    for choice in choices:
        sizes, size = shared_sizes if shared else [*shared_sizes], choice.shape[1]
        while sum(sizes) + size > max_tokens:
            if size > sum(sizes):
                size -= 1
            else:
                sizes[0 if sizes[0] > 1 or len(sizes) == 1 else 1] -= 1
        rows.append((sizes, size))
    return [
        (np.concatenate([text[:, :kept] for text, kept in zip(context, sizes, strict=True)], axis=1), choice[:, :size])
        for choice, (sizes, size) in zip(choices, rows, strict=True)
    ]


def check_fits(context: Sequence[TaggedText], choices: Sequence[TaggedText], max_tokens: int) -> None:
    """Raise ValueError if the context together with any one choice exceeds `max_tokens` tokens."""
    before, longest = sum(text.shape[1] for text in context), max(choice.shape[1] for choice in choices)
    if before + longest > max_tokens:
        raise ValueError(
            f"the text is too long: {before} tokens before the choices and {longest} in the longest choice exceed "
            f"task.max_tokens = {max_tokens}; shorten it"
        )
