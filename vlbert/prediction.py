"""What a model says about a picture, in words and drawn."""

import io
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from detectors.drawing import colour_of, draw_boxes, write_below
from storage.safe_json import shown
from storage.sample import Sample
from vlbert.data.batch import Batch
from vlbert.model.vlbert import Encoded

SIDE = 800  # pixels of the longer side of what is drawn


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """What a model says about a picture.

    sample    the picture as it would be stored, with its regions
    names     of the regions, in their order: number, from 1, and, where the detector knows it, class
    row       what the task's `predictions` say (vlbert/tasks/__init__.py); None where nothing was asked
    tokens    the tokens that the model read, special tokens included
    encoded   with attention maps, where they were asked for; one row, or one a choice
    seconds   of the detector, the model
    """

    sample: Sample
    names: list[str]
    row: dict | None = None
    batch: Batch | None = None
    tokens: list[list[str]] = field(default_factory=list)
    encoded: Encoded | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        seen = f"{len(self.names)} regions"
        if self.row is None:
            return f"<Prediction: {seen}>"
        return f"<Prediction: {shown(self.row['asked'])} -> {shown(self.said)}, {seen}>"

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        file = io.BytesIO()
        self.draw().save(file, "PNG")
        return file.getvalue()

    @property
    def said(self) -> str:
        """The answer."""
        return self.row["said"] if self.row else ""

    @property
    def chosen(self) -> int:
        """The row of the batch that the answer comes from: of several choices, that of the one that was chosen."""
        return int(np.argmax(self.row["probabilities"])) if len(self.tokens) > 1 else 0

    def lines(self) -> list[tuple[str, float | None]]:
        """What was asked and said, line by line, with the probability of each that has one."""
        if self.row is None:
            return [(f"{len(self.names)} regions: {', '.join(self.names)}", None)]
        row = self.row
        told = [(row["asked"], None)] if row["asked"] else []
        told += [] if row["truth"] is None else [(f"right would be: {row['truth']}", None)]
        if "[UNK]" in self.tokens[self.chosen]:
            told.append((f"read as: {' '.join(self.tokens[self.chosen])}", None))
        seen, found = int(self.batch.region_mask[self.chosen].sum()) - 1, len(self.names)
        if seen < found:
            told.append((f"{seen} of {found} regions were seen: the text leaves no room for more", None))
        told += [(one["said"], one["probability"]) for one in row["ranking"]]
        masks = row.get("masks", [])
        for number, mask in enumerate(masks if len(masks) > 1 else [], 1):
            told.append((f"[MASK] {number} by itself", None))
            told += [(one["said"], one["probability"]) for one in mask["guesses"]]
        for region in row.get("hidden_regions", []):
            told.append((f"region {region['region']}, hidden; the detector saw {region['detected_name']}", None))
            told += [(one["said"], one["probability"]) for one in region["guesses"]]
        return told

    def draw(self) -> Image.Image:
        """The picture with what was said below it and the boxes that the answer names, those that it was chosen among
        thinly; where nothing was asked, with all regions."""
        boxes, row, thin = self.sample.regions.boxes, self.row, []
        if row is None:
            drawn = [(box, colour_of(number), self.names[number - 1]) for number, box in enumerate(boxes, 1)][::-1]
        else:
            drawn = [(np.array(box["box"], np.float32), colour_of(box["region"]), box["name"]) for box in row["boxes"]]
            others = {one.get("region", 0): None for one in row["ranking"]}  # in the order of the ranking
            others = [number for number in others if number and number not in {box["region"] for box in row["boxes"]}]
            thin = [(boxes[number - 1], colour_of(number), str(number)) for number in reversed(others)]
        return write_below(draw_boxes(self.sample, [*thin, *drawn], SIDE, len(thin)), self.lines())
