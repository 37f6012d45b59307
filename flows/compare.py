"""Train models on several tasks with several seeds, in a child process, and compare them (docs/results.md)."""

import sys
from typing import Any

from prefect import flow

from flows.artifacts import Artifact, escape, stage_logger
from flows.settings import CompareSettings
from flows.supervisor import run_child
from flows.torchrun import Log
from storage.object_store import open_store
from storage.safe_json import parse_json
from storage.settings import as_arguments


def compare(root: str, settings: CompareSettings, log: Log = print) -> dict[str, Any]:
    """Run or resume a comparison, and return the content of its numbers.json. Call this from the main thread only.

    Raises ChildFailed if a training run failed. The results page then has only the other runs.
    """
    from vlbert.comparison.plans import find_plan  # here, because it imports torch, which other stages do not need

    plan = find_plan(settings.plan).name
    options = {"fields": settings.fields, "seeds": settings.seeds, "jobs": settings.jobs}
    arguments = as_arguments({"data.root": root} | {name: value for name, value in options.items() if value})
    run_child([sys.executable, "-m", "vlbert", "compare", settings.plan, *arguments], log, grace=settings.grace)
    store, numbers = open_store(root), f"comparisons/{plan}/numbers.json"
    return parse_json(store.get(numbers), store.uri(numbers))


@flow(name="compare", flow_run_name="{settings.plan}", persist_result=True)
def compare_flow(root: str, settings: CompareSettings) -> dict[str, Any]:
    """Train the models of a plan with several seeds, and compare their scores.

    Args:
        root: Storage root: a local folder, or s3://bucket/prefix.
        settings: The plan, and the fields to set in its training runs.
    """
    numbers = compare(root, settings, stage_logger().info)
    page = open_store(root, write=False).uri(f"comparisons/{numbers['plan']}/index.html")
    Artifact("compare", numbers["plan"]).show(lambda: escape(page), now=True)
    return numbers
