"""Stores that hold writes back, and what a test waits for."""

import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from storage.object_store import Content, LocalStore
from training.checkpoint import Writer, write_checkpoint
from training.recipe import RunSettings


class Held(LocalStore):
    """A folder whose puts of some names wait until they are let through; knows their order."""

    def __init__(self, root: Path, held: str):
        super().__init__(str(root))
        self.held, self.let_through, self.begun, self.order = held, threading.Event(), threading.Event(), []

    def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
        if path.endswith(self.held):
            self.begun.set()
            assert self.let_through.wait(20)
        self.order.append(path)
        return super().put(path, data, if_absent=if_absent)


def tensors(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((3, 4), value), "step": torch.tensor(int(value))}


def keeps(newest: int, **more: Any) -> RunSettings:
    """Settings of run `r` that keep so many of its newest checkpoints."""
    return RunSettings(name="r", keep_checkpoints=newest, **more)


def write(writer: Writer, step: int, metric: str | None = None, **state: Any) -> None:
    """Have a checkpoint of run `r` written, of three steps, whose tensor `a` is full of the step's number."""
    files = {"model.safetensors": tensors(step)}
    write_checkpoint(writer, keeps(3, steps=3), step, files, {"step": step} | state, metric)


def wait_for(condition: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
