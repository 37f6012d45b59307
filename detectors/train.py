"""Train the detector of faster_rcnn.py on annotated images.

    python -m detectors.train RECIPE [field=value ...]
    torchrun --nproc-per-node N -m detectors.train RECIPE [field=value ...]

RECIPE is a function of detectors/recipes.py; fields are those of its dataclasses, such as root=FOLDER or
optimizer.learning_rate=1e-4. A run that was stopped goes on from its last checkpoint; a finished one says so. It leaves
ROOT/runs/RUN/weights.safetensors, which detectors.run and detectors.verify read. docs/train-detector.md tells more.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from detectors import distributed
from detectors.checkpoints import checkpoints, load_optimizer, optimizer_tensors, read_state, remove_old
from detectors.distributed import World
from detectors.examples import TooManyBadImages, TrainingImages, loaded
from detectors.faster_rcnn import FasterRCNN
from detectors.fields import differing_fields, flat, override, to_json
from detectors.ground_truth import GroundTruth, read_ground_truth
from detectors.losses import Losses
from detectors.recipes import RECIPES, DetectorRecipe, OptimizerConfig
from detectors.record import Record, last_metrics
from detectors.start import start_from
from detectors.validate import validate
from detectors.weights import COUNTER, write_weights
from storage.objects import Objects, StorageUnreachable, open_objects
from storage.order import mix

CHECKPOINT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Run:
    """All that one process needs to train: made by `prepare`."""

    objects: Objects
    step: int  # optimizer steps that are done already
    network: FasterRCNN
    optimizer: torch.optim.Optimizer
    truth: GroundTruth
    bad: set[str]  # files that could not be read


def train(recipe: DetectorRecipe, world: World) -> dict[str, float]:
    """The whole run, or the rest of it; returns the metrics of the last validation."""
    check_shares(recipe, world.size)
    run = prepare(recipe, world, print if world.first else lambda *_: None)
    if run.step >= recipe.steps:
        return last_metrics(run.objects, recipe.run_name)
    model = Losses(run.network, recipe.sampling)
    # Live norms count on each rank by themselves; those of rank 0 are what all ranks go on with, and what is saved.
    parallel = DistributedDataParallel(model) if world.size > 1 else model
    record = None
    if world.first:
        record = Record(run.objects, recipe.run_name, run.step, recipe.steps, recipe.data.batch)
    since_log, bad, metrics = Counter(), [], {}
    weights = {"attributes": recipe.sampling.attribute_weight}
    run.network.train()
    steps = range(run.step, recipe.steps)
    data = TrainingImages(run.truth.train, recipe.network, recipe.data, world)
    for step, batch in zip(steps, loaded(data, steps, recipe.data.workers), strict=True):
        prepare_step(run.optimizer, step, recipe.steps, recipe.optimizer)
        bad += batch.bad
        bf16 = recipe.precision == "bf16" and world.device.type == "cuda"
        with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
            losses = parallel([example.target(world.device) for example in batch.examples])
        (mean_losses(losses, weights, world, since_log) * world.size).backward()  # DDP averages; ours are to be summed
        norm = torch.nn.utils.clip_grad_norm_(run.network.parameters(), recipe.optimizer.clip or math.inf)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of step {step + 1} is not finite; nothing was changed by it. Go on from the run's last "
                "checkpoint with another order (data.seed) or start another run (run=NAME), with a lower "
                "optimizer.learning_rate"
            )
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)

        done = step + 1
        last = done == recipe.steps
        saves, validates = last or done % recipe.save_every == 0, last or done % recipe.validate_every == 0
        if saves or done % recipe.log_every == 0:
            averages = average_losses(since_log, world)
            since_log.clear()
            note_bad(run, recipe, bad, world)
            if record:
                record.training(done, averages, run.optimizer.param_groups[0]["lr"])
        if validates and run.truth.held_out:
            metrics, rows = validate(run.network, recipe, run.truth.held_out, run.truth.classes, world)
            if record:
                record.validation(done, metrics, rows)
        if saves:
            if record:
                record.publish()  # before the checkpoint: what is too new is cut off when the run goes on
                save_checkpoint(run, recipe, done)
            distributed.wait_for_all(world)
    if record:
        record.close()
        print(write_result(run, recipe, metrics), flush=True)
    return metrics


def prepare(recipe: DetectorRecipe, world: World, say: Callable[[str], None]) -> Run:
    """Read the annotations and make the network: a new one, or that of the run's last checkpoint."""
    objects = open_objects(recipe.root)
    saved = distributed.from_first(checkpoints(objects, recipe.run_name), world)
    state = read_state(objects, saved[-1]) if saved else {"step": 0, "bad": []}
    if saved:
        check_same(recipe, json.loads(objects.get(f"{saved[-1]}/config.json")), objects.where(saved[-1]))
    truth = read_ground_truth(recipe.data)
    check_names(recipe, truth)
    if saved and state["data"] != truth.hash:
        raise ValueError(
            f"{objects.where(saved[-1])} was trained on other annotations ({state['data']}, these are {truth.hash}): "
            "images, boxes or names have changed. Put them back, or start another run: run=NAME"
        )
    torch.manual_seed(mix(recipe.data.seed, 0xC0FFEE) % 2**63)  # the same new weights on every rank
    network = FasterRCNN(recipe.network)
    if saved:
        _load(network, objects, saved[-1])
    elif recipe.start_from:
        say(start_from(network, Path(recipe.start_from)))
    network.backbone.freeze(recipe.frozen_stages)
    network.to(world.device, memory_format=torch.channels_last)
    optimizer = make_optimizer(network, recipe.optimizer)
    if saved:
        load_optimizer(objects, saved[-1], network, optimizer)
    run = Run(objects, state["step"], network, optimizer, truth, set(state["bad"]))
    _describe(run, recipe, world, say)
    if run.step >= recipe.steps:
        say(f"{recipe.run_name} is complete: {objects.where(saved[-1])} has step {run.step} of {recipe.steps}")
        # It may have been stopped between its last checkpoint and this, or be ended early: steps=STEP.
        if world.first and not objects.exists(_result(recipe)):
            say(write_result(run, recipe, last_metrics(objects, recipe.run_name)))
    elif saved:
        say(f"{recipe.run_name} goes on from {objects.where(saved[-1])}")
    return run


