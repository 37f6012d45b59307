"""A Batch as tensors with the names that Hugging Face gives them, and back.

B texts, or with several choices a text B * choices rows (N); other shape letters: vlbert/data/batch.py.

    input_ids              int64 [B, T] or [B, choices, T]
    attention_mask         likewise, 0 at padding, which stands behind the text; default: no padding
    token_type_ids         likewise, 0 and 1; default 0
    pixel_values           uint8 [B, 3, H, W]   RGB from 0 to 255, resized; the model normalises it
    visual_embeds          float [B, R, D]      precomputed features in the place of pixels
    visual_attention_mask  [B, R]               0 at padding; a row of zeros has no image; default: no padding
    boxes                  float [B, R, 4]      x1 y1 x2 y2 in pixels of the resized image; the first is the whole image
    image_sizes            int64 [B, 2]         (height, width) of each resized image; default: those of pixel_values

What Hugging Face has no name for has that of Batch, padded to [B, R] or [B, choices, T]: token_region, region_masked,
region_classes, cells and, by image, averaged_over. By default no word names a region, none is masked, and so on.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vlbert.data.batch import Batch, Sizes, groups_of_shape


def to_batch(
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
    """The Batch, without labels; `keys` are numbers, one a text. ValueError where the inputs do not fit together."""
    if input_ids.ndim not in (2, 3):
        raise ValueError(
            f"input_ids is {list(input_ids.shape)}; it must be [texts, tokens] or [texts, choices, tokens]"
        )
    if boxes is not None and boxes.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(f"boxes are {boxes.dtype}, which rounds pixels; move inputs with .to(device), without a dtype")
    count, choices = len(input_ids), 1 if input_ids.ndim == 2 else input_ids.shape[1]
    tokens = input_ids.flatten(0, -2)
    text_mask = _mask(attention_mask, input_ids, "attention_mask").flatten(0, -2)
    region_mask = _region_mask(count, pixel_values, visual_embeds, visual_attention_mask, boxes, input_ids.device)
    regions = region_mask.sum(dim=1).tolist()
    if pixel_values is not None:
        _check_pixels(pixel_values)
        if image_sizes is None:
            image_sizes = torch.tensor([pixel_values.shape[2:]] * count, device=input_ids.device)
        if boxes is None:
            high, wide = (image_sizes - 1).float().unbind(dim=1)
            boxes = torch.stack([torch.zeros_like(wide), torch.zeros_like(wide), wide, high], dim=1)[:, None]
    if region_mask.shape[1] and (boxes is None or image_sizes is None):
        raise ValueError("visual_embeds need boxes, in pixels of the resized image, and image_sizes, (height, width)")
    sizes = {} if image_sizes is None else {i: tuple(image_sizes[i].tolist()[::-1]) for i in range(count) if regions[i]}
    groups = [list(sizes)] if pixel_values is None else groups_of_shape(sizes)
    order = [i for group in groups for i in group]  # image order
    number = {image: p for p, image in enumerate(order)}
    real = region_mask[order].flatten().nonzero()[:, 0]
    rows = [row // choices for row in range(len(tokens))]

    def of_rows(values: Tensor | None, like: Tensor) -> Tensor:
        return like.repeat_interleave(choices, 0) if values is None else values.repeat_interleave(choices, 0)

    def of_real_regions(values: Tensor | None, axes: int) -> Tensor:
        found = tokens.new_zeros((0,) * axes) if values is None else values[order].flatten(0, 1)[real]
        return found.float()

    def texts(values: Tensor | None) -> Tensor:
        return torch.zeros_like(tokens) if values is None else values.flatten(0, -2)

    def numbers(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=tokens.device)

    nothing = torch.zeros_like(region_mask)
    return Batch(
        keys=[str(i) for i in range(count)],
        metadata=[{} for _ in range(count)],
        tokens=tokens,
        text_mask=text_mask,
        segments=texts(token_type_ids),
        token_region=texts(token_region),
        boxes=of_rows(boxes, region_mask[:, :, None].expand(-1, -1, 4)).float(),
        region_mask=of_rows(region_mask, nothing),
        region_masked=of_rows(region_masked, nothing).bool(),
        region_classes=of_rows(region_classes, nothing).long(),
        pixels=() if pixel_values is None else tuple(_group(pixel_values, group, sizes) for group in groups if group),
        image_sizes=numbers([sizes[i] for i in order]).reshape(-1, 2),
        averaged_over=numbers([max(1, regions[i] - 1) for i in order])
        if averaged_over is None
        else averaged_over[order].clamp(min=1),
        covered=boxes.new_zeros(len(order), 0, 4) if order else torch.zeros(0, 0, 4, device=tokens.device),
        covered_mask=torch.zeros(len(order), 0, dtype=torch.bool, device=tokens.device),
        image_of=numbers([number.get(i, -1) for i in rows]),
        image_rows=numbers([i * choices for i in order]),
        real_regions=real,
        features=of_real_regions(visual_embeds, 2),
        cells=of_real_regions(cells, 3),
        counted=numbers(list(range(len(tokens)))),
        labelled={},
        labels={},
        sizes=Sizes(
            tokens=tuple(text_mask.sum(dim=1).tolist()),
            regions=tuple(regions[i] for i in rows),
            labelled={},
            images=tuple(sizes[i] for i in order),
        ),
    )


def from_batch(batch: Batch) -> dict[str, Tensor]:
    """The arguments of `to_batch` that give this batch, without its labels; those that would be the default are left
    out. A batch whose masked pixels are those of further boxes (`covered`) has no such arguments: ValueError."""
    if batch.covered_mask.any():
        raise ValueError("the batch masks pixels of boxes that are no regions: it has no arguments")
    count, choices = len(batch.keys), len(batch) // len(batch.keys)
    first = torch.arange(count) * choices  # row of each text
    found = {"input_ids": batch.tokens, "attention_mask": batch.text_mask.long(), "token_type_ids": batch.segments}
    if batch.token_region.any():
        found["token_region"] = batch.token_region
    if choices > 1:
        found = {name: values.unflatten(0, (count, choices)) for name, values in found.items()}
    if not len(batch.image_rows):
        return found
    found |= {"visual_attention_mask": batch.region_mask[first].long(), "boxes": batch.boxes[first]}
    found |= {"image_sizes": _by_text(batch.image_sizes.flip(1), batch, first)}
    if batch.region_masked.any():
        found["region_masked"] = batch.region_masked[first]
    if batch.region_classes.any():
        found["region_classes"] = batch.region_classes[first]
    if batch.averaged_over.tolist() != [max(1, batch.sizes.regions[row] - 1) for row in batch.image_rows.tolist()]:
        found["averaged_over"] = _by_text(batch.averaged_over, batch, first)
    for name, values in (("visual_embeds", batch.features), ("cells", batch.cells)):
        if len(values):
            images, width = len(batch.image_rows), batch.region_mask.shape[1]
            padded = values.new_zeros(images * width, *values.shape[1:]).index_copy(0, batch.real_regions, values)
            found[name] = _by_text(padded.unflatten(0, (images, width)), batch, first)
    if batch.pixels:
        high, wide = (max(group.shape[axis] for group in batch.pixels) for axis in (2, 3))
        pixels = batch.pixels[0].new_zeros(len(batch.image_rows), 3, high, wide)
        for row, number in zip(pixels, range(len(pixels)), strict=True):
            image = batch.image(number)
            row[:, : image.shape[1], : image.shape[2]] = image
        found["pixel_values"] = _by_text(pixels, batch, first)
    return found


def _by_text(values: Tensor, batch: Batch, first: Tensor) -> Tensor:
    """What belongs to images, in image order, by text; zeros for one without an image."""
    return torch.cat([values, torch.zeros_like(values[:1])])[batch.image_of[first]]


def _mask(mask: Tensor | None, like: Tensor, name: str) -> Tensor:
    """bool; ValueError where a row has padding before its last real element."""
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    mask = mask.bool()
    if (mask[..., 1:] & ~mask[..., :-1]).any():
        raise ValueError(f"{name} has padding before the end of a row: pad on the right")
    return mask


def _region_mask(
    count: int,
    pixel_values: Tensor | None,
    visual_embeds: Tensor | None,
    mask: Tensor | None,
    boxes: Tensor | None,
    device: torch.device,
) -> Tensor:
    """bool [B, R]; R is 0 without images."""
    images = pixel_values if visual_embeds is None else visual_embeds
    given = {"pixel_values": pixel_values, "visual_embeds": visual_embeds, "boxes": boxes}
    if images is None:
        if boxes is not None or mask is not None:
            raise ValueError("boxes and visual_attention_mask need pixel_values or visual_embeds")
        return torch.zeros(count, 0, dtype=torch.bool, device=device)
    if wrong := [f"{name} of {len(one)}" for name, one in given.items() if one is not None and len(one) != count]:
        raise ValueError(f"input_ids has {count} texts, and there are {', '.join(wrong)} images")
    widths = {one.shape[1] for one in (boxes, visual_embeds, mask) if one is not None} or {1}
    if len(widths) > 1:
        raise ValueError(f"boxes, visual_embeds and visual_attention_mask have {sorted(widths)} regions")
    return _mask(mask, torch.zeros(count, widths.pop(), device=device), "visual_attention_mask")


def _check_pixels(pixel_values: Tensor) -> None:
    if pixel_values.dtype != torch.uint8 or pixel_values.ndim != 4 or pixel_values.shape[1] != 3:
        raise ValueError(
            f"pixel_values is {str(pixel_values.dtype).removeprefix('torch.')} {list(pixel_values.shape)}; it must be "
            "uint8 [images, 3, height, width], RGB from 0 to 255: the model normalises it"
        )


def _group(pixels: Tensor, images: list[int], sizes: Mapping[int, tuple[int, int]]) -> Tensor:
    wide, high = (max(sizes[i][axis] for i in images) for axis in (0, 1))
    return pixels[images, :, :high, :wide]
