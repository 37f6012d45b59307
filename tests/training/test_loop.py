"""The training loop: skipped steps, SIGTERM and Ctrl-C, the heartbeat, and what the log measures."""

import contextlib
import dataclasses
import gzip
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from places import DATA, PROJECT
from small_run import Network, parts_of, run_small
from tiny import tiny_recipe, tiny_root
from torch import nn
from writing import Held, wait_for

from storage.object_store import ObjectStore, open_store
from storage.runs import open_folder
from tests.kill.training import check_stopped, unequal
from training.checkpoint import Writer, write_checkpoint
from training.distributed import ALONE
from training.log import read_heartbeat, read_metrics
from training.metrics import Step
from training.recipe import RunSettings
from training.skipping import WINDOW, Skipping
from training.stopping import Stop, Stopped
from vlbert.data.batch import Batch
from vlbert.train import train

# Gradient norms of ten runs of demo recipes that learned, one or two of each task: name -> one for each step.
HEALTHY = json.loads((DATA / "gradient_norms.json").read_text())


def step(loss: float, norm: float = 1.0, **losses: float) -> Step:
    return Step({f"loss_{name}": (value, 1.0) for name, value in losses.items()}, losses, loss, norm, 0.0, False)


def skipped(norms: Iterable[float], spike: float | None = RunSettings.spike) -> list[int]:
    """Which of these gradient norms are skipped."""
    skipping = Skipping(spike)
    return [number for number, norm in enumerate(norms) if skipping.skip_reason(step(1.0, norm))]


@pytest.mark.parametrize("run", HEALTHY)
def test_no_step_of_a_healthy_run_is_skipped_and_every_planted_spike_is(run):
    """Pre-trainings are steady: 5 times the usual norm is a spike anywhere. Others vary: 5,000 times, at the end."""
    assert len(HEALTHY) == 10
    norms = HEALTHY[run]
    assert len(norms) >= 200
    assert skipped(norms) == []
    steady = run.startswith("pretrain")
    for at in range(WINDOW, len(norms), 50) if steady else [len(norms) - 1]:
        planted = (5 if steady else 5_000) * statistics.geometric_mean(norms[at - WINDOW : at])
        assert skipped([*norms[:at], planted, *norms[at + 1 :]]) == [at]


def test_a_spike_is_measured_against_the_last_hundred_steps_taken():
    steady = [0.02, 0.03] * (WINDOW // 2)
    assert skipped([*steady[1:], 1e3]) == [], "99 came before it"
    assert skipped([*steady, 1e3, 1e3, 0.03, 1e3]) == [100, 101, 103], "a skipped step is not compared with"
    assert skipped([*steady, 0.024 * 3.9, 0.024 * 4.9]) == [101], "the floor: 4 times the usual"
    assert skipped([0.0, *steady, 0.0, 1e3]) == [102], "no gradient is no measure"
    assert skipped([*steady, 1e3], None) == []
    assert skipped([3.0**n for n in range(300)]) == [], "what grows steadily"


def test_a_loss_or_gradient_that_is_not_finite_is_skipped_and_named():
    skipping = Skipping(None)
    assert "regions (inf)" in skipping.skip_reason(step(math.nan, math.nan, words=1.0, regions=math.inf))
    assert "gradient (nan)" in skipping.skip_reason(step(1.0, math.nan, words=1.0))
    assert skipping.in_a_row == 2
    assert skipping.skip_reason(step(1.0, words=1.0)) is None
    assert skipping.in_a_row == 0


def test_a_resumed_run_skips_as_an_uninterrupted_one():
    norms = [1.0 + (n * 7 % 13) / 10 for n in range(130)] + [9.9, 3.3, 9.9]
    whole, resumed = Skipping(2.0), Skipping(2.0)
    reasons = [whole.skip_reason(step(1.0, norm)) for norm in norms]
    assert sum(map(bool, reasons)) == 2
    for number, norm in enumerate(norms):
        if number in (50, 120, 131):
            resumed = Skipping(2.0, json.loads(json.dumps(resumed.state)))
        assert resumed.skip_reason(step(1.0, norm)) == reasons[number]
    assert resumed.state == whole.state


def lines_of(store: ObjectStore, name: str) -> list[dict]:
    path = f"runs/run/{name}"
    return [json.loads(line) for line in store.get(path).splitlines()] if store.exists(path) else []


def test_a_skipped_step_changes_nothing_and_is_logged_with_its_samples(tmp_path, capsys):
    skipped, without = (open_store(str(tmp_path / name)) for name in ("skipped", "without"))
    network, optimizer = run_small(skipped, [0, 1, 2, 3, 4], bad=[2])
    as_if, other = run_small(without, [0, 1, 3, 4])
    # The statistics of the norm, and how many batches they are of, too.
    torch.testing.assert_close(network.state_dict(), as_if.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], other.state_dict()["state"], rtol=0, atol=0)

    (line,) = lines_of(skipped, "skipped.jsonl")
    assert line["keys"] == [f"{float(row[0]):.3f}" for part in parts_of(2) for row in part]
    assert (line["step"], line["loss"], line["gradient_norm"], line["losses"]) == (3, None, None, {"size": None})
    assert "size (nan)" in line["why"]
    assert not lines_of(without, "skipped.jsonl")
    logged = lines_of(skipped, "metrics.jsonl")
    assert [one.get("skipped") for one in logged] == [None, 1, None]
    assert all(math.isfinite(value) for one in logged for value in one.values() if isinstance(value, float))
    assert "skipped 1" in capsys.readouterr().out


