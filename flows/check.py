"""Check the settings of a whole pipeline before anything is downloaded: ValueError names the fault and the way out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from detectors.config import DetectionConfig
from detectors.run import identify
from detectors.weights.files import read_config
from flows import finetune, pretrain
from flows.settings import Dataset, FinetuneSettings, PretrainSettings, Processes
from flows.torchrun import check_overrides
from storage.collect.plan import find_columns, image_files
from storage.settings import differing_fields, named_fields, override_values
from vlbert.config import Recipe, architecture
from vlbert.data.loading import check_shares
from vlbert.initial_weights import check_complete
from vlbert.tasks.pretraining import PretrainingSettings


def check(datasets: Sequence[Dataset], pretraining: PretrainSettings, finetunings: Sequence[FinetuneSettings]) -> None:
    """Check files, names, recipes and overrides; imports torch."""
    _check_unique([dataset.name for dataset in datasets], "datasets", "name")
    detectors = {dataset.name: dataset.detector for dataset in datasets}
    for dataset in datasets:
        _check_sources(dataset)
    first = _check_pretraining(pretraining)
    for name in pretraining.datasets:
        _check_dataset("pretraining.datasets", name, first, detectors)
    for name in pretraining.held_out:
        _check_dataset("pretraining.held_out", name, first, detectors)
    _check_same_detector({name: detectors[name] for name in sorted(pretraining.datasets)})
    runs = [first.run]
    for number, settings in enumerate(finetunings):
        where = f"finetunings[{number}]"
        recipe = _check_finetuning(where, settings)
        _check_dataset(f"{where}.dataset", settings.dataset_name, recipe, detectors)
        # The architecture and words of another run, or root, are known when it is read.
        if "/runs/" not in settings.checkpoint and not settings.pretraining:
            _check_goes_on(where, settings, recipe, pretraining, first)
        runs.append(recipe.run)
    _check_unique(runs, "runs", "run")


def _check_unique(names: Sequence[str], what: str, setting: str) -> None:
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise ValueError(f"two {what} are named {twice}; give each a {setting} of its own")


def _check_dataset(setting: str, name: str, recipe: Recipe, detectors: dict[str, DetectionConfig]) -> None:
    if name not in detectors:
        raise ValueError(f"{setting} names {name!r}; datasets has {', '.join(detectors) or 'none'}")
    if recipe.model.regions.features == "precomputed" and not detectors[name].keep_features:
        raise ValueError(
            f"{setting}: {recipe.name} takes precomputed features, and the detector of {name} keeps none; set its "
            "keep_features, or train from pixels with the override --model.regions.features=end_to_end"
        )


def _check_same_detector(detectors: dict[str, DetectionConfig]) -> None:
    """Of the datasets of a pre-training: their regions must be of the same classes."""
    if len(detectors) > 1:
        (first, expected), *others = ((name, identify(config)) for name, config in detectors.items())
        for name, found in others:
            if found != expected:
                raise ValueError(
                    f"pretraining.datasets: {name} has another detector, {found}, than {first}, {expected}; give both "
                    "the same settings under detector"
                )


def _check_goes_on(
    where: str, settings: FinetuneSettings, recipe: Recipe, pretraining: PretrainSettings, first: Recipe
) -> None:
    """Whether a fine-tuning can take over the model and the vocabulary of this pipeline's pre-training."""
    differing = differing_fields(architecture(recipe.model), architecture(first.model))
    if settings.checkpoint != "none" and differing:
        name, here, there = differing[0]
        raise ValueError(
            f"{where}: recipe {recipe.name} has another architecture than {first.name}, from which it "
            f"starts: model.{name} is {here}, there {there}; choose a recipe of the same size, or the same overrides"
        )
    builds_vocabulary = pretraining.vocabulary is None and not first.bert and not first.init_from
    if recipe.bert and builds_vocabulary:
        raise ValueError(
            f"{where}: the weights of {recipe.bert} in recipe {recipe.name} need BERT's vocab.txt, and the "
            "pre-training builds another vocabulary; set pretraining.vocabulary to BERT's, or the override --bert=None"
        )


def _check_sources(dataset: Dataset) -> None:
    where, detector = f"dataset {dataset.name}", dataset.detector
    if dataset.captions is not None:
        _check_file(f"{where}: captions", dataset.captions)
    if dataset.images is not None:
        _check_folder(f"{where}: images", dataset.images)
        if not dataset.captions and not image_files(dataset.images):
            raise ValueError(f"{where}: images: {dataset.images} holds no image file; folders below it are not read")
    if detector.annotations:
        _check_file(f"{where}: detector.annotations", detector.annotations)
    if detector.weights:
        _check_file(f"{where}: detector.weights", detector.weights)
    for file in detector.imported.files:
        if not Path(file).exists():
            raise ValueError(f"{where}: detector.imported.files: there is no {file}")
    try:
        find_columns(dataset)
        if detector.weights and not detector.preset:
            read_config(Path(detector.weights))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_pretraining(settings: PretrainSettings) -> Recipe:
    files = {"text": settings.text, "vocabulary_captions": settings.vocabulary_captions}
    if settings.vocabulary is not None:
        files["vocabulary"] = (settings.vocabulary,)
    for setting, names in files.items():
        for name in names:
            _check_file(f"pretraining.{setting}", name)
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
    if recipe.data.text_batch and not settings.text:
        if "data.text_batch" in named_fields(recipe, settings.overrides):
            raise ValueError(
                f"pretraining.overrides has --data.text_batch={recipe.data.text_batch}, and there is no corpus: "
                "set text"
            )
        recipe = override_values(recipe, {"data.text_batch": 0})  # as the stage does
    _check_run("pretraining", recipe, settings.processes)
    return recipe


def _check_finetuning(where: str, settings: FinetuneSettings) -> Recipe:
    check_overrides(settings.overrides, finetune.SETTINGS)
    recipe = _recipe(where, settings, {})
    if settings.checkpoint != "none":
        recipe = replace(recipe, init_from="ROOT/runs/RUN/step-0")
    elif not recipe.bert:
        recipe = replace(recipe, random_init=True)
    _check_run(where, recipe, settings.processes)
    if recipe.task.files and not settings.folder:
        raise ValueError(f"{where}.folder is not set; name the folder that holds {' and '.join(recipe.task.files)}")
    files = {f"{where}.folder": recipe.task.files}
    for split in settings.evaluate:
        files[f"{where}.evaluate: {split}"] = replace(recipe.task, validate_on=split).files
    for setting, names in files.items():
        for name in names:
            _check_file(setting, str(Path(settings.folder) / name))
    for name in recipe.task.folders:
        _check_folder(f"{where}.folder", str(Path(settings.folder) / name))
    return recipe


def _recipe(where: str, settings: PretrainSettings | FinetuneSettings, fields: dict[str, object]) -> Recipe:
    """The recipe of these settings, with fields set."""
    try:
        return override_values(settings.made, fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_run(where: str, recipe: Recipe, processes: Processes) -> None:
    """What training would refuse when it begins: nothing to start from, a batch that the processes cannot share."""
    try:
        check_complete(override_values(recipe, {"data.root": "ROOT", "data.text_corpus": "CORPUS"}))
        check_shares(recipe.data, processes.world)
    except ValueError as error:
        raise ValueError(f"{where} ({recipe.name}): {error}") from error


def _check_file(setting: str, file: str) -> None:
    if not Path(file).is_file():
        raise ValueError(f"{setting}: there is no file {file}")


def _check_folder(setting: str, folder: str) -> None:
    if not Path(folder).is_dir():
        raise ValueError(f"{setting}: there is no folder {folder}")
