"""Our weight files: loaded whole or not at all, and identified by their hash."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_detector import TINY

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import FasterRCNN
from detectors.resnet import Res5, ResNetC4
from detectors.weights.files import (
    ANCHORS,
    ATTRIBUTE_HEAD,
    load_resnet,
    load_weights,
    write_weights,
)
from detectors.weights.init_from import init_from

HEAD = "roi_heads.box_predictor."
RPN = "proposal_generator.rpn_head."


def tiny_tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return FasterRCNN.random_init(TINY, seed=3).state_dict() | more


def test_saved_weights_come_back_and_are_identified_by_their_hash(tmp_path: Path):
    network, tensors = FasterRCNN.random_init(TINY, seed=0), tiny_tensors()
    file = tmp_path / "w.safetensors"
    write_weights(file, tensors, {"classes": list("abcdefgh")})
    loaded = load_weights(network, file)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in network.state_dict().items())
    assert (loaded["classes"], loaded["random_init"]) == (list("abcdefgh"), False)
    ids = [FasterRCNNDetector(network, loaded, DetectorSettings()).id]
    for name, other in (("renamed", {}), ("other", {"backbone.stem.conv1.norm.bias": torch.ones(4)})):
        sha256 = write_weights(tmp_path / name, tensors | other, {"classes": list("abcdefgh")})
        metadata = load_weights(network, tmp_path / name)
        assert metadata["weights_sha256"] == sha256
        ids.append(FasterRCNNDetector(network, metadata, DetectorSettings()).id)
    assert ids[0] == ids[1] != ids[2]


def test_a_file_that_does_not_fit_is_refused_by_its_tensors_and_nothing_is_loaded(tmp_path: Path):
    wrong = {
        "backbone.fc.weight": torch.zeros(2),
        f"{HEAD}cls_score.bias": torch.zeros(7),
        f"{RPN}conv.bias": torch.full((16,), float("nan")),
        f"{RPN}anchor_deltas.bias": torch.zeros(24, dtype=torch.int64),
        ANCHORS: torch.zeros(12, 4),
    }
    tensors = tiny_tensors(**wrong)
    del tensors["backbone.res2.0.conv1.weight"]
    write_weights(tmp_path / "bad.safetensors", tensors, {})
    network = FasterRCNN.random_init(TINY, seed=0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match=r"bad\.safetensors does not fit") as error:
        load_weights(network, tmp_path / "bad.safetensors")
    for fault in (
        "missing backbone.res2.0.conv1.weight",
        "unexpected backbone.fc.weight",
        "cls_score.bias has shape [7], but the network has [9]",
        "rpn_head.conv.bias is not finite",
        "anchor_deltas.bias has dtype torch.int64",
        f"{ANCHORS} has shape [12, 4]",
    ):
        assert fault in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_the_attribute_head_is_whole_or_absent(tmp_path: Path):
    tensors = tiny_tensors()
    bare = {name: tensor for name, tensor in tensors.items() if not name.startswith(ATTRIBUTE_HEAD)}
    network = FasterRCNN.random_init(TINY, seed=0)
    write_weights(tmp_path / "bare.safetensors", bare, {})
    assert load_weights(network, tmp_path / "bare.safetensors")["attribute_head"] is False
    assert network.heads(torch.zeros(1, TINY.resnet.res5_channels)).attribute_logits is None
    half = {name: tensor for name, tensor in tensors.items() if "fc_attr" not in name}
    write_weights(tmp_path / "half.safetensors", half, {})
    with pytest.raises(ValueError, match=r"missing roi_heads\.box_predictor\.fc_attr\.bias"):
        load_weights(FasterRCNN.random_init(TINY, 0), tmp_path / "half.safetensors")


def test_region_features_take_the_resnet_with_live_norms_or_frozen(tmp_path: Path):
    file, tensors = tmp_path / "w.safetensors", tiny_tensors()
    write_weights(file, tensors, {"network": dataclasses.asdict(TINY)})
    for norm in ("frozen", "batch"):
        config = dataclasses.replace(TINY.resnet, norm=norm, stem_pool="caffe")
        c4, res5 = ResNetC4(config), Res5(config)
        c4(torch.zeros(2, 3, 64, 64))  # counts one, where the norms are live
        load_resnet(c4, res5, file)
        state = {f"backbone.{name}": tensor for name, tensor in c4.state_dict().items()}
        state |= {f"roi_heads.res5.{name}": tensor for name, tensor in res5.state_dict().items()}
        counts = {int(state.pop(name)) for name in list(state) if name.endswith("num_batches_tracked")}
        assert counts == (set() if norm == "frozen" else {0})
        assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())
    other = dataclasses.replace(TINY.resnet, stride_in_1x1=True)
    with pytest.raises(ValueError, match=r"stride_in_1x1 = False.*set --model\.regions\.resnet\.no_stride_in_1x1"):
        load_resnet(ResNetC4(other), Res5(other), file)


def test_a_torn_file_and_names_that_the_network_has_not_are_refused(tmp_path: Path):
    (tmp_path / "torn").write_bytes(b"\x80\x02}q\x00.")
    write_weights(tmp_path / "names", tiny_tensors(), {"classes": ["a"]})
    for name, message in (
        ("torn", "torn is not a safetensors file"),
        ("names", "names 1 classes, but the network has"),
    ):
        with pytest.raises(ValueError, match=message):
            load_weights(FasterRCNN.random_init(TINY, seed=0), tmp_path / name)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("network", "[" * 100_000),
        ("network", '{"num_classes": 36}'),
        ("network", '{"resnet": {}, "num_classes": "x"}'),
        ("classes", "[1]"),
    ],
)
def test_metadata_of_another_kind_are_refused_by_file_and_key(key: str, text: str, tmp_path: Path):
    file, network = tmp_path / "theirs.safetensors", FasterRCNN(TINY)
    save_file({f"{HEAD}attr_score.bias": torch.zeros(1)}, file, metadata={key: text})
    for read in (
        lambda: load_weights(network, file),
        lambda: load_resnet(network.backbone, network.roi_heads.res5, file),
        lambda: init_from(network, file),
    ):
        with pytest.raises(ValueError, match=f"^{file}: its (metadata '{key}'|`{key}`) .*convert it again"):
            read()


def test_a_converted_file_is_the_same_bytes_each_time_and_its_metadata_in_order(tmp_path: Path):
    metadata = {key: key * 3 for key in "qwertyuiopasdfghjkl"}
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    first = write_weights(tmp_path / "a", tensors, metadata)
    assert first == write_weights(tmp_path / "b", tensors, dict(reversed(metadata.items())))
    header = (tmp_path / "a").read_bytes()
    keys = list(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"])
    assert keys == sorted(metadata)
    assert torch.equal(load_file(tmp_path / "a")["b"], torch.zeros(2, 2))
