"""The base classes of the tasks and of their settings."""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example
from vlbert.data.images import PreparedImage
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets.files import find_samples, open_task_file, withdrawn_images
from vlbert.model.heads import Classifier
from vlbert.model.vlbert import Encoded, VLBert


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one epoch: example i is about sample `samples[i]` and has annotation `annotations[i]`.

    samples      n numbers; a range where each sample is one example, because an array of them takes memory
    annotations  what Task.example takes beside the sample; None: the sample is all
    skipped      a line for each example of the files that is not here: which, and why
    invalid      a line for each that is here although something is wrong with it: which, and what
    """

    samples: range | np.ndarray
    annotations: Sequence[Any] | None = None
    skipped: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)


def make_examples(
    settings: "TaskSettings", samples: Samples, split: str | None, found: Sequence[tuple[Any, str, str, str]]
) -> Examples:
    """The examples of `found` in a split: (annotation, its name, image file, invalid reason or ""). Training (None)
    skips the invalid ones; an evaluation keeps them, since all must be answered. Both skip those whose image was
    withdrawn. ValueError where none is left, or an image is in no sample.
    """
    training, source = split is None, f"{', '.join(settings.splits(split))} of {settings.folder}"
    withdrawn = withdrawn_images(samples, {image for _, _, image, _ in found})
    gone = tuple(dict.fromkeys(f"{name}: its image was withdrawn" for _, name, image, _ in found if image in withdrawn))
    found = [one for one in found if one[2] not in withdrawn]
    invalid = tuple(f"{name}: {reason}" for _, name, _, reason in found if reason)
    usable = [(annotation, image) for annotation, _, image, reason in found if not (training and reason)]
    if not usable:
        raise ValueError(
            f"none of the {len(found) + len(gone)} examples of {source} can be used; "
            f"{next(iter(invalid + gone), 'it is empty')}"
        )
    numbers = find_samples(samples, [image for _, image in usable], source)
    lines = (gone + invalid, ()) if training else (gone, invalid)
    return Examples(numbers, [annotation for annotation, _ in usable], *lines)


def invalid_reason(text: str, field: str, limit: int, vocabulary: Vocabulary) -> str:
    """Why a text is no valid input: it has no token, or more than `limit`, the task's setting `field`. "": it is
    valid."""
    if len(text) <= limit and text.isascii() and text.isprintable() and text.strip():
        return ""  # a token is a letter or more: most texts need not be tokenized
    tokens = len(vocabulary.encode(text))
    if not tokens:
        return "it has no words"
    return f"it has {tokens} tokens, more than task.{field} = {limit}" if tokens > limit else ""


def check_room(settings: "TaskSettings", field: str, config: ModelConfig, others: int) -> None:
    """Raise ValueError if the tokens that a field allows and `others` exceed the model's position table."""
    room, tokens = config.max_positions - others, getattr(settings, field)
    if tokens > room:
        raise ValueError(f"task.{field} is {tokens}, the model has room for {room}: set that")


