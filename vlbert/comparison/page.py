"""Render the page of a comparison: tables of means with intervals, and the differences between variants."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlbert.evaluation.results_page import render


def page(summary: Mapping[str, Any]) -> bytes:
    """Return the comparison's HTML page. `summary` is the content of numbers.json."""
    pairs = [pair for task in summary["tasks"].values() for pair in task["pairs"] if pair["p"] is not None]
    values = {"summary": summary, "pairs": len(pairs)}
    template = Path(__file__).parent / "comparison.html.j2"
    return render(template, values, percent=percent, points=points, whole="{:,}".format).encode()


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}"


def points(difference: float) -> str:
    """Format the difference between two fractions as signed percentage points."""
    return f"{100 * difference:+.1f}"
