"""The models: VLBert alone, and with the head of each task."""

import functools
import inspect
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import logging
from transformers.utils.generic import ModelOutput

from storage.runs import as_json
from vlbert.checkpoint import TASK, Checkpoint, load_model
from vlbert.data.batch import Batch
from vlbert.hf.config import IGNORED, VLBertConfig
from vlbert.hf.inputs import to_batch
from vlbert.hf.outputs import (
    VLBertForPreTrainingOutput,
    VLBertForVisualCommonsenseReasoningOutput,
    VLBertModelOutput,
    VLBertTaskOutput,
)
from vlbert.initial_weights import start_head
from vlbert.model.execution import activation_checkpointing, blocks
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.predict.ranking import ranking_recipe
from vlbert.pretrained import HUB, read_pretrained
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskSettings
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

logger = logging.get_logger(__name__)

_DTYPES = {str(one).removeprefix("torch."): one for one in (torch.float32, torch.bfloat16, torch.float16)}
_LABELS = ("labels", "region_labels", "sentence_image_labels")
_OPTIONS = ("output_attentions", "output_hidden_states", "return_dict")
_ARGUMENTS = inspect.Signature(  # of forward: those of to_batch, labels and options
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *inspect.signature(to_batch).parameters.values(),
        *(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
            for name in _LABELS + _OPTIONS
        ),
    ]
)
_ONE_FILE = 2**62  # bytes
_NO_LABEL = -100  # in labels of tokens, regions and choices, as everywhere in transformers


