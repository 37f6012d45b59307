"""The training program: one process and two, stopped and resumed, in a folder and a bucket, and its refusals."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname

import numpy as np
import pytest
import torch
from places import PROJECT
from programs import command_line, losses, torchrun
from s3 import s3_server
from safetensors.torch import load_file
from tiny import TINY_MODEL, tiny_recipe, tiny_root

from storage.object_store import StorageUnreachable, open_store
from storage.runs import checkpoints
from storage.settings import override
from training.distributed import ALONE
from training.log import read_metrics
from vlbert.config import Recipe
from vlbert.data.corpus import make_corpus
from vlbert.resume import finish_if_complete
from vlbert.train import main, train


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("train"))


def run(root: Path, name: str, **changes) -> Recipe:
    recipe = tiny_recipe(root, run_name=name, **changes)
    train(recipe, ALONE)
    return recipe


def weights(root: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(root / "runs" / name / f"step-{step:07d}" / "model.safetensors")


@pytest.fixture(scope="module")
def six_steps(root) -> list[tuple]:
    """The losses of an uninterrupted run."""
    run(root, "whole")
    return losses(root, "whole")


def test_a_killed_run_goes_on_to_the_bit(root, six_steps, capsys):
    run(root, "killed")
    # As if it had been killed in step 5: the last checkpoint is gone, the metrics run ahead of the one before.
    for file in (root / "runs" / "killed" / "step-0000006").iterdir():
        file.unlink()
    capsys.readouterr()
    run(root, "killed")
    assert re.search(r"^killed resumes from \S+/step-0000003, step 3 of 6$", capsys.readouterr().out, re.MULTILINE)
    assert losses(root, "killed") == six_steps
    whole, resumed = weights(root, "whole", 6), weights(root, "killed", 6)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    run(root, "other", steps=1, data={"seed": 1})
    assert losses(root, "other") != six_steps[:1]


def test_a_finished_run_changes_nothing(root, six_steps, capsys):
    before = {path: path.stat().st_mtime_ns for path in (root / "runs" / "whole").rglob("*")}
    recipe = tiny_recipe(root, run_name="whole")
    assert "words_accuracy" in train(recipe, ALONE)
    printed = capsys.readouterr().out
    assert printed.startswith("whole is complete")
    assert finish_if_complete(recipe, 2) == printed.strip()
    assert {path: path.stat().st_mtime_ns for path in (root / "runs" / "whole").rglob("*")} == before
    for refused in ("--steps=7", "--optimizer.learning_rate=0.5", "--data.root=", "--run_name=nobody"):
        assert finish_if_complete(override(recipe, [refused]), 1) is None, "left to the program"
    assert finish_if_complete(recipe, 3) is None, "which cannot share the batch"
    # Settled, as after a kill that left more checkpoints than it keeps.
    shutil.copytree(root / "runs" / "whole", root / "runs" / "unsettled")
    assert finish_if_complete(tiny_recipe(root, run_name="unsettled", keep_checkpoints=1), 1)
    assert not (root / "runs" / "unsettled" / "step-0000003" / "state.json").exists()


@pytest.mark.slow
def test_one_process_and_two_compute_the_same_and_go_on_from_each_other(root):
    changes = {"model": dataclasses.replace(TINY_MODEL, dropout=0.0)}  # dropout is drawn on every rank by itself
    run(root, "one", **changes)
    shutil.copytree(root / "runs" / "one", root / "runs" / "one-then-two")
    result = torchrun(root, "two", 2, **changes)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len([line for line in result.stdout.splitlines() if line.startswith("step 6/6  loss ")]) == 1
    one, two = weights(root, "one", 6), weights(root, "two", 6)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=2e-4)
    shutil.copytree(root / "runs" / "two", root / "runs" / "two-then-one")

    for name in ("one-then-two", "two-then-one"):
        shutil.rmtree(root / "runs" / name / "step-0000006")
    run(root, "two-then-one", **changes)
    result = torchrun(root, "one-then-two", 2, **changes)
    assert "resumes from" in result.stdout, result.stderr[-3000:]
    for name in ("two", "two-then-one", "one-then-two"):
        np.testing.assert_allclose(np.array(losses(root, name)), np.array(losses(root, "one")), rtol=2e-5)


def test_a_resumed_run_refuses_other_settings(root, six_steps, tmp_path):
    (tmp_path / "lines.txt").write_text("a red square\n" * 20)
    make_corpus(tmp_path / "text", [tmp_path / "lines.txt"], root / "text" / "vocab.txt", 0, [])
    recipe = tiny_recipe(root, run_name="whole", steps=8)
    faster = dataclasses.replace(recipe.optimizer, learning_rate=0.5)
    for changes, named in (
        ({"optimizer": faster}, "optimizer.learning_rate=0.002, but the recipe has 0.5"),
        ({"data": dataclasses.replace(recipe.data, chunk=4)}, "data.chunk=1, but the recipe has 4"),
        ({"model": dataclasses.replace(recipe.model, dropout=0.3)}, r"model.dropout=\S+, but the recipe has 0.3"),
        ({"data": dataclasses.replace(recipe.data, text_corpus=str(tmp_path / "text"))}, "is not the corpus that"),
    ):
        with pytest.raises(ValueError, match=named):
            train(dataclasses.replace(recipe, **changes), ALONE)
    folder = next((root / "held-out" / "regions").glob("*/snapshots"))
    folder.rename(root / "elsewhere")
    with pytest.raises(ValueError, match="is missing; .*the run validates on held-out: restore its files"):
        train(recipe, ALONE)
    (root / "elsewhere").rename(folder)
    cached = dataclasses.replace(recipe.data, cache=str(root / "cache"), cache_gb=1.0)
    assert train(dataclasses.replace(recipe, steps=6, data=cached), ALONE), "a cache decides no sample"
    with pytest.raises(ValueError, match=r"nothing/regions has no region shards.*the run validates on nothing: "):
        run(root, "no-held-out", data={"held_out": ("nothing",)})


def test_what_a_run_started_from_is_not_needed_to_go_on(root, six_steps):
    run(root, "source", steps=1)
    source = root / "runs" / "source" / "step-0000001"
    changes = {"init_from": str(source), "vocabulary": None}
    run(root, "heir", steps=2, **changes)
    for file in source.iterdir():
        file.unlink()
    train(tiny_recipe(root, run_name="heir", steps=3, **changes), ALONE)
    assert [line[0] for line in losses(root, "heir")] == [1, 2, 3]
    with pytest.raises(ValueError, match="was trained with init_from=.*, but the recipe has None"):
        train(tiny_recipe(root, run_name="heir", steps=4), ALONE)


def test_a_run_lives_in_a_bucket(root, tmp_path, monkeypatch):
    with s3_server("models"):
        store = open_store("s3://models/demo")
        for dataset in ("captions", "held-out"):
            for path in sorted(p for p in (root / dataset).rglob("*") if p.is_file()):
                store.put(str(path.relative_to(root)), path)
        recipe = tiny_recipe(root, {"root": "s3://models/demo"}, steps=2, run_name="cloud")
        monkeypatch.chdir(tmp_path)
        train(recipe, ALONE)
        assert checkpoints(store, "cloud") == ["runs/cloud/step-0000002"]
        assert list((tmp_path / "runs/cloud/tensorboard").iterdir()), "beside the program"
        train(dataclasses.replace(recipe, steps=3), ALONE)
        assert [line["step"] for line in read_metrics(store, "cloud", "training")] == [1, 2, 3]


def test_bad_settings_end_the_program_before_it_begins(root):
    for more, named in (
        ("--data.root=", "data.root is not set"),
        ("--trackers=gone", "there is no tracker gone, only"),
    ):
        with pytest.raises(SystemExit, match=f"^vlbert train pretrain_vlbert: .*{named}"):
            main(command_line(root, "refused", more))
    assert not (root / "runs" / "refused").exists()


def test_a_run_that_another_process_took_over_ends_and_saves_nothing_more(root):
    store, claim, heir = open_store(str(root)), "runs/lost/claims/writer.txt", b"process 1 on another, , "

    def observe(step: int, parts: object) -> None:
        if step == 4:
            store.put(claim, heir)

    with pytest.raises(ValueError, match=f"{claim} was .*taken over .*process 1 on another.*start again to resume"):
        train(tiny_recipe(root, run_name="lost"), ALONE, observe)
    assert f"{checkpoints(store, 'lost')}".count("0000006") == 0
    assert max((line[0] for line in losses(root, "lost")), default=0) < 6
    assert store.get(claim) == heir
    store.delete(claim)


def test_a_root_that_is_not_there_is_named_and_not_made(tmp_path):
    recipe = tiny_recipe(tmp_path / "absent")
    with pytest.raises(StorageUnreachable, match=f"cannot read the folder {tmp_path}/absent: "):
        train(recipe, ALONE)
    assert finish_if_complete(recipe, 1) is None
    assert not list(tmp_path.iterdir())


# Trains the tiny recipe; in its fifth step it waits to be killed.
WAITING = """
import sys, time
from pathlib import Path

