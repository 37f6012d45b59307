"""Models for Hugging Face Transformers: VLBertModel without a head, and one model per task with the task's head."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from storage.runs import as_json
from vlbert.checkpoint import CONFIG, MODEL, TASK, VOCABULARY, Checkpoint, load_model, read_model
from vlbert.data.batch import Batch
from vlbert.hf.config import IGNORED, VLBertConfig
from vlbert.hf.files import HUB, MADE_BY, README, ModelNotReadable, fetch_folder
from vlbert.hf.inputs import to_batch
from vlbert.hf.outputs import VLBertOutput
from vlbert.initial_weights import start_head
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.predict.ranking import ranking_recipe
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskSettings
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

logger = logging.get_logger(__name__)

_MORE_LABELS = ("region_labels", "sentence_image_labels")
_OPTIONS = ("output_attentions", "output_hidden_states", "return_dict")
_ONE_FILE = 2**62  # bytes
_README = f"""---
library_name: vlbert
---

{MADE_BY}

A %(kind)s of the package `vlbert`. Without `import vlbert.hf`, transformers and its Auto classes do not know it:

```python
from vlbert.hf import %(kind)s, VLBertProcessor

model, processor = %(kind)s.from_pretrained("FOLDER"), VLBertProcessor.from_pretrained("FOLDER")
```
"""
_NO_LABEL = -100  # in labels of tokens, regions and choices, as everywhere in transformers


class VLBertPreTrainedModel(PreTrainedModel):
    """The base class of all models. It loads, saves and runs them. Weights are float32."""

    config: VLBertConfig
    config_class = VLBertConfig
    base_model_prefix = "vlbert"
    main_input_name = "input_ids"
    input_modalities = ["image", "text"]
    _supports_sdpa = True
    new_settings: ClassVar[TaskSettings | None] = None  # for a new head, if the checkpoint is of another task
    task: Any  # the task of the head; None without a head
    head: Any

    def __init__(self, config: VLBertConfig):
        super().__init__(config)
        self.saved: Mapping[str, list] = {}  # content of task.json
        self.vlbert = VLBert(config.model_config, config.vocab_size)
        self.task = None
        if self.new_settings is not None:
            settings = config.task_settings
            if not isinstance(settings, type(self.new_settings)):
                actual = "no head" if settings is None else f"the head of {config.task}"
                needed = f"{type(self).__name__} needs {type(self.new_settings).__name__}"
                raise ValueError(f"{needed}; the config has {actual}")
            if isinstance(settings, PretrainingSettings):
                settings = replace(settings, monitored_words=())  # only these need the vocabulary's words
            words: Any = range(config.vocab_size)  # a head needs only how many there are
            self.task = make_task(settings, words, config.num_classes)
            self.head = self.task.head(self.vlbert.config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, because modules of this package initialise themselves."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embedding module."""
        return self.vlbert.embedding.words

    def forward(self, *inputs: Tensor, labels: Tensor | None = None, **named: Any) -> VLBertOutput | tuple:
        """Run the model on inputs that VLBertProcessor makes (vlbert/hf/inputs.py). Each subclass describes its labels.

        output_attentions, output_hidden_states and return_dict default to the config's values. With return_dict=False,
        the result is a tuple of the outputs that are not None. Raises ValueError if the inputs do not fit together, or
        if a text is longer than the position table.
        """
        named = {name: value for name, value in named.items() if value is not None}
        attentions, states, as_object = (named.pop(name, getattr(self.config, name)) for name in _OPTIONS)
        labelled = {"labels": labels} | {name: named.pop(name, None) for name in _MORE_LABELS}
        given = {name: value.to(self.device) for name, value in labelled.items() if value is not None}
        batch = self._add_labels(to_batch(*inputs, **named).to(self.device), **given)
        encoded = self.vlbert(batch, attentions=attentions, hidden_states=states)
        outputs = self._make_outputs(encoded, batch)
        if given:
            losses = self.task.losses(self.vlbert, self.head, encoded, batch)
            outputs.loss = sum(
                total / max(1, n) for name, (total, n) in losses.items() if not name.endswith("accuracy")
            )
        if states:
            outputs.hidden_states, outputs.visual_hidden_states = zip(*encoded.hidden_states, strict=True)
        if attentions:
            outputs.attentions = tuple(layer.weights for layer in encoded.attentions)
        return outputs if as_object else outputs.to_tuple()

    def _add_labels(self, batch: Batch) -> Batch:
        """Return the batch with the labels that `forward` was given. Subclasses take them as keyword arguments."""
        return batch

    def _make_outputs(self, encoded: Encoded, batch: Batch) -> VLBertOutput:
        """Return the outputs of `forward`, except loss, hidden states and attentions."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write config.json, model.safetensors, for question answering task.json, and a README.md if there is none.

        If the processor is saved to the same folder, `vlbert predict` can read that folder. All weights are written to
        one file, regardless of `max_shard_size`.
        """
        folder = Path(save_directory)
        if kwargs.get("is_main_process", True):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TASK).unlink(missing_ok=True)
            if self.saved:
                (folder / TASK).write_bytes(as_json(self.saved))
            if not (folder / README).exists():
                (folder / README).write_text(_README % {"kind": type(self).__name__}, encoding="utf-8")
        super().save_pretrained(folder, *args, **kwargs | {"max_shard_size": _ONE_FILE})

    @classmethod
    def from_pretrained(  # ty: ignore[incompatible-method-override] by name only
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        config: VLBertConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: str | int | torch.device | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        quantization_config: None = None,
        **kwargs: Any,
    ) -> Self | tuple[Self, dict[str, list]]:
        """Load a model in eval mode from a folder, a run (ROOT/runs/RUN: its newest checkpoint) or the Hub.

        If the checkpoint was trained for another task, the model gets a new head. Parts of the checkpoint's head that
        fit are copied to the new head. A warning is logged if the new head must be trained first. Raises OSError if a
        folder or file is missing or damaged, and ValueError if the weights do not fit the model.

        Args:
            config: Config to use instead of the folder's.
            dtype: "auto" or float32. Use torch.autocast to compute in another type.
            device_map: Device for the whole model; "auto": a GPU if there is one.
            state_dict: Tensors to use instead of the folder's.
            ignore_mismatched_sizes: Keep new weights where a tensor has another shape, such as after `num_labels=`.
            output_loading_info: Also return the names of missing, unexpected and mismatched tensors.
            quantization_config: Not supported.
            kwargs: `revision`, `cache_dir`, `force_download`, `local_files_only` and `token` of `snapshot_download`.
                Other keywords are fields of the config, such as `num_labels`.
        """
        if dtype not in (None, "auto", "float32", torch.float32):
            raise ValueError(f"dtype is {dtype}; weights are float32. Use torch.autocast to compute in another type")
        if quantization_config is not None:
            raise ValueError("quantization_config is not supported: weights are float32; leave it out")
        hub = {name: kwargs.pop(name) for name in HUB & kwargs.keys()}
        kwargs = {name: value for name, value in kwargs.items() if name not in IGNORED and name[0] != "_"}
        folder = fetch_folder(pretrained_model_name_or_path, (CONFIG, MODEL, VOCABULARY, TASK), **hub)
        try:
            saved = read_model(folder)
        except ValueError as error:
            raise ModelNotReadable(str(error)) from error
        saved = saved if state_dict is None else replace(saved, model=dict(state_dict))
        same_task = cls.new_settings is not None and saved.config.get("task") == type(cls.new_settings).__name__
        if config is None:
            kwargs = {"name_or_path": folder} | kwargs
            config, kwargs = VLBertConfig.from_dict(saved.config, return_unused_kwargs=True, **kwargs)
        if kwargs:
            raise TypeError(
                f"{cls.__name__}.from_pretrained takes no {', '.join(kwargs)}; the config has no such field"
            )
        settings = cls._choose_settings(config, saved)
        if (
            ignore_mismatched_sizes
            and isinstance(settings, VQASettings)
            and config.num_labels not in (0, settings.answers)
        ):
            settings, saved = replace(settings, answers=config.num_labels), replace(saved, saved={})
        config = config.with_settings(settings)
        config.name_or_path = str(pretrained_model_name_or_path)
        if same_task and "answers" in saved.saved and not config.num_labels:
            config.id2label = dict(enumerate(saved.saved["answers"]))
            config.label2id = {answer: number for number, answer in config.id2label.items()}
        model = cls(config)
        new, mismatched = model.state_dict(), []
        if ignore_mismatched_sizes:
            tensors = {name: tensor for name, tensor in saved.model.items() if name in new}
            mismatched = [(name, t.shape, new[name].shape) for name, t in tensors.items() if t.shape != new[name].shape]
            saved = replace(saved, model=saved.model | {name: new[name] for name, *_ in mismatched})
            if mismatched:
                logger.warning("%s: new weights for %s", folder, ", ".join(name for name, *_ in mismatched))
        missing = model._load_weights(saved, same_task)
        if device_map == "auto":
            device_map = "cuda" if torch.cuda.is_available() else "cpu"
        model = model.to(device_map or "cpu").eval()
        info = {"missing_keys": missing, "unexpected_keys": sorted(saved.model.keys() - new.keys())}
        return (model, info | {"mismatched_keys": mismatched, "error_msgs": []}) if output_loading_info else model

    @classmethod
    def _choose_settings(cls, config: VLBertConfig, saved: Checkpoint) -> TaskSettings | None:
        """Return the config's task settings or, if the config's task is not this model's, settings for a new head."""
        if cls.new_settings is None or config.task == type(cls.new_settings).__name__:
            return config.task_settings
        recipe = ranking_recipe(saved) if isinstance(cls.new_settings, RetrievalSettings) else None
        return recipe.task if recipe else cls.new_settings

    def _load_weights(self, saved: Checkpoint, same_task: bool) -> list[str]:
        """Load the weights that fit the model, and return the names of those that stay new."""
        if same_task:
            self.saved = {**saved.saved, **self.saved}  # `id2label` may have renamed the answers
            load_model(self, saved.model, saved.uri)
            return []
        load_model(self.vlbert, saved.part("vlbert."), saved.uri)
        if self.task is None:
            return []
        loaded = start_head(self.task, self.head, saved, same_task=False)
        self.task.on_start(self.vlbert, self.head, saved.config.get("task"))
        if self.task.zero_shot_head not in loaded.split(", "):
            logger.warning(
                "%s has no head of %s; parts from its own head: %s; the rest has random weights: train the model",
                *(saved.uri, type(self).__name__, loaded),
            )
        pretrained = self.task.pretrained_parts(self.head).items()
        parts = tuple(f"{part}." for part, source in pretrained if source in loaded.split(", "))
        return [f"head.{name}" for name in self.head.state_dict() if not name.startswith(parts or "-")]


