"""The authors' checkpoints -> our models, and back. One command, either way:

    python -m vlbert.published vl-bert-base-e2e.model OUT --vocabulary vocab.txt
    python -m vlbert.published OUT vl-bert-base-e2e.model

OUT is a model's folder (docs/formats.md): `VLBert.from_pretrained(OUT)` and `start_from=OUT` read it. Its
published.json says of every key of the file what became of it, and holds what the way back needs, which gives the same
bits again.
"""

import argparse
import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from detectors.resnet import ResNetConfig
from vlbert.checkpoint import CONFIG, check_tensors, model_files, read_model
from vlbert.config import ModelConfig, RegionConfig, from_json, to_json
from vlbert.model import VLBert
from vlbert.tasks.pretraining import PretrainingHead, PretrainingSettings
from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
from vlbert.tasks.vcr import VCRHead, VCRSettings
from vlbert.tasks.vqa import VQA, VQASettings
from vlbert.text import Vocabulary

REPORT = "published.json"
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
    ("object_mask_word_embedding.", "vlbert.embedding.hidden_region_token."),
    ("object_mask_visual_embedding.", "vlbert.embedding.hidden_appearance."),
    ("aux_text_visual_embedding.", "vlbert.embedding.look_without_picture."),
    ("vlbert.word_embeddings.", "vlbert.embedding.words."),
    ("vlbert.end_embedding.", "vlbert.embedding.end_token."),
    ("vlbert.position_embeddings.", "vlbert.embedding.positions."),
    ("vlbert.token_type_embeddings.", "vlbert.embedding.segments."),
    ("vlbert.embedding_LayerNorm.", "vlbert.embedding.norm."),
    ("vlbert.visual_1x1_text.", "vlbert.embedding.look_of_words.to_hidden."),
    ("vlbert.visual_1x1_object.", "vlbert.embedding.look_of_regions.to_hidden."),
    ("vlbert.visual_ln_text.", "vlbert.embedding.look_of_words.norm."),
    ("vlbert.visual_ln_object.", "vlbert.embedding.look_of_regions.norm."),
    ("vlbert.visual_scale_text", "vlbert.embedding.look_of_words.scale"),
    ("vlbert.visual_scale_object", "vlbert.embedding.look_of_regions.scale"),
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
# Keys that repeat others: their beginning -> that of those.
_ALIASES = {
    "image_feature_extractor.head.0.": "image_feature_extractor.roi_head_feature_extractor.",
    "vlbert.mlm_head.predictions.decoder.weight": "vlbert.word_embeddings.weight",
}
# Ours are zeros where theirs lack them: only text-only rows read the first, and only pre-training reads the others.
_TEXT_ONLY = ("vlbert.embedding.look_without_picture.weight",)
_ONLY_PRETRAINING = tuple(f"vlbert.embedding.{name}.weight" for name in ("hidden_region_token", "hidden_appearance"))
_COUNTER = ".num_batches_tracked"  # a frozen norm counts nothing


@dataclass(frozen=True)
class Published:
    """What a file of theirs is, as its tensors tell: a task's settings, a model and the size of a vocabulary."""

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
        if not isinstance(self.task, VCRSettings):
            return rename
        # The four choices go through one module, which wraps the core.
        return lambda name: re.sub(r"^vlbert\.", "vlbert._module.", rename(name) or "") or None


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


