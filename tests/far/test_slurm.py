"""SLURM of two nodes: trainings that are stopped, lose a node or the cable; a flow over both; a stage on both."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cluster import Cluster, slurm
from operated import ENDED, Operated, operated, running, wait_until
from places import PROJECT
from programs import command_line
from tiny import as_overrides, tiny_recipe, tiny_root
from tiny_detector import commit_images, image_sample, rectangles

from flows.pretrain import SETTINGS
from storage.settings import as_arguments, named_fields
from vlbert.recipes import RECIPES

pytestmark = [pytest.mark.far, pytest.mark.timeout(400)]

LOST = 25  # seconds after which this SLURM gives a node up; 300 by default
STEPS = 600  # of a training in which something happens: seconds, and none while the cable is cut
SHARDS = 150  # of one image each
LEFT = 10.0  # seconds after which a run that has ended, however it did, has no process on any node
RENDEZVOUS = ["bash", str(PROJECT / "docker/slurm/rendezvous.sh")]
SRUN = ["srun", "--nodes=2", "--ntasks-per-node=1", "--wait=60", "--kill-on-bad-exit=0", *RENDEZVOUS]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm"), lost=LOST) as started:
        yield started


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("trained"))


def saved(root: Path, run: str) -> list[str]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(file.parent.name for file in (root / "runs" / run).glob("step-*/state.json"))


def processes(root: Path, run: str) -> dict[int, str]:
    """The command lines of torchrun and its ranks, on all machines, by process id."""
    ours, found = {f"--data.root={root}", f"--run_name={run}"}, {}
    for pid, command, _ in running():
        words = command.split("\0")
        # Without srun, and the flow's supervisor of it, which have the same words on their command lines.
        if ours <= {*words} and words[0].endswith("python") and "-I" not in words:
            found[pid] = " ".join(words)
    return found


class Job:
    """A training that sbatch started from the file that is shipped."""

    def __init__(self, cluster: Cluster, root: Path, name: str, *more: str, **variables: str):
        self.cluster, self.root, self.run, self.log = cluster, root, name, root / f"{name}.txt"
        recipe = command_line(root, name, *more, steps=STEPS, save_every=100, validate_every=10**6)
        script = [f"--output={self.log}", "docker/slurm/train.sbatch"]
        self.number = cluster.submit(*script, *recipe, PROCESSES="1", **variables)

    def said(self) -> str:
        """What it has printed, in all its lives, without the lines of progress."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return "\n".join(line for line in lines if not line.startswith("step "))

    def wait(self, holds: Callable[[], object], seconds: float) -> None:
        wait_until(holds, seconds, lambda: f"{self.cluster.state(self.number)}\n{self.said()}")

    def wait_for(self, state: str, seconds: float = 180) -> None:
        self.wait(lambda: self.cluster.state(self.number) in {state, "FAILED"}, seconds)
        assert self.cluster.state(self.number) == state, self.said()

    def steps(self) -> int:
        metrics = self.root / "runs" / self.run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def saved(self) -> list[str]:
        return saved(self.root, self.run)

    def start_again(self) -> None:
        """Have it start again now: by itself SLURM waits two minutes."""
        self.wait_for("PENDING")
        self.cluster.call("one", "scontrol", "reconfigure")  # it asks nodes that were down, else a minute later or two
        wait_until(self.cluster.idle, 180, self.cluster.logs)
        wait_until(lambda: not self.processes(), 60)
        time.sleep(3)  # a node refuses a job that it ended in the same second ("Job credential revoked")
        self.cluster.call("one", "scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def processes(self) -> dict[int, str]:
        return processes(self.root, self.run)


def test_a_training_that_was_stopped_starts_again_and_the_job_is_completed(cluster: Cluster, root: Path):
    job = Job(cluster, root, "stopped")
    job.wait(job.steps, 120)
    cluster.call("one", "scancel", "--signal=TERM", job.number)  # as --signal=TERM@180 has it done
    job.start_again()
    assert not job.processes()
    assert job.said().count(": stopped: ") == 1
    last = job.saved()[-1]
    job.wait_for("COMPLETED")
    assert f"stopped resumes from {root}/runs/stopped/{last}" in job.said()
    assert job.saved()[-1] == f"step-{STEPS:07d}"


def test_a_training_that_fails_is_not_started_again_and_the_job_has_failed(cluster: Cluster, root: Path):
    job = Job(cluster, root, "wrong", "--data.batch=7", RESTARTS="0")
    job.wait_for("FAILED")
    assert "ExitCode=1:0" in cluster.call("one", "scontrol", "show", "job", job.number)
    assert "data.batch = 7 cannot be split over 2 processes" in job.said()


def test_a_cable_that_is_cut_for_20_s_costs_no_more_than_that(cluster: Cluster, root: Path):
    job = Job(cluster, root, "cut")
    job.wait(job.steps, 120)
    cluster.cut()
    try:
        time.sleep(2)
        before = job.steps()
        time.sleep(18)
        assert job.steps() == before < STEPS
    finally:
        cluster.join()
    job.wait_for("COMPLETED")
    assert "resumes from" not in job.said()


def test_a_training_that_lost_a_node_starts_again_from_its_last_checkpoint(cluster: Cluster, root: Path):
    """The cable is cut for longer than SLURM waits. What lives on behind it ends when it is joined."""
    job = Job(cluster, root, "lost")
    job.wait(job.saved, 120)
    cluster.cut()
    try:
        job.wait_for("PENDING")
        at = job.saved()[-1]
        assert len(job.processes()) == 2, "a torchrun and its rank, on the node that nobody reaches"
    finally:
        cluster.join()
    job.start_again()
    job.wait_for("COMPLETED")
    assert f"lost resumes from {root}/runs/lost/{at}" in job.said()
    assert not job.processes()


def test_a_detection_on_both_nodes_makes_no_shard_twice(cluster: Cluster, tmp_path: Path):
    root, log = tmp_path / "root", tmp_path / "log"
    commit_images(root, [[image_sample(number, rectangles(84, 112, number))] for number in range(SHARDS)])
    # A network that takes as long a shard as both need to be there together.
    detection = ["detect", root, "captions", "--preset=demo", "--random_init"]
    stage = ["--nodes=2", "--ntasks=2", f"--output={log}", "docker/slurm/stage.sbatch", *detection]
    job = cluster.submit(*stage, SLURM_LABELIO="1")  # each line begins with the number of its task
    wait_until(lambda: cluster.state(job) == "COMPLETED", 90, lambda: log.read_text() if log.exists() else "no log")
    counts = re.findall(r"^(\d): captions: \d+ of \d+ shards: .*?\b(\d+) ok", log.read_text(), re.MULTILINE)
    made = {task: int(ok) for task, ok in counts}  # the last line of each counts what it committed
    assert sum(made.values()) == SHARDS
    assert made.keys() == {"0", "1"}
    assert all(made.values())


# --- a flow -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(cluster: Cluster, root: Path, tmp_path: Path) -> Iterator[Operated]:
    """A server and a worker on node `one`, with a pre-training over both nodes."""
    recipe, ours = tiny_recipe(root, run_name="flow"), {*SETTINGS, "data.text_batch"}
    fields = named_fields(recipe, as_overrides(recipe, RECIPES["pretrain_vlbert"]("demo")))
    overrides = as_arguments({name: value for name, value in fields.items() if name not in ours})
    settings = {
        "recipe": "pretrain_vlbert --size demo",
        "run": "flow",
        "vocabulary": str(root / "text" / "vocab.txt"),
        "overrides": [*overrides, f"--steps={10**6}", "--save_every=20", f"--validate_every={10**6}"],
        "processes": {"nodes": 2, "launcher": SRUN, "threads": 1, "restarts": 1},
    }
    deployment = {
        "name": "default",
        "entrypoint": "flows.pretrain.pretrain_flow",
        "work_pool": {"name": "local", "job_variables": {"command": "python -m flows.engine"}},
        "parameters": {"root": str(root), "work": str(tmp_path / "work"), "settings": settings},
    }
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump({"name": "vlbert", "deployments": [deployment]}))
    with cluster.on("one"), operated(tmp_path / "prefect", file) as serving:
        yield serving


