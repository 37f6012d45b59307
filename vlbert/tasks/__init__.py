"""A task says what one sample becomes, which parameters are new, what the losses are, and what is reported.

Adding one: a file here with a settings dataclass and a class of the methods below, and a line in make_task.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor, nn

from storage.sample import Sample
from vlbert.batch import Batch, Example
from vlbert.config import ModelConfig
from vlbert.model import Encoded, VLBert
from vlbert.pictures import View
from vlbert.text import Vocabulary

if TYPE_CHECKING:
    from vlbert.data import Samples


@dataclass(frozen=True, eq=False)
class Questions:
    """What one epoch asks: question i is about sample `samples[i]`, and `asks[i]` is what is asked (None: no more)."""

    samples: np.ndarray
    asks: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.samples)


class Task(Protocol):
    """The methods of a task. `shuffles` says that validation repeats itself with the pictures of other captions."""

    shuffles: bool
    paper: str  # what the paper reports for it, printed beside the metric

    def __init__(self, settings: Any, vocabulary: Vocabulary, num_classes: int): ...

    def questions(self, samples: "Samples", held_out: bool) -> Questions:
        """The questions on these samples (vlbert.data), of the split to learn from or of the one held out."""

    def example(self, sample: Sample, view: View, ask: Any, rng: np.random.Generator) -> Example:
        """What one question becomes: its words and picture, what is hidden in them and what is asked for."""

    def head(self, config: ModelConfig) -> nn.Module:
        """The parameters that the task adds."""

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """Per loss its sum over what was asked and how many that were; the loop divides by the count over all ranks."""

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """One plain dict a row of the batch: what is written for submission, and what `metrics` needs."""

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """Numbers over the predictions of the whole split."""


def make_task(settings: Any, vocabulary: Vocabulary, num_classes: int) -> Task:
    """The task that the type of `settings` belongs to."""
    return _task_of(settings)(settings, vocabulary, num_classes)


def paper_of(settings: Any) -> str:
    """What the paper reports for the task that the type of `settings` belongs to."""
    return _task_of(settings).paper


def _task_of(settings: Any) -> type[Task]:
    from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
    from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
    from vlbert.tasks.vcr import VCR, VCRSettings
    from vlbert.tasks.vqa import VQA, VQASettings

    tasks = {PretrainingSettings: Pretraining, RefCOCOSettings: RefCOCO, VCRSettings: VCR, VQASettings: VQA}
    return tasks[type(settings)]
