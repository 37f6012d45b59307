"""Train the detector of faster_rcnn.py on annotated images.

    vlbert train-detector RECIPE [--field value ...]
    torchrun --nproc-per-node N -m detectors.train RECIPE [--field value ...]

RECIPE is a function of detectors/recipes.py; fields are those of its dataclasses, such as --root FOLDER or
--optimizer.learning_rate 1e-4. A stopped run resumes from its last checkpoint. A complete run writes
ROOT/runs/RUN/weights.safetensors for `vlbert detect` and `verify-detector`. For details see docs/detector.md.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detectors.examples import Batch, TrainingImages
from detectors.faster_rcnn import FasterRCNN
from detectors.ground_truth import GroundTruth, read_ground_truth
from detectors.losses import Losses
from detectors.recipes import RECIPES, DetectorRecipe
from detectors.validate import validate
from detectors.weights.files import COUNTER, write_weights
from detectors.weights.init_from import init_from
from storage.object_store import open_store
from storage.order import mix
from storage.runs import CONFIG, as_json, checkpoints, open_folder
from storage.settings import differing_fields, flat, to_json
from training import distributed
from training.checkpoint import (
    MODEL,
    OPTIMIZER,
    Writer,
    claim_run,
    load_optimizer,
    load_tensors,
    optimizer_tensors,
    write_checkpoint,
)
from training.distributed import World
from training.loading import batches
from training.log import last_metrics
from training.loop import Run, train_steps
from training.optimizer import check_decay, make_optimizer
from training.precision import autocast, recipe_precision
from training.program import run_program

BEST_BY = "map50"  # the metric by which checkpoints are compared


@dataclass(eq=False, kw_only=True)
class DetectorRun(Run):
    """A detector's training run in one process, made by `prepare`. `model` is the network with its losses."""

    recipe: DetectorRecipe
    model: Losses
    truth: GroundTruth

    @property
    def network(self) -> FasterRCNN:
        return self.model.network

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"attributes": self.recipe.sampling.attribute_weight}

    @property
    def samples_per_step(self) -> int:
        return self.recipe.data.batch

    @property
    def max_unreadable(self) -> float:
        return self.recipe.data.unreadable * len(self.truth.train)

    def batches(self) -> Iterator[list[Batch]]:
        config = self.recipe.data
        data = TrainingImages(self.truth.train, self.recipe.network, config, self.world)
        for batch in batches(data, range(self.step, self.recipe.steps), config.workers, self.world.device):
            yield [batch]

    def losses(self, model: nn.Module, part: Batch) -> dict[str, tuple[Tensor, int]]:
        self.unreadable += part.unreadable
        with autocast(self.recipe, self.world):
            return model(part.examples)

    def keys(self, part: Batch) -> list[str]:
        return [example.image for example in part.examples]

    @property
    def validate(self) -> Callable[[], tuple[dict[str, float], list[dict]]] | None:
        images, classes = self.truth.held_out, self.truth.classes
        return partial(validate, self.network, self.recipe, images, classes, self.world) if images else None

    def save(self, done: int, validation: Mapping[str, float], loop_state: Mapping[str, Any]) -> None:
        recipe, files = self.recipe, {CONFIG: as_json(to_json(self.recipe)), MODEL: self.network.state_dict()}
        files[OPTIMIZER] = optimizer_tensors(self.network, self.optimizer)
        state: dict[str, Any] = {"step": done, "steps": recipe.steps, "data": self.truth.hash}
        state |= {"validation": dict(validation), "loop": loop_state}
        write_checkpoint(self.writer, recipe, done, files, state, BEST_BY)


def train(recipe: DetectorRecipe, world: World) -> dict[str, float]:
    """Train from the start or the last checkpoint to the end, and return the metrics of the last validation."""
    if (batch := recipe.data.batch) % world.size:
        raise ValueError(f"data.batch is {batch}, which cannot be split over {world.size} processes; set a multiple")
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    with claim_run(open_store(recipe.root), recipe.run, world) as check:
        run = prepare(recipe, world, print if world.first else lambda *_: None)
        if run.step >= recipe.steps:
            return last_metrics(run.writer.store, recipe.run)
        run.writer.check = check
        run.network.train()
        with recipe_precision(recipe), run.writer:
            metrics = train_steps(run)
        if world.first:
            print(write_result(run, recipe.steps, metrics), flush=True)
    return metrics


