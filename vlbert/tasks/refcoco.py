"""RefCOCO, RefCOCO+ and RefCOCOg: find the region that an expression refers to (paper 4.2: RefCOCO+, UNC split).

    torchrun -m vlbert.train finetune_refcoco --data.root ROOT --task.folder refcoco+ --init_from ROOT/runs/...

The paper (table 3) reports these accuracies for VL-BERT base on val, testA and testB: 79.88, 82.40 and 75.01 % with
ground-truth regions; 71.60, 77.72 and 60.99 % with MAttNet's detections. For VL-BERT large: 80.31, 83.62 and 75.45 %;
72.59, 78.57 and 62.30 %. It does not name its overlap measure.
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
from storage.settings import check
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, TextInput, select
from vlbert.data.images import PreparedImage, swap_sides
from vlbert.datasets import refcoco
from vlbert.datasets.refcoco import Box, Convention, Expression, Expressions, overlap
from vlbert.model.heads import Classifier, ClassifierKind
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Examples, Task, TaskSettings, accuracy, invalid_reason, make_examples

MAX_RANKED = 5  # regions in a prediction's ranking
OTHER_TOKENS = 4  # positions besides the expression: [CLS], [SEP], the regions and [END]


@dataclass(frozen=True)
class RefCOCOSettings(TaskSettings):
    folder: str = ""  # folder with the refs and instances.json, as the data set ships them
    # file of expressions in folder; none: the first there is of refs(unc).p, refs(umd).p and refs(google).p
    refs: str | None = None
    train_on: tuple[str, ...] = ("train",)  # splits to train on
    validate_on: str = "val"  # split to validate on
    regions: Literal["ground_truth", "detected"] = "ground_truth"  # candidates: all annotated objects, or detections
    detections: str | None = None  # MAttNet's file of boxes in folder; none: use the regions in the region shards
    adds_ground_truth: bool = False  # train on the boxes of all annotated objects in addition to the detections
    iou: Convention = "published"  # overlap measure, for targets and in accuracy_{iou}
    whole_image_competes: bool = False  # allow the whole image as an answer
    # binary: the target of a candidate is 1 if its IoU with the answer is above 0.5 in the resized image, and else 0.
    # iou: the IoU in the stored image if it is 0.5 or more, and else 0 (ViLBERT's code)
    target: Literal["binary", "iou"] = "binary"
    loss_over: Literal["regions", "rows"] = "regions"  # average the loss over all candidates, or its sums per row
    classifier: ClassifierKind = "regions"  # classifier of candidates; regions: with pre-training's region transform
    classifier_dropout: float = 0.0  # dropout probability in the classifier
    expression_length: int = 60  # maximum tokens; longer expressions are invalid

    @property
    def files(self) -> tuple[str, ...]:
        files = self.refs or refcoco.find_refs(Path(self.folder)), refcoco.INSTANCES
        return (*files, self.detections) if self.detections else files

    def lengths(self, text_rows: bool = False) -> dict[str, int]:
        return {"expression_length": OTHER_TOKENS}

    def __post_init__(self):
        if self.regions == "ground_truth" and (self.detections or self.adds_ground_truth):
            raise ValueError("detections and adds_ground_truth need regions=detected, but regions is ground_truth")
        check(self, 0 <= self.classifier_dropout < 1, "classifier_dropout", "in [0, 1)")
        check(self, self.expression_length >= 1, "expression_length", "at least 1")


@dataclass(frozen=True, eq=False, slots=True)
class Query:
    """An expression and the regions to choose from. If the query is invalid, no region can be chosen."""

    expression: Expression
    regions: Sequence[Box] | np.ndarray | None  # [r, 4] in pixels of the shipped image; None: the sample's regions
    held_out: bool
    split: str = ""  # "" for a user's expression
    invalid_reason: str = ""


class RefCOCO(Task):
    @staticmethod
    def best_metric(settings: RefCOCOSettings) -> str:
        return f"accuracy_{settings.iou}"

    @functools.cached_property
    def expressions(self) -> Expressions:
        return refcoco.read_expressions(self.folder, self.settings.refs)

    @functools.cached_property
    def detections(self) -> dict[str, np.ndarray] | None:
        file = self.settings.detections
        return refcoco.read_detections(self.folder / file, self.folder / refcoco.INSTANCES) if file else None

    def examples(self, samples: Samples, split: str | None) -> Examples:
        """Return one example per expression of a split. Evaluation counts invalid expressions as wrong."""
        rows, source = [], self.folder / self.settings.files[0]
        for name in self.settings.splits(split):
            for image, expression in refcoco.list_expressions(self.expressions, name, source):
                query = self._query(image, expression, name, split is not None)
                rows.append((query, f"sentence {expression.sentence_id} of {name}", image, query.invalid_reason))
        return make_examples(self.settings, samples, split, rows)

    def _query(self, image: str, expression: Expression, split: str, held_out: bool) -> Query:
        reason, regions = self._invalid_reason(expression.text) or expression.invalid_reason, None
        if self.settings.regions == "ground_truth":
            regions = expression.objects
        elif self.detections:
            regions = self.detections.get(image, np.zeros((0, 4)))
            reason = reason or ("" if len(regions) else f"{self.settings.detections} has no box of {image}")
        return Query(expression, regions, held_out, split, reason)

    def _invalid_reason(self, text: str) -> str:
        return invalid_reason(text, "expression_length", self.settings.expression_length, self.vocabulary)

    def annotation_for(self, text: str) -> Query:
        if reason := self._invalid_reason(text):
            raise ValueError(f"the expression {text[:60]!r} is invalid: {reason}")
        return Query(Expression(sentence_id=-1, ref_id=-1, text=text), regions=None, held_out=True)

    def example(self, sample: Sample, image: PreparedImage, annotation: Query, rng: np.random.Generator) -> Example:
        """Return an example with the expression and the query's regions. The labels of right candidates are above 0."""
        expression, regions, valid = annotation.expression, annotation.regions, not annotation.invalid_reason
        shipped = expression.image_size or (sample.width, sample.height)
        to_stored = np.array([sample.width / shipped[0], sample.height / shipped[1]] * 2)
        if regions is None:
            regions = sample.require_regions().boxes / to_stored
        else:
            regions = np.array(regions, np.float64).reshape(-1, 4)
            image = replace(image, boxes=image.boxes[:1]).with_boxes(regions * to_stored)
        if self.settings.adds_ground_truth and not annotation.held_out:
            objects = np.array(expression.objects, np.float64).reshape(-1, 4)
            image, regions = image.with_boxes(objects * to_stored), np.concatenate([regions, objects])
        candidate = np.full(len(image.boxes), valid)
        candidate[0] &= self.settings.whole_image_competes
        target = np.zeros(len(image.boxes), np.float32)
        if expression.box:
            answer = np.array([expression.box]) * to_stored
            if self.settings.target == "iou":
                stored = np.concatenate([[[0, 0, sample.width, sample.height]], regions * to_stored])
                iou = overlap(self.settings.iou, stored, answer[0])
                target = np.where(candidate & (iou >= 0.5), iou, 0.0)
            else:
                iou = overlap(self.settings.iou, image.boxes, image.place(answer)[0])
                target = np.where(candidate & (iou > 0.5), 1.0, 0.0)
        text = "" if not valid else swap_sides(expression.text) if image.flipped else expression.text
        whole_image = [[0, 0, *(side - (self.settings.iou != "vilbert") for side in shipped)]]
        boxes = np.concatenate([whole_image, regions])  # float64, like boxes of the files
        return Example(
            sample.key,
            self.text_input(self.vocabulary.encode(text)),
            image.to_input(
                label_masks={"candidate": candidate}, labels={"target": target[candidate].astype(np.float32)}
            ),
            {"expression": expression, "split": annotation.split, "boxes": boxes, "to_stored": to_stored},
        )

    def text_input(self, expression: np.ndarray) -> TextInput:
        return TextInput.of_one_sentence([self.vocabulary.cls, *expression, self.vocabulary.sep])

    def head(self, config: ModelConfig) -> nn.Module:
        settings = self.settings
        from_shards = settings.regions == "detected" and not settings.detections and not settings.adds_ground_truth
        if config.regions.features != "end_to_end" and not from_shards:
            raise ValueError(
                "precomputed features exist only for the shards' regions; set --model.regions.features=end_to_end, or "
                "--task.regions=detected --task.detections=None --task.no_adds_ground_truth"
            )
        if settings.whole_image_competes and config.whole_image == "none":
            raise ValueError("the model does not read the whole image; set --task.no_whole_image_competes")
        inputs = config.regions_stream.hidden_size
        return Classifier(config, 1, settings.classifier, settings.classifier_dropout, inputs=inputs)

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        scores, targets = self.scores(head, encoded, batch), batch.labels["target"]
        right = self.by_region(targets, batch, 0.0).gather(
            1, self.by_region(scores.detach(), batch, -torch.inf).argmax(1, keepdim=True)
        )
        loss = F.binary_cross_entropy_with_logits(scores, targets, reduction="sum")
        terms = len(scores) if self.settings.loss_over == "regions" else len(batch.counted)
        return {"regions": (loss, terms), "accuracy": accuracy(right[batch.counted, 0] > 0)}

    def scores(self, head: nn.Module, encoded: Encoded, batch: Batch) -> Tensor:
        """Return the logits of the batch's M candidates, float32 [M]."""
        return head(select(encoded.regions, batch.labelled["candidate"]))[:, 0].float()

    def by_region(self, values: Tensor, batch: Batch, others: float) -> Tensor:
        """Return a tensor [N, R] with the candidates' `values` [M], and the number `others` for all other regions."""
        filled = values.new_full((batch.region_mask.numel(),), others)
        return filled.index_copy(0, batch.labelled["candidate"], values).view(batch.region_mask.shape)

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """Return one dict per expression, including the columns of vlbert.datasets.refcoco.score_choice.

        The column `region` is the index of the chosen region, from 0, or -1 if the whole image or nothing was chosen.
        In `ranking`, regions are numbered from 1. Probabilities are sigmoids, so they do not add up to 1.
        """
        # Only candidates can be chosen, not padding nor, by default, the whole image. Of equal scores the first wins.
        scores = self.by_region(self.scores(head, encoded, batch), batch, -torch.inf)
        orders = scores.argsort(dim=1, descending=True, stable=True)[:, :MAX_RANKED].tolist()
        columns = batch.keys, batch.metadata, orders, scores.sigmoid().tolist(), batch.sizes.labelled["candidate"]
        return [self._to_row(*row) for row in zip(*columns, strict=True)]

    def _to_row(self, key: str, metadata: dict, order: list[int], probabilities: list[float], candidates: int) -> dict:
        expression, boxes, chosen = metadata["expression"], metadata["boxes"], order[0] if candidates else None
        drawn = [] if chosen is None else [(refcoco.region_name(chosen), boxes[chosen])]
        drawn += [("ground truth", np.array(expression.box))] * bool(expression.box)
        ranking = [
            {"answer": refcoco.region_name(i), "probability": probabilities[i], "region": i} for i in order[:candidates]
        ]
        return {
            "key": key,
            "split": metadata["split"],
            "probability": 0.0 if chosen is None else probabilities[chosen],
            "ranking": ranking,
            "boxes": [{"name": name, "box": (box * metadata["to_stored"]).tolist()} for name, box in drawn],
            "candidates": candidates,
        } | refcoco.score_choice(self.settings.iou, expression, boxes, chosen, self.settings.regions == "ground_truth")

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        return refcoco.metrics(rows)
