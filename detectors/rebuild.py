"""A detector built again from its metadata, which manifests and checkpoints record."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from detectors.detect import DetectorSettings, FasterRCNNDetector, network_class
from detectors.faster_rcnn import FasterRCNN
from detectors.select import SelectionSettings
from detectors.weights.files import config_from, load_weights, read_config
from storage.digests import sha256_of


def rebuild_detector(recorded: dict | None, file: str | Path | None, where: str) -> FasterRCNNDetector:
    """The detector of `recorded` ({"id", "metadata"}) with the weights of `file`, on this machine's CPU.

    file: None only for a network with random weights. where: who recorded it, for messages. ValueError where no network
    was recorded, or the file holds other weights; a warning where the detector built here has another id.
    """
    metadata = (recorded or {}).get("metadata") or {}
    if "network" not in metadata:
        raise ValueError(f"{where} does not say which network finds regions in a picture of one's own")
    if not metadata["random_init"]:
        _check_weights(file, metadata, where)
    settings = DetectorSettings(
        SelectionSettings(**metadata["selection"]),
        boxes=metadata["boxes"],
        keep_features=metadata["keep_features"],
    )
    config = config_from(metadata["network"], where)
    network = network_class(metadata["backend"]).random_init(config, metadata.get("seed", 0))
    if metadata["random_init"]:
        weights = {"random_init": True, "seed": metadata["seed"]}
    else:
        weights = load_weights(network, file)
    detector = FasterRCNNDetector(network, weights, settings, backend=metadata["backend"])
    detector.threads = torch.get_num_threads()  # changes only the last bits
    if detector.id != recorded["id"]:
        here = json.loads(json.dumps(detector.metadata))
        differences = [
            f"{name} is {here.get(name)} here and {metadata.get(name)} there"
            for name in sorted(here.keys() | metadata.keys())
            if here.get(name) != metadata.get(name) and name not in ("batch", "code_version")
        ]
        warnings.warn(
            f"the regions may differ from those of detector {recorded['id']}, which {where} learned from: "
            f"{'; '.join(differences) or 'the recorded metadata do not say why'}",
            stacklevel=2,
        )
    return detector


def detector_of_file(file: str | Path, **settings: Any) -> FasterRCNNDetector:
    """Return the network that a weight file describes, on this machine's CPU, with these DetectorSettings."""
    network = FasterRCNN.random_init(read_config(Path(file)), seed=0)
    detector = FasterRCNNDetector(network, load_weights(network, Path(file)), DetectorSettings(**settings))
    detector.threads = torch.get_num_threads()
    return detector


def _check_weights(file: str | Path | None, metadata: dict, where: str) -> None:
    expected = f"{metadata['weights_file']} (sha256 {metadata['weights_sha256'][:12]}...)"
    if file is None or not Path(file).is_file():
        missing = f"there is no file {file}" if file else "nothing says where that is"
        raise ValueError(f"{where} learned from the regions of {expected}, and {missing}; name it: --detector FILE")
    sha256 = sha256_of(Path(file))
    if sha256 != metadata["weights_sha256"]:
        raise ValueError(
            f"{file} (sha256 {sha256[:12]}...) is not what {where} learned from: {expected}; name that: --detector FILE"
        )
