"""VLBertConfig: the config.json of a model or a checkpoint (docs/formats.md) as a transformers configuration."""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path, PurePath
from typing import Any, Self

from transformers import PretrainedConfig

from storage.digests import check_version
from storage.runs import CHECKPOINT_VERSION, CONFIG
from storage.safe_json import parse_json
from storage.settings import from_json, to_json
from vlbert.checkpoint import MODEL_TYPE, check_config, settings_of
from vlbert.config import ModelConfig
from vlbert.hf.files import HUB, fetch_folder
from vlbert.tasks import settings_named
from vlbert.tasks.base import TaskSettings

_MODEL_FIELDS = {field.name for field in fields(ModelConfig)}
_SOURCE = "VLBertConfig"
# Arguments of Auto classes and of transformers' own loader that have no meaning here.
IGNORED = {"adapter_kwargs", "code_revision", "low_cpu_mem_usage", "trust_remote_code", "use_fast", "use_safetensors"}
IGNORED |= {"weights_only"}


def _model_field(name: str) -> property:
    """Make a property that returns the ModelConfig field `name`. The property has transformers' name for this field."""
    return property(lambda config: config.model[name])


class VLBertConfig(PretrainedConfig):
    """The configuration of a model and its task.

        VLBertConfig.from_pretrained("ROOT/runs/pretrain")
        VLBertConfig(layers="J" * 12, hidden_size=768)             # fields of vlbert.config.ModelConfig
        VLBertConfig(ModelConfig(), settings=VQASettings(answers=2))

    Paths (task folders, initial weights of the Fast R-CNN) are removed. Raises ValueError if a field is invalid.

    Args:
        model: ModelConfig, or a dict of its fields. Its fields may also be given as keyword arguments.
        vocab_size: Number of tokens in the vocabulary.
        num_classes: Number of the detector's classes, without the background.
        task: Class name of the task's settings; needed only if `settings` is a dict.
        settings: Settings of the model's task (vlbert/tasks), or a dict of their fields.
        detector: Id and description of the detector whose regions the model was trained on.
        recipe: Recipe of a checkpoint, from which the task's settings are taken if `settings` is None.
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
        kwargs.setdefault("dtype", "float32")  # of all weights, whatever a file says
        check_version(version, CHECKPOINT_VERSION, _SOURCE)
        kwargs.pop("files", None)  # hashes of the model's files in a config.json
        given = {name: kwargs.pop(name) for name in _MODEL_FIELDS & kwargs.keys()}
        values = to_json(model) if isinstance(model, ModelConfig) else dict(model or {})
        self.version = version
        architecture = from_json(ModelConfig, values | given, _SOURCE)
        regions = replace(architecture.regions, weights=None)  # a path that is valid only on one machine
        self.model = _to_plain(to_json(replace(architecture, regions=regions)))
        self.vocab_size = vocab_size
        self.num_classes = num_classes
        if isinstance(settings, TaskSettings):
            task, settings = type(settings).__name__, to_json(settings)
        settings = settings_of({"settings": settings, "recipe": recipe})
        self.task = task
        self.settings = None if settings is None else _to_plain(_strip_task_paths(dict(settings)))
        self.detector = None if detector is None else _to_plain(dict(detector))
        if kwargs.get("id2label") is None:
            kwargs.setdefault("num_labels", 0)  # only question answering has labels, and its model counts them
        super().__init__(**kwargs)

    @property
    def model_config(self) -> ModelConfig:
        """The model's architecture, as a ModelConfig."""
        return from_json(ModelConfig, self.model, _SOURCE)

    @property
    def task_settings(self) -> TaskSettings | None:
        """The task's settings, or None for a model without a head. Lengths left at their default follow the model.

        Raises ValueError if the task is unknown, or if another length does not fit the model.
        """
        if self.task is None:
            return None
        kind = settings_named(self.task)
        if kind is None:
            raise ValueError(f"{_SOURCE}: task is {self.task!r}, which is not a task of this package")
        return from_json(kind, self.settings or {}, f"{_SOURCE}.settings").fit(self.model_config)

    hidden_size = _model_field("hidden_size")  # of the text stream
    num_attention_heads = _model_field("num_heads")
    intermediate_size = _model_field("intermediate_size")
    max_position_embeddings = _model_field("max_positions")
    initializer_range = _model_field("initializer_range")

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers of all kinds: the length of `model["layers"]`."""
        return len(self.model["layers"])

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the config.json of a folder, a run or a Hub model. Raises OSError if a local folder is missing."""
        hub = {name: kwargs.pop(name) for name in HUB & kwargs.keys()}
        file = Path(fetch_folder(pretrained_model_name_or_path, (CONFIG,), **hub), CONFIG)
        return parse_json(file.read_bytes(), str(file)), {"name_or_path": str(file.parent)} | kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from the content of a config.json, without the fields that this package does not write."""
        location = os.path.join(kwargs.get("name_or_path", ""), CONFIG)
        known = check_config(config_dict, location)
        if kind := settings_named(known.get("task", "")):
            from_json(kind, settings_of(known) or {}, location)
        return super().from_dict(known, **kwargs)

    def with_settings(self, settings: TaskSettings | None) -> Self:
        """Return a copy of the config with other task settings. None removes the task."""
        config = copy.deepcopy(self)
        config.task = None if settings is None else type(settings).__name__
        config.settings = None if settings is None else _to_plain(_strip_task_paths(to_json(settings)))
        return config


def _to_plain(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the values to plain JSON types, such as lists instead of tuples."""
    return json.loads(json.dumps(values))


def _strip_task_paths(settings: Any) -> Any:
    """Return a task's settings with `folder` set to "", and other absolute paths and URIs shortened to file names."""
    if isinstance(settings, Mapping):
        return {name: "" if name == "folder" else _strip_task_paths(value) for name, value in settings.items()}
    if isinstance(settings, str) and (os.path.isabs(settings) or "://" in settings):
        return PurePath(settings).name
    return settings
