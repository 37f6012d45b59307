"""Read and write model folders and the checkpoints of a run. No file is a pickle (docs/formats.md, Checkpoint).

config.json  model.safetensors  vocab.txt     a model: the files that from_pretrained and init_from read
task.json                                     the meaning of the head's outputs, such as VQA's list of answers
ROOT/runs/<run>/step-0000100/                 a checkpoint: the above, optimizer.safetensors and, last, state.json
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
from storage.safe_json import short_repr
from storage.settings import from_json, to_json
from training.checkpoint import (
    MODEL,
    OPTIMIZER,
    Writer,
    check_tensors,
    load_tensors,
    optimizer_tensors,
    write_checkpoint,
)
from vlbert.config import ModelConfig, Recipe
from vlbert.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vlbert.tasks.base import TaskModel

_COUNTER = ".num_batches_tracked"
VOCABULARY, TASK = "vocab.txt", "task.json"
DETECTOR = "detector.safetensors"  # weights of the region detector; vlbert.hf saves them with a model
MODEL_TYPE = "vlbert"  # by this, transformers' Auto classes recognise a config.json of vlbert.hf
# The fields of a config.json that are read, and their types. transformers has others, which choose code or files.
_FIELDS: dict[str, type] = {"version": int, "model": dict, "vocab_size": int, "num_classes": int, "task": str}
_FIELDS |= {"settings": dict, "recipe": dict, "detector": dict, "files": dict, "id2label": dict, "label2id": dict}
_FIELDS |= {"architectures": list, "output_attentions": bool, "output_hidden_states": bool, "return_dict": bool}


def check_config(config: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the fields of a config.json that this package reads, without null.

    Raises ValueError, naming `location` and the field, if one is missing or has another type, or for another version.
    """
    if type(config.get("version")) is not int:
        raise ValueError(f"{location} is not the configuration of a model of this project: it has no version")
    check_version(config["version"], CHECKPOINT_VERSION, location)
    known = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    needed = {"model", "vocab_size"} | ({"num_classes"} if "task" in known else set())
    wrong = {name: config.get(name) for name in needed | known.keys() if type(known.get(name)) is not _FIELDS[name]}
    if not wrong:
        from_json(ModelConfig, known["model"], location)
        metadata, settings = known.get("detector", {}).get("metadata"), settings_of(known)
        wrong |= {} if isinstance(metadata or {}, dict) else {"detector.metadata": metadata}
        wrong |= {} if isinstance(settings, dict) or "task" not in known else {"recipe.task": settings}
        wrong |= {} if all(map(str.isdecimal, known.get("id2label", {}))) else {"id2label": known["id2label"]}
    for name, value in sorted(wrong.items()):
        raise ValueError(f"{location} is damaged: {name} is {short_repr(value)}; copy it again")
    return known


