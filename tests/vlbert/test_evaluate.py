"""Evaluation: a whole split of a task, from the checkpoint of a run to its files; and the models of checkpoints."""

import base64
import dataclasses
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from places import PROJECT
from refcoco_files import change_refs, write_refcoco
from seeded import reseal
from tiny import DETECTOR, as_overrides, commit_samples, tiny_recipe, tiny_root, tiny_sample
from vcr_files import write_vcr
from vqa_files import SAID, coco, write_vqa

from flows.torchrun import reported
from storage.object_store import StorageUnreachable
from storage.sample import Sample
from training.distributed import World
from vlbert.checkpoint import open_checkpoint
from vlbert.config import DataConfig, Recipe
from vlbert.evaluate import evaluate, find_evaluation, load_task_model, main
from vlbert.initial_weights import check_complete
from vlbert.recipes import RECIPES
from vlbert.results import SplitPredictions, problems_of, warnings
from vlbert.results_page import worst_and_best
from vlbert.tasks.base import Examples
from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
from vlbert.train import train

ALONE = World(0, 1, torch.device("cpu"))
FILES = {"predictions.parquet", "metrics.json", "index.html"}


def torn(sample: Sample) -> Sample:
    return dataclasses.replace(sample, image=sample.image[:200])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RefCOCO+ on twelve drawn samples, half of them val; `tuned` was trained on train, `memory` on val."""
    folder = tmp_path_factory.mktemp("evaluate")
    samples = [tiny_sample(i, regions=2 + i % 2) for i in range(12)]
    commit_samples(folder / "storage", "refcoco+", samples)
    write_refcoco(folder / "refcoco+", samples)
    train(a_recipe(folder, "tuned"), ALONE)
    memory = dataclasses.replace(
        a_recipe(folder, "memory"), data=dataclasses.replace(a_recipe(folder).data, held_out=None)
    )
    train(dataclasses.replace(memory, task=dataclasses.replace(memory.task, train_on=("val",))), ALONE)
    return folder


def a_recipe(folder: Path, run: str = "tuned", **task: object) -> Recipe:
    return tiny_recipe(
        folder / "storage",
        run=run,
        task=RefCOCOSettings(str(folder / "refcoco+"), **task),
        data=DataConfig(root=str(folder / "storage"), dataset="refcoco+", held_out="refcoco+", batch=4, workers=0),
        vocabulary=None,
        vocabulary_size=60,
        steps=2,
        save_every=2,
        random_init=True,
    )


def copied(world: Path, tmp_path: Path) -> Path:
    """The same again, to be changed."""
    shutil.copytree(world, tmp_path / "copy")
    return tmp_path / "copy"


def evaluated(
    folder: Path, run: str = "tuned", split: str = "val", out: Path | None = None, *overrides: str, again: bool = False
) -> dict:
    given = [f"task.folder={folder / 'refcoco+'}", *overrides]
    recipe = dataclasses.replace(a_recipe(folder), data=dataclasses.replace(a_recipe(folder).data, root=""))
    return evaluate(recipe, [f"{folder}/storage/runs/{run}"], split, given, out and str(out), ALONE, again)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def rows_in(folder: Path) -> list[dict]:
    return pq.read_table(folder / "predictions.parquet").to_pylist()


def test_the_papers_number_for_the_split_of_validation_is_found_from_a_checkpoint_alone(world):
    assert reported(f"{world}/storage/runs/tuned/step-0000002") == {"accuracy_published": "79.88 base, 80.31 large"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"recipe": {"task": {"gone": 1}}},
            "RefCOCOSettings has no field gone; the file is of another version of this ",
        ),
        (
            {"task": "ForeignSettings"},
            "ForeignSettings",
        ),
    ],
)
def test_a_checkpoint_of_another_version_of_this_code_is_said_to_be_one(world, tmp_path, changes, message):
    folder = copied(world, tmp_path) / "storage/runs/tuned/step-0000002"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    reseal(folder)
    for read in (reported, lambda path: load_task_model(open_checkpoint(path))):
        with pytest.raises(ValueError, match=f"{folder}.* {message}"):
            read(str(folder))


# --- what is written --------------------------------------------------------------------------------------------------


def test_a_split_is_asked_whole_in_its_own_order_and_scored_as_the_task_does(world, tmp_path, capsys):
    about = evaluated(world, out=tmp_path / "out")
    rows = rows_in(tmp_path / "out")
    assert [row["sentence_id"] for row in rows] == [10 * i + k for i in range(0, 12, 2) for k in range(2)]
    assert about["examples"] == {"all": 12, "predicted": 12, "unreadable": 0, "skipped": 0, "invalid": 0}
    assert json.loads(json.dumps(about)) == json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert about["metrics"] == RefCOCO.metrics(None, rows)
    assert about["mean_score"] == about["metrics"]["accuracy_published"]
    assert about["paper"] == {"accuracy_published": "79.88 base, 80.31 large"}
    assert about["trained_on"] == ["train"]
    assert not about["trained_on_this_split"]
    assert {*contents(tmp_path / "out")} == FILES | {*about["submission"]}
    said = capsys.readouterr().out
    assert "(the paper, %: 79.88 base, 80.31 large)" in said
    assert said.splitlines()[-1] == f"evaluated val: {tmp_path / 'out'}"


def test_it_goes_beside_the_run_that_it_is_of_and_the_same_again_is_the_same_to_the_byte(world, tmp_path):
    folder = copied(world, tmp_path)
    run = folder / "storage/runs/tuned"
    shutil.copytree(run / "step-0000002", run / "step-0000001")
    evaluated(folder)
    place = folder / "storage/runs/tuned/evaluations/val-step-0000002"
    before = contents(place)
    (place / "predictions.parquet").unlink()
    evaluated(folder, again=True)
    assert contents(place) == before
    newest = evaluated(folder, "tuned/step-0000002", again=True)
    assert newest["inputs"]["checkpoints"] == ["tuned/step-0000002"]
    assert contents(place) == before, "the newest is that one"


def test_what_is_done_already_by_the_same_settings_is_left_as_it_is_without_a_look_at_the_model(
    world, tmp_path, capsys
):
    folder = copied(world, tmp_path)
    about = evaluated(folder)
    place = folder / "storage/runs/tuned/evaluations/val-step-0000002"
    before = contents(place)
    (folder / "storage/runs/tuned/step-0000002/model.safetensors").write_bytes(b"torn")
    capsys.readouterr()
    assert evaluated(folder) == json.loads(json.dumps(about))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"evaluated already, with the same settings: {place}; --again repeats it"
    assert last == f"evaluated val: {place}"
    assert contents(place) == before
    with pytest.raises(ValueError, match="model.safetensors is damaged: it has 4 bytes"):
        evaluated(folder, again=True)


def test_that_an_evaluation_is_done_is_known_without_its_program(world, tmp_path):
    folder, name = copied(world, tmp_path), "finetune_refcoco_base"
    path, given = f"{folder}/storage/runs/tuned", [f"task.folder={folder / 'refcoco+'}"]
    assert find_evaluation(name, path, "val", given) is None
    recipe = dataclasses.replace(a_recipe(folder), name=name)
    about = evaluate(recipe, [path], "val", given, None, ALONE)
    assert find_evaluation(name, path, "val", [*given, f"data.root={folder}/storage"]) == json.loads(json.dumps(about))
    for other in (
        (name, path, "testA", given),
        (name, path, "val", [*given, "task.iou=plain"]),
        (name, path, "val", [*given, "task.no_such=1"]),
        ("finetune_vqa_base", path, "val", given),
        (name, f"{folder}/storage/runs/nobody", "val", given),
    ):
        assert find_evaluation(*other) is None


def test_an_evaluation_is_not_overwritten_by_another_and_its_old_files_go_with_it(world, tmp_path):
    folder, out = copied(world, tmp_path), tmp_path / "out"
    evaluated(folder, "tuned", "val", out)
    before = contents(out)
    with pytest.raises(
        ValueError, match=r"out/metrics.json is of an evaluation with split = val, now it is train; name"
    ):
        evaluated(folder, "tuned", "train", out)
    with pytest.raises(ValueError, match=r"with overrides = \[.*\], now it is \[.*'task.iou=plain'\]"):
        evaluated(folder, "tuned", "val", out, "task.iou=plain")
    assert contents(out) == before
    (out / "mine.txt").write_text("kept")
    (out / "metrics.json").write_text(json.dumps(json.loads(before["metrics.json"]) | {"files": ["old.csv"]}))
    (out / "old.csv").touch()
    evaluated(folder, "tuned", "val", out, again=True)
    assert contents(out) == before | {"mine.txt": b"kept"}
    of_before = {name: value for name, value in json.loads(before["metrics.json"]).items() if name != "examples"}
    for content in ({}, of_before | {"questions": {}}):  # the second is of an older version of this code
        (out / "metrics.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"out/metrics.json is not of an evaluation; name another place"):
            evaluated(folder, "tuned", "val", out)


def test_without_metrics_an_evaluation_is_not_whole(world, tmp_path):
    out = tmp_path / "out"
    evaluated(world, out=out)
    (out / "index.html").unlink()
    (out / "index.html").mkdir()  # where it cannot be written
    about = json.loads((out / "metrics.json").read_text())
    (out / "metrics.json").write_text(json.dumps(about | {"files": ["predictions.parquet"]}))
    with pytest.raises(StorageUnreachable, match="index.html"):
        evaluated(world, out=out, again=True)
    assert (out / "predictions.parquet").exists()
    assert not (out / "metrics.json").exists()


def test_of_several_detectors_it_reads_the_regions_that_it_was_trained_on(world, tmp_path):
    folder = copied(world, tmp_path)
    regions = folder / "storage" / "refcoco+" / "regions"
    shutil.copytree(regions / DETECTOR, regions / "00000000dead")
    about = evaluated(folder, "tuned", "val", tmp_path / "out")
    assert about["data"]["stage"] == f"regions/{DETECTOR}"
    with pytest.raises(ValueError, match="no detector 00000000f00d, only 00000000beef, 00000000dead"):
        evaluated(folder, "tuned", "val", tmp_path / "other", "data.detector=00000000f00d")


def test_the_page_is_whole_in_itself_escaped_and_draws_the_worst_and_the_best(world, tmp_path):
    folder = copied(world, tmp_path)
    refs = (folder / "refcoco+" / "refs(unc).p").read_bytes()
    (folder / "refcoco+" / "refs(unc).p").write_bytes(refs.replace(b"Vthe left one", b"V<b>left</b> &"))
    about = evaluated(folder, out=tmp_path / "out")
    page, rows = (tmp_path / "out" / "index.html").read_text(), rows_in(tmp_path / "out")
    assert rows[0]["question"] == "<b>left</b> &"
    assert "<b>left" not in page
    assert page.count(html.escape("<b>left</b> &")) == 12
    pictures = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(pictures) == 12
    assert not re.search(r'(src|href)="(?!data:)[^"]*[/:]', page), "nothing is loaded from elsewhere"
    for name in about["metrics"]:
        assert f"<th>{name}</th>" in page
    assert "79.88 base, 80.31 large" in page
    shown = [float(score) for score in re.findall(r">[✓✗] score ([\d.]+)<", page)]
    assert sorted(shown[:6]) == shown[:6]
    assert sorted(shown[6:], reverse=True) == shown[6:]
    assert max(shown[:6]) <= min(shown[6:])
    assert Image.open(io.BytesIO(base64.b64decode(pictures[0]))).size == (480, 320)


@pytest.mark.parametrize(
    ("scores", "worst", "best"),
    [
        ([(0, 0.9), (1, 0.2), (0, 0.1), (1, 0.9)], [0, 2], [3, 1]),
        ([(0.3, 0.5), (1, 0.5), (0, 0.5)], [2, 0], [1]),
        ([(None, 0.9), (None, 0.1), (None, 0.5)], [1, 2], [0]),  # without truths: the least sure, and the surest
        ([(None, 0.9), (1, 0.1), (0, 0.5)], [2], [1]),
        ([(1, 0.5)], [0], []),
    ],
)
def test_the_worst_are_the_surest_of_the_wrong(scores, worst, best):
    rows = [{"score": score, "probability": probability} for score, probability in scores]
    one = SplitPredictions(None, None, None, None, {}, None, [*range(len(rows))], rows, [], [])
    assert worst_and_best([one], count=2) == ([(0, row) for row in worst], [(0, row) for row in best])


def test_what_cannot_be_read_is_counted_named_and_told_both_ways(world, tmp_path, capsys):
    folder = copied(world, tmp_path)
    shutil.rmtree(folder / "storage" / "refcoco+")
    samples = [tiny_sample(i, regions=2 + i % 2) for i in range(12)]
    commit_samples(
        folder / "storage", "refcoco+", [torn(sample) if i in (4, 7) else sample for i, sample in enumerate(samples)]
    )
    about = evaluated(folder, out=tmp_path / "out")
    assert about["examples"] == {"all": 12, "predicted": 10, "unreadable": 2, "skipped": 0, "invalid": 0}
    rows, missing = rows_in(tmp_path / "out"), (tmp_path / "out" / "problems.jsonl").read_text().splitlines()
    assert [row["sentence_id"] for row in rows] == [10 * i + k for i in (0, 2, 6, 8, 10) for k in range(2)]
    assert [(json.loads(line)["key"], json.loads(line)["predicted"]) for line in missing] == [
        (samples[4].key, False)
    ] * 2
    assert about["mean_score_unreadable_wrong"] == pytest.approx(about["mean_score"] * 10 / 12)
    assert "2 of 12 examples could not be read: the metrics are over the others" in capsys.readouterr().out
    page, drawn = (tmp_path / "out" / "index.html").read_text(), {}
    for picture, key in re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" alt="sample (\w+)"', page):
        drawn.setdefault(key, Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"))
    assert len(drawn) == 5
    for sample in samples:
        if sample.key in drawn:
            assert_same_picture(drawn[sample.key], sample)

    shutil.rmtree(folder / "storage" / "refcoco+")
    commit_samples(folder / "storage", "refcoco+", [torn(sample) for sample in samples])
    with pytest.raises(ValueError, match=r"none of the 12 examples can be read; the last because .* does not decode"):
        evaluated(folder, out=tmp_path / "none")


def assert_same_picture(drawn: Image.Image, sample: Sample) -> None:
    """In the middle of each object, which no drawn line covers, the colour is that of the sample's picture."""
    stored = Image.open(io.BytesIO(sample.image)).convert("RGB").resize(drawn.size)
    scale = drawn.width / sample.width
    for x1, y1, x2, y2 in sample.regions.boxes:
        middle = (int((x1 + x2) / 2 * scale), int((y1 + y2) / 2 * scale))
        difference = [abs(a - b) for a, b in zip(drawn.getpixel(middle), stored.getpixel(middle), strict=True)]
        assert max(difference) < 40, (sample.url, middle)


