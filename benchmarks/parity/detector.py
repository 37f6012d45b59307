"""Our Faster R-CNN beside figures that detectron2 produced: the same weights and images, the same numbers.

A model is a folder with a meta.json: the network's configuration, the rule that makes each weight, and checksums.
Beside it lie images, img*.npz with img*_c4.npz, and perhaps selection.json with selection.npz. Every stage gets what
detectron2's own stage got, where that is stored in full precision, else what our stage before it made of the same.
Differences are shares of the largest value of theirs.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor

from benchmarks.parity.cases import Row, apart, not_run
from benchmarks.parity.detector_cases import build, prepared, read_config, regenerated
from detectors.detect import to_stored_pixels
from detectors.faster_rcnn import FasterRCNN, HeadOutputs, cell_anchors, grid_anchors
from detectors.preprocess import decode_bgr, resize, resize_scale, to_input
from detectors.select import SelectionSettings, overlapping, select_regions, surviving_confidence

TOLERANCE = 1e-4  # of the largest value of a tensor
HALF_TOLERANCE = 1e-3  # of one that is stored as float16; integers must be equal
# From pixels to proposals without their figures in between, last bits decide which of two boxes of nearly equal
# objectness suppresses the other. This share of their proposals may therefore have none of ours at SAME_BOX.
MISSING = 0.1
SAME_BOX = 0.99  # IoU
DETECTION_SCORE, DETECTION_NMS, DETECTIONS = 0.2, 0.6, 100  # detectron2's inference, for det_*


def compared(case: str, stage: str, difference: float, bound: float, remark: str = "") -> Row:
    return Row(case, stage, {"worst": difference}, {"worst": bound}, remark)


# --- arrays -----------------------------------------------------------------------------------------------------------


class Arrays:
    """The arrays of some npz files, by name; every ValueError names the file and the array."""

    def __init__(self, *files: Path):
        self._files, self._read = {}, {}
        for file in files:
            try:
                with np.load(file, allow_pickle=False) as archive:
                    names = archive.files
            except Exception as error:  # a torn zip raises anything
                raise ValueError(f"{file.name} cannot be read: {type(error).__name__}: {error}") from error
            for name in names:
                if name in self._files:
                    raise ValueError(f"{name} is in {self._files[name].name} and in {file.name}")
                self._files[name] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def where(self, name: str) -> str:
        return f"{self._files[name].name}: {name}"

    def __getitem__(self, name: str) -> np.ndarray:
        """Integers, or finite floating-point numbers."""
        if name not in self._read:
            try:
                with np.load(self._files[name], allow_pickle=False) as archive:
                    array = archive[name]
            except Exception as error:
                raise ValueError(f"{self.where(name)} cannot be read: {type(error).__name__}: {error}") from error
            if array.dtype.kind not in "iuf":
                raise ValueError(f"{self.where(name)} is {array.dtype}, neither integers nor floating-point numbers")
            strange = np.size(array) - np.count_nonzero(np.isfinite(array))
            if strange:
                raise ValueError(f"{self.where(name)} holds {strange} numbers that are NaN or infinite")
            self._read[name] = array
        return self._read[name]

    def tensor(self, name: str) -> Tensor:
        """float32, or int64."""
        array = self[name]
        return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))

    def exact(self, name: str) -> bool:
        """Whether it is here, and in full precision: fit to be fed to the stage that comes next."""
        return name in self and self[name].dtype != np.float16

    def bound(self, name: str) -> float:
        kind = self[name].dtype
        return 0 if kind.kind != "f" else HALF_TOLERANCE if kind == np.float16 else TOLERANCE


@dataclass(frozen=True, eq=False)
class Reordered:
    """Our boxes in their order: what is known metadata them, by name, how many moved, and what that cost."""

    ours: dict[str, Tensor]
    moved: int
    rise: float
    """By how much our scores rise in their order, relative to the largest: boxes may only change places where scores
    are nearly equal, so this counts as a difference."""

    def apart(self, name: str, theirs: Tensor) -> float:
        difference = apart(self.ours[name], theirs)
        return max(difference, self.rise) if theirs.is_floating_point() else difference

    @property
    def remark(self) -> str:
        return f"{self.moved} in another order" if self.moved else ""


def in_their_order(ours: dict[str, Tensor], theirs: dict[str, Tensor], scores: str) -> Reordered:
    """Our boxes as a set: each of theirs, in turn, takes the nearest of ours that is left. Integers must agree."""
    count = len(ours[scores])
    for name, tensor in theirs.items():
        if len(tensor) != count:
            raise ValueError(f"{name}: ours are {count}, theirs {len(tensor)}")
    if not count:
        return Reordered(ours, 0, 0.0)
    distance = torch.zeros(count, count)  # ours, theirs
    for name, tensor in theirs.items():
        apart_by = (ours[name].reshape(count, 1, -1) - tensor.reshape(1, count, -1)).abs().sum(dim=2)
        if tensor.is_floating_point():
            distance += apart_by / tensor.abs().max().clamp(min=1e-12)
        else:
            distance[apart_by > 0] = math.inf
    order, taken = [], torch.zeros(count)
    for row in range(count):
        left = distance[:, row] + taken
        # Its own place first, so that exact equals stay where they are.
        chosen = row if left[row] == left.min() else int(left.argmin())
        if not torch.isfinite(left[chosen]):
            raise ValueError(f"number {row} of theirs has no counterpart among ours")
        order.append(chosen)
        taken[chosen] = math.inf
    places = torch.tensor(order, dtype=torch.int64)
    ordered = {name: tensor[places] for name, tensor in ours.items()}
    rises = ordered[scores].diff().clamp(min=0)
    rise = float(rises.max() / ordered[scores].abs().max()) if rises.any() else 0.0
    return Reordered(ordered, int((places != torch.arange(count)).sum()), rise)


# --- stages -----------------------------------------------------------------------------------------------------------

_OUTPUTS = ("features", "cls_logits", "attr_logits", "bbox_deltas")
_PROPOSALS = ("proposals", "proposal_logits")
_DETECTIONS = {"det_boxes": "boxes", "det_scores": "scores", "det_classes": "classes", "det_keep": "keep"}
# Every array that is compared, in order, with the arrays that its stage is fed with.
_FED = {
    "image_bgr": (),
    "resized_bgr": ("image_bgr",),
    "anchors_count": (),
    "anchors_first": (),
    "anchors_last": (),
    "c4": ("resized_bgr",),
    "rpn_logits": ("c4",),
    "rpn_deltas": ("c4",),
    "proposals": ("rpn_logits", "rpn_deltas"),
    "proposal_logits": ("rpn_logits", "rpn_deltas"),
    "proposals_orig": ("proposals",),
    "prop_features": ("c4", "proposals"),
    "given_features": ("c4", "given_boxes"),
    **{f"{prefix}_{name}": (f"{prefix}_features",) for prefix in ("prop", "given") for name in _OUTPUTS[1:]},
    **{name: ("proposals", "prop_cls_logits", "prop_bbox_deltas") for name in _DETECTIONS},
    "max_conf": ("proposals_orig", "prop_cls_logits"),
    "max_conf_caffe": ("proposals_orig", "prop_cls_logits"),
}
_ONLY_INPUTS = ("given_boxes",)
_SELECTION = re.compile(r"sel_(caffe_(?:origspace_)?)?thr([0-9.]+)(?:_(strict|ge))?_(\d+)_(\d+)")
_END_TO_END = "pixels to proposals"


class Stages:
    """What our network makes of one image, a stage at a time, beside what is stored of theirs."""

    def __init__(self, network: FasterRCNN, stored: Arrays, sizes: dict):
        self.network, self.stored, self.sizes = network, stored, sizes
        self._features, self._outputs = {}, {}

    # What goes into the stages: theirs where it is exact, else ours.

    @cached_property
    def resized(self) -> np.ndarray:
        if "resized_bgr" not in self.stored:
            return self.own_resized
        return self.stored["resized_bgr"]

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of the network's input."""
        return self._size("resized", "resized_bgr", "image_bgr", lambda: self.resized.shape[:2])

    @cached_property
    def original_size(self) -> tuple[int, int]:
        return self._size("orig", "image_bgr", "image_bgr", lambda: self.stored["image_bgr"].shape[:2])

    def _size(self, key: str, array: str, source: str, measured: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        stated = tuple(self.sizes[key]) if key in self.sizes else None
        if array not in self.stored and source not in self.stored:
            if stated is None:
                raise ValueError(f"there is no {array}, and meta.json does not say under images what size it had")
            return stated
        found = tuple(measured())
        if stated is not None and stated != found:
            raise ValueError(f"meta.json says under images that {key} is {stated}, {array} is {found}")
        return found

    @cached_property
    def c4(self) -> Tensor:
        return self._fed("c4", lambda: self.own_c4[0])[None]

    @cached_property
    def logits(self) -> Tensor:
        return self._fed("rpn_logits", lambda: self.own_rpn[0][0])

    @cached_property
    def rpn_deltas(self) -> Tensor:
        return self._fed("rpn_deltas", lambda: self.own_rpn[1][0])

    @cached_property
    def proposals(self) -> Tensor:
        return self._fed("proposals", lambda: self.own_proposals["proposals"])

    @cached_property
    def proposals_orig(self) -> Tensor:
        return self._fed("proposals_orig", lambda: self.own_proposals_orig)

    @cached_property
    def probabilities(self) -> Tensor:
        """[P, C] of the proposals, without the background."""
        return self._fed("prop_cls_logits", lambda: self.own_outputs("prop").class_logits).softmax(dim=1)[:, :-1]

    @cached_property
    def deltas(self) -> Tensor:
        """[P, C, 4] of the proposals."""
        flat = self._fed("prop_bbox_deltas", lambda: self.own_outputs("prop").box_deltas.flatten(1))
        return flat.unflatten(1, (-1, 4))

    def boxes(self, prefix: str) -> Tensor:
        if prefix == "prop":
            return self.proposals
        if "given_boxes" not in self.stored:
            raise ValueError("given_boxes, the boxes that it is of, is missing")
        return self.stored.tensor("given_boxes")

    def _fed(self, name: str, own: Callable[[], Tensor]) -> Tensor:
        return self.stored.tensor(name) if self.feeds(name) else own()

    def feeds(self, name: str) -> bool:
        """Whether theirs goes into the next stage: it is stored, in full precision, with all classes."""
        if not self.stored.exact(name):
            return False
        return name != "prop_bbox_deltas" or self.stored[name].shape[-1] >= 4 * self.network.config.num_classes

    # What our stages put out.

    @cached_property
    def own_decoded(self) -> np.ndarray:
        """The image as a shard would store it, without loss, and decoded as detection does."""
        if "image_bgr" not in self.stored:
            raise ValueError("image_bgr, the pixels to resize, is missing")
        stream = io.BytesIO()
        Image.fromarray(self.stored["image_bgr"][:, :, ::-1]).save(stream, "PNG")
        return decode_bgr(stream.getvalue())

    @cached_property
    def own_resized(self) -> np.ndarray:
        return resize(self.own_decoded, self.network.config)

    @cached_property
    def own_c4(self) -> Tensor:
        if "resized_bgr" not in self.stored and "image_bgr" not in self.stored:
            raise ValueError("resized_bgr and image_bgr, the pixels that it is of, are missing")
        return self.network.backbone(to_input(self.resized))

    @cached_property
    def own_rpn(self) -> tuple[Tensor, Tensor]:
        return self.network.rpn(self.c4)

    @cached_property
    def own_anchors(self) -> Tensor:
        return grid_anchors(cell_anchors(self.network.config), *self.logits.shape[1:])

    @cached_property
    def own_proposals(self) -> dict[str, Tensor]:
        found = self.network.proposals(self.logits[None], self.rpn_deltas[None], *self.size)
        return {name: own for name, (own,) in zip(_PROPOSALS, found, strict=True)}

    @cached_property
    def own_proposals_orig(self) -> Tensor:
        sides, config = self.original_size, self.network.config
        scales = tuple(ours / theirs for ours, theirs in zip(self.size, sides, strict=True))
        if config.resize == "caffe":
            scales = (resize_scale(*sides, config),) * 2
        return to_stored_pixels(self.proposals, scales, sides)

    def own_features(self, prefix: str) -> Tensor:
        if prefix not in self._features:
            self._features[prefix] = self.network.roi_features(self.c4, [self.boxes(prefix)])
        return self._features[prefix]

    def own_outputs(self, prefix: str) -> HeadOutputs:
        if prefix not in self._outputs:
            features = self._fed(f"{prefix}_features", lambda: self.own_features(prefix))
            self._outputs[prefix] = self.network.heads(features)
        return self._outputs[prefix]

    @cached_property
    def own_detections(self) -> dict[str, Tensor]:
        """detectron2's inference: the boxes of every class, moved for it, above a score and after suppression."""
        keep, classes = torch.nonzero(self.probabilities > DETECTION_SCORE, as_tuple=True)
        scores = self.probabilities[keep, classes]
        boxes = self.network.regressed(self.proposals[keep], self.deltas[keep], classes, *self.size)
        best = torchvision.ops.batched_nms(boxes, scores, classes, DETECTION_NMS)[:DETECTIONS]
        return {"boxes": boxes[best], "scores": scores[best], "classes": classes[best], "keep": keep[best]}

    # The comparisons: how far apart, and what there is to say metadata it.

    def compare(self, name: str) -> tuple[float, str]:
        theirs = self.stored.tensor(name)
        remark = self.not_fed(name)
        if name in _PROPOSALS:
            return self._compare_proposals(name, remark)
        if name in _DETECTIONS:
            ours = self._detections_in_their_order
            return ours.apart(_DETECTIONS[name], theirs), _joined(ours.remark, remark)
        if selection := _SELECTION.fullmatch(name):
            return self._compare_selection(selection, theirs)
        if name.startswith("max_conf"):
            overlaps = overlapping(self.proposals_orig.numpy(), SelectionSettings(plus_one=name.endswith("_caffe")))
            return apart(torch.from_numpy(surviving_confidence(overlaps, self.probabilities.numpy())), theirs), remark
        prefix, _, output = name.partition("_")
        if prefix in ("prop", "given") and output in _OUTPUTS[1:]:
            return self._compare_outputs(prefix, output, theirs, remark)
        ours = {
            "image_bgr": lambda: torch.from_numpy(np.array(self.own_decoded)).long(),
            "resized_bgr": lambda: torch.from_numpy(np.array(self.own_resized)),
            "anchors_count": lambda: torch.tensor(len(self.own_anchors)),
            "anchors_first": lambda: self.own_anchors[: len(theirs)],
            "anchors_last": lambda: self.own_anchors[-len(theirs) :],
            "c4": lambda: self.own_c4[0],
            "rpn_logits": lambda: self.own_rpn[0][0],
            "rpn_deltas": lambda: self.own_rpn[1][0],
            "proposals_orig": lambda: self.own_proposals_orig,
            "prop_features": lambda: self.own_features("prop"),
            "given_features": lambda: self.own_features("given"),
        }
        return apart(ours[name](), theirs), remark

    def not_fed(self, name: str) -> str:
        """Which inputs of a stage are ours, because theirs do not feed it."""
        own = [source for source in _FED.get(name, ()) if not self.feeds(source)]
        return f"fed with our {', '.join(own)}" if own else ""

    def _compare_proposals(self, name: str, remark: str) -> tuple[float, str]:
        if remark:  # our own logits: last bits decide, so as from pixels on
            if name == "proposal_logits":
                ours, theirs = self.own_proposals[name].sort().values, self.stored.tensor(name).sort().values
                return apart(ours, theirs), remark
            return self._missing(self.own_proposals["proposals"], remark)
        ours = self._proposals_in_their_order
        return ours.apart(name, self.stored.tensor(name)), ours.remark

    @cached_property
    def _proposals_in_their_order(self) -> Reordered:
        theirs = {name: self.stored.tensor(name) for name in _PROPOSALS if name in self.stored}
        return in_their_order(self.own_proposals, theirs, scores="proposal_logits")

    def _missing(self, ours: Tensor, remark: str) -> tuple[float, str]:
        """The share of their proposals that are not among ours."""
        theirs = self.stored.tensor("proposals")
        if not len(theirs) or not len(ours):
            return (0.0 if len(theirs) == len(ours) else math.inf), f"ours are {len(ours)}, theirs {len(theirs)}"
        found = torchvision.ops.box_iou(theirs, ours).amax(dim=1) > SAME_BOX
        found_remark = f"{int(found.sum())} of {len(theirs)} found at IoU {SAME_BOX}, ours are {len(ours)}"
        return 1 - float(found.float().mean()), _joined(found_remark, remark)

    def end_to_end(self) -> tuple[float, str]:
        """Nothing of theirs is used but the pixels of the image."""
        same = np.array_equal(self.own_resized, self.resized)
        logits, deltas = self.network.rpn(self.own_c4 if same else self.network.backbone(to_input(self.own_resized)))
        (proposals,), _ = self.network.proposals(logits, deltas, *self.own_resized.shape[:2])
        return self._missing(proposals, "")

    def _compare_outputs(self, prefix: str, output: str, theirs: Tensor, remark: str) -> tuple[float, str]:
        outputs = self.own_outputs(prefix)
        if output == "cls_logits":
            return apart(outputs.class_logits, theirs), remark
        if output == "bbox_deltas":
            ours = outputs.box_deltas.flatten(1)
            columns = theirs.shape[-1]
            if 0 < columns < ours.shape[1] and columns % 4 == 0:  # the format allows it to be cut
                remark = _joined(f"first {columns // 4} of {ours.shape[1] // 4} classes", remark)
                ours = ours[:, :columns]
            return apart(ours, theirs), remark
        if outputs.attribute_logits is None:
            raise ValueError("the network of meta.json has no attributes")
        return self._compare_attributes(prefix, outputs, theirs, remark)

    def _compare_attributes(self, prefix: str, outputs: HeadOutputs, theirs: Tensor, remark: str) -> tuple[float, str]:
        """Attributes are those given the most probable class: not compared where two classes are nearly equal.

        Nearly: where the two first ones of theirs are no farther apart than the bound of class logits.
        """
        name, ours = f"{prefix}_cls_logits", outputs.attribute_logits
        if name in self.stored and self.stored[name].shape == outputs.class_logits.shape:
            logits = self.stored.tensor(name)
            first, second = logits.topk(2, dim=1).values.T
            tied = first - second <= self.stored.bound(name) * logits.abs().max()
            tied &= logits.argmax(dim=1) != outputs.class_logits.argmax(dim=1)
            if tied.any() and ours.shape == theirs.shape:
                left_out = f"{int(tied.sum())} of {len(tied)} left out: two classes are nearly equal"
                ours, theirs, remark = ours[~tied], theirs[~tied], _joined(left_out, remark)
        return apart(ours, theirs), remark

    @cached_property
    def _detections_in_their_order(self) -> Reordered:
        theirs = {part: self.stored.tensor(name) for name, part in _DETECTIONS.items() if name in self.stored}
        return in_their_order(self.own_detections, theirs, scores="scores")

    def _compare_selection(self, rule: re.Match, theirs: Tensor) -> tuple[float, str]:
        caffe, threshold, strict, minimum, maximum = rule.groups()
        if not caffe and not strict:
            raise ValueError("the name does not say whether the threshold is `strict` or `ge`")
        settings = SelectionSettings(
            int(minimum), int(maximum), float(threshold), strict=strict == "strict", plus_one=bool(caffe)
        )
        chosen = select_regions(self.proposals_orig.numpy(), self.probabilities.numpy(), settings)
        return same_indices(chosen.indices, theirs.numpy(), chosen.confidence)


def _joined(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))


