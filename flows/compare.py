"""Compare: a child process trains variants x tasks x seeds and writes a page about what differs (docs/results.md)."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect import flow

from flows.artifacts import Live, escaped, link, name_run, publish, reporting, stage_logger
from flows.collect import open_storage
from flows.settings import CompareSettings
from flows.supervisor import ChildFailed, run_child
from storage.object_store import ObjectStore, open_store
from storage.progress import clock
from storage.safe_json import parse_json
from storage.tables import markdown


@dataclass(frozen=True)
class Compared:
    """A comparison: its page, the mean of each task and variant, and why trainings failed, by run."""

    plan: str
    page: str
    means: dict[str, dict[str, float]]
    failed: dict[str, str]
    problems: dict[str, str]  # by task without numbers


def compare(
    root: str,
    settings: CompareSettings,
    log: Callable[[str], None] = print,
    show: Callable[[str], None] = lambda plan: None,
) -> Compared:
    """Run a comparison, or the rest of it. Only from the main thread.

    show: called after each line of output with the name of the plan. ChildFailed where it does not come to a page.
    """
    from vlbert.comparison.plans import find_plan  # here, because it brings torch: other stages need none

    plan = find_plan(settings.plan).name
    command = [sys.executable, "-m", "vlbert.comparison.compare", settings.plan, f"data.root={root}", *settings.fields]
    command += ["--seeds", ",".join(map(str, settings.seeds))] if settings.seeds else []
    command += ["--jobs", str(settings.jobs)] if settings.jobs else []

    def on_line(line: str) -> None:
        log(line)
        show(plan)

    store, numbers = open_store(root), f"comparisons/{plan}/numbers.json"
    before = _written(store, numbers)
    try:
        run_child(command, on_line, grace=settings.grace)
    except ChildFailed:
        if _written(store, numbers) in (None, before):  # what stands there is of an older comparison
            raise
    found = parse_json(store.get(numbers), store.where(numbers))
    return Compared(
        plan=plan,
        page=store.where(f"comparisons/{plan}/index.html"),
        means={task: {name: one["mean"] for name, one in of["means"].items()} for task, of in found["tasks"].items()},
        failed={one["run"]: one["reason"] for one in found["failed"]},
        problems={task: of["problem"] for task, of in found["tasks"].items() if of["problem"]},
    )


def _written(store: ObjectStore, path: str) -> float | None:
    """When an object was written; None where there is none."""
    return next((info.modified for info in store.list(path) if info.path == path), None)


@flow(name="compare", flow_run_name="{settings.plan}", persist_result=False)
def compare_flow(root: str, settings: CompareSettings) -> Compared:
    """Train variants of models with several seeds, and tell which differ.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        settings: The plan, and fields of its trainings.
    """
    open_storage(root)
    live: list[Live] = []

    def show(plan: str) -> None:
        live.extend([Live("compare-progress", plan)] * (not live))
        if live[0].due:
            with reporting():
                live[0].show(table_of_trainings(read_progress(root, plan)))

    compared = compare(root, settings, stage_logger().info, show)
    name_run(compared.plan, f"plan:{compared.plan}")
    publish("compare", compared.plan, partial(table_of_comparison, root, compared))
    if compared.problems:
        reasons = "; ".join(f"{task}: {reason}" for task, reason in compared.problems.items())
        raise RuntimeError(f"no numbers of {reasons}; the others stand in {compared.page}")
    if compared.failed:
        reasons = "; ".join(f"{run}: {reason}" for run, reason in compared.failed.items())
        raise RuntimeError(f"{len(compared.failed)} trainings failed, the others stand in {compared.page}: {reasons}")
    return compared


def read_progress(root: str, plan: str) -> Mapping[str, Any] | None:
    """What the comparison last wrote of itself; None before it began to train."""
    from vlbert.comparison.compare import progress_file  # here, as above

    store, path = open_store(root, write=False), progress_file(plan)
    return parse_json(store.get(path), store.where(path)) if store.exists(path) else None


def table_of_trainings(progress: Mapping[str, Any] | None) -> str:
    """How many trainings are done, which run, and how long the rest takes."""
    if progress is None:
        return "No training has ended yet."
    left = progress["seconds_left"]
    rows = [
        ("done", f"{progress['done']} of {progress['trainings']}"),
        ("running", escaped(", ".join(progress["running"]))),
        ("failed", str(len(progress["failed"]))),
        ("time left", "" if left is None else clock(left)),
    ]
    failed = [f"- **{escaped(run)}**: {escaped(reason)}" for run, reason in progress["failed"].items()]
    return "\n".join([markdown(("trainings", ""), rows), *([""] * bool(failed)), *failed])


def table_of_comparison(root: str, compared: Compared) -> str:
    """The means, %, with their 95 % intervals, and which pairs differ."""
    from vlbert.comparison.compare import table  # here, as above

    store, path = open_store(root, write=False), f"comparisons/{compared.plan}/numbers.json"
    summary = parse_json(store.get(path), store.where(path))
    titles = {name: variant["title"] for name, variant in summary["variants"].items()}
    lines = [f"Page {link(compared.page)}", "", table(summary), ""]
    for task in summary["tasks"].values():
        pairs = [f"{titles[one['first']]} and {titles[one['second']]}" for one in task["pairs"] if one["differs"]]
        lines.append(f"- {escaped(task['title'])} differs: {escaped('; '.join(pairs)) or 'no pair'}")
    return "\n".join(lines)
