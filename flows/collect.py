"""The Prefect side of collecting: `storage.collect.run` does the work, here it is retried and shown."""

import os
from functools import partial

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.tasks import Task, exponential_backoff

from flows.artifacts import Artifact, reporting, stage_logger, table_of_counts
from flows.machines import cancel_others, start_others
from storage.catalog import Catalog
from storage.collect.plan import CollectSettings
from storage.collect.run import IMAGES, Collected, Group, OnCommit, collect, collect_group
from storage.object_store import open_store

__all__ = ["COMMITTED", "Collected", "collect_flow", "may_pass", "networked"]

# The event that says that shards were committed, in which root and dataset: with these prefect.yaml starts
# detect-regions/scheduled.
COMMITTED = "vlbert.images.committed"


def may_pass(_task: Task, _run: TaskRun, state: State) -> bool:
    """Return whether trying again can help: the network or the storage was out of reach.

    A list with a broken line stays broken, and a bucket that refuses us stays closed.
    """
    error = state.result(raise_on_failure=False)
    status = getattr(error, "http_status", None)  # of the storage's answer
    return isinstance(error, ConnectionError | TimeoutError) and (status is None or status == 429 or status >= 500)


# A task where the network is: tried again three times, after about 10, 20 and 40 s. The storage says what is done.
networked = partial(
    task,
    retries=3,
    retry_delay_seconds=exponential_backoff(10),
    retry_jitter_factor=0.5,
    retry_condition_fn=may_pass,
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
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        dataset: Its name, and the list or the folder that its images come from.
        machines: How many workers share the shards, at most: so many runs of this deployment are started.
    """
    start_others(machines)
    artifact, committed = Artifact(IMAGES, dataset.name), set()
    page = partial(table_of_counts, Catalog(open_store(root), dataset.name), IMAGES)

    def run_group(root: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        def note(shard: str) -> None:
            committed.add(shard)
            on_commit(shard)

        counts = collect_shards(root, settings, group, note)
        artifact.show(page)
        return counts

    try:
        collected = collect(root, dataset, stage_logger().info, run_group)
    finally:  # also where a later group has failed
        if committed and flow_run.parent_flow_run_id is None:  # inside the pipeline, the next stage detects them
            with reporting():
                where = root if "://" in root else os.path.abspath(root)
                resource = {"prefect.resource.id": f"vlbert.images.{dataset.name}", "vlbert.root": where}
                payload = {"root": where, "dataset": dataset.name, "new_shards": len(committed)}
                emit_event(COMMITTED, resource, payload=payload)
    artifact.show(page, now=True)
    return collected
