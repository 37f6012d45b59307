"""The trainings of a comparison, and how a process does one of them."""

import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from storage.object_store import ObjectStore, open_store
from storage.runs import as_json, checkpoints, folder_of, read_state
from storage.safe_json import parse_json
from storage.settings import override
from training import distributed
from training.checkpoint import MODEL
from training.distributed import World
from training.loading import EXPECTED
from training.precision import autocast, in_precision_of
from training.program import STOPPED, find_recipe
from training.stopping import Stopped
from vlbert.checkpoint import open_checkpoint, read_config_at
from vlbert.comparison.plans import Plan, Training
from vlbert.config import Recipe
from vlbert.data.loading import TrainingData
from vlbert.evaluation.evaluate import evaluate, find_evaluation
from vlbert.initial_weights import check_complete, make_model
from vlbert.model.heads import count_parameters
from vlbert.recipes import RECIPES
from vlbert.resume import find_complete, open_data
from vlbert.train import train

PRETRAINING = "pretraining"  # the scope, and in names of runs the task, of a pre-training
# Fields of a training that a comparison sets itself.
_OWN = ("run", "init_from", "data.seed")


@dataclass(frozen=True)
class Cell:
    """One training and, of a task, its evaluation.

    task     None: a pre-training
    needs    the run that it starts from; None: it starts without one
    steps    of the training
    split    that it is evaluated on
    counted  whether its FLOPs are counted
    """

    variant: str
    task: str | None
    seed: int
    recipe: str
    run: str
    fields: tuple[str, ...]
    needs: str | None
    steps: int
    split: str | None
    counted: bool

    @property
    def kind(self) -> tuple[str, str | None]:
        """What takes about the same time with every seed."""
        return self.variant, self.task

    @property
    def evaluation_fields(self) -> list[str]:
        """Those that say what is read, and by which model; not the seed, with which the order would change."""
        parts = ("data.", "task.", "model.")
        return [one for one in self.fields if one.startswith(parts) and not one.startswith("data.seed=")]

    def checkpoint(self, root: str) -> str:
        return open_store(root, write=False).where(folder_of(self.run, self.steps))

    @property
    def settings(self) -> Recipe:
        return override(find_recipe(self.recipe, RECIPES)(), list(self.fields))


