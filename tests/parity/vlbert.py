"""Our VL-BERT beside figures that the authors' code produced: the same weights and inputs, the same numbers.

A case is a pair X.json, X.npz whose json has `param_order_for_grad`: a configuration of theirs, the rule that makes
each weight, inputs, outputs, intermediates, losses and gradients. Theirs are of float32; in bf16, ours are what a run
in that precision computes.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.parity.cases import Row, apart, gradients_apart, not_run, relative, weights
from tests.parity.vlbert_cases import BATCHES, VLBertCase, describe, vocabulary
from vlbert.checkpoint import load_model
from vlbert.data.batch import Batch
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
    floor: float  # see gradients_apart

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
    names: dict[str, str]  # their plain name of a tensor -> ours


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
    task = make_task(what.task, vocabulary(what.vocab_size), num_classes=1600)
    vlbert, head = VLBert(what.model, what.vocab_size).eval(), what.head().eval()
    tensors, _ = convert(theirs, what, case.name)
    model = nn.ModuleDict({"vlbert": vlbert, "head": head})
    counters = {name: t for name, t in model.state_dict().items() if name.endswith("num_batches_tracked")}
    load_model(model, tensors | counters, case.name)
    batch = BATCHES[type(task)](case, task)
    if vlbert.fast_rcnn is not None:
        vlbert.fast_rcnn.to(memory_format=torch.contiguous_format)
        own_input, image = vlbert.fast_rcnn.network_input, case.tensor("in/image")
        in_order = image[batch.image_rows // (len(batch) // len(batch.keys))]  # ours stand group by group
        vlbert.fast_rcnn.network_input = lambda batch: [_up_to_rounding(*own_input(batch), in_order)]
    seen = {}
    vlbert.embedding.register_forward_hook(lambda *call: seen.update(embedded=call[2].joined()[0]))
    vlbert.encoder.register_forward_hook(lambda *call: seen.update(encoded=call[2].joined()[0]))
    with _computing_in(precision):
        output = vlbert(batch)
        losses = _losses(case, task, lambda task: task.losses(vlbert, head, output, batch))
    sum(losses.values()).backward()
    losses = {name: float(loss.detach()) for name, loss in losses.items()}
    embedded, encoded = seen["embedded"], seen["encoded"]
    names = {entry["theirs"]: entry["ours"] for entry in what.entries() if "ours" in entry}
    return Ours(precision, task, vlbert, head, batch, embedded, encoded, output, losses, names)


def _up_to_rounding(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return ours, but theirs where the last bits alone differ: adding their mean has rounded those."""
    return torch.where((ours - theirs).abs() <= _ROUNDED, theirs, ours).contiguous()


def _losses(case: VLBertCase, task: Task, losses: Callable[[Task], dict]) -> dict[str, Tensor]:
    """Return our losses; in pre-training each is a mean over what its own switch says."""
    if not isinstance(task, Pretraining):
        found = {name: both for name, both in losses(task).items() if both[0].requires_grad}
        return {name: total / max(1, count) for name, (total, count) in found.items()}
    means = {}
    for family, names in {"MLM": ("words", "text_words"), "MVRC": ("regions",), "REL": ("relationship",)}.items():
        if case.network[f"WITH_{family}_LOSS"]:
            over = "rows" if case.network.get(f"{family}_LOSS_NORM_IN_BATCH_FIRST") else "labels"
            found = losses(type(task)(dataclasses.replace(task.settings, losses_over=over), task.vocabulary, 1600))
            means |= {name: found[name][0] / max(1, found[name][1]) for name in names}
    return means


def compare(case: VLBertCase, ours: Ours) -> dict[str, float]:
    """Return how far ours is from theirs, by what `Tolerance.bounds` names. NaN is infinitely far."""
    bound, batch = TOLERANCES[ours.precision], ours.batch
    norm, projection = gradients_apart(case, gradients(case, ours), bound.floor)
    with _computing_in(ours.precision):
        pairs = logits(case, ours)
    end = torch.ones(len(batch), 1, dtype=torch.bool)
    mask = torch.cat([batch.text_mask, batch.region_mask, end], dim=1)
    inputs, outputs = (_real(case.tensor(f"inter/encoder.{what}"), mask) for what in ("input", "output"))
    return {
        "logits": max(apart(*pair, bound.of_scale) for pair in pairs),
        "enc. in": apart(ours.embedded[mask], inputs, bound.of_scale),
        "enc. out": apart(ours.encoded[mask], outputs, bound.of_scale),
        "losses": max(relative(mine, theirs) for mine, theirs in losses(case, ours)),
        "grad l2": norm,
        "grad dot": projection,
    }


