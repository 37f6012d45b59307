"""`make demo`: its root, its parameters, its gates. The pipeline itself: test_flows."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
from demo_results import pipeline
from places import PROJECT

import demo.__main__ as demo
import demo.compare as demo_compare
from demo.data import DemoDataSettings, draw_demo_data
from demo.deployments import SHIPPED_DETECTOR, flow_parameters
from demo.report import evaluate_detector
from demo.tasks import DEMO_TASKS
from detectors.weights.files import read_config
from flows.settings import quiet_prefect
from vlbert.recipes.demo import DEMO

TINY = DemoDataSettings(
    train_scenes=2, held_out_scenes=1, broken_rows=0, text_lines=1, task_train=1, task_val=0, task_test=0
)
GOOD = {"refcoco": (0.5, 0.3, 0.25), "vqa": (0.55, 0.35, 0.2)}


@pytest.mark.parametrize(
    ("map50", "groundings", "tasks", "named"),
    [
        (0.7, [0.12], {"refcoco": (0.5, 0.39, 0.25)}, []),
        (0.69, [0.12], {}, ["mAP@0.5 is 0.690, under 0.7"]),
        (0.7, [0.3], {"vqa": (0.5, 0.41, 0.2)}, ["VQA with pre-training is 0.500, not 0.1 over 0.410 without it"]),
        (0.7, [0.3], {"vcr-rationales": (0.28, 0.2, 0.25)}, ["VCR, QA→R with pre-training is 0.280, not 0.05 over"]),
        (0.1, [0.0], {"refcoco": (0.1, 0.4, 0.25)}, ["mAP", "grounding", "over chance", "over 0.400 without it"]),
        (0.8, [0.02, 0.12, 0.22], {}, []),  # of several seeds their means
        (0.8, [0.02, 0.12, 0.22, 0.08], {}, ["grounding is 0.110"]),
    ],
)
def test_the_gates_name_what_was_not_learned(map50: float, groundings: list, tasks: dict, named: list[str]):
    pipelines = [pipeline(grounding, GOOD | tasks, "-seed7") for grounding in groundings]
    messages = demo.check_gates(pipelines, map50, 0.7)
    assert len(messages) == len(named)
    for message, words in zip(messages, named, strict=True):
        assert message.startswith("GATE FAILED: ")
        assert words in message


def test_the_gates_of_a_comparison_name_what_a_model_did_not_learn():
    gaps = {"monitored_accuracy_grounding_gap": {"vilbert": {"mean": 0.049}}}
    task = {"title": "VQA", "means": {"vilbert": {"mean": 0.16}}, "chance": 0.135, "problem": None}
    summary = {"pretraining": gaps, "tasks": {"vqa": task}, "failed": [{"run": "compare-x", "reason": "no disk"}]}
    failed, grounding, accuracy = demo_compare.check_gates(summary)
    assert "compare-x failed: no disk" in failed
    assert "vilbert: the grounding gap is 0.049" in grounding
    assert "vilbert: VQA is 0.160, not 0.03 over chance (0.135)" in accuracy


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


def test_a_seed_and_a_start_change_nothing_but_training_and_names(tmp_path: Path):
    demo_data, mine = draw_demo_data(tmp_path / "data", TINY, 9001), tmp_path / "mine.safetensors"
    own, other = (
        flow_parameters(tmp_path, demo_data, seed, 2, mine, f"-seed{seed}", tuple(DEMO_TASKS)) for seed in (0, 1)
    )
    assert all(dataset["detector"]["weights"] == str(mine) for dataset in own["datasets"])
    trainings = [own["pretraining"], *own["finetunings"]]
    assert all(f"--model.regions.weights={mine}" in training["overrides"] for training in trainings)
    assert len({training["run"] for training in trainings}) == 1 + 2 * len(DEMO_TASKS)
    changed = json.dumps(own).replace("-seed0", "-seed1").replace("--data.seed=0", "--data.seed=1")
    assert json.loads(changed) == other
    for with_it, without in zip(own["finetunings"][::2], own["finetunings"][1::2], strict=True):
        assert (with_it["checkpoint"], without["checkpoint"]) == ("latest", "none")
        same = {"run": "", "checkpoint": ""}
        assert with_it | same == without | same
