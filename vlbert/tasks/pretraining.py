"""Pre-training: masked words with visual clues, masked regions with linguistic clues, masked words of text alone.

    torchrun -m vlbert.train pretrain_vlbert_base data.root=ROOT data.text_corpus=FOLDER

The paper (section 4.1) reports no number for it; users of the authors' code report 60 % of masked words, 48 % of those
of the text-only corpus and 70 % of masked regions for the base model.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.sample import Sample
from vlbert.batch import Batch, Example, Picture, Words
from vlbert.config import ModelConfig
from vlbert.masking import RegionMasking, WordMasking, mask_regions, mask_words
from vlbert.model import Encoded, HeadTransform, VLBert, initialise
from vlbert.pictures import View
from vlbert.tasks import Questions
from vlbert.text import Vocabulary

if TYPE_CHECKING:
    from vlbert.data import Samples


@dataclass(frozen=True)
class PretrainingSettings:
    words: WordMasking = WordMasking()
    regions: RegionMasking = RegionMasking()
    max_elements: int | None = 64  # word pieces and regions of a row; beyond it the longer of the two loses its end.
    #                                 The authors' code: 64; the paper: up to 100 regions (None: no limit)
    text_length: int = 64  # pieces of a text-only row
    watched_words: tuple[str, ...] = ()  # words whose accuracy is reported by itself: those that only the picture tells

    def __post_init__(self):
        if self.max_elements is not None and self.max_elements < 3:
            raise ValueError(f"max_elements is {self.max_elements}; [CLS], [SEP] and the whole image alone are 3")
        if self.text_length < 1:
            raise ValueError(f"text_length is {self.text_length}; it must be at least 1")


class Pretraining:
    shuffles = True
    paper = "no number in the paper; users of the authors' code: masked words 0.60, masked regions 0.70 (base)"

    def __init__(self, settings: PretrainingSettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary
        self.num_classes = num_classes
        watched = [vocabulary.ids[word] for word in settings.watched_words if word in vocabulary.ids]
        if len(watched) < len(settings.watched_words):
            missing = [word for word in settings.watched_words if word not in vocabulary.ids]
            raise ValueError(f"watched_words: {', '.join(missing)} are no whole pieces of the vocabulary")
        self.watched = torch.tensor(watched, dtype=torch.int64)

    def questions(self, samples: "Samples", held_out: bool) -> Questions:
        return Questions(np.arange(len(samples)))

    def example(self, sample: Sample, view: View, ask: None, rng: np.random.Generator) -> Example:
        tokens, count = self._cut(self.vocabulary.encode(sample.caption), len(sample.regions))
        regions = sample.regions.take(np.arange(count))
        hidden_words, asked_words = mask_words(tokens, self.vocabulary, self.settings.words, rng)
        hidden_regions, asked_regions = mask_regions(count, self.settings.regions, rng)
        words = self._words(
            [self.vocabulary.cls, *hidden_words, self.vocabulary.sep],
            asked=np.concatenate([[False], asked_words, [False]]),
            answers=tokens[asked_words],
        )
        picture = Picture(
            pixels=view.pixels,
            boxes=view.boxes[: 1 + count],
            hidden=hidden_regions,
            targets={"region_asked": asked_regions},
            asked={"region_classes": regions.class_probs_background_first()[asked_regions[1:]]},
        )
        return Example(sample.key, words, picture)

    def text_example(self, key: str, tokens: np.ndarray, rng: np.random.Generator) -> Example:
        """A row of the text-only corpus; as in the authors' code, it has no [CLS] and no [SEP]."""
        hidden, asked = mask_words(tokens, self.vocabulary, self.settings.words, rng)
        return Example(key, self._words(hidden, asked, tokens[asked]))

    def _words(self, tokens: Sequence[int], asked: np.ndarray, answers: np.ndarray) -> Words:
        zeros = np.zeros(len(tokens), np.int64)
        return Words(np.array(tokens, np.int64), zeros, zeros, targets={"word_asked": asked}, asked={"words": answers})

    def _cut(self, tokens: np.ndarray, regions: int) -> tuple[np.ndarray, int]:
        """The tokens and the number of regions that fit; [CLS], [SEP] and the whole image count too."""
        if self.settings.max_elements is None:
            return tokens, regions
        text, boxes = len(tokens) + 2, regions + 1
        while text + boxes > self.settings.max_elements:
            if boxes > text and boxes > 1:
                boxes -= 1
            elif text > 2:
                text -= 1
            else:
                boxes -= 1
        return tokens[: text - 2], boxes - 1

    def head(self, config: ModelConfig) -> nn.Module:
        return PretrainingHead(config, len(self.vocabulary), self.num_classes)

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        words, regions = head(vlbert, encoded, batch)
        word_losses = F.cross_entropy(words.float(), batch.asked["words"], reduction="none")  # (M,)
        row, _ = batch.targets["word_asked"].nonzero(as_tuple=True)
        with_picture = batch.region_mask[:, 0][row] if batch.region_mask.shape[1] else torch.zeros_like(row).bool()
        region_losses = F.cross_entropy(
            regions.float(), batch.asked["region_classes"], reduction="none"
        )  # soft targets
        return {
            "words": (word_losses[with_picture].sum(), int(with_picture.sum())),
            "text_words": (word_losses[~with_picture].sum(), int((~with_picture).sum())),
            "regions": (region_losses.sum(), len(region_losses)),
        }

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        words, regions = head(vlbert, encoded, batch)
        right = words.argmax(1) == batch.asked["words"]
        watched = torch.isin(batch.asked["words"], self.watched.to(right.device))
        region_right = regions.argmax(1) == batch.asked["region_classes"].argmax(1)
        hidden = batch.region_hidden[batch.targets["region_asked"]]
        word_rows, region_rows = (
            batch.targets[name].nonzero()[:, 0].tolist() for name in ("word_asked", "region_asked")
        )
        rows = [Counter() for _ in range(len(batch))]
        for row, is_right, is_watched in zip(word_rows, right.tolist(), watched.tolist(), strict=True):
            rows[row].update(words=1, words_right=int(is_right))
            rows[row].update(watched=int(is_watched), watched_right=int(is_watched and is_right))
        for row, is_right, is_hidden in zip(region_rows, region_right.tolist(), hidden.tolist(), strict=True):
            rows[row].update(regions=int(is_hidden), regions_right=int(is_hidden and is_right))
        return [{"key": key} | dict(row) for key, row in zip(batch.keys, rows, strict=True)]

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """Accuracy at masked words, at the watched ones among them, and at the regions whose pixels were hidden."""
        names = ("words", "regions", "watched") if self.settings.watched_words else ("words", "regions")
        asked = {name: sum(row.get(name, 0) for row in rows) for name in names}
        right = {name: sum(row.get(f"{name}_right", 0) for row in rows) for name in names}
        return {f"{name}_accuracy": right[name] / asked[name] for name in names if asked[name]}


class PretrainingHead(nn.Module):
    """Two classifiers, computed only where something is asked."""

    def __init__(self, config: ModelConfig, vocab_size: int, num_classes: int):
        super().__init__()
        self.word_transform = HeadTransform(config.hidden, normed=True)
        self.word_bias = nn.Parameter(torch.zeros(vocab_size))
        self.region_transform = HeadTransform(config.hidden, normed=False)
        self.region_classifier = nn.Linear(config.hidden, 1 + num_classes)  # background first
        initialise(self, config.initializer_range)

    def forward(self, vlbert: VLBert, encoded: Encoded, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits at the words asked for [M, V] (tied to the word embeddings), at the regions [M', 1 + classes]."""
        words = self.word_transform(encoded.text[batch.targets["word_asked"]])
        word_logits = F.linear(words, vlbert.embedding.words.weight, self.word_bias)
        region_asked = batch.targets.get("region_asked")
        regions = encoded.regions[region_asked] if region_asked is not None else encoded.text[:0, 0]
        return word_logits, self.region_classifier(self.region_transform(regions))
