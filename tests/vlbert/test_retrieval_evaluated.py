"""Retrieval, evaluated: a whole split, what was stopped, every world, unreadable images, and without fine-tuning."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from loaded import ALONE
from programs import contents, rows_in
from retrieval_files import captions_of, retrieval_recipe, retrieval_root
from tiny import TINY_MODEL, tiny_recipe, tiny_sample

from storage.object_store import open_store
from training.optimizer import OptimizerConfig
from vlbert.checkpoint import open_checkpoint
from vlbert.config import DataConfig
from vlbert.data.batch import Example, TextInput, collate
from vlbert.data.images import prepare_image
from vlbert.data.samples import open_samples
from vlbert.datasets.retrieval import ranks
from vlbert.evaluation import blocks as evaluation_blocks
from vlbert.evaluation.evaluate import evaluate, load_task_model
from vlbert.tasks.pretraining import RELATED, PretrainingSettings
from vlbert.tasks.retrieval import Retrieval
from vlbert.train import train
from vlbert.validate import validate

SAMPLES = [tiny_sample(i, regions=1 + i % 3) for i in range(10, 16)]  # of test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `tuned` was trained on train; `pretrained` on all samples, with the relationship head."""
    folder = retrieval_root(tmp_path_factory.mktemp("retrieval"))
    train(retrieval_recipe(folder), ALONE)
    data = DataConfig(root=str(folder / "root"), datasets={"flickr30k": None}, batch=8, workers=0, unreadable=1.0)
    task = PretrainingSettings(relationship=True, mismatched=0.5)
    recipe = tiny_recipe(folder / "root", run_name="pretrained", task=task, data=data, steps=2, save_every=2)
    train(dataclasses.replace(recipe, vocabulary=None, vocabulary_size=60), ALONE)
    return folder


def evaluated(folder: Path, out: Path, run: str = "tuned", rows_at_once: int = 64) -> dict:
    given = {"task.caption_length": 20, "task.folder": str(folder / "files"), "task.rows_at_once": rows_at_once}
    return evaluate(retrieval_recipe(folder), [f"{folder / 'root'}/runs/{run}"], "test", given, str(out), ALONE)


def test_all_images_and_captions_of_a_split_are_ranked(folder, tmp_path):
    summary = evaluated(folder, tmp_path / "out")
    rows = rows_in(tmp_path / "out")
    assert [row["captions"] for row in rows] == [captions_of(sample) for sample in SAMPLES]
    assert [row["question"] for row in rows] == [sample.url.rpartition("/")[2] for sample in SAMPLES]
    assert summary["metrics"] == Retrieval.metrics(None, rows)
    assert summary["examples"] == {"all": 6, "predicted": 6, "unreadable": 0, "skipped": 0, "invalid": 0}
    page = (tmp_path / "out" / "index.html").read_text()
    assert f"{rows[0]['image_ranks'][0]}: {rows[0]['captions'][0]}" in page
    assert {*contents(tmp_path / "out")} == {"predictions.parquet", "metrics.json", "index.html"}


