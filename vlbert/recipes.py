"""One function a run; each returns the whole configuration. A name tells task, architecture and size."""

from detectors.resnet import ResNetConfig
from vlbert.config import DataConfig, ModelConfig, OptimizerConfig, Recipe, RegionConfig
from vlbert.masking import RegionMasking, WordMasking
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings

BASE = ModelConfig()
LARGE = ModelConfig(layers="J" * 24, hidden=1024, heads=16, intermediate=4096)

# Small enough to learn from 800 drawn scenes in three minutes on two cores. What decides: N(0, 0.02) leaves attention
# of 96 channels inert, so weights start wider; and a picture faded in from gain 0 comes too late
DEMO = ModelConfig(
    layers="J" * 3,
    hidden=96,
    heads=4,
    intermediate=384,
    max_positions=128,
    dropout=0.0,
    initializer_range=0.06,
    visual_dropout=False,
    visual_gain_regions=1.0,
    head_initialisation="normal",
    geometry_channels=64,
    regions=RegionConfig(
        resnet=ResNetConfig(
            blocks=(1, 1, 2, 2), width=8, stride_in_1x1=False, stem_pool="torch", res5_dilated=False, norm="batch"
        ),
        short_side=168,
        long_side=224,
        roi_size=7,
        frozen_stages=0,
        untrained=True,  # there are no detector weights to start from, and none to keep
    ),
)


def pretrain_vlbert_base() -> Recipe:
    """Paper 4.1 and A.2: 250k steps of 128 captions and 128 text-only rows, end to end."""
    return Recipe(
        name="pretrain_vlbert_base",
        task=PretrainingSettings(),
        model=BASE,
        data=DataConfig(batch=128, text_batch=128),
        optimizer=OptimizerConfig(learning_rate=2e-5, warm_up=8000),
        steps=250_000,
        bert="bert-base-uncased",
    )


def pretrain_vlbert_large() -> Recipe:
    """As base, twice as deep; two backward passes a step, as the authors had room for."""
    return Recipe(
        name="pretrain_vlbert_large",
        task=PretrainingSettings(),
        model=LARGE,
        data=DataConfig(batch=128, text_batch=128, accumulate=2),
        optimizer=OptimizerConfig(learning_rate=2e-5, warm_up=8000),
        steps=250_000,
        bert="bert-large-uncased",
    )


def finetune_refcoco_base() -> Recipe:
    """Paper A.2: 20 epochs of 256 expressions a step (120k expressions learn in 9,400 steps)."""
    return Recipe(
        name="finetune_refcoco_base",
        task=RefCOCOSettings(),
        model=BASE,
        data=DataConfig(dataset="refcoco+", held_out="refcoco+", batch=256),
        optimizer=OptimizerConfig(learning_rate=1e-4, warm_up=500, clip=1.0),
        steps=9_400,
        validation_samples=None,
        validate_every=470,
        save_every=470,
    )


def pretrain_vlbert_demo() -> Recipe:
    """The drawn world of `make demo`."""
    return Recipe(
        name="pretrain_vlbert_demo",
        task=PretrainingSettings(
            words=WordMasking(probability=0.25),
            # Most of the chosen regions stay in sight: naming them teaches a network that starts from nothing to see.
            regions=RegionMasking(probability=0.5, hidden=0.3),
            max_elements=None,
            text_length=24,
        ),
        model=DEMO,
        data=DataConfig(held_out="held-out", batch=32, text_batch=8, workers=0),
        optimizer=OptimizerConfig(learning_rate=2e-3, region_learning_rate=1e-3, warm_up=50, weight_decay=1e-2),
        steps=1_000,
        vocabulary_size=500,
        log_every=20,
        validate_every=200,
        validation_samples=300,
        save_every=200,
    )


def finetune_refcoco_demo() -> Recipe:
    """RefCOCO+-like expressions of the drawn world."""
    return Recipe(
        name="finetune_refcoco_demo",
        task=RefCOCOSettings(),
        model=DEMO,
        data=DataConfig(dataset="refcoco+", held_out="refcoco+", batch=32, workers=0),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, region_learning_rate=1e-4, warm_up=20, weight_decay=1e-2, clip=1.0
        ),
        steps=100,
        log_every=10,
        validate_every=25,
        validation_samples=None,
        save_every=50,
    )


RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        pretrain_vlbert_base,
        pretrain_vlbert_large,
        finetune_refcoco_base,
        pretrain_vlbert_demo,
        finetune_refcoco_demo,
    )
}
