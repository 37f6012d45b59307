"""What a second process gives: steps of pre-training on one process, and on two that share their gradients.

    python -m benchmarks.scaling [--recipe pretrain_vlbert_base_precomputed] [--pairs 8] [--json FILE] [field=value ...]

Every process has one thread. Weak: each takes as many pairs and text rows as the one alone. Strong: together they take
as many. Steps are those of training (training/loop.py) on seeded inputs (benchmarks/step_inputs.py), the median
counts. The gradients' all-reduce is timed by itself, too, as if nothing hid it behind the backward pass.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.step_contenders import measured_recipe, new_model, task_of
from benchmarks.step_inputs import drawn_samples, drawn_texts, masked_pairs
from benchmarks.train_step import machine
from training import distributed
from training.distributed import World
from training.loop import Run, train_steps
from training.optimizer import make_optimizer
from training.precision import autocast, in_precision_of
from vlbert.data.batch import Batch, collate
from vlbert.model.heads import count_parameters
from vlbert.tasks.base import TaskModel

WARM_UP = 2  # steps: DDP makes its buckets anew after the first


@dataclasses.dataclass(eq=False, kw_only=True)
class TimedRun(Run):
    """The same batch in every step; `began` says when each began. Nothing is logged or saved."""

    writer: None = None
    batch: Batch | None = None
    began: list[float] = dataclasses.field(default_factory=list)
    samples_per_step = 0

    def open_log(self) -> None:
        return None

    def batches(self) -> Iterator[list[Batch]]:
        return itertools.repeat([self.batch], self.recipe.steps)

    def prepare(self, step: int) -> None:
        self.began.append(time.perf_counter())
        super().prepare(step)

    def losses(self, model: TaskModel, part: Batch) -> dict:
        with autocast(self.recipe, self.world):
            return model(part.to(self.world.device))

    def keys(self, part: Batch) -> Sequence[str]:
        return part.keys

    def save(self, *_: object) -> None:
        raise AssertionError("nothing is saved where nothing is logged")


def measured(options: argparse.Namespace, world: World) -> dict[str, float]:
    """Seconds of the median step, and of an all-reduce of all gradients by itself."""
    recipe = dataclasses.replace(measured_recipe(options, options.recipe), steps=WARM_UP + options.steps + 1)
    recipe = dataclasses.replace(recipe, **dict.fromkeys(("log_every", "save_every", "validate_every"), 10**6))
    model = new_model(recipe, world.device)
    task, config = task_of(recipe), recipe.model.regions
    samples = drawn_samples(config, range(options.pairs * world.rank, options.pairs * (world.rank + 1)))
    texts = drawn_texts(task, range(options.texts * world.rank, options.texts * (world.rank + 1)))
    batch = collate(masked_pairs(task, config, samples, world.rank) + texts)
    optimizer = make_optimizer(model, recipe.optimizer)
    run = TimedRun(recipe=recipe, world=world, model=model, optimizer=optimizer, batch=batch)
    with in_precision_of(recipe):
        train_steps(run)
    seconds = [after - before for before, after in itertools.pairwise(run.began)][WARM_UP:]
    _, trained = count_parameters(model)
    return {
        "step": statistics.median(seconds),
        "bytes": 4 * trained,
        "all_reduce": all_reduce_seconds(trained, world) if world.size > 1 else 0.0,
    }


def all_reduce_seconds(numbers: int, world: World) -> float:
    """Of so many float32, the median of five."""
    gradients, seconds = torch.zeros(numbers, device=world.device), []
    for _ in range(5):
        distributed.wait_for_all(world)
        start = time.perf_counter()
        dist.all_reduce(gradients)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def run(options: argparse.Namespace, processes: int, share: int) -> dict[str, float]:
    """What a torchrun of so many processes measured, each with the `share`th part of the batch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "benchmarks.scaling", "--recipe", options.recipe, "--steps", str(options.steps)]
    command += ["--pairs", str(options.pairs // share), "--texts", str(options.texts // share)]
    with tempfile.NamedTemporaryFile() as file:
        command += ["--rank-to", file.name, *options.overrides]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        return json.loads(Path(file.name).read_text())


def table(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> str:
    """Efficiency: the speed of two processes as a share of twice that of one."""
    alone = found["one"]["step"]
    lines = [
        f"{options.recipe}, {options.pairs} pairs and {options.texts} text rows, one thread a process, gradients of "
        f"{found['one']['bytes'] / 1e6:.0f} MB",
        "",
        "| processes | pairs a process | s a step | steps/s | pairs/s | efficiency | s in an all-reduce by itself |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, processes, share in (("one", 1, 1), ("weak", 2, 1), ("strong", 2, 2)):
        step, each = found[name]["step"], options.pairs // share
        efficiency = alone / step / share
        label = "1" if name == "one" else f"2, {name}"
        lines.append(
            f"| {label} | {each} | {step:.2f} | {1 / step:.2f} | {each * processes / step:.2f} | {efficiency:.0%} | "
            + (f"{found[name]['all_reduce']:.2f} |" if processes > 1 else "– |")
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default="pretrain_vlbert_base_precomputed", help="of pre-training (%(default)s)")
    parser.add_argument("--pairs", type=int, default=8, help="of one process alone (%(default)s)")
    parser.add_argument("--texts", type=int, default=8, help="text-only rows beside them (%(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="that are timed (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there, too")
    parser.add_argument("--rank-to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_args(arguments)
    options.compile = options.activation_checkpointing = False  # settings of the recipe here: compile=true
    if options.rank_to:
        world = distributed.start()
        found = measured(options, world)
        if world.first:
            options.rank_to.write_text(json.dumps(found))
        distributed.stop(world)
        return
    if options.pairs % 2 or options.texts % 2:
        parser.error("two processes cannot share an odd number of pairs or texts")
    found = {"one": run(options, 1, 1), "weak": run(options, 2, 1), "strong": run(options, 2, 2)}
    print(table(options, found))
    if options.json:
        report = {"machine": machine(torch.device("cpu")), "settings": vars(options) | {"json": None}, "found": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
