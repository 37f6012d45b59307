"""How right a detector is on the held-out scenes of demo data, as `python -m detectors.train` reports it."""

import dataclasses
import json
from pathlib import Path

import torch

from demo.data import DemoData
from detectors.faster_rcnn import FasterRCNN
from detectors.ground_truth import read_ground_truth
from detectors.recipes import detector_demo
from detectors.validate import validate
from detectors.weights.files import load_weights, read_config, weights_hash
from training import distributed

FILE = "detector.json"


def evaluate_detector(root: Path, data: DemoData, weights: Path) -> dict:
    """What ROOT/detector.json holds: the metrics, the classes by average precision, and of which weights and scenes.

    Measured where that file is not there, or is about other weights or other data. On one thread, so that the same
    file gives the same numbers again.
    """
    file = root / FILE
    about = {"weights_sha256": weights_hash(weights), "data": dataclasses.asdict(data.settings)}
    if file.is_file():
        known = json.loads(file.read_text(encoding="utf-8"))
        if {name: known[name] for name in about} == about:
            return known
    recipe = detector_demo()
    images = dataclasses.replace(
        recipe.data,
        annotations=str(data.annotations),
        images=(str(data.images),),
        held_out_last=data.settings.held_out_scenes,
    )
    recipe = dataclasses.replace(recipe, network=read_config(weights), data=images)
    network = FasterRCNN(recipe.network)
    load_weights(network, weights)
    truth = read_ground_truth(images)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = distributed.World(0, 1, torch.device("cpu"))
        metrics, classes = validate(network, recipe, truth.held_out, truth.classes, alone)
    finally:
        torch.set_num_threads(threads)
    found = about | {"weights": weights.name, "scenes": len(truth.held_out), "metrics": metrics, "classes": classes}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
    return found
