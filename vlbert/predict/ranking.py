"""Rank a person's own images by how well they fit a text, or captions by how well they fit an image."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from storage.sample import Sample
from storage.settings import from_json
from vlbert.checkpoint import CONFIG, find_checkpoint, read_config_at
from vlbert.config import ModelConfig, Recipe
from vlbert.predict.predictor import Predictor
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.retrieval import OTHER_TOKENS, HeldOutImage, Retrieval, RetrievalSettings

Ranking = list[tuple[str, float]]  # what is ranked, and the probability that it fits; the likeliest first


class Ranker(Predictor):
    """A predictor that ranks, of a checkpoint of retrieval or of a pre-training with the relationship head:

        ranker = Ranker("vl-root/runs/finetune_retrieval_base")
        ranker.images("photos", "a red circle")                 # [("IMG_3.jpg", 0.91), ...]
        ranker.captions("photo.jpg", ["a red circle", "a blue star"])

    ValueError for other checkpoints.
    """

    def __init__(
        self, checkpoint: str, detector: str | Path | None = None, changes: Mapping[str, Any] = MappingProxyType({})
    ):
        recipe = ranking_recipe(read_config_at(*find_checkpoint(str(checkpoint))))
        super().__init__(checkpoint, detector, changes, recipe)
        if not isinstance(self.task, Retrieval):
            raise ValueError(
                f"the checkpoint is one of {type(self.recipe.task).__name__}; to rank images or captions, name one of "
                "retrieval, or of a pre-training with the relationship head"
            )

    def images(self, folder: str | Path, text: str) -> Ranking:
        """Return the names of the images of a folder, not of those below it, by how well they fit the text.

        A warning says why a file was passed over. OSError where there is no folder, ValueError where none of its files
        can be ranked.
        """
        found, annotation = [], self._candidates([text])
        for file in sorted(file for file in Path(folder).iterdir() if file.is_file() and file.name[0] != "."):
            try:
                found.append((file.name, float(self._probabilities(self.detect(file), annotation)[0])))
            except ValueError as error:
                warnings.warn(f"skipped: {error}", stacklevel=2)
        if not found:
            raise ValueError(f"{folder} holds no image that can be ranked")
        return sorted(found, key=lambda one: -one[1])

    def captions(self, image: str | Path | bytes | Sample, captions: Sequence[str]) -> Ranking:
        """Captions by how well they fit an image, or a sample that `detect` returned. ValueError where the image cannot
        be read or a caption has no words."""
        annotation = self._candidates(captions)
        sample = image if isinstance(image, Sample) else self.detect(image)
        found = zip(captions, self._probabilities(sample, annotation).tolist(), strict=True)
        return sorted(found, key=lambda one: -one[1])

    def _candidates(self, texts: Sequence[str]) -> HeldOutImage:
        assert isinstance(self.task, Retrieval)
        for text in texts:
            self.task.annotation_for(text)  # refuses one without words
        return self.task.with_candidates([HeldOutImage("", tuple(texts))])[0]

    def _probabilities(self, sample: Sample, annotation: HeldOutImage) -> np.ndarray:
        """float64 [texts]."""
        with torch.inference_mode():
            (row,) = self.model.predict(self.batch_of(sample, annotation))
        return 1 / (1 + np.exp(-row["scores"].astype(np.float64)))


def ranking_recipe(config: Mapping[str, Any]) -> Recipe | None:
    """The recipe of retrieval for a pre-trained model, given config.json of the checkpoint: it reads texts and regions
    as in the pre-training. None for a checkpoint of another task."""
    if config.get("task") != PretrainingSettings.__name__:
        return None
    settings = config["settings"] if "settings" in config else config["recipe"]["task"]
    model = from_json(ModelConfig, config["model"], CONFIG)
    length = min(settings["caption_length"], model.max_positions - OTHER_TOKENS)
    task = RetrievalSettings(caption_length=length, max_regions=settings["max_regions"])
    return Recipe(name="retrieval", task=task, model=model)
