"""RefCOCO+: which region does an expression mean? (paper 4.2; UNC split, ground-truth regions)

    torchrun -m vlbert.train finetune_refcoco_base data.root=ROOT task.folder=refcoco+ start_from=ROOT/runs/...

The paper (table 3), VL-BERT base on ground-truth regions: val 79.88, testA 82.40, testB 75.01 (% of expressions).
"""

import functools
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.sample import Sample
from vlbert.batch import Batch, Example, Words
from vlbert.boxes import iou
from vlbert.config import ModelConfig
from vlbert.model import Classifier, Encoded, VLBert
from vlbert.pictures import View
from vlbert.tasks import Questions
from vlbert.tasks.official import find_samples
from vlbert.text import Vocabulary

if TYPE_CHECKING:
    from vlbert.data import Samples


@dataclass(frozen=True)
class RefCOCOSettings:
    folder: str = ""  # holds refs(unc).p and instances.json, as the data set ships them
    validate_on: Literal["val", "testA", "testB"] = "val"
    whole_image_competes: bool = False  # may the whole image be the answer?
    inclusive_boxes: bool = False  # overlaps count pixels: a box from column 3 to column 5 is three wide, not two
    adds_ground_truth: bool = False  # train on the boxes of all annotated objects beside the regions that were found

    @property
    def files(self) -> tuple[str, ...]:
        """What `folder` must hold."""
        return "refs(unc).p", "instances.json"


@dataclass(frozen=True)
class Expression:
    """One sentence that refers to one object."""

    sentence_id: int
    ref_id: int
    text: str
    box: tuple[float, float, float, float]  # of the object: x1 y1 x2 y2 in pixels of the image that the data set ships
    image_size: tuple[int, int]  # width, height of that image
    objects: tuple[tuple[float, float, float, float], ...]  # boxes of all annotated objects of the image
    held_out: bool


