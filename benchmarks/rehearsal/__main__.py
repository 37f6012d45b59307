"""What a training step does on a GPU that is not there: kernels, bytes, waits, memory and the time on a named card.

    python -m benchmarks.rehearsal [RECIPE] [--device h200] [--pairs 128] [--field value ...]
    python -m benchmarks.rehearsal --measured benchmarks/results/DATE-gpu/base.json     beside what a real card took

A real step runs on a virtual device (virtual_device.py), which computes shapes alone: 128 pairs take seconds. cards.py
turns it into time; docs/performance.md says how far that can be trusted.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Table, parser, shown, write_json
from benchmarks.rehearsal.cards import CARDS, Part, timeline
from benchmarks.rehearsal.virtual_device import DEVICE, VirtualDevice
from benchmarks.step_parts import PARTS, TrainingStep, marked_step
from benchmarks.synthetic import made_up_batch, new_model, without_files
from storage.settings import to_json
from training.distributed import World
from training.program import make_recipe
from vlbert.config import Recipe
from vlbert.recipes import RECIPES


def rehearse_training(recipe: Recipe, pairs: int, texts: int = 0) -> VirtualDevice:
    """The device after the second step of the recipe over so many pairs and text-only rows, recorded by PARTS; in the
    first one the optimizer allocates. Weights are random and samples are made up: no file is needed."""
    recipe = without_files(recipe)
    batch, model = made_up_batch(recipe, pairs, texts), new_model(recipe, torch.device("cpu"))
    with VirtualDevice() as device:
        batch = batch.pin_memory()  # as training/loading.py does
        step = TrainingStep(recipe, model.to(DEVICE), World(0, 1, DEVICE))
        step.take(batch.to(DEVICE))
        device.start()
        marked_step(step, batch, device)
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
            took = sum(measured.values()) if name == "the step" else measured.get(name, 0.0)
            row += [f"{took:,.1f}", f"{1000 * part.seconds / took:.2f}" if took else ""]
        table.append(row)
    return table


def training_report(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Every number of the rehearsal, and the page that is printed."""
    recipe, card = make_recipe(options.recipe, options.fields, RECIPES), CARDS[options.device]
    texts = options.texts if options.texts is not None else (options.pairs if recipe.data.text_batch else 0)
    measured = json.loads(options.measured.read_text())["parts"][recipe.precision] if options.measured else None
    device = rehearse_training(recipe, options.pairs, texts)
    found = timeline(device.parts(), card, "tf32" if recipe.precision == "tf32" else "ieee")
    parts, seconds = {name: found[name] for name in PARTS if name in found}, sum(one.seconds for one in found.values())
    waits = Counter((one.name, one.uri) for one in device.operations if one.waits)
    report = {
        "recipe": to_json(recipe),
        "card": card.name,
        "pairs": options.pairs,
        "texts": texts,
        "seconds": seconds,
        "parts": {name: {**part, "seconds": part.seconds} for name, part in parts.items()},
        "waits": [[name, where, count] for (name, where), count in waits.items()],
        "held": device.held_at_start,
        "peak": device.peak,
    }
    lines = [
        f"{recipe.name}, {recipe.precision}: {options.pairs} pairs and {texts} text rows a step on one {card.name}, "
        "predicted",
        "",
        shown(parts_table(parts, measured)),
        "",
        f"{options.pairs / seconds:,.0f} pairs/s; memory: {device.held_at_start / 1e9:.1f} GB between steps, "
        f"{device.peak / 1e9:.1f} at most",
        f"the host waits {waits.total()} times a step for the device",
        *(f"  {count} x {name.removeprefix('aten::')} at {where}" for (name, where), count in waits.items()),
    ]
    return report, "\n".join(lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = parser("rehearsal", __doc__)
    command.add_argument("--device", choices=sorted(CARDS), default="h200", help="(%(default)s)")
    command.add_argument("--pairs", type=int, default=128, help="a step (%(default)s)")
    command.add_argument("--texts", type=int, help="text-only rows a step (as many as pairs, if the recipe has any)")
    command.add_argument("--measured", type=Path, metavar="FILE", help="the JSON of benchmarks.train_step on the card")
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    # Only the first argument may be the recipe: others without -- are values of fields, which argparse does not know.
    recipe = "pretrain_vlbert" if not given or given[0].startswith("-") else given.pop(0)
    options, options.fields = command.parse_known_args(given, argparse.Namespace(recipe=recipe))
    if options.pairs < 1:
        command.error(f"--pairs {options.pairs}: it is at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        report, text = training_report(options)
    except (ValueError, OSError) as error:
        sys.exit(f"python -m benchmarks.rehearsal: {error}")
    print(text, flush=True)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