def settings_of(config: Mapping[str, Any]) -> Any:
    """Return the settings of the task in a config.json, as a dict of fields; None if there are none."""
    return config["settings"] if config.get("settings") is not None else (config.get("recipe") or {}).get("task")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model or checkpoint read from a folder. `model` has its tensors ("vlbert.*", "head.*"), if they were loaded."""

    folder: Folder
    config: dict
    model_config: ModelConfig
    vocab_size: int
    vocabulary: Vocabulary | None
    model: dict[str, Tensor]
    saved: dict = field(default_factory=dict)  # content of task.json: attributes named in Task.saved, by name

    @property
    def uri(self) -> str:
        return self.folder.uri

    @property
    def state(self) -> Mapping[str, Any]:
        """Content of state.json: the step, seed, snapshots and so on. Empty for a model outside a run."""
        return self.folder.state

    @property
    def num_classes(self) -> int:
        return self.config["num_classes"]

    @property
    def task_settings(self) -> dict:
        """Settings of the task that the head was trained on, as a dict of fields."""
        return settings_of(self.config)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `prefix`, keyed by the rest of the name."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.model.items() if name.startswith(prefix)}


def model_files(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    vocab_size: int,
    vocabulary: Vocabulary | None,
    metadata: dict | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """Return the contents of a model folder's files, by name. config.json has hashes of the tensors and extra files.

    `tensors` are named "vlbert.*" and "head.*". `metadata` is added to config.json.
    """
    model = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    files = {MODEL: model, **(extra_files or {})}
    hashes = {"files": {name: file_hash([data]) for name, data in files.items()}}
    return _config_files(config, vocab_size, vocabulary, (metadata or {}) | hashes) | files


def _config_files(
    config: ModelConfig, vocab_size: int, vocabulary: Vocabulary | None, metadata: dict
) -> dict[str, bytes]:
    """Return the contents of config.json and, if there is a vocabulary, of vocab.txt, by name."""
    header = {"version": CHECKPOINT_VERSION, "model_type": MODEL_TYPE, "model": to_json(config)}
    files = {CONFIG: as_json(header | {"vocab_size": vocab_size} | metadata)}
    return files | ({VOCABULARY: vocabulary.text().encode()} if vocabulary else {})


def save_checkpoint(
    writer: Writer,
    step: int,
    recipe: Recipe,
    model: "TaskModel",
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    detector: dict | None = None,
) -> str:
    """Queue the checkpoint runs/<run>/step-<step>/ to be written by the writer's thread, and return its path.

    `detector` has the id and metadata of the detector that found the run's regions (vlbert.train.detector_of).
    """
    task = model.task
    metadata = {"task": type(recipe.task).__name__, "num_classes": task.num_classes, "recipe": to_json(recipe)}
    metadata |= {"detector": detector} if detector else {}
    files = _config_files(recipe.model, len(task.vocabulary), task.vocabulary, metadata)
    writer.put(f"runs/{recipe.run}/{CONFIG}", files[CONFIG])  # for transformers' Auto classes (vlbert.hf)
    saved = {name: getattr(task, name) for name in task.saved}
    files |= {TASK: as_json(saved)} if saved else {}
    tensors = {MODEL: model.state_dict(), OPTIMIZER: optimizer_tensors(model, optimizer)}
    state = {"step": step} | state
    return write_checkpoint(writer, recipe, step, files | tensors, state, task.best_metric(recipe.task))


def open_checkpoint(path: str, tensors: bool = True) -> Checkpoint:
    """Read the checkpoint or model at a path, without its tensors if `tensors` is false.

    The path is ROOT/runs/RUN/step-*, ROOT/runs/RUN/best, ROOT/runs/RUN (the run's newest checkpoint) or a local folder.
    """
    return read_checkpoint(*find_checkpoint(path), tensors)


def find_checkpoint(path: str) -> tuple[ObjectStore, str]:
    """Return the store and the folder of the checkpoint or model at `path`. Raises ValueError if there is none."""
    root, separator, rest = path.rstrip("/").rpartition("/runs/")
    if not separator:
        if "://" in path:
            raise ValueError(f"{path} is not a checkpoint; give ROOT/runs/<run>/step-* or a local folder")
        _open_checkpoint(LocalStore(path), "")
        return LocalStore(path), ""
    store = open_store(root, write=False)
    run, _, name = rest.partition("/")
    if name == "best":
        best = best_checkpoint(store, run)
        if best is None:
            raise ValueError(
                f"{path} does not exist: no checkpoint of {run} has been validated yet, or its task has no metric to "
                f"compare checkpoints by; give {store.uri(f'runs/{run}')} for the newest"
            )
        return store, best.checkpoint
    if name:
        return store, f"runs/{rest}"
    saved = checkpoints(store, run)
    if not saved:
        raise ValueError(f"{store.uri(f'runs/{run}')} has no complete checkpoint; give another run")
    return store, saved[-1]


def read_model(folder: str | Path) -> Checkpoint:
    """Read the model in a local folder. Raises ValueError if a file is missing or invalid."""
    return read_checkpoint(LocalStore(str(folder)), "")


def read_checkpoint(store: ObjectStore, path: str, tensors: bool = True) -> Checkpoint:
    """Read a checkpoint or, if `path` is "", the model in the store's root folder.

    Raises ValueError if a file is missing or invalid.
    """
    folder = _open_checkpoint(store, path)
    config = check_config(folder.json(CONFIG), folder.uri_of(CONFIG))
    if not folder.state:
        folder = replace(folder, hashes=config.get("files", {}))
    vocabulary, saved = None, folder.json(TASK) if folder.has(TASK) else {}
    if not all(isinstance(value, list) for value in saved.values()):
        raise ValueError(f"{folder.uri_of(TASK)} is not a JSON object of lists; copy it again")
    if folder.has(VOCABULARY):
        uri = folder.uri_of(VOCABULARY)
        try:
            tokens = folder.get(VOCABULARY).decode().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{uri} is not UTF-8 ({error}); copy it again") from error
        vocabulary = Vocabulary(tokens, source=uri)
        if len(vocabulary) != config["vocab_size"]:
            raise ValueError(
                f"{uri} has {len(vocabulary)} tokens, but the model has {config['vocab_size']}; copy the model's own"
            )
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
    """Open a checkpoint's folder or, if `path` is "", the store's root folder. Raises ValueError if it has no model."""
    folder = open_folder(store, path) if path or store.exists(STATE) else Folder(store, path)
    for name in (CONFIG, MODEL):
        if not folder.has(name):
            raise ValueError(f"{folder.uri} holds no model: it has no {name}")
    return folder


def restore_saved(task: Any, checkpoint: Checkpoint) -> None:
    """Copy the attributes named in `task.saved` from the checkpoint, so that the head's outputs keep their meaning."""
    for name in task.saved:
        if name in checkpoint.saved:
            setattr(task, name, checkpoint.saved[name])


def check_saved(task: Any, checkpoint: Checkpoint) -> None:
    """Raise ValueError if an attribute in `task.saved`, such as the list of answers, differs from the checkpoint's."""
    for name in task.saved:
        now, before = getattr(task, name), checkpoint.saved.get(name)
        if before is None or now == before:  # None: a converted model may lack the attribute
            continue
        pairs = enumerate(itertools.zip_longest(before, now))
        index, (old, new) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"{name} of {task.settings.folder or 'the task'} differ from {checkpoint.uri}/{TASK}: number {index} is "
            f"{new!r}, but the checkpoint has {old!r}. Restore the files it was trained with, or start a new run that "
            "does not start from this checkpoint"
        )


