"""Our detector beside figures in the format of detectron2's: what agrees passes, what differs or is damaged is named.

The figures themselves lie in ../shared/parity/detector. The cases that get damaged here are made by our own network, of
configurations that the figures do not have, and small.
"""

import copy
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from places import SHARED

from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.resnet import ResNetConfig, without_values
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
# As the figures have it, in little.
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
)
# Everything else than they have it.
OTHER = FasterRCNNConfig(
    resnet=ResNetConfig((2, 1, 1, 2), 4, stride_in_1x1=False, stem_pool="torch", res5_dilated=False),
    num_classes=4,
    num_attributes=0,
    anchor_sizes=(24, 40, 70),
    anchor_ratios=(0.4, 1.5),
    rpn_channels=5,
    short_side=80,
    long_side=100,
    pre_nms=90,
    rpn_nms_threshold=0.6,
    post_nms=20,
    roi_op="align1",
    box_weights=(8, 9, 4, 6),
)
WORDS = {
    "pooler": "RoIPool 14x14 scale 1/16",
    "res5": "stride 1, conv2 dilation 2 padding 2",
    "stem_pool": "3x3 stride 2 pad 0 ceil_mode",
}
OTHER_WORDS = {
    "pooler": "RoIAlign 14x14 scale 1/16 sampling_ratio 1 aligned False",
    "res5": "stride 2, conv2 dilation 1 padding 1",
    "stem_pool": "3x3 stride 2 pad 1",
    "stride_in_1x1": False,
}


def described(config: FasterRCNNConfig, words: dict) -> dict:
    """The meta.json of this network."""
    with without_values():
        shapes = {name: list(tensor.shape) for name, tensor in FasterRCNN(config).state_dict().items()}
    metadata = {
        "source": "our own network",
        "depth": 3 * sum(config.resnet.blocks) + 2,
        "num_classes": config.num_classes,
        "num_attrs": config.num_attributes,
        "background_index": config.num_classes,
        "salt": "e",
        "rules": RULES,
        "shapes": shapes,
        "pixel_mean_bgr": [102.9801, 115.9465, 122.7717],
        "pixel_std": [1, 1, 1],
        "min_size": config.short_side,
        "max_size": config.long_side,
        "rpn": {
            "pre_nms": config.pre_nms,
            "post_nms": config.post_nms,
            "nms": config.rpn_nms_threshold,
            "sizes": list(config.anchor_sizes),
            "ratios": list(config.anchor_ratios),
            "stride": 16,
            "offset": 0.0,
            "hidden": config.rpn_channels,
            "min_box": 0,
        },
        "box_reg_weights": list(config.box_weights),
        "bn_eps": 1e-5,
        "images": [{"index": 0, "orig": [60, 77]}],
        **words,
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
    names = [name for name in STAGES if metadata["num_attrs"] or "attr" not in name]
    found = stored | {name: STAGES[name](ours).numpy() for name in names}
    proposals, probabilities = found["proposals_orig"], ours.probabilities.numpy()
    found |= {name: found[name].astype(np.uint8) for name in ("image_bgr", "resized_bgr")}
    for name, rule in {
        "sel_thr0.5_strict_3_10": SelectionSettings(3, 10, 0.5),
        "sel_thr0.01_ge_2_6": SelectionSettings(2, 6, 0.01, strict=False),
        "sel_caffe_origspace_thr0.5_3_10": SelectionSettings(3, 10, 0.5, strict=False, plus_one=True),
    }.items():
        found[name] = select_regions(proposals, probabilities, rule).indices
    return found


def selections() -> tuple[dict, dict[str, np.ndarray]]:
    """The json and the arrays of one selection without a network: box 1 is a worse duplicate of box 0."""
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [20, 0, 30, 10], [40, 0, 50, 10]], np.float32)
    probabilities = np.array([[0.8, 0.1, 0.1], [0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.2, 0.5]], np.float32)
    arrays = {"c0_boxes": boxes, "c0_probs": probabilities, "c0_conf": np.array([0.8, 0.2, 0.6, 0.3], np.float32)}
    arrays |= {"c0_keep0": np.array([0, 2]), "c0_keep1": np.array([0, 2, 3])}
    metadata = {"iou": 0.3, "background": "last column", "sets": [[0.5, 1, 3, True], [0.9, 3, 4, False]]}
    return metadata | {"cases": [{"case": 0}]}, arrays


