"""Checkpoints: folders, each whole once its state.json is there. No file is a pickle (docs/formats.md, Checkpoint).

ROOT/runs/<run>/step-0000100/   config.json  vocab.txt  model.safetensors  optimizer.safetensors  state.json (last)
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from storage.objects import Objects
from vlbert.config import ModelConfig, Recipe, from_json, to_json
from vlbert.text import Vocabulary

CHECKPOINT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What was read of one: `model` holds the tensors by name, "vlbert.*" and "head.*"."""

    where: str
    config: dict
    state: dict  # state.json: step, seed, samples consumed, the shards that were read
    model_config: ModelConfig
    vocabulary: Vocabulary
    model: dict[str, Tensor]

    @property
    def num_classes(self) -> int:
        return self.config["num_classes"]


def save_checkpoint(
    objects: Objects,
    run: str,
    step: int,
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    vocabulary: Vocabulary,
    num_classes: int,
    state: dict[str, Any],
) -> str:
    """Write runs/<run>/step-<step>/ and return its path; state.json goes last, and makes it whole."""
    folder = f"runs/{run}/step-{step:07d}"
    config = {
        "version": CHECKPOINT_VERSION,
        "task": type(recipe.task).__name__,
        "num_classes": num_classes,
        "model": to_json(recipe.model),
        "recipe": to_json(recipe),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    objects.put(f"{folder}/config.json", _json(config))
    objects.put(f"{folder}/vocab.txt", vocabulary.text().encode())
    objects.put(f"{folder}/model.safetensors", save(tensors))
    objects.put(f"{folder}/optimizer.safetensors", save(_optimizer_tensors(model, optimizer)))
    objects.put(f"{folder}/state.json", _json({"version": CHECKPOINT_VERSION, "step": step} | state))
    return folder


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


def read_checkpoint(objects: Objects, folder: str) -> Checkpoint:
    """Model, vocabulary and configuration; ValueError says what is missing or of another version."""
    where = objects.where(folder)
    if not objects.exists(f"{folder}/state.json"):
        raise ValueError(f"{where} is no whole checkpoint: it has no state.json; name a step-* folder of a run")
    config = json.loads(objects.get(f"{folder}/config.json"))
    if config.get("version") != CHECKPOINT_VERSION:
        raise ValueError(f"{where} is of version {config.get('version')}, this code reads {CHECKPOINT_VERSION}")
    return Checkpoint(
        where=where,
        config=config,
        state=read_state(objects, folder),
        model_config=from_json(ModelConfig, config["model"], f"{where}/config.json"),
        vocabulary=Vocabulary(objects.get(f"{folder}/vocab.txt").decode().splitlines(), where=f"{where}/vocab.txt"),
        model=load(objects.get(f"{folder}/model.safetensors")),
    )


def read_state(objects: Objects, folder: str) -> dict[str, Any]:
    """state.json: step, seed, samples consumed, the shards that were read."""
    return json.loads(objects.get(f"{folder}/state.json"))


def load_model(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """All tensors of `model` from `tensors`, exactly; ValueError names any missing, left over or of another shape."""
    wanted = model.state_dict()
    problems = [f"lacks {name}" for name in sorted(wanted.keys() - tensors.keys())]
    problems += [f"has {name}, which the model has not" for name in sorted(tensors.keys() - wanted.keys())]
    problems += [
        f"has {name} as {tuple(tensors[name].shape)}, the model as {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if wanted[name].shape != tensors[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{where} does not fit the model: it {'; '.join(problems[:5])}{more}")
    model.load_state_dict(tensors)


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


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """ "<parameter>/<quantity>" -> tensor."""
    return {
        f"{name}/{quantity}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
