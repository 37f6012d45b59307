"""Image-text retrieval on Flickr30k and COCO: how well do a caption and an image fit? (Unicoder-VL 3.3, ViLBERT 3.2)

    torchrun -m vlbert.train finetune_retrieval --data.root ROOT --task.folder flickr30k --init_from ROOT/runs/...

Recall@1 on Flickr30k's test, caption -> image and image -> caption: Unicoder-VL 71.5 and 86.2, zero-shot 48.4 and 64.3;
ViLBERT 58.20 caption -> image, zero-shot 31.86. VL-BERT's paper reports none.
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
from vlbert.tasks.base import Examples, Task, TaskSettings, accuracy, check_room, invalid_reason, make_examples
from vlbert.tasks.pretraining import RELATED

MAX_RANKED = 5  # captions in a prediction's ranking
OTHER_TOKENS = 4  # positions beside the caption's: of [CLS], [SEP], the regions and [END]


@dataclass(frozen=True)
class RetrievalSettings(TaskSettings):
    folder: str = ""  # holds `file`
    file: str = "dataset_flickr30k.json"  # Karpathy's splits and captions, as published; of COCO: dataset_coco.json
    train_on: tuple[str, ...] = ("train",)  # splits; of COCO train,restval
    validate_on: str = "val"  # split of validation
    captions: int = retrieval.CAPTIONS  # of an image, its first ones; further ones are left out
    caption_length: int = 64  # tokens of a caption; a longer one loses its end
    max_regions: int | None = None  # regions of an image, the first of the sample; none: all
    # hinge: the pair above the best wrong image and the best wrong caption, by `margin`, in probability (Unicoder-VL).
    # cross_entropy: the pair among itself and all wrong ones (ViLBERT: two wrong captions and one wrong image)
    loss: Literal["hinge", "cross_entropy"] = "hinge"
    margin: float = 0.2
    wrong_captions: int = 3  # of each pair in training: of the next examples in the order
    wrong_images: int = 3  # likewise
    rows_at_once: int = 512  # pairs that an evaluation computes together: memory, and the last digits of the scores
    fold: int = 1000  # images of a part that is ranked by itself too, where a split has several: COCO's 1K numbers

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def __post_init__(self):
        for name in ("captions", "caption_length", "wrong_captions", "wrong_images", "rows_at_once", "fold"):
            check(self, getattr(self, name) >= 1, name, "at least 1")
        check(self, self.max_regions is None or self.max_regions >= 1, "max_regions", "at least 1, or none")
        check(self, 0 <= self.margin <= 1, "margin", "a difference of probabilities, from 0 to 1")


@dataclass(frozen=True, slots=True)
class Caption:
    """A caption and its image, to learn from."""

    image: str
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class HeldOutImage:
    """An image to be ranked: its name and its own captions.

    first       place of the first of these among the candidates
    images      how many images the candidates are of
    candidates  the token ids, int64 [t], of each caption that images are ranked against
    """

    image: str
    captions: tuple[str, ...]
    first: int = 0
    images: int = 0
    candidates: list[np.ndarray] = field(default_factory=list, repr=False)


class Retrieval(Task):
    paper = "Flickr30k test, R@1 caption -> image, image -> caption: Unicoder-VL 71.5, 86.2; ViLBERT 58.20"
    evaluation_batch_size = 8  # each has thousands of pairs
    zero_shot_head = "relationship"

    @staticmethod
    def best_metric(settings: RetrievalSettings) -> str:
        return "image_r1"

    # --- examples -----------------------------------------------------------------------------------------------------

    def examples(self, samples: Samples, split: str | None) -> Examples:
        """Training: one example a caption. Held out: one an image, ranked against the captions of all of them."""
        file = self.folder / self.settings.file
        splits, held_out, skipped = retrieval.read_splits(file, self.settings.captions), [], []
        for name in self.settings.splits(split):
            if name not in splits:
                raise ValueError(f"{file} has no split {name!r}; it has {', '.join(splits) or 'none'}")
            for image, captions in splits[name].items():
                kept = tuple(text for text in captions if self._has_words(text))
                held_out += [HeldOutImage(image, kept)] if kept else []
                if len(kept) < len(captions) or not kept:
                    skipped.append(
                        f"{image}: {len(captions) - len(kept)} of its {len(captions)} captions have no words"
                    )
        if split is None:
            found = [(Caption(one.image, text), one.image, one.image, "") for one in held_out for text in one.captions]
        else:
            found = [(one, one.image, one.image, "") for one in held_out]
        examples = make_examples(self.settings, samples, split, found)
        ranked = examples.annotations if split is None else self.ranked(examples.annotations)
        return replace(examples, annotations=ranked, skipped=(*skipped, *examples.skipped))

    def ranked(self, images: Sequence[HeldOutImage]) -> list[HeldOutImage]:
        """These images, to be ranked against the captions of all of them."""
        candidates = [self.tokens(text) for one in images for text in one.captions]
        firsts = np.cumsum([0, *(len(one.captions) for one in images)]).tolist()
        return [
            replace(one, first=first, images=len(images), candidates=candidates)
            for one, first in zip(images, firsts, strict=False)
        ]

    def subset(self, examples: Examples, numbers: np.ndarray) -> Examples:
        annotations = list(examples.annotations)
        chosen = sorted(numbers.tolist())
        for number, one in zip(chosen, self.ranked([annotations[n] for n in chosen]), strict=True):
            annotations[number] = one
        return replace(examples, annotations=annotations)

    def annotation_for(self, text: str) -> Caption:
        if not self._has_words(text):
            raise ValueError(f"the text {text[:60]!r} has no words")
        return Caption("", text)

    def _has_words(self, text: str) -> bool:
        return not invalid_reason(text, "caption_length", sys.maxsize, self.vocabulary)

    def tokens(self, text: str) -> np.ndarray:
        """int64: [CLS] caption [SEP]."""
        tokens = self.vocabulary.encode(text)[: self.settings.caption_length]
        return np.array([self.vocabulary.cls, *tokens, self.vocabulary.sep], np.int64)

    def example(
        self, sample: Sample, image: PreparedImage, annotation: Caption | HeldOutImage, rng: np.random.Generator
    ) -> Example:
        regions = image.to_input(None, self.settings.max_regions)
        if isinstance(annotation, HeldOutImage):  # `predict` puts all candidates in the place of its text
            text = TextInput.of_one_sentence(self.tokens(annotation.captions[0]))
            return Example(sample.key, text, regions, {"ranked": annotation})
        text = swap_sides(annotation.text) if image.flipped else annotation.text
        return Example(
            sample.key,
            _labelled(TextInput.of_one_sentence(self.tokens(text)), 0, 0),
            regions,
            {"image": annotation.image, "caption": text},
        )

    @property
    def lookahead(self) -> int:
        return max(self.settings.wrong_captions, self.settings.wrong_images)

    def collate_group(self, examples: Sequence[Example], following: Sequence[Example]) -> list[Example]:
        """Each pair with the captions and the images of its neighbours as wrong ones: the rows of an image are its own
        caption, those of the examples behind it, and those of the examples before it, whose wrong image it is.

        A neighbour with the pair's own image is left out: its caption is right. Labels of a row: `anchor`, the pair's
        number, and `role`: 0 the pair, then the wrong captions, then the wrong images. The pair alone has the label
        `right`: 0, its role.
        """
        everyone, settings = [*examples, *following], self.settings  # fewer follow where these are the whole step
        texts: list[list[TextInput]] = [[] for _ in everyone]
        for anchor, example in enumerate(examples):
            texts[anchor].append(_labelled(example.text, anchor, 0))
            for distance in range(self.lookahead):
                place = (anchor + 1 + distance) % len(everyone)
                other = everyone[place]
                if other.metadata["image"] == example.metadata["image"]:
                    continue
                if distance < settings.wrong_captions:
                    texts[anchor].append(_labelled(other.text, anchor, 1 + distance))
                if distance < settings.wrong_images:
                    row = _labelled(example.text, anchor, 1 + settings.wrong_captions + distance)
                    texts[place].append(row)
        return [
            replace(example, text=rows[0], more=tuple(rows[1:]))
            for example, rows in zip(everyone, texts, strict=True)
            if rows
        ]

    # --- model --------------------------------------------------------------------------------------------------------

    def head(self, config: ModelConfig) -> nn.Module:
        check_room(self.settings, "caption_length", config, OTHER_TOKENS)
        return PairScore(config)

    def pretrained_parts(self, head: nn.Module) -> Mapping[str, str]:
        return {"pooler": "pooler", "score": "relationship"}

    def convert_pretrained(self, part: str, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """The score is the logit of "belongs together" less that of the other class: its sigmoid is the probability
        that pre-training's relationship head gives."""
        if part != "score":
            return tensors
        return {name: (tensor[RELATED] - tensor[1 - RELATED])[None] for name, tensor in tensors.items()}

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        scores, right = head(encoded).index_select(0, batch.counted), batch.labels["right"]
        count, wrong_captions = len(right), self.settings.wrong_captions
        if self.settings.loss == "hinge":
            scores = scores.sigmoid()
        # A wrong one that is missing is worse than all others
        table = scores.new_full((count, 1 + wrong_captions + self.settings.wrong_images), -torch.inf)
        table[batch.labels["anchor"], batch.labels["role"]] = scores
        pair, wrong = table[:, 0], table[:, 1:]
        if self.settings.loss == "hinge":
            over = [self.settings.margin - pair + part.amax(1) for part in wrong.tensor_split([wrong_captions], dim=1)]
            loss = sum(one.relu().sum() for one in over)
        else:
            loss = F.cross_entropy(table, right, reduction="sum")
        return {"pairs": (loss, count), "accuracy": accuracy(pair > wrong.amax(1))}

    # --- predictions --------------------------------------------------------------------------------------------------

    def predict(self, vlbert: VLBert, head: nn.Module, batch: Batch) -> list[dict]:
        """One dict an image, for `assemble`: `scores`, float32 [candidates]; `image`, `captions`, `first` and `images`,
        as in HeldOutImage. The regions of an image are computed once."""
        ranked: list[HeldOutImage] = [metadata["ranked"] for metadata in batch.metadata]
        candidates, appearance = ranked[0].candidates, vlbert.appearance(batch)
        size, found = max(1, self.settings.rows_at_once // len(batch.image_rows)), []
        for start in range(0, len(candidates), size):
            block = with_texts(batch, candidates[start : start + size])
            found.append(head(vlbert(block, appearance=appearance)).view(len(batch.image_rows), -1))
        scores = torch.cat(found, dim=1)[batch.image_of].cpu().numpy()  # (N, candidates)
        return [
            {
                "key": key,
                "scores": row,
                **{name: getattr(one, name) for name in ("image", "captions", "first", "images")},
            }
            for key, one, row in zip(batch.keys, ranked, scores, strict=True)
        ]

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """Of pairs: how likely they belong together."""
        likely = head(encoded).sigmoid().tolist()
        rows = []
        for key, metadata, probability in zip(batch.keys, batch.metadata, likely, strict=True):
            answer = {"answer": "text and image belong together", "probability": probability}
            rows.append(
                {"key": key, "question": metadata["caption"], **answer, "ranking": [answer]}
                | {"ground_truth": None, "score": None, "boxes": []}
            )
        return rows

    def assemble(self, rows: Sequence[dict]) -> list[dict]:
        """One row an image; question is its file, answer the best caption, ground_truth the best one of its own. score
        is the mean of 1 / rank of both ways, its captions together as one way. More columns:

        image, captions      its file and its captions
        caption_rank         of the best of its captions, among those of all images: from 1
        image_ranks          of the image, among all, for each of its captions
        found_images         the best image for each of its captions
        fold, caption_rank_fold, image_ranks_fold   the same in a part of `task.fold` images, where there are several
        """
        if not rows:
            return []
        rows = sorted(rows, key=lambda row: row["first"])
        there = np.concatenate([row["first"] + np.arange(len(row["captions"])) for row in rows])
        image_of = np.repeat(np.arange(len(rows)), [len(row["captions"]) for row in rows])
        scores = np.stack([row["scores"] for row in rows])[:, there]  # less captions of images that cannot be read
        texts = [text for row in rows for text in row["captions"]]
        whole, best = retrieval.ranks(scores, image_of), scores.argmax(axis=0)
        folds = rows[0]["images"] // self.settings.fold
        parts = retrieval.folds(scores, image_of, folds) if folds > 1 else []
        found = []
        for i, row in enumerate(rows):
            own = np.flatnonzero(image_of == i)
            order = np.argsort(-scores[i], kind="stable")[:MAX_RANKED].tolist()
            likely = (1 / (1 + np.exp(-scores[i].astype(np.float64)))).tolist()
            ranking = [{"answer": texts[n], "probability": likely[n]} for n in order]
            rank, image_ranks = int(whole.captions_of_image[i]) + 1, whole.image_of_caption[own] + 1
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
                "found_images": [rows[n]["image"] for n in best[own]],
            }
            if parts:  # images behind the last fold are in none
                fold, place = divmod(i, len(rows) // folds)
                of = parts[fold] if fold < folds else None
                behind = int(own[0]) - sum(len(part.image_of_caption) for part in parts[:fold])
                columns |= {
                    "fold": fold if of else None,
                    "caption_rank_fold": int(of.captions_of_image[place]) + 1 if of else None,
                    "image_ranks_fold": (of.image_of_caption[behind:][: len(own)] + 1).tolist() if of else None,
                }
            found.append(columns)
        return found

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """image_*: a caption's image among all; caption_*: an image's best caption. r1, r5, r10: the share of right
        ones among the first so many; medr, meanr: median and mean rank. *_fold: means over the folds. chance: of
        image_r1."""
        found = _recalls(rows, "") | {"chance": 1 / len(rows)}
        folds = sorted({row["fold"] for row in rows if row.get("fold") is not None})
        each = [_recalls([row for row in rows if row["fold"] == fold], "_fold") for fold in folds]
        return found | {name: float(np.mean([one[name] for one in each])) for name in (each[0] if each else ())}

    def reported(self, split: str) -> dict[str, str]:
        return retrieval.reported(self.settings.file, split)


class PairScore(nn.Module):
    """How well the text and the image of each row fit: a linear layer of the row's vector."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pooler = Pooler(config)
        self.score = nn.Linear(self.pooler.size, 1)
        initialise_head(self, config)

    def forward(self, encoded: Encoded) -> Tensor:
        """float32 [N], in float32 whatever the precision of the run: rounded scores would be equal ones."""
        text, regions = encoded.text[:, :1].float(), encoded.regions[:, :1].float()
        with torch.autocast(text.device.type, enabled=False):
            return self.score(self.pooler(text, regions))[:, 0]


def _labelled(text: TextInput, anchor: int, role: int) -> TextInput:
    labels = {"anchor": np.array([anchor]), "role": np.array([role]), "right": np.zeros(int(role == 0), np.int64)}
    return replace(text, labels=labels)


def _recalls(rows: Sequence[dict], suffix: str) -> dict[str, float]:
    ranks = {
        "image": np.array([rank - 1 for row in rows for rank in row[f"image_ranks{suffix}"]]),
        "caption": np.array([row[f"caption_rank{suffix}"] - 1 for row in rows]),
    }
    return {
        f"{way}_{name}{suffix}": value / 100 if name in ("r1", "r5", "r10") else value
        for way, of in ranks.items()
        for name, value in retrieval.recalls(of).items()
    }
