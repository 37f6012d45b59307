"""Confidence intervals of means and of differences, over training seeds and test examples."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import t

_COVERAGE, _POWER = 0.95, 0.8
LEVEL = 1 - _COVERAGE  # probability of calling any pair of equal models different


def interval(scores: np.ndarray, minus: np.ndarray | None = None) -> dict[str, Any]:
    """Return the mean of scores [seeds, examples] and its 95 % confidence interval, as `mean`, `low` and `high`.

    Also returns the p-value of the hypothesis that the mean is 0 (`p`), its standard error (`error`) and the degrees of
    freedom of Student's t (`freedom`). With fewer than two seeds, all but the mean are None.

    With `minus`, return the difference of the two means. Both have the same examples, but independent seeds. Variances
    over the seeds of each and over the examples add up, and so do the degrees of freedom (Welch 1947).
    """
    groups = [scores] if minus is None else [scores, minus]
    over_examples = scores.mean(0) - (0 if minus is None else minus.mean(0))
    mean = float(over_examples.mean())
    if min(len(group) for group in groups) < 2:
        return {"mean": mean} | dict.fromkeys(("low", "high", "p", "error", "freedom"))
    means = [group.mean(1) for group in groups] + [over_examples] * (len(over_examples) > 1)
    parts = [(values.var(ddof=1) / len(values), len(values) - 1) for values in means]
    variance = sum(part for part, _ in parts)
    error = math.sqrt(variance)
    freedom = variance**2 / sum(part**2 / n for part, n in parts) if variance else math.inf
    half = float(t.ppf((1 + _COVERAGE) / 2, freedom) * error)
    p = float(2 * t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "error": error, "freedom": float(freedom)}


def correct(p: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, corrected for their number (Holm 1979)."""
    order = np.argsort(p)
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(np.asarray(p)[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return corrected.tolist()


def detectable(error: float, freedom: float, tests: int) -> float:
    """Return the difference that one of `tests` tests finds with a probability of 0.8, given its standard error."""
    return float(error * (t.ppf(1 - LEVEL / 2 / tests, freedom) + t.ppf(_POWER, freedom)))
