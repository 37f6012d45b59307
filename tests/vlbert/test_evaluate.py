"""Evaluation: a whole split of a task, from the checkpoint of a run to its files; and the models of checkpoints."""

import dataclasses
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import PROJECT
from programs import contents, rows_in, torchrun
from refcoco_files import change_refs, write_refcoco
from seeded import reseal
from tiny import DETECTOR, TINY_MODEL, as_overrides, commit_samples, tiny_recipe, tiny_root, tiny_sample
from vcr_files import write_vcr
from vqa_files import ANNOTATORS, coco, write_vqa

from storage.object_store import StorageUnreachable
from storage.sample import Sample
from training.distributed import ALONE
from vlbert.checkpoint import open_checkpoint
from vlbert.config import DataConfig, Recipe
from vlbert.evaluation.evaluate import evaluate, find_evaluation, load_task_model, main
from vlbert.evaluation.results import SplitPredictions, warnings
from vlbert.evaluation.results_page import worst_and_best
from vlbert.hf import VLBertModel
from vlbert.initial_weights import check_complete
from vlbert.recipes import RECIPES
from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
from vlbert.train import train

FILES = {"predictions.parquet", "metrics.json", "index.html"}
SAMPLES = [tiny_sample(i, regions=2 + i % 2) for i in range(12)]


def torn(sample: Sample) -> Sample:
    return dataclasses.replace(sample, image=sample.image[:200])


