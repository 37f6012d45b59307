"""VL-BERT's cases: what a pair of files holds, as our model, its weights and its batch (see vlbert.py)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.parity.cases import Case, check_switches
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.datasets.refcoco import Expression
from vlbert.published.checkpoints import Hints
from vlbert.published.vlbert import PublishedVLBert
from vlbert.tasks.base import Task
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.tasks.refcoco import RefCOCO
from vlbert.tasks.vcr import VCR, VCRSettings
from vlbert.tasks.vqa import VQA

SPECIAL_IDS = dict(zip(SPECIALS, (0, 100, 101, 102, 103), strict=True))  # BERT's, which the cases use


class VLBertCase(Case):
    """A pair of files of the authors' VL-BERT."""

    @property
    def network(self) -> dict[str, Any]:
        """config.NETWORK."""
        return self.metadata["config"]["NETWORK"]


def describe(case: VLBertCase, shapes: dict[str, tuple[int, ...]]) -> PublishedVLBert:
    """Return what the case is, from its tensors and, where these do not tell, from its configuration."""
    network = case.network
    what = PublishedVLBert.from_shapes(shapes, Hints((network["VLBERT"]["num_attention_heads"],)))
    regions = dataclasses.replace(
        what.model.regions,
        resnet=dataclasses.replace(
            what.model.regions.resnet,
            stride_in_1x1=network["IMAGE_STRIDE_IN_1x1"],
            res5_dilated=network["IMAGE_C5_DILATED"],
            norm="frozen" if network["IMAGE_FROZEN_BN"] else "batch",
        ),
        frozen_stages=max(network["IMAGE_FROZEN_BACKBONE_STAGES"], default=0),
        padding="batch",  # a case brings its images in one tensor, VCR's too
    )
    task = what.task
    if isinstance(task, VCRSettings):
        loss = "sigmoid" if network["CLASSIFIER_SIGMOID"] else "softmax"
        region_loss = task.region_loss if network["ENABLE_CNN_REG_LOSS"] else "none"
        task = dataclasses.replace(task, loss=loss, region_loss=region_loss)
    described = dataclasses.replace(what, model=dataclasses.replace(what.model, regions=regions), task=task)
    check_switches(case.metadata["config"], switches(described))
    return described


def switches(what: PublishedVLBert) -> dict[str, Any]:
    """Return the switches of a configuration of theirs under which this model computes what theirs does."""
    model, regions, task, either = what.model, what.model.regions, what.task, (True, False)
    end_to_end, pretraining = regions.features == "end_to_end", isinstance(task, PretrainingSettings)
    region_loss = task.region_loss if isinstance(task, VCRSettings) else "none"
    classifier = {"linear": ("1fc",), "two_layers": ("2fc",), "words": ("mlm",)}.get(getattr(task, "classifier", ""))
    core = {
        "hidden_size": (model.hidden_size,),
        "visual_size": (model.visual_embedding_size or model.hidden_size,),
        "num_hidden_layers": (len(model.layers),),
        "num_attention_heads": (model.num_heads,),
        "intermediate_size": (model.intermediate_size,),
        "max_position_embeddings": (model.max_positions,),
        "vocab_size": (what.vocab_size,),
        "type_vocab_size": (3,),
        "visual_region_classes": (1601,),
        "object_word_embed_mode": (1 if model.region_classes else 2,),
        "with_pooler": either,  # a pooler that is not read has no place in our model
        "hidden_act": ("gelu",),
        "visual_ln": (True,),
        "obj_pos_id_relative": (True,),
        "position_padding_idx": (-1,),
        "word_embedding_frozen": (False,),
        "pos_embedding_frozen": (False,),
        "input_size": (1280,),
        "input_transform_type": (1,),
        **_unread("hidden_dropout_prob attention_probs_dropout_prob"),
        **_unread("from_scratch initializer_range visual_scale_text_init visual_scale_object_init"),
    }
    off = ("BLIND", "NO_GROUNDING", "NO_OBJ_ATTENTION", "IMAGE_SEMANTIC", "OUTPUT_CONV5", "QA_ONE_SENT", "ANSWER_FIRST")
    off += ("BERT_FROZEN", "BERT_WITH_NSP_LOSS", "BERT_WITH_MLM_LOSS", "FOR_MASK_VL_MODELING_PRETRAIN")
    network = {
        "VLBERT": core,
        **dict.fromkeys(off, (False,)),
        "IMAGE_FEAT_PRECOMPUTED": (not end_to_end,),
        "IMAGE_NUM_LAYERS": (2 + 3 * sum(regions.resnet.blocks),) if end_to_end else ...,
        "IMAGE_C5_DILATED": either,
        "IMAGE_STRIDE_IN_1x1": either,
        "IMAGE_FROZEN_BN": either,
        "IMAGE_FROZEN_BACKBONE_STAGES": ([*range(1, regions.frozen_stages + 1)],),
        "IMAGE_FINAL_DIM": core["visual_size"],
        "PIXEL_MEANS": ([*regions.pixel_mean],),
        "PIXEL_STDS": ([regions.pixel_std] * 3,),
        "MASK_RAW_PIXELS": (regions.masking == "pixels",) if pretraining and end_to_end else either,
        "WITH_REL_LOSS": (pretraining and task.relationship,),
        "WITH_MLM_LOSS": either,
        "WITH_MVRC_LOSS": either,
        "MLM_LOSS_NORM_IN_BATCH_FIRST": either,
        "MVRC_LOSS_NORM_IN_BATCH_FIRST": either,
        "ENABLE_CNN_REG_LOSS": (region_loss != "none",),
        "CNN_LOSS_TOP": either if region_loss == "none" else (region_loss == "contextual",),
        "CNN_LOSS_WEIGHT": (1,),
        "ANS_LOSS_WEIGHT": (1,),
        "ANS_LOSS_TYPE": ("bce",),
        "CLASSIFIER_TYPE": classifier or ("1fc", "2fc", "mlm"),
        "CLASSIFIER_HIDDEN_SIZE": (task.classifier_width,) if classifier == ("2fc",) else ...,
        "CLASSIFIER_SIGMOID": (isinstance(task, VCRSettings) and task.loss == "sigmoid",),
        "CLASSIFIER_SIGMOID_LOSS_POSITIVE_WEIGHT": (1,),
        "BERT_ALIGN_QUESTION": (True,),
        "BERT_ALIGN_ANSWER": (True,),
        "BERT_USE_LAYER": (-2,),
        "REPLACE_OBJECT_CHANGE_LABEL": (True,),
        **_unread("CLASSIFIER_DROPOUT CNN_REG_DROPOUT CLASSIFIER_PRETRAINED LOAD_REL_HEAD PARTIAL_PRETRAIN"),
        **_unread(
            "PARTIAL_PRETRAIN_PREFIX_CHANGES PARTIAL_PRETRAIN_SEGMB_INIT IMAGE_PRETRAINED IMAGE_PRETRAINED_EPOCH"
        ),
        **_unread("BERT_MODEL_NAME BERT_PRETRAINED BERT_PRETRAINED_EPOCH"),
    }
    modules = ("", "ForPretraining", "ForPretrainingMultitask")
    return _OUTSIDE | {"NETWORK": network, "MODULE": tuple(f"ResNetVLBERT{kind}" for kind in modules)}


