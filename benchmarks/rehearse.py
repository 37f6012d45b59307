"""What a training step does on a GPU that is not there: kernels, bytes, waits, memory and the time on a named card.

    python -m benchmarks.rehearse [RECIPE] [--device h200] [--pairs 128] [--gpus 8] [--price EUROS] [field=value ...]
    python -m benchmarks.rehearse --measured benchmarks/results/DATE-gpu/base.json     beside what a real card took
    python -m benchmarks.rehearse --detection [PRESET]       images/s of detection
    python -m benchmarks.rehearse --ranking                  pairs/s of retrieval's ranking, with the recipe's model
    python -m benchmarks.rehearse --here                     the same model of this CPU, beside what this CPU takes

A real step runs on a virtual device (training/virtual_device.py), which computes shapes alone: 128 pairs take seconds.
training/cards.py turns it into time; docs/performance.md says how far that can be trusted.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Table, machine, parser, shown, timed, write_json
from benchmarks.step_parts import PARTS, Clock, marked_step, matrix_flops
from detectors.faster_rcnn import PRESETS
from storage.settings import override, to_json
from training.cards import CARDS, Card, Part
from training.distributed import World
from training.operations import Operation, Recorder
from training.precision import in_precision_of
from training.program import find_recipe
from vlbert.config import Recipe
from vlbert.recipes import RECIPES
from vlbert.rehearsal import (
    Rehearsed,
    TrainingStep,
    made_up_batch,
    new_model,
    rehearse_detection,
    rehearse_ranking,
    rehearse_training,
    without_files,
)

MEMORIES = (24e9, 48e9, 80e9, 141e9)
RESERVED = 1.5e9  # bytes that CUDA, cuDNN and fragments take beside the tensors
IMAGES_RANKED = 8  # at a time
NVLINK = 450e9  # bytes a second of one GPU, each way


def parts_table(parts: dict[str, Part], measured: dict[str, float] | None) -> Table:
    head = ["part", "kernels", "waits", "TFLOP", "GB", "FLOP/byte", "ms", "bound by"]
    table = [head + (["measured ms", "predicted / measured"] if measured else [])]
    whole = Part(**{name: sum(getattr(one, name) for one in parts.values()) for name in vars(Part())})
    for name, part in [*parts.items(), ("the step", whole)]:
        row = [
            name,
            f"{part.kernels:,}",
            f"{part.waits}",
            f"{part.flops / 1e12:,.2f}",
            f"{part.bytes / 1e9:,.1f}",
            f"{part.flops / part.bytes:,.0f}" if part.bytes else "",
            f"{1000 * part.seconds:,.1f}",
            part.bound_by,
        ]
        if measured:
            took = sum(measured.values()) if name == "the step" else measured.get(name, 0.0)
            row += [f"{took:,.1f}", f"{1000 * part.seconds / took:.2f}" if took else ""]
        table.append(row)
    return table


def kinds_table(operations: Sequence[tuple[str, Operation]], most: int = 12) -> Table:
    """The operations that move most bytes."""
    found: dict[str, list[int]] = {}
    for _, one in operations:
        counts = found.setdefault(one.name.removeprefix("aten::"), [0, 0])
        counts[0] += one.kernels
        counts[1] += one.bytes
    rows = sorted(found.items(), key=lambda each: -each[1][1])[:most]
    return [["operation", "kernels", "GB"], *([name, f"{n:,}", f"{size / 1e9:,.1f}"] for name, (n, size) in rows)]


def memory_table(recipe: Recipe, pairs: int, texts: int, rehearsed: Rehearsed) -> Table:
    """The largest step that fits: peaks grow with the pairs, and two of them say how."""
    table = [["pairs that fit", *(f"{memory / 1e9:.0f} GB" for memory in MEMORIES)]]
    few = max(1, pairs // 2)
    for again in (False, True):
        own = dataclasses.replace(recipe, activation_checkpointing=again)
        peaks = [
            rehearsed.peak
            if size == pairs and again == recipe.activation_checkpointing
            else rehearse_training(own, size, texts * size // pairs).peak
            for size in (few, pairs)
        ]
        each = (peaks[1] - peaks[0]) / (pairs - few) if pairs > few else peaks[1]
        base = peaks[1] - each * pairs
        cells = [f"{max(0, int((memory - RESERVED - base) / each)):,}" for memory in MEMORIES]
        table.append(["with activation checkpointing" if again else "without", *cells])
    return table


def several_gpus(held: int, seconds: float, gpus: int) -> str:
    """The step of all of them, each with as many pairs. Gradients go round while the backward pass computes."""
    gradients = held / 3  # AdamW holds two moments beside each weight that learns
    sends = 2 * (gpus - 1) / gpus * gradients / NVLINK
    return (
        f"{gpus} GPUs with as many pairs each: {gradients / 1e6:,.0f} MB of gradients take {1000 * sends:.1f} ms over "
        f"NVLink, beside the backward pass: the step is {1000 * seconds:,.0f} to {1000 * (seconds + sends):,.0f} ms"
    )


def training_report(options: argparse.Namespace, card: Card) -> tuple[dict[str, Any], str]:
    recipe = override(find_recipe(options.recipe, RECIPES)(), options.overrides)
    texts = options.texts if options.texts is not None else (options.pairs if recipe.data.text_batch else 0)
    measured = json.loads(options.measured.read_text())["parts"][recipe.precision] if options.measured else None
    rehearsed = rehearse_training(recipe, options.pairs, texts, marked_step)
    parts = rehearsed.parts(card)
    parts = {name: parts[name] for name in PARTS if name in parts}
    seconds = rehearsed.seconds(card)
    steps = recipe.steps * recipe.data.batch / (options.pairs * options.gpus)
    hours = steps * seconds / 3600
    price = card.price if options.price is None else options.price
    report = {
        "recipe": to_json(recipe),
        "card": card.name,
        "pairs": options.pairs,
        "texts": texts,
        "seconds": seconds,
        "parts": {name: vars(part) | {"seconds": part.seconds} for name, part in parts.items()},
        "waits": [[name, where, count] for (name, where), count in rehearsed.waits.items()],
        "held": rehearsed.held,
        "peak": rehearsed.peak,
        "peak of": rehearsed.peak_of,
    }
    lines = [
        f"{recipe.name}, {recipe.precision}: {options.pairs} pairs and {texts} text rows a step on one {card.name}, "
        "predicted",
        "",
        shown(parts_table(parts, measured), options.markdown),
        "",
        shown(kinds_table(rehearsed.operations), options.markdown),
        "",
        f"{options.pairs / seconds:,.0f} pairs/s; {hours:,.0f} hours of the recipe on {options.gpus} GPUs, "
        f"{hours * options.gpus * price:,.0f} euros at {price:g} an hour",
        "",
        f"the host waits {sum(rehearsed.waits.values())} times a step for the device:",
        *(f"  {count} x {name.removeprefix('aten::')} at {at}" for (name, at), count in rehearsed.waits.items()),
        "",
        f"memory: {rehearsed.held / 1e9:.1f} GB between steps, {rehearsed.peak / 1e9:.1f} at most, made by "
        + ", ".join(
            f"{name or 'weights and optimizer'} {size / 1e9:.1f}"
            for name, size in sorted(rehearsed.peak_of.items(), key=lambda one: -one[1])
            if size > 0.01 * rehearsed.peak
        ),
    ]
    if options.gpus > 1:
        lines.append(several_gpus(rehearsed.held, seconds, options.gpus))
    if options.memory:
        table = memory_table(recipe, options.pairs, texts, rehearsed)
        report["pairs that fit"] = table
        lines += ["", shown(table, options.markdown)]
    return report, "\n".join(lines)


def images_report(options: argparse.Namespace, card: Card) -> tuple[dict[str, Any], str]:
    """Of detection or of ranking: so many at a time."""
    if options.detection:
        what, count = f"detection, {options.detection}", options.batch
        rehearsed = rehearse_detection(PRESETS[options.detection], count, options.precision, options.tf32)
        unit = "images"
    else:
        recipe = override(find_recipe(options.recipe, RECIPES)(), options.overrides)
        captions = recipe.task.rows_at_once // IMAGES_RANKED
        what, count, unit = f"ranking with {recipe.name}", IMAGES_RANKED * captions, "pairs"
        rehearsed = rehearse_ranking(recipe, IMAGES_RANKED, captions)
    parts, seconds = rehearsed.parts(card), rehearsed.seconds(card)
    report = {"what": what, "card": card.name, "at a time": count, "seconds": seconds, "peak": rehearsed.peak}
    report["parts"] = {name: vars(part) | {"seconds": part.seconds} for name, part in parts.items()}
    text = [f"{what}: {count} {unit} at a time on one {card.name}, predicted", ""]
    text += [shown(parts_table(parts, None), options.markdown), ""]
    text += [f"{count / seconds:,.0f} {unit}/s; {rehearsed.peak / 1e9:.1f} GB at most"]
    text += [f"the host waits {sum(rehearsed.waits.values())} times"]
    return report, "\n".join(text)


# --- this CPU ---------------------------------------------------------------------------------------------------------


def here_report(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The step of this CPU by the same reasoning, beside what it takes: what the reasoning is worth."""
    recipe = without_files(override(find_recipe(options.recipe, RECIPES)(), options.overrides))
    cpu, world = torch.device("cpu"), World(0, 1, torch.device("cpu"))
    texts = options.texts if options.texts is not None else (options.pairs if recipe.data.text_batch else 0)
    batch = made_up_batch(recipe, options.pairs, texts)
    step, found = TrainingStep(recipe, new_model(recipe, cpu), world), {}
    with in_precision_of(recipe):
        step.take(batch)
        for _ in range(options.rounds):
            clock = Clock(cpu)
            marked_step(step, batch, clock)
            for part, milliseconds in clock.milliseconds().items():
                found.setdefault(part, []).append(milliseconds)
        with Recorder() as recorder:
            marked_step(step, batch, recorder)
    measured = {part: statistics.median(times) for part, times in found.items()}
    flops = {kind: matrix_flops(cpu, dtype) for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
    x, y, few = *torch.ones(2, 50_000_000).unbind(), torch.randn(8)
    bandwidth = 3 * 4 * len(x) / _least(lambda: torch.add(x, y, out=x))
    launch = _least(lambda: few + few)
    predicted = dict.fromkeys(measured, 0.0)
    for part, one in recorder.parts():
        kind = "bf16" if one.dtype == torch.bfloat16 else "fp32"
        predicted[part] = predicted.get(part, 0.0) + 1000 * (
            launch + max(one.flops / flops[kind], one.bytes / bandwidth)
        )
    table = [["part", "predicted ms", "measured ms", "predicted / measured"]]
    predicted = {part: predicted[part] for part in PARTS if predicted.get(part)}
    whole = {"the step": sum(predicted.values())}, {"the step": sum(measured.values())}
    for part, ms in (predicted | whole[0]).items():
        took = (measured | whole[1])[part]
        table.append([part, f"{ms:,.1f}", f"{took:,.1f}", f"{ms / took:.2f}"])
    report = {
        "machine": machine(),
        "recipe": to_json(recipe),
        "pairs": options.pairs,
        "texts": texts,
        "flops": flops,
        "bandwidth": bandwidth,
        "launch": launch,
        "predicted": predicted,
        "measured": measured,
    }
    title = (
        f"{recipe.name}, {recipe.precision}: {options.pairs} pairs and {texts} text rows a step on {machine()['cpu']}: "
        f"{flops['bf16'] / 1e9:,.0f} GFLOP/s in bf16, {flops['fp32'] / 1e9:,.0f} in fp32, {bandwidth / 1e9:.1f} GB/s, "
        f"{1e6 * launch:.1f} us an operation"
    )
    return report, f"{title}\n\n{shown(table, options.markdown)}"


def _least(work: Callable[[], object], rounds: int = 7) -> float:
    return min(timed(work).wall for _ in range(rounds))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = parser("rehearse", __doc__)
    command.add_argument("recipe", nargs="?", default="pretrain_vlbert_base", help="of pre-training (%(default)s)")
    command.add_argument("--device", choices=sorted(CARDS), default="h200", help="(%(default)s)")
    command.add_argument("--pairs", type=int, help="a step on a GPU (128; with --here 2)")
    command.add_argument("--texts", type=int, help="text-only rows a step (as many as pairs, if the recipe has any)")
    command.add_argument("--gpus", type=int, default=1, help="(%(default)s)")
    command.add_argument("--price", type=float, metavar="EUROS", help="an hour of one GPU (a rough one of the card)")
    command.add_argument("--memory", action="store_true", help="how many pairs fit 24, 48, 80 and 141 GB")
    command.add_argument("--measured", type=Path, metavar="FILE", help="the JSON of benchmarks.train_step on the card")
    command.add_argument("--detection", nargs="?", const="vg_resnet101", metavar="PRESET", help="instead of a training")
    command.add_argument("--batch", type=int, default=8, help="images of detection at a time (%(default)s)")
    command.add_argument("--precision", default="fp32", help="of detection: fp32 or bf16-res5 (%(default)s)")
    command.add_argument("--tf32", action="store_true", help="detection in TF32")
    command.add_argument("--ranking", action="store_true", help="retrieval's ranking, with a recipe of retrieval")
    command.add_argument("--here", action="store_true", help="predict this CPU's step, and measure it")
    command.add_argument("--rounds", type=int, default=3, help="measured steps of --here (%(default)s)")
    command.add_argument("--markdown", action="store_true", help="tables for docs/performance.md")
    command.add_argument("overrides", nargs="*", metavar="field=value")
    options = command.parse_intermixed_args(arguments)
    if "=" in options.recipe:
        options.overrides, options.recipe = [options.recipe, *options.overrides], "pretrain_vlbert_base"
    if options.pairs is None:
        options.pairs = 2 if options.here else 128
    if options.detection and options.detection not in PRESETS:
        command.error(f"--detection {options.detection}: it is one of {', '.join(sorted(PRESETS))}")
    for name in ("pairs", "gpus", "batch", "rounds"):
        if getattr(options, name) < 1:
            command.error(f"--{name} {getattr(options, name)}: it is at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        if options.here:
            report, text = here_report(options)
        elif options.detection or options.ranking:
            report, text = images_report(options, CARDS[options.device])
        else:
            report, text = training_report(options, CARDS[options.device])
    except (ValueError, OSError) as error:
        sys.exit(f"python -m benchmarks.rehearse: {error}")
    print(text, flush=True)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
