"""Who attends to whom: a figure like the paper's figure 3.

With layers J it shows which regions each token attends to; with co-attention, which regions the words attend to and
which words the regions; with layers T and V, which words words attend to, and which regions regions. Layers and heads
are counted from 0, as in the paper (appendix A.3). Shape letters: A heads, Q elements that attend, K those that are
attended to, T words, R regions (the whole image first).
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from detectors.drawing import colour_of, draw_boxes
from storage.programs import require
from vlbert.predict.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_WORDS, MOST_REGIONS = 40, 12  # that a panel of the figure shows
_COLUMNS = 4  # of panels
_GREY = (70, 70, 70)  # of lines between words
Kind = Literal["words", "regions"]
_KINDS: dict[str, Kind] = {"text": "words", "regions": "regions"}


@dataclass(frozen=True, eq=False)
class Map:
    """How much words or regions attend to words or regions, in one layer: weights float32 [A, Q, K]."""

    layer: int
    letter: str
    queries: Kind
    keys: Kind
    weights: np.ndarray


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

    def ordinary(self, kind: Kind) -> np.ndarray:
        """bool [T] or [R]: the words that are no [CLS] or [SEP], or the regions but the whole image."""
        if kind == "regions":
            return np.arange(len(self.regions)) > 0
        return np.array([word not in ("[CLS]", "[SEP]") for word in self.words])


Panel = tuple[int, int]  # number of a map, and of one of its heads


def attention_of(prediction: Prediction) -> Attention:
    """The maps of a prediction without padding; of several choices those of the chosen one."""
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
        maps.append(Map(one.layer, one.letter, _KINDS[queries], _KINDS[keys], weights))
    regions = ["whole image", *prediction.names][: int(masks["regions"].sum())]
    return Attention(prediction.tokens[row], regions, maps)


def chosen_panels(attention: Attention, heads: str | None) -> list[Panel]:
    """The maps and heads of "1.3,2.0" (layer.head). By default those where text and image meet, or all where there are
    none; and of each the head whose attention goes most to ordinary words or regions. ValueError where there is no such
    layer or head."""
    maps = attention.maps
    if heads is None:
        between = [number for number, one in enumerate(maps) if one.queries != one.keys]
        return [(number, _busiest(attention, maps[number])) for number in between or range(len(maps))]
    chosen = []
    for name in heads.split(","):
        numbers = name.split(".")
        if len(numbers) != 2 or not all(number.strip().isdecimal() for number in numbers):
            raise ValueError(f"--heads {heads}: {name!r} is no layer.head, such as 1.3")
        layer, head = map(int, numbers)
        if layer > maps[-1].layer:
            raise ValueError(f"--heads {heads}: there is no {name}; the model has layers 0 to {maps[-1].layer}")
        of_layer = [number for number, one in enumerate(maps) if one.layer == layer]
        count = len(maps[of_layer[0]].weights)
        if head >= count:
            raise ValueError(f"--heads {heads}: there is no {name}; layer {layer} has heads 0 to {count - 1}")
        chosen += [(number, head) for number in of_layer]
    return chosen


def _busiest(attention: Attention, one: Map) -> int:
    """The head with most attention to ordinary words or regions."""
    return int(one.weights[:, :, attention.ordinary(one.keys)].sum(2).mean(1).argmax())


def write_attention(prediction: Prediction, beside: Path, heads: str | None = None) -> Path:
    """Draws the figure into a file beside another; returns its path."""
    attention = attention_of(prediction)
    figure = beside.with_name(f"{beside.stem}-attention.png")
    draw_figure(prediction, attention, chosen_panels(attention, heads), figure)
    return figure


# --- the figure -------------------------------------------------------------------------------------------------------


def draw_figure(prediction: Prediction, attention: Attention, panels: Sequence[Panel], file: Path) -> None:
    """For each panel words and regions, and lines between them as strong as the attention.

    Shows the regions with most attention in these panels, and the beginning of a long text.
    """
    shown = _shown(attention, panels)
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(5.0 + 4.0 * columns, max(5.0, _height(shown) * rows))
    grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1.35] + [1] * columns)
    image = figure.add_subplot(grid[:, 0])
    image.imshow(draw_boxes(prediction.sample, numbered_boxes(prediction, shown["regions"].tolist()), 700))
    image.set_axis_off()
    image.set_title(title(attention, shown["regions"].tolist()), fontsize=15, wrap=True)
    crops = dict(zip(shown["regions"], thumbnails(prediction, shown["regions"].tolist()), strict=True))
    for position, (number, head) in enumerate(panels):
        axes = figure.add_subplot(grid[position // columns, 1 + position % columns])
        _draw_panel(axes, attention, (attention.maps[number], head), shown, crops)
    figure.savefig(file, dpi=100)


def panel_images(prediction: Prediction) -> list[bytes]:
    """The panels of the figure by themselves, each as a PNG, for a page that shows the image beside them."""
    attention = attention_of(prediction)
    panels = chosen_panels(attention, None)
    shown = _shown(attention, panels)
    crops = dict(zip(shown["regions"], thumbnails(prediction, shown["regions"].tolist()), strict=True))
    images = []
    for number, head in panels:
        figure = _figure(4.4, _height(shown))
        _draw_panel(figure.add_subplot(), attention, (attention.maps[number], head), shown, crops)
        file = io.BytesIO()
        figure.savefig(file, dpi=150)
        images.append(file.getvalue())
    return images


def _shown(attention: Attention, panels: Sequence[Panel]) -> dict[Kind, np.ndarray]:
    """The numbers of the words and of the regions that have room."""
    return {"words": np.arange(len(attention.words))[:MOST_WORDS], "regions": shown_regions(attention, panels)}


def _height(shown: dict[Kind, np.ndarray]) -> float:
    """Inches of a panel."""
    return 0.38 * max(len(shown["words"]), 2 * len(shown["regions"]), 6) + 0.8


def _figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches, that needs no display."""
    require("matplotlib", "the figure of attention")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    FigureCanvasAgg(figure)
    return figure


