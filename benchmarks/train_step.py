"""How long a step of pre-training takes, and what of: the fast path part by part, beside plain fp32 in the same run.

    python -m benchmarks.train_step [--device cuda] [--recipe RECIPE] [--precision bf16,fp32] [--field value ...]
    python -m benchmarks.train_step --check                 losses and gradients of the fast path against the plain one
    python -m benchmarks.train_step --losses 200            the losses of so many steps, in each precision

Inputs are seeded and ragged (benchmarks/synthetic.py); weights are random, of the recipe's sizes. The contenders take
turns, a few steps a round, and the median of the rounds counts. Parts are measured in a pass of their own, and compared
with the step without marks: the table shows what they do not explain. docs/performance.md says how to read it.
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

from benchmarks.measure import in_turns, machine, parser, shown, synchronise, write_json
from benchmarks.plain import PlainPretraining, gradient_errors, padded
from benchmarks.step_contenders import (
    Fast,
    Plain,
    Stored,
    measured_recipe,
    memory,
    warm_up,
)
from benchmarks.step_parts import PARTS, Clock, counted_flops, matrix_flops, total
from benchmarks.step_tables import check_table, losses_table, step_tables
from benchmarks.synthetic import drawn_samples, drawn_texts, masked_pairs, new_model, task_of
from storage.sample import Sample
from storage.settings import named_fields, to_json
from training.distributed import World
from training.loading import batches
from training.optimizer import set_learning_rate
from training.precision import recipe_precision
from vlbert.config import Recipe
from vlbert.data.batch import Example, collate

PRECISIONS = ("bf16", "tf32", "fp32")
LEARNING_RATE = 1e-4  # of --losses, where none is given: a few hundred steps from random weights show something
# How far losses, and any parameter's gradient, may be from the plain path's, relative. fp32: the order of sums. bf16
# keeps 8 bits, and a ReLU that falls on the other side of zero takes its gradient with it.
LOSS_BOUND = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}
GRADIENT_BOUND = {"fp32": 1e-3, "tf32": 0.1, "bf16": 0.5}


def amounts(options: argparse.Namespace, recipe: Recipe, few: int) -> tuple[int, int]:
    """Pairs and text-only rows of a step."""
    pairs = options.pairs or few
    return pairs, options.texts if options.texts is not None else (pairs if recipe.data.text_batch else 0)


def with_loader(
    contender: Fast, samples: Sequence[Sample], pairs: int, texts: int, steps: int, workers: int
) -> dict[str, float]:
    """Pairs a second, and the share of the time that the step waits for data, when `workers` make every batch anew."""
    recipe, device = contender.recipe, contender.world.device
    data = Stored(recipe, task_of(recipe), samples, pairs, texts)
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
            loss = total(contender.losses(parts[0].to(device)))
            loss.backward()
            contender.update()
            loss.item()  # as the loop, which looks at every loss
    synchronise(device)
    seconds = time.perf_counter() - start
    return {"workers": workers, "pairs/s": steps * pairs / seconds, "data wait": waited / seconds}


def step_report(options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one recipe's step."""
    device, recipe = torch.device(options.device), measured_recipe(options)
    world, task = World(0, 1, device), task_of(recipe)
    pairs, texts = amounts(options, recipe, 64 if device.type == "cuda" else 2)
    samples = drawn_samples(recipe.model.regions, range(pairs * options.batches))
    prepared: list[list[Example]] = [
        masked_pairs(task, recipe.model.regions, samples[first : first + pairs], seed=first)
        + drawn_texts(task, range(first, first + texts))
        for first in range(0, len(samples), pairs)
    ]
    collated = [collate(examples) for examples in prepared]
    if device.type == "cuda":
        collated = [batch.pin_memory() for batch in collated]
    precisions = options.precision or [recipe.precision]
    model = new_model(recipe, device)
    contenders: list[Fast | Plain] = [
        Fast(dataclasses.replace(recipe, precision=precision), model, world, collated) for precision in precisions
    ]
    for fast in contenders:
        try:
            warm_up(fast, options.batches)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"{fast.name} does not fit; give --pairs less than {pairs} ({error})") from error
    notes = []
    if options.plain:
        plain = PlainPretraining(model)
        contenders.append(Plain(recipe, plain, world, [padded(examples, recipe.model) for examples in prepared]))
        try:
            warm_up(contenders[-1], options.batches)
        except torch.OutOfMemoryError:
            notes.append(f"{contenders.pop().name} is left out: it does not fit")
            torch.cuda.empty_cache()
    best, times, marks = {}, {}, {}
    turns = {contender.name: functools.partial(contender.run, options.steps) for contender in contenders}
    for number in range(options.rounds):
        for name, (spent,) in in_turns(turns, 1, device).items():
            times.setdefault(name, []).append(spent.wall / options.steps)
        for precision in precisions:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            with recipe_precision(dataclasses.replace(recipe, precision=precision)):
                best.setdefault(precision, []).append(matrix_flops(device, dtype))
        for fast in (one for one in contenders if isinstance(one, Fast)):
            for step in range(number * options.steps, (number + 1) * options.steps):  # of those without marks
                marks.setdefault(fast.name, []).append(fast.parts(step, Clock(device)))
    with recipe_precision(contenders[0].recipe):
        flops = [counted_flops(contenders[0], batch) for batch in collated]
    report = {
        "machine": machine(device),
        "recipe": to_json(recipe),
        "pairs": pairs,
        "texts": texts,
        "batches": options.batches,
        "rounds": options.rounds,
        "steps a round": options.steps,
        "flops": {part: statistics.mean(each.get(part, 0) for each in flops) for part in PARTS},
        "seconds a step": times,
        "parts": {name: _means(found) for name, found in marks.items()},
        "matrix product": {name: statistics.median(found) for name, found in best.items()},
        "memory": {contender.name: memory(contender, device) for contender in contenders},
        "compiled graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] if recipe.compile else None,
        "notes": notes,
    }
    if options.workers:
        fast = next(one for one in contenders if isinstance(one, Fast))
        steps = max(10, options.steps * options.rounds)
        report["with a loader"] = with_loader(fast, samples, pairs, texts, steps, options.workers)
    return report