def test_what_is_left_out_and_what_is_asked_with_a_flaw_are_told_apart_everywhere(world, tmp_path, capsys):
    """RefCOCO+ asks all of a split; the expression that is too long keeps its place and is wrong."""
    folder, out = copied(world, tmp_path), tmp_path / "out"
    change_refs(folder / "refcoco+", lambda refs: refs[0]["sentences"][0].update(sent="the " * 50))
    about = evaluated(folder, "tuned", "val", out, "task.expression_length=40")
    assert about["examples"] == {"all": 12, "predicted": 12, "unreadable": 0, "skipped": 0, "invalid": 1}
    (line,) = map(json.loads, (out / "problems.jsonl").read_text().splitlines())
    assert (line["predicted"], line["key"]) == (True, None)
    assert "tokens, more than task.expression_length = 40" in line["reason"]
    told = "1 of 12 examples are invalid and count as they are, see problems.jsonl"
    assert told in capsys.readouterr().out
    assert told in (out / "index.html").read_text()

    questions = Examples(np.arange(1), None, ("one of no use",), ("a bad one",))
    one = SplitPredictions(
        open_checkpoint(f"{world}/storage/runs/tuned"), None, None, None, {}, questions, [], [], [], []
    )
    assert [(line["predicted"], line["reason"]) for line in problems_of(one)] == [
        (False, "one of no use"),
        (True, "a bad one"),
    ]
    about["examples"] |= {"skipped": 1, "invalid": 0}
    assert "1 examples of the files are skipped, see problems.jsonl" in warnings(about)


