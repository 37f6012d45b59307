"""Models in folders, and the checkpoints of a run. No file is a pickle (docs/formats.md, Checkpoint).

config.json  model.safetensors  vocab.txt     a model: what from_pretrained and init_from read
task.json                                     what the outputs of its task's head mean, where the task keeps that
ROOT/runs/<run>/step-0000100/                 a checkpoint: these, optimizer.safetensors and, last, state.json
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from storage.digests import check_version
from storage.object_store import LocalStore, ObjectStore, open_store
from storage.runs import (
    CHECKPOINT_VERSION,
    CONFIG,
    STATE,
    Folder,
    as_json,
    best_checkpoint,
    checkpoints,
    file_hash,
    open_folder,
)
from storage.settings import from_json, to_json
from training.checkpoint import MODEL, OPTIMIZER, Writer, load_tensors, optimizer_tensors, write_checkpoint
from vlbert.config import ModelConfig, Recipe
from vlbert.data.vocabulary import Vocabulary

if TYPE_CHECKING:  # it reads models from here
    from vlbert.tasks.base import TaskModel

_COUNTER = ".num_batches_tracked"
VOCABULARY, TASK = "vocab.txt", "task.json"
DETECTOR = "detector.safetensors"  # weights of the detector that finds the regions: vlbert.hf saves them with a model
MODEL_TYPE = "vlbert"  # tells transformers' Auto classes whose config.json it is (vlbert.hf)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model, and the run that it is a checkpoint of, as read: `model` holds "vlbert.*" and "head.*"."""

    folder: Folder
    config: dict
    model_config: ModelConfig
    vocab_size: int
    vocabulary: Vocabulary | None
    model: dict[str, Tensor]
    saved: dict = field(default_factory=dict)  # task.json: attributes of the task that its head was trained with

    @property
    def uri(self) -> str:
        return self.folder.uri

    @property
    def state(self) -> Mapping[str, Any]:
        """state.json: step, seed, samples consumed, the shards that were read; empty where there is none."""
        return self.folder.state

    @property
    def num_classes(self) -> int:
        return self.config["num_classes"]

    @property
    def task_settings(self) -> dict:
        """The fields of the task's settings that the head belongs to: a run's, or those of a converted model."""
        return self.config["settings"] if "settings" in self.config else self.config["recipe"]["task"]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `prefix`, without it."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.model.items() if name.startswith(prefix)}


