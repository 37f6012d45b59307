"""Collect: download or import images with `storage.collect.run`, with retries and an artifact in Prefect's UI."""

import os
from functools import partial

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.tasks import Task, exponential_backoff

from flows.artifacts import Artifact, log_errors, make_counts_table, stage_logger
from flows.machines import cancel_others, start_others
from storage.catalog import Catalog
from storage.collect.plan import CollectSettings
from storage.collect.run import IMAGES, Collected, Group, OnCommit, collect, collect_group
from storage.object_store import open_store

# Event emitted after shards are committed, with root and dataset: prefect.yaml starts detect-regions/scheduled with
# these.
COMMITTED = "vlbert.images.committed"


def is_transient(_task: Task, _run: TaskRun, state: State) -> bool:
    """Return True if a task failed because the network or the storage was unavailable. A retry may then help."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, ConnectionError | TimeoutError) and not getattr(error, "lasts", False)


# A task that uses the network, retried three times, after about 10, 20 and 40 s. The storage records what is done.
networked = partial(
    task,
    retries=3,
    retry_delay_seconds=exponential_backoff(10),
    retry_jitter_factor=0.5,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
    persist_result=False,
)


@networked(name="collect-shards", task_run_name="{settings.name} from {group.parts[0].shard}")
def collect_shards(root: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
    return collect_group(root, settings, group, on_commit, stage_logger().info)


@flow(
    name="collect-captions",
    flow_run_name="collect {dataset.name}",
    persist_result=False,
    on_cancellation=[cancel_others],
)
def collect_flow(root: str, dataset: CollectSettings, machines: int = 1) -> Collected:
    """Download or import the images of one dataset.

    Args:
        root: Storage root: a local folder, or s3://bucket/prefix.
        dataset: The dataset's name, and the list or folder that its images come from.
        machines: Number of runs of this deployment to share the work, including this one. Each needs a worker.
    """
    start_others(machines)
    artifact, committed = Artifact(IMAGES, dataset.name), set()
    page = partial(make_counts_table, Catalog(open_store(root), dataset.name), IMAGES)

    def run_group(root: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        def record(shard: str) -> None:
            committed.add(shard)
            on_commit(shard)

        counts = collect_shards(root, settings, group, record)
        artifact.show(page)
        return counts

    try:
        collected = collect(root, dataset, stage_logger().info, run_group)
    finally:  # even if a later group has failed
        if committed and flow_run.parent_flow_run_id is None:  # inside the pipeline, the next stage detects them
            with log_errors():
                full_root = root if "://" in root else os.path.abspath(root)
                resource = {"prefect.resource.id": f"vlbert.images.{dataset.name}", "vlbert.root": full_root}
                payload = {"root": full_root, "dataset": dataset.name, "new_shards": len(committed)}
                emit_event(COMMITTED, resource, payload=payload)
    artifact.show(page, now=True)
    return collected
