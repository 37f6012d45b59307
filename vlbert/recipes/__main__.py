from vlbert.recipes import RECIPES
from vlbert.variants import numbers, table

print(table(), numbers(RECIPES), sep="\n\n")  # the tables of docs/variants.md
