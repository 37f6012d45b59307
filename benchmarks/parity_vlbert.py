"""Our VL-BERT beside figures that the authors' code produced: the same weights and inputs, the same numbers.

    python -m benchmarks.parity_vlbert DIR

A case is a pair X.json, X.npz in DIR whose json has `param_order_for_grad`: a configuration of theirs, the rule that
makes each weight, inputs, outputs, intermediates, losses and gradients. Prints a line for each case; exits with 1 where
one differs by more than TOLERANCE, or could not be run.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vlbert.batch import Batch, Example, Picture, Words, collate
from vlbert.checkpoint import load_model
from vlbert.model import Encoded, VLBert
from vlbert.published import Published, convert, plain_name, understand
from vlbert.tasks import Task, make_task
from vlbert.tasks.pretraining import Pretraining
from vlbert.tasks.refcoco import RefCOCO
from vlbert.tasks.vcr import VCR
from vlbert.tasks.vqa import VQA
from vlbert.text import SPECIALS, Vocabulary

TOLERANCE = 1e-5  # absolute for logits and encoder states, relative for losses
GRADIENT_TOLERANCE = 1e-3  # of a gradient's norm and projection, relative to its norm ...
# ... or to this share of the largest norm of the case. Where both norms lie below it, both are the rounding errors of a
# gradient that is zero (a key's bias shifts all scores of a query alike): no two programs round alike, and an exact
# zero would be as far from theirs. Their number is printed.
GRADIENT_FLOOR = 1e-6
SPECIAL_IDS = dict(zip(SPECIALS, (0, 100, 101, 102, 103), strict=True))  # BERT's, which the cases use

# Settings of theirs that ours has only one value of, by path in their configuration.
_ONLY = {
    "NETWORK.BLIND": False,
    "NETWORK.NO_GROUNDING": False,
    "NETWORK.NO_OBJ_ATTENTION": False,
    "NETWORK.IMAGE_SEMANTIC": False,
    "NETWORK.OUTPUT_CONV5": False,
    "NETWORK.QA_ONE_SENT": False,
    "NETWORK.ANSWER_FIRST": False,
    "NETWORK.ANS_LOSS_TYPE": "bce",
    "NETWORK.CLASSIFIER_SIGMOID_LOSS_POSITIVE_WEIGHT": 1.0,
    "NETWORK.CNN_LOSS_WEIGHT": 1.0,
    "NETWORK.ANS_LOSS_WEIGHT": 1.0,
    "NETWORK.VLBERT.word_embedding_frozen": False,
    "NETWORK.VLBERT.obj_pos_id_relative": True,
    "NETWORK.VLBERT.hidden_act": "gelu",
    "NETWORK.VLBERT.position_padding_idx": -1,
}


@dataclass(frozen=True, eq=False)
class Case:
    """One pair of files: `about` is the json, `arrays` the npz."""

    name: str
    about: dict
    arrays: dict[str, np.ndarray]

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    @property
    def network(self) -> dict:
        return self.about["config"]["NETWORK"]


@dataclass(frozen=True)
class Difference:
    """How far ours is from theirs; NaN compares as infinitely far."""

    logits: float
    encoder_input: float
    encoder_output: float
    losses: float
    gradient_norm: float
    gradient_projection: float
    zero_gradients: int  # parameters whose gradient is zero with both, but for rounding

    @property
    def passes(self) -> bool:
        exact = max(self.logits, self.encoder_input, self.encoder_output, self.losses) <= TOLERANCE
        return exact and max(self.gradient_norm, self.gradient_projection) <= GRADIENT_TOLERANCE


def read_cases(folder: Path) -> list[Path]:
    """The json files in `folder` that describe a case, in order."""
    return [file for file in sorted(folder.glob("*.json")) if "param_order_for_grad" in _json(file)]


def _json(file: Path) -> dict:
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def read_case(file: Path) -> Case:
    with np.load(file.with_suffix(".npz")) as arrays:
        return Case(file.stem, _json(file), dict(arrays))


def weights(about: dict) -> dict[str, Tensor]:
    """The parameters and buffers of a case, made by the rule that stands beside each."""
    return {tensor["name"]: _fill(tensor, about.get("seed_offset", 0)) for tensor in about["tensors"]}


def _fill(tensor: dict, seed_offset: int) -> Tensor:
    name = tensor["name"]
    if name.endswith("num_batches_tracked"):
        return torch.zeros((), dtype=torch.int64)
    rule = re.fullmatch(r"(1\+)?(\|?)([\d.]+)n?(\*\|?n)?\|?", str(tensor["rule"]).replace(" ", ""))
    scale = float(rule.group(3)) if rule else 0.02
    values = np.random.default_rng(zlib.crc32(name.encode()) + seed_offset).standard_normal(tensor["shape"]) * scale
    if name.endswith("running_var"):
        values = 1 + np.abs(values)
    elif str(tensor["rule"]).startswith("1+"):
        values = 1 + values
    return torch.from_numpy(np.asarray(values, np.float32))


def describe(case: Case, shapes: dict[str, tuple[int, ...]]) -> Published:
    """What the case is, from its tensors and its configuration; ValueError names a setting that ours has not."""
    config = case.about["config"]
    for path, wanted in _ONLY.items():
        found = config
        for part in path.split("."):
            found = found.get(part, wanted) if isinstance(found, dict) else found
        if found != wanted:
            raise ValueError(f"config.{path} is {found}; ours has no other than {wanted}")
    network = case.network
    core = network["VLBERT"]
    if core["object_word_embed_mode"] == 3:
        raise ValueError("config.NETWORK.VLBERT.object_word_embed_mode is 3 (mean word embedding); ours has 1 and 2")
    what = understand(shapes, heads=core["num_attention_heads"])
    frozen = [stage for stage in network["IMAGE_FROZEN_BACKBONE_STAGES"] if stage]
    regions = dataclasses.replace(
        what.model.regions,
        resnet=dataclasses.replace(
            what.model.regions.resnet,
            stride_in_1x1=network["IMAGE_STRIDE_IN_1x1"],
            res5_dilated=network["IMAGE_C5_DILATED"],
            norm="frozen" if network["IMAGE_FROZEN_BN"] else "batch",
        ),
        frozen_stages=max(frozen, default=0),
    )
    return dataclasses.replace(
        what, model=dataclasses.replace(what.model, regions=regions), task=_settings(case, what.task)
    )


def _settings(case: Case, settings: object) -> object:
    """The task's settings, with what only the configuration tells."""
    network = case.network
    match case.about["case"].split("_")[0]:
        case "pretrain":
            words, regions = (network[f"{name}_LOSS_NORM_IN_BATCH_FIRST"] for name in ("MLM", "MVRC"))
            if words != regions:
                raise ValueError("config.NETWORK.*_LOSS_NORM_IN_BATCH_FIRST differ; ours has one setting for both")
            off = [name for name in ("WITH_MLM_LOSS", "WITH_MVRC_LOSS") if not network[name]]
            if off:
                raise ValueError(f"config.NETWORK.{off[0]} is off; ours always has it")
            return dataclasses.replace(settings, losses_over="rows" if words else "questions")
        case "vcr":
            loss = "sigmoid" if network["CLASSIFIER_SIGMOID"] else "softmax"
            region_loss = settings.region_loss if network["ENABLE_CNN_REG_LOSS"] else "none"
            return dataclasses.replace(settings, loss=loss, region_loss=region_loss)
        case "vqa" | "refcoco":
            return settings
        case other:
            raise ValueError(f"case {other} is neither pretrain, vcr, vqa nor refcoco")


