"""Checkpoints: written beside the steps, whole or not there, through storage that is away; and which are kept."""

import multiprocessing
import re
import resource
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from seeded import put_checkpoint
from writing import Held, keeps, tensors, wait_for, write

import training.checkpoint
from storage.object_store import StorageUnreachable, open_store
from storage.runs import Best, best_checkpoint, checkpoints, open_folder
from training.checkpoint import MODEL, Writer, load_tensors, prune_checkpoints, write_checkpoint
from vlbert.checkpoint import find_checkpoint

FIRST, SECOND, THIRD = (f"runs/r/step-{step:07d}" for step in (1, 2, 3))


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(training.checkpoint, "_PAUSE", 0.05)


def read(root: Path, folder: str) -> float:
    return load((root / folder / MODEL).read_bytes())["a"][0, 0].item()


def test_a_checkpoint_holds_all_as_it_was_when_it_began_and_is_whole_at_the_end(tmp_path):
    store, model, state, logged = Held(tmp_path, MODEL), tensors(1), {"step": 1, "loop": {"taken": [1.0]}}, []
    model["t"] = torch.arange(12.0).reshape(3, 4).T  # in another order of memory
    with Writer(store, logged.append) as writer:
        write_checkpoint(writer, keeps(1, steps=2), 1, {"config.json": b"{}", MODEL: model}, state, None)
        model["a"].fill_(9)
        state["loop"]["taken"].append(2.0)  # by the step after it
        assert store.begun.wait(20)
        assert checkpoints(store, "r") == []
        assert writer.saved is None
        store.let_through.set()
    assert store.order == [f"{FIRST}/{name}" for name in ("config.json", MODEL, "state.json")]
    assert read(tmp_path, FIRST) == 1
    folder = open_folder(store, FIRST)
    assert torch.equal(load_tensors(folder, MODEL)["t"], model["t"]), "by the hash in state.json, too"
    assert folder.state["loop"] == {"taken": [1.0]}
    assert logged == [f"step 1/2  saved {tmp_path}/{FIRST}"]
    assert writer.saved == f"{tmp_path}/{FIRST}"


def test_a_checkpoint_waits_for_the_one_before(tmp_path):
    store = Held(tmp_path, f"{FIRST}/state.json")
    with Writer(store) as writer:
        write(writer, 1)
        assert store.begun.wait(20)
        second = threading.Thread(target=write, args=(writer, 2))
        second.start()
        second.join(0.05)
        assert second.is_alive()
        store.let_through.set()
        second.join(20)
    assert [read(tmp_path, folder) for folder in (FIRST, SECOND)] == [1, 2]


def test_objects_are_written_in_order_and_of_one_path_the_newest(tmp_path):
    store = Held(tmp_path, "first")
    with Writer(store) as writer:
        writer.put("first", b"1")
        assert store.begun.wait(20)
        writer.put("metrics", b"1")
        write(writer, 1)
        writer.put("heartbeat", b"1")
        writer.put("metrics", b"2")
        writer.put("first", b"2")  # what is on its way is written, too
        store.let_through.set()
    assert store.order == ["first", "first", "metrics", f"{FIRST}/{MODEL}", f"{FIRST}/state.json", "heartbeat"]
    assert (store.get("metrics"), store.get("first")) == (b"2", b"2")


@pytest.fixture
def away(tmp_path) -> Path:
    """A folder that takes no run until this file is removed: as a disk that is full, or not mounted."""
    (tmp_path / "runs").write_bytes(b"")
    return tmp_path / "runs"


def test_while_storage_is_away_training_goes_on_and_the_newest_is_written_when_it_is_back(tmp_path, away):
    store, logged = Held(tmp_path, "metrics.jsonl"), []
    with Writer(store, logged.append) as writer:
        writer.put("runs/r/metrics.jsonl", b"1")
        assert store.begun.wait(20)
        writer.put("runs/r/metrics.jsonl", b"2")  # while an attempt fails
        store.let_through.set()
        wait_for(lambda: logged)
        for step in (1, 2, 3):
            write(writer, step)
        assert writer.saved is None
        away.unlink()
        wait_for((tmp_path / THIRD / "state.json").exists)  # without another call
    assert (tmp_path / "runs/r/metrics.jsonl").read_bytes() == b"2"
    assert checkpoints(writer.store, "r") == [THIRD]
    assert read(tmp_path, THIRD) == 3
    assert re.fullmatch("cannot save for now.*\nstep 3/3  saved .*", "\n".join(logged))


def test_one_file_that_is_refused_holds_up_no_other(tmp_path):
    (tmp_path / "runs/r/metrics.jsonl").mkdir(parents=True)  # which no file can replace
    writer = Writer(open_store(str(tmp_path)))
    writer.put("runs/r/metrics.jsonl", b"")
    write(writer, 1)
    wait_for(lambda: writer.saved)
    with pytest.raises(StorageUnreachable, match=f"^not saved: {tmp_path}/runs/r/metrics.jsonl: cannot write"):
        writer.finish(wait=0.2)


def test_what_could_not_be_written_at_the_end_is_named_and_storage_is_tried_for_what_comes_then(tmp_path, away):
    writer = Writer(open_store(str(tmp_path)))
    writer.put("runs/r/metrics.jsonl", b"1")
    write(writer, 1)
    named = r"^not saved: (?=.*/step-\*)(?=.*/metrics.jsonl).*cannot write or remove"
    with pytest.raises(StorageUnreachable, match=named):
        writer.finish(wait=0.3)
    writer.put("runs/r/heartbeat.json", b"failed")
    away.unlink()
    writer.finish()
    assert (tmp_path / "runs/r/heartbeat.json").exists()
    assert checkpoints(writer.store, "r") == []


