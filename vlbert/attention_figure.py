"""Which regions each token attends to: a figure like the paper's figure 3.

Layers and heads are counted from 0, as in the paper (appendix A.3). Shape letters: L layers, A heads, T words, R
regions (the whole image first).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from detectors.drawing import colour_of, draw_boxes
from vlbert.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_WORDS, MOST_REGIONS = 40, 12  # that a panel of the figure shows
_COLUMNS = 4  # of panels


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention among the tokens, the regions and [END] of one row: maps float32 [L, A, T + R + 1, T + R + 1]."""

    words: list[str]
    regions: list[str]
    maps: Tensor

    def to_regions(self) -> np.ndarray:
        """[L, A, T, R]: of the words to the regions."""
        t, r = len(self.words), len(self.regions)
        return self.maps[:, :, :t, t : t + r].numpy()


def attention_of(prediction: Prediction) -> Attention:
    """The maps of a prediction without padding; of several choices those of the chosen one."""
    if prediction.encoded is None or prediction.encoded.attentions is None:
        raise ValueError("the prediction has no attention maps: give a text, and attentions=True")
    batch, row = prediction.batch, prediction.chosen
    real = torch.cat([batch.text_mask[row], batch.region_mask[row], torch.ones(1, dtype=torch.bool)])
    maps = torch.stack([layer[row][:, real][:, :, real] for layer in prediction.encoded.attentions]).float()
    regions = ["whole image", *prediction.names][: int(batch.region_mask[row].sum())]
    return Attention(prediction.tokens[row], regions, maps)


def chosen_heads(attention: Attention, heads: str | None) -> list[tuple[int, int]]:
    """The (layer, head) of "1.3,2.0"; by default of each layer the head whose tokens attend most to regions, without
    the whole image. ValueError where there is no such layer or head."""
    layers, count = attention.maps.shape[:2]
    if heads is None:
        weights = attention.to_regions()[:, :, :, 1:].sum(3).mean(2)  # (L, A)
        return list(enumerate(weights.argmax(1).tolist()))
    chosen = []
    for name in heads.split(","):
        numbers = name.split(".")
        if len(numbers) != 2 or not all(number.strip().isdecimal() for number in numbers):
            raise ValueError(f"--heads {heads}: {name!r} is no layer.head, such as 1.3")
        layer, head = map(int, numbers)
        if layer >= layers or head >= count:
            raise ValueError(
                f"--heads {heads}: there is no {name}; the model has layers 0 to {layers - 1} of heads 0 to {count - 1}"
            )
        chosen.append((layer, head))
    return chosen


def write_attention(prediction: Prediction, beside: Path, heads: str | None = None) -> Path:
    """Draws the figure into a file beside another; returns its path."""
    attention = attention_of(prediction)
    figure = beside.with_name(f"{beside.stem}-attention.png")
    draw_figure(prediction, attention, chosen_heads(attention, heads), figure)
    return figure


# --- the figure -------------------------------------------------------------------------------------------------------


