"""Training that nobody watches: steps left out, SIGTERM and Ctrl-C, the heartbeat, and what the log measures."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import PROJECT
from safetensors.torch import load_file
from tiny import tiny_recipe, tiny_root
from torch import nn

from benchmarks.killed_training import CLOCKED, check_stopped
from storage.object_store import LocalStore, ObjectStore, StorageUnreachable, open_store
from storage.runs import open_folder, sealed_json
from training.distributed import World
from training.log import read_heartbeat, read_metrics
from training.loop import Run, Stopped, batches, train_steps
from training.metrics import Since, Step
from training.skipping import WINDOW, Skipping
from training.stopping import Stop
from training.writer import Writer
from vlbert.data.batch import Batch
from vlbert.train import train

ALONE = World(0, 1, torch.device("cpu"))


def step(loss: float, norm: float = 1.0, **losses: float) -> Step:
    return Step({f"loss_{name}": (value, 1.0) for name, value in losses.items()}, loss, norm, 0.0, False)


# --- which steps are left out -----------------------------------------------------------------------------------------


def test_a_spike_is_judged_by_the_last_hundred_steps_that_were_taken_and_not_before_there_are_so_many():
    skipping = Skipping(5.0)
    assert [skipping.why(step(1.0 if n else 50.0)) for n in range(WINDOW - 1)] == [None] * (WINDOW - 1)
    assert skipping.why(step(1000.0)) is None, "99 came before it"
    mean = (50 + 98 + 1000) / 100
    for _ in range(2):  # what was left out is no part of the mean
        why = "the loss (57.5) is over 5 times the mean of the last 100 (11.48)"
        assert skipping.why(step(5 * mean + 0.1)) == why
    assert skipping.why(step(5 * mean - 0.1)) is None
    assert Skipping(None, skipping.state).why(step(1e9)) is None


def test_what_is_not_finite_is_left_out_from_the_first_step_on_and_named():
    skipping = Skipping(None)
    why = skipping.why(step(math.nan, math.nan, words=1.0, regions=math.inf))
    assert why == "the loss of regions (inf) is not finite"
    assert skipping.why(step(1.0, math.nan, words=1.0)) == "the norm of the gradient (nan) is not finite"
    assert skipping.in_a_row == 2
    assert skipping.why(step(1.0, words=1.0)) is None
    assert skipping.in_a_row == 0


def test_a_run_that_goes_on_judges_as_one_that_never_stopped():
    whole = Skipping(2.0)
    losses = [1.0 + (n * 7 % 13) / 10 for n in range(130)] + [3.3, 9.9, 3.1]
    said = [whole.why(step(loss)) for loss in losses]
    assert sum(map(bool, said)) == 2
    for cut in (50, 120, 131):
        before = Skipping(2.0)
        first = [before.why(step(loss)) for loss in losses[:cut]]
        after = Skipping(2.0, json.loads(json.dumps(before.state)))
        assert first + [after.why(step(loss)) for loss in losses[cut:]] == said
        assert after.state == whole.state


# --- what a step that is left out leaves behind -----------------------------------------------------------------------


class Network(nn.Module):
    """With a norm that learns its statistics, as the demo's detector has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, rows: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
        y = self.layers(rows[:, :3])
        return {"size": ((rows[:, 3:] * y**2).sum(), len(y)), "positive": ((y > 0).sum(), len(y))}


def parts_of(number: int, bad: Iterable[int] = (), spikes: Iterable[int] = ()) -> list[torch.Tensor]:
    """Two parts of a step; in the steps of `bad` the second holds a value that is no number, in those of `spikes` each
    row counts a million times."""
    parts = list(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(number)))
    for part in parts:
        part[:, 3] = 1e6 if number in spikes else 1.0
    if number in bad:
        parts[1][2, 1] = torch.nan
    return parts


