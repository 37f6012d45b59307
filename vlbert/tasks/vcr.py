"""VCR: which of four answers is right, and which of four rationales says why? (paper 4.2, figure 2 a)

    torchrun -m vlbert.train finetune_vcr_base data.root=ROOT task.folder=vcr init_from=ROOT/runs/...

The paper (table 1): base 73.8 Q->A, 74.4 QA->R, 55.2 Q->AR on val; large 75.5, 77.9, 58.9 (test 75.8, 78.4, 59.7).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, ImageInput, TextInput
from vlbert.data.images import PreparedImage, swap_sides
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets import vcr
from vlbert.datasets.vcr import CHOICES, CLASSES, Scene, Text
from vlbert.model.heads import Classifier, ClassifierKind, HeadTransform, Pooler, initialise_head
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Questions, accuracy, questions_of
from vlbert.tasks.vcr_text import (
    PEOPLE,
    Ask,
    Tagged,
    check_fits,
    cut,
    neutral_names,
    own_question,
    read_asks,
    tag,
)


@dataclass(frozen=True)
class VCRSettings:
    folder: str = ""  # holds train.jsonl, val.jsonl and vcr1images/ with the metadata, as the data set ships them
    train_on: tuple[str, ...] = ("train",)  # splits, as the files are named
    validate_on: str = "val"  # split of validation, as in the files' names
    question: Literal["answer", "rationale"] = "answer"  # Q->A, or QA->R
    every_answer: bool = False  # held out, rationales are asked for behind each answer, as the leaderboard does, and
    #                             not behind the right one alone; where nobody says which is right, they always are
    max_pieces: int = 64  # of question and choice; beyond it the longer of the two loses its end
    truncation: Literal["shared", "each"] = "shared"  # what a long choice cuts off the question is cut off in the rows
    #                                            of all four choices, or in its own
    swap_left_right: bool = False  # in the texts of a mirrored picture
    mention_visual_embedding: Literal["object", "image"] = (
        "object"  # look of a word that names an object: its, or all words'
    )
    names: Literal["neutral", "class"] = "neutral"  # how a person is called who is mentioned: by a name, or `person`
    instance_masks: bool = True  # only the cells of a region that its object covers count in its feature ...
    mask_size: int = 14  # ... of so many, across and down, that the model's res5 gives
    hidden_regions: float = 0.0  # share of regions that training hides, and then asks for; 0: it asks for all, in sight
    loss: Literal["sigmoid", "softmax"] = "sigmoid"  # each choice right or wrong by itself, or one of four
    pooled: bool = True  # the score is read at [CLS] behind BERT's tanh pooler, or at [CLS] itself
    classifier: ClassifierKind = "linear"  # what scores a choice: one layer, or `two_layers`
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
        for name in ("mask_size", "classifier_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_pieces < 2:
            raise ValueError(f"max_pieces is {self.max_pieces}; it must be at least 2")
        if not 0 <= self.hidden_regions <= 1:
            raise ValueError(f"hidden_regions is {self.hidden_regions}; it must be a share, in [0, 1]")


class VCR:
    """The regions are the annotated objects of the metadata: those of the region shard are set aside, whatever detector
    they come from (a shard of the annotated backend could not give the texts' numbering and polygons)."""

    shuffles = False
    paper = f"table 1, val: {'; '.join(f'{metric} {found}' for metric, found in vcr.REPORTED['val'].items())}"
    joins = True
    evaluation: ClassVar = {"every_answer": True}

    @staticmethod
    def best(settings: VCRSettings) -> str:
        return f"{settings.question}_accuracy"

    def __init__(self, settings: VCRSettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary

    def questions(self, samples: Samples, split: str | None) -> Questions:
        splits, settings = self.settings.train_on if split is None else (split,), self.settings
        asks = read_asks(Path(settings.folder), splits, split is None, settings.question, settings.every_answer)
        found = [(ask, ask.name, ask.item.image, ask.flaw) for ask in asks]
        return questions_of(samples, found, split is None, f"{', '.join(splits)} of {settings.folder}")

    def ask(self, text: str, choices: Sequence[str] = (), answer: str = "", hide: Sequence[int] = ()) -> Ask:
        """What `example` takes for a question of one's own about the sample's regions: its four choices or, of a model
        for rationales, the answer and four rationales.

        Regions are mentioned by their numbers, from 1 on: "Why is [1] near [2,3]?" A sample does not say what they are
        called, so the words read "object", with the region's look, and each region fills its box.
        """
        if hide:
            raise ValueError("VCR's regions are all in sight; name none to be hidden")
        return own_question(self.settings.question, text, choices, answer)

    def example(self, sample: Sample, image: PreparedImage, ask: Ask, rng: np.random.Generator) -> Example:
        scene, asked, choices = ask.read(sample)
        names = scene.names
        if self.settings.names == "neutral":
            # Held out, all questions about a picture use the same names, in every process and on every machine.
            first = zlib.crc32(ask.item.image.encode()) if ask.held_out else int(rng.integers(len(PEOPLE)))
            names = neutral_names(names, first)
        before, most = [self.tagged(text, names, image.flipped) for text in asked], self.settings.max_pieces
        behind = [self.tagged(choice, names, image.flipped) for choice in choices]
        if ask.own:
            check_fits(before, behind, most)
        rows = cut(before, behind, most, shared=self.settings.truncation == "shared")
        texts = [self.words(*row, right=number == ask.label) for number, row in enumerate(rows)]
        boxes = scene.boxes * ([sample.width / scene.size[0], sample.height / scene.size[1]] * 2)  # in stored pixels
        picture = self._picture(scene, boxes, image, None if ask.held_out else rng)
        about = ask.about(scene, asked, choices, boxes)
        return Example(sample.key, texts[0], picture, about, more=tuple(texts[1:]))

    def tagged(self, text: Text, names: Sequence[str], flipped: bool = False) -> Tagged:
        """Its pieces and what they look at; of a mirrored picture with left for right, where the settings say so."""
        if flipped and self.settings.swap_left_right:
            text = [swap_sides(token) if isinstance(token, str) else token for token in text]
        pieces, regions = tag(text, names, self.vocabulary)
        return pieces, regions * (self.settings.mention_visual_embedding == "object")

    def _picture(
        self, scene: Scene, boxes: np.ndarray, image: PreparedImage, rng: np.random.Generator | None
    ) -> ImageInput:
        image = replace(image, boxes=image.boxes[:1]).with_boxes(boxes)
        more = {"classes": np.array([0, *scene.classes], np.int64)}
        if self.settings.instance_masks:
            side = self.settings.mask_size
            masks = np.concatenate([np.ones((1, side, side), np.float32), scene.masks(side)])
            more["cells"] = np.ascontiguousarray(masks[:, :, ::-1]) if image.flipped else masks
        if not self.settings.hidden_regions:
            return image.to_input(**more)
        masked = np.zeros(len(image.boxes), bool)
        if rng is not None:
            masked[1:] = rng.random(len(boxes)) < self.settings.hidden_regions
        return image.to_input(masked, label_masks={"region_label_mask": masked}, **more)

    def words(self, question: Tagged, choice: Tagged, right: bool) -> TextInput:
        """[CLS] question [SEP] choice [SEP], and whether it is the right choice."""
        words, zero = self.vocabulary, np.zeros(1, np.int64)
        tokens = [[words.cls], question[0], [words.sep], choice[0], [words.sep]]
        token_region = [zero, question[1], zero, choice[1], zero]
        segments = np.repeat([0, 1], [len(question[0]) + 2, len(choice[0]) + 1])
        tokens, token_region = (np.concatenate(parts).astype(np.int64) for parts in (tokens, token_region))
        return TextInput(tokens, segments.astype(np.int64), token_region, labels={"right": np.array([right])})

    def head(self, config: ModelConfig) -> nn.Module:
        regions, side = config.regions, self.settings.mask_size
        if regions.features != "end_to_end":
            raise ValueError("VCR's regions are its own, no detector's: set model.regions.features=end_to_end")
        cells = regions.roi_size if regions.resnet.res5_dilated else (regions.roi_size + 1) // 2
        if self.settings.instance_masks and side != cells:
            raise ValueError(
                f"task.mask_size is {side}, the model's res5 gives {cells} x {cells} cells; set it to {cells}"
            )
        room = config.max_positions - 5  # less [CLS], two [SEP], the regions and [END]
        if self.settings.max_pieces > room:
            raise ValueError(f"task.max_pieces is {self.settings.max_pieces}, the model has room for {room}: set that")
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
        """Of questions whose right choice is known."""
        logits = self.logits(head, encoded, batch)
        counted = batch.counted.clone()
        right = batch.labels["right"].view(-1, CHOICES)
        known = right.any(1)
        counted[batch.counted] = known.repeat_interleave(CHOICES)
        logits, right = logits[counted.view(logits.shape)[:, 0]], right[known]
        if self.settings.loss == "sigmoid":
            answers = F.binary_cross_entropy_with_logits(logits, right.float(), reduction="sum"), logits.numel()
        else:
            answers = F.cross_entropy(logits, right.int().argmax(1), reduction="sum"), len(logits)
        monitored = {"accuracy": accuracy(right.gather(1, logits.argmax(1, keepdim=True))[:, 0])}
        if self.settings.region_loss == "none":
            return {"answers": answers} | monitored
        classes = batch.region_classes
        asked = batch.label_masks.get("region_label_mask", batch.region_mask) & counted[:, None]
        mask = batch.region_mask
        if self.settings.region_loss == "appearance":  # once a picture, not once a choice
            asked, mask, classes = (x[batch.image_rows] for x in (asked, mask, classes))
            seen = encoded.appearance[asked[mask]]
        else:
            seen = encoded.regions[asked]
        regions = F.cross_entropy(head.classes(seen).float(), classes[asked], reduction="sum")
        return {"answers": answers, "regions": (regions, int(asked.sum()))} | monitored

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        found = []
        probabilities = self.logits(head, encoded, batch).double().softmax(1).tolist()
        for key, about, row in zip(batch.keys, batch.metadata, probabilities, strict=True):
            said, label = about["choices"], about["label"]
            order = sorted(range(CHOICES), key=lambda i: -row[i])  # of equals the first leads, as officially
            ranking = [{"said": said[i], "probability": row[i]} for i in order]
            known = {"truth": None, "score": None}
            if label is not None:
                known = {"truth": said[label], "score": float(order[0] == label)}
            more = {"key": key, "ranking": ranking, "probabilities": row} | ranking[0] | known
            found.append({name: value for name, value in about.items() if name != "choices"} | more)
        return found

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        return vcr.accuracies(rows)

    def submission(self, rows: Sequence[dict]) -> dict[str, bytes]:
        return {"vcr_submission.csv": vcr.submission(Path(self.settings.folder), rows)}

    def reported(self, split: str) -> dict[str, str]:
        return vcr.REPORTED.get(split, {})


class VCRHead(nn.Module):
    """One number a choice, and a class of object a region."""

    def __init__(self, config: ModelConfig, settings: VCRSettings):
        super().__init__()
        contextual = settings.region_loss == "contextual"
        self.init_from = {"region_transform": "region_transform"} if contextual else {}
        self.pooler = Pooler(config.hidden_size) if settings.pooled else None
        self.region_transform = HeadTransform(config.hidden_size, normed=False) if contextual else None
        inputs = config.regions.channels if settings.region_loss == "appearance" else config.hidden_size
        self.region_classifier = nn.Linear(inputs, CLASSES) if settings.region_loss != "none" else None
        initialise_head(self, config)
        self.score = Classifier(config, 1, settings.classifier, dropout=config.dropout, width=settings.classifier_width)

    def scores(self, text: Tensor) -> Tensor:
        """text [N, T, C] -> [N, 1]."""
        return self.score(text[:, 0] if self.pooler is None else self.pooler(text))

    def classes(self, regions: Tensor) -> Tensor:
        """[K, C] -> logits [K, CLASSES]."""
        return self.region_classifier(regions if self.region_transform is None else self.region_transform(regions))
