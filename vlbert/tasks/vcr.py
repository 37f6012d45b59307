"""VCR: which of four answers is right, and which of four rationales says why? (paper 4.2, figure 2 a)

    torchrun -m vlbert.train finetune_vcr_base data.root=ROOT task.folder=vcr start_from=ROOT/runs/...

The paper (table 1): base 73.8 Q->A, 74.4 QA->R, 55.2 Q->AR on val; large 75.5, 77.9, 58.9 (test 75.8, 78.4, 59.7).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.batch import Batch, Words
from vlbert.config import ModelConfig
from vlbert.model import Classifier, ClassifierKind, Encoded, HeadTransform, Pooler, VLBert, initialise_head
from vlbert.text import Vocabulary

CLASSES = 81  # COCO's 80 classes of objects behind 0, which is none: that of the whole image


@dataclass(frozen=True)
class VCRSettings:
    folder: str = ""  # holds the jsonl files and the metadata as the data set ships them
    question: Literal["answer", "rationale"] = "answer"  # Q->A, or QA->R
    loss: Literal["sigmoid", "softmax"] = "sigmoid"  # each choice right or wrong by itself, or one of four
    pooled: bool = True  # the score is read at [CLS] behind BERT's tanh pooler, or at [CLS] itself
    classifier: ClassifierKind = "linear"
    classifier_width: int = 1024  # of its layer in between, for two_layers
    region_loss: Literal["contextual", "appearance", "none"] = "contextual"  # also ask what object each region is: of
    #                                                what the encoder says there, or of the Fast R-CNN's feature alone


class VCR:
    shuffles = False
    paper = "73.8 Q->A, 74.4 QA->R, 55.2 Q->AR (base, val); 75.5, 77.9, 58.9 (large, val), table 1"

    def __init__(self, settings: VCRSettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary

    def words(self, question: Sequence[np.ndarray], choice: Sequence[np.ndarray], right: bool) -> Words:
        """[CLS] question [SEP] choice [SEP], each given as (word pieces [t], the region that each piece names [t])."""
        words, zero = self.vocabulary, np.zeros(1, np.int64)
        tokens = [[words.cls], question[0], [words.sep], choice[0], [words.sep]]
        looks_at = [zero, question[1], zero, choice[1], zero]
        segments = np.repeat([0, 1], [len(question[0]) + 2, len(choice[0]) + 1])
        joined = (np.concatenate(parts).astype(np.int64) for parts in (tokens, looks_at))
        tokens, looks_at = joined
        return Words(tokens, segments.astype(np.int64), looks_at, asked={"right": np.array([right])})

    def head(self, config: ModelConfig) -> nn.Module:
        return VCRHead(config, self.settings)

    def logits(self, head: nn.Module, encoded: Encoded, batch: Batch) -> Tensor:
        """[questions, choices]."""
        return head.scores(encoded.text).float().view(len(batch.keys), -1)

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        logits = self.logits(head, encoded, batch)
        right = batch.asked["right"].view(logits.shape)
        if self.settings.loss == "sigmoid":
            answers = F.binary_cross_entropy_with_logits(logits, right.float(), reduction="sum"), logits.numel()
        else:
            answers = F.cross_entropy(logits, right.int().argmax(1), reduction="sum"), len(logits)
        if self.settings.region_loss == "none":
            return {"answers": answers}
        mask, classes = batch.region_mask, batch.region_classes
        seen = encoded.regions[mask]
        if self.settings.region_loss == "appearance":
            mask, classes, seen = (*(x[batch.picture_rows] for x in (mask, classes)), encoded.appearance)
        regions = F.cross_entropy(head.classes(seen).float(), classes[mask], reduction="sum")
        return {"answers": answers, "regions": (regions, int(mask.sum()))}


class VCRHead(nn.Module):
    """One number a choice, and a class of object a region."""

    def __init__(self, config: ModelConfig, settings: VCRSettings):
        super().__init__()
        self.start_from = {}
        self.pooler = Pooler(config.hidden) if settings.pooled else None
        self.region_transform = (
            HeadTransform(config.hidden, normed=False) if settings.region_loss == "contextual" else None
        )
        if self.region_transform is not None:
            self.start_from = {"region_transform": "region_transform"}
        inputs = config.regions.channels if settings.region_loss == "appearance" else config.hidden
        self.region_classifier = nn.Linear(inputs, CLASSES) if settings.region_loss != "none" else None
        initialise_head(self, config)
        self.score = Classifier(config, 1, settings.classifier, dropout=0.1, width=settings.classifier_width)

    def scores(self, text: Tensor) -> Tensor:
        """text [N, T, C] -> [N, 1]."""
        return self.score(text[:, 0] if self.pooler is None else self.pooler(text))

    def classes(self, regions: Tensor) -> Tensor:
        """[K, C] -> logits [K, CLASSES]."""
        return self.region_classifier(regions if self.region_transform is None else self.region_transform(regions))
