"""The page of a replayed step: images with their regions, what was masked, what was asked, and what each row costs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from detectors.drawing import IMAGE_SIDE, OTHERS, colour_of, data_uri, draw_boxes_on
from storage.redact import shown_url
from training.log import read_metrics, read_skipped
from vlbert.data.batch import Example, ImageInput, TextInput
from vlbert.data.boxes import masked_pixels
from vlbert.data.images import prepare_image
from vlbert.evaluation.replay import Losses, Replay, mean_losses
from vlbert.evaluation.results import name_of
from vlbert.evaluation.results_page import render
from vlbert.predict.prediction import class_name
from vlbert.tasks.base import LabelInWords

_MOST_NAMED = 12  # regions with a label that get their number on the image, beside masked and mentioned ones
_HATCH = 6  # pixels between the lines over a masked region


def page(found: Replay, losses: Sequence[Losses] | None) -> bytes:
    """The HTML, with all images in it. losses: of each example; None: not computed."""
    rows = [_row(found, number, example) for number, example in enumerate(found.examples)]
    for number, row in enumerate(rows):
        row["losses"] = None if losses is None else losses[number] if number < len(losses) else {}
    values = {
        "found": found,
        "run": found.recipe.run_name,
        "checkpoint": name_of(found.checkpoint.where),
        "order": _order(found),
        "pairs": [row for row in rows if row["image"] is not None],
        "texts": [row for row in rows if row["image"] is None],
        "masking": _masking(found),
        "means": None if losses is None else mean_losses(losses),
        "logged": _logged(found),
    }
    return render(Path(__file__).parent / "replay.html.j2", values).encode()


def _row(found: Replay, number: int, example: Example) -> dict[str, Any]:
    """What the page says of an example; `losses` is added to it."""
    labels = found.task.labels_in_words(example, lambda number: class_name(number, _classes(found)))
    image, sample = example.image, None
    if image is not None:
        sample, prepared = found.source_of(image)
    return {
        "number": number + 1,
        "key": example.key,
        "counted": example.counted,
        "image": None if image is None else _draw(found, example, labels),
        "image_key": None if sample is None else sample.key,
        "url": None if sample is None else shown_url(sample.url),
        "mirrored": sample is not None and prepared.flipped,
        "masked": [] if image is None else np.flatnonzero(image.masked).tolist(),
        "covered": 0 if image is None or image.covered is None else len(image.covered),
        "regions": 0 if image is None else len(image.boxes) - 1,
        "texts": [_text(found, text, n, labels) for n, text in enumerate(example.texts)],
        "of_image": [label for label in labels if label.text is None],
    }


def _text(found: Replay, text: TextInput, number: int, labels: Sequence[LabelInWords]) -> dict[str, Any]:
    """A text's tokens as the model sees them, each with its label and the region that it stands for."""
    names, own = found.task.vocabulary.tokens, [label for label in labels if label.text == number]
    of_token = {label.index: label.words for label in own if label.index is not None}
    tokens = [
        {
            "token": names[token],
            "label": of_token.get(position),
            "masked": token == found.task.vocabulary.mask,
            "region": region,
            "special": token in (found.task.vocabulary.cls, found.task.vocabulary.sep),
        }
        for position, (token, region) in enumerate(zip(text.tokens.tolist(), text.token_region.tolist(), strict=True))
    ]
    return {"tokens": tokens, "labels": [label.words for label in own if label.index is None]}


def _classes(found: Replay) -> Sequence[str] | None:
    """The names of the detector's classes, where the checkpoint has them."""
    return ((found.checkpoint.config.get("detector") or {}).get("metadata") or {}).get("classes")


def _draw(found: Replay, example: Example, labels: Sequence[LabelInWords]) -> str:
    """The image with its regions, as the src of an img; "" where it does not decode, which precomputed features do not
    need."""
    try:
        seen = seen_by_the_network(found, example.image)
    except ValueError:
        return ""
    return data_uri(draw_boxes_on(Image.fromarray(seen), *_boxes(example, labels)))


