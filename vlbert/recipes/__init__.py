"""Recipes: functions that return the full configuration of a run, one function per task and model.

`vlbert train finetune_vqa --size large` trains finetune_vqa(size="large"):

    size      base, large, or demo: a small model that learns from the drawn scenes of `make demo`
    features  end_to_end: a Fast R-CNN is trained with the model; precomputed: vectors that the detector stored
    variant   whether to follow the paper or the authors' code where they differ

By default, a run has the name of its recipe. The name includes the size and, unless they are the defaults, the features
and the variant: finetune_vqa_large_paper. The number of steps is epochs x examples / batch, with 3.3 M captions, 213 k
questions of VCR, 444 k of VQA's train2014, and 120 k expressions of RefCOCO+.
`data.batch` is global: batch = GPUs x gradient_accumulation x examples per GPU and pass. The learning rate does not
depend on the number of GPUs.
"""

import itertools
import typing

from storage.programs import Command
from storage.tables import markdown
from vlbert.config import Recipe
from vlbert.recipes import unicoder_vl, vilbert, vlbert
from vlbert.variants import table

RECIPES = {
    name: make
    for module in (vlbert, unicoder_vl, vilbert)
    for name, make in vars(module).items()
    if name.startswith(("pretrain_", "finetune_")) and make.__module__ == module.__name__
}


def all_recipes() -> dict[str, Recipe]:
    """Return the recipes of all sizes, features and variants, by name."""
    recipes: dict[str, Recipe] = {}
    for make in RECIPES.values():
        choices = [_list_choices(kind) for kind in typing.get_type_hints(make).values() if kind is not Recipe]
        for values in itertools.product(*choices):
            try:
                recipe = make(*values)
            except ValueError:  # there is no such combination
                continue
            recipes.setdefault(recipe.name, recipe)
    return recipes


def print_recipes() -> None:
    """Print two tables: how VL-BERT's paper and code differ, and each recipe's batch size, learning rate and steps."""
    rows = [
        (f"`{name}`", str(recipe.data.batch), f"{recipe.optimizer.learning_rate:g}", str(recipe.steps))
        for name, recipe in all_recipes().items()
    ]
    print(table(), markdown(("recipe", "batch", "learning rate", "steps"), rows), sep="\n\n")


main = Command("vlbert recipes", print_recipes)


def _list_choices(kind: typing.Any) -> tuple:
    """Return the values that a Literal type allows, including None if the type is Literal[...] | None."""
    inner = typing.get_args(kind)
    return (None, *typing.get_args(inner[0])) if type(None) in inner else inner
