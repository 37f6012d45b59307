"""VL-BERT's cases: what a pair of files holds, as our model, its weights and its batch (see vlbert.py)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.parity.cases import Case
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.datasets.refcoco import Expression
from vlbert.published.checkpoints import Hints
from vlbert.published.vlbert import PublishedVLBert
from vlbert.tasks.base import Task
from vlbert.tasks.pretraining import Pretraining
from vlbert.tasks.refcoco import RefCOCO
from vlbert.tasks.vcr import VCR
from vlbert.tasks.vqa import VQA

SPECIAL_IDS = dict(zip(SPECIALS, (0, 100, 101, 102, 103), strict=True))  # BERT's, which the cases use
KINDS = ("pretrain", "vcr", "vqa", "refcoco")  # how the name of a case may begin

# The switches of theirs that we know. One that is not here may change what is computed, and who does not know it could
# only guess: it is refused. Below DATASET, TRAIN, VAL and TEST stands how the inputs were made, which a case brings.
_NETWORK = """
ANSWER_FIRST ANS_LOSS_TYPE ANS_LOSS_WEIGHT BERT_ALIGN_ANSWER BERT_ALIGN_QUESTION BERT_FROZEN BERT_MODEL_NAME
BERT_PRETRAINED BERT_PRETRAINED_EPOCH BERT_USE_LAYER BERT_WITH_MLM_LOSS BERT_WITH_NSP_LOSS BLIND CLASSIFIER_DROPOUT
CLASSIFIER_HIDDEN_SIZE CLASSIFIER_PRETRAINED CLASSIFIER_SIGMOID CLASSIFIER_SIGMOID_LOSS_POSITIVE_WEIGHT
CLASSIFIER_TYPE CNN_LOSS_TOP CNN_LOSS_WEIGHT CNN_REG_DROPOUT ENABLE_CNN_REG_LOSS FOR_MASK_VL_MODELING_PRETRAIN
IMAGE_C5_DILATED IMAGE_FEAT_PRECOMPUTED IMAGE_FINAL_DIM IMAGE_FROZEN_BACKBONE_STAGES IMAGE_FROZEN_BN IMAGE_NUM_LAYERS
IMAGE_PRETRAINED IMAGE_PRETRAINED_EPOCH IMAGE_SEMANTIC IMAGE_STRIDE_IN_1x1 LOAD_REL_HEAD MASK_RAW_PIXELS
MLM_LOSS_NORM_IN_BATCH_FIRST MVRC_LOSS_NORM_IN_BATCH_FIRST NO_GROUNDING NO_OBJ_ATTENTION OUTPUT_CONV5 PARTIAL_PRETRAIN
PARTIAL_PRETRAIN_PREFIX_CHANGES PARTIAL_PRETRAIN_SEGMB_INIT PIXEL_MEANS PIXEL_STDS QA_ONE_SENT
REPLACE_OBJECT_CHANGE_LABEL VLBERT WITH_MLM_LOSS WITH_MVRC_LOSS WITH_REL_LOSS
"""
_VLBERT = """
attention_probs_dropout_prob from_scratch hidden_act hidden_dropout_prob hidden_size initializer_range input_size
input_transform_type intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
obj_pos_id_relative object_word_embed_mode pos_embedding_frozen position_padding_idx type_vocab_size visual_ln
visual_region_classes visual_scale_object_init visual_scale_text_init visual_size vocab_size with_pooler
word_embedding_frozen
"""
_KNOWN = {*_NETWORK.split(), *(f"VLBERT.{key}" for key in _VLBERT.split())}
# Those of which ours has one value only, or of which no more is known.
_ONLY = {
    "BERT_FROZEN": False,
    "BERT_WITH_MLM_LOSS": False,
    "BERT_WITH_NSP_LOSS": False,
    "BLIND": False,
    "FOR_MASK_VL_MODELING_PRETRAIN": False,
    "IMAGE_SEMANTIC": False,
    "NO_GROUNDING": False,
    "NO_OBJ_ATTENTION": False,
    "OUTPUT_CONV5": False,
    "VLBERT.hidden_act": "gelu",
    "VLBERT.input_transform_type": 1,
    "VLBERT.obj_pos_id_relative": True,
    "VLBERT.pos_embedding_frozen": False,
    "VLBERT.position_padding_idx": -1,
    "VLBERT.word_embedding_frozen": False,
}
_ONLY_PRETRAINING = {"WITH_MLM_LOSS": True, "WITH_MVRC_LOSS": True}  # fine-tuning reads none of these
_ONLY_FINE_TUNING = {  # pre-training reads none of these
    "ANSWER_FIRST": False,
    "ANS_LOSS_TYPE": "bce",
    "ANS_LOSS_WEIGHT": 1.0,
    "CLASSIFIER_SIGMOID_LOSS_POSITIVE_WEIGHT": 1.0,
    "CNN_LOSS_WEIGHT": 1.0,
    "QA_ONE_SENT": False,
}
_CLASSIFIERS = {"1fc": ("linear",), "2fc": ("two_layers",), "mlm": ("words", "regions")}


class VLBertCase(Case):
    """A pair of files of the authors' VL-BERT."""

    @property
    def kind(self) -> str:
        """Which of KINDS it is. Raises ValueError if it is none."""
        kind = self.metadata["case"].split("_")[0]
        if kind not in KINDS:
            raise ValueError(f"case {self.metadata['case']} begins with none of {', '.join(KINDS)}")
        return kind

    @property
    def network(self) -> dict[str, Any]:
        """config.NETWORK, and what stands below its VLBERT as VLBERT.*."""
        network = self.metadata["config"]["NETWORK"]
        return network | {f"VLBERT.{key}": value for key, value in network["VLBERT"].items()}


