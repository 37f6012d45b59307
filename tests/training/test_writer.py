"""What a training leaves behind is written beside it: in order, whole, and in the end all of it or an error."""

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from s3 import s3_server
from s3_faults import faulty
from safetensors.torch import load, save
from seeded import put_checkpoint
from tiny import tiny_recipe, tiny_root
from writing import Held, files, nothing, tensors, wait_for

from storage.object_store import Content, LocalStore, ObjectStore, S3Store, StorageUnreachable, open_store
from storage.runs import Best, checkpoints, named_best, read_state
from training.checkpoint_files import find_best, settle, write_checkpoint
from training.distributed import World
from training.log import read_metrics
from training.writer import Writer, safetensors
from vlbert.checkpoint import find_checkpoint
from vlbert.train import train


@pytest.fixture
def said() -> list[str]:
    return []


def read(root: Path, step: int) -> float:
    return load((root / f"runs/r/step-{step:07d}/model.safetensors").read_bytes())["a"][0, 0].item()


# --- format -----------------------------------------------------------------------------------------------------------


def test_tensors_become_the_bytes_that_the_library_writes():
    kinds = (torch.float32, torch.int64, torch.bfloat16, torch.float64, torch.float16, torch.int32, torch.int16)
    kinds += (torch.int8, torch.uint8, torch.bool)
    some = {f"{10 - i}.weight": torch.arange(7).to(kind) for i, kind in enumerate(kinds)}
    some |= {"one": torch.tensor(5.0), "none": torch.zeros(0, 3), 'é"': torch.ones(2, 3, 4), "": torch.ones(1)}
    assert b"".join(safetensors(some)) == save(some)
    assert b"".join(safetensors({})) == save({})


# --- beside the training ----------------------------------------------------------------------------------------------


def test_a_step_waits_for_the_copy_and_not_for_the_writing(tmp_path, said):
    store = Held(tmp_path, "model.safetensors")
    model = tensors(1)
    with Writer(store, said.append) as writer:
        writer.checkpoint("runs/r/step-0000001", {"model.safetensors": model, "state.json": b"{}"}, nothing)
        model["a"].fill_(9)
        assert store.begun.wait(20)
        assert not (tmp_path / "runs/r/step-0000001/state.json").exists()
        store.let_through.set()
    assert read(tmp_path, 1) == 1, "what it was when it was saved"
    assert writer.saved == f"{tmp_path}/runs/r/step-0000001"
    assert store.order == ["runs/r/step-0000001/model.safetensors", "runs/r/step-0000001/state.json"]
    assert said == []


def test_tensors_in_another_order_of_memory_are_written_as_they_are_indexed(tmp_path):
    picture = torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    with Writer(open_store(str(tmp_path))) as writer:
        writer.checkpoint("runs/r/step-0000001", {"a": {"p": picture, "t": picture[0, 0].T}}, nothing)
    found = load((tmp_path / "runs/r/step-0000001/a").read_bytes())
    assert torch.equal(found["p"], picture)
    assert torch.equal(found["t"], picture[0, 0].T)


def test_a_checkpoint_waits_for_the_one_before_to_be_written_and_uses_its_memory_again(tmp_path, said):
    store = Held(tmp_path, "step-0000001/state.json")
    with Writer(store, said.append) as writer:
        writer.checkpoint("runs/r/step-0000001", files(1), nothing)
        memory = [copy.data_ptr() for copy in writer._copies.values()]
        assert store.begun.wait(20)
        second = threading.Thread(target=writer.checkpoint, args=("runs/r/step-0000002", files(2), nothing))
        second.start()
        time.sleep(1.1)
        assert second.is_alive()
        store.let_through.set()
        second.join(20)
        assert [copy.data_ptr() for copy in writer._copies.values()] == memory
        assert 1 < writer.waited < 20
    assert [read(tmp_path, step) for step in (1, 2)] == [1, 2]
    assert said == [f"waited {said[0].split()[1]} s for the checkpoint before to be written"]


