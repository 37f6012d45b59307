"""The page of an evaluation: its numbers beside the paper's, and the worst and the best samples, drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from detectors.drawing import BOX_COLOURS, GREEN, RED, data_uri, draw_boxes
from storage.sample import Sample
from vlbert.evaluation.results import SplitPredictions, warnings

_DRAWN = 12  # samples of each kind
Place = tuple[int, int]  # which of the checkpoints, which of its rows


def page(summary: dict[str, Any], predicted: Sequence[SplitPredictions]) -> bytes:
    """index.html, with all images in it."""
    worst, best = worst_and_best(predicted)
    galleries = [
        (title, [_drawn(predicted, place) for place in of]) for title, of in (("Worst", worst), ("Best", best))
    ]
    whole, parts = [], []
    for name, value in summary["metrics"].items():
        (parts if "/" in name else whole).append((name, value))
    values = {"summary": summary, "warnings": warnings(summary), "galleries": galleries, "whole": whole, "parts": parts}
    return render(Path(__file__).parent / "results.html.j2", values).encode()


def render(template: Path, values: dict[str, Any], **filters: Any) -> str:
    """The page of a template that extends page.html.j2; every value is escaped, and one that is missing is an error."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(values)


def draw_answer(sample: Sample, row: dict[str, Any]) -> str:
    """The image with the boxes of a prediction as the src of an img.

    A chosen region is green where it is right, and red where it is wrong: then the true box is green. Boxes that are no
    choice (objects that a text mentions) have turning colours.
    """
    right, drawn = (row["score"] or 0) >= 0.5, []
    for number, one in enumerate(row["boxes"]):
        name, colour = one["name"], BOX_COLOURS[number % len(BOX_COLOURS)]
        if name == "ground truth" and right:
            continue  # the chosen box is good enough
        if row["score"] is not None and name in (row["answer"], "ground truth"):
            colour = GREEN if right or name == "ground truth" else RED
        drawn.append((np.array(one["box"], np.float32), colour, name))
    return data_uri(draw_boxes(sample, drawn))


def worst_and_best(predicted: Sequence[SplitPredictions], count: int = _DRAWN) -> tuple[list[Place], list[Place]]:
    """The rows whose answers are surest and wrong, and those that are surest and right: no row is in both. A split
    without truths has none."""
    places = [(number, row) for number, one in enumerate(predicted) for row in range(len(one.rows))]
    scored = [place for place in places if _row(predicted, place)["score"] is not None]

    def worth(place: Place) -> float:
        row = _row(predicted, place)
        return (2 * row["score"] - 1) * row["probability"]

    ordered = sorted(scored, key=worth)
    half = (len(ordered) + 1) // 2
    return ordered[:half][:count], ordered[half:][::-1][:count]


def _row(predicted: Sequence[SplitPredictions], place: Place) -> dict[str, Any]:
    return predicted[place[0]].rows[place[1]]


def _drawn(predicted: Sequence[SplitPredictions], place: Place) -> dict[str, Any]:
    one, row = predicted[place[0]], _row(predicted, place)
    try:
        image = draw_answer(one.samples.sample(int(one.examples.samples[one.numbers[place[1]]])), row)
    except (OSError, ValueError):  # precomputed features need no image that decodes
        image = None
    return {"row": row, "image": image}
