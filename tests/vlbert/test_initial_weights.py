"""What a run starts from: reported in so many words, and told what was taken."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY_MODEL, tiny_recipe, tiny_root

from storage.settings import to_json
from training.distributed import ALONE
from training.optimizer import OptimizerConfig
from vlbert.checkpoint import read_model
from vlbert.config import Recipe
from vlbert.initial_weights import check_complete, make_model
from vlbert.model.vlbert import VLBert
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
    recipe = tiny_recipe(root, steps=1, save_every=1)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, held_out=None, batch=2, text_batch=0))
    train(recipe, ALONE)
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
    assert reported.endswith("of its head all")


def test_another_task_takes_the_parts_that_its_head_names(root: Path, pretrained: Path):
    recipe = tiny_recipe(root, task=RefCOCOSettings())
    model, reported = started(recipe, pretrained)
    saved = load_file(pretrained / "model.safetensors")
    assert torch.equal(model.head.transform.dense.weight, saved["head.region_transform.dense.weight"])
    assert all(torch.equal(model.state_dict()[name], saved[name]) for name in saved if name.startswith("vlbert."))
    assert reported.endswith("of its head region_transform")
    wider = dataclasses.replace(recipe, model=dataclasses.replace(TINY_MODEL, num_heads=2))
    with pytest.raises(ValueError, match="another architecture than recipe tiny: model.num_heads is 4 there and 2 he"):
        started(wider, pretrained)


def test_frozen_norms_start_from_live_ones(root: Path, pretrained: Path, tmp_path: Path):
    live = dataclasses.replace(
        TINY_MODEL.regions, resnet=dataclasses.replace(TINY_MODEL.regions.resnet, norm="batch"), frozen_stages=0
    )
    model = dataclasses.replace(TINY_MODEL, regions=live)
    recipe = tiny_recipe(root, model=model)
    task = make_task(recipe.task, read_model(pretrained).vocabulary, 8)
    torch.manual_seed(0)
    fresh = TaskModel(VLBert(model, len(task.vocabulary)), task)
    for name in ("config.json", "vocab.txt"):
        (tmp_path / name).write_bytes((pretrained / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"model": to_json(model)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in fresh.state_dict().items()}, tmp_path / "model.safetensors")
    frozen = dataclasses.replace(model, regions=dataclasses.replace(live, frozen_stages=2))  # a run may choose it anew
    found, _ = started(tiny_recipe(root, model=frozen), tmp_path)
    weight = "vlbert.fast_rcnn.backbone.res2.0.conv1.norm.running_var"
    assert torch.equal(found.state_dict()[weight], fresh.state_dict()[weight])


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
        (FINETUNING | {"random_init": True, "bert": "bert-base-uncased"}, {}, "Recipe.random_init is True"),
        ({"steps": 3, "optimizer": FALLING}, {}, "decay_at names update 6, and the run has 3 steps"),
    ],
)
def test_an_incomplete_recipe_is_refused(root: Path, changes: dict, data: dict, named: str):
    changes = {"data": dataclasses.replace(tiny_recipe(root).data, **data)} | changes
    with pytest.raises(ValueError, match=named):
        check_complete(tiny_recipe(root, **changes))


@pytest.mark.parametrize("start", [{"random_init": True}, {"bert": "bert-base-uncased"}])
def test_a_finetuning_starts_from_a_bert_or_from_random_weights(root: Path, start: dict):
    check_complete(tiny_recipe(root, **FINETUNING, **start))
