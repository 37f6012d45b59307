"""One function a task and model; each returns the whole configuration of a run.

`vlbert train finetune_vqa --size large` trains finetune_vqa(size="large"):

    size      base, large, or demo: a small model that learns from the drawn scenes of `make demo`
    features  end_to_end: a Fast R-CNN is trained along; precomputed: vectors that the detector kept
    variant   whose rules and numbers, where a paper and its authors' program differ

A recipe's name, which is also its run's, says all three: finetune_vqa_large_paper. Steps are epochs of the data set
over the batch: 3.3 M captions, 213 k questions of VCR, 444 k of VQA's train2014, 120 k expressions of RefCOCO+.
`data.batch` is global: batch = GPUs x gradient_accumulation x what one GPU computes at a time, and the learning rate is
that of the recipe, whatever the number of GPUs.
"""

import itertools
import typing

from storage.programs import Command
from storage.tables import markdown
from vlbert.config import Recipe
from vlbert.recipes import unicoder_vl, vilbert, vlbert
from vlbert.variants import table

RECIPES = {
    name: made
    for module in (vlbert, unicoder_vl, vilbert)
    for name, made in vars(module).items()
    if name.startswith(("pretrain_", "finetune_")) and made.__module__ == module.__name__
}


def all_recipes() -> dict[str, Recipe]:
    """Return each recipe of each size, features and variant that there is, by its name."""
    found: dict[str, Recipe] = {}
    for make in RECIPES.values():
        choices = [_choices(kind) for kind in typing.get_type_hints(make).values() if kind is not Recipe]
        for values in itertools.product(*choices):
            try:
                recipe = make(*values)
            except ValueError:  # there is none of this kind
                continue
            found.setdefault(recipe.name, recipe)
    return found


def print_recipes() -> None:
    """Print how paper and published code of VL-BERT differ, and the numbers of all recipes, as tables."""
    rows = [
        (f"`{name}`", str(one.data.batch), f"{one.optimizer.learning_rate:g}", str(one.steps))
        for name, one in all_recipes().items()
    ]
    print(table(), markdown(("recipe", "batch", "learning rate", "steps"), rows), sep="\n\n")


main = Command("vlbert recipes", print_recipes)


def _choices(kind: typing.Any) -> tuple:
    """The values of Literal[...], or of Literal[...] | None."""
    inner = typing.get_args(kind)
    return (None, *typing.get_args(inner[0])) if type(None) in inner else inner
