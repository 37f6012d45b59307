"""Detect: every image shard that has no regions of this detector yet gets them, in a child process.

What still needs detecting is what the catalog says, so that the same flow is the scheduled reprocessing of new shards.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow.compute as pc
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import flow_run
from prefect.states import Cancelled

from detectors.config import DetectionConfig
from detectors.run import IMAGES, STORAGE_UNREACHABLE, identify
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
from flows.collect import network_failed, networked, open_storage
from flows.machines import cancel_others, cancel_waiting, start_others
from flows.supervisor import ChildFailed, run_child
from storage.catalog import Catalog, datasets_with
from storage.object_store import StorageUnreachable, open_store
from storage.settings import as_arguments, changed_fields

SILENCE = 86_400.0  # seconds without a finished shard after which a detector hangs and is ended
WAITING = "AwaitingConcurrencySlot"  # the state of a run that waits because another of its deployment is at work


@dataclass(frozen=True)
class Detected:
    """The regions of a dataset. new_shards: added by this run; peak_bytes: of the child's memory."""

    dataset: str
    detector: str
    shards: int
    new_shards: int
    images: int
    regions: int
    random_init: bool
    seconds: float
    peak_bytes: int

    @property
    def stage(self) -> str:
        return f"regions/{self.detector}"


def detect(
    root: str,
    dataset: str,
    detector: DetectionConfig,
    log: Callable[[str], None] = print,
    on_progress: Callable[[int, Callable[[], int]], None] = lambda shards, left: None,
    silence: float | None = SILENCE,
) -> Detected:
    """Run `vlbert detect` over the dataset. Only from the main thread.

    No process is started if the catalog says that no shard is left to detect.

    Args:
        on_progress: called after each line of the detector with the number of shards that were pending at the start,
            and a function that asks the catalog how many of them still are.

    Raises:
        ChildFailed: with the detector's last words.
        StorageUnreachable: if the storage was out of reach, which another attempt may change.
    """
    started, peak_bytes = time.monotonic(), 0
    catalog = Catalog(open_store(root, write=False), dataset)
    stage = f"regions/{identify(detector)}"
    images = catalog.shards(IMAGES)
    pending = catalog.pending(IMAGES, stage)

    def left() -> int:
        return len(catalog.pending(IMAGES, stage, pending)) if pending else 0

    def on_line(line: str) -> None:
        log(line if line.startswith(f"{dataset}: ") else f"{dataset}: {line}")
        on_progress(len(pending), left)

    if pending or not images:  # without any image the program says what is wrong
        command = [sys.executable, "-m", "vlbert", "detect", root, dataset, *as_arguments(changed_fields(detector))]
        try:
            peak_bytes = run_child(command, on_line, silence=silence).peak_bytes
        except ChildFailed as error:
            if error.returncode == STORAGE_UNREACHABLE:
                raise StorageUnreachable(str(error)) from error
            raise
    detected = whole_stage(catalog, stage, len(pending) - left(), time.monotonic() - started, peak_bytes)
    if not pending:
        log(f"{dataset}: nothing to detect: {detected.shards} of {detected.shards} shards have {detected.stage}")
    if detected.random_init:
        log(f"{dataset}: WARNING: {detected.stage} come from random weights and mean nothing; they are for trials")
    return detected


def whole_stage(catalog: Catalog, stage: str, new_shards: int, seconds: float, peak_bytes: int) -> Detected:
    """Return the whole stage as its manifests have it."""
    headers = catalog.headers(stage)
    return Detected(
        dataset=catalog.dataset,
        detector=stage.removeprefix("regions/"),
        shards=len(headers),
        new_shards=new_shards,
        images=sum(header.ok_rows for header in headers.values()),
        regions=sum(pc.sum(table["num_regions"]).as_py() or 0 for table in catalog.columns(stage, ["num_regions"])),
        random_init=any(header.meta["random_init"] for header in headers.values()),
        seconds=seconds,
        peak_bytes=peak_bytes,
    )