def seen_by_the_network(found: Replay, image: ImageInput) -> np.ndarray:
    """uint8 [h, w, 3], RGB: the pixels of an example's image, with lines over the masked ones. ValueError where
    precomputed features came with an image that does not decode."""
    config, pixels = found.recipe.model.regions, image.pixels
    if pixels is None:
        sample, prepared = found.source_of(image)
        pixels = prepare_image(sample, replace(config, features="end_to_end"), prepared.flipped).pixels
    seen = pixels.permute(1, 2, 0).numpy().copy()
    hole = _masked(image, *seen.shape[:2])
    if not config.masks_features:
        mean = np.array(config.pixel_mean[::-1]) if config.masked_pixels == "mean" else np.zeros(3)  # it is B, G, R
        seen[hole] = mean.clip(0, 255).astype(np.uint8)
    diagonal = np.add.outer(np.arange(seen.shape[0]), np.arange(seen.shape[1])) % _HATCH == 0
    seen[hole & diagonal] = 255
    return seen


def _masked(image: ImageInput, height: int, width: int) -> np.ndarray:
    """bool [height, width]: the pixels of the masked regions, of those beyond the row's, too."""
    covered = np.zeros((0, 4), np.float32) if image.covered is None else image.covered
    boxes = torch.from_numpy(np.concatenate([image.boxes, covered]))[None]
    masked = torch.from_numpy(np.concatenate([image.masked, np.ones(len(covered), bool)]))[None]
    return masked_pixels(boxes, masked, height, width)[0].numpy()


def _boxes(example: Example, labels: Sequence[LabelInWords]) -> tuple[list[tuple], int, int]:
    """What draw_boxes_on draws: all regions with thin lines, then with their numbers those that are masked or that a
    text mentions, and some of those with a label."""
    image, mentioned = example.image, {n for text in example.texts for n in text.token_region.tolist() if n}
    labelled = [label.index for label in labels if label.text is None and label.index]
    masked = np.flatnonzero(image.masked).tolist()
    named = sorted({*masked, *mentioned, *labelled[:_MOST_NAMED]})
    thin = [(image.boxes[n], OTHERS, "") for n in range(1, len(image.boxes)) if n not in named]
    drawn = [(image.boxes[n], colour_of(n), str(n)) for n in named]
    return [*thin, *drawn], IMAGE_SIDE, len(thin)


def _order(found: Replay) -> list[str]:
    """Where the pairs come from: dataset, snapshot and epoch, and how many."""
    counts: dict[tuple[int, int, int], int] = {}
    for number, span, epoch, _ in found.slots:
        counts[number, span, epoch] = counts.get((number, span, epoch), 0) + 1
    return [
        f"{count} of {found.datasets[number]}, epoch {epoch} (snapshot {found.spans[number][span].snapshot})"
        for (number, span, epoch), count in counts.items()
    ]


def _masking(found: Replay) -> str:
    """What a masked region loses, in words."""
    regions = found.recipe.model.regions
    if regions.masks_features:
        return "its vector is replaced, and regions that overlap it still show its pixels"
    colour = "the mean colour" if regions.masked_pixels == "mean" else "black"
    return f"its pixels are {colour} before the network sees them"


def _logged(found: Replay) -> dict[str, Any] | None:
    """What the run's log says of the step: the means of the line that it is in, and why it was left out, if it was."""
    folder = found.checkpoint.folder
    if not folder.path.startswith("runs/"):
        return None
    run, before = folder.path.removeprefix("runs/").rpartition("/")[0], 0
    skipped = next((line["why"] for line in read_skipped(folder.store, run) if line["step"] == found.step), None)
    for line in read_metrics(folder.store, run, "training"):
        if line["step"] >= found.step:
            losses = {name.removeprefix("loss_"): value for name, value in line.items() if name.startswith("loss_")}
            return {"first": before + 1, "last": line["step"], "losses": losses, "skipped": skipped}
        before = line["step"]
    return {"first": None, "last": None, "losses": {}, "skipped": skipped}
