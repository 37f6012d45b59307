"""The two variants, and the recipes of both: every row of the authors' table, and the paper's appendix A.2."""

import pytest

from storage.settings import flat, override_values, to_json
from vlbert.recipes import all_recipes
from vlbert.variants import RULES, apply, numbers, rules_of, table

PADDING = "model.regions.padding"
RECIPES = all_recipes()
OF_FAMILY = [name for name in RECIPES if "unicoder_vl" in name or "vilbert" in name]
OF_VLBERT = [name for name in RECIPES if name not in OF_FAMILY]
OF_PAPER = [name for name in OF_VLBERT if name.endswith("_paper")]
OF_CODE = [name for name in OF_VLBERT if not name.endswith("_paper") and "demo" not in name]

# (batch, text rows, backward passes a step, learning rate, optimizer, warm-up, epochs, clip, half precision, long side)
# from the authors' table, and the paper's from A.2. Weight decay is 1e-4 everywhere.
PUBLISHED = {
    "pretrain_vlbert_base": (128, 128, 1, 2.56e-5, "adamw", 16000, 10, 10, True, 1000),
    "pretrain_vlbert_base_precomputed": (128, 128, 1, 2.56e-5, "adamw", 16000, 10, 10, False, 1000),
    "pretrain_vlbert_large": (128, 128, 2, 2.56e-5, "adamw", 16000, 10, 10, True, 1000),
    "pretrain_vlbert_large_precomputed": (128, 128, 1, 2.56e-5, "adamw", 16000, 10, 10, True, 1000),
    "finetune_vcr_base": (64, 0, 4, 4.48e-3, "sgd", 1000, 20, 10, False, 1200),
    "finetune_vcr_large": (64, 0, 4, 4.48e-3, "sgd", 1000, 20, 10, True, 1200),
    "finetune_vqa_base": (256, 0, 1, 1.6e-4, "adamw", 500, 5, 1, False, 1000),
    "finetune_vqa_large": (256, 0, 4, 1.6e-4, "adamw", 500, 5, 1, False, 1000),
    "finetune_refcoco_base": (32, 0, 2, 2.56e-5, "adamw", 3750, 20, 1, False, 1000),
    "finetune_refcoco_large": (32, 0, 4, 2.56e-5, "adamw", 3750, 20, 1, False, 1000),
}
PAPER = {  # batch, text rows, learning rate, optimizer, warm-up, epochs
    "pretrain": (128, 128, 2e-5, "adam", 8000, 10),
    "finetune_vcr": (64, 0, 5e-3, "sgd", 1000, 20),
    "finetune_vqa": (256, 0, 1e-4, "adam", 2000, 20),
    "finetune_refcoco": (256, 0, 1e-4, "adam", 500, 20),
}
QUESTIONS = {"pretrain": 3.2e6, "finetune_vcr": 212_923, "finetune_vqa": 443_757, "finetune_refcoco": 120_191}


def of(name: str, values: dict) -> object:
    return next(value for prefix, value in values.items() if name.startswith(prefix))


@pytest.mark.parametrize("name", [name for name in OF_CODE if "retrieval" not in name])  # VL-BERT's authors had none
def test_a_published_recipe_has_the_numbers_of_the_authors_table(name: str):
    recipe = RECIPES[name]
    optimizer, data, regions = recipe.optimizer, recipe.data, recipe.model.regions
    epochs = round(recipe.steps * data.batch / of(name, QUESTIONS))
    found = (
        data.batch,
        data.text_batch,
        data.gradient_accumulation,
        optimizer.learning_rate,
        optimizer.kind,
        optimizer.warmup_steps,
    )
    found += (epochs, optimizer.max_grad_norm, recipe.precision == "bf16", regions.long_side)
    assert found == PUBLISHED[name]
    assert (optimizer.weight_decay, optimizer.betas, regions.short_side) == (1e-4, (0.9, 0.999), 600)


@pytest.mark.parametrize("name", OF_PAPER)
def test_a_recipe_of_the_paper_has_the_numbers_of_appendix_a2(name: str):
    recipe = RECIPES[name]
    optimizer, data = recipe.optimizer, recipe.data
    epochs = round(recipe.steps * data.batch / of(name, QUESTIONS))
    found = (data.batch, data.text_batch, optimizer.learning_rate, optimizer.kind, optimizer.warmup_steps, epochs)
    assert found == of(name, PAPER)
    assert (optimizer.weight_decay, recipe.model.regions.features) == (1e-4, "end_to_end")


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


# (batch, learning rate, warm-up, epochs, clip) as vilbert.md 3.5 and 4 and unicoder-vl.md 2 to 5 have them
FAMILY = {
    "pretrain_vilbert_base": (512, 1e-4, 0.1, 10, 1.0),
    "pretrain_vilbert_base_multi_task": (512, 1e-4, 0.1, 10, None),
    "finetune_vqa_vilbert_base": (256, 4e-5, 0.1, 20, 1.0),
    "finetune_vcr_vilbert_base": (64, 2e-5, 0.1, 20, 1.0),
    "finetune_refcoco_vilbert_base": (256, 4e-5, 0.1, 20, 1.0),
    "finetune_refcoco_vilbert_base_multi_task": (256, 2e-5, 0.1, 20, None),
    "pretrain_unicoder_vl_base": (192, 1e-4, 0.1, 10, 1.0),
    "finetune_vcr_unicoder_vl_base": (48, 3e-5, 0.05, 20, 1.0),
}


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_has_the_numbers_of_its_papers(name: str):
    recipe = RECIPES[name]
    optimizer, batch = recipe.optimizer, recipe.data.batch
    examples = 3.8e6 if name.startswith("pretrain_unicoder") else 3.3e6 if "pretrain" in name else of(name, QUESTIONS)
    found = (batch, optimizer.learning_rate, round(optimizer.warmup_steps / recipe.steps, 2))
    assert (*found, round(recipe.steps * batch / examples), optimizer.max_grad_norm) == FAMILY[name]


def test_every_difference_has_a_rule_that_concerns_a_recipe():
    assert {rule.number for rule in RULES} == {*range(1, 21)} - {17}  # the seventeenth is the detector's
    assert {rule.field for rule in RULES} == {rule.field for recipe in RECIPES.values() for rule in rules_of(recipe)}


def test_the_tables_have_a_row_for_each_rule_and_no_broken_row():
    for lines in (table().splitlines(), numbers(RECIPES).splitlines()):
        assert len({line.count("|") for line in lines}) == 1
    assert len(table().splitlines()) == len(RULES) + 2
    assert "| `pretrain_vilbert_base_multi_task` | `optimizer.bert_learning_rate` | 1e-05 | none |" in numbers(RECIPES)
