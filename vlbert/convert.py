"""The authors' checkpoints -> our models, and back. One command, either way:

    python -m vlbert.convert vl-bert-base-e2e.model OUT --vocabulary vocab.txt
    python -m vlbert.convert OUT vl-bert-base-e2e.model

OUT is a model's folder (docs/formats.md): `VLBert.from_pretrained(OUT)` and `init_from=OUT` read it. Its
published.json says of every key of the file what became of it, and holds what the way back needs, which gives the same
bits again.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detectors.resnet import ResNetConfig
from detectors.weights.safe_pickle import named_tensors, read_weight_file
from storage.safe_json import parse_json
from storage.settings import differing_fields, from_json, to_json
from vlbert.checkpoint import CONFIG, check_tensors, model_files, read_model
from vlbert.config import ModelConfig, RegionConfig, architecture
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.tasks.pretraining import PretrainingHead, PretrainingSettings
from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
from vlbert.tasks.vcr import VCRHead, VCRSettings
from vlbert.tasks.vqa import OTHER_TOKENS, VQA, VQASettings

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
# Keys that repeat others: their beginning -> that of those.
_ALIASES = {
    "image_feature_extractor.head.0.": "image_feature_extractor.roi_head_feature_extractor.",
    "vlbert.mlm_head.predictions.decoder.weight": _WORDS,
}
# Ours are zeros where theirs lack them: only text-only rows read the first, and only pre-training reads the others.
_TEXT_ONLY = ("vlbert.embedding.no_image_embedding.weight",)
_ONLY_PRETRAINING = tuple(f"vlbert.embedding.{name}.weight" for name in ("masked_region_token", "masked_appearance"))
_COUNTER = ".num_batches_tracked"  # a frozen norm counts nothing
# Fields that no tensor tells, and that their configuration has too.
_IN_THEIR_CONFIGURATION = {"num_heads", "regions.features", "regions.masking", "regions.roi_size"}
_IN_THEIR_CONFIGURATION |= {"regions.pixel_mean", "regions.pixel_std"}


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
        return lambda name: self.in_file(rename(name) or "") or None

    def in_file(self, name: str) -> str:
        """A plain name as it stands in a file: VCR's four choices go through one module, which wraps the core."""
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


class Refused(ValueError):
    """A file that is not converted. `report` is that of `convert`, with entries `refused` (why) and `missing`."""

    def __init__(self, message: str, report: list[dict]):
        super().__init__(message)
        self.report = report


def convert(
    theirs: dict[str, Tensor], what: Published, where: str, whole: bool = False
) -> tuple[dict[str, Tensor], list[dict]]:
    """(our tensors in float32, a report with one entry a key); Refused names all that is unexpected or missing.

    An entry has `theirs` (the key), `dtype`, and one of `ours` (what it is with us), `repeats` (the key that it is
    equal to) or `counts` (batches, which a frozen norm does not need); at the end come entries with `ours` alone, for
    what the file lacks and nothing that it was made for reads. With `whole`, keys that tell nothing new must be there
    too, as in every file that their code saved.
    """
    wanted = skeleton(what)
    expected = {entry["theirs"]: entry for entry in standard(what, wanted)}
    tensors, report = {}, []
    plain = {plain_name(key): tensor for key, tensor in theirs.items()}
    for key, tensor in theirs.items():
        entry = {"theirs": key, "dtype": str(tensor.dtype).removeprefix("torch.")}
        report.append(entry)
        name = plain_name(key)
        known = expected.get(key.removeprefix("module.")) or (not whole and expected.get(what.in_file(name)))
        if not known:
            entry["refused"] = "no model of this kind has it"
        elif "counts" in known:
            if tensor.shape or tensor.dtype != torch.int64:
                entry["refused"] = f"it should be one int64, and is {_kind(tensor)}"
            else:
                entry["counts"] = int(tensor)
        elif "repeats" in known:
            original = plain.get(plain_name(known["repeats"]))
            if original is None or not _equal(original, tensor):
                entry["refused"] = f"it should repeat {known['repeats']}, and does not: the file is damaged"
            else:
                entry["repeats"] = known["repeats"]
        elif tensor.shape != wanted[known["ours"]].shape:
            entry["refused"] = f"it is {list(tensor.shape)} and should be {list(wanted[known['ours']].shape)}"
        elif tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            entry["refused"] = f"it is {_kind(tensor)}; float32, float16 and bfloat16 are understood"
        elif not tensor.isfinite().all():
            entry["refused"] = "it holds NaN or infinity"
        else:
            entry["ours"] = known["ours"]
            tensors[known["ours"]] = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    found = {what.in_file(name) for name in plain}
    for name, entry in expected.items():
        if name not in found and entry.get("ours") not in _TEXT_ONLY and (whole or "ours" in entry):
            report.append({"theirs": name, "missing": True})
    in_theirs = {entry["ours"] for entry in expected.values() if "ours" in entry} - set(_TEXT_ONLY)
    for name in sorted(wanted.keys() - in_theirs - tensors.keys()):
        tensors[name] = torch.zeros(wanted[name].shape)
        report.append({"ours": name, "zeros": True})
    problems = [f"{e['theirs']}: {e['refused']}" for e in report if "refused" in e]
    problems += [f"{e['theirs']}: it is missing" for e in report if "missing" in e]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise Refused(f"{where} is not converted. {'; '.join(problems[:5])}{more}", report)
    return tensors, report


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def skeleton(what: Published) -> dict[str, Tensor]:
    """Our tensors of such a model, without values."""
    with torch.device("meta"):
        parts = {"vlbert": VLBert(what.model, what.vocab_size), "head": what.head()}
    found = {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}
    return {name: tensor for name, tensor in found.items() if not name.endswith(_COUNTER)}


