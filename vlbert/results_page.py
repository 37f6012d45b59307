"""The page of an evaluation: its numbers beside the paper's, and the worst and the best samples, drawn."""

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from detectors.drawing import BOX_COLOURS, data_uri, draw_boxes
from vlbert.results import Answered, warnings

_DRAWN = 12  # samples of each kind
Place = tuple[int, int]  # which of the checkpoints, which of its rows


def page(about: dict[str, Any], answered: Sequence[Answered]) -> bytes:
    """index.html, whole in itself."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    worst, best = worst_and_best(answered)
    scored = bool(worst) and _row(answered, worst[0])["score"] is not None
    galleries = [
        ("Worst" if scored else "Least sure", [_drawn(answered, place) for place in worst]),
        ("Best" if scored else "Surest", [_drawn(answered, place) for place in best]),
    ]
    template = environment.get_template("results.html.j2")
    return template.render(about=about, warnings=warnings(about), galleries=galleries).encode()


def worst_and_best(answered: Sequence[Answered], count: int = _DRAWN) -> tuple[list[Place], list[Place]]:
    """The rows with the lowest scores, the surest of them first, and those with the highest; of a split without truths,
    the least sure and the surest. No row is in both."""
    places = [(number, row) for number, one in enumerate(answered) for row in range(len(one.rows))]
    scored = [place for place in places if _row(answered, place)["score"] is not None]

    def worth(place: Place) -> tuple[float, float]:
        row = _row(answered, place)
        return (row["score"], -row["probability"]) if scored else (row["probability"], 0)

    def best_first(place: Place) -> tuple[float, float]:
        row = _row(answered, place)
        return (-row["score"] if scored else 0, -row["probability"])

    places = scored or places
    worst = heapq.nsmallest(min(count, (len(places) + 1) // 2), places, worth)
    best = heapq.nsmallest(min(count, len(places) // 2), set(places) - set(worst), lambda p: (best_first(p), p))
    return worst, best


def _row(answered: Sequence[Answered], place: Place) -> dict[str, Any]:
    return answered[place[0]].rows[place[1]]


def _drawn(answered: Sequence[Answered], place: Place) -> dict[str, Any]:
    """A row, and its picture with its boxes as the src of an img; none where it does not decode."""
    one, row = answered[place[0]], _row(answered, place)
    boxes = [
        (np.array(box["box"], np.float32), BOX_COLOURS[number % len(BOX_COLOURS)], box["name"])
        for number, box in enumerate(row["boxes"])
    ]
    try:
        sample = one.samples.sample(int(one.questions.samples[one.numbers[place[1]]]))
        picture = data_uri(draw_boxes(sample, boxes))
    except (OSError, ValueError):  # precomputed features need no picture that decodes
        picture = None
    return {"row": row, "picture": picture}
