"""Who attends to whom, as heat maps: what the paper's figure 3 shows.

With layers J it shows which regions each token attends to; with co-attention, which regions the words attend to and
which words the regions; with layers T and V, which words words attend to, and which regions regions. Layers and heads
are counted from 0, as in the paper (appendix A.3). Shape letters: A heads, Q elements that attend, K those that are
attended to, T words, R regions (the whole image first).
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from detectors.drawing import colour_of, draw_boxes
from storage.programs import require
from vlbert.predict.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_WORDS, MOST_REGIONS = 40, 12  # that a panel of the figure shows
_COLUMNS = 4  # of panels
Kind = Literal["words", "regions"]
_KINDS: dict[str, Kind] = {"text": "words", "regions": "regions"}


@dataclass(frozen=True, eq=False)
class Map:
    """How much words or regions attend to words or regions, in one layer: weights float32 [A, Q, K]."""

    layer: int
    queries: Kind
    keys: Kind
    weights: np.ndarray

    def strength(self, head: int) -> np.ndarray:
        """The attention of a head [Q, K], rescaled over all heads of the map to 0..1 (figure 3)."""
        lowest, highest = self.weights.min(), self.weights.max()
        return (self.weights[head] - lowest) / max(highest - lowest, 1e-12)


Panel = tuple[Map, int]  # a map, and the number of one of its heads


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention among the words and the regions of one row. Of a layer J there is the part from words to regions; a
    layer X has two maps."""

    words: list[str]
    regions: list[str]
    maps: list[Map]

    @property
    def reads_whole_image(self) -> bool:
        """Whether the model reads region 0 at all."""
        return any(one.weights[:, :, 0].any() for one in self.maps if one.keys == "regions")

    def busiest(self, one: Map) -> int:
        """The head of a map with most attention to words other than [CLS] and [SEP], or to regions but the whole
        image."""
        ordinary = np.array([word not in ("[CLS]", "[SEP]") for word in self.words])
        if one.keys == "regions":
            ordinary = np.arange(len(self.regions)) > 0
        return int(one.weights[:, :, ordinary].sum(2).mean(1).argmax())


def attention_of(prediction: Prediction) -> Attention:
    """Return the maps of a prediction without padding; of several choices those of the chosen one."""
    if prediction.encoded is None or prediction.encoded.attentions is None:
        raise ValueError("the prediction has no attention maps: give a text, and attentions=True")
    batch, row, maps = prediction.batch, prediction.chosen, []
    masks = {"text": batch.text_mask[row], "regions": batch.region_mask[row]}
    for one in prediction.encoded.attentions:
        weights, queries, keys = one.weights[row].float(), one.queries, one.keys
        if queries == "both":
            text, regions = (len(mask) for mask in masks.values())
            weights, queries, keys = weights[:, :text, text : text + regions], "text", "regions"
        weights = weights[:, masks[queries]][:, :, masks[keys]].numpy()
        maps.append(Map(one.layer, _KINDS[queries], _KINDS[keys], weights))
    regions = ["whole image", *prediction.names][: int(masks["regions"].sum())]
    return Attention(prediction.tokens[row], regions, maps)


def chosen_panels(attention: Attention, heads: str | None) -> list[Panel]:
    """Return the maps and heads of "1.3,2.0" (layer.head). By default those where text and image meet, or all where
    there are none; and of each the busiest head. ValueError where there is no such layer or head."""
    maps = attention.maps
    if heads is None:
        between = [one for one in maps if one.queries != one.keys]
        return [(one, attention.busiest(one)) for one in between or maps]
    chosen = []
    for name in heads.split(","):
        numbers = name.split(".")
        if len(numbers) != 2 or not all(number.strip().isdecimal() for number in numbers):
            raise ValueError(f"--heads {heads}: {name!r} is no layer.head, such as 1.3")
        layer, head = map(int, numbers)
        if layer > maps[-1].layer:
            raise ValueError(f"--heads {heads}: there is no {name}; the model has layers 0 to {maps[-1].layer}")
        of_layer = [one for one in maps if one.layer == layer]
        count = len(of_layer[0].weights)
        if head >= count:
            raise ValueError(f"--heads {heads}: there is no {name}; layer {layer} has heads 0 to {count - 1}")
        chosen += [(one, head) for one in of_layer]
    return chosen