def _describe(run: Run, recipe: DetectorRecipe, world: World, say: Callable[[str], None]) -> None:
    trained = sum(parameter.numel() for parameter in run.network.parameters() if parameter.requires_grad)
    objects = sum(int((~image.crowd).sum()) for image in run.truth.train)
    say(
        f"{recipe.run_name}: {len(run.truth.train)} images with {objects} objects of {len(run.truth.classes)} classes, "
        f"{len(run.truth.held_out)} held out (annotations {run.truth.hash}); {trained / 1e6:.2f} M parameters trained, "
        f"on {world.size} x {world.device.type}"
    )
    for why, count in run.truth.left_out.items():
        say(f"left out: {count} {why}")
    if not run.truth.held_out:
        say("there will be no validation: neither data.held_out_list nor data.held_out_last names an image")


def make_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """SGD or AdamW over all that learns."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    common = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": True}
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    return torch.optim.AdamW(parameters, betas=config.betas, **common)


def prepare_step(optimizer: torch.optim.Optimizer, step: int, steps: int, config: OptimizerConfig) -> None:
    """Give every group the learning rate of step 0..steps-1."""
    if step + 1 < config.warm_up:
        factor = (step + 1) / config.warm_up
    elif config.schedule == "step":
        factor = config.decay ** sum(step >= at for at in config.decay_at)
    else:
        factor = (steps - step) / max(1, steps + 1 - config.warm_up)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * min(1.0, factor)


def mean_losses(
    losses: dict[str, tuple[Tensor, int]], weights: dict[str, float], world: World, since_log: Counter
) -> Tensor:
    """This rank's share of the weighted losses, each divided by what was asked over all ranks; notes sums and
    counts."""
    counts = distributed.sum_over_ranks([count for _, count in losses.values()], world)
    total = 0.0
    for (name, (loss, count)), everywhere in zip(losses.items(), counts, strict=True):
        total = total + weights.get(name, 1.0) * loss / max(1, everywhere)
        since_log[name, "sum"] += loss.detach().double()
        since_log[name, "count"] += count
    return total


def average_losses(since_log: Counter, world: World) -> dict[str, float]:
    """Losses since the last log, each over what was asked, on all ranks; without weights."""
    names = list(dict.fromkeys(name for name, _ in since_log))
    sums = distributed.sum_over_ranks([float(since_log[name, "sum"]) for name in names], world)
    counts = distributed.sum_over_ranks([float(since_log[name, "count"]) for name in names], world)
    return {name: s / c for name, s, c in zip(names, sums, counts, strict=True) if c}


def note_bad(run: Run, recipe: DetectorRecipe, bad: list[str], world: World) -> None:
    """Say which images could not be read since the last log, on all ranks; TooManyBadImages where they get too many."""
    new = sorted(set(distributed.gather_rows(bad, world)) - run.bad)
    bad.clear()
    run.bad.update(new)
    if world.first and new:
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        print(f"{len(run.bad)} images could not be read and were passed over: {'; '.join(new[:3])}{more}", flush=True)
    if len(run.bad) > recipe.data.bad_images * len(run.truth.train):
        raise TooManyBadImages(
            f"{len(run.bad)} of {len(run.truth.train)} images cannot be read, such as {min(run.bad)}; fetch them "
            "again, or allow a larger share: data.bad_images"
        )


# --- files ------------------------------------------------------------------------------------------------------------


def save_checkpoint(run: Run, recipe: DetectorRecipe, done: int) -> None:
    """Write the checkpoint of step `done`, state.json last, and remove those that are too old to keep."""
    folder = f"runs/{recipe.run_name}/step-{done:07d}"
    state = {"version": CHECKPOINT_VERSION, "step": done, "data": run.truth.hash, "bad": sorted(run.bad)}
    files = {
        "config.json": json.dumps(to_json(recipe), indent=1, sort_keys=True).encode(),
        "model.safetensors": save({name: _plain(tensor) for name, tensor in run.network.state_dict().items()}),
        "optimizer.safetensors": save(optimizer_tensors(run.network, run.optimizer)),
        "state.json": json.dumps(state, indent=1).encode(),
    }
    for name, data in files.items():
        run.objects.put(f"{folder}/{name}", data)
    remove_old(run.objects, recipe.run_name, recipe.keep_checkpoints)
    print(f"step {done}/{recipe.steps}  saved {run.objects.where(folder)}", flush=True)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _load(network: FasterRCNN, objects: Objects, folder: str) -> None:
    tensors = load(objects.get(f"{folder}/model.safetensors"))
    own = network.state_dict()
    # Norms of stages that do not learn were saved frozen, and count nothing.
    tensors |= {name: tensor for name, tensor in own.items() if COUNTER.search(name) and name not in tensors}
    network.load_state_dict(tensors, strict=True)


def _result(recipe: DetectorRecipe) -> str:
    return f"runs/{recipe.run_name}/weights.safetensors"


def write_result(run: Run, recipe: DetectorRecipe, metrics: dict[str, float]) -> str:
    """Write the weight file that detectors.run reads, its norms frozen; says where, and what is in it."""
    tensors = {n: _plain(t) for n, t in run.network.state_dict().items() if not COUNTER.search(n)}
    if recipe.half:
        tensors = {name: _halved(tensor) for name, tensor in tensors.items()}
    resnet = dataclasses.replace(recipe.network.resnet, norm="frozen")
    about = {
        "network": dataclasses.asdict(dataclasses.replace(recipe.network, resnet=resnet)),
        "classes": list(run.truth.classes),
        "trained": {
            "recipe": recipe.name,
            "steps": recipe.steps,
            "seed": recipe.data.seed,
            "images": len(run.truth.train),
            "annotations": run.truth.hash,
            "validation": {name: round(value, 4) for name, value in metrics.items()},
        },
    }
    if recipe.network.num_attributes:
        about["attributes"] = list(run.truth.attribute_names)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        sha256 = write_weights(file, tensors, about)
        size = file.stat().st_size
        run.objects.put(_result(recipe), file)
    return f"{run.objects.where(_result(recipe))}: {size / 1e6:.2f} MB, sha256 {sha256}"


def _halved(tensor: Tensor) -> Tensor:
    """In float16, unless a number would become infinite or lose its digits, as variances of norms may."""
    half = tensor.half()
    close = torch.allclose(half.float(), tensor, rtol=2**-10, atol=1e-4 * float(tensor.abs().max()))
    return half if torch.isfinite(half).all() and close else tensor


# --- what is refused --------------------------------------------------------------------------------------------------


def check_complete(recipe: DetectorRecipe) -> None:
    """What no recipe can know and every run must say; else a ValueError."""
    data = recipe.data
    if not recipe.root:
        raise ValueError("root is not set; give root=FOLDER or root=s3://bucket/prefix, for the run's files")
    if (data.annotations is None) == (data.objects is None):
        raise ValueError(
            "give either data.annotations=FILE, in COCO's detection format, or data.objects=FILE, Visual Genome's "
            "objects.json"
        )
    if not data.images:
        raise ValueError("data.images is not set; give the folders of the images: data.images=FOLDER,FOLDER")
    if data.objects and not data.classes:
        raise ValueError("Visual Genome's objects have names of any kind; give data.classes=objects_vocab.txt")
    if recipe.network.num_attributes and not data.attribute_names:
        raise ValueError(
            f"the network has {recipe.network.num_attributes} attributes; give data.attribute_names="
            "attributes_vocab.txt, or network.num_attributes=0"
        )
    if data.attribute_names and not recipe.network.num_attributes:
        raise ValueError("the network has no attribute head; set network.num_attributes, or data.attribute_names=none")
    if not recipe.start_from and not recipe.from_scratch:
        raise ValueError(
            "the network has no weights to start from; give start_from=FILE, an ImageNet ResNet's or a detector's, or "
            "say that it shall start from random ones: from_scratch=true"
        )
    for name in ("annotations", "objects", "attributes", "image_data", "classes", "attribute_names"):
        _check_file(getattr(data, name), f"data.{name}")
    for name in ("train_list", "held_out_list"):
        _check_file(getattr(data, name), f"data.{name}")
    _check_file(recipe.start_from, "start_from")


def _check_file(file: str | None, name: str) -> None:
    if file is not None and not Path(file).is_file():
        raise ValueError(f"{name} is {file}, and there is no such file")


def check_shares(recipe: DetectorRecipe, world_size: int) -> None:
    """ValueError where the batch cannot be dealt out evenly."""
    if recipe.data.batch % world_size:
        raise ValueError(
            f"data.batch = {recipe.data.batch} cannot be shared by {world_size} processes; choose a multiple"
        )


def check_names(recipe: DetectorRecipe, truth: GroundTruth) -> None:
    """ValueError where the lists of names are not as long as the network's heads."""
    network = recipe.network
    for what, names, wanted in (
        ("classes", truth.classes, network.num_classes),
        ("attributes", truth.attribute_names, network.num_attributes),
    ):
        if len(names) != wanted:
            raise ValueError(
                f"the data has {len(names)} {what}, the network {wanted}; set network.num_{what}={len(names)}"
            )


