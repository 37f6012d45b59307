"""Look at what a weight file finds: boxes with names and scores, drawn on pictures.

    python -m detectors.verify WEIGHTS IMAGE... [--out DIR] [--classes objects_vocab.txt] [--attributes ...]

WEIGHTS is a safetensors file (weights.py makes one of a published file). Each image goes the way that images take
before detection, and to the network as detection gives it, in blue, green, red. Right weights name what one sees, with
scores near 1; a wrong order of classes gives confident nonsense, wrong tensors no confidence at all. Where the same
image with red and blue swapped is recognised better, colours are swapped somewhere.
Exit status: 0 when every image was drawn, else 1.
"""

import argparse
import dataclasses
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import PRESETS, FasterRCNN
from detectors.select import SelectionSettings
from detectors.weights.files import Loaded, load_weights, names_of, read_config
from storage.normalise import STORED_FORMATS, ImageSettings, Refused, normalise
from storage.sample import Regions, Sample

# Told apart by people with any colour vision, and dark enough for white text.
_COLOURS = (
    "#b2182b",
    "#2166ac",
    "#1b7837",
    "#762a83",
    "#b35806",
    "#01665e",
    "#c51b7d",
    "#4d4d4d",
    "#543005",
    "#3f007d",
)
_LONGER_SIDE = 900
_PANEL_WIDTH = 470
_TEXT_SIZE = 16
_LINE_HEIGHT = 24


@dataclass(frozen=True)
class Found:
    """One region, in words: `name` (the attribute before the class), both scores, and its box in the image's pixels."""

    name: str
    score: float
    attribute_score: float | None
    box: tuple[float, float, float, float]

    def __str__(self) -> str:
        attribute = "" if self.attribute_score is None else f" (attribute {self.attribute_score:.2f})"
        x1, y1, x2, y2 = (round(side) for side in self.box)
        return f"{self.score:.2f} {self.name}{attribute}, x {x1}-{x2}, y {y1}-{y2}"


def found(regions: Regions, classes: Sequence[str] | None, attributes: Sequence[str] | None) -> list[Found]:
    """The regions in words, most probable first; a class without name is `class 7`."""
    rows = []
    for index, label in enumerate(regions.labels):
        name, score = classes[label] if classes else f"class {label}", None
        if regions.attributes is not None:
            attribute = regions.attributes[index]
            name = f"{attributes[attribute] if attributes else f'attribute {attribute},'} {name}"
            score = float(regions.attribute_scores[index])
        rows.append(Found(name, float(regions.scores[index]), score, tuple(map(float, regions.boxes[index]))))
    return rows


def draw(image: Image.Image, rows: Sequence[Found]) -> Image.Image:
    """The image, its longer side 900 pixels, with numbered boxes, and beside it what each number is."""
    scale = _LONGER_SIDE / max(image.size)
    shown, height = (max(1, round(side * scale)) for side in image.size)
    page_height = max(height, (len(rows) + 1) * _LINE_HEIGHT)
    page = Image.new("RGB", (shown + _PANEL_WIDTH, page_height), "white")
    page.paste(image.convert("RGB").resize((shown, height), Image.Resampling.LANCZOS))
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(_TEXT_SIZE)
    boxes = [tuple(side * scale for side in row.box) for row in rows]
    # Small boxes last, and all labels after all boxes, so that nothing hides what is smaller or said.
    by_size = sorted(range(len(rows)), key=lambda i: -(boxes[i][2] - boxes[i][0]) * (boxes[i][3] - boxes[i][1]))
    for index in by_size:
        x1, y1, x2, y2 = boxes[index]
        pen.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline="white", width=5)
        pen.rectangle(boxes[index], outline=_colour(index), width=3)
    taken = []
    for index, row in enumerate(rows):
        text = f"{index + 1} {row.name}"
        width = pen.textlength(text, font=font) + 8
        place = _free_place(boxes[index], width, (shown, height), taken)
        taken.append(place)
        pen.rectangle(place, fill=_colour(index))
        pen.text((place[0] + 4, place[1] + 2), text, fill="white", font=font)
    for index, row in enumerate(rows):
        y = index * _LINE_HEIGHT + 6
        pen.rectangle((shown + 10, y, shown + 40, y + _LINE_HEIGHT - 3), fill=_colour(index))
        pen.text((shown + 14, y + 2), str(index + 1), fill="white", font=font)
        attribute = "" if row.attribute_score is None else f"  (attribute {row.attribute_score:.2f})"
        pen.text((shown + 48, y + 2), f"{row.score:.2f}  {row.name}{attribute}", fill="black", font=font)
    return page


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _free_place(box: tuple, width: float, shown: tuple[int, int], taken: Sequence[tuple]) -> tuple:
    """Where a label of this width goes: on its box's upper side, or as near as leaves earlier labels readable."""
    tall = _LINE_HEIGHT - 3
    lowest = max(0, shown[1] - tall)
    x = max(0, min(box[0], shown[0] - width))
    start = min(box[1] - tall if box[1] >= tall else max(0, box[1]), lowest)
    for step in sorted(range(-100, 101), key=abs):
        y = start + step * (tall + 1)
        clear = all(x + width <= t[0] or t[2] <= x or y + tall <= t[1] or t[3] <= y for t in taken)
        if clear and 0 <= y <= lowest:
            return x, y, x + width, y + tall
    return x, start, x + width, start + tall


