"""One process or many: started by torchrun, or alone."""

import ctypes
import os
import re
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# That ranks wait for one another. One alone may build a vocabulary of all captions, wait out a storage that is away, or
# write the last checkpoint (10 minutes at most); who has not come by then hangs.
TIME_LIMIT = timedelta(minutes=30)

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


ALONE = World(0, 1, torch.device("cpu"))


class SharedFault(ValueError):
    """A fault that every rank raises, so that none waits for another. The first one prints it."""


def start(limit: timedelta = TIME_LIMIT) -> World:
    """Join the world that torchrun describes in the environment (nccl on GPUs, gloo on CPUs), or be alone.

    limit: how long ranks wait for one another. A process of torchrun ends with it, on Linux.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        _end_with_parent()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit)
    return World(rank, size, device)


def _end_with_parent() -> None:
    """Be killed when torchrun is, which cannot end its ranks then: they would train on beside those of a restart."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != _PARENT:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def peer_failure(error: BaseException) -> str | None:
    """Return what an error of a collective says, without gloo's own file: another rank is gone or did not come. None of
    any other error."""
    of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    line = re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0])
    return line if of_gloo or isinstance(error, dist.DistError) else None


def stop(world: World) -> None:
    if world.size > 1:
        dist.destroy_process_group()


def sum_over_ranks(numbers: Tensor, world: World) -> None:
    """Sum a tensor in place over all ranks, without waiting for the device; every rank must call this."""
    if world.size > 1:
        dist.all_reduce(numbers)


def gather_rows(rows: list[Any], world: World) -> list[Any]:
    """Return the rows of all ranks, on every rank, in rank order."""
    if world.size == 1:
        return rows
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, rows)
    return [row for part in parts for row in part]


def gather_on_rank0(rows: list[Any], world: World) -> list[Any]:
    """Return the rows of all ranks on rank 0, in rank order; elsewhere none."""
    if world.size == 1:
        return rows
    parts: list[Any] | None = [None] * world.size if world.first else None
    dist.gather_object(rows, parts, dst=0)
    return [row for part in parts or () for row in part]


def broadcast(value: Any, world: World) -> Any:
    """Return the value that rank 0 passed, on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def raise_on_all_ranks(fault: str | None, world: World) -> None:
    """Raises SharedFault on every rank if one passes a fault; every rank must call this."""
    faults = gather_rows([fault], world)
    rank = next((rank for rank, one in enumerate(faults) if one), None)
    if rank is not None:
        raise SharedFault(f"rank {rank}: {faults[rank]}" if rank else faults[rank])


def broadcast_buffers(module: nn.Module, world: World) -> None:
    """Give every rank the buffers of rank 0: live norms count on each by themselves."""
    if world.size > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()
