"""Comparisons: intervals by hand, what is trained and what is not repeated, what fails, and the page."""

import dataclasses
import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import compared
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from compared import FINETUNING, TASKS, compared_root
from guides import blocks
from operated import running, wait_until
from places import PROJECT
from scipy.stats import ttest_1samp, ttest_ind

from demo.data import VISUAL_WORDS
from storage.object_store import ObjectStore, open_store
from storage.runs import json_with_digest
from training.program import STOPPED
from vlbert.comparison.cells import Cell, cells_of
from vlbert.comparison.compare import compare, device_of, find_done, main
from vlbert.comparison.intervals import correct, detectable, interval
from vlbert.comparison.page import page
from vlbert.comparison.plans import DEMO_WORDS, PLANS, ComparedTask, Variant
from vlbert.comparison.summary import read_scores, summarise

NUMBERS = "comparisons/tiny/numbers.json"
TUNED = "compare-tiny-words-refcoco-seed0"


# --- intervals --------------------------------------------------------------------------------------------------------


def test_an_interval_is_welchs_over_the_seeds_with_the_variance_over_the_examples():
    first, second = np.array([[0.7], [0.6], [0.8]]), np.array([[0.5], [0.55]])
    found, welch = interval(first, second), ttest_ind(first[:, 0], second[:, 0], equal_var=False)
    low, high = welch.confidence_interval(0.95)
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((0.7 - 0.525, low, high))
    assert (found["p"], found["freedom"]) == pytest.approx((welch.pvalue, welch.df))
    student = ttest_1samp(first[:, 0], 0)
    assert interval(first)["p"] == pytest.approx(student.pvalue)
    scores = np.array([[0.0, 0.0, 0.0, 1.0]] * 2) + [
        [0.1],
        [-0.1],
    ]  # variances: 0.02 / 2 over seeds, 0.25 / 4 of examples
    found = interval(scores)
    assert (found["mean"], found["error"]) == pytest.approx((0.25, np.sqrt(0.01 + 0.0625)))
    assert found["freedom"] == pytest.approx(0.0725**2 / (0.01**2 / 1 + 0.0625**2 / 3))
    same = interval(scores, scores[::-1])
    assert (same["mean"], same["p"]) == (0, 1), "what is as hard for both models is no difference"
    alone, unknown = interval(scores, scores[:1] + 1), dict.fromkeys(("low", "high", "p", "error", "freedom"))
    assert alone == {"mean": pytest.approx(-1.1), **unknown}, "one seed tells nothing but the mean"
    assert interval(scores[:1]) == {"mean": pytest.approx(0.35), **unknown}


def test_p_values_are_corrected_in_turn_and_never_cross():
    assert correct([0.02, 0.001, 0.9, 0.015]) == pytest.approx([0.045, 0.004, 0.9, 0.045])
    assert correct([0.6, 0.7]) == [1, 1]
    assert correct([]) == []


def test_of_equal_models_one_plan_in_twenty_has_a_pair_that_differs_and_what_is_detectable_is_found():
    """Plans of ten pairs of models whose trainings scatter by 2 points between seeds, on 500 examples."""
    rng, wrong, found, least = np.random.default_rng(3), 0, [], []

    def scores(share: float, seeds: int = 5) -> np.ndarray:
        return (rng.random((seeds, 500)) < share + 0.02 * rng.normal(size=(seeds, 1))).astype(float)

    for _ in range(200):
        pairs = [interval(scores(0.6), scores(0.6)) for _ in range(10)]
        wrong += min(correct([pair["p"] for pair in pairs])) < 0.05
        least.append(detectable(pairs[0]["error"], pairs[0]["freedom"], 1))
    assert wrong <= 18  # of 200 such plans, 10 are expected; one test in a hundred has more than 18
    for _ in range(200):
        found.append(interval(scores(0.6 + np.mean(least)), scores(0.6))["p"] < 0.05)
    assert 0.7 < np.mean(found) < 0.95