def standard(what: Published, ours: Iterable[str]) -> list[dict]:
    """The report of a file as their code saves it, in float32 and without module., of a model with the tensors `ours`.

    Text-only rows have their look in it, though their code leaves that out where it trained without any.
    """
    pretraining = isinstance(what.task, PretrainingSettings)
    unread = () if pretraining else _TEXT_ONLY + _ONLY_PRETRAINING
    back = what.theirs()
    entries = [{"theirs": back(name), "dtype": "float32", "ours": name} for name in ours if name not in unread]
    norms = [e["theirs"].removesuffix(".running_var") for e in entries if e["theirs"].endswith(".running_var")]
    entries += [{"theirs": f"{norm}{_COUNTER}", "dtype": "int64", "counts": 0} for norm in norms]
    for alias, of in _ALIASES.items():
        for entry in [e for e in entries if e["theirs"].startswith(of)] if pretraining or of != _WORDS else ():
            told = {"counts": 0} if "counts" in entry else {"repeats": entry["theirs"]}
            entries.append({"theirs": entry["theirs"].replace(of, alias, 1), "dtype": entry["dtype"]} | told)
    return entries


def restore(tensors: dict[str, Tensor], report: list[dict], where: str) -> dict[str, Tensor]:
    """Our tensors as theirs: the keys and dtypes of the report. ValueError where they are not those it was made of."""
    found: dict[str, Tensor] = {}
    original = {plain_name(e["theirs"]): e["ours"] for e in report if "theirs" in e and "ours" in e}
    made: dict[tuple[str, str], Tensor] = {}  # keys that repeat each other share memory, and are stored once
    for entry in report:
        if "theirs" not in entry:
            continue
        dtype = getattr(torch, entry["dtype"])
        if "counts" in entry:
            found[entry["theirs"]] = torch.tensor(entry["counts"], dtype=dtype)
            continue
        ours = entry.get("ours") or original.get(plain_name(entry["repeats"]))
        if ours not in tensors:
            raise ValueError(f"{where} is not of this model: it tells of {ours}; delete it, and all is written anew")
        if (ours, entry["dtype"]) not in made:
            tensor = made[ours, entry["dtype"]] = tensors[ours].to(dtype)
            if not torch.equal(tensor.float(), tensors[ours]):
                raise ValueError(
                    f"{where} says that {entry['theirs']} was {entry['dtype']}, which cannot hold today's {ours}: the "
                    "weights have changed since. Delete it, and all is written in float32"
                )
        found[entry["theirs"]] = made[ours, entry["dtype"]]
    return found


def read_file(file: Path) -> dict[str, Tensor]:
    """Key -> tensor of a file of theirs; it cannot run code, and a ValueError says what it is instead."""
    _, loaded = read_weight_file(file)
    tensors = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
    if not isinstance(tensors, dict) or not tensors:
        raise ValueError(f"{file} holds no state dict: a dict of named tensors, or one below 'state_dict', is needed")
    tensors = named_tensors(file, tensors)
    prefixed = [key for key in tensors if key.startswith("module.")]
    if prefixed and len(prefixed) < len(tensors):
        bare = next(key for key in tensors if not key.startswith("module."))
        raise ValueError(f"{file} holds keys with and without module., such as {prefixed[0]} and {bare}: it is mixed")
    return tensors


