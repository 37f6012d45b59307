"""What the authors' checkpoints have in common, whichever model they are of.

vlbert.py and vilbert.py say which of our tensors each key of theirs is; convert.py reads and writes the files.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlbert.config import ModelConfig
from vlbert.model.vlbert import VLBert

COUNTER = ".num_batches_tracked"  # which a frozen norm does not use
CLASSES = 1601  # of the Visual Genome detector, background first
Shapes = dict[str, tuple[int, ...]]  # plain name -> shape


@dataclass(frozen=True)
class Hints:
    """What no tensor of a file tells, and its user may.

    num_heads   of each kind of attention, where they are not as published
    task        vqa, vcr, refcoco, retrieval or pretraining: which heads of a fine-tuned ViLBERT to take
    task_token  number of the task's row in the table of task tokens, where the file has one
    """

    num_heads: tuple[int, ...] | None = None
    task: str | None = None
    task_token: int | None = None


NO_HINTS = Hints()


@dataclass(frozen=True)
class Published(ABC):
    """What a file of theirs holds, by its tensors.

    task         a task's settings; None: a model without the heads of any
    num_classes  of the detector, without the background
    """

    task: Any
    model: ModelConfig
    vocab_size: int
    num_classes: int = CLASSES - 1

    kind: ClassVar[str]  # of model, for messages
    below: ClassVar[str | None] = None  # the name under which the state dict lies in a file; None: it is the file
    optional: ClassVar[tuple[str, ...]] = ()  # our names of what a file may lack; it becomes zeros
    # Fields of the model that no tensor shows, and that their configuration has too.
    configured: ClassVar[frozenset[str]] = frozenset()

    @property
    def hints(self) -> Hints:
        """What `understand` needs beside the shapes to understand this."""
        return Hints((self.model.num_heads,))

    @staticmethod
    @abstractmethod
    def plain_name(key: str) -> str:
        """A key without what wrappers and older versions of their code did to it."""

    def in_file(self, name: str) -> str:
        """A plain name as their code saves it."""
        return name

    @classmethod
    @abstractmethod
    def understand(cls, shapes: Shapes, hints: Hints = NO_HINTS) -> "Published":
        """What these tensors are; ValueError where they are none of this kind."""

    @abstractmethod
    def head(self) -> nn.Module:
        """The task's head, new."""

    @abstractmethod
    def entries(self) -> list[dict]:
        """What each key of a file in float32 is, by its plain name: vlbert.published.convert.convert says what an entry
        has. ValueError where their code has nothing for a tensor of such a model of ours."""

    @staticmethod
    def entries_of(theirs: Mapping[str, str | None]) -> list[dict]:
        """The entries of our tensors, given the plain name of each in their file."""
        if unknown := [name for name, key in theirs.items() if key is None]:
            raise ValueError(f"their code has no such model: it has nothing for {unknown[0]}")
        return [{"theirs": key, "dtype": "float32", "ours": name} for name, key in theirs.items()]

    @cached_property
    def skeleton(self) -> dict[str, Tensor]:
        """Our tensors of such a model, without values."""
        with torch.device("meta"):
            parts = {"vlbert": VLBert(self.model, self.vocab_size), "head": self.head()}
        found = {f"{part}.{name}": tensor for part, it in parts.items() for name, tensor in it.state_dict().items()}
        return {name: tensor for name, tensor in found.items() if not name.endswith(COUNTER)}

    @classmethod
    def matrix(cls, shapes: Shapes, name: str) -> tuple[int, int]:
        """The two sides of a tensor that every file of theirs has."""
        if name not in shapes:
            raise ValueError(f"it has no {name}, so it is no {cls.kind} of the authors, or not a whole one")
        if len(shapes[name]) != 2:
            raise ValueError(f"its {name} is {shapes[name]} and should be a matrix")
        return shapes[name][0], shapes[name][1]


def has_any(shapes: Iterable[str], beginning: str | tuple[str, ...]) -> bool:
    """Whether a name begins so."""
    return any(name.startswith(beginning) for name in shapes)


def count(shapes: Iterable[str], pattern: str) -> int:
    """How many different numbers stand where the pattern's group is."""
    return len({match.group(1) for match in (re.match(pattern, name) for name in shapes) if match})
