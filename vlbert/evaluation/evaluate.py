"""Evaluate a checkpoint on all examples of a split. Writes predictions, metrics, submission files and a page.

    torchrun --nproc-per-node N -m vlbert.evaluation.evaluate RECIPE CHECKPOINT SPLIT [--field value ...] [--out FOLDER]

RECIPE is the recipe that CHECKPOINT was trained with; it names the data to read. A retrieval recipe also accepts a
checkpoint that was only pre-trained, with the relationship head. CHECKPOINT is ROOT/runs/RUN/step-*, ROOT/runs/RUN (its
newest checkpoint), ROOT/runs/RUN/best or a local folder with a model and its task's head. For VCR, two can be given,
joined by a comma: one trained for answers and one for rationales. SPLIT is named as in the task's files (val2014,
testA, ...). For a task without splits, it is the name of a dataset. The fields are those of the recipe. By default,
data.root and the task's settings are the checkpoint's. Output goes to ROOT/runs/RUN/evaluations/SPLIT-step-*, or to
FOLDER, which may be s3://; metrics.json is written last. A stopped evaluation resumes. A complete one with the same
settings is not repeated, unless its folder is deleted.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import tyro

from storage.object_store import ObjectStore, open_store
from storage.programs import Flat, Positional
from storage.settings import from_json, named_fields, override_values, parse, parse_known, to_json
from training.checkpoint import MODEL
from training.distributed import World, broadcast, gather_on_rank0
from training.loading import EXPECTED
from training.program import find_recipe, run_in_world, split_recipe
from vlbert.checkpoint import Checkpoint, find_checkpoint, load_model, open_checkpoint, restore_saved, vocabulary_of
from vlbert.config import Recipe
from vlbert.data.loading import ValidationData
from vlbert.data.samples import open_cache, open_samples
from vlbert.evaluation.blocks import Blocks, delete_blocks
from vlbert.evaluation.results import (
    PAGE,
    SplitPredictions,
    inputs_of,
    output_folder,
    print_summary,
    read_summary,
    summarise,
    write,
)
from vlbert.initial_weights import check_one_dataset, start_head
from vlbert.model.vlbert import VLBert
from vlbert.recipes import RECIPES
from vlbert.tasks import make_task, settings_named, task_of
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.validate import Predicted, last_reason, predict_all


def load_task_model(
    checkpoint: Checkpoint, changes: Mapping[str, Any] | None = None, recipe: Recipe | None = None
) -> tuple[TaskModel, Recipe]:
    """Load a checkpoint's model with its head, in eval mode, and return it with its recipe.

    `recipe` defaults to the recipe that the checkpoint was trained with. Its task and model settings are replaced by
    the checkpoint's. Then `changes`, such as {"task.folder": "vqa"}, are applied. A pre-trained checkpoint is accepted
    if the task can be used without fine-tuning (Task.zero_shot_head). `recipe` then keeps its own task settings.
    Raises ValueError if the checkpoint has no head, or was trained for another task.
    """
    config, uri = checkpoint.config, checkpoint.uri
    if "task" not in config or not any(name.startswith("head.") for name in checkpoint.model):
        raise ValueError(f"{uri} holds a VL-BERT without the head of a task; give a checkpoint of a training run")
    trained_for = config["task"]
    pretrained = trained_for == PretrainingSettings.__name__
    zero_shot = recipe is not None and pretrained and bool(task_of(recipe.task).zero_shot_head)
    if recipe and not zero_shot and trained_for != type(recipe.task).__name__:
        raise ValueError(
            f"{uri} was trained for another task than recipe {recipe.name}: its settings are {trained_for}, the "
            f"recipe's are {type(recipe.task).__name__}. Give the recipe that it was trained with"
        )
    trained = replace(recipe_of(checkpoint), vocabulary=None)  # the checkpoint's own; never a path that it names
    settings = recipe.task if zero_shot else trained.task
    recipe = recipe or trained
    recipe = override_values(replace(recipe, task=settings, model=checkpoint.model_config), changes or {})
    task = make_task(recipe.task, vocabulary_of(checkpoint, recipe.vocabulary), checkpoint.num_classes)
    restore_saved(task, checkpoint)
    model = TaskModel(VLBert(recipe.model, checkpoint.vocab_size), task)
    if zero_shot:
        _load_pretrained(model, checkpoint)
    else:
        load_model(model, checkpoint.model, uri)
    return model.eval(), recipe


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """Return the recipe that a checkpoint was trained with. Raises ValueError if its task is unknown."""
    config, uri = checkpoint.config, checkpoint.uri
    kind = settings_named(config["task"])
    if kind is None:
        raise ValueError(
            f"{uri} was trained for an unknown task, {config['task']}; name the file of the task: --task_file FILE"
        )
    settings = from_json(kind, checkpoint.task_settings, f"{uri}/config.json")
    values = config.get("recipe", {"name": Path(uri).name}) | {"task": settings}
    return replace(from_json(Recipe, values, f"{uri}/config.json"), model=checkpoint.model_config)


def _load_pretrained(model: TaskModel, checkpoint: Checkpoint) -> None:
    """Load pre-trained weights and the head that the task uses. Raises ValueError if that head is missing."""
    if not checkpoint.part(f"head.{model.task.zero_shot_head}."):
        raise ValueError(
            f"{checkpoint.uri} was pre-trained without the {model.task.zero_shot_head} head that "
            f"{type(model.task).__name__} needs; fine-tune it first, or pre-train with "
            f"--task.{model.task.zero_shot_head}"
        )
    load_model(model.vlbert, checkpoint.part("vlbert."), checkpoint.uri)
    start_head(model.task, model.head, checkpoint, same_task=False)


def evaluate(
    recipe: Recipe, paths: Sequence[str], split: str, changes: Mapping[str, Any], out: str | None, world: World
) -> dict[str, Any]:
    """Evaluate checkpoints on a split. Returns the content of metrics.json on rank 0, and {} on other ranks.

    If an evaluation with the same settings exists, its metrics.json is returned and no model is loaded. Raises
    ValueError if a checkpoint is for another task, the split does not exist, or the folder has a different evaluation.
    """
    task_class = task_of(recipe.task)
    limit = 2 if task_class.joint_metrics else 1
    if len(paths) > limit:
        raise ValueError(f"CHECKPOINT names {len(paths)} checkpoints; recipe {recipe.name} takes at most {limit}")
    # Rank 0 finds them for all ranks, because a run in progress may write a newer checkpoint in the meantime.
    names = broadcast([_find_uri(path) for path in paths] if world.first else None, world)
    root = override_values(recipe, changes).data.root or names[0].rpartition("/runs/")[0]
    if not root:
        raise ValueError("data.root is not set; give --data.root FOLDER or --data.root s3://bucket/prefix")
    inputs = inputs_of(recipe, names, split, changes)
    store, folder = broadcast(output_folder(out, names, split, inputs) if world.first else None, world)
    uri = store.uri(folder.rstrip("/")) if folder else str(out)
    done = broadcast(world.first and read_summary(store, folder), world)
    if done:
        if world.first:
            print(f"evaluated already, with the same settings: {uri}; delete it to repeat it", flush=True)
            print_summary(done, uri)
        return done if world.first else {}
    checkpoints = [open_checkpoint(name) for name in names]
    if len(checkpoints) == 2 and checkpoints[0].task_settings == checkpoints[1].task_settings:
        raise ValueError(f"{' and '.join(names)} have the same settings; give one of them, or runs of two subtasks")
    changes = {**changes, "data.root": root}
    location = store, folder
    predicted = [_predict_split(recipe, each, split, changes, world, inputs, location) for each in checkpoints]
    if not world.first:
        return {}
    rows = [row for each in predicted for row in each.rows]
    if not rows:
        reason = last_reason([reason for each in predicted for _, reason in each.missing])
        raise ValueError(f"none of the {sum(len(each.examples) for each in predicted)} examples can be read{reason}")
    summary, files = summarise(predicted, rows, split)
    summary |= {"inputs": inputs, "files": [*files, PAGE], "code": version("vlbert")}
    from vlbert.evaluation.results_page import page  # here, because it imports jinja2, which training does not need

    write(store, folder, files | {PAGE: page(summary, predicted)}, summary)
    delete_blocks(store, folder)
    print_summary(summary, uri)
    return summary


def find_evaluation(recipe: Recipe, path: str, split: str, changes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the metrics.json of an evaluation of the checkpoint at `path`, or None if it is missing or unreadable."""
    try:
        names = [_find_uri(path)]
        return read_summary(*output_folder(None, names, split, inputs_of(recipe, names, split, changes)))
    except (*EXPECTED, OSError):
        return None


