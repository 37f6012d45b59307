"""Our detector beside figures in the format of detectron2's: what agrees passes, what differs or is damaged is named.

The figures themselves lie in ../shared/parity/detector. The case that gets damaged here is made by our own network, and
small.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from places import SHARED

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.resnet import ResNetConfig
from detectors.select import SelectionSettings, select_regions
from tests.parity.cases import Row
from tests.parity.detector import STAGES, Stages, compare_folder
from tests.parity.detector_cases import build, read_config, regenerated

PARITY = SHARED / "parity" / "detector"
needs_shared = pytest.mark.skipif(
    not PARITY.is_dir(), reason="detectron2's figures lie in ../shared, which is not here"
)

RULES = [
    [r"stem\.conv1\.weight$", "fan", 0.0, 0.022],
    [r"\.running_var$", "abs", 1.0, 0.2],
    [r"\.norm\.weight$", "lin", 1.0, 0.1],
    [r"cls_score\.weight$", "fan", 0.0, 9.0],
    [r"\.weight$", "fan", 0.0, 1.414],
    [r"", "lin", 0.0, 0.1],
]
SMALL = FasterRCNNConfig(
    resnet=ResNetConfig(blocks=(1, 2, 1, 1), width=4),
    num_classes=7,
    num_attributes=5,
    rpn_channels=6,
    short_side=96,
    long_side=160,
    post_nms=24,
    anchor_sizes=(32, 64),
    attribute_embedding=3,
    attribute_hidden=4,
    box_weights=(8, 9, 4, 6),
)


def described(config: FasterRCNNConfig) -> dict:
    """The meta.json of this network."""
    with torch.device("meta"):
        shapes = {name: list(tensor.shape) for name, tensor in FasterRCNN(config).state_dict().items()}
    rpn = {"sizes": config.anchor_sizes, "ratios": config.anchor_ratios, "hidden": config.rpn_channels}
    rpn |= {"pre_nms": config.pre_nms, "post_nms": config.post_nms, "nms": config.rpn_nms_threshold}
    metadata = {
        "num_classes": config.num_classes,
        "num_attrs": config.num_attributes,
        "rules": RULES,
        "shapes": shapes,
        "min_size": config.short_side,
        "max_size": config.long_side,
        "rpn": rpn,
        "box_reg_weights": config.box_weights,
        "images": [{"index": 0}],
    }
    tensors = regenerated(metadata)
    return metadata | {"checks": {name: float(tensors[name].double().sum()) for name in list(shapes)[::20]}}


@torch.inference_mode()
def figures(metadata: dict) -> dict[str, np.ndarray]:
    """What our own network makes of one image of 60 x 77 pixels, as img0.npz and img0_c4.npz hold it."""
    image = np.kron(np.random.default_rng(5).integers(0, 256, (6, 7, 3)), np.ones((10, 11, 1))).astype(np.uint8)
    given = np.array([[3, 5, 60, 70], [10, 0, 90, 40], [0, 0, 99, 80]], np.float32)
    stored = {"image_bgr": image, "given_boxes": given, "anchors_first": np.zeros(5), "anchors_last": np.zeros(3)}
    ours = Stages(build(read_config(metadata), regenerated(metadata)), stored)
    found = stored | {name: STAGES[name](ours).numpy() for name in STAGES}
    found |= {name: found[name].astype(np.uint8) for name in ("image_bgr", "resized_bgr")}
    for name, rule in {
        "sel_thr0.5_strict_3_10": SelectionSettings(3, 10, 0.5),
        "sel_thr0.01_ge_2_6": SelectionSettings(2, 6, 0.01, strict=False),
        "sel_caffe_origspace_thr0.5_3_10": SelectionSettings(3, 10, 0.5, strict=False, plus_one=True),
    }.items():
        found[name] = select_regions(found["proposals_orig"], ours.probabilities.numpy(), rule)
    return found


class Files:
    """What a folder holds: its json and its arrays, to be changed before it is written."""

    def __init__(self, meta: dict):
        self.meta, self.arrays = meta, figures(meta)

    def compared(self, folder: Path, plain: bool = False) -> dict[str, Row]:
        """The rows by stage."""
        (folder / "meta.json").write_text(json.dumps(self.meta))
        np.savez(folder / "img0.npz", **{name: array for name, array in self.arrays.items() if name != "c4"})
        np.savez(folder / "img0_c4.npz", c4=self.arrays["c4"])
        return {row.stage: row for row in compare_folder(folder, "here", plain)}


@pytest.fixture(scope="module")
def whole() -> Files:
    return Files(described(SMALL))


@pytest.fixture
def files(whole: Files) -> Files:
    return copy.deepcopy(whole)


def failures(rows: dict[str, Row]) -> dict[str, Row]:
    return {stage: row for stage, row in rows.items() if not row.passes}


# --- figures of detectron2 --------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_shared
def test_every_stage_computes_what_detectron2_does_on_three_images():
    rows = list(compare_folder(PARITY, "public", plain=False))
    assert [str(row) for row in rows if not row.passes] == []
    assert len(rows) == 3 * 32
    assert max(row.differences["worst"] for row in rows) < 5e-6


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["as it detects", "as it learns"])
def test_every_stage_of_the_full_network_computes_what_detectron2_does(plain: bool):
    rows = {row.stage: row for row in compare_folder(PARITY / "full_r101", "full", plain)}
    assert not failures(rows)
    assert len(rows) == 29
    float16 = {"c4", "prop_features"}
    assert {stage for stage, row in rows.items() if row.differences["worst"] > 5e-6} == float16


# --- figures of our own -----------------------------------------------------------------------------------------------


def test_whatever_number_is_changed_its_own_stage_fails(whole: Files, tmp_path: Path):
    assert read_config(whole.meta) == SMALL
    for plain in (True, False):
        rows = whole.compared(tmp_path, plain)
        assert not failures(rows)
        assert rows.keys() == {*whole.arrays, "pixels to proposals"} - {"given_boxes"}
    assert len(whole.arrays["det_keep"]) > 3
    files, changed = copy.deepcopy(whole), set(whole.arrays) - {"image_bgr", "given_boxes"}
    for number, name in enumerate(sorted(changed)):  # all at once: each stage is fed with theirs
        array = files.arrays[name] = files.arrays[name].copy()
        place = min(number, array.size - 1)
        array.reshape(-1)[place : place + 1] += 3e-4 * np.abs(array).max() if array.dtype.kind == "f" else 1
    assert failures(files.compared(tmp_path)).keys() >= changed


def _replace(name: str, of: Callable[[np.ndarray], np.ndarray]) -> Callable[[Files], None]:
    return lambda files: files.arrays.update({name: of(files.arrays[name])})


def _state(key: str, value: object) -> Callable[[Files], None]:
    return lambda files: files.meta.update({key: value})


@pytest.mark.parametrize(
    ("change", "stage", "named"),
    [
        (_replace("rpn_deltas", lambda a: np.where(a == a.max(), np.nan, a)), "rpn_deltas", ""),
        (_replace("given_features", lambda a: a[:, :-1]), "given_features", "ours is (3, 128), theirs (3, 127)"),
        (_replace("given_bbox_deltas", lambda a: a[:, :0]), "given_bbox_deltas", "theirs (3, 0)"),
        (_replace("rpn_logits", lambda a: a.astype(object)), "files", "img0.npz cannot be read"),
        (_replace("image_bgr", lambda a: a[:, :, ::-1]), "resized_bgr", ""),
        (_replace("sel_thr0.5_strict_3_10", lambda a: a[::-1]), "sel_thr0.5_strict_3_10", ""),
        (lambda files: files.arrays.pop("given_boxes"), "given_features", "given_boxes"),
        (_state("images", [{"index": 1}]), "files", "img1.npz cannot be read"),
        (_state("pooler", "RoIAlign 14x14"), "meta.json", "pooler is 'RoIAlign 14x14', our network's is 'RoIPool"),
        (_state("num_attrs", 9), "meta.json", "attr_score.weight"),
        (_state("salt", "other"), "meta.json", "should sum up to"),
    ],
)
def test_damage_is_named_and_fails(files: Files, tmp_path: Path, change: Callable, stage: str, named: str):
    change(files)
    row = files.compared(tmp_path)[stage]
    assert not row.passes
    assert named in row.remark


def test_what_is_not_stored_or_not_exactly_is_not_fed_on(files: Files, tmp_path: Path):
    for name in ("det_scores", "resized_bgr", "proposal_logits"):
        files.arrays.pop(name)
    for name in ("prop_bbox_deltas", "given_bbox_deltas"):  # of the first classes alone
        files.arrays[name] = files.arrays[name][:, :8]
    for name in ("c4", "prop_features"):
        files.arrays[name] = files.arrays[name].astype(np.float16)
    rows = files.compared(tmp_path)
    assert not failures(rows)
    assert {"prop_cls_logits", "det_boxes"} <= rows.keys()  # fed with what ours made
    assert {stage for stage, row in rows.items() if row.bounds["worst"] == 1e-3} == {"c4", "prop_features"}
    assert rows["c4"].differences["worst"] > 5e-5
    assert rows["rpn_logits"].differences["worst"] < 5e-6
    files.arrays["c4"][3, 1, 1] += 2e-3 * files.arrays["c4"].max()
    assert failures(files.compared(tmp_path)).keys() == {"c4"}
