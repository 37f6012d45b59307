"""What all formats of tests.parity share: finding and reading cases, their weights, how far two tensors differ."""

import json
import math
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One line of the report: how far ours is from theirs, by what was compared.

    differences is empty if nothing could be compared; the remark then says why. stage: of a detector's case.
    """

    case: str
    stage: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    remark: str = ""

    @property
    def passes(self) -> bool:
        return bool(self.differences) and all(value <= self.bounds[name] for name, value in self.differences.items())

    def __str__(self) -> str:
        label = f"{self.case:24} {self.stage:34}" if self.stage else f"{self.case:38}"
        numbers = [f"{value:8.1e}" for value in self.differences.values()]
        numbers += [f"{bound:7.0e}" for bound in self.bounds.values()] if self.stage else []
        verdict = ("pass" if self.passes else "FAIL") if self.differences else "NOT RUN:"
        return f"{label} {' '.join(numbers)}  {verdict}  {self.remark}".rstrip()


def not_run(case: str, stage: str, error: Exception) -> Row:
    """Return the row of what could not be compared, in one line whatever the error says."""
    message = " ".join(str(error).split())
    return Row(case, stage, remark=message if type(error) is ValueError else f"{type(error).__name__}: {message}")


def apart(ours: Tensor, theirs: Tensor, of_scale: bool = True) -> float:
    """Return the largest difference, absolute or as a share of the largest number of theirs; infinite for NaN."""
    if ours.shape != theirs.shape:
        raise ValueError(f"ours is {tuple(ours.shape)}, theirs {tuple(theirs.shape)}")
    if not theirs.numel():
        return 0.0
    worst = float((ours.detach().double() - theirs.double()).abs().max())
    if not math.isfinite(worst):
        return math.inf
    if worst == 0 or not of_scale:
        return worst
    largest = float(theirs.double().abs().max())
    return worst / largest if largest else math.inf


def relative(ours: float, theirs: float, floor: float = 1e-12) -> float:
    """Return the difference of two numbers as a share of theirs, or of the floor; infinite for NaN."""
    difference = abs(ours - theirs) / max(abs(theirs), floor)
    return math.inf if math.isnan(difference) else difference


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A case in a folder: vlbert or vilbert (path is their json), or detector (path is the folder of a meta.json)."""

    format: str
    path: Path
    name: str


def find_cases(root: Path) -> list[Found]:
    """Return every case in `root` and below it, in order of the paths; a json that is torn is one of VL-BERT's."""
    found = []
    for folder in [root, *sorted(path for path in root.rglob("*") if path.is_dir())]:
        below = folder.relative_to(root).as_posix()
        if (folder / "meta.json").exists() or any(folder.glob("img*.npz")):
            found.append(Found("detector", folder, root.resolve().name if below == "." else below))
            continue
        for file in sorted(folder.glob("*.json")):
            if kind := _kind(file):
                found.append(Found(kind, file, f"{'' if below == '.' else f'{below}/'}{file.stem}"))
    return found


def _kind(file: Path) -> str | None:
    """Return whose case a json is, or None if it is none."""
    try:
        metadata = read_json(file)
    except (ValueError, RecursionError):
        return "vlbert" if file.with_suffix(".npz").exists() else None
    if "param_order_for_grad" not in metadata:
        return None
    return "vilbert" if {"program", "layers"} & metadata.keys() else "vlbert"


def read_json(file: Path) -> dict:
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True, eq=False)
class Case:
    """One pair of files: `metadata` is the json, `arrays` the npz."""

    name: str
    metadata: dict
    arrays: dict[str, np.ndarray]

    @classmethod
    def read(cls, file: Path) -> "Case":
        with np.load(file.with_suffix(".npz")) as arrays:
            return cls(file.stem, read_json(file), dict(arrays))

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])


def check_switches(found: dict, known: dict, name: str = "config") -> None:
    """Raise ValueError if a switch, or its value, is not one that our model is built for.

    Args:
        known: by switch the values that are compared, `...` if no number of a case depends on it, or a section's own.
    """
    for key, value in found.items():
        values = known.get(key, ())
        if isinstance(values, dict):
            for section in value if isinstance(value, list) else [value]:
                check_switches(section, values, f"{name}.{key}")
        elif values is not ... and value not in values:
            only = f"compared are only {' and '.join(map(repr, values))}" if values else "no such switch is known"
            raise ValueError(f"{name}.{key} is {value!r}: {only}. Teach tests.parity what it does, or remove the case")


# --- weights and gradients --------------------------------------------------------------------------------------------


def weights(metadata: dict) -> dict[str, Tensor]:
    """Return the parameters and buffers of a case, made by the rule that stands beside each."""
    return {tensor["name"]: _fill(tensor, metadata.get("seed_offset", 0)) for tensor in metadata["tensors"]}


def _fill(tensor: dict, seed_offset: int) -> Tensor:
    """Fill by one of the rules zero, 0.02n, 1+0.02n and 1+|0.02n|, with any number; n is drawn from N(0, 1)."""
    name, rule = tensor["name"], tensor["rule"]
    if rule == "zero":
        return torch.zeros(tensor["shape"], dtype=torch.int64 if name.endswith("num_batches_tracked") else None)
    parts = re.fullmatch(r"(1\+)?(?:(\d*\.?\d+)\*?n|\|(\d*\.?\d+)\*?n\|)", str(rule).replace(" ", ""))
    if not parts:
        raise ValueError(f"{name} is to be filled by the rule {rule!r}; zero, 0.02n, 1+0.02n and 1+|0.02n| are known")
    one, scale, absolute = parts.groups()
    values = standard_normal(name, seed_offset, tensor["shape"])
    values = np.abs(values * float(absolute)) if absolute else values * float(scale)
    return torch.from_numpy(np.asarray(1 + values if one else values, np.float32))


def standard_normal(name: str, seed_offset: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the float64 numbers that belong to a parameter's name."""
    return np.random.default_rng(zlib.crc32(name.encode()) + seed_offset).standard_normal(shape)


def gradients_apart(case: Case, ours: dict[str, Tensor | None], floor: float) -> tuple[float, float]:
    """Return the worst difference of a gradient's norm and of its projection on a random direction.

    Both are relative to the norm of theirs. Gradients below `floor`, a share of the largest norm of the case, count by
    it. If both norms lie below it, both are the rounding errors of a gradient that is zero (a key's bias shifts all
    scores of a query alike), and are not compared: no two programs round alike.

    Args:
        ours: gradient by the name of their parameter; None if it has none.

    Raises ValueError if a parameter has a gradient on one side alone.
    """
    norms, dots = case.arrays["grad/l2"], case.arrays["grad/dot"]
    least = floor * np.nanmax(norms)
    worst_norm = worst_dot = 0.0
    for name, norm, dot in zip(case.metadata["param_order_for_grad"], norms, dots, strict=True):
        gradient = ours[name]
        if gradient is None or math.isnan(norm):
            if (gradient is not None and gradient.any()) or norm > 0:
                raise ValueError(f"{name} has a gradient with {'us' if gradient is not None else 'them'} alone")
            continue
        gradient = gradient.double()
        if max(float(gradient.norm()), norm) <= least:
            continue
        direction = torch.from_numpy(standard_normal(name, 1000, tuple(gradient.shape)))
        worst_norm = max(worst_norm, relative(float(gradient.norm()), norm, least))
        along = float((gradient * direction).sum())
        difference = abs(along - dot) / max(norm, least)
        worst_dot = max(worst_dot, math.inf if math.isnan(difference) else difference)
    return worst_norm, worst_dot
