"""For how long a training waits to be saved: written in the step, and beside it as training/writer.py does.

    python -m benchmarks.checkpoint [temporary moto ...] [--recipe pretrain_vlbert_base] [--saves 3] [--json FILE]

The model of a recipe with an optimizer that has taken steps, random numbers in all of it, is saved to each root in
turns. ROOT is a folder, s3://bucket/prefix, `temporary` for a folder that goes again, or `moto` for an S3 server of its
own. The share of time is that of a run with --step seconds a step and --save-every.
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from safetensors.torch import save
from torch import Tensor

from benchmarks.killed_writer import s3_of_its_own
from benchmarks.measure import machine, parser, write_json
from benchmarks.synthetic import CLASSES, PIECES, made_up_vocabulary
from storage.object_store import ObjectStore, open_store
from storage.runs import checkpoints
from training.checkpoint_files import optimizer_tensors, remove_old, write_checkpoint
from training.optimizer import make_optimizer
from training.writer import Writer
from vlbert.model.vlbert import VLBert
from vlbert.recipes import RECIPES
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel

RUN = "checkpoint"
Files = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Line:
    """Medians of one way to save to one root, in seconds; cpu are those of this process over one save."""

    root: str
    way: str
    waited: float
    until_whole: float
    cpu: float


def trained(recipe_name: str, device: torch.device) -> Files:
    """What a checkpoint of the recipe holds."""
    recipe = RECIPES[recipe_name]()
    task = make_task(recipe.task, made_up_vocabulary(), CLASSES)
    model = TaskModel(VLBert(recipe.model, PIECES), task).to(device)
    optimizer = make_optimizer(model, recipe.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return {"model.safetensors": model.state_dict(), "optimizer.safetensors": optimizer_tensors(model, optimizer)}


def in_the_step(store: ObjectStore, writer: Writer, step: int, files: Files) -> None:
    """Serialised in memory and put, while the training waits."""
    folder = f"runs/{RUN}/step-{step:07d}"
    for name, tensors in files.items():
        store.put(f"{folder}/{name}", save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))
    store.put(f"{folder}/state.json", b"{}")
    remove_old(store, RUN, 1, best=None)


def beside_it(store: ObjectStore, writer: Writer, step: int, files: Files) -> None:
    write_checkpoint(writer, RUN, step, step, files, {}, 1, metric=None)


WAYS = {"in the step": in_the_step, "beside it": beside_it}


def measured(root: str, store: ObjectStore, files: Files, saves: int) -> list[Line]:
    """Both ways in turns; the first save of each is not counted: it takes the memory that the others use again."""
    writer, found = Writer(store), {way: [] for way in WAYS}
    for _ in range(1 + saves):
        for way, saved in WAYS.items():
            began, cpu = time.perf_counter(), time.process_time()
            saved(store, writer, 1 + sum(map(len, found.values())), files)
            waited = time.perf_counter() - began
            writer.finish()
            found[way].append((waited, time.perf_counter() - began, time.process_time() - cpu))
            assert len(checkpoints(store, RUN)) == 1
    return [
        Line(root, way, *(statistics.median(column) for column in zip(*rows[1:], strict=True)))
        for way, rows in found.items()
    ]


@contextlib.contextmanager
def opened(root: str) -> Iterator[ObjectStore]:
    if root == "moto":
        with s3_of_its_own() as environment:
            os.environ |= environment
            yield open_store("s3://bucket/root")
    elif root == "temporary":
        with tempfile.TemporaryDirectory() as folder:
            yield open_store(folder)
    else:
        yield open_store(root)


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser("checkpoint", __doc__)
    command.add_argument("roots", nargs="*", metavar="ROOT", default=["temporary"])
    command.add_argument("--recipe", default="pretrain_vlbert_base", help="whose model is saved (%(default)s)")
    command.add_argument("--saves", type=int, default=3, help="of each way, to each root (%(default)s)")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    command.add_argument("--save-every", type=int, default=5000, help="steps between two saves (%(default)s)")
    command.add_argument("--step", type=float, default=0.512, help="seconds of a step: the goal's (%(default)s)")
    options = command.parse_args(arguments)
    files = trained(options.recipe, torch.device(options.device))
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    print(f"{options.recipe}: {size / 1e9:.2f} GB, of {options.device}, {os.cpu_count()} CPUs\n", flush=True)
    print(f"{'to':<12}{'written':<14}{'step waits':>11}{'of the time':>13}{'until whole':>13}{'CPU':>9}")
    lines = []
    for root in options.roots:
        with opened(root) as store:
            for line in measured(root, store, files, options.saves):
                share = line.waited / (line.waited + options.save_every * options.step)
                print(
                    f"{root[:11]:<12}{line.way:<14}{line.waited:>9.2f} s{100 * share:>11.3f} %"
                    f"{line.until_whole:>11.2f} s{line.cpu:>7.2f} s",
                    flush=True,
                )
                lines.append(line)
    report = {"machine": machine(options.device), "recipe": options.recipe, "bytes": size, "device": options.device}
    write_json(options.json, report | {"lines": [asdict(line) for line in lines]})


if __name__ == "__main__":
    main()
