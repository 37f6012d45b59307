"""Image-text retrieval on Flickr30k and COCO: score how well a caption fits an image (Unicoder-VL 3.3, ViLBERT 3.2).

    torchrun -m vlbert.train finetune_retrieval --data.root ROOT --task.folder flickr30k --init_from ROOT/runs/...

Recall@1 on Flickr30k's test split: Unicoder-VL 71.5 (caption -> image) and 86.2 (image -> caption), zero-shot 48.4 and
64.3; ViLBERT 58.20 (caption -> image), zero-shot 31.86. On COCO's, Unicoder-VL has 46.7 and 62.3, and 69.7 and 84.3 in
folds of 1,000 images (zero-shot 43.4 and 54.4). The VL-BERT paper has no retrieval results.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from storage.settings import check
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, TextInput, with_texts
from vlbert.data.images import PreparedImage, swap_sides
from vlbert.datasets import retrieval
from vlbert.model.heads import Pooler, initialise_head
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Examples, Task, TaskSettings, accuracy, invalid_reason, make_examples
from vlbert.tasks.pretraining import RELATED

MAX_RANKED = 5  # captions in a prediction's ranking
OTHER_TOKENS = 4  # positions besides the caption: [CLS], [SEP], the regions and [END]


@dataclass(frozen=True)
class RetrievalSettings(TaskSettings):
    folder: str = ""  # folder that holds `file`
    file: str = "dataset_flickr30k.json"  # Karpathy's splits and captions, as published; for COCO dataset_coco.json
    train_on: tuple[str, ...] = ("train",)  # splits to train on; for COCO train and restval
    validate_on: str = "val"  # split to validate on
    captions: int = retrieval.CAPTIONS  # maximum captions per image (its first ones)
    caption_length: int = 64  # maximum tokens per caption; longer captions are cut
    max_regions: int | None = None  # maximum regions per image (the sample's first ones); none: all
    # hinge: the pair's probability exceeds those of the best wrong image and of the best wrong caption by `margin`
    # (Unicoder-VL); cross_entropy: the pair among all wrong ones (ViLBERT: two wrong captions and one wrong image)
    loss: Literal["hinge", "cross_entropy"] = "hinge"
    margin: float = 0.2  # difference of probabilities for the hinge loss, 0 to 1
    wrong_captions: int = 3  # wrong captions per pair in training, taken from the next examples
    wrong_images: int = 3  # wrong images per pair in training, taken from the next examples
    rows_at_once: int = 512  # pairs per batch of an evaluation; affects memory and the last digits of scores
    fold: int = 1000  # images per fold; a split with several folds is also ranked within each (COCO's 1K results)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def lengths(self, text_rows: bool = False) -> dict[str, int]:
        return {"caption_length": OTHER_TOKENS}

    def __post_init__(self):
        for name in ("captions", "caption_length", "wrong_captions", "wrong_images", "rows_at_once", "fold"):
            check(self, getattr(self, name) >= 1, name, "at least 1")
        check(self, self.max_regions is None or self.max_regions >= 1, "max_regions", "at least 1, or none")
        check(self, 0 <= self.margin <= 1, "margin", "a difference of probabilities, from 0 to 1")


@dataclass(frozen=True, slots=True)
class Caption:
    image: str
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class HeldOutImage:
    """An evaluation image. The model scores it with the captions of all evaluation images.

    Attributes:
        image: file name of the image.
        captions: the image's own captions.
        first: index of the image's first caption in `candidates`.
        images: number of images in the evaluation.
        candidates: the captions of all images, each as token ids, int64 [t].
    """

    image: str
    captions: tuple[str, ...]
    first: int = 0
    images: int = 0
    candidates: list[np.ndarray] = field(default_factory=list, repr=False)


class Retrieval(Task):
    evaluation_batch_size = 8  # each example has thousands of pairs
    zero_shot_head = "relationship"

    @staticmethod
    def best_metric(settings: RetrievalSettings) -> str:
        return "image_r1"

    # --- examples -----------------------------------------------------------------------------------------------------

    def examples(self, samples: Samples, split: str | None) -> Examples:
        """Return the examples: for training, one per caption; for evaluation, one per image, with all its captions."""
        file = self.folder / self.settings.file
        splits, held_out, skipped = retrieval.read_splits(file, self.settings.captions), [], []
        for name in self.settings.splits(split):
            if name not in splits:
                raise ValueError(f"{file} has no split {name!r}; it has {', '.join(splits) or 'none'}")
            for image, captions in splits[name].items():
                kept = tuple(text for text in captions if self._has_words(text))
                held_out += [HeldOutImage(image, kept)] if kept else []
                wordless = len(captions) - len(kept)
                if wordless or not kept:
                    skipped.append(f"{image}: {wordless} of its {len(captions)} captions have no words")
        pairs = [Caption(item.image, text) for item in held_out for text in item.captions]
        rows = [(item, item.image, item.image, "") for item in (pairs if split is None else held_out)]
        examples = make_examples(self.settings, samples, split, rows)
        annotations = examples.annotations if split is None else self.with_candidates(examples.annotations)
        return replace(examples, annotations=annotations, skipped=(*skipped, *examples.skipped))

    def with_candidates(self, images: Sequence[HeldOutImage]) -> list[HeldOutImage]:
        """Return copies of the images. The candidates of each image are the captions of all these images."""
        candidates = [self.tokens(text) for image in images for text in image.captions]
        firsts = np.cumsum([0, *(len(image.captions) for image in images)]).tolist()
        return [
            replace(image, first=first, images=len(images), candidates=candidates)
            for image, first in zip(images, firsts, strict=False)
        ]

    def subset(self, examples: Examples, numbers: np.ndarray) -> Examples:
        annotations = list(examples.annotations)
        chosen = sorted(numbers.tolist())
        for number, image in zip(chosen, self.with_candidates([annotations[n] for n in chosen]), strict=True):
            annotations[number] = image
        return replace(examples, annotations=annotations)

    def annotation_for(self, text: str) -> Caption:
        if not self._has_words(text):
            raise ValueError(f"the text {text[:60]!r} has no words")
        return Caption("", text)

    def _has_words(self, text: str) -> bool:
        return not invalid_reason(text, "caption_length", sys.maxsize, self.vocabulary)

    def tokens(self, text: str) -> np.ndarray:
        """Return the token ids of [CLS] `text` [SEP], int64 [t]. The text is cut to `caption_length` tokens."""
        tokens = self.vocabulary.encode(text)[: self.settings.caption_length]
        return np.array([self.vocabulary.cls, *tokens, self.vocabulary.sep], np.int64)

    def example(
        self, sample: Sample, image: PreparedImage, annotation: Caption | HeldOutImage, rng: np.random.Generator
    ) -> Example:
        regions = image.to_input(None, self.settings.max_regions)
        if isinstance(annotation, HeldOutImage):  # `predict` replaces its text by all candidates
            text = TextInput.of_one_sentence(self.tokens(annotation.captions[0]))
            return Example(sample.key, text, regions, {"ranked": annotation})
        text = swap_sides(annotation.text) if image.flipped else annotation.text
        pair = _with_role(TextInput.of_one_sentence(self.tokens(text)), 0, 0)
        cut = invalid_reason(text, "caption_length", self.settings.caption_length, self.vocabulary)
        return Example(sample.key, pair, regions, {"image": annotation.image, "caption": text, "cut": cut})

    @property
    def lookahead(self) -> int:
        return max(self.settings.wrong_captions, self.settings.wrong_images)

    def collate_group(self, examples: Sequence[Example], following: Sequence[Example]) -> list[Example]:
        """Return the matching caption-image pairs, with added rows in which the caption does not fit the image.

        The image of each pair is also combined with captions of the pairs that follow, and its caption with their
        images. Pairs that share an image are never combined, because either caption would fit. Each returned Example
        holds the image of one pair and all rows with that image.

        Each row has three labels. `anchor` is the index of the pair that the row was made for. `role` is 0 for the
        matching row, 1, 2, ... for rows with a wrong caption, and higher numbers for rows with a wrong image. `right`
        is the role that the model should choose: 0 in the matching row, and empty in the added rows.
        """
        pairs, settings = [*examples, *following], self.settings  # fewer follow if these are the whole step
        texts: list[list[TextInput]] = [[] for _ in pairs]
        for anchor, example in enumerate(examples):
            texts[anchor].append(_with_role(example.text, anchor, 0))
            for distance in range(self.lookahead):
                index = (anchor + 1 + distance) % len(pairs)
                other = pairs[index]
                if other.metadata["image"] == example.metadata["image"]:
                    continue
                if distance < settings.wrong_captions:
                    texts[anchor].append(_with_role(other.text, anchor, 1 + distance))
                if distance < settings.wrong_images:
                    row = _with_role(example.text, anchor, 1 + settings.wrong_captions + distance)
                    texts[index].append(row)
        return [
            replace(example, text=rows[0], more=tuple(rows[1:]))
            for example, rows in zip(pairs, texts, strict=True)
            if rows
        ]

    # --- model --------------------------------------------------------------------------------------------------------

    def head(self, config: ModelConfig) -> nn.Module:
        self.settings.fit(config)
        return PairScore(config)

    def pretrained_parts(self, head: nn.Module) -> Mapping[str, str]:
        return {"pooler": "pooler", "score": "relationship"}

    def convert_pretrained(self, part: str, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Combine the relationship head's two outputs into one: the logit of the probability of RELATED."""
        if part != "score":
            return tensors
        return {name: (tensor[RELATED] - tensor[1 - RELATED])[None] for name, tensor in tensors.items()}

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        scores, right = head(encoded).index_select(0, batch.counted), batch.labels["right"]
        count, wrong_captions = len(right), self.settings.wrong_captions
        if self.settings.loss == "hinge":
            scores = scores.sigmoid()
        # Missing wrong captions and images keep a score below all others.
        table = scores.new_full((count, 1 + wrong_captions + self.settings.wrong_images), -torch.inf)
        table[batch.labels["anchor"], batch.labels["role"]] = scores
        pair, wrong = table[:, 0], table[:, 1:]
        if self.settings.loss == "hinge":
            parts = wrong.tensor_split([wrong_captions], dim=1)
            loss = sum((self.settings.margin - pair + part.amax(1)).relu().sum() for part in parts)
        else:
            loss = F.cross_entropy(table, right, reduction="sum")
        return {"pairs": (loss, count), "accuracy": accuracy(pair > wrong.amax(1))}

    # --- predictions --------------------------------------------------------------------------------------------------

    def predict(self, vlbert: VLBert, head: nn.Module, batch: Batch) -> list[dict]:
        """Return a dict per image for `assemble`: `key`, `scores` (float32 bytes) and fields of HeldOutImage."""
        ranked: list[HeldOutImage] = [metadata["ranked"] for metadata in batch.metadata]
        candidates, appearance = ranked[0].candidates, vlbert.appearance(batch)
        size, scores_of_blocks = max(1, self.settings.rows_at_once // len(batch.image_rows)), []
        for start in range(0, len(candidates), size):
            block = with_texts(batch, candidates[start : start + size])
            scores_of_blocks.append(head(vlbert(block, appearance=appearance)).view(len(batch.image_rows), -1))
        scores = map(bytes, torch.cat(scores_of_blocks, dim=1)[batch.image_of].cpu().numpy())  # of all candidates
        rows, fields = zip(batch.keys, ranked, scores, strict=True), ("image", "captions", "first", "images")
        return [{"key": key, "scores": row} | {f: getattr(image, f) for f in fields} for key, image, row in rows]

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """Return one dict per pair, with the probability that its text and image belong together."""
        likely, unknown = head(encoded).sigmoid().tolist(), {"ground_truth": None, "score": None, "boxes": []}
        rows = []
        for key, metadata, probability in zip(batch.keys, batch.metadata, likely, strict=True):
            answer = {"answer": "text and image belong together", "probability": probability}
            rows.append({"key": key, "question": metadata["caption"], **answer, "ranking": [answer], **unknown})
        return rows

    def assemble(self, rows: Sequence[dict]) -> list[dict]:
        """Return one prediction per image, given the dicts of `predict`. Ranks are counted from 1.

        `question` is the image's file name, and `ground_truth` is its own caption with the highest score. `score` is
        the mean of two values: 1 / caption_rank, and the mean of 1 / image_ranks. More columns:

        image, captions      file name and captions of the image
        caption_rank         rank of the image's best caption among the captions of all images
        image_ranks          for each caption of the image, the rank of the image among all images
        found_images         for each caption of the image, the file name of the image with the best score
        fold, caption_rank_fold, image_ranks_fold   the image's fold and the ranks in it, if there are several folds
        """
        if not rows:
            return []
        rows = sorted(rows, key=lambda row: row["first"])
        readable = np.concatenate([row["first"] + np.arange(len(row["captions"])) for row in rows])
        image_of = np.repeat(np.arange(len(rows)), [len(row["captions"]) for row in rows])
        all_scores = np.stack([np.frombuffer(row["scores"], np.float32) for row in rows])
        scores = all_scores[:, readable]  # without captions of unreadable images
        texts = [text for row in rows for text in row["captions"]]
        overall, best_images = retrieval.ranks(scores, image_of), scores.argmax(axis=0)
        folds = rows[0]["images"] // self.settings.fold
        parts = retrieval.folds(scores, image_of, folds) if folds > 1 else []
        predictions = []
        for i, row in enumerate(rows):
            own = np.flatnonzero(image_of == i)
            order = np.argsort(-scores[i], kind="stable")[:MAX_RANKED].tolist()
            probabilities = (1 / (1 + np.exp(-scores[i].astype(np.float64)))).tolist()
            ranking = [{"answer": texts[n], "probability": probabilities[n]} for n in order]
            rank, image_ranks = int(overall.captions_of_image[i]) + 1, overall.image_of_caption[own] + 1
            columns = {
                "key": row["key"],
                "question": row["image"],
                **ranking[0],
                "ranking": ranking,
                "ground_truth": texts[own[scores[i, own].argmax()]],
                "score": (1 / rank + float((1 / image_ranks).mean())) / 2,
                "boxes": [],
                "image": row["image"],
                "captions": list(row["captions"]),
                "caption_rank": rank,
                "image_ranks": image_ranks.tolist(),
                "found_images": [rows[n]["image"] for n in best_images[own]],
            }
            if parts:
                columns |= dict.fromkeys(("fold", "caption_rank_fold", "image_ranks_fold"))
                fold, position = divmod(i, len(rows) // folds)
                if fold < folds:  # images after the last full fold are in none
                    start = int(own[0]) - sum(len(part.image_of_caption) for part in parts[:fold])
                    columns["fold"] = fold
                    columns["caption_rank_fold"] = int(parts[fold].captions_of_image[position]) + 1
                    columns["image_ranks_fold"] = (parts[fold].image_of_caption[start:][: len(own)] + 1).tolist()
            predictions.append(columns)
        return predictions

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """Return rank metrics: image_* for finding the image of a caption, caption_* for finding a caption of an image.

        r1, r5 and r10 are the fractions (not percentages) of ranks up to 1, 5 and 10. medr and meanr are the median and
        mean rank. Names that end in _fold are means over the folds. `chance` is image_r1 for random scores.
        """
        metrics = _recalls(rows, "") | {"chance": 1 / len(rows)}
        folds = sorted({row["fold"] for row in rows if row.get("fold") is not None})
        by_fold = [_recalls([row for row in rows if row["fold"] == fold], "_fold") for fold in folds]
        names = by_fold[0] if by_fold else ()
        return metrics | {name: float(np.mean([recalls[name] for recalls in by_fold])) for name in names}


class PairScore(nn.Module):
    """A pooler and a linear layer. Their score says how well the text and the image of a row fit together."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pooler = Pooler(config)
        self.score = nn.Linear(self.pooler.size, 1)
        initialise_head(self, config)

    def forward(self, encoded: Encoded) -> Tensor:
        """Return the scores [N]. They are computed in float32, because lower precision would make some scores equal."""
        text, regions = encoded.text[:, :1].float(), encoded.regions[:, :1].float()
        with torch.autocast(text.device.type, enabled=False):
            return self.score(self.pooler(text, regions))[:, 0]


def _with_role(text: TextInput, anchor: int, role: int) -> TextInput:
    labels = {"anchor": np.array([anchor]), "role": np.array([role]), "right": np.zeros(int(role == 0), np.int64)}
    return replace(text, labels=labels)


def _recalls(rows: Sequence[dict], suffix: str) -> dict[str, float]:
    ranks = {
        "image": np.array([rank - 1 for row in rows for rank in row[f"image_ranks{suffix}"]]),
        "caption": np.array([row[f"caption_rank{suffix}"] - 1 for row in rows]),
    }
    return {
        f"{direction}_{name}{suffix}": value / 100 if name in ("r1", "r5", "r10") else value
        for direction, values in ranks.items()
        for name, value in retrieval.recalls(values).items()
    }
