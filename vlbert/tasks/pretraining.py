"""Pre-training: masked words with visual clues, masked regions with linguistic clues, masked words of text alone.

    torchrun -m vlbert.train pretrain_vlbert_base data.root=ROOT data.text_corpus=FOLDER

The paper (section 4.1) reports no number for it; users of the authors' code report 60 % of masked words, 48 % of those
of the text-only corpus and 70 % of masked regions for the base model.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, TextInput
from vlbert.data.images import PreparedImage
from vlbert.data.masking import RegionMasking, WordMasking, mask_regions, mask_words
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.heads import HeadTransform, Pooler, initialise
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Questions, accuracy

ROW_EPSILON = 1e-4  # what the authors' code adds to counts where it takes means of rows
GUESSES = 5  # that a prediction tells of each word and region, at most


@dataclass(frozen=True)
class PretrainingSettings:
    words: WordMasking = WordMasking()  # which words are masked, and how
    regions: RegionMasking = RegionMasking()  # which regions are masked, and how
    max_elements: int | None = 64  # word pieces and regions of a row; beyond it the longer of the two loses its end
    caption_length: int = 508  # word pieces of a caption at most: of BERT's 512 positions, four are others'
    text_length: int = 64  # pieces of a text-only row
    text_specials: bool = False  # a text-only row is [CLS] text [SEP], else its bare words
    region_target: Literal["distribution", "class"] = "distribution"  # what a masked region is: as the detector says,
    #                                                                    class by class, or its likeliest class
    losses_over: Literal["questions", "rows"] = (
        "questions"  # a loss is the mean of all that is asked, or of rows' means
    )
    relationship: bool = False  # a head that says whether caption and picture belong together. No data of ours trains
    #                             it (the paper found that it hurts, table 4): it is there for checkpoints that have one
    monitored_words: tuple[
        str, ...
    ] = ()  # words whose accuracy is reported by itself: those that only the picture tells

    def __post_init__(self):
        if self.max_elements is not None and self.max_elements < 3:
            raise ValueError(f"max_elements is {self.max_elements}; [CLS], [SEP] and the whole image alone are 3")
        if self.caption_length < 1:
            raise ValueError(f"caption_length is {self.caption_length}; it must be at least 1")
        if self.text_length < (3 if self.text_specials else 1):
            raise ValueError(f"text_length is {self.text_length}; it must be at least 1, and 3 with text_specials")


_Guess = tuple[int, float]  # a word piece or a class, and its probability
_Guessed = tuple[int, int, list[_Guess]]  # where something is asked, what is right there, the likeliest guesses


@dataclass(frozen=True)
class Masks:
    """A person's own question: a text with [MASK]s to be filled in, and regions, from 1, whose pixels are hidden."""

    text: str
    hide: tuple[int, ...] = ()