def _means(marks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Part -> milliseconds: of each part the median of all steps."""
    return {part: statistics.median(found.get(part, 0.0) for found in marks) for part in PARTS}


def check_report(options: argparse.Namespace) -> dict[str, Any]:
    """How far losses and gradients of the fast path are from the plain one's, without dropout, in each precision."""
    device, recipe = torch.device(options.device), measured_recipe(options)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dropout=0.0))
    task, world, (pairs, texts) = task_of(recipe), World(0, 1, device), amounts(options, recipe, 2)
    samples = drawn_samples(recipe.model.regions, range(pairs), shape=(800, 600))
    examples = masked_pairs(task, recipe.model.regions, samples) + drawn_texts(task, range(texts))
    model = new_model(recipe, device)
    plain = PlainPretraining(model)
    with recipe_precision(dataclasses.replace(recipe, precision="fp32")):
        wanted = plain(padded(examples, recipe.model).to(device))
        total(wanted).backward()
    found = {}
    for precision in options.precision or ("fp32", "bf16"):
        model.zero_grad()
        fast = Fast(dataclasses.replace(recipe, precision=precision), model, world, [])
        with recipe_precision(fast.recipe):
            losses = fast.losses(collate(examples).to(device))
            total(losses).backward()
        errors = gradient_errors(model, plain)
        worst = max(errors, key=errors.get)
        apart = max(
            abs(float(losses[name][0].detach() / loss.detach()) - 1) for name, (loss, count) in wanted.items() if count
        )
        found[precision] = {
            "losses": apart,
            "losses at most": LOSS_BOUND[precision],
            "gradients": errors[worst],
            "gradients at most": GRADIENT_BOUND[precision],
            "worst": worst,
            "within": apart <= LOSS_BOUND[precision] and errors[worst] <= GRADIENT_BOUND[precision],
        }
    return {"machine": machine(device), "recipe": to_json(recipe), "apart": found}


