"""Recipes of ViLBERT, following the authors' original code release (NeurIPS 2019).

The `multi_task` variant of pretrain_vilbert follows their later release (12-in-1) where the two differ.
"""

from dataclasses import replace
from typing import Any, Literal

from storage.settings import override_values
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.masking import WordMasking
from vlbert.recipes import demo, vlbert
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

Size = Literal["base", "demo"]
Program = Literal["paper", "multi_task"]

VILBERT_BASE = ModelConfig(
    layers="T" * 6 + "XTV" * 6,
    embedding="separate",
    region_hidden_size=1024,
    region_num_heads=8,
    region_intermediate_size=1024,
    coattention_size=1024,
    coattention_num_heads=8,
    whole_image="mean",
    pooler="product",
    head_initialisation="normal",
    regions=RegionConfig(features="precomputed", masked_features="zeros"),
)

OPTIMIZER = OptimizerConfig(
    learning_rate=1e-4,
    weight_decay=0.01,
    decayed="vectors",
    bert_adam=False,
    bias_correction=False,
    max_grad_norm=1.0,
    clip_each=True,
    zero_update="first",
    # The authors' code tells vectors from matrices by their names, and does not recognise these LayerNorms.
    as_matrices=("text.attention_norm.weight", "regions.attention_norm.weight", "classifier.norm.weight"),
)

REFCOCO = RefCOCOSettings(
    regions="detected",
    whole_image_competes=True,
    iou="vilbert",
    target="iou",
    loss_over="rows",
    classifier="linear",
    classifier_dropout=0.1,
)


def pretrain_vilbert(size: Size = "base", variant: Program = "paper") -> Recipe:
    """Configure pre-training on precomputed features: 64,450 steps (10 epochs) of 512 captions.

    The authors used 8 GPUs. In the `multi_task` variant, words and regions of mismatched pairs have no labels, and
    all tensors have the same learning rate.
    """
    name = f"pretrain_vilbert_{size}" + "_multi_task" * (variant == "multi_task")
    if size == "demo":
        if variant != "paper":
            raise ValueError(f"there is no recipe {name}: the demo has no variants")
        return demo.pretrain("vilbert", "precomputed", name)
    recipe = Recipe(
        name=name,
        task=PretrainingSettings(
            words=WordMasking(whole_words=False, random_from="all"),
            max_elements=None,
            max_regions=36,
            caption_length=34,
            relationship=True,
            mismatched=0.5,
            mismatched_labels=True,
            region_head="transform_norm",
            region_loss="kl",
        ),
        model=VILBERT_BASE,
        data=DataConfig(batch=512, held_out_share=vlbert.HELD_OUT_SHARE),
        optimizer=replace(OPTIMIZER, bert_learning_rate=1e-5, warmup_steps=6_445),
        steps=64_450,
        bert="bert-base-uncased",
        precision="fp32",
    )
    if variant == "paper":
        return recipe
    changes = {
        "task.mismatched_labels": False,
        "task.mean_over": "not_overlapping",
        "optimizer.bert_learning_rate": None,
        "optimizer.bias_correction": True,
        "optimizer.betas": (0.9, 0.98),
        "optimizer.epsilon": 1e-8,
        "optimizer.decayed": "matrices",
        "optimizer.bert_adam": True,
        "optimizer.max_grad_norm": None,
        "optimizer.clip_each": False,
        "optimizer.zero_update": "last",
    }
    return override_values(recipe, changes)


def finetune_vqa_vilbert(size: Size = "base") -> Recipe:
    """Configure fine-tuning on VQA: 20 epochs, 256 questions per step."""
    task = VQASettings(reads="pair", classifier="weight_norm", classifier_dropout=0.5, answers_from_words=False)
    return _finetune("vqa", size, task, 4e-5, 256)


def finetune_vcr_vilbert(size: Size = "base") -> Recipe:
    """Configure fine-tuning on VCR: 20 epochs, 64 questions per step.

    For rationales (QA->R) instead of answers (Q->A), add --task.subtask rationale --task.max_tokens 77.
    """
    task = VCRSettings(
        max_tokens=57,
        instance_masks=False,
        loss="softmax",
        region_loss="none",
        detected_regions=True,
        copies_segment=False,
    )
    return _finetune("vcr", size, task, 2e-5, 64)


def finetune_refcoco_vilbert(size: Size = "base") -> Recipe:
    """Configure fine-tuning on RefCOCO+: 20 epochs, 256 expressions per step, on detected regions."""
    return _finetune("refcoco", size, REFCOCO, 4e-5, 256)


def finetune_retrieval_vilbert(size: Size = "base") -> Recipe:
    """Configure fine-tuning on Flickr30k: 20 epochs, 64 matching and 192 mismatched pairs per step."""
    task = RetrievalSettings(caption_length=28, max_regions=100, loss="cross_entropy", wrong_captions=2, wrong_images=1)
    return _finetune("retrieval", size, task, 4e-5, 64)


def _finetune(task_name: str, size: Size, task: Any, learning_rate: float, batch: int) -> Recipe:
    """Return a recipe that fine-tunes for 20 epochs. The learning rate is divided by 10 after epochs 12 and 16."""

    def optimizer(epoch: int) -> OptimizerConfig:
        settings = {"warmup_steps": 2 * epoch, "schedule": "step", "decay_at": (12 * epoch, 16 * epoch)}
        return replace(OPTIMIZER, learning_rate=learning_rate, **settings)

    return vlbert.make_finetuning("vilbert", task_name, size, task, VILBERT_BASE, optimizer, batch, 20, "fp32")
