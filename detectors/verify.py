"""Draw what the weights of a file detect: boxes with names, on images of your own.

    vlbert verify-detector WEIGHTS IMAGE... [--out DIR] [--boxes regressed]

WEIGHTS is a safetensors file (`vlbert convert-detector` makes one of a published file). Each image is normalised as
in a collection and detected as in detectors.run. Correct weights name what is there, with scores near 1. Classes in a
wrong order give confident nonsense; wrong tensors give low scores.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from detectors.detect import FasterRCNNDetector
from detectors.drawing import colour_of, draw_boxes
from detectors.rebuild import detector_of_file
from detectors.select import SelectionSettings
from storage.collect.normalise import ImageSettings, Refused, normalise
from storage.programs import Command, Positional
from storage.sample import Regions, Sample

_LONGER_SIDE = 900  # pixels of a drawing
_REGIONS = 15  # that are drawn of an image, the most probable


def read_sample(file: Path) -> Sample:
    """Return an image file as a collection would store it; ValueError where it would not."""
    try:
        image = normalise(file.read_bytes(), ImageSettings())
    except Refused as error:
        raise ValueError(f"{file} is no image for the detector: {error.status}: {error.detail}") from error
    return Sample(file.stem, image.jpeg, "", "", image.width, image.height, image.sha256, image.flags)


def name_regions(regions: Regions, metadata: dict) -> list[str]:
    """Return each region's attribute and class; without names they are numbers."""
    classes, attributes = metadata["classes"], metadata.get("attribute_names")
    named = [classes[label] if classes else f"class {label}" for label in regions.labels]
    if regions.attributes is None:
        return named
    said = [attributes[number] if attributes else f"attribute {number}" for number in regions.attributes]
    return [f"{attribute} {name}" for attribute, name in zip(said, named, strict=True)]


def verify(file: Path, detector: FasterRCNNDetector, folder: Path) -> None:
    """Print what is found in an image, and draw it into the folder; ValueError where nothing is."""
    sample = read_sample(file)
    (regions,) = detector.detect([sample])
    if isinstance(regions, str):
        raise ValueError(f"{file}: {regions}")
    names = name_regions(regions, detector.metadata)[:_REGIONS]
    target = folder / f"{file.name}.png"
    print(f"{file.name}: {len(regions)} regions, the first {len(names)} drawn in {target}:")
    for number, name in enumerate(names, 1):
        print(f"  {number:2} {regions.scores[number - 1]:.2f} {name}")
    # The most probable on top.
    boxes = [(regions.boxes[i], colour_of(i + 1), f"{i + 1} {name}") for i, name in enumerate(names)]
    draw_boxes(sample, boxes[::-1], side=_LONGER_SIDE).save(target)


def draw_regions(
    weights: Annotated[Path, Positional, tyro.conf.arg(metavar="WEIGHTS")],
    images: Annotated[tuple[Path, ...], Positional, tyro.conf.arg(metavar="IMAGE ...")],
    out: Path = Path("verified"),
    boxes: Literal["proposals", "regressed"] = "proposals",
) -> None:
    """Draw what the weights of a file detect: boxes with names, on images of your own.

    Args:
        weights: safetensors file
        images: each is drawn
        out: folder of the drawings
        boxes: which to draw
    """
    # bottom-up-attention's threshold: shows less certain regions, too
    detector = detector_of_file(weights, selection=SelectionSettings(threshold=0.2), boxes=boxes)
    out.mkdir(parents=True, exist_ok=True)
    for file in images:
        verify(file, detector, out)


main = Command("vlbert verify-detector", draw_regions)
