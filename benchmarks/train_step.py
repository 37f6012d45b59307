"""Measure a pre-training step and its parts, in the fast path and in plain fp32.

    python -m benchmarks.train_step [--device cuda] [--recipe RECIPE] [--precision bf16,fp32] [--field value ...]
    python -m benchmarks.train_step --check                 compare losses and gradients of the fast and the plain path
    python -m benchmarks.train_step --losses 200            compare losses of 200 steps between precisions

Inputs are seeded and vary in size (benchmarks/synthetic.py); weights are random, of the recipe's sizes. The paths take
turns with a few steps per round, and the result is the median over rounds. Parts are measured in other steps, with
marks, and the table shows how much of an unmarked step they do not explain. docs/performance.md explains the tables.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.measure import describe_machine, format_table, make_parser, run_in_turns, synchronise, write_json
from benchmarks.plain import PlainPretraining, gradient_errors, pad_examples
from benchmarks.step_contenders import (
    Fast,
    Plain,
    Stored,
    make_benchmark_recipe,
    measure_memory,
    warm_up,
)
from benchmarks.step_parts import PARTS, Clock, count_flops, measure_matrix_flops, total_loss
from benchmarks.step_tables import check_table, losses_table, step_tables
from benchmarks.synthetic import make_benchmark_task, make_samples, make_text_examples, mask_pairs, new_model
from storage.sample import Sample
from storage.settings import named_fields, to_json
from training.distributed import World
from training.loading import batches
from training.optimizer import set_learning_rate
from training.precision import recipe_precision
from vlbert.config import Recipe
from vlbert.data.batch import Example, collate

PRECISIONS = ("bf16", "tf32", "fp32")
LEARNING_RATE = 1e-4  # default of --losses: losses fall within a few hundred steps from random weights
# Bounds on the relative errors of losses, and of any parameter's gradient, against the plain path. fp32 differs in the
# order of sums. bf16 keeps 8 bits, and a ReLU input that changes its sign by rounding also changes the gradient.
LOSS_BOUND = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}
GRADIENT_BOUND = {"fp32": 1e-3, "tf32": 0.1, "bf16": 0.5}


def choose_sizes(options: argparse.Namespace, recipe: Recipe, default: int) -> tuple[int, int]:
    """Return the number of pairs and of text-only rows per step. `default` is the number of pairs if none is given."""
    pairs = options.pairs or default
    return pairs, options.texts if options.texts is not None else (pairs if recipe.data.text_batch else 0)


def measure_with_loader(
    contender: Fast, samples: Sequence[Sample], pairs: int, texts: int, steps: int, workers: int
) -> dict[str, float]:
    """Measure pairs/s, and the share of time spent waiting for data, if `workers` processes make the batches."""
    recipe, device = contender.recipe, contender.world.device
    data = Stored(recipe, make_benchmark_task(recipe), samples, pairs, texts)
    waited, start, warm = 0.0, 0.0, 3
    ahead = iter(batches(data, range(warm + steps), workers, device))
    with recipe_precision(recipe):
        for step in range(warm + steps):
            if step == warm:
                synchronise(device)
                waited, start = 0.0, time.perf_counter()
            before = time.perf_counter()
            parts = next(ahead)
            waited += time.perf_counter() - before
            loss = total_loss(contender.losses(parts[0].to(device)))
            loss.backward()
            contender.update()
            loss.item()  # the training loop reads every loss, too
    synchronise(device)
    seconds = time.perf_counter() - start
    return {"workers": workers, "pairs/s": steps * pairs / seconds, "data wait": waited / seconds}


def measure_step(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the training step of a recipe for all contenders, and return the report."""
    device, recipe = torch.device(options.device), make_benchmark_recipe(options)
    world, task = World(0, 1, device), make_benchmark_task(recipe)
    pairs, texts = choose_sizes(options, recipe, 64 if device.type == "cuda" else 2)
    samples = make_samples(recipe.model.regions, range(pairs * options.batches))
    prepared: list[list[Example]] = [
        mask_pairs(task, recipe.model.regions, samples[first : first + pairs], seed=first)
        + make_text_examples(task, range(first, first + texts))
        for first in range(0, len(samples), pairs)
    ]
    collated = [collate(examples) for examples in prepared]
    if device.type == "cuda":
        collated = [batch.pin_memory() for batch in collated]
    precisions = options.precision or [recipe.precision]
    model = new_model(recipe, device)
    fasts = [Fast(dataclasses.replace(recipe, precision=precision), model, world, collated) for precision in precisions]
    contenders: list[Fast | Plain] = [*fasts]
    for fast in fasts:
        try:
            warm_up(fast, options.batches)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"{fast.name} does not fit in memory; use --pairs below {pairs} ({error})") from error
    notes = []
    if options.plain:
        plain = PlainPretraining(model)
        contenders.append(Plain(recipe, plain, world, [pad_examples(examples, recipe.model) for examples in prepared]))
        try:
            warm_up(contenders[-1], options.batches)
        except torch.OutOfMemoryError:
            notes.append(f"{contenders.pop().name} is skipped: it does not fit in memory")
            torch.cuda.empty_cache()
    product_rates, times, marks = {}, {}, {}
    turns = {contender.name: functools.partial(contender.run, options.steps) for contender in contenders}
    for number in range(options.rounds):
        for name, (timing,) in run_in_turns(turns, 1, device).items():
            times.setdefault(name, []).append(timing.wall / options.steps)
        for precision in precisions:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            with recipe_precision(dataclasses.replace(recipe, precision=precision)):
                product_rates.setdefault(precision, []).append(measure_matrix_flops(device, dtype))
        for fast in fasts:
            for step in range(number * options.steps, (number + 1) * options.steps):  # the same batches as unmarked
                marks.setdefault(fast.name, []).append(fast.parts(step, Clock(device)))
    with recipe_precision(fasts[0].recipe):
        flops = [count_flops(fasts[0], batch) for batch in collated]
    report = {
        "machine": describe_machine(device),
        "recipe": to_json(recipe),
        "pairs": pairs,
        "texts": texts,
        "batches": options.batches,
        "rounds": options.rounds,
        "steps a round": options.steps,
        "flops": {part: statistics.mean(counts.get(part, 0) for counts in flops) for part in PARTS},
        "seconds a step": times,
        "parts": {
            name: {part: statistics.median(times.get(part, 0.0) for times in steps) for part in PARTS}
            for name, steps in marks.items()
        },
        "matrix product": {name: statistics.median(rates) for name, rates in product_rates.items()},
        "memory": {each.name: measure_memory(each, device, options.batches) for each in contenders},
        "compiled graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] if recipe.compile else None,
        "notes": notes,
    }
    if options.workers:
        steps = max(10, options.steps * options.rounds)
        report["with a loader"] = measure_with_loader(fasts[0], samples, pairs, texts, steps, options.workers)
    return report


