"""Train a detector: torchrun makes the weight file that the detect stage reads, from annotated images."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prefect import flow

from detectors.config import AnnotationConfig
from flows.artifacts import name_run, publish, stage_logger, table_of_metrics
from flows.collect import open_storage
from flows.settings import TrainDetectorSettings
from flows.torchrun import OnHeartbeat, TrainingMonitor, check_overrides, given_fields, torchrun
from storage.object_store import open_store
from storage.settings import as_arguments, changed_fields
from training.log import last_metrics

_ANNOTATIONS = [field.name for field in dataclasses.fields(AnnotationConfig)]  # fields of the recipe's `data`, too
# Fields of the recipe that this stage sets, each from what.
SETTINGS = {"root": "the flow's root", "run_name": "the setting run", "init_from": "the setting init_from"}
SETTINGS |= {f"data.{name}": f"the setting {name}" for name in _ANNOTATIONS}


@dataclass(frozen=True)
class TrainedDetector:
    """A trained detector: its weight file and the metrics of its last validation.

    peak_bytes is the memory of its largest process.
    """

    run: str
    recipe: str
    weights: str
    metrics: dict[str, float]
    seconds: float
    peak_bytes: int


def train_detector(
    root: str,
    settings: TrainDetectorSettings,
    log: Callable[[str], None] = print,
    monitor: OnHeartbeat = lambda beat: None,
) -> TrainedDetector:
    """Train a detector, or go on; the result is ROOT/runs/RUN/weights.safetensors. Only from the main thread."""
    started = time.monotonic()
    check_overrides(settings.overrides, SETTINGS)
    run = settings.run or settings.recipe
    annotations = AnnotationConfig(**{name: getattr(settings, name) for name in _ANNOTATIONS})
    fields = {"root": root, "run_name": run, "init_from": settings.init_from}
    data = {f"data.{name}": getattr(annotations, name) for name in changed_fields(annotations)}
    arguments = [settings.recipe, *as_arguments(data | given_fields(fields)), *settings.overrides]
    finished = torchrun("detectors.train", arguments, root, run, settings.processes, log, monitor)
    store, weights = open_store(root, write=False), f"runs/{run}/weights.safetensors"
    if not store.exists(weights):
        raise RuntimeError(f"{run} ended well and left no {store.where(weights)}")
    return TrainedDetector(
        run=run,
        recipe=settings.recipe,
        weights=store.where(weights),
        metrics=last_metrics(store, run),
        seconds=time.monotonic() - started,
        peak_bytes=finished.peak_bytes,
    )


@flow(name="train-detector", flow_run_name="{settings.recipe}", persist_result=True)
def train_detector_flow(root: str, settings: TrainDetectorSettings) -> TrainedDetector:
    """Train the Faster R-CNN that finds regions.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        settings: The recipe, and where images and annotations are.
    """
    open_storage(root)
    monitor = TrainingMonitor("train-detector", root, settings.recipe, settings.run)
    trained = train_detector(root, settings, stage_logger().info, monitor)
    name_run(" ".join(dict.fromkeys([trained.recipe, trained.run])), f"recipe:{trained.recipe}")
    monitor.draw()
    publish("train-detector", trained.run, partial(table_of_metrics, trained.metrics, trained.weights))
    return trained
