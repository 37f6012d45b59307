"""What all benchmarks share: turns and their times, tables, the machine, the command line and figures as JSON.

torch is imported where it is needed: some of what is measured is the memory of processes without it.
"""

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.tables import aligned

if TYPE_CHECKING:
    import torch

Table = list[list[str]]


@dataclass(frozen=True)
class Spent:
    """What some work took: seconds of the wall's clock and of this process's CPU; `result` is what it returned."""

    wall: float
    cpu: float
    result: Any


def synchronise(device: "torch.device | str") -> None:
    """Wait until a GPU has done what it was given."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def timed(work: Callable[[], object], device: "torch.device | str" = "cpu") -> Spent:
    synchronise(device)
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    synchronise(device)
    return Spent(time.perf_counter() - wall, time.process_time() - cpu, result)


def in_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, device: "torch.device | str" = "cpu"
) -> dict[str, list[Spent]]:
    """By name, one Spent a round: what others do to the machine, they do to all contenders."""
    found: dict[str, list[Spent]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            found[name].append(timed(work, device))
    return found


def machine(device: "torch.device | str" = "cpu") -> dict[str, Any]:
    """Where it was measured, and with what."""
    import torch

    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if str(device).startswith("cuda") else None,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def shown(table: Table) -> str:
    """The table for a terminal; its first row is the head."""
    return "\n".join(aligned(table[0], table[1:]))


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """For `python -m benchmarks.PROGRAM`, with the option that all have."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write every number there, too")
    return made


def write_json(file: Path | None, report: Mapping[str, Any] | Sequence[Any]) -> None:
    """If a file was asked for."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