def read_sample(file: Path) -> Sample:
    """An image file as collecting would store it. ValueError where it would not."""
    try:
        picture = normalise(file.read_bytes(), ImageSettings())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    except Refused as error:
        raise ValueError(f"{file} is no image for the detector: {error.status}: {error.detail}") from error
    return Sample(file.stem, picture.image, "", "", picture.width, picture.height, picture.sha256, picture.flags)


def red_and_blue_swapped(sample: Sample) -> Sample:
    """The same picture in false colours, without loss."""
    with Image.open(io.BytesIO(sample.image), formats=STORED_FORMATS) as image:
        swapped = Image.fromarray(np.array(image.convert("RGB"))[:, :, ::-1].copy())
    stream = io.BytesIO()
    swapped.save(stream, "png")
    return dataclasses.replace(sample, image=stream.getvalue())


def open_detector(weights: Path, preset: str | None, boxes: str) -> tuple[FasterRCNNDetector, Loaded]:
    """The detector of a weight file: in the network that the file names, or the preset."""
    network = FasterRCNN.random_init(PRESETS[preset] if preset else read_config(weights), seed=0)
    loaded = load_weights(network, weights)
    selection = SelectionSettings(threshold=0.2)  # bottom-up-attention's: shows less certain regions, too
    return FasterRCNNDetector(network, loaded.metadata, DetectorSettings(selection, boxes=boxes)), loaded


def _sure(regions: Regions) -> float:
    """The mean score of the ten most probable regions."""
    return float(np.sort(regions.scores)[-10:].mean())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m detectors.verify", description=__doc__.split("\n")[0])
    parser.add_argument("weights", type=Path, metavar="WEIGHTS", help="safetensors file")
    parser.add_argument("images", type=Path, metavar="IMAGE", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("verified"), help="folder of the drawings (verified)")
    parser.add_argument("--classes", type=Path, help="objects_vocab.txt, where the weights name no classes")
    parser.add_argument("--attributes", type=Path, help="attributes_vocab.txt, where the weights name no attributes")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="the network, where the weights do not say it")
    parser.add_argument("--regions", type=int, default=15, help="draw so many, the most probable (15)")
    parser.add_argument("--boxes", choices=["proposals", "regressed"], default="proposals", help="which (proposals)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.regions < 1:
            raise ValueError(f"--regions is {options.regions}, must be at least 1")
        detector, loaded = open_detector(options.weights, options.preset, options.boxes)
        config = detector.network.config
        classes, attributes = loaded.classes, loaded.attribute_names
        if options.classes:
            classes = names_of(options.classes, "classes", config.num_classes)
        if options.attributes:
            attributes = names_of(options.attributes, "attributes", config.num_attributes if loaded.attributes else 0)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(f"{loaded.file}: release {loaded.release or 'none'}, anchors {loaded.anchors}", end=", ")
    print("attributes present" if loaded.attributes else "attributes absent")
    for difference in loaded.differences:
        print(f"NOT THE SAME as in the release: {difference}")
    failed = False
    for file in options.images:
        try:
            sample = read_sample(file)
            regions, swapped = detector.detect([sample, red_and_blue_swapped(sample)])
            if isinstance(regions, str):
                raise ValueError(f"{file}: {regions}")
        except ValueError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            failed = True
            continue
        rows = found(regions, classes, attributes)[: options.regions]
        print(f"{file.name}: {sample.width}x{sample.height}, {len(regions)} regions, the first {len(rows)}:")
        for number, row in enumerate(rows, start=1):
            print(f"  {number:2} {row}")
        print(f"  the ten surest score {_sure(regions):.2f}", end="")
        print("" if isinstance(swapped, str) else f"; with red and blue swapped {_sure(swapped):.2f}")
        with Image.open(io.BytesIO(sample.image), formats=STORED_FORMATS) as image:
            target = options.out / f"{file.name}.png"
            draw(image, rows).save(target)
        print(f"  drawn in {target}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