def test_all_is_written_in_the_order_in_which_it_was_given_and_the_newest_of_a_name_alone(tmp_path, said):
    store = Held(tmp_path, "first")
    with Writer(store, said.append) as writer:
        writer.put("first", b"1")
        assert store.begun.wait(20)
        writer.put("metrics", b"1")
        writer.checkpoint("runs/r/step-0000001", files(1), lambda: store.order.append("then"))
        writer.put("heartbeat", b"1")
        writer.put("metrics", b"2")
        store.let_through.set()
    whole = [f"runs/r/step-0000001/{name}" for name in ("model.safetensors", "state.json")]
    assert store.order == ["first", "metrics", *whole, "then", "heartbeat"]
    assert store.get("metrics") == b"2"


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def away(tmp_path) -> Path:
    """A folder that takes no run until this file is removed: as a disk that is full, or not mounted."""
    (tmp_path / "runs").write_bytes(b"")
    return tmp_path / "runs"


def test_storage_that_is_away_is_told_once_and_what_is_newest_is_written_when_it_is_back(tmp_path, away, said):
    with Writer(open_store(str(tmp_path)), said.append) as writer:
        writer.put("runs/r/metrics.jsonl", b"1")
        wait_for(lambda: said)
        for step in (1, 2, 3):
            writer.put("runs/r/metrics.jsonl", b"%d" % step)
            writer.checkpoint(f"runs/r/step-{step:07d}", files(step), nothing)
        writer.put("elsewhere", b"")
        assert writer.waited < 1
        assert writer.saved is None
        away.unlink()
    assert (tmp_path / "runs/r/metrics.jsonl").read_bytes() == b"3"
    assert [path.name for path in sorted((tmp_path / "runs/r").glob("step-*"))] == ["step-0000003"]
    assert read(tmp_path, 3) == 3
    assert (tmp_path / "elsewhere").exists()
    assert said[0].startswith("cannot save for now, the training goes on and this is tried again: cannot write or rem")
    assert said[1:3] == [f"{tmp_path}/runs/r/step-000000{n} is given up for a newer one: storage is away" for n in "12"]
    assert said[3].startswith("storage is back after ")
    assert len(said) == 4


def test_what_came_while_the_older_was_on_its_way_is_what_is_tried_again(tmp_path, away, said):
    store = Held(tmp_path, "metrics.jsonl")
    with Writer(store, said.append) as writer:
        writer.put("runs/r/metrics.jsonl", b"1")
        assert store.begun.wait(20)
        writer.put("runs/r/metrics.jsonl", b"2")
        store.let_through.set()
        wait_for(lambda: said)
        away.unlink()
    assert (tmp_path / "runs/r/metrics.jsonl").read_bytes() == b"2"


def test_it_is_tried_again_while_nobody_asks(tmp_path, away, said):
    writer = Writer(open_store(str(tmp_path)), said.append)
    writer.put("runs/r/a", b"1")
    wait_for(lambda: said)
    away.unlink()
    wait_for((tmp_path / "runs/r/a").exists)
    writer.finish()
    assert len(said) == 2


def test_at_the_end_what_could_not_be_written_is_an_error_that_names_it(tmp_path, away, said):
    writer = Writer(open_store(str(tmp_path)), said.append)
    writer.put("runs/r/metrics.jsonl", b"1")
    writer.checkpoint("runs/r/step-0000001", files(1), nothing)
    with pytest.raises(StorageUnreachable) as error:
        writer.finish(wait=0.3)
    names = f"{tmp_path}/runs/r/metrics.jsonl, {tmp_path}/runs/r/step-0000001"
    assert str(error.value).startswith(f"not saved: {names}: cannot write or remove {tmp_path}/runs/r/metrics.jsonl: ")


def test_a_checkpoint_is_no_less_saved_when_what_follows_it_fails(tmp_path, away, said):
    store = open_store(str(tmp_path))
    writer = Writer(store, said.append)
    writer.checkpoint("elsewhere", files(1), lambda: store.put("runs/r/best.json", b""))
    wait_for(lambda: said)
    with pytest.raises(StorageUnreachable, match=f"^not saved: what follows {tmp_path}/elsewhere: "):
        writer.finish(wait=0.1)
    assert (tmp_path / "elsewhere/state.json").exists()


def test_an_error_of_another_kind_comes_out_of_the_next_call(tmp_path, said):
    def fail() -> None:
        raise ValueError("state.json is no JSON")

    writer = Writer(open_store(str(tmp_path)), said.append)
    writer.checkpoint("runs/r/step-0000001", files(1), fail)
    wait_for(lambda: not writer._waiting)
    for call in (lambda: writer.put("a", b""), lambda: writer.checkpoint("b", files(1), nothing), writer.finish):
        with pytest.raises(ValueError, match="is no JSON"):
            call()
    writer.put("heartbeat", b"failed")  # once told, an error keeps nobody from saying how the run ended
    with pytest.raises(ValueError, match="is no JSON"):
        writer.finish()
    assert (tmp_path / "heartbeat").read_bytes() == b"failed"