def cells_of(plan: Plan, root: str, fields: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All trainings, those that others need before these, a seed after the other.

    fields: [SCOPE:]field=value; SCOPE is `pretraining`, a task or a variant, without one it is for all. ValueError
    where a recipe or a field does not exist or fit.
    """
    given = [_scoped(one, plan) for one in fields]
    found = []
    for seed in seeds:
        pretrained = {
            name: _cell(plan, root, given, name, None, variant.pretraining, seed, None, seed == seeds[0])
            for name, variant in plan.variants.items()
            if variant.pretraining
        }
        found += pretrained.values()
        found += [
            _cell(plan, root, given, name, task, training, seed, pretrained.get(name), seed == seeds[0])
            for task in plan.tasks
            for name, variant in plan.variants.items()
            if (training := variant.finetunings.get(task))
        ]
    return found


def _scoped(text: str, plan: Plan) -> tuple[str | None, str]:
    scope, separator, rest = text.partition("=")[0].rpartition(":")
    if not separator:
        return None, text
    if scope not in (PRETRAINING, *plan.tasks, *plan.variants):
        raise ValueError(
            f"{text}: plan {plan.name} has no {scope}; a field is for {PRETRAINING}, a task "
            f"({', '.join(plan.tasks)}) or a variant ({', '.join(plan.variants)})"
        )
    return scope, text[len(scope) + 1 :]


def _cell(
    plan: Plan,
    root: str,
    given: Sequence[tuple[str | None, str]],
    variant: str,
    task: str | None,
    training: Training,
    seed: int,
    needs: Cell | None,
    counted: bool,
) -> Cell:
    scopes = (None, task or PRETRAINING, variant)
    changes = [one.replace("{root}", root) for one in training.changes]
    changes += [one for scope in scopes for of, one in given if of == scope]
    named = {one.partition("=")[0]: scope for scope in scopes for of, one in given if of == scope and scope}
    own = next((one for one in changes if one.partition("=")[0] in (*_OWN, "data.root")), None)
    if own:
        name = own.partition("=")[0]
        raise ValueError(f"{_with_scope(own, named)}: a comparison sets {name} itself; leave it out")
    run = f"compare-{plan.name}-{variant}-{task or PRETRAINING}-seed{seed}"
    make = find_recipe(training.recipe, RECIPES)
    start = [f"init_from={needs.checkpoint(root)}"] if needs else []
    try:
        recipe = override(make(), [*changes, *start])
    except ValueError as error:
        raise ValueError(_with_scope(str(error), named)) from error
    if task and not needs and not recipe.bert:
        start = ["random_init=true"]
    fields = (*changes, f"data.root={root}", f"data.seed={seed}", f"run={run}", *start)
    recipe = override(make(), list(fields))
    check_complete(recipe)
    return Cell(
        variant=variant,
        task=task,
        seed=seed,
        recipe=training.recipe,
        run=run,
        fields=fields,
        needs=needs.run if needs else None,
        steps=recipe.steps,
        split=plan.tasks[task].split if task else None,
        counted=counted,
    )


def _with_scope(text: str, scopes: Mapping[str, str]) -> str:
    """A text that begins with the name of a field, with the scope before it that the field was given with."""
    scope = next((scope for name, scope in scopes.items() if re.match(rf"{re.escape(name)}(?![\w.])", text)), None)
    return f"{scope}:{text}" if scope else text


def check_steps(cell: Cell, root: str) -> None:
    """ValueError where it was begun with another number of steps: the learning rate would not be that of either."""
    store = open_store(root, write=False)
    saved = checkpoints(store, cell.run)
    try:
        before = read_config_at(store, saved[-1])["recipe"]["steps"] if saved else cell.steps
    except (*EXPECTED, OSError):  # the training says what is wrong
        return
    if before != cell.steps:
        raise ValueError(
            f"{store.where(f'runs/{cell.run}')} was trained with steps = {before}, now they are {cell.steps}, and such "
            "trainings cannot be compared: set steps back, or delete this folder and those of all trainings of its kind"
        )


def is_done(cell: Cell, root: str) -> bool:
    """Whether it is trained and evaluated. Loads no tensors."""
    if not find_complete(cell.recipe, cell.fields, processes=1):
        return False
    where = cell.checkpoint(root)
    return cell.task is None or find_evaluation(cell.recipe, where, cell.split, cell.evaluation_fields) is not None


def folder_of_evaluation(cell: Cell) -> str:
    """Of its files, under the root."""
    run, step = folder_of(cell.run, cell.steps).rsplit("/", 1)
    return f"{run}/evaluations/{cell.split}-{step}"


# --- costs ------------------------------------------------------------------------------------------------------------


def costs_file(plan: Plan, cell: Cell) -> str:
    return f"comparisons/{plan.name}/costs/{cell.run}.json"


def read_costs(store: ObjectStore, path: str) -> dict[str, Any]:
    """What a cell took, over all its starts, and `start` (note_start). The time of one that was killed is not in it."""
    return parse_json(store.get(path), store.where(path)) if store.exists(path) else {}


def note_start(cell: Cell, root: str, costs: str) -> None:
    """Keep in `costs` from which weights it starts, their sha256; ValueError where it was trained from others.

    One that has a checkpoint and no such note is taken as it is.
    """
    if not cell.needs:
        return
    store = open_store(root)
    now = read_state(store, _folder_of_start(cell))["files"][MODEL]["sha256"]
    spent = read_costs(store, costs)
    before = spent.get("start", now)
    if before != now and checkpoints(store, cell.run):
        raise ValueError(
            f"{cell.run} was trained from weights of {cell.needs} that are no longer there: it was pre-trained anew "
            f"since; delete {store.where(f'runs/{cell.run}')}, and it is trained again"
        )
    if before != now:
        spent = {}  # of the run that was deleted
    if spent.get("start") != now:
        store.put(costs, as_json(spent | {"start": now}))


def _folder_of_start(cell: Cell) -> str:
    """Of the checkpoint that it starts from, under the root."""
    return f"runs/{cell.settings.init_from.rpartition('/runs/')[2]}"


def count_step(recipe: Recipe, world: World) -> dict[str, int]:
    """`parameters`, `trained` (those that learn) and `flops`, of the first step of a run, forward and backward.

    flops: two for each multiplication with its addition, in matrix products, convolutions and attention, as
    torch.utils.flop_counter counts them. Norms, activations, RoIAlign and the optimizer are not in it.
    """
    start = open_checkpoint(recipe.init_from) if recipe.init_from else None
    data = open_data(recipe, open_store(recipe.data.root), None, start, world)
    model = make_model(recipe, data.task, data.vocabulary, start, None, lambda line: None).to(world.device).train()
    training = TrainingData(data.datasets, data.task, recipe.data, recipe.model.regions, world, data.corpus)
    with in_precision_of(recipe), FlopCounterMode(display=False) as counter:
        for part in training[0]:
            with autocast(recipe, world):
                losses = model(part.to(world.device))
            sum(value for value, count in losses.values() if count and value.requires_grad).backward()
    total, trained = count_parameters(model)
    return {"parameters": total, "trained": trained, "flops": counter.get_total_flops()}


# --- a process --------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, root: str, costs: str, output: Path, environment: Mapping[str, str], threads: int) -> None:
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
        _do(cell, root, costs)
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


def _do(cell: Cell, root: str, costs: str) -> None:
    world, recipe = distributed.start(), cell.settings
    store, began, cpu = open_store(root), time.monotonic(), _cpu_seconds()
    note_start(cell, root, costs)
    spent = read_costs(store, costs)
    try:
        train(recipe, world)
        if cell.counted and "flops" not in spent:
            before = time.monotonic(), _cpu_seconds()
            spent |= count_step(recipe, world)
            began, cpu = began + time.monotonic() - before[0], cpu + _cpu_seconds() - before[1]
    finally:
        spent["seconds"] = spent.get("seconds", 0.0) + time.monotonic() - began
        spent["cpu_seconds"] = spent.get("cpu_seconds", 0.0) + _cpu_seconds() - cpu
        store.put(costs, as_json(spent))
    if cell.split:
        make = find_recipe(cell.recipe, RECIPES)
        evaluate(make(), [cell.checkpoint(root)], cell.split, cell.evaluation_fields, None, world)


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended: workers that load data."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _stop_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
