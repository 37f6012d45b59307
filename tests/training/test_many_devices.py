"""Many processes, and what happens to all when one dies, hangs or is told to stop. Real torchrun, gloo."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import PROJECT
from programs import losses
from safetensors.torch import load_file
from tiny import TINY_MODEL, as_overrides, tiny_recipe, tiny_root

from demo.serve import free_port
from flows.settings import Processes
from flows.supervisor import ChildFailed, ChildTimedOut
from flows.torchrun import OnHeartbeat, TrainingStopped, torchrun
from storage.object_store import open_store
from training.distributed import World
from vlbert.recipes import RECIPES
from vlbert.train import train

TOGETHER = 60.0  # seconds within which all have ended, where one has

# A rank that computes with the others until, at its tenth step, what is named happens to the one that is named.
RANK = """
import os, sys, time
from datetime import timedelta

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.loop import run_in_world
from training.stopping import Stop

def happen(what):
    if what == "kill -9": os.kill(os.getpid(), 9)
    if what == "a bug": raise RuntimeError("a fault of my own")
    if what == "bad data": raise ValueError("row 7 of file x is no number")
    if what == "exit": sys.exit("I leave")
    if what == "out of memory": torch.zeros(2**60)
    if what == "hang": time.sleep(600)

def work(world):
    model = DistributedDataParallel(nn.Linear(200, 200))
    with Stop():  # as in training: SIGTERM by itself ends no rank
        for step in range(10**6):
            if step == 10 and world.rank == int(sys.argv[2]):
                happen(sys.argv[1])
            model(torch.randn(4, 200)).sum().backward()
            time.sleep(0.01)

run_in_world("rank.py", work, timedelta(seconds=float(sys.argv[3])))
"""


def children(pid: int) -> set[int]:
    """The processes that this one started and that have not ended."""
    return {int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def descendants(pid: int) -> set[int]:
    below = children(pid)
    return below.union(*map(descendants, below))


def launched(
    folder: Path, program: str, *arguments: object, options: Sequence[str] = ("--standalone",), **environment: str
) -> subprocess.Popen:
    """`torchrun --nproc-per-node 2` of a program's text, in the folder."""
    (folder / "rank.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2", "rank.py"]
    paths = os.pathsep.join([str(PROJECT), str(PROJECT / "tests")])
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen, seconds: float = 240) -> tuple[int, str, str]:
    """Its exit status, stdout and stderr."""
    try:
        said, complained = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, said, complained


# --- one dies ---------------------------------------------------------------------------------------------------------

DEATHS = {
    "kill -9": r"torchrun: failed \(exitcode: -9\) local_rank: \d",
    "a bug": r"\[rank\d\]: RuntimeError: a fault of my own",
    "bad data": r"rank.py: (rank 1: )?row 7 of file x is no number",
    "exit": "I leave",
    "out of memory": r"\[rank\d\]: RuntimeError: .*allocate",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "rank"),
    [("a bug", 1), ("kill -9", 0), ("kill -9", 1), ("bad data", 1), ("exit", 0), ("out of memory", 0)],
)
def test_a_rank_that_dies_takes_the_others_with_it_and_its_own_error_comes_first(tmp_path, death, rank):
    began = time.monotonic()
    status, _, complained = ended(launched(tmp_path, RANK, death, rank, 600), TOGETHER)
    assert time.monotonic() - began < TOGETHER
    assert status == 1
    # torchrun's own lines begin with a letter and a date, then its program's place.
    lines = [re.sub(r"^[WE]\d{4} .*\] (?=failed)", "torchrun: ", line) for line in complained.splitlines()]
    errors = [line for line in lines if not re.match(r"[WE]\d{4} |\[rank\d\]: (Traceback|  )", line)]
    assert re.match(DEATHS[death], errors[0]), complained
    others = [line for line in lines if f"rank{1 - rank}" in line or "another rank" in line]
    assert len(others) <= 1, complained
    assert re.search(rf"Root Cause.*\n.*\n.*\n.*\n  rank      : {rank} ", complained), complained
    if death == "bad data":  # by the file that torchrun names in TORCHELASTIC_ERROR_FILE
        assert re.search(r"\n  traceback : rank 1: row 7 of file x is no number\n", complained), complained


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_after_the_time_limit_and_ended(tmp_path):
    """torchrun kills it 30 s after it asked it to end."""
    status, _, complained = ended(launched(tmp_path, RANK, "hang", 1, 5), 5 + TOGETHER)
    assert status == 1
    said = [line for line in complained.splitlines() if line.startswith("rank.py: ")]
    assert said == ["rank.py: another rank is gone or hangs (Timed out); its error stands above, or there"]
    assert "[rank" not in complained, "no traceback of a rank"