def test_an_error_that_ends_a_run_is_told_once_and_costs_no_checkpoint_behind_it(tmp_path, said):

    behind = threading.Event()

    def fail() -> None:
        assert behind.wait(20)
        raise ValueError("a bug")

    def training() -> None:
        with Writer(open_store(str(tmp_path)), said.append) as writer:
            writer.do("fails", fail)
            writer.checkpoint("runs/r/step-0000001", files(1), nothing)
            behind.set()
            wait_for(lambda: not writer._waiting)
            writer.put("elsewhere", b"")

    with pytest.raises(ValueError, match="a bug"):
        training()
    assert read(tmp_path, 1) == 1
    assert said == []


def test_one_object_that_cannot_be_written_holds_up_no_other(tmp_path, said):
    (tmp_path / "runs/r/predictions.jsonl").mkdir(parents=True)
    with Writer(open_store(str(tmp_path)), said.append) as writer:
        writer.put("runs/r/predictions.jsonl", b"")
        for step in (1, 2):
            writer.checkpoint(f"runs/r/step-{step:07d}", files(step), nothing)
        wait_for((tmp_path / "runs/r/step-0000002/state.json").exists)
        wait_for(lambda: writer._waiting.keys() == {"runs/r/predictions.jsonl"})
        (tmp_path / "runs/r/predictions.jsonl").rmdir()
    assert (tmp_path / "runs/r/predictions.jsonl").exists()
    assert [line.split()[0] for line in said] == ["cannot", "storage"], said


def test_storage_that_hangs_is_given_up_and_what_is_put_afterwards_is_written(tmp_path, said):
    store = Held(tmp_path, "hangs")
    with Writer(store, said.append, silence=0.2) as writer:
        writer.put("hangs", b"")
        assert store.begun.wait(20)
        time.sleep(0.3)
        with pytest.raises(StorageUnreachable, match=f"^not saved: {tmp_path}/hangs: storage took nothing for "):
            writer.finish(wait=0.1)
        writer.put("later", b"")
        store.let_through.set()
    assert (tmp_path / "later").exists()


def test_storage_that_takes_something_now_and_then_is_waited_for(tmp_path, said):
    class Slow(LocalStore):
        def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
            for _ in data:
                time.sleep(0.1)
            return super().put(path, data, if_absent=if_absent)

    model = {f"{n}": torch.ones(1) for n in range(6)}
    with Writer(Slow(str(tmp_path)), said.append, silence=0.3) as writer:
        writer.checkpoint("runs/r/step-0000001", {"model.safetensors": model}, nothing)
        writer.finish(wait=0.1)
    assert writer.saved


def test_after_it_was_given_up_storage_is_tried_again(tmp_path, away, said):
    writer = Writer(open_store(str(tmp_path)), said.append)
    writer.checkpoint("runs/r/step-0000001", files(1), nothing)
    with pytest.raises(StorageUnreachable):
        writer.finish(wait=0.1)
    writer.put("runs/r/heartbeat.json", b"failed")
    away.unlink()
    writer.finish()
    assert (tmp_path / "runs/r/heartbeat.json").exists()


def test_a_save_waits_but_a_while_for_a_checkpoint_that_is_not_begun(tmp_path, said):
    store = Held(tmp_path, "hangs")
    with Writer(store, said.append, silence=0.2) as writer:
        writer.put("hangs", b"")
        for step in (1, 2):
            writer.checkpoint(f"runs/r/step-{step:07d}", files(step), nothing)
        store.let_through.set()
    assert said == [f"{tmp_path}/runs/r/step-0000001 is given up for a newer one: storage is away"]
    assert read(tmp_path, 2) == 2


def test_a_training_that_fails_says_so_and_still_has_its_checkpoint_written(tmp_path, said):
    def training(writer: Writer) -> None:
        with writer:
            writer.checkpoint("runs/r/step-0000001", files(1), nothing)
            raise FloatingPointError("the gradient is not finite")

    with pytest.raises(FloatingPointError):
        training(Writer(open_store(str(tmp_path)), said.append))
    assert read(tmp_path, 1) == 1


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server("bucket") as endpoint:
        yield endpoint


