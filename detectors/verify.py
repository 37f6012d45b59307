"""Draw what the weights of a file detect: boxes with names and scores, on images of your own.

    vlbert verify-detector WEIGHTS IMAGE... [--out DIR] [--classes objects_vocab.txt] [--attributes ...]

WEIGHTS is a safetensors file (`vlbert convert-detector` makes one of a published file). Each image is normalised as
in a collection and detected as in detectors.run. Correct weights name what is there, with scores near 1. Classes in a
wrong order give confident nonsense; wrong tensors give low scores. If the image with red and blue swapped scores
higher, the channels are swapped somewhere.
Exit status: 0 when every image was drawn, else 1.
"""

import dataclasses
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from PIL import Image

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.drawing import colour_of, draw_boxes, write_below
from detectors.faster_rcnn import PRESETS, FasterRCNN
from detectors.select import SelectionSettings
from detectors.weights.files import LoadedWeights, load_weights, read_config, read_names_of
from storage.collect.normalise import STORED_FORMATS, ImageSettings, Refused, normalise
from storage.programs import Positional, command
from storage.sample import Regions, Sample

_LONGER_SIDE = 900  # pixels of a drawing


@dataclass(frozen=True)
class NamedRegion:
    """One region: `name` (attribute and class), both scores, and its box, xyxy in pixels of the image."""

    name: str
    score: float
    attribute_score: float | None
    box: tuple[float, float, float, float]

    @property
    def label(self) -> str:
        """The name, and how sure its attribute is."""
        return self.name if self.attribute_score is None else f"{self.name} (attribute {self.attribute_score:.2f})"

    def __str__(self) -> str:
        x1, y1, x2, y2 = (round(side) for side in self.box)
        return f"{self.score:.2f} {self.label}, x {x1}-{x2}, y {y1}-{y2}"

    @property
    def area(self) -> float:
        x1, y1, x2, y2 = self.box
        return (x2 - x1) * (y2 - y1)


def name_regions(
    regions: Regions, classes: Sequence[str] | None, attributes: Sequence[str] | None
) -> list[NamedRegion]:
    """The regions with their names, most probable first; a class without a name is `class 7`."""
    named = []
    for index, label in enumerate(regions.labels):
        name, score = classes[label] if classes else f"class {label}", None
        if regions.attributes is not None:
            attribute = regions.attributes[index]
            name = f"{attributes[attribute] if attributes else f'attribute {attribute},'} {name}"
            score = float(regions.attribute_scores[index])
        named.append(NamedRegion(name, float(regions.scores[index]), score, tuple(map(float, regions.boxes[index]))))
    return named


def draw(sample: Sample, regions: Sequence[NamedRegion]) -> Image.Image:
    """The image with numbered boxes, its longer side 900 pixels, and below it the regions with their scores."""
    numbered = [(region, colour_of(number), number) for number, region in enumerate(regions, start=1)]
    numbered.sort(key=lambda one: -one[0].area)  # small boxes on top of large ones
    boxes = [(np.array(region.box), colour, f"{number} {region.name}") for region, colour, number in numbered]
    lines = [(f"{number} {region.label}", region.score) for number, region in enumerate(regions, start=1)]
    return write_below(draw_boxes(sample, boxes, side=_LONGER_SIDE), lines)


def read_sample(file: Path) -> Sample:
    """An image file as a collection would store it; ValueError where it would not."""
    try:
        image = normalise(file.read_bytes(), ImageSettings())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    except Refused as error:
        raise ValueError(f"{file} is no image for the detector: {error.status}: {error.detail}") from error
    return Sample(file.stem, image.jpeg, "", "", image.width, image.height, image.sha256, image.flags)


def swap_red_and_blue(sample: Sample) -> Sample:
    """The same image with its red and blue channels swapped, stored without loss."""
    with Image.open(io.BytesIO(sample.image), formats=STORED_FORMATS) as image:
        swapped = Image.fromarray(np.array(image.convert("RGB"))[:, :, ::-1].copy())
    stream = io.BytesIO()
    swapped.save(stream, "png")
    return dataclasses.replace(sample, image=stream.getvalue())


def open_detector(weights: Path, preset: str | None, boxes: str) -> tuple[FasterRCNNDetector, LoadedWeights]:
    """The detector of a weight file, with the network that the preset or, without one, the file names."""
    network = FasterRCNN.random_init(PRESETS[preset] if preset else read_config(weights), seed=0)
    loaded = load_weights(network, weights)
    selection = SelectionSettings(threshold=0.2)  # bottom-up-attention's: shows less certain regions, too
    return FasterRCNNDetector(network, loaded.metadata, DetectorSettings(selection, boxes=boxes)), loaded


def _mean_of_best(regions: Regions) -> float:
    """The mean score of the ten most probable regions."""
    return float(np.sort(regions.scores)[-10:].mean())


def verify(
    weights: Annotated[Path, Positional, tyro.conf.arg(metavar="WEIGHTS")],
    images: Annotated[tuple[Path, ...], Positional, tyro.conf.arg(metavar="IMAGE ...")],
    out: Path = Path("verified"),
    classes: Path | None = None,
    attributes: Path | None = None,
    preset: Literal["vg_resnet101", "vg_resnet50", "demo"] | None = None,
    regions: int = 15,
    boxes: Literal["proposals", "regressed"] = "proposals",
) -> None:
    """Draw what the weights of a file detect: boxes with names and scores, on images of your own.

    Args:
        weights: safetensors file
        images: each is drawn
        out: folder of the drawings
        classes: objects_vocab.txt, if the weights name no classes
        attributes: attributes_vocab.txt, if the weights name no attributes
        preset: the network, if the weights do not name it
        regions: draw so many, the most probable
        boxes: which to draw
    """
    if regions < 1:
        raise ValueError(f"--regions is {regions}; it must be at least 1")
    detector, loaded = open_detector(weights, preset, boxes)
    config = detector.network.config
    names = loaded.classes if classes is None else read_names_of(classes, "classes", config.num_classes)
    attribute_names = loaded.attribute_names
    if attributes:
        attribute_names = read_names_of(attributes, "attributes", config.num_attributes if loaded.attributes else 0)
    out.mkdir(parents=True, exist_ok=True)
    print(f"{loaded.file}: release {loaded.release or 'none'}, anchors {loaded.anchors}", end=", ")
    print("attributes present" if loaded.attributes else "attributes absent")
    for difference in loaded.differences:
        print(f"NOT THE SAME as in the release: {difference}")
    failed = False
    for file in images:
        try:
            sample = read_sample(file)
            found, swapped = detector.detect([sample, swap_red_and_blue(sample)])
            if isinstance(found, str):
                raise ValueError(f"{file}: {found}")
        except ValueError as error:
            print(f"vlbert verify-detector: {error}", file=sys.stderr)
            failed = True
            continue
        named = name_regions(found, names, attribute_names)[:regions]
        print(f"{file.name}: {sample.width}x{sample.height}, {len(found)} regions, the first {len(named)}:")
        for number, region in enumerate(named, start=1):
            print(f"  {number:2} {region}")
        print(f"  mean score of the best ten: {_mean_of_best(found):.2f}", end="")
        print("" if isinstance(swapped, str) else f"; with red and blue swapped {_mean_of_best(swapped):.2f}")
        target = out / f"{file.name}.png"
        draw(sample, named).save(target)
        print(f"  drawn in {target}")
    if failed:
        sys.exit(1)


main = command("vlbert verify-detector", verify)
