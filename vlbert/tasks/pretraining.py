"""Pre-training: predict masked words and regions of captioned images, and masked words of text-only rows.

    torchrun -m vlbert.train pretrain_vlbert --data.root ROOT --data.text_corpus FOLDER

The paper (section 4.1) reports no results. Users of the authors' code report accuracies of 60 % for masked words, 48 %
for masked words of the text-only corpus and 70 % for masked regions (base model).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.sample import Sample
from storage.settings import check
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, TextInput, remove_labels, select
from vlbert.data.boxes import box_iou_with_borders
from vlbert.data.images import PreparedImage
from vlbert.data.masking import RegionMasking, WordMasking, mask_regions, mask_words
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.heads import HeadTransform, Pooler, initialise
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Task, TaskSettings, accuracy, length_reason

OVERLAPPING = 0.4  # 12-in-1's code excludes regions from the mean if their IoU with a labelled region is larger
ROW_EPSILON = 1e-4  # the published code adds it to counts in means over rows
RELATED = 0  # class of the relationship head for a caption and its own image, as in BERT's and ViLBERT's checkpoints
MAX_GUESSES = 5  # guesses for each masked token and region in a prediction
OTHER_TOKENS = 4  # positions besides the caption: [CLS], [SEP], the regions and [END]


@dataclass(frozen=True)
class PretrainingSettings(TaskSettings):
    words: WordMasking = WordMasking()  # masking of words
    regions: RegionMasking = RegionMasking()  # masking of regions
    max_elements: int | None = 64  # maximum tokens plus regions per row; the longer of the two is cut at its end
    max_regions: int | None = None  # maximum regions per row (the sample's first ones); none: all
    caption_length: int = 512 - OTHER_TOKENS  # maximum tokens per caption, limited by BERT's 512 positions
    text_length: int = 64  # tokens of a text-only row
    text_specials: bool = False  # make a text-only row [CLS] text [SEP] instead of bare words
    # label of a masked region: the detector's distribution over classes, or its best class
    region_target: Literal["distribution", "class"] = "distribution"
    # loss of that label; kl is the KL divergence, as ViLBERT reports it, with the gradient of cross_entropy
    region_loss: Literal["cross_entropy", "kl"] = "cross_entropy"
    # divisor of the sum of region vectors if ModelConfig.whole_image is mean: the number of regions, or max_regions
    # minus the number of regions that overlap a labelled one (12-in-1's code)
    mean_over: Literal["regions", "not_overlapping"] = "regions"
    losses_over: Literal["labels", "rows"] = "labels"  # average losses over all labels, or over means of rows
    # train a head that predicts whether caption and image belong together; it needs mismatched pairs. The VL-BERT paper
    # found that it hurts (table 4); ViLBERT and Unicoder-VL train it
    relationship: bool = False
    mismatched: float = 0.0  # probability that a caption gets the image of the next pair
    mismatched_labels: bool = False  # give labels to words and regions of mismatched pairs; they are masked either way
    # layers before the classifier of regions; transform: linear and GELU; transform_norm: also LayerNorm, as for words
    region_head: Literal["transform", "transform_norm", "linear"] = "transform"
    monitored_words: tuple[str, ...] = ()  # words with a separate accuracy, such as words that only the image reveals

    @property
    def longest_caption(self) -> tuple[str, int]:
        """The setting that limits a caption next to the whole image alone, and the maximum number of its tokens."""
        if self.max_elements is not None and self.max_elements - 3 < self.caption_length:
            return "max_elements - 3", self.max_elements - 3
        return "caption_length", self.caption_length

    def lengths(self, text_rows: bool = False) -> dict[str, int]:
        by_elements = self.longest_caption[0] != "caption_length"
        row = {"max_elements": OTHER_TOKENS - 3} if by_elements else {"caption_length": OTHER_TOKENS}
        return row | ({"text_length": OTHER_TOKENS - 2} if text_rows else {})

    def __post_init__(self):
        check(self, (self.max_elements or 3) >= 3, "max_elements", "at least 3: [CLS], [SEP] and the whole image")
        check(self, self.max_regions is None or self.max_regions >= 1, "max_regions", "at least 1, or none")
        counted = self.mean_over == "regions" or self.max_regions is not None
        check(self, counted, "mean_over", "regions if max_regions is none")
        check(self, self.caption_length >= 1, "caption_length", "at least 1")
        learned = 0 <= self.mismatched <= 1 and (self.relationship or not self.mismatched)
        check(self, learned, "mismatched", "a probability, and 0 without relationship")
        least = 3 if self.text_specials else 1
        check(self, self.text_length >= least, "text_length", "at least 1, and 3 with text_specials")


_Guesses = list[tuple[int, float]]  # the most probable tokens or classes, with probabilities


@dataclass(frozen=True)
class MaskedInput:
    """A user's question: a text with [MASK] tokens, and the numbers (from 1) of regions to mask. Both are predicted."""

    text: str
    regions: tuple[int, ...] = ()


