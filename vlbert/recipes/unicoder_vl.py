"""Recipes of Unicoder-VL (AAAI 2020). Its program is not published. Where the paper is silent or can be read in two
ways, variant `nearest` does what the programs nearest to it do, and `paper` is the literal reading; `vlbert recipes`
prints how they differ.
"""

from dataclasses import replace
from typing import Literal

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
    layers="J" * 12,
    embedding="separate",
    whole_image="none",
    head_initialisation="normal",
    regions=RegionConfig(features="precomputed"),
)

OPTIMIZER = OptimizerConfig(learning_rate=1e-4, weight_decay=0.01, decayed="matrices", max_grad_norm=1.0)


def pretrain_unicoder_vl(size: Size = "base", variant: Literal["nearest", "paper"] = "nearest") -> Recipe:
    """198,000 steps (10 epochs of 3.8 M captions: Conceptual Captions and SBU) of 192 captions, on features kept by the
    detector: its 100 best regions (selection.minimum=100). Both: --data.datasets conceptual-captions sbu.

    Variant paper: every chosen word becomes [MASK], regions have one layer, and the pair is read at [CLS] itself. A
    fine-tuning of it takes --model.pooler none, too.
    """
    paper = variant == "paper"
    name = f"pretrain_unicoder_vl_{size}" + "_paper" * paper
    if size == "demo":
        if paper:
            raise ValueError(f"there is no {name}: the demo has no variants")
        return demo.pretrain("unicoder_vl", "precomputed", name)
    return Recipe(
        name=name,
        task=PretrainingSettings(
            words=WordMasking(whole_words=False, **({"masked": 1.0, "random": 0.0} if paper else {})),
            max_elements=None,
            max_regions=100,
            caption_length=42,
            region_target="class",
            relationship=True,
            mismatched=0.5,
            region_head="linear" if paper else "transform_norm",
        ),
        model=replace(UNICODER_VL_BASE, pooler="none") if paper else UNICODER_VL_BASE,
        data=DataConfig(batch=192, gradient_accumulation=4),
        optimizer=replace(OPTIMIZER, warmup_steps=19_800),
        steps=198_000,
        bert="bert-base-uncased",
    )


def _finetuning(recipe: Recipe, name: str, learning_rate: float, batch: int) -> Recipe:
    """10 epochs as those of a VL-BERT's recipe, 10 % of them warm-up."""
    epoch = recipe.validate_every * recipe.data.batch // batch
    return replace(
        recipe,
        name=name,
        model=UNICODER_VL_BASE,
        data=replace(recipe.data, batch=batch, gradient_accumulation=1, flip=0.0),
        optimizer=replace(OPTIMIZER, learning_rate=learning_rate, warmup_steps=epoch),
        steps=10 * epoch,
        validate_every=epoch,
        save_every=epoch,
        bert=None,
        precision="bf16",
    )


def finetune_retrieval_unicoder_vl(size: Size = "base") -> Recipe:
    """10 epochs of 192 captions of Flickr30k a step, each with three wrong images and captions (section 3.3). The other
    settings for COCO are those of finetune_retrieval."""
    name = f"finetune_retrieval_unicoder_vl_{size}"
    if size == "demo":
        return demo.finetune_retrieval("unicoder_vl", "precomputed", name)
    recipe = _finetuning(vlbert.finetune_retrieval(), name, 5e-5, 192)
    data = replace(recipe.data, gradient_accumulation=4)
    return replace(recipe, task=RetrievalSettings(caption_length=42, max_regions=100), data=data)


def finetune_vcr_unicoder_vl(size: Size = "base") -> Recipe:
    """20 epochs of 48 questions a step (section 4.2); --task.subtask rationale is the second run."""
    name = f"finetune_vcr_unicoder_vl_{size}"
    if size == "demo":
        return demo.finetune_vcr("unicoder_vl", "precomputed", name)
    recipe = _finetuning(vlbert.finetune_vcr(), name, 3e-5, 48)
    task = VCRSettings(
        instance_masks=False,
        names="class",
        loss="softmax",
        region_loss="none",
        detected_regions=True,
    )
    model = replace(recipe.model, mentioned_regions=True)
    return replace(recipe, task=task, model=model, steps=2 * recipe.steps)


def finetune_vqa_unicoder_vl(size: Size = "base") -> Recipe:
    """10 epochs of 256 questions a step. The paper has no VQA: the classifier is that of the programs near it."""
    name = f"finetune_vqa_unicoder_vl_{size}"
    if size == "demo":
        return demo.finetune_vqa("unicoder_vl", "precomputed", name)
    recipe = _finetuning(vlbert.finetune_vqa(), name, 5e-5, 256)
    return replace(recipe, task=VQASettings(reads="pair", classifier="gelu_norm", answers_from_words=False))


def finetune_refcoco_unicoder_vl(size: Size = "base") -> Recipe:
    """10 epochs of 256 expressions a step, on detected regions. The paper has no RefCOCO+: the classifier is ViLBERT's,
    and the whole image, which the model does not read, is no candidate."""
    name = f"finetune_refcoco_unicoder_vl_{size}"
    if size == "demo":
        return demo.finetune_refcoco("unicoder_vl", "precomputed", name)
    recipe = _finetuning(vlbert.finetune_refcoco(), name, 5e-5, 256)
    task = RefCOCOSettings(
        regions="detected",
        target="iou",
        loss_over="rows",
        classifier="linear",
        classifier_dropout=0.1,
    )
    return replace(recipe, task=task)