@dataclasses.dataclass(eq=False, kw_only=True)
class Taught(Run):
    """A run over these parts."""

    parts: list[list[torch.Tensor]]
    on_validate: Callable[[], tuple[dict[str, float], list[dict]]] | None
    on_save: Callable[[Writer, int, dict], None]
    samples_per_step = 10

    def batches(self) -> list[list[torch.Tensor]]:
        return self.parts

    def prepare(self, step: int) -> None:
        pass  # the rate stays as it is

    def losses(self, model: nn.Module, part: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
        return model(part)

    def keys(self, part: torch.Tensor) -> list[str]:
        return [f"{float(row[0]):.3f}" for row in part]

    @property
    def validate(self) -> Callable[[], tuple[dict[str, float], list[dict]]] | None:
        return self.on_validate

    def save(self, done: int, validation: dict, loop_state: dict) -> None:
        self.on_save(self.writer, done, loop_state)


class Impatient(Writer):
    def finish(self, patience: float = 0.1) -> None:
        super().finish(0.1)


def taught(
    store: ObjectStore,
    steps: Sequence[int],
    bad: Iterable[int] = (),
    spikes: Iterable[int] = (),
    resumed: dict | None = None,
    rate: float = 0.1,
    validate: Callable[[], tuple[dict[str, float], list[dict]]] | None = None,
    save: Callable[[Writer, int, dict], None] = lambda writer, done, state: None,
    make_writer: Callable[[ObjectStore], Writer] = Writer,
    **changes: Any,
) -> tuple[Network, torch.optim.Optimizer]:
    """Network after steps with these numbers, those of `bad` poisoned."""
    settings = {"steps": len(steps), "log_every": 2, "validate_every": 100, "save_every": 100, "spike": 5.0}
    settings |= {"most_skipped": 2, "optimizer": SimpleNamespace(max_grad_norm=1.0)}
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate)
    with make_writer(store) as writer:
        run = Taught(
            recipe=SimpleNamespace(run_name="run", **settings | changes),
            world=ALONE,
            model=network,
            optimizer=optimizer,
            writer=writer,
            loop_state=resumed,
            parts=[parts_of(number, bad, spikes) for number in steps],
            on_validate=validate,
            on_save=save,
        )
        train_steps(run)
    return network, optimizer


def lines_of(store: ObjectStore, name: str) -> list[dict]:
    path = f"runs/run/{name}"
    return [json.loads(line) for line in store.get(path).splitlines()] if store.exists(path) else []


def test_a_step_that_is_left_out_changes_nothing_and_is_written_down_with_its_samples(tmp_path, capsys):
    left_out, without = (open_store(str(tmp_path / name)) for name in ("left-out", "without"))
    network, optimizer = taught(left_out, [0, 1, 2, 3, 4], bad=[2])
    as_if, other = taught(without, [0, 1, 3, 4])
    # The statistics of the norm, and how many batches they are of, too.
    torch.testing.assert_close(network.state_dict(), as_if.state_dict(), rtol=0, atol=0)
    moments = zip(optimizer.state.values(), other.state.values(), strict=True)
    assert all(torch.equal(one[name], two[name]) for one, two in moments for name in one)

    (line,) = lines_of(left_out, "skipped.jsonl")
    assert line.pop("keys") == [f"{float(row[0]):.3f}" for part in parts_of(2) for row in part]
    assert line == {
        "step": 3,
        "why": "the loss of size (nan) is not finite",
        "loss": None,
        "gradient_norm": None,
        "losses": {"size": None},
    }
    assert not lines_of(without, "skipped.jsonl")
    logged = lines_of(left_out, "metrics.jsonl")
    assert [one.get("skipped") for one in logged] == [None, 1, None]
    assert all(math.isfinite(value) for one in logged for value in one.values() if isinstance(value, float))
    said = capsys.readouterr().out.splitlines()
    assert "step 3/5  left out: the loss of size (nan) is not finite" in said
    assert re.match(r"step 4/5  size \d+\.\d{3}  skipped 1  \S+ samples/s", said[2])


def test_so_many_steps_left_out_in_a_row_end_the_run_and_all_that_helps_is_named(tmp_path):
    store = open_store(str(tmp_path))
    taught(store, range(6), bad=[1, 3])  # one at a time
    with pytest.raises(FloatingPointError) as caught:
        taught(store, range(6), bad=[1, 3, 4])
    said = str(caught.value)
    assert said.startswith("2 steps in a row were left out, the last of them, 5, because the loss of size (nan)")
    assert f"{tmp_path}/runs/run/skipped.jsonl names their samples; no checkpoint was saved. " in said
    assert "spike=none" in said
    assert [line["step"] for line in lines_of(store, "skipped.jsonl")] == [2, 4, 5]
    assert read_heartbeat(store, "run")["state"] == "failed"
    assert read_heartbeat(store, "run")["step"] == 5
    assert "steps in a row were left out" in read_heartbeat(store, "run")["reason"]


class SlowFolder(LocalStore):
    """A folder that takes its time for the last file of a checkpoint or, `full`, does not take it."""

    full = False

    def put(self, path: str, data: Any, **how: Any) -> Any:
        if path.endswith("state.json"):
            time.sleep(0.3)
            if self.full:
                raise StorageUnreachable("no space left")
        return super().put(path, data, **how)


