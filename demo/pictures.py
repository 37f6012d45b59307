"""The pictures of the report: boxes drawn into JPEGs (data URIs) and charts as inline SVG.

What they show is chosen by demo.report.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from detectors.drawing import BOX_COLOURS, GREEN, OTHERS, RED, data_uri, draw_boxes
from storage.sample import Sample

MOST_BOXES, MOST_NAMES = 12, 6  # drawn in one scene: a network finds up to 100 regions
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
    return data_uri(draw_boxes(sample, boxes))


def draw_answer(sample: Sample, prediction: dict) -> str:
    """The boxes that a prediction is about: the chosen one and, where it is wrong, the one that is meant, among all
    candidates; or the objects that are mentioned. A data URI."""
    right, drawn = prediction["score"] >= 0.5, []
    if "candidates" in prediction:
        drawn = [(box, OTHERS, "") for box in sample.regions.boxes[:MOST_BOXES]]
    for number, one in enumerate(prediction["boxes"]):
        box, name = np.array(one["box"], np.float32), one["name"]
        if "candidates" not in prediction:
            drawn.append((box, BOX_COLOURS[number % len(BOX_COLOURS)], name))
        elif name == prediction["said"]:
            drawn.append((box, GREEN if right else RED, "chosen, right" if right else "chosen"))
        elif not right:
            drawn.append((box, GREEN, "meant"))
    return data_uri(draw_boxes(sample, drawn))


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