import storage.claims
from tiny import tiny_recipe
from training.distributed import ALONE
from vlbert.train import train

storage.claims.RENEWAL = 0.5  # in place of 20 s

def observe(step, parts):
    if step == 4:
        print("waits", flush=True)
        time.sleep(600)

train(tiny_recipe(Path(sys.argv[1]), run_name="one writer"), ALONE, observe)
"""


@pytest.mark.slow
def test_a_run_has_one_writer_and_goes_on_at_once_when_that_is_killed(root, six_steps, capsys):
    command, path = [sys.executable, "-c", WAITING, str(root)], os.pathsep.join([str(PROJECT), str(PROJECT / "tests")])
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert "waits\n" in iter(first.stdout.readline, "")
            second = torchrun(root, "one writer", 2)
            assert second.returncode == 1, second.stderr
            (line,) = [line for line in second.stderr.splitlines() if "one writer" in line]
            assert line == (
                f"vlbert train pretrain_vlbert: {root}/runs/one writer is trained by process {first.pid} on "
                f"{gethostname()}; wait until it ends, stop it, or start another run: --run_name=NAME"
            )
        finally:
            first.kill()
    begun = time.monotonic()
    run(root, "one writer")
    printed = capsys.readouterr().out
    assert "one writer resumes from" in printed
    assert "waiting" not in printed
    assert time.monotonic() - begun < 60, "a claim that is not renewed counts for two minutes"
    assert losses(root, "one writer") == six_steps, "each step once"
    assert not list((root / "runs" / "one writer").glob("claims/*"))
