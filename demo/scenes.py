"""Arrange scenes of coloured shapes, and draw them as pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

COLOURS = {  # no name begins with a vowel: "an" would reveal the colour
    "red": (212, 42, 44),
    "yellow": (246, 208, 40),
    "green": (44, 162, 74),
    "blue": (46, 98, 218),
    "purple": (148, 62, 186),
    "white": (244, 244, 240),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")

WIDTH, HEIGHT = 224, 168  # pixels of every image
SUPERSAMPLING = 4  # outlines are rasterised at this multiple of the image's resolution
SMALL, BIG = (16.0, 20.0), (26.0, 31.0)  # ranges of uniform radii in pixels; the gap makes the difference visible
CLOSEST = 0.78  # minimum distance of two centres / sum of the radii: below 1 they may overlap, at 0.78 never by half
SHAPE_SCALE = {"circle": 0.94, "square": 1.2, "triangle": 1.16, "star": 1.1, "cross": 1.06, "ring": 1.0}
RING_HOLE = 0.52  # radius of a ring's hole / radius of the ring
MAX_TURN = {"circle": 0, "square": 14, "triangle": 16, "star": 18, "cross": 14, "ring": 0}  # degrees


@dataclass(frozen=True)
class Appearance:
    """Visual properties of an object, without its position."""

    colour: str
    shape: str
    striped: bool
    big: bool

    @property
    def category(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class SceneObject:
    """An object at a position in the image, in pixels with y downwards. Angles are in radians."""

    appearance: Appearance
    x: float
    y: float
    radius: float
    turn: float
    stripe_angle: float


@dataclass(frozen=True)
class Scene:
    """A scene: objects from back to front, on a dark or light background."""

    objects: tuple[SceneObject, ...]
    dark: bool


def choose(rng: np.random.Generator, options: Sequence):
    """Choose one of `options` uniformly. Generator.choice is slower, and would convert it to a numpy value."""
    return options[int(rng.integers(len(options)))]


def draw_appearance(rng: np.random.Generator, colours: Sequence[str], shapes: Sequence[str]) -> Appearance:
    return Appearance(choose(rng, colours), choose(rng, shapes), striped=rng.random() < 0.5, big=rng.random() < 0.5)


def arrange(rng: np.random.Generator, appearances: Sequence[Appearance]) -> Scene:
    """Place objects with these appearances inside the image, so that none hides half of another."""
    while True:
        objects = []
        for appearance in appearances:
            for _ in range(30):
                radius = rng.uniform(*(BIG if appearance.big else SMALL))
                margin = radius * SHAPE_SCALE[appearance.shape] + 2
                x, y = rng.uniform(margin, WIDTH - margin), rng.uniform(margin, HEIGHT - margin)
                if all(math.hypot(x - o.x, y - o.y) >= CLOSEST * (radius + o.radius) for o in objects):
                    turn = math.radians(MAX_TURN[appearance.shape]) * rng.uniform(-1, 1)
                    objects.append(SceneObject(appearance, x, y, radius, turn, rng.uniform(0, math.pi)))
                    break
        if len(objects) == len(appearances):
            return Scene(tuple(objects), bool(rng.random() < 0.5))


def make_caption_scene(rng: np.random.Generator, number: int) -> Scene:
    """Make a scene of `number` objects with independent random colours and shapes."""
    return arrange(rng, [draw_appearance(rng, tuple(COLOURS), SHAPES) for _ in range(number)])


def draw_task_appearances(rng: np.random.Generator, number: int) -> list[Appearance]:
    """Sample `number` different appearances, each of which shares its colour or shape with another.

    RefCOCO+ targets are chosen afterwards, so that without the expression, all objects are equally likely.
    """
    while True:
        colours = [list(COLOURS)[i] for i in rng.permutation(len(COLOURS))[: 2 + number // 5]]
        shapes = [SHAPES[i] for i in rng.permutation(len(SHAPES))[: 2 + number // 4]]
        drawn = [draw_appearance(rng, colours, shapes) for _ in range(number)]
        shared = all(any(a is not b and (a.colour == b.colour or a.shape == b.shape) for b in drawn) for a in drawn)
        if len(set(drawn)) == number and shared:
            return drawn


def count_alike(objects: Sequence[Appearance], target: int, fields: Sequence[str]) -> int:
    """Return the number of objects, including objects[target], that equal objects[target] in all `fields`."""
    return sum(all(getattr(obj, f) == getattr(objects[target], f) for f in fields) for obj in objects)


def outline(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape's outer edge around (0, 0), with y downwards. The farthest are at distance 1."""
    if shape in ("circle", "ring"):
        return [(math.cos(t), math.sin(t)) for t in np.linspace(0, 2 * math.pi, 72, endpoint=False)]
    if shape == "cross":
        arm = 0.34
        quarter = [(arm, -0.94), (arm, -arm), (0.94, -arm)]
        turns = [(1, 0), (0, 1), (-1, 0), (0, -1)]
        return [(x * c - y * s, x * s + y * c) for c, s in turns for x, y in quarter]
    corners = {"square": 4, "triangle": 3, "star": 10}[shape]
    start = -math.pi / 4 if shape == "square" else -math.pi / 2
    lengths = [0.44 if shape == "star" and i % 2 else 1.0 for i in range(corners)]
    angles = [start + 2 * math.pi * i / corners for i in range(corners)]
    return [(r * math.cos(t), r * math.sin(t)) for r, t in zip(lengths, angles, strict=True)]