def trains(served: Operated, root: Path, run: str) -> dict[int, str]:
    """Wait until the run has saved once more; the ranks on both nodes."""
    before = saved(root, "flow")
    served.wait_for(run, lambda: set(saved(root, "flow")) - set(before), 120)
    found = processes(root, "flow")
    ranks = {pid: command for pid, command in found.items() if " training.launch " not in command}
    assert (len(found), len(ranks)) == (4, 2), "on each node a torchrun and its rank"
    return ranks


def ends(served: Operated, run: str, cluster: Cluster, state: str, seconds: float = LEFT) -> None:
    """See that the run ends in this state and leaves nothing on any node."""
    served.wait_for(run, lambda: not served.processes(run), seconds)
    served.wait_for(run, lambda: not cluster.jobs(), LEFT)
    served.wait_for(run, lambda: served.state(run) in ENDED, 60)
    assert served.state(run) == state


def test_a_flow_over_both_nodes_is_one_run_with_one_end(cluster: Cluster, root: Path, served: Operated):
    """A rank dies, and all start again; then the run is cancelled. The next one is killed, the third one told to stop,
    and of the last one a node dies."""
    run = served.start("pretrain/default")
    ranks = trains(served, root, run)
    os.kill(max(ranks), signal.SIGKILL)
    served.wait_for(run, lambda: len(set(processes(root, "flow")) - set(ranks)) == 4, 60)
    trains(served, root, run)
    served.ask("POST", f"/flow_runs/{run}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    ends(served, run, cluster, "CANCELLED")

    run = served.start("pretrain/default")
    trains(served, root, run)
    os.kill(served.process(run), signal.SIGKILL)
    ends(served, run, cluster, "CRASHED")

    run = served.start("pretrain/default")
    trains(served, root, run)
    cluster.call("one", "scancel", "--signal=TERM", cluster.jobs().split()[0])
    ends(served, run, cluster, "FAILED", 60)  # it saves, and says so
    assert "it was stopped by SIGTERM" in served.ask("GET", f"/flow_runs/{run}")["state"]["message"]

    run = served.start("pretrain/default")
    trains(served, root, run)
    cluster.kill("two")
    try:
        ends(served, run, cluster, "FAILED", 3 * LOST)
    finally:
        cluster.restart("two")
