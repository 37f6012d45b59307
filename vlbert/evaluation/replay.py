"""Make the batch of any step of a run again, as one HTML page: what was masked and asked, and what each row costs.

    vlbert replay CHECKPOINT STEP [field=value ...]

CHECKPOINT is ROOT/runs/RUN (its newest), ROOT/runs/RUN/best or /step-*, or a copy of such a folder: config.json,
state.json and vocab.txt are enough; losses need model.safetensors. STEP counts from 1, as the log does. The batch is
the same on any number of devices, so a laptop can replay a run of eight GPUs. See docs/operating.md.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.object_store import LocalStore, ObjectStore, open_store
from storage.programs import make_parser
from storage.progress import clock
from storage.runs import STATE
from storage.sample import Sample
from storage.settings import add_fields, from_assignments, override
from training.checkpoint import MODEL
from training.distributed import World
from training.loading import EXPECTED
from training.log import Unreadable
from training.program import find_recipe
from vlbert.checkpoint import Checkpoint, check_saved, find_checkpoint, read_checkpoint
from vlbert.config import Recipe
from vlbert.data.batch import Batch, Example, ImageInput, collate
from vlbert.data.images import PreparedImage
from vlbert.data.loading import Slot, TrainingData, parts_of_step
from vlbert.data.order import SnapshotSpan
from vlbert.data.samples import open_samples
from vlbert.evaluation.evaluate import load_task_model, recipe_of
from vlbert.recipes import RECIPES
from vlbert.resume import open_data, saved_of
from vlbert.tasks.base import Task, TaskModel

ALONE = World(0, 1, torch.device("cpu"))
_PROGRESS_SECONDS = 10.0  # between lines of progress


@dataclass(frozen=True)
class ReplaySettings:
    root: str | None = (
        None  # folder or s3://bucket/prefix with the shards; none: that of the checkpoint, or its recipe's
    )
    text_corpus: str | None = None  # folder of the text corpus; none: as the recipe has it
    folder: str | None = None  # folder with the task's files; none: as the recipe has it
    out: str | None = None  # HTML file to write; none: RUN-step-STEP.html in the working directory
    losses: bool = True  # compute the loss of each row, where the weights are there
    recipe: str | None = None  # MODULE:FUNCTION, the recipe of a task of your own


@dataclass(frozen=True, eq=False)
class Replay:
    """The batch of a step.

    step        from 1, as the log counts
    slots       what the step takes of the order: (number of the dataset, index of the snapshot span, epoch, example)
    spans       of each dataset, by number
    examples    in the order of the slots; those of text alone last
    unreadable  why slots have no example
    """

    checkpoint: Checkpoint
    recipe: Recipe
    task: Task
    step: int
    slots: list[Slot]
    datasets: list[str]
    spans: list[list[SnapshotSpan]]
    examples: list[Example]
    unreadable: list[Unreadable]
    _images: dict[int, tuple[Sample, PreparedImage, np.ndarray]]

    @property
    def batch(self) -> Batch:
        """As one process with one part would have it."""
        return collate(self.examples, self.unreadable)

    def source_of(self, image: ImageInput) -> tuple[Sample, PreparedImage]:
        """The sample that an example's image is made of: another pair's where the two are mismatched."""
        return self._images[id(image.boxes)][:2]


class _Witness:
    """A task that remembers which sample each image is made of."""

    def __init__(self, task: Task):
        self._task = task
        self.images: dict[int, tuple[Sample, PreparedImage, np.ndarray]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def example(self, sample: Sample, image: PreparedImage, annotation: Any, rng: np.random.Generator) -> Example:
        example = self._task.example(sample, image, annotation, rng)
        if example.image is not None:  # all that becomes of it (another pair's, without labels) has the same boxes
            self.images[id(example.image.boxes)] = (sample, image, example.image.boxes)
        return example


def replay(path: str, step: int, settings: ReplaySettings = ReplaySettings()) -> Replay:
    """The batch of a step, from 1, of the run that a checkpoint belongs to.

    ValueError where the checkpoint has not reached the step, and where the shards, the text corpus or the task's files
    are gone or have changed.
    """
    if settings.recipe:
        find_recipe(settings.recipe, RECIPES)()  # its module tells of the task
    store, folder = _find(path)
    checkpoint = read_checkpoint(store, folder, tensors=False)
    state = checkpoint.state
    if not 1 <= step <= state["step"]:
        raise ValueError(
            f"{checkpoint.where} has reached step {state['step']}, so it cannot tell the batch of step {step}; name a "
            f"step from 1 to {state['step']}, or a later checkpoint"
        )
    recipe = _located(recipe_of(checkpoint), checkpoint, settings)
    try:
        return _replayed(checkpoint, recipe, step)
    except EXPECTED as error:
        raise ValueError(f"step {step} of {recipe.run_name} cannot be replayed: {error}") from error


def _find(path: str) -> tuple[ObjectStore, str]:
    """As find_checkpoint, but a copied folder needs no weights."""
    if "/runs/" not in path and (Path(path) / STATE).is_file():
        return LocalStore(path), ""
    return find_checkpoint(path)


def _located(recipe: Recipe, checkpoint: Checkpoint, settings: ReplaySettings) -> Recipe:
    """The recipe with its files where they are now, for one process; ValueError where there is no root."""
    root = settings.root or checkpoint.where.rpartition("/runs/")[0] or recipe.data.root
    here = {"data.root": root, "data.text_corpus": settings.text_corpus, "task.folder": settings.folder}
    given = [f"{name}={value}" for name, value in here.items() if value is not None]
    data = replace(recipe.data, held_out=None, gradient_accumulation=1, cache=None, workers=0)
    return override(replace(recipe, data=data, task=recipe.task.to_train()), given)


def _replayed(checkpoint: Checkpoint, recipe: Recipe, step: int) -> Replay:
    state, config = checkpoint.state, recipe.data
    way_out = "put it back, or name the folder that has it: folder=FOLDER"
    recipe.task.check_same(state.get("task_files"), checkpoint.where, way_out)
    store = open_store(config.root, write=False)
    spans = [[SnapshotSpan(**span) for span in saved["snapshots"]] for saved in state["data"]]
    weights = [saved["weight"] for saved in state["data"]]
    # A dataset as it was when its first sample of the step was drawn; another snapshot may follow in the step.
    now, following = [1] * len(spans), []
    for number, start, stop, _ in parts_of_step(step - 1, config.batch, weights):
        now[number] = sum(span.consumed <= start for span in spans[number])
        following += [(number, span) for span in spans[number][now[number] :] if span.consumed < stop]
    data = [saved | {"snapshots": saved["snapshots"][:count]} for saved, count in zip(state["data"], now, strict=True)]
    folder = replace(checkpoint.folder, state={**state, "data": data, "held_out": []})
    then = replace(checkpoint, folder=folder)
    opened = open_data(recipe, store, then, then, ALONE, otherwise="")
    check_saved(opened.task, checkpoint)
    witness = _Witness(opened.task)
    training = TrainingData(opened.datasets, witness, config, recipe.model.regions, ALONE, opened.corpus)
    for number, span in following:
        name = config.dataset_names[number]
        pinned = saved_of(checkpoint, name) | {"snapshot": span.snapshot}
        samples, _ = open_samples(store, name, None, pinned, ALONE)
        examples = opened.task.examples(samples, None)
        if len(examples) != span.examples:
            raise ValueError(
                f"{checkpoint.where} was trained on {span.examples} examples of {name}, now there are {len(examples)}: "
                "the files of the task have changed; put them back"
            )
        training.enter(number, samples, examples, span.snapshot, span.consumed)
    ((examples, unreadable),) = training.examples(step - 1)
    return Replay(
        checkpoint,
        recipe,
        opened.task,
        step,
        training.slots(step - 1),
        config.dataset_names,
        spans,
        examples,
        unreadable,
        witness.images,
    )


# --- losses -----------------------------------------------------------------------------------------------------------

Losses = dict[str, tuple[float, int]]  # name -> sum and number of terms


def has_weights(checkpoint: Checkpoint) -> bool:
    folder = checkpoint.folder
    return folder.store.exists(f"{folder.path}/{MODEL}" if folder.path else MODEL)


def load_model(found: Replay) -> TaskModel:
    """The checkpoint's model in eval mode, float32."""
    whole = read_checkpoint(found.checkpoint.folder.store, found.checkpoint.folder.path)
    folder = [] if not found.recipe.task.folder else [f"task.folder={found.recipe.task.folder}"]
    return load_task_model(whole, folder)[0]