class TaskSettings:
    """Base class of a task's settings, a frozen dataclass. A task with files of its own has a field `folder` that holds
    them. A task with splits has the fields `train_on` and `validate_on`; without splits, `data.datasets` and
    `data.held_out` say what is read."""

    folder: str = ""
    train_on: tuple[str, ...] = ()
    validate_on: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Files and folders that `folder` must hold."""
        return ()

    def splits(self, split: str | None) -> tuple[str, ...]:
        """The splits to read: the given one; None: those to train on."""
        return self.train_on if split is None else (split,)

    def to_train(self) -> Self:
        """These settings without the files that validation alone reads."""
        return replace(self, validate_on=self.train_on[0]) if self.train_on else self  # ty: ignore[invalid-argument-type]

    def hashes(self) -> dict[str, str]:
        """The sha256, 64 hex, of each of `files` that is a file in `folder`."""
        found = {}
        for name in dict.fromkeys(self.files):
            file = Path(self.folder, name)
            if file.is_file():
                with open_task_file(file, "task.folder") as stream:
                    found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
        return found

    def check_same(self, recorded: Mapping[str, str] | None, where: str, hint: str) -> None:
        """ValueError names a file that is another one than a run had whose hashes were `recorded`; None: they were not.

        where: the checkpoint of that run. way_out: what to do.
        """
        for name, found in self.hashes().items():
            before = recorded.get(name, found) if recorded else found
            if before != found:
                raise ValueError(
                    f"{Path(self.folder, name)} has changed: {where} was trained with another one (sha256 "
                    f"{before[:12]}..., now {found[:12]}...); {hint}"
                )


class Task(ABC):
    """Base class of the tasks.

    A task defines `examples`, `example`, `head`, `losses`, `predictions` and `metrics`. All below these has a default.
    """

    def __init__(self, settings: Any, vocabulary: Vocabulary, num_classes: int):
        """num_classes: of the detector, without the background."""
        self.settings = settings
        self.vocabulary = vocabulary
        self.num_classes = num_classes

    @property
    def folder(self) -> Path:
        """The folder of the task's files."""
        return Path(self.settings.folder)

    def examples(self, samples: Samples, split: str | None) -> Examples:
        """The examples of a split; None: all that training learns from. By default one of each sample."""
        return Examples(range(len(samples)))

    @abstractmethod
    def example(self, sample: Sample, image: PreparedImage, annotation: Any, rng: np.random.Generator) -> Example:
        """The input and the labels of one example. All randomness comes from `rng`. ValueError: the example is skipped
        and counted."""

    @abstractmethod
    def head(self, config: ModelConfig) -> nn.Module:
        """The parameters that the task adds."""

    @abstractmethod
    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """Name -> (sum of the loss, number of terms). The loop divides by the number over all ranks.

        What has no gradient, such as `accuracy` below, is averaged and logged like a loss, and not learned from.
        """

    @abstractmethod
    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """One dict of plain values an example: a row of predictions.parquet. Every task has these columns:

        key           str    of the sample
        question      str    the text that is asked
        answer        str    the model's answer
        probability   float  of the answer
        ranking       list   of {"answer", "probability"}, the likeliest first, at most five
        ground_truth  str    the right answer; None where it is not known
        score         float  of the answer, 0 to 1; None where the ground truth is not known
        boxes         list   of {"name", "box"} to draw: x1 y1 x2 y2 in pixels of the stored image. May be empty

        Entries of `ranking` and `boxes` may have `region`, the number of a region: from 1; 0 is none of them.
        """

    @abstractmethod
    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """Metrics over the predictions of a whole split; none where no ground truth is known."""

    # --- what a paper reports, and what checkpoints are kept by -------------------------------------------------------

    paper: str = "no number"  # what the paper reports, in one line

    def reported(self, split: str) -> dict[str, str]:
        """What the paper reports on a split, in %: metric -> text, such as "79.88 base"."""
        return {}

    @staticmethod
    def best_metric(settings: Any) -> str | None:
        """The metric by which checkpoints are compared, the higher the better; None: only the newest are kept."""
        return None

    # --- batches ------------------------------------------------------------------------------------------------------

    validate_shuffled: bool = False  # validate again, each text with another image: what is left needs no image

    def with_other_image(self, example: Example, other: Example) -> Example:
        """The example with the image of another one."""
        return replace(example, image=other.image)

    @property
    def lookahead(self) -> int:
        """How many examples behind its own `collate_group` needs."""
        return 0

    def collate_group(self, examples: Sequence[Example], following: Sequence[Example]) -> list[Example]:
        """What a batch is made of, given its examples and the `lookahead` behind them. In training the order is that
        of the whole step, whatever the ranks, and the step's first examples follow its last. By default the examples.
        """
        return list(examples)

    # --- weights that a run starts from -------------------------------------------------------------------------------

    zero_shot_head: str = (
        ""  # the part of pre-training's head without which a pre-trained model cannot be evaluated on the
    )
    #                           task without fine-tuning; "": none can
    saved: tuple[str, ...] = ()  # attributes, lists, that give the head's outputs their meaning, as VQA's `answers`:
    #                              they are saved with each checkpoint, and loaded from there

    def pretrained_parts(self, head: nn.Module) -> Mapping[str, str]:
        """Part of the head -> the part of pre-training's head that it starts from."""
        return head.init_from if isinstance(head, Classifier) else {}

    def convert_pretrained(self, part: str, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a part of the head, given those of the part of pre-training's head that it starts from. By
        default the same."""
        return tensors

    def on_start(self, vlbert: VLBert, head: nn.Module, init_from: str | None) -> None:  # noqa: B027  none is needed
        """Prepares a new run after its weights are loaded; `init_from`: type of the settings of the run that they come
        from."""

    # --- evaluation and users' own questions --------------------------------------------------------------------------

    joint_metrics: bool = False  # the predictions of two runs belong together, as VCR's answers and rationales
    evaluation_batch_size: int = 64  # examples of a batch of vlbert evaluate at most

    def predict(self, vlbert: VLBert, head: nn.Module, batch: Batch) -> list[dict]:
        """The rows of a batch in a validation or evaluation: its `predictions`."""
        return self.predictions(vlbert, head, vlbert(batch), batch)

    def subset(self, examples: Examples, numbers: np.ndarray) -> Examples:
        """The examples of a validation that asks only those of `numbers`, int64 [n], of the same length. By default
        the same; where examples depend on one another, each on those alone."""
        return examples

    def assemble(self, rows: Sequence[dict]) -> list[dict]:
        """What `predict` returned for all examples of a split, as rows of predictions. By default the same."""
        return list(rows)

    def submission(self, rows: Sequence[dict]) -> dict[str, bytes]:
        """The files that a leaderboard takes, by name. ValueError where the rows are not the whole split."""
        return {}

    def annotation_for(self, text: str) -> Any:
        """The annotation, for `example`, of a user's own question (vlbert predict). Its further arguments are those of
        `choices`, `answer` and `mask_regions` that the task takes. ValueError where the question does not fit."""
        raise ValueError(f"{type(self).__name__} takes no questions of your own: it does not define annotation_for")


def user_annotation(task: Task, text: str, **more: Any) -> Any:
    """Task.annotation_for with those of `more` that are given; ValueError names one that the task does not take."""
    given = {name: value for name, value in more.items() if value}
    if unknown := given.keys() - inspect.signature(task.annotation_for).parameters.keys():
        raise ValueError(f"{type(task).__name__} takes no {min(unknown)}: leave that out")
    return task.annotation_for(text, **given)


def accuracy(right: Tensor) -> tuple[Tensor, int]:
    """The accuracy over M answers, as Task.losses returns it. right [M]: bool, or scores from 0 to 1."""
    return right.detach().sum(), len(right)


class TaskModel(nn.Module):
    """VL-BERT with the head of a task: what DDP wraps and a checkpoint holds.

    bert_parameters  beginnings of the names of what a BERT may have given it (OptimizerConfig.bert_learning_rate)
    """

    def __init__(self, vlbert: VLBert, task: Task):
        super().__init__()
        self.vlbert = vlbert
        self.task = task
        self.head = task.head(vlbert.config)
        texts = [number for number, letter in enumerate(vlbert.config.layers) if letter in "JT"]
        self.bert_parameters = (
            *(f"vlbert.embedding.{name}." for name in ("words", "positions", "segments", "norm")),
            *(f"vlbert.encoder.layers.{number}." for number in texts),
        )

    def forward(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """The task's losses: name -> (sum, count)."""
        encoded = self.vlbert(batch)
        losses = self.task.losses(self.vlbert, self.head, encoded, batch)
        if self.vlbert.config.layers[-1] == "J":
            return losses
        # A task may read one stream alone. DDP refuses parameters without a gradient, so those of the other get zeros.
        unread = 0.0 * (encoded.text.sum() + encoded.regions.sum())
        return {name: (loss + unread if loss.requires_grad else loss, n) for name, (loss, n) in losses.items()}

    def predict(self, batch: Batch) -> list[dict]:
        """Task.predict: one dict an example."""
        return self.task.predict(self.vlbert, self.head, batch)
