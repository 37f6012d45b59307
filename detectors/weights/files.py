"""Weight files (safetensors) of the Faster R-CNN: loaded whole or not at all, and identified by their hash."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.resnet import Res5, ResNetC4, ResNetConfig
from detectors.weights.tensor_files import read_safetensors
from storage.digests import sha256_of
from storage.safe_json import parse_json, short_repr
from storage.settings import as_arguments, from_json

RESNET = ("backbone.", "roi_heads.res5.")
ATTRIBUTE_HEAD = tuple(f"roi_heads.box_predictor.{layer}." for layer in ("cls_embedding", "fc_attr", "attr_score"))
ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
COUNTER = re.compile(r"\.num_batches_tracked$")  # which a frozen norm does not have
_OTHER = "does not fit the network; is it for another preset?"


def load_weights(network: FasterRCNN, file: Path) -> dict[str, Any]:
    """Put the file's weights into the network, all or none; return what a detector's metadata say of them.

    Only the whole attribute head may be absent; the network then goes on without it. Anchors may be there.

    Raises:
        ValueError: Names the file and every tensor that is missing, unexpected or of a wrong shape.
    """
    tensors, texts = read_safetensors(file)
    if tensors and all(name.startswith(RESNET) for name in tensors):
        raise ValueError(f"{file} holds a ResNet alone and no detector: it is for model.regions.weights of VL-BERT")
    metadata, own = _describe(file, tensors.keys(), texts, network.config), network.proposal_generator.cell_anchors
    attributes = metadata["attribute_head"]
    expected = {n: t for n, t in network.state_dict().items() if attributes or not n.startswith(ATTRIBUTE_HEAD)}
    check_tensors(tensors, expected | ({ANCHORS: own} if ANCHORS in tensors else {}), f"{file} {_OTHER}")
    anchors = tensors.pop(ANCHORS, own)
    if not attributes:
        network.roi_heads.box_predictor.drop_attributes()
    network.load_state_dict(tensors, strict=True)
    own.copy_(anchors)
    return metadata


def describe_weights(file: Path, config: FasterRCNNConfig) -> dict[str, Any]:
    """Return what load_weights returns for a network of this configuration; no tensor is read."""
    return _describe(file, *read_safetensors(file, tensors=False), config)


def _describe(file: Path, names: Collection[str], texts: Mapping[str, str], config: FasterRCNNConfig) -> dict[str, Any]:
    found, attributes = _parse_metadata(texts, file), any(name.startswith(ATTRIBUTE_HEAD) for name in names)
    counts = {"classes": config.num_classes} | ({"attributes": config.num_attributes} if attributes else {})
    for kind, count in counts.items():
        if found[kind] is not None and len(found[kind]) != count:
            raise ValueError(f"{file} names {len(found[kind])} {kind}, the network has {count}")
    return {
        "random_init": False,
        "weights_file": Path(file).name,
        "weights_sha256": sha256_of(Path(file)),
        "attribute_head": attributes,
        # `file`: from the file, or from the release that it was made of; `generated`: by a rule.
        "anchors": found["anchors"] or ("file" if ANCHORS in names else "generated"),
        "classes": found["classes"],
        "attribute_names": found["attributes"] if attributes else None,
        "release": found["release"],
    }


def read_metadata(file: Path) -> dict[str, Any]:
    """Return what a file says of itself, None for what it lacks; ValueError names the file and the key.

    `network`, a FasterRCNNConfig; `classes` and `attributes`, lists of names; `anchors` and `release`, texts.
    """
    return _parse_metadata(read_safetensors(file, tensors=False)[1], file)


def _parse_metadata(texts: Mapping[str, str], file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kinds = {"network": dict, "classes": list, "attributes": list, "anchors": str, "release": str}
    for key, wanted in kinds.items():
        where = f"{file}: its metadata {key!r}"
        found[key] = parse_json(texts.get(key, "null"), where, (wanted, type(None)), fix="convert it again")
        if wanted is list and not all(isinstance(one, str) for one in found[key] or ()):
            raise ValueError(f"{where} holds {short_repr(found[key])}, no list of texts; convert it again")
    if found["network"] is not None:
        found["network"] = config_from(found["network"], str(file))
    return found


def read_config(file: Path) -> FasterRCNNConfig:
    """Return the network of a file's weights; ValueError where it does not say which."""
    network = read_metadata(file)["network"]
    if network is None:
        raise ValueError(f"{file} does not say which network its weights are of; name its preset")
    return network