@pytest.mark.slow
def test_a_bucket_that_is_away_for_a_while_holds_up_no_step(server, tmp_path, said):
    large = torch.rand(3_000_000)  # sent in parts
    with faulty(server, faults={"503": 1.0}) as proxy:
        store = S3Store(f"s3://bucket/{tmp_path.name}")
        # One attempt: with all of them botocore waits for seconds.
        store._clients = {os.getpid(): store._new_client(connect_timeout=1, read_timeout=10, attempts=1)}
        with Writer(store, said.append) as writer:
            writer.checkpoint("runs/r/step-0000001", {"model.safetensors": {"a": large}, "state.json": b"{}"}, nothing)
            wait_for(lambda: said)
            assert writer.waited < 1
            proxy.faults.clear()
        assert torch.equal(load(store.get("runs/r/step-0000001/model.safetensors"))["a"], large)
        assert checkpoints(store, "r") == ["runs/r/step-0000001"]
    assert said[0].startswith(
        "cannot save for now, the training goes on and this is tried again: upload of s3://bucket"
    )
    assert said[1].startswith("storage is back after ")
    assert said[1].endswith(f"{tmp_path.name}/runs/r/step-0000001 is written")
    assert len(said) == 2


def save_for_ever(root: Path) -> None:
    """A training that saves as fast as it can: 30 MB of the step's number."""
    torch.set_num_threads(1)
    store = open_store(str(root))
    step = max((int(folder[-7:]) for folder in checkpoints(store, "r")), default=0)
    with Writer(store) as writer:
        while True:
            step += 1
            made = {"m": {"a": torch.full((1000, 5000), step)}, "o": {"a": torch.full((500, 5000), step)}}
            state = {"step": step, "validation": {"accuracy": 0.5} if step == 3 else {}}
            write_checkpoint(writer, "r", step, step, made, state, 2, "accuracy")


def folders_of(store: ObjectStore) -> set[str]:
    """All that hold a file."""
    return {info.path.rpartition("/")[0] for info in store.list("runs/r/step-")}


def last_step(store: ObjectStore) -> int:
    return int(checkpoints(store, "r")[-1][-7:])


@pytest.mark.slow
def test_a_kill_in_the_middle_of_the_writing_leaves_whole_checkpoints_and_none_that_only_looks_whole(tmp_path):
    draw, store, half, before = random.Random(0), open_store(str(tmp_path)), 0, 0
    for _ in range(8):
        training = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(tmp_path,))
        training.start()
        wait_for(lambda: checkpoints(store, "r") and last_step(store) > before)  # noqa: B023
        time.sleep(draw.uniform(0, 0.5))
        training.kill()
        training.join()
        whole = checkpoints(store, "r")
        half += len(folders_of(store) - {*whole})
        for folder in whole:
            step = int(folder[-7:])
            for name in "mo":
                found = load(store.get(f"{folder}/{name}"))["a"]
                assert (found == step).all(), f"{name} of step {step}"
            assert read_state(store, folder)["step"] == step
        before = last_step(store)
        assert "runs/r/step-0000003" in whole or before < 3
    assert half > 0, "none of the kills hit the writing: the test shows nothing"
    settle(store, "r", 2, "accuracy")
    assert find_checkpoint(f"{tmp_path}/runs/r/best")[1] == "runs/r/step-0000003"
    assert {folder for folder in folders_of(store) if folder < whole[-1]} < {*whole}


# --- which are kept ---------------------------------------------------------------------------------------------------


def saved(root: Path, *steps: int, **accuracies: float) -> list[str]:
    """Whole checkpoints of these steps; `step3=0.7`: a validation after step 3 measured that."""
    store = open_store(str(root))
    measured = {int(name.removeprefix("step")): value for name, value in accuracies.items()}
    for step in {*steps, *measured}:
        validation = {"accuracy": measured[step]} if step in measured else {}
        put_checkpoint(store, f"runs/r/step-{step:07d}", {"validation": validation}, {"model.safetensors": b""})
    return checkpoints(store, "r")


def test_the_best_of_the_checkpoints_that_a_validation_measured_is_kept_with_the_newest(tmp_path):
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