def _find_uri(path: str) -> str:
    store, folder = find_checkpoint(path)
    return store.uri(folder).rstrip("/")


def _predict_split(
    recipe: Recipe,
    checkpoint: Checkpoint,
    split: str,
    changes: Mapping[str, Any],
    world: World,
    inputs: dict[str, Any],
    location: tuple[ObjectStore, str],  # store and folder of the saved blocks
) -> SplitPredictions:
    """Predict a whole split with a checkpoint, on all ranks. Returns the predictions, gathered on rank 0."""
    model, recipe = load_task_model(checkpoint, changes, recipe)
    check_one_dataset(recipe)
    model, config = model.to(world.device), recipe.data
    has_splits = recipe.task.validate_on is not None
    dataset = (config.held_out or sorted(config.datasets))[0] if has_splits else split
    store = open_store(config.root)
    detector = config.detector or _find_detector(store, dataset, checkpoint)
    samples, pinned = open_samples(store, dataset, detector, None, world, open_cache(store, config))
    examples = model.task.examples(samples, split if has_splits else None)
    # Batches do not depend on the world size, and so metrics do not either.
    batch = max(1, min(model.task.evaluation_batch_size, config.batch // config.gradient_accumulation))
    data = ValidationData(samples, examples, model.task, config, recipe.model, world, None, batch)
    settings = replace(recipe.task, validate_on=split) if has_splits else recipe.task
    identity = inputs | {"code": version("vlbert"), "checkpoint": checkpoint.uri, "files": settings.hashes()}
    identity |= {"weights": checkpoint.folder.hashes.get(MODEL), "model": to_json(recipe.model)}
    identity |= {"data": pinned, "examples": len(examples), "batch": batch, "seed": config.seed}
    identity |= {"task": to_json(settings), "precision": recipe.precision}
    predicted = _predict_rest(model, data, recipe, world, Blocks(*location, identity))
    rows = gather_on_rank0(list(zip(predicted.numbers, predicted.rows, strict=True)), world)
    rows = sorted(rows, key=itemgetter(0))
    return SplitPredictions(
        checkpoint=checkpoint,
        recipe=recipe,
        task=model.task,
        samples=samples,
        pinned=pinned,
        examples=examples,
        numbers=[number for number, _ in rows],
        rows=model.task.assemble([row for _, row in rows]),
        shuffled=gather_on_rank0(predicted.shuffled, world),
        missing=sorted(gather_on_rank0(list(predicted.unreadable.items()), world), key=itemgetter(0)),
    )


def _predict_rest(model: TaskModel, data: ValidationData, recipe: Recipe, world: World, blocks: Blocks) -> Predicted:
    """Return the predictions for all batches of this rank. Those saved in `blocks` are not computed again."""
    firsts, saved = [data.start + index * data.size for index in range(len(data))], blocks.read()
    rest = [index for index, first in enumerate(firsts) if first not in saved]

    def after(index: int, predicted: Predicted) -> None:
        if blocks.add(firsts[index], predicted) and world.first:
            print(f"predicted {rest.index(index) + 1} of {len(rest)} batches", flush=True)

    new = predict_all(model, data, recipe, world, rest, after)
    total = Predicted()
    for predicted in (*(saved[first] for first in firsts if first in saved), new):
        total.add(predicted)
    return total


def _find_detector(store: ObjectStore, dataset: str, checkpoint: Checkpoint) -> str | None:
    """Return the id of the checkpoint's detector, or None if the dataset has no regions of this detector."""
    stage = next((saved["stage"] for saved in checkpoint.state.get("data", [])), None)  # the same in all datasets
    file = stage and next(iter(store.list(f"{dataset}/{stage}/")), None)
    return stage.removeprefix("regions/") if file else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `vlbert evaluate RECIPE CHECKPOINT SPLIT [--field value ...]`, in one process or under torchrun."""
    recipe_name, given = split_recipe(arguments, "vlbert evaluate", __doc__, RECIPES)
    name = f"vlbert evaluate {recipe_name}"
    try:
        base, given = parse_known(find_recipe(recipe_name, RECIPES), given)
    except ValueError as error:
        sys.exit(f"{name}: {error}")

    def run(
        checkpoint: Annotated[str, Positional, tyro.conf.arg(metavar="CHECKPOINT")],
        split: Annotated[str, Positional, tyro.conf.arg(metavar="SPLIT")],
        recipe: Annotated[Recipe, Flat] = base,
        out: str | None = None,
    ) -> None:
        """Evaluate a checkpoint on all examples of a split.

        Args:
            checkpoint: ROOT/runs/RUN or one of its steps; for VCR, up to two, joined by a comma
            split: name of the split in the task's files
            out: folder to write to; required if CHECKPOINT belongs to no run
        """
        changes, paths = named_fields(recipe, given), checkpoint.split(",")
        run_in_world(name, lambda world: evaluate(base, paths, split, changes, out, world))

    parse(run, given, name)


if __name__ == "__main__":
    main()