def losses_report(options: argparse.Namespace) -> dict[str, Any]:
    """Losses of the same steps from the same weights, in each precision."""
    device, base = torch.device(options.device), measured_recipe(options)
    pairs, texts = amounts(options, base, 32 if device.type == "cuda" else 2)
    own = "optimizer.learning_rate" in named_fields(base, options.fields)
    rate = base.optimizer.learning_rate if own else LEARNING_RATE
    rates = dataclasses.replace(base.optimizer, learning_rate=rate, warmup_steps=options.losses // 10)
    base = dataclasses.replace(base, optimizer=rates)
    samples = drawn_samples(base.model.regions, range(pairs * options.batches))
    curves = {}
    for precision in options.precision or ("fp32", "bf16"):
        recipe = dataclasses.replace(base, precision=precision)
        fast = Fast(recipe, new_model(recipe, device), World(0, 1, device), [])
        data, curve = Stored(recipe, task_of(recipe), samples, pairs, texts), []
        with recipe_precision(recipe):
            for step, parts in enumerate(batches(data, range(options.losses), options.workers, device)):
                set_learning_rate(fast.optimizer, step, options.losses, rates)
                torch.manual_seed(step)
                losses = fast.losses(parts[0].to(device))
                total(losses).backward()
                fast.update()
                curve.append({name: float(loss.detach()) / max(1, count) for name, (loss, count) in losses.items()})
        curves[precision] = curve
    return {"machine": machine(device), "recipe": to_json(base), "pairs": pairs, "texts": texts, "losses": curves}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = parser("train_step", __doc__)
    command.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    command.add_argument("--recipe", default="pretrain_vlbert", help="of pre-training (%(default)s)")
    command.add_argument("--precision", default="", help="one or more of bf16,tf32,fp32; else the recipe's")
    command.add_argument("--pairs", type=int, help="a step (2 on a CPU, 64 on a GPU)")
    command.add_argument("--texts", type=int, help="text-only rows a step (as many as pairs, if the recipe has any)")
    command.add_argument("--batches", type=int, default=4, help="different batches (%(default)s)")
    command.add_argument("--rounds", type=int, default=5, help="turns of each contender (%(default)s)")
    command.add_argument("--steps", type=int, help="steps of a turn (1 on a CPU, 8 on a GPU)")
    command.add_argument("--no-plain", dest="plain", action="store_false", help="leave the plain path out")
    command.add_argument(
        "--workers", type=int, default=0, help="loading processes; 0: leave the loader out (%(default)s)"
    )
    command.add_argument("--check", action="store_true", help="hold losses and gradients against the plain path")
    command.add_argument("--losses", type=int, metavar="STEPS", help="losses of so many steps, in each precision")
    options, options.fields = command.parse_known_args(arguments)
    options.precision = [name for name in options.precision.split(",") if name]
    unknown = [name for name in options.precision if name not in PRECISIONS]
    if unknown:
        command.error(f"--precision {unknown[0]}: it is one or more of {','.join(PRECISIONS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        command.error("--device cuda: there is no GPU here")
    options.steps = options.steps or (8 if options.device.startswith("cuda") else 1)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        if options.check:
            report = check_report(options)
            text = shown(check_table(report))
        elif options.losses:
            report = losses_report(options)
            text = shown(losses_table(report))
        else:
            report = step_report(options)
            text = step_tables(report)
    except (ValueError, OSError) as error:
        sys.exit(f"python -m benchmarks.train_step: {error}")
    print(text, flush=True)
    write_json(options.json, report)
    sys.exit(int(any(not found["within"] for found in report.get("apart", {}).values())))


if __name__ == "__main__":
    main()