@pytest.mark.parametrize("full", [False, True])
def test_a_checkpoint_that_is_still_being_written_when_a_run_fails_is_waited_for_and_named(tmp_path, full):
    folder = SlowFolder(str(tmp_path))
    folder.full = full

    def save(writer: Writer, done: int, state: dict) -> None:
        writer.checkpoint(f"runs/run/step-{done:07d}", {"state.json": b"{}"}, lambda: None)

    with pytest.raises(FloatingPointError) as caught:
        taught(
            folder,
            range(6),
            bad=[2, 3],
            save=save,
            save_every=2,
            make_writer=Impatient if full else Writer,
        )
    named = "no checkpoint was saved. " if full else f"the last good checkpoint is {tmp_path}/runs/run/step-0000002. "
    assert named in str(caught.value)


def test_the_losses_by_which_a_spike_is_judged_come_from_the_checkpoint(tmp_path):
    states = []
    store = open_store(str(tmp_path / "before"))
    taught(store, range(WINDOW), rate=0, save=lambda writer, done, state: states.append(state))
    (state,) = (json.loads(json.dumps(state)) for state in states)
    for name, resumed, left_out in (("after", state, [3]), ("new", None, [])):
        store = open_store(str(tmp_path / name))
        taught(store, range(5), spikes=[2], resumed=resumed, rate=0)
        assert [line["step"] for line in lines_of(store, "skipped.jsonl")] == left_out


def test_what_no_gradient_flows_through_is_measured_and_changes_nothing(tmp_path):
    store = open_store(str(tmp_path))
    network, _ = taught(store, range(4), log_every=4)
    (line,) = lines_of(store, "metrics.jsonl")
    assert 0 < line["positive"] < 1
    assert "loss_positive" not in line
    assert 0 < line["gradient_norm"] <= line["gradient_norm_max"]
    assert 0 <= line["data_wait"] <= 1
    assert line["memory_gb"] > 0.01

    class Unmeasured(Network):
        def forward(self, rows: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
            return {"size": super().forward(rows)["size"]}

    plain = Unmeasured()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number in range(4):
        for part in parts_of(number):
            (loss, count) = plain(part)["size"]
            (loss / count / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(network.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_time_that_is_not_training_is_in_no_rate():
    since = Since()
    since.add(dataclasses.replace(step(1.0, words=2.0), waited=0.01), taken=True)
    with since.paused():
        time.sleep(0.3)
    time.sleep(0.05)
    line = since.line(ALONE.device)
    assert 0.05 <= line.seconds < 0.3
    assert line.data_wait == pytest.approx(0.01 / line.seconds)
    assert line.losses == {"words": 2.0}
    assert since.line(ALONE.device).losses == {}


REQUESTS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def before() -> Iterator[list[int]]:
    """The signals that came to the handler that was there before a training."""
    came: list[int] = []
    defaults = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in REQUESTS}
    yield came
    for number, default in defaults.items():
        signal.signal(number, default)


# --- in a whole run ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("left-alone"))


def unclocked(root: Path, run: str) -> list[dict]:
    lines = (root / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in CLOCKED} for line in lines]


def assert_equal_runs(root: Path, one: str, other: str, last: int) -> None:
    """To the bit: what they logged, their weights, moments and the state of their loops."""
    assert unclocked(root, one) == unclocked(root, other)
    folders = [root / "runs" / run / f"step-{last:07d}" for run in (one, other)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (folder / name for folder in folders)
        assert first.read_bytes() == second.read_bytes(), name
    states = [open_folder(LocalStore(str(root)), f"runs/{run}/{folders[0].name}").state for run in (one, other)]
    for state in states:
        del state["files"]["config.json"]  # it names the run
    assert states[0] == states[1]


@pytest.mark.slow
def test_a_run_that_goes_on_leaves_out_the_spike_that_it_would_have_left_out(root):
    def spike(step: int, parts: Sequence[Batch]) -> None:
        if step == 105:
            parts[0].labels["region_classes"] *= 1000

    recipe = tiny_recipe(root, steps=108, log_every=5, save_every=103, validate_every=1000)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, held_out=None))
    train(dataclasses.replace(recipe, run="whole"), ALONE, spike)
    skipped = [json.loads(line) for line in (root / "runs/whole/skipped.jsonl").read_text().splitlines()]
    assert [(line["step"], len(line["keys"])) for line in skipped] == [(106, 8 + 4)]
    assert "times the mean of the last 100" in skipped[0]["why"]
    assert [line.get("skipped") for line in unclocked(root, "whole")][-2:] == [None, 1]

    train(dataclasses.replace(recipe, run="cut"), ALONE, spike)
    (root / "runs/cut/step-0000108/state.json").unlink()  # as if it had been killed before that was whole
    train(dataclasses.replace(recipe, run="cut"), ALONE, spike)
    assert_equal_runs(root, "whole", "cut", 108)
    assert (root / "runs/cut/skipped.jsonl").read_text() == (root / "runs/whole/skipped.jsonl").read_text()


