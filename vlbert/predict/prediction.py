"""A prediction about one image, in words and drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from detectors.drawing import colour_of, draw_boxes
from storage.sample import Sample
from vlbert.data.batch import Batch
from vlbert.model.vlbert import Encoded

SIDE = 800  # pixels of the longer side of what is drawn


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """A model's prediction about one image.

    sample    the image as it would be stored, with its regions
    names     of the regions, in their order: number, from 1, and, where the detector knows it, class
    row       the task's prediction (Task.predictions in vlbert/tasks/base.py); None: regions alone
    tokens    of each row of the batch, special tokens included
    encoded   the encoder's output, with attention maps if they were requested; one row, or one for each choice
    """

    sample: Sample
    names: list[str]
    row: dict | None = None
    batch: Batch | None = None
    tokens: list[list[str]] = field(default_factory=list)
    encoded: Encoded | None = None

    @property
    def answer(self) -> str:
        """The model's answer; "" without a question."""
        return self.row["answer"] if self.row else ""

    @property
    def chosen(self) -> int:
        """The row of the batch that the answer comes from: that of the chosen one of several choices."""
        return int(np.argmax(self.row["probabilities"])) if self.row and len(self.tokens) > 1 else 0

    def lines(self) -> list[tuple[str, float | None]]:
        """Question and answers, line by line, with the probability of each that has one."""
        if self.row is None:
            return [(f"{len(self.names)} regions: {', '.join(self.names)}", None)]
        row = self.row
        lines = [(row["question"], None)] if row["question"] else []
        lines += [] if row["ground_truth"] is None else [(f"ground truth: {row['ground_truth']}", None)]
        if "[UNK]" in self.tokens[self.chosen]:
            lines.append((f"read as: {' '.join(self.tokens[self.chosen])}", None))
        assert self.batch is not None  # it is there where a row is
        used, found = self.batch.sizes.regions[self.chosen] - 1, len(self.names)
        if used < found:
            lines.append((f"the model reads the first {used} of {found} regions", None))
        lines += [(one["answer"], one["probability"]) for one in row["ranking"]]
        for region in row.get("masked_regions", []):
            lines.append(
                (f"region {region['region']}, masked; the detector's class is {region['detected_name']}", None)
            )
            lines += [(one["answer"], one["probability"]) for one in region["guesses"]]
        return lines

    def draw(self) -> Image.Image:
        """The image with the boxes that the answer names; without a question with all regions."""
        assert self.sample.regions is not None  # else there were no names
        if self.row is None:
            boxes = zip(self.sample.regions.boxes, range(1, len(self.names) + 1), self.names, strict=True)
        else:
            boxes = [(np.array(box["box"], np.float32), box["region"], box["name"]) for box in self.row["boxes"]]
        drawn = [(box, colour_of(region), name) for box, region, name in boxes]
        return draw_boxes(self.sample, drawn[::-1] if self.row is None else drawn, SIDE)


def class_name(number: int, classes: Sequence[str] | None) -> str:
    """The detector's class, 0 being the background, by its name where the detector has names."""
    return "background" if number == 0 else classes[number - 1] if classes else f"class {number}"
