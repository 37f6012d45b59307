"""docs/your-own-task.md: its file, outside this package, trains, learns and is evaluated."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from places import PROJECT
from tiny import COLOURS, TINY_MODEL, as_overrides, commit_samples, tiny_sample

from training.optimizer import OptimizerConfig
from vlbert.config import Recipe
from vlbert.tasks import TASKS

NEEDED = dict.fromkeys(["example", "head", "losses", "predictions", "metrics"], lambda self: None)  # methods


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of somebody else's with the document's file in it, and a root with drawn samples of one shape each."""
    folder = tmp_path_factory.mktemp("own")
    (code,) = re.findall(r"```python\n(.*?)```", (PROJECT / "docs" / "your-own-task.md").read_text(), re.DOTALL)
    (folder / "colours.py").write_text(code)
    commit_samples(folder / "root", "captions", [tiny_sample(i, regions=1) for i in range(48)])
    commit_samples(folder / "root", "held-out", [tiny_sample(1000 + i, regions=1) for i in range(24)])
    return folder


def recipe_of(folder: Path) -> Recipe:
    """What the document's function returns."""
    spec = importlib.util.spec_from_file_location("colours", folder / "colours.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["colours"] = module  # dataclasses look it up
    try:
        spec.loader.exec_module(module)
        return module.finetune_colours()
    finally:
        del sys.modules["colours"]
        TASKS.pop(module.ColourSettings)


def program(folder: Path, name: str, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess:
    """`python -m NAME`, or the same under torchrun, in the folder of the file."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"] if processes > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        [sys.executable, "-m", *launch, name, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def trained(folder: Path) -> str:
    """The run, trained for some steps from random weights; what it printed."""
    recipe = recipe_of(folder)
    tiny = dataclasses.replace(
        recipe,
        model=dataclasses.replace(TINY_MODEL, dropout=0.0),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
        data=dataclasses.replace(recipe.data, root="root", batch=16, workers=0),
        steps=60,
        validate_every=60,
        save_every=60,
        random_init=True,
    )
    ended = program(folder, "vlbert.train", "colours:finetune_colours", *as_overrides(tiny, recipe))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_it_trains_and_learns_from_the_image(folder: Path, trained: str):
    lines = (folder / "root/runs/finetune_colours/metrics.jsonl").read_text().splitlines()
    (last,) = [line for line in map(json.loads, lines) if line["kind"] == "validation"]
    assert last["accuracy"] >= last["chance"] + 0.3
    assert last["accuracy_grounding_gap"] >= 0.3, "only the image shows the colour"
    assert not {"chance_shuffled", "chance_grounding_gap"} & last.keys(), "it does not depend on images"
    assert "Reported in the paper: no number" in trained


@pytest.mark.slow
def test_it_is_evaluated_from_its_folder(folder: Path, trained: str):
    recipe = recipe_of(folder)
    model = as_overrides(dataclasses.replace(recipe, model=TINY_MODEL), recipe)
    ended = program(
        folder,
        "vlbert.evaluation.evaluate",
        "colours:finetune_colours",
        "root/runs/finetune_colours",
        "held-out",
        *model,
    )
    assert ended.returncode == 0, ended.stderr
    place = folder / "root/runs/finetune_colours/evaluations/held-out-step-0000060"
    summary = json.loads((place / "metrics.json").read_text())
    rows = pq.read_table(place / "predictions.parquet").to_pylist()
    assert summary["examples"] == {"all": 24, "predicted": 24, "unreadable": 0, "skipped": 0, "invalid": 0}
    assert [row["key"] for row in rows] == [tiny_sample(1000 + i, regions=1).key for i in range(24)]
    assert {row["ground_truth"] for row in rows} <= set(COLOURS)
    assert summary["metrics"]["accuracy"] == sum(row["answer"] == row["ground_truth"] for row in rows) / 24
    assert summary["metrics"]["accuracy"] >= summary["metrics"]["chance"] + 0.3
    assert rows[0]["question"].startswith("a [MASK] ")
