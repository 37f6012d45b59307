"""Compare: train variants x tasks x seeds on one root, and write one page about what differs.

    vlbert compare PLAN --data.root ROOT [--fields [SCOPE:]field=value ...]

PLAN is a function of vlbert/comparison/plans.py, or MODULE:FUNCTION. A field is given to every training or, with a
SCOPE before it, to those of `pretraining`, of a task or of a variant: vqa:task.folder=FOLDER. Each training is a run of
its own, ROOT/runs/compare-*, and what is complete is not repeated: a stopped comparison goes on. One that fails is
named with its reason, and the others go on; the exit status is then 1. Writes index.html and, last, numbers.json to
ROOT/comparisons/PLAN. How to read them: docs/results.md.
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
    """The trainings of a plan: `run` does those that are left, several at a time, each in a process of its own.

    jobs    how many at a time; on GPUs each has one of its own, in turn
    report  called with each line of progress
    failed  run -> reason
    """

    plan: Plan
    root: str
    cells: Sequence[Cell]
    jobs: int
    report: Callable[[str], None]
    failed: dict[str, str] = field(default_factory=dict)
    stopping: bool = False
    _processes: set[BaseProcess] = field(default_factory=set)
    # multiprocessing keeps lists of all processes, which are not for several threads.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def done(self) -> set[str]:
        """The runs that are complete."""
        found = set()
        for cell in self.cells:  # what others need comes before these
            if (cell.needs is None or cell.needs.run in found) and is_done(cell, self.root):
                found.add(cell.run)
        return found

    def run(self) -> bool:
        """Do what is left; False where it was told to stop (SIGTERM or SIGINT): what runs then saves."""
        done, ends, numbers, own = self.done(), {}, itertools.count(), threading.local()
        self.report(f"{self.plan.name}: {len(self.cells)} trainings, {len(done)} of them complete")
        # Processes that have torch imported, and nothing done.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["vlbert.comparison.cells"])
        pool = ThreadPoolExecutor(self.jobs, initializer=lambda: setattr(own, "slot", next(numbers)))
        with tempfile.TemporaryDirectory() as folder, pool, self._ending():
            # Pre-trainings first: so each has begun before a fine-tuning waits for it.
            for cell in sorted(self.cells, key=lambda cell: cell.task is not None):
                if cell.run not in done:
                    needed = ends.get(cell.needs.run) if cell.needs else None
                    ends[cell.run] = pool.submit(self._do, cell, needed, own, Path(folder, f"{cell.run}.log"))
            for end in ends.values():
                end.result()
        return not self.stopping

    def _do(self, cell: Cell, needed: Future[bool] | None, own: threading.local, output: Path) -> bool:
        """Do one cell after the one that it needs; whether it is done. own.slot: number of the thread, from 0."""
        if needed and not needed.result() and not self.stopping:
            return self._fail(cell, f"not started: {cell.needs.run}, from which it starts, failed")
        threads, began = max(1, len(os.sched_getaffinity(0)) // self.jobs), time.monotonic()
        given = cell, self.root, output, device_of(own.slot), threads
        process = multiprocessing.get_context("forkserver").Process(target=run_cell, args=given, name=cell.run)
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
            self.stopping = True  # also where only the training was told to
            self.report(f"{cell.run}: stopped; it goes on with the next start")
            return False
        return self._fail(cell, _reason(process.exitcode, output))

    def _fail(self, cell: Cell, reason: str) -> bool:
        self.failed[cell.run] = reason
        self.report(f"{cell.run}: FAILED: {reason}")
        return False

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the processes, and none is left after an error."""
        before = {}
        if threading.current_thread() is threading.main_thread():  # nowhere else may handlers be set
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
                process.terminate()  # SIGTERM: a training saves


def device_of(slot: int) -> dict[str, str]:
    """The environment in which a process has one GPU, if there are any."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if devices else {}


def _reason(status: int, output: Path) -> str:
    """Why a process failed."""
    file = output.with_suffix(".reason")
    if file.exists():
        return file.read_text(encoding="utf-8")
    how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    return ": ".join([how, *lines[-1:]])


def compare(
    plan: Plan,
    root: str,
    fields: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any] | None:
    """Train and evaluate what is left of a plan, then write its page and, last, numbers.json.

    Returns the content of numbers.json; None where it was told to stop. seeds: None: the plan's. jobs: trainings at a
    time; None: one a GPU or, without any, one a core. ValueError before anything is trained where the plan, a field or
    the seeds do not fit.
    """
    root = root if "://" in root else os.path.abspath(os.path.expanduser(root))  # as trainings record it
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
    """Train variants x tasks x seeds on one root, and write a page about what differs.

    Args:
        plan: a function of vlbert/comparison/plans.py, or MODULE:FUNCTION
        root: a folder, or s3://bucket/prefix
        fields: of the recipes, each as `[SCOPE:]field=value`, several values in quotes, or `[SCOPE:]flag`
        seeds: in place of the plan's; more can be added later
        jobs: trainings at a time; by default one a GPU or, without any, a core
    """
    name, made = f"vlbert compare {plan}", find_plan(plan)
    summary = compare(made, root, fields, seeds, jobs, _print)
    if summary is None:
        print(f"{name}: stopped; start it again, and it goes on", file=sys.stderr, flush=True)
        sys.exit(STOPPED)
    where = open_store(root, write=False).uri(f"comparisons/{made.name}/index.html")
    print(f"compared: {where}", flush=True)
    if broken := [f"{task['title']}: {task['problem']}" for task in summary["tasks"].values() if task["problem"]]:
        sys.exit(f"{name}: no numbers of {'; '.join(broken)}")
    if summary["failed"]:
        sys.exit(f"{name}: {len(summary['failed'])} trainings failed; start it again, and they are tried again")


def _print(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


main = Command("vlbert compare", compare_plan, *EXPECTED)
