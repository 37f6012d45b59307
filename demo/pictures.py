"""The pictures of the report: boxes drawn into JPEGs (data URIs) and charts as inline SVG.

What they show is chosen by demo.report.
"""

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from storage.sample import Sample
from vlbert.boxes import iou

MOST_BOXES, MOST_NAMES = 12, 6  # drawn in one scene: a network finds up to 100 regions
PICTURE_SIDE = 480  # pixels of the longer side of a picture on the page, which shows it at about half that
NAME_SIZE = 20  # pixels of the names drawn into it

GREEN = (27, 175, 122)  # the object that is meant
RED = (227, 73, 72)  # a wrong choice
OTHERS = (255, 255, 255)  # the rest
BOX_COLOURS = ((42, 120, 214), (235, 104, 52), (27, 175, 122), (232, 123, 164), (74, 58, 167), (237, 161, 0))
# Colours of lines in charts: matplotlib draws with these, the page replaces them by CSS variables (light and dark).
_GRID = "#010101"
_CHART_COLOURS = {_GRID: "grid"}
_CHART_COLOURS |= {f"#0{i}0{i}0{i}": name for i, name in enumerate(("blue", "orange", "aqua", "violet", "muted"), 2)}
_BY_NAME = {name: colour for colour, name in _CHART_COLOURS.items()}


class NotThereYet(Exception):
    """What a picture or part of the page needs is missing; the message says what and, where known, what makes it."""


# --- boxes ------------------------------------------------------------------------------------------------------------


def draw_regions(sample: Sample, names: Sequence[str]) -> str:
    """The first regions in turning colours, the very first with their names (one per region); a data URI."""
    boxes = [
        (box, BOX_COLOURS[i % len(BOX_COLOURS)], names[i] if i < MOST_NAMES else "")
        for i, box in enumerate(sample.regions.boxes[:MOST_BOXES])
    ]
    return draw_boxes(sample, boxes)


def draw_choice(sample: Sample, meant: Sequence[float], size: Sequence[int], prediction: dict, run: str) -> str:
    """All candidates, the object that is meant and, where it is another, the chosen one; a data URI."""
    scale = np.array([sample.width / size[0], sample.height / size[1]] * 2)
    meant = np.array(meant) * scale
    boxes, number = sample.regions.boxes, prediction["region"]
    if number >= len(boxes):
        raise NotThereYet(f"run {run} chose region {number} of {sample.key}, which has {len(boxes)}: other regions")
    chosen = boxes[number] if number >= 0 else np.array([0, 0, sample.width, sample.height], np.float32)
    overlap = float(iou(chosen[None], meant[None])[0, 0])
    if abs(overlap - prediction["iou"]) > 0.05:  # resizing rounds; other regions differ by more
        raise NotThereYet(
            f"region {number} of {sample.key} overlaps the object by {overlap:.2f}, run {run} says "
            f"{prediction['iou']:.2f}: the run read other regions"
        )
    drawn = [(box, OTHERS, "") for i, box in enumerate(boxes[:MOST_BOXES]) if i != number]
    if prediction["iou"] >= 0.5:
        return draw_boxes(sample, [*drawn, (chosen, GREEN, "chosen, right")])
    return draw_boxes(sample, [*drawn, (meant, GREEN, "meant"), (chosen, RED, "chosen")])


def draw_boxes(sample: Sample, boxes: Sequence[tuple[np.ndarray, tuple[int, int, int], str]]) -> str:
    """The picture with (box in its pixels, colour, name or "") drawn on, the last on top; a JPEG as a data URI."""
    factor = PICTURE_SIDE / max(sample.width, sample.height)
    width, height = (max(1, round(side * factor)) for side in (sample.width, sample.height))
    picture = Image.open(io.BytesIO(sample.image)).convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(NAME_SIZE)
    scaled = [[round(float(number) * factor) for number in box] for box, _, _ in boxes]
    for (x1, y1, x2, y2), (_, colour, _) in zip(scaled, boxes, strict=True):
        line = 2 if colour == OTHERS else 4
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


# --- charts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line of a chart: points (step, value); `value` is what the legend says beside the name."""

    name: str
    colour: str
    points: list[tuple[float, float]]
    value: str = ""
    dashed: bool = False


def line(name: str, colour: str, values: Sequence[dict], metric: str, form: str) -> Line:
    points = [(value["step"], value[metric]) for value in values if metric in value]
    return Line(name, colour, points, form.format(points[-1][1]) if points else "")


def chart(title: str, lines: Sequence[Line], unit: str) -> dict:
    """Inline SVG whose colours are CSS variables, with what the page says beside it; `%` in `unit` means shares."""
    lines = [one for one in lines if one.points]
    if not lines:
        raise NotThereYet(f"no values for the chart {title!r} are written")
    style = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8.5}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5, 2.9), layout="constrained")
        axes = figure.add_subplot()
        for one in lines:
            steps, values = np.array(one.points, float).T
            markers = {"marker": "o", "markersize": 3.5} if len(steps) < 15 and not one.dashed else {}
            values = 100 * values if "%" in unit else values
            axes.plot(steps, values, "--" if one.dashed else "-", color=_BY_NAME[one.colour], linewidth=1.8, **markers)
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(unit)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0, top=100 if "%" in unit else None)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.tick_params(length=0)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(_GRID)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return {"title": title, "svg": Markup(_themed(file.getvalue(), title)), "lines": lines}


def _themed(svg: str, title: str) -> str:
    """matplotlib's SVG for use inside HTML: no prolog, no fixed size, ids of its own, colours by CSS variable."""
    svg = svg[svg.index("<svg") :]
    size = re.search(r'viewBox="[^"]+"', svg)[0]
    svg = re.sub(r"<svg[^>]*>", f'<svg {size} aria-hidden="true">', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL).replace("xlink:href", "href")
    prefix = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    return re.sub(r"#(0[1-6])\1\1", lambda found: f"var(--{_CHART_COLOURS[found[0]]})", svg)
