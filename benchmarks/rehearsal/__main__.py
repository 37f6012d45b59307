"""Predict a training step on a GPU without having one: its kernels, bytes, waits, memory, and time on a given card.

    python -m benchmarks.rehearsal [RECIPE] [--device h200] [--pairs 128] [--field value ...]
    python -m benchmarks.rehearsal --measured benchmarks/results/DATE-gpu/base.json     compare with a real card

A real step runs on a virtual device (virtual_device.py) that computes only shapes, so that 128 pairs take seconds.
cards.py converts the recorded operations into time. docs/performance.md explains how accurate that is.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Table, format_table, make_parser, write_json
from benchmarks.rehearsal.cards import CARDS, Part, timeline
from benchmarks.rehearsal.virtual_device import DEVICE, VirtualDevice
from benchmarks.step_parts import PARTS, TrainingStep, run_marked_step
from benchmarks.synthetic import make_batch, new_model, without_files
from storage.settings import to_json
from training.distributed import World
from training.program import make_recipe
from vlbert.config import Recipe
from vlbert.recipes import RECIPES


def rehearse_training(recipe: Recipe, pairs: int, texts: int = 0) -> VirtualDevice:
    """Run two steps of a recipe on a virtual device. Return the device, which has recorded the second step by PARTS.

    The first step allocates the optimizer's state. Weights are random and samples are synthetic, so no file is needed.
    """
    recipe = without_files(recipe)
    batch, model = make_batch(recipe, pairs, texts), new_model(recipe, torch.device("cpu"))
    with VirtualDevice() as device:
        batch = batch.pin_memory()  # as training/loading.py does
        step = TrainingStep(recipe, model.to(DEVICE), World(0, 1, DEVICE))
        step.take(batch.to(DEVICE))
        device.start()
        run_marked_step(step, batch, device)
    return device


def parts_table(parts: dict[str, Part], measured: dict[str, float] | None) -> Table:
    head = ["part", "kernels", "waits", "TFLOP", "GB", "FLOP/byte", "ms", "bound by"]
    table = [head + (["measured ms", "predicted / measured"] if measured else [])]
    for name, part in [*parts.items(), ("the step", Part(sum(parts.values(), Part())))]:
        row = [
            name,
            f"{part['kernels']:,}",
            f"{part['waits']}",
            f"{part['flops'] / 1e12:,.2f}",
            f"{part['bytes'] / 1e9:,.1f}",
            f"{part['flops'] / part['bytes']:,.0f}" if part["bytes"] else "",
            f"{1000 * part.seconds:,.1f}",
            part.bound_by,
        ]
        if measured:
            milliseconds = sum(measured.values()) if name == "the step" else measured.get(name, 0.0)
            row += [f"{milliseconds:,.1f}", f"{1000 * part.seconds / milliseconds:.2f}" if milliseconds else ""]
        table.append(row)
    return table


def rehearse_step(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Rehearse a step, and return the report for --json and the text to print."""
    recipe, card = make_recipe(options.recipe, options.fields, RECIPES), CARDS[options.device]
    texts = options.texts if options.texts is not None else (options.pairs if recipe.data.text_batch else 0)
    measured = json.loads(options.measured.read_text())["parts"][recipe.precision] if options.measured else None
    device = rehearse_training(recipe, options.pairs, texts)
    costs = timeline(device.parts(), card, "tf32" if recipe.precision == "tf32" else "ieee")
    parts = {name: costs[name] for name in PARTS if name in costs}
    seconds = sum(part.seconds for part in costs.values())
    waits = Counter((operation.name, operation.location) for operation in device.operations if operation.waits)
    report = {
        "recipe": to_json(recipe),
        "card": card.name,
        "pairs": options.pairs,
        "texts": texts,
        "seconds": seconds,
        "parts": {name: {**part, "seconds": part.seconds} for name, part in parts.items()},
        "waits": [[name, location, count] for (name, location), count in waits.items()],
        "held": device.held_at_start,
        "peak": device.peak,
    }
    lines = [
        f"{recipe.name}, {recipe.precision}: prediction for {options.pairs} pairs and {texts} text rows per step on "
        f"one {card.name}",
        "",
        format_table(parts_table(parts, measured)),
        "",
        f"{options.pairs / seconds:,.0f} pairs/s; memory: {device.held_at_start / 1e9:.1f} GB between steps, "
        f"{device.peak / 1e9:.1f} GB peak",
        f"the host waits for the device {waits.total()} times per step",
        *(f"  {count} x {name.removeprefix('aten::')} at {location}" for (name, location), count in waits.items()),
    ]
    return report, "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = make_parser("rehearsal", __doc__)
    command.add_argument("--device", choices=sorted(CARDS), default="h200", help="card (%(default)s)")
    command.add_argument("--pairs", type=int, default=128, help="pairs per step (%(default)s)")
    command.add_argument("--texts", type=int, help="text-only rows per step (as many as pairs, if the recipe has any)")
    command.add_argument("--measured", type=Path, metavar="FILE", help="JSON of benchmarks.train_step on the real card")
    remaining = [*(sys.argv[1:] if arguments is None else arguments)]
    # Only the first argument can be the recipe: later ones without -- are values of fields, unknown to argparse.
    recipe = "pretrain_vlbert" if not remaining or remaining[0].startswith("-") else remaining.pop(0)
    options, options.fields = command.parse_known_args(remaining, argparse.Namespace(recipe=recipe))
    if options.pairs < 1:
        command.error(f"--pairs is {options.pairs}; it must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        report, text = rehearse_step(options)
    except (ValueError, OSError) as error:
        sys.exit(f"python -m benchmarks.rehearsal: {error}")
    print(text, flush=True)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
