"""The Fast R-CNN that computes one appearance feature per region (paper 3.2). It is trained end to end (paper 3.3)."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detectors.resnet import Res5, ResNetC4, freeze_module
from detectors.roi_align import roi_align
from training.precision import compute_dtype
from vlbert.config import RegionConfig
from vlbert.data.batch import Batch
from vlbert.data.boxes import masked_pixels

STRIDE = 16  # pixels of the image per cell of the C4 map


class FastRCNN(nn.Module):
    """A network that computes an appearance feature for each real region (not padding) of a batch's images."""

    pixel_mean: Tensor

    def __init__(self, config: RegionConfig):
        super().__init__()
        self.config = config
        self.backbone = ResNetC4(config.resnet)
        self.res5 = Res5(config.resnet)
        self.backbone.freeze(min(config.frozen_stages, 4))
        if config.frozen_stages == 5:
            freeze_module(self.res5)
        # Channels last takes 15 % fewer CPU-seconds per step in the demo than channels first, and GPUs prefer it.
        self.to(memory_format=torch.channels_last)
        # The mean is in the order B, G, R (Caffe's), which the network's first convolution expects.
        self.register_buffer("pixel_mean", torch.tensor(config.pixel_mean).view(1, 3, 1, 1), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return the appearance features of all real regions of the batch's images, in image order: [K, D]."""
        return self.appearance(self.network_input(batch), batch)

    def appearance(self, pixels: Sequence[Tensor], batch: Batch) -> Tensor:
        """Return the appearance features [K, D] of `forward`, given `pixels`, the result of `network_input`."""
        maps = [self.backbone(group) for group in pixels]  # (p, C4, H/16, W/16) each
        images, _ = batch.image_and_number()  # (K,)
        boxes = batch.of_real_regions(batch.boxes)  # (K, 4)
        rois = torch.cat([images[:, None].to(boxes.dtype), boxes], dim=1)  # (K, 5)
        # Cast at once to the dtype of res5, so that no larger copy is kept meanwhile: 5 GB for 128 images.
        cells = roi_align(maps, rois, self.config.roi_size, 1 / STRIDE).to(compute_dtype(self.pixel_mean))
        cells = self.res5(cells)  # (K, D, S, S)
        if len(batch.cells):
            cells = cells * batch.cells[:, None]  # cells outside the object count as 0 in the mean
        return cells.mean(dim=(2, 3))

    def network_input(self, batch: Batch) -> list[Tensor]:
        """Return the normalised pixels of all images, as float tensors [p, 3, H, W] in the channel order B, G, R.

        There is one tensor for each group of p images that are padded to the same size (see RegionConfig.padding), or a
        single tensor if BatchNorm is trained. Padding is zero. Masked regions are blanked if RegionConfig.masking is
        "pixels". Raises ValueError if an image has no pixels, or if it is larger than padding="fixed" allows.
        """
        with_pixels, images = sum(len(group) for group in batch.pixels), len(batch.image_sizes)
        if with_pixels != images:
            raise ValueError(
                f"the batch with sample {batch.keys[0]} has pixels of {with_pixels} of its {images} images, but the "
                "model needs pixels; read the data with --model.regions.features=end_to_end"
            )
        padding, groups = self.config.padding, batch.pixels
        if padding == "fixed":
            groups = self._pad_fixed(batch)
        # BatchNorm in training needs statistics over all images of a batch, hence one tensor with more padding.
        if padding == "batch" or self.config.resnet.norm == "batch":
            height, width = (max(group.shape[axis] for group in groups) for axis in (2, 3))
            groups = [torch.cat([_pad(group, height, width) for group in groups])]
        numbers = torch.arange(len(batch.image_sizes), device=batch.image_sizes.device)
        indices = numbers.split([len(group) for group in groups])
        return [self._normalise(*group, batch) for group in zip(groups, indices, strict=True)]

    def _pad_fixed(self, batch: Batch) -> list[Tensor]:
        """Pad images to short_side and long_side. Consecutive images with the same orientation share a tensor."""
        short, long = self.config.short_side, self.config.long_side
        sizes, groups, first = batch.sizes.images, [], 0
        for group in batch.pixels:
            own, first = sizes[first : first + len(group)], first + len(group)
            begin = 0
            for upright, run in itertools.groupby(height > width for width, height in own):
                end = begin + len(list(run))
                height, width = (long, short) if upright else (short, long)
                large = [size for size in own[begin:end] if size[0] > width or size[1] > height]
                if large:
                    raise ValueError(
                        f"an image of the batch with sample {batch.keys[0]} has {large[0][0]} x {large[0][1]} pixels, "
                        f"but model.regions.padding=fixed takes at most {width} x {height}; resize it to short_side "
                        "and long_side"
                    )
                groups.append(_pad(group[begin:end, :, :height, :width], height, width))
                begin = end
        return groups

    def _normalise(self, pixels: Tensor, images: Tensor, batch: Batch) -> Tensor:
        """Normalise uint8 pixels, and overwrite masked regions and padding. `images` [p] has their batch indices."""
        height, width = pixels.shape[2:]
        # Changing the layout is cheaper while a pixel is a byte.
        pixels = pixels.flip(1).contiguous(memory_format=torch.channels_last).float() - self.pixel_mean
        if self.config.pixel_std != 1:
            pixels = pixels / self.config.pixel_std
        if self.config.masking == "pixels":
            rows = batch.image_rows[images]
            boxes = torch.cat([batch.boxes[rows], batch.covered[images]], dim=1)
            masked = torch.cat([batch.region_masked[rows], batch.covered_mask[images]], dim=1)
            hole = masked_pixels(boxes, masked, height, width)[:, None]
            blank = 0.0 if self.config.masked_pixels == "mean" else -self.pixel_mean / self.config.pixel_std
            pixels = torch.where(hole, blank, pixels)
        # Padding is zero after the mean is subtracted, like the padding inside the network. Cells near the border still
        # depend on where an image ends in a larger tensor, except in batches of one size and with padding=fixed.
        sizes = batch.image_sizes[images]  # (p, 2)
        inside_x = torch.arange(width, device=pixels.device) < sizes[:, :1]  # (p, W)
        inside_y = torch.arange(height, device=pixels.device) < sizes[:, 1:]  # (p, H)
        return pixels * (inside_y[:, None, :, None] & inside_x[:, None, None, :])


def _pad(pixels: Tensor, height: int, width: int) -> Tensor:
    """Add zeros at the right and the bottom: [p, 3, h, w] -> [p, 3, height, width]."""
    return F.pad(pixels, (0, width - pixels.shape[3], 0, height - pixels.shape[2]))
