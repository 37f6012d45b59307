"""The rehearsal of a GPU: what standard steps cost, as golden numbers; what the device refuses and records; the time on
a card. Every program that a GPU runs ends there, so none mixes tensors of both devices."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import family
import pytest
import torch
from places import DATA
from tiny import SMALL_MODEL, TINY_MODEL, UNICODER_VL, VILBERT, commit_samples, tiny_recipe, tiny_root
from tiny_detector import annotated_images
from tiny_detector import tiny_recipe as detector_recipe

import detectors.train
from benchmarks.rehearsal.__main__ import main, rehearse_training
from benchmarks.rehearsal.cards import CARDS, timeline
from benchmarks.rehearsal.virtual_device import DEVICE, VirtualDevice
from benchmarks.step_contenders import Fast
from benchmarks.step_parts import PARTS, count_flops
from benchmarks.synthetic import make_batch, new_model, without_files
from detectors.faster_rcnn import DEMO, FasterRCNN
from storage.settings import override
from training.distributed import World
from training.optimizer import OptimizerConfig
from training.precision import float32_precision
from vlbert.config import DataConfig
from vlbert.evaluation.evaluate import evaluate
from vlbert.recipes import RECIPES, all_recipes
from vlbert.train import prepare, train

GOLDEN = json.loads((DATA / "rehearsed.json").read_text())  # of 8 pairs, and as many text rows where the recipe has any
LONG = {"pretrain_vilbert_base", "pretrain_unicoder_vl_base"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in GOLDEN])
def test_a_step_costs_what_it_did(name: str):
    """A change of the step that changes a number writes the new ones down; with another torch they may differ."""
    recipe, sums = all_recipes()[name], ("kernels", "waits", "flops", "bytes")
    device = rehearse_training(recipe, 8, 8 if recipe.data.text_batch else 0)
    parts = timeline(device.parts(), CARDS["h200"])
    found = {name: sum(getattr(one, name) for one in device.operations) for name in sums}
    found |= {"peak": device.peak, "ms on an H200": round(1000 * sum(part.seconds for part in parts.values()), 6)}
    assert found == GOLDEN[name], f"now {json.dumps(found)}"
    assert {*parts} <= {*PARTS}, "each operation belongs to a part"


def test_each_part_computes_as_many_flops_as_torch_counts_on_the_cpu():
    # With dropout a CPU's attention keeps its weights, which a GPU's computes again.
    recipe = override(RECIPES["pretrain_vlbert"](), [*SMALL_MODEL, "--model.dropout=0"])
    device, parts = rehearse_training(recipe, 3, 2), Counter()
    for part, one in device.parts():
        parts[part] += one.flops
    recipe, cpu = without_files(recipe), torch.device("cpu")
    batch = make_batch(recipe, 3, 2)
    assert +parts == +Counter(count_flops(Fast(recipe, new_model(recipe, cpu), World(0, 1, cpu), [batch]), batch))
    assert parts["backbone"] > 0 < parts["encoder, backward"]


MIXED = [
    lambda here, there: here + there,
    lambda here, there: there.add_(here),
    lambda here, there: torch.cat([there, here]),
    lambda here, there: here[torch.tensor([1], device=DEVICE)],
    lambda here, there: torch.zeros(()).add_(there.sum()),
]


def test_tensors_of_both_devices_are_refused_and_the_line_is_named():
    here = torch.ones(4, 4)
    with VirtualDevice():
        there = here.to(DEVICE)
        for mixed in MIXED:
            with pytest.raises(RuntimeError, match=rf"mixes .*{mixed.__code__.co_firstlineno} < test_rehearsal.py:"):
                mixed(here, there)


GPU = World(0, 1, DEVICE)
SHORT = {"steps": 1, "save_every": 1, "validation_samples": 4}  # what was not computed reads as "stop after this step"
NORMS = dataclasses.replace(TINY_MODEL.regions.resnet, norm="batch")
NORMS = dataclasses.replace(TINY_MODEL, regions=dataclasses.replace(TINY_MODEL.regions, resnet=NORMS, frozen_stages=1))
PRETRAININGS = {
    "vlbert": {"model": TINY_MODEL, "precision": "bf16"},
    "unicoder-vl": {"model": UNICODER_VL, "optimizer": OptimizerConfig(max_grad_norm=0.1, clip_each=True)},
    "vilbert": {"model": VILBERT, "precision": "bf16"},
    "live-norms-computed-again": {"model": NORMS, "activation_checkpointing": True},
}
# Dataset -> the task with files and samples as ViLBERT's authors set it, and what VL-BERT's set otherwise.
VQA = {"reads": "mask", "classifier": "words", "classifier_dropout": None, "answers_from_words": True}
VCR = {"names": "class", "mask_size": 2, "instance_masks": True, "loss": "sigmoid", "copies_segment": True}
REFCOCO = {"regions": "ground_truth", "target": "binary", "loss_over": "regions", "classifier": "regions"}
RETRIEVAL = {"loss": "cross_entropy", "wrong_captions": 2, "wrong_images": 1}
TASKS = {
    "vqa": (family.vqa, {"validate_on": "train2014", "question_length": 40}, VQA),
    "vcr": (family.vcr, {"validate_on": "val"}, VCR),
    "refcoco+": (family.refcoco, {"validate_on": "val"}, REFCOCO),
    "flickr30k": (family.retrieval, {"validate_on": "test"} | RETRIEVAL, {"loss": "hinge", "wrong_captions": 3}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_root(tmp_path_factory.mktemp("virtual"), samples=8, held_out=4)
    commit_samples(root, "features", family.SAMPLES)
    annotated_images(root / "annotated", 16)
    return root


@pytest.mark.parametrize("name", PRETRAININGS)
def test_pretraining_runs(root: Path, name: str):
    recipe = tiny_recipe(root, **SHORT | {"run_name": name} | PRETRAININGS[name])
    data = {} if name == "vlbert" else {"text_batch": 0, "text_corpus": None}
    if recipe.model.regions.features == "precomputed":
        data |= {"datasets": {"features": None}, "held_out": ("features",)}
    data = dataclasses.replace(recipe.data, batch=8, gradient_accumulation=2, **data)
    with VirtualDevice() as device:
        train(dataclasses.replace(recipe, data=data), GPU)
    products = [one for one in device.operations if one.products]
    low = [one for one in products if one.dtype == torch.bfloat16]
    assert len(low) > 0.9 * len(products) if recipe.precision == "bf16" else not low


@pytest.mark.parametrize("vilbert", [False, True], ids=["vlbert", "vilbert"])
@pytest.mark.parametrize("dataset", TASKS)
def test_finetuning_and_evaluation_run(dataset: str, vilbert: bool, tmp_path: Path):
    make, given, otherwise = TASKS[dataset]
    task, samples = make(tmp_path / "files", **given)
    commit_samples(tmp_path, dataset, samples)
    settings = dataclasses.replace(task.settings, **{} if vilbert else otherwise)
    held_out = None if settings.validate_on in settings.train_on else (dataset,)
    data = DataConfig(root=str(tmp_path), datasets={dataset: None}, held_out=held_out, batch=4, workers=0)
    fresh = {"vocabulary": None, "vocabulary_size": 90, "random_init": True}
    model = {"model": VILBERT if vilbert else TINY_MODEL}
    recipe = tiny_recipe(tmp_path, task=settings, data=data, **SHORT | fresh | model)
    with VirtualDevice():
        train(recipe, GPU)
        evaluate(recipe, [f"{tmp_path}/runs/{recipe.run}"], settings.validate_on, {}, str(tmp_path / "out"), GPU)


def test_detector_training_runs(root: Path):
    recipe = detector_recipe(root / "annotated", root, run_name="detector", precision="bf16")
    with VirtualDevice():
        detectors.train.train(dataclasses.replace(recipe, steps=1, save_every=1, validate_every=1), GPU)


@pytest.mark.parametrize(("convolutions", "fused"), [("ieee", False), ("tf32", True)])
def test_detection_fuses_float32_convolutions_only_where_they_may_be_rounded_to_tf32(convolutions: str, fused: bool):
    network = FasterRCNN.random_init(DEMO, seed=0).for_inference("fp32", rois_at_a_time=100)
    with VirtualDevice() as device, float32_precision(convolutions, "ieee"), torch.inference_mode():
        c4 = network.to(DEVICE).backbone(torch.zeros(2, 3, 64, 64, device=DEVICE))
        boxes, _ = network.proposals(*network.rpn(c4), 64, 64)
        network.roi_heads.box_predictor(network.roi_features(c4, boxes))
    names = {one.name for one in device.operations}
    assert ({"aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu"} <= names) == fused


def test_batches_come_without_waiting(root: Path):
    """From page-locked memory."""
    with VirtualDevice() as device:
        run = prepare(tiny_recipe(root, **SHORT | {"run_name": "loaded"}), GPU, lambda line: None)
        device.start()
        (part,) = next(iter(run.batches()))
    assert {tensor.device for tensor in (part.tokens, part.boxes, *part.pixels, *part.labels.values())} == {DEVICE}
    assert sum(one.copied for one in device.operations) > 4 * 3 * 64 * 96, "pixels"
    assert [one for one in device.operations if one.waits] == []


def test_the_command_puts_what_a_card_took_beside_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture):
    measured, report = tmp_path / "measured.json", tmp_path / "report.json"
    measured.write_text(json.dumps({"parts": {"bf16": {"encoder": 2.0, "optimizer": 4.0}}}))
    given = ["--pairs", "4", "--device", "a100", "--measured", str(measured), "--json", str(report)]
    main(["pretrain_vlbert", *given, *SMALL_MODEL])
    rows = {line.split("  ")[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines() if line}
    seconds = {name: part["seconds"] for name, part in json.loads(report.read_text())["parts"].items()}
    for name, found, took in (("encoder", seconds["encoder"], 2.0), ("the step", sum(seconds.values()), 6.0)):
        assert list(map(float, rows[name])) == [took, pytest.approx(1000 * found / took, abs=0.006)]