def draw_figure(prediction: Prediction, attention: Attention, heads: Sequence[tuple[int, int]], file: Path) -> None:
    """A panel for each head: tokens, regions, and lines between them as strong as the attention.

    Shows the regions with most attention in these panels, and the beginning of a long text.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = strengths(attention, heads)[:, :MOST_WORDS]
    shown = np.sort(np.argsort(-panels.max((0, 1)), kind="stable")[:MOST_REGIONS])
    columns = min(_COLUMNS, len(heads))
    rows = -(-len(heads) // columns)
    tall = 0.38 * max(len(panels[0]), 2 * len(shown), 6) + 0.6  # inches of a panel
    figure = Figure(figsize=(5.0 + 4.0 * columns, max(5.0, tall * rows)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1.35] + [1] * columns)
    image = figure.add_subplot(grid[:, 0])
    image.imshow(draw_boxes(prediction.sample, numbered_boxes(prediction, shown.tolist()), 700))
    image.set_axis_off()
    image.set_title(title(attention, shown.tolist()), fontsize=15, wrap=True)
    crops = thumbnails(prediction, shown.tolist())
    for position, ((layer, head), panel) in enumerate(zip(heads, panels, strict=True)):
        axes = figure.add_subplot(grid[position // columns, 1 + position % columns])
        axes.set_title(f"layer {layer}, head {head}", fontsize=15)
        _draw_panel(axes, attention, panel[:, shown], shown, crops)
    figure.savefig(file, dpi=100)


def strengths(attention: Attention, heads: Sequence[tuple[int, int]]) -> np.ndarray:
    """[heads, T, R]: attention of tokens to regions, rescaled over all heads of a layer to 0..1 (figure 3)."""
    weights = attention.to_regions()
    lowest, highest = weights.min((1, 2, 3), keepdims=True), weights.max((1, 2, 3), keepdims=True)
    weights = (weights - lowest) / np.maximum(highest - lowest, 1e-12)
    return np.stack([weights[layer, head] for layer, head in heads])


def numbered_boxes(
    prediction: Prediction, shown: Sequence[int] | None = None
) -> list[tuple[np.ndarray, tuple[int, int, int], str]]:
    """The regions `shown`, or all, for `draw_boxes`, with the numbers of the panels, the first on top. The whole image,
    0, has no box."""
    boxes = prediction.sample.regions.boxes
    numbers = range(1, 1 + len(boxes)) if shown is None else [number for number in shown if number]
    return [(boxes[number - 1], colour_of(number), str(number)) for number in reversed(numbers)]


def title(attention: Attention, shown: Sequence[int]) -> str:
    """How many of the regions and tokens the figure shows, and whether the whole image."""
    count, regions = sum(number > 0 for number in shown), len(attention.regions) - 1
    of = f"{count} of {regions} regions" if count < regions else f"{count} regions"
    whole = " and the whole image" if 0 in shown else ""
    more = len(attention.words) - MOST_WORDS
    cut = f"; the first {MOST_WORDS} of {len(attention.words)} tokens" if more > 0 else ""
    return f"{of}{whole}{cut}"


def thumbnails(prediction: Prediction, shown: Sequence[int]) -> list[np.ndarray]:
    """The pixels of each region; region 0 is the whole image."""
    image = draw_boxes(prediction.sample, [], 400)
    factor = 400 / max(prediction.sample.width, prediction.sample.height)
    found = []
    for number in shown:
        left, top, right, bottom = (0, 0, *image.size)
        if number:
            left, top, right, bottom = (prediction.sample.regions.boxes[number - 1] * factor).round().astype(int)
        crop = image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
        crop.thumbnail((64, 64))
        found.append(np.asarray(crop))
    return found


def _draw_panel(
    axes: "Axes", attention: Attention, panel: np.ndarray, shown: np.ndarray, crops: Sequence[np.ndarray]
) -> None:
    """Tokens left, regions right, a line for each pair: panel [T, shown]."""
    from matplotlib.collections import LineCollection
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    words = attention.words[: len(panel)]
    word_heights, region_heights = (1 - (np.arange(n) + 0.5) / n for n in (len(words), len(shown)))
    for word, height in zip(words, word_heights, strict=True):
        axes.text(0.28, height, word, ha="right", va="center", fontsize=14, parse_math=False)
    for number, height, thumbnail in zip(shown, region_heights, crops, strict=True):
        edge = {"edgecolor": np.array(colour_of(number)) / 255}
        image = OffsetImage(thumbnail, zoom=22 / max(thumbnail.shape[:2]))
        axes.add_artist(AnnotationBbox(image, (0.74, height), pad=0.15, bboxprops=edge))
        axes.text(0.82, height, attention.regions[number], va="center", fontsize=13, parse_math=False)
    lines = [[(0.3, start), (0.68, end)] for start in word_heights for end in region_heights]
    colours = [
        (*(np.array(colour_of(n)) / 255), strength) for row in panel for n, strength in zip(shown, row, strict=True)
    ]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=1.6))
    axes.set_xlim(0, 1.15)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