class Pretraining:
    shuffles = True
    paper = "no number in the paper; users of the authors' code: masked words 0.60, masked regions 0.70 (base)"

    @staticmethod
    def best(settings: PretrainingSettings) -> str:
        return "words_accuracy"

    def __init__(self, settings: PretrainingSettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary
        self.num_classes = num_classes
        monitored = [vocabulary.ids[word] for word in settings.monitored_words if word in vocabulary.ids]
        if len(monitored) < len(settings.monitored_words):
            missing = [word for word in settings.monitored_words if word not in vocabulary.ids]
            raise ValueError(f"monitored_words: {', '.join(missing)} are no whole pieces of the vocabulary")
        self.monitored = torch.tensor(monitored, dtype=torch.int64)

    def questions(self, samples: Samples, split: str | None) -> Questions:
        if self.settings.relationship:
            raise ValueError("task.relationship is on, and no data asks for it: train with task.relationship=false")
        return Questions(np.arange(len(samples)))

    def ask(self, text: str, choices: Sequence[str] = (), answer: str = "", hide: Sequence[int] = ()) -> Masks:
        if choices or answer:
            raise ValueError("a pre-trained model takes no choices and no answer: it fills in the [MASK]s of a text")
        if self.vocabulary.mask not in self.vocabulary.encode(text) and not hide:
            raise ValueError(f"{text!r} asks nothing: write [MASK] for a word to be guessed, or name regions to hide")
        return Masks(text, tuple(sorted(set(hide))))

    def example(self, sample: Sample, image: PreparedImage, ask: Masks | None, rng: np.random.Generator) -> Example:
        if sample.regions.num_classes != self.num_classes:
            raise ValueError(
                f"the regions of sample {sample.key} are of {sample.regions.num_classes} classes, those of others of "
                f"{self.num_classes}"
            )
        text = self.vocabulary.encode(sample.caption if ask is None else ask.text)
        tokens, count = self._cut(text, len(sample.regions))
        regions = sample.regions.take(np.arange(count))
        if ask is not None:
            check_fits(ask, len(text), len(tokens), count, len(sample.regions))
            hidden_words, asked_words = tokens, tokens == self.vocabulary.mask
            hidden_regions = asked_regions = np.isin(np.arange(1 + len(sample.regions)), ask.hide)
        else:
            hidden_words, asked_words = mask_words(tokens, self.vocabulary, self.settings.words, rng)
            # Of all regions, as published: those that do not fit in hide their pixels, too.
            hidden_regions, asked_regions = mask_regions(len(sample.regions), self.settings.regions, rng)
        asked_regions = asked_regions[: 1 + count]
        words = self._words(
            [self.vocabulary.cls, *hidden_words, self.vocabulary.sep],
            asked=np.concatenate([[False], asked_words, [False]]),
            answers=tokens[asked_words],
        )
        answers = regions.class_probs_background_first()[asked_regions[1:]]
        if self.settings.region_target == "class":  # that of the foreground: a region is one because of it
            answers = np.eye(answers.shape[1], dtype=np.float32)[regions.labels_background_first()[asked_regions[1:]]]
        picture = image.to_input(
            hidden_regions, count, label_masks={"region_label_mask": asked_regions}, labels={"region_classes": answers}
        )
        return Example(sample.key, words, picture, {"own": ask is not None, "scale": image.scale})

    def text_example(self, key: str, tokens: np.ndarray, rng: np.random.Generator) -> Example:
        """A row of the text-only corpus."""
        masked, asked = mask_words(tokens, self.vocabulary, self.settings.words, rng)
        if not self.settings.text_specials:
            return Example(key, self._words(masked, asked, tokens[asked]))
        masked, asked, tokens = (values[: self.settings.text_length - 2] for values in (masked, asked, tokens))
        row = [self.vocabulary.cls, *masked, self.vocabulary.sep]
        return Example(key, self._words(row, np.pad(asked, 1), tokens[asked]))

    def _words(self, tokens: Sequence[int], asked: np.ndarray, answers: np.ndarray) -> TextInput:
        zeros = np.zeros(len(tokens), np.int64)
        return TextInput(
            np.array(tokens, np.int64), zeros, zeros, label_masks={"word_label_mask": asked}, labels={"words": answers}
        )

    def _cut(self, tokens: np.ndarray, regions: int) -> tuple[np.ndarray, int]:
        """The tokens and the number of regions that fit; [CLS], [SEP] and the whole image count too."""
        tokens = tokens[: self.settings.caption_length]
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
        return PretrainingHead(config, len(self.vocabulary), self.num_classes, self.settings.relationship)

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        words, regions = head(vlbert, encoded, batch)
        word_losses = F.cross_entropy(words.float(), batch.labels["words"], reduction="none")  # (M,)
        word_right = words.argmax(1) == batch.labels["words"]
        word_row, _ = batch.label_masks["word_label_mask"].nonzero(as_tuple=True)
        with_picture = batch.image_of[word_row] >= 0
        region_classes, region_label_mask = self._regions(batch, regions)
        region_losses = F.cross_entropy(regions.float(), region_classes, reduction="none")  # soft targets
        region_row, _ = region_label_mask.nonzero(as_tuple=True)
        losses = {
            "words": self._total(word_losses[with_picture], word_row[with_picture], len(batch)),
            "text_words": self._total(word_losses[~with_picture], word_row[~with_picture], len(batch)),
            "regions": self._total(region_losses, region_row, len(batch)),
            "words_accuracy": accuracy(word_right[with_picture]),
            "text_words_accuracy": accuracy(word_right[~with_picture]),
            "regions_accuracy": accuracy(regions.argmax(1) == region_classes.argmax(1)),  # also of those in sight
        }
        if self.settings.relationship and "related" in batch.labels:
            related = F.cross_entropy(head.related(encoded, batch).float(), batch.labels["related"], reduction="sum")
            losses["relationship"] = (related, len(batch.labels["related"]))
        return losses

    def _regions(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What the regions asked for are, [M', 1 + classes], and which they are, bool [N, R]; none without pictures."""
        if "region_label_mask" in batch.label_masks:
            return batch.labels["region_classes"], batch.label_masks["region_label_mask"]
        return logits.new_zeros(logits.shape).float(), batch.region_mask

    def _total(self, losses: Tensor, row: Tensor, rows: int) -> tuple[Tensor, int]:
        """Sum and count of the losses [M], or of the means of those rows in which something was asked."""
        if self.settings.losses_over == "questions":
            return losses.sum(), len(losses)
        counts = torch.bincount(row, minlength=rows)
        means = losses.new_zeros(rows).index_add(0, row, losses) / (counts + ROW_EPSILON)
        asked = int((counts > 0).sum())
        return means.sum() * asked / (asked + ROW_EPSILON), asked

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """Besides what every task's rows have:

        masks           list of {"place", "guesses"}: the word pieces asked for, [CLS] being piece 0, each with its
                        likeliest {"said", "probability"}
        hidden_regions  list of {"region", "detected", "guesses"}: those whose pixels were hidden, from 1, the class
                        that the detector saw, and the likeliest {"class", "probability"}; class 0 is the background
        words, words_right, monitored, monitored_right, regions, regions_right   counts of what was asked and known
        """
        words, regions = head(vlbert, encoded, batch)
        right = words.argmax(1) == batch.labels["words"]
        monitored = torch.isin(batch.labels["words"], self.monitored.to(right.device))
        region_classes, region_label_mask = self._regions(batch, regions)
        region_right = regions.argmax(1) == region_classes.argmax(1)
        masked = batch.region_masked[region_label_mask]
        word_rows, region_rows = (
            asked.nonzero()[:, 0].tolist() for asked in (batch.label_masks["word_label_mask"], region_label_mask)
        )
        kinds = ("words", "words_right", "monitored", "monitored_right", "regions", "regions_right")
        rows = [Counter(dict.fromkeys(kinds, 0)) for _ in range(len(batch))]
        own = [about.get("own", False) for about in batch.metadata]
        for row, is_right, is_monitored in zip(word_rows, right.tolist(), monitored.tolist(), strict=True):
            if not own[row]:
                rows[row].update(words=1, words_right=int(is_right))
                rows[row].update(monitored=int(is_monitored), monitored_right=int(is_monitored and is_right))
        for row, is_right, is_hidden in zip(region_rows, region_right.tolist(), masked.tolist(), strict=True):
            if not own[row]:
                rows[row].update(regions=int(is_hidden), regions_right=int(is_hidden and is_right))
        told = self._told(words, regions, region_classes, region_label_mask, batch)
        return [{"key": k} | one | dict(row) for k, one, row in zip(batch.keys, told, rows, strict=True)]

    def _told(
        self, words: Tensor, regions: Tensor, region_classes: Tensor, region_label_mask: Tensor, batch: Batch
    ) -> Iterator[dict]:
        """What each row of the batch asks and what is guessed there, in words."""
        word_guesses = _likeliest(words[:, : len(self.vocabulary)])
        word_row, word_place = (found.tolist() for found in batch.label_masks["word_label_mask"].nonzero(as_tuple=True))
        masked = batch.region_masked[region_label_mask]
        region_guesses = _likeliest(regions[masked])
        region_row, region_number = (found[masked].tolist() for found in region_label_mask.nonzero(as_tuple=True))
        detected = region_classes[masked].argmax(1).tolist()
        truths, tokens, lengths = batch.labels["words"].tolist(), batch.tokens.tolist(), batch.text_mask.sum(1).tolist()
        boxes = batch.boxes.cpu().numpy()
        masks, hides = ([[] for _ in tokens] for _ in range(2))
        for row, place, truth, guesses in zip(word_row, word_place, truths, word_guesses, strict=True):
            masks[row].append((place, truth, guesses))
        for row, number, seen, guesses in zip(region_row, region_number, detected, region_guesses, strict=True):
            hides[row].append((number, seen, guesses))
        for row, about in enumerate(batch.metadata):
            to_stored = np.array((*about.get("scale", (1, 1)),) * 2)
            drawn = [
                (number, f"{number}: class {g[0][0]}", boxes[row][number] / to_stored) for number, _, g in hides[row]
            ]
            yield self._row(tokens[row][: lengths[row]], masks[row], hides[row], not about.get("own", False)) | {
                "boxes": [{"name": name, "box": box.tolist(), "region": number} for number, name, box in drawn]
            }

    def _row(self, text: list[int], asked: list[_Guessed], masked: list[_Guessed], known: bool) -> dict:
        """A row without its boxes. asked: in its text; hidden: of its picture; known: whether its truth is."""
        places, truth = [place for place, _, _ in asked], [truth for _, truth, _ in asked]
        ways = _combined([guesses for _, _, guesses in asked])
        filled = [
            {"said": self._text(text, places, pieces), "probability": probability} for pieces, probability in ways
        ]
        sure = [guesses[0][1] for _, _, guesses in (*asked, *masked)]
        pieces = self.vocabulary.tokens
        return {
            "asked": self._text(text),
            "said": filled[0]["said"],
            "probability": float(np.prod(sure)),  # of all guesses together, each by itself
            "ranking": filled if asked else [],
            "truth": self._text(text, places, truth) if known else None,
            "score": float(np.mean([right == g[0][0] for _, right, g in asked])) if known and asked else None,
            "masks": [
                {"place": place, "guesses": [{"said": pieces[i], "probability": p} for i, p in guesses]}
                for place, _, guesses in asked
            ],
            "hidden_regions": [
                {"region": number, "detected": seen, "guesses": [{"class": i, "probability": p} for i, p in guesses]}
                for number, seen, guesses in masked
            ],
        }

    def _text(self, tokens: Sequence[int], places: Sequence[int] = (), pieces: Sequence[int] = ()) -> str:
        """The text of a row with these pieces at these places, without the [CLS] and [SEP] around it."""
        text = list(tokens)
        for place, piece in zip(places, pieces, strict=True):
            text[place] = piece
        around = (self.vocabulary.cls, self.vocabulary.sep)
        return self.vocabulary.decode(text[text[0] == around[0] : len(text) - (text[-1] == around[1])])

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """Accuracy at masked words, at the watched ones among them, and at the regions whose pixels were hidden."""
        names = ("words", "regions", "monitored") if self.settings.monitored_words else ("words", "regions")
        asked = {name: sum(row.get(name, 0) for row in rows) for name in names}
        right = {name: sum(row.get(f"{name}_right", 0) for row in rows) for name in names}
        return {f"{name}_accuracy": right[name] / asked[name] for name in names if asked[name]}


def check_fits(ask: Masks, pieces: int, kept: int, count: int, regions: int) -> None:
    """ValueError where the model has room for no more than `kept` of the text's pieces, or regions are hidden that do
    not fit or are none. Of so many `regions` the first `count` fit.
    """
    if kept < pieces:
        raise ValueError(
            f"the text is too long: it has {pieces} word pieces, and {kept} fit beside the picture; shorten it"
        )
    absent = [number for number in ask.hide if not 1 <= number <= count]
    if absent:
        beside = f", of which the first {count} fit beside the text" if count < regions else ""
        raise ValueError(f"there is no region {absent[0]} to hide: the picture has {regions}, from 1{beside}")


def _likeliest(logits: Tensor) -> list[list[_Guess]]:
    """Of each row of logits [M, V] the GUESSES likeliest, as (which, probability), the likeliest first."""
    probabilities, which = logits.float().softmax(1).topk(min(GUESSES, logits.shape[1]))
    return [list(zip(*row, strict=True)) for row in zip(which.tolist(), probabilities.tolist(), strict=True)]


def _combined(guesses: Sequence[list[_Guess]]) -> list[tuple[tuple[int, ...], float]]:
    """The GUESSES likeliest ways to take one guess at each place, with their probabilities."""
    best = [((), 1.0)]
    for there in guesses:
        more = [((*taken, one), p * q) for taken, p in best for one, q in there]
        best = heapq.nlargest(GUESSES, more, key=lambda way: way[1])
    return best


class PretrainingHead(nn.Module):
    """Classifiers of masked words and masked regions, computed only where something is asked."""

    def __init__(self, config: ModelConfig, vocab_size: int, num_classes: int, relationship: bool):
        super().__init__()
        self.word_transform = HeadTransform(config.hidden_size, normed=True)
        self.word_bias = nn.Parameter(torch.zeros(config.word_rows(vocab_size)))
        self.region_transform = HeadTransform(config.hidden_size, normed=False)
        self.region_classifier = nn.Linear(config.hidden_size, 1 + num_classes)  # background first
        self.pooler = Pooler(config.hidden_size) if relationship else None
        self.relationship = nn.Linear(config.hidden_size, 2) if relationship else None
        initialise(self, config.initializer_range)

    def forward(self, vlbert: VLBert, encoded: Encoded, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits at the words asked for [M, V], at the regions asked for [M', 1 + classes]."""
        region_label_mask = batch.label_masks.get("region_label_mask")
        regions = encoded.regions[region_label_mask] if region_label_mask is not None else encoded.text[:0, 0]
        return self.words(vlbert, encoded.text[batch.label_masks["word_label_mask"]]), self.regions(regions)

    def words(self, vlbert: VLBert, text: Tensor) -> Tensor:
        """[M, C] -> logits [M, V], tied to the word embeddings."""
        return F.linear(self.word_transform(text), vlbert.embedding.words.weight, self.word_bias)

    def regions(self, regions: Tensor) -> Tensor:
        """[M', C] -> logits [M', 1 + classes]."""
        return self.region_classifier(self.region_transform(regions))

    def related(self, encoded: Encoded, batch: Batch) -> Tensor:
        """Logits [rows with a picture, 2]: column 1 says that caption and picture belong together."""
        return self.relationship(self.pooler(encoded.text)[batch.image_of >= 0])
