"""`make demo`: its root, its parameters, its gates. The pipeline itself: test_flows."""

import dataclasses
import json
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from demo_results import results
from places import PROJECT
from pydantic import TypeAdapter

import demo.__main__ as demo
import demo.compare as demo_compare
from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.deployments import SHIPPED_DETECTOR, comparison_parameters, flow_parameters
from demo.labels import folder_of, quick_label_curves
from demo.report import evaluate_detector
from demo.results import blind_scores, labels_saved, lower_end
from demo.sentences import _SIZE_WORDS
from detectors.weights.files import read_config
from flows.settings import FinetuneSettings, PretrainSettings, quiet_prefect
from vlbert.comparison.cells import cells_of
from vlbert.datasets import refcoco, vqa
from vlbert.recipes.demo import DEMO

TINY = DemoDataSettings(
    train_scenes=2, held_out_scenes=1, broken_rows=0, text_lines=1, task_train=1, task_val=0, task_test=0
)


@pytest.mark.parametrize(
    ("map50", "found", "named"),
    [
        (0.7, {}, []),
        (0.69, {}, ["mAP@0.5 is 0.690, under 0.7"]),
        (0.7, {"least_gap": 0.09}, ["the lower end of the grounding gap is 0.090, under 0.1"]),
        (0.7, {"leads": {"vqa": 0.02}}, ["VQA with pre-training: its lower end is 0.020 over blind, under 0.1"]),
        (
            0.7,
            {"leads": {"refcoco": 0.14}},
            ["RefCOCO+ with pre-training: its lower end is 0.140 over chance, under 0.2"],
        ),
        (0.1, {"least_gap": -0.1, "leads": {"vqa": 0.0, "refcoco": 0.0}}, ["mAP", "grounding", "RefCOCO+", "VQA"]),
    ],
)
def test_the_gates_name_what_was_not_learned(map50: float, found: dict, named: list[str]):
    messages = demo.check_gates(results(**found), map50, 0.7)
    assert len(messages) == len(named)
    for message, words in zip(messages, named, strict=True):
        assert message.startswith("GATE FAILED: ")
        assert words in message


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    settings = {"train_scenes": 2, "held_out_scenes": 1, "broken_rows": 0, "text_lines": 1, "task_train": 60}
    settings |= {"task_val": 0, "task_test": 240}
    return draw_demo_data(tmp_path_factory.mktemp("tasks"), DemoDataSettings(**settings))


def test_no_rule_that_is_blind_passes_the_gates(tasks: DemoData):
    """For VQA the commonest answer to a question's words; for RefCOCO+ a guess among the boxes of the right size."""
    questions = vqa.read_questions(tasks.root / folder_of("vqa_1000"), "eval2014")
    rows = [question.columns() | {"annotator_answers": list(question.answers)} for question in questions]
    by_type = blind_scores(tasks.root / folder_of("vqa_1000"), rows)
    assert 0.25 < by_type.mean() < 0.4
    learned, correct = defaultdict(Counter), 0.0
    for question in vqa.read_questions(tasks.vqa, "train2014"):
        learned[question.text][question.ground_truth] += 1
    for question in questions:
        prior = learned[question.text].most_common(1)
        correct += vqa.accuracy(prior[0][0], question.answers) if prior else 0.0
    assert correct / len(questions) < by_type.mean() + demo.LEAST_LEAD["vqa"]

    coco = json.loads(tasks.refcoco_instances.read_text())
    of_image = defaultdict(list)
    for annotation in coco["annotations"]:
        of_image[annotation["image_id"]].append("big" in annotation["attributes"])
    guesses, chances = [], []
    expressions = refcoco.read_expressions(tasks.refcoco)
    for image, expression in refcoco.list_expressions(expressions, "testA", tasks.refcoco_refs):
        sizes, words = of_image[int(Path(image).stem.rpartition("_")[2])], expression.text.split()
        chances.append(1 / len(sizes))
        size = [size for size in (True, False) if {*words} & {*_SIZE_WORDS[size]}]
        guesses.append(1 / sizes.count(size[0]) if size else chances[-1])
    assert len(guesses) > 400
    lead = sum(guesses) / len(guesses) - sum(chances) / len(chances)
    assert 0 < lead < demo.LEAST_LEAD["refcoco"] - 0.05


def test_the_lower_end_is_over_items_with_one_seed_and_over_seeds_with_several():
    one = np.array([[0.0, 1.0] * 200])
    assert lower_end(one) == pytest.approx(0.5 - 1.96 * 0.5 / 20)
    assert lower_end(np.array([[0.2] * 400, [0.8] * 400])) < 0


@pytest.mark.parametrize(
    ("scores", "saved"),
    [
        ({"vqa_60": (0.5, 0.2), "vqa_240": (0.6, 0.49), "vqa_1000": (0.7, 0.8)}, (60, 240)),
        ({"vqa_60": (0.5, 0.2), "vqa_240": (0.6, 0.3), "vqa_1000": (0.7, 0.5)}, (60, 1000)),
        ({"vqa_60": (0.2, 0.3), "vqa_240": (0.3, 0.4), "vqa_1000": (0.9, 0.5)}, None),
    ],
)
def test_labels_are_saved_where_fewer_reach_what_more_reach_without(scores: dict, saved: tuple | None):
    assert labels_saved([column for column in results(scores).columns if column.task == "vqa"]) == saved


