"""Runs of a detector's training: stopped, resumed, ended early, on several processes; and what they leave."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from places import PROJECT
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import CLASSES, as_overrides
from tiny_detector import ATTRIBUTES, TINY, annotated_images, coco_data, command_line, seeded, tiny_recipe

import storage.claims
from detectors.faster_rcnn import FasterRCNN
from detectors.recipes import SGD, detector_vg_resnet101
from detectors.train import DetectorRun, main, train
from detectors.validate import validate
from detectors.weights.files import load_resnet, load_weights, read_config
from storage.claims import Claims
from storage.object_store import open_store
from storage.settings import override_values
from training import distributed
from training.distributed import ALONE, SharedFault, World
from training.log import read_metrics


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return annotated_images(tmp_path_factory.mktemp("annotated") / "images", 24)


ADAMW = {"kind": "adamw", "epsilon": 1e-8, "schedule": "linear", "warmup_steps": 2, "max_grad_norm": 1.0}
LIVE = {
    "network": dataclasses.replace(TINY, resnet=dataclasses.replace(TINY.resnet, norm="batch")),
    "optimizer": dataclasses.replace(SGD, **ADAMW),
    "validate_every": 2,  # after which norms are live again
}
RUNS = {"whole": {}, "live": LIVE}


@pytest.fixture(scope="module")
def root(tmp_path_factory, images) -> Path:
    root = tmp_path_factory.mktemp("root")
    for run, changes in RUNS.items():
        train(tiny_recipe(images, root, run_name=run, **changes), ALONE)
    return root


def losses_of(root: Path, run: str) -> list[list[float]]:
    lines = read_metrics(open_store(str(root)), run, "training")
    return [[line[name] for name in sorted(line) if name.startswith(("loss_", "step"))] for line in lines]


def tensors_of(root: Path, run: str, step: int = 6) -> dict[str, torch.Tensor]:
    return load_file(root / "runs" / run / f"step-{step:07d}" / "model.safetensors")


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def kill_in_step_5(root: Path, run: str) -> None:
    """Leave the run as a kill would: without its last checkpoint, and with metrics of later steps."""
    shutil.rmtree(root / f"runs/{run}/step-0000006")
    (root / f"runs/{run}/weights.safetensors").unlink()


def test_a_run_leaves_five_losses_the_map_of_each_class_and_moves_what_is_to_move(root, images):
    first, *_, last = read_metrics(open_store(str(root)), "whole", "training")
    losses = {name for name in first if name.startswith("loss_")}
    assert losses == {f"loss_{name}" for name in ("objectness", "anchors", "classes", "boxes", "attributes")}
    assert last["loss_objectness"] < first["loss_objectness"]
    assert first["learning_rate"] == pytest.approx(1e-3)
    (validation,) = read_metrics(open_store(str(root)), "whole", "validation")
    assert {"map50", "map50_weighted", "proposal_recall"} <= validation.keys()
    rows = [json.loads(line) for line in (root / "runs/whole/predictions.jsonl").read_text().splitlines()]
    assert sum(row["objects"] for row in rows) == sum(1 + number % 3 for number in range(16, 24))
    before, after = tensors_of(root, "whole", 3), tensors_of(root, "whole")
    still = {name for name in after if torch.equal(before[name], after[name])}
    assert {name for name in after if "stem" in name or ".norm." in name} == still


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_killed_goes_on_to_the_same_weights(root, images, capsys, name: str):
    run = f"{name}-killed"
    recipe = tiny_recipe(images, root, run_name=run, **RUNS[name])
    train(recipe, ALONE)
    kill_in_step_5(root, run)
    capsys.readouterr()
    train(recipe, ALONE)
    assert f"{run} resumes from" in capsys.readouterr().out
    assert losses_of(root, run) == losses_of(root, name)
    after = tensors_of(root, run)
    assert_equal(after, tensors_of(root, name))
    assert_equal(*(load_file(root / f"runs/{one}/weights.safetensors") for one in (name, run)))
    if name == "live":
        assert after["backbone.res2.0.conv1.norm.num_batches_tracked"] == 6
        assert not (after["backbone.res2.0.conv1.norm.running_var"] == 1).any()


def test_a_run_that_another_process_trains_is_refused(root, images, monkeypatch):
    monkeypatch.setattr(storage.claims, "RENEWAL", 0.1)
    with Claims(open_store(str(root)), "runs/taken") as claims:
        claims.take(["writer"])
        with pytest.raises(SharedFault, match=rf"runs/taken is trained by process {os.getpid()} on .*--run_name=NAME"):
            train(tiny_recipe(images, root, run_name="taken"), ALONE)
    assert not (root / "runs/taken").exists()
    prepare, store, heir = DetectorRun.prepare, open_store(str(root)), b"process 1 on another, , "

    def lose(self: DetectorRun, step: int) -> None:
        prepare(self, step)
        if step == 4:
            store.put("runs/taken/claims/writer.txt", heir)

    monkeypatch.setattr(DetectorRun, "prepare", lose)
    with pytest.raises(ValueError, match="was .*taken over .*process 1 on another"):
        train(tiny_recipe(images, root, run_name="taken"), ALONE)
    assert store.get("runs/taken/claims/writer.txt") == heir
    assert not list((root / "runs/taken").glob("step-0000006/state.json"))


def test_a_run_goes_on_only_as_it_began(root, images, tmp_path):
    recipe = tiny_recipe(images, root, run_name="whole")
    with pytest.raises(ValueError, match=r"trained with data.seed=0"):
        train(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, seed=1)), ALONE)
    content = json.loads((images / "coco.json").read_text())
    content["annotations"][0]["category_id"] = 11
    file = tmp_path / "coco.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"step-0000006 was trained on other annotations"):
        train(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, annotations=str(file))), ALONE)


def test_the_result_is_the_network_that_was_trained(root, images):
    file, network = root / "runs/live/weights.safetensors", LIVE["network"]
    trained = FasterRCNN(network)
    trained.load_state_dict(tensors_of(root, "live"))
    loaded = FasterRCNN(read_config(file))
    metadata = load_weights(loaded, file)
    assert (metadata["classes"], metadata["attribute_names"]) == (list(CLASSES), list(ATTRIBUTES))
    pixels = 50 * torch.randn(1, 3, 64, 96, generator=seeded(0))
    with torch.inference_mode():
        torch.testing.assert_close(trained.eval().backbone(pixels), loaded.eval().backbone(pixels))
    # And its ResNet is where another training starts.
    fresh = FasterRCNN(network)
    load_resnet(fresh.backbone, fresh.roi_heads.res5, file)


def test_a_few_unreadable_are_passed_over_and_many_end_the_run(root, images, tmp_path, capsys):
    copies = shutil.copytree(images / "images", tmp_path / "images")
    (copies / "3.jpg").write_bytes((copies / "3.jpg").read_bytes()[:400])
    data = coco_data(images, images=(str(copies),), unreadable=0.1)
    recipe = tiny_recipe(images, root, run_name="torn", data=data)
    train(recipe, ALONE)
    printed = capsys.readouterr().out
    assert "1 samples cannot be read" in printed
    assert printed.count("3.jpg: ") == 1, printed
    (line,) = (json.loads(line) for line in (root / "runs/torn/unreadable.jsonl").read_text().splitlines())
    assert line["key"] == "3"
    (copies / "5.jpg").write_bytes((copies / "4.jpg").read_bytes()[:300])
    with pytest.raises(ValueError, match=r"2 samples cannot be read, the last because .*[35].jpg: .* data.unreadable"):
        train(dataclasses.replace(recipe, run_name="torn-twice"), ALONE)


@pytest.mark.slow
def test_two_processes_compute_what_one_computes_and_one_goes_on_where_they_were_killed(root, images):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "detectors.train", *command_line(images, root, run_name="two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len([line for line in result.stdout.splitlines() if line.startswith("step 6/6  loss anchors")]) == 1
    np.testing.assert_allclose(losses_of(root, "two"), losses_of(root, "whole"), rtol=1e-4)
    torch.testing.assert_close(tensors_of(root, "two"), tensors_of(root, "whole"), rtol=1e-3, atol=1e-4)
    validations = [read_metrics(open_store(str(root)), run, "validation")[-1] for run in ("whole", "two")]
    assert validations[0] == pytest.approx(validations[1], abs=1e-6)

    kill_in_step_5(root, "two")
    train(tiny_recipe(images, root, run_name="two"), ALONE)
    np.testing.assert_allclose(losses_of(root, "two"), losses_of(root, "whole"), rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--root="], "root is not set"),
        (["--data.annotations=absent.json"], "annotation file absent.json does not exist"),
        (["--data.attribute_names=None"], "the network has 3 attributes, but data.attribute_names is None; give both"),
        (["--no_random_init"], "the network has no weights to start from"),
        (["--init_from=absent.pth"], "random_init is True; it must be false with init_from"),
        (["--optimizer.schedule=step", "--optimizer.decay_at=6"], "decay_at has update 6, but the run has only 6"),
        (["--network.box_arithmetic=plus_one"], "box_arithmetic is 'plus_one'; it must be continuous in training"),
        (["--network.num_classes=7"], "the data has 8 classes, but the network has 7; set --network.num_classes=8"),
        (["--data.held_out_last=24"], "leaves no image to train on"),
        (["--data.images=absent"], "data.images: absent is not a folder"),
    ],
)
def test_wrong_settings_end_with_one_line(images, tmp_path, fields, message):
    with pytest.raises(SystemExit) as ended:
        main(command_line(images, tmp_path) + fields)
    assert message in str(ended.value)
    assert "\n" not in str(ended.value)


def test_weights_are_those_of_the_step_that_they_name_however_often_a_run_is_ended(images, tmp_path):
    file = tmp_path / "runs/tiny/weights.safetensors"
    for steps in (2, 4):
        recipe = tiny_recipe(images, tmp_path, steps=steps, save_every=2)
        train(recipe, ALONE)
        with safe_open(file, framework="pt") as stream:
            trained = json.loads(stream.metadata()["trained"])
        assert trained["steps"] == steps
        assert "map50" in trained["validation"]
        weights, checkpoint = load_file(file), tensors_of(tmp_path, "tiny", steps)
        assert_equal(weights, {name: checkpoint[name] for name in weights})
    file.unlink()  # as if it had been killed right after its last checkpoint
    train(recipe, ALONE)
    assert_equal(load_file(file), weights)


def test_the_buffers_of_the_first_process_are_shared_before_each_validation(images, tmp_path, monkeypatch):
    order, sent = [], []
    share = distributed.broadcast_buffers
    monkeypatch.setattr(distributed, "broadcast_buffers", lambda *given: order.append("shared"))
    monkeypatch.setattr("detectors.train.validate", lambda *given: order.append("validated") or validate(*given))
    train(tiny_recipe(images, tmp_path, steps=2, validate_every=1), ALONE)
    assert order == ["shared", "validated"] * 2
    norm = torch.nn.BatchNorm2d(3)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda buffer, src: sent.append((buffer.data_ptr(), src)))
    share(norm, World(1, 2, torch.device("cpu")))
    assert sent == [(buffer.data_ptr(), 0) for buffer in norm.buffers()]


@pytest.mark.slow
def test_the_stage_trains_and_says_where_the_weights_are(images, tmp_path):
    from flows.settings import Processes, TrainDetectorSettings
    from flows.train_detector import train_detector

    recipe = tiny_recipe(images, tmp_path)
    data = {n: getattr(recipe.data, n) for n in ("annotations", "images", "attribute_names", "held_out_last")}
    given = {"root": recipe.root, "run_name": recipe.run_name} | {f"data.{name}": data[name] for name in data}
    overrides = tuple(as_overrides(recipe, override_values(detector_vg_resnet101(), given)))
    processes = Processes(threads=1, timeout=120)
    settings = TrainDetectorSettings(run="staged", overrides=overrides, processes=processes, **data)
    lines = []
    trained = train_detector(str(tmp_path), settings, lines.append)
    file = tmp_path / "runs/staged/weights.safetensors"
    assert file.is_file()
    assert (trained.checkpoint, trained.run, trained.recipe) == (str(file), "staged", "detector_vg_resnet101")
    assert "map50" in trained.metrics
    assert trained.peak_bytes > 0
    assert any(line.startswith("staged: 16 images with 31 objects of 8 classes, 8 held out") for line in lines)
