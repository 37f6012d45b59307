"""The checkpoints of a run: folders ROOT/runs/<run>/step-0000100, each whole once its state.json is there.

Files are safetensors and JSON, never pickles; which ones, vlbert/checkpoint.py and detectors/train.py say. Kept are the
newest, and the best: ROOT/runs/<run>/best.json names it.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from detectors.record import read_metrics
from detectors.writer import Writer
from storage.objects import Objects


@dataclass(frozen=True)
class Best:
    """The checkpoint with the highest value of a metric; the path of its folder is relative to the root."""

    step: int
    metric: str
    value: float
    checkpoint: str


def checkpoints(objects: Objects, run: str) -> list[str]:
    """The whole checkpoints of a run, oldest first."""
    pattern = re.compile(rf"runs/{re.escape(run)}/step-\d{{7}}/state\.json")
    found = [info.path for info in objects.list(f"runs/{run}/") if pattern.fullmatch(info.path)]
    return sorted(path.removesuffix("/state.json") for path in found)


def folder_of(run: str, step: int) -> str:
    return f"runs/{run}/step-{step:07d}"


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
    """Have the checkpoint of step `step` of `steps` written, state.json last, and then those removed that are not to be
    kept; returns its path when its tensors are copied, long before it is whole."""
    folder = folder_of(run, step)

    def tell() -> None:
        best = settle(writer.objects, run, keep, metric, writer.say)
        so_far = f"  best so far: {best.metric} {best.value:.3f} (step {best.step})" if best else ""
        writer.say(f"step {step}/{steps}  saved {writer.saved}{so_far}")

    writer.checkpoint(folder, {**files, "state.json": as_json(dict(state))}, tell)
    return folder


def settle(
    objects: Objects, run: str, keep: int, metric: str | None, say: Callable[[str], None] = print
) -> Best | None:
    """Name the best checkpoint in best.json, and remove all but that and the `keep` newest.

    Where a garbled file hides which is the best this says so, and removes none: no run shall end over its log.
    """
    try:
        before = named_best(objects, run)
        best = find_best(objects, run, metric) if metric else None
    except ValueError as error:
        say(f"no checkpoint is removed, for the best is not known: {error}")
        return None
    if best and best != before:
        objects.put(_path_of_best(run), as_json(asdict(best)))
    remove_old(objects, run, keep, best)
    return best


def find_best(objects: Objects, run: str, metric: str) -> Best | None:
    """The best of the whole checkpoints of which a validation after the same step found the metric, the oldest among
    equals; None where there is none. What best.json says of one counts, too: metrics.jsonl may have lost its line."""
    lines = read_metrics(objects, run, "validation")
    before = named_best(objects, run)
    values = {before.checkpoint: (before.step, before.value)} if before and before.metric == metric else {}
    values |= {folder_of(run, line["step"]): (line["step"], line[metric]) for line in lines if metric in line}
    found = [(folder, *values[folder]) for folder in checkpoints(objects, run) if folder in values]
    found = [Best(step, metric, value, folder) for folder, step, value in found if math.isfinite(value)]
    return max(found, key=lambda best: best.value, default=None)


def named_best(objects: Objects, run: str) -> Best | None:
    """What best.json names, be it there or not; None where there is no such file."""
    path = _path_of_best(run)
    if not objects.exists(path):
        return None
    try:
        return Best(**json.loads(objects.get(path)))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{objects.where(path)} does not name a checkpoint: {error}. Delete it: it is written anew by the next "
            "start of the run"
        ) from error


def _path_of_best(run: str) -> str:
    return f"runs/{run}/best.json"


def remove_old(objects: Objects, run: str, keep: int, best: Best | None) -> None:
    """Delete all checkpoints but the `keep` newest and the best, and what was never finished before the newest.

    state.json goes first, so that no half checkpoint looks whole.
    """
    whole = checkpoints(objects, run)
    if not whole:
        return
    kept = {*whole[-keep:], *([best.checkpoint] if best else [])}
    for folder in whole:
        if folder not in kept:
            objects.delete(f"{folder}/state.json")
    pattern = re.compile(rf"(runs/{re.escape(run)}/step-\d{{7}})/.+")
    for info in list(objects.list(f"runs/{run}/step-")):
        found = pattern.fullmatch(info.path)
        if found and found[1] not in kept and found[1] < whole[-1]:
            objects.delete(info.path)


def read_state(objects: Objects, folder: str) -> dict[str, Any]:
    """state.json: the step, and what else a run needs to go on."""
    return json.loads(objects.get(f"{folder}/state.json"))


def load_optimizer(objects: Objects, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's moments and step counts, on every rank alike."""
    tensors = load(objects.get(f"{folder}/optimizer.safetensors"))
    parameters = dict(model.named_parameters())
    for entry, tensor in tensors.items():
        name, _, quantity = entry.rpartition("/")
        parameter = parameters[name]
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


def as_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
