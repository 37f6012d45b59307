"""A prediction for one image, as text and as a drawing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from detectors.drawing import colour_of, draw_boxes
from storage.safe_json import printable
from storage.sample import Sample
from vlbert.data.batch import Batch
from vlbert.model.vlbert import Encoded

SIDE = 800  # pixels of the longer side of a drawing


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """A model's prediction for one image.

    Attributes:
        sample: The image as datasets store it, with its regions.
        names: Name of each region: its number, counted from 1, and its class if the detector has class names.
        row: The task's prediction (Task.predictions in vlbert/tasks/base.py); None if there are only regions.
        batch: The model's input. It has one row per choice, or a single row.
        tokens: Tokens of each row of `batch`, including special tokens.
        encoded: The encoder's output for `batch`, with attention maps if requested.
    """

    sample: Sample
    names: list[str]
    row: dict | None = None
    batch: Batch | None = None
    tokens: list[list[str]] = field(default_factory=list)
    encoded: Encoded | None = None

    @property
    def answer(self) -> str:
        """The model's answer, or "" if there are only regions."""
        return self.row["answer"] if self.row else ""

    @property
    def chosen(self) -> int:
        """Index of the batch row that gives the answer: the most probable choice, or 0 if there are no choices."""
        return int(np.argmax(self.row["probabilities"])) if self.row and len(self.tokens) > 1 else 0

    def lines(self) -> list[tuple[str, float | None]]:
        """Return the lines to print, such as the question and the answers, each with its probability or None."""
        if self.row is None:
            return [(printable(f"{len(self.names)} regions: {', '.join(self.names)}"), None)]
        row = self.row
        lines = [(row["question"], None)] if row["question"] else []
        lines += [] if row["ground_truth"] is None else [(f"ground truth: {row['ground_truth']}", None)]
        if "[UNK]" in self.tokens[self.chosen]:
            lines.append((f"read as: {' '.join(self.tokens[self.chosen])}", None))
        assert self.batch is not None  # every row has a batch
        used, total = self.batch.sizes.regions[self.chosen] - 1, len(self.names)
        if used < total:
            lines.append((f"the model reads the first {used} of {total} regions", None))
        lines += [(entry["answer"], entry["probability"]) for entry in row["ranking"]]
        for region in row.get("masked_regions", []):
            lines.append(
                (f"masked region {region['region']}, which the detector classifies as {region['detected_name']}:", None)
            )
            lines += [(guess["answer"], guess["probability"]) for guess in region["guesses"]]
        return [(printable(text), probability) for text, probability in lines]  # a stranger's words may be among them

    def draw(self) -> Image.Image:
        """Draw the image with the answer's boxes. If there is no answer, all regions are drawn."""
        if self.row is None:
            boxes = zip(self.sample.require_regions().boxes, range(1, len(self.names) + 1), self.names, strict=True)
        else:
            boxes = [(np.array(box["box"], np.float32), box["region"], box["name"]) for box in self.row["boxes"]]
        drawn = [(box, colour_of(region), name) for box, region, name in boxes]
        return draw_boxes(self.sample, drawn[::-1] if self.row is None else drawn, SIDE)


def class_name(number: int, classes: Sequence[str] | None) -> str:
    """Return the name of a detector class, or "class N" if `classes` has no names. Class 0 is the background."""
    return "background" if number == 0 else classes[number - 1] if classes else f"class {number}"
