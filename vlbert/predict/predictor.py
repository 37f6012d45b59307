"""A checkpoint and its detector in one process: from an image file to the model's prediction."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image

from detectors.detect import FasterRCNNDetector
from detectors.rebuild import detector_of_file, rebuild_detector
from storage.sample import Regions, Sample, check_sample
from vlbert.checkpoint import DETECTOR, find_checkpoint, open_checkpoint, read_config_at
from vlbert.config import Recipe
from vlbert.data.batch import Batch, collate
from vlbert.data.image_file import read_image
from vlbert.data.images import prepare_image
from vlbert.evaluation.evaluate import load_task_model
from vlbert.predict.prediction import Prediction, class_name
from vlbert.tasks.base import user_annotation


class Predictor:
    """A checkpoint and its detector, loaded once:

        predictor = Predictor("demo-root/runs/pretrain")
        print(predictor("photo.jpg", "a red [MASK]").answer)

    detector: a weight file, where that of the training is not found. changes: dotted fields of the checkpoint's recipe
    with their new values, such as {"task.folder": "vqa"}. recipe: the checkpoint's, for a task that this package does
    not know. ValueError where the checkpoint cannot be loaded.
    """

    def __init__(
        self,
        checkpoint: str,
        detector: str | Path | None = None,
        changes: Mapping[str, Any] = MappingProxyType({}),
        recipe: Recipe | None = None,
    ):
        self.checkpoint = open_checkpoint(str(checkpoint))
        self.model, self.recipe = load_task_model(self.checkpoint, changes, recipe)
        self.task = self.model.task
        self._detector_file = detector

    @functools.cached_property
    def detector(self) -> FasterRCNNDetector:
        """The detector whose regions the checkpoint was trained on, rebuilt from its description."""
        beside = Path(self.checkpoint.folder.uri_of(DETECTOR))
        file = self._detector_file or (beside if beside.is_file() else None)
        return detector_of(self.checkpoint.config, self.checkpoint.uri, file)

    def detect(self, image: str | Path | bytes | Image.Image) -> Sample:
        """Return the sample of an image, as it would be stored, with its regions."""
        return with_regions(read_image(image), self.detector)

    def __call__(
        self,
        image: str | Path | bytes | Image.Image | Sample,
        text: str | None = None,
        choices: Sequence[str] = (),
        answer: str = "",
        mask_regions: Sequence[int] = (),
        attentions: bool = False,
    ) -> Prediction:
        """Return the model's prediction for a text about an image, or about a sample that `detect` returned.

        choices, answer and mask_regions are for the tasks that take them. Without a text and regions to mask, the
        prediction has the regions alone. ValueError where the image cannot be read, or the task does not take these
        arguments.
        """
        if text is None and (choices or answer):
            raise ValueError("choices and answers belong to a question; give a text")
        if text is not None and not text.strip() and not mask_regions:
            raise ValueError("the text is empty; write one, or leave it out to see the regions")
        regions_alone = text is None and not mask_regions
        more = {"choices": choices, "answer": answer, "mask_regions": mask_regions}
        annotation = None if regions_alone else user_annotation(self.task, text or "", **more)
        sample = image if isinstance(image, Sample) else self.detect(image)
        assert sample.regions is not None  # `detect` gives a sample that has some
        classes = self.detector.metadata.get("classes")
        names = region_names(sample.regions, classes)
        if regions_alone:
            return Prediction(sample, names)
        batch = self.batch_of(sample, annotation)
        with torch.inference_mode():
            encoded = self.model.vlbert(batch, attentions=attentions)
            (row,) = self.task.predictions(self.model.vlbert, self.model.head, encoded, batch)
        words = self.task.vocabulary.tokens
        tokens = [
            [words[token] for token in row[:count].tolist()]
            for row, count in zip(batch.tokens, batch.sizes.tokens, strict=True)
        ]
        return Prediction(sample, names, with_class_names(row, names, classes), batch, tokens, encoded)

    def batch_of(self, sample: Sample, annotation: Any) -> Batch:
        """Return the batch of one example: a sample with regions, and what `task.annotation_for` made of a text."""
        prepared = prepare_image(sample, self.recipe.model.regions, flip=False)
        return collate([self.task.example(sample, prepared, annotation, np.random.default_rng(0))])


# --- the detector -----------------------------------------------------------------------------------------------------


def detector_of(config: dict, where: str, file: str | Path | None) -> FasterRCNNDetector:
    """Return the detector whose regions a model was trained on or, where it names none, the network of `file`.

    config: the model's config.json. where: the model, for errors. file: the detector's weights; None: those that the
    model's Fast R-CNN started from, if they are the same.
    """
    recorded = config.get("detector") or {}
    metadata = recorded.get("metadata") or {}
    if "network" in metadata:
        return rebuild_detector(recorded, file or detector_weights_of(config), where)
    why = f"its regions came from {metadata['backend']} boxes" if metadata else "it carries no detector's description"
    if file is None:
        raise ValueError(f"{where} finds no regions by itself: {why}; name a detector: --detector FILE")
    warnings.warn(f"{where}: {why}; those of {file} may be of another kind", stacklevel=2)
    return detector_of_file(file, keep_features=config["model"]["regions"]["features"] == "precomputed")


def detector_weights_of(config: dict) -> str | None:
    """The weight file that a model's Fast R-CNN started from, directly or through earlier runs."""
    weights, before = config["model"]["regions"]["weights"], config.get("recipe", {}).get("init_from")
    if weights or not before:
        return weights
    try:
        return detector_weights_of(read_config_at(*find_checkpoint(before)))
    except (ValueError, OSError):  # that run is gone
        return None