def vocabulary(size: int) -> Vocabulary:
    """`size` pieces without meaning, with the special ones where BERT has them."""
    special = {number: piece for piece, number in SPECIAL_IDS.items()}
    return Vocabulary([special.get(i, f"[unused{i}]") for i in range(size)])


def pictures(case: Case, valid: Tensor) -> list[Picture]:
    """The pictures of a case without what is asked; valid is bool [B, R], a prefix of each row."""
    boxes, info = case.tensor("in/boxes"), case.tensor("in/im_info")
    made = []
    for row, keep in enumerate(valid):
        inside = boxes[row][keep]
        made.append(
            Picture(
                boxes=inside[:, :4].numpy(),
                hidden=np.zeros(len(inside), bool),
                size=tuple(int(side) for side in info[row, :2]),
                features=inside[:, 4:].numpy() if "in/image" not in case.arrays else None,
            )
        )
    return made


def pretraining_batch(case: Case, task: Pretraining) -> Batch:
    valid = case.tensor("in/boxes")[..., 0] > -1.5
    labels, soft = case.tensor("in/mlm_labels"), case.tensor("in/mvrc_labels")
    region_asked = ((soft.sum(2) - 1).abs() < 0.1) & valid
    examples = []
    for row, picture in enumerate(pictures(case, valid)):
        text = _words(case.tensor("in/text")[row], labels[row])
        if task.settings.relationship:
            related = case.arrays["in/relationship_label"][row : row + 1]
            text = dataclasses.replace(text, asked=text.asked | {"related": related})
        keep, asked = valid[row], region_asked[row]
        picture = dataclasses.replace(
            picture,
            hidden=(case.tensor("in/mvrc_ops")[row][keep] == 1).numpy(),
            targets={"region_asked": asked[keep].numpy()},
            asked={"region_classes": soft[row][asked].numpy()},
        )
        examples.append(Example(f"caption {row}", text, picture))
    if "in/aux_text" in case.arrays:
        for row, (tokens, answers) in enumerate(
            zip(*(case.tensor(f"in/aux_{n}") for n in ("text", "mlm_labels")), strict=True)
        ):
            text = _words(tokens, answers)
            if task.settings.relationship:
                text = dataclasses.replace(text, asked=text.asked | {"related": np.zeros(0, np.int64)})
            examples.append(Example(f"text {row}", text))
    return collate(examples)