def _unread(names: str) -> dict[str, Any]:
    """Return the switches of what a case has done already: its start, its reading, and its training."""
    return dict.fromkeys(names.split(), ...)


_TRAINING = _unread(
    "LR_MULT VISUAL_SCALE_TEXT_LR_MULT VISUAL_SCALE_OBJECT_LR_MULT VISUAL_SCALE_CLIP_GRAD_NORM SHUFFLE FLIP_PROB "
    "BATCH_IMAGES ASPECT_GROUPING RESUME AUTO_RESUME BEGIN_EPOCH END_EPOCH TEST_EPOCH OPTIMIZER CLIP_GRAD_NORM "
    "GRAD_ACCUMULATE_STEPS LR LR_SCHEDULE LR_FACTOR LR_STEP WARMUP WARMUP_METHOD WARMUP_FACTOR WARMUP_STEPS WD "
    "MOMENTUM FP16 FP16_LOSS_SCALE LOSS_LOGGERS"
)
_DATA = _unread(
    "DATASET APPEND_INDEX DATASET_PATH ROOT_PATH TRAIN_IMAGE_SET VAL_IMAGE_SET TEST_IMAGE_SET ZIP_MODE CACHE_MODE "
    "IGNORE_DB_CACHE MASK_SIZE ANSWER_VOCAB_FILE ANSWER_VOCAB_SIZE LABEL_INDEX_IN_BATCH TASK TRAIN_ANNOTATION_FILE "
    "VAL_ANNOTATION_FILE TEST_ANNOTATION_FILE ONLY_USE_RELEVANT_DETS QA2R_NOQ QA2R_AUG SEQ_LEN MIN_SEQ_LEN TRAIN_BOXES "
    "VAL_BOXES TEST_BOXES PROPOSAL_SOURCE USE_IMDB BOXES"
)
_OUTSIDE = {
    "DATASET": _DATA | {"ADD_IMAGE_AS_A_BOX": (True,), "BASIC_ALIGN": (False,)},
    "TRAIN": _TRAINING,
    "VAL": _TRAINING,
    "TEST": _TRAINING,
    **_unread("RNG_SEED OUTPUT_PATH GPUS LOG_FREQUENT VAL_FREQUENT CHECKPOINT_FREQUENT MODEL_PREFIX SCALES"),
    **_unread("NUM_WORKERS_PER_GPU"),
}


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
    must not see. A zero that no masked region explains is the image's own.
    """
    image = case.tensor("in/image")[row, :, :height, :width]
    hidden = torch.zeros(height, width, dtype=torch.bool)
    if "in/mvrc_ops" in case.arrays and case.network.get("MASK_RAW_PIXELS", True):
        for x1, y1, x2, y2 in case.tensor("in/boxes")[row, case.tensor("in/mvrc_ops")[row] == 1, :4].int().tolist():
            hidden[y1 : y2 + 1, x1 : x2 + 1] = True
    noise = np.random.default_rng(row).uniform(0, 255, image.shape).astype(np.float32)
    pixels = image + torch.tensor(case.network["PIXEL_MEANS"])[:, None, None]
    return torch.where(hidden & (image == 0).all(dim=0), torch.from_numpy(noise), pixels).flip(0)


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


def _tagged(rows: np.ndarray) -> np.ndarray:
    """Return (word pieces, the region that each names) of [L, 3] rows, -2 behind their end."""
    rows = rows[rows[:, 0] >= 0]
    return rows[:, :2].T


BATCHES: dict[type, Callable[[VLBertCase, Task], Batch]] = {
    Pretraining: pretraining_batch,
    VQA: vqa_batch,
    RefCOCO: refcoco_batch,
    VCR: vcr_batch,
}