def to_ours(file: Path, folder: Path, vocabulary: Path | None = None, num_heads: int | None = None) -> list[dict]:
    """Convert their file to a model's folder, and return the report. ValueError where either is no good."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; give a new folder, or an empty one")
    theirs = read_file(file)
    try:
        what = understand({plain_name(key): tuple(tensor.shape) for key, tensor in theirs.items()}, num_heads)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    tensors, report = convert(theirs, what, str(file), whole=True)
    words = Vocabulary.read(vocabulary) if vocabulary else None
    if words and len(words) != what.vocab_size:
        raise ValueError(
            f"{vocabulary} has {len(words)} pieces, {file} was trained with {what.vocab_size}: not its own"
        )
    about = {"task": type(what.task).__name__, "settings": to_json(what.task), "num_classes": CLASSES - 1}
    files = model_files(tensors, what.model, what.vocab_size, words, about)
    files[REPORT] = (json.dumps(report, indent=0) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == CONFIG):  # it goes last: without it the folder is no model
        (folder / name).write_bytes(files[name])
    return report


def to_theirs(folder: Path, file: Path) -> list[dict]:
    """Convert a model's folder to a file of theirs, bit-equal to the one that it came from, if it came from one.

    Returns the report. ValueError where their code has no such model.
    """
    if file.exists():
        raise ValueError(f"{file} is there already; give a new name")
    saved = read_model(folder)
    kinds = {k.__name__: k for k in (PretrainingSettings, VCRSettings, VQASettings, RefCOCOSettings)}
    if saved.config.get("task") not in kinds:
        raise ValueError(f"{folder}/{CONFIG} names no task, and their files belong to one; convert a run's checkpoint")
    kind = kinds[saved.config["task"]]
    settings = saved.config.get("settings") or saved.config["recipe"]["task"]
    what = Published(from_json(kind, settings, f"{folder}/{CONFIG}"), saved.model_config, saved.vocab_size)
    tensors = {name: tensor for name, tensor in saved.model.items() if not name.endswith(_COUNTER)}
    wanted = skeleton(what)
    check_tensors(wanted, tensors, str(folder))
    told = folder / REPORT
    if told.is_file():
        report = parse_json(told.read_bytes(), str(told), list)
    else:
        report = [entry | {"theirs": f"module.{entry['theirs']}"} for entry in standard(what, wanted)]
        _check_theirs(what, {plain_name(e["theirs"]): tuple(wanted[e["ours"]].shape) for e in report if "ours" in e})
    restored = restore(tensors, report, str(told))
    part = file.with_name(f"{file.name}.part")
    torch.save({"state_dict": restored}, part)
    part.rename(file)
    return report


def _check_theirs(what: Published, shapes: dict[str, tuple[int, ...]]) -> None:
    """ValueError where the model follows a rule that their code has not."""
    theirs = understand(shapes, what.model.num_heads)
    for name, ours, published in differing_fields(architecture(what.model), architecture(theirs.model)):
        stages = name.startswith("regions.resnet.") and not name.endswith((".blocks", ".width", ".stem_pool"))
        if not stages and name not in _IN_THEIR_CONFIGURATION:
            raise ValueError(f"their code has no such model: model.{name} is {ours}, theirs is {published}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vlbert.convert", description="Convert the authors' checkpoints.")
    parser.add_argument("source", type=Path, metavar="IN", help="their file, or a model's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder for their file, a new file for a folder")
    parser.add_argument("--vocabulary", type=Path, help="vocab.txt of the BERT that they started from")
    parser.add_argument("--num-heads", type=int, help="attention heads, where one has not 64 channels")
    options = parser.parse_args()
    try:
        if options.source.is_dir():
            report = to_theirs(options.source, options.out)
        else:
            report = to_ours(options.source, options.out, options.vocabulary, options.num_heads)
    except Refused as refused:
        print_report(refused.report)
        sys.exit(f"{parser.prog}: {refused}")
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print_report(report)
    print(f"{options.out}: {sum('theirs' in entry for entry in report)} keys")


def print_report(report: list[dict]) -> None:
    """A line a key: theirs, and what it is with us."""
    for entry in report:
        become = entry.get("ours") or ("counts batches: not needed" if "counts" in entry else "MISSING")
        if "repeats" in entry:
            become = f"repeats {entry['repeats']}"
        if "refused" in entry:
            become = f"REFUSED: {entry['refused']}"
        print(f"{entry.get('theirs', '(not in their file: zeros)')} -> {become}")


if __name__ == "__main__":
    main()
