"""The checkpoints of a run: folders ROOT/runs/<run>/step-0000100, each whole once its state.json is there.

Files are safetensors and JSON, never pickles; which ones, vlbert/checkpoint.py and detectors/train.py say.
"""

import json
import re
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from storage.objects import Objects


def checkpoints(objects: Objects, run: str) -> list[str]:
    """The whole checkpoints of a run, oldest first."""
    pattern = re.compile(rf"runs/{re.escape(run)}/step-\d{{7}}/state\.json")
    found = [info.path for info in objects.list(f"runs/{run}/") if pattern.fullmatch(info.path)]
    return sorted(path.removesuffix("/state.json") for path in found)


def remove_old(objects: Objects, run: str, keep: int) -> None:
    """Delete all but the `keep` newest; state.json goes first, so that no half checkpoint looks whole."""
    for folder in checkpoints(objects, run)[:-keep]:
        objects.delete(f"{folder}/state.json")
        for info in list(objects.list(f"{folder}/")):
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
    """ "<parameter>/<quantity>" -> tensor."""
    return {
        f"{name}/{quantity}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }
