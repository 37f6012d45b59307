"""Damaged new shards and damaged checkpoints; tests/benchmarks/test_resume.py has the order of samples."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from loaded import ALONE
from tiny import DETECTOR, tiny_recipe, tiny_root

from storage.inventory import Inventory
from storage.object_store import open_store
from storage.runs import checkpoints, json_with_digest, open_folder
from storage.verify import verify
from tests.kill.training import check
from vlbert.checkpoint import read_model
from vlbert.config import Recipe
from vlbert.data.batch import Batch
from vlbert.predict.command import Predictor
from vlbert.train import train

STAGE = f"regions/{DETECTOR}"


# --- new shards -------------------------------------------------------------------------------------------------------


def a_run(root: Path, name: str, steps: int = 6, workers: int = 0) -> Recipe:
    """20 samples, 8 a step: shards that are committed in the second step enter in the middle of the third."""
    data = {"new_shards_every": 1, "workers": workers}
    return tiny_recipe(root, data, run_name=name, steps=steps, save_every=1, keep_checkpoints=20)


def test_damaged_new_shards_end_no_training(tmp_path, capsys):
    root = tiny_root(tmp_path, samples=20)

    def disturb(step: int, parts: Sequence[Batch]) -> None:
        if step == 1:
            (root / "captions" / STAGE / "00009.parquet").write_bytes(b"junk")

    train(a_run(root, "disturbed", steps=3), ALONE, disturb)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no new shards in step" in line]
    assert "00009" in line
    state = open_folder(open_store(str(root)), "runs/disturbed/step-0000003").state
    assert [span["examples"] for span in state["data"][0]["snapshots"]] == [20]


# --- what cannot go on ------------------------------------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    """A bit flipped so far into the file."""
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


DAMAGES = {
    "the first byte": lambda data, other: flipped(data, 0),
    "a byte in the middle": lambda data, other: flipped(data, len(data) // 2),
    "the last byte": lambda data, other: flipped(data, len(data) - 1),
    "nothing left": lambda data, other: b"",
    "half of it": lambda data, other: data[: len(data) // 2],
    "of another step": lambda data, other: other,
    "gone": lambda data, other: None,
}
FILES = ["config.json", "vocab.txt", "model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory) -> Recipe:
    """Of a run whose checkpoints of steps 1 and 2 are there, one step more."""
    recipe = a_run(tiny_root(tmp_path_factory.mktemp("saved"), samples=16), "run", steps=2)
    train(recipe, ALONE)
    assert [*verify(Inventory(open_store(recipe.data.root)))] == []
    return dataclasses.replace(recipe, steps=3)


@pytest.mark.parametrize("file", FILES)
def test_damage_of_a_checkpoint_is_named_with_the_one_before_it(saved_twice, file):
    store = open_store(saved_twice.data.root)
    first, last = checkpoints(store, "run")
    data, other = store.get(f"{last}/{file}"), store.get(f"{first}/{file}")
    for name, damage in DAMAGES.items():
        changed = damage(data, other)
        if changed == data or (changed is None and file == "state.json"):  # both steps have it, or it is none
            continue
        store.delete(f"{last}/{file}")
        if changed is not None:
            store.put(f"{last}/{file}", changed)
        named = f"{re.escape(store.uri(f'{last}/{file}'))} is .*or remove {store.uri(last)}: the run then resumes"
        with pytest.raises(ValueError, match=f"^{named}"):
            train(saved_twice, ALONE)
        if file != "optimizer.safetensors":  # of which they need nothing
            for path in (store.uri("runs/run"), store.uri(last)):
                with pytest.raises(ValueError, match=f"^{named}"):
                    Predictor(path)
            with pytest.raises(ValueError, match=re.escape(store.uri(last))):
                read_model(store.uri(last))  # as a folder of which it does not know the run
        (fault,) = verify(Inventory(store))
        assert re.match(named, fault), name
    store.put(f"{last}/{file}", data)
    assert [*verify(Inventory(store))] == []


def test_a_resumed_run_refuses_other_examples_and_a_lost_snapshot(tmp_path):
    root = tiny_root(tmp_path, samples=16)
    store = open_store(str(root))
    train(a_run(root, "run", steps=2), ALONE)
    file = root / "runs" / "run" / "step-0000002" / "state.json"
    state = json.loads(file.read_text())

    (data,) = state["data"]
    (span,) = data["snapshots"]
    other = data | {"snapshots": [span | {"examples": 17}]}
    file.write_bytes(json_with_digest(state | {"data": [other]}))
    with pytest.raises(ValueError, match="step-0000002 was trained on 17 examples of captions, now there are 16"):
        train(a_run(root, "run"), ALONE)
    file.write_bytes(json_with_digest(state))
    (root / "captions" / STAGE / "snapshots" / f"{span['snapshot']}.parquet").unlink()
    with pytest.raises(ValueError, match=f"{span['snapshot']}.parquet is missing; put it back as it was, or start"):
        train(a_run(root, "run"), ALONE)
    assert checkpoints(store, "run")[-1] == "runs/run/step-0000002"


# --- real kills -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(), ((2, 3, 1),), ((4, 1, 2),)])
def test_a_training_killed_twice_goes_on_to_the_bit(tmp_path, worlds):
    lines = []
    check(tmp_path, seed=len(worlds), kills=2, say=lines.append, worlds=worlds)
    assert sum(" killed in step " in line for line in lines) == 2