def same_indices(ours: np.ndarray, theirs: np.ndarray, confidence: np.ndarray) -> tuple[float, str]:
    """0 where they agree index for index, else infinite, and where they do not."""
    if ours.shape != theirs.shape:
        return math.inf, f"ours are {len(ours)} indices, theirs {theirs.shape}"
    wrong = np.flatnonzero(ours != theirs)
    if not len(wrong):
        return 0.0, ""
    first, mine, other = wrong[0], ours[wrong[0]], theirs[wrong[0]]
    known = 0 <= other < len(confidence)
    confidences = f", their confidence is {confidence[mine]:.8g} and {confidence[other]:.8g}" if known else ""
    return math.inf, f"{len(wrong)} of {len(ours)} differ, first {first}: ours is {mine}, theirs {other}{confidences}"


# --- files ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def compare_image(network: FasterRCNN, stored: Arrays, sizes: dict, case: str) -> Iterator[Row | str]:
    """A row for each array that is stored, and a remark for each that is not compared."""
    stages = Stages(network, stored, sizes)
    selections = [name for name in stored if _SELECTION.fullmatch(name)]
    known = [name for name in (*_FED, *selections) if name in stored]
    for name in stored:
        if name not in known and name not in _ONLY_INPUTS:
            yield f"{case}: {stored.where(name)} is unknown here, so it is not compared"
    absent = [name for name in _FED if name not in stored]
    if absent:
        yield f"{case}: {', '.join(absent)}: not stored, so not compared"
    for name in known:
        if name == "resized_bgr" and "image_bgr" not in stored:
            yield f"{case}: {stored.where(name)} is not compared: image_bgr, which it is made of, is missing"
            continue
        try:
            bound = stored.bound(name)
            if name == "proposals" and stages.not_fed(name):
                bound = MISSING
            difference, remark = stages.compare(name)
            yield compared(case, name, difference, bound, remark)
        except Exception as error:  # noqa: BLE001  one stage must not keep the others from being compared
            yield not_run(case, name, error)
    if "image_bgr" in stored and "proposals" in stored:
        try:
            difference, remark = stages.end_to_end()
            yield compared(case, _END_TO_END, difference, MISSING, remark)
        except Exception as error:  # noqa: BLE001
            yield not_run(case, _END_TO_END, error)


