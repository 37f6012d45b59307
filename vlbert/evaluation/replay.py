"""Make the batch of any step of a run again, as one HTML page: what was masked, and what was asked.

    vlbert replay CHECKPOINT STEP [--field value ...]

CHECKPOINT is ROOT/runs/RUN (its newest), ROOT/runs/RUN/best or /step-*, or a copy of such a folder. STEP counts from 1,
as the log does. The batch is the same on any number of devices, so a laptop can replay a run of eight GPUs. See
docs/provenance.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image

from detectors.drawing import OTHERS, colour_of, data_uri, draw_boxes_on
from storage.object_store import open_store
from storage.programs import Checkpoint as CheckpointName
from storage.programs import Command, Flat, Positional
from storage.settings import override_values
from training.distributed import World
from training.loading import EXPECTED
from training.log import Unreadable
from training.program import find_recipe
from vlbert.checkpoint import Checkpoint, check_saved, open_checkpoint
from vlbert.config import Recipe
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.data.loading import TrainingData, parts_of_step
from vlbert.data.order import SnapshotSpan
from vlbert.data.samples import open_samples
from vlbert.evaluation.evaluate import recipe_of
from vlbert.evaluation.results_page import render
from vlbert.recipes import RECIPES
from vlbert.resume import open_data, saved_of
from vlbert.tasks.base import Task

ALONE = World(0, 1, torch.device("cpu"))
_MOST_NAMED = 12  # regions with a label that get their number on the image, beside masked and mentioned ones


@dataclass(frozen=True)
class ReplaySettings:
    root: str | None = None  # folder or s3://bucket/prefix with the shards; none: the checkpoint's, or its recipe's
    text_corpus: str | None = None  # folder of the text corpus; none: as the recipe has it
    folder: str | None = None  # folder with the task's files; none: as the recipe has it
    out: str | None = None  # HTML file to write; none: RUN-step-STEP.html in the working directory
    recipe: str | None = None  # MODULE:FUNCTION, the recipe of a task of your own


@dataclass(frozen=True, eq=False)
class Replay:
    """The examples of a step, those of text alone last, and why others are missing. step counts from 1."""

    checkpoint: Checkpoint
    recipe: Recipe
    task: Task
    step: int
    examples: list[Example]
    unreadable: list[Unreadable]

    @property
    def batch(self) -> Batch:
        """The batch that one process with one part of the step would have."""
        return collate(self.examples, self.unreadable)


def replay(path: str, step: int, settings: ReplaySettings = ReplaySettings(), pixels: bool = False) -> Replay:
    """Make the batch of a step, counted from 1, of the run that a checkpoint belongs to.

    pixels: decode images also where the model reads precomputed features.

    ValueError where the checkpoint has not reached the step, and where the shards, the text corpus or the task's files
    are gone or have changed.
    """
    if settings.recipe:
        find_recipe(settings.recipe, RECIPES)()  # its module tells of the task
    checkpoint = open_checkpoint(path, tensors=False)
    reached = checkpoint.state["step"]
    if not 1 <= step <= reached:
        raise ValueError(
            f"{checkpoint.uri} has reached step {reached}, so it cannot tell the batch of step {step}; name a step "
            f"from 1 to {reached}, or a later checkpoint"
        )
    recipe = _located(recipe_of(checkpoint), checkpoint, settings)
    try:
        return _replayed(checkpoint, recipe, step, pixels)
    except EXPECTED as error:
        raise ValueError(f"step {step} of {recipe.run} cannot be replayed: {error}") from error


def _located(recipe: Recipe, checkpoint: Checkpoint, settings: ReplaySettings) -> Recipe:
    """Return the recipe for one process, with its files where they are now; ValueError where there is no root."""
    root = settings.root or checkpoint.uri.rpartition("/runs/")[0] or recipe.data.root
    here = {"data.root": root, "data.text_corpus": settings.text_corpus, "task.folder": settings.folder}
    given = {name: value for name, value in here.items() if value is not None}
    data = replace(recipe.data, held_out=None, gradient_accumulation=1, cache=None, workers=0)
    return override_values(replace(recipe, data=data, task=recipe.task.to_train()), given)


def _replayed(checkpoint: Checkpoint, recipe: Recipe, step: int, pixels: bool) -> Replay:
    state, config, regions = checkpoint.state, recipe.data, recipe.model.regions
    hint = "put it back, or name the folder that has it: --folder=FOLDER"
    recipe.task.check_same(state.get("task_files"), checkpoint.uri, hint)
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
    opened = open_data(recipe, store, then, then, ALONE)
    check_saved(opened.task, checkpoint)
    if pixels:
        regions = replace(regions, features="end_to_end")
    training = TrainingData(opened.datasets, opened.task, config, regions, ALONE, opened.corpus)
    for number, span in following:
        name = config.dataset_names[number]
        pinned = saved_of(checkpoint, name) | {"snapshot": span.snapshot}
        samples, _ = open_samples(store, name, None, pinned, ALONE)
        examples = opened.task.examples(samples, None)
        if len(examples) != span.examples:
            raise ValueError(
                f"{checkpoint.uri} was trained on {span.examples} examples of {name}, now there are {len(examples)}: "
                "the files of the task have changed; put them back"
            )
        training.switch_snapshot(number, samples, examples, span.snapshot, span.consumed)
    ((examples, unreadable),) = training.examples(step - 1)
    return Replay(checkpoint, recipe, opened.task, step, examples, unreadable)


# --- page -------------------------------------------------------------------------------------------------------------


def write_replay(path: str, step: int, settings: ReplaySettings = ReplaySettings()) -> Path:
    """Write the page of a step, and return its file. Errors as of `replay`."""
    out = Path(settings.out) if settings.out else None
    if out and not out.parent.is_dir():
        raise ValueError(f"--out={out}: there is no folder {out.parent}")
    found = replay(path, step, settings, pixels=True)
    out = out or Path(f"{found.recipe.run}-step-{step:07d}.html")
    rows = [_row(example, found.task.vocabulary.tokens) for example in found.examples]
    out.write_text(render(Path(__file__).parent / "replay.html.j2", {"found": found, "rows": rows}), encoding="utf-8")
    return out


def _row(example: Example, tokens: Sequence[str]) -> dict[str, Any]:
    """What the page shows of an example."""
    return {
        "key": example.key,
        "image": None if example.image is None else _drawn(example, example.image),
        "texts": [_words(text, tokens) | {"asked": _asked(text, tokens)} for text in example.texts],
        "asked": [] if example.image is None else _asked(example.image, tokens),
    }


def _words(text: TextInput, names: Sequence[str]) -> dict[str, Any]:
    """The tokens of a text, each with the region that it mentions, and whether it has a label."""
    labelled = np.logical_or.reduce([np.zeros(len(text.tokens), bool), *text.label_masks.values()])
    tokens = zip(text.tokens.tolist(), text.token_region.tolist(), labelled.tolist(), strict=True)
    return {"tokens": [{"word": names[token], "region": region, "asked": asked} for token, region, asked in tokens]}


def _asked(part: TextInput | ImageInput, tokens: Sequence[str]) -> list[str]:
    """Which tokens or regions have a label, and all labels: words as such, others as numbers."""
    places = [(name, np.flatnonzero(mask).tolist()) for name, mask in part.label_masks.items()]
    labels = [
        (name, [tokens[value] if name == "words" else _label(value) for value in values])
        for name, values in part.labels.items()
    ]
    return [f"{name} at {', '.join(map(str, at))}" for name, at in places if at] + [
        f"{name}: {', '.join(values)}" for name, values in labels if values
    ]


def _label(value: np.ndarray) -> str:
    """The number of a label; of a distribution over classes the likeliest, with its share."""
    return f"{np.argmax(value)} ({np.max(value):.2f})" if np.ndim(value) else f"{value:g}"


def _drawn(example: Example, image: ImageInput) -> str:
    """The image as the src of an img: all regions with thin lines, and those that are masked, mentioned or asked with
    their numbers."""
    mentioned = {number for text in example.texts for number in text.token_region.tolist()}
    masked = set(np.flatnonzero(image.masked).tolist())
    labelled = [int(number) for mask in image.label_masks.values() for number in np.flatnonzero(mask)]
    named = sorted((masked | mentioned | {*labelled[:_MOST_NAMED]}) - {0})
    thin = [(box, OTHERS, "") for box in image.boxes[1:]]
    thin += [(box, OTHERS, "masked") for box in image.covered] if image.covered is not None else []
    boxes = [(image.boxes[n], colour_of(n), f"{n} masked" if n in masked else str(n)) for n in named]
    pixels = Image.fromarray(image.pixels.permute(1, 2, 0).numpy())
    return data_uri(draw_boxes_on(pixels, [*thin, *boxes]))


def replay_step(
    checkpoint: CheckpointName,
    step: Annotated[int, Positional, tyro.conf.arg(metavar="STEP")],
    settings: Annotated[ReplaySettings, Flat] = ReplaySettings(),
) -> None:
    """Make the batch of a step again, as a page.

    Args:
        step: number of the step, from 1
    """
    print(f"written: {write_replay(checkpoint, step, settings)}")


main = Command("vlbert replay", replay_step, *EXPECTED)
