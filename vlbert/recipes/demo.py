"""Recipes of size demo, for `make demo` and `make compare`: small models that learn from drawn scenes."""

from dataclasses import replace
from typing import Any, Literal

from detectors.resnet import ResNetConfig
from training.optimizer import OptimizerConfig
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.tasks.labels import LabelSettings
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

Model = Literal["vlbert", "unicoder_vl", "vilbert"]
Features = Literal["end_to_end", "precomputed"]

# Learns from 800 drawn scenes in two minutes on two cores. Weights start wider, because N(0, 0.02) leaves attention of
# 96 channels inert. The image has gain 1 at once, because fading it in from 0 takes too many steps.
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
        roi_size=7,  # as in the detector, whose stem and res2 are not trained
    ),
)

# A model of the same width and depth, on precomputed features of the same ResNet.
DEMO_PRECOMPUTED = replace(DEMO, regions=replace(DEMO.regions, features="precomputed"))
_SEPARATE = replace(DEMO_PRECOMPUTED, embedding="separate")
DEMO_UNICODER_VL = replace(_SEPARATE, whole_image="none")
DEMO_VILBERT = replace(_SEPARATE, layers="T" + "XTV" * 2, whole_image="mean", pooler="product")


def demo_model(model: Model, features: Features) -> ModelConfig:
    """Return the configuration of a small model. Unicoder-VL and ViLBERT always use precomputed features."""
    if model != "vlbert":
        return {"unicoder_vl": DEMO_UNICODER_VL, "vilbert": DEMO_VILBERT}[model]
    return DEMO if features == "end_to_end" else DEMO_PRECOMPUTED


def pretrain(model: Model, features: Features, name: str) -> Recipe:
    """Configure pre-training on the data of `make demo`. For end_to_end, set --model.regions.weights to a detector."""
    task = PretrainingSettings(
        words=WordMasking(probability=0.25),
        # Most chosen regions stay visible. From these, the encoder learns which appearance belongs to which class.
        regions=RegionMasking(probability=0.5, masked=0.3),
        max_elements=None,
        text_length=24,
    )
    if model != "vlbert":
        target = {"region_target": "class"} if model == "unicoder_vl" else {"region_loss": "kl"}
        task = replace(task, relationship=True, mismatched=0.5, region_head="transform_norm", **target)
    return Recipe(
        name=name,
        task=task,
        model=demo_model(model, features),
        data=DataConfig(held_out=("held-out",), batch=32, text_batch=8 if model == "vlbert" else 0, workers=0),
        optimizer=OptimizerConfig(learning_rate=2e-3, region_learning_rate=1e-3, warmup_steps=50, weight_decay=1e-2),
        steps=600,
        vocabulary_size=500,
        precision="fp32",
        validate_every=150,
        validation_samples=300,
        save_every=150,
    )


def _finetune(model: ModelConfig, task: Any, name: str, steps: int = 120) -> Recipe:
    """Configure fine-tuning on the demo's data, with validation halfway and at the end."""
    return Recipe(
        name=name,
        task=task,
        model=model,
        data=DataConfig(datasets={"coco": None}, held_out=("coco",), batch=32, workers=0),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, region_learning_rate=1e-3, warmup_steps=20, weight_decay=1e-2, max_grad_norm=1.0
        ),
        steps=steps,
        precision="fp32",
        log_every=10,
        validate_every=steps // 2,
        validation_samples=None,
        save_every=steps,
    )


def finetune_refcoco(model: Model, features: Features, name: str) -> Recipe:
    """Configure fine-tuning on RefCOCO+-like expressions, with detected regions."""
    task = RefCOCOSettings(regions="detected")
    if model != "vlbert":
        task = replace(task, classifier="regions_norm")
    return _finetune(demo_model(model, features), task, name)


def finetune_labels(model: Model, features: Features, name: str) -> Recipe:
    """Configure training on labels of your own."""
    recipe = _finetune(demo_model(model, features), LabelSettings(), name, steps=200)
    return replace(recipe, data=replace(recipe.data, datasets={"pairs": None}, held_out=("pairs",)))


def finetune_vqa(model: Model, features: Features, name: str) -> Recipe:
    """Configure fine-tuning on VQA-like questions. Give the number of answers in the data: --task.answers N."""
    task = VQASettings()
    if model != "vlbert":  # VL-BERT reads [MASK], and answers start from words; the others read the pair
        task = replace(task, reads="pair", classifier="gelu_norm", answers_from_words=False)
    return _finetune(demo_model(model, features), task, name)


def finetune_vcr(model: Model, features: Features, name: str) -> Recipe:
    """Configure fine-tuning on VCR-like questions with annotated boxes. For QA->R, add --task.subtask rationale."""
    # Softmax over four choices, and no pooler: few new weights, because there are so few steps.
    task, config = VCRSettings(mask_size=4, loss="softmax", pooled=False), demo_model(model, features)
    if config.regions.features == "precomputed":  # these cover the whole box
        task = replace(task, instance_masks=False)
    if model != "vlbert":
        task = replace(task, region_loss="none", detected_regions=True)  # these follow the items' own boxes
    if model == "unicoder_vl":
        task, config = replace(task, names="class"), replace(config, mentioned_regions=True)
    if model == "vilbert":
        task = replace(task, copies_segment=False)
    return _finetune(config, task, name, steps=240)  # accuracy is that of chance for the first 40 to 80 steps


def finetune_retrieval(model: Model, features: Features, name: str) -> Recipe:
    """Configure fine-tuning on retrieval. The demo's images have five captions each, and validation ranks 50 images."""
    # All models use cross-entropy, because nothing is learned from the hinge loss in so few steps.
    task = RetrievalSettings(file="dataset_demo.json", caption_length=100, loss="cross_entropy")
    return replace(_finetune(demo_model(model, features), task, name), validation_samples=50)