# --- a whole comparison -----------------------------------------------------------------------------------------------


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root on which the tiny plan is done."""
    root = compared_root(tmp_path_factory.mktemp("compare"))
    assert compare(compared.plan(), str(root), report=quiet) is not None
    return root


def test_every_variant_task_and_seed_is_a_run_and_its_metric_stands_in_the_numbers(root):
    summary = json.loads((root / NUMBERS).read_text())
    task = summary["tasks"]["refcoco"]
    for variant, found in task["means"].items():
        of_seeds = []
        for seed in (0, 1):
            run = root / f"runs/compare-tiny-{variant}-refcoco-seed{seed}"
            metrics = json.loads((run / "evaluations/val-step-0000002/metrics.json").read_text())["metrics"]
            of_seeds.append(metrics["accuracy_published"])
            config = json.loads((run / "step-0000002/config.json").read_text())["recipe"]
            assert config["data"]["seed"] == seed
            start = config["init_from"] or ""
            assert re.sub(".*tiny-", "", start) == (variant == "words") * f"words-pretraining-seed{seed}/step-0000002"
        assert [*found["seeds"].values()] == pytest.approx(of_seeds)
        assert found["mean"] == pytest.approx(np.mean(of_seeds))
        assert found["low"] <= found["mean"] <= found["high"]
        assert task["chance"] == pytest.approx(metrics["chance"])
    (pair,) = task["pairs"]
    means = task["means"]
    assert pair["mean"] == pytest.approx(means["without"]["mean"] - means["words"]["mean"])
    assert pair["differs"] == (pair["p"] < 0.05)
    assert summary["pretraining"]["words_accuracy"]["words"]["seeds"].keys() == {"0", "1"}
    assert summary["failed"] == []


def test_each_process_has_one_of_the_gpus_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [device_of(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["2", "5", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of(0) == {}


def test_what_is_done_is_not_repeated_and_stands_on_the_page(root, monkeypatch):
    def states() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in root.glob("runs/**/state.json")}

    before, numbers, lines = states(), json.loads((root / NUMBERS).read_text()), []
    monkeypatch.chdir(root.parent)
    summary = compare(compared.plan(), f"{root.name}/../{root.name}/", report=lines.append)
    assert json.loads(json.dumps(summary)) == numbers, "whatever the spelling of the root"
    assert lines == ["tiny: 6 training runs, 6 of them complete"]
    assert states() == before
    page = (root / "comparisons/tiny/index.html").read_text()
    found = summary["tasks"]["refcoco"]["means"]["words"]
    mean, low, high = (f"{100 * found[name]:.1f}" for name in ("mean", "low", "high"))
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert f"{mean} {low} to {high} paper 69.1" in text
    assert ("not shown" in text) != summary["tasks"]["refcoco"]["pairs"][0]["differs"]
    assert "://" not in page  # self-contained


@pytest.mark.slow
def test_a_fine_tuning_from_weights_that_are_gone_is_named_and_trained_again_once_it_is_deleted(root):
    lines, (state,) = [], (root / "runs" / TUNED).glob("*/state.json")
    values = json.loads(state.read_text())
    noted = values["init_from"]["model"]
    state.write_bytes(json_with_digest(values | {"init_from": values["init_from"] | {"model": "0" * 64}}))
    found = compare(compared.plan(), str(root), seeds=(0,), report=lines.append)
    assert lines[0] == "tiny: 3 training runs, 2 of them complete"
    ((name, reason),) = [(one["run"], one["reason"]) for one in found["failed"]]
    assert name == TUNED
    assert re.search(f"trained from weights of .*words-pretraining-seed0 .*delete .*runs/{TUNED}", reason)
    shutil.rmtree(root / "runs" / TUNED)
    assert compare(compared.plan(), str(root), seeds=(0,), report=lines.append)["failed"] == []
    assert json.loads(state.read_text())["init_from"]["model"] == noted
    pretraining = root / "runs/compare-tiny-words-pretraining-seed0"
    pretraining.rename(root / "away")  # without it, its fine-tuning is not complete
    cells = cells_of(compared.plan(), str(root), [])
    done = find_done(cells, str(root))
    assert {name for name in done if name.endswith("seed0")} == {"compare-tiny-without-refcoco-seed0"}
    (root / "away").rename(pretraining)
    compare(compared.plan(), str(root), report=quiet)


# --- stopped, and failed ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_that_fails_is_named_and_the_others_go_on(root):
    with pytest.raises(SystemExit, match="6 training runs failed"):
        main(["compared:broken", f"--data.root={root}", "--fields", "without:steps=3", "--seeds", "0", "1"])
    summary = json.loads((root / NUMBERS).read_text())
    assert [(one["run"].removeprefix("compare-tiny-"), one["reason"].split()[0]) for one in summary["failed"]] == [
        failed
        for seed in (0, 1)
        for failed in (
            (f"broken-pretraining-seed{seed}", "monitored_words:"),
            (f"without-refcoco-seed{seed}", f"{root}/runs/compare-tiny-without-refcoco-seed{seed}"),
            (f"broken-refcoco-seed{seed}", "not"),
        )
    ]
    assert "was trained with steps=2, but the recipe has 3" in summary["failed"][1]["reason"]
    assert summary["tasks"]["refcoco"]["means"].keys() == {"words"}
    page = (root / "comparisons/tiny/index.html").read_text()
    assert all(text in page for text in ("6 training runs failed", "zebra", ">failed<"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_ended_leaves_no_process_and_what_it_trained(number, tmp_path):
    root, lines = compared_root(tmp_path), tmp_path / "lines"
    variables = {"PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests'}", "OF_TEST": str(root)}  # which its children have, too

    def processes() -> list[int]:
        return [pid for pid, _, found in running() if f"OF_TEST={root}" in found]

    command = [sys.executable, "-m", "vlbert", "compare", "compared:plan", f"--data.root={root}"]
    with open(lines, "w") as out:
        options = {"stdout": out, "stderr": out, "env": os.environ | variables, "cwd": PROJECT}
        process = subprocess.Popen([*command, "--fields", "steps=100000"], **options)
    wait_until(lambda: process.poll() or len([*root.glob("runs/*/metrics.jsonl")]) == 2, 100, lines.read_text)
    assert len(processes()) > 2
    process.send_signal(number)
    assert process.wait(60) == (STOPPED if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: not processes(), 30, lambda: str(processes()))
    assert len([*root.glob("runs/*/step-*/state.json")]) >= 2  # each has saved


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seeds": ()}, "plan tiny: give at least one variant, task and seed"),
        ({"name": "a/b"}, "'a/b' of plan a/b must be unique"),
        ({"tasks": {"vqa": TASKS["refcoco"]}}, "variant without of plan tiny has a fine-tuning for refcoco"),
        ({"variants": {"refcoco": Variant("x", None, FINETUNING)}}, "'refcoco' of plan tiny must be unique"),
    ],
)
def test_plans_that_do_not_fit_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(compared.plan(), **changes)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["compared:pretraining"], "compared:pretraining returns Recipe, not a Plan"),
        (["compared:plan", "--fields", "vcr:steps=1"], r"vcr:steps=1: plan tiny has no vcr; .*refcoco.*words"),
        (["compared:plan", "--fields", "steps='1"], "steps='1: No closing quotation"),
        (["compared:plan", "--fields", "words:run_name=mine"], "tiny-words-.*: --run_name: a comparison sets"),
        (["compared:plan", "--fields", "words:no.such=1"], "tiny-words-.*: .*Unrecognized options: --no.such"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(arguments, named, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, f"--data.root={tmp_path}/root"])
    assert re.search(named, str(ended.value.code))
    assert not (tmp_path / "root").exists()


def test_a_field_of_several_values_and_a_flag_reach_their_scope_alone(tmp_path):
    given = ["refcoco:task.train_on=train testA", "words:compile", "refcoco:task.folder='my refs'"]
    cells = cells_of(compared.plan(), str(tmp_path), given)
    assert {cell.recipe.task.train_on for cell in cells if cell.task} == {("train", "testA")}
    assert {cell.recipe.task.folder for cell in cells if cell.task} == {"my refs"}
    assert {cell.variant for cell in cells if cell.recipe.compile} == {"words"}


@pytest.fixture
def evaluation(root: Path) -> Iterator[tuple[ObjectStore, Cell, str]]:
    """One of the tiny plan, and its folder: what a test changes in it is put back."""
    store, cells = open_store(str(root)), cells_of(compared.plan(), str(root), [])
    cell = next(one for one in cells if one.task and one.variant == "without")
    names = [f"{cell.evaluation(store)}/{name}" for name in ("metrics.json", "predictions.parquet")]
    before = {name: store.get(name) for name in names}
    yield store, cell, cell.evaluation(store)
    for name, data in before.items():
        store.put(name, data)


def parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def test_a_metric_is_the_mean_of_a_column_or_the_share_of_ranks_that_are_small_enough(evaluation):
    store, cell, folder = evaluation
    for metric, named in (
        ("accuracy", "only accuracy_published, .*chance"),
        ("chance", "chance is .* of column score"),
    ):
        with pytest.raises(ValueError, match=f"metrics.json: .*{named}"):
            read_scores(store, cell, dataclasses.replace(TASKS["refcoco"], metric=metric))
    table = {"key": ["a", "b", "c"], "question": ["", "", ""], "image_ranks": [[1, 3], [2, 4], [1, 1]]}
    store.put(f"{folder}/predictions.parquet", parquet(pa.table(table)))
    metrics = json.loads(store.get(f"{folder}/metrics.json")) | {"metrics": {"image_r1": 1 / 2, "chance": None}}
    store.put(f"{folder}/metrics.json", json.dumps(metrics | {"random_init_detector": True}).encode())
    task = ComparedTask("Retrieval", "val", "image_r1", "image_ranks", within=1)
    summary = summarise(dataclasses.replace(compared.plan(), tasks={"refcoco": task}), store, [cell], {})
    found = summary["tasks"]["refcoco"]
    assert (found["problem"], found["chance"]) == (None, None)
    mean = found["means"]["without"]
    assert (mean["mean"], mean["seeds"]["0"]) == pytest.approx((1 / 2, 1 / 2))
    assert page(summary).count(b"UNTRAINED detector") == 1, "the warnings of evaluations stand on the page"


def test_evaluations_of_other_examples_are_not_compared(root, evaluation):
    store, cell, folder = evaluation
    rows = pq.read_table(io.BytesIO(store.get(f"{folder}/predictions.parquet"))).to_pylist()
    store.put(f"{folder}/predictions.parquet", parquet(pa.Table.from_pylist(rows[::-1])))
    summary = summarise(compared.plan(), store, cells_of(compared.plan(), str(root), []), {})
    task = summary["tasks"]["refcoco"]
    assert cell.run in task["problem"]
    assert (task["means"], task["pairs"]) == ({}, [])
    assert summary["pretraining"]["words_accuracy"].keys() == {"words"}  # the rest stays
    assert f"RefCOCO+ has no numbers here: {task['problem']}" in html.unescape(page(summary).decode())


# --- the plans that are shipped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_a_shipped_plan_names_recipes_and_fields_that_fit_and_pre_trains_for_equal_steps(name, tmp_path):
    plan = dataclasses.replace(PLANS[name](), seeds=(0,))
    assert plan.name == name
    given = [] if name.endswith("_demo") else ["pretraining:data.text_corpus=text", "model.regions.weights=weights"]
    cells = cells_of(plan, str(tmp_path), given)
    pretrained = [one for one in plan.variants.values() if one.pretraining]
    assert len({cell.run for cell in cells}) == len(cells) == len(plan.variants) * len(plan.tasks) + len(pretrained)
    for task in (None, *plan.tasks):
        assert len({cell.recipe.steps for cell in cells if cell.task == task}) == 1
    assert len({cell.recipe.data.batch for cell in cells if cell.task is None}) == 1
    if name == "table4":  # what is not pre-trained starts from BERT
        assert all(bool(cell.recipe.bert) == (cell.needs is None) for cell in cells if cell.task == "vqa")


def test_the_plan_of_the_documentation_is_one_and_words_of_plans_are_those_that_only_an_image_of_the_demo_tells():
    (code,), names = blocks("results.md", "python"), {}
    exec(code, names)
    assert [one.pretraining is None for one in names["text_or_not"]().variants.values()] == [False, False, True]
    assert DEMO_WORDS == VISUAL_WORDS
