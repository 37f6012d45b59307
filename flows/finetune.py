"""Finetune: torchrun trains a task on its own dataset, from a checkpoint of pre-training or without one."""

from collections.abc import Callable

from prefect import flow, get_run_logger

from flows.artifacts import publish, table_of_metrics
from flows.settings import FinetuneSettings
from flows.training import Trained, check_overrides, train

# Fields of the recipe that this stage sets, each from what.
SETTINGS = {
    "run": "the setting run",
    "data.root": "the flow's root",
    "data.dataset": "the setting dataset",
    "data.held_out": "the setting dataset",
    "data.detector": "the dataset's detector",
    "task.folder": "the setting folder",
    "start_from": "the setting pretrained",
    "vocabulary": "the pre-training's vocabulary",
}


def finetune(
    root: str,
    settings: FinetuneSettings,
    start_from: str | None = None,
    detector: str | None = None,
    vocabulary: str | None = None,
    say: Callable[[str], None] = print,
) -> Trained:
    """Fine-tune from the checkpoint `start_from`, or with `vocabulary` (a vocab.txt) alone. Only from the main thread.

    ValueError where the settings want a checkpoint and none is named, or the other way round.
    """
    if settings.pretrained != (start_from is not None):
        name = settings.run or settings.recipe
        wanted = "name one in start_from" if settings.pretrained else "leave start_from out"
        raise ValueError(
            f"{name} has pretrained = {settings.pretrained} and the checkpoint is {start_from}; "
            f"{wanted}, or set pretrained to {not settings.pretrained}"
        )
    check_overrides(settings.overrides, SETTINGS)
    fields = {
        "data.dataset": settings.dataset,
        "data.held_out": settings.dataset,
        "data.detector": detector,
        "task.folder": settings.folder or None,
        "start_from": start_from,
        "vocabulary": None if start_from else vocabulary,
    }
    return train(root, settings.recipe, settings.run, fields, settings.overrides, settings.processes, say)


@flow(name="finetune", flow_run_name="{settings.recipe} {settings.run}")
def finetune_flow(
    root: str,
    settings: FinetuneSettings,
    start_from: str | None = None,
    detector: str | None = None,
    vocabulary: str | None = None,
) -> Trained:
    """Fine-tune VL-BERT on one task."""
    trained = finetune(root, settings, start_from, detector, vocabulary, get_run_logger().info)
    publish("finetune", trained.run, table_of_metrics(trained.metrics, f"`{trained.checkpoint}`"))
    return trained
