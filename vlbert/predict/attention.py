"""Which regions each word attends to, as heat maps: what the paper's figure 3 shows.

Layers and heads are counted from 0, as in the paper (appendix A.3). Shape letters: A heads, T words, R regions (the
whole image first).
"""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from detectors.drawing import colour_of, draw_boxes
from storage.programs import require
from vlbert.predict.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_WORDS, MOST_REGIONS = 40, 12  # that a panel of the figure shows
_COLUMNS = 4  # of panels


@dataclass(frozen=True, eq=False)
class Map:
    """How much the words attend to the regions in one layer: weights float32 [A, T, R]."""

    layer: int
    weights: np.ndarray

    @property
    def busiest(self) -> int:
        """The head with most attention to regions but the whole image."""
        return int(self.weights[:, :, 1:].sum(2).mean(1).argmax())

    @property
    def strength(self) -> np.ndarray:
        """The attention of the busiest head [T, R], rescaled over all heads to 0..1 (figure 3)."""
        lowest, highest = self.weights.min(), self.weights.max()
        return (self.weights[self.busiest] - lowest) / max(highest - lowest, 1e-12)


def maps_of(prediction: Prediction) -> list[Map]:
    """Return the map of each layer where words attend to regions, J or X, without padding; of several choices those of
    the chosen one. ValueError where the prediction was made without attention maps."""
    if prediction.encoded is None or prediction.encoded.attentions is None:
        raise ValueError("the prediction has no attention maps: give a text, and attentions=True")
    row, maps = prediction.chosen, []
    words, regions = prediction.batch.text_mask[row], prediction.batch.region_mask[row]
    for one in prediction.encoded.attentions:
        weights = one.weights[row].float()
        if one.queries == "both":
            weights = weights[:, : len(words), len(words) : len(words) + len(regions)]
        elif (one.queries, one.keys) != ("text", "regions"):
            continue
        maps.append(Map(one.layer, weights[:, words][:, :, regions].numpy()))
    return maps


def shown_regions(maps: list[Map]) -> list[int]:
    """Return the regions that receive most attention of the shown words and heads, in their order."""
    received = np.max([one.strength[:MOST_WORDS].max(0) for one in maps], axis=0)
    return sorted(np.argsort(-received, kind="stable")[:MOST_REGIONS].tolist())


def draw_attention(prediction: Prediction) -> bytes:
    """Return the figure as a PNG: the image with its regions and, for each layer, a heat map of its busiest head.

    It shows the regions with most attention, and the beginning of a long text.
    """
    require("matplotlib", "the figure of attention", "attention")
    from matplotlib.figure import Figure  # without pyplot it needs no display

    maps = maps_of(prediction)
    regions, tokens = shown_regions(maps), prediction.tokens[prediction.chosen]
    columns = min(_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    height = 0.3 * max(min(len(tokens), MOST_WORDS), len(regions), 8) + 1.2  # inches of a panel
    figure = Figure((5.0 + 4.0 * columns, max(5.0, height * rows)), layout="constrained")
    grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1.35] + [1] * columns)
    image = figure.add_subplot(grid[:, 0])
    boxes = [(prediction.sample.regions.boxes[n - 1], colour_of(n), str(n)) for n in reversed(regions) if n]
    image.imshow(draw_boxes(prediction.sample, boxes, 700))
    image.set_axis_off()
    image.set_title(f"{len(boxes)} of {len(prediction.names)} regions", fontsize=15)
    names = ["whole image", *prediction.names]
    for position, one in enumerate(maps):
        axes = figure.add_subplot(grid[position // columns, 1 + position % columns])
        _draw_panel(axes, one, tokens[:MOST_WORDS], {number: names[number] for number in regions})
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _draw_panel(axes: "Axes", one: Map, words: list[str], regions: dict[int, str]) -> None:
    """Draw the busiest head as a heat map: a row for each word, a column for each region, by its number."""
    axes.imshow(one.strength[: len(words), list(regions)], cmap="Blues", vmin=0, vmax=1)
    axes.set_aspect("auto")
    axes.set_title(f"layer {one.layer}, head {one.busiest}", fontsize=14)
    for axis, labels in ((axes.yaxis, words), (axes.xaxis, [*regions.values()])):
        axis.set_ticks(range(len(labels)), labels, parse_math=False)
    axes.tick_params(axis="x", rotation=90)
