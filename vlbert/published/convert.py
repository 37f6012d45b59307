"""Convert published VL-BERT and ViLBERT checkpoints to models of this project, and back.

    vlbert convert vl-bert-base-e2e.model OUT --vocabulary vocab.txt
    vlbert convert OUT vl-bert-base-e2e.model
    vlbert convert pytorch_model_9.bin OUT --vocabulary vocab.txt

The model is inferred from the file's keys. OUT is a model folder (docs/formats.md), which
`VLBertModel.from_pretrained(OUT)` and `--init_from OUT` read. Its published.json records how each key was
converted. Tensors that have no counterpart here are kept in published.safetensors. With these files, converting back
gives bit-identical tensors.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import tyro
from safetensors.torch import save
from torch import Tensor

from detectors.weights.tensor_files import read_tensors
from storage.programs import Command, Flat, Positional
from storage.safe_json import parse_json, short_repr
from storage.settings import to_json
from training.checkpoint import load_tensors
from vlbert.checkpoint import CONFIG, model_files, read_model
from vlbert.data.vocabulary import Vocabulary
from vlbert.published.checkpoints import NO_HINTS, Hints, Published, has_any
from vlbert.published.vilbert import PublishedViLBert, is_vilbert
from vlbert.published.vlbert import PublishedVLBert

REPORT, KEPT = "published.json", "published.safetensors"


def convert(theirs: dict[str, Tensor], published: Published, source: str) -> tuple[dict[str, Tensor], list[dict]]:
    """Convert the authors' tensors to ours (float32). Returns the tensors, and a report with an entry for each key.

    An entry has `theirs` (the key), `dtype`, and either `ours` or `kept`. `ours` is our name for the tensor. Keys of
    identical tensors share a name. `kept` is the shape of a tensor that has no counterpart here and is stored
    separately. A tensor that the file lacks becomes zeros if the file's task does not read it. Raises ValueError if a
    key is unexpected, if a required one is missing, or if a tensor is invalid.
    """
    wanted, expected = published.skeleton, {entry["theirs"]: entry for entry in published.entries()}
    times = Counter(map(published.plain_name, theirs))
    tensors, report, problems = {}, [], []
    for key, tensor in theirs.items():
        entry = expected.get(published.plain_name(key))
        twice = times[published.plain_name(key)] > 1
        if problem := "the file has it under two names" if twice else _find_problem(tensor, entry, wanted, tensors):
            problems.append(f"{key}: {problem}")
            continue
        assert entry is not None  # that would be a problem
        report.append(entry | {"theirs": key, "dtype": _dtype(tensor)})
        if "ours" in entry:
            tensors[entry["ours"]] = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    problems += [
        f"{name}: it is missing"
        for name, entry in expected.items()
        if name not in times and "ours" in entry and entry["ours"] not in {*tensors, *published.optional}
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{source} cannot be converted. {'; '.join(problems[:5])}{more}")
    return tensors | {name: torch.zeros(wanted[name].shape) for name in sorted(wanted.keys() - tensors.keys())}, report


def _find_problem(tensor: Tensor, entry: dict | None, wanted: dict[str, Tensor], tensors: dict[str, Tensor]) -> str:
    """Return what is wrong with one of the authors' tensors, or "" if it is valid.

    `entry` is its expected report entry. `wanted` has our tensors' shapes. `tensors` are those converted so far.
    """
    if not entry:
        return "no model of this kind has it"
    shape = entry["kept"] if "kept" in entry else list(wanted[entry["ours"]].shape)
    if list(tensor.shape) != shape:
        return f"it is {list(tensor.shape)} and should be {shape}"
    known = ("int64",) if entry["dtype"] == "int64" else ("float32", "float16", "bfloat16")
    if _dtype(tensor) not in known:
        return f"it is {_dtype(tensor)}; {', '.join(known)} can be converted"
    if not tensor.isfinite().all():
        return "it holds NaN or infinity"
    before = tensors.get(entry.get("ours", ""))
    return "" if before is None or torch.equal(before, tensor.float()) else "it differs from its copy (damaged file)"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def restore(tensors: dict[str, Tensor], kept: dict[str, Tensor], report: list[dict], source: str) -> dict[str, Tensor]:
    """Convert our tensors back to the authors' tensors, with the keys and dtypes in the report.

    `kept` has the tensors without a counterpart here, by key. `source` names the report in messages. Raises ValueError
    if the report does not fit the tensors.
    """
    restored: dict[str, Tensor] = {}
    converted: dict[tuple[str, str], Tensor] = {}  # keys of identical tensors share memory, and are stored once
    for entry in report:
        key, dtype = entry["theirs"], getattr(torch, entry["dtype"])
        known, name = (kept, key) if "kept" in entry else (tensors, entry.get("ours"))
        if name not in known:
            raise ValueError(f"{source} is not of this model: it names {name}. Convert the authors' file again")
        if "kept" in entry:
            restored[key] = kept[key]
            continue
        if (name, entry["dtype"]) not in converted:
            tensor = converted[name, entry["dtype"]] = tensors[name].to(dtype)
            if not torch.equal(tensor.float(), tensors[name]):
                raise ValueError(
                    f"{source} says that {key} was {entry['dtype']}, which cannot hold the current {name}: the weights "
                    "have changed since. Convert the authors' file again"
                )
        restored[key] = converted[name, entry["dtype"]]
    return restored


def identify(theirs: dict[str, Tensor], hints: Hints = NO_HINTS) -> Published:
    """Infer the model from the authors' tensors. Raises ValueError if it is neither a VL-BERT nor a ViLBERT."""
    if is_vilbert(map(PublishedViLBert.plain_name, theirs)):
        kind = PublishedViLBert
    elif has_any(map(PublishedVLBert.plain_name, theirs), ("vlbert.", "image_feature_extractor.")):
        kind = PublishedVLBert
    else:
        raise ValueError(
            f"it has keys such as {next(iter(theirs))}, and none of a VL-BERT (vlbert.*) or a ViLBERT "
            "(bert.v_embeddings.*): it is not a model of their authors"
        )
    return kind.from_shapes({kind.plain_name(key): tuple(tensor.shape) for key, tensor in theirs.items()}, hints)


