"""Writes the checkpoints of a run, removes old ones, and loads their tensors; what they are, storage/runs.py says.

Files are safetensors and JSON, never pickles: see vlbert/checkpoint.py and detectors/train.py. Kept are the
newest, and the best: ROOT/runs/<run>/best.json names it.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from storage.object_store import ObjectStore
from storage.runs import (
    CHECKPOINT_VERSION,
    STATE,
    Best,
    Folder,
    checkpoints,
    folder_of,
    named_best,
    path_of_best,
    read_state,
    sealed_json,
    way_out,
)
from storage.safe_json import printable
from training.writer import Writer

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def write_checkpoint(
    writer: Writer,
    run: str,
    step: int,
    steps: int,
    files: Mapping[str, bytes | Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
    metric: str | None,
) -> str:
    """Have the checkpoint of step `step` of `steps` written, state.json last, with the hashes of the others, and then
    those removed that are not to be kept; returns its path when its tensors are copied, long before it is whole.

    state["validation"]: what a validation after the same step measured, by name.
    """
    folder, state = folder_of(run, step), {"validation": {}, **copy.deepcopy(dict(state))}  # a training changes it

    def settle_and_log() -> None:
        best = settle(writer.store, run, keep, metric, writer.log)
        so_far = f"  best so far: {best.metric} {best.value:.3f} (step {best.step})" if best else ""
        writer.log(f"step {step}/{steps}  saved {writer.saved}{so_far}")

    state["version"] = CHECKPOINT_VERSION
    writer.checkpoint(folder, {**files, STATE: lambda hashes: sealed_json({**state, "files": hashes})}, settle_and_log)
    return folder


def settle(
    store: ObjectStore, run: str, keep: int, metric: str | None, log: Callable[[str], None] = print
) -> Best | None:
    """Name the best checkpoint in best.json, and remove all but that and the `keep` newest.

    Where a damaged file hides which is the best this says so, and removes none: no run shall end over that.
    """
    try:
        before = named_best(store, run)
        best = find_best(store, run, metric) if metric else None
    except ValueError as error:
        log(f"no checkpoint is removed, for the best is not known: {error}")
        return None
    if best and best != before:
        store.put(path_of_best(run), sealed_json(asdict(best)))
    remove_old(store, run, keep, best)
    return best


def find_best(store: ObjectStore, run: str, metric: str) -> Best | None:
    """The best of the whole checkpoints of which a validation after the same step found the metric, the oldest among
    equals; None where there is none. ValueError names a state.json that cannot be read."""
    found = []
    for folder in checkpoints(store, run):
        state = read_state(store, folder)
        value = state["validation"].get(metric)
        if value is not None and math.isfinite(value):
            found.append(Best(state["step"], metric, value, folder))
    return max(found, key=lambda best: best.value, default=None)


def remove_old(store: ObjectStore, run: str, keep: int, best: Best | None) -> None:
    """Delete all checkpoints but the `keep` newest and the best, and what was never finished before the newest.

    state.json goes first, so that no half checkpoint looks whole.
    """
    whole = checkpoints(store, run)
    if not whole:
        return
    kept = {*whole[-keep:], *([best.checkpoint] if best else [])}
    for folder in whole:
        if folder not in kept:
            store.delete(f"{folder}/{STATE}")
    pattern = re.compile(rf"(runs/{re.escape(run)}/step-\d{{7}})/.+")
    for info in list(store.list(f"runs/{run}/step-")):
        found = pattern.fullmatch(info.path)
        if found and found[1] not in kept and found[1] < whole[-1]:
            store.delete(info.path)


def load_tensors(folder: Folder, name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError names it where it is none, or not what was written."""
    data = folder.get(name)
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        way = way_out(folder.store, folder.path)
        raise ValueError(
            f"{folder.where_of(name)} is torn or no safetensors file ({printable(error)}); {way}"
        ) from error


def load_optimizer(folder: Folder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's moments and step counts, on every rank alike; ValueError where they are another model's."""
    parameters = dict(model.named_parameters())
    for entry, tensor in load_tensors(folder, OPTIMIZER).items():
        name, _, quantity = entry.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (tensor.shape and tensor.shape != parameter.shape):
            shape = None if parameter is None else tuple(parameter.shape)
            raise ValueError(
                f"{folder.where_of(OPTIMIZER)} has {entry} as {tuple(tensor.shape)}, the model's parameter is {shape}: "
                "it is of another model; start another run (run=NAME), from this checkpoint (init_from=...) or not"
            )
        if quantity != "step":
            # In the parameter's own layout (channels last): the fused kernel walks both in the order of memory.
            tensor = torch.empty_like(parameter).copy_(tensor)
        optimizer.state[parameter][quantity] = tensor.to(parameter.device)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """ "<parameter>/<quantity>" -> tensor, the optimizer's own."""
    return {
        f"{name}/{quantity}": value
        for name, parameter in model.named_parameters()
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }
