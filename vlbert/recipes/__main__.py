"""Print the tables of docs/variants.md: how paper and published code differ, and the numbers of all recipes."""

from collections.abc import Sequence

from storage.programs import make_parser
from vlbert.recipes import RECIPES
from vlbert.variants import numbers, table


def main(arguments: Sequence[str] | None = None) -> None:
    make_parser("vlbert recipes", __doc__).parse_args(arguments)
    print(table(), numbers(RECIPES), sep="\n\n")


if __name__ == "__main__":
    main()
