"""Train several models on several tasks with several seeds, and write a page that compares them.

    vlbert compare PLAN --data.root ROOT [--fields [SCOPE:]field=value ...]

PLAN is a function in vlbert/comparison/plans.py, or MODULE:FUNCTION. A field is set in all training runs or, with a
SCOPE, only in those of `pretraining`, a task or a variant: vqa:task.folder=FOLDER. The runs are ROOT/runs/compare-*.
Complete runs are not repeated, so a stopped comparison resumes. If a run fails, the reason is reported, the others
continue, and the exit status is 1. The results are written to ROOT/comparisons/PLAN: index.html and, last,
numbers.json. docs/results.md explains them.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from storage.object_store import open_store
from storage.programs import Command, Positional
from storage.progress import clock
from training.loading import EXPECTED
from training.program import STOPPED
from training.stopping import Stop
from vlbert.comparison.cells import Cell, cells_of, is_done, run_cell
from vlbert.comparison.page import page
from vlbert.comparison.plans import Plan, find_plan
from vlbert.comparison.summary import summarise


def find_done(cells: Sequence[Cell], root: str) -> set[str]:
    """Return the names of the runs that are trained and evaluated."""
    done = set()
    for cell in cells:  # each after the cell that it needs
        if (cell.needs is None or cell.needs.run in done) and is_done(cell, root):
            done.add(cell.run)
    return done


def run_cells(cells: Sequence[Cell], root: str, jobs: int, report: Callable[[str], None]) -> dict[str, str] | None:
    """Run cells, `jobs` at a time, each in its own process. Return the reasons of those that failed, by run.

    A cell starts after its pre-training, and fails with it. If SIGTERM or SIGINT stops them, the active ones save a
    checkpoint first, and None is returned.
    """
    # Processes are forked from one that has only imported torch.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vlbert.comparison.cells"])
    threads, failed, stopping = max(1, len(os.sched_getaffinity(0)) // jobs), {}, False
    # What waits for pre-training last, so that none of the processes is idle.
    waiting = sorted(cells, key=lambda cell: (cell.needs is not None, cell.task is not None))
    running: dict[int, tuple[BaseProcess, Cell, Path, float]] = {}  # slot -> process, its cell, output and start

    def fail(cell: Cell, reason: str) -> None:
        failed[cell.run] = reason
        report(f"{cell.run}: FAILED: {reason}")
        for other in [other for other in waiting if other.needs and other.needs.run == cell.run]:
            waiting.remove(other)
            fail(other, f"not started: its pre-training {cell.run} failed")

    with tempfile.TemporaryDirectory() as folder, Stop() as stop:
        try:
            while running or (waiting and not stop.requested):
                active = {cell.run for cell in [*waiting, *(cell for _, cell, *_ in running.values())]}
                ready = (cell for cell in waiting if cell.needs is None or cell.needs.run not in active)
                if len(running) < jobs and not stop.requested and (cell := next(ready, None)):
                    waiting.remove(cell)
                    slot, output = min({*range(jobs)} - running.keys()), Path(folder, f"{cell.run}.log")
                    arguments = cell, root, output, device_of(slot), threads
                    process = context.Process(target=run_cell, args=arguments, name=cell.run)
                    report(f"{cell.run}: started")
                    process.start()
                    running[slot] = process, cell, output, time.monotonic()
                    continue
                connection.wait([process.sentinel for process, *_ in running.values()], 0.5)  # or a signal comes
                if stop.requested and not stopping:
                    stopping = True
                    for process, *_ in running.values():
                        process.terminate()  # SIGTERM, on which a run saves a checkpoint
                for slot, (process, cell, output, began) in [*running.items()]:
                    if process.exitcode is None:
                        continue
                    del running[slot]
                    if process.exitcode == 0:
                        report(f"{cell.run}: done after {clock(time.monotonic() - began)}")
                    elif stop.requested or process.exitcode == STOPPED:
                        stop.requested = True  # also if only the cell's process received the signal
                        report(f"{cell.run}: stopped; start the comparison again to resume it")
                    else:
                        fail(cell, _failure_reason(process.exitcode, output))
        finally:
            for process, *_ in running.values():  # after an error
                process.terminate()
                process.join()
    return None if stop.requested else failed


def device_of(slot: int) -> dict[str, str]:
    """Return the environment variables that restrict process number `slot` to one GPU, or {} without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if devices else {}


def _failure_reason(status: int | None, output: Path) -> str:
    file = output.with_suffix(".reason")
    if file.exists():
        return file.read_text(encoding="utf-8")
    ended = f"ended by {signal.Signals(-status).name}" if status and status < 0 else f"ended with status {status}"
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    return ": ".join([ended, *lines[-1:]])


def compare(
    plan: Plan,
    root: str,
    fields: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any] | None:
    """Train and evaluate the remaining runs of a plan, then write the results page and numbers.json.

    Returns the content of numbers.json, or None if stopped by a signal. Raises ValueError, before anything is trained,
    if the plan, a field or the seeds are invalid.

    Args:
        fields: As for cells_of.
        seeds: Seeds to train with, by default the plan's.
        jobs: Number of concurrent runs, by default one per GPU or, without GPUs, one per core.
    """
    root = root if "://" in root else os.path.abspath(os.path.expanduser(root))  # absolute, because runs record it
    jobs = jobs or torch.cuda.device_count() or len(os.sched_getaffinity(0))
    plan = replace(plan, seeds=tuple(seeds)) if seeds else plan
    cells = cells_of(plan, root, fields)
    done = find_done(cells, root)
    report(f"{plan.name}: {len(cells)} training runs, {len(done)} of them complete")
    failed = run_cells([cell for cell in cells if cell.run not in done], root, jobs, report)
    if failed is None:
        return None
    store, folder = open_store(root), f"comparisons/{plan.name}"
    summary = summarise(plan, store, cells, failed)
    store.delete(f"{folder}/numbers.json")
    store.put(f"{folder}/index.html", page(summary))
    store.put(f"{folder}/numbers.json", (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def compare_plan(
    plan: Annotated[str, Positional, tyro.conf.arg(metavar="PLAN")],
    root: Annotated[str, tyro.conf.arg(name="data.root")],
    fields: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    jobs: int | None = None,
) -> None:
    """Train several models on several tasks with several seeds, and write a page that compares them.

    Args:
        plan: a function in vlbert/comparison/plans.py, or MODULE:FUNCTION
        root: a folder, or s3://bucket/prefix
        fields: recipe fields to set, as `[SCOPE:]field=value` (quote several values) or `[SCOPE:]flag`. SCOPE limits a
            field to `pretraining`, a task or a variant
        seeds: seeds instead of the plan's; more can be added later
        jobs: number of concurrent training runs; by default one per GPU or, without GPUs, per core
    """
    name, found = f"vlbert compare {plan}", find_plan(plan)
    summary = compare(found, root, fields, seeds, jobs, _print)
    if summary is None:
        print(f"{name}: stopped; start it again to resume it", file=sys.stderr, flush=True)
        sys.exit(STOPPED)
    print(f"page: {open_store(root, write=False).uri(f'comparisons/{found.name}/index.html')}", flush=True)
    if problems := [f"{task['title']}: {task['problem']}" for task in summary["tasks"].values() if task["problem"]]:
        sys.exit(f"{name}: no numbers for {'; '.join(problems)}")
    if summary["failed"]:
        sys.exit(f"{name}: {len(summary['failed'])} training runs failed; start it again to retry them")


def _print(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


main = Command("vlbert compare", compare_plan, *EXPECTED)