def test_nothing_is_written_any_more_once_another_process_writes(tmp_path):
    writer = Writer(open_store(str(tmp_path)))
    writer.put("runs/r/heartbeat.json", b"ours")
    writer.finish()

    def check() -> None:
        raise ValueError("taken over")

    writer.check = check
    for path in ("runs/r/heartbeat.json", "runs/r/metrics.jsonl"):
        writer.put(path, b"late")
        with pytest.raises(ValueError, match="taken over"):
            writer.finish()
    assert [path.read_bytes() for path in (tmp_path / "runs/r").iterdir()] == [b"ours"]


@pytest.mark.parametrize("call", [lambda w: w.put("a", b""), lambda w: write(w, 2), Writer.finish])
def test_another_error_comes_out_of_the_next_call_once_and_costs_nothing_behind_it(tmp_path, call: Callable):
    behind = threading.Event()

    def fail() -> None:
        assert behind.wait(20)
        raise ValueError("a bug")

    with Writer(open_store(str(tmp_path))) as writer:
        writer.submit("fails", fail)
        write(writer, 1)
        behind.set()
        wait_for(lambda: writer.saved)
        with pytest.raises(ValueError, match="a bug"):
            call(writer)
    assert read(tmp_path, FIRST) == 1


def saved(root: Path, *steps: int, metric: str | None = "accuracy", **accuracies: float) -> None:
    """Whole checkpoints of these steps; `step3=0.7`: a validation after step 3 measured that."""
    measured = dict.fromkeys(steps, {}) | {int(name[4:]): {"accuracy": value} for name, value in accuracies.items()}
    for step, validation in measured.items():
        state = {"validation": validation, "metric": metric}
        put_checkpoint(open_store(str(root)), f"runs/r/step-{step:07d}", state, {MODEL: b""})


def test_the_best_validated_checkpoint_is_kept_with_the_newest(tmp_path):
    store = open_store(str(tmp_path))
    saved(tmp_path, 6, step1=float("nan"), step2=0.2, step3=0.7, step4=0.7, step5=0.1)
    best = prune_checkpoints(store, keeps(1))
    assert best == Best(3, "accuracy", 0.7, THIRD), "of equals the oldest"
    assert checkpoints(store, "r") == [THIRD, "runs/r/step-0000006"]
    assert best_checkpoint(store, "r") == best
    assert find_checkpoint(f"{tmp_path}/runs/r/best")[1] == THIRD

    saved(tmp_path, step7=0.9)  # and killed: an older one is left
    assert prune_checkpoints(store, keeps(1)).step == 7
    assert checkpoints(store, "r") == ["runs/r/step-0000007"]


def test_every_nth_checkpoint_is_kept_besides(tmp_path):
    store = open_store(str(tmp_path))
    saved(tmp_path, 2, 5, 12, 13, 14, step4=0.7)  # 5 and 13: of stopped runs
    store.put(f"runs/r/step-0000006/{MODEL}", b"")  # of a killed one
    prune_checkpoints(store, keeps(1, save_every=2, keep_every=6))
    left = {info.path.split("/")[2] for info in store.list("runs/r/")}
    assert left == {f"step-{step:07d}" for step in (4, 12, 14)}, "the best, the twelfth, the newest"


def test_with_a_damaged_state_no_checkpoint_is_removed(tmp_path):
    store, logged = open_store(str(tmp_path)), []
    saved(tmp_path, 3, 4, step1=0.9, step2=0.5)
    store.put(f"{SECOND}/state.json", store.get(f"{SECOND}/state.json")[:-9])
    assert prune_checkpoints(store, keeps(1), logged.append) is None
    assert len(checkpoints(store, "r")) == 4
    assert f"{tmp_path}/{SECOND}/" in logged[0]


def test_without_a_metric_only_the_newest_are_kept_and_no_unfinished_one_before_them(tmp_path):
    store = open_store(str(tmp_path))
    saved(tmp_path, 3, 4, step2=0.9, metric=None)
    for step in (1, 5):
        store.put(f"runs/r/step-{step:07d}/{MODEL}", b"")
    assert prune_checkpoints(store, keeps(2)) is None
    assert checkpoints(store, "r") == [THIRD, "runs/r/step-0000004"]
    assert not store.exists(f"{FIRST}/{MODEL}")
    assert store.exists(f"runs/r/step-0000005/{MODEL}"), "it may be on its way"
    with pytest.raises(ValueError, match=r"runs/r/best does not exist: .* give .*runs/r for the newest"):
        find_checkpoint(f"{tmp_path}/runs/r/best")


def write_to_a_full_disk(root: Path) -> None:
    """Files may have 20 kB, and the model has 40."""
    errors = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    writer = Writer(open_store(str(root)), errors.append)
    write_checkpoint(writer, keeps(1, steps=1), 1, {MODEL: {"a": torch.ones(100, 100)}}, {"step": 1}, None)
    wait_for(lambda: errors)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.finish()
    (root / "said").write_text(errors[0])


def test_a_full_disk_is_named_and_costs_no_checkpoint(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=write_to_a_full_disk, args=(tmp_path,))
    child.start()  # a limit to the size of files holds for a whole process
    child.join(60)
    assert child.exitcode == 0
    said = (tmp_path / "said").read_text()
    for named in (f"{tmp_path}/{FIRST}/{MODEL}", tempfile.gettempdir(), "File too large", "TMPDIR"):
        assert named in said
    assert read(tmp_path, FIRST) == 1
    assert not list(tmp_path.glob(f"{FIRST}/.*"))
