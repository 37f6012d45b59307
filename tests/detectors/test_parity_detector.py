"""Our detector beside figures in the format of detectron2's: what agrees passes, what is damaged is named.

The figures themselves lie in ../shared/parity/detector. The cases that get damaged here are made by our own network, of
configurations that the figures do not have, and small.
"""

import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from places import SHARED

from benchmarks.parity.cases import Row
from benchmarks.parity.detector import compare_folder, in_their_order
from benchmarks.parity.detector_cases import read_config, regenerated
from detectors.detect import to_stored_pixels
from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig, grid_anchors
from detectors.preprocess import resize, to_input
from detectors.resnet import ResNetConfig, without_values
from detectors.select import SelectionSettings, select_regions

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
    pool_size=6,
    box_weights=(8, 9, 4, 6),
)
WORDS = {
    "pooler": "RoIPool 14x14 scale 1/16",
    "res5": "stride 1, conv2 dilation 2 padding 2",
    "stem_pool": "3x3 stride 2 pad 0 ceil_mode",
}
OTHER_WORDS = {
    "pooler": "RoIAlign 6x6 scale 1/16 sampling_ratio 1 aligned False",
    "res5": "stride 2, conv2 dilation 1 padding 1",
    "stem_pool": "3x3 stride 2 pad 1",
    "stride_in_1x1": False,
}


def described(config: FasterRCNNConfig, words: dict) -> dict:
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


def network(config: FasterRCNNConfig, metadata: dict) -> FasterRCNN:
    ours = FasterRCNN(config).eval()
    ours.load_state_dict(regenerated(metadata))
    return ours


@torch.inference_mode()
def figures(config: FasterRCNNConfig, metadata: dict) -> dict[str, np.ndarray]:
    """What img0.npz and img0_c4.npz hold, of one image of 60 x 77 pixels."""
    ours, random = network(config, metadata), np.random.default_rng(5)
    image = np.kron(random.integers(0, 256, (6, 7, 3)), np.ones((10, 11, 1))).astype(np.uint8)
    resized = resize(image, config)
    size = resized.shape[:2]
    c4 = ours.backbone(to_input(resized))
    logits, deltas = (tensor[0] for tensor in ours.rpn(c4))
    anchors = grid_anchors(ours.proposal_generator.cell_anchors, *logits.shape[1:])
    (proposals,), (scores,) = ours.proposals(logits[None], deltas[None], *size)
    original = to_stored_pixels(proposals, (size[0] / 60, size[1] / 77), (60, 77))
    given = torch.tensor([[3.0, 5, 60, 70], [10, 0, 90, 40], [0, 0, size[1], size[0]]])
    found = {
        "image_bgr": image,
        "resized_bgr": resized,
        "c4": c4[0],
        "anchors_count": np.int64(len(anchors)),
        "anchors_first": anchors[:5],
        "anchors_last": anchors[-3:],
        "rpn_logits": logits,
        "rpn_deltas": deltas,
        "proposals": proposals,
        "proposal_logits": scores,
        "proposals_orig": original,
        "given_boxes": given,
    }
    for prefix, boxes in (("prop", proposals), ("given", given)):
        features = ours.roi_features(c4, [boxes])
        outputs = ours.heads(features)
        found |= {f"{prefix}_features": features, f"{prefix}_cls_logits": outputs.class_logits}
        found |= {f"{prefix}_bbox_deltas": outputs.box_deltas.flatten(1)}
        if config.num_attributes:
            found |= {f"{prefix}_attr_logits": outputs.attribute_logits}
    probs = found["prop_cls_logits"].softmax(dim=1)[:, :-1]
    rows, labels = (probs > 0.2).nonzero(as_tuple=True)
    moved = ours.regressed(proposals[rows], found["prop_bbox_deltas"].unflatten(1, (-1, 4))[rows], labels, *size)
    best = torchvision.ops.batched_nms(moved, probs[rows, labels], labels, 0.6)[:100]
    found |= {"det_boxes": moved[best], "det_scores": probs[rows, labels][best]}
    found |= {"det_classes": labels[best], "det_keep": rows[best]}
    for name, rule in {
        "sel_thr0.5_strict_3_10": SelectionSettings(3, 10, 0.5),
        "sel_thr0.01_ge_2_6": SelectionSettings(2, 6, 0.01, strict=False),
        "sel_caffe_origspace_thr0.5_3_10": SelectionSettings(3, 10, 0.5, strict=False, plus_one=True),
    }.items():
        found[name] = select_regions(original.numpy(), probs.numpy(), rule).indices
    survives = torch.zeros_like(probs)
    for label in range(config.num_classes):
        kept = torchvision.ops.nms(original, probs[:, label], 0.3)
        survives[kept, label] = probs[kept, label]
    found["max_conf"] = survives.amax(dim=1)
    return {name: np.asarray(array) for name, array in found.items()}


