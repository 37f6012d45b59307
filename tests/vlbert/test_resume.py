"""Exact resume over changing worlds, new shards at the boundaries of epochs, and damaged checkpoints."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from loaded import ALONE, CPU, rows_in_order, training_data
from tiny import DETECTOR, commit_more, tiny_recipe, tiny_root, tiny_sample

from storage.catalog import Catalog
from storage.inventory import Inventory
from storage.object_store import open_store
from storage.reading import ShardSamples
from storage.runs import checkpoints, json_with_digest, open_folder
from storage.verify import verify
from tests.kill.training import check
from training.loading import batches
from vlbert.checkpoint import read_model
from vlbert.config import Recipe
from vlbert.data.batch import Batch
from vlbert.data.order import SnapshotSpan
from vlbert.predict.command import Predictor
from vlbert.train import train

STAGE = f"regions/{DETECTOR}"


# --- which sample is which --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> tuple[Path, list[str]]:
    """A root whose captions grew from 20 to 28, by a shard before the others, and the two snapshots."""
    root = tiny_root(tmp_path_factory.mktemp("grown"), samples=0)
    commit_more(root, "00005", range(12))
    commit_more(root, "00007", range(12, 20))
    catalog = Catalog(open_store(str(root)), "captions")
    before = catalog.pin(STAGE).id
    commit_more(root, "00003", range(100, 108))
    return root, [before, catalog.pin(STAGE).id]


BOUNDARY = 40  # batches are of 12: the fourth takes 4 samples before it and 8 behind


Rows = list[tuple[str, tuple]]  # key and all that a sample became


def steps_of_a_world(
    grown: tuple[Path, list[str]], spans: list[SnapshotSpan], steps: range, size: int, parts: int, workers: int
) -> tuple[dict[int, Rows], list[SnapshotSpan]]:
    """By step what all ranks of a world take, in the order of the slots; and the spans that they leave behind."""
    (root, snapshots), boundary, found = grown, BOUNDARY // 12, {step: [[]] * size * parts for step in steps}
    store = open_store(str(root))
    changes = {"batch": 12, "text_batch": 12, "gradient_accumulation": parts, "flip": 0.5}
    for rank in range(size):
        data = training_data(root, rank, size, spans={"captions": spans}, **changes)
        for some in (range(steps.start, min(steps.stop, boundary)), range(max(steps.start, boundary), steps.stop)):
            if len(some) and some.start >= boundary and len(spans) == 1:
                samples = ShardSamples(store, Catalog(store, "captions").pinned(STAGE, snapshots[1]))
                data.switch_snapshot(0, samples, data.task.examples(samples, None), snapshots[1], BOUNDARY)
            for step, of_step in zip(some, batches(data, some, workers, CPU), strict=True):
                found[step][rank::size] = map(rows_in_order, of_step)
    # What a checkpoint carries: all that the next world knows.
    left = [SnapshotSpan(**json.loads(json.dumps(dataclasses.asdict(span)))) for span in data.datasets[0].spans]
    return {step: sum(of_step, []) for step, of_step in found.items()}, left


@pytest.fixture(scope="module")
def uninterrupted(grown) -> dict[int, Rows]:
    return steps_of_a_world(grown, [SnapshotSpan(0, 0, 20, grown[1][0])], range(9), 1, 1, 0)[0]


def test_with_new_shards_every_sample_comes_once_an_epoch(uninterrupted):
    keys = [key for step in range(9) for key, _ in uninterrupted[step] if not key.startswith("text-")]
    old = {tiny_sample(i, regions=1 + i % 3).key for i in range(20)}
    new = old | {tiny_sample(i, regions=1 + i % 3).key for i in range(100, 108)}
    assert Counter(keys[:20]) == Counter(keys[20:40]) == Counter(old)
    assert Counter(keys[40:68]) == Counter(keys[68:96]) == Counter(new)
    assert keys[:20] != keys[20:40]


@pytest.mark.parametrize(
    ("worlds", "parts", "cuts"), [((2, 3, 1), 1, (2, 5)), ((2, 3, 1), 2, (3, 4)), ((4, 1, 2), 3, (2, 5))]
)
def test_samples_are_equal_in_every_sequence_of_worlds(grown, uninterrupted, worlds, parts, cuts):
    spans, found = [SnapshotSpan(0, 0, 20, grown[1][0])], {}
    pieces = (range(cuts[0]), range(*cuts), range(cuts[1], 9))
    for steps, size, workers in zip(pieces, worlds, (0, 0, 1), strict=True):
        taken, spans = steps_of_a_world(grown, spans, steps, size, parts, workers)
        found |= taken
    assert [span.snapshot for span in spans] == grown[1]
    for step in range(9):
        ours, theirs = (sorted(rows[step], key=lambda row: row[0][:5] == "text-") for rows in (found, uninterrupted))
        assert ours == theirs, f"step {step}: the same slots in the same order, images first"


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
