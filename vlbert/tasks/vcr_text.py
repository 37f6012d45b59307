"""What VCR asks, as texts: for people, and as word pieces that know the region they name."""

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
PEOPLE = _PEOPLE.split()  # names of any gender

Tagged = tuple[np.ndarray, np.ndarray]  # word pieces int64 [t], the region that each names int64 [t] (0: none)


@dataclass(frozen=True, slots=True)
class Ask:
    """Which answer to an item is right, or which rationale for one of its answers."""

    item: Item
    answer: int  # the rationales' one; -1 where answers are asked for
    held_out: bool

    @property
    def label(self) -> int | None:
        """The choice that is right; None where nobody says: without labels, and of rationales for a wrong answer."""
        if self.item.labels is None or self.answer not in (-1, self.item.labels[0]):
            return None
        return self.item.labels[self.answer >= 0]

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.item.where}, rationales of answer {self.answer}" if self.answer >= 0 else self.item.where

    @property
    def flaw(self) -> str:
        """Why nothing can be learned from it; empty: something can."""
        if self.item.labels is None and not self.held_out:
            return "it has no labels"
        return f"it has no word in its {self.item.wordless}" if self.item.wordless else ""

    @property
    def own(self) -> bool:
        """Whether it is a question of one's own."""
        return self.item.metadata is None

    def read(self, sample: Sample) -> tuple[Scene, list[Text], list[Text]]:
        """The objects, the question (for a rationale, and its answer), and the choices. ValueError where the files do
        not fit together, and where an object without area would be learnt from."""
        item = parse_json(self.item.line, self.item.where)
        asked = [item["question"]] if self.answer < 0 else [item["question"], item["answer_choices"][self.answer]]
        choices = item["answer_choices" if self.answer < 0 else "rationale_choices"]
        if self.own:  # about the sample's regions; each fills its box
            boxes, size = sample.regions.boxes, (sample.width, sample.height)
            beyond = [i for i in mentioned([*asked, *choices]) if i >= len(boxes)]
            if beyond:
                raise ValueError(f"region {beyond[0] + 1} is mentioned; the picture has {len(boxes)}, from 1")
            return Scene(size, ["object"] * len(boxes), [0] * len(boxes), boxes, [[]] * len(boxes)), asked, choices
        scene = read_scene(self.item.metadata)
        if item["objects"] != scene.names:
            raise ValueError(
                f"{self.item.where} and {self.item.metadata} list different objects; they must be of one release"
            )
        if scene.without_area and not self.held_out:
            raise ValueError(f"{self.item.metadata}: the box of object {scene.without_area[0]} has no area")
        return scene, asked, choices

    def about(self, scene: Scene, asked: Sequence[Text], choices: Sequence[Text], boxes: np.ndarray) -> dict:
        """What a prediction says beside the model's numbers; boxes [r, 4] of the objects, in the stored picture."""
        return {
            "annot_id": self.item.annot_id,
            "split": self.item.file.stem,
            "question": "answer" if self.answer < 0 else "rationale",
            "conditioned_on": self.answer,
            "asked": " ".join(readable(text, scene.names) for text in asked),
            "choices": [readable(choice, scene.names) for choice in choices],
            "label": self.label,
            "boxes": [
                {"name": f"{scene.names[i]} {i + 1}", "box": boxes[i].tolist(), "region": i + 1}
                for i in mentioned([*asked, *choices])
            ],
        }


def read_asks(
    folder: Path, splits: Sequence[str], learning: bool, question: Literal["answer", "rationale"], every_answer: bool
) -> list[Ask]:
    """All that the splits ask. ValueError where the metadata of something without a flaw are missing."""
    items = [item for name in splits for item in read_items(folder / f"{name}.jsonl")]

    def answers(item: Item) -> Sequence[int]:
        if question == "answer":
            return (-1,)
        return range(CHOICES) if item.labels is None or (every_answer and not learning) else item.labels[:1]

    asks = [Ask(item, answer, not learning) for item in items for answer in answers(item)]
    needed = {ask.item.metadata for ask in asks if not (learning and ask.flaw)}
    if without := sorted(file for file in needed if not file.is_file()):
        raise ValueError(f"{len(without)} metadata files are missing, such as {without[0]}; fetch vcr1images")
    return asks