class Files:
    """What a folder holds: its two json and its arrays, to be changed before it is written."""

    def __init__(self, meta: dict):
        self.meta, self.arrays = meta, figures(meta)
        self.selection, self.selected = selections()

    def write(self, folder: Path) -> Path:
        (folder / "meta.json").write_text(json.dumps(self.meta))
        np.savez(folder / "img0.npz", **{name: array for name, array in self.arrays.items() if name != "c4"})
        np.savez(folder / "img0_c4.npz", c4=self.arrays["c4"])
        (folder / "selection.json").write_text(json.dumps(self.selection))
        np.savez(folder / "selection.npz", **self.selected)
        return folder


@pytest.fixture(scope="module")
def whole() -> Files:
    return Files(described(SMALL, WORDS))


@pytest.fixture
def files(whole: Files) -> Files:
    return copy.deepcopy(whole)


def compared(folder: Path, plain: bool = False) -> dict[str, Row]:
    """The rows by stage."""
    return {row.stage: row for row in compare_folder(folder, "here", plain) if isinstance(row, Row)}


def failures(rows: dict[str, Row]) -> dict[str, Row]:
    return {stage: row for stage, row in rows.items() if not row.passes}


# --- figures of detectron2 --------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_shared
def test_every_stage_computes_what_detectron2_does_on_three_images():
    rows = list(compare_folder(PARITY, "public", plain=False))
    assert [str(row) for row in rows if not (isinstance(row, Row) and row.passes)] == []
    assert len(rows) == 3 * 32 + 2 * 9
    assert max(row.differences["worst"] for row in rows) < 5e-6


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["as it detects", "as it learns"])
def test_every_stage_of_the_full_network_computes_what_detectron2_does(plain: bool):
    rows = compared(PARITY / "full_r101", plain)
    assert not failures(rows)
    assert len(rows) == 29
    float16 = {"c4", "prop_features"}
    assert {stage for stage, row in rows.items() if row.differences["worst"] > 5e-6} == float16


# --- figures of our own -----------------------------------------------------------------------------------------------


def test_any_other_configuration_is_read_and_compared(tmp_path: Path):
    files = Files(described(OTHER, OTHER_WORDS))
    assert read_config(files.meta) == OTHER
    for plain in (False, True):
        rows = compared(files.write(tmp_path), plain)
        assert not failures(rows)
        assert "prop_attr_logits" not in rows
    for key, stage in (
        ("pooler", "prop_features"),
        ("res5", "given_features"),
        ("stem_pool", "c4"),
        ("stride_in_1x1", "c4"),
    ):
        changed = copy.deepcopy(files)
        changed.meta.pop(key)
        assert stage in failures(compared(changed.write(tmp_path))), key


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("pooler", "RoIAlign 14x14", "pooler is 'RoIAlign 14x14', must be one of 'RoIPool 14x14 scale 1/16'"),
        ("res5", "stride 1, conv2 dilation 1 padding 1", "res5 is 'stride 1, conv2 dilation 1 padding 1'"),
        ("stem_pool", "3x3 stride 2 pad 0", "stem_pool is"),
        ("pixel_std", [57.4, 57.1, 58.4], "pixel_std"),
        ("bn_eps", 1e-3, "bn_eps"),
        ("background_index", 0, "background_index is 0"),
        ("depth", 50, "depth is 50"),
        ("num_attrs", 9, "attr_score.weight"),
        ("soft_nms", True, "soft_nms unknown here"),
        ("rpn", {"soft": 1}, "rpn.soft unknown here"),
        ("resize", "cubic", "FasterRCNNConfig.resize"),
        ("salt", "other", "should sum up to"),
        ("rules", [["", "uniform", 0, 1]], "of kind uniform"),
        ("shapes", {}, "shapes has no backbone.stem.conv1.weight"),
    ],
)
def test_what_a_case_wants_and_ours_has_not_is_refused_by_name(
    files: Files, tmp_path: Path, key: str, value: object, named: str
):
    files.meta[key] = value
    rows = compared(files.write(tmp_path))
    assert list(rows) == ["meta.json"]
    assert not rows["meta.json"].passes
    assert named in rows["meta.json"].remark


# --- damage -----------------------------------------------------------------------------------------------------------


def test_whatever_number_is_changed_its_own_stage_fails(whole: Files, tmp_path: Path):
    rows = compared(whole.write(tmp_path))
    assert not failures(rows)
    assert rows.keys() == {*whole.arrays, "pixels to proposals", "c0_keep0..1", "c0_conf"} - {"given_boxes"}
    assert len(whole.arrays["det_keep"]) > 3
    for name in set(whole.arrays) - {"image_bgr", "given_boxes"}:
        files = copy.deepcopy(whole)
        array = files.arrays[name] = files.arrays[name].copy()
        place = array.size // 2
        array.reshape(-1)[place : place + 1] += 3e-4 * np.abs(array).max() if array.dtype.kind == "f" else 1
        assert name in failures(compared(files.write(tmp_path))), name