class VLBertModel(VLBertPreTrainedModel):
    """The model without a head. It returns the encoder's vectors for words and regions, and takes no labels."""

    def _make_outputs(self, encoded: Encoded, batch: Batch) -> VLBertOutput:
        return VLBertOutput(last_hidden_state=encoded.text, visual_last_hidden_state=encoded.regions)


class VLBertForPreTraining(VLBertPreTrainedModel):
    """A model that predicts masked words, masked regions and, with a relationship head, whether text and image match.

    Labels of `forward`:
        labels: int64 [N, T], the original token at masked words, -100 elsewhere.
        region_labels: float [N, R, 1 + classes], the detector's class probabilities at masked regions, background
            first; zeros elsewhere. Or int64 [N, R], their classes, -100 elsewhere.
        sentence_image_labels: int64 [N], 0 if text and image belong together, otherwise 1.
    """

    new_settings = PretrainingSettings()

    def _add_labels(
        self,
        batch: Batch,
        labels: Tensor | None = None,
        region_labels: Tensor | None = None,
        sentence_image_labels: Tensor | None = None,
    ) -> Batch:
        labels = torch.full_like(batch.tokens, _NO_LABEL) if labels is None else labels
        batch = _set_labels(batch, "word_label_mask", labels != _NO_LABEL, words=labels[labels != _NO_LABEL])
        if batch.boxes.shape[1]:
            if region_labels is None:
                region_labels = torch.zeros(*batch.region_mask.shape, 1 + self.config.num_classes, device=self.device)
            elif region_labels.ndim == 2:
                region_labels = _one_hot(region_labels, 1 + self.config.num_classes, "region_labels")
            labelled = region_labels.sum(dim=2) > 0
            batch = _set_labels(batch, "region_label_mask", labelled, region_classes=region_labels[labelled])
        if self.head.relationship is None:
            if sentence_image_labels is not None:
                raise ValueError("sentence_image_labels are given, but the model has no relationship head")
            return batch
        first = torch.zeros_like(batch.text_mask)
        first[:, 0] = sentence_image_labels is not None
        related = first.new_zeros(0, dtype=torch.int64) if sentence_image_labels is None else sentence_image_labels
        return _set_labels(batch, "related", first, related=related)

    def _make_outputs(self, encoded: Encoded, batch: Batch) -> VLBertOutput:
        rows = torch.arange(len(batch), device=batch.tokens.device)
        has_pair = self.head.relationship is not None and batch.boxes.shape[1] > 0
        return VLBertOutput(
            prediction_logits=self.head.words(self.vlbert, encoded.text),
            region_logits=self.head.regions(encoded.regions),
            relationship_logits=self.head.related(encoded, rows) if has_pair else None,
        )


