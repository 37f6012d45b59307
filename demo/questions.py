"""Questions about a scene: VQA's questions with their answers, and VCR's items of four choices each.

Without the image one can only guess a colour or a shape: no word of a question tells it, and the four choices of an
item differ in a colour alone.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from demo.scenes import COLOURS, SHAPES, Appearance, alike, choose
from vlbert.datasets.vcr import CHOICES

ANNOTATORS = 10  # of every question of VQA
_DISAGREEING = (0.7, 0.15, 0.1, 0.05)  # how often none, one, two or three of them say something else
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")

# A text as VCR writes it: words, and lists of the objects that are meant, by their numbers.
Tokens = list[str | list[int]]


@dataclass(frozen=True)
class Question:
    """A question of VQA, its right answer, and what a careless annotator may answer."""

    text: str
    answer: str
    others: tuple[str, ...]
    question_type: str  # as the data set names it: the words that the question begins with
    answer_type: str  # yes/no, number or other


@dataclass(frozen=True)
class Item:
    """An item of VCR: a question about one object, four answers and four rationales, and which of them are right."""

    question: Tokens
    answers: list[Tokens]
    answer: int
    rationales: list[Tokens]
    rationale: int


def describe(objects: Sequence[Appearance], target: int, without: str) -> str | None:
    """Words that fit objects[target] alone and do not tell the field `without`; None where there are none."""
    fields = [field for field in ("shape", "colour", "striped", "big") if field != without]
    for size in range(1, len(fields) + 1):
        for chosen in itertools.combinations(fields, size):
            if alike(objects, target, chosen) == 1:
                return _in_words(objects[target], chosen)
    return None


def _in_words(appearance: Appearance, chosen: Sequence[str]) -> str:
    words = ["big" if appearance.big else "small"] if "big" in chosen else []
    words += ["striped" if appearance.striped else "plain"] if "striped" in chosen else []
    words += [appearance.colour] if "colour" in chosen else []
    return " ".join([*words, appearance.shape if "shape" in chosen else "one"])


def about_colour(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> Question | None:
    words, answer = describe(objects, target, without="colour"), objects[target].colour
    others = tuple(colour for colour in COLOURS if colour != answer)
    return words and Question(f"What color is the {words}?", answer, others, "what color is the", answer_type="other")


def about_shape(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> Question | None:
    words, answer = describe(objects, target, without="shape"), objects[target].shape
    others = tuple(shape for shape in SHAPES if shape != answer)
    return words and Question(f"What shape is the {words}?", answer, others, "what", answer_type="other")


def about_number(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> Question:
    """How many are like objects[target] in one field: never none."""
    appearance = objects[target]
    field = choose(rng, ("colour", "shape", "striped"))
    count = sum(getattr(other, field) == getattr(appearance, field) for other in objects)
    plural = "crosses" if appearance.shape == "cross" else f"{appearance.shape}s"
    texture = "striped" if appearance.striped else "plain"
    words = {"colour": f"{appearance.colour} shapes", "shape": plural, "striped": f"{texture} shapes"}[field]
    others = (_NUMBERS[count], str(count + 1), str(count - 1))  # the first is as good
    return Question(f"How many {words} are there?", str(count), others, "how many", answer_type="number")


def about_presence(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> Question:
    """Is there one like objects[target], or an absent one with its colour or shape; half the answers are yes."""
    appearance, there = objects[target], {(one.colour, one.shape) for one in objects}
    colour, shape = appearance.colour, appearance.shape
    absent = [(colour, other) for other in SHAPES] + [(other, shape) for other in COLOURS]
    absent = [pair for pair in absent if pair not in there]
    present = rng.random() < 0.5
    colour, shape = (colour, shape) if present else choose(rng, absent)
    answer, other = ("yes", "no") if present else ("no", "yes")
    return Question(f"Is there a {colour} {shape}?", answer, (other,), "is there a", answer_type="yes/no")


_KINDS = (about_colour, about_colour, about_shape, about_number, about_presence)


def questions(rng: np.random.Generator, objects: Sequence[Appearance]) -> list[Question]:
    """One of each kind, two about colours, each about an object of its own as far as there are so many."""
    order, found = rng.permutation(len(objects)).tolist(), {}
    for number, make in enumerate(_KINDS):
        for target in (*order[number % len(order) :], *order[: number % len(order)]):
            question = make(rng, objects, target)
            if question and question.text not in found:
                found[question.text] = question
                break
    return list(found.values())


def annotated(rng: np.random.Generator, question: Question) -> list[str]:
    """The answers of ten annotators: the right one, but for three of them at most."""
    others = int(rng.choice(len(_DISAGREEING), p=_DISAGREEING))
    answers = [question.answer] * (ANNOTATORS - others) + [choose(rng, question.others) for _ in range(others)]
    return [answers[i] for i in rng.permutation(ANNOTATORS)]


def items(rng: np.random.Generator, objects: Sequence[Appearance], most: int) -> list[Item]:
    """How one object differs from another, of pairs that differ in colour: each about another first object."""
    pairs = {}
    for one, other in rng.permutation(list(itertools.permutations(range(len(objects)), 2))).tolist():
        if objects[one].colour != objects[other].colour:
            pairs.setdefault(one, other)
    return [item(rng, objects, *pair) for pair in list(pairs.items())[:most]]


def item(rng: np.random.Generator, objects: Sequence[Appearance], one: int, other: int) -> Item:
    """Answers tell a colour of the one, rationales a colour of the other that is not the right answer's.

    So words alone leave four choices of an answer, and with the right answer four of a rationale.
    """
    mine, its = objects[one].colour, objects[other].colour
    answers = [[[one], "is", colour, "."] for colour in _four_colours(rng, mine, without=())]
    rationales = [["because", [other], "is", colour, "."] for colour in _four_colours(rng, its, without=(mine,))]
    orders = [rng.permutation(CHOICES).tolist() for _ in range(2)]
    answers, rationales = (
        [choices[i] for i in order] for choices, order in zip((answers, rationales), orders, strict=True)
    )
    question = ["how", "does", [one], "differ", "from", [other], "?"]
    return Item(question, answers, orders[0].index(0), rationales, orders[1].index(0))


def _four_colours(rng: np.random.Generator, first: str, without: Sequence[str]) -> list[str]:
    others = [colour for colour in COLOURS if colour not in (first, *without)]
    return [first, *(others[i] for i in rng.permutation(len(others))[: CHOICES - 1])]
