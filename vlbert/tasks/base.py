"""A task says what one sample becomes, which parameters are new, what the losses are, and what is reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example
from vlbert.data.images import PreparedImage
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets.files import find_samples
from vlbert.model.vlbert import Encoded, VLBert


@dataclass(frozen=True, eq=False)
class Questions:
    """What one epoch asks: question i is about sample `samples[i]`, and `asks[i]` is what is asked (None: no more).

    left_out  one line for each that the files hold and that is not asked: which, and why
    flawed    one line for each that is asked all the same, though something is wrong with it: which, and what
    """

    samples: np.ndarray
    asks: Sequence[Any] | None = None
    left_out: tuple[str, ...] = ()
    flawed: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)


def questions_of(samples: Samples, found: Sequence[tuple[Any, str, str, str]], learning: bool, whose: str) -> Questions:
    """What is asked of `found`, each (ask, its name, image file, flaw or ""): nothing is learned from what has a flaw;
    held out, where all must be answered, it is asked like the others.

    `whose` says in errors where they come from. ValueError where none is left, or an image is in no sample.
    """
    told = tuple(f"{name}: {flaw}" for _, name, _, flaw in found if flaw)
    fit = [(ask, image) for ask, _, image, flaw in found if not (learning and flaw)]
    if not fit:
        raise ValueError(
            f"none of the {len(found)} questions of {whose} can be asked; {told[0] if told else 'it is empty'}"
        )
    where = find_samples(samples, [image for _, image in fit], whose)
    return Questions(where, [ask for ask, _ in fit], *((told, ()) if learning else ((), told)))


def flaw_in(text: str, setting: str, most: int, vocabulary: Vocabulary) -> str:
    """Why nothing can be asked with a text, of `most` word pieces by a setting of this name; empty: it is fit."""
    if len(text) <= most and text.isascii() and text.isprintable() and text.strip():
        return ""  # a piece is a letter or more: most texts need not be cut into pieces to know
    pieces = len(vocabulary.encode(text))
    if not pieces:
        return "it has no words"
    return f"it has {pieces} word pieces, more than task.{setting} = {most}" if pieces > most else ""


class Task(Protocol):
    """The methods of a task. `shuffles` says that validation repeats itself with the pictures of other captions.

    `settings`, where it is about splits of a data set, has `train_on`, the names of those to learn from, and
    `validate_on`. What a task may have besides:

    begin(vlbert, head, started_from)   the last preparation of a new run, its weights loaded
    submission(rows) -> name -> bytes   the files that a leaderboard takes; ValueError where the rows are not all of it
    reported(split) -> metric -> text   what the paper reports for a metric on that split, such as "79.88 base"
    evaluation                          fields of `settings` that vlbert.evaluate changes, name -> value
    kept                                names of attributes, lists, that say what the head's outputs mean, as VQA's
                                        `answers`: they go with the checkpoint, and come from there
    splits_of(split) -> splits          a static method: those that the one of this name consists of, where it may be
                                        several, as RefCOCO+'s test
    best(settings) -> metric            a static method: by which checkpoints are compared, the higher the better; of a
                                        task without it only the newest are kept
    joins                               True: the rows of two runs belong together, as VCR's answers and rationales
    ask(text, choices, answer, hide)    what `example` takes for a person's own question (vlbert.predict)
    """

    shuffles: bool
    paper: str  # what the paper reports for it, in one line

    def __init__(self, settings: Any, vocabulary: Vocabulary, num_classes: int): ...

    def questions(self, samples: Samples, split: str | None) -> Questions:
        """The questions of a split on these samples (vlbert.data.loading); None: all that there are to learn from."""

    def example(self, sample: Sample, image: PreparedImage, ask: Any, rng: np.random.Generator) -> Example:
        """What one question becomes: its words and picture, what is hidden in them and what is asked for."""

    def head(self, config: ModelConfig) -> nn.Module:
        """The parameters that the task adds."""

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """Per loss its sum over what was asked and how many that were; the loop divides by the count over all ranks.

        What no gradient flows through, such as `accuracy` below, is measured alone: averaged and logged like a loss,
        and not learned from.
        """

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """One plain dict an example: what is written for submission, and what `metrics` needs. Every task's has

        key          of the sample
        asked        str    the question
        said         str    the answer that the model gives, and
        probability  float  how sure it is of it
        ranking      list   of {"said", "probability"}, the likeliest first, five at most
        truth        str    the right answer; None where nobody says
        score        float  what the answer is worth, 0 to 1; None likewise
        boxes        list   of {"name", "box"}, to be drawn: x1 y1 x2 y2 in pixels of the stored picture. May be empty

        What is ranked or drawn may have `region`, the number of the sample's region that it is: from 1, 0 none of them.
        """

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """Numbers over the predictions of the whole split; of rows without a truth none."""


def accuracy(right: Tensor) -> tuple[Tensor, int]:
    """How many of the answers [M] are right, bool or worth 0 to 1, as Task.losses returns it: to be watched alone."""
    return right.detach().sum(), len(right)


class TaskModel(nn.Module):
    """VL-BERT with the head of a task: what DDP wraps and a checkpoint holds."""

    def __init__(self, vlbert: VLBert, task: "Task"):
        super().__init__()
        self.vlbert = vlbert
        self.task = task
        self.head = task.head(vlbert.config)

    def forward(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """The task's losses: name -> (sum, count)."""
        return self.task.losses(self.vlbert, self.head, self.vlbert(batch), batch)

    def predict(self, batch: Batch) -> list[dict]:
        """The task's predictions, one dict a row."""
        return self.task.predictions(self.vlbert, self.head, self.vlbert(batch), batch)
