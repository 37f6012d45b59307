"""Read published VL-BERT checkpoints: infer the model in a file, and map the file's keys to our tensor names."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from detectors.resnet import ResNetConfig
from detectors.weights.tensor_files import strip_wrappers
from vlbert.config import ModelConfig, RegionConfig
from vlbert.model.bert import BERT_LAYER
from vlbert.published.checkpoints import COUNTER, NO_HINTS, Hints, Published, Shapes, count, has_any
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import OTHER_TOKENS, VQASettings

HEAD_CHANNELS = 64  # channels of an attention head in every BERT

# The authors' prefix, our prefix; {} is a number. In both directions, the first match counts.
_BLOCKS = [
    (f"{theirs}.{{}}.{part}", f"{ours}.{{}}.{our_part}")
    for theirs, ours in (
        *((f"image_feature_extractor.backbone.layer{n}", f"vlbert.fast_rcnn.backbone.res{n + 1}") for n in (1, 2, 3)),
        ("image_feature_extractor.roi_head_feature_extractor", "vlbert.fast_rcnn.res5"),
    )
    for part, our_part in (
        ("bn{}.", "conv{}.norm."),
        ("downsample.1.", "shortcut.norm."),
        ("downsample.0.", "shortcut."),
        ("conv{}.", "conv{}."),
    )
]
_CORE = [
    ("image_feature_extractor.backbone.bn1.", "vlbert.fast_rcnn.backbone.stem.conv1.norm."),
    ("image_feature_extractor.backbone.conv1.", "vlbert.fast_rcnn.backbone.stem.conv1."),
    *_BLOCKS,
    ("image_feature_extractor.obj_downsample.1.", "vlbert.embedding.visual."),
    ("object_linguistic_embeddings.", "vlbert.embedding.region_token."),
    ("object_mask_word_embedding.", "vlbert.embedding.masked_region_token."),
    ("object_mask_visual_embedding.", "vlbert.embedding.masked_appearance."),
    ("aux_text_visual_embedding.", "vlbert.embedding.no_image_embedding."),
    ("vlbert.word_embeddings.", "vlbert.embedding.words."),
    ("vlbert.end_embedding.", "vlbert.embedding.end_token."),
    ("vlbert.position_embeddings.", "vlbert.embedding.positions."),
    ("vlbert.token_type_embeddings.", "vlbert.embedding.segments."),
    ("vlbert.embedding_LayerNorm.", "vlbert.embedding.norm."),
    ("vlbert.visual_1x1_text.", "vlbert.embedding.text_visual.to_hidden."),
    ("vlbert.visual_1x1_object.", "vlbert.embedding.region_visual.to_hidden."),
    ("vlbert.visual_ln_text.", "vlbert.embedding.text_visual.norm."),
    ("vlbert.visual_ln_object.", "vlbert.embedding.region_visual.norm."),
    *(
        (f"vlbert.encoder.layer.{{}}.{theirs}.", f"vlbert.encoder.layers.{{}}.{ours}.")
        for theirs, ours in BERT_LAYER.items()
    ),
    ("vlbert.pooler.", "head.pooler."),
]
_CLASSIFIER = {  # by our kind of classifier
    "linear": [("final_mlp.1.", "output.")],
    "two_layers": [("final_mlp.1.", "first."), ("final_mlp.4.", "output.")],
    "words": [
        ("final_mlp.0.dense.", "transform.dense."),
        ("final_mlp.0.LayerNorm.", "transform.norm."),
        ("final_mlp.2.", "output."),
    ],
    "regions": [("final_mlp.0.dense.", "transform.dense."), ("final_mlp.2.", "output.")],
}
_PRETRAINING = [
    ("vlbert.mlm_head.predictions.bias", "head.word_bias"),
    ("vlbert.mlm_head.predictions.transform.dense.", "head.word_transform.dense."),
    ("vlbert.mlm_head.predictions.transform.LayerNorm.", "head.word_transform.norm."),
    ("vlbert.mvrc_head.transform.dense.", "head.region_transform.dense."),
    ("vlbert.mvrc_head.region_cls_pred.", "head.region_classifier."),
    ("vlbert.relationsip_head.caption_image_relationship.", "head.relationship."),
]
_VCR_REGIONS = {
    "contextual": [
        ("cnn_loss_reg.0.dense.", "head.region_transform.dense."),
        ("cnn_loss_reg.2.", "head.region_classifier."),
    ],
    "appearance": [("image_feature_extractor.regularizing_predictor.", "head.region_classifier.")],
    "none": [],
}
_WORDS = "vlbert.word_embeddings.weight"
# Prefixes of keys that repeat others -> the prefixes of those.
_ALIASES = {
    "image_feature_extractor.head.0.": "image_feature_extractor.roi_head_feature_extractor.",
    "vlbert.mlm_head.predictions.decoder.weight": _WORDS,
}
# Zeros if the file lacks them: only text-only rows read the first, and only pre-training reads the others.
_TEXT_ONLY = ("vlbert.embedding.no_image_embedding.weight",)
_ONLY_PRETRAINING = tuple(f"vlbert.embedding.{name}.weight" for name in ("masked_region_token", "masked_appearance"))


@dataclass(frozen=True)
class PublishedVLBert(Published):
    """A published VL-BERT checkpoint, pre-trained or fine-tuned on VQA, VCR or RefCOCO+."""

    kind: ClassVar[str] = "VL-BERT"
    state_key: ClassVar[str | None] = "state_dict"
    optional: ClassVar[tuple[str, ...]] = _TEXT_ONLY

    @staticmethod
    def plain_name(key: str) -> str:
        """Remove the prefixes of training wrappers from a key, and the "_module." that only VCR models have."""
        return re.sub(r"^vlbert\._module\.", "vlbert.", strip_wrappers(key))

    @classmethod
    def from_shapes(cls, shapes: Shapes, hints: Hints = NO_HINTS) -> "PublishedVLBert":
        """Infer the model from its tensors' shapes. Settings that the shapes do not show get the published values.

        These are 64 channels per head (unless `hints` has the number of heads), the stride in 1x1 convolutions, a
        dilated res5, image padding, and VCR's loss, image size (600/1200) and subtask.
        """
        if hints.num_heads and len(hints.num_heads) != 1:
            raise ValueError(f"it is a VL-BERT, so num_heads must be one number; {len(hints.num_heads)} are given")
        if hints.task or hints.task_token is not None:
            raise ValueError("it is a VL-BERT, whose tensors show its task: give neither a task nor a task token")
        vocab_size, hidden_size = cls.matrix(shapes, _WORDS)
        task = _infer_task(shapes)
        visual, _ = cls.matrix(shapes, "image_feature_extractor.obj_downsample.1.weight")
        tokens, _ = cls.matrix(shapes, "object_linguistic_embeddings.weight")
        model = ModelConfig(
            layers="J" * count(shapes, r"vlbert\.encoder\.layer\.(\d+)\."),
            hidden_size=hidden_size,
            num_heads=hints.num_heads[0] if hints.num_heads else max(1, hidden_size // HEAD_CHANNELS),
            intermediate_size=cls.matrix(shapes, "vlbert.encoder.layer.0.intermediate.dense.weight")[0],
            max_positions=cls.matrix(shapes, "vlbert.position_embeddings.weight")[0],
            visual_embedding_size=None if visual == hidden_size else visual,
            region_classes=None if tokens == 1 else tokens,
            regions=_infer_regions(shapes, task),
        )
        return cls(task, model, vocab_size)

    def prefix_pairs(self) -> list[tuple[str, str]]:
        """Return pairs (the authors' prefix, our prefix) that cover all tensor names of the model."""
        if isinstance(self.task, PretrainingSettings):
            return _CORE + _PRETRAINING
        if isinstance(self.task, VCRSettings):
            score = [(theirs, f"head.score.{ours}") for theirs, ours in _CLASSIFIER[self.task.classifier]]
            return _CORE + score + _VCR_REGIONS[self.task.region_loss]
        kind = self.task.classifier if isinstance(self.task, VQASettings) else "regions"
        return _CORE + [(theirs, f"head.{ours}") for theirs, ours in _CLASSIFIER[kind]]

    def entries(self) -> list[dict]:
        pretraining = isinstance(self.task, PretrainingSettings)
        unread = () if pretraining else _TEXT_ONLY + _ONLY_PRETRAINING
        pairs, names = self.prefix_pairs(), [name for name in self.skeleton if name not in unread]
        entries: list[dict] = [{"theirs": _rename(name, pairs), "dtype": "float32", "ours": name} for name in names]
        norms = [e["theirs"].removesuffix(".running_var") for e in entries if e["theirs"].endswith(".running_var")]
        entries += [{"theirs": f"{norm}{COUNTER}", "dtype": "int64", "kept": []} for norm in norms]
        for alias, name in _ALIASES.items():
            repeated = [e for e in entries if e["theirs"].startswith(name)] if pretraining or name != _WORDS else []
            entries += [entry | {"theirs": entry["theirs"].replace(name, alias, 1)} for entry in repeated]
        return entries


def _rename(name: str, pairs: list[tuple[str, str]]) -> str:
    """Replace our prefix in a tensor name with the authors' prefix."""
    for theirs, ours in pairs:
        if match := re.match(re.escape(ours).replace(r"\{\}", r"(\d+)"), name):
            return theirs.format(*match.groups()) + name[match.end() :]
    raise KeyError(name)


def _infer_regions(shapes: Shapes, task: Any) -> RegionConfig:
    """Infer the region settings. Features are precomputed unless the file has a Fast R-CNN."""
    _, inputs = PublishedVLBert.matrix(shapes, "image_feature_extractor.obj_downsample.1.weight")
    from_pixels = has_any(shapes, "image_feature_extractor.backbone.")
    stages = ["backbone.layer1", "backbone.layer2", "backbone.layer3", "roi_head_feature_extractor"]
    res2, res3, res4, res5 = (
        count(shapes, rf"image_feature_extractor\.{re.escape(stage)}\.(\d+)\.") for stage in stages
    )
    blocks = (res2, res3, res4, res5) if from_pixels else (3, 4, 23, 3)
    width = (inputs - ModelConfig.geometry_channels) // 32  # res5 returns 32 channels per channel of the stem
    regions = RegionConfig(
        features="end_to_end" if from_pixels else "precomputed",
        resnet=ResNetConfig(blocks=blocks, width=width, stem_pool="torch"),
        masking="features" if from_pixels and "object_mask_visual_embedding.weight" in shapes else "pixels",
        padding="batch",
    )
    return replace(regions, long_side=1200, padding="fixed") if isinstance(task, VCRSettings) else regions


def _infer_task(shapes: Shapes) -> Any:
    """Infer the task's settings from the shapes of the tensors."""
    if has_any(shapes, "vlbert.mlm_head."):
        return PretrainingSettings(relationship=has_any(shapes, "vlbert.relationsip_head."))
    if not has_any(shapes, "final_mlp."):
        raise ValueError("it has neither pre-training's heads (vlbert.mlm_head) nor a classifier of a task (final_mlp)")
    if has_any(shapes, "final_mlp.0.dense."):
        kind = "words" if has_any(shapes, "final_mlp.0.LayerNorm.") else "regions"
    else:
        kind = "two_layers" if has_any(shapes, "final_mlp.4.") else "linear"
    last, _ = _CLASSIFIER[kind][-1]
    outputs, _ = PublishedVLBert.matrix(shapes, f"{last}weight")
    contextual = has_any(shapes, "cnn_loss_reg.")
    appearance = has_any(shapes, "image_feature_extractor.regularizing_predictor.")
    positions, _ = PublishedVLBert.matrix(shapes, "vlbert.position_embeddings.weight")
    if outputs > 1:
        return VQASettings(answers=outputs, classifier=kind, question_length=min(512, positions) - OTHER_TOKENS)
    if kind == "regions" and not contextual and not appearance:
        return RefCOCOSettings(whole_image_competes=True)
    return VCRSettings(
        max_tokens=min(VCRSettings.max_tokens, positions - 5),
        pooled=has_any(shapes, "vlbert.pooler."),
        classifier=kind,
        classifier_width=PublishedVLBert.matrix(shapes, "final_mlp.1.weight")[0] if kind == "two_layers" else 1024,
        region_loss="contextual" if contextual else "appearance" if appearance else "none",
    )
