"""The training runs of a comparison, called cells, and the process that runs one of them."""

import dataclasses
import os
import shlex
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import torch

from storage.object_store import ObjectStore, open_store
from storage.runs import best_checkpoint, checkpoints, folder_of, read_state
from storage.settings import named_fields
from training import distributed
from training.checkpoint import MODEL
from training.loading import EXPECTED
from training.program import STOPPED, make_recipe
from training.stopping import Stopped
from vlbert.checkpoint import read_checkpoint
from vlbert.comparison.plans import PRETRAINING, ComparedTask, Plan, Training
from vlbert.config import Recipe
from vlbert.evaluation.evaluate import evaluate, find_evaluation
from vlbert.initial_weights import check_complete
from vlbert.recipes import RECIPES
from vlbert.resume import finish_if_complete
from vlbert.train import train

# Arguments of a training run that a comparison sets itself.
_OWN = ("--run_name", "--init_from", "--data.seed", "--data.root")


@dataclass(frozen=True)
class Cell:
    """One training run of a comparison and, if it fine-tunes on a task, its evaluation.

    Attributes:
        task: Name of the task to fine-tune on, or None for a pre-training run.
        fields: Command-line arguments with which the recipe was made.
        needs: Pre-training cell whose checkpoint this cell starts from, or None if there is none.
        compared: How the run is evaluated, or None for a pre-training run, which is not evaluated.
    """

    variant: str
    task: str | None
    seed: int
    recipe: Recipe
    fields: tuple[str, ...]
    needs: "Cell | None"
    compared: ComparedTask | None

    @property
    def run(self) -> str:
        return self.recipe.run

    @property
    def checkpoint(self) -> str:
        """Folder of the run's last checkpoint, relative to the root."""
        return folder_of(self.run, self.recipe.steps)

    def evaluated(self, store: ObjectStore) -> str:
        """Return the folder of the checkpoint to evaluate, relative to the root."""
        best = best_checkpoint(store, self.run) if self.compared and self.compared.best else None
        return best.checkpoint if best else self.checkpoint

    def evaluation(self, store: ObjectStore) -> str:
        """Return the folder of the run's evaluation, relative to the root."""
        run, step = self.evaluated(store).rsplit("/", 1)
        return f"{run}/evaluations/{self.compared and self.compared.split}-{step}"

    @property
    def evaluation_changes(self) -> dict[str, Any]:
        """Changes to data, task and model fields, except the seed, by name. They apply to the evaluation as well."""
        changes = named_fields(self.recipe, self.fields).items()
        parts = ("data.", "task.", "model.")
        return {name: value for name, value in changes if name.startswith(parts) and name != "data.seed"}


def cells_of(plan: Plan, root: str, fields: Sequence[str]) -> list[Cell]:
    """Return all cells of a plan, ordered by seed, with pre-training before the fine-tuning that depends on it.

    `fields` are `[SCOPE:]field=value`, or `[SCOPE:]field` for a flag. SCOPE is `pretraining`, a task or a variant.
    Without a scope, the field is set in all cells. Several values of a field are separated and quoted as in a shell.
    Raises ValueError if a recipe or field does not exist or is invalid.
    """
    scoped, cells = [_parse_field(field, plan) for field in fields], []
    for seed in plan.seeds:
        pretrained = {
            name: _make_cell(plan, root, scoped, name, None, variant.pretraining, seed, None)
            for name, variant in plan.variants.items()
            if variant.pretraining
        }
        cells += pretrained.values()
        cells += [
            _make_cell(plan, root, scoped, name, task, training, seed, pretrained.get(name))
            for task in plan.tasks
            for name, variant in plan.variants.items()
            if (training := variant.finetunings.get(task))
        ]
    if twice := [run for run, count in Counter(cell.run for cell in cells).items() if count > 1]:
        raise ValueError(f"plan {plan.name}: several runs are called {twice[0]}; put {{seed}} into Training.run")
    return cells


