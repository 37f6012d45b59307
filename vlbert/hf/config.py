"""VLBertConfig: config.json of a model or of a checkpoint (docs/formats.md), as transformers reads and writes it."""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any, Self

from transformers import PretrainedConfig

from storage.digests import check_version
from storage.runs import CHECKPOINT_VERSION
from storage.settings import from_json, to_json
from vlbert.checkpoint import MODEL_TYPE, strip_paths
from vlbert.config import ModelConfig
from vlbert.hf.files import find_folder
from vlbert.tasks import settings_named
from vlbert.tasks.base import TaskSettings

_MODEL_FIELDS = {one.name for one in fields(ModelConfig)}
_WHERE = "VLBertConfig"
# What Auto classes and transformers' own loader take, and what has no meaning here.
IGNORED = {"adapter_kwargs", "code_revision", "low_cpu_mem_usage", "trust_remote_code", "use_fast", "use_safetensors"}
IGNORED |= {"weights_only"}


def _of_model(name: str) -> property:
    """A field of the model under the name that transformers gives it."""
    return property(lambda config: config.model[name])


class VLBertConfig(PretrainedConfig):
    """The configuration of a model and of its task.

        VLBertConfig.from_pretrained("ROOT/runs/pretrain")
        VLBertConfig(layers="J" * 12, hidden_size=768)             # fields of vlbert.config.ModelConfig
        VLBertConfig(ModelConfig(), settings=VQASettings(answers=2))

    model        ModelConfig, or its fields; further arguments may name single ones
    vocab_size   tokens of the vocabulary
    num_classes  of the detector, without the background
    settings     those of the model's task (vlbert/tasks), or their fields; `task` is the name of their type
    detector     id and description of the detector whose regions the model learned from
    recipe       of a checkpoint of ours: `settings` are taken from it; it is not kept

    Paths are not kept: neither folders of tasks, nor the file that a Fast R-CNN started from. ValueError names a field
    that is wrong.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        model: ModelConfig | Mapping[str, Any] | None = None,
        vocab_size: int = 30_522,
        num_classes: int = 1600,
        task: str | None = None,
        settings: TaskSettings | Mapping[str, Any] | None = None,
        detector: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        version: int = CHECKPOINT_VERSION,
        **kwargs: Any,
    ):
        check_version(version, CHECKPOINT_VERSION, _WHERE)
        kwargs.pop("files", None)  # hashes of the files beside a config.json of ours
        given = {name: kwargs.pop(name) for name in _MODEL_FIELDS & kwargs.keys()}
        values = to_json(model) if isinstance(model, ModelConfig) else dict(model or {})
        self.version = version
        self.model = _plain(to_json(strip_paths(from_json(ModelConfig, values | given, _WHERE))))
        self.vocab_size = vocab_size
        self.num_classes = num_classes
        if isinstance(settings, TaskSettings):
            task, settings = type(settings).__name__, to_json(settings)
        if settings is None and recipe is not None:
            settings = recipe["task"]
        self.task = task
        self.settings = None if settings is None else _plain(_without_paths(dict(settings)))
        self.detector = None if detector is None else _plain(dict(detector))
        if kwargs.get("id2label") is None:
            kwargs.setdefault("num_labels", 0)  # a model for questions knows how many answers it has, all others none
        super().__init__(**kwargs)

    @property
    def model_config(self) -> ModelConfig:
        """The architecture."""
        return from_json(ModelConfig, self.model, _WHERE)

    @property
    def task_settings(self) -> TaskSettings | None:
        """The settings of the task; None of a model without a head. ValueError where the task is none of this
        package."""
        if self.task is None:
            return None
        kind = settings_named(self.task)
        if kind is None:
            raise ValueError(f"{_WHERE}: task is {self.task!r}, which is none of this package")
        return from_json(kind, self.settings or {}, f"{_WHERE}.settings")

    hidden_size = _of_model("hidden_size")  # of the text
    num_attention_heads = _of_model("num_heads")
    intermediate_size = _of_model("intermediate_size")
    max_position_embeddings = _of_model("max_positions")
    initializer_range = _of_model("initializer_range")

    @property
    def num_hidden_layers(self) -> int:
        """Layers of both streams, as many as `model["layers"]` has letters."""
        return len(self.model["layers"])

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a model's folder, of a run's newest checkpoint, or of the hub; OSError where a local folder is missing."""
        return super().get_config_dict(find_folder(pretrained_model_name_or_path), **kwargs)

    def with_settings(self, settings: TaskSettings | None) -> Self:
        """The same model with another task."""
        found = copy.deepcopy(self)
        found.task = None if settings is None else type(settings).__name__
        found.settings = None if settings is None else _plain(_without_paths(to_json(settings)))
        return found


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON reads it back: lists in place of tuples."""
    return json.loads(json.dumps(values))


def _without_paths(settings: Any) -> Any:
    """A task's settings without its folder, and with the bare names of other files that are not below that."""
    if isinstance(settings, Mapping):
        return {name: "" if name == "folder" else _without_paths(value) for name, value in settings.items()}
    if isinstance(settings, str) and (os.path.isabs(settings) or "://" in settings):
        return PurePath(settings).name
    return settings