# --- trainings --------------------------------------------------------------------------------------------------------

# A rank of a training of the tiny recipe without dropout. As it begins a step it may kill itself, once in all.
TRAINING = """
import dataclasses, os, sys
from pathlib import Path

from tiny import TINY_MODEL, tiny_recipe

from training.loop import run_in_world
from vlbert.config import Recipe
from vlbert.train import train

root, name, rank, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
print("LOCAL_RANK", os.environ["LOCAL_RANK"], "RANK", os.environ["RANK"], flush=True)

def observe(at, parts):
    for part in parts:
        texts = sum(key.startswith("text-") for key in part.keys)
        print(f"RANK {os.environ['RANK']} takes {len(part.keys) - texts} pictures and {texts} texts", flush=True)
    killed = Path("killed")
    if (at, int(os.environ["RANK"])) == (step, rank) and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), 9)

still = dataclasses.replace(TINY_MODEL, dropout=0.0)  # it would be drawn anew on every rank
recipe = tiny_recipe(root, run=name, model=still, save_every=2)
run_in_world("rank.py", lambda world: train(recipe, world, observe))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="module")
def alone(root: Path) -> list[tuple]:
    """The losses of one process."""
    still = dataclasses.replace(TINY_MODEL, dropout=0.0)
    train(tiny_recipe(root, run="alone", model=still), World(0, 1, torch.device("cpu")))
    return losses(root, "alone")


RESTART = ("--standalone", "--max-restarts=1")
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.slow
def test_a_torchrun_that_could_not_start_its_processes_again_is_refused_at_once(tmp_path):
    status, _, complained = ended(launched(tmp_path, RANK, "a bug", 0, 600, options=RESTART))
    assert status == 1
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before it" in complained
    assert "a fault of my own" not in complained


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_training_whose_rank_was_killed_goes_on_from_its_last_checkpoint_to_the_bit(root, tmp_path, rank):
    whole, name = f"whole-{rank}", f"killed-{rank}"
    status, _, complained = ended(launched(tmp_path, TRAINING, root, whole, -1, -1))
    assert status == 0, complained
    status, said, complained = ended(launched(tmp_path, TRAINING, root, name, rank, 3, options=RESTART, **OWN_STORE))
    assert status == 0, complained
    assert (tmp_path / "killed").exists()
    assert f"{name} goes on from {root}/runs/{name}/step-0000002" in said
    assert losses(root, name) == losses(root, whole)
    before, after = (load_file(root / "runs" / run / "step-0000006" / "model.safetensors") for run in (whole, name))
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)


def two_nodes(root: Path, folder: Path, name: str, rank: int, step: int, restarts: int = 0) -> list[subprocess.Popen]:
    """Two torchruns that meet as two machines do, with two ranks each."""
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port(0)}", "--rdzv-id=tiny"]
    options.append(f"--max-restarts={restarts}")
    return [launched(folder, TRAINING, root, name, rank, step, options=options, **OWN_STORE) for _ in range(2)]


@pytest.mark.slow
def test_two_nodes_of_two_processes_compute_what_one_process_computes(root, alone, tmp_path):
    nodes = [ended(node) for node in two_nodes(root, tmp_path, "nodes", -1, -1)]
    assert [status for status, _, _ in nodes] == [0, 0], nodes[0][2] + nodes[1][2]
    said = [line for _, words, _ in nodes for line in words.splitlines()]
    ranks = sorted(re.findall(r"LOCAL_RANK (\d) RANK (\d)", "\n".join(said)))
    assert [local for local, _ in ranks] == ["0", "0", "1", "1"]
    assert sorted(rank for _, rank in ranks) == ["0", "1", "2", "3"]
    assert len([line for line in said if line.startswith("step 6/6  saved")]) == 1, "one process of all writes"
    taken = re.findall(r"RANK \d takes \d+ pictures and \d+ texts", "\n".join(said))  # two may share a line
    assert sorted(taken) == sorted(f"RANK {rank} takes 2 pictures and 1 texts" for rank in range(4) for _ in range(6))
    np.testing.assert_allclose(np.array(losses(root, "nodes")), np.array(alone), rtol=2e-5)


@pytest.mark.slow
def test_two_nodes_start_again_together_when_a_rank_of_one_was_killed(root, alone, tmp_path):
    nodes = [ended(node) for node in two_nodes(root, tmp_path, "nodes again", 2, 3, restarts=2)]
    assert [status for status, _, _ in nodes] == [0, 0], nodes[0][2] + nodes[1][2]
    assert (tmp_path / "killed").exists()
    assert "nodes again goes on from" in nodes[0][1] + nodes[1][1]
    np.testing.assert_allclose(np.array(losses(root, "nodes again")), np.array(alone), rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_when_a_node_is_gone_the_other_ends(root, tmp_path, which):
    """Its processes end with its torchrun; those of the other node say one line each."""
    nodes = two_nodes(root, tmp_path, f"gone-{which}", -1, -1)
    try:
        assert "LOCAL_RANK" in nodes[which].stdout.readline()
        time.sleep(1)
        nodes[which].kill()
        status, _, complained = ended(nodes[1 - which], TOGETHER)
    finally:
        for node in nodes:
            node.kill()
    assert status == 1
    assert complained.count("another rank is gone or hangs") <= 2
    assert "[rank" not in complained, "no traceback of a rank"


# Three steps of four parts each on every rank; counts what crosses between ranks for the gradients.
COUNTING = """
import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from storage.object_store import open_store
from training.loop import Run, run_in_world, train_steps
from training.writer import Writer

