"""Functions that draw boxes and their names on an image."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from storage.collect.normalise import STORED_FORMATS
from storage.sample import Sample

Colour = tuple[int, int, int]  # red, green, blue
Box = tuple[np.ndarray, Colour, str]  # xyxy, and the colour and the name to draw

IMAGE_SIDE = 480  # longer side of an image for a page, in pixels; the page shows it at about half that size
NAME_SIZE = 20  # font size of the names on the image

GREEN = (27, 175, 122)  # the correct object
RED = (227, 73, 72)  # a wrong choice
OTHERS = (255, 255, 255)  # all other boxes, drawn with thin lines
# Colours of regions by number (see `colour_of`).
BOX_COLOURS = ((42, 120, 214), (235, 104, 52), (27, 175, 122), (232, 123, 164), (74, 58, 167), (237, 161, 0))


def colour_of(region: int) -> Colour:
    """Return the RGB colour of a region's box and name. Regions are numbered from 1; 0 is the whole image."""
    return BOX_COLOURS[(region - 1) % len(BOX_COLOURS)]


def ink_on(colour: Colour) -> Colour:
    """Return black or white, whichever is easier to read on an RGB colour."""
    linear = [(part / 255) ** 2.2 for part in colour]
    return (0, 0, 0) if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.25 else (255, 255, 255)


def draw_boxes(sample: Sample, boxes: Sequence[Box], side: int = IMAGE_SIDE) -> Image.Image:
    """Draw boxes on a copy of a sample's image. The arguments `boxes` and `side` are those of draw_boxes_on."""
    stored = Image.open(io.BytesIO(sample.image), formats=STORED_FORMATS)
    return draw_boxes_on(stored.convert("RGB"), boxes, side)


def draw_boxes_on(image: Image.Image, boxes: Sequence[Box], side: int = IMAGE_SIDE) -> Image.Image:
    """Draw boxes on a resized copy of an RGB image, later boxes on top of earlier ones.

    A box is a tuple (xyxy [4] in pixels of `image`, RGB colour, name). The name "" is not drawn. `side` is the longer
    side of the result, in pixels.
    """
    factor = side / max(image.size)
    width, height = (max(1, round(side * factor)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(NAME_SIZE)
    scaled = [[round(float(number) * factor) for number in box] for box, _, _ in boxes]
    for (x1, y1, x2, y2), (_, colour, _) in zip(scaled, boxes, strict=True):
        line = 2 if colour == OTHERS else 4
        # A dark rim on both sides of the line separates it from any colour of the image.
        for grow, outline, thickness in ((1, (0, 0, 0), line + 2), (0, colour, line)):
            left, right = (min(max(0, x), width - 1) for x in (x1 - grow, x2 + grow))
            top, bottom = (min(max(0, y), height - 1) for y in (y1 - grow, y2 + grow))
            draw.rectangle([left, top, right, bottom], outline=outline, width=thickness)
    for (x1, y1, _, _), (_, colour, name) in zip(scaled, boxes, strict=True):  # last, so that no line crosses a name
        if name:
            length, tall = draw.textlength(name, font) + 12, NAME_SIZE + 6
            left, top = min(max(0, x1 - 1), max(0, width - length)), max(0, y1 - tall - 2)
            draw.rectangle([left, top, left + length, top + tall], fill=colour)
            draw.text((left + 6, top + tall / 2), name, fill=ink_on(colour), font=font, anchor="lm")
    return image


def data_uri(image: Image.Image) -> str:
    """Return the image as a JPEG data URI, for the `src` attribute of an HTML `img`."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
