"""Train: recipe -> data -> model -> task -> loop.

    torchrun --nproc-per-node N -m vlbert.train RECIPE [field=value ...]

RECIPE is a function of vlbert/recipes.py; fields are those of vlbert/config.py, such as data.root=s3://bucket/vlbert or
optimizer.learning_rate=1e-4. A run that was stopped goes on from its last checkpoint; a finished one says so.
"""

import argparse
import contextlib
import math
import sys
from collections import Counter

import torch
from torch.nn.parallel import DistributedDataParallel

from storage.objects import Objects, open_objects
from vlbert import distributed
from vlbert.bert import bert_vocabulary, start_from_bert
from vlbert.checkpoint import (
    Checkpoint,
    checkpoints,
    load_model,
    load_optimizer,
    read_checkpoint,
    read_state,
    remove_old,
    save_checkpoint,
)
from vlbert.config import Recipe, override, to_json
from vlbert.data import ShardSamples, TrainingData, batches, mix, open_samples
from vlbert.distributed import World
from vlbert.evaluate import autocast, validate
from vlbert.model import TaskModel, VLBert, count_parameters
from vlbert.optim import make_optimizer, set_learning_rate
from vlbert.recipes import RECIPES
from vlbert.record import Record, read_metrics
from vlbert.tasks import Task, make_task
from vlbert.text import TextCorpus, Vocabulary


def train(recipe: Recipe, world: World) -> dict[str, float]:
    """The whole run, or the rest of it; returns the metrics of the last validation."""
    objects = open_objects(recipe.data.root)
    say = print if world.first else lambda *_: None
    saved = checkpoints(objects, recipe.run_name)
    resumed = saved[-1] if saved else None
    state = read_state(objects, resumed) if resumed else {"step": 0, "data": None, "held_out": None}
    if resumed:
        check_same_run(recipe, read_checkpoint(objects, resumed))
        if state["step"] >= recipe.steps:
            say(f"{recipe.run_name} is complete: {objects.where(resumed)} has step {state['step']} of {recipe.steps}")
            validations = read_metrics(objects, recipe.run_name, "validation")
            return {k: v for k, v in validations[-1].items() if k not in ("kind", "step")} if validations else {}
        say(f"{recipe.run_name} goes on from {objects.where(resumed)}")

    samples, pinned = open_samples(objects, recipe.data.dataset, recipe.data.detector, state["data"])
    held_out, held_out_pinned = None, None
    if recipe.data.held_out:
        held_out, held_out_pinned = open_samples(objects, recipe.data.held_out, recipe.data.detector, state["held_out"])
    start_from = read_checkpoint(*_split_checkpoint(recipe.start_from)) if recipe.start_from else None
    vocabulary = choose_vocabulary(recipe, objects, resumed, start_from, samples)
    num_classes = samples.sample(0).regions.num_classes
    task = make_task(recipe.task, vocabulary, num_classes)
    questions = task.questions(samples.urls, held_out=False)
    asked = task.questions(held_out.urls, held_out=True) if held_out else None
    corpus = TextCorpus(recipe.data.text_corpus, vocabulary) if recipe.data.text_batch else None
    data = TrainingData(samples, questions, task, recipe.data, recipe.model.regions, world.rank, world.size, corpus)

    model = make_model(recipe, task, vocabulary, start_from, say).to(world.device)
    optimizer = make_optimizer(model, recipe.optimizer)
    if resumed:
        load_model(model, read_checkpoint(objects, resumed).model, objects.where(resumed))
        load_optimizer(objects, resumed, model, optimizer)
    parallel = model
    if world.size > 1:
        parallel = DistributedDataParallel(model)
    everything, trainable = count_parameters(model)
    say(
        f"{recipe.run_name}: {len(questions)} questions on {len(samples)} samples (snapshot {pinned['snapshot']}), "
        f"{everything / 1e6:.2f} M parameters, {trainable / 1e6:.2f} M trained, on {world.size} x {world.device.type}"
    )

    per_step = recipe.data.batch + recipe.data.text_batch
    record = Record(objects, recipe.run_name, state["step"], recipe.steps, per_step) if world.first else None
    since_log, metrics = Counter(), {}
    model.train()
    steps = range(state["step"], recipe.steps)
    for step, parts in zip(steps, batches(data, steps, recipe.data.workers, world.device), strict=True):
        set_learning_rate(optimizer, step, recipe.steps, recipe.optimizer.warm_up)
        torch.manual_seed(mix(recipe.data.seed, step, world.rank) % 2**63)  # dropout: a resumed run draws the same
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with parallel.no_sync() if world.size > 1 and not last else contextlib.nullcontext():
                with autocast(recipe, world):
                    losses = parallel(part.to(world.device))
                loss = mean_losses(losses, world, since_log) / len(parts)
                (loss * world.size).backward()  # DDP averages gradients over ranks; ours are to be summed
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        done = step + 1
        last = done == recipe.steps
        saves, validates = last or done % recipe.save_every == 0, last or done % recipe.validate_every == 0
        if saves or done % recipe.log_every == 0:
            averages = average_losses(since_log, world, done)
            since_log.clear()
            if record:
                record.training(done, averages, optimizer.param_groups[0]["lr"])
        if validates and held_out:
            metrics, predictions = validate(model, recipe, held_out, asked, world)
            if record:
                record.validation(done, metrics)
                record.table("predictions.jsonl", predictions)
        if saves and world.first:
            progress = {
                "data": pinned,
                "held_out": held_out_pinned,
                "seed": recipe.data.seed,
                "samples_consumed": done * recipe.data.batch,
                "text_consumed": done * recipe.data.text_batch,
            }
            folder = save_checkpoint(
                objects, recipe.run_name, done, recipe, model, optimizer, vocabulary, num_classes, progress
            )
            remove_old(objects, recipe.run_name, recipe.keep_checkpoints)
            record.publish()
            print(f"step {done}/{recipe.steps}  saved {objects.where(folder)}", flush=True)
        if saves:
            distributed.wait_for_all(world)
    if record:
        record.close()
    return metrics


