"""Fast R-CNN: from pixels and boxes to one feature vector a region, trained end to end (paper 3.2 and 3.3)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detectors.resnet import Res5, ResNetC4, computed_in
from detectors.roi_align import roi_align
from vlbert.batch import Batch
from vlbert.boxes import hidden_pixels
from vlbert.config import RegionConfig

STRIDE = 16  # pixels of the picture per cell of the C4 map


class FastRCNN(nn.Module):
    """The appearance of every real region of the pictures of a batch; padded regions are never computed."""

    def __init__(self, config: RegionConfig):
        super().__init__()
        self.config = config
        self.backbone = ResNetC4(config.resnet)
        self.res5 = Res5(config.resnet)
        self.backbone.freeze(min(config.frozen_stages, 4))
        self.res5.freeze(int(config.frozen_stages == 5))
        # Channels last: 15 % fewer CPU-seconds a step in the demo than channels first, and what GPUs prefer.
        self.to(memory_format=torch.channels_last)
        # The mean is of B, G, R; the network's first convolution expects that order (Caffe's).
        self.register_buffer("pixel_mean", torch.tensor(config.pixel_mean).view(1, 3, 1, 1), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """The K real regions of the batch's pictures, in picture order: [K, D]."""
        return self.appearance(self.network_input(batch), batch)

    def appearance(self, pixels: Sequence[Tensor], batch: Batch) -> Tensor:
        """The same from pixels that are normalised already: float [p, 3, H, W] of each group -> [K, D]."""
        maps = [self.backbone(group) for group in pixels]  # (p, C4, H/16, W/16) each
        mask = batch.region_mask[batch.picture_rows]  # (P, R)
        pictures, _ = mask.nonzero(as_tuple=True)  # (K,)
        boxes = batch.boxes[batch.picture_rows][mask]  # (K, 4)
        rois = torch.cat([pictures[:, None].to(boxes.dtype), boxes], dim=1)  # (K, 5)
        # At once in the type that res5 computes in: nothing larger is kept while it does, 5 GB for 128 pictures.
        cells = roi_align(maps, rois, self.config.roi_size, 1 / STRIDE).to(computed_in(self.pixel_mean))
        cells = self.res5(cells)  # (K, D, S, S)
        if len(batch.cells):
            cells = cells * batch.cells[:, None]  # what is not the object counts as zero, in the mean too
        return cells.mean(dim=(2, 3))

    def network_input(self, batch: Batch) -> list[Tensor]:
        """Pixels as the network takes them, one tensor a group of pictures, with live norms one of all: float
        [p, 3, H, W], BGR, mean off, hidden regions and padding blank. ValueError where the batch has no pixels."""
        shown, pictures = sum(len(group) for group in batch.pixels), len(batch.picture_sizes)
        if shown != pictures:
            raise ValueError(
                f"the batch with sample {batch.keys[0]} has pixels of {shown} of its {pictures} pictures, and the "
                "model sees pixels; read it with model.regions.features=end_to_end"
            )
        numbers = torch.arange(len(batch.picture_sizes), device=batch.picture_sizes.device)
        own = numbers.split([len(group) for group in batch.pixels])
        groups = [self._normalised(*group, batch) for group in zip(batch.pixels, own, strict=True)]
        if self.config.resnet.norm != "batch":
            return groups
        # Live norms take statistics of all pictures of a batch: one tensor, with more padding.
        height, width = (max(group.shape[axis] for group in groups) for axis in (2, 3))
        alike = [F.pad(group, (0, width - group.shape[3], 0, height - group.shape[2])) for group in groups]
        return [torch.cat(alike).contiguous(memory_format=torch.channels_last)]

    def _normalised(self, pixels: Tensor, numbers: Tensor, batch: Batch) -> Tensor:
        """One group of pictures, given with their numbers [p]."""
        pixels = (pixels.flip(1).float() - self.pixel_mean) / self.config.pixel_std
        height, width = pixels.shape[2:]
        if self.config.hide == "pixels":
            rows = batch.picture_rows[numbers]
            boxes = torch.cat([batch.boxes[rows], batch.covered[numbers]], dim=1)
            hidden = torch.cat([batch.region_hidden[rows], batch.covered_mask[numbers]], dim=1)
            hole = hidden_pixels(boxes, hidden, height, width)[:, None]
            blank = 0.0 if self.config.hidden_pixels == "mean" else -self.pixel_mean / self.config.pixel_std
            pixels = torch.where(hole, blank, pixels)
        # After the mean is off, padding is zero again, as the network's own padding is. Cells near the border still see
        # where a picture ends in a batch of larger ones, as in the authors' code; batches of one size avoid that.
        sizes = batch.picture_sizes[numbers]  # (p, 2)
        inside_x = torch.arange(width, device=pixels.device) < sizes[:, :1]  # (p, W)
        inside_y = torch.arange(height, device=pixels.device) < sizes[:, 1:]  # (p, H)
        pixels = pixels * (inside_y[:, None, :, None] & inside_x[:, None, None, :])
        return pixels.contiguous(memory_format=torch.channels_last)
