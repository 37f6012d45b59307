"""Start a run, or resume it from its last checkpoint: data, model, optimizer and step."""

from collections.abc import Callable, Mapping, Sequence
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
from vlbert.evaluation.whence import check_count, record_of
from vlbert.initial_weights import check_complete, choose_vocabulary, make_model
from vlbert.model.execution import execute_as
from vlbert.model.heads import count_parameters
from vlbert.tasks import make_task
from vlbert.tasks.base import Examples, Task, TaskModel, split_by_key
from vlbert.tasks.pretraining import PretrainingSettings

HeldOut = dict[str, tuple[ShardSamples, Examples]]  # by dataset name


@dataclass(frozen=True, eq=False)
class OpenedData:
    """The data that a run trains and validates on, and the task that makes its examples."""

    datasets: list[TrainingDataset]
    held_out: HeldOut
    corpus: TextCorpus | None
    task: Task
    pinned: dict  # entries of state.json about held-out datasets, corpus, task files and initial weights


def start_or_resume(
    recipe: Recipe, store: ObjectStore, world: World, report: Callable[[str], None]
) -> tuple[OpenedData, TaskModel, torch.optim.Optimizer, Mapping[str, Any]] | None:
    """Start a run, or resume it from its last checkpoint. Returns None if the run is complete.

    The last returned value is the content of the checkpoint's state.json, or {} in a new run.

    Raises ValueError if a setting that affects results differs from the checkpoint's.
    """
    saved = distributed.broadcast(checkpoints(store, recipe.run), world)
    resumed = read_checkpoint(store, saved[-1]) if saved else None
    if resumed:
        check_unchanged(recipe, resumed)
        if world.first:
            prune_checkpoints(store, recipe)  # a killed run may not have done this
        if message := _completion_message(recipe, resumed):
            report(message)
            return None
        recipe.task.check_same(
            resumed.state.get("task_files"), resumed.uri, "put it back, or start another run: --run_name=NAME"
        )
        report(f"{recipe.run} resumes from {resumed.uri}, step {resumed.state['step']} of {recipe.steps}")
    init_from = open_checkpoint(recipe.init_from) if recipe.init_from and not resumed else None
    data = open_data(recipe, store, resumed, resumed or init_from, world)
    model = make_model(recipe, data.task, data.task.vocabulary, init_from, resumed, report).to(world.device)
    execute_as(recipe, model.vlbert)
    optimizer = make_optimizer(model, recipe.optimizer)
    if resumed:
        load_optimizer(resumed.folder, model, optimizer)
    _report_run(recipe, data, model, world, report)
    return data, model, optimizer, resumed.state if resumed else {}


def finish_if_complete(recipe: Recipe, processes: int) -> str | None:
    """If a run is complete, delete its old checkpoints and return the message that `vlbert train` prints.

    Returns None if the run is not complete, or if an error occurs (`vlbert train` reports it). Loads no tensors.
    """
    try:
        check_complete(recipe)
        check_shares(recipe.data, processes, recipe.model.regions)
        store = open_store(recipe.data.root, write=False)
        saved = checkpoints(store, recipe.run)
        if not saved:
            return None
        resumed = read_checkpoint(store, saved[-1], tensors=False)
        check_unchanged(recipe, resumed)
        message = _completion_message(recipe, resumed)
        if message:
            prune_checkpoints(store, recipe)
        return message
    except (*EXPECTED, OSError):
        return None


def check_unchanged(recipe: Recipe, resumed: Checkpoint) -> None:
    """Raise ValueError if a setting that affects results differs between the recipe and the resumed checkpoint."""
    fixed = ("task", "model", "data", "optimizer", "init_from", "bert", "precision")
    free = {"data.root", "data.workers", "data.text_corpus", "data.new_shards_every", "data.cache", "data.cache_gb"}
    for name, now, before in differing_fields(_fields(to_json(recipe)), _fields(resumed.config["recipe"])):
        if name == "data.detector" and now is None:  # None: use the checkpoint's
            continue
        # The same checkpoint may lie under another root.
        if name == "init_from" and isinstance(now, str) and isinstance(before, str):
            now, before = now.rpartition("/runs/")[2], before.rpartition("/runs/")[2]
        if name.split(".")[0] in fixed and name not in free and now != before:
            raise ValueError(
                f"{resumed.uri} was trained with {name}={before}, but the recipe has {now}. Restore {before}, or "
                "start a new run: --run_name NAME"
            )


def _fields(recipe: dict) -> dict[str, object]:
    """Return a recipe's values by dotted field name. All datasets with their weights count as one field."""
    datasets = sorted(recipe["data"]["datasets"].items())
    weights = {name: None if weight is None or len(datasets) == 1 else float(weight) for name, weight in datasets}
    return flat(recipe | {"data": recipe["data"] | {"datasets": " ".join(weight_texts(weights))}})