def selections() -> tuple[dict, dict[str, np.ndarray]]:
    random = np.random.default_rng(3)
    corner = random.uniform(0, 50, (20, 2))
    boxes = np.concatenate([corner, corner + random.uniform(10, 50, (20, 2))], axis=1).astype(np.float32)
    probs = random.dirichlet(np.full(5, 0.3), 20).astype(np.float32)
    sets = [[0.5, 3, 10, True], [0.9, 12, 15, False]]
    arrays = {"c0_boxes": boxes, "c0_probs": probs}
    for index, (threshold, minimum, maximum, strict) in enumerate(sets):
        rule = SelectionSettings(minimum, maximum, threshold, strict)
        arrays[f"c0_keep{index}"] = select_regions(boxes, probs[:, :-1], rule).indices
    survives = np.zeros((20, 4), np.float32)
    for label in range(4):
        kept = torchvision.ops.nms(torch.from_numpy(boxes), torch.from_numpy(probs[:, label].copy()), 0.3).numpy()
        survives[kept, label] = probs[kept, label]
    arrays["c0_conf"] = survives.max(axis=1)
    metadata = {"iou": 0.3, "background": "last column of probs", "sets": sets}
    return metadata | {"cases": [{"case": 0, "n": 20, "classes": 4}]}, arrays


@dataclasses.dataclass
class Files:
    """What a folder holds: its two json and its arrays, to be changed before it is written."""

    meta: dict
    arrays: dict[str, np.ndarray]
    selection: dict = dataclasses.field(default_factory=lambda: selections()[0])
    selected: dict[str, np.ndarray] = dataclasses.field(default_factory=lambda: selections()[1])

    def copy(self) -> "Files":
        arrays, selected = ({k: a.copy() for k, a in some.items()} for some in (self.arrays, self.selected))
        return Files(json.loads(json.dumps(self.meta)), arrays, json.loads(json.dumps(self.selection)), selected)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").write_text(json.dumps(self.meta))
        np.savez(folder / "img0.npz", **{name: array for name, array in self.arrays.items() if name != "c4"})
        if "c4" in self.arrays:
            np.savez(folder / "img0_c4.npz", c4=self.arrays["c4"])
        (folder / "selection.json").write_text(json.dumps(self.selection))
        np.savez(folder / "selection.npz", **self.selected)
        return folder


@pytest.fixture(scope="module")
def whole() -> Files:
    metadata = described(SMALL, WORDS)
    return Files(metadata, figures(SMALL, metadata))


@pytest.fixture
def files(whole: Files) -> Files:
    return whole.copy()


def compared(folder: Path, plain: bool = False) -> tuple[dict[str, Row], list[str]]:
    """The rows by stage (by case and stage, where cases share it), and the remarks."""
    found = list(compare_folder(folder, "here", plain))
    rows = [row for row in found if isinstance(row, Row)]
    return {row.stage: row for row in rows}, [line for line in found if isinstance(line, str)]


def failures(folder: Path) -> set[str]:
    return {stage for stage, row in compared(folder)[0].items() if not row.passes}


# --- figures of detectron2 --------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_shared
def test_every_stage_computes_what_detectron2_does_on_three_images():
    found = list(compare_folder(PARITY, "public", plain=False))
    rows = [row for row in found if isinstance(row, Row)]
    assert [str(row) for row in rows if not row.passes] == []
    assert len(rows) == 3 * 32 + 2 * 9
    assert max(row.differences["worst"] for row in rows) < 5e-6
    assert not [line for line in found if isinstance(line, str) and "unknown" in line]


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["as it detects", "as it learns"])
def test_every_stage_of_the_full_network_computes_what_detectron2_does(plain: bool):
    rows, _ = compared(PARITY / "full_r101", plain)
    assert [str(row) for row in rows.values() if not row.passes] == []
    assert len(rows) == 29
    assert {stage for stage, row in rows.items() if row.differences["worst"] > 5e-6} == {
        "c4",
        "prop_features",
    }  # float16


# --- figures of our own -----------------------------------------------------------------------------------------------