class VLBertPreTrainedModel(PreTrainedModel):
    """What all models share: loading, saving and the arguments of `forward`.

    In a bfloat16 or float16 model (`dtype=`) the weights of matrix products are of that type, and a forward pass runs
    in autocast; norms and heads stay float32.
    """

    config: VLBertConfig
    config_class = VLBertConfig
    base_model_prefix = "vlbert"
    main_input_name = "input_ids"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    new_settings: ClassVar[TaskSettings | None] = None  # of a new head, where a checkpoint of another task is loaded

    def __init_subclass__(cls, **kwargs: Any):
        """Trainer computes a loss where a batch has all labels in the signature of `forward`: not those of others."""
        super().__init_subclass__(**kwargs)

        @functools.wraps(VLBertPreTrainedModel.forward)
        def forward(self: VLBertPreTrainedModel, *args: Any, **given: Any) -> ModelOutput | tuple:
            return VLBertPreTrainedModel.forward(self, *args, **given)

        taken = inspect.signature(cls._labelled).parameters
        kept = [one for name, one in _ARGUMENTS.parameters.items() if name not in _LABELS or name in taken]
        forward.__signature__ = _ARGUMENTS.replace(parameters=kept)
        cls.forward = forward

    def __init__(self, config: VLBertConfig):
        super().__init__(config)
        self.saved: Mapping[str, list] = {}  # what the head's outputs mean (task.json)
        self.vlbert = VLBert(config.model_config, config.vocab_size)
        self.task = None
        if self.new_settings is not None:
            settings = self._settings(config)
            if isinstance(settings, PretrainingSettings):
                settings = replace(settings, monitored_words=())  # these need the words of the vocabulary
            self.task = make_task(settings, range(config.vocab_size), config.num_classes)  # and all else their number
            self.head = self.task.head(self.vlbert.config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: modules of this package initialise themselves."""

    @classmethod
    def _settings(cls, config: VLBertConfig) -> TaskSettings:
        settings = config.task_settings
        if not isinstance(settings, type(cls.new_settings)):
            found = "no head" if settings is None else f"the head of {config.task}"
            raise ValueError(f"{cls.__name__} needs {type(cls.new_settings).__name__}; the config has {found}")
        return settings

    def get_input_embeddings(self) -> nn.Module:
        """The table of words."""
        return self.vlbert.embedding.words

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.vlbert.embedding.words = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As in transformers; the bias of new words is 0. ValueError where [IMG] and [END] are words, the last ones."""
        if self.config.model_config.word_rows(0):
            raise ValueError("the word table ends with [IMG] and [END] (special_tokens=vocabulary): it keeps its size")
        table = super().resize_token_embeddings(*args, **kwargs)
        self.vlbert.vocab_size = self.config.vocab_size
        bias = getattr(self.head, "word_bias", None) if self.task is not None else None
        if bias is not None:
            self.head.word_bias = nn.Parameter(F.pad(bias.detach(), (0, self.config.vocab_size - len(bias))))
        return table

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, every_n_layers: int = 1, **__: Any) -> None:
        """Compute the activations of layers and of ResNet's blocks again in the backward pass, or no longer."""
        self.gradient_checkpointing = enable
        for block in blocks(self.vlbert):
            block.__dict__.pop("forward", None)
        for block in blocks(self.vlbert)[::every_n_layers] if enable else ():
            activation_checkpointing(block)

    def forward(self, *args: Any, **given: Any) -> ModelOutput | tuple:
        """Inputs: see vlbert/hf/inputs.py; VLBertProcessor makes them. Labels: see the class.

        output_attentions, output_hidden_states, return_dict: None for the config's value; return_dict=False gives a
        tuple of what is not None. ValueError where the inputs do not fit together, or a text is longer than the
        position table.
        """
        bound = _ARGUMENTS.bind(self, *args, **given).arguments
        given = {name: value for name, value in bound.items() if value is not None and name != "self"}
        attentions, states, named = (given.pop(name, getattr(self.config, name)) for name in _OPTIONS)
        labels = {name: given.pop(name).to(self.device) for name in given.keys() & _LABELS}
        batch = to_batch(**given).to(self.device)
        with self._precision():
            batch = self._labelled(batch, **labels)
            encoded = self.vlbert(batch, attentions=attentions, hidden_states=states)
            found = self._outputs(encoded, batch)
            if labels:
                found.loss = self._loss(encoded, batch)
        if states:
            found.hidden_states, found.visual_hidden_states = zip(*encoded.hidden_states, strict=True)
        if attentions:
            found.attentions = tuple(one.weights for one in encoded.attentions)
        return found if named else found.to_tuple()

    def _precision(self) -> AbstractContextManager:
        dtype = self.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)

    def _loss(self, encoded: Encoded, batch: Batch) -> Tensor:
        """The sum of the task's losses, each the mean of its terms, as training learns from it."""
        losses = self.task.losses(self.vlbert, self.head, encoded, batch)
        return sum(value / max(1, count) for name, (value, count) in losses.items() if not name.endswith("accuracy"))

    def _labelled(self, batch: Batch, **given: Tensor) -> Batch:
        """The batch with its labels, given those arguments of `forward` that are not None."""
        if given:
            raise ValueError(f"{type(self).__name__} takes no {', '.join(given)}")
        return batch

    def _outputs(self, encoded: Encoded, batch: Batch) -> ModelOutput:
        """What `forward` returns, but loss, states and attentions; each class has its own."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Writes config.json, model.safetensors and, of a model for questions, task.json with its answers. A processor
        writes its own files into the same folder. `VLBert.from_pretrained` and vlbert predict read the folder, too.

        All weights are in one file, whatever `max_shard_size` says. ValueError where `variant` would give it a name
        that is not read.
        """
        if kwargs.get("variant"):
            raise ValueError(
                f"variant is {kwargs['variant']!r}; a folder has one model.safetensors: name another folder"
            )
        folder = Path(save_directory)
        if kwargs.get("is_main_process", True):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TASK).unlink(missing_ok=True)
            if self.saved:
                (folder / TASK).write_bytes(as_json(self.saved))
        super().save_pretrained(folder, *args, **kwargs | {"max_shard_size": _ONE_FILE})

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        config: VLBertConfig | str | os.PathLike | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: str | int | torch.device | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """The model of a folder, of a run (ROOT/runs/RUN: its newest checkpoint), or of the hub; in eval mode.

        config      in the place of the folder's own, or where that is
        dtype       of the weights of matrix products, float32, bfloat16 or float16; None or "auto": that of the file
        device_map  the device that holds all of the model; "auto": a GPU if there is one
        kwargs      `revision`, `cache_dir`, `force_download`, `local_files_only` and `token` of `hf_hub_download`; all
                    others are fields of the config

        The head of a checkpoint of another task is not taken: a new one starts as in a run with init_from, and a
        warning says so. OSError where a folder or file is missing or damaged; ValueError where it does not fit.
        """
        hub = {name: kwargs.pop(name) for name in HUB & kwargs.keys()}
        kwargs = {name: value for name, value in kwargs.items() if name not in IGNORED and name[0] != "_"}
        device, wanted = _one_device(device_map), _dtype_of(torch_dtype if dtype is None else dtype)
        saved = read_pretrained(pretrained_model_name_or_path, **hub)
        same_task = cls.new_settings is not None and saved.config.get("task") == type(cls.new_settings).__name__
        of_head = {} if same_task else kwargs.pop("settings", {})
        if isinstance(config, str | os.PathLike):
            config = VLBertConfig.from_pretrained(config, trust_remote_code=False, **hub)
        if config is None:
            config, kwargs = VLBertConfig.from_dict(saved.config, return_unused_kwargs=True, **kwargs)
        if kwargs:
            raise TypeError(
                f"{cls.__name__}.from_pretrained takes no {', '.join(kwargs)}; the config has no such field"
            )
        config = config.with_settings(cls._new_settings(config, saved, of_head))
        config.name_or_path = str(pretrained_model_name_or_path)
        if same_task and "answers" in saved.saved and not config.num_labels:
            config.id2label = dict(enumerate(saved.saved["answers"]))
            config.label2id = {answer: number for number, answer in config.id2label.items()}
        model = cls(config)
        model._load(saved, same_task)
        return model._cast(wanted or saved.model["vlbert.embedding.words.weight"].dtype).to(device).eval()

    @classmethod
    def _new_settings(cls, config: VLBertConfig, saved: Checkpoint, changes: Mapping[str, Any]) -> TaskSettings | None:
        """The config's settings, or those of a new head if the config is of another task."""
        if cls.new_settings is None or config.task == type(cls.new_settings).__name__:
            return config.task_settings
        recipe = ranking_recipe(saved.config) if isinstance(cls.new_settings, RetrievalSettings) else None
        return replace(recipe.task if recipe else cls.new_settings, **changes)

    def _load(self, saved: Checkpoint, same_task: bool) -> None:
        """The weights of a checkpoint."""
        if same_task:
            self.saved = saved.saved | self.saved  # `id2label` may have given answers other names
            load_model(self, saved.model, saved.where)
            return
        load_model(self.vlbert, saved.part("vlbert."), saved.where)
        if self.task is None:
            return
        taken = start_head(self.task, self.head, saved, same_task=False)
        self.task.begin(self.vlbert, self.head, saved.config.get("task"))
        if self.task.zero_shot not in taken.split(", "):
            logger.warning(
                "%s has no head of %s: the new one has %s of it, all else starts from random weights; train it",
                *(saved.where, type(self).__name__, taken),
            )

    def _cast(self, dtype: torch.dtype) -> Self:
        """Cast linear, convolution and embedding weights to `dtype`."""
        for part in self.vlbert.modules():
            if isinstance(part, nn.Linear | nn.Conv2d | nn.Embedding):
                part.to(dtype)
        return self


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """None: that of the file. ValueError where a model cannot be of this type."""
    if dtype in (None, "auto"):
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype is {name}; it must be auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _one_device(device_map: str | int | torch.device | Mapping[str, Any] | None) -> torch.device:
    """The device that a device_map names; ValueError where it names several, or one that torch does not know."""
    if isinstance(device_map, Mapping):
        if len(devices := {*device_map.values()}) != 1:
            names = ", ".join(sorted(map(str, devices))) or "no device"
            raise ValueError(f"device_map names {names}; the model runs on one device: name one")
        (device_map,) = devices
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        device_map = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device("cpu" if device_map is None else device_map)
    except RuntimeError as error:
        raise ValueError(f"device_map is {device_map!r}; name auto or one device, such as cpu or cuda:0") from error