class Pretraining(Task):
    validate_shuffled = True

    @staticmethod
    def best_metric(settings: PretrainingSettings) -> str:
        return "words_accuracy"

    def __init__(self, settings: PretrainingSettings, vocabulary: Vocabulary, num_classes: int):
        super().__init__(settings, vocabulary, num_classes)
        if missing := [word for word in settings.monitored_words if word not in vocabulary.ids]:
            raise ValueError(f"monitored_words: {', '.join(missing)} are not single tokens of the vocabulary")
        monitored = [vocabulary.ids[word] for word in settings.monitored_words]
        self.monitored = torch.tensor(monitored, dtype=torch.int64)

    @property
    def lookahead(self) -> int:
        return 1 if self.settings.mismatched else 0

    def collate_group(self, examples: Sequence[Example], following: Sequence[Example]) -> list[Example]:
        """Return the examples. Each example marked as mismatched gets the image of the next example."""
        others = [*examples[1:], *following[:1], *examples[:1]]
        pairs = zip(examples, others, strict=False)
        return [self._mismatch(*pair) if pair[0].metadata["mismatched"] else pair[0] for pair in pairs]

    def _mismatch(self, example: Example, other: Example) -> Example:
        """Return `example` with the image of `other`. Drop word and region labels unless `mismatched_labels` is set."""
        mismatched = self.with_other_image(example, other)
        if mismatched is example or self.settings.mismatched_labels:
            return mismatched
        text = remove_labels(mismatched.text)
        text = replace(
            text,
            label_masks=text.label_masks | {"related": mismatched.text.label_masks["related"]},
            labels=text.labels | {"related": mismatched.text.labels["related"]},
        )
        return replace(mismatched, text=text, image=mismatched.image and remove_labels(mismatched.image))

    def with_other_image(self, example: Example, other: Example) -> Example:
        """Return `example` with the image of `other`, labelled as unrelated, or unchanged if the image is the same."""
        if other.metadata["url"] == example.metadata["url"]:
            return example
        text = example.text
        if self.settings.relationship:
            text = replace(text, labels=text.labels | {"related": np.array([1 - RELATED])})
        return replace(example, text=text, image=other.image)

    def annotation_for(self, text: str, mask_regions: Sequence[int] = ()) -> MaskedInput:
        if self.vocabulary.mask not in self.vocabulary.encode(text) and not mask_regions:
            raise ValueError(f"{text!r} has nothing to predict; write [MASK] for a word, or name regions to mask")
        return MaskedInput(text, tuple(sorted(set(mask_regions))))

    def example(
        self, sample: Sample, image: PreparedImage, annotation: MaskedInput | None, rng: np.random.Generator
    ) -> Example:
        """Return an example of [CLS] caption [SEP] and regions. Some tokens and regions are masked.

        Labels are the original tokens and the detector's classes.
        """
        all_regions = sample.require_regions()
        if all_regions.num_classes != self.num_classes:
            raise ValueError(
                f"sample {sample.key} has regions of {all_regions.num_classes} classes, others of {self.num_classes}"
            )
        mismatched = annotation is None and self.settings.mismatched > 0 and rng.random() < self.settings.mismatched
        text = self.vocabulary.encode(sample.caption if annotation is None else annotation.text)
        max_count = len(all_regions) if self.settings.max_regions is None else self.settings.max_regions
        tokens, count = self._truncate(text, min(max_count, len(all_regions)))
        regions = all_regions.take(np.arange(count))
        if annotation is not None:
            check_fits(annotation, len(text), len(tokens), count, len(all_regions))
            masked_tokens, token_labels = tokens, tokens == self.vocabulary.mask
            masked_regions = region_labels = np.isin(np.arange(1 + len(all_regions)), annotation.regions)
        else:
            masked_tokens, token_labels = mask_words(tokens, self.vocabulary, self.settings.words, rng)
            # As in the published code, regions that do not fit into the row may be masked, too (their pixels are).
            masked_regions, region_labels = mask_regions(len(all_regions), self.settings.regions, rng)
            masked_regions[1 + max_count :] = False
        region_labels = region_labels[: 1 + count]
        classes = regions.class_probs_background_first()[region_labels[1:]]
        if self.settings.region_target == "class":  # the foreground class for which the detector kept the region
            classes = np.eye(classes.shape[1], dtype=np.float32)[regions.labels_background_first()[region_labels[1:]]]
        row = [self.vocabulary.cls, *masked_tokens, self.vocabulary.sep]
        text_input = self._text_input(row, np.pad(token_labels, 1), tokens[token_labels], related=[RELATED])
        image_input = image.to_input(
            masked_regions,
            count,
            label_masks={"region_label_mask": region_labels},
            labels={"region_classes": classes},
            averaged_over=self._averaged_over(regions.boxes, region_labels[1:]),
        )
        from_user = annotation is not None
        metadata = {"from_user": from_user, "scale": image.scale, "url": sample.url, "mismatched": mismatched}
        metadata["cut"] = length_reason(len(text), *self.settings.longest_caption)
        return Example(sample.key, text_input, image_input, metadata)

    def _averaged_over(self, boxes: np.ndarray, labelled: np.ndarray) -> int | None:
        """Return the value for ImageInput.averaged_over, given boxes [r, 4] and `labelled`, bool [r]."""
        if self.settings.mean_over == "regions":
            return None
        placed = torch.from_numpy(boxes)
        overlapping = (box_iou_with_borders(placed, placed)[torch.from_numpy(labelled)] > OVERLAPPING).any(dim=0)
        return self.settings.max_regions - int(overlapping.sum())

    def text_example(self, key: str, tokens: np.ndarray, rng: np.random.Generator) -> Example:
        """Return the Example of a text-only row, given its token ids, int64 [t]. The labels are the masked tokens."""
        masked, label_mask = mask_words(tokens, self.vocabulary, self.settings.words, rng)
        if not self.settings.text_specials:
            return Example(key, self._text_input(masked, label_mask, tokens[label_mask]))
        count = self.settings.text_length - 2
        masked, label_mask, tokens = (values[:count] for values in (masked, label_mask, tokens))
        row = [self.vocabulary.cls, *masked, self.vocabulary.sep]
        return Example(key, self._text_input(row, np.pad(label_mask, 1), tokens[label_mask]))

    def _text_input(
        self,
        tokens: Sequence[int] | np.ndarray,
        label_mask: np.ndarray,
        labels: np.ndarray,
        related: Sequence[int] = (),
    ) -> TextInput:
        masks, all_labels = {"word_label_mask": label_mask}, {"words": labels}
        if self.settings.relationship:
            masks["related"] = np.arange(len(tokens)) < len(related)
            all_labels["related"] = np.array(related, np.int64)
        return TextInput.of_one_sentence(tokens, label_masks=masks, labels=all_labels)

    def _truncate(self, tokens: np.ndarray, regions: int) -> tuple[np.ndarray, int]:
        """Return the tokens and the number of regions that fit into a row, besides [CLS], [SEP] and the whole image."""
        tokens = tokens[: self.settings.caption_length]
        if self.settings.max_elements is None:
            return tokens, regions
        text, boxes = len(tokens) + 2, regions + 1
        while text + boxes > self.settings.max_elements:
            if boxes > text or text == 2:
                boxes -= 1
            else:
                text -= 1
        return tokens[: text - 2], boxes - 1

    def text_limit(self, tokens: int, regions: int) -> int:
        most = regions if self.settings.max_regions is None else min(regions, self.settings.max_regions)
        return len(self._truncate(np.zeros(tokens), most)[0])

    def head(self, config: ModelConfig) -> nn.Module:
        return PretrainingHead(config, self.settings, len(self.vocabulary), self.num_classes)

    def losses(
        self, vlbert: VLBert, head: "PretrainingHead", encoded: Encoded, batch: Batch
    ) -> dict[str, tuple[Tensor, int]]:
        words, regions = head(vlbert, encoded, batch)
        word_losses = F.cross_entropy(words.float(), batch.labels["words"], reduction="none")  # (M,)
        word_right = words.argmax(1) == batch.labels["words"]
        region_classes, labelled_regions = self._region_labels(batch, regions)
        region_losses = F.cross_entropy(regions.float(), region_classes, reduction="none")  # soft labels
        if self.settings.region_loss == "kl":
            region_losses = region_losses + torch.xlogy(region_classes, region_classes).sum(1)
        losses, length = {}, batch.tokens.shape[1]
        word_row = batch.labelled["word_label_mask"] // length
        for name, with_image in (("words", True), ("text_words", False)):
            features_by_row = zip(batch.sizes.labelled["word_label_mask"], batch.sizes.regions, strict=True)
            counts = [count if (regions > 0) == with_image else 0 for count, regions in features_by_row]
            chosen = ((batch.image_of[word_row] >= 0) == with_image).nonzero_static(size=sum(counts))[:, 0]
            losses[name] = self._sum_losses(word_losses.index_select(0, chosen), word_row[chosen], counts)
            losses[f"{name}_accuracy"] = accuracy(word_right[chosen])
        counts = batch.sizes.labelled.get("region_label_mask", (0,) * len(batch))
        losses["regions"] = self._sum_losses(region_losses, labelled_regions // batch.boxes.shape[1], counts)
        losses["regions_accuracy"] = accuracy(regions.argmax(1) == region_classes.argmax(1))  # at all labels
        if self.settings.relationship:
            related = head.related(encoded, batch.labelled["related"] // length).float()
            labels = batch.labels["related"]
            losses["relationship"] = (F.cross_entropy(related, labels, reduction="sum"), len(labels))
            losses["relationship_accuracy"] = accuracy(related.argmax(1) == labels)
        return losses

    def _region_labels(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels of the M' labelled regions, [M', 1 + classes], and their flat indices in [N * R]."""
        if "region_label_mask" in batch.labelled:
            return batch.labels["region_classes"], batch.labelled["region_label_mask"]
        return logits.new_zeros(logits.shape).float(), batch.real_regions  # no images: both are empty

    def _sum_losses(self, losses: Tensor, row: Tensor, counts: Sequence[int]) -> tuple[Tensor, int]:
        """Return the sum and number of losses [M] or, if `losses_over` is "rows", of the mean losses of the rows.

        `row` [M] is the row index of each loss, and `counts` has the number of losses in each row.
        """
        if self.settings.losses_over == "labels":
            return losses.sum(), len(losses)
        sums, numbers = (losses.new_zeros(len(counts)).index_add(0, row, x) for x in (losses, torch.ones_like(losses)))
        labelled = sum(count > 0 for count in counts)
        return (sums / (numbers + ROW_EPSILON)).sum() * labelled / (labelled + ROW_EPSILON), labelled

    def predictions(self, vlbert: VLBert, head: "PretrainingHead", encoded: Encoded, batch: Batch) -> list[dict]:
        """Return one dict per example, with these columns in addition to those of Task.predictions.

        masks           list of {"position", "guesses"}, one per labelled token; [CLS] has position 0
        masked_regions  list of {"region", "detected", "guesses"}, one per masked region; regions are numbered from 1
        words, monitored, regions  number of labelled tokens, of those in `monitored_words`, and of masked regions
        words_right, monitored_right, regions_right  how many of these the model predicted correctly

        `detected` is the detector's class. `guesses` are lists, most probable first, of {"answer", "probability"} for
        tokens and of {"class", "probability"} for regions. Class 0 is the background.
        """
        words, regions = head(vlbert, encoded, batch)
        labels = batch.labels["words"]
        monitored = torch.isin(labels, self.monitored.to(labels.device))
        region_classes, labelled_regions = self._region_labels(batch, regions)
        masked = select(batch.region_masked, labelled_regions)
        detected, masked_logits = region_classes[masked].argmax(1), regions[masked]
        columns = labels, words.argmax(1) == labels, monitored, _top_guesses(words[:, : len(self.vocabulary)])
        token_labels = _group_by_row(batch.labelled["word_label_mask"], batch.tokens, columns)
        columns = detected, masked_logits.argmax(1) == detected, _top_guesses(masked_logits)
        region_labels = _group_by_row(labelled_regions[masked], batch.region_mask, columns)
        boxes, rows = batch.boxes.cpu().numpy(), []
        for row, (key, metadata) in enumerate(zip(batch.keys, batch.metadata, strict=True)):
            text = batch.tokens[row].tolist()[: batch.sizes.tokens[row]]
            scale = np.array(metadata["scale"] * 2)
            drawn = [
                {"name": f"{n}: class {guesses[0][0]}", "box": (boxes[row][n] / scale).tolist(), "region": n}
                for n, _, _, guesses in region_labels[row]
            ]
            known = not metadata["from_user"]
            rows.append({"key": key, "boxes": drawn} | self._row(text, token_labels[row], region_labels[row], known))
        return rows

    def _row(self, text: list[int], masked_tokens: list[tuple], masked_regions: list[tuple], known: bool) -> dict:
        """Return the columns of a prediction, except key and boxes. `known` is False if the labels are unknown.

        A masked token is a tuple (position, label, right, monitored, guesses), and a masked region a tuple (region,
        label, right, guesses). `right` and `monitored` are bool.
        """
        positions, labels, right, monitored, guesses = zip(*masked_tokens, strict=True) if masked_tokens else ((),) * 5
        best = [ranked[0][1] for *_, ranked in (*masked_tokens, *masked_regions)]
        words = self.vocabulary.tokens
        filled = [
            {"answer": self._decode(text, positions, tokens), "probability": probability}
            for tokens, probability in _top_combinations(guesses)
        ]
        likeliest = [ranked[0][0] == label for ranked, label in zip(guesses, labels, strict=True)]
        return {
            "question": self._decode(text),
            "answer": filled[0]["answer"],
            "probability": float(np.prod(best)),  # of all guesses together, as if independent
            "ranking": filled if masked_tokens else [],
            "ground_truth": self._decode(text, positions, labels) if known else None,
            "score": float(np.mean(likeliest)) if known and masked_tokens else None,
            "masks": [
                {"position": position, "guesses": [{"answer": words[i], "probability": p} for i, p in ranked]}
                for position, ranked in zip(positions, guesses, strict=True)
            ],
            "masked_regions": [
                {"region": number, "detected": label, "guesses": [{"class": i, "probability": p} for i, p in ranked]}
                for number, label, _, ranked in masked_regions
            ],
            "words": known * len(masked_tokens),
            "words_right": known * sum(right),
            "monitored": known * sum(monitored),
            "monitored_right": known * sum(map(all, zip(right, monitored, strict=True))),
            "regions": known * len(masked_regions),
            "regions_right": known * sum(correct for _, _, correct, _ in masked_regions),
        }

    def _decode(self, tokens: Sequence[int], positions: Sequence[int] = (), filled: Sequence[int] = ()) -> str:
        """Decode token ids, without a first [CLS] and a last [SEP]. `filled` replaces the ids at `positions`."""
        text = list(tokens)
        for position, token in zip(positions, filled, strict=True):
            text[position] = token
        starts, ends = text[0] == self.vocabulary.cls, text[-1] == self.vocabulary.sep
        return self.vocabulary.decode(text[starts : len(text) - ends])

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """Return the accuracies for labelled words, for words in `monitored_words`, and for masked regions."""
        names = ("words", "regions", "monitored") if self.settings.monitored_words else ("words", "regions")
        counts = {name: sum(row.get(name, 0) for row in rows) for name in names}
        right = {name: sum(row.get(f"{name}_right", 0) for row in rows) for name in names}
        return {f"{name}_accuracy": right[name] / counts[name] for name in names if counts[name]}


def check_fits(question: MaskedInput, tokens: int, kept: int, count: int, regions: int) -> None:
    """Raise ValueError if the question's text is too long, or if it masks a region that the model does not see.

    `kept` of the text's `tokens` tokens and the first `count` of the image's `regions` regions fit into the row.
    """
    if kept < tokens:
        raise ValueError(f"the text is too long: it has {tokens} tokens, but {kept} fit beside the image; shorten it")
    absent = [number for number in question.regions if not 1 <= number <= count]
    if absent:
        limit = f", of which the model reads the first {count}" if count < regions else ""
        raise ValueError(f"there is no region {absent[0]} to mask: the image has {regions}, from 1{limit}")


def _group_by_row(index: Tensor, padded: Tensor, columns: Sequence[Tensor | list]) -> list[list[tuple]]:
    """Return one list per row of `padded` [N, S], with a tuple (position, *columns) for each label of the row.

    `index` is int64 [M], the flat index of each label in [N * S]. Each column has M values.
    """
    rows: list[list[tuple]] = [[] for _ in padded]
    values = [column.tolist() if isinstance(column, Tensor) else column for column in columns]
    for position, *entry in zip(index.tolist(), *values, strict=True):
        rows[position // padded.shape[1]].append((position % padded.shape[1], *entry))
    return rows


def _top_guesses(logits: Tensor) -> list[_Guesses]:
    """Return each row's MAX_GUESSES most probable classes as (class, probability), best first. `logits` is [M, V]."""
    probabilities, classes = logits.float().softmax(1).topk(min(MAX_GUESSES, logits.shape[1]))
    return [list(zip(*row, strict=True)) for row in zip(classes.tolist(), probabilities.tolist(), strict=True)]


def _top_combinations(guesses: Sequence[_Guesses]) -> list[tuple[tuple[int, ...], float]]:
    """Combine one guess for each token. Return the MAX_GUESSES most probable combinations with their probabilities."""
    best = [((), 1.0)]
    for candidates in guesses:
        more = [((*chosen, guess), p * q) for chosen, p in best for guess, q in candidates]
        best = heapq.nlargest(MAX_GUESSES, more, key=lambda combination: combination[1])
    return best


class PretrainingHead(nn.Module):
    """The classifiers of labelled words, labelled regions and, with the setting `relationship`, text-image pairs."""

    def __init__(self, config: ModelConfig, settings: PretrainingSettings, vocab_size: int, num_classes: int):
        super().__init__()
        region_size = config.regions_stream.hidden_size
        self.word_transform = HeadTransform(config.hidden_size, normed=True)
        self.word_bias = nn.Parameter(torch.zeros(config.word_rows(vocab_size)))
        self.region_transform = None
        if settings.region_head != "linear":
            self.region_transform = HeadTransform(region_size, normed=settings.region_head == "transform_norm")
        self.region_classifier = nn.Linear(region_size, 1 + num_classes)  # background first
        self.pooler = Pooler(config) if settings.relationship else None
        self.relationship = nn.Linear(self.pooler.size, 2) if self.pooler else None
        initialise(self, config.initializer_range)

    def forward(self, vlbert: VLBert, encoded: Encoded, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits of the labelled tokens, [M, V], and of the labelled regions, [M', 1 + classes]."""
        words, regions = batch.labelled["word_label_mask"], batch.labelled.get("region_label_mask", batch.real_regions)
        return self.words(vlbert, select(encoded.text, words)), self.regions(select(encoded.regions, regions))

    def words(self, vlbert: VLBert, text: Tensor) -> Tensor:
        """Return word logits [M, V] for text vectors [M, C]. The weights are shared with the word embeddings."""
        return F.linear(self.word_transform(text), vlbert.embedding.words.weight, self.word_bias)

    def regions(self, regions: Tensor) -> Tensor:
        """Return class logits [M', 1 + classes] for region vectors [M', C']. Class 0 is the background."""
        return self.region_classifier(regions if self.region_transform is None else self.region_transform(regions))

    def related(self, encoded: Encoded, rows: Tensor) -> Tensor:
        """Return logits [M, 2] for the rows with indices `rows`, int64 [M]. Column RELATED is for matching pairs."""
        assert self.pooler is not None
        assert self.relationship is not None
        return self.relationship(self.pooler(encoded.text.index_select(0, rows), encoded.regions.index_select(0, rows)))
