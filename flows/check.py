"""Check what takes the world, before anything is downloaded: that files are there, and that names are known.

What a setting, a recipe or an override may be is checked where it is made; here they are only made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from detectors.run import identify
from flows import finetune, pretrain
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.torchrun import check_overrides
from storage.collect.plan import find_columns
from vlbert.config import Recipe
from vlbert.tasks.pretraining import PretrainingSettings


def check(datasets: Sequence[Dataset], pretraining: PretrainSettings, finetunings: Sequence[FinetuneSettings]) -> None:
    """Check a whole pipeline. Imports torch. Raises ValueError with the setting, what is wrong and a way out."""
    for dataset in datasets:
        _check_sources(dataset)
    names = [dataset.name for dataset in datasets]
    _check_unique("datasets", names)
    _check_unique("runs", [settings.made.run for settings in (pretraining, *finetunings)])
    _check_pretraining(pretraining)
    keeping = {dataset.name for dataset in datasets if dataset.detector.keep_features}
    for name in (*pretraining.datasets, *pretraining.held_out):
        _check_dataset("pretraining.datasets", name, names, keeping, pretraining.made)
    for number, settings in enumerate(finetunings):
        where = f"finetunings[{number}]"
        check_overrides(settings.overrides, finetune.SETTINGS)
        _check_dataset(f"{where}.dataset", settings.dataset_name, names, keeping, settings.made)
        task, folder = settings.made.task, Path(settings.folder)
        _check_there(f"{where}.folder", *(folder / name for name in task.files))
        for split in settings.evaluate:
            files = replace(task, validate_on=split).files
            _check_there(f"{where}.evaluate: {split}", *(folder / name for name in files))


def _check_sources(dataset: Dataset) -> None:
    where, detector = f"dataset {dataset.name}", dataset.detector
    _check_there(f"{where}: captions", dataset.captions)
    _check_there(f"{where}: images", dataset.images)
    _check_there(f"{where}: detector.annotations", detector.annotations)
    _check_there(f"{where}: detector.weights", detector.weights)
    _check_there(f"{where}: detector.imported.files", *detector.imported.files)
    try:
        find_columns(dataset)
        identify(detector)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_pretraining(settings: PretrainSettings) -> None:
    _check_there("pretraining.text", *settings.text)
    _check_there("pretraining.vocabulary_captions", *settings.vocabulary_captions)
    _check_there("pretraining.vocabulary", settings.vocabulary)
    check_overrides(settings.overrides, pretrain.SETTINGS)
    if not isinstance(settings.made.task, PretrainingSettings):
        raise ValueError(f"pretraining.recipe {settings.recipe} is no pre-training")


def _check_dataset(setting: str, name: str, names: Iterable[str], keeping: Iterable[str], recipe: Recipe) -> None:
    if name not in names:
        raise ValueError(f"{setting} names {name!r}; datasets has {', '.join(names) or 'none'}")
    if recipe.model.regions.features == "precomputed" and name not in keeping:
        raise ValueError(
            f"{setting}: {recipe.name} takes precomputed features, and the detector of {name} keeps none; set its "
            "keep_features, or train from pixels with the override --model.regions.features=end_to_end"
        )


def _check_unique(what: str, names: Sequence[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two {what} are named {', '.join(twice)}; give each a name of its own")


def _check_there(setting: str, *paths: str | Path | None) -> None:
    for path in paths:
        if path is not None and not Path(path).exists():
            raise ValueError(f"{setting}: there is no {path}")
