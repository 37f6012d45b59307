"""Boxes and their names, drawn into a picture, and what is said about it, written below."""

import base64
import io
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from storage.normalise import STORED_FORMATS
from storage.sample import Sample

PICTURE_SIDE = 480  # pixels of the longer side of a picture on a page, which shows it at about half that
NAME_SIZE = 20  # pixels of the names drawn into it
TEXT_SIZE = 18  # pixels of what is written below
BAR = 120  # pixels of a probability of 1

GREEN = (27, 175, 122)  # the object that is meant
RED = (227, 73, 72)  # a wrong choice
OTHERS = (255, 255, 255)  # the rest
# Of regions, by their numbers (`colour_of`).
BOX_COLOURS = ((42, 120, 214), (235, 104, 52), (27, 175, 122), (232, 123, 164), (74, 58, 167), (237, 161, 0))


def colour_of(region: int) -> tuple[int, int, int]:
    """The colour of a region's box, name and lines, by its number from 1; 0 is the whole image."""
    return BOX_COLOURS[(region - 1) % len(BOX_COLOURS)]


def draw_boxes(
    sample: Sample,
    boxes: Sequence[tuple[np.ndarray, tuple[int, int, int], str]],
    side: int = PICTURE_SIDE,
    thin: int = 0,
) -> Image.Image:
    """The picture, its longer side `side` pixels, with (box in its pixels, colour, name or "") drawn on, the last on
    top; the first `thin` of them with thin lines."""
    factor = side / max(sample.width, sample.height)
    width, height = (max(1, round(side * factor)) for side in (sample.width, sample.height))
    stored = Image.open(io.BytesIO(sample.image), formats=STORED_FORMATS)
    picture = stored.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(NAME_SIZE)
    scaled = [[round(float(number) * factor) for number in box] for box, _, _ in boxes]
    for place, ((x1, y1, x2, y2), (_, colour, _)) in enumerate(zip(scaled, boxes, strict=True)):
        line = 2 if colour == OTHERS or place < thin else 4
        # A dark rim on both sides parts the line from any colour below it.
        for grow, outline, thickness in ((1, (0, 0, 0), line + 2), (0, colour, line)):
            left, right = (min(max(0, x), width - 1) for x in (x1 - grow, x2 + grow))
            top, bottom = (min(max(0, y), height - 1) for y in (y1 - grow, y2 + grow))
            draw.rectangle([left, top, right, bottom], outline=outline, width=thickness)
    taken = []
    for box, (_, colour, name) in zip(scaled, boxes, strict=True):  # after all boxes: no line crosses a name
        if name:
            taken.append(_name_place(box, draw.textlength(name, font) + 12, width, height, taken))
            left, top, right, bottom = taken[-1]
            draw.rectangle(taken[-1], fill=colour)
            ink = (255, 255, 255) if sum(colour) < 420 else (0, 0, 0)
            draw.text((left + 6, (top + bottom) / 2), name, fill=ink, font=font, anchor="lm")
    return picture


def write_below(picture: Image.Image, lines: Sequence[tuple[str, float | None]]) -> Image.Image:
    """The picture with lines of text under it, each with its probability as a number and a bar, where it has one."""
    font, margin, tall = ImageFont.load_default(TEXT_SIZE), 12, TEXT_SIZE + 8
    width = max(picture.width, 4 * BAR)
    measure = ImageDraw.Draw(picture).textlength
    written = []  # (text, no wider than there is room, pixels from the left, probability)
    for text, probability in lines:
        inset, right = (0, 0) if probability is None else (margin, BAR + 60)
        room = width - 2 * margin - inset - right
        parts = _wrapped(text, lambda part, room=room: measure(part, font) <= room)
        written += [(part, inset, None if place else probability) for place, part in enumerate(parts)]
    whole = Image.new("RGB", (width, picture.height + 2 * margin + tall * len(written)), (255, 255, 255))
    whole.paste(picture, ((width - picture.width) // 2, 0))
    draw = ImageDraw.Draw(whole)
    for place, (text, inset, probability) in enumerate(written):
        middle = picture.height + margin + tall * place + tall / 2
        draw.text((margin + inset, middle), text, fill=(0, 0, 0), font=font, anchor="lm")
        if probability is not None:
            left, half = width - margin - BAR, tall / 2 - 4
            draw.text((left - 8, middle), f"{probability:.3f}", fill=(90, 90, 90), font=font, anchor="rm")
            draw.rectangle([left, middle - half, left + BAR, middle + half], fill=(235, 235, 235))
            draw.rectangle([left, middle - half, left + BAR * probability, middle + half], fill=BOX_COLOURS[0])
    return whole


def _wrapped(text: str, fits: Callable[[str], bool]) -> list[str]:
    """The text in lines that fit, cut between words, and within a word that is too long by itself."""
    lines = [""]
    for word in text.split():
        if lines[-1] and not fits(f"{lines[-1]} {word}"):
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
        while not fits(lines[-1]) and len(lines[-1]) > 1:
            size = next(n for n in range(len(lines[-1]) - 1, 0, -1) if n == 1 or fits(lines[-1][:n]))
            lines[-1:] = [lines[-1][:size], lines[-1][size:]]
    return lines


def data_uri(picture: Image.Image) -> str:
    """A JPEG for the src of an img."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _name_place(box: Sequence[int], length: float, width: int, height: int, taken: Sequence[tuple]) -> tuple:
    """Where the name of a box goes: above, below or inside it, the first that is in the picture and meets no other."""
    x1, y1, _, y2 = box
    left, tall = min(max(0, x1 - 1), max(0, width - length)), NAME_SIZE + 6
    places = [(left, top, left + length, top + tall) for top in (y1 - tall - 2, y2 + 2, y1)]

    def free(place: tuple) -> bool:
        clear = all(place[0] >= t[2] or place[2] <= t[0] or place[1] >= t[3] or place[3] <= t[1] for t in taken)
        return clear and place[1] >= 0 and place[3] <= height

    return next((place for place in places if free(place)), places[-1])
