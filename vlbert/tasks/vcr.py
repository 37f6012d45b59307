"""VCR: choose one of four answers, and one of four rationales that explain it (paper 4.2, figure 2 a).

    torchrun -m vlbert.train finetune_vcr --data.root ROOT --task.folder vcr --init_from ROOT/runs/...

The paper (table 1) reports accuracies of 73.8 % for Q->A, 74.4 for QA->R and 55.2 for Q->AR on val (base model); the
large model has 75.5, 77.9 and 58.9 on val, and 75.8, 78.4 and 59.7 on test.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from storage.settings import check
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, remove_labels, select
from vlbert.data.images import PreparedImage, swap_sides
from vlbert.datasets import vcr
from vlbert.datasets.vcr import CHOICES, CLASSES, Scene, Text
from vlbert.model.heads import Classifier, ClassifierKind, HeadTransform, Pooler, initialise_head
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Examples, Task, TaskSettings, accuracy, make_examples
from vlbert.tasks.vcr_text import (
    PEOPLE,
    Question,
    Subtask,
    TaggedText,
    check_fits,
    neutral_names,
    read_questions,
    tag,
    truncate,
    user_question,
)

OTHER_TOKENS = 5  # positions besides question and choice: [CLS], two [SEP], the regions and [END]


@dataclass(frozen=True)
class VCRSettings(TaskSettings):
    folder: str = ""  # folder with train.jsonl, val.jsonl and vcr1images/ with metadata, as the data set ships them
    train_on: tuple[str, ...] = ("train",)  # splits to train on, as in file names
    validate_on: str = "val"  # split to validate on, as in file names
    subtask: Subtask = "answer"  # answer: Q->A; rationale: QA->R
    max_tokens: int = 64  # maximum tokens of question and choice together; the longer one is cut at its end
    # shared: a long choice shortens the question in the rows of all four choices; each: only in its own row
    truncation: Literal["shared", "each"] = "shared"
    swap_left_right: bool = False  # swap "left" and "right" in the texts of mirrored images
    # visual feature embedding of words that name an object: that of the object, or of the whole image
    mention_visual_embedding: Literal["object", "image"] = "object"
    names: Literal["neutral", "class"] = "neutral"  # call a mentioned person by a gender-neutral name, or "person"
    instance_masks: bool = True  # compute a region's features only from the cells that its object covers
    mask_size: int = 14  # width and height of instance masks, in cells of the model's res5
    masked_regions: float = 0.0  # share of regions that training masks and predicts; 0: predict all, unmasked
    loss: Literal["sigmoid", "softmax"] = "sigmoid"  # score each choice separately, or as one of four
    pooled: bool = True  # compute the score from the output of BERT's tanh pooler, instead of from [CLS] directly
    classifier: ClassifierKind = "linear"  # classifier of choices: one layer, or `two_layers`
    classifier_width: int = 1024  # width of the first layer of two_layers
    # also predict the class of each region, from the encoder's output or from the features of Fast R-CNN
    region_loss: Literal["contextual", "appearance", "none"] = "contextual"
    # with precomputed features: add the detected regions that match no object, after the objects
    detected_regions: bool = False
    copies_segment: bool = True  # copy segment A's embedding to B when starting from pre-training, which trains only A

    @property
    def files(self) -> tuple[str, ...]:
        return (*(f"{split}.jsonl" for split in (*self.train_on, self.validate_on)), "vcr1images")

    def lengths(self, text_rows: bool = False) -> dict[str, int]:
        return {"max_tokens": OTHER_TOKENS}

    def __post_init__(self):
        for name, least in (("mask_size", 1), ("classifier_width", 1), ("max_tokens", 2)):
            check(self, getattr(self, name) >= least, name, f"at least {least}")
        check(self, 0 <= self.masked_regions <= 1, "masked_regions", "in [0, 1]")
        if self.detected_regions and (self.region_loss != "none" or self.masked_regions):
            raise ValueError(
                "detected_regions have no object class; set --task.region_loss=none and --task.masked_regions=0"
            )


class VCR(Task):
    """The VCR task. Its regions are the annotated objects of an image. Texts mention these objects by number.

    Detected regions only provide precomputed features. An object gets the features of the region that overlaps it most.
    """

    joint_metrics = True

    @staticmethod
    def best_metric(settings: VCRSettings) -> str:
        return f"{settings.subtask}_accuracy"

    def examples(self, samples: Samples, split: str | None) -> Examples:
        settings = self.settings
        questions = read_questions(self.folder, settings.splits(split), split is None, settings.subtask)
        rows = [(question, question.name, question.item.image, question.invalid_reason) for question in questions]
        return make_examples(settings, samples, split, rows)

    def annotation_for(self, text: str, choices: Sequence[str] = (), answer: str = "") -> Question:
        """Make a Question from a user's text, four choices and, for rationales, the answer that they explain.

        Texts mention regions by number, from 1: "Why is [1] near [2,3]?" A mention becomes the word "object" and
        gets the region's visual feature embedding. Regions have no instance masks, so each is assumed to fill its box.
        """
        return user_question(self.settings.subtask, text, choices, answer)

    def example(self, sample: Sample, image: PreparedImage, annotation: Question, rng: np.random.Generator) -> Example:
        """Return an example with one text per choice. Choices and regions have labels if the right choice is known."""
        settings, question = self.settings, annotation
        scene, context, choices = question.read(sample)
        names = scene.names
        if settings.names == "neutral":
            # In evaluation all questions about an image use the same names, in every process and on every machine.
            image_file = question.item.image
            first = zlib.crc32(image_file.encode()) if question.held_out else int(rng.integers(len(PEOPLE)))
            names = neutral_names(names, first)
        tagged_context = [self.tagged(text, names, image.flipped) for text in context]
        tagged_choices = [self.tagged(choice, names, image.flipped) for choice in choices]
        if question.from_user:
            check_fits(tagged_context, tagged_choices, settings.max_tokens)
        rows = truncate(tagged_context, tagged_choices, settings.max_tokens, shared=settings.truncation == "shared")
        texts = [self.text_input(*row, right=number == question.label) for number, row in enumerate(rows)]
        boxes = scene.boxes * ([sample.width / scene.size[0], sample.height / scene.size[1]] * 2)  # in stored pixels
        regions = self._image_input(scene, boxes, image, None if question.held_out else rng)
        if question.label is None:
            texts, regions = [remove_labels(text) for text in texts], remove_labels(regions)
        columns = question.columns(scene, context, choices, boxes)
        return Example(sample.key, texts[0], regions, columns, more=tuple(texts[1:]))

    def tagged(self, text: Text, names: Sequence[str], flipped: bool = False) -> TaggedText:
        """Return a text's tokens, and the region whose visual feature embedding each token gets, as int64 [2, t]."""
        if flipped and self.settings.swap_left_right:
            text = [swap_sides(token) if isinstance(token, str) else token for token in text]
        tagged = tag(text, names, self.vocabulary)
        tagged[1] *= self.settings.mention_visual_embedding == "object"
        return tagged

    def text_input(self, question: TaggedText, choice: TaggedText, right: bool) -> TextInput:
        """Return the input [CLS] question [SEP] choice [SEP]. The label at [CLS] says whether the choice is `right`."""
        cls, sep = ([[token], [0]] for token in (self.vocabulary.cls, self.vocabulary.sep))
        tokens, token_region = np.concatenate([cls, question, sep, choice, sep], axis=1).astype(np.int64)
        segments = np.repeat([0, 1], [question.shape[1] + 2, choice.shape[1] + 1])
        label_masks, labels = {"choice": np.arange(len(tokens)) == 0}, {"right": np.array([right])}
        return TextInput(tokens, segments.astype(np.int64), token_region, label_masks, labels)

    def _image_input(
        self, scene: Scene, boxes: np.ndarray, image: PreparedImage, rng: np.random.Generator | None
    ) -> ImageInput:
        """Return the image with the regions `boxes` [r, 4], in stored pixels. If `rng` is None, no region is masked."""
        if image.features is None:
            image = replace(image, boxes=image.boxes[:1]).with_boxes(boxes)
        else:
            image = image.with_matched_features(boxes, self.settings.detected_regions)
        classes = np.zeros(len(image.boxes), np.int64)
        classes[1 : 1 + len(boxes)] = scene.classes
        more: dict[str, Any] = {"classes": classes}
        if self.settings.instance_masks:
            side = self.settings.mask_size
            masks = np.concatenate([np.ones((1, side, side), np.float32), scene.masks(side)])
            more["cells"] = np.ascontiguousarray(masks[:, :, ::-1]) if image.flipped else masks
        masked, share = np.zeros(len(image.boxes), bool), self.settings.masked_regions
        if share and rng is not None:
            masked[1:] = rng.random(len(boxes)) < share
        return image.to_input(masked, label_masks={"region_label_mask": masked if share else ~masked}, **more)

    def head(self, config: ModelConfig) -> nn.Module:
        regions, side = config.regions, self.settings.mask_size
        if regions.features == "precomputed" and (self.settings.instance_masks or self.settings.masked_regions):
            raise ValueError(
                "precomputed features have no cells to leave out and no pixels to mask; set --task.no_instance_masks "
                "--task.masked_regions=0, or --model.regions.features=end_to_end"
            )
        if regions.features == "end_to_end" and self.settings.detected_regions:
            raise ValueError("task.detected_regions needs precomputed features; set it to false")
        cells = regions.roi_size if regions.resnet.res5_dilated else (regions.roi_size + 1) // 2
        if self.settings.instance_masks and side != cells:
            raise ValueError(f"task.mask_size is {side}, but res5 has {cells} x {cells} cells; set it to {cells}")
        self.settings.fit(config)
        return VCRHead(config, self.settings)

    def pretrained_parts(self, head: nn.Module) -> dict[str, str]:
        parts = {"pooler": "pooler"} if self.settings.pooled else {}
        return parts | ({"region_transform": "region_transform"} if self.settings.region_loss == "contextual" else {})

    @torch.no_grad()
    def on_start(self, vlbert: VLBert, head: nn.Module, init_from: str | None) -> None:
        """If `copies_segment` is set, copy the embedding of segment A to B. Pre-training trains only A."""
        if self.settings.copies_segment and init_from == "PretrainingSettings":
            segments = vlbert.embedding.segments.weight
            segments[1] = segments[0]

    def logits(self, head: "VCRHead", encoded: Encoded, batch: Batch) -> Tensor:
        """Return the logits of the choices, float32 [questions, choices]."""
        return head.scores(encoded.text, encoded.regions).float().view(len(batch.keys), -1)

    def losses(self, vlbert: VLBert, head: "VCRHead", encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """Return the losses and the accuracy. Questions whose right choice is unknown are left out."""
        rows = batch.labelled["choice"] // batch.tokens.shape[1]
        logits = self.logits(head, encoded, batch).flatten().index_select(0, rows).view(-1, CHOICES)
        right = batch.labels["right"].view(-1, CHOICES)
        if self.settings.loss == "sigmoid":
            answers = F.binary_cross_entropy_with_logits(logits, right.float(), reduction="sum"), logits.numel()
        else:
            answers = F.cross_entropy(logits, right.int().argmax(1), reduction="sum"), len(logits)
        monitored = {"accuracy": accuracy(right.gather(1, logits.argmax(1, keepdim=True))[:, 0])}
        if self.settings.region_loss == "none":
            return {"answers": answers} | monitored
        index = batch.labelled["region_label_mask"]
        if self.settings.region_loss == "appearance":  # once per image, not once per choice
            labelled = torch.zeros_like(batch.region_mask).flatten().index_fill(0, index, True)
            labelled = batch.of_real_regions(labelled.view(batch.region_mask.shape))  # (K,)
            chosen = labelled.nonzero_static(size=len(index) // CHOICES)[:, 0]
            vectors = encoded.appearance.index_select(0, chosen)
            classes = batch.of_real_regions(batch.region_classes).index_select(0, chosen)
        else:
            vectors, classes = select(encoded.regions, index), select(batch.region_classes, index)
        regions = F.cross_entropy(head.classes(vectors).float(), classes, reduction="sum")
        return {"answers": answers, "regions": (regions, len(classes))} | monitored

    def predictions(self, vlbert: VLBert, head: "VCRHead", encoded: Encoded, batch: Batch) -> list[dict]:
        """Return one dict per question, including Question.columns and the `probabilities` of the four choices."""
        rows = []
        probabilities = self.logits(head, encoded, batch).double().softmax(1).tolist()
        for key, metadata, row in zip(batch.keys, batch.metadata, probabilities, strict=True):
            metadata = dict(metadata)
            choices, label = metadata.pop("choices"), metadata["label"]
            order = vcr.ranked(row)
            ranking = [{"answer": choices[i], "probability": row[i]} for i in order]
            scored = {"ground_truth": None, "score": None}
            if label is not None:
                scored = {"ground_truth": choices[label], "score": float(order[0] == label)}
            rows.append(metadata | {"key": key, "ranking": ranking, "probabilities": row} | ranking[0] | scored)
        return rows

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        return vcr.metrics(rows)

    def submission(self, rows: Sequence[dict]) -> dict[str, bytes]:
        return {"vcr_submission.csv": vcr.submission(self.folder, rows)}


class VCRHead(nn.Module):
    def __init__(self, config: ModelConfig, settings: VCRSettings):
        super().__init__()
        contextual = settings.region_loss == "contextual"
        self.pooler = Pooler(config) if settings.pooled else None
        region_size = config.regions_stream.hidden_size
        self.region_transform = HeadTransform(region_size, normed=False) if contextual else None
        inputs = config.regions.channels if settings.region_loss == "appearance" else region_size
        self.region_classifier = nn.Linear(inputs, CLASSES) if settings.region_loss != "none" else None
        initialise_head(self, config)
        pair_size = config.hidden_size if self.pooler is None else self.pooler.size
        has_dropout = self.pooler is not None and self.pooler.region_dense is not None
        dropout = 0.0 if has_dropout else config.dropout
        self.score = Classifier(config, 1, settings.classifier, dropout, settings.classifier_width, inputs=pair_size)

    def scores(self, text: Tensor, regions: Tensor) -> Tensor:
        """Return a score for each row, [N, 1]. `text` [N, T, C] and `regions` [N, R, C'] are the encoder's output."""
        return self.score(text[:, 0] if self.pooler is None else self.pooler(text, regions))

    def classes(self, regions: Tensor) -> Tensor:
        """Return the logits of object classes, [K, CLASSES], for region vectors [K, C']."""
        assert self.region_classifier is not None
        return self.region_classifier(regions if self.region_transform is None else self.region_transform(regions))
