"""The training program: one process and two, stopped and resumed, in a folder and a bucket, and its refusals."""

import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from places import PROJECT
from programs import command_line, losses, torchrun
from s3 import s3_server
from safetensors.torch import load_file, save_file
from seeded import reseal
from tiny import TINY_MODEL, commit_samples, tiny_recipe, tiny_root, tiny_sample
from writing import wait_for

from storage.object_store import open_store
from storage.runs import checkpoints, open_folder
from storage.settings import override
from training.distributed import World
from training.log import read_metrics
from vlbert.config import Recipe
from vlbert.data.corpus import make_corpus
from vlbert.resume import find_complete
from vlbert.train import main, train


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("train"))


ALONE = World(0, 1, torch.device("cpu"))


def run(root: Path, name: str, **changes) -> Recipe:
    recipe = tiny_recipe(root, run_name=name, **changes)
    train(recipe, ALONE)
    return recipe


def weights(root: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(root / "runs" / name / f"step-{step:07d}" / "model.safetensors")


@pytest.mark.slow
def test_after_ctrl_c_the_next_start_goes_on(root, tmp_path):
    """torchrun sends its ranks once more what the terminal has sent them."""
    workers = dataclasses.replace(tiny_recipe(root).data, workers=1)
    arguments = command_line(root, "interrupted", steps=10**6, data=workers)
    program = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "vlbert.train", *arguments]
    output = tmp_path / "output"
    with open(output, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *program],
            cwd=PROJECT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            process_group=0,
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # also under nohup
        )
    try:
        wait_for(lambda: "step 3/" in output.read_text(), 240)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
        assert process.wait(timeout=120) == 1
    finally:
        process.kill()
        process.wait()
    printed = output.read_text()
    (line,) = re.findall("^vlbert train .*: stopped: after step .*$", printed, re.MULTILINE)
    assert printed.count("stopping: this step is finished and saved") == 1
    checkpoint = Path(line.rpartition(" goes on from ")[2])
    last = int(checkpoint.name.removeprefix("step-"))
    run(root, "interrupted", steps=last + 1, data=workers)
    assert losses(root, "interrupted")[-1][0] == last + 1


@pytest.fixture(scope="module")
def six_steps(root) -> list[tuple]:
    """The losses of an uninterrupted run."""
    run(root, "whole")
    return losses(root, "whole")


def test_equal_seeds_give_equal_losses(root, six_steps):
    run(root, "again")
    assert losses(root, "again") == six_steps
    recipe = tiny_recipe(root)
    run(root, "other", data=dataclasses.replace(recipe.data, seed=1))
    assert losses(root, "other") != six_steps
    assert np.isfinite(np.array(six_steps, float)).all()


def test_a_killed_run_goes_on_to_the_bit(root, six_steps, capsys):
    run(root, "killed", steps=6, save_every=3)
    # As if it had been killed in step 5: the last checkpoint is gone, the metrics run ahead of the one before.
    for file in (root / "runs" / "killed" / "step-0000006").iterdir():
        file.unlink()
    capsys.readouterr()
    run(root, "killed")
    assert re.search(r"^killed goes on from \S+/step-0000003, step 3 of 6$", capsys.readouterr().out, re.MULTILINE)
    assert losses(root, "killed") == six_steps
    whole, resumed = weights(root, "whole", 6), weights(root, "killed", 6)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_finished_run_changes_nothing(root, six_steps, capsys):
    before = {path: path.stat().st_mtime_ns for path in (root / "runs" / "whole").rglob("*")}
    metrics = train(tiny_recipe(root, run_name="whole"), ALONE)
    printed = capsys.readouterr().out
    assert printed.startswith("whole is complete")
    assert "words_accuracy" in metrics
    recipe = tiny_recipe(root, run_name="whole")
    assert find_complete(recipe, 2) == printed.strip()
    assert {path: path.stat().st_mtime_ns for path in (root / "runs" / "whole").rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "processes"),
    [
        (["--steps=7"], 1),
        (["--optimizer.learning_rate=0.5"], 1),  # refused
        (["--data.root="], 1),
        (["--data.text_corpus=None"], 1),
        (["--model.regions.no_random_init"], 1),  # refused before any checkpoint is looked at
        ([], 3),  # cannot share the batch
        (["--run_name=nobody"], 1),
    ],
)
def test_find_complete_leaves_every_other_run_to_the_program(root, six_steps, changes: list[str], processes: int):
    recipe = tiny_recipe(root, run_name="whole")
    assert find_complete(override(recipe, changes), processes) is None


