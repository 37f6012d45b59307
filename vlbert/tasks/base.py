"""The base classes of tasks and of their settings."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow.compute as pc
from torch import Tensor, nn

from storage.digests import sha256_of
from storage.object_store import ObjectStore
from storage.reading import Samples
from storage.sample import Sample
from storage.snapshots import read_columns
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example
from vlbert.data.images import PreparedImage
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets.files import find_samples, open_task_file, withdrawn_images
from vlbert.model.heads import Classifier
from vlbert.model.vlbert import Encoded, VLBert


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one epoch. Example i has sample number `samples[i]` and annotation `annotations[i]`.

    Attributes:
        samples: n sample numbers; a range, which takes no memory, if each sample is one example.
        annotations: passed to Task.example with the sample; empty if examples need only the sample.
        skipped: one line (name and reason) for each example in the files that is left out.
        invalid: one line (name and reason) for each example that is kept although it is invalid.
    """

    samples: range | np.ndarray
    annotations: Sequence[Any] = ()
    skipped: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)


def least_trained_key(share: float) -> str:
    """Return the first key that is not held out. Keys are hashes (storage/sample.py): `share` of all are below it."""
    return f"{int(share * 16**20):020x}"


def split_by_key(examples: Examples, store: ObjectStore, snapshot: str, share: float, held_out: bool) -> Examples:
    """Return the examples that are held out, or those that are not: by the keys in the snapshot file at `snapshot`."""
    if not share:
        return examples
    tables = read_columns(store, snapshot, ["key"])
    below = np.concatenate([pc.less(table["key"], least_trained_key(share)).to_numpy() for table in tables])
    chosen = np.flatnonzero(below[examples.samples] == held_out).astype(np.int32)  # half the memory of int64
    annotations = [examples.annotations[number] for number in chosen] if len(examples.annotations) else ()
    return replace(examples, samples=np.asarray(examples.samples)[chosen], annotations=annotations)


def make_examples(
    settings: "TaskSettings", samples: Samples, split: str | None, rows: Sequence[tuple[Any, str, str, str]]
) -> Examples:
    """Return the Examples of a split. `rows` are (annotation, name, image file, reason why it is invalid or "").

    Training (`split` is None) skips invalid examples. Evaluation keeps them, because every question must be answered.
    Both skip examples whose image was withdrawn. Raises ValueError if no example is left, or if a remaining image is
    in no sample or in several samples.
    """
    training, source = split is None, " of ".join(filter(None, [", ".join(settings.splits(split)), settings.folder]))
    withdrawn = withdrawn_images(samples, {image for _, _, image, _ in rows})
    lost = tuple(dict.fromkeys(f"{name}: its image was withdrawn" for _, name, image, _ in rows if image in withdrawn))
    rows = [row for row in rows if row[2] not in withdrawn]
    invalid = tuple(f"{name}: {reason}" for _, name, _, reason in rows if reason)
    usable = [(annotation, image) for annotation, _, image, reason in rows if not (training and reason)]
    if not usable:
        raise ValueError(
            f"none of the {len(rows) + len(lost)} examples of {source} can be used; "
            f"{next(iter(invalid + lost), 'there are none')}"
        )
    numbers = find_samples(samples, [image for _, image in usable], source)
    lines = (lost + invalid, ()) if training else (lost, invalid)
    return Examples(numbers, [annotation for annotation, _ in usable], *lines)


def invalid_reason(text: str, field: str, limit: int, vocabulary: Vocabulary) -> str:
    """Return why a text is invalid, or "" if it has 1 to `limit` tokens. `field` is the setting that holds `limit`."""
    if len(text) <= limit and text.isascii() and text.isprintable() and text.strip():
        return ""  # a token has at least one letter, so short texts need not be tokenised
    tokens = len(vocabulary.encode(text))
    if not tokens:
        return "it has no words"
    return length_reason(tokens, field, limit)


def length_reason(tokens: int, field: str, limit: int) -> str:
    """Return that a text of so many tokens is too long, or "" if it is not."""
    return f"it has {tokens} tokens, more than task.{field} = {limit}" if tokens > limit else ""


