"""Our ViLBERT beside figures that the authors' two programs produced: the same weights and inputs, the same numbers.

A case is a pair X.json, X.npz whose json has `param_order_for_grad`, `program` and `layers`; ../shared/parity/vilbert
describes them. States are compared at real words and regions: padding is not computed here.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.parity.cases import Case, Row, apart, not_run, standard_normal, weights
from detectors.resnet import ResNetConfig
from vlbert.config import ModelConfig, RegionConfig
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.data.boxes import box_iou_with_borders
from vlbert.model.heads import Classifier
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.published.vilbert import names
from vlbert.tasks.pretraining import PretrainingHead, PretrainingSettings

KINDS = ("pretrain", "vqa", "refcoco", "retrieval", "vcr", "single_stream")
PROGRAMS = ("paper", "multi_task")
# As their README: states and logits absolute, losses relative, gradients relative to their norm.
BOUNDS = {"states": 1e-5, "logits": 1e-5, "losses": 1e-5, "grad l2": 1e-3, "grad dot": 1e-3}
FLOOR = 1e-6  # of the largest norm: smaller gradients are rounding errors
OVERLAP = 0.4  # IoU with a labelled region from which on multi_task leaves a region out of the divisor of the mean
ANSWERS = {"paper": "weight_norm", "multi_task": "gelu_norm"}  # program -> kind of its classifier of answers


def report(file: Path, name: str) -> Row:
    """How far ours is from theirs, or why that cannot be told."""
    try:
        case = Case.read(file)
        check(case)
        return Row(name, differences=compare(case), bounds=BOUNDS)
    except Exception as error:  # noqa: BLE001  files may be torn anywhere; one case must not keep the others from being read
        return not_run(name, "", error)


def check(case: Case) -> None:
    """ValueError names what the json and the npz do not agree on, and what is unknown here."""
    metadata, arrays = case.metadata, case.arrays
    kind, layers = metadata["kind"], metadata["layers"]
    if kind not in KINDS or metadata["program"] not in PROGRAMS:
        raise ValueError(f"kind {kind} of program {metadata['program']} is unknown here")
    if not layers or set(layers) - set("J" if kind == "single_stream" else "TVX"):
        raise ValueError(f"layers are {layers!r}, which a case of kind {kind} cannot have")
    described = metadata["inputs"] | metadata["outputs"]
    if described.keys() != arrays.keys():
        raise ValueError(f"described or stored alone: {', '.join(sorted(described.keys() ^ arrays.keys()))}")
    for name, array in arrays.items():
        if [*array.shape] != described[name]["shape"] or str(array.dtype) != described[name]["dtype"]:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, the json says {described[name]}")
        if array.dtype.kind == "f" and not np.isfinite(array).all() and not name.startswith("grad/"):
            raise ValueError(f"{name} holds numbers that are NaN or infinite")
    parameters = metadata["param_order_for_grad"]
    missing = sorted(set(parameters) - weights(metadata).keys())
    if missing:
        raise ValueError(f"param_order_for_grad has parameters without a tensor: {', '.join(missing[:3])}")
    for name in ("grad/l2", "grad/sum", "grad/dot"):
        if len(arrays[name]) != len(parameters):
            raise ValueError(f"{name} has {len(arrays[name])} numbers for {len(parameters)} parameters")


# --- the model --------------------------------------------------------------------------------------------------------


def model_config(case: Case) -> ModelConfig:
    """Our configuration of the case's model."""
    theirs, layers = case.metadata["config"], case.metadata["layers"]
    channels = theirs["v_feature_size"]
    regions = RegionConfig(features="precomputed", resnet=ResNetConfig(width=channels // 32), masked_features="zeros")
    two_streams = (
        {}
        if "J" in layers
        else {
            "region_hidden_size": theirs["v_hidden_size"],
            "region_num_heads": theirs["v_num_attention_heads"],
            "region_intermediate_size": theirs["v_intermediate_size"],
            "coattention_size": theirs["bi_hidden_size"],
            "coattention_num_heads": theirs["bi_num_attention_heads"],
            "pooler": "product",
        }
    )
    return ModelConfig(
        layers=layers,
        hidden_size=theirs["hidden_size"],
        num_heads=theirs["num_attention_heads"],
        intermediate_size=theirs["intermediate_size"],
        max_positions=theirs["max_position_embeddings"],
        embedding="separate",
        region_segment="J" in layers,
        whole_image="mean",
        task_token=case.metadata.get("task_id") if theirs.get("task_specific_tokens") else None,
        regions=regions,
        **two_streams,
    )


class Heads(PretrainingHead):
    """Pre-training's heads and those of fine-tuning, all in one, as theirs has them."""

    def __init__(self, config: ModelConfig, case: Case):
        theirs = {tensor["name"]: tensor["shape"] for tensor in case.metadata["tensors"]}
        settings = PretrainingSettings(relationship=True, related_class=0, region_head="transform_norm")
        classes = theirs["cls.imagePredictions.decoder.weight"][0]
        super().__init__(config, settings, case.metadata["config"]["vocab_size"], classes - 1)
        self.choice = Classifier(config, 1, "linear", config.dropout, inputs=self.pooler.size)
        self.region = Classifier(config, 1, "linear", config.dropout, inputs=config.regions_stream.hidden_size)
        kind = ANSWERS[case.metadata["program"]]
        outputs = theirs.get("vil_prediction.main.3.bias") or theirs.get("vil_prediction.logit_fc.3.bias") or [1]
        self.answers = Classifier(config, outputs[0], kind, 0.5, inputs=self.pooler.size)


_HEADS = {
    "vil_logit": "choice.output",
    "vision_logit": "region.output",
    "vil_prediction.logit_fc.0": "answers.first",
    "vil_prediction.logit_fc.2": "answers.norm",
    "vil_prediction.logit_fc.3": "answers.output",
}
_WEIGHT_NORM = {"weight_v": "direction.weight", "weight_g": "gain", "bias": "direction.bias"}


def our_names(case: Case) -> dict[str, str]:
    """Their parameter -> ours; those that no head of ours has are left out."""
    found = names(case.metadata["layers"])
    found |= {
        f"{theirs}.{kind}": f"head.{ours}.{kind}" for theirs, ours in _HEADS.items() for kind in ("weight", "bias")
    }
    for number, part in (("0", "first"), ("3", "output")):
        found |= {
            f"vil_prediction.main.{number}.{theirs}": f"head.answers.{part}.{ours}"
            for theirs, ours in _WEIGHT_NORM.items()
        }
    return found


def load(case: Case) -> nn.ModuleDict:
    """The case's model with its weights; ValueError where a parameter of ours has none."""
    config = model_config(case)
    model = nn.ModuleDict(
        {"vlbert": VLBert(config, case.metadata["config"]["vocab_size"]), "head": Heads(config, case)}
    )
    rename, theirs = our_names(case), weights(case.metadata)
    tensors = {rename[name]: tensor for name, tensor in theirs.items() if name in rename}
    unread = ("head.answers.", "head.region.", "head.choice.")
    missing = [name for name in model.state_dict() if name not in tensors and not name.startswith(unread)]
    if missing:
        raise ValueError(f"the case has no weights for {', '.join(missing[:3])}")
    model.load_state_dict({name: t for name, t in tensors.items() if name in model.state_dict()}, strict=False)
    return model.eval()


# --- the inputs -------------------------------------------------------------------------------------------------------


def make_batch(case: Case, rows: Tensor | None = None) -> Batch:
    """A row for each text of the case, with its image; `rows` [n, 2] are other pairs (text, image)."""
    tokens, mask, segments = (
        case.tensor(f"in/{name}").flatten(0, -2).numpy() for name in ("input_ids", "input_mask", "segment_ids")
    )
    if rows is None:
        images = case.tensor("in/picture_of").flatten() if "in/picture_of" in case.arrays else torch.arange(len(tokens))
        rows = torch.stack([torch.arange(len(tokens)), images], dim=1)
    examples = []
    for text, image in rows.tolist():
        length = int(mask[text].sum())
        zeros = np.zeros(length, np.int64)
        of_text = TextInput(tokens[text][:length], segments[text][:length], zeros)
        examples.append(Example(f"row {len(examples)}", of_text, image_input(case, image)))
    return collate(examples)


def image_input(case: Case, number: int) -> ImageInput:
    """Image `number`; its features are theirs, in which masked regions are zero already."""
    real = case.arrays["in/image_mask"][number].astype(bool)
    boxes = case.arrays["in/boxes"][number][real]
    averaged_over = None
    if case.metadata["program"] == "multi_task" and case.metadata["kind"] == "pretrain":
        labelled = case.arrays["in/image_label"][number][real[1:]] == 1
        regions = torch.from_numpy(boxes[1:])
        overlap = box_iou_with_borders(regions, regions)[torch.from_numpy(labelled)]
        left_out = int((overlap > OVERLAP).any(dim=0).sum())
        averaged_over = case.arrays["in/image_label"].shape[1] - left_out  # of padding rows, too
    masked = np.zeros(len(boxes), bool)
    if "in/region_hidden" in case.arrays:
        masked[1:] = case.arrays["in/region_hidden"][number][real[1:]]
    return ImageInput(
        boxes=boxes,
        masked=masked,
        size=tuple(case.arrays["in/size"][number].tolist()),
        features=case.arrays["in/image_feat"][number][real],
        averaged_over=averaged_over,
    )


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass
class Differences:
    """The largest difference of each kind so far."""

    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))

    def tensors(self, kind: str, ours: Tensor, theirs: Tensor) -> None:
        self.worst[kind] = max(self.worst[kind], apart(ours, theirs, of_scale=False))

    def loss(self, ours: float, theirs: float) -> None:
        difference = abs(ours - theirs) / max(abs(theirs), 1e-12)
        self.worst["losses"] = max(self.worst["losses"], math.inf if math.isnan(difference) else difference)


