"""Print the tables of docs/variants.md: how paper and published code differ, and the numbers of all recipes."""

from storage.programs import make_parser
from vlbert.recipes import RECIPES
from vlbert.variants import numbers, table

if __name__ == "__main__":
    make_parser("vlbert.recipes", __doc__).parse_args()
    print(table(), numbers(RECIPES), sep="\n\n")