def test_a_finished_run_is_settled_after_a_kill(root, six_steps):
    shutil.copytree(root / "runs" / "whole", root / "runs" / "unsettled")
    (root / "runs" / "unsettled" / "best.json").unlink()
    recipe = tiny_recipe(root, run_name="unsettled")
    assert find_complete(dataclasses.replace(recipe, keep_checkpoints=1), 1)
    assert (root / "runs" / "unsettled" / "best.json").is_file()
    assert not (root / "runs" / "unsettled" / "step-0000003" / "state.json").exists()
    (root / "runs" / "unsettled" / "step-0000006" / "state.json").unlink()
    assert find_complete(recipe, 1) is None, "no whole checkpoint is left"


@pytest.mark.slow
def test_one_process_and_two_compute_the_same_and_go_on_from_each_other(root):
    changes = {"model": dataclasses.replace(TINY_MODEL, dropout=0.0)}  # dropout is drawn on every rank by itself
    run(root, "one", **changes)
    shutil.copytree(root / "runs" / "one", root / "runs" / "one-then-two")
    result = torchrun(root, "two", 2, **changes)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len([line for line in result.stdout.splitlines() if line.startswith("step 6/6  regions")]) == 1
    one, two = weights(root, "one", 6), weights(root, "two", 6)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=2e-4)
    shutil.copytree(root / "runs" / "two", root / "runs" / "two-then-one")

    for name in ("one-then-two", "two-then-one"):
        shutil.rmtree(root / "runs" / name / "step-0000006")
    run(root, "two-then-one", **changes)
    result = torchrun(root, "one-then-two", 2, **changes)
    assert "goes on from" in result.stdout, result.stderr[-3000:]
    for name in ("two", "two-then-one", "one-then-two"):
        np.testing.assert_allclose(np.array(losses(root, name)), np.array(losses(root, "one")), rtol=2e-5)


def test_fine_tuning_starts_with_the_pretrained_model_and_its_vocabulary(root, six_steps, tmp_path):
    from refcoco_files import write_refcoco

    from vlbert.tasks.refcoco import RefCOCOSettings

    samples = [tiny_sample(i, regions=3) for i in range(8)]
    commit_samples(root, "refcoco+", samples)
    write_refcoco(tmp_path / "refcoco+", samples)
    base = tiny_recipe(root)
    data = dataclasses.replace(
        base.data, datasets={"refcoco+": None}, held_out=("refcoco+",), batch=4, text_batch=0, seed=5
    )
    changes = {
        "task": RefCOCOSettings(str(tmp_path / "refcoco+")),
        "data": data,
        "steps": 1,
        "vocabulary": None,
        "init_from": str(root / "runs" / "whole" / "step-0000006"),
        "optimizer": dataclasses.replace(base.optimizer, learning_rate=1e-12, warmup_steps=0),
    }
    run(root, "tuned", **changes)
    before, after = weights(root, "whole", 6), weights(root, "tuned", 1)
    shared = [name for name in before if name.startswith("vlbert.")]
    assert shared
    assert all(torch.allclose(before[name].float(), after[name].float(), atol=1e-7) for name in shared)
    transform = "head.transform.dense.weight"
    assert torch.allclose(before["head.region_transform.dense.weight"], after[transform], atol=1e-7)
    assert (root / "runs" / "tuned" / "step-0000001" / "vocab.txt").read_text() == (root / "text/vocab.txt").read_text()
    metrics = read_metrics(open_store(str(root)), "tuned", "validation")[-1]
    assert 0 <= metrics["accuracy_published"] <= 1
    assert metrics["chance"] == pytest.approx(1 / 3)
    with pytest.raises(
        ValueError, match="another architecture than recipe tiny: model.num_heads is 4 there and 2 here"
    ):
        run(root, "tuned-2", **changes, model=dataclasses.replace(TINY_MODEL, num_heads=2))


def test_a_held_out_dataset_that_is_not_there_names_its_field(root):
    data = dataclasses.replace(tiny_recipe(root).data, held_out=("nothing",))
    with pytest.raises(ValueError, match=r"nothing/regions holds no region shards.*data\.held_out=nothing "):
        run(root, "no-held-out", data=data)


