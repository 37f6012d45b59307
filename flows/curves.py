"""Curves of a run as one SVG, for the flow UI: losses, accuracies, learning rate, gradient norm, throughput."""

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from storage.object_store import ObjectStore
from training.log import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GRID = "#333333", "#dddddd"
_WORTH_A_CURVE = ("accuracy", "grounding", "iou", "recall", "map50")  # of what a validation reports: shares of one
_MOST_POINTS = 60  # of a curve: Prefect keeps every image that it has shown
_OF_THE_RUN = {  # what is drawn small, each by itself: its name in metrics.jsonl, and its title
    "learning_rate": "learning rate",
    "gradient_norm": "gradient norm",
    "samples_per_second": "samples/s",
}
_KINDS = {"_shuffled": "--", "_grounding_gap": ":"}  # a number's name may end so: with the line style


def curves(store: ObjectStore, run: str) -> str | None:
    """A data: URI with the run's curves as far as it is; None before it has logged anything.

    Above the training losses and accuracies, then what validations found (accuracies, and how much of them comes from
    looking), and below learning rate, gradient norm and throughput.
    """
    training, validation = (read_metrics(store, run, kind) for kind in ("training", "validation"))
    if not training:
        return None
    return f"data:image/svg+xml;base64,{base64.b64encode(draw(run, training, validation).encode()).decode()}"


def draw(run: str, training: Sequence[dict[str, float]], validation: Sequence[dict[str, float]]) -> str:
    """The SVG; training and validation are lines of metrics.jsonl."""
    from matplotlib import rc_context  # here, because it takes half a second and only training shows curves
    from matplotlib.figure import Figure

    panels = [("training loss", training, _series(training, "loss_"))]
    if accuracies := _series(training, "accuracy"):
        panels.append(("training accuracy", training, accuracies))
    if validation:
        panels.append(("validation", validation, _series(validation, *_WORTH_A_CURVE)))
    small = [name for name in _OF_THE_RUN if any(name in line for line in training)]
    heights = [2.7] * len(panels) + [1.8] * bool(small)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": run, "font.size": 9}):
        figure = Figure(figsize=(8, sum(heights)), layout="constrained", facecolor="white")
        grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
        for number, (title, lines, names) in enumerate(panels):
            axes = figure.add_subplot(grid[number])
            colours: dict[str, str] = {}  # one for each number, whatever kind of it
            for name in names:
                kind = next((kind for kind in _KINDS if name.endswith(kind)), "")
                colour = colours.setdefault(name.removesuffix(kind), f"C{len(colours)}")
                last = _line(axes, lines, name, colour, _KINDS.get(kind, "-"))
                axes.lines[-1].set_label(f"{name} {last:.3f}")
            axes.set_title(f"{run}: {title}", fontsize=10, color=_INK)
            axes.set_xlabel("optimizer steps")
            if names:
                # Beside the lines: there are up to nine of them, and none leaves a corner free.
                axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        row = grid[-1].subgridspec(1, max(1, len(small)))
        for number, name in enumerate(small):
            axes = figure.add_subplot(row[number])
            last = _line(axes, training, name, _INK)
            axes.set_title(f"{_OF_THE_RUN[name]} {last:.4g}", fontsize=9, color=_INK)
            axes.set_ylim(bottom=0)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()


def _line(axes: "Axes", lines: Sequence[dict[str, float]], name: str, colour: str, style: str = "-") -> float:
    """Draw one number over the steps; its last value."""
    points = [(line["step"], line[name]) for line in lines if name in line]
    marker = "o" if len(points) < 15 else None
    axes.plot(*zip(*thinned(points), strict=True), color=colour, linestyle=style, marker=marker, markersize=3)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=_GRID)
    axes.spines[["right", "top"]].set_visible(False)
    return points[-1][1]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """So few points that an image stays small: the means of as many neighbours as that takes."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _series(lines: Sequence[dict[str, float]], *words: str) -> list[str]:
    """The names of numbers with one of these words in them, in order of appearance; not of parts of a split."""
    names = {name: None for line in lines for name in line}
    return [name for name in names if "/" not in name and any(word in name for word in words)]
