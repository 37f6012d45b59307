"""Trainings of several processes under a real torchrun: equal numbers, deaths, hangs, restarts, signals."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from operated import running
from places import PROJECT
from programs import ended, launched, losses
from safetensors.torch import load_file
from tiny import TINY_MODEL, as_overrides, tiny_recipe, tiny_root

from demo.serve import free_port
from flows.settings import Processes
from flows.torchrun import TrainingStopped, Watch, torchrun
from storage.object_store import open_store
from training.distributed import World
from training.log import read_heartbeat
from training.program import STOPPED as TOLD_TO_STOP
from vlbert.recipes import RECIPES
from vlbert.train import train

TOGETHER = 180.0  # seconds within which all have ended, where one has; 35 on a quiet machine

# A rank that computes with the others until, at its tenth step, the one that is named hangs.
RANK = """
import os, sys, time
from datetime import timedelta

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training import distributed
from training.program import run_in_world
from training.stopping import Stop

def work(world):
    model = DistributedDataParallel(nn.Linear(200, 200))
    with Stop():  # as in training: SIGTERM by itself ends no rank
        os.write(1, b"begun\\n")  # at once, for the ranks share the pipe
        for step in range(10**6):
            if step == 10 and world.rank == int(sys.argv[1]):
                time.sleep(600)
            model(torch.randn(4, 200)).sum().backward()
            time.sleep(0.01)

distributed.TIME_LIMIT = timedelta(seconds=float(sys.argv[2]))
run_in_world("rank.py", work)
"""


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_after_the_time_limit(tmp_path):
    """torchrun kills it 30 s after it asked it to end."""
    status, _, errors = ended(launched(tmp_path, RANK, 1, 5), 5 + TOGETHER)
    (line,) = [line for line in errors.splitlines() if line.startswith("rank.py: ")]
    assert re.match(r"rank.py: another rank failed or hangs \(.*\); see its error above", line)
    assert (status, "[rank" in errors) == (1, False), "no traceback of a rank"


# A rank of a training of the tiny recipe without dropout. As it begins a step, one is killed, once in all, or gets a
# label that is no number.
TRAINING = """
import dataclasses, os, sys, time
from pathlib import Path

from tiny import TINY_MODEL, tiny_recipe

from training.program import run_in_world
from vlbert.train import train

root, name, harm, rank, step = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]), int(sys.argv[5])

def observe(at, parts):
    if (at, int(os.environ["RANK"])) != (step, rank):
        return
    killed = Path("killed")
    if harm == "poison":
        parts[-1].labels["region_classes"][-1] = float("nan")
    elif not killed.exists():
        while not list(root.glob(f"runs/{name}/step-*/state.json")):  # it is written meanwhile
            time.sleep(0.01)
        killed.touch()
        os.kill(os.getpid(), 9)

still = dataclasses.replace(TINY_MODEL, dropout=0.0)  # it would be drawn anew on every rank
recipe = tiny_recipe(root, run_name=name, model=still, save_every=2)
run_in_world("rank.py", lambda world: train(recipe, world, observe))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("many"))


def two_nodes(folder: Path, program: str, *arguments: object, restarts: int = 0) -> list[subprocess.Popen]:
    """Two torchruns that meet as two machines do, with two ranks each."""
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=tiny"]
    options.append(f"--max-restarts={restarts}")
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [launched(folder, program, *arguments, options=options, **own_store) for _ in range(2)]


@pytest.mark.slow
def test_two_nodes_start_again_together_when_a_rank_of_one_was_killed(root, tmp_path):
    still = dataclasses.replace(TINY_MODEL, dropout=0.0)
    train(tiny_recipe(root, run_name="alone", model=still), World(0, 1, torch.device("cpu")))
    nodes = [ended(node) for node in two_nodes(tmp_path, TRAINING, root, "nodes again", "kill", 2, 3, restarts=2)]
    assert [status for status, _, _ in nodes] == [0, 0], nodes[0][2] + nodes[1][2]
    assert (tmp_path / "killed").exists()
    assert "nodes again resumes from" in nodes[0][1] + nodes[1][1]
    np.testing.assert_allclose(np.array(losses(root, "nodes again")), np.array(losses(root, "alone")), rtol=2e-5)