def with_regions(sample: Sample, detector: FasterRCNNDetector) -> Sample:
    """The sample with the regions that the detector finds; ValueError where it finds none."""
    (regions,) = detector.detect([sample])
    if isinstance(regions, str):
        raise ValueError(f"{sample.url}: the detector finds no regions: {regions}")
    sample = replace(sample, regions=regions)
    check_sample(sample)
    return sample


# --- names ------------------------------------------------------------------------------------------------------------


def region_names(regions: Regions, classes: Sequence[str] | None) -> list[str]:
    """Number, from 1, and class of each region."""
    labels = (regions.labels_background_first() - 1).tolist()
    return [f"{number} {classes[label]}" if classes else str(number) for number, label in enumerate(labels, 1)]


def with_class_names(row: dict, names: Sequence[str], classes: Sequence[str] | None) -> dict:
    """A row with the detector's class names for its regions: those that it ranks or draws (`region`, from 1) and those
    that pre-training masked, whose class is a number, background first."""
    numbers = {one["answer"]: one["region"] for one in row["ranking"] if one.get("region")}
    name_of = {answer: names[number - 1] for answer, number in numbers.items()} if classes else {}
    boxes = [{"region": numbers.get(box["name"], 0)} | box for box in row["boxes"]]
    row = row | {
        "answer": name_of.get(row["answer"], row["answer"]),
        "ranking": [one | {"answer": name_of.get(one["answer"], one["answer"])} for one in row["ranking"]],
        "boxes": [box | {"name": name_of.get(box["name"], box["name"])} for box in boxes],
    }
    if "masked_regions" not in row:
        return row

    masked = [
        region
        | {
            "detected_name": class_name(region["detected"], classes),
            "guesses": [guess | {"answer": class_name(guess["class"], classes)} for guess in region["guesses"]],
        }
        for region in row["masked_regions"]
    ]
    boxes = [
        box | {"name": f"{region['region']}: {region['guesses'][0]['answer']}?"}
        for box, region in zip(row["boxes"], masked, strict=True)
    ]
    answer = row["answer"] if row["masks"] or not masked else masked[0]["guesses"][0]["answer"]
    return row | {"answer": answer, "masked_regions": masked, "boxes": boxes}
