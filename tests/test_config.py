import dataclasses

import pytest
from tiny import as_overrides, tiny_recipe

from detectors.fields import from_json, override, to_json
from vlbert.config import ModelConfig
from vlbert.recipes import RECIPES
from vlbert.train import check_complete


def test_overrides_reach_every_depth_and_keep_the_types():
    recipe = override(
        RECIPES["pretrain_vlbert_base"](),
        [
            "steps=1e3",
            "optimizer.learning_rate=3e-4",
            "model.regions.resnet.blocks=3,4,6,3",
            "task.words.whole_words=false",
            "task.max_elements=none",
            "model.geometry=corners",
            "task.watched_words=red,blue",
            "optimizer.betas=0.9,0.98",
            "optimizer.clip=none",
            "optimizer.schedule=step",
            "optimizer.decay_at=20,30",
        ],
    )
    assert (recipe.steps, recipe.optimizer.learning_rate) == (1000, 3e-4)
    assert recipe.model.regions.resnet.blocks == (3, 4, 6, 3)
    assert recipe.task.words.whole_words is False
    assert recipe.task.max_elements is None
    assert recipe.model.geometry == "corners"
    assert recipe.task.watched_words == ("red", "blue")
    assert recipe.optimizer.betas == (0.9, 0.98)
    assert (recipe.optimizer.clip, recipe.optimizer.decay_at) == (None, (20, 30))


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("optimiser.learning_rate=1", "Recipe has no field 'optimiser'"),
        ("optimizer.rate=1", "OptimizerConfig has no field 'rate'; it has kind, learning_rate"),
        ("steps", "has no '='"),
        ("steps=many", "'many' is no int"),
        ("model.geometry=polar", "one of centre, corners"),
        ("steps.more=1", "plain value"),
        ("model=small", "set its fields"),
        ("model.heads=7", "ModelConfig.heads is 7; it must be a divisor of hidden = 768"),
        ("task.words.masked=1.5", "shares"),
        ("steps=0", "Recipe.steps is 0"),
        ("data.accumulate=0", "DataConfig.accumulate is 0"),
        ("data.seed=-1", "DataConfig.seed is -1"),
        ("task.max_elements=2", "max_elements is 2"),
        ("optimizer.clip=0", "OptimizerConfig.clip is 0"),
        ("optimizer.betas=0.9", "two numbers"),
        ("model.regions.pixel_mean=1,2", "three numbers"),
        ("model.regions.features=precomputed model.regions.weights=x", "must be None where features are precomputed"),
        ("model.special_tokens=vocabulary", "own where regions have tokens by class or hidden ones one of theirs"),
        ("optimizer.schedule=step", "OptimizerConfig.decay_at is ()"),
        ("optimizer.decay_at=3", "given for schedule step, and only there"),
        ("optimizer.schedule=step optimizer.decay_at=4,3", "increasing numbers of steps"),
        ("optimizer.momentum=1", "OptimizerConfig.momentum is 1"),
        ("compile=true precision=tf32", "Recipe.compile is True; it must be false with tf32"),
        ("compile=true recompute=true model.regions.resnet.norm=batch", "false with recompute and live norms"),
        ("spike=1", "Recipe.spike is 1.0; it must be more than 1, or none"),
        ("most_skipped=0", "Recipe.most_skipped is 0"),
        ("task.text_specials=true task.text_length=2", "text_length is 2; it must be at least 1, and 3 with"),
    ],
)
def test_a_wrong_override_is_named_with_the_way_out(assignment, says):
    with pytest.raises(ValueError, match=".*") as error:
        override(RECIPES["pretrain_vlbert_base"](), assignment.split())
    assert says in str(error.value)


def test_fields_that_belong_together_may_change_together():
    recipe = override(RECIPES["pretrain_vlbert_base"](), ["model.hidden=96", "model.heads=8"])
    assert (recipe.model.hidden, recipe.model.heads) == (96, 8)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_are_named_as_their_function_and_survive_json(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert from_json(ModelConfig, to_json(recipe)["model"], "here") == recipe.model
    with pytest.raises(ValueError, match="data.root is not set"):
        check_complete(recipe)


def test_a_configuration_may_be_older_and_not_newer():
    values = to_json(ModelConfig())
    del values["heads"]
    assert from_json(ModelConfig, values, "config.json") == ModelConfig(), (
        "a field younger than the file has its default"
    )
    with pytest.raises(ValueError, match="config.json: ModelConfig has no field eyes; the file is of another version"):
        from_json(ModelConfig, values | {"eyes": 2}, "config.json")


def test_as_overrides_is_the_inverse_of_override(tmp_path):
    base, tiny = RECIPES["pretrain_vlbert_demo"](), tiny_recipe(tmp_path)
    assert override(base, as_overrides(tiny, base)) == dataclasses.replace(tiny, name=base.name)
