"""Train a detector on annotated images with torchrun. The detect stage reads the resulting weight file."""

import dataclasses
import time

from prefect import flow

from detectors.config import AnnotationConfig
from flows.artifacts import stage_logger
from flows.settings import TrainDetectorSettings
from flows.torchrun import Log, Trained, Watch, check_overrides, drop_none, show_training, torchrun
from storage.object_store import open_store
from storage.settings import as_arguments, changed_fields
from training.log import last_metrics

_ANNOTATIONS = [field.name for field in dataclasses.fields(AnnotationConfig)]  # also fields of the recipe's `data`
# Fields of the recipe that this stage sets, each with its source.
SETTINGS = {"root": "the flow's root", "run_name": "the setting run", "init_from": "the setting init_from"}
SETTINGS |= {f"data.{name}": f"the setting {name}" for name in _ANNOTATIONS}


def train_detector(
    root: str, settings: TrainDetectorSettings, log: Log = print, watch: Watch = lambda: None
) -> Trained:
    """Train or resume a detector, and write ROOT/runs/RUN/weights.safetensors. Call this from the main thread only."""
    started = time.monotonic()
    check_overrides(settings.overrides, SETTINGS)
    run = settings.run or settings.recipe
    annotations = AnnotationConfig(**{name: getattr(settings, name) for name in _ANNOTATIONS})
    fields = {"root": root, "run_name": run, "init_from": settings.init_from}
    fields = changed_fields(annotations, prefix="data.") | drop_none(fields)
    arguments = [settings.recipe, *as_arguments(fields), *settings.overrides]
    peak_bytes = torchrun("detectors.train", arguments, settings.processes, log, watch)
    store, weights = open_store(root, write=False), f"runs/{run}/weights.safetensors"
    if not store.exists(weights):
        raise RuntimeError(f"{run} succeeded, but there is no {store.uri(weights)}")
    return Trained(
        run=run,
        recipe=settings.recipe,
        detector="",
        snapshot="",
        checkpoint=store.uri(weights),
        metrics=last_metrics(store, run),
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes,
    )


@flow(name="train-detector", flow_run_name="{settings.recipe} {settings.run}", persist_result=True)
def train_detector_flow(root: str, settings: TrainDetectorSettings) -> Trained:
    """Train a detector that finds image regions.

    Args:
        root: Storage root: a local folder, or s3://bucket/prefix.
        settings: The recipe, images and annotations.
    """
    log, run = stage_logger().info, settings.run or settings.recipe
    return show_training("train-detector", root, run, log, lambda watch: train_detector(root, settings, log, watch))
