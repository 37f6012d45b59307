"""`vlbert convert`: the checkpoints of VL-BERT's and ViLBERT's authors become our models, and back.

    vlbert convert vl-bert-base-e2e.model OUT --vocabulary vocab.txt
    vlbert convert OUT vl-bert-base-e2e.model
    vlbert convert pytorch_model_9.bin OUT --vocabulary vocab.txt

The keys of a file tell whose it is. OUT is a model's folder (docs/formats.md): `VLBertModel.from_pretrained(OUT)` and
`--init_from OUT` read it. Its published.json says what each key of the file became, and published.safetensors has the
tensors that no model of ours has; with them, converting back gives the same bits.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from safetensors.torch import save
from torch import Tensor

from detectors.weights.tensor_files import read_tensors
from storage.programs import Command, Positional
from storage.safe_json import parse_json
from storage.settings import differing_fields, from_json, to_json
from training.checkpoint import load_tensors
from vlbert.checkpoint import CONFIG, Checkpoint, check_tensors, model_files, read_model
from vlbert.config import architecture
from vlbert.data.vocabulary import Vocabulary
from vlbert.published.checkpoints import COUNTER, NO_HINTS, Hints, Published, has_any
from vlbert.published.vilbert import TASKS, PublishedViLBert, is_vilbert
from vlbert.published.vlbert import PublishedVLBert
from vlbert.tasks.retrieval import RetrievalSettings

REPORT, KEPT = "published.json", "published.safetensors"


def convert(theirs: dict[str, Tensor], what: Published, where: str) -> tuple[dict[str, Tensor], list[dict]]:
    """(our tensors in float32, a report with one entry a key). ValueError names the keys that are unexpected, missing
    or wrong.

    An entry has `theirs` (the key), `dtype`, and `ours` (our name, which keys of equal tensors share) or `kept` (the
    shape of a tensor that nothing of ours reads, and that is kept beside). What the file lacks and its task does not
    read becomes zeros.
    """
    wanted, expected = what.skeleton, {entry["theirs"]: entry for entry in what.entries()}
    times = Counter(map(what.plain_name, theirs))
    tensors, report, problems = {}, [], []
    for key, tensor in theirs.items():
        entry = expected.get(what.plain_name(key))
        twice = times[what.plain_name(key)] > 1
        if problem := "the file has it under two names" if twice else _problem(tensor, entry, wanted, tensors):
            problems.append(f"{key}: {problem}")
            continue
        assert entry is not None  # else there was a problem
        report.append(entry | {"theirs": key, "dtype": _dtype(tensor)})
        if "ours" in entry:
            tensors[entry["ours"]] = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    problems += [
        f"{what.in_file(name)}: it is missing"
        for name, entry in expected.items()
        if name not in times and "ours" in entry and entry["ours"] not in {*tensors, *what.optional}
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{where} is not converted. {'; '.join(problems[:5])}{more}")
    return tensors | {name: torch.zeros(wanted[name].shape) for name in sorted(wanted.keys() - tensors.keys())}, report


def _problem(tensor: Tensor, entry: dict | None, wanted: dict[str, Tensor], tensors: dict[str, Tensor]) -> str:
    """What is wrong with a tensor, given what it should be and our tensors so far; "" where nothing is."""
    if not entry:
        return "no model of this kind has it"
    shape = entry["kept"] if "kept" in entry else list(wanted[entry["ours"]].shape)
    if list(tensor.shape) != shape:
        return f"it is {list(tensor.shape)} and should be {shape}"
    known = ("int64",) if entry["dtype"] == "int64" else ("float32", "float16", "bfloat16")
    if _dtype(tensor) not in known:
        return f"it is {_dtype(tensor)}; {', '.join(known)} would be understood"
    if not tensor.isfinite().all():
        return "it holds NaN or infinity"
    before = tensors.get(entry.get("ours", ""))
    return "" if before is None or torch.equal(before, tensor.float()) else "it differs from its copy: damaged"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def restore(tensors: dict[str, Tensor], kept: dict[str, Tensor], report: list[dict], where: str) -> dict[str, Tensor]:
    """Our tensors as theirs: the keys and dtypes of the report. ValueError where they are not those it was made of.

    kept: the tensors that ours lack, by key; zeros where they are not in it.
    """
    found: dict[str, Tensor] = {}
    made: dict[tuple[str, str], Tensor] = {}  # keys that repeat each other share memory, and are stored once
    for entry in report:
        key, dtype, ours = entry["theirs"], getattr(torch, entry["dtype"]), entry.get("ours")
        if "kept" in entry:
            found[key] = kept[key] if key in kept else torch.zeros(entry["kept"], dtype=dtype)
            continue
        if ours not in tensors:
            raise ValueError(f"{where} is not of this model: it names {ours}; delete it, and all is written anew")
        if (ours, entry["dtype"]) not in made:
            tensor = made[ours, entry["dtype"]] = tensors[ours].to(dtype)
            if not torch.equal(tensor.float(), tensors[ours]):
                raise ValueError(
                    f"{where} says that {key} was {entry['dtype']}, which cannot hold today's {ours}: the weights have "
                    "changed since. Delete it, and all is written in float32"
                )
        found[key] = made[ours, entry["dtype"]]
    return found


def understand(theirs: dict[str, Tensor], hints: Hints = NO_HINTS) -> Published:
    """What their tensors are; ValueError where they are neither a VL-BERT nor a ViLBERT."""
    if is_vilbert(map(PublishedViLBert.plain_name, theirs)):
        kind = PublishedViLBert
    elif has_any(map(PublishedVLBert.plain_name, theirs), ("vlbert.", "image_feature_extractor.")):
        kind = PublishedVLBert
    else:
        raise ValueError(
            f"it has keys such as {next(iter(theirs))}, and none of a VL-BERT (vlbert.*) or a ViLBERT "
            "(bert.v_embeddings.*): it is no model of their authors"
        )
    return kind.understand({kind.plain_name(key): tuple(tensor.shape) for key, tensor in theirs.items()}, hints)


def to_ours(file: Path, folder: Path, vocabulary: Path | None = None, hints: Hints = NO_HINTS) -> list[dict]:
    """Convert their file to a model's folder, and return the report. ValueError where either is no good."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; give a new folder, or an empty one")
    theirs = read_tensors(file)
    try:
        what = understand(theirs, hints)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    tensors, report = convert(theirs, what, str(file))
    words = Vocabulary.read(vocabulary) if vocabulary else None
    if words and len(words) != what.vocab_size:
        raise ValueError(
            f"{vocabulary} has {len(words)} tokens, {file} was trained with {what.vocab_size}: not its own"
        )
    task = {} if what.task is None else {"task": type(what.task).__name__, "settings": to_json(what.task)}
    metadata = {"num_classes": what.num_classes} | task
    kept = {entry["theirs"]: theirs[entry["theirs"]].clone() for entry in report if "kept" in entry}
    beside = {KEPT: save(kept)} if kept else {}
    files = model_files(tensors, what.model, what.vocab_size, words, metadata, beside)
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
    what, written = _published(saved, folder), folder / REPORT
    tensors = {name: tensor for name, tensor in saved.model.items() if not name.endswith(COUNTER)}
    wanted = what.skeleton
    check_tensors(wanted, tensors, str(folder))
    kept: dict[str, Tensor] = {}
    if written.is_file():
        report = parse_json(written.read_bytes(), str(written), list)
        kept = load_tensors(saved.folder, KEPT) if any("kept" in entry for entry in report) else {}
    else:
        report = [entry | {"theirs": what.in_file(entry["theirs"])} for entry in what.entries()]
        _check_theirs(
            what, {what.plain_name(e["theirs"]): tuple(wanted[e["ours"]].shape) for e in report if "ours" in e}
        )
    restored = restore(tensors, kept, report, str(written))
    part = file.with_name(f"{file.name}.part")
    torch.save({what.below: restored} if what.below else restored, part)
    part.rename(file)
    return report


