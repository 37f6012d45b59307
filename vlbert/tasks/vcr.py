"""VCR: which of four answers is right, and which of four rationales says why? (paper 4.2, figure 2 a)

    torchrun -m vlbert.train finetune_vcr_base data.root=ROOT task.folder=vcr start_from=ROOT/runs/...

The paper (table 1): base 73.8 Q->A, 74.4 QA->R, 55.2 Q->AR on val; large 75.5, 77.9, 58.9 (test 75.8, 78.4, 59.7).
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.sample import Sample
from vlbert.batch import Batch, Example, Picture, Words
from vlbert.config import ModelConfig
from vlbert.model import Classifier, ClassifierKind, Encoded, HeadTransform, Pooler, VLBert, initialise_head
from vlbert.official import find_samples
from vlbert.official.vcr import CLASSES, Item, Scene, instance_mask, read_items, read_scene
from vlbert.pictures import View
from vlbert.tasks import Questions
from vlbert.text import Vocabulary

if TYPE_CHECKING:
    from vlbert.data import Samples

_PEOPLE = "casey riley jessie jackie avery jaime peyton kerry jody kendall frankie pat quinn"
PEOPLE = _PEOPLE.split()  # names of any gender

Tagged = tuple[np.ndarray, np.ndarray]  # word pieces int64 [t], the region that each names int64 [t] (0: none)
Tokens = Sequence[str | Sequence[int]]  # a text as VCR writes it: words, and lists of objects that are mentioned


@dataclass(frozen=True)
class VCRSettings:
    folder: str = ""  # holds train.jsonl, val.jsonl and vcr1images/ with the metadata, as the data set ships them
    train_on: tuple[str, ...] = ("train",)  # splits, as the files are named
    validate_on: str = "val"
    question: Literal["answer", "rationale"] = "answer"  # Q->A, or QA->R
    max_pieces: int | None = 64  # of question and choice; beyond it the longer of the two loses its end
    mentions_look_at: Literal["object", "image"] = "object"  # look of a word that names an object: its, or all words'
    names: Literal["neutral", "class"] = "neutral"  # how a person is called who is mentioned: by a name, or `person`
    instance_masks: bool = True  # only the cells of a region that its object covers count in its feature ...
    mask_size: int = 14  # ... of so many, across and down, that the model's res5 gives
    hidden_regions: float = 0.0  # share of regions that training hides, and then asks for; 0: it asks for all, in sight
    loss: Literal["sigmoid", "softmax"] = "sigmoid"  # each choice right or wrong by itself, or one of four
    pooled: bool = True  # the score is read at [CLS] behind BERT's tanh pooler, or at [CLS] itself
    classifier: ClassifierKind = "linear"
    classifier_width: int = 1024  # of its layer in between, for two_layers
    region_loss: Literal["contextual", "appearance", "none"] = "contextual"  # also ask what object each region is: of
    #                                                what the encoder says there, or of the Fast R-CNN's feature alone
    copies_segment: bool = True  # from a pre-trained model, where sentences are of segment A alone, B starts as A

    @property
    def files(self) -> tuple[str, ...]:
        """What `folder` must hold, beside the metadata."""
        return tuple(f"{split}.jsonl" for split in (*self.train_on, self.validate_on))

    @property
    def folders(self) -> tuple[str, ...]:
        """What folders `folder` must hold."""
        return ("vcr1images",)

    def __post_init__(self):
        if self.max_pieces is not None and self.max_pieces < 1:
            raise ValueError(f"max_pieces is {self.max_pieces}; it must be at least 1")
        if not 0 <= self.hidden_regions <= 1:
            raise ValueError(f"hidden_regions is {self.hidden_regions}; it must be a share, in [0, 1]")


class VCR:
    """The regions are the annotated objects of the metadata: those of the region shard are set aside, whatever detector
    they come from (a shard of the annotated backend could not give the texts' numbering and polygons)."""

    shuffles = False
    paper = "73.8 Q->A, 74.4 QA->R, 55.2 Q->AR (base, val); 75.5, 77.9, 58.9 (large, val), table 1"

    def __init__(self, settings: VCRSettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary

    def questions(self, samples: "Samples", split: str | None) -> Questions:
        folder = Path(self.settings.folder)
        splits = self.settings.train_on if split is None else (split,)
        items = [item for name in splits for item in read_items(folder, name, held_out=split is not None)]
        without = {item.metadata for item in items if not item.metadata.is_file()}
        if without:
            raise ValueError(f"{len(without)} metadata files are missing, such as {min(without)}; fetch vcr1images")
        return Questions(find_samples(samples, [item.image for item in items], str(folder)), items)

    def example(self, sample: Sample, view: View, ask: Item, rng: np.random.Generator) -> Example:
        item, scene = json.loads(ask.line), read_scene(ask.metadata)
        if item["objects"] != scene.names:
            raise ValueError(f"{ask.where} and {ask.metadata} list different objects; they must be of one release")
        names = self._names(scene, rng)
        kind = self.settings.question
        question = [self.tagged(item["question"], names)]
        if kind == "rationale":
            question.append(self.tagged(item["answer_choices"][item["answer_label"]], names))
        texts = []
        for number, choice in enumerate(item[f"{kind}_choices"]):
            parts, cut = self._cut(question, self.tagged(choice, names))
            texts.append(self.words(_joined(parts), cut, right=number == item[f"{kind}_label"]))
        picture = self._picture(scene, sample, view, None if ask.held_out else rng)
        return Example(sample.key, texts[0], picture, {"annot_id": item["annot_id"]}, more=tuple(texts[1:]))

    def _names(self, scene: Scene, rng: np.random.Generator) -> list[str]:
        """How each object is called: by its class, a person by the next of PEOPLE, from any of them on."""
        if self.settings.names == "class":
            return scene.names
        people = itertools.islice(itertools.cycle(PEOPLE), int(rng.integers(len(PEOPLE))), None)
        return [next(people) if name == "person" else name for name in scene.names]

    def tagged(self, tokens: Tokens, names: Sequence[str]) -> Tagged:
        """The pieces of a text, its mentions of objects as their names; every piece of a name tagged with its region,
        which is the object's number + 1. Several objects are joined by `and`."""
        words = []
        for token in tokens:
            if isinstance(token, str):
                words.append((token, 0))
                continue
            for place, number in enumerate(token):
                words += [("and", 0)] * (place > 0) + [(names[number], number + 1)]
        parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for region, run in itertools.groupby(words, key=lambda word: word[1]):
            pieces = self.vocabulary.encode(" ".join(word for word, _ in run))
            looks_at = region if self.settings.mentions_look_at == "object" else 0
            parts.append((pieces, np.full(len(pieces), looks_at, np.int64)))
        return _joined(parts)

    def _cut(self, question: list[Tagged], choice: Tagged) -> tuple[list[Tagged], Tagged]:
        """The question (for a rationale, and its answer) and the choice, as far as they fit: the choice is cut while it
        is longer than all before it, else the question, which keeps one piece, and then the answer."""
        texts = [*question, choice]
        sizes = [len(pieces) for pieces, _ in texts]
        while self.settings.max_pieces is not None and sum(sizes) > self.settings.max_pieces:
            longest = -1 if sizes[-1] > sum(sizes[:-1]) else 0 if sizes[0] > 1 or len(question) == 1 else 1
            sizes[longest] -= 1
        *parts, choice = ((pieces[:size], regions[:size]) for (pieces, regions), size in zip(texts, sizes, strict=True))
        return parts, choice

    def _picture(self, scene: Scene, sample: Sample, view: View, rng: np.random.Generator | None) -> Picture:
        to_stored = np.array([sample.width / scene.size[0], sample.height / scene.size[1]] * 2)
        view = replace(view, boxes=view.boxes[:1]).with_boxes(scene.boxes * to_stored)
        more = {"classes": np.array([0, *scene.classes], np.int64)}
        if self.settings.instance_masks:
            side = self.settings.mask_size
            masks = [instance_mask(*both, side) for both in zip(scene.polygons, scene.boxes, strict=True)]
            masks = np.stack([np.ones((side, side), np.float32), *masks])
            more["cells"] = np.ascontiguousarray(masks[:, :, ::-1]) if view.flipped else masks
        if not self.settings.hidden_regions:
            return view.picture(**more)
        hidden = np.zeros(len(view.boxes), bool)
        if rng is not None:
            hidden[1:] = rng.random(len(scene.boxes)) < self.settings.hidden_regions
        return view.picture(hidden, targets={"region_asked": hidden}, **more)

    def words(self, question: Tagged, choice: Tagged, right: bool) -> Words:
        """[CLS] question [SEP] choice [SEP], and whether it is the right choice."""
        words, zero = self.vocabulary, np.zeros(1, np.int64)
        tokens = [[words.cls], question[0], [words.sep], choice[0], [words.sep]]
        looks_at = [zero, question[1], zero, choice[1], zero]
        segments = np.repeat([0, 1], [len(question[0]) + 2, len(choice[0]) + 1])
        tokens, looks_at = (np.concatenate(parts).astype(np.int64) for parts in (tokens, looks_at))
        return Words(tokens, segments.astype(np.int64), looks_at, asked={"right": np.array([right])})

    def head(self, config: ModelConfig) -> nn.Module:
        regions, side = config.regions, self.settings.mask_size
        if regions.features != "end_to_end":
            raise ValueError("VCR's regions are its own, no detector's: set model.regions.features=end_to_end")
        cells = regions.roi_size if regions.resnet.res5_dilated else (regions.roi_size + 1) // 2
        if self.settings.instance_masks and side != cells:
            raise ValueError(
                f"task.mask_size is {side}, the model's res5 gives {cells} x {cells} cells; set it to {cells}"
            )
        return VCRHead(config, self.settings)

    @torch.no_grad()
    def begin(self, vlbert: VLBert, head: nn.Module, started_from: str | None) -> None:
        """Last preparation of a new run, its weights loaded from a run of the task with the settings `started_from`:
        segment B, which pre-training never met, starts as segment A (VCRSettings.copies_segment)."""
        if self.settings.copies_segment and started_from == "PretrainingSettings":
            segments = vlbert.embedding.segments.weight
            segments[1] = segments[0]

    def logits(self, head: nn.Module, encoded: Encoded, batch: Batch) -> Tensor:
        """[questions, choices]."""
        return head.scores(encoded.text).float().view(len(batch.keys), -1)

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        logits = self.logits(head, encoded, batch)
        logits = logits[batch.counted.view(logits.shape)[:, 0]]
        right = batch.asked["right"].view(logits.shape)
        if self.settings.loss == "sigmoid":
            answers = F.binary_cross_entropy_with_logits(logits, right.float(), reduction="sum"), logits.numel()
        else:
            answers = F.cross_entropy(logits, right.int().argmax(1), reduction="sum"), len(logits)
        if self.settings.region_loss == "none":
            return {"answers": answers}
        classes = batch.region_classes
        asked = batch.targets.get("region_asked", batch.region_mask) & batch.counted[:, None]
        mask = batch.region_mask
        if self.settings.region_loss == "appearance":  # once a picture, not once a choice
            asked, mask, classes = (x[batch.picture_rows] for x in (asked, mask, classes))
            seen = encoded.appearance[asked[mask]]
        else:
            seen = encoded.regions[asked]
        regions = F.cross_entropy(head.classes(seen).float(), classes[asked], reduction="sum")
        return {"answers": answers, "regions": (regions, int(asked.sum()))}

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        logits = self.logits(head, encoded, batch)
        columns = {
            "key": batch.keys,
            "choice": logits.argmax(1).tolist(),
            "right": batch.asked["right"].view(logits.shape).int().argmax(1).tolist(),
            "probabilities": logits.softmax(1).tolist(),
        }
        found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [about | row for about, row in zip(batch.about, found, strict=True)]

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """accuracy: the right one of the choices; chance: of guessing."""
        return {
            "accuracy": float(np.mean([row["choice"] == row["right"] for row in rows])),
            "chance": float(np.mean([1 / len(row["probabilities"]) for row in rows])),
        }


class VCRHead(nn.Module):
    """One number a choice, and a class of object a region."""

    def __init__(self, config: ModelConfig, settings: VCRSettings):
        super().__init__()
        contextual = settings.region_loss == "contextual"
        self.start_from = {"region_transform": "region_transform"} if contextual else {}
        self.pooler = Pooler(config.hidden) if settings.pooled else None
        self.region_transform = HeadTransform(config.hidden, normed=False) if contextual else None
        inputs = config.regions.channels if settings.region_loss == "appearance" else config.hidden
        self.region_classifier = nn.Linear(inputs, CLASSES) if settings.region_loss != "none" else None
        initialise_head(self, config)
        self.score = Classifier(config, 1, settings.classifier, dropout=config.dropout, width=settings.classifier_width)

    def scores(self, text: Tensor) -> Tensor:
        """text [N, T, C] -> [N, 1]."""
        return self.score(text[:, 0] if self.pooler is None else self.pooler(text))

    def classes(self, regions: Tensor) -> Tensor:
        """[K, C] -> logits [K, CLASSES]."""
        return self.region_classifier(regions if self.region_transform is None else self.region_transform(regions))


def _joined(parts: Sequence[Tagged]) -> Tagged:
    pieces, regions = zip(*parts, strict=True)
    return np.concatenate(pieces), np.concatenate(regions)
