"""Every program that a GPU runs, on one that is not there: nothing is left on the CPU, and it computes what that does.

An operation between tensors of both devices raises RuntimeError with file and line, so a program that ends has none.
In float32 its losses, gradients and metrics are those of the same program on the CPU.
"""

import copy
import dataclasses
import functools
import math
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from refcoco_files import write_refcoco
from retrieval_files import write_retrieval
from tiny import CHANNELS, TINY_MODEL, UNICODER_VL, VILBERT, commit_samples, tiny_recipe, tiny_root, tiny_sample
from tiny_detector import TINY as TINY_DETECTOR
from tiny_detector import annotated_images
from tiny_detector import tiny_recipe as detector_recipe
from vcr_files import write_vcr
from vqa_files import ANNOTATORS, ANSWERS, coco, write_vqa

import detectors.train
from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import FasterRCNN
from detectors.recipes import DetectorRecipe
from detectors.select import SelectionSettings
from storage.object_store import open_store
from storage.sample import Regions, Sample
from training.distributed import World
from training.log import read_metrics
from training.metrics import Step, Totals
from training.optimizer import OptimizerConfig
from training.stopping import Stopped
from training.virtual_device import DEVICE, VirtualDevice
from vlbert.config import DataConfig, ModelConfig, Recipe
from vlbert.data.batch import collate
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.evaluation.evaluate import evaluate
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import TaskModel, TaskSettings
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
from vlbert.train import prepare, train

CPU, GPU = World(0, 1, torch.device("cpu")), World(0, 1, DEVICE)
END_TO_END = dataclasses.replace(TINY_MODEL, dropout=0.0)
PRECOMPUTED = dataclasses.replace(
    END_TO_END, regions=dataclasses.replace(TINY_MODEL.regions, features="precomputed", random_init=False)
)
SHORT = {"steps": 2, "save_every": 2, "validation_samples": 4, "model": END_TO_END}
SHORT_DETECTOR = {"steps": 2, "save_every": 2, "validate_every": 2}
NOT_COMPARED = {"kind", "step", "samples_per_second", "data_wait", "save_wait", "memory_gb"}


