"""Curves over optimizer steps as SVG, for the flow UI and for pages."""

import base64
import io
from collections.abc import Sequence

from storage.object_store import ObjectStore
from storage.programs import require
from training.log import by_dataset, read_metrics

Lines = dict[str, list[tuple[float, float]]]  # name -> (step, value)
_OF_THE_RUN = {"learning_rate": "learning rate", "gradient_norm": "gradient norm", "samples_per_second": "samples/s"}
_OF_VALIDATION = "accuracy", "grounding", "iou", "recall", "map50"
_MOST_POINTS = 60  # of a line: Prefect keeps every image that it has shown


def curves(store: ObjectStore, run: str) -> str | None:
    """A run's losses, accuracies, learning rate, gradient norm and throughput and what its validations found, a data:
    URI; None before it has logged anything."""
    training, validation = (read_metrics(store, run, kind) for kind in ("training", "validation"))
    if not training:
        return None
    panels = {
        "training loss": lines_of(training, "loss_"),
        "training accuracy": lines_of(training, "accuracy"),
        "validation": lines_of(validation, *_OF_VALIDATION),
    }
    parts = [by_dataset(row) for row in validation]
    for dataset in dict.fromkeys(name for part in parts for name in part):
        rows = [part.get(dataset, {}) | {"step": row["step"]} for row, part in zip(validation, parts, strict=True)]
        panels[f"validation, {dataset}"] = lines_of(rows, *_OF_VALIDATION)
    panels |= {title: lines_of(training, name) for name, title in _OF_THE_RUN.items()}
    return draw({f"{run}: {title}": lines for title, lines in panels.items() if lines})


def lines_of(rows: Sequence[dict[str, float]], *words: str) -> Lines:
    """The numbers of rows of metrics.jsonl with one of these words in their names; not of parts of a split (a/b)."""
    names = dict.fromkeys(name for row in rows for name in row if "/" not in name and any(w in name for w in words))
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}


def draw(panels: dict[str, Lines], width: float = 8.0) -> str:
    """Panels by title, one below the other, in an SVG as a data: URI; the legend has the last value of each line."""
    require("matplotlib", "drawing curves", "attention")
    from matplotlib import rc_context  # here, because it takes half a second and only training shows curves
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves", "font.size": 9}):
        figure = Figure(figsize=(width, 2.7 * len(panels)), layout="constrained", facecolor="white")
        for axes, (title, lines) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
            for name, points in lines.items():
                marker = "o" if len(points) < 15 else None
                last = points[-1][1]
                shown = points[:: len(points) // -_MOST_POINTS]  # the last one, and so many before it
                label = f"{name} {last:.3f}" if abs(last) >= 0.01 or not last else f"{name} {last:.3g}"
                axes.plot(*zip(*shown, strict=True), label=label, marker=marker, markersize=3)
            axes.set(title=title, xlabel="optimizer steps")
            axes.grid(axis="y", color="#dddddd")
            axes.spines[["right", "top"]].set_visible(False)
            if lines:  # beside them: there are up to nine, and none leaves a corner free
                axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue().encode()).decode()}"
