"""Recipes of ViLBERT. Variant `paper` has the rules of its authors' first program, that of the paper (NeurIPS 2019),
`multi_task` those of its successor (12-in-1), where the two differ. `vlbert recipes` prints how.
"""

from dataclasses import replace
from typing import Literal

from storage.settings import override_values
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.masking import RegionMasking, WordMasking
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
)
_OPTIMIZER_OF_MULTI_TASK = {
    "optimizer.betas": (0.9, 0.98),
    "optimizer.epsilon": 1e-8,
    "optimizer.decayed": "matrices",
    "optimizer.bert_adam": True,
    "optimizer.max_grad_norm": None,
    "optimizer.clip_each": False,
}


def pretrain_vilbert(size: Size = "base", variant: Program = "paper") -> Recipe:
    """64,450 steps (10 epochs) of 512 captions, on features kept by the detector; the authors ran it on 8 GPUs. Variant
    multi_task: mismatched pairs have no labels, and one rate for all tensors."""
    name = _name("pretrain_vilbert", size, variant)
    if size == "demo":
        return demo.pretrain("vilbert", "precomputed", name)
    recipe = Recipe(
        name=name,
        task=PretrainingSettings(
            words=WordMasking(whole_words=False),
            regions=RegionMasking(),
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
        data=DataConfig(batch=512),
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
    }
    return override_values(recipe, changes | _OPTIMIZER_OF_MULTI_TASK)


def finetune_vqa_vilbert(size: Size = "base", variant: Program = "paper") -> Recipe:
    """20 epochs of 256 questions a step. Variant multi_task: with the classifier of 12-in-1's program."""
    name = _name("finetune_vqa_vilbert", size, variant)
    if size == "demo":
        return demo.finetune_vqa("vilbert", "precomputed", name)
    recipe = _finetuning(vlbert.finetune_vqa(), name, variant, 4e-5, 256)
    classifier = ("weight_norm", 0.5) if variant == "paper" else ("gelu_norm", 0.0)
    task = VQASettings(
        reads="pair", classifier=classifier[0], classifier_dropout=classifier[1], answers_from_words=False
    )
    return replace(recipe, task=task)


def finetune_vcr_vilbert(size: Size = "base") -> Recipe:
    """20 epochs of 64 questions a step; --task.subtask rationale --task.max_tokens 77 is the second run."""
    name = _name("finetune_vcr_vilbert", size)
    if size == "demo":
        return demo.finetune_vcr("vilbert", "precomputed", name)
    recipe = _finetuning(vlbert.finetune_vcr(), name, "paper", 2e-5, 64)
    task = VCRSettings(
        max_tokens=57,
        instance_masks=False,
        loss="softmax",
        region_loss="none",
        detected_regions=True,
        copies_segment=False,
    )
    return replace(recipe, task=task)


def finetune_refcoco_vilbert(size: Size = "base", variant: Program = "paper") -> Recipe:
    """20 epochs of 256 expressions a step, on detected regions."""
    name = _name("finetune_refcoco_vilbert", size, variant)
    if size == "demo":
        return demo.finetune_refcoco("vilbert", "precomputed", name)
    recipe = _finetuning(vlbert.finetune_refcoco(), name, variant, 4e-5 if variant == "paper" else 2e-5, 256)
    task = RefCOCOSettings(
        regions="detected",
        whole_image_competes=True,
        target="iou",
        loss_over="rows",
        classifier="linear",
        classifier_dropout=0.1,
    )
    return replace(recipe, task=task)


def finetune_retrieval_vilbert(size: Size = "base", variant: Program = "paper") -> Recipe:
    """20 epochs of 64 captions of Flickr30k a step, each as one of four pairs; variant multi_task: of 128."""
    name = _name("finetune_retrieval_vilbert", size, variant)
    if size == "demo":
        return demo.finetune_retrieval("vilbert", "precomputed", name)
    rate, batch = (4e-5, 64) if variant == "paper" else (2e-5, 128)
    recipe = _finetuning(vlbert.finetune_retrieval(), name, variant, rate, batch)
    task = RetrievalSettings(caption_length=28, max_regions=100, loss="cross_entropy", wrong_captions=2, wrong_images=1)
    return replace(recipe, task=task)


def _name(recipe: str, size: str, variant: Program = "paper") -> str:
    """The recipe's name. Raises ValueError for a variant of the demo, which has one alone."""
    if size == "demo" and variant != "paper":
        raise ValueError(f"there is no {recipe}_demo_{variant}: the demo has no variants")
    return f"{recipe}_{size}" + "_multi_task" * (variant == "multi_task")


def _finetuning(recipe: Recipe, name: str, variant: Program, learning_rate: float, batch: int) -> Recipe:
    """20 epochs as those of a VL-BERT's recipe; a tenth of the rate from epochs 12 and 16 on. Variant multi_task:
    linear to 0 behind the warm-up."""
    epoch = recipe.validate_every * recipe.data.batch // batch
    optimizer = replace(
        OPTIMIZER,
        learning_rate=learning_rate,
        warmup_steps=2 * epoch,
        schedule="step",
        decay_at=(12 * epoch, 16 * epoch),
    )
    recipe = replace(
        recipe,
        name=name,
        model=VILBERT_BASE,
        data=replace(recipe.data, batch=batch, gradient_accumulation=1, flip=0.0),
        optimizer=optimizer,
        steps=20 * epoch,
        validate_every=epoch,
        save_every=epoch,
        bert=None,
        precision="fp32",
    )
    if variant == "paper":
        return recipe
    linear = {"optimizer.schedule": "linear", "optimizer.decay_at": ()}
    return override_values(recipe, linear | _OPTIMIZER_OF_MULTI_TASK)
