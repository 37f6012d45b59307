"""The program behind `make demo`: its root, its table, its Prefect server. The pipeline is in test_flows."""

import dataclasses
import json
import re
import socket
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from demo_results import pipeline
from places import PROJECT

import demo.__main__ as demo
from demo.data import DEFAULT_PORT, DemoDataSettings, draw_demo_data
from demo.evaluate_detector import evaluate_detector
from demo.tasks import DEMO_TASKS, OF_DEMO
from detectors.weights.files import load_resnet, read_config
from flows.settings import quiet_prefect
from storage.settings import override
from vlbert.initial_weights import check_complete
from vlbert.model.fast_rcnn import FastRCNN
from vlbert.recipes import DEMO, RECIPES

TINY = DemoDataSettings(train_scenes=2, held_out_scenes=1, broken_rows=0, text_lines=1, task_train=1, task_held_out=0)


GOOD = {"refcoco": (0.5, 0.3, 0.25), "vqa": (0.55, 0.35, 0.2)}


@pytest.mark.parametrize(
    ("map50", "grounding", "tasks", "failed"),
    [
        (0.7, 0.12, {"refcoco": (0.5, 0.39, 0.25)}, []),
        (0.69, 0.12, {}, ["mAP@0.5 is 0.690, under 0.7"]),
        (0.7, 0.11, {}, ["grounding is 0.110"]),
        (
            0.7,
            0.3,
            {"refcoco": (0.34, 0.2, 0.25)},
            ["RefCOCO+ with pre-training is 0.340, not 0.1 over chance (0.250)"],
        ),
        (0.7, 0.3, {"refcoco": (0.5, 0.41, 0.25)}, ["not 0.1 over 0.410 without it"]),
        (0.7, 0.3, {"vqa": (0.5, 0.41, 0.2)}, ["VQA with pre-training is 0.500, not 0.1 over 0.410 without it"]),
        (0.7, 0.3, {"vqa": (0.25, 0.1, 0.2)}, ["VQA with pre-training is 0.250, not 0.1 over chance (0.200)"]),
        (0.7, 0.3, {"vcr-answers": (0.5, 0.46, 0.25)}, ["VCR, Q→A with pre-training is 0.500, not 0.05 over 0.460"]),
        (
            0.7,
            0.3,
            {"vcr-rationales": (0.28, 0.2, 0.25)},
            ["VCR, QA→R with pre-training is 0.280, not 0.05 over chance"],
        ),
        (
            0.1,
            0.0,
            {"refcoco": (0.1, 0.4, 0.25)},
            ["mAP@0.5 is", "grounding is 0.000", "over chance", "over 0.400 without it"],
        ),
    ],
)
def test_the_gates_name_what_was_not_learned(
    map50: float, grounding: float, tasks: dict[str, tuple[float, float, float]], failed: list[str]
):
    messages = demo.gates([pipeline(grounding, GOOD | tasks, "-seed7")], map50, 0.7)
    assert len(messages) == len(failed)
    for message, part in zip(messages, failed, strict=True):
        assert message.startswith("GATE FAILED: ")
        assert part in message


def test_the_gates_of_several_seeds_are_on_their_means(capsys: pytest.CaptureFixture):
    pipelines = [pipeline(grounding, GOOD) for grounding in (0.02, 0.12, 0.22)]
    assert demo.gates(pipelines, 0.8, 0.5) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "detector: mAP@0.5 0.800 on held-out scenes",
        *(f"seed {number} of 3: grounding {value}" for number, value in ((1, "0.020"), (2, "0.120"), (3, "0.220"))),
        "mean: grounding 0.120",
    ]
    assert all("RefCOCO+ 0.500 pre-trained, 0.300 not, 0.250 by chance; VQA 0.550 " in line for line in lines[1:])
    (failed,) = demo.gates([*pipelines, pipeline(0.08, GOOD)], 0.8, 0.5)
    assert "grounding is 0.110" in failed
    worse = [pipeline(0.12, GOOD | {"vqa": (with_it, 0.35, 0.2)}) for with_it in (0.4, 0.44, 0.48)]
    (failed,) = demo.gates(worse, 0.8, 0.5)
    assert "VQA with pre-training is 0.440, not 0.1 over 0.350 without it" in failed