def _words(tokens: Tensor, answers: Tensor) -> Words:
    """A row of text ids, 0 behind its end, and what is asked at each, -1 where nothing is."""
    count = int((tokens > 0).sum())
    tokens, answers = tokens[:count].numpy(), answers[:count].numpy()
    zeros, asked = np.zeros(count, np.int64), answers >= 0
    return Words(tokens, zeros, zeros, targets={"word_asked": asked}, asked={"words": answers[asked]})


def vqa_batch(case: Case, task: VQA) -> Batch:
    questions, scores = case.tensor("in/question"), case.arrays["in/label"]
    found = pictures(case, case.tensor("in/boxes")[..., 0] > -1.5)
    texts = [task.words(q[q > 0].numpy(), s) for q, s in zip(questions, scores, strict=True)]
    return collate([Example(f"question {i}", *both) for i, both in enumerate(zip(texts, found, strict=True))])


def refcoco_batch(case: Case, task: RefCOCO) -> Batch:
    valid = case.tensor("in/boxes")[..., 0] > -1.5
    expressions, labels = case.tensor("in/expression"), case.tensor("in/label")
    examples = []
    for row, picture in enumerate(pictures(case, valid)):
        right = (labels[row][valid[row]] == 1).numpy()
        targets = {"candidate": np.ones(len(right), bool), "right": right, "iou": right.astype(np.float32)}
        text = task.words(expressions[row][expressions[row] > 0].numpy())
        examples.append(Example(f"expression {row}", text, dataclasses.replace(picture, targets=targets)))
    return collate(examples)


def vcr_batch(case: Case, task: VCR) -> Batch:
    boxes = case.tensor("in/boxes")
    valid = boxes[..., 3] > -0.5
    examples = []
    for row, picture in enumerate(pictures(case, valid)):
        question = _tagged(case.arrays["in/question"][row])
        right = int(case.arrays["in/answer_label"][row])
        texts = [
            task.words(question, _tagged(choice), number == right)
            for number, choice in enumerate(case.arrays["in/answer_choices"][row])
        ]
        picture = dataclasses.replace(
            picture,
            cells=case.tensor("in/masks")[row][valid[row]].numpy(),
            classes=boxes[row][valid[row]][:, 5].long().numpy(),
        )
        examples.append(Example(f"question {row}", texts[0], picture, more=tuple(texts[1:])))
    return collate(examples)