def _replace(name: str, of: Callable[[np.ndarray], np.ndarray]) -> Callable[[Files], None]:
    return lambda files: files.arrays.update({name: of(files.arrays[name])})


@pytest.mark.parametrize(
    ("change", "stage", "named"),
    [
        (_replace("rpn_deltas", lambda a: np.where(a == a.max(), np.nan, a)), "rpn_deltas", ""),
        (_replace("given_features", lambda a: a[:, :-1]), "given_features", "ours is (3, 128), theirs (3, 127)"),
        (_replace("proposals", lambda a: a[:-1]), "proposals", "ours is (24, 4), theirs (23, 4)"),
        (_replace("rpn_logits", lambda a: a.astype(object)), "files", "img0.npz cannot be read"),
        (_replace("image_bgr", lambda a: a[:, :, ::-1]), "resized_bgr", ""),
        (_replace("resized_bgr", lambda a: a[:, :, ::-1]), "c4", ""),
        (_replace("sel_thr0.5_strict_3_10", lambda a: a[::-1]), "sel_thr0.5_strict_3_10", ""),
        (lambda files: files.arrays.update({"sel_thr0.5_3_10": np.arange(3)}), "sel_thr0.5_3_10", "`strict` or `ge`"),
        (lambda files: files.arrays.pop("given_boxes"), "given_features", "given_boxes"),
        (lambda files: files.selected["c0_keep1"].__setitem__(0, 1), "c0_keep0..1", ""),
        (lambda files: files.selected["c0_conf"].__setitem__(0, np.nan), "c0_conf", ""),
        (lambda files: files.selected.pop("c0_keep1"), "c0_", "c0_keep1"),
        (lambda files: files.selection.update(offset=1), "files", "selection.json: offset unknown here"),
        (lambda files: files.meta["images"].append({"index": 1}), "files", "img1.npz cannot be read"),
    ],
    ids=range(14),
)
def test_damage_is_named_and_fails(files: Files, tmp_path: Path, change: Callable, stage: str, named: str):
    change(files)
    row = compared(files.write(tmp_path))[stage]
    assert not row.passes
    assert named in row.remark


def test_torn_files_are_named(files: Files, tmp_path: Path):
    folder = files.write(tmp_path)
    data = bytearray((folder / "img0.npz").read_bytes())
    with zipfile.ZipFile(folder / "img0.npz") as archive:
        data[archive.getinfo("rpn_deltas.npy").header_offset + 300] ^= 1
    for content in (data, data[:1000]):
        (folder / "img0.npz").write_bytes(content)
        assert "img0.npz cannot be read: BadZipFile" in compared(folder)["files"].remark
    (folder / "meta.json").write_text("{")
    assert "JSONDecodeError" in compared(folder)["meta.json"].remark


def test_what_is_not_stored_is_not_compared_and_what_is_unknown_is_named(files: Files, tmp_path: Path):
    for name in ("det_scores", "prop_features", "resized_bgr", "proposal_logits", "prop_bbox_deltas"):
        files.arrays.pop(name)
    files.arrays["mask_logits"] = np.zeros(3, np.float32)
    found = list(compare_folder(files.write(tmp_path), "here", plain=False))
    rows = {row.stage: row for row in found if isinstance(row, Row)}
    assert not failures(rows)
    assert {"prop_cls_logits", "det_boxes"} <= rows.keys()  # fed with what ours made
    assert [one for one in found if isinstance(one, str)] == [
        "here/img0: mask_logits is unknown here, so it is not compared"
    ]


def test_half_precision_has_its_own_bound_and_is_not_fed_on(files: Files, tmp_path: Path):
    for name in ("c4", "prop_features"):
        files.arrays[name] = files.arrays[name].astype(np.float16)
    rows = compared(files.write(tmp_path))
    assert not failures(rows)
    assert {stage for stage, row in rows.items() if row.bounds["worst"] == 1e-3} == {"c4", "prop_features"}
    assert rows["c4"].differences["worst"] > 5e-5
    assert rows["rpn_logits"].differences["worst"] < 5e-6
    files.arrays["c4"][3, 1, 1] += 2e-3 * files.arrays["c4"].max()
    assert failures(compared(files.write(tmp_path))).keys() == {"c4"}


def test_deltas_may_be_cut_to_the_first_classes(files: Files, tmp_path: Path):
    for name in ("prop_bbox_deltas", "given_bbox_deltas"):
        files.arrays[name] = files.arrays[name][:, :8]
    assert not failures(compared(files.write(tmp_path)))
    files.arrays["given_bbox_deltas"] = files.arrays["given_bbox_deltas"][:, :0]
    assert "given_bbox_deltas" in failures(compared(files.write(tmp_path)))