def model_files(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    vocab_size: int,
    vocabulary: Vocabulary | None,
    metadata: dict | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """Return the files of a model's folder by name. tensors: "vlbert.*" and "head.*"; metadata: for config.json.

    beside: further files. config.json has the hashes of these and of the tensors.
    """
    model = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    files = {MODEL: model, **(beside or {})}
    hashes = {"files": {name: file_hash([data]) for name, data in files.items()}}
    return _config_files(config, vocab_size, vocabulary, (metadata or {}) | hashes) | files


def _config_files(
    config: ModelConfig, vocab_size: int, vocabulary: Vocabulary | None, metadata: dict
) -> dict[str, bytes]:
    """Return config.json and, if there is a vocabulary, vocab.txt."""
    plain = {"version": CHECKPOINT_VERSION, "model_type": MODEL_TYPE, "model": to_json(config)}
    files = {CONFIG: as_json(plain | {"vocab_size": vocab_size} | metadata)}
    return files | ({VOCABULARY: vocabulary.text().encode()} if vocabulary else {})


def save_checkpoint(
    writer: Writer,
    run: str,
    step: int,
    recipe: Recipe,
    model: "TaskModel",
    optimizer: torch.optim.Optimizer,
    vocabulary: Vocabulary,
    num_classes: int,
    state: dict[str, Any],
    detector: dict | None = None,
) -> str:
    """Have runs/<run>/step-<step>/ written, in the writer's thread, and return its path.

    detector: id and metadata of the one whose regions the run learns from (vlbert.train.detector_of).
    """
    metadata = {"task": type(recipe.task).__name__, "num_classes": num_classes, "recipe": to_json(recipe)}
    metadata |= {"detector": detector} if detector else {}
    files = _config_files(recipe.model, len(vocabulary), vocabulary, metadata)
    saved = {name: getattr(model.task, name) for name in model.task.saved}
    files |= {TASK: as_json(saved)} if saved else {}
    tensors = {MODEL: model.state_dict(), OPTIMIZER: optimizer_tensors(model, optimizer)}
    state = {"step": step} | state
    keep, metric = recipe.keep_checkpoints, model.task.best_metric(recipe.task)
    return write_checkpoint(writer, run, step, recipe.steps, files | tensors, state, keep, metric)


def open_checkpoint(path: str, tensors: bool = True) -> Checkpoint:
    """Read the model at a path: ROOT/runs/RUN/step-*, ROOT/runs/RUN/best, ROOT/runs/RUN for its newest, or any local
    folder that holds one. tensors: whether those of the model are read, too."""
    return read_checkpoint(*find_checkpoint(path), tensors)


def find_checkpoint(path: str) -> tuple[ObjectStore, str]:
    """Return where open_checkpoint reads, without reading it. Raises ValueError if the path names nothing."""
    root, separator, rest = path.rstrip("/").rpartition("/runs/")
    if not separator:
        if "://" in path:
            raise ValueError(f"{path} is no checkpoint: name ROOT/runs/<run>/step-*, or a local folder")
        _open_checkpoint(LocalStore(path), "")
        return LocalStore(path), ""
    store = open_store(root, write=False)
    run, _, named = rest.partition("/")
    if named == "best":
        best = best_checkpoint(store, run)
        if best is None:
            raise ValueError(
                f"{path} is not there: no validation of {run} has measured a checkpoint yet, or its task compares "
                f"none; name {store.uri(f'runs/{run}')} for the newest"
            )
        return store, best.checkpoint
    if named:
        return store, f"runs/{rest}"
    saved = checkpoints(store, run)
    if not saved:
        raise ValueError(f"{store.uri(f'runs/{run}')} has no whole checkpoint; name another run")
    return store, saved[-1]


def read_model(folder: str | Path) -> Checkpoint:
    """Read the model in a local folder, whoever wrote it; errors as of read_checkpoint."""
    return read_checkpoint(LocalStore(str(folder)), "")


def read_config_at(store: ObjectStore, path: str) -> dict:
    """Read config.json, and nothing else, of what find_checkpoint found."""
    return _read_config(_open_checkpoint(store, path))


def strip_paths(config: ModelConfig) -> ModelConfig:
    """Return the model's configuration without the file that its Fast R-CNN started from, which is here alone."""
    return replace(config, regions=replace(config.regions, weights=None))


def read_checkpoint(store: ObjectStore, path: str, tensors: bool = True) -> Checkpoint:
    """Read a whole checkpoint or, at path "", any folder with a model, or all but the model's tensors. Raises
    ValueError if a file is missing, damaged or of another version."""
    folder = _open_checkpoint(store, path)
    config = _read_config(folder)
    if not folder.state:
        folder = replace(folder, hashes=config.get("files", {}))
    vocabulary, saved = None, folder.json(TASK) if folder.has(TASK) else {}
    if not all(isinstance(value, list) for value in saved.values()):
        raise ValueError(f"{folder.uri_of(TASK)} is no object of lists, the meaning of a head's outputs")
    if folder.has(VOCABULARY):
        where = folder.uri_of(VOCABULARY)
        try:
            tokens = folder.get(VOCABULARY).decode().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 ({error}); copy it again") from error
        vocabulary = Vocabulary(tokens, source=where)
        if len(vocabulary) != config["vocab_size"]:
            raise ValueError(f"{where} has {len(vocabulary)} tokens, the model {config['vocab_size']}: not its own")
    return Checkpoint(
        folder=folder,
        config=config,
        model_config=from_json(ModelConfig, config["model"], folder.uri_of(CONFIG)),
        vocab_size=config["vocab_size"],
        vocabulary=vocabulary,
        model=load_tensors(folder, MODEL) if tensors else {},
        saved=saved,
    )


def _open_checkpoint(store: ObjectStore, path: str) -> Folder:
    """Open a checkpoint by its state.json; any other folder, which has none, as it is."""
    folder = open_folder(store, path) if path or store.exists(STATE) else Folder(store, path)
    for name in (CONFIG, MODEL):
        if not folder.has(name):
            raise ValueError(f"{folder.uri} holds no model: it has no {name}")
    return folder


def _read_config(folder: Folder) -> dict:
    """Return what config.json holds. Raises ValueError if it is of something else, or of another version."""
    config, where = folder.json(CONFIG), folder.uri_of(CONFIG)
    if not isinstance(config.get("version"), int):
        raise ValueError(f"{where} is not the configuration of a VL-BERT of this code: it names no version")
    check_version(config["version"], CHECKPOINT_VERSION, where)
    hashes = config.get("files", {})
    sound = isinstance(hashes, dict) and all(
        isinstance(one, dict) and {"bytes", "sha256"} <= one.keys() for one in hashes.values()
    )
    if not (sound and isinstance(config.get("model"), dict) and isinstance(config.get("vocab_size"), int)):
        raise ValueError(f"{where} lacks model, vocab_size or `files`: it is not whole; copy it again")
    return config


def restore_saved(task: Any, checkpoint: Checkpoint) -> None:
    """Let the outputs of the task's head mean what they meant when the checkpoint was trained."""
    for name in task.saved:
        if name in checkpoint.saved:
            setattr(task, name, checkpoint.saved[name])


def check_saved(task: Any, checkpoint: Checkpoint) -> None:
    """Raises ValueError if the outputs of the task's head mean something else than when the checkpoint was trained."""
    for name in task.saved:
        now, before = getattr(task, name), checkpoint.saved.get(name)
        if before is None or now == before:  # it may be converted
            continue
        pairs = enumerate(itertools.zip_longest(before, now))
        at, (there, here) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"{checkpoint.uri}/{TASK} has other {name} than {task.settings.folder or 'the task'} now: number {at} is "
            f"{there!r} there and {here!r} here; put those back that it was trained with, or start another run, and "
            "not from it"
        )


