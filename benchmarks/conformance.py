"""Our loaders, scorers and rules beside what official code says about the same inputs.

    python -m benchmarks.conformance DIR

Every file expected* in DIR or below it says what official code makes of the inputs beside it (benchmarks/
conformance_cases.py: VQA, VCR, RefCOCO+, retrieval, selection of regions, geometry, caption lists). Prints how many of
how many values agree, and the first of those that do not. Exits with 1 where any does not, where such a file or an
input could not be compared (damaged, of no known kind, without inputs, without anything expected), and where there is
none.
"""

import argparse
import sys
import warnings
from pathlib import Path

from benchmarks.conformance_cases import INPUTS, KINDS, Comparison, NotCompared, read_expected

SHOWN = 3  # values that differ, of each line


def check_file(file: Path) -> list[Comparison | NotCompared | Path]:
    """All that one expected file says, compared, and the inputs; an exception where that cannot be done."""
    expected = read_expected(file)
    for knows, compared in KINDS:
        if knows(expected):
            return list(compared(file, expected))
    raise ValueError("it is of no kind that is known here")


def check_folder(folder: Path) -> bool:
    """Print the table of all that is expected in a folder and below it; is it all there, and does it all agree?"""
    if not folder.is_dir():
        print(f"there is no folder {folder}")
        return False
    files = sorted(path for path in folder.rglob("expected*") if path.is_file())
    rows, remarks, total, failed, used = [], [], [0, 0], set(), {*files}
    for file in files:
        where = str(file.parent.relative_to(folder))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = check_file(file)
        except Exception as error:  # noqa: BLE001  files may be torn anywhere; one must not keep the others from being compared
            failed.add(file)
            remarks.append(f"{file}: NOT COMPARED: {type(error).__name__}: {error}")
            continue
        remarks += [f"{file}: {warning.message}" for warning in caught]
        used |= {one for one in found if isinstance(one, Path)}
        for one in found:
            if isinstance(one, Path):
                continue
            if isinstance(one, NotCompared):
                remarks.append(f"{file}: {'NOT COMPARED' if one.fails else 'not compared'}: {one.what}")
                if one.fails:
                    failed.add(file)
                continue
            rows.append((where, one.what, one.agree, one.of))
            total = [total[0] + one.agree, total[1] + one.of]
            remarks += [f"{file}: {one.what} {line}" for line in one.differing[:SHOWN]]
            if len(one.differing) > SHOWN:
                remarks.append(f"{file}: {one.what}: {len(one.differing) - SHOWN} more differ")
        if not sum(one.of for one in found if isinstance(one, Comparison)):
            failed.add(file)
            remarks.append(f"{file}: NOT COMPARED: it holds no value")
    torn = {file.parent for file in failed}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(INPUTS)):
        if path not in used and not torn & {*path.parents}:
            failed.add(path)
            remarks.append(f"{path}: NOT COMPARED: nothing is expected of it")
    for where in dict.fromkeys(row[0] for row in rows):
        rows.append((where, "all", *(sum(row[column] for row in rows if row[0] == where) for column in (2, 3))))
    print_table([("folder", "what", "agree", "of"), *rows, ("", "all", *total)])
    silent = [path for path in folder.iterdir() if path.is_dir() and not any(path in file.parents for file in files)]
    remarks += [f"{path}: nothing is expected there" for path in sorted(silent)]
    if not failed:
        remarks += _unused(folder, used)
    print(*remarks, sep="\n")
    if not total[1]:
        print(f"nothing was compared: {folder} holds {len(files)} files expected*")
    elif total[0] < total[1] or failed:
        print(f"{total[1] - total[0]} of {total[1]} values differ, {len(failed)} files could not be compared")
    else:
        print(f"all {total[1]} values agree")
    return bool(total[1]) and total[0] == total[1] and not failed


def _unused(folder: Path, used: set[Path]) -> list[str]:
    """A line for each folder in which there are files that no expected file is about."""
    by_folder = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path not in used):
        by_folder.setdefault(path.parent, []).append(path.name)
    more = {where: f" and {len(names) - SHOWN} more" * (len(names) > SHOWN) for where, names in by_folder.items()}
    return [f"{w}: nothing expected is about {', '.join(n[:SHOWN])}{more[w]}" for w, n in by_folder.items()]


def print_table(rows: list[tuple]) -> None:
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        left, right = row[:2], row[2:]
        cells = [str(cell).ljust(width) for cell, width in zip(left, widths, strict=False)]
        cells += [str(cell).rjust(width) for cell, width in zip(right, widths[2:], strict=True)]
        print("  ".join(cells))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.conformance", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    if not check_folder(parser.parse_args(arguments).folder):
        sys.exit(1)


if __name__ == "__main__":
    main()
