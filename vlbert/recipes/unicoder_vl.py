"""Recipes of Unicoder-VL (AAAI 2020). Its program is not published. Where the paper is silent or can be read in two
ways, these do what the programs nearest to it do.
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

UNICODER_VL_BASE = ModelConfig(
    embedding="separate",
    whole_image="none",
    head_initialisation="normal",
    regions=RegionConfig(features="precomputed"),
)

OPTIMIZER = OptimizerConfig(learning_rate=1e-4, weight_decay=0.01, decayed="matrices", max_grad_norm=1.0)


def pretrain_unicoder_vl(size: Size = "base") -> Recipe:
    """198,000 steps (10 epochs of 3.8 M captions: Conceptual Captions and SBU) of 192 captions, on features kept by the
    detector: its 100 best regions (selection.minimum=100). Both: --data.datasets conceptual-captions sbu.

    The literal reading of the paper masks every chosen word, --task.words.masked 1 --task.words.random 0, gives regions
    one layer, --task.region_head linear, and reads the pair at [CLS] itself, --model.pooler none, here and in a
    fine-tuning of it.
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
        data=DataConfig(batch=192, gradient_accumulation=4),
        optimizer=replace(OPTIMIZER, warmup_steps=19_800),
        steps=198_000,
        bert="bert-base-uncased",
    )


def finetune_retrieval_unicoder_vl(size: Size = "base") -> Recipe:
    """10 epochs of 192 captions of Flickr30k a step, each with three wrong images and captions (section 3.3). The other
    settings for COCO are those of finetune_retrieval."""
    recipe = _finetuned("retrieval", size, RetrievalSettings(caption_length=42, max_regions=100), 5e-5, 192)
    return recipe if size == "demo" else override_values(recipe, {"data.gradient_accumulation": 4})


def finetune_vcr_unicoder_vl(size: Size = "base") -> Recipe:
    """20 epochs of 48 questions a step (section 4.2); --task.subtask rationale is the second run."""
    task = VCRSettings(
        instance_masks=False,
        names="class",
        loss="softmax",
        region_loss="none",
        detected_regions=True,
    )
    recipe = _finetuned("vcr", size, task, 3e-5, 48, epochs=20)
    return override_values(recipe, {"model.mentioned_regions": True})


def finetune_vqa_unicoder_vl(size: Size = "base") -> Recipe:
    """10 epochs of 256 questions a step. The paper has no VQA: the classifier is that of the programs near it."""
    task = VQASettings(reads="pair", classifier="gelu_norm", answers_from_words=False)
    return _finetuned("vqa", size, task, 5e-5, 256)


def finetune_refcoco_unicoder_vl(size: Size = "base") -> Recipe:
    """10 epochs of 256 expressions a step, on detected regions. The paper has no RefCOCO+: the classifier is ViLBERT's,
    and the whole image, which the model does not read, is no candidate."""
    task = RefCOCOSettings(
        regions="detected",
        target="iou",
        loss_over="rows",
        classifier="linear",
        classifier_dropout=0.1,
    )
    return _finetuned("refcoco", size, task, 5e-5, 256)


def _finetuned(what: str, size: Size, task: Any, learning_rate: float, batch: int, epochs: int = 10) -> Recipe:
    """The fine-tuning of this model; an epoch of it is warm-up."""

    def optimizer(epoch: int) -> OptimizerConfig:
        return replace(OPTIMIZER, learning_rate=learning_rate, warmup_steps=epoch)

    return vlbert.finetuned("unicoder_vl", what, size, task, UNICODER_VL_BASE, optimizer, batch, epochs, "bf16")
