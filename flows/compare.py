"""Compare: a child process trains variants x tasks x seeds and writes a page about what differs (docs/results.md)."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from prefect import flow

from flows.artifacts import escaped, link, name_run, publish, stage_logger
from flows.collect import open_storage
from flows.settings import CompareSettings
from flows.supervisor import ChildFailed, run_child
from storage.object_store import ObjectStore, open_store
from storage.safe_json import parse_json


def compare(root: str, settings: CompareSettings, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Run a comparison, or the rest of it, and return the content of its numbers.json. Only from the main thread.

    ChildFailed where it does not come to a page.
    """
    from vlbert.comparison.plans import find_plan  # here, because it brings torch: other stages need none

    plan = find_plan(settings.plan).name
    command = [sys.executable, "-m", "vlbert", "compare", settings.plan, f"--data.root={root}"]
    command += ["--fields", *settings.fields] if settings.fields else []
    command += ["--seeds", *map(str, settings.seeds)] if settings.seeds else []
    command += ["--jobs", str(settings.jobs)] if settings.jobs else []
    store, numbers = open_store(root), f"comparisons/{plan}/numbers.json"
    before = _written(store, numbers)
    try:
        run_child(command, log, grace=settings.grace)
    except ChildFailed:
        if _written(store, numbers) in (None, before):  # what stands there is of an older comparison
            raise
    return parse_json(store.get(numbers), store.where(numbers))


def _written(store: ObjectStore, path: str) -> float | None:
    """When an object was written; None where there is none."""
    return next((info.modified for info in store.list(path) if info.path == path), None)


@flow(name="compare", flow_run_name="{settings.plan}", persist_result=False)
def compare_flow(root: str, settings: CompareSettings) -> dict[str, Any]:
    """Train variants of models with several seeds, and tell which differ.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        settings: The plan, and fields of its trainings.
    """
    open_storage(root)
    found = compare(root, settings, stage_logger().info)
    page = open_store(root, write=False).where(f"comparisons/{found['plan']}/index.html")
    name_run(found["plan"], f"plan:{found['plan']}")
    publish("compare", found["plan"], partial(table_of_comparison, found, page))
    failed = [f"{one['run']}: {one['reason']}" for one in found["failed"]]
    failed += [
        f"no numbers of {task['title']}: {task['problem']}" for task in found["tasks"].values() if task["problem"]
    ]
    if failed:
        raise RuntimeError(f"{'; '.join(failed)}; the others stand in {page}")
    return found


def table_of_comparison(found: dict[str, Any], page: str) -> str:
    """The means, %, with their 95 % intervals, and which pairs differ."""
    from vlbert.comparison.compare import table  # here, as above

    titles = {name: variant["title"] for name, variant in found["variants"].items()}
    lines = [f"Page {link(page)}", "", table(found), ""]
    for task in found["tasks"].values():
        pairs = [f"{titles[one['first']]} and {titles[one['second']]}" for one in task["pairs"] if one["differs"]]
        lines.append(f"- {escaped(task['title'])} differs: {escaped('; '.join(pairs)) or 'no pair'}")
    return "\n".join(lines)
