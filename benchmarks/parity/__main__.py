"""Our models beside figures of the published programs: the same weights and inputs, the same numbers.

    python -m benchmarks.parity DIR... [--precision fp32|bf16] [--plain] [--json FILE]

Recognises what lies in each DIR and below it: cases of VL-BERT and ViLBERT (X.json with X.npz) and folders of a
detector (meta.json). Prints a line for each case, and for a detector one for each stage: how far ours is from theirs
and whether that is within the bounds. Exits with 1 where a case differs or could not be run, and where a DIR has none.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.parity import detector, vilbert, vlbert
from benchmarks.parity.cases import Found, Row, find_cases

TITLES = {"vlbert": "VL-BERT", "vilbert": "ViLBERT", "detector": "detector", "damaged": "damaged"}


def rows(found: Found, precision: str, plain: bool) -> Iterator[Row | str]:
    """The rows of one case; a string is a remark, and no row."""
    if found.format == "detector":
        yield from detector.compare_folder(found.path, found.name, plain)
    elif found.format == "vlbert":
        yield vlbert.report(found.path, found.name, precision)
    elif found.format == "vilbert":
        yield vilbert.report(found.path, found.name)
    else:
        yield Row(found.name, remark=found.reason)


def heading(kind: str, plain: bool) -> str:
    if kind == "vlbert":
        return f"\n{'VL-BERT':38} " + " ".join(f"{column:>8}" for column in vlbert.TOLERANCES["fp32"].bounds)
    if kind == "detector":
        form = "as it learns" if plain else "as it detects: norms folded, channels last"
        return f"\nour detector {form}\n{'detector':24} {'stage':34} {'worst':>8} {'bound':>7}"
    if kind == "vilbert":
        return f"\n{'ViLBERT':38} " + " ".join(f"{column:>8}" for column in vilbert.BOUNDS)
    return f"\n{TITLES[kind]}"


def as_json(kind: str, row: Row) -> dict:
    shown = {name: value if math.isfinite(value) else str(value) for name, value in row.differences.items()}
    return {"format": kind, **vars(row), "differences": shown, "passes": row.passes}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, metavar="DIR", nargs="+")
    parser.add_argument("--precision", choices=vlbert.TOLERANCES, default="fp32", help="of VL-BERT (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="the detector as it learns, not in its inference form")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there, too")
    options = parser.parse_args(arguments)
    found = {folder: find_cases(folder) for folder in options.folders}
    for folder, cases in found.items():
        if not cases:
            sys.exit(f"{parser.prog}: no case in {folder} or below: no meta.json, no X.json with param_order_for_grad")
    results, summary = [], []
    for kind, title in TITLES.items():
        cases = [case for of_folder in found.values() for case in of_folder if case.format == kind]
        if not cases:
            continue
        print(heading(kind, options.plain))
        ours = []
        for case in cases:
            for row in rows(case, options.precision, options.plain):
                print(row, flush=True)
                ours += [row] if isinstance(row, Row) else []
        results += [as_json(kind, row) for row in ours]
        what = f"stages of {len(cases)} detectors" if kind == "detector" else f"{title} cases"
        within = f" in {vlbert.summary(options.precision)}" if kind == "vlbert" else ""
        summary.append(f"{sum(row.passes for row in ours)} of {len(ours)} {what} pass{within}")
    print("\n" + "\n".join(summary))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"precision": options.precision, "rows": results}, indent=1) + "\n")
    sys.exit(0 if results and all(row["passes"] for row in results) else 1)


if __name__ == "__main__":
    main()