def test_a_resumed_run_refuses_other_settings(root, six_steps, tmp_path):
    (tmp_path / "lines.txt").write_text("a red square\n" * 20)
    make_corpus(tmp_path / "text", [tmp_path / "lines.txt"], root / "text" / "vocab.txt", 0, [])
    recipe = tiny_recipe(root, run_name="whole", steps=8)
    faster = dataclasses.replace(recipe.optimizer, learning_rate=0.5)
    for changes, named in (
        ({"optimizer": faster}, "optimizer.learning_rate=0.002, but the recipe has 0.5"),
        ({"data": dataclasses.replace(recipe.data, batch=4)}, "data.batch=8, but the recipe has 4"),
        ({"data": dataclasses.replace(recipe.data, chunk=4)}, "data.chunk=1, but the recipe has 4"),
        ({"data": dataclasses.replace(recipe.data, text_corpus=str(tmp_path / "text"))}, "is not the corpus that"),
    ):
        with pytest.raises(ValueError, match=named):
            train(dataclasses.replace(recipe, **changes), ALONE)
    folder = next((root / "held-out" / "regions").glob("*/snapshots"))
    folder.rename(root / "elsewhere")
    with pytest.raises(ValueError, match="is gone; .*data.held_out=held-out .*put its files back, make it"):
        train(recipe, ALONE)
    (root / "elsewhere").rename(folder)
    cached = dataclasses.replace(recipe.data, cache=str(root / "cache"), cache_gb=1.0)
    assert train(dataclasses.replace(recipe, steps=6, data=cached), ALONE), "a cache decides no sample"


def test_infinite_weights_end_the_run_and_name_the_last_good_checkpoint(root):
    run(root, "broken", steps=2, save_every=2)
    folder = root / "runs" / "broken" / "step-0000002"
    tensors = load_file(folder / "model.safetensors")
    tensors["vlbert.embedding.words.weight"][:] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    reseal(folder)
    with pytest.raises(FloatingPointError, match=f"3 steps in a row .* the last good checkpoint is {folder}"):
        train(tiny_recipe(root, run_name="broken", save_every=8, steps=8, most_skipped=3), ALONE)
    assert checkpoints(open_store(str(root)), "broken") == ["runs/broken/step-0000002"]


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


def test_regions_of_a_random_init_detector_are_announced(tmp_path, capsys):
    root = tiny_root(tmp_path, random_init=True)
    run(root, "trial", steps=1)
    assert "WARNING: the regions come from an UNTRAINED detector" in capsys.readouterr().out
    assert open_folder(open_store(str(root)), "runs/trial/step-0000001").state["data"][0]["random_init"] is True


def test_a_run_lives_in_a_bucket(root, tmp_path, monkeypatch):
    with s3_server("models"):
        store = open_store("s3://models/demo")
        for file in (root / "captions", root / "held-out"):
            for path in sorted(p for p in file.rglob("*") if p.is_file()):
                store.put(str(path.relative_to(root)), path)
        recipe = tiny_recipe(root)
        recipe = tiny_recipe(
            root, data=dataclasses.replace(recipe.data, root="s3://models/demo"), steps=2, run_name="cloud"
        )
        monkeypatch.chdir(tmp_path)
        train(recipe, ALONE)
        assert checkpoints(store, "cloud") == ["runs/cloud/step-0000002"]
        assert [line["step"] for line in read_metrics(store, "cloud", "training")] == [1, 2]
        assert list((tmp_path / "runs/cloud/tensorboard").iterdir()), "beside the program"
        train(dataclasses.replace(recipe, steps=3), ALONE)
        assert [line["step"] for line in read_metrics(store, "cloud", "training")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--optimiser.rate=1"], "--optimiser.rate"),
        (["--data.root="], "data.root is not set"),
        (["--trackers", "tensorboard", "gone"], "there is no tracker gone, only tensorboard"),
    ],
)
def test_bad_settings_end_the_program_before_it_begins(root, more, named):
    with pytest.raises(SystemExit, match=f"^vlbert train pretrain_vlbert: .*{named}"):
        main(command_line(root, "refused", *more))
    assert not (root / "runs" / "refused").exists()
