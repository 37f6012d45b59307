"""Draws boxes with names on an image, and lines of text with probabilities below it."""

import base64
import io
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from storage.collect.normalise import STORED_FORMATS
from storage.sample import Sample

IMAGE_SIDE = 480  # pixels of the longer side of an image on a page, which shows it at about half that
NAME_SIZE = 20  # font size of the names on the image
TEXT_SIZE = 18  # font size of the lines below it
GAP = 10  # pixels above a line of text that heads others

GREEN = (27, 175, 122)  # the correct object
RED = (227, 73, 72)  # a wrong choice
OTHERS = (255, 255, 255)  # all other boxes, drawn with thin lines
_BAR = (196, 218, 245)  # of a probability
_HEADING = (85, 84, 78)  # of a text that heads lines, but for the first
# Of regions, by their numbers (`colour_of`).
BOX_COLOURS = ((42, 120, 214), (235, 104, 52), (27, 175, 122), (232, 123, 164), (74, 58, 167), (237, 161, 0))


def colour_of(region: int) -> tuple[int, int, int]:
    """The RGB colour of a region's box, name and lines, by its number from 1; 0 is the whole image."""
    return BOX_COLOURS[(region - 1) % len(BOX_COLOURS)]


def ink_on(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """White or black, whichever is easier to read on an RGB colour."""
    linear = [(part / 255) ** 2.2 for part in colour]
    return (0, 0, 0) if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.25 else (255, 255, 255)


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
            draw.text((left + 6, (top + bottom) / 2), name, fill=ink_on(colour), font=font, anchor="lm")
    return image


def write_below(image: Image.Image, lines: Sequence[tuple[str, float | None]]) -> Image.Image:
    """The image with lines of text below. A line's probability, where it has one, is the number at its end and the
    length of the bar behind it; a line without one heads those below it."""
    font, margin, line_height = ImageFont.load_default(TEXT_SIZE), 12, TEXT_SIZE + 10
    width = max(image.width, 480)
    inner = width - 2 * margin
    measure = ImageDraw.Draw(image).textlength
    rows = []  # (text that fits, its probability, whether it heads others, pixels from the top)
    top = image.height + margin
    for number, (text, probability) in enumerate(lines):
        heads = probability is None
        top += GAP if heads and number and lines[number - 1][1] is not None else 0
        room = inner if heads else inner - 80
        for index, part in enumerate(_wrapped(text, lambda part, room=room: measure(part, font) <= room)):
            rows.append((part, None if index else probability, heads, top))
            top += line_height
    page = Image.new("RGB", (width, top + margin), (255, 255, 255))
    page.paste(image, ((width - image.width) // 2, 0))
    draw = ImageDraw.Draw(page)
    for text, probability, heads, top in rows:
        middle = top + line_height / 2
        if probability is not None:
            draw.rounded_rectangle(
                [margin, top + 1, margin + max(3, inner * probability), top + line_height - 2], 4, fill=_BAR
            )
            draw.text((width - margin - 6, middle), f"{probability:.3f}", fill=(0, 0, 0), font=font, anchor="rm")
        ink = _HEADING if heads and top > image.height + margin else (0, 0, 0)
        draw.text((margin if heads else margin + 8, middle), text, fill=ink, font=font, anchor="lm")
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
