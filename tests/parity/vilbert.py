"""Our ViLBERT beside figures that the authors' two programs produced: the same weights and inputs, the same numbers.

A case is a pair X.json, X.npz whose json has `param_order_for_grad`, `program` and `layers`; ../shared/parity/vilbert
describes them. The weights come to our model as those of a released file do (vlbert/published). States are compared at
real words and regions: padding is not computed here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.cases import Case, Row, apart, check_switches, gradients_apart, not_run, relative, weights
from vlbert.checkpoint import load_model
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.data.boxes import box_iou_with_borders
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.published.checkpoints import Hints
from vlbert.published.convert import convert
from vlbert.published.vilbert import PublishedViLBert

# As their README: states and logits absolute, losses relative, gradients relative to their norm.
BOUNDS = {"states": 1e-5, "logits": 1e-5, "losses": 1e-5, "grad l2": 1e-3, "grad dot": 1e-3}
FLOOR = 1e-6  # of the largest norm: smaller gradients are rounding errors
OVERLAP = 0.4  # IoU with a labelled region from which on multi_task leaves a region out of the divisor of the mean
# Kind of a case -> the tasks whose heads it has; the loss is that of the first.
TASKS = {
    "pretrain": ("pretraining",),
    "vqa": ("vqa", "retrieval", "refcoco", "pretraining"),
    "refcoco": ("refcoco", "retrieval", "pretraining"),
    "retrieval": ("retrieval", "refcoco", "pretraining"),
    "vcr": ("vcr", "refcoco", "pretraining"),
    "single_stream": ("retrieval", "refcoco", "pretraining"),
}


def report(file: Path, name: str) -> Row:
    """Return how far ours is from theirs, or why that cannot be told."""
    try:
        case = Case.read(file)
        return Row(name, differences=compare(case), bounds=BOUNDS)
    except Exception as error:  # noqa: BLE001  files may be torn anywhere; one case must not keep the others from being read
        return not_run(name, "", error)


def load(case: Case, task: str) -> tuple[PublishedViLBert, VLBert, nn.Module]:
    """Return what the case's model with the head of this task is, the model and the head."""
    theirs, config = weights(case.metadata), case.metadata["config"]
    heads = [config["num_attention_heads"]]
    if "J" not in case.metadata["layers"]:
        heads += [config["v_num_attention_heads"], config["bi_num_attention_heads"]]
    token = case.metadata.get("task_id") if config.get("task_specific_tokens") else None
    fusion = "sum" if config.get("fusion_method") == "sum" and len(heads) > 1 else "mul"
    hints = Hints(tuple(heads), None if case.metadata["kind"] == "pretrain" else task, token, fusion)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    what = PublishedViLBert.from_shapes(shapes, hints)
    layers = case.metadata["layers"]
    if [sorted(part) for part in layers.split("X")] != [sorted(part) for part in what.model.layers.split("X")]:
        raise ValueError(f"layers are {layers}, and published models with these tensors have {what.model.layers}")
    check_switches(config, switches(what))
    tensors, _ = convert(theirs, what, case.name)
    model = nn.ModuleDict({"vlbert": VLBert(what.model, what.vocab_size), "head": what.head()}).eval()
    load_model(model, tensors, case.name)
    return what, model["vlbert"], model["head"]


def switches(what: PublishedViLBert) -> dict:
    """Return the switches of a configuration of theirs under which this model computes what theirs does."""
    model, regions, coattention = what.model, what.model.regions_stream, what.model.coattention
    text, pairs = model.layers.count("T") + model.layers.count("J"), model.layers.count("X")
    unread = (
        "hidden_dropout_prob attention_probs_dropout_prob v_hidden_dropout_prob v_attention_probs_dropout_prob "
        "initializer_range v_initializer_range bi_intermediate_size bi_attention_type pooling_method num_negative"
    )
    off = ("fixed_t_layer", "fixed_v_layer", "in_batch_pairs", "fast_mode", "dynamic_attention", "visualization")
    return {
        "vocab_size": (what.vocab_size,),
        "hidden_size": (model.hidden_size,),
        "num_hidden_layers": (text,),
        "num_attention_heads": (model.num_heads,),
        "intermediate_size": (model.intermediate_size,),
        "max_position_embeddings": (model.max_positions,),
        "type_vocab_size": (2,),
        "hidden_act": ("gelu",),
        "v_feature_size": (model.regions.channels,),
        "v_target_size": (what.num_classes + 1,),
        "v_hidden_size": (regions.hidden_size,),
        "v_num_hidden_layers": (pairs,),
        "v_num_attention_heads": (regions.num_heads,),
        "v_intermediate_size": (regions.intermediate_size,),
        "v_hidden_act": ("gelu",),
        "bi_hidden_size": (coattention.hidden_size,),
        "bi_num_attention_heads": (coattention.num_heads,),
        "v_biattention_id": ([*range(pairs)],),
        "t_biattention_id": ([*range(text - pairs, text)],),
        "fusion_method": ("sum",) if model.pooler == "sum" else ("mul",),
        "objective": (0, 1),
        "visual_target": (0,),
        "task_specific_tokens": (model.task_token is not None,),
        "model": ("bert",),
        "with_coattention": (True,),
        **dict.fromkeys(off, (False,)),
        **dict.fromkeys(unread.split(), ...),  # of training, or read by nothing of theirs
    }