@networked(name="detect-dataset", task_run_name="{dataset}", retry_condition_fn=network_failed)
def detect_dataset(root: str, dataset: str, detector: DetectionConfig, silence: float | None = SILENCE) -> Detected:
    started, progress = time.monotonic(), Live("detecting", dataset)

    def show(shards: int, left: Callable[[], int]) -> None:
        if progress.due:
            with reporting():
                progress.show(table_of_progress(facts_of(shards, left())))
            cancel_repeats()
        show_progress(lambda: facts_of(shards, left()))

    def facts_of(shards: int, left: int) -> dict[str, str]:
        done, seconds = shards - left, time.monotonic() - started
        minutes = f"{seconds / done * left / 60:.0f} min" if done else ""
        return {"step": f"{done:,} of {shards:,} shards", "time left": minutes}

    detected = detect(root, dataset, detector, stage_logger().info, show, silence)
    if detected.new_shards:
        progress.show(table_of_progress(facts_of(detected.new_shards, 0)))
    return detected


def cancel_repeats() -> None:
    """Cancel the runs of the clock that wait for this run of their deployment and would do the same, or the same as one
    that waits before them: a detection that takes a day would have a hundred behind it. What others have asked for
    waits for its turn."""
    with reporting(), get_client(sync_client=True) as client:
        ours = client.read_flow_run(flow_run.get_id())
        if ours.deployment_id is None:  # a stage of the pipeline
            return
        waiting = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[ours.deployment_id]),
                state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[WAITING])),
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        )
        for run in repeats(ours, waiting):
            message = "another run of this deployment, at work or before this one, finds what it would have found"
            client.set_flow_run_state(run.id, Cancelled(message=message), force=True)


def repeats(ours: FlowRun, waiting: Sequence[FlowRun]) -> list[FlowRun]:
    """Those of the clock's runs among `waiting`, in order of time, with the parameters of ours or of one before."""
    found, known = [], [ours.parameters]
    for run in waiting:
        if run.auto_scheduled and run.parameters in known:
            found.append(run)
        known.append(run.parameters)
    return found


@flow(name="detect-regions", flow_run_name="detect", persist_result=False, on_cancellation=[cancel_others])
def detect_flow(
    root: str,
    detector: DetectionConfig,
    datasets: tuple[str, ...] = (),
    silence: float | None = SILENCE,
    machines: int = 1,
) -> dict[str, Detected]:
    """Find regions in every image shard that has none yet of this detector; what was found, by dataset.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        detector: How regions are found.
        datasets: Which datasets; none: all that have images.
        silence: Seconds without a finished shard after which the detector hangs and is ended.
        machines: How many workers share the shards, at most: so many runs of this deployment are started.
    """
    cancel_repeats()
    start_others(machines)
    store, logger = open_storage(root), stage_logger()
    names = list(datasets) or datasets_with(store, IMAGES)
    name_run(
        f"detect {', '.join(names) or 'nothing'} by {detector.preset or detector.backend}",
        *(f"dataset:{n}" for n in names),
    )
    show_progress()
    if not names:
        logger.info("nothing to detect: no dataset under %s has images", store.where(""))
    detected, failed = {}, []
    for name in names:
        try:
            # Called, not submitted: a child is started from the main thread.
            found = detected[name] = detect_dataset(root, name, detector, silence)
        except Exception as error:  # noqa: BLE001  raised below: one dataset must not keep the others waiting
            logger.error("%s: %s", name, error)
            failed.append(error)
            continue
        if found.random_init:
            logger.warning("the regions of %s come from an UNTRAINED detector", name)
        name_run(f"detect {', '.join(names)} by {found.detector}", f"detector:{found.detector}")
        publish("regions", name, partial(table_of_counts, Catalog(store, name), found.stage))
    if failed:
        raise failed[0]
    cancel_waiting(machines)
    return detected
