"""A detector made again from the description that manifests and checkpoints carry of it (Detector.about)."""

import json
import warnings
from pathlib import Path

import torch

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import FasterRCNN
from detectors.select import SelectionSettings
from detectors.weights.files import config_from, load_weights, read_config, weights_hash


def described_detector(recorded: dict | None, file: str | Path | None, where: str) -> FasterRCNNDetector:
    """The network of `recorded` ({"id", "about"}) with the weights of `file`, on this machine's CPU.

    file: None for a network with random weights alone. `where` is who recorded it, for what is said. ValueError where
    it was no network, or other weights; a warning where something else gives it another id than the recorded one.
    """
    about = (recorded or {}).get("about") or {}
    if "network" not in about or about["boxes"] == "given":
        raise ValueError(f"{where} does not say which network finds regions in a picture of one's own")
    if not about["untrained"]:
        _check_weights(file, about, where)
    settings = DetectorSettings(
        SelectionSettings(**about["selection"]),
        boxes=about["boxes"],
        keep_features=about["keep_features"],
        threads=torch.get_num_threads(),  # changes the last bits alone
    )
    kind = FasterRCNN
    if about["backend"] == "detectron2":
        from detectors.detectron2 import Detectron2FasterRCNN as kind
    network = kind.untrained(config_from(about["network"], where), about.get("seed", 0))
    weights = {"untrained": True, "seed": about["seed"]} if about["untrained"] else load_weights(network, file).about
    detector = FasterRCNNDetector(network, weights, settings, backend=about["backend"])
    if detector.id != recorded["id"]:
        here = json.loads(json.dumps(detector.about))
        apart = [
            f"{name} is {here.get(name)} here and {about.get(name)} there"
            for name in sorted(here.keys() | about.keys())
            if here.get(name) != about.get(name) and name not in ("threads", "batch", "code_version")
        ]
        warnings.warn(
            f"the regions may differ from those of detector {recorded['id']}, which {where} learned from: "
            f"{'; '.join(apart) or 'its description does not tell why'}",
            stacklevel=2,
        )
    return detector


def detector_of_file(file: str | Path, keep_features: bool) -> FasterRCNNDetector:
    """The network that a weight file describes, with the default selection, on this machine's CPU."""
    network = FasterRCNN.untrained(read_config(Path(file)), seed=0)
    settings = DetectorSettings(keep_features=keep_features, threads=torch.get_num_threads())
    return FasterRCNNDetector(network, load_weights(network, Path(file)).about, settings)


def _check_weights(file: str | Path | None, about: dict, where: str) -> None:
    theirs = f"{about['weights_file']} (sha256 {about['weights_sha256'][:12]}...)"
    if file is None or not Path(file).is_file():
        gone = f"and there is no file {file}" if file else "and nothing says where that is"
        raise ValueError(f"{where} learned from the regions of {theirs}, {gone}; name it: --detector FILE")
    found = weights_hash(Path(file))
    if found != about["weights_sha256"]:
        raise ValueError(
            f"{file} (sha256 {found[:12]}...) is not what {where} learned from: {theirs}; name that: --detector FILE"
        )