@pytest.mark.slow
def test_all_ranks_skip_what_one_cannot_learn_from(root, tmp_path):
    for run, processes in (("one", 1), ("two", 2)):
        ranks = launched(tmp_path, TRAINING, root, run, "poison", processes - 1, 2, processes=processes)
        status, _, errors = ended(ranks)
        assert status == 0, errors
    one, two = (json.loads((root / "runs" / run / "skipped.jsonl").read_text()) for run in ("one", "two"))
    assert (one["step"], one["why"]) == (two["step"], two["why"]) == (3, "the loss of regions (nan) is not finite")
    assert sorted(one["keys"]) == sorted(two["keys"])
    assert len(one["keys"]) == 8 + 4
    weights = [load_file(root / "runs" / run / "step-0000006" / "model.safetensors") for run in ("one", "two")]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_when_a_node_is_gone_the_other_ends(tmp_path):
    """Its processes end with its torchrun; those of the other node say one line each."""
    nodes = two_nodes(tmp_path, RANK, -1, 600)
    try:
        for node in nodes:
            assert [node.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        nodes[0].kill()
        status, _, errors = ended(nodes[1], TOGETHER)
    finally:
        for node in nodes:
            node.kill()
    assert errors.count("another rank failed or hangs") <= 2
    assert (status, "[rank" in errors) == (1, False), "no traceback of a rank"


OF_RANK_0 = "import os\nif os.environ['RANK'] != '0':\n    raise ImportError('no such library')\n"


@pytest.mark.slow
def test_the_launcher_ends_with_the_ranks_own_line_and_status(tmp_path):
    (tmp_path / "of_rank_0.py").write_text(OF_RANK_0 + "from vlbert.recipes.vlbert import pretrain_vlbert as recipe\n")
    command = [sys.executable, "-m", "training.launch", "--standalone", "--nproc-per-node=2", "-m", "vlbert.train"]
    command += ["of_rank_0:recipe", "--data.text_batch=0", "--model.regions.random_init", f"--data.root={tmp_path}"]
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=PROJECT, env=variables)
    assert ended.returncode == 1
    (shown,) = [line for line in ended.stderr.splitlines() if "torch/distributed/run.py" not in line]
    assert shown.startswith("vlbert train of_rank_0:recipe: rank 1: of_rank_0 cannot be imported (no such library)")


def trained_by_a_flow(root: Path, run: str, watch: Watch, processes: Processes, **changes) -> list[str]:
    """The lines that a flow would log."""
    logged, workers = [], dataclasses.replace(tiny_recipe(root).data, workers=1)
    recipe = tiny_recipe(root, run_name=run, data=workers, **changes)
    overrides = as_overrides(recipe, RECIPES["pretrain_vlbert"]("demo"))
    torchrun("vlbert.train", ["pretrain_vlbert", "--size=demo", *overrides], processes, logged.append, watch)
    return logged


@pytest.mark.slow
def test_a_signalled_training_saves_and_its_flow_goes_on(root, monkeypatch):
    """Every process is signalled, as by systemd and SLURM: torchrun, ranks, and what loads for them."""
    monkeypatch.setattr("flows.supervisor.WATCH_SECONDS", 0.2)
    monkeypatch.setenv("TO_BE_SIGNALLED", str(root))

    def stop() -> None:
        beat = read_heartbeat(open_store(str(root)), "signalled")
        if beat and beat["step"] >= 3 and beat["state"] != "stopped":
            for pid, command, variables in running():
                if f"\0TO_BE_SIGNALLED={root}\0" in variables and "supervisor.py" not in command:
                    os.kill(pid, signal.SIGTERM)

    processes = Processes(count=2, threads=1)
    with pytest.raises(TrainingStopped, match="it was stopped by SIGTERM .*resumes from") as stopped:
        trained_by_a_flow(root, "signalled", stop, processes, steps=2000)
    assert stopped.value.__cause__.returncode == TOLD_TO_STOP, "of torchrun, too"
    place = str(stopped.value).rpartition(" ")[2]
    assert Path(place, "state.json").exists()
    step = int(place.rpartition("-")[2])
    assert 3 <= step < 2000
    logged = trained_by_a_flow(root, "signalled", lambda: None, processes, steps=step + 1)
    assert any(f"resumes from {place}" in line for line in logged)


# Counts what rank 0 sends of its buffers in a step of a training with BatchNorms.
NORMS = """
import dataclasses, sys
from pathlib import Path

import torch
from tiny import TINY_MODEL, tiny_recipe

from training.program import run_in_world
from vlbert.train import train

resnet = dataclasses.replace(TINY_MODEL.regions.resnet, norm="batch")
model = dataclasses.replace(TINY_MODEL, regions=dataclasses.replace(TINY_MODEL.regions, resnet=resnet))
recipe = tiny_recipe(Path(sys.argv[1]), run_name="norms", model=model, steps=5, save_every=100, log_every=100)
profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

def observe(step, parts):
    if step == 3:  # after DDP has ordered its buckets
        profile.start()
    if step == 4:
        profile.stop()
        names = [event.key for event in profile.key_averages()]
        print("reduced", any("allreduce" in name for name in names), "sent", any("broadcast" in n for n in names))

run_in_world("rank.py", lambda world: train(recipe, world, observe))
"""


@pytest.mark.slow
def test_buffers_are_not_sent_in_a_step_and_a_run_says_over_how_many_images_its_norms_are(root, tmp_path):
    status, printed, errors = ended(launched(tmp_path, NORMS, root))
    assert status == 0, errors
    assert printed.count("reduced True sent False") == 2
    assert "BatchNorms normalise over 4 images" in printed