def compare_selections(folder: Path, case: str) -> Iterator[Row | str]:
    """A row for each case of selection.json: its selections, index for index, and its confidences."""
    metadata, stored = json.loads((folder / "selection.json").read_text()), Arrays(folder / "selection.npz")
    unknown = sorted(metadata.keys() - {"rule", "iou", "background", "sets", "cases"})
    if unknown:
        raise ValueError(f"selection.json: {', '.join(unknown)} unknown here")
    if "last" not in metadata.get("background", "last"):
        raise ValueError(f"selection.json: background is {metadata['background']!r}, must be the last column")
    rules = [
        SelectionSettings(minimum, maximum, threshold, strict=strict, nms_threshold=metadata["iou"])
        for threshold, minimum, maximum, strict in metadata["sets"]
    ]
    known = set()
    for entry in metadata["cases"]:
        number = entry["case"]
        names = [f"c{number}_boxes", f"c{number}_probs", *(f"c{number}_keep{k}" for k in range(len(rules)))]
        try:
            missing = [name for name in names if name not in stored]
            if missing:
                raise ValueError(f"selection.npz has no {', '.join(missing)}")
            yield _compare_selection_case(stored, entry, rules, f"{case}/selection")
            if f"c{number}_conf" in stored:
                overlaps = overlapping(stored[names[0]], SelectionSettings(nms_threshold=metadata["iou"]))
                ours = surviving_confidence(overlaps, stored[names[1]][:, :-1])
                difference = apart(torch.from_numpy(ours), stored.tensor(f"c{number}_conf"))
                yield compared(f"{case}/selection", f"c{number}_conf", difference, stored.bound(f"c{number}_conf"))
        except Exception as error:  # noqa: BLE001
            yield not_run(f"{case}/selection", f"c{number}", error)
        known |= {*names, f"c{number}_conf"}
    for name in stored:
        if name not in known:
            yield f"{case}: {stored.where(name)} is unknown here, so it is not compared"


