"""The trainings of a comparison, and how a process does one of them."""

import dataclasses
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import torch

from storage.object_store import ObjectStore, open_store
from storage.runs import checkpoints, folder_of, read_state
from storage.settings import named_fields
from training import distributed
from training.checkpoint import MODEL
from training.loading import EXPECTED
from training.program import STOPPED, make_recipe
from training.stopping import Stopped
from vlbert.checkpoint import read_config_at
from vlbert.comparison.plans import PRETRAINING, Plan, Training
from vlbert.config import Recipe
from vlbert.evaluation.evaluate import evaluate, find_evaluation
from vlbert.initial_weights import check_complete
from vlbert.recipes import RECIPES
from vlbert.resume import find_complete
from vlbert.train import train

# Fields of a training that a comparison sets itself.
_OWN = ("--run_name", "--init_from", "--data.seed", "--data.root")


@dataclass(frozen=True)
class Cell:
    """One training and, of a task, its evaluation.

    task    None: a pre-training
    fields  what the command line changes of the recipe, which is made with them
    needs   the pre-training that it starts from; None: it starts without one
    split   that it is evaluated on
    """

    variant: str
    task: str | None
    seed: int
    recipe: Recipe
    fields: tuple[str, ...]
    needs: "Cell | None"
    split: str | None

    @property
    def run(self) -> str:
        return self.recipe.run

    @property
    def checkpoint(self) -> str:
        """The folder of its last checkpoint, under the root."""
        return folder_of(self.run, self.recipe.steps)

    @property
    def evaluation(self) -> str:
        """The folder of its evaluation, under the root."""
        run, step = self.checkpoint.rsplit("/", 1)
        return f"{run}/evaluations/{self.split}-{step}"

    @property
    def evaluation_changes(self) -> dict[str, Any]:
        """Those that say what is read, and by which model; not the seed, with which the order would change."""
        changes = named_fields(self.recipe, self.fields).items()
        parts = ("data.", "task.", "model.")
        return {name: value for name, value in changes if name.startswith(parts) and name != "data.seed"}


def cells_of(plan: Plan, root: str, fields: Sequence[str]) -> list[Cell]:
    """All trainings, those that others need before these, a seed after the other.

    fields: [SCOPE:]field=value, or [SCOPE:]field of a flag; SCOPE is `pretraining`, a task or a variant, without one it
    is for all. Several words are several values, as a shell splits them. ValueError where a recipe or a field does not
    exist or fit.
    """
    given, found = [_scoped(one, plan) for one in fields], []
    for seed in plan.seeds:
        pretrained = {
            name: _cell(plan, root, given, name, None, variant.pretraining, seed, None)
            for name, variant in plan.variants.items()
            if variant.pretraining
        }
        found += pretrained.values()
        found += [
            _cell(plan, root, given, name, task, training, seed, pretrained.get(name))
            for task in plan.tasks
            for name, variant in plan.variants.items()
            if (training := variant.finetunings.get(task))
        ]
    return found


def _scoped(text: str, plan: Plan) -> tuple[str | None, list[str]]:
    """The scope of one field, and its arguments."""
    name, _, value = text.partition("=")
    scope, separator, field = name.rpartition(":")
    if separator and scope not in (PRETRAINING, *plan.tasks, *plan.variants):
        raise ValueError(
            f"{text}: plan {plan.name} has no {scope}; a field is for {PRETRAINING}, a task "
            f"({', '.join(plan.tasks)}) or a variant ({', '.join(plan.variants)})"
        )
    try:
        return scope or None, [f"--{field}", *shlex.split(value)]
    except ValueError as error:
        raise ValueError(f"{text}: {error}; quote a value with spaces or quotes as for a shell") from error


