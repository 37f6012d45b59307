"""Functions that build a detector from the metadata in manifests and checkpoints, or from a weight file."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from detectors.detect import DetectorSettings, FasterRCNNDetector, network_class
from detectors.faster_rcnn import FasterRCNN
from detectors.weights.files import config_from_json, load_weights, read_config
from storage.digests import sha256_of
from storage.safe_json import printable
from storage.settings import from_json


def rebuild_detector(recorded: dict | None, file: str | Path | None, source: str) -> FasterRCNNDetector:
    """Rebuild a recorded detector on the CPU. Warns if the rebuilt detector does not have the recorded id.

    `recorded` holds the detector's `id` and `metadata`. `file` is the weight file, which is not needed for random
    weights. In messages, `source` names the model or run that has the record. Raises ValueError if the record has
    no network, or if the weight file is not the recorded one.
    """
    recorded = recorded or {}
    metadata = recorded.get("metadata") or {}
    if "network" not in metadata:
        raise ValueError(f"{source} does not record a network that can detect regions in new images")
    weights_file = None if metadata.get("random_init") is True else _check_weights(file, metadata, source)
    names = {"selection", "boxes", "keep_features"} & metadata.keys()
    fields = {name: metadata[name] for name in names} | {"device": "cpu"}
    settings = from_json(DetectorSettings, fields, f"{source}: its detector")
    config = config_from_json(metadata["network"], source)
    backend, seed = str(metadata.get("backend")), metadata.get("seed", 0)  # if damaged, they are named below
    network = network_class(backend).random_init(config, seed if isinstance(seed, int) else 0)
    weights = load_weights(network, weights_file) if weights_file else {"random_init": True, "seed": seed}
    detector = FasterRCNNDetector(network, weights, settings, backend=backend)
    detector.networks, detector.threads = 1, torch.get_num_threads()  # changes only the last bits
    if detector.id != recorded.get("id"):
        here = json.loads(json.dumps(detector.metadata))
        differences = [
            f"{name} is {here.get(name)} here but {metadata.get(name)} there"
            for name in sorted(here.keys() | metadata.keys())
            if here.get(name) != metadata.get(name) and name not in ("batch", "code_version")
        ]
        warnings.warn(
            f"the regions may differ from those of detector {printable(recorded.get('id'))}, on which {source} was "
            f"trained: {printable('; '.join(differences)) or 'the reason is not in the recorded metadata'}",
            stacklevel=2,
        )
    return detector


def detector_of_file(file: str | Path, **settings: Any) -> FasterRCNNDetector:
    """Build the detector of a weight file on the CPU. `settings` are fields of DetectorSettings."""
    network = FasterRCNN.random_init(read_config(Path(file)), seed=0)
    detector = FasterRCNNDetector(
        network, load_weights(network, Path(file)), DetectorSettings(device="cpu", **settings)
    )
    detector.networks, detector.threads = 1, torch.get_num_threads()
    return detector


def _check_weights(file: str | Path | None, metadata: dict, source: str) -> Path:
    """Return `file` as a Path. Raises ValueError if it is missing or its weights are not the recorded ones."""
    expected_sha256 = str(metadata.get("weights_sha256"))
    expected = printable(f"{metadata.get('weights_file')} (sha256 {expected_sha256[:12]}...)")
    if file is None or not Path(file).is_file():
        missing = f"{file} does not exist" if file else "it is not in the model's folder"
        raise ValueError(
            f"{source} was trained on the regions of {expected}, but {missing}; give detector=FILE (--detector FILE)"
        )
    sha256 = sha256_of(Path(file))
    if sha256 != expected_sha256:
        raise ValueError(
            f"{file} (sha256 {sha256[:12]}...) is not the detector that {source} was trained with, {expected}; give "
            "that as detector=FILE (--detector FILE)"
        )
    return Path(file)
