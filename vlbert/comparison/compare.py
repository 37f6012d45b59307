"""Train several models on several tasks with several seeds, and write a page that compares them.

    vlbert compare PLAN --data.root ROOT [--fields [SCOPE:]field=value ...]

PLAN is a function in vlbert/comparison/plans.py, or MODULE:FUNCTION. A field is set in all training runs or, with a
SCOPE, only in those of `pretraining`, a task or a variant: vqa:task.folder=FOLDER. The runs are ROOT/runs/compare-*.
Complete runs are not repeated, so a stopped comparison resumes. If a run fails, the reason is reported, the others
continue, and the exit status is 1. The results are written to ROOT/comparisons/PLAN: index.html and, last,
numbers.json. docs/results.md explains them.
"""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import tyro

from storage.object_store import open_store
from storage.programs import Command, Positional
from storage.progress import clock
from training.loading import EXPECTED
from training.program import STOPPED
from vlbert.comparison.cells import Cell, cells_of, is_done, run_cell
from vlbert.comparison.page import page
from vlbert.comparison.plans import Plan, find_plan
from vlbert.comparison.summary import summarise


@dataclass(eq=False)
class Comparison:
    """Runs the incomplete training runs (cells) of a plan, several at a time, each in its own process."""

    plan: Plan
    root: str
    cells: Sequence[Cell]
    jobs: int  # number of concurrent runs; each uses one GPU, if there are any
    report: Callable[[str], None]  # called with each line of progress
    failed: dict[str, str] = field(default_factory=dict)  # run -> reason
    stopping: bool = False
    _processes: set[BaseProcess] = field(default_factory=set)
    # multiprocessing keeps lists of all processes, which are not thread-safe.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def done(self) -> set[str]:
        """Return the names of the runs that are trained and evaluated."""
        complete = set()
        for cell in self.cells:  # each after the cell that it needs
            if (cell.needs is None or cell.needs.run in complete) and is_done(cell, self.root):
                complete.add(cell.run)
        return complete

    def run(self) -> bool:
        """Run the remaining cells. Return False if SIGTERM or SIGINT stopped them.

        Active runs save a checkpoint before they stop.
        """
        done, futures, numbers, local = self.done(), {}, itertools.count(), threading.local()
        self.report(f"{self.plan.name}: {len(self.cells)} training runs, {len(done)} of them complete")
        # Processes are forked from one that has only imported torch.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["vlbert.comparison.cells"])
        pool = ThreadPoolExecutor(self.jobs, initializer=lambda: setattr(local, "slot", next(numbers)))
        with tempfile.TemporaryDirectory() as folder, pool, self._stop_on_signals():
            # What waits for pre-training last, so that none of the processes is idle.
            for cell in sorted(self.cells, key=lambda cell: (cell.needs is not None, cell.task is not None)):
                if cell.run not in done:
                    needed = futures.get(cell.needs.run) if cell.needs else None
                    output = Path(folder, f"{cell.run}.log")
                    futures[cell.run] = pool.submit(self._run_in_process, cell, needed, local, output)
            for future in futures.values():
                future.result()
        return not self.stopping

    def _run_in_process(self, cell: Cell, needed: Future[bool] | None, local: threading.local, output: Path) -> bool:
        """Run the cell in a process, after its pre-training (`needed`) if there is any. Return True on success."""
        if cell.needs and needed and not needed.result() and not self.stopping:
            return self._fail(cell, f"not started: its pre-training {cell.needs.run} failed")
        threads, began = max(1, len(os.sched_getaffinity(0)) // self.jobs), time.monotonic()
        arguments = cell, self.root, output, device_of(local.slot), threads
        process = multiprocessing.get_context("forkserver").Process(target=run_cell, args=arguments, name=cell.run)
        with self._lock:
            if self.stopping:
                return False
            self.report(f"{cell.run}: started")
            process.start()
            self._processes.add(process)
        connection.wait([process.sentinel])
        with self._lock:
            process.join()
            self._processes.remove(process)
        if process.exitcode == 0:
            self.report(f"{cell.run}: done after {clock(time.monotonic() - began)}")
            return True
        if self.stopping or process.exitcode == STOPPED:
            self.stopping = True  # also if only the cell's process received the signal
            self.report(f"{cell.run}: stopped; start the comparison again to resume it")
            return False
        return self._fail(cell, _failure_reason(process.exitcode, output))

    def _fail(self, cell: Cell, reason: str) -> bool:
        self.failed[cell.run] = reason
        self.report(f"{cell.run}: FAILED: {reason}")
        return False

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """Context manager: stop all processes on SIGTERM, SIGINT or an error."""
        before = {}
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except BaseException:
            self._stop()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        self.stopping = True
        with self._lock:
            for process in self._processes:
                process.terminate()  # SIGTERM, on which a run saves a checkpoint


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
    comparison = Comparison(plan, root, cells_of(plan, root, fields), jobs, report)
    if not comparison.run():
        return None
    store, folder = open_store(root), f"comparisons/{plan.name}"
    summary = summarise(plan, store, comparison.cells, comparison.failed)
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