def _real(theirs: Tensor, mask: Tensor) -> Tensor:
    """Return the real elements of theirs, which stand at the front of a row. mask: of ours, which may pad otherwise."""
    return torch.cat([row[: int(real.sum())] for row, real in zip(theirs, mask, strict=True)])


def logits(case: VLBertCase, ours: Ours) -> list[tuple[Tensor, Tensor]]:
    """Return (ours, theirs) of every logit at real words and regions."""
    task, head, batch, output = ours.task, ours.head, ours.batch, ours.output
    if isinstance(task, Pretraining):
        captions = batch.image_of >= 0
        words, text, regions = head.words(ours.vlbert, output.text), batch.text_mask, batch.region_mask
        parts = {"mvrc_logits": (head.regions(output.regions), regions, captions)}
        if "in/aux_text" in case.arrays:
            parts |= {"mlm_logits_wvc": (words, text, captions), "mlm_logits_aux": (words, text, ~captions)}
        else:
            parts["mlm_logits"] = (words, text, captions)
        pairs = [
            (mine[rows][real[rows]], _real(case.tensor(f"out/{name}"), real[rows]))
            for name, (mine, real, rows) in parts.items()
        ]
        if "out/relationship_logits" in case.arrays:
            pairs.append((head.related(output, captions.nonzero()[:, 0]), case.tensor("out/relationship_logits")))
        return pairs
    theirs = [case.tensor(name) for name in ("out/label_logits", "infer/label_logits") if name in case.arrays]
    if isinstance(task, RefCOCO):
        mine = head(output.regions[batch.region_mask])[:, 0]
        return [(mine, _real(one, batch.region_mask)) for one in theirs]
    return [(task.logits(head, output, batch), one) for one in theirs]


# Their losses -> ours; one that theirs computes and a case does not use is 0.
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
    """Return (ours, theirs) of each loss and of their sum."""
    pairs = [
        (ours.losses.get(mine, 0.0), float(case.arrays[f"out/{name}"].reshape(())))
        for name, mine in _LOSSES.items()
        if f"out/{name}" in case.arrays
    ]
    return [*pairs, (sum(ours.losses.values()), float(case.arrays["out/loss"]))]


def gradients(case: VLBertCase, ours: Ours) -> dict[str, Tensor | None]:
    """Return our gradient by their name for each parameter."""
    model = nn.ModuleDict({"vlbert": ours.vlbert, "head": ours.head})
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    order = case.metadata["param_order_for_grad"]
    return {name: gradients.get(ours.names.get(PublishedVLBert.plain_name(name), "")) for name in order}


def check_boxes(case: VLBertCase, ours: Ours) -> None:
    """RefCOCO+: raises ValueError if the boxes that we predict are not theirs, except where theirs was padding."""
    if "infer/pred_boxes" not in case.arrays:
        return
    rows = ours.task.predictions(ours.vlbert, ours.head, ours.output, ours.batch)
    ratios = case.tensor("in/im_info")[:, [2, 3, 2, 3]]
    chosen = torch.tensor([row["region"] + 1 for row in rows])
    mine = ours.batch.boxes[torch.arange(len(rows)), chosen] / ratios
    theirs = case.tensor("infer/pred_boxes")
    padding = (theirs < 0).all(dim=1)
    if not torch.allclose(mine[~padding], theirs[~padding]):
        raise ValueError("predicted boxes differ")


def report(file: Path, name: str, precision: str = "fp32") -> Row:
    """Return how far ours is from the case, or why that cannot be told."""
    try:
        case = VLBertCase.read(file)
        ours = run(case, precision)
        differences = compare(case, ours)
        check_boxes(case, ours)
    except Exception as error:  # noqa: BLE001  files may be torn anywhere; one case must not keep the others from running
        return not_run(name, "", error)
    return Row(name, "", differences, TOLERANCES[precision].bounds)
