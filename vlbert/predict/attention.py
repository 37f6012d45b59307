"""Draw heat maps of the regions that each word attends to, as in figure 3 of the paper.

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

MAX_WORDS, MAX_REGIONS = 40, 12  # words and regions in a panel of the figure
_COLUMNS = 4  # of panels


@dataclass(frozen=True, eq=False)
class Map:
    """The attention weights from words to regions in one layer: float32 [A, T, R]."""

    layer: int
    weights: np.ndarray

    @property
    def busiest(self) -> int:
        """Index of the head that attends most to regions other than the whole image."""
        return int(self.weights[:, :, 1:].sum(2).mean(1).argmax())

    @property
    def strength(self) -> np.ndarray:
        """Weights [T, R] of the head `busiest`, scaled so that the weights of all heads range from 0 to 1."""
        lowest, highest = self.weights.min(), self.weights.max()
        return (self.weights[self.busiest] - lowest) / max(highest - lowest, 1e-12)


def make_maps(prediction: Prediction) -> list[Map]:
    """Return the maps of all layers in which words attend to regions (J and X), without padding.

    If the text has several choices, the maps are those of the chosen one. Raises ValueError if the prediction has no
    attention maps.
    """
    if prediction.batch is None or prediction.encoded is None or prediction.encoded.attentions is None:
        raise ValueError("the prediction has no attention maps: give a text, and attentions=True")
    row, maps = prediction.chosen, []
    words, regions = prediction.batch.text_mask[row], prediction.batch.region_mask[row]
    for attention in prediction.encoded.attentions:
        weights = attention.weights[row].float()
        if attention.queries == "both":
            weights = weights[:, : len(words), len(words) : len(words) + len(regions)]
        elif (attention.queries, attention.keys) != ("text", "regions"):
            continue
        maps.append(Map(attention.layer, weights[:, words][:, :, regions].cpu().numpy()))
    return maps


def select_regions(maps: list[Map]) -> list[int]:
    """Return the sorted indices of the MAX_REGIONS regions that get the most attention. Index 0 is the whole image."""
    received = np.max([layer.strength[:MAX_WORDS].max(0) for layer in maps], axis=0)
    return sorted(np.argsort(-received, kind="stable")[:MAX_REGIONS].tolist())


def draw_attention(prediction: Prediction) -> bytes:
    """Draw the image and, for each layer, a heat map of the head that attends most to the regions. Returns a PNG.

    The figure shows only the regions with the most attention, and only the first words of a long text.
    """
    require("matplotlib", "the figure of attention", "attention")
    from matplotlib.figure import Figure  # unlike pyplot, it needs no display

    maps = make_maps(prediction)
    regions, tokens = select_regions(maps), prediction.tokens[prediction.chosen]
    columns = min(_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    height = 0.3 * max(min(len(tokens), MAX_WORDS), len(regions), 8) + 1.2  # inches of a panel
    figure = Figure((5.0 + 4.0 * columns, max(5.0, height * rows)), layout="constrained")
    grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1.35] + [1] * columns)
    image = figure.add_subplot(grid[:, 0])
    all_boxes = prediction.sample.require_regions().boxes
    boxes = [(all_boxes[n - 1], colour_of(n), str(n)) for n in reversed(regions) if n]
    image.imshow(draw_boxes(prediction.sample, boxes, 700))
    image.set_axis_off()
    image.set_title(f"{len(boxes)} of {len(prediction.names)} regions", fontsize=15)
    names = ["whole image", *prediction.names]
    for position, layer in enumerate(maps):
        axes = figure.add_subplot(grid[position // columns, 1 + position % columns])
        _draw_panel(axes, layer, tokens[:MAX_WORDS], {number: names[number] for number in regions})
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _draw_panel(axes: "Axes", layer: Map, words: list[str], regions: dict[int, str]) -> None:
    """Draw a heat map of the head `layer.busiest`, with words as rows and `regions` ({index: name}) as columns."""
    axes.imshow(layer.strength[: len(words), list(regions)], cmap="Blues", vmin=0, vmax=1)
    axes.set_aspect("auto")
    axes.set_title(f"layer {layer.layer}, head {layer.busiest}", fontsize=14)
    for axis, labels in ((axes.yaxis, words), (axes.xaxis, [*regions.values()])):
        axis.set_ticks(range(len(labels)), labels, parse_math=False)
    axes.tick_params(axis="x", rotation=90)
