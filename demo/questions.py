"""Make questions about a scene: VQA questions with answers, and VCR items with four choices each.

Without the image, the answer can only be guessed: the question does not contain it, and the four choices of an item
differ only in a colour.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from demo.scenes import COLOURS, SHAPES, Appearance, choose, count_alike
from vlbert.datasets.vcr import CHOICES

ANNOTATORS = 10  # per VQA question
_DISAGREEING = (0.7, 0.15, 0.1, 0.05)  # probability that none, one, two or three of them give another answer
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")

# A text in VCR's format: words, and lists of the indices of the objects that are referred to.
Tokens = list[str | list[int]]


@dataclass(frozen=True)
class Question:
    """A VQA question with its answers."""

    text: str
    answer: str
    others: tuple[str, ...]  # answers that a careless annotator may give
    question_type: str  # the question's first words, as in VQA
    answer_type: str  # yes/no, number or other


@dataclass(frozen=True)
class Item:
    """A VCR item: a question about how two objects differ, with four answers and four rationales."""

    question: Tokens
    answers: list[Tokens]
    answer: int  # index of the right answer
    rationales: list[Tokens]
    rationale: int  # index of the right rationale


def describe(objects: Sequence[Appearance], target: int, without: str) -> str | None:
    """Describe objects[target] uniquely, without naming the field `without`. Return None if that is impossible."""
    appearance = objects[target]
    fields = [field for field in ("shape", "colour", "striped", "big") if field != without]
    for size in range(1, len(fields) + 1):
        for chosen in itertools.combinations(fields, size):
            if count_alike(objects, target, chosen) == 1:
                words = ["big" if appearance.big else "small"] if "big" in chosen else []
                words += ["striped" if appearance.striped else "plain"] if "striped" in chosen else []
                words += [appearance.colour] if "colour" in chosen else []
                return " ".join([*words, appearance.shape if "shape" in chosen else "one"])
    return None


def ask_colour(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> Question | None:
    words, answer = describe(objects, target, without="colour"), objects[target].colour
    others = tuple(colour for colour in COLOURS if colour != answer)
    return Question(f"What color is the {words}?", answer, others, "what color is the", "other") if words else None


def ask_shape(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> Question | None:
    words, answer = describe(objects, target, without="shape"), objects[target].shape
    others = tuple(shape for shape in SHAPES if shape != answer)
    return Question(f"What shape is the {words}?", answer, others, "what", "other") if words else None


def ask_number(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> Question:
    """Ask how many objects share a random field, such as the colour, with objects[target]. The answer is at least 1."""
    appearance = objects[target]
    field = choose(rng, ("colour", "shape", "striped"))
    count = sum(getattr(other, field) == getattr(appearance, field) for other in objects)
    plural = "crosses" if appearance.shape == "cross" else f"{appearance.shape}s"
    texture = "striped" if appearance.striped else "plain"
    words = {"colour": f"{appearance.colour} shapes", "shape": plural, "striped": f"{texture} shapes"}[field]
    others = (_NUMBERS[count], str(count + 1), str(count - 1))  # the first is also right, but in words
    return Question(f"How many {words} are there?", str(count), others, "how many", answer_type="number")


def ask_presence(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> Question:
    """Ask if there is an object with the colour and shape of objects[target] or, half of the time, one that is absent.

    The absent one shares its colour or shape with objects[target]. Half of the answers are yes.
    """
    appearance, present = objects[target], {(obj.colour, obj.shape) for obj in objects}
    colour, shape = appearance.colour, appearance.shape
    absent = [(colour, other) for other in SHAPES] + [(other, shape) for other in COLOURS]
    absent = [pair for pair in absent if pair not in present]
    ask_present = rng.random() < 0.5
    colour, shape = (colour, shape) if ask_present else choose(rng, absent)
    answer, other = ("yes", "no") if ask_present else ("no", "yes")
    return Question(f"Is there a {colour} {shape}?", answer, (other,), "is there a", answer_type="yes/no")


_KINDS = (ask_colour, ask_colour, ask_shape, ask_number, ask_presence)


def make_questions(rng: np.random.Generator, objects: Sequence[Appearance]) -> list[Question]:
    """Make two questions about colours and one of each other kind, about different objects if there are enough."""
    order, made = rng.permutation(len(objects)).tolist(), {}
    for number, make in enumerate(_KINDS):
        for target in (*order[number % len(order) :], *order[: number % len(order)]):
            question = make(rng, objects, target)
            if question and question.text not in made:
                made[question.text] = question
                break
    return list(made.values())


def sample_answers(rng: np.random.Generator, question: Question) -> list[str]:
    """Sample the answers of ten annotators, of whom at most three do not give the right answer."""
    others = int(rng.choice(len(_DISAGREEING), p=_DISAGREEING))
    answers = [question.answer] * (ANNOTATORS - others) + [choose(rng, question.others) for _ in range(others)]
    return [answers[i] for i in rng.permutation(ANNOTATORS)]


def make_items(rng: np.random.Generator, objects: Sequence[Appearance], most: int) -> list[Item]:
    """Make up to `most` VCR items that ask how one object differs from another. Each has a different first object."""
    pairs = {}
    for first, second in rng.permutation(list(itertools.permutations(range(len(objects)), 2))).tolist():
        if objects[first].colour != objects[second].colour:
            pairs.setdefault(first, second)
    return [make_item(rng, objects, *pair) for pair in list(pairs.items())[:most]]


def make_item(rng: np.random.Generator, objects: Sequence[Appearance], first: int, second: int) -> Item:
    """Make an item whose answers name a colour of the first object, and whose rationales name one of the second.

    The right answer's colour is in no rationale. So the words do not rule out any of the four answers or, given the
    right answer, any of the four rationales.
    """
    answer, other = objects[first].colour, objects[second].colour
    answers = [[[first], "is", colour, "."] for colour in _four_colours(rng, answer, without=())]
    rationales = [["because", [second], "is", colour, "."] for colour in _four_colours(rng, other, without=(answer,))]
    orders = [rng.permutation(CHOICES).tolist() for _ in range(2)]
    answers, rationales = (
        [choices[i] for i in order] for choices, order in zip((answers, rationales), orders, strict=True)
    )
    question = ["how", "does", [first], "differ", "from", [second], "?"]
    return Item(question, answers, orders[0].index(0), rationales, orders[1].index(0))


def _four_colours(rng: np.random.Generator, first: str, without: Sequence[str]) -> list[str]:
    others = [colour for colour in COLOURS if colour not in (first, *without)]
    return [first, *(others[i] for i in rng.permutation(len(others))[: CHOICES - 1])]
