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

from detectors.detect import FasterRCNNDetector
from detectors.rebuild import detector_of_file, rebuild_detector
from storage.safe_json import printable
from storage.sample import Regions, Sample, check_sample
from vlbert.checkpoint import DETECTOR, open_checkpoint
from vlbert.config import Recipe
from vlbert.data.batch import Example, collate
from vlbert.data.image_file import AnyImage, read_image
from vlbert.data.images import prepare_image
from vlbert.evaluation.evaluate import load_task_model
from vlbert.predict.prediction import Prediction, class_name
from vlbert.tasks.base import user_annotation

_DRAWN = {"circle", "cross", "ring", "square", "star", "triangle"}  # shapes of the demo's detector


class Predictor:
    """A predictor for images of your own. It loads a checkpoint's model and its detector only once.

        predictor = Predictor("demo-root/runs/pretrain")
        print(predictor("photo.jpg", "a red [MASK]").answer)
        answers = [found.answer for found in predictor(["a.jpg", "b.jpg"], "a red [MASK]")]

    Reads the checkpoint's folder and nothing else. Raises ValueError if the checkpoint cannot be loaded.

    Args:
        detector: The detector's weight file, if it is not in the checkpoint's folder as detector.safetensors.
        changes: New values for fields of the checkpoint's recipe, such as {"task.folder": "vqa"}.
        recipe: The checkpoint's recipe, needed only for a task that this package does not have.
        device: Device of model and detector, such as "cuda".
    """

    def __init__(
        self,
        checkpoint: str,
        detector: str | Path | None = None,
        changes: Mapping[str, Any] = MappingProxyType({}),
        recipe: Recipe | None = None,
        device: str | torch.device = "cpu",
    ):
        self.device = torch.device(device)
        self.checkpoint = open_checkpoint(str(checkpoint))
        if "folder" in (self.checkpoint.task_settings or {}):  # that of the machine of the training
            changes = {"task.folder": "", **changes}
        self.model, self.recipe = load_task_model(self.checkpoint, changes, recipe)
        self.model.to(self.device)
        self.task = self.model.task
        self._detector_file = detector

    @functools.cached_property
    def detector(self) -> FasterRCNNDetector:
        """The detector whose regions the model was trained on, rebuilt from its description in the checkpoint.

        Warns if it knows only the shapes that `make demo` draws.
        """
        saved = Path(self.checkpoint.folder.uri_of(DETECTOR))
        file = self._detector_file or (saved if saved.is_file() else None)
        detector = load_detector(self.checkpoint.config, self.checkpoint.uri, file)
        detector.settings = replace(detector.settings, device=str(self.device))  # its id stays that of the training
        detector.network.to(self.device)
        classes = detector.metadata.get("classes") or ["others"]
        if all(name.split()[-1] in _DRAWN for name in classes):
            warnings.warn(
                f"the detector of {self.checkpoint.uri} knows drawn shapes only, such as a {classes[0]}", stacklevel=3
            )
        return detector

    def detect(self, image: AnyImage) -> Sample:
        """Find the regions of an image. Returns a sample with the image as datasets store it, and its regions."""
        return detect_regions(read_image(image), self.detector)

    def __call__(
        self,
        image: AnyImage | Sample | Sequence[AnyImage | Sample],
        text: str | Sequence[str] | None = None,
        choices: Sequence[str] = (),
        answer: str = "",
        mask_regions: Sequence[int] = (),
        attentions: bool = False,
        batch_size: int = 8,
    ) -> Any:
        """Return the model's prediction for a text about an image. `image` may also be a sample that `detect` returned.

        With a list of images, of texts or of both, a list of predictions is returned, without `encoded`. The other
        arguments are then those of each. `batch_size` of them are predicted together.

        The task determines whether `choices`, `answer` and `mask_regions` may be given. If neither a text nor
        `mask_regions` is given, the prediction has only the regions. Raises ValueError if an image cannot be read, or
        if an argument is given that the task does not take.
        """
        more = {"choices": choices, "answer": answer, "mask_regions": mask_regions}
        asked: list[Any] = [image, text]
        several = [[*one] for one in asked if isinstance(one, list | tuple)]
        count = len(several[0]) if several else 1
        if len(several) == 2 and len(several[1]) != count:
            raise ValueError(f"there are {count} images and {len(several[1])} texts; each image needs one")
        if several and attentions:
            raise ValueError("attentions are returned for one image and one text; call the predictor for each")
        if several and not isinstance(image, list | tuple | Sample):
            asked[0] = self.detect(asked[0])  # once for all texts
        images, texts = ([*one] if isinstance(one, list | tuple) else [one] * count for one in asked)
        annotations, found = [self._annotate(one, **more) for one in texts], []
        if annotations.count(None) not in (0, count):
            raise ValueError("a text of the list is None; write one for each image, or none at all")
        for start in range(0, count, batch_size):
            part = slice(start, start + batch_size)
            found += self._predict(images[part], annotations[part], attentions)
        return found if several else found[0]

    def _annotate(self, text: str | None, **more: Any) -> Any:
        """Return the task's annotation for a text, or None if only regions are asked for."""
        if text is None and (more["choices"] or more["answer"]):
            raise ValueError("choices and answers belong to a question; give a text")
        if text is not None and not text.strip() and not more["mask_regions"]:
            raise ValueError("the text is empty; write one, or leave it out to see the regions")
        if text is None and not more["mask_regions"]:
            return None
        return user_annotation(self.task, text or "", **more)

    def _predict(
        self, images: Sequence[AnyImage | Sample], annotations: Sequence[Any], attentions: bool = False
    ) -> list[Prediction]:
        samples = [image if isinstance(image, Sample) else self.detect(image) for image in images]
        classes = self.detector.metadata.get("classes")
        names = [name_regions(sample.require_regions(), classes) for sample in samples]
        if annotations[0] is None:
            return [Prediction(*pair) for pair in zip(samples, names, strict=True)]
        examples = [self.make_example(*pair) for pair in zip(samples, annotations, strict=True)]
        with torch.inference_mode():
            batch = collate(examples).to(self.device)
            encoded = self.model.vlbert(batch, attentions=attentions)
            rows = self.task.predictions(self.model.vlbert, self.model.head, encoded, batch)
        words, predictions = self.task.vocabulary.tokens, []
        for sample, named, example, row in zip(samples, names, examples, rows, strict=True):
            tokens = [[words[token] for token in text.tokens.tolist()] for text in example.texts]
            own = (batch, tokens, encoded) if len(examples) == 1 else (collate([example]), tokens)
            predictions.append(Prediction(sample, named, add_class_names(row, named, classes), *own))
        return predictions

    def make_example(self, sample: Sample, annotation: Any) -> Example:
        """Make an example from a sample with regions and an annotation of the model's task."""
        prepared = prepare_image(sample, self.recipe.model.regions, flip=False)
        return self.task.example(sample, prepared, annotation, np.random.default_rng(0))


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
        raise ValueError(f"{source} cannot find regions: {reason}; name a detector: detector=FILE (--detector FILE)")
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
