"""Recipes of ViLBERT, with the rules of its authors' first program, that of the paper (NeurIPS 2019); `_multi_task` are
those of its successor (12-in-1), where the two differ. `vlbert recipes` prints how.
"""

from dataclasses import replace

from storage.settings import override_values
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.recipes.vlbert import finetune_refcoco_base, finetune_retrieval_base, finetune_vcr_base, finetune_vqa_base
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

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


def pretrain_vilbert_base() -> Recipe:
    """64,450 steps (10 epochs) of 512 captions, on features kept by the detector; the authors ran it on 8 GPUs."""
    return Recipe(
        name="pretrain_vilbert_base",
        task=PretrainingSettings(
            words=WordMasking(whole_words=False),
            regions=RegionMasking(),
            max_elements=None,
            max_regions=36,
            caption_length=34,
            relationship=True,
            mismatched=0.5,
            mismatched_labels=True,
            related_class=0,
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


def pretrain_vilbert_base_multi_task() -> Recipe:
    """As base, with the rules of 12-in-1's program: mismatched pairs have no labels, and one rate for all tensors."""
    changes = {
        "name": "pretrain_vilbert_base_multi_task",
        "task.mismatched_labels": False,
        "task.mean_over": "not_overlapping",
        "optimizer.bert_learning_rate": None,
        "optimizer.bias_correction": True,
    }
    return override_values(pretrain_vilbert_base(), changes | _OPTIMIZER_OF_MULTI_TASK)


def _finetuning(recipe: Recipe, name: str, learning_rate: float, batch: int) -> Recipe:
    """20 epochs as those of a VL-BERT's recipe; a tenth of the rate from epochs 12 and 16 on."""
    epoch = recipe.validate_every * recipe.data.batch // batch
    optimizer = replace(
        OPTIMIZER,
        learning_rate=learning_rate,
        warmup_steps=2 * epoch,
        schedule="step",
        decay_at=(12 * epoch, 16 * epoch),
    )
    return replace(
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


def _of_multi_task(recipe: Recipe, learning_rate: float, **changes: object) -> Recipe:
    """The recipe with the optimizer of 12-in-1's program: linear to 0 behind the warm-up."""
    linear = {"optimizer.learning_rate": learning_rate, "optimizer.schedule": "linear", "optimizer.decay_at": ()}
    values = linear | {f"task.{field}": value for field, value in changes.items()}
    return override_values(replace(recipe, name=f"{recipe.name}_multi_task"), values | _OPTIMIZER_OF_MULTI_TASK)


def finetune_vqa_vilbert_base() -> Recipe:
    """20 epochs of 256 questions a step."""
    recipe = _finetuning(finetune_vqa_base(), "finetune_vqa_vilbert_base", 4e-5, 256)
    task = VQASettings(
        reads="pair",
        classifier="weight_norm",
        classifier_dropout=0.5,
        answers_from_words=False,
    )
    return replace(recipe, task=task)


def finetune_vqa_vilbert_base_multi_task() -> Recipe:
    """As base, with the classifier and the optimizer of 12-in-1's program."""
    recipe = finetune_vqa_vilbert_base()
    return _of_multi_task(recipe, 4e-5, classifier="gelu_norm", classifier_dropout=0.0)


def finetune_vcr_vilbert_base() -> Recipe:
    """20 epochs of 64 questions a step; task.subtask=rationale task.max_tokens=77 is the second run."""
    recipe = _finetuning(finetune_vcr_base(), "finetune_vcr_vilbert_base", 2e-5, 64)
    task = VCRSettings(
        max_tokens=57,
        instance_masks=False,
        loss="softmax",
        region_loss="none",
        detected_regions=True,
        copies_segment=False,
    )
    return replace(recipe, task=task)


def finetune_refcoco_vilbert_base() -> Recipe:
    """20 epochs of 256 expressions a step, on detected regions."""
    recipe = _finetuning(finetune_refcoco_base(), "finetune_refcoco_vilbert_base", 4e-5, 256)
    task = RefCOCOSettings(
        regions="detected",
        whole_image_competes=True,
        target="iou",
        loss_over="rows",
        classifier="linear",
        classifier_dropout=0.1,
    )
    return replace(recipe, task=task)


def finetune_refcoco_vilbert_base_multi_task() -> Recipe:
    """As base, with the optimizer of 12-in-1's program."""
    return _of_multi_task(finetune_refcoco_vilbert_base(), 2e-5)


def finetune_retrieval_vilbert_base() -> Recipe:
    """20 epochs of 64 captions of Flickr30k a step, each as one of four pairs."""
    recipe = _finetuning(finetune_retrieval_base(), "finetune_retrieval_vilbert_base", 4e-5, 64)
    task = RetrievalSettings(caption_length=28, max_regions=100, loss="cross_entropy", wrong_captions=2, wrong_images=1)
    return replace(recipe, task=task)


def finetune_retrieval_vilbert_base_multi_task() -> Recipe:
    """As base, with the optimizer of 12-in-1's program and its batch of 128."""
    recipe = finetune_retrieval_vilbert_base()
    epoch = recipe.validate_every // 2
    changes = {"data.batch": 128, "optimizer.warmup_steps": 2 * epoch, "steps": 20 * epoch}
    changes |= {"validate_every": epoch, "save_every": epoch}
    return override_values(_of_multi_task(recipe, 2e-5), changes)
