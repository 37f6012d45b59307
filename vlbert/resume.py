"""Start a run, or resume it from its last checkpoint: its data as they were, its model, its optimizer and its step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from storage.object_store import ObjectStore, open_store
from storage.reading import ShardSamples
from storage.runs import checkpoints
from storage.settings import differing_fields, flat, to_json, weight_texts
from training import distributed
from training.checkpoint import load_optimizer, prune_checkpoints
from training.distributed import World
from training.loading import EXPECTED
from training.optimizer import make_optimizer
from vlbert.checkpoint import Checkpoint, open_checkpoint, read_checkpoint
from vlbert.config import DataConfig, Recipe
from vlbert.data.corpus import TextCorpus
from vlbert.data.loading import TrainingDataset, check_shares
from vlbert.data.order import SnapshotSpan
from vlbert.data.samples import find_readable, open_cache, open_samples
from vlbert.data.vocabulary import Vocabulary
from vlbert.evaluation.whence import record_of
from vlbert.initial_weights import check_complete, choose_vocabulary, make_model
from vlbert.model.execution import execute_as
from vlbert.model.heads import count_parameters
from vlbert.tasks import make_task
from vlbert.tasks.base import Examples, Task, TaskModel
from vlbert.tasks.pretraining import PretrainingSettings

HeldOut = dict[str, tuple[ShardSamples, Examples]]  # by dataset


@dataclass(frozen=True, eq=False)
class OpenedData:
    """What a run trains and validates on, and the task that makes its examples."""

    datasets: list[TrainingDataset]
    held_out: HeldOut
    corpus: TextCorpus | None
    task: Task
    vocabulary: Vocabulary
    num_classes: int
    pinned: dict  # what a checkpoint records of the held-out datasets, of the corpus and of what it started from


@dataclass(frozen=True, eq=False)
class Start:
    """Where a run goes on: `step` steps of it are done, 0 in a new one."""

    data: OpenedData
    model: TaskModel
    optimizer: torch.optim.Optimizer
    step: int
    loop_state: dict[str, Any] | None  # what training.loop saved of itself


def start_or_resume(recipe: Recipe, store: ObjectStore, world: World, report: Callable[[str], None]) -> Start | None:
    """Start a run, or resume it from its last checkpoint; None if it is complete.

    report: prints a line. Raises ValueError if the recipe lacks something, or a setting that affects results differs
    from the checkpoint.
    """
    check_complete(recipe)
    saved = distributed.broadcast(checkpoints(store, recipe.run), world)
    resumed = read_checkpoint(store, saved[-1]) if saved else None
    if resumed:
        check_unchanged(recipe, resumed)
        if world.first:
            prune_checkpoints(store, recipe.run, recipe.keep_checkpoints)  # it may have been killed before that
        if complete := _complete(recipe, resumed):
            report(complete)
            return None
        recipe.task.check_same(
            resumed.state.get("task_files"), resumed.uri, "put it back, or start another run: --run_name=NAME"
        )
        report(f"{recipe.run} goes on from {resumed.uri}, step {resumed.state['step']} of {recipe.steps}")
    init_from = open_checkpoint(recipe.init_from) if recipe.init_from and not resumed else None
    data = open_data(recipe, store, resumed, resumed or init_from, world)
    model = make_model(recipe, data.task, data.vocabulary, init_from, resumed, report).to(world.device)
    execute_as(recipe, model.vlbert)
    optimizer = make_optimizer(model, recipe.optimizer)
    if resumed:
        load_optimizer(resumed.folder, model, optimizer)
    _report_run(recipe, data, model, world, report)
    step, loop_state = (resumed.state["step"], resumed.state.get("loop")) if resumed else (0, None)
    return Start(data, model, optimizer, step, loop_state)


def find_complete(recipe: Recipe, processes: int) -> str | None:
    """Return the message that `vlbert train` prints for this recipe if its run is complete, without loading tensors.

    None if a step is left, and if anything is wrong: the program itself reports that.
    """
    try:
        check_complete(recipe)
        check_shares(recipe.data, processes)
        store = open_store(recipe.data.root)
        saved = checkpoints(store, recipe.run)
        if not saved:
            return None
        resumed = read_checkpoint(store, saved[-1], tensors=False)
        check_unchanged(recipe, resumed)
        complete = _complete(recipe, resumed)
        if complete:
            prune_checkpoints(store, recipe.run, recipe.keep_checkpoints)
        return complete
    except (*EXPECTED, OSError):
        return None


def check_unchanged(recipe: Recipe, resumed: Checkpoint) -> None:
    """Raises ValueError if a setting that affects results differs from the checkpoint."""
    fixed = ("task", "model", "data", "optimizer", "init_from", "bert", "precision")
    free = {"data.root", "data.workers", "data.text_corpus", "data.new_shards_every", "data.cache", "data.cache_gb"}
    for name, now, before in differing_fields(_fields(to_json(recipe)), _fields(resumed.config["recipe"])):
        if name == "data.detector" and now is None:  # the only one there was, or the one that it began with
            continue
        if name == "init_from" and now and before:  # the same checkpoint may lie under another root
            now, before = now.rpartition("/runs/")[2], before.rpartition("/runs/")[2]
        if name.split(".")[0] in fixed and name not in free and now != before:
            raise ValueError(
                f"{resumed.uri} was trained with {name}={before}, but the recipe has {now}. Restore {before}, or "
                "start a new run: --run_name NAME"
            )


def _fields(recipe: dict) -> dict[str, object]:
    """Return the fields of a recipe by their dotted names; its datasets are one field, whose names are values."""
    given = recipe["data"]["datasets"]
    weights = {name: None if given[name] is None or len(given) == 1 else float(given[name]) for name in sorted(given)}
    return flat(recipe | {"data": recipe["data"] | {"datasets": " ".join(weight_texts(weights))}})


def _complete(recipe: Recipe, resumed: Checkpoint) -> str | None:
    """Return the message about a run that has no step left; None for any other."""
    step = resumed.state["step"]
    if step < recipe.steps:
        return None
    return f"{recipe.run} is complete: {resumed.uri} has step {step} of {recipe.steps}"


def open_data(
    recipe: Recipe,
    store: ObjectStore,
    resumed: Checkpoint | None,
    start: Checkpoint | None,
    world: World,
) -> OpenedData:
    """Open the data of a new run or, as they were, of a resumed one. start: whose vocabulary it takes, if any.

    Raises ValueError if a resumed run has other examples, or another corpus, than it was trained on.
    """
    config = recipe.data
    opened = _open_datasets(store, config, resumed, world)
    held_out = _open_held_out(store, config, resumed, world)
    samples = [one for one, _ in opened]
    vocabulary = choose_vocabulary(recipe, start, samples, world)
    num_classes = (
        resumed.num_classes if resumed else _count_classes(opened, isinstance(recipe.task, PretrainingSettings))
    )
    task = make_task(recipe.task, vocabulary, num_classes)
    corpus = TextCorpus(config.text_corpus, vocabulary) if config.text_batch else None
    if resumed and corpus and corpus.hash != resumed.state["text"]:
        raise ValueError(f"{config.text_corpus} is not the corpus that {resumed.uri} was trained with; give that one")
    return OpenedData(
        datasets=[_training_dataset(config, task, resumed, *one) for one in opened],
        held_out={pinned["dataset"]: (one, task.examples(one, recipe.task.validate_on)) for one, pinned in held_out},
        corpus=corpus,
        task=task,
        vocabulary=vocabulary,
        num_classes=num_classes,
        pinned={
            "held_out": [pinned for _, pinned in held_out],
            "text": corpus.hash if corpus else None,
            "task_files": resumed.state.get("task_files") if resumed else recipe.task.hashes() if world.first else None,
            "init_from": resumed.state.get("init_from") if resumed else start and record_of(start),
        },
    )


def _open_datasets(
    store: ObjectStore, config: DataConfig, resumed: Checkpoint | None, world: World
) -> list[tuple[ShardSamples, dict]]:
    """Return the samples of each dataset, in the order of their names, and what a checkpoint pins of it. Raises
    ValueError if they are of different detectors."""
    cache, found = open_cache(store, config), []
    for name in config.dataset_names:
        before = saved_of(resumed, name) if resumed else None
        pinned = before and before | {"snapshot": before["snapshots"][-1]["snapshot"]}
        found.append(open_samples(store, name, config.detector, pinned, world, cache))
    _check_same("detector", [(pinned["dataset"], pinned["stage"].removeprefix("regions/")) for _, pinned in found])
    return found


def _count_classes(opened: list[tuple[ShardSamples, dict]], needed: bool) -> int:
    """Return the number of region classes; 0 if it is not known and not `needed`. Raises ValueError if they differ."""
    found = [(pinned["dataset"], find_readable(samples).regions) for samples, pinned in opened]
    known = needed or any(regions.class_probs is not None for _, regions in found)
    classes = [(dataset, regions.num_classes if known else 0) for dataset, regions in found]
    _check_same("number of classes", classes)
    return classes[0][1]


def _check_same(what: str, values: list[tuple[str, object]]) -> None:
    (first, expected), *others = values
    for name, value in others:
        if value != expected:
            raise ValueError(
                f"data.datasets: the regions of {name} have another {what}, {value}, than those of {first}, "
                f"{expected}; detect both with the same settings, or train on one of them"
            )


def _training_dataset(
    config: DataConfig, task: Task, resumed: Checkpoint | None, samples: ShardSamples, pinned: dict
) -> TrainingDataset:
    name, examples = pinned["dataset"], task.examples(samples, None)
    if resumed:
        before = saved_of(resumed, name)
        spans, weight = [SnapshotSpan(**span) for span in before["snapshots"]], before["weight"]
    else:
        spans, weight = [SnapshotSpan(0, 0, len(examples), pinned["snapshot"])], config.datasets[name]
    if len(examples) != spans[-1].examples:
        raise ValueError(
            f"{resumed.uri} was trained on {spans[-1].examples} examples of {name}, now there are {len(examples)}: "
            "the files of the task have changed; put them back"
        )
    recorded = {field: pinned[field] for field in ("dataset", "stage", "random_init")}
    return TrainingDataset(samples, examples, spans, weight or float(len(examples)), recorded)


def _open_held_out(
    store: ObjectStore, config: DataConfig, resumed: Checkpoint | None, world: World
) -> list[tuple[ShardSamples, dict]]:
    found = []
    for number, name in enumerate(config.held_out or ()):
        try:
            pinned = resumed.state["held_out"][number] if resumed else None
            found.append(open_samples(store, name, config.detector, pinned, world))
        except ValueError as error:
            raise ValueError(
                f"{error}; data.held_out={','.join(config.held_out)} names that dataset: put its files back, make it "
                "(docs/tasks.md, Held-out data), or start a run without validation: --data.held_out=None"
            ) from error
    return found


def saved_of(resumed: Checkpoint, dataset: str) -> dict:
    """Return what a checkpoint records of a dataset of the run."""
    return next(saved for saved in resumed.state["data"] if saved["dataset"] == dataset)


def _report_run(
    recipe: Recipe, data: OpenedData, model: TaskModel, world: World, report: Callable[[str], None]
) -> None:
    total, trainable = count_parameters(model)
    weights = sum(dataset.weight for dataset in data.datasets)
    for dataset in data.datasets:
        name, share = f"{dataset.pinned['dataset']}/{dataset.pinned['stage']}", dataset.weight / weights
        report(
            f"{recipe.run}: {len(dataset.examples)} examples on {len(dataset.samples)} samples of {name} "
            f"(snapshot {dataset.spans[-1].snapshot})" + (f", {share:.1%} of each step" if share < 1 else "")
        )
    report(f"{total / 1e6:.2f} M parameters, {trainable / 1e6:.2f} M trained, on {world.size} x {world.device.type}")
    if any(dataset.pinned["random_init"] for dataset in data.datasets):
        report("WARNING: the regions come from an UNTRAINED detector (random weights)")
    if not data.held_out:
        report("there will be no validation: data.held_out names no dataset")
    for dataset in data.datasets:
        for line in dataset.examples.skipped:
            report(f"left out: {line}")
