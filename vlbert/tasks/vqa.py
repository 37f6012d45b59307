"""VQA 2.0: a question about a picture, answered with one of 3,129 answers (paper 4.2, figure 2 b).

    torchrun -m vlbert.train finetune_vqa_base data.root=ROOT task.folder=vqa start_from=ROOT/runs/...

The paper (table 2): VL-BERT base 71.16 test-dev; large 71.79 test-dev, 72.22 test-std.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.batch import Batch, Words
from vlbert.config import ModelConfig
from vlbert.model import Classifier, ClassifierKind, Encoded, VLBert
from vlbert.text import Vocabulary


@dataclass(frozen=True)
class VQASettings:
    folder: str = ""  # holds the questions and annotations as the data set ships them
    answers: int = 3129  # number of answers to choose from
    loss: Literal["bce", "cross_entropy"] = "bce"  # each answer by itself, to its soft score; or the best one of all
    classifier: ClassifierKind = "words"  # behind [MASK]: with the transform of pre-training's word classifier, ...


class VQA:
    shuffles = False
    paper = "71.16 test-dev (base); 71.79 test-dev, 72.22 test-std (large), table 2"

    def __init__(self, settings: VQASettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary

    def words(self, question: np.ndarray, scores: np.ndarray) -> Words:
        """[CLS] question [SEP] [MASK] [SEP], and the soft score [answers] of each answer, asked for at [MASK]."""
        words = self.vocabulary
        tokens = np.array([words.cls, *question, words.sep, words.mask, words.sep], np.int64)
        here = np.zeros(len(tokens), bool)
        here[len(question) + 2] = True
        segments = np.zeros(len(tokens), np.int64)
        segments[len(question) + 2 :] = 1
        asked = {"scores": scores[None].astype(np.float32)}
        return Words(tokens, segments, np.zeros(len(tokens), np.int64), targets={"answer_here": here}, asked=asked)

    def head(self, config: ModelConfig) -> nn.Module:
        return Classifier(config, self.settings.answers, self.settings.classifier, dropout=0.1)

    def logits(self, head: nn.Module, encoded: Encoded, batch: Batch) -> Tensor:
        """[N, answers], read at the [MASK] that stands for the answer."""
        return head(encoded.text[batch.targets["answer_here"]]).float()

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        logits, scores = self.logits(head, encoded, batch), batch.asked["scores"]
        if self.settings.loss == "bce":
            return {"answers": (F.binary_cross_entropy_with_logits(logits, scores, reduction="sum"), len(logits))}
        known = scores.amax(dim=1) > 0  # the others have no answer among ours
        return {"answers": (F.cross_entropy(logits[known], scores[known].argmax(1), reduction="sum"), int(known.sum()))}