class VLBertModel(VLBertPreTrainedModel):
    """The encoder: vectors of words and of regions. It takes no labels."""

    def _outputs(self, encoded: Encoded, batch: Batch) -> VLBertModelOutput:
        return VLBertModelOutput(encoded.text, encoded.regions)


class VLBertForPreTraining(VLBertPreTrainedModel):
    """Masked words, masked regions and, where the model has that head, whether text and image belong together.

    labels                 int64 [N, T]  the token at masked words, else -100
    region_labels          float [N, R, 1 + classes]  at masked regions the detector's distribution, background first;
                           zeros: no label
    sentence_image_labels  int64 [N]  the class of the relationship head: 0 belongs together
    """

    new_settings = PretrainingSettings()

    def _labelled(
        self,
        batch: Batch,
        labels: Tensor | None = None,
        region_labels: Tensor | None = None,
        sentence_image_labels: Tensor | None = None,
    ) -> Batch:
        labels = torch.full_like(batch.tokens, _NO_LABEL) if labels is None else labels
        batch = _with_labels(batch, "word_label_mask", labels != _NO_LABEL, words=labels[labels != _NO_LABEL])
        if batch.boxes.shape[1]:
            if region_labels is None:
                region_labels = torch.zeros(*batch.region_mask.shape, 1 + self.config.num_classes, device=self.device)
            chosen = region_labels.sum(dim=2) > 0
            batch = _with_labels(batch, "region_label_mask", chosen, region_classes=region_labels[chosen])
        if self.head.relationship is None:
            if sentence_image_labels is not None:
                raise ValueError("sentence_image_labels are given, and the model has no relationship head")
            return batch
        first = torch.zeros_like(batch.text_mask)
        first[:, 0] = sentence_image_labels is not None
        related = first.new_zeros(0, dtype=torch.int64) if sentence_image_labels is None else sentence_image_labels
        return _with_labels(batch, "related", first, related=related)

    def _outputs(self, encoded: Encoded, batch: Batch) -> VLBertForPreTrainingOutput:
        rows = torch.arange(len(batch), device=batch.tokens.device)
        has_pair = self.head.relationship is not None and batch.boxes.shape[1] > 0
        return VLBertForPreTrainingOutput(
            prediction_logits=self.head.words(self.vlbert, encoded.text),
            region_logits=self.head.regions(encoded.regions),
            relationship_logits=self.head.related(encoded, rows) if has_pair else None,
        )


