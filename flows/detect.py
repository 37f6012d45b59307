"""Run a detector, in a child process, on all images that it has not processed yet.

The catalog lists the pending shards, so a scheduled run of the same flow also processes new shards.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.compute as pc
from prefect import flow
from prefect.runtime import flow_run

from detectors.config import DetectionConfig
from detectors.run import IMAGES, STORAGE_UNREACHABLE, check_found, identify
from flows.artifacts import Artifact, escape, make_counts_table, stage_logger
from flows.collect import networked
from flows.machines import cancel_others, start_others
from flows.supervisor import ChildFailed, run_child
from storage.catalog import Catalog
from storage.inventory import Inventory
from storage.object_store import StorageUnreachable, open_store
from storage.progress import progress_line
from storage.settings import as_arguments, changed_fields


@dataclass(frozen=True)
class Detected:
    """Totals of a detector's regions in one dataset. `new_shards` is the number of shards that this run added."""

    dataset: str
    detector: str
    shards: int
    new_shards: int
    images: int
    regions: int
    seconds: float
    peak_bytes: int  # peak memory of the child process


def detect(
    root: str,
    dataset: str,
    detector: DetectionConfig,
    log: Callable[[str], object] = print,
    show: Callable[[Callable[[], str]], object] = lambda progress: None,
) -> Detected:
    """Run `vlbert detect` on a dataset if any shard is pending. Call this from the main thread only.

    Args:
        show: Called every 5 s with a function that returns a progress line.

    Raises:
        ChildFailed: The detector failed. `tail` contains its last lines of output.
        StorageUnreachable: The storage could not be reached. A retry may succeed.
        ValueError: Most images have no regions.
    """
    started, peak_bytes = time.monotonic(), 0
    catalog = Catalog(open_store(root, write=False), dataset)
    id = identify(detector)
    stage = f"regions/{id}"
    pending = catalog.pending(IMAGES, stage)

    def done() -> int:
        return len(pending) - len(catalog.pending(IMAGES, stage, pending)) if pending else 0

    def progress() -> str:
        return progress_line(dataset, done(), len(pending), "shards", {}, time.monotonic() - started)

    if pending or not catalog.shards(IMAGES):  # without any images, the program reports the error
        command = [sys.executable, "-m", "vlbert", "detect", root, dataset, *as_arguments(changed_fields(detector))]
        try:
            peak_bytes = run_child(command, log, lambda: show(progress))
        except ChildFailed as error:
            if error.returncode == STORAGE_UNREACHABLE:
                raise StorageUnreachable(str(error)) from error
            raise
    headers = catalog.headers(stage)
    if not pending:
        log(f"{dataset}: nothing to detect: {len(headers)} of {len(headers)} shards have {stage}")
        check_found(catalog, stage, log)
    return Detected(
        dataset=dataset,
        detector=id,
        shards=len(headers),
        new_shards=done(),
        images=sum(header.ok_rows for header in headers.values()),
        regions=sum(pc.sum(table["num_regions"]).as_py() or 0 for table in catalog.columns(stage, ["num_regions"])),
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes,
    )


@networked(name="detect-dataset", task_run_name="{dataset}")
def detect_dataset(root: str, dataset: str, detector: DetectionConfig, artifact: Artifact) -> Detected:
    detected = detect(
        root, dataset, detector, stage_logger().info, lambda progress: artifact.show(lambda: escape(progress()))
    )
    catalog = Catalog(open_store(root, write=False), dataset)
    artifact.show(lambda: make_counts_table(catalog, f"regions/{detected.detector}"), now=True)
    return detected


def flow_run_name() -> str:
    return f"detect {', '.join(flow_run.parameters.get('datasets') or ['all'])}"


@flow(name="detect-regions", flow_run_name=flow_run_name, persist_result=False, on_cancellation=[cancel_others])
def detect_flow(
    root: str, detector: DetectionConfig, datasets: tuple[str, ...] = (), machines: int = 1
) -> dict[str, Detected]:
    """Find the regions of all images that this detector has not processed. Returns the results by dataset.

    Args:
        root: Storage root: a local folder, or s3://bucket/prefix.
        detector: The detector and its settings.
        datasets: Datasets to process; empty: all datasets that have images.
        machines: Number of runs of this deployment to share the work, including this one. Each needs a worker.
    """
    start_others(machines)
    store, logger = open_store(root), stage_logger()
    names = list(datasets) or sorted(name for name, stage in Inventory(store).manifests if stage == IMAGES)
    if not names:
        logger.info("nothing to detect: no dataset under %s has images", store.uri(""))
    detected, failed = {}, []
    for name in names:
        try:
            # Called, not submitted: only the main thread can start a child.
            detected[name] = detect_dataset(root, name, detector, Artifact("regions", name))
        except Exception as error:  # noqa: BLE001  raised below, after the other datasets
            logger.error("%s: %s", name, error)
            failed.append(error)
    if failed:
        raise failed[0]
    return detected
