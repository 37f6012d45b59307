"""Rebuild the batch of any training step, and show it as an HTML page with its masks and labels.

    vlbert replay CHECKPOINT STEP [--field value ...]

CHECKPOINT is ROOT/runs/RUN (its newest checkpoint), ROOT/runs/RUN/best, ROOT/runs/RUN/step-* or a copy of such a
folder. STEP counts from 1, as in the log. The batch does not depend on the number of devices, so a laptop can replay a
run on eight GPUs. See docs/provenance.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from PIL import Image

from detectors.drawing import OTHERS, colour_of, data_uri, draw_boxes_on
from storage.object_store import open_store
from storage.programs import Checkpoint as CheckpointName
from storage.programs import Command, Flat, Positional
from storage.settings import override_values
from training.distributed import ALONE
from training.loading import EXPECTED
from training.log import Unreadable
from vlbert.checkpoint import Checkpoint, check_saved, open_checkpoint
from vlbert.config import Recipe
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.data.loading import TrainingData, parts_of_step
from vlbert.data.order import SnapshotSpan
from vlbert.data.samples import open_samples
from vlbert.evaluation.evaluate import recipe_of
from vlbert.evaluation.results_page import render
from vlbert.evaluation.whence import check_count
from vlbert.resume import examples_of, open_data, saved_of
from vlbert.tasks.base import Task

_MAX_LABELLED = 12  # labelled regions to number on the image, in addition to masked and mentioned ones


@dataclass(frozen=True)
class ReplaySettings:
    root: str | None = None  # folder or s3://bucket/prefix with the shards; None: the checkpoint's, or its recipe's
    text_corpus: str | None = None  # folder of the text corpus; None: the recipe's
    folder: str | None = None  # folder with the task's files; None: the recipe's
    out: str | None = None  # HTML file to write; None: RUN-step-STEP.html in the working directory


@dataclass(frozen=True, eq=False)
class Replay:
    """The rebuilt examples of a training step, with text-only examples last, and the step's unreadable samples."""

    checkpoint: Checkpoint
    recipe: Recipe
    task: Task
    step: int
    examples: list[Example]
    unreadable: list[Unreadable]

    @property
    def batch(self) -> Batch:
        """The whole step as a single batch, as in one process without gradient accumulation."""
        return collate(self.examples, self.unreadable)


def replay(path: str, step: int, settings: ReplaySettings = ReplaySettings(), pixels: bool = False) -> Replay:
    """Rebuild the batch of a training step, counted from 1, of the run that wrote the checkpoint at `path`.

    If `pixels` is true, images are decoded even if the model reads precomputed features. Raises ValueError if the
    checkpoint has not reached the step, or if shards, text corpus or task files are missing or have changed.
    """
    checkpoint = open_checkpoint(path, tensors=False)
    reached = checkpoint.state["step"]
    if not 1 <= step <= reached:
        raise ValueError(
            f"{checkpoint.uri} has reached step {reached}, so step {step} cannot be replayed; give a step from 1 to "
            f"{reached}, or a later checkpoint"
        )
    recipe = _relocate(recipe_of(checkpoint), checkpoint, settings)
    try:
        return _rebuild_step(checkpoint, recipe, step, pixels)
    except EXPECTED as error:
        raise ValueError(f"step {step} of {recipe.run} cannot be replayed: {error}") from error


def _relocate(recipe: Recipe, checkpoint: Checkpoint, settings: ReplaySettings) -> Recipe:
    """Return the recipe with the current paths of its files, and with settings for one process and no validation."""
    root = settings.root or checkpoint.uri.rpartition("/runs/")[0] or recipe.data.root
    paths = {"data.root": root, "data.text_corpus": settings.text_corpus, "task.folder": settings.folder}
    given = {name: path for name, path in paths.items() if path is not None}
    data = replace(recipe.data, held_out=None, gradient_accumulation=1, cache=None, workers=0)
    return override_values(replace(recipe, data=data, task=recipe.task.to_train()), given)


def _rebuild_step(checkpoint: Checkpoint, recipe: Recipe, step: int, pixels: bool) -> Replay:
    state, config, model = checkpoint.state, recipe.data, recipe.model
    hint = "put it back, or name the folder that has it: --folder=FOLDER"
    recipe.task.check_same(state.get("task_files"), checkpoint.uri, hint)
    store = open_store(config.root, write=False)
    spans = [[SnapshotSpan(**span) for span in saved["snapshots"]] for saved in state["data"]]
    weights = [saved["weight"] for saved in state["data"]]
    # Open each dataset in its snapshot at the start of the step. It may switch to later snapshots within the step.
    counts, later = [1] * len(spans), []
    for number, start, stop, _ in parts_of_step(step - 1, config.batch, weights):
        counts[number] = sum(span.consumed <= start for span in spans[number])
        later += [(number, span) for span in spans[number][counts[number] :] if span.consumed < stop]
    used = zip(state["data"], counts, strict=True)
    data = [saved | {"snapshots": saved["snapshots"][:count]} for saved, count in used]
    folder = replace(checkpoint.folder, state={**state, "data": data, "held_out": []})
    at_step = replace(checkpoint, folder=folder)
    opened = open_data(recipe, store, at_step, at_step, ALONE)
    check_saved(opened.task, checkpoint)
    if pixels:
        model = replace(model, regions=replace(model.regions, features="end_to_end"))
    training = TrainingData(opened.datasets, opened.task, config, model, ALONE, opened.corpus)
    for number, span in later:
        name = sorted(config.datasets)[number]
        pinned = saved_of(checkpoint, name) | {"snapshot": span.snapshot}
        samples, _ = open_samples(store, name, None, pinned, ALONE)
        examples = examples_of(recipe, opened.task, samples)
        check_count(examples, span, name, checkpoint.uri)
        training.switch_snapshot(number, samples, examples, span.snapshot, span.consumed)
    ((examples, unreadable),) = training.examples(step - 1)
    return Replay(checkpoint, recipe, opened.task, step, examples, unreadable)