class VLBertForQuestionAnswering(VLBertPreTrainedModel):
    """A model that answers a question by choosing from the answers in `config.id2label` (VQA).

    `labels` are soft scores of the answers, float [N, answers], or numbers of the right answers, int64 [N], -100 for
    unlabelled questions. To set the number of answers of a new head, give
    `num_labels` or `id2label` to `from_pretrained`.
    """

    new_settings = VQASettings(answers_from_words=False)

    def __init__(self, config: VLBertConfig):
        super().__init__(config)
        if config.num_labels not in (0, count := self.task.settings.answers):
            raise ValueError(f"num_labels is {config.num_labels}, but the head has {count} answers (settings.answers)")
        if not config.num_labels:
            config.num_labels = count
        elif (names := list((config.id2label or {}).values())) != [f"LABEL_{number}" for number in range(count)]:
            self.saved = {"answers": names}

    @classmethod
    def _choose_settings(cls, config: VLBertConfig, saved: Checkpoint) -> TaskSettings | None:
        settings = super()._choose_settings(config, saved)
        if isinstance(settings, VQASettings) and settings is cls.new_settings and config.num_labels:
            return replace(settings, answers=config.num_labels)
        return settings

    def _add_labels(self, batch: Batch, labels: Tensor | None = None) -> Batch:
        length = batch.text_mask.sum(dim=1, keepdim=True)
        positions = torch.arange(batch.tokens.shape[1], device=self.device)
        # The position of [MASK], which precedes the last [SEP], or of [CLS].
        position = length - 2 if self.task.settings.reads == "mask" else torch.zeros_like(length)
        mask, values = positions == position, {}
        if labels is not None and labels.ndim == 1:
            known, labels = labels != _NO_LABEL, _one_hot(labels, self.task.settings.answers, "labels")
            mask, labels = mask & known[:, None], labels[known]
        if labels is not None:
            values = {"scores": labels.float(), "class": labels[labels.any(dim=1)].argmax(dim=1)}
        return _set_labels(batch, "answer", mask, **values)

    def _make_outputs(self, encoded: Encoded, batch: Batch) -> VLBertOutput:
        return VLBertOutput(logits=self.task.logits(self.head, encoded, batch))