class TaskSettings:
    """Base class of the tasks' settings, which are frozen dataclasses.

    A task that reads files has the field `folder`. A task with splits has the fields `train_on` and `validate_on`. A
    task without splits trains on all samples of `data.datasets` and validates on all of `data.held_out`.
    """

    folder: str = ""
    train_on: tuple[str, ...] = ()
    validate_on: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files and folders that must be in `folder`."""
        return ()

    def lengths(self, text_rows: bool = False) -> dict[str, int]:
        """Return the settings that limit a text's tokens, each with the number of the row's other positions.

        With `text_rows`, the settings of text-only rows are included.
        """
        return {}

    def fit(self, model: ModelConfig, text_rows: bool = False) -> Self:
        """Return a copy whose lengths fit into the model's positions. Lengths left at their default follow the model.

        Raises ValueError if another length does not fit.
        """
        fitting, defaults = {}, {field.name: field.default for field in fields(self)}  # ty: ignore[invalid-argument-type]
        for field, others in self.lengths(text_rows).items():
            most, tokens = model.max_positions - others, getattr(self, field)
            if tokens > most and tokens != defaults[field]:
                raise ValueError(
                    f"task.{field} is {tokens}, the model has positions for {most}; set it to {most} or less"
                )
            fitting |= {field: most} if tokens > most else {}
        return replace(self, **fitting)  # ty: ignore[invalid-argument-type]

    def splits(self, split: str | None) -> tuple[str, ...]:
        """Return the splits to read: only `split`, or the training splits if it is None."""
        return self.train_on if split is None else (split,)

    def to_train(self) -> Self:
        """Return a copy of these settings for training only: its `files` do not include validation files."""
        return replace(self, validate_on=self.train_on[0]) if self.train_on else self  # ty: ignore[invalid-argument-type]

    def hashes(self) -> dict[str, str]:
        """Return a dict from file name to SHA-256 (64 hex digits), without the folders and missing files in `files`."""
        hashes = {}
        for name in dict.fromkeys(self.files):
            file = Path(self.folder, name)
            if file.is_file():
                with open_task_file(file, "task.folder") as stream:
                    hashes[name] = sha256_of(stream)
        return hashes

    def check_same(self, recorded: Mapping[str, str] | None, checkpoint: str, hint: str) -> None:
        """Raise ValueError if a file's hash is not the one in `recorded`. The message has `checkpoint` and `hint`."""
        for name, now in self.hashes().items():
            before = recorded.get(name, now) if recorded else now
            if before != now:
                raise ValueError(
                    f"{Path(self.folder, name)} has changed since {checkpoint} was trained (sha256 {before[:12]}..., "
                    f"now {now[:12]}...); {hint}"
                )