@pytest.fixture(scope="module")
def refcoco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RefCOCO+ on twelve drawn samples, half of them val; run `tuned` was trained on train, `memory` on val."""
    folder = tmp_path_factory.mktemp("evaluate")
    commit_samples(folder / "storage", "refcoco+", SAMPLES)
    write_refcoco(folder / "refcoco+", SAMPLES)
    train(refcoco_recipe(folder), ALONE)
    memory = refcoco_recipe(folder, "memory", train_on=("val",))
    train(dataclasses.replace(memory, data=dataclasses.replace(memory.data, held_out=None)), ALONE)
    return folder


@pytest.fixture
def copy(refcoco: Path, tmp_path: Path) -> Path:
    """The same again, to be changed."""
    return shutil.copytree(refcoco, tmp_path / "copy")


def refcoco_recipe(folder: Path, run: str = "tuned", **task: object) -> Recipe:
    root, settings = folder / "storage", RefCOCOSettings(str(folder / "refcoco+"), **task)
    data = DataConfig(str(root), {"refcoco+": None}, held_out=("refcoco+",), batch=4, workers=0)
    changes = {"vocabulary": None, "vocabulary_size": 60, "steps": 2, "save_every": 2, "random_init": True}
    return tiny_recipe(root, run_name=run, task=settings, data=data, **changes)


def evaluated(folder: Path, run: str = "tuned", split: str = "val", out: Path | None = None, **changes: object) -> dict:
    given = {"task.folder": str(folder / "refcoco+")} | {f"task.{name}": value for name, value in changes.items()}
    recipe = refcoco_recipe(folder)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, root=""))
    return evaluate(recipe, [f"{folder}/storage/runs/{run}"], split, given, out and str(out), ALONE)


def test_a_split_is_evaluated_whole_and_in_its_order(refcoco, tmp_path, capsys):
    summary = evaluated(refcoco, out=tmp_path / "out")
    rows = rows_in(tmp_path / "out")
    assert [row["sentence_id"] for row in rows] == [10 * i + k for i in range(0, 12, 2) for k in range(2)]
    assert summary["examples"] == {"all": 12, "predicted": 12, "unreadable": 0, "skipped": 0, "invalid": 0}
    assert json.loads(json.dumps(summary)) == json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert summary["metrics"] == RefCOCO.metrics(None, rows)
    assert (summary["trained_on"], summary["trained_on_this_split"]) == (["train"], False)
    assert {*contents(tmp_path / "out")} == FILES | {*summary["submission"]}
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"evaluated val: {tmp_path / 'out'}"
    assert evaluated(refcoco, "memory", out=tmp_path / "memory")["trained_on_this_split"]
    with pytest.raises(ValueError, match=r"--task.validate_on=val is also in task.train_on=val,train"):
        check_complete(refcoco_recipe(refcoco, train_on=("val", "train"), validate_on="val"))


def test_an_evaluation_lies_beside_its_run_and_is_repeatable_to_the_byte(copy, capsys):
    run = copy / "storage/runs/tuned"
    shutil.copytree(run / "step-0000002", run / "step-0000001")
    summary, folder = evaluated(copy), run / "evaluations/val-step-0000002"
    before = contents(folder)
    shutil.rmtree(folder)
    evaluated(copy, "tuned/step-0000002")
    assert contents(folder) == before, "the newest is that one"
    # What is finished is left as it is, is found, and its model is not read.
    (run / "step-0000002/model.safetensors").write_bytes(b"torn")
    capsys.readouterr()
    assert evaluated(copy) == json.loads(json.dumps(summary))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"evaluated already, with the same settings: {folder};")
    assert last == f"evaluated val: {folder}"
    assert contents(folder) == before
    recipe, given = refcoco_recipe(copy), {"task.folder": str(copy / "refcoco+")}
    found = find_evaluation(recipe, str(run), "val", given | {"data.root": f"{copy}/storage"})
    assert found == json.loads(json.dumps(summary))
    for path, split, changes in (
        (str(run), "testA", given),
        (str(run), "val", given | {"task.iou": "plain"}),
        (f"{copy}/storage/runs/nobody", "val", given),
    ):
        assert find_evaluation(recipe, path, split, changes) is None
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="model.safetensors is damaged: its sha256 is"):
        evaluated(copy)


def test_an_evaluation_is_not_overwritten_by_another_and_metrics_json_is_written_last(refcoco, tmp_path):
    out = tmp_path / "out"
    (out / "index.html").mkdir(parents=True)  # where it cannot be written
    with pytest.raises(StorageUnreachable, match="index.html"):
        evaluated(refcoco, out=out)
    assert (out / "predictions.parquet").exists()
    assert not (out / "metrics.json").exists()
    (out / "index.html").rmdir()
    evaluated(refcoco, out=out)
    before = contents(out)
    with pytest.raises(ValueError, match=r"out/metrics.json is .* with split=val, but this one has train;"):
        evaluated(refcoco, "tuned", "train", out)
    with pytest.raises(ValueError, match=r"with overrides=\[.*\], but this one has \[.*'--task.iou=plain'\]"):
        evaluated(refcoco, out=out, iou="plain")
    assert contents(out) == before
    (out / "metrics.json").write_text("{}")
    with pytest.raises(ValueError, match=r"out/metrics.json is from an evaluation with recipe=None"):
        evaluated(refcoco, out=out)


def test_predictions_with_wrong_columns_are_named(refcoco, tmp_path, monkeypatch):
    predictions = RefCOCO.predictions
    wrong = {"own": [1]}, {"own": "x"}
    monkeypatch.setattr(
        RefCOCO, "predictions", lambda *given: [row | wrong[row["ref_id"] > 0] for row in predictions(*given)]
    )
    with pytest.raises(ValueError, match=r"column own of .* RefCOCO is missing or mixes types"):
        evaluated(refcoco, out=tmp_path / "out")


def test_the_page_is_escaped_and_draws_the_worst_and_the_best(copy, tmp_path):
    refs = (copy / "refcoco+" / "refs(unc).p").read_bytes()
    (copy / "refcoco+" / "refs(unc).p").write_bytes(refs.replace(b"Vthe left one", b"V<b>left</b> &"))
    regions = copy / "storage" / "refcoco+" / "regions"
    shutil.copytree(regions / DETECTOR, regions / "00000000dead")
    summary = evaluated(copy, out=tmp_path / "out")
    assert summary["data"]["stage"] == f"regions/{DETECTOR}", "of several detectors, that of the training"
    page, rows = (tmp_path / "out" / "index.html").read_text(), rows_in(tmp_path / "out")
    assert rows[0]["question"] == "<b>left</b> &"
    assert "<b>left" not in page
    assert page.count(html.escape("<b>left</b> &")) == 12
    assert not re.search(r'(src|href)="(?!data:)[^"]*[/:]', page), "nothing is loaded from elsewhere"
    shown = [float(score) for score in re.findall(r">[✓✗] score ([\d.]+)<", page)]
    assert max(shown[:6]) <= min(shown[6:]), "the worst, then the best"


def test_the_worst_are_the_most_probable_of_the_wrong():
    scores = (0.3, 0.5), (None, 0.9), (1, 0.5), (0, 0.5), (0, 0.8), (1, 0.9)
    rows = [{"score": score, "probability": probability} for score, probability in scores]
    one = SplitPredictions(None, None, None, None, {}, None, [*range(len(rows))], rows, [], [])
    assert worst_and_best([one], count=3) == ([(0, 4), (0, 3), (0, 0)], [(0, 5), (0, 2)])


def test_unreadable_and_invalid_examples_are_counted_and_named(copy, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.rmtree(copy / "storage" / "refcoco+")
    some = [torn(sample) if i in (4, 7) else sample for i, sample in enumerate(SAMPLES)]
    commit_samples(copy / "storage", "refcoco+", some)
    change_refs(copy / "refcoco+", lambda refs: refs[0]["sentences"][0].update(sent="the " * 50))
    summary = evaluated(copy, out=out, expression_length=40)
    assert summary["examples"] == {"all": 12, "predicted": 10, "unreadable": 2, "skipped": 0, "invalid": 1}
    assert [row["sentence_id"] for row in rows_in(out)] == [10 * i + k for i in (0, 2, 6, 8, 10) for k in (0, 1)]
    *lost, long = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    assert [(line["key"], line["predicted"]) for line in lost] == [(SAMPLES[4].key, False)] * 2
    assert (long["predicted"], long["key"]) == (True, None)
    assert "tokens, more than task.expression_length = 40" in long["reason"]
    printed, page = capsys.readouterr().out, (out / "index.html").read_text()
    assert "2 of 12 examples could not be read: the metrics are over the others" in printed
    warning = "1 of 12 examples are invalid, but included in the metrics, see problems.jsonl"
    assert warning in printed
    assert warning in page
    shutil.rmtree(copy / "storage" / "refcoco+")
    commit_samples(copy / "storage", "refcoco+", [torn(sample) for sample in SAMPLES])
    with pytest.raises(ValueError, match=r"none of the 12 examples can be read; the last because .* cannot be decoded"):
        evaluated(copy, out=tmp_path / "none")


def test_a_pretraining_is_evaluated_on_a_dataset_and_on_shuffled_images(tmp_path):
    root = tiny_root(tmp_path)
    recipe = tiny_recipe(root, run_name="pretrained", steps=1, save_every=1)
    trained = train(recipe, ALONE)
    summary = evaluate(recipe, [f"{root}/runs/pretrained"], "held-out", {}, None, ALONE)
    assert summary["metrics"] == pytest.approx(trained), "as its validation on the same samples"
    assert "words_accuracy_shuffled" in summary["metrics"]
    assert not summary["trained_on_this_split"]
    own = evaluate(recipe, [f"{root}/runs/pretrained"], "captions", {}, None, ALONE)
    named = "WARNING: the model was trained on this split (captions)"
    assert warnings(own)[0] == named
    (folder,) = (root / "runs/pretrained/evaluations").glob("captions-*")
    assert named in (folder / "index.html").read_text()


@pytest.mark.slow
def test_two_processes_with_live_norms_validate_what_they_save(tmp_path):
    root = tiny_root(tmp_path)
    live = dataclasses.replace(TINY_MODEL.regions.resnet, norm="batch")
    regions = dataclasses.replace(TINY_MODEL.regions, resnet=live)
    changes = {"model": dataclasses.replace(TINY_MODEL, dropout=0.0, regions=regions), "steps": 4, "save_every": 4}
    result = torchrun(root, "live", 2, **changes)
    assert result.returncode == 0, result.stderr[-3000:]
    evaluate(tiny_recipe(root, **changes), [f"{root}/runs/live"], "held-out", {}, None, ALONE)
    (folder,) = (root / "runs/live/evaluations").iterdir()
    evaluated = {row["key"]: row["probability"] for row in rows_in(folder)}
    lines = (root / "runs/live/predictions.jsonl").read_text().splitlines()
    validated = {row["key"]: row["probability"] for row in map(json.loads, lines)}
    assert validated.keys() == evaluated.keys()
    assert validated == pytest.approx(evaluated, abs=1e-5), "the second process had its own statistics"


@pytest.mark.slow
def test_two_processes_write_what_one_writes_to_the_byte(refcoco, tmp_path):
    given = as_overrides(refcoco_recipe(refcoco), RECIPES["finetune_refcoco"]())
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    for processes, done in ((1, 0), (2, 0), (2, 1)):
        command = [sys.executable, "-m", *(launch if processes == 2 else []), "vlbert.evaluation.evaluate"]
        ended = subprocess.run(
            [*command, "finetune_refcoco", f"{refcoco}/storage/runs/tuned", "val", *given]
            + ["--out", str(tmp_path / str(processes))],
            cwd=PROJECT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("evaluated val") == 1, "one rank prints"
        assert ended.stdout.count("evaluated already") == done
    assert contents(tmp_path / "2") == contents(tmp_path / "1")


FRESH = {"vocabulary": None, "steps": 1, "save_every": 1, "random_init": True}


def vcr_recipe(folder: Path, subtask: str) -> Recipe:
    settings = VCRSettings(str(folder / "vcr"), names="class", mask_size=2, max_tokens=40, subtask=subtask)
    data = DataConfig(root=str(folder / "storage"), datasets={"vcr": None}, held_out=None, batch=4, workers=0)
    return tiny_recipe(folder / "storage", run_name=subtask, task=settings, data=data, vocabulary_size=90, **FRESH)


def test_two_runs_are_joined_each_with_the_settings_of_its_training(refcoco, tmp_path):
    vcr, samples = tmp_path, [tiny_sample(i) for i in range(6)]
    commit_samples(vcr / "storage", "vcr", samples)
    write_vcr(vcr / "vcr", samples)
    lines = (vcr / "vcr" / "train.jsonl").read_text()
    (vcr / "vcr" / "val.jsonl").write_text(lines)
    (vcr / "vcr" / "test.jsonl").write_text(re.sub(r', "(answer|rationale)_label": \d', "", lines))
    paths = [f"{vcr}/storage/runs/{subtask}" for subtask in ("answer", "rationale")]
    for subtask in ("answer", "rationale"):
        train(vcr_recipe(vcr, subtask), ALONE)
    summary = evaluate(vcr_recipe(vcr, "answer"), paths, "val", {}, None, ALONE)
    assert {"answer_accuracy", "rationale_accuracy", "joint_accuracy"} <= summary["metrics"].keys()
    assert [settings["subtask"] for settings in summary["settings"]] == ["answer", "rationale"]
    folder = vcr / "storage/runs/answer/evaluations/val-step-0000001-with-rationale-step-0000001"
    subtasks = [row["subtask"] for row in rows_in(folder)]
    assert subtasks == ["answer"] * 5 + ["rationale"] * 5
    assert [line[:20] for line in warnings(summary)] == ["no submission file: "]
    test = evaluate(vcr_recipe(vcr, "answer"), paths, "test", {}, None, ALONE)  # without labels: for every answer
    assert test["examples"] == {"all": 25, "predicted": 25, "unreadable": 0, "skipped": 0, "invalid": 0}
    assert test["submission"] == ["vcr_submission.csv"]
    folder = folder.with_name(folder.name.replace("val", "test"))
    assert len((folder / "vcr_submission.csv").read_text().splitlines()) == 6
    assert warnings(test) == []
    # A task without such runs, too many of them, and twice the same.
    answers = paths[0]
    for recipe, names, named in (
        (refcoco_recipe(refcoco), [f"{refcoco}/storage/runs/tuned"] * 2, "names 2 checkpoints; .* takes at most 1"),
        (vcr_recipe(vcr, "answer"), [answers] * 3, "names 3 checkpoints; .* takes at most 2"),
        (vcr_recipe(vcr, "answer"), [answers] * 2, "have the same settings; give one of them, or"),
    ):
        with pytest.raises(ValueError, match=named):
            evaluate(recipe, names, "val", {}, None, ALONE)


def test_a_task_model_is_that_of_its_checkpoint(refcoco, tmp_path):
    checkpoint = open_checkpoint(f"{refcoco}/storage/runs/memory")
    model, recipe = load_task_model(checkpoint)
    assert (recipe.run, recipe.task.train_on, recipe.data.held_out) == ("memory", ("val",), None)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in checkpoint.model.items())
    assert model.task.vocabulary.tokens == checkpoint.vocabulary.tokens
    _, recipe = load_task_model(checkpoint, {"task.iou": "plain", "data.batch": 2}, refcoco_recipe(refcoco))
    assert (recipe.task.train_on, recipe.task.iou, recipe.data.batch) == (("val",), "plain", 2)
    # A converted model has the settings of its task, and no recipe.
    folder = shutil.copytree(refcoco / "storage/runs/tuned/step-0000002", tmp_path / "converted")
    config = json.loads((folder / "config.json").read_text())
    config["settings"] = config.pop("recipe")["task"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "state.json").unlink()
    model, recipe = load_task_model(open_checkpoint(str(folder)))
    expected = refcoco_recipe(refcoco)
    assert (recipe.name, recipe.task, recipe.model) == ("converted", expected.task, expected.model)
    assert isinstance(model.task, RefCOCO)


def test_a_model_answers_from_the_list_of_its_training_and_goes_on_only_with_it(tmp_path):
    listed = ["yes", "no", "left", "right", "nobody knows", "on the left"]
    settings = VQASettings(str(tmp_path / "vqa"), answers=len(listed), question_length=40)
    data = DataConfig(root=str(tmp_path / "storage"), datasets={"vqa": None}, held_out=None, batch=4, workers=0)
    recipe = tiny_recipe(tmp_path, run_name="tuned", task=settings, data=data, vocabulary_size=60, **FRESH)
    images = []
    for split in ("train2014", "val2014"):
        write_vqa(tmp_path / "vqa", split, ANNOTATORS)
        images += coco([tiny_sample(i) for i in range(4)], split)
    commit_samples(tmp_path / "storage", "vqa", images)
    answers, start = tmp_path / "vqa" / "answers_vqa.txt", f"{tmp_path}/storage/runs/tuned/step-0000001"
    answers.write_text("\n".join(listed))
    train(recipe, ALONE)

    def predictions(out: Path) -> list[tuple]:
        on = dataclasses.replace(recipe, data=dataclasses.replace(data, held_out=("vqa",)))
        evaluate(on, [start], "val2014", {}, str(out), ALONE)
        return [(row["question_id"], row["answer"], row["probability"], row["score"]) for row in rows_in(out)]

    before = predictions(tmp_path / "before")
    answers.write_text("\n".join([*listed[:2], *listed[:1:-1]]))
    assert predictions(tmp_path / "reversed") == before
    started = dataclasses.replace(recipe, run_name="more", init_from=start, random_init=False)
    other = f"answers of {tmp_path}/vqa differ from {start}/task.json: number 2 is 'on the left'"
    changed = f"{answers} has changed since {start} was trained"
    for one, named in ((dataclasses.replace(recipe, steps=2), changed), (started, other)):
        with pytest.raises(ValueError, match=re.escape(named)):
            train(one, ALONE)
    answers.unlink()
    assert predictions(tmp_path / "none") == before
    answers.write_text("\n".join(listed))
    assert train(started, ALONE) is not None


@pytest.fixture(scope="module")
def places(refcoco, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by the names of the table below."""
    folder, step = tmp_path_factory.mktemp("places"), refcoco / "storage/runs/tuned/step-0000002"
    for name in ("plain", "wordless"):
        shutil.copytree(step, folder / name)
    (folder / "wordless" / "vocab.txt").unlink()
    reseal(folder / "wordless")
    VLBertModel.from_pretrained(step).save_pretrained(folder / "headless")
    (folder / "file").touch()
    named = {name.upper(): folder / name for name in ("plain", "wordless", "headless", "file", "out")}
    return named | {"ROOT": refcoco / "storage", "RUN": refcoco / "storage/runs/tuned"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("REFCOCO ROOT/runs/nothing val", "/runs/nothing has no complete checkpoint; give another run"),
        ("REFCOCO RUN testC", "has no split testC"),
        ("REFCOCO RUN val --data.detector=00000000f00d", "no detector 00000000f00d, only 00000000beef"),
        ("finetune_vqa RUN val", "was trained for another task than recipe finetune_vqa_base"),
        ("REFCOCO RUN val --out FILE", "cannot write to the folder"),
        ("REFCOCO PLAIN val", "plain belongs to no run"),
        ("REFCOCO HEADLESS val --out OUT", "holds a VL-BERT without the head of a task"),
        ("REFCOCO WORDLESS val --out OUT", "has no vocabulary; give the one it was trained with: --vocabulary=FILE"),
    ],
)
def test_a_wrong_command_line_is_one_line(refcoco, places, arguments, named):
    """REFCOCO: the recipe of the run, as overrides of another; ROOT, RUN ...: see `places`."""
    given = [re.sub("^[A-Z]+", lambda match: str(places.get(match[0], match[0])), one) for one in arguments.split()]
    if given[0] == "REFCOCO":
        tiny = as_overrides(refcoco_recipe(refcoco), RECIPES["finetune_refcoco"]())
        given = ["finetune_refcoco", *given[1:3], *tiny, *given[3:]]
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert named in str(ended.value.code)
    assert "\n" not in str(ended.value.code)
