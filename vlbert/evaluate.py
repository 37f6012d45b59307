"""Evaluate: all questions of one split -> predictions, metrics, the files that leaderboards take, and a page.

    torchrun --nproc-per-node N -m vlbert.evaluate RECIPE CHECKPOINT SPLIT [field=value ...] [--out FOLDER]

RECIPE is the one that CHECKPOINT was trained by; its data is read. CHECKPOINT is ROOT/runs/RUN/step-*, ROOT/runs/RUN
(the newest of the run), ROOT/runs/RUN/best or a local folder with a model and its task's head; two, joined by a comma,
are VCR's runs of answers and of rationales. SPLIT is named as in the task's files (val2014, testA, ...); a task without
splits takes the name of a dataset. Fields are the recipe's; data.root is the checkpoint's where it is not given, the
task's settings are those of the training. Writes to ROOT/runs/RUN/evaluations/SPLIT-step-*, metrics.json last, or to
FOLDER (s3:// too).
An evaluation that is there already, by the same settings, is left as it is, but for --again.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

from storage.object_store import ObjectStore, open_store
from storage.settings import differing_fields, from_json, override
from training.distributed import World, from_first, gather_on_first
from training.loop import EXPECTED, add_recipe_fields, find_recipe, run_in_world
from vlbert.checkpoint import Checkpoint, find_checkpoint, load_model, open_checkpoint, take_kept, vocabulary_of
from vlbert.config import Recipe, architecture
from vlbert.data.loading import ValidationData
from vlbert.data.samples import open_cache, open_samples
from vlbert.model.vlbert import VLBert
from vlbert.recipes import RECIPES
from vlbert.results import PAGE, Answered, find_place, inputs_of, name_of, results, say, write, written
from vlbert.tasks import make_task, settings_named, task_of, validation_split
from vlbert.tasks.base import TaskModel
from vlbert.validate import ask, because_of

_TOGETHER = 64  # questions of a batch at most: the same in every world, so that every world gives the same numbers
_TELL = 30.0  # seconds between lines of progress


def load_task_model(
    checkpoint: Checkpoint, overrides: Sequence[str] = (), recipe: Recipe | None = None
) -> tuple[TaskModel, Recipe]:
    """The model of vlbert.checkpoint.open_checkpoint with its head, in eval mode, and the recipe that it belongs to.

    That recipe is `recipe` or, where it is None, the one that the checkpoint was trained by; its task and model are
    always those that the checkpoint was trained with, but for what `overrides` ("task.folder=vqa") say; what the head's
    outputs mean (`kept` of the task) is as it was in training. ValueError where the checkpoint has no head, or is one
    of another task or architecture than `recipe` with the overrides.
    """
    config, where = checkpoint.config, checkpoint.where
    if not any(name.startswith("head.") for name in checkpoint.model):
        raise ValueError(f"{where} holds a VL-BERT without the head of a task: name a checkpoint of a training run")
    named = config.get("task", "no task")
    if recipe and named != type(recipe.task).__name__:
        raise ValueError(
            f"{where} was trained for another task than recipe {recipe.name}: its settings are {named}, the recipe's "
            f"{type(recipe.task).__name__}; name the recipe that it was trained by"
        )
    kind = settings_named(named)
    if kind is None:
        raise ValueError(f"{where} was trained for a task with {named}, which none of those known here has")
    settings = from_json(kind, checkpoint.task_settings, f"{where}/config.json")
    if recipe is None:
        values = config.get("recipe", {"name": Path(where).name}) | {"task": settings}
        recipe = replace(from_json(Recipe, values, f"{where}/config.json"), model=checkpoint.model_config)
    wanted = override(recipe, list(overrides)).model
    differing = differing_fields(architecture(wanted), architecture(checkpoint.model_config))
    if differing:
        name, here, there = differing[0]
        raise ValueError(
            f"{where} has another architecture than recipe {recipe.name}: model.{name} is {there} there and {here} "
            "here; name the recipe that it was trained by, with its model.* overrides"
        )
    recipe = override(replace(recipe, task=settings, model=checkpoint.model_config), list(overrides))
    task = make_task(recipe.task, vocabulary_of(checkpoint, recipe.vocabulary), checkpoint.num_classes)
    take_kept(task, checkpoint)
    model = TaskModel(VLBert(recipe.model, checkpoint.vocab_size, task.vocabulary), task)
    load_model(model, checkpoint.model, where)
    return model.eval(), recipe


def evaluate(
    recipe: Recipe,
    paths: Sequence[str],
    split: str,
    overrides: Sequence[str],
    out: str | None,
    world: World,
    again: bool = False,
) -> dict[str, Any]:
    """Ask each checkpoint of `paths` every question of the split; what metrics.json holds, on rank 0, elsewhere {}.

    What is there already by the same settings is returned as it is, without a look at the model, unless `again`.
    ValueError names what does not fit: a checkpoint of another task, a split that is not there, a place that holds an
    evaluation by other settings.
    """
    most = 2 if getattr(task_of(recipe.task), "joins", False) else 1
    if len(paths) > most:
        raise ValueError(f"CHECKPOINT names {len(paths)} checkpoints; recipe {recipe.name} takes {most} at most")
    places = [_find(path, world) for path in paths]
    root = override(recipe, list(overrides)).data.root or places[0].rpartition("/runs/")[0]
    if not root:
        raise ValueError("data.root is not set; give data.root=FOLDER or data.root=s3://bucket/prefix")
    inputs = inputs_of(recipe, places, split, overrides)
    store, folder = find_place(out, places, split, inputs) if world.first else (None, "")
    done = None if again else from_first(world.first and written(store, folder), world)
    if done:
        if world.first:
            place = store.where(folder.rstrip("/")) if folder else str(out)
            print(f"evaluated already, by the same settings: {place}; --again does it once more", flush=True)
            say(done, place)
        return done if world.first else {}
    checkpoints = [open_checkpoint(place) for place in places]
    if len(checkpoints) == 2 and checkpoints[0].task_settings == checkpoints[1].task_settings:
        raise ValueError(f"{' and '.join(places)} answer the same: name one of them, or two runs that join")
    changed = [f"task.{name}={_text(value)}" for name, value in getattr(task_of(recipe.task), "evaluation", {}).items()]
    overrides = [*changed, *overrides, f"data.root={root}"]
    answered = [_ask_all(recipe, checkpoint, split, overrides, world) for checkpoint in checkpoints]
    if not world.first:
        return {}
    rows = [row for one in answered for row in one.rows]
    if not rows:
        why = because_of([reason for one in answered for _, reason in one.missing])
        raise ValueError(f"none of the {sum(len(one.questions) for one in answered)} questions can be asked{why}")
    about, files = results(answered, rows, split)
    about |= {"inputs": inputs, "files": [*files, PAGE], "code": version("vlbert")}
    from vlbert.results_page import page  # here, because it brings jinja2, which training does without

    write(store, folder, files | {PAGE: page(about, answered)}, about)
    say(about, store.where(folder.rstrip("/")) if folder else str(out))
    return about


def find_evaluation(name: str, path: str, split: str, overrides: Sequence[str]) -> dict[str, Any] | None:
    """What metrics.json holds where this program, started with these arguments, would leave all as it is.

    None where there is no such evaluation yet, and where anything is wrong: the program then says what.
    """
    try:
        recipe = find_recipe(name, RECIPES)()
        override(recipe, list(overrides))
        store, folder = find_checkpoint(path)
        places = [store.where(folder).rstrip("/")]
        store, folder = find_place(None, places, split, inputs_of(recipe, places, split, overrides))
        return written(store, folder)
    except (*EXPECTED, OSError):
        return None


def _find(path: str, world: World) -> str:
    """Where the checkpoint lies, the same on every rank: a run that trains on may write a newer one meanwhile."""
    if not world.first:
        return from_first(None, world)
    store, folder = find_checkpoint(path)
    return from_first(store.where(folder).rstrip("/"), world)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _ask_all(recipe: Recipe, checkpoint: Checkpoint, split: str, overrides: Sequence[str], world: World) -> Answered:
    """One checkpoint's answers to the whole split, gathered on rank 0."""
    model, recipe = load_task_model(checkpoint, overrides, recipe)
    model, config = model.to(world.device), recipe.data
    has_splits = validation_split(recipe.task) is not None
    dataset = (config.held_out or config.dataset) if has_splits else split
    store = open_store(config.root)
    detector = config.detector or _its_detector(store, dataset, checkpoint)
    samples, pinned = open_samples(store, dataset, detector, None, world, open_cache(store, config))
    questions = model.task.questions(samples, split if has_splits else None)
    together = max(1, min(_TOGETHER, config.batch // config.gradient_accumulation))
    data = ValidationData(samples, questions, model.task, config, recipe.model.regions, world, None, together)
    if world.first:
        print(
            f"{name_of(checkpoint.where)}: {len(questions)} questions of {split} on {len(samples)} samples of "
            f"{dataset}/{pinned['stage']} (snapshot {pinned['snapshot']}), on {world.size} x {world.device.type}",
            flush=True,
        )
    answers = ask(model, data, recipe, world, _progress(len(questions), world))
    rows = sorted(gather_on_first(list(zip(answers.numbers, answers.rows, strict=True)), world), key=itemgetter(0))
    return Answered(
        checkpoint=checkpoint,
        recipe=recipe,
        task=model.task,
        samples=samples,
        pinned=pinned,
        questions=questions,
        numbers=[number for number, _ in rows],
        rows=[row for _, row in rows],
        shuffled=gather_on_first(answers.shuffled, world),
        missing=sorted(gather_on_first(list(answers.unreadable.items()), world), key=itemgetter(0)),
    )


def _progress(questions: int, world: World) -> Callable[[int], None]:
    """What prints now and then how far all ranks are, given how far the first is."""
    told = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told
        if world.first and time.monotonic() - told > _TELL:
            told = time.monotonic()
            print(f"asked {min(done * world.size, questions)} of {questions}", flush=True)

    return tell


def _its_detector(store: ObjectStore, dataset: str, checkpoint: Checkpoint) -> str | None:
    """The detector whose regions it was trained on, where the dataset has them."""
    stage = checkpoint.state.get("data", {}).get("stage")
    there = stage and next(iter(store.list(f"{dataset}/{stage}/")), None)
    return stage.removeprefix("regions/") if there else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vlbert.evaluate", description=__doc__)
    parser.add_argument("recipe", metavar="RECIPE", help=f"{', '.join(sorted(RECIPES))}, or MODULE:FUNCTION")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="?", help="one, or two joined by a comma")
    parser.add_argument("split", metavar="SPLIT", nargs="?", help="as the task's files name it")
    add_recipe_fields(parser, RECIPES, arguments)
    parser.add_argument("--out", metavar="FOLDER", help="where to write; needed where CHECKPOINT belongs to no run")
    parser.add_argument("--again", action="store_true", help="also where it is done already, by the same settings")
    options = parser.parse_intermixed_args(arguments)
    name = f"{parser.prog} {options.recipe}"
    try:
        for given in ("checkpoint", "split"):
            value = getattr(options, given)
            if not value or re.match(r"[a-z_.]+=", value):
                raise ValueError(f"{given.upper()} is missing; say RECIPE CHECKPOINT SPLIT, then any field=value")
        recipe = find_recipe(options.recipe, RECIPES)()
        override(recipe, options.fields)
    except ValueError as error:
        sys.exit(f"{name}: {error}")
    paths, given = options.checkpoint.split(","), (options.split, options.fields, options.out)
    run_in_world(name, lambda world: evaluate(recipe, paths, *given, world, options.again))


if __name__ == "__main__":
    main()