def test_a_split_that_it_was_trained_on_is_said_to_be_one(world, tmp_path, capsys):
    about = evaluated(world, "memory", "val", tmp_path / "out")
    assert about["trained_on_this_split"]
    warning = "WARNING: it was trained on this split (val)"
    assert warning in capsys.readouterr().out
    assert warning in (tmp_path / "out" / "index.html").read_text()
    assert not evaluated(world, "memory", "train", tmp_path / "train")["trained_on_this_split"]


@pytest.mark.parametrize(
    ("train_on", "split", "learned"),
    [
        (("train",), "val", False),
        (("train", "val"), "val", True),
        (("val", "train"), "val", True),
        (("train", "testA"), "test", True),
        (("test",), "testB", True),
        (("testA",), "testB", False),
        (("test",), "val", False),
    ],
)
def test_a_split_shares_questions_with_those_that_it_consists_of(world, train_on, split, learned):
    checkpoint = open_checkpoint(f"{world}/storage/runs/tuned")
    checkpoint.task_settings["train_on"] = list(train_on)
    one = SplitPredictions(checkpoint, a_recipe(world), None, None, {}, None, [], [], [], [])
    assert one.was_trained_on(split) == learned
    recipe = a_recipe(world, train_on=train_on, validate_on=split)
    if learned:
        with pytest.raises(ValueError, match=f"task.validate_on={split} is one of task.train_on={','.join(train_on)}"):
            check_complete(recipe)
    else:
        check_complete(recipe)