@pytest.mark.usefixtures("prefect_server")
def test_what_stages_log_is_shown_and_prefects_own_lines_are_not(capsys: pytest.CaptureFixture):
    from prefect import flow, get_run_logger, task

    from flows.artifacts import stage_logger

    @task
    def collect() -> None:
        stage_logger().info("captions: 4 of 9 shards collected")

    @flow
    def stage() -> None:
        get_run_logger().info("of Prefect")
        collect()
        stage_logger().info("pretrain is complete: é")

    with demo.stages_shown():
        stage()
        deadline = time.monotonic() + 20
        shown = []
        while len(shown) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
            shown += [line[10:] for line in capsys.readouterr().out.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    shown += [line[10:] for line in capsys.readouterr().out.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert shown == ["captions: 4 of 9 shards collected", "pretrain is complete: é"]


def test_the_demo_has_a_prefect_of_its_own_that_no_proxy_stands_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "example.org, 127.0.0.1")
    told = quiet_prefect(tmp_path)
    assert told["no_proxy"] == told["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("NO_PROXY", "*")
    assert quiet_prefect(tmp_path)["NO_PROXY"] == "*"


def test_the_commands_that_are_printed_name_the_root_and_the_seed(tmp_path: Path):
    assert demo.again("ui", Path("demo-root")) == "make ui ROOT=demo-root"
    assert demo.again("demo", Path("my root"), 3) == "make demo ROOT='my root' SEED=3"
    with pytest.raises(ValueError, match=f"run it first: make demo ROOT={re.escape(str(tmp_path))}/none"):
        demo.show_ui(tmp_path / "none", 4200)

    def make(what: str) -> str:
        command = ["make", "--dry-run", "--old-file=.venv/installed", what, "ROOT=my root", "SEED=3"]
        return subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout

    assert '-m demo --root "my root" --seed 3' in make("demo")
    assert '-m demo full --root "my root" --seed 3' in make("demo-full")
    assert '-m demo ui --root "my root"' in make("ui")


def test_the_ui_needs_what_prefect_recorded_and_no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "prefect.yaml").touch()  # and no demo data, whose port another program may have
    served = []
    monkeypatch.setattr(demo, "serve", lambda *given: served.append(given))
    demo.show_ui(tmp_path, 4321)
    assert served == [(tmp_path / "prefect", 4321, tmp_path / "prefect.yaml")]


def test_make_clean_removes_what_a_demo_made_and_nothing_else(tmp_path: Path):
    def clean(root: Path) -> int:
        return subprocess.run(
            ["make", "clean", f"ROOT={root}"], cwd=PROJECT, capture_output=True, check=False
        ).returncode

    mine, made = tmp_path / "my thesis", tmp_path / "my demo"
    mine.mkdir()
    (made / "data").mkdir(parents=True)
    (made / "data" / "demo.json").touch()
    assert clean(mine) != 0
    assert mine.exists()
    assert clean(made) == 0
    assert not made.exists()
    assert clean(tmp_path / "nothing") == 0


def test_a_root_of_another_seed_is_refused_before_anything_is_drawn(tmp_path: Path):
    demo_data = draw_demo_data(tmp_path / "my root" / "data", TINY, 9001)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    elsewhere = f"(?s)seed=0.*seed=1.*make demo ROOT=OTHER.*make clean ROOT='{re.escape(str(tmp_path))}/my root'"
    with pytest.raises(demo.OtherDemoData, match=elsewhere):
        demo.draw(demo_data.root, dataclasses.replace(TINY, seed=1))
    with pytest.raises(SystemExit, match="^error: .* holds demo data of other settings"):
        demo.main(["--root", str(demo_data.root.parent), "--seed", "1"])
    assert demo.draw(demo_data.root, TINY).port == 9001  # the one that stands in its lists
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_another_port_than_the_usual_one_is_said_loudly(tmp_path: Path, capsys: pytest.CaptureFixture):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if other.connect_ex(("127.0.0.1", DEFAULT_PORT)):  # else it is taken already: as good
            other.close()
            with socket.create_server(("127.0.0.1", DEFAULT_PORT)):
                demo_data = demo.draw(tmp_path / "data", TINY)
        else:
            demo_data = demo.draw(tmp_path / "data", TINY)
    assert demo_data.port != DEFAULT_PORT
    assert (
        f"WARNING: port {DEFAULT_PORT} is taken, so the demo data are served at {demo_data.port}"
        in capsys.readouterr().out
    )


def test_the_shipped_detector_finds_objects_in_scenes_that_it_never_saw(tmp_path: Path):
    """Of other scenes than it was trained on; the whole measurement is a gate of `make demo`."""
    settings = dataclasses.replace(TINY, seed=5, held_out_scenes=20)
    demo_data = draw_demo_data(tmp_path / "data", settings, 9001)
    found = evaluate_detector(tmp_path, demo_data, demo.SHIPPED_DETECTOR)
    assert found["metrics"]["map50"] > 0.8
    assert found["scenes"] == 20
    assert demo.SHIPPED_DETECTOR.stat().st_size <= 1_000_000

    file = tmp_path / "detector.json"
    known = found | {"metrics": {"map50": 0.123}}
    file.write_text(json.dumps(known))
    assert evaluate_detector(tmp_path, demo_data, demo.SHIPPED_DETECTOR) == known  # not again
    for changed in ({"weights_sha256": "0" * 64}, {"data": known["data"] | {"seed": 6}}):
        file.write_text(json.dumps(known | changed))
        assert evaluate_detector(tmp_path, demo_data, demo.SHIPPED_DETECTOR) == found
        assert json.loads(file.read_text()) == found


def test_the_models_start_from_the_network_that_finds_their_regions():
    detector, theirs = read_config(demo.SHIPPED_DETECTOR), DEMO.regions
    assert dataclasses.replace(theirs.resnet, norm="frozen") == detector.resnet
    assert (theirs.short_side, theirs.long_side, theirs.roi_size) == (
        *(detector.short_side, detector.long_side),
        detector.pool_size,
    )
    features = FastRCNN(theirs)
    load_resnet(features.backbone, features.res5, demo.SHIPPED_DETECTOR)
    for name in ("pretrain_vlbert_demo", *(task.recipe for task in DEMO_TASKS.values())):
        recipe = override(RECIPES[name](), ["data.root=r", "data.text_corpus=t", "random_init=true"])
        assert recipe.model == DEMO
        with pytest.raises(ValueError, match="the Fast R-CNN has no weights to start from"):
            check_complete(recipe)


def test_an_installation_brings_the_detector_along():
    brought = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["demo"]
    assert demo.SHIPPED_DETECTOR.name in brought


def test_regions_come_from_the_detector_and_a_seed_changes_nothing_but_training(tmp_path: Path):
    demo_data = draw_demo_data(tmp_path / "data", TINY, 9001)
    first = demo.flow_parameters(tmp_path, demo_data, 0, 2)
    weights = str(demo.SHIPPED_DETECTOR)
    for dataset in first["datasets"]:
        detector = dataset["detector"]
        assert detector["weights"] == weights
        assert (detector["selection"]["minimum"], detector["network"]["post_nms"], detector["boxes"]) == (
            3,
            30,
            "proposals",
        )
    for training in (first["pretraining"], *first["finetunings"]):
        assert f"model.regions.weights={weights}" in training["overrides"]
    mine = tmp_path / "mine.safetensors"
    own, other = (demo.flow_parameters(tmp_path, demo_data, seed, 2, mine, f"-seed{seed}") for seed in (0, 1))
    assert all(dataset["detector"]["weights"] == str(mine) for dataset in own["datasets"])
    names = [training["run"] for one in (own, other) for training in (one["pretraining"], *one["finetunings"])]
    assert len(set(names)) == 2 * (1 + 2 * len(OF_DEMO))
    changed = json.dumps(own).replace("-seed0", "-seed1").replace("data.seed=0", "data.seed=1")
    assert json.loads(changed) == other


def test_every_task_runs_with_and_without_pre_training_and_differs_in_nothing_else(tmp_path: Path):
    demo_data = draw_demo_data(tmp_path / "data", TINY, 9001)
    parameters = demo.flow_parameters(tmp_path, demo_data, 0, 2, tasks=tuple(DEMO_TASKS))["finetunings"]
    assert [one["run"] for one in parameters] == [
        f"{task}-{start}" for task in DEMO_TASKS for start in ("with", "without")
    ]
    for with_it, without in zip(parameters[::2], parameters[1::2], strict=True):
        assert (with_it["checkpoint"], without["checkpoint"]) == ("latest", "none")
        same = {"run": "", "checkpoint": ""}
        assert with_it | same == without | same
        assert with_it["dataset"] == "coco"
        assert Path(with_it["folder"]).is_dir()
    asked = [one["overrides"] for one in parameters if one["task"] == "vcr"]
    assert ["task.subtask=rationale" in overrides for overrides in asked] == [False, False, True, True]
    answers = len((demo_data.vqa / "answers_vqa.txt").read_text().splitlines())
    assert [one["task"] for one in parameters if f"task.answers={answers}" in one["overrides"]] == ["vqa", "vqa"]


def test_the_table_says_whose_memory_it_shows():
    lines = demo.table([demo.Stage("detect", 12.34, 250_000_000)], full=False).splitlines()
    assert lines[1].endswith("peak MB of one process")
    assert lines[2].split() == ["detect", "12.3", "30", "250"]
