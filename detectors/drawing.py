"""Draws boxes with names on an image, and lines of text with probabilities below it."""

import base64
import io
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from storage.normalise import STORED_FORMATS
from storage.sample import Sample

IMAGE_SIDE = 480  # pixels of the longer side of an image on a page, which shows it at about half that
NAME_SIZE = 20  # font size of the names on the image
TEXT_SIZE = 18  # font size of the lines below it
BAR = 120  # pixels of a probability of 1

GREEN = (27, 175, 122)  # the correct object
RED = (227, 73, 72)  # a wrong choice
OTHERS = (255, 255, 255)  # all other boxes, drawn with thin lines
# Of regions, by their numbers (`colour_of`).
BOX_COLOURS = ((42, 120, 214), (235, 104, 52), (27, 175, 122), (232, 123, 164), (74, 58, 167), (237, 161, 0))


def colour_of(region: int) -> tuple[int, int, int]:
    """The RGB colour of a region's box, name and lines, by its number from 1; 0 is the whole image."""
    return BOX_COLOURS[(region - 1) % len(BOX_COLOURS)]


def draw_boxes(
    sample: Sample,
    boxes: Sequence[tuple[np.ndarray, tuple[int, int, int], str]],
    side: int = IMAGE_SIDE,
    thin: int = 0,
) -> Image.Image:
    """The sample's image with boxes; arguments as of draw_boxes_on, boxes in pixels of the sample."""
    stored = Image.open(io.BytesIO(sample.image), formats=STORED_FORMATS)
    return draw_boxes_on(stored.convert("RGB"), boxes, side, thin)


def draw_boxes_on(
    image: Image.Image,
    boxes: Sequence[tuple[np.ndarray, tuple[int, int, int], str]],
    side: int = IMAGE_SIDE,
    thin: int = 0,
) -> Image.Image:
    """An RGB image with boxes, later ones on top of earlier ones.

    boxes: (box [4], xyxy in pixels of the image; RGB colour; name or ""). side: pixels of the longer side of the
    result. thin: the first `thin` boxes get thin lines.
    """
    factor = side / max(image.size)
    width, height = (max(1, round(side * factor)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(NAME_SIZE)
    scaled = [[round(float(number) * factor) for number in box] for box, _, _ in boxes]
    for index, ((x1, y1, x2, y2), (_, colour, _)) in enumerate(zip(scaled, boxes, strict=True)):
        line = 2 if colour == OTHERS or index < thin else 4
        # A dark rim on both sides separates the line from any colour below it.
        for grow, outline, thickness in ((1, (0, 0, 0), line + 2), (0, colour, line)):
            left, right = (min(max(0, x), width - 1) for x in (x1 - grow, x2 + grow))
            top, bottom = (min(max(0, y), height - 1) for y in (y1 - grow, y2 + grow))
            draw.rectangle([left, top, right, bottom], outline=outline, width=thickness)
    taken = []
    for box, (_, colour, name) in zip(scaled, boxes, strict=True):  # after all boxes: no line crosses a name
        if name:
            taken.append(_name_position(box, draw.textlength(name, font) + 12, width, height, taken))
            left, top, right, bottom = taken[-1]
            draw.rectangle(taken[-1], fill=colour)
            ink = (255, 255, 255) if sum(colour) < 420 else (0, 0, 0)
            draw.text((left + 6, (top + bottom) / 2), name, fill=ink, font=font, anchor="lm")
    return image


def write_below(image: Image.Image, lines: Sequence[tuple[str, float | None]]) -> Image.Image:
    """The image with lines of text below; a line's probability, where it has one, is shown as a number and a bar."""
    font, margin, line_height = ImageFont.load_default(TEXT_SIZE), 12, TEXT_SIZE + 8
    width = max(image.width, 4 * BAR)
    measure = ImageDraw.Draw(image).textlength
    rows = []  # (text that fits, its indent in pixels, probability)
    for text, probability in lines:
        indent, right = (0, 0) if probability is None else (margin, BAR + 60)
        room = width - 2 * margin - indent - right
        parts = _wrapped(text, lambda part, room=room: measure(part, font) <= room)
        rows += [(part, indent, None if index else probability) for index, part in enumerate(parts)]
    page = Image.new("RGB", (width, image.height + 2 * margin + line_height * len(rows)), (255, 255, 255))
    page.paste(image, ((width - image.width) // 2, 0))
    draw = ImageDraw.Draw(page)
    for index, (text, indent, probability) in enumerate(rows):
        middle = image.height + margin + line_height * index + line_height / 2
        draw.text((margin + indent, middle), text, fill=(0, 0, 0), font=font, anchor="lm")
        if probability is not None:
            left, half = width - margin - BAR, line_height / 2 - 4
            draw.text((left - 8, middle), f"{probability:.3f}", fill=(90, 90, 90), font=font, anchor="rm")
            draw.rectangle([left, middle - half, left + BAR, middle + half], fill=(235, 235, 235))
            draw.rectangle([left, middle - half, left + BAR * probability, middle + half], fill=BOX_COLOURS[0])
    return page


def _wrapped(text: str, fits: Callable[[str], bool]) -> list[str]:
    """The text in lines that fit, broken between words; a word that is too long by itself is broken, too."""
    lines = [""]
    for word in text.split():
        if lines[-1] and not fits(f"{lines[-1]} {word}"):
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
        while not fits(lines[-1]) and len(lines[-1]) > 1:
            size = next(n for n in range(len(lines[-1]) - 1, 0, -1) if n == 1 or fits(lines[-1][:n]))
            lines[-1:] = [lines[-1][:size], lines[-1][size:]]
    return lines


def data_uri(image: Image.Image) -> str:
    """The image as a JPEG, for the src of an HTML img."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _name_position(box: Sequence[int], length: float, width: int, height: int, taken: Sequence[tuple]) -> tuple:
    """The rectangle (xyxy) of a box's name: above, below or inside the box, the first that lies in the image and
    overlaps no other name."""
    x1, y1, _, y2 = box
    left, tall = min(max(0, x1 - 1), max(0, width - length)), NAME_SIZE + 6
    positions = [(left, top, left + length, top + tall) for top in (y1 - tall - 2, y2 + 2, y1)]

    def free(one: tuple) -> bool:
        clear = all(one[0] >= t[2] or one[2] <= t[0] or one[1] >= t[3] or one[3] <= t[1] for t in taken)
        return clear and one[1] >= 0 and one[3] <= height

    return next((one for one in positions if free(one)), positions[-1])