def test_a_run_that_is_told_to_stop_saves_after_its_step_and_goes_on_as_if_nobody_had_stopped_it(root, capsys, before):
    recipe = tiny_recipe(root, steps=8, log_every=3, save_every=6, validate_every=4)
    train(dataclasses.replace(recipe, run="unstopped"), ALONE)

    def stop(step: int, parts: Sequence[Batch]) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = dataclasses.replace(recipe, run="stopped")
    folder = root / "runs" / "stopped" / "step-0000005"
    with pytest.raises(Stopped, match=f"after step 5 of 8; the next start goes on from {folder}"):
        train(stopped, ALONE, stop)
    os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does when another rank has ended first
    assert before == []
    store = open_store(str(root))
    beat = read_heartbeat(store, "stopped")
    assert (beat["state"], beat["step"], beat["steps"], beat["checkpoint"]) == ("stopped", 5, 8, str(folder))
    assert beat["reason"] == f"after step 5 of 8; the next start goes on from {folder}"
    train(stopped, ALONE)
    assert_equal_runs(root, "unstopped", "stopped", 8)
    assert [line["step"] for line in read_metrics(store, "stopped", "training")] == [3, 6, 8]

    progress = [line for line in capsys.readouterr().out.splitlines() if " samples/s " in line]
    assert len(progress) == 3 + 3
    beat = read_heartbeat(store, "stopped")
    assert (beat["state"], beat["step"], beat["processes"], beat["pid"]) == ("done", 8, 1, os.getpid())
    assert (beat["resumed_from"], beat["reason"]) == (str(folder), None)
    last = open_folder(LocalStore(str(root)), beat["checkpoint"].removeprefix(f"{root}/")).state
    assert beat["snapshot"] == last["data"]["snapshots"][-1]["snapshot"]
    assert beat["losses"].keys() == {"words", "text_words", "regions"}
    assert beat["seconds_left"] == 0
    assert read_heartbeat(store, "never") is None


def test_what_a_checkpoint_without_a_state_of_the_loop_began_goes_on(root):
    recipe = tiny_recipe(root, run="old", steps=3, save_every=3)
    train(recipe, ALONE)
    file = root / "runs/old/step-0000003/state.json"
    state = json.loads(file.read_text())
    assert state.pop("loop")["skipping"]["in_a_row"] == 0
    file.write_bytes(sealed_json(state))
    train(dataclasses.replace(recipe, steps=4), ALONE)
    assert [line["step"] for line in read_metrics(open_store(str(root)), "old", "training")] == [1, 2, 3, 4]


# --- SIGTERM and Ctrl-C -----------------------------------------------------------------------------------------------


def test_sigterm_during_a_validation_stops_the_run_behind_it(tmp_path, before):
    store, saved = open_store(str(tmp_path)), []

    def validate() -> tuple[dict[str, float], list[dict]]:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while (read_heartbeat(store, "run") or {}).get("state") != "validating":  # a thread writes it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return {"accuracy": 1.0}, []

    with pytest.raises(Stopped, match="after step 2 of 6"):
        taught(
            store, range(6), validate=validate, save=lambda writer, done, state: saved.append(done), validate_every=2
        )
    assert saved == [2]
    assert [line["kind"] for line in lines_of(store, "metrics.jsonl")] == ["training", "validation"]
    assert read_heartbeat(store, "run")["state"] == "stopped"


@pytest.mark.parametrize("number", REQUESTS)
def test_one_request_may_come_twice_and_once_more_behind_a_training_that_stopped(before, monkeypatch, number):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launcher that sends it again")

    def told() -> None:
        os.kill(os.getpid(), number)

    with Stop() as stop:
        assert not stop.requested
        told()
        told()
        assert stop.requested
    told()  # it was told to in its last step
    with pytest.raises(Stopped), Stop():  # another rank was told to
        raise Stopped
    told()
    assert before == []


@pytest.mark.parametrize("number", REQUESTS)
def test_a_signal_means_what_it_did_before_behind_a_training_that_was_not_told_to_stop_or_failed(before, number):
    with Stop():
        pass
    os.kill(os.getpid(), number)
    assert before == [number]

    def one_of_a_dead_rank() -> None:
        with Stop():
            os.kill(os.getpid(), number)  # torchrun's
            raise RuntimeError

    with pytest.raises(RuntimeError):
        one_of_a_dead_rank()
    os.kill(os.getpid(), number)
    assert before == [number, number]


