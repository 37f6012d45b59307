"""The training program: one process and two, stopped and resumed, on a folder and on a bucket, and what it refuses."""

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from places import PROJECT
from programs import command_line, losses, torchrun
from s3 import s3_server
from safetensors.torch import load_file, save_file
from seeded import reseal
from tiny import DETECTOR, TINY_MODEL, commit_samples, tiny_recipe, tiny_root, tiny_sample

from storage.catalog import Catalog
from storage.object_store import open_store
from storage.runs import checkpoints, open_folder
from training.distributed import World
from training.log import read_metrics
from vlbert.checkpoint import read_checkpoint
from vlbert.config import Recipe
from vlbert.data.corpus import make_corpus
from vlbert.train import find_complete, main, train


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("train"))


ALONE = World(0, 1, torch.device("cpu"))


def run(root: Path, name: str, **changes) -> Recipe:
    recipe = tiny_recipe(root, run=name, **changes)
    train(recipe, ALONE)
    return recipe


def weights(root: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(root / "runs" / name / f"step-{step:07d}" / "model.safetensors")


RANK = """
import os, pathlib, sys, time
from training import distributed

world = distributed.start()
(pathlib.Path(sys.argv[1]) / str(world.rank)).write_text(str(os.getpid()))
time.sleep(600)
"""


def waited_for(happens: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_the_ranks_of_a_torchrun_that_is_killed_end_with_it(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "rank.py", "."]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    ranks, files = [], [tmp_path / "0", tmp_path / "1"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            waited_for(lambda: all(file.exists() and file.read_text() for file in files))
            ranks = [int(file.read_text()) for file in files]
            assert all(lives(rank) for rank in ranks)
            process.kill()
            process.wait()
            waited_for(lambda: not any(lives(rank) for rank in ranks), seconds=5)
        finally:
            process.kill()
            for rank in ranks:
                if lives(rank):
                    os.kill(rank, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_ctrl_c_saves_and_the_next_start_goes_on(root, tmp_path, processes):
    """Of the bare program, and of torchrun, which sends its ranks once more what the terminal has sent them."""
    workers = dataclasses.replace(tiny_recipe(root).data, workers=1)
    name = f"stopped by hand {processes}"
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"] if processes else []
    program = [*launcher, "vlbert.train", *command_line(root, name, steps=10**6, data=workers)]
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where pytest runs under nohup
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *program],
            cwd=PROJECT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
            process_group=0,
            preexec_fn=heeds,
        )
    try:
        waited_for(lambda: "step 3/" in (tmp_path / "said").read_text())
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
        assert process.wait(timeout=60) == (1 if processes else 75)
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "said").read_text()
    (line,) = re.findall("^torchrun -m vlbert.train pretrain_vlbert_demo: stopped: after step .*$", said, re.MULTILINE)
    assert said.count("stopping: this step is finished and saved") == 1
    checkpoint = Path(line.rpartition(" goes on from ")[2])
    assert (checkpoint / "state.json").exists()
    if processes is None:
        assert "Traceback" not in said
    last = int(checkpoint.name.removeprefix("step-"))
    run(root, name, steps=last + 1, data=workers)
    assert losses(root, name)[-1][0] == last + 1


@pytest.fixture(scope="module")
def six_steps(root) -> list[tuple]:
    """The run that others are held against: six steps without a break."""
    run(root, "whole")
    return losses(root, "whole")


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(root, six_steps):
    run(root, "again")
    assert losses(root, "again") == six_steps
    recipe = tiny_recipe(root)
    run(root, "other", data=dataclasses.replace(recipe.data, seed=1))
    assert losses(root, "other") != six_steps
    assert np.isfinite(np.array(six_steps, float)).all()


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(root, six_steps, capsys):
    run(root, "stopped", steps=6, save_every=3)
    # As if it had been killed in step 5: the last checkpoint is gone, the metrics run ahead of the one before.
    for file in (root / "runs" / "stopped" / "step-0000006").iterdir():
        file.unlink()
    metrics = root / "runs" / "stopped" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-10])
    capsys.readouterr()
    run(root, "stopped")
    assert re.search(r"^stopped goes on from \S+/step-0000003, step 3 of 6$", capsys.readouterr().out, re.MULTILINE)
    assert losses(root, "stopped") == six_steps
    whole, resumed = weights(root, "whole", 6), weights(root, "stopped", 6)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