def losses_of_rows(
    model: TaskModel, examples: Sequence[Example], progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Losses]:
    """The losses of each example by itself or, where the task compares rows, of each with those that it is compared
    with (Task.apart)."""
    groups, found = model.task.apart(examples), []
    for number, group in enumerate(groups):
        losses = model(collate(group))
        # What has no gradient is monitored, and no loss.
        found.append(
            {name: (float(loss.detach()), n) for name, (loss, n) in losses.items() if loss.requires_grad and n}
        )
        progress(number + 1, len(groups))
    return found


def mean_losses(rows: Sequence[Losses]) -> dict[str, float]:
    """The losses of the whole step: of all terms of its rows."""
    sums: dict[str, tuple[float, int]] = {}
    for row in rows:
        for name, (loss, n) in row.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = before[0] + loss, before[1] + n
    return {name: loss / n for name, (loss, n) in sums.items()}


# --- command line -----------------------------------------------------------------------------------------------------


def write_replay(path: str, step: int, settings: ReplaySettings = ReplaySettings()) -> Path:
    """Writes the page of a step, and returns its file. Errors as of `replay`."""
    out = Path(settings.out) if settings.out else None
    if out and not out.parent.is_dir():
        raise ValueError(f"out={out}: there is no folder {out.parent}")
    found, losses = replay(path, step, settings), None
    if settings.losses and has_weights(found.checkpoint):
        losses = losses_of_rows(load_model(found), found.examples, _progress())
    from vlbert.evaluation.replay_page import page  # here: it imports jinja2

    out = out or Path(f"{found.recipe.run_name}-step-{step:07d}.html")
    out.write_bytes(page(found, losses))
    return out


def _progress() -> Callable[[int, int], None]:
    """Prints at intervals how far the losses are."""
    began = printed = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed > _PROGRESS_SECONDS:
            printed, left = now, (now - began) / done * (of - done)
            print(f"loss of row {done} of {of}  {clock(left)} left", flush=True)

    return progress


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("vlbert replay", __doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="ROOT/runs/RUN, /best or /step-*, or a copied folder")
    parser.add_argument("step", metavar="STEP", type=int, help="number of the step, from 1")
    add_fields(parser, ReplaySettings)
    options = parser.parse_args(arguments)
    try:
        out = write_replay(options.checkpoint, options.step, from_assignments(ReplaySettings, options.fields))
    except (*EXPECTED, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