def mean_losses(losses: dict[str, tuple[torch.Tensor, int]], world: World, since_log: Counter) -> torch.Tensor:
    """This rank's share of the losses, each divided by what was asked over all ranks; notes sums and counts.

    A loss that nobody was asked about in this step is 0, not NaN.
    """
    counts = distributed.sum_over_ranks([count for _, count in losses.values()], world)
    total = 0.0
    for (name, (loss, count)), everywhere in zip(losses.items(), counts, strict=True):
        total = total + loss / max(1, everywhere)
        since_log[name, "sum"] += loss.detach().double()
        since_log[name, "count"] += count
    return total


def average_losses(since_log: Counter, world: World, step: int) -> dict[str, float]:
    """Losses a question since the last log, over all ranks. FloatingPointError where one is not finite."""
    names = sorted({name for name, _ in since_log})
    sums = distributed.sum_over_ranks([float(since_log[name, "sum"]) for name in names], world)
    counts = distributed.sum_over_ranks([float(since_log[name, "count"]) for name in names], world)
    averages = {name: s / c for name, s, c in zip(names, sums, counts, strict=True) if c}
    broken = [name for name, value in averages.items() if not math.isfinite(value)]
    if broken:
        raise FloatingPointError(
            f"the loss {broken[0]} is {averages[broken[0]]} at step {step}; no checkpoint is written. Lower "
            "optimizer.learning_rate or optimizer.clip, and start again: the run goes on from its last checkpoint"
        )
    return averages