def test_a_program_that_runs_alone_says_at_ctrl_c_that_it_saves_and_a_second_one_ends_it_at_once(before, capfd):
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.requested, before) == (True, [])
        assert "Ctrl-C again ends at once" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        assert before == [signal.SIGINT]


def test_ctrl_c_stays_ignored_where_it_was(before):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts `program &` in a script
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


# A request in a step, while the writer ends, when another rank has ended, and when Python clears up.
TOLD_TO_THE_END = """
import atexit, os, signal, sys
from training.loop import run_in_world
from training.stopping import Stop, Stopped

def told(kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
    kill(pid, number)

class Last:
    def __del__(self, told=told):
        told()

def work(world):
    try:
        with Stop():
            told()
            raise Stopped("after step 5 of 9")
    finally:
        told()

last = Last()
atexit.register(told)
run_in_world("program recipe", work)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", REQUESTS)
def test_the_status_of_a_run_that_stopped_is_its_own_however_often_it_is_told(number):
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "TORCHELASTIC_RUN_ID": "one"}
    program = [sys.executable, "-c", HEED_CTRL_C + TOLD_TO_THE_END, str(int(number))]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("stopping: ")]
    assert (ended.returncode, lines) == (75, ["program recipe: stopped: after step 5 of 9"])


# Else it is ignored where pytest itself runs in the background of a script.
HEED_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
TWICE = """
import os, signal, sys, time
from training.stopping import Stop

with Stop():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(float(sys.argv[2]))
    os.kill(os.getpid(), int(sys.argv[1]))
    try:
        time.sleep(60)
    finally:
        time.sleep(60)  # as for a writer
"""


@pytest.mark.parametrize(
    ("number", "pause"), [pytest.param(signal.SIGTERM, 5.2, marks=pytest.mark.slow), (signal.SIGINT, 0)]
)
def test_a_second_request_ends_at_once(number, pause):
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    program = [sys.executable, "-c", HEED_CTRL_C + TWICE, str(int(number)), str(pause)]
    assert subprocess.run(program, env=environment, timeout=40).returncode == -number


class Numbers(torch.utils.data.Dataset):
    """The numbers, and who loads them."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def test_a_loading_process_passes_over_signals_but_from_its_loader():
    ahead = batches(Numbers(), range(40), 2, torch.device("cpu"))
    _, worker = next(ahead)
    for name in ("-TERM", "-INT"):
        subprocess.run(["kill", name, str(worker)], check=True)  # from another process, as a launcher does
    time.sleep(0.2)
    found = list(ahead)
    assert [number for number, _ in found] == list(range(1, 40))
    assert len({pid for _, pid in found}) == 2


RANK = """
import dataclasses, sys
from pathlib import Path
from tiny import TINY_MODEL, tiny_recipe
from training import distributed
from vlbert.train import train

world = distributed.start()

def poison(step, parts):
    if step == 2 and world.rank == world.size - 1:
        parts[-1].labels["region_classes"][-1] = float("nan")

recipe = tiny_recipe(Path(sys.argv[1]), run=sys.argv[2], model=dataclasses.replace(TINY_MODEL, dropout=0.0))
train(recipe, world, poison)
distributed.stop(world)
"""


@pytest.mark.slow
def test_what_one_rank_cannot_learn_from_all_leave_out(root, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests'}", "OMP_NUM_THREADS": "1"}
    for run, processes in (("one", 1), ("two", 2)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        result = subprocess.run(
            [*command, str(tmp_path / "rank.py"), str(root), run], env=environment, capture_output=True, timeout=240
        )
        assert result.returncode == 0, result.stderr[-3000:].decode()
    one, two = (json.loads((root / "runs" / run / "skipped.jsonl").read_text()) for run in ("one", "two"))
    assert (one["step"], one["why"]) == (two["step"], two["why"]) == (3, "the loss of regions (nan) is not finite")
    assert sorted(one["keys"]) == sorted(two["keys"])
    assert len(one["keys"]) == 8 + 4
    weights = [load_file(root / "runs" / run / "step-0000006" / "model.safetensors") for run in ("one", "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank"), [(1, None), (2, 1)])
def test_a_training_that_is_told_to_stop_goes_on_as_if_nothing_had_happened(tmp_path, size, rank):
    """The launcher told, which tells its ranks; and one rank alone."""
    said: list[str] = []
    assert check_stopped(tmp_path, 7, size, rank, said.append) == []
    assert sum(" told to stop in step " in line for line in said) == 1