ONE_READS_IT_DAMAGED = """
import os, sys
from storage.object_store import LocalStore
from vlbert.train import main

read = LocalStore.get

def get(self, path):
    data = read(self, path)
    damaged = path.endswith(sys.argv[1]) and os.environ["RANK"] == sys.argv[2]
    return data[:-1] + bytes([data[-1] ^ 1]) if damaged else data

LocalStore.get = get
main(sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_damage_that_one_rank_alone_sees_ends_all_and_is_named(root, six_steps, tmp_path, file, rank):
    (tmp_path / "damaged.py").write_text(ONE_READS_IT_DAMAGED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "damaged.py"), file, rank, *command_line(root, "whole", steps=7)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    ended = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    of_rank = "" if rank == "0" else "rank 1: "
    assert f"{of_rank}{root}/runs/whole/step-0000006/{file} is damaged" in ended.stderr


def test_a_finished_run_says_so_and_does_nothing(root, six_steps, capsys):
    before = {path: path.stat().st_mtime_ns for path in (root / "runs" / "whole").rglob("*")}
    metrics = train(tiny_recipe(root, run="whole"), ALONE)
    said = capsys.readouterr().out
    assert said.startswith("whole is complete")
    assert "words_accuracy" in metrics
    recipe, *given = command_line(root, "whole")
    assert find_complete(recipe, given, 2) == said.strip()
    assert {path: path.stat().st_mtime_ns for path in (root / "runs" / "whole").rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "processes"),
    [
        (["steps=7"], 1),
        (["optimizer.learning_rate=0.5"], 1),  # refused
        (["optimizer.no_such=1"], 1),
        (["data.root="], 1),
        (["data.text_corpus=none"], 1),
        (["model.regions.random_init=false"], 1),  # refused before any checkpoint is looked at
        ([], 3),  # cannot share the batch
        (["run=nobody"], 1),
    ],
)
def test_of_a_run_that_is_not_complete_or_would_be_refused_the_program_speaks(
    root, six_steps, changes: list[str], processes: int
):
    recipe, *given = command_line(root, "whole")
    assert find_complete(recipe, [*given, *changes], processes) is None


def test_a_finished_run_is_settled_where_a_kill_came_before_that(root, six_steps):
    shutil.copytree(root / "runs" / "whole", root / "runs" / "unsettled")
    (root / "runs" / "unsettled" / "best.json").unlink()
    recipe, *given = command_line(root, "unsettled")
    assert find_complete(recipe, [*given, "keep_checkpoints=1"], 1)
    assert (root / "runs" / "unsettled" / "best.json").is_file()
    assert not (root / "runs" / "unsettled" / "step-0000003" / "state.json").exists()
    (root / "runs" / "unsettled" / "step-0000006" / "state.json").unlink()
    assert find_complete(recipe, given, 1) is None, "no whole checkpoint is left"


@pytest.mark.slow
def test_two_processes_compute_what_one_computes_and_one_goes_on_where_they_stopped(root, six_steps):
    model = dataclasses.replace(TINY_MODEL, dropout=0.0)  # dropout draws anew on every rank
    run(root, "one", model=model)
    result = torchrun(root, "two", 2, model=model)
    assert result.returncode == 0, result.stderr[-3000:]
    np.testing.assert_allclose(np.array(losses(root, "two")), np.array(losses(root, "one")), rtol=2e-5)
    one, two = weights(root, "one", 6), weights(root, "two", 6)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=2e-4)
    progress = [line for line in result.stdout.splitlines() if line.startswith("step 6/6  regions")]
    assert len(progress) == 1, "one rank speaks"
    assert "samples/s" in progress[0]
    assert "left" in progress[0]

    for file in (root / "runs" / "two" / "step-0000006").iterdir():
        file.unlink()
    run(root, "two", model=model)
    assert [line[0] for line in losses(root, "two")] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(np.array(losses(root, "two")), np.array(losses(root, "one")), rtol=2e-5)


@pytest.mark.slow
def test_a_run_may_go_on_with_more_processes(root):
    model = dataclasses.replace(TINY_MODEL, dropout=0.0)
    run(root, "from-one", model=model)
    for file in (root / "runs" / "from-one" / "step-0000006").iterdir():
        file.unlink()
    result = torchrun(root, "from-one", 2, model=model)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "goes on from" in result.stdout
    assert [line[0] for line in losses(root, "from-one")] == [1, 2, 3, 4, 5, 6]
    run(root, "one-alone", model=model)
    np.testing.assert_allclose(np.array(losses(root, "from-one")), np.array(losses(root, "one-alone")), rtol=2e-5)


def test_accumulation_sees_the_same_samples_and_learns_alike(root):
    recipe = tiny_recipe(root)
    model = dataclasses.replace(TINY_MODEL, dropout=0.0)
    run(root, "parts", model=model, data=dataclasses.replace(recipe.data, gradient_accumulation=2))
    run(root, "at-once", model=model)
    # The mean of two means is not the mean, so alike and no more.
    np.testing.assert_allclose(
        np.array(losses(root, "parts"))[:, 1:], np.array(losses(root, "at-once"))[:, 1:], rtol=0.1
    )


def test_a_checkpoint_is_whole_and_carries_all_that_goes_on(root, six_steps):
    store = open_store(str(root))
    folder = checkpoints(store, "whole")[-1]
    assert folder == "runs/whole/step-0000006"
    names = {path.name for path in (root / folder).iterdir()}
    assert names == {"config.json", "vocab.txt", "model.safetensors", "optimizer.safetensors", "state.json"}
    state = open_folder(store, folder).state
    assert state["step"] == 6
    assert (state["samples_consumed"], state["text_consumed"], state["seed"]) == (48, 24, 0)
    snapshot = Catalog(store, "captions").snapshot(f"regions/{DETECTOR}").id
    assert state["data"] == {
        "dataset": "captions",
        "stage": f"regions/{DETECTOR}",
        "random_init": False,
        "snapshots": [{"epoch": 0, "consumed": 0, "examples": 24, "snapshot": snapshot}],
    }
    assert state["held_out"].keys() == {"dataset", "stage", "random_init", "snapshot"}
    saved = read_checkpoint(store, folder)
    assert saved.model_config == TINY_MODEL
    assert saved.vocabulary.text() == (root / "text" / "vocab.txt").read_text()
    assert saved.num_classes == 8


def test_only_the_newest_checkpoints_are_kept(root):
    run(root, "kept", save_every=1, keep_checkpoints=2)
    assert sorted(path.name for path in (root / "runs" / "kept").glob("step-*/state.json")) == ["state.json"] * 2
    assert checkpoints(open_store(str(root)), "kept") == ["runs/kept/step-0000005", "runs/kept/step-0000006"]


def test_validation_stands_beside_shuffled_images(root, six_steps):
    line = read_metrics(open_store(str(root)), "whole", "validation")[-1]
    assert line["step"] == 6
    for name in ("words_accuracy", "regions_accuracy"):
        assert line[f"{name}_grounding_gap"] == pytest.approx(line[name] - line[f"{name}_shuffled"])
    predictions = [json.loads(row) for row in (root / "runs" / "whole" / "predictions.jsonl").read_text().splitlines()]
    assert len({row["key"] for row in predictions}) == 8


def test_tensorboard_holds_the_curves(root, six_steps):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(root / "runs" / "whole" / "tensorboard"))
    board.Reload()
    found = {event.step: event.value for event in board.Scalars("training/loss_words")}
    assert found == pytest.approx({step: words for step, words, _, _ in six_steps})


def test_fine_tuning_starts_with_the_pretrained_model_and_its_vocabulary(root, six_steps, tmp_path):
    from refcoco_files import write_refcoco

    from vlbert.tasks.refcoco import RefCOCOSettings

    samples = [tiny_sample(i, regions=3) for i in range(8)]
    commit_samples(root, "refcoco+", samples)
    write_refcoco(tmp_path / "refcoco+", samples)
    base = tiny_recipe(root)
    data = dataclasses.replace(base.data, dataset="refcoco+", held_out="refcoco+", batch=4, text_batch=0, seed=5)
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


@pytest.mark.slow
def test_a_held_out_dataset_that_is_not_there_names_its_field(root):
    """On two processes too, where torchrun's own report is the last that is printed."""
    data = {"data": dataclasses.replace(tiny_recipe(root).data, held_out="nothing")}
    wanted = r"nothing/regions holds no region shards.*data\.held_out=nothing .*docs/tasks\.md.*data\.held_out=none"
    with pytest.raises(ValueError, match=wanted):
        run(root, "no-held-out", **data)
    result = torchrun(root, "no-held-out", 2, **data)
    assert result.returncode == 1
    *_, last, _ = result.stderr.rstrip().splitlines()  # then comes a rule
    assert re.search(wanted, last)


