"""Functions that all benchmarks share: timing, tables, the machine's description, command line and JSON reports.

torch is imported only in functions that need it, because some benchmarks measure the memory of processes without it.
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
class Timing:
    """Duration and result of a function call."""

    wall: float  # seconds of wall time
    cpu: float  # CPU-seconds of this process
    result: Any


def synchronise(device: "torch.device | str") -> None:
    """If the device is a GPU, wait until it has finished its queued work."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def measure_call(call: Callable[[], object], device: "torch.device | str" = "cpu") -> Timing:
    synchronise(device)
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    synchronise(device)
    return Timing(time.perf_counter() - wall, time.process_time() - cpu, result)


def run_in_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, device: "torch.device | str" = "cpu"
) -> dict[str, list[Timing]]:
    """Time each contender once per round. They take turns, so that other load on the machine affects all of them."""
    timings: dict[str, list[Timing]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            timings[name].append(measure_call(call, device))
    return timings


def describe_machine(device: "torch.device | str" = "cpu") -> dict[str, Any]:
    """Return the machine's CPU, cores, threads and GPU, torch's version, and the date, for a report."""
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


def format_table(table: Table) -> str:
    """Format a table as aligned text for a terminal. The first row is the header."""
    return "\n".join(aligned(table[0], table[1:]))


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Make the argument parser of `python -m benchmarks.PROGRAM`, with the option --json that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    return parser


def write_json(file: Path | None, report: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write the report to `file`, unless it is None."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
