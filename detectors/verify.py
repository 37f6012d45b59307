"""`vlbert verify-detector`: draw detected regions on images, to verify the weights of a detector (docs/detector.md)."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from detectors.detect import FasterRCNNDetector
from detectors.drawing import colour_of, draw_boxes
from detectors.image_file import detect_regions, read_image
from detectors.rebuild import detector_of_file
from detectors.select import SelectionSettings
from storage.programs import Command, Positional
from storage.sample import Regions

_LONGER_SIDE = 900  # of a drawing, in pixels
_REGIONS = 15  # drawn regions per image: the most probable ones


def name_regions(regions: Regions, metadata: dict) -> list[str]:
    """Return each region's attribute and class, such as "red car". If the metadata has no names, indices are used."""
    classes, attributes = metadata["classes"], metadata.get("attribute_names")
    class_names = [classes[label] if classes else f"class {label}" for label in regions.labels]
    if regions.attributes is None:
        return class_names
    adjectives = [attributes[number] if attributes else f"attribute {number}" for number in regions.attributes]
    return [f"{adjective} {name}" for adjective, name in zip(adjectives, class_names, strict=True)]


def verify(file: Path, detector: FasterRCNNDetector, folder: Path) -> None:
    """Print the most probable regions of an image, and draw them in `folder`. Raises ValueError if none are found."""
    sample = detect_regions(read_image(file), detector)
    regions = sample.require_regions()
    names = name_regions(regions, detector.metadata)[:_REGIONS]
    target = folder / f"{file.name}.png"
    print(f"{file.name}: {len(regions)} regions, the first {len(names)} drawn in {target}:")
    for number, name in enumerate(names, 1):
        print(f"  {number:2} {regions.scores[number - 1]:.2f} {name}")
    # Drawn in reverse order, with the most probable on top.
    boxes = [(regions.boxes[i], colour_of(i + 1), f"{i + 1} {name}") for i, name in enumerate(names)]
    draw_boxes(sample, boxes[::-1], side=_LONGER_SIDE).save(target)


def draw_regions(
    weights: Annotated[Path, Positional, tyro.conf.arg(metavar="WEIGHTS")],
    images: Annotated[tuple[Path, ...], Positional, tyro.conf.arg(metavar="IMAGE ...")],
    out: Path = Path("verified"),
    boxes: Literal["proposals", "regressed"] = "proposals",
) -> None:
    """Draw detected regions on your own images, with their names, to verify the weights of a detector.

    Args:
        weights: safetensors file with the detector's weights
        images: image files to draw on
        out: folder for the drawings
        boxes: boxes to draw: the RPN's proposals, or those boxes after the box head's regression
    """
    # bottom-up-attention's threshold, which also shows less certain regions
    detector = detector_of_file(weights, selection=SelectionSettings(threshold=0.2), boxes=boxes)
    out.mkdir(parents=True, exist_ok=True)
    for file in images:
        verify(file, detector, out)


main = Command("vlbert verify-detector", draw_regions)