# --- page -------------------------------------------------------------------------------------------------------------


def write_replay(path: str, step: int, settings: ReplaySettings = ReplaySettings()) -> Path:
    """Write the HTML page of a training step, and return the page's path. See `replay` for the arguments and errors."""
    out = Path(settings.out) if settings.out else None
    if out and not out.parent.is_dir():
        raise ValueError(f"--out={out}: there is no folder {out.parent}")
    rebuilt = replay(path, step, settings, pixels=True)
    out = out or Path(f"{rebuilt.recipe.run}-step-{step:07d}.html")
    rows = [_describe_example(example, rebuilt.task.vocabulary.tokens) for example in rebuilt.examples]
    page = render(Path(__file__).parent / "replay.html.j2", {"replay": rebuilt, "rows": rows})
    out.write_text(page, encoding="utf-8")
    return out


def _describe_example(example: Example, tokens: Sequence[str]) -> dict[str, Any]:
    """Return an example as values for the template: key, image, texts and labels."""
    return {
        "key": example.key,
        "image": None if example.image is None else _draw_regions(example, example.image),
        "texts": [_describe_tokens(text, tokens) | {"labels": _list_labels(text, tokens)} for text in example.texts],
        "labels": [] if example.image is None else _list_labels(example.image, tokens),
    }


def _describe_tokens(text: TextInput, names: Sequence[str]) -> dict[str, Any]:
    """Return a text's tokens for the template, each with its word, its region and whether it is labelled."""
    labelled = np.logical_or.reduce([np.zeros(len(text.tokens), bool), *text.label_masks.values()])
    tokens = zip(text.tokens.tolist(), text.token_region.tolist(), labelled.tolist(), strict=True)
    return {"tokens": [{"word": names[token], "region": region, "labelled": has} for token, region, has in tokens]}


def _list_labels(part: TextInput | ImageInput, tokens: Sequence[str]) -> list[str]:
    """Return lines of text with the positions and the labels of labelled tokens or regions."""
    positions = [(name, np.flatnonzero(mask).tolist()) for name, mask in part.label_masks.items()]
    labels = [
        (name, [tokens[value] if name == "words" else _format_label(value) for value in values])
        for name, values in part.labels.items()
    ]
    return [f"{name} at {', '.join(map(str, at))}" for name, at in positions if at] + [
        f"{name}: {', '.join(values)}" for name, values in labels if values
    ]


def _format_label(value: np.ndarray) -> str:
    """Return a label as text. A distribution over classes becomes the most likely class and its probability."""
    return f"{np.argmax(value)} ({np.max(value):.2f})" if np.ndim(value) else f"{value:g}"


def _draw_regions(example: Example, image: ImageInput) -> str:
    """Draw an image's regions, and number those that are masked, mentioned or labelled. Return the src of an <img>."""
    mentioned = {number for text in example.texts for number in text.token_region.tolist()}
    masked = set(np.flatnonzero(image.masked).tolist())
    labelled = [int(number) for mask in image.label_masks.values() for number in np.flatnonzero(mask)]
    numbered = sorted((masked | mentioned | {*labelled[:_MAX_LABELLED]}) - {0})
    thin = [(box, OTHERS, "") for box in image.boxes[1:]]
    thin += [(box, OTHERS, "masked") for box in image.covered] if image.covered is not None else []
    boxes = [(image.boxes[n], colour_of(n), f"{n} masked" if n in masked else str(n)) for n in numbered]
    assert image.pixels is not None  # `write_replay` decodes them
    pixels = Image.fromarray(image.pixels.permute(1, 2, 0).numpy())
    return data_uri(draw_boxes_on(pixels, [*thin, *boxes]))


def replay_step(
    checkpoint: CheckpointName,
    step: Annotated[int, Positional, tyro.conf.arg(metavar="STEP")],
    settings: Annotated[ReplaySettings, Flat] = ReplaySettings(),
) -> None:
    """Rebuild the batch of a training step, and write it as an HTML page.

    Args:
        step: number of the step, counted from 1
    """
    print(f"written: {write_replay(checkpoint, step, settings)}")


main = Command("vlbert replay", replay_step, *EXPECTED)