def understand(shapes: dict[str, tuple[int, ...]], heads: int | None = None) -> Published:
    """What these tensors, by plain name, are; ValueError where they are no VL-BERT.

    What no shape tells is as published: 64 channels an attention head (unless `heads` says how many those are), the
    stride in 1x1 convolutions, a dilated res5, VCR's sigmoid.
    """
    needed = ("vlbert.word_embeddings.weight", "vlbert.position_embeddings.weight")
    visual = "image_feature_extractor.obj_downsample.1.weight"
    for name in (*needed, visual, "vlbert.encoder.layer.0.intermediate.dense.weight"):
        if name not in shapes:
            raise ValueError(f"it has no {name}, so it is no VL-BERT of the authors")
    vocab_size, hidden = shapes[needed[0]]
    looks, inputs = shapes[visual]
    stages = ["backbone.layer1", "backbone.layer2", "backbone.layer3", "roi_head_feature_extractor"]
    blocks = tuple(_count(shapes, rf"image_feature_extractor\.{re.escape(stage)}\.(\d+)\.") for stage in stages)
    stem = shapes.get("image_feature_extractor.backbone.conv1.weight")
    width = stem[0] if stem else (inputs - 2048) // 32
    regions = RegionConfig(
        features="end_to_end" if stem else "precomputed",
        resnet=ResNetConfig(blocks=blocks if stem else (3, 4, 23, 3), width=width, stem_pool="torch"),
        hide="features" if stem and "object_mask_visual_embedding.weight" in shapes else "pixels",
    )
    tokens = shapes["object_linguistic_embeddings.weight"][0]
    model = ModelConfig(
        layers="J" * _count(shapes, r"vlbert\.encoder\.layer\.(\d+)\."),
        hidden=hidden,
        heads=heads or max(1, hidden // HEAD_CHANNELS),
        intermediate=shapes["vlbert.encoder.layer.0.intermediate.dense.weight"][0],
        max_positions=shapes[needed[1]][0],
        visual_channels=None if looks == hidden else looks,
        visual_norm="layer_norm" if "vlbert.visual_ln_text.weight" in shapes else "scale",
        region_classes=None if tokens == 1 else tokens,
        regions=regions,
    )
    return Published(_task(shapes), model, vocab_size)


def _count(shapes: dict[str, tuple[int, ...]], pattern: str) -> int:
    """How many different numbers stand where the pattern's group is."""
    return len({match.group(1) for match in (re.match(pattern, name) for name in shapes) if match})


def _task(shapes: dict[str, tuple[int, ...]]) -> Any:
    """The settings of the task that has these tensors."""
    if "vlbert.mlm_head.predictions.bias" in shapes:
        related = "vlbert.relationsip_head.caption_image_relationship.weight" in shapes
        return PretrainingSettings(relationship=related)
    if "final_mlp.0.dense.weight" in shapes:
        kind = "words" if "final_mlp.0.LayerNorm.weight" in shapes else "regions"
    else:
        kind = "two_layers" if "final_mlp.4.weight" in shapes else "linear"
    last = {"linear": "final_mlp.1.weight", "two_layers": "final_mlp.4.weight"}.get(kind, "final_mlp.2.weight")
    if last not in shapes:
        raise ValueError("it has neither pre-training's heads nor the classifier of a fine-tuned task (final_mlp)")
    outputs = shapes[last][0]
    contextual = "cnn_loss_reg.2.weight" in shapes
    appearance = "image_feature_extractor.regularizing_predictor.weight" in shapes
    if outputs > 1:
        return VQASettings(answers=outputs, classifier=kind)
    if kind == "regions" and not contextual and not appearance:
        return RefCOCOSettings(whole_image_competes=True)
    return VCRSettings(
        pooled="vlbert.pooler.dense.weight" in shapes,
        classifier=kind,
        classifier_width=shapes["final_mlp.1.weight"][0] if kind == "two_layers" else 1024,
        region_loss="contextual" if contextual else "appearance" if appearance else "none",
    )


def convert(theirs: dict[str, Tensor], what: Published, where: str) -> tuple[dict[str, Tensor], list[dict]]:
    """(our tensors in float32, a report with one entry a key); ValueError names all that is unexpected or missing.

    An entry has `theirs` (the key), `dtype`, and one of `ours` (what it is with us), `repeats` (the key that it is
    equal to) or `counts` (batches, which a frozen norm does not need); at the end come entries with `ours` alone, for
    what the file lacks and nothing that it was made for reads.
    """
    rename, tensors, report, refused = what.ours(), {}, [], []
    plain = {plain_name(key): tensor for key, tensor in theirs.items()}
    for key, tensor in theirs.items():
        name, entry = plain_name(key), {"theirs": key, "dtype": str(tensor.dtype).removeprefix("torch.")}
        alias = next((name.replace(old, new, 1) for old, new in _ALIASES.items() if name.startswith(old)), None)
        ours = rename(name)
        if name.endswith(_COUNTER):
            entry["counts"] = int(tensor)
        elif alias:
            if alias not in plain or not torch.equal(plain[alias], tensor):
                raise ValueError(f"{where}: {key} should repeat {alias}, and does not: the file is damaged")
            entry["repeats"] = alias
        elif ours:
            entry["ours"] = ours
            tensors[ours] = tensor.float()
        else:
            refused.append(key)
        report.append(entry)
    if refused:
        raise ValueError(f"{where} has {_some(refused)}, which no model of this kind has")
    wanted = skeleton(what)
    may_lack = _TEXT_ONLY + (() if isinstance(what.task, PretrainingSettings) else _ONLY_PRETRAINING)
    for name in sorted(wanted.keys() - tensors.keys()):
        if name in may_lack:
            tensors[name] = torch.zeros(wanted[name].shape)
            report.append({"ours": name, "zeros": True})
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        back = what.theirs()
        raise ValueError(f"{where} lacks {_some([f'{back(name)} (our {name})' for name in missing])}")
    check_tensors(wanted, tensors, where)
    return tensors, report


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def skeleton(what: Published) -> dict[str, Tensor]:
    """Our tensors of such a model, without values."""
    with torch.device("meta"):
        parts = {"vlbert": VLBert(what.model, what.vocab_size), "head": what.head()}
    found = {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}
    return {name: tensor for name, tensor in found.items() if not name.endswith(_COUNTER)}


def restore(tensors: dict[str, Tensor], what: Published, report: list[dict] | None) -> dict[str, Tensor]:
    """Our tensors as theirs: exactly the keys and dtypes of the report or, without one, all that their code saves."""
    if report is None:
        rename = what.theirs()
        found = {rename(name): tensor for name, tensor in tensors.items() if not name.endswith(_COUNTER)}
        norms = [name.removesuffix(".running_var") for name in found if name.endswith(".running_var")]
        found |= {f"{norm}{_COUNTER}": torch.zeros((), dtype=torch.int64) for norm in norms}
        for alias, of in _ALIASES.items():
            found |= {name.replace(of, alias, 1): t for name, t in found.items() if name.startswith(of)}
        if not isinstance(what.task, PretrainingSettings):  # their fine-tuned models have no use for them
            for name in ("object_mask_word_embedding", "object_mask_visual_embedding", "aux_text_visual_embedding"):
                found.pop(f"{name}.weight", None)
            found.pop("vlbert.mlm_head.predictions.decoder.weight", None)
        return found
    found, repeats = {}, {plain_name(e["theirs"]): e["ours"] for e in report if "theirs" in e and "ours" in e}
    for entry in report:
        if "theirs" not in entry:
            continue
        dtype = getattr(torch, entry["dtype"])
        if "counts" in entry:
            found[entry["theirs"]] = torch.tensor(entry["counts"], dtype=dtype)
        else:
            found[entry["theirs"]] = tensors[entry.get("ours") or repeats[entry["repeats"]]].to(dtype)
    return found


def read_file(file: Path) -> dict[str, Tensor]:
    """Key -> tensor of a file of theirs; it cannot run code, and a ValueError says what it is instead."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    start = file.read_bytes()[:512].lstrip()
    if start[:1] == b"<":
        raise ValueError(f"{file} is a web page, not a checkpoint: download the file behind the link")
    try:
        # Its record of the best epoch may hold a number of numpy's.
        scalars = [np.dtype, type(np.dtype(np.float64)), np.float64, _numpy_scalar()]
        with torch.serialization.safe_globals(scalars):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{file} is no checkpoint, or wants to run code: it is not opened ({reason})") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is torn or no checkpoint of torch ({error}); fetch it again") from error
    tensors = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{file} holds no state dict: a dict of tensors, or one below 'state_dict', is needed")
    if len({plain_name(key) for key in tensors}) < len(tensors):
        raise ValueError(f"{file} holds keys with and without module.: it mixes two models")
    return tensors


def _numpy_scalar() -> Callable:
    return np.float64(0).__reduce__()[0]


def to_ours(file: Path, folder: Path, vocabulary: Path | None = None, heads: int | None = None) -> list[dict]:
    """Convert their file to a model's folder, and return the report."""
    theirs = read_file(file)
    try:
        what = understand({plain_name(key): tuple(tensor.shape) for key, tensor in theirs.items()}, heads)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file}: {error}") from error
    tensors, report = convert(theirs, what, str(file))
    words = Vocabulary.read(vocabulary) if vocabulary else None
    if words and len(words) != what.vocab_size:
        raise ValueError(f"{vocabulary} has {len(words)} pieces, {file} was trained with {what.vocab_size}")
    about = {"task": type(what.task).__name__, "settings": to_json(what.task), "num_classes": CLASSES - 1}
    files = model_files(tensors, what.model, what.vocab_size, words, about)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / REPORT).write_text(json.dumps(report, indent=0) + "\n", encoding="utf-8")
    return report