def test_a_pre_training_takes_a_dataset_for_a_split_and_is_shown_shuffled_pictures_too(tmp_path):
    root = tiny_root(tmp_path)
    recipe = tiny_recipe(root, run="pretrained", steps=1, save_every=1)
    trained = train(recipe, ALONE)
    about = evaluate(recipe, [f"{root}/runs/pretrained"], "held-out", [], None, ALONE)
    assert about["metrics"] == pytest.approx(trained), "as its validation, which asked the same"
    assert "words_accuracy_shuffled" in about["metrics"]
    assert not about["trained_on_this_split"]
    assert evaluate(recipe, [f"{root}/runs/pretrained"], "captions", [], None, ALONE)["trained_on_this_split"]


@pytest.mark.slow
def test_two_processes_write_what_one_writes_to_the_byte(world, tmp_path):
    recipe = RECIPES["finetune_refcoco_base"]
    given = as_overrides(a_recipe(world), recipe())
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    for processes, done in ((1, 0), (2, 0), (2, 1)):
        command = [sys.executable, "-m", *(launch if processes == 2 else [])]
        command += ["vlbert.evaluate", "finetune_refcoco_base", f"{world}/storage/runs/tuned", "val", *given]
        ended = subprocess.run(
            [*command, "--out", str(tmp_path / str(processes))],
            cwd=PROJECT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("evaluated val") == 1, "one rank speaks"
        assert ended.stdout.count("evaluated already") == done
    assert contents(tmp_path / "2") == contents(tmp_path / "1")


@pytest.fixture(scope="module")
def vcr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """VCR with a run of answers and one of rationales."""
    folder = tmp_path_factory.mktemp("vcr")
    samples = [tiny_sample(i) for i in range(6)]
    commit_samples(folder / "storage", "vcr", samples)
    write_vcr(folder / "vcr", samples)
    (folder / "vcr" / "val.jsonl").write_text((folder / "vcr" / "train.jsonl").read_text())
    for kind in ("answer", "rationale"):
        train(vcr_recipe(folder, kind), ALONE)
    return folder


def vcr_recipe(folder: Path, kind: str) -> Recipe:
    settings = VCRSettings(str(folder / "vcr"), names="class", mask_size=2, max_tokens=40, subtask=kind)
    data = DataConfig(root=str(folder / "storage"), dataset="vcr", held_out=None, batch=4, workers=0)
    fresh = {"vocabulary": None, "vocabulary_size": 90, "steps": 1, "save_every": 1, "random_init": True}
    return tiny_recipe(folder / "storage", run=kind, task=settings, data=data, **fresh)


def test_of_what_could_not_be_read_only_what_would_have_a_score_counts_as_wrong(vcr, tmp_path):
    folder = copied(vcr, tmp_path)
    shutil.rmtree(folder / "storage" / "vcr")
    commit_samples(
        folder / "storage", "vcr", [torn(s) if i == 1 else s for i, s in enumerate(map(tiny_sample, range(6)))]
    )
    paths = [f"{folder}/storage/runs/{kind}" for kind in ("answer", "rationale")]
    about = evaluate(vcr_recipe(folder, "answer"), paths, "val", [], str(tmp_path / "out"), ALONE)
    rows = rows_in(tmp_path / "out")
    scores = [row["score"] for row in rows if row["score"] is not None]
    assert about["examples"] == {"all": 25, "predicted": 20, "unreadable": 5, "skipped": 0, "invalid": 0}
    assert len(scores) == 8, "an answer and, of four, one rationale of each picture"
    assert about["mean_score_unreadable_wrong"] == sum(scores) / 10


def test_two_checkpoints_are_one_evaluation_only_of_a_task_that_joins_them(world, vcr, tmp_path):
    paths = [f"{world}/storage/runs/{run}" for run in ("tuned", "memory")]
    with pytest.raises(ValueError, match=r"CHECKPOINT names 2 checkpoints; recipe \w+ takes 1 at most"):
        evaluate(a_recipe(world), paths, "val", [], str(tmp_path / "out"), ALONE)
    for count, message in (
        (3, "names 3 checkpoints; .* takes 2 at most"),
        (2, "have the same settings: name one of them, or"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(vcr_recipe(vcr, "answer"), [f"{vcr}/storage/runs/answer"] * count, "val", [], None, ALONE)


def test_two_runs_are_joined_each_by_the_settings_of_its_own_training(vcr):
    paths = [f"{vcr}/storage/runs/{kind}" for kind in ("answer", "rationale")]
    about = evaluate(vcr_recipe(vcr, "answer"), paths, "val", [], None, ALONE)
    assert {"answer_accuracy", "rationale_accuracy", "joint_accuracy"} <= about["metrics"].keys()
    assert about["paper"]["joint_accuracy"].startswith("55.2")
    assert [settings["subtask"] for settings in about["settings"]] == ["answer", "rationale"]
    place = vcr / "storage/runs/answer/evaluations/val-step-0000001-with-rationale-step-0000001"
    rows = rows_in(place)
    assert [row["subtask"] for row in rows] == ["answer"] * 5 + ["rationale"] * 20, "behind every answer"
    assert about["examples"] == {"all": 25, "predicted": 25, "unreadable": 0, "skipped": 0, "invalid": 0}
    assert about["submission"] == ["vcr_submission.csv"]
    assert len((place / "vcr_submission.csv").read_text().splitlines()) == 6

    # What the command line says wins over what an evaluation changes.
    few = evaluate(vcr_recipe(vcr, "answer"), paths[1:], "val", ["task.every_answer=false"], None, ALONE)
    assert few["examples"]["all"] == 5
    alone = evaluate(vcr_recipe(vcr, "answer"), paths[:1], "val", [], None, ALONE)
    assert "joint_accuracy" not in alone["metrics"]
    assert (alone["submission"], bool(alone["submission_refused"])) == ([], True)


# --- the model of a checkpoint ----------------------------------------------------------------------------------------


def test_a_task_model_is_that_of_its_checkpoint(world):
    checkpoint = open_checkpoint(f"{world}/storage/runs/memory")
    model, recipe = load_task_model(checkpoint)
    assert recipe == dataclasses.replace(
        a_recipe(world, "memory", train_on=("val",)), data=dataclasses.replace(a_recipe(world).data, held_out=None)
    )
    assert not model.training
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in checkpoint.model.items())
    assert model.task.settings.train_on == ("val",)
    assert model.vlbert.vocabulary.tokens == checkpoint.vocabulary.tokens

    other = dataclasses.replace(a_recipe(world), precision="fp32")
    _, recipe = load_task_model(checkpoint, ["task.iou=plain", "data.batch=2"], other)
    assert (recipe.task.train_on, recipe.task.iou, recipe.data.batch) == (("val",), "plain", 2)
    assert (recipe.data.held_out, recipe.precision) == ("refcoco+", "fp32")


@pytest.mark.parametrize("override", ["model.num_heads=1", "model.geometry=corners", "model.layers=J"])
def test_an_override_runs_no_other_network_than_the_one_that_was_trained(world, override):
    checkpoint, field = open_checkpoint(f"{world}/storage/runs/tuned"), override.partition("=")[0]
    for recipe in (None, a_recipe(world)):
        with pytest.raises(ValueError, match=f"has another architecture than recipe .*: {field} is .* there"):
            load_task_model(checkpoint, [override], recipe)


def test_a_converted_model_has_no_recipe_and_brings_the_settings_of_its_task(world, tmp_path):
    folder = tmp_path / "converted"
    shutil.copytree(world / "storage/runs/tuned/step-0000002", folder)
    config = json.loads((folder / "config.json").read_text())
    config["settings"] = config.pop("recipe")["task"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "state.json").unlink()
    model, recipe = load_task_model(open_checkpoint(str(folder)))
    assert (recipe.name, recipe.task, recipe.model) == ("converted", a_recipe(world).task, a_recipe(world).model)
    assert isinstance(model.task, RefCOCO)


# --- what a head's outputs mean ---------------------------------------------------------------------------------------

LISTED = ["yes", "no", "left", "right", "nobody knows", "on the left"]


@pytest.fixture(scope="module")
def vqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """VQA on four pictures, and a run `tuned` of one step."""
    folder = tmp_path_factory.mktemp("vqa")
    for split in ("train2014", "val2014"):
        write_vqa(folder / "vqa", split, SAID)
    (folder / "vqa" / "answers_vqa.txt").write_text("\n".join(LISTED))
    four = [tiny_sample(i) for i in range(4)]
    pictures = [picture for split in ("train2014", "val2014") for picture in coco(four, split)]
    commit_samples(folder / "storage", "vqa", pictures)
    train(vqa_recipe(folder), ALONE)
    return folder


def vqa_recipe(folder: Path, **changes: object) -> Recipe:
    settings = VQASettings(str(folder / "vqa"), answers=len(LISTED), question_length=40)
    data = DataConfig(root=str(folder / "storage"), dataset="vqa", held_out=None, batch=4, workers=0)
    fresh = {"vocabulary": None, "vocabulary_size": 60, "steps": 1, "save_every": 1, "random_init": True}
    return tiny_recipe(folder / "storage", **fresh | {"run": "tuned", "task": settings, "data": data} | changes)


def vqa_evaluated(folder: Path, out: Path) -> list[tuple]:
    recipe = vqa_recipe(folder, data=dataclasses.replace(vqa_recipe(folder).data, held_out="vqa"))
    evaluate(recipe, [f"{folder}/storage/runs/tuned"], "val2014", [f"task.folder={folder}/vqa"], str(out), ALONE)
    return [(row["question_id"], row["answer"], row["probability"], row["score"]) for row in rows_in(out)]


def test_answers_are_those_of_the_training_whatever_list_lies_there_now(vqa, tmp_path):
    folder = copied(vqa, tmp_path)
    before = vqa_evaluated(folder, tmp_path / "before")
    answers = folder / "vqa" / "answers_vqa.txt"
    answers.write_text("\n".join(LISTED[::-1]))
    assert vqa_evaluated(folder, tmp_path / "reversed") == before
    answers.unlink()
    assert vqa_evaluated(folder, tmp_path / "none") == before
    model, _ = load_task_model(open_checkpoint(f"{folder}/storage/runs/tuned"), ["task.folder=nowhere"])
    assert model.task.answers == LISTED


def test_training_goes_on_and_starts_anew_only_with_the_list_that_the_head_was_trained_with(vqa, tmp_path):
    folder = copied(vqa, tmp_path)
    shutil.rmtree(folder / "storage" / "runs")
    train(vqa_recipe(folder), ALONE)
    (folder / "vqa" / "answers_vqa.txt").write_text("\n".join([*LISTED[:2], *LISTED[:1:-1]]))
    start = f"{folder}/storage/runs/tuned/step-0000001"
    told = f"{start}/task.json has other answers than {folder}/vqa now: number 2 is 'left' there and 'on the left' here"
    with pytest.raises(ValueError, match=re.escape(told)):
        train(vqa_recipe(folder, steps=2), ALONE)
    started = {"run": "more", "init_from": start, "random_init": False}
    with pytest.raises(ValueError, match=re.escape(told)):
        train(vqa_recipe(folder, **started), ALONE)
    (folder / "vqa" / "answers_vqa.txt").write_text("\n".join(LISTED))
    assert train(vqa_recipe(folder, **started), ALONE) is not None


def test_a_checkpoint_whose_list_of_answers_is_torn_says_so(vqa, tmp_path):
    folder = copied(vqa, tmp_path) / "storage/runs/tuned/step-0000001"
    whole = (folder / "task.json").read_text()
    for torn_one, message in (
        (whole[:20], "task.json is not JSON, or is torn"),
        ('{"answers": 3}', "an object of lists"),
    ):
        (folder / "task.json").write_text(torn_one)
        reseal(folder)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(str(folder))


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    """What the program ends with: one line, and exit status 1."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, str), "a message: exit status 1"
    assert "\n" not in ended.value.code
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetune_nothing", "RUN", "val"], "there is no such recipe, only finetune_"),
        (
            ["nowhere:recipe", "RUN", "val"],
            "nowhere cannot be imported (No module named 'nowhere'); run this in",
        ),
        (["vlbert.recipes:nothing", "RUN", "val"], "vlbert.recipes has no function 'nothing'"),
        (["REFCOCO"], "CHECKPOINT is missing; say RECIPE CHECKPOINT SPLIT"),
        (["REFCOCO", "RUN"], "SPLIT is missing; say RECIPE CHECKPOINT SPLIT"),
        (["REFCOCO", "RUN", "task.iou=plain"], "SPLIT is missing"),
        (["REFCOCO", "RUN", "val", "task.nothing=1"], "RefCOCOSettings has no field 'nothing'"),
        (["REFCOCO", "ROOT/runs/nothing", "val"], "/runs/nothing has no whole checkpoint; name another run"),
        (["REFCOCO", "ROOT/runs/tuned/step-0000009", "val"], "step-0000009 is not a complete checkpoint"),
        (["REFCOCO", "ROOT", "val"], "storage holds no model: it has no config.json"),
        (["REFCOCO", "RUN", "testC"], "has no split testC"),
        (["REFCOCO", "RUN", "val", "task.folder=nowhere"], "there is no nowhere/"),
        (["REFCOCO", "RUN", "val", "data.held_out=nothing"], "nothing/regions holds no region shards"),
        (["REFCOCO", "RUN", "val", "data.held_out=elsewhere"], "are in no region shard"),
        (["finetune_vqa_base", "RUN", "val"], "was trained for another task than recipe finetune_vqa_base"),
        (
            ["finetune_refcoco_base", "RUN", "val"],
            "architecture than recipe finetune_refcoco_base: model.layers is JJ there",
        ),
        (["REFCOCO", "RUN", "val", "--out", "FILE"], "cannot write to the folder"),
        (["REFCOCO", "PLAIN", "val"], "plain belongs to no run"),
        (["REFCOCO", "PLAIN", "val", "data.root="], "data.root is not set; give data.root=FOLDER"),
        (["REFCOCO", "HEADLESS", "val", "--out", "OUT"], "holds a VL-BERT without the head of a task"),
        (
            ["REFCOCO", "WORDLESS", "val", "--out", "OUT"],
            "came without a vocabulary; give its own with vocabulary=vocab.txt",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(world, tmp_path, arguments, message):
    folder, step = tmp_path / "other", world / "storage/runs/tuned/step-0000002"
    for name in ("plain", "wordless"):
        shutil.copytree(step, folder / name)
    (folder / "wordless" / "vocab.txt").unlink()
    reseal(folder / "wordless")
    load_task_model(open_checkpoint(str(step)))[0].vlbert.save_pretrained(folder / "headless")
    (folder / "file").touch()
    if "data.held_out=elsewhere" in arguments:
        commit_samples(world / "storage", "elsewhere", [tiny_sample(99)])
    names = {
        "ROOT": world / "storage",
        "RUN": world / "storage/runs/tuned",
        "FILE": folder / "file",
        "OUT": folder / "out",
    }
    names |= {"PLAIN": folder / "plain", "HEADLESS": folder / "headless", "WORDLESS": folder / "wordless"}
    given = [str(names.get(word, word)).replace("ROOT/", f"{world}/storage/") for word in arguments]
    if given[0] == "REFCOCO":
        base = RECIPES["finetune_refcoco_base"]()
        tiny = [one for one in as_overrides(a_recipe(world), base) if not one.startswith("data.held_out")]
        held_out = [] if any(one.startswith("data.held_out=") for one in given) else ["data.held_out=refcoco+"]
        root = "data.root="
        given = ["finetune_refcoco_base", *given[1:2], *given[2:3], *tiny, *held_out, *given[3:]]
        if root in given:
            given = [one for one in given if not one.startswith(root) or one == root]
    assert message in refused(*given)