class VLBertForQuestionAnswering(VLBertPreTrainedModel):
    """VQA: one of a list of answers, which are `config.id2label`. `num_labels` or `id2label` size a new head.

    labels  float [N, answers]  the soft score of each answer
    """

    new_settings = VQASettings(answers_from_words=False)

    def __init__(self, config: VLBertConfig):
        super().__init__(config)
        if config.num_labels not in (0, count := self.task.settings.answers):
            raise ValueError(f"num_labels is {config.num_labels}, the head has {count} answers (settings.answers)")
        if not config.num_labels:
            config.num_labels = count
        elif (names := list(config.id2label.values())) != [f"LABEL_{number}" for number in range(count)]:
            self.saved = {"answers": names}

    @classmethod
    def _new_settings(cls, config: VLBertConfig, saved: Checkpoint, changes: Mapping[str, Any]) -> TaskSettings | None:
        return super()._new_settings(
            config, saved, {"answers": config.num_labels or cls.new_settings.answers} | changes
        )

    def _labelled(self, batch: Batch, labels: Tensor | None = None) -> Batch:
        length, place = (
            batch.text_mask.sum(dim=1, keepdim=True),
            torch.arange(batch.tokens.shape[1], device=self.device),
        )
        # Of [MASK], which stands before the last [SEP]; or of [CLS].
        position = length - 2 if self.task.settings.reads == "mask" else torch.zeros_like(length)
        found = {} if labels is None else {"scores": labels.float(), "class": labels[labels.any(dim=1)].argmax(dim=1)}
        return _with_labels(batch, "answer", place == position, **found)

    def _outputs(self, encoded: Encoded, batch: Batch) -> VLBertTaskOutput:
        return VLBertTaskOutput(logits=self.task.logits(self.head, encoded, batch))


