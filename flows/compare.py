"""Compare: a child process trains variants x tasks x seeds and writes a page about what differs (docs/results.md)."""

import sys
from typing import Any

from prefect import flow

from flows.artifacts import Artifact, escaped, stage_logger
from flows.settings import CompareSettings
from flows.supervisor import run_child
from flows.torchrun import Log
from storage.object_store import open_store
from storage.safe_json import parse_json


def compare(root: str, settings: CompareSettings, log: Log = print) -> dict[str, Any]:
    """Run a comparison, or the rest of it, and return the content of its numbers.json. Only from the main thread.

    Raises ChildFailed if a training failed; the page has the others.
    """
    from vlbert.comparison.plans import find_plan  # here, because it brings torch: other stages need none

    plan = find_plan(settings.plan).name
    command = [sys.executable, "-m", "vlbert", "compare", settings.plan, f"--data.root={root}"]
    command += ["--fields", *settings.fields] if settings.fields else []
    command += ["--seeds", *map(str, settings.seeds)] if settings.seeds else []
    command += ["--jobs", str(settings.jobs)] if settings.jobs else []
    run_child(command, log, grace=settings.grace)
    store, numbers = open_store(root), f"comparisons/{plan}/numbers.json"
    return parse_json(store.get(numbers), store.uri(numbers))


@flow(name="compare", flow_run_name="{settings.plan}", persist_result=False)
def compare_flow(root: str, settings: CompareSettings) -> dict[str, Any]:
    """Train variants of models with several seeds, and tell which differ.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        settings: The plan, and fields of its trainings.
    """
    found = compare(root, settings, stage_logger().info)
    page = open_store(root, write=False).uri(f"comparisons/{found['plan']}/index.html")
    Artifact("compare", found["plan"]).show(lambda: escaped(page), now=True)
    return found
