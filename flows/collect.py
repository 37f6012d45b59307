"""The Prefect side of collecting: `storage.collect` does the work, here it is retried, watched and reported."""

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from flows.artifacts import publish, table_of_counts
from flows.settings import Dataset
from storage.catalog import Catalog
from storage.collect import IMAGES, Collected, CollectSettings, Group, collect, collect_group
from storage.objects import open_objects

__all__ = ["Collected", "collect_flow", "collect_settings", "network_failed"]


def collect_settings(dataset: Dataset) -> CollectSettings:
    """The part of a dataset's settings that collecting is told."""
    return CollectSettings(
        dataset.name,
        captions=dataset.captions,
        images=dataset.images,
        download=dataset.download,
        rows_per_shard=dataset.rows_per_shard,
        shards_per_group=dataset.shards_per_task,
    )


def network_failed(_task: Task, _run: TaskRun, state: State) -> bool:
    """Whether trying again can help: a network was out of reach. A list with a broken line stays broken."""
    try:
        state.result()
    except OSError as error:
        return isinstance(error, ConnectionError | TimeoutError)
    except Exception:  # noqa: BLE001  only asked for what kind it is; Prefect raises it
        return False
    return False


@task(
    name="collect-shards",
    task_run_name="{settings.name} from {group.parts[0].shard}",
    retries=3,
    retry_delay_seconds=exponential_backoff(10),
    retry_condition_fn=network_failed,
    cache_policy=NO_CACHE,
)
def collect_shards(root: str, settings: CollectSettings, group: Group) -> dict[str, int]:
    return collect_group(root, settings, group, get_run_logger().info)


@flow(name="collect-captions", flow_run_name="{dataset.name}")
def collect_flow(root: str, dataset: Dataset) -> Collected:
    """Download or import the images of one dataset."""
    collected = collect(root, collect_settings(dataset), get_run_logger().info, collect_shards)
    publish("images", dataset.name, table_of_counts(Catalog(open_objects(root), dataset.name), IMAGES))
    return collected