def strength(one: Map, head: int) -> np.ndarray:
    """[Q, K]: the attention of a head, rescaled over all heads of the map to 0..1 (figure 3)."""
    lowest, highest = one.weights.min(), one.weights.max()
    return (one.weights[head] - lowest) / max(highest - lowest, 1e-12)


def shown_regions(attention: Attention, panels: Sequence[Panel]) -> np.ndarray:
    """The regions that receive most in these panels, or give most where none receives; in their order."""
    sides = [(attention.maps[number], strength(attention.maps[number], head)) for number, head in panels]
    found = [strengths[:MOST_WORDS].max(0) for one, strengths in sides if one.keys == "regions"]
    found = found or [strengths.max(1) for one, strengths in sides if one.queries == "regions"]
    if not found:
        return np.zeros(0, np.int64)
    order = np.argsort(-np.max(found, axis=0), kind="stable")
    return np.sort(order[(order > 0) | attention.reads_whole_image][:MOST_REGIONS])


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
    axes: "Axes",
    attention: Attention,
    panel: tuple[Map, int],
    shown: dict[Kind, np.ndarray],
    crops: dict[int, np.ndarray],
) -> None:
    """A column of words or regions on each side, and a line for each pair. Words stand left of regions, whoever
    attends: the arrow of the title starts at those that do."""
    from matplotlib.collections import LineCollection

    (one, head), strengths = panel, strength(*panel)
    backwards = (one.queries, one.keys) == ("regions", "words")
    left, right = (one.keys, one.queries) if backwards else (one.queries, one.keys)
    strengths = (strengths.T if backwards else strengths)[np.ix_(shown[left], shown[right])]
    arrow = "\N{LEFTWARDS ARROW}" if backwards else "\N{RIGHTWARDS ARROW}"
    axes.set_title(f"layer {one.layer}, head {head}: {left} {arrow} {right}", fontsize=14)
    starts = _draw_column(axes, attention, left, shown[left], crops, mirrored=left == "regions")
    ends = _draw_column(axes, attention, right, shown[right], crops, mirrored=right == "words")
    lines = [[start, end] for start in starts for end in ends]
    of_keys = [_GREY if right == "words" else colour_of(number) for number in shown[right]]
    colours = [
        (*(np.array(colour) / 255), each) for row in strengths for colour, each in zip(of_keys, row, strict=True)
    ]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=1.6))
    axes.set_xlim(-0.3 if left == "regions" else 0, 1.15)
    axes.set_ylim(0, 1)
    axes.set_axis_off()


def _draw_column(
    axes: "Axes",
    attention: Attention,
    kind: Kind,
    shown: np.ndarray,
    crops: dict[int, np.ndarray],
    mirrored: bool,
) -> list[tuple[float, float]]:
    """Words left and regions right; `mirrored`: the other way round. Returns where the lines of each begin."""
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    def across(x: float) -> float:
        return 0.98 - x if mirrored else x

    heights = 1 - (np.arange(len(shown)) + 0.5) / len(shown)
    side = "right" if (kind == "words") != mirrored else "left"
    names = {"words": attention.words, "regions": attention.regions}[kind]
    for number, height in zip(shown, heights, strict=True):
        text = {"ha": side, "va": "center", "fontsize": 14 if kind == "words" else 13, "parse_math": False}
        axes.text(across(0.28 if kind == "words" else 0.82), height, names[number], **text)
        if kind == "regions":
            edge = {"edgecolor": np.array(colour_of(number)) / 255}
            image = OffsetImage(crops[number], zoom=22 / max(crops[number].shape[:2]))
            axes.add_artist(AnnotationBbox(image, (across(0.74), height), pad=0.15, bboxprops=edge))
    return [(across(0.3 if kind == "words" else 0.68), height) for height in heights]