def _parse_field(text: str, plan: Plan) -> tuple[str | None, list[str]]:
    """Split `[SCOPE:]field=value` into the scope (None if there is none) and the command-line arguments."""
    name, _, value = text.partition("=")
    scope, separator, field = name.rpartition(":")
    if separator and scope not in (PRETRAINING, *plan.tasks, *plan.variants):
        raise ValueError(
            f"{text}: plan {plan.name} has no {scope}; a field is for {PRETRAINING}, for a task "
            f"({', '.join(plan.tasks)}) or for a variant ({', '.join(plan.variants)})"
        )
    try:
        return scope or None, [f"--{field}", *shlex.split(value)]
    except ValueError as error:
        raise ValueError(f"{text}: {error}; quote a value with spaces or quotes as for a shell") from error


def _make_cell(
    plan: Plan,
    root: str,
    scoped: Sequence[tuple[str | None, list[str]]],
    variant: str,
    task: str | None,
    training: Training,
    seed: int,
    needs: Cell | None,
) -> Cell:
    name = training.run or f"compare-{plan.name}-{variant}-{task or PRETRAINING}-seed{{seed}}"
    run = name.replace("{seed}", str(seed))
    changes = [argument.replace("{root}", root) for argument in training.changes]
    for wanted in (None, task or PRETRAINING, variant):
        changes += [argument for scope, arguments in scoped if scope == wanted for argument in arguments]
    if own := [argument for argument in changes if argument.partition("=")[0] in _OWN]:
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
    return Cell(variant, task, seed, recipe, tuple(changes), needs, plan.tasks[task] if task else None)


def is_done(cell: Cell, root: str) -> bool:
    """Return True if a cell is evaluated and was trained from the current pre-trained weights. Loads no tensors."""
    if not finish_if_complete(cell.recipe, processes=1):
        return False
    store = open_store(root, write=False)
    if cell.needs and not _started_from(store, cell.checkpoint, cell.needs):
        return False
    if cell.compared is None:
        return True
    checkpoint = store.uri(cell.evaluated(store))
    return find_evaluation(cell.recipe, checkpoint, cell.compared.split, cell.evaluation_changes) is not None


def _started_from(store: ObjectStore, checkpoint: str, pretraining: Cell) -> bool:
    """Return True if a fine-tuning checkpoint was trained from the current weights of `pretraining`."""
    weights = read_state(store, pretraining.checkpoint)["files"][MODEL]["sha256"]
    return read_state(store, checkpoint)["init_from"]["model"] == weights


# --- a process --------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, root: str, output: Path, environment: Mapping[str, str], threads: int) -> None:
    """Train and evaluate one cell, as the main function of a process. A partly trained cell is resumed.

    Stdout and stderr go to the file `output`. After an error, the reason is written to the same path with the suffix
    .reason. The exit status is 0, or 1 after an error, or STOPPED after SIGTERM. If the parent ends, the process sends
    itself SIGTERM.
    """
    os.environ |= environment
    with open(output, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        _train_and_evaluate(cell, root)
    except Stopped as stopped:
        print(stopped, flush=True)
        sys.exit(STOPPED)
    except Exception as error:  # noqa: BLE001  any error: the comparison reports it and continues with other cells
        reason = str(error)
        if not isinstance(error, (*EXPECTED, OSError)):
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        output.with_suffix(".reason").write_text(reason, encoding="utf-8")
        sys.exit(1)


def _train_and_evaluate(cell: Cell, root: str) -> None:
    """Train and evaluate a cell. Raises ValueError if its `steps` or initial weights changed after its run began."""
    world, store = distributed.start(), open_store(root)
    saved, uri = checkpoints(store, cell.run), store.uri(f"runs/{cell.run}")
    if saved and (steps := read_checkpoint(store, saved[-1], False).config["recipe"]["steps"]) != cell.recipe.steps:
        raise ValueError(
            f"{uri} was trained with steps={steps}, but the recipe has {cell.recipe.steps}, and so another learning "
            "rate schedule. Restore the steps, or delete this folder and those of all runs to compare it with"
        )
    if cell.needs and saved and not _started_from(store, saved[-1], cell.needs):
        raise ValueError(
            f"{cell.run} was trained from weights of {cell.needs.run} that no longer exist: it was pre-trained again; "
            f"delete {uri} to train it again"
        )
    train(cell.recipe, world)
    if cell.compared:
        checkpoint = store.uri(cell.evaluated(store))
        evaluate(cell.recipe, [checkpoint], cell.compared.split, cell.evaluation_changes, None, world)


def _stop_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
