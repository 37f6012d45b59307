"""Text tables: as Markdown, or aligned for terminals. Columns of numbers are right-aligned."""

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"[-+−]?[\d,.]+ ?%?|–|")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown. Cells may contain Markdown, so escape untrusted text first."""
    rows = [list(row) for row in rows]
    rule = ["---:" if right else "---" for right in _are_numbers(head, rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal, or [] if there are no rows."""
    rows = [list(row) for row in rows]
    if not rows:
        return []
    right = _are_numbers(head, rows)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = zip(row, widths, right, strict=True)
        lines.append("  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells))
    return [line.rstrip() for line in lines]


def _are_numbers(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column whether it holds only numbers. Empty cells and dashes stand for missing numbers."""
    columns = [cells for _, *cells in zip(head, *rows, strict=True)]
    return [any(cells) and all(_NUMBER.fullmatch(cell) for cell in cells) for cells in columns]
