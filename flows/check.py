"""Check a pipeline's settings before anything is downloaded: input files must exist, and names must be known.

Settings, recipes and overrides check their own values when they are created, so this module only creates them.
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
    """Check the settings of a whole pipeline. Raises ValueError with the wrong setting, the problem and a fix."""
    for dataset in datasets:
        _check_sources(dataset)
    names = [dataset.name for dataset in datasets]
    _check_unique("datasets", names)
    _check_unique("runs", [settings.resolved_recipe.run for settings in (pretraining, *finetunings)])
    _check_exists("pretraining.text", *pretraining.text)
    _check_exists("pretraining.vocabulary_captions", *pretraining.vocabulary_captions)
    _check_exists("pretraining.vocabulary", pretraining.vocabulary)
    check_overrides(pretraining.overrides, pretrain.SETTINGS)
    recipe = pretraining.resolved_recipe
    if not isinstance(recipe.task, PretrainingSettings):
        raise ValueError(f"pretraining.recipe {recipe.name} is not a pre-training recipe; name one of pretrain_*")
    keeping = {dataset.name for dataset in datasets if dataset.detector.keep_features}
    for name in (*pretraining.datasets, *pretraining.held_out):
        _check_dataset("pretraining.datasets", name, names, keeping, recipe)
    for number, settings in enumerate(finetunings):
        setting = f"finetunings[{number}]"
        check_overrides(settings.overrides, finetune.SETTINGS)
        _check_dataset(f"{setting}.dataset", settings.dataset_name, names, keeping, settings.resolved_recipe)
        task, folder = settings.resolved_recipe.task, Path(settings.folder)
        _check_exists(f"{setting}.folder", *(folder / name for name in task.files))
        for split in settings.evaluate:
            files = replace(task, validate_on=split).files
            _check_exists(f"{setting}.evaluate: {split}", *(folder / name for name in files))


def _check_sources(dataset: Dataset) -> None:
    setting, detector = f"dataset {dataset.name}", dataset.detector
    _check_exists(f"{setting}: captions", dataset.captions)
    _check_exists(f"{setting}: images", dataset.images)
    _check_exists(f"{setting}: detector.annotations", detector.annotations)
    _check_exists(f"{setting}: detector.weights", detector.weights)
    _check_exists(f"{setting}: detector.imported.files", *detector.imported.files)
    try:
        find_columns(dataset)
        identify(detector)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def _check_dataset(setting: str, name: str, names: Iterable[str], keeping: Iterable[str], recipe: Recipe) -> None:
    if name not in names:
        raise ValueError(f"{setting} names {name!r}, but the setting datasets has only {', '.join(names) or 'none'}")
    if recipe.model.regions.features == "precomputed" and name not in keeping:
        raise ValueError(
            f"{setting}: {recipe.name} needs precomputed features, but the detector of {name} does not keep them; set "
            "its keep_features, or train from pixels with the override --model.regions.features=end_to_end"
        )


def _check_unique(kind: str, names: Sequence[str]) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"two {kind} are named {', '.join(repeated)}; give each a different name")


def _check_exists(setting: str, *paths: str | Path | None) -> None:
    for path in paths:
        if path is not None and not Path(path).exists():
            raise ValueError(f"{setting}: there is no {path}")
