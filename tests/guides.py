"""Commands of a page of the documents, run as they are written, but in this process: to import torch takes seconds."""

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from places import PROJECT
from tiny import TINY_MODEL, as_overrides

from training.optimizer import OptimizerConfig
from vlbert.commands import COMMANDS
from vlbert.config import Recipe


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PROJECT / "docs" / page).read_text(), re.DOTALL)


def made_tiny(recipe: Recipe, steps: int, **changes: object) -> str:
    """The words that have a recipe of one's own train a tiny model from random weights."""
    model, optimizer = dataclasses.replace(TINY_MODEL, dropout=0.0), OptimizerConfig(learning_rate=3e-3, warmup_steps=5)
    changes |= {"model": model, "optimizer": optimizer, "data": dataclasses.replace(recipe.data, batch=16, workers=0)}
    changes |= {"steps": steps, "validate_every": steps, "save_every": steps, "random_init": True}
    return shlex.join(as_overrides(dataclasses.replace(recipe, **changes), recipe))


def run_commands(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, replaced: Mapping[str, str]) -> list[str]:
    """Run the commands of a page in a folder that has demo/; the programs. replaced: what is run in a text's place."""
    text = "\n".join(blocks(page, "bash"))
    for old, new in replaced.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "demo").symlink_to(PROJECT / "demo")
    monkeypatch.chdir(folder)
    ran = []
    for line in text.replace("\\\n", "").splitlines():
        words = shlex.split(line)
        if words[:1] == ["vlbert"]:
            module, arguments = COMMANDS[words[1]][0], words[2:]
        elif words[:2] in (["python", "-m"], ["torchrun", "-m"]):
            module, arguments = words[2], words[3:]
        else:
            subprocess.run(line, shell=True, check=True)
            continue
        ran.append(module)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", [module, *arguments])
            importlib.import_module(module).main()
    return ran
