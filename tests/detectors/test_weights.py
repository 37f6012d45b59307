"""Published weight files become ours with the same arithmetic, and what does not fit is refused."""

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import released_detectors as released
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_detector import rectangles

from detectors import verify
from detectors.faster_rcnn import FasterRCNN
from detectors.image_file import read_image
from detectors.rebuild import detector_of_file
from detectors.resnet import RESNET101, Res5, ResNetC4
from detectors.select import SelectionSettings
from detectors.weights.convert import main
from detectors.weights.files import describe_weights, load_resnet, load_weights, read_config, write_weights
from detectors.weights.releases import convert

HEAD = "roi_heads.box_predictor."
RPN = "proposal_generator.rpn_head."
CLASS_NAMES = [f"class of {number}" for number in range(released.CLASSES)]
ATTRIBUTE_NAMES = [f"like {number}" for number in range(released.ATTRIBUTES)]
Converted = tuple[dict[str, torch.Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("released")
    with_anchors = released.airsplay() | {released.ANCHORS: released.CAFFE_ANCHORS + 0.5}
    return {
        "airsplay": released.save_pickle(folder / "faster_rcnn_from_caffe_attr.pkl", released.airsplay()),
        "airsplay without attributes": released.save_pickle(folder / "bare.pkl", released.airsplay(attributes=False)),
        "hugging face": released.save_torch(folder / "pytorch_model.bin", with_anchors, flat=True),
        "milvlg": released.save_torch(folder / "bua-caffe-frcn-r101-k36.pth", released.milvlg()),
        "vl-bert": released.save_torch(folder / "vgbua-0000.model", released.vl_bert(), flat=True, zipped=False),
    }


@pytest.fixture(scope="module")
def converted(files: dict[str, Path]) -> dict[str, Converted]:
    return {name: convert(file) for name, file in files.items()}


def loaded_network(converted: Converted, folder: Path) -> FasterRCNN:
    """The network of a converted file, on its way through a file of ours."""
    write_weights(folder / "ours.safetensors", *converted)
    network = FasterRCNN.random_init(read_config(folder / "ours.safetensors"), seed=0)
    load_weights(network, folder / "ours.safetensors")
    return network


# --- what becomes of the tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["airsplay", "airsplay without attributes", "hugging face"])
def test_files_with_detectron2s_names_are_taken_as_they_are(name: str, converted: dict[str, Converted], tmp_path: Path):
    attributes, own = "without" not in name, {"hugging face": {released.ANCHORS: released.CAFFE_ANCHORS + 0.5}}
    theirs, (tensors, metadata) = released.airsplay(attributes) | own.get(name, {}), converted[name]
    assert tensors.keys() == theirs.keys()
    assert all(np.array_equal(tensors[key], value) for key, value in theirs.items())
    network = loaded_network(converted[name], tmp_path)
    assert dataclasses.asdict(network.config) == metadata["network"]
    assert network.config.resnet.blocks == RESNET101.blocks
    assert (network.config.num_classes, network.config.num_attributes) == (1600, 400 * attributes)
    loaded = describe_weights(tmp_path / "ours.safetensors", network.config)
    assert loaded == load_weights(network, tmp_path / "ours.safetensors")
    anchors = "file" if released.ANCHORS in theirs else "generated"
    assert (loaded["release"], loaded["anchors"], loaded["attribute_head"]) == ("airsplay", anchors, attributes)
    if anchors == "file":
        assert np.array_equal(network.proposal_generator.cell_anchors, theirs[released.ANCHORS])


CONTAINERS = {
    "flat": lambda file, tensors: released.save_torch(file, tensors, flat=True),
    "old torch": lambda file, tensors: released.save_torch(file, tensors, zipped=False),
    "pickle": lambda file, tensors: released.save_pickle(file, tensors, protocol=4),
    "safetensors": lambda file, tensors: save_file(
        {n: torch.from_numpy(np.array(v)) for n, v in tensors.items()}, file
    ),
    "wrapped": lambda file, tensors: released.save_torch(
        file, {f"module._orig_mod.{n}": v for n, v in tensors.items()}
    ),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_release_is_the_same_in_any_container(container: str, converted: dict[str, Converted], tmp_path: Path):
    CONTAINERS[container](tmp_path / "w", released.milvlg())
    (found, metadata), (expected, their_metadata) = convert(tmp_path / "w"), converted["milvlg"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert (metadata["release"], metadata["network"]) == ("milvlg", their_metadata["network"])


def test_milvlgs_background_and_boxes_are_ordered_and_scaled_as_ours(converted: dict[str, Converted]):
    theirs = {name: torch.from_numpy(value) for name, value in released.milvlg().items()}
    ours, metadata = converted["milvlg"]
    moved = {"cls_score": "cls_score", "cls_embedding": "cls_embed", "attr_score": "attr_linear2"}
    for name in ("cls_score.weight", "cls_score.bias", "cls_embedding.weight", "attr_score.weight", "attr_score.bias"):
        layer, _, part = name.partition(".")
        assert torch.equal(ours[HEAD + name], theirs[f"{HEAD}{moved[layer]}.{part}"].roll(-1, 0)), name
    scale = torch.tensor(metadata["network"]["box_weights"])
    for part in ("weight", "bias"):
        pairs = theirs[f"{RPN}objectness_logits.{part}"].unflatten(0, (2, 12))
        assert torch.equal(ours[f"{RPN}objectness_logits.{part}"], pairs[1] - pairs[0])
        boxes = theirs[f"{HEAD}bbox_pred.{part}"].unflatten(0, (1601, 4))[1:]
        scaled = boxes * scale.view(4, *[1] * (boxes.dim() - 2))
        assert torch.equal(ours[f"{HEAD}bbox_pred.{part}"], scaled.flatten(0, 1))


def test_milvlg_without_anchors_and_attributes_is_known_by_its_objectness_and_gets_caffes_anchors(tmp_path: Path):
    tensors = {n: value for n, value in released.milvlg().items() if not re.search("cls_embed|attr_|cell_anchors", n)}
    ours = convert(released.save_torch(tmp_path / "w.pth", tensors))
    network = loaded_network(ours, tmp_path)
    assert (ours[1]["release"], network.config.num_attributes) == ("milvlg", 0)
    assert np.array_equal(network.proposal_generator.cell_anchors, released.CAFFE_ANCHORS)
    assert describe_weights(tmp_path / "ours.safetensors", network.config)["anchors"] == "generated"


def test_vl_berts_resnet_starts_region_features_and_no_detector(converted: dict[str, Converted], tmp_path: Path):
    (ours, metadata), theirs = converted["vl-bert"], released.resnet()
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], value) for name, value in theirs.items())
    file = tmp_path / "resnet.safetensors"
    write_weights(file, ours, metadata)
    config = dataclasses.replace(RESNET101, width=released.WIDTH, stem_pool="torch")
    load_resnet(ResNetC4(config), Res5(config), file)
    with pytest.raises(ValueError, match=r"has only a ResNet, .*model\.regions\.weights"):
        load_weights(FasterRCNN.random_init(read_config(file), 0), file)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            f"{HEAD}bbox_pred.weight",
            np.zeros((6403, 128), np.float32),
            "has shape [6399, 128], but the network has [6400",
        ),
        ("backbone.res4.22.conv2.weight", None, "missing backbone.res4.22.conv2.weight"),
        ("pixel_mean", np.float32([122.7717, 115.9465, 102.9801]), "for [102.9801, 115.9465, 122.7717] (BGR)"),
    ],
)
def test_a_file_that_is_not_whole_or_not_alone_is_refused(name: str, tensor: np.ndarray | None, message: str, tmp_path):
    tensors = {key: value for key, value in (released.milvlg() | {name: tensor}).items() if value is not None}
    with pytest.raises(ValueError, match=rf"w\.pth.*{re.escape(message)}"):
        convert(released.save_torch(tmp_path / "w.pth", tensors))