def config_from(fields: Mapping[str, Any], where: str) -> FasterRCNNConfig:
    """The network of a description in JSON (dataclasses.asdict of its configuration); ValueError names `where`.

    A field that is missing has its default, but every description has a resnet.
    """
    try:
        if not isinstance(fields, Mapping) or "resnet" not in fields:
            raise ValueError("it has no resnet")
        return from_json(FasterRCNNConfig, dict(fields), where)
    except ValueError as error:
        raise ValueError(f"{where}: its `network` is none of this version ({error}); convert it again") from error


def write_weights(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Write a weight file, and return its sha256; the same content gives the same bytes.

    metadata: each value is written as JSON. `classes` and `attributes` (lists of names), `network` (dataclasses.asdict
    of its configuration), and for converted files what releases.py adds.
    """
    # safetensors writes metadata in another order in each process, which would give the same weights other hashes.
    plain = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
    length = int.from_bytes(plain[:8], "little")
    texts = {key: json.dumps(value) for key, value in sorted(metadata.items())}
    header = json.dumps({"__metadata__": texts} | json.loads(plain[8 : 8 + length]), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    data = memoryview(plain)[8 + length :]
    part = file.with_name(f"{file.name}.part")
    with open(part, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.write(data)
    part.replace(file)
    return sha256_of(file)


def load_resnet(backbone: ResNetC4, res5: Res5, file: Path) -> None:
    """Put the ResNet of a detector's weight file, `backbone.*` and `roi_heads.res5.*`, into VL-BERT's region features.

    All or none, without the detector's heads. A live norm starts counting at zero.

    Raises:
        ValueError: Names the file and every tensor that is missing, unexpected or of a wrong shape.
    """
    # Not about the stem's pool: VL-BERT's authors used a padded one with weights that were trained without padding.
    check_wiring(backbone.config, file, ("stride_in_1x1", "res5_dilated"), "model.regions.resnet")
    found = {name: tensor for name, tensor in read_safetensors(file)[0].items() if name.startswith(RESNET)}
    modules = dict(zip(RESNET, (backbone, res5), strict=True))
    ours = {prefix + name: tensor for prefix, module in modules.items() for name, tensor in module.state_dict().items()}
    counters = {name: torch.zeros_like(tensor) for name, tensor in ours.items() if COUNTER.search(name)}
    expected = {name: tensor for name, tensor in ours.items() if name not in counters}
    check_tensors(found, expected, f"{file} {_OTHER}")
    found |= counters
    for prefix, module in modules.items():
        mine = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        module.load_state_dict(mine, strict=True)


def check_wiring(config: ResNetConfig, file: Path, names: Sequence[str], setting: str) -> None:
    """ValueError where a ResNet of `config` would compute something else with the file's tensors.

    names: the fields to compare; setting: the config's name on the command line.
    """
    network = read_metadata(file)["network"]
    for name in names if network else ():
        ours, theirs = getattr(config, name), getattr(network.resnet, name)
        if theirs != ours:
            (argument,) = as_arguments({f"{setting}.{name}": theirs})
            raise ValueError(f"{file} was trained with resnet.{name} = {theirs}, not {ours}; set {argument}")


def tensor_faults(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with every tensor that is missing, unexpected or unfit."""
    faults = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        tensor, shape = tensors[name], list(expected[name].shape)
        if tensor.layout != torch.strided or list(tensor.shape) != shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, the network's is {shape}")
        elif not tensor.is_floating_point():
            faults.append(f"{name} holds {tensor.dtype}, no floating-point numbers")
        elif not torch.isfinite(tensor).all():
            faults.append(f"{name} is not finite")
    return faults


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], message: str) -> None:
    """Raises ValueError, which begins with `message`, naming the first 20 tensors that do not fit."""
    if faults := tensor_faults(tensors, expected):
        more = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError(f"{message}: {'; '.join(faults[:20])}{more}")