class VLBertForVisualCommonsenseReasoning(VLBertPreTrainedModel):
    """A model that selects one of several choices (VCR). Text inputs are [B, choices, T] for B questions.

    Labels of `forward`:
        labels: int64 [B], the index of the correct choice, or -100 if it is unknown.
        region_labels: int64 [B, R], each region's class, or -100 to ignore the region. Not used if region_loss="none".
    """

    new_settings = VCRSettings()

    def _add_labels(self, batch: Batch, labels: Tensor | None = None, region_labels: Tensor | None = None) -> Batch:
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
        batch = _set_labels(batch, "choice", first, right=right.flatten()[known])
        if region_labels is None:
            return _set_labels(batch, "region_label_mask", torch.zeros_like(batch.region_mask))
        region_labels = region_labels.repeat_interleave(choices, 0)
        labelled = region_labels != _NO_LABEL
        batch = replace(batch, region_classes=torch.where(labelled, region_labels, batch.region_classes))
        return _set_labels(batch, "region_label_mask", labelled)

    def _make_outputs(self, encoded: Encoded, batch: Batch) -> VLBertOutput:
        contextual = self.task.settings.region_loss == "contextual"
        return VLBertOutput(
            logits=self.task.logits(self.head, encoded, batch),
            region_logits=self.head.classes(encoded.regions) if contextual else None,
        )


