"""The authors' checkpoints: what their files hold, and which of our tensors each key is."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from detectors.resnet import ResNetConfig
from vlbert.config import ModelConfig, RegionConfig
from vlbert.model.vlbert import VLBert
from vlbert.tasks.pretraining import PretrainingHead, PretrainingSettings
from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
from vlbert.tasks.vcr import VCRHead, VCRSettings
from vlbert.tasks.vqa import OTHER_TOKENS, VQA, VQASettings

HEAD_CHANNELS = 64  # channels of an attention head in every BERT
CLASSES = 1601  # of the Visual Genome detector, background first

# The authors' name <-> ours; {} is a number. The first match counts, in either direction.
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
    ("vlbert.visual_scale_text", "vlbert.embedding.text_visual.scale"),
    ("vlbert.visual_scale_object", "vlbert.embedding.region_visual.scale"),
    *(
        (f"vlbert.encoder.layer.{{}}.{theirs}.", f"vlbert.encoder.layers.{{}}.{ours}.")
        for theirs, ours in (
            ("attention.self.query", "query"),
            ("attention.self.key", "key"),
            ("attention.self.value", "value"),
            ("attention.output.dense", "attention_output"),
            ("attention.output.LayerNorm", "attention_norm"),
            ("intermediate.dense", "intermediate"),
            ("output.dense", "output"),
            ("output.LayerNorm", "output_norm"),
        )
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
# Zeros where the file lacks them: only text-only rows read the first, and only pre-training reads the others.
TEXT_ONLY = ("vlbert.embedding.no_image_embedding.weight",)
_ONLY_PRETRAINING = tuple(f"vlbert.embedding.{name}.weight" for name in ("masked_region_token", "masked_appearance"))
COUNTER = ".num_batches_tracked"  # which a frozen norm does not use
# Fields that no tensor shows, and that their configuration has too.
IN_THEIR_CONFIGURATION = {"num_heads", "regions.features", "regions.masking", "regions.roi_size"}
IN_THEIR_CONFIGURATION |= {"regions.pixel_mean", "regions.pixel_std"}


@dataclass(frozen=True)
class Published:
    """What a file of theirs holds, by its tensors: a task's settings, a model and the size of a vocabulary."""

    task: Any
    model: ModelConfig
    vocab_size: int

    def head(self) -> nn.Module:
        """The task's head, new."""
        if isinstance(self.task, PretrainingSettings):
            return PretrainingHead(self.model, self.vocab_size, CLASSES - 1, self.task.relationship)
        if isinstance(self.task, VCRSettings):
            return VCRHead(self.model, self.task)
        task = VQA if isinstance(self.task, VQASettings) else RefCOCO
        return task(self.task, None, 0).head(self.model)

    def pairs(self) -> list[tuple[str, str]]:
        """(beginning of their name, beginning of ours) of everything in the model."""
        if isinstance(self.task, PretrainingSettings):
            return _CORE + _PRETRAINING
        if isinstance(self.task, VCRSettings):
            score = [(theirs, f"head.score.{ours}") for theirs, ours in _CLASSIFIER[self.task.classifier]]
            return _CORE + score + _VCR_REGIONS[self.task.region_loss]
        kind = self.task.classifier if isinstance(self.task, VQASettings) else "regions"
        return _CORE + [(theirs, f"head.{ours}") for theirs, ours in _CLASSIFIER[kind]]

    def ours(self) -> Callable[[str], str | None]:
        """Their name -> ours, None where there is none."""
        return _renaming(self.pairs())

    def theirs(self) -> Callable[[str], str | None]:
        """Our name -> theirs, None where there is none."""
        rename = _renaming([(ours, theirs) for theirs, ours in self.pairs()])
        return lambda name: self.in_file(rename(name) or "") or None

    def in_file(self, name: str) -> str:
        """A plain name as it is in a file: VCR wraps the core in a module for its four choices."""
        return re.sub(r"^vlbert\.", "vlbert._module.", name) if isinstance(self.task, VCRSettings) else name


def _renaming(pairs: list[tuple[str, str]]) -> Callable[[str], str | None]:
    patterns = [(re.compile("^" + re.escape(old).replace(r"\{\}", r"(\d+)")), new) for old, new in pairs]

    def rename(name: str) -> str | None:
        for pattern, new in patterns:
            match = pattern.match(name)
            if match:
                return new.format(*match.groups()) + name[match.end() :]
        return None

    return rename


def plain_name(name: str) -> str:
    """Their name without the wrappers of data-parallel training (module.) and of VCR's four choices (_module.)."""
    return re.sub(r"^vlbert\._module\.", "vlbert.", name.removeprefix("module."))