def describe(case: VLBertCase, shapes: dict[str, tuple[int, ...]]) -> PublishedVLBert:
    """Return what the case is, from its tensors and its configuration.

    Raises ValueError naming a switch that we do not know or have not, or that says other than the tensors.
    """
    network = case.network
    _refuse_switches(case)
    what = PublishedVLBert.understand(shapes, Hints((network["VLBERT.num_attention_heads"],)))
    for key, derived in _from_tensors(case, what, shapes).items():
        if network[key] != derived:
            raise ValueError(f"config.NETWORK.{key} is {network[key]}, and the tensors say {derived}")
    frozen = [stage for stage in network["IMAGE_FROZEN_BACKBONE_STAGES"] if stage]
    if what.model.regions.features == "precomputed":
        frozen = []
    elif frozen != [*range(1, len(frozen) + 1)]:
        raise ValueError(f"config.NETWORK.IMAGE_FROZEN_BACKBONE_STAGES is {frozen}; ours freezes the first so many")
    regions = dataclasses.replace(
        what.model.regions,
        resnet=dataclasses.replace(
            what.model.regions.resnet,
            stride_in_1x1=network["IMAGE_STRIDE_IN_1x1"],
            res5_dilated=network["IMAGE_C5_DILATED"],
            norm="frozen" if network["IMAGE_FROZEN_BN"] else "batch",
        ),
        frozen_stages=len(frozen),
        padding="batch",  # a case brings its images in one tensor, VCR's too
    )
    task = what.task
    if case.kind == "vcr":
        loss = "sigmoid" if network["CLASSIFIER_SIGMOID"] else "softmax"
        region_loss = task.region_loss if network["ENABLE_CNN_REG_LOSS"] else "none"
        task = dataclasses.replace(task, loss=loss, region_loss=region_loss)
    return dataclasses.replace(what, model=dataclasses.replace(what.model, regions=regions), task=task)


def _refuse_switches(case: VLBertCase) -> None:
    network = case.network
    unknown = sorted(network.keys() - _KNOWN)
    if unknown:
        names = ", ".join(f"config.NETWORK.{key}" for key in unknown)
        raise ValueError(f"unknown to us, which may change what is computed: {names}")
    for key, wanted in (_ONLY | (_ONLY_PRETRAINING if case.kind == "pretrain" else _ONLY_FINE_TUNING)).items():
        if network.get(key, wanted) != wanted:
            raise ValueError(f"config.NETWORK.{key} is {network[key]}; ours has no other than {wanted}")
    if case.kind == "vcr" and network["VLBERT.object_word_embed_mode"] == 3:
        raise ValueError("config.NETWORK.VLBERT.object_word_embed_mode is 3 (mean word embedding); ours has 1 and 2")


