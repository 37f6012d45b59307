"""What second 0 can know to go wrong after hours: `check` raises one ValueError that names it and the way out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from detectors.config import DetectionConfig
from flows import finetune, pretrain
from flows.settings import Dataset, FinetuneSettings, PretrainSettings, Processes
from flows.torchrun import check_overrides
from storage.collection_plan import image_files
from storage.img2dataset import shard_names
from storage.settings import differing_fields, override
from vlbert.config import Recipe, architecture
from vlbert.data.loading import check_shares
from vlbert.initial_weights import check_complete
from vlbert.recipes import RECIPES
from vlbert.tasks.pretraining import PretrainingSettings


def check(datasets: Sequence[Dataset], pretraining: PretrainSettings, finetunings: Sequence[FinetuneSettings]) -> None:
    """Files, names, recipes and overrides of the whole pipeline, before anything is downloaded; imports torch."""
    _check_datasets(datasets, pretraining, finetunings)
    for dataset in datasets:
        _check_sources(dataset)
    pretraining_recipe = _check_pretraining(pretraining)
    detectors = {dataset.name: dataset.detector for dataset in datasets}
    _check_features("pretraining", pretraining_recipe, detectors, [pretraining.dataset, pretraining.held_out])
    runs = [pretraining_recipe.run_name]
    for number, settings in enumerate(finetunings):
        where = f"finetunings[{number}]"
        recipe = _check_finetuning(where, settings)
        _check_features(where, recipe, detectors, [settings.dataset_name])
        differing = differing_fields(architecture(recipe.model), architecture(pretraining_recipe.model))
        # The architecture and words of another run, or root, are known when it is read.
        of_this_pipeline = "/runs/" not in settings.checkpoint and not settings.pretraining
        if of_this_pipeline and settings.checkpoint != "none" and differing:
            name, here, there = differing[0]
            raise ValueError(
                f"{where}: recipe {settings.recipe_name} has another architecture than the pre-training "
                f"{pretraining.recipe} whose checkpoint it starts from: model.{name} is {here}, there {there}; choose "
                "a recipe of the same size, or the same model.* overrides"
            )
        if of_this_pipeline and recipe.bert and _builds_vocabulary(pretraining, pretraining_recipe):
            raise ValueError(
                f"{where}: recipe {settings.recipe_name} takes weights from {recipe.bert}, which need BERT's own "
                "vocab.txt, and the pre-training builds a vocabulary of its own, which the fine-tuning takes over; set "
                "pretraining.vocabulary to BERT's vocab.txt, or do without those weights: the override bert=none"
            )
        runs.append(recipe.run_name)
    twice = _twice(runs)
    if twice:
        raise ValueError(f"two runs are named {twice}: each needs its own folder under ROOT/runs; set run")


def _builds_vocabulary(settings: PretrainSettings, recipe: Recipe) -> bool:
    return settings.vocabulary is None and not recipe.bert and not recipe.init_from


def _check_datasets(
    datasets: Sequence[Dataset], pretraining: PretrainSettings, finetunings: Sequence[FinetuneSettings]
) -> None:
    names = [dataset.name for dataset in datasets]
    twice = _twice(names)
    if twice:
        raise ValueError(f"datasets: two are named {twice}; each needs a name of its own")
    wanted = {"pretraining.dataset": pretraining.dataset, "pretraining.held_out": pretraining.held_out}
    wanted |= {f"finetunings[{number}].dataset": settings.dataset_name for number, settings in enumerate(finetunings)}
    for setting, name in wanted.items():
        if name is not None and name not in names:
            raise ValueError(f"{setting} is {name!r}, and datasets has only {', '.join(names) or 'none'}")


def _twice(names: Sequence[str]) -> str | None:
    return next((name for number, name in enumerate(names) if name in names[:number]), None)


def _check_sources(dataset: Dataset) -> None:
    where, detector = f"dataset {dataset.name}", dataset.detector
    if dataset.captions is not None:
        _check_file(f"{where}: captions", dataset.captions)
    if dataset.images is not None:
        _check_folder(f"{where}: images", dataset.images)
        if not image_files(dataset.images):
            raise ValueError(
                f"{where}: images: {dataset.images} holds no image file; folders below it are not read: link their "
                "images into one folder, and name that"
            )
    if dataset.img2dataset is not None:
        _check_folder(f"{where}: img2dataset", dataset.img2dataset)
        try:
            shard_names(Path(dataset.img2dataset))
        except ValueError as error:
            raise ValueError(f"{where}: img2dataset: {error}") from error
    if detector.annotations:
        _check_file(f"{where}: detector.annotations", detector.annotations)
    if detector.weights:
        _check_file(f"{where}: detector.weights", detector.weights)
    if detector.weights and not detector.preset:
        from detectors.weights.files import read_config  # here, as below

        try:
            read_config(Path(detector.weights))
        except ValueError as error:
            raise ValueError(f"{where}: detector.weights: {error}") from error


def _check_pretraining(settings: PretrainSettings) -> Recipe:
    for file in settings.text:
        _check_file("pretraining.text", file)
    for file in settings.vocabulary_captions:
        _check_file("pretraining.vocabulary_captions", file)
    if settings.vocabulary is not None:
        _check_file("pretraining.vocabulary", settings.vocabulary)
    check_overrides(settings.overrides, pretrain.SETTINGS)
    recipe = _recipe("pretraining", settings.recipe, [*settings.overrides, f"run={settings.run}"])
    if not isinstance(recipe.task, PretrainingSettings):
        raise ValueError(f"pretraining.recipe {settings.recipe} is no pre-training")
    if recipe.bert and settings.text and settings.vocabulary is None:
        raise ValueError(
            f"pretraining: recipe {settings.recipe} starts from {recipe.bert}, whose weights need BERT's own "
            "vocab.txt, and the text corpus would be given a vocabulary of its own; set vocabulary to BERT's "
            "vocab.txt, or start from scratch with the override bert=none"
        )
    if recipe.data.text_batch and not settings.text:
        if _names(settings.overrides, "data.text_batch"):
            raise ValueError(
                f"pretraining.overrides asks for data.text_batch={recipe.data.text_batch}, and there is no corpus; set "
                "text"
            )
        recipe = override(recipe, ["data.text_batch=0"])  # as the stage does
    _check_run("pretraining", recipe, settings.processes)
    return recipe


def _check_finetuning(where: str, settings: FinetuneSettings) -> Recipe:
    check_overrides(settings.overrides, finetune.SETTINGS)
    fields = [f"run={settings.run}"]
    if settings.checkpoint != "none":
        fields.append("init_from=ROOT/runs/RUN/step-0")
    recipe = _recipe(where, settings.recipe_name, [*settings.overrides, *fields])
    if settings.checkpoint == "none" and not recipe.bert:
        recipe = override(recipe, ["random_init=true"])
    _check_run(where, recipe, settings.processes)
    files = recipe.task.files
    if files and not settings.folder:
        raise ValueError(f"{where}.folder is not set; name the folder that holds {' and '.join(files)}")
    for name in files:
        _check_file(f"{where}.folder", str(Path(settings.folder) / name))
    for split in settings.evaluate:
        for name in replace(recipe.task, validate_on=split).files:
            _check_file(f"{where}.evaluate: {split}", str(Path(settings.folder) / name))
    for name in recipe.task.folders:
        _check_folder(f"{where}.folder", str(Path(settings.folder) / name))
    return recipe


def _check_run(where: str, recipe: Recipe, processes: Processes) -> None:
    """What training would refuse when it begins: nothing to start from, a batch that the processes cannot share."""
    try:
        check_complete(override(recipe, ["data.root=ROOT", "data.text_corpus=CORPUS"]))
        check_shares(recipe.data, processes.count)
    except ValueError as error:
        raise ValueError(f"{where} ({recipe.name}): {error}") from error


def _check_features(
    where: str, recipe: Recipe, detectors: dict[str, DetectionConfig], names: Sequence[str | None]
) -> None:
    """A run on precomputed features reads shards whose detector kept them."""
    for name in names:
        if name and recipe.model.regions.features == "precomputed" and not detectors[name].keep_features:
            raise ValueError(
                f"{where}: {recipe.name} takes precomputed features, and the detector of dataset {name} keeps none; "
                "set its keep_features, or train from pixels with the override model.regions.features=end_to_end"
            )


def _recipe(where: str, name: str, assignments: Sequence[str]) -> Recipe:
    """The recipe of this name with these fields set; ValueError where it or one of them is not there."""
    if name not in RECIPES:
        raise ValueError(f"{where}.recipe is {name!r}; it must be one of {', '.join(sorted(RECIPES))}")
    try:
        return override(RECIPES[name](), list(assignments))
    except ValueError as error:
        raise ValueError(f"{where} ({name}): {error}") from error


def _names(overrides: Sequence[str], field: str) -> bool:
    return any(assignment.partition("=")[0] == field for assignment in overrides)


def _check_file(setting: str, file: str) -> None:
    if not Path(file).is_file():
        raise ValueError(f"{setting}: there is no file {file}")


def _check_folder(setting: str, folder: str) -> None:
    if not Path(folder).is_dir():
        raise ValueError(f"{setting}: there is no folder {folder}")