def prepare(recipe: DetectorRecipe, world: World, say: Callable[[str], None]) -> DetectorRun:
    """Return the run, with its annotations read and its network built or loaded from the last checkpoint."""
    store = open_store(recipe.root)
    saved = distributed.broadcast(checkpoints(store, recipe.run), world)
    folder = open_folder(store, saved[-1]) if saved else None
    state: Mapping[str, Any] = folder.state if folder else {"step": 0}
    if folder is None:
        check_decay(recipe.optimizer, recipe.steps)  # not for a resumed run, which may be ended early
    else:
        check_same(recipe, folder.json(CONFIG), folder.uri)
    # Read on one rank only: Visual Genome's files take minutes and gigabytes to read.
    truth = distributed.broadcast(read_ground_truth(recipe.data) if world.first else None, world)
    check_names(recipe, truth)
    if folder and state["data"] != truth.hash:
        raise ValueError(
            f"{folder.uri} was trained on other annotations ({state['data']}, now {truth.hash}): images, "
            "boxes or names have changed. Restore them, or start a new run with --run_name=NAME"
        )
    torch.manual_seed(mix(recipe.data.seed, 0xC0FFEE) % 2**63)  # the same random weights on every rank
    network = FasterRCNN(recipe.network)
    network.backbone.freeze(recipe.frozen_stages)
    if folder:
        network.load_state_dict(load_tensors(folder, MODEL), strict=True)
    elif recipe.init_from:
        say(init_from(network, Path(recipe.init_from), truth.classes, truth.attribute_names))
    network.to(world.device).to(memory_format=torch.channels_last)
    optimizer = make_optimizer(network, recipe.optimizer)
    if folder:
        load_optimizer(folder, network, optimizer)
    run = DetectorRun(
        recipe=recipe,
        world=world,
        model=Losses(network, recipe.sampling),
        optimizer=optimizer,
        writer=Writer(store),
        step=state["step"],
        loop_state=state.get("loop"),
        truth=truth,
    )
    _describe(run, say)
    if run.step >= recipe.steps:
        say(f"{recipe.run} is complete: {store.uri(saved[-1])} has step {run.step} of {recipe.steps}")
        # Written again: the run may have been stopped after its last checkpoint, or ended early with steps=STEP.
        if world.first:
            say(write_result(run, run.step, state["validation"]))
    elif saved:
        say(f"{recipe.run} resumes from {store.uri(saved[-1])}, step {run.step} of {recipe.steps}")
    return run


def _describe(run: DetectorRun, say: Callable[[str], None]) -> None:
    trained = sum(parameter.numel() for parameter in run.network.parameters() if parameter.requires_grad)
    objects = sum(len(image.labels) for image in run.truth.train)
    say(
        f"{run.recipe.run}: {len(run.truth.train)} images with {objects} objects of {len(run.truth.classes)} "
        f"classes, {len(run.truth.held_out)} held out (annotations {run.truth.hash}); {trained / 1e6:.2f} M parameters "
        f"trained, on {run.world.size} x {run.world.device.type}"
    )
    if run.recipe.network.resnet.norm == "batch":
        say(f"the ResNet's BatchNorms normalise over {run.recipe.data.batch // run.world.size} images")
    for reason, count in run.truth.skipped.items():
        say(f"skipped: {count} {reason}")
    if not run.truth.held_out:
        say("there will be no validation: neither data.held_out_list nor data.held_out_last selects an image")


# --- files ------------------------------------------------------------------------------------------------------------