def vocabulary_of(checkpoint: Checkpoint, file: str | None) -> Vocabulary:
    """Return the checkpoint's own vocabulary, else that of `file`. Raises ValueError if that does not fit it."""
    if checkpoint.vocabulary:
        return checkpoint.vocabulary
    if not file:
        raise ValueError(f"{checkpoint.uri} came without a vocabulary; give its own with vocabulary=vocab.txt")
    vocabulary = Vocabulary.read(file)
    if len(vocabulary) != checkpoint.vocab_size:
        raise ValueError(
            f"--vocabulary={file} has {len(vocabulary)} tokens, {checkpoint.uri} was trained with "
            f"{checkpoint.vocab_size}; give the vocab.txt that belongs to it"
        )
    return vocabulary


def load_model(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Load all tensors of `model`. Raises ValueError if one is missing, left over or of another shape."""
    wanted = model.state_dict()
    # How many batches a live norm has seen: a frozen one does not count, so files may lack it or have it too many.
    tensors = {name: tensor for name, tensor in tensors.items() if name in wanted or not name.endswith(_COUNTER)}
    tensors |= {name: t for name, t in wanted.items() if name.endswith(_COUNTER) and name not in tensors}
    check_tensors(wanted, tensors, where)
    model.load_state_dict(tensors)


def check_tensors(wanted: dict[str, Tensor], tensors: dict[str, Tensor], where: str) -> None:
    """Raises ValueError if `tensors` have not the names and shapes of `wanted`, a model's."""
    problems = [f"lacks {name}" for name in sorted(wanted.keys() - tensors.keys())]
    problems += [f"has {name}, which the model has not" for name in sorted(tensors.keys() - wanted.keys())]
    problems += [
        f"has {name} as {tuple(tensors[name].shape)}, the model as {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if wanted[name].shape != tensors[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{where} does not fit the model: it {'; '.join(problems[:5])}{more}")
