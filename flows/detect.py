"""Detect: every image shard that has no regions of this detector yet gets them, in a child process."""

import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.compute as pc
from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from detectors.run import STORAGE_UNREACHABLE
from flows.artifacts import publish, table_of_counts
from flows.collect import network_failed
from flows.settings import Dataset
from flows.supervisor import ChildFailed, run_child
from storage.catalog import Catalog
from storage.objects import StorageUnreachable, open_objects


class NoReport(RuntimeError):
    """The detector's program ended well without the line about the whole stage that it prints last."""


@dataclass(frozen=True)
class Detected:
    """What a dataset's regions are now; new_shards were added by this run, peak_bytes is the child's memory."""

    dataset: str
    detector: str
    shards: int
    new_shards: int
    images: int
    regions: int
    untrained: bool
    seconds: float
    peak_bytes: int

    @property
    def stage(self) -> str:
        return f"regions/{self.detector}"


def detect(root: str, dataset: Dataset, say: Callable[[str], None] = print) -> Detected:
    """Run `python -m detectors.run` over the dataset; ChildFailed carries its last words. Only from the main thread.

    StorageUnreachable where the storage was out of reach, which another attempt may change.
    """
    started, shards, stages = time.monotonic(), [], []

    def on_line(line: str) -> None:
        report = _as_report(line) or {}
        if "stage" in report:
            stages.append(report["stage"])
        elif "done" not in report:
            say(f"{dataset.name}: {line}")
        else:
            shards.append(report["by"] == "this")
            say(
                f"{dataset.name}: shard {report['shard']}, {report['done']} of {report['of']}: {report['images']} "
                f"images, {report['regions']} regions, {report['images_per_s']:.1f} images/s"
            )

    command = [sys.executable, "-m", "detectors.run", root, dataset.name, *dataset.detector.flags()]
    try:
        finished = run_child(command, on_line, silence=dataset.detector.silence)
    except ChildFailed as error:
        if error.returncode == STORAGE_UNREACHABLE:
            raise StorageUnreachable(str(error)) from error
        raise
    if not stages:
        raise NoReport(f"{dataset.name}: `{shlex.join(command)}` ended well and did not say which stage it wrote")
    catalog = Catalog(open_objects(root), dataset.name)
    detected = _look(catalog, stages[-1], sum(shards), time.monotonic() - started, finished.peak_bytes)
    if not shards:
        say(f"{dataset.name}: nothing to detect: {detected.shards} of {detected.shards} shards have {detected.stage}")
    if detected.untrained:
        say(f"{dataset.name}: WARNING: {detected.stage} come from random weights and mean nothing; they are for trials")
    return detected


def _as_report(line: str) -> dict | None:
    """A line of JSON that the detector printed; None for any other."""
    try:
        report = json.loads(line)
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def _look(catalog: Catalog, stage: str, new_shards: int, seconds: float, peak_bytes: int) -> Detected:
    """The whole stage as its manifests tell it."""
    headers = catalog.headers(stage)
    return Detected(
        dataset=catalog.dataset,
        detector=stage.removeprefix("regions/"),
        shards=len(headers),
        new_shards=new_shards,
        images=sum(header.ok_rows for header in headers.values()),
        regions=sum(pc.sum(table["num_regions"]).as_py() or 0 for table in catalog.columns(stage, ["num_regions"])),
        untrained=any(header.meta["untrained"] for header in headers.values()),
        seconds=seconds,
        peak_bytes=peak_bytes,
    )


@task(
    name="detect-dataset",
    task_run_name="{dataset.name}",
    retries=3,
    retry_delay_seconds=exponential_backoff(10),
    retry_condition_fn=network_failed,
    cache_policy=NO_CACHE,
)
def detect_dataset(root: str, dataset: Dataset) -> Detected:
    return detect(root, dataset, get_run_logger().info)


@flow(name="detect-regions", flow_run_name="{dataset.name}")
def detect_flow(root: str, dataset: Dataset) -> Detected:
    """Find regions in the images of one dataset."""
    detected = detect_dataset(root, dataset)  # called, not submitted: a child is started from the main thread
    if detected.untrained:
        get_run_logger().warning("the regions of %s come from an UNTRAINED detector", dataset.name)
    publish("regions", dataset.name, table_of_counts(Catalog(open_objects(root), dataset.name), detected.stage))
    return detected
