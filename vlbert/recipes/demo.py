"""Recipes of `make demo` and `make compare`: small models of every architecture that learn from drawn scenes."""

from dataclasses import replace

from detectors.resnet import ResNetConfig
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

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


# The same width and depth on precomputed features of the same network, for the models that have them.
_FEATURES = replace(DEMO.regions, features="precomputed")
_SEPARATE = replace(DEMO, embedding="separate", regions=_FEATURES)
DEMO_PRECOMPUTED = replace(DEMO, regions=_FEATURES)
DEMO_UNICODER_VL = replace(_SEPARATE, whole_image="none")
DEMO_VILBERT = replace(_SEPARATE, layers="T" + "XTV" * 2, whole_image="mean", pooler="product")


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
        data=DataConfig(held_out=("held-out",), batch=32, text_batch=8, workers=0),
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
        task=RefCOCOSettings(regions="detected"),
        model=DEMO,
        data=DataConfig(datasets={"coco": None}, held_out=("coco",), batch=32, workers=0),
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


def pretrain_vlbert_demo_precomputed() -> Recipe:
    """As pretrain_vlbert_demo, on features that the detector kept (detection.keep_features=true)."""
    return replace(pretrain_vlbert_demo(), name="pretrain_vlbert_demo_precomputed", model=DEMO_PRECOMPUTED)


def pretrain_unicoder_vl_demo() -> Recipe:
    """Unicoder-VL on the data of the demo, with features that the detector kept."""
    recipe = pretrain_vlbert_demo()
    task = replace(
        recipe.task,
        region_target="class",
        relationship=True,
        mismatched=0.5,
        related_class=0,
        region_head="transform_norm",
    )
    data = replace(recipe.data, text_batch=0)
    return replace(recipe, name="pretrain_unicoder_vl_demo", task=task, model=DEMO_UNICODER_VL, data=data)


def pretrain_vilbert_demo() -> Recipe:
    """ViLBERT on the data of the demo, with features that the detector kept."""
    recipe = pretrain_unicoder_vl_demo()
    task = replace(recipe.task, region_target="distribution", region_loss="kl")
    return replace(recipe, name="pretrain_vilbert_demo", task=task, model=DEMO_VILBERT)


# VL-BERT reads an answer at [MASK] and starts it from words; the others read it from the pair.
_PAIR = {"reads": "pair", "classifier": "gelu_norm", "answers_from_words": False}


def finetune_vqa_demo_precomputed() -> Recipe:
    """As finetune_vqa_demo, on features that the detector kept."""
    return replace(finetune_vqa_demo(), name="finetune_vqa_demo_precomputed", model=DEMO_PRECOMPUTED)


def finetune_vqa_unicoder_vl_demo() -> Recipe:
    """As finetune_vqa_demo, with Unicoder-VL."""
    recipe = finetune_vqa_demo()
    task = replace(recipe.task, **_PAIR)
    return replace(recipe, name="finetune_vqa_unicoder_vl_demo", task=task, model=DEMO_UNICODER_VL)


def finetune_vqa_vilbert_demo() -> Recipe:
    """As finetune_vqa_demo, with ViLBERT."""
    recipe = finetune_vqa_demo()
    task = replace(recipe.task, **_PAIR)
    return replace(recipe, name="finetune_vqa_vilbert_demo", task=task, model=DEMO_VILBERT)


def finetune_refcoco_demo_precomputed() -> Recipe:
    """As finetune_refcoco_demo, on features that the detector kept."""
    return replace(finetune_refcoco_demo(), name="finetune_refcoco_demo_precomputed", model=DEMO_PRECOMPUTED)


def finetune_refcoco_unicoder_vl_demo() -> Recipe:
    """As finetune_refcoco_demo, with Unicoder-VL."""
    recipe = finetune_refcoco_demo()
    task = replace(recipe.task, classifier="regions_norm")
    return replace(recipe, name="finetune_refcoco_unicoder_vl_demo", task=task, model=DEMO_UNICODER_VL)


def finetune_refcoco_vilbert_demo() -> Recipe:
    """As finetune_refcoco_demo, with ViLBERT."""
    recipe = finetune_refcoco_demo()
    task = replace(recipe.task, classifier="regions_norm")
    return replace(recipe, name="finetune_refcoco_vilbert_demo", task=task, model=DEMO_VILBERT)


def finetune_vcr_demo_precomputed() -> Recipe:
    """As finetune_vcr_demo, on features that the detector kept: the whole box counts in a feature."""
    recipe = finetune_vcr_demo()
    task = replace(recipe.task, instance_masks=False)
    return replace(recipe, name="finetune_vcr_demo_precomputed", task=task, model=DEMO_PRECOMPUTED)


def finetune_vcr_unicoder_vl_demo() -> Recipe:
    """As finetune_vcr_demo, with Unicoder-VL, and the other detected regions behind the objects."""
    recipe = finetune_vcr_demo()
    task = replace(recipe.task, names="class", instance_masks=False, region_loss="none", detected_regions=True)
    model = replace(DEMO_UNICODER_VL, mentioned_regions=True)
    return replace(recipe, name="finetune_vcr_unicoder_vl_demo", task=task, model=model)


def finetune_vcr_vilbert_demo() -> Recipe:
    """As finetune_vcr_demo, with ViLBERT, and the other detected regions behind the objects."""
    recipe = finetune_vcr_demo()
    task = replace(recipe.task, instance_masks=False, region_loss="none", detected_regions=True, copies_segment=False)
    return replace(recipe, name="finetune_vcr_vilbert_demo", task=task, model=DEMO_VILBERT)


def finetune_retrieval_demo() -> Recipe:
    """Captions of the images of the demo's tasks, as finetune_refcoco_demo; each has five, and validation ranks 50
    images. Of every model with the same loss: the hinge does not leave its start in so few steps."""
    recipe = finetune_refcoco_demo()
    return replace(
        recipe,
        name="finetune_retrieval_demo",
        task=RetrievalSettings(file="dataset_demo.json", caption_length=100, loss="cross_entropy"),
        optimizer=replace(recipe.optimizer, learning_rate=1e-3, region_learning_rate=5e-4),
        steps=80,
        validate_every=40,
        validation_samples=50,
        save_every=80,
    )


def finetune_retrieval_demo_precomputed() -> Recipe:
    """As finetune_retrieval_demo, on features that the detector kept."""
    return replace(finetune_retrieval_demo(), name="finetune_retrieval_demo_precomputed", model=DEMO_PRECOMPUTED)


def finetune_retrieval_unicoder_vl_demo() -> Recipe:
    """As finetune_retrieval_demo, with Unicoder-VL."""
    return replace(finetune_retrieval_demo(), name="finetune_retrieval_unicoder_vl_demo", model=DEMO_UNICODER_VL)


def finetune_retrieval_vilbert_demo() -> Recipe:
    """As finetune_retrieval_demo, with ViLBERT."""
    return replace(finetune_retrieval_demo(), name="finetune_retrieval_vilbert_demo", model=DEMO_VILBERT)
