"""Weight files (safetensors) of the Faster R-CNN, identified by their hash and loaded completely or not at all."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from detectors.detectron2 import AnyFasterRCNN
from detectors.faster_rcnn import FasterRCNNConfig
from detectors.resnet import Res5, ResNetC4, ResNetConfig
from detectors.weights.tensor_files import read_safetensors
from storage.digests import sha256_of
from storage.safe_json import parse_json, short_repr
from storage.settings import as_arguments, from_json
from training.checkpoint import check_tensors

RESNET = ("backbone.", "roi_heads.res5.")
ATTRIBUTE_HEAD = tuple(f"roi_heads.box_predictor.{layer}." for layer in ("cls_embedding", "fc_attr", "attr_score"))
ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
COUNTER = re.compile(r"\.num_batches_tracked$")  # frozen norms have no such tensor
_MISMATCH = "does not fit the network; check whether it is for another preset"


def load_weights(network: AnyFasterRCNN, file: Path) -> dict[str, Any]:
    """Load all weights of a file into the network, and return the metadata that FasterRCNNDetector needs.

    If the file has no attribute head, the network's head is removed. If it has no anchors, the network keeps its own.
    If another tensor is missing, unexpected or of the wrong shape, nothing is loaded, and a ValueError lists all such
    tensors.
    """
    tensors, _ = read_safetensors(file)
    if tensors and all(name.startswith(RESNET) for name in tensors):
        raise ValueError(f"{file} has only a ResNet, not a detector; use it for model.regions.weights of VL-BERT")
    metadata, own = describe_weights(file, network.config), network.proposal_generator.cell_anchors
    attributes = metadata["attribute_head"]
    expected = {n: t for n, t in network.state_dict().items() if attributes or not n.startswith(ATTRIBUTE_HEAD)}
    check_tensors(tensors, expected | ({ANCHORS: own} if ANCHORS in tensors else {}), f"{file} {_MISMATCH}")
    anchors = tensors.pop(ANCHORS, own)
    if not attributes:
        network.roi_heads.box_predictor.drop_attributes()
    network.load_state_dict(tensors, strict=True)
    own.copy_(anchors)
    return metadata


def describe_weights(file: Path, config: FasterRCNNConfig) -> dict[str, Any]:
    """Return the metadata that load_weights returns for a network of `config`, without reading the tensors."""
    parsed, (names, _) = read_metadata(file), read_safetensors(file, tensors=False)
    attributes = any(name.startswith(ATTRIBUTE_HEAD) for name in names)
    counts = {"classes": config.num_classes} | ({"attributes": config.num_attributes} if attributes else {})
    for kind, count in counts.items():
        if parsed[kind] is not None and len(parsed[kind]) != count:
            raise ValueError(f"{file} names {len(parsed[kind])} {kind}, but the network has {count}")
    return {
        "random_init": False,
        "weights_file": Path(file).name,
        "weights_sha256": sha256_of(Path(file)),
        "attribute_head": attributes,
        # `file`: from this file or the release from which it was converted; `generated`: computed.
        "anchors": parsed["anchors"] or ("file" if ANCHORS in names else "generated"),
        "classes": parsed["classes"],
        "attribute_names": parsed["attributes"] if attributes else None,
        "release": parsed["release"],
    }


def read_metadata(file: Path) -> dict[str, Any]:
    """Return the metadata of a weight file, with None for missing keys. Raises ValueError if a value is invalid.

    `network` is a FasterRCNNConfig, `classes` and `attributes` are lists of names, `anchors` and `release` are strings.
    """
    parsed: dict[str, Any] = {}
    _, texts = read_safetensors(file, tensors=False)
    kinds = {"network": dict, "classes": list, "attributes": list, "anchors": str, "release": str}
    for key, wanted in kinds.items():
        location = f"{file}: its metadata {key!r}"
        parsed[key] = parse_json(texts.get(key, "null"), location, (wanted, type(None)), fix="convert it again")
        if wanted is list and not all(isinstance(name, str) for name in parsed[key] or ()):
            raise ValueError(f"{location} is {short_repr(parsed[key])}, not a list of strings; convert it again")
    if parsed["network"] is not None:
        parsed["network"] = config_from_json(parsed["network"], str(file))
    return parsed


def read_config(file: Path) -> FasterRCNNConfig:
    """Return the configuration of a weight file's network. Raises ValueError if the configuration is missing."""
    network = read_metadata(file)["network"]
    if network is None:
        raise ValueError(f"{file} does not describe the network of its weights; set preset")
    return network


def config_from_json(fields: Mapping[str, Any], source: str) -> FasterRCNNConfig:
    """Return the FasterRCNNConfig that was saved as JSON with dataclasses.asdict.

    Missing fields get their defaults, except for `resnet`, which is required. Raises ValueError if a field is invalid.
    """
    try:
        if not isinstance(fields, Mapping) or "resnet" not in fields:
            raise ValueError("it has no resnet")
        return from_json(FasterRCNNConfig, dict(fields), source)
    except ValueError as error:
        raise ValueError(f"{source}: its `network` does not fit this version ({error}); convert it again") from error


def write_weights(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Write a weight file, and return its sha256. The same content always gives the same bytes.

    The values of `metadata` are written as JSON: `classes` and `attributes` (lists of names), `network`
    (dataclasses.asdict of its configuration), and, for converted files, the keys that releases.py adds.
    """
    # safetensors writes metadata in a different order in each process, so the same weights would get different hashes.
    saved = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
    length = int.from_bytes(saved[:8], "little")
    texts = {key: json.dumps(value) for key, value in sorted(metadata.items())}
    header = json.dumps({"__metadata__": texts} | json.loads(saved[8 : 8 + length]), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    part = file.with_name(f"{file.name}.part")
    with open(part, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.write(memoryview(saved)[8 + length :])
    part.replace(file)
    return sha256_of(file)


def load_resnet(backbone: ResNetC4, res5: Res5, file: Path) -> None:
    """Load the ResNet of a detector's weight file (`backbone.*`, `roi_heads.res5.*`) for VL-BERT's region features.

    The batch counters of trainable norms are set to 0. If a tensor is missing, unexpected or of the wrong shape,
    nothing is loaded, and a ValueError lists these tensors.
    """
    # The stem's pooling is not checked: VL-BERT's authors pad it, but use weights that were trained without padding.
    check_resnet(backbone.config, file, ("stride_in_1x1", "res5_dilated"), "model.regions.resnet")
    tensors = {name: tensor for name, tensor in read_safetensors(file)[0].items() if name.startswith(RESNET)}
    modules = dict(zip(RESNET, (backbone, res5), strict=True))
    ours = {prefix + name: tensor for prefix, module in modules.items() for name, tensor in module.state_dict().items()}
    expected = {name: tensor for name, tensor in ours.items() if not COUNTER.search(name)}
    check_tensors(tensors, expected, f"{file} {_MISMATCH}")
    for name, tensor in ours.items():
        tensor.copy_(tensors.get(name, torch.zeros_like(tensor)))


def check_resnet(config: ResNetConfig, file: Path, names: Sequence[str], setting: str) -> None:
    """Raise ValueError if `config` differs from the file's ResNet in one of the fields `names`.

    Such a file would load, but give wrong results. `setting` is the name of `config` on the command line.
    """
    network = read_metadata(file)["network"]
    for name in names if network else ():
        ours, theirs = getattr(config, name), getattr(network.resnet, name)
        if theirs != ours:
            (argument,) = as_arguments({f"{setting}.{name}": theirs})
            raise ValueError(f"{file} was trained with resnet.{name} = {theirs}, not {ours}; set {argument}")