def write_result(run: DetectorRun, done: int, metrics: dict[str, float]) -> str:
    """Write the weights after step `done` to a file for `vlbert detect`, and return a message about the file."""
    recipe, store, path = run.recipe, run.writer.store, f"runs/{run.recipe.run}/weights.safetensors"
    tensors = {n: t.detach().cpu() for n, t in run.network.state_dict().items() if not COUNTER.search(n)}
    resnet = dataclasses.replace(recipe.network.resnet, norm="frozen")
    metadata = {
        "network": dataclasses.asdict(dataclasses.replace(recipe.network, resnet=resnet)),
        "classes": list(run.truth.classes),
        "trained": {
            "recipe": recipe.name,
            "steps": done,
            "seed": recipe.data.seed,
            "images": len(run.truth.train),
            "annotations": run.truth.hash,
            "validation": {name: round(value, 4) for name, value in metrics.items()},
        },
    }
    if recipe.network.num_attributes:
        metadata["attributes"] = list(run.truth.attribute_names)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        sha256 = write_weights(file, tensors, metadata)
        size = file.stat().st_size
        store.put(path, file)
    return f"{store.uri(path)}: {size / 1e6:.2f} MB, sha256 {sha256}{'' if metrics else ', WITHOUT VALIDATION'}"


# --- checks -----------------------------------------------------------------------------------------------------------


def check_complete(recipe: DetectorRecipe) -> None:
    """Raise ValueError if a setting that depends on the machine or the data is missing."""
    data, attributes = recipe.data, recipe.network.num_attributes
    start = recipe.init_from
    for holds, message in (
        (recipe.root, "root is not set; give --root=FOLDER or --root=s3://bucket/prefix for the run's files"),
        (
            (data.annotations is None) != (data.objects is None),
            "give either --data.annotations=FILE (COCO's detection format) or --data.objects=FILE (Visual Genome's "
            "scene_graphs.json)",
        ),
        (data.images, "data.images is not set; give the folders with the images: --data.images FOLDER FOLDER"),
        (
            data.classes or not data.objects,
            "data.classes is not set, but Visual Genome's objects have arbitrary names; give "
            "--data.classes=objects_vocab.txt",
        ),
        (
            bool(attributes) == bool(data.attribute_names),
            f"the network has {attributes} attributes, but data.attribute_names is {data.attribute_names}; give both, "
            "as with --data.attribute_names=attributes_vocab.txt, or neither, with --network.num_attributes=0",
        ),
        (
            start or recipe.random_init,
            "the network has no weights to start from; give --init_from=FILE (an ImageNet ResNet or a detector), or "
            "start from random weights with --random_init",
        ),
        (not start or Path(start).is_file(), f"init_from is {start}, but this file does not exist"),
    ):
        if not holds:
            raise ValueError(message)


def check_names(recipe: DetectorRecipe, truth: GroundTruth) -> None:
    """Raise ValueError if the numbers of classes or attributes differ between the data and the network."""
    for kind, names in (("classes", truth.classes), ("attributes", truth.attribute_names)):
        expected = getattr(recipe.network, f"num_{kind}")
        if len(names) != expected:
            raise ValueError(
                f"the data has {len(names)} {kind}, but the network has {expected}; set "
                f"--network.num_{kind}={len(names)}"
            )


def check_same(recipe: DetectorRecipe, saved: dict, checkpoint: str) -> None:
    """Raise ValueError if a setting that affects results differs from the checkpoint's. File paths may differ."""
    fixed = {"network", "sampling", "optimizer", "frozen_stages", "precision"}
    fixed |= {"data.batch", "data.flip", "data.seed"}
    for name, now, before in differing_fields(flat(to_json(recipe)), flat(saved)):
        if name in fixed or name.split(".")[0] in fixed:
            raise ValueError(
                f"{checkpoint} was trained with {name}={before}, but the recipe has {now}. Restore it, or start a new "
                "run with --run_name=NAME"
            )


def main(arguments: list[str] | None = None) -> None:
    run_program("vlbert train-detector", __doc__, RECIPES, check_complete, train, arguments)


if __name__ == "__main__":
    main()
