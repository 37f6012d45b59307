"""Our models beside figures of the published programs: the same weights and inputs, the same numbers.

    python -m tests.parity DIR... [--precision fp32|bf16] [--plain]

Recognises what lies in each DIR and below it: cases of VL-BERT and ViLBERT (X.json with X.npz) and folders of a
detector (meta.json). Prints a line for each case, and for a detector one for each stage: how far ours is from theirs
and whether that is within the bounds. Exits with 1 if a case differs or could not be run, and if a DIR has none.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":
    # Longer vectors, too, let convolutions add in another order (vlbert.py, _convolving_as_they_did). Every x86
    # processor has these; oneDNN asks when torch is imported.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    # So do matrix products: ViLBERT's VQA logits differ by 1.0e-5 with AVX-512 and by 6.2e-6 with AVX2.
    os.environ["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"

from tests.parity import detector, vilbert, vlbert
from tests.parity.cases import Found, Row, find_cases

TITLES = {"vlbert": "VL-BERT", "vilbert": "ViLBERT", "detector": "detector"}


def rows(found: Found, precision: str, plain: bool) -> Iterator[Row]:
    """The rows of one case."""
    if found.format == "detector":
        yield from detector.compare_folder(found.path, found.name, plain)
    elif found.format == "vlbert":
        yield vlbert.report(found.path, found.name, precision)
    else:
        yield vilbert.report(found.path, found.name)


def heading(kind: str, precision: str) -> str:
    bounds = {"vlbert": vlbert.TOLERANCES[precision].bounds, "vilbert": vilbert.BOUNDS}.get(kind, {})
    return f"\n{TITLES[kind]:38} " + " ".join(f"{column:>8}" for column in bounds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, metavar="DIR", nargs="+")
    parser.add_argument("--precision", choices=vlbert.TOLERANCES, default="fp32", help="of VL-BERT (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="the detector as it learns, not in its inference form")
    options = parser.parse_args(arguments)
    found = []
    for folder in options.folders:
        cases = find_cases(folder)
        if not cases:
            sys.exit(f"{parser.prog}: no case in {folder} or below: no meta.json, no X.json with param_order_for_grad")
        found += cases
    summary, passed = [], True
    for kind, title in TITLES.items():
        cases = [case for case in found if case.format == kind]
        if not cases:
            continue
        print(heading(kind, options.precision))
        ours = []
        for case in cases:
            for row in rows(case, options.precision, options.plain):
                print(row, flush=True)
                ours.append(row)
        what = f"stages of {len(cases)} detectors" if kind == "detector" else f"{title} cases"
        summary.append(f"{sum(row.passes for row in ours)} of {len(ours)} {what} pass")
        passed = passed and bool(ours) and all(row.passes for row in ours)
    print("\n" + "\n".join(summary))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