def test_a_case_that_our_own_network_made_passes(files: Files, tmp_path: Path):
    folder = files.write(tmp_path)
    rows, remarks = compared(folder)
    assert [str(row) for row in rows.values() if not row.passes] == []
    assert set(rows) == {*files.arrays, "pixels to proposals", "c0_keep0..1", "c0_conf"} - {"given_boxes"}
    assert len(files.arrays["det_keep"]) > 3
    assert remarks[0].endswith("so it is as in the Visual Genome network: box_arithmetic, resize, stride_in_1x1")


def test_any_other_configuration_is_read_from_its_words_and_compared(tmp_path: Path):
    metadata = described(OTHER, OTHER_WORDS)
    assert read_config(metadata) == (OTHER, ["box_arithmetic", "resize"])
    files = Files(metadata, figures(OTHER, metadata))
    for plain in (False, True):
        rows, _ = compared(files.write(tmp_path), plain)
        assert [str(row) for row in rows.values() if not row.passes] == []
        assert "prop_attr_logits" not in rows
    for key in OTHER_WORDS:
        changed = files.copy()
        changed.meta.pop(key)
        if key == "pooler":  # 14 x 14 cells of a box make other features than 6 x 6
            assert "prop_features" in failures(changed.write(tmp_path))
        elif key == "res5":
            assert "given_features" in failures(changed.write(tmp_path))
        else:
            assert "c4" in failures(changed.write(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("pooler", "ROIPool 7x7", "pool_size", 7),
        ("pooler", {"type": "ROIAlign", "resolution": 14, "sampling_ratio": 1}, "roi_op", "align1"),
        ("pooler", "legacy RoIAlign 14x14, scale 0.0625, 1 sample per bin", "roi_op", "align1"),
        ("res5", "stride 2, no dilation", "res5_dilated", False),
        ("res5", "dilated", "res5_dilated", True),
        ("stem_pool", "max pool 3x3 stride 2 padding 1, ceil_mode False", "stem_pool", "torch"),
        ("stem_pool", "torch", "stem_pool", "torch"),
        ("stem_pool", "caffe", "stem_pool", "caffe"),
    ],
)
def test_descriptions_are_read(whole: Files, key: str, value: object, field: str, expected: object):
    config, _ = read_config(whole.meta | {key: value})
    assert getattr(config, field, getattr(config.resnet, field, None)) == expected


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("pooler", "DeformRoIPool 14x14", "DeformRoIPool"),
        ("pooler", "ROIAlignV2 14x14", "ROIAlignV2"),
        ("pooler", "RoIAlign 14x14 sampling_ratio 0", "one sample a bin"),
        ("pooler", "RoIAlign 14x14 aligned=True", "not `aligned`"),
        ("pooler", "RoIPool 14x14 scale 1/32", "scale 1/32"),
        ("res5", "stride 1, conv2 dilation 1 padding 1", "res5 is 'stride 1, conv2 dilation 1 padding 1'"),
        ("res5", "stride 2 deformable", "deformable"),
        ("stem_pool", "3x3 stride 2 pad 1 ceil_mode", "stem_pool is"),
        ("stem_pool", "3x3 stride 2 pad 0", "stem_pool is"),
        ("pixel_std", [57.4, 57.1, 58.4], "pixel_std"),
        ("bn_eps", 1e-3, "bn_eps"),
        ("background_index", 0, "background_index is 0"),
        ("depth", 50, "depth is 50"),
        ("num_classes", 20, "background_index is 7, but 20"),
        ("num_attrs", 9, "attr_score.weight is (6, 4), ours (10, 4)"),
        ("soft_nms", True, "soft_nms unknown here"),
        ("resize", "cubic", "FasterRCNNConfig.resize"),
        ("shapes", None, "shapes is None"),
    ],
)
def test_what_a_case_wants_and_ours_has_not_is_refused_by_name(
    files: Files, tmp_path: Path, key: str, value: object, named: str
):
    files.meta[key] = value
    rows, _ = compared(files.write(tmp_path))
    assert list(rows) == ["meta.json"]
    assert not rows["meta.json"].passes
    assert named in rows["meta.json"].remark


def test_an_unknown_setting_of_the_rpn_is_refused_by_name(files: Files, tmp_path: Path):
    files.meta["rpn"]["soft"] = 1
    assert "rpn.soft unknown here" in compared(files.write(tmp_path))[0]["meta.json"].remark


# --- damage -----------------------------------------------------------------------------------------------------------


