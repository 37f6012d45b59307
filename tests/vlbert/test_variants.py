"""The two variants, and the recipes of both."""

import pytest

from storage.settings import flat, override_values, to_json
from vlbert.recipes import all_recipes
from vlbert.variants import RULES, apply, rules_of, table

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


# (batch, learning rate, share of warm-up, epochs of so many questions) as vilbert.md and unicoder-vl.md have them
FAMILY = {
    "finetune_vqa_vilbert_base": (256, 4e-5, 0.1, 20, 443_757),
    "finetune_vcr_vilbert_base": (64, 2e-5, 0.1, 20, 212_923),
    "finetune_refcoco_vilbert_base": (256, 4e-5, 0.1, 20, 120_191),
    "finetune_vcr_unicoder_vl_base": (48, 3e-5, 0.05, 20, 212_923),
}


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_has_the_numbers_of_its_papers(name: str):
    recipe, questions = RECIPES[name], FAMILY[name][-1]
    found = (recipe.data.batch, recipe.optimizer.learning_rate, recipe.optimizer.warmup_steps / recipe.steps)
    epochs = round(recipe.steps * recipe.data.batch / questions)
    assert (*found, epochs, questions) == pytest.approx(FAMILY[name], rel=1e-3)
    assert recipe.validate_every == recipe.save_every == recipe.steps // epochs


def test_every_difference_has_a_rule_that_concerns_a_recipe():
    assert {rule.number for rule in RULES} == {*range(1, 21)} - {17}  # the seventeenth is the detector's
    assert {rule.field for rule in RULES} == {rule.field for recipe in RECIPES.values() for rule in rules_of(recipe)}


def test_the_table_has_a_row_for_each_rule_and_no_broken_row():
    lines = table().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == len(RULES) + 2
