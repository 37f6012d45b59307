"""The two variants, and the recipes of both."""

from dataclasses import replace

import pytest

from storage.settings import flat, override_values, to_json
from vlbert.config import Recipe
from vlbert.recipes import all_recipes
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
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


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_feeds_at_most_what_its_model_has_positions_for(name: str):
    recipe = RECIPES[name]
    lengths = recipe.task.lengths(recipe.data.text_batch > 0)
    assert lengths
    assert all(getattr(recipe.task, field) + others <= recipe.model.max_positions for field, others in lengths.items())


@pytest.mark.parametrize(
    ("task", "field", "most"),
    [
        (PretrainingSettings(max_elements=200), "max_elements", 127),
        (PretrainingSettings(max_elements=None, caption_length=125), "caption_length", 124),
        (PretrainingSettings(max_elements=None, caption_length=30, text_length=127), "text_length", 126),
        (VQASettings(question_length=123), "question_length", 122),
        (VCRSettings(max_tokens=124), "max_tokens", 123),
        (RetrievalSettings(caption_length=125), "caption_length", 124),
        (RefCOCOSettings(expression_length=125), "expression_length", 124),
    ],
)
def test_a_recipe_is_refused_when_it_is_made_if_its_texts_do_not_fit(task, field, most):
    recipe = RECIPES["pretrain_vlbert_demo"]
    named = rf"^task.{field} is \d+, the model has positions for {most}; set it to {most} or less$"
    with pytest.raises(ValueError, match=named):
        replace(recipe, task=task)
    assert getattr(replace(recipe, task=replace(task, **{field: most})).task, field) == most


def test_lengths_left_at_their_default_follow_the_model():
    small = replace(RECIPES["pretrain_vlbert_demo"].model, max_positions=16)
    for task, field, length in (
        (PretrainingSettings(), "max_elements", 15),
        (PretrainingSettings(max_elements=None), "caption_length", 12),
        (VQASettings(), "question_length", 10),
        (VCRSettings(), "max_tokens", 11),
        (RetrievalSettings(), "caption_length", 12),
        (RefCOCOSettings(), "expression_length", 12),
    ):
        assert getattr(Recipe(name="small", task=task, model=small).task, field) == length