crossed = []

def counted(state, bucket):
    crossed.append(bucket.buffer().numel())
    return allreduce_hook(state, bucket)

class Counting(Run):
    samples_per_step = 20

    def batches(self):
        return self.parts

    def prepare(self, step):
        pass

    def losses(self, parallel, part):
        if not parallel._comm_hooks:
            parallel.register_comm_hook(None, counted)
        return {"error": (parallel(part).square().sum(), len(part))}

    def keys(self, part):
        return []

    def save(self, done, validation, loop_state):
        pass

def work(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 1))
    inputs = torch.randn(3, 4, 2, 5, 30)  # step, part, rank, row
    recipe = SimpleNamespace(
        run_name="counting", steps=3, log_every=1, validate_every=9, save_every=9, spike=None, most_skipped=1,
        optimizer=SimpleNamespace(max_grad_norm=0.0),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Writer(open_store(__file__ + ".root")) as writer:
        run = Counting(recipe=recipe, world=world, model=model, optimizer=optimizer, writer=writer)
        run.parts = [[part[world.rank] for part in step] for step in inputs]
        train_steps(run)
    if world.first:
        print(crossed, sum(p.numel() for p in model.parameters()), flush=True)

run_in_world("rank.py", work)
"""


@pytest.mark.slow
def test_the_gradients_of_a_step_cross_between_ranks_once_whatever_its_parts(tmp_path):
    status, said, complained = ended(launched(tmp_path, COUNTING))
    assert status == 0, complained
    assert said.splitlines()[-1] == "[961, 961, 961] 961"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said", "lines"),
    [
        (["data.rot=1"], "data.rot=1: DataConfig has no field 'rot'", 1),
        (["data.text_batch=0", "model.regions.random_init=true", "data.root={root}"], "{root}", 2),
    ],
)
def test_the_launcher_ends_with_what_the_ranks_say_and_their_status(tmp_path, given, said, lines):
    root = str(tmp_path / "empty")
    command = [sys.executable, "-m", "training.launch", "--standalone", "--nproc-per-node=2", "-m", "vlbert.train"]
    command += ["pretrain_vlbert_demo", *(one.format(root=root) for one in given)]
    variables = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=PROJECT, env=variables)
    assert ended.returncode == 1
    if lines == 2:  # of a rank that knows its world
        assert root in (tmp_path / "error").read_text()
    told = [line for line in ended.stderr.splitlines() if "torch/distributed/run.py" not in line]
    assert 1 <= len(told) <= lines, ended.stderr
    assert all(line.startswith("torchrun -m vlbert.train pretrain_vlbert_demo: ") for line in told)
    assert said.format(root=root) in told[-1]


# --- a flow around them -----------------------------------------------------------------------------------------------


def trained_by_a_flow(root: Path, run: str, monitor: OnHeartbeat, processes: Processes, **changes) -> list[str]:
    """The lines that a flow would log."""
    said, workers = [], dataclasses.replace(tiny_recipe(root).data, workers=1)
    recipe = tiny_recipe(root, run=run, data=workers, **changes)
    overrides = as_overrides(recipe, RECIPES["pretrain_vlbert_demo"]())
    arguments = ["pretrain_vlbert_demo", *overrides]
    torchrun("vlbert.train", arguments, str(root), run, processes, said.append, monitor)
    return said


@pytest.mark.slow
def test_a_training_that_others_stop_has_saved_and_goes_on_when_its_flow_runs_again(root):
    """They signal every process of it, as systemd and SLURM do: torchrun, ranks, and what loads for them."""

    others = set(children(os.getpid()))

    def stop(beat: Mapping[str, Any]) -> None:
        (supervisor,) = set(children(os.getpid())) - others
        if beat["step"] >= 3 and beat["state"] != "stopped":
            for pid in sorted(descendants(supervisor)):
                os.kill(pid, signal.SIGTERM)

    processes = Processes(count=2, threads=1)
    with pytest.raises(TrainingStopped, match="did not fail, it was told to stop .*goes on from") as stopped:
        trained_by_a_flow(root, "signalled", stop, processes, steps=2000)
    place = str(stopped.value).rpartition(" ")[2]
    assert Path(place, "state.json").exists()
    step = int(place.rpartition("-")[2])
    assert 3 <= step < 2000
    said = trained_by_a_flow(root, "signalled", lambda beat: None, processes, steps=step + 1)
    assert any(f"goes on from {place}" in line for line in said)


@pytest.mark.slow
def test_a_training_that_takes_no_step_and_prints_nothing_for_too_long_is_ended_by_its_flow(root):
    never, began = dict.fromkeys(("steps", "log_every", "save_every", "validate_every"), 10**6), []
    others = set(children(os.getpid()))

    def hang(beat: Mapping[str, Any]) -> None:
        began.append(time.monotonic())
        if began[-1] - began[0] > 31:  # without output
            for pid in sorted(descendants(*(set(children(os.getpid())) - others))):
                os.kill(pid, signal.SIGSTOP)

    with pytest.raises(ChildTimedOut, match="it was silent for 30 s"):
        trained_by_a_flow(root, "silent", hang, Processes(silence=30), **never)
    assert began[-1] - began[0] > 31, "heartbeats are signs of life"


def in_place_of_torchrun(folder: Path, program: str) -> None:
    """Have `python -m training.launch`, started in the folder, run this."""
    (folder / "training").mkdir()
    (folder / "training" / "__init__.py").touch()
    (folder / "training" / "launch.py").write_text(program)


# In place of torchrun: each line of `lives` is a heartbeat, what the last rank left as its error, and the exit status.
LIVES = """
import json, os, sys
for beat, error, status in json.load(open("lives")):
    if beat:
        os.makedirs("root/runs/tiny", exist_ok=True)
        open("root/runs/tiny/heartbeat.json", "w").write(json.dumps(beat))
    if error:
        open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(error)
print("of torchrun", flush=True)
sys.exit(status)
"""
TIME = "2100-01-01T00:00:{:02}+00:00"  # after the start of any test
BEAT = {
    "time": TIME.format(0),
    "step": 5,
    "steps": 9,
    "losses": None,
    "seconds": 1.0,
    "seconds_left": None,
    "reason": None,
}
STOPPED = BEAT | {"state": "stopped", "reason": "after step 5 of 9"}
AGAIN = BEAT | {"state": "training", "time": TIME.format(1)}
FAILED = BEAT | {"state": "failed", "reason": "out of memory", "time": TIME.format(1)}


@pytest.mark.parametrize(
    ("before", "lives", "raised", "words"),
    [
        (None, [(STOPPED, None, 75)], TrainingStopped, "after step 5 of 9"),
        (None, [(STOPPED, None, 128 + signal.SIGTERM)], TrainingStopped, "after step 5 of 9"),
        (
            None,
            [(STOPPED, None, 75), (AGAIN, None, 75), (STOPPED, None, 75)],
            TrainingStopped,
            "step 5",
        ),
        (None, [(STOPPED, None, 1)], ChildFailed, "of torchrun"),
        (None, [(STOPPED, None, 75), (AGAIN, None, 75)], ChildFailed, "of torchrun"),
        (None, [(STOPPED, None, 75), (FAILED, "out of memory", 1)], ChildFailed, "  | out of memory"),
        (STOPPED, [(None, None, 75)], ChildFailed, "of torchrun"),  # of an earlier training
        (None, [(None, "no such recipe", 1)], ChildFailed, "  | no such recipe"),
    ],
)
def test_a_flow_tells_a_training_that_was_stopped_from_one_that_failed(
    tmp_path, monkeypatch, before, lives, raised, words
):
    in_place_of_torchrun(tmp_path, LIVES)
    monkeypatch.chdir(tmp_path)
    Path("lives").write_text(json.dumps(lives))
    if before:
        open_store("root").put("runs/tiny/heartbeat.json", json.dumps(before).encode())
    with pytest.raises(RuntimeError) as ended:
        torchrun("a.program", [], "root", "tiny", Processes(), lambda line: None)
    assert ended.type is raised
    assert words in str(ended.value).splitlines()[-1]


# In place of torchrun: asked to end, it takes half a second.
SLOW_TO_END = """
import signal, sys, time

def end(*_):
    time.sleep(0.5)
    sys.exit("saved")

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""


def test_torchrun_is_told_how_often_to_start_again_and_has_so_long_to_save(tmp_path, monkeypatch):
    in_place_of_torchrun(tmp_path, SLOW_TO_END)
    monkeypatch.chdir(tmp_path)
    for grace, said in ((0.1, ["ready"]), (20, ["ready", "saved"])):
        processes = Processes(restarts=3, grace=grace, timeout=1)
        with pytest.raises(ChildTimedOut) as failed:
            torchrun("no.program", [], "root", "run", processes, lambda line: None)
        assert failed.value.tail == said
        assert "--max-restarts=3" in failed.value.command


def test_processes_know_what_torchrun_needs_and_no_less_than_nothing():
    assert Processes(grace=119.5).environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"
    assert Processes().environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "30", "torchrun's own"
    for field in ("restarts", "grace"):
        with pytest.raises(ValueError, match=f"Processes.{field} is -1; it must be at least 0"):
            Processes(**{field: -1})