def check_step(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the losses and gradients of the fast and the plain path in each precision, without dropout."""
    device, recipe = torch.device(options.device), make_benchmark_recipe(options)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dropout=0.0))
    task, world, (pairs, texts) = make_benchmark_task(recipe), World(0, 1, device), choose_sizes(options, recipe, 2)
    samples = make_samples(recipe.model.regions, range(pairs), shape=(800, 600))
    examples = mask_pairs(task, recipe.model.regions, samples) + make_text_examples(task, range(texts))
    model = new_model(recipe, device)
    plain = PlainPretraining(model)
    with recipe_precision(dataclasses.replace(recipe, precision="fp32")):
        theirs = plain(pad_examples(examples, recipe.model).to(device))
        total_loss(theirs).backward()
    report = {}
    for precision in options.precision or ("fp32", "bf16"):
        model.zero_grad()
        fast = Fast(dataclasses.replace(recipe, precision=precision), model, world, [])
        with recipe_precision(fast.recipe):
            losses = fast.losses(collate(examples).to(device))
            total_loss(losses).backward()
        errors = gradient_errors(model, plain)
        worst = max(errors, key=errors.__getitem__)
        loss_error = max(
            abs(float(losses[name][0].detach() / loss.detach()) - 1) for name, (loss, count) in theirs.items() if count
        )
        report[precision] = {
            "losses": loss_error,
            "losses at most": LOSS_BOUND[precision],
            "gradients": errors[worst],
            "gradients at most": GRADIENT_BOUND[precision],
            "worst": worst,
            "within": loss_error <= LOSS_BOUND[precision] and errors[worst] <= GRADIENT_BOUND[precision],
        }
    return {"machine": describe_machine(device), "recipe": to_json(recipe), "apart": report}


def measure_losses(options: argparse.Namespace) -> dict[str, Any]:
    """Train from the same weights on the same batches in each precision, and return the losses of each step."""
    device, base = torch.device(options.device), make_benchmark_recipe(options)
    pairs, texts = choose_sizes(options, base, 32 if device.type == "cuda" else 2)
    chosen = "optimizer.learning_rate" in named_fields(base, options.fields)
    rate = base.optimizer.learning_rate if chosen else LEARNING_RATE
    optimizer = dataclasses.replace(base.optimizer, learning_rate=rate, warmup_steps=options.losses // 10)
    base = dataclasses.replace(base, optimizer=optimizer)
    samples = make_samples(base.model.regions, range(pairs * options.batches))
    curves = {}
    for precision in options.precision or ("fp32", "bf16"):
        recipe = dataclasses.replace(base, precision=precision)
        fast = Fast(recipe, new_model(recipe, device), World(0, 1, device), [])
        data, curve = Stored(recipe, make_benchmark_task(recipe), samples, pairs, texts), []
        with recipe_precision(recipe):
            for step, parts in enumerate(batches(data, range(options.losses), options.workers, device)):
                set_learning_rate(fast.optimizer, step, options.losses, optimizer)
                torch.manual_seed(step)
                losses = fast.losses(parts[0].to(device))
                total_loss(losses).backward()
                fast.update()
                curve.append({name: float(loss.detach()) / max(1, count) for name, (loss, count) in losses.items()})
        curves[precision] = curve
    report = {"machine": describe_machine(device), "recipe": to_json(base), "pairs": pairs, "texts": texts}
    return report | {"losses": curves}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = make_parser("train_step", __doc__)
    command.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    command.add_argument("--recipe", default="pretrain_vlbert", help="pre-training recipe (%(default)s)")
    command.add_argument("--precision", default="", help="one or more of bf16,tf32,fp32; else the recipe's")
    command.add_argument("--pairs", type=int, help="pairs per step (2 on a CPU, 64 on a GPU)")
    command.add_argument("--texts", type=int, help="text-only rows per step (as many as pairs, if the recipe has any)")
    command.add_argument("--batches", type=int, default=4, help="number of different batches (%(default)s)")
    command.add_argument("--rounds", type=int, default=5, help="turns of each contender (%(default)s)")
    command.add_argument("--steps", type=int, help="steps per turn (1 on a CPU, 8 on a GPU)")
    command.add_argument("--no-plain", dest="plain", action="store_false", help="skip the plain path")
    command.add_argument("--workers", type=int, default=0, help="loading processes; 0: skip the loader (%(default)s)")
    command.add_argument("--check", action="store_true", help="compare losses and gradients with the plain path")
    command.add_argument("--losses", type=int, metavar="STEPS", help="losses of this many steps, in each precision")
    options, options.fields = command.parse_known_args(arguments)
    options.precision = [name for name in options.precision.split(",") if name]
    unknown = [name for name in options.precision if name not in PRECISIONS]
    if unknown:
        command.error(f"--precision has {unknown[0]!r}; give one or more of {','.join(PRECISIONS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        command.error("--device cuda: this machine has no GPU")
    options.steps = options.steps or (8 if options.device.startswith("cuda") else 1)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        if options.check:
            report = check_step(options)
            text = format_table(check_table(report))
        elif options.losses:
            report = measure_losses(options)
            text = format_table(losses_table(report))
        else:
            report = measure_step(options)
            text = step_tables(report)
    except (ValueError, OSError) as error:
        sys.exit(f"python -m benchmarks.train_step: {error}")
    print(text, flush=True)
    write_json(options.json, report)
    sys.exit(int(any(not errors["within"] for errors in report.get("apart", {}).values())))


if __name__ == "__main__":
    main()