def with_features(sample: Sample) -> Sample:
    features = np.random.default_rng(len(sample.url)).normal(size=(len(sample.regions), CHANNELS))
    return dataclasses.replace(
        sample, regions=dataclasses.replace(sample.regions, features=features.astype(np.float16))
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with samples and files of each task: captions and held-out, and a dataset for each other."""
    folder = tmp_path_factory.mktemp("virtual")
    root = tiny_root(folder, samples=8, held_out=4)
    samples = [with_features(tiny_sample(number, regions=1 + number % 3)) for number in range(8)]
    commit_samples(root, "features", samples)
    commit_samples(root, "refcoco+", samples)
    write_refcoco(root / "files", samples)
    commit_samples(root, "vqa", coco(samples[:4], "train2014") + coco(samples[:4], "val2014"))
    for split in ("train2014", "val2014"):
        write_vqa(root / "files", split, ANNOTATORS)
    (root / "files" / "answers_vqa.txt").write_text("\n".join(ANSWERS[1:]))
    commit_samples(root, "vcr", samples)
    write_vcr(root / "files", samples)
    commit_samples(root, "flickr30k", samples)
    write_retrieval(root / "files", samples, test=3)
    return root


def on_the_device(program: Callable[[World], object]) -> tuple[object, VirtualDevice]:
    with VirtualDevice(values=True) as device:
        return program(GPU), device


def logged(recipe: Recipe | DetectorRecipe, measures: bool = True) -> list[dict[str, float]]:
    """What a run has logged of each step and of its validation; without measures the losses and gradients alone."""
    store = open_store(recipe.data.root if isinstance(recipe, Recipe) else recipe.root)
    kinds = ("training", "validation") if measures else ("training",)
    lines = [line for kind in kinds for line in read_metrics(store, recipe.run_name, kind)]
    return [
        {name: value for name, value in line.items() if measures or name.startswith(("loss_", "gradient_"))}
        for line in ({name: value for name, value in line.items() if name not in NOT_COMPARED} for line in lines)
    ]


def compare_runs(
    recipe: Recipe | DetectorRecipe, train: Callable = train, measures: bool = True, tolerance: float = 1e-4
) -> VirtualDevice:
    """Train on the device, and on the CPU: they log the same. The device."""
    here, there = (dataclasses.replace(recipe, run=f"{recipe.run}-{name}") for name in ("cpu", "gpu"))
    train(here, CPU)
    metrics, device = on_the_device(lambda world: train(there, world))
    expected, found = logged(here, measures), logged(there, measures)
    assert len(found) == len(expected) == recipe.steps + measures
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    assert any(name.startswith("loss_") for name in found[0])
    assert all(math.isfinite(value) for value in metrics.values())
    return device


# --- pre-training -----------------------------------------------------------------------------------------------------

NORMS = dataclasses.replace(
    END_TO_END,
    regions=dataclasses.replace(
        END_TO_END.regions, resnet=dataclasses.replace(END_TO_END.regions.resnet, norm="batch"), frozen_stages=1
    ),
)
PRETRAININGS = {
    "end to end, words": (END_TO_END, {}),
    "unicoder-vl": (UNICODER_VL, {}),
    "vilbert": (VILBERT, {}),
    "live norms, computed again": (NORMS, {"activation_checkpointing": True}),
    "in two parts": (END_TO_END, {}),
    "each tensor clipped": (PRECOMPUTED, {"optimizer": OptimizerConfig(max_grad_norm=0.1, clip_each=True)}),
}


def pretraining(root: Path, name: str, **more: object) -> Recipe:
    """Of one of PRETRAININGS."""
    model, changes = PRETRAININGS[name]
    featured = model.regions.features == "precomputed"
    data = {"gradient_accumulation": 2} if name == "in two parts" else {}
    data |= {"datasets": {"features" if featured else "captions": None}, "batch": 4}
    data |= {"held_out": ("features" if featured else "held-out",)}
    data |= {"text_batch": 2} if "words" in name else {"text_batch": 0, "text_corpus": None}
    recipe = tiny_recipe(root, **SHORT | {"model": model} | {"run": re.sub(r"\W+", "-", name)} | changes | more)
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **data))


@pytest.mark.parametrize("name", PRETRAININGS)
def test_pretraining(root: Path, name: str):
    compare_runs(pretraining(root, name))


@pytest.mark.parametrize("name", ["end to end, words", "vilbert"])
def test_pretraining_in_bfloat16(root: Path, name: str):
    """A CPU rounds in other places."""
    recipe = pretraining(root, name, precision="bf16")
    device = compare_runs(dataclasses.replace(recipe, run=f"{recipe.run}-bf16"), measures=False, tolerance=0.1)
    products = [one for one in device.operations if one.products]
    assert len([one for one in products if one.dtype == torch.bfloat16]) > 0.9 * len(products)


def test_a_run_goes_on_from_a_checkpoint_of_the_device(root: Path):
    whole, parted = (
        pretraining(root, "end to end, words", steps=4, run=run) for run in ("whole-words", "parted-words")
    )
    train(whole, CPU)

    def stop(step: int, parts: object) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match="after step 2 of 4"):
        on_the_device(lambda world: train(parted, world, stop))
    on_the_device(lambda world: train(parted, world))
    for one, other in zip(logged(parted), logged(whole), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-4)


def test_batches_come_without_waiting(root: Path):
    """From page-locked memory."""
    with VirtualDevice(values=True) as device:
        run = prepare(pretraining(root, "end to end, words", run="loaded-words"), GPU, lambda line: None)
        device.start()
        (part,) = next(iter(run.batches()))
    assert {tensor.device for tensor in (part.tokens, part.boxes, *part.pixels, *part.labels.values())} == {DEVICE}
    assert sum(one.copied for one in device.operations) > 2 * 4 * 3 * 64 * 96, "pixels of two batches"
    assert [one for one in device.operations if one.waits] == []


def test_what_a_step_came_to_is_added_without_waiting():
    with VirtualDevice(values=True) as device:
        loss = torch.ones((), device=DEVICE).requires_grad_() * 3
        device.start()
        totals = Totals.of({"words": (loss, 2)}, GPU, False, 0.5)
        totals.mean({"words": (loss, 2)}, {}).backward()
        assert [one for one in device.operations if one.waits] == []
        assert Step.of([totals], loss, {}, GPU).losses == {"words": 1.5}
        assert len([one for one in device.operations if one.waits]) == 1


# --- fine-tuning and evaluation ---------------------------------------------------------------------------------------

FILES = {"vqa": "val2014", "vcr": "val", "refcoco+": "val", "flickr30k": "test"}  # datasets, and what is evaluated
TASKS = {
    "vqa": VQASettings(answers=len(ANSWERS) - 1, question_length=40),
    "vcr": VCRSettings(names="class", mask_size=2, max_tokens=40),
    "refcoco+": RefCOCOSettings(),
    "flickr30k": RetrievalSettings(caption_length=20, validate_on="test"),
}
OTHERWISE = {
    "vqa": dataclasses.replace(TASKS["vqa"], reads="pair", classifier="weight_norm", answers_from_words=False),
    "vcr": VCRSettings(
        max_tokens=40, instance_masks=False, loss="softmax", region_loss="contextual", copies_segment=False
    ),
    "refcoco+": RefCOCOSettings(regions="detected", target="iou", loss_over="rows", classifier="linear"),
    "flickr30k": dataclasses.replace(TASKS["flickr30k"], loss="cross_entropy", wrong_captions=2, wrong_images=1),
}


def finetuning(root: Path, dataset: str, settings: TaskSettings, **changes: object) -> Recipe:
    data = DataConfig(root=str(root), datasets={dataset: None}, held_out=(dataset,), batch=4, workers=0)
    fresh = {"run": f"{dataset}-tuned", "vocabulary": None, "vocabulary_size": 90, "random_init": True}
    settings = dataclasses.replace(settings, folder=str(root / "files"))
    return tiny_recipe(root, task=settings, data=data, **SHORT | fresh | changes)


@pytest.mark.parametrize("dataset", TASKS)
def test_finetuning_validation_and_evaluation(root: Path, dataset: str, tmp_path: Path):
    recipe = finetuning(root, dataset, TASKS[dataset])
    compare_runs(recipe)
    programs = {
        name: functools.partial(
            evaluate, recipe, [f"{root}/runs/{recipe.run}-cpu"], FILES[dataset], [], str(tmp_path / name)
        )
        for name in ("cpu", "gpu")
    }
    expected, (found, _) = programs["cpu"](CPU), on_the_device(programs["gpu"])
    assert found["examples"] == expected["examples"]
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-4)
    rows, others = (pq.read_table(tmp_path / name / "predictions.parquet").to_pylist() for name in programs)
    assert [row["answer"] for row in rows] == [row["answer"] for row in others]
    assert [row["probability"] for row in rows] == pytest.approx([row["probability"] for row in others], abs=1e-4)


@pytest.mark.parametrize("dataset", OTHERWISE)
def test_finetuning_of_vilbert_as_its_authors_do(root: Path, dataset: str):
    compare_runs(finetuning(root, dataset, OTHERWISE[dataset], model=VILBERT, run=f"{dataset}-vilbert"))


@pytest.mark.parametrize("model", [END_TO_END, UNICODER_VL, VILBERT], ids=["vlbert", "unicoder-vl", "vilbert"])
def test_attention_maps_and_predictions(model: ModelConfig):
    vocabulary = Vocabulary([*SPECIALS, "a", "and", "red", "blue", "square", "circle"])
    task = Pretraining(PretrainingSettings(max_elements=None), vocabulary, 8)
    torch.manual_seed(0)
    model = TaskModel(VLBert(model, len(vocabulary)), task).eval()
    samples = [with_features(tiny_sample(number, 1 + number)) for number in range(2)]
    batch = collate(
        [
            task.example(
                sample,
                prepare_image(sample, model.vlbert.config.regions, flip=False),
                task.annotation_for(text),
                np.random.default_rng(0),
            )
            for sample, text in zip(samples, ("a red [MASK]", "a [MASK] square and a [MASK]"), strict=True)
        ]
    )

    def program(world: World) -> tuple[list[torch.Tensor], list[dict]]:
        there = batch.to(world.device)
        model.to(world.device)
        with torch.inference_mode():
            encoded, rows = model.vlbert(there, attentions=True), model.predict(there)
        return [
            one.cpu() for one in (encoded.text, encoded.regions, *(map.weights for map in encoded.attentions))
        ], rows

    (expected, rows), ((found, others), _) = program(CPU), on_the_device(program)
    assert [row["ranking"][0]["answer"] for row in rows] == [row["ranking"][0]["answer"] for row in others]
    assert len(found) >= 4
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


# --- detection --------------------------------------------------------------------------------------------------------


def detected(world: World, **settings: object) -> list[Regions]:
    """What the detector finds in two drawn images."""
    config = dataclasses.replace(TINY_DETECTOR, **settings)
    detector = FasterRCNNDetector(FasterRCNN.random_init(config, 0), {"random_init": True, "seed": 0}, FOUND)
    # DetectorSettings takes devices by name, of those that are there.
    detector.network.to(world.device)
    detector.settings = copy.copy(FOUND)
    object.__setattr__(detector.settings, "device", str(world.device))
    return detector.detect([tiny_sample(number) for number in range(2)])


FOUND = DetectorSettings(SelectionSettings(minimum=3), keep_features=True, workers=1, threads=1)


@pytest.mark.parametrize("pooling", ["align1", "pool"])
def test_detection(pooling: str):
    found, _ = on_the_device(lambda world: detected(world, roi_op=pooling))
    for one, other in zip(found, detected(CPU, roi_op=pooling), strict=True):
        assert one.labels.tolist() == other.labels.tolist()
        for name in ("boxes", "scores", "features", "class_probs", "attribute_scores"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_detector_training(root: Path, precision: str):
    images = root / "annotated"
    if not images.exists():
        annotated_images(images, 16)
    recipe = detector_recipe(images, root, run=f"detector-{precision}", precision=precision, **SHORT_DETECTOR)
    tolerance = 1e-3 if precision == "fp32" else 0.2
    compare_runs(recipe, detectors.train.train, measures=precision == "fp32", tolerance=tolerance)