def understand(shapes: dict[str, tuple[int, ...]], num_heads: int | None = None) -> Published:
    """What these tensors, by plain name, are; ValueError where they are no VL-BERT.

    What no shape tells is as published: 64 channels an attention head (unless `num_heads` says how many those are), the
    stride in 1x1 convolutions, a dilated res5, how pictures are padded, VCR's sigmoid, its pictures of 600/1200 pixels
    and its question, answer or rationale.
    """
    vocab_size, hidden_size = _matrix(shapes, "vlbert.word_embeddings.weight")
    looks, inputs = _matrix(shapes, "image_feature_extractor.obj_downsample.1.weight")
    tokens, _ = _matrix(shapes, "object_linguistic_embeddings.weight")
    from_pixels = _any(shapes, "image_feature_extractor.backbone.")
    stages = ["backbone.layer1", "backbone.layer2", "backbone.layer3", "roi_head_feature_extractor"]
    blocks = tuple(_count(shapes, rf"image_feature_extractor\.{re.escape(stage)}\.(\d+)\.") for stage in stages)
    width = (inputs - ModelConfig.geometry_channels) // 32  # of what comes in, res5 puts out 32 times its stem's
    regions = RegionConfig(
        features="end_to_end" if from_pixels else "precomputed",
        resnet=ResNetConfig(blocks=blocks if from_pixels else (3, 4, 23, 3), width=width, stem_pool="torch"),
        masking="features" if from_pixels and "object_mask_visual_embedding.weight" in shapes else "pixels",
        padding="batch",
    )
    task = _task(shapes)
    if isinstance(task, VCRSettings):
        regions = replace(regions, long_side=1200, padding="fixed")
    model = ModelConfig(
        layers="J" * _count(shapes, r"vlbert\.encoder\.layer\.(\d+)\."),
        hidden_size=hidden_size,
        num_heads=num_heads or max(1, hidden_size // HEAD_CHANNELS),
        intermediate_size=_matrix(shapes, "vlbert.encoder.layer.0.intermediate.dense.weight")[0],
        max_positions=_matrix(shapes, "vlbert.position_embeddings.weight")[0],
        visual_embedding_size=None if looks == hidden_size else looks,
        visual_norm="layer_norm" if _any(shapes, "vlbert.visual_ln_") else "scale",
        region_classes=None if tokens == 1 else tokens,
        regions=regions,
    )
    return Published(task, model, vocab_size)


def _matrix(shapes: dict[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    """The two sides of a tensor that every file of theirs has."""
    if name not in shapes:
        raise ValueError(f"it has no {name}, so it is no VL-BERT of the authors, or not a whole one")
    if len(shapes[name]) != 2:
        raise ValueError(f"its {name} is {shapes[name]} and should be a matrix")
    return shapes[name][0], shapes[name][1]


def _any(shapes: dict[str, tuple[int, ...]], beginning: str) -> bool:
    return any(name.startswith(beginning) for name in shapes)


def _count(shapes: dict[str, tuple[int, ...]], pattern: str) -> int:
    """How many different numbers stand where the pattern's group is."""
    return len({match.group(1) for match in (re.match(pattern, name) for name in shapes) if match})


def _task(shapes: dict[str, tuple[int, ...]]) -> Any:
    """The settings of the task that has these tensors."""
    if _any(shapes, "vlbert.mlm_head."):
        return PretrainingSettings(relationship=_any(shapes, "vlbert.relationsip_head."))
    if not _any(shapes, "final_mlp."):
        raise ValueError("it has neither pre-training's heads (vlbert.mlm_head) nor a classifier of a task (final_mlp)")
    if _any(shapes, "final_mlp.0.dense."):
        kind = "words" if _any(shapes, "final_mlp.0.LayerNorm.") else "regions"
    else:
        kind = "two_layers" if _any(shapes, "final_mlp.4.") else "linear"
    last = {"linear": "final_mlp.1.weight", "two_layers": "final_mlp.4.weight"}.get(kind, "final_mlp.2.weight")
    outputs, _ = _matrix(shapes, last)
    contextual = _any(shapes, "cnn_loss_reg.")
    appearance = _any(shapes, "image_feature_extractor.regularizing_predictor.")
    positions, _ = _matrix(shapes, "vlbert.position_embeddings.weight")
    if outputs > 1:
        return VQASettings(answers=outputs, classifier=kind, question_length=min(512, positions) - OTHER_TOKENS)
    if kind == "regions" and not contextual and not appearance:
        return RefCOCOSettings(whole_image_competes=True)
    return VCRSettings(
        max_tokens=min(VCRSettings.max_tokens, positions - 5),
        pooled=_any(shapes, "vlbert.pooler."),
        classifier=kind,
        classifier_width=_matrix(shapes, "final_mlp.1.weight")[0] if kind == "two_layers" else 1024,
        region_loss="contextual" if contextual else "appearance" if appearance else "none",
    )


def skeleton(what: Published) -> dict[str, Tensor]:
    """Our tensors of such a model, without values."""
    with torch.device("meta"):
        parts = {"vlbert": VLBert(what.model, what.vocab_size), "head": what.head()}
    found = {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}
    return {name: tensor for name, tensor in found.items() if not name.endswith(COUNTER)}


def standard(what: Published, ours: Iterable[str]) -> list[dict]:
    """The report of a file as their code saves it, in float32 and without module., of a model with the tensors `ours`.

    Text-only rows have their look in it, though their code leaves that out where it trained without any.
    """
    pretraining = isinstance(what.task, PretrainingSettings)
    unread = () if pretraining else TEXT_ONLY + _ONLY_PRETRAINING
    back = what.theirs()
    entries = [{"theirs": back(name), "dtype": "float32", "ours": name} for name in ours if name not in unread]
    norms = [e["theirs"].removesuffix(".running_var") for e in entries if e["theirs"].endswith(".running_var")]
    entries += [{"theirs": f"{norm}{COUNTER}", "dtype": "int64", "counts": 0} for norm in norms]
    for alias, of in _ALIASES.items():
        for entry in [e for e in entries if e["theirs"].startswith(of)] if pretraining or of != _WORDS else ():
            told = {"counts": 0} if "counts" in entry else {"repeats": entry["theirs"]}
            entries.append({"theirs": entry["theirs"].replace(of, alias, 1), "dtype": entry["dtype"]} | told)
    return entries
