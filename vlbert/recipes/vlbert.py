"""Recipes of VL-BERT.

Variant `published` follows the authors' code. Variant `paper` follows the paper, with the learning rates, batches and
steps of its appendix A.2. vlbert/variants.py lists the other differences.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from storage.settings import override_values
from training.optimizer import OptimizerConfig
from vlbert import variants
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.recipes import demo
from vlbert.recipes.demo import Features
from vlbert.tasks.labels import LabelSettings
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
from vlbert.variants import Variant

Size = Literal["base", "large", "demo"]
HELD_OUT_SHARE = 0.002  # of the captions of a pre-training: 6,600 of Conceptual Captions
_SIZE_OF_LARGE = {"layers": "J" * 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}


def pretrain_vlbert(size: Size = "base", features: Features = "end_to_end", variant: Variant = "published") -> Recipe:
    """Configure pre-training for 250k steps (10 epochs) of 128 captions and 128 text-only rows.

    To fine-tune on VQA later, use precomputed features. The base model takes 2 days on 16 V100 GPUs, or 30 hours on 4
    GPUs with precomputed features. The large model takes 5.5 days on 16 GPUs.
    """
    precomputed = features == "precomputed"
    name = _make_name("pretrain_vlbert", size, "precomputed" * precomputed, variant)
    if size == "demo":
        return demo.pretrain("vlbert", features, name)
    # The authors' learning rate is per sample, 1e-7 x 256.
    optimizer = OptimizerConfig(learning_rate=2.56e-5, warmup_steps=16_000)
    if variant == "paper":  # 4.1 and A.2
        _refuse(precomputed, name, "the paper trains end to end")
        optimizer = OptimizerConfig(learning_rate=2e-5, warmup_steps=8_000)
    # Large: two backward passes per step, as the authors' GPUs had memory for.
    passes = 2 if size == "large" and not precomputed else 1
    recipe = Recipe(
        name=name,
        task=PretrainingSettings(),
        model=_model(size, features=features),
        data=DataConfig(batch=128, text_batch=128, gradient_accumulation=passes, held_out_share=HELD_OUT_SHARE),
        optimizer=optimizer,
        steps=250_000,
        bert=f"bert-{size}-uncased",
        precision="fp32" if size == "base" and precomputed else "bf16",
    )
    # The only rule that differs from the authors' code. Web photos that are padded in groups of similar shape have a
    # third fewer pixels than in one tensor, and no weights are loaded that were trained with the authors' padding.
    return override_values(variants.apply(recipe, variant), {"model.regions.padding": "groups"})


def finetune_vcr(size: Size = "base", features: Features = "end_to_end", variant: Variant = "published") -> Recipe:
    """Configure fine-tuning on VCR, end to end: 20 epochs, 64 questions (of four choices each) per step.

    The optimizer is SGD, and its learning rate falls at the end of epochs 14 and 18. The 64 x 4 choices are the 256
    triplets of question, answer and image in the paper (4.2.1).

    Q->A and QA->R are two runs: --task.subtask answer and --task.subtask rationale. `vlbert evaluate` combines the two
    models for Q->AR and the leaderboard's file. The authors trained the large model on 4 GPUs or, without gradient
    accumulation (--data.gradient_accumulation 1), on 16.
    """
    name = _make_name("finetune_vcr", size, "precomputed" * (features == "precomputed"), variant)
    if size == "demo":
        return demo.finetune_vcr("vlbert", features, name)
    _refuse(features == "precomputed", name, "a part of a box has no precomputed features")
    epoch = 3_327
    recipe = Recipe(
        name=name,
        task=VCRSettings(),
        model=_model(size, long_side=1200),
        data=_data("vcr", batch=64, gradient_accumulation=4),
        optimizer=OptimizerConfig(
            kind="sgd",
            learning_rate=4.48e-3 if variant == "published" else 5e-3,
            warmup_steps=1_000,
            schedule="step",
            decay_at=(14 * epoch - 1, 18 * epoch - 1),  # the authors' rate falls with the last update of an epoch
        ),
        steps=20 * epoch,
        # For its pooler, which pre-training lacks and the paper does not use.
        bert=f"bert-{size}-uncased" if variant == "published" else None,
        precision="fp32" if size == "base" else "bf16",
    )
    return _by_epoch(variants.apply(recipe, variant), epoch)


def finetune_vqa(size: Size = "base", features: Features | None = None, variant: Variant = "published") -> Recipe:
    """Configure fine-tuning on VQA's train2014: 5 epochs, 256 questions per step, on precomputed features.

    The `paper` variant trains end to end for 20 epochs (4.2.2 and A.2). The authors also trained on val2014. To train
    on both splits, without validation, add --task.train_on train2014 val2014 --data.held_out None --steps 12855
    --validate_every 2571 --save_every 2571. For the `paper` variant, use --steps 51420 instead.
    """
    paper = variant == "paper"
    features = features or ("end_to_end" if paper or size == "demo" else "precomputed")
    name = _make_name("finetune_vqa", size, "precomputed" * (size == "demo" and features == "precomputed"), variant)
    if size == "demo":
        return demo.finetune_vqa("vlbert", features, name)
    _refuse(paper == (features == "precomputed"), name, "only the authors' code has precomputed features")
    epoch = 1_734
    optimizer = OptimizerConfig(learning_rate=1.6e-4, warmup_steps=500)
    recipe = Recipe(
        name=name,
        task=VQASettings(),
        model=_model(size, features=features),
        data=_data("vqa", batch=256, gradient_accumulation=4 if size == "large" and not paper else 1),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=2_000) if paper else optimizer,
        steps=(20 if paper else 5) * epoch,
        precision="bf16" if paper else "fp32",
    )
    return _by_epoch(variants.apply(recipe, variant), epoch)


def finetune_refcoco(size: Size = "base", features: Features = "end_to_end", variant: Variant = "published") -> Recipe:
    """Configure fine-tuning on RefCOCO+, end to end: 20 epochs, 32 expressions per step, on ground-truth regions.

    The `paper` variant has 256 expressions per step (4.2.3 and A.2).

    To use detected regions, and add the ground truth in training: --task.regions detected --task.adds_ground_truth.
    The regions are taken from the shards (data.detector) or, as in the paper's table, from MAttNet's file in
    task.folder: --task.detections FILE.
    """
    name = _make_name("finetune_refcoco", size, "precomputed" * (features == "precomputed"), variant)
    if size == "demo":
        return demo.finetune_refcoco("vlbert", features, name)
    _refuse(features == "precomputed", name, "ground-truth regions have no precomputed features")
    paper = variant == "paper"
    epoch = 470 if paper else 3_756
    accumulation = {"base": 1 if paper else 2, "large": 1 if paper else 4}[size]
    optimizer = OptimizerConfig(learning_rate=2.56e-5, warmup_steps=3_750)
    recipe = Recipe(
        name=name,
        task=RefCOCOSettings(),
        model=_model(size),
        data=_data("refcoco+", batch=256 if paper else 32, gradient_accumulation=accumulation),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=500) if paper else optimizer,
        steps=20 * epoch,
        precision="bf16" if paper else "fp32",
    )
    return _by_epoch(variants.apply(recipe, variant), epoch)


def finetune_retrieval(size: Literal["base", "demo"] = "base", features: Features = "end_to_end") -> Recipe:
    """Configure fine-tuning on Flickr30k, end to end: 10 epochs, 192 captions per step.

    Each caption is paired with 3 wrong images, and its image with 3 wrong captions, as in Unicoder-VL. VL-BERT's
    authors did not try retrieval.

    For COCO: --data.datasets coco --data.held_out coco --task.file dataset_coco.json --task.train_on train restval
    --steps 29500 --optimizer.warmup_steps 2950 --validate_every 2950 --save_every 2950.
    """
    name = _make_name("finetune_retrieval", size, "precomputed" * (features == "precomputed"), "published")
    if size == "demo":
        return demo.finetune_retrieval("vlbert", features, name)
    _refuse(features == "precomputed", name, "no numbers are published")
    epoch = 755
    recipe = Recipe(
        name=name,
        task=RetrievalSettings(),
        data=_data("flickr30k", batch=192, gradient_accumulation=4),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=epoch),
        steps=10 * epoch,
        bert="bert-base-uncased",  # for its pooler, which pre-training without the relationship head lacks
    )
    recipe = _by_epoch(variants.apply(recipe, "published"), epoch)
    return replace(recipe, validation_samples=200)  # images, ranked against their 1,000 captions


def finetune_labels(size: Size = "base", features: Features = "end_to_end") -> Recipe:
    """Configure training on labels of your own: 2,000 steps of 32 pairs of an image and a text."""
    name = _make_name("finetune_labels", size, "precomputed" * (features == "precomputed"), "published")
    if size == "demo":
        return demo.finetune_labels("vlbert", features, name)
    optimizer = OptimizerConfig(learning_rate=2.56e-5, warmup_steps=200)
    data, task = _data("pairs", batch=32, gradient_accumulation=4), LabelSettings()
    recipe = Recipe(name=name, task=task, model=_model(size, features=features), data=data, optimizer=optimizer)
    return variants.apply(_by_epoch(replace(recipe, steps=2_000), 500), "published")


def make_finetuning(  # noqa: PLR0913  what differs between the models
    model: demo.Model,
    task_name: str,
    size: str,
    task: Any,
    config: ModelConfig,
    optimizer: Callable[[int], OptimizerConfig],
    batch: int,
    epochs: int,
    precision: Literal["fp32", "bf16"],
) -> Recipe:
    """Return a recipe that fine-tunes a model other than VL-BERT on the same data.

    It has no gradient accumulation and no BERT weights. `optimizer` returns the optimizer's settings, given the number
    of steps per epoch.
    """
    name = f"finetune_{task_name}_{model}_{size}"
    if size == "demo":
        return getattr(demo, f"finetune_{task_name}")(model, "precomputed", name)
    makers = {"vcr": finetune_vcr, "vqa": finetune_vqa, "refcoco": finetune_refcoco, "retrieval": finetune_retrieval}
    recipe = makers[task_name]()
    epoch = recipe.validate_every * recipe.data.batch // batch
    return replace(
        recipe,
        name=name,
        task=task,
        model=config,
        data=replace(recipe.data, batch=batch, gradient_accumulation=1, flip=0.0),
        optimizer=optimizer(epoch),
        steps=epochs * epoch,
        validate_every=epoch,
        save_every=epoch,
        bert=None,
        precision=precision,
    )


def _make_name(recipe: str, size: str, features: str, variant: Variant) -> str:
    """Return a recipe's name, given its parts. Raises ValueError for the `demo` size of the `paper` variant."""
    name = "_".join(filter(None, [recipe, size, features, "paper" * (variant == "paper")]))
    _refuse(size == "demo" and variant == "paper", name, "the demo has no variants")
    return name


def _refuse(missing: bool, name: str, reason: str) -> None:
    if missing:
        raise ValueError(f"there is no recipe {name}: {reason}. Change the fields of another recipe instead")


def _model(size: str, **regions: Any) -> ModelConfig:
    model = ModelConfig(regions=RegionConfig(**regions))
    return replace(model, **_SIZE_OF_LARGE) if size == "large" else model


def _data(dataset: str, **settings: Any) -> DataConfig:
    return DataConfig(datasets={dataset: None}, held_out=(dataset,), **settings)


def _by_epoch(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with a full validation and a checkpoint after each epoch, that is, every `steps` steps."""
    return replace(recipe, validation_samples=None, validate_every=steps, save_every=steps)
