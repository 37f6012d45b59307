"""What a run starts from: reported in so many words, and told what was taken."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY_MODEL, tiny_recipe, tiny_root

from training.distributed import ALONE
from training.optimizer import OptimizerConfig
from vlbert.checkpoint import read_model
from vlbert.config import Recipe
from vlbert.initial_weights import check_complete, make_model
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.train import train


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_root(tmp_path_factory.mktemp("starting"), samples=4, held_out=1)


@pytest.fixture(scope="module")
def pretrained(root: Path) -> Path:
    """A checkpoint of one step of pre-training."""
    train(tiny_recipe(root, {"held_out": None, "batch": 2, "text_batch": 0}, steps=1, save_every=1), ALONE)
    return root / "runs" / "tiny" / "step-0000001"


def started(recipe: Recipe, folder: Path) -> tuple[TaskModel, str]:
    """The model of a run that starts from the folder, and what it reports."""
    init_from, reported = read_model(folder), []
    task = make_task(recipe.task, init_from.vocabulary, init_from.num_classes)
    return make_model(recipe, task, init_from.vocabulary, init_from, None, reported.append), "\n".join(reported)


def test_more_pretraining_takes_the_head_too(root: Path, pretrained: Path):
    model, reported = started(tiny_recipe(root, run_name="more"), pretrained)
    saved = load_file(pretrained / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert reported.endswith("parts of its head: all")


def test_another_task_takes_the_parts_that_its_head_names(root: Path, pretrained: Path):
    recipe = tiny_recipe(root, task=RefCOCOSettings())
    model, reported = started(recipe, pretrained)
    saved = load_file(pretrained / "model.safetensors")
    assert torch.equal(model.head.transform.dense.weight, saved["head.region_transform.dense.weight"])
    assert all(torch.equal(model.state_dict()[name], saved[name]) for name in saved if name.startswith("vlbert."))
    assert reported.endswith("parts of its head: region_transform")
    wider = dataclasses.replace(recipe, model=dataclasses.replace(TINY_MODEL, num_heads=2))
    with pytest.raises(ValueError, match="another architecture than recipe tiny: model.num_heads is 4 in the "):
        started(wider, pretrained)
    with pytest.raises(ValueError, match="only one of them has a LayerNorm. Set task.classifier"):
        started(tiny_recipe(root, task=RefCOCOSettings(classifier="regions_norm")), pretrained)


WITHOUT_WEIGHTS = dataclasses.replace(TINY_MODEL, regions=dataclasses.replace(TINY_MODEL.regions, random_init=False))
FALLING = OptimizerConfig(schedule="step", decay_at=(3, 6))
FINETUNING = {"task": RefCOCOSettings(folder="refs")}


@pytest.mark.parametrize(
    ("changes", "data", "named"),
    [
        ({}, {"root": ""}, "data.root is not set"),
        ({}, {"text_corpus": None}, "data.text_corpus is not set"),
        ({"model": WITHOUT_WEIGHTS}, {}, "--model.regions.weights=FILE"),
        (FINETUNING, {}, "no model to start from"),
        (FINETUNING | {"random_init": True}, {"held_out": ("a", "b")}, "data.held_out has 2 names, a, b; a task with"),
        (FINETUNING | {"random_init": True, "bert": "bert-base-uncased"}, {}, "Recipe.random_init is True"),
        ({"steps": 3, "optimizer": FALLING}, {}, "decay_at has update 6, but the run has only 3 steps"),
    ],
)
def test_an_incomplete_recipe_is_refused(root: Path, changes: dict, data: dict, named: str):
    with pytest.raises(ValueError, match=named):
        check_complete(tiny_recipe(root, data, **changes))
    for start in ({"random_init": True}, {"bert": "bert-base-uncased"}):
        check_complete(tiny_recipe(root, **FINETUNING, **start))