def _completion_message(recipe: Recipe, resumed: Checkpoint) -> str | None:
    """Return a message that the run is complete, or None if steps are left."""
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
    """Open the data of a new run, or the data that the checkpoint of a resumed run records.

    The vocabulary comes from checkpoint `start`, if given. Raises ValueError if the data of a resumed run has changed.
    """
    config = recipe.data
    opened = _open_datasets(store, config, resumed, world)
    held_out = opened if config.held_out_share and not resumed else _open_held_out(store, config, resumed, world)
    samples = [samples for samples, _ in opened]
    vocabulary = choose_vocabulary(recipe, start, samples, world)
    needed = isinstance(recipe.task, PretrainingSettings)
    num_classes = resumed.num_classes if resumed else _count_classes(opened, needed)
    task = make_task(recipe.task, vocabulary, num_classes)
    corpus = TextCorpus(config.text_corpus, vocabulary) if config.text_batch and config.text_corpus else None
    if resumed and corpus and corpus.hash != resumed.state["text"]:
        raise ValueError(f"{config.text_corpus} is not the corpus that {resumed.uri} was trained with; give that one")
    return OpenedData(
        datasets=[_make_training_dataset(recipe, task, resumed, *dataset) for dataset in opened],
        held_out={
            pinned["dataset"]: (samples, examples)
            for samples, pinned in held_out
            if len(examples := examples_of(recipe, task, samples, held_out=True))
        },
        corpus=corpus,
        task=task,
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
    """Open all datasets with open_samples, in order of their names. Raises ValueError if their detectors differ."""
    cache, opened = open_cache(store, config), []
    for name in sorted(config.datasets):
        before = saved_of(resumed, name) if resumed else None
        pinned = before and before | {"snapshot": before["snapshots"][-1]["snapshot"]}
        opened.append(open_samples(store, name, config.detector, pinned, world, cache))
    _check_same("detector", [(pinned["dataset"], pinned["stage"].removeprefix("regions/")) for _, pinned in opened])
    return opened


def _count_classes(opened: list[tuple[ShardSamples, dict]], needed: bool) -> int:
    """Return the number of region classes, or 0 if unknown and not `needed`. Raises ValueError if datasets differ."""
    first_regions = [(pinned["dataset"], find_readable(samples).require_regions()) for samples, pinned in opened]
    known = needed or any(regions.class_probs is not None for _, regions in first_regions)
    classes = [(dataset, regions.num_classes if known else 0) for dataset, regions in first_regions]
    _check_same("number of classes", classes)
    return classes[0][1]


def _check_same(name: str, values: Sequence[tuple[str, object]]) -> None:
    (first, expected), *others = values
    for dataset, value in others:
        if value != expected:
            raise ValueError(
                f"data.datasets: the regions of {dataset} and {first} differ in their {name}, {value} and {expected}; "
                "detect both with the same settings, or train on one of them"
            )


def _make_training_dataset(
    recipe: Recipe, task: Task, resumed: Checkpoint | None, samples: ShardSamples, pinned: dict
) -> TrainingDataset:
    name, examples = pinned["dataset"], examples_of(recipe, task, samples)
    if resumed:
        before = saved_of(resumed, name)
        spans, weight = [SnapshotSpan(**span) for span in before["snapshots"]], before["weight"]
        check_count(examples, spans[-1], name, resumed.uri)
    else:
        spans, weight = [SnapshotSpan(0, 0, len(examples), pinned["snapshot"])], recipe.data.datasets[name]
    recorded = {field: pinned[field] for field in ("dataset", "stage", "random_init")}
    return TrainingDataset(samples, examples, spans, weight or float(len(examples)), recorded)


def examples_of(recipe: Recipe, task: Task, samples: ShardSamples, held_out: bool = False) -> Examples:
    """Return the examples of a snapshot to train on, or those to validate on."""
    examples = task.examples(samples, recipe.task.validate_on if held_out else None)
    return split_by_key(examples, samples.index.store, samples.index.path, recipe.data.held_out_share, held_out)


def _open_held_out(
    store: ObjectStore, config: DataConfig, resumed: Checkpoint | None, world: World
) -> list[tuple[ShardSamples, dict]]:
    opened, names = [], config.held_out or (sorted(config.datasets) if config.held_out_share else ())
    for name, pinned in zip(names, resumed.state["held_out"] if resumed else [None] * len(names), strict=False):
        try:
            opened.append(open_samples(store, name, config.detector, pinned, world))
        except ValueError as error:
            raise ValueError(
                f"{error}; the run validates on {', '.join(names)}: restore its files, make it (docs/tasks.md, "
                "Held-out data), or start a run without validation: --data.held_out=None --data.held_out_share=0"
            ) from error
    return opened


def saved_of(resumed: Checkpoint, dataset: str) -> dict:
    """Return a dataset's entry in the checkpoint's state.json: its stage, weight, snapshots and so on."""
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
    if recipe.model.regions.live_norms:
        images = recipe.data.batch // (world.size * recipe.data.gradient_accumulation)
        report(f"the ResNet's BatchNorms normalise over {images} images, those of a GPU in one backward pass")
    if any(dataset.pinned["random_init"] for dataset in data.datasets):
        report("WARNING: the regions come from an UNTRAINED detector (random weights)")
    for name, (_, examples) in data.held_out.items():
        report(f"{recipe.run}: validates on {len(examples)} examples of {name}")
    if not data.held_out:
        report("no validation: data.held_out and data.held_out_share give no example")
    for dataset in data.datasets:
        for line in dataset.examples.skipped:
            report(f"skipped: {line}")
