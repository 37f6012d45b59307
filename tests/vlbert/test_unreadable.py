"""Samples that cannot be read: slots of weight zero, counted and named, which change no other number."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import family
import loaded
import numpy as np
import pytest
import torch
from loaded import ALONE
from seeded import another_writer
from tiny import TINY_MODEL, commit_samples, tiny_recipe, tiny_sample
from torch import Tensor, nn

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import StorageUnreachable, open_store
from storage.sample import Sample
from training.checkpoint import Writer
from training.distributed import World
from training.loading import batches
from training.log import RunLog, read_metrics
from vlbert.config import DataConfig
from vlbert.data.batch import Batch, collate, make_placeholder
from vlbert.data.loading import TrainingData, ValidationData
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.data.samples import open_samples
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.train import train

WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "blue", "white", "square", "circle"])
ASKS = PretrainingSettings(WordMasking(probability=0.5), RegionMasking(probability=0.5, masked=0.5), max_elements=None)
STILL = dataclasses.replace(TINY_MODEL, dropout=0.0)  # dropout draws anew where a batch has another shape


def a_sample(number: int) -> Sample:
    return tiny_sample(number, regions=1 + number % 3)


def torn(sample: Sample) -> Sample:
    return dataclasses.replace(sample, image=sample.image[: len(sample.image) // 2])


def infinite(sample: Sample) -> Sample:
    boxes = sample.regions.boxes.copy()
    boxes[0, 2] = np.inf
    return dataclasses.replace(sample, regions=dataclasses.replace(sample.regions, boxes=boxes))


def of_classes(sample: Sample, probs: np.ndarray | None) -> Sample:
    return dataclasses.replace(sample, regions=dataclasses.replace(sample.regions, class_probs=probs))


def a_root(folder: Path, broken: dict[int, Callable[[Sample], Sample]], count: int = 16, held_out: int = 0) -> Path:
    """A root with `count` samples, some of them broken, and as many held out as wanted."""
    with another_writer():
        for name, first, number in (("captions", 0, count), ("held-out", 1000, held_out)):
            samples = [broken.get(first + i, lambda sample: sample)(a_sample(first + i)) for i in range(number)]
            commit_samples(folder, name, samples)
    (folder / "text").mkdir()
    (folder / "text" / "vocab.txt").write_text(WORDS.text())
    return folder


def a_recipe(root: Path, **data: object):
    config = DataConfig(root=str(root), batch=4, text_batch=0, workers=0, unreadable=1.0)
    return tiny_recipe(root, task=ASKS, model=STILL, data=dataclasses.replace(config, **data), steps=4, save_every=100)


def training_data(root: Path, *rank_and_size: int, **data: object) -> TrainingData:
    changes = {"batch": 4, "text_batch": 0} | data
    return loaded.training_data(root, *rank_and_size, task=Pretraining(ASKS, WORDS, 8), **changes)


# --- placeholders -----------------------------------------------------------------------------------------------------


def losses_and_gradients(model: nn.Module, batch: Batch) -> tuple[dict[str, tuple[float, int]], dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    losses = model(batch)
    sum(loss for loss, _ in losses.values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values()), "DDP refuses a parameter without a gradient"
    return {name: (float(loss.detach()), count) for name, (loss, count) in losses.items()}, gradients


TASKS = family.TASKS | {
    "vcr, masked regions": lambda folder: family.vcr(folder, masked_regions=0.5),
    "vcr, appearance": lambda folder: family.vcr(folder, region_loss="appearance"),
    "vqa": lambda folder: family.vqa(folder, reads="mask", classifier="words", classifier_dropout=0.0),
}


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_a_placeholder_changes_no_loss_and_no_gradient(make, tmp_path):
    task, samples = make(tmp_path)
    model = family.new_model(task, STILL)
    first, second, third = family.examples_of(task, samples, STILL)[:3]
    expected, gradients = losses_and_gradients(model, collate([first, second]))
    assert any(count for _, count in expected.values())
    losses, found = losses_and_gradients(model, collate([first, make_placeholder(third), second]))
    for name, (loss, count) in expected.items():
        assert losses[name] == (pytest.approx(loss, rel=1e-5), count), name
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * largest, msg=name)

    losses, gradients = losses_and_gradients(model, collate([make_placeholder(third)]))
    assert all(value == (0.0, 0) for value in losses.values())
    assert all(not gradient.any() for gradient in gradients.values())


# --- slots ------------------------------------------------------------------------------------------------------------


def keys_of(data: TrainingData) -> list[list[str]]:
    return [[key for batch in data[step] for key in batch.keys] for step in range(4)]


BREAKS = [
    torn,
    infinite,
    lambda one: of_classes(one, one.regions.class_probs[:, 1:]),
    lambda one: of_classes(one, None),
]


@pytest.mark.parametrize("breaks", BREAKS, ids=["torn", "infinite", "other classes", "no classes"])
def test_a_broken_sample_leaves_its_slot_empty(tmp_path, breaks):
    whole = keys_of(training_data(a_root(tmp_path / "whole", {})))
    broken = training_data(a_root(tmp_path / "broken", {5: breaks, 11: breaks}))
    missing = {a_sample(5).key, a_sample(11).key}
    assert keys_of(broken) == [[key for key in step if key not in missing] for step in whole]
    named = [one for step in range(4) for batch in broken[step] for one in batch.unreadable]
    assert {one.key for one in named} == missing
    assert all(one.key in one.reason for one in named)
    assert all(one.key in whole[one.step - 1] for one in named), "steps count from 1"


@pytest.mark.parametrize("at", [0, 512])  # the header of the tar, the image
def test_without_a_key_the_tar_and_offset_are_named(tmp_path, at):
    root = a_root(tmp_path, {})
    index = open_samples(open_store(str(root)), "captions", None, None, ALONE)[0].index
    tar, offset = root / index.tars[index.shard[5]], int(index.offset[5])
    with open(tar, "r+b") as file:
        file.seek(offset + at)
        file.write(b"\xff" * 100)
    (one,) = [one for step in range(4) for batch in training_data(root)[step] for one in batch.unreadable]
    assert (one.key is None) == (at == 0)
    assert (one.key or f"{tar} at byte {offset}") in one.reason


@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_and_parts_miss_the_same_slots_and_an_empty_part_has_a_placeholder(tmp_path, parts):
    broken = {i: torn for i in range(16) if i % 3}
    root, missing = a_root(tmp_path, broken), {a_sample(i).key for i in broken}
    kept = {a_sample(i).key for i in range(16)} - missing
    dealt = [training_data(root, rank, 2, gradient_accumulation=parts) for rank in range(2)]
    epoch = [batch for step in range(4) for data in dealt for batch in data[step]]
    assert sorted(batch.keys[row] for batch in epoch for row in batch.counted) == sorted(kept)
    assert {one.key for batch in epoch for one in batch.unreadable} == missing
    empty = [batch for batch in epoch if not len(batch.counted)]
    assert empty
    assert all(len(batch) == 1 and batch.keys[0] in kept for batch in empty)


def test_many_unreadable_samples_in_a_row_are_an_error(tmp_path):
    data = training_data(a_root(tmp_path / "all", dict.fromkeys(range(8), torn), count=8))
    with pytest.raises(ValueError, match=r"^8 examples in a row cannot be read, the last because sample \w+: its JPEG"):
        next(batches(data, range(4), 1, ALONE.device))  # by a loading process, whose error comes out as it is


# --- validation -------------------------------------------------------------------------------------------------------


def validated(root: Path, size: int) -> tuple[list[str], list[str], list[float]]:
    """Over all ranks: keys, missing keys, and a sum over the boxes that each text was shuffled to."""
    keys, missing, boxes = [], [], []
    for rank in range(size):
        data, world = training_data(root).source(), World(rank, size, torch.device("cpu"))
        more = (data.config, STILL, world, 14)
        for parts, _, unreadable in ValidationData(data.samples, data.examples, data.task, *more):
            missing += [one.key for one in unreadable.values()]
            if parts:
                right, other = parts
                assert other.keys == right.keys
                keys += right.keys
                boxes += other.boxes.sum((1, 2)).tolist()
    return keys, missing, boxes


def test_validation_skips_the_same_broken_samples_in_every_world(tmp_path):
    root = a_root(tmp_path, {2: torn, 9: infinite, 10: torn})
    keys, missing, boxes = validated(root, 1)
    assert (len(keys) + len(missing), len(missing) >= 2) == (14, True)
    assert len(set(boxes)) == len(keys), "each image is shown once"
    for size in (2, 7):
        assert validated(root, size) == (keys, missing, boxes)


# --- a run ------------------------------------------------------------------------------------------------------------


def lines_of(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "runs/tiny/unreadable.jsonl").read_text().splitlines()]


def test_a_run_logs_each_broken_sample_once_counts_every_slot_and_ends_where_there_are_too_many(tmp_path, capsys):
    root = a_root(tmp_path, {0: torn, 7: torn, 1001: torn}, held_out=3)
    # Built from the captions that can be read; sample 0, whose number of classes is read first, is not one of them.
    recipe = a_recipe(root, held_out=("held-out",), unreadable=2 / 16)  # what a validation cannot read is no third
    recipe = dataclasses.replace(recipe, vocabulary=None, steps=8, save_every=4)
    train(recipe, ALONE)
    printed = capsys.readouterr().out
    lines = lines_of(root)
    assert sorted(line["key"] for line in lines) == sorted(a_sample(i).key for i in (0, 7, 1001))
    assert sum(printed.count(line["reason"]) for line in lines) <= 3, "once, though met in every epoch"
    training = read_metrics(open_store(str(root)), "tiny", "training")
    assert sum(line.get("unreadable", 0) for line in training) == 4, "two epochs of two"
    first = next(line for line in training if "unreadable" in line)
    assert sorted(line["step"] for line in lines)[:2] == [0, first["step"]], "0: of a validation"
    assert read_metrics(open_store(str(root)), "tiny", "validation")[-1]["unreadable"] == 1

    # As if killed after step 4, with lines of later steps written already.
    (root / "runs/tiny/step-0000008/state.json").unlink()
    with open(root / "runs/tiny/unreadable.jsonl", "a") as file:
        file.write(json.dumps({"step": 6, "key": "x", "reason": "of a step that is done again"}) + "\n")
    train(recipe, ALONE)
    assert lines_of(root) == lines
    again = read_metrics(open_store(str(root)), "tiny", "training")
    assert [line.get("unreadable") for line in again] == [line.get("unreadable") for line in training]
    with pytest.raises(ValueError, match="^2 samples cannot be read, the last because sample .* data.unreadable$"):
        train(dataclasses.replace(a_recipe(root, unreadable=1.9 / 16), run_name="again"), ALONE)


# --- long captions ----------------------------------------------------------------------------------------------------


def wordy(sample: Sample) -> Sample:
    return dataclasses.replace(sample, caption="a red square and " * 175)  # 700 tokens


def test_a_caption_of_700_words_is_cut_counted_and_named_with_its_list_and_row(tmp_path, capsys):
    root = a_root(tmp_path, {5: wordy, 6: torn, 1001: wordy}, held_out=3)
    recipe = dataclasses.replace(a_recipe(root, held_out=("held-out",)), steps=8)
    assert recipe.task.caption_length == 60, "the default follows the model"
    train(recipe, ALONE)
    reason = "captions, row 6: it has 700 tokens, more than task.caption_length = 60"
    cut = [line for line in lines_of(root) if line["cut"]]
    assert [(line["key"], line["reason"]) for line in cut] == [(a_sample(5).key, reason)]
    assert capsys.readouterr().out.count(f"1 texts are too long and cut: {reason}") == 1, "once, though in both epochs"
    training = read_metrics(open_store(str(root)), "tiny", "training")
    assert [sum(line.get(name, 0) for line in training) for name in ("cut", "unreadable")] == [2, 2]
    allowed = dataclasses.replace(a_recipe(root, unreadable=1 / 16), run_name="again", steps=8)
    train(allowed, ALONE)  # a cut caption counts as no unreadable sample


@pytest.mark.parametrize("listed", [False, True])
def test_a_text_that_its_task_does_not_limit_is_left_out_by_name(tmp_path, listed):
    root = a_root(tmp_path, {5: wordy})
    if listed:
        catalog, meta = Catalog(open_store(str(root)), "captions"), {"source": {"list": "my list.tsv sha256:00"}}
        rows = [Row(0, a_sample(0).key, "ok", "", a_sample(0).url, None)]
        image = dataclasses.replace(a_sample(0), regions=None)
        assert commit_shard(catalog, "images", "00000", [image], rows, meta)
    unlimited = dataclasses.replace(ASKS, caption_length=1000)
    data = loaded.training_data(root, task=Pretraining(unlimited, WORDS, 8), batch=4, text_batch=0)
    (one,) = [one for step in range(4) for batch in data[step] for one in batch.unreadable]
    name = "my list.tsv" if listed else "captions"
    reason = f"{name}, row 6: its text has 702 tokens, but the model reads at most 62"
    assert (one.key, one.reason, one.cut) == (a_sample(5).key, f"sample {one.key}: {reason}", False)


def test_a_storage_that_is_away_costs_a_cut_text_only_its_place(tmp_path, monkeypatch):
    data = loaded.training_data(a_root(tmp_path, {5: wordy}), batch=4, text_batch=0)

    def away(*_: object) -> None:
        raise StorageUnreachable("no answer")

    monkeypatch.setattr("vlbert.data.samples.read_columns", away)
    (one,) = [one for step in range(4) for batch in data[step] for one in batch.unreadable]
    assert (one.key, one.cut) == (a_sample(5).key, True)
    assert re.search(r"^sample 5 of captions/regions/.*: it has 700 tokens", one.reason)


def test_a_log_names_a_thousand_cut_texts_and_no_more(tmp_path):
    with Writer(open_store(str(tmp_path))) as writer:
        log = RunLog(writer, "run", 0, 10, 1)
        lines = [{"step": 1, "key": "k", "reason": f"reason {n}", "cut": n % 2 == 0} for n in range(2200)]
        assert log.unreadable(iter(lines)) == 1100
        assert log.unreadable(lines) == 1100
    found = [json.loads(line) for line in (tmp_path / "runs/run/unreadable.jsonl").read_text().splitlines()]
    assert [sum(line["cut"] == cut for line in found) for cut in (True, False)] == [1000, 1100]
