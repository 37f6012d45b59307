"""The training program under torchrun, what its log says, and what an evaluation wrote."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
from places import PROJECT
from tiny import as_overrides, tiny_recipe

from storage.object_store import open_store
from training.log import read_metrics
from vlbert.recipes import RECIPES

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def losses(root: Path, name: str) -> list[tuple]:
    kept = ("loss_words", "loss_text_words", "loss_regions")
    lines = read_metrics(open_store(str(root)), name, "training")
    return [(line["step"], *(line.get(loss) for loss in kept)) for line in lines]


def rows_in(folder: Path) -> list[dict]:
    return pq.read_table(folder / "predictions.parquet").to_pylist()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def command_line(root: Path, name: str, *more: str, **changes) -> list[str]:
    """The arguments of `vlbert.train` that make a recipe of it."""
    recipe = tiny_recipe(root, run_name=name, **changes)
    return ["pretrain_vlbert", "--size=demo", *as_overrides(recipe, RECIPES["pretrain_vlbert"]("demo")), *more]


def torchrun(root: Path, name: str, processes: int, *more: str, **changes) -> subprocess.CompletedProcess:
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", "-m", "vlbert.train"]
    command += command_line(root, name, *more, **changes)
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240)


def launched(
    folder: Path,
    program: str,
    *arguments: object,
    processes: int = 2,
    options: Sequence[str] = ("--standalone",),
    **environment: str,
) -> subprocess.Popen:
    """torchrun of a program's text, in the folder."""
    (folder / "rank.py").write_text(program)
    paths = os.pathsep.join([str(PROJECT), str(PROJECT / "tests")])
    return subprocess.Popen(
        [*TORCHRUN, *options, f"--nproc-per-node={processes}", "rank.py", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen, seconds: float = 240) -> tuple[int, str, str]:
    try:
        printed, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, printed, errors
