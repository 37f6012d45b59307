"""ViLBERT's cases: read and held against their own description. They are not run: this version has no such layers."""

from pathlib import Path

import numpy as np

from benchmarks.parity.cases import Case, Row, not_run, weights

KINDS = ("pretrain", "vqa", "refcoco", "retrieval", "vcr", "single_stream")
PROGRAMS = ("paper", "multi_task")
NEEDS = {"single_stream": "text and regions embedded apart (single_stream)"}  # all others: layers T, V, X


def report(file: Path, name: str) -> Row:
    """Never a pass: either what is wrong with the case, or what it needs."""
    try:
        case = Case.read(file)
        check(case)
    except Exception as error:  # noqa: BLE001  files may be torn anywhere; one case must not keep the others from being read
        return not_run(name, "", error)
    needs = NEEDS.get(case.metadata["kind"], "layers T, V, X")
    return Row(name, remark=f"needs {needs}: not in this version")


def check(case: Case) -> None:
    """ValueError names what the json and the npz do not agree on, and what is unknown here."""
    metadata, arrays = case.metadata, case.arrays
    kind, layers = metadata["kind"], metadata["layers"]
    if kind not in KINDS or metadata["program"] not in PROGRAMS:
        raise ValueError(f"kind {kind} of program {metadata['program']} is unknown here")
    if not layers or set(layers) - set("J" if kind == "single_stream" else "TVX"):
        raise ValueError(f"layers are {layers!r}, which a case of kind {kind} cannot have")
    described = metadata["inputs"] | metadata["outputs"]
    if described.keys() != arrays.keys():
        raise ValueError(f"described or stored alone: {', '.join(sorted(described.keys() ^ arrays.keys()))}")
    for name, array in arrays.items():
        if [*array.shape] != described[name]["shape"] or str(array.dtype) != described[name]["dtype"]:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, the json says {described[name]}")
        if array.dtype.kind == "f" and not np.isfinite(array).all() and not name.startswith("grad/"):
            raise ValueError(f"{name} holds numbers that are NaN or infinite")
    names = metadata["param_order_for_grad"]
    missing = sorted(set(names) - weights(metadata).keys())
    if missing:
        raise ValueError(f"param_order_for_grad has parameters without a tensor: {', '.join(missing[:3])}")
    for name in ("grad/l2", "grad/sum", "grad/dot"):
        if len(arrays[name]) != len(names):
            raise ValueError(f"{name} has {len(arrays[name])} numbers for {len(names)} parameters")
