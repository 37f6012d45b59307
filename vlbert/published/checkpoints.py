"""The base class for published checkpoints of VL-BERT and ViLBERT.

vlbert.py and vilbert.py map the keys of the authors' files to our tensors. convert.py reads and writes the files.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vlbert.config import ModelConfig
from vlbert.model.heads import Pooler
from vlbert.model.vlbert import VLBert
from vlbert.tasks import make_task

COUNTER = ".num_batches_tracked"  # unused in frozen norms
CLASSES = 1601  # classes of the Visual Genome detector, background first
Shapes = dict[str, tuple[int, ...]]  # plain name -> shape


@dataclass(frozen=True)
class Hints:
    """Properties of a model that the user gives, because they cannot be inferred from its tensors."""

    # number of attention heads, if not the published one; ViLBERT has three (text, regions, co-attention)
    num_heads: tuple[int, ...] | None = None
    # task whose heads are converted, if the checkpoint is a fine-tuned ViLBERT
    task: Literal["pretraining", "vqa", "vcr", "refcoco", "retrieval"] | None = None
    # the task's row in the table of task tokens, counted from 0, if the checkpoint is of 12-in-1
    task_token: int | None = None
    fusion_method: Literal["mul", "sum"] = "mul"  # of a ViLBERT's two poolers, as in its configuration file


NO_HINTS = Hints()


@dataclass(frozen=True)
class Published(ABC):
    """Base class of a published checkpoint: model settings, and a mapping of the file's keys to our tensor names.

    The plain name of a tensor is its key in the authors' latest code, without the prefixes of training wrappers.
    """

    task: Any  # settings of the task; None: a model without heads
    model: ModelConfig
    vocab_size: int
    num_classes: int = CLASSES - 1  # classes of the detector, without the background

    kind: ClassVar[str]  # name of the model in messages
    state_key: ClassVar[str | None] = None  # key of the state dict in a file; None: the file is the state dict
    optional: ClassVar[tuple[str, ...]] = ()  # our names of tensors that a file may lack; they become zeros

    @staticmethod
    @abstractmethod
    def plain_name(key: str) -> str:
        """Remove the prefixes of training wrappers from a key, and rename it as in the authors' latest code."""

    @classmethod
    @abstractmethod
    def from_shapes(cls, shapes: Shapes, hints: Hints = NO_HINTS) -> "Published":
        """Infer the model from the shapes of its tensors. Raises ValueError if the file holds another kind of model."""

    def head(self) -> nn.Module:
        """Make a new head for the model's task."""
        if self.task is None:
            return nn.ModuleDict({"pooler": Pooler(self.model)})
        words: Any = range(self.vocab_size)  # a head needs only how many there are
        return make_task(self.task, words, self.num_classes).head(self.model)

    @abstractmethod
    def entries(self) -> list[dict]:
        """Return the conversion report's entries (see convert.py) for a float32 file whose keys are plain names."""

    @cached_property
    def skeleton(self) -> dict[str, Tensor]:
        """The model's tensors, keyed by our names. They are on the meta device, so they have shapes but no data."""
        with torch.device("meta"):
            parts = {"vlbert": VLBert(self.model, self.vocab_size), "head": self.head()}
        states = {part: module.state_dict() for part, module in parts.items()}
        tensors = {f"{part}.{name}": tensor for part, state in states.items() for name, tensor in state.items()}
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(COUNTER)}

    @classmethod
    def matrix(cls, shapes: Shapes, name: str) -> tuple[int, int]:
        """Return the shape of a matrix in the file. Raises ValueError if the tensor is missing or not a matrix."""
        if name not in shapes:
            raise ValueError(f"it has no {name}, so it is not a {cls.kind} of the authors, or is incomplete")
        if len(shapes[name]) != 2:
            raise ValueError(f"its {name} is {shapes[name]} and should be a matrix")
        return shapes[name][0], shapes[name][1]


def has_any(shapes: Iterable[str], prefix: str | tuple[str, ...]) -> bool:
    """Return True if any name starts with the prefix, or with one of several prefixes."""
    return any(name.startswith(prefix) for name in shapes)


def count(shapes: Iterable[str], pattern: str) -> int:
    """Match a pattern against all names, and count the different values of its capture group, such as layer indices."""
    return len({match.group(1) for match in (re.match(pattern, name) for name in shapes) if match})
