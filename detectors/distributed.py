"""One process or many: started by torchrun, or alone."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_PARENT = os.getppid()  # as early as this: the imports take seconds, in which torchrun may be killed
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class World:
    """Which of how many processes this is, and where it computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


def start() -> World:
    """Join the world that torchrun describes in the environment (nccl on GPUs, gloo on CPUs), or be alone.

    A process of torchrun ends with it, on Linux.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        _end_with_parent()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(rank, size, device)


def _end_with_parent() -> None:
    """Be killed when torchrun is, which cannot end its ranks then: they would train on beside those of a restart."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != _PARENT:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def stop(world: World) -> None:
    if world.size > 1:
        dist.destroy_process_group()


def sum_over_ranks(numbers: list[float], world: World) -> list[float]:
    """Each number summed over all ranks; every rank must call it."""
    if world.size == 1:
        return numbers
    total = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    dist.all_reduce(total)
    return total.tolist()


def gather_rows(rows: list[Any], world: World) -> list[Any]:
    """The rows of all ranks, on every rank, in rank order."""
    if world.size == 1:
        return rows
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, rows)
    return [row for part in parts for row in part]


def gather_on_first(rows: list[Any], world: World) -> list[Any]:
    """The rows of all ranks on rank 0, in rank order; elsewhere none."""
    if world.size == 1:
        return rows
    parts: list[Any] | None = [None] * world.size if world.first else None
    dist.gather_object(rows, parts, dst=0)
    return [row for part in parts or () for row in part]


def from_first(value: Any, world: World) -> Any:
    """The value that rank 0 passed, on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def share_buffers(module: nn.Module, world: World) -> None:
    """Give every rank the buffers of rank 0: live norms count on each by themselves."""
    if world.size > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def wait_for_all(world: World) -> None:
    if world.size > 1:
        dist.barrier()