def shown_regions(attention: Attention, panels: Sequence[Panel]) -> list[int]:
    """The regions that receive most in these panels, or give most where none receives; in their order."""
    found = [one.strength(head)[:MOST_WORDS].max(0) for one, head in panels if one.keys == "regions"]
    found = found or [one.strength(head).max(1) for one, head in panels if one.queries == "regions"]
    if not found:
        return []
    order = np.argsort(-np.max(found, axis=0), kind="stable")
    return sorted(order[(order > 0) | attention.reads_whole_image][:MOST_REGIONS].tolist())


# --- the figure -------------------------------------------------------------------------------------------------------


def write_attention(prediction: Prediction, beside: Path, heads: str | None = None) -> Path:
    """Draw the figure into a file beside another, and return its path."""
    figure = beside.with_name(f"{beside.stem}-attention.png")
    figure.write_bytes(draw_attention(prediction, heads))
    return figure


def draw_attention(prediction: Prediction, heads: str | None = None) -> bytes:
    """Return the figure as a PNG: the image with its regions and, for each panel, a heat map of the attention.

    It shows the regions with most attention in these panels, and the beginning of a long text.
    """
    require("matplotlib", "the figure of attention", "attention")
    from matplotlib.figure import Figure  # without pyplot it needs no display

    attention = attention_of(prediction)
    panels = chosen_panels(attention, heads)
    regions = shown_regions(attention, panels)
    shown: dict[Kind, list[int]] = {"words": list(range(len(attention.words)))[:MOST_WORDS], "regions": regions}
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = 0.3 * max(*map(len, shown.values()), 8) + 1.2  # inches of a panel
    figure = Figure((5.0 + 4.0 * columns, max(5.0, height * rows)), layout="constrained")
    grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1.35] + [1] * columns)
    image = figure.add_subplot(grid[:, 0])
    image.imshow(draw_boxes(prediction.sample, numbered_boxes(prediction, regions), 700))
    image.set_axis_off()
    image.set_title(title(attention, regions), fontsize=15, wrap=True)
    for position, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(grid[position // columns, 1 + position % columns]), attention, panel, shown)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def numbered_boxes(prediction: Prediction, shown: Sequence[int]) -> list[tuple[np.ndarray, tuple[int, int, int], str]]:
    """Return the regions `shown` for `draw_boxes`, with the numbers of the panels, the first on top.

    The whole image, 0, has no box.
    """
    boxes = prediction.sample.regions.boxes
    return [(boxes[number - 1], colour_of(number), str(number)) for number in reversed(shown) if number]


def title(attention: Attention, shown: Sequence[int]) -> str:
    """Return how many of the regions and tokens the figure shows, and whether the whole image."""
    count, regions = sum(number > 0 for number in shown), len(attention.regions) - 1
    of = f"{count} of {regions} regions" if count < regions else f"{count} regions"
    whole = " and the whole image" if 0 in shown else ""
    more = len(attention.words) - MOST_WORDS
    cut = f"; the first {MOST_WORDS} of {len(attention.words)} tokens" if more > 0 else ""
    return f"{of}{whole}{cut}"


def _draw_panel(axes: "Axes", attention: Attention, panel: Panel, shown: Mapping[Kind, list[int]]) -> None:
    """Draw a head as a heat map: a row for each that attends, a column for each that is attended to."""
    one, head = panel
    names = {"words": attention.words, "regions": attention.regions}
    axes.imshow(one.strength(head)[np.ix_(shown[one.queries], shown[one.keys])], cmap="Blues", vmin=0, vmax=1)
    axes.set_aspect("auto")
    axes.set_title(f"layer {one.layer}, head {head}: {one.queries} \N{RIGHTWARDS ARROW} {one.keys}", fontsize=14)
    for axis, kind in ((axes.yaxis, one.queries), (axes.xaxis, one.keys)):
        labels = [names[kind][number] for number in shown[kind]]
        axis.set_ticks(range(len(labels)), labels, parse_math=False)
    axes.tick_params(axis="x", rotation=90)