def _cell(
    plan: Plan,
    root: str,
    given: Sequence[tuple[str | None, list[str]]],
    variant: str,
    task: str | None,
    training: Training,
    seed: int,
    needs: Cell | None,
) -> Cell:
    run = f"compare-{plan.name}-{variant}-{task or PRETRAINING}-seed{seed}"
    changes = [one.replace("{root}", root) for one in training.changes]
    scopes = (None, task or PRETRAINING, variant)
    changes += [one for scope in scopes for of, arguments in given if of == scope for one in arguments]
    if own := [one for one in changes if one.partition("=")[0] in _OWN]:
        raise ValueError(f"{run}: {own[0]}: a comparison sets this field itself; leave it out")
    changes += [f"--data.root={root}", f"--data.seed={seed}", f"--run_name={run}"]
    changes += [f"--init_from={open_store(root, write=False).uri(needs.checkpoint)}"] if needs else []
    try:
        recipe = make_recipe(training.recipe, changes, RECIPES)
        if task and not needs and not recipe.bert:
            recipe = dataclasses.replace(recipe, random_init=True)
        check_complete(recipe)
    except ValueError as error:
        raise ValueError(f"{run}: {error}") from error
    return Cell(variant, task, seed, recipe, tuple(changes), needs, plan.tasks[task].split if task else None)


def is_done(cell: Cell, root: str) -> bool:
    """Whether it is trained, from the weights that its pre-training has now, and evaluated. Loads no tensors."""
    if not find_complete(cell.recipe, processes=1):
        return False
    store = open_store(root, write=False)
    if cell.needs and _start_of(store, cell.checkpoint) != _weights_of(store, cell.needs):
        return False
    if cell.task is None:
        return True
    return find_evaluation(cell.recipe, store.uri(cell.checkpoint), cell.split, cell.evaluation_changes) is not None


def _start_of(store: ObjectStore, checkpoint: str) -> str:
    """The sha256 of the weights that a fine-tuning started from."""
    return read_state(store, checkpoint)["init_from"]["model"]


def _weights_of(store: ObjectStore, cell: Cell) -> str:
    return read_state(store, cell.checkpoint)["files"][MODEL]["sha256"]


# --- a process --------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, root: str, output: Path, environment: Mapping[str, str], threads: int) -> None:
    """All of a process that does one cell: trains, or goes on, and evaluates what is left to do.

    Its output goes to `output`, and where it fails the reason to `output` with the suffix .reason. Ends with it: 0, 1,
    or STOPPED after SIGTERM. When the process that started it ends, it does as after SIGTERM.
    """
    os.environ |= environment
    with open(output, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        _do(cell, root)
    except Stopped as stopped:
        print(stopped, flush=True)
        sys.exit(STOPPED)
    except Exception as error:  # noqa: BLE001  of whatever kind: the comparison names it, and the other cells go on
        reason = str(error)
        if not isinstance(error, (*EXPECTED, OSError)):
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        output.with_suffix(".reason").write_text(reason, encoding="utf-8")
        sys.exit(1)


def _do(cell: Cell, root: str) -> None:
    """Train and evaluate a cell. ValueError where it was begun from other weights, or with another number of steps, for
    which the learning rate had another schedule."""
    world, store = distributed.start(), open_store(root)
    begun, where = checkpoints(store, cell.run), store.uri(f"runs/{cell.run}")
    if begun and (steps := read_config_at(store, begun[-1])["recipe"]["steps"]) != cell.recipe.steps:
        raise ValueError(
            f"{where} was trained with steps = {steps}, now they are {cell.recipe.steps}, and such trainings cannot be "
            "compared: set steps back, or delete this folder and those of all trainings of its kind"
        )
    if cell.needs and begun and _start_of(store, begun[-1]) != _weights_of(store, cell.needs):
        raise ValueError(
            f"{cell.run} was trained from weights of {cell.needs.run} that are no longer there: it was pre-trained "
            f"anew since; delete {where}, and it is trained again"
        )
    train(cell.recipe, world)
    if cell.split:
        evaluate(cell.recipe, [store.uri(cell.checkpoint)], cell.split, cell.evaluation_changes, None, world)


def _stop_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
