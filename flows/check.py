"""Check what takes the world, before anything is downloaded: names, files, and what stages take from each other.

What a setting, a recipe or an override may be is checked where it is made; here they are only made.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from detectors.config import DetectionConfig
from detectors.run import identify
from flows import finetune, pretrain
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.torchrun import check_overrides
from storage.collect.plan import find_columns, image_files
from storage.settings import differing_fields, named_fields, override_values
from vlbert.config import Recipe, architecture
from vlbert.data.loading import check_shares
from vlbert.initial_weights import check_complete
from vlbert.tasks.pretraining import PretrainingSettings


def check(datasets: Sequence[Dataset], pretraining: PretrainSettings, finetunings: Sequence[FinetuneSettings]) -> None:
    """Check a whole pipeline. Imports torch. Raises ValueError with the setting, what is wrong and a way out."""
    _check_unique([dataset.name for dataset in datasets], "datasets", "name")
    for dataset in datasets:
        _check_sources(dataset)
    detectors = {dataset.name: dataset.detector for dataset in datasets}
    first = _check_pretraining(pretraining, detectors)
    recipes = [_check_finetuning(f"finetunings[{n}]", one, detectors) for n, one in enumerate(finetunings)]
    for number, (settings, recipe) in enumerate(zip(finetunings, recipes, strict=True)):
        # The architecture and words of another run, or root, are known when it is read.
        if "/runs/" not in settings.checkpoint and not settings.pretraining:
            _check_goes_on(f"finetunings[{number}]", settings, recipe, pretraining, first)
    _check_unique([recipe.run for recipe in (first, *recipes)], "runs", "run")


def _check_unique(names: Sequence[str], what: str, setting: str) -> None:
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise ValueError(f"two {what} are named {twice}; give each a {setting} of its own")


def _check_sources(dataset: Dataset) -> None:
    where, detector = f"dataset {dataset.name}", dataset.detector
    _check_there(f"{where}: captions", dataset.captions)
    _check_there(f"{where}: images", dataset.images)
    _check_there(f"{where}: detector.annotations", detector.annotations)
    _check_there(f"{where}: detector.weights", detector.weights)
    _check_there(f"{where}: detector.imported.files", *detector.imported.files)
    if dataset.images and not dataset.captions and not image_files(dataset.images):
        raise ValueError(f"{where}: images: {dataset.images} holds no image file; folders below it are not read")
    try:
        find_columns(dataset)
        identify(detector)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_pretraining(settings: PretrainSettings, detectors: dict[str, DetectionConfig]) -> Recipe:
    _check_there("pretraining.text", *settings.text)
    _check_there("pretraining.vocabulary_captions", *settings.vocabulary_captions)
    _check_there("pretraining.vocabulary", settings.vocabulary)
    check_overrides(settings.overrides, pretrain.SETTINGS)
    fields = {"data.datasets": settings.datasets, "data.held_out": settings.held_out or None}
    recipe = _recipe("pretraining", settings, fields)
    if not isinstance(recipe.task, PretrainingSettings):
        raise ValueError(f"pretraining.recipe {settings.recipe} is no pre-training")
    if recipe.bert and settings.text and settings.vocabulary is None:
        raise ValueError(
            f"pretraining: the weights of {recipe.bert} in recipe {recipe.name} need BERT's vocab.txt, and another "
            "would be built from text; set vocabulary to BERT's, or start from scratch with the override --bert=None"
        )
    if not settings.text and "data.text_batch" not in named_fields(recipe, settings.overrides):
        recipe = override_values(recipe, {"data.text_batch": 0})  # as the stage does
    _check_run("pretraining", recipe, settings, "CORPUS" if settings.text else None)
    for name in settings.datasets:
        _check_dataset("pretraining.datasets", name, recipe, detectors)
    for name in settings.held_out:
        _check_dataset("pretraining.held_out", name, recipe, detectors)
    ids = {name: identify(detectors[name]) for name in settings.datasets}
    if len(set(ids.values())) > 1:  # their regions must be of the same classes
        raise ValueError(f"pretraining.datasets have several detectors: {ids}; give all the same settings of detector")
    return recipe


def _check_finetuning(where: str, settings: FinetuneSettings, detectors: dict[str, DetectionConfig]) -> Recipe:
    check_overrides(settings.overrides, finetune.SETTINGS)
    fields: dict[str, object] = {"init_from": "ROOT/runs/RUN/step-0"} if settings.checkpoint != "none" else {}
    recipe = _recipe(where, settings, fields or ({} if settings.made.bert else {"random_init": True}))
    _check_run(where, recipe, settings)
    _check_dataset(f"{where}.dataset", settings.dataset_name, recipe, detectors)
    folder = Path(settings.folder)
    _check_there(f"{where}.folder", *(folder / name for name in recipe.task.files))
    for split in settings.evaluate:
        files = replace(recipe.task, validate_on=split).files
        _check_there(f"{where}.evaluate: {split}", *(folder / name for name in files))
    return recipe


def _recipe(where: str, settings: PretrainSettings | FinetuneSettings, fields: dict[str, object]) -> Recipe:
    """Return the recipe of these settings, with fields set."""
    try:
        return override_values(settings.made, fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_run(
    where: str, recipe: Recipe, settings: PretrainSettings | FinetuneSettings, corpus: str | None = None
) -> None:
    """Check that the training has all to start from, and that its processes can share a batch."""
    try:
        check_complete(override_values(recipe, {"data.root": "ROOT", "data.text_corpus": corpus}))
        check_shares(recipe.data, settings.processes.world)
    except ValueError as error:
        raise ValueError(f"{where} ({recipe.name}): {error}") from error


def _check_dataset(setting: str, name: str, recipe: Recipe, detectors: dict[str, DetectionConfig]) -> None:
    if name not in detectors:
        raise ValueError(f"{setting} names {name!r}; datasets has {', '.join(detectors) or 'none'}")
    if recipe.model.regions.features == "precomputed" and not detectors[name].keep_features:
        raise ValueError(
            f"{setting}: {recipe.name} takes precomputed features, and the detector of {name} keeps none; set its "
            "keep_features, or train from pixels with the override --model.regions.features=end_to_end"
        )


def _check_goes_on(
    where: str, settings: FinetuneSettings, recipe: Recipe, pretraining: PretrainSettings, first: Recipe
) -> None:
    """Check whether a fine-tuning can take over the model and the vocabulary of this pipeline's pre-training."""
    differing = differing_fields(architecture(recipe.model), architecture(first.model))
    if settings.checkpoint != "none" and differing:
        name, here, there = differing[0]
        raise ValueError(
            f"{where}: recipe {recipe.name} has another architecture than {first.name}, from which it "
            f"starts: model.{name} is {here}, there {there}; choose a recipe of the same size, or the same overrides"
        )
    if recipe.bert and pretraining.vocabulary is None and not first.bert and not first.init_from:
        raise ValueError(
            f"{where}: the weights of {recipe.bert} in recipe {recipe.name} need BERT's vocab.txt, and the "
            "pre-training builds another vocabulary; set pretraining.vocabulary to BERT's, or the override --bert=None"
        )


def _check_there(setting: str, *paths: str | Path | None) -> None:
    for path in paths:
        if path is not None and not Path(path).exists():
            raise ValueError(f"{setting}: there is no {path}")