def _from_tensors(case: VLBertCase, what: PublishedVLBert, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Derive the switches that the model of the case reads from its tensors. Others may have any value."""
    network, model, task = case.network, what.model, what.task
    visual_size = model.visual_embedding_size or model.hidden_size
    derived = {
        "IMAGE_FEAT_PRECOMPUTED": model.regions.features == "precomputed",
        "IMAGE_FINAL_DIM": visual_size,
        "VLBERT.hidden_size": model.hidden_size,
        "VLBERT.intermediate_size": model.intermediate_size,
        "VLBERT.max_position_embeddings": model.max_positions,
        "VLBERT.num_hidden_layers": len(model.layers),
        "VLBERT.visual_ln": model.visual_norm == "layer_norm",
        "VLBERT.visual_size": visual_size,
        "VLBERT.vocab_size": what.vocab_size,
        "VLBERT.with_pooler": any(name.startswith("vlbert.pooler.") for name in shapes),
    }
    end_to_end = model.regions.features == "end_to_end"
    if end_to_end:
        derived["IMAGE_NUM_LAYERS"] = 3 * sum(model.regions.resnet.blocks) + 2  # as ResNets are named
    if case.kind == "pretrain" and end_to_end:
        derived["MASK_RAW_PIXELS"] = model.regions.masking == "pixels"
    if case.kind == "pretrain" and network["WITH_REL_LOSS"]:
        derived["WITH_REL_LOSS"] = task.relationship
    if case.kind == "vcr":
        derived["VLBERT.object_word_embed_mode"] = 1 if model.region_classes else 2
        if network["ENABLE_CNN_REG_LOSS"]:
            derived["ENABLE_CNN_REG_LOSS"] = task.region_loss != "none"
            derived["CNN_LOSS_TOP"] = task.region_loss == "contextual"
    if case.kind in ("vcr", "vqa") and task.classifier not in _CLASSIFIERS.get(network["CLASSIFIER_TYPE"], ()):
        derived["CLASSIFIER_TYPE"] = next(kind for kind, ours in _CLASSIFIERS.items() if task.classifier in ours)
    return derived


def vocabulary(size: int) -> Vocabulary:
    """Make `size` pieces without meaning, with the special ones where BERT has them."""
    special = {number: piece for piece, number in SPECIAL_IDS.items()}
    return Vocabulary([special.get(i, f"[unused{i}]") for i in range(size)])


def images(case: VLBertCase, valid: Tensor) -> list[ImageInput]:
    """Return the images of a case without labels; valid is bool [B, R], a prefix of each row."""
    boxes, info = case.tensor("in/boxes"), case.tensor("in/im_info")
    made = []
    for row, keep in enumerate(valid):
        inside = boxes[row][keep]
        width, height = (int(side) for side in info[row, :2])
        made.append(
            ImageInput(
                boxes=inside[:, :4].numpy(),
                masked=np.zeros(len(inside), bool),
                size=(width, height),
                pixels=stored_pixels(case, row, height, width) if "in/image" in case.arrays else None,
                features=inside[:, 4:].numpy() if "in/image" not in case.arrays else None,
            )
        )
    return made


def stored_pixels(case: VLBertCase, row: int, height: int, width: int) -> Tensor:
    """Return an image before it was normalised, as far as a case tells: float [3, height, width], RGB of 0 to 255.

    Theirs are B, G, R less their mean, and zero where a masked region hid them: there stands noise, which the network
    must not see.
    """
    image = case.tensor("in/image")[row, :, :height, :width]
    noise = np.random.default_rng(row).uniform(0, 255, image.shape).astype(np.float32)
    pixels = image + torch.tensor(case.network["PIXEL_MEANS"])[:, None, None]
    return torch.where((image == 0).all(dim=0), torch.from_numpy(noise), pixels).flip(0)


def pretraining_batch(case: VLBertCase, task: Pretraining) -> Batch:
    valid = case.tensor("in/boxes")[..., 0] > -1.5
    labels, soft = case.tensor("in/mlm_labels"), case.tensor("in/mvrc_labels")
    region_label_mask = ((soft.sum(2) - 1).abs() < 0.1) & valid
    examples = []
    for row, image in enumerate(images(case, valid)):
        text = _words(case.tensor("in/text")[row], labels[row])
        if task.settings.relationship:
            related = case.arrays["in/relationship_label"][row : row + 1]
            text = _with_related(text, related)
        keep, label_mask = valid[row], region_label_mask[row]
        image = dataclasses.replace(
            image,
            masked=(case.tensor("in/mvrc_ops")[row][keep] == 1).numpy(),
            label_masks={"region_label_mask": label_mask[keep].numpy()},
            labels={"region_classes": soft[row][label_mask].numpy()},
        )
        examples.append(Example(f"caption {row}", text, image))
    if "in/aux_text" in case.arrays:
        for row, (tokens, answers) in enumerate(
            zip(*(case.tensor(f"in/aux_{n}") for n in ("text", "mlm_labels")), strict=True)
        ):
            text = _words(tokens, answers)
            if task.settings.relationship:
                text = _with_related(text, np.zeros(0, np.int64))
            examples.append(Example(f"text {row}", text))
    return collate(examples)


def _with_related(text: TextInput, related: np.ndarray) -> TextInput:
    """Add the label of the pair, [1], or of a text without an image, [0]."""
    label_masks = text.label_masks | {"related": np.arange(len(text.tokens)) < len(related)}
    return dataclasses.replace(text, label_masks=label_masks, labels=text.labels | {"related": related})


def _words(tokens: Tensor, answers: Tensor) -> TextInput:
    """Convert a row of text ids, 0 behind its end, and the answer at each, -1 if it has none."""
    count = int((tokens > 0).sum())
    tokens, answers = tokens[:count].numpy(), answers[:count].numpy()
    zeros, label_mask = np.zeros(count, np.int64), answers >= 0
    return TextInput(
        tokens, zeros, zeros, label_masks={"word_label_mask": label_mask}, labels={"words": answers[label_mask]}
    )


def vqa_batch(case: VLBertCase, task: VQA) -> Batch:
    questions, scores = case.tensor("in/question"), case.arrays["in/label"]
    found = images(case, case.tensor("in/boxes")[..., 0] > -1.5)
    texts = [task.text_input(q[q > 0].numpy(), s) for q, s in zip(questions, scores, strict=True)]
    return collate([Example(f"question {i}", *both) for i, both in enumerate(zip(texts, found, strict=True))])


def refcoco_batch(case: VLBertCase, task: RefCOCO) -> Batch:
    valid = case.tensor("in/boxes")[..., 0] > -1.5
    expressions, labels = case.tensor("in/expression"), case.tensor("in/label")
    examples = []
    for row, image in enumerate(images(case, valid)):
        right = (labels[row][valid[row]] == 1).numpy()
        image = dataclasses.replace(
            image,
            label_masks={"candidate": np.ones(len(right), bool)},
            labels={"target": right.astype(np.float32)},
        )
        text = task.text_input(expressions[row][expressions[row] > 0].numpy())
        metadata = {"expression": Expression(row, row, ""), "split": "", "boxes": image.boxes, "to_stored": np.ones(4)}
        examples.append(Example(f"expression {row}", text, image, metadata))
    return collate(examples)


def vcr_batch(case: VLBertCase, task: VCR) -> Batch:
    boxes = case.tensor("in/boxes")
    valid = boxes[..., 3] > -0.5
    examples = []
    for row, image in enumerate(images(case, valid)):
        question = _tagged(case.arrays["in/question"][row])
        right = int(case.arrays["in/answer_label"][row])
        texts = [
            task.text_input(question, _tagged(choice), number == right)
            for number, choice in enumerate(case.arrays["in/answer_choices"][row])
        ]
        image = dataclasses.replace(
            image,
            cells=case.tensor("in/masks")[row][valid[row]].numpy(),
            classes=boxes[row][valid[row]][:, 5].long().numpy(),
            label_masks={"region_label_mask": np.ones(len(image.boxes), bool)},
        )
        examples.append(Example(f"question {row}", texts[0], image, more=tuple(texts[1:])))
    return collate(examples)


def _tagged(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (word pieces, the region that each names) of [L, 3] rows, -2 behind their end."""
    rows = rows[rows[:, 0] >= 0]
    return rows[:, 0], rows[:, 1]


BATCHES: dict[type, Callable[[VLBertCase, Task], Batch]] = {
    Pretraining: pretraining_batch,
    VQA: vqa_batch,
    RefCOCO: refcoco_batch,
    VCR: vcr_batch,
}
