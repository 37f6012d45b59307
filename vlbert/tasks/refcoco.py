"""RefCOCO+: which region does an expression mean? (paper 4.2; UNC split)

    torchrun -m vlbert.train finetune_refcoco_base data.root=ROOT task.folder=refcoco+ init_from=ROOT/runs/...

The paper (table 3), VL-BERT base, % of expressions: on ground-truth regions val 79.88, testA 82.40, testB 75.01; on
MAttNet's detected ones 71.60, 77.72, 60.99.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, TextInput
from vlbert.data.images import PreparedImage, swap_sides
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets import refcoco
from vlbert.datasets.refcoco import Box, Convention, Detections, Expression, Expressions, overlap
from vlbert.model.heads import Classifier
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Questions, accuracy, flaw_in, questions_of

RANKED = 5  # regions that a prediction names


@dataclass(frozen=True)
class RefCOCOSettings:
    folder: str = ""  # holds refs(unc).p and instances.json, as the data set ships them
    train_on: tuple[str, ...] = ("train",)  # splits
    validate_on: str = "val"  # split of validation, as refs(...).p names it
    regions: Literal["ground_truth", "detected"] = "ground_truth"  # the track: regions are all annotated objects, ...
    detections: str | None = None  # ... or the boxes of MAttNet's file below folder; none: those of the region shards
    adds_ground_truth: bool = False  # train on the boxes of all annotated objects beside the detected ones
    iou: Convention = "published"  # how overlaps count, in training and in the metric that is named after it
    whole_image_competes: bool = False  # may the whole image be the answer?
    expression_length: int = 60  # word pieces; a longer one is not asked

    @property
    def files(self) -> tuple[str, ...]:
        """What `folder` must hold."""
        return (*refcoco.FILES, self.detections) if self.detections else refcoco.FILES

    def __post_init__(self):
        if self.regions == "ground_truth" and (self.detections or self.adds_ground_truth):
            raise ValueError("detections and adds_ground_truth are for regions=detected; regions is ground_truth")
        if self.expression_length < 1:
            raise ValueError(f"expression_length is {self.expression_length}; it must be at least 1")


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """An expression and the regions to choose among, [r, 4] in pixels of the shipped image; None: the sample's own.
    With a `flaw`, why it cannot be asked, there is nothing to choose."""

    expression: Expression
    regions: Sequence[Box] | np.ndarray | None
    held_out: bool
    split: str = ""  # as it was asked for; a person's own has none
    flaw: str = ""


class RefCOCO:
    shuffles = False
    paper = "table 3, ground-truth regions: " + "; ".join(
        f"{split} {found}" for split, found in refcoco.REPORTED["ground_truth"].items()
    )

    @staticmethod
    def splits_of(split: str) -> tuple[str, ...]:
        """`test` is testA and testB, as official.refcoco.of_split has it."""
        return (split, "testA", "testB") if split == "test" else (split,)

    @staticmethod
    def best(settings: RefCOCOSettings) -> str:
        return f"accuracy_{settings.iou}"

    def __init__(self, settings: RefCOCOSettings, vocabulary: Vocabulary, num_classes: int):
        self.settings, self.vocabulary, self.folder = settings, vocabulary, Path(settings.folder)

    @functools.cached_property
    def expressions(self) -> Expressions:
        return refcoco.read_expressions(self.folder)

    @functools.cached_property
    def detections(self) -> Detections | None:
        file = self.settings.detections
        return refcoco.read_detections(self.folder / file, self.folder / refcoco.FILES[1]) if file else None

    def questions(self, samples: Samples, split: str | None) -> Questions:
        """Held out, an expression with a flaw keeps its place and is wrong."""
        splits = self.settings.train_on if split is None else (split,)
        found = []
        for name in splits:
            for image, one in refcoco.of_split(self.expressions, name, self.folder):
                ask = self._question(image, one, name, split is not None)
                found.append((ask, f"sentence {one.sentence_id} of {name}", image, ask.flaw))
        if found and all(flaw for *_, flaw in found):
            raise ValueError(
                f"none of {len(found)} expressions of {', '.join(splits)} can be asked; {found[0][1]}: {found[0][3]}"
            )
        return questions_of(samples, found, split is None, f"{', '.join(splits)} of {self.folder}")

    def _question(self, image: str, expression: Expression, split: str, held_out: bool) -> Question:
        flaw, regions = self._flaw(expression.text) or expression.flaw, None
        if self.settings.regions == "ground_truth":
            regions = expression.objects
        elif self.detections:
            regions = self.detections.boxes.get(image, np.zeros((0, 4)))
            flaw = flaw or ("" if len(regions) else f"{self.settings.detections} has no box of {image}")
        return Question(expression, regions, held_out, split, flaw)

    def _flaw(self, text: str) -> str:
        return flaw_in(text, "expression_length", self.settings.expression_length, self.vocabulary)

    def ask(self, text: str, choices: Sequence[str] = (), answer: str = "", hide: Sequence[int] = ()) -> Question:
        """A person's own expression, about the regions of the sample."""
        if choices or answer or hide:
            raise ValueError("RefCOCO+ takes an expression and finds its region: give no choices, answer or regions")
        if flaw := self._flaw(text):
            raise ValueError(f"the expression {text[:60]!r} cannot be asked: {flaw}")
        return Question(Expression(sentence_id=-1, ref_id=-1, text=text), regions=None, held_out=True)

    def example(self, sample: Sample, image: PreparedImage, ask: Question, rng: np.random.Generator) -> Example:
        one, regions, shipped = ask.expression, ask.regions, ask.expression.image_size or (sample.width, sample.height)
        to_stored = np.array([sample.width / shipped[0], sample.height / shipped[1]] * 2)
        if regions is None:
            regions = sample.regions.boxes / to_stored
        else:
            regions = np.array(regions, np.float64).reshape(-1, 4)
            image = replace(image, boxes=image.boxes[:1]).with_boxes(regions * to_stored)
        if self.settings.adds_ground_truth and not ask.held_out:
            objects = np.array(one.objects, np.float64).reshape(-1, 4)
            image, regions = image.with_boxes(objects * to_stored), np.concatenate([regions, objects])
        candidate = np.full(len(image.boxes), not ask.flaw)
        candidate[0] &= self.settings.whole_image_competes
        right = np.zeros(len(image.boxes), bool)
        if one.box:
            seen = image.place(np.array([one.box]) * to_stored)[0]
            right = candidate & (overlap(self.settings.iou, image.boxes, seen) > 0.5)
        boxes = np.concatenate([[[0, 0, shipped[0] - 1, shipped[1] - 1]], regions])  # float64, as those of the files
        about = {"expression": one, "split": ask.split, "boxes": boxes, "to_stored": to_stored}
        text = "" if ask.flaw else swap_sides(one.text) if image.flipped else one.text
        picture = image.to_input(label_masks={"candidate": candidate, "right": right})
        return Example(sample.key, self.words(self.vocabulary.encode(text)), picture, about)

    def words(self, expression: np.ndarray) -> TextInput:
        """[CLS] expression [SEP]."""
        tokens = np.array([self.vocabulary.cls, *expression, self.vocabulary.sep], np.int64)
        zeros = np.zeros(len(tokens), np.int64)
        return TextInput(tokens, zeros, zeros)

    def head(self, config: ModelConfig) -> nn.Module:
        settings = self.settings
        own = settings.regions == "detected" and not settings.detections and not settings.adds_ground_truth
        if config.regions.features != "end_to_end" and not own:
            raise ValueError(
                "precomputed features belong to the shards' own regions: set model.regions.features=end_to_end, or "
                "task.regions=detected task.detections=none task.adds_ground_truth=false"
            )
        return Classifier(config, outputs=1, kind="regions", dropout=0.0)

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        candidate, right = batch.label_masks["candidate"], batch.label_masks["right"]
        scores = head(encoded.regions[candidate])[:, 0].float()
        ranked = torch.full(candidate.shape, -torch.inf, device=candidate.device)
        ranked[candidate] = scores.detach()
        found = (right & candidate).gather(1, ranked.argmax(1, keepdim=True))[:, 0]
        return {
            "regions": (
                F.binary_cross_entropy_with_logits(scores, right[candidate].float(), reduction="sum"),
                len(scores),
            ),
            "accuracy": accuracy(found[batch.counted]),
        }

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """Beside the columns of all tasks: region, as in the regions, -1 the whole image or none; and what it is worth
        (vlbert.datasets.refcoco.judge). Regions are named from 1 on; probabilities are each region's own."""
        candidate = batch.label_masks["candidate"]
        # Only candidates can win: neither padding nor, unless it competes, the whole image. The first wins a tie.
        scores = torch.full(candidate.shape, -torch.inf, device=candidate.device)
        scores[candidate] = head(encoded.regions[candidate])[:, 0].float()
        orders = scores.argsort(dim=1, descending=True, stable=True)[:, :RANKED].tolist()
        columns = zip(
            batch.keys, batch.metadata, orders, scores.sigmoid().tolist(), candidate.sum(1).tolist(), strict=True
        )
        return [self._row(*row) for row in columns]

    def _row(self, key: str, about: dict, order: list[int], sure: list[float], candidates: int) -> dict:
        one, boxes, chosen = about["expression"], about["boxes"], order[0] if candidates else None
        drawn = [] if chosen is None else [(refcoco.named(chosen), boxes[chosen])]
        drawn += [("truth", np.array(one.box))] * bool(one.box)
        ranking = [{"said": refcoco.named(i), "probability": sure[i], "region": i} for i in order[:candidates]]
        return {
            "key": key,
            "split": about["split"],
            "probability": 0.0 if chosen is None else sure[chosen],
            "ranking": ranking,
            "boxes": [{"name": name, "box": (box * about["to_stored"]).tolist()} for name, box in drawn],
            "candidates": candidates,
        } | refcoco.judge(self.settings.iou, one, boxes, chosen, self.settings.regions == "ground_truth")

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        return refcoco.metrics(rows)

    def submission(self, rows: Sequence[dict]) -> dict[str, bytes]:
        return refcoco.submission(self.expressions, rows, self.folder)

    def reported(self, split: str) -> dict[str, str]:
        found = refcoco.REPORTED[self.settings.regions].get(split)
        return {f"accuracy_{self.settings.iou}": found} if found else {}