def _compare_selection_case(stored: Arrays, entry: dict, rules: list[SelectionSettings], case: str) -> Row:
    number = entry["case"]
    boxes, probs = stored[f"c{number}_boxes"], stored[f"c{number}_probs"]
    stated = entry.get("n", len(boxes)), entry.get("classes", probs.shape[1] - 1)
    if stated != (len(boxes), probs.shape[1] - 1):
        raise ValueError(f"selection.json says {stated} boxes and classes, the arrays are {boxes.shape}, {probs.shape}")
    worst, remarks = 0.0, []
    for index, rule in enumerate(rules):
        chosen = select_regions(boxes, probs[:, :-1], rule)
        difference, remark = same_indices(chosen.indices, stored[f"c{number}_keep{index}"], chosen.confidence)
        worst = max(worst, difference)
        remarks += [f"keep{index}: {remark}"] * bool(remark)
    return compared(case, f"c{number}_keep0..{len(rules) - 1}", worst, 0, "; ".join(remarks))


def compare_folder(folder: Path, case: str, plain: bool) -> Iterator[Row | str]:
    """All that lies beside one meta.json."""
    try:
        metadata = json.loads((folder / "meta.json").read_text())
        config, unstated = read_config(metadata)
        network = prepared(build(config, regenerated(metadata)), plain)
        sizes = {str(image["index"]): image for image in metadata.get("images", [])}
    except Exception as error:  # noqa: BLE001  files may be torn anywhere; one model must not keep the others from running
        yield not_run(case, "meta.json", error)
        return
    if unstated:
        yield f"{case}: meta.json does not say, so it is as in the Visual Genome network: {', '.join(unstated)}"
    maps = {file.stem.removesuffix("_c4"): file for file in folder.glob("img*_c4.npz")}
    images = {file.stem: file for file in folder.glob("img*.npz") if file not in maps.values()}
    for stem in sorted({*images, *maps, *(f"img{index}" for index in sizes)}):
        name, rows = f"{case}/{stem}", 0
        try:
            if stem not in images:
                raise ValueError(
                    f"there is no {stem}.npz, but {'its C4 map' if stem in maps else 'meta.json names it'}"
                )
            stored = Arrays(*(files[stem] for files in (images, maps) if stem in files))
            for row in compare_image(network, stored, sizes.get(stem.removeprefix("img"), {}), name):
                rows += isinstance(row, Row)
                yield row
            if not rows:
                raise ValueError(f"{stem}.npz holds nothing that could be compared")
        except Exception as error:  # noqa: BLE001
            yield not_run(name, "files", error)
    selection = [kind for kind in ("json", "npz") if (folder / f"selection.{kind}").exists()]
    if selection:
        try:
            yield from compare_selections(folder, case)
        except Exception as error:  # noqa: BLE001
            yield not_run(case, "selection", error)
    elif not images:
        yield Row(case, "files", remark="there is no img*.npz and no selection.npz beside meta.json")
    for file in sorted(folder.glob("*.npz")):
        if file.stem not in images and file not in maps.values() and file.stem != "selection":
            yield f"{case}: {file.name} is no img*.npz, so it is not compared"