def compare(case: Case) -> dict[str, float]:
    """The largest difference of states, logits, losses and gradients."""
    model, batch, found = load(case), make_batch(case), Differences()
    vlbert, head = model["vlbert"], model["head"]
    seen: dict[str, Any] = {}
    vlbert.embedding.register_forward_hook(lambda *call: seen.update(embedded=call[2]))
    vlbert.encoder.register_forward_hook(lambda *call: seen.update(encoded=call[2]))
    for number, layer in enumerate(vlbert.encoder.layers):
        layer.register_forward_hook(lambda *call, number=number: seen.update({number: call[2]}))
    encoded = vlbert(batch)
    _compare_states(case, seen, found)
    pooled = head.pooler(encoded.text, encoded.regions)
    losses = LOSSES[case.metadata["kind"]](case, head, vlbert, encoded, batch, pooled, found)
    for name, mine in losses.items():
        found.loss(float(mine.detach()), float(case.arrays[f"out/{name}"]))
    if "loss" not in losses:
        found.loss(float(sum(losses.values()).detach()), float(case.arrays["out/loss"]))
    sum(losses.values()).backward()
    _compare_gradients(case, model, found)
    return found.worst


def _compare_states(case: Case, seen: dict[str, Any], found: Differences) -> None:
    masks = {"text": seen["embedded"].text_mask, "regions": seen["embedded"].region_mask}
    for point in ("embedded", "encoded"):
        for stream, mask in masks.items():
            name = f"inter/{'embeddings' if point == 'embedded' else 'encoder'}.{stream}"
            if name in case.arrays:
                found.tensors("states", getattr(seen[point], stream)[mask], case.tensor(name)[mask])
    counts: dict[str, int] = {}
    for number, letter in enumerate(case.metadata["layers"]):
        count = counts[letter] = counts.get(letter, -1) + 1
        if letter == "X":
            for stream, ours in zip(("text", "regions"), seen[number], strict=True):
                found.tensors("states", ours, case.tensor(f"inter/X{count}.{stream}")[masks[stream]])
            continue
        mask = {"T": masks["text"], "V": masks["regions"], "J": torch.cat([*masks.values()], dim=1)}[letter]
        found.tensors("states", seen[number], case.tensor(f"inter/{letter}{count}")[mask])