# --- the inputs -------------------------------------------------------------------------------------------------------


def make_batch(case: Case, rows: Tensor | None = None) -> Batch:
    """Make a row for each text of the case, with its image; `rows` [n, 2] are other pairs (text, image)."""
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
    """Return image `number`; its features are theirs, in which masked regions are zero already."""
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
class Ours:
    """What our model makes of a case, and how far that is from theirs so far, by kind (BOUNDS)."""

    case: Case
    vlbert: VLBert
    heads: dict[str, nn.Module]  # by task
    batch: Batch
    encoded: Encoded
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))

    def compare(self, kind: str, ours: Tensor, name: str, mask: Tensor | None = None) -> None:
        """Compare with the array of this name, of which the mask chooses what is real, if the case has it."""
        if name in self.case.arrays:
            theirs = self.case.tensor(name)
            theirs = theirs if mask is None else theirs[mask]
            self.worst[kind] = max(self.worst[kind], apart(ours, theirs, of_scale=False))

    def choices(self, encoded: Encoded) -> Tensor:
        """[B, 1]: how well each text and image fit, by the head of VCR's choices or of retrieval."""
        if "vcr" in self.heads:
            return self.heads["vcr"].scores(encoded.text, encoded.regions)
        return self.heads["retrieval"](encoded)[:, None]

    def related(self, encoded: Encoded) -> Tensor:
        """[B, 2]: whether each text and image belong together, by the head of pre-training."""
        head = self.heads["pretraining"]
        return head.relationship(head.pooler(encoded.text, encoded.regions))


def compare(case: Case) -> dict[str, float]:
    """Return the largest difference of states, logits, losses and gradients."""
    of_case = {key: case.metadata[key] for key in ("kind", "program")}
    check_switches(of_case, {"kind": tuple(TASKS), "program": ("paper", "multi_task")}, case.name)
    tasks = TASKS[case.metadata["kind"]]
    loaded = {task: load(case, task) for task in tasks}
    what, vlbert, head = loaded[tasks[0]]
    seen: dict = {"layers": []}
    vlbert.embedding.register_forward_hook(lambda *call: seen.update(embeddings=call[2]))
    vlbert.encoder.register_forward_hook(lambda *call: seen.update(encoder=call[2]))
    for layer in vlbert.encoder.layers:
        layer.register_forward_hook(lambda *call: seen["layers"].append(call[2]))
    batch = make_batch(case)
    encoded = vlbert(batch)
    ours = Ours(case, vlbert, {task: head for task, (_, _, head) in loaded.items()}, batch, encoded)
    _compare_states(ours, what.model.layers, seen)
    losses = LOSSES[tasks[0]](ours)
    for name, loss in {"loss": sum(losses.values()), **losses}.items():
        difference = relative(float(loss.detach()), float(case.arrays[f"out/{name}"]))
        ours.worst["losses"] = max(ours.worst["losses"], difference)
    sum(losses.values()).backward()
    model = nn.ModuleDict({"vlbert": vlbert, "head": head})
    norm, dot = gradients_apart(case, _gradients(case, what, model), FLOOR)
    return ours.worst | {"grad l2": norm, "grad dot": dot}


def _compare_states(ours: Ours, layers: str, seen: dict) -> None:
    """Compare states. T and V may stand in another order in `layers` than with them: neither reads the other."""
    masks = {"text": seen["embeddings"].text_mask, "regions": seen["embeddings"].region_mask}
    for point in ("embeddings", "encoder"):
        for stream, mask in masks.items():
            ours.compare("states", getattr(seen[point], stream)[mask], f"inter/{point}.{stream}", mask)
    of_letter = {"T": masks["text"], "V": masks["regions"], "J": torch.cat([*masks.values()], dim=1)}
    for number, (letter, states) in enumerate(zip(layers, seen["layers"], strict=True)):
        name = f"inter/{letter}{layers[:number].count(letter)}"
        if letter == "X":
            for (stream, mask), of_stream in zip(masks.items(), states, strict=True):
                ours.compare("states", of_stream, f"{name}.{stream}", mask)
        else:
            ours.compare("states", states, name, of_letter[letter])


