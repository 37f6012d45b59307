"""How right a detector is on the held-out scenes of demo data, as `vlbert train-detector` reports it."""

import dataclasses
import json
from pathlib import Path

import torch

from demo.data import DemoData
from demo.deployments import training_of_detector
from detectors.faster_rcnn import FasterRCNN
from detectors.ground_truth import read_ground_truth
from detectors.recipes import detector_demo
from detectors.validate import validate
from detectors.weights.files import load_weights, read_config
from training import distributed


def evaluate_detector(root: Path, data: DemoData, weights: Path) -> dict:
    """The metrics and the classes by average precision; written to ROOT/detector.json, too.

    On one thread, so that the same file gives the same numbers again.
    """
    recipe, training = detector_demo(), training_of_detector(data)
    images = {name: getattr(training, name) for name in ("annotations", "images", "held_out_last")}
    recipe = dataclasses.replace(recipe, network=read_config(weights), data=dataclasses.replace(recipe.data, **images))
    network = FasterRCNN(recipe.network)
    load_weights(network, weights)
    truth = read_ground_truth(recipe.data)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = distributed.World(0, 1, torch.device("cpu"))
        metrics, classes = validate(network, recipe, truth.held_out, truth.classes, alone)
    finally:
        torch.set_num_threads(threads)
    found = {"weights": weights.name, "scenes": len(truth.held_out), "metrics": metrics, "classes": classes}
    (root / "detector.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found