def vocabulary_of(checkpoint: Checkpoint, file: str | None) -> Vocabulary:
    """Return the checkpoint's vocabulary or, if it has none, the one in `file`.

    Raises ValueError if there is no vocabulary, or if its size is not the checkpoint's.
    """
    if checkpoint.vocabulary:
        return checkpoint.vocabulary
    if not file:
        raise ValueError(f"{checkpoint.uri} has no vocabulary; give the one it was trained with: --vocabulary=FILE")
    vocabulary = Vocabulary.read(file)
    if len(vocabulary) != checkpoint.vocab_size:
        raise ValueError(
            f"--vocabulary={file} has {len(vocabulary)} tokens, but {checkpoint.uri} was trained with "
            f"{checkpoint.vocab_size}; give the vocab.txt it was trained with"
        )
    return vocabulary


def load_model(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load the tensors into `model`. Raises ValueError if a tensor is missing, unexpected or does not fit."""
    wanted = model.state_dict()
    # Only trained BatchNorms count batches: a file may lack a counter of the model, or have one that the model lacks.
    tensors = {name: tensor for name, tensor in tensors.items() if name in wanted or not name.endswith(_COUNTER)}
    tensors |= {name: t for name, t in wanted.items() if name.endswith(_COUNTER) and name not in tensors}
    check_tensors(tensors, wanted, f"{source} does not fit the model")
    model.load_state_dict(tensors)
