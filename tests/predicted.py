"""Checkpoints with random weights that find regions with the demo's detector."""

import dataclasses
import json
import shutil
from pathlib import Path

import torch
from places import PROJECT
from tiny import TINY_MODEL, tiny_recipe

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import DEMO, FasterRCNN
from detectors.select import SelectionSettings
from detectors.weights.files import load_weights, read_config
from storage.object_store import open_store
from training.checkpoint import Writer
from training.optimizer import make_optimizer
from vlbert.checkpoint import DETECTOR, save_checkpoint
from vlbert.config import Recipe, RegionConfig
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel

WEIGHTS = PROJECT / "demo" / "detector.safetensors"
WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "blue", "white", "square", "circle", "why", "is", "object"])
STARTED = dataclasses.replace(  # its Fast R-CNN from the demo's detector
    TINY_MODEL,
    regions=dataclasses.replace(TINY_MODEL.regions, resnet=DEMO.resnet, random_init=False, weights=str(WEIGHTS)),
)
ON_FEATURES = dataclasses.replace(TINY_MODEL, regions=RegionConfig(features="precomputed", resnet=DEMO.resnet))


def demo_detector(**settings: object) -> FasterRCNNDetector:
    """The demo's, as its stages run it."""
    network = FasterRCNN.random_init(dataclasses.replace(read_config(WEIGHTS), post_nms=30), seed=0)
    selection = SelectionSettings(minimum=3)
    return FasterRCNNDetector(network, load_weights(network, WEIGHTS), DetectorSettings(selection, **settings))


def recorded(detector: FasterRCNNDetector) -> dict:
    return {"id": detector.id, "metadata": json.loads(json.dumps(detector.metadata))}


def save_model(root: Path, run: str, task: object, detector: dict | None, **changes: object) -> Path:
    recipe = tiny_recipe(root, task=task, run_name=run, **changes)
    torch.manual_seed(0)
    model = TaskModel(VLBert(recipe.model, len(WORDS)), make_task(task, WORDS, 36))
    return save_as(root, run, recipe, model, detector)


def save_with_weights(root: Path, *arguments: object, **changes: object) -> Path:
    """The same, with the demo detector's weights in its folder."""
    folder = save_model(root, *arguments, **changes)
    shutil.copyfile(WEIGHTS, folder / DETECTOR)
    return folder


def save_as(root: Path, run: str, recipe: Recipe, model: TaskModel, detector: dict | None = None) -> Path:
    """The checkpoint of a run's first step, with this model."""
    optimizer = make_optimizer(model, recipe.optimizer)
    with Writer(open_store(str(root)), log=lambda line: None) as writer:
        return root / save_checkpoint(writer, 1, recipe, model, optimizer, {}, detector)
