"""Our model beside figures that the authors' code produced: same weights, same inputs, same numbers.

Two cases lie in tests/data/parity; all nine, and the figures of single components, in ../shared/parity/vlbert.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parity_vlbert import read_case, read_cases, report, run
from detectors.resnet import ResNetConfig
from vlbert.batch import Example, Picture, Words, collate
from vlbert.boxes import geometry_embedding, iou
from vlbert.config import RegionConfig
from vlbert.pictures import resized
from vlbert.regions import FastRCNN
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.text import SPECIALS, Vocabulary

HERE = Path(__file__).parent / "data" / "parity"
SHARED = Path(__file__).parents[2] / "shared" / "parity" / "vlbert"
SHARED_CASES = read_cases(SHARED) if SHARED.is_dir() else []
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the authors' figures lie in ../shared, which is not here"
)
WORDS = Vocabulary([*SPECIALS, "word"])


@pytest.mark.parametrize("file", read_cases(HERE), ids=lambda file: file.stem)
def test_two_models_compute_what_the_authors_code_computes(file: Path):
    line, passes = report(file)
    assert passes, line


@needs_shared
@pytest.mark.parametrize(
    "file", [file for file in SHARED_CASES if not (HERE / file.name).exists()], ids=lambda f: f.stem
)
def test_seven_more_models_compute_what_the_authors_code_computes(file: Path):
    line, passes = report(file)
    assert passes, line


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """The VQA case with its json and arrays changed by `change(about, arrays)`."""

    def changed(change: Callable[[dict, dict], None]) -> Path:
        about = json.loads((HERE / "vqa_prec.json").read_text())
        arrays = dict(np.load(HERE / "vqa_prec.npz"))
        change(about, arrays)
        (tmp_path / "changed.json").write_text(json.dumps(about))
        np.savez(tmp_path / "changed.npz", **arrays)
        return tmp_path / "changed.json"

    return changed


def _add(name: str, index: tuple, difference: float) -> Callable[[dict, dict], None]:
    def change(about: dict, arrays: dict) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][index] += difference

    return change


@pytest.mark.parametrize(
    "change",
    [
        _add("out/label_logits", (1, 7), 3e-5),
        _add("infer/label_logits", (0, 0), 3e-5),
        _add("inter/encoder.input", (2, 3, 5), 3e-5),
        _add("inter/encoder.output", (0, 0, 0), 3e-5),
        _add("out/ans_loss", (), 0.1),
        _add("grad/l2", (20,), 1.0),
        _add("grad/dot", (20,), 1.0),
        _add("grad/l2", (20,), np.nan),
        lambda about, arrays: about.update(seed_offset=1),
        lambda about, arrays: about["config"]["NETWORK"].update(NO_GROUNDING=True),
        lambda about, arrays: about["tensors"].pop(),
        lambda about, arrays: arrays.pop("in/question"),
    ],
    ids=[
        "logit",
        "inference",
        "input",
        "output",
        "loss",
        "norm",
        "projection",
        "NaN",
        "seed",
        "setting",
        "tensor",
        "array",
    ],
)
def test_a_case_that_differs_or_cannot_be_run_does_not_pass(copy: Callable[..., Path], change: Callable):
    line, passes = report(copy(change))
    assert not passes, line


def test_the_command_prints_a_line_a_case_and_fails_where_one_fails(tmp_path: Path, copy: Callable[..., Path]):
    file = copy(_add("out/label_logits", (1, 7), 1.0))
    for kind in (".json", ".npz"):
        shutil.copy(HERE / f"vqa_prec{kind}", tmp_path)
    (tmp_path / "other.json").write_text("[1]")  # no case
    command = [sys.executable, "-m", "benchmarks.parity_vlbert", str(file.parent)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert ended.returncode == 1
    lines = [line.split() for line in ended.stdout.splitlines()[1:]]
    assert [(line[0], line[-1]) for line in lines[:2]] == [("changed", "FAIL"), ("vqa_prec", "pass")]
    assert ended.stdout.splitlines()[-1].startswith("1 of 2 pass")


@needs_shared
def test_cases_of_other_networks_and_masking_run(tmp_path: Path):
    """A ResNet-50 without dilation and feature-level masking, of which we have no figures of theirs."""
    about = json.loads((SHARED / "pretrain_multitask_e2e.json").read_text())
    about["config"]["NETWORK"] |= {"IMAGE_NUM_LAYERS": 50, "MASK_RAW_PIXELS": False, "IMAGE_C5_DILATED": False}
    gone = [f"backbone.layer3.{block}." for block in range(6, 23)]
    about["tensors"] = [t for t in about["tensors"] if not any(part in t["name"] for part in gone)]
    name = "object_mask_visual_embedding.weight"
    about["tensors"].append({"name": name, "shape": [1, 2048], "rule": "0.15n"})
    (tmp_path / "other.json").write_text(json.dumps(about))
    shutil.copy(SHARED / "pretrain_multitask_e2e.npz", tmp_path / "other.npz")
    ours = run(read_case(tmp_path / "other.json"))
    assert len(ours.vlbert.fast_rcnn.backbone.res4) == 6
    assert ours.vlbert.embedding.hidden_appearance.weight.grad.abs().sum() > 0
    assert all(np.isfinite(loss) and loss > 0 for loss in ours.losses.values())


@pytest.fixture(scope="module")
def components() -> dict:
    if not SHARED.is_dir():
        pytest.skip("the authors' figures lie in ../shared, which is not here")
    return dict(np.load(SHARED / "components.npz"))


def test_the_geometry_embedding_has_the_published_values(components: dict):
    given = torch.from_numpy(components["coord/in_boxes_wh"])
    ours = geometry_embedding(given[:, :4], given[:, 4:], channels=2048, corners=False)
    np.testing.assert_array_equal(ours.view(-1, 4, 512).numpy(), components["coord/out"])


def test_regions_are_cut_from_the_map_as_published(components: dict):
    maps, rois = (torch.from_numpy(components[f"roi_align/in_{name}"]) for name in ("feat", "rois"))
    resnet = ResNetConfig(blocks=(1, 1, 1, 1), width=8, stem_pool="torch")
    network = FastRCNN(RegionConfig(resnet=resnet, untrained=True))
    seen = []
    network.backbone = nn.Identity()
    network.res5 = nn.Sequential()
    network.res5.register_forward_hook(lambda *call: seen.append(call[2]))
    zeros = np.zeros(1, np.int64)
    pictures = [
        Picture(boxes.numpy(), np.zeros(len(boxes), bool), size=(1, 1))
        for boxes in (rois[rois[:, 0] == number, 1:] for number in range(len(maps)))
    ]
    batch = collate([Example(str(i), Words(zeros, zeros, zeros), picture) for i, picture in enumerate(pictures)])
    network.appearance(maps, batch)
    order = torch.argsort(rois[:, 0], stable=True)
    np.testing.assert_array_equal(seen[0].numpy(), components["roi_align/out"][order])


def test_soft_targets_have_the_published_cross_entropy(components: dict):
    logits, targets = (torch.from_numpy(components[f"softce/in_{name}"]) for name in ("logits", "target"))
    whole = (targets.sum(1) - 1).abs() < 0.1  # theirs leaves out the others; ours asks only for whole distributions
    ours = F.cross_entropy(logits, targets, reduction="none")
    np.testing.assert_allclose(
        ours.where(whole, torch.tensor(0.0)), components["softce/out_none"], rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(ours[whole].mean(), components["softce/out_mean"], rtol=1e-6)


def test_overlaps_count_pixels_as_published(components: dict):
    ours = iou(components["iou/in_boxes"], components["iou/in_query"], inclusive=True)
    np.testing.assert_allclose(ours, components["iou/out"], rtol=1e-6)


def test_pictures_are_resized_to_the_published_sizes(components: dict):
    for long_side in (1000, 1200):
        sizes = components["resize/in_wh"], components[f"resize/out_600_{long_side}"]
        for (width, height), (new_width, new_height) in zip(*(size.astype(int) for size in sizes), strict=True):
            assert resized(height, width, 600, long_side) == (new_height, new_width)


def test_long_rows_are_cut_as_published(components: dict):
    task = Pretraining(PretrainingSettings(max_elements=64), WORDS, num_classes=3)
    for text, boxes, text_kept, boxes_kept in components["cc_truncate/text_boxes_to_text_boxes"].tolist():
        tokens, regions = task._cut(np.zeros(text - 2, np.int64), boxes - 1)
        assert (len(tokens) + 2, regions + 1) == (text_kept, boxes_kept), (text, boxes)
