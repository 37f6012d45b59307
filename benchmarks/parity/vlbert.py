"""Our VL-BERT beside figures that the authors' code produced: the same weights and inputs, the same numbers.

A case is a pair X.json, X.npz whose json has `param_order_for_grad`: a configuration of theirs, the rule that makes
each weight, inputs, outputs, intermediates, losses and gradients. Theirs are of float32; in bf16, ours are what a run
in that precision computes.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.parity.cases import Row, apart, not_run, standard_normal, weights
from benchmarks.parity.vlbert_cases import (
    BATCHES,
    VLBertCase,
    describe,
    frozen_stages,
    heads_switched_off,
    vocabulary,
)
from detectors.resnet import freeze_module
from vlbert.checkpoint import load_model
from vlbert.data.batch import Batch
from vlbert.model.fast_rcnn import FastRCNN
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.published.convert import convert
from vlbert.published.vlbert import PublishedVLBert
from vlbert.tasks import make_task
from vlbert.tasks.base import Task
from vlbert.tasks.pretraining import Pretraining
from vlbert.tasks.refcoco import RefCOCO


@dataclass(frozen=True)
class Tolerance:
    """How far ours may be from theirs."""

    tensors: float  # logits and encoder states ...
    of_scale: bool  # ... as a share of the largest number of theirs, or absolute
    losses: float  # relative
    norms: float  # of gradients, relative; and their projections on random directions, relative to the norm
    projections: float
    # Gradients below this share of the largest norm of a case count by it. Where both norms lie below it, both are the
    # rounding errors of a gradient that is zero (a key's bias shifts all scores of a query alike): no two programs
    # round alike, and an exact zero would be as far from theirs. Their names are printed.
    floor: float

    @property
    def bounds(self) -> dict[str, float]:
        tensors = dict.fromkeys(("logits", "enc. in", "enc. out"), self.tensors)
        return tensors | {"losses": self.losses, "grad l2": self.norms, "grad dot": self.projections}


# bfloat16 keeps 8 bits: two neighbours are 2^-8 apart, relatively. All that goes into a product is rounded to them, and
# some ten products with norms between stand one behind the other in these small models. Such errors are random and add
# up as roots do: 8 units for what comes out of all, 2 for losses, which are means. A gradient passes through as many
# again: it turns by up to 16 units, which hardly changes its norm, and moves its projection on the worst of a hundred
# directions by three times that. Measured: 5.2, 1.2, 5 and 31 units at most. The mildest wrong rule that was tried,
# scores of attention multiplied by 1.1, moves logits by 14 units; GELU by tanh moves them by less than rounding does.
_BF16 = 2**-8
TOLERANCES = {
    "fp32": Tolerance(1e-5, of_scale=False, losses=1e-5, norms=1e-3, projections=1e-3, floor=1e-6),
    "bf16": Tolerance(8 * _BF16, of_scale=True, losses=2 * _BF16, norms=8 * _BF16, projections=48 * _BF16, floor=_BF16),
}


_ROUNDED = 2**-15  # two units of the last place of a colour, 128 to 255, in float32


@dataclass(frozen=True, eq=False)
class Ours:
    """The case's model as ours, and what it made of the case's inputs."""

    precision: str
    task: Task
    vlbert: VLBert
    head: nn.Module
    batch: Batch
    embedded: Tensor
    encoded: Tensor
    output: Encoded
    losses: dict[str, float]
    counts: dict[str, int]  # how many values each loss is the mean of
    rename: Callable[[str], str | None]


@contextmanager
def _convolving_as_they_did() -> Iterator[None]:
    """More than one thread, as theirs; and `run` takes their layout in memory, channels first.

    With either another, convolutions add in another order, and what is zero to the last bit before a ReLU is not any
    more: that moves the gradient of single convolutions by 2e-3, and nothing else.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _computing_in(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


@_convolving_as_they_did()
def run(case: VLBertCase, precision: str = "fp32") -> Ours:
    """Build our model, give it their weights and inputs, compute the losses and their gradients."""
    theirs = weights(case.metadata)
    what = describe(case, {PublishedVLBert.plain_name(name): tuple(tensor.shape) for name, tensor in theirs.items()})
    theirs |= heads_switched_off(case, what, theirs)
    task = make_task(what.task, vocabulary(what.vocab_size), num_classes=1600)
    vlbert, head = VLBert(what.model, what.vocab_size).eval(), what.head().eval()
    tensors, _ = convert(theirs, what, case.name)
    model = nn.ModuleDict({"vlbert": vlbert, "head": head})
    counters = {name: t for name, t in model.state_dict().items() if name.endswith("num_batches_tracked")}
    load_model(model, tensors | counters, case.name)
    batch = BATCHES[type(task)](case, task)
    if vlbert.fast_rcnn is not None:
        _freeze(vlbert.fast_rcnn, frozen_stages(case))
        vlbert.fast_rcnn.to(memory_format=torch.contiguous_format)
        own_input, theirs = vlbert.fast_rcnn.network_input, case.tensor("in/image")
        in_order = theirs[batch.image_rows // (len(batch) // len(batch.keys))]  # ours stand group by group
        vlbert.fast_rcnn.network_input = lambda batch: [_up_to_rounding(*own_input(batch), in_order)]
    seen = {}
    vlbert.embedding.register_forward_hook(lambda *call: seen.update(embedded=call[2].joined()[0]))
    vlbert.encoder.register_forward_hook(lambda *call: seen.update(encoded=call[2].joined()[0]))
    with _computing_in(precision):
        output = vlbert(batch)
        totals = _totals(case, task, lambda task: task.losses(vlbert, head, output, batch))
    losses = {name: total / max(1, count) for name, (total, count) in totals.items()}
    sum(losses.values()).backward()
    losses = {name: float(loss.detach()) for name, loss in losses.items()}
    counts = {name: count for name, (_, count) in totals.items()}
    embedded, encoded = seen["embedded"], seen["encoded"]
    return Ours(precision, task, vlbert, head, batch, embedded, encoded, output, losses, counts, what.ours())


def _up_to_rounding(ours: Tensor, theirs: Tensor) -> Tensor:
    """Ours, but theirs where the last bits alone differ: adding their mean to what they brought has rounded those."""
    return torch.where((ours - theirs).abs() <= _ROUNDED, theirs, ours).contiguous()


def _freeze(network: FastRCNN, stages: list[int]) -> None:
    """Theirs may freeze any stages, RegionConfig.frozen_stages only the first so many."""
    backbone = network.backbone
    for stage in stages:
        freeze_module((backbone.stem, backbone.res2, backbone.res3, backbone.res4, network.res5)[stage - 1])


def _totals(case: VLBertCase, task: Task, losses: Callable[[Task], dict]) -> dict[str, tuple[Tensor, int]]:
    """Our losses as sum and count; in pre-training those that are on, each a mean over what its own switch says."""
    if not isinstance(task, Pretraining):
        return {name: (total, count) for name, (total, count) in losses(task).items() if total.requires_grad}
    totals = {}
    for family, names in {"MLM": ("words", "text_words"), "MVRC": ("regions",), "REL": ("relationship",)}.items():
        if case.network[f"WITH_{family}_LOSS"]:
            over = "rows" if case.network.get(f"{family}_LOSS_NORM_IN_BATCH_FIRST") else "labels"
            found = losses(type(task)(dataclasses.replace(task.settings, losses_over=over), task.vocabulary, 1600))
            totals |= {name: found[name] for name in names}
    if not totals:
        raise ValueError("config.NETWORK.WITH_*_LOSS are all off: there is nothing to learn, and no gradient")
    return totals


def compare(case: VLBertCase, ours: Ours) -> tuple[dict[str, float], tuple[str, ...]]:
    """How far ours is from theirs, by what `Tolerance.bounds` names; and the parameters, in their words, whose gradient
    is rounding errors with both. NaN is infinitely far."""
    norm, projection, zeros = gradient_differences(case, ours)
    with _computing_in(ours.precision):
        pairs = logits(case, ours)
    of_scale = TOLERANCES[ours.precision].of_scale
    return {
        "logits": max(apart(*pair, of_scale) for pair in pairs),
        "enc. in": _rows_apart(ours, ours.embedded, case.tensor("inter/encoder.input")),
        "enc. out": _rows_apart(ours, ours.encoded, case.tensor("inter/encoder.output")),
        "losses": max(_relative(mine, theirs) for mine, theirs in losses(case, ours)),
        "grad l2": norm,
        "grad dot": projection,
    }, zeros


def _relative(mine: float, theirs: float) -> float:
    if math.isnan(theirs) or math.isnan(mine):
        return math.inf
    return abs(mine - theirs) / max(abs(theirs), 1e-12)


def _rows_apart(ours: Ours, mine: Tensor, theirs: Tensor) -> float:
    """Over real elements: theirs stand packed at the front of a row, ours have padding behind text and regions."""
    batch = ours.batch
    end = torch.ones(len(batch), 1, dtype=torch.bool)
    mask = torch.cat([batch.text_mask, batch.region_mask, end], dim=1)
    packed = torch.cat([theirs[row][: int(mask[row].sum())] for row in range(len(batch))])
    return apart(mine[mask], packed, TOLERANCES[ours.precision].of_scale)


def logits(case: VLBertCase, ours: Ours) -> list[tuple[Tensor, Tensor]]:
    """(ours, theirs) of every logit at real words and regions."""
    task, head, batch, output = ours.task, ours.head, ours.batch, ours.output
    if isinstance(task, Pretraining):
        captions = batch.image_of >= 0
        parts = []  # array of theirs, ours, which are real, which rows
        if case.network["WITH_MLM_LOSS"]:
            words = head.words(ours.vlbert, output.text)
            rows = {"mlm_logits": captions}
            if "in/aux_text" in case.arrays:
                rows = {"mlm_logits_wvc": captions, "mlm_logits_aux": ~captions}
            parts += [(name, words, batch.text_mask, which) for name, which in rows.items()]
        if case.network["WITH_MVRC_LOSS"]:
            parts.append(("mvrc_logits", head.regions(output.regions), batch.region_mask, captions))
        pairs = []
        for name, mine, real, rows in parts:
            mask = real[rows]
            pairs.append((mine[rows][mask], _wide(case.tensor(f"out/{name}"), mask.shape[1])[mask]))
        if "out/relationship_logits" in case.arrays:
            pairs.append((head.related(output, captions.nonzero()[:, 0]), case.tensor("out/relationship_logits")))
        return pairs
    names = [name for name in ("out/label_logits", "infer/label_logits") if name in case.arrays]
    if isinstance(task, RefCOCO):
        mask = batch.region_mask
        mine = head(output.regions[mask])[:, 0]
        return [(mine, _wide(case.tensor(name), mask.shape[1])[mask]) for name in names]
    return [(task.logits(head, output, batch), case.tensor(name)) for name in names]


def _wide(theirs: Tensor, width: int) -> Tensor:
    """theirs [N, W, ...] with `width` columns: theirs may be padded further, or less, than ours."""
    if theirs.shape[1] >= width:
        return theirs[:, :width]
    return torch.cat([theirs, theirs.new_full((len(theirs), width - theirs.shape[1], *theirs.shape[2:]), math.nan)], 1)


# Their losses -> ours; those of theirs that a case switches off are 0, as ours are.
_LOSSES = {
    "mlm_loss": "words",
    "mlm_loss_wvc": "words",
    "mlm_loss_aux": "text_words",
    "mvrc_loss": "regions",
    "relationship_loss": "relationship",
    "ans_loss": "answers",
    "cnn_regularization_loss": "regions",
    "cls_loss": "regions",
}


def losses(case: VLBertCase, ours: Ours) -> list[tuple[float, float]]:
    """(ours, theirs) of each loss and of their sum.

    Their mean over no words is NaN, and so is their sum; its gradient is zero. Ours is 0 there, which counts as equal.
    """
    total, pairs, no_labels = float(case.arrays["out/loss"]), [], False
    for name, mine in _LOSSES.items():
        if f"out/{name}" in case.arrays:
            theirs = float(case.arrays[f"out/{name}"].reshape(()))
            if math.isnan(theirs) and ours.counts.get(mine) == 0:
                theirs, no_labels = 0.0, True
            pairs.append((ours.losses.get(mine, 0.0), theirs))
    if math.isnan(total) and no_labels:
        total = sum(theirs for _, theirs in pairs)
    return [*pairs, (sum(ours.losses.values()), total)]


def gradient_differences(case: VLBertCase, ours: Ours) -> tuple[float, float, tuple[str, ...]]:
    """The worst relative difference of a gradient's norm, of its projection on a random direction, and the zeros."""
    parameters = {
        f"{part}.{name}": parameter
        for part, module in (("vlbert", ours.vlbert), ("head", ours.head))
        for name, parameter in module.named_parameters()
    }
    norms, dots = case.arrays["grad/l2"], case.arrays["grad/dot"]
    floor = TOLERANCES[ours.precision].floor * np.nanmax(norms)
    worst, zeros = [0.0, 0.0], []
    for name, norm, dot in zip(case.metadata["param_order_for_grad"], norms, dots, strict=True):
        parameter = parameters.get(ours.rename(PublishedVLBert.plain_name(name)) or "")
        gradient = None if parameter is None else parameter.grad
        if math.isnan(norm) or gradient is None:
            if not (math.isnan(norm) and gradient is None):
                raise ValueError(f"{name} has a gradient with {'us' if gradient is not None else 'them'} alone")
            continue
        direction = standard_normal(name, 1000, tuple(gradient.shape))
        gradient = gradient.double()
        mine = float(gradient.norm()), float((gradient * torch.from_numpy(direction)).sum())
        if max(mine[0], norm) <= floor:
            zeros.append(name)
            continue
        for which, (found, theirs) in enumerate(zip(mine, (norm, dot), strict=True)):
            difference = abs(found - theirs) / max(norm, floor)
            worst[which] = max(worst[which], math.inf if math.isnan(difference) else difference)
    return worst[0], worst[1], tuple(zeros)


def predictions(case: VLBertCase, ours: Ours) -> str:
    """RefCOCO+: whether the boxes that we predict are theirs, but where theirs was padding."""
    if "infer/pred_boxes" not in case.arrays:
        return ""
    rows = ours.task.predictions(ours.vlbert, ours.head, ours.output, ours.batch)
    ratios = case.tensor("in/im_info")[:, [2, 3, 2, 3]]
    chosen = torch.tensor([row["region"] + 1 for row in rows])
    mine = ours.batch.boxes[torch.arange(len(rows)), chosen] / ratios
    theirs = case.tensor("infer/pred_boxes")
    padding = (theirs < 0).all(dim=1)
    if not torch.allclose(mine[~padding], theirs[~padding]):
        raise ValueError("predicted boxes differ")
    return f"boxes {int((~padding).sum())} equal, {int(padding.sum())} where theirs is padding"


def report(file: Path, name: str, precision: str = "fp32") -> Row:
    """The case beside ours."""
    try:
        case = VLBertCase.read(file)
        ours = run(case, precision)
        (differences, zeros), boxes = compare(case, ours), predictions(case, ours)
    except Exception as error:  # noqa: BLE001  files may be torn anywhere; one case must not keep the others from running
        return not_run(name, "", error)
    remark = "  ".join(filter(None, (boxes, _named(zeros))))
    return Row(name, "", differences, TOLERANCES[precision].bounds, remark)


def _named(zeros: tuple[str, ...]) -> str:
    """What has zero gradients, by the ends of the names, and how often."""
    ends = Counter(".".join(name.split(".")[-3:]) for name in zeros)
    return f"zero: {', '.join(f'{count} {end}' for end, count in ends.items())}" if ends else ""


def summary(precision: str) -> str:
    """Within what a case must be."""
    within = TOLERANCES[precision]
    scale = " of its scale" if within.of_scale else ""
    return (
        f"{precision} (a number within {within.tensors:.2g}{scale}, a loss {within.losses:.2g}, a gradient's norm "
        f"{within.norms:.2g} and projection {within.projections:.2g})"
    )