def own_question(kind: Literal["answer", "rationale"], text: str, choices: Sequence[str], answer: str) -> Ask:
    """A question of one's own, with its choices, which are of that kind. Texts mention regions by numbers from 1, as in
    "[1]" or "[1,2]". ValueError where there are not four choices, one has no word or mentions what is no number, or the
    answer does not fit."""
    if bool(answer.strip()) != (kind == "rationale"):
        needs = "give the answer that they are for" if kind == "rationale" else "give no answer beside the choices"
        raise ValueError(f"this model judges {kind}s; {needs}")
    if len(choices) != CHOICES:
        raise ValueError(f"{len(choices)} choices are given; VCR chooses between {CHOICES}")
    item = {"question": _from_person(text), "answer_choices": [_from_person(choice) for choice in choices]}
    if not all([item["question"], *item["answer_choices"]]):
        raise ValueError("the question or a choice has no word")
    if kind == "rationale":
        item |= {"answer_choices": [_from_person(answer)], "rationale_choices": item["answer_choices"]}
    own = Item(json.dumps(item), Path("the question"), 1, "", "", None, None, None)
    return Ask(own, 0 if kind == "rationale" else -1, held_out=True)


def _from_person(text: str) -> Text:
    """Its words, and the objects that it mentions by numbers from 1, here from 0 as in the files."""
    parts = re.split(r"\[\s*([1-9]\d*(?:\s*,\s*[1-9]\d*)*)\s*\]", text)  # words, numbers, words, ...
    stray = [word for words in parts[::2] for word in re.findall(r"\[[^\]]*\]?|\]", words)]
    if stray:
        raise ValueError(f"{stray[0]!r} in {text[:60]!r} names no region: write numbers, from 1, as in [1] or [1,2]")
    tokens = [[[int(n) - 1 for n in part.split(",")]] if i % 2 else part.split() for i, part in enumerate(parts)]
    return [token for part in tokens for token in part]


def mentioned(texts: Sequence[Text]) -> list[int]:
    """The objects that are, each once."""
    return sorted({i for text in texts for token in text if not isinstance(token, str) for i in token})


def readable(text: Text, names: Sequence[str]) -> str:
    """The text with its objects as "person 1": the class, and the number, from 1 as in all that people see."""
    words = [token if isinstance(token, str) else " and ".join(f"{names[i]} {i + 1}" for i in token) for token in text]
    return re.sub(r" ([?.,!;:])", r"\1", " ".join(words))


def neutral_names(names: Sequence[str], first: int) -> list[str]:
    """How each object is called: by its class, a person by the next of PEOPLE, from the one of number `first` on."""
    people = itertools.islice(itertools.cycle(PEOPLE), first % len(PEOPLE), None)
    return [next(people) if name == "person" else name for name in names]


def tag(text: Text, names: Sequence[str], vocabulary: Vocabulary) -> Tagged:
    """The pieces of a text, its mentions of objects as their names; every piece of a name tagged with its region, which
    is the object's number + 1. Several objects are joined by `and`."""
    words = []
    for token in text:
        if isinstance(token, str):
            words.append((token, 0))
            continue
        for place, number in enumerate(token):
            words += [("and", 0)] * (place > 0) + [(names[number], number + 1)]
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for region, run in itertools.groupby(words, key=lambda word: word[1]):
        pieces = vocabulary.encode(" ".join(word for word, _ in run))
        parts.append((pieces, np.full(len(pieces), region, np.int64)))
    return joined(parts)


def joined(parts: Sequence[Tagged]) -> Tagged:
    """One text behind the other."""
    pieces, regions = zip(*parts, strict=True)
    return np.concatenate(pieces), np.concatenate(regions)


def cut(asked: Sequence[Tagged], choices: Sequence[Tagged], most: int, shared: bool) -> list[tuple[Tagged, Tagged]]:
    """Each choice, and before it the question (for a rationale, with its answer), as far as they fit into `most`
    pieces: the choice is cut while it is longer than all before it, else the question, which keeps one piece, and then
    the answer.

    shared: as in the authors' code, the choices have one question. They are gone through in their order, what one takes
    of the question is taken for those behind it too, and rows are made at last: one long choice shortens all rows.
    Else each choice cuts a question of its own.
    """
    question = [len(pieces) for pieces, _ in asked]
    rows = []
    for pieces, _ in choices:
        sizes, size = question if shared else [*question], len(pieces)
        while sum(sizes) + size > most:
            if size > sum(sizes):
                size -= 1
            else:
                sizes[0 if sizes[0] > 1 or len(sizes) == 1 else 1] -= 1
        rows.append((sizes, size))
    return [
        (joined([_first(*pair) for pair in zip(asked, sizes, strict=True)]), _first(choice, size))
        for choice, (sizes, size) in zip(choices, rows, strict=True)
    ]


def _first(text: Tagged, size: int) -> Tagged:
    pieces, regions = text
    return pieces[:size], regions[:size]


def check_fits(asked: Sequence[Tagged], choices: Sequence[Tagged], most: int) -> None:
    """ValueError where a choice, with all that stands before it, has more than `most` pieces."""
    before, longest = sum(len(pieces) for pieces, _ in asked), max(len(pieces) for pieces, _ in choices)
    if before + longest > most:
        raise ValueError(
            f"the text is too long: {before} word pieces before the choices and {longest} in the longest of them, more "
            f"than task.max_pieces = {most}; shorten it"
        )