def test_a_run_goes_on_only_as_it_began(root, six_steps):
    recipe = tiny_recipe(root, run="whole", steps=8)
    with pytest.raises(ValueError, match="was trained with optimizer.learning_rate = 0.002, the recipe says 0.5"):
        train(dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, learning_rate=0.5)), ALONE)
    with pytest.raises(ValueError, match="data.batch = 8, the recipe says 4"):
        train(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, batch=4)), ALONE)
    with pytest.raises(ValueError, match="data.chunk = 1, the recipe says 4"):
        train(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, chunk=4)), ALONE)
    folder = next((root / "held-out" / "regions").glob("*/snapshots"))
    folder.rename(root / "elsewhere")
    with pytest.raises(ValueError, match="is gone; .*data.held_out=held-out .*put its files back, or start") as error:
        train(recipe, ALONE)
    (root / "elsewhere").rename(folder)
    assert "=none" not in str(error.value), "a run goes on only as it began"
    cached = dataclasses.replace(recipe.data, cache=str(root / "cache"), cache_gb=1.0)
    assert train(dataclasses.replace(recipe, steps=6, data=cached), ALONE), "which decides no sample"


def test_weights_that_are_not_finite_end_the_run_and_the_last_good_checkpoint_is_named(root):
    run(root, "broken", steps=2, save_every=2)
    folder = root / "runs" / "broken" / "step-0000002"
    tensors = load_file(folder / "model.safetensors")
    tensors["vlbert.embedding.words.weight"][:] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    reseal(folder)
    says = f"3 steps in a row were left out, the last of them, 5, because .* the last good checkpoint is {folder}"
    with pytest.raises(FloatingPointError, match=says):
        train(tiny_recipe(root, run="broken", save_every=8, steps=8, most_skipped=3), ALONE)
    assert checkpoints(open_store(str(root)), "broken") == ["runs/broken/step-0000002"]