def check_same(recipe: DetectorRecipe, saved: dict, where: str) -> None:
    """ValueError where a run would go on otherwise than it began; the files' places may change, their content not."""
    fixed = {"network", "sampling", "optimizer", "start_from", "from_scratch", "frozen_stages", "precision"}
    fixed |= {"data.batch", "data.flip", "data.seed"}
    for name, now, before in differing_fields(flat(to_json(recipe)), flat(saved)):
        if name in fixed or name.split(".")[0] in fixed:
            raise ValueError(
                f"{where} was trained with {name} = {before}, the recipe says {now}; set it back, or start another "
                "run: run=NAME"
            )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m detectors.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=sorted(RECIPES), metavar="RECIPE", help=", ".join(sorted(RECIPES)))
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_args(arguments)
    try:
        recipe = override(RECIPES[options.recipe](), options.overrides)
        check_complete(recipe)
    except ValueError as error:
        sys.exit(f"{parser.prog} {options.recipe}: {error}")
    world = distributed.start()
    try:
        train(recipe, world)
    except (ValueError, FloatingPointError, StorageUnreachable) as error:
        sys.exit(f"{parser.prog} {options.recipe}: {'' if world.first else f'rank {world.rank}: '}{error}")
    distributed.stop(world)  # not after an error: it would wait for ranks that are still at work


if __name__ == "__main__":
    main()
