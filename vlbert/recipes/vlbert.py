"""Recipes of VL-BERT. Those without a suffix are the runs of the authors' code, with its rules (vlbert/variants.py)
and its numbers; `_paper` are those of the paper's appendix A.2.
"""

from dataclasses import replace
from typing import Any

from storage.settings import override_values
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
from vlbert.variants import paper, published

_SIZE_OF_LARGE = {"layers": "J" * 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}

# The authors' learning rates: theirs are per sample, 1e-7 x 256 in pre-training.
_PRETRAINING = OptimizerConfig(learning_rate=2.56e-5, warmup_steps=16_000, max_grad_norm=10.0)
_PAPER_PRETRAINING = OptimizerConfig(learning_rate=2e-5, warmup_steps=8_000)


def _precomputed(recipe: Recipe, **changes: Any) -> Recipe:
    model = replace(recipe.model, regions=RegionConfig(features="precomputed"))
    return replace(recipe, model=model, **changes)


def _large(recipe: Recipe, gradient_accumulation: int | None = None, **changes: Any) -> Recipe:
    """The recipe with a model of the large size; gradient_accumulation: None: the recipe's."""
    data = replace(recipe.data, gradient_accumulation=gradient_accumulation or recipe.data.gradient_accumulation)
    return replace(recipe, model=replace(recipe.model, **_SIZE_OF_LARGE), data=data, **changes)


def pretrain_vlbert_base() -> Recipe:
    """250k steps (10 epochs) of 128 captions and 128 text-only rows, end to end; 2 days on 16 V100."""
    recipe = published(
        Recipe(
            name="pretrain_vlbert_base",
            task=PretrainingSettings(),
            data=DataConfig(batch=128, text_batch=128),
            optimizer=_PRETRAINING,
            steps=250_000,
            bert="bert-base-uncased",
        )
    )
    # The one rule that is not the authors': web photos in groups of similar shape have a third fewer pixels than in one
    # tensor, and no weights of theirs are loaded that would need theirs.
    return override_values(recipe, {"model.regions.padding": "groups"})


def pretrain_vlbert_base_precomputed() -> Recipe:
    """As base, on features kept by the detector: what VQA starts from; 30 hours on 4 V100."""
    return _precomputed(pretrain_vlbert_base(), name="pretrain_vlbert_base_precomputed", precision="fp32")


def pretrain_vlbert_base_captions_only() -> Recipe:
    """As base_precomputed, without the text-only corpus: 256 captions a step, 10 epochs."""
    recipe = pretrain_vlbert_base_precomputed()
    return replace(
        recipe,
        name="pretrain_vlbert_base_captions_only",
        data=replace(recipe.data, batch=256, text_batch=0),
        optimizer=replace(recipe.optimizer, warmup_steps=8_000),
        steps=125_000,
    )


def pretrain_vlbert_large() -> Recipe:
    """As base, twice as deep; two backward passes a step, as the authors had room for; 5.5 days on 16 V100."""
    return _large(pretrain_vlbert_base(), 2, name="pretrain_vlbert_large", bert="bert-large-uncased")


def pretrain_vlbert_large_precomputed() -> Recipe:
    """As large, on features kept by the detector."""
    recipe = _precomputed(pretrain_vlbert_large(), name="pretrain_vlbert_large_precomputed")
    return replace(recipe, data=replace(recipe.data, gradient_accumulation=1))


def pretrain_vlbert_base_paper() -> Recipe:
    """Paper 4.1 and A.2."""
    recipe = replace(pretrain_vlbert_base(), name="pretrain_vlbert_base_paper", optimizer=_PAPER_PRETRAINING)
    return paper(recipe)


def pretrain_vlbert_large_paper() -> Recipe:
    """Paper 4.1 and A.2, from BERT large."""
    recipe = replace(pretrain_vlbert_large(), name="pretrain_vlbert_large_paper", optimizer=_PAPER_PRETRAINING)
    return paper(recipe)


def _finetuning(recipe: Recipe, epoch: int) -> Recipe:
    """Validated on all that is held out, and saved, after each epoch of so many steps."""
    return replace(recipe, validation_samples=None, validate_every=epoch, save_every=epoch)


def finetune_vcr_base() -> Recipe:
    """20 epochs of 64 questions, with four choices each, a step; SGD, its rate falling at the end of epochs 14 and 18.

    Q->A and QA->R are two runs: task.subtask=answer and task.subtask=rationale; evaluated together (vlbert evaluate)
    they give Q->AR and the leaderboard's file. Starts from an end-to-end model.
    """
    epoch = 3_327
    recipe = Recipe(
        name="finetune_vcr_base",
        task=VCRSettings(),
        model=ModelConfig(regions=RegionConfig(long_side=1200)),
        data=DataConfig(datasets={"vcr": None}, held_out=("vcr",), batch=64, gradient_accumulation=4),
        optimizer=OptimizerConfig(
            kind="sgd",
            learning_rate=4.48e-3,
            warmup_steps=1_000,
            schedule="step",
            decay_at=(14 * epoch - 1, 18 * epoch - 1),  # theirs falls with the last update of an epoch
        ),
        steps=20 * epoch,
        bert="bert-base-uncased",  # for its pooler, which pre-training has not
        precision="fp32",
    )
    return _finetuning(published(recipe), epoch)


def finetune_vcr_large() -> Recipe:
    """As base; the authors ran it on 4 GPUs and, with data.gradient_accumulation=1, on 16."""
    return _large(finetune_vcr_base(), name="finetune_vcr_large", bert="bert-large-uncased", precision="bf16")


