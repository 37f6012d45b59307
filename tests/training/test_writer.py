"""The writer of a training: order, whole checkpoints, storage that is away; and which checkpoints are kept."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from s3 import s3_server
from s3_faults import faulty
from safetensors.torch import load, save
from seeded import put_checkpoint
from tiny import tiny_recipe, tiny_root
from writing import Held, files, nothing, tensors, wait_for

import training.writer
from storage.object_store import Content, LocalStore, S3Store, StorageUnreachable, open_store
from storage.runs import Best, checkpoints, named_best, read_state
from training.checkpoint_files import find_best, settle, write_checkpoint
from training.distributed import World
from training.log import read_metrics
from training.writer import Writer, safetensors
from vlbert.checkpoint import find_checkpoint
from vlbert.train import train

FIRST, SECOND, THIRD = (f"runs/r/step-{step:07d}" for step in (1, 2, 3))


@pytest.fixture
def logged() -> list[str]:
    return []


def read(root: Path, folder: str) -> float:
    return load((root / folder / "model.safetensors").read_bytes())["a"][0, 0].item()


def test_safetensors_are_the_bytes_of_the_library():
    kinds = (torch.float32, torch.int64, torch.bfloat16, torch.float64, torch.float16, torch.int32, torch.int16)
    kinds += (torch.int8, torch.uint8, torch.bool)
    some = {f"{10 - i}.weight": torch.arange(7).to(kind) for i, kind in enumerate(kinds)}
    some |= {"one": torch.tensor(5.0), "none": torch.zeros(0, 3), 'é"': torch.ones(2, 3, 4), "": torch.ones(1)}
    assert b"".join(safetensors(some)) == save(some)
    assert b"".join(safetensors({})) == save({})


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_tensors_as_they_were_and_state_json_comes_last(tmp_path, logged):
    store, model = Held(tmp_path, "model.safetensors"), tensors(1)
    model["t"] = torch.arange(12.0).reshape(3, 4).T  # in another order of memory
    with Writer(store, logged.append) as writer:
        writer.checkpoint(FIRST, {"model.safetensors": model, "state.json": b"{}"}, nothing)
        model["a"].fill_(9)
        assert store.begun.wait(20)
        assert checkpoints(store, "r") == []
        store.let_through.set()
    found = load((tmp_path / FIRST / "model.safetensors").read_bytes())
    assert found["a"][0, 0] == 1
    assert torch.equal(found["t"], model["t"])
    assert writer.saved == f"{tmp_path}/{FIRST}"
    assert store.order == [f"{FIRST}/model.safetensors", f"{FIRST}/state.json"]
    assert logged == []


def test_a_checkpoint_waits_for_the_one_before_and_uses_its_memory(tmp_path, logged):
    store = Held(tmp_path, f"{FIRST}/state.json")
    with Writer(store, logged.append) as writer:
        writer.checkpoint(FIRST, files(1), nothing)
        memory = [copy.data_ptr() for copy in writer._copies.values()]
        assert store.begun.wait(20)
        second = threading.Thread(target=writer.checkpoint, args=(SECOND, files(2), nothing))
        second.start()
        wait_for(lambda: logged)
        assert second.is_alive()
        store.let_through.set()
        second.join(20)
        assert [copy.data_ptr() for copy in writer._copies.values()] == memory
        assert 1 <= writer.waited < 20
    assert [read(tmp_path, folder) for folder in (FIRST, SECOND)] == [1, 2]
    assert len(logged) == 1
    assert f"{tmp_path}/{FIRST}" in logged[0]


def test_objects_are_written_in_order_and_of_one_path_the_newest(tmp_path, logged):
    store = Held(tmp_path, "first")
    with Writer(store, logged.append) as writer:
        writer.put("first", b"1")
        assert store.begun.wait(20)
        writer.put("metrics", b"1")
        writer.checkpoint(FIRST, files(1), lambda: store.order.append("then"))
        writer.put("heartbeat", b"1")
        writer.put("metrics", b"2")
        writer.put("first", b"2")  # what is on its way is written, too
        store.let_through.set()
    whole = [f"{FIRST}/model.safetensors", f"{FIRST}/state.json"]
    assert store.order == ["first", "first", "metrics", *whole, "then", "heartbeat"]
    assert store.get("metrics") == b"2"
    assert store.get("first") == b"2"


# --- storage is away --------------------------------------------------------------------------------------------------


@pytest.fixture
def away(tmp_path) -> Path:
    """A folder that takes no run until this file is removed: as a disk that is full, or not mounted."""
    (tmp_path / "runs").write_bytes(b"")
    return tmp_path / "runs"


def test_while_storage_is_away_training_goes_on_and_the_newest_is_written_when_it_is_back(tmp_path, away, logged):
    with Writer(open_store(str(tmp_path)), logged.append) as writer:
        writer.put("runs/r/metrics.jsonl", b"1")
        wait_for(lambda: logged)
        for step, folder in enumerate((FIRST, SECOND, THIRD), start=1):
            writer.put("runs/r/metrics.jsonl", b"%d" % step)
            writer.checkpoint(folder, files(step), nothing)
        assert writer.waited < 1
        assert writer.saved is None
        away.unlink()
        wait_for((tmp_path / THIRD / "state.json").exists)  # without another call
    assert (tmp_path / "runs/r/metrics.jsonl").read_bytes() == b"3"
    assert checkpoints(writer.store, "r") == [THIRD]
    assert read(tmp_path, THIRD) == 3
    assert logged[0].startswith("cannot save for now")
    assert [line.split()[0] for line in logged[1:3]] == [f"{tmp_path}/{FIRST}", f"{tmp_path}/{SECOND}"]
    assert logged[3].startswith("storage is back")
    assert len(logged) == 4


def test_a_newer_object_that_came_during_a_failing_attempt_is_the_one_tried_again(tmp_path, away, logged):
    store = Held(tmp_path, "metrics.jsonl")
    with Writer(store, logged.append) as writer:
        writer.put("runs/r/metrics.jsonl", b"1")
        assert store.begun.wait(20)
        writer.put("runs/r/metrics.jsonl", b"2")
        store.let_through.set()
        wait_for(lambda: logged)
        away.unlink()
    assert (tmp_path / "runs/r/metrics.jsonl").read_bytes() == b"2"


def test_files_that_were_taken_are_not_written_again_when_a_later_one_fails(tmp_path, logged):
    store = Held(tmp_path, "nothing")
    (tmp_path / FIRST / "state.json").mkdir(parents=True)  # which no file can replace
    with Writer(store, logged.append) as writer:
        writer.checkpoint(FIRST, files(1), nothing)
        wait_for(lambda: logged)
        assert writer.saved is None
        (tmp_path / FIRST / "state.json").rmdir()
    assert store.order == [f"{FIRST}/model.safetensors", f"{FIRST}/state.json", f"{FIRST}/state.json"]
    assert writer.saved == f"{tmp_path}/{FIRST}"


def test_pauses_between_attempts_grow(tmp_path, away, logged, monkeypatch):
    monkeypatch.setattr(training.writer, "_FIRST_PAUSE", 0.02)
    attempts, store = [], open_store(str(tmp_path))
    writer = Writer(store, logged.append)

    def attempt() -> None:
        attempts.append(time.monotonic())
        store.put("runs/r/a", b"")

    writer.do("runs/r/a", attempt)
    wait_for(lambda: len(attempts) == 4)
    pauses = [after - before for before, after in zip(attempts, attempts[1:], strict=False)]
    for pause, least in zip(pauses, (0.02, 0.04, 0.08), strict=True):
        assert pause >= least
    with pytest.raises(StorageUnreachable):
        writer.finish(wait=0.1)


def test_what_could_not_be_written_at_the_end_is_named_and_storage_is_tried_for_what_comes_then(tmp_path, away, logged):
    writer = Writer(open_store(str(tmp_path)), logged.append)
    writer.put("runs/r/metrics.jsonl", b"1")
    writer.checkpoint(FIRST, files(1), nothing)
    with pytest.raises(StorageUnreachable) as error:
        writer.finish(wait=0.3)
    names = f"{tmp_path}/runs/r/metrics.jsonl, {tmp_path}/{FIRST}"
    assert str(error.value).startswith(f"not saved: {names}: cannot write or remove {tmp_path}/runs/r/metrics.jsonl: ")
    writer.put("runs/r/heartbeat.json", b"failed")
    away.unlink()
    writer.finish()
    assert (tmp_path / "runs/r/heartbeat.json").exists()
    assert checkpoints(writer.store, "r") == []


def test_a_checkpoint_is_whole_when_only_what_follows_it_fails(tmp_path, away, logged):
    store = open_store(str(tmp_path))
    writer = Writer(store, logged.append)
    writer.checkpoint("elsewhere", files(1), lambda: store.put("runs/r/best.json", b""))
    wait_for(lambda: logged)
    with pytest.raises(StorageUnreachable, match=f"^not saved: what follows {tmp_path}/elsewhere: "):
        writer.finish(wait=0.1)
    assert writer.saved == f"{tmp_path}/elsewhere"


def test_storage_that_hangs_is_given_up_and_later_objects_are_written(tmp_path, logged, monkeypatch):
    monkeypatch.setattr(training.writer, "_SILENCE", 0.2)
    store = Held(tmp_path, "hangs")
    with Writer(store, logged.append) as writer:
        writer.put("hangs", b"")
        assert store.begun.wait(20)
        for step, folder in enumerate((FIRST, SECOND), start=1):
            writer.checkpoint(folder, files(step), nothing)
        assert logged[-1] == f"{tmp_path}/{FIRST} is given up for a newer one: storage is away"
        with pytest.raises(StorageUnreachable, match=f"^not saved: {tmp_path}/hangs, .*: storage took nothing for "):
            writer.finish(wait=0.1)
        writer.put("later", b"")
        store.let_through.set()
    assert (tmp_path / "later").exists()
    assert writer.saved is None


def test_storage_that_takes_a_part_now_and_then_is_waited_for(tmp_path, logged, monkeypatch):
    class Slow(LocalStore):
        def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
            for _ in data:
                time.sleep(0.1)
            return super().put(path, data, if_absent=if_absent)

    monkeypatch.setattr(training.writer, "_SILENCE", 0.3)
    model = {f"{n}": torch.ones(1) for n in range(6)}
    with Writer(Slow(str(tmp_path)), logged.append) as writer:
        writer.checkpoint(FIRST, {"model.safetensors": model}, nothing)
        writer.finish(wait=0.1)
    assert writer.saved


# --- other errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda writer: writer.put("a", b""),
        lambda writer: writer.checkpoint(SECOND, files(1), nothing),
        lambda writer: writer.finish(),
    ],
    ids=["put", "checkpoint", "finish"],
)
def test_another_error_comes_out_of_the_next_call_once_and_costs_nothing_behind_it(
    tmp_path, logged, call: Callable[[Writer], None]
):
    behind = threading.Event()

    def fail() -> None:
        assert behind.wait(20)
        raise ValueError("a bug")

    with Writer(open_store(str(tmp_path)), logged.append) as writer:
        writer.do("fails", fail)
        writer.checkpoint(FIRST, files(1), nothing)
        behind.set()
        wait_for(lambda: writer.saved)
        with pytest.raises(ValueError, match="a bug"):
            call(writer)
    assert read(tmp_path, FIRST) == 1
    assert logged == []


def test_a_training_that_fails_has_its_checkpoint_written(tmp_path, logged):
    def training(writer: Writer) -> None:
        with writer:
            writer.checkpoint(FIRST, files(1), nothing)
            raise FloatingPointError("the gradient is not finite")

    with pytest.raises(FloatingPointError):
        training(Writer(open_store(str(tmp_path)), logged.append))
    assert read(tmp_path, FIRST) == 1


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server("bucket") as endpoint:
        yield endpoint


@pytest.mark.slow
def test_a_bucket_that_is_away_for_a_while_holds_up_no_step(server, tmp_path, logged):
    large = torch.rand(3_000_000)  # sent in parts
    with faulty(server, faults={"503": 1.0}) as proxy:
        store = S3Store(f"s3://bucket/{tmp_path.name}")
        # One attempt: with all of them botocore waits for seconds.
        store._clients = {os.getpid(): store._new_client(connect_timeout=1, read_timeout=10, attempts=1)}
        with Writer(store, logged.append) as writer:
            writer.checkpoint(FIRST, {"model.safetensors": {"a": large}, "state.json": b"{}"}, nothing)
            wait_for(lambda: logged)
            assert writer.waited < 1
            proxy.faults.clear()
        assert torch.equal(load(store.get("runs/r/step-0000001/model.safetensors"))["a"], large)
        assert checkpoints(store, "r") == ["runs/r/step-0000001"]
    assert [line.split()[0] for line in logged] == ["cannot", "storage"]
    assert "s3://bucket" in logged[0]


# --- which are kept ---------------------------------------------------------------------------------------------------


def saved(root: Path, *steps: int, **accuracies: float) -> list[str]:
    """Whole checkpoints of these steps; `step3=0.7`: a validation after step 3 measured that."""
    store = open_store(str(root))
    measured = {int(name.removeprefix("step")): value for name, value in accuracies.items()}
    for step in {*steps, *measured}:
        validation = {"accuracy": measured[step]} if step in measured else {}
        put_checkpoint(store, f"runs/r/step-{step:07d}", {"validation": validation}, {"model.safetensors": b""})
    return checkpoints(store, "r")


def test_the_best_validated_checkpoint_is_kept_with_the_newest(tmp_path):
    store = open_store(str(tmp_path))
    saved(tmp_path, 6, step1=float("nan"), step2=0.2, step3=0.7, step4=0.7, step5=0.1)
    best = settle(store, "r", 1, "accuracy")
    assert best == Best(3, "accuracy", 0.7, "runs/r/step-0000003"), "of equals the oldest"
    assert checkpoints(store, "r") == ["runs/r/step-0000003", "runs/r/step-0000006"]
    assert named_best(store, "r") == best
    assert find_checkpoint(f"{tmp_path}/runs/r/best")[1] == "runs/r/step-0000003"

    saved(tmp_path, step7=0.9)  # and killed: best.json names another, and an older one is left
    assert settle(store, "r", 1, "accuracy").step == 7
    assert checkpoints(store, "r") == ["runs/r/step-0000007"]
    assert find_checkpoint(f"{tmp_path}/runs/r/best")[1] == "runs/r/step-0000007"


def test_with_a_damaged_state_no_checkpoint_is_removed(tmp_path, logged):
    store = open_store(str(tmp_path))
    saved(tmp_path, 3, 4, step1=0.9, step2=0.5)
    state = store.get("runs/r/step-0000002/state.json")
    store.put("runs/r/step-0000002/state.json", state[:-9])
    assert settle(store, "r", 1, "accuracy", logged.append) is None
    assert len(checkpoints(store, "r")) == 4
    assert f"{tmp_path}/runs/r/step-0000002/" in logged[0]
    store.put("runs/r/step-0000002/state.json", state)
    assert settle(store, "r", 1, "accuracy").step == 1
    assert checkpoints(store, "r") == ["runs/r/step-0000001", "runs/r/step-0000004"]


def test_without_a_metric_only_the_newest_are_kept(tmp_path):
    store = open_store(str(tmp_path))
    saved(tmp_path, 2, 3, step1=0.9)
    assert settle(store, "r", 2, "words_accuracy") is None
    assert settle(store, "r", 2, None) is None
    assert checkpoints(store, "r") == ["runs/r/step-0000002", "runs/r/step-0000003"]
    with pytest.raises(ValueError, match=r"best.json is not there: .* name .*runs/r for the newest"):
        find_checkpoint(f"{tmp_path}/runs/r/best")


def test_unfinished_checkpoints_are_removed_once_a_newer_one_is_whole(tmp_path):
    store = open_store(str(tmp_path))
    saved(tmp_path, 2)
    for step in (1, 3):
        store.put(f"runs/r/step-{step:07d}/model.safetensors", b"")
    settle(store, "r", 1, None)
    assert [info.path for info in store.list("runs/r/")] == [
        "runs/r/step-0000002/model.safetensors",
        "runs/r/step-0000002/state.json",
        "runs/r/step-0000003/model.safetensors",
    ]


def test_each_whole_checkpoint_is_logged_with_the_best_so_far(tmp_path, logged):
    store = Held(tmp_path, held="nothing")
    with Writer(store, logged.append) as writer:
        for step, value in {1: 0.2, 2: 0.53, 3: 0.4}.items():
            state = {"step": step, "validation": {"accuracy": value}}
            write_checkpoint(writer, "r", step, 3, {"m": tensors(step)}, state, 1, "accuracy")
    for line, step, best in zip(logged, (1, 2, 3), ("0.200 (step 1)", "0.530 (step 2)", "0.530 (step 2)"), strict=True):
        assert line.startswith(f"step {step}/3  saved {tmp_path}/runs/r/step-000000{step}")
        assert line.endswith(best)
    assert store.order[:3] == [f"{FIRST}/m", f"{FIRST}/state.json", "runs/r/best.json"]
    assert find_best(store, "r", "accuracy").step == 2


def test_a_state_is_written_as_it_was_when_its_checkpoint_began(tmp_path):
    store = Held(tmp_path, held="model.safetensors")
    state = {"step": 1, "loop": {"taken": [1.0]}}
    with Writer(store) as writer:
        write_checkpoint(writer, "r", 1, 1, {"model.safetensors": tensors(1)}, state, 1, None)
        state["loop"]["taken"].append(2.0)  # by the step after it
        store.let_through.set()
    assert read_state(store, "runs/r/step-0000001")["loop"] == {"taken": [1.0]}


def test_a_training_keeps_the_newest_and_the_best_by_its_task(tmp_path):
    root = tiny_root(tmp_path)
    recipe = tiny_recipe(root, steps=5, save_every=1, validate_every=1, keep_checkpoints=1, run="r")
    train(recipe, World(0, 1, torch.device("cpu")))
    store = open_store(str(root))
    values = [line["words_accuracy"] for line in read_metrics(store, "r", "validation")]
    step = 1 + values.index(max(values))
    assert checkpoints(store, "r") == sorted({f"runs/r/step-000000{n}" for n in (step, 5)})
    best = store.get("runs/r/best.json")
    store.delete("runs/r/best.json")  # as if it had been killed before it came to that
    store.put("runs/r/step-0000004/model.safetensors", b"half")
    train(recipe, World(0, 1, torch.device("cpu")))
    assert store.get("runs/r/best.json") == best
    assert not store.exists("runs/r/step-0000004/model.safetensors")
