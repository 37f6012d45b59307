"""The Prefect side of collecting: `storage.collect.run` does the work, here it is retried, monitored and reported."""

import os
import time
from collections import Counter
from functools import partial
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.tasks import Task, exponential_backoff

from flows.artifacts import (
    Live,
    name_run,
    publish,
    reporting,
    show_progress,
    stage_logger,
    table_of_counts,
    table_of_progress,
)
from flows.machines import cancel_others, cancel_waiting, start_others
from storage.catalog import Catalog
from storage.collect.plan import CollectSettings
from storage.collect.run import IMAGES, Collected, Group, OnCommit, collect, collect_group
from storage.manifests import OK
from storage.object_store import ObjectStore, StorageUnreachable, open_store

__all__ = ["COMMITTED", "Collected", "collect_flow", "network_failed", "open_storage"]

# The event that says that shards were committed, in which root and dataset: with these prefect.yaml starts
# detect-regions/scheduled.
COMMITTED = "vlbert.images.committed"


def network_failed(_task: Task, _run: TaskRun, state: State) -> bool:
    """Whether trying again can help: a network was out of reach. A list with a broken line stays broken."""
    try:
        state.result()
    except OSError as error:
        return isinstance(error, ConnectionError | TimeoutError)
    except Exception:  # noqa: BLE001  only asked for what kind it is; Prefect raises it
        return False
    return False


def storage_failed(_task: Task, _run: TaskRun, state: State) -> bool:
    """Whether trying again can help: the storage did not answer, or not well. A bucket that refuses us stays closed."""
    try:
        state.result()
    except StorageUnreachable as error:
        return error.http_status is None or error.http_status == 429 or error.http_status >= 500
    except Exception:  # noqa: BLE001  as above
        return False
    return False


# A task where the network is: tried again three times, after about 10, 20 and 40 s. The storage says what is done.
networked = partial(
    task,
    retries=3,
    retry_delay_seconds=exponential_backoff(10),
    retry_jitter_factor=0.5,
    cache_policy=NO_CACHE,
    persist_result=False,
)


@networked(name="open-storage", retry_condition_fn=storage_failed)
def open_bucket(root: str) -> ObjectStore:
    return open_store(root)


def open_storage(root: str) -> ObjectStore:
    """The root that a flow works on, opened for writing; a bucket that is away at its start is asked again."""
    return open_bucket(root) if "://" in root else open_store(root)


@networked(
    name="collect-shards",
    task_run_name="{settings.name} from {group.parts[0].shard}",
    retry_condition_fn=network_failed,
)
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
    progress = Live("collecting", dataset.name)
    name_run(f"collect {dataset.name} from {Path(dataset.origin).name}", f"dataset:{dataset.name}")
    show_progress()
    open_storage(root)
    started, shards, committed = time.monotonic(), 0, set()

    def run_group(root: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        nonlocal shards

        def count(shard: str) -> None:
            committed.add(shard)
            on_commit(shard)

        counts = collect_shards(root, settings, group, count)
        shards = len(group.parts) + (shards if group.before else 0)
        sofar = Counter(group.before) + Counter(counts)
        seconds = time.monotonic() - started
        left = seconds / sofar.total() * (group.rows - sofar.total())
        facts = {
            "shards": f"{shards:,} of {group.shards:,}",
            "rows": f"{sofar.total():,} of {group.rows:,}",
            "images": f"{sofar[OK]:,}, {sofar[OK] / seconds:.1f}/s",
            "time left": f"{left / 60:.0f} min",
        }
        if progress.due or shards == group.shards:
            progress.show(table_of_progress(facts))
        show_progress(lambda: {"step": f"{facts['shards']} shards", "time left": facts["time left"]})
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
    catalog = Catalog(open_store(root, write=False), dataset.name)
    publish("images", dataset.name, partial(table_of_counts, catalog, IMAGES))
    cancel_waiting(machines)
    return collected