def finetune_vcr_base_paper() -> Recipe:
    """Paper 4.2.1 and A.2: 256 triplets of question, answer and image a step."""
    recipe = finetune_vcr_base()
    optimizer = replace(recipe.optimizer, learning_rate=5e-3)
    return paper(replace(recipe, name="finetune_vcr_base_paper", optimizer=optimizer, bert=None))


def finetune_vcr_large_paper() -> Recipe:
    """Paper 4.2.1 and A.2, large."""
    return _large(finetune_vcr_base_paper(), name="finetune_vcr_large_paper", precision="bf16")


def finetune_vqa_base() -> Recipe:
    """5 epochs of 256 questions a step, on train2014 alone; starts from a precomputed model.

    The models that were reported learned from val2014, too, and were validated on what they had learned from. So do
    task.train_on=train2014,val2014 data.held_out=none steps=12855 validate_every=2571 save_every=2571.
    """
    epoch = 1_734
    recipe = Recipe(
        name="finetune_vqa_base",
        task=VQASettings(),
        model=ModelConfig(regions=RegionConfig(features="precomputed")),
        data=DataConfig(datasets={"vqa": None}, held_out=("vqa",), batch=256),
        optimizer=OptimizerConfig(learning_rate=1.6e-4, warmup_steps=500),
        steps=5 * epoch,
        precision="fp32",
    )
    return _finetuning(published(recipe), epoch)


def finetune_vqa_large() -> Recipe:
    """As base, in four backward passes a step."""
    return _large(finetune_vqa_base(), 4, name="finetune_vqa_large")


def finetune_vqa_base_paper() -> Recipe:
    """Paper 4.2.2 and A.2: 20 epochs, end to end; with val2014 they are 51,420 steps."""
    recipe = finetune_vqa_base()
    return paper(
        replace(
            recipe,
            name="finetune_vqa_base_paper",
            model=ModelConfig(),
            optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=2_000),
            steps=20 * recipe.validate_every,
            precision="bf16",
        )
    )


def finetune_vqa_large_paper() -> Recipe:
    """Paper 4.2.2 and A.2, large."""
    return _large(finetune_vqa_base_paper(), name="finetune_vqa_large_paper")


def finetune_refcoco_base() -> Recipe:
    """20 epochs of 32 expressions a step, on ground-truth regions; starts from an end-to-end model."""
    epoch = 3_756
    recipe = Recipe(
        name="finetune_refcoco_base",
        task=RefCOCOSettings(),
        data=DataConfig(datasets={"refcoco+": None}, held_out=("refcoco+",), batch=32, gradient_accumulation=2),
        optimizer=OptimizerConfig(learning_rate=2.56e-5, warmup_steps=3_750),
        steps=20 * epoch,
        precision="fp32",
    )
    return _finetuning(published(recipe), epoch)


def finetune_refcoco_large() -> Recipe:
    """As base, in four backward passes a step."""
    return _large(finetune_refcoco_base(), 4, name="finetune_refcoco_large")


def finetune_refcoco_base_detected() -> Recipe:
    """As base, on detected regions, trained with the ground truth among them.

    They are the shards' own (data.detector says whose) or, as in the paper's table, those of MAttNet's file below
    task.folder: task.detections=FILE.
    """
    recipe = finetune_refcoco_base()
    task = replace(recipe.task, regions="detected", adds_ground_truth=True)
    return replace(recipe, name="finetune_refcoco_base_detected", task=task)


def finetune_refcoco_large_detected() -> Recipe:
    """As base_detected, in four backward passes a step."""
    return _large(finetune_refcoco_base_detected(), 4, name="finetune_refcoco_large_detected")


def finetune_refcoco_base_paper() -> Recipe:
    """Paper 4.2.3 and A.2: 20 epochs of 256 expressions a step, on ground-truth regions.

    The other track of its table: task.regions=detected task.detections=FILE, MAttNet's below task.folder.
    """
    epoch = 470
    recipe = finetune_refcoco_base()
    recipe = replace(
        recipe,
        name="finetune_refcoco_base_paper",
        data=replace(recipe.data, batch=256, gradient_accumulation=1),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=500),
        steps=20 * epoch,
        precision="bf16",
    )
    return _finetuning(paper(recipe), epoch)


def finetune_refcoco_large_paper() -> Recipe:
    """Paper 4.2.3 and A.2, large."""
    return _large(finetune_refcoco_base_paper(), name="finetune_refcoco_large_paper")


def finetune_retrieval_base() -> Recipe:
    """10 epochs of 192 captions of Flickr30k a step, each with three wrong captions and images, as Unicoder-VL has it;
    starts from an end-to-end model, which VL-BERT's authors did not do.

    COCO: data.datasets=coco data.held_out=coco task.file=dataset_coco.json task.train_on=train,restval steps=29500
    optimizer.warmup_steps=2950 validate_every=2950 save_every=2950.
    """
    epoch = 755
    recipe = Recipe(
        name="finetune_retrieval_base",
        task=RetrievalSettings(),
        data=DataConfig(datasets={"flickr30k": None}, held_out=("flickr30k",), batch=192, gradient_accumulation=4),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=epoch),
        steps=10 * epoch,
        bert="bert-base-uncased",  # for its pooler, which pre-training without the relationship head has not
    )
    recipe = _finetuning(published(recipe), epoch)
    return replace(recipe, validation_samples=200)  # images, ranked against their 1,000 captions
