"""Datasets for training and validating the detector. Training images are shuffled each epoch and mirrored at random."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from detectors.faster_rcnn import FasterRCNNConfig
from detectors.ground_truth import LabelledImage
from detectors.losses import Example
from detectors.preprocess import BAD_IMAGE, NARROWEST_INPUT, resize, resized_size
from detectors.recipes import DataConfig
from storage.collect.normalise import FILE_FORMATS
from storage.order import mix, samples_after
from training.distributed import World
from training.log import Unreadable

_ORDER, _AUGMENTATION = 0, 1  # independent streams of randomness


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's examples of a training step. Images in `unreadable` were replaced by the next readable ones."""

    examples: list[Example]
    unreadable: list[Unreadable]

    def to(self, device: torch.device) -> "Batch":
        return Batch([example.to(device) for example in self.examples], self.unreadable)


def read_resized(image: LabelledImage, config: FasterRCNNConfig) -> np.ndarray:
    """Read an image, resized for the network as BGR [H, W, 3].

    Raises one of the exceptions in BAD_IMAGE if the file is damaged, or its size differs or is too narrow.
    """
    size = resized_size(image.height, image.width, config)
    if min(size) < NARROWEST_INPUT:
        raise ValueError(f"is too narrow: {image.width}x{image.height}, {size[1]}x{size[0]} after resizing")
    with Image.open(image.file, formats=FILE_FORMATS) as opened:
        pixels = np.asarray(opened.convert("RGB"))[:, :, ::-1]
    if pixels.shape[:2] != (image.height, image.width):
        raise ValueError(f"is {pixels.shape[1]}x{pixels.shape[0]}, but its boxes are for {image.width}x{image.height}")
    return resize(pixels, config)


def make_example(image: LabelledImage, config: FasterRCNNConfig, mirrored: bool, seed: int) -> Example:
    """Make the Example of an image. If `mirrored`, flip its pixels and boxes. `seed` becomes `Example.seed`."""
    pixels = read_resized(image, config)
    height, width = pixels.shape[:2]
    scale = np.array([width / image.width, height / image.height] * 2, np.float32)
    boxes = image.boxes * scale
    if mirrored:
        pixels = pixels[:, ::-1]
        boxes = np.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], axis=1)
    attributes = np.zeros((len(image.labels), config.num_attributes + 1), np.float32)
    for row, numbers in zip(attributes, image.attributes, strict=True):
        row[list(numbers) or [config.num_attributes]] = 1
    arrays = (torch.tensor(np.ascontiguousarray(array)) for array in (pixels, boxes, image.labels, attributes))
    return Example(image.id, *arrays, seed)


class TrainingImages(Dataset):
    """A dataset with one item per training step: this rank's Batch of that step."""

    def __init__(self, images: Sequence[LabelledImage], network: FasterRCNNConfig, config: DataConfig, world: World):
        self.images, self.network, self.config = images, network, config
        self.rank, self.world_size = world.rank, world.size

    def __getitem__(self, index: int) -> Batch:
        config = self.config
        global_batch = samples_after(index * config.batch, config.batch, config.seed, _ORDER, len(self.images))
        share = config.batch // self.world_size
        batch = Batch([], [])
        for epoch, number in global_batch[self.rank * share : (self.rank + 1) * share]:
            batch.examples.append(self._read_example(index, epoch, number, batch.unreadable))
        return batch

    def _read_example(self, step: int, epoch: int, number: int, unreadable: list[Unreadable]) -> Example:
        """Read image `number` or, if it is unreadable, the next readable one. Record each failure in `unreadable`."""
        for index in range(number, number + len(self.images)):
            image = self.images[index % len(self.images)]
            rng = np.random.default_rng([self.config.seed, _AUGMENTATION, epoch, number])
            mirrored, seed = bool(rng.random() < self.config.flip), mix(self.config.seed, epoch, number) % 2**63
            try:
                return make_example(image, self.network, mirrored, seed)
            except BAD_IMAGE as error:
                unreadable.append(Unreadable(step + 1, image.id, f"{image.file}: {error}"))
        raise ValueError(f"none of the {len(self.images)} images can be read; the last one: {unreadable[-1].reason}")


class HeldOutImages(Dataset):
    """This rank's held-out images. An item is a pair: index in `images`, and resized BGR pixels or an error message."""

    def __init__(self, images: Sequence[LabelledImage], network: FasterRCNNConfig, world: World):
        self.images, self.network = images, network
        self.indices = range(world.rank, len(images), world.size)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[int, np.ndarray | str]:
        number = self.indices[index]
        try:
            return number, read_resized(self.images[number], self.network)
        except BAD_IMAGE as error:
            return number, f"{self.images[number].file}: {error}"
