"""Loss and accuracy curves of a run as one SVG, for the flow UI."""

import base64
import io
from collections.abc import Sequence

from detectors.record import read_metrics
from storage.objects import Objects

_INK, _GRID = "#333333", "#dddddd"
_WORTH_A_CURVE = ("accuracy", "grounding", "iou", "recall", "map50")  # of what a validation reports: shares of one
_MOST_POINTS = 60  # of a curve: Prefect keeps every picture that it has shown
_KINDS = {"_shuffled": "--", "_grounding": ":"}  # a number's name may end so: with the line style


def curves(objects: Objects, run: str) -> str | None:
    """A data: URI with the run's curves as far as it is; None before it has logged anything.

    Above the training losses and accuracies, below what validations found (accuracies, and how much of them comes from
    looking).
    """
    training, validation = (read_metrics(objects, run, kind) for kind in ("training", "validation"))
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
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": run, "font.size": 9}):
        figure = Figure(figsize=(8, 2.7 * len(panels)), layout="constrained", facecolor="white")
        for number, (title, lines, names) in enumerate(panels):
            axes = figure.add_subplot(len(panels), 1, number + 1)
            colours: dict[str, str] = {}  # one for each number, whatever kind of it
            for name in names:
                points = [(line["step"], line[name]) for line in lines if name in line]
                kind = next((kind for kind in _KINDS if name.endswith(kind)), "")
                colour = colours.setdefault(name.removesuffix(kind), f"C{len(colours)}")
                style = {"color": colour, "linestyle": _KINDS.get(kind, "-"), "markersize": 3}
                if len(points) < 15:
                    style["marker"] = "o"
                axes.plot(*zip(*thinned(points), strict=True), label=f"{name} {points[-1][1]:.3f}", **style)
            axes.set_title(f"{run}: {title}", fontsize=10, color=_INK)
            axes.set_xlabel("optimizer steps")
            axes.set_xlim(left=0)
            axes.grid(axis="y", color=_GRID)
            axes.spines[["right", "top"]].set_visible(False)
            if names:
                # Beside the lines: there are up to nine of them, and none leaves a corner free.
                axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """So few points that a picture stays small: the means of as many neighbours as that takes."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _series(lines: Sequence[dict[str, float]], *words: str) -> list[str]:
    """The names of numbers with one of these words in them, in order of appearance; not of parts of a split."""
    names = {name: None for line in lines for name in line}
    return [name for name in names if "/" not in name and any(word in name for word in words)]
