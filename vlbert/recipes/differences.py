"""Print how paper and published code differ, and the numbers of all recipes, as tables."""

from storage.programs import Command
from vlbert.recipes import all_recipes
from vlbert.variants import numbers, table


def print_recipes() -> None:
    """Print how paper and published code differ, and the numbers of all recipes."""
    print(table(), numbers(all_recipes()), sep="\n\n")


main = Command("vlbert recipes", print_recipes)