class Task(ABC):
    """Base class of the tasks: what a model is asked, how it answers, and how its answers are scored.

    A task defines `example`, `head`, `losses`, `predictions` and `metrics`. Everything else has a default.
    """

    def __init__(self, settings: Any, vocabulary: Vocabulary, num_classes: int):
        """Store the arguments. `num_classes` is the detector's number of classes, without the background."""
        self.settings = settings
        self.vocabulary = vocabulary
        self.num_classes = num_classes
        self.validate_shuffled = getattr(settings, "validate_shuffled", self.validate_shuffled)

    def examples(self, samples: Samples, split: str | None) -> Examples:
        """Return the examples of a split, or the training examples if `split` is None.

        The default is one example per sample, without annotations. Tasks that read annotations from files return
        `make_examples(...)`.
        """
        return Examples(range(len(samples)))

    @abstractmethod
    def example(self, sample: Sample, image: PreparedImage, annotation: Any, rng: np.random.Generator) -> Example:
        """Return the model's input and the labels for one example.

        DataLoader workers call this method. If it raises ValueError, the example is skipped, counted and logged.

        Args:
            sample: caption, regions and URL of the image.
            image: the resized image with its boxes; `image.to_input` makes the ImageInput.
            annotation: the example's entry in `Examples.annotations`, or a user's question from `annotation_for`.
            rng: the only source of random numbers to use, so that runs can be repeated.
        """

    @abstractmethod
    def head(self, config: ModelConfig) -> nn.Module:
        """Create the module with the parameters that the task adds to VL-BERT, such as a Classifier."""

    @abstractmethod
    def losses(self, vlbert: VLBert, head: Any, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """Return the sum and the number of terms of each loss, by name. Called in every training step.

        `head` is the module that the method `head` returned, and `encoded` has the output vectors of words and regions.
        The training loop divides each sum by the number of terms on all ranks. The dict may also have values without a
        gradient, such as an accuracy. They are averaged and logged, but do not affect training.
        """

    @abstractmethod
    def predictions(self, vlbert: VLBert, head: Any, encoded: Encoded, batch: Batch) -> list[dict]:
        """Return the model's answers: one dict of plain values per example, a row of predictions.parquet.

        Every task has these columns and may add more:

        key           str    key of the sample
        question      str    the text that the model was asked
        answer        str    the model's answer
        probability   float  probability of the answer; None if it has none, such as a number
        ranking       list   of {"answer", "probability"}, most probable first, at most five
        ground_truth  str    the right answer; None if it is unknown
        score         float  score of the answer, 0 to 1; None if the ground truth is unknown
        boxes         list   of {"name", "box"} to draw, x1 y1 x2 y2 in pixels of the stored image; may be empty

        Entries of `ranking` and `boxes` may also have `region`: the number of a region (from 1), or 0 for other boxes.
        """

    @abstractmethod
    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """Return a split's metrics by name, given all its predictions, or {} if no ground truth is known."""

    @staticmethod
    def best_metric(settings: Any) -> str | None:
        """Return the metric whose highest value selects the best checkpoint, or None to keep only the newest."""
        return None

    # --- batches ------------------------------------------------------------------------------------------------------

    validate_shuffled: bool = False  # validate a second time, with each text next to the image of another example

    @property
    def folder(self) -> Path:
        if not self.settings.folder:
            raise ValueError("task.folder is not set; give --task.folder FOLDER, the folder of the task's files")
        return Path(self.settings.folder)

    def with_other_image(self, example: Example, other: Example) -> Example:
        return replace(example, image=other.image)

    @property
    def lookahead(self) -> int:
        """Number of following examples that `collate_group` needs."""
        return 0

    def collate_group(self, examples: Sequence[Example], following: Sequence[Example]) -> list[Example]:
        """Return the examples to collate into a training batch, by default `examples`.

        An override may combine them with `following`: up to `lookahead` examples that come next in the step, including
        those of other ranks. It wraps around: after the last example of the step comes its first.
        """
        return list(examples)

    def text_example(self, key: str, tokens: np.ndarray, rng: np.random.Generator) -> Example:
        """Return the Example of a text-only row, given its token ids, int64 [t]. The default raises ValueError."""
        raise ValueError(f"{type(self).__name__} does not learn from text-only rows; set --data.text_batch=0")

    # --- initial weights ----------------------------------------------------------------------------------------------

    # Part of pre-training's head that evaluation without fine-tuning needs; "" if no such evaluation is possible.
    zero_shot_head: str = ""
    # Names of attributes, lists, that give the head's outputs their meaning, such as VQA's `answers`. Each checkpoint
    # saves them.
    saved: tuple[str, ...] = ()

    def pretrained_parts(self, head: Any) -> Mapping[str, str]:
        """Return a dict from parts of this head to the parts of the pre-training head that initialise them."""
        return head.init_from if isinstance(head, Classifier) else {}

    def convert_pretrained(self, part: str, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Convert pre-trained tensors (name -> tensor) for `part` of this head. The default returns them unchanged."""
        return tensors

    def on_start(self, vlbert: VLBert, head: Any, init_from: str | None) -> None:  # noqa: B027  optional
        """Change a run's initial weights. `init_from` is the settings class name of the loaded checkpoint, or None."""

    # --- evaluation and users' questions ------------------------------------------------------------------------------

    joint_metrics: bool = False  # vlbert evaluate may score two runs together, such as VCR's answers and rationales
    evaluation_batch_size: int = 64  # maximum examples per batch of vlbert evaluate

    def predict(self, vlbert: VLBert, head: Any, batch: Batch) -> list[dict]:
        """Run the model for validation or evaluation. Return one dict per example, by default from `predictions`."""
        return self.predictions(vlbert, head, vlbert(batch), batch)

    def subset(self, examples: Examples, numbers: np.ndarray) -> Examples:
        """Prepare the examples for a validation that uses only the indices `numbers`, int64 [n].

        The default returns `examples` unchanged. Tasks whose examples depend on each other override this method. An
        override must not change the indices of the examples.
        """
        return examples

    def assemble(self, rows: Sequence[dict]) -> list[dict]:
        """Combine all dicts that `predict` returned for a split into predictions. By default, return them unchanged."""
        return list(rows)

    def submission(self, rows: Sequence[dict]) -> dict[str, bytes]:
        """Return the files to submit to a leaderboard, by name. Raises ValueError if predictions are missing."""
        return {}

    def text_limit(self, tokens: int, regions: int) -> int:
        """Return how many of a text's `tokens` tokens a row can have next to `regions` regions."""
        return min([tokens, *(getattr(self.settings, name) for name in self.settings.lengths())])

    def annotation_for(self, text: str) -> Any:
        """Return the annotation for a user's question, to pass to `example`. Raises ValueError if it is not valid.

        Overrides may have more parameters: `choices`, `answer` and `mask_regions`, as in `vlbert predict`.
        """
        raise ValueError(f"{type(self).__name__} takes no questions of your own: it does not define annotation_for")


def user_annotation(task: Task, text: str, **more: Any) -> Any:
    """Call `task.annotation_for` with the non-empty values of `more`. Raises ValueError for unknown parameters."""
    given = {name: value for name, value in more.items() if value}
    if unknown := given.keys() - inspect.signature(task.annotation_for).parameters.keys():
        raise ValueError(f"{type(task).__name__} takes no {min(unknown)}; leave it out")
    return task.annotation_for(text, **given)


def accuracy(right: Tensor) -> tuple[Tensor, int]:
    """Return an accuracy as a value of Task.losses: (sum, M). `right` [M] is bool, or scores from 0 to 1."""
    return right.detach().sum(), len(right)


class TaskModel(nn.Module):
    """VL-BERT with the head of a task. DDP wraps this module, and checkpoints save it.

    Attributes:
        bert_parameters: name prefixes of the parameters that BERT also has (for OptimizerConfig.bert_learning_rate).
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
        encoded = self.vlbert(batch)
        losses = self.task.losses(self.vlbert, self.head, encoded, batch)
        if self.vlbert.config.layers[-1] == "J":
            return losses
        # A task may read only one stream. DDP refuses parameters without a gradient, so those of the other get zeros.
        unread = 0.0 * (encoded.text.sum() + encoded.regions.sum())
        return {name: (loss + unread if loss.requires_grad else loss, n) for name, (loss, n) in losses.items()}

    def predict(self, batch: Batch) -> list[dict]:
        return self.task.predict(self.vlbert, self.head, batch)