def test_what_is_no_weight_file_is_refused(tmp_path: Path, files: dict[str, Path]):
    whole = files["milvlg"].read_bytes()
    write_weights(tmp_path / "ours", {"a": torch.ones(1)}, {"network": {}})
    torch.save({"a": torch.zeros(1).expand(2**20, 2**10)}, tmp_path / "large")
    for content, message in (
        (b"", "is empty"),
        (b"\n<!doctype html><title>404</title>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (whole[: len(whole) // 2], "damaged or not a weight file"),
        (pickle.dumps({"model": {}}), "has no state dict"),
        (pickle.dumps({"model": {"a": "text"}}), "'a' is not a tensor but a str"),
        (pickle.dumps({"a": np.ones(2), "module.a": np.ones(2)}), "tensors with the same name"),
        (pickle.dumps({"a": np.ones(2)}), "none of the releases airsplay, milvlg, vl-bert; it has tensors such as a"),
        ((tmp_path / "ours").read_bytes(), "is already a weight file of this project"),
        ((tmp_path / "large").read_bytes(), "has tensors that are much larger than the file"),
    ):
        file = tmp_path / "file.pkl"
        file.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            convert(file)
        assert str(file) in str(error.value)
    with pytest.raises(ValueError, match="weight file .* does not exist"):
        convert(tmp_path / "absent")


# --- the command, and names -------------------------------------------------------------------------------------------


def names_file(file: Path, names: list[str]) -> str:
    file.write_text("".join(f"{name},another word for {name}\n" for name in names))
    return str(file)


def test_the_command_writes_one_file_with_names(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "folder" / "vg.safetensors"
    names = ["--classes", names_file(tmp_path / "objects_vocab.txt", CLASS_NAMES)]
    names += ["--attributes", names_file(tmp_path / "attributes_vocab.txt", ATTRIBUTE_NAMES)]
    main([str(files["milvlg"]), str(out), *names])
    printed = capsys.readouterr().out
    assert "release milvlg: 1600 classes, 400 attributes, anchors file" in printed
    loaded = load_weights(FasterRCNN.random_init(read_config(out), seed=0), out)
    assert printed.splitlines()[-1] == f"{out}: 536 tensors, sha256 {loaded['weights_sha256']}"
    assert (loaded["classes"], loaded["attribute_names"]) == (CLASS_NAMES, ATTRIBUTE_NAMES)
    assert [file.name for file in out.parent.iterdir()] == ["vg.safetensors"]
    more = "--classes=" + names_file(tmp_path / "more.txt", [*CLASS_NAMES, "x"])
    for release, to, message in (
        ("milvlg", out, "already exists; give a new name"),
        ("airsplay", tmp_path / "new", "names 1601 classes, but the weights have 1600"),
        ("vl-bert", tmp_path / "new", "names 1601 classes, but the weights have 0"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([str(files[release]), str(to), more])
    assert not (tmp_path / "new").exists()


# --- looking at weights -----------------------------------------------------------------------------------------------


def test_verify_draws_each_image_and_prints_its_top_regions(
    converted: dict[str, Converted], tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tensors, metadata), weights = converted["airsplay"], tmp_path / "small.safetensors"
    sizes = {"short_side": 96, "long_side": 160, "post_nms": 12, "anchor_sizes": (16, 24, 32, 64)}
    changes = {"classes": CLASS_NAMES, "attributes": ATTRIBUTE_NAMES, "network": metadata["network"] | sizes}
    write_weights(weights, tensors, metadata | changes)
    image, broken = tmp_path / "a.jpg", tmp_path / "broken.jpg"
    Image.fromarray(rectangles(120, 160, seed=0)).save(image)
    broken.write_bytes(b"<html>")
    with pytest.raises(SystemExit, match=r"broken\.jpg is refused: it is a web page.* \(not_image\)"):
        verify.main([*map(str, (weights, image, broken)), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    detector = detector_of_file(weights, selection=SelectionSettings(threshold=0.2))
    (regions,) = detector.detect([read_image(image)])
    assert f"a.jpg: {len(regions)} regions, " in printed
    named = [f"like {a} class of {n}" for a, n in zip(regions.attributes, regions.labels, strict=True)]
    assert re.findall(r"like \d+ class of \d+", printed) == named
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["a.jpg.png"]
    write_weights(tmp_path / "unnamed.safetensors", tensors, {})
    with pytest.raises(SystemExit, match="does not describe the network of its weights; set preset"):
        verify.main([str(tmp_path / "unnamed.safetensors"), "x.jpg"])