def count_calls(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[int]:
    """Counts the batches that are predicted; the one of number `stop_at` is interrupted."""
    calls, predict = [], Retrieval.predict

    def counted(self: Retrieval, *given: object) -> list[dict]:
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append(len(calls))
        return predict(self, *given)

    monkeypatch.setattr(Retrieval, "predict", counted)
    return calls


def append_a_line(folder: Path, block: Path) -> dict:
    with open(folder / "files" / "dataset_flickr30k.json", "a") as file:
        file.write("\n")
    return {}


@pytest.mark.parametrize(
    ("change", "batches"),
    [
        (lambda folder, block: {}, 2),
        (lambda folder, block: {"rows_at_once": 5}, 3),
        (append_a_line, 3),
        (lambda folder, block: block.write_bytes(block.read_bytes()[:-9]) and {}, None),
    ],
    ids=["as it was", "other settings", "another file", "a damaged block"],
)
def test_an_evaluation_that_was_stopped_goes_on_from_its_own_blocks(folder, tmp_path, monkeypatch, change, batches):
    monkeypatch.setattr(evaluation_blocks, "_SECONDS", 0.0)
    monkeypatch.setattr(Retrieval, "evaluation_batch_size", 2)
    root, out = shutil.copytree(folder, tmp_path / "copy"), tmp_path / "out"
    with monkeypatch.context() as interrupted:
        count_calls(interrupted, stop_at=1)
        with pytest.raises(KeyboardInterrupt):
            evaluated(root, out)
    assert not (out / "metrics.json").exists()
    (block,) = out.glob("blocks-*/*.mp")
    changes, calls = change(root, block), count_calls(monkeypatch)
    if batches is None:
        with pytest.raises(ValueError, match=rf"{block.name} is damaged"):
            evaluated(root, out)
        return
    evaluated(root, out, **changes)
    assert len(calls) == batches
    evaluated(root, tmp_path / "whole", **changes)
    assert contents(out) == contents(tmp_path / "whole")


def test_predictions_survive_a_block(tmp_path):
    store, row = open_store(str(tmp_path)), {"a": [1, None, "x", 0.1, True], "b": {"c": []}, "n": 3}
    scores, unreadable = np.array([0.1, -np.inf], np.float32), {9: evaluation_blocks.Unreadable(0, None, "gone")}
    blocks = evaluation_blocks.Blocks(store, "x/", {"a": 1})
    blocks._written = -1e9
    rows = [row | {"scores": scores, "n": np.int64(3)}]
    blocks.add(4, evaluation_blocks.Predicted([7, 8], rows, [row], unreadable))
    ((at, found),) = evaluation_blocks.Blocks(store, "x/", {"a": 1}).read().items()
    assert (at, found.numbers, found.shuffled, found.unreadable) == (4, [7, 8], [row], unreadable)
    assert found.rows == [row | {"scores": scores.tolist()}]


def test_a_limited_validation_ranks_its_images_and_their_captions_alone(folder):
    checkpoint, given = open_checkpoint(f"{folder / 'root'}/runs/tuned"), {"task.folder": str(folder / "files")}
    model, recipe = load_task_model(checkpoint, given, retrieval_recipe(folder))
    samples, _ = open_samples(open_store(str(folder / "root")), "flickr30k", None, None, ALONE)
    held_out = {"flickr30k": (samples, model.task.examples(samples, "test"))}
    _, rows = validate(model, dataclasses.replace(recipe, validation_samples=2), held_out, ALONE)
    assert len(rows) == 2
    assert {name for row in rows for name in row["found_images"]} <= {row["image"] for row in rows}
    ranked = {one["answer"] for row in rows for one in row["ranking"]}
    assert ranked == {text for row in rows for text in row["captions"]}


@torch.no_grad()
def test_a_pretrained_model_ranks_by_its_relationship_head(folder, tmp_path):
    evaluated(folder, tmp_path / "out", "pretrained")
    rows = rows_in(tmp_path / "out")
    model, _ = load_task_model(open_checkpoint(f"{folder / 'root'}/runs/pretrained"))
    task = Retrieval(retrieval_recipe(folder).task, model.task.vocabulary, 8)
    first, *more = (TextInput.of_one_sentence(task.tokens(text)) for one in SAMPLES for text in captions_of(one))
    expected = np.zeros((6, 12))
    for number, sample in enumerate(SAMPLES):
        image = prepare_image(sample, TINY_MODEL.regions, False).to_input()
        encoded = model.vlbert(collate([Example("", first, image, more=tuple(more))]))
        expected[number] = model.head.related(encoded, torch.arange(12)).softmax(1)[:, RELATED]
    found = ranks(expected, np.repeat(np.arange(6), 2))
    assert [row["caption_rank"] - 1 for row in rows] == found.captions_of_image.tolist()
    assert [rank - 1 for row in rows for rank in row["image_ranks"]] == found.image_of_caption.tolist()
    assert [row["probability"] for row in rows] == pytest.approx(expected.max(axis=1), abs=1e-5)


def test_a_fine_tuning_begins_where_the_pretrained_model_is(folder, tmp_path):
    source, still = f"{folder / 'root'}/runs/pretrained", OptimizerConfig(learning_rate=1e-12, warmup_steps=0)
    recipe = retrieval_recipe(folder, run_name="from", random_init=False, init_from=source, steps=1, save_every=1)
    train(dataclasses.replace(recipe, optimizer=still), ALONE)
    evaluated(folder, tmp_path / "out", "from")
    evaluated(folder, tmp_path / "zero", "pretrained")
    found, expected = ([row["probability"] for row in rows_in(tmp_path / name)] for name in ("out", "zero"))
    assert found == pytest.approx(expected, abs=1e-6)