def test_what_a_run_started_from_is_not_needed_to_go_on(root, six_steps):
    run(root, "source", steps=1)
    source = root / "runs" / "source" / "step-0000001"
    changes = {"init_from": str(source), "vocabulary": None}
    run(root, "heir", steps=2, **changes)
    for file in source.iterdir():
        file.unlink()
    train(tiny_recipe(root, run="heir", steps=3, **changes), ALONE)
    assert [line[0] for line in losses(root, "heir")] == [1, 2, 3]
    with pytest.raises(ValueError, match="was trained with init_from = .*, the recipe says None"):
        train(tiny_recipe(root, run="heir", steps=4), ALONE)


def test_a_run_goes_on_with_its_own_text_corpus(root, six_steps, tmp_path):
    other = tmp_path / "text"
    (tmp_path / "lines.txt").write_text("a red square\n" * 20)
    make_corpus(other, [tmp_path / "lines.txt"], root / "text" / "vocab.txt", 0, [])
    recipe = tiny_recipe(root, run="whole", steps=8)
    with pytest.raises(ValueError, match="is not the corpus that .*whole/step-0000006 was trained with"):
        train(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, text_corpus=str(other))), ALONE)


def test_random_weights_are_used_only_where_the_recipe_says_so(root):
    regions = dataclasses.replace(TINY_MODEL.regions, random_init=False)
    with pytest.raises(ValueError, match="no weights to start from; give model.regions.weights=FILE"):
        run(root, "unsaid", model=dataclasses.replace(TINY_MODEL, regions=regions))


def test_regions_of_an_random_init_detector_are_announced(tmp_path, capsys):
    root = tiny_root(tmp_path, random_init=True)
    run(root, "trial", steps=1)
    assert "WARNING: the regions come from an UNTRAINED detector" in capsys.readouterr().out
    assert open_folder(open_store(str(root)), "runs/trial/step-0000001").state["data"]["random_init"] is True


def test_a_run_lives_in_a_bucket(root, tmp_path, monkeypatch):
    with s3_server("models"):
        store = open_store("s3://models/demo")
        for file in (root / "captions", root / "held-out"):
            for path in sorted(p for p in file.rglob("*") if p.is_file()):
                store.put(str(path.relative_to(root)), path)
        recipe = tiny_recipe(root)
        recipe = tiny_recipe(root, data=dataclasses.replace(recipe.data, root="s3://models/demo"), steps=2, run="cloud")
        train(recipe, ALONE)
        assert checkpoints(store, "cloud") == ["runs/cloud/step-0000002"]
        assert [line["step"] for line in read_metrics(store, "cloud", "training")] == [1, 2]
        assert any("tensorboard/events" in info.path for info in store.list("runs/cloud/"))
        train(dataclasses.replace(recipe, steps=3), ALONE)
        assert [line["step"] for line in read_metrics(store, "cloud", "training")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["optimiser.rate=1"], "Recipe has no field 'optimiser'"),
        (["data.root="], "data.root is not set"),
    ],
)
def test_what_is_wrong_is_said_before_any_process_waits_for_another(root, more, says):
    with pytest.raises(SystemExit, match=f"^torchrun -m vlbert.train pretrain_vlbert_demo: .*{says}"):
        main(command_line(root, "refused", *more))
    assert not (root / "runs" / "refused").exists()


@pytest.mark.slow
def test_what_is_wrong_for_so_many_processes_is_said_on_the_command_line(root):
    result = torchrun(root, "refused", 2, "data.batch=7", "data.text_batch=0")
    assert result.returncode != 0
    assert "data.batch = 7 cannot be shared by 2 processes" in result.stderr
    assert not (root / "runs" / "refused").exists()
