"""Our loaders, scorers and rules beside what official code says about the same inputs.

    python -m tests.conformance DIR

Every file expected* in DIR or below it holds what official code makes of the inputs beside it (tests/conformance/
cases.py: VQA, VCR, RefCOCO+, retrieval, selection of regions, geometry, caption lists). Prints how many of how many
values agree, and those that do not. Exits with 1 if any does not, or if a file could not be compared.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.cases import compare_file, different


def check_folder(folder: Path) -> bool:
    """Print what is expected in a folder and below it, and return whether all of it agrees."""
    agree = total = failed = 0
    for file in sorted(path for path in folder.rglob("expected*") if path.is_file()):
        try:
            compared = list(compare_file(file))
        except Exception as error:  # noqa: BLE001  files may be torn anywhere; one must not keep the others from being compared
            failed += 1
            print(f"{file.relative_to(folder)}: NOT COMPARED: {type(error).__name__}: {error}")
            continue
        for what, ours, expected, tolerance in compared:
            lines, count = different(ours, expected, tolerance), len({*ours, *expected})
            agree, total = agree + count - len(lines), total + count
            print(f"{file.relative_to(folder)}: {what}: {count - len(lines)} of {count} agree")
            for line in lines[:3]:
                print(f"    {line}")
    print(f"{agree} of {total} values agree" + f", {failed} files could not be compared" * bool(failed))
    return 0 < total == agree and not failed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tests.conformance", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    if not check_folder(parser.parse_args(arguments).folder):
        sys.exit(1)


if __name__ == "__main__":
    main()