class RefCOCO:
    shuffles = False
    paper = "79.88 val, 82.40 testA, 75.01 testB (base, ground-truth regions, table 3)"

    def __init__(self, settings: RefCOCOSettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary

    @functools.cached_property
    def expressions(self) -> dict[str, dict[str, list["Expression"]]]:
        """split -> image file -> its expressions."""
        return read_expressions(Path(self.settings.folder))

    def questions(self, samples: "Samples", held_out: bool) -> Questions:
        split = self.settings.validate_on if held_out else "train"
        if split not in self.expressions:
            raise ValueError(
                f"{self.settings.folder}/refs(unc).p has no split {split}, only {', '.join(sorted(self.expressions))}"
            )
        by_file = self.expressions[split]
        asks = [replace(one, held_out=held_out) for ones in by_file.values() for one in ones]
        images = [file for file, ones in by_file.items() for _ in ones]
        return Questions(find_samples(samples, images, f"the split {split} of {self.settings.folder}"), asks)

    def example(self, sample: Sample, view: View, ask: Expression, rng: np.random.Generator) -> Example:
        text = swap_sides(ask.text) if view.flipped else ask.text
        to_stored = np.array([sample.width / ask.image_size[0], sample.height / ask.image_size[1]] * 2)
        if self.settings.adds_ground_truth and not ask.held_out:
            view = view.with_boxes(np.array(ask.objects) * to_stored)
        box = view.place(np.array([ask.box]) * to_stored)
        overlap = iou(view.boxes, box, self.settings.inclusive_boxes)[:, 0]  # (1 + r,)
        candidate = np.ones(len(view.boxes), bool)
        candidate[0] = self.settings.whole_image_competes
        picture = view.picture(
            targets={"candidate": candidate, "right": candidate & (overlap > 0.5), "iou": overlap.astype(np.float32)}
        )
        about = {"sentence_id": ask.sentence_id, "ref_id": ask.ref_id, "expression": ask.text}
        return Example(sample.key, self.words(self.vocabulary.encode(text)), picture, about)

    def words(self, expression: np.ndarray) -> Words:
        """[CLS] expression [SEP]."""
        tokens = np.array([self.vocabulary.cls, *expression, self.vocabulary.sep], np.int64)
        zeros = np.zeros(len(tokens), np.int64)
        return Words(tokens, zeros, zeros)

    def head(self, config: ModelConfig) -> nn.Module:
        if self.settings.adds_ground_truth and config.regions.features != "end_to_end":
            raise ValueError(
                "task.adds_ground_truth: boxes cannot join precomputed features; set model.regions.features=end_to_end "
                "or task.adds_ground_truth=false"
            )
        return Classifier(config, outputs=1, kind="regions", dropout=0.0)

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        candidate = batch.targets["candidate"]
        scores, right = head(encoded.regions[candidate])[:, 0], batch.targets["right"][candidate]
        return {
            "regions": (F.binary_cross_entropy_with_logits(scores.float(), right.float(), reduction="sum"), len(scores))
        }

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        candidate = batch.targets["candidate"]
        # Only candidates can win: neither padding nor, unless it competes, the whole image.
        scores = torch.full(candidate.shape, -torch.inf, device=candidate.device)
        scores[candidate] = head(encoded.regions[candidate])[:, 0].float()
        chosen = scores.argmax(1)
        iou = batch.targets["iou"].gather(1, chosen[:, None])[:, 0]
        best = batch.targets["iou"].masked_fill(~candidate, -1).argmax(1)
        columns = {
            "key": batch.keys,
            "region": (chosen - 1).tolist(),  # as in the sample's Regions; -1 is the whole image, or that there is none
            "iou": iou.masked_fill(~candidate.any(1), 0).tolist(),
            "exact": ((chosen == best) & (iou > 0) & candidate.any(1)).tolist(),
            "candidates": candidate.sum(1).tolist(),
        }
        found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [about | row for about, row in zip(batch.about, found, strict=True)]

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """accuracy: IoU >= 0.5 with the object; exact: the region that fits it best; chance: mean of 1 / candidates."""
        return {
            "accuracy": float(np.mean([row["iou"] >= 0.5 for row in rows])),
            "exact": float(np.mean([row["exact"] for row in rows])),
            "chance": float(np.mean([1 / row["candidates"] if row["candidates"] else 0 for row in rows])),
        }


def read_expressions(folder: Path) -> dict[str, dict[str, list[Expression]]]:
    """split -> image file -> its expressions, from refs(unc).p and instances.json."""
    for name in RefCOCOSettings().files:
        if not (folder / name).is_file():
            raise ValueError(f"there is no {folder / name}; set task.folder to the RefCOCO+ folder that holds it")
    with open(folder / "instances.json") as file:
        instances = json.load(file)
    images = {image["id"]: image for image in instances["images"]}
    boxes, objects = {}, defaultdict(list)
    for annotation in instances["annotations"]:
        x, y, w, h = annotation["bbox"]
        boxes[annotation["id"]] = (x, y, x + w, y + h)
        objects[annotation["image_id"]].append(boxes[annotation["id"]])
    expressions: dict[str, dict[str, list[Expression]]] = defaultdict(lambda: defaultdict(list))
    for ref in read_plain_pickle(folder / "refs(unc).p"):
        if ref["image_id"] not in images or ref["ann_id"] not in boxes:
            raise ValueError(
                f"{folder}/refs(unc).p: ref {ref['ref_id']} names image {ref['image_id']}, annotation {ref['ann_id']}, "
                f"which instances.json does not hold; both files must be of the same data set"
            )
        image = images[ref["image_id"]]
        for sentence in ref["sentences"]:
            expressions[ref["split"]][image["file_name"]].append(
                Expression(
                    sentence["sent_id"],
                    ref["ref_id"],
                    sentence["sent"],
                    boxes[ref["ann_id"]],
                    (image["width"], image["height"]),
                    tuple(objects[ref["image_id"]]),
                    held_out=False,
                )
            )
    return {split: dict(by_file) for split, by_file in expressions.items()}


def read_plain_pickle(file: Path) -> Any:
    """A pickle of plain lists, dicts, strings and numbers (Python 2's too); anything that would run code is refused."""

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise ValueError(
                f"{file} wants to load {module}.{name}; a refs file holds plain values only, do not trust it"
            )

    return Plain(io.BytesIO(file.read_bytes()), encoding="utf-8").load()


def swap_sides(text: str) -> str:
    """The text for the mirrored picture: left for right and right for left."""
    sides = {"left": "right", "right": "left"}
    return re.sub(r"\b(left|right)\b", lambda word: sides[word[0].lower()], text, flags=re.IGNORECASE)