def test_a_step_with_a_spike_changes_nothing(tmp_path):
    store, steps = open_store(str(tmp_path)), [*range(WINDOW + 20)]
    network, _ = run_small(store, steps, wild=[WINDOW + 10], spike=RunSettings.spike)
    without, _ = run_small(open_store(str(tmp_path / "without")), [n for n in steps if n != WINDOW + 10])
    torch.testing.assert_close(network.state_dict(), without.state_dict(), rtol=0, atol=0)
    (line,) = lines_of(store, "skipped.jsonl")
    assert line["step"] == WINDOW + 11
    assert "times the usual one" in line["why"]


def test_a_profiled_step_leaves_its_trace_and_changes_nothing(tmp_path):
    store, plain = (open_store(str(tmp_path / name)) for name in ("profiled", "plain"))
    networks = [run_small(store, range(4), profile=3)[0], run_small(plain, range(4))[0]]
    torch.testing.assert_close(*(network.state_dict() for network in networks), rtol=0, atol=0)
    (file,) = (info.path for info in store.list("runs/run/profile-0000003/"))
    names = {event.get("name", "") for event in json.loads(gzip.decompress(store.get(file)))["traceEvents"]}
    assert {"aten::addmm", "AddmmBackward0", "Optimizer.step#AdamW.step"} <= names, "forward, backward and the update"
    assert not [info for info in plain.list("runs/run/profile")]


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    store = open_store(str(tmp_path))
    run_small(store, range(6), bad=[1, 3])  # one at a time
    named = rf"2 steps in a row.* size \(nan\).* {tmp_path}/runs/run/skipped.jsonl .* no checkpoint"
    with pytest.raises(FloatingPointError, match=named) as error:
        run_small(store, range(6), bad=[1, 3, 4])
    assert [line["step"] for line in lines_of(store, "skipped.jsonl")] == [2, 4, 5]
    beat = read_heartbeat(store, "run")
    assert (beat["state"], beat["step"], beat["reason"]) == ("failed", 5, str(error.value))


def test_a_run_that_fails_waits_for_its_checkpoint_and_names_it(tmp_path):
    store, recipe = Held(tmp_path, "state.json"), RunSettings(name="run", keep_checkpoints=1)

    def save(writer: Writer, done: int, state: dict) -> None:
        write_checkpoint(writer, recipe, done, {}, {"step": done}, None)
        threading.Timer(0.3, store.let_through.set).start()

    with pytest.raises(FloatingPointError, match=f"last good checkpoint is {tmp_path}/runs/run/step-0000002. "):
        run_small(store, range(6), bad=[2, 3], save=save, save_every=2)


def test_a_measure_without_gradient_changes_no_weight(tmp_path):
    store = open_store(str(tmp_path))
    network, _ = run_small(store, range(4), log_every=4)
    (line,) = lines_of(store, "metrics.jsonl")
    assert 0 < line["positive"] < 1
    assert "loss_positive" not in line
    assert 0 < line["gradient_norm"] <= line["gradient_norm_max"]
    assert 0 <= line["data_wait"] <= 1
    assert line["memory_gb"] > 0.01

    plain = Network()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number in range(4):
        for part in parts_of(number):
            loss, count = plain(part)["size"]
            (loss / count / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(network.state_dict(), plain.state_dict(), rtol=0, atol=0)


REQUESTS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def before() -> Iterator[list[int]]:
    """The signals that came to the handler that was there before a training."""
    came: list[int] = []
    defaults = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in REQUESTS}
    yield came
    for number, default in defaults.items():
        signal.signal(number, default)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("left-alone"))


