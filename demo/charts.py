"""Line charts of the report: where their lines, ticks and words stand in an SVG, whose colours the page sets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 360, 212  # of the SVG, with its axes at the left and below
LEFT, RIGHT, TOP, BOTTOM = 34, 348, 8, 178  # of the part between the axes


@dataclass(frozen=True)
class Line:
    """points: (step, value); colour: a class of the page, whose "muted" is dashed."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def line(name: str, colour: str, rows: Sequence[dict], metric: str) -> Line:
    """The values of `metric` in the lines of metrics.jsonl that have one."""
    return Line(name, colour, [(row["step"], row[metric]) for row in rows if metric in row])


def chart(title: str, unit: str, lines: Sequence[Line]) -> dict[str, Any]:
    """What the page draws of lines over optimizer steps. A unit that begins with % takes shares, and ends at 100."""
    shares, lines = unit.startswith("%"), [one for one in lines if one.points]
    steps, values = zip(*(point for one in lines for point in one.points), strict=True)
    across, up = ticks(max(steps)), ticks(1.0 if shares else max(values))
    last, highest = max(*steps, across[-1]) or 1, max(*values, up[-1]) or 1

    def x(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / last, 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * value / highest, 1)

    return {
        "title": title,
        "unit": unit,
        "x_ticks": [(x(step), f"{step:g}") for step in across],
        "y_ticks": [(y(value), f"{100 * value:.0f}" if shares else f"{value:g}") for value in up],
        "lines": [
            {
                "name": one.name,
                "colour": one.colour,
                "value": f"{100 * one.points[-1][1]:.0f}%" if shares else f"{one.points[-1][1]:.2f}",
                "points": [(x(step), y(value)) for step, value in one.points],
            }
            for one in lines
        ],
    }


def ticks(most: float) -> list[float]:
    """0 and up to five further round numbers, equally far apart, the last of them not above `most`."""
    step = 10 ** math.floor(math.log10(most or 1))
    step = next(size * step for size in (0.2, 0.5, 1, 2) if most / (size * step) < 6)
    return [round(number * step, 10) for number in range(int(most / step + 1e-9) + 1)]
