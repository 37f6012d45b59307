"""Recipes of Unicoder-VL (AAAI 2020).

Its code is not published. Where the paper is silent or ambiguous, the recipes follow the code of similar models.
"""

from dataclasses import replace
from typing import Any, Literal

from storage.settings import override_values
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.masking import WordMasking
from vlbert.recipes import demo, vilbert, vlbert
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

Size = Literal["base", "demo"]

UNICODER_VL_BASE = ModelConfig(
    embedding="separate",
    whole_image="none",
    head_initialisation="normal",
    regions=RegionConfig(features="precomputed"),
)

OPTIMIZER = OptimizerConfig(learning_rate=1e-4, weight_decay=0.01, decayed="matrices", max_grad_norm=1.0)


def pretrain_unicoder_vl(size: Size = "base") -> Recipe:
    """Configure pre-training on precomputed features: 10 epochs of 3.8 M captions, 192 per step (198,000 steps).

    The captions are Conceptual Captions and SBU: --data.datasets conceptual-captions sbu. The features are those of the
    detector's 100 best regions (selection.minimum=100).

    Three options follow the paper more literally: mask every chosen word (--task.words.masked 1 --task.words.random 0),
    use a single layer for regions (--task.region_head linear), and use no pooler at [CLS] (--model.pooler none, also in
    fine-tuning).
    """
    name = f"pretrain_unicoder_vl_{size}"
    if size == "demo":
        return demo.pretrain("unicoder_vl", "precomputed", name)
    return Recipe(
        name=name,
        task=PretrainingSettings(
            words=WordMasking(whole_words=False),
            max_elements=None,
            max_regions=100,
            caption_length=42,
            region_target="class",
            relationship=True,
            mismatched=0.5,
            region_head="transform_norm",
        ),
        model=UNICODER_VL_BASE,
        data=DataConfig(batch=192, gradient_accumulation=4, held_out_share=vlbert.HELD_OUT_SHARE),
        optimizer=replace(OPTIMIZER, warmup_steps=19_800),
        steps=198_000,
        bert="bert-base-uncased",
    )


def finetune_retrieval_unicoder_vl(size: Size = "base") -> Recipe:
    """Configure fine-tuning on Flickr30k (paper 3.3): 10 epochs, 192 captions per step.

    Each caption is paired with 3 wrong images, and its image with 3 wrong captions.
    """
    # For COCO, set the fields that finetune_retrieval names.
    recipe = _finetune("retrieval", size, RetrievalSettings(caption_length=42, max_regions=100), 5e-5, 192)
    return recipe if size == "demo" else override_values(recipe, {"data.gradient_accumulation": 4})


def finetune_vcr_unicoder_vl(size: Size = "base") -> Recipe:
    """Configure fine-tuning on VCR (paper 4.2): 20 epochs, 48 questions per step.

    For rationales (QA->R) instead of answers (Q->A), add --task.subtask rationale.
    """
    task = VCRSettings(
        instance_masks=False,
        names="class",
        loss="softmax",
        region_loss="none",
        detected_regions=True,
    )
    recipe = _finetune("vcr", size, task, 3e-5, 48, epochs=20)
    return override_values(recipe, {"model.mentioned_regions": True})


def finetune_vqa_unicoder_vl(size: Size = "base") -> Recipe:
    """Configure fine-tuning on VQA: 10 epochs, 256 questions per step."""
    # The paper has no VQA. The head is that of similar models.
    task = VQASettings(reads="pair", classifier="gelu_norm", answers_from_words=False)
    return _finetune("vqa", size, task, 5e-5, 256)


def finetune_refcoco_unicoder_vl(size: Size = "base") -> Recipe:
    """Configure fine-tuning on RefCOCO+: 10 epochs, 256 expressions per step, on detected regions."""
    # The paper has no RefCOCO+. The settings are ViLBERT's. The model does not read the whole image, so it cannot be a
    # candidate.
    return _finetune("refcoco", size, replace(vilbert.REFCOCO, whole_image_competes=False), 5e-5, 256)


def _finetune(task_name: str, size: Size, task: Any, learning_rate: float, batch: int, epochs: int = 10) -> Recipe:
    """Return a recipe that fine-tunes Unicoder-VL, with one epoch of warmup."""

    def optimizer(epoch: int) -> OptimizerConfig:
        return replace(OPTIMIZER, learning_rate=learning_rate, warmup_steps=epoch)

    return vlbert.make_finetuning(
        "unicoder_vl", task_name, size, task, UNICODER_VL_BASE, optimizer, batch, epochs, "bf16"
    )