def _pretraining(
    case: Case, head: Heads, vlbert: VLBert, encoded: Encoded, batch: Batch, pooled: Tensor, found: Differences
) -> dict[str, Tensor]:
    words, regions, pairs = head.words(vlbert, encoded.text), head.regions(encoded.regions), head.relationship(pooled)
    text, boxes = batch.text_mask, batch.region_mask
    for name, mine, mask in (("prediction_scores_t", words, text), ("prediction_scores_v", regions, boxes)):
        found.tensors("logits", mine[mask], case.tensor(f"out/{name}")[mask])
    found.tensors("logits", pairs, case.tensor("out/seq_relationship_score"))
    labels, right = case.tensor("in/lm_label_ids"), case.tensor("in/is_next")
    labelled, target = case.tensor("in/image_label") == 1, case.tensor("in/image_target")
    if case.metadata["config"]["objective"] == 1:  # wrong pairs are masked, and have no labels
        labels = labels.masked_fill(right[:, None] == 1, -1)
        labelled = labelled & (right[:, None] == 0)
    distribution = target[labelled]
    entropy = -(distribution * distribution.clamp(min=1e-38).log()).sum(1)  # theirs is the KL divergence
    region_losses = F.cross_entropy(regions[:, 1:][labelled], distribution, reduction="none") - entropy
    return {
        "masked_lm_loss": F.cross_entropy(words[labels >= 0], labels[labels >= 0]),
        "masked_img_loss": region_losses.mean(),
        "next_sentence_loss": F.cross_entropy(pairs, right),
    }


