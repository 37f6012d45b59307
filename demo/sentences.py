"""Make sentences about scenes: captions, a text corpus, and expressions that refer to one object.

A caption names each object's colour and shape exactly once, so that a masked word cannot be copied from elsewhere.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from demo.scenes import HEIGHT, WIDTH, Appearance, Scene, SceneObject, choose, count_alike, make_caption_scene

_SIZE_WORDS = {True: ("big", "large"), False: ("small", "little")}
_TEXTURE_WORDS = {True: ("striped",), False: ("plain", "solid")}
_NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LOCATIONS = {
    ("top", "left"): ("in the top left corner", "at the top left"),
    ("top", "middle"): ("at the top", "near the top"),
    ("top", "right"): ("in the top right corner", "at the top right"),
    ("middle", "left"): ("on the left", "on the left side"),
    ("middle", "middle"): ("in the middle", "in the center"),
    ("middle", "right"): ("on the right", "on the right side"),
    ("bottom", "left"): ("in the bottom left corner", "at the bottom left"),
    ("bottom", "middle"): ("at the bottom", "near the bottom"),
    ("bottom", "right"): ("in the bottom right corner", "at the bottom right"),
}


def describe_location(rng: np.random.Generator, obj: SceneObject, scene: Scene) -> str:
    def third(share: float, names: tuple[str, str, str]) -> str:
        return names[0] if share < 0.36 else names[2] if share > 0.64 else names[1]

    row = third(obj.y / HEIGHT, ("top", "middle", "bottom"))
    column = third(obj.x / WIDTH, ("left", "middle", "right"))
    return choose(rng, _LOCATIONS[row, column])


def describe_relation(rng: np.random.Generator, a: SceneObject, b: SceneObject) -> str:
    """Return words for a true relation of `a` to `b`, such as "left of", to put between their names."""
    dx, dy = a.x - b.x, a.y - b.y
    options = []
    if abs(dx) >= abs(dy):
        side = "left" if dx < 0 else "right"
        options += [f"{side} of", f"to the {side} of"]
    if abs(dy) >= abs(dx):
        options += ["above", "over"] if dy < 0 else ["below", "under"]
    if math.hypot(dx, dy) < 1.4 * (a.radius + b.radius):
        options += ["next to", "beside"]
    if a.appearance.big != b.appearance.big:
        options += ["bigger than" if a.appearance.big else "smaller than"]
    return choose(rng, options)


def make_noun_phrase(rng: np.random.Generator, appearance: Appearance) -> str:
    """Return a noun phrase with an article, the colour and shape, and sometimes the size and texture."""
    words = ["a"]
    if rng.random() < 0.35:
        words.append(choose(rng, _SIZE_WORDS[appearance.big]))
    texture = rng.random()
    if texture < 0.35:
        words.append(choose(rng, _TEXTURE_WORDS[appearance.striped]))
    words += [appearance.colour, appearance.shape]
    if texture > 0.9 and appearance.striped:
        words.append("with stripes")
    return " ".join(words)


def make_clauses(rng: np.random.Generator, scene: Scene) -> list[str]:
    """Describe each object in exactly one clause, in random order. A clause may add a place or relate two objects."""
    objects = [scene.objects[i] for i in rng.permutation(len(scene.objects))]
    clauses = []
    while objects:
        obj = objects.pop()
        phrase = make_noun_phrase(rng, obj.appearance)
        if objects and rng.random() < 0.6:
            other = objects.pop()
            clauses.append(f"{phrase} {describe_relation(rng, obj, other)} {make_noun_phrase(rng, other.appearance)}")
        elif rng.random() < 0.75:
            clauses.append(f"{phrase} {describe_location(rng, obj, scene)}")
        else:
            clauses.append(phrase)
    return clauses


def join_clauses(clauses: Sequence[str]) -> str:
    return " and ".join(filter(None, [" , ".join(clauses[:-1]), clauses[-1]]))


def make_caption(rng: np.random.Generator, scene: Scene) -> str:
    """Make one lower-case sentence that names every object once, with words separated by spaces."""
    number = len(scene.objects)
    openings = ("", "", "", "there is ", "a picture of ", "this picture shows ", "we see ", "here is ", "look : ")
    opening = choose(rng, openings)
    if rng.random() < 0.12:
        opening = f"{_NUMBERS[number]} shapes : " if number > 1 else "one shape : "
    ending = (" on a dark background" if scene.dark else " on a light background") if rng.random() < 0.12 else ""
    return opening + join_clauses(make_clauses(rng, scene)) + ending


def make_chain(rng: np.random.Generator, scene: Scene) -> str:
    """Make one long sentence that relates each object to the next."""
    words = [make_noun_phrase(rng, scene.objects[0].appearance), "is"]
    for a, b in itertools.pairwise(scene.objects):
        words += [describe_relation(rng, a, b), make_noun_phrase(rng, b.appearance), ", which is"]
    return " ".join([*words, describe_location(rng, scene.objects[-1], scene)])


def make_summary(rng: np.random.Generator, scene: Scene) -> str:
    """Make a sentence about the whole scene, without colours and shapes."""
    number = len(scene.objects)
    striped = sum(o.appearance.striped for o in scene.objects)
    leftmost = min(scene.objects, key=lambda o: o.x)
    lowest = max(scene.objects, key=lambda o: o.y)
    options = (
        f"{_NUMBERS[striped]} of the {_NUMBERS[number]} shapes {'is' if striped == 1 else 'are'} striped",
        f"the one furthest to the left is {'striped' if leftmost.appearance.striped else 'plain'}",
        f"the lowest one is {'big' if lowest.appearance.big else 'small'}",
        f"the background is {'dark' if scene.dark else 'light'}",
    )
    return choose(rng, options)


def make_document(rng: np.random.Generator, max_objects: int) -> str:
    """Make one line of the text corpus: two or three sentences about scenes that are not drawn.

    The first scene has up to max_objects + 1 objects, more than any caption.
    """
    scene = make_caption_scene(rng, int(rng.integers(2, max_objects + 2)))
    sentences = [make_chain(rng, scene) if rng.random() < 0.4 else make_caption(rng, scene), make_summary(rng, scene)]
    if rng.random() < 0.5:
        another = make_caption_scene(rng, int(rng.integers(1, max_objects + 1)))
        sentences.append(f"in another picture there is {join_clauses(make_clauses(rng, another))}")
    return " . ".join(sentences) + " ."


def make_expression(rng: np.random.Generator, objects: Sequence[Appearance], target: int) -> str:
    """Describe objects[target] uniquely, without location words, which RefCOCO+ forbids."""
    fields = ("colour", "shape", "striped", "big")
    subsets = [
        s for size in (1, 2, 3, 4) for s in itertools.combinations(fields, size) if count_alike(objects, target, s) == 1
    ]
    shortest = [s for s in subsets if len(s) == len(subsets[0])]
    chosen = choose(rng, subsets if rng.random() < 0.3 else shortest)
    return describe_fields(rng, objects[target], chosen)


def describe_fields(rng: np.random.Generator, appearance: Appearance, chosen: Sequence[str]) -> str:
    """Describe an appearance by the fields `chosen` only."""
    words = ["the"] if rng.random() < 0.4 else []
    with_stripes = "striped" in chosen and appearance.striped and rng.random() < 0.3
    if "big" in chosen:
        words.append(choose(rng, _SIZE_WORDS[appearance.big]))
    if "striped" in chosen and not with_stripes:
        words.append(choose(rng, _TEXTURE_WORDS[appearance.striped]))
    if "colour" in chosen:
        words.append(appearance.colour)
    words.append(appearance.shape if "shape" in chosen else choose(rng, ("one", "shape")))
    return " ".join([*words, "with stripes"] if with_stripes else words)
