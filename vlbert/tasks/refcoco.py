"""RefCOCO+: which region does an expression mean? (paper 4.2; UNC split, ground-truth regions)

    torchrun -m vlbert.train finetune_refcoco_base data.root=ROOT task.folder=refcoco+ start_from=ROOT/runs/...

The paper (table 3), VL-BERT base on ground-truth regions: val 79.88, testA 82.40, testB 75.01 (% of expressions).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.sample import Sample
from vlbert.batch import Batch, Example, Words
from vlbert.boxes import iou
from vlbert.config import ModelConfig
from vlbert.model import Classifier, Encoded, VLBert
from vlbert.official import find_samples
from vlbert.official.refcoco import FILES, Expression, read_expressions
from vlbert.pictures import View, swap_sides
from vlbert.tasks import Questions
from vlbert.text import Vocabulary

if TYPE_CHECKING:
    from vlbert.data import Samples


@dataclass(frozen=True)
class RefCOCOSettings:
    folder: str = ""  # holds refs(unc).p and instances.json, as the data set ships them
    train_on: tuple[str, ...] = ("train",)  # splits
    validate_on: str = "val"
    whole_image_competes: bool = False  # may the whole image be the answer?
    inclusive_boxes: bool = False  # overlaps count pixels: a box from column 3 to column 5 is three wide, not two
    adds_ground_truth: bool = False  # train on the boxes of all annotated objects beside the regions that were found

    @property
    def files(self) -> tuple[str, ...]:
        """What `folder` must hold."""
        return FILES


class RefCOCO:
    shuffles = False
    paper = "79.88 val, 82.40 testA, 75.01 testB (base, ground-truth regions, table 3)"

    def __init__(self, settings: RefCOCOSettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary

    @functools.cached_property
    def expressions(self) -> dict[str, dict[str, list[Expression]]]:
        """split -> image file -> its expressions."""
        return read_expressions(Path(self.settings.folder))

    def questions(self, samples: "Samples", split: str | None) -> Questions:
        splits = self.settings.train_on if split is None else (split,)
        unknown = sorted(set(splits) - self.expressions.keys())
        if unknown:
            raise ValueError(
                f"{self.settings.folder}/refs(unc).p has no split {unknown[0]}, only "
                f"{', '.join(sorted(self.expressions))}"
            )
        found = [(file, one) for name in splits for file, ones in self.expressions[name].items() for one in ones]
        asks = [replace(one, held_out=split is not None) for _, one in found]
        images = [file for file, _ in found]
        return Questions(find_samples(samples, images, f"{', '.join(splits)} of {self.settings.folder}"), asks)

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