def to_theirs(folder: Path, file: Path) -> None:
    """Convert a model's folder to a file of theirs, bit-equal to the one that it came from, if it came from one."""
    saved = read_model(folder)
    kinds = {k.__name__: k for k in (PretrainingSettings, VCRSettings, VQASettings, RefCOCOSettings)}
    if saved.config.get("task") not in kinds:
        raise ValueError(f"{folder}/{CONFIG} names no task, and their files belong to one; convert a run's checkpoint")
    kind = kinds[saved.config["task"]]
    settings = saved.config.get("settings") or saved.config["recipe"]["task"]
    what = Published(from_json(kind, settings, f"{folder}/{CONFIG}"), saved.model_config, saved.vocab_size)
    report = folder / REPORT
    restored = restore(saved.model, what, json.loads(report.read_text()) if report.is_file() else None)
    torch.save({"state_dict": restored}, file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vlbert.published", description="Convert the authors' checkpoints.")
    parser.add_argument("source", type=Path, metavar="IN", help="their file, or a model's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder for their file, a file for a folder")
    parser.add_argument("--vocabulary", type=Path, help="vocab.txt of the BERT that they started from")
    parser.add_argument("--heads", type=int, help="attention heads, where one has not 64 channels")
    options = parser.parse_args()
    try:
        if options.source.is_dir():
            to_theirs(options.source, options.out)
            print(f"{options.out}: as the authors' code reads it")
            return
        report = to_ours(options.source, options.out, options.vocabulary, options.heads)
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    for entry in report:
        become = entry.get("ours") or (
            f"repeats {entry['repeats']}" if "repeats" in entry else "counts batches: left out"
        )
        print(f"{entry.get('theirs', 'not in the file, zeros')} -> {become}")
    print(f"{options.out}: {sum('theirs' in entry for entry in report)} keys of {options.source}")


if __name__ == "__main__":
    main()
