"""Rank your own images by how well they fit a text, or captions by how well they fit an image."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from storage.sample import Sample
from storage.settings import from_json
from vlbert.checkpoint import CONFIG, Checkpoint, open_checkpoint
from vlbert.config import Recipe
from vlbert.data.batch import collate
from vlbert.predict.predictor import Predictor
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.retrieval import OTHER_TOKENS, HeldOutImage, Retrieval, RetrievalSettings

Ranking = list[tuple[str, float]]  # image or caption, and the probability that it fits; the most likely first


class Ranker(Predictor):
    """A predictor that ranks images or captions.

        ranker = Ranker("vl-root/runs/finetune_retrieval_base")
        ranker.images("photos", "a red circle")                 # [("IMG_3.jpg", 0.91), ...]
        ranker.captions("photo.jpg", ["a red circle", "a blue star"])

    Raises ValueError unless the checkpoint is for retrieval, or for pre-training with the relationship head.
    """

    def __init__(
        self,
        checkpoint: str,
        detector: str | Path | None = None,
        changes: Mapping[str, Any] = MappingProxyType({}),
        device: str | torch.device = "cpu",
    ):
        recipe = ranking_recipe(open_checkpoint(str(checkpoint), tensors=False))
        super().__init__(checkpoint, detector, changes, recipe, device)
        if not isinstance(self.task, Retrieval):
            raise ValueError(
                f"the checkpoint is one of {type(self.recipe.task).__name__}; to rank images or captions, give one of "
                "retrieval, or of pre-training with the relationship head"
            )

    def images(self, folder: str | Path, text: str) -> Ranking:
        """Rank the image files of a folder by how well they fit the text. Returns their names and probabilities.

        Subfolders are ignored. A file that cannot be ranked is skipped with a warning. Raises OSError if there is no
        such folder, and ValueError if none of its files can be ranked.
        """
        ranking, annotation = [], self._make_annotation([text])
        for file in sorted(file for file in Path(folder).iterdir() if file.is_file() and file.name[0] != "."):
            try:
                ranking.append((file.name, float(self._predict_fit(self.detect(file), annotation)[0])))
            except ValueError as error:
                warnings.warn(f"skipped: {error}", stacklevel=2)
        if not ranking:
            raise ValueError(f"{folder} holds no image that can be ranked")
        return sorted(ranking, key=lambda pair: -pair[1])

    def captions(self, image: str | Path | bytes | Sample, captions: Sequence[str]) -> Ranking:
        """Rank captions by how well they fit an image. Returns the captions and their probabilities.

        `image` may also be a sample that `detect` returned. Raises ValueError if the image cannot be read or a caption
        has no words.
        """
        annotation = self._make_annotation(captions)
        sample = image if isinstance(image, Sample) else self.detect(image)
        ranking = zip(captions, self._predict_fit(sample, annotation).tolist(), strict=True)
        return sorted(ranking, key=lambda pair: -pair[1])

    def _make_annotation(self, texts: Sequence[str]) -> HeldOutImage:
        assert isinstance(self.task, Retrieval)
        for text in texts:
            self.task.annotation_for(text)  # raises ValueError for a text without words
        return self.task.with_candidates([HeldOutImage("", tuple(texts))])[0]

    def _predict_fit(self, sample: Sample, annotation: HeldOutImage) -> np.ndarray:
        """Return the probability that each text fits the image, float64 [texts]."""
        with torch.inference_mode():
            (row,) = self.model.predict(collate([self.make_example(sample, annotation)]).to(self.device))
        return 1 / (1 + np.exp(-np.frombuffer(row["scores"], np.float32).astype(np.float64)))


def ranking_recipe(checkpoint: Checkpoint) -> Recipe | None:
    """Make a recipe for retrieval from a pre-trained model. Returns None for models of other tasks.

    The recipe limits the length of captions and the number of regions as in pre-training.
    """
    if checkpoint.config.get("task") != PretrainingSettings.__name__:
        return None
    model = checkpoint.model_config
    settings = from_json(PretrainingSettings, checkpoint.task_settings, checkpoint.folder.uri_of(CONFIG))
    length = min(settings.caption_length, model.max_positions - OTHER_TOKENS)
    task = RetrievalSettings(caption_length=length, max_regions=settings.max_regions)
    return Recipe(name="retrieval", task=task, model=model)