def test_whatever_number_is_changed_its_own_stage_fails(whole: Files, tmp_path: Path):
    names = set(whole.arrays) - {"image_bgr", "given_boxes"}
    for name in names:
        files = whole.copy()
        array = files.arrays[name]
        if array.dtype.kind == "f":
            array.reshape(-1)[array.size // 2] += 3e-4 * np.abs(array).max()
        else:
            array.reshape(-1)[array.size // 2 : array.size // 2 + 1] += 1
        assert name in failures(files.write(tmp_path)), name


def _fill(name: str, value: float) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.arrays[name].reshape(-1)[1] = value

    return change


def _replace(name: str, of: Callable[[np.ndarray], np.ndarray]) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.arrays[name] = of(files.arrays[name])

    return change


@pytest.mark.parametrize(
    ("change", "stage", "named"),
    [
        (_fill("rpn_deltas", np.nan), "rpn_deltas", "img0.npz: rpn_deltas holds 1 numbers that are NaN or infinite"),
        (_fill("c4", np.inf), "c4", "img0_c4.npz: c4 holds 1 numbers"),
        (_replace("given_features", lambda a: a[:, :-1]), "given_features", "ours is (3, 128), theirs (3, 127)"),
        (_replace("proposals", lambda a: a[:-1]), "proposals", "proposals: ours are 24, theirs 23"),
        (_replace("det_boxes", lambda a: a[1:]), "det_boxes", "boxes: ours are"),
        (_replace("rpn_logits", lambda a: a.astype(object)), "rpn_logits", "img0.npz: rpn_logits cannot be read"),
        (_replace("rpn_logits", lambda a: a.astype(str)), "rpn_logits", "neither integers nor floating-point"),
        (_replace("image_bgr", lambda a: a[:, :, ::-1]), "resized_bgr", ""),
        (_replace("image_bgr", lambda a: a[:-1]), "proposals_orig", "orig is (60, 77), image_bgr is (59, 77)"),
        (_replace("resized_bgr", lambda a: a[:, :, ::-1]), "c4", ""),
        (_replace("sel_thr0.5_strict_3_10", lambda a: a[::-1]), "sel_thr0.5_strict_3_10", "differ, first 0: ours is"),
        (_replace("sel_thr0.01_ge_2_6", lambda a: a[:-1]), "sel_thr0.01_ge_2_6", "ours are 6 indices, theirs (5,)"),
        (_replace("det_classes", lambda a: a[::-1]), "det_classes", "has no counterpart among ours"),
        (lambda files: files.arrays.update({"sel_thr0.5_3_10": np.arange(3)}), "sel_thr0.5_3_10", "`strict` or `ge`"),
        (lambda files: files.arrays.pop("given_boxes"), "given_features", "given_boxes, the boxes that it is of, is"),
        (lambda files: files.selected["c0_keep1"].__setitem__(0, 19), "c0_keep0..1", "keep1: 1 of 12 differ, first 0"),
        (lambda files: files.selected.pop("c0_keep1"), "c0", "selection.npz has no c0_keep1"),
        (lambda files: files.selected["c0_conf"].__setitem__(0, np.nan), "c0", "c0_conf holds 1 numbers"),
        (lambda files: files.selection.update(offset=1), "selection", "selection.json: offset unknown here"),
        (lambda files: files.meta.update(salt="other"), "meta.json", "should sum up to"),
        (lambda files: files.meta["rules"].insert(0, ["conv", "uniform", 0, 1]), "meta.json", "of kind uniform"),
        (lambda files: files.meta["shapes"].popitem(), "meta.json", "is missing"),
        (lambda files: files.meta["shapes"].update(more=[1]), "meta.json", "more is not in our network"),
        (lambda files: files.meta["images"].append({"index": 1}), "files", "no img1.npz, but meta.json names it"),
        (lambda files: [files.arrays.pop(k) for k in set(files.arrays) - {"given_boxes"}], "files", "img0.npz holds"),
    ],
    ids=range(25),
)
def test_damage_is_named_and_fails(files: Files, tmp_path: Path, change: Callable, stage: str, named: str):
    change(files)
    rows, _ = compared(files.write(tmp_path))
    assert not rows[stage].passes
    assert named in rows[stage].remark


def test_torn_files_are_named(files: Files, tmp_path: Path):
    folder = files.write(tmp_path)
    whole = bytearray((folder / "img0.npz").read_bytes())
    with zipfile.ZipFile(folder / "img0.npz") as archive:
        whole[archive.getinfo("rpn_deltas.npy").header_offset + 300] ^= 1
    (folder / "img0.npz").write_bytes(whole)
    rows, _ = compared(folder)
    assert {stage for stage, row in rows.items() if "rpn_deltas cannot be read: BadZipFile" in row.remark} == {
        "rpn_deltas",
        "proposals",
        "proposal_logits",
    }
    (folder / "img0.npz").write_bytes(whole[:1000])
    assert "img0.npz cannot be read: BadZipFile" in compared(folder)[0]["files"].remark
    (folder / "meta.json").write_text("{")
    assert "JSONDecodeError" in compared(folder)[0]["meta.json"].remark


def test_what_is_not_stored_is_not_compared_and_what_is_unknown_is_named(files: Files, tmp_path: Path):
    for name in ("c4", "det_scores", "prop_features", "resized_bgr", "proposal_logits"):
        files.arrays.pop(name)
    files.arrays["mask_logits"] = np.zeros(3, np.float32)
    (tmp_path / "img0_c4.npz").unlink(missing_ok=True)
    rows, remarks = compared(files.write(tmp_path))
    assert [str(row) for row in rows.values() if not row.passes] == []
    assert rows["rpn_logits"].remark == "fed with our c4"
    assert "here/img0: img0.npz: mask_logits is unknown here, so it is not compared" in remarks
    missing = "resized_bgr, c4, proposal_logits, prop_features, det_scores, max_conf_caffe"
    assert f"here/img0: {missing}: not stored, so not compared" in remarks


def test_half_precision_has_its_own_bound_and_is_not_fed_on(files: Files, tmp_path: Path):
    for name in ("c4", "prop_features"):
        files.arrays[name] = files.arrays[name].astype(np.float16)
    rows, _ = compared(files.write(tmp_path))
    assert [str(row) for row in rows.values() if not row.passes] == []
    assert {stage for stage, row in rows.items() if row.bounds["worst"] == 1e-3} == {"c4", "prop_features"}
    assert rows["c4"].differences["worst"] > 5e-5
    assert rows["rpn_logits"].differences["worst"] < 5e-6
    assert rows["prop_cls_logits"].remark == "fed with our prop_features"
    halved = files.copy()
    halved.arrays["rpn_logits"] = halved.arrays["rpn_logits"].astype(np.float16)
    row = compared(halved.write(tmp_path))[0]["proposals"]  # last bits of our own logits may choose other proposals
    assert (row.passes, row.bounds["worst"]) == (True, 0.1)
    assert row.remark == "24 of 24 found at IoU 0.99, ours are 24; fed with our rpn_logits"
    files.arrays["c4"][3, 1, 1] += 2e-3 * files.arrays["c4"].max()
    assert failures(files.write(tmp_path)) == {"c4"}


def test_deltas_may_be_cut_to_the_first_classes(files: Files, tmp_path: Path):
    for name in ("prop_bbox_deltas", "given_bbox_deltas"):
        files.arrays[name] = files.arrays[name][:, :8]
    rows, _ = compared(files.write(tmp_path))
    assert [str(row) for row in rows.values() if not row.passes] == []
    assert rows["given_bbox_deltas"].remark == "first 2 of 7 classes"
    assert rows["det_boxes"].remark == "fed with our prop_bbox_deltas"


def test_boxes_may_change_places_only_where_their_scores_are_nearly_equal():
    boxes = torch.arange(20.0).reshape(5, 4)
    scores = torch.tensor([5, 4, 4 - 1e-5, 2, 1])
    ours = {"boxes": boxes, "scores": scores}
    near, far = torch.tensor([0, 2, 1, 3, 4]), torch.tensor([0, 1, 3, 2, 4])
    found = in_their_order(ours, {"boxes": boxes[near], "scores": scores[near]}, "scores")
    assert (found.moved, found.remark) == (2, "2 in another order")
    assert found.apart("boxes", boxes[near]) < 1e-5
    assert in_their_order(ours, {"boxes": boxes[far]}, "scores").apart("boxes", boxes[far]) > 0.3
    twice = boxes[torch.tensor([0, 1, 1, 3, 4])]  # no box of ours stands for two of theirs
    assert in_their_order(ours, {"boxes": twice}, "scores").apart("boxes", twice) > 0.1


def test_attributes_are_not_compared_where_two_classes_are_nearly_equal(files: Files, tmp_path: Path):
    logits = files.arrays["given_cls_logits"]
    first, second = logits[1].argsort()[[-1, -2]]
    files.arrays["given_attr_logits"][1] += 1  # as if the second class had been the most probable with them
    for ahead, passes in ((1e-3, False), (1e-6, True)):
        logits[1, second] = logits[1, first] + ahead * np.abs(logits).max()
        row = compared(files.write(tmp_path))[0]["given_attr_logits"]
        assert row.passes == passes
    assert row.remark == "1 of 3 left out: two classes are nearly equal"
