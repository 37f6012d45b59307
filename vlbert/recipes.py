"""One function a run; each returns the whole configuration. A name tells task, architecture, size and variant.

Those without a suffix are the runs of the authors' code, with its rules (vlbert/variants.py) and its numbers; `_paper`
are those of the paper's appendix A.2. Steps are epochs of the data set over the batch: 3.3 M captions, 213 k questions
of VCR, 444 k of VQA's train2014, 120 k expressions of RefCOCO+. `data.batch` is global: whatever the number of GPUs,
batch = GPUs x gradient_accumulation x what one GPU computes at a time, and the learning rate is the one that stands
here.
"""

from dataclasses import replace

from detectors.resnet import ResNetConfig
from storage.settings import override_values
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
from vlbert.variants import numbers, paper, published, table

BASE = ModelConfig()
_SIZE_OF_LARGE = {"layers": "J" * 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
LARGE = ModelConfig(**_SIZE_OF_LARGE)

# Small enough to learn from 800 drawn scenes in two minutes on two cores. What decides: N(0, 0.02) leaves attention
# of 96 channels inert, so weights start wider; and an image faded in from gain 0 comes too late
DEMO = ModelConfig(
    layers="J" * 3,
    hidden_size=96,
    num_heads=4,
    intermediate_size=384,
    max_positions=128,
    dropout=0.0,
    initializer_range=0.06,
    visual_gain_regions=1.0,
    head_initialisation="normal",
    geometry_channels=64,
    regions=RegionConfig(
        resnet=ResNetConfig(
            blocks=(1, 1, 2, 2), width=8, stride_in_1x1=False, stem_pool="torch", res5_dilated=False, norm="batch"
        ),
        short_side=168,
        long_side=224,
        roi_size=7,  # as the detector's, whose stem and res2 stay as they are
    ),
)


# The authors' learning rates: theirs are per sample, 1e-7 x 256 in pre-training.
_PRETRAINING = OptimizerConfig(learning_rate=2.56e-5, warmup_steps=16_000, max_grad_norm=10.0)
_PAPER_PRETRAINING = OptimizerConfig(learning_rate=2e-5, warmup_steps=8_000)


def _precomputed(model: ModelConfig) -> ModelConfig:
    return replace(model, regions=RegionConfig(features="precomputed"))


def pretrain_vlbert_base() -> Recipe:
    """250k steps (10 epochs) of 128 captions and 128 text-only rows, end to end; 2 days on 16 V100."""
    recipe = published(
        Recipe(
            name="pretrain_vlbert_base",
            task=PretrainingSettings(),
            model=BASE,
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
    recipe = pretrain_vlbert_base()
    return replace(recipe, name="pretrain_vlbert_base_precomputed", model=_precomputed(recipe.model), precision="fp32")


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
    recipe = pretrain_vlbert_base()
    return replace(
        recipe,
        name="pretrain_vlbert_large",
        model=LARGE,
        data=replace(recipe.data, gradient_accumulation=2),
        bert="bert-large-uncased",
    )


def pretrain_vlbert_large_precomputed() -> Recipe:
    """As large, on features kept by the detector."""
    recipe = pretrain_vlbert_large()
    return replace(
        recipe,
        name="pretrain_vlbert_large_precomputed",
        model=_precomputed(recipe.model),
        data=replace(recipe.data, gradient_accumulation=1),
    )


def pretrain_vlbert_base_paper() -> Recipe:
    """Paper 4.1 and A.2."""
    recipe = pretrain_vlbert_base()
    return paper(replace(recipe, name="pretrain_vlbert_base_paper", optimizer=_PAPER_PRETRAINING))


def pretrain_vlbert_large_paper() -> Recipe:
    """Paper 4.1 and A.2, from BERT large."""
    recipe = pretrain_vlbert_large()
    return paper(replace(recipe, name="pretrain_vlbert_large_paper", optimizer=_PAPER_PRETRAINING))


def _finetuning(recipe: Recipe, epoch: int) -> Recipe:
    """Validated on all that is held out, and saved, after each epoch of so many steps."""
    return replace(recipe, validation_samples=None, validate_every=epoch, save_every=epoch)


def finetune_vcr_base() -> Recipe:
    """20 epochs of 64 questions, with four choices each, a step; SGD, its rate falling at the end of epochs 14 and 18.

    Q->A and QA->R are two runs: task.subtask=answer and task.subtask=rationale; evaluated together (vlbert.evaluate)
    they give Q->AR and the leaderboard's file. Starts from an end-to-end model.
    """
    epoch = 3_327
    recipe = Recipe(
        name="finetune_vcr_base",
        task=VCRSettings(),
        model=replace(BASE, regions=RegionConfig(long_side=1200)),
        data=DataConfig(dataset="vcr", held_out="vcr", batch=64, gradient_accumulation=4),
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
    recipe = finetune_vcr_base()
    model = replace(recipe.model, **_SIZE_OF_LARGE)
    return replace(recipe, name="finetune_vcr_large", model=model, bert="bert-large-uncased", precision="bf16")


def finetune_vcr_base_paper() -> Recipe:
    """Paper 4.2.1 and A.2: 256 triplets of question, answer and image a step."""
    recipe = finetune_vcr_base()
    optimizer = replace(recipe.optimizer, learning_rate=5e-3)
    return paper(replace(recipe, name="finetune_vcr_base_paper", optimizer=optimizer, bert=None))


def finetune_vcr_large_paper() -> Recipe:
    """Paper 4.2.1 and A.2, large."""
    recipe = finetune_vcr_base_paper()
    model = replace(recipe.model, **_SIZE_OF_LARGE)
    return replace(recipe, name="finetune_vcr_large_paper", model=model, precision="bf16")


def finetune_vqa_base() -> Recipe:
    """5 epochs of 256 questions a step, on train2014 alone; starts from a precomputed model.

    The models that were reported learned from val2014, too, and were validated on what they had learned from. So do
    task.train_on=train2014,val2014 data.held_out=none steps=12855 validate_every=2571 save_every=2571.
    """
    epoch = 1_734
    recipe = Recipe(
        name="finetune_vqa_base",
        task=VQASettings(),
        model=_precomputed(BASE),
        data=DataConfig(dataset="vqa", held_out="vqa", batch=256),
        optimizer=OptimizerConfig(learning_rate=1.6e-4, warmup_steps=500),
        steps=5 * epoch,
        precision="fp32",
    )
    return _finetuning(published(recipe), epoch)


def finetune_vqa_large() -> Recipe:
    """As base, in four backward passes a step."""
    recipe = finetune_vqa_base()
    model = replace(recipe.model, **_SIZE_OF_LARGE)
    return replace(recipe, name="finetune_vqa_large", model=model, data=replace(recipe.data, gradient_accumulation=4))


def finetune_vqa_base_paper() -> Recipe:
    """Paper 4.2.2 and A.2: 20 epochs, end to end; with val2014 they are 51,420 steps."""
    recipe = finetune_vqa_base()
    return paper(
        replace(
            recipe,
            name="finetune_vqa_base_paper",
            model=BASE,
            optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=2_000),
            steps=20 * recipe.validate_every,
            precision="bf16",
        )
    )


def finetune_vqa_large_paper() -> Recipe:
    """Paper 4.2.2 and A.2, large."""
    recipe = finetune_vqa_base_paper()
    return replace(recipe, name="finetune_vqa_large_paper", model=replace(recipe.model, **_SIZE_OF_LARGE))


def finetune_refcoco_base() -> Recipe:
    """20 epochs of 32 expressions a step, on ground-truth regions; starts from an end-to-end model."""
    epoch = 3_756
    recipe = Recipe(
        name="finetune_refcoco_base",
        task=RefCOCOSettings(),
        model=BASE,
        data=DataConfig(dataset="refcoco+", held_out="refcoco+", batch=32, gradient_accumulation=2),
        optimizer=OptimizerConfig(learning_rate=2.56e-5, warmup_steps=3_750),
        steps=20 * epoch,
        precision="fp32",
    )
    return _finetuning(published(recipe), epoch)


def finetune_refcoco_large() -> Recipe:
    """As base, in four backward passes a step."""
    recipe = finetune_refcoco_base()
    model = replace(recipe.model, **_SIZE_OF_LARGE)
    return replace(
        recipe, name="finetune_refcoco_large", model=model, data=replace(recipe.data, gradient_accumulation=4)
    )


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
    recipe = finetune_refcoco_large()
    task = replace(recipe.task, regions="detected", adds_ground_truth=True)
    return replace(recipe, name="finetune_refcoco_large_detected", task=task)


def finetune_refcoco_base_paper() -> Recipe:
    """Paper 4.2.3 and A.2: 20 epochs of 256 expressions a step, on ground-truth regions.

    The other track of its table: task.regions=detected task.detections=FILE, MAttNet's below task.folder.
    """
    epoch = 470
    recipe = finetune_refcoco_base()
    return _finetuning(
        paper(
            replace(
                recipe,
                name="finetune_refcoco_base_paper",
                data=replace(recipe.data, batch=256, gradient_accumulation=1),
                optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=500),
                steps=20 * epoch,
                precision="bf16",
            )
        ),
        epoch,
    )


def finetune_refcoco_large_paper() -> Recipe:
    """Paper 4.2.3 and A.2, large."""
    recipe = finetune_refcoco_base_paper()
    return replace(recipe, name="finetune_refcoco_large_paper", model=replace(recipe.model, **_SIZE_OF_LARGE))


def pretrain_vlbert_demo() -> Recipe:
    """The data of `make demo`; its Fast R-CNN starts as the detector's: model.regions.weights=FILE."""
    return Recipe(
        name="pretrain_vlbert_demo",
        task=PretrainingSettings(
            words=WordMasking(probability=0.25),
            # Most of the chosen regions stay visible: there the encoder learns which appearance belongs to which class.
            regions=RegionMasking(probability=0.5, masked=0.3),
            max_elements=None,
            text_length=24,
        ),
        model=DEMO,
        data=DataConfig(held_out="held-out", batch=32, text_batch=8, workers=0),
        optimizer=OptimizerConfig(learning_rate=2e-3, region_learning_rate=1e-3, warmup_steps=50, weight_decay=1e-2),
        steps=600,
        vocabulary_size=500,
        precision="fp32",
        log_every=20,
        validate_every=150,
        validation_samples=300,
        save_every=150,
    )


def finetune_refcoco_demo() -> Recipe:
    """RefCOCO+-like expressions of the demo data, on detected regions; starts as pretrain_vlbert_demo."""
    return Recipe(
        name="finetune_refcoco_demo",
        task=RefCOCOSettings(regions="detected", iou="published"),
        model=DEMO,
        data=DataConfig(dataset="coco", held_out="coco", batch=32, workers=0),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, region_learning_rate=1e-4, warmup_steps=20, weight_decay=1e-2, max_grad_norm=1.0
        ),
        steps=70,
        precision="fp32",
        log_every=10,
        validate_every=35,
        validation_samples=None,
        save_every=70,
    )


def finetune_vqa_demo() -> Recipe:
    """VQA-like questions of the demo data, as finetune_refcoco_demo; the data say how many answers there are:
    task.answers=N."""
    recipe = finetune_refcoco_demo()
    return replace(
        recipe,
        name="finetune_vqa_demo",
        task=VQASettings(question_length=122),
        steps=60,
        validate_every=30,
        save_every=60,
    )


def finetune_vcr_demo() -> Recipe:
    """VCR-like items of the demo data, on its own boxes; task.subtask=rationale is the second run."""
    recipe = finetune_refcoco_demo()
    # One of four, and read at [CLS] itself: in so few steps, the less is new the better.
    task = VCRSettings(mask_size=4, loss="softmax", pooled=False)
    return replace(recipe, name="finetune_vcr_demo", task=task, steps=120, validate_every=60, save_every=120)


RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        pretrain_vlbert_base,
        pretrain_vlbert_base_precomputed,
        pretrain_vlbert_base_captions_only,
        pretrain_vlbert_base_paper,
        pretrain_vlbert_large,
        pretrain_vlbert_large_precomputed,
        pretrain_vlbert_large_paper,
        finetune_vcr_base,
        finetune_vcr_base_paper,
        finetune_vcr_large,
        finetune_vcr_large_paper,
        finetune_vqa_base,
        finetune_vqa_base_paper,
        finetune_vqa_large,
        finetune_vqa_large_paper,
        finetune_refcoco_base,
        finetune_refcoco_base_detected,
        finetune_refcoco_base_paper,
        finetune_refcoco_large,
        finetune_refcoco_large_detected,
        finetune_refcoco_large_paper,
        pretrain_vlbert_demo,
        finetune_refcoco_demo,
        finetune_vqa_demo,
        finetune_vcr_demo,
    )
}


if __name__ == "__main__":  # the tables of docs/variants.md
    print(table(), numbers(RECIPES), sep="\n\n")
