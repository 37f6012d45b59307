"""Weight files (safetensors) of the Faster R-CNN: loaded whole or not at all, and identified by their hash."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.resnet import Res5, ResNetC4, ResNetConfig
from detectors.weights.tensor_files import what_instead
from storage.safe_json import parse_json, shown
from storage.settings import as_arguments, from_json

RESNET = ("backbone.", "roi_heads.res5.")
ATTRIBUTE_HEAD = tuple(f"roi_heads.box_predictor.{layer}." for layer in ("cls_embedding", "fc_attr", "attr_score"))
ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
COUNTER = re.compile(r"\.num_batches_tracked$")  # which a frozen norm does not have


@dataclass(frozen=True)
class LoadedWeights:
    """What a weight file holds."""

    file: str
    """The file's name, without its folder."""
    sha256: str
    attributes: bool
    """Whether it has an attribute head."""
    anchors: str
    """`file`: from the file, or from the release that it was made of; `generated`: by a rule."""
    classes: tuple[str, ...] | None
    """Names of the C classes, from the file's metadata `classes` (a JSON list); None where it has none."""
    attribute_names: tuple[str, ...] | None = None
    """The same of the attributes, from `attributes`."""
    release: str | None = None
    """The published weights that the file was converted from; from `release`."""

    @property
    def metadata(self) -> dict:
        """What a detector's metadata say of its weights."""
        metadata = {
            "random_init": False,
            "weights_file": self.file,
            "weights_sha256": self.sha256,
            "attribute_head": self.attributes,
            "anchors": self.anchors,
            "classes": None if self.classes is None else list(self.classes),
        }
        if self.attribute_names is not None:
            metadata["attribute_names"] = list(self.attribute_names)
        if self.release is not None:
            metadata["release"] = self.release
        return metadata


def weights_hash(file: Path) -> str:
    """The sha256 of a weight file, 64 hex digits."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load_weights(network: FasterRCNN, file: Path) -> LoadedWeights:
    """Put the file's weights into the network, all or none.

    Only the whole attribute head may be absent; the network then goes on without it. Anchors may be there.

    Raises:
        ValueError: Names the file and every tensor that is missing, unexpected or of a wrong shape.
    """
    tensors, metadata = read_safetensors(file)
    if tensors and all(name.startswith(RESNET) for name in tensors):
        raise ValueError(f"{file} holds a ResNet alone and no detector: it is for model.regions.weights of VL-BERT")
    loaded, own = _describe(file, tensors.keys(), metadata, network.config), network.proposal_generator.cell_anchors
    expected = {n: t for n, t in network.state_dict().items() if loaded.attributes or not n.startswith(ATTRIBUTE_HEAD)}
    _check_tensors(tensors, expected | ({ANCHORS: own} if ANCHORS in tensors else {}), file)
    anchors = tensors.pop(ANCHORS, own)
    if not loaded.attributes:
        network.roi_heads.box_predictor.drop_attributes()
    network.load_state_dict(tensors, strict=True)
    own.copy_(anchors)
    return loaded


def describe_weights(file: Path, config: FasterRCNNConfig) -> LoadedWeights:
    """Return what load_weights returns for a network of this configuration; no tensor is read."""
    return _describe(file, *read_safetensors(file, tensors=False), config)


def _describe(file: Path, names: Collection[str], texts: Mapping[str, str], config: FasterRCNNConfig) -> LoadedWeights:
    metadata, attributes = _parse_metadata(texts, file), any(name.startswith(ATTRIBUTE_HEAD) for name in names)
    counts = (
        ("classes", metadata.classes, config.num_classes),
        ("attributes", metadata.attributes, config.num_attributes),
    )
    for kind, known, count in counts:
        if known is not None and len(known) != count and (attributes or kind == "classes"):
            raise ValueError(f"{file} names {len(known)} {kind}, the network has {count}")
    return LoadedWeights(
        file=Path(file).name,
        sha256=weights_hash(file),
        attributes=attributes,
        anchors=metadata.anchors or ("file" if ANCHORS in names else "generated"),
        classes=metadata.classes,
        attribute_names=metadata.attributes if attributes else None,
        release=metadata.release,
    )


@dataclass(frozen=True)
class WeightMetadata:
    """Metadata of a weight file; None for each that the file lacks."""

    network: FasterRCNNConfig | None
    classes: tuple[str, ...] | None
    attributes: tuple[str, ...] | None
    anchors: str | None
    release: str | None


def read_metadata(file: Path) -> WeightMetadata:
    """Return what a file says of itself; ValueError names the file and the key that is of another kind."""
    return _parse_metadata(read_safetensors(file, tensors=False)[1], file)


def _parse_metadata(texts: Mapping[str, str], file: Path) -> WeightMetadata:
    found: dict[str, Any] = {}
    kinds = {"network": dict, "classes": list, "attributes": list, "anchors": str, "release": str}
    for key, wanted in kinds.items():
        where = f"{file}: its metadata {key!r}"
        value = parse_json(texts.get(key, "null"), where, (wanted, type(None)), fix="convert it again")
        if wanted is list and not all(isinstance(one, str) for one in value or ()):
            raise ValueError(f"{where} holds {shown(value)}, no list of texts; convert it again")
        found[key] = tuple(value) if isinstance(value, list) else value
    if found["network"] is not None:
        found["network"] = config_from(found["network"], str(file))
    return WeightMetadata(**found)


def read_config(file: Path) -> FasterRCNNConfig:
    """Return the network of a file's weights; ValueError where it does not say which."""
    network = read_metadata(file).network
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
    return weights_hash(file)


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
    _check_tensors(found, {name: tensor for name, tensor in ours.items() if name not in counters}, file)
    found |= counters
    for prefix, module in modules.items():
        mine = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        module.load_state_dict(mine, strict=True)


