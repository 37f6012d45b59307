"""Compare: train variants x tasks x seeds on one root, and write one page about what differs.

    vlbert compare PLAN --data.root ROOT [--fields [SCOPE:]field=value ...]

PLAN is a function of vlbert/comparison/plans.py, or MODULE:FUNCTION. A field is given to every training or, with a
SCOPE before it, to those of `pretraining`, of a task or of a variant: vqa:task.folder=FOLDER. Each training is a run of
its own, ROOT/runs/compare-*, and what is complete is not repeated: a stopped comparison goes on. One that fails is
named with its reason, and the others go on; the exit status is then 1. Writes index.html and, last, numbers.json to
ROOT/comparisons/PLAN. How to read them: docs/results.md.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from storage.tables import markdown
from training.loading import EXPECTED
from training.log import read_heartbeat
from training.program import STOPPED
from vlbert.comparison.cells import Cell, cells_of, check_steps, is_done, run_cell
from vlbert.comparison.page import page, percent
from vlbert.comparison.plans import Plan, find_plan
from vlbert.comparison.summary import summarise

_BETWEEN_LINES = 30.0  # seconds between lines about what is running
_POLL = 0.5  # seconds between looks at the processes


@dataclass(eq=False)
class Running:
    """A process at work on a cell. slot: which GPU it has."""

    cell: Cell
    process: BaseProcess
    slot: int
    began: float
    output: Path


@dataclass(eq=False)
class Comparison:
    """The trainings of a plan: `run` does those that are left, several at a time.

    jobs    how many at a time; on GPUs each has one of its own, in turn
    report  called with each line of progress
    failed  run -> reason
    done    names of the runs
    """

    plan: Plan
    root: str
    cells: Sequence[Cell]
    jobs: int
    report: Callable[[str], None]
    failed: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    stopping: bool = False
    _running: list[Running] = field(default_factory=list)

    def run(self) -> bool:
        """Do what is left; False where it was told to stop (SIGTERM or SIGINT): what runs then saves."""
        for cell in self.cells:
            check_steps(cell, self.root)
        for cell in self.cells:  # pre-trainings first
            if (cell.needs is None or cell.needs.run in self.done) and is_done(self.plan, cell, self.root):
                self.done.add(cell.run)
        waiting = [cell for cell in self.cells if cell.run not in self.done]
        self.report(f"{self.plan.name}: {len(self.cells)} trainings, {len(self.done)} of them complete")
        context = multiprocessing.get_context("forkserver")  # of processes that have torch imported, and nothing done
        context.set_forkserver_preload(["vlbert.comparison.cells"])
        with tempfile.TemporaryDirectory() as folder, self._ending():
            reported = time.monotonic()
            while waiting or self._running:
                self._skip_what_cannot_start(waiting)
                while (cell := self._next(waiting)) is not None:
                    waiting.remove(cell)
                    self._start(cell, context, Path(folder))
                if self._running:
                    connection.wait([one.process.sentinel for one in self._running], _POLL)
                for one in [one for one in self._running if not one.process.is_alive()]:
                    self._running.remove(one)
                    self._end(one)
                if time.monotonic() - reported >= _BETWEEN_LINES:
                    reported = time.monotonic()
                    self._report_running()
                if self.stopping and not self._running:
                    return False
        return True

    def _next(self, waiting: Sequence[Cell]) -> Cell | None:
        if self.stopping or len(self._running) >= self.jobs:
            return None
        return next((cell for cell in waiting if cell.needs is None or cell.needs.run in self.done), None)

    def _skip_what_cannot_start(self, waiting: list[Cell]) -> None:
        for cell in [cell for cell in waiting if cell.needs and cell.needs.run in self.failed]:
            waiting.remove(cell)
            self._fail(cell, f"not started: {cell.needs.run}, from which it starts, failed")

    def _start(self, cell: Cell, context: multiprocessing.context.BaseContext, folder: Path) -> None:
        slot = next(number for number in range(self.jobs) if number not in {one.slot for one in self._running})
        threads, output = max(1, len(os.sched_getaffinity(0)) // self.jobs), folder / f"{cell.run}.log"
        given = self.plan, cell, self.root, output, device_of(slot), threads
        process = context.Process(target=run_cell, args=given, name=cell.run)
        process.start()
        self.report(f"{cell.run}: started")
        self._running.append(Running(cell, process, slot, time.monotonic(), output))

    def _end(self, one: Running) -> None:
        status = one.process.exitcode
        if status == 0:
            self.done.add(one.cell.run)
            took = clock(time.monotonic() - one.began)
            self.report(f"{one.cell.run}: done after {took}; {len(self.done)} of {len(self.cells)}")
        elif self.stopping or status == STOPPED:
            self.stopping = True  # also where only the training was told to
            self.report(f"{one.cell.run}: stopped; it goes on with the next start")
        else:
            self._fail(one.cell, _reason(one, status))

    def _fail(self, cell: Cell, reason: str) -> None:
        self.failed[cell.run] = reason
        self.report(f"{cell.run}: FAILED: {reason}")

    def _report_running(self) -> None:
        store = open_store(self.root, write=False)
        for one in self._running:
            try:
                beat = read_heartbeat(store, one.cell.run)
            except (*EXPECTED, OSError):  # it is only for the line
                beat = None
            self.report(f"{one.cell.run}: step {beat['step'] if beat else 0} of {one.cell.steps}")

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the processes, and none is left after an error."""
        before = {}
        if threading.current_thread() is threading.main_thread():  # nowhere else may handlers be set
            before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for one in self._running:
                one.process.terminate()
            for one in self._running:
                one.process.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        for one in self._running:
            if one.process.is_alive():
                one.process.terminate()  # SIGTERM: a training saves