def _published(saved: Checkpoint, folder: Path) -> Published:
    """The file that this model would be; ValueError where their code has no such task."""
    config, where = saved.config, f"{folder}/{CONFIG}"
    kinds = {kind.__name__: kind for kind in TASKS.values()}
    vilbert = saved.model_config.embedding == "separate"
    if vilbert and "task" not in config and any(name.startswith("head.") for name in saved.model):
        return PublishedViLBert(None, saved.model_config, saved.vocab_size, saved.num_classes)
    if config.get("task") not in kinds:
        raise ValueError(f"{where} names no task, and their files belong to one; convert a run's checkpoint")
    task = from_json(kinds[config["task"]], saved.task_settings, where)
    if not vilbert and isinstance(task, RetrievalSettings):
        raise ValueError(f"{where} is of a VL-BERT for retrieval, which their code does not know")
    if not vilbert:
        return PublishedVLBert(task, saved.model_config, saved.vocab_size)
    return PublishedViLBert(task, saved.model_config, saved.vocab_size, saved.num_classes)


def _check_theirs(what: Published, shapes: dict[str, tuple[int, ...]]) -> None:
    """ValueError where the model follows a rule that their code has not."""
    theirs = what.understand(shapes, what.hints)
    for name, ours, published in differing_fields(architecture(what.model), architecture(theirs.model)):
        stages = name.startswith("regions.resnet.") and not name.endswith((".blocks", ".width", ".stem_pool"))
        if not stages and name not in what.configured:
            raise ValueError(f"their code has no such model: model.{name} is {ours}, theirs is {published}")
    alone = what.head().state_dict().keys() ^ theirs.head().state_dict().keys()
    if alone:
        raise ValueError(f"their code has no such model: one of the two alone has head.{min(alone)}")


def convert_checkpoint(
    source: Annotated[Path, Positional, tyro.conf.arg(metavar="IN")],
    out: Annotated[Path, Positional, tyro.conf.arg(metavar="OUT")],
    vocabulary: Path | None = None,
    num_heads: tuple[int, ...] | None = None,
    task: Literal["pretraining", "vqa", "vcr", "refcoco", "retrieval"] | None = None,
    task_token: int | None = None,
) -> None:
    """Convert a checkpoint of VL-BERT's or ViLBERT's authors to a model of ours, or back.

    Args:
        source: their file, or a model's folder
        out: a new folder for their file, a new file for a folder
        vocabulary: vocab.txt of the BERT that they started from
        num_heads: attention heads, if one has not 64 channels; of a ViLBERT those of text, regions and co-attention
        task: of a fine-tuned ViLBERT: whose heads to take
        task_token: of 12-in-1: the task's row in its table, from 0
    """
    if source.is_dir():
        report = to_theirs(source, out)
    else:
        report = to_ours(source, out, vocabulary, Hints(num_heads, task, task_token))
    kept = sum("kept" in entry for entry in report)
    print(f"{out}: {len(report)} tensors, {kept} of them without a counterpart here")


main = Command("vlbert convert", convert_checkpoint)
