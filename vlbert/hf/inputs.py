"""Convert model inputs with Hugging Face's names to a Batch, and back.

B is the number of texts. With several choices per text, a Batch has B * choices rows (N). Other shape letters are in
vlbert/data/batch.py.

    input_ids              int64 [B, T] or [B, choices, T]
    attention_mask         same shape; 0 at padding, which follows the text; default: no padding
    token_type_ids         same shape; 0 and 1; default: 0
    pixel_values           uint8 [B, 3, H, W]   RGB from 0 to 255, resized; the model normalises it
    visual_embeds          float [B, R, D]      precomputed features, instead of pixels
    visual_attention_mask  [B, R]               0 at padding; a row of zeros has no image; default: no padding
    boxes                  float [B, R, 4]      x1 y1 x2 y2 in pixels of the resized image; the first is the whole image
    image_sizes            int64 [B, 2]         (height, width) of each resized image; default: those of pixel_values

The other inputs are named as in Batch: token_region (same shape as input_ids), region_masked and region_classes [B, R],
cells [B, R, S, S] and averaged_over [B]. By default, no word mentions a region and no region is masked.
"""

import math

import numpy as np
import torch
from torch import Tensor

from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.model.embedding import features_by_row


def to_batch(  # noqa: PLR0913  the inputs of all models
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    pixel_values: Tensor | None = None,
    visual_embeds: Tensor | None = None,
    visual_attention_mask: Tensor | None = None,
    boxes: Tensor | None = None,
    image_sizes: Tensor | None = None,
    token_region: Tensor | None = None,
    region_masked: Tensor | None = None,
    region_classes: Tensor | None = None,
    averaged_over: Tensor | None = None,
    cells: Tensor | None = None,
) -> Batch:
    """Make a Batch without labels from model inputs. Raises ValueError if the inputs do not fit together.

    The key of each example is the index of its text, as a string. Pixels stay on their device. All other tensors of the
    batch are on the CPU.
    """
    if input_ids.ndim not in (2, 3):
        raise ValueError(
            f"input_ids is {list(input_ids.shape)}; it must be [texts, tokens] or [texts, choices, tokens]"
        )
    image_inputs = {"pixel_values": pixel_values, "visual_embeds": visual_embeds, "boxes": boxes}
    image_inputs |= {"visual_attention_mask": visual_attention_mask, "image_sizes": image_sizes}
    _check_images(len(input_ids), {name: values for name, values in image_inputs.items() if values is not None})
    by_text = input_ids.reshape(len(input_ids), -1, input_ids.shape[-1])  # (B, choices, T)
    lengths = _count_real(attention_mask, by_text, "attention_mask")
    tokens, segments, token_regions = (
        (torch.zeros_like(input_ids) if values is None else values).reshape(by_text.shape).cpu().numpy()
        for values in (input_ids, token_type_ids, token_region)
    )
    if pixel_values is not None:
        if image_sizes is None:
            image_sizes = torch.tensor([pixel_values.shape[2:]] * len(input_ids))
        if boxes is None:
            high, wide = (image_sizes - 1).float().unbind(dim=1)
            boxes = torch.stack([torch.zeros_like(wide), torch.zeros_like(wide), wide, high], dim=1)[:, None]
    like = torch.zeros(len(input_ids), 0 if boxes is None else boxes.shape[1])
    regions = _count_real(visual_attention_mask, like, "visual_attention_mask")
    fields = {
        "boxes": (boxes, torch.float32),
        "masked": (like if region_masked is None else region_masked, torch.bool),
        "features": (visual_embeds, torch.float32),
        "cells": (cells, torch.float32),
        "classes": (region_classes, torch.int64),
    }
    given = {name: (values, dtype) for name, (values, dtype) in fields.items() if values is not None}
    arrays = {name: values.detach().to("cpu", dtype).numpy() for name, (values, dtype) in given.items()}
    examples = []
    for i, ends in enumerate(lengths.tolist()):
        rows, image = zip(tokens[i], segments[i], token_regions[i], ends, strict=True), None
        texts = [TextInput(ids[:end], segment[:end], region[:end]) for ids, segment, region, end in rows]
        if (count := int(regions[i])) and image_sizes is not None:
            height, width = image_sizes[i].tolist()
            image = ImageInput(
                size=(width, height),
                pixels=None if pixel_values is None else pixel_values[i, :, :height, :width],
                averaged_over=None if averaged_over is None else int(averaged_over[i]),
                **{name: array[i, :count] for name, array in arrays.items()},
            )
        examples.append(Example(str(i), texts[0], image, more=tuple(texts[1:])))
    return collate(examples, least=(by_text.shape[2], like.shape[1]))


