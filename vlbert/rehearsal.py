"""A step of training, and of detection, on a GPU that is not there: what it would launch, move and hold.

    rehearsed = rehearse_training(RECIPES["pretrain_vlbert_base"](), pairs=128, texts=128)
    rehearsed.seconds(CARDS["h200"])     of a step, by the model of training/cards.py
    rehearsed.peak                       bytes

Weights are random and samples are made up (vlbert/synthetic.py): no file is needed, and no memory for the step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detectors.detect import ROIS_AT_A_TIME
from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.preprocess import to_input
from training.cards import Card, Part, timeline
from training.distributed import World
from training.operations import Operation
from training.optimizer import clip_gradients, make_optimizer
from training.precision import Float32, autocast, float32_products
from training.virtual_device import DEVICE, VirtualDevice
from vlbert.config import Recipe
from vlbert.data.batch import Batch, collate
from vlbert.data.images import prepare_image
from vlbert.initial_weights import make_model
from vlbert.model.execution import execute_as
from vlbert.synthetic import CLASSES, caption, drawn_samples, drawn_texts, made_up_vocabulary, masked_pairs
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.retrieval import HeldOutImage, RetrievalSettings


@dataclass(frozen=True, eq=False)
class Rehearsed:
    """What a GPU would do.

    operations  with the part that each belongs to, in order
    held        bytes between steps: weights and what the optimizer keeps
    peak        bytes, at most
    peak_of     bytes at that time, by the part that made them; "" before the step
    float32     what the card computes float32 products in
    """

    operations: Sequence[tuple[str, Operation]]
    held: int
    peak: int
    peak_of: dict[str, int]
    float32: Float32

    def parts(self, card: Card) -> dict[str, Part]:
        return timeline(self.operations, card, self.float32)

    def seconds(self, card: Card) -> float:
        return sum(part.seconds for part in self.parts(card).values())

    @property
    def waits(self) -> dict[tuple[str, str], int]:
        """How often the host waits for the device: by operation and file:line."""
        found: dict[tuple[str, str], int] = {}
        for _, one in self.operations:
            if one.waits:
                found[one.name, one.where] = found.get((one.name, one.where), 0) + 1
        return found


class TrainingStep:
    """The model of a recipe as training runs it, with its optimizer; without data, log or checkpoints."""

    def __init__(self, recipe: Recipe, model: TaskModel, world: World):
        self.recipe, self.model, self.world = recipe, model, world
        self.optimizer = make_optimizer(model, recipe.optimizer)

    def losses(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        with autocast(self.recipe, self.world):
            return self.model(batch)

    def take(self, batch: Batch) -> None:
        """A step over a batch of the device."""
        total(self.losses(batch)).backward()
        self.update()

    def update(self) -> None:
        clip_gradients(self.model, self.recipe.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def total(losses: dict[str, tuple[Tensor, int]]) -> Tensor:
    """What is learned from: the mean of each loss, together. What carries no gradient is a measure, and no loss."""
    return sum(loss / max(1, count) for loss, count in losses.values() if loss.requires_grad)


def without_files(recipe: Recipe, task: type = PretrainingSettings) -> Recipe:
    """The recipe from random weights, with the image in sight from the first step; ValueError unless it is one of the
    task, pre-training or retrieval."""
    if not isinstance(recipe.task, task):
        wanted = "pre-training" if task is PretrainingSettings else "retrieval"
        raise ValueError(f"recipe {recipe.name} is no {wanted}; vlbert recipes lists all")
    regions = dataclasses.replace(recipe.model.regions, random_init=True, weights=None, pixel_std=60.0)
    model = dataclasses.replace(recipe.model, regions=regions, visual_gain_words=1.0, visual_gain_regions=1.0)
    return dataclasses.replace(recipe, model=model, bert=None)


def task_of(recipe: Recipe) -> Any:
    return make_task(recipe.task, made_up_vocabulary(), CLASSES)


def new_model(recipe: Recipe, device: torch.device) -> TaskModel:
    """Of random weights, the same at every call; ready to train."""
    model = make_model(recipe, task_of(recipe), made_up_vocabulary(), None, None, lambda line: None)
    execute_as(recipe, model.vlbert)
    return model.to(device).train()


def made_up_batch(recipe: Recipe, pairs: int, texts: int) -> Batch:
    task, regions = task_of(recipe), recipe.model.regions
    examples = masked_pairs(task, regions, drawn_samples(regions, range(pairs)))
    return collate(examples + drawn_texts(task, range(texts)))


def rehearse_training(
    recipe: Recipe,
    pairs: int,
    texts: int = 0,
    run: Callable[[TrainingStep, Batch, VirtualDevice], None] = lambda step, batch, device: step.take(batch.to(DEVICE)),
) -> Rehearsed:
    """The second step of the recipe over so many pairs and text-only rows; in the first one the optimizer allocates.

    run: takes the step; it may mark parts on the device.
    """
    recipe = without_files(recipe)
    batch, model = made_up_batch(recipe, pairs, texts), new_model(recipe, torch.device("cpu"))
    with VirtualDevice() as device:
        batch = batch.pin_memory()  # as training/loading.py does
        step = TrainingStep(recipe, model.to(DEVICE), World(0, 1, DEVICE))
        step.take(batch.to(DEVICE))
        device.start()
        run(step, batch, device)
    return rehearsed(device, "tf32" if recipe.precision == "tf32" else "ieee")


def rehearse_detection(
    config: FasterRCNNConfig,
    batch: int,
    precision: str = "fp32",
    tf32: bool = False,
    size: tuple[int, int] = (800, 600),
) -> Rehearsed:
    """Detection on so many images of one size (width, height) of the network's input. Every image has as many proposals
    as the configuration allows."""
    network = FasterRCNN.random_init(config, seed=0).for_inference(precision, ROIS_AT_A_TIME["cuda"])
    pixels = torch.zeros(batch, size[1], size[0], 3, dtype=torch.uint8).numpy()
    float32 = "tf32" if tf32 else "ieee"
    with VirtualDevice() as device, float32_products(float32, matrices="ieee"), torch.inference_mode():
        network.to(DEVICE)
        device.start()
        images = to_input(pixels, DEVICE)
        device.mark("transfer")
        c4 = network.backbone(images)
        device.mark("backbone")
        logits, deltas = network.rpn(c4)
        device.mark("rpn")
        boxes, _ = network.proposals(logits, deltas, size[1], size[0])
        torch.cat(boxes).cpu()
        device.mark("proposals")
        features = network.roi_features(c4, boxes)
        device.mark("pool and res5")
        heads = network.heads(features)
        for result in (heads.class_logits.softmax(dim=1), heads.attribute_logits):
            if result is not None:
                result.cpu()
        device.mark("heads")
    return rehearsed(device, float32)


def rehearse_ranking(recipe: Recipe, images: int, captions: int) -> Rehearsed:
    """Retrieval's ranking: each of the images with each of the captions, all at once."""
    recipe = without_files(recipe, RetrievalSettings)
    recipe = dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, rows_at_once=images * captions))
    task, regions, rng = task_of(recipe), recipe.model.regions, np.random.default_rng(0)
    texts = tuple(caption(rng) for _ in range(captions))
    candidates = task.ranked([HeldOutImage("", texts)])[0]
    batch = collate(
        [
            task.example(sample, prepare_image(sample, regions, False), candidates, rng)
            for sample in drawn_samples(regions, range(images))
        ]
    )
    model = new_model(recipe, torch.device("cpu")).eval()
    with VirtualDevice() as device, torch.inference_mode():
        model.to(DEVICE)
        device.start()
        there = batch.pin_memory().to(DEVICE)
        device.mark("transfer")
        with autocast(recipe, World(0, 1, DEVICE)):
            model.predict(there)
        device.mark("ranking")
    return rehearsed(device, "tf32" if recipe.precision == "tf32" else "ieee")


def rehearsed(device: VirtualDevice, float32: Float32) -> Rehearsed:
    """What a device has done since its `start`."""
    return Rehearsed([*device.parts()], device.held_at_start, *device.peak(), float32)
