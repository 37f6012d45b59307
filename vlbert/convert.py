"""Converts the authors' checkpoints to our models, and back:

    python -m vlbert.convert vl-bert-base-e2e.model OUT --vocabulary vocab.txt
    python -m vlbert.convert OUT vl-bert-base-e2e.model

OUT is a model's folder (docs/formats.md): `VLBert.from_pretrained(OUT)` and `init_from=OUT` read it. Its
published.json says what each key of the file became; with it, converting back gives the same bits.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from detectors.weights.torch_pickle import named_tensors, read_weight_file
from storage.safe_json import parse_json
from storage.settings import differing_fields, from_json, to_json
from vlbert.checkpoint import CONFIG, check_tensors, model_files, read_model
from vlbert.config import architecture
from vlbert.data.vocabulary import Vocabulary
from vlbert.published import (
    CLASSES,
    COUNTER,
    IN_THEIR_CONFIGURATION,
    TEXT_ONLY,
    Published,
    plain_name,
    skeleton,
    standard,
    understand,
)
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

REPORT = "published.json"


class Refused(ValueError):
    """A file that cannot be converted. `report` is that of `convert`, with entries `refused` (why) and `missing`."""

    def __init__(self, message: str, report: list[dict]):
        super().__init__(message)
        self.report = report


def convert(
    theirs: dict[str, Tensor], what: Published, where: str, whole: bool = False
) -> tuple[dict[str, Tensor], list[dict]]:
    """(our tensors in float32, a report with one entry a key). Raises Refused where a key is unexpected or missing.

    An entry has `theirs` (the key), `dtype`, and one of `ours` (our name), `repeats` (the key that it is equal to) or
    `counts` (batches, which a frozen norm does not use). Entries at the end with `ours` alone are tensors that the file
    lacks and its task does not read; they become zeros. `whole`: keys that repeat others or count must be there too, as
    in every file that their code saved.
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
        if name not in found and entry.get("ours") not in TEXT_ONLY and (whole or "ours" in entry):
            report.append({"theirs": name, "missing": True})
    in_theirs = {entry["ours"] for entry in expected.values() if "ours" in entry} - set(TEXT_ONLY)
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
    tensors = {name: tensor for name, tensor in saved.model.items() if not name.endswith(COUNTER)}
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
        if not stages and name not in IN_THEIR_CONFIGURATION:
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