def _tagged(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(word pieces, the region that each names) of [L, 3] rows, -2 behind their end."""
    rows = rows[rows[:, 0] >= 0]
    return rows[:, 0], rows[:, 1]


BATCHES: dict[type, Callable[[Case, Task], Batch]] = {
    Pretraining: pretraining_batch,
    VQA: vqa_batch,
    RefCOCO: refcoco_batch,
    VCR: vcr_batch,
}


@dataclass(frozen=True, eq=False)
class Ours:
    """The case's model as ours, and what it made of the case's inputs."""

    task: Task
    vlbert: VLBert
    head: nn.Module
    batch: Batch
    embedded: Tensor
    encoded: Tensor
    output: Encoded
    losses: dict[str, float]
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


@_convolving_as_they_did()
def run(case: Case) -> Ours:
    """Build our model, give it their weights and inputs, compute the losses and their gradients."""
    theirs = weights(case.about)
    what = describe(case, {plain_name(name): tuple(tensor.shape) for name, tensor in theirs.items()})
    task = make_task(what.task, vocabulary(what.vocab_size), num_classes=1600)
    vlbert, head = VLBert(what.model, what.vocab_size).eval(), what.head().eval()
    tensors, _ = convert(theirs, what, case.name)
    model = nn.ModuleDict({"vlbert": vlbert, "head": head})
    counters = {name: t for name, t in model.state_dict().items() if name.endswith("num_batches_tracked")}
    load_model(model, tensors | counters, case.name)
    batch = BATCHES[type(task)](case, task)
    if vlbert.fast_rcnn is not None:
        vlbert.fast_rcnn.to(memory_format=torch.contiguous_format)
        image = case.tensor("in/image")  # normalised already, and its hidden pixels are zero
        vlbert.fast_rcnn.network_input = lambda _: image
    seen = {}
    vlbert.embedding.register_forward_hook(lambda *call: seen.update(embedded=call[2][0]))
    vlbert.encoder.register_forward_hook(lambda *call: seen.update(encoded=call[2]))
    output = vlbert(batch)
    losses = {name: total / max(1, count) for name, (total, count) in task.losses(vlbert, head, output, batch).items()}
    sum(losses.values()).backward()
    losses = {name: float(loss.detach()) for name, loss in losses.items()}
    return Ours(task, vlbert, head, batch, seen["embedded"], seen["encoded"], output, losses, what.ours())


def compare(case: Case, ours: Ours) -> Difference:
    norm, projection, zeros = gradient_differences(case, ours)
    return Difference(
        logits=max(_apart(*pair) for pair in logits(case, ours)),
        encoder_input=_rows_apart(ours, ours.embedded, case.tensor("inter/encoder.input")),
        encoder_output=_rows_apart(ours, ours.encoded, case.tensor("inter/encoder.output")),
        losses=max(_relative(mine, theirs) for mine, theirs in losses(case, ours)),
        gradient_norm=norm,
        gradient_projection=projection,
        zero_gradients=zeros,
    )


def _apart(mine: Tensor, theirs: Tensor) -> float:
    if mine.shape != theirs.shape:
        raise ValueError(f"ours is {tuple(mine.shape)}, theirs {tuple(theirs.shape)}")
    worst = float((mine.detach().double() - theirs.double()).abs().max()) if mine.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


def _relative(mine: float, theirs: float) -> float:
    if math.isnan(theirs) or math.isnan(mine):
        return 0.0 if math.isnan(theirs) and math.isnan(mine) else math.inf
    return abs(mine - theirs) / max(abs(theirs), 1e-12)


def _rows_apart(ours: Ours, mine: Tensor, theirs: Tensor) -> float:
    """Over real elements: theirs stand packed at the front of a row, ours have padding behind text and regions."""
    batch = ours.batch
    end = torch.ones(len(batch), 1, dtype=torch.bool)
    mask = torch.cat([batch.text_mask, batch.region_mask, end], dim=1)
    return max(_apart(mine[row][mask[row]], theirs[row][: int(mask[row].sum())]) for row in range(len(batch)))


def logits(case: Case, ours: Ours) -> list[tuple[Tensor, Tensor]]:
    """(ours, theirs) of every logit at real words and regions."""
    task, head, batch, output = ours.task, ours.head, ours.batch, ours.output
    if isinstance(task, Pretraining):
        captions = batch.picture_of >= 0
        words = head.words(ours.vlbert, output.text)
        parts = {"mlm_logits": captions, "mlm_logits_wvc": captions, "mlm_logits_aux": ~captions}
        pairs = []
        for name, rows in parts.items():
            if f"out/{name}" in case.arrays:
                mask = batch.text_mask[rows]
                width = mask.shape[1]
                pairs.append((words[rows][mask], _wide(case.tensor(f"out/{name}"), width)[mask]))
        mask = batch.region_mask[captions]
        theirs = _wide(case.tensor("out/mvrc_logits"), mask.shape[1])
        pairs.append((head.regions(output.regions)[captions][mask], theirs[mask]))
        if "out/relationship_logits" in case.arrays:
            pairs.append((head.related(output, batch), case.tensor("out/relationship_logits")))
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


# Their losses -> ours; those of theirs that a case switches off are 0.
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


def losses(case: Case, ours: Ours) -> list[tuple[float, float]]:
    """(ours, theirs) of each loss and of their sum."""
    pairs = [(sum(ours.losses.values()), float(case.arrays["out/loss"]))]
    for name, mine in _LOSSES.items():
        if f"out/{name}" in case.arrays:
            theirs = float(case.arrays[f"out/{name}"].reshape(()))
            if mine in ours.losses or theirs != 0:
                pairs.append((ours.losses[mine], theirs))
    return pairs


def gradient_differences(case: Case, ours: Ours) -> tuple[float, float, int]:
    """The worst relative difference of a gradient's norm, of its projection on a random direction, and the zeros."""
    parameters = {
        f"{part}.{name}": parameter
        for part, module in (("vlbert", ours.vlbert), ("head", ours.head))
        for name, parameter in module.named_parameters()
    }
    norms, dots = case.arrays["grad/l2"], case.arrays["grad/dot"]
    floor = GRADIENT_FLOOR * np.nanmax(norms)
    worst, zeros = [0.0, 0.0], 0
    for name, norm, dot in zip(case.about["param_order_for_grad"], norms, dots, strict=True):
        parameter = parameters.get(ours.rename(plain_name(name)) or "")
        gradient = None if parameter is None else parameter.grad
        if math.isnan(norm) or gradient is None:
            if not (math.isnan(norm) and gradient is None):
                raise ValueError(f"{name} has a gradient with {'us' if gradient is not None else 'them'} alone")
            continue
        direction = np.random.default_rng(zlib.crc32(name.encode()) + 1000).standard_normal(tuple(gradient.shape))
        gradient = gradient.double()
        mine = float(gradient.norm()), float((gradient * torch.from_numpy(direction)).sum())
        if max(mine[0], norm) <= floor:
            zeros += 1
            continue
        for which, (found, theirs) in enumerate(zip(mine, (norm, dot), strict=True)):
            apart = abs(found - theirs) / max(norm, floor)
            worst[which] = max(worst[which], math.inf if math.isnan(apart) else apart)
    return worst[0], worst[1], zeros


def predictions(case: Case, ours: Ours) -> str:
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
    return f"  boxes {int((~padding).sum())} equal, {int(padding.sum())} where theirs is padding"


def report(file: Path) -> tuple[str, bool]:
    """A line about the case, and whether it passes."""
    try:
        case = read_case(file)
        ours = run(case)
        found, boxes = compare(case, ours), predictions(case, ours)
    except (ValueError, KeyError, RuntimeError, OSError, TypeError, IndexError, AttributeError) as error:
        return f"{file.stem:38} NOT RUN: {type(error).__name__}: {error}", False
    columns = " ".join(f"{value:8.1e}" for value in dataclasses.astuple(found)[:-1])
    return (
        f"{file.stem:38} {columns} {found.zero_gradients:5}  {'pass' if found.passes else 'FAIL'}{boxes}",
        found.passes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity_vlbert", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    files = read_cases(folder)
    if not files:
        sys.exit(f"{parser.prog}: no case in {folder}: no X.json with param_order_for_grad beside its X.npz")
    columns = ("logits", "enc. in", "enc. out", "losses", "grad l2", "grad dot")
    print(f"{'case':38} " + " ".join(f"{column:>8}" for column in columns) + " zeros")
    passed = 0
    for file in files:
        line, passes = report(file)
        print(line, flush=True)
        passed += passes
    print(f"{passed} of {len(files)} pass (within {TOLERANCE:g}; gradients {GRADIENT_TOLERANCE:g})")
    sys.exit(passed < len(files))


if __name__ == "__main__":
    main()