def device_of(slot: int) -> dict[str, str]:
    """The environment in which a process has one GPU, if there are any."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if devices else {}


def _reason(one: Running, status: int) -> str:
    """Why a process failed."""
    file = one.output.with_suffix(".reason")
    if file.exists():
        return file.read_text(encoding="utf-8")
    how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = one.output.read_text(encoding="utf-8", errors="replace").splitlines() if one.output.exists() else []
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
    comparison = Comparison(plan, root, cells_of(plan, root, fields, seeds or plan.seeds), jobs, report)
    if not comparison.run():
        return None
    store, folder = open_store(root), f"comparisons/{plan.name}"
    summary = summarise(plan, store, comparison.cells, comparison.failed)
    store.delete(f"{folder}/numbers.json")
    store.put(f"{folder}/index.html", page(summary))
    store.put(f"{folder}/numbers.json", (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def table(summary: Mapping[str, Any]) -> str:
    """The means with their intervals, %, as Markdown."""
    tasks, rows = summary["tasks"], []
    for name, variant in summary["variants"].items():
        rows.append([variant["title"]])
        for key, task in tasks.items():
            found = task["means"].get(name)
            interval = found and f"{percent(found['mean'])} ({percent(found['low'])} to {percent(found['high'])})"
            rows[-1].append(interval or ("failed" if key in variant["tasks"] else "–"))
    rows.append(["chance", *(percent(task["chance"]) for task in tasks.values())])
    return markdown(["", *(task["title"] for task in tasks.values())], rows)


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
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs is {jobs}; it must be at least 1")
    if len({*seeds}) < len(seeds) or min(seeds, default=0) < 0:
        raise ValueError(f"--seeds are {', '.join(map(str, seeds))}; give different numbers, from 0")
    summary = compare(made, root, fields, seeds, jobs, _print)
    if summary is None:
        print(f"{name}: stopped; start it again, and it goes on", file=sys.stderr, flush=True)
        sys.exit(STOPPED)
    where = open_store(root, write=False).where(f"comparisons/{made.name}/index.html")
    print(f"\n{table(summary)}\n\n{where}", flush=True)
    if broken := [f"{task['title']}: {task['problem']}" for task in summary["tasks"].values() if task["problem"]]:
        sys.exit(f"{name}: no numbers of {'; '.join(broken)}")
    if summary["failed"]:
        sys.exit(f"{name}: {len(summary['failed'])} trainings failed; start it again, and they are tried again")


def _print(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


main = Command("vlbert compare", compare_plan, *EXPECTED)