def make_model(
    recipe: Recipe, task: Task, vocabulary: Vocabulary, start_from: Checkpoint | None, say: callable
) -> TaskModel:
    """The model with the weights that the recipe starts from; the same on every rank."""
    torch.manual_seed(mix(recipe.data.seed, 0xC0FFEE) % 2**63)
    model = TaskModel(VLBert(recipe.model, len(vocabulary)), task)
    if recipe.model.regions.weights and not start_from:
        from detectors.weights import load_resnet

        load_resnet(model.vlbert.fast_rcnn.backbone, model.vlbert.fast_rcnn.res5, recipe.model.regions.weights)
        say(f"Fast R-CNN from {recipe.model.regions.weights}")
    if recipe.bert:
        start_from_bert(model.vlbert, model.head, recipe.bert)
        say(f"words and encoder from {recipe.bert}")
    if start_from:
        ours = {k.removeprefix("vlbert."): v for k, v in start_from.model.items() if k.startswith("vlbert.")}
        if start_from.model_config != recipe.model:
            differing = [k for k, v in to_json(recipe.model).items() if to_json(start_from.model_config)[k] != v]
            raise ValueError(
                f"{start_from.where} has another architecture than recipe {recipe.name}: {', '.join(differing)} differ"
            )
        load_model(model.vlbert, ours, start_from.where)
        for part, source in getattr(model.head, "start_from", {}).items():
            prefix = f"head.{source}."
            found = {k.removeprefix(prefix): v for k, v in start_from.model.items() if k.startswith(prefix)}
            if found:  # a checkpoint of another task than pre-training has no such part, and the head starts fresh
                load_model(getattr(model.head, part), found, start_from.where)
        say(f"VL-BERT from {start_from.where}")
    return model


def choose_vocabulary(
    recipe: Recipe, objects: Objects, resumed: str | None, start_from: Checkpoint | None, samples: ShardSamples
) -> Vocabulary:
    """That of the run itself, the checkpoint it starts from, the file named, BERT's, or one built from the captions."""
    if resumed:
        return read_checkpoint(objects, resumed).vocabulary
    if start_from:
        return start_from.vocabulary
    if recipe.vocabulary:
        return Vocabulary.read(recipe.vocabulary)
    if recipe.bert:
        return bert_vocabulary(recipe.bert)
    return Vocabulary.build((samples.sample(i).caption for i in range(len(samples))), recipe.vocabulary_size)


def check_complete(recipe: Recipe) -> None:
    """What no recipe can know and every run must say."""
    if not recipe.data.root:
        raise ValueError("data.root is not set; give data.root=FOLDER or data.root=s3://bucket/prefix")
    if recipe.data.text_batch and not recipe.data.text_corpus:
        raise ValueError(
            f"data.text_batch is {recipe.data.text_batch} and data.text_corpus is not set; make a corpus with `python "
            "-m vlbert.text` and give data.text_corpus=FOLDER, or train without text-only rows: data.text_batch=0"
        )


def check_same_run(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """A run goes on only as it began. ValueError names the first field that differs."""
    now = to_json(recipe)
    before = checkpoint.config["recipe"]
    for group in ("task", "model", "data", "optimizer"):
        for name, value in now[group].items():
            free = group == "data" and name in ("root", "workers", "text_corpus")
            if not free and _plain(value) != before[group].get(name):
                raise ValueError(
                    f"{checkpoint.where} was trained with {group}.{name} = {before[group].get(name)}, the recipe says "
                    f"{value}; set it back, or start another run with run=NAME"
                )


def _plain(value: object) -> object:
    """As JSON gives it back: tuples are lists."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _split_checkpoint(path: str) -> tuple[Objects, str]:
    """A path such as ROOT/runs/<run>/step-0000100 as (objects of ROOT, path in it)."""
    root, separator, rest = path.rstrip("/").rpartition("/runs/")
    if not separator:
        raise ValueError(f"start_from={path} is no checkpoint: name ROOT/runs/<run>/step-*")
    return open_objects(root), f"runs/{rest}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="torchrun -m vlbert.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    finally:
        distributed.stop(world)


if __name__ == "__main__":
    main()
