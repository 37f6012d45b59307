"""Our loaders, scorers and rules beside what official code says about the same inputs.

    python -m benchmarks.conformance DIR

Every file expected* in DIR or below it holds what official code makes of the inputs beside it (benchmarks/
conformance_cases.py: VQA, VCR, RefCOCO+, retrieval, selection of regions, geometry, caption lists). Prints how many of
how many values agree, and the first of those that do not. Exits with 1 where any does not, where a file could not be
compared (damaged, of an unknown kind, without inputs or values), and where nothing is expected of an input.
"""

import argparse
import sys
import warnings
from pathlib import Path

from benchmarks.conformance_cases import INPUTS, Comparison, compare_file

SHOWN = 3  # values that differ, of each line of the table


def check_folder(folder: Path) -> bool:
    """Print the table of all that is expected in a folder and below it; whether all of it agrees."""
    files = sorted(path for path in folder.rglob("expected*") if path.is_file())
    rows, notes, failed, used = [], [], set(), set()
    for file in files:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = list(compare_file(file))
            compared = [one for one in found if isinstance(one, Comparison)]
            if not any(one.of for one in compared):
                raise ValueError("it holds no value")
        except Exception as error:  # noqa: BLE001  files may be torn anywhere; one must not keep the others from being compared
            failed.add(file)
            notes.append(f"{file}: NOT COMPARED: {type(error).__name__}: {error}")
            continue
        used |= {one for one in found if isinstance(one, Path)}
        notes += [f"{file}: {warning.message}" for warning in caught]
        notes += [f"{file}: not compared: {one}" for one in found if isinstance(one, str)]
        for one in compared:
            rows.append((str(file.parent.relative_to(folder)), one.what, one.agree, one.of))
            notes += [f"{file}: {one.what} {line}" for line in one.differing[:SHOWN]]
            notes += [f"{file}: {one.what}: {len(one.differing) - SHOWN} more differ"] * (len(one.differing) > SHOWN)
    inputs = {path for path in folder.rglob("*") if path.is_file() and path.name.endswith(INPUTS)} - used - {*files}
    torn = {file.parent for file in failed}  # whose inputs were not read to the end
    idle = sorted(path for path in inputs if not torn & {*path.parents})
    notes += [f"{path}: NOT COMPARED: nothing is expected of it" for path in idle]
    agree, of = (sum(row[column] for row in rows) for column in (2, 3))
    sums = {where: [row for row in rows if row[0] == where] for where, *_ in rows}
    totals = [(where, "all", sum(row[2] for row in some), sum(row[3] for row in some)) for where, some in sums.items()]
    print_table([("folder", "what", "agree", "of"), *rows, *totals, ("", "all", agree, of)])
    for note in notes:
        print(note)
    failures = len(failed) + len(idle)
    if not of:
        print(f"nothing was compared: {folder} holds {len(files)} files expected*")
    elif agree < of or failures:
        print(f"{of - agree} of {of} values differ, {failures} files could not be compared")
    else:
        print(f"all {of} values agree")
    return 0 < of == agree and not failures


def print_table(rows: list[tuple]) -> None:
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [str(cell).ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        cells += [str(cell).rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        print("  ".join(cells))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.conformance", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    if not check_folder(parser.parse_args(arguments).folder):
        sys.exit(1)


if __name__ == "__main__":
    main()