def from_batch(batch: Batch) -> dict[str, Tensor]:
    """Return the arguments from which `to_batch` makes this batch. Labels and default values are left out.

    Raises ValueError if the batch has `covered` boxes, because `to_batch` has no argument for them.
    """
    if batch.covered_mask.any():
        raise ValueError("the batch masks pixels of boxes that are not regions, for which there is no argument")
    count, choices = len(batch.keys), len(batch) // len(batch.keys)
    first = torch.arange(count) * choices  # first row of each text
    inputs = {"input_ids": batch.tokens, "attention_mask": batch.text_mask.long(), "token_type_ids": batch.segments}
    if batch.token_region.any():
        inputs["token_region"] = batch.token_region
    if choices > 1:
        inputs = {name: values.unflatten(0, (count, choices)) for name, values in inputs.items()}
    if not len(batch.image_rows):
        return inputs
    inputs |= {"visual_attention_mask": batch.region_mask[first].long(), "boxes": batch.boxes[first]}
    inputs |= {"image_sizes": _by_text(batch.image_sizes.flip(1), batch, first)}
    if batch.region_masked.any():
        inputs["region_masked"] = batch.region_masked[first]
    if batch.region_classes.any():
        inputs["region_classes"] = batch.region_classes[first]
    if batch.averaged_over.tolist() != [max(1, batch.sizes.regions[row] - 1) for row in batch.image_rows.tolist()]:
        inputs["averaged_over"] = _by_text(batch.averaged_over, batch, first)
    for name, values in (("visual_embeds", batch.features), ("cells", batch.cells)):
        if len(values):
            inputs[name] = features_by_row(values, batch)[first]
    if batch.pixels:
        high, wide = (max(group.shape[axis] for group in batch.pixels) for axis in (2, 3))
        pixels = batch.pixels[0].new_zeros(len(batch.image_rows), 3, high, wide)
        for number, row in enumerate(pixels):
            image = batch.image(number)
            row[:, : image.shape[1], : image.shape[2]] = image
        inputs["pixel_values"] = _by_text(pixels, batch, first)
    return inputs


def _by_text(values: Tensor, batch: Batch, first: Tensor) -> Tensor:
    """Rearrange per-image values into one row per text, with zeros for texts without an image.

    `first[i]` is the batch row of text i or, if the text has several choices, of its first choice.
    """
    return torch.cat([values, torch.zeros_like(values[:1])])[batch.image_of[first]]


def in_fractions(boxes: Tensor | np.ndarray, side: int) -> bool:
    """Return whether no box of an image, whose longer side has `side` pixels, reaches beyond its first two pixels."""
    return side > 4 and math.prod(boxes.shape) > 0 and 0 < float(boxes.max()) < 2


def _count_real(mask: Tensor | None, like: Tensor, name: str) -> Tensor:
    """Count the real elements in each row of `mask`. If `mask` is None, all elements of `like` are real.

    Raises ValueError if a real element follows padding.
    """
    mask = torch.ones_like(like, dtype=torch.bool) if mask is None else mask.reshape(like.shape).bool()
    if (mask[..., 1:] & ~mask[..., :-1]).any():
        raise ValueError(f"{name} has padding before the end of a row: pad on the right")
    return mask.sum(dim=-1)


def _check_images(count: int, given: dict[str, Tensor]) -> None:
    """Raise ValueError if the image inputs (`given`, by name) do not fit together, or are not for `count` texts."""
    if not {"pixel_values", "visual_embeds"} & given.keys():
        if given:
            raise ValueError(f"{' and '.join(given)} need pixel_values or visual_embeds")
        return
    if wrong := [f"{name} has {len(values)}" for name, values in given.items() if len(values) != count]:
        raise ValueError(f"input_ids has {count} texts, but {', '.join(wrong)}; give one image per text")
    pixels = given.get("pixel_values")
    if pixels is None and not {"boxes", "image_sizes"} <= given.keys():
        raise ValueError("visual_embeds need boxes, in pixels of the resized image, and image_sizes, (height, width)")
    if pixels is not None and (pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3):
        raise ValueError(
            f"pixel_values is {str(pixels.dtype).removeprefix('torch.')} {list(pixels.shape)}; it must be uint8 "
            "[images, 3, height, width], RGB from 0 to 255: the model normalises it"
        )
    if "boxes" in given and given["boxes"].dtype in (torch.bfloat16, torch.float16):
        raise ValueError(f"boxes are {given['boxes'].dtype}, which rounds pixels; move inputs without a dtype")
    side = max(pixels.shape[2:]) if pixels is not None else int(given["image_sizes"].max())
    if "boxes" in given and in_fractions(given["boxes"], side):
        raise ValueError("boxes are fractions of the image; they must be in pixels of the resized image")
    widths = {given[name].shape[1] for name in ("boxes", "visual_embeds", "visual_attention_mask") if name in given}
    if len(widths) > 1:
        raise ValueError(f"boxes, visual_embeds and visual_attention_mask have {sorted(widths)} regions")
