"""Samples that cannot be read or decoded: slots of weight zero, counted and named, which change no other number."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest
import refcoco_files
import torch
import vcr_files
import vqa_files
from members import member, metadata, packed
from programs import torchrun
from seeded import another_writer
from tiny import TINY_MODEL, commit_samples, tiny_recipe, tiny_sample
from torch import Tensor, nn

from storage.object_store import ObjectMissing, open_store
from storage.sample import Sample
from training.distributed import World
from training.log import RunLog, read_metrics
from training.loop import batches
from training.metrics import Line
from training.writer import Writer
from vlbert.config import DataConfig
from vlbert.data.batch import Batch, Example, collate, placeholder
from vlbert.data.images import prepare_image
from vlbert.data.loading import TrainingData, ValidationData, drawn
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.data.samples import MOST_UNREADABLE, any_readable, captions, open_samples
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import Task, TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
from vlbert.tasks.vcr import VCR, VCRSettings
from vlbert.tasks.vqa import VQA, VQASettings
from vlbert.train import train
from vlbert.validate import validate

ALONE = World(0, 1, torch.device("cpu"))
WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "blue", "white", "square", "circle"])
ASKS = PretrainingSettings(WordMasking(probability=0.5), RegionMasking(probability=0.5, masked=0.5), max_elements=None)
STILL = dataclasses.replace(TINY_MODEL, dropout=0.0)  # dropout draws anew where a batch has another shape


def torn(sample: Sample) -> Sample:
    return dataclasses.replace(sample, image=sample.image[: len(sample.image) // 2])


def infinite(sample: Sample) -> Sample:
    boxes = sample.regions.boxes.copy()
    boxes[0, 2] = np.inf
    return dataclasses.replace(sample, regions=dataclasses.replace(sample.regions, boxes=boxes))


def of_other_classes(sample: Sample) -> Sample:
    regions = dataclasses.replace(sample.regions, class_probs=sample.regions.class_probs[:, :-1])
    return dataclasses.replace(sample, regions=regions)


def without_classes(sample: Sample) -> Sample:
    return dataclasses.replace(sample, regions=dataclasses.replace(sample.regions, class_probs=None))


def a_root(folder: Path, broken: dict[int, Callable[[Sample], Sample]], count: int = 16, held_out: int = 0) -> Path:
    """A root with `count` samples, some of them broken, and as many held out as are asked for."""
    samples = [tiny_sample(i, regions=1 + i % 3) for i in range(count)]
    with another_writer():
        commit_samples(folder, "captions", [broken.get(i, lambda s: s)(sample) for i, sample in enumerate(samples)])
        if held_out:
            samples = [tiny_sample(1000 + i) for i in range(held_out)]
            commit_samples(folder, "held-out", [broken.get(1000 + i, lambda s: s)(s) for i, s in enumerate(samples)])
    (folder / "vocab.txt").write_text(WORDS.text())
    return folder


def a_recipe(root: Path, **data: object):
    config = DataConfig(root=str(root), batch=4, text_batch=0, workers=0, unreadable=1.0)
    return tiny_recipe(
        root,
        task=ASKS,
        model=STILL,
        data=dataclasses.replace(config, **data),
        vocabulary=str(root / "vocab.txt"),
        steps=4,
        save_every=100,
    )


def training_data(root: Path, rank: int = 0, size: int = 1, **data: object) -> TrainingData:
    recipe = a_recipe(root, **data)
    samples, _ = open_samples(open_store(str(root)), "captions", None, None, ALONE)
    task = Pretraining(ASKS, WORDS, 8)
    world = World(rank, size, torch.device("cpu"))
    return TrainingData(samples, task.examples(samples, None), task, recipe.data, STILL.regions, world)


def overwrite(root: Path, number: int, what: bytes, at: int = 0) -> str:
    """Damage the tar at a sample, so many bytes behind its beginning; returns tar and offset as messages have them."""
    index = open_samples(open_store(str(root)), "captions", None, None, ALONE)[0].index
    tar, offset = root / index.tars[index.shard[number]], int(index.offset[number])
    with open(tar, "r+b") as file:
        file.seek(offset + at)
        file.write(what)
    return f"{tar} at byte {offset}"


# --- what a place-holder is worth -------------------------------------------------------------------------------------


def three_examples(which: str, folder: Path) -> tuple[Task, list[Example]]:
    """A task and three examples of it, of images with different regions."""
    samples = [tiny_sample(i, regions=1 + i) for i in range(3)]
    rngs = [np.random.default_rng(i) for i in range(3)]
    views = [prepare_image(sample, STILL.regions, flip=False) for sample in samples]
    if which == "pretraining":
        task = Pretraining(ASKS, WORDS, 8)
        asks = [None] * 3
    elif which == "refcoco":
        refcoco_files.write_refcoco(folder, samples)
        task = RefCOCO(RefCOCOSettings(str(folder)), refcoco_files.WORDS, 8)
        found = [task.examples(refcoco_files.urls(samples), split) for split in ("train", "val")]
        asks = [ask for questions in found for ask in questions.annotations[::2]]  # one of each image
        samples = [samples[i] for i in (1, 0, 2)]
        views = [views[i] for i in (1, 0, 2)]
    elif which == "vqa":
        folder.mkdir()
        (folder / "answers.txt").write_text("\n".join(vqa_files.ANSWERS))
        settings = VQASettings(str(folder), answer_list="answers.txt", answers=6, question_length=vqa_files.ROOM)
        task = VQA(settings, vqa_files.WORDS, 8)
        vqa_files.write_vqa(folder, "train2014", {10 * i: ["left"] * (4 + i) + ["no"] * (6 - i) for i in range(3)})
        asks = task.examples(vqa_files.urls(vqa_files.coco(samples, "train2014")), None).annotations
    else:
        vcr_files.write_vcr(folder, [*samples, tiny_sample(3)])
        masked = 0.5 if which == "vcr, hidden regions" else 0.0
        loss = "appearance" if which == "vcr, appearance" else "contextual"
        settings = VCRSettings(str(folder), names="class", mask_size=2, max_tokens=40, region_loss=loss)
        task = VCR(dataclasses.replace(settings, masked_regions=masked), vcr_files.WORDS, 8)
        asks = task.examples(vcr_files.urls([*samples, tiny_sample(3)]), None).annotations
    return task, [task.example(*each) for each in zip(samples, views, asks, rngs, strict=True)]


def losses_and_gradients(model: nn.Module, batch: Batch) -> tuple[dict[str, tuple[float, int]], dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    losses = model(batch)
    sum(loss for loss, _ in losses.values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values()), "DDP refuses a parameter without a gradient"
    return {name: (float(loss.detach()), count) for name, (loss, count) in losses.items()}, gradients


TASKS = ["pretraining", "refcoco", "vqa", "vcr", "vcr, hidden regions", "vcr, appearance"]


@pytest.mark.parametrize("which", TASKS)
def test_a_placeholder_changes_no_loss_no_count_and_no_gradient(which, tmp_path):
    task, (first, second, third) = three_examples(which, tmp_path / "task")
    torch.manual_seed(0)
    model = TaskModel(VLBert(STILL, len(task.vocabulary)), task)
    expected, gradients = losses_and_gradients(model, collate([first, second]))
    assert any(count for _, count in expected.values())
    losses, found = losses_and_gradients(model, collate([first, placeholder(third), second]))
    for name, (loss, count) in expected.items():
        assert losses[name][1] == count, name
        assert losses[name][0] == pytest.approx(loss, rel=1e-5), name
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * largest, msg=name)

    losses, gradients = losses_and_gradients(model, collate([placeholder(third)]))
    assert all(value == (0.0, 0) for value in losses.values())
    assert all(not gradient.any() for gradient in gradients.values())


def test_beside_text_alone_a_placeholder_is_the_only_image():
    task = Pretraining(ASKS, WORDS, 8)
    example = task.example(
        *(f := tiny_sample(0), prepare_image(f, STILL.regions, False)), None, np.random.default_rng(0)
    )
    text = task.text_example("text-0", WORDS.encode("a red square and a blue circle"), np.random.default_rng(1))
    torch.manual_seed(0)
    model = TaskModel(VLBert(STILL, len(WORDS)), task)
    losses, gradients = losses_and_gradients(model, collate([placeholder(example), text]))
    alone = model(collate([text]))
    assert {name: count for name, (_, count) in losses.items()} == {name: count for name, (_, count) in alone.items()}
    assert losses["text_words"][0] == pytest.approx(float(alone["text_words"][0].detach()))
    assert losses["text_words"][1] > 0
    assert not any(gradient.any() for name, gradient in gradients.items() if "fast_rcnn" in name)


# --- what becomes of a slot -------------------------------------------------------------------------------------------


def keys_of(data: TrainingData, steps: int) -> list[list[str]]:
    return [[key for batch in data[step] for key in batch.keys] for step in range(steps)]


@pytest.mark.parametrize("breaks", [torn, infinite, of_other_classes, without_classes])
def test_a_broken_sample_leaves_its_slot_empty_and_nobody_takes_its_place(tmp_path, breaks):
    whole = keys_of(training_data(a_root(tmp_path / "whole", {})), 4)
    broken = training_data(a_root(tmp_path / "broken", {5: breaks, 11: breaks}))
    missing = {tiny_sample(5, regions=3).key, tiny_sample(11, regions=3).key}
    assert keys_of(broken, 4) == [[key for key in step if key not in missing] for step in whole]
    named = [one for step in range(4) for batch in broken[step] for one in batch.unreadable]
    assert {one.key for one in named} == missing
    assert all(one.key in one.reason for one in named)
    assert all(one.key in whole[one.step - 1] for one in named), "steps count from 1"


@pytest.mark.parametrize("at", [0, 512])  # the header of the tar, the image
def test_where_even_the_key_is_lost_the_tar_and_the_place_are_named(tmp_path, at):
    root = a_root(tmp_path, {})
    where = overwrite(root, 5, b"\xff" * 100, at)
    (one,) = [one for step in range(4) for batch in training_data(root)[step] for one in batch.unreadable]
    assert (where in one.reason) if at == 0 else (one.key in one.reason)
    assert (one.key is None) == (at == 0)


@pytest.mark.parametrize(("size", "gradient_accumulation"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_and_parts_miss_the_same_slots_and_a_part_without_any_holds_one_place(
    tmp_path, size, gradient_accumulation
):
    broken = {i: torn for i in range(16) if i % 3}
    root = a_root(tmp_path, broken)
    kept = {tiny_sample(i, regions=1 + i % 3).key for i in range(16)} - {tiny_sample(i, 1 + i % 3).key for i in broken}
    dealt = [training_data(root, rank, size, gradient_accumulation=gradient_accumulation) for rank in range(size)]
    epoch = [batch for step in range(4) for data in dealt for batch in data[step]]
    counted = [key for batch in epoch for key, one in zip(batch.keys, batch.counted, strict=True) if one]
    assert sorted(counted) == sorted(kept)
    assert {one.key for batch in epoch for one in batch.unreadable} == {tiny_sample(i, 1 + i % 3).key for i in broken}
    empty = [batch for batch in epoch if not batch.counted.any()]
    assert empty
    assert all(len(batch) == 1 and batch.keys[0] in kept for batch in empty)
    again = [batch for step in range(4) for data in dealt for batch in data[step]]
    assert [batch.keys for batch in again] == [batch.keys for batch in epoch]


def test_many_unreadable_samples_in_a_row_are_an_error_of_the_storage(tmp_path):
    data = training_data(a_root(tmp_path / "all", dict.fromkeys(range(8), torn), count=8))
    with pytest.raises(ValueError, match="8 examples in a row cannot be read, the last because sample"):
        data[0]

    class Endless:
        def __len__(self) -> int:
            return 10**6

        def sample(self, number: int) -> Sample:
            raise ValueError(f"number {number}")

    with pytest.raises(ValueError, match=rf"none of {MOST_UNREADABLE} samples from anywhere .* because number \d+$"):
        any_readable(Endless())
    with pytest.raises(ValueError, match=f"{MOST_UNREADABLE} examples in a row cannot be read"):
        data.source.first_readable((0, i % 8) for i in itertools.count())


def test_a_tar_that_goes_while_training_stops_the_run(tmp_path):
    root = a_root(tmp_path, {})
    data = training_data(root)
    for tar in root.rglob("*.tar"):
        tar.unlink()
    with pytest.raises(ObjectMissing, match="there is no object captions/regions"):
        data[0]


def test_a_tar_that_is_damaged_as_a_whole_stops_nothing(tmp_path):
    count = MOST_UNREADABLE + 10
    samples = [tiny_sample(i, regions=1) for i in range(2 * count)]
    commit_samples(tmp_path, "captions", samples, per_shard=count)
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    data = training_data(tmp_path, batch=1)
    tar = tmp_path / data.source.samples.index.tars[0]
    tar.write_bytes(b"\xff" * tar.stat().st_size)
    assert any_readable(data.source.samples).key in {sample.key for sample in samples[count:]}
    assert captions(data.source.samples) == [sample.caption for sample in samples[count:]]
    missing = [step for step in range(30) if data[step][0].unreadable]
    assert missing, "nothing of the tar was drawn"
    assert all(not data[step][0].counted.any() and len(data[step][0]) == 1 for step in missing)
    (other,) = tar.parent.glob("00001-*.tar")
    other.write_bytes(b"\xff" * other.stat().st_size)
    with pytest.raises(
        ValueError, match=f"{2 * count} of {2 * count} samples cannot be read, the last because .*00001"
    ):
        captions(training_data(tmp_path).source.samples)


def test_errors_come_out_of_workers_as_they_are(tmp_path):
    torn_root, gone_root = a_root(tmp_path / "torn", dict.fromkeys(range(8), torn), count=8), a_root(tmp_path / "b", {})
    gone = training_data(gone_root)
    for tar in gone_root.rglob("*.tar"):
        tar.unlink()
    with pytest.raises(ObjectMissing) as missing:
        next(batches(gone, range(4), 1, ALONE.device))
    assert str(missing.value).startswith("there is no object captions/regions")
    with pytest.raises(
        ValueError, match=r"^8 examples in a row cannot be read, the last because sample \w+: its JPEG .*$"
    ):
        next(batches(training_data(torn_root), range(4), 1, ALONE.device))


# --- validation -------------------------------------------------------------------------------------------------------


def validated(root: Path, size: int) -> tuple[list[str], list[str], list[float]]:
    """Over all ranks: keys asked, keys left out, and a sum over the boxes that each text was shuffled to."""
    asked, missing, boxes = [], [], []
    for rank in range(size):
        data, world = training_data(root).source, World(rank, size, torch.device("cpu"))
        more = (data.config, STILL.regions, world, 14)
        for parts, _, unreadable in ValidationData(data.samples, data.examples, data.task, *more):
            missing += [one.key for one in unreadable.values()]
            if parts:
                right, other = parts
                assert other.keys == right.keys
                asked += right.keys
                boxes += other.boxes.sum((1, 2)).tolist()
    return asked, missing, boxes


def test_validation_leaves_broken_samples_out_in_every_world_alike(tmp_path):
    root = a_root(tmp_path, {2: torn, 9: infinite, 10: torn})
    asked, missing, boxes = validated(root, 1)
    assert len(asked) + len(missing) == 14
    assert len(missing) >= 2
    assert len(set(boxes)) == len(asked), "each image is shown once"
    for size in (2, 3, 7):
        assert validated(root, size) == (asked, missing, boxes)


def test_a_validation_without_a_readable_sample_is_an_error(tmp_path):
    root = a_root(tmp_path, {1000: torn, 1001: infinite}, held_out=2)
    held_out, _ = open_samples(open_store(str(root)), "held-out", None, None, ALONE)
    task = Pretraining(ASKS, WORDS, 8)
    model = TaskModel(VLBert(STILL, len(WORDS)), task)
    with pytest.raises(ValueError, match="none of the 2 held-out examples can be read; the last because .*sample"):
        validate(model, a_recipe(root), held_out, task.examples(held_out, "val"), ALONE)


# --- a run ------------------------------------------------------------------------------------------------------------


def lines_of(root: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (root / "runs" / "tiny" / name).read_text().splitlines()]


def test_a_run_with_more_broken_samples_than_it_may_pass_over_ends_and_names_the_last(tmp_path):
    root = a_root(tmp_path, {0: torn, 7: torn, 1001: torn}, held_out=3)
    train(a_recipe(root, held_out="held-out", unreadable=2 / 16), ALONE)  # what a validation cannot read is no third
    with pytest.raises(ValueError, match="^2 samples cannot be read, the last because sample .* data.unreadable$"):
        train(dataclasses.replace(a_recipe(root, unreadable=1.9 / 16), run="again"), ALONE)


def test_a_run_names_each_broken_sample_once_and_counts_every_slot(tmp_path, capsys):
    broken = {0: torn, 7: torn, 1001: torn}
    root = a_root(tmp_path, broken, held_out=3)
    # Built from the captions that can be read: sample 0, asked first for the number of classes, is not one of them.
    recipe = dataclasses.replace(a_recipe(root, held_out="held-out"), vocabulary=None, steps=8, save_every=4)
    keys = {tiny_sample(i, regions=1 + i % 3).key for i in (0, 7)}
    train(recipe, ALONE)
    said = capsys.readouterr().out
    lines = lines_of(root, "unreadable.jsonl")
    assert sorted(line["key"] for line in lines) == sorted([*keys, tiny_sample(1001).key])
    assert all(line["key"] in line["reason"] for line in lines)
    assert all(said.count(line["reason"]) == 1 for line in lines), "said once, though met in every epoch"
    training = read_metrics(open_store(str(root)), "tiny", "training")
    assert sum(line.get("unreadable", 0) for line in training) == 4, "two epochs of two"
    assert all(line["unreadable"] > 0 for line in training if "unreadable" in line)
    first = next(line for line in training if "unreadable" in line)
    assert sorted(line["step"] for line in lines)[:2] == [0, first["step"]], "0: of a validation"
    assert f"  unreadable {first['unreadable']}  " in said
    assert read_metrics(open_store(str(root)), "tiny", "validation")[-1]["unreadable"] == 1

    # As if killed after step 4, with lines of later steps written already.
    (root / "runs" / "tiny" / "step-0000008" / "state.json").unlink()
    with open(root / "runs" / "tiny" / "unreadable.jsonl", "a") as file:
        file.write(json.dumps({"step": 6, "key": "x", "reason": "of a step that is done again"}) + "\n{")
    train(recipe, ALONE)
    assert lines_of(root, "unreadable.jsonl") == lines
    unreadable = [line.get("unreadable") for line in training]
    again = read_metrics(open_store(str(root)), "tiny", "training")
    assert [line.get("unreadable") for line in again] == unreadable


def test_a_run_over_samples_with_every_kind_of_damage_names_these_and_no_others(tmp_path):
    """Among 24 good ones, trained on and validated on; the first of all is among the bad ones."""
    changes = [
        metadata(caption=3),
        metadata(width=10**9),
        metadata(flags={}),
        member("json", b'{"caption":' + b"[" * 10**5),
        member("json", b"\xff"),
        member("mp", b"\x91" * 10**5),
        member("mp", msgpack.packb({1: 2})),
        packed(background=99),
        packed(detector=msgpack.ExtType(1, b"")),
        packed(boxes=["<f4", [1, 4], np.float32([0, 0, 1e30, 5]).tobytes()]),
        packed(labels=["<i4", [2**62], bytes(4)]),
        lambda members: members | {"jpg": members["jpg"][: len(members["jpg"]) // 2]},
        member("jpg", b"<html>"),
    ]
    samples = [tiny_sample(i, regions=1) for i in range(24 + len(changes))]
    bad = {samples[2 * i].key: change for i, change in enumerate(changes)}
    held_out = [tiny_sample(1000 + i, regions=1) for i in range(4)]
    bad |= {held_out[0].key: metadata(caption=None), held_out[2].key: packed(scores=["<f4", [1], b"\xff" * 4])}
    with another_writer(lambda key, members: bad.get(key, dict)(members)):
        commit_samples(tmp_path, "captions", samples)
        commit_samples(tmp_path, "held-out", held_out)
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    recipe = a_recipe(tmp_path, held_out="held-out", batch=len(samples))
    train(dataclasses.replace(recipe, steps=2, log_every=1), ALONE)
    lines = lines_of(tmp_path, "unreadable.jsonl")
    assert sorted(line["key"] for line in lines) == sorted(bad)
    assert all(line["key"] in line["reason"] for line in lines)
    counts = [line["unreadable"] for line in read_metrics(open_store(str(tmp_path)), "tiny", "training")]
    assert counts == [len(changes)] * 2
    assert read_metrics(open_store(str(tmp_path)), "tiny", "validation")[-1]["unreadable"] == 2


def test_slots_of_steps_before_a_validation_are_counted_in_the_line_after_it(tmp_path):
    root = a_root(tmp_path, {0: torn, 7: torn, 9: torn}, held_out=3)
    recipe = dataclasses.replace(a_recipe(root, held_out="held-out"), log_every=4, validate_every=1)
    train(recipe, ALONE)
    (line,) = read_metrics(open_store(str(root)), "tiny", "training")
    assert line["unreadable"] == 3


def test_the_losses_of_a_run_are_those_without_the_broken_samples(tmp_path):
    """The mean over what is asked: of the loss only the share of a slot is missing, and it is not divided by more."""
    whole, broken = (training_data(a_root(tmp_path / name, b)) for name, b in (("whole", {}), ("broken", {5: torn})))
    task = whole.source.task
    torch.manual_seed(0)
    model = TaskModel(VLBert(STILL, len(WORDS)), task)
    key = tiny_sample(5, regions=3).key
    (step,) = [step for step in range(4) if key in whole[step][0].keys]
    samples, numbers = whole.source.samples, [number for _, _, number in whole_slots(whole, step)]
    left = collate(whole.source.read([(0, n) for n in numbers if samples.sample(n).key != key], step=0))
    expected, found = (model(batch) for batch in (left, broken[step][0]))
    for name, (loss, count) in expected.items():
        assert (float(found[name][0].detach()), found[name][1]) == (float(loss.detach()), count), name


def whole_slots(data: TrainingData, step: int) -> list[tuple[int, int, int]]:
    return drawn(data.spans, step * data.config.batch, data.config.batch, data.config.seed)


@pytest.mark.slow
def test_ranks_that_hold_a_place_compute_what_one_process_computes(tmp_path):
    """Every part of a rank is one sample: wherever it is broken, that rank has a place-holder alone."""
    root = a_root(tmp_path, {i: torn for i in range(16) if i % 3 == 0}, held_out=2)
    recipe = a_recipe(root, gradient_accumulation=2, held_out="held-out")
    train(dataclasses.replace(recipe, run="one"), ALONE)
    changes = {name: getattr(recipe, name) for name in ("task", "model", "data", "vocabulary", "steps", "save_every")}
    result = torchrun(root, "two", 2, **changes)
    assert result.returncode == 0, result.stderr[-3000:]
    one, two = (read_metrics(open_store(str(root)), run, "training") for run in ("one", "two"))
    assert sum(line.get("unreadable", 0) for line in one) == 6
    for before, after in zip(one, two, strict=True):
        names = [name for name in before if name.startswith("loss_") or name in ("step", "unreadable")]
        assert {name: after[name] for name in names} == pytest.approx({name: before[name] for name in names}, rel=2e-5)


def test_lines_of_a_record_are_written_once_and_cut_where_a_run_goes_on(tmp_path, capsys):
    writer = Writer(open_store(str(tmp_path)))
    record = RunLog(writer, "run", 0, 10, 1)
    record.unreadable([])
    record.close()
    assert not (tmp_path / "runs" / "run" / "unreadable.jsonl").exists()
    record = RunLog(writer, "run", 0, 10, 1)
    record.unreadable({"step": step, "reason": f"reason {step % 5}"} for step in range(1, 8))
    assert "5 samples cannot be read, and count for nothing: reason 1; reason 2; reason 3; and 2 more" in (
        capsys.readouterr().out
    )
    record.close()
    record = RunLog(writer, "run", 3, 10, 1)
    record.unreadable([{"step": 4, "reason": "reason 4"}, {"step": 5, "reason": "reason 1"}])
    record.close()
    lines = (tmp_path / "runs" / "run" / "unreadable.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["reason 1", "reason 2", "reason 3", "reason 4"]


def test_a_record_that_goes_on_replaces_a_file_at_once_and_only_where_lines_go(tmp_path):
    """Whoever had it open still reads all of it: a kill halfway leaves one or the other."""
    writer = Writer(open_store(str(tmp_path)))
    record = RunLog(writer, "run", 0, 10, 1)
    for step in (1, 2, 3):
        record.training(step, Line({"all": 1.0}, {}, {}, {}, steps=1, seconds=1.0, data_wait=0.0, memory=0), 0.1)
    record.close()
    file = tmp_path / "runs" / "run" / "metrics.jsonl"
    before, inode = file.read_text(), file.stat().st_ino
    RunLog(writer, "run", 3, 10, 1).close()
    assert (file.read_text(), file.stat().st_ino) == (before, inode)
    with file.open() as old:
        RunLog(writer, "run", 2, 10, 1).close()
        assert old.read() == before
    assert file.read_text() == "".join(before.splitlines(keepends=True)[:2])