class VLBertForVisualCommonsenseReasoning(VLBertPreTrainedModel):
    """VCR: one of the choices, in inputs of [N, choices, T].

    labels         int64 [N]  the right choice; -100: unknown
    region_labels  int64 [N, R]  the class of a region, else -100; for models that predict it
    """

    new_settings = VCRSettings()

    def _labelled(self, batch: Batch, labels: Tensor | None = None, region_labels: Tensor | None = None) -> Batch:
        choices = len(batch) // len(batch.keys)
        if choices < 2:
            raise ValueError("the inputs have no choices: input_ids must be [texts, choices, tokens]")
        if labels is None and region_labels is None:
            return batch
        device = batch.tokens.device
        labels = torch.full((len(batch.keys),), _NO_LABEL, device=device) if labels is None else labels
        right = labels[:, None] == torch.arange(choices, device=device)  # (texts, choices)
        known = (labels != _NO_LABEL).repeat_interleave(choices)
        first = torch.zeros_like(batch.text_mask)
        first[:, 0] = known
        batch = _with_labels(batch, "choice", first, right=right.flatten()[known])
        if region_labels is None:
            return _with_labels(batch, "region_label_mask", torch.zeros_like(batch.region_mask))
        region_labels = region_labels.repeat_interleave(choices, 0)
        asked = region_labels != _NO_LABEL
        batch = replace(batch, region_classes=torch.where(asked, region_labels, batch.region_classes))
        return _with_labels(batch, "region_label_mask", asked)

    def _outputs(self, encoded: Encoded, batch: Batch) -> VLBertForVisualCommonsenseReasoningOutput:
        contextual = self.task.settings.region_loss == "contextual"
        return VLBertForVisualCommonsenseReasoningOutput(
            logits=self.task.logits(self.head, encoded, batch),
            region_logits=self.head.classes(encoded.regions) if contextual else None,
        )


class VLBertForReferringExpression(VLBertPreTrainedModel):
    """RefCOCO+: the region that an expression means.

    labels  float [N, R]  of each region how well it is the answer, 0 to 1, usually 1 where IoU > 0.5
    """

    new_settings = RefCOCOSettings()

    def _labelled(self, batch: Batch, labels: Tensor | None = None) -> Batch:
        candidate = batch.region_mask.clone()
        candidate[:, :1] &= self.task.settings.whole_image_competes
        found = {} if labels is None else {"target": labels[candidate].float()}
        return _with_labels(batch, "candidate", candidate, **found)

    def _outputs(self, encoded: Encoded, batch: Batch) -> VLBertTaskOutput:
        scores = self.task.scores(self.head, encoded, batch)
        return VLBertTaskOutput(logits=self.task.by_region(scores, batch, -torch.inf))


class VLBertForImageTextRetrieval(VLBertPreTrainedModel):
    """How well text and image fit. It starts from a pre-trained model with the relationship head as it is (zero-shot).

    labels  int64 [N, 2]  which rows are compared: the number of the pair that a row belongs to, from 0; and 0 for the
            pair itself, 1 to W for its wrong captions, W + 1 and more for its wrong images, where W is
            RetrievalSettings.wrong_captions
    """

    new_settings = RetrievalSettings()

    def _labelled(self, batch: Batch, labels: Tensor | None = None) -> Batch:
        if labels is None:
            return batch
        anchor, role = labels.unbind(dim=1)
        return replace(batch, labels={"anchor": anchor, "role": role, "right": role[role == 0]})

    def _outputs(self, encoded: Encoded, batch: Batch) -> VLBertTaskOutput:
        return VLBertTaskOutput(logits=self.head(encoded))


def _with_labels(batch: Batch, name: str, where: Tensor, **labels: Tensor) -> Batch:
    """The batch with labels at the marked tokens or regions, bool [N, T] or [N, R]; `name`: that of their mask."""
    sizes = replace(batch.sizes, labelled=batch.sizes.labelled | {name: tuple(where.sum(dim=1).tolist())})
    labelled = batch.labelled | {name: where.flatten().nonzero()[:, 0]}
    return replace(batch, labelled=labelled, labels=batch.labels | labels, sizes=sizes)