def test_the_gates_of_a_comparison_name_what_a_model_did_not_learn():
    gaps = {"monitored_accuracy_grounding_gap": {"vilbert": {"mean": 0.2, "seeds": {"0": 0.351, "1": 0.049}}}}
    task = {"title": "VQA", "means": {"vilbert": {"mean": 0.5, "low": 0.38}}, "chance": 0.135, "problem": None}
    summary = {"pretraining": gaps, "tasks": {"vqa": task}, "failed": [{"run": "compare-x", "reason": "no disk"}]}
    failed, grounding, accuracy = demo_compare.check_gates(summary)
    assert "compare-x failed: no disk" in failed
    assert "vilbert: the grounding gap of a seed is 0.049" in grounding
    assert "vilbert: VQA is 0.500, its lower end under 0.385" in accuracy


def test_what_stages_log_is_found_in_the_log_of_the_worker():
    from flows.artifacts import STAGE_LOG  # which imports prefect

    log = "12:00:01.123 | INFO    | Flow run 'collect captions' - Beginning flow run\n"
    log += f"12:00:02.456 | INFO    | prefect.flow_runs.{STAGE_LOG} - pretrain is complete: é\nTraceback\n"
    log += f"12:00:03.000 | WARNING | prefect.task_runs.{STAGE_LOG} - captions: 4 of 9 shards collected\n"
    assert demo.STAGE_LINE.findall(log) == ["pretrain is complete: é", "captions: 4 of 9 shards collected"]


def test_a_proxy_is_not_asked_for_prefects_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "example.org")
    variables = quiet_prefect(tmp_path)
    assert variables["no_proxy"] == variables["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("NO_PROXY", "*")
    assert quiet_prefect(tmp_path)["NO_PROXY"] == "*"


def test_make_clean_removes_what_a_demo_made_and_nothing_else(tmp_path: Path):
    mine, made = tmp_path / "my thesis", tmp_path / "my demo"
    mine.mkdir()
    (made / "data").mkdir(parents=True)
    (made / "data" / "demo.json").touch()
    for root, cleaned, left in ((mine, False, [made, mine]), (made, True, [mine]), (tmp_path / "no", True, [mine])):
        clean = subprocess.run(["make", "clean", f"ROOT={root}"], cwd=PROJECT, capture_output=True, check=False)
        assert (clean.returncode == 0, sorted(tmp_path.iterdir())) == (cleaned, left)


def test_the_shipped_detector_finds_objects_in_scenes_that_it_never_saw_and_the_models_start_from_it(tmp_path: Path):
    """Of other scenes than it was trained on; the whole measurement is a gate of `make demo`."""
    demo_data = draw_demo_data(tmp_path / "data", dataclasses.replace(TINY, seed=5, held_out_scenes=10), 9001)
    found = evaluate_detector(demo_data, SHIPPED_DETECTOR)
    assert found["metrics"]["map50"] > 0.8
    assert (found["scenes"], SHIPPED_DETECTOR.stat().st_size <= 1_000_000) == (10, True)
    detector, theirs = read_config(SHIPPED_DETECTOR), DEMO.regions
    assert dataclasses.replace(theirs.resnet, norm="frozen") == detector.resnet
    sizes = detector.short_side, detector.long_side, detector.pool_size
    assert (theirs.short_side, theirs.long_side, theirs.roi_size) == sizes


def test_the_pipeline_trains_runs_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So `compare` goes on from them: same names, and recipes that a run may go on with."""
    monkeypatch.chdir(tmp_path)
    root = Path("a root")  # of which the comparison makes an absolute one
    demo_data = draw_demo_data(root / "data", dataclasses.replace(TINY, task_train=24), 9001)
    parameters, comparison = flow_parameters(root, demo_data, 3, 2), comparison_parameters(root, demo_data, [3])
    text = root / "work" / "text" / parameters["pretraining"]["run"]
    text.mkdir(parents=True)
    plan = dataclasses.replace(quick_label_curves(), seeds=(3,))
    cells = {cell.run: cell.recipe for cell in cells_of(plan, str(root.absolute()), comparison["settings"]["fields"])}
    for training in (parameters["pretraining"], *parameters["finetunings"]):
        kind = PretrainSettings if training is parameters["pretraining"] else FinetuneSettings
        ours, theirs = TypeAdapter(kind).validate_python(training).resolved_recipe, cells[training["run"]]
        assert training.get("folder") in (None, getattr(theirs.task, "folder", None))
        assert (ours.steps, ours.data.seed, ours.validate_every) == (theirs.steps, 3, theirs.validate_every)
        assert (ours.model, ours.optimizer) == (theirs.model, theirs.optimizer)
    assert all(recipe.data.seed == 3 for recipe in cells.values())