def _check_fusion(published: Published, config: Path, hints: Hints) -> None:
    """Raise ValueError if a ViLBERT's configuration file, which the hub has beside the weights, contradicts `hints`."""
    if isinstance(published, PublishedViLBert) and config.is_file():
        fusion = parse_json(config.read_bytes(), str(config)).get("fusion_method", hints.fusion_method)
        if fusion != hints.fusion_method:
            fix = f"give --fusion_method {fusion}" if fusion in ("mul", "sum") else "only mul and sum can be converted"
            raise ValueError(f"{config} has fusion_method {short_repr(fusion)}: {fix}")


def to_ours(file: Path, folder: Path, vocabulary: Path | None = None, hints: Hints = NO_HINTS) -> list[dict]:
    """Convert a published file to a model folder. Returns `convert`'s report. Raises ValueError for an invalid file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists; give a new folder, or an empty one")
    theirs = read_tensors(file)
    try:
        published = identify(theirs, hints)
        _check_fusion(published, file.with_name(CONFIG), hints)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    tensors, report = convert(theirs, published, str(file))
    words = Vocabulary.read(vocabulary) if vocabulary else None
    if words and len(words) != published.vocab_size:
        raise ValueError(
            f"{vocabulary} has {len(words)} tokens, but {file} was trained with {published.vocab_size}; give its own"
        )
    settings = published.task
    task = {} if settings is None else {"task": type(settings).__name__, "settings": to_json(settings)}
    metadata = {"num_classes": published.num_classes} | task
    kept = {entry["theirs"]: theirs[entry["theirs"]].clone() for entry in report if "kept" in entry}
    extra_files = {KEPT: save(kept)} if kept else {}
    files = model_files(tensors, published.model, published.vocab_size, words, metadata, extra_files)
    files[REPORT] = (json.dumps(report, indent=0) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == CONFIG):  # config.json last: it makes the folder a model
        (folder / name).write_bytes(files[name])
    return report


def to_theirs(folder: Path, file: Path) -> list[dict]:
    """Convert a folder that `to_ours` made back to the authors' file. Returns `convert`'s report.

    The tensors are bit-identical to the published ones. Raises ValueError if the folder has no report, or if its
    weights have changed.
    """
    if file.exists():
        raise ValueError(f"{file} already exists; give a new name")
    saved, written = read_model(folder), folder / REPORT
    if not written.is_file():
        raise ValueError(f"{folder} has no {REPORT}: only converted checkpoints can be converted back")
    report = parse_json(written.read_bytes(), str(written), list)
    kept = load_tensors(saved.folder, KEPT) if any("kept" in entry for entry in report) else {}
    restored = restore(saved.model, kept, report, str(written))
    kind = PublishedViLBert if saved.model_config.embedding == "separate" else PublishedVLBert
    part = file.with_name(f"{file.name}.part")
    torch.save({kind.state_key: restored} if kind.state_key else restored, part)
    part.rename(file)
    return report


def convert_checkpoint(
    source: Annotated[Path, Positional, tyro.conf.arg(metavar="IN")],
    out: Annotated[Path, Positional, tyro.conf.arg(metavar="OUT")],
    vocabulary: Path | None = None,
    hints: Annotated[Hints, Flat] = NO_HINTS,
) -> None:
    """Convert a published VL-BERT or ViLBERT checkpoint to a model folder of this project, or such a folder back.

    Args:
        source: a published checkpoint file, or a folder that was made from one
        out: a new folder if IN is a file, or a new file if IN is a folder
        vocabulary: vocab.txt of the BERT that the authors started from
    """
    report = to_theirs(source, out) if source.is_dir() else to_ours(source, out, vocabulary, hints)
    kept = sum("kept" in entry for entry in report)
    print(f"{out}: {len(report)} tensors, {kept} of them without a counterpart here")


main = Command("vlbert convert", convert_checkpoint)
