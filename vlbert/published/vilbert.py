"""Read published ViLBERT checkpoints: infer the model in a file, and map the file's keys to our tensor names.

Files of both code releases are supported: the paper's (jiasenlu/vilbert_beta) and 12-in-1's
(facebookresearch/vilbert-multi-task). They have the same encoder, poolers and pre-training heads. The paper's
single-stream baseline is a model with joint layers (J).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from detectors.resnet import ResNetConfig
from detectors.weights.tensor_files import strip_wrappers
from vlbert.config import ModelConfig, RegionConfig
from vlbert.model.bert import BERT_LAYER
from vlbert.published.checkpoints import CLASSES, NO_HINTS, Hints, Published, Shapes, count, has_any
from vlbert.recipes.vilbert import (
    finetune_refcoco_vilbert,
    finetune_retrieval_vilbert,
    finetune_vcr_vilbert,
    finetune_vqa_vilbert,
    pretrain_vilbert,
)
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import OTHER_TOKENS, VQASettings

TEXT_HEAD, REGION_HEAD = 64, 128  # channels of an attention head: of the text, and of regions and co-attention

_CO_ATTENTION = {  # in their names, 1 means the regions and 2 the text
    theirs: f"{stream}.{ours}"
    for stream, number, letter in (("regions", 1, "v"), ("text", 2, "t"))
    for theirs, ours in (
        (f"biattention.query{number}", "query"),
        (f"biattention.key{number}", "key"),
        (f"biattention.value{number}", "value"),
        (f"biOutput.dense{number}", "attention_output"),
        (f"biOutput.LayerNorm{number}", "attention_norm"),
        (f"{letter}_intermediate.dense", "intermediate"),
        (f"{letter}_output.dense", "output"),
        (f"{letter}_output.LayerNorm", "output_norm"),
    )
}
_PARTS = {  # letter -> name of their list of layers, and the parts of a layer
    "J": ("layer", BERT_LAYER),
    "T": ("layer", BERT_LAYER),
    "V": ("v_layer", BERT_LAYER),
    "X": ("c_layer", _CO_ATTENTION),
}
_TEXT = {
    "bert.embeddings.word_embeddings": "words",
    "bert.embeddings.position_embeddings": "positions",
    "bert.embeddings.token_type_embeddings": "segments",
    "bert.embeddings.task_embeddings": "tasks",
    "bert.embeddings.LayerNorm": "norm",
}
_REGIONS = {
    "image_embeddings": "visual",
    "image_location_embeddings": "location",
    "token_type_embeddings": "region_segments",
    "LayerNorm": "region_norm",
}
_HEADS = {
    "cls.predictions.transform.dense": "word_transform.dense",
    "cls.predictions.transform.LayerNorm": "word_transform.norm",
    "cls.imagePredictions.transform.dense": "region_transform.dense",
    "cls.imagePredictions.transform.LayerNorm": "region_transform.norm",
    "cls.imagePredictions.decoder": "region_classifier",
}
# For models of one and of two streams: prefix of the regions' embedding, and the names of poolers and pair head.
_ONE_STREAM = "bert.image_embeddings", {"bert.pooler.dense": "pooler.dense", "cls.seq_relationship": "relationship"}
_TWO_STREAMS = (
    "bert.v_embeddings",
    {
        "bert.t_pooler.dense": "pooler.dense",
        "bert.v_pooler.dense": "pooler.region_dense",
        "cls.bi_seq_relationship": "relationship",
    },
)
_WORD_BIAS = {"cls.predictions.bias": "head.word_bias"}
_WORDS, _DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
_NUMBERS = "bert.embeddings.position_ids"  # only in files that newer versions of transformers have saved
_UNUSED = ("q_dense1", "q_dense2")  # layers of each co-attention layer's biOutput that their code never uses
# Prefixes of keys of an encoder that was saved alone, without the prefix `bert.`.
_BARE = ("embeddings.", "v_embeddings.", "image_embeddings.", "encoder.", "t_pooler.", "v_pooler.", "pooler.")
_TASK_HEADS = ("vil_", "vision_logit.", "linguisic_logit.")  # prefixes of keys of fine-tuning's heads
# The answer classifiers of the paper's code and of 12-in-1: layers, and the tensors of each layer.
_ANSWERS = (
    {"main.0": "first", "main.3": "output"},
    {"weight_v": "direction.weight", "weight_g": "gain", "bias": "direction.bias"},
)
_ANSWERS_OF_MULTI_TASK = (
    {"logit_fc.0": "first", "logit_fc.2": "norm", "logit_fc.3": "output"},
    {"weight": "weight", "bias": "bias"},
)
_RECIPES = {
    "pretraining": pretrain_vilbert,
    "vqa": finetune_vqa_vilbert,
    "vcr": finetune_vcr_vilbert,
    "refcoco": finetune_refcoco_vilbert,
    "retrieval": finetune_retrieval_vilbert,
}


def layer_names(layers: str) -> Iterator[tuple[str, str]]:
    """Yield (authors' name, our name) for each encoder module. The authors number each kind of layer separately."""
    counts = dict.fromkeys(("layer", "v_layer", "c_layer"), 0)
    for number, letter in enumerate(layers):
        kind, parts = _PARTS[letter]
        for theirs, ours in parts.items():
            yield f"bert.encoder.{kind}.{counts[kind]}.{theirs}", f"vlbert.encoder.layers.{number}.{ours}"
        counts[kind] += 1


def map_names(layers: str) -> dict[str, str]:
    """Return a dict from the authors' parameter names to ours, for the embedding, encoder and pre-training heads."""
    regions, of_streams = _ONE_STREAM if "J" in layers else _TWO_STREAMS
    modules = dict(layer_names(layers))
    modules |= {theirs: f"vlbert.embedding.{ours}" for theirs, ours in _TEXT.items()}
    modules |= {f"{regions}.{theirs}": f"vlbert.embedding.{ours}" for theirs, ours in _REGIONS.items()}
    modules |= {theirs: f"head.{ours}" for theirs, ours in (_HEADS | of_streams).items()}
    kinds = ("weight", "bias")
    return _WORD_BIAS | {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in modules.items() for kind in kinds}


def map_task_names(task: Any) -> dict[str, str]:
    """Map the authors' parameter names to ours for the classifier of a fine-tuned task; {} in pre-training."""
    if isinstance(task, VQASettings):
        layers, kinds = {"weight_norm": _ANSWERS, "gelu_norm": _ANSWERS_OF_MULTI_TASK}[task.classifier]
        return {
            f"vil_prediction.{layer}.{kind}": f"head.classifier.{ours}.{our_kind}"
            for layer, ours in layers.items()
            for kind, our_kind in kinds.items()
        }
    theirs, ours = {
        VCRSettings: ("vil_logit", "head.score.output"),
        RetrievalSettings: ("vil_logit", "head.score"),
        RefCOCOSettings: ("vision_logit", "head.output"),
    }.get(type(task), ("", ""))
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")} if theirs else {}


@dataclass(frozen=True)
class PublishedViLBert(Published):
    """A published ViLBERT checkpoint. The heads of at most one task are converted; others are stored separately."""

    other_heads: Shapes = field(default_factory=dict)  # of other tasks, in a fine-tuned file

    kind: ClassVar[str] = "ViLBERT"

    @staticmethod
    def plain_name(key: str) -> str:
        """Remove the prefixes of training wrappers from a key, and rename it as in the authors' latest files.

        In older files, LayerNorms have gamma and beta instead of weight and bias. In files without heads, keys lack the
        prefix "bert.", or it is "vilbert.".
        """
        name = strip_wrappers(key).removeprefix("vilbert.").replace("gamma", "weight").replace("beta", "bias")
        return f"bert.{name}" if name.startswith(_BARE) else name

    @classmethod
    def from_shapes(cls, shapes: Shapes, hints: Hints = NO_HINTS) -> "PublishedViLBert":
        """Infer the model from the shapes of its tensors. The shapes do not show all settings.

        The order of layers is the published one (see `_infer_layers`). Unless `hints` has the numbers of attention
        heads, each head has 64 channels for the text, and 128 for the regions and for co-attention.
        """
        model = _infer_model(shapes, hints)
        vocab_size, _ = cls.matrix(shapes, _WORDS)
        fine_tuned = has_any(shapes, _TASK_HEADS)
        if hints.task and not fine_tuned:
            raise ValueError("it is pre-trained and has no heads of fine-tuned tasks: give no task")
        if not fine_tuned and not has_any(shapes, "cls."):
            return cls(None, model, vocab_size)
        task = _infer_task(shapes, hints, model.max_positions) if fine_tuned else pretrain_vilbert().task
        classes = shapes.get("cls.imagePredictions.decoder.weight", (CLASSES,))[0]
        published = cls(task, model, vocab_size, classes - 1)
        if not fine_tuned:
            return published
        read = {entry["theirs"] for entry in published.entries()}
        own = {key for key, ours in map_names(model.layers).items() if ours.startswith("head.")}
        heads = {key: shape for key, shape in shapes.items() if key in own or key.startswith(_TASK_HEADS)}
        return replace(published, other_heads={key: shape for key, shape in heads.items() if key not in read})

    def entries(self) -> list[dict]:
        theirs = {name: key for key, name in (map_names(self.model.layers) | map_task_names(self.task)).items()}
        entries: list[dict] = [{"theirs": theirs[name], "dtype": "float32", "ours": name} for name in self.skeleton]
        if self.task is not None:
            entries += [entry | {"theirs": _DECODER} for entry in entries if entry["theirs"] == _WORDS]
        kept = self._unused_layers() | self.other_heads
        entries += [{"theirs": key, "dtype": "float32", "kept": list(shape)} for key, shape in kept.items()]
        return [*entries, {"theirs": _NUMBERS, "dtype": "int64", "kept": [1, self.model.max_positions]}]

    def _unused_layers(self) -> Shapes:
        """Return the shapes, by key, of the co-attention tensors in the authors' files that their code does not use."""
        inputs = self.model.coattention.hidden_size
        widths = zip(_UNUSED, (self.model.regions_stream.hidden_size, self.model.hidden_size), strict=True)
        return {
            f"bert.encoder.c_layer.{number}.biOutput.{name}.{kind}": shape
            for name, width in widths
            for number in range(self.model.layers.count("X"))
            for kind, shape in (("weight", (width, inputs)), ("bias", (width,)))
        }


def is_vilbert(shapes: Iterable[str]) -> bool:
    """Return True if the plain names in `shapes` are those of a ViLBERT or of its single-stream baseline."""
    return has_any(shapes, (f"{_ONE_STREAM[0]}.", f"{_TWO_STREAMS[0]}.", "bert.encoder.c_layer."))


def _infer_task(shapes: Shapes, hints: Hints, positions: int) -> Any:
    """Infer a fine-tuned model's task settings. Raises ValueError if neither shapes nor hints show the task."""
    multi_task = has_any(shapes, "vil_prediction.logit_fc.")
    last = "vil_prediction.logit_fc.3.weight" if multi_task else "vil_prediction.main.3.weight_v"
    several = shapes.get(last, (1,))[:1] != (1,)
    name = hints.task or ("vqa" if several and not multi_task else None)
    if name is None:
        heads = "heads of several tasks" if multi_task else "the heads of VCR, RefCOCO+ or retrieval"
        raise ValueError(f"it has {heads}, and its tensors do not show which to take: name one, --task NAME")
    task = _RECIPES[name]().task
    if name == "vqa":
        answers, _ = PublishedViLBert.matrix(shapes, last)
        if multi_task:
            task = replace(task, classifier="gelu_norm", classifier_dropout=0.0)
        task = replace(task, answers=answers, question_length=min(task.question_length, positions - OTHER_TOKENS))
    return task


def _infer_model(shapes: Shapes, hints: Hints) -> ModelConfig:
    def matrix(name: str) -> tuple[int, int]:
        return PublishedViLBert.matrix(shapes, f"{name}.weight")

    one_stream = has_any(shapes, _ONE_STREAM[0])
    _, hidden_size = matrix("bert.embeddings.word_embeddings")
    region_size, channels = matrix(f"{(_ONE_STREAM if one_stream else _TWO_STREAMS)[0]}.image_embeddings")
    sizes = {"text": hidden_size}
    two_streams: dict[str, Any] = {}
    if not one_stream:
        sizes |= {"regions": region_size, "co-attention": matrix("bert.encoder.c_layer.0.biattention.query1")[0]}
        two_streams = {
            "region_hidden_size": region_size,
            "region_intermediate_size": matrix("bert.encoder.v_layer.0.intermediate.dense")[0],
            "coattention_size": sizes["co-attention"],
            "pooler": "sum" if hints.fusion_method == "sum" else "product",
        }
    elif hints.fusion_method == "sum":
        raise ValueError("it has one stream and one pooler: give no fusion_method")
    if hints.num_heads and len(hints.num_heads) != len(sizes):
        raise ValueError(f"num_heads needs one number for each of {', '.join(sizes)}; {len(hints.num_heads)} are given")
    if "bert.embeddings.task_embeddings.weight" not in shapes:
        if hints.task_token is not None:
            raise ValueError("it has no table of task tokens: give no task token")
    elif hints.task_token is None:
        raise ValueError("it has a table of task tokens, which does not show your task's row: give it, --task-token N")
    channels_of = {"text": TEXT_HEAD}
    heads = hints.num_heads or [max(1, size // channels_of.get(kind, REGION_HEAD)) for kind, size in sizes.items()]
    kinds = ("num_heads", "region_num_heads", "coattention_num_heads")
    num_heads: dict[str, Any] = dict(zip(kinds, heads, strict=False))
    return ModelConfig(
        layers=_infer_layers(shapes, one_stream),
        hidden_size=hidden_size,
        intermediate_size=matrix("bert.encoder.layer.0.intermediate.dense")[0],
        max_positions=matrix("bert.embeddings.position_embeddings")[0],
        embedding="separate",
        region_segment=one_stream,
        whole_image="mean",
        task_token=hints.task_token,
        regions=RegionConfig(
            features="precomputed",
            resnet=ResNetConfig(width=channels // 32, stem_pool="torch"),
            masked_features="zeros",
        ),
        **num_heads,
        **two_streams,
    )


def _infer_layers(shapes: Shapes, one_stream: bool) -> str:
    """Infer ModelConfig.layers, assuming the published order: "T" for the first text layers, then "XTV" repeated."""
    text, regions, both = (
        count(shapes, rf"bert\.encoder\.{kind}\.(\d+)\.") for kind in ("layer", "v_layer", "c_layer")
    )
    if one_stream:
        return "J" * text
    if regions != both or both > text:
        raise ValueError(
            f"it has {text} text, {regions} region and {both} co-attention layers; in published models, the last two "
            "numbers are equal, and the first is not less"
        )
    return "T" * (text - both) + "XTV" * both
