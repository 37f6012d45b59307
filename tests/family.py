"""Every task and every architecture, in a small size, and the examples of the tasks' files."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from refcoco_files import WORDS as REFCOCO_WORDS
from refcoco_files import write_refcoco
from retrieval_files import write_retrieval
from tiny import CHANNELS, CLASSES, TINY_MODEL, UNICODER_VL, VILBERT, tiny_sample, urls
from vcr_files import WORDS as VCR_WORDS
from vcr_files import write_vcr
from vqa_files import ANNOTATORS, ANSWERS, ROOM, coco, write_vqa
from vqa_files import WORDS as VQA_WORDS

from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import Example
from vlbert.data.images import prepare_image
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import Task, TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
from vlbert.tasks.retrieval import Retrieval, RetrievalSettings
from vlbert.tasks.vcr import VCR, VCRSettings
from vlbert.tasks.vqa import VQA, VQASettings

VLBERT = dataclasses.replace(
    TINY_MODEL, dropout=0.0, regions=dataclasses.replace(TINY_MODEL.regions, features="precomputed", random_init=False)
)
END_TO_END = dataclasses.replace(VILBERT, regions=TINY_MODEL.regions, whole_image="pooled")
MODELS = {"vlbert": VLBERT, "unicoder-vl": UNICODER_VL, "vilbert": VILBERT, "vilbert end to end": END_TO_END}


def with_features(sample: Sample) -> Sample:
    features = np.random.default_rng(len(sample.caption)).normal(size=(len(sample.regions), CHANNELS))
    regions = dataclasses.replace(sample.regions, features=features.astype(np.float16))
    return dataclasses.replace(sample, regions=regions)


SAMPLES = [with_features(tiny_sample(number, regions=1 + (1 + number) % 3)) for number in range(4)]
CAPTION_WORDS = Vocabulary([*SPECIALS, *sorted({word for one in SAMPLES for word in one.caption.split()})])


def pretraining(folder: Path, **changes: object) -> tuple[Task, list[Sample]]:
    words, regions = WordMasking(probability=0.5), RegionMasking(probability=0.7)
    settings = PretrainingSettings(words=words, regions=regions, relationship=True)
    return Pretraining(dataclasses.replace(settings, **changes), CAPTION_WORDS, len(CLASSES)), SAMPLES


def vqa(folder: Path, **changes: object) -> tuple[Task, list[Sample]]:
    samples = coco(SAMPLES, "train2014")
    write_vqa(folder, "train2014", ANNOTATORS)
    (folder / "answers.txt").write_text("\n".join(ANSWERS))
    settings = VQASettings(
        str(folder),
        answer_list="answers.txt",
        answers=len(ANSWERS),
        question_length=ROOM,
        reads="pair",
        classifier="weight_norm",
        classifier_dropout=0.5,
        answers_from_words=False,
    )
    return VQA(dataclasses.replace(settings, **changes), VQA_WORDS, len(CLASSES)), samples


def vcr(folder: Path, **changes: object) -> tuple[Task, list[Sample]]:
    write_vcr(folder, SAMPLES)
    settings = VCRSettings(
        str(folder), max_tokens=40, instance_masks=False, loss="softmax", region_loss="contextual", copies_segment=False
    )
    return VCR(dataclasses.replace(settings, **changes), VCR_WORDS, len(CLASSES)), SAMPLES


def refcoco(folder: Path, **changes: object) -> tuple[Task, list[Sample]]:
    write_refcoco(folder, SAMPLES)
    settings = RefCOCOSettings(str(folder), regions="detected", target="iou", loss_over="rows", classifier="linear")
    return RefCOCO(dataclasses.replace(settings, **changes), REFCOCO_WORDS, len(CLASSES)), SAMPLES


def retrieval(folder: Path, **changes: object) -> tuple[Task, list[Sample]]:
    write_retrieval(folder, SAMPLES, test=1)
    settings = RetrievalSettings(str(folder), caption_length=20)
    return Retrieval(dataclasses.replace(settings, **changes), CAPTION_WORDS, len(CLASSES)), SAMPLES


TASKS = {"pre-training": pretraining, "vqa": vqa, "vcr": vcr, "refcoco+": refcoco}


def changed(task: Task, **settings: object) -> Any:
    return type(task)(dataclasses.replace(task.settings, **settings), task.vocabulary, task.num_classes)


def examples_of(
    task: Task,
    samples: list[Sample],
    config: ModelConfig = TINY_MODEL,
    split: str | None = None,
    seed: int | None = None,
    flip: bool = False,
) -> list[Example]:
    """The examples of a split; None: of training. Without a seed each sample has its own."""
    found = task.examples(urls(samples) if task.settings.folder else samples, split)
    notes = found.annotations or [None] * len(found)

    def made(number: int, note: Any) -> Example:
        rng = np.random.default_rng(number if seed is None else seed)
        return task.example(samples[number], prepare_image(samples[number], config.regions, flip), note, rng)

    return [made(*one) for one in zip(found.samples, notes, strict=True)]


def new_model(task: Task, config: ModelConfig = TINY_MODEL) -> TaskModel:
    torch.manual_seed(0)
    return TaskModel(VLBert(config, len(task.vocabulary)), task)
