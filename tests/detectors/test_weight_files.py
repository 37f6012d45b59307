"""Our weight files: loaded whole or not at all, and identified by their hash."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_detector import TINY

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import FasterRCNN
from detectors.resnet import Res5, ResNetC4
from detectors.weights.files import ANCHORS, ATTRIBUTE_HEAD, load_resnet, load_weights, write_weights
from detectors.weights.init_from import init_from

HEAD = "roi_heads.box_predictor."
RPN = "proposal_generator.rpn_head."


def tiny_tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return FasterRCNN.random_init(TINY, seed=3).state_dict() | more


def test_saved_weights_come_back_and_are_identified_by_their_hash(tmp_path: Path):
    network, ids = FasterRCNN.random_init(TINY, seed=0), []
    about = {"classes": list("abcdefgh")} | {key: key * 3 for key in "qwertyuiop"}
    other = {"backbone.stem.conv1.norm.bias": torch.ones(4)}
    for name, more, metadata in (("w", {}, about), ("r", {}, dict(reversed(about.items()))), ("o", other, about)):
        tensors = tiny_tensors(**more)
        sha256 = write_weights(tmp_path / name, tensors, metadata)
        loaded = load_weights(network, tmp_path / name)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in network.state_dict().items())
        found = [loaded[key] for key in ("classes", "random_init", "weights_sha256")]
        assert found == [about["classes"], False, sha256]
        ids.append(FasterRCNNDetector(network, loaded, DetectorSettings()).id)
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
    for name in ("backbone.res2.0.conv1.weight", f"{HEAD}fc_attr.bias"):
        del tensors[name]
    write_weights(tmp_path / "bad.safetensors", tensors, {})
    network = FasterRCNN.random_init(TINY, seed=0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match=r"bad\.safetensors does not fit") as error:
        load_weights(network, tmp_path / "bad.safetensors")
    for fault in (
        "missing backbone.res2.0.conv1.weight",
        "fc_attr.bias",  # the attribute head is whole or absent
        "unexpected backbone.fc.weight",
        "cls_score.bias has shape [7], but the network has [9]",
        "rpn_head.conv.bias is not finite",
        "anchor_deltas.bias has dtype torch.int64",
        f"{ANCHORS} has shape [12, 4]",
    ):
        assert fault in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_weights_without_the_attribute_head_find_no_attributes(tmp_path: Path):
    bare = {name: tensor for name, tensor in tiny_tensors().items() if not name.startswith(ATTRIBUTE_HEAD)}
    network = FasterRCNN.random_init(TINY, seed=0)
    write_weights(tmp_path / "bare.safetensors", bare, {})
    assert load_weights(network, tmp_path / "bare.safetensors")["attribute_head"] is False
    assert network.roi_heads.box_predictor(torch.zeros(1, TINY.resnet.res5_channels)).attribute_logits is None


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


def test_a_torn_file_and_metadata_of_another_kind_are_refused_by_file_and_key(tmp_path: Path):
    file, network = tmp_path / "theirs.safetensors", FasterRCNN(TINY)
    file.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ValueError, match=f"{file} is not a safetensors file"):
        load_weights(network, file)
    write_weights(file, tiny_tensors(), {"classes": ["a"]})
    with pytest.raises(ValueError, match=f"{file} names 1 classes, but the network has"):
        load_weights(network, file)
    for key, text in (
        ("network", "[" * 100_000),
        ("network", '{"num_classes": 36}'),
        ("network", '{"resnet": {}, "num_classes": "x"}'),
        ("classes", "[1]"),
    ):
        save_file({f"{HEAD}attr_score.bias": torch.zeros(1)}, file, metadata={key: text})
        for read in (
            lambda: load_weights(network, file),
            lambda: load_resnet(network.backbone, network.roi_heads.res5, file),
            lambda: init_from(network, file),
        ):
            with pytest.raises(ValueError, match=f"^{file}: its (metadata '{key}'|`{key}`) .*convert it again"):
                read()