def rasterise(obj: SceneObject) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Rasterise an object into a patch of P x P pixels.

    Returns the patch's left and top pixel in the image, and the coverage of the object and of its dark rim as float32
    [P, P] in 0..1.
    """
    size = obj.radius * SHAPE_SCALE[obj.appearance.shape]
    patch = 2 * math.ceil(size + 2) + 1
    left, top = math.floor(obj.x) - patch // 2, math.floor(obj.y) - patch // 2
    cos, sin = math.cos(obj.turn), math.sin(obj.turn)

    def corners(scale: float) -> list[tuple[float, float]]:
        points = [(x * cos - y * sin, x * sin + y * cos) for x, y in outline(obj.appearance.shape)]
        return [
            ((x * scale + obj.x - left) * SUPERSAMPLING, (y * scale + obj.y - top) * SUPERSAMPLING) for x, y in points
        ]

    inside = Image.new("L", (patch * SUPERSAMPLING, patch * SUPERSAMPLING))
    rim = Image.new("L", inside.size)
    pen_inside, pen_rim = ImageDraw.Draw(inside), ImageDraw.Draw(rim)
    edges = [size] + ([RING_HOLE * size] if obj.appearance.shape == "ring" else [])
    for edge, fill in zip(edges, (255, 0), strict=False):
        points = corners(edge)
        pen_inside.polygon(points, fill=fill)
        pen_rim.line([*points, *points[:2]], fill=255, width=3 * SUPERSAMPLING, joint="curve")
    alpha = np.asarray(inside.reduce(SUPERSAMPLING), np.float32) / 255
    return left, top, alpha, np.asarray(rim.reduce(SUPERSAMPLING), np.float32) / 255


def draw_background(rng: np.random.Generator, scene: Scene) -> np.ndarray:
    """Return a muted gradient with soft clouds, darker or lighter than mid-grey, as float32 [H, W, 3] in 0..255."""
    level = rng.uniform(58, 92) if scene.dark else rng.uniform(150, 184)
    ends = level + rng.uniform(-20, 20, (2, 1)) + rng.uniform(-18, 18, (2, 3))
    angle = rng.uniform(0, 2 * math.pi)
    y, x = np.mgrid[-0.5 : 0.5 : HEIGHT * 1j, -0.5 : 0.5 : WIDTH * 1j].astype(np.float32)
    share = np.clip(0.5 + 0.75 * (x * math.cos(angle) + y * math.sin(angle)), 0, 1)[..., None]
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8), dtype=np.uint8))
    clouds = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
    return (ends[0] * (1 - share) + ends[1] * share + (clouds[..., None] - 128) / 12).astype(np.float32)


def draw_scene(rng: np.random.Generator, scene: Scene) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw a scene. Return the image, uint8 [H, W, 3], and a mask of each object's visible pixels, bool [H, W]."""
    canvas = draw_background(rng, scene)
    visible = []
    for obj in scene.objects:
        left, top, alpha, rim = rasterise(obj)
        shadow = Image.fromarray((alpha * 255).astype(np.uint8)).filter(ImageFilter.BoxBlur(2))
        blend(canvas, left + 2, top + 3, np.asarray(shadow, np.float32) / 255 * 0.35, np.zeros(3, np.float32))
        blend(canvas, left, top, alpha, paint(rng, obj, rim))
        mask = np.zeros(canvas.shape[:2], bool)
        # `arrange` keeps objects inside the image: only shadows and empty margins of the patch can cross the edge.
        rows, columns, part = clip_patch(canvas.shape, left, top, alpha)
        mask[rows, columns] = part >= 0.5
        visible = [pixels & ~mask for pixels in visible] + [mask]
    canvas += rng.normal(0, 4, canvas.shape[:2]).astype(np.float32)[..., None]
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8), visible


def paint(rng: np.random.Generator, obj: SceneObject, rim: np.ndarray) -> np.ndarray:
    """Return the object's colours over its patch, lit from above, with stripes and rim, as float32 [P, P, 3]."""
    base = np.array(COLOURS[obj.appearance.colour], np.float32) * np.float32(rng.uniform(0.93, 1.03))
    size = len(rim)
    y, x = np.mgrid[:size, :size].astype(np.float32) - size / 2
    light = 1.04 - 0.12 * (y + 0.5 * x) / size
    if obj.appearance.striped:
        period = 9.0 if obj.appearance.big else 7.5  # pixels: at least four stripes on the smallest object
        wave = np.sin((x * math.cos(obj.stripe_angle) + y * math.sin(obj.stripe_angle)) * (2 * math.pi / period))
        light *= 1 - 0.44 * np.clip(0.5 + 1.6 * wave, 0, 1)
    light *= 1 - 0.45 * rim
    return np.clip(base * light[..., None], 0, 255)


def clip_patch(shape: tuple[int, ...], left: int, top: int, patch: np.ndarray) -> tuple[slice, slice, np.ndarray]:
    """Return the image's rows and columns that the patch covers, and the part of the patch that is in the image."""
    rows = slice(max(top, 0), min(top + len(patch), shape[0]))
    columns = slice(max(left, 0), min(left + patch.shape[1], shape[1]))
    return rows, columns, patch[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]


def blend(canvas: np.ndarray, left: int, top: int, alpha: np.ndarray, colour: np.ndarray) -> None:
    """Blend `colour`, [3] or [P, P, 3], into the canvas in place, with opacity `alpha`, [P, P]."""
    rows, columns, part = clip_patch(canvas.shape, left, top, alpha)
    if colour.ndim == 3:
        colour = clip_patch(canvas.shape, left, top, colour)[2]
    canvas[rows, columns] += part[..., None] * (colour - canvas[rows, columns])