class VLBertForReferringExpression(VLBertPreTrainedModel):
    """A model that finds the region to which an expression refers (RefCOCO+).

    `labels` (float [N, R], 0 to 1) say how well each region fits the expression. Usually, a region gets 1 if its IoU
    with the true box exceeds 0.5, otherwise 0. Or they are the numbers of the right regions, int64 [N].
    """

    new_settings = RefCOCOSettings()

    def _add_labels(self, batch: Batch, labels: Tensor | None = None) -> Batch:
        candidate = batch.region_mask.clone()
        candidate[:, :1] &= self.task.settings.whole_image_competes
        if labels is not None and labels.ndim == 1:
            labels = _one_hot(labels, candidate.shape[1], "labels")
        values = {} if labels is None else {"target": labels[candidate].float()}
        return _set_labels(batch, "candidate", candidate, **values)

    def _make_outputs(self, encoded: Encoded, batch: Batch) -> VLBertOutput:
        scores = self.task.scores(self.head, encoded, batch)
        return VLBertOutput(logits=self.task.by_region(scores, batch, -torch.inf))


class VLBertForImageTextRetrieval(VLBertPreTrainedModel):
    """A model that scores how well text and image match. With a pre-trained relationship head, it works zero-shot.

    `labels` (int64 [N, 2]) hold two numbers per row. The first is the index of the matching pair from which the row was
    made. The second is 0 for the pair itself, 1 to W if its caption was replaced by a wrong one, and above W if its
    image was replaced. W is RetrievalSettings.wrong_captions.
    """

    new_settings = RetrievalSettings()

    def _add_labels(self, batch: Batch, labels: Tensor | None = None) -> Batch:
        if labels is None:
            return batch
        if labels.ndim != 2 or labels.shape[1] != 2:
            raise ValueError(f"labels is {list(labels.shape)}; it must be [pairs, 2]: the pair's number, and its role")
        anchor, role = labels.unbind(dim=1)
        return replace(batch, labels={"anchor": anchor, "role": role, "right": role[role == 0]})

    def _make_outputs(self, encoded: Encoded, batch: Batch) -> VLBertOutput:
        return VLBertOutput(logits=self.head(encoded))


def _one_hot(labels: Tensor, count: int, name: str) -> Tensor:
    """Return class numbers, integers [...], as float [..., count]; zeros for -100. Raises ValueError for others."""
    known = labels != _NO_LABEL
    if labels.is_floating_point() or (known & ((labels < 0) | (labels >= count))).any():
        raise ValueError(f"{name} of shape {list(labels.shape)} must be class numbers from 0 to {count - 1}, or -100")
    return torch.nn.functional.one_hot(labels.clamp(min=0), count).float() * known[..., None]


def _set_labels(batch: Batch, name: str, mask: Tensor, **labels: Tensor) -> Batch:
    """Return the batch with `labels` for the True elements of `mask` (bool [N, T] or [N, R]).

    The indices of these elements are stored as `labelled[name]`.
    """
    sizes = replace(batch.sizes, labelled=batch.sizes.labelled | {name: tuple(mask.sum(dim=1).tolist())})
    labelled = batch.labelled | {name: mask.flatten().nonzero()[:, 0]}
    return replace(batch, labelled=labelled, labels=batch.labels | labels, sizes=sizes)