def _vqa(
    case: Case, head: Heads, vlbert: VLBert, encoded: Encoded, batch: Batch, pooled: Tensor, found: Differences
) -> dict[str, Tensor]:
    _compare_others(case, head, encoded, batch, pooled, found)
    answers, target = head.answers(pooled), case.tensor("in/target")
    found.tensors("logits", answers, case.tensor("out/vil_prediction"))
    return {"loss": F.binary_cross_entropy_with_logits(answers, target) * target.shape[1]}


def _refcoco(
    case: Case, head: Heads, vlbert: VLBert, encoded: Encoded, batch: Batch, pooled: Tensor, found: Differences
) -> dict[str, Tensor]:
    _compare_others(case, head, encoded, batch, pooled, found)
    logits, target, mask = head.region(encoded.regions)[:, :, 0], case.tensor("in/target")[:, :, 0], batch.region_mask
    selected = logits.masked_fill(~mask, -math.inf).argmax(1)
    if selected.tolist() != case.arrays["out/selected"].tolist():
        raise ValueError(f"the selected regions are {selected.tolist()}, theirs {case.arrays['out/selected'].tolist()}")
    return {"loss": F.binary_cross_entropy_with_logits(logits[mask], target[mask], reduction="sum") / len(batch)}


def _choices(
    case: Case, head: Heads, vlbert: VLBert, encoded: Encoded, batch: Batch, pooled: Tensor, found: Differences
) -> dict[str, Tensor]:
    _compare_others(case, head, encoded, batch, pooled, found)
    logits = head.choice(pooled).view(-1, case.metadata["options"])
    found.tensors("logits", logits, case.tensor("out/choice_logits"))
    if "in/rank_captions" in case.arrays:
        captions = case.tensor("in/rank_captions") @ torch.tensor([case.metadata["options"], 1])
        images = torch.arange(len(case.arrays["in/image_mask"]))
        ranked = make_batch(case, torch.cartesian_prod(captions, images))
        with torch.no_grad():
            states = vlbert(ranked)
            pairs = head.pooler(states.text, states.regions)
            shape = len(captions), len(images)
            found.tensors("logits", head.choice(pairs).view(shape), case.tensor("out/rank_scores"))
            related = head.relationship(pairs).softmax(1)[:, 0].view(shape)
            found.tensors("logits", related, case.tensor("out/zero_shot_scores"))
    return {"loss": F.cross_entropy(logits, case.tensor("in/target"))}


