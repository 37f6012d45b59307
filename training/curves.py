"""Draw curves over optimizer steps as SVG, for Prefect's UI and for HTML pages."""

import base64
import io
from collections.abc import Sequence

from storage.object_store import ObjectStore
from storage.programs import require
from training.log import by_dataset, read_metrics

Lines = dict[str, list[tuple[float, float]]]  # name -> (step, value)
_RUN_PANELS = {"learning_rate": "learning rate", "gradient_norm": "gradient norm", "samples_per_second": "samples/s"}
_VALIDATION_METRICS = "accuracy", "grounding", "iou", "recall", "map50"
_MAX_POINTS = 60  # per line: Prefect stores every version of the image


def draw_curves(store: ObjectStore, run: str) -> str | None:
    """Draw a run's training and validation curves. Return an SVG as a data: URI, or None if nothing is logged yet."""
    training, validation = (read_metrics(store, run, kind) for kind in ("training", "validation"))
    if not training:
        return None
    panels = {
        "training loss": select_lines(training, "loss_"),
        "training accuracy": select_lines(training, "accuracy"),
        "validation": select_lines(validation, *_VALIDATION_METRICS),
    }
    parts = [by_dataset(row) for row in validation]
    for dataset in dict.fromkeys(name for part in parts for name in part):
        rows = [part.get(dataset, {}) | {"step": row["step"]} for row, part in zip(validation, parts, strict=True)]
        panels[f"validation, {dataset}"] = select_lines(rows, *_VALIDATION_METRICS)
    panels |= {title: select_lines(training, name) for name, title in _RUN_PANELS.items()}
    return draw_panels({f"{run}: {title}": lines for title, lines in panels.items() if lines})


def select_lines(rows: Sequence[dict[str, float]], *words: str) -> Lines:
    """From rows of metrics.jsonl, select the metrics whose names contain one of `words`.

    Names with a slash, such as accuracy/yes/no (the accuracy on yes/no questions), are skipped.
    """
    names = dict.fromkeys(name for row in rows for name in row if "/" not in name and any(w in name for w in words))
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}


def draw_panels(panels: dict[str, Lines], width: float = 8.0) -> str:
    """Draw panels (title -> lines) as an SVG that is `width` inches wide, and return it as a data: URI."""
    require("matplotlib", "drawing curves", "attention")
    from matplotlib import rc_context  # here, because the import takes half a second
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves", "font.size": 9}):
        figure = Figure(figsize=(width, 2.7 * len(panels)), layout="constrained", facecolor="white")
        for axes, (title, lines) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
            for name, points in lines.items():
                marker = "o" if len(points) < 15 else None
                last = points[-1][1]
                shown = points[:: len(points) // -_MAX_POINTS]  # evenly spaced, including the last point
                label = f"{name} {last:.3f}" if abs(last) >= 0.01 or not last else f"{name} {last:.3g}"
                axes.plot(*zip(*shown, strict=True), label=label, marker=marker, markersize=3)
            axes.set(title=title, xlabel="optimizer steps")
            axes.grid(axis="y", color="#dddddd")
            axes.spines[["right", "top"]].set_visible(False)
            if lines:  # outside the axes: up to nine lines leave no corner free
                axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue().encode()).decode()}"
