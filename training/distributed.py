"""Run as one process, or as one rank of several that torchrun started."""

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
from torch import nn

# How long ranks wait for one another. A single rank may build a vocabulary of all captions, wait for unreachable
# storage, or write the last checkpoint (10 minutes at most). A rank that takes longer than this hangs.
TIME_LIMIT = timedelta(minutes=30)

_PARENT = os.getppid()  # read at import: torchrun may be killed during the seconds that later imports take
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class World:
    """Rank and device of this process, and the world size."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


ALONE = World(0, 1, torch.device("cpu"))


class SharedFault(ValueError):
    """An error that every rank raises, so that no rank waits for another. Rank 0 prints it."""


def start() -> World:
    """Join torchrun's process group, if this process was started by torchrun, and return the World.

    The backend is nccl on GPUs and gloo on CPUs. On Linux, a rank is killed when its torchrun ends.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # The kernel kills this rank when torchrun ends, so that it cannot train alongside a restarted run.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != _PARENT:  # torchrun has already ended
            os.kill(os.getpid(), signal.SIGKILL)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIME_LIMIT)
    return World(rank, size, device)


def peer_failure(error: BaseException) -> str | None:
    """Return the error's first line if the error means that another rank ended or hangs, or None otherwise."""
    from_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    line = re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0])
    return line if from_gloo or isinstance(error, dist.DistError) else None


def stop(world: World) -> None:
    if world.size > 1:
        dist.destroy_process_group()


def gather_rows(rows: list[Any], world: World) -> list[Any]:
    """Return the rows of all ranks in rank order, on every rank."""
    return broadcast(gather_on_rank0(rows, world), world)


def gather_on_rank0(rows: list[Any], world: World) -> list[Any]:
    """Return the rows of all ranks in rank order on rank 0, and an empty list on the others."""
    if world.size == 1:
        return rows
    parts: list[Any] | None = [None] * world.size if world.first else None
    dist.gather_object(rows, parts, dst=0)
    return [row for part in parts or () for row in part]


def broadcast(value: Any, world: World) -> Any:
    """Return rank 0's value on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def raise_on_all_ranks(fault: str | None, world: World) -> None:
    """Raise SharedFault on every rank if `fault` is given on any rank. Every rank must call this."""
    faults = gather_rows([fault], world)
    rank = next((rank for rank, message in enumerate(faults) if message), None)
    if rank is not None:
        raise SharedFault(f"rank {rank}: {faults[rank]}" if rank else faults[rank])


def broadcast_buffers(module: nn.Module, world: World) -> None:
    """Copy rank 0's buffers to every rank, because each rank updates its own BatchNorm statistics."""
    if world.size > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()
