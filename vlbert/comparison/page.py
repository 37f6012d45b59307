"""The page of a comparison: tables with intervals, what differs, curves and costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.curves import Lines, draw
from vlbert.evaluation.results_page import render


def page(summary: Mapping[str, Any], curves: Mapping[str, Lines]) -> bytes:
    """index.html, with all images in it. summary: the content of numbers.json."""
    pairs = sum(len(task["pairs"]) for task in summary["tasks"].values())
    values = {
        "summary": summary,
        "orders": {name: orders(task) for name, task in summary["tasks"].items() if task["paper"]},
        "by_chance": round(0.05 * pairs),
        "pairs": pairs,
        "curves": {title: draw({title: lines}, width=6) for title, lines in curves.items()},
    }
    template = Path(__file__).parent / "comparison.html.j2"
    return render(template, values, percent=percent, points=points, short=short, whole="{:,}".format).encode()


def orders(task: Mapping[str, Any]) -> dict[str, tuple[int | None, int]]:
    """By variant that the paper has, its rank here (None: no number) and in the paper; 1 is the best, equals share."""
    paper = task["paper"]
    ours = {name: task["means"][name]["mean"] for name in paper if name in task["means"]}
    return {name: (_rank(ours, name), _rank(paper, name)) for name in paper}


def _rank(values: Mapping[str, float], name: str) -> int | None:
    return 1 + sum(other > values[name] for other in values.values()) if name in values else None


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}"


def points(difference: float) -> str:
    """A difference of shares, with its sign."""
    return f"{100 * difference:+.1f}"


def short(number: float | None) -> str:
    """As 1.3 T: for parameters and FLOPs."""
    if number is None:
        return "–"
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}\N{NARROW NO-BREAK SPACE}{letter}"
    return f"{number:.0f}"
