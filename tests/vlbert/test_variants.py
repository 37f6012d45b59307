"""The two variants, and the recipes of both."""

import pytest

from storage.settings import flat, override_values, to_json
from vlbert.recipes import all_recipes
from vlbert.variants import RULES, apply, rules_of

PADDING = "model.regions.padding"
RECIPES = all_recipes()
OF_VLBERT = [name for name in RECIPES if "unicoder_vl" not in name and "vilbert" not in name]
OF_PAPER = [name for name in OF_VLBERT if name.endswith("_paper")]
OF_CODE = [name for name in OF_VLBERT if not name.endswith("_paper") and "demo" not in name]


@pytest.mark.parametrize("name", OF_PAPER + OF_CODE)
def test_every_recipe_follows_every_rule_of_its_variant(name: str):
    recipe = RECIPES[name]
    values, variant = flat(to_json(recipe)), "paper" if name in OF_PAPER else "published"
    for rule in rules_of(recipe):
        own = {PADDING: "groups"} if name.startswith("pretrain") else {}  # the one exception
        assert values[rule.field] == own.get(rule.field, getattr(rule, variant)), rule.field


@pytest.mark.parametrize("name", OF_VLBERT)
def test_either_variant_can_be_laid_over_any_recipe_and_the_other_over_that(name: str):
    recipe = RECIPES[name]
    by_paper, by_code = apply(recipe, "paper"), apply(recipe, "published")
    assert by_paper != by_code
    padding = {PADDING: "batch"} if name.startswith("pretrain") else {}
    assert name not in OF_CODE or by_code == override_values(recipe, padding)
    assert name not in OF_PAPER or by_paper == recipe
    assert apply(by_code, "paper") == by_paper
    assert apply(by_paper, "published") == by_code


def test_epochs_of_the_family_are_those_of_its_own_batches():
    recipe = RECIPES["finetune_vcr_unicoder_vl_base"]  # 20 epochs, one of them warm-up, 48 of 212,923 questions a step
    assert recipe.steps == pytest.approx(20 * 212_923 / 48, rel=1e-3)
    assert recipe.validate_every == recipe.save_every == recipe.optimizer.warmup_steps == recipe.steps // 20


def test_every_rule_concerns_a_recipe():
    assert {rule.field for rule in RULES} == {rule.field for recipe in RECIPES.values() for rule in rules_of(recipe)}
