"""Our Faster R-CNN beside figures that detectron2 produced: the same weights and images, the same numbers.

A model is a folder with a meta.json: the network's configuration, the rule that makes each weight, and checksums.
Beside it lie images, img*.npz with img*_c4.npz. Every stage gets what detectron2's own stage got, if that is stored in
full precision, else what our stage before it made of the same. tests/detectors/test_select.py reads selection.npz.
Differences are shares of the largest value of theirs.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor

from detectors.detect import to_stored_pixels
from detectors.faster_rcnn import (
    STRIDE,
    FasterRCNN,
    FasterRCNNConfig,
    HeadOutputs,
    cell_anchors,
    grid_anchors,
    regress_boxes,
)
from detectors.preprocess import PIXEL_MEAN_BGR, decode_bgr, resize, to_input
from detectors.resnet import FrozenNorm, ResNetConfig
from detectors.select import SelectionSettings, find_overlaps, select_regions, surviving_confidence
from tests.parity.cases import Row, apart, check_switches, not_run, standard_normal

TOLERANCE = 1e-4  # of the largest value of a tensor
HALF_TOLERANCE = 1e-3  # of one that is stored as float16; integers must be equal
# From pixels to proposals without their figures in between, last bits decide which of two boxes of nearly equal
# objectness suppresses the other. This share of their proposals may therefore have none of ours at SAME_BOX.
MISSING = 0.1
SAME_BOX = 0.99  # IoU
DETECTION_SCORE, DETECTION_NMS, DETECTIONS = 0.2, 0.6, 100  # detectron2's inference, for det_*
BOXES_AT_ONCE = 16  # in res5: bounds the memory

Stored = dict[str, np.ndarray]


def compared(case: str, stage: str, difference: float, bound: float) -> Row:
    return Row(case, stage, {"worst": difference}, {"worst": bound})


def as_tensor(array: np.ndarray) -> Tensor:
    """Convert to float32, or int64."""
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def bound(array: np.ndarray) -> float:
    return 0 if array.dtype.kind != "f" else HALF_TOLERANCE if array.dtype == np.float16 else TOLERANCE


def read_arrays(*files: Path) -> Stored:
    """Read the arrays of some npz files by name. Raises ValueError naming the file that cannot be read."""
    found = {}
    for file in files:
        try:
            with np.load(file, allow_pickle=False) as archive:
                found |= archive
        except Exception as error:  # a torn zip raises anything
            raise ValueError(f"{file.name} cannot be read: {type(error).__name__}: {error}") from error
    return found


# --- stages -----------------------------------------------------------------------------------------------------------


class Stages:
    """What our network makes of one image, a stage at a time."""

    def __init__(self, network: FasterRCNN, stored: Stored):
        self.network, self.stored = network, stored
        self.features, self.outputs = cache(self._features), cache(self._outputs)

    def feed(self, name: str) -> Tensor:
        """Return what goes into the next stage: theirs if it is stored exactly and whole, else ours."""
        array = self.stored.get(name)
        exact = array is not None and array.dtype != np.float16
        if exact and (name != "prop_bbox_deltas" or array.shape[1] == 4 * self.network.config.num_classes):
            return as_tensor(array)
        return STAGES[name](self)

    @cached_property
    def image(self) -> np.ndarray:
        """The image as a shard would store it, without loss, and decoded as detection does."""
        stream = io.BytesIO()
        Image.fromarray(self.stored["image_bgr"][:, :, ::-1]).save(stream, "PNG")
        return np.array(decode_bgr(stream.getvalue()))

    @cached_property
    def resized(self) -> np.ndarray:
        return np.array(resize(self.image, self.network.config))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the network's input."""
        return self.feed("resized_bgr").shape[:2]

    @cached_property
    def c4(self) -> Tensor:
        return self.network.backbone(to_input(self.feed("resized_bgr").numpy().astype(np.uint8)))

    @cached_property
    def rpn(self) -> tuple[Tensor, Tensor]:
        return self.network.rpn(self.feed("c4")[None])

    @cached_property
    def anchors(self) -> Tensor:
        return grid_anchors(cell_anchors(self.network.config), *self.feed("rpn_logits").shape[1:])

    @cached_property
    def proposals(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.network.proposals(self.feed("rpn_logits")[None], self.feed("rpn_deltas")[None], *self.size)

    @cached_property
    def proposals_orig(self) -> Tensor:
        sides = self.image.shape[:2]
        scales = tuple(ours / theirs for ours, theirs in zip(self.size, sides, strict=True))
        return to_stored_pixels(self.feed("proposals"), scales, sides)

    def _features(self, prefix: str) -> Tensor:
        boxes = self.feed("proposals") if prefix == "prop" else as_tensor(self.stored["given_boxes"])
        return self.network.roi_features(self.feed("c4")[None], [boxes])

    def _outputs(self, prefix: str) -> HeadOutputs:
        return self.network.roi_heads.box_predictor(self.feed(f"{prefix}_features"))

    @cached_property
    def probabilities(self) -> Tensor:
        """[P, C] of the proposals, without the background."""
        return self.feed("prop_cls_logits").softmax(dim=1)[:, :-1]

    @cached_property
    def detections(self) -> tuple[Tensor, ...]:
        """detectron2's inference: the boxes of every class, moved for it, above a score and after suppression."""
        keep, classes = torch.nonzero(self.probabilities > DETECTION_SCORE, as_tuple=True)
        scores, deltas = self.probabilities[keep, classes], self.feed("prop_bbox_deltas").unflatten(1, (-1, 4))
        boxes = regress_boxes(self.network.config, self.feed("proposals")[keep], deltas[keep], classes, *self.size)
        best = torchvision.ops.batched_nms(boxes, scores, classes, DETECTION_NMS)[:DETECTIONS]
        return boxes[best], scores[best], classes[best], keep[best]

    def confidence(self, plus_one: bool) -> Tensor:
        overlaps = find_overlaps(self.feed("proposals_orig").numpy(), SelectionSettings(plus_one=plus_one))
        return torch.from_numpy(surviving_confidence(overlaps, self.probabilities.numpy()))

    def selected(self, rule: re.Match | None) -> Tensor:
        if rule is None:
            raise ValueError(f"no rule of selection has this name; known are those of {_SELECTION.pattern}")
        caffe, threshold, strict, minimum, maximum = rule.groups()
        settings = SelectionSettings(
            int(minimum), int(maximum), float(threshold), strict=strict == "strict", plus_one=bool(caffe)
        )
        chosen = select_regions(self.feed("proposals_orig").numpy(), self.probabilities.numpy(), settings)
        return torch.from_numpy(chosen)

    def missing(self) -> float:
        """The share of their proposals that are not among ours if nothing of theirs is used but the pixels."""
        logits, deltas = self.network.rpn(self.network.backbone(to_input(self.resized)))
        (ours,), _ = self.network.proposals(logits, deltas, *self.resized.shape[:2])
        theirs = as_tensor(self.stored["proposals"])
        if not len(theirs) or not len(ours):
            return float(len(theirs) != len(ours))
        return 1 - float((torchvision.ops.box_iou(theirs, ours).amax(dim=1) > SAME_BOX).float().mean())


# Every array that is compared -> what our stage makes.
STAGES: dict[str, Callable[[Stages], Tensor]] = {
    "image_bgr": lambda ours: as_tensor(ours.image),
    "resized_bgr": lambda ours: as_tensor(ours.resized),
    "anchors_count": lambda ours: torch.tensor(len(ours.anchors)),
    "anchors_first": lambda ours: ours.anchors[: len(ours.stored["anchors_first"])],
    "anchors_last": lambda ours: ours.anchors[-len(ours.stored["anchors_last"]) :],
    "c4": lambda ours: ours.c4[0],
    "rpn_logits": lambda ours: ours.rpn[0][0],
    "rpn_deltas": lambda ours: ours.rpn[1][0],
    "proposals": lambda ours: ours.proposals[0][0],
    "proposal_logits": lambda ours: ours.proposals[1][0],
    "proposals_orig": lambda ours: ours.proposals_orig,
    "prop_features": lambda ours: ours.features("prop"),
    "given_features": lambda ours: ours.features("given"),
    "prop_cls_logits": lambda ours: ours.outputs("prop").class_logits,
    "prop_attr_logits": lambda ours: ours.outputs("prop").attribute_logits,
    "prop_bbox_deltas": lambda ours: ours.outputs("prop").box_deltas.flatten(1),
    "given_cls_logits": lambda ours: ours.outputs("given").class_logits,
    "given_attr_logits": lambda ours: ours.outputs("given").attribute_logits,
    "given_bbox_deltas": lambda ours: ours.outputs("given").box_deltas.flatten(1),
    "det_boxes": lambda ours: ours.detections[0],
    "det_scores": lambda ours: ours.detections[1],
    "det_classes": lambda ours: ours.detections[2],
    "det_keep": lambda ours: ours.detections[3],
    "max_conf": lambda ours: ours.confidence(plus_one=False),
    "max_conf_caffe": lambda ours: ours.confidence(plus_one=True),
}
_SELECTION = re.compile(r"sel_(caffe_(?:origspace_)?)?thr([0-9.]+)(?:_(strict|ge))?_(\d+)_(\d+)")


# --- the network ---------------------------------------------------------------------------------------------------


def read_config(metadata: dict) -> FasterRCNNConfig:
    """Return the network that a meta.json describes. Raises ValueError if it describes one of another kind."""
    shapes, rpn = metadata["shapes"], metadata["rpn"]
    stages = ("backbone.res2", "backbone.res3", "backbone.res4", "roi_heads.res5")
    found = [[re.match(rf"{re.escape(stage)}\.(\d+)\.", name) for name in shapes] for stage in stages]
    blocks = tuple(1 + max(int(match[1]) for match in matches if match) for matches in found)
    head = "roi_heads.box_predictor"
    any_value = ("source", "salt", "seed_rule", "rules", "shapes", "checks", "images", "min_size", "max_size")
    any_rpn = dict.fromkeys(("pre_nms", "post_nms", "nms", "sizes", "ratios", "hidden"), ...)
    known = {
        **dict.fromkeys((*any_value, "num_classes", "num_attrs", "box_reg_weights"), ...),
        "rpn": any_rpn | {"stride": (STRIDE,), "offset": (0,), "min_box": (0,)},
        "depth": (2 + 3 * sum(blocks),),
        "background_index": (metadata["num_classes"],),
        "attr_none_index": (metadata["num_attrs"],),
        "pixel_mean_bgr": ([*PIXEL_MEAN_BGR],),
        "pixel_std": ([1, 1, 1],),
        "pooler": ("RoIPool 14x14 scale 1/16",),
        "res5": ("stride 1, conv2 dilation 2 padding 2",),
        "stem_pool": ("3x3 stride 2 pad 0 ceil_mode",),
        "bn_eps": (FrozenNorm(1).eps,),
    }
    check_switches(metadata, known, "meta.json")
    return FasterRCNNConfig(
        resnet=ResNetConfig(blocks, width=shapes["backbone.stem.conv1.weight"][0]),
        num_classes=metadata["num_classes"],
        num_attributes=metadata["num_attrs"],
        anchor_sizes=tuple(rpn["sizes"]),
        anchor_ratios=tuple(rpn["ratios"]),
        rpn_channels=rpn["hidden"],
        short_side=metadata["min_size"],
        long_side=metadata["max_size"],
        pre_nms=rpn["pre_nms"],
        rpn_nms_threshold=rpn["nms"],
        post_nms=rpn["post_nms"],
        box_weights=tuple(metadata["box_reg_weights"]),
        attribute_embedding=shapes[f"{head}.cls_embedding.weight"][1],
        attribute_hidden=shapes[f"{head}.fc_attr.weight"][0],
    )


def regenerated(metadata: dict) -> dict[str, Tensor]:
    """Draw the weights that a meta.json describes by rules. Raises ValueError if a checksum differs."""
    tensors = {name: _drawn(metadata, name, tuple(shape)) for name, shape in metadata["shapes"].items()}
    for name, total in metadata.get("checks", {}).items():
        ours = float(tensors[name].double().sum())
        if not math.isclose(ours, total, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(f"meta.json: {name} should sum up to {total}, by the rules it does to {ours}")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}


def _drawn(metadata: dict, name: str, shape: tuple[int, ...]) -> Tensor:
    draw = standard_normal(metadata.get("salt", "") + name, 0, shape)
    kind, offset, gain = next(rule for pattern, *rule in metadata["rules"] if re.search(pattern, name))
    check_switches({"kind": kind}, {"kind": ("fan", "lin", "abs")}, f"meta.json: rule of {name}")
    scale = 1 / math.sqrt(math.prod(shape[1:])) if kind == "fan" else 1.0
    draw = np.abs(draw) if kind == "abs" else draw
    return torch.from_numpy(np.asarray(offset + gain * scale * draw, np.float32))


def build(config: FasterRCNNConfig, tensors: dict[str, Tensor]) -> FasterRCNN:
    """Build the network with these weights. Raises an error naming tensors that do not fit it."""
    with torch.device("meta"):
        network = FasterRCNN(config)
    network.load_state_dict(tensors, strict=True, assign=True)
    network.proposal_generator.cell_anchors = cell_anchors(config)
    return network.eval()


def prepared(network: FasterRCNN, plain: bool) -> FasterRCNN:
    """Return it in the form in which it detects; plain: the one in which it learns."""
    if not plain:
        return network.for_inference("fp32", BOXES_AT_ONCE)
    network.rois_at_a_time = BOXES_AT_ONCE
    return network


# --- files ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def compare_image(network: FasterRCNN, stored: Stored, case: str) -> Iterator[Row]:
    """Yield a row for each array that is stored."""
    ours = Stages(network, stored)
    rules = {name: _SELECTION.fullmatch(name) for name in stored if name.startswith("sel_")}
    for name in [name for name in (*STAGES, *rules) if name in stored]:
        try:
            made, theirs = ours.selected(rules[name]) if name in rules else STAGES[name](ours), stored[name]
            if name.endswith("bbox_deltas") and theirs.size:
                made = made[:, : theirs.shape[1]]  # the format allows the first classes alone
            yield compared(case, name, apart(made, as_tensor(theirs)), bound(theirs))
        except Exception as error:  # noqa: BLE001  one stage must not keep the others from being compared
            yield not_run(case, name, error)
    if "image_bgr" in stored and "proposals" in stored:
        yield compared(case, "pixels to proposals", ours.missing(), MISSING)


def compare_folder(folder: Path, case: str, plain: bool) -> Iterator[Row]:
    """Compare all that lies beside one meta.json; what cannot be compared has a row that says why."""
    try:
        metadata = json.loads((folder / "meta.json").read_text())
        network = prepared(build(read_config(metadata), regenerated(metadata)), plain)
    except Exception as error:  # noqa: BLE001  files may be torn anywhere; one model must not keep the others from running
        yield not_run(case, "meta.json", error)
        return
    for stem in [f"img{image['index']}" for image in metadata["images"]]:
        try:
            stored = read_arrays(folder / f"{stem}.npz", folder / f"{stem}_c4.npz")
            yield from compare_image(network, stored, f"{case}/{stem}")
        except Exception as error:  # noqa: BLE001
            yield not_run(f"{case}/{stem}", "files", error)