def _single_stream(
    case: Case, head: Heads, vlbert: VLBert, encoded: Encoded, batch: Batch, pooled: Tensor, found: Differences
) -> dict[str, Tensor]:
    words, regions = head.words(vlbert, encoded.text), head.regions(encoded.regions)
    text, boxes = batch.text_mask, batch.region_mask
    for name, mine, mask in (("linguisic_prediction", words, text), ("vision_prediction", regions, boxes)):
        found.tensors("logits", mine[mask], case.tensor(f"out/{name}")[mask])
    return _choices(case, head, vlbert, encoded, batch, pooled, found)


def _compare_others(
    case: Case, head: Heads, encoded: Encoded, batch: Batch, pooled: Tensor, found: Differences
) -> None:
    """The logits of the heads that the case's loss does not read."""
    mask = batch.region_mask
    found.tensors("logits", head.choice(pooled), case.tensor("out/vil_logit"))
    found.tensors("logits", head.region(encoded.regions)[mask], case.tensor("out/vision_logit")[mask])
    if "out/alignment" in case.arrays:
        found.tensors("logits", head.relationship(pooled), case.tensor("out/alignment"))


LOSSES: dict[str, Callable[..., dict[str, Tensor]]] = {
    "pretrain": _pretraining,
    "vqa": _vqa,
    "refcoco": _refcoco,
    "retrieval": _choices,
    "vcr": _choices,
    "single_stream": _single_stream,
}
# Tables of the single stream whose row 0 they declare padding: it gets no gradient where it is read.
_PADDED = ("position_embeddings.weight", "token_type_embeddings.weight")


def _gradients(case: Case, model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """(their name, our gradient) of each parameter."""
    rename, parameters = our_names(case), dict(model.named_parameters())
    for name in case.metadata["param_order_for_grad"]:
        parameter = parameters.get(rename.get(name, ""))
        gradient = None if parameter is None else parameter.grad
        if gradient is not None and case.metadata["kind"] == "single_stream" and name.endswith(_PADDED):
            gradient = gradient.clone()
            gradient[0] = 0
        yield name, gradient


def _compare_gradients(case: Case, model: nn.Module, found: Differences) -> None:
    norms, dots = case.arrays["grad/l2"], case.arrays["grad/dot"]
    floor = FLOOR * np.nanmax(norms)
    for (name, gradient), norm, dot in zip(_gradients(case, model), norms, dots, strict=True):
        if gradient is None or math.isnan(norm):
            if gradient is not None and gradient.any() or not math.isnan(norm) and norm > 0:
                raise ValueError(f"{name} has a gradient with {'us' if gradient is not None else 'them'} alone")
            continue
        direction = torch.from_numpy(standard_normal(name, 1000, tuple(gradient.shape)))
        mine = {"grad l2": float(gradient.double().norm()), "grad dot": float((gradient.double() * direction).sum())}
        if max(mine["grad l2"], norm) <= floor:
            continue  # zero with both, but for rounding
        for kind, theirs in (("grad l2", norm), ("grad dot", dot)):
            difference = abs(mine[kind] - theirs) / max(norm, floor)
            found.worst[kind] = max(found.worst[kind], math.inf if math.isnan(difference) else difference)