def check_wiring(config: ResNetConfig, file: Path, names: Sequence[str], setting: str) -> None:
    """ValueError where a ResNet of `config` would compute something else with the file's tensors.

    names: the fields to compare; setting: the config's name on the command line.
    """
    network = read_metadata(file).network
    for name in names if network else ():
        ours, theirs = getattr(config, name), getattr(network.resnet, name)
        if theirs != ours:
            (argument,) = as_arguments({f"{setting}.{name}": theirs})
            raise ValueError(f"{file} was trained with resnet.{name} = {theirs}, not {ours}; set {argument}")


def read_safetensors(file: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors by name, and the metadata, of a safetensors file. With tensors=False every tensor is None."""
    if not Path(file).is_file():
        raise ValueError(f"there is no weight file {file}; name a safetensors file")
    with open(file, "rb") as stream:
        if instead := what_instead(stream.read(512)):
            raise ValueError(f"{file} {instead}")
    try:
        with safe_open(file, framework="pt") as stream:
            found = {name: stream.get_tensor(name) if tensors else None for name in stream.keys()}  # noqa: SIM118
            return found, stream.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a safetensors file, or is damaged ({error}); fetch or convert it again"
        ) from error


def tensor_fault(tensor: Tensor, shape: Sequence[int]) -> str | None:
    """What is wrong with a weight that should have this shape."""
    if tensor.layout != torch.strided or tuple(tensor.shape) != tuple(shape):
        return f"has shape {list(tensor.shape)}, the network's is {list(shape)}"
    if not tensor.is_floating_point():
        return f"holds {tensor.dtype}, no floating-point numbers"
    return None if torch.isfinite(tensor).all() else "is not finite"


def tensor_faults(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Every tensor that is missing, unexpected or unfit."""
    faults = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    checked = {name: tensor_fault(tensors[name], expected[name].shape) for name in expected.keys() & tensors.keys()}
    return faults + [f"{name} {fault}" for name, fault in sorted(checked.items()) if fault]


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], file: Path) -> None:
    faults = tensor_faults(tensors, expected)
    if faults:
        raise ValueError(f"{file} does not fit the network; is it for another preset? {'; '.join(faults)}")