def _gradients(case: Case, what: PublishedViLBert, model: nn.Module) -> dict[str, Tensor | None]:
    """Return our gradient by their name for each parameter."""
    parameters = dict(model.named_parameters())
    ours = {entry["theirs"]: entry["ours"] for entry in what.entries() if "ours" in entry}
    found = {}
    for name in case.metadata["param_order_for_grad"]:
        gradient = parameters[ours[name]].grad if name in ours else None
        if gradient is not None and case.metadata["kind"] == "single_stream" and name.endswith(_PADDED):
            gradient = gradient.clone()
            gradient[0] = 0
        found[name] = gradient
    return found


# Tables of the single stream whose row 0 they declare padding: it gets no gradient where it is read.
_PADDED = ("position_embeddings.weight", "token_type_embeddings.weight")


# --- the losses -------------------------------------------------------------------------------------------------------


def _pretraining(ours: Ours) -> dict[str, Tensor]:
    case, words, regions, pairs = ours.case, *_compare_pretraining(ours)
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


def _compare_pretraining(ours: Ours) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the logits of words, regions and pairs, under any name that a case gives them, and return them."""
    head, encoded, text, boxes = ours.heads["pretraining"], ours.encoded, ours.batch.text_mask, ours.batch.region_mask
    words, regions, pairs = head.words(ours.vlbert, encoded.text), head.regions(encoded.regions), ours.related(encoded)
    for name in ("prediction_scores_t", "linguisic_prediction"):
        ours.compare("logits", words[text], f"out/{name}", text)
    for name in ("prediction_scores_v", "vision_prediction"):
        ours.compare("logits", regions[boxes], f"out/{name}", boxes)
    for name in ("seq_relationship_score", "alignment"):
        ours.compare("logits", pairs, f"out/{name}")
    return words, regions, pairs


def _compare_all_heads(ours: Ours) -> tuple[Tensor, Tensor]:
    """Compare the logits of the heads of a fine-tuned case, and return those of choices and of regions."""
    _compare_pretraining(ours)
    mask, choices = ours.batch.region_mask, ours.choices(ours.encoded)
    regions = ours.heads["refcoco"](ours.encoded.regions)
    ours.compare("logits", choices, "out/vil_logit")
    ours.compare("logits", regions[mask], "out/vision_logit", mask)
    return choices, regions[:, :, 0]


def _vqa(ours: Ours) -> dict[str, Tensor]:
    _compare_all_heads(ours)
    answers, target = ours.heads["vqa"](ours.encoded.text, ours.encoded.regions), ours.case.tensor("in/target")
    ours.compare("logits", answers, "out/vil_prediction")
    return {"loss": F.binary_cross_entropy_with_logits(answers, target) * target.shape[1]}


def _refcoco(ours: Ours) -> dict[str, Tensor]:
    _, logits = _compare_all_heads(ours)
    mask, target = ours.batch.region_mask, ours.case.tensor("in/target")[:, :, 0]
    selected, theirs = logits.masked_fill(~mask, -math.inf).argmax(1).tolist(), ours.case.arrays["out/selected"]
    if selected != theirs.tolist():
        raise ValueError(f"the selected regions are {selected}, theirs {theirs.tolist()}")
    total = F.binary_cross_entropy_with_logits(logits[mask], target[mask], reduction="sum")
    return {"loss": total / len(ours.batch)}


def _choices(ours: Ours) -> dict[str, Tensor]:
    choices, _ = _compare_all_heads(ours)
    options = ours.case.metadata["options"]
    logits = choices.view(-1, options)
    ours.compare("logits", logits, "out/choice_logits")
    if "in/rank_captions" in ours.case.arrays:
        _rank(ours, ours.case.tensor("in/rank_captions") @ torch.tensor([options, 1]))
    return {"loss": F.cross_entropy(logits, ours.case.tensor("in/target"))}


@torch.no_grad()
def _rank(ours: Ours, captions: Tensor) -> None:
    """Compare the scores of every pair of these texts and all images."""
    images = torch.arange(len(ours.case.arrays["in/image_mask"]))
    encoded, shape = ours.vlbert(make_batch(ours.case, torch.cartesian_prod(captions, images))), (len(captions), -1)
    ours.compare("logits", ours.choices(encoded).view(shape), "out/rank_scores")
    ours.compare("logits", ours.related(encoded).softmax(1)[:, 0].view(shape), "out/zero_shot_scores")


LOSSES: dict[str, Callable[[Ours], dict[str, Tensor]]] = {
    "pretraining": _pretraining,
    "vqa": _vqa,
    "refcoco": _refcoco,
    "retrieval": _choices,
    "vcr": _choices,
}