def test_where_a_damaged_state_hides_which_is_the_best_none_is_removed(tmp_path, said):
    store = open_store(str(tmp_path))
    saved(tmp_path, 3, 4, step1=0.9, step2=0.5)
    state = store.get("runs/r/step-0000002/state.json")
    store.put("runs/r/step-0000002/state.json", state[:-9])
    assert settle(store, "r", 1, "accuracy", said.append) is None
    assert len(checkpoints(store, "r")) == 4
    assert said[0].startswith(f"no checkpoint is removed, for the best is not known: {tmp_path}/runs/r/step-0000002/")
    store.put("runs/r/step-0000002/state.json", state)
    assert settle(store, "r", 1, "accuracy").step == 1
    assert checkpoints(store, "r") == ["runs/r/step-0000001", "runs/r/step-0000004"]


def test_without_a_metric_the_newest_are_kept_and_none_is_the_best(tmp_path):
    store = open_store(str(tmp_path))
    saved(tmp_path, 2, 3, step1=0.9)
    assert settle(store, "r", 2, "words_accuracy") is None
    assert settle(store, "r", 2, None) is None
    assert checkpoints(store, "r") == ["runs/r/step-0000002", "runs/r/step-0000003"]
    with pytest.raises(ValueError, match=r"best.json is not there: .* name .*runs/r for the newest"):
        find_checkpoint(f"{tmp_path}/runs/r/best")


def test_what_was_never_finished_is_removed_once_a_newer_one_is_whole(tmp_path):
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


def test_a_checkpoint_is_told_when_it_is_whole_and_with_the_best_so_far(tmp_path, capsys):
    measured = {1: 0.2, 2: 0.53, 3: 0.4}
    store = Held(tmp_path, held="nothing")
    with Writer(store) as writer:
        for step, value in measured.items():
            state = {"step": step, "validation": {"accuracy": value}}
            write_checkpoint(writer, "r", step, 3, {"m": tensors(step)}, state, 1, "accuracy")
    assert capsys.readouterr().out.splitlines() == [
        f"step 1/3  saved {tmp_path}/runs/r/step-0000001  best so far: accuracy 0.200 (step 1)",
        f"step 2/3  saved {tmp_path}/runs/r/step-0000002  best so far: accuracy 0.530 (step 2)",
        f"step 3/3  saved {tmp_path}/runs/r/step-0000003  best so far: accuracy 0.530 (step 2)",
    ]
    order = [path.removeprefix("runs/r/") for path in store.order]
    assert order[:3] == ["step-0000001/m", "step-0000001/state.json", "best.json"]
    assert find_best(store, "r", "accuracy").step == 2


def test_a_state_is_written_as_it_was_when_its_checkpoint_began(tmp_path):
    store = Held(tmp_path, held="model.safetensors")
    state = {"step": 1, "loop": {"taken": [1.0]}}
    with Writer(store) as writer:
        write_checkpoint(writer, "r", 1, 1, {"model.safetensors": tensors(1)}, state, 1, None)
        state["loop"]["taken"].append(2.0)  # by the step after it
        store.let_through.set()
    assert read_state(store, "runs/r/step-0000001")["loop"] == {"taken": [1.0]}


def test_a_training_keeps_the_newest_and_the_best_by_its_task(tmp_path, capsys):
    root = tiny_root(tmp_path)
    recipe = tiny_recipe(root, steps=5, save_every=1, validate_every=1, keep_checkpoints=1, run="r")
    train(recipe, World(0, 1, torch.device("cpu")))
    store = open_store(str(root))
    values = [line["words_accuracy"] for line in read_metrics(store, "r", "validation")]
    step = 1 + values.index(max(values))
    assert checkpoints(store, "r") == sorted({f"runs/r/step-000000{n}" for n in (step, 5)})
    assert f"saved {root}/runs/r/step-0000005  best so far: words_accuracy {max(values):.3f} (step {step})" in (
        capsys.readouterr().out
    )
    best = store.get("runs/r/best.json")
    store.delete("runs/r/best.json")  # as if it had been killed before it came to that
    store.put("runs/r/step-0000004/model.safetensors", b"half")
    train(recipe, World(0, 1, torch.device("cpu")))
    assert store.get("runs/r/best.json") == best
    assert not store.exists("runs/r/step-0000004/model.safetensors")
