"""Render the page of an evaluation: its metrics, and images of the worst and best answers."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from detectors.drawing import BOX_COLOURS, GREEN, RED, data_uri, draw_boxes
from storage.safe_json import printable
from storage.sample import Sample
from vlbert.evaluation.results import SplitPredictions, warnings

_DRAWN = 12  # number of worst answers, and of best answers
RowIndex = tuple[int, int]  # index of the checkpoint, index of its row


def page(summary: dict[str, Any], predicted: Sequence[SplitPredictions]) -> bytes:
    """Return an evaluation's HTML page, with all images embedded."""
    worst, best = worst_and_best(predicted)
    galleries = [
        (title, [_draw_row(predicted, index) for index in rows]) for title, rows in (("Worst", worst), ("Best", best))
    ]
    whole, parts = [], []
    for name, value in summary["metrics"].items():
        (parts if "/" in name else whole).append((name, value))
    values = {"summary": summary, "warnings": warnings(summary), "galleries": galleries, "whole": whole, "parts": parts}
    return render(Path(__file__).parent / "results.html.j2", values).encode()


def render(template: Path, values: dict[str, Any], **filters: Any) -> str:
    """Render a template that extends page.html.j2. Values are escaped, made printable, and must not be missing."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        finalize=lambda value: re.sub(r"\S+", lambda word: printable(word[0]), value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(values)


def draw_answer(sample: Sample, row: dict[str, Any]) -> str:
    """Draw the boxes of a prediction on its image, and return the image as the src of an <img>.

    The chosen box is green if the answer is correct. Otherwise it is red, and the ground-truth box is green. Other
    boxes, such as those of objects that a text mentions, cycle through BOX_COLOURS.
    """
    right, drawn = (row["score"] or 0) >= 0.5, []
    for number, box in enumerate(row["boxes"]):
        name, colour = box["name"], BOX_COLOURS[number % len(BOX_COLOURS)]
        if name == "ground truth" and right:
            continue  # the chosen box is close enough
        if row["score"] is not None and name in (row["answer"], "ground truth"):
            colour = GREEN if right or name == "ground truth" else RED
        drawn.append((np.array(box["box"], np.float32), colour, name))
    return data_uri(draw_boxes(sample, drawn))


def worst_and_best(predicted: Sequence[SplitPredictions], count: int = _DRAWN) -> tuple[list[RowIndex], list[RowIndex]]:
    """Return the indices of the `count` most confident wrong answers, and of the `count` most confident right ones.

    Answers without ground truth are left out. No answer is in both lists, even if there are few.
    """
    signed_confidence = {
        (number, index): (2 * row["score"] - 1) * (row["probability"] or 1.0)
        for number, each in enumerate(predicted)
        for index, row in enumerate(each.rows)
        if row["score"] is not None
    }
    ordered = sorted(signed_confidence, key=signed_confidence.__getitem__)
    half = (len(ordered) + 1) // 2
    return ordered[:half][:count], ordered[half:][::-1][:count]


def _draw_row(predicted: Sequence[SplitPredictions], index: RowIndex) -> dict[str, Any]:
    number, position = index
    of_checkpoint, row = predicted[number], predicted[number].rows[position]
    sample = of_checkpoint.examples.samples[of_checkpoint.numbers[position]]
    try:
        image = draw_answer(of_checkpoint.samples.sample(int(sample)), row)
    except (OSError, ValueError):  # with precomputed features, the image may not decode
        image = None
    return {"row": row, "image": image}
