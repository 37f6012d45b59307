"""Predictions for your own images. A checkpoint's model and its detector run in one process."""

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
from storage.safe_json import printable
from storage.sample import Regions, Sample, check_sample
from vlbert.checkpoint import DETECTOR, open_checkpoint
from vlbert.config import Recipe
from vlbert.data.batch import Batch, collate
from vlbert.data.image_file import read_image
from vlbert.data.images import prepare_image
from vlbert.evaluation.evaluate import load_task_model
from vlbert.predict.prediction import Prediction, class_name
from vlbert.tasks.base import user_annotation


class Predictor:
    """A predictor for single images. It loads a checkpoint's model and its detector only once.

        predictor = Predictor("demo-root/runs/pretrain")
        print(predictor("photo.jpg", "a red [MASK]").answer)

    Reads the checkpoint's folder and nothing else. Raises ValueError if the checkpoint cannot be loaded.

    Args:
        detector: The detector's weight file, if it is not in the checkpoint's folder as detector.safetensors.
        changes: New values for fields of the checkpoint's recipe, such as {"task.folder": "vqa"}.
        recipe: The checkpoint's recipe, needed only for a task that this package does not have.
    """

    def __init__(
        self,
        checkpoint: str,
        detector: str | Path | None = None,
        changes: Mapping[str, Any] = MappingProxyType({}),
        recipe: Recipe | None = None,
    ):
        self.checkpoint = open_checkpoint(str(checkpoint))
        if "folder" in (self.checkpoint.task_settings or {}):  # that of the machine of the training
            changes = {"task.folder": "", **changes}
        self.model, self.recipe = load_task_model(self.checkpoint, changes, recipe)
        self.task = self.model.task
        self._detector_file = detector

    @functools.cached_property
    def detector(self) -> FasterRCNNDetector:
        """The detector whose regions the model was trained on, rebuilt from its description in the checkpoint."""
        saved = Path(self.checkpoint.folder.uri_of(DETECTOR))
        file = self._detector_file or (saved if saved.is_file() else None)
        return load_detector(self.checkpoint.config, self.checkpoint.uri, file)

    def detect(self, image: str | Path | bytes | Image.Image) -> Sample:
        """Find the regions of an image. Returns a sample with the image as datasets store it, and its regions."""
        return detect_regions(read_image(image), self.detector)

    def __call__(
        self,
        image: str | Path | bytes | Image.Image | Sample,
        text: str | None = None,
        choices: Sequence[str] = (),
        answer: str = "",
        mask_regions: Sequence[int] = (),
        attentions: bool = False,
    ) -> Prediction:
        """Return the model's prediction for a text about an image. `image` may also be a sample that `detect` returned.

        The task determines whether `choices`, `answer` and `mask_regions` may be given. If neither a text nor
        `mask_regions` is given, the prediction has only the regions. Raises ValueError if the image cannot be read, or
        if an argument is given that the task does not take.
        """
        if text is None and (choices or answer):
            raise ValueError("choices and answers belong to a question; give a text")
        if text is not None and not text.strip() and not mask_regions:
            raise ValueError("the text is empty; write one, or leave it out to see the regions")
        only_regions = text is None and not mask_regions
        more = {"choices": choices, "answer": answer, "mask_regions": mask_regions}
        annotation = None if only_regions else user_annotation(self.task, text or "", **more)
        sample = image if isinstance(image, Sample) else self.detect(image)
        classes = self.detector.metadata.get("classes")
        names = name_regions(sample.require_regions(), classes)
        if only_regions:
            return Prediction(sample, names)
        batch = self.make_batch(sample, annotation)
        with torch.inference_mode():
            encoded = self.model.vlbert(batch, attentions=attentions)
            (row,) = self.task.predictions(self.model.vlbert, self.model.head, encoded, batch)
        words = self.task.vocabulary.tokens
        tokens = [
            [words[token] for token in row[:count].tolist()]
            for row, count in zip(batch.tokens, batch.sizes.tokens, strict=True)
        ]
        return Prediction(sample, names, add_class_names(row, names, classes), batch, tokens, encoded)

    def make_batch(self, sample: Sample, annotation: Any) -> Batch:
        """Make a batch of one example from a sample with regions and an annotation of the model's task."""
        prepared = prepare_image(sample, self.recipe.model.regions, flip=False)
        return collate([self.task.example(sample, prepared, annotation, np.random.default_rng(0))])


# --- the detector -----------------------------------------------------------------------------------------------------


def load_detector(config: dict, source: str, file: str | Path | None) -> FasterRCNNDetector:
    """Load the detector whose regions a model was trained on. If config.json does not describe it, load `file`.

    Args:
        config: The model's config.json.
        source: The model's name in error messages.
        file: The detector's weight file; None for a detector with random weights.
    """
    recorded = config.get("detector") or {}
    metadata = recorded.get("metadata") or {}
    if "network" in metadata:
        return rebuild_detector(recorded, file, source)
    kind = printable(metadata.get("backend"))
    reason = f"its regions came from {kind} boxes" if metadata else "it has no description of a detector"
    if file is None:
        raise ValueError(f"{source} cannot find regions: {reason}; name a detector: --detector FILE")
    warnings.warn(f"{source}: {reason}; the regions of {file} may be of another kind", stacklevel=2)
    return detector_of_file(file, keep_features=config["model"].get("regions", {}).get("features") == "precomputed")


def detect_regions(sample: Sample, detector: FasterRCNNDetector) -> Sample:
    """Return the sample with the regions that the detector finds. Raises ValueError if it finds none."""
    (regions,) = detector.detect([sample])
    if isinstance(regions, str):
        raise ValueError(f"{sample.url}: the detector finds no regions: {regions}")
    sample = replace(sample, regions=regions)
    check_sample(sample)
    return sample


# --- names ------------------------------------------------------------------------------------------------------------


def name_regions(regions: Regions, classes: Sequence[str] | None) -> list[str]:
    """Name each region by its number, counted from 1, and by its class if `classes` has class names."""
    labels = (regions.labels_background_first() - 1).tolist()
    return [f"{number} {classes[label]}" if classes else str(number) for number, label in enumerate(labels, 1)]


def add_class_names(row: dict, names: Sequence[str], classes: Sequence[str] | None) -> dict:
    """Return a task's prediction `row` with class names added to its ranking, boxes and masked regions."""
    numbers = {entry["answer"]: entry["region"] for entry in row["ranking"] if entry.get("region")}
    name_of = {answer: names[number - 1] for answer, number in numbers.items()} if classes else {}
    boxes = [{"region": numbers.get(box["name"], 0)} | box for box in row["boxes"]]
    row = row | {
        "answer": name_of.get(row["answer"], row["answer"]),
        "ranking": [entry | {"answer": name_of.get(entry["answer"], entry["answer"])} for entry in row["ranking"]],
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