def test_a_stopped_training_saves_after_its_step_and_goes_on_to_the_bit(root, capsys, before):
    store, recipe = open_store(str(root)), tiny_recipe(root, steps=8, log_every=3, save_every=6, validate_every=4)
    train(dataclasses.replace(recipe, run_name="unstopped"), ALONE)

    def stop(step: int, parts: Sequence[Batch]) -> None:
        state = "training" if step else "starting"
        wait_for(lambda: (read_heartbeat(store, "stopped") or {}).get("state") == state)  # a thread writes it
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = dataclasses.replace(recipe, run_name="stopped")
    folder = root / "runs" / "stopped" / "step-0000005"
    with pytest.raises(Stopped, match=f"after step 5 of 8; the next start resumes from {folder}") as error:
        train(stopped, ALONE, stop)
    os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does when another rank has ended first
    assert before == []
    beat = read_heartbeat(store, "stopped")
    assert (beat["state"], beat["step"], beat["steps"], beat["checkpoint"]) == ("stopped", 5, 8, str(folder))
    assert beat["reason"] == str(error.value)
    train(stopped, ALONE)
    assert unequal(root / "runs" / "unstopped", root / "runs" / "stopped", last=8) == []
    assert [line["step"] for line in read_metrics(store, "stopped", "training")] == [3, 6, 8]
    beat = read_heartbeat(store, "stopped")
    assert (beat["state"], beat["step"], beat["processes"], beat["pid"]) == ("done", 8, 1, os.getpid())
    assert (beat["resumed_from"], beat["reason"], beat["seconds_left"]) == (str(folder), None, 0)
    assert beat["losses"].keys() == {"words", "text_words", "regions"}
    last = open_folder(store, "runs/stopped/step-0000008").state
    assert beat["snapshot"] == last["data"][0]["snapshots"][-1]["snapshot"]
    assert len([line for line in capsys.readouterr().out.splitlines() if " samples/s " in line]) == 3 + 3


def test_sigterm_during_a_validation_stops_the_run_after_it(tmp_path, before):
    store, saved = open_store(str(tmp_path)), []

    def validate() -> tuple[dict[str, float], list[dict]]:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: (read_heartbeat(store, "run") or {}).get("state") == "validating")  # a thread writes it
        return {"accuracy": 1.0}, []

    with pytest.raises(Stopped, match="after step 2 of 6"):
        run_small(store, range(6), validate=validate, save=lambda _, done, __: saved.append(done), validate_every=2)
    assert saved == [2]
    assert [line["kind"] for line in lines_of(store, "metrics.jsonl")] == ["training", "validation"]
    assert read_heartbeat(store, "run")["state"] == "stopped"


@pytest.mark.parametrize("number", REQUESTS)
def test_repeated_signals_of_one_request_pass_over_a_stopped_training(before, monkeypatch, number):
    """Of SIGTERM by any launcher, of SIGINT by torchrun."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with Stop() as stop:
        assert not stop.requested
        for _ in range(2):
            os.kill(os.getpid(), number)
        assert stop.requested
    os.kill(os.getpid(), number)  # after a training that was stopped in its last step
    with pytest.raises(Stopped), Stop():  # another rank was signalled
        raise Stopped
    os.kill(os.getpid(), number)
    assert before == []


@pytest.mark.parametrize("number", REQUESTS)
def test_signals_are_the_callers_again_after_a_training_that_did_not_stop(before, number):
    with Stop():
        pass
    os.kill(os.getpid(), number)
    with contextlib.suppress(RuntimeError), Stop():
        os.kill(os.getpid(), number)  # torchrun's, for a rank that is dead
        raise RuntimeError
    os.kill(os.getpid(), number)
    assert before == [number, number]


def test_an_ignored_ctrl_c_stays_ignored(before):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts `program &` in a script
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop.requested


TWICE = """
import os, signal, time
from training.stopping import Stop

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where pytest itself runs in the background
with Stop():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    try:
        time.sleep(60)
    finally:
        time.sleep(60)  # as for a writer
"""


def test_a_second_ctrl_c_waits_for_nothing():
    ended = subprocess.run([sys.executable, "-c", TWICE], cwd=PROJECT, capture_output=True, text=True, timeout=40)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.count("Ctrl-C again exits at once") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank"), [(1, None), (2, 1)])
def test_a_stopped_torchrun_goes_on_to_the_bit(tmp_path, size, rank):
    """Signalled is the launcher, which signals its ranks, or one rank alone."""
    lines: list[str] = []
    check_stopped(tmp_path, 7, size, rank, lines.append)
    assert sum(" told to stop in step " in line for line in lines) == 1
